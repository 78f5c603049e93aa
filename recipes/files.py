"""The files under `conf/` as Hydra sees them: which entries of their defaults lists lead nowhere, where a key stands.

Hydra stops at the first entry that it cannot follow, and forgets where a key came from once all files are one
configuration. Here such an entry is noted and left out, so that the rest can be looked at as well.

It leaves out what keys mean (`recipes.signatures`) and the command line (`recipes.command_line`).
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from recipes.hints import did_you_mean
from recipes.signatures import Problem


class Files:
    """All files that can be chosen, and the configuration that some of them make.

    Args:
        loader: Hydra's.
        config_name: The primary file, such as `train`.
        search: Overrides of `hydra.searchpath`.
    """

    def __init__(self, loader: ConfigLoader, config_name: str, search: list[str]) -> None:
        assert isinstance(loader, ConfigLoaderImpl)
        self.loader = loader
        self.config_name = config_name
        _, self.repository = loader._parse_overrides_and_create_caching_repo(config_name, search)
        self._used: list[ResultDefault] = []
        self.choices: dict[str, str | None] = {}

    def options(self, group: str) -> list[str]:
        """Names of a group's files; nothing if there is no such group."""
        return self.repository.get_group_options(group, ObjectType.CONFIG)

    def groups(self) -> list[str]:
        """Those that the primary file chooses an option of."""
        result = self.repository.load_config(self.config_name)
        entries = [] if result is None else result.defaults_list or []
        return [str(entry.group) for entry in entries if isinstance(entry, GroupDefault) and not entry.override]

    def read(self, path: str) -> Any:
        """A file as OmegaConf reads it, or None; `path` is such as `model/unet_tiny`."""
        result = self.repository.load_config(path)
        return None if result is None else result.config

    def drop_broken_entries(self, path: str, above: tuple[str, ...] = ()) -> list[Problem]:
        """Leave out, here and in the files this one is made of, what names no group or no option; say which.

        Args:
            path: Such as `experiment/digits_unet`.
            above: Files on the way to this one, for a file that is made of itself.

        Raises:
            ValueError: If a file is no YAML.
        """
        try:
            result = self.repository.load_config(path)
        except YAMLError as error:
            raise ValueError(f"{path}.yaml is no YAML: {' '.join(str(error).split())}.") from error
        problems: list[Problem] = []
        if result is None:
            return problems
        good = []
        for entry in result.defaults_list or []:
            placed = copy.deepcopy(entry)
            placed.update_parent(path.rpartition("/")[0], "")
            if text := self._leads_nowhere(placed):
                problems.append(Problem("", f"{self.name_of(path)}: {text}"))
                continue
            named = isinstance(placed, GroupDefault) and isinstance(placed.value, str)
            named = named or isinstance(placed, ConfigDefault)
            below = placed.get_config_path() if named and not placed.is_self() else ""
            if below in (path, *above):
                text = f"{self.name_of(path)}: defaults has '{below}', which is made of this file itself."
                problems.append(Problem("", text))
                continue
            good.append(entry)
            if below:
                problems += self.drop_broken_entries(below, (*above, path))
        result.defaults_list = good
        return problems

    def _leads_nowhere(self, entry: InputDefault) -> str:
        if entry.is_self() or entry.is_optional() or entry.is_interpolation() or entry.is_missing():
            return ""
        if isinstance(entry, ConfigDefault):
            path = entry.get_config_path()
            group, _, name = path.rpartition("/")
            if self.repository.config_exists(path):
                return ""
            return f"defaults has '{path}', and there is no such file.{did_you_mean(name, self.options(group))}"
        assert isinstance(entry, GroupDefault)
        group, values = entry.get_group_path(), entry.value if isinstance(entry.value, list) else [entry.value]
        options = self.options(group)
        if not options:
            groups = self.repository.get_group_options("", ObjectType.GROUP)
            known = did_you_mean(group, groups) or f" Groups: {', '.join(groups)}."
            return f"defaults has '/{group}: {entry.value}', and there is no group '{group}'.{known}"
        for value in values:
            if value is not None and value not in options:
                return (
                    f"defaults has '/{group}: {value}', and there is no {group} '{value}'."
                    f"{did_you_mean(value, options)} Choices: {', '.join(options)}."
                )
        return ""

    def compose(self, groups: list[Override]) -> DictConfig:
        """The configuration with these choices, without the broken entries.

        What it is made of is kept for `origin`, and which option each group has in `choices`.
        """
        listed = create_defaults_list(self.repository, self.config_name, groups, prepend_hydra=True, skip_missing=False)
        self._used = listed.defaults
        self.choices = dict(listed.overrides.known_choices)
        config = self.loader._compose_config_from_defaults_list(listed.defaults, self.repository)
        OmegaConf.set_struct(config, True)
        return config

    def top_level(self) -> set[str]:
        """Keys that the primary file has, and the places of its groups; an experiment has no place of its own."""
        keys = {str(key) for key in self.read(self.config_name)} - {"defaults"}
        parts = [d.package for d in self._used if d.parent == self.config_name and d.package]
        return keys | {part.split(".")[0] for part in parts} - {"experiment"}

    def origin(self, key: str) -> str:
        """The file in which a key was written last, or nothing."""
        for default in reversed(self._used):
            package = f"{default.package}." if default.package else ""
            if not default.config_path or not key.startswith(package):
                continue
            node = self.read(default.config_path)
            for part in key.removeprefix(package).split("."):
                node = node._get_node(part) if isinstance(node, DictConfig) and part in node.keys() else None
            if node is not None:
                return self.name_of(default.config_path)
        return ""

    def purpose(self, path: str) -> str:
        """What the first comment of a file says, `# @package` left out."""
        return first_comment(Path(self._full_name(path)).read_text())

    def name_of(self, path: str) -> str:
        """A file's place, relative to where the command was typed if it lies below."""
        full = self._full_name(path)
        relative = os.path.relpath(full)
        return full if relative.startswith("..") else relative

    def _full_name(self, path: str) -> str:
        result = self.repository.load_config(path)
        return f"{result.path.removeprefix('file://')}/{path}.yaml" if result is not None else f"{path}.yaml"


def first_comment(text: str) -> str:
    r"""First comment line of a YAML file that is no directive of Hydra's.

    Example:
        >>> first_comment("# @package _global_\n# Digits in a minute.\nseed: 0\n")
        'Digits in a minute.'
    """
    comments = [line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")]
    return next((comment for comment in comments if not comment.startswith("@")), "")
