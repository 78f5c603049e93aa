"""What the documentation shows is run: docstring examples, and the README's code blocks."""

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from few_digits import FEW
from forked import ONE_THREAD, run

from lightning_mixprec.processor import lacks_instructions

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    f"{folder}.{path.stem}" for folder in ("lightning_mixprec", "recipes") for path in (ROOT / folder).glob("*.py")
)
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
RECIPE_COMMANDS = [line for line in COMMANDS if line.startswith("python -m recipes.")]


@pytest.mark.parametrize("module", [name.removesuffix(".__init__") for name in MODULES])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_public_name_has_an_example():
    import lightning_mixprec

    for name in lightning_mixprec.__all__:
        assert ">>>" in getattr(lightning_mixprec, name).__doc__, name


def test_readme_python_blocks(tmp_path, monkeypatch, capsys):
    """In order, as one reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_readme_recipe_commands(tmp_path):
    """Every recipe command of the README runs, in order and with fewer steps and images; the first as it is typed."""
    assert len(RECIPE_COMMANDS) >= 4
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **ONE_THREAD}
    for place, command in enumerate(RECIPE_COMMANDS):
        command = re.sub(r"trainer\.max_steps=\d+", "", command.partition("  #")[0])
        if "recipes.train" in command:
            command += f" trainer.max_steps={4 if 'ckpt_path=last' in command else 2}"  # resuming needs steps to do
            command += "" if "dry_run" in command else " sampler.steps=2 " + " ".join(FEW)
        if "recipes.train" in command and "precision" not in command and lacks_instructions(torch.bfloat16):
            command += " precision=fp32"  # half the time
        if "recipes.evaluate" in command:
            command += " samples=20"
        if place == 0:
            typed = command.replace("python", f"'{sys.executable}'", 1)
            subprocess.run(typed, shell=True, cwd=tmp_path, env=environment, check=True, timeout=300)
            continue
        done = run(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.output[-3000:]}"


def test_readme_is_short_and_has_the_two_one_line_commands():
    assert len(README.splitlines()) < 150
    setups = [line for line in COMMANDS if line.startswith("python3 -m venv .venv && ")]
    assert [line.rsplit(" ", 1)[-1] for line in setups] == ["recipes.train", "pytest"]
