"""Where the parameters of an optimizer's groups have their fp32 values, and which of them go into one call.

Why it exists: a step goes through the weights bucket by bucket, while an optimizer knows groups of parameters. The way
from one to the other is looked up once, not for every parameter in every step.

What it leaves out: the step (:mod:`lightning_mixprec.borrow`) and the buckets (:mod:`lightning_mixprec.storage`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import nn

from lightning_mixprec.storage import Bucket
from lightning_mixprec.wide_gradients import WideGradients


class Homes(Protocol):
    """What a borrower asks of the masters: where a parameter's fp32 value is."""

    @property
    def gradients(self) -> WideGradients:
        """Makes gradients fp32 and final."""

    def home(self, param: nn.Parameter) -> tuple[Bucket, int] | None:
        """Bucket and place of ``param``, or None if it is its own fp32 value."""

    def stand_in(self, param: nn.Parameter) -> nn.Parameter:
        """The fp32 parameter that optimizers see in place of ``param``."""

    def enrol(self, params: Iterable[nn.Parameter]) -> None:
        """Give a home to 16-bit parameters that have none."""


class Layout(NamedTuple):
    """Where the parameters of a group are: those that are their own value, and by bucket the places of the others."""

    params: list[nn.Parameter]
    own: list[nn.Parameter]
    places: dict[Bucket, list[int]]


# A group, its parameters that are their own values, and its buckets with the places in them.
Share: TypeAlias = tuple[dict[str, Any], list[nn.Parameter], list[tuple[Bucket, list[int]]]]


class Layouts:
    """Layouts of groups, made when they are first asked for and again when a group has changed.

    Args:
        homes: The masters.
    """

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._known: dict[int, Layout] = {}  # by the group's identity

    def of(self, group: dict[str, Any]) -> Layout:
        """The layout of a group as it is now."""
        known, params = self._known.get(id(group)), group["params"]
        if (
            known is None
            or len(known.params) != len(params)
            or not all(map(operator.is_, known.params, params))
            or any(param.requires_grad and param.element_size() == 2 for param in known.own)  # unfrozen since
        ):
            self._homes.enrol(params)
            known = Layout(list(params), [], {})
            for param in known.params:
                home = self._homes.home(param)
                if home is None:
                    known.own.append(param)
                else:
                    known.places.setdefault(home[0], []).append(home[1])
            self._known[id(group)] = known
        return known

    def forget(self) -> None:
        """Parameters have other homes."""
        self._known.clear()


def shares(groups: Sequence[dict[str, Any]], layouts: Sequence[Layout], limit: int) -> Iterator[Share]:
    """What goes into each call of an optimizer: buckets of one group, of at most ``limit`` elements if several."""
    for group, layout in zip(groups, layouts, strict=True):
        own = layout.own
        buckets: list[tuple[Bucket, list[int]]] = []
        for bucket, places in layout.places.items():
            if sum(each.numel for each, _ in buckets) + bucket.numel > limit and buckets:
                yield group, own, buckets
                own, buckets = [], []
            buckets.append((bucket, places))
        yield group, own, buckets
