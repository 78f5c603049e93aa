"""What becomes of a training batch: a step or a skip, and what a skip means for everything around it.

Why it exists: a skipped step must leave no trace in buffers, schedules and counts, has to be looked into, and ends the
run if it comes again and again. The decision is one, however many optimizers there are and whoever calls them.

What it leaves out: gradients (:mod:`lightning_mixprec.ledger`), the layer behind an overflow
(:mod:`lightning_mixprec.answers`), and which hook of the Trainer leads here (:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from lightning_mixprec.answers import Answers
from lightning_mixprec.buffers import BufferGuard
from lightning_mixprec.containers import stacked
from lightning_mixprec.guests import Once, Uncounted
from lightning_mixprec.ledger import GradientLedger
from lightning_mixprec.magnitudes import nonfinite
from lightning_mixprec.questions import (
    refuse_true_half,
    refuse_unsharded,
    report,
    user_code_sees_gradients,
    warn_of_missing_gradients,
)
from lightning_mixprec.scaler import DynamicLossScaler

_MISSING = 3  # batches in a row whose backward leaves no gradient, before that is said


class NonFiniteGradientsError(RuntimeError):
    """Training stopped because every batch overflowed and a smaller loss scale did not help.

    Example:
        >>> issubclass(NonFiniteGradientsError, RuntimeError)
        True
    """


@dataclass
class Outcome:
    """What became of the last batch; outlives the fit.

    Attributes:
        skipped: Whether an update was skipped.
        optimizers: Those that skipped.
        advances: Whether schedules may.
        gradients: Names of those that were there at the last skip, and for each, on the device, whether it was bad.
    """

    skipped: bool = False
    optimizers: set[Optimizer] = field(default_factory=set)
    advances: bool = True
    gradients: tuple[list[str], Tensor] = field(default_factory=lambda: ([], torch.zeros(0)))

    def begin_batch(self) -> None:
        """Nothing has become of it yet."""
        self.skipped, self.advances = False, True
        self.optimizers.clear()


class Steps:
    """Steps or skips for the length of a fit.

    Args:
        model: What is trained.
        ledger: Its gradients.
        scaler: Its loss scale.
        answers: To overflows.
        outcome: Written.
        counts_skips: Whether Lightning's count of steps, and schedules, go on over a skip.

    Attributes:
        batch: The last one, for a report.
        in_training_step: Whether `training_step` runs.
    """

    def __init__(
        self,
        model: LightningModule,
        ledger: GradientLedger,
        scaler: DynamicLossScaler,
        answers: Answers,
        outcome: Outcome,
        *,
        counts_skips: bool,
    ) -> None:
        self.batch: Any = None
        self.in_training_step = False
        self._model, self._ledger, self._scaler = model, ledger, scaler
        self._answers, self._diagnosis = answers, answers.diagnosis
        self._outcome = outcome
        self._counts_skips = counts_skips
        self._buffers = BufferGuard(model, ledger.optimizers)
        self._uncompiled = ExitStack()  # torch's stance on compiled modules, while it is not the user's
        self._decided = True  # since buffers were remembered, an optimizer has stepped or skipped
        self._loss: Tensor | None = None  # sum of the unscaled losses since the last step: not finite if one was not
        self._progress: Any = None  # Lightning's count of steps, once one was skipped
        self._missing = 0  # batches in a row whose backward has left no gradient
        self._hopeless: str | None = None  # the error to end with, once the batch has been accounted for

    def begin_batch(self) -> None:
        """A training batch begins."""
        self._ledger.batches += 1
        self._outcome.begin_batch()

    @contextmanager
    def training_step(self, *, uncompiled: bool = False) -> Iterator[None]:
        """Around `training_step`.

        Args:
            uncompiled: Run compiled modules uncompiled in this batch, because their insides are looked at.
        """
        self.after_backward()
        if self._decided:
            self._buffers.remember()
            self._decided = False
        if not self._ledger.window_open:
            self._diagnosis.begin_batch()
        checkup = self._diagnosis.checkup()
        if "torch._dynamo" in sys.modules and (uncompiled or not isinstance(checkup, nullcontext)):
            # Up to the end of backward: checkpointing refuses a second forward that is not what the first was.
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        self.in_training_step = self._diagnosis.training_step = True
        try:
            with checkup:
                yield
        except BaseException:
            self.after_backward()
            raise
        finally:
            self.in_training_step = self._diagnosis.training_step = False
        if not self._model.automatic_optimization:
            self.after_backward()

    def after_backward(self) -> None:
        """The last backward of a batch has been: compiled modules run compiled again."""
        self._uncompiled.close()

    def note_loss(self, loss: Tensor) -> None:
        """A backward begins from ``loss``, not scaled yet."""
        loss = loss.detach().sum(dtype=torch.float32)
        self._loss = loss if self._loss is None else self._loss + loss.to(self._loss.device)

    def skipped_by_user(self, optimizer: Optimizer) -> None:
        """An earlier batch was, by the user's own guard against gradients that are not finite, without a step."""
        self._look_into(optimizer, self._ledger.consecutive_skips[optimizer])

    def step_or_skip(
        self, optimizer: Any, result: Any, before_step: Callable[[], None], step_arguments: dict[str, Any]
    ) -> Any:
        """After backward: step on the masters, or not at all if a gradient was not finite on any rank.

        Args:
            optimizer: The user's, maybe in Lightning's wrapper.
            result: Of the closure.
            before_step: Runs the user's hooks and clips.
            step_arguments: Of ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned, or ``result``.
        """
        model, ledger = self._model, self._ledger
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if ledger.guarded(optimizer):
            self._skip(optimizer)
            return result
        by_user = user_code_sees_gradients(model)
        put_back = False
        if params and not ledger.has_gradients(optimizer):  # training_step returned None, or an idle optimizer
            if result is not None and model.automatic_optimization:
                put_back = by_user and self._puts_back(optimizer, before_step)
                self._missing = 0 if put_back else self._missing + 1
                if self._missing == _MISSING:
                    warn_of_missing_gradients(optimizer, _MISSING)
            if not put_back:
                self._outcome.advances = False
                self._uncount()
                return result
        else:
            self._missing = 0

        if not ledger.has_masters:
            refuse_true_half(model, params)  # unfrozen since
            refuse_unsharded(model, params)
        _refuse_nonfinite_rates(optimizer)

        def step() -> Any:
            return optimizer.step(closure=Once(optimizer, result), **step_arguments)

        ledger.notice = self._diagnosis.notice
        clips = bool(model.trainer.gradient_clip_val)
        # Clipped by value, an inf is a number, and its parameter can no longer be named.
        by_norm = model.trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
        if not by_user and (by_norm or not clips) and ledger.leaves_it_to_the_device(optimizer):
            skip = ledger.ask(optimizer)
            if clips:
                ledger.unscale(optimizer)
            before_step()
            output = ledger.step(optimizer, step, skip)
            if ledger.answered(optimizer):
                self._skip(optimizer)
                return result
            return ledger.step(optimizer, step) if ledger.held_back else output
        overflowed = ledger.overflowed(optimizer)
        if not (overflowed or put_back):
            if by_user or clips:
                ledger.unscale(optimizer)
            before_step()
            if by_user:  # and may have written something that is not finite
                ledger.note(optimizer)
                overflowed = ledger.overflowed(optimizer)
        if overflowed:
            self._skip(optimizer)
            return result
        return ledger.step(optimizer, step)

    def _puts_back(self, optimizer: Optimizer, before_step: Callable[[], None]) -> bool:
        """Whether the user's hooks bring gradients that others of them have put aside since backward."""
        self._ledger.unscale(optimizer)
        before_step()
        self._ledger.note(optimizer)
        return self._ledger.has_gradients(optimizer)

    def end_batch(self) -> None:
        """Account for the batch, if an optimizer was called.

        Raises:
            NonFiniteGradientsError: If too many batches in a row were skipped.
        """
        self.after_backward()
        skipped = bool(self._outcome.optimizers)
        stepped = self._ledger.end_batch()
        if stepped is None:
            return
        self._decided, self._loss = True, None
        self._buffers.look()
        watch = self._diagnosis.watch
        repaired = watch is not None and bool(watch.verdicts)  # the lost results have been in the statistics
        if skipped or repaired:
            self._buffers.restore_(only_nonfinite=stepped)
        hopeless, self._hopeless = self._hopeless, None
        if hopeless is not None:
            raise NonFiniteGradientsError(hopeless)
        noticed, self._ledger.noticed = self._ledger.noticed, False
        self._answers.end_batch(skipped=skipped, noticed=noticed)

    def close(self) -> None:
        """Leave Lightning's count as found, if an error has kept it from counting a step that was skipped."""
        if isinstance(self._progress, Uncounted):
            self._progress.increment_completed()

    def _skip(self, optimizer: Optimizer) -> None:
        self._outcome.skipped = True
        self._outcome.optimizers.add(optimizer)
        self._look_into(optimizer, self._ledger.consecutive_skips[optimizer] + 1)
        self._ledger.skip(optimizer)
        if not self._counts_skips:
            self._outcome.advances = False
            self._uncount()

    def _look_into(self, optimizer: Optimizer, skips: int) -> None:
        """Find out why, and whether there is any hope; the gradients are there, if nobody has dropped them.

        Args:
            optimizer: Which has skipped.
            skips: How often in a row, this time included.
        """
        ledger, scaler, diagnosis = self._ledger, self._scaler, self._diagnosis
        loss_is_finite = not ledger.agreed(None if self._loss is None else ~self._loss.isfinite())
        grads = {name: param.grad for name, param in self._model.named_parameters() if param.grad is not None}
        flags = [nonfinite(grad) for grad in grads.values()]
        self._outcome.gradients = (list(grads), stacked(flags) if flags else torch.zeros(0))
        lost = self._lost_weights(optimizer)
        if lost:
            self._hopeless = (
                f"{len(lost)} parameters are not finite any more, which no smaller loss scale can cure: "
                f"{', '.join(lost[:3])}{', ...' * (len(lost) > 3)}. An update made them so, by a learning rate or "
                "another setting that is far too large, or your own code wrote them. Go back to a checkpoint from "
                "before; the curves of PrecisionMonitor show where it began."
            )
        elif skips >= scaler.max_consecutive_skips or (scaler.at_floor and not loss_is_finite):
            # Written now, while the gradients are there; raised when the batch has been accounted for.
            bad = [name for name, flag in zip(grads, flags, strict=True) if flag]
            where = report(self._model, scaler, self.batch, diagnosis.watch, loss_is_finite, bad)
            self._hopeless = f"{skips} training batches in a row had non-finite gradients; {where}"
        diagnosis.after_skip(loss_is_finite=loss_is_finite, skips=skips)

    def _lost_weights(self, optimizer: Optimizer) -> list[str]:
        """Names of the optimizer's parameters that are not finite, on any rank."""
        mine = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
        named = [(name, param) for name, param in self._model.named_parameters() if param in mine]
        # A weight that 16 bits do not hold is no lost one: its layer can still compute in fp32.
        flags = [nonfinite(self._ledger.value(param)) for _, param in named]
        if not flags or not self._ledger.agreed(stacked(flags).any()):
            return []
        bad = [name for (name, _), flag in zip(named, stacked(flags).tolist(), strict=True) if flag]
        return bad or ["on another rank"]

    def _uncount(self) -> None:
        """Lightning counts every call of the optimizer; `global_step` and `max_steps` mean updates that happened."""
        loop = self._model.trainer.fit_loop.epoch_loop
        if self._model.automatic_optimization:
            self._progress = loop.automatic_optimization.optim_progress.optimizer.step
        elif self.in_training_step:
            self._progress = loop.manual_optimization.optim_step_progress
        else:
            return  # Lightning will not count it
        self._progress.__class__ = Uncounted


def _refuse_nonfinite_rates(optimizer: Any) -> None:
    """Before an update that would leave no weight finite."""
    for index, group in enumerate(optimizer.param_groups):
        for key in ("lr", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, (int, float)) and not math.isfinite(value):
                name = type(getattr(optimizer, "_optimizer", optimizer)).__name__
                raise ValueError(
                    f"{key}={value} in parameter group {index} of {name} is not finite: the step would make "
                    "every weight NaN. Look at the schedule, or at whatever else sets it."
                )
