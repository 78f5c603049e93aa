"""How far the matrix products of linear layers are off in fp8, on the numbers of one batch.

Why it exists: fp8 scales every tensor to its largest number, so what an fp8 format overflows or flushes by itself says
little. What tells a layer with outliers from one without is the error of its own products.

What it leaves out: training in fp8 (:mod:`lightning_mixprec.float8`, by torchao), and what errors add up to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def float8_errors(model: nn.Module, loss: Callable[[], Tensor], layers: Collection[str]) -> dict[str, float]:
    """Error of the worst of a linear layer's three products in fp8, relative to the product's norm.

    Of numbers without outliers it is about 0.04 for the output and 0.06 for gradients.

    Args:
        model: In fp32.
        loss: Calls the model.
        layers: Qualified names of linear layers.

    Returns:
        By name, the worst of all calls; without layers that were not called.

    Example:
        >>> net = nn.Sequential(nn.Linear(16, 16))
        >>> errors = float8_errors(net, lambda: net(torch.randn(8, 16)).square().mean(), ["0"])
        >>> 0.01 < errors["0"] < 0.1
        True
    """
    worst: dict[str, float] = {}
    handles = [model.get_submodule(name).register_forward_hook(partial(_leave, worst, name)) for name in layers]
    try:
        found = loss()
        if found.requires_grad:
            found.backward()
    finally:
        for handle in handles:
            handle.remove()
    return worst


@torch.no_grad()
def _leave(worst: dict[str, float], name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
    if not args or not output.numel():
        return
    weight: Any = layer.weight
    x, w = _rows(args[0].detach()), weight.detach().float()
    narrow_x, narrow_w = _in_float8(x, torch.float8_e4m3fn), _in_float8(w, torch.float8_e4m3fn)
    worst[name] = max(worst.get(name, 0.0), _error(narrow_x @ narrow_w.T, x @ w.T))

    def gradient(grad: Tensor) -> None:
        g = _rows(grad)
        narrow = _in_float8(g, torch.float8_e5m2)
        errors = (_error(narrow @ narrow_w, g @ w), _error(narrow.T @ narrow_x, g.T @ x))
        worst[name] = max(worst[name], *errors)

    if output.requires_grad:
        output.register_hook(gradient)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).float()


def _in_float8(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What one scale for the whole tensor leaves of it."""
    limit = torch.finfo(dtype).max
    scale = limit / tensor.abs().amax().clamp(min=1e-12)
    return (tensor * scale).clamp(-limit, limit).to(dtype).float() / scale


def _error(found: Tensor, expected: Tensor) -> float:
    size = float(expected.norm())
    return float((found - expected).norm()) / size if size and math.isfinite(size) else 0.0
