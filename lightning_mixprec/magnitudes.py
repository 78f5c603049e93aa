"""How large tensors are, wherever they stand in what a module takes or returns, and whether two of them agree.

Why it exists: "not finite", "as large as" and "wrong by more than rounding" are asked of tuples, dicts and objects of
tensors in several places, and must mean the same in all of them.

What it leaves out: whom to blame for it (:mod:`lightning_mixprec.overflow`, :mod:`lightning_mixprec.trial`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_mixprec.containers import stacked, tensors_in
from lightning_mixprec.opaque import stored
from lightning_mixprec.shards import local


@torch.no_grad()
def nonfinite(value: Any) -> Tensor:
    """Whether any floating-point tensor in ``value`` holds an inf or NaN, bool [], without reading it back.

    Example:
        >>> nonfinite([torch.ones(1), {"x": torch.tensor(float("inf"))}])
        tensor(True)
    """
    parts = [stored(local(tensor)) for _, tensor in tensors_in(value) if tensor.is_floating_point()]
    flags = [~torch.isfinite(part).all() for part in parts if part is not None]
    return stacked(flags).any() if flags else torch.tensor(False)


@torch.no_grad()
def largest(value: Any) -> Tensor:
    """Largest finite magnitude in ``value``, fp32 [], without reading it back; 0 where there is none.

    Example:
        >>> largest([torch.tensor([-3.0, float("inf")])])
        tensor(3.)
    """
    sizes = [
        torch.where(torch.isfinite(t), t, 0).detach().float().abs().max()
        for t in (stored(tensor) for _, tensor in tensors_in(value) if tensor.is_floating_point())
        if t is not None and t.numel()
    ]
    return stacked(sizes).max() if sizes else torch.tensor(0.0)


def cures(lost: Any, better: Any) -> bool:
    """Whether something that is not finite in ``lost`` is finite in ``better``.

    Example:
        >>> cures(torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 1e5]))
        True
    """
    pairs = zip(tensors_in(lost), tensors_in(better), strict=False)
    return any(
        bool((~torch.isfinite(one) & torch.isfinite(other)).any())
        for (_, one), (_, other) in pairs
        if one.is_floating_point() and one.shape == other.shape
    )


def differ(narrow: Any, wide: Any) -> bool:
    """Whether some element is off by more than a tenth of the largest: no rounding does that.

    Elements that are not finite in ``wide`` do not count: they are meant to be so.

    Example:
        >>> differ(torch.tensor([0.0, 4.01]), torch.tensor([0.1, 4.0])), differ(torch.zeros(1), torch.ones(1))
        (False, True)
    """
    for (_, one), (_, other) in zip(tensors_in(narrow), tensors_in(wide), strict=False):
        if one.is_floating_point() and one.shape == other.shape and one.numel():
            counts = torch.isfinite(other)
            off = torch.where(counts, one.float() - other.float(), 0).abs()
            size = torch.where(counts, other.float(), 0).abs().max()
            if bool((~torch.isfinite(off) | (off > 0.1 * size)).any()):
                return True
    return False


def headroom_bits(size: float, dtype: torch.dtype) -> float:
    """Headroom: factors of two between ``size`` and the largest number of ``dtype``.

    Example:
        >>> headroom_bits(32752.0, torch.float16)
        1.0
    """
    return math.log2(torch.finfo(dtype).max / size) if size > 0 else math.inf
