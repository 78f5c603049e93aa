"""Which values fit a type hint, as far as YAML can tell types apart: numbers, text, true and false, lists, nothing.

Everything else is for the constructor to judge. It leaves out where values and hints come from (`recipes.signatures`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
"""Types that YAML can tell apart, in the words of an error."""

DURATION = "a duration, {_target_: datetime.timedelta, minutes: NUMBER}"
"""How YAML says how long."""

MISSING = "???"
"""What OmegaConf calls a value that somebody must still give."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing if nothing is near.

    Example:
        >>> did_you_mean("max_step", ["max_steps", "devices"])
        " Did you mean 'max_steps'?"
    """
    near = difflib.get_close_matches(given, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def mismatch(value: Any, hint: Any) -> str:
    """What an argument takes instead of this value, or nothing if the value fits, or the hint is not a simple one.

    Example:
        >>> mismatch("abc", int | None), mismatch(3, float), mismatch("x", Tensor | float), mismatch(None, int)
        ('a whole number.', '', 'a number.', 'a whole number.')
        >>> mismatch("splitt", Literal["fp32", "split"])
        "'fp32' or 'split'. Did you mean 'split'?"
        >>> mismatch([0.9], tuple[float, float])
        'a list of 2.'
    """
    if hint is Any or value == MISSING or (isinstance(value, str) and "${" in value):
        return ""
    if isinstance(value, dict) and "_target_" in value:  # an object
        return ""
    allowed: list[str] = []
    choices: list[str] = []
    kinds = alternatives_of(hint)
    for kind in kinds:
        origin = get_origin(kind) or kind
        if kind is NoneType:
            if value is None:
                return ""
        elif origin is Literal:
            if value in get_args(kind):
                return ""
            choices += map(str, get_args(kind))
            allowed += map(repr, get_args(kind))
        elif origin in (list, tuple, Sequence):
            problem = _sequence_mismatch(value, origin, get_args(kind))
            if not problem:
                return ""
            allowed.append(problem)
        elif kind in WORDS:
            if type(value) is kind or (kind is float and type(value) is int):
                return ""
            allowed += [WORDS[kind]] * (kind is not str or timedelta not in kinds)
        elif kind is timedelta:
            allowed.append("a duration, 'DD:HH:MM:SS'" if str in kinds else DURATION)
        elif origin is dict and not isinstance(value, dict):
            continue
        elif kind is not Tensor:  # any other class may be built from what YAML can say
            return ""
    if not allowed:
        return ""
    whole = f" (write {value:.0f})" if isinstance(value, float) and value.is_integer() else ""
    if isinstance(value, str) and {int, float} & {*kinds} and _is_number(value):
        whole = f", and '{value}' is text (write no quotes; of the environment ${{oc.decode:${{oc.env:NAME}}}})"
    return f"{' or '.join(dict.fromkeys(allowed))}{whole}.{did_you_mean(str(value), choices)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sequence_mismatch(value: Any, origin: Any, kinds: tuple[Any, ...]) -> str:
    fixed = origin is tuple and kinds and kinds[-1] is not Ellipsis
    element = kinds[0] if kinds else Any
    if isinstance(value, str) and not fixed:  # a text is a sequence of texts; a number is no sequence
        return WORDS[list] if mismatch(value, element) else ""
    if not isinstance(value, list) or any(mismatch(v, element) for v in value):
        return WORDS[list]
    return f"a list of {len(kinds)}" if fixed and len(value) != len(kinds) else ""


def alternatives_of(hint: Any) -> list[Any]:
    """Members of a union, flat."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for member in get_args(hint) for kind in alternatives_of(member)]
    return [hint]


def allowed_by(hint: Any) -> str:
    """What an argument takes, in words, or nothing if the hint is not a simple one."""
    words = [repr(c) for kind in alternatives_of(hint) if get_origin(kind) is Literal for c in get_args(kind)]
    words += [WORDS[kind] for kind in alternatives_of(hint) if kind in WORDS]
    words += [WORDS[list] for kind in alternatives_of(hint) if get_origin(kind) in (list, tuple, Sequence)]
    return " or ".join(dict.fromkeys(words))
