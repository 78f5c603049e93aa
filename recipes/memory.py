"""How many bytes a training step takes on one device, counted rather than measured, so that it can be known beforehand.

Weights, masters, gradients, optimizer state and averages follow from the precision plan; what is saved for backward is
seen by autograd's own hooks, on real or on fake tensors. It leaves out what cannot be counted: buffers of collectives,
workspaces of libraries, the allocator's fragments, CUDA's context. Count on a tenth more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec import PrecisionPlan

EXTRA_BYTES = {"fp32": 4, "split": 2, "split24": 1, "none": 0}
"""Of a master beside its 16-bit parameter."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: Parameters as they are while training.
        masters: What stands behind the 16-bit ones.
        gradients: Of trained parameters, each in its parameter's dtype.
        optimizer: Its state; None if it could not be counted.
        averages: fp32, of trained parameters.
        activations: Saved for backward by one batch; None if not counted.

    Example:
        >>> print(Memory(weights=2 * 10**6, masters=4 * 10**6, gradients=10**6, optimizer=None, averages=0,
        ...              activations=None))
        weights             2.0 MB
        masters             4.0 MB
        gradients           1.0 MB
        optimizer          unknown
        averages            0.0 MB
        activations        unknown
        total         at least 7.0 MB
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int | None
    averages: int
    activations: int | None

    @property
    def total(self) -> int:
        """Of what is known."""
        return sum(value or 0 for value in vars(self).values())

    def __str__(self) -> str:
        lines = [f"{name:<13}{_megabytes(value):>13}" for name, value in vars(self).items()]
        least = "at least " if None in vars(self).values() else ""
        return "\n".join([*lines, f"{'total':<13} {least}{_megabytes(self.total):>{13 - 1 - len(least)}}"])


def _megabytes(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} MB" if value < 1e9 else f"{value / 1e9:,.2f} GB"


def count(
    module: nn.Module,
    plan: PrecisionPlan,
    masters: str,
    *,
    optimizer: int | None,
    activations: int | None,
    averages: int,
    shards: int | None = None,
) -> Memory:
    """Bytes of one training step on one device.

    Args:
        module: On any device, the meta device included; only shapes count.
        plan: Dtype of every parameter while training.
        masters: As `MasterWeightPrecision` takes it.
        optimizer: Bytes of its state over all parameters; see `state_bytes`.
        activations: Bytes that one batch saves for backward; see `saved_for_backward`.
        averages: Number of averages of the weights.
        shards: Processes that share parameters (FSDP2), whose shards are fp32 and their own masters; None: each has
            all.

    Example:
        >>> from lightning_mixprec import PrecisionPolicy
        >>> net = nn.Sequential(nn.Linear(9, 100))
        >>> plan = PrecisionPolicy("bf16").resolve(net)
        >>> memory = count(net, plan, "split", optimizer=8000, activations=None, averages=1)
        >>> memory.weights, memory.masters, memory.gradients, memory.averages, memory.total
        (2000, 2000, 2000, 4000, 18000)
    """
    named = list(module.named_parameters())
    if shards is not None:
        each = [parameter.numel() * 4 for _, parameter in named]
        trained = sum(p.numel() * 4 for _, p in named if p.requires_grad)
        split = [-(-size // shards) for size in (sum(each), trained, optimizer or 0, trained * averages)]
        return Memory(split[0], 0, split[1], None if optimizer is None else split[2], split[3], activations)
    width = {name: plan.parameters[name].itemsize for name, _ in named}
    trained_named = [(name, p) for name, p in named if p.requires_grad]
    return Memory(
        weights=sum(p.numel() * width[name] for name, p in named),
        masters=sum(p.numel() * EXTRA_BYTES[masters] for name, p in trained_named if width[name] == 2),
        gradients=sum(p.numel() * width[name] for name, p in trained_named),
        optimizer=optimizer,
        averages=sum(p.numel() * 4 for _, p in trained_named) * averages,
        activations=activations,
    )


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state, tensor subclasses such as 8-bit moments by what they are made of."""
    return sum(_bytes(value) for state in optimizer.state.values() for value in state.values())


def _bytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()


def state_bytes_of_a_step(parameters: Iterable[nn.Parameter], make: Callable[[], Optimizer]) -> int | None:
    """Bytes of the state that an optimizer keeps after a step, found by a step on the meta device.

    Args:
        parameters: All on the meta device; their gradients are left as they were.
        make: Builds the optimizer over these parameters.

    Returns:
        None if this optimizer cannot step without values.

    Example:
        >>> weight = nn.Parameter(torch.empty(1000, device="meta"))
        >>> state_bytes_of_a_step([weight], lambda: torch.optim.AdamW([weight]))  # two moments, and a count
        8004
    """
    given = list(parameters)
    try:
        for parameter in given:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make()
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # the same state, by kernels that are there for the meta device
        optimizer.step()
        return state_bytes(optimizer)
    except Exception:  # other people's optimizers ask for values, or for a device
        return None
    finally:
        for parameter in given:
            parameter.grad = None


class Saved:
    """What autograd has kept: tensors by the memory they are views of.

    Attributes:
        bytes: Of all, each memory counted once.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, Tensor] = {}  # keeps them alive, so that no memory is used twice
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count what is about to be kept."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored and storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor.detach()
            self.bytes += storage.nbytes()
        return tensor

    def forget(self) -> None:
        """Let go of the tensors; the count stays."""
        self._seen.clear()


@contextmanager
def saved_for_backward(module: nn.Module) -> Iterator[Saved]:
    """Count the bytes that are saved for backward inside, without the module's own parameters and buffers.

    Example:
        >>> net, x = nn.Linear(10, 1), torch.ones(5, 10)
        >>> with saved_for_backward(net) as saved:
        ...     _ = net(x).square()
        >>> saved.bytes  # x, and what was squared
        220
    """
    saved = Saved([*module.parameters(), *module.buffers()])
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            yield saved
    finally:
        saved.forget()
