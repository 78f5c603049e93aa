"""The benchmark counts what a plain loop counts, and the plugin does less of it than stock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_mixprec import MasterWeightPrecision
from recipes import gpu_check
from recipes.benchmark import run
from recipes.benchmark_modes import Mode
from recipes.benchmark_report import Measured, recommendation
from recipes.config import ConfigError
from recipes.device_checks import CHECKS, run_checks
from recipes.measure import Operations, SavedForBackward

ROOT = Path(__file__).parent.parent


def config(*overrides: str) -> dict:
    from hydra import compose, initialize_config_dir

    from recipes.config import plain

    given = ["trainer.default_root_dir=unused", "callbacks=none", "+optimizer.fused=true", *overrides]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return plain(compose("benchmark", overrides=given))


def test_casts_and_bytes_of_a_step_are_those_counted_by_hand() -> None:
    """Stock autocast: input, weight and bias of a layer go down (6 bytes each), their gradients up again."""
    layer, x = nn.Linear(8, 16), torch.randn(4, 8)
    saved = SavedForBackward(layer.parameters())
    with Operations() as done:
        with torch.autocast("cpu", torch.bfloat16), saved.counting():
            loss = layer(x).float().sum()
        loss.backward()
    weights = 8 * 16 + 16
    #                    x      weights   result and its gradient   gradients of the weights
    assert done.cast_bytes == 6 * (4 * 8 + weights + 2 * 4 * 16 + weights)
    assert done.casts == 1 + 2 + 2 + 2
    assert saved.bytes == 2 * 4 * 8  # the input alone: it needs no gradient, so the weight is not kept
    assert done.reads == 0
    with Operations() as done:
        float(layer.weight.sum())
    assert (done.casts, done.reads) == (0, 1)


def test_weights_are_not_counted_as_kept() -> None:
    layer, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    for dtype, kept in ((torch.float32, 4 * 8 * 4), (torch.bfloat16, 2 * (4 * 8 + 8 * 16))):
        saved = SavedForBackward(layer.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32), saved.counting():
            layer(x)
        assert saved.bytes == kept  # autocast keeps its copy of the weight, which is nobody's parameter


@pytest.mark.parametrize(("model", "batch"), [("unet_small", 8), ("dit_tiny", 8)])
def test_plugin_casts_and_keeps_less_than_stock(model: str, batch: int) -> None:
    """At a batch as small as that of the papers' models, next to which weights are large."""
    found = run(
        config(
            f"model={model}", f"data.batch_size={batch}", "rounds=1", "steps=2", "modes=[32-true,bf16-mixed,bf16+clip]"
        )
    )
    stock, ours = found["bf16-mixed"], found["bf16+clip"]
    assert stock.error == ours.error == ""
    assert ours.cast_bytes <= 0.10 * stock.cast_bytes
    assert ours.step_cast_bytes <= stock.step_cast_bytes
    assert ours.saved_bytes <= 0.88 * stock.saved_bytes
    assert ours.gradient_bytes <= 0.60 * stock.gradient_bytes
    assert stock.reads == 0
    assert ours.reads == 0
    assert found["32-true"].casts == 0
    assert abs(ours.loss / found["32-true"].loss - 1) < 0.01


def test_losses_are_those_of_training_alone(tmp_path: Path) -> None:
    """The modes do not disturb each other: the second round of each repeats the first, bit for bit."""
    once = run(config("model=unet_tiny", "data.batch_size=8", "rounds=1", "steps=3", "modes=[bf16]"))["bf16"].loss
    found = run(
        config("model=unet_tiny", "data.batch_size=8", "rounds=2", "steps=3", "modes=[32-true,bf16,bf16+split]")
    )
    assert found["bf16"].loss == found["bf16+split"].loss == once
    assert len(found["bf16"].step_seconds) == 2
    assert found["bf16+split"].bytes_per_parameter == pytest.approx(found["bf16"].bytes_per_parameter - 2, abs=0.2)


def test_fallback_layers_of_the_configuration_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    convert = MasterWeightPrecision.convert_module
    monkeypatch.setattr(
        MasterWeightPrecision,
        "convert_module",
        lambda self, module: (convert(self, module), seen.append((self.masters, self.plan["net.conv_in"])))[0],
    )
    run(
        config("model=unet_tiny", "rounds=1", "steps=1", "modes=[bf16+split]", "precision.policy.fp32=[conv_in]"),
    )
    assert seen == [("split", torch.float32)]


def test_command_prints_a_table_and_keeps_json(tmp_path: Path) -> None:
    """Also a mode that cannot train here: stock bf16-true meets the recipe's fp32 timesteps."""
    done = subprocess.run(
        [sys.executable, "-m", "recipes.benchmark", "model=unet_tiny", "rounds=1", "steps=1", "warmup=3",
         "data.batch_size=8", "modes=[32-true,bf16-mixed,bf16,bf16-true]", f"hydra.run.dir={tmp_path}/b"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "b" / "benchmark.json").read_text())
    assert list(written["modes"]) == ["32-true", "bf16-mixed", "bf16", "bf16-true"]
    assert "dtype" in written["modes"]["bf16-true"]["error"]
    assert "bf16-true failed: RuntimeError" in done.stdout
    assert written["recommendation"] in done.stdout
    assert written["machine"]["torch"] == torch.__version__


def test_recommendation_is_the_fastest_that_learns_and_of_equals_the_smallest() -> None:
    def found(seconds: float, loss: float, memory: float) -> Measured:
        return Measured([seconds], loss=loss, bytes_per_parameter=memory, gradient_bytes=2.0)

    results = {
        "32-true": found(1.0, 1.0, 12),
        "bf16-mixed": found(0.8, 1.0, 14),
        "bf16": found(0.5, 1.001, 14),
        "bf16+split": found(0.505, 1.001, 12),
        "bf16+none": found(0.4, 1.02, 10),
    }
    assert recommendation(results) == (
        "Take precision=bf16 precision.masters=split: 0.63 times the step of bf16-mixed, "
        "and 14.0 bytes per parameter instead of 16.0."
    )
    results["bf16-mixed"].step_seconds = [0.4]
    assert recommendation(results) == (
        "None of the plugin's modes is faster than bf16-mixed here. The nearest is precision=bf16 "
        "precision.masters=split: 1.26 times its step, and 14.0 bytes per parameter instead of 16.0."
    )
    del results["bf16"], results["bf16+split"]
    assert recommendation(results).startswith("None of the plugin's modes")


def test_recommendation_compares_with_fp32_and_says_when_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without instructions for bf16, where stock's 16 bits are as slow as the plugin's."""
    results = {name: Measured([30.0], loss=1.0) for name in ("bf16-mixed", "bf16")}
    results["32-true"] = Measured([1.0], loss=1.0)
    expected = (
        "Take precision=fp32: the fastest of the plugin's modes in 16 bits, precision=bf16, is 30.00 times the step of "
        "32-true here."
    )
    assert recommendation(results, on_cpu=True) == recommendation(results) == expected
    del results["32-true"]
    for lacking in (True, False):
        monkeypatch.setattr("recipes.benchmark_report.lacks_instructions", lambda dtype, lacking=lacking: lacking)
        advice = recommendation(results, on_cpu=True)
        assert advice.startswith("Take precision=bf16: 1.00 times the step of bf16-mixed.")
        assert ("no instructions for bf16" in advice and "add 32-true to modes=[...]" in advice) == lacking
        assert "instructions" not in recommendation(results)  # a GPU


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modes=[bf61]"], r"there is no precision 'bf61'. Did you mean 'bf16'\?"),
        (["modes=[bf16+spilt]"], r"no '\+spilt'. Did you mean 'split'"),
        (["modes=[bf16-mixed+split]"], r"no '\+split'.* compile, clip, channels_last"),
        (["rounds=0"], "rounds=0 must be a whole number, at least 1"),
        (["trainer.devices=2"], "trainer.devices=1"),
    ],
)
def test_bad_input_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(*overrides))


def test_modes_know_what_stock_would_do() -> None:
    assert Mode.parse("bf16+split24+compile+clip").counterpart() == "bf16-mixed+compile"
    assert Mode.parse("fp16").counterpart() == "16-mixed"
    assert Mode.parse("16-true").counterpart() == "16-true"


# The checks that whoever has a GPU runs once: here as far as a CPU can show that they work


@pytest.mark.parametrize("name", ["norms", "masters", "rounding", "edits", "fp8", "checkpoint"])
def test_checks_of_the_gpu_script_pass_on_a_cpu(name: str) -> None:
    assert CHECKS[name]("cpu")


def test_a_check_that_fails_is_shown_and_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> str:
        raise AssertionError("planted")

    monkeypatch.setattr("recipes.device_checks.CHECKS", {"broken": broken, "fine": lambda device: device})
    console = Console(record=True)
    found = run_checks("cpu", console)
    assert [check["passed"] for check in found.values()] == [False, True]
    shown = console.export_text()
    assert "FAILED broken" in shown
    assert "planted" in shown
    assert "passed fine" in shown


def test_gpu_script_leaves_the_tables_it_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next may be cut off by whoever has lent the machine."""
    made = iter([{"bf16": Measured(loss=0.5)}])

    def run(config):
        if (results := next(made, None)) is None:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr("recipes.gpu_check.run_checks", lambda device, console: {})
    monkeypatch.setattr("recipes.benchmark.run", run)
    monkeypatch.setattr("recipes.benchmark_report.show", lambda *_: None)
    monkeypatch.setattr("recipes.benchmark_report.recommendation", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--small", "--output", str(tmp_path / "g.json")])
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    tables = json.loads((tmp_path / "g.json").read_text())["tables"]
    assert [table["bf16"]["loss"] for table in tables.values()] == [0.5]


@pytest.mark.slow
def test_gpu_script_runs_from_beginning_to_end_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.gpu_check", "--device", "cpu", "--small", "--output", str(tmp_path / "g.json")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    written = json.loads((tmp_path / "g.json").read_text())
    assert set(written["checks"]) == set(CHECKS)
    assert all(check["passed"] for check in written["checks"].values())
    assert set(written["tables"]["U-Net, tiny"]) == {"32-true", "bf16-mixed", "bf16"}
