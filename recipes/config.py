"""From configuration nodes to objects, with errors that name the value, the choices and the remedy.

It leaves out Hydra's command line (`recipes.command_line`). Nodes are turned into plain containers before anything is
built from them, so no OmegaConf object reaches an optimizer, a scheduler or a checkpoint.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}

OWNED_BY_GROUPS = {
    "precision": "precision=fp32|bf16|fp16, which sets the plugin; Lightning accepts only one of the two",
    "plugins": "precision=fp32|bf16|fp16 (and precision.* for its arguments)",
    "strategy": "strategy=auto|ddp (and strategy.* for its arguments)",
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
    """Compare every key beside a `_target_` with the signature of what the target names.

    Args:
        config: Plain containers, as `plain` returns them.

    Raises:
        ConfigError: With the key, the nearest argument and all arguments.
    """
    for owned, remedy in OWNED_BY_GROUPS.items():
        if owned in config.get("trainer", {}):
            raise ConfigError(f"trainer.{owned}={config['trainer'][owned]} is not used here. Write {remedy}.")
    for where, node in _target_nodes(config, ""):
        known, takes_any = parameters_of(node["_target_"], where)
        for key in node.keys() - HYDRA_KEYS:
            if key not in known and not takes_any:
                raise ConfigError(unknown_key(f"{where}.{key}", known, f"{node['_target_']} takes"))


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
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        given = ", ".join(f"{k}={v}" for k, v in node.items() if k not in HYDRA_KEYS and not isinstance(v, dict))
        cause = error.__cause__ or error
        raise ConfigError(f"{path}: {node['_target_']} refused its arguments ({given}): {cause}") from error
