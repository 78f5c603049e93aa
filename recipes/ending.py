"""How a run ends: with a validation of its last step, when its time is over, and with a checkpoint if interrupted.

It leaves out what stock callbacks do (other checkpoints).
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""After which a run is to end with a checkpoint; the last is sent when the terminal is gone."""


def heeded() -> list[signal.Signals]:
    """Signals to listen for here: under `nohup` the end of the terminal is none of them.

    Example:
        >>> signal.SIGTERM in heeded()
        True
    """
    return [name for name in SIGNALS if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN]


class ValidateAtEnd(L.Callback):
    """Make the last training batch be followed by a validation, whatever interval of batches or epochs is given.

    So the checkpoint, the sample grid and the validation loss of a finished run are those of its last step. Lightning
    validates before it obeys `should_stop`, which here only says what it is about to do anyway; but not in an epoch
    that `check_val_every_n_epoch` leaves out.
    """

    def __init__(self) -> None:
        self._every_n_epoch: list[int | None] = []  # what was given, while it is not obeyed

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Recognise the last batch."""
        steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        if steps_done or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        if stops and trainer.check_val_every_n_epoch not in (None, 1):
            self._every_n_epoch.append(trainer.check_val_every_n_epoch)
            trainer.check_val_every_n_epoch = 1

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the trainer as it was."""
        while self._every_n_epoch:
            trainer.check_val_every_n_epoch = self._every_n_epoch.pop()


class TimeLimit(Timer):
    """`trainer.max_time` of one command: a run that goes on has its time anew.

    Lightning's Timer counts on from the checkpoint, so a run that it has ended would end again at once.

    Attributes:
        reached: Whether it has asked the run to end.

    Example:
        >>> limit = TimeLimit("00:01:30:00")
        >>> limit.load_state_dict({"time_elapsed": {"train": 5000.0}})
        >>> limit.time_remaining(), limit.reached
        (5400.0, False)
    """

    reached = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Forget what earlier commands took."""

    def _check_time_remaining(self, trainer: L.Trainer) -> None:
        others, trainer.should_stop = trainer.should_stop, False
        super()._check_time_remaining(trainer)  # the same answer on all ranks
        self.reached = trainer.should_stop and not others
        trainer.should_stop = trainer.should_stop or others


class SaveOnInterruption(L.Callback):
    """On Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, finish the step, save a checkpoint and stop, so that nothing is lost.

    A terminal that is closed sends SIGHUP, but for commands that `nohup` lets ignore it: those go on.

    SIGUSR1 is what SLURM is asked to send before a job's time is over (`--signal=USR1@90`): the job is then put back
    into the queue. Lightning would save inside of the signal handler, on each process somewhere else.

    Several processes stop after the same step, whichever of them got the signal. That takes one small reduction per
    step, for which nothing waits longer: Lightning itself exchanges a flag at the start of every batch. A second signal
    stops at once, without saving.

    Args:
        path: The checkpoint.

    Attributes:
        signal: The signal that was received, here or by another process, if any.
        saved: Whether the checkpoint was written because of it.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.signal: signal.Signals | None = None
        self.saved = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget an earlier fit."""
        self.signal, self.saved = None, False

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen from here on."""
        self._listen()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen, in place of Lightning's handlers. Lightning puts back all handlers when `fit` ends."""
        self._listen()

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for name in heeded():
                signal.signal(name, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, ask the loop to stop, unless a validation comes first, which would be cut short.

        Nor at the end of an epoch: Lightning 2.6 does not resume bit for bit from there.
        """
        loop = trainer.fit_loop
        validates = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
        if not (loop._should_accumulate() or validates or trainer.is_last_batch):
            self._agree(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save here what was to be saved after the step, as ModelCheckpoint does: Lightning resumes from there too."""
        if not trainer.sanity_checking and self._agree(trainer):
            self._save(trainer)

    def _agree(self, trainer: L.Trainer) -> bool:
        """Whether some process got a signal; then Lightning will stop before the next batch."""
        if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps):
            return False  # that was the last step anyway
        # Lightning 2.6 raises SIGTERMException where the batch, or the epoch, is over.
        if trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False):
            requeue = trainer.strategy.reduce_boolean_decision(self.signal == signal.SIGUSR1, all=False)
            self.signal = signal.SIGUSR1 if requeue else self.signal or signal.SIGTERM  # another process got it
            trainer._signal_connector.received_sigterm = True
        return trainer.received_sigterm

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save, if every process is here and between two steps."""
        if isinstance(exception, SIGTERMException) and not self.saved and self.signal is not None:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self.saved = True
