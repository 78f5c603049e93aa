"""Optimizer state of a bucket: one flat tensor for each key inside a step, views of it for each parameter outside.

Why it exists: an elementwise optimizer that steps on a whole bucket as one tensor keeps one state for it, while whoever
looks at ``optimizer.state[param]`` or saves a checkpoint expects a state for each parameter. Both are the same memory.

What it leaves out: stepping (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.storage import Bucket
from lightning_mixprec.widening import HALF

_MANY = 64  # parameters in a bucket that are stepped as one tensor


class BucketState:
    """Optimizer state of a bucket: one flat tensor for each key inside a step, views of it for each parameter outside.

    Args:
        bucket: The bucket whose parameters are meant.

    Attributes:
        shown: Whether what :meth:`gather` gave last is the memory behind the parameters' state, or a copy of it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.shown = False
        self._flat: dict[str, Any] | None = None  # what the optimizer sees inside a flat step
        self._parts: list[dict[str, Any]] = []  # what it sees outside, one for each parameter
        self._seen: dict[str, Any] = {}  # values of `_flat`, and of each part, as they were put there
        self._items: list[Any] = []  # values of all parts, end to end
        self._tensors: list[Tensor] = []  # of them: all that are elementwise, and scalars of one part for all
        self._addresses: list[int] = []  # of their memory
        self._scalars: dict[str, Tensor] = {}  # for keys like "step" [parameters, ...], behind the parts' values
        self._versions: list[int] = []  # of those, as of the last step

    def suits(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether ``params``, those of the bucket that have a gradient, can be stepped as one tensor.

        Vectorised kernels may round the last elements of a tensor (at most 15) differently, by an fp32 ulp. As one
        tensor go parameters that have no such elements or very many others, and those so many that each on its own
        would cost more than its arithmetic.
        """
        bucket = self.bucket
        if len(params) < len(bucket.params) or not (bucket.seamless or len(params) > _MANY):
            return False
        return {grad.layout for grad in [param.grad for param in params] if grad is not None} <= {torch.strided}

    def gather(self, state: Any) -> dict[str, Any] | None:
        """The parameters' state as one flat state; None if it is not one, by keys, shapes or scalars."""
        parts = [state.get(param) for param in self.bucket.params]
        if self._flat is None or not self._untouched(parts):
            self._flat, self.shown = self._flatten(parts), False
        return self._flat

    def take(self, state: Any) -> dict[str, Any] | None:
        """Likewise, and if it is one, ``state`` has it no more."""
        flat = self.gather(state)
        if flat is not None:
            for param in self.bucket.params:
                state.pop(param, None)
        return flat

    def scatter(self, state: Any, flat: dict[str, Any]) -> None:
        """Let ``flat`` be the parameters' state."""
        if self._parts and self._flat is not None and flat.keys() == self._parts[0].keys():
            moved = [key for key, value in flat.items() if value is not self._seen.get(key)]
        else:
            moved, self._scalars = list(flat), {}
            self._parts = [{} for _ in self.bucket.params]
        for key in moved:
            value, pieces = flat[key], [flat[key]] * len(self._parts)
            self._scalars.pop(key, None)
            if self._is_elementwise(key, value):
                pieces = self.bucket.views(value)
            elif isinstance(value, Tensor):  # a step count: each has its own, so that some can be set anew
                self._scalars[key] = torch.stack(pieces)
                pieces = list(self._scalars[key])
            for part, piece in zip(self._parts, pieces, strict=True):
                part[key] = piece
        self._flat, self._seen = flat, dict(flat)
        if moved:
            self._items = list(_values(self._parts))
            own = [key for key in flat if key not in self._scalars]
            self._tensors = [part[key] for part in self._parts for key in own if type(part[key]) is Tensor]
            self._tensors += [self._parts[0][key] for key in self._scalars]
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
        state.update(zip(self.bucket.params, self._parts, strict=True))
        self.shown = True
        self.count()

    def count(self) -> None:
        """Show the scalars that a step on the flat state has written."""
        assert self._flat is not None
        for key, scalars in self._scalars.items():
            scalars.copy_(self._flat[key])
        self._versions = [scalars._version for scalars in self._scalars.values()]

    def release(self) -> None:
        """From here on the parameters are stepped one by one."""
        self._flat, self._parts, self._scalars = None, [], {}

    def _is_elementwise(self, key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and key != "step" and value.shape == (self.bucket.numel,)

    def _untouched(self, parts: Sequence[Any]) -> bool:
        """Whether nobody has put others in place of dicts, values or, as ``tensor.data = ...`` does, memory."""
        if len(self._parts) != len(parts) or not all(map(operator.is_, parts, self._parts)):
            return False
        if sum(map(len, self._parts)) != len(self._items) or not all(
            map(operator.is_, _values(self._parts), self._items)
        ):
            return False
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return False
        return self._versions == [scalars._version for scalars in self._scalars.values()]

    def _flatten(self, parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        filled = [part for part in parts if part]
        if not filled:
            return {}
        widen(filled)
        keys = filled[0].keys()
        if len(filled) < len(parts) or any(part.keys() != keys for part in filled):
            return None
        flat: dict[str, Any] = {}
        for key in keys:
            values = [part[key] for part in filled]
            shaped = all(
                isinstance(v, Tensor) and v.shape == p.shape for v, p in zip(values, self.bucket.params, strict=True)
            )
            if shaped and key != "step":
                flat[key] = torch.zeros(self.bucket.numel, dtype=values[0].dtype, device=values[0].device)
                for view, value in zip(self.bucket.views(flat[key]), values, strict=True):
                    view.copy_(value)
            elif all(_equal(value, values[0]) for value in values):
                flat[key] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
            else:
                return None
        return flat


def _values(parts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, parts))


def widen(states: Iterable[Any], keep: Container[Any] = ()) -> None:
    """Make 16-bit tensors in them fp32: made by the user from 16-bit parameters, as by ``torch.zeros_like(param)``.

    Args:
        states: Of parameters; what is not a dict is left alone.
        keep: Keys that an optimizer has in 16 bits of its own accord.
    """
    for state in states:
        for key in narrow_keys(state):
            if key not in keep:
                state[key] = state[key].float()


def narrow_keys(state: Any) -> list[Any]:
    """Keys of 16-bit tensors."""
    items = state.items() if isinstance(state, dict) else ()
    return [key for key, value in items if isinstance(value, Tensor) and value.dtype in HALF]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
