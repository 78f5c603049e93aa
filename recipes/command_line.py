"""Check the command line before Hydra sees it.

Hydra itself stops at a misspelt key with advice that misleads (it offers to append the misspelt key) and with exit
status 1. Here the overrides are parsed and composed with Hydra's own parser first: unknown options and keys are
answered with the choices, and a constructor argument that the YAML does not list may be set without a prefix.

It leaves out checks of values: constructors do those (`recipes.config.build`), `recipes.train` those that need data.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes import processes
from recipes.config import HYDRA_KEYS, OWNED_BY_GROUPS, ConfigError, did_you_mean, fail, parameters_of, unknown_key

CONF = Path(__file__).resolve().parent.parent / "conf"


def run(task: Callable[[], None], config_name: str) -> None:
    """Check `sys.argv`, then hand over to a function decorated with `hydra.main`.

    `sys.argv` itself is rewritten, because Lightning starts further processes with what stands there.
    """
    try:
        sys.argv[1:] = checked(sys.argv[1:], config_name)
    except ConfigError as error:
        fail(error)
    task()


def checked(argv: list[str], config_name: str) -> list[str]:
    """Check every override; return the command line with `++` before arguments that the YAML does not list.

    Args:
        argv: Without the program's name.
        config_name: Primary configuration, unless `--config-name` names another.

    Raises:
        ConfigError: At the first override that cannot be honoured.
    """
    args = get_args_parser().parse_intermixed_args(argv)
    if args.help or args.hydra_help or args.shell_completion:
        return argv
    directory = Path(args.config_path).absolute() if args.config_path else CONF
    extra = [f"hydra.searchpath=[file://{Path(args.config_dir).absolute()}]"] if args.config_dir else []
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            parsed = OverridesParser.create(loader).parse_overrides(args.overrides)
            if not args.multirun and (sweep := [o.input_line for o in parsed if o.is_sweep_override()]):
                raise ConfigError(f"{sweep[0]}: several values need a sweep. Add -m, or quote the value: \"'a,b'\".")
            _check_launcher(parsed, args.multirun, args.config_name or config_name, extra)
            shared = processes.shared_directory([str(o.key_or_group) for o in parsed], args.multirun)
            rewrite: dict[str, str] = {}
            for job in _jobs(parsed):
                rewrite |= _check_job(job, args.config_name or config_name, loader, extra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).strip()) from error
    # Overrides last: Hydra's parser refuses them on both sides of an option such as -m.
    flags = [a for a in argv if a not in args.overrides]
    return [*flags, *(rewrite.get(line, line) for line in args.overrides), *shared]


def _check_launcher(overrides: list[Override], sweep: bool, config_name: str, extra: list[str]) -> None:
    """SLURM jobs need their plugin, a sweep that they are the jobs of, and one number of tasks for all."""
    launchers = [o for o in overrides if o.key_or_group == "hydra/launcher" and o.value() == "slurm"]
    if not launchers:
        return
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise ConfigError(
            "hydra/launcher=slurm needs Hydra's plugin for it: pip install 'lightning_mixprec[slurm]', or from a "
            "checkout pip install -e '.[slurm]'."
        )
    if not sweep:
        raise ConfigError(
            "hydra/launcher=slurm submits the jobs of a sweep, and this is a run on this machine. Add -m; a sweep of "
            "one job is one, too."
        )
    sizes = ("trainer", "trainer.devices", "trainer.num_nodes")
    if swept := [o.input_line for o in overrides if o.is_sweep_override() and o.key_or_group in sizes]:
        raise ConfigError(
            f"{swept[0]}: hydra/launcher=slurm asks for the same nodes and tasks for all jobs of a sweep. Submit a "
            "sweep for each size."
        )
    lines = [str(o.input_line) for o in overrides if o.key_or_group in sizes]
    devices = compose(config_name, overrides=lines + extra).trainer.devices
    if not isinstance(devices, int):
        raise ConfigError(
            f"trainer.devices={devices}: hydra/launcher=slurm asks for as many tasks per node, so it must be a number. "
            "Write trainer.devices=NUMBER, or trainer=cluster."
        )


def _jobs(overrides: list[Override]) -> list[list[tuple[Override, str]]]:
    """All combinations of a sweep, each a list of (override, override line with one value)."""
    choices = []
    for override in overrides:
        if override.is_sweep_override():
            prefix = override.get_key_element()
            choices.append([(override, f"{prefix}={value}") for value in override.sweep_string_iterator()])
        else:
            choices.append([(override, str(override.input_line))])
    return [list(job) for job in itertools.product(*choices)]


def _check_job(
    job: list[tuple[Override, str]], config_name: str, loader: ConfigLoader, extra: list[str]
) -> dict[str, str]:
    """Check the overrides of one job; return the lines to rewrite, old to new."""
    groups, values, added = [], [], []
    for override, line in job:
        options = loader.get_group_options(override.key_or_group, config_name=config_name, overrides=extra)
        changes = not (override.is_add() or override.is_delete() or override.is_force_add())
        if options:
            chosen = line.partition("=")[2].strip("'\"[]")
            if not override.is_delete() and not set(chosen.split(",")) <= set(options):
                raise ConfigError(
                    f"{line}: there is no {override.key_or_group} '{chosen}'.{did_you_mean(chosen, options)} "
                    f"Choices: {', '.join(options)}."
                )
            groups.append(line)
        elif not override.key_or_group.startswith(("hydra.", "hydra/")) and override.package is None:
            if changes:
                values.append(override)
            elif not override.is_delete():
                added.append((override, line))
    base = compose(config_name, overrides=groups + extra)
    for override, _ in added:
        if (key := override.key_or_group.split(".")[0]) not in base:
            raise ConfigError(unknown_key(key, [str(k) for k in base], "The configuration has"))
    base = compose(config_name, overrides=groups + [line for _, line in added] + extra)

    def options_that_set(path: list[str]) -> dict[str, str]:
        """Options of the group `path[0]` in which the key `path` stands, each with the class that it builds there."""
        found = {}
        for option in loader.get_group_options(path[0], config_name=config_name, overrides=extra):
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                node = OmegaConf.select(compose(config_name, overrides=[f"{path[0]}={option}", *extra]), ".".join(path))
                if isinstance(node, DictConfig) and "_target_" in node:
                    found[option] = str(node["_target_"])
        return found

    rewrite = {str(o.input_line): f"++{o.input_line}" for o in values if not _listed(o, base, options_that_set)}
    # What is still wrong, Hydra says now rather than later with a traceback.
    compose(config_name, overrides=[f"++{line}" if str(o.input_line) in rewrite else line for o, line in job] + extra)
    return rewrite


def _listed(override: Override, config: DictConfig, options_that_set: Callable[[list[str]], dict[str, str]]) -> bool:
    """Whether the composed configuration has the key; False if only the constructor takes it.

    Args:
        override: What the user wrote.
        config: Composed without it.
        options_that_set: For the remedy; see `_check_job`.

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
        listed = [str(k) for k in node.keys() if k not in HYDRA_KEYS]
        if "_target_" not in node:
            raise ConfigError(unknown_key(where, listed, f"{'.'.join(path) or 'The configuration'} has"))
        taken, takes_any = parameters_of(node["_target_"], ".".join(path))
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
