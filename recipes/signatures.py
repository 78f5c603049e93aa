"""What a configuration says beside each `_target_`, compared with the signature of what the target names.

Keys that nobody takes, values of the wrong type, numbers that are none, arguments that are required and not given: all
of them are found before anything is built, wherever they were written. Everything else is for the constructor to judge.

It leaves out how a value is compared with a type hint (`recipes.hints`), where a key was written (`recipes.files`), and
what constructors refuse (`recipes.config.build`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_type_hints

from recipes.hints import MISSING, allowed_by, did_you_mean, mismatch

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}

REMEDY = "Change it, or leave it out."

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

PARTIAL = ("optimizer", "scheduler")
"""Of these, those whose first argument YAML cannot give: parameters, and the optimizer."""

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


HANDS_ON = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "recipes.plateau.ReduceLROnPlateau": "torch.optim.lr_scheduler.ReduceLROnPlateau",
}
"""Classes that take any keyword and hand it on to another, whose keywords are theirs."""

HINTS: dict[str, Any] = {"broadcast_buffers": bool, "bucket_cap_mb": float}
"""Of keywords that are handed on, where neither a hint nor a default tells."""


class Problem(NamedTuple):
    """One thing to change.

    Attributes:
        key: Where it stands, such as `trainer.max_steps`.
        text: What was given, what is allowed, and what to write.
    """

    key: str
    text: str


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
        constructor = located(target)
    except Exception as error:  # importing runs arbitrary code
        raise ValueError(f"{target} cannot be imported: {error}{_near_names(target) or _where(error)}") from error
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature; they are checked when they are called
        return Signature([], [], set(), True, {})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = Signature(
        names=[p.name for p in named],
        required=[p.name for p in named if p.default is p.empty],
        optional={p.name for p in named if p.default is None},
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        hints=_hints_of(constructor),
    )
    taker = HANDS_ON.get(f"{constructor.__module__}.{getattr(constructor, '__qualname__', '')}")
    return own if taker is None else _with_handed_on(own, located(taker))


def _with_handed_on(own: Signature, taker: Any) -> Signature:
    """A signature and the optional keywords of the class that gets the rest; those are bool whose default is."""
    given = [p for p in inspect.signature(taker).parameters.values() if p.default is not p.empty]
    hints = HINTS | {p.name: bool for p in given if isinstance(p.default, bool)}
    names = [p.name for p in given if p.name not in own.names]
    optional = own.optional | {p.name for p in given if p.default is None}
    return Signature([*own.names, *names], own.required, optional, False, hints | _hints_of(taker) | own.hints)


def located(target: str) -> Any:
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
    constructor = located(target)
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


def _where(error: Exception) -> str:
    """Where a module is looked for that is not there."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return ". A file of your own is looked for in the folder where the command is typed, and in those of PYTHONPATH."


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
        node = config.get(key)
        several = isinstance(node, dict) and any(isinstance(v, dict) and "_target_" in v for v in node.values())
        found += _not_an_object(key, node, named=key in NAMED_PARTS or (key == "logger" and several))
    trainer = config.get("trainer")
    for owned, remedy in OWNED_BY_GROUPS.items():
        if isinstance(trainer, dict) and owned in trainer:
            text = f"trainer.{owned}={trainer[owned]} is not used here. Write {remedy}."
            found.append(Problem(f"trainer.{owned}", text))
    for where, node in target_nodes(config, ""):
        found += _problems_of(where, node)
    return [*found, *_endless(config, "")]


def _endless(node: Any, path: str) -> Iterator[Problem]:
    """Numbers that are none, which every comparison lets through, and infinite ones.

    Infinity has a meaning below `callbacks` alone, as a limit that is never reached; constructors there may refuse it.
    """
    if isinstance(node, float) and (math.isnan(node) or (math.isinf(node) and not path.startswith("callbacks."))):
        yield Problem(path, f"{path}={node}: must be a finite number. {REMEDY}")
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _endless(child, f"{path}.{key}" if path else str(key))


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
            given = f"Write {where}._partial_=true: it is given by the run."
            remedy = given if where in PARTIAL and key == required[0] else _give(where, key, hints)
            yield Problem(f"{where}.{key}", f"{where}.{key} is missing: {target} has no default. {remedy}")


def _give(where: str, key: str, hints: dict[str, Any]) -> str:
    taken = allowed_by(hints.get(key, Any))
    return f"Write {where}.{key}=VALUE{f', {taken}' if taken else ''}."


def target_nodes(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node that names a class, with the key that it stands under.

    Example:
        >>> [key for key, _ in target_nodes({"a": {"_target_": "b", "c": {"_target_": "d"}}}, "")]
        ['a', 'a.c']
    """
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        children: Iterable[tuple[Any, Any]] = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    else:
        return
    for key, child in children:
        yield from target_nodes(child, f"{path}.{key}" if path else str(key))
