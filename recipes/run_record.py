"""What a run was, kept with what it produced.

It leaves out the lines printed at the end (`recipes.train`) and the results of a sweep (`recipes.sweep`).
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf

from recipes.config import flatten
from recipes.speed import SpeedMonitor

FINAL = {
    "hparams/val_loss": "val/loss",
    "hparams/val_loss_raw": "val/loss_raw",
    "hparams/train_loss": "train/loss_epoch",
}
"""Metrics of the HParams page, and where their final values are found."""

NOT_COMPARED = (
    "callbacks",
    "logger",
    "ckpt_path",
    "dry_run",
    "trainer.default_root_dir",
    "trainer.enable_model_summary",
)
"""What no run is compared by; it stands in the configuration as text."""


def compared(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as columns of a table: constructors by the name of their class, under the key they are for.

    Args:
        config: Plain dicts, lists and scalars.

    Example:
        >>> compared({"model": {"_target_": "recipes.unet.UNet", "in_channels": 1}, "dry_run": False})
        {'model': 'UNet', 'model.in_channels': 1}
    """
    columns = {}
    for name, value in flatten({key: node for key, node in config.items() if key not in NOT_COMPARED}).items():
        if name.endswith("._target_"):
            name, value = name.removesuffix("._target_"), value.rpartition(".")[2]
        if not name.endswith("._partial_") and name not in NOT_COMPARED:
            columns[name] = value
    if "precision.policy.compute" in columns:
        columns["precision"] = columns.pop("precision.policy.compute")
    return columns


class RunRecord(L.Callback):
    """Keep the resolved configuration with what it produced.

    It is text in TensorBoard and `hparams.yaml` at the start, plain containers under `recipe` in every checkpoint (so
    that `recipes.sample` can rebuild the network, and `torch.load(weights_only=True)` reads the file) with the number
    of `processes`, the last `validation_loss`, the number of `images`, and `image_shape` and `num_classes` of the data
    (for which the images would have to be there) beside it, and one line of TensorBoard's HParams page with the final
    metrics at the end.

    Args:
        config: Plain dicts, lists and scalars.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the configuration as text."""
        text = OmegaConf.to_yaml(OmegaConf.create(self.config))
        for logger in self._writers(trainer):
            logger.experiment.add_text("config", "\n".join("    " + line for line in text.splitlines()))
            logger.hparams.update(self.config)  # what the logger writes to hparams.yaml

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the configuration to the checkpoint, and what the network was made for."""
        checkpoint["recipe"] = self.config
        checkpoint["processes"] = trainer.world_size
        loss = trainer.callback_metrics.get("val/loss")
        checkpoint["validation_loss"] = None if loss is None else float(loss)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            checkpoint["image_shape"], checkpoint["num_classes"] = list(data.image_shape), data.num_classes
            checkpoint["images"] = {"training": len(data.train), "validation": len(data.val)}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one HParams entry, with metrics that are real: those that were never measured are left out."""
        found = {title: trainer.callback_metrics.get(name) for title, name in FINAL.items()}
        metrics = {title: float(value) for title, value in found.items() if value is not None}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SpeedMonitor) and callback.rates:
                metrics["hparams/images_per_second"] = callback.rates["images_per_second"]
        plugin = trainer.precision_plugin
        for title, name in (("hparams/skipped_steps", "skipped_steps"), ("hparams/loss_scale", "loss_scale")):
            if hasattr(plugin, name):
                metrics[title] = float(getattr(plugin, name))
        if not metrics:
            return
        for logger in self._writers(trainer):
            logger.log_hyperparams(compared(self.config), metrics, step=trainer.global_step)

    @staticmethod
    def _writers(trainer: L.Trainer) -> list[TensorBoardLogger]:
        return [x for x in trainer.loggers if trainer.is_global_zero and isinstance(x, TensorBoardLogger)]
