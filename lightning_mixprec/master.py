"""The fp32 truth behind 16-bit parameters.

Why it exists: an update smaller than half an ulp of a 16-bit weight rounds away, so the optimizer must work on fp32
weights. Here the module's own parameters *are* 16-bit tensors (no cast in forward, half the gradient bytes) and each
trainable one has an fp32 master. The optimizer keeps the module's parameters in its ``param_groups`` and borrows the
masters only for the length of a step and of ``load_state_dict``: ``zero_grad``, schedulers, ``add_param_group`` and
any optimizer whose state is per parameter work unmodified, and that state is fp32.

Everything else speaks fp32 too: gradients handed to hooks and clipping, ``state_dict``, and the module after
:meth:`MasterWeights.restore_`.

What it leaves out: when to step, scale or skip (:mod:`lightning_mixprec.precision`), and which parameter is 16-bit
(:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Turns parameters of ``module`` into 16-bit tensors, in place, and keeps an fp32 master for each.

    The original fp32 tensor becomes the master, so nothing of its precision is lost. Frozen parameters get no master.

    Args:
        module: The module, on any device.
        dtypes: Target dtype by qualified parameter name, as :class:`~lightning_mixprec.policy.PrecisionPlan` has them.

    Raises:
        ValueError: If two parameters share memory without being the same object: they would drift apart.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        >>> masters.attach(optimizer)
        >>> net(torch.ones(1, 2).bfloat16()).sum().backward()
        >>> masters.unscale_gradients(net.parameters())
        >>> with masters.borrow(optimizer):
        ...     _ = optimizer.step()
        >>> net.weight.dtype, net.state_dict()["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}  # module's 16-bit parameter -> fp32 master
        self._params: dict[nn.Parameter, nn.Parameter] = {}  # the same, reversed
        self._as_given: dict[nn.Parameter, Tensor] = {}  # frozen parameter computing in fp32 -> its 16-bit original
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        _refuse_overlap(module)
        for name, param in module.named_parameters():
            target = dtypes.get(name, param.dtype)
            if param.requires_grad and target in _HALF:
                self._add(param, target)
            elif param.dtype in _HALF and target == torch.float32:
                if not param.requires_grad:
                    self._as_given[param] = param.data
                param.data = param.data.float()
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                # partial: torch marks the hook with an attribute, which a bound method would not take
                self._handles.append(each.register_state_dict_post_hook(partial(MasterWeights._write_fp32, self)))
                self._handles.append(each.register_load_state_dict_pre_hook(partial(MasterWeights._read_fp32, self)))

    def __len__(self) -> int:
        return len(self._masters)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        """A copied module gets masters of its own, reached through its copied hooks; optimizers stay behind."""
        clone = object.__new__(MasterWeights)
        memo[id(self)] = clone
        clone._masters, clone._as_given = deepcopy(self._masters, memo), deepcopy(self._as_given, memo)
        clone._params = {master: param for param, master in clone._masters.items()}
        clone._handles, clone._optimizers = [], []
        return clone

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """The fp32 master of ``param``, or ``param`` itself where it has none."""
        return self._masters.get(param, param)

    def _add(self, param: nn.Parameter, target: torch.dtype) -> None:
        master = nn.Parameter(param.data.float())  # the original tensor itself where that is fp32
        master.__dict__.update(param.__dict__)  # marks that optimizers look for, such as `no_weight_decay`
        self._masters[param], self._params[master] = master, param
        param.grad = None
        param.data = param.data.to(target)

    # Gradients

    def accumulate_in_fp32(self, params: Iterable[nn.Parameter]) -> None:
        """Widen gradients that the next backward will add to, so that the sum over micro-batches is an fp32 sum.

        Must not be used while a DDP reducer still has to see the gradient: its buckets are 16-bit.
        """
        for param in params:
            if param.grad is not None and param.grad.dtype in _HALF:
                _set_fp32_grad(param, param.grad.float())

    @torch.no_grad()
    def unscale_gradients(self, params: Iterable[nn.Parameter], inverse_scale: Tensor | None = None) -> None:
        """Make every gradient fp32 and multiply it by ``inverse_scale`` (fp32 [], None for 1), in place of ``p.grad``.

        From here to :meth:`release_gradients` the module's own parameters show what the optimizer will see.
        """
        params = [param for param in params if param.grad is not None]
        self.accumulate_in_fp32(params)
        if inverse_scale is not None:
            grads = [param.grad for param in params if param.grad is not None]
            dense = [grad for grad in grads if not grad.is_sparse]
            if dense:
                torch._foreach_mul_(dense, inverse_scale)
            for grad in grads:
                if grad.is_sparse:
                    grad.mul_(inverse_scale)

    def release_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Drop the gradients: fp32 ones would cost 4 bytes a parameter until the next backward, and break DDP's."""
        for param in params:
            param.grad = None
            if param in self._masters:
                param.grad_dtype = param.dtype

    # The optimizer's window

    def attach(self, optimizer: Optimizer) -> None:
        """Let ``optimizer.load_state_dict`` see the masters, so that loaded state stays fp32."""
        self._optimizers.append(optimizer)
        for param in _params_of(optimizer):  # state made in a constructor, which saw the 16-bit parameter
            if param in self._masters and param in optimizer.state:
                state = optimizer.state[param]
                state.update({key: _widen_state(value) for key, value in state.items()})
        self._handles += [
            optimizer.register_load_state_dict_pre_hook(lambda opt, _: _exchange(opt, self._masters)),
            optimizer.register_load_state_dict_post_hook(lambda opt: _exchange(opt, self._params)),
        ]

    @contextmanager
    def borrow(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, ``optimizer.param_groups`` and ``optimizer.state`` hold the masters, with the parameters' gradients.

        On leaving, the 16-bit parameters are refreshed from their masters. Weights that were edited since the last
        step, by whatever means, are adopted first.
        """
        params = list(_params_of(optimizer))
        for param in params:  # unfrozen or added in half after the start
            if param.dtype in _HALF and param.requires_grad and param not in self._masters:
                grad = param.grad
                self._add(param, param.dtype)
                if grad is not None:
                    _set_fp32_grad(param, grad.float())
        params = [param for param in params if param in self._masters]
        self.adopt_edits(params)
        for param in params:
            self._masters[param].grad = param.grad
        _exchange(optimizer, self._masters)
        try:
            yield
        finally:
            _exchange(optimizer, self._params)
            for param in params:
                self._masters[param].grad = None
            self.refresh(params)

    # Values

    @torch.no_grad()
    def refresh(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Round the masters into the 16-bit parameters (all of them by default)."""
        targets: list[Any] = list(self._masters if params is None else params)
        if targets:
            torch._foreach_copy_(targets, [self._masters[param] for param in targets])

    @torch.no_grad()
    def adopt_edits(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Take over into the masters what was written into the 16-bit parameters from outside.

        Elements whose 16-bit value is still the rounding of the master keep all their fp32 bits.
        """
        for param in self._masters if params is None else params:
            master = self._masters[param]
            rounded = master.to(param.dtype)
            if param.device.type == "cpu" and torch.equal(rounded, param):
                continue  # elsewhere the comparison would wait for the device
            master.copy_(torch.where(rounded == param, master, param.float()))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Follow the parameters to their device; with several ranks, take rank 0's masters, as DDP does weights."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        for param, master in self._masters.items():
            master.data = master.data.to(param.device)
            if several:
                dist.broadcast(master.data, src=0)
        self.refresh()

    def restore_(self) -> None:
        """Make the module fp32 again, equal to the masters, and remove every hook. Frozen parameters are as given."""
        for optimizer in self._optimizers:
            _exchange(optimizer, self._params)  # a load_state_dict that raised has left its window open
        self.adopt_edits()
        for param, master in self._masters.items():
            param.grad = None
            param.data = master.data.to(param.device)
            param.grad_dtype = param.dtype
        for param, original in self._as_given.items():
            if not param.requires_grad:
                param.data = original.to(param.device)
        for handle in self._handles:
            handle.remove()
        for tensors in (self._masters, self._params, self._as_given):
            tensors.clear()
        self._handles.clear()
        self._optimizers.clear()

    # Hooks on every module that owns parameters, so that a submodule's state dict is fp32 as well

    def _write_fp32(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            key = prefix + name
            if key not in state_dict:
                continue
            if param in self._masters:
                self.adopt_edits([param])
                master = self._masters[param]
                state_dict[key] = master if isinstance(state_dict[key], nn.Parameter) else master.detach()
            elif param in self._as_given and not param.requires_grad:
                state_dict[key] = self._as_given[param].to(param.device)

    @torch.no_grad()
    def _read_fp32(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == param.shape:
                if param in self._masters:
                    self._masters[param].copy_(value)  # torch then copies the value into the parameter
                elif param in self._as_given:
                    self._as_given[param].copy_(value)


@torch.no_grad()
def found_nonfinite(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether any gradient holds an inf or NaN, as fp32 [1] on ``device`` (1.0 if so), without reading it back.

    Example:
        >>> found_nonfinite([torch.ones(2), torch.tensor([float("nan")])], torch.device("cpu"))
        tensor([1.])
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        by_dtype.setdefault(values.dtype, []).append(values)
    for tensors in by_dtype.values():
        # GradScaler's own kernel; multiplying by one leaves the gradients as they are.
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
    return found


def _set_fp32_grad(param: nn.Parameter, grad: Tensor) -> None:
    param.grad_dtype = None  # lets a 16-bit parameter carry an fp32 gradient
    param.grad = grad


def _params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _exchange(optimizer: Optimizer, replacement: Mapping[Any, nn.Parameter]) -> None:
    """Replace parameters in the optimizer's groups and as keys of its state, keeping both containers' identity."""
    for group in optimizer.param_groups:
        group["params"][:] = [replacement.get(param, param) for param in group["params"]]
    items = list(optimizer.state.items())
    optimizer.state.clear()
    optimizer.state.update((replacement.get(key, key), value) for key, value in items)


def _widen_state(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _refuse_overlap(module: nn.Module) -> None:
    spans = []
    for name, param in module.named_parameters():
        if param.device.type != "meta" and param.numel():
            start = param.data_ptr()
            reach = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
            spans.append((param.device.type, start, start + reach * param.element_size(), name))
    spans.sort()
    for (device, _, end, name), (next_device, start, _, other) in pairwise(spans):
        if device == next_device and start < end:
            raise ValueError(
                f"Parameters {name!r} and {other!r} share memory but are two objects, so an update would reach only "
                f"one of them. Assign one nn.Parameter to both places, or clone the second."
            )
