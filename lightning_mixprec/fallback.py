"""When evidence against a layer is enough to move it to fp32, and when too many have been moved.

Why it exists: one bad layer should cost one layer. It must not cost it for a single batch that would have been bad
anywhere, and a model that loses layer after layer has another problem, which must not be papered over.

What it leaves out: the evidence (:mod:`lightning_mixprec.overflow`) and the moving
(:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

_PATIENCE = 4  # batches in a row in which more overflows than may be moved


class FallbackLimitError(RuntimeError):
    """So many layers overflow that moving them to fp32 would no longer be a fallback.

    Example:
        >>> issubclass(FallbackLimitError, RuntimeError)
        True
    """


class LayerFallback:
    """Counts strikes against layers, and bounds how much of a model may be moved to fp32.

    A batch in which more overflows than may be moved is no evidence against a layer, but against the batch; only if it
    happens four times in a row is the model beyond help.

    Args:
        strikes: Batches (or calls outside of training) that must show a layer's overflow before it is moved. The
            default, 2, asks for it to happen again.
        max_layers: Layers that may be moved in a run, containers counted as one.
        max_share: Share of the model's parameters that these may hold, in (0, 1]. A bound on cost: each moved
            parameter computes in fp32.

    Raises:
        ValueError: If a value is outside its range.

    Example:
        >>> fallback = LayerFallback(strikes=2)
        >>> fallback.strike(["net.fc1"]), fallback.strike(["net.fc1", "net.fc2"])
        ([], ['net.fc1'])
    """

    def __init__(self, strikes: int = 2, max_layers: int = 16, max_share: float = 0.5) -> None:
        for name, value in (("strikes", strikes), ("max_layers", max_layers)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed: it must be a whole number, at least 1.")
        if not isinstance(max_share, (int, float)) or not 0 < max_share <= 1:
            raise ValueError(f"max_share={max_share!r} is not allowed: it must be in (0, 1], such as 0.5.")
        self.strikes = strikes
        self.max_layers = max_layers
        self.max_share = float(max_share)
        self.counts: Counter[str] = Counter()
        self.beyond = 0  # batches in a row that exceeded the bounds

    def reset(self) -> None:
        """Forget all strikes: a new run."""
        self.counts.clear()
        self.beyond = 0

    def strike(self, layers: Iterable[str]) -> list[str]:
        """One batch's evidence: count it, and return those of ``layers`` that have reached the limit."""
        due = []
        for layer in layers:
            self.counts[layer] += 1
            if self.counts[layer] >= self.strikes:
                due.append(layer)
        return due

    def allows(self, layers: Collection[str], share: float) -> bool:
        """Whether ``layers``, with this share of the model's parameters, may be in fp32."""
        return len(layers) <= self.max_layers and share <= self.max_share

    def check(self, layers: Collection[str], share: float) -> bool:
        """Refuse to have more than :meth:`allows` in fp32.

        Raises:
            FallbackLimitError: Names the layers and the argument that sets the bound, the fourth time in a row.

        Returns:
            Whether they may be moved.
        """
        self.beyond = 0 if self.allows(layers, share) else self.beyond + 1
        if self.beyond < _PATIENCE:
            return self.beyond == 0
        raise FallbackLimitError(
            f"These layers overflow and would have to compute in fp32: {', '.join(layers)}. They are {len(layers)} "
            f"(allowed: max_layers={self.max_layers}) with {share:.0%} of the parameters (allowed: "
            f"max_share={self.max_share:g}), so the trouble is the model's or its learning rate's, not one layer's. "
            "Train in bf16, or set LayerFallback(max_layers=..., max_share=...). If it is the code of one large module "
            "that overflows, make that code a module of its own."
        )

    def __repr__(self) -> str:
        return f"LayerFallback(strikes={self.strikes}, max_layers={self.max_layers}, max_share={self.max_share:g})"
