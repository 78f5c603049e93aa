"""The Lightning plugin: which hook of the Trainer calls which part. No arithmetic of its own.

One training batch, in the order Lightning asks for it (in manual optimization, in the order the user does)::

    train_step_context   autocast to the compute dtype, weight cache off
    pre_backward         loss times the scale
    post_backward        non-finite gradients are noted, before any user hook can hide them
    optimizer_step       all ranks agree; bad batch: nothing happens but a smaller scale
                         good batch: fp32 unscaled gradients, user hooks, clipping, then the optimizer on the masters

Leaves out: everything that a layer, a weight, a gradient or the scale does by itself, which lives in modules that know
torch alone, and what the LightningModule and schedulers become for the length of fit (:mod:`lightning_mixprec.guests`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mixprec.answers import Answers
from lightning_mixprec.calls import explain, outside
from lightning_mixprec.conversion import Conversion
from lightning_mixprec.edits import fp32_weights
from lightning_mixprec.fallback import LayerFallback
from lightning_mixprec.float8_advice import Float8Advice, announce_float8, refuse_device, require_float8
from lightning_mixprec.guests import BuildingModule, TrainingModule, rebuild_wrapper
from lightning_mixprec.layers import compute_context, restore_, swap_
from lightning_mixprec.ledger import GradientLedger
from lightning_mixprec.manual import ManualGuards
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.newcomers import Newcomers
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.questions import (
    called_directly,
    reduces_gradients,
    refuse_averaging,
    refuse_comm_hook,
    refuse_optimizers,
    refuse_sharding,
    refuse_strategy,
    warn_of_gradient_hooks,
    warn_of_shadows,
)
from lightning_mixprec.reduction import GradientReduction, ReduceDtype, mean_over_ranks, synchronise_first_backward
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.schedules import RealFrequencies
from lightning_mixprec.sharding import is_sharded
from lightning_mixprec.steps import Outcome, Steps
from lightning_mixprec.storage import Masters

log = logging.getLogger(__name__)

_LIGHTNING_NAMES: dict[str, Any] = {
    "fp32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "bf16-mixed",  # Lightning has no name for it, and what it does with the name fits
}


class MasterWeightPrecision(Precision):
    """Mixed precision with fp32 master weights, loss scaling and per-layer fp32.

    Pass it to the Trainer in place of ``precision=``. During ``fit`` the parameters of 16-bit layers are 16-bit
    tensors with fp32 masters behind them; ``state_dict``, checkpoints, the gradients that hooks see and the module
    after ``fit`` are fp32. Runs on one device, under DDP and FSDP2 (:func:`lightning_mixprec.sharding.shard_`), in
    automatic and manual optimization, with any number of optimizers. In automatic optimization gradients are dropped
    after the step, which saves their memory (not where the module overrides ``optimizer_zero_grad``). As in stock
    Lightning, the last, incomplete accumulation window of an epoch is divided by ``accumulate_grad_batches`` like the
    others, so its update is smaller.

    Args:
        policy: A :class:`~lightning_mixprec.policy.PrecisionPolicy`, or its compute precision: ``"fp32"``, ``"bf16"``,
            ``"fp16"`` or ``"fp8"``, bf16 with every linear layer that qualifies in fp8 (needs torchao).
        scaler: Loss scaler. Default: a :class:`~lightning_mixprec.scaler.DynamicLossScaler` for fp16, whose
            gradients underflow, and a constant 1 for bf16 and fp32, whose exponents do not need one. A batch with a
            non-finite gradient is skipped in every mode.
        masters: How the fp32 masters are stored, in bytes beside each 16-bit parameter: ``"fp32"`` 4, ``"split"`` 2
            (bf16 only; the same values bit for bit), ``"split24"`` 1 (bf16; 24 bits, rounded stochastically),
            ``"none"`` 0 (bf16; the parameter itself, rounded stochastically).
        fallback: What happens to a layer that overflows however small the loss scale is, and would not in fp32.
            ``"raise"``, the default: it is named in a warning, and in the error that ends the run if skipping does not
            help; nobody's precision changes unasked. ``"auto"``: a
            :class:`~lightning_mixprec.fallback.LayerFallback`, or one with your own bounds: the layer computes in
            fp32 from then on, is listed in :attr:`fp32_layers` and in checkpoints.
        reduce_dtype: What gradients of 16-bit parameters are while they travel between the ranks of DDP: ``"compute"``,
            the default, 16-bit, or ``"fp32"``, twice the bytes. Micro-batches are summed in fp32 in either case, unless
            the strategy has a ``ddp_comm_hook`` of its own. Without effect on one device.
        count_skipped_steps: Count a skipped step in ``global_step`` and let per-step schedules advance over it, as
            stock Lightning does. By default both count updates that happened, so ``max_steps=N`` means N of them, and
            a schedule's ``frequency`` of f, every f of them.

    Attributes:
        fp8_tokens: Tokens that enter fp8 layers in a step, of all ranks and accumulated batches together, known after
            the first batch; None without fp8.

    Raises:
        ValueError: If an argument has a value that is not among the choices.
        ImportError: If the policy uses fp8 and torchao is not installed.

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
        *,
        fallback: Literal["raise", "auto"] | LayerFallback = "raise",
        reduce_dtype: ReduceDtype = "compute",
        count_skipped_steps: bool = False,
    ) -> None:
        self.policy = policy if isinstance(policy, PrecisionPolicy) else PrecisionPolicy(policy)
        if not (scaler is None or isinstance(scaler, DynamicLossScaler)):
            raise ValueError(f"scaler={scaler!r} must be a lightning_mixprec.DynamicLossScaler or None.")
        if masters not in get_args(Masters):
            raise ValueError(f"Unknown masters={masters!r}. Choose one of {', '.join(map(repr, get_args(Masters)))}.")
        if masters != "fp32" and self.policy.compute_dtype != torch.bfloat16:
            raise ValueError(
                f"masters={masters!r} is for bf16, which is the upper half of fp32, not for {self.policy.compute}. "
                f"Use masters='fp32'."
            )
        if not (fallback in ("raise", "auto") or isinstance(fallback, LayerFallback)):
            raise ValueError(f"Unknown fallback={fallback!r}. Choose 'raise', 'auto' or a LayerFallback(...).")
        if reduce_dtype not in get_args(ReduceDtype):
            choices = ", ".join(map(repr, get_args(ReduceDtype)))
            raise ValueError(f"Unknown reduce_dtype={reduce_dtype!r}. Choose one of {choices}.")
        if scaler is None:
            scaler = DynamicLossScaler() if self.policy.compute == "fp16" else DynamicLossScaler.static()
        require_float8(self.policy)
        self.scaler = scaler
        self.masters = masters
        self.fallback = LayerFallback() if fallback == "auto" else fallback
        self.reduce_dtype = reduce_dtype
        self.count_skipped_steps = count_skipped_steps
        self.precision = _LIGHTNING_NAMES[self.policy.compute]
        self.fp8_tokens: int | None = None
        self._module: LightningModule | None = None
        self._device = torch.device("cpu")
        self._ledger: GradientLedger | None = None
        self._steps: Steps | None = None
        self._outcome = Outcome()
        self._manual: ManualGuards | None = None  # in manual optimization
        self._frequencies: RealFrequencies | None = None  # of schedules
        self._newcomers: Newcomers | None = None  # under DDP
        self._answers: Answers | None = None
        self._partial: dict[str, Tensor] = {}  # gradients of an unfinished accumulation window, from a checkpoint
        self._left_over: dict[str, Tensor] = {}  # the same, of a fit that was interrupted
        self._rests_left: dict[str, Any] = {}  # of the last fit
        self._conversion: Conversion | None = None
        self._reduction: GradientReduction | None = None  # under DDP
        self._fp32_layers: list[str] = []  # of the last fit
        self._rounding: dict[str, Any] = {}
        self._fp8_advice: Float8Advice | None = None  # while it is still to be given

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
    def step_was_skipped(self) -> bool:
        """Whether the update of the last batch was."""
        return self._outcome.skipped

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

    @property
    def plan(self) -> PrecisionPlan | None:
        """What the policy means for the module: which layer computes in which dtype, and why. Stays after fit."""
        return self._conversion.plan if self._conversion is not None else None

    @property
    def fp32_layers(self) -> list[str]:
        """Qualified names of layers that :attr:`fallback` has moved to fp32 so far."""
        return list(self._conversion.fp32_layers if self._conversion is not None else self._fp32_layers)

    @property
    def emulated(self) -> bool:
        """Whether fp8 layers compute on hardware without fp8, or as if on such."""
        return self.policy.uses_fp8 and self.policy.emulate

    @property
    def master_weights(self) -> MasterWeights | None:
        """The fp32 masters; None before and after fit, and where everything is fp32."""
        return self._conversion.masters if self._module is not None and self._conversion is not None else None

    @property
    def overflowed_parameters(self) -> list[str]:
        """Parameters with a non-finite gradient in the last batch that was skipped. Reads the device."""
        names, flags = self._outcome.gradients
        return [name for name, bad in zip(names, flags.tolist(), strict=True) if bad]

    # Setting up and leaving

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make ``module`` compute as the policy says, in place (DDP ignores what this returns)."""
        if not isinstance(module, LightningModule):
            raise TypeError(f"{type(self).__name__} works with lightning.Trainer, which passes a LightningModule.")
        self.teardown()  # of an earlier stage that ended without one
        restore_(module)  # parts may be copies of a module that was being trained
        trainer: Any = module.trainer
        refuse_strategy(trainer.strategy)
        refuse_sharding(trainer.strategy, module, self.masters, self.reduce_dtype)
        refuse_comm_hook(trainer.strategy, self.reduce_dtype, self.policy.compute)
        fitting = trainer.state.fn == "fit"
        self._partial = {}
        if fitting:
            self._left_over, self._rests_left = {}, {}
        if fitting and trainer.global_step == 0:  # a fit of its own; a checkpoint's state is loaded later
            self.scaler.reset()
            self._fp32_layers = []
            if isinstance(self.fallback, LayerFallback):
                self.fallback.reset()
        # Before weights are rounded: a layer that moves only when the plugin's own state comes has lost its low bits.
        resumed = trainer._checkpoint_connector._loaded_checkpoint.get(type(self).__qualname__, {})
        self._fp32_layers = list(dict.fromkeys([*self._fp32_layers, *resumed.get("fp32_layers", [])]))
        refuse_averaging(trainer.callbacks, module)
        refuse_device(self.policy, trainer.strategy.root_device)
        self._module = module
        self._device = trainer.strategy.root_device
        # Outside of fit nothing is updated, and rungs that would round are not needed.
        masters: Masters | None = self.masters if fitting else "fp32"
        if is_sharded(module):
            masters = None
        entrances = called_directly(module)
        device_type = self._device.type
        self._conversion = Conversion(module, self.policy, self._fp32_layers, device_type, masters, entrances)
        announce_float8(self.policy, self._conversion.plan)
        if self.master_weights is not None:
            if fitting:
                swap_(module, BuildingModule, device_type, self.compute_dtype, wraps_forward=False)
            total = len(list(module.parameters()))
            half = self.policy.without_fp8().compute
            rank_zero_info(
                f"{type(self).__name__}: {len(self.master_weights)} of {total} parameter tensors are {half}, "
                f"masters={masters!r}; print(trainer.precision_plugin.plan) lists them."
            )
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Follow the module to its device and open the masters to the optimizers."""
        refuse_optimizers(optimizers, self.policy.compute)
        self.scaler.to(self._device)
        module = self._module
        assert module is not None
        ddp = isinstance(module.trainer.strategy, DDPStrategy)
        if self.master_weights is not None:
            count = len(self.master_weights)
            self.master_weights.allocate(optimizers, release_others=bool(optimizers))
            if len(self.master_weights) < count:  # fp32 from here on, and DDP's buckets are 16-bit
                rebuild_wrapper(module.trainer.strategy)
                model = cast(nn.Module, module.trainer.strategy.model)
        assert self._conversion is not None
        self._conversion.open_()
        self._answers = Answers(module, self._conversion, self.scaler, self._device, self.compute_dtype, self.fallback)
        self._reduction = None
        if self.master_weights is not None and reduces_gradients(model, module.trainer.strategy):
            self._reduction = GradientReduction(self.master_weights, self.reduce_dtype)
            self._reduction.follow(model)
            self._answers.reduction = self._reduction
        if not optimizers:
            return model, optimizers, lr_schedulers
        self._ledger = GradientLedger(
            optimizers,
            self.scaler,
            self.master_weights,
            self._device,
            accumulate_in_fp32=not ddp,
            reduction=self._reduction,
            refuse_bare_steps=is_sharded(module) or not self.scaler.is_identity,
            keep_gradients=not module.automatic_optimization or is_overridden("optimizer_zero_grad", module),
        )
        self._steps = Steps(
            module, self._ledger, self.scaler, self._answers, self._outcome, counts_skips=self.count_skipped_steps
        )
        self._fp8_advice = Float8Advice(module) if self.policy.uses_fp8 else None
        # Only now: Lightning looks for overridden hooks while it sets up schedulers.
        restore_(module, below=False)
        swap_(module, TrainingModule, self._device.type, self.compute_dtype, wraps_forward=False)
        if not self.scaler.is_identity:
            warn_of_gradient_hooks(module)
        if ddp:
            self._newcomers = Newcomers(module, self.master_weights, self._reduction)
        if module.automatic_optimization:
            self._frequencies = RealFrequencies(lr_schedulers, lambda: self._outcome.advances)
        else:
            schedulers = [config.scheduler for config in lr_schedulers]
            refuse = ddp or not self.scaler.is_identity
            self._manual = ManualGuards(self, model, optimizers, schedulers, refuse_plain_backward=refuse)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Leave the module as found: its own classes, no hooks, fp32 weights equal to the masters."""
        if self.master_weights is not None:
            explain(sys.exception())
        if self._module is not None and self._ledger is not None:
            self._ledger.end_batch()  # of steps made after the last `training_step`
            self._ledger.close()
            trainer: Any = self._module.trainer
            if trainer.state.fn == "fit":  # for a checkpoint that is saved afterwards
                # Manual loops leave gradients behind that no window will ever use.
                unfinished = self._manual is None or trainer.state.status == TrainerStatus.INTERRUPTED
                self._left_over = self._partial_gradients(self._ledger, self._module) if unfinished else {}
                self._rounding = {} if self.master_weights is None else self.master_weights.state_dict()
                self._rests_left = self._rests()
        if self._steps is not None:
            self._steps.after_backward()
        module, self._module = self._module, None
        if self._steps is not None and module is not None:
            self._steps.close()
        if self._frequencies is not None:
            self._frequencies.remove()
        self._ledger = self._steps = self._reduction = self._fp8_advice = self._frequencies = self._newcomers = None
        if self._answers is not None:
            self._answers.diagnosis.stop()
            self._answers = None
        if self._manual is not None:
            self._manual.remove()
            self._manual = None
        if module is None or self._conversion is None:
            return
        self._fp32_layers = self._conversion.fp32_layers
        self._conversion.restore_()

    # Forward

    def forward_context(self) -> torch.autocast:
        """Autocast to the compute dtype; around training, validation, test and predict steps."""
        return compute_context(self._device.type, self.compute_dtype)

    @contextmanager
    def inference_context(self) -> Iterator[None]:
        """No gradients, and the same arithmetic as in a validation step: for sampling from a hook or callback.

        A call of the module, of any part of it, or of a public method of a part computes so by itself; what a hook
        computes with weights of its own accord needs the context.

        Example:
            >>> with MasterWeightPrecision("bf16").inference_context():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        with torch.no_grad(), self.forward_context():
            yield

    @contextmanager
    def fp32_weights(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """The fp32 weights behind ``module``, to be read and written: small edits would round away in 16 bits.

        For hooks and callbacks, at any time but between a forward and its backward; outside fit too. What stands in the
        tensors when the block ends becomes the weights, fp32 and 16-bit; on an exception nothing does. Takes 4 bytes a
        16-bit parameter for the length of the block. Under DDP all ranks write the same; under FSDP2 the tensors are
        DTensors, each rank's shards. While averages are swapped in (validation with `MasterWeightAveraging`) it is
        these that are meant.

        Args:
            module: The LightningModule, or any part of it.

        Yields:
            By qualified name an fp32 tensor in the parameter's shape; write into it, or put another in its place.
            Parameters that are fp32 anyway are themselves, detached.

        Raises:
            ValueError: If names have been added or removed, or a shape has changed.
            RuntimeError: If the weights have been changed in another way meanwhile, as by a step.

        Example:
            >>> import lightning as L
            >>> class Decay(L.Callback):
            ...     def on_train_batch_end(self, trainer, pl_module, *args):
            ...         with trainer.precision_plugin.fp32_weights(pl_module) as weights:
            ...             for weight in weights.values():
            ...                 weight.mul_(0.9999)
            >>> layer = nn.Linear(2, 2)
            >>> with MasterWeightPrecision("bf16").fp32_weights(layer) as weights:
            ...     _ = weights["weight"].fill_(0.1)
            >>> layer.weight[0, 0].item() == torch.tensor(0.1).item()
            True
        """
        with fp32_weights(module, self.master_weights) as weights:
            yield weights

    def convert_input(self, data: Any) -> Any:
        """The batch as it is: layers cast what enters them, and a timestep of 999 stays 999."""
        if self._steps is not None:
            self._steps.batch = data
        return data

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Autocast around `training_step`; the beginning of a batch, and in manual optimization its end."""
        module, steps, ledger = self._module, self._steps, self._ledger
        if module is None or steps is None or ledger is None:
            with self.forward_context():
                yield
            return
        self._end_batch(module)  # of steps made outside of `training_step`
        if len(ledger.optimizers) != len(module.trainer.optimizers) or any(
            one is not other for one, other in zip(ledger.optimizers, module.trainer.optimizers, strict=True)
        ):
            ledger.follow(module.trainer.optimizers)  # made anew
            if self._frequencies is not None:
                self._frequencies.follow(module.trainer.lr_scheduler_configs)
        steps.begin_batch()
        if ledger.batches == 2:  # by now what is made in fit's hooks, or with the first batch, is there
            warn_of_shadows(module, module.trainer.callbacks)  # type: ignore[attr-defined]
        synchronise_first_backward(cast(nn.Module, module.trainer.strategy.model))
        if self._partial:
            ledger.put_true_gradients(module.named_parameters(), self._partial)
            self._partial = {}
        if self._manual is not None:
            self._manual.begin_batch()
        counted = self._fp8_advice or nullcontext()
        with self.forward_context(), steps.training_step(uncompiled=self._fp8_advice is not None), counted:
            yield
        if not module.automatic_optimization:
            if self._manual is not None:
                self._manual.end_batch(ledger.batches)
            self._end_batch(module)

    def scaled_grad(self, loss: Tensor, inputs: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
        """Gradients of ``loss`` as ``torch.autograd.grad`` has them, made with the loss scale and divided by it: fp32.

        For what looks at gradients inside a step, such as the adaptive weight of a VQGAN's adversarial loss: made
        without the scale they vanish in fp16 (https://github.com/CompVis/latent-diffusion/issues/176).

        Args:
            loss: fp32 [].
            inputs: Tensors to differentiate by, of any shapes.
            **kwargs: Of ``torch.autograd.grad``, such as ``retain_graph=True``.

        Example:
            >>> x = torch.ones(2, requires_grad=True)
            >>> MasterWeightPrecision("fp16").scaled_grad(x.sum(), [x])
            (tensor([1., 1.]),)
        """
        with self._no_autocast():
            grads = torch.autograd.grad(self.scaler.scale_loss(loss), inputs, **kwargs)
            return tuple(grad.float() * self.scaler.inverse_scale() for grad in grads)

    # Backward and step

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss; let gradients that this backward adds to be fp32."""
        assert self._ledger is not None
        assert self._steps is not None
        self._steps.note_loss(tensor)
        for optimizer in self._ledger.before_backward():
            self._steps.skipped_by_user(optimizer)
        if self._manual is not None:
            self._manual.before_backward(self._ledger.batches, module.trainer.strategy.model)
        with self._no_autocast():
            return super().pre_backward(self.scaler.scale_loss(tensor), module)

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Backward, never under autocast."""
        own = not self.scaler.is_identity and tensor.requires_grad and is_overridden("backward", model)
        passed: list[Tensor] = []
        handle = tensor.register_hook(passed.append) if own else None
        if self._manual is not None:
            self._manual.in_backward = True
        try:
            with self._no_autocast():
                super().backward(tensor, model, optimizer, *args, **kwargs)
        finally:
            if self._manual is not None:
                self._manual.in_backward = False
            if handle is not None:
                handle.remove()
        if own and not passed and any(param.grad is not None for param in model.parameters()):
            raise MisconfigurationException(
                f"{type(model).__name__}.backward(loss) sent something else backward than the loss it was given, so "
                "its gradients lack the loss scale that the step divides by. Send what it is given, or use "
                "MasterWeightPrecision('bf16'), which scales nothing."
            )

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Note non-finite gradients before `on_after_backward` and clipping, which can hide them."""
        assert self._ledger is not None
        strategy = module.trainer.strategy
        if isinstance(strategy, DDPStrategy):  # reduces here after a static graph's first manual backward
            strategy.post_backward(tensor)
        self._ledger.after_backward()
        if self._steps is not None and module.automatic_optimization:
            self._steps.after_backward()
        with self._no_autocast():
            unscaled = super().post_backward(tensor, module)
            if self._manual is not None and not self.scaler.is_identity:
                # What the user clips or edits from here on are true gradients; the hook above sees them as they came.
                for optimizer in self._ledger.optimizers:
                    self._ledger.unscale(optimizer)
        return unscaled if self.scaler.is_identity else unscaled * self.scaler.inverse_scale()

    def clip_gradients(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip true gradients. Lightning comes here in every step, with 0 where nothing is to be clipped."""
        if self._ledger is not None and clip_val > 0:
            self._ledger.unscale(getattr(optimizer, "_optimizer", optimizer))
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of all gradients together."""
        if self.master_weights is None:
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        norm = nn.utils.get_total_norm([param.grad for param in params])
        # Times a NaN, every gradient would be one, and where the first was could no longer be told.
        nn.utils.clip_grads_with_norm_(params, clip_val, norm.nan_to_num(nan=torch.inf, posinf=torch.inf))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, then step on the masters, or not at all if a gradient was not finite."""
        if isinstance(optimizer, LBFGS):  # fp32 only: it evaluates the closure itself, as often as it likes
            steppable: Any = optimizer
            output = super().optimizer_step(steppable, model=model, closure=closure, **kwargs)
            self.scaler.update(torch.zeros((), device=self._device))
            return output
        result = closure()
        if self._newcomers is not None:
            self._newcomers.refuse(optimizer)
        with self._no_autocast():
            assert self._steps is not None
            output = self._steps.step_or_skip(optimizer, result, lambda: self._after_closure(model, optimizer), kwargs)
        if model.automatic_optimization:
            self._end_batch(model)
        return output

    def _admit_newcomers(self) -> None:
        if self._newcomers is not None:
            self._newcomers.admit()

    def _end_batch(self, model: LightningModule) -> None:
        assert self._steps is not None
        if self._fp8_advice is not None and self._fp8_advice.due:
            self.fp8_tokens = self._fp8_advice.give(model.trainer)
            self._fp8_advice = None
        self._steps.end_batch()

    def _no_autocast(self) -> AbstractContextManager[None]:
        return outside(self._device.type)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and step counters, as plain numbers; the masters are the checkpoint's ``state_dict``.

        And, where there are such: the state of stochastic rounding, ``fp32_layers``, ``partial_gradients`` of an open
        accumulation window, ``pushed_back_schedules`` (what skips have left schedules of a frequency above 1 to do, see
        :class:`~lightning_mixprec.schedules.RealFrequency`) and ``skips_by_optimizer``, in a row, of several.
        """
        state: dict[str, Any] = dict(self.scaler.state_dict())
        rounding = self.master_weights.state_dict() if self.master_weights is not None else self._rounding
        if rounding:
            state["rounding"] = rounding
        if self.fp32_layers:
            state["fp32_layers"] = list(self.fp32_layers)
        state |= self._rests() if self._ledger is not None else self._rests_left
        partial = self._left_over
        if self._ledger is not None and self._module is not None:
            partial = self._partial_gradients(self._ledger, self._module)
        if partial:
            state["partial_gradients"] = partial
        return state

    def _partial_gradients(self, ledger: GradientLedger, module: LightningModule) -> dict[str, Tensor]:
        """True gradients, by name, of the batches of an accumulation window that a resumed run will not run again."""
        if not ledger.window_open:
            return {}
        batches: Any = module.trainer.fit_loop.epoch_loop.batch_progress.current
        if ledger.in_window and batches.ready > batches.processed:  # Lightning will start from this batch
            if not ledger.window_is_older:
                return {}
            log.warning(
                "The checkpoint is taken inside batch %d, after its backward and before it was counted: resumed, "
                "its gradients count twice in this accumulation window. Save in `on_train_batch_end`.",
                module.trainer.fit_loop.epoch_loop.batch_idx,
            )
        partial = ledger.true_gradients(module.named_parameters())
        if isinstance(module.trainer.strategy, DDPStrategy):  # which saves on all ranks, and writes one's
            partial = mean_over_ranks(partial, module.named_parameters(), self._device)
        return partial

    def _rests(self) -> dict[str, Any]:
        """What schedules have to know of skips so far."""
        pushed_back = self._frequencies.state_dict() if self._frequencies is not None else []
        ledger = self._ledger
        skips = [ledger.consecutive_skips[each] for each in ledger.optimizers] if ledger is not None else []
        state = {"pushed_back_schedules": pushed_back, "skips_by_optimizer": skips if len(skips) > 1 else []}
        return {name: value for name, value in state.items() if value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over loss scale, step counters, and gradients of an accumulation window that was not finished."""
        self.scaler.load_state_dict(state_dict)
        self._partial = dict(state_dict.get("partial_gradients", {}))
        if self._ledger is not None:  # patience goes on where it was, and schedules rest that rested
            count = len(self._ledger.optimizers)
            skips = state_dict.get("skips_by_optimizer", [self.consecutive_skips] * count)
            self._ledger.consecutive_skips.update(zip(self._ledger.optimizers, skips, strict=False))
        if self._frequencies is not None:
            self._frequencies.load_state_dict(state_dict.get("pushed_back_schedules", []))
        if self.master_weights is not None:
            self.master_weights.load_state_dict(state_dict.get("rounding", {}))
        if state_dict.get("fp32_layers") and self._answers is not None and self.compute_dtype != torch.float32:
            self._answers.move_to_fp32(state_dict["fp32_layers"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what stock Lightning calls by other names, and say so where there is nothing to be taken over."""
        module = self._module
        if "current_model_state" in checkpoint and module is not None and module.trainer.state.fn == "fit":
            callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
            if not any(getattr(callback, "averages_master_weights", False) for callback in callbacks):
                module.load_state_dict(checkpoint["current_model_state"], strict=module.strict_loading)
                log.warning(
                    "The checkpoint's state_dict is an average (of WeightAveraging); training goes on from the raw "
                    "weights beside it. Add MasterWeightAveraging() to go on with the average, too."
                )
        if type(self).__qualname__ in checkpoint:
            return
        ours = {"scale", "real_steps", "skipped_steps"}
        for name, state in checkpoint.items():  # of a plugin of this kind with another name: a subclass, or its base
            if isinstance(state, dict) and ours <= state.keys():
                self.load_state_dict(state)
                log.info("Loss scale and step counts taken over from the checkpoint's %s.", name)
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
            "strategy='auto', strategy='ddp' and ModelParallelStrategy (FSDP2, lightning_mixprec.sharding)"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.policy!r}, scaler={self.scaler!r}, masters={self.masters!r}, "
            f"fallback={self.fallback!r})"
        )
