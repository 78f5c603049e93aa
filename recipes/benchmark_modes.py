"""The ways to train that `recipes.benchmark` compares, and their names.

A mode is stock Lightning's `precision` or the plugin's, followed by what else there is: `bf16+split+compile`. It leaves
out measuring them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lightning_mixprec.storage import EXTRA_BITS
from recipes.config import did_you_mean

Stock: TypeAlias = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
STOCK: tuple[str, ...] = get_args(Stock)
COUNTERPARTS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed"}
"""What people would use without the plugin."""

FLAGS = ("compile", "clip", "channels_last")
ON_CPU = ("32-true", "bf16-mixed", "bf16-true", "bf16", "bf16+split", "bf16+split24")
ON_GPU = (*ON_CPU, "16-mixed", "16-true", "fp16", "bf16-mixed+compile", "bf16+compile", "fp8+compile")
"""Modes that are measured unless others are asked for. A CPU computes fp16 about twenty times slower than fp32."""


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Example:
        >>> mode = Mode.parse("bf16+split+compile")
        >>> mode.precision, mode.masters, mode.compile, mode.stock
        ('bf16', 'split', True, False)
    """

    name: str
    precision: str
    stock: bool
    masters: str = "fp32"
    compile: bool = False
    clip: bool = False
    channels_last: bool = False

    @classmethod
    def parse(cls, name: str) -> Mode:
        """From a name such as `bf16+split`.

        Raises:
            ValueError: If there is no such mode; with the choices.
        """
        precision, *extras = str(name).split("+")
        known = (*STOCK, *COUNTERPARTS)
        if precision not in known:
            raise ValueError(
                f"mode {name!r}: there is no precision {precision!r}.{did_you_mean(precision, known)} Choose among "
                f"{', '.join(known)}."
            )
        stock = precision in STOCK
        choices = (*(() if stock else EXTRA_BITS), *FLAGS)
        for extra in extras:
            if extra not in choices:
                raise ValueError(
                    f"mode {name!r}: there is no '+{extra}'.{did_you_mean(extra, choices)} Choose among "
                    f"{', '.join(choices)}."
                )
        masters = next((extra for extra in extras if extra in EXTRA_BITS), "fp32")
        return cls(str(name), precision, stock, masters, **{flag: flag in extras for flag in FLAGS})

    def counterpart(self) -> str:
        """Name of stock's way to do the same; without clipping, which stock refuses with a fused optimizer."""
        flags = [flag for flag in FLAGS if flag != "clip" and getattr(self, flag)]
        return "+".join([COUNTERPARTS.get(self.precision, self.precision), *flags])
