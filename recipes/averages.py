"""Averages that do not fit the length of a run: of weights from before training, and more snapshots than a disk holds.

It leaves out what `MasterWeightAveraging` refuses by itself.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_mixprec import ConstantDecay, PowerFunction
from recipes.config import ConfigError

TRIAL = 100
"""Steps of a run that is too short for its average to matter."""

STALE = 0.3
"""Share of the untrained weights in the last average that would show in samples."""


def check_average(ema: Any, steps: int | None) -> None:
    """Say if the average that validates would still be made of untrained weights when the run ends.

    With a decay of 0.9999 it is after 400 steps, and its samples are noise (openai/improved-diffusion#59).

    Args:
        ema: The callback, or None.
        steps: Of the run, as far as they are known.

    Example:
        >>> import warnings
        >>> from lightning_mixprec import MasterWeightAveraging
        >>> with warnings.catch_warnings(record=True) as said:
        ...     check_average(MasterWeightAveraging(0.9999), steps=400)
        >>> str(said[0].message)[-58:]
        'Write ema=warmup or ema=power, or a decay of at most 0.98.'
    """
    for name, profile in list(getattr(ema, "profiles", {}).items())[:1]:
        if steps is None or steps < TRIAL or not isinstance(profile, ConstantDecay) or profile.warmup or ema.avg_fn:
            continue
        stale = profile.decay**steps
        if stale > STALE:
            key = "decay" if name == "constant" and len(ema.profiles) == 1 else f"profiles.{name}.decay"
            shorter = round(1 - float(f"{8 / steps:.1g}"), 10)
            rank_zero_warn(
                f"ema.{key}={profile.decay}: after the {steps} steps of the run, {stale:.0%} of the averaged weights, "
                "which validate and draw the samples, are those from before training. Write ema=warmup or ema=power, "
                f"or a decay of at most {shorter}."
            )


def check_snapshots(config: dict[str, Any], ema: Any, module: nn.Module, steps: int | None) -> None:
    """Refuse more snapshots than there is room for: the disk would be full in the middle of the run.

    Args:
        config: The whole configuration, for the error.
        ema: The callback, or None.
        module: Whose trained parameters are averaged.
        steps: Of the run, as far as they are known.

    Raises:
        ConfigError: With their number and size, and an interval that fits.
    """
    every = getattr(ema, "snapshot_every", None)
    if not every or steps is None:
        return
    widths = sum(isinstance(profile, PowerFunction) for profile in ema.profiles.values())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    size = widths * trained * (2 if ema.snapshot_dtype == "fp16" else 4)
    directory = Path(ema.snapshot_dir or config["trainer"].get("default_root_dir") or ".").absolute()
    there = next(place for place in (directory, *directory.parents) if os.path.lexists(place))
    free, count = shutil.disk_usage(there).free, steps // every
    if count * size > free:
        fewer = -(-steps // 100)
        raise ConfigError(
            f"ema.snapshot_every={every}: {count:,} snapshots of {size / 1e9:,.2g} GB each are more than the "
            f"{free / 1e9:,.0f} GB that are free in {there}. Write ema.snapshot_every={max(fewer, every)} for a "
            "hundred, ema.snapshot_dtype=fp16, or ema.snapshot_dir=PATH."
        )
