"""Which weight a tensor is, and which tensors are new.

Why it exists: what an operation means for 16-bit weights depends on what it is given: a weight, a part of one, what
somebody keeps, or what has been made a moment ago. Only the memory that tensors stand in tells.

What it leaves out: what operations mean (:mod:`lightning_mixprec.edits_seen`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.in_fp32 import is_plain
from lightning_mixprec.opaque import stored
from lightning_mixprec.storage import Bucket
from lightning_mixprec.widening import HALF


class Weights:
    """Which 16-bit weight a tensor is, or is a part of, by its memory.

    Args:
        buckets: All of them.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self._buckets = {each.half.untyped_storage().data_ptr(): (each, each.writes) for each in buckets}

    def of(self, tensor: Any) -> nn.Parameter | None:
        """The weight, or None if it is something else."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in HALF:
            return None
        bucket, _ = self._buckets.get(memory(tensor), (None, 0))
        return None if bucket is None else bucket.params[_place(bucket, tensor)]

    def truth(self, tensor: Tensor) -> Tensor:
        """The fp32 values behind a weight, or behind the part of one, as of the last step."""
        bucket, _ = self._buckets[tensor.untyped_storage().data_ptr()]
        values, place = bucket.values_of(_place(bucket, tensor)), _place(bucket, tensor)
        offset = tensor.storage_offset() - bucket.half.storage_offset() - bucket.starts[place]
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + offset)

    def is_put_by_masters(self, tensor: Tensor) -> bool:
        """They put 16-bit values to views of a bucket's memory, and ``load_state_dict`` puts them after they have."""
        bucket, writes = self._buckets[tensor.untyped_storage().data_ptr()]
        return tensor._base is bucket.half._base or bucket.writes != writes


def _place(bucket: Bucket, tensor: Tensor) -> int:
    return bisect_right(bucket.starts, tensor.storage_offset() - bucket.half.storage_offset()) - 1


def memory(tensor: Any) -> int:
    """Where the memory of ``tensor`` begins; 0 if it has none of its own.

    Example:
        >>> weight = torch.ones(2)
        >>> memory(weight) == memory(weight[1:]), memory(None)
        (True, 0)
    """
    if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.layout != torch.strided:
        return 0
    if stored(tensor) is None:
        return 0
    return tensor.untyped_storage().data_ptr()


class NewMemory:
    """Which tensors have been made since a look began; the others are kept by somebody."""

    def __init__(self) -> None:
        self._places: set[int] = set()

    def note(self, args: Any, result: Any) -> set[int]:
        """An operation has been given ``args``, and has given ``result``.

        Returns:
            Where the memory begins that is of no argument.
        """
        made = set(map(memory, _tensors((result,))))
        made.difference_update(map(memory, _tensors(args)))
        self._places |= made
        return made

    def holds(self, tensor: Any) -> bool:
        """Whether ``tensor`` is new."""
        return memory(tensor) in self._places

    def clear(self) -> None:
        """Another look begins."""
        self._places.clear()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among arguments of an operation, which torch's own walk finds in ten times the time."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
