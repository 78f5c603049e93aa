"""How gradients of 16-bit parameters are summed over micro-batches and averaged over the ranks of DDP.

Why it exists: DDP's buckets have the dtype of the parameters and add micro-batches up in it. In bf16 the 64th of them
hardly counts any more. Here the sum over micro-batches is fp32 whatever travels, and what travels is 16-bit (half the
bytes) or fp32.

DDP reads a 16-bit gradient while backward runs, so the fp32 sum is put aside for the length of a backward, added in
the communication hook that DDP calls with each full bucket, and is the parameter's gradient again afterwards::

    put_aside    fp32 gradients so far leave the parameters; DDP and autograd find nothing there
    (backward)   the hook, if this backward is a synchronised one: bucket + what was put aside, averaged over ranks
    bring_back   the average, or without synchronisation the sum of this rank, becomes the gradient

What it leaves out: loss scales, and who steps with the gradients (:mod:`lightning_mixprec.ledger`). Gradients of fp32
parameters are fp32 already and go through as DDP has them; sparse ones, too.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.widening import HALF

ReduceDtype = Literal["compute", "fp32"]


class GradientReduction:
    """Sums gradients over micro-batches in fp32 and averages them over ranks, for one DDP wrapper at a time.

    Args:
        masters: The master weights behind the 16-bit parameters.
        dtype: What travels between ranks: ``"compute"``, the parameters' own dtype, or ``"fp32"``.

    Raises:
        ValueError: If ``dtype`` is neither.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> reduction = GradientReduction(masters, "fp32")
        >>> reduction.follow(net)  # a DistributedDataParallel, where there are ranks
        >>> for _ in range(300):
        ...     reduction.put_aside()
        ...     (net.weight * 0.01).sum().backward()
        ...     reduction.bring_back()
        >>> net.weight.dtype, net.weight.grad  # a bf16 sum stops at 2
        (torch.bfloat16, tensor([[3.0029, 3.0029]]))
    """

    # No `from __future__ import annotations` in this module: DDP looks at the annotations of its hook.

    def __init__(self, masters: MasterWeights, dtype: ReduceDtype = "compute") -> None:
        if dtype not in get_args(ReduceDtype):
            choices = ", ".join(map(repr, get_args(ReduceDtype)))
            raise ValueError(f"Unknown dtype={dtype!r} of a reduction. Choose one of {choices}.")
        self._masters = masters
        self._in_fp32 = dtype == "fp32"
        self._params: list[nn.Parameter] = []  # the 16-bit ones
        self._may_be_unused = False  # by a backward
        self._aside: dict[nn.Parameter, Tensor] = {}  # fp32 sums of this rank; averages, once the hook has been there
        self._averages: dict[nn.Parameter, Tensor] = {}  # of what had nothing put aside
        self._averaged: set[nn.Parameter] = set()  # in this backward

    def follow(self, model: nn.Module) -> None:
        """Reduce the gradients of ``model`` from here on: a DDP wrapper that has no communication hook yet."""
        self._params = [param for param in model.parameters() if param in self._masters]
        if isinstance(model, DistributedDataParallel):
            self._may_be_unused = model.find_unused_parameters or model.static_graph
            model.register_comm_hook(model.process_group, self._reduce)

    def put_aside(self) -> None:
        """Before a backward: leave nothing in the parameters that DDP would have to add to in 16 bits."""
        self._averages.clear()
        self._averaged.clear()
        sparse = {param for param in self._params if param.grad is not None and param.grad.is_sparse}
        self._masters.gradients.narrow(sparse)  # DDP adds these up by itself, in 16 bits
        dense = [param for param in self._params if param not in sparse]
        for param in dense:
            if param.grad is not None:
                self._aside[param] = param.grad.float()
        self._masters.gradients.release(dense)
        if self._may_be_unused:  # DDP remembers what an earlier micro-batch has used, and insists on a gradient there
            for param in self._aside:
                param.grad = torch.zeros_like(param)

    @torch.no_grad()
    def bring_back(self) -> None:
        """After a backward: the gradient is what this backward and those before it have made together."""
        for param, total in self._aside.items():
            if param not in self._averaged:  # not synchronised
                if param.grad is not None:
                    total += param.grad
                self._masters.gradients.give(param, total)
            elif self._in_fp32 or param.grad is None:
                self._masters.gradients.give(param, total.float())
            else:  # DDP has done so, unless this backward used the parameter on no rank
                param.grad.copy_(total)
        for param, average in self._averages.items():
            if param.grad is not None:  # or else no rank has used it
                self._masters.gradients.give(param, average)
        self._aside.clear()
        self._averages.clear()

    def _reduce(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: the average over ranks, in the dtype of the bucket."""
        buffer, gradients = bucket.buffer(), bucket.gradients()
        params = cast(list[nn.Parameter], bucket.parameters())
        half = buffer.dtype in HALF and not buffer.is_sparse
        held = [param for param in params if param in self._aside]
        if not (half and (self._in_fp32 or held)):
            return _average(buffer, group)
        total = buffer.float()
        start = buffer.storage_offset()
        for param, gradient in zip(params, gradients, strict=True):
            # DDP lays a gradient out as its parameter, channels_last for one, but shows all of them here in C order.
            layout, offset = (param.shape, param.stride()), gradient.storage_offset()
            part = total.as_strided(*layout, offset - start)
            average = part if self._in_fp32 else buffer.as_strided(*layout, offset)
            if param in self._aside:
                part += self._aside[param]
                self._aside[param] = average
            elif self._in_fp32:
                self._averages[param] = average
        self._averaged.update(params)
        if self._in_fp32:
            return _average(total, group).then(lambda future: buffer.copy_(future.value()))
        buffer.copy_(total.div_(group.size()))  # divided before it is rounded: a sum over ranks fits then
        return _average(buffer, group, divide=False)


def _average(tensor: Tensor, group: Any, *, divide: bool = True) -> torch.futures.Future[Tensor]:
    if divide:
        tensor.div_(group.size())
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def synchronise_first_backward(model: nn.Module) -> None:
    """Let the first backward of a static graph be a synchronised one, in an accumulation window too.

    DDP takes the graph down there, and torch fails if it may not reduce. An average that comes early changes no sum.
    """
    if getattr(model, "static_graph", False) and not getattr(model, "_static_graph_delay_allreduce_enqueued", True):
        model.require_backward_grad_sync = True  # type: ignore[assignment]  # until the end of `no_sync`


def mean_over_ranks(
    grads: Mapping[str, Tensor], named: Iterable[tuple[str, nn.Parameter]], device: torch.device
) -> dict[str, Tensor]:
    """The mean of what all ranks have in ``grads``, each for the parameters ``named``; nothing counts as zero.

    An accumulation window whose ranks all go on from the mean ends as it would have.
    """
    named = list(named)
    made = torch.tensor([float(name in grads) for name, _ in named], device=device)
    dist.all_reduce(made, op=dist.ReduceOp.MAX)
    means = {}
    for (name, param), somewhere in zip(named, made.tolist(), strict=True):
        if somewhere:
            mean = grads[name] if name in grads else torch.zeros_like(param, dtype=torch.float32)
            # At the end of a fit Lightning has moved the module, and NCCL takes none from a CPU; nor a transposed one.
            total = mean.to(device).contiguous()
            dist.all_reduce(total)
            means[name] = total.div_(dist.get_world_size()).to(param.device)
    return means
