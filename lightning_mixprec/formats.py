"""What a floating-point format does to given numbers: too large for it, too small for it, or barely there.

Why it exists: "fp16 loses 3 % of these gradients" is a count, and a count is the same in every format once three
magnitudes of the format are known: where it rounds to more than its largest number, where to zero, and where it has
its full number of bits.

What it leaves out: rounding errors between these magnitudes, and where the numbers come from
(:mod:`lightning_mixprec.observation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATION_FORMATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
"""What activations and weights may be stored in."""

GRADIENT_FORMATS = (torch.float16, torch.bfloat16, torch.float8_e5m2)
"""What gradients may be stored in: their range matters more than their bits."""


@dataclass(frozen=True)
class Shares:
    """Shares of finite numbers, each in [0, 1] and of all of them, zeros included; NaN if there were none.

    Attributes:
        overflow: Rounded to more than the format's largest number.
        zero: Not zero, but rounded to it.
        subnormal: Rounded to fewer bits than the format has.

    Example:
        >>> Shares(overflow=0.0, zero=0.25, subnormal=0.0).zero
        0.25
    """

    overflow: float
    zero: float
    subnormal: float


class Tally:
    """Counts numbers that formats lose, without keeping them or reading the device back.

    Args:
        formats: Dtypes to count for.

    Example:
        >>> tally = Tally([torch.float16])
        >>> tally.add(torch.tensor([1e5, 1.0, 1e-6, 1e-9]))
        >>> tally.shares[torch.float16]
        Shares(overflow=0.25, zero=0.25, subnormal=0.25)
        >>> round(tally.largest)
        100000
    """

    def __init__(self, formats: Sequence[torch.dtype]) -> None:
        self._borders = {dtype: _borders(dtype) for dtype in formats}
        edges = {_above(0.0), math.inf, *(edge for borders in self._borders.values() for edge in borders)}
        self._edges = [0.0, *sorted(edges)]
        self._largest: Tensor | None = None
        self._counts: Tensor | None = None  # int64 [edges]: of numbers that are at least as large as each of them

    @torch.no_grad()
    def add(self, values: Tensor, scale: float = 1.0) -> None:
        """Count ``values`` times ``scale``; their largest magnitude is noted without it."""
        size = values.detach().float().abs().flatten()
        if not size.numel():
            return
        largest = size.nan_to_num(0.0, 0.0).amax()
        scaled = size * scale
        # One pass for each edge: `bincount` and `histc` have the host wait for a GPU, or count there in any order.
        counts = torch.stack([(scaled >= edge).sum() for edge in self._edges])  # NaN: none of them
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._counts = counts if self._counts is None else self._counts + counts

    @property
    def largest(self) -> float:
        """Largest finite magnitude, 0 if there was none. Reads the device."""
        return float(self._largest) if self._largest is not None else 0.0

    @property
    def shares(self) -> dict[torch.dtype, Shares]:
        """What each format loses. Reads the device."""
        counts = self._counts.tolist() if self._counts is not None else [0] * len(self._edges)
        at_least = dict(zip(self._edges, counts, strict=True))
        total = at_least[0.0] - at_least[math.inf]

        def between(low: float, high: float) -> float:
            return (at_least[low] - at_least[high]) / total if total else math.nan

        return {
            dtype: Shares(between(overflow, math.inf), between(_above(0.0), kept), between(kept, normal))
            for dtype, (kept, normal, overflow) in self._borders.items()
        }


@torch.no_grad()
def lost_updates(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Updates that are smaller than half the distance between numbers of ``dtype`` at their weight.

    Args:
        weights: fp32.
        updates: What is to be added to them, same shape.
        dtype: What the weights are stored in.

    Returns:
        How many there are, and how many updates are not zero; int64 [].

    Example:
        >>> lost_updates(torch.ones(3), torch.tensor([1e-2, 1e-4, 0.0]), torch.float16)
        (tensor(1), tensor(2))
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(weights)  # |weight| is between 2 ** (exponent - 1) and 2 ** exponent
    power = torch.where(weights == 0, info.smallest_normal, torch.ldexp(torch.ones_like(weights), exponent - 1))
    spacing = power.clamp(min=info.smallest_normal) * info.eps
    moves = updates != 0
    return (moves & (updates.abs() < spacing / 2)).sum(), moves.sum()


def _borders(dtype: torch.dtype) -> tuple[float, float, float]:
    """Magnitudes, in fp32, from which on ``dtype`` has a number that is not zero, has all bits, and is infinite."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    top_spacing = 2.0 ** math.floor(math.log2(info.max)) * info.eps
    return _above(smallest / 2), info.smallest_normal - smallest / 2, _as_fp32(info.max + top_spacing / 2)


def _above(number: float) -> float:
    """The next number in fp32."""
    return float(torch.nextafter(torch.tensor(number), torch.tensor(math.inf)))


def _as_fp32(number: float) -> float:
    return float(torch.tensor(number))
