"""A call of a module that nobody around it notices: no hooks, no checkpointing, nothing left behind.

Why it exists: a layer that is called again to be looked at must not run the user's hooks twice, nor count in what
activation checkpointing saves and compares, nor leave a cache behind.

What it leaves out: the call (:mod:`lightning_mixprec.replay`), random numbers and buffers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mixprec.opaque import visible_modules

_WEIGHT_HOOKS = (SpectralNorm, WeightNorm)


@contextmanager
def apart() -> Iterator[None]:
    """Outside of whatever surrounds the caller and looks at operations or at what they save for backward.

    Activation checkpointing does both: it compares what a forward has saved with what the recomputation saves.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> with torch.autograd.graph.saved_tensors_hooks(lambda x: print("saved"), lambda x: x), apart():
        ...     _ = x * x
    """
    # Detached, for an operation that saves its own result would keep itself alive; autograd puts its history back.
    with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor), _disable_current_modes():
        yield


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Activation checkpointing by torch keeps what it is asked to compute again: by then, a replay has ended.

    Example:
        >>> with without_checkpointing():
        ...     y = checkpointing.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
        >>> y.grad_fn._saved_self
        tensor([1.], requires_grad=True)
    """
    module: Any = checkpointing  # both kinds look these up when they are called, whoever has imported them
    reentrant, hook = module.CheckpointFunction, module._checkpoint_hook
    module.CheckpointFunction, module._checkpoint_hook = _NoCheckpoint, nullcontext
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_hook = reentrant, hook


class _NoCheckpoint:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def in_backward() -> bool:
    """Whether autograd is at work: then it is checkpointing that calls a module, once more.

    Example:
        >>> in_backward()
        False
    """
    return torch._C._current_graph_task_id() != -1


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """No hook of anybody below ``module``, except for those that make a weight (weight and spectral normalisation).

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> handle = layer.register_forward_hook(lambda *_: print("called"))
        >>> with without_hooks(layer):
        ...     _ = layer(torch.ones(1, 1))
    """
    kept = {each: (each._forward_pre_hooks, each._forward_hooks) for _, each in visible_modules(module)}
    for each, (before, _) in kept.items():
        each._forward_pre_hooks = OrderedDict(
            (k, hook) for k, hook in before.items() if isinstance(hook, _WEIGHT_HOOKS)
        )
        each._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for each, (before, after) in kept.items():
            each._forward_pre_hooks, each._forward_hooks = before, after


@contextmanager
def attributes_kept(module: nn.Module, *, keep: bool) -> Iterator[None]:
    """Give back what a call sets on the modules: a cache, a counter, an auxiliary loss; unless it is to ``keep``.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> with attributes_kept(layer, keep=False):
        ...     layer.calls = 1
        >>> hasattr(layer, "calls")
        False
    """
    held = {each: dict(each.__dict__) for _, each in visible_modules(module)}
    try:
        yield
    finally:
        if not keep:
            for each, attributes in held.items():
                each.__dict__.clear()
                each.__dict__.update(attributes)
