"""Some samples of the data, looked at before training: their form, their labels, and the values that they hold.

Data of one's own can have any form, and values that training takes as they are: pixels from 0 to 255, labels beyond the
last class, one index for all. It leaves out whole data sets, which would take too long to read.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from recipes.config import ConfigError, refusals
from recipes.objective import EDM

LOOKED_AT = 32
"""Samples of each split, evenly spaced."""

OFF = 1.8
"""Factor between sigma_data and the data that is more than a matter of taste."""


def check_samples(config: dict[str, Any], data: Any) -> Tensor:
    """Refuse samples of another form than the module's, and values that are no images in [-1, 1].

    Args:
        config: The whole configuration, for the error.
        data: Set up.

    Returns:
        The training images that were looked at, `(samples, C, H, W)`, fp32.
    """
    images: dict[str, list[Tensor]] = {"train": [], "val": []}
    for split, found in images.items():
        seen: dict[int, Any] = {}
        for row in rows(len(getattr(data, split))):
            key = (0, row) if split == "train" else row
            with refusals(config, "data"):
                sample = getattr(data, split)[key]
            wrong = problem(sample, data)
            if not wrong and (other := seen.setdefault(int(sample["index"]), key)) != key:
                wrong = (
                    f"has the index {int(sample['index'])}, as {split}[{other}] has; it must be the row, which decides "
                    "the noise that a sample is validated on"
                )
            if wrong:
                raise ConfigError(
                    f"data._target_={config['data']['_target_']}: {split}[{key}] {wrong}. See recipes.data.Images, "
                    "which is called with (epoch, row) in training and with row in validation."
                )
            found.append(sample["image"].float())
    looked_at = torch.stack(images["train"]) if images["train"] else torch.zeros(0)
    if data.bounded and len(looked_at):
        say_range(looked_at)
    return looked_at


def say_range(images: Tensor) -> None:
    """Say if pixels use only the upper half of their range, as those of libraries between 0 and 1 do."""
    lowest, highest = float(images.min()), float(images.max())
    if highest > 0 <= lowest:
        rank_zero_warn(
            f"data: {len(images)} training images have values from {lowest:.3g} to {highest:.3g}, none below 0. Images "
            "are taken to be in [-1, 1]; recipes.data.from_uint8 makes them of 8 bits."
        )


def rows(length: int) -> list[int]:
    """Evenly spaced rows of a split, the first and the last among them.

    Example:
        >>> rows(3), rows(100)[:3], rows(100)[-1], len(rows(100))
        ([0, 1, 2], [0, 3, 6], 99, 32)
    """
    count = min(length, LOOKED_AT)
    return [row * (length - 1) // max(count - 1, 1) for row in range(count)]


def problem(sample: Any, data: Any) -> str:
    """What is wrong with a sample, or nothing.

    Args:
        sample: As the data give it.
        data: With the `image_shape` and `num_classes` that it must have, and whether images are `bounded`.
    """
    shape, labels = tuple(data.image_shape), max(data.num_classes, 1)
    if not (isinstance(sample, dict) and {"image", "label", "index"} <= sample.keys()):
        return f"is a {type(sample).__name__}; it must be a dict of image, label and index"
    image, label = sample["image"], sample["label"]
    if not (torch.is_tensor(image) and image.is_floating_point() and image.shape == shape):
        given = f"{image.dtype} of shape {list(image.shape)}" if torch.is_tensor(image) else type(image).__name__
        return f"has an image that is {given}; it must be floating-point, in [-1, 1], of shape {list(shape)}"
    if not image.isfinite().all():
        return "has an image with values that are not finite"
    if data.bounded and (largest := float(image.abs().max())) > 1.5:
        return (
            f"has an image with values up to {largest:.3g}; they must be in [-1, 1] (recipes.data.from_uint8 makes "
            "them of 8 bits). Latents, which may have any, are a data module with bounded = False"
        )
    if isinstance(label, float) or (torch.is_tensor(label) and (label.is_floating_point() or label.ndim)):
        return f"has the label {label}; it must be one whole number"
    if not 0 <= int(label) < labels:
        return f"has the label {int(label)}; labels are 0 to {labels - 1}, by num_classes"
    return ""


def check_sigma_data(objective: Any, images: Tensor) -> None:
    """Say if the images spread otherwise than EDM's `sigma_data` says, which scales its network's input and target.

    Args:
        objective: Of the run.
        images: Some training images.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as said:
        ...     check_sigma_data(EDM(sigma_data=0.5), torch.tensor([-1.0, 1.0]).repeat(50, 50))
        >>> str(said[0].message)[:81]
        'objective.sigma_data=0.5: the standard deviation of 50 training images is 1. Writ'
    """
    if not isinstance(objective, EDM) or not len(images):
        return
    spread = float(images.std())
    if spread and not 1 / OFF < objective.sigma_data / spread < OFF:
        rank_zero_warn(
            f"objective.sigma_data={objective.sigma_data}: the standard deviation of {len(images)} training images is "
            f"{spread:.2g}. Write objective.sigma_data={spread:.2g}: EDM scales what its network gets and predicts by "
            "it."
        )
