"""Torch's fused Adam kernel, called for one bucket after the other.

Why it exists: the kernel is bound by memory, so a bucket's gradients, values and rounding should go through it while
the bucket is in the cache. ``optimizer.step`` takes everything at once, and costs as much bookkeeping for each call as
the kernel takes for a hundred thousand elements. What happens between two buckets is little for the same reason: the
kernels leave nothing of it in the cache.

What it leaves out: every other optimizer, which is called as it is (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
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

    Attributes:
        skip: fp32 [], on the device: 1 makes every step do nothing, and not count. None for 0.
        edited: See :meth:`lightning_mixprec.storage.Bucket.adopt`; if it is on the device, ``skip`` is 1 where it is.
    """

    def __init__(self, optimizer: Optimizer, unscale: Callable[[Iterable[nn.Parameter], Tensor | None], None]) -> None:
        self.skip: Tensor | None = None
        self.edited: bool | Tensor | None = None
        self._optimizer = optimizer
        self._unscale = unscale
        self._counts: dict[int, _Counts] = defaultdict(_Counts)  # by the group's identity

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
        bucket.adopt(self.edited)
        mark = scratch.mark()
        values = bucket.read(None if bucket.master is not None else scratch.take(bucket))
        flat = state.gather(self._optimizer.state) if state.suits(shown) else None
        grads = None
        if flat is None:
            state.release()
            self._unscale(shown, inverse_scale)
            self._kernel(group, shown, [bucket.view(values, bucket.index[param]) for param in shown])
        else:
            grads = gather_gradients(bucket, scratch.take(bucket), inverse_scale)
            _fused_adam(group, [values], [grads], [flat], self.skip)
            if state.shown:
                state.count()
            else:
                state.scatter(self._optimizer.state, flat)
        unread = self.edited if isinstance(self.edited, Tensor) else None
        bucket.write(values, grads, unless=unread)  # while it is in the cache
        scratch.reset(mark)

    def _kernel(self, group: dict[str, Any], params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        grads: list[Any] = [param.grad for param in params]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "Adam with fused=True takes no sparse gradients. Use torch.optim.SparseAdam for these parameters, or "
                "make their gradients dense, as nn.Embedding(sparse=False) does."
            )
        states = [self._optimizer.state[param] for param in params]
        if not {state["exp_avg"].dtype for state in states if state} <= {torch.float32}:
            widen(states)
        _fused_adam(group, list(values), grads, states, self.skip, self._counts[id(group)])


class _Counts:
    """Step counts of several parameters, in one tensor: a step then counts in one operation.

    One for each of fifty small parameters would take a CPU three times as long as the kernel does.
    """

    def __init__(self) -> None:
        self._all = torch.zeros(0)
        self._each: list[Tensor] = []
        self._addresses: list[int] = []  # of their memory, which `step.data = ...` replaces

    def of(self, states: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Tensor]]:
        """The tensor, fp32 [n], and its elements, which are from now on the ``step`` of each state."""
        found = [state["step"] for state in states]
        known = len(found) == len(self._each) and all(map(operator.is_, found, self._each))
        if not known or list(map(Tensor.data_ptr, found)) != self._addresses:
            self._all = torch.stack(found)
            self._each = list(self._all)
            self._addresses = list(map(Tensor.data_ptr, self._each))
            for state, count in zip(states, self._each, strict=True):
                state["step"] = count
        return self._all, self._each


def _fused_adam(
    group: dict[str, Any],
    values: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    skip: Tensor | None,
    counts: _Counts | None = None,
) -> None:
    """The kernel, on parameters of one group; ``counts`` are those of the last time."""
    if not values:
        return
    for value, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
    beta1, beta2 = group["betas"]
    tensors = (
        values,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
    )
    settings = {
        "amsgrad": group["amsgrad"],
        "beta1": beta1,
        "beta2": beta2,
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }
    decoupled = group["decoupled_weight_decay"]
    numbers = not any(isinstance(each, Tensor) for each in (beta1, beta2, group["lr"]))
    if numbers and len({(value.device, value.dtype) for value in values}) == 1:
        count, each = (states[0]["step"], [states[0]["step"]]) if counts is None else counts.of(states)
        count.add_(1)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(*tensors, each, **settings, found_inf=skip)
        if skip is not None:
            count.sub_(skip)
        return
    adam(
        *tensors,
        [state["step"] for state in states],
        foreach=False,
        fused=True,
        capturable=group["capturable"],
        found_inf=skip,
        decoupled_weight_decay=decoupled,
        has_complex=False,
        **settings,
    )
