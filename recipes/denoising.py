"""What every objective is to samplers, validation and the training step: a small interface, with one loss for all.

Each objective mixes image and noise, x = α(t) · image + σ(t) · noise, and says what the network F gets and predicts:

    D(x; t) = c_skip x + c_out F(c_in x; c_noise)      loss = weight(t) · mean((F - target)²)

so that everything else (validation, guidance, samplers) needs the estimate D of the clean image, α and σ alone.

Everything here is fp32 arithmetic around one call of the network: times, preconditioning, targets, weights and loss.
The network may compute in any dtype; its output is widened before anything is computed with it. All operations here
are elementwise or reductions on fp32 tensors, which `torch.autocast` leaves alone, so the same code is right inside and
outside an autocast region.

It leaves out the objectives themselves (`recipes.objective`), how random numbers are drawn (`recipes.randomness`) and
how labels are dropped (`recipes.diffusion`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recipes.density import stratify
from recipes.weighting import WeightingName, weights

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(scaled image, noise level, labels) -> raw prediction`."""


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample, in fp32 whatever comes in.

    In fp16 a difference of 300 squares to infinity; here it gives exactly 90000.

    Args:
        prediction: `(batch, ...)`, any float dtype.
        target: Same shape.

    Returns:
        `(batch,)` in fp32.

    Example:
        >>> squared_error(torch.full((1, 2), 300.0, dtype=torch.float16), torch.zeros(1, 2))
        tensor([90000.])
    """
    return (prediction.float() - target.float()).square().flatten(1).mean(dim=1)


def wide(time: Tensor) -> Tensor:
    """Times in float64 if they are, otherwise in fp32."""
    return time if time.dtype == torch.float64 else time.float()


def over(coefficient: Tensor, images: Tensor) -> Tensor:
    """`(batch,)` as `(batch, 1, 1, 1)`, which broadcasts over images."""
    return coefficient.reshape(-1, *[1] * (images.ndim - 1))


def positive(**numbers: float) -> None:
    """Refuse numbers that are not above 0 and finite; NaN is neither.

    Raises:
        ValueError: With the first of them.

    Example:
        >>> positive(gamma=5.0, sigma_data=float("nan"))
        Traceback (most recent call last):
        ValueError: sigma_data=nan must be positive and finite.
    """
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name}={number} must be positive and finite.")


def clip_bounded_images_alone(objective: Objective, node: dict[str, Any], data: Any) -> None:
    """Leave estimates unclipped where images have no bounds, unless a number is given.

    Latents go to 4 and beyond. Cut off at 1 in each step of a sampler, they are no latents of any image
    (CompVis/latent-diffusion#239).

    Args:
        objective: As built.
        node: What it was built from.
        data: Data module, with `bounded`.

    Example:
        >>> from types import SimpleNamespace
        >>> from recipes.objective import DDPM
        >>> objective = DDPM()
        >>> clip_bounded_images_alone(objective, {}, SimpleNamespace(bounded=False))
        >>> print(objective.clip)
        None
    """
    if not data.bounded and "clip" not in node:
        objective.clip = None


@dataclass
class Objective(ABC):
    """What EDM, DDPM and flow matching have in common.

    Times are numbers of the objective's own kind: EDM's noise level σ, DDPM's timestep, flow matching's t. Arguments
    below are keywords of every objective, after its own.

    Args:
        weighting: See `recipes.weighting.weights`.
        gamma: γ of the weighting.
        stratified: Spread the times of a training batch evenly over their density.
        label_dropout: Probability with which a training sample loses its label, so that the network also learns the
            unconditional denoiser that guidance needs (Ho and Salimans 2022).

    Attributes:
        clip: In sampling, estimates of the image are clipped to [-clip, clip]; None: as the network gave them.

    Raises:
        ValueError: If an argument is not among the choices or out of range.
    """

    weighting: WeightingName = field(default="none", kw_only=True)
    gamma: float = field(default=5.0, kw_only=True)
    stratified: bool = field(default=False, kw_only=True)
    label_dropout: float = field(default=0.1, kw_only=True)
    clip: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_dropout <= 1.0:
            raise ValueError(f"label_dropout={self.label_dropout} must be a probability between 0 and 1.")
        positive(gamma=self.gamma)
        weights(self.weighting, self.gamma, torch.ones(1), torch.ones(1))  # refuses an unknown name

    @abstractmethod
    def times(self, normal: Tensor) -> Tensor:
        """Times of the training density from standard normal numbers, `(batch,)`, fp32."""

    @abstractmethod
    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ of x = α · image + σ · noise, same shape as `time`; fp32, or float64 for a float64 time."""

    @abstractmethod
    def preconditioning(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in and c_noise, each `(batch,)`, fp32."""

    @abstractmethod
    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the network is to predict, same shape as `images`, fp32."""

    @abstractmethod
    def errors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors of noise and image for a unit error of the prediction: (c_out α / σ)², c_out²; `(batch,)`."""

    @abstractmethod
    def sampling_times(self, steps: int) -> list[float]:
        """`steps + 1` times for a sampler, from noise to image; at the last one α = 1 and σ = 0."""

    def ode(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Scale c and level s in which the probability-flow ODE is d(x/c)/ds = (x/c - D) / s.

        Its solutions are straight where the estimate D stays the same. c = α and s = σ / α give the ODE of Karras et
        al. (2022, equation 81); s is infinite where there is no image left.
        """
        alpha, sigma = self.path(time)
        return alpha, sigma / alpha

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random times for a training batch, `(count,)` in fp32, on the generator's device."""
        normal = torch.randn(count, generator=generator, device=generator.device)
        return self.times(stratify(normal) if self.stratified else normal)

    def mix(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """α · image + σ · noise, same shape, fp32."""
        alpha, sigma = self.path(time)
        return over(alpha, images) * images.float() + over(sigma, images) * noise.float()

    def predict(self, net: Network, noisy: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """F(c_in x; c_noise), same shape as `noisy`, fp32."""
        _, _, c_in, c_noise = self.preconditioning(time)
        return net(over(c_in, noisy) * noisy.float(), c_noise, labels).float()

    def denoise(self, net: Network, noisy: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """Estimate the clean image.

        Args:
            net: The raw network F.
            noisy: α · image + σ · noise, `(batch, C, H, W)`.
            time: `(batch,)`.
            labels: `(batch,)`, int64, handed through to the network.

        Returns:
            D(noisy; time), `(batch, C, H, W)` in fp32.
        """
        c_skip, c_out, _, _ = self.preconditioning(time)
        prediction = self.predict(net, noisy, time, labels)
        return over(c_skip, noisy) * noisy.float() + over(c_out, noisy) * prediction

    def weight(self, time: Tensor) -> Tensor:
        """Weight of a sample's squared error, `(batch,)`, fp32."""
        return weights(self.weighting, self.gamma, *self.errors(time))

    def loss(self, net: Network, images: Tensor, labels: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Weighted loss of each sample.

        Args:
            net: The raw network F.
            images: Clean images, `(batch, C, H, W)`.
            labels: `(batch,)`, int64.
            time: `(batch,)`.
            noise: Standard normal, same shape as `images`.

        Returns:
            `(batch,)` in fp32; its mean is what training minimises.
        """
        prediction = self.predict(net, self.mix(images, noise, time), time, labels)
        return self.weight(time) * squared_error(prediction, self.target(images.float(), noise.float(), time))
