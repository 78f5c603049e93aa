"""The instrument panel of a low-precision run: what :class:`PrecisionMonitor` logs, and when.

Why it exists: a run whose loss scale nobody watches dies unseen, and what low precision does to each layer shows in
numbers that no stock callback takes.

What it leaves out: taking them (:mod:`lightning_mixprec.layer_stats`) and judging them
(:mod:`lightning_mixprec.health`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_mixprec.health import Limits, layer_warnings, run_warnings
from lightning_mixprec.layer_stats import BatchStats, LayerStats, exponent_edges
from lightning_mixprec.precision import MasterWeightPrecision
from lightning_mixprec.shards import local

log = logging.getLogger(__name__)

_RECENT = 1000  # batches over which the rate of skips is taken
_EVENTS = 50  # overflows that are written as text
_FIELDS = {
    "activation_max": "activation",
    "activation_headroom_bits": "activation_headroom",
    "gradient_max": "gradient",
    "gradient_headroom_bits": "gradient_headroom",
    "gradient_zero_share": "zero",
    "gradient_subnormal_share": "subnormal",
    "update_lost_share": "lost",
    "non_finite": "non_finite",
}
_LAYOUT = {
    "Precision": {
        "loss scale": ["Multiline", ["mixprec/loss_scale"]],
        "skipped batches": ["Multiline", ["mixprec/skipped_total", "mixprec/consecutive_skips"]],
        "layers moved to fp32": ["Multiline", ["mixprec/fp32_layers"]],
        "gradient norm": ["Multiline", ["mixprec/grad_norm"]],
    },
    "Layers": {title: ["Multiline", [f"mixprec_{title}/.*"]] for title in _FIELDS},
}


class PrecisionMonitor(Callback):
    """Logs the vital signs of a low-precision run, to whatever logger the Trainer has.

    Every ``log_every_n_steps`` of the Trainer: ``mixprec/loss_scale`` (the scale used for that step),
    ``mixprec/skipped`` (1 if the step was skipped), ``mixprec/skipped_total``, ``mixprec/skip_rate`` (of the last 1000
    batches), ``mixprec/consecutive_skips``, ``mixprec/real_steps``, ``mixprec/fp32_layers`` (how many layers the
    fallback has moved) and ``mixprec/grad_norm`` (2-norm over all parameters of the last optimizer, unscaled, before
    clipping, steps that happened only).

    At growing intervals and then every ``layers_every_n_steps``, for each layer that owns parameters,
    ``mixprec_X/LAYER`` with X of ``activation_max``, ``activation_headroom_bits``, ``gradient_max`` (unscaled),
    ``gradient_headroom_bits`` (as made, with the loss scale), ``gradient_zero_share``, ``gradient_subnormal_share``,
    ``update_lost_share`` (of a sample of the weights: updates that a 16-bit weight without a master would not notice)
    and ``non_finite``; see :class:`~lightning_mixprec.layer_stats.LayerStats`. In TensorBoard also histograms of binary
    exponents (``mixprec_activation_exponents/GROUP``, ``mixprec_gradient_exponents/GROUP``), the plan and overflows as
    text (``mixprec/plan``, ``mixprec/overflow``), and a layout for the custom-scalars page.

    What is worth acting on is said once, in words, in the log (:mod:`lightning_mixprec.health`); the progress bar shows
    scale and skipped batches, and a run that ends says what it has learned. Steps that are not logged cost nothing.

    Args:
        layers_every_n_steps: Batches between two looks at every layer, the first of them at batch 1, 2, 4, 8, ...; None
            for none. A look costs about two forward passes.
        limits: When a number is worth a word.

    Raises:
        ValueError: If the interval is not a positive number.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=PrecisionMonitor(), accelerator="cpu", logger=False)
    """

    def __init__(self, layers_every_n_steps: int | None = 500, limits: Limits | None = None) -> None:
        every = layers_every_n_steps
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(
                f"layers_every_n_steps={every!r} is not allowed: it must be a whole number, at least 1, or None to "
                "look at no layers."
            )
        self.layers_every_n_steps = every
        self.limits = limits or Limits()
        self.layers: dict[str, LayerStats] = {}  # of the last look
        self._batches = 0
        self._scale_used: Tensor | None = None  # fp32 []
        self._grad_norm: Tensor | None = None  # fp32 []
        self._stats: BatchStats | None = None
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self._events = 0
        self._said: set[str] = set()
        self._scales: tuple[float, float, float] | None = None  # first, least and greatest that were logged

    # When to look

    def looks_at_gradients(self, trainer: Trainer) -> bool:
        """Whether this step's gradients are looked at: only then must they be made fp32 for it."""
        return trainer._logger_connector.should_update_logs

    def _looks_at_layers(self, trainer: Trainer) -> bool:
        every = self.layers_every_n_steps
        if every is None or not trainer.loggers:
            return False
        early = self._batches < every and self._batches & (self._batches - 1) == 0
        return early or self._batches % every == 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew, and show what computes in which dtype."""
        self._batches, self._events, self._scales = 0, 0, None
        self._recent.clear()
        self._said.clear()
        plugin = _plugin(pl_module)
        if plugin is not None and plugin.plan is not None:
            table = "\n".join(f"    {line}" for line in str(plugin.plan).splitlines())
            for logger in _tensorboards(trainer):
                logger.experiment.add_text("mixprec/plan", table, 0)
                logger.experiment.add_custom_scalars(_LAYOUT)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the scale that this batch will use; hook the layers, if this batch is looked at."""
        self._batches += 1
        plugin = _plugin(pl_module)
        self._scale_used = plugin.scaler.scale if plugin is not None else None
        self._grad_norm = None
        if plugin is not None and plugin.plan is not None and self._looks_at_layers(trainer):
            names = [layer.name for layer in plugin.plan.layers if layer.name and layer.parameters]
            narrow = plugin.compute_dtype if plugin.compute_dtype != torch.float32 else torch.bfloat16
            self._stats = BatchStats(pl_module, names, narrow)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the gradients as they were made."""
        if self._stats is not None and self._scale_used is not None:
            self._stats.after_backward(self._scale_used)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the norm of the unscaled fp32 gradients, if this step is logged."""
        plugin = _plugin(pl_module)
        if self._stats is not None and plugin is not None:
            self._stats.before_step(_value_of(plugin))
        if not self.looks_at_gradients(trainer):
            return
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        self._grad_norm = torch.nn.utils.get_total_norm(grads)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if this step is logged."""
        plugin = _plugin(pl_module)
        stats, self._stats = self._stats, None
        if plugin is None:
            return
        self._recent.append(plugin.step_was_skipped)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if plugin.step_was_skipped:
            self._note_overflow(trainer, plugin, step)
        if stats is not None:
            self._log_layers(trainer, plugin, stats, step)
        if self.looks_at_gradients(trainer):
            self._log_vitals(trainer, pl_module, plugin, step)

    # What to log

    def _log_vitals(
        self, trainer: Trainer, pl_module: LightningModule, plugin: MasterWeightPrecision, step: int
    ) -> None:
        skipped = sum(self._recent)
        counters = [plugin.scaler.skipped_steps, plugin.scaler.consecutive_skips, plugin.scaler.real_steps]
        scale = self._scale_used if self._scale_used is not None else plugin.scaler.scale
        norm = scale.new_tensor(math.nan) if self._grad_norm is None else _whole(self._grad_norm)
        # One wait for the device.
        read = torch.stack([scale.double(), norm.double(), *(counter.double() for counter in counters)]).tolist()
        values = {
            "loss_scale": read[0],
            "skipped": float(plugin.step_was_skipped),
            "skipped_total": read[2],
            "skip_rate": skipped / len(self._recent),
            "consecutive_skips": read[3],
            "real_steps": read[4],
            "fp32_layers": float(len(plugin.fp32_layers)),
        }
        if self._grad_norm is not None:
            values["grad_norm"] = read[1]
        # Straight to the loggers: `self.log` would repeat the last norm for a step that has none.
        metrics = {f"mixprec/{name}": value for name, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        first, least, greatest = self._scales or (read[0],) * 3
        self._scales = (first, min(least, read[0]), max(greatest, read[0]))
        fp16 = plugin.compute_dtype == torch.float16
        shown = {"scale": read[0], "skipped": read[2]} if fp16 else {"skipped": read[2]}
        pl_module.log_dict(shown, prog_bar=True, logger=False)
        batches = len(self._recent)
        self._say(run_warnings(self.limits, skipped=skipped, batches=batches, scale=read[0], fp16=fp16))

    def _log_layers(self, trainer: Trainer, plugin: MasterWeightPrecision, stats: BatchStats, step: int) -> None:
        stats.stop()
        if not plugin.step_was_skipped:
            stats.after_step(_value_of(plugin))
        self.layers = stats.read()
        metrics = {
            f"mixprec_{title}/{name}": getattr(layer, field)
            for name, layer in self.layers.items()
            for title, field in _FIELDS.items()
            if math.isfinite(getattr(layer, field))
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        for logger in _tensorboards(trainer):
            for (group, what), counts in _by_group(stats.exponents).items():
                _add_exponents(logger, f"mixprec_{what}_exponents/{group}", counts, step)
        if not plugin.step_was_skipped:
            scale = float(self._scale_used) if self._scale_used is not None else 1.0
            narrow = {n: layer for n, layer in self.layers.items() if plugin.plan and plugin.plan[n] != torch.float32}
            self._say(layer_warnings(self.limits, narrow, scale))

    def _note_overflow(self, trainer: Trainer, plugin: MasterWeightPrecision, step: int) -> None:
        if self._events >= _EVENTS or not trainer.loggers:
            return
        self._events += 1
        names = plugin.overflowed_parameters
        shown = ", ".join(names[-3:]) + (" and others" if len(names) > 3 else "")
        scale = float(self._scale_used) if self._scale_used is not None else 1.0
        text = f"batch {self._batches}: skipped at loss scale {scale:g}; non-finite gradients of {len(names)}: {shown}"
        for logger in _tensorboards(trainer):
            logger.experiment.add_text("mixprec/overflow", text, step)

    def _say(self, warnings: Iterator[tuple[str, str]]) -> None:
        for rule, text in warnings:
            if rule not in self._said:
                self._said.add(rule)
                log.warning(text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run has learned about precision, in a few lines."""
        plugin = _plugin(pl_module)
        if plugin is None or plugin.compute_dtype == torch.float32:
            return
        real, skipped = plugin.real_steps, plugin.skipped_steps
        lines = [
            f"precision        {plugin.policy.compute}, masters={plugin.masters}: {real} steps, {skipped} skipped "
            f"({skipped / max(real + skipped, 1):.1%})"
        ]
        if self._scales is not None and plugin.compute_dtype == torch.float16:
            first, least, greatest = self._scales
            lines.append(f"loss scale       {plugin.loss_scale:g}, started at {first:g}, {least:g} to {greatest:g}")
        moved = plugin.fp32_layers
        lines.append(f"moved to fp32    {', '.join(moved) if moved else 'no layer'}")
        if self.layers:
            lines += _learned(self.layers)
        rank_zero_info("\n".join(lines[:5]))


def _learned(layers: Mapping[str, LayerStats]) -> list[str]:
    lines = []
    known = {name: layer for name, layer in layers.items() if math.isfinite(layer.activation_headroom)}
    if known:
        name, layer = min(known.items(), key=lambda item: item[1].activation_headroom)
        lines.append(f"least headroom   {layer.activation_headroom:.1f} bits, activations of {name}")
    lost = [layer.lost for layer in layers.values() if math.isfinite(layer.lost)]
    if lost:
        mean = sum(lost) / len(lost)
        lines.append(f"masters          {mean:.0%} of the last step's updates would be lost in 16-bit weights")
    return lines


def _value_of(plugin: MasterWeightPrecision) -> Any:
    return plugin.master_weights.read if plugin.master_weights is not None else torch.Tensor.detach


def _whole(norm: Tensor) -> Tensor:
    """The norm of sharded gradients is itself spread over the ranks."""
    full = getattr(norm, "full_tensor", None)
    return full() if full is not None else local(norm)


def _by_group(exponents: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Counts of all layers that share the first two parts of their names."""
    groups: dict[tuple[str, str], Tensor] = {}
    for (name, what), counts in exponents.items():
        key = (".".join(name.split(".")[:2]), what)
        groups[key] = groups[key] + counts if key in groups else counts
    return groups


def _add_exponents(logger: TensorBoardLogger, tag: str, counts: Tensor, step: int) -> None:
    edges, found = exponent_edges(), counts.tolist()
    if not sum(found):  # TensorBoard fails on an empty histogram
        return
    filled = [place for place, count in enumerate(found) if count]
    first, last = filled[0], filled[-1]
    total = sum(found)
    mean = sum(count * (edges[place] + 0.5) for place, count in enumerate(found))
    square = sum(count * (edges[place] + 0.5) ** 2 for place, count in enumerate(found))
    logger.experiment.add_histogram_raw(
        tag,
        min=edges[first],
        max=edges[last + 1],
        num=total,
        sum=mean,
        sum_squares=square,
        bucket_limits=edges[first + 1 : last + 2],
        bucket_counts=found[first : last + 1],
        global_step=step,
    )


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]


def _plugin(pl_module: LightningModule) -> MasterWeightPrecision | None:
    trainer = pl_module._trainer
    plugin = trainer.precision_plugin if trainer is not None else None
    return plugin if isinstance(plugin, MasterWeightPrecision) else None
