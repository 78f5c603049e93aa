"""Which modules must compute in fp32: those whose calls fail in 16 bits, on the same inputs, and not in fp32.

Why it exists: a large activation is not a fault, and a fault need not show at any boundary: logits overflow before a
softmax, a hand-written norm squares in half and returns zeros. What tells is the call itself, made again in 16 bits and
in fp32 (:mod:`lightning_mixprec.replay`), with inputs in the dtypes that they will have in training. To know these, the
model is run once as the plugin would have it. A module that fails becomes an fp32 layer, which changes what its
neighbours get, so the trials are repeated until nothing new fails.

What it leaves out: code that belongs to no module below the model (a loss in ``training_step``), since no policy can
name it, and small rounding errors, which add up over layers that are all innocent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.autocast import compute_context
from lightning_mixprec.containers import tensors_in
from lightning_mixprec.layers import map_tensors, restore_, swap_layers_
from lightning_mixprec.magnitudes import cures, differ, largest, nonfinite
from lightning_mixprec.observation import Observation
from lightning_mixprec.opaque import visible_modules
from lightning_mixprec.overflow import is_within
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.replay import Replayer, ReplayError


@dataclass
class Call:
    """One call of one module in fp32.

    Attributes:
        name: Qualified name of the module.
        index: How many calls of it came before.
        module: The module.
        inputs: Copies of its positional and keyword arguments.
        grads: Gradient by each floating-point tensor of the output, by its place.

    Example:
        >>> Call("0", 0, nn.ReLU(), ((torch.ones(1),), {})).grads
        {}
    """

    name: str
    index: int
    module: nn.Module
    inputs: Any
    grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the trials have shown.

    Attributes:
        reasons: Why a module must compute in fp32, by its name; none of them is within another.
        notes: What no policy can cure.
        loss: Of the trial batch in 16 bits, with these modules in fp32; None if the model could not be run.
        loss_fp32: The same in fp32.
        narrow: Modules whose outputs are then in 16 bits, and the gradients by them.

    Example:
        >>> Outcome({"net.attention": "overflows inside"}, [], 1.0, 1.0, set()).reasons
        {'net.attention': 'overflows inside'}
    """

    reasons: dict[str, str]
    notes: list[str]
    loss: float | None
    loss_fp32: float
    narrow: set[str]


class Trial:
    """Tries the calls of one batch in 16 bits.

    Args:
        model: In fp32, with nobody else's hooks that mind being called again; its weights and classes are changed, so
            give a copy.
        loss: The loss of the batch, the same however often it is asked for.
        policy: What is fp32 in any case.
        observed: The model on whole batches; what does not fit there is evidence too.
        device_type: Type of the model's device.

    Example:
        >>> class Rescale(nn.Module):  # a norm that no policy knows by its name
        ...     def forward(self, x):
        ...         return x * (x * x).mean().rsqrt()
        >>> net, x = nn.Sequential(nn.Linear(2, 2), Rescale()), torch.full((1, 2), 900.0)
        >>> _ = nn.init.eye_(net[0].weight)
        >>> with Observation(net) as observed:
        ...     _ = net(x)
        >>> list(Trial(net, lambda: net(x).sum(), PrecisionPolicy("fp16"), observed, "cpu").outcome().reasons)
        ['1']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], Tensor],
        policy: PrecisionPolicy,
        observed: Observation,
        device_type: str,
    ) -> None:
        self._model, self._loss, self._policy, self._observed = model, loss, policy, observed
        self._device_type, self._compute = device_type, policy.compute_dtype
        self._limit = torch.finfo(self._compute).max
        self._masters = {param: param.detach().clone() for param in model.parameters()}
        self._buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
        self._replayer = Replayer(device_type, self._compute, lambda param: self._masters[param], call_hooks=True)
        self._calls: list[Call] = []  # in the order of their ends: what is inside comes first
        self._seen: dict[tuple[str, int], tuple[list[torch.dtype], list[torch.dtype]]] = {}  # of inputs and outputs
        self._unfit: dict[str, float] = {}  # modules that would be given what was lost on the way to them

    def outcome(self) -> Outcome:
        """Try all calls, until nothing new fails."""
        loss_fp32 = self._record()
        reasons: dict[str, str] = {}
        tried: dict[tuple[str, int], Any] = {}
        while True:
            plan = self._policy.resolve(self._model, also_fp32=reasons)
            loss = self._run_as_trained(plan)
            self._unfit = {}
            new: dict[str, str] = {}
            for call in self._calls:
                key = (call.name, call.index)
                if call.name == "" or plan.kinds[call.name] == "fp32" or key not in self._seen:
                    continue
                if any(is_within(failed, call.name) for failed in new):
                    continue  # once that is in fp32, it may be well
                below = [name for name in reasons if is_within(name, call.name)]
                if tried.get(key) == (self._seen[key], below):
                    continue
                reason = self._fails(call)
                if reason:
                    new[call.name] = reason
                elif call.name not in self._unfit:
                    tried[key] = (self._seen[key], below)
            if not new:
                break
            reasons |= new
        notes = self._notes(loss, loss_fp32)
        reasons = {
            name: reason
            for name, reason in reasons.items()
            if not any(name != other and is_within(name, other) for other in reasons)
        }
        narrow = {name for (name, _), (_, made) in self._seen.items() if self._compute in made}
        return Outcome(reasons, notes, None if isinstance(loss, Exception) else float(loss), loss_fp32, narrow)

    # What a batch consists of

    def _record(self) -> float:
        """The calls of one forward and backward in fp32."""
        open_calls: list[Call] = []
        counts: Counter[str] = Counter()

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            open_calls.append(Call(name, counts[name], module, map_tensors((args, kwargs), copied)))
            counts[name] += 1

        def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
            while (call := open_calls.pop()).name != name:
                pass  # checkpointing ends the second forward of what is inside early
            self._calls.append(call)
            floats = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
            for place, tensor in enumerate(floats):
                if tensor.requires_grad:
                    tensor.register_hook(partial(call.grads.__setitem__, place))

        handles = []
        for name, module in visible_modules(self._model):
            handles.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(leave, name)))
        try:
            loss = self._loss()
            if loss.requires_grad:
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        return float(loss.detach())

    def _run_as_trained(self, plan: PrecisionPlan) -> Tensor | Exception:
        """Give the model the layers and weights of ``plan``, and note the dtypes that pass its modules' boundaries.

        Returns:
            The loss, or what the model's own code raised: about a value that is not finite, say.
        """
        restore_(self._model)
        swap_layers_(self._model, plan.kinds, self._device_type, self._compute)
        for name, param in self._model.named_parameters():
            param.grad = None
            param.data = self._masters[param].to(plan.parameters[name])

        counts: Counter[str] = Counter()
        self._seen = {}

        def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._seen[name, counts[name]] = (_dtypes((args, kwargs)), _dtypes(output))
            counts[name] += 1

        modules = visible_modules(self._model)
        handles = [module.register_forward_hook(partial(leave, name), with_kwargs=True) for name, module in modules]
        try:
            with compute_context(self._device_type, self._compute):
                return self._loss().detach()
        except Exception as error:  # what stands behind it may be cured in the next round
            return error
        finally:
            for handle in handles:
                handle.remove()
            for buffer, value in self._buffers.items():  # statistics of values that were not finite would stay
                buffer.data.copy_(value)

    # What a call shows

    def _fails(self, call: Call) -> str | None:
        """Why the module must be fp32, or None."""
        dtypes, made = self._seen[call.name, call.index]
        args, kwargs = _cast(call.inputs, dtypes)
        size = float(largest(call.inputs))
        if cures((args, kwargs), call.inputs):
            self._unfit[call.name] = size
            return None
        if self._compute in made:
            for what, tallies in (("value", self._observed.activations), ("gradient", self._observed.output_gradients)):
                most = tallies[call.name].largest
                if most > self._limit:
                    return f"its output's {what}s reach {most:.3g}, and {self._named} ends at {self._limit:.5g}"
        try:
            return self._fails_forward(call, args, kwargs, size) or self._fails_backward(call, args, kwargs)
        except ReplayError:
            return None

    def _fails_forward(self, call: Call, args: Any, kwargs: Any, size: float) -> str | None:
        with torch.no_grad():
            narrow = self._replayer.outputs(call.module, args, kwargs, fp32=False)
            wide = self._replayer.outputs(call.module, *call.inputs, fp32=True)
        if cures(narrow, wide):
            if size > self._limit:
                return f"it is given values up to {size:.3g}, and {self._named} ends at {self._limit:.5g}"
            return f"its output is not finite in {self._named}, and at most {float(largest(wide)):.3g} in fp32"
        if differ(narrow, wide) and self._own_code_differs(call, args, kwargs):
            return f"its output in {self._named} is off by more than a tenth of the largest"
        return None

    def _own_code_differs(self, call: Call, args: Any, kwargs: Any) -> bool:
        """Whether it is off even if all modules below it return what they do in fp32, rounded once.

        Otherwise a deep container would be blamed for the sum of its layers' rounding errors.
        """
        below = [module for _, module in visible_modules(call.module) if module is not call.module]
        right: dict[nn.Module, list[Any]] = {module: [] for module in below}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            right[module].append(map_tensors(output, torch.clone))

        def put(module: nn.Module, args: Any, output: Any) -> Any:
            return _cast(right[module].pop(0), _dtypes(output))

        def outputs(hook: Callable[..., Any], args: Any, kwargs: Any, *, fp32: bool) -> Any:
            handles = [module.register_forward_hook(hook) for module in below]
            try:
                with torch.no_grad():
                    return self._replayer.outputs(call.module, args, kwargs, fp32=fp32)
            finally:
                for handle in handles:
                    handle.remove()

        wide = outputs(note, *call.inputs, fp32=True)
        return differ(outputs(put, args, kwargs, fp32=False), wide)

    def _fails_backward(self, call: Call, args: Any, kwargs: Any) -> str | None:
        if not call.grads:
            return None
        # A mean over fewer samples has larger gradients than one over the whole batch.
        most = float(largest(list(call.grads.values())))
        ratio = min(self._observed.output_gradients[call.name].largest / most, 1.0) if most else 1.0
        grads = [call.grads.get(place) for place in range(max(call.grads) + 1)]
        grads = [None if grad is None else grad * ratio for grad in grads]
        if not bool(nonfinite(self._replayer.gradients(call.module, args, kwargs, grads, fp32=False))):
            return None
        args, kwargs = call.inputs
        wide = self._replayer.gradients(call.module, args, kwargs, grads, fp32=True)
        if bool(nonfinite(wide)):
            return None
        return f"a gradient is not finite in {self._named} at scale 1, and at most {float(largest(wide)):.3g} in fp32"

    def _notes(self, loss: Tensor | Exception, loss_fp32: float) -> list[str]:
        """What is left when all modules that failed are fp32."""
        notes = [
            f"{name!r} is given values up to {size:.3g} that code outside of all modules makes in {self._named}, "
            f"which ends at {self._limit:.5g}. Compute them in fp32 there: x.float()."
            for name, size in self._unfit.items()
        ]
        own = [call for call in self._calls if call.name == "" and ("", call.index) in self._seen]
        for reason in {self._fails(call) for call in own} - {None}:
            notes.append(f"The model's own forward: {reason}. No policy can name it: move that code to a module below.")
        if isinstance(loss, Exception):
            notes.append(f"The model as it would be trained raised {type(loss).__name__}: {loss}")
        elif bool(nonfinite(loss)):
            notes.append(
                f"The loss is not finite in {self._named} even so: look at code that belongs to no module below the "
                "model, such as its own forward or training_step."
            )
        elif not notes and abs(float(loss) - loss_fp32) > 0.1 * abs(loss_fp32):
            notes.append(
                f"The loss is {float(loss):.4g} in {self._named} and {loss_fp32:.4g} in fp32: rounding adds up, though "
                "no module alone is to blame. Keep in fp32 what makes the inputs of the layers found, or look at code "
                "that belongs to no module."
            )
        return notes

    @property
    def _named(self) -> str:
        return self._policy.compute


def _dtypes(value: Any) -> list[torch.dtype]:
    found: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.dtype)
        return tensor

    map_tensors(value, note)
    return found


def _cast(inputs: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """Copies of ``inputs`` in these dtypes, one after the other."""
    rest = iter(dtypes)
    return map_tensors(inputs, lambda tensor: tensor.to(next(rest, tensor.dtype)))
