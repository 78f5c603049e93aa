"""What a training step does, counted: casts, bytes kept for backward, reads of the device, live tensors; and its time.

Counts are the same on every machine and in every run, which times are not. They are taken where torch dispatches its
operations, so what a compiler has fused is not seen.

It leaves out what to measure and what to make of it (`recipes.benchmark`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "is_nonzero"}


class _Lists(TorchFunctionMode):
    """Notes calls of `tolist`, which dispatches nothing on a CPU."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and args[0].device.type == "cpu":  # elsewhere it copies, which is dispatched
            self._note()
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts casts and reads of the device while it is active.

    A cast is an operation that does nothing but change the dtype of a tensor's elements: `to`, `copy_` between dtypes
    and the same for lists of tensors. Its bytes are those read and written. Scalars are left out.

    A read is an operation after which the host has seen a value: it waits until the device has computed it. On a CPU
    nothing has to wait, but what is counted there waits on a GPU.

    Attributes:
        casts: Number of casts.
        cast_bytes: Bytes that they read and wrote.
        reads: Number of reads.

    Example:
        >>> with Operations() as done:
        ...     total = torch.ones(8).bfloat16().sum().item()
        >>> done.casts, done.cast_bytes, done.reads
        (1, 48, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts = self.cast_bytes = self.reads = 0
        self._lists = _Lists(self._read)

    def __enter__(self) -> Operations:
        """Count from here on."""
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Count no more."""
        super().__exit__(*exception)
        self._lists.__exit__(*exception)

    def _read(self) -> None:
        self.reads += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what went in and came out."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            self._note(args[0], result)
        elif name == "copy_":
            self._note(args[1], args[0])
        elif name in ("_foreach_copy_", "_foreach_copy"):
            for target, source in zip(result if result is not None else args[0], args[1], strict=True):
                self._note(source, target)
        elif name in _READS or (name == "equal" and args[0].device.type != "cpu"):
            self.reads += 1  # on a CPU, the plugin compares fingerprints of weights, which it does nowhere else
        return result

    def _note(self, source: Tensor, target: Tensor) -> None:
        if source.dtype != target.dtype and target.numel() > 1:
            self.casts += 1
            self.cast_bytes += target.numel() * (source.element_size() + target.element_size())
        elif source.device.type != "cpu" and target.device.type == "cpu":
            self.reads += 1


class SavedForBackward:
    """Counts the bytes that forward keeps for backward: every storage once, parameters left out.

    Attributes:
        bytes: So far.

    Example:
        >>> x, w = torch.ones(4, requires_grad=True), nn.Parameter(torch.ones(4))
        >>> saved = SavedForBackward([w])
        >>> with saved.counting():
        ...     y = (x * w).exp()
        >>> saved.bytes  # x and the result of exp
        32
    """

    def __init__(self, parameters: Any) -> None:
        self._known = {param.untyped_storage().data_ptr() for param in parameters}
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forward goes inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


class Clock:
    """Marks in time, on the device's own clock: nothing waits for the device until seconds are asked for.

    Example:
        >>> clock = Clock(torch.device("cpu"))
        >>> start = clock.mark()
        >>> clock.seconds(start, clock.mark()) >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now: for a GPU, when it gets there."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks. Waits for the device."""
        if self._device.type == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def live_bytes(device: str = "cpu") -> int:
    """Bytes of all tensors alive on `device`, each storage once; quantised optimizer states included.

    Example:
        >>> before = live_bytes()
        >>> tensor = torch.ones(256)
        >>> live_bytes() - before
        1024
    """
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), Tensor) or item.device.type != torch.device(device).type:
            continue
        names = item.__tensor_flatten__()[0] if hasattr(item, "__tensor_flatten__") else []
        for part in [getattr(item, name) for name in names] or [item]:
            if not isinstance(part, FakeTensor | FunctionalTensor):  # of a compiler: no memory
                storage = part.untyped_storage()
                with contextlib.suppress(RuntimeError):  # what torch 2.11's compiler leaves has none, and no class
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that parameters hold.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> gradient_bytes(layer)
        8
    """
    return sum(param.grad.nbytes for param in module.parameters() if param.grad is not None)
