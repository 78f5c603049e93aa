"""From configuration nodes to objects, with errors that name the value, the choices and the remedy.

Nodes are turned into plain containers before anything is built from them, so no OmegaConf object reaches an optimizer,
a scheduler or a checkpoint. Keys and values are compared with signatures first (`recipes.signatures`); the rest is for
the constructor to judge, whose refusal is shown with the key it is about. It leaves out Hydra's command line
(`recipes.command_line`).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, Node
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from recipes.hints import MISSING, did_you_mean
from recipes.signatures import HYDRA_KEYS, REMEDY, Problem, keywords_of, located, problems_in

KINDS = {
    "data": "recipes.data.DataModule",
    "model": "torch.nn.Module",
    "objective": "recipes.denoising.Objective",
    "sampler": "recipes.sampler.Sampler",
    "precision": "lightning_mixprec.MasterWeightPrecision",
    "strategy": "lightning.pytorch.strategies.Strategy",
    "ema": "lightning.Callback",
    "callbacks": "lightning.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "trainer": "lightning.Trainer",
}
"""What a part must be; below `callbacks` and `logger`, each of what is named there."""


class ConfigError(Exception):
    """Something the user wrote cannot be honoured. Shown without a traceback; the exit status is 2.

    Args:
        *problems: What is wrong, each with the value, the choices and the remedy.

    Attributes:
        problems: The same, each once.

    Example:
        >>> print(ConfigError("seed=-1 is negative.", "lr=x is no number."))
        2 things are wrong:
        1. seed=-1 is negative.
        2. lr=x is no number.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(dict.fromkeys(problems))
        numbered = [f"{number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__(
            self.problems[0] if len(numbered) == 1 else "\n".join([f"{len(numbered)} things are wrong:", *numbered])
        )


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the problems of a `ConfigError` to a list and go on, so that all are shown in one go."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def fail(error: Exception, status: int = 2) -> NoReturn:
    """Show the message and leave; with HYDRA_FULL_ERROR=1 the traceback as well."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters are in it.

    Example:
        >>> print(quoted(Path("a b/c=1")))
        'a b/c=1'
    """
    return "'" + str(path).replace("'", r"\'") + "'"


def plain(node: Any) -> Any:
    """A configuration node as plain dicts, lists and scalars, interpolations resolved.

    Raises:
        ConfigError: With every value that is missing, and every reference that leads nowhere.
    """
    problems: list[Problem] = []
    container = resolved(node, problems)
    if problems:
        raise ConfigError(*(problem.text for problem in problems))
    return container


def resolved(node: Any, problems: list[Problem], early: bool = False) -> Any:
    """Like `plain`, but goes on after a problem.

    Args:
        node: A configuration node.
        problems: What is found is added here.
        early: Hydra has not chosen a directory yet; what refers to that stays as it is written.
    """
    if not isinstance(node, DictConfig | ListConfig):
        return node
    if node._is_none():
        return None
    values: dict[Any, Any] = {}
    keys: Iterable[Any] = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        child, where = node._get_node(key), str(node._get_full_key(key))
        if not isinstance(child, Node):
            continue
        if child._is_missing():
            values[key] = MISSING
            problems.append(Problem(where, f"{where} is missing. Write {where}=VALUE."))
            continue
        try:
            value = node[key]
            # What is referred to is checked where it stands.
            values[key] = child._value() if early and child._is_interpolation() else resolved(value, problems, early)
        except InterpolationToMissingValueError:
            values[key] = MISSING  # said where it is missing
        except OmegaConfBaseException as error:
            values[key] = child._value()
            if not (early and "HydraConfig was not set" in str(error)):
                reason = str(error).strip().partition("\n")[0]
                problems.append(Problem(where, f"{where}={child._value()}: {reason}. Name a key that is there."))
    return values if isinstance(node, DictConfig) else list(values.values())


def check_targets(config: dict[str, Any]) -> None:
    """Compare every key and value beside a `_target_` with the signature and type hints of what the target names.

    Args:
        config: Plain containers, as `plain` returns them.

    Raises:
        ConfigError: With everything that is wrong; see `recipes.signatures.problems_in`.
    """
    if problems := problems_in(config):
        raise ConfigError(*(problem.text for problem in problems))


def build_all(config: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Build every part that the configuration has; of those it leaves out, None.

    Raises:
        ConfigError: With everything that constructors refuse.
    """
    built: dict[str, Any] = {}
    problems: list[str] = []
    for path in paths:
        with collected(problems):
            built[path] = build(config, path) if config.get(path) else None
    if problems:
        raise ConfigError(*problems)
    return built


def build_callbacks(config: dict[str, Any]) -> dict[str, Any]:
    """The callbacks of a run, by the names that they have in the configuration; those that are null are left out.

    Example:
        >>> mine = {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"}
        >>> list(build_callbacks({"callbacks": {"mine": mine, "other": None}}))
        ['callbacks.mine']
    """
    named = {f"callbacks.{name}": node for name, node in (config.get("callbacks") or {}).items()}
    return {name: callback for name, callback in build_all(named, named).items() if callback is not None}


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
        built = instantiate(node, _convert_="all", **arguments)
    kind = KINDS.get(path.partition(".")[0])
    if kind is not None and not isinstance(built, located(kind)):
        raise ConfigError(
            f"{path}._target_={node['_target_']} gives a {type(built).__name__}, and {path} must be a {kind}. Derive "
            "the class from that, or choose an option of the group."
        )
    return built


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
    found = _about(given, str(cause))
    if found == given and any(isinstance(value, dict) for value in node.values()):
        found = {}  # it names none of these, and may be about an object among the arguments
    arguments = ", ".join(f"{key}={value}" for key, value in found.items()) or path
    reason = str(cause).strip() or type(cause).__name__
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", reason):  # handed on to another constructor
        reason = reason.rstrip(".?") + "." + did_you_mean(unknown[1], keywords_of(node["_target_"]))
    if not reason.endswith((".", "?", "!")):
        reason += "."
    return ConfigError(f"{arguments}: {node['_target_']} refused: {reason} {REMEDY}")


def _about(given: dict[str, Any], message: str) -> dict[str, Any]:
    """The arguments that a constructor's message speaks of; all of them if it names none.

    Example:
        >>> _about({"optimizer.lr": -1, "optimizer.eps": 0.1}, "Invalid learning rate: -1")
        {'optimizer.lr': -1}
    """

    def says(text: Any, before: str = "") -> bool:
        return re.search(rf"(?<![\w.{before}-]){re.escape(str(text))}(?!\w|\.\w)", message) is not None

    tests = (
        lambda key, value: says(f"{key}={value}"),
        lambda key, value: says(key) and says(value),
        lambda key, value: says(value, before="="),  # else it is what another key was given
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
