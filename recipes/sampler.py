"""Samplers for every objective, and guidance.

A sampler knows an objective by its times, α and σ, and a network by the estimate of the clean image that it gives, so
that it works with all of them. All arithmetic is fp32 on the caller's device, with coefficients computed in float64;
only the network may compute in fewer bits. It leaves out added noise: a fixed seed then gives the same picture whenever
it is drawn, which is what a sample grid is for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recipes.denoising import Network, Objective
from recipes.randomness import SAMPLES, keyed_generator

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""`(noisy image, time of each sample) -> clean image in fp32`."""

Estimate = Callable[[Tensor, int], Tensor]
"""`(noisy image, index of the time in the sampler's list) -> clean image in fp32`."""


class Sampler(ABC):
    """Turns noise into images in a number of steps.

    Args:
        steps: Number of times at which the network is called.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1.")
        self.steps = steps

    def check(self, objective: Objective) -> None:
        """Refuse an objective that the sampler cannot be used with.

        Raises:
            ValueError: With what can be used instead.
        """
        objective.sampling_times(self.steps)

    def __call__(self, denoise: Denoiser, noise: Tensor, objective: Objective) -> Tensor:
        """Turn noise into images.

        Args:
            denoise: Estimates the clean image.
            noise: Standard normal, `(batch, C, H, W)`.
            objective: The one that the network was trained with; gives times, α and σ.

        Returns:
            Images, same shape, fp32. Not clamped: what the network really gave, non-finite values included.
        """
        self.check(objective)
        times = torch.tensor(objective.sampling_times(self.steps), dtype=torch.float64)
        _, sigma = objective.path(times)

        def at(x: Tensor, step: int) -> Tensor:
            return denoise(x, x.new_full((len(x),), float(times[step])))

        return self.solve(at, noise.float() * float(sigma[0]), objective, times)

    @abstractmethod
    def solve(self, denoise: Estimate, x: Tensor, objective: Objective, times: Tensor) -> Tensor:
        """Go from x at the first time to the image at the last.

        Args:
            denoise: Estimates the clean image at one of the times.
            x: `(batch, C, H, W)`, fp32.
            objective: As above.
            times: `(steps + 1,)` in float64.
        """


class DDIMSampler(Sampler):
    """DDIM (Song et al. 2021), deterministic: keep the estimate D of the image and of the noise over each step.

        x_s = α_s D + σ_s (x - α D) / σ

    Args:
        steps: Number of times. The network is called as often.

    Example:
        >>> from recipes.objective import DDPM
        >>> DDIMSampler(steps=2)(lambda x, time: torch.zeros_like(x), torch.ones(1, 1, 1, 1), DDPM()).item()
        0.0
    """

    def __init__(self, steps: int = 50) -> None:
        super().__init__(steps)

    def solve(self, denoise: Estimate, x: Tensor, objective: Objective, times: Tensor) -> Tensor:
        """See `Sampler.solve`."""
        alpha, sigma = (each.tolist() for each in objective.path(times))
        for i in range(self.steps):
            ratio = sigma[i + 1] / sigma[i]
            x = ratio * x + (alpha[i + 1] - ratio * alpha[i]) * denoise(x, i)
        return x


class DPMPP2MSampler(Sampler):
    """DPM-Solver++(2M) (Lu et al. 2022): DDIM with an estimate extrapolated from the last two.

    With λ = ln(α / σ), h = λ_s - λ and h' the step before, D becomes D + h / (2 h') · (D - D'). The first and the last
    step are DDIM's.

    Args:
        steps: Number of times. The network is called as often.

    Example:
        >>> from recipes.objective import EDM
        >>> DPMPP2MSampler(steps=2)(lambda x, time: torch.zeros_like(x), torch.ones(1, 1, 1, 1), EDM()).item()
        0.0
    """

    def __init__(self, steps: int = 20) -> None:
        super().__init__(steps)

    def solve(self, denoise: Estimate, x: Tensor, objective: Objective, times: Tensor) -> Tensor:
        """See `Sampler.solve`."""
        paths = objective.path(times)
        alpha, sigma = (each.tolist() for each in paths)
        lam = (paths[0].log() - paths[1].log()).tolist()  # -inf where there is no image, inf where there is no noise
        before = x  # without a weight in the first step
        for i in range(self.steps):
            clean = denoise(x, i)
            h = lam[i + 1] - lam[i]
            extrapolated = clean
            if i > 0 and math.isfinite(h):
                extrapolated = clean + h / (2 * (lam[i] - lam[i - 1])) * (clean - before)
            ratio = sigma[i + 1] / sigma[i]
            x = ratio * x + (alpha[i + 1] - ratio * alpha[i]) * extrapolated
            before = clean
        return x


class EulerSampler(Sampler):
    """Euler's method for the probability-flow ODE (Karras et al. 2022; in flow matching, along the velocity).

    It solves d(x/c)/ds = (x/c - D) / s, where the objective says what c and s are (`Objective.ode`).

    Args:
        steps: Number of times. The network is called as often.

    Example:
        >>> from recipes.objective import FlowMatching
        >>> EulerSampler(steps=2)(lambda x, time: torch.zeros_like(x), torch.ones(1, 1, 1, 1), FlowMatching()).item()
        0.0
    """

    def __init__(self, steps: int = 50) -> None:
        super().__init__(steps)

    def check(self, objective: Objective) -> None:
        """See `Sampler.check`."""
        times = torch.tensor(objective.sampling_times(self.steps), dtype=torch.float64)
        if not objective.ode(times)[1].isfinite().all():
            raise ValueError(
                f"{type(self).__name__} integrates over sigma / alpha, which is infinite where sampling of "
                f"{type(objective).__name__} starts: its schedule ends in noise alone. Choose sampler=ddim or "
                f"sampler=dpmpp_2m{', or objective.zero_snr=false' if hasattr(objective, 'zero_snr') else ''}."
            )

    def solve(self, denoise: Estimate, x: Tensor, objective: Objective, times: Tensor) -> Tensor:
        """See `Sampler.solve`."""
        scale, level = (each.tolist() for each in objective.ode(times))
        y = x / scale[0]
        for i in range(self.steps):
            y = y + (level[i + 1] - level[i]) * (y - denoise(scale[i] * y, i)) / level[i]
        return scale[-1] * y


class HeunSampler(EulerSampler):
    """Heun's second-order method for the same ODE (Karras et al. 2022, algorithm 1): mean of the slopes at both ends.

    Args:
        steps: Number of times. The network is called 2 · steps - 1 times.

    Example:
        >>> from recipes.objective import EDM
        >>> HeunSampler(steps=2)(lambda x, time: torch.zeros_like(x), torch.ones(1, 1, 1, 1), EDM()).item()
        0.0
    """

    def __init__(self, steps: int = 18) -> None:
        super().__init__(steps)

    def solve(self, denoise: Estimate, x: Tensor, objective: Objective, times: Tensor) -> Tensor:
        """See `Sampler.solve`."""
        scale, level = (each.tolist() for each in objective.ode(times))
        y = x / scale[0]

        def slope(y: Tensor, i: int) -> Tensor:
            return (y - denoise(scale[i] * y, i)) / level[i]

        for i in range(self.steps):
            here = slope(y, i)
            after = y + (level[i + 1] - level[i]) * here
            if level[i + 1] > 0:
                after = y + (level[i + 1] - level[i]) * (here + slope(after, i + 1)) / 2
            y = after
        return scale[-1] * y


def check_guidance(guidance: float, objective: Objective, null_label: int) -> None:
    """Refuse guidance by what the network has not learned: classes, or images without one.

    Args:
        guidance: See `guided`.
        objective: The one it was trained with.
        null_label: Of the network; 0: it has no classes.

    Raises:
        ValueError: With what guidance would need.

    Example:
        >>> from recipes.objective import EDM
        >>> check_guidance(2.0, EDM(label_dropout=0.0), null_label=10)
        Traceback (most recent call last):
        ValueError: guidance=2 needs images without a label, and objective.label_dropout=0 left none in training...
    """
    if guidance == 1.0:
        return
    if not null_label:
        raise ValueError(f"guidance={guidance:g} needs classes, and the network has none. Write guidance=1.")
    if objective.label_dropout == 0:
        raise ValueError(
            f"guidance={guidance:g} needs images without a label, and objective.label_dropout=0 left none in training. "
            "Write guidance=1, or train with objective.label_dropout=0.1."
        )


def guided(objective: Objective, net: Network, labels: Tensor, null_label: int, guidance: float = 1.0) -> Denoiser:
    """Classifier-free guidance (Ho and Salimans 2022): D = D(no label) + guidance · (D(label) - D(no label)).

    Args:
        objective: Turns the network into a denoiser, and clips the estimate if it is to be clipped.
        net: The raw network.
        labels: Wanted class of each sample, `(batch,)`, int64.
        null_label: The class index that means "no label".
        guidance: 1 samples the conditional model as trained (one network call), above 1 exaggerates the class,
            0 ignores it.

    Returns:
        A denoiser for a `Sampler`.
    """
    no_label = torch.full_like(labels, null_label)

    def denoise(x: Tensor, time: Tensor) -> Tensor:
        clean = objective.denoise(net, x, time, labels)
        if guidance != 1.0:
            without = objective.denoise(net, x, time, no_label)
            clean = without + guidance * (clean - without)
        if objective.clip is not None:
            clean = torch.where(clean.isinf(), clean, clean.clamp(-objective.clip, objective.clip))
        return clean

    return denoise


@torch.no_grad()
def draw_samples(
    net: nn.Module,
    objective: Objective,
    sampler: Sampler,
    image_shape: tuple[int, ...],
    per_class: int = 8,
    guidance: float = 1.0,
    seed: int = 0,
    classes: int = 10,
) -> Tensor:
    """Sample the first classes from the network as it stands.

    Args:
        net: Called directly, so no collective runs and one rank may sample alone. Has `null_label`.
        objective: The one it was trained with.
        sampler: Solver.
        image_shape: Channels, height and width.
        per_class: Images of each class.
        guidance: See `guided`.
        seed: See `draw_images`.
        classes: At most so many; a network without classes is sampled without a label, `per_class` times.

    Returns:
        `(per_class * classes, C, H, W)` in fp32; image i has class i modulo the number of classes.
    """
    null_label = int(net.null_label)  # type: ignore[arg-type]
    shown = min(max(null_label, 1), classes)  # without classes, 0 is the null label
    index = torch.arange(per_class * shown)
    return draw_images(net, objective, sampler, image_shape, index % shown, index // shown, guidance, seed)


@torch.no_grad()
def draw_images(
    net: nn.Module,
    objective: Objective,
    sampler: Sampler,
    image_shape: tuple[int, ...],
    labels: Tensor,
    rows: Tensor,
    guidance: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Sample images of given classes from the network as it stands.

    Args:
        net: See `draw_samples`.
        objective: See `draw_samples`.
        sampler: Solver.
        image_shape: Channels, height and width.
        labels: Class of each image, `(batch,)`, int64.
        rows: Number of each image within its class, `(batch,)`, int64. Class, row and seed decide the starting noise,
            so an image does not depend on those drawn with it, beyond the last bits of the network's arithmetic.
        guidance: See `guided`.
        seed: The starting noise is drawn on the CPU, so it is the same on every device.

    Returns:
        `(batch, C, H, W)` in fp32.
    """
    device = next(net.parameters()).device
    null_label = int(net.null_label)  # type: ignore[arg-type]
    keys = zip(labels.tolist(), rows.tolist(), strict=True)
    noise = torch.stack([torch.randn(image_shape, generator=keyed_generator(SAMPLES, seed, *key)) for key in keys])
    was_training = net.training
    net.eval()
    try:
        denoise = guided(objective, net, labels.to(device), null_label, guidance)
        return sampler(denoise, noise.to(device), objective)
    finally:
        net.train(was_training)
