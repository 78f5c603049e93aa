"""How much an average listens to the weights of each step: its profile over training.

Why it exists: which length of average is best is known after training, and differs between models. So several are
tracked at once, and power-function profiles are of a form that others can be made from afterwards
(:mod:`lightning_mixprec.posthoc`).

What it leaves out: the averages themselves (:mod:`lightning_mixprec.callbacks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Protocol

MAX_SIGMA_REL = 12**-0.5
"""0.2887, the width of an average of all steps alike, for which the exponent is 0: a power function cannot be wider."""


class Profile(Protocol):
    """``average = average + share · (weights - average)`` after each real step.

    Example:
        >>> profile: Profile = ConstantDecay(0.999)
    """

    def share(self, n: int) -> float:
        """Share of the newest weights in the average, after ``n`` updates before this one."""


@dataclass(frozen=True)
class ConstantDecay:
    """Exponential moving average: ``average = decay · average + (1 - decay) · weights``.

    Args:
        decay: In (0, 1). 0.999 averages over about 1000 steps; long runs take 0.9999.
        warmup: Update number n = 0, 1, ... decays by min(decay, (1 + n) / (10 + n)), so that a young average forgets
            its untrained start (TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``).

    Raises:
        ValueError: If ``decay`` is outside (0, 1).

    Example:
        >>> [round(1 - ConstantDecay(0.999, warmup=True).share(n), 3) for n in (0, 90, 10**6)]
        [0.1, 0.91, 0.999]
    """

    decay: float = 0.999
    warmup: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay={self.decay!r} must lie between 0 and 1, such as 0.999.")

    def share(self, n: int) -> float:
        """See :class:`Profile`."""
        return 1 - (min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay)


@dataclass(frozen=True)
class PowerFunction:
    """Weights of step k in proportion to k^γ: an average that grows with training (Karras et al. 2024, section 3.1).

    Update number t = 1, 2, ... decays by (1 - 1/t)^(γ + 1), so that the start of training leaves no trace.

    Args:
        sigma_rel: Width of the profile (its standard deviation over steps) relative to the length of training so far,
            in (0, 0.2887). 0.05 and 0.10 are the paper's.

    Raises:
        ValueError: If ``sigma_rel`` is outside of this range.

    Example:
        >>> round(PowerFunction(0.10).gamma, 2), round(PowerFunction(0.05).gamma, 2)
        (6.94, 16.97)
    """

    sigma_rel: float = 0.10

    def __post_init__(self) -> None:
        gamma_of(self.sigma_rel)

    @property
    def gamma(self) -> float:
        """The exponent γ."""
        return gamma_of(self.sigma_rel)

    def share(self, n: int) -> float:
        """See :class:`Profile`."""
        return 1 - (n / (n + 1)) ** (self.gamma + 1)


def gamma_of(sigma_rel: float) -> float:
    """The exponent γ of the power function with this relative width.

    A density proportional to k^γ has the variance σ_rel² = (γ + 1) / ((γ + 2)² (γ + 3)) (Karras et al. 2024, appendix
    C). Multiplied out, γ is the largest root of γ³ + 7 γ² + (16 - σ_rel⁻²) γ + 12 - σ_rel⁻² = 0; Newton's method falls
    towards it from 1 / σ_rel.

    Raises:
        ValueError: If ``sigma_rel`` is not in (0, 0.2887).

    Example:
        >>> gamma_of(0.05) > gamma_of(0.10)
        True
    """
    if not 0 < sigma_rel < MAX_SIGMA_REL:
        raise ValueError(
            f"sigma_rel={sigma_rel!r} must lie between 0 and {MAX_SIGMA_REL:.4f} (the width of an average of all steps "
            "alike), such as 0.05 or 0.10."
        )
    inverse = sigma_rel**-2
    gamma = 1 / sigma_rel
    while True:
        value = ((gamma + 7) * gamma + 16 - inverse) * gamma + 12 - inverse
        lower = gamma - value / ((3 * gamma + 14) * gamma + 16 - inverse)
        if not lower < gamma:  # as near as float64 goes
            return gamma
        gamma = lower


def describe(profiles: Mapping[str, Profile]) -> dict[str, dict[str, Any]]:
    """What each profile is, in plain containers, which a checkpoint keeps beside the averages.

    Example:
        >>> describe({"long": PowerFunction(0.10)})
        {'long': {'profile': 'PowerFunction', 'sigma_rel': 0.1}}
    """
    return {
        name: {"profile": type(each).__name__, **(asdict(each) if is_dataclass(each) else {})}
        for name, each in profiles.items()
    }


def in_words(descriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """For a message.

    Example:
        >>> in_words(describe({"long": PowerFunction(0.10)}))
        'long (PowerFunction, sigma_rel=0.1)'
    """
    return ", ".join(
        f"{name} ({', '.join(str(v) if k == 'profile' else f'{k}={v}' for k, v in each.items())})"
        for name, each in descriptions.items()
    )
