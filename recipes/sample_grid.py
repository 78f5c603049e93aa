"""What the network draws while it trains: always from the same noise, so that the pictures of a run can be compared.

It leaves out drawing afterwards (`recipes.sample`).
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_mixprec import MasterWeightAveraging
from lightning_mixprec.sharding import is_sharded
from recipes.diffusion import DiffusionModule
from recipes.images import count_non_finite, image_grid, save_png
from recipes.sampler import Sampler, draw_samples


class SampleGrid(L.Callback):
    """After every validation, a class-conditional grid is drawn from the averaged weights.

    The grid goes to TensorBoard (`samples`) and to a PNG per validation, and the share of images with a non-finite
    pixel to `samples/non_finite`. Rank 0 draws it, and the others go on and wait at their next collective; under FSDP2
    all draw the same, since every layer is gathered from all of them.

    Args:
        sampler: Solver.
        directory: Where the PNG files go.
        per_class: Rows of the grid, one column per class.
        guidance: See `recipes.sampler.guided`.
        seed: Of the starting noise.

    Raises:
        ValueError: For what the first grid would fail with, after an epoch of training.

    Example:
        >>> from recipes.sampler import EulerSampler
        >>> SampleGrid(EulerSampler(steps=2), "outputs/samples", per_class=0)
        Traceback (most recent call last):
        ValueError: per_class=0 must be a whole number of at least 1.
    """

    def __init__(
        self, sampler: Sampler, directory: str, per_class: int = 8, guidance: float = 1.0, seed: int = 0
    ) -> None:
        for name, value, least in (("per_class", per_class, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value} must be a whole number of at least {least}.")
        if not math.isfinite(guidance):
            raise ValueError(f"guidance={guidance} must be a finite number.")
        self.sampler = sampler
        self.directory = Path(directory)
        self.per_class = per_class
        self.guidance = guidance
        self.seed = seed
        self.last_path: Path | None = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw, unless this is Lightning's sanity check before training."""
        if trainer.sanity_checking or not (trainer.is_global_zero or is_sharded(pl_module)):
            return
        assert isinstance(pl_module, DiffusionModule)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        with averaged_weights(trainer, pl_module):
            samples = draw_samples(
                pl_module.net,
                pl_module.objective,
                self.sampler,
                data.image_shape,
                self.per_class,
                self.guidance,
                self.seed,
            )
        if not trainer.is_global_zero:
            return
        images = data.to_images(samples)
        bad = count_non_finite(images)
        if bad:
            print(
                f"warning: {bad} of {len(images)} samples are not finite (red in the grid), step {trainer.global_step}"
            )
        grid = image_grid(images, columns=len(images) // self.per_class)
        self.last_path = self.directory / f"step{trainer.global_step:06d}.png"
        save_png(grid, self.last_path)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", grid, trainer.global_step)
                logger.experiment.add_scalar("samples/non_finite", bad / len(images), trainer.global_step)


def averaged_weights(trainer: L.Trainer, module: L.LightningModule) -> contextlib.AbstractContextManager[Any]:
    """Context with the averaged weights in `module`, or with its own if nothing averages them."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MasterWeightAveraging):
            return callback.averaged_weights(module)
    return contextlib.nullcontext()
