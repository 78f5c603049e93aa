"""Overflow that never leaves a layer.

Why it exists: `x * rsqrt(mean(x * x))` written by hand in fp16 gives zeros once a square exceeds 65504: the infinity is
gone before anybody outside can see it, loss and gradients are finite, and the layer is dead. So now and then the
operations inside a forward are looked at one by one.

What it leaves out: whether such an infinity did any harm (:class:`~lightning_mixprec.overflow.Watch` compares with
fp32), and infinities of negative sign, which masks are made of and a softmax takes for what they are.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_mixprec.containers import stacked, tensors_in
from lightning_mixprec.opaque import stored, visible_modules


class InnerOverflow(TorchDispatchMode):
    """While entered, notes in which module an operation made +inf or NaN of finite numbers; reads nothing back.

    Args:
        model: The model; operations outside of its submodules do not count.
        dtype: Only results of this dtype count.

    Example:
        >>> class Rescale(nn.Module):
        ...     def forward(self, x):
        ...         return x * (x * x).mean().rsqrt()
        >>> net = nn.Sequential(Rescale())
        >>> with InnerOverflow(net, torch.float16) as inner:
        ...     net(torch.full((2,), 300.0).half())
        tensor([0., 0.], dtype=torch.float16)
        >>> inner.modules()
        ['0']
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._model, self._dtype = model, dtype
        self._flags: dict[str, Tensor] = {}  # bool [] by module
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._stance: Any = None

    @property
    def found(self) -> Tensor | None:
        """Whether there was any, bool [], on the device; None if nothing was looked at."""
        return stacked(list(self._flags.values())).any() if self._flags else None

    def modules(self) -> list[str]:
        """Qualified names of the modules with such an operation. Reads the device."""
        return [name for name, flag in self._flags.items() if bool(flag)]

    def __enter__(self) -> InnerOverflow:
        for name, module in visible_modules(self._model):
            if name:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(self._leave, always_call=True),
                ]
        if "torch._dynamo" in sys.modules:  # inside a compiled module there would be nothing to see
            self._stance = torch.compiler.set_stance("force_eager")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inside.clear()

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside or "empty" in func.__name__:  # what stands in fresh memory was made by nobody
            return func(*args, **kwargs)
        came = [_bounded(tensor) for _, tensor in tensors_in((args, kwargs)) if self._counts(tensor)]  # before in-place
        result = func(*args, **kwargs)
        went = [_bounded(tensor) for _, tensor in tensors_in(result) if self._counts(tensor)]
        if went:
            made = ~stacked(went).all()
            made = made & stacked(came).all() if came else made
            name = self._inside[-1]
            self._flags[name] = self._flags[name] | made if name in self._flags else made
        return result

    def _counts(self, tensor: Tensor) -> bool:
        # torchao's fp8 tensors say that they are of the compute dtype, and know few operations; they cannot overflow.
        mine = tensor.dtype == self._dtype and not is_traceable_wrapper_subclass(tensor)
        return mine and tensor.layout == torch.strided and stored(tensor) is not None


def _bounded(tensor: Tensor) -> Tensor:
    """Whether all are below +inf (a comparison with NaN is false), bool []."""
    return (tensor.detach() < torch.inf).all()
