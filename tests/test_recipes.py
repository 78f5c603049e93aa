"""What the recipes leave behind: numbers, weights, files, event tags, and what they say when refused."""

from __future__ import annotations

import csv
import functools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import yaml
from few_digits import FEW, FewDigits
from hydra import compose, initialize_config_dir
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_mixprec.processor import lacks_instructions
from recipes import command_line, sample, train
from recipes.config import check_targets
from recipes.data import DigitsDataModule, LabelledImages
from recipes.denoising import squared_error
from recipes.diffusion import DiffusionModule
from recipes.images import NON_FINITE_COLOUR, count_non_finite, image_grid, to_uint8
from recipes.loading import ResumableLoader, ShuffledShard
from recipes.objective import EDM
from recipes.randomness import validation_draws
from recipes.sampler import HeunSampler, draw_samples, guided
from recipes.unet import UNet, sinusoid

ROOT = Path(__file__).resolve().parent.parent
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TINY = ["model=unet_tiny", "trainer.accelerator=cpu", "trainer.devices=1"]
SHORT = [*TINY, *FEW, "sampler.steps=4"]


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str, program: Any = train) -> int:
    """Run a recipe's command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", [program.__file__, *arguments])
    name = program.__name__.rpartition(".")[2]
    try:
        command_line.run(program.main, name)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def events(run: Path) -> EventAccumulator:
    (file,) = run.rglob("events.out.tfevents.*")
    return _read_events(file, file.stat().st_size)


@functools.lru_cache(maxsize=8)
def _read_events(file: Path, size: int) -> EventAccumulator:
    """Of a file that has grown to `size`: reading it takes as long as a few steps of the run."""
    return EventAccumulator(str(file), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def scalars(run: Path, tag: str) -> dict[int, float]:
    return {e.step: e.value for e in events(run).Scalars(tag)}


def checkpoint(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def reference_losses(net: Any, y: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor, sigma_data: float) -> Tensor:
    """EDM's loss per sample, one at a time, from the formulas of table 1; float64 but for the network itself."""
    out = []
    for i in range(len(y)):
        s, clean = float(sigma[i]), y[i : i + 1].double()
        x = clean + s * noise[i : i + 1].double()
        total = s**2 + sigma_data**2
        inputs = (x / math.sqrt(total)).float(), torch.tensor([math.log(s) / 4]), labels[i : i + 1]
        f = net(*inputs).double()
        d = sigma_data**2 / total * x + s * sigma_data / math.sqrt(total) * f
        out.append(total / (s * sigma_data) ** 2 * ((d - clean) ** 2).mean())
    return torch.stack(out)


def reference_validation_loss(run: Path, data: DigitsDataModule, entry: str = "averaged_state_dict") -> float:
    """Validation loss of a run's last checkpoint, recomputed in float64 without Lightning."""
    saved = checkpoint(run)
    net = UNet(**{k: v for k, v in saved["recipe"]["model"].items() if k != "_target_"})
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved[entry].items()})
    data.setup()
    noise, normal = validation_draws(torch.arange(len(data.val)), (1, 8, 8))
    sigma = torch.exp(normal.double() * 1.2 - 1.2)
    with torch.no_grad():
        return float(reference_losses(net, data.val.images, data.val.labels, sigma, noise, 0.5).mean())


@pytest.fixture(scope="module")
def fp32_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps in fp32 whose validation batches are not all of one size."""
    run = tmp_path_factory.mktemp("fp32") / "run"
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["precision=fp32", "data.batch_size=55", "trainer.max_steps=24", "trainer.val_check_interval=10"]
        assert cli(patch, *SHORT, *arguments, f"hydra.run.dir={run}") == 0
    return run


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 33 steps in bf16, three epochs of eleven batches."""
    run = tmp_path_factory.mktemp("bf16") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert cli(patch, *SHORT, "trainer.max_steps=33", "trainer.val_check_interval=11", f"hydra.run.dir={run}") == 0
    return run


@pytest.fixture(scope="module")
def whole_runs(bf16_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same by precision; fp32 takes half the time where a CPU has no instructions for bf16."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        length = ["trainer.max_steps=33", "trainer.val_check_interval=11", "precision=fp32"]
        assert cli(patch, *SHORT, *length, f"hydra.run.dir={run}") == 0
    return {"bf16": bf16_run, "fp32": run}


# Numerics


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_error_is_fp32(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = squared_error(torch.full((2, 1, 4, 4), 300.0, dtype=dtype), torch.zeros(2, 1, 4, 4, dtype=dtype))
    assert loss.dtype == torch.float32
    assert loss.tolist() == [90000.0, 90000.0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("output", DTYPES)
def test_edm_loss_matches_float64_reference(autocast: bool, output: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 32, 1, 4, 4, generator=generator)
    sigma = EDM().times(torch.linspace(-3, 3, 32))

    def net(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        return (torch.tanh(x) + c_noise.reshape(-1, 1, 1, 1)).to(output).to(torch.promote_types(output, x.dtype))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = EDM().loss(net, images, torch.zeros(32).long(), sigma, noise)
    expected = reference_losses(net, images, torch.zeros(32).long(), sigma, noise, 0.5)
    assert loss.dtype == torch.float32
    # A 16-bit network output may round the other way where its fp32 and float64 inputs straddle a tie.
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5 if output == torch.float32 else 2e-2, atol=1e-6)


def test_half_images_do_not_lower_the_precision_of_the_schedule() -> None:
    sigma = torch.tensor([0.002, 80.0], dtype=torch.float16)
    clean = EDM().denoise(lambda x, *_: x.half(), torch.ones(2, 1, 2, 2).half(), sigma, torch.zeros(2).long())
    assert clean.dtype == torch.float32
    assert clean.isfinite().all()


def test_sinusoid_keeps_all_timesteps_apart() -> None:
    t = torch.arange(1000)
    with torch.autocast("cpu", torch.bfloat16):
        features = sinusoid(t, 32)
    angle = t.double()[:, None] * torch.exp(torch.arange(16).double() * (-math.log(10_000) / 16))
    assert features.dtype == torch.float32
    assert len(features.unique(dim=0)) == 1000
    assert (features - torch.cat([angle.cos(), angle.sin()], 1)).abs().max() < 1e-3


def test_network_sees_the_timestep_in_fp32_under_bf16() -> None:
    net = UNet(1, 10, [8, 16])
    seen = []
    net.time_embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net(torch.zeros(1000, 1, 8, 8), torch.linspace(-1.5, 1.1, 1000), torch.zeros(1000).long())
    assert seen[0].dtype == torch.float32
    assert len(seen[0].unique(dim=0)) == 1000


def test_heun_solves_the_ode_of_gaussian_data() -> None:
    # For data ~ N(0, s²) the perfect denoiser is x s² / (s² + σ²), and the ODE scales x by s / sqrt(s² + σ_max²).
    noise = torch.randn(1000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    images = HeunSampler(steps=40)(lambda x, s: x * 0.25 / (0.25 + s.reshape(-1, 1, 1, 1).square()), noise, EDM())
    torch.testing.assert_close(images, noise * 80 * 0.5 / math.sqrt(0.25 + 80**2), rtol=1e-2, atol=0)


def test_guidance_extrapolates_from_no_label() -> None:
    def net(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        return labels.reshape(-1, 1, 1, 1).float().expand_as(x)

    labels, x, sigma = torch.tensor([3, 4]), torch.zeros(2, 1, 2, 2), torch.tensor([0.5, 2.0])
    values = [guided(EDM(), net, labels, 10, scale)(x, sigma) for scale in (0.0, 1.0, 2.5)]
    torch.testing.assert_close(values[2], values[0] + 2.5 * (values[1] - values[0]))
    torch.testing.assert_close(values[0], EDM().denoise(net, x, sigma, torch.tensor([10, 10])))


# Random numbers and data


def draw(monkeypatch: pytest.MonkeyPatch, seed: int, rank: int, epoch: int, batch_idx: int) -> tuple[Tensor, ...]:
    monkeypatch.setattr(DiffusionModule, "global_rank", rank)
    monkeypatch.setattr(DiffusionModule, "current_epoch", epoch)
    module = DiffusionModule(UNet(1, 10, [8]), EDM(), torch.optim.SGD, seed=seed)
    batch = {"image": torch.zeros(4000, 1, 2, 2), "label": torch.arange(4000) % 10}
    return module.draw(batch, batch_idx)


def test_training_noise_depends_on_seed_rank_and_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = draw(monkeypatch, 0, 0, 0, 0)
    torch.rand(17)  # the global generator must not matter
    assert all(torch.equal(a, b) for a, b in zip(base, draw(monkeypatch, 0, 0, 0, 0), strict=True))
    for key in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        labels, sigma, noise = draw(monkeypatch, *key)
        assert not torch.equal(labels, base[0])
        assert not torch.equal(sigma, base[1])
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), base[2].flatten()]))[0, 1]) < 0.05


def test_labels_are_dropped_one_sample_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, sigma, noise = draw(monkeypatch, 0, 0, 0, 0)
    dropped = labels == 10
    assert 0.08 < dropped.float().mean() < 0.12
    assert torch.equal(labels[~dropped], (torch.arange(4000) % 10)[~dropped])
    assert sigma.dtype == noise.dtype == torch.float32
    assert abs(sigma.log().mean() + 1.2) < 0.1


def test_validation_draws_belong_to_the_sample() -> None:
    noise, normal = validation_draws(torch.arange(360), (1, 8, 8))
    again = [validation_draws(rows, (1, 8, 8)) for rows in torch.arange(360).split(7)]
    assert torch.equal(noise, torch.cat([n for n, _ in again]))
    assert torch.equal(normal, torch.cat([n for _, n in again]))
    assert abs(normal.mean()) < 0.02  # stratified: plain draws would miss by 0.05
    assert abs(normal.std() - 1) < 0.02


def test_digits_are_exact_and_split_once() -> None:
    data = DigitsDataModule()
    data.setup()
    images = torch.cat([data.train.images, data.val.images])
    assert images.dtype == torch.float32
    assert images.shape == (1797, 1, 8, 8)
    assert set(((images + 1) * 8).unique().tolist()) == set(range(17))
    assert data.val.labels.bincount(minlength=10).min() > 20


def test_every_rank_gets_the_same_number_of_batches() -> None:
    data = LabelledImages(torch.zeros(5, 1, 2, 2), torch.zeros(5).long())
    loaders = [ResumableLoader(data, ShuffledShard(5, rank, 2, seed=0), batch_size=1) for rank in range(2)]
    seen = [[int(batch["index"]) for batch in loader] for loader in loaders]
    assert [len(s) for s in seen] == [2, 2] == [len(loader) for loader in loaders]
    assert len({*seen[0], *seen[1]}) == 4


def test_loader_resumes_in_the_middle_of_an_epoch() -> None:
    data = LabelledImages(torch.zeros(50, 1, 2, 2), torch.zeros(50).long())

    def loader() -> ResumableLoader:
        return ResumableLoader(data, ShuffledShard(50, 0, 1, seed=3), batch_size=4)

    whole, first, second = loader(), loader(), loader()
    order = []
    for epoch in (0, 1, 2):
        whole.shard.set_epoch(epoch)
        order.append([batch["index"].tolist() for batch in whole])
    assert order[0] != order[1]
    first.shard.set_epoch(1)
    batches = iter(first)
    head = [next(batches)["index"].tolist() for _ in range(5)]
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"epoch": 1, "batches": 5, "images_per_batch": 4, "images_per_step": 1}
    assert head + [batch["index"].tolist() for batch in second] == order[1]
    second.shard.set_epoch(2)
    assert [batch["index"].tolist() for batch in second] == order[2]


# Pictures


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_map_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([-1, 0, 1, -7, 7, math.nan, math.inf], dtype=dtype)
    assert to_uint8(values).tolist() == [0, 128, 255, 0, 255, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_pixels_are_red_and_counted(dtype: torch.dtype) -> None:
    images = torch.zeros(3, 1, 2, 2, dtype=dtype)
    images[1, 0, 0, 1] = math.nan
    images[2] = -math.inf
    assert count_non_finite(images) == 2
    grid = image_grid(images, columns=2, zoom=1, gap=0)
    assert grid.shape == (3, 4, 4)
    assert tuple(grid[:, 0, 3].tolist()) == NON_FINITE_COLOUR
    assert tuple(grid[:, 3, 0].tolist()) == NON_FINITE_COLOUR
    assert grid[:, 0, 0].tolist() == [128, 128, 128]


# The network


def test_network_has_the_names_of_unet2dmodel() -> None:
    names = set(UNet(1, 10, [8, 16], [1], norm_num_groups=4).state_dict())
    for name in (
        "conv_in.weight",
        "time_embedding.linear_1.weight",
        "time_embedding.linear_2.bias",
        "class_embedding.weight",
        "down_blocks.0.resnets.0.norm1.weight",
        "down_blocks.0.resnets.0.time_emb_proj.weight",
        "down_blocks.0.downsamplers.0.conv.weight",
        "down_blocks.1.resnets.0.conv_shortcut.weight",
        "down_blocks.1.attentions.0.group_norm.weight",
        "mid_block.attentions.0.to_q.weight",
        "mid_block.attentions.0.to_out.0.bias",
        "mid_block.resnets.1.conv2.weight",
        "up_blocks.0.resnets.1.conv_shortcut.weight",
        "up_blocks.0.upsamplers.0.conv.weight",
        "conv_norm_out.weight",
        "conv_out.bias",
    ):
        assert name in names
    assert not any(name.startswith(("down_blocks.1.downsamplers", "up_blocks.1.upsamplers")) for name in names)


def test_untrained_network_predicts_zero_and_passes_gradients() -> None:
    net = UNet(3, 10, [8, 16, 16], [1, 2], layers_per_block=2)
    out = net(torch.randn(2, 3, 16, 16), torch.zeros(2), torch.tensor([1, net.null_label]))
    assert torch.equal(out, torch.zeros(2, 3, 16, 16))
    torch.nn.init.ones_(net.conv_out.weight)
    net(torch.randn(2, 3, 16, 16), torch.zeros(2), torch.tensor([1, 2])).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


# Configuration


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_every_option_composes_and_builds(monkeypatch: pytest.MonkeyPatch, precision: str, strategy: str) -> None:
    from hydra.utils import instantiate

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(
            "train", [f"precision={precision}", f"strategy={strategy}", "precision.policy.fp32=[GroupNorm]"]
        )
    plugin = instantiate(config.precision, _convert_="all")
    assert plugin.policy.compute == precision
    assert plugin.policy.fp32 == ["GroupNorm"] or tuple(plugin.policy.fp32) == ("GroupNorm",)
    assert (precision == "fp16") == ("scaler" in config.precision)


ERRORS = {
    "precision=fp61": ["precision=fp61", "'fp16'", "bf16, fp16, fp32"],
    "strategy=fsdp": ["strategy=fsdp", "Did you mean 'fsdp2'", "auto, ddp, fsdp2"],
    "trainer.max_step=10": ["trainer.max_step'", "Did you mean 'max_steps'"],
    "trianer.max_steps=10": ["trianer", "Did you mean 'trainer'"],
    "sead=3": ["sead", "Did you mean 'seed'"],
    "+optimizer.weight_decy=0.1": ["optimizer.weight_decy", "Did you mean 'weight_decay'", "torch.optim.AdamW"],
    "callbacks.best.save_lst=true": ["callbacks.best.save_lst", "Did you mean 'save_last'"],
    "precision.policy.fp23=[GroupNorm]": ["precision.policy.fp23", "Did you mean 'fp32'"],
    "precision.policy.fp32=[time_embeding.*]": ["precision.policy", "time_embeding.*", "time_embedding"],
    "precision.scaler.init_scale=4": [
        "'precision.scaler' is not set here",
        "precision=fp16 sets it",
        "+precision.scaler._target_=lightning_mixprec.DynamicLossScaler",
    ],
    "precision.masters=splitt": ["precision.masters=splitt", "Did you mean 'split'"],
    "precision.policy.compute=bf61": ["precision.policy.compute=bf61: lightning_mixprec.PrecisionPolicy refused"],
    "+foo=1": ["unknown key 'foo'", "callbacks, ckpt_path, compile, data"],
    "+sede=1": ["unknown key 'sede'", "Did you mean 'seed'"],
    "++foo.bar=1": ["unknown key 'foo'"],
    "optimizer.lr=abc": ["optimizer.lr=abc: torch.optim.AdamW takes a number", "Change it"],
    "optimizer.lr=-1": ["optimizer.lr=-1: torch.optim.AdamW refused: Invalid learning rate: -1", "Change it"],
    "scheduler.total_iters=abc": ["scheduler.total_iters=abc: torch.optim.lr_scheduler.LinearLR takes a whole number"],
    "scheduler.start_factor=2": ["scheduler.start_factor=2", "LinearLR refused", "less or equal to 1"],
    "trainer.max_steps=abc": ["trainer.max_steps=abc: lightning.Trainer takes a whole number."],
    "trainer.max_steps=1e3": ["trainer.max_steps=1000.0", "a whole number (write 1000)."],
    "trainer.devices=0": ["trainer.devices=0: lightning.Trainer refused"],
    "trainer.detect_anomaly=1": ["trainer.detect_anomaly=1", "true or false"],
    "model.block_out_channels=[a]": ["model.block_out_channels=['a']", "a list"],
    "trainer.precision=16-mixed": ["trainer.precision=16-mixed", "precision=fp32|bf16|fp16"],
    "+trainer.strategy=ddp": ["trainer.strategy=ddp", "strategy=auto|ddp|fsdp2"],
    "trainer.accumulate_grad_batches=12": ["data.batch_size=128", "1 process(es) x 12 accumulated", "120 or 132"],
    "data.batch_size=1438": ["data.batch_size=1438", "1437 training samples", "data.batch_size <= 1437"],
    "ckpt_path=nowhere/last.ckpt": ["ckpt_path=nowhere/last.ckpt", "nowhere/last.ckpt", "ckpt_path=last"],
    "ckpt_path=last": ["ckpt_path=last", "*/checkpoints/last.ckpt", "Leave ckpt_path out"],
    "seed=-1": ["seed=-1", "0 to 4294967295"],
    "callbacks.samples.sampler.steps=3": ["callbacks.samples.sampler"],
    "seed=1,2": ["seed=1,2", "-m"],
    "model.block_out_channels=[12]": ["block_out_channels=[12]", "multiples of norm_num_groups=8"],
    "objective.label_dropout=2": ["label_dropout=2", "between 0 and 1"],
    "model._target_=recipes.unet.Unet": ["model._target_=recipes.unet.Unet", "cannot be imported"],
    "trainer.max_steps=[": ["'['"],
}


@pytest.mark.parametrize("override", ERRORS)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, override: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # One process by default: the batch counts in the messages are those of one.
    assert cli(monkeypatch, *TINY, f"hydra.run.dir={tmp_path}/run/x", override) == 2
    shown = capfd.readouterr()
    message = shown.err[shown.err.index("error: ") :]
    assert all(text in message for text in ERRORS[override]), message
    assert len(message) < 1000
    assert "(masters=" not in message
    assert "Traceback" not in shown.out + shown.err
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("events.out.*")]


def test_sweep_is_checked_job_by_job(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli(monkeypatch, "model=unet_tiny", "-m", "precision=bf16,fp61") == 2
    assert "Choices: bf16, fp16, fp32" in capfd.readouterr().err


def test_processes_started_outside_need_one_directory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("GROUP_RANK", "0")
    assert cli(monkeypatch) == 2
    assert "hydra.run.dir=outputs/NAME" in capfd.readouterr().err


def test_arguments_that_the_yaml_does_not_list_need_no_prefix() -> None:
    given = ["optimizer.betas=[0.9,0.95]", "trainer.max_steps=3", "-m", "trainer.gradient_clip_val=1,2"]
    assert command_line.checked(given, "train") == [
        "-m",
        "++optimizer.betas=[0.9,0.95]",
        "trainer.max_steps=3",
        "++trainer.gradient_clip_val=1,2",
    ]


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "config"]])
def test_hydra_flags_still_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli(monkeypatch, *flags) == 0
    assert "block_out_channels" in capfd.readouterr().out


# Runs


def test_run_leaves_everything_in_one_directory(bf16_run: Path) -> None:
    names = {str(p.relative_to(bf16_run)) for p in bf16_run.rglob("*") if p.is_file()}
    assert {"checkpoints/last.ckpt", "checkpoints/step000033.ckpt", "samples/step000011.png"} <= names
    assert "samples/step000033.png" in names
    assert not [name for name in names if "=" in name]
    assert not [name for name in names if name.endswith(".log")]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        path = bf16_run / "checkpoints" / "step000033.ckpt"
        assert compose("train", [f"ckpt_path={path}"]).ckpt_path == str(path)


def test_tensorboard_shows_the_run(bf16_run: Path) -> None:
    log = events(bf16_run)
    tags = set(log.Tags()["scalars"])
    assert {"train/loss", "val/loss", "perf/images_per_second", "samples/non_finite"} <= tags
    assert {"mixprec/loss_scale", "mixprec/skipped_total", "mixprec/consecutive_skips", "mixprec/grad_norm"} <= tags
    assert any(tag.startswith("lr-") for tag in tags)
    assert list(scalars(bf16_run, "val/loss")) == [11, 22, 33]  # where the samples are
    assert scalars(bf16_run, "perf/images_per_second").popitem()[1] > 0
    assert [image.step for image in log.Images("samples")] == [11, 22, 33]
    config = log.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "compute: bf16" in config
    assert f"save_dir: {bf16_run}" in config  # resolved
    # One HParams entry, whose metric is the final validation loss.
    final = list(scalars(bf16_run, "val/loss").values())[-1]
    assert list(scalars(bf16_run, "hparams/val_loss").values()) == [final]
    assert "hp_metric" not in tags


def test_checkpoint_is_plain(bf16_run: Path) -> None:
    saved = checkpoint(bf16_run)  # loads with weights_only=True
    assert saved["recipe"]["trainer"]["max_steps"] == 33
    assert saved["global_step"] == 33
    for entry in ("state_dict", "averaged_state_dict"):
        assert all(value.dtype == torch.float32 for value in saved[entry].values())
        UNet(1, 10, [8, 16]).load_state_dict({k.removeprefix("net."): v for k, v in saved[entry].items()})


def test_lightning_loads_a_module_from_a_checkpoint(bf16_run: Path) -> None:
    """Without a Trainer, and with the raw weights."""
    parts = {"net": UNet(1, 10, [8, 16]), "objective": EDM(), "optimizer": torch.optim.AdamW}
    module = DiffusionModule.load_from_checkpoint(bf16_run / "checkpoints" / "last.ckpt", **parts)
    assert_same(dict(module.state_dict()), checkpoint(bf16_run)["state_dict"], "state_dict")


def test_validation_loss_is_the_exact_mean_under_averaged_weights(fp32_run: Path) -> None:
    logged = list(scalars(fp32_run, "val/loss").values())
    assert len(logged) == 3  # after 10 and 20 batches, and at the end
    assert logged[-1] == pytest.approx(reference_validation_loss(fp32_run, FewDigits()), rel=1e-5)
    assert logged[-1] != pytest.approx(reference_validation_loss(fp32_run, FewDigits(), "state_dict"), rel=1e-3)


def test_last_checkpoint_is_the_newest_even_if_the_loss_rises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worse = ["optimizer.lr=5", "trainer.max_steps=12", "trainer.val_check_interval=3", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, "precision=fp32", *worse, f"hydra.run.dir={tmp_path}/run") == 0
    losses = list(scalars(tmp_path / "run", "val/loss").values())
    assert losses[-1] > min(losses)
    assert checkpoint(tmp_path / "run")["global_step"] == 12
    best = [p.stem for p in (tmp_path / "run" / "checkpoints").glob("step*.ckpt")]
    assert best == [f"step{3 * (losses.index(min(losses)) + 1):06d}"]


def assert_same(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b, path


@pytest.mark.parametrize("stop", [15, 22])  # in the middle and at the end of an epoch
def test_resume_equals_the_uninterrupted_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bf16_run: Path, stop: int
) -> None:
    steps = ["trainer.val_check_interval=11", "callbacks.samples.per_class=1"]
    assert cli(monkeypatch, *SHORT, *steps, f"trainer.max_steps={stop}", f"hydra.run.dir={tmp_path}/a/1") == 0
    again = [*SHORT, *steps, "trainer.max_steps=33", "ckpt_path=last", f"hydra.run.dir={tmp_path}/a/2"]
    assert cli(monkeypatch, *again) == 0
    whole, resumed = checkpoint(bf16_run), checkpoint(tmp_path / "a" / "2")
    assert resumed["recipe"]["ckpt_path"] == "last"
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], resumed[entry], entry)
    assert (
        list(scalars(tmp_path / "a" / "2", "val/loss").values())[-1] == list(scalars(bf16_run, "val/loss").values())[-1]
    )


def test_checkpoint_of_another_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bf16_run: Path, tmp_path: Path
) -> None:
    path = bf16_run / "checkpoints" / "last.ckpt"
    options = [f"ckpt_path={path}", "trainer.max_steps=40", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *SHORT, *options, "model=unet_small") == 2
    shown = capfd.readouterr()
    message = shown.err[shown.err.index("error: ") :]
    assert f"{path} does not fit: 'net.conv_in.weight' is [8, 1, 3, 3] in the checkpoint and [32, 1, 3, 3]" in message
    assert "model.block_out_channels [8, 16] -> [32, 64]" in message
    assert "Choose the model that the checkpoint was trained with" in message
    assert "Traceback" not in shown.out + shown.err
    assert not list(tmp_path.rglob("events.out.*"))
    # More layers, and a checkpoint that does not know its configuration.
    saved = checkpoint(bf16_run)
    del saved["recipe"], saved["processes"]
    torch.save(saved, tmp_path / "stock.ckpt")
    options[0] = f"ckpt_path={tmp_path}/stock.ckpt"
    assert cli(monkeypatch, *SHORT, *options, "model.layers_per_block=2") == 2
    assert "resnets.1.norm1.weight' is absent in the checkpoint and [8] in this" in capfd.readouterr().err
    assert cli(monkeypatch, *SHORT, *options[:1], "trainer.max_steps=34", f"hydra.run.dir={tmp_path}/run") == 0


def test_resume_without_steps_left_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bf16_run: Path, tmp_path: Path
) -> None:
    path = bf16_run / "checkpoints" / "last.ckpt"
    for steps in (33, 20):
        options = [f"ckpt_path={path}", f"trainer.max_steps={steps}", f"hydra.run.dir={tmp_path}/run"]
        assert cli(monkeypatch, *SHORT, *options) == 2
        message = capfd.readouterr().err
        assert f"trainer.max_steps={steps}: {path} is at step 33 already" in message
        assert "a number above 33" in message
    assert not list(tmp_path.rglob("events.out.*"))


def test_resume_says_what_changed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bf16_run: Path, tmp_path: Path
) -> None:
    saved = checkpoint(bf16_run)
    assert saved["processes"] == 1
    torch.save(saved | {"processes": 2}, tmp_path / "two.ckpt")
    options = ["precision=fp32", "data.batch_size=16", "seed=3", "model.time_scale=500", "trainer.max_steps=34"]
    assert cli(monkeypatch, *SHORT, *options, f"ckpt_path={tmp_path}/two.ckpt", f"hydra.run.dir={tmp_path}/run") == 0
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith("changed since the checkpoint: ")]
    assert len(lines) == 1
    changed = lines[0].partition(": ")[2].split(", ")
    assert {
        "precision.policy.compute bf16 -> fp32",
        "data.batch_size 32 -> 16",
        "seed 0 -> 3",
        "model.time_scale not set -> 500",
        "trainer.max_steps 33 -> 34",
        "processes 2 -> 1",
    } <= set(changed)
    assert not [x for x in changed if "directory" in x or "dirpath" in x or "save_dir" in x or "ckpt_path" in x]
    # Nothing changed: nothing said.
    same = ["trainer.val_check_interval=11", f"hydra.run.dir={tmp_path}/same"]
    last = bf16_run / "checkpoints" / "last.ckpt"
    assert cli(monkeypatch, *SHORT, *same, f"ckpt_path={last}", "trainer.max_steps=34") == 0
    assert "changed since the checkpoint: trainer.max_steps 33 -> 34\n" in capfd.readouterr().out


def test_logger_none_works_on_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli(monkeypatch, *SHORT, "logger=none", "trainer.max_steps=2", f"hydra.run.dir={tmp_path}/run") == 0
    assert checkpoint(tmp_path / "run")["global_step"] == 2
    assert not list(tmp_path.rglob("events.out.*"))


def test_logger_csv_has_the_curves_and_keeps_those_of_before(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*SHORT, "precision=fp32", "logger=csv", "trainer.log_every_n_steps=1", "trainer.val_check_interval=2"]
    options += ["~callbacks.samples", f"hydra.run.dir={run}"]

    def rows(name: str) -> dict[str, list[int]]:
        with (run / name).open() as file:
            table = list(csv.DictReader(file))
        return {tag: [int(row["step"]) for row in table if row.get(tag)] for tag in ("train/loss", "val/loss")}

    assert cli(monkeypatch, *options, "trainer.max_steps=4") == 0
    assert f"curves           {run}" in capfd.readouterr().out
    first = {"train/loss": [0, 1, 2, 3], "val/loss": [2, 4]}
    assert rows("metrics.csv") == first
    assert cli(monkeypatch, *options, "trainer.max_steps=6", "ckpt_path=auto") == 0
    assert rows("metrics.csv") == {"train/loss": [4, 5], "val/loss": [6]}
    assert rows("metrics_part1.csv") == first


@pytest.mark.parametrize("option", ["logger=none", "trainer.fast_dev_run=true"])
def test_curves_that_nobody_logs_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    options = [*SHORT, "precision=fp32", "trainer.max_steps=1", option]
    assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/run") == 0
    assert "curves           not logged\n" in capfd.readouterr().out


def test_last_skips_runs_that_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = [*SHORT, "~callbacks.samples"]
    assert cli(monkeypatch, *run, "trainer.max_steps=2", f"hydra.run.dir={tmp_path}/1") == 0
    assert cli(monkeypatch, *run, "optimizer.lr=-1", f"hydra.run.dir={tmp_path}/2") == 2
    assert cli(monkeypatch, *run, "trainer.max_steps=3", "ckpt_path=last", f"hydra.run.dir={tmp_path}/3") == 0
    assert f"Restored all states from the checkpoint at {tmp_path}/1/" in "".join(capfd.readouterr())
    assert len(list(tmp_path.rglob("events.out.*"))) == 2


def overflow(monkeypatch: pytest.MonkeyPatch, bad: set[tuple[int, int]]) -> None:
    """Make the training loss of these (epoch, batch) infinite."""
    drawn = DiffusionModule.draw

    def draw(self: DiffusionModule, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        labels, sigma, noise = drawn(self, batch, batch_idx)
        return labels, sigma, noise * (1e30 if (self.current_epoch, batch_idx) in bad else 1)

    monkeypatch.setattr(DiffusionModule, "draw", draw)


@pytest.mark.parametrize("monitor", ["train/loss", "train/loss_epoch"])
def test_overflow_does_not_poison_the_training_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, monitor: str
) -> None:
    overflow(monkeypatch, {(0, 1), (0, 10)})
    stop = "callbacks.stop"
    early = [f"+{stop}._target_=lightning.pytorch.callbacks.EarlyStopping", f"{stop}.monitor={monitor}"]
    early += [f"{stop}.patience=10", f"{stop}.check_on_train_epoch_end=true"]
    options = ["trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.log_every_n_steps=1", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *early, *options, f"hydra.run.dir={tmp_path}/run") == 0
    run = tmp_path / "run"
    assert checkpoint(run)["global_step"] == 31  # of 33 batches
    steps, epochs = scalars(run, "train/loss"), scalars(run, "train/loss_epoch")
    assert all(map(math.isfinite, [*steps.values(), *epochs.values()]))
    assert list(scalars(run, "train/skipped_batches").values()) == [2, 0, 0]
    good = [steps[i] for i in range(11) if i not in (1, 10)]
    assert next(iter(epochs.values())) == pytest.approx(sum(good) / 9, rel=1e-6)


def test_training_loss_leaves_out_all_batches_of_a_skipped_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overflow(monkeypatch, {(0, 4)})
    accumulate = ["trainer.accumulate_grad_batches=5", "data.batch_size=160"]
    options = [*accumulate, "trainer.max_steps=2", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    # The second step that counts is in the next epoch: this one ends with its second whole step.
    assert list(scalars(tmp_path / "run", "train/skipped_batches").values()) == [5, 0]


def test_screen_leaves_out_what_nobody_can_act_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], bf16_run: Path, tmp_path: Path
) -> None:
    last = bf16_run / "checkpoints" / "last.ckpt"
    filters = warnings.filters[:]
    options = ["trainer.val_check_interval=2", f"ckpt_path={last}", "trainer.max_steps=37"]
    assert cli(monkeypatch, *SHORT, *options, f"hydra.run.dir='{tmp_path}/a b'") == 0
    shown = "".join(capfd.readouterr())
    for text in ("FLOPs", "litlogger", "litmodels", "dirpath has changed", "sync_dist", "model summary", "Tip:"):
        assert text not in shown
    assert "UNet with 41,961 trained parameters" in shown
    assert f"tensorboard --logdir '{tmp_path}/a b'\n" in shown
    (line,) = re.findall(r"^epoch 3  step 37/37 .*val/loss (\S+)", shown, re.MULTILINE)  # of the last validation
    assert float(line) == pytest.approx(float(re.findall(r"validation loss +(\S+)", shown)[0]), abs=1e-3)
    assert warnings.filters == filters
    saved = yaml.safe_load((tmp_path / "a b" / "hparams.yaml").read_text())
    assert (saved["seed"], saved["precision"]["policy"]["compute"]) == (0, "bf16")


STEPS = ["trainer.val_check_interval=11", "callbacks.samples.per_class=1", "trainer.max_steps=33"]


def signalled(monkeypatch: pytest.MonkeyPatch, batch: int, number: int, *arguments: str, times: int = 1) -> int:
    """Run `recipes.train` and send it a signal while it computes the loss of training batch `batch`, counted from 1."""
    compute, seen = DiffusionModule.training_step, []

    def training_step(self: DiffusionModule, *args: Any) -> Tensor:
        seen.append(args)
        for _ in range(times if len(seen) == batch else 0):
            os.kill(os.getpid(), number)
        return compute(self, *args)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(DiffusionModule, "training_step", training_step)
        status = cli(patch, *SHORT, *arguments)
    signal.signal(signal.SIGINT, handlers[0])  # Lightning ignores it after a KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) == handlers[1]
    return status


# Before any validation, in the middle of an epoch, where a validation is due, and at the end of an epoch.
@pytest.mark.parametrize(
    ("batch", "number", "interval", "precision"),
    [
        (7, signal.SIGINT, 11, "fp32"),
        (15, signal.SIGTERM, 11, "bf16"),
        (20, signal.SIGHUP, 10, "fp32"),
        (22, signal.SIGINT, 11, "fp32"),
        (22, signal.SIGINT, 30, "fp32"),
    ],
)
def test_interrupted_run_saves_its_step_and_resumes_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    whole_runs: dict[str, Path],
    batch: int,
    number: signal.Signals,
    interval: int,
    precision: str,
) -> None:
    first, reference = tmp_path / "a b" / "1", whole_runs[precision]
    options = [f"precision={precision}", *STEPS, f"trainer.val_check_interval={interval}", f"hydra.run.dir='{first}'"]
    assert signalled(monkeypatch, batch, number, *options) == 128 + number
    batch += (batch, interval) == (22, 30)  # an epoch ends without a validation: one step more
    shown = capfd.readouterr()
    assert f"interrupted      after step {batch}\n" in shown.out
    assert f"checkpoint       {first}/checkpoints/last.ckpt, of step {batch}\n" in shown.out
    again = shown.out[shown.out.index("to continue      ") :].split("\n")[0]
    assert again.startswith("to continue      python -m recipes.train model=unet_tiny trainer.accelerator=cpu")
    again = shlex.split(again)[5:]  # without "to continue python -m recipes.train"
    assert again[-3:] == [f"trainer.val_check_interval={interval}", "resume=auto", f"hydra.run.dir='{first}'"]
    assert "Traceback" not in shown.out + shown.err
    assert checkpoint(first)["global_step"] == batch

    assert cli(monkeypatch, *again) == 0
    shown = capfd.readouterr().out
    assert f"resume=auto: {first}/checkpoints/last.ckpt, step {batch}\n" in shown
    whole, resumed = checkpoint(reference), checkpoint(first)
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], resumed[entry], entry)
    # Every validation ran exactly once; the one at the end on the same weights. Curves go on where they were.
    assert (resumed["global_step"], resumed["epoch"]) == (33, whole["epoch"])
    curves = EventAccumulator(str(first), size_guidance={"scalars": 0}).Reload()
    validated = {event.step: event.value for event in curves.Scalars("val/loss")}
    assert [event.step for event in curves.Scalars("val/loss")] == [
        step for step in range(1, 34) if step % interval == 0 or step == 33
    ]
    assert validated[33] == scalars(reference, "val/loss")[33]
    assert [(event.step, event.value) for event in curves.Scalars("train/loss")] == sorted(
        scalars(reference, "train/loss").items()
    )
    assert len(curves.Scalars("hparams/val_loss")) == 1
    assert f"tensorboard --logdir '{first}'\n" in shown
    # What is complete is not run again.
    assert cli(monkeypatch, *again) == 0
    assert f"the run in {first} is complete" in capfd.readouterr().out
    assert_same(checkpoint(first), resumed)


def test_a_run_under_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        options = ["precision=fp32", "~callbacks.samples", "trainer.max_steps=3", f"hydra.run.dir={tmp_path}/a"]
        assert signalled(monkeypatch, 2, signal.SIGHUP, *options) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert checkpoint(tmp_path / "a")["global_step"] == 3


def test_interruption_waits_for_the_whole_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accumulate = ["trainer.accumulate_grad_batches=3", "data.batch_size=96"]
    arguments = [*STEPS, *accumulate, "precision=fp32", "~callbacks.samples", f"hydra.run.dir={tmp_path}/a"]
    assert signalled(monkeypatch, 4, signal.SIGTERM, *arguments) == 143
    assert checkpoint(tmp_path / "a")["global_step"] == 2  # batches 4 to 6


def test_second_signal_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert signalled(monkeypatch, 5, signal.SIGINT, *STEPS, f"hydra.run.dir={tmp_path}/a", times=2) == 130
    shown = capfd.readouterr()
    assert "checkpoint       none was written yet" in shown.out
    assert f"trainer.max_steps=33 hydra.run.dir={tmp_path}/a\n" in shown.out  # anew
    assert "Traceback" not in shown.out + shown.err


def test_signal_in_the_last_step_does_not_disturb_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["trainer.max_steps=3", "~callbacks.samples", f"hydra.run.dir={tmp_path}/a"]
    assert signalled(monkeypatch, 3, signal.SIGTERM, *arguments) == 0
    assert list(scalars(tmp_path / "a", "val/loss")) == [3]


def test_sample_draws_the_same_grid_as_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fp32_run: Path, tmp_path: Path
) -> None:
    path, png = fp32_run / "checkpoints" / "last.ckpt", tmp_path / "grid.png"
    options = [f"ckpt_path={path}", f"output={png}", "sampler.steps=4", "device=cpu"]
    assert cli(monkeypatch, *options, program=sample) == 0
    shown = capfd.readouterr().out
    assert str(png) in shown
    assert "0 of 80" in shown
    assert np.array_equal(np.asarray(Image.open(png)), np.asarray(Image.open(fp32_run / "samples" / "step000024.png")))
    assert cli(monkeypatch, *options, "guidance=3", program=sample) == 0
    assert not np.array_equal(np.asarray(Image.open(png)), np.asarray(Image.open(fp32_run / "samples/step000024.png")))


def test_sample_flags_non_finite_images(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fp32_run: Path, tmp_path: Path
) -> None:
    saved = checkpoint(fp32_run)
    saved["averaged_state_dict"]["net.conv_out.bias"].fill_(math.nan)
    torch.save(saved, tmp_path / "bad.ckpt")
    options = [f"ckpt_path={tmp_path}/bad.ckpt", f"output={tmp_path}/bad.png", "sampler.steps=2"]
    assert cli(monkeypatch, *options, program=sample) == 0
    assert "80 of 80 samples (red" in capfd.readouterr().out
    assert tuple(np.asarray(Image.open(tmp_path / "bad.png"))[0, 0]) == NON_FINITE_COLOUR


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "ckpt_path is missing"),
        (["ckpt_path=nowhere.ckpt"], "there is no file"),
        (["ckpt_path=RUN", "weights=ema"], "Choices: averaged, raw"),
        (["ckpt_path=CONF"], "cannot be read as a checkpoint"),
        (["ckpt_path=RUN", "sampler.step=3"], "Did you mean 'steps'"),
    ],
)
def test_sample_refuses_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fp32_run: Path,
    options: list[str],
    expected: str,
) -> None:
    paths = {"RUN": str(fp32_run / "checkpoints" / "last.ckpt"), "CONF": str(ROOT / "conf" / "train.yaml")}
    given = [o.replace("RUN", paths["RUN"]).replace("CONF", paths["CONF"]) for o in options]
    assert cli(monkeypatch, *given, program=sample) == 2
    assert expected in capfd.readouterr().err


def test_fp16_runs_with_a_scaler_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick = ["trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1", "data.batch_size=8"]
    scale = ["precision=fp16", "precision.scaler.init_scale=1024", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *quick, *scale, f"hydra.run.dir={tmp_path}/run") == 0
    assert list(scalars(tmp_path / "run", "mixprec/loss_scale").values()) == [1024, 1024]
    assert list(scalars(tmp_path / "run", "mixprec/skipped_total").values()) == [0, 0]


def test_two_ranks_share_one_directory_and_weigh_samples_equally(tmp_path: Path) -> None:
    ranks = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "data.batch_size=100", "precision=fp32"]
    short = ["model=unet_tiny", "trainer.max_steps=12", "trainer.val_check_interval=5", "sampler.steps=3"]
    done = forked.run("-m", "recipes.train", *ranks, *short, f"hydra.run.dir={tmp_path}/ddp/run", timeout=120)
    assert done.returncode == 0, done.output[-3000:]
    assert "sync_dist" not in done.output
    assert done.output.count("validation loss") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["ddp"]
    assert [p.name for p in (tmp_path / "ddp").iterdir()] == ["run"]
    run = tmp_path / "ddp" / "run"
    assert not list(run.rglob("*.log"))
    assert len(list(run.rglob("*.png"))) == 3
    assert checkpoint(run)["global_step"] == 12
    assert list(scalars(run, "val/loss").values())[-1] == pytest.approx(
        reference_validation_loss(run, DigitsDataModule()), rel=1e-5
    )


def test_signal_to_one_rank_stops_both_after_the_same_step(tmp_path: Path) -> None:
    ranks = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "model=unet_tiny", "sampler.steps=2"]
    quick = ["precision=fp32", "trainer.val_check_interval=3"]
    started = forked.Forked("-m", "recipes.train", *ranks, *quick, f"hydra.run.dir={tmp_path}/run")
    try:
        for _ in range(600):
            if (tmp_path / "run" / "samples" / "step000006.png").exists():
                break
            time.sleep(0.1)
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=60)
    finally:
        started.kill()
    shown = started.output
    assert started.returncode == 128 + signal.SIGTERM, shown[-3000:]
    step = checkpoint(tmp_path / "run")["global_step"]
    assert step >= 6
    assert f"/checkpoints/last.ckpt, of step {step}\n" in shown
    assert shown.count("to continue") == 1
    assert "Traceback" not in shown


@pytest.mark.parametrize(("steps", "bound"), [(200, 0.6), pytest.param(400, 0.52, marks=pytest.mark.slow)])
def test_default_recipe_learns_the_digits(tmp_path: Path, steps: int, bound: float) -> None:
    # Where a CPU computes the default's bf16 in plain loops it would take half an hour.
    precision = ["precision=fp32"] if lacks_instructions(torch.bfloat16) else []
    length = [f"trainer.max_steps={steps}"] if steps != 400 else []
    done = subprocess.run(
        [sys.executable, "-m", "recipes.train", f"hydra.run.dir={tmp_path}/run", *precision, *length],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = dict(
        line.split(maxsplit=1) for line in done.stdout.splitlines()[-4:] if line.startswith(("steps", "curves"))
    )
    assert lines["steps"] == str(steps)
    assert lines["curves"] == f"tensorboard --logdir {tmp_path}/run"
    assert f"{tmp_path}/run/samples/step000{steps}.png" in done.stdout
    losses = list(scalars(tmp_path / "run", "val/loss").values())
    assert len(losses) == steps // 100
    assert losses[-1] <= bound
    assert f"{losses[-1]:.4f}" in done.stdout
    assert "train/loss" in done.stdout + done.stderr  # the progress bar

    # The samples are digits of the class asked for, in the eyes of a classifier that saw the training set alone.
    from sklearn.svm import SVC

    data = DigitsDataModule()
    data.setup()
    classifier = SVC(gamma=0.02).fit(data.train.images.flatten(1).numpy(), data.train.labels.numpy())
    assert classifier.score(data.val.images.flatten(1).numpy(), data.val.labels.numpy()) > 0.97
    net = UNet(1, 10, [32, 64])
    averaged = checkpoint(tmp_path / "run")["averaged_state_dict"]
    net.load_state_dict({k.removeprefix("net."): v for k, v in averaged.items()})
    images = draw_samples(net, EDM(), HeunSampler(), (1, 8, 8), per_class=10)
    assert classifier.score(images.flatten(1).numpy(), np.arange(100) % 10) > 0.85


def test_targets_in_yaml_are_checked_too() -> None:
    from recipes.config import ConfigError

    with pytest.raises(ConfigError, match=r"a\.b\.0\.sigma_mx.*Did you mean 'sigma_max'"):
        check_targets({"a": {"b": [{"_target_": "recipes.objective.EDM", "sigma_mx": 1}]}})
