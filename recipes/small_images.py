"""torchvision's small image sets, held in memory as 8-bit values: MNIST, FashionMNIST, CIFAR10.

Their test sets validate. Nothing is downloaded unless `download=True` says so; then by one process, since several would
write the same files at once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torchvision
from hydra.utils import to_absolute_path

from recipes.config import ConfigError
from recipes.data import DataModule, LabelledImages

LAUNCHED = ("LOCAL_RANK", "RANK", "SLURM_PROCID")
"""What launchers tell processes of which there may be several."""


class SmallImagesDataModule(DataModule):
    """One of torchvision's sets; subclasses say which.

    Args:
        directory: Where torchvision keeps it, or is to put it.
        download: Fetch it if it is not there.
        flip: Mirror left and right at random, in training. Not for digits, and CIFAR10's option sets it.
        batch_size: See `recipes.data.DataModule`.
        seed: See `recipes.data.DataModule`.
        num_workers: See `recipes.data.DataModule`.
    """

    source: Any
    num_classes = 10
    train: LabelledImages
    val: LabelledImages

    def __init__(
        self,
        directory: str = "data",
        download: bool = False,
        flip: bool = False,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.directory = directory
        self.download = download
        self.flip = flip

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """See `recipes.data.DataModule.load`."""
        return self._images(train=True), self._images(train=False)

    def _images(self, train: bool) -> LabelledImages:
        found = self._found(train)
        images = torch.as_tensor(np.asarray(found.data))  # (rows, H, W) or (rows, H, W, C), uint8
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        labels = torch.as_tensor(found.targets).long()
        return LabelledImages(images, labels, flip=self.flip and train, seed=self.seed)

    def _found(self, train: bool) -> Any:
        name, where = self.source.__name__, to_absolute_path(self.directory)
        try:
            return self.source(where, train=train)
        except Exception as error:  # absent or cut off; torchvision raises RuntimeError, ValueError, AssertionError ...
            if not self.download:
                reason = "" if "not found" in str(error) else f" ({error})"
                raise ConfigError(
                    f"data.directory={self.directory}: {name} is not in {where}, or not whole{reason}. Write "
                    f"data.download=true to fetch it, or data.directory=PATH where torchvision's {name} is."
                ) from error
        if launched := [variable for variable in LAUNCHED if variable in os.environ]:
            raise ConfigError(
                f"data.download=true in one of several processes ({launched[0]} is set), which would write the same "
                "files. Fetch it beforehand, in a process of its own: the same command with dry_run=true and "
                "trainer.devices=1, without a launcher."
            )
        try:
            return self.source(where, train=train, download=True)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"data.download=true: {name} could not be fetched ({reason}). Where this machine has no network, copy "
                f"the files to {where} from one that has."
            ) from error


class MNISTDataModule(SmallImagesDataModule):
    """70,000 handwritten digits of 28x28 grey pixels; 10,000 validate.

    Example:
        >>> MNISTDataModule(directory="data").image_shape
        (1, 28, 28)
    """

    source = torchvision.datasets.MNIST
    image_shape = (1, 28, 28)


class FashionMNISTDataModule(SmallImagesDataModule):
    """70,000 pieces of clothing of 28x28 grey pixels; 10,000 validate.

    Example:
        >>> FashionMNISTDataModule(directory="data").num_classes
        10
    """

    source = torchvision.datasets.FashionMNIST
    image_shape = (1, 28, 28)


class CIFAR10DataModule(SmallImagesDataModule):
    """60,000 photographs of 32x32 RGB pixels in ten classes; 10,000 validate.

    Example:
        >>> CIFAR10DataModule(directory="data", flip=True).image_shape
        (3, 32, 32)
    """

    source = torchvision.datasets.CIFAR10
    image_shape = (3, 32, 32)
