"""Exported folders: what diffusers loads from them computes what the recipes do, and does not need to be installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file
from torch import Tensor

from recipes import command_line, export
from recipes.objective import EDM, FlowMatching
from recipes.sampler import DDIMSampler, DPMPP2MSampler, EulerSampler, guided

ROOT = Path(__file__).resolve().parent.parent
UNET = {"_target_": "recipes.unet.UNet", "in_channels": 1, "num_classes": 10, "block_out_channels": [8, 16]}
ADM = UNET | {"attention_levels": [1], "scale_shift": True, "resample": "residual", "layers_per_block": 2}
THEIRS = {
    "_target_": "recipes.diffusers_unet2d.DiffusersUNet2D",
    "num_classes": 10,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
}
DIT = {"_target_": "recipes.dit.DiT", "in_channels": 1, "num_classes": 10, "image_size": 8, "hidden_size": 16}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Tensors this small cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def objective(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"recipes.objective.{name}", **options}


def make_checkpoint(folder: Path, model: dict[str, Any], objective: dict[str, Any]) -> tuple[Any, Any]:
    """A checkpoint as `recipes.train` writes it, of a network in which nothing is zero; its parts."""
    net = instantiate(model, _convert_="all")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    recipe = {
        "model": model,
        "objective": objective,
        "sampler": {"_target_": "recipes.sampler.DDIMSampler"},
        "data": {"_target_": "recipes.data.DigitsDataModule"},
    }
    saved = {"state_dict": {k: v * 0 for k, v in state.items()}, "averaged_state_dict": state}
    (folder / "checkpoints").mkdir()
    torch.save(saved | {"recipe": recipe, "global_step": 7, "callbacks": {}}, folder / "checkpoints" / "last.ckpt")
    return net.eval(), instantiate(objective, _convert_="all")


def cli(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    given = [f"ckpt_path={folder}/checkpoints/last.ckpt", f"output={folder}/out", *arguments]
    monkeypatch.setattr(sys, "argv", [export.__file__, *given])
    try:
        command_line.run(export.main, "export")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def loop(folder: Path, scheduler: Any, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """As recipe.json says it."""
    unet = diffusers.UNet2DModel.from_pretrained(folder / "unet")
    assert {p.dtype for p in unet.parameters()} == {torch.float32}
    factor = json.loads((folder / "recipe.json").read_text())["timestep_factor"]
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        with torch.no_grad():
            x = scheduler.step(unet(scaled, t * factor, class_labels=labels).sample, t, x, **options).prev_sample
    return x


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of pictures in [-1, 1], or of what the network makes of them if it is more."""
    assert found.isfinite().all()
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


NOISE = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([3, 0, 10])


def ours(net: Any, objective: Any, sampler: Any) -> Tensor:
    with torch.no_grad():
        return sampler(guided(objective, net, LABELS, 10), NOISE, objective)


@pytest.mark.parametrize("model", [UNET, ADM, THEIRS])
@pytest.mark.parametrize(
    ("parts", "times"),
    [
        (objective("DDPM"), [0.0, 500.0, 999.0]),
        (objective("EDM"), [0.01, 0.5, 80.0]),
        (objective("FlowMatching"), [0.001, 0.5, 1.0]),
    ],
)
def test_one_call_of_the_denoiser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: dict[str, Any], parts: dict[str, Any], times: list[float]
) -> None:
    """Averaged weights, which differ from the raw ones; labels, and the one that means none."""
    net, own = make_checkpoint(tmp_path, model, parts)
    assert cli(monkeypatch, tmp_path) == 0
    unet = diffusers.UNet2DModel.from_pretrained(tmp_path / "out" / "unet")
    factor = json.loads((tmp_path / "out" / "recipe.json").read_text())["timestep_factor"]
    time = torch.tensor(times)
    _, _, c_in, c_noise = own.preconditioning(time)
    x = NOISE * c_in.reshape(-1, 1, 1, 1)
    theirs_t = {"DDPM": time, "EDM": c_noise, "FlowMatching": time * 1000}[type(own).__name__]
    with torch.no_grad():
        assert_near(unet(x, theirs_t * factor, class_labels=LABELS).sample, net(x, c_noise, LABELS))
    assert factor == (1000 if type(own).__name__ == "EDM" else 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": None, "prediction": "v"},
        {"prediction": "v", "zero_snr": True, "schedule": "linear"},
        {"prediction": "x0", "schedule": "linear", "clip": 0.5},
    ],
)
def test_ddpm_samples_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]) -> None:
    """The exported scheduler's settings, in the hands of the one that adds no noise; clipped as ours does."""
    net, own = make_checkpoint(tmp_path, UNET, objective("DDPM", **options))
    assert cli(monkeypatch, tmp_path) == 0
    scheduler = diffusers.DDIMScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    scheduler.set_timesteps(10)
    found = loop(tmp_path / "out", scheduler, NOISE, LABELS, use_clipped_model_output=True)
    # Ours starts from x = sigma · noise, theirs from noise.
    start = float(own.path(torch.tensor([999.0]))[1])
    with torch.no_grad():
        expected = DDIMSampler(10)(guided(own, net, LABELS, 10), NOISE / start, own)
    assert_near(found, expected)


def test_ddpm_scheduler_steps_with_our_alphas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stochastic scheduler that is exported has our noise schedule at every timestep."""
    _, own = make_checkpoint(tmp_path, UNET, objective("DDPM", timesteps=500, prediction="v", zero_snr=True))
    assert cli(monkeypatch, tmp_path) == 0
    scheduler = diffusers.DDPMScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    alpha, _ = own.path(torch.arange(500.0))
    torch.testing.assert_close(scheduler.alphas_cumprod.sqrt(), alpha, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["timestep_factor"] == 2  # time_scale / timesteps


@pytest.mark.parametrize(
    ("sampler", "name"), [(EulerSampler, "EDMEulerScheduler"), (DPMPP2MSampler, "EDMDPMSolverMultistepScheduler")]
)
def test_edm_samples_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sampler: Any, name: str) -> None:
    options = {"sigma_data": 0.6, "sigma_max": 40.0, "sigma_min": 0.01, "rho": 5.0}
    net, own = make_checkpoint(tmp_path, UNET, objective("EDM", **options))
    assert cli(monkeypatch, tmp_path) == 0
    scheduler = getattr(diffusers, name).from_pretrained(tmp_path / "out" / "scheduler")
    scheduler.set_timesteps(12)
    assert_near(loop(tmp_path / "out", scheduler, NOISE * 40, LABELS), ours(net, own, sampler(12)))


@pytest.mark.parametrize("scale", [1000.0, 500.0])
def test_flow_samples_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: float) -> None:
    net, own = make_checkpoint(tmp_path, UNET | {"time_scale": scale}, objective("FlowMatching", shift=3.0))
    assert cli(monkeypatch, tmp_path) == 0
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "out" / "scheduler")
    scheduler.set_timesteps(sigmas=[1 - i / 10 for i in range(10)])
    assert_near(loop(tmp_path / "out", scheduler, NOISE, LABELS), ours(net, own, EulerSampler(10)))


@pytest.mark.parametrize(("label", "row"), [("3", 3), ("none", 10)])
def test_a_folded_label_runs_in_the_stock_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, label: str, row: int
) -> None:
    net, _ = make_checkpoint(tmp_path, UNET, objective("DDPM"))
    assert cli(monkeypatch, tmp_path, f"label={label}") == 0
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert type(pipeline).__name__ == "DDPMPipeline"
    assert type(pipeline.scheduler).__name__ == "DDPMScheduler"
    with torch.no_grad():
        found = pipeline.unet(NOISE, torch.tensor([5, 300, 999])).sample
        assert_near(found, net(NOISE, torch.tensor([0.005, 0.3, 0.999]), torch.full((3,), row)))
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=2, num_inference_steps=3, output_type="np").images.shape == (2, 8, 8, 1)


def test_a_dit_is_exported_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And said to be no model of diffusers."""
    net, _ = make_checkpoint(tmp_path, DIT, objective("FlowMatching"))
    assert cli(monkeypatch, tmp_path) == 0
    assert "No class of diffusers computes recipes.dit.DiT" in capfd.readouterr().out
    files = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert files == ["network/config.json", "network/diffusion_pytorch_model.safetensors", "recipe.json"]
    again = instantiate(json.loads((tmp_path / "out" / "network" / "config.json").read_text()))
    again.load_state_dict(load_file(tmp_path / "out" / "network" / "diffusion_pytorch_model.safetensors"), strict=True)
    with torch.no_grad():
        assert torch.equal(again(NOISE, torch.ones(3), LABELS), net(NOISE, torch.ones(3), LABELS))


class Tempered(FlowMatching):
    """Of a user: only other training times, which no sampler sees."""

    def times(self, normal: Tensor) -> Tensor:
        return torch.sigmoid(normal * 2)


class Straight(EDM):
    """Of a user: other noise levels in sampling."""

    def sampling_times(self, steps: int) -> list[float]:
        return [self.sigma_max * (1 - i / steps) for i in range(steps + 1)]


def test_an_objective_of_ones_own_is_exported_only_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name, status in (("Tempered", 0), ("Straight", 2)):
        (tmp_path / name).mkdir()
        make_checkpoint(tmp_path / name, UNET, {"_target_": f"test_export.{name}"})
        assert cli(monkeypatch, tmp_path / name) == status
    assert "Straight has sampling_times of its own, which no scheduler of diffusers has" in capfd.readouterr().err
    scheduler = json.loads((tmp_path / "Tempered" / "out" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert not (tmp_path / "Straight" / "out").exists()


@pytest.mark.parametrize("model", [UNET, THEIRS])
def test_diffusers_need_not_be_installed(tmp_path: Path, model: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, model, objective("DDPM"))
    script = (
        "import sys; sys.modules['diffusers'] = None\n"
        "from recipes import command_line, export\n"
        "command_line.run(export.main, 'export')"
    )
    arguments = [f"ckpt_path={tmp_path}/checkpoints/last.ckpt", f"output={tmp_path}/out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    diffusers.UNet2DModel.from_pretrained(tmp_path / "out" / "unet")


def test_a_folder_appears_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, UNET, objective("EDM"))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_file", fails)
        assert cli(patch, tmp_path) == 1
    assert "No space left" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]
    assert cli(monkeypatch, tmp_path) == 0
    capfd.readouterr()
    assert cli(monkeypatch, tmp_path) == 2
    assert "exists already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["label=12"], "label=12: the data have classes 0 to 9"),
        (["label=non"], "label=none for a network that ignores classes"),
        (["weights=emma"], "Choices: averaged, raw, posthoc"),
        (["weights=posthoc"], "Write sigma_rel=NUMBER"),
        (["sigma_rel=0.1"], "sigma_rel=0.1 is for weights=posthoc"),
        (["wieghts=raw"], "Did you mean 'weights'"),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    expected: str,
) -> None:
    make_checkpoint(tmp_path, UNET, objective("EDM"))
    assert cli(monkeypatch, tmp_path, *options) == 2
    assert expected in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
