"""The instrument panel of a low-precision run: what :class:`PrecisionMonitor` logs, and when.

Why it exists: a run whose loss scale nobody watches dies unseen, and what low precision does to each layer shows in
numbers that no stock callback takes.

What it leaves out: taking them (:mod:`lightning_mixprec.layer_stats`), judging them
(:mod:`lightning_mixprec.health`), what only TensorBoard can show (:mod:`lightning_mixprec.dashboard`) and what remains
of them when the run is over (:mod:`lightning_mixprec.lessons`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_mixprec.dashboard import add_exponents, add_layout, by_group, charts, tensorboards
from lightning_mixprec.health import Limits, layer_warnings, run_warnings
from lightning_mixprec.layer_stats import BatchStats, LayerStats
from lightning_mixprec.lessons import lessons
from lightning_mixprec.precision import MasterWeightPrecision
from lightning_mixprec.shards import local

log = logging.getLogger(__name__)

_RECENT = 1000  # batches over which the rate of skips is taken
_SETTLED = 50  # batches after which layers without gradients are worth a word
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

    What is worth acting on is said once, in words (:mod:`lightning_mixprec.health`), in the log and in TensorBoard's
    text ``alerts/precision``, which is also a curve: how much was said so far. The progress bar shows ``scale`` and
    ``skipped`` batches, unless the module logs these names itself, and a run that ends says what it has learned
    (``mixprec/learned``). Steps that are not logged cost nothing.

    An attribute ``custom_scalars`` of the module or of another callback adds charts to the page:
    ``{"Heading": {"title of a chart": ["tag", "regular/expression.*"]}}``.

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
        self._recent_scales: deque[tuple[int, float]] = deque()  # batch and scale, where they were logged
        self._most_headroom: dict[str, float] = {}  # bits of each layer's activations, over all looks
        self._events = 0
        self._said: dict[str, str] = {}  # by rule
        self._on_the_bar: dict[str, float] = {}
        self._for_callbacks: dict[str, Tensor] = {}
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
        self.layers, self._most_headroom = {}, {}
        self._recent.clear()
        self._recent_scales.clear()
        self._said.clear()
        self._on_the_bar.clear()
        self._for_callbacks.clear()
        plugin = _plugin(pl_module)
        if plugin is not None and plugin.plan is not None:
            table = "\n".join(f"    {line}" for line in str(plugin.plan).splitlines())
            for logger in tensorboards(trainer):
                logger.experiment.add_text("mixprec/plan", table, 0)
                add_layout(logger.experiment, charts(trainer, pl_module, _FIELDS))

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
        if plugin.step_was_skipped or not trainer.fit_loop._should_accumulate():
            self._recent.append(plugin.step_was_skipped)  # of each update, however many batches it takes
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
        scale = self._scale_used if self._scale_used is not None else plugin.scaler.scale
        norm = torch.full_like(scale, math.nan) if self._grad_norm is None else _whole(self._grad_norm)
        # One wait for the device.
        read = torch.stack([scale.double(), norm.double()]).tolist()
        values = {
            "loss_scale": read[0],
            "skipped": float(plugin.step_was_skipped),
            "skipped_total": float(plugin.skipped_steps),
            "skip_rate": skipped / max(len(self._recent), 1),
            "consecutive_skips": float(plugin.consecutive_skips),
            "real_steps": float(plugin.real_steps),
            "fp32_layers": float(len(plugin.fp32_layers)),
        }
        if self._grad_norm is not None:
            values["grad_norm"] = read[1]
        first, least, greatest = self._scales or (read[0],) * 3
        self._scales = (first, min(least, read[0]), max(greatest, read[0]))
        self._recent_scales.append((self._batches, read[0]))
        while self._recent_scales[0][0] <= self._batches - _RECENT:
            self._recent_scales.popleft()
        fp16 = plugin.compute_dtype == torch.float16
        shown = {"skipped": values["skipped_total"]}
        if fp16:
            shown = {"scale": read[0], **shown}
        _show(trainer.progress_bar_metrics, self._on_the_bar, shown)
        told = {name: torch.tensor(value) for name, value in shown.items()}
        _show(trainer.callback_metrics, self._for_callbacks, told)
        found = run_warnings(
            self.limits,
            skipped=skipped,
            batches=len(self._recent),
            scale=read[0],
            fp16=fp16,
            highest=max(scale for _, scale in self._recent_scales),
            moved=plugin.fp32_layers,
        )
        self._say(trainer, found, step)
        # Straight to the loggers: `self.log` would repeat the last norm for a step that has none.
        metrics = {f"mixprec/{name}": value for name, value in values.items()}
        metrics["alerts/precision"] = float(len(self._said))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

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
        for logger in tensorboards(trainer):
            for (group, what), counts in by_group(stats.exponents).items():
                add_exponents(logger.experiment, f"mixprec_{what}_exponents/{group}", counts, step)
        if not plugin.step_was_skipped:
            scale = float(self._scale_used) if self._scale_used is not None else 1.0
            narrow = {n: layer for n, layer in self.layers.items() if plugin.plan and plugin.plan[n] != torch.float32}
            found = layer_warnings(
                self.limits,
                narrow,
                scale,
                self._most_headroom,
                fp16=plugin.compute_dtype == torch.float16,
                settled=self._batches >= _SETTLED,
            )
            self._say(trainer, found, step)
            for name, layer in self.layers.items():
                if math.isfinite(layer.activation_headroom):
                    most = self._most_headroom.get(name, layer.activation_headroom)
                    self._most_headroom[name] = max(most, layer.activation_headroom)

    def _note_overflow(self, trainer: Trainer, plugin: MasterWeightPrecision, step: int) -> None:
        if self._events >= _EVENTS or not trainer.loggers:
            return
        self._events += 1
        names = plugin.overflowed_parameters
        shown = ", ".join(names[-3:]) + (" and others" if len(names) > 3 else "")
        scale = float(self._scale_used) if self._scale_used is not None else 1.0
        text = f"batch {self._batches}: skipped at loss scale {scale:g}; non-finite gradients of {len(names)}: {shown}"
        for logger in tensorboards(trainer):
            logger.experiment.add_text("mixprec/overflow", text, step)

    def _say(self, trainer: Trainer, warnings: Iterator[tuple[str, str]], step: int) -> None:
        """What was not said before: in the log and in TensorBoard, by rank 0 for all."""
        for rule, text in warnings:
            if rule in self._said:
                continue
            self._said[rule] = text
            if trainer.is_global_zero:
                log.warning(text)
            for logger in tensorboards(trainer):
                said = "\n\n".join(f"**{rule}** {text}" for rule, text in self._said.items())
                logger.experiment.add_text("alerts/precision", said, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run has learned about precision, in a few lines."""
        plugin = _plugin(pl_module)
        if plugin is None or plugin.compute_dtype == torch.float32:
            return
        scales = None
        if self._scales is not None and plugin.compute_dtype == torch.float16:
            scales = (plugin.loss_scale, *self._scales)
        real, skipped = plugin.real_steps, plugin.skipped_steps
        learned = lessons(
            plugin.policy.compute, plugin.masters, real, skipped, scales, list(plugin.fp32_layers), self.layers
        )
        rank_zero_info("\n".join(learned))
        for logger in tensorboards(trainer):
            text = "\n".join(f"    {line}" for line in learned)
            logger.experiment.add_text("mixprec/learned", text, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that is cut short has learned something too, and nothing stays on its layers."""
        if self._stats is not None:
            self._stats.stop()
            self._stats = None
        if self._batches and trainer.state.fn == "fit":
            self.on_train_end(trainer, pl_module)


def _show(metrics: dict[str, Any], ours: dict[str, Any], shown: dict[str, Any]) -> None:
    """Set in Lightning's ``metrics`` what nobody else has set: ``ours`` is what was set here before.

    Names as short as these may be other people's too, whose values ``self.log`` would hide.
    """
    for name, value in shown.items():
        if metrics.get(name) is ours.get(name):
            metrics[name] = ours[name] = value


def _value_of(plugin: MasterWeightPrecision) -> Any:
    return plugin.master_weights.read if plugin.master_weights is not None else torch.Tensor.detach


def _whole(norm: Tensor) -> Tensor:
    """The norm of sharded gradients is itself spread over the ranks."""
    full = getattr(norm, "full_tensor", None)
    return full() if full is not None else local(norm)


def _plugin(pl_module: LightningModule) -> MasterWeightPrecision | None:
    trainer = pl_module._trainer
    plugin = trainer.precision_plugin if trainer is not None else None
    return plugin if isinstance(plugin, MasterWeightPrecision) else None
