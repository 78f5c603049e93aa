"""Parameters that begin to train in mid-run, under DDP.

Why it exists: DDP averages the gradients of parameters that were trainable when its wrapper was made, and says nothing
of others: unfrozen later, or added, they move differently on every rank. Here the wrapper is made anew before the first
batch in which they train.

What it leaves out: their master weights (:meth:`lightning_mixprec.master.MasterWeights.enrol`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_mixprec.guests import rebuild_wrapper
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.reduction import GradientReduction


class Newcomers:
    """Brings parameters that begin to train to the notice of DDP.

    Args:
        module: What is trained, by a strategy that has wrapped it.
        masters: Its master weights, if any.
        reduction: How its gradients are averaged, if not as DDP does it.
    """

    def __init__(
        self,
        module: LightningModule,
        masters: MasterWeights | None,
        reduction: GradientReduction | None,
    ) -> None:
        self._module = module
        self._masters, self._reduction = masters, reduction
        self._note()

    def _note(self) -> None:
        """The wrapper has just been made. What is not in the module is no business of DDP's at any time."""
        inside = set(self._module.parameters())
        self._known = {param for param in inside if param.requires_grad}
        optimizers = self._module.trainer.optimizers
        self._known.update(param for each in optimizers for param in _params(each) if param not in inside)

    def _of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [param for param in _params(optimizer) if param.requires_grad and param not in self._known]

    def admit(self) -> None:
        """Make the wrapper anew if there are any; before a batch, on all ranks, which unfreeze alike."""
        new = [param for optimizer in self._module.trainer.optimizers for param in self._of(optimizer)]
        if not new:
            return
        if self._masters is not None:
            self._masters.enrol(new)
        rebuild_wrapper(self._module.trainer.strategy, self._reduction, keep_gradients=True)
        self._note()

    def refuse(self, optimizer: Optimizer) -> None:
        """Before a step.

        Raises:
            MisconfigurationException: If ``optimizer`` has gradients that were not averaged.
        """
        late = {param for param in self._of(optimizer) if param.grad is not None}
        if late:
            names = [name for name, param in self._module.named_parameters() if param in late]
            raise MisconfigurationException(
                f"{len(names)} parameters have begun to train within a batch: {', '.join(names[:3])}"
                f"{', ...' if len(names) > 3 else ''}. DDP has not averaged their gradients over the ranks. Unfreeze "
                "or add them in `on_train_batch_start` or an earlier hook, such as `on_train_epoch_start`."
            )


def _params(optimizer: Any) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])
