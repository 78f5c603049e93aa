"""Refuses steps of an optimizer that go past Lightning.

Why it exists: such a step works on 16-bit weights or on gradients that carry the loss scale, and nobody has looked
whether they are finite. Nothing would show it.

What it leaves out: steps that are taken rightly (:mod:`lightning_mixprec.ledger`, :mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Guard:
    """A step hook that rests inside :meth:`lifted`.

    Args:
        register: Registers it, and returns the handle that removes it.
        hook: Called before a step.
    """

    def __init__(self, register: Callable[[Any], Any], hook: Callable[..., None]) -> None:
        self._lifted = False
        self._handle = register(hook)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Around a step that is taken rightly, which may be one of an optimizer that steps others."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def remove(self) -> None:
        """Leave torch as found."""
        self._handle.remove()


class StepGuard(_Guard):
    """Lets an optimizer step inside :meth:`lifted` alone.

    Args:
        optimizer: Which.
        fault: What a step past Lightning would do wrong, to follow "was called past Lightning, ".
        watches: Whether it is on guard at all, asked at each step; None: always.

    Raises:
        RuntimeError: From ``optimizer.step()``.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> guard = StepGuard(optimizer, "on 16-bit weights")
        >>> with guard.lifted():
        ...     optimizer.step()
        >>> try:
        ...     optimizer.step()
        ... except RuntimeError as error:
        ...     print(str(error)[:59])
        SGD.step() was called past Lightning, on 16-bit weights. St
        >>> guard.remove()
    """

    def __init__(self, optimizer: Optimizer, fault: str, watches: Callable[[], bool] | None = None) -> None:
        self._fault, self._watches = fault, watches
        self._name = type(optimizer).__name__
        super().__init__(optimizer.register_step_pre_hook, self.hook)

    def hook(self, *_: Any) -> None:
        """The optimizer's step hook."""
        if not self._lifted and (self._watches is None or self._watches()):
            raise RuntimeError(
                f"{self._name}.step() was called past Lightning, {self._fault}. Step what `self.optimizers()` returns, "
                "not what `use_pl_optimizer=False` or `trainer.optimizers` gives."
            )


class StrangerGuard(_Guard):
    """Has somebody look at every optimizer that is stepped anywhere, but inside :meth:`lifted`.

    Args:
        look: Is given the optimizer before it steps, and may refuse it.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> guard = StrangerGuard(lambda stepped: print(type(stepped).__name__))
        >>> optimizer.step()
        SGD
        >>> guard.remove()
    """

    def __init__(self, look: Callable[[Optimizer], None]) -> None:
        self._look = look
        super().__init__(register_optimizer_step_pre_hook, self.hook)

    def hook(self, optimizer: Optimizer, *_: Any) -> None:
        """The step hook of all optimizers."""
        if not self._lifted:
            self._look(optimizer)
