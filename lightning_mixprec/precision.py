"""The Lightning plugin: which hook of the Trainer calls which part. No arithmetic of its own.

One training batch, in the order Lightning asks for it::

    train_step_context   autocast to the compute dtype, weight cache off
    pre_backward         loss times the scale
    post_backward        non-finite gradients are noted, before any user hook can hide them
    optimizer_step       all ranks agree; bad batch: nothing happens but a smaller scale
                         good batch: fp32 unscaled gradients, user hooks, clipping, then the optimizer on the masters

Leaves out: everything that a layer, a weight or the scale does by itself, which lives in the torch-only modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_mixprec.layers import ComputeLayer, Fp32Layer, NormLayer, compute_context, restore_, swap_
from lightning_mixprec.master import MasterWeights, found_nonfinite
from lightning_mixprec.policy import PrecisionPlan, PrecisionPolicy
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.storage import Masters

log = logging.getLogger(__name__)

_LIGHTNING_NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class NonFiniteGradientsError(RuntimeError):
    """Training stopped because every batch overflowed and a smaller loss scale did not help.

    Example:
        >>> issubclass(NonFiniteGradientsError, RuntimeError)
        True
    """


class MasterWeightPrecision(Precision):
    """Mixed precision with fp32 master weights, loss scaling and per-layer fp32.

    Pass it to the Trainer in place of ``precision=``. During ``fit`` the parameters of 16-bit layers are 16-bit
    tensors with fp32 masters behind them; ``state_dict``, checkpoints, the gradients that hooks see and the module
    after ``fit`` are fp32. Runs on one device and under DDP.

    Args:
        policy: A :class:`~lightning_mixprec.policy.PrecisionPolicy`, or its compute precision: ``"fp32"``, ``"bf16"``
            or ``"fp16"``.
        scaler: Loss scaler. Default: a :class:`~lightning_mixprec.scaler.DynamicLossScaler` for fp16, whose
            gradients underflow, and a constant 1 for bf16 and fp32, whose exponents do not need one. A batch with a
            non-finite gradient is skipped in every mode.
        masters: How the fp32 masters are stored, in bytes beside each 16-bit parameter: ``"fp32"`` 4, ``"split"`` 2
            (bf16 only; the same values bit for bit), ``"split24"`` 1 (bf16; 24 bits, rounded stochastically),
            ``"none"`` 0 (bf16; the parameter itself, rounded stochastically).

    Raises:
        ValueError: If an argument has a value that is not among the choices.

    Example:
        >>> import lightning as L
        >>> plugin = MasterWeightPrecision("bf16")
        >>> trainer = L.Trainer(plugins=plugin, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.precision
        'bf16-mixed'
    """

    def __init__(
        self,
        policy: PrecisionPolicy | str = "bf16",
        scaler: DynamicLossScaler | None = None,
        masters: Masters = "fp32",
    ) -> None:
        self.policy = policy if isinstance(policy, PrecisionPolicy) else PrecisionPolicy(policy)
        if not (scaler is None or isinstance(scaler, DynamicLossScaler)):
            raise ValueError(f"scaler={scaler!r} must be a lightning_mixprec.DynamicLossScaler or None.")
        if masters not in get_args(Masters):
            raise ValueError(f"Unknown masters={masters!r}. Choose one of {', '.join(map(repr, get_args(Masters)))}.")
        if masters != "fp32" and self.policy.compute != "bf16":
            raise ValueError(
                f"masters={masters!r} is for bf16, which is the upper half of fp32, not for {self.policy.compute}. "
                f"Use masters='fp32'."
            )
        if scaler is None:
            scaler = DynamicLossScaler() if self.policy.compute == "fp16" else DynamicLossScaler.static()
        self.scaler = scaler
        self.masters = masters
        self.precision = _LIGHTNING_NAMES[self.policy.compute]
        self.plan: PrecisionPlan | None = None
        self.master_weights: MasterWeights | None = None
        self.step_was_skipped = False
        self._module: LightningModule | None = None
        self._device = torch.device("cpu")
        self._nonfinite: Tensor | None = None  # fp32 [1], noted since the last optimizer step
        self._compiled_backward: Any = None  # torch's setting, while ours is in place
        self._rounding: dict[str, Any] = {}
        self._advance_schedules = True
        self._last_nonfinite_loss: Tensor | None = None  # bool [], whether the last unscaled loss was inf or NaN

    # Public state, exact after every training batch

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which layers compute that the policy does not name."""
        return self.policy.compute_dtype

    @property
    def loss_scale(self) -> float:
        """Scale of the next batch's loss. Reads the device."""
        return float(self.scaler.scale)

    @property
    def skipped_steps(self) -> int:
        """Batches whose update was skipped so far. Reads the device."""
        return int(self.scaler.skipped_steps)

    @property
    def consecutive_skips(self) -> int:
        """Batches skipped since the last good one. Reads the device."""
        return int(self.scaler.consecutive_skips)

    @property
    def real_steps(self) -> int:
        """Batches whose update was taken so far. Reads the device."""
        return int(self.scaler.real_steps)

    # Setting up and leaving

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make ``module`` compute as the policy says, in place (DDP ignores what this returns)."""
        if not isinstance(module, LightningModule):
            raise TypeError(f"{type(self).__name__} works with lightning.Trainer, which passes a LightningModule.")
        self.teardown()  # of an earlier stage that ended without one
        restore_(module)  # parts may be copies of a module that was being trained
        trainer: Any = module.trainer
        _refuse_strategy(trainer.strategy)
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._refuse_loop(module)
            if trainer.global_step == 0:  # a fit of its own; a checkpoint's state is loaded later
                self.scaler.reset()
        _refuse_averaging(trainer.callbacks, module)
        self.plan = self.policy.resolve(module)
        self._module = module
        self._device = trainer.strategy.root_device
        if self.compute_dtype != torch.float32:
            # Modules first: what they refuse is refused before any weight has changed.
            kinds: dict[str, type[Fp32Layer | NormLayer]] = {"fp32": Fp32Layer, "norm": NormLayer}
            for name, layer in module.named_modules(remove_duplicate=False):
                kind = kinds.get(self.plan.kinds.get(name, "compute"))
                if kind is not None and type(layer).forward is not nn.Module.forward:  # a ModuleList is never called
                    swap_(layer, kind, self._device.type, self.compute_dtype)
            for layer in _called_directly(module):
                swap_(layer, ComputeLayer, self._device.type, self.compute_dtype)
            self._compiled_backward = _set_backward_autocast("off")
            # Outside of fit nothing is updated, and rungs that would round are not needed.
            masters = self.masters if fitting else "fp32"
            self.master_weights = MasterWeights(module, self.plan.parameters, masters)
            if fitting:
                swap_(module, _BuildingModule, self._device.type, self.compute_dtype, wraps_forward=False)
            rank_zero_info(
                f"{type(self).__name__}: {len(self.master_weights)} of {len(list(module.parameters()))} parameter "
                f"tensors are {self.policy.compute} with fp32 masters; print(trainer.precision_plugin.plan) lists them."
            )
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Follow the module to its device and open the masters to the optimizers."""
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS) and self.compute_dtype != torch.float32:
                raise MisconfigurationException(
                    f"LBFGS evaluates the loss several times in one step, which {self.policy.compute} master weights "
                    "and loss scaling cannot follow. Use MasterWeightPrecision('fp32'), or another optimizer."
                )
        if len(optimizers) > 1:
            raise MisconfigurationException(
                f"{type(self).__name__} trains one optimizer, configure_optimizers returned {len(optimizers)}. "
                "Put the parameters into groups of one optimizer."
            )
        self.scaler.to(self._device)
        assert self._module is not None
        if self.master_weights is not None:
            # DDP's reducer has seen the 16-bit parameters, so there they have to stay.
            release = bool(optimizers) and not isinstance(self._module.trainer.strategy, DDPStrategy)
            self.master_weights.allocate(optimizers, release_others=release)
        if optimizers:
            # Only now: Lightning looks for overridden hooks while it sets up schedulers.
            restore_(self._module, below=False)
            swap_(self._module, _TrainingModule, self._device.type, self.compute_dtype, wraps_forward=False)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Leave the module as found: its own classes, no hooks, fp32 weights equal to the masters."""
        module, self._module = self._module, None
        self._nonfinite = self._last_nonfinite_loss = None
        if module is None:
            return
        if self.master_weights is not None:
            self._rounding = self.master_weights.state_dict()  # for a checkpoint that is saved after fit
            self.master_weights.restore_()
            self.master_weights = None
        if self._compiled_backward is not None:
            _set_backward_autocast(self._compiled_backward)
            self._compiled_backward = None
        restore_(module)

    # Forward

    def forward_context(self) -> torch.autocast:
        """Autocast to the compute dtype; around training, validation, test and predict steps."""
        return compute_context(self._device.type, self.compute_dtype)

    @contextmanager
    def inference_context(self) -> Iterator[None]:
        """No gradients, and the same arithmetic as in a validation step: for sampling from a hook or callback.

        Example:
            >>> with MasterWeightPrecision("bf16").inference_context():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        with torch.no_grad(), self.forward_context():
            yield

    # Backward and step

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss; let gradients that this backward adds to be fp32."""
        self._last_nonfinite_loss = ~torch.isfinite(tensor.detach()).all()
        # Under DDP the reducer's buckets are 16-bit, so micro-batches are summed as they are.
        if self.master_weights is not None and not isinstance(module.trainer.strategy, DDPStrategy):
            self.master_weights.accumulate_in_fp32(module.parameters())
        return super().pre_backward(self.scaler.scale_loss(tensor), module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Note non-finite gradients before `on_after_backward` and clipping, which can hide them."""
        optimizers = module.trainer.optimizers
        self._note_nonfinite([p for opt in optimizers for group in opt.param_groups for p in group["params"]])
        unscaled = super().post_backward(tensor, module)
        return unscaled if self.scaler.is_identity else unscaled * self.scaler.inverse_scale()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, then step on the masters, or not at all if a gradient was not finite."""
        if isinstance(optimizer, LBFGS):  # fp32 only: it evaluates the closure itself, as often as it likes
            steppable: Any = optimizer
            output = super().optimizer_step(steppable, model=model, closure=closure, **kwargs)
            self.scaler.update(torch.zeros((), device=self._device))
            return output
        self.step_was_skipped, self._advance_schedules = False, True
        result = closure()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if params and all(param.grad is None for param in params):  # training_step returned None: no step, no skip
            self._uncount_step(model)
            return result
        if self._agree_nonfinite():
            self._skip(model, params)
            return result
        self._unscale(params)
        self._after_closure(model, optimizer)
        self._note_nonfinite(params)  # user code may have written one
        if self._agree_nonfinite():
            self._skip(model, params)
            return result

        def step() -> Any:
            return optimizer.step(closure=_Once(optimizer, result), **kwargs)

        output = step() if self.master_weights is None else self.master_weights.step(optimizer, step)
        if self.master_weights is not None:
            self.master_weights.release_gradients(params)
        self.scaler.update(torch.zeros((), device=self._device))
        return output

    def _note_nonfinite(self, params: list[nn.Parameter]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        found = found_nonfinite(grads, self._device)
        self._nonfinite = found if self._nonfinite is None else torch.maximum(self._nonfinite, found)

    def _agree_nonfinite(self) -> bool:
        """Whether any rank has noted a non-finite gradient since the last call. The one wait for the device."""
        found, self._nonfinite = self._nonfinite, None
        if found is None:
            return False
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def _unscale(self, params: list[nn.Parameter]) -> None:
        inverse_scale = None if self.scaler.is_identity else self.scaler.inverse_scale()
        if self.master_weights is not None:
            self.master_weights.unscale_gradients(params, inverse_scale)
        elif inverse_scale is not None:
            torch._foreach_mul_([param.grad for param in params if param.grad is not None], inverse_scale)

    def _skip(self, model: LightningModule, params: list[nn.Parameter]) -> None:
        self.step_was_skipped = True
        self._uncount_step(model)
        at_floor = self.scaler.at_floor
        self.scaler.update(torch.ones((), device=self._device))
        self._stop_if_hopeless(model, at_floor)
        if self.master_weights is not None:
            self.master_weights.release_gradients(params)
        else:
            for param in params:
                param.grad = None

    def _uncount_step(self, model: LightningModule) -> None:
        """Lightning counts every call of the optimizer; `global_step` and `max_steps` mean updates that happened."""
        self._advance_schedules = False
        progress = model.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        for tracker in (progress.total, progress.current):
            tracker.ready -= 1
            tracker.completed -= 1  # Lightning adds one to it when this step returns

    def _stop_if_hopeless(self, model: LightningModule, at_floor: bool) -> None:
        loss_is_finite = self._last_nonfinite_loss is None or not bool(self._last_nonfinite_loss)
        skips = self.consecutive_skips
        if skips < self.scaler.max_consecutive_skips and (loss_is_finite or not at_floor):
            return
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        loss = "was finite" if loss_is_finite else "was not finite either, so look at the data and the forward pass"
        raise NonFiniteGradientsError(
            f"{skips} training batches in a row had non-finite gradients; the last is batch "
            f"{model.trainer.fit_loop.epoch_loop.batch_idx} of epoch {model.trainer.current_epoch}, after "
            f"{self.real_steps} real steps. The loss {loss}. The loss scale is {self.loss_scale:g}. First of "
            f"{len(bad)} parameters with a non-finite gradient: {', '.join(bad[:3]) or 'none is left to see'}. "
            f"Weights are those of the last good step. Try bf16, name the layer in PrecisionPolicy(fp32=[...]), or "
            f"lower the learning rate; DynamicLossScaler(max_consecutive_skips=...) sets the patience."
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and step counters, as plain numbers; the masters are the checkpoint's ``state_dict``."""
        rounding = self.master_weights.state_dict() if self.master_weights is not None else self._rounding
        return {**self.scaler.state_dict(), **({"rounding": rounding} if rounding else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over loss scale and step counters."""
        self.scaler.load_state_dict(state_dict)
        if self.master_weights is not None:
            self.master_weights.load_state_dict(state_dict.get("rounding", {}))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the GradScaler state of a stock checkpoint; say so where a checkpoint has neither."""
        if type(self).__qualname__ in checkpoint:
            return
        stock = checkpoint.get("MixedPrecision") or checkpoint.get("native_amp_scaling_state")
        if stock and not self.scaler.is_identity:
            self.scaler.load_state_dict(stock)
            log.info("Loss scale %g taken over from the checkpoint's GradScaler.", self.loss_scale)
        elif not self.scaler.is_identity:
            log.warning("The checkpoint holds no loss scale: continuing with %g.", self.loss_scale)

    # What it is, also inside the error of a strategy that refuses it at Trainer construction

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}({self.policy.compute!r}, masters={self.masters!r}), which trains under "
            "strategy='auto' and strategy='ddp'"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r}, scaler={self.scaler!r}, masters={self.masters!r})"

    def _refuse_loop(self, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__} does not scale and skip in manual optimization yet. Set "
                f"`automatic_optimization = True` in {type(module).__name__}."
            )


class _BuildingModule(ComputeLayer):
    """What the user's LightningModule is while its optimizers are made: they are made with the fp32 values."""

    trainer: Any

    def configure_optimizers(self) -> Any:
        with self.trainer.precision_plugin.master_weights.shown_in(self):
            return super().configure_optimizers()  # type: ignore[misc]


class _Once:
    """The closure handed to an optimizer: the loss is known already, and asking again would not evaluate it again."""

    def __init__(self, optimizer: Optimizer, result: Any) -> None:
        self._optimizer, self._result, self._asked = optimizer, result, False

    def __call__(self) -> Any:
        if self._asked:
            raise MisconfigurationException(
                f"{type(self._optimizer).__name__} evaluates the loss more than once in a step, which master weights "
                "and loss scaling cannot follow. Use another optimizer, or Lightning's own precision='32-true'."
            )
        self._asked = True
        return self._result


class _TrainingModule(ComputeLayer):
    """What the user's LightningModule becomes for the length of ``fit``: schedules rest while a step is skipped."""

    trainer: Any

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        per_step = any(c.scheduler is scheduler and c.interval == "step" for c in self.trainer.lr_scheduler_configs)
        if not per_step or self.trainer.precision_plugin._advance_schedules:
            super().lr_scheduler_step(scheduler, metric)  # type: ignore[misc]


def _called_directly(module: nn.Module) -> Iterator[nn.Module]:
    """The children that a hook calls as ``pl_module.net(x)``; those of a ModuleList, ``pl_module.nets[0](x)``."""
    for child in module.children():
        child = getattr(child, "_orig_mod", child)  # what torch.compile wraps
        if type(child).forward is nn.Module.forward:
            yield from _called_directly(child)
        elif next(child.parameters(), None) is not None and "forward" not in child.__dict__:
            yield child


def _refuse_strategy(strategy: Any) -> None:
    foreign = isinstance(strategy, (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy))
    if foreign or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise MisconfigurationException(
            f"MasterWeightPrecision does not run under {type(strategy).__name__}, which owns its precision or shards "
            "parameters. Use Trainer(strategy='ddp') on several devices, or strategy='auto' on one."
        )


def _refuse_averaging(callbacks: list[Any], module: nn.Module) -> None:
    for callback in callbacks:
        stock = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
        if stock and not getattr(callback, "averages_master_weights", False):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages the 16-bit weights, which loses every small change. Use "
                "lightning_mixprec.MasterWeightAveraging, which averages the fp32 masters."
            )
    for name, each in module.named_modules():
        if isinstance(each, AveragedModel):
            log.warning(
                "%r averages what it reads from the module, which is 16-bit while training. Feed it from "
                "`pl_module.state_dict()`, which is fp32, or use lightning_mixprec.MasterWeightAveraging.",
                name,
            )


def _set_backward_autocast(value: Any) -> Any:
    """Under torch.compile an fp32 layer's backward would run under the autocast around the whole forward.

    Returns:
        The setting before, or None where torch has no such setting.
    """
    config: Any = torch._functorch.config
    before = getattr(config, "backward_pass_autocast", None)
    if before is not None:
        config.backward_pass_autocast = value
    return before
