"""Gradients of many parameters at once: whether all are finite, and all of them times a number.

Why it exists: both are done in every step, for dense and sparse gradients, whole ones and parts, without waiting for
the device.

What it leaves out: when, and what follows from it (:mod:`lightning_mixprec.ledger`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_mixprec.shards import local

_LARGE = 2**16  # elements of a gradient that is summed by itself


@torch.no_grad()
def multiply_gradients(params: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients of ``params`` by ``factor``, fp32 [], in place.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> multiply_gradients([weight], torch.tensor(0.5))
        >>> weight.grad
        tensor([0.5000])
    """
    grads = [local(param.grad) for param in params if param.grad is not None]
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


@torch.no_grad()
def found_nonfinite(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether any gradient holds an inf or NaN, as fp32 [1] on ``device`` (1.0 if so), without reading it back.

    Example:
        >>> found_nonfinite([torch.ones(2), torch.tensor([float("nan")])], torch.device("cpu"))
        tensor([1.])
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        values = grad if type(grad) is Tensor and grad.layout is torch.strided else _values(grad)
        by_dtype.setdefault(values.dtype, []).append(values)
    for dtype, tensors in by_dtype.items():
        tensors = [torch.view_as_real(each) for each in tensors] if dtype.is_complex else tensors
        if device.type != "cpu":
            found = torch.maximum(found, _any_nonfinite(tensors))
        elif tensors := _suspects(tensors):
            # GradScaler's own kernel; multiplying by one leaves the gradients as they are.
            one = torch.ones(1, dtype=torch.float32)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
    return found


def _values(grad: Tensor) -> Tensor:
    """This rank's elements, those that are stored."""
    grad = local(grad)
    return grad._values() if grad.is_sparse else grad


def _any_nonfinite(tensors: list[Tensor]) -> Tensor:
    """By their largest magnitudes, of which NaN is the largest: a call that only reads, in any precision.

    GradScaler's kernel writes as well, and knows no bf16 on CUDA (torch 2.14).
    """
    filled = [tensor for tensor in tensors if tensor.numel()]  # of nothing there is no largest
    if not filled:
        return torch.zeros((), device=tensors[0].device)
    return ~torch.stack(torch._foreach_norm(filled, torch.inf)).isfinite().all()


def _suspects(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors on the CPU that have to be looked at exactly, because their sum does not show that they are finite.

    A sum only reads, at the speed of memory, and is finite only if every term is; finite terms may overflow together.
    Small tensors cost less in one call for all of them.
    """
    large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
    if large and torch.stack([tensor.sum() for tensor in large]).isfinite().all().numpy():  # it is on the host
        return [tensor for tensor in tensors if tensor.numel() < _LARGE]
    return tensors
