"""What a processor can multiply: whether it has instructions for a 16-bit dtype, as torch's kernels ask.

Why it exists: without them torch computes the same values in other ways, on a CPU tens of times slower than fp32, and
nothing but the clock tells.

What it leaves out: fp8, which is refused where it is missing (:mod:`lightning_mixprec.float8`).
"""

from __future__ import annotations

import torch

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def lacks_instructions(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype in plain loops on this CPU; False where torch does not tell.

    Example:
        >>> lacks_instructions(torch.float32)
        False
    """
    if dtype not in _ASKED or not torch.backends.mkldnn.is_available():
        return False
    asked = getattr(torch.ops.mkldnn, _ASKED[dtype], None)  # private, the same from torch 2.2 to 2.14 at least
    return asked is not None and not asked()


def slowness(dtype: torch.dtype, device: torch.device | None = None) -> str:
    """What to say before training in this dtype on a device, by default this CPU, or nothing.

    Example:
        >>> slowness(torch.float32)
        ''
    """
    if device is not None and device.type == "cuda":
        return _slowness_of_gpu(dtype, device)
    if not lacks_instructions(dtype):
        return ""
    name = _NAMES[dtype]
    return (
        f"This CPU has no {name} instructions: matrix products and convolutions in {name} can take 50 times as long as "
        "in fp32. The numbers are those of a GPU, up to the order of sums; for speed here take precision fp32."
    )


def _slowness_of_gpu(dtype: torch.dtype, device: torch.device) -> str:
    """Of NVIDIA's, before Ampere; `torch.cuda.is_bf16_supported` says yes there, too."""
    if dtype != torch.bfloat16 or torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)} has no bf16 instructions (compute capability {major}.{minor}; 8.0 and "
        "later have them): torch emulates bf16 there, slower than fp32. Take fp16, which has its loss scaler by itself."
    )
