"""fp32 memory for the length of a step.

Why it exists: values and gradients of a bucket are fp32 only while it is stepped, and fresh memory for each would cost
more than the step. What a step takes it uses over and over, and what is left of it afterwards is nothing.

What it leaves out: when a bucket is stepped (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_mixprec.storage import Bucket


class Scratch:
    """fp32 tensors of a step, used over and over: allocated when first needed, gone with the step."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._taken: list[Tensor] = []

    def take(self, bucket: Bucket) -> Tensor:
        """Fp32 [n] on the bucket's device, to be had until :meth:`reset`; its content is arbitrary."""
        device, size = bucket.half.device, bucket.numel
        for index, tensor in enumerate(self._free):
            if tensor.device == device and tensor.numel() >= size:
                self._taken.append(self._free.pop(index))
                return self._taken[-1][:size]
        self._taken.append(torch.empty(size, device=device))
        return self._taken[-1]

    def reset(self) -> None:
        """Take back all that was taken."""
        self._free += self._taken
        self._taken.clear()


def are_small(bucket: Bucket) -> bool:
    """Whether copying the parameters' gradients one by one costs more than a second pass over all."""
    return bucket.packed and bucket.numel < 2**14 * len(bucket.params)


def gather_gradients(
    bucket: Bucket, out: Tensor, inverse_scale: Tensor | None, views: list[Tensor] | None = None
) -> Tensor:
    """The bucket's gradients end to end, times a factor.

    Args:
        bucket: The bucket; all its parameters have a gradient.
        out: fp32 [n], written and returned.
        inverse_scale: The factor, fp32 []; None for 1.
        views: Of ``out``, one for each parameter, if they are at hand; needed unless :func:`are_small`.
    """
    grads: list[Any] = [param.grad for param in bucket.params]
    if are_small(bucket) and len({grad.dtype for grad in grads}) == 1 and all(map(Tensor.is_contiguous, grads)):
        out.copy_(torch._utils._flatten_dense_tensors(grads))  # one pass for many tensors
    else:
        if not bucket.packed:
            out.zero_()
        torch._foreach_copy_(bucket.views(out) if views is None else views, grads)
    if inverse_scale is not None:
        out.mul_(inverse_scale)
    return out


def laid_out_as(value: Tensor, grad: Tensor) -> Tensor:
    """``grad``, or a copy of it, in the memory layout of ``value``, which torch's fused kernels take for granted.

    They differ where a module has become channels_last since its masters were laid out.

    Example:
        >>> laid_out_as(torch.zeros(2, 2), torch.ones(2, 2).T).stride()
        (2, 1)
    """
    if grad.layout != torch.strided or grad.stride() == value.stride():
        return grad
    return torch.empty_like(value, dtype=grad.dtype).copy_(grad)
