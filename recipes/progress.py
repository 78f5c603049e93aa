"""How far a run is: a bar on a terminal, a line now and then in a file.

Why it exists: a bar that is redrawn after every batch reads the loss from the device every time, and fills a log file
with a line per batch. (Rich's bar would show "Epoch 3/-2", since the number of epochs is open.)
"""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from recipes.run_length import run_length


class ProgressLine(TQDMProgressBar):
    """On a terminal Lightning's bar, refreshed every 10 batches; elsewhere a line, at most every 10 seconds.

    Both show what was logged with `prog_bar=True`: losses, loss scale, skipped batches.

    Args:
        refresh_rate: Batches between two updates of the bar.
        seconds: Between two lines, which are written at Lightning's logging steps.

    Raises:
        ValueError: If `seconds` is negative.

    Example:
        >>> ProgressLine(seconds=60).seconds
        60
    """

    def __init__(self, refresh_rate: int = 10, seconds: float = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative.")
        self.seconds = seconds
        self._last = -float("inf")  # when the last line was written
        self._epoch = 0  # of the last batch: at the end of training, Lightning counts the next one
        self._due = False  # a line, once the module has logged the loss of its step, which it does after this callback

    @property
    def is_enabled(self) -> bool:
        """Whether there is a bar to draw."""
        return super().is_enabled and sys.stdout.isatty()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Write the line of the step before, and of a validation after it."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._due:
            self._write(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar, or see if it is time for a line."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._epoch = trainer.current_epoch
        if sys.stdout.isatty() or not self._enabled or not trainer._logger_connector.should_update_logs:
            return
        if time.monotonic() - self._last >= self.seconds and not trainer.should_stop:
            self._due = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last line, which the last validation comes before."""
        super().on_train_end(trainer, pl_module)
        if not sys.stdout.isatty() and self._enabled:
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        self._last, self._due = time.monotonic(), False
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        steps = run_length(trainer, getattr(data, "steps_per_epoch", None)).steps
        shown = [f"epoch {self._epoch}", f"step {trainer.global_step}{f'/{steps}' if steps is not None else ''}"]
        shown += [f"{name} {short(float(value))}" for name, value in trainer.progress_bar_metrics.items()]
        print("  ".join(shown), flush=True)


def short(value: float) -> str:
    """Four digits, but whole numbers in full.

    Example:
        >>> short(32768.0), short(0.44271)
        ('32768', '0.4427')
    """
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
