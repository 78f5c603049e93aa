"""The loss scale: a small state machine, whose scale is on the training device and whose counters are on the host.

Why it exists: fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward and the
gradients are divided by it before the optimizer sees them. The scale shrinks when a gradient overflowed and grows
after a run of good steps. ``torch.amp.GradScaler`` does this once per *optimizer*, without a floor or a ceiling, and
keeps its settings inside its state; training loops need it once per *batch*, bounded, with settings that stay the
user's. The host has to know of an overflow anyway, to skip what goes with a step, so a batch costs the device nothing
but a scale that has changed.

What it leaves out: looking at gradients, agreeing over ranks and deciding what to do about a skipped step. Those
belong to whoever owns the loop (:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_COUNTERS = ("growth_tracker", "hysteresis_tracker", "real_steps", "skipped_steps", "consecutive_skips")


class DynamicLossScaler:
    """Loss scale with bounds, hysteresis and step counters.

    One call of :meth:`update` per training batch, whatever the number of optimizers:

    * batch overflowed: ``hysteresis_tracker -= 1``; once it is used up,
      ``scale = max(scale * backoff_factor, min_scale)``
    * batch was good: after ``growth_interval`` good batches in a row,
      ``scale = min(scale * growth_factor, max_scale)`` and the hysteresis is refilled.

    The scheme is the one of Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740, section 3.2) with the
    hysteresis of Megatron-LM. Powers of two make scaling and unscaling exact and are the advice; other values work.

    Args:
        init_scale: First scale. The default, 2^15, is the largest power of two that fp16 itself can hold (2^16
            exceeds 65504, so the very first gradient would overflow).
        growth_factor: Multiplier after ``growth_interval`` good batches; at least 1. 1 never grows.
        backoff_factor: Multiplier after an overflow; in (0, 1]. 1 never shrinks.
        growth_interval: Good batches in a row before the scale grows.
        hysteresis: Overflows tolerated before the scale shrinks; the default 1 shrinks at the first.
        min_scale: Floor of a scale that can shrink. The default, 2^-14, is far below anything that halving can
            cure; reaching it means the trouble is elsewhere.
        max_scale: Ceiling of a scale that can grow. The default, 2^24, keeps it finite and exact on tiny losses
            (https://github.com/pytorch/pytorch/issues/98828).
        max_consecutive_skips: Skipped batches in a row after which training stops with an error.

    Raises:
        ValueError: If a value is outside its range; the message names the value and the range.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=1024, growth_interval=2)
        >>> scaler.update(True)  # an overflow
        >>> float(scaler.scale), scaler.skipped_steps
        (512.0, 1)
        >>> for _ in range(2):
        ...     scaler.update(False)
        >>> float(scaler.scale), scaler.real_steps
        (1024.0, 2)
    """

    scale: Tensor  # fp32 [], what the loss of the next batch is multiplied by
    growth_tracker: int  # good batches in a row since the last growth or overflow
    hysteresis_tracker: int  # overflows left before the scale shrinks
    real_steps: int  # batches whose update was taken
    skipped_steps: int  # batches whose update was skipped
    consecutive_skips: int  # skipped batches since the last good one

    def __init__(
        self,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int = 50,
    ) -> None:
        numbers = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
        for name, value in {**numbers, "min_scale": min_scale, "max_scale": max_scale}.items():
            _check(name, value, isinstance(value, Real) and not isinstance(value, bool), "a number")
        counts = {"growth_interval": growth_interval, "hysteresis": hysteresis}
        for name, value in {**counts, "max_consecutive_skips": max_consecutive_skips}.items():
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            _check(name, value, whole and value >= 1, "a whole number, at least 1")
        in_fp32 = "a positive number that fp32 holds, and its inverse: from 2**-126 to 2**126, such as 2**15"
        _check("init_scale", init_scale, 2.0**-126 <= init_scale <= 2.0**126, in_fp32)
        _check(
            "growth_factor", growth_factor, 1 <= growth_factor < math.inf, "at least 1 (1 keeps the scale from growing)"
        )
        _check(
            "backoff_factor", backoff_factor, 0 < backoff_factor <= 1, "in (0, 1] (1 keeps the scale from shrinking)"
        )
        _check("min_scale", min_scale, 2.0**-126 <= min_scale < math.inf, "at least 2**-126, such as 2**-14")
        _check(
            "max_scale",
            max_scale,
            min_scale <= max_scale < 2.0**127,
            f"finite in fp32 and at least min_scale={min_scale!r}",
        )
        # A bound that the scale can never move towards does not apply to it: a static scale may have any value.
        can_grow, can_shrink = growth_factor > 1, backoff_factor < 1
        in_bounds = (init_scale >= min_scale or not can_shrink) and (init_scale <= max_scale or not can_grow)
        _check("init_scale", init_scale, in_bounds, f"between min_scale={min_scale!r} and max_scale={max_scale!r}")
        self.init_scale = float(init_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self.hysteresis = int(hysteresis)
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self.max_consecutive_skips = int(max_consecutive_skips)
        self.reset()

    def reset(self) -> None:
        """Start anew: the first scale, all counters at zero."""
        device = self.scale.device if hasattr(self, "scale") else None
        self.scale = torch.tensor(self.init_scale, dtype=torch.float32, device=device)
        self.hysteresis_tracker = self.hysteresis
        self.growth_tracker = self.real_steps = self.skipped_steps = self.consecutive_skips = 0
        self._dynamic_scale: float | None = None  # static: the last one of a leg in which it was not

    @classmethod
    def static(cls, scale: float = 1.0, **kwargs: Any) -> DynamicLossScaler:
        """A scale that never changes, with the same counters. 1.0 is what bf16 and fp32 train with.

        Example:
            >>> DynamicLossScaler.static(128.0).is_static
            True
        """
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, **kwargs)

    @property
    def is_static(self) -> bool:
        """Whether the scale can never change, by its factors or because its bounds are equal."""
        return (self.growth_factor == 1 and self.backoff_factor == 1) or self.min_scale == self.max_scale

    @property
    def is_identity(self) -> bool:
        """Whether the scale is 1 for ever, so that scaling and unscaling can be left out."""
        return self.is_static and self.init_scale == 1

    @property
    def at_floor(self) -> bool:
        """Whether the scale has shrunk as far as it may. Reads the device; a static scale has no floor to reach."""
        return not self.is_static and self.backoff_factor < 1 and float(self.scale) <= self.min_scale

    def to(self, device: torch.device | str) -> DynamicLossScaler:
        """Move the scale to ``device``, in place, and return ``self``."""
        self.scale = self.scale.to(device)
        return self

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale: fp32 [] (a 16-bit loss is widened first; 2^15 would overflow it)."""
        if self.is_identity:
            return loss
        return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * self.scale

    def inverse_scale(self) -> Tensor:
        """What scaled gradients are multiplied by, fp32 []: the nearest number to the inverse."""
        return self.scale.reciprocal()

    def update(self, found_inf: Tensor | bool, stepped: bool | None = None) -> None:
        """Account for one training batch.

        Args:
            found_inf: Whether any gradient of the batch was inf or NaN. A tensor, bool or float [], is read. With
                several ranks it must already be the same on all of them.
            stepped: Whether any optimizer stepped in this batch; None means that it did unless ``found_inf``. With
                several optimizers one can step while another has to skip.
        """
        bad = bool(found_inf)
        stepped = not bad if stepped is None else stepped
        self.real_steps += int(stepped)
        self.skipped_steps += int(bad)
        self.consecutive_skips = 0 if stepped else self.consecutive_skips + 1
        if self.is_static:
            return
        if bad:
            self.growth_tracker = 0
            self.hysteresis_tracker = max(self.hysteresis_tracker - 1, 0)
            if self.hysteresis_tracker == 0:
                self.scale = (self.scale * self.backoff_factor).clamp(min=self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            self.scale = (self.scale * self.growth_factor).clamp(max=self.max_scale)

    def state_dict(self) -> dict[str, float | int]:
        """State only, as plain numbers: settings belong to the configuration, not to a checkpoint.

        A static scaler adds ``dynamic_scale``, the scale that a leg in another precision reached, or 0: its own 1 means
        nothing to a scaler that moves.
        """
        state = {"scale": float(self.scale), **{name: getattr(self, name) for name in _COUNTERS}}
        return {**state, "dynamic_scale": self._dynamic_scale or 0.0} if self.is_static else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``; also that of ``torch.amp.GradScaler``, whose ``_growth_tracker`` is understood.

        Settings found in the state (GradScaler writes its own) do not override the configuration; a difference is
        logged, as is a scale that this configuration does not allow. The scale of a static scaler is not taken over by
        one that moves, which goes on with the last that moved, or its own first one.

        Raises:
            ValueError: If ``state`` has no scale, or one that is not positive and finite.
        """
        if "scale" not in state:
            raise ValueError(f"Loss scaler state needs a 'scale', found the keys {sorted(state)}.")
        scale = float(state["scale"])
        _check("scale (in the checkpoint)", scale, 0 < scale < math.inf, "a positive finite number")
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if name in state and state[name] != getattr(self, name):
                log.warning(
                    "Loss scaler: %s=%r of this run replaces %r of the checkpoint.",
                    name,
                    getattr(self, name),
                    state[name],
                )
        static = "dynamic_scale" in state
        if self.is_static:
            self._dynamic_scale = float(state["dynamic_scale"]) if static else scale
        elif static:
            scale = float(state["dynamic_scale"]) or self.init_scale
            log.info("Loss scaler: the scale of the checkpoint was a constant, continuing with %g.", scale)
        if self.is_static and scale != self.init_scale:
            log.warning(
                "Loss scaler: the static scale %g of this run replaces %g of the checkpoint.", self.init_scale, scale
            )
            scale = self.init_scale
        elif not self.is_static and not self.min_scale <= scale <= self.max_scale:
            bounded = min(max(scale, self.min_scale), self.max_scale)
            log.warning(
                "Loss scaler: scale %g of the checkpoint is outside this run's bounds, continuing with %g.",
                scale,
                bounded,
            )
            scale = bounded
        self.scale = torch.tensor(scale, dtype=torch.float32, device=self.scale.device)
        values = {name: state[name] for name in _COUNTERS if name in state}
        values.setdefault("growth_tracker", state.get("_growth_tracker", 0))
        if static and not self.is_static:
            values.update(growth_tracker=0, hysteresis_tracker=self.hysteresis)
        values["hysteresis_tracker"] = min(int(values.get("hysteresis_tracker", self.hysteresis)), self.hysteresis)
        for name, value in values.items():
            setattr(self, name, int(value))

    def __repr__(self) -> str:
        if self.is_static:
            return f"DynamicLossScaler(static scale {self.init_scale:g})"
        return f"DynamicLossScaler(scale={float(self.scale):g}, growth_interval={self.growth_interval})"


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: it must be {allowed}.")
