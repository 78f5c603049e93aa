"""A step of optimizer and schedule for nothing, before processes and files exist.

Constructors take much that fails later: an optimizer for sparse gradients fails at the first step, a schedule that is
shorter than the run at its end. Here the optimizer updates four numbers, and the schedule is advanced as far as the run
goes. It leaves out what precision and sharding ask of an optimizer, which the plugin says by itself.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from recipes import plateau
from recipes.config import refusals
from recipes.run_length import RunLength

STEP_BY_STEP = 1000
"""Steps after which the schedule jumps to the last one: a run of a million would take as many calls."""


def check_optimizer(
    config: dict[str, Any],
    module: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    make_scheduler: Callable[[Optimizer], Any] | None = None,
    device: torch.device | None = None,
    length: RunLength | None = None,
) -> None:
    """Build optimizer and scheduler, and step.

    Args:
        config: The whole configuration, for the error, plain.
        module: Whose parameters are trained; left as they are, on any device.
        make_optimizer: Takes parameters, returns an optimizer.
        make_scheduler: Takes the optimizer, returns a scheduler that advances once per optimizer step, or a
            ReduceLROnPlateau, which does once per validation.
        device: That the run trains on. None if that is not here: then the optimizer does not step.
        length: Of the run; one step if it is not known.

    Raises:
        ConfigError: With what they refuse.
    """
    with refusals(config, "optimizer"):
        optimizer = make_optimizer(p for p in module.parameters() if p.requires_grad)
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            rank_zero_warn("optimizer.lr=0 leaves all weights as they are. Write a number above 0 to train.")
        if device is not None:
            _try_step(make_optimizer, device)
    if make_scheduler is None:
        return
    with refusals(config, "scheduler"):
        scheduler = make_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            plateau.check(scheduler, length or RunLength())
        elif isinstance(scheduler, LRScheduler):  # what else there is, Lightning judges
            steps = (length.steps if length else None) or 1
            advance(scheduler, optimizer, steps)
            if isinstance(scheduler, CosineAnnealingLR) and 1 < scheduler.T_max < steps:
                rank_zero_warn(
                    f"scheduler.T_max={scheduler.T_max}: the run has {steps} steps, and the learning rate rises again "
                    f"after {scheduler.T_max}. Write scheduler.T_max={steps}."
                )


def _try_step(make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], device: torch.device) -> None:
    """One step on four numbers, on a CPU; on the device only if that fails, which some optimizers need."""
    for place in dict.fromkeys([torch.device("cpu"), device]):
        weight = nn.Parameter(torch.ones(2, 2, device=place))
        optimizer = make_optimizer([weight])

        def closure(weight: nn.Parameter = weight, optimizer: Optimizer = optimizer) -> Any:
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = weight.square().sum()
                loss.backward()
            return loss

        try:
            with torch.compiler.set_stance("force_eager"):  # minutes, for optimizers that compile themselves
                if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones
                    train()
                optimizer.step(closure)  # as Lightning does
            return
        except Exception:
            if place == device:
                raise


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warnings of a schedule that advances without its optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def advance(scheduler: LRScheduler, optimizer: Optimizer, steps: int) -> None:
    """Advance a schedule to the end of a run; beyond some steps, at once to the last.

    Raises:
        ValueError: If it cannot go so far, or asks for a learning rate below 0 or without end; with the step.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        >>> advance(schedule, optimizer, steps=8)
        Traceback (most recent call last):
        ValueError: at step 5 of 8: Tried to step 5 times. The specified number of total steps is 4
    """
    near = min(steps, STEP_BY_STEP)
    with quietly():
        for step in [*range(1, near + 1), *([steps] if steps > near else [])]:
            try:
                scheduler.last_epoch = step - 1 if step > near else scheduler.last_epoch
                scheduler.step()
            except Exception as error:
                raise ValueError(f"at step {step} of {steps}: {str(error).strip() or type(error).__name__}") from error
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if step <= near and not all(0 <= rate < math.inf for rate in rates):  # after a jump, they are not the run's
                raise ValueError(f"at step {step} of {steps} it sets the learning rate {rates[0]:g}")
