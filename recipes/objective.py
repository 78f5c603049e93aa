"""EDM, DDPM and flow matching: what a network is trained to predict, and at which times.

They differ in how image and noise are mixed, how a network's input and output are scaled, and which times training and
sampling meet; all else is theirs in common (`recipes.denoising`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from recipes.denoising import Objective, over, positive, wide
from recipes.density import DensityName, log_normal, unit_times
from recipes.schedule import Schedule, ScheduleName

Prediction = Literal["epsilon", "v", "x0"]


@dataclass
class EDM(Objective):
    """EDM (Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models").

    The time is σ itself and α = 1. Table 1 of the paper:

        c_skip = σ_data² / (σ² + σ_data²)       c_out = σ σ_data / sqrt(σ² + σ_data²)
        c_in = 1 / sqrt(σ² + σ_data²)           c_noise = ln(σ) / 4
        ln σ ~ N(P_mean, P_std²)                σ_i = (σ_max^(1/ρ) + i/(n-1) · (σ_min^(1/ρ) - σ_max^(1/ρ)))^ρ

    Its loss λ(σ) · (D - image)² with λ = 1 / c_out² is (F - target)², so the weighting `none` is the paper's.

    Args:
        sigma_data: Standard deviation of the data.
        P_mean: Mean of ln σ in training.
        P_std: Standard deviation of ln σ in training.
        sigma_min: Lowest noise level in sampling before 0.
        sigma_max: Noise level that sampling starts from.
        rho: Exponent ρ of the spacing of noise levels in sampling.
        **common: `weighting`, `gamma`, `stratified` and `label_dropout`; see `Objective`.

    Example:
        >>> EDM().denoise(lambda x, c_noise, labels: x.half(), torch.ones(1, 1, 2, 2), torch.ones(1), None).dtype
        torch.float32
    """

    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(sigma_data=self.sigma_data, P_std=self.P_std, rho=self.rho)
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(
                f"sigma_min={self.sigma_min} and sigma_max={self.sigma_max} must be 0 < sigma_min < sigma_max, finite."
            )

    def times(self, normal: Tensor) -> Tensor:
        """σ = exp(P_mean + P_std · normal)."""
        return log_normal(normal, self.P_mean, self.P_std)

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """α = 1, σ."""
        sigma = wide(time)
        return torch.ones_like(sigma), sigma

    def preconditioning(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Table 1 of the paper."""
        sigma = time.float()
        total = sigma.square() + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data * total.rsqrt(), total.rsqrt(), sigma.log() / 4

    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """(image - c_skip x) / c_out = (σ image / σ_data - σ_data noise) / sqrt(σ² + σ_data²), without cancellation."""
        sigma = over(time.float(), images)
        return (sigma / self.sigma_data * images - self.sigma_data * noise) * (
            sigma.square() + self.sigma_data**2
        ).rsqrt()

    def errors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """σ_data² / (σ² + σ_data²) of the noise, c_out² of the image."""
        noise_error = self.preconditioning(time)[0]
        return noise_error, noise_error * time.float().square()

    def sampling_times(self, steps: int) -> list[float]:
        """Equation 5 of the paper, and 0."""
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return [*((high + i / max(steps - 1, 1) * (low - high)) ** self.rho for i in range(steps)), 0.0]


@dataclass
class DDPM(Objective):
    """Diffusion in discrete timesteps (Ho et al. 2020), variance-preserving: α² + σ² = 1.

    The network predicts, from the unscaled x,

        epsilon: the noise ε              D = (x - σ ε) / α       (Ho et al. 2020)
        v: α noise - σ image              D = α x - σ v           (Salimans and Ho 2022)
        x0: the image                     D = F

    Args:
        prediction: What the network predicts.
        schedule: `cosine` or `linear`; see `recipes.schedule`.
        timesteps: Their number T.
        zero_snr: Make the last timestep noise alone, so that training sees what sampling starts from.
        density: Of training times: `uniform`, or `logit_normal` in t / T.
        P_mean: Mean of the logit-normal density.
        P_std: Standard deviation of the logit-normal density.
        clip: In sampling, estimates of the image are clipped to [-clip, clip], since noise predicted from noise says
            little about the image. None does not; latents, which have no such bounds, are not unless it is given.
        **common: `weighting`, `gamma`, `stratified` and `label_dropout`; see `Objective`.

    Example:
        >>> DDPM().times(torch.tensor([-9.0, 0.0, 9.0]))
        tensor([  0., 500., 999.])
    """

    prediction: Prediction = "epsilon"
    schedule: ScheduleName = "cosine"
    timesteps: int = 1000
    zero_snr: bool = False
    density: DensityName = "uniform"
    P_mean: float = 0.0
    P_std: float = 1.0
    clip: float | None = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prediction not in get_args(Prediction):
            raise ValueError(f"prediction={self.prediction!r} is unknown. Choices: {', '.join(get_args(Prediction))}.")
        if self.prediction == "epsilon" and self.zero_snr:
            raise ValueError(
                "prediction='epsilon' says nothing about the image where there is noise alone, as zero_snr=True has "
                "it. Choose prediction='v' or prediction='x0'."
            )
        positive(P_std=self.P_std)
        if self.clip is not None:
            positive(clip=self.clip)
        unit_times(self.density, torch.zeros(1), self.P_mean, self.P_std)  # refuses an unknown name
        self._path = Schedule(self.schedule, self.timesteps, self.zero_snr)

    def times(self, normal: Tensor) -> Tensor:
        """Whole timesteps, 0 to T - 1."""
        unit = unit_times(self.density, normal, self.P_mean, self.P_std)
        return (unit * self.timesteps).floor().clamp(0, self.timesteps - 1)

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """From the table; timestep -1 is the image itself."""
        return self._path(time)

    def preconditioning(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_in = 1, c_noise = t / T."""
        time = time.float()
        alpha, sigma = self.path(time)
        one = torch.ones_like(alpha)
        c_skip, c_out = {
            "epsilon": (1 / alpha, -sigma / alpha),
            "v": (alpha, -sigma),
            "x0": (torch.zeros_like(alpha), one),
        }[self.prediction]
        return c_skip, c_out, one, time / self.timesteps

    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Noise, v or image."""
        if self.prediction == "v":
            alpha, sigma = (over(each, images) for each in self.path(time.float()))
            return alpha * noise - sigma * images
        return noise if self.prediction == "epsilon" else images

    def errors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """1 and 1 / SNR for ε, SNR / (SNR + 1) and 1 / (SNR + 1) for v, SNR and 1 for the image."""
        alpha2, sigma2 = (each.square() for each in self.path(time.float()))
        one = torch.ones_like(alpha2)
        return {"epsilon": (one, sigma2 / alpha2), "v": (alpha2, sigma2), "x0": (alpha2 / sigma2, one)}[self.prediction]

    def sampling_times(self, steps: int) -> list[float]:
        """Evenly spaced from the last timestep on ("trailing" in Lin et al. 2024), and -1."""
        if steps > self.timesteps:
            raise ValueError(f"steps={steps} are more than the {self.timesteps} timesteps that DDPM has.")
        return [float(round(self.timesteps - i * self.timesteps / steps) - 1) for i in range(steps + 1)]


@dataclass
class FlowMatching(Objective):
    """Rectified flow (Liu et al. 2023; Lipman et al. 2023): x = (1 - t) · image + t · noise.

    The network predicts the velocity dx/dt = noise - image, so that D = x - t F.

    Args:
        density: Of training times: `uniform`, or `logit_normal` (Esser et al. 2024).
        P_mean: Mean of the logit-normal density.
        P_std: Standard deviation of the logit-normal density.
        shift: Sampling times t become s t / (1 + (s - 1) t): above 1 more of them are spent on noise, for large images.
        **common: `weighting`, `gamma`, `stratified` and `label_dropout`; see `Objective`.

    Example:
        >>> FlowMatching().sampling_times(4)
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    density: DensityName = "logit_normal"
    P_mean: float = 0.0
    P_std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(shift=self.shift, P_std=self.P_std)
        unit_times(self.density, torch.zeros(1), self.P_mean, self.P_std)  # refuses an unknown name

    def times(self, normal: Tensor) -> Tensor:
        """From t = 0 (image) to t = 1 (noise)."""
        return unit_times(self.density, normal, self.P_mean, self.P_std)

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """α = 1 - t, σ = t."""
        return 1 - wide(time), wide(time)

    def ode(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Straight in x itself over t: (x - D) / t is the velocity that the network predicts, finite at both ends."""
        return torch.ones_like(wide(time)), wide(time)

    def preconditioning(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip = 1, c_out = -t, c_in = 1, c_noise = t."""
        time = time.float()
        return torch.ones_like(time), -time, torch.ones_like(time), time

    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The velocity."""
        return noise - images

    def errors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(1 - t)² of the noise, t² of the image."""
        time = time.float()
        return (1 - time).square(), time.square()

    def sampling_times(self, steps: int) -> list[float]:
        """Evenly spaced from 1 to 0, then shifted."""
        even = (1 - i / steps for i in range(steps + 1))
        return [self.shift * t / (1 + (self.shift - 1) * t) for t in even]
