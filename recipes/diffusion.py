"""The LightningModule: draws noise, drops labels, averages the loss.

It leaves out precision (the plugin's), weight averaging (a callback's) and sampling (`recipes.sampler`): the module
is the same for all of them. It keeps the network under the name `net` and has no other parameters or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.sharding import is_sharded, shard_
from recipes.denoising import Objective
from recipes.loading import Batch
from recipes.randomness import TRAINING, keyed_generator, validation_draws


class DiffusionModule(L.LightningModule):
    """Train a class-conditional denoiser.

    Args:
        net: Network with the call `(image, noise_level, labels)` and an attribute `null_label`.
        objective: Times, preconditioning, weights and loss.
        optimizer: Takes the parameters, returns an optimizer.
        scheduler: Takes the optimizer, returns a learning-rate scheduler that advances once per optimizer step.
        seed: Training noise is a function of (seed, rank, epoch, batch): other noise on every rank, the same noise in
            every rerun and after every resume.

    Example:
        >>> from functools import partial
        >>> from recipes.objective import EDM
        >>> from recipes.unet import UNet
        >>> net = UNet(in_channels=1, num_classes=10)
        >>> module = DiffusionModule(net, EDM(), partial(torch.optim.AdamW, lr=2e-3))
    """

    def __init__(
        self,
        net: nn.Module,
        objective: Objective,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.net = net
        self.objective = objective
        self.seed = seed
        self._make_optimizer = optimizer
        self.make_scheduler = scheduler
        self._val_sum = torch.zeros(())
        self._val_count = torch.zeros(())
        self._step_losses: list[Tensor] = []  # fp32 [], of the batches that the next optimizer step accumulates
        self._train_sum = torch.zeros(())  # fp32, of the epoch's batches whose update was taken
        self._train_count = 0
        self._skipped_count = 0

    def configure_model(self) -> None:
        """Shard the network under FSDP2; once, since Lightning calls this before every stage."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded(self):
            policy = self.trainer.precision_plugin.policy  # type: ignore[attr-defined]
            shard_(self, policy, self.device_mesh["data_parallel"])  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        """The optimizer, and the scheduler if there is one."""
        optimizer = self.make_optimizer()
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }

    def make_optimizer(self) -> Optimizer:
        """One optimizer over all trainable parameters."""
        return self._make_optimizer(p for p in self.parameters() if p.requires_grad)

    def draw(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Labels after dropout `(batch,)`, times `(batch,)` and noise `(batch, C, H, W)` of a training batch.

        Times and noise are fp32 and drawn on the device of the images.
        """
        images, labels = batch["image"], batch["label"]
        generator = keyed_generator(
            TRAINING, self.seed, self.global_rank, self.current_epoch, batch_idx, device=images.device
        )
        count, device = len(images), images.device
        time = self.objective.draw(count, generator)
        noise = torch.randn(images.shape, generator=generator, device=device)
        dropped = torch.rand(count, generator=generator, device=device) < self.objective.label_dropout
        return torch.where(dropped, int(self.net.null_label), labels), time, noise  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean weighted loss of the batch, a fp32 scalar."""
        labels, time, noise = self.draw(batch, batch_idx)
        loss = self.objective.loss(self.net, batch["image"], labels, time, noise).mean()
        self._step_losses.append(loss.detach())
        return loss

    def on_train_epoch_start(self) -> None:
        """Start a new mean; a run resumed in the middle of an epoch starts it there."""
        self._reset_train_loss()

    def _reset_train_loss(self) -> None:
        self._step_losses = []
        self._train_sum = torch.zeros((), device=self.device)
        self._train_count = self._skipped_count = 0

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the batch's loss and add it up, unless the update that it belongs to was skipped.

        A skipped batch taught the weights nothing, and its loss may be infinite: a mean with it in it would be too.
        """
        if self.trainer.fit_loop._should_accumulate():
            return
        losses, self._step_losses = self._step_losses, []
        if getattr(self.trainer.precision_plugin, "step_was_skipped", False):
            self._skipped_count += len(losses)
            return
        self._train_sum = self._train_sum.to(self.device) + torch.stack(losses).sum()
        self._train_count += len(losses)
        self.log("train/loss", losses[-1], prog_bar=True)

    def on_train_epoch_end(self) -> None:
        """Log the mean over the epoch's batches on all ranks, and the number of those left out.

        Callbacks such as EarlyStopping find the mean under `train/loss` too; for loggers that is the batch's loss.
        """
        counts = [torch.tensor(float(n), device=self.device) for n in (self._train_count, self._skipped_count)]
        totals = self.trainer.strategy.reduce(torch.stack([self._train_sum.to(self.device), *counts]), reduce_op="sum")
        if totals[1] > 0:
            mean = totals[0] / totals[1]
            self.log("train/loss", mean, logger=False)
            self.log("train/loss_epoch", mean)
        self.log("train/skipped_batches", totals[2])
        self._reset_train_loss()

    def on_validation_epoch_start(self) -> None:
        """Start a new mean."""
        self._val_sum = torch.zeros((), device=self.device)  # fp32, whatever the network computes in
        self._val_count = torch.zeros((), device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up the loss on noise that belongs to each sample, with its label."""
        images = batch["image"]
        noise, normal = validation_draws(batch["index"], tuple(images.shape[1:]))
        losses = self.objective.loss(self.net, images, batch["label"], self.objective.times(normal), noise)
        self._val_sum += losses.sum()
        self._val_count += len(losses)

    def on_validation_epoch_end(self) -> None:
        """Log the exact mean over the validation set.

        Sum and count are reduced, not means: a smaller last batch or a rank with fewer batches then weighs what it
        holds. Lightning's own mean over ranks would not (Lightning-AI/pytorch-lightning#21859).
        """
        totals = self.trainer.strategy.reduce(torch.stack([self._val_sum, self._val_count]), reduce_op="sum")
        loss = totals[0] / totals[1]
        self.log("val/loss", loss, prog_bar=True, logger=False)
        if not self.trainer.sanity_checking:
            # Lightning would log it at the index of the last batch, one less than the number of steps, under which
            # checkpoint, sample grid and its file are found.
            for logger in self.trainer.loggers:
                logger.log_metrics({"val/loss": float(loss)}, step=self.trainer.global_step)
