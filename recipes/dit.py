"""A class-conditional diffusion transformer (Peebles and Xie 2023, "Scalable Diffusion Models with Transformers").

Why it exists: the architecture of most large image models, at sizes from one that trains on digits to the paper's, with
layer names that per-layer fp32 policies know (`time_embedding`, `class_embedding`, `norm_out`, `proj_out`). Timestep
and label are embedded once, for all blocks.

It leaves out dropout and the learned variance. Labels are dropped by whoever trains (`recipes.diffusion`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.sizes import at_least_one
from recipes.unet import TimestepEmbedding, call, sinusoid

TIME_FEATURES = 256
"""Sines and cosines that stand for a timestep, at every size of the network."""


def sin_cos_2d(height: int, width: int, dim: int) -> Tensor:
    """Sine and cosine features of the place of each patch, computed in float64.

    Args:
        height: Patches in a column.
        width: Patches in a row.
        dim: Number of features, a multiple of 4: half of them for the column index, half for the row index.

    Returns:
        `(height * width, dim)` in fp32, row by row.

    Example:
        >>> sin_cos_2d(1, 2, 4)[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    frequency = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    angles = (place.flatten()[:, None] * frequency for place in (columns, rows))
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()


class PositionEmbedding(nn.Module):
    """Adds a fixed table to the patches; the sum is taken in fp32 and rounded once.

    The table is a frozen parameter: precision plans show it, leave it in fp32, and optimizers do not get it.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(table, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `(batch, patches, dim)` to the same shape and dtype."""
        return tokens.clone(memory_format=torch.contiguous_format).add_(self.pos_embed)


class SelfAttention(nn.Module):
    """Multi-head self-attention over all patches."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `(batch, patches, dim)` to the same shape."""
        q, k, v = (
            layer(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (batch, heads, patches, head_dim)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers on every patch by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(dim, hidden)
        self.linear_2 = nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `(batch, patches, dim)` to the same shape."""
        return self.linear_2(F.gelu(self.linear_1(tokens), approximate="tanh"))


class Block(nn.Module):
    """Transformer block whose norms are scaled and shifted, and whose branches are gated, by the condition.

    adaLN-Zero: the gates start at 0, so that an untrained block is the identity.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = SelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Map `(batch, patches, dim)` and `(batch, dim)` to `(batch, patches, dim)`."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=2)
        tokens = tokens + gate1 * self.attn(self.norm1(tokens) * (1 + scale1) + shift1)
        return tokens + gate2 * self.mlp(self.norm2(tokens) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Diffusion transformer on square patches of an image or of its latents.

    Args:
        in_channels: Channels of the image, in and out.
        num_classes: Number of labels. One more row of `class_embedding`, at index `num_classes`, stands for "no label".
        image_size: Height and width.
        patch_size: Height and width of a patch; a half means four times as many patches.
        hidden_size: Features of a patch.
        depth: Number of blocks.
        num_heads: Attention heads.
        mlp_ratio: Width of the MLP's middle, in multiples of `hidden_size`.
        time_scale: The noise level is multiplied by this before its sinusoid is taken; see `recipes.unet.UNet`.
        checkpointing: Keep no activations inside blocks for backward, and compute them again: less memory, more time.

    Example:
        >>> net = DiT(in_channels=1, num_classes=10, image_size=8)
        >>> net(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([3, net.null_label])).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: int,
        patch_size: int = 2,
        hidden_size: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        time_scale: float = 1000.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(
            in_channels=in_channels,
            image_size=image_size,
            patch_size=patch_size,
            hidden_size=hidden_size,
            depth=depth,
            num_heads=num_heads,
        )
        if int(hidden_size * mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio={mlp_ratio} leaves nothing in the middle of the MLP. Choose 4.")
        if image_size % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide image_size={image_size}. Choose a divisor.")
        if hidden_size % num_heads or hidden_size % 4:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads} and of 4, for the position "
                "embedding."
            )
        self.null_label = num_classes
        self.image_size = image_size
        self.time_scale = time_scale
        self.patch_size = patch_size
        self.checkpointing = checkpointing
        side = image_size // patch_size
        self.patch_embed = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        self.positions = PositionEmbedding(sin_cos_2d(side, side, hidden_size))
        self.time_embedding = TimestepEmbedding(TIME_FEATURES, hidden_size)
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.modulation_out = nn.Linear(hidden_size, 2 * hidden_size)
        self.norm_out = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self._initialise()

    def _initialise(self) -> None:
        """As in the paper: Xavier for linear layers, small embeddings, zero for gates and for the output."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                zero = name.endswith(("modulation", "modulation_out", "proj_out"))
                (nn.init.zeros_ if zero else nn.init.xavier_uniform_)(module.weight.flatten(1))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        for weight in (
            self.class_embedding.weight,
            self.time_embedding.linear_1.weight,
            self.time_embedding.linear_2.weight,
        ):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, noise_level: Tensor, labels: Tensor) -> Tensor:
        """Predict from a noisy image, its noise level and its label.

        Args:
            x: Noisy image `(batch, in_channels, image_size, image_size)`, scaled by the objective.
            noise_level: `(batch,)`, fp32.
            labels: `(batch,)`, int64, 0 to `num_classes`; `null_label` means "no label".

        Returns:
            `(batch, in_channels, image_size, image_size)`, in whatever dtype the last layer returns.
        """
        if x.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(f"image_size={self.image_size} was given images of {x.shape[2]} x {x.shape[3]} pixels.")
        condition = self.time_embedding(sinusoid(noise_level.float() * self.time_scale, TIME_FEATURES))
        condition = condition + self.class_embedding(labels)  # (batch, hidden_size)

        tokens = self.positions(self.patch_embed(x).flatten(2).transpose(1, 2))  # (batch, patches, hidden_size)
        for block in self.blocks:
            tokens = call(block, tokens, condition, checkpointing=self.checkpointing)
        shift, scale = self.modulation_out(F.silu(condition))[:, None].chunk(2, dim=2)
        tokens = self.proj_out(self.norm_out(tokens) * (1 + scale) + shift)

        side, patch = self.image_size // self.patch_size, self.patch_size
        patches = tokens.unflatten(2, (patch, patch, -1)).unflatten(1, (side, side))  # (batch, row, column, y, x, C)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)  # (batch, C, row and y, column and x)
