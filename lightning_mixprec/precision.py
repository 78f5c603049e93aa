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

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mixprec.answers import Answers
from lightning_mixprec.autocast import compute_context, outside
from lightning_mixprec.calls import explain
from lightning_mixprec.conversion import Conversion
from lightning_mixprec.edits import fp32_weights
from lightning_mixprec.fallback import LayerFallback
from lightning_mixprec.fit import Fit
from lightning_mixprec.float8_advice import announce_float8, refuse_device, require_float8
from lightning_mixprec.guests import BuildingModule, rebuild_wrapper
from lightning_mixprec.layers import restore_, swap_
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.processor import slowness
from lightning_mixprec.questions import (
    called_directly,
    reduces_gradients,
    refuse_averaging,
    refuse_backward_without_optimizers,
    refuse_comm_hook,
    refuse_optimizers,
    refuse_second_trainer,
    refuse_sharding,
    refuse_strategy,
    refuse_unsharded,
)
from lightning_mixprec.reduction import GradientReduction, ReduceDtype
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.sharding import is_sharded
from lightning_mixprec.steps import Outcome
from lightning_mixprec.storage import Masters
from lightning_mixprec.takeover import take_over_raw_weights, take_over_scale

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

    A network that casts what it is given to the dtype of a parameter, ``t.to(self.proj.weight.dtype)``, casts it to 16
    bits, in which a timestep of 999 is 1000: keep that layer in fp32, ``PrecisionPolicy("bf16", fp32=["proj"])``.

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
        self._module: LightningModule | None = None
        self._device = torch.device("cpu")
        self._conversion: Conversion | None = None
        self._answers: Answers | None = None
        self._fit: Fit | None = None
        self._unscaled: Tensor | None = None  # the loss of a backward that is being made
        # What outlives a fit.
        self._outcome = Outcome()
        self._fp32_layers: list[str] = []
        self._fp8_tokens: int | None = None
        self._left: dict[str, Any] = {}  # for a checkpoint that is saved afterwards

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
        """Batches whose update was skipped so far."""
        return self.scaler.skipped_steps

    @property
    def consecutive_skips(self) -> int:
        """Batches skipped since the last good one."""
        return self.scaler.consecutive_skips

    @property
    def real_steps(self) -> int:
        """Batches whose update was taken so far."""
        return self.scaler.real_steps

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
    def fp8_tokens(self) -> int | None:
        """Tokens that enter fp8 layers in a step, of all ranks and accumulated batches; None until they are counted."""
        counted = self._fit.fp8_tokens if self._fit is not None else None
        return self._fp8_tokens if counted is None else counted

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
        if not isinstance(module, LightningModule) or module._trainer is None:
            raise TypeError(
                f"{type(self).__name__} works with lightning.Trainer, which passes a LightningModule, and was given "
                f"{type(module).__name__} without a Trainer. With Fabric, use Fabric(precision={self.precision!r})."
            )
        refuse_second_trainer(self._module, module)
        self.teardown()  # of an earlier stage that ended without one
        restore_(module)  # parts may be copies of a module that was being trained
        trainer: Any = module.trainer
        refuse_strategy(trainer.strategy)
        refuse_sharding(trainer.strategy, module, self.masters, self.reduce_dtype)
        refuse_comm_hook(trainer.strategy, self.reduce_dtype, self.policy.compute)
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._left, self._fp8_tokens = {}, None
        if fitting and trainer.global_step == 0:  # a fit of its own; a checkpoint's state is loaded later
            self.scaler.reset()
            self._fp32_layers = []
            if isinstance(self.fallback, LayerFallback):
                self.fallback.reset()
        # Before weights are rounded: a layer that moves only when the plugin's own state comes has lost its low bits.
        resumed = trainer._checkpoint_connector._loaded_checkpoint.get(type(self).__qualname__, {})
        self._fp32_layers = list(dict.fromkeys([*self._fp32_layers, *resumed.get("fp32_layers", [])]))
        refuse_averaging(trainer.callbacks)
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
        for optimizer in optimizers:
            refuse_unsharded(module, (param for group in optimizer.param_groups for param in group["params"]))
        if self.master_weights is not None:
            self.master_weights.allocate(optimizers, release_others=bool(optimizers))
            if module.trainer.state.fn == "fit":  # parameters were shown in fp32, and some may stay so from here on
                rebuild_wrapper(module.trainer.strategy)
                model = cast(nn.Module, module.trainer.strategy.model)
        assert self._conversion is not None
        self._conversion.open_()
        self._answers = Answers(module, self._conversion, self.scaler, self._device, self.compute_dtype, self.fallback)
        reduction = None
        if self.master_weights is not None and reduces_gradients(model, module.trainer.strategy):
            reduction = self._answers.reduction = GradientReduction(self.master_weights, self.reduce_dtype)
            reduction.follow(model)
        if optimizers and module.trainer.state.fn == "fit":
            if self._device.type in ("cpu", "cuda") and (slow := slowness(self.compute_dtype, self._device)):
                rank_zero_info(slow)
            self._fit = Fit(
                module,
                model,
                optimizers,
                lr_schedulers,
                scaler=self.scaler,
                masters=self.master_weights,
                answers=self._answers,
                reduction=reduction,
                outcome=self._outcome,
                compute_dtype=self.compute_dtype,
                counts_fp8=self.policy.uses_fp8,
                counts_skips=self.count_skipped_steps,
            )
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Leave the module as found: its own classes, no hooks, fp32 weights equal to the masters."""
        if self.master_weights is not None:
            explain(sys.exception(), self._conversion.narrowed() if self._conversion is not None else ())
        if self._fit is not None:
            self._fp8_tokens = self.fp8_tokens
            self._left = self._fit.close()
            self._fit = None
        if self._answers is not None:
            self._answers.diagnosis.stop()
            self._answers = None
        module, self._module = self._module, None
        if module is not None and self._conversion is not None:
            self._fp32_layers = self._conversion.fp32_layers
            self._conversion.restore_()

    # Forward

    def forward_context(self) -> torch.autocast:
        """Autocast to the compute dtype; around training, validation, test and predict steps."""
        if self._fit is not None:
            self._fit.close_edits(evaluates=True)
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
        if self._fit is not None:
            self._fit.note_batch(data)
        return data

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Autocast around `training_step`; the beginning of a batch, and in manual optimization its end."""
        return self.forward_context() if self._fit is None else self._fit.training_step()

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
        if self._fit is None:
            refuse_backward_without_optimizers()
        assert self._fit is not None
        self._fit.before_backward(tensor)
        with self._no_autocast():
            scaled = super().pre_backward(self.scaler.scale_loss(tensor), module)
        self._unscaled = tensor
        return scaled

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Backward, never under autocast."""
        assert self._fit is not None
        with self._fit.backward(tensor), self._no_autocast():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Note non-finite gradients before `on_after_backward` and clipping, which can hide them."""
        assert self._fit is not None
        unscaled, self._unscaled = self._unscaled, None
        self._fit.after_backward(tensor)
        with self._no_autocast():
            super().post_backward(tensor, module)
            self._fit.after_backward_hooks()
        return (tensor if unscaled is None else unscaled).detach()

    def clip_gradients(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip true gradients. Lightning comes here in every step, with 0 where nothing is to be clipped."""
        if self._fit is not None and clip_val > 0:
            self._fit.unscale(getattr(optimizer, "_optimizer", optimizer))
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
            self.scaler.update(False)
            return output
        result = closure()
        assert self._fit is not None
        with self._no_autocast():
            output = self._fit.step(optimizer, result, lambda: self._after_closure(model, optimizer), kwargs)
        if model.automatic_optimization:
            self._fit.end_batch()
        return output

    def _no_autocast(self) -> AbstractContextManager[None]:
        return outside(self._device.type)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and step counters, as plain numbers; the masters are the checkpoint's ``state_dict``.

        And, where there are such: the state of stochastic rounding, ``fp32_layers``, ``partial_gradients`` of an open
        accumulation window (``partial_gradients_hold_next_batch`` if Lightning will run the last of its batches again,
        which is in them), ``pushed_back_schedules`` (what skips have left schedules of a frequency above 1 to do, see
        :class:`~lightning_mixprec.schedules.RealFrequency`) and ``skips_by_optimizer``, in a row, of several.
        """
        state: dict[str, Any] = dict(self.scaler.state_dict())
        if self.fp32_layers:
            state["fp32_layers"] = list(self.fp32_layers)
        return {**state, **(self._left if self._fit is None else self._fit.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over loss scale, step counters, and gradients of an accumulation window that was not finished."""
        self.scaler.load_state_dict(state_dict)
        if self._fit is not None:
            self._fit.load_state_dict(state_dict)
        if state_dict.get("fp32_layers") and self._answers is not None and self.compute_dtype != torch.float32:
            self._answers.move_to_fp32(state_dict["fp32_layers"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what stock Lightning calls by other names, and say so where there is nothing to be taken over."""
        module = self._module
        if module is not None:
            take_over_raw_weights(checkpoint, module)
        if type(self).__qualname__ not in checkpoint:
            trains = module is None or module.trainer.state.fn == "fit"
            take_over_scale(checkpoint, self.scaler, self.load_state_dict, trains=trains)

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
