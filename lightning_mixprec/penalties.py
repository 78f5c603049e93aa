"""Says when the loss measures how far weights are from kept values, and reads their 16-bit roundings for it.

Why it exists: a penalty that ties weights to where they began (L2-SP, EWC) is `((p - start) ** 2).sum()`. A rounding is
up to 0.4 % away from a weight that has not moved at all, which is further than a fine-tuning moves most weights: the
penalty then pushes them about instead of holding them. Loss and gradients look healthy.

It is seen in the graph that autograd has built of the loss, so that nothing has to watch the forward.

What it leaves out: penalties on the weights alone, `p.square().sum()`, which are as good as any 16-bit arithmetic, and
other uses of a difference than its magnitude.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_DIFFERENCES = frozenset("Sub Rsub ForeachSub".split())
_MAGNITUDES = frozenset("Pow Abs Norm LinalgVectorNorm Mul Dot ForeachPow ForeachAbs ForeachNorm".split())
_DISTANCES = frozenset("MseLoss L1Loss SmoothL1Loss HuberLoss Dist".split())
_SAME_VALUES = frozenset(
    "ToCopy Clone View UnsafeView ReshapeAlias T Transpose Permute Slice Select Cat Stack Alias Squeeze "
    "Unsqueeze".split()
)


def measured_weights(loss: Tensor, weights: Container[object]) -> list[nn.Parameter]:
    """Those of ``weights`` of which ``loss`` measures the distance to something that gets no gradient.

    Args:
        loss: With its graph.
        weights: Parameters, as the graph knows them.

    Example:
        >>> weight, start = nn.Parameter(torch.ones(2)), torch.zeros(2)
        >>> len(measured_weights((weight - start).square().sum(), {weight}))
        1
        >>> measured_weights(weight.square().sum() + (1 - weight).sum(), {weight})
        []
    """
    found: dict[nn.Parameter, None] = {}
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = [below for below, _ in node.next_functions]
        left += inputs
        if _is(node, _DISTANCES):
            found |= _weights_beside_nothing(node, weights)
        elif _is(node, _MAGNITUDES) and len(differences := [*_sources(inputs)]) == len(inputs):
            for difference in differences:
                if _is(difference, _DIFFERENCES):
                    found |= _weights_beside_nothing(difference, weights)
    return list(found)


def _is(node: Any, kinds: frozenset[str]) -> bool:
    return node.name().partition("Backward")[0] in kinds


def _sources(nodes: list[Any]) -> Iterator[Any]:
    """What the nodes are copies or parts of."""
    for node in nodes:
        if node is not None and _is(node, _SAME_VALUES):
            yield from _sources([below for below, _ in node.next_functions])
        elif node is not None:
            yield node


def _weights_beside_nothing(node: Any, weights: Container[object]) -> dict[nn.Parameter, None]:
    """The weights that ``node`` takes, if what it takes beside them gets no gradient."""
    inputs = [below for below, _ in node.next_functions]
    if None not in inputs:
        return {}
    variables = (getattr(source, "variable", None) for source in _sources(inputs))
    return {variable: None for variable in variables if variable is not None and variable in weights}


class Penalties:
    """Looks at losses until it has something to say.

    Args:
        weights: The parameters that are 16-bit.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> Penalties({net.weight}).report(net(torch.ones(1, 2)).sum(), net, batches=1)
        ''
    """

    def __init__(self, weights: Container[object]) -> None:
        self._weights = weights
        self._said = False

    def report(self, loss: Tensor, module: nn.Module, batches: int) -> str:
        """A warning about the ``loss`` of batch 1, 2, 4, 8, ... of ``module``; once, and else nothing."""
        if self._said or batches & (batches - 1):
            return ""
        found = measured_weights(loss, self._weights)
        self._said = bool(found)
        return _report(module, found) if found else ""


def _report(module: nn.Module, found: list[nn.Parameter]) -> str:
    names = [name for name, param in module.named_parameters() if any(param is each for each in found)]
    shown = f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}"
    off = max(torch.finfo(param.dtype).eps for param in found) / 2
    count = "1 parameter" if len(found) == 1 else f"{len(found)} parameters"
    return (
        f"The loss measures how far {count} ({shown}) {'is' if len(found) == 1 else 'are'} from kept values, as L2-SP "
        f"and EWC do, and reads 16-bit roundings for it, up to {off:.2%} off where nothing has moved. Take the penalty "
        "out of the loss and add its gradient to the true ones, in `on_before_optimizer_step`: `with "
        "self.trainer.precision_plugin.fp32_weights(self) as weights: param.grad.add_(weights[name] - start[name], "
        "alpha=2 * strength)`. Or keep the layers in fp32 with PrecisionPolicy(fp32=[...])."
    )
