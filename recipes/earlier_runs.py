"""With which earlier run `resume=auto` goes on: the newest of the same configuration, if it was interrupted.

It goes on in that run's own directory, so that one run stays one directory: one line of curves in TensorBoard, one
`result.json`, one place to look for checkpoints. A directory that was given (`hydra.run.dir`, a job of a sweep) is
taken as it is. It leaves out which checkpoint is read and whether it fits (`recipes.resume`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.config import ConfigError
from recipes.sweep import RESULT

RECORD = Path(".hydra", "config.yaml")
"""What Hydra writes into the directory of a run before it starts."""

LOCK = ".lock"
"""Locked while a process trains in its directory; the system unlocks it however the process ends."""

ABOUT_RESUMING = ("ckpt_path", "resume", "dry_run")
"""Keys in which two runs of one configuration may differ."""


def interrupted_run(config: DictConfig, runs: Path) -> Path | None:
    """Directory of the run to go on with, or None to start a new one.

    Args:
        config: Composed, references unresolved, so that directories are the same in all runs.
        runs: Directory of the experiment's runs.
    """
    wanted = _comparable(config)
    found = [
        (checkpoint.stat().st_mtime, checkpoint.parent.parent)
        for checkpoint in runs.glob("*/checkpoints/last.ckpt")
        if (record := checkpoint.parent.parent / RECORD).is_file() and _comparable(OmegaConf.load(record)) == wanted
    ]
    free = [(time, run) for time, run in found if not _is_held(run)]
    if not free:
        return None
    _, newest = max(free)
    return None if (newest / RESULT).is_file() else newest


def _comparable(config: Any) -> Any:
    """Plain containers as YAML reads them back, without what may differ."""
    read = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config)), resolve=False)
    return {k: v for k, v in read.items() if k not in ABOUT_RESUMING} if isinstance(read, dict) else None


def is_complete(directory: Path, max_steps: int) -> bool:
    """Whether the run in this directory ended well, with all the steps that are asked for."""
    path = directory / RESULT
    if not path.is_file():
        return False
    steps = json.loads(path.read_text()).get("steps")
    return steps is not None and steps >= max_steps


@contextlib.contextmanager
def held(directory: Path, mine: bool) -> Iterator[None]:
    """Keep the directory of a run from being taken for that of an interrupted one.

    Args:
        directory: Of the run.
        mine: Whether this is the process that writes there.

    Raises:
        ConfigError: If another process trains there.
    """
    if not mine:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"hydra.run.dir={directory}: another process is training there. Wait for its end, or leave "
                "hydra.run.dir out."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield


def _is_held(directory: Path) -> bool:
    try:
        with (directory / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never locked, or a file system without locks
        return False
    return False
