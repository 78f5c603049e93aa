"""Checkpoints that are there whole or not at all.

Lightning writes to the directory for temporary files and moves the result, which on another file system is a copy: a
process that is killed meanwhile leaves half a file in the place of the last good checkpoint. It leaves out what a
checkpoint holds, and when it is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO


class WholeFiles(TorchCheckpointIO):
    """Writes beside the checkpoint and renames when all of it is on the disk.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     WholeFiles().save_checkpoint({"step": 3}, f"{directory}/last.ckpt")
        ...     os.listdir(directory), torch.load(f"{directory}/last.ckpt")
        (['last.ckpt'], {'step': 3})
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`, a path on this machine's file systems.

        Raises:
            OSError: If it cannot be written; nothing is left of it then.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")  # the next attempt overwrites it
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        except (OSError, RuntimeError) as error:  # torch raises either when a disk is full
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"{target} could not be written, what was there before is untouched: {error}. Free some space, then go "
                "on from the last checkpoint: resume=auto."
            ) from error
