"""What one batch is like for every layer, in numbers that low precision cares about.

Why it exists: whether 16 bits suffice is decided layer by layer: by the largest number, by how many gradients are too
small, by how many updates a 16-bit weight would not notice. All of it is counted on the device and read back at once.

What it leaves out: when to look and where to write it (:mod:`lightning_mixprec.monitor`). Nothing is hooked outside of
the batch that is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.containers import stacked, tensors_in
from lightning_mixprec.formats import lost_updates
from lightning_mixprec.opaque import is_script, is_transformed, stored
from lightning_mixprec.shards import local

_SAMPLE = 2**14  # weights of a tensor whose updates are looked at
_EXPONENTS = (-48, 24)  # of 2, between which numbers are counted in a histogram


@dataclass
class LayerStats:
    """One layer in one batch.

    Attributes:
        activation: Largest finite magnitude in its outputs.
        activation_headroom: Factors of two between that and the largest number of the outputs' dtype.
        gradient: Largest finite magnitude of its parameters' gradients, at scale 1.
        gradient_headroom: The same for the gradients as they were made, with the loss scale.
        zero: Share of these gradients that are zero: flushed, or truly zero.
        subnormal: Share that is not zero but smaller than the smallest normal number of their dtype.
        lost: Share of the updates that a 16-bit weight without a master would not notice.
        non_finite: Number of non-finite outputs and gradients.

    Example:
        >>> LayerStats(activation=2.0).activation
        2.0
    """

    activation: float = math.nan
    activation_headroom: float = math.nan
    gradient: float = math.nan
    gradient_headroom: float = math.nan
    zero: float = math.nan
    subnormal: float = math.nan
    lost: float = math.nan
    non_finite: float = 0.0


class BatchStats:
    """Collects :class:`LayerStats` over one batch, without reading the device until :meth:`read`.

    Under FSDP2 gradients and updates are those of this rank's shards.

    Args:
        model: The model.
        layers: Qualified names of the modules to look at.
        narrow: 16-bit dtype that weights would be stored in without masters.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> stats = BatchStats(net, ["0"], torch.bfloat16)
        >>> net(torch.ones(4, 1)).sum().backward()
        >>> stats.after_backward(scale=torch.tensor(1.0))
        >>> stats.read()["0"].gradient
        4.0
    """

    def __init__(self, model: nn.Module, layers: Iterable[str], narrow: torch.dtype) -> None:
        chosen = {name: model.get_submodule(name) for name in layers}
        self._modules = {name: module for name, module in chosen.items() if not is_script(module)}
        self._narrow = narrow
        self._numbers: dict[tuple[str, str], Tensor] = {}  # fp32 [] by layer and what it is
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        self._weights: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        self.exponents: dict[tuple[str, str], Tensor] = {}  # counts [bins] by layer and what it is
        self._handles = [
            module.register_forward_hook(partial(self._after_forward, name)) for name, module in self._modules.items()
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if is_transformed():
            return
        for _, tensor in tensors_in(output):
            values = stored(local(tensor.detach())) if tensor.is_floating_point() else None
            if values is not None and values.numel():
                self._note(name, "activation", values)

    @torch.no_grad()
    def after_backward(self, scale: Tensor) -> None:
        """Look at the gradients as backward has made them.

        Args:
            scale: Loss scale that they carry, fp32 [].
        """
        self.stop()
        for name, module in self._modules.items():
            for param in module.parameters(recurse=False):
                if param.grad is None:
                    continue
                grad = local(param.grad)
                grad = grad._values() if grad.is_sparse else grad
                if not grad.numel():  # another rank has all of it
                    continue
                self._note(name, "gradient", grad)
                size = grad.abs()
                self._add(name, "zero", (size == 0).sum())
                self._add(name, "subnormal", ((size > 0) & (size < torch.finfo(grad.dtype).smallest_normal)).sum())
                self._add(
                    name, "elements", torch.full((), float(grad.numel()), dtype=torch.float32, device=grad.device)
                )
            if (name, "gradient") in self._numbers:
                self._numbers[name, "scale"] = scale

    @torch.no_grad()
    def before_step(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Keep a sample of the weights, fp32."""
        for name, module in self._modules.items():
            params = [param for param in module.parameters(recurse=False) if param.grad is not None]
            self._weights[name] = [(param, _sample(local(value_of(param))).clone()) for param in params]

    @torch.no_grad()
    def after_step(self, value_of: Callable[[nn.Parameter], Tensor]) -> None:
        """See what the step has done to them."""
        for name, pairs in self._weights.items():
            for param, before in pairs:
                lost, moved = lost_updates(before, _sample(local(value_of(param))) - before, self._narrow)
                self._add(name, "lost", lost)
                self._add(name, "moved", moved)
        self._weights.clear()

    def read(self) -> dict[str, LayerStats]:
        """What was found, by layer. One wait for the device."""
        keys = list(self._numbers)
        if not keys:
            return {}
        values = stacked([self._numbers[key].float().reshape(()) for key in keys]).tolist()
        numbers = dict(zip(keys, values, strict=True))
        return {name: self._stats(name, numbers) for name in self._modules if any(key[0] == name for key in keys)}

    def _stats(self, name: str, numbers: Mapping[tuple[str, str], float]) -> LayerStats:
        def get(what: str) -> float:
            return numbers.get((name, what), math.nan)

        def headroom(what: str) -> float:
            dtype = self._dtypes.get((name, what))
            size = get(what)
            if dtype is None or math.isnan(size):
                return math.nan
            return math.log2(torch.finfo(dtype).max / size) if size > 0 else math.inf

        elements, moved = get("elements"), get("moved")
        return LayerStats(
            activation=get("activation"),
            activation_headroom=headroom("activation"),
            gradient=get("gradient") / get("scale"),
            gradient_headroom=headroom("gradient"),
            zero=get("zero") / elements if elements else math.nan,
            subnormal=get("subnormal") / elements if elements else math.nan,
            lost=get("lost") / moved if moved else math.nan,
            non_finite=numbers.get((name, "non_finite"), 0.0),
        )

    def _note(self, name: str, what: str, values: Tensor) -> None:
        finite = torch.isfinite(values)
        size = torch.where(finite, values, 0).abs().amax().float()
        key = (name, what)
        self._numbers[key] = torch.maximum(self._numbers[key], size) if key in self._numbers else size
        self._dtypes[key] = values.dtype
        self._add(name, "non_finite", (~finite).sum())
        counts = exponent_counts(values)
        self.exponents[key] = self.exponents[key] + counts if key in self.exponents else counts

    def _add(self, name: str, what: str, count: Tensor) -> None:
        key = (name, what)
        self._numbers[key] = self._numbers[key] + count if key in self._numbers else count.float()


def exponent_counts(values: Tensor) -> Tensor:
    """How many numbers have which binary exponent, int64 [bins]; zeros, inf, NaN and what is out of range not counted.

    Whole numbers are counted: floats CUDA would add up in any order, which `Trainer(deterministic=True)` refuses, and
    fp32 counts end at 2^24. Nothing waits for the device.

    Example:
        >>> counts = exponent_counts(torch.tensor([1.0, 1.5, -2.0, 0.0, 1e30]))
        >>> {edge: int(count) for edge, count in zip(exponent_edges(), counts) if count}
        {0: 2, 1: 1}
    """
    low, high = _EXPONENTS
    bins = high - low + 2  # with one for what is below, and one for what is above
    exponents = (values.float().flatten().view(torch.int32) >> 23 & 0xFF) - 127  # of fp32; -127 of zero, 128 of inf
    places = (exponents - (low - 1)).clamp_(0, bins - 1)
    if values.device.type == "cuda":  # where `bincount` asks the device how long its result is
        counts = torch.histc(places, bins=bins, min=0, max=bins).long()
    else:  # where `histc` takes no whole numbers
        counts = torch.bincount(places, minlength=bins)
    return counts[1:-1]


def exponent_edges() -> list[int]:
    """Powers of two between which :attr:`BatchStats.exponents` counts.

    Example:
        >>> exponent_edges()[0], len(exponent_edges())
        (-48, 73)
    """
    return list(range(_EXPONENTS[0], _EXPONENTS[1] + 1))


def _sample(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLE, 1)].float()
