"""A learning rate that falls when a metric has stopped improving: `scheduler=plateau`.

Why it exists: Lightning asks such a schedule for its metric by the batches of an epoch, while validations are counted
over epochs, and only after the checkpoint of a validation was written, so that a resumed run misses what the validation
decided. Here the schedule steps where a validation has its result: once for each, before anything is saved.

It leaves out schedules over steps, which Lightning advances (`recipes.first_step` tries them out).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer, lr_scheduler

from recipes.config import ConfigError
from recipes.hints import did_you_mean
from recipes.run_length import RunLength

MONITOR = "val/loss"
"""What a schedule waits for that does not say."""

STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
"""What a checkpoint knows of it; the rest is configured."""


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's, which knows the metric that it waits for. A resumed run has its own settings, not the checkpoint's.

    Args:
        optimizer: Whose learning rates fall.
        monitor: A metric that is logged by the end of a validation.
        **settings: As torch's class takes them.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = ReduceLROnPlateau(optimizer, monitor="train/loss_epoch", factor=0.5, patience=0)
        >>> for loss in (1.0, 0.5, 0.5):
        ...     schedule.step(loss)
        >>> schedule.monitor, optimizer.param_groups[0]["lr"]
        ('train/loss_epoch', 0.05)
    """

    def __init__(self, optimizer: Optimizer, monitor: str = MONITOR, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.monitor = monitor

    def state_dict(self) -> dict[str, Any]:
        """What it has seen so far."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there. Settings, which torch's class saves too, are left out; other schedules save less."""
        super().load_state_dict({name: state_dict[name] for name in STATE if name in state_dict})


def configured(scheduler: Any) -> dict[str, Any]:
    """What Lightning is told of a schedule: one over steps it advances itself, one that waits for a metric it keeps.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> config = configured(ReduceLROnPlateau(optimizer))
        >>> config["monitor"], config["interval"]
        ('val/loss', 'step')
    """
    config = {"scheduler": scheduler, "interval": "step"}
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        # A frequency that is never reached: `after_validation` steps it.
        config |= {"monitor": getattr(scheduler, "monitor", MONITOR), "frequency": sys.maxsize}
    return config


def after_validation(trainer: L.Trainer, metrics: Mapping[str, Any]) -> None:
    """Step the schedules that wait for a metric.

    A metric of training may still be on its way in the first epoch; then there is nothing to judge yet.

    Args:
        trainer: That has validated in `fit`.
        metrics: What was logged so far.

    Raises:
        ConfigError: If a metric is not there; with those that are.
    """
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau:
            continue
        name = str(config.monitor)
        if name in metrics:
            config.scheduler.step(float(metrics[name]))  # type: ignore[arg-type]
        elif not name.startswith("train/"):
            raise ConfigError(
                f"scheduler.monitor={name}: nothing has logged that by the end of a validation."
                f"{did_you_mean(name, metrics)} Logged are: {', '.join(sorted(metrics))}."
            )


def check(scheduler: lr_scheduler.ReduceLROnPlateau, length: RunLength) -> None:
    """Refuse a schedule that would wait for ever, and warn of one that is too patient for the run.

    Args:
        scheduler: Made.
        length: Of the run.

    Raises:
        ConfigError: If no validation comes before the end of the run.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> check(ReduceLROnPlateau(optimizer), RunLength(steps=100, validations=0))
        Traceback (most recent call last):
        recipes.config.ConfigError: scheduler: it steps after validations, and none comes before the end of the run. ...
    """
    if length.validations == 0:
        raise ConfigError(
            "scheduler: it steps after validations, and none comes before the end of the run. Write "
            "trainer.val_check_interval=NUMBER with fewer batches than the run has (and a trainer.limit_val_batches "
            "above 0), or choose scheduler=constant or scheduler=warmup."
        )
    needed = scheduler.patience + 2  # the first is the best so far; more than `patience` after it must be no better
    if length.validations is not None and length.validations < needed:
        rank_zero_warn(
            f"scheduler.patience={scheduler.patience}: the learning rate cannot fall before validation {needed}, and "
            f"the run has {length.validations} before its end. Write a smaller scheduler.patience, or a smaller "
            "trainer.val_check_interval."
        )
