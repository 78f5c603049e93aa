"""Where finite became non-finite, and whether 16 bits are to blame: the layer, the tensor, the direction.

Why it exists: "the loss is NaN" costs days. A batch's input, a parameter, an activation or a gradient is the first that
is not finite, and the module that made it is known while it runs. Whether fp32 would help that module is tried at once,
by making the same call again (:mod:`lightning_mixprec.replay`).

What it leaves out: when to look and what to do about it (:mod:`lightning_mixprec.diagnosis`). No hook is there
while all is well.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.apart import apart, in_backward
from lightning_mixprec.containers import tensors_in
from lightning_mixprec.magnitudes import cures, differ, headroom_bits, largest, nonfinite
from lightning_mixprec.opaque import is_transformed, visible_modules
from lightning_mixprec.replay import Replayer, ReplayError

# Incoming gradients of this magnitude leave fp16 19 bits to its largest number: a layer that needs more is steep.
_LARGE_GRADIENT = 0.125


@dataclass(frozen=True)
class Verdict:
    """One layer that lost a value to its precision: not finite in 16 bits, finite in fp32 on the same inputs.

    Attributes:
        layer: Qualified name of the module.
        type_name: Class name.
        direction: ``"forward"`` or ``"backward"``.
        dtype: Dtype in which it failed.
        largest_input: Largest magnitude that entered: of the inputs, or of the gradients by the outputs at scale 1.
        largest: Largest magnitude of the result in fp32.
        silent: Whether the 16-bit result was finite but wrong.
        training: Whether it happened in a training step.
        headroom: Factors of two between the largest output and the largest number of ``dtype``, of the modules that
            ran just before and after, by name.

    Example:
        >>> print(Verdict("net.fc", "Linear", "forward", torch.float16, 300.0, 9e4))
        'net.fc' (Linear): its output overflowed float16, which ends at 65504: 9e+04 in fp32, from inputs of at most 300
    """

    layer: str
    type_name: str
    direction: str
    dtype: torch.dtype
    largest_input: float
    largest: float
    silent: bool = False
    training: bool = True
    headroom: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        limit, dtype = torch.finfo(self.dtype).max, str(self.dtype).removeprefix("torch.")
        what = "its output" if self.direction == "forward" else "a gradient it made"
        source = "inputs" if self.direction == "forward" else "gradients"
        if self.silent:
            how = f"was finite but wrong, as something inside left {dtype}: at most {self.largest:.3g} in fp32"
        elif self.direction == "forward" and self.largest_input > limit:
            how = f"was not finite, as what enters it does not fit {dtype}, which ends at {limit:g}"
        elif self.largest > limit:
            how = f"overflowed {dtype}, which ends at {limit:g}: {self.largest:.3g} in fp32"
        else:
            how = f"was not finite, as something inside left {dtype}: at most {self.largest:.3g} in fp32"
        text = f"{self.layer!r} ({self.type_name}): {what} {how}, from {source} of at most {self.largest_input:.3g}"
        if self.headroom:
            text += "; headroom beside it: " + ", ".join(f"{k!r} {v:.1f} bits" for k, v in self.headroom.items())
        return text


class _Visit:
    """One call of one module, between its forward and its backward."""

    def __init__(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.name, self.module = name, module
        self.call: tuple[Any, Any] | None = (args, kwargs)  # kept for suspects only
        self.grad_outputs: dict[int, Tensor] = {}  # by place in the output; of suspects only
        self.reached = False  # backward has come here
        self.clean = True  # and with finite gradients


class Watch:
    """Looks at the boundaries of every module below ``model`` in forward and backward, until :meth:`stop`.

    In forward a module whose output is not finite is run again in fp32 at once. In backward that would take its inputs
    and gradients, which nobody else keeps for every module: a batch first finds *suspects*, modules that were given
    finite gradients and made others, and a later batch tries those in fp32.

    Looking costs a wait for the device at every boundary, so this is for batches that are lost otherwise.

    Args:
        model: The model to watch; the outermost module itself, which holds the training loop's own code, is not.
        replayer: Makes calls again, in the model's compute dtype and in fp32.
        in_fp32: Names of modules that compute in fp32 already.
        suspects: Names of modules to try in backward.
        inspect: Names of modules whose finite outputs are compared with fp32 as well.
        repair: Put the fp32 result in the place of the lost one, so that the batch goes on as if the layer were fp32
            (and shows what else does not fit).
        rescale: What gradients are multiplied by for the trial: they carry the loss scale, and a gradient that is
            finite at a smaller scale is not a reason for fp32.
        cleared: Names of suspects that a trial has cleared.
        prefix: Qualified name of ``model``, if that is a part of something; then it is watched itself.

    Attributes:
        verdicts: What was found, in the order of its finding; at most one for each layer.
        suspects_found: Names of modules to try in backward next time.
        cleared: Names of suspects for which it was a matter of the loss scale.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
        >>> _ = net.half()[0].weight.data.fill_(300)
        >>> watch = Watch(net, Replayer("cpu", torch.float16), repair=True)
        >>> net(torch.full((1, 1), 300.0).half())
        tensor([[90000.]], grad_fn=<ReluBackward0>)
        >>> watch.stop()
        >>> watch.verdicts[0].layer
        '0'
    """

    def __init__(
        self,
        model: nn.Module,
        replayer: Replayer,
        *,
        in_fp32: Collection[str] = (),
        suspects: Collection[str] = (),
        inspect: Collection[str] = (),
        repair: bool = False,
        rescale: float = 1.0,
        cleared: Collection[str] = (),
        prefix: str = "",
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.suspects_found: list[str] = []
        self._in_fp32, self._suspects, self._inspect = set(in_fp32), set(suspects), set(inspect)
        self._repair, self._rescale = repair, rescale
        self.cleared = set(cleared)
        self._versions: dict[str, list[int]] = {}  # of the inputs of calls that have not ended
        self._replayer, self._compute = replayer, replayer.compute
        self._lost: set[str] = set()  # names of blamed modules whose output stays what it is
        self._root_cause: str | None = None  # the first that is not finite and that fp32 would not help
        self._visits: dict[str, list[_Visit]] = {}
        self._last: tuple[str, Tensor] | None = None  # what ran before, and its largest output
        self._neighbour: Verdict | None = None  # blamed last; what runs next stands beside it
        self._busy = False  # inside a replay, whose modules are not looked at
        self._stance: Any = None
        self._handles: list[Any] = []
        owners: dict[nn.Parameter, list[str]] = {}
        for name, module in visible_modules(model, prefix):
            if name:
                hook = partial(self._after_forward, name, f"{name!r} ({type(module).__name__})")
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
                enter = partial(self._before_forward, name)
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                for param in module.parameters(recurse=False):
                    owners.setdefault(param, []).append(name)
        for param, names in owners.items():
            if param.requires_grad:
                self._handles.append(param.register_hook(partial(self._at_parameter, names)))
        if "torch._dynamo" in sys.modules:  # a compiled module would run past hooks that were not there at that time
            self._stance = torch.compiler.set_stance("force_eager")

    def stop(self) -> None:
        """Remove all hooks; what was found can still be reported."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._visits.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def clear(self) -> None:
        """Forget what the batch before has shown: a new one begins."""
        self.verdicts, self.suspects_found, self._root_cause = [], [], None
        self._visits.clear()
        self._lost.clear()
        self._last = self._neighbour = None

    def report(self) -> str | None:
        """The first layer to blame, or else what fp32 would not help; None if all that was seen was finite."""
        return str(self.verdicts[0]) if self.verdicts else self._root_cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return _blind_watch()

    def __reduce__(self) -> Any:
        return (_blind_watch, ())  # a copy of a model that is being watched is not

    # Forward

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._busy:
            self._versions[name] = _versions((args, kwargs))

    def _after_forward(self, name: str, label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._busy or is_transformed():
            return None
        # Under checkpointing a module is called again in backward: what was repaired is repaired again, by the same
        # fp32 call, so that both times what follows is given the same.
        with apart():
            return self._look(name, label, module, args, kwargs, output)

    def _look(self, name: str, label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        bad = bool(nonfinite(output))
        better = None
        if bad and not self._carries_it(args, kwargs) and not self._below_is_lost(name):
            better = self._try_forward(name, label, module, args, kwargs, output)
        elif bad and not self.verdicts:
            self._note_cause(f"the input of {label}")
        elif not bad and name in self._inspect:
            better = self._compare(name, module, args, kwargs)
        replaced = better is not None and self._repair and _has_grad(better) == _has_grad(output)
        output = better if replaced else output
        if better is not None and not replaced:
            self._lost.add(name)
        if not replaced:
            self._note_neighbour(name, output)
        self._follow(name, module, args, kwargs, output)
        return output if replaced else None

    def _note_neighbour(self, name: str, output: Any) -> None:
        """Keep what stands beside a blamed layer: what ran before it, and what runs after it."""
        if in_backward():
            return
        blamed = self._neighbour
        if blamed is not None and not is_within(name, blamed.layer) and not is_within(blamed.layer, name):
            blamed.headroom[name] = headroom_bits(float(largest(output)), self._compute)
            self._neighbour = None
        self._last = (name, largest(output))

    @staticmethod
    def _carries_it(args: Any, kwargs: Any) -> bool:
        """Whether NaN or +inf came in; -inf is what masks are made of."""
        found = [tensor for _, tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        return any(bool((torch.isnan(tensor) | torch.isposinf(tensor)).any()) for tensor in found)

    def _below_is_lost(self, name: str) -> bool:
        """Without repair a container's output is not finite because of what is inside it."""
        return any(is_within(lost, name) for lost in self._lost)

    def _try_forward(self, name: str, label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        size = largest((args, kwargs))
        if self._is_fp32(name):
            self._note_cause(f"the output of {label}, in fp32, from finite inputs of at most {float(size):.3g}")
            return None
        if self._versions.get(name) != _versions((args, kwargs)):
            self._note_cause(f"the output of {label}, which changes its inputs in place and cannot be called again")
            return None
        try:
            self._busy = True
            with torch.no_grad():  # not of somebody's hook
                again = self._replayer.outputs(module, args, kwargs, fp32=False)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._repair):
                better = self._replayer.outputs(module, args, kwargs, fp32=True, keep=self._repair)
        except ReplayError as error:
            self._note_cause(f"the output of {label}, from finite inputs of at most {float(size):.3g} ({error})")
            return None
        finally:
            self._busy = False
        if not (cures(output, better) and cures(again, better)):
            if self._carries_it(output, None):  # with -inf alone, a mask is made
                self._note_cause(f"the output of {label}, from finite inputs of at most {float(size):.3g}")
            return None
        self._blame_forward(name, module, float(size), better)
        return better

    def _compare(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The fp32 result, if the 16-bit one, or what gradients it gives, is far from it."""
        if self._is_fp32(name) or self._versions.get(name) != _versions((args, kwargs)):
            return None
        try:
            self._busy = True
            with torch.no_grad():
                narrow = self._replayer.outputs(module, args, kwargs, fp32=False)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._repair):
                wide = self._replayer.outputs(module, args, kwargs, fp32=True, keep=self._repair)
            # Behind a layer of zeros, or beside a large residual, only gradients tell.
            if not differ(narrow, wide) and not self._gradients_differ(module, args, kwargs, wide):
                return None
            with torch.no_grad(), torch.random.fork_rng(devices=self._replayer.devices):
                torch.manual_seed(0)
                if differ(self._replayer.outputs(module, args, kwargs, fp32=True), wide):
                    return None  # it is random, and 16 bits draw other numbers than fp32
        except ReplayError:
            return None
        finally:
            self._busy = False
        self._blame_forward(name, module, float(largest((args, kwargs))), wide, silent=True)
        return wide

    def _gradients_differ(self, module: nn.Module, args: Any, kwargs: Any, like: Any) -> bool:
        floats = [tensor for _, tensor in tensors_in(like) if tensor.is_floating_point()]
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(tensor.shape, generator=generator).to(tensor.device) for tensor in floats]
        one, other = (self._replayer.gradients(module, args, kwargs, grads, fp32=fp32) for fp32 in (False, True))
        return not bool(nonfinite(other)) and (bool(nonfinite(one)) or differ(one, other))

    def _blame_forward(self, name: str, module: nn.Module, size: float, better: Any, *, silent: bool = False) -> None:
        beside = {}
        if self._last is not None and not is_within(self._last[0], name) and not in_backward():
            beside = {self._last[0]: headroom_bits(float(self._last[1]), self._compute)}
        kind = type(module).__name__
        verdict = Verdict(name, kind, "forward", self._compute, size, float(largest(better)), silent, headroom=beside)
        self._neighbour = verdict
        self._blame(verdict)

    # Backward

    def _follow(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook the tensors that enter and leave, if a backward will reach them."""
        if not torch.is_grad_enabled():
            return
        visit = _Visit(name, module, args, kwargs)
        if name not in self._suspects:
            visit.call = None
        floats = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
        for place, tensor in enumerate(floats):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._at_output, visit, place))
        for _, tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and not any(tensor is each for each in floats):
                tensor.register_hook(partial(self._at_input, visit))
        self._visits.setdefault(name, []).append(visit)

    def _at_output(self, visit: _Visit, place: int, grad: Tensor) -> None:
        if not self._busy:
            visit.reached = True
            visit.clean = visit.clean and not bool(nonfinite(grad))
            if visit.call is not None:
                visit.grad_outputs[place] = grad

    def _at_input(self, visit: _Visit, grad: Tensor) -> None:
        if not self._busy and bool(nonfinite(grad)):
            self._suspect(visit)

    def _at_parameter(self, owners: list[str], grad: Tensor) -> None:
        if not self._busy and bool(nonfinite(grad)):
            for name in owners:
                for visit in self._visits.get(name, []):
                    self._suspect(visit)

    def _suspect(self, visit: _Visit) -> None:
        """The module was given finite gradients and took part in one that is not: try it, or remember it."""
        if not (visit.reached and visit.clean) or visit.name in self.cleared:
            return
        found = [*self.suspects_found, *(verdict.layer for verdict in self.verdicts)]
        if any(is_within(name, visit.name) for name in found):
            return
        if visit.call is None:
            self.suspects_found.append(visit.name)
        else:
            self._try_backward(visit)

    def _try_backward(self, visit: _Visit) -> None:
        assert visit.call is not None
        (args, kwargs), visit.call = visit.call, None
        label = f"{visit.name!r} ({type(visit.module).__name__})"
        places = range(max(visit.grad_outputs) + 1)
        grads = [visit.grad_outputs.get(place) for place in places]
        # At a smaller scale a layer whose gradients are large anyway may be fine, and no other layer's vanish there.
        most = float(largest(grads))
        rescale = min(self._rescale, _LARGE_GRADIENT / most) if most > 0 else self._rescale
        grads = [None if grad is None else grad.float() * rescale for grad in grads]
        size = largest(grads)
        try:
            self._busy = True
            narrow = self._replayer.gradients(visit.module, args, kwargs, grads, fp32=False)
            if not bool(nonfinite(narrow)):
                self.cleared.add(visit.name)  # at a smaller loss scale it is fine
                return
            wide = self._replayer.gradients(visit.module, args, kwargs, grads, fp32=True)
        except ReplayError as error:
            self._note_cause(f"a gradient made by {label}, from finite ones of at most {float(size):.3g} ({error})")
            return
        finally:
            self._busy = False
        if self._is_fp32(visit.name) or bool(nonfinite(wide)):
            self._note_cause(f"a gradient made by {label}, in fp32 too, from finite ones of at most {float(size):.3g}")
            return
        kind = type(visit.module).__name__
        self._blame(Verdict(visit.name, kind, "backward", self._compute, float(size), float(largest(wide))))

    def _is_fp32(self, name: str) -> bool:
        return self._compute == torch.float32 or name in self._in_fp32

    def _blame(self, verdict: Verdict) -> None:
        if all(verdict.layer != known.layer for known in self.verdicts):
            self.verdicts.append(verdict)

    def _note_cause(self, cause: str) -> None:
        if self._root_cause is None and not self.verdicts:
            self._root_cause = cause


def _blind_watch() -> Watch:
    watch = object.__new__(Watch)
    watch._busy = True
    return watch


def _has_grad(value: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in tensors_in(value))


def _versions(value: Any) -> list[int]:
    """How often each tensor was written to; of inference tensors nobody keeps account."""
    return [0 if tensor.is_inference() else tensor._version for _, tensor in tensors_in(value)]


def first_nonfinite(model: nn.Module, batch: Any, watch: Watch | None) -> str:
    """Name the first non-finite tensor: of the batch, of the parameters, of what was watched, or of the gradients.

    Args:
        model: The model, with the gradients of the bad batch.
        batch: The batch: tensors in containers.
        watch: What watched this batch, if anything did.

    Example:
        >>> first_nonfinite(nn.Linear(1, 1), {"image": torch.tensor([float("nan")])}, None)
        "the batch, at ['image']"
    """
    for path, tensor in tensors_in(batch):
        if bool(nonfinite(tensor)):
            return f"the batch{f', at {path}' if path else ''}"
    for name, param in model.named_parameters():
        if bool(nonfinite(param)):
            return f"parameter {name!r}"
    found = watch.report() if watch is not None else None
    if found is not None:
        return found
    for name, param in reversed(list(model.named_parameters())):  # backward reaches the last layers first
        if param.grad is not None and bool(nonfinite(param.grad)):
            return f"the gradient of {name!r}, nearest to the loss"
    return "nothing that is left to see"


def is_within(name: str, container: str) -> bool:
    """Whether a module is ``container`` or below it, by their qualified names.

    Example:
        >>> is_within("net.fc1.act", "net.fc1"), is_within("net.fc10", "net.fc1")
        (True, False)
    """
    return f"{name}.".startswith(f"{container}.")
