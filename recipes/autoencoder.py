"""Autoencoders whose latents are trained on: a small one to train here, and frozen ones from a directory.

A frozen autoencoder belongs to the data, not to the trained module: it has no gradients, masters or averages, the
precision plugin never sees it, and it computes in a dtype of its own, since many of them leave fp16's range
(huggingface/diffusers#4038). Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.config import ConfigError
from recipes.sizes import at_least_one

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = "model.safetensors"
"""File of an `Autoencoder`'s weights, beside its `config.json`."""


class ResidualBlock(nn.Module):
    """Norm, SiLU, 3x3 convolution, twice, and the input added."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, in_channels, H, W)` to `(batch, out_channels, H, W)`."""
        h = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Autoencoder(nn.Module):
    """A small convolutional autoencoder with a normal posterior (Kingma and Welling 2014), as diffusers' AutoencoderKL.

    Args:
        in_channels: Channels of the images.
        latent_channels: Channels of the latents.
        block_out_channels: Channels at each resolution; every one after the first halves height and width.
        norm_num_groups: Groups of each GroupNorm.
        scaling_factor: Latents are multiplied by this for the diffusion model: one over their standard deviation.

    Example:
        >>> net = Autoencoder(in_channels=1, latent_channels=2)
        >>> mean, std = net.encode(torch.zeros(3, 1, 8, 8))
        >>> mean.shape, net.decode(mean).shape
        (torch.Size([3, 2, 4, 4]), torch.Size([3, 1, 8, 8]))
    """

    def __init__(
        self,
        in_channels: int = 3,
        latent_channels: int = 4,
        block_out_channels: Sequence[int] = (32, 64),
        norm_num_groups: int = 8,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        at_least_one(in_channels=in_channels, latent_channels=latent_channels, norm_num_groups=norm_num_groups)
        channels = list(block_out_channels)
        if not channels or any(c < 1 or c % norm_num_groups for c in channels):
            raise ValueError(
                f"block_out_channels={channels} must be a non-empty list of multiples of "
                f"norm_num_groups={norm_num_groups}."
            )
        self.config = {
            "in_channels": in_channels,
            "latent_channels": latent_channels,
            "block_out_channels": list(block_out_channels),
            "norm_num_groups": norm_num_groups,
            "scaling_factor": scaling_factor,
        }
        first, last = block_out_channels[0], block_out_channels[-1]
        steps = list(itertools.pairwise(block_out_channels))
        down: list[nn.Module] = [nn.Conv2d(in_channels, first, 3, padding=1)]
        for here, below in steps:
            down += [ResidualBlock(here, here, norm_num_groups), nn.Conv2d(here, below, 3, stride=2, padding=1)]
        down += [ResidualBlock(last, last, norm_num_groups), nn.GroupNorm(norm_num_groups, last), nn.SiLU()]
        self.encoder = nn.Sequential(*down, nn.Conv2d(last, 2 * latent_channels, 3, padding=1))
        up: list[nn.Module] = [nn.Conv2d(latent_channels, last, 3, padding=1)]
        for here, below in reversed(steps):
            up += [ResidualBlock(below, below, norm_num_groups), nn.Upsample(scale_factor=2)]
            up += [nn.Conv2d(below, here, 3, padding=1)]
        up += [ResidualBlock(first, first, norm_num_groups), nn.GroupNorm(norm_num_groups, first), nn.SiLU()]
        self.decoder = nn.Sequential(*up, nn.Conv2d(first, in_channels, 3, padding=1))

    @property
    def downsampling(self) -> int:
        """Height of an image divided by that of its latents."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)  # type: ignore[arg-type]

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation `(batch, latent_channels, H', W')` of the posterior of images in [-1, 1]."""
        if images.shape[2] % self.downsampling or images.shape[3] % self.downsampling:
            raise ValueError(
                f"height and width must be multiples of {self.downsampling} for these block_out_channels, got images "
                f"of shape {list(images.shape[1:])}."
            )
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return mean, (log_variance.clamp(-30, 20) / 2).exp()

    def decode(self, latents: Tensor) -> Tensor:
        """Images `(batch, in_channels, H, W)`; `latents` as `encode` gives them."""
        return self.decoder(latents)

    def save(self, directory: Path) -> None:
        """Write `config.json` and the weights in fp32, so that `FrozenAutoencoder` finds either both or nothing.

        Args:
            directory: Made if it is missing.
        """
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "config.json"
        config.unlink(missing_ok=True)  # comes back last
        weights = {name: value.float().cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(weights, directory / WEIGHTS)
        write_atomically(config, json.dumps({"_class_name": type(self).__name__, **self.config}, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the whole text, or what was there before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


class FrozenAutoencoder:
    """Encodes and decodes with the weights in a directory, in a dtype of its own, never trained and never cast.

    Args:
        path: What `Autoencoder.save` or diffusers' `AutoencoderKL.save_pretrained` wrote.
        dtype: `fp32`, `bf16` or `fp16`. Not every autoencoder stays finite in fp16.

    Raises:
        ConfigError: If there is none, with what to write.
    """

    def __init__(self, path: str, dtype: str = "fp32") -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype} of the autoencoder is unknown. Choices: {', '.join(DTYPES)}.")
        self.path = path
        self.dtype = DTYPES[dtype]
        config = read_config(path)
        try:
            load = _own if config["_class_name"] == "Autoencoder" else _from_diffusers
            self.model = load(path, self.dtype).requires_grad_(False).eval()
        except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
            raise ConfigError(f"autoencoder={path} cannot be loaded: {error}") from error
        config = dict(self.model.config)  # type: ignore[arg-type]  # with the defaults that a file may leave out
        self.scaling_factor = float(config["scaling_factor"])
        self.shift_factor = float(config.get("shift_factor") or 0.0)

    def to(self, device: torch.device | str) -> FrozenAutoencoder:
        """Move the weights."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior, `(batch, C, h, w)` in the autoencoder's dtype, not scaled.

        Args:
            images: `(batch, channels, H, W)` in [-1, 1], fp32, on the device of the weights.
        """
        with torch.autocast(images.device.type, enabled=False):
            posterior = self.model.encode(images.to(self.dtype))  # type: ignore[operator]
        if isinstance(posterior, tuple):
            return posterior
        return posterior.latent_dist.mean, posterior.latent_dist.std

    @torch.no_grad()
    def decode(self, latents: Tensor, at_once: int = 8) -> Tensor:
        """Images `(batch, channels, H, W)` in fp32 of scaled latents, on their device.

        Args:
            latents: `(batch, C, h, w)`, as a diffusion model gives them.
            at_once: Decoded together; the largest activations are those of the decoder.
        """
        self.to(latents.device)
        images = []
        with torch.autocast(latents.device.type, enabled=False):
            for part in (latents.float() / self.scaling_factor + self.shift_factor).split(at_once):
                decoded = self.model.decode(part.to(self.dtype))  # type: ignore[operator]
                images.append((decoded if isinstance(decoded, Tensor) else decoded.sample).float())
        return torch.cat(images)


def read_config(path: str) -> dict[str, Any]:
    """`config.json` of an autoencoder.

    Raises:
        ConfigError: If the directory or the file is missing or of something else.
    """
    directory = Path(path)
    remedy = (
        "Train one: python -m recipes.train_autoencoder. Or fetch one of diffusers' AutoencoderKL yourself, by "
        "hf download NAME --local-dir DIRECTORY, and give DIRECTORY: nothing is downloaded here."
    )
    if not directory.is_dir():
        raise ConfigError(f"autoencoder={path}: there is no directory {directory.absolute()}. {remedy}")
    try:
        config = json.loads((directory / "config.json").read_text())
        name = config["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"autoencoder={path}: {directory.absolute()} has no config.json of an autoencoder ({error}). {remedy}"
        ) from error
    if name not in ("Autoencoder", "AutoencoderKL"):
        raise ConfigError(f"autoencoder={path}: a {name} cannot be used, an Autoencoder or AutoencoderKL can. {remedy}")
    return config


def fingerprint(path: str) -> str:
    """Which autoencoder this is: SHA-256 of its weight files and of the scaling, which together decide the latents.

    Raises:
        ConfigError: If it is none, or has no weights.
    """
    config = read_config(path)
    digest = hashlib.sha256(f"{config.get('scaling_factor')} {config.get('shift_factor')}".encode())
    files = list(_weight_files(Path(path)))
    if not files:
        raise ConfigError(f"autoencoder={path}: no weights (*.safetensors or *.bin) beside its config.json.")
    for file in files:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _weight_files(directory: Path) -> Iterator[Path]:
    yield from sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])


def _own(path: str, dtype: torch.dtype) -> nn.Module:
    config = {key: value for key, value in read_config(path).items() if key != "_class_name"}
    model = Autoencoder(**config)
    model.load_state_dict(load_file(Path(path) / WEIGHTS))
    return model.to(dtype)


def _from_diffusers(path: str, dtype: torch.dtype) -> nn.Module:
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise ConfigError(
            f"autoencoder={path} is one of diffusers, which is not installed: pip install 'diffusers>=0.36', or from a "
            "checkout pip install -e '.[diffusers]'."
        ) from error
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": False}  # the default warns if accelerate is not installed
    return AutoencoderKL.from_pretrained(path, local_files_only=True, **options)
