"""What is wrong, in words, and what to do: rules over the numbers of a low-precision run.

Why it exists: a curve tells only those who know it. Each rule says one thing, once, with the number that made it say
so and the argument to change.

What it leaves out: the numbers (:mod:`lightning_mixprec.layer_stats`) and logging them
(:mod:`lightning_mixprec.monitor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_mixprec.layer_stats import LayerStats


@dataclass(frozen=True)
class Limits:
    """When a number is worth a word.

    Attributes:
        skip_rate: Share of the recent batches that were skipped. A scale that doubles every 2000 batches costs 0.05 %.
        scale: Loss scale below which fp16 loses more gradients than scaling saves.
        headroom: Bits between the largest activation and the end of its dtype: 1 is a factor of two.
        vanished: Share of a layer's gradients that are zero or subnormal.
        fp8_tokens: Tokens in a step below which fp8 is not expected to pay: the field's heuristic, for layers of common
            sizes. Below it casts and scales cost about what the faster products save.

    Example:
        >>> Limits(headroom=3.0).headroom
        3.0
    """

    skip_rate: float = 0.05
    scale: float = 1.0
    headroom: float = 1.0
    vanished: float = 0.5
    fp8_tokens: int = 2_000_000


def run_warnings(limits: Limits, *, skipped: int, batches: int, scale: float, fp16: bool) -> Iterator[tuple[str, str]]:
    """Rules about the whole run: a name for each, and what to say.

    Args:
        limits: When to speak.
        skipped: Batches skipped among the recent ones.
        batches: How many these are.
        scale: Loss scale.
        fp16: Whether there is a loss scale to speak of.

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
    if fp16 and scale < limits.scale:
        yield (
            "scale",
            f"The loss scale is {scale:g}: fp16 gradients below {2**-24 / scale:.2g} are lost. Something needs this "
            "small a scale: look at mixprec_gradient_max for the layer, keep it in fp32, or train in bf16.",
        )


def layer_warnings(limits: Limits, layers: Mapping[str, LayerStats], scale: float) -> Iterator[tuple[str, str]]:
    """Rules about single layers, for the worst of them.

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
    gone = max(layers.items(), key=lambda item: _or(item[1].zero + item[1].subnormal, 0), default=None)
    if gone is not None and _or(gone[1].zero + gone[1].subnormal, 0) > limits.vanished:
        share = gone[1].zero + gone[1].subnormal
        yield (
            "vanished",
            f"{share:.0%} of the gradients of {gone[0]!r} are zero or subnormal at loss scale {scale:g}. If the layer "
            "is meant to train, raise DynamicLossScaler(init_scale=...), or train in bf16, whose exponents suffice.",
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


def _or(value: float, default: float) -> float:
    return default if value != value else value
