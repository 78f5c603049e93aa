"""What a policy means for one model: a mapping from layer to dtype that prints as a table.

Why it exists: what every layer will compute in, and why, must be there to read before training, and for the parts of
the plugin that act on it. Equal blocks are printed once, so that the plan of a large model fits on a screen.

What it leaves out: deciding it (:mod:`lightning_mixprec.policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["compute", "fp32", "norm", "fp8"]


@dataclass(frozen=True)
class LayerPlan:
    """What the plan holds for one module.

    Attributes:
        name: Qualified name inside the model.
        type_name: Class name.
        kind: ``"compute"`` (16-bit parameters and arithmetic), ``"norm"`` (fp32 parameters and statistics, activations
            in the compute dtype), ``"fp32"`` (all of it in fp32) or ``"fp8"`` (16-bit parameters and activations,
            matrix products of their fp8 values).
        dtype: Dtype of the layer's own parameters.
        reason: Which entry or default decided.
        parameters: Number of parameter elements that the module itself owns.

    Example:
        >>> LayerPlan("head", "Linear", "fp32", torch.float32, "fp32 entry 'head'", parameters=20).kind
        'fp32'
    """

    name: str
    type_name: str
    kind: Kind
    dtype: torch.dtype
    reason: str
    parameters: int


class PrecisionPlan(Mapping[str, torch.dtype]):
    """A policy applied to one model: a mapping from qualified module name to dtype that prints as a table.

    Attributes:
        layers: Modules that own parameters or that an entry or default names, in model order.
        kinds: Kind of every module, by qualified name (all names of a shared module, the root excepted).
        parameters: Dtype of every parameter while training, by qualified name (all names of a shared one). A
            parameter with several owners is fp32 as soon as one of them is; frozen ones of compute layers stay as
            they were given.
        fp8_refused: Layers that an fp8 entry covers and that do not compute in fp8, by name, with the reason; those
            that an fp32 entry names more precisely are not among them.

    Example:
        >>> from torch import nn
        >>> from lightning_mixprec import PrecisionPolicy
        >>> plan = PrecisionPolicy("fp16", fp32=["1"]).resolve(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
        >>> plan["0"], plan["1"]
        (torch.float16, torch.float32)
    """

    def __init__(
        self,
        compute: torch.dtype,
        layers: list[LayerPlan],
        kinds: dict[str, Kind],
        parameters: dict[str, torch.dtype],
        fp8_refused: Mapping[str, str] | None = None,
    ) -> None:
        self.compute = compute
        self.fp8_refused = dict(fp8_refused or {})
        self.layers = layers
        self.kinds = kinds
        self.parameters = parameters
        self._dtypes = {layer.name: layer.dtype for layer in layers}

    @property
    def fp32_modules(self) -> set[str]:
        """Qualified names of all modules that compute in fp32."""
        return {name for name, kind in self.kinds.items() if kind == "fp32"}

    @property
    def fp8_layers(self) -> list[str]:
        """Qualified names of the linear layers that compute in fp8, in model order."""
        return [layer.name for layer in self.layers if layer.kind == "fp8"]

    def __getitem__(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

    def __str__(self) -> str:
        rows: list[Row] = []
        for layer in self.layers:
            dtype = str(layer.dtype).removeprefix("torch.")
            dtype = f"fp8 ({dtype})" if layer.kind == "fp8" else dtype
            rows.append((layer.name or "(root)", layer.type_name, dtype, f"{layer.parameters:,}", layer.reason))
        rows = [("layer", "type", "dtype", "parameters", "reason"), *folded(rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


Row: TypeAlias = tuple[str, ...]


def folded(rows: list[Row]) -> list[Row]:
    """Rows of a table of layers, those of equal blocks that follow each other once, with their number.

    Args:
        rows: Qualified name first.

    Example:
        >>> rows = [(f"blocks.{i}.{name}", "Linear") for i in range(28) for name in ("fc1", "fc2")]
        >>> folded([*rows, ("head", "Linear")])
        [('blocks.0-27.fc1 x28', 'Linear'), ('blocks.0-27.fc2 x28', 'Linear'), ('head', 'Linear')]
    """
    return [(f"{name} x{count}" if count > 1 else name, *cells) for count, (name, *cells) in _folded(rows, 0)]


def _folded(rows: list[Row], start: int) -> list[tuple[int, Row]]:
    """Each row with the number that it stands for; the first `start` parts of the names are the same in all."""
    out: list[tuple[int, Row]] = []
    while rows:
        parts = rows[0][0].split(".")
        place = next((i for i in range(start, len(parts)) if parts[i].isdecimal()), None)
        if place is None:
            out.append((1, rows[0]))
            rows = rows[1:]
            continue
        block = _block(rows, parts[: place + 1])
        size, first = len(block), int(parts[place])
        last, rest = first, rows[size:]
        while rest and _inside(block, place) == _inside(rest[:size], place):
            if len(_block(rest, [*parts[:place], str(last + 1)])) != size:
                break
            last, rest = last + 1, rest[size:]
        for count, (name, *cells) in _folded(block, place + 1):
            parts = name.split(".")
            if last > first:
                parts[place] = f"{first}-{last}"
            out.append((count * (last - first + 1), (".".join(parts), *cells)))
        rows = rest
    return out


def _block(rows: list[Row], head: list[str]) -> list[Row]:
    """The rows at the beginning that are of this module or of one inside it."""
    inside = (row[0].split(".")[: len(head)] == head for row in rows)
    return [row for row, _ in zip(rows, takewhile(bool, inside), strict=False)]


def _inside(rows: list[Row], place: int) -> list[Row]:
    """What two blocks must have in common: names below them, and all that stands beside."""
    return [(".".join(row[0].split(".")[place + 1 :]), *row[1:]) for row in rows]
