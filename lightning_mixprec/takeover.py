"""What a checkpoint that another precision plugin has written calls by other names.

Why it exists: a run begun in stock Lightning goes on here with the loss scale that it had, and from the weights that it
trained, of which ``WeightAveraging`` writes the average in their place.

What it leaves out: weights and moments, which have the same names everywhere (:mod:`lightning_mixprec.state_hooks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule

from lightning_mixprec.scaler import DynamicLossScaler

log = logging.getLogger(__name__)

_OURS = {"scale", "real_steps", "skipped_steps"}  # what the state of any plugin of this kind has


def take_over_raw_weights(checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Let a fit go on from the weights beside an average, if it does not average itself."""
    trainer: Any = module.trainer
    if "current_model_state" not in checkpoint or trainer.state.fn != "fit":
        return
    if any(getattr(callback, "averages_master_weights", False) for callback in trainer.callbacks):
        return
    module.load_state_dict(checkpoint["current_model_state"], strict=module.strict_loading)
    log.warning(
        "The checkpoint's state_dict is an average (of WeightAveraging); training goes on from the raw weights beside "
        "it. Add MasterWeightAveraging() to go on with the average, too."
    )


def take_over_scale(
    checkpoint: Mapping[str, Any],
    scaler: DynamicLossScaler,
    load: Callable[[dict[str, Any]], None],
    *,
    trains: bool,
) -> None:
    """Find the loss scale in a checkpoint that has no state of this plugin, and say so where there is none.

    Args:
        checkpoint: All of it.
        scaler: Takes the state of a ``GradScaler``.
        load: Takes the state of a plugin of this kind with another name: a subclass, or its base.
        trains: It will be needed.
    """
    for name, state in checkpoint.items():
        if isinstance(state, dict) and state.keys() >= _OURS:
            load(state)
            log.info("Loss scale and step counts taken over from the checkpoint's %s.", name)
            return
    if scaler.is_identity:
        return
    stock = checkpoint.get("MixedPrecision") or checkpoint.get("native_amp_scaling_state")
    if stock:
        scaler.load_state_dict(stock)
        log.info("Loss scale %g taken over from the checkpoint's GradScaler.", float(scaler.scale))
    elif trains:
        log.warning("The checkpoint holds no loss scale: continuing with %g.", float(scaler.scale))
