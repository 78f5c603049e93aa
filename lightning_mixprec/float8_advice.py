"""What a user of fp8 is told: that it is not installed, not on this device, emulated, where it is, and whether it pays.

Why it exists: fp8 that runs where it cannot be fast, or in none of the layers, looks like fp8 that works.

What it leaves out: the arithmetic (:mod:`lightning_mixprec.float8`, imported when fp8 is used and not before, because
torchao is optional).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_mixprec.health import Limits, fp8_warnings
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy


def require_float8(policy: PrecisionPolicy) -> None:
    """Refuse fp8 without torchao.

    Raises:
        ImportError: Says what to install.
    """
    if policy.uses_fp8:
        import lightning_mixprec.float8  # noqa: F401


def refuse_device(policy: PrecisionPolicy, device: torch.device) -> None:
    """Refuse fp8 on a device that does not have it."""
    if policy.uses_fp8:
        from lightning_mixprec.float8 import check_device

        try:
            check_device(policy, device)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error


def announce_float8(policy: PrecisionPolicy, plan: PrecisionPlan) -> None:
    """Say which layers compute in fp8 and which do not and why, and that they are emulated if they are."""
    if not policy.uses_fp8:
        return
    by_reason: dict[str, list[str]] = {}
    for name, why in plan.fp8_refused.items():
        by_reason.setdefault(why, []).append(name)
    lines = [f"fp8, {policy.fp8_recipe}: {len(plan.fp8_layers)} linear layers. Not in fp8:"]
    lines += [f"  {', '.join(names)}: {why}" for why, names in by_reason.items()] or ["  nothing that an entry covers"]
    if plan.fp8_layers:
        rank_zero_info("\n".join(lines))
    else:
        rank_zero_warn("\n".join(["No layer of this model computes in fp8, though the policy asks for it.", *lines]))
    if policy.emulate:
        rank_zero_warn(
            "fp8 is EMULATED: results are those of fp8 hardware up to the order of sums, and every fp8 layer is slower "
            "than in 16 bits. Leave emulate=True out to train on hardware that has fp8."
        )


class Float8Advice:
    """Around the forward of the first batch: counts tokens, and says whether fp8 can pay, and which layers are idle.

    Args:
        module: What is trained.

    Attributes:
        due: Whether tokens have been counted.
    """

    def __init__(self, module: nn.Module) -> None:
        from lightning_mixprec.float8 import TokenCount

        self._count = TokenCount(module)
        self.due = False

    def __enter__(self) -> None:
        self._count.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._count.__exit__(*error)
        self.due = True

    def give(self, trainer: Any) -> int:
        """Say it on the screen and to the loggers.

        Returns:
            Tokens that enter fp8 layers in a step, of all ranks and accumulated batches together.
        """
        tokens = self._count.tokens * trainer.world_size * trainer.accumulate_grad_batches
        if self._count.idle:
            rank_zero_warn(
                f"No token of the first batch entered these fp8 layers: {', '.join(self._count.idle)}. Either it did "
                "not need them, or the model computes with their weights, as in F.linear(x, layer.weight), which "
                "is done in 16 bits: call the layer, or leave it out of fp8."
            )
        if not tokens:  # no layer qualifies, or none was called, which has been said
            return tokens
        given = (getattr(callback, "limits", None) for callback in trainer.callbacks)  # of a PrecisionMonitor
        limits = next((each for each in given if isinstance(each, Limits)), Limits())
        warnings = [text for _, text in fp8_warnings(limits, tokens=tokens)]
        for text in warnings:
            rank_zero_warn(text)
        if not warnings:
            rank_zero_info(f"{tokens:,} tokens a step enter fp8 layers: enough for fp8 to pay, with torch.compile.")
        for logger in trainer.loggers:
            logger.log_metrics({"mixprec/fp8_tokens": float(tokens)}, step=0)
            if isinstance(logger, TensorBoardLogger) and warnings:
                logger.experiment.add_text("mixprec/fp8", warnings[0], 0)
        return tokens
