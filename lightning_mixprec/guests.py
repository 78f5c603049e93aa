"""What the user's objects become for the length of fit: subclasses of their own classes, made on the fly.

Why they exist: optimizers must be made with fp32 parameters, schedules must rest while a step is skipped, and an
optimizer that asks for the loss again must not get the old one. Lightning offers no hook for these, and a method
patched onto an instance would end up in checkpoints (schedulers save their ``__dict__``).

Leaves out: when they come and go (:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mixprec.layers import ComputeLayer


class BuildingModule(ComputeLayer):
    """The LightningModule while its optimizers are made: they are made with the fp32 values."""

    trainer: Any
    _mixprec_wraps_methods = False  # hooks are not the network

    def configure_optimizers(self) -> Any:
        """The user's, with fp32 parameters in the module."""
        with self.trainer.precision_plugin.master_weights.shown_in(self):
            return super().configure_optimizers()  # type: ignore[misc]


class TrainingModule(ComputeLayer):
    """The LightningModule while it trains: per-step schedules rest while a step is skipped."""

    trainer: Any
    _mixprec_wraps_methods = False  # hooks are not the network

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """The user's, or nothing."""
        per_step = any(c.scheduler is scheduler and c.interval == "step" for c in self.trainer.lr_scheduler_configs)
        if not per_step or self.trainer.precision_plugin._outcome.advances:
            super().lr_scheduler_step(scheduler, metric)  # type: ignore[misc]


class Once:
    """The closure handed to an optimizer: the loss is known already, and asking again would not evaluate it again.

    Raises:
        MisconfigurationException: When it is asked a second time.
    """

    def __init__(self, optimizer: Optimizer, result: Any) -> None:
        self._optimizer, self._result, self._asked = optimizer, result, False

    def __call__(self) -> Any:
        """The loss that is known."""
        if self._asked:
            raise MisconfigurationException(
                f"{type(self._optimizer).__name__} evaluates the loss more than once in a step, which master weights "
                "and loss scaling cannot follow. Use another optimizer, or Lightning's own precision='32-true'."
            )
        self._asked = True
        return self._result


def rest_over_skips(scheduler: Any, plugin: Any) -> Any:
    """Let ``scheduler.step()``, called in a manual `training_step`, do nothing if its optimizer's step was skipped."""
    base = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        # At the end of an epoch a schedule advances, whatever became of the last batch.
        in_batch = plugin._module is not None and plugin._module._current_fx_name in (
            "training_step",
            "on_train_batch_end",
        )
        skipped = in_batch and getattr(self, "optimizer", None) in plugin._outcome.optimizers
        if plugin.count_skipped_steps or not skipped:
            base.step(self, *args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    scheduler.__class__ = type(base.__name__, (base,), {**names, "step": step})
    return scheduler


def advance_always(scheduler: Any) -> None:
    """Undo :func:`rest_over_skips`."""
    scheduler.__class__ = type(scheduler).__bases__[0]


def rebuild_wrapper(strategy: Any) -> None:
    """Let DDP see parameters whose dtype has changed: a new wrapper, whose buckets fit. All ranks must come here."""
    wrapper = getattr(strategy, "model", None)
    if not isinstance(strategy, DDPStrategy) or not isinstance(wrapper, DistributedDataParallel):
        return
    wrapper._remove_autograd_hooks()
    for param in wrapper.module.parameters():
        param.grad = None  # may be a view of the old buckets
    strategy.model = strategy._setup_model(wrapper.module)
    strategy._register_ddp_hooks()
    strategy._pl_static_graph_delay_done = False
