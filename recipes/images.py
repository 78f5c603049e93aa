"""From tensors to pictures: exact 8-bit values, visible non-finite pixels, one PNG grid.

It leaves out everything about models; both training and `recipes.sample` draw their grids here.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

NON_FINITE_COLOUR = (255, 0, 0)
"""RGB of a pixel that is NaN or infinite. Never black or white, which could pass for a picture."""


def to_uint8(images: Tensor) -> Tensor:
    """Map [-1, 1] to 0..255: round((x + 1) · 127.5), in fp32.

    Args:
        images: Any shape, any float dtype. Values outside [-1, 1] are clamped; non-finite ones become 0 (count them
            with `count_non_finite`, mark them with `image_grid`).

    Returns:
        uint8, same shape.

    Example:
        >>> to_uint8(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.bfloat16))
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    values = images.float()
    values = torch.where(values.isfinite(), values, -1.0)  # converting NaN to an integer is undefined
    return ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def count_non_finite(images: Tensor) -> int:
    """Number of images `(batch, ...)` with at least one NaN or infinite pixel."""
    return int((~images.isfinite()).flatten(1).any(dim=1).sum())


def image_grid(images: Tensor, columns: int, zoom: int | None = None, gap: int = 2) -> Tensor:
    """Lay images out in rows, enlarged without interpolation, non-finite pixels in red.

    Args:
        images: `(batch, 1 or 3, H, W)` in [-1, 1], any float dtype, on any device.
        columns: Images per row.
        zoom: Each pixel becomes zoom x zoom. Default: small images grow to about 32 pixels, larger ones stay.
        gap: Pixels of mid-grey between images.

    Returns:
        `(3, height, width)`, uint8, on the CPU.

    Example:
        >>> image_grid(torch.zeros(4, 1, 8, 8), columns=2, zoom=1, gap=0).shape
        torch.Size([3, 16, 16])
    """
    if images.shape[1] not in (1, 3):
        raise ValueError(f"image_grid draws 1 or 3 channels, got images of shape {tuple(images.shape)}.")
    images = images.detach().cpu()
    zoom = zoom or max(1, 32 // images.shape[2])
    bad = ~images.isfinite().all(dim=1, keepdim=True)  # (batch, 1, H, W)
    colour = torch.tensor(NON_FINITE_COLOUR, dtype=torch.uint8).reshape(1, 3, 1, 1)
    tiles = torch.where(bad, colour, to_uint8(images).expand(-1, 3, -1, -1))
    tiles = tiles.repeat_interleave(zoom, dim=2).repeat_interleave(zoom, dim=3)
    missing = -len(tiles) % columns
    tiles = F.pad(tiles, (0, gap, 0, gap), value=127)
    tiles = torch.cat([tiles, torch.full((missing, *tiles.shape[1:]), 127, dtype=torch.uint8)])
    rows = tiles.unflatten(0, (-1, columns))  # (rows, columns, 3, h, w)
    grid = rows.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)  # (3, rows * h, columns * w)
    return grid[:, : grid.shape[1] - gap, : grid.shape[2] - gap]


def save_png(grid: Tensor, path: Path) -> None:
    """Write a `(3, height, width)` uint8 tensor; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid.permute(1, 2, 0).contiguous().numpy()).save(path)
