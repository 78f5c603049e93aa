"""Buffers as they were before a batch that was skipped.

Why it exists: BatchNorm has taken an inf into its running statistics by the time backward shows that the batch must be
skipped; the weights stay good and validation is NaN for ever (https://github.com/pytorch/pytorch/issues/88474).

What it leaves out: deciding what is skipped. Nothing is copied that never changes: the first batch shows which buffers
a forward writes to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferGuard:
    """Remembers the buffers that a forward changes, and puts them back.

    Args:
        module: The module whose buffers are meant.

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
        """Take copies of the buffers that may change in what comes next; call once before each window of batches."""
        for key, (tensor, _, version) in self._kept.items():
            # Torch's normalisation kernels write to their statistics without counting a version.
            silent = isinstance(key[0], nn.modules.batchnorm._NormBase)
            if not silent and key[0]._buffers.get(key[1]) is tensor and tensor._version == version:
                self._constant.add(key)
        self._kept.clear()
        for module in self._module.modules():
            if not _is_live(module):
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and (module, name) not in self._constant:
                    self._kept[module, name] = (buffer, buffer.clone(), buffer._version)

    @torch.no_grad()
    def restore_(self) -> None:
        """Put back what was remembered, in place where the tensor is still the same one."""
        for (module, name), (tensor, copy, _) in self._kept.items():
            module._buffers[name] = tensor
            tensor.copy_(copy)
        self.remember()


def _is_live(module: nn.Module) -> bool:
    """Whether a forward in training may write to the module's buffers: only then is there anything to lose."""
    return module.training and any(b is not None and b.is_floating_point() for b in module._buffers.values())
