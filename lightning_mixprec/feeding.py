"""Averages of weights that user code keeps are fed with the fp32 values.

Why it exists: torch's ``AveragedModel``, diffusers' ``EMAModel``, torch_ema's ``ExponentialMovingAverage``, latent
diffusion's ``LitEma`` and ema_pytorch's ``EMA`` read the module's parameters, which are 16-bit while training, and an
average of roundings is no better than a rounding; some of torch's averaging functions and ``EMA`` do not take 16 bits
at all, and ``LitEma`` takes on their dtype for the update, which then goes to a copy. For the length of fit their
methods are given fp32 values instead, and what they write into these becomes the weights'.

What it leaves out: averages made by hand, which nothing gives away, and the project's own
(:mod:`lightning_mixprec.callbacks`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.opaque import is_script
from lightning_mixprec.widening import HALF

_WRITING = ("copy_to", "restore")
_UPDATES = {"shadow_params": ("step", "update"), "m_name2s_name": ("forward",)}  # by an attribute that tells the kind
# Of a kind that holds the module itself, as `online_model`.
_ONLINE_READING = ("update", "copy_params_from_model_to_ema")
_ONLINE_WRITING = ("update_model_with_ema", "copy_params_from_ema_to_model")


class Feeding:
    """Gives averages fp32 values, until :meth:`end`.

    Args:
        masters: Where the values are.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> module = nn.ModuleList([net, AveragedModel(net)])
        >>> nn.init.constant_(net.weight, 0.1).dtype
        torch.float32
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> feeding = Feeding(masters)
        >>> feeding.look(module, [])
        >>> module[1].update_parameters(net)
        >>> module[1].module.weight, net.weight.dtype
        (Parameter containing:
        tensor([[0.1000, 0.1000]], requires_grad=True), torch.bfloat16)
        >>> feeding.end()
    """

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._fed: list[tuple[Any, str]] = []
        self._kinds: set[type] = set()  # of those
        self._attributes: list[Any] = []  # what the module and callbacks have, as of the last look

    def look(self, module: nn.Module, callbacks: Iterable[Any], *, closely: bool = True) -> None:
        """Feed what has come: modules, attributes of modules and callbacks, and lists and dicts of these.

        Args:
            module: The LightningModule.
            callbacks: The Trainer's.
            closely: False, for every batch, looks only if these have other attributes than before: some begin an
                average when half of the training is over.
        """
        owners = [module, *callbacks]
        found: list[Any] = [*map(id, module._modules.values())]
        for owner in owners:  # by type: numbers, for example, come and go
            found += [id(each) if type(each) in self._kinds else type(each) for each in vars(owner).values()]
        if found == self._attributes and not closely:
            return
        self._attributes = found
        for owner in (*module.modules(), *owners[1:]):
            for each in (owner, *attributes(owner)):
                names = fed_methods(each)
                if names and not _is_own(each, names[0]):
                    _widen_shadows(each)
                    fed = _FedOnline if names[0] in _ONLINE_READING and _holds_online(each) else _Fed
                    each.__dict__.update((name, fed(each, name, self._masters)) for name in names)
                    self._fed += [(each, name) for name in names]
                    self._kinds.add(type(each))

    def end(self) -> None:
        """Leave them as found."""
        for each, name in self._fed:
            each.__dict__.pop(name, None)
        self._fed.clear()


def fed_methods(average: Any) -> list[str]:
    """The methods by which ``average`` reads and writes the weights, if it is of a kind that is known.

    Example:
        >>> fed_methods(AveragedModel(nn.Linear(1, 1))), fed_methods(nn.Linear(1, 1))
        (['update_parameters'], [])
    """
    if isinstance(average, AveragedModel):
        return ["update_parameters"]
    for mark, updates in _UPDATES.items():
        for update in updates:
            names = [update, "store", *_WRITING]
            if mark in getattr(average, "__dict__", {}) and all(map(partial(_has, average), names)):
                return names
    if _holds_online(average):
        return [name for name in (*_ONLINE_READING, *_ONLINE_WRITING) if _has(average, name)]
    return []


def _has(average: Any, name: str) -> bool:
    return callable(getattr(average, name, None))


def _holds_online(average: Any) -> bool:
    if not isinstance(average, nn.Module) or is_script(average):
        return False
    held = {*vars(average), *average._modules}
    return {"online_model", "ema_model"} <= held and all(_has(average, name) for name in _ONLINE_READING)


def attributes(owner: Any) -> Iterator[Any]:
    """Values of all attributes of ``owner``, and what is in those that are lists, tuples or dicts.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.averages = {"slow": 1, "fast": 2}
        >>> list(attributes(net))[-3:]
        [{'slow': 1, 'fast': 2}, 1, 2]
    """
    for value in vars(owner).values():
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value


def averaged_names(module: nn.Module) -> set[str]:
    """Names of parameters that are averages: nothing trains them, whoever holds them.

    Example:
        >>> averaged_names(nn.Sequential(nn.Linear(1, 1, bias=False), AveragedModel(nn.Linear(1, 1, bias=False))))
        {'1.module.weight'}
    """
    inside = [(name, each) for name, each in module.named_modules() if isinstance(each, AveragedModel)]
    averages = {param for _, each in inside for param in each.parameters()}
    return {name for name, param in module.named_parameters() if param in averages}


class _Fed:
    """The method ``name`` of ``average``, given fp32 values. A copy, or a pickle, is the method as it was."""

    def __init__(self, average: Any, name: str, masters: MasterWeights) -> None:
        self._average, self._name, self._masters = average, name, masters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self._average), self._name)
        passed = signature(method).bind(self._average, *args, **kwargs)
        passed.apply_defaults()
        key = list(passed.arguments)[1]
        given = passed.arguments[key]
        if given is None:  # those that it has been made with
            given = [param() for param in self._average._params_refs]
        shown = _Shown(given, self._masters)
        passed.arguments[key] = shown if isinstance(given, nn.Module) else shown.tensors
        _widen_shadows(self._average)  # which takes on the parameters' dtype where it is loaded
        result = method(*passed.args, **passed.kwargs)
        if self._name in _WRITING:
            shown.write()
        return result

    def __reduce__(self) -> Any:
        return _as_it_was, (self._average, self._name)


class _FedOnline(_Fed):
    """The method ``name`` of ``average``, which finds fp32 values in the module that it holds."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        average: Any = self._average
        held = average.__dict__.get("online_model")  # in a list, where it is no part of the module
        online = held[0] if isinstance(held, list) else average.online_model
        shown = online if isinstance(online, _Shown) else _Shown(online, self._masters)
        average.__dict__["online_model"] = [shown] if isinstance(held, list) else shown
        try:
            result = getattr(type(average), self._name)(average, *args, **kwargs)
        finally:
            average.__dict__["online_model"] = held
            if held is None:
                del average.__dict__["online_model"]
        if self._name in _ONLINE_WRITING:
            shown.write()
        return result


class _Shown:
    """What an update, or a user's in its place, asks of a module; and the fp32 weights alone."""

    def __init__(self, weights: nn.Module | Iterable[nn.Parameter], masters: MasterWeights) -> None:
        self._module = weights if isinstance(weights, nn.Module) else None
        self.params = list(weights.parameters() if isinstance(weights, nn.Module) else weights)
        self._masters = masters

    @cached_property
    def tensors(self) -> list[Tensor]:
        """fp32 values; of parameters that are fp32 themselves there is no copy: what is written to them is written."""
        return [
            self._masters.peek(param).clone().requires_grad_(param.requires_grad) if param in self._masters else param
            for param in self.params
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Let what stands in :attr:`tensors` be the weights'."""
        for param, value in zip(self.params, self.tensors, strict=True):
            if value is not param:
                self._masters.write(param, value.detach())

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        names = [] if self._module is None else [name for name, _ in self._module.named_parameters()]
        return zip(names, self.tensors, strict=True)

    def buffers(self) -> Iterator[Tensor]:
        yield from () if self._module is None else self._module.buffers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module, which is fp32."""
        return copy.deepcopy(self._module, memo)

    def __getattr__(self, name: str) -> Any:
        """Of the module itself, whose state dict is fp32."""
        return getattr(self._module, name)


def _as_it_was(average: Any, name: str) -> Any:
    return getattr(type(average), name).__get__(average)


def _is_own(average: Any, name: str) -> bool:
    """Whether its method is one that the user has assigned, or fed already; not one that a copy has as it was."""
    found = vars(average).get(name)
    return found is not None and getattr(found, "__func__", None) is not getattr(type(average), name)


def _widen_shadows(average: Any) -> None:
    """An average begun in the middle of a fit, from 16-bit parameters, is fp32 from here on."""
    shadows = getattr(average, "shadow_params", None)
    if isinstance(shadows, list):
        shadows[:] = [each.float() if isinstance(each, Tensor) and each.dtype in HALF else each for each in shadows]
