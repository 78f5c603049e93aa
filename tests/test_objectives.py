"""Objectives against plain float64 formulas: schedules, targets, weights, densities, and their dtypes in 16 bits."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from recipes.denoising import Objective, squared_error
from recipes.density import log_normal, logit_normal, stratify, unit_times
from recipes.objective import DDPM, EDM, FlowMatching
from recipes.randomness import keyed_generator, validation_draws
from recipes.schedule import Schedule, zero_terminal_snr
from recipes.weighting import weights

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml"))
HALVES = [torch.float16, torch.bfloat16]


def build(option: str, **arguments: Any) -> Objective:
    return instantiate(OmegaConf.load(ROOT / "conf" / "objective" / f"{option}.yaml"), _convert_="all", **arguments)


def normals(count: int) -> Tensor:
    return torch.special.ndtri((torch.arange(count).double() + 0.5) / count).float()


# Schedules


@pytest.mark.parametrize(("name", "theirs"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_schedule_is_diffusers(name: Any, theirs: str, zero_snr: bool) -> None:
    expected = diffusers.DDIMScheduler(beta_schedule=theirs, rescale_betas_zero_snr=zero_snr).alphas_cumprod
    alpha, sigma = Schedule(name, 1000, zero_snr)(torch.arange(1000).double())
    assert alpha.dtype == torch.float64
    torch.testing.assert_close(alpha.square().float(), expected, rtol=2e-3, atol=2e-6)  # theirs is computed in fp32
    torch.testing.assert_close(alpha.square() + sigma.square(), torch.ones(1000).double(), rtol=0, atol=1e-15)


def test_linear_schedule_is_the_product_of_its_betas() -> None:
    alpha, sigma = Schedule("linear", 1000, False)(torch.arange(-1, 1000).double())
    product = 1.0
    assert (float(alpha[0]), float(sigma[0])) == (1.0, 0.0)  # timestep -1
    for t in range(1000):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * t / 999)
        assert float(alpha[t + 1]) == pytest.approx(math.sqrt(product), rel=1e-12)
        assert float(sigma[t + 1]) == pytest.approx(math.sqrt(1 - product), rel=1e-9)


def test_zero_terminal_snr_keeps_the_first_and_ends_in_noise() -> None:
    alpha, sigma = Schedule("cosine", 1000, True)(torch.arange(1000).double())
    plain, _ = Schedule("cosine", 1000, False)(torch.arange(1000).double())
    assert float(alpha[-1]) == 0.0
    assert float(sigma[-1]) == 1.0
    assert float(alpha[0]) == pytest.approx(float(plain[0]), rel=1e-12)
    assert zero_terminal_snr(torch.tensor([0.5, 0.1]).double()).dtype == torch.float64


def test_tables_are_fp32_whatever_becomes_of_the_module() -> None:
    holder = torch.nn.Module()
    holder.objective = DDPM()  # type: ignore[assignment]
    holder.half()
    timesteps = torch.arange(1000)
    alpha, sigma = holder.objective.path(timesteps.float())  # type: ignore[operator]
    exact_alpha, exact_sigma = Schedule("cosine", 1000, False)(timesteps.double())
    assert alpha.dtype == sigma.dtype == torch.float32
    assert torch.equal(alpha, exact_alpha.float())
    assert torch.equal(sigma, exact_sigma.float())
    snr = (alpha / sigma).square()
    assert snr.isfinite().all()
    assert (snr.diff() < 0).all()
    assert not list(holder.buffers())


# Targets and preconditioning


@pytest.mark.parametrize("option", OPTIONS)
def test_denoising_the_target_gives_the_image(option: str) -> None:
    """D(x; F = target) = image: target, preconditioning and path are one another's inverses."""
    objective = build(option)
    images, noise = torch.randn(2, 64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    time = objective.times(normals(64))
    if option == "ddpm":
        time = time.clamp(max=990)  # epsilon tells little about the image at the very end, and fp32 even less
    target = objective.target(images, noise, time)
    noisy = objective.mix(images, noise, time)
    clean = objective.denoise(lambda *_: target, noisy, time, torch.zeros(64).long())
    torch.testing.assert_close(clean, images, rtol=0, atol=2e-4)
    # and the loss of the perfect prediction is zero, of a prediction off by 1 its weight
    assert objective.loss(lambda *_: target, images, torch.zeros(64).long(), time, noise).max() < 1e-10
    off = objective.loss(lambda *_: target + 1, images, torch.zeros(64).long(), time, noise)
    torch.testing.assert_close(off, objective.weight(time), rtol=1e-4, atol=0)


def reference(objective: Any, net: Any, y: Tensor, time: float, n: Tensor) -> float:
    """Loss of one sample in float64, from each paper's formulas; the image y and the noise n are float64."""
    if isinstance(objective, FlowMatching):
        x = (1 - time) * y + time * n
        return float((net(x, time) - (n - y)).square().mean())
    assert objective.prediction == "epsilon"  # the others are held to it by their targets, above
    alpha_bar = 1.0
    for t in range(int(time) + 1):
        u = [math.cos((s / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for s in (t, t + 1)]
        alpha_bar *= 1 - min(1 - u[1] / u[0], 0.999)
    x = math.sqrt(alpha_bar) * y + math.sqrt(1 - alpha_bar) * n
    return float((net(x, int(time) / 1000) - n).square().mean())


@pytest.mark.parametrize("option", ["ddpm", "flow"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("output", [torch.float32, *HALVES])
def test_loss_matches_float64_reference(option: str, autocast: bool, output: torch.dtype) -> None:
    objective = build(option)
    images, noise = torch.randn(2, 32, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    time = objective.times(normals(32))

    def net(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        assert x.dtype == c_noise.dtype == torch.float32
        return (torch.tanh(x) + c_noise.reshape(-1, 1, 1, 1)).to(output)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = objective.loss(net, images, torch.zeros(32).long(), time, noise)
    assert loss.dtype == torch.float32
    for i in range(32):
        expected = reference(
            objective, lambda x, c: torch.tanh(x) + c, images[i].double(), float(time[i]), noise[i].double()
        )
        assert float(loss[i]) == pytest.approx(expected, rel=2e-5 if output == torch.float32 else 2e-2)


@pytest.mark.parametrize(("zero_snr", "prediction"), [(False, "epsilon"), (True, "v"), (True, "x0")])
def test_predictions_are_those_of_the_papers(zero_snr: bool, prediction: Any) -> None:
    objective = DDPM(prediction, zero_snr=zero_snr)
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="squaredcos_cap_v2", rescale_betas_zero_snr=zero_snr, clip_sample=False
    )
    images, noise = torch.randn(2, 5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0, 250, 500, 900, 999])
    expected = {"epsilon": noise, "v": scheduler.get_velocity(images, noise, t), "x0": images}[prediction]
    torch.testing.assert_close(objective.target(images, noise, t.float()), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(
        objective.mix(images, noise, t.float()), scheduler.add_noise(images, noise, t), rtol=0, atol=2e-3
    )


# Weighting


def snr_weights(name: str, gamma: float, snr: float, relative: float) -> float:
    """Weight by definition: that of the image's error, divided by (prediction error)² per (image error)²."""
    image = min(snr, gamma) if name == "min_snr" else snr * gamma / (snr + gamma)
    return image / relative


@pytest.mark.parametrize("name", ["min_snr", "soft_min_snr"])
def test_weights_are_their_definition(name: Any) -> None:
    t = torch.arange(0, 999, 37).float()
    for prediction in ("epsilon", "v", "x0"):
        objective: Any = DDPM(prediction, weighting=name, gamma=3.0)
        alpha, sigma = objective.path(t.double())
        for weight, snr in zip(objective.weight(t).tolist(), (alpha / sigma).square().tolist(), strict=True):
            relative = {"epsilon": snr, "v": snr + 1, "x0": 1.0}[prediction]
            assert weight == pytest.approx(snr_weights(name, 3.0, snr, relative), rel=1e-4)
    unit = torch.linspace(0.01, 0.99, 30)
    flow = FlowMatching(weighting=name, gamma=3.0)
    for u, weight in zip(unit.tolist(), flow.weight(unit).tolist(), strict=True):
        assert weight == pytest.approx(snr_weights(name, 3.0, ((1 - u) / u) ** 2, 1 / u**2), rel=1e-4)
    sigmas = torch.logspace(-2.5, 1.9, 30)
    edm = EDM(weighting=name, gamma=3.0)
    for s, weight in zip(sigmas.tolist(), edm.weight(sigmas).tolist(), strict=True):
        c_out = s * 0.5 / math.sqrt(s**2 + 0.25)
        assert weight == pytest.approx(snr_weights(name, 3.0, 1 / s**2, 1 / c_out**2), rel=1e-4)


@pytest.mark.parametrize("name", ["none", "min_snr", "soft_min_snr"])
def test_weights_are_finite_where_snr_is_0_or_infinite(name: Any) -> None:
    for objective, ends in (
        (DDPM("v", zero_snr=True, weighting=name), [-1.0, 999.0]),
        (DDPM("x0", zero_snr=True, weighting=name), [-1.0, 999.0]),
        (DDPM("epsilon", weighting=name), [-1.0, 999.0]),
        (FlowMatching(weighting=name), [0.0, 1.0]),
    ):
        weight = objective.weight(torch.tensor(ends))
        assert weight.isfinite().all()
        assert (weight >= 0).all()
    # SNR 0 and infinity of each prediction, as (noise error, image error)
    inf, gamma = math.inf, 5.0
    for noise_error, image_error, expected in [
        (1.0, inf, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (inf, 1.0, gamma)
    ]:  # fmt: skip
        found = float(weights(name, gamma, torch.tensor(noise_error), torch.tensor(image_error)))
        assert found == (1.0 if name == "none" else expected)


def test_soft_weight_is_at_most_the_hard_one() -> None:
    t = torch.arange(0, 1000, 7).float()
    soft, hard = (DDPM("v", weighting=name).weight(t) for name in ("soft_min_snr", "min_snr"))
    assert (soft <= hard).all()
    assert (soft >= hard / 2 * (1 - 1e-6)).all()


# Densities


def test_densities_have_their_quantiles() -> None:
    normal = normals(9999)
    uniform = unit_times("uniform", normal, 0.0, 1.0)
    assert (uniform - (torch.arange(9999) + 0.5) / 9999).abs().max() < 1e-6
    logits = logit_normal(normal, -0.5, 1.5).double().logit()
    assert float(logits.mean()) == pytest.approx(-0.5, abs=1e-3)
    assert float(logits.std()) == pytest.approx(1.5, abs=5e-3)
    logs = log_normal(normal, -1.2, 1.2).double().log()
    assert float(logs.mean()) == pytest.approx(-1.2, abs=1e-3)
    assert float(logs.std()) == pytest.approx(1.2, abs=5e-3)


def test_uniform_timesteps_are_met_equally_often() -> None:
    counts = DDPM().times(normals(20_000)).long().bincount(minlength=1000)
    assert len(counts) == 1000
    assert counts.min() >= 19
    assert counts.max() <= 21


@pytest.mark.parametrize("option", OPTIONS)
def test_stratified_batches_cover_the_density(option: str) -> None:
    spread = []
    for stratified in (False, True):
        objective = build(option, stratified=stratified)
        # quantile of each time: the times of even quantiles below it
        even = objective.times(normals(4096)).sort().values
        batches = [objective.draw(64, keyed_generator(7, i)) for i in range(20)]
        places = [(torch.searchsorted(even, batch, right=True) / 4096).sort().values for batch in batches]
        expected = (torch.arange(64) + 0.5) / 64
        spread.append(float(torch.stack([(place - expected).abs().max() for place in places]).max()))
    assert spread[0] > 0.05
    assert spread[1] < 1.2 / 64


def test_each_stratified_time_is_in_its_own_interval() -> None:
    normal = torch.randn(8, generator=torch.Generator().manual_seed(0))
    quantiles = torch.special.ndtr(stratify(normal).double())
    expected = [(i + float(torch.special.ndtr(x.double()))) / 8 for i, x in enumerate(normal)]
    torch.testing.assert_close(quantiles, torch.tensor(expected).double(), rtol=0, atol=1e-6)
    assert stratify(torch.full((3,), 40.0)).isfinite().all()  # a quantile of 1


# Dtypes


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_everything_around_the_network_is_fp32(option: str, dtype: torch.dtype) -> None:
    objective = build(option, weighting="min_snr", stratified=True)
    images = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = []

    def net(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        seen.extend([x, c_noise])
        return x.to(dtype)

    with torch.autocast("cpu", dtype):
        time = objective.draw(8, torch.Generator().manual_seed(0))
        results = [
            time,
            objective.times(normals(8).to(dtype)),
            *objective.path(time.to(dtype)),
            *objective.preconditioning(time),
            *objective.errors(time),
            objective.weight(time),
            objective.mix(images, images, time),
            objective.target(images.float(), images.float(), time),
            objective.denoise(net, images, time, torch.zeros(8).long()),
            objective.loss(net, images, torch.zeros(8).long(), time, images),
        ]
    assert [r.dtype for r in [*results, *seen]] == [torch.float32] * len([*results, *seen])
    assert all(r.isfinite().all() for r in results)


def test_ddpm_gives_the_network_1000_levels() -> None:
    time = torch.arange(1000).float()
    with torch.autocast("cpu", torch.bfloat16):
        c_noise = DDPM().preconditioning(time)[3]
    assert len(c_noise.unique()) == 1000
    assert torch.equal((c_noise * 1000).round(), time)


@pytest.mark.parametrize("dtype", HALVES)
def test_large_errors_stay_finite(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        loss = squared_error(torch.full((2, 1, 4, 4), 300.0, dtype=dtype), torch.zeros(2, 1, 4, 4))
    assert (loss.dtype, loss.tolist()) == (torch.float32, [90000.0, 90000.0])


@pytest.mark.parametrize("option", OPTIONS)
def test_sampling_times_fall_from_noise_to_image(option: str) -> None:
    objective = build(option)
    for steps in (1, 7, 50):
        times = objective.sampling_times(steps)
        assert len(times) == steps + 1
        assert all(a > b for a, b in pairwise(times))
        alpha, sigma = objective.path(torch.tensor(times).double())
        assert (float(alpha[-1]), float(sigma[-1])) == (1.0, 0.0)
        assert sigma[0] > 0.999


@pytest.mark.parametrize("option", OPTIONS)
def test_validation_times_belong_to_the_sample(option: str) -> None:
    objective = build(option, stratified=True)
    whole = objective.times(validation_draws(torch.arange(90), (1, 2, 2))[1])
    parts = [objective.times(validation_draws(rows, (1, 2, 2))[1]) for rows in torch.arange(90).split(7)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=0)  # a shorter vector may round otherwise


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPM("eps"), "prediction='eps' is unknown. Choices: epsilon, v, x0"),  # type: ignore[arg-type]
        (lambda: DDPM(schedule="cosin"), "schedule='cosin' is unknown. Choices: linear, cosine"),  # type: ignore[arg-type]
        (lambda: DDPM(zero_snr=True), "prediction='epsilon'.*Choose prediction='v' or prediction='x0'"),
        (lambda: DDPM(timesteps=1), "timesteps=1 must be at least 2"),
        (lambda: DDPM(density="normal"), "density='normal' is unknown. Choices: uniform, logit_normal"),  # type: ignore[arg-type]
        (lambda: EDM(weighting="snr"), "weighting='snr' is unknown. Choices: none, min_snr, soft_min_snr"),  # type: ignore[arg-type]
        (lambda: EDM(gamma=0), "gamma=0 must be positive"),
        (lambda: EDM(sigma_min=2, sigma_max=1), "0 < sigma_min < sigma_max"),
        (lambda: FlowMatching(shift=0), "shift=0 must be positive"),
        (lambda: FlowMatching(label_dropout=2), "label_dropout=2 must be a probability"),
        (lambda: DDPM().sampling_times(1001), "steps=1001 are more than the 1000 timesteps"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
