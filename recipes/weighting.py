"""Loss weights over time, in a form that is finite everywhere.

A network's error can be read as an error of the noise or as one of the image; the two differ by a factor that depends
on time alone: (noise error)² = SNR · (image error)². Given how large both are for a unit error of what the network
predicts, every weighting below is right for every prediction, and none divides by an SNR that may be 0 or infinite.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

WeightingName = Literal["none", "min_snr", "soft_min_snr"]


def weights(name: str, gamma: float, noise_error: Tensor, image_error: Tensor) -> Tensor:
    """Weight of the squared error of what the network predicts.

    - `none`: 1.
    - `min_snr`: min(noise error, γ · image error) (Hang et al. 2023), which is min(SNR, γ) in terms of the image,
      min(SNR, γ) / SNR of ε and min(SNR, γ) / (SNR + 1) of v.
    - `soft_min_snr`: half their harmonic mean, γ · SNR / (SNR + γ) in terms of the image (Crowson et al. 2024).

    Args:
        name: One of these.
        gamma: γ, the SNR above which noise errors no longer count in full.
        noise_error: Squared error of the noise for a unit error of the prediction, `(batch,)`, may be infinite.
        image_error: Squared error of the image, likewise.

    Returns:
        `(batch,)`, in the dtype of the errors.

    Example:
        >>> snr = torch.tensor([0.0, 5.0, torch.inf])
        >>> weights("min_snr", 5.0, snr / (snr + 1), 1 / (snr + 1))  # v-prediction; inf / inf is what to avoid
        tensor([0.0000, 0.8333,    nan])
        >>> weights("min_snr", 5.0, 1 / (1 + 1 / snr), 1 / (snr + 1))
        tensor([0.0000, 0.8333, 0.0000])
    """
    if name == "none":
        return torch.ones_like(noise_error)
    if name == "min_snr":
        return torch.minimum(noise_error, gamma * image_error)
    if name == "soft_min_snr":
        return 1 / (1 / noise_error + 1 / (gamma * image_error))
    raise ValueError(f"weighting={name!r} is unknown. Choices: {', '.join(get_args(WeightingName))}.")
