"""Noise schedules of DDPM: how much of the image and how much noise each timestep holds.

Tables are computed in float64 and looked up in fp32, or in float64 for a sampler's coefficients. They are no buffers of
a module, so that nothing that casts or synchronises a module's buffers reaches them.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

ScheduleName = Literal["linear", "cosine"]


def linear_betas(timesteps: int) -> Tensor:
    """β rises linearly from 1e-4 to 0.02 (Ho et al. 2020), `(timesteps,)` in float64."""
    return torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)


def cosine_betas(timesteps: int) -> Tensor:
    """ᾱ(u) = cos²((u + 0.008) / 1.008 · π/2) for u = t / T, with β at most 0.999 (Nichol and Dhariwal 2021)."""
    u = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
    alpha_bar = ((u + 0.008) / 1.008 * math.pi / 2).cos().square()
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


def zero_terminal_snr(alpha_bar: Tensor) -> Tensor:
    """Shift and scale sqrt(ᾱ) so that the last timestep is noise alone (Lin et al. 2024, algorithm 1).

    Example:
        >>> zero_terminal_snr(torch.tensor([0.81, 0.25, 0.01]))
        tensor([0.8100, 0.2025, 0.0000])
    """
    root = alpha_bar.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


class Schedule:
    """α and σ of x = α · image + σ · noise at every timestep, with α² + σ² = 1.

    Args:
        name: `linear` or `cosine`.
        timesteps: Their number T; timesteps are 0 to T - 1, and -1 stands for the image itself.
        zero_snr: Make the last timestep noise alone.

    Example:
        >>> Schedule("cosine", 1000, zero_snr=True)(torch.tensor([-1.0, 999.0]))
        (tensor([1., 0.]), tensor([0., 1.]))
    """

    def __init__(self, name: ScheduleName, timesteps: int, zero_snr: bool) -> None:
        makers = {"linear": linear_betas, "cosine": cosine_betas}
        if name not in makers:
            raise ValueError(f"schedule={name!r} is unknown. Choices: {', '.join(get_args(ScheduleName))}.")
        if timesteps < 2:
            raise ValueError(f"timesteps={timesteps} must be at least 2.")
        alpha_bar = (1 - makers[name](timesteps)).cumprod(0)
        if zero_snr:
            alpha_bar = zero_terminal_snr(alpha_bar)
        alpha_bar = torch.cat([alpha_bar.new_ones(1), alpha_bar])
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._table = torch.stack([alpha_bar.sqrt(), (1 - alpha_bar).sqrt()])  # (2, timesteps + 1), float64

    def __call__(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ, in float64 for timesteps in float64, otherwise in fp32; same shape."""
        dtype = torch.float64 if timestep.dtype == torch.float64 else torch.float32
        key = (timestep.device, dtype)
        if key not in self._tables:
            self._tables[key] = self._table.to(*key)
        alpha, sigma = self._tables[key][:, timestep.long() + 1]
        return alpha, sigma
