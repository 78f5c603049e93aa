"""An average of any length, made after training from snapshots of a few (Karras et al. 2024, section 3.2).

Why it exists: the best length of an average depends on the model, the data and the guidance, and a run tracks only a
few lengths. The profile of a sum of snapshots is the sum of their profiles, so the sum whose profile comes nearest to
the one wanted is, nearly, the average that would have been tracked.

What it leaves out: tracking and storing (:mod:`lightning_mixprec.callbacks`, :mod:`lightning_mixprec.snapshots`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mixprec.profiles import MAX_SIGMA_REL, gamma_of
from lightning_mixprec.snapshots import Snapshot

TOLERANCE = 0.1
"""Largest distance between the profile wanted and the one that snapshots can give, relative to the one wanted."""


def inner_product(time_a: Tensor, gamma_a: Tensor, time_b: Tensor, gamma_b: Tensor) -> Tensor:
    """Of power-function profiles p(τ) = (γ + 1) τ^γ / t^(γ + 1) on [0, t] (appendix C of the paper).

    ∫ p_a p_b dτ up to the smaller t is (γ_a + 1)(γ_b + 1) / ((γ_a + γ_b + 1) max(t)) · (min(t) / max(t))^γ with the γ
    of the profile that ends later; written so, nothing overflows.

    Args:
        time_a: Ends t, any shapes that broadcast, float64.
        gamma_a: Exponents γ.
        time_b: See ``time_a``.
        gamma_b: See ``gamma_a``.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> inner_product(4 * one, 0 * one, 8 * one, 0 * one)  # 4 steps of 1/4 · 1/8
        tensor([0.1250], dtype=torch.float64)
    """
    later = torch.maximum(time_a, time_b)
    ratio = torch.minimum(time_a, time_b) / later
    exponent = torch.where(time_a < time_b, gamma_b, gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) / ((gamma_a + gamma_b + 1) * later) * ratio**exponent


def solve_weights(
    times: Sequence[int], sigma_rels: Sequence[float], time: int, sigma_rel: float
) -> tuple[Tensor, float]:
    """Weights of snapshots whose sum of profiles is nearest to the one wanted, in the sense of least squares.

    Args:
        times: Number of updates of each snapshot.
        sigma_rels: Width of the profile of each.
        time: Number of updates at which the average wanted ends.
        sigma_rel: Its width.

    Returns:
        Weights ``(snapshots,)`` in float64, and the distance of the two profiles relative to the one wanted.

    Example:
        >>> solve_weights([5, 10], [0.1, 0.1], time=10, sigma_rel=0.1)[0].abs().round(decimals=6)
        tensor([0., 1.], dtype=torch.float64)
    """
    t = torch.tensor(times, dtype=torch.float64)
    gamma = torch.tensor([gamma_of(each) for each in sigma_rels], dtype=torch.float64)
    wanted_t, wanted_gamma = (torch.tensor([x], dtype=torch.float64) for x in (float(time), gamma_of(sigma_rel)))
    gram = inner_product(t[:, None], gamma[:, None], t[None, :], gamma[None, :])
    right = inner_product(t, gamma, wanted_t, wanted_gamma)
    # Neighbouring profiles are nearly the same: singular values that float64 cannot tell from zero are left out.
    weights = torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]
    length = inner_product(wanted_t, wanted_gamma, wanted_t, wanted_gamma)
    squared = (weights @ gram @ weights - 2 * weights @ right + length) / length
    return weights, float(squared.clamp(min=0).sqrt())


def reconstruct(snapshots: Sequence[Snapshot], sigma_rel: float) -> tuple[dict[str, Tensor], float]:
    """The average that a :class:`~lightning_mixprec.PowerFunction` would have tracked until the last snapshot.

    Args:
        snapshots: Of one run, such as :func:`~lightning_mixprec.snapshots.read_snapshots` returns.
        sigma_rel: Width of the average wanted.

    Returns:
        The average by parameter name, fp32, summed in float64; and the distance of its profile from the one wanted,
        as a share of the latter: 0 where it was tracked, about 0.001 to 0.05 between and around.

    Raises:
        ValueError: If there are no snapshots, or none of such lengths that this one can be made of them.

    Example:
        >>> tracked = [Snapshot(n, 0.10, lambda n=n: {"weight": torch.tensor([float(n)])}) for n in range(10, 101, 10)]
        >>> reconstruct(tracked, sigma_rel=0.10)[0]["weight"].round(decimals=4)
        tensor([100.])
    """
    if not snapshots:
        raise ValueError(f"sigma_rel={sigma_rel}: there are no snapshots of averages to reconstruct it from.")
    times, widths = [each.n_averaged for each in snapshots], [each.sigma_rel for each in snapshots]
    weights, distance = solve_weights(times, widths, max(times), sigma_rel)
    if distance > TOLERANCE:
        low, high = reachable(times, widths)
        raise ValueError(
            f"sigma_rel={sigma_rel} cannot be made of these {len(snapshots)} snapshots: its profile would be "
            f"{distance:.0%} off. Choose one from {low:.3f} to {high:.3f}, or take snapshots more often."
        )
    total: dict[str, Tensor] = {}
    for weight, snapshot in zip(weights.tolist(), snapshots, strict=True):
        for name, tensor in snapshot.load().items():
            if name not in total:
                total[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            total[name].add_(tensor.to(torch.float64), alpha=weight)
    return {name: tensor.float() for name, tensor in total.items()}, distance


def reachable(times: Sequence[int], sigma_rels: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest width around those tracked that can be made of snapshots, to about 2 %.

    Example:
        >>> [round(width, 2) for width in reachable(range(10, 401, 10), [0.1] * 40)]
        [0.04, 0.25]
    """
    end = max(times)

    def furthest(width: float, factor: float) -> float:
        while (further := width * factor) < MAX_SIGMA_REL and further > 1e-4:
            if solve_weights(times, sigma_rels, end, further)[1] > TOLERANCE:
                break
            width = further
        return width

    return furthest(min(sigma_rels), 1 / 1.02), furthest(max(sigma_rels), 1.02)
