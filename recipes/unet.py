"""A small class-conditional U-Net, readable top to bottom.

Why it exists: the default recipe needs a real network that trains in a minute on two CPU cores, and whose layers carry
the names that per-layer fp32 policies already know from diffusers (`time_embedding`, `class_embedding`,
`conv_norm_out`, `conv_out`, ...). The module tree and the arithmetic follow diffusers' `UNet2DModel` made of
`DownBlock2D` and `AttnDownBlock2D`, with `layers_per_block + 1` residual layers per resolution on the way up.

It leaves out dropout, so that a training run consumes no global random numbers and resumes bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoid(position: Tensor, dim: int, max_period: float = 10_000.0) -> Tensor:
    """Sine and cosine features of a position, always computed in fp32.

    A 16-bit position would be rounded before the sine is taken: in bf16 only 507 of the timesteps 0 to 999 stay
    distinct. So the position is widened first, and whoever consumes the features casts them.

    Args:
        position: Timestep or noise level, `(batch,)`, any real dtype.
        dim: Number of features, even.
        max_period: Longest period divided by 2π, in units of `position`.

    Returns:
        Features `(batch, dim)` in fp32, cosines first (Vaswani et al. 2017; the order is that of DDPM++ checkpoints).

    Example:
        >>> sinusoid(torch.tensor([0.0]), 4)
        tensor([[1., 1., 0., 0.]])
    """
    if dim % 2:
        raise ValueError(f"sinusoid needs an even number of features, got dim={dim}.")
    half = dim // 2
    frequency = torch.exp(
        torch.arange(half, dtype=torch.float32, device=position.device) * (-math.log(max_period) / half)
    )
    angle = position.float()[:, None] * frequency[None, :]  # (batch, half), fp32
    return torch.cat([angle.cos(), angle.sin()], dim=1)


class TimestepEmbedding(nn.Module):
    """Two linear layers that turn the sinusoid into the conditioning vector."""

    def __init__(self, in_channels: int, time_embed_dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, time_embed_dim)
        self.linear_2 = nn.Linear(time_embed_dim, time_embed_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Map `(batch, in_channels)` to `(batch, time_embed_dim)`."""
        return self.linear_2(F.silu(self.linear_1(features)))


class ResnetBlock(nn.Module):
    """Norm, SiLU, 3x3 convolution, twice, with the conditioning vector added in between."""

    def __init__(self, in_channels: int, out_channels: int, temb_channels: int, norm_num_groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(norm_num_groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(temb_channels, out_channels)
        self.norm2 = nn.GroupNorm(norm_num_groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Map `(batch, in_channels, H, W)` and `(batch, temb_channels)` to `(batch, out_channels, H, W)`."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return x + h


class Attention(nn.Module):
    """Self-attention over the pixels of a feature map, with a residual connection."""

    def __init__(self, channels: int, head_dim: int, norm_num_groups: int) -> None:
        super().__init__()
        if channels % head_dim:
            raise ValueError(
                f"attention_head_dim={head_dim} does not divide the {channels} channels of an attention level. "
                f"Choose a divisor of {channels}."
            )
        self.heads = channels // head_dim
        self.group_norm = nn.GroupNorm(norm_num_groups, channels)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList(
            [nn.Linear(channels, channels)]
        )  # a list because diffusers has a dropout at index 1

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to the same shape."""
        batch, channels, height, width = x.shape
        tokens = self.group_norm(x).flatten(2).transpose(1, 2)  # (batch, H*W, channels)
        q, k, v = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (batch, heads, H*W, head_dim)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        tokens = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = self.to_out[0](tokens)
        return x + tokens.transpose(1, 2).reshape(batch, channels, height, width)


class Downsample(nn.Module):
    """Halve height and width with a strided convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to `(batch, channels, H/2, W/2)`."""
        return self.conv(x)


class Upsample(nn.Module):
    """Double height and width by repeating pixels, then convolve."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to `(batch, channels, 2H, 2W)`."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownBlock(nn.Module):
    """One resolution on the way down: residual layers, each with optional attention, then optionally half the size."""

    def __init__(
        self, channels: Sequence[int], temb_channels: int, head_dim: int | None, norm_num_groups: int, halve: bool
    ) -> None:
        super().__init__()
        self.resnets, self.attentions = _layers(channels[:-1], channels[-1], temb_channels, head_dim, norm_num_groups)
        self.downsamplers = nn.ModuleList([Downsample(channels[-1])] if halve else [])

    def forward(self, x: Tensor, temb: Tensor) -> list[Tensor]:
        """Return every feature map `(batch, channels, H, W)` that the way up will need, the last one to go on with."""
        skips = []
        for index, resnet in enumerate(self.resnets):
            x = resnet(x, temb)
            if self.attentions:
                x = self.attentions[index](x)
            skips.append(x)
        return [*skips, *(downsample(x) for downsample in self.downsamplers)]


class UpBlock(nn.Module):
    """One resolution on the way up: like `DownBlock`, but each residual layer also takes a map from the way down."""

    def __init__(
        self, channels: Sequence[int], temb_channels: int, head_dim: int | None, norm_num_groups: int, double: bool
    ) -> None:
        super().__init__()
        self.resnets, self.attentions = _layers(channels[:-1], channels[-1], temb_channels, head_dim, norm_num_groups)
        self.upsamplers = nn.ModuleList([Upsample(channels[-1])] if double else [])

    def forward(self, x: Tensor, temb: Tensor, skips: list[Tensor]) -> Tensor:
        """Map `(batch, channels, H, W)` to the next resolution; `skips` has a map per layer, used from the end."""
        for index, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, skips[-1 - index]], dim=1), temb)
            if self.attentions:
                x = self.attentions[index](x)
        for upsample in self.upsamplers:
            x = upsample(x)
        return x


def _layers(
    inputs: Sequence[int], out: int, temb_channels: int, head_dim: int | None, norm_num_groups: int
) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Residual layers with these input channels, and as many attentions, or none without a head dimension."""
    resnets = nn.ModuleList(ResnetBlock(channels, out, temb_channels, norm_num_groups) for channels in inputs)
    attentions = nn.ModuleList(Attention(out, head_dim, norm_num_groups) for _ in inputs if head_dim)
    return resnets, attentions


class MidBlock(nn.Module):
    """Residual layer, attention, residual layer at the lowest resolution."""

    def __init__(self, channels: int, temb_channels: int, head_dim: int, norm_num_groups: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels, head_dim, norm_num_groups)])
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, temb_channels, norm_num_groups) for _ in range(2))

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to the same shape."""
        x = self.attentions[0](self.resnets[0](x, temb))
        return self.resnets[1](x, temb)


class UNet(nn.Module):
    """Class-conditional U-Net (Ronneberger et al. 2015; Ho et al. 2020; Song et al. 2021 for the layer layout).

    Args:
        in_channels: Channels of the image, in and out.
        num_classes: Number of labels. One more row of `class_embedding`, at index `num_classes`, stands for "no label".
        block_out_channels: Channels at each resolution, highest first.
        attention_levels: Which of these resolutions have self-attention (0 is the highest).
        layers_per_block: Residual layers per resolution on the way down.
        attention_head_dim: Channels per attention head.
        norm_num_groups: Groups of every GroupNorm; must divide all channel counts.
        time_scale: The noise level is multiplied by this before its sinusoid is taken. The sinusoid was made for
            timesteps 0 to 1000; EDM's noise level ln(σ)/4 spans about -1.5 to 1.1.

    Example:
        >>> net = UNet(in_channels=1, num_classes=10, block_out_channels=[8, 8], norm_num_groups=4)
        >>> net(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([3, net.null_label])).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        block_out_channels: Sequence[int] = (32, 64),
        attention_levels: Sequence[int] = (),
        layers_per_block: int = 1,
        attention_head_dim: int = 8,
        norm_num_groups: int = 8,
        time_scale: float = 1000.0,
    ) -> None:
        super().__init__()
        channels = list(block_out_channels)
        odd = [c for c in channels if c % norm_num_groups]
        if not channels or odd:
            raise ValueError(
                f"block_out_channels={channels} must be a non-empty list of multiples of norm_num_groups="
                f"{norm_num_groups}; got {odd or 'an empty list'}."
            )
        unknown = [level for level in attention_levels if not 0 <= level < len(channels)]
        if unknown:
            raise ValueError(
                f"attention_levels={list(attention_levels)} names levels {unknown}; there are levels 0 to "
                f"{len(channels) - 1}."
            )
        self.null_label = num_classes
        self.time_scale = time_scale
        self.time_features = channels[0]
        temb = 4 * channels[0]
        self.conv_in = nn.Conv2d(in_channels, channels[0], 3, padding=1)
        self.time_embedding = TimestepEmbedding(channels[0], temb)
        self.class_embedding = nn.Embedding(num_classes + 1, temb)

        def head_dim(level: int) -> int | None:
            return attention_head_dim if level in attention_levels else None

        # `skips` lists the channels of every feature map that the way down hands over to the way up.
        last = len(channels) - 1
        current = channels[0]
        skips = [current]
        self.down_blocks = nn.ModuleList()
        for level, out in enumerate(channels):
            chain = [current, *[out] * layers_per_block]
            self.down_blocks.append(DownBlock(chain, temb, head_dim(level), norm_num_groups, halve=level < last))
            skips += [out] * (layers_per_block + (level < last))
            current = out

        self.mid_block = MidBlock(current, temb, attention_head_dim, norm_num_groups)

        self.up_blocks = nn.ModuleList()
        for level, out in reversed(list(enumerate(channels))):
            chain = []
            for _ in range(layers_per_block + 1):
                chain.append(current + skips.pop())
                current = out
            self.up_blocks.append(UpBlock([*chain, out], temb, head_dim(level), norm_num_groups, double=level > 0))

        self.conv_norm_out = nn.GroupNorm(norm_num_groups, channels[0])
        self.conv_out = nn.Conv2d(channels[0], in_channels, 3, padding=1)
        # A zero output makes EDM's untrained denoiser D = c_skip x, so the first steps are small and finite.
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, noise_level: Tensor, labels: Tensor) -> Tensor:
        """Predict from a noisy image, its noise level and its label.

        Args:
            x: Noisy image `(batch, in_channels, H, W)`, scaled to unit variance by the objective. H and W must be
                multiples of 2 ** (number of resolutions - 1).
            noise_level: `(batch,)`, fp32.
            labels: `(batch,)`, int64, 0 to `num_classes`; `null_label` means "no label".

        Returns:
            `(batch, in_channels, H, W)`, in whatever dtype the last layer returns.
        """
        temb = self.time_embedding(sinusoid(noise_level.float() * self.time_scale, self.time_features))
        temb = temb + self.class_embedding(labels)

        skips = [self.conv_in(x)]
        for down in self.down_blocks:
            skips += down(skips[-1], temb)
        x = self.mid_block(skips[-1], temb)
        for up in self.up_blocks:
            needed = len(up.resnets)  # type: ignore[arg-type]
            x = up(x, temb, skips[-needed:])  # not popped there: FSDP2 hands each unit a copy of its arguments
            del skips[-needed:]
        return self.conv_out(F.silu(self.conv_norm_out(x)))
