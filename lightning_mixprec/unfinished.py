"""An accumulation window that a checkpoint was taken in: its gradients are saved, and a resumed fit goes on with them.

Why it exists: Lightning saves weights and counts, and the batches of an open window, which no step has used yet, would
be lost or counted twice, depending on the hook that saves.

What it leaves out: what gradients carry (:mod:`lightning_mixprec.ledger`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mixprec.ledger import GradientLedger
from lightning_mixprec.reduction import mean_over_ranks

log = logging.getLogger(__name__)


class UnfinishedWindow:
    """Saves the open window of a fit, and gives a resumed one its gradients back.

    Args:
        module: What trains.
        ledger: Its gradients.
        several_ranks: Each rank has gradients of its own, and one checkpoint holds them all.
    """

    def __init__(self, module: LightningModule, ledger: GradientLedger, *, several_ranks: bool) -> None:
        self._module, self._ledger, self._several_ranks = module, ledger, several_ranks
        self._gradients: Mapping[str, Tensor] = {}  # true ones by name, until the first batch
        self._hold_next = False  # that batch is in them, too, and must not count again

    def state_dict(self) -> dict[str, Any]:
        """True gradients of the window's batches, by name, and whether a resumed run runs one of these again."""
        ledger = self._ledger
        loop: Any = self._module.trainer.fit_loop.epoch_loop
        if not ledger.window_open:
            return {}
        batches = loop.batch_progress.current
        again = ledger.in_window and batches.started > batches.processed  # Lightning will start from this batch
        if again and not ledger.window_is_older:
            return {}
        if again and not self._module.automatic_optimization:  # any of its backwards may have been
            again = False
            log.warning(
                "The checkpoint is taken inside batch %d, after its backward and before it was counted: resumed, "
                "its gradients count twice in this accumulation window. Save in `on_train_batch_end`.",
                loop.batch_idx,
            )
        gradients = ledger.true_gradients(self._module.named_parameters())
        if self._several_ranks:
            device = self._module.trainer.strategy.root_device
            gradients = mean_over_ranks(gradients, self._module.named_parameters(), device)
        return {"partial_gradients": gradients, "partial_gradients_hold_next_batch": again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, in the first batch."""
        self._gradients = state.get("partial_gradients", {})
        self._hold_next = state.get("partial_gradients_hold_next_batch", False)

    def begin_batch(self) -> None:
        """Before the first batch's forward: its backward adds to them."""
        if self._gradients and not self._hold_next:
            self._ledger.put_true_gradients(self._module.named_parameters(), self._gradients)
            self._gradients = {}
        self._hold_next = False  # but this one

    def after_backward(self) -> None:
        """Instead of what the backward has made, of a batch that was saved after it and not counted yet."""
        if self._gradients:
            self._ledger.put_true_gradients(self._module.named_parameters(), self._gradients, instead=True)
            self._gradients = {}
