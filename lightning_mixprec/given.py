"""Tensors that are fp32 while training, and go back to the 16 bits in which they were given.

Why it exists: a frozen network may come in 16 bits and have layers that compute in fp32. Their parameters are widened,
and so are buffers, because torch has no kernel for statistics of another dtype than the parameters beside them. After
training a frozen network is to be what it was; a state dict shows it so all the time.

What it leaves out: trainable parameters (:mod:`lightning_mixprec.master`) and which layer computes in fp32
(:mod:`lightning_mixprec.policy`). No copies are kept: 16 bits are in fp32 exactly, so that rounding brings the original
back where nothing was written, and what was written where something was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_mixprec.opaque import is_script
from lightning_mixprec.widening import HALF


class Given:
    """Tensors that were widened, with the dtype that they were given in.

    Args:
        entries: Those of another one: tensor, its dtype before, the parameters whose freezing it follows.

    Example:
        >>> norm = nn.LayerNorm(2).half().requires_grad_(False)
        >>> given = Given()
        >>> given.widen_(norm.weight, [norm.weight])
        >>> norm.weight.dtype, given.shown(norm.weight).dtype
        (torch.float32, torch.float16)
        >>> given.restore_()
        >>> norm.weight.dtype
        torch.float16
    """

    def __init__(self, entries: Iterable[tuple[Tensor, torch.dtype, list[nn.Parameter]]] = ()) -> None:
        self._found = {tensor: (dtype, around) for tensor, dtype, around in entries}
        self._buffers: dict[tuple[nn.Module, str], Tensor] = {}  # of them, where they were when last looked for

    def entries(self, tensors: Iterable[Tensor] | None = None) -> list[tuple[Tensor, torch.dtype, list[nn.Parameter]]]:
        """What is known of ``tensors``, by default of all: for another one."""
        self._follow_buffers()
        tensors = self._found if tensors is None else tensors
        return [(tensor, *self._found[tensor]) for tensor in tensors if tensor in self._found]

    @torch.no_grad()
    def widen_(self, tensor: Tensor, around: Iterable[nn.Parameter]) -> None:
        """Make ``tensor`` fp32, in place; for good if any parameter of ``around`` trains, now or at the end."""
        around = list(around)
        if tensor.dtype not in HALF:
            return
        if not any(param.requires_grad for param in around):
            self._found.setdefault(tensor, (tensor.dtype, around))
        tensor.data = tensor.data.float()

    def widen_buffer_(self, module: nn.Module, name: str, around: Iterable[nn.Parameter]) -> None:
        """The same for a buffer, which is another tensor once its module has been moved to another device."""
        buffer = module._buffers[name]
        if buffer is not None:
            self.widen_(buffer, around)
            if buffer in self._found:
                self._buffers[module, name] = buffer

    def _follow_buffers(self) -> None:
        for (module, name), buffer in self._buffers.items():
            now = module._buffers.get(name)
            if now is not None and now is not buffer and (now.dtype, now.shape) == (buffer.dtype, buffer.shape):
                self._found[now] = self._found.pop(buffer)
                self._buffers[module, name] = now

    def shown(self, tensor: Tensor) -> Tensor | None:
        """``tensor`` in the dtype that it was given in; None if it is to stay as it is."""
        self._follow_buffers()
        if tensor not in self._found:
            return None
        dtype, around = self._found[tensor]
        return None if any(param.requires_grad for param in around) else tensor.detach().to(dtype)

    @torch.no_grad()
    def restore_(self) -> None:
        """Give everything its dtype back, in place, and forget it."""
        self._follow_buffers()
        for tensor in self._found:
            value = self.shown(tensor)
            if value is not None:
                tensor.data = value
        self._found.clear()
        self._buffers.clear()


def widen_buffers_(model: nn.Module, given: Given, meant: Callable[[str, nn.Module, list[nn.Parameter]], bool]) -> None:
    """Make 16-bit buffers of some modules of ``model`` fp32, in place.

    A buffer follows the parameters around it: those of its module, or of the nearest one above that has any. Where all
    of these are frozen, it goes back to the dtype given.

    Args:
        model: The model.
        given: Remembers them.
        meant: Takes a module's qualified name, the module, and the parameters around its buffers; says whether.

    Example:
        >>> norm = nn.BatchNorm1d(2).half()
        >>> widen_buffers_(norm, Given(), lambda name, module, around: True)
        >>> norm.running_var.dtype
        torch.float32
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for qualified, module in modules.items():
        buffers = {} if is_script(module) else module._buffers
        half = [own for own, buffer in buffers.items() if buffer is not None and buffer.dtype in HALF]
        if half:
            name, around = qualified, list(module.parameters())
            while not around and name:
                name = name.rpartition(".")[0]
                around = list(modules[name].parameters())
            for own in half if meant(qualified, module, around) else []:
                given.widen_buffer_(module, own, around)
