"""How long a run is: its optimizer steps and its validations, as Lightning will count them.

Why it exists: a schedule is made for a number of steps, and what a user writes are epochs, shares of epochs, batches
and accumulated batches. It leaves out what ends a run earlier (early stopping, `trainer.max_time`).
"""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Timer

EPOCHS = 1000
"""After which Lightning ends a run that has no limit."""


class RunLength(NamedTuple):
    """What is known before a run; None stands for a number that is open.

    Attributes:
        steps: Optimizer steps of the run.
        steps_per_epoch: Of an epoch, as far as the trainer's limits leave it.
        validations: Those that something is trained after: the one at the end of the run is none of them.

    Example:
        >>> RunLength(steps=400)
        RunLength(steps=400, steps_per_epoch=None, validations=None)
    """

    steps: int | None = None
    steps_per_epoch: int | None = None
    validations: int | None = None


def run_length(trainer: L.Trainer, steps_per_epoch: int | None = None) -> RunLength:
    """The length of a run with this trainer.

    Args:
        trainer: Made, not started.
        steps_per_epoch: Of the data as a whole, for any number of processes and accumulated batches; None if the data
            are not here.

    Example:
        >>> quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
        >>> trainer = L.Trainer(max_epochs=3, limit_train_batches=0.5, accumulate_grad_batches=2, **quiet)
        >>> run_length(trainer, steps_per_epoch=11)
        RunLength(steps=18, steps_per_epoch=6, validations=2)
    """
    accumulated = trainer.accumulate_grad_batches
    batches = None
    if steps_per_epoch is not None:
        batches = limited(steps_per_epoch * accumulated, trainer.limit_train_batches)
        steps_per_epoch = -(-batches // accumulated)  # Lightning steps at the end of an epoch
    limits = [trainer.max_steps] if trainer.max_steps != -1 else []
    epochs = trainer.max_epochs
    if epochs is None and not limits and not any(isinstance(each, Timer) for each in trainer.callbacks):  # type: ignore[attr-defined]
        epochs = EPOCHS
    if steps_per_epoch is not None and epochs not in (None, -1):
        limits.append(epochs * steps_per_epoch)
    steps = min(limits, default=None)
    return RunLength(steps, steps_per_epoch, _validations(trainer, steps, batches))


def limited(batches: int, limit: float | None) -> int:
    """Batches of an epoch under one of Lightning's limits: an int is their number, a float their share.

    Example:
        >>> limited(11, 0.5), limited(11, 3), limited(11, 30), limited(11, 1.0), limited(11, None)
        (5, 3, 11, 11, 11)
    """
    if limit is None:
        return batches
    return int(batches * limit) if isinstance(limit, float) else min(batches, limit)


def _validations(trainer: L.Trainer, steps: int | None, batches: int | None) -> int | None:
    """How often a validation is followed by training, with `batches` in an epoch."""
    if trainer.limit_val_batches == 0:
        return 0
    if steps is None or trainer._val_check_time_interval is not None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None  # the last is a trial of a longer run
    interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    accumulated = trainer.accumulate_grad_batches
    total = steps * accumulated
    if batches:
        whole, rest = divmod(steps, -(-batches // accumulated))
        total = whole * batches + rest * accumulated
    if epochs is None:  # batches are counted over epochs
        return (total - 1) // int(interval)
    if not batches:
        return None
    every = max(int(batches * interval), 1) if isinstance(interval, float) else interval
    return sum(
        1
        for batch in range(every, batches + 1, every)
        for epoch in range(epochs - 1, -(-total // batches), epochs)
        if epoch * batches + batch < total
    )
