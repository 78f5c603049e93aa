"""Buffers as they were before a batch that was skipped.

Why it exists: BatchNorm has taken an inf into its running statistics by the time backward shows that the batch must be
skipped; the weights stay good and validation is NaN for ever (https://github.com/pytorch/pytorch/issues/88474).

What it leaves out: deciding what is skipped. Large buffers are copied only if the first batch shows that they change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LARGE = 2**16  # elements


class BufferGuard:
    """Remembers the buffers that a forward changes, and puts them back.

    Args:
        module: The module whose buffers are meant: those of submodules that have a floating-point one and train.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> guard = BufferGuard(norm)
        >>> guard.remember()
        >>> _ = norm(torch.tensor([[float("inf")], [1.0]]))
        >>> guard.restore_()
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0.]), tensor(0))
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor, int]] = {}  # buffer, copy, version
        self._constant: set[tuple[nn.Module, str]] = set()

    @torch.no_grad()
    def remember(self) -> None:
        """Take copies of the buffers as they are; a copy that is finite is never replaced by one that is not."""
        before, self._kept = self._kept, {}
        for module in self._module.modules():
            if not _is_live(module):
                continue
            for name, buffer in module._buffers.items():
                key = (module, name)
                if buffer is None or key in self._constant:
                    continue
                last = before.get(key)
                unchanged = last is not None and last[0] is buffer and last[2] == buffer._version
                if unchanged and buffer.numel() > _LARGE:
                    self._constant.add(key)
                    continue
                copy = buffer.clone()
                if last is not None and buffer.is_floating_point() and last[1].shape == copy.shape:
                    copy = torch.where(torch.isfinite(copy).all(), copy, last[1])
                self._kept[key] = (buffer, copy, buffer._version)

    @torch.no_grad()
    def restore_(self, *, only_nonfinite: bool = False) -> None:
        """Put back what was remembered, in place.

        Args:
            only_nonfinite: Leave finite buffers as they are: some optimizer has stepped, so the batch did happen, but
                what an overflow has poisoned must not stay.
        """
        for (module, name), (tensor, copy, _) in self._kept.items():
            if only_nonfinite:
                current = module._buffers.get(name)
                if current is not None and current.is_floating_point() and current.shape == copy.shape:
                    current.copy_(torch.where(torch.isfinite(current).all(), current, copy))
            else:
                module._buffers[name] = tensor
                tensor.copy_(copy)


def _is_live(module: nn.Module) -> bool:
    """Whether a forward in training may write to the module's buffers: only then is there anything to lose."""
    return module.training and any(b is not None and b.is_floating_point() for b in module._buffers.values())
