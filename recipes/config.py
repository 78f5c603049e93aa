"""From configuration nodes to objects, with errors that name the value, the choices and the remedy.

It leaves out Hydra's command line (`recipes.command_line`). Nodes are turned into plain containers before anything is
built from them, so no OmegaConf object reaches an optimizer, a scheduler or a checkpoint. Values are compared with a
constructor's type hints as far as YAML can tell types apart (numbers, text, true and false, lists); everything else is
for the constructor to judge, whose refusal is shown with the key it is about.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
"""Types that YAML can tell apart, in the words of an error."""

REMEDY = "Change it, or leave it out."

OWNED_BY_GROUPS = {
    "precision": "precision=fp32|bf16|fp16|fp8, which sets the plugin; Lightning accepts only one of the two",
    "plugins": "precision=fp32|bf16|fp16|fp8 (and precision.* for its arguments)",
    "strategy": "strategy=auto|ddp|fsdp2 (and strategy.* for its arguments)",
    "callbacks": "the callbacks group, e.g. +callbacks.mine._target_=package.Callback",
    "logger": "the logger group",
}
"""Trainer arguments that a group provides, and what to write instead."""


class ConfigError(Exception):
    """Something the user wrote cannot be honoured. Shown without a traceback; the exit status is 2."""


def fail(error: Exception) -> NoReturn:
    """Show the message and leave; with HYDRA_FULL_ERROR=1 the traceback as well."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing if nothing is near.

    Example:
        >>> did_you_mean("max_step", ["max_steps", "devices"])
        " Did you mean 'max_steps'?"
    """
    near = difflib.get_close_matches(given, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters are in it.

    Example:
        >>> print(quoted(Path("a b/c=1")))
        'a b/c=1'
    """
    return "'" + str(path).replace("'", r"\'") + "'"


def plain(node: Any) -> Any:
    """A configuration node as plain dicts, lists and scalars, interpolations resolved."""
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).strip()) from error


def parameters_of(target: str, where: str) -> tuple[list[str], bool]:
    """Names of the keyword arguments that a constructor takes, and whether it takes any others too.

    Args:
        target: Dotted path of a class or function.
        where: Path of its node, for the error.
    """
    try:
        constructor = get_object(target)
    except Exception as error:  # importing runs arbitrary code
        raise ConfigError(f"{where}._target_={target} cannot be imported: {error}") from error
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature; they are checked when they are called
        return [], True
    by_keyword = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return by_keyword, any(p.kind is p.VAR_KEYWORD for p in parameters)


def check_targets(config: dict[str, Any]) -> None:
    """Compare every key and value beside a `_target_` with the signature and type hints of what the target names.

    Args:
        config: Plain containers, as `plain` returns them.

    Raises:
        ConfigError: With the key and the nearest argument and all arguments, or the value and what is allowed.
    """
    for owned, remedy in OWNED_BY_GROUPS.items():
        if owned in config.get("trainer", {}):
            raise ConfigError(f"trainer.{owned}={config['trainer'][owned]} is not used here. Write {remedy}.")
    for where, node in _target_nodes(config, ""):
        known, takes_any = parameters_of(node["_target_"], where)
        for key in node.keys() - HYDRA_KEYS:
            if key not in known and not takes_any:
                raise ConfigError(unknown_key(f"{where}.{key}", known, f"{node['_target_']} takes"))
        hints = hints_of(node["_target_"])
        for key in hints.keys() & node.keys():
            if problem := mismatch(node[key], hints[key]):
                raise ConfigError(f"{where}.{key}={node[key]}: {node['_target_']} takes {problem} {REMEDY}")


def hints_of(target: str) -> dict[str, Any]:
    """Type hints of a constructor's arguments; nothing where they cannot be read."""
    constructor = get_object(target)
    call = constructor.__init__ if inspect.isclass(constructor) else constructor
    try:
        return get_type_hints(call)
    except Exception:  # names that exist for type checkers alone, builtins
        return {}


def mismatch(value: Any, hint: Any) -> str:
    """What an argument takes instead of this value, or nothing if the value fits, or the hint is not a simple one.

    Example:
        >>> mismatch("abc", int | None), mismatch(3, float), mismatch("x", Tensor | float)
        ('a whole number.', '', 'a number.')
        >>> mismatch("splitt", Literal["fp32", "split"])
        "'fp32' or 'split'. Did you mean 'split'?"
    """
    if value is None or isinstance(value, dict):  # often the default, declared or not; a node that builds an object
        return ""
    allowed: list[str] = []
    choices: list[str] = []
    for kind in _alternatives(hint):
        origin = get_origin(kind) or kind
        if origin is Literal:
            if value in get_args(kind):
                return ""
            choices += map(str, get_args(kind))
            allowed += map(repr, get_args(kind))
        elif origin in (list, Sequence):
            (element,) = get_args(kind) or (Any,)
            values = value if isinstance(value, list) else [value]
            # A text is a sequence of texts; a number is no sequence.
            if isinstance(value, list | str) and not any(mismatch(v, element) for v in values):
                return ""
            allowed.append(WORDS[list])
        elif kind in WORDS:
            if type(value) is kind or (kind is float and type(value) is int):
                return ""
            allowed.append(WORDS[kind])
        elif kind not in (NoneType, Tensor):  # any other class may be built from what YAML can say
            return ""
    whole = f" (write {value:.0f})" if isinstance(value, float) and value.is_integer() else ""
    return " or ".join(dict.fromkeys(allowed)) + whole + "." + did_you_mean(str(value), choices)


def _alternatives(hint: Any) -> list[Any]:
    """Members of a union, flat."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for member in get_args(hint) for kind in _alternatives(member)]
    return [hint]


def unknown_key(path: str, known: Iterable[str], taker: str) -> str:
    """The error text for a key that nobody takes."""
    known = sorted(known)
    return (
        f"unknown key '{path}'.{did_you_mean(path.rpartition('.')[2], known)} {taker}: {', '.join(known) or 'nothing'}."
    )


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


def build(config: dict[str, Any], path: str, **arguments: Any) -> Any:
    """Call the constructor that a node names.

    Args:
        config: The whole configuration, plain.
        path: Top-level key of the node, which the error names.
        **arguments: Objects that YAML cannot express.
    """
    node = config[path]
    if isinstance(node, DictConfig):
        raise TypeError("build() takes plain containers; call plain() first.")
    with refusals(config, path):
        return instantiate(node, _convert_="all", **arguments)


@contextlib.contextmanager
def refusals(config: dict[str, Any], path: str) -> Iterator[None]:
    """Turn what a constructor raises into a `ConfigError` that names the argument it is about.

    Args:
        config: The whole configuration, plain.
        path: Top-level key of the node that is being built or, if it is a partial, called.
    """
    try:
        yield
    except ConfigError:
        raise
    except InstantiationException as error:
        # Hydra says which nested node it failed in, in the last line of its message alone.
        inner = re.search(r"full_key: (\S+)\s*$", str(error))
        raise refusal(config[path], path, inner[1].split(".") if inner else [], error.__cause__ or error) from error
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AssertionError) as error:
        raise refusal(config[path], path, [], error) from error


def refusal(node: Any, path: str, below: list[str], cause: BaseException) -> ConfigError:
    """The error for a node whose constructor raised.

    Args:
        node: The node at `path`.
        path: Where it stands.
        below: Keys from it to the nested node that failed.
        cause: What the constructor raised.
    """
    for key in below:
        child: Any = node.get(key) if isinstance(node, dict) else node[int(key)]
        if not isinstance(child, dict | list):
            break
        node, path = child, f"{path}.{key}"
    given = {f"{path}.{k}": v for k, v in node.items() if k not in HYDRA_KEYS and not isinstance(v, dict)}
    arguments = ", ".join(f"{key}={value}" for key, value in _about(given, str(cause)).items()) or path
    reason = str(cause).strip() or type(cause).__name__
    if not reason.endswith((".", "?", "!")):
        reason += "."
    return ConfigError(f"{arguments}: {node['_target_']} refused: {reason} {REMEDY}")


def _about(given: dict[str, Any], message: str) -> dict[str, Any]:
    """The arguments that a constructor's message speaks of; all of them if it names none.

    Example:
        >>> _about({"optimizer.lr": -1, "optimizer.eps": 0.1}, "Invalid learning rate: -1")
        {'optimizer.lr': -1}
    """

    def says(text: Any) -> bool:
        return re.search(rf"(?<![\w.-]){re.escape(str(text))}(?!\w|\.\w)", message) is not None

    tests = (
        lambda key, value: says(f"{key}={value}"),
        lambda key, value: says(key) and says(value),
        lambda key, value: says(value),
        lambda key, value: says(key),
    )
    for test in tests:
        found = {path: value for path, value in given.items() if test(path.rpartition(".")[2], value)}
        if found:
            return found
    return given


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one level with dotted names; lists as text.

    Example:
        >>> flatten({"a": {"b": 1, "c": [2, 3]}})
        {'a.b': 1, 'a.c': '[2, 3]'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
