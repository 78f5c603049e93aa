"""Every tensor in what a layer is given, or gives: in containers, dataclasses and attributes.

Why it exists: whoever looks at activations or gradients meets dicts, named tuples, lists of feature maps and
distributions.

What it leaves out: exchanging them (:mod:`lightning_mixprec.widening`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in containers, dataclasses and attributes of other objects, with where it stands.

    Example:
        >>> import torch
        >>> [path for path, _ in tensors_in({"x": torch.ones(1), "more": [torch.ones(1)]})]
        ["['x']", "['more'][0]"]
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{path}.{field.name}")
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value):
        # Such as the distribution that an autoencoder returns; no deeper, for it may hold anything.
        for name, item in vars(value).items():
            if isinstance(item, Tensor):
                yield f"{path}.{name}", item


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape in one: on a GPU if any is, since what a network takes and returns need not all be there.

    Example:
        >>> import torch
        >>> stacked([torch.tensor(True), torch.tensor(False)])
        tensor([ True, False])
    """
    device = next((number.device for number in numbers if number.device.type != "cpu"), numbers[0].device)
    return torch.stack([number.to(device) for number in numbers])
