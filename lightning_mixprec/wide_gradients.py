"""Gradients of 16-bit parameters that are fp32, or become 16-bit again.

Why it exists: sums over micro-batches, clipping and hooks need fp32 gradients, DDP's reducer and memory 16-bit ones,
and torch lets a 16-bit parameter carry an fp32 gradient only if it is told to, and told back.

What it leaves out: when (:mod:`lightning_mixprec.ledger`), and optimizers (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_mixprec.gradients import multiply_gradients
from lightning_mixprec.widening import HALF


class WideGradients:
    """Knows which 16-bit parameters carry an fp32 gradient.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones(1, dtype=torch.bfloat16)
        >>> gradients = WideGradients()
        >>> gradients.unscale([weight], torch.tensor(0.5))
        >>> weight.grad
        tensor([0.5000])
        >>> gradients.release([weight])
        >>> weight.grad is None, weight.grad_dtype
        (True, torch.bfloat16)
    """

    def __init__(self) -> None:
        self._wide: set[nn.Parameter] = set()

    def give(self, param: nn.Parameter, grad: Tensor) -> None:
        """Make ``grad``, fp32, the gradient of a 16-bit parameter."""
        param.grad_dtype = None  # lets a 16-bit parameter carry an fp32 gradient
        param.grad = grad
        self._wide.add(param)

    def allow(self, params: Iterable[nn.Parameter]) -> None:
        """Let 16-bit parameters that have no gradient be given an fp32 one, by whoever writes ``param.grad = ...``."""
        for param in params:
            if param.grad is None and param.dtype in HALF:
                param.grad_dtype = None
                self._wide.add(param)

    def widen(self, params: Iterable[nn.Parameter]) -> None:
        """Make gradients fp32 that the next backward will add to, so that a sum over micro-batches is an fp32 sum.

        Must not be used while a DDP reducer still has to see the gradient: its buckets are 16-bit.
        """
        for param in params:
            if param.grad is not None and param.grad.dtype in HALF:
                self.give(param, param.grad.float())

    def narrow(self, params: Iterable[nn.Parameter]) -> None:
        """The reverse, for gradients kept over a step that a DDP reducer is to add to."""
        for param in params:
            if param in self._wide and param.grad is not None:
                grad = param.grad.to(param.dtype)
                self.release([param])
                param.grad = grad

    @torch.no_grad()
    def unscale(self, params: Iterable[nn.Parameter], inverse_scale: Tensor | None = None) -> None:
        """Make every gradient fp32 and multiply it by ``inverse_scale`` (fp32 [], None for 1), in place of ``p.grad``.

        From here to the end of the step the module's own parameters show what the optimizer will see.
        """
        params = [param for param in params if param.grad is not None]
        self.widen(params)
        if inverse_scale is not None:
            multiply_gradients(params, inverse_scale)

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Drop the gradients: fp32 ones would cost 4 bytes a parameter until the next backward, and break DDP's."""
        for param in params:
            param.grad = None
            if self._wide and param in self._wide:
                param.grad_dtype = param.dtype
                self._wide.discard(param)
