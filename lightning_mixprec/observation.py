"""A few batches in fp32, looked at from the boundaries of every module.

Why it exists: what a model's activations and gradients are, before any rounding, is known in fp32 alone, and a hook at
each module sees all of them. Steps are repeatable, so that what one pass has shown can be looked at again in another.

What it leaves out: 16 bits (:mod:`lightning_mixprec.trial`), and operations between two boundaries.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mixprec.containers import tensors_in
from lightning_mixprec.formats import ACTIVATION_FORMATS, GRADIENT_FORMATS, Tally
from lightning_mixprec.opaque import visible_modules


class Steps:
    """The loss of a model on a batch: the same value however often it is asked for.

    Args:
        model: Anything; it is changed as by training, so give a copy.
        loss: Takes the model and a batch; None: the model's own ``training_step(batch, batch_idx)``.

    Raises:
        ValueError: If there is no loss, or the model's own makes its backward by itself.

    Example:
        >>> steps = Steps(nn.Dropout(), lambda model, batch: model(batch).sum())
        >>> bool(steps(torch.ones(9), 0) == steps(torch.ones(9), 0))
        True
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        self.model, self._loss = model, loss
        if loss is None and not callable(getattr(model, "training_step", None)):
            raise ValueError(
                f"{type(model).__name__} has no training_step. Give the loss: "
                "audit(model, batches, loss=lambda model, batch: ...)."
            )
        if loss is None and not getattr(model, "automatic_optimization", True):
            raise ValueError(
                f"{type(model).__name__} optimizes manually, which needs a Trainer. Give one loss of its "
                "training_step: audit(model, batches, loss=lambda module, batch: ...)."
            )

    def __call__(self, batch: Any, index: int) -> Tensor:
        """The loss on a copy of ``batch``, with random numbers that depend on ``index`` alone."""
        with _seeded(index):
            batch = copy.deepcopy(batch)
            step: Any = self.model.training_step if self._loss is None else None
            output = self._loss(self.model, batch) if self._loss is not None else step(batch, index)
        found = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of {found.numel()} elements" if isinstance(found, Tensor) else repr(found)
            raise ValueError(f"The loss of batch {index} is {what}; it must be a tensor of one element.")
        return found


class Observation:
    """While entered, counts what leaves each module in forward and what comes back to it in backward.

    Args:
        model: The model, in fp32.
        loss_scale: What gradients are multiplied by before they are counted; the largest ones are noted without it.

    Attributes:
        activations: Of each module that was called, its outputs, by name.
        gradients: Those by its outputs and by the parameters that it owns.
        output_gradients: Those by its outputs, for their largest alone.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> with Observation(net) as seen:
        ...     net(torch.ones(2, 1)).sum().mul(3).backward()
        >>> seen.output_gradients["0"].largest
        3.0
    """

    def __init__(self, model: nn.Module, loss_scale: float = 1.0) -> None:
        self._model, self._scale = model, loss_scale
        self._handles: list[Any] = []
        self.activations: dict[str, Tally] = defaultdict(partial(Tally, ACTIVATION_FORMATS))
        self.gradients: dict[str, Tally] = defaultdict(partial(Tally, GRADIENT_FORMATS))
        self.output_gradients: dict[str, Tally] = defaultdict(partial(Tally, ()))

    def __enter__(self) -> Observation:
        for name, module in visible_modules(self._model):
            self._handles.append(module.register_forward_hook(partial(self._after_forward, name)))
            for param in module.parameters(recurse=False):
                if param.requires_grad:
                    self._handles.append(param.register_hook(partial(self._at_parameter, name)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point():
                self.activations[name].add(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._at_output, name))

    def _at_output(self, name: str, grad: Tensor) -> None:
        self.gradients[name].add(grad, self._scale)
        self.output_gradients[name].add(grad)

    def _at_parameter(self, name: str, grad: Tensor) -> None:
        self.gradients[name].add(grad, self._scale)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch and of Python that depend on ``seed``; their state is as found afterwards."""
    cuda = torch.cuda.is_initialized()  # a seed for devices that nobody has used would outlive this
    state = random.getstate()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []):
        torch.random.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
