"""Layers that compute in another dtype than their surroundings, made from existing ones by exchanging their class.

Why it exists: a layer that must compute in fp32 has to do so however it is called: from a training step, a callback,
a copy, a pickle, compiled. Patching ``forward`` or registering hooks loses that on one of those ways; a subclass
made on the fly does not. ``isinstance``, the class name, parameters, buffers and hooks stay as they were.

What it leaves out: deciding which layer is which (:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

_HALF = (torch.float16, torch.bfloat16)


class _Swapped(nn.Module):
    """Base of the classes below. ``_mixprec`` is (device type, compute dtype), set on the instance by :func:`swap_`.

    An instance made from the class itself (``type(layer)(...)``) has none, and is a plain one.
    """

    _mixprec: tuple[str, torch.dtype] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class does not exist under its name in any module, so pickle and deepcopy are told how to make it.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        kind, base = type(self).__bases__
        return (_rebuild, (kind, base, make, args[1:]), *rest)


class Fp32Layer(_Swapped):
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
            return super().forward(*widen(args), **widen(kwargs))
        with torch.autocast(device_type, enabled=False):
            return super().forward(*widen(args), **widen(kwargs))


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


class NormLayer(_Swapped):
    """Normalisation with fp32 parameters and statistics whose result is in the compute dtype.

    Where torch's kernels take 16-bit activations together with fp32 parameters, they are used as they are, so that
    backward saves 16-bit activations; their statistics are fp32. Elsewhere the activations are widened.

    Example:
        >>> layer = swap_(nn.LayerNorm(4), NormLayer, "cpu", torch.bfloat16)
        >>> layer(torch.randn(2, 4)).dtype, layer.weight.dtype
        (torch.bfloat16, torch.float32)
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the original class; fp32 inside, compute dtype outside."""
        if self._mixprec is None:
            return super().forward(*args, **kwargs)
        device_type, compute = self._mixprec
        with torch.autocast(device_type, enabled=False):
            if (
                len(args) == 1
                and not kwargs
                and isinstance(args[0], Tensor)
                and args[0].dtype == compute
                and _mixes_dtypes(self, device_type)
            ):
                return super().forward(args[0])
            return _narrow(super().forward(*widen(args), **widen(kwargs)), compute)


class ComputeLayer(_Swapped):
    """Runs ``forward`` under autocast, so that a call from a hook gives what a call from a training step gives.

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
    module: nn.Module, kind: type[_Swapped], device_type: str, compute: torch.dtype, *, wraps_forward: bool = True
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
        module.__class__ = _subclass(kind, type(module))
        module.__dict__["_mixprec"] = (device_type, compute)
    return module


def restore_(module: nn.Module, *, below: bool = True) -> nn.Module:
    """Give ``module`` and (unless told otherwise) everything below it its own class back, in place, and return it.

    Example:
        >>> layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
        >>> type(restore_(layer)) is nn.Linear
        True
    """
    for each in module.modules() if below else [module]:
        if isinstance(each, _Swapped) and "_mixprec" in each.__dict__:
            _drop_own_forward(each)
            each.__class__ = type(each).__bases__[1]
            del each.__dict__["_mixprec"]
    return module


def widen(value: Any) -> Any:
    """Cast every 16-bit floating-point tensor in ``value`` to fp32; look into containers, leave the rest alone.

    Example:
        >>> widen({"x": torch.ones(1, dtype=torch.float16), "t": 999})
        {'x': tensor([1.]), 't': 999}
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple):
        items = [widen(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [widen(item) for item in value]
    if type(value) is dict:
        return {key: widen(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: widen(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    return value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if type(value) is dict:
        return {key: _narrow(item, dtype) for key, item in value.items()}
    return type(value)(_narrow(item, dtype) for item in value) if type(value) in (tuple, list) else value


def _mixes_dtypes(module: nn.Module, device_type: str) -> bool:
    """Whether torch's kernel takes 16-bit activations with fp32 parameters (tried on torch 2.11 to 2.14)."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return device_type == "cpu" and isinstance(module, (nn.GroupNorm, nn.LayerNorm))


def _drop_own_forward(module: nn.Module) -> None:
    """Remove the bound method of its class that DDP's forward redirection leaves on an instance."""
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "__self__", None) is module and forward.__name__ == "forward":
        del module.__dict__["forward"]


def _make_subclass(kind: Any, base: Any) -> Any:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (kind, base), names)


_subclass: Callable[[Any, Any], Any] = cache(_make_subclass)  # one class per pair, so that copies compare equal


def _rebuild(kind: type[_Swapped], base: type[nn.Module], make: Any, args: tuple[Any, ...]) -> Any:
    return make(_subclass(kind, base), *args)
