"""Exact means of per-sample losses, in total and by how noisy the samples are.

Why it exists: a diffusion loss is the mean over noise levels whose losses differ tenfold; where 16 bits do harm, it is
often at one end alone, which the total does not show. Sums and counts are kept instead of means, in fp32 and on the
device, so that batches of other sizes, ranks with fewer samples and skipped batches weigh what they hold, and nothing
waits for the device before the means are read.

It leaves out when they are read and what they are called (`recipes.diffusion`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.denoising import Objective

QUARTERS = 4


def quartiles(objective: Objective) -> Tensor:
    """Times that cut the objective's training density into four equal parts, least noise first, `(3,)` in fp32.

    Example:
        >>> from recipes.objective import DDPM
        >>> quartiles(DDPM())
        tensor([250., 500., 750.])
    """
    quarters = torch.special.ndtri(torch.tensor([0.25, 0.5, 0.75]))
    return objective.times(quarters + 1e-6)  # or rounding makes whole timesteps one less


class LossSums:
    """Sums and counts of losses, by quartile of the time.

    Args:
        edges: As `quartiles` gives them.

    Example:
        >>> sums = LossSums(torch.tensor([1.0, 2.0, 3.0]))
        >>> sums.add(torch.tensor([5.0, 7.0, 9.0]), time=torch.tensor([0.5, 1.0, 1.5]))
        >>> sums.means()
        {'loss': 7.0, 'loss_q1': 5.0, 'loss_q2': 8.0}
    """

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges
        self.totals = torch.zeros(2, QUARTERS, device=edges.device)  # fp32: sums, counts

    @torch.no_grad()
    def add(self, losses: Tensor, time: Tensor) -> None:
        """Count samples in.

        Args:
            losses: `(batch,)`, any float dtype.
            time: `(batch,)`.
        """
        if self.totals.device != losses.device:
            self.edges, self.totals = self.edges.to(losses.device), self.totals.to(losses.device)
        # A time at an edge belongs to the part above it, as in int(4 * t / T) for whole timesteps t < T.
        part = torch.bucketize(time, self.edges, right=True)  # (batch,), 0 to 3
        mine = part == torch.arange(QUARTERS, device=part.device)[:, None]  # (4, batch)
        # Not a product: infinity times 0 is no number. Not index_add_: on a GPU its order is not always the same.
        sums = torch.where(mine, losses.detach().float(), 0.0).sum(dim=1)
        self.totals += torch.stack([sums, mine.sum(dim=1, dtype=torch.float32)])

    def means(self) -> dict[str, float]:
        """`loss`, and `loss_q1` (least noise) to `loss_q4`, without those that saw no sample. Waits for the device."""
        sums, counts = self.totals.tolist()
        found = {"loss": sum(sums) / sum(counts)} if sum(counts) else {}
        parts = enumerate(zip(sums, counts, strict=True), start=1)
        return found | {f"loss_q{part}": total / count for part, (total, count) in parts if count}
