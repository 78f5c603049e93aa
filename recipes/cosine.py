"""Half a cosine over the run, however its length is given: `scheduler=cosine`.

Why it exists: torch's schedule takes a number of steps, and a run may be given in epochs, shares of them, or by
whichever limit comes first. It leaves out how long a run is (`recipes.run_length`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from recipes.config import ConfigError, build
from recipes.run_length import RunLength


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """torch's, whose length a recipe fills in.

    Args:
        optimizer: Whose learning rates fall.
        T_max: Steps after which they are `eta_min`; None in a recipe: those of the run.
        eta_min: What they fall to.

    Raises:
        ValueError: Without `T_max` outside of a recipe, or if the rate would rise.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> CosineAnnealingLR(optimizer, T_max=10).T_max
        10
    """

    def __init__(self, optimizer: Optimizer, T_max: int | None = None, eta_min: float = 0.0) -> None:
        if T_max is None:
            raise ValueError("T_max=None: the length of the run is not known here. Give a number of optimizer steps.")
        highest = max(float(group["lr"]) for group in optimizer.param_groups)
        if eta_min > highest:
            raise ValueError(f"eta_min={eta_min} is above the learning rate, {highest:g}, which would rise to it")
        super().__init__(optimizer, T_max, eta_min)


def for_run(config: dict[str, Any], length: RunLength) -> Callable[[Optimizer], Any] | None:
    """The schedule that a configuration names; a cosine without a length gets the run's, in the configuration too.

    Args:
        config: Plain; what is filled in is kept with the run, so that a resume sees it change.
        length: Of the run.

    Raises:
        ConfigError: If the run's length is open.
    """
    node = config.get("scheduler") or {}
    if node.get("_target_") == f"{__name__}.CosineAnnealingLR" and node.get("T_max") is None:
        if length.steps is None:
            raise ConfigError(
                "scheduler.T_max: a cosine ends with the run, and nothing says after how many steps that is. Write "
                "scheduler.T_max=NUMBER, or trainer.max_steps=NUMBER or trainer.max_epochs=NUMBER."
            )
        node["T_max"] = length.steps
    return build(config, "scheduler") if "_target_" in node else None
