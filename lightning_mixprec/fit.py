"""One fit: what lives for its length, and how the hooks of a training batch go through it.

Why it exists: gradients, steps, schedules, manual loops and DDP's wrapper each have a keeper of their own, made when
the optimizers are there and gone with them. Here they are put together in the order that a batch asks for.

What it leaves out: the module, its weights and layers, which are ready before (:mod:`lightning_mixprec.conversion`),
what outlives the fit (:mod:`lightning_mixprec.precision`), and everything that one of the keepers does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mixprec.answers import Answers
from lightning_mixprec.autocast import compute_context
from lightning_mixprec.edit_watch import EditWatch
from lightning_mixprec.feeding import Feeding
from lightning_mixprec.float8_advice import Float8Advice
from lightning_mixprec.guests import TrainingModule
from lightning_mixprec.layers import restore_, swap_
from lightning_mixprec.ledger import GradientLedger
from lightning_mixprec.manual import ManualGuards
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.newcomers import Newcomers
from lightning_mixprec.penalties import Penalties
from lightning_mixprec.questions import refuse_stranger, warn_of_gradient_hooks, warn_of_late_hooks, warn_of_shadows
from lightning_mixprec.reduction import GradientReduction, synchronise_first_backward
from lightning_mixprec.reparametrised import Registrations
from lightning_mixprec.roll_call import RollCall
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.schedules import RealFrequencies, in_a_batch
from lightning_mixprec.sharding import is_sharded
from lightning_mixprec.step_guard import StrangerGuard
from lightning_mixprec.steps import Outcome, Steps
from lightning_mixprec.unfinished import UnfinishedWindow

_LATE_HOOKS = 64  # batches in which hooks are looked for that see less under DDP


class Fit:
    """Keeps one fit.

    Args:
        module: What trains.
        model: It, or DDP's wrapper of it.
        optimizers: All of them.
        lr_schedulers: Lightning's configurations of schedules.
        scaler: The loss scale.
        masters: The master weights, or None if parameters are their own.
        answers: To overflows.
        reduction: How gradients are averaged over ranks, if not as DDP does it.
        outcome: Of the last batch; written.
        compute_dtype: Of layers that compute in 16 bits.
        counts_fp8: Count the tokens of the first batch that enter fp8 layers.
        counts_skips: Whether counts and schedules go on over a skip.

    Attributes:
        fp8_tokens: Tokens that enter fp8 layers in a step, once they have been counted.
    """

    def __init__(
        self,
        module: LightningModule,
        model: nn.Module,
        optimizers: list[Optimizer],
        lr_schedulers: Sequence[Any],
        *,
        scaler: DynamicLossScaler,
        masters: MasterWeights | None,
        answers: Answers,
        reduction: GradientReduction | None,
        outcome: Outcome,
        compute_dtype: Any,
        counts_fp8: bool,
        counts_skips: bool,
    ) -> None:
        trainer: Any = module.trainer
        self._module, self._trainer, self._scaler, self._masters = module, trainer, scaler, masters
        self._answers = answers
        self._compute = trainer.strategy.root_device.type, compute_dtype
        self._ddp = isinstance(trainer.strategy, DDPStrategy)
        self._counts_skips = counts_skips
        self._own_backward = not scaler.is_identity and is_overridden("backward", module)
        self.fp8_tokens: int | None = None
        self._ledger = GradientLedger(
            optimizers,
            scaler,
            masters,
            trainer.strategy.root_device,
            accumulate_in_fp32=not self._ddp,
            reduction=reduction,
            refuse_bare_steps=is_sharded(module) or not scaler.is_identity,
            keep_gradients=not module.automatic_optimization or is_overridden("optimizer_zero_grad", module),
        )
        self._unfinished = UnfinishedWindow(module, self._ledger, several_ranks=self._ddp)
        self._steps = Steps(module, self._ledger, scaler, answers, outcome, counts_skips=counts_skips)
        self._fp8_advice = Float8Advice(module) if counts_fp8 else None
        self._registrations = Registrations()
        self._edits = EditWatch(masters) if masters is not None else None
        self._penalties = Penalties(masters) if masters is not None else None
        self._feeding = Feeding(masters) if masters is not None else None
        # Only now: Lightning looks for overridden hooks while it sets up schedulers.
        restore_(module, below=False)
        swap_(module, TrainingModule, *self._compute, wraps_forward=False)
        self._hooks_are_named = scaler.is_identity  # there is nothing to say of them
        self._late_hooks_are_named = False
        self._strangers = StrangerGuard(self._refuse_stranger)
        self._roll_call = RollCall() if isinstance(model, DistributedDataParallel) else None
        self._newcomers = Newcomers(module, masters, reduction) if self._ddp else None
        self._frequencies: RealFrequencies | None = None
        self._manual: ManualGuards | None = None
        if module.automatic_optimization:
            self._frequencies = RealFrequencies(lr_schedulers, lambda: outcome.advances)
        else:
            schedulers = [config.scheduler for config in lr_schedulers]
            refuse = self._ddp or not scaler.is_identity
            self._manual = ManualGuards(
                self._rests, self._roll_call, optimizers, schedulers, refuse_plain_backward=refuse
            )

    def close(self) -> dict[str, Any]:
        """End it, and return what a checkpoint that is saved afterwards holds of it."""
        self.close_edits()
        self._registrations.end()
        if self._feeding is not None:
            self._feeding.end()
        self._steps.after_backward()
        self._ledger.end_batch()  # of steps made after the last `training_step`
        self._ledger.close()
        self._strangers.remove()
        # Manual loops leave gradients behind that no window will ever use.
        finished = self._manual is not None and self._trainer.state.status != TrainerStatus.INTERRUPTED
        state = self.state_dict(partial=not finished)
        self._steps.close()
        if self._frequencies is not None:
            self._frequencies.remove()
        if self._manual is not None:
            self._manual.remove()
        return state

    # A batch

    def note_batch(self, batch: Any) -> None:
        """The data of the batch that comes next, for a report."""
        self._steps.batch = batch

    def admit_newcomers(self) -> None:
        """Parameters may have been unfrozen since the last batch."""
        if self._newcomers is not None:
            self._newcomers.admit()

    def follow_reparametrised(self) -> None:
        """Layers may have been reparametrised or pruned since the last batch."""
        if self._registrations.seen and not self._ledger.window_open:
            self._registrations.seen = False
            self._answers.follow()

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Around `training_step`; the beginning of a batch, and in manual optimization its end."""
        module, ledger = self._module, self._ledger
        self.close_edits()
        if self._edits is not None:
            self._edits.begin_batch()
        self.end_batch()  # of steps made outside of `training_step`
        if [*map(id, ledger.optimizers)] != [*map(id, self._trainer.optimizers)]:  # made anew
            ledger.follow(self._trainer.optimizers)
            if self._frequencies is not None:
                self._frequencies.follow(self._trainer.lr_scheduler_configs)
        self.follow_reparametrised()
        self._steps.begin_batch()
        if self._feeding is not None:
            self._feeding.look(module, self._trainer.callbacks, closely=ledger.batches <= 2)
        if not self._hooks_are_named and ledger.batches & (ledger.batches - 1) == 0:
            self._hooks_are_named = warn_of_gradient_hooks(module)
        accumulates = self._answers.reduction is not None and ledger.window_open
        if accumulates and not self._late_hooks_are_named and ledger.batches <= _LATE_HOOKS:
            self._late_hooks_are_named = warn_of_late_hooks(module)
        if ledger.batches == 2:  # by now what is made in fit's hooks, or with the first batch, is there
            warn_of_shadows(module, self._trainer.callbacks)
        synchronise_first_backward(cast(nn.Module, self._trainer.strategy.model))
        self._unfinished.begin_batch()
        if self._manual is not None:
            self._manual.begin_batch()
        counted = self._fp8_advice or nullcontext()
        uncompiled = self._fp8_advice is not None
        if self._edits is not None:
            self._edits.open_(inside=module)
        with compute_context(*self._compute), self._steps.training_step(uncompiled=uncompiled), counted:
            yield
        self.close_edits()
        self.open_edits()  # `on_before_zero_grad` comes between forward and backward
        if not module.automatic_optimization:
            if self._manual is not None:
                self._manual.end_batch(ledger.batches)
            self.end_batch()

    def after_batch(self) -> None:
        """All of a batch is over; if it was the last of an epoch, it has to be the last of all ranks."""
        limit = self._trainer.max_steps
        stops = self._trainer.should_stop or 0 <= limit <= self._trainer.global_step  # all ranks do, wherever they are
        if self._roll_call is not None and not stops:
            last = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            leave = self._roll_call.end_epoch if last else self._roll_call.go_on
            leave(self._ledger.batches, self._trainer.current_epoch)

    def before_backward(self, loss: Tensor) -> None:
        """Let gradients that this backward of ``loss``, not scaled yet, adds to be fp32."""
        self.close_edits()
        self._steps.note_loss(loss)
        if self._penalties is not None and (report := self._penalties.report(loss, self._module, self._ledger.batches)):
            rank_zero_warn(report)
        for optimizer in self._ledger.before_backward():
            self._steps.skipped_by_user(optimizer)
        if self._manual is not None:
            self._manual.before_backward(
                self._ledger.batches, self._trainer.current_epoch, self._trainer.strategy.model
            )

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Around the backward of ``loss``, scaled.

        Raises:
            MisconfigurationException: If the module's own `backward` has sent something else.
        """
        watched = self._own_backward and loss.requires_grad
        passed: list[Tensor] = []
        handle = loss.register_hook(passed.append) if watched else None
        if self._manual is not None:
            self._manual.in_backward = True
        try:
            yield
        finally:
            if self._manual is not None:
                self._manual.in_backward = False
            if handle is not None:
                handle.remove()
        if watched and not passed and any(param.grad is not None for param in self._module.parameters()):
            raise MisconfigurationException(
                f"{type(self._module).__name__}.backward(loss) sent something else backward than the loss it was "
                "given, so its gradients lack the loss scale that the step divides by. Send what it is given, or use "
                "MasterWeightPrecision('bf16'), which scales nothing."
            )

    def after_backward(self, loss: Tensor) -> None:
        """Note non-finite gradients before `on_after_backward` and clipping, which can hide them."""
        if self._ddp:  # reduces here after a static graph's first manual backward
            self._trainer.strategy.post_backward(loss)
        self._ledger.after_backward()
        self._unfinished.after_backward()
        if self._module.automatic_optimization:
            self._steps.after_backward()
        self.open_edits()

    def after_backward_hooks(self) -> None:
        """In manual optimization, what the user clips or edits from here on are true gradients."""
        if self._manual is not None and not self._scaler.is_identity:
            for optimizer in self._ledger.optimizers:
                self._ledger.unscale(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients of ``optimizer`` true."""
        self._ledger.unscale(optimizer)

    def step(self, optimizer: Any, result: Any, before_step: Callable[[], None], arguments: dict[str, Any]) -> Any:
        """Step or skip, see :meth:`lightning_mixprec.steps.Steps.step_or_skip`."""
        if self._newcomers is not None:
            self._newcomers.refuse(optimizer)

        def last() -> None:
            before_step()
            self.close_edits()

        with self._strangers.lifted():
            output = self._steps.step_or_skip(optimizer, result, last, arguments)
        if self._edits is not None:
            self._edits.stepped()
        self.open_edits()
        return output

    def end_batch(self) -> None:
        """Account for the batch, if an optimizer was called."""
        if self._fp8_advice is not None and self._fp8_advice.due:
            self.fp8_tokens = self._fp8_advice.give(self._trainer)
            self._fp8_advice = None
        self._steps.end_batch()

    def _refuse_stranger(self, optimizer: Optimizer) -> None:
        if not any(optimizer is each for each in self._ledger.optimizers):  # those have a guard of their own
            narrow = self._masters if self._masters is not None else ()
            refuse_stranger(optimizer, self._module, narrow, scaled=not self._scaler.is_identity)

    def _rests(self, optimizer: Any) -> bool:
        """Whether a schedule of ``optimizer`` that the user steps now has to rest: its last step was skipped."""
        if self._counts_skips or not in_a_batch(self._module):
            return False
        return bool(self._ledger.consecutive_skips.get(optimizer))

    # Edits by hand

    def open_edits(self, *, always: bool = False) -> None:
        """What comes now may be user code that edits weights; ``always`` to be looked at, whatever the batch."""
        if self._edits is not None:
            self._edits.open_(always=always)

    def close_edits(self, *, evaluates: bool = False) -> None:
        """What comes now is none of the user's code that edits weights: forward, backward, a step.

        Args:
            evaluates: It is a forward outside of training, of averages maybe, that are put in for it.
        """
        if self._edits is None:
            return
        self._edits.close_(for_a_while=evaluates)
        for report in self._edits.reports(self._module):
            rank_zero_warn(report)

    # Checkpoints

    def state_dict(self, *, partial: bool = True) -> dict[str, Any]:
        """What a resumed fit needs to know; ``partial_gradients`` of an open window only if asked for."""
        skips = [self._ledger.consecutive_skips[each] for each in self._ledger.optimizers]
        state = {
            "rounding": {} if self._masters is None else self._masters.state_dict(),
            "pushed_back_schedules": self._frequencies.state_dict() if self._frequencies is not None else [],
            "skips_by_optimizer": skips if len(skips) > 1 else [],
            **(self._unfinished.state_dict() if partial else {}),
        }
        return {name: value for name, value in state.items() if value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where patience, schedules, rounding and an accumulation window were."""
        self._unfinished.load_state_dict(state)
        optimizers = self._ledger.optimizers
        skips = state.get("skips_by_optimizer", [self._scaler.consecutive_skips] * len(optimizers))
        self._ledger.consecutive_skips.update(zip(optimizers, skips, strict=False))
        if self._frequencies is not None:
            self._frequencies.load_state_dict(state.get("pushed_back_schedules", []))
        if self._masters is not None:
            self._masters.load_state_dict(state.get("rounding", {}))
