"""Metrics that a callback looks at before anybody has logged them: Lightning ends the run there.

What nobody ever logs is refused before (`recipes.settings`). It leaves out metrics that come from callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from recipes.config import ConfigError

EACH_EPOCH = ("train/loss_epoch", "train/skipped_batches")
"""Logged at the end of an epoch; `train/loss` is at every `trainer.log_every_n_steps`-th step as well."""


def check_monitors(trainer: L.Trainer, callbacks: Mapping[str, object], batches: int) -> None:
    """Refuse metrics of training that are looked at before they are known.

    Args:
        trainer: Made, not started.
        callbacks: By the names that they have in the configuration.
        batches: Of an epoch.

    Raises:
        ConfigError: With the metric, when it is known, and when it is looked at.

    Example:
        >>> check_monitors(L.Trainer(logger=False, accelerator="cpu"), {}, batches=11)
    """
    problems = []
    for name, callback in callbacks.items():
        if not isinstance(callback, ModelCheckpoint | EarlyStopping):
            continue
        metric = callback.monitor
        first = _first_look(trainer, callback, batches)
        if first is None or metric not in ("train/loss", *EACH_EPOCH):
            continue
        known, logged = batches + 1, trainer.log_every_n_steps * trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        if metric == "train/loss" and logged:
            known = min(known, logged)
        if first < known:
            when = f"after the {batches} batches of an epoch" if known > batches else f"after {known} batches"
            option = "save_on" if isinstance(callback, ModelCheckpoint) else "check_on"
            problems.append(
                f"{name}.monitor={metric} is known {when}, and looked at after {first}. Write {name}.monitor=val/loss, "
                f"or {name}.{option}_train_epoch_end=true."
            )
    if problems:
        raise ConfigError(*problems)


def _first_look(trainer: L.Trainer, callback: ModelCheckpoint | EarlyStopping, batches: int) -> int | None:
    """Batches before the callback first looks at its metric; None: at the end of an epoch, or a time decides."""
    timed = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    each_epoch = epochs == 1 and interval == 1.0 and not timed
    if isinstance(callback, ModelCheckpoint):
        if callback._train_time_interval is not None:
            return None
        if callback._every_n_train_steps:
            return callback._every_n_train_steps * trainer.accumulate_grad_batches
        chosen = callback._save_on_train_epoch_end
        each_epoch = each_epoch or (epochs == 1 and trainer.limit_val_batches == 0)
    else:
        chosen = callback._check_on_train_epoch_end
    if (each_epoch if chosen is None else chosen) or timed or trainer.limit_val_batches == 0:
        return None
    within = max(int(batches * interval), 1) if isinstance(interval, float) else interval
    return within if epochs is None else (epochs - 1) * batches + within
