"""What the default recipes reach on the digits, in numbers that a user can ask for: `pytest -m slow`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from recipes import command_line, evaluate, export, train
from recipes.data import DigitsDataModule
from recipes.features import train_classifier
from recipes.images import to_uint8

pytestmark = pytest.mark.slow

BOUNDS = {"digits_unet": (0.52, 8.0), "digits_ddpm": (0.18, 20.0), "digits_flow": (0.41, 10.0)}
"""Validation loss and Frechet distance of nets of about 190 k parameters after 400 steps."""


def cli(program: Any, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [program.__file__, *arguments])
        command_line.run(program.main, program.__name__.rpartition(".")[2])


@pytest.fixture(scope="module", params=BOUNDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The default recipe at 178 k parameters."""
    path = tmp_path_factory.mktemp(request.param)
    options = ["model.block_out_channels=[16,32]", "model.attention_levels=[1]", "trainer.accelerator=cpu"]
    options.append("callbacks.samples.per_class=1")
    cli(train, f"experiment={request.param}", *options, "logger=none", f"hydra.run.dir={path}")
    return request.param, path / "checkpoints" / "last.ckpt"


def results(path: Path, guidance: float) -> dict[str, Any]:
    cli(evaluate, f"ckpt_path={path}", f"guidance={guidance}", "device=cpu")
    (result,) = path.parent.glob(f"last_averaged_*_guidance{guidance:g}_seed0.json")
    return json.loads(result.read_text())


def test_losses_samples_and_averages_are_as_good_as_promised(trained: tuple[str, Path]) -> None:
    """1000 samples of the averaged weights, in the eyes of a classifier that saw the training split alone."""
    experiment, path = trained
    loss, distance = BOUNDS[experiment]
    found = results(path, 1.0)
    assert found["validation_loss"] <= loss
    assert found["validation_loss"] / found["validation_loss_raw"] <= 1.03
    assert found["class_accuracy"] >= 0.85
    assert found["frechet_distance"] <= distance
    assert found["samples"] == 1000
    # What the numbers mean: the classifier is good, and its features tell noise from digits by far.
    assert found["classifier_accuracy"] >= 0.96
    assert found["frechet_distance_noise"] > 500
    assert found["frechet_distance_validation"] < 15
    assert results(path, 2.0)["class_accuracy"] >= 0.97


@pytest.mark.parametrize("trained", ["digits_ddpm"], indirect=True)
def test_the_stock_pipeline_of_diffusers_draws_the_digit_that_was_exported(trained: tuple[str, Path]) -> None:
    """DDPM alone has one."""
    _, path = trained
    folder = path.parent.parent / "three"
    cli(export, f"ckpt_path={path}", "label=3", f"output={folder}")
    pipeline = diffusers.DDPMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(batch_size=50, num_inference_steps=100, output_type="np", generator=torch.Generator()).images
    data = DigitsDataModule()
    data.setup()
    classifier = train_classifier(data, torch.device("cpu"))
    with torch.no_grad():
        seen = classifier(to_uint8(torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1)).argmax(1)
    assert (seen == 3).double().mean() >= 0.8
