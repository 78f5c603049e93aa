"""A run that ends in the middle of an epoch goes on in the middle of it, with other batches too.

Why it exists: a checkpoint counts batches. That is a place in the epoch only as long as batches hold as many images and
accumulate as many to a step as before. It leaves out which images an epoch has, and in which order (`recipes.loading`).
"""

from __future__ import annotations

from typing import Any

import lightning as L

from recipes.run_length import limited


class BrokenEpochs(L.Callback):
    """Keeps the place in the epoch, in checkpoints that are written and in the one that a run goes on from.

    Lightning 2.6 counts the epoch as processed before `on_train_epoch_end`, where checkpoints are saved if there is no
    validation: a run that goes on would take the rest of it, and all later epochs, with the next epoch's images.

    With another `data.batch_size` or `trainer.accumulate_grad_batches` a run goes on after as many whole steps of its
    own as fit into the images that were seen. Lightning would count its batches instead: it would see images again or
    leave them out, and step on a window of accumulation that is not full.

    Example:
        >>> place_of({"epoch": 0, "batches": 5, "images_per_batch": 32, "images_per_step": 32}, 16, 32)
        10
        >>> place_of({"epoch": 0, "batches": 5, "images_per_batch": 32, "images_per_step": 32}, 64, 64)
        2
    """

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take back in the checkpoint what Lightning counts too early."""
        for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
            if counts["processed"] > counts["completed"] and not trainer.is_last_batch:
                counts["processed"] -= 1

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count in batches of this run, before Lightning reads the counts."""
        loop: dict[str, Any] = checkpoint["loops"]["fit_loop"]
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        states = loop["state_dict"].get("combined_loader") or [{}]
        if "images_per_step" not in states[0]:  # of a loader that is not ours, or of before
            return
        state, accumulated = states[0], trainer.accumulate_grad_batches
        step = data.batch_size
        batch = step // accumulated
        if (batch, step) == (state["images_per_batch"], state["images_per_step"]):
            return
        progress = loop["epoch_loop.batch_progress"]
        whole = limited(data.steps_per_epoch * accumulated, trainer.limit_train_batches)
        place = whole if progress["is_last_batch"] else min(place_of(state, batch, step), whole)
        moved = place - progress["current"]["ready"]
        for counts in (progress["current"], progress["total"]):
            counts.update({name: count + moved for name, count in counts.items()})
        state["batches"] = place
        if state_of_plugin := checkpoint.get("MasterWeightPrecision"):  # of a window whose images come again
            for name in ("partial_gradients", "partial_gradients_hold_next_batch"):
                state_of_plugin.pop(name, None)
        if losses := checkpoint.get("losses"):
            losses["pending"] = []


def place_of(state: dict[str, int], batch: int, step: int) -> int:
    """Batches of this run that hold the images which were seen, as far as they fill steps.

    Args:
        state: Of `recipes.loading.ResumableLoader`.
        batch: Images of a batch of this run, of all processes together.
        step: Images of an optimizer step.
    """
    seen = state["batches"] * state["images_per_batch"]
    return seen // state["images_per_step"] * state["images_per_step"] // step * (step // batch)
