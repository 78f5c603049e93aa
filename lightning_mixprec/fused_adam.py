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

from lightning_mixprec.bucket_state import BucketState, widen
from lightning_mixprec.layout import Layout
from lightning_mixprec.scratch import are_small, gather_gradients, laid_out_as
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
        self._counts: dict[Any, _Counts] = defaultdict(_Counts)  # by identity of group and bucket, device and dtype

    def step(
        self,
        groups: Sequence[dict[str, Any]],
        layouts: Sequence[Layout],
        state_of: Callable[[Bucket], BucketState],
        inverse_scale: Tensor | None,
    ) -> None:
        """Step all parameters that have a gradient, on their fp32 values.

        Args:
            groups: The optimizer's.
            layouts: Where the parameters of each are.
            state_of: Gives the optimizer's state of a bucket.
            inverse_scale: What gradients have to be multiplied by first, fp32 []; None for 1.
        """
        buckets = [bucket for layout in layouts for bucket in layout.places]
        room, values = _rooms(buckets), _rooms([bucket for bucket in buckets if bucket.master is None])
        for group, layout in zip(groups, layouts, strict=True):
            kernel = _Kernel(group, self.skip)
            own = [param for param in layout.own if param.grad is not None]
            self._unscale(own, inverse_scale)
            self._step_each(kernel, None, own, own)
            # A kernel leaves nothing of the interpreter in the cache: what can be done for all buckets before the first
            # one's turn takes a third of the time that it would between two.
            turns = []
            for bucket, places in layout.places.items():
                shown = [param for place in places if (param := bucket.params[place]).grad is not None]
                if shown:
                    device, size = bucket.half.device, bucket.numel
                    lent = room[device][:size], values[device][:size] if bucket.master is None else None
                    turns.append(_Turn(bucket, shown, state_of(bucket), *lent))
                    turns[-1].gather_state(kernel, self._optimizer.state)
            counts = [turn.flat["step"] for turn in turns if turn.flat is not None]
            kernel.count(counts)
            for turn in turns:
                self._take(turn, kernel, inverse_scale)
            kernel.uncount(counts)
            for turn in turns:
                if turn.flat is not None:
                    turn.state.count()

    def forget(self) -> None:
        """Parameters have other buckets: their step counts are found anew."""
        self._counts.clear()

    def _take(self, turn: _Turn, kernel: _Kernel, inverse_scale: Tensor | None) -> None:
        bucket = turn.bucket
        bucket.adopt(self.edited)
        values = bucket.read(turn.values)
        if turn.flat is not None:
            gather_gradients(bucket, turn.room, inverse_scale, turn.parts)
            kernel([values], [turn.room], [turn.flat], [turn.flat["step"]])
        else:
            turn.state.release()
            self._unscale(turn.shown, inverse_scale)
            parts = [bucket.view(values, bucket.index[param]) for param in turn.shown]
            self._step_each(kernel, bucket, turn.shown, parts)
        unread = self.edited if isinstance(self.edited, Tensor) else None
        bucket.write(values, turn.room, unless=unread)  # while it is in the cache

    def _step_each(
        self, kernel: _Kernel, bucket: Bucket | None, params: Sequence[nn.Parameter], values: Sequence[Tensor]
    ) -> None:
        """Step parameters as tensors of their own: some of ``bucket``'s, or fp32 ones."""
        grads: list[Any] = [param.grad for param in params]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "Adam with fused=True takes no sparse gradients. Use torch.optim.SparseAdam for these parameters, or "
                "make their gradients dense, as nn.Embedding(sparse=False) does."
            )
        states = [self._optimizer.state[param] for param in params]
        if not {state["exp_avg"].dtype for state in states if state} <= {torch.float32}:
            widen(states)
        alike: dict[Any, list[Any]] = defaultdict(list)  # what goes into one call
        for value, grad, state in zip(values, grads, states, strict=True):
            kernel.make_state(state, value)
            if state["exp_avg"].stride() != value.stride():  # the kernel would take it for the same
                moments = {key: each for key, each in state.items() if isinstance(each, Tensor) and each.dim()}
                state.update({key: laid_out_as(value, each) for key, each in moments.items()})
            alike[value.device, value.dtype].append((value, laid_out_as(value, grad), state))
        for kind, each in alike.items():
            all_counts, counts = self._counts[id(kernel.group), id(bucket), kind].of([state for _, _, state in each])
            kernel.count([all_counts])
            kernel(
                [value for value, _, _ in each], [grad for _, grad, _ in each], [state for _, _, state in each], counts
            )
            kernel.uncount([all_counts])


class _Turn:
    """What a bucket's part in a step takes, found before it is its turn.

    Attributes:
        shown: The parameters that step.
        state: The optimizer's, of the bucket.
        room: Memory for gradients, fp32 [n].
        values: Memory for values, fp32 [n]; None where they are stored as such.
        flat: The state, if the bucket can step as one tensor.
        parts: Of ``room``, one for each parameter, if gradients are copied one by one then.
    """

    def __init__(
        self, bucket: Bucket, shown: list[nn.Parameter], state: BucketState, room: Tensor, values: Tensor | None
    ) -> None:
        self.bucket = bucket
        self.shown = shown
        self.state = state
        self.room = room
        self.values = values
        self.flat: dict[str, Any] | None = None
        self.parts: list[Tensor] | None = None

    def gather_state(self, kernel: _Kernel, states: Any) -> None:
        """Make one tensor of the parameters' state, if it is one."""
        if self.state.suits(self.shown):
            self.flat = self.state.gather(states)
        if self.flat is None:
            return
        kernel.make_state(self.flat, self.room)
        if not self.state.shown:
            self.state.scatter(states, self.flat)
        if not are_small(self.bucket):
            self.parts = self.bucket.views(self.room)


class _Kernel:
    """Torch's kernel, with the settings that a group has now.

    Args:
        group: Of the optimizer.
        skip: See :class:`FusedAdam`.
    """

    def __init__(self, group: dict[str, Any], skip: Tensor | None) -> None:
        self.group = group
        self._skip = skip
        self._kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = map(float, group["betas"])
        self._settings = {
            "amsgrad": group["amsgrad"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
            "found_inf": skip,
        }

    def make_state(self, state: dict[str, Any], value: Tensor) -> None:
        """Fill the state of a value that has not been stepped yet."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.group["amsgrad"] else [])):
                state[key] = torch.zeros_like(value, requires_grad=False)

    def count(self, steps: list[Tensor]) -> None:
        """Count a step, before the kernel is called for it."""
        if steps:
            torch._foreach_add_(steps, 1)

    def uncount(self, steps: list[Tensor]) -> None:
        """Count it no more if it was skipped, afterwards."""
        if steps and self._skip is not None:
            torch._foreach_sub_(steps, [self._skip] * len(steps))

    def __call__(
        self, values: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[dict[str, Any]], steps: list[Tensor]
    ) -> None:
        """One step on fp32 values of one device, with gradients of theirs and as many steps counted as it makes."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            lr = lr.to(values[0].device)
        self._kernel(
            list(values),
            list(grads),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if self.group["amsgrad"] else [],
            steps,
            lr=lr,
            **self._settings,
        )


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


def _rooms(buckets: Sequence[Bucket]) -> dict[torch.device, Tensor]:
    """Fp32 memory on each device that any of ``buckets`` fits into: they use it one after the other."""
    sizes: dict[torch.device, int] = {}
    for bucket in buckets:
        sizes[bucket.half.device] = max(bucket.numel, sizes.get(bucket.half.device, 0))
    return {device: torch.empty(size, device=device) for device, size in sizes.items()}
