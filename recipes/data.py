"""What every data module of the recipes is, and the two that need no files: digits and synthetic images.

Data from files are in `recipes.small_images`, `recipes.image_files`, `recipes.tar_shards` and `recipes.latents`; how
any of them is sharded and resumed in `recipes.loading`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from recipes.loading import Batch, Key, Loader, ResumableLoader, ShuffledShard, even_batches
from recipes.randomness import AUGMENTATION, SYNTHETIC, keyed_generator


def from_uint8(image: Tensor) -> Tensor:
    """Map 0..255 to [-1, 1] in fp32: 0 is -1 and 255 is 1, exactly. The inverse of `recipes.images.to_uint8`.

    Args:
        image: uint8, any shape.

    Example:
        >>> from_uint8(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([-1.,  1.])
    """
    return image.float() / 127.5 - 1


class Images(Dataset[Batch]):
    """Labelled images by row. In training, flips are a function of (seed, epoch, row).

    Args:
        flip: Mirror left and right with probability 1/2, in training alone.
        seed: Decides which.
    """

    def __init__(self, flip: bool = False, seed: int = 0) -> None:
        self.flip = flip
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> tuple[Tensor, int]:
        """Image `(C, H, W)`, uint8 or in [-1, 1] in fp32, and label."""

    def name(self, row: int) -> str:
        """What an error calls this image."""
        return f"image {row}"

    def __getitem__(self, key: Key) -> Batch:
        epoch, row = key if isinstance(key, tuple) else (None, key)
        image, label = self.read(row)
        if self.flip and epoch is not None:
            generator = keyed_generator(AUGMENTATION, self.seed, epoch, row)
            if torch.randint(2, (), generator=generator):
                image = image.flip(2)
        if image.dtype == torch.uint8:
            image = from_uint8(image)
        return {"image": image, "label": torch.tensor(label), "index": torch.tensor(row)}


class LabelledImages(Images):
    """Images and labels in memory.

    Args:
        images: `(rows, C, H, W)`, uint8 or in [-1, 1] in fp32.
        labels: `(rows,)`, int64.
        flip: See `Images`.
        seed: See `Images`.
    """

    def __init__(self, images: Tensor, labels: Tensor, flip: bool = False, seed: int = 0) -> None:
        super().__init__(flip, seed)
        self.images = images
        self.labels = labels
        self._labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def read(self, row: int) -> tuple[Tensor, int]:
        """See `Images.read`."""
        return self.images[row], self._labels[row]


class DataModule(L.LightningDataModule):
    """Batches of images for a number of processes; subclasses say which images.

    Args:
        batch_size: Samples per optimizer step, of all processes and accumulated batches together.
        seed: Decides the order of the training samples and how they vary.
        num_workers: Processes of each rank that read; 0: the training process itself. Batches do not depend on it.

    Attributes:
        train: Training samples, after `setup`.
        val: Validation samples, after `setup`; the same for all seeds.
        same_batches: Whether every epoch has the batches of the first.
        bounded: Whether images lie in [-1, 1]. Latents do not.
    """

    train: Dataset[Batch]
    val: Dataset[Batch]
    bounded = True

    def __init__(self, batch_size: int = 128, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        for name, value in (("num_workers", num_workers), ("seed", seed)):
            if value < 0:
                raise ValueError(f"{name}={value} must be at least 0.")
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.same_batches = False

    def overfit(self, trainer: L.Trainer) -> None:
        """For `overfit_batches`, of which Lightning has made limits: the same few batches in every epoch.

        Lightning would put a loader of its own in place of this one; it is told that there is nothing more to do.
        """
        self.same_batches = trainer.overfit_batches > 0  # type: ignore[attr-defined]
        trainer.overfit_batches = 0  # type: ignore[attr-defined]

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the network sees."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Labels are 0 to this, without it; 0 where the data have no labels, and the network's "no label" is 0 then."""

    @abstractmethod
    def load(self) -> tuple[Dataset[Batch], Dataset[Batch]]:
        """Training and validation samples, the same on every rank.

        Raises:
            ConfigError: If they are missing, with the path or command that they need.
        """

    def setup(self, stage: str | None = None) -> None:
        """Load, once."""
        if not hasattr(self, "train"):
            self.train, self.val = self.load()

    def to_images(self, samples: Tensor) -> Tensor:
        """Images `(batch, 1 or 3, height, width)` in [-1, 1] of what a network trained on these data has drawn."""
        return samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the same for any number of processes and accumulated batches."""
        return len(self.train) // self.batch_size  # type: ignore[arg-type]

    def micro_batch(self, processes: int, accumulated: int) -> int:
        """Samples of one process in one training batch.

        Args:
            processes: That share a step.
            accumulated: Batches of each process in a step.

        Raises:
            ValueError: If a step cannot be shared evenly; with the nearest batch sizes that can.
        """
        shares = processes * accumulated
        below = self.batch_size // shares * shares
        if below != self.batch_size:
            nearest = " or ".join(str(size) for size in (below, below + shares) if size)
            raise ValueError(
                f"batch_size={self.batch_size} images per step are not divisible by {processes} process(es) x "
                f"{accumulated} accumulated batch(es). Choose {nearest}."
            )
        return self.batch_size // shares

    def _place(self) -> tuple[int, int, int]:
        """This rank, the number of ranks, and the samples of each in one training batch."""
        rank, ranks, accumulated = 0, 1, 1
        if self.trainer:
            rank, ranks = self.trainer.global_rank, self.trainer.world_size
            accumulated = self.trainer.accumulate_grad_batches
        return rank, ranks, self.micro_batch(ranks, accumulated)

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled batches of this rank's share."""
        rank, ranks, size = self._place()
        rows = len(self.train)  # type: ignore[arg-type]
        shard = ShuffledShard(rows, rank, ranks, self.seed, per_step=self.batch_size // ranks)
        shard.same = self.same_batches
        limit = self.trainer.limit_train_batches if self.trainer else None
        if limit is not None:  # an int is a number of batches, a float their share
            full = len(shard) // size
            shard.at_most = size * (int(full * limit) if isinstance(limit, float) else min(full, limit))
        return ResumableLoader(self.train, shard, size, self.num_workers)

    def val_dataloader(self) -> Loader:
        """Every validation sample on exactly one rank, in batches of nearly equal size.

        Nothing is padded, so that the mean over the set can be exact. All ranks have the same number of batches,
        because under FSDP2 they meet in every layer.
        """
        rank, ranks, size = self._place()
        batches = even_batches(len(self.val), rank, ranks, size)  # type: ignore[arg-type]
        return Loader(self.val, self.num_workers, batch_sampler=batches)


class DigitsDataModule(DataModule):
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, scaled from 0..16 to [-1, 1]; nothing is downloaded.

    Every fifth image validates (360), the rest trains (1437).

    Args:
        batch_size: See `DataModule`.
        seed: See `DataModule`.

    Example:
        >>> data = DigitsDataModule(batch_size=128)
        >>> data.setup()
        >>> len(data.train), len(data.val), data.steps_per_epoch, data.micro_batch(processes=2, accumulated=2)
        (1437, 360, 11, 32)
    """

    image_shape = (1, 8, 8)
    num_classes = 10
    train: LabelledImages
    val: LabelledImages

    def __init__(self, batch_size: int = 128, seed: int = 0) -> None:
        super().__init__(batch_size, seed)  # a tensor in memory: workers would only slow it down

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """See `DataModule.load`."""
        digits: Any = load_digits()
        images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1  # (1797, 1, 8, 8), 0..16 -> [-1, 1] exactly
        labels = torch.from_numpy(digits.target).long()
        trains, validates = held_out(len(images), every=5)
        return LabelledImages(images[trains], labels[trains]), LabelledImages(images[validates], labels[validates])


def held_out(rows: int, every: int) -> tuple[Tensor, Tensor]:
    """Rows that train and rows that validate, for data that come without a split: every n-th validates.

    Args:
        rows: In an order that does not depend on the seed.
        every: At least 2.

    Example:
        >>> held_out(5, every=2)
        (tensor([1, 3]), tensor([0, 2, 4]))
    """
    if every < 2:
        raise ValueError(f"val_every={every} must be at least 2: every row would validate and none train.")
    validates = torch.arange(rows) % every == 0
    return (~validates).nonzero().flatten(), validates.nonzero().flatten()


class SyntheticDataModule(DataModule):
    """Noise in place of images, to measure speed without a disk: 64 different ones in memory, again and again.

    Args:
        image_size: Height and width.
        channels: Of an image; or of latents, of which the first three are shown as colours.
        num_classes: Labels; 0 for none.
        length: Training samples; a tenth as many validate, at least one for each of 64 processes.
        batch_size: See `DataModule`.
        seed: See `DataModule`.
        num_workers: See `DataModule`.

    Example:
        >>> data = SyntheticDataModule(image_size=4, channels=3, length=1000)
        >>> data.setup()
        >>> data.train[999]["image"].shape, len(data.val)
        (torch.Size([3, 4, 4]), 100)
    """

    image_shape = (0, 0, 0)  # of each instance
    num_classes = 0

    def __init__(
        self,
        image_size: int = 64,
        channels: int = 3,
        num_classes: int = 10,
        length: int = 10_000,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        for name, value, least in (
            ("image_size", image_size, 1),
            ("channels", channels, 1),
            ("num_classes", num_classes, 0),
            ("length", length, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        self.image_shape = (channels, image_size, image_size)
        self.num_classes = num_classes
        self.length = length

    def load(self) -> tuple[SyntheticImages, SyntheticImages]:
        """See `DataModule.load`."""
        pool = torch.rand((64, *self.image_shape), generator=keyed_generator(SYNTHETIC)) * 2 - 1
        train, val = (
            SyntheticImages(pool, self.num_classes, rows) for rows in (self.length, max(64, self.length // 10))
        )
        return train, val

    def to_images(self, samples: Tensor) -> Tensor:
        """The first one or three channels."""
        return samples[:, : 3 if samples.shape[1] >= 3 else 1]


class SyntheticImages(Images):
    """`rows` samples that share the images of a pool, `(images, C, H, W)` in [-1, 1]."""

    def __init__(self, pool: Tensor, num_classes: int, rows: int) -> None:
        super().__init__()
        self.pool = pool
        self.num_classes = num_classes
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def read(self, row: int) -> tuple[Tensor, int]:
        """See `Images.read`."""
        return self.pool[row % len(self.pool)], row % max(self.num_classes, 1)
