"""The fp32 weights of a module, to be read and written by hand.

Why it exists: of what is written into a 16-bit parameter the masters can see no more than 16 bits, so that a decay by
0.9999 or a little noise, written into it batch after batch, rounds away. Here user code gets the fp32 values instead.

What it leaves out: edits of the 16-bit parameters themselves, which masters adopt as they are
(:mod:`lightning_mixprec.storage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.storage import Bucket
from lightning_mixprec.widening import HALF


@contextmanager
def fp32_weights(module: nn.Module, masters: MasterWeights | None = None) -> Iterator[dict[str, Tensor]]:
    """The fp32 values of the module's parameters; what is written into them is the weights' at the end.

    Args:
        module: Any module, also a part of the one with ``masters``.
        masters: What stands behind 16-bit parameters. One behind which nothing stands is shown as an fp32 copy, and
            gets it back rounded.

    Yields:
        By qualified name, as ``named_parameters`` has them, fp32 tensors in the parameters' shapes. Parameters that are
        fp32 (or of another dtype than 16 bits) are themselves, detached.

    Raises:
        ValueError: If names have been added or removed, or a tensor put in place of another has another shape.
        RuntimeError: If the weights have been changed in another way meanwhile, as by a step.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> nn.init.ones_(net.weight).shape
        torch.Size([1, 2])
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> masters.allocate()
        >>> for _ in range(100):
        ...     with fp32_weights(net, masters) as weights:
        ...         _ = weights["weight"].mul_(0.9999)
        >>> net.state_dict()["weight"], net.weight.dtype
        (tensor([[0.9900, 0.9900]]), torch.bfloat16)
    """
    params = dict(module.named_parameters())
    flats: dict[Bucket, Tensor] = {}
    shown: dict[str, Tensor] = {}
    if masters is not None:
        masters.adopt_edits()
    for name, param in params.items():
        home = None if masters is None else masters.home(param)
        if home is not None:
            bucket, place = home
            if bucket not in flats:
                flats[bucket] = bucket.read().clone()
            shown[name] = bucket.view(flats[bucket], place)
        elif param.dtype in HALF:
            shown[name] = param.detach().float() if masters is None else masters.peek(param).float()
        else:
            shown[name] = param.detach()
    stamps = {bucket: bucket.stamp() for bucket in flats}
    before = {name: value.clone() for name, value in shown.items() if params[name].dtype not in HALF}
    weights = dict(shown)
    try:
        yield weights
        with torch.no_grad():
            _take_replaced(weights, shown)
            for bucket, stamp in stamps.items():
                if masters is None or bucket not in masters.buckets or bucket.stamp() != stamp:
                    raise RuntimeError(
                        f"Weights of {type(module).__name__} were changed while `fp32_weights` was open, by a step, by "
                        "loading, or by writing into the parameters themselves. Write into what it yields, and close "
                        "it before the next step."
                    )
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                params[name].copy_(value)
        raise
    with torch.no_grad():
        written = {bucket for bucket, flat in flats.items() if not torch.equal(flat, bucket.read())}
        for bucket in written:
            bucket.write(flats[bucket].clone())  # which holds garbage afterwards
        for name, param in params.items():
            home = None if masters is None else masters.home(param)
            if home is None and param.dtype in HALF:
                param.copy_(shown[name]) if masters is None else masters.write(param, shown[name])
            elif home is not None and home[0] in written:
                torch.autograd.graph.increment_version(param)  # a backward that needs the old value must not go on


def _take_replaced(weights: dict[str, Tensor], shown: dict[str, Tensor]) -> None:
    if weights.keys() != shown.keys():
        names = ", ".join(map(repr, sorted(weights.keys() ^ shown.keys())))
        raise ValueError(f"`fp32_weights` yields a tensor for each parameter, and {names} was added or removed.")
    for name, value in weights.items():
        if value is not shown[name]:
            if value.shape != shown[name].shape:
                raise ValueError(
                    f"{name!r} in `fp32_weights` has shape {list(shown[name].shape)}, and what was put in its place "
                    f"has {list(value.shape)}."
                )
            shown[name].copy_(value)
