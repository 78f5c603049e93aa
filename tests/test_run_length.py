"""The length of a run is known before it, and schedules are made for it: compared with what Lightning really does."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from test_recipes import SHORT, TINY, assert_same, checkpoint, cli, overflow, scalars
from torch import nn

from recipes.data import DigitsDataModule
from recipes.plateau import ReduceLROnPlateau
from recipes.run_length import RunLength, run_length


class Counted(L.LightningModule):
    """Knows how many optimizer steps it took, and after how many of them it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["image"].mean().reshape(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_end(self) -> None:
        self.validated.append(self.trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 2}, RunLength(22, 11, 1)),
        ({"max_epochs": 3, "limit_train_batches": 3}, RunLength(9, 3, 2)),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, RunLength(15, 5, 2)),
        ({"max_epochs": 2, "limit_train_batches": 0.5, "accumulate_grad_batches": 2}, RunLength(12, 6, 1)),  # 11 of 22
        ({"max_epochs": 2, "limit_train_batches": 6, "accumulate_grad_batches": 2}, RunLength(6, 3, 1)),
        ({"max_epochs": 9, "max_steps": 7, "limit_train_batches": 4, "accumulate_grad_batches": 2}, RunLength(7, 2, 3)),
        ({"max_epochs": 9, "max_steps": 30, "limit_train_batches": 300}, RunLength(30, 11, 2)),
        ({"max_epochs": 2, "val_check_interval": 0.3}, RunLength(22, 11, 6)),
        ({"max_epochs": 4, "val_check_interval": 5, "check_val_every_n_epoch": 2}, RunLength(44, 11, 4)),
        ({"max_steps": 30, "val_check_interval": 4, "check_val_every_n_epoch": None}, RunLength(30, 11, 7)),
        ({"max_steps": 12, "val_check_interval": 4, "check_val_every_n_epoch": None}, RunLength(12, 11, 2)),
        ({"max_epochs": 1, "limit_val_batches": 0}, RunLength(11, 11, 0)),
    ],
)
def test_steps_and_validations_are_those_of_lightning(settings: dict[str, Any], expected: RunLength) -> None:
    data = DigitsDataModule(batch_size=128)
    data.setup()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(**quiet, **settings)
    found = run_length(trainer, data.steps_per_epoch)
    module = Counted()
    trainer.fit(module, datamodule=data)
    total = trainer.fit_loop.epoch_loop.total_batch_idx + 1
    real = RunLength(trainer.global_step, found.steps_per_epoch, sum(batch < total for batch in module.validated))
    assert found == real == expected


def test_what_is_open_is_said_to_be_open() -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    assert run_length(L.Trainer(max_epochs=-1, **quiet), 11) == RunLength(None, 11, None)
    assert run_length(L.Trainer(max_steps=8, **quiet)) == RunLength(8, None, None)
    assert run_length(L.Trainer(max_time="00:00:01:00", **quiet), 11) == RunLength(None, 11, None)
    assert run_length(L.Trainer(max_epochs=2, val_check_interval="00:00:01:00", **quiet), 11).validations is None
    assert run_length(L.Trainer(**quiet), 11).steps == 11_000  # Lightning's 1000 epochs


ONE_CYCLE = ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.start_factor"]
ONE_CYCLE += ["~scheduler.total_iters", "scheduler.max_lr=1e-3"]


def test_a_schedule_is_made_for_the_steps_of_epochs_that_are_cut_short(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three epochs of 4 batches, two of them a step: six steps, and not one less."""
    options = [*TINY, "precision=fp32", *ONE_CYCLE, "data.batch_size=32", "trainer.accumulate_grad_batches=2"]
    options += ["trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.limit_train_batches=4", "~callbacks.samples"]
    options += ["trainer.val_check_interval=12", "trainer.log_every_n_steps=1", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *options, "scheduler.total_steps=5") == 2
    assert "total_steps=5" in (shown := capfd.readouterr().err)
    assert "at step 6 of 6" in shown
    assert cli(monkeypatch, *options, "scheduler.total_steps=6") == 0
    shown = capfd.readouterr().out
    assert "; 2 steps per epoch, 6 in all\n" in shown
    assert "steps            6\n" in shown
    assert list(scalars(tmp_path / "run", "lr-AdamW").values())[-1] < 1e-5  # the whole cycle


def test_a_cosine_that_rises_again_before_the_end_is_told_the_steps_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [
        *TINY,
        "scheduler=cosine",
        "trainer.max_epochs=2",
        "trainer.max_steps=-1",
        f"hydra.run.dir={tmp_path}/run",
    ]
    options += ["dry_run=true", "data.batch_size=16", "trainer.limit_train_batches=4"]
    with pytest.warns(UserWarning, match=r"T_max=3: the run has 8 steps, .* rises again after 3. Write .*T_max=8"):
        assert cli(monkeypatch, *options, "scheduler.T_max=3") == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*T_max.*")
        assert cli(monkeypatch, *options, "scheduler.T_max=8") == 0
    assert cli(monkeypatch, *options, "scheduler.T_max=-1") == 2
    assert "scheduler.T_max=-1 must be a number of optimizer steps" in capfd.readouterr().err
    assert cli(monkeypatch, *options, "trainer.max_epochs=-1") == 2
    assert "scheduler.T_max: a cosine ends with the run, and nothing says after" in capfd.readouterr().err


@pytest.mark.parametrize(
    "ends",
    [
        ["trainer.max_steps=4"],
        ["trainer.max_steps=-1", "trainer.max_epochs=2", "trainer.limit_train_batches=2"],
        ["trainer.max_epochs=1", "trainer.limit_train_batches=4"],  # long before the experiment's 400 steps
    ],
)
def test_a_cosine_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[str]) -> None:
    options = [*TINY, "precision=fp32", "scheduler=cosine", *ends, "~callbacks.samples"]
    options += ["data.batch_size=16", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1"]
    assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/run") == 0
    expected = [1e-3 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert list(scalars(tmp_path / "run", "lr-AdamW").values()) == pytest.approx(expected)


def test_overfitting_sees_the_same_images_in_every_epoch_with_other_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = [*TINY, "precision=fp32", "trainer.overfit_batches=2", "trainer.max_steps=6", "~callbacks.samples"]
    options += ["data.batch_size=16", "+callbacks.probe._target_=probe.Probe", f"+callbacks.probe.directory={tmp_path}"]
    assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/run") == 0
    drawn = torch.load(tmp_path / "rank0.pt")
    assert [batch["epoch"] for batch in drawn] == [0, 0, 1, 1, 2, 2]
    for batch, first in zip(drawn[2:], drawn[:2] * 2, strict=True):
        assert batch["index"].equal(first["index"])
        assert not batch["noise"].equal(first["noise"])
    assert not drawn[0]["index"].equal(drawn[1]["index"])


def test_a_line_shows_the_loss_of_its_step_and_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [*TINY, "precision=fp32", "trainer.max_epochs=2", "trainer.limit_train_batches=4"]
    options += ["data.batch_size=16", "trainer.log_every_n_steps=2", "trainer.val_check_interval=4"]
    options += ["callbacks.progress.seconds=0", "trainer.limit_val_batches=1", "~callbacks.samples"]
    assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/run") == 0
    lines = re.findall(r"step (\d+)/(\d+).*?train/loss ([\d.]+)", capfd.readouterr().out)
    losses = scalars(tmp_path / "run", "train/loss")
    assert [(int(step), int(steps)) for step, steps, _ in lines] == [(2, 8), (4, 8), (6, 8), (8, 8)]
    for step, _, loss in lines:
        assert float(loss) == pytest.approx(losses[int(step) - 1], rel=1e-3)


# Schedules that wait for a metric

PLATEAU = [*SHORT, "precision=fp32", "scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=0.5"]
PLATEAU += ["~callbacks.samples", "trainer.log_every_n_steps=1"]


def rates_by_hand(losses: dict[int, float], steps: int) -> list[float]:
    """torch's own schedule, told each validation loss after the step that it stands at."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    rates = []
    for step in range(1, steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        if step in losses:
            schedule.step(losses[step])
    return rates


def rates(run: Path) -> list[float]:
    return list(scalars(run, "lr-AdamW").values())


def test_a_plateau_steps_once_for_each_validation_and_resumes_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Validations that no epoch's end falls on; the second leg begins right after one."""
    options = [*PLATEAU, "trainer.val_check_interval=5"]
    assert cli(monkeypatch, *options, "trainer.max_steps=25", f"hydra.run.dir={tmp_path}/a/1") == 0
    whole = tmp_path / "a" / "1"
    losses = scalars(whole, "val/loss")
    assert list(losses) == [5, 10, 15, 20, 25]
    assert rates(whole) == pytest.approx(rates_by_hand(losses, 25))
    assert rates(whole)[0] > rates(whole)[10] > rates(whole)[15]
    assert cli(monkeypatch, *options, "trainer.max_steps=15", f"hydra.run.dir={tmp_path}/b/1") == 0
    assert cli(monkeypatch, *options, "trainer.max_steps=25", "ckpt_path=last", f"hydra.run.dir={tmp_path}/b/2") == 0
    resumed = tmp_path / "b" / "2"
    assert rates(resumed) == rates(whole)[15:]
    found, expected = checkpoint(resumed), checkpoint(whole)
    for entry in ("lr_schedulers", "losses"):
        assert str(found[entry]) == str(expected[entry])
    assert_same(expected["state_dict"], found["state_dict"], "state_dict")
    # Settings are this run's, what was seen is the checkpoint's.
    options += ["trainer.max_steps=26", "ckpt_path=last", f"hydra.run.dir={tmp_path}/b/3", "scheduler.factor=0.1"]
    assert cli(monkeypatch, *options) == 0
    assert rates(tmp_path / "b" / "3") == pytest.approx([rates(whole)[-1] * 0.5])


def test_a_validation_of_weights_that_no_step_has_changed_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Validated after every batch, of which one is skipped: the rates of the run without it, one batch later."""
    options = [*PLATEAU, "trainer.val_check_interval=1", "trainer.max_steps=4", "trainer.limit_val_batches=1"]
    overflow(monkeypatch, {(0, 2)})
    run = tmp_path / "run"
    assert cli(monkeypatch, *options, "data.batch_size=8", f"hydra.run.dir={run}") == 0
    assert checkpoint(run)["global_step"] == 4
    assert rates(run) == pytest.approx([2e-3, 2e-3, 1e-3, 1e-3, 5e-4])  # of 5 batches
    assert checkpoint(run)["lr_schedulers"][0]["last_epoch"] == 4


def test_torchs_own_plateau_and_schedules_of_others_still_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = [*PLATEAU, "~scheduler.monitor", "trainer.val_check_interval=2", "trainer.max_steps=6"]
    target = "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"
    assert cli(monkeypatch, *options, target, f"hydra.run.dir={tmp_path}/torch") == 0
    assert rates(tmp_path / "torch") == pytest.approx([2e-3] * 4 + [1e-3] * 2)
    options = [each for each in options if "scheduler" not in each] + ["scheduler=constant", "~scheduler.factor"]
    theirs = ["scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=2", "scheduler.gamma=0.5"]
    assert cli(monkeypatch, *options, *theirs, f"hydra.run.dir={tmp_path}/theirs") == 0
    assert rates(tmp_path / "theirs") == pytest.approx([2e-3, 2e-3, 1e-3, 1e-3, 5e-4, 5e-4])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainer.limit_val_batches=0", "scheduler: it steps after validations, and none comes"),
        ("trainer.val_check_interval=10", "Write trainer.val_check_interval=NUMBER with fewer batches"),
        ("dry_run=meta trainer.val_check_interval=10", "none comes before the end of the run"),
        ("dry_run=true trainer.val_check_interval=10", "none comes before the end of the run"),
        ("scheduler.monitor=val/lss", "scheduler.monitor=val/lss: nothing logs that. Did you mean 'val/loss'"),
        ("scheduler.monitor=val/loss_raw ema=none", "scheduler.monitor=val/loss_raw: nothing logs that"),
        ("scheduler.patience=x", "scheduler.patience=x: recipes.plateau.ReduceLROnPlateau takes a whole number"),
        ("scheduler.mode=mim", "'min' or 'max'. Did you mean 'min'"),
        ("scheduler.patiense=3", "unknown key 'scheduler.patiense'. Did you mean 'patience'"),
        ("scheduler.factor=2", "Factor should be < 1.0"),
    ],
)
def test_a_plateau_that_would_wait_for_ever_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, line: str, expected: str
) -> None:
    options = [*TINY, "precision=fp32", "scheduler=plateau", "trainer.max_steps=10", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *options, *line.split()) == 2
    assert expected in capfd.readouterr().err


def test_a_schedule_too_patient_for_the_run_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [*TINY, "scheduler=plateau", "dry_run=meta", f"hydra.run.dir={tmp_path}/run"]
    with pytest.warns(UserWarning, match=r"patience=3: .* before validation 5, and the run has 3 before its end"):
        assert cli(monkeypatch, *options) == 0
    assert cli(monkeypatch, *options, "trainer.val_check_interval=50") == 0
    assert "cannot fall" not in capfd.readouterr().err


def test_a_metric_that_another_callback_should_have_logged_is_named_when_it_is_not_there() -> None:
    from recipes.config import ConfigError
    from recipes.plateau import after_validation, configured

    schedule = ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), monitor="mine/score")
    config = type("Config", (), {"reduce_on_plateau": True, **configured(schedule)})
    trainer: Any = type("Trainer", (), {"lr_scheduler_configs": [config]})
    with pytest.raises(ConfigError, match=r"mine/score: nothing has logged that .* Did you mean 'mine/scores'"):
        after_validation(trainer, {"mine/scores": torch.tensor(1.0)})
    schedule.monitor = config.monitor = "train/loss_epoch"  # comes later
    after_validation(trainer, {})
    assert schedule.last_epoch == 0
