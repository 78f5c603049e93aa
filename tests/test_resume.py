"""A run that was killed goes on by the same command: bit for bit, in its own directory, with nothing lost."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from few_digits import FEW
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_recipes import ROOT, assert_same, checkpoint, cli, scalars, signalled

from recipes import audit, command_line, processes, resume, train, trained
from recipes.checkpoint_file import WholeFiles
from recipes.config import ConfigError
from recipes.diffusion import DiffusionModule
from recipes.earlier_runs import complete_run, held, interrupted_run
from recipes.ending import TimeLimit
from recipes.randomness import SHUFFLE, keyed_generator

TINY = ["model=unet_tiny", "trainer.accelerator=cpu", "~callbacks.samples", "trainer.log_every_n_steps=1"]
THIRTY = [*FEW, "precision=fp32", "trainer.max_steps=30", "trainer.val_check_interval=5"]  # epochs have 11 steps
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
    killed = forked.run("-m", "recipes.train", *command, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.output[-3000:]
    assert "resume=auto: no interrupted run, starts anew" in killed.output
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["trainer.val_check_interval=4"], ["trainer.val_check_interval=4"]),  # the last validation is on no interval
        (["trainer.val_check_interval=3"], ["trainer.val_check_interval=4"]),  # it was, and is no longer
        (["trainer.val_check_interval=4"], ["trainer.val_check_interval=3"]),  # it was not, and is now
        (["trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches=2"]),
    ],
)
def test_a_run_that_is_extended_logs_under_the_steps_of_the_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: list[str], second: list[str]
) -> None:
    options = [*TINY, "precision=fp32", "data.batch_size=16", "trainer.log_every_n_steps=2"]
    options += ["trainer.limit_val_batches=1"]
    assert cli(monkeypatch, *options, *second, "trainer.max_steps=10", f"hydra.run.dir={tmp_path}/whole") == 0
    assert cli(monkeypatch, *options, *first, "trainer.max_steps=6", f"hydra.run.dir={tmp_path}/a") == 0
    resumed = [f"ckpt_path={tmp_path}/a/checkpoints/last.ckpt", "trainer.max_steps=10"]
    assert cli(monkeypatch, *options, *second, *resumed, f"hydra.run.dir={tmp_path}/b") == 0
    for tag in ("train/loss", "train/loss_q1", "lr-AdamW", "perf/step_seconds", "mixprec/grad_norm"):
        whole, rest = scalars(tmp_path / "whole", tag), scalars(tmp_path / "b", tag)
        assert list(rest) == [step for step in whole if step > 6], tag
        if not tag.startswith("perf"):
            assert rest == {step: whole[step] for step in rest}, tag


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
        with pytest.raises(ConfigError, match="another process is training there") as refused:
            with held(tmp_path, mine=True):
                pass
    assert f"hydra.run.dir={tmp_path}" not in str(refused.value)  # resume=auto may have chosen it
    assert "hydra.run.dir=PATH" in str(refused.value)
    with held(tmp_path, mine=True):
        pass


def test_a_run_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    run = earlier(tmp_path, "run", age=1)
    code = f"import fcntl, os; f = open(r'{run}/.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (run / ".lock").is_file()
    assert interrupted_run(WANTED, tmp_path) == run


# (steps, epochs) reached and limits (max_steps, max_epochs) of the run; limits now; whether it is complete.
@pytest.mark.parametrize(
    ("reached", "limits", "now", "complete"),
    [
        ((30, 2), (30, -1), {"max_steps": 30}, True),
        ((30, 2), (30, -1), {"max_steps": 20}, True),
        ((30, 2), (30, -1), {"max_steps": 31}, False),
        ((30, 2), (30, -1), {"max_steps": -1}, False),
        ((4, 1), (-1, 1), {"max_steps": -1, "max_epochs": 1}, True),
        ((4, 1), (-1, 1), {"max_epochs": 1}, True),
        ((4, 1), (-1, 1), {"max_steps": -1, "max_epochs": 3}, False),
        ((4, 1), (-1, 1), {"max_steps": 800, "max_epochs": 1}, True),
        ((4, 1), (400, 1), {"max_steps": 400, "max_epochs": 1}, True),
        ((4, 1), (400, 1), {"max_steps": 800, "max_epochs": 1}, True),
        ((4, 1), (400, 1), {"max_steps": 4, "max_epochs": 2}, True),
        ((4, 1), (400, 1), {"max_steps": 400, "max_epochs": 2}, False),
        ((10, 0), (400, -1), {"max_steps": 400}, True),  # stopped early
        ((10, 0), (400, -1), {"max_steps": 300}, True),
        ((10, 0), (400, -1), {"max_steps": 800}, False),
        ((10, 0), (-1, 1000), {}, True),
    ],
)
def test_complete_means_that_no_more_is_asked_for(
    tmp_path: Path, reached: tuple[int, int], limits: tuple[int, int], now: dict[str, int], complete: bool
) -> None:
    asked = OmegaConf.create({"trainer": now, "resume": "auto"})
    assert complete_run(tmp_path, asked) is None
    found = dict(zip(("steps", "epochs", "max_steps", "max_epochs"), (*reached, *limits), strict=True))
    found["config"] = {"trainer": {"max_steps": limits[0], "max_epochs": limits[1]}}
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert complete_run(tmp_path, asked) == (found if complete else None)
    (tmp_path / "result.json").write_text('{"status": 1, "steps": null}')  # a job that failed
    assert complete_run(tmp_path, asked) is None


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


QUICK = [*TINY, "precision=fp32", "data.batch_size=16", "trainer.limit_val_batches=1", "trainer.limit_train_batches=4"]
QUICK += ["resume=auto"]
EARLY_STOPPING = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "patience": 1}


@pytest.mark.parametrize(
    ("options", "steps"),
    {
        "epochs": (["trainer.max_steps=-1", "trainer.max_epochs=1"], 4),
        "epochs before steps": (["trainer.limit_train_batches=2", "trainer.max_epochs=1"], 2),
        "neither limit": (
            ["~trainer.max_steps", "trainer.val_check_interval=1", "callbacks.stop.min_delta=9"]
            + [f"+callbacks.stop.{key}={value}" for key, value in EARLY_STOPPING.items()],
            2,
        ),
    }.values(),
)
def test_a_run_that_ended_otherwise_than_by_steps_is_complete(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    steps: int,
) -> None:
    run = tmp_path / "run"
    command = [*QUICK, *options, f"hydra.run.dir={run}"]
    assert cli(monkeypatch, *command) == 0
    assert checkpoint(run)["global_step"] == steps
    before = contents(run)
    assert cli(monkeypatch, *command) == 0
    assert f"the run in {run} is complete" in capfd.readouterr().out
    assert contents(run) == before
    if options[0] == "trainer.max_steps=-1":
        assert cli(monkeypatch, *command, "trainer.max_epochs=2") == 0
        result = json.loads((run / "result.json").read_text())
        assert result["epochs"] == 2
        assert result["steps"] == checkpoint(run)["global_step"] >= 8


def test_a_run_whose_time_was_over_goes_on_with_its_time_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nine steps in three commands of three to four "seconds": the same bits, and then it is complete."""
    quick = [*QUICK, "trainer.max_steps=9"]
    assert cli(monkeypatch, *quick, f"hydra.run.dir={tmp_path}/whole") == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)

    def a_second_per_question(self: TimeLimit, stage: str = "train") -> float:
        self.__dict__["asked"] = asked = self.__dict__.get("asked", 0) + 1
        return asked - 1.0  # the first is before training

    monkeypatch.setattr(TimeLimit, "time_elapsed", a_second_per_question)
    steps = []
    for limit in ("00:00:00:03", "00:00:00:04", "00:00:00:04"):  # of the command: any other is the same run
        assert cli(monkeypatch, *quick, f"trainer.max_time={limit}") == 0
        (run,) = (tmp_path / "outputs" / "digits_unet").iterdir()
        steps.append(json.loads((run / "result.json").read_text())["steps"])
        ended = f"at the end of trainer.max_time={limit}: resume=auto goes on"
        assert (ended in capfd.readouterr().out) == (steps[-1] < 9)
    assert steps == [3, 7, 9]
    for entry in STATE:
        assert_same(checkpoint(tmp_path / "whole")[entry], checkpoint(run)[entry], entry)
    assert cli(monkeypatch, *quick, "trainer.max_time=00:00:00:03", f"hydra.run.dir={run}") == 0
    assert "is complete" in capfd.readouterr().out


def test_a_run_without_validation_goes_on_in_the_middle_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = [*TINY, "precision=fp32", "data.batch_size=16", "trainer.limit_val_batches=0", "logger=none"]
    options += ["trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=1", "trainer.limit_train_batches=3"]
    assert cli(monkeypatch, *options, "trainer.max_steps=10", f"hydra.run.dir={tmp_path}/whole") == 0
    assert cli(monkeypatch, *options, "trainer.max_steps=4", f"hydra.run.dir={tmp_path}/a") == 0
    last = f"ckpt_path={tmp_path}/a/checkpoints/last.ckpt"
    assert cli(monkeypatch, *options, last, "trainer.max_steps=10", f"hydra.run.dir={tmp_path}/b") == 0
    for entry in ("state_dict", "optimizer_states"):
        assert_same(checkpoint(tmp_path / "whole")[entry], checkpoint(tmp_path / "b")[entry], entry)


def test_what_is_no_whole_checkpoint_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, whole: Path
) -> None:
    last = whole / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    torch.save({"state_dict": saved["state_dict"]}, tmp_path / "weights.ckpt")
    alone = {key: value for key, value in saved.items() if key not in ("optimizer_states", "lr_schedulers")}
    torch.save(alone, tmp_path / "alone.ckpt")
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "cut.ckpt").write_bytes(last.read_bytes()[:5000])
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    for name, expected in {
        "weights": "without what a run needs to go on (optimizer_states, lr_schedulers, loops, pytorch-lightning_",
        "alone": "without what a run needs to go on (optimizer_states, lr_schedulers). Give a checkpoint that was not",
        "empty": "cannot be read as a checkpoint: it is empty, cut off or damaged. Give a .ckpt file",
        "cut": "cannot be read as a checkpoint: it is empty, cut off or damaged (",
        "text": "cannot be read as a checkpoint: it is no file of torch.save, or holds more than tensors",
    }.items():
        options = [f"ckpt_path={tmp_path}/{name}.ckpt", f"hydra.run.dir={tmp_path}/run", "trainer.max_steps=31"]
        assert cli(monkeypatch, *TINY, *FEW, *options) == 2
        shown = capfd.readouterr()
        (line,) = (line for line in shown.err.splitlines() if line.startswith("error: "))
        assert f"ckpt_path={tmp_path}/{name}.ckpt " in line
        assert expected in line
        assert "Traceback" not in shown.out + shown.err
        assert "weights_only` set to" not in shown.err  # torch's advice


# Batches of 32 images, 11 in an epoch: where the first run is, and what the second sees of its steps in this epoch.
@pytest.mark.parametrize(
    ("first", "second", "begins", "size"),
    [
        ("trainer.max_steps=5", "trainer.accumulate_grad_batches=2", 160, 32),
        ("trainer.max_steps=5", "data.batch_size=64", 128, 64),  # two steps of these are seen, and a half of the third
        ("trainer.max_steps=5", "data.batch_size=16", 160, 16),
        ("trainer.max_steps=11", "data.batch_size=45", 360, 45),  # the end of the epoch, where 45 images are left over
        ("trainer.max_steps=3 trainer.accumulate_grad_batches=4", "trainer.accumulate_grad_batches=1", 64, 32),
    ],
)
def test_with_other_batches_a_run_goes_on_with_the_images_that_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str, second: str, begins: int, size: int
) -> None:
    options = [*TINY, *FEW, "precision=fp32", "logger=none", "ema=none", "trainer.val_check_interval=10"]
    options += ["callbacks.best.save_top_k=-1"]
    assert cli(monkeypatch, *options, *first.split(), f"hydra.run.dir={tmp_path}/a") == 0
    # The last one is in the middle of a window of four batches: it was validated after ten.
    saved = tmp_path / "a" / "checkpoints" / f"step{2 if '=4' in first else int(first.split('=')[1]):06d}.ckpt"
    found = torch.load(saved, weights_only=True)
    assert ("partial_gradients" in found["MasterWeightPrecision"]) == ("=4" in first)
    steps: dict[int, list[int]] = {}
    epochs = set()
    draw = DiffusionModule.draw

    def seen(self: DiffusionModule, batch: Any, batch_idx: int) -> Any:
        if self.trainer.current_epoch == 0:
            steps.setdefault(self.trainer.global_step, []).extend(batch["index"].tolist())
        epochs.add(self.trainer.current_epoch)
        return draw(self, batch, batch_idx)

    monkeypatch.setattr(DiffusionModule, "draw", seen)
    more = [*second.split(), f"ckpt_path={saved}", f"trainer.max_steps={found['global_step'] + 25}"]
    assert cli(monkeypatch, *options, *more, f"hydra.run.dir={tmp_path}/b") == 0
    (order,) = torch.randperm(360, generator=keyed_generator(SHUFFLE, 0, 0)).split(360)
    rest = order[begins : 360 // size * size].split(size)
    assert [sorted(step) for step in steps.values()] == [sorted(step.tolist()) for step in rest if len(step)]
    assert max(epochs) >= 1
    assert checkpoint(tmp_path / "b")["global_step"] == found["global_step"] + 25
    if "=4" in first:  # the gradients of images that come again are left out
        for name in ("partial_gradients", "partial_gradients_hold_next_batch"):
            found["MasterWeightPrecision"].pop(name, None)
        torch.save(found, tmp_path / "without.ckpt")
        again = [*second.split(), f"ckpt_path={tmp_path}/without.ckpt", more[-1]]
        assert cli(monkeypatch, *options, *again, f"hydra.run.dir={tmp_path}/c") == 0
        assert_same(checkpoint(tmp_path / "b")["state_dict"], checkpoint(tmp_path / "c")["state_dict"], "state_dict")


def test_the_last_step_is_validated_and_saved_in_an_epoch_without_validation_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = [*TINY, "precision=fp32", "data.batch_size=16", "trainer.limit_val_batches=1"]
    options += ["trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=2", "trainer.limit_train_batches=3"]
    assert cli(monkeypatch, *options, "trainer.max_steps=8", f"hydra.run.dir={tmp_path}") == 0
    assert checkpoint(tmp_path)["global_step"] == 8
    assert list(scalars(tmp_path, "val/loss")) == [6, 8]


def test_results_are_those_of_the_configuration_beside_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "sweep" / "0"
    command = [*QUICK, "trainer.max_steps=2", "seed=3"]
    assert cli(monkeypatch, *command, f"hydra.run.dir={run}") == 0
    before = contents(run)
    for more in (["optimizer.lr=0.5"], *(["optimizer.lr=0.5", f"trainer.max_steps={steps}"] for steps in (1, 4))):
        assert cli(monkeypatch, *command, *more, f"hydra.run.dir={run}") == 2
        message = capfd.readouterr().err
        assert f"the run in {run} is complete and had another configuration: optimizer.lr 0.002 -> 0.5 (" in message
        assert "hydra.run.dir=PATH" in message
        assert contents(run) == before

    sweep = ["-m", *command, f"hydra.sweep.dir={run.parent}"]
    assert cli(monkeypatch, *sweep) == 0  # its job 0 was run by hand
    with (run.parent / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    loss = json.loads(before[str(run / "result.json")])["validation_loss"]
    assert (row["job"], row["status"], row["steps"], float(row["validation_loss"])) == ("0", "0", "2", loss)
    before = contents(run.parent)
    assert cli(monkeypatch, *sweep, "optimizer.lr=0.5") == 2
    assert "optimizer.lr 0.002 -> 0.5" in capfd.readouterr().err
    for name in ("results.csv", "0/result.json", "0/checkpoints/last.ckpt"):
        assert (run.parent / name).read_bytes() == before[str(run.parent / name)], name
    assert "0.5" not in (run.parent / "results.csv").read_text()


def test_a_sweep_whose_terminal_is_closed_saves_its_job_and_goes_on_by_the_command_shown(tmp_path: Path) -> None:
    options = ["precision=fp32", "trainer.max_steps=100000", "trainer.val_check_interval=4", "seed=0,1"]
    options += [f"hydra.sweep.dir='{tmp_path}/a b'"]
    sweep = forked.Forked("-m", "recipes.train", "-m", *TINY, *FEW, *options, cwd=tmp_path)
    last = tmp_path / "a b" / "0" / "checkpoints" / "last.ckpt"
    try:
        for _ in range(600):
            if last.exists():
                break
            time.sleep(0.1)
        sweep.send_signal(signal.SIGHUP)
        assert sweep.wait(timeout=60) == 128 + signal.SIGHUP, sweep.output[-3000:]
    finally:
        sweep.kill()
    step = torch.load(last, weights_only=True)["global_step"]
    assert f"{last}, of step {step}\n" in sweep.output
    assert [path.name for path in last.parents[2].iterdir() if path.is_dir()] == ["0"]
    with (tmp_path / "a b" / "results.csv").open() as file:
        assert [(row["job"], row["status"]) for row in csv.DictReader(file)] == [("0", "129")]
    shown = next(line for line in sweep.output.splitlines() if line.startswith("to continue it   python "))
    again = shlex.split(shown)[4:]
    assert again == ["-m", "recipes.train", "-m", *TINY, *FEW, *options, "resume=auto"]
    assert command_line.checked(again[2:], "train")


def test_a_run_that_would_begin_in_the_directory_of_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "sweep" / "0"
    anew = [*(option for option in QUICK if option != "resume=auto"), "trainer.max_steps=2"]
    assert cli(monkeypatch, *anew, f"hydra.run.dir={run}") == 0
    before = contents(run.parent)
    for command in ([f"hydra.run.dir={run}"], ["-m", f"hydra.sweep.dir={run.parent}"]):
        assert cli(monkeypatch, *anew, *command) == 2
        message = capfd.readouterr().err
        assert f"{run}/checkpoints/last.ckpt is there already, and would be overwritten" in message
        assert "resume=auto" in message
        assert contents(run.parent) == before
    monkeypatch.setattr(processes, "shared_directory", lambda *_: [f"hydra.run.dir={run}"])  # as SLURM's
    assert cli(monkeypatch, *anew) == 2
    assert contents(run.parent) == before


def test_checkpoints_of_another_run_in_a_directory_given_to_both_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = [*TINY, *FEW, "precision=fp32", "logger=none", "trainer.max_steps=1", "trainer.val_check_interval=1"]
    command += [f"callbacks.last.dirpath={tmp_path}/mount", f"callbacks.best.dirpath={tmp_path}/mount"]
    assert cli(monkeypatch, *command, f"hydra.run.dir={tmp_path}/a") == 0
    saved = (tmp_path / "mount" / "last.ckpt").read_bytes()
    assert cli(monkeypatch, *command, f"hydra.run.dir={tmp_path}/b") == 2
    assert f"callbacks.last.dirpath={tmp_path}/mount: {tmp_path}/mount/last.ckpt is there" in capfd.readouterr().err
    assert (tmp_path / "mount" / "last.ckpt").read_bytes() == saved
    more = [f"ckpt_path={tmp_path}/mount/last.ckpt", "trainer.max_steps=2"]
    assert cli(monkeypatch, *command, *more, f"hydra.run.dir={tmp_path}/b") == 0


def test_runs_and_sweeps_that_start_in_the_same_second_have_their_own_directories() -> None:
    with initialize_config_dir(str(command_line.CONF), version_base="1.3"):
        configs = [compose("train", return_hydra_config=True) for _ in range(2)]
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        first, second = (OmegaConf.select(config, key) for config in configs)
        assert first != second
        assert len(Path(first).parts) == 3


def test_a_run_killed_after_its_last_checkpoint_keeps_its_result(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [*QUICK, "trainer.max_steps=2", f"hydra.run.dir={run}"]
    with monkeypatch.context() as patch:  # what is killed there leaves this behind
        patch.setattr(train, "report", lambda *args: None)
        assert cli(monkeypatch, *command) == 0
    assert not (run / "result.json").exists()
    assert cli(monkeypatch, *command, "optimizer.lr=0.5") == 2  # another configuration, which did not take them
    capfd.readouterr()
    assert cli(monkeypatch, *command) == 0
    assert "had taken its last step" in capfd.readouterr().out
    result = json.loads((run / "result.json").read_text())
    shown = EventAccumulator(str(run)).Reload().Scalars("val/loss")[-1].value
    assert (result["steps"], result["validation_loss"]) == (2, pytest.approx(shown))
    assert cli(monkeypatch, *command) == 0
    assert "is complete, nothing is left to do" in capfd.readouterr().out
    assert cli(monkeypatch, *command, "trainer.max_steps=3") == 0  # goes on
    assert json.loads((run / "result.json").read_text())["steps"] == 3


def test_several_loggers_go_on_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    place = {"save_dir": "${hydra:runtime.output_dir}", "name": "", "version": ""}
    classes = {"curves": "TensorBoardLogger", "table": "CSVLogger"}
    nodes = {name: {"_target_": f"lightning.pytorch.loggers.{kind}", **place} for name, kind in classes.items()}
    OmegaConf.save(OmegaConf.create(nodes), tmp_path / "conf" / "logger" / "both.yaml")
    run = tmp_path / "run"
    command = ["--config-dir", f"{tmp_path}/conf", "logger=both", *QUICK, f"hydra.run.dir={run}"]
    for steps in (2, 4):
        assert cli(monkeypatch, *command, f"trainer.max_steps={steps}") == 0
    curves = EventAccumulator(str(run)).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [0, 1, 2, 3]
    for name, expected in (("metrics_part1.csv", [0, 1]), ("metrics.csv", [2, 3])):
        with (run / name).open() as file:
            assert [int(row["step"]) for row in csv.DictReader(file) if row.get("train/loss")] == expected


# Command lines that are printed


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's own directory of options."""
    (tmp_path / "my conf" / "optimizer").mkdir(parents=True)
    text = "_target_: torch.optim.AdamW\n_partial_: true\nlr: 0.125\n"
    (tmp_path / "my conf" / "optimizer" / "mine.yaml").write_text(text)
    return tmp_path / "my conf"


def printed(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(title)]
    command = shlex.split(line.removeprefix(title))
    assert command[:3] == ["python", "-m", "recipes.train"]
    return command[3:]


def test_to_continue_names_the_users_own_options(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, mine: Path
) -> None:
    (tmp_path / "second" / "ema").mkdir(parents=True)
    (tmp_path / "second" / "ema" / "ours.yaml").write_text("defaults: [default]\n")
    given = ["--config-dir", str(tmp_path / "second"), f"hydra.searchpath=[file://{mine}]"]
    command = [*given, *QUICK, "optimizer=mine", "ema=ours", "trainer.max_steps=3", f"hydra.run.dir={tmp_path}/run"]
    assert signalled(monkeypatch, 2, signal.SIGTERM, *command) == 143
    again = printed(capfd.readouterr().out, "to continue      ")
    assert set(given) < set(again)
    assert cli(monkeypatch, *again) == 0
    assert checkpoint(tmp_path / "run")["global_step"] == 3


def test_audit_keeps_the_users_own_options(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, mine: Path
) -> None:
    tiny = ["model=unet_tiny", "steps=1", "batches=1", "samples=1", "device=cpu", "optimizer=mine"]
    place = f"hydra.run.dir={tmp_path}/found"
    assert cli(monkeypatch, "--config-dir", str(mine), *tiny, place, program=audit) == 0
    again = printed(capfd.readouterr().out, "to train with it ")
    assert again[:2] == ["--config-dir", f"{tmp_path}/found"]
    assert f"hydra.searchpath=[file://{mine}]" in again
    assert cli(monkeypatch, *again, "dry_run=meta") == 0


def test_last_is_the_newest_of_runs_and_jobs_for_all_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # of another test's run, with a directory of its own
    monkeypatch.setattr(sys, "argv", ["recipes.train"])
    experiment = tmp_path / "outputs" / "digits_unet"
    for age, run in enumerate(("1", "sweep_a/0", "sweep_a/1", "2")):
        path = experiment / run / "checkpoints" / "last.ckpt"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1e9 + age, 1e9 + age))
        assert trained.checkpoint_path("last") == path
        assert resume.find_checkpoint({"ckpt_path": "last"}, experiment / "new") == path


def test_processes_that_repeat_resume_auto_are_not_told_a_checkpoint_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "checkpoints" / "last.ckpt"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr(sys, "argv", ["recipes.train", "resume=auto"])
    assert resume.find_checkpoint({"resume": "auto", "ckpt_path": None}, tmp_path) == own
    assert sys.argv == ["recipes.train", "resume=auto"]
    assert resume.find_checkpoint({"ckpt_path": "auto"}, tmp_path) == own
    assert sys.argv[2:] == [f"ckpt_path='{own}'"]


def test_a_checkpoint_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    WholeFiles().save_checkpoint({"step": 1}, path)

    def disk_full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", disk_full)
        with pytest.raises(OSError, match=f"{path} could not be written, .*: disk full. Free some space"):
            WholeFiles().save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 1}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]  # what is left would keep the disk full
    WholeFiles().save_checkpoint({"step": 3}, path)
    assert torch.load(path) == {"step": 3}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_locks_are_the_systems(tmp_path: Path) -> None:
    """What `held` relies on: a lock ends with its file, and excludes other files of the same name."""
    with (tmp_path / "x").open("w") as one, (tmp_path / "x").open("w") as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
