"""How an optimizer that holds 16-bit parameters steps on their fp32 values.

Why it exists: for the length of a step, ``param_groups`` and ``state`` of the user's optimizer hold fp32 tensors in
place of the module's parameters, and afterwards they hold the parameters again. Three ways, cheapest first:

* flat: a bucket is one tensor. For optimizers whose update is elementwise, such as Adam and SGD.
* shaped: one call for each bucket, with a tensor for each parameter. For those that look at a whole tensor, such as
  Muon and Adafactor.
* whole: one call with everything. For those that keep state for a group or across parameters; needs standing fp32
  masters.

What it leaves out: which way an optimizer can go (:mod:`lightning_mixprec.probe`) and the memory behind it
(:mod:`lightning_mixprec.storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.probe import classify
from lightning_mixprec.storage import Bucket, Masters


class Homes(Protocol):
    """What a borrower asks of the masters: where a parameter's fp32 value is."""

    def home(self, param: nn.Parameter) -> tuple[Bucket, int] | None:
        """Bucket and place of ``param``, or None if it is its own fp32 value."""

    def enrol(self, params: Iterable[nn.Parameter]) -> None:
        """Give a home to 16-bit parameters that have none."""

    def unscale_gradients(self, params: Iterable[nn.Parameter], inverse_scale: Tensor | None = None) -> None:
        """Make gradients fp32 and final."""


class Borrower:
    """Steps one optimizer on fp32 values, in the way :func:`classify` found.

    Args:
        optimizer: The user's optimizer, holding the module's parameters.
        homes: The masters.

    Attributes:
        way: ``"flat"``, ``"shaped"`` or ``"whole"``.

    Raises:
        ValueError: If the optimizer cannot be stepped with the way that the masters are stored, or at all; names it.
    """

    def __init__(self, optimizer: Optimizer, homes: Homes, masters: Masters) -> None:
        self.optimizer = optimizer
        self._homes = homes
        self._states: dict[Bucket, BucketState] = {}
        self._shown: dict[Bucket, list[nn.Parameter]] = {}  # fp32 stand-ins of a bucket's parameters, one for each
        _refuse_wrapper(optimizer)
        _widen_constructor_state(optimizer)
        self.way, reason = classify(optimizer)
        if self.way == "whole" and masters != "fp32":
            raise ValueError(
                f"masters={masters!r} steps on a part of the weights at a time, which {type(optimizer).__name__} "
                f"cannot do: {reason}. Use masters='fp32'."
            )
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_state_dict_post_hook(self._own_scalars),
        ]
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}  # stand-in -> parameter, while a window is open
        # Optimizers with modes (schedule-free) write weights and read state outside a step: also inside a window.
        self._modes = [name for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        for name in self._modes:
            setattr(optimizer, name, partial(self._in_whole, getattr(optimizer, name)))

    def close(self) -> None:
        """Hand the optimizer back: the module's parameters, state of their own, no hooks."""
        self._put_back()
        for state in self._states.values():
            state.release()
        for handle in self._handles:
            handle.remove()
        for name in self._modes:
            delattr(self.optimizer, name)

    @torch.no_grad()
    def step(self, call: Callable[[], Any], inverse_scale: Tensor | None) -> Any:
        """One step; see :meth:`lightning_mixprec.master.MasterWeights.step`."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._homes.enrol(params)
        hooked = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        if self.way == "whole" or (hooked and all(b.master is not None for b in self._buckets_of(params))):
            self._homes.unscale_gradients(params, inverse_scale)
            return self._in_whole(call)
        result = None
        groups = list(self.optimizer.param_groups)
        sizes = [bucket.numel for bucket in self._buckets_of(params)]
        scratch = Scratch(max(sizes, default=0))
        try:
            for group in groups:
                self.optimizer.param_groups[:] = [group]
                own, members = self._members(group["params"])
                own = [param for param in own if param.grad is not None]
                if own:
                    self._homes.unscale_gradients(own, inverse_scale)
                    result = self._call_with(group, own, call)
                for bucket, indices in members.items():
                    stepped = self._step_bucket(group, bucket, indices, scratch, call, inverse_scale)
                    result = stepped if stepped is not None else result
        finally:
            self.optimizer.param_groups[:] = groups
        return result

    def _buckets_of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        return list(dict.fromkeys(home[0] for home in map(self._homes.home, params) if home is not None))

    def _members(self, params: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], dict[Bucket, list[int]]]:
        own: list[nn.Parameter] = []
        members: dict[Bucket, list[int]] = {}
        for param in params:
            home = self._homes.home(param)
            if home is None:
                own.append(param)
            else:
                members.setdefault(home[0], []).append(home[1])
        return own, members

    def _step_bucket(
        self,
        group: dict[str, Any],
        bucket: Bucket,
        indices: list[int],
        scratch: Scratch,
        call: Callable[[], Any],
        inverse_scale: Tensor | None,
    ) -> Any:
        stepped = [index for index in indices if bucket.params[index].grad is not None]
        if not stepped:
            return None
        bucket.adopt()
        values = bucket.read(scratch.values(bucket))
        state = self._states.setdefault(bucket, BucketState(bucket))
        grads = [bucket.params[index].grad for index in stepped]
        complete = len(stepped) == len(bucket.params) and not any(grad.is_sparse for grad in grads if grad is not None)
        flat_state = state.gather(self.optimizer.state) if self.way == "flat" and complete else None
        if flat_state is None:
            state.release()
            self._homes.unscale_gradients([bucket.params[index] for index in stepped], inverse_scale)
            shown = [self._show(bucket.view(values, index), bucket.params[index]) for index in stepped]
            self._exchange(dict(zip([bucket.params[index] for index in stepped], shown, strict=True)))
            try:
                result = self._call_with(group, shown, call)
            finally:
                self._put_back()
        else:
            whole = nn.Parameter(values)
            whole.grad = scratch.grads(bucket, inverse_scale)
            if flat_state:
                self.optimizer.state[whole] = flat_state
            try:
                result = self._call_with(group, [whole], call)
            finally:
                state.scatter(self.optimizer.state, self.optimizer.state.pop(whole, flat_state))
        bucket.write(values, scratch.room(bucket))
        return result

    def _call_with(self, group: dict[str, Any], params: list[nn.Parameter], call: Callable[[], Any]) -> Any:
        kept = group["params"][:]
        group["params"][:] = params
        try:
            return call()
        finally:
            group["params"][:] = kept

    @torch.no_grad()
    def _in_whole(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` while the optimizer holds an fp32 tensor in place of every 16-bit parameter."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        replacement: dict[nn.Parameter, nn.Parameter] = {}
        values: dict[Bucket, Tensor] = {}
        for bucket in self._buckets_of(params):
            bucket.adopt()
            self._states.setdefault(bucket, BucketState(bucket)).release()
            values[bucket] = bucket.read()
            replacement.update(
                (param, self._show(view, param))
                for param, view in zip(bucket.params, bucket.views(values[bucket]), strict=True)
            )
        self._exchange(replacement)
        for group in self.optimizer.param_groups:
            group["params"][:] = [replacement.get(param, param) for param in group["params"]]
        try:
            return call()
        finally:
            self._put_back()
            for bucket, value in values.items():
                bucket.write(value)

    def _show(self, view: Tensor, param: nn.Parameter) -> nn.Parameter:
        """An fp32 parameter for an optimizer to step on: values in ``view``, gradient and marks of ``param``."""
        shown = nn.Parameter(view)
        shown.__dict__.update(param.__dict__)  # marks that optimizers look for, such as `no_weight_decay`
        if param.grad is not None and param.grad.dtype == torch.float32:
            shown.grad = param.grad
        return shown

    # Windows in which optimizer.state is keyed by stand-ins

    def _exchange(self, replacement: Mapping[nn.Parameter, nn.Parameter]) -> None:
        state = self.optimizer.state
        for param, stand_in in replacement.items():
            self._replaced[stand_in] = param
            if param in state:
                state[stand_in] = state.pop(param)

    def _put_back(self) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._replaced.get(param, param) for param in group["params"]]
        state = self.optimizer.state
        for stand_in, param in self._replaced.items():
            if stand_in in state:
                state[param] = state.pop(stand_in)
        self._replaced.clear()

    def _before_load(self, optimizer: Optimizer, _: Any) -> None:
        """Torch casts loaded state to the dtype of its parameter: show it fp32 ones (of no memory)."""
        params = [param for group in optimizer.param_groups for param in group["params"] if self._homes.home(param)]
        stand_ins = {p: nn.Parameter(torch.empty((), device=p.device).expand(p.shape)) for p in params}
        for bucket in self._buckets_of(params):
            self._states.setdefault(bucket, BucketState(bucket)).release()
        self._exchange(stand_ins)
        for group in optimizer.param_groups:
            group["params"][:] = [stand_ins.get(param, param) for param in group["params"]]

    def _after_load(self, _: Optimizer) -> None:
        self._put_back()

    def _own_scalars(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        """Give every entry a step count of its own: loaded elsewhere, a shared one would be counted up many times."""
        seen: set[int] = set()
        for key, entry in state_dict["state"].items():
            if isinstance(entry, dict):
                shared = {k: v.clone() for k, v in entry.items() if isinstance(v, Tensor) and id(v) in seen}
                seen.update(id(v) for v in entry.values() if isinstance(v, Tensor))
                if shared:
                    state_dict["state"][key] = {**entry, **shared}


class Scratch:
    """fp32 memory for one bucket at a time, allocated when a step first needs it and gone with the step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def values(self, bucket: Bucket) -> Tensor | None:
        """Room for the bucket's fp32 values; None where it has them standing."""
        return None if bucket.master is not None else self._tensor("values", bucket)

    def room(self, bucket: Bucket) -> Tensor:
        """Room for as many fp32 numbers as the bucket has; the same as :meth:`grads` uses."""
        return self._tensor("grads", bucket)

    def grads(self, bucket: Bucket, inverse_scale: Tensor | None) -> Tensor:
        """The bucket's gradients, fp32 [n], unscaled."""
        out = self._tensor("grads", bucket)
        grads: list[Tensor] = [param.grad for param in bucket.params if param.grad is not None]
        packed = sum(grad.numel() for grad in grads) == bucket.used
        if packed and len({grad.dtype for grad in grads}) == 1 and len(grads) > 1 and all(map(_contiguous, grads)):
            out[: bucket.used].copy_(torch._utils._flatten_dense_tensors(grads))
            out[bucket.used :].zero_()
        else:
            if bucket.used < out.numel() or not packed:
                out.zero_()  # padding
            for view, grad in zip(bucket.views(out), grads, strict=True):
                view.copy_(grad)
        if inverse_scale is not None and grads[0].dtype != torch.float32:
            out.mul_(inverse_scale)
        return out

    def _tensor(self, name: str, bucket: Bucket) -> Tensor:
        key = (name, bucket.half.device)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self._size, device=bucket.half.device)
        return self._tensors[key][: bucket.numel]


class BucketState:
    """Optimizer state of a bucket: one flat tensor for each key inside a step, views of it for each parameter outside.

    Args:
        bucket: The bucket whose parameters are meant.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._flat: dict[str, Any] | None = None  # what the optimizer sees inside a flat step
        self._parts: list[dict[str, Any]] = []  # what it sees outside, one for each parameter
        self._seen: dict[str, Any] = {}  # values of `_flat`, and of each part, as they were put there
        self._items: list[tuple[Any, ...]] = []

    def gather(self, state: Any) -> dict[str, Any] | None:
        """Take the parameters' state out of ``state`` as one flat state; None, with nothing taken, if it is not one."""
        parts = [state.get(param) for param in self.bucket.params]
        if self._flat is None or not self._untouched(parts):
            self._flat = self._flatten(parts)
        if self._flat is not None:
            for param in self.bucket.params:
                state.pop(param, None)
        return self._flat

    def scatter(self, state: Any, flat: dict[str, Any]) -> None:
        """Put ``flat`` back as the parameters' state."""
        if self._parts and self._flat is not None and flat.keys() == self._parts[0].keys():
            moved = [key for key, value in flat.items() if value is not self._seen.get(key)]
        else:
            moved = list(flat)
            self._parts = [{} for _ in self.bucket.params]
        for key in moved:
            value = flat[key]
            pieces = self.bucket.views(value) if self._is_elementwise(key, value) else [value] * len(self._parts)
            for part, piece in zip(self._parts, pieces, strict=True):
                part[key] = piece
        self._flat, self._seen = flat, dict(flat)
        self._items = [tuple(part.values()) for part in self._parts]
        state.update(zip(self.bucket.params, self._parts, strict=True))

    def release(self) -> None:
        """Give each parameter scalars of its own: from here on they are stepped one by one."""
        if self._flat is not None:
            for part in self._parts[1:]:
                part.update({k: v.clone() for k, v in part.items() if isinstance(v, Tensor) and v is self._flat[k]})
        self._flat, self._parts = None, []

    def _is_elementwise(self, key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and key != "step" and value.shape == (self.bucket.numel,)

    def _untouched(self, parts: Sequence[Any]) -> bool:
        return len(self._parts) == len(parts) and all(
            part is mine and len(part) == len(items) and all(map(_is, part.values(), items))
            for part, mine, items in zip(parts, self._parts, self._items, strict=True)
        )

    def _flatten(self, parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        filled = [part for part in parts if part]
        if not filled:
            return {}
        keys = filled[0].keys()
        if len(filled) < len(parts) or any(part.keys() != keys for part in filled):
            return None
        flat: dict[str, Any] = {}
        for key in keys:
            values = [part[key] for part in filled]
            shaped = all(
                isinstance(v, Tensor) and v.shape == p.shape for v, p in zip(values, self.bucket.params, strict=True)
            )
            if shaped and key != "step":
                flat[key] = torch.zeros(self.bucket.numel, dtype=values[0].dtype, device=values[0].device)
                for view, value in zip(self.bucket.views(flat[key]), values, strict=True):
                    view.copy_(value)
            elif all(_equal(value, values[0]) for value in values):
                flat[key] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
            else:
                return None
        return flat


def _contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _refuse_wrapper(optimizer: Optimizer) -> None:
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise ValueError(
            f"{type(optimizer).__name__} wraps another optimizer (in {inner[0]!r}) and changes weights behind its "
            "back, which fp32 masters cannot follow. Use the inner optimizer; MasterWeightAveraging averages weights."
        )


def _widen_constructor_state(optimizer: Optimizer) -> None:
    """State made in a constructor was made from 16-bit parameters: make it fp32.

    A constant that a setting such as `initial_accumulator_value` (Adagrad) rounds to is that setting.
    """
    for group in optimizer.param_groups:
        initial = [value for key, value in group.items() if key.startswith("init") and isinstance(value, float)]
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                    wide = value.float()
                    for setting in initial:
                        if bool((value == torch.tensor(setting, dtype=value.dtype)).all()):
                            wide.fill_(setting)
                    optimizer.state[param][key] = wide


def _is(one: object, other: object) -> bool:
    return one is other


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
