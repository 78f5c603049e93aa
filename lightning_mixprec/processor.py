"""What a CPU can multiply: whether it has instructions for a 16-bit dtype, as torch's kernels ask.

Why it exists: without them torch computes the same values in plain loops, tens of times slower than fp32, and nothing
but the clock tells.

What it leaves out: GPUs.
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


def slowness(dtype: torch.dtype) -> str:
    """What to say before training in this dtype on this CPU, or nothing.

    Example:
        >>> slowness(torch.float32)
        ''
    """
    if not lacks_instructions(dtype):
        return ""
    name = _NAMES[dtype]
    return (
        f"This CPU has no {name} instructions: matrix products and convolutions in {name} can take 50 times as long as "
        "in fp32. The numbers are those of a GPU, up to the order of sums; for speed here take precision fp32."
    )
