"""What is written out of range or at odds with itself: no type tells, no constructor minds, and training would.

It leaves out what takes built objects to tell (`recipes.checks`, `recipes.first_step`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from recipes.config import ConfigError
from recipes.hints import did_you_mean
from recipes.signatures import located

NEEDED = ("data", "model", "objective", "sampler", "precision", "trainer", "optimizer")
"""Parts without which there is nothing to train."""

LOGGED = ("train/loss", "train/loss_epoch", "train/skipped_batches", "val/loss", "epoch", "step")
"""What a callback can monitor in every run; `val/loss_raw` needs weight averaging."""

LOGGED_BY_CALLBACKS = ("lr-", "scale", "skipped")
"""How names begin that callbacks of the recipes log."""

LESS_IS_BETTER, MORE_IS_BETTER = {"loss", "error", "skipped"}, {"acc", "accuracy"}
"""Words in the names of metrics that say what a good value is."""

OURS = ("lightning.", "lightning_mixprec.", "recipes.")
"""Where callbacks are defined whose metrics are known."""

DURATION = re.compile(r"(?!0*:00:00:00)\d+:\d\d:\d\d:\d\d")

WRONG: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accumulate_grad_batches": (lambda value: value < 1, "must be the batches of one step, at least 1"),
    "gradient_clip_val": (lambda value: value < 0, "would clip nothing; it must be above 0, or left out"),
    "limit_train_batches": (lambda value: value == 0, "trains nothing; dry_run=true trains on one batch"),
    "log_every_n_steps": (lambda value: value < 0, "must be a number of steps"),
    "max_epochs": (lambda value: value < -1 or value == 0, "trains nothing; it must be at least 1, or -1 for no limit"),
    "max_steps": (lambda value: value < -1 or value == 0, "trains nothing; it must be at least 1, or -1 for no limit"),
    "max_time": (
        lambda value: not any(value.values()) if isinstance(value, dict) else not DURATION.fullmatch(value.strip()),
        "must be a duration above 0, 'DD:HH:MM:SS'",
    ),
    "val_check_interval": (lambda value: value == 0, "must be a number of batches, or a share of an epoch, above 0"),
}
"""Arguments of the trainer that Lightning takes as they are: what is wrong, and what is right."""


def check_settings(config: dict[str, Any]) -> None:
    """Refuse a configuration without one of its parts, values out of range, and arguments that exclude each other.

    Args:
        config: Plain containers, compared with signatures before.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems = [
        f"{part} is missing: nothing builds it. Choose an option of the group, {part}=NAME; --help lists them."
        for part in NEEDED
        if not (isinstance(config.get(part), dict) and "_target_" in config[part])
    ]
    problems += run_problems(config)
    if config.get("resume") and config.get("ckpt_path") not in (None, "auto"):
        problems.append(
            f"resume=auto chooses the checkpoint, and ckpt_path={config['ckpt_path']} names one. Leave one of them out."
        )
    ema = config.get("ema") or {}
    if ema.get("profiles") and "decay" in ema:
        problems.append(
            f"ema.decay={ema['decay']} and ema.profiles are two ways to say the same. Write ~ema.decay, which an "
            "experiment may have set, to average by the profiles, or ema=default to average by the decay."
        )
    for key in ("total_iters", "T_max"):  # torch's would stay at the first step's factor for good, or run backwards
        steps = (config.get("scheduler") or {}).get(key, 1)
        if isinstance(steps, int) and steps < 1:
            problems.append(
                f"scheduler.{key}={steps} must be a number of optimizer steps, at least 1. Write one, or choose "
                "scheduler=constant for none."
            )
    problems += monitor_problems(config)
    problems += mode_problems(config)
    if problems:
        raise ConfigError(*problems)


def run_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with the seed and the trainer's arguments, by themselves and with the callbacks.

    Example:
        >>> run_problems({"seed": 0, "trainer": {"_target_": "lightning.Trainer", "max_steps": 0}})
        ['trainer.max_steps=0 trains nothing; it must be at least 1, or -1 for no limit.']
    """
    settings, callbacks = config.get("trainer") or {}, config.get("callbacks") or {}
    found = [
        f"trainer.{key}={settings[key]} {right}."
        for key, (wrong, right) in WRONG.items()
        if settings.get(key) is not None and wrong(settings[key])
    ]
    interval = settings.get("val_check_interval")
    if isinstance(interval, float) and settings.get("check_val_every_n_epoch", 1) is None:
        found.append(
            f"trainer.val_check_interval={interval} is a share of an epoch, and trainer.check_val_every_n_epoch=null "
            "counts batches over epochs. Write trainer.check_val_every_n_epoch=1 as well, or a number of batches."
        )
    if settings.get("gradient_clip_algorithm") and settings.get("gradient_clip_val") is None:
        given = settings["gradient_clip_algorithm"]
        found.append(f"trainer.gradient_clip_algorithm={given} clips nothing. Write trainer.gradient_clip_val as well.")
    found += seed_problems(config)
    for key, kind in (("enable_checkpointing", Checkpoint), ("enable_progress_bar", ProgressBar)):
        made = [name for name, node in callbacks.items() if node and issubclass(_class_of(node), kind)]
        if settings.get(key) is False and made:
            remedy = " ".join(f"~callbacks.{name}" for name in made)
            found.append(f"trainer.{key}=False: the recipe's callbacks do that. Write {remedy} instead.")
    return found


def seed_problems(config: dict[str, Any]) -> list[str]:
    """Lightning refuses some seeds and numpy others; every recipe takes those that both do."""
    right = 0 <= config["seed"] < 2**32
    return [] if right else [f"seed={config['seed']} must be a whole number from 0 to {2**32 - 1}."]


def monitor_problems(config: dict[str, Any]) -> list[str]:
    """Callbacks and schedules that watch what nobody logs, which Lightning would say after the first validation.

    Where somebody else's callback is among them, that one may log it.
    """
    nodes = {f"callbacks.{name}": node for name, node in (config.get("callbacks") or {}).items() if node}
    if not all(str(node["_target_"]).startswith(OURS) for node in nodes.values()):
        return []
    known = [*LOGGED, *(["val/loss_raw"] if config.get("ema") else [])]
    nodes |= {"scheduler": config["scheduler"]} if config.get("scheduler") else {}
    return [
        f"{name}.monitor={monitor}: nothing logs that.{did_you_mean(monitor, known)} Logged are: {', '.join(known)}."
        for name, node in nodes.items()
        if isinstance(monitor := node.get("monitor"), str)
        and monitor not in known
        and not monitor.startswith(LOGGED_BY_CALLBACKS)
    ]


def mode_problems(config: dict[str, Any]) -> list[str]:
    """Callbacks and schedules that would keep, stop or slow down by the worst: the largest loss, the least accuracy.

    Other metrics may be meant either way.

    Example:
        >>> best = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": "val/loss", "mode": "max"}
        >>> mode_problems({"callbacks": {"best": best}})
        ['callbacks.best.mode=max takes the largest val/loss for the best. Write callbacks.best.mode=min.']
    """
    nodes = {f"callbacks.{name}": node for name, node in (config.get("callbacks") or {}).items() if node}
    nodes |= {"scheduler": config["scheduler"]} if config.get("scheduler") else {}
    found = []
    for name, node in nodes.items():
        monitor, mode = node.get("monitor"), node.get("mode", "min")  # the default of all that have both
        if not isinstance(monitor, str) or mode not in ("min", "max"):
            continue
        words = {*re.split(r"[^a-z]+", monitor.lower())}
        if mode == "max" and words & LESS_IS_BETTER and not words & MORE_IS_BETTER:
            found.append(f"{name}.mode=max takes the largest {monitor} for the best. Write {name}.mode=min.")
        if mode == "min" and words & MORE_IS_BETTER and not words & LESS_IS_BETTER:
            found.append(f"{name}.mode=min takes the least {monitor} for the best. Write {name}.mode=max.")
    return found


IDLE = {"gamma": ("weighting", "none"), "P_mean": ("density", "uniform"), "P_std": ("density", "uniform")}
"""Arguments of objectives, and the choice, by its argument, under which they are not used."""


def idle_problems(config: dict[str, Any]) -> list[str]:
    """Numbers of a loss weight or of a density of times that the objective does not use.

    Example:
        >>> idle_problems({"objective": {"_target_": "recipes.objective.EDM", "gamma": 3}})
        ["objective.gamma=3 is not used: weighting is 'none'. Choose another objective.weighting, or leave it out."]
    """
    node = config.get("objective") or {}
    return [
        f"objective.{key}={node[key]} is not used: {by} is {unused!r}. Choose another objective.{by}, or leave it out."
        for key, (by, unused) in IDLE.items()
        if key in node and node.get(by, getattr(_class_of(node), by, None)) == unused
    ]


def _class_of(node: dict[str, Any]) -> type:
    found = located(str(node["_target_"]))
    return found if isinstance(found, type) else object
