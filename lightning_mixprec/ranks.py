"""What all ranks know together: flags, and whether they are at the same place of the training loop.

Why it exists: one rank that skips while the others step, or steps another optimizer, would go on with other weights, in
silence or in a collective that never ends. Where each rank stands goes along with what they tell each other anyway.

What it leaves out: what the flags mean (:mod:`lightning_mixprec.ledger`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def several_ranks() -> bool:
    """Whether there is more than this one.

    Example:
        >>> several_ranks()
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def wait_for_streams(device: torch.device) -> None:
    """Wait for all that is queued on a GPU, on any stream; elsewhere there is one order of things.

    Lightning wraps a model for DDP on a stream of its own. Its broadcast would read weights that are still being
    written, and write into memory that is used for something else by then: nothing waits for that stream, nor it.

    Example:
        >>> wait_for_streams(torch.device("cpu"))
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def over_ranks(flags: Tensor) -> Tensor:
    """The largest of all ranks, in place.

    Example:
        >>> over_ranks(torch.tensor([1.0]))
        tensor([1.])
    """
    if several_ranks():
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags


class Place(NamedTuple):
    """Where a rank stands when it is about to step.

    Attributes:
        batch: Of those it has begun.
        optimizer: Index of the optimizer.
        optimizers: How many there are.
        has_gradients: Whether there is anything to step with.
    """

    batch: int
    optimizer: int
    optimizers: int
    has_gradients: bool

    @property
    def number(self) -> int:
        """As a whole number that fp32 holds exactly."""
        return 2 * (self.batch % 2**16 * self.optimizers + self.optimizer) + self.has_gradients

    def describe(self, number: int) -> str:
        """The place of another rank, in words."""
        batch, optimizer = divmod(number // 2, self.optimizers)
        return f"batch {batch}, optimizer {optimizer}, {'with' if number % 2 else 'without'} gradients"


def send(flags: Tensor, place: Place) -> Tensor:
    """The largest of all ranks of each of ``flags``, fp32 [n], and of the places, fp32 [2]; does not wait.

    Example:
        >>> place = Place(batch=1, optimizer=0, optimizers=1, has_gradients=True)
        >>> receive(send(torch.tensor([0.0, 1.0]), place).tolist(), place, "AdamW")
        [0.0, 1.0]
    """
    here = flags.new_full((1,), float(place.number))
    return over_ranks(torch.cat([flags, here, -here]))


def receive(values: list[float], place: Place, name: str) -> list[float]:
    """The flags in what :func:`send` gave.

    Args:
        values: As read from the device.
        place: Of this rank.
        name: Of its optimizer.

    Raises:
        RuntimeError: If the ranks are not all at this place.
    """
    *flags, last, first = values
    if last != -first:
        raise RuntimeError(
            f"The ranks step at different places, between ({place.describe(int(-first))}) and "
            f"({place.describe(int(last))}); this one at ({place.describe(place.number)}), where optimizer "
            f"{place.optimizer} is {name}. Every rank has to call backward and step equally often, on a loss of zero "
            "where it has nothing to learn, and needs as many batches as the others."
        )
    return flags
