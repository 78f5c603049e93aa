"""A callback for tests of the command line: `+callbacks.probe._target_=probe.Probe`."""

import io
import os
import signal
from pathlib import Path

import lightning as L
import torch


class Probe(L.Callback):
    """Keeps what each rank draws, in `directory/rankN.pt`; in one batch of one rank, counted from 1, does something.

    `action` is the name of a signal that the process sends to itself, or `raise`.
    """

    def __init__(self, directory: str, rank: int = -1, batch: int = -1, action: str = "") -> None:
        self.directory, self.rank, self.batch, self.action = Path(directory), rank, batch, action
        self.drawn: list[dict] = []

    def on_train_start(self, trainer, pl_module):
        draw = type(pl_module).draw

        def record(batch, batch_idx):
            labels, sigma, noise = draw(pl_module, batch, batch_idx)
            key = {"epoch": trainer.current_epoch, "step": trainer.global_step, "index": batch["index"]}
            self.drawn.append({**key, "labels": labels, "sigma": sigma, "noise": noise})
            if (trainer.global_rank, len(self.drawn)) == (self.rank, self.batch):
                if self.action == "raise":
                    raise RuntimeError("planted")
                os.kill(os.getpid(), signal.Signals[self.action])
            return labels, sigma, noise

        pl_module.draw = record

    def teardown(self, trainer, pl_module, stage):
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(self.drawn, self.directory / f"rank{trainer.global_rank}.pt")


class KillOnce(L.Callback):
    """Kills its process as `kill -9` does, in a training batch (counted from 1) or in the middle of a checkpoint.

    Only if the file `mark` is not there yet, so that the same command runs to its end the second time.
    """

    def __init__(self, mark: str, batch: int = -1, checkpoint: int = -1) -> None:
        self.mark, self.batch, self.checkpoint = Path(mark), batch, checkpoint
        self.batches = self.checkpoints = 0

    def _kill(self):
        self.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1
        if self.batches == self.batch and not self.mark.exists():
            self._kill()

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.checkpoints += 1
        if self.checkpoints == self.checkpoint and not self.mark.exists():
            save = torch.save

            def half(content, file, *args, **kwargs):
                whole = io.BytesIO()
                save(content, whole)
                file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
                file.flush()
                self._kill()

            torch.save = half
