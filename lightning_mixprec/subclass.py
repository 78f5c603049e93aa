"""A subclass that an object of the class it is made from can be given.

Why it exists: Python exchanges the class of an object only for one that lays it out in memory alike, which the first
base decides. The kind of a layer comes first, as its methods are to be the ones that are called, and leads to
`nn.Module`; of `class Net(ABC, nn.Module)`, or with `Generic[T]` in the place of `ABC`, the first base is another one.
There the user's class is the first base, and the order of lookup alone says that the kind's methods come before.

What it leaves out: what the kinds do (:mod:`lightning_mixprec.layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any


def make_subclass(kind: Any, base: Any, names: Mapping[str, Any]) -> Any:
    """A class with the name of ``base``, whose methods are those of ``kind`` and then those of ``base``.

    Args:
        kind: Shares with ``base`` the class that it leads to.
        base: The user's class.
        names: What stands in the class itself.

    Example:
        >>> from abc import ABC
        >>> class Module: ...
        >>> class Net(ABC, Module): ...
        >>> class Kind(Module):
        ...     def forward(self):
        ...         return "kind"
        >>> net = Net()
        >>> net.__class__ = make_subclass(Kind, Net, {})
        >>> net.forward(), isinstance(net, Net), made_of(type(net)) == (Kind, Net)
        ('kind', True, True)
    """
    names = {**names, "_mixprec_made_of": (kind, base)}
    if _lays_out(base).__base__ is object:
        return type(base.__name__, (kind, base), names)
    metaclass: Any = type(base)
    return _kind_first(metaclass)(base.__name__, (base, kind), names)


def made_of(cls: Any) -> tuple[Any, Any]:
    """Of a class that :func:`make_subclass` has made, the kind and the user's class."""
    pair: tuple[Any, Any] = vars(cls)["_mixprec_made_of"]
    return pair


def _lays_out(cls: Any) -> Any:
    """The class among the first bases that gives instances their `__dict__`."""
    while cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls


@cache
def _kind_first(metaclass: Any) -> Any:
    """The metaclass of classes that look into their second base first."""

    def mro(cls: Any) -> list[Any]:
        order: list[Any] = metaclass.mro(cls)
        if "_mixprec_made_of" not in vars(cls):  # one made of it, as torch's parametrizations do
            return order
        base, kind = cls.__bases__
        return [cls, *(each for each in kind.__mro__ if each not in base.__mro__), *base.__mro__]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})
