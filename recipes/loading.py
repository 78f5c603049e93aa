"""Loaders that shard evenly, resume in the middle of an epoch, and repeat what is random.

Which samples an epoch has, in which order, and how each of them varies (flips, draws of latents) is a function of
(seed, epoch, row), however many ranks and worker processes share the work. So no state of a random generator has to be
saved, and a resumed run sees what the uninterrupted one would have seen. It knows nothing about any data set.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from recipes.config import ConfigError
from recipes.randomness import SHUFFLE, keyed_generator

Batch = dict[str, Tensor]
"""`image` (batch, C, H, W) fp32, in [-1, 1] unless they are latents; `label` (batch,) int64, `num_classes` where there
is none; `index` (batch,) int64, the row in its split."""

Key = int | tuple[int, int]
"""What a data set is asked for: a row as it is; or in training (epoch, row), which may vary at random."""


class ShuffledShard(Sampler[tuple[int, int]]):
    """This rank's share of a permutation that depends on (seed, epoch) alone, as (epoch, row).

    Every rank gets the same number of samples, a multiple of what it takes in one optimizer step: the others are
    dropped, other ones in each epoch. Ranks never disagree on how many batches an epoch has, which would hang the
    slower ones, and step n of an epoch sees the same samples however many ranks share them.

    Args:
        length: Samples in the data set.
        rank: This process.
        world_size: Number of processes.
        seed: Same on all ranks.
        per_step: Samples that one rank takes in one optimizer step.

    Attributes:
        at_most: Samples of an epoch that is cut short, or None. Not in `len`, of which Lightning takes its own limit. A
            run that ended where such an epoch does would otherwise find more batches of it when it goes on.
        same: Whether every epoch has the samples of the first, in its order; what varies at random still does.

    Example:
        >>> sorted([*ShuffledShard(4, rank=0, world_size=2, seed=0), *ShuffledShard(4, rank=1, world_size=2, seed=0)])
        [(0, 0), (0, 1), (0, 2), (0, 3)]
    """

    def __init__(self, length: int, rank: int, world_size: int, seed: int, per_step: int = 1) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.per_step = per_step
        self.at_most: int | None = None
        self.same = False
        self.epoch = 0
        self.resume_epoch, self.resume_at = 0, 0  # in this epoch, start at this sample of the shard

    def __len__(self) -> int:
        return self.length // self.world_size // self.per_step * self.per_step

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls this before every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        order = torch.randperm(self.length, generator=keyed_generator(SHUFFLE, self.seed, 0 if self.same else epoch))
        shard = order[self.rank :: self.world_size][: len(self)][: self.at_most]
        for row in shard[self.resume_at if epoch == self.resume_epoch else 0 :].tolist():
            yield epoch, row


class Loader(DataLoader[Batch]):
    """A DataLoader as all recipes use it.

    Its workers live as long as it does and leave signals to the main process; it draws no number from torch's global
    generator; batches are pinned if there is a GPU to copy them to. What a worker refuses is shown as the main process
    would have said it.

    Args:
        dataset: Takes a `Key`.
        num_workers: Processes that read; 0: the training process itself.
        **batches: `sampler` and `batch_size`, or `batch_sampler`, as `DataLoader` takes them.
    """

    def __init__(self, dataset: Dataset[Batch], num_workers: int = 0, **batches: Any) -> None:
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_signals,
            generator=torch.Generator(),
            **batches,
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except ConfigError as error:  # torch puts the worker's traceback in front of the message
            raise ConfigError(str(error).rpartition(f"{ConfigError.__name__}: ")[2].strip()) from error


def _leave_signals(worker: int) -> None:
    """Ctrl-C and schedulers signal the whole process group: a worker that dies of it takes the last step with it.

    The main process decides when to stop. Workers end when it tells them, or when it is gone.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)


class ResumableLoader(Loader):
    """A loader over a `ShuffledShard` that knows how many batches of the epoch it has handed out.

    Lightning saves and restores `state_dict` with every checkpoint, so that a run resumed in the middle of an epoch
    goes on with the batches that it has not seen. The length stays that of a full epoch. Batches that workers have
    prepared ahead do not count.
    """

    def __init__(self, dataset: Dataset[Batch], sampler: ShuffledShard, batch_size: int, num_workers: int = 0) -> None:
        super().__init__(dataset, num_workers, batch_size=batch_size, sampler=sampler, drop_last=True)
        self.shard = sampler
        self.handed_out = 0  # batches of the current epoch, those before a resume included

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        at_resume = self.shard.epoch == self.shard.resume_epoch
        self.handed_out = self.shard.resume_at // int(self.batch_size or 1) if at_resume else 0
        for batch in super().__iter__():
            self.handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """`epoch`: which permutation; `batches`: how many of its batches were handed out; what all ranks' held."""
        ranks = self.shard.world_size
        return {
            "epoch": self.shard.epoch,
            "batches": self.handed_out,
            "images_per_batch": int(self.batch_size or 1) * ranks,
            "images_per_step": self.shard.per_step * ranks,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that the saved run had seen."""
        self.shard.set_epoch(state["epoch"])
        self.shard.resume_epoch = state["epoch"]
        self.shard.resume_at = state["batches"] * int(self.batch_size or 1)
        self.handed_out = state["batches"]


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


def available_cpus() -> int:
    """CPUs that this process may use.

    Example:
        >>> available_cpus() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
