"""Tensors whose values cannot be looked at, or not as those of a dense one; modules that take no hooks.

Why it exists: whatever watches a network from outside meets what research code puts through it: sparse and nested
tensors, tangents that are zero without having memory, the stand-ins of torch.func, and networks in TorchScript.

What it leaves out: what is looked for (:mod:`lightning_mixprec.magnitudes`, :mod:`lightning_mixprec.layer_stats`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_script(module: nn.Module) -> bool:
    """Whether ``module`` is compiled to TorchScript: its class, dtypes and hooks cannot be changed from outside.

    Example:
        >>> is_script(nn.Linear(1, 1))
        False
    """
    return isinstance(module, torch.jit.ScriptModule)


def visible_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Like ``model.named_modules()``, without those of TorchScript.

    Example:
        >>> [name for name, _ in visible_modules(nn.Sequential(nn.Identity()))]
        ['', '0']
    """
    return ((name, module) for name, module in model.named_modules(prefix=prefix) if not is_script(module))


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
