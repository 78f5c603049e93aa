"""Samplers against diffusers' schedulers and against ODEs that can be solved on paper."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from sklearn.svm import SVC
from torch import Tensor

from recipes import command_line, sample, train
from recipes.config import build
from recipes.denoising import Objective
from recipes.dit import DiT
from recipes.objective import DDPM, EDM, FlowMatching
from recipes.sampler import DDIMSampler, DPMPP2MSampler, EulerSampler, HeunSampler, Sampler, draw_samples, guided

S = 0.5
"""Standard deviation of the data that the analytic network knows."""

SAMPLERS = [DDIMSampler, EulerSampler, HeunSampler, DPMPP2MSampler]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Tensors this small cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bent(x: Tensor) -> Tensor:
    """Bounded and not linear, so that nothing cancels by accident."""
    return torch.tanh(x) + 0.3 * torch.cos(2 * x)


class Network:
    """Raw network whose output is an explicit function of its input and noise level."""

    def __call__(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        return bent(x) * (1 + 0.5 * torch.sin(c_noise.reshape(-1, 1, 1, 1)))


def noise(count: int = 4) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def ours(sampler: Sampler, objective: Objective, net: Any, start: Tensor) -> Tensor:
    labels = torch.zeros(len(start)).long()
    return sampler(lambda x, time: objective.denoise(net, x, time, labels), start, objective)


def loop(scheduler: Any, net: Any, x: Tensor, level: Any) -> Tensor:
    """diffusers' sampling loop; `level` turns its timestep into the network's noise level."""
    labels = torch.zeros(len(x)).long()
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out = net(scaled, torch.full((len(x),), float(level(t))), labels)
        x = scheduler.step(out, t, x).prev_sample
    return x


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert expected.abs().max() > 0.1
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max()))


VP = {"beta_schedule": "linear", "timestep_spacing": "trailing"}
"""Not the cosine schedule: diffusers computes its first beta's products in fp32, which its last step divides by."""


@pytest.mark.parametrize(
    ("prediction", "theirs", "zero_snr"),
    [("epsilon", "epsilon", False), ("v", "v_prediction", False), ("v", "v_prediction", True), ("x0", "sample", True)],
)
def test_ddim_is_diffusers_ddim(prediction: Any, theirs: str, zero_snr: bool) -> None:
    scheduler = diffusers.DDIMScheduler(
        **VP, prediction_type=theirs, rescale_betas_zero_snr=zero_snr, clip_sample=False
    )
    scheduler.set_timesteps(10)
    objective = DDPM(prediction, "linear", zero_snr=zero_snr)
    expected = loop(scheduler, Network(), noise(), lambda t: float(t) / 1000)
    assert [int(t) for t in scheduler.timesteps] == [int(t) for t in objective.sampling_times(10)[:-1]]
    assert_near(ours(DDIMSampler(10), objective, Network(), noise()), expected)


@pytest.mark.parametrize(("prediction", "theirs"), [("epsilon", "epsilon"), ("v", "v_prediction")])
@pytest.mark.parametrize(
    ("sampler", "name"),
    [(EulerSampler, "EulerDiscreteScheduler"), (HeunSampler, "HeunDiscreteScheduler")],
)
def test_ode_solvers_are_diffusers_discrete_ones(prediction: Any, theirs: str, sampler: Any, name: str) -> None:
    options = {"beta_start": 1e-4, "beta_end": 0.02, "prediction_type": theirs} | VP
    scheduler = getattr(diffusers, name)(**options)
    scheduler.set_timesteps(10)
    objective = DDPM(prediction, "linear")
    scale, _ = objective.ode(torch.tensor(objective.sampling_times(10)).double())
    start = noise() * float((1 - scale[0].square()).sqrt() / scale[0])  # theirs starts from x / alpha
    expected = loop(scheduler, Network(), start, lambda t: float(t) / 1000)
    assert_near(ours(sampler(10), objective, Network(), noise()), expected)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_dpmpp_is_diffusers_dpmsolver(prediction: Any) -> None:
    theirs = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}[prediction]
    scheduler = diffusers.DPMSolverMultistepScheduler(**VP, prediction_type=theirs, final_sigmas_type="zero")
    scheduler.set_timesteps(10)
    objective = DDPM(prediction, "linear")
    expected = loop(scheduler, Network(), noise(), lambda t: float(t) / 1000)
    assert_near(
        ours(DPMPP2MSampler(10), objective, Network(), noise() / float(objective.path(torch.tensor([999.0]))[1])),
        expected,
    )


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (EulerSampler, "EDMEulerScheduler"),
        (DDIMSampler, "EDMEulerScheduler"),
        (DPMPP2MSampler, "EDMDPMSolverMultistepScheduler"),
    ],
)
def test_edm_samplers_are_diffusers(sampler: Any, name: str) -> None:
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(20)
    expected = loop(scheduler, Network(), noise() * 80, float)  # its timesteps are ln(sigma) / 4
    assert_near(ours(sampler(20), EDM(), Network(), noise()), expected)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("sampler", [EulerSampler, DDIMSampler])
def test_euler_is_diffusers_flow_matching(sampler: Any, shift: float) -> None:
    objective = FlowMatching(shift=shift)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - i / 10 for i in range(10)])
    torch.testing.assert_close(scheduler.sigmas, torch.tensor(objective.sampling_times(10)), rtol=0, atol=1e-6)
    expected = loop(scheduler, Network(), noise(), lambda t: float(t) / 1000)
    assert_near(ours(sampler(10), objective, Network(), noise()), expected)


def test_heun_on_flow_matching_is_the_textbook_method() -> None:
    """In float64, with the velocity itself."""
    x = noise().double()

    def velocity(x: Tensor, t: float) -> Tensor:
        return bent(x) * (1 + 0.5 * math.sin(t))

    for i in range(10):
        t, s = 1 - i / 10, 1 - (i + 1) / 10
        here = velocity(x, t)
        after = x + (s - t) * here
        x = after if i == 9 else x + (s - t) * (here + velocity(after, s)) / 2
    assert_near(ours(HeunSampler(10), FlowMatching(), Network(), noise()), x)


def gaussian(objective: Objective) -> Any:
    """The perfect denoiser of data ~ N(0, S²): D = α S² x / (α² S² + σ²)."""

    def denoise(x: Tensor, time: Tensor) -> Tensor:
        alpha, sigma = (each.reshape(-1, 1, 1, 1) for each in objective.path(time))
        return alpha * S**2 * x / ((alpha * S) ** 2 + sigma**2)

    return denoise


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("objective", [EDM(), DDPM("v", "linear"), DDPM("v", "cosine", zero_snr=True), FlowMatching()])
def test_samplers_solve_the_ode_of_gaussian_data(sampler: Any, objective: Objective) -> None:
    """Its solution scales noise by S / sqrt(α² S² + σ²) at the start; the error falls as the order says."""
    if sampler in (EulerSampler, HeunSampler) and getattr(objective, "prediction", "") == "v":
        if objective.path(torch.tensor([999.0]))[0] == 0:
            with pytest.raises(ValueError, match=r"sampler=ddim or sampler=dpmpp_2m.*zero_snr=false"):
                sampler().check(objective)
            return
    alpha, sigma = (float(each) for each in objective.path(torch.tensor(objective.sampling_times(50)[:1])))
    exact = noise() * sigma * S / math.sqrt((alpha * S) ** 2 + sigma**2)
    errors = []
    for steps in (50, 200):
        images = sampler(steps)(gaussian(objective), noise(), objective)
        errors.append(float((images - exact).norm() / exact.norm()))
    second_order = sampler in (HeunSampler, DPMPP2MSampler)
    assert errors[0] < (0.01 if second_order else 0.06)
    assert errors[1] < (0.0015 if second_order else 0.016)
    assert errors[1] < errors[0] / 2.4


def test_an_objective_without_zero_snr_is_not_told_to_leave_it_out() -> None:
    class Straight(EDM):
        def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
            sigma = time / self.sigma_max
            return 1 - sigma, sigma

    with pytest.raises(ValueError, match=r"Choose sampler=ddim or sampler=dpmpp_2m\.$"):
        EulerSampler().check(Straight())


def test_ddim_and_euler_take_the_same_steps() -> None:
    for objective in (EDM(), DDPM("v", "linear"), FlowMatching()):
        results = [ours(sampler(12), objective, Network(), noise()) for sampler in (DDIMSampler, EulerSampler)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_network_is_called_as_often_as_said(sampler: Any) -> None:
    calls = []

    def denoise(x: Tensor, time: Tensor) -> Tensor:
        assert x.dtype == time.dtype == torch.float32
        assert time.shape == (4,)
        calls.append(float(time[0]))
        return torch.zeros_like(x)

    sampler(steps=6)(denoise, noise().half(), FlowMatching())
    assert len(calls) == (11 if sampler is HeunSampler else 6)
    assert min(calls) > 0


def test_estimates_are_clipped_after_guidance_but_not_hidden() -> None:
    labels = torch.tensor([1, 2, 3])
    values = torch.tensor([0.9, math.inf, math.nan])

    def net(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        return torch.where(labels == 10, 0.5, values).reshape(-1, 1, 1, 1).expand_as(x)

    x, time = torch.zeros(3, 1, 2, 2), torch.full((3,), 500.0)
    for clip, expected in ((1.0, 1.0), (None, 0.5 + 2 * 0.4)):
        clean = guided(DDPM("x0", clip=clip), net, labels, 10, 2.0)(x, time)
        assert float(clean[0, 0, 0, 0]) == pytest.approx(expected)
        assert clean[1].isinf().all()
        assert clean[2].isnan().all()


@pytest.mark.parametrize("objective", [EDM(), DDPM(), DDPM("v", zero_snr=True), DDPM("x0"), FlowMatching()])
def test_an_untrained_network_gives_finite_samples_of_every_class(objective: Objective) -> None:
    net = DiT(1, 10, 8)
    for sampler in SAMPLERS:
        if objective.path(torch.tensor([999.0]))[0] == 0 and sampler in (EulerSampler, HeunSampler):
            continue
        images = draw_samples(net, objective, sampler(steps=4), (1, 8, 8), per_class=1, guidance=2.0)
        assert images.shape == (10, 1, 8, 8)
        assert images.isfinite().all()
        assert net.training


# The command line


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str, program: Any = train) -> int:
    monkeypatch.setattr(sys, "argv", [program.__file__, *arguments])
    try:
        command_line.run(program.main, program.__name__.rpartition(".")[2])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


SHORT = ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=2", "model=dit_tiny", "logger=none"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["objective=ddpm_v", "sampler=heun"], ["HeunSampler", "Choose sampler=ddim or sampler=dpmpp_2m"]),
        (["objective=ddpm", "sampler=ddim", "sampler.steps=1001"], ["sampler.steps=1001", "1000 timesteps"]),
        (["sampler=dimm"], ["Did you mean 'ddim'", "ddim, dpmpp_2m, euler, heun"]),
        (["objective.weighting=minsnr"], ["objective.weighting=minsnr", "'min_snr'"]),
        (["objective=ddpm", "objective.prediction=w"], ["objective.prediction=w", "'epsilon' or 'v' or 'x0'"]),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    expected: list[str],
) -> None:
    assert cli(monkeypatch, *SHORT, *options, f"hydra.run.dir={tmp_path}/run") == 2
    shown = capfd.readouterr()
    assert all(text in shown.err for text in expected), shown.err
    assert "Traceback" not in shown.err
    assert not [*tmp_path.rglob("*.ckpt")]


def test_grid_and_sample_use_the_sampler_that_is_configured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["objective=ddpm_v", "sampler=dpmpp_2m", "sampler.steps=8", "callbacks.samples.per_class=1"]
    assert cli(monkeypatch, *SHORT, *options, f"hydra.run.dir={tmp_path}/run") == 0
    again = [f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt", f"output={tmp_path}/grid.png", "per_class=1"]
    assert cli(monkeypatch, *again, "sampler=dpmpp_2m", "sampler.steps=8", "device=cpu", program=sample) == 0
    grid = (tmp_path / "run" / "samples" / "step000002.png").read_bytes()
    assert (tmp_path / "grid.png").read_bytes() == grid
    assert cli(monkeypatch, *again, "sampler=ddim", "sampler.steps=8", "device=cpu", program=sample) == 0
    assert (tmp_path / "grid.png").read_bytes() != grid
    capfd.readouterr()
    assert cli(monkeypatch, *again, "sampler=euler", program=sample) == 2
    assert "Choose sampler=ddim or sampler=dpmpp_2m" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "bound"), [("digits_unet", 0.52), ("digits_ddpm", 0.18), ("digits_flow", 0.41)])
def test_every_objective_learns_the_digits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experiment: str, bound: float
) -> None:
    """165 k parameters, 400 steps in bf16: the loss, and what an SVM that saw real digits makes of 200 samples."""
    options = [f"experiment={experiment}", "model.block_out_channels=[16,32]", "callbacks.samples.per_class=1"]
    assert cli(monkeypatch, *SHORT[:2], *options, f"hydra.run.dir={tmp_path}/run") == 0
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    best = next(state for name, state in saved["callbacks"].items() if "'monitor': 'val/loss'" in name)
    assert float(best["current_score"]) <= bound

    net, objective, sampler, data = (build(saved["recipe"], part) for part in ("model", "objective", "sampler", "data"))
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved["averaged_state_dict"].items()})
    data.setup()
    classifier = SVC(gamma=0.02).fit(data.train.images.flatten(1).numpy(), data.train.labels.numpy())
    for guidance, accuracy in ((1.0, 0.85), (2.0, 0.97)):
        images = draw_samples(net, objective, sampler, data.image_shape, per_class=20, guidance=guidance)
        assert classifier.score(images.flatten(1).numpy(), torch.arange(200).numpy() % 10) >= accuracy
