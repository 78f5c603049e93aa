"""What would have come out, had it been computed in fp32: followed beside what is computed of 16-bit weights.

Why it exists: `p.copy_(p.sign() * (p.abs() - 1e-5).relu())` puts 16-bit values, which say nothing of the shrinkage that
has rounded away before. So arithmetic on weights is done once more, on fp32 values, as long as a look lasts.

What it leaves out: operations other than elementwise ones, sums, norms and views: what comes of them is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mixprec.widening import widened

_FOLLOWED = frozenset(
    "add sub rsub mul div lerp addcmul addcdiv neg abs sign sgn sqrt rsqrt reciprocal pow square relu clamp clamp_min "
    "clamp_max minimum maximum softshrink hardshrink where sum mean linalg_vector_norm norm copy clone _to_copy "
    "view _unsafe_view reshape expand transpose t permute squeeze unsqueeze select slice split unbind detach "
    "alias".split()
)
_SAME_VALUES = ("clone", "_to_copy")  # whose arguments say a dtype


class InFp32:
    """Results in fp32 of operations on 16-bit tensors.

    Example:
        >>> weight, follow = torch.tensor([1.0]).bfloat16(), InFp32()
        >>> smaller = follow.call(torch.ops.aten.mul.Tensor, (weight, 0.999), {}, lambda tensor: tensor is weight)
        >>> smaller, follow.of(smaller)
        (tensor([1.], dtype=torch.bfloat16), tensor([0.9990]))
    """

    def __init__(self) -> None:
        self._results: Any = WeakIdKeyDictionary()  # fp32 by tensor, as long as the tensor lives

    def of(self, tensor: Any) -> Tensor | None:
        """What ``tensor`` would be, fp32; None if it was not followed, and is as wide as it is meant to be or not."""
        wide: Tensor | None = self._results.get(tensor) if isinstance(tensor, Tensor) else None
        return wide

    def call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_source: Callable[[Tensor], bool]
    ) -> Any:
        """What ``func`` gives; followed, if anything it is given is a source or has been followed."""
        name = operation(func)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)] if name in _FOLLOWED else []
        if not any(is_plain(each) and (self.of(each) is not None or is_source(each)) for each in given):
            return func(*args, **kwargs)
        if name in _SAME_VALUES:
            result = func(*args, **kwargs)
            wide: Any = self._wide(args[0]).to(result.device)
        elif kwargs.get("dtype") or any(each.dtype == torch.float32 for each in written_to(func, args, kwargs)):
            return func(*args, **kwargs)
        else:
            wide = self.repeat(func, args, kwargs, {})  # before what it is given is written to
            result = func(*args, **kwargs)
        for one, other in zip(tree_leaves(result), tree_leaves(wide), strict=False):
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_floating_point() and not is_source(one):
                self._results[one] = other
        return result

    def repeat(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], copies: Mapping[Tensor, Tensor]
    ) -> tuple[Any] | None:
        """Call ``func`` with fp32 values.

        Args:
            func: An operation.
            args: Of it, 16-bit ones among them.
            kwargs: Likewise.
            copies: What is to be given in place of some of them, and may be written to.

        Returns:
            (What it gives,), or None if it does not take them: a look must not end what it looks at.
        """
        if not all(is_plain(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)):
            return None

        def wide(tensor: Tensor) -> Tensor:
            return copies[tensor] if tensor in copies else self._wide(tensor)

        try:
            return (func(*tree_map_only(Tensor, wide, tuple(args)), **tree_map_only(Tensor, wide, dict(kwargs))),)
        except RuntimeError:  # a mix of dtypes, for one
            return None

    def _wide(self, tensor: Tensor) -> Tensor:
        found = self.of(tensor)
        return widened(tensor) if found is None else found

    def clear(self) -> None:
        """Forget everything."""
        self._results.clear()


def is_plain(tensor: Tensor) -> bool:
    """Whether operations on it are torch's own, and it has memory: fp8 tensors of torchao, fake ones, shards have none.

    Example:
        >>> is_plain(torch.nn.Parameter(torch.ones(1)))
        True
    """
    return bool(type(tensor).__torch_dispatch__ == Tensor.__torch_dispatch__)


@lru_cache
def operation(func: Any) -> str:
    """Its name, without what says whether it is in place, and of a list.

    Example:
        >>> operation(torch.ops.aten._foreach_mul_.Scalar), operation(print)
        ('mul', '')
    """
    if not isinstance(func, torch._ops.OpOverload):
        return ""
    return str(func._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_"))


def written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors to which ``func`` writes, called with these.

    Example:
        >>> written_to(torch.ops.aten.mul_.Scalar, (torch.ones(1), 2), {})
        [tensor([1.])]
    """
    places = _write_places(func)
    if not places:
        return []
    found = tree_leaves([args[at] if at < len(args) else kwargs.get(key) for at, key in places])
    return [each for each in found if isinstance(each, Tensor)]


@lru_cache
def _write_places(func: Any) -> list[tuple[int, str]]:
    """Where ``func`` has the arguments that it writes to."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    arguments: Sequence[Any] = func._schema.arguments
    return [
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
