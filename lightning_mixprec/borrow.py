"""How an optimizer that holds 16-bit parameters steps on their fp32 values.

Why it exists: for the length of a step, ``param_groups`` and ``state`` of the user's optimizer hold fp32 tensors in
place of the module's parameters, and afterwards they hold the parameters again. Ways, cheapest first:

* kernel: torch's fused Adam kernel, called for one bucket after the other while the bucket is in the cache.
* flat: a bucket is one tensor, a few buckets make one call. For optimizers whose update is elementwise.
* shaped: likewise, with one tensor for each parameter. For those that look at a whole tensor (Muon, Adafactor).
* counted: likewise, but of all parameters, whether they have a gradient or not. For those that count steps for a whole
  group, or move weights by their momentum alone, where fp32 masters do not stand.
* whole: one call with everything. For those that keep other state for a group, or look across parameters; needs
  standing fp32 masters.

What it leaves out: which way an optimizer can go (:mod:`lightning_mixprec.probe`), how a bucket's state becomes one
flat state (:mod:`lightning_mixprec.bucket_state`) and the memory behind it (:mod:`lightning_mixprec.storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_mixprec.bucket_state import BucketState, widen
from lightning_mixprec.counts import Counts
from lightning_mixprec.exchange import Exchange, holding, take_replaced, without_work
from lightning_mixprec.fused_adam import FusedAdam, has_fused_kernel
from lightning_mixprec.layout import Homes, Layout, Layouts, shares
from lightning_mixprec.probe import classify, refuse_wrapper, without_step_hooks
from lightning_mixprec.scratch import Scratch, gather_gradients, laid_out_as
from lightning_mixprec.step_guard import StepGuard, StrangerGuard
from lightning_mixprec.storage import Bucket, Masters

# fp32 values in one call. Calls cost time of their own, but what a flat step has gathered should still be in the cache
# when the optimizer comes to it, and what that has written when it is rounded.
_CALL_ELEMENTS = 2**22
_FLAT_CALL_ELEMENTS_ON_CPU = 2**20


class Borrower:
    """Steps one optimizer on fp32 values, in the way :func:`~lightning_mixprec.probe.classify` found.

    Args:
        optimizer: The user's optimizer, holding the module's parameters.
        homes: The masters.
        masters: How these are stored.

    Attributes:
        way: ``"kernel"``, ``"flat"``, ``"shaped"``, ``"counted"`` or ``"whole"``.

    Raises:
        ValueError: If the optimizer cannot be stepped with the way that the masters are stored, or at all; names it.
    """

    def __init__(self, optimizer: Optimizer, homes: Homes, masters: Masters) -> None:
        self.optimizer = optimizer
        self._homes = homes
        self._masters = masters
        self._states: dict[Bucket, BucketState] = {}
        self._layouts = Layouts(homes)
        self._exchange = Exchange(optimizer)
        self._fused = FusedAdam(optimizer, homes.gradients.unscale)
        refuse_wrapper(optimizer)
        widen(optimizer.state.values())  # made from 16-bit parameters, by an optimizer that was made in mid-fit
        self._known: tuple[int, str] = (-1, "")  # for how many groups a way was looked for, and which was found
        self.way = self._find_way()
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_state_dict_pre_hook(self._refuse_halfway),
        ]
        self._guard = StepGuard(optimizer, "on 16-bit weights")
        self._edited: bool | Tensor | None = None  # what the step at hand was told of edits
        self._halfway = False  # in a step, with a part of the weights stepped, or of the parameters exchanged
        # Optimizers with modes (schedule-free) write weights and read state outside a step: also inside a window. The
        # class is exchanged, not the methods of the instance, because Lightning's wrapper calls those of the class.
        self._class = type(optimizer)
        modes = {name: _in_window(name) for name in ("train", "eval") if callable(getattr(optimizer, name, None))}
        if modes:
            names = {"__module__": self._class.__module__, "__qualname__": self._class.__qualname__}
            optimizer.__class__ = type(self._class.__name__, (self._class,), {**modes, **names})
            optimizer.__dict__["_mixprec_borrower"] = self

    def close(self) -> None:
        """Hand the optimizer back: the module's parameters, state of their own, no hooks."""
        self._exchange.put_back()
        for state in self._states.values():
            state.release()
        self._guard.remove()
        for handle in self._handles:
            handle.remove()
        self.optimizer.__class__ = self._class
        self.optimizer.__dict__.pop("_mixprec_borrower", None)

    def forget(self, buckets: Iterable[Bucket]) -> None:
        """Follow parameters that have left these buckets; each keeps its state."""
        for bucket in buckets:
            if bucket in self._states:
                self._states.pop(bucket).release()
        self._layouts.forget()
        self._fused.forget()

    def _find_way(self) -> str:
        """The way as of now: of one group it cannot be told whether steps look across groups, and ``fused`` can change.

        Raises:
            ValueError: If the masters are not stored for it.
        """
        if has_fused_kernel(self.optimizer):  # elementwise, up to how a CPU rounds a tensor's last few elements
            return "kernel"
        count, way = self._known
        if count != len(self.optimizer.param_groups) and way != "whole":
            way, reason = classify(self.optimizer)
            if way == "whole" and self._masters != "fp32":
                raise ValueError(
                    f"masters={self._masters!r} steps on a part of the weights at a time, which "
                    f"{type(self.optimizer).__name__} cannot do: {reason}. Use masters='fp32'."
                )
            if way == "counted" and self._masters == "fp32":
                way = "whole"  # right whatever comes later, and no dearer where all fp32 values are there
            self._known = len(self.optimizer.param_groups), way
        return way

    # The step

    @property
    def takes_flag(self) -> bool:
        """Whether a step can be told on the device to do nothing, and leaves no trace then.

        A rounding that draws random numbers would, and so would state that the step makes.
        """
        if self._find_way() != "kernel" or self._masters not in ("fp32", "split"):
            return False
        if self._step_hooks("pre") or self._step_hooks("post"):
            return False
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if len(state) >= sum(param.requires_grad for group in groups for param in group["params"]):
            return True  # without looking at each
        return all(state.get(param) for group in groups for param in group["params"] if param.grad is not None)

    @torch.no_grad()
    def step(
        self,
        call: Callable[[], Any],
        inverse_scale: Tensor | None,
        skip: Tensor | None = None,
        edited: bool | Tensor | None = None,
    ) -> Any:
        """One step; see :meth:`lightning_mixprec.master.MasterWeights.step`."""
        self._edited = edited
        try:
            with self._guard.lifted():
                return self._step(call, inverse_scale, skip)
        except RuntimeError as error:
            if "grad_fn" not in str(error):
                raise
            raise ValueError(
                f"{self._class.__name__} differentiates gradients in its step, as after a backward with "
                "create_graph=True, and the fp32 gradients that it is given for 16-bit weights have no graph. Use "
                "MasterWeightPrecision('fp32'), or an optimizer that needs no second derivatives."
            ) from error

    def _refuse_halfway(self, _: Optimizer) -> None:
        if self._halfway:
            raise RuntimeError(
                f"{self._class.__name__}.state_dict() was called in the middle of its step, as a signal handler or "
                "another thread that saves a checkpoint may do: some weights have made the step and some have not. Set "
                "a flag there, and save in `on_train_batch_end`."
            )

    def _step(self, call: Callable[[], Any], inverse_scale: Tensor | None, skip: Tensor | None) -> Any:
        self.way = self._find_way()
        groups = list(self.optimizer.param_groups)
        layouts = [self._layouts.of(group) for group in groups]
        hooked = self._step_hooks("pre") or self._step_hooks("post")
        standing = all(bucket.master is not None for layout in layouts for bucket in layout.places)
        if self.way == "whole" or (hooked and standing):
            for layout in layouts:
                self._homes.gradients.unscale(layout.params, inverse_scale)
            return self._step_whole(call)
        in_parts = self._step_by_kernel if self.way == "kernel" else self._step_in_parts
        if not hooked:
            return in_parts(groups, layouts, call, inverse_scale, skip)
        # Hooks expect one call, with everything in place: they get it around the parts, with the module's parameters.
        for layout in layouts:
            self._homes.gradients.unscale(layout.params, inverse_scale)
        for hook in self._step_hooks("pre"):
            if hook(self.optimizer, (), {}) is not None:
                raise ValueError(f"A step hook of {self._class.__name__} changes arguments; use masters='fp32'.")
        with without_step_hooks(self.optimizer):
            result = in_parts(groups, layouts, call, None, None)
        for hook in self._step_hooks("post"):
            hook(self.optimizer, (), {})
        return result

    def _step_hooks(self, kind: str) -> list[Callable[..., Any]]:
        own = getattr(self.optimizer, f"_optimizer_step_{kind}_hooks").values()
        everywhere = _global_optimizer_pre_hooks if kind == "pre" else _global_optimizer_post_hooks
        hooks = [*everywhere.values(), *(hook for hook in own if hook != self._guard.hook)]
        return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), StrangerGuard)]

    def _step_in_parts(
        self,
        groups: list[dict[str, Any]],
        layouts: list[Layout],
        call: Callable[[], Any],
        inverse_scale: Tensor | None,
        _: Tensor | None,
    ) -> Any:
        scratch, counts = Scratch(), Counts(self.optimizer)
        on_cpu = any(bucket.half.device.type == "cpu" for layout in layouts for bucket in layout.places)
        limit = _FLAT_CALL_ELEMENTS_ON_CPU if on_cpu and self.way == "flat" else _CALL_ELEMENTS
        result = None
        self._halfway = True
        try:
            for group, own, buckets in shares(groups, layouts, limit):
                with ExitStack() as loans:
                    lent = [param for param in own if param.grad is not None or self.way == "counted"]
                    self._homes.gradients.unscale(lent, inverse_scale)
                    for bucket, places in buckets:
                        lent += loans.enter_context(self._lend(group, bucket, places, scratch, inverse_scale))
                    loans.enter_context(holding(group, lent))
                    if lent:
                        self.optimizer.param_groups[:] = [group]
                        if self.way == "counted":
                            loans.enter_context(counts.call(group))
                        result = call()
                scratch.reset()
                self._refuse_differing(counts)
        finally:
            self.optimizer.param_groups[:] = groups
            self._halfway = False
        return result

    def _refuse_differing(self, counts: Counts) -> None:
        if counts.differing:
            raise RuntimeError(
                f"{self._class.__name__} is stepped on a part of the weights at a time, and what it keeps for a whole "
                f"group ({', '.join(map(repr, sorted(counts.differing)))}) has come to depend on the part. Go on from "
                "the last checkpoint with masters='fp32'."
            )

    def _step_by_kernel(
        self,
        groups: list[dict[str, Any]],
        layouts: list[Layout],
        call: Callable[[], Any],
        inverse_scale: Tensor | None,
        skip: Tensor | None,
    ) -> Any:
        self._fused.skip, self._fused.edited = skip, self._edited
        self._halfway = True
        try:
            self._fused.step(groups, layouts, self._state_of, inverse_scale)
            with without_work(self.optimizer):  # schedulers watch for the call
                return call()
        finally:
            self._halfway = False

    def _state_of(self, bucket: Bucket) -> BucketState:
        if bucket not in self._states:
            self._states[bucket] = BucketState(bucket)
        return self._states[bucket]

    @contextmanager
    def _lend(
        self,
        group: dict[str, Any],
        bucket: Bucket,
        places: list[int],
        scratch: Scratch,
        inverse_scale: Tensor | None,
    ) -> Iterator[list[nn.Parameter]]:
        """Fp32 parameters for the optimizer to step on; afterwards their values and state go back to where they live.

        Yields nothing to step on where no gradient is there, but to optimizers that may count on without one, or move
        a weight by its momentum.
        """
        params = [bucket.params[place] for place in places]
        if self.way != "counted":
            params = [param for param in params if param.grad is not None]
        if not params:
            yield []
            return
        bucket.adopt(self._edited)
        values = bucket.read(None if bucket.master is not None else scratch.take(bucket))
        state = self._state_of(bucket)
        flat_state = state.take(self.optimizer.state) if self.way == "flat" and state.suits(params) else None
        if flat_state is None:
            state.release()
            self._homes.gradients.unscale(params, inverse_scale)
            lent = {param: self._show(param, bucket.view(values, bucket.index[param])) for param in params}
            self._exchange.lend_state(lent)
            try:
                yield list(lent.values())
            finally:
                self._exchange.put_back(lent.values())
                self._hide(bucket, values, lent)
                room = None
        else:
            whole = nn.Parameter(values)
            whole.grad = room = gather_gradients(bucket, scratch.take(bucket), inverse_scale)
            if flat_state:
                self.optimizer.state[whole] = flat_state
            try:
                yield [whole]
            finally:
                take_replaced(whole, values)
                state.scatter(self.optimizer.state, self.optimizer.state.pop(whole, flat_state))
        bucket.write(values, room)

    @torch.no_grad()
    def _step_whole(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` while the optimizer holds an fp32 tensor in place of every 16-bit parameter."""
        lent: dict[Bucket, dict[nn.Parameter, nn.Parameter]] = {}
        values: dict[Bucket, Tensor] = {}
        for group in self.optimizer.param_groups:
            for bucket, places in self._layouts.of(group).places.items():
                if bucket not in values:
                    bucket.adopt(self._edited)
                    self._state_of(bucket).release()
                    values[bucket] = bucket.read()
                for place in places:
                    param = bucket.params[place]
                    shown = self._show(param, bucket.view(values[bucket], place))
                    lent.setdefault(bucket, {})[param] = shown
        everything = {param: stand_in for shown in lent.values() for param, stand_in in shown.items()}
        self._halfway = True
        try:
            self._exchange.lend_all(everything)
            self._halfway = False  # hooks in there see the optimizer with all that it has
            return call()
        finally:
            self._halfway = True
            self._exchange.put_back()
            self._halfway = False
            for bucket, value in values.items():
                self._hide(bucket, value, lent[bucket])
                bucket.write(value)

    def _show(self, param: nn.Parameter, view: Tensor) -> nn.Parameter:
        """The stand-in of ``param``, with the given memory and the gradient of ``param``."""
        stand_in = self._homes.stand_in(param)
        if stand_in.data_ptr() != view.data_ptr():
            stand_in.data = view
        grad = param.grad
        stand_in.grad = laid_out_as(view, grad) if grad is not None and grad.dtype == torch.float32 else None
        stand_in.requires_grad_(param.requires_grad)
        if param.__dict__:
            stand_in.__dict__.update(param.__dict__)
        return stand_in

    def _hide(self, bucket: Bucket, values: Tensor, lent: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Drop gradient and scratch memory of stand-ins; what an optimizer put in place of ``data`` counts."""
        for param, stand_in in lent.items():
            take_replaced(stand_in, bucket.view(values, bucket.index[param]))
            stand_in.grad = None
            if bucket.master is None:
                stand_in.data = torch.zeros((), device=values.device).expand(stand_in.shape)

    # Loading

    def _before_load(self, optimizer: Optimizer, _: Any) -> None:
        """Torch casts loaded state to the dtype of its parameter: show it fp32 ones (of no memory)."""
        for state in self._states.values():
            state.release()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stand_ins = {param: self._homes.stand_in(param) for param in params if self._homes.home(param)}
        self._exchange.lend_all(stand_ins)

    def _after_load(self, optimizer: Optimizer) -> None:
        self._exchange.put_back()
        for param, state in optimizer.state.items():
            home = self._homes.home(param) if isinstance(param, nn.Parameter) else None
            if home is not None:
                like = home[0].view(home[0].half, home[1])
                for key, value in state.items():
                    if type(value) is Tensor and value.shape == like.shape:
                        state[key] = laid_out_as(like, value)


def _in_window(name: str) -> Callable[..., Any]:
    """A method that runs the one of the same name with fp32 weights in place of the 16-bit parameters."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.__dict__.get("_optimizer", self)  # Lightning's wrapper calls this with itself
        borrower: Borrower = optimizer._mixprec_borrower
        return borrower._step_whole(partial(getattr(borrower._class, name), optimizer, *args, **kwargs))

    return method
