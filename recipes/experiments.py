"""What can be trained by name: `python -m recipes.experiments [--config-dir DIRECTORY]`.

An experiment is a file in `conf/experiment/` (or in `DIRECTORY/experiment/`) whose first comment says what it is for;
there is no other list. It leaves out what an experiment would take in memory: `dry_run=meta`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.config import ConfigError, build, fail, resolved
from recipes.files import Files, first_comment
from recipes.screen import folded

CONF = Path(__file__).resolve().parent.parent / "conf"


class Experiment(NamedTuple):
    """One of them.

    Attributes:
        name: To write as `experiment=NAME`.
        purpose: What for.
        data: Option of the group.
        model: Option of the group.
        objective: Option of the group.
        parameters: Of the network; None if it cannot be built here, such as without an optional package.
    """

    name: str
    purpose: str
    data: str
    model: str
    objective: str
    parameters: int | None


def purposes() -> str:
    """Names and purposes as text, for `--help`.

    Example:
        >>> print(purposes().splitlines()[0].split(":")[0].strip())
        cifar10_unet
    """
    files = sorted((CONF / "experiment").glob("*.yaml"))
    width = max(len(path.stem) for path in files)
    return "\n".join(f"{path.stem:<{width}}: {first_comment(path.read_text())}" for path in files)


def experiments(config_dir: str | None = None) -> list[Experiment]:
    """All of them, those of `--config-dir` included, by number of parameters."""
    search = [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"] if config_dir else []
    found = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        files = Files(GlobalHydra.instance().config_loader(), "train", search)
        parser = OverridesParser.create()
        for name in files.options("experiment"):
            files.drop_broken_entries(f"experiment/{name}")  # training says what is wrong with them
            config: Any = resolved(files.compose(parser.parse_overrides([f"experiment={name}"])), [])
            data, model, objective = (str(files.choices[group]) for group in ("data", "model", "objective"))
            purpose = files.purpose(f"experiment/{name}")
            found.append(Experiment(name, purpose, data, model, objective, _parameters(config)))
    return sorted(found, key=lambda experiment: (experiment.parameters or 0, experiment.name))


def _parameters(config: dict[str, Any]) -> int | None:
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(config, "model").parameters())
    except ConfigError:
        return None


def listed(found: list[Experiment]) -> str:
    """As a table, with the purpose of each below its name.

    Example:
        >>> print(listed([Experiment("digits", "To try it.", "digits", "unet_small", "edm", 652_000)]))
        experiment  data    model       objective  parameters
        digits      digits  unet_small  edm            0.65 M
            To try it.
    """
    sizes = ["?" if each.parameters is None else f"{each.parameters / 1e6:,.2f} M" for each in found]
    rows = [(each.name, each.data, each.model, each.objective) for each in found]
    headings = ("experiment", "data", "model", "objective")
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]

    def line(cells: tuple[str, ...], size: str) -> str:
        return "  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), f"{size:>10}"])

    lines = [line(headings, "parameters")]
    for each, row, size in zip(found, rows, sizes, strict=True):
        lines += [line(row, size), *([folded(f"    {each.purpose}", hang=4)] if each.purpose else [])]
    return "\n".join(lines)


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m recipes.experiments", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config-dir", "-cd", help="directory with experiment/*.yaml of your own")
    given = parser.parse_args()
    if given.config_dir and not Path(given.config_dir).is_dir():
        fail(ConfigError(f"--config-dir {given.config_dir}: there is no such directory."))
    print(listed(experiments(given.config_dir)))
    print("\npython -m recipes.train experiment=NAME; add dry_run=meta for dtypes and memory")


if __name__ == "__main__":
    main()
