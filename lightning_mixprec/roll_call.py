"""Ranks tell each other, past all collectives, where they are: in a backward to join, or at the end of an epoch.

Why it exists: in manual optimization a `training_step` may return without a backward. If it does so on one rank alone,
the others wait for it in the reduction of their gradients, and the next collective this rank comes to meets theirs: a
hang until the process group times out, or gradients of two batches mixed. So it is if a rank has fewer batches than the
others, and goes on to a validation or to the next epoch. A collective cannot ask about it, since the ranks to be asked
sit in another one; the store through which the ranks have found each other can.

What it leaves out: a batch in which every rank makes a backward costs one message that nobody waits for.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch.distributed as dist

_PAUSE = 0.005  # seconds
# In a batch without others so far, in a backward with them, after the last batch of an epoch, after another.
_ALONE, _SYNCHRONISED, _ENDED, _GOES_ON = range(4)


class RollCall:
    """One for each fit, made by all ranks.

    Args:
        store: Shared by all ranks. Default: that of the default process group.
        rank: Of this process, in the default process group if None.
        ranks: How many there are.

    Example:
        >>> store = dist.HashStore()
        >>> one, two = RollCall(store, 0, 2), RollCall(store, 1, 2)
        >>> one.enter(1, synchronised=True)
        >>> two.miss(1)
        Traceback (most recent call last):
        RuntimeError: Rank 1 has made no backward in training batch 1 (from 1), in which rank 0 waits for it...
    """

    _made: ClassVar[dict[int, int]] = {}  # how many there have been, by rank

    def __init__(self, store: dist.Store | None = None, rank: int | None = None, ranks: int | None = None) -> None:
        self._rank = dist.get_rank() if rank is None else rank
        self._ranks = dist.get_world_size() if ranks is None else ranks
        self._made[self._rank] = self._made.get(self._rank, 0) + 1
        shared: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._patience = shared.timeout.total_seconds()
        self._store = dist.PrefixStore(f"roll call {self._made[self._rank]}", shared)
        self._place = (0, 0, _ALONE)

    def enter(self, batch: int, *, synchronised: bool, epoch: int = 0) -> None:
        """Before a backward in ``batch``, which others have to join if it is ``synchronised``."""
        self._announce((epoch, batch, _SYNCHRONISED if synchronised else _ALONE))

    def go_on(self, batch: int, epoch: int) -> None:
        """After a batch that another one of the same epoch comes after: Lightning's own collectives are next."""
        self._announce((epoch, batch, _GOES_ON))

    def end_epoch(self, batch: int, epoch: int) -> None:
        """After the last batch of an epoch: return when it is the last of all ranks.

        Raises:
            RuntimeError: If a rank goes on with another one.
        """
        self._announce((epoch, batch, _ENDED))
        for rank in range(self._ranks):
            while (place := self._wait_for(rank, batch)) != (epoch, batch, _ENDED) and place[0] == epoch:
                if place[1:] >= (batch, _GOES_ON):
                    raise RuntimeError(
                        f"Rank {rank} goes on with another training batch in epoch {epoch} (from 0), in which it waits "
                        f"for rank {self._rank}, which has had its last: the ranks have different numbers of batches. "
                        "Give all of them the same, as Trainer(limit_train_batches=N) does with the smallest; an "
                        "IterableDataset has to leave out or repeat what is left over when it is split."
                    )
                time.sleep(_PAUSE)

    def miss(self, batch: int) -> None:
        """After a batch without a backward: return when no rank can be waiting for one.

        Raises:
            RuntimeError: If a rank is.
        """
        self.enter(batch, synchronised=False, epoch=self._place[0])
        for rank in range(self._ranks):
            if self._wait_for(rank, batch)[1:] == (batch, _SYNCHRONISED):
                raise RuntimeError(
                    f"Rank {self._rank} has made no backward in training batch {batch} (from 1), in which rank {rank} "
                    "waits for it: `training_step` has returned early on some ranks only. Call `self.manual_backward` "
                    "on all of them, with a loss of zero where there is nothing to learn."
                )

    def _announce(self, place: tuple[int, int, int]) -> None:
        if place != self._place:
            self._place = place
            self._store.set(str(self._rank), " ".join(map(str, place)))

    def _wait_for(self, rank: int, batch: int) -> tuple[int, int, int]:
        """Where ``rank`` is, once it has come to ``batch``."""
        deadline = time.monotonic() + self._patience
        while (place := self._read(rank))[1] < batch:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Rank {rank} has not come to training batch {batch} of rank {self._rank}.")
            time.sleep(_PAUSE)
        return place

    def _read(self, rank: int) -> tuple[int, int, int]:
        """Epoch, batch since the beginning of fit, and what it does there."""
        if not self._store.check([str(rank)]):
            return 0, 0, _ALONE
        epoch, batch, state = map(int, self._store.get(str(rank)).split())
        return epoch, batch, state
