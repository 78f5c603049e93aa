"""Calls of a layer that are not calls of its ``forward`` in a step: of other methods, and from outside.

Why it exists: an autoencoder is asked to ``encode`` and ``decode``, a text encoder for its ``encode_text``, and what
such a method does by itself, between its layers, must compute like them. And a hook may call any part of a network,
where nothing has said yet what it computes in.

What it leaves out: what then happens (:mod:`lightning_mixprec.layers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

from torch import nn

# Whose methods are no computation of a network, or know what they compute in.
_OTHERS = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "builtins")
_COROUTINE = 0x80 | 0x200  # CO_COROUTINE, CO_ASYNC_GENERATOR of `inspect`
_HALF = re.compile("bfloat16|half|float16", re.I)
_WRITE = "`with trainer.precision_plugin.fp32_weights(pl_module) as weights: weights[name][rows] = ...`"
_NOTES = [  # what torch says of 16-bit tensors where user code expects fp32, and what to write instead
    (
        re.compile("expected dtype .* for `(end|weight)` but got dtype", re.I),
        "A weight of 16 bits was averaged into one that is not (lerp_). Use lightning_mixprec."
        "MasterWeightAveraging, or read the fp32 weights: `with trainer.precision_plugin.fp32_weights(pl_module) "
        "as weights: average.lerp_(weights[name], 0.001)`.",
    ),
    (
        re.compile("source and destination dtypes match", re.I),
        f"fp32 values were put into a part of a weight, which is 16-bit while training. Put them into its fp32 values: "
        f"{_WRITE}.",
    ),
    (
        re.compile("hook .* has changed the type of value", re.I),
        "A parameter's gradient hook sees 16-bit gradients, and must return such: `grad * mask.to(grad.dtype)`. Or "
        "change the fp32 gradients in `on_before_optimizer_step`: `param.grad.mul_(mask)`.",
    ),
    (
        re.compile("attempting to assign a gradient with dtype", re.I),
        "A 16-bit parameter takes 16-bit gradients here: `param.grad = grad.to(param.dtype)`. In "
        "`on_before_optimizer_step` it has fp32 ones, to be changed in place: `param.grad.copy_(grad)`.",
    ),
    (
        re.compile("not implemented for", re.I),
        "torch has no such operation in 16 bits, which weights are while training. Compute with `weight.float()`; to "
        f"write a result into a weight: {_WRITE}.",
    ),
    (
        re.compile("same dtype|should be the same|expected scalar type|expected .* to have dtype", re.I),
        "16-bit weights have met other activations where no autocast was on. In a hook or callback, compute inside "
        "`with trainer.precision_plugin.inference_context():`. Inside torch.autocast(enabled=False), name the "
        "layer in PrecisionPolicy(fp32=[...]).",
    ),
]


def own_methods(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Public methods that the user's classes define and ``nn.Module`` does not, without ``forward``, by name.

    Properties, class methods, static methods and coroutines are not among them.

    Example:
        >>> class Autoencoder(nn.Module):
        ...     def encode(self, x):
        ...         return x
        >>> list(own_methods(Autoencoder)), list(own_methods(nn.Linear))
        (['encode'], [])
    """
    found: dict[str, Any] = {}
    for each in reversed(base.__mro__):
        theirs = each.__module__.partition(".")[0] in _OTHERS
        found |= {name: None if theirs else value for name, value in vars(each).items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, FunctionType)
        and not (name.startswith("_") or hasattr(nn.Module, name) or value.__code__.co_flags & _COROUTINE)
    }


def is_called(layer: nn.Module) -> bool:
    """Whether there is anything to call: a ``forward``, or methods of its own; a ``ModuleList`` has neither.

    Example:
        >>> is_called(nn.Linear(1, 1)), is_called(nn.ModuleList())
        (True, False)
    """
    return type(layer).forward is not nn.Module.forward or bool(own_methods(type(layer)))


def is_metric(module: nn.Module) -> bool:
    """Whether it is a metric of torchmetrics, which chooses its own precision.

    Example:
        >>> is_metric(nn.Linear(1, 1))
        False
    """
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def explain(error: BaseException | None, narrowed: Collection[str] = ()) -> None:
    """Add to an error about dtypes what to write instead.

    Args:
        error: If there is one.
        narrowed: Names of parameters that compute in fp32 and have been cast to 16 bits since fit began.

    Example:
        >>> import torch
        >>> try:
        ...     torch.ones(1, 1) @ torch.ones(1, 1).half()
        ... except RuntimeError as error:
        ...     explain(error)
        ...     "inference_context()" in error.__notes__[0]
        True
    """
    if isinstance(error, RuntimeError) and narrowed:
        shown = ", ".join(map(repr, list(narrowed)[:3]))
        error.add_note(
            f"{len(narrowed)} parameters that compute in fp32 ({shown}{', ...' * (len(narrowed) > 3)}) have been cast "
            "to 16 bits since fit began, as by `module.bfloat16()` or `module.half()` in a hook. Leave that out: "
            "MasterWeightPrecision casts what computes in 16 bits by itself. For an export cast a copy: "
            "`copy.deepcopy(module).bfloat16()`."
        )
    elif isinstance(error, RuntimeError) and _HALF.search(str(error)):
        note = next((note for pattern, note in _NOTES if pattern.search(str(error))), None)
        if note is not None:
            error.add_note(note)
