"""What the user's and Lightning's objects become for the length of fit: subclasses of their own classes.

Why they exist: optimizers must be made with fp32 parameters, schedules must rest while a step is skipped, which must
not be counted either, and an optimizer that asks for the loss again must not get the old one. Lightning offers no hook
for these.

Leaves out: when they come and go (:mod:`lightning_mixprec.precision`), and schedules themselves
(:mod:`lightning_mixprec.schedules`).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.progress import _Progress
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mixprec.layers import ComputeLayer
from lightning_mixprec.ranks import wait_for_streams
from lightning_mixprec.reduction import GradientReduction


class BuildingModule(ComputeLayer):
    """The LightningModule while its optimizers are made: they are made with the fp32 values."""

    trainer: Any
    _mixprec_wraps_methods = False  # hooks are not the network

    def configure_optimizers(self) -> Any:
        """The user's, with parameters that are fp32."""
        with self.trainer.precision_plugin.master_weights.shown():
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

    def on_train_batch_start(self, *args: Any) -> Any:
        """The user's; it and the hooks before it may have unfrozen parameters."""
        result = super().on_train_batch_start(*args)  # type: ignore[misc]
        self.trainer.precision_plugin._fit.admit_newcomers()
        return result

    def on_train_batch_end(self, *args: Any) -> None:
        """The user's; nothing of a validation that comes next has begun."""
        super().on_train_batch_end(*args)  # type: ignore[misc]
        self.trainer.precision_plugin._fit.after_batch()

    def on_train_epoch_end(self) -> None:
        """The user's; what it edits in 16-bit weights is looked at."""
        fit = self.trainer.precision_plugin._fit
        fit.open_edits(always=True)
        super().on_train_epoch_end()  # type: ignore[misc]
        fit.close_edits()
        fit.follow_reparametrised()  # before a checkpoint is saved


class Uncounted(_Progress):
    """Lightning's count of steps while it is about to count one that was skipped: it will not, this once.

    So user code that runs before Lightning counts (the rest of `optimizer_step`) or after finds no step more or less
    than there have been.
    """

    def increment_completed(self) -> None:
        """Take back that a step has begun."""
        for tracker in (self.total, self.current):
            tracker.ready -= 1
        self.__class__ = _Progress  # type: ignore[assignment]


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


def rebuild_wrapper(strategy: Any, reduction: GradientReduction | None = None, *, keep_gradients: bool = False) -> None:
    """Let DDP see parameters that have changed: a new wrapper, whose buckets fit. All ranks must come here.

    Args:
        strategy: Whose wrapper it is; without one, nothing happens.
        reduction: Follows it.
        keep_gradients: Go on with gradients that are there.
    """
    wrapper = getattr(strategy, "model", None)
    if not isinstance(strategy, DDPStrategy) or not isinstance(wrapper, DistributedDataParallel):
        return
    wrapper._remove_autograd_hooks()
    for param in wrapper.module.parameters():  # whose gradients may be views of the old buckets
        param.grad = param.grad.clone() if keep_gradients and param.grad is not None else None
    wait_for_streams(strategy.root_device)
    strategy.model = strategy._setup_model(wrapper.module)
    wait_for_streams(strategy.root_device)
    strategy._register_ddp_hooks()
    strategy._pl_static_graph_delay_done = False
    if reduction is not None:
        reduction.follow(strategy.model)
