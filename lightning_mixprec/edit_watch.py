"""What user code changes in 16-bit weights by hand, and whether it arrives.

Why it exists: `p.mul_(0.9999)` in a hook (a decay of one's own, noise, an average with a teacher) changes no element of
a 16-bit parameter, so afterwards nothing shows that it was ever called. A run of it would end well, without it.

It has to be seen while it happens: in some batches, but for forward and backward, torch hands every operation to a
dispatch mode, and arithmetic in place is done again in fp32, to see how much of the change the 16 bits took. That is
after 0, 1, 2, 4, 8, ... steps, at the end of an epoch, and in batches that follow if the parameters' versions show that
they are written to. `p.data = ...` needs no mode: other memory that holds the same is noticed by the bucket.

What it leaves out: values that are put there (`copy_`, `clamp_`, `load_state_dict`), which are right in 16 bits and
which masters adopt, unless they are the old ones again and again; what is written in forward, where norms are enforced
again and again and the masters get there when 16 bits show it; and writes that torch does not see, through NumPy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.storage import Bucket
from lightning_mixprec.widening import HALF

# In place or with `out=`, of one tensor or of a list. `clamp_` is none: a bound of 0.01 is another in 16 bits.
_ARITHMETIC = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"}
_TOO_LITTLE = 0.75  # of a change
_NO_CHANGE = 1e-6  # of a weight: fp32's own rounding
_TIMES = 3  # that the same values are written before it is taken for a change that was to be
_FOLLOWED = 256  # batches, at least, once versions have shown writes


class EditWatch(TorchDispatchMode):
    """Watches 16-bit weights between steps.

    Args:
        masters: What stands behind them.

    Attributes:
        lost: Weights of which a change by hand has been lost; nothing is watched any more then.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> masters.allocate()
        >>> watch = EditWatch(masters)
        >>> watch.open_()
        >>> _ = net.weight.data.mul_(0.9999)
        >>> watch.close_()
        >>> watch.lost == {net.weight}
        True
    """

    supports_higher_order_operators = True  # hands them on

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__()
        self.lost: set[nn.Parameter] = set()
        self._masters = masters
        self._steps = self._follow = 0
        self._versions = -1  # sum of them, as of the last look
        self._due = True
        self._stepped = self._entered = self._open = False
        self._buckets: dict[int, tuple[Bucket, int]] = {}  # by the address of their memory, and how often written
        self._changes: list[tuple[nn.Parameter, Tensor]] = []  # in this window: wanted * arrived, wanted^2, weight^2
        self._same: dict[nn.Parameter, list[Tensor]] = {}  # for each put: whether it was what stood there
        self._puts: dict[nn.Parameter, int] = {}  # in how many windows it was

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run compiled."""
        return True

    def begin_batch(self) -> None:
        """A batch begins; decides whether it is looked at, also after its step. Closed by now."""
        if not self._stepped:
            return
        self._stepped = False
        self._steps += 1
        self._follow = max(0, self._follow - 1)
        self._due = self._steps & (self._steps - 1) == 0
        if self._due:
            before, self._versions = self._versions, sum(param._version for param in self._masters)
            if before not in (-1, self._versions):
                self._follow = max(_FOLLOWED, self._steps // 4)  # long enough for whatever comes every so many steps
            for bucket in self._masters.buckets:
                self.lost.update(bucket.params[place] for place in bucket.unshown(_TIMES))

    def stepped(self) -> None:
        """An optimizer has made a step in this batch."""
        self._stepped = True

    def open_(self, *, always: bool = False) -> None:
        """User code may come now, and no forward or backward: before these, :meth:`close_`.

        Args:
            always: Whatever the batch.
        """
        if self._open or self.lost or not (self._due or self._follow or always):
            return
        if not self._entered:
            if _get_current_dispatch_mode_stack():
                return  # the user's, who could not leave it before this one
            self.__enter__()
            self._entered = True
        self._buckets = {each.half.untyped_storage().data_ptr(): (each, each.writes) for each in self._masters.buckets}
        self._open = True

    def close_(self) -> None:
        """Stop looking, and judge what was seen. Waits for the device if there was something."""
        if self._entered and _get_current_dispatch_mode_stack()[-1:] == [self]:  # else beneath one of the user's
            self.__exit__(None, None, None)
            self._entered = False
        if not self._open:
            return
        self._open, self._buckets = False, {}
        if not (self._changes or self._same):
            return
        for param, sums in self._changes:
            arrived, wanted, weight = sums.tolist()
            if wanted > _NO_CHANGE**2 * weight and arrived < _TOO_LITTLE * wanted:
                self.lost.add(param)
        for param, same in self._same.items():
            if len(same) == 1 and same[0]:  # several: something is put there for a while, and the old values back
                self._puts[param] = self._puts.get(param, 0) + 1
                if self._puts[param] >= _TIMES:
                    self.lost.add(param)
        self._changes, self._same = [], {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Do as asked, and look at it if it writes to a 16-bit weight."""
        kwargs = kwargs or {}
        kind = _kind(func) if self._open else None
        written = list(self._weights(func, args, kwargs)) if kind is not None else []
        if not written:
            return func(*args, **kwargs)
        before = [tensor.float() for _, tensor in written]
        wanted = self._in_fp32(func, args, kwargs, [tensor for _, tensor in written]) if kind == "change" else before
        result = func(*args, **kwargs)
        for (param, tensor), old, new in zip(written, before, wanted, strict=True):
            change, arrived = new - old, tensor.float() - old
            if kind == "put":
                self._same.setdefault(param, []).append((arrived == 0).all())
            else:
                self._changes.append(
                    (param, torch.stack([(change * arrived).sum(), change.square().sum(), old.square().sum()]))
                )
        return result

    def _weights(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """What ``func`` writes to of 16-bit weights, and which these are."""
        for tensor in tree_leaves(list(_written(func, args, kwargs))):
            if not isinstance(tensor, Tensor) or tensor.dtype not in HALF or tensor.layout != torch.strided:
                continue
            bucket, writes = self._buckets.get(tensor.untyped_storage().data_ptr(), (None, 0))
            if bucket is None:
                continue
            # Masters put 16-bit values to views of the bucket's memory, and `load_state_dict` does after they have.
            if _kind(func) == "put" and (tensor._is_view() or bucket.writes != writes):
                continue
            start = tensor.storage_offset() - bucket.half.storage_offset()
            yield bucket.params[bisect_right(bucket.starts, start) - 1], tensor

    @staticmethod
    def _in_fp32(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: list[Tensor]) -> list[Tensor]:
        """What would stand in ``written`` afterwards."""
        wide = {id(tensor): tensor.float() for tensor in written}

        def widened(tensor: Tensor) -> Tensor:
            return wide[id(tensor)] if id(tensor) in wide else tensor.float() if tensor.dtype in HALF else tensor

        func(*tree_map_only(Tensor, widened, args), **tree_map_only(Tensor, widened, dict(kwargs)))
        return [wide[id(tensor)] for tensor in written]


def lost_edits(module: nn.Module, lost: set[nn.Parameter]) -> str:
    """A warning that names the ``lost`` weights, and what to write instead.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> lost_edits(net, {net.weight})[:45]
        "1 parameter ('weight') was changed by hand, o"
    """
    names = [name for name, param in module.named_parameters() if param in lost]
    several = len(names) != 1
    return (
        f"{len(names)} parameter{'s' * several} ({', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}) "
        f"{'were' if several else 'was'} changed by hand, outside the optimizer, and of the change 16 bits show "
        "too little: a small decay, average or noise rounds away in them. Write into the fp32 weights: "
        "`with trainer.precision_plugin.fp32_weights(pl_module) as weights: weights[name].mul_(...)`. Or keep the "
        "layer in fp32 with PrecisionPolicy(fp32=[...])."
    )


@lru_cache
def _kind(func: Any) -> str | None:
    """``"change"`` in place, ``"put"`` other values, or None if it is nothing to be looked at."""
    if not isinstance(func, torch._ops.OpOverload) or not _write_places(func):
        return None
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
    return "change" if name in _ARITHMETIC else "put" if name == "copy" else None


@lru_cache
def _write_places(func: Any) -> list[tuple[int, str]]:
    arguments: Sequence[Any] = func._schema.arguments
    return [
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for place, name in _write_places(func):
        yield args[place] if place < len(args) else kwargs.get(name)
