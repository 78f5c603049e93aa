"""What a run has taught about its precision, in five lines at its end.

Why it exists: who starts the next run wants to know whether this one lost steps, to what scale it came, which layers
were moved, how near the others are to the end of their dtype, and whether the masters were worth their bytes.

What it leaves out: the curves (:mod:`lightning_mixprec.monitor`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_mixprec.layer_stats import LayerStats


def lessons(
    precision: str,
    masters: str,
    real: int,
    skipped: int,
    scales: tuple[float, float, float, float] | None,
    moved: list[str],
    layers: Mapping[str, LayerStats],
) -> list[str]:
    """At most five lines.

    Args:
        precision: What layers compute in.
        masters: How their weights are kept.
        real: Steps taken.
        skipped: Batches skipped.
        scales: Loss scale at the end, at the start, least and greatest; None where there was none to speak of.
        moved: Layers that were moved to fp32.
        layers: The last look at them.

    Example:
        >>> for line in lessons("fp16", "fp32", 99, 1, (512.0, 1024.0, 512.0, 1024.0), ["fc"], {}):
        ...     print(line)
        precision        fp16, masters=fp32: 99 steps, 1 skipped (1.0%)
        loss scale       512, started at 1024, 512 to 1024
        moved to fp32    fc
    """
    share = skipped / max(real + skipped, 1)
    lines = [f"precision        {precision}, masters={masters}: {real} steps, {skipped} skipped ({share:.1%})"]
    if scales is not None:
        last, first, least, greatest = scales
        lines.append(f"loss scale       {last:g}, started at {first:g}, {least:g} to {greatest:g}")
    lines.append(f"moved to fp32    {', '.join(moved) if moved else 'no layer'}")
    known = {name: layer for name, layer in layers.items() if math.isfinite(layer.activation_headroom)}
    if known:
        name, layer = min(known.items(), key=lambda item: item[1].activation_headroom)
        lines.append(f"least headroom   {layer.activation_headroom:.1f} bits, activations of {name}")
    lost = [layer.lost for layer in layers.values() if math.isfinite(layer.lost)]
    if lost:
        mean = sum(lost) / len(lost)
        lines.append(f"masters          {mean:.0%} of the last step's updates would be lost in 16-bit weights")
    return lines
