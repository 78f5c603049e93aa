"""A run that goes on has the settings of optimizer and schedule that it was given, not the checkpoint's.

Why it exists: torch saves settings with state. So a learning rate, a weight decay or the length of a schedule that is
changed at a resume would be loaded over by the old one, and a cosine that is to go on for longer would rise again from
zero. What has changed is put right here, as if it had stood there from the start: a schedule is where it would be after
as many steps. What has not changed is left alone, to the bit.

It leaves out another kind of optimizer, whose state would be of no use (`recipes.resume` refuses it), and settings of
callbacks and precision, which keep their own.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recipes import plateau
from recipes.diffusion import DiffusionModule
from recipes.first_step import quietly

SCHEDULED = {"lr", "betas", "momentum"}
"""What schedules change in an optimizer: `OneCycleLR` and `CyclicLR` all of these, and others leave theirs there."""


class OwnSettings(L.Callback):
    """Compares this run's `optimizer` and `scheduler` with those in the checkpoint that it resumes from.

    Args:
        config: This run's, plain dicts, lists and scalars.

    Example:
        >>> OwnSettings({"optimizer": {"lr": 1e-3}}).settings
        []
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.settings: list[dict[str, Any]] = []
        """What each parameter group is given once its state is loaded; empty if nothing has changed."""

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find what has changed, and put this run's schedule in the place of the checkpoint's, before it is loaded."""
        theirs = checkpoint.get("recipe")  # checkpoints of other modules have none
        if theirs is None or not isinstance(pl_module, DiffusionModule):
            return
        changed = _changed(theirs.get("optimizer"), self.config.get("optimizer"))
        scheduled = bool(_changed(theirs.get("scheduler"), self.config.get("scheduler")) or changed & SCHEDULED)
        if not changed and not scheduled:
            return
        optimizer = _stand_in(pl_module)
        given = [dict(group) for group in optimizer.param_groups]
        if scheduled:
            states = checkpoint.get("lr_schedulers") or []
            scheduler = pl_module.make_scheduler(optimizer) if pl_module.make_scheduler else None
            if isinstance(scheduler, LRScheduler) or scheduler is None:  # of any other, nobody knows what it keeps
                kept = _go_on(scheduler, states[0] if states else {}, checkpoint["global_step"], changed)
                checkpoint["lr_schedulers"] = [] if scheduler is None else [scheduler.state_dict()]
                changed = {*changed, *(set() if kept else {"lr"})}
        self.settings = [
            {
                name: value
                for name, value in group.items()
                if name in changed or (scheduled and (value != before.get(name) or name in SCHEDULED - {"lr"}))
            }
            for group, before in zip(optimizer.param_groups, given, strict=True)
        ]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set them: by now every strategy has loaded its optimizer."""
        for optimizer in trainer.optimizers[:1] if self.settings else []:
            for group, own in zip(optimizer.param_groups, self.settings, strict=True):
                group.update(own)
        self.settings = []


def _changed(theirs: Any, ours: Any) -> set[str]:
    """Arguments that differ between two nodes of a configuration."""
    old, new = theirs or {}, ours or {}
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def _stand_in(module: DiffusionModule) -> Optimizer:
    """The optimizer of this run over parameters of the right shapes that take no memory."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return module.make_optimizer(nn.Parameter(torch.zeros(()).expand(parameter.shape)) for parameter in trained)


def _go_on(scheduler: LRScheduler | None, state: dict[str, Any], steps: int, changed: set[str]) -> bool:
    """Bring a schedule to where it is after so many steps; return whether the learning rate is the checkpoint's still.

    Args:
        scheduler: As it is made.
        state: Of the checkpoint's, perhaps of another kind.
        steps: That were taken.
        changed: Arguments of the optimizer.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        seen = {name: state[name] for name in plateau.STATE if name in state} if "num_bad_epochs" in state else {}
        scheduler.__dict__.update(seen)
        return bool(seen) and "lr" not in changed
    if scheduler is not None:
        with quietly():
            for _ in range(steps):
                scheduler.step()
    return False
