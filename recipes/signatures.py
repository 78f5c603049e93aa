"""What a configuration says beside each `_target_`, compared with the signature of what the target names.

Keys that nobody takes, values of the wrong type, arguments that are required and not given: all of them are found
before anything is built, wherever they were written. Values are compared with type hints as far as YAML can tell types
apart (numbers, text, true and false, lists, nothing); everything else is for the constructor to judge.

It leaves out where a key was written (`recipes.overrides`) and what constructors refuse (`recipes.config.build`).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
"""Types that YAML can tell apart, in the words of an error."""

REMEDY = "Change it, or leave it out."

MISSING = "???"
"""What OmegaConf calls a value that somebody must still give."""

SETTINGS: dict[str, Any] = {
    "seed": int,
    "ckpt_path": str | None,
    "resume": Literal["auto"] | None,
    "dry_run": bool | Literal["meta"],
    "compile": bool,
}
"""Top-level keys that build nothing, and what they take."""

GROUPS = ("data", "model", "objective", "sampler", "precision", "strategy", "trainer", "optimizer", "scheduler", "ema")
"""Top-level keys that each build one object."""

NAMED_PARTS = ("callbacks",)
"""Top-level keys that hold any number of objects, each under a name of its own."""

OWNED_BY_GROUPS = {
    "precision": "precision=fp32|bf16|fp16|fp8, which sets the plugin; Lightning accepts only one of the two",
    "plugins": "precision=fp32|bf16|fp16|fp8 (and precision.* for its arguments)",
    "strategy": "strategy=auto|ddp|fsdp2 (and strategy.* for its arguments)",
    "callbacks": "the callbacks group, e.g. +callbacks.mine._target_=package.Callback",
    "logger": "the logger group",
}
"""Trainer arguments that a group provides, and what to write instead."""


class Problem(NamedTuple):
    """One thing to change.

    Attributes:
        key: Where it stands, such as `trainer.max_steps`.
        text: What was given, what is allowed, and what to write.
    """

    key: str
    text: str


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing if nothing is near.

    Example:
        >>> did_you_mean("max_step", ["max_steps", "devices"])
        " Did you mean 'max_steps'?"
    """
    near = difflib.get_close_matches(given, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def unknown_key(path: str, known: Iterable[str], taker: str) -> str:
    """The error text for a key that nobody takes.

    Example:
        >>> unknown_key("optimizer.lrr", ["lr", "eps"], "AdamW takes")
        "unknown key 'optimizer.lrr'. Did you mean 'lr'? AdamW takes: eps, lr."
    """
    known = sorted(known)
    near = did_you_mean(path.rpartition(".")[2], known)
    if near and len(known) > 20:
        return f"unknown key '{path}'.{near}"
    return f"unknown key '{path}'.{near} {taker}: {', '.join(known) or 'nothing'}."


class Signature(NamedTuple):
    """What a constructor takes by keyword.

    Attributes:
        names: Arguments, in order.
        required: Those without a default.
        optional: Those whose default is None, declared or not.
        takes_any: Whether it takes any other keyword too.
        hints: Type hints, where they can be read.
    """

    names: list[str]
    required: list[str]
    optional: set[str]
    takes_any: bool
    hints: dict[str, Any]


def signature_of(target: str) -> Signature:
    """Signature of the class or function with this dotted path.

    Raises:
        ValueError: If there is none; with near misses.

    Example:
        >>> signature_of("torch.nn.Identity").takes_any, signature_of("torch.nn.SiLU").names
        (True, ['inplace'])
    """
    try:
        constructor = _located(target)
    except Exception as error:  # importing runs arbitrary code
        raise ValueError(f"{target} cannot be imported: {error}{_near_names(target)}") from error
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature; they are checked when they are called
        return Signature([], [], set(), True, {})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        names=[p.name for p in named],
        required=[p.name for p in named if p.default is p.empty],
        optional={p.name for p in named if p.default is None},
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        hints=_hints_of(constructor),
    )


def _located(target: str) -> Any:
    """The object with a dotted path; what importing its module raises is raised."""
    found: Any = None
    parts = target.split(".")
    for count, part in enumerate(parts, 1):
        if found is None or (inspect.ismodule(found) and not hasattr(found, part)):
            path = ".".join(parts[:count])
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path or found is None:
                    raise
                raise AttributeError(f"module {found.__name__!r} has no attribute {part!r}.") from error
        else:
            found = getattr(found, part)
    return found


def keywords_of(target: str) -> list[str]:
    """Keywords of a class and of those it is made of, to which it may hand on what it does not know itself."""
    constructor = _located(target)
    calls: list[Any] = [constructor]
    if inspect.isclass(constructor):
        calls = [vars(base)["__init__"] for base in constructor.__mro__ if "__init__" in vars(base)]
    found: list[str] = []
    for call in calls:
        try:
            found += [name for name in inspect.signature(call).parameters if name != "self"]
        except (TypeError, ValueError):
            continue
    return found


def _near_names(target: str) -> str:
    module, _, name = target.rpartition(".")
    try:
        return did_you_mean(name, dir(importlib.import_module(module)))
    except Exception:  # the module is what cannot be imported
        return ""


def _hints_of(constructor: Any) -> dict[str, Any]:
    try:
        if dataclasses.is_dataclass(constructor):  # its __init__ sees the names of one module, not of its bases'
            return get_type_hints(constructor)
        return get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    except Exception:  # names that exist for type checkers alone, builtins
        return {}


def problems_in(config: dict[str, Any]) -> list[Problem]:
    """Everything in a composed configuration that signatures and type hints can tell to be wrong.

    Args:
        config: Plain containers. Text with `${` in it is a reference that is not resolved yet, and fits anything.

    Example:
        >>> config = {"trainer": {"_target_": "lightning.Trainer", "max_stpes": 5, "max_epochs": "x"}, "seed": "y"}
        >>> for problem in problems_in(config):
        ...     print(problem.text)
        seed=y: takes a whole number. Change it, or leave it out.
        unknown key 'trainer.max_stpes'. Did you mean 'max_steps' or 'max_time'?
        trainer.max_epochs=x: lightning.Trainer takes a whole number. Change it, or leave it out.
    """
    found = [
        Problem(key, f"{key}={config[key]}: takes {problem} {REMEDY}")
        for key, hint in SETTINGS.items()
        if key in config and (problem := mismatch(config[key], hint))
    ]
    for key in (*GROUPS, *NAMED_PARTS, "logger"):
        found += _not_an_object(key, config.get(key), named=key in NAMED_PARTS)
    trainer = config.get("trainer")
    for owned, remedy in OWNED_BY_GROUPS.items():
        if isinstance(trainer, dict) and owned in trainer:
            text = f"trainer.{owned}={trainer[owned]} is not used here. Write {remedy}."
            found.append(Problem(f"trainer.{owned}", text))
    for where, node in _target_nodes(config, ""):
        found += _problems_of(where, node)
    return found


def _not_an_object(key: str, node: Any, named: bool) -> list[Problem]:
    """A part that builds nothing has no keys, and one that holds several objects holds nothing else."""
    if node in (None, {}) or (isinstance(node, dict) and "_target_" in node):
        return []
    if not isinstance(node, dict):
        text = f"{key}={node} builds nothing. Choose an option of the group, or give the class: {key}._target_=CLASS."
        return [Problem(key, text)]
    if named:
        return [problem for name, child in node.items() for problem in _not_an_object(f"{key}.{name}", child, False)]
    remedy = f"It names no class: choose an option that does, or give one, {key}._target_=CLASS."
    return [Problem(f"{key}.{name}", f"{unknown_key(f'{key}.{name}', [], f'{key} has')} {remedy}") for name in node]


def _problems_of(where: str, node: dict[str, Any]) -> Iterator[Problem]:
    target = node["_target_"]
    try:
        names, required, optional, takes_any, hints = signature_of(str(target))
    except ValueError as error:
        yield Problem(f"{where}._target_", f"{where}._target_={error}")
        return
    owned = OWNED_BY_GROUPS if where == "trainer" else ()
    for key in node.keys() - HYDRA_KEYS if not takes_any else ():
        if key not in names and key not in owned:
            settable = [name for name in names if name not in owned]
            yield Problem(f"{where}.{key}", unknown_key(f"{where}.{key}", settable, f"{target} takes"))
    for key in (name for name in names if name in node):
        value = node[key]
        if value == MISSING:
            yield Problem(f"{where}.{key}", f"{where}.{key} is missing. {_give(where, key, hints)}")
        elif value is None and key in optional:
            continue
        elif problem := mismatch(value, hints.get(key, Any)):
            yield Problem(f"{where}.{key}", f"{where}.{key}={value}: {target} takes {problem} {REMEDY}")
    # Of a partial the first is what YAML cannot give: parameters of an optimizer, the optimizer of a scheduler.
    for key in required[1:] if node.get("_partial_") else required:
        if key not in node and "_args_" not in node:
            yield Problem(
                f"{where}.{key}", f"{where}.{key} is missing: {target} has no default. {_give(where, key, hints)}"
            )


def _give(where: str, key: str, hints: dict[str, Any]) -> str:
    taken = _allowed(hints.get(key, Any))
    return f"Write {where}.{key}=VALUE{f', {taken}' if taken else ''}."


def _allowed(hint: Any) -> str:
    words = [repr(c) for kind in _alternatives(hint) if get_origin(kind) is Literal for c in get_args(kind)]
    words += [WORDS[kind] for kind in _alternatives(hint) if kind in WORDS]
    words += [WORDS[list] for kind in _alternatives(hint) if get_origin(kind) in (list, tuple, Sequence)]
    return " or ".join(dict.fromkeys(words))


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
    for kind in _alternatives(hint):
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
            allowed.append(WORDS[kind])
        elif kind is not Tensor:  # any other class may be built from what YAML can say
            return ""
    if not allowed:
        return ""
    whole = f" (write {value:.0f})" if isinstance(value, float) and value.is_integer() else ""
    return f"{' or '.join(dict.fromkeys(allowed))}{whole}.{did_you_mean(str(value), choices)}"


def _sequence_mismatch(value: Any, origin: Any, kinds: tuple[Any, ...]) -> str:
    fixed = origin is tuple and kinds and kinds[-1] is not Ellipsis
    element = kinds[0] if kinds else Any
    if isinstance(value, str) and not fixed:  # a text is a sequence of texts; a number is no sequence
        return WORDS[list] if mismatch(value, element) else ""
    if not isinstance(value, list) or any(mismatch(v, element) for v in value):
        return WORDS[list]
    return f"a list of {len(kinds)}" if fixed and len(value) != len(kinds) else ""


def _alternatives(hint: Any) -> list[Any]:
    """Members of a union, flat."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for member in get_args(hint) for kind in _alternatives(member)]
    return [hint]


def _target_nodes(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        children: Iterable[tuple[Any, Any]] = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    else:
        return
    for key, child in children:
        yield from _target_nodes(child, f"{path}.{key}" if path else str(key))
