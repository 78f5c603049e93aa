"""What an operation on 16-bit weights means: a change that is lost, or an average of roundings.

Why it exists: `p.mul_(0.9999)` changes no element of a 16-bit parameter, and `average.mul_(0.999).add_(p, alpha=0.001)`
reads its rounding in place of the weight. Neither can be told afterwards from what stands in memory, but from the
operation: arithmetic is done again in fp32, to see how much of the change the 16 bits took.

What it leaves out: when operations are looked at (:mod:`lightning_mixprec.edit_watch`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mixprec.in_fp32 import InFp32, is_plain, operation, written_to
from lightning_mixprec.storage import Bucket
from lightning_mixprec.widening import HALF

# In place or with `out=`, of one tensor or of a list. `clamp_` is none: a bound of 0.01 is another in 16 bits.
_ARITHMETIC = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"}
_BOUNDS = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum"}  # may change nothing, and rightly
_TOO_LITTLE = 0.75  # of a change
_NO_CHANGE = 1e-6  # of a weight: fp32's own rounding


class Weights:
    """Which 16-bit weight a tensor is, or is a part of, by its memory.

    Args:
        buckets: All of them.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        self._buckets = {each.half.untyped_storage().data_ptr(): (each, each.writes) for each in buckets}

    def of(self, tensor: Any) -> nn.Parameter | None:
        """The weight, or None if it is something else."""
        if not isinstance(tensor, Tensor) or not is_plain(tensor):
            return None
        if tensor.dtype not in HALF or tensor.layout != torch.strided:
            return None
        bucket, _ = self._buckets.get(tensor.untyped_storage().data_ptr(), (None, 0))
        if bucket is None:
            return None
        return bucket.params[_place(bucket, tensor)]

    def truth(self, tensor: Tensor) -> Tensor:
        """The fp32 values behind a weight, or behind the part of one, as of the last step."""
        bucket, _ = self._buckets[tensor.untyped_storage().data_ptr()]
        values, place = bucket.values_of(_place(bucket, tensor)), _place(bucket, tensor)
        offset = tensor.storage_offset() - bucket.half.storage_offset() - bucket.starts[place]
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + offset)

    def is_put_by_masters(self, tensor: Tensor) -> bool:
        """They put 16-bit values to views of a bucket's memory, and ``load_state_dict`` puts them after they have."""
        bucket, writes = self._buckets[tensor.untyped_storage().data_ptr()]
        return tensor._base is bucket.half._base or bucket.writes != writes


def _place(bucket: Bucket, tensor: Tensor) -> int:
    return bisect_right(bucket.starts, tensor.storage_offset() - bucket.half.storage_offset()) - 1


class LostEdits:
    """Finds changes of weights that 16 bits do not show.

    Args:
        times: In how many batches values are put that hardly arrive before it is taken for a change that was to be.

    Attributes:
        found: The weights.
        bounded: Weights of which bounded values were made, so that the same ones may be put again and again.
    """

    def __init__(self, times: int) -> None:
        self.found: set[nn.Parameter] = set()
        self.bounded: set[nn.Parameter] = set()
        self._times = times
        self._in_fp32 = InFp32()  # in this window
        self._copies: Any = WeakIdKeyDictionary()  # in this window: of which weight
        self._copied_to: dict[int, nn.Parameter] = {}  # in this window: memory that holds nothing but a copy
        self._changes: list[tuple[nn.Parameter, Tensor]] = []  # in this window: change * arrived, change^2, weight^2
        self._puts: dict[tuple[nn.Parameter, int, torch.Size], list[Tensor]] = {}  # in this batch: whether it was lost
        self._batches: dict[nn.Parameter, int] = {}  # in which something was
        self._replaced: set[nn.Parameter] = set()  # that have had other memory since the last step

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Weights) -> Any:
        """What ``func`` gives; with a look at it if it writes to a weight."""
        name, writes = operation(func), written_to(func, args, kwargs)
        written = [(param, each) for each in writes if (param := weights.of(each)) is not None]
        for each in writes:
            self._copied_to.pop(_memory(each), None)
        if name in _BOUNDS and not writes:
            self.bounded.update(param for each in args if (param := self._copied(each, weights)) is not None)
        if name == "copy" and written and weights.is_put_by_masters(writes[0]):
            return func(*args, **kwargs)
        if not written or not (name in _ARITHMETIC or name == "copy"):
            result = self._in_fp32.call(func, args, kwargs, lambda tensor: weights.of(tensor) is not None)
            made = _memory(result) if self._copied_to else 0
            if made and all(_memory(each) != made for each in args):  # no view: where a copy has been, perhaps
                self._copied_to.pop(made, None)
            if name in ("clone", "_to_copy") and (copied := self._copied(args[0], weights)) is not None:
                self._copies[result] = copied
                self._copied_to[_memory(result)] = copied
            return result
        before = [each.float() for _, each in written]
        if name == "copy":
            puts = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            pairs = zip(writes, puts, strict=True)
            wanted = [self._meant(put, each, weights) for each, put in pairs if weights.of(each) is not None]
        else:
            copies = {each: each.float() for _, each in written}
            if self._in_fp32.repeat(func, args, kwargs, copies) is None:
                return func(*args, **kwargs)
            wanted = [copies[each] for _, each in written]
        result = func(*args, **kwargs)
        for (param, tensor), old, new in zip(written, before, wanted, strict=True):
            arrived = tensor.float() - old
            if new is None:
                lost = (arrived == 0).all()
            else:
                change = new - old
                sums = torch.stack([(change * arrived).sum(), change.square().sum(), old.square().sum()])
                if name != "copy":
                    self._changes.append((param, sums))
                    continue
                lost = _is_lost(*sums)
            self._puts.setdefault((param, int(tensor.storage_offset()), tensor.shape), []).append(lost)
        return result

    def _meant(self, put: Tensor, weight: Tensor, weights: Weights) -> Tensor | None:
        """What would stand in ``weight``, were it fp32, once ``put`` has been put there; None if that is not known."""
        meant = self._in_fp32.of(put)
        if meant is not None:
            return meant.expand_as(weight)
        if put.dtype in HALF or not put.is_floating_point():
            return None
        meant, truth = put.to(weight.device, torch.float32).expand_as(weight), weights.truth(weight)
        return torch.where((meant - truth).abs() <= _NO_CHANGE * truth.abs(), weight.float(), meant)

    def _copied(self, tensor: Any, weights: Weights) -> nn.Parameter | None:
        """The weight that ``tensor`` is, or is a copy of."""
        param = weights.of(tensor)
        return param if param is not None or not isinstance(tensor, Tensor) else self._copies.get(tensor)

    def look_at_replaced(self, buckets: Iterable[Bucket]) -> None:
        """Other memory in place of a weight's, with hardly another 16-bit value, is like a put; counts once a step.

        A mere copy is none, as `module.to(memory_format=...)` puts there, or a way to another device and back. The very
        16-bit values in a wider dtype are what `module.float()` leaves, for a validation: nothing is lost.
        """
        for bucket in buckets:
            for index, view in bucket.replaced():
                param = bucket.params[index]
                if param in self._replaced:
                    continue
                self._replaced.add(param)
                if self._copied_to.get(_memory(param.data)) is not param and param.stride() == view.stride():
                    given = param.data.to(view.device)  # where a module is on its way to another
                    same = (given.to(view.dtype) == view).float().mean() > 0.9
                    if given.dtype not in HALF:
                        same &= (given != view).any()
                    self._puts.setdefault((param, -1, param.shape), []).append(same)

    def stepped(self) -> None:
        """An optimizer has taken over what was put."""
        self._replaced.clear()

    def end_window(self, *, forget_puts: bool = False) -> None:
        """Waits for the device if there was something.

        Args:
            forget_puts: What was put in this batch will be taken away again.
        """
        for param, sums in self._changes:
            if bool(_is_lost(*sums)):
                self.found.add(param)
        self._changes = []
        if forget_puts:
            self._puts.clear()
        self._in_fp32.clear()
        self._copies.clear()
        self._copied_to.clear()

    def end_batch(self) -> None:
        """Waits for the device if something was put."""
        lost = set()
        for (param, *_), puts in self._puts.items():
            # Several: something is put there for a while, and the old values back.
            if len(puts) == 1 and param not in self.bounded and bool(puts[0]):
                lost.add(param)
        for param in lost:
            self._batches[param] = self._batches.get(param, 0) + 1
            if self._batches[param] >= self._times:
                self.found.add(param)
        self._puts.clear()


def _memory(tensor: Any) -> int:
    if not isinstance(tensor, Tensor) or not is_plain(tensor) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _is_lost(arrived: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Of sums over elements: change * what arrived of it, change^2, weight^2."""
    return (wanted > _NO_CHANGE**2 * weight) & (arrived < _TOO_LITTLE * wanted)


class RoundedAverages:
    """Finds updates of something wider by a 16-bit weight: averages of roundings.

    By the weight itself, a copy of it, a multiple, or the distance to it: `average.sub_(0.001 * (average - weight))`.
    Also where the average was rounded for it: `average.type_as(weight)` is another tensor, in which little arrives.

    Attributes:
        found: The weights.
    """

    def __init__(self) -> None:
        self.found: set[nn.Parameter] = set()
        # What was made of weights in this window: by identity, the weight, and whether it is more than a copy.
        self._made: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, bool]] = {}
        self._rounded: dict[int, weakref.ref[Tensor]] = {}  # what was made 16-bit in this window, and multiples of it

    def look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, weights: Weights) -> None:
        """At ``func``, which has been called."""
        name, writes = operation(func), bool(written_to(func, args, kwargs))
        if not args or name not in ("add", "sub", "lerp", "mul", "div", "clone", "_to_copy"):
            return
        for one, other, made in _together(args[0], args[1] if len(args) > 1 else None, result):
            if writes and name not in ("mul", "div"):
                self._note(one, other, weights)
            elif name in ("add", "lerp"):
                # The weight plus anything is a perturbed weight; a part of it, part of an average.
                whole = name == "lerp" or kwargs.get("alpha", 1) != 1
                self._note(one, other, weights, whole=whole)
                self._note(other, one, weights, whole=whole)
            elif not writes and isinstance(made, Tensor):
                either = name == "sub" or (name == "mul" and isinstance(one, Tensor) and one.dim() == 0)
                source = self._source(one, weights) or (self._source(other, weights) if either else None)
                if source is not None and made.shape == source[0].shape:
                    part = source[1] or name not in ("clone", "_to_copy")
                    self._made[id(made)] = weakref.ref(made), source[0], part
                elif made.dtype in HALF and (self._is_rounded(one) or (name == "_to_copy" and one.dtype not in HALF)):
                    self._rounded[id(made)] = weakref.ref(made)

    def _note(self, wide: Any, read: Any, weights: Weights, *, whole: bool = True) -> None:
        """``read`` is added to ``wide``, or drawn to; ``whole`` if it counts as a mere copy of a weight, too."""
        source = self._source(read, weights)
        if source is None or not isinstance(wide, Tensor) or wide.shape != read.shape:
            return
        param, part = source
        if not wide.is_floating_point() or self._source(wide, weights) is not None:
            return
        if wide.dtype in HALF and not self._is_rounded(wide):
            return
        decay = param.grad is not None and param.grad.data_ptr() == wide.data_ptr()  # of the user's own
        if (whole or part) and not decay:
            self.found.add(param)

    def _source(self, tensor: Any, weights: Weights) -> tuple[nn.Parameter, bool] | None:
        """The weight that ``tensor`` is, or was made of, and whether it is more than a copy."""
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:
            return made[1:]
        param = weights.of(tensor)
        return None if param is None or param.shape != tensor.shape else (param, False)

    def _is_rounded(self, tensor: Any) -> bool:
        made = self._rounded.get(id(tensor))
        return made is not None and made() is tensor

    def judge(self) -> None:
        """A window ends."""
        self._made.clear()
        self._rounded.clear()


def _together(one: Any, other: Any, result: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Arguments and result that belong together: of an operation, or of each of a list of them."""
    if not isinstance(one, (list, tuple)):
        yield one, other, result
        return
    others = other if isinstance(other, (list, tuple)) else [other] * len(one)
    yield from zip(one, others, result if isinstance(result, (list, tuple)) else one, strict=False)
