"""How often training meets each time of a diffusion, as a function of standard normal numbers.

Every density is a map from normal numbers, so that training draws them at random, validation takes evenly spaced
quantiles (`recipes.randomness.validation_draws`), and stratification spreads a batch, for all densities alike.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

DensityName = Literal["uniform", "logit_normal"]


def log_normal(normal: Tensor, mean: float, std: float) -> Tensor:
    """Noise levels with ln σ ~ N(mean, std²), fp32, same shape (Karras et al. 2022)."""
    return (normal.float() * std + mean).exp()


def logit_normal(normal: Tensor, mean: float, std: float) -> Tensor:
    """Times in (0, 1) with ln(t / (1 - t)) ~ N(mean, std²), fp32, same shape (Esser et al. 2024).

    In flow matching t / (1 - t) is the ratio of noise to image: what is logit-normal in t is log-normal in the noise
    level of EDM.
    """
    return (normal.float() * std + mean).sigmoid()


def uniform(normal: Tensor) -> Tensor:
    """Times evenly distributed in [0, 1]: the quantiles of the normal numbers, fp32, same shape."""
    return torch.special.ndtr(normal.float())


def unit_times(density: str, normal: Tensor, mean: float, std: float) -> Tensor:
    """Times in [0, 1] of the density with this name, fp32, same shape.

    Example:
        >>> unit_times("uniform", torch.tensor([-1.0, 0.0, 1.0]), mean=0.0, std=1.0)
        tensor([0.1587, 0.5000, 0.8413])
    """
    if density == "uniform":
        return uniform(normal)
    if density == "logit_normal":
        return logit_normal(normal, mean, std)
    raise ValueError(f"density={density!r} is unknown. Choices: {', '.join(get_args(DensityName))}.")


def stratify(normal: Tensor) -> Tensor:
    """One normal number in each of `len(normal)` intervals of equal probability, in order.

    Each by itself stays normal over random intervals; together they cover the density, which takes most of the
    noise out of a batch's loss (Kingma et al. 2021, appendix I). Samples are shuffled, so the order says nothing.

    Args:
        normal: `(batch,)`, standard normal.

    Returns:
        `(batch,)` in fp32.

    Example:
        >>> stratify(torch.zeros(2))  # the quartiles
        tensor([-0.6745,  0.6745])
    """
    place = torch.arange(len(normal), device=normal.device) + torch.special.ndtr(normal.float())
    return torch.special.ndtri((place / len(normal)).clamp(1e-7, 1 - 1e-7))
