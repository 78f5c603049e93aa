"""Layers that compute in another dtype than their surroundings, made from existing ones by exchanging their class.

Why it exists: a layer that must compute in fp32 has to do so however it is called: from a training step, a callback,
a copy, a pickle, compiled, by another method than ``forward``. Patching methods or registering hooks loses that on one
of those ways; a subclass made on the fly does not. ``isinstance``, the class name, parameters, buffers and hooks stay
as they were.

What it leaves out: deciding which layer is which (:mod:`lightning_mixprec.policy`), and which calls there are
(:mod:`lightning_mixprec.calls`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, update_wrapper
from inspect import isgeneratorfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._contextlib import _wrap_generator

from lightning_mixprec.autocast import compute_context, is_outside, no_autocast
from lightning_mixprec.calls import is_called, is_metric, own_methods
from lightning_mixprec.norms import lean_norm
from lightning_mixprec.opaque import is_script
from lightning_mixprec.subclass import made_of, make_subclass
from lightning_mixprec.widening import HALF, Cast, call_widened, widened, widened_unless_parameter
from lightning_mixprec.widening import map_tensors as map_tensors
from lightning_mixprec.widening import widen as widen


class SwappedLayer(nn.Module):
    """Base of the classes below. ``_mixprec`` is (device type, compute dtype), set on the instance by :func:`swap_`.

    An instance made from the class itself (``type(layer)(...)``) has none, and is a plain one.
    """

    _mixprec: tuple[str, torch.dtype] | None = None
    _mixprec_wraps_methods = False  # those of the user's class, like forward

    def _mixprec_context(self) -> AbstractContextManager[Any] | None:
        """What a call needs around it, besides what is there."""
        return None

    def _mixprec_call(self, function: Any, args: Any, kwargs: Any, cast: Cast = widened) -> Any:
        return function(*args, **kwargs)

    def _mixprec_within(self, function: Any, args: Any, kwargs: Any, cast: Cast = widened) -> Any:
        context = self._mixprec_context()
        if context is None:
            return self._mixprec_call(function, args, kwargs, cast)
        with context:
            return self._mixprec_call(function, args, kwargs, cast)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: a class made here is not one more for the registry of its base, and has no keywords for it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class does not exist under its name in any module, so pickle and copy are told how to make it.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        kind, base = made_of(type(self))
        return (_rebuild, (kind, make, tuple(base if arg is type(self) else arg for arg in args)), *rest)


class Fp32Layer(SwappedLayer):
    """Runs ``forward`` in fp32: autocast off, 16-bit floating-point inputs widened, results left in fp32.

    So do the other public methods of the user's class, of which parameters given as arguments stay themselves.
    Results are not cast back, because a value that needed fp32 may not fit into 16 bits; what takes it casts it.

    Example:
        >>> layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    _mixprec_wraps_methods = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, in fp32."""
        return self._mixprec_within(super().forward, args, kwargs)

    def _mixprec_context(self) -> AbstractContextManager[Any] | None:
        device_type = self._mixprec[0] if self._mixprec is not None else None
        if device_type is None or not torch.is_autocast_enabled(device_type):
            return None
        return no_autocast(device_type)

    def _mixprec_call(self, function: Any, args: Any, kwargs: Any, cast: Cast = widened) -> Any:
        return call_widened(function, args, kwargs, cast)


class WidenedLayer(Fp32Layer):
    """An fp32 layer whose own parameters may come in 16 bits, as FSDP2 gathers them, and are widened for each call.

    Example:
        >>> layer = swap_(nn.Linear(2, 2).bfloat16(), WidenedLayer, "cpu", torch.bfloat16)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def _mixprec_call(self, function: Any, args: Any, kwargs: Any, cast: Cast = widened) -> Any:
        own = self.named_parameters(recurse=False)
        wide: dict[str, Any] = {name: param.float() for name, param in own if param.dtype in HALF}
        with _reparametrize_module(self, wide) if wide else nullcontext():
            return super()._mixprec_call(function, args, kwargs, cast)


class NormLayer(SwappedLayer):
    """Normalisation with fp32 parameters and statistics whose result is in the compute dtype.

    The activations are widened, and the fp32 result is rounded once. For backward torch's own GroupNorm, LayerNorm and
    BatchNorm save 16-bit activations: the first two here (:mod:`lightning_mixprec.norms`), and BatchNorm because with
    fp32 parameters its kernels take them as they are and compute the same.

    Example:
        >>> layer = swap_(nn.LayerNorm(4), NormLayer, "cpu", torch.bfloat16)
        >>> layer(torch.randn(2, 4)).dtype, layer.weight.dtype
        (torch.bfloat16, torch.float32)
    """

    _is_batch_norm = False
    _base_forward: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class; fp32 inside, compute dtype outside."""
        if self._mixprec is None:
            return super().forward(*args, **kwargs)
        device_type, compute = self._mixprec
        with no_autocast(device_type):
            if self._is_batch_norm and self.weight is not None and len(args) == 1 and args[0].dtype == compute:
                return super().forward(*args)
            if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == compute:
                lean = lean_norm(self._base_forward, self, args[0])
                if lean is not None:
                    return lean
            result = call_widened(super().forward, args, kwargs)
            return map_tensors(result, lambda tensor: tensor.to(compute) if tensor.dtype == torch.float32 else tensor)


class InnerLayer(SwappedLayer):
    """A layer that computes as what is around it says, and under autocast where nothing is: called from a hook.

    Then a call gives what it gives in a training step, of ``forward`` or another public method of the user's class.
    Inside ``torch.autocast(enabled=False)`` it computes as without autocast: who writes that has said what is wanted.

    A ``dtype`` property that says what the parameters are, as in models of diffusers, says what they were: such a model
    casts its timestep features to it, which would round them.

    Example:
        >>> layer = swap_(nn.Linear(2, 2).bfloat16(), InnerLayer, "cpu", torch.bfloat16)
        >>> layer(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    _mixprec_wraps_methods = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, under some autocast."""
        return self._mixprec_within(super().forward, args, kwargs)

    def _mixprec_context(self) -> AbstractContextManager[Any] | None:
        return compute_context(*self._mixprec) if self._mixprec is not None and is_outside(self._mixprec[0]) else None


class ComputeLayer(InnerLayer):
    """The same, under autocast to the compute dtype in any case: of ``forward``.

    Example:
        >>> layer = swap_(nn.Linear(2, 2).bfloat16(), ComputeLayer, "cpu", torch.bfloat16)
        >>> with torch.autocast("cpu", enabled=False):
        ...     layer(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, under autocast to the compute dtype."""
        if self._mixprec is None:
            return super().forward(*args, **kwargs)
        with compute_context(*self._mixprec):
            return super().forward(*args, **kwargs)


def swap_(
    module: nn.Module, kind: type[SwappedLayer], device_type: str, compute: torch.dtype, *, wraps_forward: bool = True
) -> nn.Module:
    """Exchange the class of ``module`` in place for a subclass of the given kind, and return it.

    Args:
        module: Any module whose ``forward`` is defined by its class.
        kind: :class:`Fp32Layer`, :class:`NormLayer`, :class:`ComputeLayer` or :class:`InnerLayer`.
        device_type: Type of the device it will run on, such as ``"cuda"``.
        compute: Compute dtype of its surroundings.
        wraps_forward: Whether the kind's ``forward`` has to be the one that is called.

    Raises:
        TypeError: If ``forward`` was replaced on the instance or compiled to TorchScript: the class would not be asked.
    """
    _drop_own_forward(module)
    if wraps_forward and (is_script(module) or "forward" in module.__dict__):
        raise TypeError(
            f"{type(module).__name__} has a forward of its own (TorchScript, or assigned on the instance), which "
            f"{kind.__name__} cannot wrap. Define forward in a class, or take the layer out of the fp32 entries."
        )
    if "_mixprec" not in module.__dict__:
        found = module.dtype if issubclass(kind, InnerLayer) and has_dtype(module) else None
        if is_parametrized(module):
            _swap_beneath(kind, module)
        else:
            module.__class__ = _subclass(kind, type(module))
        module.__dict__["_mixprec"] = (device_type, compute)
        if found is not None:
            module.__dict__["_mixprec_dtype"] = found
    return module


def swap_layers_(
    model: nn.Module,
    kinds: Mapping[str, str],
    device_type: str,
    compute: torch.dtype,
    fp32: type[Fp32Layer] = Fp32Layer,
) -> None:
    """Swap every module below ``model`` that is not to compute like its surroundings, in place.

    Args:
        model: The model.
        kinds: ``"fp32"``, ``"norm"`` or ``"compute"`` by qualified name, as a plan has them. Others are for others.
        device_type: Type of the device it will run on.
        compute: Compute dtype of the others.
        fp32: The kind of fp32 layers.

    Raises:
        TypeError: If ``forward`` or another method of an fp32 layer was replaced on the instance.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1))
        >>> swap_layers_(net, {"0": "fp32", "1": "norm"}, "cpu", torch.bfloat16)
        >>> isinstance(net[0], Fp32Layer), isinstance(net[1], NormLayer)
        (True, True)
    """
    classes: dict[str, type[SwappedLayer]] = {"fp32": fp32, "norm": NormLayer}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind = classes.get(kinds.get(name, "compute"))
        # TorchScript, which `swap_` refuses, does not even say whether it is.
        if kind is not None and (is_script(layer) or is_called(layer)):
            if not isinstance(layer, kind):
                restore_(layer, below=False)
                _refuse_own_methods(name, layer, kind)
            swap_(layer, kind, device_type, compute)


def swap_inner_(layers: Iterable[nn.Module], device_type: str, compute: torch.dtype) -> None:
    """Make each an :class:`InnerLayer`, in place, if it has parameters, anything to call and a class of its own yet.

    Metrics, and networks in them, are left alone.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.SiLU())
        >>> swap_inner_(net.modules(), "cpu", torch.bfloat16)
        >>> isinstance(net, InnerLayer), isinstance(net[0], InnerLayer), isinstance(net[1], InnerLayer)
        (True, True, False)
    """
    layers = list(layers)
    metrics = {each for layer in layers if is_metric(layer) for each in layer.modules()}
    for layer in layers:
        _drop_own_forward(layer)
        own = isinstance(layer, SwappedLayer) or is_script(layer) or "forward" in layer.__dict__
        if not own and layer not in metrics and is_called(layer) and next(layer.parameters(), None) is not None:
            swap_(layer, InnerLayer, device_type, compute)


def restore_(module: nn.Module, *, below: bool = True) -> nn.Module:
    """Give ``module`` and (unless told otherwise) everything below it its own class back, in place, and return it.

    Example:
        >>> layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
        >>> type(restore_(layer)) is nn.Linear
        True
    """
    for each in module.modules() if below else [module]:
        if "_mixprec" in each.__dict__:
            _drop_own_forward(each)
            _restore_class(each)
            for mark in [key for key in each.__dict__ if key.startswith("_mixprec")]:
                del each.__dict__[mark]
    return module


def _swap_beneath(kind: type[SwappedLayer], module: nn.Module) -> None:
    """Leave on top what torch's parametrizations made, which removes itself; a class of its own, as copies share it."""
    above: Any = type(module)
    names = {name: value for name, value in vars(above).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(above.__name__, (_subclass(kind, above.__base__),), names)
    module.__dict__["_mixprec_above"] = above


def _restore_class(module: nn.Module) -> None:
    """Give ``module`` its own class back, beneath one that was put on top meanwhile, as torch's parametrizations do."""
    above: Any = module.__dict__.get("_mixprec_above")
    if above is not None and vars(above).keys() == vars(type(module)).keys():  # parametrized as before
        module.__class__ = above
        return
    chain = type(module).__mro__
    place = next((place for place, each in enumerate(chain) if "_base_forward" in vars(each)), None)
    if place is None:  # on top there is a class that it shares with one that has been restored
        return
    swapped, own = chain[place], made_of(chain[place])[1]
    if place == 0:
        module.__class__ = own
    else:
        above = chain[place - 1]
        above.__bases__ = tuple(own if base is swapped else base for base in above.__bases__)


def _refuse_own_methods(name: str, layer: nn.Module, kind: type[SwappedLayer]) -> None:
    own = [each for each in own_methods(type(layer)) if each in layer.__dict__]
    if own and kind._mixprec_wraps_methods:
        raise TypeError(
            f"{name!r} is to compute in fp32, but its {own[0]!r} was assigned on the instance, where {kind.__name__} "
            f"cannot wrap it. Define it in {type(layer).__name__} (to compile it, decorate it there), or name the "
            "layers below in the fp32 entries instead."
        )


def _drop_own_forward(module: nn.Module) -> None:
    """Remove the bound method of its class that DDP's forward redirection leaves on an instance."""
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "__self__", None) is module and forward.__name__ == "forward":
        del module.__dict__["forward"]


def has_dtype(module: nn.Module) -> bool:
    """Whether the module says what its dtype is, as those of diffusers and transformers do.

    Example:
        >>> has_dtype(nn.Linear(1, 1))
        False
    """
    return isinstance(getattr(type(module), "dtype", None), property)


def _wrapped(kind: Any, function: Any) -> Any:
    """A method of the user's class, called like ``forward``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mixprec is None:
            return function(self, *args, **kwargs)
        return kind._mixprec_within(self, partial(function, self), args, kwargs, widened_unless_parameter)

    def generator(self: Any, *args: Any, **kwargs: Any) -> Any:  # what is between two results runs outside
        around = _wrap_generator(lambda: kind._mixprec_context(self) or nullcontext(), partial(function, self))
        return kind._mixprec_call(self, around, args, kwargs, widened_unless_parameter)

    made = generator if isgeneratorfunction(function) else method
    made.__code__ = made.__code__.replace()
    return update_wrapper(made, function, updated=())  # what torch.compile notes on a function is about that function


def _make_subclass(kind: Any, base: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    def inner_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Of most layers of a network: where autocast is on, there is nothing to do, and that at once.
        if self._mixprec is not None and torch.is_autocast_enabled(self._mixprec[0]):
            return super(kind, self).forward(*args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        own = type(self)
        self.__class__ = base
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = own
        if self._mixprec is not None:
            copied.__dict__["_mixprec"] = self._mixprec
        return _renew(kind, copied)

    if kind.forward is InnerLayer.forward:
        forward = inner_forward
    forward.__wrapped__ = base.forward  # type: ignore[attr-defined]  # whoever asks for its signature sees the base's
    forward.__code__ = forward.__code__.replace()  # torch.compile counts recompilations of each code object
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names["forward"] = forward
    names["_base_forward"] = staticmethod(base.forward)
    names["_is_batch_norm"] = base.forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    if kind._mixprec_wraps_methods:
        names |= {name: _wrapped(kind, function) for name, function in own_methods(base).items()}
    if issubclass(kind, InnerLayer) and isinstance(getattr(base, "dtype", None), property):
        names["dtype"] = property(lambda self: self.__dict__.get("_mixprec_dtype") or base.dtype.fget(self))
    if hasattr(base, "__deepcopy__"):  # it knows its own class, as those that torch.fx makes
        names["__deepcopy__"] = deepcopy
    return make_subclass(kind, base, names)


_subclass: Callable[[Any, Any], Any] = cache(_make_subclass)  # one class per pair, so that copies compare equal


def _rebuild(kind: type[SwappedLayer], make: Any, args: tuple[Any, ...]) -> Any:
    return _renew(kind, make(*args))


def _renew(kind: type[SwappedLayer], module: Any) -> Any:
    module.__class__ = _subclass(kind, type(module))
    return module
