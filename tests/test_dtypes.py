"""Rounding that no loss curve shows, asserted where the numbers are used, in training runs of both 16-bit policies.

Times and noise levels, preconditioning, targets, weights, loss and averages are fp32 whatever the layers compute in,
and what layers see of a time is the time.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from lightning_mixprec import MasterWeightAveraging, MasterWeightPrecision
from recipes import denoising
from recipes.data import DigitsDataModule
from recipes.diffusion import DiffusionModule
from recipes.dit import DiT
from recipes.objective import DDPM
from recipes.unet import sinusoid

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml"))
PARTS = ("draw", "times", "path", "preconditioning", "errors", "weight", "mix", "target", "predict", "loss")


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


class Watched(DiffusionModule):
    """Also holds schedules in buffers, and keeps the dtypes of what it computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        alphas = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
        self.register_buffer("alphas_cumprod", alphas.float())
        self.register_buffer("exact", alphas)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.losses: list[Tensor] = []

    def training_step(self, *args: Any) -> Tensor:
        self.losses.append(super().training_step(*args))
        return self.losses[-1]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_all_but_the_layers_is_fp32_in_a_run(monkeypatch: pytest.MonkeyPatch, option: str, compute: str) -> None:
    objective = instantiate(
        OmegaConf.load(ROOT / "conf" / "objective" / f"{option}.yaml"), weighting="min_snr", stratified=True
    )
    used: dict[str, list[Tensor]] = {}

    def watch(name: str, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            used.setdefault(name, []).extend(tensors(result))
            return result

        return watched

    for name in PARTS:
        monkeypatch.setattr(objective, name, watch(name, getattr(objective, name)))
    monkeypatch.setattr(denoising, "squared_error", watch("squared_error", denoising.squared_error))
    L.seed_everything(0, verbose=False)
    net = DiT(1, 10, 8, hidden_size=16, depth=1, num_heads=2)
    average = MasterWeightAveraging(decay=0.9)
    module = Watched(net, objective, partial(torch.optim.AdamW, lr=1e-3))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    entered: dict[str, list[torch.dtype]] = {}

    def note(name: str) -> Any:
        return lambda layer, args, output: entered.setdefault(name, []).extend([args[0].dtype, output.dtype])

    net.time_embedding.register_forward_hook(note("time_embedding"))
    net.proj_out.register_forward_hook(note("proj_out"))
    net.blocks[0].attn.to_q.register_forward_hook(note("to_q"))
    net.register_forward_pre_hook(lambda layer, args: used.setdefault("net", []).extend(args[:2]))
    trainer = L.Trainer(
        plugins=MasterWeightPrecision(compute), callbacks=average, accelerator="cpu", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1,
        val_check_interval=1, use_distributed_sampler=False,
    )  # fmt: skip
    data = DigitsDataModule(batch_size=16)
    trainer.fit(module, datamodule=data)
    assert used.keys() == {*PARTS, "squared_error", "net"}
    for name, values in used.items():
        assert {value.dtype for value in values} == {torch.float32}, name
        assert all(value.isfinite().all() for value in values if name != "errors"), name
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    assert set(entered["to_q"]) == {half}  # the layers are in 16 bits indeed
    assert set(entered["time_embedding"]) == {torch.float32}
    assert entered["proj_out"][1::2] == [torch.float32] * (len(entered["proj_out"]) // 2)
    assert {loss.dtype for loss in module.losses} == {torch.float32}
    assert trainer.callback_metrics["val/loss"].dtype == torch.float32
    assert module._val.totals.dtype == torch.float32
    assert {value.dtype for value in average.averages.values()} == {torch.float32}
    assert any((value.to(half).float() != value).any() for value in average.averages.values())  # not widened halves
    # Schedules in buffers: as they were, in every bit.
    for name, buffer in module.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name]), name
    assert float(module.alphas_cumprod[0] / (1 - module.alphas_cumprod[0])) == pytest.approx(9999, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_times_are_told_apart_by_what_embeds_them(dtype: torch.dtype) -> None:
    """1000 timesteps stay 1000, also as fractions that are scaled first; against float64 in plain loops."""
    with torch.autocast("cpu", dtype):
        for times, scale in ((torch.arange(1000).float(), 1.0), (torch.arange(1000) / 1000, 1000.0)):
            features = sinusoid(times * scale, 8)
            assert len(features.unique(dim=0)) == 1000
            for i in range(0, 1000, 83):
                for j in range(4):
                    angle = i * math.exp(-math.log(10_000) * j / 4)
                    assert float(features[i, j]) == pytest.approx(math.cos(angle), abs=2e-4)
                    assert float(features[i, 4 + j]) == pytest.approx(math.sin(angle), abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_at_terminal_snr_are_finite_in_16_bit_surroundings(dtype: torch.dtype) -> None:
    """min(SNR, 5) / (SNR + 1) of v-prediction at every timestep, SNR 0 included."""
    objective = DDPM("v", zero_snr=True, weighting="min_snr")
    timesteps = torch.arange(1000)
    with torch.autocast("cpu", dtype):
        weight = objective.weight(timesteps.float())
    alpha, sigma = objective.path(timesteps.double())
    assert weight.dtype == torch.float32
    for t in range(1000):
        a, s = float(alpha[t]) ** 2, float(sigma[t]) ** 2
        expected = min(a, 5 * s)  # min(SNR, 5) / (SNR + 1) with SNR = a / s and a + s = 1
        assert float(weight[t]) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert float(weight[-1]) == 0.0
