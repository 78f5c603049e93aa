"""Normalisation in fp32 of 16-bit activations, of which backward saves no fp32 copy.

Why it exists: autograd keeps what a norm was given. Widened for fp32 statistics that is 4 bytes for each activation, in
networks of which half the layers are norms. Here the 16-bit activations are kept, which hold the same numbers, and are
widened once more in backward.

What it leaves out: which layers are norms, and every other kind of norm (:mod:`lightning_mixprec.layers`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lean_norm(forward: Any, module: Any, x: Tensor) -> Tensor | None:
    """What ``forward(module, x)`` gives in fp32, rounded once to the dtype of ``x``.

    Args:
        forward: ``nn.GroupNorm.forward`` or ``nn.LayerNorm.forward``.
        module: A module with that forward, and fp32 parameters or none.
        x: 16-bit activations.

    Returns:
        None for any other forward.

    Example:
        >>> lean_norm(nn.LayerNorm.forward, nn.LayerNorm(2), torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """
    if forward is nn.GroupNorm.forward:
        settings: tuple[Any, ...] = ("group", module.num_groups, module.eps)
    elif forward is nn.LayerNorm.forward:
        settings = ("layer", module.normalized_shape, module.eps)
    else:
        return None
    result: Tensor = _LeanNorm.apply(x, module.weight, module.bias, *settings)
    return result


class _LeanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, kind: str, size: Any, eps: float) -> Tensor:
        wide = _dense(x.float())
        if kind == "group":
            y, mean, rstd = torch.native_group_norm(wide, weight, bias, *_extent(x), size, eps)
        else:
            y, mean, rstd = torch.native_layer_norm(wide, size, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.settings = (kind, size, eps)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        kind, size, eps = ctx.settings
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # for a gradient of gradients: by operations that have one
            inputs = [each for each, need in zip((x, weight, bias), mask, strict=True) if need]
            norm = F.group_norm if kind == "group" else F.layer_norm
            y = norm(x.float(), size, weight, bias, eps).to(x.dtype)
            found = iter(torch.autograd.grad(y, inputs, grads, create_graph=True))
            return (*(next(found) if need else None for need in mask), None, None, None)
        grad, wide = _dense(grads[0].float()), _dense(x.float())
        if kind == "group":
            if grad.stride() != wide.stride():
                grad = grad.contiguous(memory_format=_format(wide))
            by = torch.ops.aten.native_group_norm_backward(grad, wide, mean, rstd, weight, *_extent(x), size, mask)
        else:
            by = torch.ops.aten.native_layer_norm_backward(grad, wide, list(size), mean, rstd, weight, bias, mask)
        return (by[0].to(x.dtype) if mask[0] else None, by[1], by[2], None, None, None)


def _extent(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _format(x: Tensor) -> torch.memory_format:
    """channels_last is kept on the CPU, whose kernels know it."""
    last = x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))
