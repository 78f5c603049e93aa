"""The LightningModule: draws noise, drops labels, averages the loss.

It leaves out precision (the plugin's), weight averaging (a callback's) and sampling (`recipes.sampler`): the module
is the same for all of them. It keeps the network under the name `net` and has no other parameters or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.data import Batch
from recipes.objective import EDM
from recipes.randomness import TRAINING, keyed_generator, validation_draws


class DiffusionModule(L.LightningModule):
    """Train a class-conditional denoiser.

    Args:
        net: Network with the call `(image, noise_level, labels)` and an attribute `null_label`.
        objective: Preconditioning, weights and loss.
        optimizer: Takes the parameters, returns an optimizer.
        scheduler: Takes the optimizer, returns a learning-rate scheduler that advances once per optimizer step.
        seed: Training noise is a function of (seed, rank, epoch, batch): other noise on every rank, the same noise in
            every rerun and after every resume.

    Example:
        >>> from functools import partial
        >>> from recipes.unet import UNet
        >>> net = UNet(in_channels=1, num_classes=10)
        >>> module = DiffusionModule(net, EDM(), partial(torch.optim.AdamW, lr=2e-3))
    """

    def __init__(
        self,
        net: nn.Module,
        objective: EDM,
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
        """Labels after dropout `(batch,)`, noise levels `(batch,)` and noise `(batch, C, H, W)` of a training batch.

        Noise levels and noise are fp32 and drawn on the device of the images.
        """
        images, labels = batch["image"], batch["label"]
        generator = keyed_generator(
            TRAINING, self.seed, self.global_rank, self.current_epoch, batch_idx, device=images.device
        )
        count, device = len(images), images.device
        sigma = self.objective.sigma(torch.randn(count, generator=generator, device=device))
        noise = torch.randn(images.shape, generator=generator, device=device)
        dropped = torch.rand(count, generator=generator, device=device) < self.objective.label_dropout
        return torch.where(dropped, int(self.net.null_label), labels), sigma, noise  # type: ignore[arg-type]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean weighted denoising loss of the batch, a fp32 scalar."""
        labels, sigma, noise = self.draw(batch, batch_idx)
        loss = self.objective.loss(self.net, batch["image"], labels, sigma, noise).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start a new mean."""
        self._val_sum = torch.zeros((), device=self.device)  # fp32, whatever the network computes in
        self._val_count = torch.zeros((), device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up the loss on noise that belongs to each sample, with its label."""
        images = batch["image"]
        noise, normal = validation_draws(batch["index"], tuple(images.shape[1:]))
        losses = self.objective.loss(self.net, images, batch["label"], self.objective.sigma(normal), noise)
        self._val_sum += losses.sum()
        self._val_count += len(losses)

    def on_validation_epoch_end(self) -> None:
        """Log the exact mean over the validation set.

        Sum and count are reduced, not means: a smaller last batch or a rank with fewer batches then weighs what it
        holds. Lightning's own mean over ranks would not (Lightning-AI/pytorch-lightning#21859).
        """
        totals = self.trainer.strategy.reduce(torch.stack([self._val_sum, self._val_count]), reduce_op="sum")
        self.log("val/loss", totals[0] / totals[1], prog_bar=True)
