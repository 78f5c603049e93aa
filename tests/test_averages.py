"""Profiles of averages, their snapshots, and averages made of these, against plain loops in float64."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import SaveAfter, TinyModule, assert_same, loader, make_batches, make_module, make_trainer, snapshot

from lightning_mixprec import ConstantDecay, MasterWeightAveraging, MasterWeightPrecision, PowerFunction
from lightning_mixprec.posthoc import inner_product, reconstruct, solve_weights
from lightning_mixprec.profiles import gamma_of
from lightning_mixprec.snapshots import Snapshot, read_snapshots, snapshot_files, write_snapshot

WIDTHS = [0.02, 0.05, 0.08, 0.1, 0.2, 0.28]


@lru_cache
def exponent(sigma_rel: float) -> float:
    """As in the paper: the largest root of the cubic."""
    inverse = sigma_rel**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def power_decay(sigma_rel: float, t: int) -> float:
    return (1 - 1 / t) ** (exponent(sigma_rel) + 1)


def warm_decay(decay: float, t: int) -> float:
    return min(decay, t / (9 + t))  # the t-th update, from 1


class History(L.Callback):
    """Weights at the start and after every batch that made a step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights.append(snapshot(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.precision_plugin.step_was_skipped:
            self.weights.append(snapshot(pl_module))


def averaged(history: list[dict[str, torch.Tensor]], decay: Any) -> dict[str, torch.Tensor]:
    """The loop that all of this is about."""
    total = {name: value.double() for name, value in history[0].items()}
    for t, weights in enumerate(history[1:], start=1):
        for name in total:
            total[name] = decay(t) * total[name] + (1 - decay(t)) * weights[name].double()
    return total


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-split"])
def test_profiles_follow_the_masters_on_real_steps_only(precision: str) -> None:
    """T57, T58: three at once; two of twelve batches overflow."""
    compute, _, masters = precision.partition("-")
    ema, history = (
        MasterWeightAveraging(
            profiles={
                "warm": ConstantDecay(0.6, warmup=True),
                "short": PowerFunction(0.05),
                "long": PowerFunction(0.2),
                "constant": ConstantDecay(0.9),
            }
        ),
        History(),
    )
    plugin = MasterWeightPrecision(compute, masters=masters or "fp32")  # type: ignore[arg-type]
    make_trainer(plugin, callbacks=[ema, history]).fit(make_module(bad={0, 7}), loader(make_batches(12)))
    assert ema.n_averaged == plugin.real_steps == 10
    assert_near(ema.averages, averaged(history.weights, lambda t: warm_decay(0.6, t)), 1e-6)
    assert_near(ema.profile_averages["short"], averaged(history.weights, lambda t: power_decay(0.05, t)), 1e-6)
    assert_near(ema.profile_averages["long"], averaged(history.weights, lambda t: power_decay(0.2, t)), 1e-6)
    assert_near(ema.profile_averages["constant"], averaged(history.weights, lambda t: 0.9), 1e-6)


@pytest.mark.parametrize("sigma_rel", WIDTHS)
def test_a_power_function_has_the_width_that_it_is_named_after(sigma_rel: float) -> None:
    """Weight of every step by the loop itself; mean and standard deviation of the step over these weights."""
    weights = np.zeros(20_000)
    for n in range(len(weights)):
        share = PowerFunction(sigma_rel).share(n)
        weights *= 1 - share
        weights[n] += share
    place = (np.arange(len(weights)) + 0.5) / len(weights)
    mean = (weights * place).sum()
    assert weights.sum() == pytest.approx(1)
    assert math.sqrt((weights * (place - mean) ** 2).sum()) == pytest.approx(sigma_rel, rel=1e-3)
    assert gamma_of(sigma_rel) == pytest.approx(exponent(sigma_rel), rel=1e-9)


@pytest.mark.parametrize(("one", "other"), [((40, 0.05), (90, 0.1)), ((90, 0.05), (40, 0.1)), ((50, 0.2), (50, 0.02))])
def test_inner_products_are_integrals(one: Any, other: Any) -> None:
    tau = (np.arange(1_000_000) + 0.5) / 10_000

    def profile(t: float, sigma_rel: float) -> Any:
        gamma = exponent(sigma_rel)
        return np.where(tau <= t, (gamma + 1) / t * (tau / t) ** gamma, 0)

    integral = (profile(*one) * profile(*other)).sum() / 10_000
    arguments = [torch.tensor(float(v), dtype=torch.float64) for t, s in (one, other) for v in (t, gamma_of(s))]
    assert float(inner_product(*arguments)) == pytest.approx(integral, rel=1e-4)


def test_weights_are_the_least_squares_solution() -> None:
    """The same problem on a fine grid of steps, by another solver."""
    times, widths = [10, 10, 20, 20, 30, 30, 40, 40], [0.05, 0.1] * 4
    grid = 40_000
    tau = (np.arange(grid) + 0.5) * 40 / grid

    def profile(t: float, sigma_rel: float) -> Any:
        gamma = exponent(sigma_rel)
        return np.where(tau <= t, (gamma + 1) / t * (tau / t) ** gamma, 0)

    basis = np.stack([profile(t, s) for t, s in zip(times, widths, strict=True)], axis=1)
    for sigma_rel in (0.07, 0.15):
        wanted = profile(40, sigma_rel)
        expected, *_ = np.linalg.lstsq(basis, wanted, rcond=None)
        weights, distance = solve_weights(times, widths, 40, sigma_rel)
        np.testing.assert_allclose(weights.numpy(), expected, rtol=0, atol=1e-3)
        left = np.linalg.norm(basis @ expected - wanted) / np.linalg.norm(wanted)
        assert distance == pytest.approx(left, abs=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 0.0), ("fp16", 1e-3)])
def test_an_average_made_afterwards_is_the_one_that_would_have_been_tracked(
    tmp_path: Any, dtype: Any, tolerance: float
) -> None:
    """200 steps; lengths between, below and above the two that are stored, one of these too."""
    ema = MasterWeightAveraging(
        profiles={"long": PowerFunction(0.1), "short": PowerFunction(0.05)},
        snapshot_every=5,
        snapshot_dir=tmp_path,
        snapshot_dtype=dtype,
    )
    history = History()
    module = make_module(bad={3, 77})
    make_trainer(MasterWeightPrecision("bf16"), callbacks=[ema, history]).fit(module, loader(make_batches(202)))
    assert [path.name for path in snapshot_files(tmp_path)] == [f"average_{n:09d}.pt" for n in range(5, 201, 5)]
    stored = torch.load(snapshot_files(tmp_path)[-1], weights_only=True)["averages"]["long"]
    assert {v.dtype for v in stored.values()} == {torch.float32 if dtype == "fp32" else torch.float16}
    spread = max(
        float((a - b).abs().max()) for a, b in zip(history.weights[0].values(), snapshot(module).values(), strict=True)
    )
    assert spread > 0.2  # the weights have moved, so that lengths differ
    for sigma_rel in (0.05, 0.04, 0.07, 0.1, 0.15, 0.2):
        average, distance = reconstruct(read_snapshots(tmp_path), sigma_rel)
        expected = averaged(history.weights, lambda t, s=sigma_rel: power_decay(s, t))
        assert distance < 0.03
        assert_near(average, expected, 1e-5 + tolerance + 0.02 * spread * distance**0.5)
    earlier, _ = reconstruct(read_snapshots(tmp_path, until=103), 0.08)
    assert_near(earlier, averaged(history.weights[:101], lambda t: power_decay(0.08, t)), 1e-3 + tolerance)


def test_a_length_out_of_reach_is_refused_with_the_range() -> None:
    snapshots = [Snapshot(n, 0.1, dict) for n in range(50, 401, 50)]
    with pytest.raises(
        ValueError, match=r"sigma_rel=0\.01 cannot be made of these 8 snapshots.*from 0\.0[5-9]\d to 0\."
    ):
        reconstruct(snapshots, 0.01)
    with pytest.raises(ValueError, match="there are no snapshots"):
        reconstruct([], 0.1)


def power(directory: Any = None, **kwargs: Any) -> MasterWeightAveraging:
    profiles = {"long": PowerFunction(0.1), "short": PowerFunction(0.05), "warm": ConstantDecay(0.9, warmup=True)}
    every = {"snapshot_every": 2, "snapshot_dir": directory} if directory else {}
    return MasterWeightAveraging(profiles=profiles, **every, **kwargs)


def fit(ema: MasterWeightAveraging, batches: Any, **kwargs: Any) -> L.LightningModule:
    module = make_module(seed=1 if kwargs.get("ckpt_path") else 0)
    callbacks = [ema, *kwargs.pop("callbacks", [])]
    trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=callbacks, max_epochs=kwargs.pop("max_epochs", 1))
    trainer.fit(module, loader(batches), **kwargs)
    return module


def test_all_profiles_resume_bit_for_bit_with_their_snapshots(tmp_path: Any) -> None:
    """In another directory, as a recipe's resumed run has it: there the files of both runs come together."""
    whole = power(tmp_path / "whole")
    fit(whole, make_batches(5), max_epochs=2)
    half, saver = power(tmp_path / "half"), SaveAfter(tmp_path / "half.ckpt", 5)
    fit(half, make_batches(5), callbacks=[saver])
    assert "OmegaConf" not in str(torch.load(tmp_path / "half.ckpt", weights_only=True)["averaged_profiles"])  # T27
    resumed = power(tmp_path / "resumed")
    fit(resumed, make_batches(5), max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert whole.n_averaged == resumed.n_averaged == 10
    for name in whole.profiles:
        assert_same(whole.profile_averages[name], resumed.profile_averages[name])
    files = [snapshot_files(tmp_path / name) for name in ("whole", "resumed")]
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    assert len(files[0]) == 5
    for one, other in zip(*files, strict=True):
        one, other = (torch.load(p, weights_only=True) for p in (one, other))
        assert one["sigma_rel"] == other["sigma_rel"] == {"long": 0.1, "short": 0.05}
        for name in one["averages"]:
            assert_same(one["averages"][name], other["averages"][name])


def test_a_run_that_starts_anew_leaves_no_snapshots_of_another(tmp_path: Any) -> None:
    fit(power(tmp_path), make_batches(8))
    fit(
        MasterWeightAveraging(profiles={"p": PowerFunction(0.2)}, snapshot_every=3, snapshot_dir=tmp_path),
        make_batches(4),
    )
    assert [(s.n_averaged, s.sigma_rel) for s in read_snapshots(tmp_path)] == [(3, 0.2)]


def test_a_checkpoint_names_every_average(tmp_path: Any) -> None:
    ema, saver = power(), SaveAfter(tmp_path / "a.ckpt", 4)
    module = fit(ema, make_batches(4), callbacks=[saver])
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_same(saved["state_dict"], snapshot(module))
    assert_same(saved["averaged_state_dict"], ema.averages)
    for name in ema.profiles:
        assert_same(saved["averaged_state_dicts"][name], ema.profile_averages[name])
    assert saved["averaged_profiles"]["warm"] == {"profile": "ConstantDecay", "decay": 0.9, "warmup": True}


def test_resuming_with_other_profiles(tmp_path: Any) -> None:
    """Some of those saved go on, other ones alone start anew, a mixture is refused."""
    kept = power()
    fit(kept, make_batches(4), callbacks=[SaveAfter(tmp_path / "a.ckpt", 4)])
    go_on = {"max_epochs": 2, "ckpt_path": tmp_path / "a.ckpt"}

    some = MasterWeightAveraging(profiles={"short": PowerFunction(0.05)})
    fit(some, make_batches(4), **go_on)
    assert some.n_averaged == 8

    history, other = History(), MasterWeightAveraging(profiles={"short": PowerFunction(0.2)})
    with pytest.warns(
        UserWarning, match=r"The checkpoint has averages long \(PowerFunction, sigma_rel=0.1\).*start at"
    ):
        fit(other, make_batches(4), callbacks=[history], **go_on)
    assert other.n_averaged == 4
    assert_near(other.averages, averaged(history.weights, lambda t: power_decay(0.2, t)), 1e-6)

    mixed = MasterWeightAveraging(profiles={"short": PowerFunction(0.05), "new": PowerFunction(0.2)})
    with pytest.raises(
        MisconfigurationException, match=r"no average new \(PowerFunction, sigma_rel=0.2\). It has long"
    ):
        fit(mixed, make_batches(4), **go_on)


def test_a_single_constant_goes_on_with_another_decay(tmp_path: Any) -> None:
    fit(MasterWeightAveraging(0.9), make_batches(4), callbacks=[SaveAfter(tmp_path / "a.ckpt", 4)])
    history, ema = History(), MasterWeightAveraging(0.5)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    fit(ema, make_batches(4), callbacks=[history], max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert_near(ema.averages, averaged([saved["averaged_state_dict"], *history.weights[1:]], lambda t: 0.5), 1e-6)
    assert ema.n_averaged == 8
    assert len(history.weights) == 5
    assert all(not torch.equal(a["net.proj.weight"], b["net.proj.weight"]) for a, b in pairwise(history.weights))


def test_a_snapshot_is_there_as_a_whole_or_not_at_all(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle leaves the file of before, and no other."""
    averages = {"p": {"w": torch.ones(3)}}
    write_snapshot(tmp_path, 4, {"p": 0.1}, averages)
    before = (tmp_path / "average_000000004.pt").read_bytes()

    def fails(content: Any, path: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    for n in (4, 8):
        with pytest.raises(OSError, match="No space"):
            write_snapshot(tmp_path, n, {"p": 0.1}, averages)
    assert [p.name for p in tmp_path.iterdir()] == ["average_000000004.pt"]
    assert (tmp_path / "average_000000004.pt").read_bytes() == before


def test_what_fp16_cannot_hold_stays_fp32_in_a_snapshot(tmp_path: Any) -> None:
    averages = {"p": {"large": torch.tensor([1e5]), "small": torch.tensor([1.5])}}
    write_snapshot(tmp_path, 1, {"p": 0.1}, averages, "fp16")
    found = read_snapshots(tmp_path)[0].load()
    assert found["large"].item() == 1e5
    assert found["small"].dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": 0.9, "profiles": {"a": PowerFunction(0.1)}}, "decay=0.9 and profiles exclude each other"),
        ({"avg_fn": max, "profiles": {"a": PowerFunction(0.1)}}, "avg_fn and profiles exclude each other"),
        ({"profiles": {}}, "tracks nothing"),
        ({"profiles": {"a": 0.1}}, "a=0.1 is no profile"),
        ({"profiles": {"raw": PowerFunction(0.1)}}, "the name 'raw'"),
        ({"snapshot_every": 10}, "Add profiles="),
        ({"profiles": {"a": PowerFunction(0.1)}, "snapshot_every": 0}, "snapshot_every=0 must be at least 1"),
        ({"profiles": {"a": PowerFunction(0.1)}, "snapshot_dtype": "bf16"}, "snapshot_dtype='bf16' is unknown"),
    ],
)
def test_bad_options_are_named(options: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        MasterWeightAveraging(**options)


@pytest.mark.parametrize("sigma_rel", [0, -0.1, 0.2887, 1])
def test_bad_widths_are_named(sigma_rel: float) -> None:
    with pytest.raises(ValueError, match=rf"sigma_rel={sigma_rel} must lie between 0 and 0.2887"):
        PowerFunction(sigma_rel)


def test_validation_sees_the_first_profile() -> None:
    class Validates(TinyModule):
        def validation_step(self, batch: Any, _: Any) -> None:
            self.used = snapshot(self)

    torch.manual_seed(0)
    module, ema = Validates(), power()
    trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=ema, num_sanity_val_steps=0)
    trainer.fit(module, loader(make_batches(3)), loader(make_batches(1)))
    assert_same(module.used, ema.profile_averages["long"])
    assert not torch.equal(module.used["net.proj.weight"], ema.profile_averages["short"]["net.proj.weight"])
