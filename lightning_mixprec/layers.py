"""Layers that compute in another dtype than their surroundings, made from existing ones by exchanging their class.

Why it exists: a layer that must compute in fp32 has to do so however it is called: from a training step, a callback,
a copy, a pickle, compiled. Patching ``forward`` or registering hooks loses that on one of those ways; a subclass
made on the fly does not. ``isinstance``, the class name, parameters, buffers and hooks stay as they were.

What it leaves out: deciding which layer is which (:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from lightning_mixprec.norms import lean_norm

_HALF = (torch.float16, torch.bfloat16)


class SwappedLayer(nn.Module):
    """Base of the classes below. ``_mixprec`` is (device type, compute dtype), set on the instance by :func:`swap_`.

    An instance made from the class itself (``type(layer)(...)``) has none, and is a plain one.
    """

    _mixprec: tuple[str, torch.dtype] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: a class made here is not one more for the registry of its base, and has no keywords for it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class does not exist under its name in any module, so pickle and copy are told how to make it.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        kind, base = type(self).__bases__
        return (_rebuild, (kind, make, tuple(base if arg is type(self) else arg for arg in args)), *rest)


class Fp32Layer(SwappedLayer):
    """Runs ``forward`` in fp32: autocast off, 16-bit floating-point inputs widened, results left in fp32.

    Results are not cast back, because a value that needed fp32 may not fit into 16 bits; what takes it casts it.

    Example:
        >>> layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, in fp32."""
        device_type = self._mixprec[0] if self._mixprec is not None else None
        if device_type is None or not torch.is_autocast_enabled(device_type):
            return _call_widened(super().forward, args, kwargs)
        with torch.autocast(device_type, enabled=False):
            return _call_widened(super().forward, args, kwargs)


class WidenedLayer(Fp32Layer):
    """An fp32 layer whose own parameters may come in 16 bits, as FSDP2 gathers them, and are widened for each call.

    Example:
        >>> layer = swap_(nn.Linear(2, 2).bfloat16(), WidenedLayer, "cpu", torch.bfloat16)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, in fp32, with fp32 parameters."""
        own = self.named_parameters(recurse=False)
        wide: dict[str, Any] = {name: param.float() for name, param in own if param.dtype in _HALF}
        with _reparametrize_module(self, wide) if wide else nullcontext():
            return super().forward(*args, **kwargs)


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
        with torch.autocast(device_type, enabled=False):
            if self._is_batch_norm and self.weight is not None and len(args) == 1 and args[0].dtype == compute:
                return super().forward(*args)
            if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == compute:
                lean = lean_norm(self._base_forward, self, args[0])
                if lean is not None:
                    return lean
            result = _call_widened(super().forward, args, kwargs)
            return map_tensors(result, lambda tensor: tensor.to(compute) if tensor.dtype == torch.float32 else tensor)


class ComputeLayer(SwappedLayer):
    """Runs ``forward`` under autocast, so that a call from a hook gives what a call from a training step gives.

    A ``dtype`` property that says what the parameters are, as in models of diffusers, says what they were: such a model
    casts its timestep features to it, which would round them.

    Example:
        >>> layer = swap_(nn.Linear(2, 2).bfloat16(), ComputeLayer, "cpu", torch.bfloat16)
        >>> layer(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class, under autocast to the compute dtype."""
        if self._mixprec is None:
            return super().forward(*args, **kwargs)
        with compute_context(*self._mixprec):
            return super().forward(*args, **kwargs)


def compute_context(device_type: str, dtype: torch.dtype) -> torch.autocast:
    """Autocast without its weight cache; a no-op for fp32.

    The cache would keep casts of fp32 weights alive over an optimizer step inside one training step, and over
    ``no_grad`` passes (https://github.com/pytorch/pytorch/issues/63552, /65766).

    Example:
        >>> with compute_context("cpu", torch.bfloat16):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if dtype == torch.float32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


def swap_(
    module: nn.Module, kind: type[SwappedLayer], device_type: str, compute: torch.dtype, *, wraps_forward: bool = True
) -> nn.Module:
    """Exchange the class of ``module`` in place for a subclass of the given kind, and return it.

    Args:
        module: Any module whose ``forward`` is defined by its class.
        kind: :class:`Fp32Layer`, :class:`NormLayer` or :class:`ComputeLayer`.
        device_type: Type of the device it will run on, such as ``"cuda"``.
        compute: Compute dtype of its surroundings.
        wraps_forward: Whether the kind's ``forward`` has to be the one that is called.

    Raises:
        TypeError: If ``forward`` was replaced on the instance or compiled to TorchScript: the class would not be asked.
    """
    _drop_own_forward(module)
    if wraps_forward and (isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__):
        raise TypeError(
            f"{type(module).__name__} has a forward of its own (TorchScript, or assigned on the instance), which "
            f"{kind.__name__} cannot wrap. Define forward in a class, or take the layer out of the fp32 entries."
        )
    if "_mixprec" not in module.__dict__:
        found = module.dtype if issubclass(kind, ComputeLayer) and _has_dtype(type(module)) else None
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

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1))
        >>> swap_layers_(net, {"0": "fp32", "1": "norm"}, "cpu", torch.bfloat16)
        >>> isinstance(net[0], Fp32Layer), isinstance(net[1], NormLayer)
        (True, True)
    """
    classes: dict[str, type[SwappedLayer]] = {"fp32": fp32, "norm": NormLayer}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind = classes.get(kinds.get(name, "compute"))
        # Unlike a ModuleList. TorchScript, which `swap_` refuses, does not even say.
        called = isinstance(layer, torch.jit.ScriptModule) or type(layer).forward is not nn.Module.forward
        if kind is not None and called:
            if not isinstance(layer, kind):
                restore_(layer, below=False)
            swap_(layer, kind, device_type, compute)


def restore_(module: nn.Module, *, below: bool = True) -> nn.Module:
    """Give ``module`` and (unless told otherwise) everything below it its own class back, in place, and return it.

    Example:
        >>> layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
        >>> type(restore_(layer)) is nn.Linear
        True
    """
    for each in module.modules() if below else [module]:
        if isinstance(each, SwappedLayer) and "_mixprec" in each.__dict__:
            _drop_own_forward(each)
            each.__class__ = type(each).__bases__[1]
            for mark in [key for key in each.__dict__ if key.startswith("_mixprec")]:
                del each.__dict__[mark]
    return module


def widen(value: Any) -> Any:
    """Cast every 16-bit floating-point tensor in ``value`` to fp32; look into containers, leave the rest alone.

    Containers are tuples, lists, dicts and dataclasses, and what is made from them: a named tuple stays one, as does
    an output class that is a dict with attributes. They are copied, if there is anything to cast in them.

    Example:
        >>> widen({"x": torch.ones(1, dtype=torch.float16), "t": 999})
        {'x': tensor([1.]), 't': 999}
    """
    return map_tensors(value, _widened)


def _call_widened(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copies: list[tuple[Any, Any]] = []
    args, kwargs = map_tensors((args, kwargs), _widened, copies)
    before = [dict(_items(passed)) for _, passed in copies]
    result = forward(*args, **kwargs)
    for (given, passed), entries in zip(copies, before, strict=True):
        _follow(given, passed, entries)
    return result


def _follow(given: Any, passed: Any, before: dict[Any, Any]) -> None:
    """Do to a caller's list or dict what ``forward`` did to its copy: a U-Net's block pops what it has used."""
    if len(passed) == len(before) and all(key in before and before[key] is item for key, item in _items(passed)):
        return
    own = [(before[key], item) for key, item in _items(given)]
    after = {key: next((mine for wide, mine in own if wide is item), item) for key, item in _items(passed)}
    if isinstance(given, list):
        given[:] = after.values()
        return
    for key in [key for key in given if key not in after]:
        del given[key]
    for key, item in after.items():
        given[key] = item


def _items(container: Any) -> Any:
    return enumerate(container) if isinstance(container, list) else container.items()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def map_tensors(value: Any, cast: Callable[[Tensor], Tensor], copies: list[tuple[Any, Any]] | None = None) -> Any:
    """Cast every tensor in ``value``; lists and dicts that had to be copied for it are noted in ``copies``.

    Example:
        >>> map_tensors({"x": [torch.ones(1)], "t": 999}, torch.neg)
        {'x': [tensor([-1.])], 't': 999}
    """
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, cast, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, MutableMapping)):
        entries = {key: map_tensors(item, cast, copies) for key, item in _items(value)}
        if all(entries[key] is item for key, item in _items(value)):
            return value
        made: Any = type(value)
        if made is list:
            copied: Any = list(entries.values())
        elif made in (dict, OrderedDict):
            copied = made(entries)
        else:
            copied = copy.copy(value)
            for key, item in entries.items():
                copied[key] = item
        if copies is not None:
            copies.append((value, copied))
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        cast_fields = {name: map_tensors(item, cast, copies) for name, item in fields.items()}
        if all(cast_fields[name] is item for name, item in fields.items()):
            return value
        copied = copy.copy(value)  # not made anew: what its constructor computed stays
        for name, item in cast_fields.items():
            object.__setattr__(copied, name, item)  # a frozen one, too
        return copied
    return value


def _drop_own_forward(module: nn.Module) -> None:
    """Remove the bound method of its class that DDP's forward redirection leaves on an instance."""
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "__self__", None) is module and forward.__name__ == "forward":
        del module.__dict__["forward"]


def _has_dtype(base: type[nn.Module]) -> bool:
    return isinstance(getattr(base, "dtype", None), property)


def _make_subclass(kind: Any, base: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    forward.__wrapped__ = base.forward  # type: ignore[attr-defined]  # whoever asks for its signature sees the base's
    forward.__code__ = forward.__code__.replace()  # torch.compile counts recompilations of each code object
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names["forward"] = forward
    names["_base_forward"] = staticmethod(base.forward)
    names["_is_batch_norm"] = base.forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    if issubclass(kind, ComputeLayer) and _has_dtype(base):
        names["dtype"] = property(lambda self: self.__dict__.get("_mixprec_dtype") or base.dtype.fget(self))
    if hasattr(base, "__deepcopy__"):  # it knows its own class, as those that torch.fx makes
        names["__deepcopy__"] = deepcopy
    return type(base.__name__, (kind, base), names)


_subclass: Callable[[Any, Any], Any] = cache(_make_subclass)  # one class per pair, so that copies compare equal


def _rebuild(kind: type[SwappedLayer], make: Any, args: tuple[Any, ...]) -> Any:
    return _renew(kind, make(*args))


def _renew(kind: type[SwappedLayer], module: Any) -> Any:
    module.__class__ = _subclass(kind, type(module))
    return module
