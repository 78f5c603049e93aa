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

    Every rank gets the same number of samples, a multiple of what it takes in one optimizer step: the others are
    dropped, other ones in each epoch. Ranks never disagree on how many batches an epoch has, which would hang the
    slower ones, and step n of an epoch sees the same samples however many ranks share them.

    Args:
        length: Samples in the data set.
        rank: This process.
        world_size: Number of processes.
        seed: Same on all ranks.
        per_step: Samples that one rank takes in one optimizer step.

    Example:
        >>> sorted([*ShuffledShard(4, rank=0, world_size=2, seed=0), *ShuffledShard(4, rank=1, world_size=2, seed=0)])
        [0, 1, 2, 3]
    """

    def __init__(self, length: int, rank: int, world_size: int, seed: int, per_step: int = 1) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.per_step = per_step
        self.epoch = 0
        self.resume_epoch, self.resume_at = 0, 0  # in this epoch, start at this sample of the shard

    def __len__(self) -> int:
        return self.length // self.world_size // self.per_step * self.per_step

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
        batch_size: Samples per optimizer step, of all processes and accumulated batches together.
        seed: Decides the order of the training samples.

    Example:
        >>> data = DigitsDataModule(batch_size=128)
        >>> data.setup()
        >>> len(data.train), len(data.val), data.steps_per_epoch, data.micro_batch(processes=2, accumulated=2)
        (1437, 360, 11, 32)
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

    def to_images(self, samples: Tensor) -> Tensor:
        """Images `(batch, channels, height, width)` in [-1, 1] of what a network trained on these data has drawn."""
        return samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the same for any number of processes and accumulated batches."""
        return len(self.train) // self.batch_size

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
        shard = ShuffledShard(len(self.train), rank, ranks, self.seed, per_step=self.batch_size // ranks)
        return ResumableLoader(self.train, shard, batch_size=size)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Every validation sample on exactly one rank, in batches of nearly equal size.

        Nothing is padded, so that the mean over the set can be exact. All ranks have the same number of batches,
        because under FSDP2 they meet in every layer.
        """
        rank, ranks, size = self._place()
        return DataLoader(self.val, batch_sampler=even_batches(len(self.val), rank, ranks, size))


def even_batches(length: int, rank: int, ranks: int, size: int) -> list[list[int]]:
    """This rank's indices in batches: as many as on all other ranks, and each sample in one batch of one rank.

    Args:
        length: Samples in the data set.
        rank: This process.
        ranks: Number of processes.
        size: Of the largest batch; a batch of 2 where 1 would leave a rank with an empty one.

    Raises:
        ValueError: If there are more ranks than samples.

    Example:
        >>> [even_batches(7, rank, 2, size=2) for rank in range(2)]
        [[[0, 4], [2, 6]], [[1, 5], [3]]]
    """
    if length < ranks:
        raise ValueError(f"{length} samples cannot be shared by {ranks} processes. Take at most {length} processes.")
    largest = -(-length // ranks)
    batches = min(-(-largest // size), length // ranks)
    mine = range(rank, length, ranks)
    return [list(mine[start::batches]) for start in range(batches)]
