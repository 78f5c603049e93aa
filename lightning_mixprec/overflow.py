"""Where finite became non-finite: the first tensor to blame, in words.

Why it exists: "the loss is NaN" costs days. A batch's input, a parameter, an activation or a gradient is the first that
is not finite, and the module that made it is known while it runs.

What it leaves out: doing something about it. No hook is installed while all is well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class FirstNonFinite:
    """Watches the forward of every module below ``model``, on the device, until :meth:`stop`.

    Args:
        model: The model to watch. Containers are watched like layers; the first to finish with a non-finite output is
            the innermost.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        >>> _ = net[0].weight.data.fill_(float("inf"))
        >>> trace = FirstNonFinite(net)
        >>> _ = net(torch.ones(1, 1))
        >>> trace.stop()
        >>> trace.report()
        "the output of '0' (Linear), from finite inputs of at most 1"
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[str, Tensor, Tensor, Tensor]] = []  # name, bad output, bad input, largest input
        self._handles = [
            module.register_forward_hook(self._hook(f"{name!r} ({type(module).__name__})"), with_kwargs=True)
            for name, module in model.named_modules()
            if name
        ]

    def _hook(self, label: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._seen.append((label, _nonfinite(output), _nonfinite((args, kwargs)), _largest((args, kwargs))))

        return hook

    def clear(self) -> None:
        """Forget what was seen so far: a new batch begins."""
        self._seen.clear()

    def stop(self) -> None:
        """Remove the hooks; what was seen can still be reported."""
        for handle in self._handles:
            handle.remove()

    def report(self) -> str | None:
        """The first module whose output was not finite, or None. Reads the device."""
        for label, output, inputs, largest in self._seen:
            if bool(output):
                if bool(inputs):
                    return f"the input of {label}"
                return f"the output of {label}, from finite inputs of at most {float(largest):.3g}"
        return None


def first_nonfinite(model: nn.Module, batch: Any, trace: FirstNonFinite | None) -> str:
    """Name the first non-finite tensor: of the batch, of the parameters, of the forward, or else of the gradients.

    Args:
        model: The model, with the gradients of the bad batch.
        batch: The batch: tensors in containers.
        trace: What watched the forward of this batch, if anything did.

    Example:
        >>> first_nonfinite(nn.Linear(1, 1), {"image": torch.tensor([float("nan")])}, None)
        "the batch, at ['image']"
    """
    for path, tensor in _tensors(batch, ""):
        if bool(_nonfinite(tensor)):
            return f"the batch{f', at {path}' if path else ''}"
    for name, param in model.named_parameters():
        if bool(_nonfinite(param)):
            return f"parameter {name!r}"
    found = trace.report() if trace is not None else None
    if found is not None:
        return found
    for name, param in reversed(list(model.named_parameters())):  # backward reaches the last layers first
        if param.grad is not None and bool(_nonfinite(param.grad)):
            return f"the gradient of {name!r}, nearest to the loss"
    return "nothing that is left to see"


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{path}.{field.name}")


@torch.no_grad()
def _nonfinite(value: Any) -> Tensor:
    """Whether any floating-point tensor in ``value`` holds an inf or NaN, bool [], without reading it back."""
    flags = [~torch.isfinite(tensor).all() for _, tensor in _tensors(value, "") if tensor.is_floating_point()]
    return torch.stack(flags).any() if flags else torch.tensor(False)


@torch.no_grad()
def _largest(value: Any) -> Tensor:
    sizes = [t.detach().float().abs().max() for _, t in _tensors(value, "") if t.is_floating_point() and t.numel()]
    return torch.stack(sizes).max() if sizes else torch.tensor(0.0)
