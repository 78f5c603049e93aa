"""Learning-rate schedules for the length of fit: they rest while a step is skipped.

Why it exists: after n real steps a schedule must be where a run without a skip has it after n steps. Lightning asks it
after every batch that may step, the user of manual optimization whenever he likes, and neither knows of skips.

What it leaves out: schedules of every step in automatic optimization, which Lightning advances through a hook of the
module (:class:`lightning_mixprec.guests.TrainingModule`), and per-epoch ones, which advance whatever was skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

# Hooks of a training batch, `training_step` among them: a schedule that is stepped in one of these is a per-step one.
_OF_A_BATCH = frozenset(
    {
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
        "on_train_batch_end",
    }
)


class RealFrequency(int):
    """The ``frequency`` of a schedule, counted in real steps.

    Lightning advances a schedule of frequency f if ``batches % f == 0``, in batches of the epoch, at the end of every
    accumulation window. Dividing by this number gives the same answers, but one after the other to the windows that
    have stepped: those that have not push theirs back. So epochs whose length is no multiple of f, and accumulation,
    count as in stock Lightning. The division is asked, and not the call that follows it, because the frequency is also
    how long a ReduceLROnPlateau may wait for its metric: Lightning looks for that in between.

    Args:
        frequency: Batches.
        advances: Tells whether the window that has just ended stepped.

    Attributes:
        pushed_back: Stock Lightning's answers for windows that were skipped, the first first: one for each skip.

    Example:
        >>> frequency = RealFrequency(2, lambda: stepped)
        >>> due = []
        >>> for batch, stepped in enumerate([True, False, True, True, True], start=1):
        ...     due.append(batch % frequency == 0)
        >>> due, frequency == 2
        ([False, False, True, False, True], True)
    """

    pushed_back: deque[bool]
    _advances: Callable[[], bool]

    def __new__(cls, frequency: int, advances: Callable[[], bool]) -> RealFrequency:
        """As ``int`` does, which has no ``__init__``."""
        self = super().__new__(cls, frequency)
        self.pushed_back = deque()
        self._advances = advances
        return self

    def __rmod__(self, batches: int) -> int:
        self.pushed_back.append(batches % int(self) == 0)
        return 0 if self._advances() and self.pushed_back.popleft() else 1

    def __reduce__(self) -> Any:
        return (int, (int(self),))  # a copy of a schedule's configuration is a plain one


class RealFrequencies:
    """Frequencies above 1 of per-step schedules, in real steps until :meth:`remove`.

    Args:
        configs: Lightning's ``LRSchedulerConfig`` of each schedule.
        advances: Tells whether the window that has just ended stepped.
    """

    def __init__(self, configs: Iterable[Any], advances: Callable[[], bool]) -> None:
        self._advances = advances
        self.follow(configs)

    def follow(self, configs: Iterable[Any]) -> None:
        """Go on with ``configs``, of schedules that have just been made."""
        self._configs = list(configs)
        self._given = [config.frequency for config in self._configs]
        for config in self._configs:
            if config.interval == "step" and config.frequency > 1:
                config.frequency = RealFrequency(config.frequency, self._advances)

    def state_dict(self) -> list[list[bool]]:
        """What skips have pushed back, by schedule; empty if they have not."""
        state = [list(getattr(config.frequency, "pushed_back", ())) for config in self._configs]
        return state if any(state) else []

    def load_state_dict(self, state: Iterable[Iterable[bool]]) -> None:
        """Go on in the same phase."""
        for config, pushed_back in zip(self._configs, state, strict=False):  # nothing for those without a frequency
            if isinstance(config.frequency, RealFrequency):
                config.frequency.pushed_back = deque(pushed_back)

    def remove(self) -> None:
        """Leave the configurations as found."""
        for config, frequency in zip(self._configs, self._given, strict=True):
            config.frequency = frequency


def in_a_batch(module: Any) -> bool:
    """Whether a hook of a training batch runs. At the end of an epoch a schedule advances, whatever was skipped."""
    return module._current_fx_name in _OF_A_BATCH


def rest_over_skips(scheduler: Any, rests: Callable[[Any], bool]) -> Any:
    """Let ``scheduler.step()`` do nothing where ``rests(optimizer)`` says so."""
    base: Any = type(scheduler)
    reduced = base.__reduce_ex__

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not rests(getattr(self, "optimizer", None)):
            base.step(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # The class does not exist under its name in any module: what is copied or pickled is a plain schedule.
        make, args, *rest = reduced(self, protocol)
        return (_plain, (make, tuple(base if arg is type(self) else arg for arg in args)), *rest)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    scheduler.__class__ = type(base.__name__, (base,), {**names, "step": step, "__reduce_ex__": reduce})
    return scheduler


def advance_always(scheduler: Any) -> None:
    """Undo :func:`rest_over_skips`."""
    scheduler.__class__ = type(scheduler).__bases__[0]


def _plain(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return make(*args)
