"""Torch's fused Adam kernel, called for one bucket after the other.

Why it exists: the kernel is bound by memory, so a bucket's gradients, values and rounding should go through it while
the bucket is in the cache. ``optimizer.step`` takes everything at once, and costs as much bookkeeping for each call as
the kernel takes for a hundred thousand elements. What happens between two buckets is little for the same reason: the
kernels leave nothing of it in the cache.

What it leaves out: every other optimizer, which is called as it is (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam

from lightning_mixprec.bucket_state import BucketState, widen
from lightning_mixprec.scratch import Scratch, gather_gradients
from lightning_mixprec.storage import Bucket


def has_fused_kernel(optimizer: Optimizer) -> bool:
    """Whether all of ``optimizer`` is torch's fused Adam or AdamW, nothing derived from it."""
    exact = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return exact and all(group["fused"] and not group["differentiable"] for group in optimizer.param_groups)


class FusedAdam:
    """Steps parameters of one of torch's fused Adam optimizers, with the same bits as ``optimizer.step``.

    Args:
        optimizer: For which :func:`has_fused_kernel`; its state is used and made as it would do itself.
        unscale: Makes gradients of 16-bit parameters fp32 and multiplies them by a factor, if there is one.
        skip: fp32 [], on the device: 1 makes every step do nothing, and not count. None for 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        unscale: Callable[[Iterable[nn.Parameter], Tensor | None], None],
        skip: Tensor | None = None,
    ) -> None:
        self._state = optimizer.state
        self._unscale = unscale
        self._skip = skip

    def step_own(self, group: dict[str, Any], params: Sequence[nn.Parameter], inverse_scale: Tensor | None) -> None:
        """Step fp32 parameters on their own values."""
        shown = [param for param in params if param.grad is not None]
        self._unscale(shown, inverse_scale)
        self._kernel(group, shown, shown)

    def step_bucket(
        self,
        group: dict[str, Any],
        bucket: Bucket,
        params: Sequence[nn.Parameter],
        state: BucketState,
        scratch: Scratch,
        inverse_scale: Tensor | None,
    ) -> None:
        """Step those of ``params``, all or some of the bucket's, that have a gradient, on their fp32 values."""
        shown = [param for param in params if param.grad is not None]
        if not shown:
            return
        bucket.adopt()
        mark = scratch.mark()
        values = bucket.read(None if bucket.master is not None else scratch.take(bucket))
        flat = state.gather(self._state) if state.suits(shown) else None
        grads = None
        if flat is None:
            state.release()
            self._unscale(shown, inverse_scale)
            self._kernel(group, shown, [bucket.view(values, bucket.index[param]) for param in shown])
        else:
            grads = gather_gradients(bucket, scratch.take(bucket), inverse_scale)
            _fused_adam(group, [values], [grads], [flat], self._skip)
            if state.shown:
                state.count()
            else:
                state.scatter(self._state, flat)
        bucket.write(values, grads)  # while it is in the cache
        scratch.reset(mark)

    def _kernel(self, group: dict[str, Any], params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        grads: list[Any] = [param.grad for param in params]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "Adam with fused=True takes no sparse gradients. Use torch.optim.SparseAdam for these parameters, or "
                "make their gradients dense, as nn.Embedding(sparse=False) does."
            )
        states = [self._state[param] for param in params]
        widen(states)
        _fused_adam(group, list(values), grads, states, self._skip)


def _fused_adam(
    group: dict[str, Any],
    values: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    skip: Tensor | None,
) -> None:
    for value, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
    beta1, beta2 = group["betas"]
    adam(
        values,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=False,
        fused=True,
        capturable=group["capturable"],
        found_inf=skip,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        has_complex=False,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
