"""Draw from a checkpoint, a class-conditional grid or a folder of images: `python -m recipes.sample ckpt_path=...`.

The checkpoint brings the configuration of its network, objective, sampler and data. The network computes in fp32, on
the averaged weights if there are any, unless told otherwise. It leaves out 16-bit sampling: it saves no time at this
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor

from recipes import command_line
from recipes.config import ConfigError, check_targets, fail, plain
from recipes.images import count_non_finite, image_grid, save_png
from recipes.places import check_writable
from recipes.sampler import draw_images
from recipes.trained import guidance_of, open_checkpoint, result_name, sampler_of, whole_number

PICTURES = (".png", ".jpg", ".webp")
"""How the name of a grid may end."""

ROWS = 8
"""Of a grid, unless `per_class` says how many."""


def sample(config: dict[str, Any]) -> None:
    """Load, draw, save, and say what came out.

    Args:
        config: Plain containers; the keys stand in `conf/sample.yaml`.

    Raises:
        ConfigError: Before anything is drawn.
    """
    check_targets(config)
    trained = open_checkpoint(config)
    net, objective, data = trained.build()
    net = trained.network(net, trained.state, config["device"])
    sampler, solver = sampler_of(config, trained, objective)
    guidance, seed = guidance_of(config, objective, net), whole_number(config, "seed", 0)
    batch_size = whole_number(config, "batch_size", 1)
    shape, num_classes = trained.made_for(data)
    classes = chosen(config["classes"], num_classes)
    folder = config["count"] is not None
    if folder and config["per_class"] is not None:
        raise ConfigError(
            f"per_class={config['per_class']} are rows of a grid, and count={config['count']} asks for a folder of so "
            "many images. Leave one of them out."
        )
    per_class = ROWS if config["per_class"] is None else whole_number(config, "per_class", 1)
    count = whole_number(config, "count", 1) if folder else per_class * len(classes)
    name = result_name(trained, solver, guidance, seed)
    output = trained.run / "samples" / (name if folder else f"{name}.png")
    if config["output"]:
        output = Path(to_absolute_path(config["output"]))
    if folder and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output={output} exists already. Remove it, or write output=ANOTHER.")
    if not folder and (output.is_dir() or output.suffix.lower() not in PICTURES):
        raise ConfigError(
            f"output={output} is no name of a picture. Write one that ends in {' or '.join(PICTURES)}; or count=NUMBER "
            "for a folder of images."
        )
    check_writable("output", output)
    data.to_images(torch.zeros(1, *shape))  # what cannot be decoded is refused before anything is drawn

    drawn, bad = [], 0
    for labels, rows in batches(classes, count, batch_size):
        samples = draw_images(net, objective, sampler, shape, labels, rows, guidance, seed)
        images = data.to_images(samples).cpu()
        bad += count_non_finite(images)
        if folder:
            save_images(images, labels, rows, output, num_classes)
        else:
            drawn.append(images)
    if not folder:
        save_png(image_grid(torch.cat(drawn), columns=len(classes)), output)
    print(f"weights          {trained.weights}, after {trained.step} steps")
    print(f"non-finite       {bad} of {count} samples{' (red in the grid)' if bad else ''}")
    print(f"{'samples' if folder else 'sample grid'}{' ' * (10 if folder else 6)}{output}")


def chosen(classes: Any, num_classes: int) -> list[int]:
    """The classes to draw: those that were asked for, or the first ten; [0], no label, where the data have none."""
    if classes is None:
        return list(range(min(max(num_classes, 1), 10)))
    if not num_classes:
        raise ConfigError(f"classes={classes}: the network was trained without classes. Leave classes out.")
    values = classes if isinstance(classes, list) else [classes]
    wrong = [c for c in values if not isinstance(c, int) or isinstance(c, bool) or not 0 <= c < num_classes]
    if wrong or not values or len({*values}) < len(values):
        raise ConfigError(
            f"classes={classes}: the data have classes 0 to {num_classes - 1}. Write a list of some of them, such as "
            "'classes=[0]', each once."
        )
    return values


def batches(classes: list[int], count: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels and rows of `count` images in batches; image i has class `classes[i % len(classes)]`.

    Example:
        >>> [(labels.tolist(), rows.tolist()) for labels, rows in batches([3, 7], count=5, batch_size=3)]
        [([3, 7, 3], [0, 0, 1]), ([7, 3], [1, 2])]
    """
    index = torch.arange(count)
    labels, rows = torch.tensor(classes)[index % len(classes)], index // len(classes)
    yield from zip(labels.split(batch_size), rows.split(batch_size), strict=True)


def save_images(images: Tensor, labels: Tensor, rows: Tensor, folder: Path, num_classes: int) -> None:
    """One PNG per image, `class3_000012.png` for the thirteenth of class 3, pixels one to one."""
    width = len(str(max(num_classes - 1, 0)))
    for image, label, row in zip(images, labels.tolist(), rows.tolist(), strict=True):
        save_png(image_grid(image[None], columns=1, zoom=1, gap=0), folder / f"class{label:0{width}}_{row:06}.png")


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="sample")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        sample(plain(cfg))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    command_line.run(main, "sample")
