"""Averages as files, some every few steps, from which other averages can be made after training.

Why it exists: a checkpoint holds the averages of one moment. Here each moment gets a file of its own, small enough to
keep many, and written so that a run that is killed leaves no half of one.

What it leaves out: when they are taken (:mod:`lightning_mixprec.callbacks`) and what is made of them
(:mod:`lightning_mixprec.posthoc`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

PREFIX = "average_"

SnapshotDtype = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class Snapshot:
    """One average at one moment.

    Args:
        n_averaged: Number of updates until then, the time t of :mod:`lightning_mixprec.posthoc`.
        sigma_rel: Of its power-function profile.
        load: Returns the average by parameter name.

    Example:
        >>> Snapshot(10, 0.05, lambda: {"weight": torch.ones(1)}).load()
        {'weight': tensor([1.])}
    """

    n_averaged: int
    sigma_rel: float
    load: Callable[[], dict[str, Tensor]]


def write_snapshot(
    directory: Path,
    n_averaged: int,
    widths: Mapping[str, float],
    averages: Mapping[str, Mapping[str, Tensor]],
    dtype: SnapshotDtype = "fp32",
) -> Path:
    """Write the averages of one moment to one file, which appears whole or not at all.

    Args:
        directory: Made if it is missing.
        n_averaged: Number of updates until now.
        widths: sigma_rel by the name of a profile.
        averages: Average by parameter name, by the name of a profile; fp32.
        dtype: ``"fp16"`` halves the file. A tensor with values that fp16 cannot hold stays fp32.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_snapshot(folder, 10, {"short": 0.05}, {"short": {"weight": torch.ones(1)}}).name
        'average_000000010.pt'
        >>> [(each.n_averaged, each.sigma_rel) for each in read_snapshots(folder)]
        [(10, 0.05)]
    """
    path = directory / f"{PREFIX}{n_averaged:09d}.pt"
    content = {
        "n_averaged": n_averaged,
        "sigma_rel": dict(widths),
        "averages": {
            profile: {name: _stored(tensor, dtype) for name, tensor in averages[profile].items()} for profile in widths
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial{os.getpid()}")
    try:
        torch.save(content, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _stored(tensor: Tensor, dtype: SnapshotDtype) -> Tensor:
    tensor = tensor.detach().cpu()
    half = tensor.half()
    fits = dtype == "fp16" and bool((half.isfinite() == tensor.isfinite()).all())
    return half if fits else tensor.clone()


def snapshot_files(directory: Path) -> list[Path]:
    """The files of :func:`write_snapshot` in a directory, oldest first.

    Example:
        >>> snapshot_files(Path("nowhere"))
        []
    """
    return sorted(directory.glob(f"{PREFIX}{'[0-9]' * 9}.pt"))


def read_snapshots(directory: Path, until: int | None = None) -> list[Snapshot]:
    """All averages in the files of a directory; their tensors are read when they are asked for.

    Args:
        directory: Of :func:`write_snapshot`.
        until: Leave out those with more updates, which a run that was resumed earlier may have left.
    """
    found = []
    for path in snapshot_files(directory):
        if until is None or _updates(path) <= until:
            for profile, sigma_rel in _read(path)["sigma_rel"].items():
                found.append(Snapshot(_updates(path), sigma_rel, _Loader(path, profile)))
    return found


def _updates(path: Path) -> int:
    return int(path.stem.removeprefix(PREFIX))


@dataclass(frozen=True)
class _Loader:
    path: Path
    profile: str

    def __call__(self) -> dict[str, Tensor]:
        return _read(self.path)["averages"][self.profile]


def _read(path: Path) -> dict[str, Any]:
    """Memory-mapped, so that a list of many files reads none of their tensors."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def adopt_snapshots(source: Path, directory: Path, until: int) -> None:
    """Link (or copy, across file systems) the files of the run that this one continues, so that all are in one place.

    Args:
        source: The earlier run's directory; nothing happens if it is gone, or the same.
        directory: This run's.
        until: Number of updates at which this run goes on.
    """
    if not source.is_dir() or source.resolve() == directory.resolve():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for path in snapshot_files(source):
        target = directory / path.name
        if _updates(path) <= until and not target.exists():
            try:
                target.hardlink_to(path)
            except OSError:
                partial = target.with_suffix(f".partial{os.getpid()}")
                partial.write_bytes(path.read_bytes())
                partial.replace(target)
