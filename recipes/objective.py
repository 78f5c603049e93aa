"""What a network is trained to predict: EDM, DDPM and flow matching behind one small interface.

Each objective mixes image and noise, x = α(t) · image + σ(t) · noise, and says what the network F gets and predicts:

    D(x; t) = c_skip x + c_out F(c_in x; c_noise)      loss = weight(t) · mean((F - target)²)

so that everything else (validation, guidance, samplers) needs the estimate D of the clean image, α and σ alone.

Everything here is fp32 arithmetic around one call of the network: times, preconditioning, targets, weights and loss.
The network may compute in any dtype; its output is widened before anything is computed with it. All operations here
are elementwise or reductions on fp32 tensors, which `torch.autocast` leaves alone, so the same code is right inside and
outside an autocast region.

It leaves out how random numbers are drawn (`recipes.randomness`) and how labels are dropped (`recipes.diffusion`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from recipes.density import DensityName, log_normal, stratify, unit_times
from recipes.schedule import Schedule, ScheduleName
from recipes.weighting import WeightingName, weights

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(scaled image, noise level, labels) -> raw prediction`."""

Prediction = Literal["epsilon", "v", "x0"]


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


class Objective(ABC):
    """What EDM, DDPM and flow matching have in common.

    Times are numbers of the objective's own kind: EDM's noise level σ, DDPM's timestep, flow matching's t.

    Args:
        weighting: See `recipes.weighting.weights`.
        gamma: γ of the weighting.
        stratified: Spread the times of a training batch evenly over their density.
        label_dropout: Probability with which a training sample loses its label, so that the network also learns the
            unconditional denoiser that guidance needs (Ho and Salimans 2022).

    Attributes:
        clip: In sampling, estimates of the image are clipped to [-clip, clip]; None: as the network gave them.
    """

    clip: float | None = None

    def __init__(self, weighting: str, gamma: float, stratified: bool, label_dropout: float) -> None:
        if not 0.0 <= label_dropout <= 1.0:
            raise ValueError(f"label_dropout={label_dropout} must be a probability between 0 and 1.")
        if gamma <= 0:
            raise ValueError(f"gamma={gamma} must be positive.")
        weights(weighting, gamma, torch.ones(1), torch.ones(1))  # refuses an unknown name
        self.weighting = weighting
        self.gamma = gamma
        self.stratified = stratified
        self.label_dropout = label_dropout

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
        weighting: See `Objective`.
        gamma: See `Objective`.
        stratified: See `Objective`.
        label_dropout: See `Objective`.

    Example:
        >>> EDM().denoise(lambda x, c_noise, labels: x.half(), torch.ones(1, 1, 2, 2), torch.ones(1), None).dtype
        torch.float32
    """

    def __init__(
        self,
        sigma_data: float = 0.5,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
        weighting: WeightingName = "none",
        gamma: float = 5.0,
        stratified: bool = False,
        label_dropout: float = 0.1,
    ) -> None:
        super().__init__(weighting, gamma, stratified, label_dropout)
        if sigma_data <= 0 or P_std <= 0:
            raise ValueError(f"sigma_data={sigma_data} and P_std={P_std} must be positive.")
        if not 0 < sigma_min < sigma_max:
            raise ValueError(f"sigma_min={sigma_min} and sigma_max={sigma_max} must be 0 < sigma_min < sigma_max.")
        self.sigma_data = sigma_data
        self.P_mean = P_mean
        self.P_std = P_std
        self.sigma_min = sigma_min
        self.sigma_max = sigma_max
        self.rho = rho

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
            little about the image. None does not.
        weighting: See `Objective`.
        gamma: See `Objective`.
        stratified: See `Objective`.
        label_dropout: See `Objective`.

    Example:
        >>> DDPM().times(torch.tensor([-9.0, 0.0, 9.0]))
        tensor([  0., 500., 999.])
    """

    def __init__(
        self,
        prediction: Prediction = "epsilon",
        schedule: ScheduleName = "cosine",
        timesteps: int = 1000,
        zero_snr: bool = False,
        density: DensityName = "uniform",
        P_mean: float = 0.0,
        P_std: float = 1.0,
        clip: float | None = 1.0,
        weighting: WeightingName = "none",
        gamma: float = 5.0,
        stratified: bool = False,
        label_dropout: float = 0.1,
    ) -> None:
        super().__init__(weighting, gamma, stratified, label_dropout)
        if prediction not in get_args(Prediction):
            raise ValueError(f"prediction={prediction!r} is unknown. Choices: {', '.join(get_args(Prediction))}.")
        if prediction == "epsilon" and zero_snr:
            raise ValueError(
                f"prediction={prediction!r} says nothing about the image where there is noise alone, as zero_snr=True "
                "has it. Choose prediction='v' or prediction='x0'."
            )
        unit_times(density, torch.zeros(1), P_mean, P_std)  # refuses an unknown name
        self.prediction = prediction
        self.schedule = Schedule(schedule, timesteps, zero_snr)
        self.schedule_name = schedule
        self.zero_snr = zero_snr
        self.timesteps = timesteps
        self.density = density
        self.P_mean = P_mean
        self.P_std = P_std
        self.clip = clip

    def times(self, normal: Tensor) -> Tensor:
        """Whole timesteps, 0 to T - 1."""
        unit = unit_times(self.density, normal, self.P_mean, self.P_std)
        return (unit * self.timesteps).floor().clamp(0, self.timesteps - 1)

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """From the table; timestep -1 is the image itself."""
        return self.schedule(time)

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


class FlowMatching(Objective):
    """Rectified flow (Liu et al. 2023; Lipman et al. 2023): x = (1 - t) · image + t · noise.

    The network predicts the velocity dx/dt = noise - image, so that D = x - t F.

    Args:
        density: Of training times: `uniform`, or `logit_normal` (Esser et al. 2024).
        P_mean: Mean of the logit-normal density.
        P_std: Standard deviation of the logit-normal density.
        shift: Sampling times t become s t / (1 + (s - 1) t): above 1 more of them are spent on noise, for large images.
        weighting: See `Objective`.
        gamma: See `Objective`.
        stratified: See `Objective`.
        label_dropout: See `Objective`.

    Example:
        >>> FlowMatching().sampling_times(4)
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def __init__(
        self,
        density: DensityName = "logit_normal",
        P_mean: float = 0.0,
        P_std: float = 1.0,
        shift: float = 1.0,
        weighting: WeightingName = "none",
        gamma: float = 5.0,
        stratified: bool = False,
        label_dropout: float = 0.1,
    ) -> None:
        super().__init__(weighting, gamma, stratified, label_dropout)
        if shift <= 0:
            raise ValueError(f"shift={shift} must be positive.")
        unit_times(density, torch.zeros(1), P_mean, P_std)  # refuses an unknown name
        self.density = density
        self.P_mean = P_mean
        self.P_std = P_std
        self.shift = shift

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
