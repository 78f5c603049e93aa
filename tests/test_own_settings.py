"""A run that goes on with other settings of optimizer and schedule trains with these, not with the checkpoint's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recipes import assert_same, checkpoint, cli, scalars
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, OneCycleLR

TINY = ["model=unet_tiny", "trainer.accelerator=cpu", "precision=fp32", "data.batch_size=16", "~callbacks.samples"]
TINY += ["trainer.log_every_n_steps=1", "trainer.limit_val_batches=1"]
PLATEAU = ["scheduler=plateau", "trainer.val_check_interval=3"]


def legs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: list[str], second: list[str], steps: int = 8) -> Path:
    """Half of the steps with some settings, the rest with others; the directory of the second half."""
    half = f"trainer.max_steps={steps // 2}"
    assert cli(monkeypatch, *TINY, *first, half, f"hydra.run.dir={tmp_path}/a") == 0
    resumed = [f"ckpt_path={tmp_path}/a/checkpoints/last.ckpt", f"trainer.max_steps={steps}"]
    assert cli(monkeypatch, *TINY, *second, *resumed, f"hydra.run.dir={tmp_path}/b") == 0
    return tmp_path / "b"


def rates_of(scheduler: Any, lr: float = 2e-3, steps: int = 8) -> list[float]:
    """torch's own schedule from the first step on."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("first", "second", "scheduler", "lr"),
    [
        (["scheduler.total_iters=20"], ["scheduler.total_iters=10"], lambda o: LinearLR(o, 0.05, 1, 10), 2e-3),
        (["scheduler=constant"], ["scheduler=constant", "optimizer.lr=5e-4"], lambda o: ConstantLR(o, 1.0), 5e-4),
        ([], ["optimizer.lr=5e-4"], lambda o: LinearLR(o, 0.05, 1, 20), 5e-4),
        (["scheduler=constant"], ["scheduler=cosine"], lambda o: CosineAnnealingLR(o, 8), 2e-3),
        (["scheduler=cosine"], ["scheduler=cosine"], lambda o: CosineAnnealingLR(o, 8), 2e-3),  # T_max 4, 8
        (["scheduler=cosine"], ["scheduler=constant"], lambda o: ConstantLR(o, 1.0), 2e-3),
        (["scheduler=warmup"], PLATEAU, lambda o: ConstantLR(o, 1.0), 2e-3),
    ],
)  # fmt: skip
def test_a_changed_schedule_is_where_it_would_be_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: list[str], second: list[str], scheduler: Any, lr: float
) -> None:
    run = legs(monkeypatch, tmp_path, first, second)
    found = scalars(run, "lr-AdamW")
    assert list(found) == [4, 5, 6, 7]
    assert list(found.values()) == pytest.approx(rates_of(scheduler, lr)[4:], rel=1e-6)


def test_a_plateau_that_goes_on_has_its_own_settings_and_the_learning_rate_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=0.9", "trainer.val_check_interval=1"]
    run = legs(monkeypatch, tmp_path, options, [*options, "scheduler.factor=0.1"])
    rates = [2e-3, 2e-3, 1e-3, 5e-4]  # each validation but the first is no better by 90 %
    assert list(scalars(tmp_path / "a", "lr-AdamW").values()) == pytest.approx(rates)
    assert list(scalars(run, "lr-AdamW").values()) == pytest.approx([2.5e-4, 2.5e-5, 2.5e-6, 2.5e-7])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_changed_learning_rate_and_decay_reach_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str
) -> None:
    """With a learning rate of 0 not a bit moves, and state goes on; decay is the new one."""
    other = ["optimizer.lr=0.0", "optimizer.weight_decay=0.25", "optimizer.betas=[0.5,0.75]"]
    run = legs(monkeypatch, tmp_path, [f"precision={precision}"], [f"precision={precision}", *other], steps=4)
    before, after = checkpoint(tmp_path / "a"), checkpoint(run)
    assert_same(before["state_dict"], after["state_dict"])
    (group,) = after["optimizer_states"][0]["param_groups"]
    assert (group["lr"], group["initial_lr"], group["weight_decay"], group["betas"]) == (0, 0, 0.25, (0.5, 0.75))
    assert float(after["optimizer_states"][0]["state"][0]["step"]) == 4


ONE_CYCLE = [f"scheduler._target_=torch.optim.lr_scheduler.{OneCycleLR.__name__}", "++scheduler.max_lr=2e-3"]
ONE_CYCLE += ["++scheduler.total_steps=8", "~scheduler.start_factor", "~scheduler.total_iters"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("first", "second", "betas"),
    [
        (ONE_CYCLE, [], (0.9, 0.999)),  # the cycle has moved the first one
        (ONE_CYCLE, ["optimizer.betas=[0.8,0.99]"], (0.8, 0.99)),
        (ONE_CYCLE, [*PLATEAU, "optimizer.betas=[0.8,0.99]"], (0.8, 0.99)),
    ],
)
def test_a_schedule_that_is_gone_leaves_nothing_in_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    precision: str,
    first: list[str],
    second: list[str],
    betas: tuple[float, float],
) -> None:
    of = [f"precision={precision}"]
    run = legs(monkeypatch, tmp_path, [*of, *first], [*of, *second], steps=4)
    (before,), (after,) = (checkpoint(d)["optimizer_states"][0]["param_groups"] for d in (tmp_path / "a", run))
    assert before["betas"][0] != pytest.approx(0.9, abs=1e-3)
    assert after["betas"] == betas


def test_a_cycle_that_goes_on_with_other_betas_is_where_it_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = legs(monkeypatch, tmp_path, ONE_CYCLE, [*ONE_CYCLE, "optimizer.betas=[0.9,0.99]"])
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=(0.9, 0.99))
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=8)
    for _ in range(8):
        optimizer.step()
        schedule.step()
    (group,) = checkpoint(run)["optimizer_states"][0]["param_groups"]
    assert group["betas"] == pytest.approx(optimizer.param_groups[0]["betas"])
    assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


def test_what_has_not_changed_goes_on_to_the_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = legs(monkeypatch, tmp_path, [], ["callbacks.best.save_top_k=2"])
    assert cli(monkeypatch, *TINY, "trainer.max_steps=8", f"hydra.run.dir={tmp_path}/whole") == 0
    for entry in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(checkpoint(tmp_path / "whole")[entry], checkpoint(run)[entry], entry)


def test_another_kind_of_optimizer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli(monkeypatch, *TINY, "trainer.max_steps=1", f"hydra.run.dir={tmp_path}/a") == 0
    last = f"{tmp_path}/a/checkpoints/last.ckpt"
    other = ["optimizer._target_=torch.optim.SGD", f"ckpt_path={last}", "trainer.max_steps=2"]
    assert cli(monkeypatch, *TINY, *other, f"hydra.run.dir={tmp_path}/b") == 2
    text = f"optimizer._target_=torch.optim.SGD: {last} holds the state of torch.optim.AdamW"
    assert text in capfd.readouterr().err
    assert math.isfinite(scalars(tmp_path / "a", "train/loss")[0])
