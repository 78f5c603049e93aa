"""The EDM training objective (Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models").

Everything here is fp32 arithmetic around one call of the network: noise levels, preconditioning, targets, weights and
loss. The network may compute in any dtype; its output is widened before anything is computed with it. All operations
here are elementwise or reductions on fp32 tensors, which `torch.autocast` leaves alone, so the same code is right
inside and outside an autocast region.

It leaves out how random numbers are drawn (`recipes.randomness`) and how labels are dropped (`recipes.diffusion`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
        >>> import torch
        >>> squared_error(torch.full((1, 2), 300.0, dtype=torch.float16), torch.zeros(1, 2))
        tensor([90000.])
    """
    return (prediction.float() - target.float()).square().flatten(1).mean(dim=1)


class EDM:
    """Denoising score matching with EDM's preconditioning and log-normal noise levels.

    With D(x; σ) = c_skip x + c_out F(c_in x; c_noise) and (table 1 of the paper)

        c_skip = σ_data² / (σ² + σ_data²)       c_out = σ σ_data / sqrt(σ² + σ_data²)
        c_in = 1 / sqrt(σ² + σ_data²)           c_noise = ln(σ) / 4
        λ = (σ² + σ_data²) / (σ σ_data)²        ln σ ~ N(P_mean, P_std²)

    the loss of a sample is λ · mean((D(y + σ n; σ) - y)²).

    Args:
        sigma_data: Standard deviation of the data.
        P_mean: Mean of ln σ in training.
        P_std: Standard deviation of ln σ in training.
        label_dropout: Probability with which a training sample loses its label, so that the network also learns the
            unconditional denoiser that guidance needs (Ho and Salimans 2022).

    Example:
        >>> import torch
        >>> EDM().denoise(lambda x, c_noise, labels: x.half(), torch.ones(1, 1, 2, 2), torch.ones(1), None).dtype
        torch.float32
    """

    def __init__(
        self, sigma_data: float = 0.5, P_mean: float = -1.2, P_std: float = 1.2, label_dropout: float = 0.1
    ) -> None:
        if not 0.0 <= label_dropout <= 1.0:
            raise ValueError(f"label_dropout={label_dropout} must be a probability between 0 and 1.")
        if sigma_data <= 0 or P_std <= 0:
            raise ValueError(f"sigma_data={sigma_data} and P_std={P_std} must be positive.")
        self.sigma_data = sigma_data
        self.P_mean = P_mean
        self.P_std = P_std
        self.label_dropout = label_dropout

    def sigma(self, normal: Tensor) -> Tensor:
        """Noise levels from standard normal numbers: σ = exp(P_mean + P_std · normal), fp32, same shape."""
        return (normal.float() * self.P_std + self.P_mean).exp()

    def denoise(self, net: Network, noisy: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Estimate the clean image.

        Args:
            net: The raw network F.
            noisy: y + σ n, `(batch, C, H, W)`.
            sigma: Noise level of each sample, `(batch,)`.
            labels: `(batch,)`, int64, handed through to the network.

        Returns:
            D(noisy; σ), `(batch, C, H, W)` in fp32.
        """
        noisy, sigma = noisy.float(), sigma.float()
        s = sigma.reshape(-1, *[1] * (noisy.ndim - 1))  # (batch, 1, 1, 1), broadcasts over the image
        total = s.square() + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = s * self.sigma_data * total.rsqrt()
        c_in = total.rsqrt()
        c_noise = sigma.log() / 4
        return c_skip * noisy + c_out * net(c_in * noisy, c_noise, labels).float()

    def weight(self, sigma: Tensor) -> Tensor:
        """Loss weight λ(σ) = 1 / c_out², fp32, same shape. It makes the untrained loss alike at every noise level."""
        sigma = sigma.float()
        return (sigma.square() + self.sigma_data**2) / (sigma * self.sigma_data).square()

    def loss(self, net: Network, images: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """Weighted denoising loss of each sample.

        Args:
            net: The raw network F.
            images: Clean images y, `(batch, C, H, W)`.
            labels: `(batch,)`, int64.
            sigma: `(batch,)`.
            noise: Standard normal n, same shape as `images`.

        Returns:
            `(batch,)` in fp32; its mean is what training minimises.
        """
        images = images.float()
        noisy = images + sigma.float().reshape(-1, *[1] * (images.ndim - 1)) * noise.float()
        return self.weight(sigma) * squared_error(self.denoise(net, noisy, sigma, labels), images)
