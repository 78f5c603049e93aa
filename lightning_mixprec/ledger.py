"""What state every optimizer's gradients are in, and what became of a training batch.

Why it exists: gradients are made with a loss scale, maybe over several backward passes and for several optimizers, and
must be unscaled once, with the scale they were made with, before anybody looks at them; they must be judged as backward
made them, before user code can hide an inf; and however many optimizers step, a batch moves the scale once. Training
loops call backward, clip and step in any order, so this is kept in one place rather than in the order of the calls.

What it leaves out: which hook of the Trainer calls what (:mod:`lightning_mixprec.precision`), and the scale's own rules
(:mod:`lightning_mixprec.scaler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.master import MasterWeights, found_nonfinite, multiply_gradients
from lightning_mixprec.scaler import DynamicLossScaler


class GradientLedger:
    """Keeps account of gradients between backward and step, for any number of optimizers.

    Args:
        optimizers: All optimizers of the training loop.
        scaler: The loss scale; updated once a batch, in :meth:`end_batch`.
        masters: Master weights, or None if every parameter is fp32.
        device: Where flags live.
        accumulate_in_fp32: Widen 16-bit gradients before more is added to them. Not while a DDP reducer reads them.

    Attributes:
        window_open: Whether gradients have been made that no step has used or skipped yet.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = DynamicLossScaler(init_scale=8)
        >>> ledger = GradientLedger([optimizer], scaler, None, torch.device("cpu"))
        >>> ledger.before_backward()
        >>> scaler.scale_loss(weight.sum()).backward()
        >>> ledger.after_backward()
        >>> ledger.overflowed(optimizer)
        False
        >>> ledger.step(optimizer, optimizer.step)
        >>> weight.item(), ledger.end_batch()
        (0.0, True)
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: DynamicLossScaler,
        masters: MasterWeights | None,
        device: torch.device,
        *,
        accumulate_in_fp32: bool = True,
    ) -> None:
        self.optimizers = list(optimizers)
        self.scaler = scaler
        self.window_open = False
        self._masters = masters
        self._device = device
        self._accumulate_in_fp32 = accumulate_in_fp32
        self._found: dict[Optimizer, Tensor] = {}  # fp32 [1] each: a non-finite gradient was noted
        self._unscaled: set[Optimizer] = set()
        self._stepped = self._skipped = False  # in this batch, any optimizer

    # Backward

    @torch.no_grad()
    def before_backward(self) -> None:
        """Make what is there fit to be added to: scaled as the new gradients will be, and wide enough."""
        for optimizer in self.optimizers:
            params = _with_gradients(optimizer)
            if not params:
                self._found.pop(optimizer, None)  # cleared since: a new window
                self._unscaled.discard(optimizer)
            elif optimizer in self._unscaled:  # clipped, say, and then more is added
                multiply_gradients(params, self.scaler.scale)
                self._unscaled.discard(optimizer)
            if self._masters is not None and self._accumulate_in_fp32:
                self._masters.accumulate_in_fp32(params)

    def after_backward(self) -> None:
        """Note non-finite gradients, before anybody can hide them."""
        self.window_open = True
        for optimizer in self.optimizers:
            self.note(optimizer)

    def note(self, optimizer: Optimizer) -> None:
        """Note a non-finite gradient of ``optimizer`` as it is now, without reading it back."""
        params = _with_gradients(optimizer)
        if params:
            found = found_nonfinite([param.grad for param in params if param.grad is not None], self._device)
            before = self._found.get(optimizer)
            self._found[optimizer] = found if before is None else torch.maximum(before, found)

    # Step

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether there is anything for ``optimizer`` to step with."""
        return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether any rank has noted a non-finite gradient of ``optimizer``. Waits for the device."""
        found = self._found.get(optimizer)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several:
            found = torch.zeros(1, device=self._device) if found is None else found
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found is not None and bool(found)

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients of ``optimizer`` fp32 and true, once."""
        if optimizer in self._unscaled:
            return
        self._unscaled.add(optimizer)
        params = _with_gradients(optimizer)
        if self._masters is not None:
            self._masters.unscale_gradients(params)
        if not self.scaler.is_identity:
            multiply_gradients(params, self.scaler.inverse_scale())

    def step(self, optimizer: Optimizer, call: Callable[[], Any]) -> Any:
        """Step, with gradients that :meth:`unscale` has made true or that are still scaled."""
        true = optimizer in self._unscaled or self.scaler.is_identity
        if self._masters is not None:
            output = self._masters.step(optimizer, call, None if true else self.scaler.inverse_scale())
        else:
            self.unscale(optimizer)
            output = call()
        self._stepped = True
        self._close(optimizer)
        return output

    def skip(self, optimizer: Optimizer) -> None:
        """Drop the gradients of ``optimizer`` without a step."""
        self._skipped = True
        self._close(optimizer, drop=True)

    def end_batch(self) -> bool | None:
        """Account for the batch: one update of the scale, if any optimizer was called.

        Returns:
            Whether any optimizer stepped, or None if none was called.
        """
        if not (self._stepped or self._skipped):
            return None
        stepped, skipped = self._stepped, self._skipped
        self._stepped = self._skipped = False
        before = self.scaler.scale
        self.scaler.update(torch.full((), float(skipped), device=self._device), stepped=stepped)
        if not self.scaler.is_static and self.window_open:
            # An optimizer that accumulates over batches goes on with the new scale.
            for optimizer in self.optimizers:
                if optimizer not in self._unscaled:
                    multiply_gradients(_with_gradients(optimizer), self.scaler.scale / before)
        return stepped

    def _close(self, optimizer: Optimizer, drop: bool = False) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self._masters is not None:
            self._masters.release_gradients(params)
        elif drop:
            for param in params:
                param.grad = None
        self._found.pop(optimizer, None)
        self._unscaled.discard(optimizer)
        self.window_open = self._masters is not None and any(map(self.has_gradients, self.optimizers))


def _with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
