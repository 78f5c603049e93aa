"""The LightningModule: draws noise, drops labels, logs the loss.

It leaves out precision (the plugin's), weight averaging (a callback's) and sampling (`recipes.sampler`): the module
is the same for all of them. It keeps the network under the name `net` and has no other parameters or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.sharding import is_sharded, shard_
from recipes import plateau
from recipes.denoising import Objective
from recipes.loading import Batch
from recipes.loss_means import LossSums, quartiles
from recipes.randomness import TRAINING, keyed_generator, validation_draws


class DiffusionModule(L.LightningModule):
    """Train a class-conditional denoiser.

    Args:
        net: Network with the call `(image, noise_level, labels)` and an attribute `null_label`.
        objective: Times, preconditioning, weights and loss.
        optimizer: Takes the parameters, returns an optimizer.
        scheduler: Takes the optimizer, returns a learning-rate scheduler that advances once per optimizer step, or a
            ReduceLROnPlateau, which does once per validation.
        seed: Training noise is a function of (seed, rank, epoch, batch): other noise on every rank, the same noise in
            every rerun and after every resume.

    Example:
        >>> from functools import partial
        >>> from recipes.objective import EDM
        >>> from recipes.unet import UNet
        >>> net = UNet(in_channels=1, num_classes=10)
        >>> module = DiffusionModule(net, EDM(), partial(torch.optim.AdamW, lr=2e-3))
    """

    custom_scalars: ClassVar = {
        "Loss": {
            "training loss": ["train/loss$"],
            "training loss by noise, q1 the least": ["train/loss_q.*"],
            "validation loss, averaged and raw weights": ["val/loss$", "val/loss_raw$"],
            "validation loss by noise, q1 the least": ["val/loss_q.*"],
        }
    }
    """Charts for TensorBoard's custom-scalars page, which `PrecisionMonitor` lays out."""

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
        self._edges = quartiles(objective)  # (3,)
        self._val = LossSums(self._edges)
        self._step: list[tuple[Tensor, Tensor]] = []  # losses and times of what the next optimizer step accumulates
        self._train = LossSums(self._edges)  # of batches whose update was taken, since they were logged
        self._epoch_loss, self._epoch_samples, self._epoch_skipped = 0.0, 0.0, 0  # of all ranks, as far as logged
        self._judged = 0  # step of the last validation that schedules have seen

    def configure_model(self) -> None:
        """Shard the network under FSDP2; once, since Lightning calls this before every stage."""
        if self._trainer is None:  # `load_from_checkpoint` calls this, too
            return
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded(self):
            policy = self.trainer.precision_plugin.policy  # type: ignore[attr-defined]
            shard_(self, policy, self.device_mesh["data_parallel"])  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        """The optimizer, and the scheduler if there is one."""
        optimizer = self.make_optimizer()
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": plateau.configured(self.make_scheduler(optimizer))}

    def make_optimizer(self, parameters: Iterable[nn.Parameter] | None = None) -> Optimizer:
        """One optimizer over all trainable parameters, or over others."""
        return self._make_optimizer(
            (p for p in self.parameters() if p.requires_grad) if parameters is None else parameters
        )

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
        losses = self.objective.loss(self.net, batch["image"], labels, time, noise)
        self._step.append((losses.detach(), time))
        return losses.mean()

    def on_train_epoch_start(self) -> None:
        """Start new means; in a run resumed in the middle of an epoch Lightning does not call this."""
        self._step, self._train = [], LossSums(self._edges.to(self.device))
        self._epoch_loss, self._epoch_samples, self._epoch_skipped = 0.0, 0.0, 0

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Count the losses in, unless the update that they belong to was skipped; log them at Lightning's steps.

        A skipped batch taught the weights nothing, and its loss may be infinite: a mean with it in it would be too.
        The mean is over all samples of all ranks since it was logged last, or since the epoch began.
        """
        if self.trainer.fit_loop._should_accumulate():
            return
        taken, self._step = self._step, []
        if getattr(self.trainer.precision_plugin, "step_was_skipped", False):
            self._epoch_skipped += len(taken)
        else:
            for losses, time in taken:
                self._train.add(losses, time)
        if self.trainer._logger_connector.should_update_logs:
            means = self._logged()
            for logger in self.trainer.loggers:
                step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
                logger.log_metrics({f"train/{name}": mean for name, mean in means.items()}, step=step)
            if means:
                # A tensor on the host: Lightning reads what the progress bar shows after every batch.
                self.log("train/loss", torch.tensor(means["loss"]), prog_bar=True, logger=False)

    def _logged(self) -> dict[str, float]:
        """Means over all ranks of what was counted, which then counts for the epoch. All ranks call this."""
        sums, self._train = self._over_ranks(self._train), LossSums(self._edges.to(self.device))
        loss, samples = sums.totals.sum(dim=1).tolist()
        self._epoch_loss, self._epoch_samples = self._epoch_loss + loss, self._epoch_samples + samples
        return sums.means()

    def on_train_epoch_end(self) -> None:
        """Log the mean over the epoch's samples on all ranks, and the number of batches left out.

        Callbacks such as EarlyStopping find the mean under `train/loss` too; for loggers that is a shorter mean.
        """
        self._logged()
        skipped = torch.full((), float(self._epoch_skipped), device=self.device)
        if self._epoch_samples:
            mean = self._epoch_loss / self._epoch_samples
            self.log("train/loss", mean, logger=False)
            self.log("train/loss_epoch", mean)
        self.log("train/skipped_batches", self.trainer.strategy.reduce(skipped, reduce_op="sum"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was counted, under `losses`: a resumed run then logs what the uninterrupted one does.

        What was logged is of all ranks. What was not yet is this rank's share, so that none waits for others here.
        """
        checkpoint["losses"] = {
            "totals": self._train.totals.cpu(),
            "pending": [(losses.cpu(), time.cpu()) for losses, time in self._step],
            "epoch": [self._epoch_loss, self._epoch_samples, self._epoch_skipped],
            "judged": self._judged,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting: all ranks from what was logged, rank 0 also from its own share."""
        held = checkpoint.get("losses")  # checkpoints of other modules have none
        if held is None:
            return
        self._epoch_loss, self._epoch_samples, self._epoch_skipped = held["epoch"]
        self._judged = held.get("judged", 0)  # not in checkpoints of before
        if self.global_rank == 0:
            self._train.totals = held["totals"].clone()
            self._step = [(losses.to(self.device), time.to(self.device)) for losses, time in held["pending"]]

    def on_validation_epoch_start(self) -> None:
        """Start new means."""
        self._val = LossSums(self._edges.to(self.device))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count the loss in, on noise that belongs to each sample, with its label."""
        self._measure(batch, self._val)

    def _measure(self, batch: Batch, sums: LossSums) -> None:
        noise, normal = validation_draws(batch["index"], tuple(batch["image"].shape[1:]))
        time = self.objective.times(normal)
        sums.add(self.objective.loss(self.net, batch["image"], batch["label"], time, noise), time)

    def on_validation_epoch_end(self) -> None:
        """Log the exact mean over the validation set, in total and by noise.

        Sum and count are reduced, not means: a smaller last batch or a rank with fewer batches then weighs what it
        holds. Lightning's own mean over ranks would not (Lightning-AI/pytorch-lightning#21859).
        """
        means = self._over_ranks(self._val).means()
        self.log("val/loss", means["loss"], prog_bar=True, logger=False)
        if self.trainer.sanity_checking:
            return
        if self.trainer.state.fn == "fit" and any(isinstance(c, WeightAveraging) for c in self.trainer.callbacks):  # type: ignore[attr-defined]
            means["loss_raw"] = self._raw_loss()
            self.log("val/loss_raw", means["loss_raw"], logger=False)
        # Lightning would log it at the index of the last batch, one less than the number of steps, under which
        # checkpoint, sample grid and its file are found.
        for logger in self.trainer.loggers:
            logger.log_metrics({f"val/{name}": mean for name, mean in means.items()}, step=self.trainer.global_step)
        if self.trainer.state.fn == "fit" and self.trainer.global_step != self._judged:  # not the same weights again
            self._judged = self.trainer.global_step
            plateau.after_validation(self.trainer, self.trainer.callback_metrics)

    def _raw_loss(self) -> float:
        """The same with the weights that are trained, in a second pass: the averaged ones have left the module by now.

        Callbacks' hooks come before the module's in Lightning 2.6, and `WeightAveraging` puts the weights back in it.
        """
        sums = LossSums(self._edges.to(self.device))
        limit = self.trainer.num_val_batches[0]
        loader: Any = self.trainer.val_dataloaders
        for batch in islice(loader, None if limit == float("inf") else int(limit)):
            self._measure(self.trainer.strategy.batch_to_device(batch, self.device), sums)
        return self._over_ranks(sums).means()["loss"]

    def _over_ranks(self, sums: LossSums) -> LossSums:
        """What all ranks have counted together; all of them call this."""
        sums.totals = self.trainer.strategy.reduce(sums.totals.to(self.device), reduce_op="sum")
        return sums
