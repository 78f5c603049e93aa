"""What an operation on 16-bit weights means: a change that is lost, or an average of roundings.

Why it exists: `p.mul_(0.9999)` changes no element of a 16-bit parameter, and `average.mul_(0.999).add_(p, alpha=0.001)`
reads its rounding in place of the weight. Neither can be told afterwards from what stands in memory, but from the
operation: arithmetic is done again in fp32, to see how much of the change the 16 bits took.

What it leaves out: when operations are looked at (:mod:`lightning_mixprec.edit_watch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mixprec.in_fp32 import InFp32, operation, written_to
from lightning_mixprec.storage import Bucket
from lightning_mixprec.weight_memory import NewMemory, Weights, memory
from lightning_mixprec.widening import HALF

# In place or with `out=`, of one tensor or of a list. `clamp_` is none: a bound of 0.01 is another in 16 bits.
_ARITHMETIC = {"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"}
_BOUNDS = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum"}  # may change nothing, and rightly
_TOO_LITTLE = 0.75  # of a change
_NO_CHANGE = 1e-6  # of a weight: fp32's own rounding


class Puts:
    """Values that are put in place of weights, and are not what was meant; found if it comes in several batches.

    Args:
        times: In how many.

    Attributes:
        found: The weights.
    """

    def __init__(self, times: int) -> None:
        self.found: set[nn.Parameter] = set()
        self._times = times
        self._puts: dict[tuple[nn.Parameter, int, torch.Size], list[Tensor]] = {}  # in this batch: whether it is so
        self._batches: dict[nn.Parameter, int] = {}  # in which it was

    def note(self, param: nn.Parameter, place: int, shape: torch.Size, flag: Tensor) -> None:
        """Something is put in ``place`` of ``param``; ``flag``, bool [], says whether it is not what was meant."""
        self._puts.setdefault((param, place, shape), []).append(flag)

    def forget(self) -> None:
        """What was put in this batch will be taken away again."""
        self._puts.clear()

    def end_batch(self, leave_out: Container[nn.Parameter] = ()) -> None:
        """Waits for the device if something was put."""
        wrong = set()
        for (param, *_), flags in self._puts.items():
            # Several: something is put there for a while, and the old values back.
            if len(flags) == 1 and param not in leave_out and bool(flags[0]):
                wrong.add(param)
        for param in wrong:
            self._batches[param] = self._batches.get(param, 0) + 1
            if self._batches[param] >= self._times:
                self.found.add(param)
        self._puts.clear()


class RoundedCopies(Puts):
    """Finds weights that are put back again and again from 16-bit copies that somebody keeps.

    Of what stands in the fp32 weights, then, each time as much is lost as 16 bits do not show.
    """

    def look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Weights, new: NewMemory) -> None:
        """At ``func``, which will be called."""
        if operation(func) != "copy" or not written_to(func, args, kwargs):
            return
        for tensor, put, _ in _together(args[0], args[1], None):
            param = weights.of(tensor)
            if param is None or not isinstance(put, Tensor) or put.dtype not in HALF:
                continue
            if new.holds(put) or weights.of(put) is not None or weights.is_put_by_masters(tensor):
                continue
            rounded = weights.truth(tensor).to(tensor.dtype)
            self.note(param, int(tensor.storage_offset()), tensor.shape, (put.to(rounded) != rounded).any())


class LostEdits:
    """Finds changes of weights that 16 bits do not show.

    Args:
        times: In how many batches values are put that hardly arrive before it is taken for a change that was to be.

    Attributes:
        found: The weights.
        bounded: Weights of which bounded values were made, so that the same ones may be put again and again.
    """

    def __init__(self, times: int) -> None:
        self._puts = Puts(times)  # whether it was lost
        self.found = self._puts.found
        self.bounded: set[nn.Parameter] = set()
        self._in_fp32 = InFp32()  # in this window
        self._copies: Any = WeakIdKeyDictionary()  # in this window: of which weight
        self._copied_to: dict[int, nn.Parameter] = {}  # in this window: memory that holds nothing but a copy
        self._changes: list[tuple[nn.Parameter, Tensor]] = []  # in this window: change * arrived, change^2, weight^2
        self._replaced: set[nn.Parameter] = set()  # that have had other memory since the last step

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Weights) -> Any:
        """What ``func`` gives; with a look at it if it writes to a weight."""
        name, writes = operation(func), written_to(func, args, kwargs)
        written = [(param, each) for each in writes if (param := weights.of(each)) is not None]
        for each in writes:
            self._copied_to.pop(memory(each), None)
        if name in _BOUNDS and not writes:
            self.bounded.update(param for each in args if (param := self._copied(each, weights)) is not None)
        if name == "copy" and written and weights.is_put_by_masters(writes[0]):
            return func(*args, **kwargs)
        if not written or not (name in _ARITHMETIC or name == "copy"):
            result = self._in_fp32.call(func, args, kwargs, lambda tensor: weights.of(tensor) is not None)
            made = memory(result) if self._copied_to else 0
            if made and all(memory(each) != made for each in args):  # no view: where a copy has been, perhaps
                self._copied_to.pop(made, None)
            if name in ("clone", "_to_copy") and (copied := self._copied(args[0], weights)) is not None:
                self._copies[result] = copied
                self._copied_to[memory(result)] = copied
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
            self._puts.note(param, int(tensor.storage_offset()), tensor.shape, lost)
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
                if self._copied_to.get(memory(param.data)) is not param and param.stride() == view.stride():
                    given = param.data.to(view.device)  # where a module is on its way to another
                    same = (given.to(view.dtype) == view).float().mean() > 0.9
                    if given.dtype not in HALF:
                        same &= (given != view).any()
                    self._puts.note(param, -1, param.shape, same)

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
            self._puts.forget()
        self._in_fp32.clear()
        self._copies.clear()
        self._copied_to.clear()

    def end_batch(self) -> None:
        """Waits for the device if something was put."""
        self._puts.end_batch(leave_out=self.bounded)


def _is_lost(arrived: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Of sums over elements: change * what arrived of it, change^2, weight^2."""
    return (wanted > _NO_CHANGE**2 * weight) & (arrived < _TOO_LITTLE * wanted)


class RoundedAverages:
    """Finds averages of 16-bit weights: what is read for them are roundings, whatever they are themselves.

    By the weight itself, a copy of it, a multiple, or the distance to it: `average.sub_(0.001 * (average - weight))`.
    Also where the average is 16-bit, kept so or rounded for it: in `average.type_as(weight)` little arrives.

    Inside a forward there is arithmetic of many kinds on weights, and what counts is what stays: what ends in memory
    that was there before, or is that of a parameter or buffer then.

    Attributes:
        found: The weights.
    """

    def __init__(self) -> None:
        self.found: set[nn.Parameter] = set()
        # What was made of weights in this window: by identity, the weight, and whether it is more than a copy.
        self._made: dict[int, tuple[weakref.ref[Tensor], nn.Parameter, bool]] = {}
        self._rounded: dict[int, weakref.ref[Tensor]] = {}  # what was made 16-bit in this window, and multiples of it
        self._mixed: dict[int, set[nn.Parameter]] = {}  # inside: memory of averages of weights, or with them

    def look(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        weights: Weights,
        new: NewMemory,
        *,
        inside: bool = False,
    ) -> None:
        """At ``func``, which has been called; ``inside`` a forward."""
        name, writes = operation(func), bool(written_to(func, args, kwargs))
        for place in new.note(args, result):
            self._mixed.pop(place, None)  # what stood there is gone
        if not args or name not in ("add", "sub", "lerp", "mul", "div", "clone", "_to_copy", "copy"):
            return
        for one, other, made in _together(args[0], args[1] if len(args) > 1 else None, result):
            if name == "copy":
                if writes and weights.of(one) is None and not new.holds(one):
                    self.found |= self._mixed_into(one, memory(other))
            elif writes and name not in ("mul", "div"):
                if not inside or not new.holds(one):
                    self.found |= self._read_for(one, other, weights, new)
            elif name in ("add", "lerp"):
                # The weight plus anything is a perturbed weight; a part of it, part of an average.
                whole = name == "lerp" or kwargs.get("alpha", 1) != 1
                read = self._read_for(one, other, weights, new, whole=whole, of_weights=inside)
                read |= self._read_for(other, one, weights, new, whole=whole, of_weights=inside)
                if not inside:
                    self.found |= read
                elif read:
                    self._mixed[memory(made)] = read
            elif not writes and isinstance(made, Tensor):
                either = name == "sub" or (name == "mul" and isinstance(one, Tensor) and one.dim() == 0)
                source = self._source(one, weights) or (self._source(other, weights) if either else None)
                if source is not None and made.shape == source[0].shape:
                    part = source[1] or name not in ("clone", "_to_copy")
                    self._made[id(made)] = weakref.ref(made), source[0], part
                elif made.dtype in HALF and (self._is_rounded(one, new) or (name == "_to_copy" and _is_wide(one))):
                    self._rounded[id(made)] = weakref.ref(made)

    def mixes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Weights) -> bool:
        """Whether ``func``, which will be called, makes a weight an average with another."""
        name = operation(func)
        if name not in ("add", "sub", "lerp", "copy") or not written_to(func, args, kwargs):
            return False
        for one, other, _ in _together(args[0], args[1], None):
            param = weights.of(one)
            if param is None:
                continue
            source = None if name == "copy" else self._source(other, weights)
            if source is not None and source[0] is not param:
                return True
            if name == "copy" and self._mixed_into(one, memory(other)) - {param}:
                return True
        return False

    def _mixed_into(self, kept: Tensor, place: int) -> set[nn.Parameter]:
        """Weights of which there is an average in ``place``, for ``kept``."""
        return {param for param in self._mixed.get(place, ()) if param.shape == kept.shape}

    def _read_for(
        self,
        wide: Any,
        read: Any,
        weights: Weights,
        new: NewMemory,
        *,
        whole: bool = True,
        of_weights: bool = False,
    ) -> set[nn.Parameter]:
        """The weight, if ``read``, added to ``wide`` or drawn to, is one or was made of one.

        Args:
            wide: The average.
            read: Of its shape.
            weights: All of them.
            new: What this window has made.
            whole: Whether it counts as a mere copy of a weight, too.
            of_weights: Whether it counts where ``wide`` was made of another weight.
        """
        source = self._source(read, weights)
        if source is None or not isinstance(wide, Tensor) or wide.shape != read.shape:
            return set()
        param, part = source
        if not wide.is_floating_point() or not (whole or part):
            return set()
        other = self._source(wide, weights)
        if other is not None:
            return {param} if of_weights and other[0] is not param else set()
        if wide.dtype in HALF and not self._is_rounded(wide, new):
            return set()
        decay = param.grad is not None and param.grad.data_ptr() == wide.data_ptr()  # of the user's own
        return set() if decay else {param}

    def _source(self, tensor: Any, weights: Weights) -> tuple[nn.Parameter, bool] | None:
        """The weight that ``tensor`` is, or was made of, and whether it is more than a copy."""
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:
            return made[1:]
        param = weights.of(tensor)
        return None if param is None or param.shape != tensor.shape else (param, False)

    def _is_rounded(self, tensor: Any, new: NewMemory) -> bool:
        made = self._rounded.get(id(tensor))
        if made is not None and made() is tensor:
            return True
        return isinstance(tensor, Tensor) and tensor.dtype in HALF and bool(memory(tensor)) and not new.holds(tensor)

    def judge(self, kept: Iterable[Tensor] = ()) -> None:
        """A window ends.

        Args:
            kept: If it was one inside a forward, tensors that stay.
        """
        for tensor in kept if self._mixed else ():
            self.found |= self._mixed_into(tensor, memory(tensor))
        self._made.clear()
        self._rounded.clear()
        self._mixed.clear()


def _is_wide(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype not in HALF


def _together(one: Any, other: Any, result: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Arguments and result that belong together: of an operation, or of each of a list of them."""
    if not isinstance(one, (list, tuple)):
        yield one, other, result
        return
    others = other if isinstance(other, (list, tuple)) else [other] * len(one)
    yield from zip(one, others, result if isinstance(result, (list, tuple)) else one, strict=False)
