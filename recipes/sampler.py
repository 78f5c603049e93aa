"""Heun's method for the probability-flow ODE, as in EDM (Karras et al. 2022, algorithm 1), and guidance.

All arithmetic is fp32 on the caller's device; only the network inside `denoise` may compute in fewer bits. It leaves
out stochastic churn: a fixed seed then gives the same picture whenever it is drawn, which is what a sample grid is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipes.objective import EDM, Network
from recipes.randomness import SAMPLES, keyed_generator

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""`(noisy image, sigma of each sample) -> clean image in fp32`."""


class HeunSampler:
    """Deterministic second-order sampler.

    Args:
        steps: Number of noise levels. The network is called 2 · steps - 1 times.
        sigma_min: Lowest noise level before 0.
        sigma_max: Noise level that sampling starts from.
        rho: Exponent of the spacing σ_i = (σ_max^(1/ρ) + i/(steps-1) · (σ_min^(1/ρ) - σ_max^(1/ρ)))^ρ (equation 5).

    Example:
        >>> HeunSampler(steps=2)(lambda x, sigma: torch.zeros_like(x), torch.ones(1, 1, 1, 1)).item()
        0.0
    """

    def __init__(self, steps: int = 18, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> None:
        if steps < 2 or not 0 < sigma_min < sigma_max:
            raise ValueError(
                f"HeunSampler needs steps >= 2 and 0 < sigma_min < sigma_max; got steps={steps}, "
                f"sigma_min={sigma_min}, sigma_max={sigma_max}."
            )
        self.steps = steps
        self.sigma_min = sigma_min
        self.sigma_max = sigma_max
        self.rho = rho

    def sigmas(self) -> list[float]:
        """The `steps + 1` noise levels, falling, the last one 0."""
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        levels = [(high + i / (self.steps - 1) * (low - high)) ** self.rho for i in range(self.steps)]
        return [*levels, 0.0]

    def __call__(self, denoise: Denoiser, noise: Tensor) -> Tensor:
        """Turn noise into images.

        Args:
            denoise: Estimates the clean image.
            noise: Standard normal, `(batch, C, H, W)`.

        Returns:
            Images, same shape, fp32. Not clamped: what the network really gave, non-finite values included.
        """
        levels = self.sigmas()
        x = noise.float() * levels[0]
        for now, after in itertools.pairwise(levels):
            slope = (x - denoise(x, x.new_full((len(x),), now))) / now
            step = x + (after - now) * slope
            if after > 0:
                slope_after = (step - denoise(step, x.new_full((len(x),), after))) / after
                step = x + (after - now) * (slope + slope_after) / 2
            x = step
        return x


def guided(objective: EDM, net: Network, labels: Tensor, null_label: int, guidance: float = 1.0) -> Denoiser:
    """Classifier-free guidance (Ho and Salimans 2022): D = D(no label) + guidance · (D(label) - D(no label)).

    Args:
        objective: Turns the network into a denoiser.
        net: The raw network.
        labels: Wanted class of each sample, `(batch,)`, int64.
        null_label: The class index that means "no label".
        guidance: 1 samples the conditional model as trained (one network call), above 1 exaggerates the class,
            0 ignores it.

    Returns:
        A denoiser for `HeunSampler`.
    """
    no_label = torch.full_like(labels, null_label)

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        with_label = objective.denoise(net, x, sigma, labels)
        if guidance == 1.0:
            return with_label
        without = objective.denoise(net, x, sigma, no_label)
        return without + guidance * (with_label - without)

    return denoise


@torch.no_grad()
def draw_samples(
    net: nn.Module,
    objective: EDM,
    sampler: HeunSampler,
    image_shape: tuple[int, ...],
    per_class: int = 8,
    guidance: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Sample every class from the network as it stands.

    Args:
        net: Called directly, so no collective runs and one rank may sample alone. Has `null_label`.
        objective: The one it was trained with.
        sampler: Solver.
        image_shape: Channels, height and width.
        per_class: Images of each class.
        guidance: See `guided`.
        seed: The starting noise is drawn on the CPU, so it is the same on every device.

    Returns:
        `(per_class * classes, C, H, W)` in fp32; image i has class i modulo the number of classes.
    """
    device = next(net.parameters()).device
    null_label = int(net.null_label)  # type: ignore[arg-type]
    labels = torch.arange(null_label, device=device).repeat(per_class)
    noise = torch.randn((len(labels), *image_shape), generator=keyed_generator(SAMPLES, seed)).to(device)
    was_training = net.training
    net.eval()
    try:
        return sampler(guided(objective, net, labels, null_label, guidance), noise)
    finally:
        net.train(was_training)
