"""Tensors of which every rank holds a part.

Why it exists: under FSDP2 parameters, gradients and whatever is made of them are DTensors. Arithmetic element by
element wants this rank's part, a checkpoint the whole, and a value from a checkpoint has to become parts again.

What it leaves out: making them (:mod:`lightning_mixprec.sharding`). For any other tensor these functions do nothing.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, which shares its memory.

    Example:
        >>> import torch
        >>> local(torch.ones(1))
        tensor([1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all ranks. All of them must come here.

    Example:
        >>> import torch
        >>> whole(torch.ones(1))
        tensor([1.])
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole ``tensor``, the same on all ranks, in parts as ``like`` is. All ranks must come here.

    Example:
        >>> import torch
        >>> shard_like(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
