"""Manual optimization: what the user's training_step might do without the plugin's knowledge.

Why it exists: there the user calls backward and step, as often as they like. A backward that the plugin does not see
lacks the loss scale and the mean over ranks, one that a rank leaves out stops the others, and schedules are advanced
whether or not their optimizer has stepped.

What it leaves out: steps themselves (:mod:`lightning_mixprec.precision`), which are those of automatic optimization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_mixprec.roll_call import RollCall
from lightning_mixprec.schedules import advance_always, rest_over_skips


class ManualGuards:
    """Guards of one fit in manual optimization.

    Args:
        rests: Tells whether a schedule of an optimizer has to rest, because its last step was skipped.
        roll_call: Of the ranks, under DDP.
        optimizers: All of them.
        schedulers: Schedules that the user steps.
        refuse_plain_backward: Whether ``loss.backward()`` would give other gradients than ``self.manual_backward``.

    Attributes:
        in_backward: Set during a backward that the plugin knows of.
    """

    def __init__(
        self,
        rests: Callable[[Any], bool],
        roll_call: RollCall | None,
        optimizers: Iterable[Optimizer],
        schedulers: Iterable[Any],
        *,
        refuse_plain_backward: bool,
    ) -> None:
        self.in_backward = False
        self._made_backward = False  # in this batch
        self._handles: list[Any] = []
        self._schedulers = [rest_over_skips(scheduler, rests) for scheduler in schedulers]
        self._roll_call = roll_call
        if refuse_plain_backward:
            groups = (group for optimizer in optimizers for group in optimizer.param_groups)
            for param in (param for group in groups for param in group["params"] if param.requires_grad):
                self._handles.append(param.register_post_accumulate_grad_hook(self._refuse_plain_backward))

    def begin_batch(self) -> None:
        """A `training_step` begins."""
        self._made_backward = False

    def before_backward(self, batches: int, epoch: int, wrapper: Any) -> None:
        """Meet the other ranks, of which one may make no backward.

        Args:
            batches: How many there have been, this one included.
            epoch: From 0.
            wrapper: What the strategy calls.
        """
        self._made_backward = True
        if self._roll_call is not None:
            self._roll_call.enter(batches, synchronised=wrapper.require_backward_grad_sync, epoch=epoch)

    def end_batch(self, batches: int) -> None:
        """A `training_step` has ended."""
        if self._roll_call is not None and not self._made_backward:
            self._roll_call.miss(batches)

    def remove(self) -> None:
        """Leave parameters and schedules as found."""
        for handle in self._handles:
            handle.remove()
        for scheduler in self._schedulers:
            advance_always(scheduler)
        self._handles, self._schedulers = [], []

    def _refuse_plain_backward(self, param: nn.Parameter) -> None:
        if not self.in_backward:
            raise MisconfigurationException(
                "A loss was sent backward by `loss.backward()`, without the loss scale that the step will divide by, "
                "and under DDP without the mean over ranks. In manual optimization write `self.manual_backward(loss)`."
            )
