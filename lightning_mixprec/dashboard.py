"""What only TensorBoard can show: a page of charts that belong together, and histograms made elsewhere.

Why it exists: TensorBoard shows a hundred curves in alphabetical order, and takes histograms of values that it counts
itself, on the host. Here the charts are laid out, and the counts come from the device.

What it leaves out: the numbers, and when they are written (:mod:`lightning_mixprec.monitor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_mixprec.containers import stacked
from lightning_mixprec.layer_stats import exponent_edges

Charts = dict[str, dict[str, list[str]]]
"""Regular expressions of tags (`$` at the end: no others that begin so) by title of the chart, by heading."""

VITALS: Charts = {
    "Precision": {
        "alerts, in words on the text page": ["alerts/precision"],
        "loss scale": ["mixprec/loss_scale$"],
        "skipped batches": ["mixprec/skipped_total$", "mixprec/consecutive_skips$"],
        "share of skipped batches": ["mixprec/skip_rate$"],
        "layers moved to fp32": ["mixprec/fp32_layers$"],
        "gradient norm": ["mixprec/grad_norm$"],
    }
}
"""The charts to look at first."""


def charts(trainer: Trainer, pl_module: LightningModule, per_layer: Mapping[str, str]) -> Charts:
    """The whole page: vital signs, those of callbacks and module, then every layer.

    Args:
        trainer: Its callbacks may have an attribute ``custom_scalars``: charts of their own.
        pl_module: So may the module.
        per_layer: Names of what is logged for every layer.

    Example:
        >>> import lightning as L
        >>> class Curves(L.Callback):
        ...     custom_scalars = {"Speed": {"images": ["images_per_second"]}}
        >>> trainer = L.Trainer(callbacks=Curves(), accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> list(charts(trainer, L.LightningModule(), {"gradient_max": "gradient"}))
        ['Precision', 'Speed', 'Layers']
    """
    page = {heading: dict(group) for heading, group in VITALS.items()}
    for part in (pl_module, *trainer.callbacks):  # type: ignore[attr-defined]
        for heading, group in getattr(part, "custom_scalars", {}).items():
            page.setdefault(heading, {}).update(group)
    page["Layers"] = {title: [f"mixprec_{title}/.*"] for title in per_layer}
    return page


def add_layout(writer: Any, page: Charts) -> None:
    """Lay the charts out on the custom-scalars page; once per run, since TensorBoard reads one layout."""
    writer.add_custom_scalars(
        {heading: {title: ["Multiline", tags] for title, tags in group.items()} for heading, group in page.items()}
    )


def add_exponents(writer: Any, tag: str, counts: Tensor, step: int) -> None:
    """Write a histogram of binary exponents.

    Args:
        writer: A ``SummaryWriter``.
        tag: Its name.
        counts: How many numbers there are between two of :func:`~lightning_mixprec.layer_stats.exponent_edges`,
            ``[bins]``.
        step: Where on the axis.
    """
    edges, found = exponent_edges(), counts.tolist()
    total = sum(found)
    if not total:  # TensorBoard fails on an empty histogram
        return
    filled = [place for place, count in enumerate(found) if count]
    first, last = filled[0], filled[-1]
    writer.add_histogram_raw(
        tag,
        min=edges[first],
        max=edges[last + 1],
        num=total,
        sum=sum(count * (edges[place] + 0.5) for place, count in enumerate(found)),
        sum_squares=sum(count * (edges[place] + 0.5) ** 2 for place, count in enumerate(found)),
        bucket_limits=edges[first + 1 : last + 2],
        bucket_counts=found[first : last + 1],
        global_step=step,
    )


def by_group(exponents: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Counts by layer and what they are of, added up over all layers that share the first two parts of their names.

    On the host; one wait for the device.
    """
    groups: dict[tuple[str, str], Tensor] = {}
    read = stacked(list(exponents.values())).cpu() if exponents else ()
    for (name, what), counts in zip(exponents, read, strict=True):
        key = (".".join(name.split(".")[:2]), what)
        groups[key] = groups[key] + counts if key in groups else counts
    return groups


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The TensorBoard loggers that this process writes to: none but on rank 0."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]
