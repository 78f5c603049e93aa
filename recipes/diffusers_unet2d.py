"""diffusers' `UNet2DModel` behind the call that recipes make: the example of a network that nobody here wrote.

It is a subclass, not a module around one, so that its layers keep their names and the precision plugin sees the model
itself. Whatever another library's model wants to be called with and returns is translated in `forward`, and nowhere
else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from diffusers import UNet2DModel
except ImportError as error:
    raise ImportError("diffusers is not installed. Install it: pip install 'diffusers>=0.36'") from error


class DiffusersUNet2D(UNet2DModel):
    """Class-conditional `diffusers.UNet2DModel`.

    Args:
        num_classes: Number of labels; one more embedding, at index `num_classes`, stands for "no label".
        time_scale: The noise level is multiplied by this, since the model was made for timesteps 0 to 1000.
        **config: Any other argument of `UNet2DModel`.

    Example:
        >>> import torch
        >>> blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [8]}
        >>> net = DiffusersUNet2D(num_classes=10, in_channels=1, out_channels=1, norm_num_groups=8, **blocks)
        >>> net(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([3, net.null_label])).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(self, num_classes: int, time_scale: float = 1000.0, **config: Any) -> None:
        super().__init__(num_class_embeds=num_classes + 1, **config)
        self.null_label = num_classes
        self.time_scale = time_scale

    def forward(self, x: Tensor, noise_level: Tensor, labels: Tensor) -> Tensor:
        """Predict from a noisy image, its noise level and its label; see `recipes.unet.UNet.forward`."""
        return super().forward(x, noise_level.float() * self.time_scale, class_labels=labels).sample  # type: ignore[misc]
