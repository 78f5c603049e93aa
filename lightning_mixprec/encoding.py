"""fp32 numbers as 16-bit ones and 16, 8 or 0 bits beside them.

Why it exists: a bf16 number is the upper half of an fp32 number, hence 16 more bits rebuild the fp32 value exactly, 8
keep it to 24 bits, and with none the rounding itself has to be right on average. All of it is one integer formula::

    parameter = (bits(w) + 0x8000) >> 16        w rounded to bf16, half up in magnitude
    remainder = bits(w) - (parameter << 16)     a signed 16-bit number, of which the upper `extra` bits are kept

With fewer than 16 extra bits, a random number below the last kept bit is added to bits(w) before the rest is cut off:
stochastic rounding, unbiased, so that updates smaller than the last bit are not lost on average (Croci et al.,
"Stochastic rounding: implementation, error analysis and applications", 2022).

What it leaves out: where the bits are kept, and when they are written (:mod:`lightning_mixprec.storage`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_ULP = 0x8000  # of a bf16 number, in units of fp32's last bit


def encode_(values: Tensor, half: Tensor, rest: Tensor | None, extra: int, generator: torch.Generator | None) -> None:
    """Store fp32 ``values`` as a bf16 part and ``extra`` more bits.

    Args:
        values: fp32 [n], contiguous. Used as scratch: holds garbage afterwards.
        half: bf16 [n], written.
        rest: int16 [n] for 16 extra bits, int8 [n] for 8, None for 0; written.
        extra: 16, 8 or 0.
        generator: Source of the stochastic rounding, on the tensors' device; None rounds to nearest instead. Unused
            for 16 extra bits, which hold everything.

    Example:
        >>> half, rest = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
        >>> encode_(torch.tensor([0.1]), half, rest, 16, None)
        >>> half, decode_(half, rest, 16, torch.empty(1))
        (tensor([0.1001], dtype=torch.bfloat16), tensor([0.1000]))
    """
    bits = values.view(torch.int32)
    dropped = 16 - extra
    if dropped and generator is None:
        bits.add_(1 << (dropped - 1)).bitwise_and_(-(1 << dropped))
    elif dropped:
        words = torch.empty(-(-values.numel() * dropped // 64), dtype=torch.int64, device=values.device)
        words.random_(-(2**63), None, generator=generator)
        bits.add_(words.view(torch.int16 if dropped == 16 else torch.uint8)[: values.numel()])
        if dropped == 16:
            bits.add_(_HALF_ULP)  # the int16 noise is signed
        bits.bitwise_and_(-(1 << dropped))
    if rest is not None:
        rest.copy_((bits << 16).bitwise_right_shift_(32 - extra))  # the lower half's upper bits, as a signed number
    half.view(torch.int16).copy_(bits.add_(_HALF_ULP).bitwise_right_shift_(16))


def decode_(half: Tensor, rest: Tensor | None, extra: int, out: Tensor) -> Tensor:
    """Rebuild fp32 values from what :func:`encode_` stored, into ``out``: fp32 [n], contiguous. Returns ``out``."""
    bits = out.view(torch.int32)
    bits.copy_(half.view(torch.int16))
    if rest is None:
        bits.bitwise_left_shift_(16)
    else:
        bits.bitwise_left_shift_(extra).add_(rest).bitwise_left_shift_(16 - extra)
    return out


def round_(values: Tensor, half: Tensor, scratch: Tensor | None = None) -> None:
    """Round fp32 ``values`` into ``half``: to nearest for fp16, half up in magnitude for bf16 as :func:`encode_` does.

    The two differ at exact ties only. One rule for all rungs makes their trajectories bit-identical. ``scratch``, fp32
    [n], saves an allocation.

    Example:
        >>> half = torch.empty(1, dtype=torch.bfloat16)
        >>> round_(torch.tensor([1 + 2**-8]), half)  # a tie: to even would be 1.0
        >>> half
        tensor([1.0078], dtype=torch.bfloat16)
    """
    if half.dtype == torch.bfloat16:
        # Setting the last bit turns a tie into "just above the middle", and changes no other rounding.
        out = None if scratch is None else scratch.view(torch.int32)
        values = torch.bitwise_or(values.view(torch.int32), 1, out=out).view(torch.float32)
    half.copy_(values)
