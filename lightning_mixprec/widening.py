"""Arguments of a call in fp32: 16-bit tensors are widened wherever they stand, and what is no tensor is left alone.

Why it exists: layers are called with dicts, named tuples, dataclasses and lists of feature maps, and what a layer does
to a list or dict of its caller must reach the caller, although it was given a copy.

What it leaves out: which calls are in fp32 (:mod:`lightning_mixprec.layers`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)
Cast: TypeAlias = Callable[[Tensor], Tensor]


def widened(tensor: Tensor) -> Tensor:
    """A 16-bit floating-point tensor in fp32, any other as it is.

    Example:
        >>> widened(torch.ones(1).half()).dtype
        torch.float32
    """
    return tensor.float() if tensor.dtype in HALF else tensor


def widened_unless_parameter(tensor: Tensor) -> Tensor:
    """The same for a call that may have been given parameters to write to.

    Example:
        >>> widened_unless_parameter(nn.Parameter(torch.ones(1).half())).dtype
        torch.float16
    """
    return tensor if isinstance(tensor, nn.Parameter) else widened(tensor)


def widen(value: Any) -> Any:
    """Cast every 16-bit floating-point tensor in ``value`` to fp32; look into containers, leave the rest alone.

    Containers are tuples, lists, dicts and dataclasses, and what is made from them: a named tuple stays one, as does
    an output class that is a dict with attributes. They are copied, if there is anything to cast in them.

    Example:
        >>> widen({"x": torch.ones(1, dtype=torch.float16), "t": 999})
        {'x': tensor([1.]), 't': 999}
    """
    return map_tensors(value, widened)


def call_widened(function: Callable[..., Any], args: Any, kwargs: Any, cast: Cast = widened) -> Any:
    """Call ``function`` with its arguments cast; what it does to a list or dict among them reaches the caller.

    Example:
        >>> given = [torch.ones(1).half(), torch.zeros(1).half()]
        >>> call_widened(lambda skips: skips.pop().dtype, (given,), {}), len(given)
        (torch.float32, 1)
    """
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):  # mostly
        return function(*map(cast, args))
    copies: list[tuple[Any, Any]] = []
    args, kwargs = map_tensors((args, kwargs), cast, copies)
    before = [dict(_items(passed)) for _, passed in copies]
    result = function(*args, **kwargs)
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
