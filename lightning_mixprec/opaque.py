"""Tensors whose values cannot be looked at, or not as those of a dense one.

Why it exists: whatever watches a network from outside meets what research code puts through it: sparse and nested
tensors, tangents that are zero without having memory, and the stand-ins of torch.func.

What it leaves out: what is looked for (:mod:`lightning_mixprec.magnitudes`, :mod:`lightning_mixprec.layer_stats`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or a forward-mode derivative is at work: its tensors have no values to read.

    Example:
        >>> is_transformed()
        False
    """
    level: Any = torch.autograd.forward_ad._current_level
    return level >= 0 or torch._C._functorch.maybe_current_level() is not None


def stored(tensor: Tensor) -> Tensor | None:
    """The elements that a tensor holds in memory: of a sparse one its values; None where they cannot be looked at.

    Example:
        >>> stored(torch.eye(3).to_sparse())
        tensor([1., 1., 1.])
    """
    if tensor.is_nested or tensor.is_meta or tensor._is_zerotensor():
        return None
    if tensor.layout == torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout == torch.strided else tensor.values()
