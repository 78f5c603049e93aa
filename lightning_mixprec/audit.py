"""What in a model will not survive 16 bits, found before training.

Why it exists: that a layer overflows shows after hours, in the worst case never: it is merely dead. A few batches in
fp32 show how large everything is, and trials of every module's calls in 16 bits show what that does, so the policy can
be right from the first step.

What it leaves out: values that grow later in training (audit again from a checkpoint, or train with
``fallback="auto"``), and every change to the model, which is copied.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_mixprec.audit_result import Audit, LayerAudit
from lightning_mixprec.containers import tensors_in
from lightning_mixprec.float8_trial import float8_errors
from lightning_mixprec.formats import ACTIVATION_FORMATS, Tally, lost_updates
from lightning_mixprec.magnitudes import nonfinite
from lightning_mixprec.observation import Observation, Steps
from lightning_mixprec.overflow import first_nonfinite
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import COMPUTE_DTYPES, PrecisionPolicy
from lightning_mixprec.trial import Outcome, Trial

_SCALES = (-14, 24)  # exponents that a DynamicLossScaler has by default


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    policy: PrecisionPolicy | str = "fp16",
    loss_scale: float | None = 2.0**15,
    lr: float = 1e-3,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    samples: int | None = 8,
) -> Audit:
    """Find the layers of ``model`` that must compute in fp32, and what the others lose in 16 bits.

    All batches go through forward and backward in fp32, where the numbers of every module are counted. The first one
    is then tried in 16 bits, module by module, with the layers that ``policy`` keeps in fp32 as it has them. A module
    must be fp32 if its outputs, or gradients at scale 1, are not finite in 16 bits and are in fp32, or if an output is
    off by more than a tenth of the largest; a container only if that is so with everything inside it as it must be.

    The model is copied; the random state is as found.

    Args:
        model: A LightningModule, or any module with a ``loss``.
        batches: A few, on the model's device.
        loss: Takes the model and a batch and returns a scalar. Default: the model's own
            ``training_step(batch, batch_idx)``, which has no Trainer here: ``self.log`` is heard by nobody.
        policy: A :class:`~lightning_mixprec.policy.PrecisionPolicy`, or ``"fp16"``, ``"bf16"`` or ``"fp8"``. Its fp8
            layers are tried in 16 bits; what fp8 costs is measured by itself.
        loss_scale: At which gradients are counted; None: the suggested one. Trials are made at scale 1.
        lr: An update is ``lr`` times the mean gradient of the batches.
        optimizer: Takes parameters and returns an optimizer; an update is then what its first step does. One is lost
            without masters where ``|update| < ulp(weight) / 2``, the distance between 16-bit numbers at that weight
            being ``ulp(weight)``; updates that are zero do not count.
        samples: How many of the first batch are tried in 16 bits: the first rows of each tensor that is as long as the
            batch's first. None: all. fp16 convolutions are slow on a CPU.

    Raises:
        ValueError: If the model has no loss or one that is not finite in fp32, or an argument is outside its range.

    Example:
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.to_qk = nn.Linear(8, 16)
        ...     def forward(self, x):
        ...         q, k = self.to_qk(x).mul(100).chunk(2, -1)
        ...         return (q @ k.mT).softmax(-1) @ x
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8))
        >>> found = audit(net, [torch.randn(4, 8) * 9], lambda model, batch: model(batch).square().mean())
        >>> found.policy
        PrecisionPolicy('fp16', fp32=['1'])
    """
    policy = policy if isinstance(policy, PrecisionPolicy) else PrecisionPolicy(policy)
    if policy.compute == "fp32":
        raise ValueError("policy='fp32' loses nothing to 16 bits. Choose one of 'fp16', 'bf16'.")
    if loss_scale is not None and not (isinstance(loss_scale, (int, float)) and 0 < loss_scale < math.inf):
        raise ValueError(f"loss_scale={loss_scale!r} must be a positive finite number, such as 2**15, or None.")
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 1):
        raise ValueError(f"samples={samples!r} must be a whole number, at least 1, or None for whole batches.")
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty. Give at least one, such as [next(iter(loader))].")
    device_type = next((tensor.device.type for tensor in model.parameters()), "cpu")

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device_type, enabled=False))
        if "torch._dynamo" in sys.modules:  # a compiled module would run past hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        observed, watched = _observe(model, batches, loss, loss_scale or 1.0)
        outcome = _try(model, batches[0], loss, policy.without_fp8(), observed, samples, device_type)
        policy = policy.with_fp32(outcome.reasons)
        plan = policy.resolve(model)
        fp8 = policy if policy.uses_fp8 else PrecisionPolicy("fp8", policy.fp32, fp32_defaults=policy.fp32_defaults)
        fp8_errors = _fp8_errors(model, batches[0], loss, fp8.resolve(model).fp8_layers)
        suggested = _suggested_scale(max((observed.gradients[name].largest for name in outcome.narrow), default=0.0))
        if loss_scale is None:
            observed, watched = _observe(model, batches, loss, suggested)
        lost = _lost_updates(watched, len(batches), policy.compute_dtype, lr, optimizer)
    return Audit(
        policy=policy,
        layers=_layers(model, plan, observed, lost, outcome.reasons, fp8_errors),
        loss_scale=float(loss_scale or suggested),
        suggested_loss_scale=suggested,
        notes=outcome.notes + _also_matched(plan, outcome.reasons),
        loss=outcome.loss,
        loss_fp32=outcome.loss_fp32,
    )


def _copy(model: nn.Module) -> nn.Module:
    """The model in fp32, without gradients and without its Trainer, which would not take its `self.log`."""
    owner: Any = model.__dict__.get("_trainer")
    copied = copy.deepcopy(model, {id(owner): None} if owner is not None else {})
    for tensor in (*copied.parameters(), *copied.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
        tensor.grad = None
    return copied


def _observe(
    model: nn.Module, batches: list[Any], loss: Callable[[Any, Any], Tensor] | None, loss_scale: float
) -> tuple[Observation, nn.Module]:
    """All batches in fp32; the copy that made them holds the sum of their gradients."""
    model = _copy(model)
    steps = Steps(model, loss)
    with Observation(model, loss_scale) as observed:
        for index, batch in enumerate(batches):
            found = steps(batch, index)
            if bool(nonfinite(found)):
                raise ValueError(
                    f"The loss of batch {index} is {float(found.detach())} in fp32, so 16 bits are not to blame. First "
                    f"that is not finite: {first_nonfinite(model, batch, None)}."
                )
            if found.requires_grad:
                found.backward()
    if not observed.activations:
        raise ValueError("No module of the model was called. A loss must call the model it is given, which is a copy.")
    return observed, model


def _try(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    policy: PrecisionPolicy,
    observed: Observation,
    samples: int | None,
    device_type: str,
) -> Outcome:
    model = _copy(model)
    lengths = [len(tensor) for _, tensor in tensors_in(batch) if tensor.ndim]
    if samples is not None and lengths:

        def first(tensor: Tensor) -> Tensor:
            return tensor[:samples] if tensor.ndim and len(tensor) == lengths[0] else tensor

        batch = pytree.tree_map_only(Tensor, first, batch)
    steps = Steps(model, loss)
    return Trial(model, lambda: steps(batch, 0), policy, observed, device_type).outcome()


def _fp8_errors(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None, layers: list[str]
) -> dict[str, float]:
    if not layers:
        return {}
    model = _copy(model)
    steps = Steps(model, loss)
    return float8_errors(model, lambda: steps(batch, 0), layers)


def _suggested_scale(largest: float) -> float:
    """Largest power of two that takes no gradient beyond fp16."""
    exponent = math.floor(math.log2(torch.finfo(torch.float16).max / largest)) if largest else _SCALES[1]
    return 2.0 ** min(max(exponent, _SCALES[0]), _SCALES[1])


def _lost_updates(
    model: nn.Module,
    batches: int,
    dtype: torch.dtype,
    lr: float,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
) -> dict[str, tuple[int, int]]:
    """Lost updates and all updates of every parameter with a gradient, by name. Steps on ``model``, which is a copy."""
    named = {name: param for name, param in model.named_parameters() if param.grad is not None}
    before = {name: param.detach().clone() for name, param in named.items()}
    for param in named.values():
        assert param.grad is not None
        param.grad /= batches
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=lr))
    if named:
        make(list(named.values())).step()
    counts = {name: lost_updates(before[name], param.detach() - before[name], dtype) for name, param in named.items()}
    return {name: (int(lost), int(total)) for name, (lost, total) in counts.items()}


def _layers(
    model: nn.Module,
    plan: PrecisionPlan,
    observed: Observation,
    lost: dict[str, tuple[int, int]],
    reasons: dict[str, str],
    fp8_errors: dict[str, float],
) -> list[LayerAudit]:
    compute = next(name for name, dtype in COMPUTE_DTYPES.items() if dtype == plan.compute)
    layers = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(prefix=name, recurse=False))
        if not own and (name == "" or name not in observed.activations):
            continue
        weights = Tally(ACTIVATION_FORMATS)
        for param in own.values():
            weights.add(param)
        counts = [lost[full] for full in own if full in lost]
        missed, moved = sum(count for count, _ in counts), sum(total for _, total in counts)
        kind = plan.kinds.get(name, "compute")
        layers.append(
            LayerAudit(
                name=name,
                type_name=type(module).__name__,
                dtype=compute if kind == "compute" else kind,
                parameters=sum(param.numel() for param in own.values()),
                activation=observed.activations[name].largest,
                gradient=observed.gradients[name].largest,
                activations=observed.activations[name].shares,
                gradients=observed.gradients[name].shares,
                weights=weights.shares,
                lost_updates=missed / moved if moved else math.nan,
                reason=reasons.get(name),
                fp8_error=fp8_errors.get(name, math.nan),
            )
        )
    return layers


def _also_matched(plan: PrecisionPlan, reasons: dict[str, str]) -> list[str]:
    """Say so where a name is the end of another module's name, which the entry then covers too."""
    ends = {name: [full for full in plan.kinds if full.endswith(f".{name}")] for name in reasons}
    return [f"The entry {name!r} covers {', '.join(fulls)} too." for name, fulls in ends.items() if fulls]
