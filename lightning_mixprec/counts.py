"""Counts that an optimizer keeps for a group, or for itself, while a step is taken in several calls.

Why it exists: many optimizers count their steps in ``group["step"]``, for bias corrections and the like. Stepped on one
part of the weights after the other, they would count each part. A count is the same for all parts, so every call of a
step may begin with what the first began with.

What it leaves out: state of a group that depends on what is stepped on, such as an estimate of the distance to go. The
trial (:mod:`lightning_mixprec.probe`) tells one from the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Counts:
    """Lets the calls that make one step of an optimizer all begin with the numbers that the first began with.

    Args:
        optimizer: Which is about to make the step.

    Attributes:
        differing: Names of numbers that have not ended the same in all calls: they are no counts.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> group = optimizer.param_groups[0]
        >>> group["step"], counts = 4, Counts(optimizer)
        >>> for part in range(3):
        ...     with counts.call(group):
        ...         group["step"] += 1
        >>> group["step"]
        5
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.differing: set[str] = set()
        self._optimizer = optimizer
        self._began: dict[int, dict[str, Any]] = {}  # by the identity of who holds the numbers
        self._ended: dict[int, dict[str, Any]] = {}

    @contextmanager
    def call(self, group: dict[str, Any]) -> Iterator[None]:
        """Around each call, which steps on a part of ``group``."""
        holders: list[dict[str, Any]] = [group, vars(self._optimizer)]
        for holder in holders:
            now = _numbers(holder)
            if id(holder) not in self._began:
                self._began[id(holder)] = {key: _kept(value) for key, value in now.items()}
            began = self._began[id(holder)]
            for key in now.keys() - began.keys():
                del holder[key]
            holder.update({key: _kept(value) for key, value in began.items() if key in now})
        yield
        for holder in holders:
            now = _numbers(holder)
            ended = self._ended.setdefault(id(holder), now)
            for key in {**now, **ended}:
                pair = (now.get(key), ended.get(key))
                # Flags may tell whether the part had a gradient; tensors may be far away.
                if any(isinstance(each, (int, float)) and not isinstance(each, bool) for each in pair):
                    self.differing |= {key} if pair[0] != pair[1] else set()


def _numbers(holder: Mapping[str, Any]) -> dict[str, Any]:
    """Those that may be counts: also flags, and None for what is not there yet."""
    return {
        key: value
        for key, value in holder.items()
        if value is None or isinstance(value, (int, float)) or (type(value) is Tensor and value.numel() == 1)
    }


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
