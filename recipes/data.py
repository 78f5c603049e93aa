"""The digits data set, and loaders that shard evenly and resume in the middle of an epoch.

`DigitsDataModule` serves scikit-learn's 1797 scanned 8x8 digits, which come with the package: nothing is downloaded.
The sampler and the loader below it know nothing about digits. It leaves out augmentation and worker processes; the data
set is a tensor in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from recipes.randomness import SHUFFLE, keyed_generator

Batch = dict[str, Tensor]
"""`image` (batch, C, H, W) fp32 in [-1, 1]; `label` (batch,) int64; `index` (batch,) int64, the row in its split."""


class LabelledImages(Dataset[Batch]):
    """Images and labels in memory, with the index of each sample beside it."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.images[index], "label": self.labels[index], "index": torch.tensor(index)}


class ShuffledShard(Sampler[int]):
    """This rank's share of a permutation that depends on (seed, epoch) alone.

    Every rank gets the same number of samples: the at most `world_size - 1` left over are dropped, other ones in each
    epoch. Ranks never disagree on how many batches an epoch has, which would hang the slower ones.

    Args:
        length: Samples in the data set.
        rank: This process.
        world_size: Number of processes.
        seed: Same on all ranks.

    Example:
        >>> sorted([*ShuffledShard(4, rank=0, world_size=2, seed=0), *ShuffledShard(4, rank=1, world_size=2, seed=0)])
        [0, 1, 2, 3]
    """

    def __init__(self, length: int, rank: int, world_size: int, seed: int) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.resume_epoch, self.resume_at = 0, 0  # in this epoch, start at this sample of the shard

    def __len__(self) -> int:
        return self.length // self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls this before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=keyed_generator(SHUFFLE, self.seed, self.epoch))
        shard = order[self.rank :: self.world_size][: len(self)]
        yield from shard[self.resume_at if self.epoch == self.resume_epoch else 0 :].tolist()


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader over a `ShuffledShard` that knows how many batches of the epoch it has handed out.

    Lightning saves and restores `state_dict` with every checkpoint, so that a run resumed in the middle of an epoch
    goes on with the batches that it has not seen. The length stays that of a full epoch.
    """

    def __init__(self, dataset: Dataset[Batch], sampler: ShuffledShard, batch_size: int) -> None:
        # The last, smaller batch is dropped: every sample then has the same weight in its gradient.
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
        self.shard = sampler
        self.handed_out = 0  # batches of the current epoch, those before a resume included

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        at_resume = self.shard.epoch == self.shard.resume_epoch
        self.handed_out = self.shard.resume_at // int(self.batch_size or 1) if at_resume else 0
        for batch in super().__iter__():
            self.handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """`epoch`: which permutation; `batches`: how many of its batches were handed out."""
        return {"epoch": self.shard.epoch, "batches": self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that the saved run had seen."""
        self.shard.set_epoch(state["epoch"])
        self.shard.resume_epoch = state["epoch"]
        self.shard.resume_at = state["batches"] * int(self.batch_size or 1)
        self.handed_out = state["batches"]


class DigitsDataModule(L.LightningDataModule):
    """scikit-learn's handwritten digits, scaled from 0..16 to [-1, 1] in fp32.

    One fixed split for all seeds: every fifth image validates (360), the rest trains (1437).

    Args:
        batch_size: Samples per process and batch.
        seed: Decides the order of the training samples.

    Example:
        >>> data = DigitsDataModule(batch_size=128)
        >>> data.setup()
        >>> len(data.train), len(data.val), data.train_batches(world_size=2)
        (1437, 360, 5)
    """

    image_shape = (1, 8, 8)
    num_classes = 10

    def __init__(self, batch_size: int = 128, seed: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Load and split; the same on every rank."""
        digits: Any = load_digits()
        images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1  # (1797, 1, 8, 8), 0..16 -> [-1, 1] exactly
        labels = torch.from_numpy(digits.target).long()
        held_out = torch.arange(len(images)) % 5 == 0
        self.train = LabelledImages(images[~held_out], labels[~held_out])
        self.val = LabelledImages(images[held_out], labels[held_out])

    def train_batches(self, world_size: int) -> int:
        """Training batches in one epoch, the same number on each of `world_size` processes."""
        return len(self.train) // world_size // self.batch_size

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled batches of this rank's share."""
        rank, world_size = self._place()
        return ResumableLoader(
            self.train, ShuffledShard(len(self.train), rank, world_size, self.seed), batch_size=self.batch_size
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Every validation sample on exactly one rank, in order, the last batch as small as it is.

        Nothing is padded, so that the mean over the set can be exact; ranks may differ by one batch, which is harmless
        because validation runs no collective before its end.
        """
        rank, world_size = self._place()
        return DataLoader(self.val, batch_size=self.batch_size, sampler=range(len(self.val))[rank::world_size])
