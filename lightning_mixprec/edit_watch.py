"""Says when user code changes 16-bit weights by hand and it is lost, or averages their roundings.

Why it exists: nothing shows afterwards that `p.mul_(0.9999)` was ever called in a hook: a decay of one's own, noise, an
average with a teacher. A run of it would end well, without it.

It has to be seen while it happens: in some batches, but for backward, torch hands every operation to a dispatch mode.
That is after 0, 1, 2, 4, 8, ... steps, at the end of an epoch and in batches that follow if the parameters' versions
show that they are written to; in forward, which has many operations, once after 1, 4, 16, ... steps. `p.data = ...` is
no operation; memory that was put in place of another and holds the same is looked at then, too.

What it leaves out: values that are put there (`copy_`, `clamp_`, `load_state_dict`), which are right in 16 bits and
which masters adopt, unless hardly anything of the change arrives, or they come from 16-bit copies, again and again;
what is written in forward, where norms are enforced again and again and the masters get there when 16 bits show it,
but for averages, as of a teacher; and writes that torch does not see, through NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_mixprec.edits_seen import LostEdits, RoundedAverages, RoundedCopies
from lightning_mixprec.in_fp32 import written_to
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.weight_memory import NewMemory, Weights

_TIMES = 3  # batches in which values that hardly arrive are put, before it is taken for a change that was to be
_FOLLOWED = 256  # batches, at least, once versions have shown writes
_ALL_FOLLOWED = 2048  # of a fit: who writes to weights in every batch, and rightly, shall not be watched for ever
_LOST = (
    "changed by hand, outside the optimizer, and of the change 16 bits show too little: a small decay, average or "
    "noise rounds away in them. Write into the fp32 weights: `with trainer.precision_plugin.fp32_weights(pl_module) as "
    "weights: weights[name].mul_(...)`. Or keep the layer in fp32 with PrecisionPolicy(fp32=[...])."
)
_ROUNDED = (
    "averaged by hand, and what was read for it are their 16-bit roundings, not the fp32 weights. Use "
    "lightning_mixprec.MasterWeightAveraging, or read `with trainer.precision_plugin.fp32_weights(pl_module) as "
    "weights: average.lerp_(weights[name], 0.001)`, where the average is fp32, too."
)
_COPIED = (
    "put back, again and again, from copies that are 16-bit, as a clone of a parameter is while it trains, and what 16 "
    "bits do not show of the fp32 weights is lost each time. Keep `pl_module.state_dict()`, which is fp32, and load "
    "it. Or write into `with trainer.precision_plugin.fp32_weights(pl_module) as weights: weights[name].copy_(...)`."
)


class EditWatch(TorchDispatchMode):
    """Watches 16-bit weights between steps.

    Args:
        masters: What stands behind them.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1, bias=False)
        >>> masters = MasterWeights(net, {"weight": torch.bfloat16})
        >>> masters.allocate()
        >>> watch = EditWatch(masters)
        >>> watch.open_()
        >>> _ = net.weight.data.mul_(0.9999)
        >>> watch.close_()
        >>> next(watch.reports(net))[:41]
        "1 parameter ('weight'): changed by hand, "
    """

    supports_higher_order_operators = True  # hands them on

    def __init__(self, masters: MasterWeights) -> None:
        super().__init__()
        self._masters = masters
        self._weights = Weights()
        self._new = NewMemory()
        self._lost, self._rounded, self._copied = LostEdits(_TIMES), RoundedAverages(), RoundedCopies(_TIMES)
        self._unsaid: list[tuple[LostEdits | RoundedAverages | RoundedCopies, str]] = [
            (self._lost, _LOST),
            (self._rounded, _ROUNDED),
            (self._copied, _COPIED),
        ]
        self._inside: nn.Module | None = None  # whose forward it is that is looked at
        self._steps = self._follow = 0
        self._left = _ALL_FOLLOWED
        self._versions = -1  # sum of them, as of the last look
        self._due, self._due_inside = True, False
        self._stepped = self._entered = self._open = False
        self._process = os.getpid()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run compiled."""
        return True

    def begin_batch(self) -> None:
        """A batch begins; decides whether it is looked at, also after its step. Closed by now."""
        self._lost.end_batch()
        self._copied.end_batch()
        if not self._stepped:
            return
        self._stepped = False
        self._steps += 1
        if self._follow:
            self._follow -= 1
            self._left -= 1
        self._due = self._steps & (self._steps - 1) == 0
        self._due_inside = self._due and self._steps.bit_length() % 2 == 1
        if self._due:
            before, self._versions = self._versions, sum(param._version for param in self._masters)
            if before not in (-1, self._versions):
                # Long enough for whatever comes every so many steps.
                self._follow = min(max(_FOLLOWED, self._steps // 4), self._left)

    def stepped(self) -> None:
        """An optimizer has made a step in this batch."""
        self._stepped = True
        self._lost.stepped()

    def open_(self, *, always: bool = False, inside: nn.Module | None = None) -> None:
        """User code may come now, and no forward or backward: before these, :meth:`close_`.

        Args:
            always: Whatever the batch.
            inside: But this one's forward comes, and what it keeps of averages is looked at.
        """
        wanted = self._due_inside if inside is not None else self._due or self._follow or always
        if self._open or not self._unsaid or not wanted:
            return
        self._due_inside = False
        if not self._entered:
            if _get_current_dispatch_mode_stack():
                return  # the user's, who could not leave it before this one
            self.__enter__()
            self._entered = True
        self._weights = Weights(self._masters.buckets)
        self._open, self._inside = True, inside

    def close_(self, *, for_a_while: bool = False) -> None:
        """Stop looking, and judge what was seen. Waits for the device if there was something.

        Args:
            for_a_while: What was put is there to be looked at, as averages are in a validation.
        """
        if self._entered and _get_current_dispatch_mode_stack()[-1:] == [self]:  # else beneath one of the user's
            self.__exit__(None, None, None)
            self._entered = False
        if self._open:
            self._open, self._weights = False, Weights()
            self._lost.look_at_replaced(self._masters.buckets)
            self._lost.end_window(forget_puts=for_a_while)
            if for_a_while:
                self._copied.forget()
            inside, self._inside = self._inside, None
            self._rounded.judge([] if inside is None else chain(inside.parameters(), inside.buffers()))
            self._new.clear()

    def reports(self, module: nn.Module) -> Iterator[str]:
        """Warnings about ``module``, each once."""
        for finder, words in [(finder, words) for finder, words in self._unsaid if finder.found]:
            self._unsaid.remove((finder, words))
            names = [name for name, param in module.named_parameters() if param in finder.found]
            shown = f"{', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}"
            yield f"{len(names)} parameter{'s' * (len(names) != 1)} ({shown}): {words}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Do as asked, and look at it."""
        kwargs = kwargs or {}
        if not self._open or os.getpid() != self._process:  # a worker of a loader, forked meanwhile
            return func(*args, **kwargs)
        inside = self._inside is not None
        if inside and written_to(func, args, kwargs) and not self._rounded.mixes(func, args, kwargs, self._weights):
            result = func(*args, **kwargs)
        else:
            self._copied.look(func, args, kwargs, self._weights, self._new)
            result = self._lost.call(func, args, kwargs, self._weights)
        self._rounded.look(func, args, kwargs, result, self._weights, self._new, inside=inside)
        return result
