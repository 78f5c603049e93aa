"""Says when `training_step` measures how far weights are from kept values, and reads their 16-bit roundings for it.

Why it exists: a penalty that ties weights to where they began (L2-SP, EWC) is `((p - start) ** 2).sum()`. A rounding is
up to 0.4 % away from a weight that has not moved at all, which is further than a fine-tuning moves most weights: the
penalty then pushes them about instead of holding them. Loss and gradients look healthy.

What it leaves out: penalties on the weights alone, `p.square().sum()`, which are as good as any 16-bit arithmetic, and
what is computed of values that the step has made, as weights for quantisation are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mixprec.edits_seen import Weights
from lightning_mixprec.in_fp32 import operation
from lightning_mixprec.master import MasterWeights

_DISTANCES = {"sub", "rsub", "lerp", "dist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_SAME_VALUES = frozenset("clone _to_copy detach alias view _unsafe_view reshape t slice select cat".split())
_SMALL = 16  # elements: a shift or a temperature, and no weight


class Penalties(TorchDispatchMode):
    """While entered, around a `training_step`, notes 16-bit weights that are compared with values made before it.

    Args:
        masters: What stands behind the weights.

    Attributes:
        found: The weights.

    Example:
        >>> net = nn.Linear(8, 2, bias=False)
        >>> start = net.weight.detach().clone()
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> masters.allocate()
        >>> with Penalties(masters) as penalties:
        ...     loss = (net.weight - start).square().sum()
        >>> bool(loss > 0), penalties.report(net)[:61]
        (True, "`training_step` measures how far 1 parameter ('weight') is fr")
    """

    supports_higher_order_operators = True  # hands them on

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__()
        self.found: set[nn.Parameter] = set()
        self._masters = masters
        self._weights = Weights()
        # What the step has made: of which weight it is a copy, or None.
        self._made: Any = WeakIdKeyDictionary()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run compiled."""
        return True

    def __enter__(self) -> Penalties:
        self._weights = Weights(self._masters.buckets)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._weights = Weights()
        self._made.clear()

    def report(self, module: nn.Module) -> str:
        """A warning about what was found in ``module``."""
        names = [name for name, param in module.named_parameters() if param in self.found]
        shown = f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}"
        off = max((torch.finfo(param.dtype).eps for param in self.found), default=0.0) / 2
        many = len(names) != 1
        return (
            f"`training_step` measures how far {len(names)} parameter{'s' * many} ({shown}) {'are' if many else 'is'} "
            f"from kept values, as L2-SP and EWC do, and reads 16-bit roundings for it, up to {off:.2%} off where "
            "nothing has moved. Take the penalty out of the loss and add its gradient to the true ones, in "
            "`on_before_optimizer_step`: `with self.trainer.precision_plugin.fp32_weights(self) as weights: "
            "param.grad.add_(weights[name] - start[name], alpha=2 * strength)`. Or keep the layers in fp32 with "
            "PrecisionPolicy(fp32=[...])."
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as asked, and look at it."""
        result = func(*args, **(kwargs or {}))
        name = operation(func)
        if name in _DISTANCES and len(args) > 1:
            several = isinstance(args[0], (list, tuple))
            others = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            for one, other in zip(args[0] if several else [args[0]], others, strict=False):
                self._compare(one, other)
                self._compare(other, one)
        copied = None
        if name in _SAME_VALUES and args:
            first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
            copied = self._weight(first)
            if copied is None and self._is_kept(first):
                return result  # and stays so
        for each in tree_leaves(result):
            if type(each) is Tensor:
                self._made[each] = copied
        return result

    def _compare(self, one: Any, other: Any) -> None:
        weight = self._weight(one)
        if weight is None or not self._is_kept(other) or self._weight(other) is not None:
            return
        if other.shape == one.shape and other.numel() >= _SMALL:
            self.found.add(weight)

    def _weight(self, tensor: Any) -> nn.Parameter | None:
        """The 16-bit weight that ``tensor`` is, or is a part or a copy of."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        copied: nn.Parameter | None = self._made.get(tensor)
        return self._weights.of(tensor) if copied is None else copied

    def _is_kept(self, tensor: Any) -> bool:
        """Whether there was something like it before the step."""
        plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.is_floating_point()
        return plain and not tensor.requires_grad and tensor not in self._made
