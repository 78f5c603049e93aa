"""The recipes' instrument panel: what is in the event files and on the screen, against plain references."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from launch import launch
from test_recipes import SHORT, checkpoint, cli, events, overflow, reference_losses, reference_validation_loss, scalars
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mixprec import MasterWeightPrecision, PrecisionMonitor
from recipes.benchmark_panel import Alternating
from recipes.data import Batch, DigitsDataModule
from recipes.diffusion import DiffusionModule
from recipes.ending import ValidateAtEnd
from recipes.flops import peak_flops, training_flops
from recipes.loss_means import LossSums, quartiles
from recipes.objective import DDPM, EDM, FlowMatching, Objective
from recipes.progress import ProgressLine
from recipes.randomness import validation_draws
from recipes.sample_grid import SampleGrid
from recipes.sampler import EulerSampler
from recipes.speed import SpeedMonitor
from recipes.unet import UNet

STEP = ["trainer.log_every_n_steps=1", "~callbacks.samples", "precision=fp32"]


# Losses by noise level


@pytest.mark.parametrize("objective", [EDM(), DDPM(), DDPM(density="logit_normal"), FlowMatching()])
def test_quartiles_hold_a_quarter_of_the_training_times_each(objective: Objective) -> None:
    generator = torch.Generator().manual_seed(0)
    time = objective.draw(40000, generator)
    edges = quartiles(objective)
    assert edges.tolist() == sorted(edges.tolist())
    shares = [float(((time >= low) & (time < high)).float().mean()) for low, high in zip([-9, *edges], [*edges, 1e9])]
    assert shares == pytest.approx([0.25] * 4, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_fp32_whatever_comes_in(dtype: torch.dtype) -> None:
    """Sums in 16 bits stop at 256 (bf16) or overflow (fp16)."""
    value = 60000.0 if dtype == torch.float16 else 1.0
    sums = LossSums(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(600):
        sums.add(torch.full((2,), value, dtype=dtype), torch.tensor([0.5, 3.5]))
    assert sums.means() == {"loss": value, "loss_q1": value, "loss_q4": value}


def test_an_infinite_loss_stays_in_its_own_quartile() -> None:
    sums = LossSums(torch.tensor([1.0, 2.0, 3.0]))
    sums.add(torch.tensor([1.0, math.inf]), torch.tensor([0.0, 9.0]))
    assert sums.means() == {"loss": math.inf, "loss_q1": 1.0, "loss_q4": math.inf}


class Watched(DiffusionModule):
    """Keeps the losses and times of every batch."""

    seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        losses, sigma = self._step[-1]
        type(self).seen.append((losses.clone(), sigma.clone()))
        return loss


def test_training_loss_by_noise_level_leaves_skipped_batches_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logged every 4 steps; batch 1 overflows. Against sums in float64, sample by sample."""
    from recipes import train

    Watched.seen = []
    monkeypatch.setattr(train, "DiffusionModule", Watched)
    overflow(monkeypatch, {(0, 1)})
    options = ["trainer.max_steps=7", "trainer.log_every_n_steps=4", "~callbacks.samples", "precision=fp32"]
    assert cli(monkeypatch, *SHORT[:3], *options, f"hydra.run.dir={tmp_path}/run") == 0
    edges = torch.exp(-1.2 + 1.2 * torch.tensor([-0.6744897501960817, 0.0, 0.6744897501960817], dtype=torch.float64))
    batches = [batch for index, batch in enumerate(Watched.seen) if index != 1]
    losses, sigma = (torch.cat(column).double() for column in zip(*batches[:4], strict=True))
    logged = {tag: scalars(tmp_path / "run", f"train/{tag}") for tag in ("loss", *(f"loss_q{n}" for n in range(1, 5)))}
    first = min(logged["loss"])
    assert logged["loss"][first] == pytest.approx(float(losses[: 128 * (first + 1)].mean()), rel=1e-5)
    for part, (low, high) in enumerate(zip([0.0, *edges], [*edges, math.inf], strict=True), start=1):
        inside = (sigma >= low) & (sigma < high)
        assert logged[f"loss_q{part}"][first] == pytest.approx(float(losses[inside].mean()), rel=1e-5)
    (epoch,) = scalars(tmp_path / "run", "train/loss_epoch").values()
    assert epoch == pytest.approx(float(torch.cat([batch[0] for batch in batches]).double().mean()), rel=1e-6)
