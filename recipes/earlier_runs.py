"""With which earlier run `resume=auto` goes on: the newest of the same configuration, if it was interrupted.

It goes on in that run's own directory, so that one run stays one directory: one line of curves in TensorBoard, one
`result.json`, one place to look for checkpoints. A directory that was given (`hydra.run.dir`, a job of a sweep) is
taken as it is. It leaves out which checkpoint is read and whether it fits (`recipes.resume`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf

from recipes.config import ConfigError, plain
from recipes.ending import TimeLimit
from recipes.resume import differences
from recipes.run_length import EPOCHS
from recipes.sweep import RESULT

RECORD = Path(".hydra", "config.yaml")
"""What Hydra writes into the directory of a run before it starts."""

LOCK = ".lock"
"""Locked while a process trains in its directory; the system unlocks it however the process ends."""

ABOUT_RESUMING = ("ckpt_path", "resume", "dry_run")
"""Keys in which two runs of one configuration may differ."""

LIMITS = ("trainer.max_steps", "trainer.max_epochs")
"""Keys in which a complete run may differ from one that asks for no more."""


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
    return None if _ended(newest) else newest


def _ended(run: Path) -> dict[str, Any]:
    """Outcome of a run that has nothing left to do, or nothing: it failed, was interrupted, or its time was over."""
    path = run / RESULT
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {} if found.get("out_of_time") else found


def _comparable(config: Any) -> Any:
    """Plain containers as YAML and JSON read them back, without what may differ."""
    read = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(config)), resolve=False)
    if not isinstance(read, dict):
        return None
    if isinstance(trainer := read.get("trainer"), dict):
        trainer.pop("max_time", None)  # of the command, not of the run
    return json.loads(json.dumps({k: v for k, v in read.items() if k not in ABOUT_RESUMING}, default=str))


def outcome_of(trainer: L.Trainer, config: DictConfig, validation_loss: float | None) -> dict[str, Any]:
    """What `result.json` keeps of a run that ended well: what `complete_run` asks about, and what came out.

    Args:
        trainer: After `fit`.
        config: Composed, references unresolved.
        validation_loss: Of the last validation.
    """
    epochs = trainer.current_epoch - (not trainer.is_last_batch)  # Lightning counts one that was broken off
    most = _limits(trainer.max_steps, trainer.max_epochs)
    done = any(limit <= reached for limit, reached in zip(most, (trainer.global_step, epochs), strict=True))
    in_time = not any(isinstance(c, TimeLimit) and c.reached for c in trainer.callbacks)  # type: ignore[attr-defined]
    return {
        "steps": trainer.global_step,
        "validation_loss": validation_loss,
        "epochs": epochs,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "out_of_time": not (done or in_time),
        "config": _comparable(config),
    }


def outcome_of_checkpoint(directory: Path, config: DictConfig) -> dict[str, Any] | None:
    """Outcome of a run that was killed between its last checkpoint and its `result.json`: there is no step left.

    Args:
        directory: Of the run.
        config: Composed, references unresolved.

    Returns:
        Nothing if there is a result, if steps are left, or if another configuration took them.
    """
    path, limit = directory / "checkpoints" / "last.ckpt", config.trainer.get("max_steps", -1)
    if "config" in _ended(directory) or limit == -1 or not path.is_file():
        return None
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # no tensor is read
    if saved["global_step"] < limit or differences(saved.get("recipe", {}), plain(config)):
        return None
    return {
        "steps": saved["global_step"],
        "validation_loss": saved.get("validation_loss"),
        "epochs": saved["epoch"],
        "max_steps": limit,
        "max_epochs": config.trainer.get("max_epochs") or -1,
        "out_of_time": False,
        "config": _comparable(config),
    }


def complete_run(directory: Path, config: DictConfig) -> dict[str, Any] | None:
    """Outcome of the run in this directory if it is complete: it ended well, and no more is asked for now.

    It may have ended before its limits, by early stopping for one; so more is asked for only if a limit is higher than
    it was, and neither is reached. One that `trainer.max_time` has ended is not complete.

    Args:
        directory: Of the run.
        config: Composed, references unresolved.

    Raises:
        ConfigError: If it is complete, and of another configuration.
    """
    found = _ended(directory)
    if "config" not in found:  # a job that failed
        return None
    asked = _limits(**{key: config.trainer.get(key) for key in ("max_steps", "max_epochs")})
    before = _limits(found["max_steps"], found["max_epochs"])
    reached = (found["steps"], found["epochs"])
    more = any(new > old for new, old in zip(asked, before, strict=True)) and all(
        limit > done for limit, done in zip(asked, reached, strict=True)
    )
    changed = [text for text in differences(found["config"], _comparable(config)) if text.split()[0] not in LIMITS]
    if changed:
        raise ConfigError(
            f"resume=auto: the run in {directory} is complete and had another configuration: {', '.join(changed)} "
            "(that run -> this one). Give this one a directory of its own: hydra.run.dir=PATH, or hydra.sweep.dir=PATH "
            "for a sweep."
        )
    return None if more else found


def _limits(max_steps: int | None, max_epochs: int | None) -> tuple[float, float]:
    """Steps and epochs after which Lightning ends; without any limit it stops after 1000 epochs."""
    steps = math.inf if max_steps in (None, -1) else max_steps
    if max_epochs is None:
        return steps, EPOCHS if steps == math.inf else math.inf
    return steps, math.inf if max_epochs == -1 else max_epochs


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
                f"{directory}: another process is training there, perhaps since a moment ago. Wait for its end, or "
                "give this run a directory of its own: hydra.run.dir=PATH."
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
