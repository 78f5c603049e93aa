"""What is done about layers that overflowed: they are named, or moved to fp32.

Why it exists: a verdict about a layer concerns the model's classes, its weights, the wrapper of DDP, what is watched
and what the user is told, and all of these must follow, on all ranks alike.

What it leaves out: finding the layer (:mod:`lightning_mixprec.diagnosis`) and how much evidence is enough
(:mod:`lightning_mixprec.fallback`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule

from lightning_mixprec.conversion import Conversion
from lightning_mixprec.diagnosis import Diagnosis
from lightning_mixprec.fallback import LayerFallback
from lightning_mixprec.guests import rebuild_wrapper
from lightning_mixprec.overflow import Verdict
from lightning_mixprec.questions import announce_fallback, called_directly
from lightning_mixprec.reduction import GradientReduction
from lightning_mixprec.replay import Replayer
from lightning_mixprec.scaler import DynamicLossScaler


class Answers:
    """Answers to the overflows of a model.

    Args:
        model: What is trained.
        conversion: What has made it compute as its policy says.
        scaler: Its loss scale.
        device: Where it is.
        compute: Its compute dtype.
        fallback: Bounds within which layers move to fp32; ``"raise"``: none does.

    Attributes:
        diagnosis: What looks for the layers.
        reduction: How gradients travel between ranks, where that has to follow, too.
    """

    def __init__(
        self,
        model: LightningModule,
        conversion: Conversion,
        scaler: DynamicLossScaler,
        device: torch.device,
        compute: torch.dtype,
        fallback: LayerFallback | str,
    ) -> None:
        self._model, self._conversion = model, conversion
        self._fallback = fallback if isinstance(fallback, LayerFallback) else None
        self.reduction: GradientReduction | None = None
        masters = conversion.masters
        read = None if masters is None else lambda param: masters.read(param).float()
        replayer = Replayer(device.type, compute, read)
        fp32, repair = conversion.plan.fp32_modules, self._fallback is not None
        self.diagnosis = Diagnosis(model, scaler, device, replayer, in_fp32=fp32, repair=repair)
        names = {each: name.removesuffix("._orig_mod") for name, each in model.named_modules()}
        self.diagnosis.guard((names[each], model.get_submodule(names[each])) for each in called_directly(model))

    def end_batch(self, *, skipped: bool, noticed: bool) -> None:
        """Answer what the batch has shown on any rank.

        Args:
            skipped: Whether it was skipped.
            noticed: Whether any rank has seen something outside of training steps.
        """
        verdicts = self.diagnosis.end_batch(skipped=skipped, noticed=noticed)
        if verdicts and self._fallback is None:
            for verdict in verdicts:
                self.diagnosis.warn(verdict, "in a training step")
        elif verdicts and self._fallback is not None:
            self._strike(self._fallback, verdicts)
        elif self._fallback is not None:
            self._fallback.beyond = 0

    def _strike(self, fallback: LayerFallback, verdicts: list[Verdict]) -> None:
        moved = self._conversion.fp32_layers
        found = [verdict.layer for verdict in verdicts if verdict.layer not in moved]
        layers = [*moved, *found]
        share = self._conversion.share(layers)
        if not any(verdict.training for verdict in verdicts):
            if not fallback.allows(layers, share):
                return  # named already, and repaired in every call; training goes well
        elif not fallback.check(layers, share):
            return
        due = fallback.strike(found)
        if due:
            self.move_to_fp32(due)
            trainer = self._model.trainer
            announce_fallback(trainer, [v for v in verdicts if v.layer in due], len(moved) + len(due))

    def follow(self) -> None:
        """Let layers that have been reparametrised or pruned since be as they had been before; between two steps."""
        if self._conversion.follow():
            self._changed()

    def move_to_fp32(self, layers: Sequence[str]) -> None:
        """Have ``layers`` compute in fp32 from here on; between two steps, on all ranks."""
        self._conversion.move_to_fp32(layers)
        self._changed()

    def _changed(self) -> None:
        self.diagnosis.in_fp32 = self._conversion.plan.fp32_modules
        rebuild_wrapper(self._model.trainer.strategy, self.reduction)
