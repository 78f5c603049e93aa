"""One call of one module, made again: in the precision it has, or in fp32.

Why it exists: that a value is not finite says nothing about its cause. Whether *this* layer lost it to its precision
shows when the same call on the same inputs is finite in fp32, and in no other way.

What it leaves out: which calls are worth the time (:mod:`lightning_mixprec.overflow`). A replay leaves no trace: it
works on copies of inputs and buffers, calls no hooks, and gives attributes and random numbers back. To activation
checkpointing around it, which counts what is saved for backward, it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.stateless import _reparametrize_module

from lightning_mixprec.apart import apart, attributes_kept, without_checkpointing, without_hooks
from lightning_mixprec.autocast import compute_context
from lightning_mixprec.containers import tensors_in
from lightning_mixprec.layers import Fp32Layer, map_tensors, restore_, swap_
from lightning_mixprec.opaque import visible_modules
from lightning_mixprec.widening import widened


class ReplayError(RuntimeError):
    """The call cannot be made again on one rank alone, or at all.

    Example:
        >>> issubclass(ReplayError, RuntimeError)
        True
    """


class Replayer:
    """Makes calls of a model's modules again, in 16 bits as they were or in fp32.

    Args:
        device_type: Type of the model's device, such as ``"cuda"``.
        compute: Compute dtype of the model.
        value_of: The fp32 value of a parameter, in its shape; by default the parameter, widened. A weight beyond the
            range of its 16-bit dtype is known there alone.
        call_hooks: Whether hooks on the modules are called in a replay as well: for a model that has none but the
            caller's.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False).half()
        >>> _ = layer.weight.data.fill_(300)
        >>> replayer = Replayer("cpu", torch.float16)
        >>> replayer.outputs(layer, [torch.full((1, 1), 300.0)], {}, fp32=True)
        tensor([[90000.]], grad_fn=<MmBackward0>)
        >>> replayer.gradients(layer, [torch.ones(1, 1)], {}, [torch.full((1, 1), 40000.0)], fp32=True)
        [tensor([[40000.]])]
    """

    def __init__(
        self,
        device_type: str,
        compute: torch.dtype,
        value_of: Callable[[nn.Parameter], Tensor] | None = None,
        *,
        call_hooks: bool = False,
    ) -> None:
        self._call_hooks = call_hooks
        self.compute = compute
        self._device_type = device_type
        self._value_of = value_of or widened

    @property
    def devices(self) -> list[int]:
        """Devices, besides the CPU, whose random numbers a call may draw, whichever is the current one."""
        return list(range(torch.cuda.device_count())) if self._device_type == "cuda" else []

    def outputs(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, fp32: bool, keep: bool = False
    ) -> Any:
        """What ``module(*args, **kwargs)`` returns; gradients through it reach the module's own parameters.

        Args:
            module: A module of the model.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            fp32: Run the module, and everything below it, as fp32 layers.
            keep: Leave what the call sets on the module's attributes: it takes the place of the call before.

        Returns:
            Detached if no backward through it is possible, now that the call has ended.

        Raises:
            ReplayError: If the module synchronises over ranks, or fails when called this way.
        """

        def weight(param: nn.Parameter) -> Tensor:
            through: Tensor = _Through.apply(param, self._value_of(param))
            return through

        with self._again(module, args, kwargs, weight if fp32 else lambda tensor: tensor, fp32=fp32, keep=keep) as (
            output,
            given,
        ):
            pass
        if keep and not _goes_back(output, given):
            return map_tensors(output, Tensor.detach)
        return output

    def gradients(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        grad_outputs: Sequence[Tensor | None],
        *,
        fp32: bool,
    ) -> list[Tensor]:
        """Gradients of one call by its inputs and by the module's parameters.

        Args:
            module: A module of the model.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            grad_outputs: Gradient by each floating-point tensor of the output, in order; None where there is none.
            fp32: Run the module, and everything below it, as fp32 layers.

        Raises:
            ReplayError: As for :meth:`outputs`.
        """
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().clone().requires_grad_())
            return leaves[-1]

        def weight(param: nn.Parameter) -> Tensor:
            fresh = (self._value_of(param) if fp32 else param).detach().clone()
            if param.requires_grad:
                leaves.append(fresh.requires_grad_())
            return fresh

        with torch.enable_grad(), ExitStack() as call:
            fresh_args, fresh_kwargs = map_tensors(args, leaf), map_tensors(kwargs, leaf)
            # Up to the end: a module with a checkpointing of its own computes again in backward.
            output, _ = call.enter_context(self._again(module, fresh_args, fresh_kwargs, weight, fp32=fp32))
            floats = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
            pairs = [
                (tensor, grad.to(tensor.dtype))
                for tensor, grad in zip(floats, grad_outputs, strict=False)
                if grad is not None and tensor.requires_grad
            ]
            if not pairs or not leaves:
                return []
            outputs, grads = zip(*pairs, strict=True)
            with torch.autocast(self._device_type, enabled=False):
                found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        return [grad for grad in found if grad is not None]

    @contextmanager
    def _again(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        weight: Callable[[nn.Parameter], Tensor],
        *,
        fp32: bool,
        keep: bool = False,
    ) -> Iterator[tuple[Any, list[Tensor]]]:
        """The result, and what it was computed from: copies of the inputs, parameters and buffers."""
        if meets_other_ranks(module):
            raise ReplayError("it would wait for the other ranks")
        try:
            with ExitStack() as contexts:
                contexts.enter_context(apart())
                held: dict[str, Tensor] = {name: weight(param) for name, param in module.named_parameters()}
                held |= {name: buffer.clone() for name, buffer in module.named_buffers()}
                args, kwargs = map_tensors((args, kwargs), torch.clone)  # of which it may change some in place
                contexts.enter_context(without_checkpointing())
                contexts.enter_context(torch.random.fork_rng(devices=self.devices))
                contexts.enter_context(compute_context(self._device_type, self.compute))
                contexts.enter_context(attributes_kept(module, keep=keep))
                if not self._call_hooks:
                    contexts.enter_context(without_hooks(module))
                if fp32:
                    contexts.enter_context(_as_fp32_layers(module, self._device_type, self.compute))
                contexts.enter_context(_reparametrize_module(module, held, tie_weights=True))
                yield module(*args, **kwargs), [*held.values(), *(tensor for _, tensor in tensors_in((args, kwargs)))]
        except Exception as error:  # whatever it is: a diagnosis must not end a run
            raise ReplayError(f"{type(module).__name__} cannot be called again: {error}") from error


class _Through(torch.autograd.Function):
    """A parameter's fp32 value, through which gradients reach the 16-bit parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = param.dtype
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype), None


def _goes_back(output: Any, given: Sequence[Tensor]) -> bool:
    """Whether a backward works: one through a checkpointing of the model's own calls 16-bit layers with fp32 inputs."""
    outputs = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    inputs = [tensor for tensor in given if tensor.requires_grad]
    if not outputs or not inputs:
        return True
    try:
        zeros = [torch.zeros_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, inputs, zeros, retain_graph=True, allow_unused=True)
    except Exception:  # whatever it is
        return False
    return True


def meets_other_ranks(module: nn.Module) -> bool:
    """Whether a call waits for the other ranks, so that one rank alone must not make it: FSDP2, SyncBatchNorm.

    Example:
        >>> meets_other_ranks(nn.Linear(1, 1))
        False
    """
    return any(
        isinstance(each, FSDPModule) or (isinstance(each, nn.SyncBatchNorm) and each.training)
        for each in module.modules()
    )


@contextmanager
def _as_fp32_layers(module: nn.Module, device_type: str, compute: torch.dtype) -> Iterator[None]:
    """Let ``module`` and everything below it be what a policy with that module in ``fp32`` would make of them."""
    found = [
        (each, each.__class__, {key: value for key, value in each.__dict__.items() if key.startswith("_mixprec")})
        for _, each in visible_modules(module)
    ]
    try:
        restore_(module)
        for each, _, _ in found:
            if type(each).forward is not nn.Module.forward:
                swap_(each, Fp32Layer, device_type, compute)
        yield
    finally:
        for each, kind, marks in found:
            each.__class__ = kind
            for key in [key for key in each.__dict__ if key.startswith("_mixprec")]:
                del each.__dict__[key]
            each.__dict__.update(marks)
