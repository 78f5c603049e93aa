"""Buffers, and parameters that are kept like buffers, as they were before a batch that was skipped.

Why it exists: BatchNorm has taken an inf into its running statistics by the time backward shows that the batch must be
skipped; the weights stay good and validation is NaN for ever (https://github.com/pytorch/pytorch/issues/88474). So has
a codebook that is a moving average of activations, which some keep as a frozen parameter.

What it leaves out: deciding what is skipped, tensors that are plain attributes, and frozen parameters under FSDP2. What
is large, frozen or in evaluation mode seldom changes, and copying it for each batch could cost a whole network: it is
looked at in batch 1, 2, 4, 8, ..., and copied from then on if it has changed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_mixprec.opaque import is_script

_LARGE = 2**16  # elements
_ROOM = 2**24  # elements of frozen parameters that are copied in case they change: codebooks have no more
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_LAYERS = (  # whose parameters are no codebooks
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
_LOOK_AGAIN = 16  # batches, after which modules that have come, or have been frozen, are found at the latest
_SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Key = tuple[nn.Module, str]


class _Seen(NamedTuple):
    """What is unlikely to change, at the beginning of a batch."""

    tensor: Tensor
    version: int | None  # of a parameter; to buffers DDP writes in each forward, mostly what is there
    checksum: Tensor | None  # [], where values are looked at in this batch


class BufferGuard:
    """Remembers the buffers and frozen parameters that a forward changes, and puts them back.

    Args:
        module: The module whose buffers are meant. Small ones of submodules that have a floating-point one and train
            are copied for each batch; all others, and frozen parameters, once they have been seen to change.
        optimizers: What they hold is theirs, frozen for a while or not.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> guard = BufferGuard(norm)
        >>> guard.remember()
        >>> _ = norm(torch.tensor([[float("inf")], [1.0]]))
        >>> guard.look()
        >>> guard.restore_()
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0.]), tensor(0))
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module, self._optimizers = module, optimizers
        self._kept: dict[_Key, tuple[Tensor | None, Tensor | None]] = {}  # the tensor, and a copy; or no buffer yet
        self._seen: dict[_Key, _Seen] = {}
        self._changing: set[_Key] = set()  # of what is unlikely to: that which does
        self._holders: list[nn.Module] = []  # that have something to remember
        self._batches = 0

    @torch.no_grad()
    def remember(self) -> None:
        """A batch begins: take copies; one that is finite is never replaced by one that is not."""
        before, self._kept, self._seen = self._kept, {}, {}
        self._batches += 1
        room = _ROOM
        by_value = self._batches & (self._batches - 1) == 0
        if by_value or self._batches % _LOOK_AGAIN == 0:
            self._holders = _holders(self._module)
        for module in self._holders:
            has_floats = any(buffer is not None and buffer.is_floating_point() for buffer in module._buffers.values())
            for name, tensor in _unlearned(module):
                key = (module, name)
                if tensor is None:
                    if module.training:
                        self._kept[key] = (None, None)
                    continue
                likely = module.training and has_floats and name in module._buffers and tensor.numel() <= _LARGE
                if not likely and key not in self._changing:
                    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_meta:
                        continue
                    is_buffer = name in module._buffers
                    version = None if is_buffer else _version(tensor)
                    self._seen[key] = _Seen(tensor, version, _checksum(tensor) if by_value else None)
                    if not (by_value and module.training):
                        continue
                    if not is_buffer:
                        if isinstance(module, _LAYERS) or tensor.numel() > room:
                            continue
                        room -= tensor.numel()
                copy, last = tensor.clone(), before.get(key, (None, None))[1]
                if last is not None and _may_overflow(tensor) and last.shape == copy.shape:
                    copy = torch.where(torch.isfinite(copy).all(), copy, last)
                self._kept[key] = (tensor, copy)

    @torch.no_grad()
    def look(self) -> None:
        """The batch ends: what has changed against expectation is copied from the next batch on, if it was not in this.

        Reads the device in batch 1, 2, 4, 8, ... if there is anything to be looked at by its values.
        """
        changed, flags = set(), {}
        for key, (tensor, version, checksum) in self._seen.items():
            if _slots(*key).get(key[1]) is not tensor or version not in (None, _version(tensor)):
                changed.add(key)
            elif checksum is not None:
                flags[key] = (_checksum(tensor) != checksum).to(self._device_of_all)
        if flags:
            read = torch.stack(list(flags.values())).tolist()
            changed.update(key for key, flag in zip(flags, read, strict=True) if flag)
        if changed:
            learned = {
                id(param) for each in self._optimizers for group in each.param_groups for param in group["params"]
            }
            changed = {key for key in changed if id(self._seen[key].tensor) not in learned}
        for key in self._seen.keys() - changed:
            self._kept.pop(key, None)
        self._changing |= changed
        self._seen = {}

    @property
    def _device_of_all(self) -> torch.device:
        return next(iter(self._seen.values())).tensor.device

    @torch.no_grad()
    def restore_(self, *, only_nonfinite: bool = False) -> None:
        """Put back what was remembered, in place.

        Args:
            only_nonfinite: Leave finite buffers as they are: some optimizer has stepped, so the batch did happen, but
                what an overflow has poisoned must not stay.
        """
        for (module, name), (tensor, copy) in self._kept.items():
            slots = _slots(module, name)
            if tensor is None or copy is None:
                current = slots.get(name)
                if current is not None and not (only_nonfinite and bool(torch.isfinite(current).all())):
                    slots[name] = None
            elif only_nonfinite:
                current = slots.get(name)
                if current is not None and _may_overflow(current) and current.shape == copy.shape:
                    current.copy_(torch.where(torch.isfinite(current).all(), current, copy))
            else:
                slots[name] = tensor
                if tensor.shape == copy.shape and not _is_expanded(tensor):
                    tensor.copy_(copy)
                elif tensor.shape != copy.shape:  # it has grown
                    tensor.data = copy.clone()


def _holders(root: nn.Module) -> list[nn.Module]:
    """Modules that have a buffer or a frozen parameter of their own, without those of TorchScript."""
    return [
        module
        for module in root.modules()
        if not is_script(module) and (module._buffers or any(not p.requires_grad for p in module.parameters(False)))
    ]


def _unlearned(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Buffers and frozen parameters of the module itself.

    The count of torch's averages stays with them: they are learned parameters' copies, finite, and not put back.
    """
    counts = ("n_averaged",) if isinstance(module, AveragedModel) else ()
    yield from ((name, buffer) for name, buffer in module._buffers.items() if name not in counts)
    for name, param in module._parameters.items():
        if param is not None and not param.requires_grad:
            yield name, param


def _slots(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    slots: dict[str, Tensor | None] = module._buffers if name in module._buffers else module._parameters  # type: ignore[assignment]
    return slots


def _version(tensor: Tensor) -> int:
    """Counts writes, but for those to the tensor's `data`."""
    return 0 if tensor.is_inference() else tensor._version


def _checksum(tensor: Tensor) -> Tensor:
    """Of all bits, []; the sum is over integers as wide as the elements, so that no copy is made."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).sum()
    width = _SAME_WIDTH[tensor.element_size()]
    return tensor.detach().resolve_neg().view(width).sum(dtype=width)


def _may_overflow(tensor: Tensor) -> bool:
    """Whether it is of a kind that can be looked at for inf and NaN, and written to."""
    plain = tensor.layout == torch.strided and tensor.element_size() > 1 and not _is_expanded(tensor)
    return plain and tensor.is_floating_point()


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory: torch writes to none of them."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return any(size > 1 and stride == 0 for size, stride in pairs)
