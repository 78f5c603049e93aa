"""What the recipes do while they train.

Sample grids, speed and the configuration to look at; a validation at the end; a checkpoint when they are interrupted.
It leaves out what stock callbacks do (other checkpoints, learning rate) and what belongs to the precision plugin (loss
scale, skipped steps, gradient norm, averaged weights).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from lightning_mixprec import MasterWeightAveraging
from lightning_mixprec.sharding import is_sharded
from recipes.config import flatten
from recipes.diffusion import DiffusionModule
from recipes.images import count_non_finite, image_grid, save_png
from recipes.loading import Batch
from recipes.sampler import Sampler, draw_samples

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""After which a run is to end with a checkpoint."""


class SampleGrid(L.Callback):
    """After every validation, a class-conditional grid is drawn from the averaged weights.

    The grid goes to TensorBoard (`samples`) and to a PNG per validation; the starting noise is always the same, so the
    pictures of a run can be compared. Rank 0 draws it, and the others go on and wait at their next collective; under
    FSDP2 all draw the same, since every layer is gathered from all of them.

    Args:
        sampler: Solver.
        directory: Where the PNG files go.
        per_class: Rows of the grid, one column per class.
        guidance: See `recipes.sampler.guided`.
        seed: Of the starting noise.
    """

    def __init__(
        self, sampler: Sampler, directory: str, per_class: int = 8, guidance: float = 1.0, seed: int = 0
    ) -> None:
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
        shape = trainer.datamodule.image_shape  # type: ignore[attr-defined]
        with averaged_weights(trainer, pl_module):
            samples = draw_samples(
                pl_module.net, pl_module.objective, self.sampler, shape, self.per_class, self.guidance, self.seed
            )
        if not trainer.is_global_zero:
            return
        samples = trainer.datamodule.to_images(samples)  # type: ignore[attr-defined]
        bad = count_non_finite(samples)
        if bad:
            print(
                f"warning: {bad} of {len(samples)} samples are not finite (red in the grid), step {trainer.global_step}"
            )
        grid = image_grid(samples, columns=len(samples) // self.per_class)
        self.last_path = self.directory / f"step{trainer.global_step:06d}.png"
        save_png(grid, self.last_path)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("samples", grid, trainer.global_step)
                logger.experiment.add_scalar("samples/non_finite", bad, trainer.global_step)


def averaged_weights(trainer: L.Trainer, module: L.LightningModule) -> contextlib.AbstractContextManager[Any]:
    """Context with the averaged weights in `module`, or with its own if nothing averages them."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MasterWeightAveraging):
            return callback.averaged_weights(module)
    return contextlib.nullcontext()


class ImagesPerSecond(L.Callback):
    """Log training images per second over all ranks, validation and sampling time left out.

    The mean since the last logging step, so no device is synchronised for it.
    """

    def __init__(self) -> None:
        self._images = 0
        self._since = 0.0

    def _restart(self) -> None:
        self._images = 0
        self._since = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._restart()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start again: what happened since the last batch was not training."""
        self._restart()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count, and log at Lightning's logging steps."""
        self._images += len(batch["image"]) * trainer.world_size
        if trainer._logger_connector.should_update_logs:
            pl_module.log("perf/images_per_second", self._images / (time.perf_counter() - self._since))
            self._restart()


class ValidateAtEnd(L.Callback):
    """Make the last training batch be followed by a validation, whatever `val_check_interval` says.

    So the checkpoint, the sample grid and the validation loss of a finished run are those of its last step. Lightning
    validates before it obeys `should_stop`, which here only says what it is about to do anyway.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Recognise the last batch."""
        steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        if steps_done or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True


class SaveOnInterruption(L.Callback):
    """On Ctrl-C, SIGTERM or SIGUSR1, finish the step, save a checkpoint and stop, so that nothing is lost.

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
            for name in SIGNALS:
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


class RunRecord(L.Callback):
    """Keep the resolved configuration with what it produced.

    It is text in TensorBoard and `hparams.yaml` at the start, plain containers under `recipe` in every checkpoint (so
    that `recipes.sample` can rebuild the network, and `torch.load(weights_only=True)` reads the file) with the number
    of `processes` beside it, and one line of TensorBoard's HParams tab with the final validation loss at the end.

    Args:
        config: Plain dicts, lists and scalars.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the configuration as text."""
        text = OmegaConf.to_yaml(OmegaConf.create(self.config))
        for logger in self._writers(trainer):
            logger.experiment.add_text("config", "\n".join("    " + line for line in text.splitlines()))
            logger.hparams.update(self.config)  # what the logger writes to hparams.yaml

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the configuration to the checkpoint."""
        checkpoint["recipe"] = self.config
        checkpoint["processes"] = trainer.world_size

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one HParams entry, with a metric that is real."""
        final = trainer.callback_metrics.get("val/loss")
        if final is None:
            return
        for logger in self._writers(trainer):
            logger.log_hyperparams(flatten(self.config), {"hparams/val_loss": float(final)}, step=trainer.global_step)

    @staticmethod
    def _writers(trainer: L.Trainer) -> list[TensorBoardLogger]:
        return [x for x in trainer.loggers if trainer.is_global_zero and isinstance(x, TensorBoardLogger)]
