"""Ranks tell each other, past all collectives, whether they are in a backward that the others have to join.

Why it exists: in manual optimization a `training_step` may return without a backward. If it does so on one rank alone,
the others wait for it in the reduction of their gradients, and the next collective this rank comes to meets theirs: a
hang until the process group times out, or gradients of two batches mixed. A collective cannot ask about it, since the
ranks to be asked sit in another one; the store through which the ranks have found each other can.

What it leaves out: a batch in which every rank makes a backward costs one message that nobody waits for.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch.distributed as dist


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
        self._place = (0, False)

    def enter(self, batch: int, *, synchronised: bool) -> None:
        """Before a backward in ``batch``, which others have to join if it is ``synchronised``."""
        place = (batch, synchronised)
        if place != self._place:
            self._place = place
            self._store.set(str(self._rank), f"{batch} {int(synchronised)}")

    def miss(self, batch: int) -> None:
        """After a batch without a backward: return when no rank can be waiting for one.

        Raises:
            RuntimeError: If a rank is.
        """
        self.enter(batch, synchronised=False)
        deadline = time.monotonic() + self._patience
        for rank in range(self._ranks):
            while self._read(rank)[0] < batch:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Rank {rank} has not come to training batch {batch} of rank {self._rank}.")
                time.sleep(0.005)
            if self._read(rank) == (batch, True):
                raise RuntimeError(
                    f"Rank {self._rank} has made no backward in training batch {batch} (from 1), in which rank {rank} "
                    "waits for it: `training_step` has returned early on some ranks only. Call `self.manual_backward` "
                    "on all of them, with a loss of zero where there is nothing to learn."
                )

    def _read(self, rank: int) -> tuple[int, bool]:
        if not self._store.check([str(rank)]):
            return 0, False
        batch, synchronised = self._store.get(str(rank)).split()
        return int(batch), synchronised == b"1"
