"""A policy as FSDP2 `fully_shard` calls: every block a unit in the compute dtype, fp32 layers in units of their own.

Why it exists: FSDP2 keeps fp32 shards, which are the masters, and gathers them in one dtype per unit. Which module goes
into which unit, so that each is gathered in the dtype in which it computes, is what a policy says and nobody should
write twice.

What it leaves out: the engine, which is PyTorch's, and what layers do with their inputs
(:mod:`lightning_mixprec.layers`): units cast none, so that a timestep of 999 stays 999.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_mixprec.opaque import is_script
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.widening import HALF


def shard_(
    module: nn.Module,
    policy: PrecisionPolicy,
    mesh: DeviceMesh,
    *,
    reduce_dtype: Literal["compute", "fp32"] = "compute",
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard ``module`` over ``mesh`` in place, as ``policy`` says, and return it.

    Call it in ``LightningModule.configure_model`` under Lightning's ``ModelParallelStrategy``. Units are the elements
    of the module's lists of layers (``nn.ModuleList``, ``nn.Sequential``; the outermost such lists), and what is left.
    Parameters that train are fp32 in their shards, in whatever dtype they come; the optimizer updates these and
    checkpoints hold them. Frozen ones stay in the dtype given; they are gathered in the one of their layer.

    Args:
        module: A network, or a LightningModule, whose children are sharded then: its own ``forward`` is not what
            training calls.
        policy: The policy of the plugin.
        mesh: One dimension, such as ``self.device_mesh["data_parallel"]``, or two (replicate, shard).
        reduce_dtype: Gradients travel in the compute dtype, or in fp32 at twice the bytes. They accumulate in fp32
            either way.
        reshard_after_forward: Free gathered weights between forward and backward.

    Raises:
        ValueError: If the policy does not fit the module, a parameter is shared by two units, or TorchScript is to
            train, which has no units.

    Example:
        >>> def configure_model(self):  # of a LightningModule
        ...     shard_(self, self.trainer.precision_plugin.policy, self.device_mesh["data_parallel"])
    """
    if reduce_dtype not in ("compute", "fp32"):
        raise ValueError(f"Unknown reduce_dtype={reduce_dtype!r}. Choose 'compute' or 'fp32'.")
    plan = policy.resolve(module)
    names = {each: name for name, each in module.named_modules()}
    compute = MixedPrecisionPolicy(
        param_dtype=None if policy.compute == "fp32" else policy.compute_dtype,
        reduce_dtype=torch.float32 if reduce_dtype == "fp32" else None,
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    scripted = {param for each in module.modules() if is_script(each) for param in each.parameters()}
    _refuse_training(scripted, module)
    if scripted:
        options["ignored_params"] = scripted
    networks = list(_networks(module))
    for network in networks:
        _refuse_sharing([*_blocks(network), network], names)
    for param in module.parameters():
        if param.requires_grad and param.dtype in HALF:
            param.data = param.data.float()  # 16-bit shards would lose every small update
    for network in networks:
        units = [*_blocks(network), network]
        for unit in units:
            wide = [] if policy.compute == "fp32" else list(_wide(unit, units, plan, names))
            half = any(param.dtype in HALF for each in wide for param in each.parameters())  # frozen ones
            fp32 = MixedPrecisionPolicy(param_dtype=torch.float32 if half else None, cast_forward_inputs=False)
            layers = [each for each in wide if plan.kinds.get(names[each]) == "fp32"]
            for layer in layers:
                if layer is not unit:
                    fully_shard(layer, mp_policy=fp32, **options)
            rest = [each for each in wide if each not in layers]
            if unit in wide:
                fully_shard(unit, mp_policy=fp32, **options)
                continue
            if rest:  # norms of one block are gathered together: each by itself is a few hundred bytes
                fully_shard(rest, mp_policy=fp32, **options)
            fully_shard(unit, mp_policy=compute, **options)
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` has been sharded by FSDP2, in whole or in part.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return any(isinstance(each, FSDPModule) for each in module.modules())


def reshard_(module: nn.Module) -> None:
    """Free gathered weights, which an evaluation may have left: after it parameters are shards again.

    Example:
        >>> reshard_(nn.Linear(1, 1))
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    if not hasattr(module, "training_step"):
        yield module
        return
    for child in module.children():
        if next(child.parameters(), None) is None or is_script(child):
            continue
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # have no forward that would gather them
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from child.children()
        else:
            yield child


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists of layers that own parameters."""
    for child in network.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            owners = (block for block in child.children() if next(block.parameters(), None) is not None)
            yield from (block for block in owners if not is_script(block))
        elif isinstance(child, nn.ModuleDict):
            yield from _blocks(child)
        else:
            yield from _blocks(child)


def _wide(
    unit: nn.Module, units: list[nn.Module], plan: PrecisionPlan, names: dict[nn.Module, str]
) -> Iterator[nn.Module]:
    """Modules of a unit whose parameters are fp32: outermost fp32 layers, norms, owners of named parameters."""
    others = set(units) - {unit}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        kind = plan.kinds.get(names[module], "compute")
        own = {plan.parameters[f"{names[module]}.{n}".lstrip(".")] for n, _ in module.named_parameters(recurse=False)}
        if kind == "fp32" or (own and torch.float32 in own):
            if next(module.parameters(), None) is not None:
                yield module
            if kind == "fp32":
                return
        for child in module.children():
            if child not in others:
                yield from visit(child)

    yield from visit(unit)


def _refuse_training(scripted: set[nn.Parameter], module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if param in scripted and param.requires_grad:
            raise ValueError(
                f"Parameter {name!r} trains inside TorchScript, which FSDP2 cannot shard, so ranks would drift apart. "
                "Freeze it, give the module as plain Python, or train with strategy='ddp'."
            )


def _refuse_sharing(units: list[nn.Module], names: dict[nn.Module, str]) -> None:
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for unit in units:
        for name, param in unit.named_parameters(remove_duplicate=False):
            full = f"{names[unit]}.{name}".lstrip(".")
            known = owners.setdefault(param, (unit, full))
            nested = unit is units[-1]  # the network itself holds all of its blocks
            if known[0] is not unit and not nested:
                raise ValueError(
                    f"Parameters {known[1]!r} and {full!r} are one, but stand in two units, which are gathered at "
                    "different times. Keep shared layers outside of lists of layers, or train with strategy='ddp'."
                )
