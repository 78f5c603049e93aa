"""Which checkpoint to resume from, and whether it can continue the run that is configured.

Lightning answers a checkpoint of another model with a traceback that lists every tensor, and a step count that is
already reached by doing nothing. Here both are refused beforehand, and what else differs is said in one line. Which run
`resume=auto` goes on with is decided in `recipes.earlier_runs`. It leaves out restoring, which Lightning does, and
drawing samples from a checkpoint (`recipes.sample`).
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from recipes.config import ConfigError, build, flatten, quoted


def find_checkpoint(config: dict[str, Any], output_dir: Path) -> Path | None:
    """The checkpoint to resume from.

    Args:
        config: Of `ckpt_path`, None starts anew; `last` means the newest `last.ckpt` of this run directory and its
            siblings, which are the earlier runs of the experiment (jobs of sweeps included); `auto` means the
            `last.ckpt` of this very directory, and to start anew as long as there is none; anything else is a path,
            relative to where the command was typed. `resume=auto` has chosen the directory and means `auto`.
        output_dir: This run's directory.
    """
    ckpt_path = "auto" if config.get("resume") == "auto" else config["ckpt_path"]
    if ckpt_path is None:
        return None
    if ckpt_path == "auto":
        own = output_dir / "checkpoints" / "last.ckpt"
        found = own if own.is_file() else None
        # Other processes, which repeat resume=auto, look here too; a ckpt_path beside it would be refused.
        return found if config.get("resume") else _settled(found)
    if ckpt_path == "last":
        root = output_dir.parent
        newest = newest_of(root)
        if newest is None:
            raise ConfigError(
                f"ckpt_path=last: no earlier run was found. Looked for {root}/*/checkpoints/last.ckpt. "
                "Leave ckpt_path out to start anew, or give the path of a checkpoint."
            )
        return _settled(newest)
    path = Path(to_absolute_path(ckpt_path)) if HydraConfig.initialized() else Path(ckpt_path).absolute()
    refuse_folder(str(ckpt_path), path)
    if not path.is_file():
        raise ConfigError(
            f"ckpt_path={ckpt_path}: there is no file {path}. Write ckpt_path=last for the newest checkpoint of this "
            "experiment, or the path of a .ckpt file."
        )
    return path


def refuse_folder(given: str, path: Path) -> None:
    """Say which file is meant where `ckpt_path` names a directory, such as that of a run."""
    if path.is_dir():
        last = next(path.rglob("last.ckpt"), None)
        remedy = f"ckpt_path={last}" if last else "the path of a .ckpt file"
        raise ConfigError(f"ckpt_path={given} is a directory. Write {remedy}.")


def newest_of(*experiments: Path) -> Path | None:
    """The newest `last.ckpt` of the runs in these directories, jobs of sweeps included, or None."""
    runs = ("*", "sweep_*/*")
    found = [path for each in experiments for run in runs for path in each.glob(f"{run}/checkpoints/last.ckpt")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _settled(path: Path | None) -> Path | None:
    """Processes that Lightning starts repeat the command line: they must not search again and find something else."""
    sys.argv.append(f"ckpt_path={quoted(path) if path else 'null'}")
    return path


def read(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU, without unpickling anything that could run code."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        if isinstance(error, pickle.UnpicklingError):  # torch would have it unpickled all the same
            reason = "it is no file of torch.save, or holds more than tensors, numbers and texts"
        elif isinstance(error, PermissionError):
            reason = str(error.strerror)
        else:
            reason = "it is empty, cut off or damaged" + f" ({str(error).partition('. ')[0]})" * bool(str(error))
        raise ConfigError(
            f"ckpt_path={path} cannot be read as a checkpoint: {reason}. Give a .ckpt file that recipes.train wrote."
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ConfigError(f"ckpt_path={path} is no checkpoint of a Trainer: it has no entry 'state_dict'.")
    return checkpoint


def check_fits(checkpoint: dict[str, Any], config: dict[str, Any], module: nn.Module, path: Path) -> None:
    """Refuse a checkpoint of another model, with the first tensor that differs and the options that made it.

    Args:
        checkpoint: As `read` returns it.
        config: This run's configuration, plain.
        module: What the weights would be loaded into.
        path: For the error.
    """
    found, wanted = checkpoint["state_dict"], module.state_dict()
    problems = [
        f"'{name}' is {_size(found.get(name))} in the checkpoint and {_size(wanted.get(name))} in this run's model"
        for name in [*wanted, *(name for name in found if name not in wanted)]
        if _size(found.get(name)) != _size(wanted.get(name))
    ]
    if not problems:
        return
    more = f" ({len(problems) - 1} more tensors differ)" if len(problems) > 1 else ""
    theirs = checkpoint.get("recipe", {}).get("model")
    options = differences({"model": theirs}, {"model": config["model"]}) if theirs else []
    made = f" The models: {'; '.join(options)} (checkpoint -> this run)." if options else ""
    raise ConfigError(
        f"ckpt_path: {path} does not fit: {problems[0]}{more}.{made} Choose the model that the checkpoint was trained "
        "with, or leave ckpt_path out to train this one from the start."
    )


def _size(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def check_whole(checkpoint: dict[str, Any], path: Path) -> None:
    """Refuse a checkpoint of weights alone, such as those of `save_weights_only=true`.

    Raises:
        ConfigError: With what it lacks.
    """
    needed = ("optimizer_states", "lr_schedulers", "loops", "pytorch-lightning_version")
    if missing := [entry for entry in needed if entry not in checkpoint]:
        raise ConfigError(
            f"ckpt_path={path} holds weights without what a run needs to go on ({', '.join(missing)}). Give a "
            "checkpoint that was not saved with save_weights_only=true, or leave ckpt_path out to start anew."
        )


def check_optimizer(checkpoint: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Refuse another kind of optimizer, which could not go on with the state of the checkpoint's.

    Other settings of the same kind are honoured (`recipes.own_settings`).
    """
    theirs = ((checkpoint.get("recipe") or {}).get("optimizer") or {}).get("_target_")
    ours = config["optimizer"]["_target_"]
    if theirs not in (None, ours):
        raise ConfigError(
            f"optimizer._target_={ours}: {path} holds the state of {theirs}, with which it cannot go on. Write "
            f"optimizer._target_={theirs}, or leave ckpt_path out to start anew."
        )


def check_last(config: dict[str, Any], callbacks: list[Any], output_dir: Path) -> None:
    """Refuse `resume=auto` where nothing writes the checkpoint that it would go on from.

    Args:
        config: This run's configuration, plain.
        callbacks: Of this run.
        output_dir: This run's directory.
    """
    folder = (output_dir / "checkpoints").resolve()
    writers = [c for c in callbacks if isinstance(c, ModelCheckpoint) and (c.filename == "last" or c.save_last)]
    if config.get("resume") and any(c.save_weights_only for c in writers):
        raise ConfigError(
            "resume=auto goes on from last.ckpt, and with callbacks.last.save_weights_only=true that holds no state of "
            "the optimizer to go on with. Leave it out."
        )
    if config.get("resume") and not any(c.dirpath and Path(c.dirpath).resolve() == folder for c in writers):
        raise ConfigError(
            f"resume=auto goes on from {folder / 'last.ckpt'}, and no callback writes that. Leave callbacks.last as it "
            "is; for checkpoints in another place as well, add a ModelCheckpoint: +callbacks.mine._target_=CLASS."
        )


def check_steps(checkpoint: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Refuse a resume that has nothing to do."""
    step, limit = checkpoint.get("global_step", 0), config["trainer"].get("max_steps", -1)
    if limit != -1 and limit <= step:
        raise ConfigError(
            f"trainer.max_steps={limit}: {path} is at step {step} already, so nothing would be trained. Write "
            f"trainer.max_steps=NUMBER with a number above {step}, or leave ckpt_path out to start anew."
        )


def logger_of(
    config: dict[str, Any], checkpoint: dict[str, Any] | None, path: Path | None, output_dir: Path
) -> list[Logger]:
    """The logger, or several by names as callbacks are; where a run goes on in its own directory, so do its curves.

    What the interrupted run logged after the checkpoint is logged again. TensorBoard is told to forget the first
    version: everything from the step after the checkpoint's on. The table of Lightning's CSVLogger, which would delete
    it, stays as metrics_part1.csv, and so on.
    """
    if not (node := config.get("logger")):
        return []
    nodes = {"logger": node} if "_target_" in node else {f"logger.{name}": each for name, each in node.items() if each}
    again = checkpoint is not None and path is not None and output_dir in path.parents
    table = output_dir / "metrics.csv"
    if again and getattr(rank_zero_only, "rank", 0) == 0 and table.is_file():
        table.replace(output_dir / f"metrics_part{len(list(output_dir.glob('metrics_part*.csv'))) + 1}.csv")
    purge = {"purge_step": checkpoint["global_step"] + 1} if again and checkpoint is not None else {}
    return [
        build(nodes, name, **(purge if each["_target_"].endswith("TensorBoardLogger") else {}))
        for name, each in nodes.items()
    ]


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What differs between a checkpoint's configuration and this run's, as `key old -> new`.

    The directories of the two runs are the same thing under two names, and `ckpt_path` says where a run came from.

    Example:
        >>> differences({"seed": 0, "model": {"a": 1}}, {"seed": 1, "model": {"a": 1, "b": 2}})
        ['model.b not set -> 2', 'seed 0 -> 1']
    """
    old, new = (_portable(config) for config in (theirs, ours))
    keys = [key for key in sorted(old.keys() | new.keys()) if key not in ("ckpt_path", "resume")]
    return [
        f"{key} {old.get(key, 'not set')} -> {new.get(key, 'not set')}" for key in keys if old.get(key) != new.get(key)
    ]


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    root = config.get("trainer", {}).get("default_root_dir")
    values = flatten(config)
    return {k: v.replace(root, "RUN", 1) if root and str(v).startswith(root) else v for k, v in values.items()}


def report_differences(checkpoint: dict[str, Any], config: dict[str, Any], trainer: L.Trainer, data: Any) -> None:
    """Say in one line what this run does otherwise than the one that it continues; resuming goes on all the same."""
    if not trainer.is_global_zero or "recipe" not in checkpoint:
        return
    changed = differences(checkpoint["recipe"], config)
    processes = checkpoint.get("processes", trainer.world_size)
    if processes != trainer.world_size:
        changed.append(f"processes {processes} -> {trainer.world_size}")
    for split, now in (("training", len(data.train)), ("validation", len(data.val))):
        if (before := checkpoint.get("images", {}).get(split, now)) != now:  # which puts them all in another order
            changed.append(f"{split} images {before} -> {now}")
    if changed:
        print(f"changed since the checkpoint: {', '.join(changed)}")
