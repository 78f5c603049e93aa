"""Random numbers that are a function of what they are for.

Training noise is a function of (seed, rank, epoch, batch), validation noise of the sample's index. So a resumed run, a
rerun, another batch size in validation or another number of ranks sees the numbers that it should, and no state has to
be saved. It leaves out data order, which `recipes.loading` derives from (seed, epoch) in the same way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TRAINING, VALIDATION, SHUFFLE, SAMPLES = range(4)
AUGMENTATION, POSTERIOR, SYNTHETIC = range(10, 13)  # of data: flips, draws of latents, images without a source
"""First part of every key: streams for different purposes never share numbers."""

_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2: its multiples modulo 1 fill the unit interval most evenly


def keyed_generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose seed is mixed from all parts of the key.

    Adding the parts up would make (seed 0, step 1) and (seed 1, step 0) the same; `SeedSequence` mixes them.

    Args:
        *key: Non-negative integers.
        device: Where the numbers are drawn. A CUDA generator gives other numbers than a CPU one for the same key.

    Example:
        >>> a, b = (torch.rand(2, generator=keyed_generator(TRAINING, 0, 7)) for _ in range(2))
        >>> torch.equal(a, b)
        True
    """
    mixed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(mixed >> 1)  # 63 bits: manual_seed takes a signed integer


def validation_draws(indices: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Fixed noise and stratified noise-level quantiles for validation samples.

    Args:
        indices: Index of each sample in the validation set, `(batch,)`, int64.
        shape: Shape of one image.

    Returns:
        Standard normal noise `(batch, *shape)`, and standard normal numbers `(batch,)` whose quantiles
        frac((index + 1/2) · golden ratio) cover the unit interval evenly for any number of samples. Both fp32, on the
        device of `indices`, drawn on the CPU so that every device validates on the same numbers.
    """
    rows = indices.cpu()  # one wait for the device
    noise = torch.stack([torch.randn(shape, generator=keyed_generator(VALIDATION, row)) for row in rows.tolist()])
    quantile = ((rows.double() + 0.5) * _GOLDEN).frac()
    normal = torch.special.ndtri(quantile).float()  # inverse of the normal distribution function
    return noise.to(indices.device), normal.to(indices.device)
