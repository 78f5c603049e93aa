"""Normalisation of 16-bit activations by fp32 statistics, of which backward saves no fp32 copy.

Why it exists: autograd keeps what a norm was given. Widened for fp32 statistics that is 4 bytes for each activation, in
networks of which half the layers are norms. Here the 16-bit activations are kept, which hold the same numbers.

A CPU has kernels that take 16-bit activations with fp32 parameters, compute in fp32 and round once; nothing is widened
in memory. What they cannot be trusted with is done otherwise: without parameters they keep their statistics in 16 bits;
LayerNorm's sums the gradients of its parameters in 16 bits (15 % wrong for 16384 rows of bf16, torch 2.14); and their
order of operations loses some of fp16's last bits where the mean is far from zero. A GPU has no such kernels, but one
for LayerNorm without parameters. Everywhere else, and for channels_last, for which a CPU's are slower, activations are
widened, and once more in backward; torch.compile makes one pass of it.

What it leaves out: which layers are norms, and every other kind of norm (:mod:`lightning_mixprec.layers`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mixprec.opaque import is_transformed

_IN_CACHE = 2**16  # elements that are widened at a time, for sums over all of them


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
    if not torch.compiler.is_compiling() and (is_transformed() or torch.jit.is_tracing()):
        # torch.func and forward-mode derivatives know torch's own operations alone; a trace is run again, to compare,
        # without gradients, for which other operations are chosen below.
        return None
    mixed = _has_mixed_kernels(x)
    if forward is nn.GroupNorm.forward:
        if mixed:
            weight = torch.ones(module.num_channels) if module.weight is None else module.weight
            return F.group_norm(x, module.num_groups, weight, module.bias, module.eps)
        settings: tuple[Any, ...] = ("group", module.num_groups, module.eps)
    elif forward is nn.LayerNorm.forward:
        trained = any(param.requires_grad for param in (module.weight, module.bias) if param is not None)
        if module.weight is None and x.device.type == "cuda":  # whose kernel computes and keeps them in fp32
            return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        if mixed and not (trained and torch.is_grad_enabled()):
            weight = torch.ones(module.normalized_shape) if module.weight is None else module.weight
            return F.layer_norm(x, module.normalized_shape, weight, module.bias, module.eps)
        settings = ("layer", module.normalized_shape, module.eps)
    else:
        return None
    result: Tensor = _LeanNorm.apply(x, module.weight, module.bias, *settings)
    return result


class _LeanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, kind: str, size: Any, eps: float) -> Tensor:
        mixed = kind == "layer" and _has_mixed_kernels(x)
        wide = x if mixed else _dense(x.float())
        if kind == "group":
            y, mean, rstd = torch.native_group_norm(wide, weight, bias, *_extent(x), size, eps)
        else:
            y, mean, rstd = torch.native_layer_norm(wide, size, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.settings = (kind, size, eps)
        ctx.mixed = mixed
        # Compiled by torch 2.11, a cast that does nothing cuts the result off: all gradients would be zero.
        return y if mixed else y.to(x.dtype)

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
        if ctx.mixed:
            return (*_layer_norm_backward(grads[0].contiguous(), x, size, mean, rstd, weight, bias, mask), *[None] * 3)
        grad, wide = _dense(grads[0].float()), _dense(x.float())
        if kind == "group":
            if grad.stride() != wide.stride():
                grad = grad.contiguous(memory_format=_format(wide))
            by = torch.ops.aten.native_group_norm_backward(grad, wide, mean, rstd, weight, *_extent(x), size, mask)
        else:
            by = torch.ops.aten.native_layer_norm_backward(grad, wide, list(size), mean, rstd, weight, bias, mask)
        return (by[0].to(x.dtype) if mask[0] else None, by[1], by[2], None, None, None)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, size: Any, mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: list[bool]
) -> list[Tensor | None]:
    """Gradients of 16-bit activations, and of fp32 parameters: these by fp32 sums, of some rows after the others."""
    kernel = torch.ops.aten.native_layer_norm_backward
    by_x = kernel(grad, x, list(size), mean, rstd, weight, bias, [True, False, False])[0] if mask[0] else None
    if not any(mask[1:]):
        return [by_x, None, None]
    if not x.numel():
        return [by_x, *(torch.zeros_like(weight) if need else None for need in mask[1:])]
    width = math.prod(size)
    rows = max(1, _IN_CACHE // width)
    parts = [each.reshape(-1, each.numel() * width // x.numel()) for each in (grad, x, mean, rstd)]
    sums: list[Any] = [None, None]
    for some in zip(*(part.split(rows) for part in parts), strict=True):
        wide = [each.float() for each in some]
        found = kernel(
            wide[0], wide[1], [width], wide[2], wide[3], weight.view(-1), weight.view(-1), [False, *mask[1:]]
        )[1:]
        sums = [new if old is None or new is None else old + new for old, new in zip(sums, found, strict=True)]
    return [by_x, *(each.view(tuple(size)) if need else None for each, need in zip(sums, mask[1:], strict=True))]


def _has_mixed_kernels(x: Tensor) -> bool:
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and not channels_last


def _extent(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _format(x: Tensor) -> torch.memory_format:
    """channels_last is kept on the CPU, whose kernels know it."""
    last = x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))
