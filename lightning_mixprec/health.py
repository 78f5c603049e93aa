"""What is wrong, in words, and what to do: rules over the numbers of a low-precision run.

Why it exists: a curve tells only those who know it. Each rule says one thing, once, with the number that made it say
so and the argument to change.

What it leaves out: the numbers (:mod:`lightning_mixprec.layer_stats`) and logging them
(:mod:`lightning_mixprec.monitor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_mixprec.layer_stats import LayerStats


@dataclass(frozen=True)
class Limits:
    """When a number is worth a word.

    Attributes:
        skip_rate: Share of the recent batches that were skipped. A scale that doubles every 2000 batches costs 0.05 %.
        halvings: Factors of two that the loss scale may lose within 1000 batches. A run that looks for its scale at the
            start loses some.
        scale: Loss scale below which fp16 loses more gradients than scaling saves.
        headroom: Bits between the largest activation and the end of its dtype: 1 is a factor of two.
        growth: Bits of headroom that the activations of a layer may lose, once less than ``watched`` are left.
        watched: See ``growth``.
        vanished: Share of a layer's gradients that are zero or subnormal.
        fp8_tokens: Tokens in a step below which fp8 is not expected to pay: the field's heuristic, for layers of common
            sizes. Below it casts and scales cost about what the faster products save.

    Example:
        >>> Limits(headroom=3.0).headroom
        3.0
    """

    skip_rate: float = 0.05
    halvings: float = 6.0
    scale: float = 1.0
    headroom: float = 1.0
    growth: float = 3.0
    watched: float = 5.0
    vanished: float = 0.5
    fp8_tokens: int = 2_000_000


def run_warnings(
    limits: Limits,
    *,
    skipped: int,
    batches: int,
    scale: float,
    fp16: bool,
    highest: float = 0.0,
    moved: Sequence[str] = (),
) -> Iterator[tuple[str, str]]:
    """Rules about the whole run: a name for each, and what to say.

    Args:
        limits: When to speak.
        skipped: Batches skipped among the recent ones.
        batches: How many these are.
        scale: Loss scale.
        fp16: Whether there is a loss scale to speak of.
        highest: Greatest loss scale of the recent batches.
        moved: Layers that were moved to fp32.

    Example:
        >>> [rule for rule, _ in run_warnings(Limits(), skipped=30, batches=100, scale=2.0, fp16=True)]
        ['skips']
    """
    if batches >= 20 and skipped / batches > limits.skip_rate:
        yield (
            "skips",
            f"{skipped} of the last {batches} batches overflowed and were skipped; routine is below "
            f"{limits.skip_rate:.0%}. Their data is not trained on. Look at mixprec/overflow for the layers; "
            "fallback='auto' moves a bad one to fp32, DynamicLossScaler(growth_interval=...) probes less often.",
        )
    if moved:
        yield (
            "fallback",
            f"{', '.join(map(repr, moved))} overflowed and computes in fp32 from now on; mixprec/fallback says why. "
            f"Start the next run with PrecisionPolicy(fp32={list(moved)}).",
        )
    if fp16 and highest > scale * 2**limits.halvings:
        yield (
            "scale_drop",
            f"The loss scale fell from {highest:g} to {scale:g} within the last {batches} batches, one skipped batch "
            f"for every factor of two; up to {2**limits.halvings:g}-fold is routine. Gradients are growing: lower the "
            "learning rate or warm it up for longer; or one layer is out of range, which mixprec/overflow names: "
            "PrecisionPolicy(fp32=[...]), or fallback='auto'.",
        )
    if fp16 and scale < limits.scale:
        yield (
            "scale",
            f"The loss scale is {scale:g}: fp16 gradients below {2**-24 / scale:.2g} are lost. Something needs this "
            "small a scale: look at mixprec_gradient_max for the layer, keep it in fp32, or train in bf16.",
        )


def layer_warnings(
    limits: Limits,
    layers: Mapping[str, LayerStats],
    scale: float,
    before: Mapping[str, float] | None = None,
    *,
    fp16: bool = True,
    settled: bool = True,
) -> Iterator[tuple[str, str]]:
    """Rules about single layers, for the worst of them.

    Args:
        limits: When to speak.
        layers: The layers in one batch.
        scale: Loss scale.
        before: Most headroom of each layer's activations so far, in bits.
        fp16: Whether it is fp16 that they compute in.
        settled: Whether training is past its first batches. Where a last layer begins at zero, as it does in many
            networks, the layers before it have next to no gradients at first.

    Example:
        >>> [rule for rule, _ in layer_warnings(Limits(), {"fc": LayerStats(activation_headroom=0.5)}, 1.0)]
        ['headroom']
    """
    least = min(layers.items(), key=lambda item: _or(item[1].activation_headroom, 99), default=None)
    if least is not None and _or(least[1].activation_headroom, 99) < limits.headroom:
        yield (
            "headroom",
            f"Activations of {least[0]!r} reach {least[1].activation:.3g}, {least[1].activation_headroom:.1f} bits "
            f"below overflow. Keep the layer in fp32 before it happens: PrecisionPolicy(fp32=[{least[0]!r}]).",
        )
    grown = {
        name: before[name] - layer.activation_headroom
        for name, layer in layers.items()
        if before and name in before and limits.headroom <= layer.activation_headroom < limits.watched
    }
    name = max(grown, key=grown.__getitem__, default="")
    if name and grown[name] > limits.growth:
        yield (
            "growth",
            f"Activations of {name!r} have grown {2 ** grown[name]:.0f}-fold during training and reach "
            f"{layers[name].activation:.3g}; {layers[name].activation_headroom:.1f} bits are left before overflow. "
            f"Normalise them (in attention: queries and keys), or PrecisionPolicy(fp32=[{name!r}]).",
        )
    small = {name: layer.zero + layer.subnormal for name, layer in layers.items() if settled and _vanishes(layer)}
    name = max(small, key=small.__getitem__, default="")
    if name and small[name] > limits.vanished:
        remedy = (
            "raise DynamicLossScaler(init_scale=...), or train in bf16, whose exponents suffice."
            if fp16
            else f"see what it is multiplied by, or keep it in fp32: PrecisionPolicy(fp32=[{name!r}])."
        )
        yield (
            "vanished",
            f"{small[name]:.0%} of the gradients of {name!r} are zero or subnormal at loss scale {scale:g}. If the "
            f"layer is meant to train, {remedy}",
        )


def fp8_warnings(limits: Limits, *, tokens: int) -> Iterator[tuple[str, str]]:
    """The rule about fp8 that cannot pay.

    Args:
        limits: When to speak.
        tokens: That enter fp8 layers in a step, of all ranks and accumulated batches together.

    Example:
        >>> [rule for rule, _ in fp8_warnings(Limits(), tokens=8192)]
        ['fp8']
    """
    if tokens < limits.fp8_tokens:
        yield (
            "fp8",
            f"{tokens:,} tokens a step enter fp8 layers. fp8 saves time, not memory, and as a rule only from about "
            f"{limits.fp8_tokens:,} tokens a step on, with torch.compile: PrecisionPolicy('bf16') is likely as fast, "
            "and more accurate. Measure both, or take a larger batch.",
        )


def _vanishes(layer: LayerStats) -> bool:
    """Whether zeros are likely to be flushed numbers: these have subnormal neighbours, true zeros have others."""
    return layer.subnormal > 0.05 or layer.gradient == 0


def _or(value: float, default: float) -> float:
    return default if value != value else value
