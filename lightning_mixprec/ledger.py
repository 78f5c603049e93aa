"""What state every optimizer's gradients are in, and what became of a training batch.

Why it exists: gradients are made with a loss scale, maybe over several backward passes and for several optimizers, and
must be unscaled once, with the scale they were made with, before anybody looks at them; they must be judged as backward
made them, before user code can hide an inf; and however many optimizers step, a batch moves the scale once. Training
loops call backward, clip and step in any order, so this is kept in one place rather than in the order of the calls.

What it leaves out: which hook of the Trainer calls what (:mod:`lightning_mixprec.precision`), and the scale's own rules
(:mod:`lightning_mixprec.scaler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.gradients import found_nonfinite, multiply_gradients
from lightning_mixprec.mailbox import Mailbox
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.ranks import Place, over_ranks, receive, send, several_ranks
from lightning_mixprec.reduction import GradientReduction
from lightning_mixprec.scaler import DynamicLossScaler
from lightning_mixprec.shards import local, shard_like, whole
from lightning_mixprec.step_guard import StepGuard


class GradientLedger:
    """Keeps account of gradients between backward and step, for any number of optimizers.

    Args:
        optimizers: All optimizers of the training loop.
        scaler: The loss scale; updated once a batch, in :meth:`end_batch`.
        masters: Master weights, or None if every parameter is fp32.
        device: Where flags live.
        accumulate_in_fp32: Widen 16-bit gradients before more is added to them. Not while a DDP reducer reads them.
        reduction: What sums and averages gradients under DDP, in place of ``accumulate_in_fp32``.
        refuse_bare_steps: Without masters, refuse steps that do not come through here: gradients are scaled, or only
            all ranks together know whether to skip. (With masters, 16-bit weights would be stepped: always refused.)
        keep_gradients: Leave gradients in place after a step, as plain PyTorch does, until the user clears them (manual
            optimization). Otherwise they are dropped, which saves their memory until the next backward.

    Attributes:
        batches: Training batches that this rank has begun; set it.
        consecutive_skips: Steps skipped in a row, by optimizer.
        notice: Set it for something all ranks should hear of; it goes along with what they tell each other anyway.
        noticed: Whether any rank has set it.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = DynamicLossScaler(init_scale=8)
        >>> ledger = GradientLedger([optimizer], scaler, None, torch.device("cpu"))
        >>> ledger.before_backward()  # whose gradients a guard has dropped
        []
        >>> scaler.scale_loss(weight.sum()).backward()
        >>> ledger.after_backward()
        >>> ledger.overflowed(optimizer)
        False
        >>> ledger.step(optimizer, optimizer.step)
        >>> weight.item(), ledger.end_batch()
        (0.0, True)
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: DynamicLossScaler,
        masters: MasterWeights | None,
        device: torch.device,
        *,
        accumulate_in_fp32: bool = True,
        reduction: GradientReduction | None = None,
        refuse_bare_steps: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        self.optimizers = list(optimizers)
        self.scaler = scaler
        self.consecutive_skips: dict[Optimizer, int] = dict.fromkeys(optimizers, 0)
        self.batches = 0
        self.notice: bool | Tensor = False
        self.noticed = False
        self._masters = masters
        self._device = device
        self._accumulate_in_fp32 = accumulate_in_fp32
        self._reduction = reduction
        self._keep_gradients = keep_gradients
        self._mailbox = Mailbox()
        # Whether masters have edits to adopt in the next step; on the device until that is answered, None if not known.
        self._edited: bool | Tensor | None = None
        self._edits_are_usual = False  # the last answer told of some
        self._found: dict[Optimizer, Tensor] = {}  # fp32 [1] each: a non-finite gradient was noted
        self._known: dict[Optimizer, tuple[bool, int]] = {}  # what has been read back, and of which gradients
        self._pending: set[Optimizer] = set()  # gradients made by backward that no step has used or skipped
        self._covered: set[Optimizer] = set()  # of these, those whose backward another has stepped or skipped for
        self._window: set[int] = set()  # batches whose gradients are pending
        self._scaled: set[nn.Parameter] = set()  # whose gradient carries the loss scale, if that is not 1 for ever
        self._stepped = self._skipped = False  # in this batch, any optimizer
        self._guards: dict[Optimizer, StepGuard] = {}
        if masters is None and refuse_bare_steps:
            for each in optimizers:
                # Without gradients of a backward it is torch that steps, to make optimizer state before it loads some.
                fault = "on gradients that carry the loss scale or have not been looked at on all ranks"
                self._guards[each] = StepGuard(each, fault, partial(self._pending.__contains__, each))

    def close(self) -> None:
        """Leave the optimizers as found."""
        for guard in self._guards.values():
            guard.remove()

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on with other optimizers, between two steps."""
        for optimizer in optimizers:
            self.consecutive_skips.setdefault(optimizer, 0)
        self.optimizers = list(optimizers)

    @property
    def has_masters(self) -> bool:
        """Whether fp32 masters stand behind 16-bit parameters."""
        return self._masters is not None

    @property
    def window_open(self) -> bool:
        """Whether gradients have been made that no step has used or skipped yet."""
        return bool(self._pending)

    # Backward

    @property
    def in_window(self) -> bool:
        """Whether this batch has made gradients that are pending."""
        return self.batches in self._window

    @property
    def window_is_older(self) -> bool:
        """Whether an earlier batch has."""
        return bool(self._window - {self.batches})

    @torch.no_grad()
    def before_backward(self) -> list[Optimizer]:
        """Make what is there fit to be added to: scaled as the new gradients will be, and wide (or narrow) enough.

        Returns:
            Optimizers whose last gradients were not finite and are gone without a step or a skip, by the user's own
            guard: as good as skipped, and counted so, or the scale would never shrink.
        """
        cleared = []
        for optimizer in self.optimizers:
            params = _with_gradients(optimizer)
            if not params:  # cleared since: a new window
                if self.dropped_by_user(optimizer):
                    cleared.append(optimizer)
                    self.skip(optimizer)
                self._found.pop(optimizer, None)
                self._pending.discard(optimizer)
                continue
            found = self._found.get(optimizer)
            if found is not None and self._keep_gradients:  # cleared to zeros, perhaps: a new window as well
                norms = torch._foreach_norm([local(param.grad).float() for param in params if param.grad is not None])
                self._found[optimizer] = found * (torch.stack(norms).sum() != 0)
            if not self.scaler.is_identity:  # true ones, kept, clipped or assigned, to which scaled ones are added
                true = [param for param in params if param not in self._scaled]
                multiply_gradients(true, self.scaler.scale)
                self._scaled.update(true)
            if self._masters is not None and self._reduction is None:
                if self._accumulate_in_fp32:
                    self._masters.gradients.widen(params)
                else:
                    self._masters.gradients.narrow(params)
        if not self._pending:
            self._window.clear()
        if self._reduction is not None:
            self._reduction.put_aside()
        return cleared

    def dropped_by_user(self, optimizer: Optimizer) -> bool:
        """Whether gradients of ``optimizer`` were not finite, and are gone without a step or a skip that knows of them.

        Waits for the device, where gradients are gone at all. What DDP has averaged is the same on all ranks; shards
        are not, and there all ranks come here.
        """
        found = self._found.get(optimizer)
        if found is None or optimizer not in self._pending or optimizer in self._covered:
            return False
        return bool(over_ranks(found.clone()) if self._masters is None else found)

    def after_backward(self) -> None:
        """Note non-finite gradients, before anybody can hide them."""
        if self._reduction is not None:
            self._reduction.bring_back()
        self._known.clear()
        for optimizer in self.optimizers:
            params = _with_gradients(optimizer)
            if params:
                self._pending.add(optimizer)
                self._covered.discard(optimizer)
                self._window.add(self.batches)
                if not self.scaler.is_identity:
                    self._scaled.update(params)
                self._note(optimizer, params)

    def note(self, optimizer: Optimizer) -> None:
        """Note a non-finite gradient of ``optimizer`` as it is now, without reading it back."""
        params = _with_gradients(optimizer)
        if params:
            self._note(optimizer, params)

    def _note(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        found = found_nonfinite([param.grad for param in params if param.grad is not None], self._device)
        before = self._found.get(optimizer)
        self._found[optimizer] = found if before is None else torch.maximum(before, found)

    # Step

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether there is anything for ``optimizer`` to step with."""
        return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])

    def guarded(self, optimizer: Optimizer) -> bool:
        """Whether there is nothing for ``optimizer`` to step with because the user has dropped what was not finite.

        Raises:
            RuntimeError: If there is something on other ranks.
        """
        if self.has_gradients(optimizer) or optimizer not in self._pending:
            return False
        # DDP's backward leaves gradients on all ranks or on none, so it takes a rank that has cleared its own since for
        # them to differ here. A rank that has made none must not ask: another that is still in its backward would take
        # the question for a gradient. That one is found out by the number of its batch, in its next step.
        return self.overflowed(optimizer) if several_ranks() else self.dropped_by_user(optimizer)

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether any rank has noted a non-finite gradient of ``optimizer``. Waits for the device.

        One wait tells it for all optimizers whose gradients are there, as long as nobody writes to them.

        Raises:
            RuntimeError: If other ranks are in another batch, or some have gradients and some have not.
        """
        known, self._edited = self._known.pop(optimizer, None), None
        if known is not None and known[1] == _version(optimizer):
            return known[0]
        flags, looked = self._agree(optimizer)
        found, edited = self._answer(optimizer, flags.tolist())
        self._edited = edited if looked else None
        return found

    def leaves_it_to_the_device(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` can be queued before the host knows whether it is to step, see :meth:`ask`.

        It can if it takes a flag that makes the step do nothing at all, and nobody wrote to gradients since backward.
        """
        if self._masters is None or self._keep_gradients or optimizer in self._known:
            return False
        return self._masters.takes_flag(optimizer)

    def ask(self, optimizer: Optimizer) -> Tensor:
        """What :meth:`overflowed` tells, as fp32 [], 1 if so, for :meth:`step`; does not wait.

        It is 1, too, if weights have been edited since the last step: that has to be known on the host before a step.
        """
        flags, looked = self._agree(optimizer)
        self._mailbox.send(flags)
        skip = flags[self.optimizers.index(optimizer)]
        self._edited = None
        if looked and not self._edits_are_usual:  # where they are, as of weights that are clipped, masters always adopt
            edits = flags[-1]
            skip, self._edited = torch.maximum(skip, edits), edits != 0
        return skip

    @property
    def held_back(self) -> bool:
        """After :meth:`answered`: whether the step did nothing because weights had been edited, and has to be made."""
        return self._edited is True

    def answered(self, optimizer: Optimizer) -> bool:
        """What :meth:`overflowed` tells, after :meth:`ask`, and after a step that took its answer.

        Waits for the end of backward, while the device has that step to do.

        Raises:
            RuntimeError: As :meth:`overflowed` does.
        """
        found, edited = self._answer(optimizer, self._mailbox.receive())
        self._edited = True if isinstance(self._edited, Tensor) and edited and not found else None
        if not (found or self.held_back):
            self._took(optimizer)
        return found

    def _agree(self, optimizer: Optimizer) -> tuple[Tensor, bool]:
        """The flags of all optimizers, and what else :meth:`_answer` wants to know, the largest of all ranks each.

        Returns:
            Fp32 [n]: the flags; the notice, where the host does not know it; edits, if they were looked for; with
            several ranks, where these stand. And whether edits were looked for.
        """
        if self._keep_gradients:  # the user may have written to them since backward
            for each in self.optimizers:
                self.note(each)
        edited = None if self._masters is None else self._masters.edited()
        zero = torch.zeros(1, dtype=torch.float32, device=self._device)
        flags = [self._found.get(each, zero) for each in self.optimizers]
        if self._asks_about_notice:
            flags.append(zero + self.notice)
        if edited is not None:
            flags.append(edited.float().view(1))
        sent = torch.cat(flags) if len(flags) > 1 else flags[0]
        return send(sent, self._place(optimizer)) if several_ranks() else sent, edited is not None

    @property
    def _asks_about_notice(self) -> bool:
        return several_ranks() or isinstance(self.notice, Tensor)

    def _answer(self, optimizer: Optimizer, values: list[float]) -> tuple[bool, bool]:
        """Whether ``optimizer`` has to skip, and whether there are edits, from what :meth:`_agree` gave.

        Remembers what it says of the others.
        """
        if several_ranks():
            values = receive(values, self._place(optimizer), type(optimizer).__name__)
        count = len(self.optimizers)
        found = dict(zip(self.optimizers, values[:count], strict=True))
        notice, *looked = values[count:] if self._asks_about_notice else [self.notice, *values[count:]]
        edits = any(looked)
        self.noticed, self.notice = self.noticed or bool(notice), False
        self._known = {each: (bool(found[each]), _version(each)) for each in self._pending if each is not optimizer}
        self._edits_are_usual = edits
        return bool(found[optimizer]), edits

    def _place(self, optimizer: Optimizer) -> Place:
        index = self.optimizers.index(optimizer)
        return Place(self.batches, index, len(self.optimizers), self.has_gradients(optimizer))

    def agreed(self, flag: Tensor | None) -> bool:
        """Whether ``flag``, bool [], is true on any rank. Waits for the device; all ranks must ask."""
        own = torch.zeros((), device=self._device) if flag is None else flag.float()
        return bool(over_ranks(own))

    def value(self, param: nn.Parameter) -> Tensor:
        """The fp32 value of a parameter, or of this rank's part of it."""
        return local(param.detach()) if self._masters is None else self._masters.peek(param)

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients of ``optimizer`` fp32 and true, each once."""
        params = _with_gradients(optimizer)
        if self._masters is not None:
            self._masters.gradients.allow(param for group in optimizer.param_groups for param in group["params"])
            self._masters.gradients.unscale(params)
        if not self.scaler.is_identity:
            scaled = [param for param in params if param in self._scaled]
            multiply_gradients(scaled, self.scaler.inverse_scale())
            self._scaled.difference_update(scaled)

    def step(self, optimizer: Optimizer, call: Callable[[], Any], skip: Tensor | None = None) -> Any:
        """Step, with gradients that :meth:`unscale` has made true or that are still scaled.

        Args:
            optimizer: Which.
            call: Calls its ``step``.
            skip: From :meth:`ask`: nothing changes if it is 1. What became of it is accounted for by :meth:`answered`,
                and until then gradients stay.
        """
        masters, inverse_scale = self._masters, None
        edited = self._edited
        if not isinstance(edited, Tensor):
            self._edited = None
        if not self.scaler.is_identity:
            # Not in a step that may do nothing: it unscales some gradients where they are, and would do so again.
            in_passing = masters is not None and not self._keep_gradients and not isinstance(edited, Tensor)
            if in_passing and all(param in self._scaled for param in _with_gradients(optimizer)):
                inverse_scale = self.scaler.inverse_scale()  # bucket by bucket
            else:
                self.unscale(optimizer)
        with self._guards[optimizer].lifted() if optimizer in self._guards else nullcontext():
            output = call() if masters is None else masters.step(optimizer, call, inverse_scale, skip, edited)
        if skip is None:
            self._took(optimizer)
        return output

    def _took(self, optimizer: Optimizer) -> None:
        self._stepped = True
        self.consecutive_skips[optimizer] = 0
        self._close(optimizer, drop=not self._keep_gradients and self._masters is not None)

    def skip(self, optimizer: Optimizer) -> None:
        """Drop the gradients of ``optimizer`` without a step."""
        self._skipped, self._edited = True, None
        self.consecutive_skips[optimizer] += 1
        self._close(optimizer, drop=True)

    def end_batch(self) -> bool | None:
        """Account for the batch: one update of the scale, if any optimizer was called.

        Returns:
            Whether any optimizer stepped, or None if none was called.
        """
        if not (self._stepped or self._skipped):
            return None
        stepped, skipped = self._stepped, self._skipped
        self._stepped = self._skipped = False
        before = self.scaler.scale
        self.scaler.update(skipped, stepped=stepped)
        if self._scaled and not self.scaler.is_static:
            # What accumulates over batches goes on with the new scale.
            multiply_gradients(self._scaled, self.scaler.scale / before)
        return stepped

    # Checkpoints inside a window

    def true_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Copies of all gradients, fp32 and without the scale, by name."""
        inverse = self.scaler.inverse_scale()
        grads = {}
        for name, param in named:
            if param.grad is not None:
                grad = whole(param.grad.detach().float())
                grads[name] = grad * inverse.to(grad.device) if param in self._scaled else grad.clone()
        return grads

    @torch.no_grad()
    def put_true_gradients(
        self, named: Iterable[tuple[str, nn.Parameter]], grads: Mapping[str, Tensor], *, instead: bool = False
    ) -> None:
        """Go on with gradients that :meth:`true_gradients` saved, at whatever scale this run has.

        Args:
            named: All parameters.
            grads: By name.
            instead: Of those that a backward has just made.
        """
        if instead:
            for optimizer in self.optimizers:
                self._close(optimizer, drop=True)
            self._window.add(self.batches)
        self._window.add(self.batches - 1)
        for name, param in named:
            if name in grads:
                grad = shard_like(grads[name].to(param.device), param)
                if not self.scaler.is_identity:
                    grad = grad * self.scaler.scale
                    self._scaled.add(param)
                if not (self._accumulate_in_fp32 or self._reduction is not None):
                    grad = grad.to(param.dtype)
                if grad.dtype != param.dtype:
                    assert self._masters is not None
                    self._masters.gradients.give(param, grad)
                else:
                    param.grad = grad
        self._pending.update(optimizer for optimizer in self.optimizers if self.has_gradients(optimizer))

    def _close(self, optimizer: Optimizer, drop: bool) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if drop:
            if self._masters is not None:
                self._masters.gradients.release(params)
            else:
                for param in params:
                    param.grad = None
            if self._scaled:
                self._scaled.difference_update(params)
        self._found.pop(optimizer, None)
        self._known.pop(optimizer, None)
        self._pending.discard(optimizer)
        self._covered = set(self._pending)
        if not self._pending:
            self._window.clear()


def _with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def _version(optimizer: Optimizer) -> int:
    """A number that changes with every write to a gradient."""
    grads = [param.grad for param in _with_gradients(optimizer) if param.grad is not None]
    return sum(id(grad) + local(grad)._version for grad in grads)
