"""Floating-point operations of training, and how many a device can do: what MFU is made of.

Model FLOPs utilisation (Chowdhery et al. 2022, appendix B) is the share of the device's peak that the model's own
arithmetic takes up: activations computed again in backward do not count, nor does the optimizer. Matrix products and
convolutions are counted, the rest is negligible.

It leaves out time (`recipes.speed`).
"""

from __future__ import annotations

import warnings

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def training_flops(net: nn.Module, image_shape: tuple[int, ...]) -> int:
    """Floating-point operations of forward and backward for one image; a multiplication and an addition are two.

    Three times those of forward: for every product backward makes two, for the gradients of its two factors. Counted on
    the meta device, so nothing is computed, and the network's weights stay as they are.

    Args:
        net: With the call `(image, noise level, labels)`.
        image_shape: Channels, height and width.

    Example:
        >>> from recipes.unet import UNet
        >>> training_flops(UNet(in_channels=1, num_classes=10), (1, 8, 8)) // 10**6
        91
    """
    state = {
        name: value.to("meta", torch.float32 if value.is_floating_point() else value.dtype)
        for name, value in net.state_dict(keep_vars=True).items()
    }
    image = torch.zeros(1, *image_shape, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.compiler.set_stance("force_eager"), torch.no_grad(), counter:
        functional_call(net, state, (image, image.new_zeros(1), image.new_zeros(1, dtype=torch.long)))
    return 3 * int(counter.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[int | None, str]:
    """Operations per second that the device is sold for in this dtype, or None, and then why not, in words.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.bfloat16)
        (None, 'the peak of a cpu is not known')
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peak = get_available_flops(device, dtype)
    if peak:
        return peak, ""
    said = str(caught[0].message) if caught else f"the peak of a {device.type} is not known"
    return None, said
