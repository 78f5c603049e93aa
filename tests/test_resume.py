"""A run that was killed goes on by the same command: bit for bit, in its own directory, with nothing lost."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_recipes import ROOT, assert_same, checkpoint, cli

from recipes.checkpoint_file import WholeFiles
from recipes.config import ConfigError
from recipes.earlier_runs import held, interrupted_run, is_complete

TINY = ["model=unet_tiny", "trainer.accelerator=cpu", "~callbacks.samples", "trainer.log_every_n_steps=1"]
THIRTY = ["trainer.max_steps=30", "trainer.val_check_interval=5"]  # epochs have 11 steps
STATE = ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision")


def probes(directory: Path, **kill: int) -> list[str]:
    settings = {"_target_": "probe.KillOnce", "mark": directory / "killed", **kill}
    return [f"+callbacks.kill.{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody killed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert cli(patch, *TINY, *THIRTY, f"hydra.run.dir={run}") == 0
    return run


# After a validation at step 15, in the middle of an epoch; and while the fifth checkpoint is half written.
@pytest.mark.parametrize(("kill", "saved"), [({"batch": 19}, 15), ({"checkpoint": 5}, 10)])
def test_killed_anywhere_the_same_command_ends_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    whole: Path,
    kill: dict[str, int],
    saved: int,
) -> None:
    command = [*TINY, *THIRTY, *probes(tmp_path, **kill), "resume=auto"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {k: v for k, v in os.environ.items() if k != "PL_GLOBAL_SEED"}
    killed = subprocess.run(
        [sys.executable, "-m", "recipes.train", *command],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert "resume=auto: no interrupted run, starts anew" in killed.stdout
    (run,) = (tmp_path / "outputs" / "digits_unet").iterdir()
    assert checkpoint(run)["global_step"] >= saved
    before = checkpoint(run)["global_step"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    assert cli(monkeypatch, *command) == 0
    assert f"resume=auto: {run}/checkpoints/last.ckpt, step {before}\n" in capfd.readouterr().out
    assert list((tmp_path / "outputs" / "digits_unet").iterdir()) == [run]
    for entry in STATE:
        assert_same(checkpoint(whole)[entry], checkpoint(run)[entry], entry)
    assert json.loads((run / "result.json").read_text())["steps"] == 30
    # Each curve once, whatever was logged between the last checkpoint and the end.
    straight, resumed = (EventAccumulator(str(d), size_guidance={"scalars": 0}).Reload() for d in (whole, run))
    for tag in ("val/loss", "train/loss", "mixprec/grad_norm"):
        expected = {event.step: event.value for event in straight.Scalars(tag)}
        assert {event.step: event.value for event in resumed.Scalars(tag)} == expected, tag
    assert [event.step for event in resumed.Scalars("val/loss")] == [5, 10, 15, 20, 25, 30]

    # Complete: the same command starts a new run.
    (tmp_path / "killed").touch()
    assert cli(monkeypatch, *command, "dry_run=meta") == 0
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    assert interrupted_run(config, run.parent) is None  # type: ignore[arg-type]


# Which run


def earlier(runs: Path, name: str, age: int, complete: bool = False, **config: Any) -> Path:
    run = runs / name
    (run / "checkpoints").mkdir(parents=True)
    (run / ".hydra").mkdir()
    saved = {"seed": 0, "model": {"a": 1.5e-5}, "trainer": {"root": "${hydra:runtime.output_dir}"}, "resume": None}
    OmegaConf.save(OmegaConf.create(saved | config), run / ".hydra" / "config.yaml")
    last = run / "checkpoints" / "last.ckpt"
    last.touch()
    os.utime(last, (1e9 - age, 1e9 - age))
    if complete:
        (run / "result.json").write_text('{"steps": 30}')
    return run


WANTED = OmegaConf.create(
    {
        "seed": 0,
        "model": {"a": 1.5e-5},
        "trainer": {"root": "${hydra:runtime.output_dir}"},
        "resume": "auto",
        "ckpt_path": None,
        "dry_run": False,
    }
)


def test_the_newest_interrupted_run_of_the_same_configuration_goes_on(tmp_path: Path) -> None:
    assert interrupted_run(WANTED, tmp_path / "none") is None
    old = earlier(tmp_path, "old", age=3)
    new = earlier(tmp_path, "new", age=2)
    earlier(tmp_path, "other seed", age=1, seed=1)
    earlier(tmp_path, "other model", age=1, model={"a": 2})
    assert interrupted_run(WANTED, tmp_path) == new
    with held(new, mine=True):  # it is training
        assert interrupted_run(WANTED, tmp_path) == old
    assert interrupted_run(WANTED, tmp_path) == new
    earlier(tmp_path, "complete", age=0, complete=True)
    assert interrupted_run(WANTED, tmp_path) is None


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    with held(tmp_path, mine=True), held(tmp_path, mine=False):
        with pytest.raises(ConfigError, match="another process is training there"), held(tmp_path, mine=True):
            pass
    with held(tmp_path, mine=True):
        pass


def test_a_run_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    run = earlier(tmp_path, "run", age=1)
    code = f"import fcntl, os; f = open(r'{run}/.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (run / ".lock").is_file()
    assert interrupted_run(WANTED, tmp_path) == run


def test_complete_means_all_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    assert not is_complete(tmp_path, 30)
    (tmp_path / "result.json").write_text('{"steps": 30}')
    assert is_complete(tmp_path, 30)
    assert is_complete(tmp_path, -1)
    assert not is_complete(tmp_path, 31)
    (tmp_path / "result.json").write_text('{"steps": null}')
    assert not is_complete(tmp_path, 30)


def test_a_checkpoint_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    WholeFiles().save_checkpoint({"step": 1}, path)

    def disk_full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full)
        with pytest.raises(OSError, match="disk full"):
            WholeFiles().save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 1}
    WholeFiles().save_checkpoint({"step": 3}, path)
    assert torch.load(path) == {"step": 3}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_locks_are_the_systems(tmp_path: Path) -> None:
    """What `held` relies on: a lock ends with its file, and excludes other files of the same name."""
    with (tmp_path / "x").open("w") as one, (tmp_path / "x").open("w") as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
