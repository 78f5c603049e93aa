"""An average of the weights that needs the fp32 truth and the step counters of the precision plugin.

Why it exists: an average of 16-bit weights never moves, and one taken on skipped steps decays at the wrong rate.

It works with any Precision plugin; without :class:`~lightning_mixprec.MasterWeightPrecision` every optimizer step
counts as real and the parameters are their own masters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.precision import MasterWeightPrecision
from lightning_mixprec.sharding import reshard_
from lightning_mixprec.shards import shard_like, whole

AverageFn = Callable[[Tensor, Tensor, int], Tensor]


class MasterWeightAveraging(WeightAveraging):
    """Exponential (or any other) moving average of the fp32 master weights.

    Differs from Lightning's ``WeightAveraging`` where that is unsafe in low precision or hides the raw weights: the
    average is fp32 and fed from the masters, it moves on real steps only, a checkpoint's ``state_dict`` holds the raw
    weights with the average under ``"averaged_state_dict"``, and after ``fit`` the module holds the raw weights.
    During validation the average is in place, without loss to either.

    Args:
        decay: ``average = decay * average + (1 - decay) * weights`` after each real step, in (0, 1). The default,
            0.999, averages over about 1000 steps; long runs take 0.9999.
        avg_fn: Replaces the formula: ``avg_fn(average, weights, number_of_averages_so_far)`` returns the new average,
            as in ``torch.optim.swa_utils.AveragedModel``; fp32 tensors of one parameter's shape.
        device: Where the average lives; by default where the parameters are.

    Attributes:
        averages: Average by qualified parameter name, fp32; trained parameters only.
        n_averaged: Number of updates so far.

    Raises:
        ValueError: If ``decay`` is outside (0, 1).

    Example:
        >>> MasterWeightAveraging(decay=0.9999).decay
        0.9999
    """

    averages_master_weights = True

    def __init__(
        self, decay: float = 0.999, avg_fn: AverageFn | None = None, device: torch.device | str | int | None = None
    ) -> None:
        super().__init__(device=device)
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay!r} must lie between 0 and 1, such as 0.999.")
        self.decay = decay
        self.avg_fn = avg_fn
        self.averages: dict[str, Tensor] = {}
        self.n_averaged = 0
        self._real_steps = 0
        self._raw: dict[str, Tensor] = {}  # the weights, while the average is in their place

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the average of an earlier fit; a checkpoint, loaded after this, may bring one."""
        if stage == "fit":
            self.averages, self.n_averaged, self._raw = {}, 0, {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the average at the weights, which by now are on their device and have their masters."""
        for name, weight in _trained_weights(pl_module):
            self.averages[name] = self._place(self._average_of(name, weight), weight)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the step counter stands, which a checkpoint may have set."""
        self._real_steps = _real_steps(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average if this batch made a real step (and a subclass's ``should_update`` agrees)."""
        before, self._real_steps = self._real_steps, _real_steps(trainer)
        if self._real_steps > before and self.should_update(step_idx=self._real_steps - 1):
            self._update(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the average where a subclass's ``should_update(epoch_idx=...)`` says so."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: unlike stock, the module keeps its raw weights."""

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        weights = _trained_weights(pl_module, self.averages)
        pairs = [(self._average_of(name, w), self._place(w, w)) for name, w in weights]
        if self.avg_fn is None:
            torch._foreach_lerp_([average for average, _ in pairs], [w for _, w in pairs], 1 - self.decay)
        else:
            for average, weight in pairs:
                average.copy_(self.avg_fn(average, weight, self.n_averaged))
        self.n_averaged += 1

    @contextmanager
    def averaged_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """Put the average in place of the weights for a while, for example to sample from a hook.

        Example:
            >>> import lightning as L
            >>> ema = MasterWeightAveraging()
            >>> with ema.averaged_weights(L.LightningModule()):  # before a fit there is nothing to put in place
            ...     pass
        """
        if self._raw or not self.averages:
            yield
            return
        self._swap(pl_module)
        try:
            yield
        finally:
            self._swap(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """During fit, validate with the average."""
        if self.averages and trainer.state.fn == "fit":
            self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        if self._raw:
            self._swap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights back if validation was interrupted."""
        if self._raw:
            self._swap(pl_module)

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule) -> None:
        """Put the average in place of the weights, or back. Both stay fp32; the 16-bit parameters are roundings."""
        masters = _masters(pl_module)
        if not self._raw:
            self._raw = {name: weight.clone() for name, weight in _trained_weights(pl_module, self.averages)}
            values = self.averages
        else:
            values, self._raw = self._raw, {}
            reshard_(pl_module)
        for name, param in pl_module.named_parameters():
            if name in values:
                if masters is not None:
                    masters.write(param, values[name])
                else:
                    param.copy_(values[name])

    def _average_of(self, name: str, weight: Tensor) -> Tensor:
        if name not in self.averages:  # at the start, or unfrozen since
            self.averages[name] = self._place(weight, weight).clone()
        return self.averages[name]

    def _place(self, tensor: Tensor, weight: Tensor) -> Tensor:
        return tensor.to(weight.device if self._device is None else self._device)

    def state_dict(self) -> dict[str, Any]:
        """Number of updates; the average itself has its own place in the checkpoint."""
        return {"n_averaged": self.n_averaged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the number of updates; a stock average's state has none and counts from its own average."""
        self.n_averaged = state_dict.get("n_averaged", 0)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add ``"averaged_state_dict"``: the keys of ``state_dict``, trained parameters averaged, the rest as there."""
        held = checkpoint["state_dict"]
        averages = {name: whole(average) for name, average in self.averages.items()}  # on all ranks
        checkpoint["averaged_state_dict"] = {**held, **{k: v for k, v in averages.items() if k in held}}
        checkpoint["state_dict"] = {**held, **self._raw}  # inside a validation the module holds the average

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the average from ``"averaged_state_dict"``; a checkpoint without one starts it at its weights."""
        trained = {name: param for name, param in pl_module.named_parameters() if param.requires_grad}
        source = checkpoint.get("averaged_state_dict", {})
        values = {name: value.float() for name, value in source.items() if name in trained}
        self.averages = {name: shard_like(value, trained[name]).clone() for name, value in values.items()}


def _plugin(pl_module: LightningModule) -> MasterWeightPrecision | None:
    trainer = pl_module._trainer
    plugin = trainer.precision_plugin if trainer is not None else None
    return plugin if isinstance(plugin, MasterWeightPrecision) else None


def _real_steps(trainer: Trainer) -> int:
    plugin = trainer.precision_plugin
    return plugin.real_steps if isinstance(plugin, MasterWeightPrecision) else trainer.global_step


def _masters(pl_module: LightningModule) -> MasterWeights | None:
    plugin = _plugin(pl_module)
    return plugin.master_weights if plugin is not None else None


def _trained_weights(pl_module: LightningModule, known: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 weight of every trained parameter (or known to be one, if it is toggled off), with all edits."""
    masters = _masters(pl_module)
    reshard_(pl_module)
    if masters is not None:
        masters.adopt_edits()
    for name, param in pl_module.named_parameters():
        if param.requires_grad or name in known:
            yield name, masters.read(param) if masters is not None else param.detach()
