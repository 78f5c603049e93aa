"""Check the command line before Hydra sees it: what would fail later, or overwrite something, is said at once.

Hydra itself stops at the first mistake, with a traceback or with exit status 1, when it may have written into another
run's directory. Here the overrides are parsed with Hydra's own parser and composed with its loader, everything that
cannot be honoured is shown in one go, and `resume=auto` and the directory that several processes share become
overrides.

It leaves out what each override says (`recipes.overrides`), what constructors refuse (`recipes.config.build`) and what
takes data to tell (`recipes.checks`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipes import processes
from recipes.config import ConfigError, collected, fail, quoted
from recipes.earlier_runs import complete_run, interrupted_run
from recipes.experiments import purposes
from recipes.files import Files
from recipes.overrides import TROUBLE, check_job, jobs, parse
from recipes.places import check_writable
from recipes.screen import folded

CONF = Path(__file__).resolve().parent.parent / "conf"


def run(task: Callable[[], None], config_name: str) -> None:
    """Check `sys.argv`, then hand over to a function decorated with `hydra.main`.

    `sys.argv` itself is rewritten, because Lightning starts further processes with what stands there.
    """
    OmegaConf.register_new_resolver("experiments", purposes, replace=True)  # for --help
    try:
        sys.argv[1:] = checked(sys.argv[1:], config_name)
    except ConfigError as error:
        fail(error)
    if not get_args_parser().parse_intermixed_args(sys.argv[1:]).help:
        task()
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            task()
    finally:  # Hydra exits
        print(folded(text.getvalue()), end="")


def checked(argv: list[str], config_name: str) -> list[str]:
    """Check every override; return the command line with `++` before arguments that the YAML does not list.

    Args:
        argv: Without the program's name.
        config_name: Primary configuration, unless `--config-name` names another.

    Raises:
        ConfigError: With everything that cannot be honoured, in one go.
    """
    args = get_args_parser().parse_intermixed_args(argv)
    if args.help or args.hydra_help or args.shell_completion:
        return argv
    name = args.config_name or config_name
    directory = Path(args.config_path).absolute() if args.config_path else CONF
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: there is no such directory.")
    shared: list[str] = []
    with initialize_config_dir(str(directory), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parser = OverridesParser.create(loader)
        if not loader.repository.config_exists(name):  # type: ignore[attr-defined]
            raise ConfigError(f"--config-name {name}: there is no file {directory / name}.yaml.")
        parsed, problems = parse(args.overrides, parser, sweep=args.multirun)
        extra = _search_path(args.config_dir, parsed)
        with collected(problems):
            _check_launcher(parsed, args.multirun, name, extra)
        rewrite: dict[str, str] = {}
        combinations = jobs(parsed)
        for job in combinations:
            with collected(problems):
                rewrite |= check_job([(o, parser.parse_override(line)) for o, line in job], Files(loader, name, extra))
        first = [f"++{line}" if str(o.input_line) in rewrite else line for o, line in combinations[0]]
        given = [str(o.key_or_group) for o in parsed]
        if not problems:  # what is still wrong, Hydra says now rather than later with a traceback
            try:
                config = compose(name, overrides=extra + first, return_hydra_config=True)
            except TROUBLE as error:
                problems.append(str(error).strip() or type(error).__name__)
            else:
                with collected(problems):
                    _check_directory(config, args.multirun, len(combinations))
                shared = [] if args.multirun else _earlier_run(config, given)
        with collected(problems):
            keys = [*given, *(line.partition("=")[0] for line in shared)]
            own = processes.shared_directory(keys, args.multirun, config_name)
            if not problems and any(line.startswith("hydra.run.dir=") for line in own):
                _check_directory(compose(name, overrides=extra + first + own, return_hydra_config=True), False, 1)
            shared += own
    if problems:
        raise ConfigError(*problems)
    # Overrides last: Hydra's parser refuses them on both sides of an option such as -m.
    flags = [a for a in argv if a not in args.overrides]
    return [*flags, *(rewrite.get(line, line) for line in args.overrides), *shared]


def _check_directory(config: DictConfig, sweep: bool, count: int) -> None:
    """Refuse a directory that cannot be written to, that jobs would share, or that holds another run's checkpoint.

    Hydra would tell of the first with a traceback, and write into the last before anything else can look at it.
    """
    key = "hydra.sweep.dir" if sweep else "hydra.run.dir"
    subdir = config.hydra.sweep._get_node("subdir")
    if sweep and count > 1 and not subdir._is_interpolation():
        raise ConfigError(
            f"hydra.sweep.subdir={subdir._value()}: all {count} jobs would write there, each over the one before. "
            "Leave it out, or write a directory for each: hydra.sweep.subdir='\\${hydra.job.num}'."
        )
    try:
        directory = Path(OmegaConf.select(config, key)).absolute()
    except OmegaConfBaseException:  # it refers to what Hydra alone knows
        return
    anew = "resume" in config and not any(config.get(key) for key in ("resume", "ckpt_path", "dry_run"))
    if anew and (last := next(directory.glob(f"{'*/' * sweep}checkpoints/last.ckpt"), None)):
        raise ConfigError(
            f"{key}={directory}: {last} is there already, and would be overwritten. To go on with it, write "
            f"resume=auto; to start anew, {key}=ANOTHER, or remove the directory."
        )
    if not directory.is_dir() or config.hydra.output_subdir is not None:  # else nothing of its own is written there
        check_writable(key, directory)


def _search_path(config_dir: str | None, overrides: list[Override]) -> list[str]:
    """One override for all directories that are searched beside the program's, since Hydra reads the first alone."""
    given = [o.value() for o in overrides if o.key_or_group == "hydra.searchpath"]
    if not config_dir:
        return [str(o.input_line) for o in overrides if o.key_or_group == "hydra.searchpath"]
    others = [str(path) for value in given if isinstance(value, list) for path in value]
    return [f"hydra.searchpath=[{','.join([f'file://{Path(config_dir).absolute()}', *others])}]"]


def _earlier_run(config: DictConfig, given: list[str]) -> list[str]:
    """For `resume=auto`, the override that goes on in the directory of the interrupted run, if there is one.

    Raises:
        ConfigError: If a directory was given that is another configuration's; Hydra would write into it first.
    """
    if config.get("resume") != "auto" or config.get("dry_run"):
        return []
    try:
        directory = Path(config.hydra.run.dir).absolute()
    except OmegaConfBaseException:  # it refers to what Hydra alone knows: looked at when it has started
        return []
    with open_dict(config):
        config.pop("hydra")
    if "hydra.run.dir" in given:
        complete_run(directory, config)
        return []
    run = interrupted_run(config, directory.parent)
    return [] if run is None else [f"hydra.run.dir={quoted(run)}"]


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
