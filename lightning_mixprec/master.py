"""The fp32 truth behind a module's 16-bit parameters.

Why it exists: an update smaller than half an ulp of a 16-bit weight rounds away, so the optimizer must work on fp32
weights. Here the module's own parameters *are* 16-bit tensors (no cast in forward, half the gradient bytes) and each
trainable one has an fp32 value behind it. The optimizer keeps the module's parameters in its ``param_groups`` and
borrows the fp32 values only for the length of a step and of ``load_state_dict``: ``zero_grad``, schedulers,
``add_param_group`` and optimizers nobody here has heard of work unmodified, and their state is fp32.

Everything else speaks fp32 too: gradients handed to hooks and clipping, ``state_dict``, and the module after
:meth:`MasterWeights.restore_`.

What it leaves out: how the values are stored (:mod:`lightning_mixprec.storage`), how an optimizer steps on them
(:mod:`lightning_mixprec.borrow`), what state dicts pass through (:mod:`lightning_mixprec.state_hooks`), when to step,
scale or skip (:mod:`lightning_mixprec.precision`), and which parameter is 16-bit (:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.borrow import Borrower
from lightning_mixprec.exchange import lend_lists
from lightning_mixprec.given import Given
from lightning_mixprec.opaque import is_script
from lightning_mixprec.ranks import several_ranks, wait_for_streams
from lightning_mixprec.state_hooks import StateHooks, set_fp32_
from lightning_mixprec.storage import Bucket, Masters, reads_at_once
from lightning_mixprec.wide_gradients import WideGradients
from lightning_mixprec.widening import HALF


class MasterWeights:
    """Turns parameters of ``module`` into 16-bit tensors, in place, and keeps an fp32 value behind each.

    The original fp32 tensors seed the fp32 values, so nothing of their precision is lost. Frozen parameters get none.

    Args:
        module: The module, on any device.
        dtypes: Target dtype by qualified parameter name, as :class:`~lightning_mixprec.policy.PrecisionPlan` has them.
        masters: How the fp32 values are stored: ``"fp32"``, ``"split"``, ``"split24"`` or ``"none"``.
        seed: Of the stochastic rounding of ``"split24"`` and ``"none"``; the same on all ranks.
        given: What else was widened, and is to be shown in state dicts, and given back, in the dtype given.

    Attributes:
        gradients: Which parameters carry fp32 gradients.

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
        self,
        module: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        masters: Masters = "fp32",
        seed: int = 0,
        given: Given | None = None,
    ) -> None:
        self.masters = masters
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        # An fp32 parameter for each 16-bit one: what optimizers are made with and step on. Its memory is the master,
        # where there is one, or scratch that it is given for the length of a step.
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        self._homes: dict[nn.Parameter, tuple[Bucket, int]] = {}  # once allocated
        self._slots: list[tuple[nn.Module, str]] = []  # where they are, and another may be put in place of one
        self._settled = False
        self._given = Given() if given is None else given  # frozen parameters computing in fp32, among others
        self._borrowers: dict[Optimizer, Borrower] = {}
        self.gradients = WideGradients()
        _refuse_overlap(module)
        for name, param in module.named_parameters():
            target = dtypes.get(name, param.dtype)
            if param.requires_grad and target in HALF:
                self._stand_in(param)
                param.grad = None
                param.data = param.data.to(target)
                if param.grad_dtype != target:  # an earlier fit has left it so, see `set_fp32_`
                    param.grad_dtype = target
            elif target == torch.float32:
                self._given.widen_(param, [param])
        for each in module.modules():
            self._slots += [(each, name) for name, param in each._parameters.items() if param in self]
        self._hooks = [
            StateHooks(each, self, self._given)
            for each in module.modules()
            if not is_script(each) and _owns_tensors(each)
        ]

    def __len__(self) -> int:
        return len(self._stand_ins)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._stand_ins)

    def __contains__(self, param: object) -> bool:
        return param in self._stand_ins

    def __reduce__(self) -> Any:
        """A copied or pickled module is an fp32 module with nothing behind it: this object forgets it, too."""
        values = [self.peek(param).clone() for param in self._stand_ins]
        return _of_a_copy, (self.masters, self._seed, list(self._stand_ins), values)

    # Memory

    def _stand_in(self, param: nn.Parameter) -> None:
        stand_in = nn.Parameter(param.data.float())  # the original tensor itself where that is fp32
        stand_in.__dict__.update(param.__dict__)  # marks that optimizers look for, such as `no_weight_decay`
        self._stand_ins[param] = stand_in

    @torch.no_grad()
    def _settle(self) -> None:
        """Follow the parameters to their device; with several ranks, take rank 0's values, as DDP takes its weights."""
        if self._settled:
            return
        if several_ranks():  # and whose memory is about to be freed, DDP may still be writing
            for device in {param.device for param in self._stand_ins}:
                wait_for_streams(device)
        for param, stand_in in self._stand_ins.items():
            stand_in.data = stand_in.data.to(param.device)
            if several_ranks():
                value = stand_in.data.contiguous()  # NCCL takes no other
                dist.broadcast(value, src=0)
                stand_in.data.copy_(value)
        self._settled = True

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the parameters themselves hold their fp32 values while optimizers are made.

        What is derived from parameters then (state, slow weights) is fp32, and what is kept (lists to clip, hooks,
        an optimizer that Lightning does not know) is of the parameters that train. Torch gives a parameter another
        accumulator of gradients with another dtype: a wrapper of DDP from before has to be made anew.
        """
        self._settle()
        dtypes = {param: param.dtype for param in self._stand_ins}
        for param, stand_in in self._stand_ins.items():
            param.data = stand_in.data
        try:
            yield
        finally:
            for param, dtype in dtypes.items():
                stand_in = self._stand_ins[param]
                stand_in.data = param.data.float()  # other memory, if it was given other values so
                stand_in.__dict__.update(param.__dict__)
                param.grad = None
                param.data = param.data.to(dtype)

    @torch.no_grad()
    def allocate(self, optimizers: Iterable[Optimizer] = (), *, release_others: bool = False) -> None:
        """Lay the values out in buckets on the parameters' device, and open them to ``optimizers``.

        Args:
            optimizers: Made with the module's parameters, in :meth:`shown`.
            release_others: Make parameters fp32 again that no optimizer holds: nothing updates them but the user, whose
                averages of weights, for example, would not move in 16 bits.
        """
        self._settle()
        for optimizer in optimizers:
            lend_lists(optimizer, self._stand_ins)
            for group in optimizer.param_groups:
                self._allocate([param for param in group["params"] if param in self._stand_ins])
        if release_others:
            for param in [param for param in self._stand_ins if param not in self._homes]:
                set_fp32_(param, self._stand_ins.pop(param).data)
        self._allocate(list(self._stand_ins))
        for optimizer in optimizers:
            self._borrower(optimizer)

    def enrol(self, params: Iterable[nn.Parameter]) -> None:
        """Give a value to 16-bit parameters that have none: unfrozen, or given to the optimizer, since the start."""
        new = [param for param in params if param.dtype in HALF and param.requires_grad and param not in self]
        for param in new:
            self._stand_in(param)
        self._allocate(new)

    @torch.no_grad()
    def make_fp32_(self, params: Iterable[nn.Parameter]) -> None:
        """Turn 16-bit parameters into fp32 ones, equal to their values, which then have nothing behind them.

        Between two steps only, without gradients. Optimizers keep them, and their state.
        """
        self.adopt_edits()
        params = list(params)
        for param in params:
            if param.dtype in HALF and param not in self._stand_ins:  # frozen, as given
                self._given.widen_(param, [param])
        leaving = [param for param in params if param in self._stand_ins]
        values = {param: self.peek(param).clone() for param in leaving}
        buckets = {self._homes[param][0] for param in leaving if param in self._homes}
        staying = [param for bucket in self.buckets if bucket in buckets for param in bucket.params]
        for param in staying:
            self._stand_ins[param].data = self.peek(param).clone()
            del self._homes[param]
        for param in leaving:
            del self._stand_ins[param]
            set_fp32_(param, values[param])
        self._allocate([param for param in staying if param in self._stand_ins])
        for borrower in self._borrowers.values():
            borrower.forget(buckets)

    def _allocate(self, params: list[nn.Parameter]) -> None:
        """Fill buckets in order; a bucket has one dtype, one device, and a size that suits the device's cache."""
        queue: list[nn.Parameter] = []
        for param in [param for param in params if param not in self._homes]:
            limit = 2**20 if param.device.type == "cpu" else 2**23  # elements: 4 MiB and 32 MiB of fp32
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
        device = params[0].device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        stand_ins = [self._stand_ins[param] for param in params]
        values = [stand_in.data for stand_in in stand_ins]
        bucket = Bucket(params, values, params[0].dtype, self.masters, self._generators[device])
        self._homes.update((param, (bucket, index)) for index, param in enumerate(params))
        for index, stand_in in enumerate(stand_ins):
            stand_in.data = torch.zeros((), device=device).expand(stand_in.shape)  # shape and dtype, but no memory
            if bucket.master is not None:
                stand_in.data = bucket.view(bucket.master, index)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order they were made."""
        return list(dict.fromkeys(bucket for bucket, _ in self._homes.values()))

    def home(self, param: nn.Parameter) -> tuple[Bucket, int] | None:
        """The bucket of ``param`` and its place there, or None if it is its own fp32 value."""
        return self._homes.get(param)

    def stand_in(self, param: nn.Parameter) -> nn.Parameter:
        """The fp32 parameter that optimizers see in place of ``param``, always the same one."""
        return self._stand_ins[param]

    # Values

    @torch.no_grad()
    def peek(self, param: nn.Parameter) -> Tensor:
        """The fp32 value behind ``param``, in its shape, with what was written into ``param`` from outside.

        Changes nothing, so that writing something, looking and writing it back loses no bits. ``param`` itself
        (detached) where it has no value behind it.
        """
        if param in self._homes:
            bucket, index = self._homes[param]
            return bucket.peek(index)
        if param not in self._stand_ins or param.dtype not in HALF:
            return param.detach()
        value = self._stand_ins[param].data
        return torch.where(value.to(param.device, param.dtype) == param, value.to(param.device), param.float())

    def read(self, param: nn.Parameter) -> Tensor:
        """The fp32 value behind ``param`` as of the last step, in its shape; see :meth:`adopt_edits`."""
        if param in self._homes:
            bucket, index = self._homes[param]
            return bucket.values_of(index)
        return self._stand_ins[param].data if param in self._stand_ins else param.detach()

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Take over what was written into the 16-bit parameters from outside; see :meth:`Bucket.adopt`."""
        for bucket in self.buckets:
            bucket.adopt()

    @torch.no_grad()
    def edited(self) -> Tensor | None:
        """Whether there is anything to adopt, bool [] on the device; None where :meth:`step` looks for itself."""
        buckets = [bucket for bucket in self.buckets if not reads_at_once(bucket.half.device)]
        return torch.stack([bucket.edited() for bucket in buckets]).any() if buckets else None

    @torch.no_grad()
    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Store an fp32 value behind ``param`` and round it into it."""
        if param in self._homes:
            bucket, index = self._homes[param]
            bucket.set_values_of(index, value)
        else:
            if param in self._stand_ins:
                self._stand_ins[param].data.copy_(value)
            param.copy_(value)

    def restore_(self) -> None:
        """Make the module fp32 again, equal to the masters, and remove every hook. Frozen parameters are as given."""
        for borrower in self._borrowers.values():
            borrower.close()
        devices = {param: param.device for param in self._stand_ins}  # Lightning has moved the module to the CPU by now
        self.adopt_edits()
        for param, device in devices.items():
            value = self.peek(param).to(device)
            set_fp32_(param, value.clone() if value._is_view() else value)  # not a slice that keeps a bucket alive
        for each, name in self._slots:
            late = each._parameters.get(name)
            if late is not None and late.dtype in HALF:  # made in fit of a 16-bit one, and in no optimizer
                set_fp32_(late, late.data.float())
        self._given.restore_()
        for hooks in self._hooks:
            hooks.remove()
        held: Any
        for held in (self._homes, self._slots, self._stand_ins, self._borrowers, self._hooks):
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

    # The step

    def takes_flag(self, optimizer: Optimizer) -> bool:
        """Whether a step of ``optimizer`` can be told on the device to do nothing, and leaves no trace then."""
        return self._borrower(optimizer).takes_flag

    def step(
        self,
        optimizer: Optimizer,
        call: Callable[[], Any],
        inverse_scale: Tensor | None = None,
        skip: Tensor | None = None,
        edited: bool | Tensor | None = None,
    ) -> Any:
        """Step ``optimizer`` on the fp32 values with the gradients that the parameters hold, then round them again.

        Weights that were edited since the last step, by whatever means, are adopted first.

        Args:
            optimizer: One that :meth:`allocate` was given.
            call: Calls ``optimizer.step``, once or once for each bucket, and returns its result.
            inverse_scale: What gradients have to be multiplied by first, fp32 []; None if they are final.
            skip: fp32 [], on the device: 1 makes the step do nothing. Only if :meth:`takes_flag`.
            edited: What :meth:`edited` gave, if anything. Where the host has not read it, ``skip`` must be 1 if it is
                true, and edits are still there to be adopted after a step that did nothing.
        """
        return self._borrower(optimizer).step(call, inverse_scale, skip, edited)

    def _borrower(self, optimizer: Optimizer) -> Borrower:
        if optimizer not in self._borrowers:  # at the start, or rebuilt since
            self._borrowers[optimizer] = Borrower(optimizer, self, self.masters)
        return self._borrowers[optimizer]


def _of_a_copy(masters: Masters, seed: int, params: list[nn.Parameter], values: list[Tensor]) -> MasterWeights:
    for param, value in zip(params, values, strict=True):
        set_fp32_(param, value)
    return MasterWeights(nn.Module(), {}, masters, seed)


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


def _owns_tensors(module: nn.Module) -> bool:
    return any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))
