"""The fp32 truth behind a module's 16-bit parameters.

Why it exists: an update smaller than half an ulp of a 16-bit weight rounds away, so the optimizer must work on fp32
weights. Here the module's own parameters *are* 16-bit tensors (no cast in forward, half the gradient bytes) and each
trainable one has an fp32 value behind it. The optimizer keeps the module's parameters in its ``param_groups`` and
borrows the fp32 values only for the length of a step and of ``load_state_dict``: ``zero_grad``, schedulers,
``add_param_group`` and optimizers nobody here has heard of work unmodified, and their state is fp32.

Everything else speaks fp32 too: gradients handed to hooks and clipping, ``state_dict``, and the module after
:meth:`MasterWeights.restore_`.

What it leaves out: how the values are stored (:mod:`lightning_mixprec.storage`), how an optimizer steps on them
(:mod:`lightning_mixprec.borrow`), when to step, scale or skip (:mod:`lightning_mixprec.precision`), and which parameter
is 16-bit (:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.borrow import Borrower
from lightning_mixprec.storage import Bucket, Masters

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Turns parameters of ``module`` into 16-bit tensors, in place, and keeps an fp32 value behind each.

    The original fp32 tensors seed the fp32 values, so nothing of their precision is lost. Frozen parameters get none.

    Args:
        module: The module, on any device.
        dtypes: Target dtype by qualified parameter name, as :class:`~lightning_mixprec.policy.PrecisionPlan` has them.
        masters: How the fp32 values are stored: ``"fp32"``, ``"split"``, ``"split24"`` or ``"none"``.
        seed: Of the stochastic rounding of ``"split24"`` and ``"none"``; the same on all ranks.

    Raises:
        ValueError: If two parameters share memory without being the same object: they would drift apart.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        >>> masters.allocate([optimizer])
        >>> net(torch.ones(1, 2).bfloat16()).sum().backward()
        >>> _ = masters.step(optimizer, optimizer.step)
        >>> net.weight.dtype, net.state_dict()["weight"].dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(
        self, module: nn.Module, dtypes: Mapping[str, torch.dtype], masters: Masters = "fp32", seed: int = 0
    ) -> None:
        self.masters = masters
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._pending: dict[nn.Parameter, Tensor] = {}  # fp32 values before `allocate`
        self._homes: dict[nn.Parameter, tuple[Bucket, int]] = {}  # and after it
        self._as_given: dict[nn.Parameter, Tensor] = {}  # frozen parameter computing in fp32 -> its 16-bit original
        self._borrowers: dict[Optimizer, Borrower] = {}
        self._widened: list[nn.Parameter] = []  # 16-bit parameters that carry an fp32 gradient
        self._handles: list[Any] = []
        _refuse_overlap(module)
        for name, param in module.named_parameters():
            target = dtypes.get(name, param.dtype)
            if param.requires_grad and target in _HALF:
                self._pending[param] = param.data.float()  # the original tensor itself where that is fp32
                param.grad = None
                param.data = param.data.to(target)
            elif param.dtype in _HALF and target == torch.float32:
                if not param.requires_grad:
                    self._as_given[param] = param.data
                param.data = param.data.float()
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                # partial: torch marks the hook with an attribute, which a bound method would not take
                self._handles += [
                    each.register_state_dict_post_hook(partial(MasterWeights._write_fp32, self)),
                    each.register_load_state_dict_pre_hook(partial(MasterWeights._read_fp32, self)),
                ]

    def __len__(self) -> int:
        return len(self._homes) + len(self._pending)

    def __contains__(self, param: object) -> bool:
        return param in self._homes or param in self._pending

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeights:
        """A copied module gets fp32 values of its own, reached through its copied hooks; optimizers stay behind."""
        clone = object.__new__(MasterWeights)
        memo[id(self)] = clone
        clone.masters, clone._seed, clone._generators = "fp32", self._seed, {}
        clone._pending = {deepcopy(param, memo): self.read(param).clone() for param in [*self._homes, *self._pending]}
        clone._as_given = deepcopy(self._as_given, memo)
        clone._homes, clone._borrowers, clone._handles, clone._widened = {}, {}, [], []
        return clone

    # Memory

    @torch.no_grad()
    def allocate(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Lay the values out in buckets on the parameters' device, and open them to ``optimizers``.

        With several ranks rank 0's values are taken, as DDP takes its weights.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        for param, value in self._pending.items():
            self._pending[param] = value.to(param.device)
            if several:
                dist.broadcast(self._pending[param], src=0)
        for optimizer in optimizers:
            self._borrowers[optimizer] = Borrower(optimizer, self, self.masters)
            for group in optimizer.param_groups:
                self._allocate([param for param in group["params"] if param in self._pending])
        self._allocate(list(self._pending))

    def enrol(self, params: Iterable[nn.Parameter]) -> None:
        """Give a value to 16-bit parameters that have none: unfrozen, or given to the optimizer, since the start."""
        new = [param for param in params if param.dtype in _HALF and param.requires_grad and param not in self]
        self._pending.update((param, param.data.float()) for param in new)
        self._allocate(new)

    def _allocate(self, params: list[nn.Parameter]) -> None:
        """Fill buckets in order; a bucket has one dtype, one device, and a size that suits the device's cache."""
        queue: list[nn.Parameter] = []
        for param in params:
            limit = 2**19 if param.device.type == "cpu" else 2**23  # elements: 2 MiB and 32 MiB of fp32
            if queue and not (
                all(each.is_contiguous() for each in (queue[-1], param))
                and (queue[-1].dtype, queue[-1].device) == (param.dtype, param.device)
                and sum(each.numel() for each in queue) + param.numel() <= limit
            ):
                self._fill_bucket(queue)
                queue = []
            queue.append(param)
        if queue:
            self._fill_bucket(queue)

    def _fill_bucket(self, params: list[nn.Parameter]) -> None:
        values = [self._pending.pop(param) for param in params]
        generator = self._generator(params[0].device)
        bucket = Bucket(params, values, params[0].dtype, self.masters, generator)
        self._homes.update((param, (bucket, index)) for index, param in enumerate(params))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order they were made."""
        return list(dict.fromkeys(bucket for bucket, _ in self._homes.values()))

    def home(self, param: nn.Parameter) -> tuple[Bucket, int] | None:
        """The bucket of ``param`` and its place there, or None if it is its own fp32 value."""
        return self._homes.get(param)

    # Values

    def read(self, param: nn.Parameter) -> Tensor:
        """The fp32 value behind ``param``, in its shape; ``param`` itself (detached) where it has none."""
        if param in self._homes:
            bucket, index = self._homes[param]
            return bucket.values_of(index)
        return self._pending[param] if param in self._pending else param.detach()

    @torch.no_grad()
    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Store an fp32 value behind ``param`` and round it into it."""
        if param in self._homes:
            bucket, index = self._homes[param]
            bucket.set_values_of(index, value)
        else:
            if param in self._pending:
                self._pending[param].copy_(value)
            param.copy_(value)

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Take over what was written into the 16-bit parameters from outside; see :meth:`Bucket.adopt`."""
        for bucket in self.buckets:
            bucket.adopt()

    def restore_(self) -> None:
        """Make the module fp32 again, equal to the masters, and remove every hook. Frozen parameters are as given."""
        for borrower in self._borrowers.values():
            borrower.close()
        self.adopt_edits()
        for param in [*self._homes, *self._pending]:
            param.grad = None
            value = self.read(param).to(param.device)
            param.data = value.clone() if value._is_view() else value  # not a slice of a bucket that lives on with it
            param.grad_dtype = param.dtype
        for param, original in self._as_given.items():
            if not param.requires_grad:
                param.data = original.to(param.device)
        for handle in self._handles:
            handle.remove()
        for held in (self._homes, self._pending, self._as_given, self._borrowers, self._handles, self._widened):
            held.clear()

    def state_dict(self) -> dict[str, Any]:
        """State of the stochastic rounding, by device type; empty for rungs that do not round that way."""
        if self.masters not in ("split24", "none"):
            return {}
        return {device.type: generator.get_state() for device, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stochastic rounding where it was."""
        for device, generator in self._generators.items():
            if device.type in state:
                generator.set_state(state[device.type].cpu())

    # Gradients and step

    def accumulate_in_fp32(self, params: Iterable[nn.Parameter]) -> None:
        """Widen gradients that the next backward will add to, so that the sum over micro-batches is an fp32 sum.

        Must not be used while a DDP reducer still has to see the gradient: its buckets are 16-bit.
        """
        for param in params:
            if param.grad is not None and param.grad.dtype in _HALF:
                grad = param.grad.float()
                param.grad_dtype = None  # lets a 16-bit parameter carry an fp32 gradient
                param.grad = grad
                self._widened.append(param)

    @torch.no_grad()
    def unscale_gradients(self, params: Iterable[nn.Parameter], inverse_scale: Tensor | None = None) -> None:
        """Make every gradient fp32 and multiply it by ``inverse_scale`` (fp32 [], None for 1), in place of ``p.grad``.

        From here to the end of the step the module's own parameters show what the optimizer will see.
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
        for param in self._widened:
            param.grad = None
            param.grad_dtype = param.dtype
        self._widened.clear()

    def step(self, optimizer: Optimizer, call: Callable[[], Any], inverse_scale: Tensor | None = None) -> Any:
        """Step ``optimizer`` on the fp32 values with the gradients that the parameters hold, then round them again.

        Weights that were edited since the last step, by whatever means, are adopted first.

        Args:
            optimizer: One that :meth:`allocate` was given.
            call: Calls ``optimizer.step``, once or once for each bucket, and returns its result.
            inverse_scale: What gradients have to be multiplied by first, fp32 []; None if they are final.
        """
        return self._borrowers[optimizer].step(call, inverse_scale)

    # Hooks on every module that owns parameters, so that a submodule's state dict is fp32 as well

    def _write_fp32(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            key = prefix + name
            if key not in state_dict:
                continue
            if param in self:
                if param in self._homes:
                    self._homes[param][0].adopt()
                keep_vars = isinstance(state_dict[key], nn.Parameter)
                value = self.read(param)
                state_dict[key] = nn.Parameter(value) if keep_vars else value
            elif param in self._as_given and not param.requires_grad:
                state_dict[key] = self._as_given[param].to(param.device)

    def _read_fp32(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == param.shape:
                if param in self:
                    self.write(param, value)
                    # What torch copies into the parameter next is what is there: it would round ties differently.
                    state_dict[prefix + name] = param.detach().clone()
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
