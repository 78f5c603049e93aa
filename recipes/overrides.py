"""What the overrides of a command line say: one job for every combination of a sweep, and what is wrong with each.

Hydra stops at the first misspelt key with advice that misleads (it offers to append the misspelt key), and takes
whatever a file under `conf/` says. Here everything in a job that names no option, group, key or argument, or has the
wrong type, is found at once, with the choices, and a constructor argument that the YAML does not list may be set
without a prefix.

It leaves out the command line around the overrides (`recipes.command_line`), the files that they choose
(`recipes.files`) and what constructors take (`recipes.signatures`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipes.config import ConfigError, collected, quoted, resolved
from recipes.files import Files
from recipes.hints import did_you_mean
from recipes.signatures import (
    HYDRA_KEYS,
    OWNED_BY_GROUPS,
    Problem,
    problems_in,
    signature_of,
    unknown_key,
)

TROUBLE = (HydraException, OmegaConfBaseException, ValueError, AssertionError, AttributeError, TypeError)
"""What Hydra and OmegaConf raise for files and overrides that they cannot make one configuration of."""


def parse(lines: list[str], parser: OverridesParser, *, sweep: bool) -> tuple[list[Override], list[str]]:
    """What Hydra makes of every override by itself.

    Args:
        lines: As they were typed.
        parser: Hydra's.
        sweep: Whether an override may have several values.

    Returns:
        Those that make sense, and what is wrong with the others.
    """
    parsed: list[Override] = []
    problems: list[str] = []
    for line in lines:
        try:
            parsed += parser.parse_overrides([line])
        except HydraException as error:
            problems.append(f"{line}: {str(error).strip()}{_how_to_quote(line, parser)}")
    if not sweep:
        problems += [
            f"{o.input_line}: several values need a sweep. Add -m, or quote the value: \"'a,b'\"."
            for o in parsed
            if o.is_sweep_override()
        ]
        parsed = [o for o in parsed if not o.is_sweep_override()]
    elif not any(o.key_or_group == "hydra/sweeper" for o in parsed):
        problems += [
            f"{o.input_line}: Hydra's basic sweeper draws from no interval. Write the values, such as "
            f"{o.key_or_group}={interval.start},{interval.end}, or range(FROM,TO,STEP)."
            for o in parsed
            if isinstance(interval := o.value(), IntervalSweep)
        ]
        parsed = [o for o in parsed if not o.is_interval_sweep()]
    return parsed, problems


def _how_to_quote(line: str, parser: OverridesParser) -> str:
    """What to write instead of a value with characters that Hydra has a use for, such as the path of a file."""
    key, _, value = line.partition("=")
    written = f"{key}={quoted(Path(value).expanduser())}"  # a shell leaves ~ as it is within quotes
    try:
        parser.parse_overrides([written])
    except HydraException:
        return ""
    for_shell = written.replace("$", r"\$")
    return f' If that is a text, quote it, for the shell too: "{for_shell}".' if value else ""


def jobs(overrides: list[Override]) -> list[list[tuple[Override, str]]]:
    """All combinations of a sweep, each a list of (override, override line with one value)."""
    choices = []
    for override in overrides:
        if override.is_sweep_override():
            prefix, swept = override.get_key_element(), override.value()
            ends = [str(swept.start), str(swept.end)] if isinstance(swept, IntervalSweep) else None
            choices.append([(override, f"{prefix}={value}") for value in ends or override.sweep_string_iterator()])
        else:
            choices.append([(override, str(override.input_line))])
    return [list(job) for job in itertools.product(*choices)]


def check_job(job: list[tuple[Override, Override]], files: Files) -> dict[str, str]:
    """Check one job: its overrides, the files they choose, and the configuration that comes out.

    Args:
        job: Each override as it was given, and with the one value that it has in this job.
        files: Hydra's.

    Returns:
        The lines to rewrite, old to new.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems: list[str] = []
    groups: list[Override] = []
    keys: list[tuple[Override, Override]] = []
    for given, override in job:
        options = files.options(override.key_or_group)
        if not options:
            keys.append((given, override))
        elif wrong := _unknown_options(override, options) or _wrong_choice(override, files):
            problems.append(wrong)
        else:
            groups.append(override)
    chosen = [f"{o.key_or_group}/{o.value()}" for o in groups if isinstance(o.value(), str)]
    try:
        for path in (files.config_name, *chosen):
            problems += [problem.text for problem in files.drop_broken_entries(path)]
        base = files.compose(groups)
    except TROUBLE as error:
        raise ConfigError(*problems, str(error).strip()) from error

    def options_that_set(path: list[str]) -> dict[str, str]:
        """Options of the group `path[0]` in which the key `path` stands, each with the class that it builds there."""
        found = {}
        for option in files.options(path[0]):
            node = OmegaConf.select(files.read(f"{path[0]}/{option}"), ".".join(path[1:]))
            if isinstance(node, DictConfig) and "_target_" in node:
                found[option] = str(node["_target_"])
        return found

    top_level = files.top_level() - {"hydra"}
    for key in [str(key) for key in base if str(key) not in {*top_level, "hydra"}]:
        header = "Does its first line say '# @package _global_'?" if key == "experiment" else ""
        text = unknown_key(key, top_level, "The configuration has")
        problems.append(f"{text}{_stands_in(files, key)} {header}".strip())
        with open_dict(base):
            del base[key]  # said once; what is below it cannot be right either
    rewrite: dict[str, str] = {}
    # Those that add first: what they add, others may set.
    for given, override in sorted(keys, key=lambda pair: not pair[1].is_add()):
        changes = not (override.is_add() or override.is_delete() or override.is_force_add())
        try:
            with collected(problems):
                if changes and override.package is None and not _listed(override, base, options_that_set):
                    rewrite[str(given.input_line)] = f"++{given.input_line}"
                    override = OverridesParser.create().parse_override(f"++{override.input_line}")
                elif not changes and not override.is_delete():
                    _check_added(override, base)
                ConfigLoaderImpl._apply_overrides_to_config([override], base)
        except TROUBLE as error:
            reason = str(error.__cause__ or "").strip().partition("\n")[0]
            problems.append(f"{override.input_line}: {str(error).strip()}{f': {reason}' if reason else ''}")

    found: list[Problem] = []
    config = resolved(base, found, early=True)
    config.pop("hydra", None)
    typed = [override.key_or_group for _, override in keys]
    said: set[str] = set()
    for problem in [*problems_in(config), *(p for p in found if not p.key.startswith("hydra."))]:
        if problem.key not in said:
            from_line = any(f"{problem.key}.".startswith(f"{key}.") for key in typed)
            place = "" if from_line else _stands_in(files, problem.key)
            leave_out = f" To leave it out: ~{problem.key}." if place and problem.text.startswith("unknown") else ""
            problems.append(problem.text + place + leave_out)
        said.add(problem.key)
    if problems:
        raise ConfigError(*problems)
    return rewrite


def _unknown_options(override: Override, options: list[str]) -> str:
    """What to say of a choice that its group does not have."""
    if override.is_delete():
        return ""
    if (value := override.value()) is None:
        return f"{override.input_line}: a group takes the name of an option. Choices: {', '.join(options)}."
    if isinstance(value, dict):
        own = f"{override.key_or_group}._target_={value.get('_target_', 'CLASS')}"
        return (
            f"{override.input_line}: a group takes the name of an option. Choices: {', '.join(options)}. For a class "
            f"of your own write {own}, and each argument as a key like it."
        )
    plugins = override.key_or_group in ("hydra/launcher", "hydra/sweeper")
    more = " Others are plugins of Hydra that must be installed, such as hydra-joblib-launcher." * plugins
    for choice in value if isinstance(value, list) else [value]:
        if str(choice) not in options:
            return (
                f"{override.input_line}: there is no {override.key_or_group} '{choice}'."
                f"{did_you_mean(str(choice), options)} Choices: {', '.join(options)}.{more}"
            )
    return ""


def _wrong_choice(override: Override, files: Files) -> str:
    """What to say of a choice of options that exist, for a group that has none, has one already, or is made of one."""
    group, value, chosen = override.key_or_group, override.value(), files.groups()
    if group.startswith("hydra/"):
        return ""
    if group not in chosen:
        return f"{override.input_line}: there is no {group} to choose here. Groups: {', '.join(chosen) or 'none'}."
    if override.is_delete():
        needed = "Runs are kept in directories by its name. Write experiment=NAME."
        return f"{override.input_line}: there must be an experiment. {needed}" if group == "experiment" else ""
    if override.is_add() or override.is_force_add():
        return f"{override.input_line}: one is chosen already. Write {group}={value}."
    if isinstance(value, list):
        classes = [str(name) for name in value if "_target_" in (files.read(f"{group}/{name}") or {})]
        if len(classes) > 1:
            return (
                f"{override.input_line}: the last would be mixed with the others, each of which is a {group} of its "
                f"own. Choose one: {group}={classes[0]}; to try all, -m {group}={','.join(classes)}."
            )
    return ""


def _check_added(override: Override, config: DictConfig) -> None:
    """`+key` and `++key` may add arguments and callbacks, not top-level keys."""
    key = override.key_or_group.split(".")[0]
    if key not in config:
        raise ConfigError(unknown_key(key, [str(k) for k in config if k != "hydra"], "The configuration has"))


def _stands_in(files: Files, key: str) -> str:
    file = files.origin(key)
    return f" It stands in {file}." if file else ""


def _listed(override: Override, config: DictConfig, options_that_set: Callable[[list[str]], dict[str, str]]) -> bool:
    """Whether the composed configuration has the key; False if only the constructor takes it.

    Args:
        override: What the user wrote.
        config: Composed without it.
        options_that_set: For the remedy; see `check_job`.

    Raises:
        ConfigError: If neither does.
    """
    node: Any = config
    path: list[str] = []
    parts = override.key_or_group.split(".")
    for part in parts:
        if not isinstance(node, DictConfig):  # a list element or a value: Hydra decides
            return True
        if part in list(node.keys()):
            node = node._get_node(part)
            path.append(part)
            continue
        where = ".".join([*path, part])
        listed = [str(k) for k in node.keys() if k not in HYDRA_KEYS and (path or k != "hydra")]
        if "_target_" not in node:
            own = f" To add one of your own: +{where}._target_=CLASS." if path == ["callbacks"] else ""
            own += f" To choose a class of your own: +{where}=CLASS." * (part == "_target_")
            raise ConfigError(unknown_key(where, listed, f"{'.'.join(path) or 'The configuration'} has") + own)
        try:
            taken, _, _, takes_any, _ = signature_of(str(node["_target_"]))
        except ValueError:
            return True  # said of the class itself
        if path == ["trainer"] and part in OWNED_BY_GROUPS:
            raise ConfigError(f"{override.input_line} is not used here. Write {OWNED_BY_GROUPS[part]}.")
        if part not in taken and not takes_any:
            settable = {*taken, *listed} - (OWNED_BY_GROUPS.keys() if path == ["trainer"] else set())
            raise ConfigError(unknown_key(where, settable, f"{node['_target_']} takes"))
        if len(path) + 1 < len(parts):
            options = options_that_set([*path, part])
            choose = (
                f"{' or '.join(f'{path[0]}={option}' for option in options)} sets it; or" if options else "To set it,"
            )
            raise ConfigError(
                f"{override.input_line}: '{where}' is not set here, so it has no '{'.'.join(parts[len(path) + 1 :])}'. "
                f"{choose} add +{where}._target_={next(iter(options.values()), 'CLASS')} to give one to the "
                f"{path[0]} chosen."
            )
        return False
    return True
