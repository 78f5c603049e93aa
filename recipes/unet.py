"""A class-conditional U-Net, readable top to bottom.

Why it exists: recipes need a real network, from one that trains in a minute on two CPU cores to ADM's, whose layers
carry the names that per-layer fp32 policies already know from diffusers (`time_embedding`, `class_embedding`,
`conv_norm_out`, `conv_out`, ...). Weights and arithmetic are those of diffusers' `UNet2DModel`: a state dict of one
loads into the other.

It leaves out dropout, so that a training run consumes no global random numbers and resumes bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.sizes import at_least_one


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


def call(block: Callable[..., Any], *inputs: Any, checkpointing: bool) -> Any:
    """`block(*inputs)`; with checkpointing, its activations are computed again in backward instead of being kept.

    The networks here draw no random numbers, so no generator state is saved with it.
    """
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)


class ResnetBlock(nn.Module):
    """Norm, SiLU, 3x3 convolution, twice, with the conditioning vector coming in between.

    Args:
        in_channels: Channels that come in.
        out_channels: Channels that go out.
        temb_channels: Width of the conditioning vector.
        norm_num_groups: Groups of both norms.
        scale_shift: The vector scales and shifts the second norm's result (Dhariwal and Nichol 2021, "adaptive group
            normalisation") instead of being added before it.
        resample: Change height and width on both branches: `down` halves them, `up` doubles them.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        temb_channels: int,
        norm_num_groups: int,
        scale_shift: bool = False,
        resample: Literal["down", "up"] | None = None,
    ) -> None:
        super().__init__()
        self.scale_shift = scale_shift
        self.resample = resample
        self.norm1 = nn.GroupNorm(norm_num_groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(temb_channels, (1 + scale_shift) * out_channels)
        self.norm2 = nn.GroupNorm(norm_num_groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Map `(batch, in_channels, H, W)` and `(batch, temb_channels)` to `(batch, out_channels, H', W')`."""
        h = F.silu(self.norm1(x))
        x, h = (self._resampled(t) for t in (x, h))
        h = self.conv1(h)
        condition = self.time_emb_proj(F.silu(temb))[:, :, None, None]
        if self.scale_shift:
            scale, shift = condition.chunk(2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + condition)
        h = self.conv2(F.silu(h))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return x + h

    def _resampled(self, x: Tensor) -> Tensor:
        if self.resample == "down":
            return F.avg_pool2d(x, 2)
        return F.interpolate(x, scale_factor=2.0, mode="nearest") if self.resample == "up" else x


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

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to `(batch, channels, H/2, W/2)`."""
        return self.conv(x)


class Upsample(nn.Module):
    """Double height and width by repeating pixels, then convolve."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        """Map `(batch, channels, H, W)` to `(batch, channels, 2H, 2W)`."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownBlock(nn.Module):
    """One resolution on the way down: residual layers, each with optional attention, then optionally half the size."""

    def __init__(self, resnets: list[nn.Module], attentions: list[nn.Module], downsamplers: list[nn.Module]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)
        self.attentions = nn.ModuleList(attentions)
        self.downsamplers = nn.ModuleList(downsamplers)

    def forward(self, x: Tensor, temb: Tensor) -> list[Tensor]:
        """Return every feature map `(batch, channels, H, W)` that the way up will need, the last one to go on with."""
        skips = []
        for index, resnet in enumerate(self.resnets):
            x = resnet(x, temb)
            if self.attentions:
                x = self.attentions[index](x)
            skips.append(x)
        return [*skips, *(downsample(x, temb) for downsample in self.downsamplers)]


class UpBlock(nn.Module):
    """One resolution on the way up: like `DownBlock`, but each residual layer also takes a map from the way down."""

    def __init__(self, resnets: list[nn.Module], attentions: list[nn.Module], upsamplers: list[nn.Module]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(resnets)
        self.attentions = nn.ModuleList(attentions)
        self.upsamplers = nn.ModuleList(upsamplers)

    def forward(self, x: Tensor, temb: Tensor, skips: list[Tensor]) -> Tensor:
        """Map `(batch, channels, H, W)` to the next resolution, with one map per residual layer, the last one first."""
        for index, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, skips[-1 - index]], dim=1), temb)
            if self.attentions:
                x = self.attentions[index](x)
        for upsample in self.upsamplers:
            x = upsample(x, temb)
        return x


class MidBlock(nn.Module):
    """Residual layer, attention, residual layer at the lowest resolution."""

    def __init__(self, attention: nn.Module, resnets: list[nn.Module]) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([attention])
        self.resnets = nn.ModuleList(resnets)

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
        layers_per_block: Residual layers per resolution on the way down; there is one more on the way up.
        attention_head_dim: Channels per attention head.
        norm_num_groups: Groups of every GroupNorm; must divide all channel counts.
        scale_shift: The condition scales and shifts normalised activations, as in ADM, instead of being added.
        resample: `conv` halves and doubles sizes by a convolution, `residual` inside a residual layer, as in ADM.
        time_scale: The noise level is multiplied by this before its sinusoid is taken. The sinusoid was made for
            timesteps 0 to 1000; EDM's noise level ln(σ)/4 spans about -1.5 to 1.1, DDPM's and flow matching's 0 to 1.
        checkpointing: Keep no activations inside blocks for backward, and compute them again: less memory, more time.

    Attributes:
        null_label: Row of `class_embedding` that stands for "no label".
        size_multiple: Of which the height and width of images must be multiples.

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
        scale_shift: bool = False,
        resample: Literal["conv", "residual"] = "conv",
        time_scale: float = 1000.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(
            in_channels=in_channels,
            layers_per_block=layers_per_block,
            attention_head_dim=attention_head_dim,
            norm_num_groups=norm_num_groups,
        )
        channels = list(block_out_channels)
        odd = [c for c in channels if c < 1 or c % norm_num_groups]
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
        if resample not in ("conv", "residual"):
            raise ValueError(f"resample={resample!r} must be 'conv' or 'residual'.")
        self.null_label = num_classes
        self.time_scale = time_scale
        self.time_features = channels[0]
        self.size_multiple = 2 ** (len(channels) - 1)
        self.checkpointing = checkpointing
        temb = 4 * channels[0]
        self.conv_in = nn.Conv2d(in_channels, channels[0], 3, padding=1)
        self.time_embedding = TimestepEmbedding(channels[0], temb)
        self.class_embedding = nn.Embedding(num_classes + 1, temb)

        def resnet(inputs: int, out: int, change: Literal["down", "up"] | None = None) -> nn.Module:
            return ResnetBlock(inputs, out, temb, norm_num_groups, scale_shift, change)

        def attention(out: int) -> nn.Module:
            return Attention(out, attention_head_dim, norm_num_groups)

        def down(out: int) -> nn.Module:
            return Downsample(out) if resample == "conv" else resnet(out, out, "down")

        def up(out: int) -> nn.Module:
            return Upsample(out) if resample == "conv" else resnet(out, out, "up")

        # `skips` lists the channels of every feature map that the way down hands over to the way up.
        last = len(channels) - 1
        current = channels[0]
        skips = [current]
        self.down_blocks = nn.ModuleList()
        for level, out in enumerate(channels):
            inputs = [current, *[out] * (layers_per_block - 1)]
            resnets = [resnet(c, out) for c in inputs]
            attentions = [attention(out) for _ in inputs if level in attention_levels]
            self.down_blocks.append(DownBlock(resnets, attentions, [down(out)] if level < last else []))
            skips += [out] * (layers_per_block + (level < last))
            current = out

        middle = attention(current)
        self.mid_block = MidBlock(middle, [resnet(current, current) for _ in range(2)])

        self.up_blocks = nn.ModuleList()
        for level, out in reversed(list(enumerate(channels))):
            inputs = [c + skips.pop() for c in [current, *[out] * layers_per_block]]
            resnets = [resnet(c, out) for c in inputs]
            attentions = [attention(out) for _ in inputs if level in attention_levels]
            self.up_blocks.append(UpBlock(resnets, attentions, [up(out)] if level > 0 else []))
            current = out

        self.conv_norm_out = nn.GroupNorm(norm_num_groups, channels[0])
        self.conv_out = nn.Conv2d(channels[0], in_channels, 3, padding=1)
        # A zero output makes EDM's untrained denoiser D = c_skip x, so the first steps are small and finite.
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, noise_level: Tensor, labels: Tensor) -> Tensor:
        """Predict from a noisy image, its noise level and its label.

        Args:
            x: Noisy image `(batch, in_channels, H, W)`, scaled by the objective. H and W must be multiples of
                `size_multiple`.
            noise_level: `(batch,)`, fp32.
            labels: `(batch,)`, int64, 0 to `num_classes`; `null_label` means "no label".

        Returns:
            `(batch, in_channels, H, W)`, in whatever dtype the last layer returns.
        """
        temb = self.time_embedding(sinusoid(noise_level.float() * self.time_scale, self.time_features))
        temb = temb + self.class_embedding(labels)

        skips = [self.conv_in(x)]
        for down in self.down_blocks:
            skips += call(down, skips[-1], temb, checkpointing=self.checkpointing)
        x = call(self.mid_block, skips[-1], temb, checkpointing=self.checkpointing)
        for up in self.up_blocks:
            split = len(skips) - len(up.resnets)  # type: ignore[arg-type]
            x = call(up, x, temb, skips[split:], checkpointing=self.checkpointing)
            skips = skips[:split]
        return self.conv_out(F.silu(self.conv_norm_out(x)))
