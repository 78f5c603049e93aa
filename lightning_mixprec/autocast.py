"""What operations between here and there compute in: autocast on, off, or as if there were none.

Why it exists: forward runs under autocast without its weight cache, an fp32 layer in it without autocast, and backward,
a step or a hook inside of `training_step` as if nothing were around; and a layer that is called from outside of all
this has to notice.

What it leaves out: which is meant where (:mod:`lightning_mixprec.layers`, :mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def compute_context(device_type: str, dtype: torch.dtype) -> torch.autocast:
    """Autocast without its weight cache; a no-op for fp32.

    The cache would keep casts of fp32 weights alive over an optimizer step inside one training step, and over
    ``no_grad`` passes (https://github.com/pytorch/pytorch/issues/63552, /65766).

    Example:
        >>> with compute_context("cpu", torch.bfloat16):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if dtype == torch.float32:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


class _NoAutocast:
    """What ``torch.autocast(enabled=False)`` does, in a tenth of its time: norms are many, and small."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._enabled = torch.is_autocast_enabled(self._device_type)
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, self._enabled)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # of weights that something inside has cast


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off, for ``forward``.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), no_autocast("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    if torch.compiler.is_compiling():  # to which only its own is known
        return torch.autocast(device_type, enabled=False)
    return _NoAutocast(device_type)


def is_outside(device_type: str) -> bool:
    """Whether no autocast is around, neither on nor off: nobody has said what to compute in.

    Example:
        >>> with torch.autocast("cpu", enabled=False):
        ...     inside = is_outside("cpu")
        >>> is_outside("cpu"), inside
        (True, False)
    """
    return not torch.is_autocast_enabled(device_type) and _nesting() == 0


def _nesting() -> int:
    """How many autocast contexts are around, of this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


_nesting._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


@contextmanager
def outside(device_type: str) -> Iterator[None]:
    """As if no autocast were around: for backward, an optimizer step and hooks inside of `training_step`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), outside("cpu"):
        ...     is_outside("cpu")
        True
    """
    enabled, depth = torch.is_autocast_enabled(device_type), _nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()
