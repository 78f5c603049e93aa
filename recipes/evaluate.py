"""How good is a checkpoint? `python -m recipes.evaluate ckpt_path=...` prints a table and keeps it as JSON.

- Validation loss on the fixed noise that training validates on, of the weights chosen and of the raw ones.
- Class accuracy: how many samples a classifier of the training split takes for what they were asked to be; null for
  data without classes.
- Frechet distance of the samples to the training split, beside that of real validation images and of noise, without
  which the number says nothing (it also depends on how many images there are, fewer of which are further away).

The network computes in fp32. It leaves out several devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from recipes import command_line
from recipes.config import ConfigError, check_targets, fail, plain
from recipes.denoising import Objective
from recipes.features import (
    TURNS,
    FrechetDistance,
    SmallClassifier,
    frechet_distance,
    pixels,
    remembered,
    train_classifier,
)
from recipes.images import count_non_finite
from recipes.loading import Loader
from recipes.places import check_writable
from recipes.randomness import validation_draws
from recipes.sample import batches
from recipes.sampler import draw_images
from recipes.screen import said
from recipes.trained import guidance_of, open_checkpoint, result_name, sampler_of, weights_of, whole_number

SAMPLES = 1000
"""Of an evaluation whose name does not say it."""


def evaluate(config: dict[str, Any]) -> dict[str, Any]:
    """Measure, print, save.

    Args:
        config: Plain containers; the keys stand in `conf/evaluate.yaml`.

    Returns:
        What is saved: numbers and text, None where something cannot be measured.

    Raises:
        ConfigError: Before anything is measured.
    """
    check_targets(config)
    trained = open_checkpoint(config)
    net, objective, data = trained.build()
    net = trained.network(net, weights_of(trained.checkpoint, "raw", trained.path), config["device"])
    device = next(net.parameters()).device
    sampler, solver = sampler_of(config, trained, objective)
    guidance, seed = guidance_of(config, objective, net), whole_number(config, "seed", 0)
    count, batch_size = whole_number(config, "samples", 2), whole_number(config, "batch_size", 1)
    given = config["inception_weights"]
    inception = to_absolute_path(given) if given else None
    name = result_name(trained, solver, guidance, seed) + f"_samples{count}" * (count != SAMPLES)
    name += "_inception.json" if given else ".json"
    output = Path(to_absolute_path(config["output"])) if config["output"] else trained.path.with_name(name)
    if output.is_dir():
        raise ConfigError(f"output={output} is a directory. Write output=PATH of a JSON file.")
    check_writable("output", output)
    if count < data.num_classes:
        raise ConfigError(
            f"samples={count}: the data have {data.num_classes} classes, and images of some of them alone are far from "
            f"those of all. Write samples=NUMBER, a multiple of {data.num_classes}."
        )
    data.setup()
    if len(data.train) < 2:
        raise ConfigError(f"data: a distance to {len(data.train)} training image(s) says nothing. Give at least 2.")
    classifier = SmallClassifier(1, data.num_classes or len(TURNS))
    frechet_distance(
        classifier, inception, torch.device("cpu"), data.num_classes
    )  # refuses a missing file before minutes have passed

    raw_loss = validation_loss(net, objective, data)
    net.load_state_dict(trained.state)
    loss = validation_loss(net, objective, data)
    print(said("reading", f"{len(data.train)} training images"), flush=True)
    seen = remembered(data, device, batch_size)
    print(said("training", "a small classifier of them"), flush=True)
    classifier = train_classifier(seen, device)
    metric, network = frechet_distance(classifier, inception, device, data.num_classes)
    for batch in Loader(seen.train, seen.num_workers, batch_size=batch_size):
        metric.update(pixels(seen, batch["image"].to(device)), real=True)
    print(said("drawing", f"{count} samples"), flush=True)

    right, bad = 0, 0
    shape: tuple[int, ...] = ()
    for labels, rows in batches(list(range(max(data.num_classes, 1))), count, batch_size):
        samples = draw_images(net, objective, sampler, data.image_shape, labels, rows, guidance, seed)
        bad += count_non_finite(samples)
        images = pixels(data, samples)
        shape = tuple(images.shape[1:])
        right += correct(classifier, images, labels)
        metric.update(images, real=False)
    distance = float(metric.compute()) if bad == 0 else None

    validation = Loader(data.val, data.num_workers, batch_size=batch_size)
    real = [(pixels(data, batch["image"].to(device)), batch["label"]) for batch in validation]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (count, *shape), generator=generator, dtype=torch.uint8).split(batch_size)
    result = {
        "checkpoint": str(trained.path),
        "step": trained.step,
        "weights": trained.weights,
        "sampler": type(sampler).__name__,
        "sampler_steps": sampler.steps,
        "guidance": guidance,
        "seed": seed,
        "samples": count,
        "non_finite_samples": bad,
        "validation_loss": finite(loss),
        "validation_loss_raw": finite(raw_loss),
        "class_accuracy": right / count if data.num_classes else None,
        "classifier_accuracy": sum(correct(classifier, *each) for each in real) / len(data.val)
        if data.num_classes
        else None,
        "frechet_distance": distance,
        "frechet_distance_validation": of(metric, [images for images, _ in real]),
        "frechet_distance_noise": of(metric, [images.to(device) for images in noise]),
        "frechet_network": network,
        "frechet_features": metric.num_features,
        "frechet_reference": len(data.train),
        "frechet_validation": len(data.val),
    }
    show(result)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    partial.replace(output)
    print(said("saved", str(output)))
    return result


@torch.no_grad()
def validation_loss(net: nn.Module, objective: Objective, data: Any) -> float:
    """Mean over the validation split, each image with its own fixed noise and time, as in training."""
    device = next(net.parameters()).device
    total, count = torch.zeros((), device=device), 0
    for batch in data.val_dataloader():
        images, labels = batch["image"].to(device), batch["label"].to(device)
        noise, normal = validation_draws(batch["index"].to(device), tuple(images.shape[1:]))
        total += objective.loss(net, images, labels, objective.times(normal), noise).sum()
        count += len(images)
    return float(total / count)


@torch.no_grad()
def correct(classifier: SmallClassifier, images: Tensor, labels: Tensor) -> int:
    """Number of 8-bit images that the classifier takes for what they are labelled."""
    return int((classifier(images).argmax(dim=1) == labels.to(images.device)).sum())


def of(metric: FrechetDistance, batches: list[Tensor]) -> float | None:
    """Distance of other 8-bit images to the same reference; None of a single image, which has no covariance."""
    if sum(len(images) for images in batches) < 2:
        return None
    metric.reset()  # keeps the features of the reference
    for images in batches:
        metric.update(images, real=False)
    return float(metric.compute())


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if torch.tensor(value).isfinite() else None


def show(result: dict[str, Any]) -> None:
    """Print the table."""

    def text(key: str, form: str) -> str:
        return "not finite" if result[key] is None else format(result[key], form)

    table = Table(title=f"{result['weights']} weights after {result['step']} steps", title_justify="left")
    for column in ("", "result", "to compare with"):
        table.add_column(column)
    table.add_row(
        "validation loss", text("validation_loss", ".4f"), f"raw weights {text('validation_loss_raw', '.4f')}"
    )
    if result["class_accuracy"] is None:
        table.add_row("class accuracy", "no classes", "")
    else:
        table.add_row(
            "class accuracy", text("class_accuracy", ".1%"), f"validation images {text('classifier_accuracy', '.1%')}"
        )
    validation = text("frechet_distance_validation", ".2f") if result["frechet_validation"] > 1 else "are too few"
    table.add_row(
        "Frechet distance",
        text("frechet_distance", ".2f"),
        f"{result['frechet_validation']} validation images {validation}, noise {text('frechet_distance_noise', '.0f')}",
    )
    table.add_row("non-finite samples", f"{result['non_finite_samples']} of {result['samples']}", "")
    Console().print(table)
    solver = f"{result['sampler']} in {result['sampler_steps']} steps"
    print(said("samples", f"{result['samples']}, {solver}, guidance {result['guidance']:g}, seed {result['seed']}"))
    network = f"in features of: {result['frechet_network']}"
    print(said("distance to", f"{result['frechet_reference']} training images, {network}"))
    print(said("to compare with", f"distances of {result['samples']} samples alone: fewer are further away"))
    images = {"samples": "samples", "frechet_reference": "training images", "frechet_validation": "validation images"}
    if few := [f"{result[key]} {what}" for key, what in images.items() if result[key] <= result["frechet_features"]]:
        features = result["frechet_features"]
        words = f"{', '.join(few)} for {features} features: a covariance has not full rank, and the distance is biased."
        remedy = f" Write samples={max(2048, 5 * features)}." * (result["samples"] <= features)
        print(said("too few", words + remedy))


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        evaluate(plain(cfg))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    command_line.run(main, "evaluate")
