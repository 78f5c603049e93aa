"""What the plugin asks of the Trainer, the LightningModule and the optimizers, and what it refuses.

Why it exists: an unsupported strategy, optimizer or callback must be named before any weight changes, with what to use
instead; and the error that ends a hopeless run must say where to look. None of it changes anything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_mixprec.feeding import fed_methods
from lightning_mixprec.opaque import is_script
from lightning_mixprec.overflow import Verdict, Watch, first_nonfinite
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.sharding import is_sharded
from lightning_mixprec.widening import HALF

log = logging.getLogger(__name__)


def refuse_strategy(strategy: Any) -> None:
    """Refuse strategies that own their precision or shard parameters, and devices that lack what it takes."""
    foreign = isinstance(strategy, (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy))
    if foreign or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        raise MisconfigurationException(
            f"MasterWeightPrecision does not run under {type(strategy).__name__}, which owns its precision or shards "
            "parameters its own way. Use Trainer(strategy='ddp') on several devices, strategy='auto' on one, or FSDP2: "
            "ModelParallelStrategy with lightning_mixprec.sharding.shard_ in configure_model."
        )
    if strategy.root_device.type == "mps":
        raise MisconfigurationException(
            "MasterWeightPrecision does not run on accelerator='mps', which has no float64: loss scales and counters "
            "could not be exact. Use accelerator='cpu', or a CUDA device; Trainer(precision='bf16-mixed') is "
            "Lightning's own there."
        )


def refuse_sharding(strategy: Any, module: nn.Module, masters: str, reduce_dtype: str) -> None:
    """Refuse FSDP2 that shards nothing, shards something else, or is asked for masters that it does not have."""
    if not isinstance(strategy, ModelParallelStrategy):
        return
    if strategy.device_mesh["tensor_parallel"].size() > 1:
        raise MisconfigurationException(
            "MasterWeightPrecision shards over data alone, and ModelParallelStrategy has "
            f"tensor_parallel_size={strategy.device_mesh['tensor_parallel'].size()}. Use "
            "ModelParallelStrategy(data_parallel_size=<number of processes>, tensor_parallel_size=1)."
        )
    if not is_sharded(module):
        raise MisconfigurationException(
            f"{type(module).__name__}.configure_model has sharded nothing, so no gradient would be exchanged. Call "
            "lightning_mixprec.sharding.shard_(self, self.trainer.precision_plugin.policy, "
            "self.device_mesh['data_parallel']) there."
        )
    if masters != "fp32":
        raise MisconfigurationException(
            f"masters={masters!r} is not available under FSDP2, where every rank keeps fp32 shards of all weights and "
            "these are the masters. Use masters='fp32'."
        )
    if reduce_dtype != "compute":
        raise MisconfigurationException(
            f"reduce_dtype={reduce_dtype!r} of the plugin is for DDP. Under FSDP2 give it where the units are made: "
            f"shard_(..., reduce_dtype={reduce_dtype!r})."
        )
    refuse_true_half(module, module.parameters())


def _names(params: Container[nn.Parameter], module: nn.Module) -> str:
    names = [name for name, param in module.named_parameters() if param in params]
    return f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}"


def refuse_true_half(module: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Refuse 16-bit parameters that train where nothing keeps fp32 values behind them."""
    half = {param for param in params if param.requires_grad and param.dtype in HALF}
    if half:
        raise MisconfigurationException(
            f"{len(half)} parameters train in 16 bits, without fp32 masters: {_names(half, module)}. FSDP2's own "
            "shards are the masters, so make what trains, now or later, fp32 before it is sharded: module.float() "
            "before fully_shard. lightning_mixprec.sharding.shard_ does so for what trains when it is called."
        )


def refuse_unsharded(module: LightningModule, params: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that train under FSDP2 and are in none of its units: nobody would average their gradients."""
    if not isinstance(module.trainer.strategy, ModelParallelStrategy):
        return
    local = {param for param in params if param.requires_grad and not isinstance(param, DTensor)}
    if local:
        raise MisconfigurationException(
            f"{len(local)} parameters train but are not sharded: {_names(local, module)}. FSDP2 would not average "
            "their gradients: ranks would drift apart. Move them into a network that configure_model shards (shard_ "
            "shards networks, not what a LightningModule holds itself), freeze them, or train with strategy='ddp'."
        )


def refuse_comm_hook(strategy: Any, reduce_dtype: str, compute: str) -> None:
    """Refuse two communication hooks at once, of which DDP takes one, and averages of 16-bit weights over ranks."""
    if isinstance(getattr(strategy, "_ddp_comm_state", None), PostLocalSGDState) and compute != "fp32":
        period = strategy._model_averaging_period
        raise MisconfigurationException(
            f"DDPStrategy(ddp_comm_state=PostLocalSGDState(...), model_averaging_period={period}) averages weights "
            f"over ranks, which here are {compute}, and not the fp32 masters behind them. Leave both out, and the hook "
            "of post-localSGD: DDP averages gradients then. Or use MasterWeightPrecision('fp32')."
        )
    hook = getattr(strategy, "_ddp_comm_hook", None)
    if hook is not None and reduce_dtype == "fp32":
        raise MisconfigurationException(
            f"DDPStrategy(ddp_comm_hook={getattr(hook, '__name__', hook)}) and "
            "MasterWeightPrecision(reduce_dtype='fp32') both decide how gradients travel. Leave one of them out."
        )


def reduces_gradients(model: nn.Module, strategy: Any) -> bool:
    """Whether ``model``, which trains, is a DDP wrapper whose communication hook is still free."""
    return isinstance(model, DistributedDataParallel) and getattr(strategy, "_ddp_comm_hook", None) is None


def refuse_optimizers(optimizers: Sequence[Optimizer], compute: str) -> None:
    """Refuse optimizers that evaluate the loss themselves, unless everything is fp32."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and compute != "fp32":
            raise MisconfigurationException(
                f"LBFGS evaluates the loss several times in one step, which {compute} master weights "
                "and loss scaling cannot follow. Use MasterWeightPrecision('fp32'), or another optimizer."
            )


def refuse_second_average(callbacks: list[Any]) -> None:
    """Refuse two callbacks that swap the weights, and warn of files that hold none of their averages."""
    averaging = [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
    if len(averaging) > 1:
        names = " and ".join(type(callback).__name__ for callback in averaging)
        raise MisconfigurationException(
            f"{names} would both put their average in place of the weights, and each would take the other's for the "
            "weights. One MasterWeightAveraging keeps several: MasterWeightAveraging(profiles={'short': "
            "ConstantDecay(0.99), 'long': ConstantDecay(0.9999)})."
        )
    light = [type(callback).__name__ for callback in callbacks if getattr(callback, "save_weights_only", False)]
    if light:
        rank_zero_warn(
            f"{light[0]}(save_weights_only=True) saves the raw weights alone: Lightning asks no callback for such a "
            "file, so the average that is validated is not in it. Use save_weights_only=False."
        )


def refuse_stranger(optimizer: Optimizer, module: nn.Module, narrow: Container[object], *, scaled: bool) -> None:
    """Refuse a step of an optimizer that Lightning has not been told of, on parameters that it would step wrongly.

    Args:
        optimizer: About to step.
        module: Which trains.
        narrow: Its 16-bit parameters.
        scaled: Whether gradients carry a loss scale.
    """
    held = {param for group in optimizer.param_groups for param in group["params"]}
    wrong = {param for param in module.parameters() if param in held and (scaled or param in narrow)}
    if wrong:
        fault = "have gradients that carry the loss scale" if scaled else "are 16-bit while training"
        raise MisconfigurationException(
            f"{type(optimizer).__name__}.step() was called, which configure_optimizers has not returned, and "
            f"{len(wrong)} of its parameters ({_names(wrong, module)}) {fault}: it would not step on the fp32 weights. "
            "Return it as well; in manual optimization (self.automatic_optimization = False) there may be several, and "
            "training_step calls them when it likes. In a gradient hook no optimizer can step: whether all gradients "
            "are finite is known after backward."
        )


def refuse_backward_without_optimizers() -> None:
    """Refuse a backward whose gradients nobody would use."""
    raise MisconfigurationException(
        "manual_backward(loss) was called where MasterWeightPrecision knows of no optimizer. In fit, return from "
        "configure_optimizers what is to step on the fp32 weights, several in a list, and call it in training_step, "
        "not in a gradient hook, or train in fp32: Trainer(precision='32-true'). Elsewhere, as in a test_step that "
        "optimizes something, write loss.backward()."
    )


def refuse_second_trainer(before: LightningModule | None, module: LightningModule) -> None:
    """Refuse a plugin that is in another Trainer's run, which goes on: it would end that one's."""
    running: Any = None if before is None else before._trainer
    if running is None or running is module._trainer or running.state.status != TrainerStatus.RUNNING:
        return
    raise MisconfigurationException(
        f"This {type(running.precision_plugin).__name__} is at work in another Trainer, whose {running.state.fn.value} "
        f"of {type(before).__name__} goes on, and holds its fp32 weights. Give each of two Trainers that run at once a "
        "plugin of its own."
    )


def refuse_averaging(callbacks: list[Any]) -> None:
    """Refuse stock averages of 16-bit weights."""
    for callback in callbacks:
        stock = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
        if stock and not getattr(callback, "averages_master_weights", False):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages the 16-bit weights, which loses every small change. Use "
                "lightning_mixprec.MasterWeightAveraging, which averages the fp32 masters."
            )


def warn_of_shadows(module: nn.Module, callbacks: Iterable[Any]) -> None:
    """Warn of averages kept beside the modules that nobody feeds with fp32 values, such as lists of weights."""
    shapes = Counter(param.shape for param in module.parameters() if param.dtype in HALF)
    for owner in (*module.modules(), *callbacks):
        for name, value in vars(owner).items():
            if not shapes or name in vars(nn.Module()):  # nothing is 16-bit, or torch's own tables
                continue
            if fed_methods(value) or fed_methods(owner):
                continue
            average = getattr(value, "__dict__", {}).get("shadow_params")
            kept = value if average is None else average
            kept = list(kept.values()) if isinstance(kept, dict) else kept
            if not isinstance(kept, (list, tuple)) or not kept or not all(isinstance(each, Tensor) for each in kept):
                continue
            half = all(each.dtype in HALF and not isinstance(each, nn.Parameter) for each in kept)
            if average is not None or (half and Counter(each.shape for each in kept) <= shapes):
                log.warning(
                    "%s.%s averages what it reads from the module, which is 16-bit while training%s. Use "
                    "lightning_mixprec.MasterWeightAveraging, which averages the fp32 masters, or read them inside "
                    "`with trainer.precision_plugin.fp32_weights(pl_module) as weights:`.",
                    type(owner).__name__,
                    name,
                    ", and keeps it so: such an average hardly moves" if half else "",
                )


def called_directly(module: nn.Module) -> Iterator[nn.Module]:
    """The children that a hook calls as ``pl_module.net(x)``; those of a ModuleList, ``pl_module.nets[0](x)``."""
    for child in module.children():
        child = getattr(child, "_orig_mod", child)  # what torch.compile wraps
        if is_script(child):  # stays as it is, and has no class to exchange
            continue
        if type(child).forward is nn.Module.forward:
            yield from called_directly(child)
        elif next(child.parameters(), None) is not None and "forward" not in child.__dict__:
            yield child


def warn_of_gradient_hooks(module: nn.Module) -> bool:
    """Warn of hooks on parameters' gradients, which see them times the loss scale; whether there are any."""
    late = _hooked_late(module)
    hooked = [name for name, param in module.named_parameters() if param._backward_hooks or name in late]
    if hooked:
        rank_zero_warn(
            f"{len(hooked)} parameters have gradient hooks ({', '.join(hooked[:3])}{', ...' * (len(hooked) > 3)}), "
            "which see 16-bit gradients times the loss scale: a clamp or a threshold there means another size than in "
            "fp32, and what is put aside carries the scale. Clip in `configure_gradient_clipping` or "
            "`on_before_optimizer_step`, where gradients are true."
        )
    return bool(hooked)


def warn_of_late_hooks(module: nn.Module) -> bool:
    """Warn of hooks after accumulation where DDP accumulates nothing; whether there are any."""
    hooked = _hooked_late(module)
    if hooked:
        rank_zero_warn(
            f"{len(hooked)} parameters have hooks of register_post_accumulate_grad_hook ({', '.join(hooked[:3])}"
            f"{', ...' * (len(hooked) > 3)}). Under DDP they see the gradient of one batch of an accumulation window, "
            "not the sum so far as with fp32 weights, which is kept elsewhere. Change gradients in "
            "`on_before_optimizer_step`, where they are whole."
        )
    return bool(hooked)


def _hooked_late(module: nn.Module) -> list[str]:
    """Names of parameters with the user's own hooks on accumulated gradients."""

    def hooks(param: Any) -> Iterable[Any]:
        return (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()

    return [name for name, param in module.named_parameters() if any(not _is_ours(hook) for hook in hooks(param))]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(__name__.partition(".")[0] + ".")


def warn_of_missing_gradients(optimizer: Optimizer, batches: int) -> None:
    """Warn of an optimizer that has nothing to step with although there has been a backward, again and again."""
    rank_zero_warn(
        f"After the backward of the last {batches} batches no parameter of {type(optimizer).__name__} has had a "
        "gradient: nothing is trained. Look for a hook that clears them (`param.grad = None`, `zero_grad()`), or a "
        "loss that the parameters have no part in. Gradients that were put aside can be put back in "
        "`on_before_optimizer_step`."
    )


def user_code_sees_gradients(model: LightningModule) -> bool:
    """Whether a hook looks at the gradients of this step, or may have written to them since backward."""
    trainer: Any = model.trainer
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    if any(is_overridden(hook, model, parent=LightningModule) for hook in hooks):
        return True
    for callback in trainer.callbacks:
        looks = getattr(callback, "looks_at_gradients", None)
        if looks is not None:
            if looks(trainer):
                return True
        elif any(is_overridden(hook, callback, parent=Callback) for hook in hooks[:2]):
            return True
    return False


def report(
    model: LightningModule,
    scaler: DynamicLossScaler,
    batch: Any,
    watch: Watch | None,
    loss_is_finite: bool,
    bad: Sequence[str],
) -> str:
    """Where a run stands that skipping does not help: step, scale, the first non-finite tensor, what to try."""
    loss = "was finite" if loss_is_finite else "was not finite either, so a smaller scale cannot help"
    loop: Any = model.trainer.fit_loop.epoch_loop
    return (
        f"the last is batch {loop.batch_idx} of epoch {model.trainer.current_epoch}, after {scaler.real_steps} "
        f"real steps. The loss {loss}. The loss scale is {float(scaler.scale):g}, it started at {scaler.init_scale:g}. "
        f"First non-finite: {first_nonfinite(model, batch, watch)}. {len(bad)} parameters have a non-finite gradient"
        f"{': ' if bad else ''}{', '.join(bad[:3])}. Weights are those of the last good step. Look at the data of this "
        "batch; try bf16; keep the layer in fp32 with PrecisionPolicy(fp32=[...]); lower the learning rate. "
        "DynamicLossScaler(max_consecutive_skips=...) sets the patience."
    )


def announce_fallback(trainer: Any, verdicts: Sequence[Verdict], count: int) -> None:
    """Say which layers compute in fp32 from here on: a line each in the log, text and a scalar to the loggers."""
    lines = [f"{verdict}. From here on it computes in fp32." for verdict in verdicts]
    for line in lines:
        rank_zero_warn(line)
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics({"mixprec/fp32_layers": float(count)}, step=step)
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("mixprec/fallback", "\n\n".join(lines), step)
