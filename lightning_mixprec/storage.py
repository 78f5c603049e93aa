"""How an fp32 weight is stored beside its 16-bit parameter: in 4, 2, 1 or 0 more bytes.

Why it exists: the fp32 value is the truth and the 16-bit parameter is its rounding, and user code may write to the
parameter. A :class:`Bucket` lays parameters of one optimizer group end to end in memory, so that whatever is done to
all of them is one operation on about a million elements rather than one for each tensor.

What it leaves out: which bits these are (:mod:`lightning_mixprec.encoding`), optimizers
(:mod:`lightning_mixprec.borrow`) and modules (:mod:`lightning_mixprec.master`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_mixprec.encoding import decode_, encode_, round_

Masters: TypeAlias = Literal["fp32", "split", "split24", "none"]
EXTRA_BITS: dict[str, int] = {"split": 16, "split24": 8, "none": 0}  # beside the 16 of the parameter

# A fingerprint adds up words that are far apart, about this many to a sum: it is that much smaller than the parameters,
# and long enough that adding up runs at the speed of memory. It has at least so many sums, where there are the words.
_WORDS_IN_A_SUM = 32
_LEAST_SUMS = 2**10
_ALIGNMENT = {"cpu": 1}  # elements between which parameters start; elsewhere 8, the 16 bytes that GPU kernels ask for


def reads_at_once(device: torch.device) -> bool:
    """Whether looking at a number there waits for nothing.

    Example:
        >>> reads_at_once(torch.device("cpu"))
        True
    """
    return device.type == "cpu"


class Bucket:
    """Parameters of one dtype and device, end to end in one 16-bit tensor, with their fp32 values behind it.

    Args:
        params: The module's parameters. Their ``data`` becomes views of :attr:`half`.
        values: Their fp32 values, one tensor for each, on any device.
        dtype: 16-bit dtype that the parameters get.
        masters: How the fp32 values are stored.
        generator: For stochastic rounding.

    Attributes:
        half: 16-bit [n], the memory of the parameters.
        packed: Whether contiguous tensors of the parameters' shapes, end to end, are in the bucket's order.
        seamless: Whether kernels see the same vectors in the flat tensor as in each parameter by itself, because no
            vector of up to 16 elements reaches from one into the next; or nearly the same, because each is large.
        index: Place of each parameter.
        master: fp32 [n], or None where the rung stores less.
        rest: int16 or int8 [n], the extra bits, or None.
        writes: How often fp32 values have been stored.

    Example:
        >>> param = nn.Parameter(torch.tensor([0.1]))
        >>> bucket = Bucket([param], [torch.tensor([0.1])], torch.bfloat16, "split")
        >>> param.dtype, bucket.values_of(0)
        (torch.bfloat16, tensor([0.1000]))
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        values: Sequence[Tensor],
        dtype: torch.dtype,
        masters: Masters,
        generator: torch.Generator | None = None,
    ) -> None:
        self.params = list(params)
        self.masters = masters
        self.dtype = dtype
        self.generator = generator
        device = self.params[0].device
        alignment = _ALIGNMENT.get(device.type, 8)
        self.starts: list[int] = []
        size = 0
        for param in self.params:
            self.starts.append(size)
            size += -(-param.numel() // alignment) * alignment
        self.packed = size == sum(param.numel() for param in self.params if param.is_contiguous())
        sizes = [param.numel() for param in self.params[:-1]]
        self.seamless = self.packed and all(size % 16 == 0 or size >= 2**16 for size in sizes)
        self.index = {param: place for place, param in enumerate(self.params)}
        words = -(-size // 4)  # of 64 bits: what the fingerprint looks at, in rows of equal length
        self._columns = _columns(words)
        self._memory = torch.zeros(-(-words // self._columns) * self._columns * 4, dtype=dtype, device=device)
        self._view_words()
        self.half = self._memory[:size]
        self.master = torch.zeros(size, dtype=torch.float32, device=device) if masters == "fp32" else None
        self.rest: Tensor | None = None
        if masters in ("split", "split24"):
            self.rest = torch.zeros(size, dtype=torch.int16 if masters == "split" else torch.int8, device=device)
        self._layouts = [_layout(param) for param in self.params]
        self._fingerprint = torch.zeros(self._columns, dtype=torch.int64, device=device)
        flat = torch.zeros(size, dtype=torch.float32, device=device) if self.master is None else self.master
        for index, value in enumerate(values):
            self.view(flat, index).copy_(value)
        self.writes = 0
        self._ready = False
        self._alias()
        self.write(flat, stochastic=False)
        self._ready = True

    def _view_words(self) -> None:
        self._words = self._memory.view(torch.int64).view(-1, self._columns)
        self._pointers = [self._memory.data_ptr() + start * self._memory.element_size() for start in self.starts]

    def __getstate__(self) -> dict[str, Any]:
        """Without the second view of the same memory, which torch.save (of a whole module) would refuse."""
        return {key: value for key, value in self.__dict__.items() if key != "_words"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With it."""
        self.__dict__.update(state)
        self._view_words()

    @property
    def numel(self) -> int:
        """Elements, those between parameters included."""
        return self.half.numel()

    def view(self, flat: Tensor, index: int) -> Tensor:
        """The part of a flat tensor of this bucket's length that belongs to parameter ``index``, in its shape."""
        shape, strides = self._layouts[index]
        return flat.as_strided(shape, strides, flat.storage_offset() + self.starts[index])

    def views(self, flat: Tensor) -> list[Tensor]:
        """All parts of ``flat``, in order."""
        return [self.view(flat, index) for index in range(len(self.params))]

    def read(self, out: Tensor | None = None) -> Tensor:
        """All fp32 values, [n]: the master itself, or rebuilt into ``out`` (fp32 [n], allocated if None)."""
        if self.master is not None:
            return self.master
        out = torch.empty(self.numel, dtype=torch.float32, device=self.half.device) if out is None else out
        return decode_(self.half, self.rest, EXTRA_BITS[self.masters], out)

    def write(
        self,
        values: Tensor,
        scratch: Tensor | None = None,
        *,
        stochastic: bool = True,
        unless: Tensor | None = None,
    ) -> None:
        """Store all fp32 values and round them into the parameters.

        Args:
            values: fp32 [n]; :attr:`master` itself, or a tensor that holds garbage afterwards.
            scratch: fp32 [n], overwritten; saves an allocation.
            stochastic: Round without bias, as the result of a step must be, where the rung cannot hold everything.
                False rounds to nearest: values that come once, from outside.
            unless: Bool [], on the device: what :meth:`edited` gave. True leaves the parameters, and what is known of
                them, as they are; ``values`` must be what :meth:`read` gives then. Not for stochastic rounding.
        """
        if self.master is None:
            generator = self.generator if stochastic else None
            encode_(values, self.half, self.rest, EXTRA_BITS[self.masters], generator)
        else:
            if values is not self.master:
                self.master.copy_(values)
            if unless is None:
                round_(self.master, self.half, scratch)
            else:
                rounded = torch.empty_like(self.half)
                round_(self.master, rounded, scratch)
                torch.where(unless, self.half, rounded, out=self.half)
        if unless is None:
            torch.sum(self._words, 0, out=self._fingerprint)
        else:
            self._fingerprint = torch.where(unless, self._fingerprint, self._take_fingerprint())
        self.writes += 1

    def values_of(self, index: int) -> Tensor:
        """fp32 values of one parameter, in its shape: a view of the master, or a tensor of their own."""
        if self.master is not None:
            return self.view(self.master, index)
        return self._decoded(self.half[self._span(index)], index)

    def _decoded(self, part: Tensor, index: int) -> Tensor:
        """fp32 values of one parameter, in its shape, rebuilt with ``part``, 16-bit, in place of its part of half."""
        flat = torch.empty_like(part, dtype=torch.float32)
        decode_(part, self._rest(self._span(index)), EXTRA_BITS[self.masters], flat)
        return flat.as_strided(*self._layouts[index])

    def peek(self, index: int) -> Tensor:
        """fp32 values of one parameter with what :meth:`adopt` would take over, changing nothing."""
        param, half = self.params[index], self.view(self.half, index)
        part = self.half[self._span(index)]
        if param.dtype != self.dtype:  # replaced by something wider
            given = param.data.to(half.device)
            kept = given.to(self.dtype) == half
            held = given if self.master is not None or self.rest is not None else given.to(self.dtype)
            return torch.where(kept, self._peek_written(index, part), held.float())
        if param.data_ptr() == half.data_ptr():
            return self._peek_written(index, part)
        replaced = part.clone()
        replaced.as_strided(*self._layouts[index]).copy_(param.data)
        return self._peek_written(index, replaced, edited=True)

    def _peek_written(self, index: int, part: Tensor, edited: bool | Tensor | None = None) -> Tensor:
        """Likewise, of what was written into ``part``, 16-bit, in place of its part of :attr:`half`."""
        edited = self._differs(self._take_fingerprint()) if edited is None else edited
        if edited is False:
            return self.values_of(index)
        half = part.as_strided(*self._layouts[index])
        if self.master is not None:
            rounded = torch.empty_like(part)
            round_(self.master[self._span(index)], rounded)  # of all parameters a state dict asks, one by one
            kept = rounded.as_strided(*self._layouts[index]) == half
            return torch.where(kept if edited is True else kept | ~edited, self.values_of(index), half.float())
        values = self._decoded(part, index)
        return torch.where(half == 0, 0, values) if self.rest is not None else values

    def set_values_of(self, index: int, value: Tensor) -> None:
        """Store fp32 values of one parameter, to nearest, and round them into it."""
        before, span = self._take_fingerprint(), self._span(index)
        if self.master is not None:
            self.view(self.master, index).copy_(value)
            round_(self.master[span], self.half[span])
        else:
            flat = torch.zeros(span.stop - span.start, dtype=torch.float32, device=self.half.device)
            flat.as_strided(*self._layouts[index]).copy_(value)
            encode_(flat, self.half[span], self._rest(span), EXTRA_BITS[self.masters], None)
        # It is a sum, so that what was written into the others still shows.
        self._fingerprint = self._fingerprint + (self._take_fingerprint() - before)
        self.writes += 1

    def edited(self) -> Tensor:
        """Whether anything was written into the parameters from outside since the last :meth:`write`: bool [].

        On the device, and what :meth:`adopt` then has to do is a great deal, so it should be read along with whatever
        else is read there.
        """
        self._alias()
        return (self._take_fingerprint() != self._fingerprint).any()

    def adopt(self, edited: bool | Tensor | None = None) -> None:
        """Take over what was written into the parameters from outside since the last :meth:`write`.

        Args:
            edited: What :meth:`edited` gave, if that is known: False spares the work. So does a tensor, which the host
                has not read yet: :meth:`write` must be given it. None is to look now.

        With fp32 masters, elements whose 16-bit value is still the rounding of the master keep all their bits and the
        others become exactly what was written. The smaller rungs share their upper half with the parameter: what was
        written counts as it stands, with the remainder that its element had before (less than half a bf16 ulp),
        except for zeros, which are exact.
        """
        self._alias()
        if edited is None or edited is True:
            self._take_over()

    def _take_over(self) -> None:
        fingerprint = self._take_fingerprint()
        edited = self._differs(fingerprint)
        if edited is False:
            return
        if self.master is not None:
            rounded = torch.empty_like(self.half)
            round_(self.master, rounded)
            torch.where((rounded != self.half) & edited, self.half, self.master, out=self.master)
        elif self.rest is not None:
            self.rest.masked_fill_((self.half == 0) & edited, 0)
        self._fingerprint = fingerprint

    def stamp(self) -> tuple[int, bytes]:
        """Another one as soon as any value has been written, here or into a parameter. Waits for the device."""
        return self.writes, self._take_fingerprint().cpu().numpy().tobytes()

    def _take_fingerprint(self) -> Tensor:
        """Numbers that depend on the parameters' bits and on where they stand, int64: shows whether any changed.

        The sums over the columns of a table of 64-bit words: one pass at the speed of memory.
        """
        return self._words.sum(0)

    def _differs(self, fingerprint: Tensor) -> bool | Tensor:
        """From the one of the last :meth:`write`: bool [] where looking at it would wait for the device."""
        if reads_at_once(fingerprint.device):
            return not torch.equal(fingerprint, self._fingerprint)
        return (fingerprint != self._fingerprint).any()

    def _span(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index] + self.params[index].numel())

    def _rest(self, span: slice) -> Tensor | None:
        return None if self.rest is None else self.rest[span]

    def replaced(self) -> list[tuple[int, Tensor]]:
        """Parameters that have other memory than their part of :attr:`half`, as by ``p.data = ...``, and that part."""
        found = [param.data_ptr() for param in self.params]
        if found == self._pointers:
            return []
        places = enumerate(zip(found, self._pointers, strict=True))
        return [(index, self.view(self.half, index)) for index, (one, other) in places if one != other]

    def _alias(self) -> None:
        """Let every parameter's memory be its part of :attr:`half`, taking over what it holds now."""
        for index, view in self.replaced():
            given = self.params[index].data.to(view.device)  # where a module is on its way to another
            self.params[index].data = view
            if self._ready and given.dtype == self.dtype:  # replaced from outside, as if it were written
                view.copy_(given)  # whatever was written before
            elif self._ready:  # by something wider: what differs from before is taken over exactly
                self._take_over()  # what was written before it was replaced
                kept = given.to(self.dtype) == view
                self.set_values_of(index, torch.where(kept, self.values_of(index), given.float()))


def _columns(words: int) -> int:
    """Length of a row of a fingerprint's table: all words where there are few, else a prime.

    A prime, so that what is moved by whole rows or tensors changes its column.
    """
    columns = max(words // _WORDS_IN_A_SUM, _LEAST_SUMS)
    if words <= columns:
        return max(words, 1)
    while any(columns % divisor == 0 for divisor in range(2, isqrt(columns) + 1)):
        columns += 1
    return columns


def _layout(param: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a dense tensor with the same memory format: channels_last stays channels_last."""
    return param.shape, torch.empty_like(param, memory_format=torch.preserve_format, device="meta").stride()
