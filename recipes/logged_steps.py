"""The step under which a resumed run logs: that of the uninterrupted one.

Why it exists: Lightning 2.6 counts what it logs under apart from `global_step`, saves the count before a step is added,
and adds it after loading only where the same step would be validated again. A checkpoint of a run's last step, which is
validated whatever the interval says, then goes on one step too low: every curve, and the steps that are logged at all.
It leaves out which steps are logged, which is Lightning's.
"""

from __future__ import annotations

from typing import Any

import lightning as L


class LoggedSteps(L.Callback):
    """Keeps the number of steps that were logged under or could have been, in every checkpoint.

    It stands before callbacks that log at the start of a batch.

    Example:
        >>> LoggedSteps().state_dict()
        {}
    """

    def __init__(self) -> None:
        self._trainer: L.Trainer | None = None
        self._before, self._batch = 0, 0  # steps before this batch, and its number over all epochs
        self._resumed: int | None = None  # steps to go on from, until the first batch

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count anew."""
        self._trainer, self._before, self._batch, self._resumed = trainer, 0, 0, None

    def state_dict(self) -> dict[str, Any]:
        """`steps`, the one that was just taken included."""
        if self._trainer is None:
            return {}
        if self._resumed is not None:
            return {"steps": self._resumed}
        loop = self._trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress.total
        stepped = 0 < self._batch == batches.ready == batches.processed and not loop._should_accumulate()
        return {"steps": max(self._before + stepped, loop._batches_that_stepped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._resumed = state_dict.get("steps")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put the count right, after all that Lightning does with it to resume."""
        loop = trainer.fit_loop.epoch_loop
        if self._resumed is not None:
            loop._batches_that_stepped, self._resumed = self._resumed, None
        self._before, self._batch = loop._batches_that_stepped, loop.batch_progress.total.ready
