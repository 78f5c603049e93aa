"""When to look for the layer behind an overflow, and how all ranks come to one opinion about it.

Why it exists: most overflows are routine, the price of a large loss scale, and cost nothing but a smaller one. The
others come back however small the scale is. Telling them apart, watching the batches after such an overflow, and making
what one rank has seen known to all of them is a small state machine of its own.

What it leaves out: looking (:mod:`lightning_mixprec.overflow`), counting (:mod:`lightning_mixprec.fallback`) and every
change to the model (:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mixprec.apart import in_backward, without_checkpointing, without_hooks
from lightning_mixprec.inside import InnerOverflow
from lightning_mixprec.magnitudes import nonfinite
from lightning_mixprec.opaque import is_transformed
from lightning_mixprec.overflow import Verdict, Watch
from lightning_mixprec.ranks import several_ranks
from lightning_mixprec.replay import Replayer, meets_other_ranks
from lightning_mixprec.scaler import DynamicLossScaler

log = logging.getLogger(__name__)

_ROUTINE_SKIPS = 2  # in a row, with a finite loss and a scale that can still shrink
_FEWEST, _MOST = 8, 512  # batches to watch after an overflow that is not routine


class Diagnosis:
    """Watches batches after an overflow that is not routine, and gathers what they show.

    An overflow is routine if the loss was finite, the scale can shrink and is above 1, and no more than two batches in
    a row were skipped. After any other, the following batches are watched: 8 of them, or twice as many as the last
    time if that was in vain, at most 512, for faults that come and go.

    Args:
        model: The model.
        scaler: Its loss scale.
        device: Where it is.
        replayer: Makes calls again.
        in_fp32: Names of modules that compute in fp32.
        repair: Let a watched batch go on with the fp32 result of a layer that overflowed.

    Attributes:
        watch: What watches the current batch, or None.
        training_step: Set while one runs; calls of the network outside of it are looked at by themselves.

    Example:
        >>> replayer = Replayer("cpu", torch.float16)
        >>> diagnosis = Diagnosis(nn.Linear(1, 1), DynamicLossScaler(), torch.device("cpu"), replayer)
        >>> diagnosis.after_skip(loss_is_finite=True, skips=1)
        >>> diagnosis.begin_batch()
        >>> diagnosis.watch is None
        True
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: DynamicLossScaler,
        device: torch.device,
        replayer: Replayer,
        *,
        in_fp32: Collection[str] = (),
        repair: bool = False,
    ) -> None:
        self.watch: Watch | None = None
        self.training_step = False
        self.in_fp32 = set(in_fp32)
        self._model, self._scaler, self._device, self._replayer = model, scaler, device, replayer
        self._repair = repair
        # With a patience of one batch there is no batch to watch after the first overflow.
        self._always = scaler.max_consecutive_skips == 1
        self._attention = _FEWEST
        self._left = 0  # batches still to be watched
        self._suspects: set[str] = set()  # while batches are watched, and those of them that a trial has cleared
        self._cleared: set[str] = set()
        self._inspect: list[str] = []  # modules that overflowed inside, to be compared with fp32
        self._acquitted: set[str] = set()  # of these, those for which it did not matter
        self._batches = 0
        self._checkup: InnerOverflow | None = None
        self._elsewhere: list[Verdict] = []  # seen outside of training steps
        self._sentinels: list[Any] = []
        self._warned: set[str] = set()

    # Training batches

    def begin_batch(self) -> None:
        """Start watching, if there is reason to."""
        if self.watch is not None:
            self.watch.clear()
        elif self._left or self._always:
            scale = float(self._scaler.scale)
            smallest = scale if self._scaler.is_static else max(1.0, self._scaler.min_scale)
            self.watch = Watch(
                self._model,
                self._replayer,
                in_fp32=self.in_fp32,
                suspects=self._suspects,
                inspect=self._inspect,
                cleared=self._cleared,
                repair=self._repair,
                rescale=min(smallest / scale, 1.0),
            )

    def checkup(self) -> AbstractContextManager[Any]:
        """Around a forward: looks inside the layers at growing intervals (batch 1, 2, 4, ... 1024, 2048, 3072, ...).

        Only fp16 overflows at magnitudes that a sound network has.
        """
        self._batches += 1
        due = self._batches % 1024 == 0 or (self._batches & (self._batches - 1) == 0 and self._batches < 1024)
        if not due or self.watch is not None or self._replayer.compute != torch.float16:
            return nullcontext()
        self._checkup = InnerOverflow(self._model, self._replayer.compute)
        return self._checkup

    @property
    def notice(self) -> bool | Tensor:
        """Whether this rank has seen something that the others should hear of, bool [], maybe still on the device."""
        found = self._checkup.found if self._checkup is not None else None
        return bool(self._elsewhere) if found is None else found | bool(self._elsewhere)

    def after_skip(self, *, loss_is_finite: bool, skips: int) -> None:
        """Have the next batches watched, unless this overflow was routine. All ranks must say the same.

        Args:
            loss_is_finite: Whether the loss before scaling was.
            skips: Batches skipped in a row, this one included.
        """
        scale_can_help = not self._scaler.is_static and float(self._scaler.scale) > max(1.0, self._scaler.min_scale)
        if not (loss_is_finite and scale_can_help and skips <= _ROUTINE_SKIPS):
            self._left = max(self._left, self._attention)

    def end_batch(self, *, skipped: bool, noticed: bool) -> list[Verdict]:
        """What this batch has shown, on any rank: the same list on all of them.

        Args:
            skipped: Whether the batch was skipped.
            noticed: Whether any rank has seen something outside of training steps.
        """
        watch, self.watch = self.watch, None
        checkup, self._checkup = self._checkup, None
        if watch is None and not noticed:
            return []
        own, self._elsewhere = self._elsewhere, []
        if checkup is not None:
            if self._batches % 1024 == 0:
                self._acquitted.clear()
            self._inspect = [name for name in checkup.modules() if name not in self._acquitted | self.in_fp32]
        if watch is not None:
            watch.stop()
            own = watch.verdicts + own
            self._suspects.update(watch.suspects_found)
            self._cleared = watch.cleared
            self._inspect = [name for name in self._inspect if name not in self.in_fp32]
        found = _agreed(own)
        self._plan_ahead(watched=watch is not None, good=not (found or skipped), found=bool(found))
        return found

    def _plan_ahead(self, *, watched: bool, good: bool, found: bool) -> None:
        """How many batches to watch from here on; the same on all ranks."""
        if found:
            self._attention = _FEWEST
        if not watched:  # what was noticed calls for a closer look
            self._left = max(self._left, self._attention)
        elif not good:
            self._left = max(self._left - 1, 1)
        elif self._left:
            self._left -= 1
            if not self._left:
                self._attention = min(2 * self._attention, _MOST)
                self._acquitted.update(self._inspect)
                self._inspect, self._suspects, self._cleared = [], set(), set()

    def stop(self) -> None:
        """Remove every hook."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        for handle in self._sentinels:
            handle.remove()
        self._sentinels.clear()

    # Validation, sampling, anything that calls the network without a backward to show the overflow

    def guard(self, networks: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at what ``networks`` return when they are called outside of training steps."""
        for prefix, network in networks:
            handle = network.register_forward_hook(_Sentinel(self, prefix), with_kwargs=True)
            self._sentinels.append(handle)

    def examine(self, prefix: str, network: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A network's output outside of training: None if it is finite, or else what to return in its place."""
        if self._replayer.compute == torch.float32 or not bool(nonfinite(output)):  # the latter waits for the device
            return None
        if meets_other_ranks(network):  # whose outputs may be finite: they would not come
            if prefix not in self._warned:
                self._warned.add(prefix)
                log.warning("The output of %r outside of a training step is not finite.", prefix)
            return None
        # Hooks have been called; and a backward would compute again without what is repaired here.
        with without_hooks(network), without_checkpointing():
            watch = Watch(network, self._replayer, in_fp32=self.in_fp32, repair=self._repair, prefix=prefix)
            try:
                with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                    better = network(*args, **kwargs)
            finally:
                watch.stop()
        known = {verdict.layer for verdict in self._elsewhere}
        self._elsewhere += [replace(v, training=False) for v in watch.verdicts if v.layer not in known]
        for verdict in watch.verdicts:
            self.warn(verdict, "outside of a training step")
        return better if watch.verdicts and self._repair else None

    def warn(self, verdict: Verdict, where: str) -> None:
        """Name a layer that overflows, once."""
        if verdict.layer not in self._warned:
            self._warned.add(verdict.layer)
            again = "it moves there once this has happened again" if self._repair else "fallback='auto' moves it there"
            text = "Overflow %s in %s. PrecisionPolicy(fp32=[%r]) keeps it in fp32; %s."
            log.warning(text, where, verdict, verdict.layer, again)


class _Sentinel:
    """The forward hook of :meth:`Diagnosis.guard`. A copy of the network has none."""

    def __init__(self, diagnosis: Diagnosis | None = None, prefix: str = "") -> None:
        self._diagnosis, self._prefix = diagnosis, prefix

    def __call__(self, network: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._diagnosis is None or torch.compiler.is_compiling():
            return None
        if self._diagnosis.training_step or in_backward() or is_transformed():
            return None
        diagnosis, self._diagnosis = self._diagnosis, None  # the network is called again inside
        try:
            return diagnosis.examine(self._prefix, network, args, kwargs, output)
        finally:
            self._diagnosis = diagnosis

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sentinel:
        return _Sentinel()

    def __reduce__(self) -> Any:
        return (_Sentinel, ())


def _agreed(own: list[Verdict]) -> list[Verdict]:
    """The verdicts of all ranks, each layer once, in the order of the ranks."""
    everyone = [own]
    if several_ranks():
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
    return list({verdict.layer: verdict for each in reversed(everyone) for verdict in reversed(each)}.values())[::-1]
