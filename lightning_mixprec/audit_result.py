"""What an audit has found: a table to read, a policy to train with.

Why it exists: numbers of a hundred layers are of use when they say in a line which of them must change, and in the
words that ``precision=`` takes.

What it leaves out: finding it (:mod:`lightning_mixprec.audit`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from lightning_mixprec.formats import Shares
from lightning_mixprec.policy import PrecisionPolicy

_FP8_ERROR = 0.1  # of a layer's products, beyond which fp8 does not suit it; 0.04 to 0.06 is usual


@dataclass(frozen=True)
class LayerAudit:
    """What one module does to 16 and 8 bits. Shares are by dtype: of fp16, bf16 and fp8.

    Attributes:
        name: Qualified name.
        type_name: Class name.
        dtype: What it computes in under the recommended policy: ``"fp16"`` or ``"bf16"``, ``"fp32"``, ``"fp8"``, or
            ``"norm"``, fp32 inside and 16 bits outside.
        parameters: Number of parameter elements that it owns.
        activation: Largest magnitude in its outputs.
        gradient: Largest magnitude of the gradients by its outputs and its own parameters, at scale 1.
        activations: Shares of its outputs; fp8 is e4m3.
        gradients: Shares of these gradients at the loss scale; fp8 is e5m2.
        weights: Shares of its own parameters; fp8 is e4m3.
        lost_updates: Share of its weights' updates that 16-bit weights without masters would not notice.
        reason: Why it must compute in fp32, as the audit found; None if it need not.
        fp8_error: Of the layer's output and gradients in fp8, the largest relative error, of linear layers that may
            compute in fp8; NaN for all others.

    Example:
        >>> from torch import nn
        >>> from lightning_mixprec import audit
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> layer = audit(net, [torch.ones(4, 1)], lambda model, batch: model(batch).sum()).layers[0]
        >>> layer.name, layer.dtype, layer.gradient, layer.gradients[torch.float16].overflow
        ('0', 'fp16', 4.0, 0.3333333333333333)
    """

    name: str
    type_name: str
    dtype: str
    parameters: int
    activation: float
    gradient: float
    activations: dict[torch.dtype, Shares]
    gradients: dict[torch.dtype, Shares]
    weights: dict[torch.dtype, Shares]
    lost_updates: float
    reason: str | None
    fp8_error: float = math.nan


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` has found; prints as a table.

    Attributes:
        policy: The policy audited, with every layer in ``fp32`` that must be.
        layers: All modules that were called or own parameters, in model order.
        loss_scale: Scale at which gradients were counted.
        suggested_loss_scale: The largest power of two at which no gradient overflows fp16 in a module with 16-bit
            outputs, of those that a :class:`~lightning_mixprec.scaler.DynamicLossScaler` allows by default.
        notes: What a policy cannot cure.
        loss: Of the samples that were tried in 16 bits, with this policy; None if the model could not be run.
        loss_fp32: The same in fp32.

    Example:
        >>> from torch import nn
        >>> from lightning_mixprec import audit
        >>> found = audit(nn.Sequential(nn.Linear(1, 1)), [torch.ones(4, 1)], lambda model, batch: model(batch).sum())
        >>> found.policy, found.suggested_loss_scale
        (PrecisionPolicy('fp16'), 8192.0)
    """

    policy: PrecisionPolicy
    layers: list[LayerAudit]
    loss_scale: float
    suggested_loss_scale: float
    notes: list[str]
    loss: float | None
    loss_fp32: float

    @property
    def recommended(self) -> dict[str, str]:
        """Layers that must be fp32 and would not be, each with the reason."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    @property
    def fp8_candidates(self) -> list[str]:
        """Linear layers that may compute in fp8 and lose little by it: entries for ``fp8=[...]``."""
        return [layer.name for layer in self.layers if layer.fp8_error <= _FP8_ERROR]

    @property
    def _fp8_unfit(self) -> dict[str, float]:
        return {layer.name: layer.fp8_error for layer in self.layers if layer.fp8_error > _FP8_ERROR}

    def table(self) -> list[list[str]]:
        """Cells of the layers that own parameters or are recommended, the header first.

        ``>max``, ``->0`` and ``sub`` are shares that the 16-bit format overflows, flushes to zero and makes subnormal;
        ``fp8`` is what fp8 would overflow or flush without scales, and ``fp8 error`` what matrix products lose with
        them.
        """
        lost = [">max", "->0", "sub", "fp8"]
        rows = [["layer", "type", "dtype", "activation", *lost, "gradient", *lost, "lost updates", "fp8 error"]]
        rows[0].append("why fp32")
        for layer in self.layers:
            if layer.parameters or layer.reason:
                rows.append(
                    [
                        *(layer.name, layer.type_name, layer.dtype),
                        *(f"{layer.activation:.3g}", *self._cells(layer.activations)),
                        *(f"{layer.gradient:.3g}", *self._cells(layer.gradients)),
                        *(_percent(layer.lost_updates), _percent(layer.fp8_error), layer.reason or ""),
                    ]
                )
        return rows

    def summary(self) -> list[str]:
        """What to know besides the table, in a few lines."""
        compute, found = self.policy.without_fp8().compute, self.recommended
        loss = "none" if self.loss is None else f"{self.loss:.4g}"
        return [
            f"{len(found)} of {len(self.layers)} modules must be fp32 in addition to the policy given"
            + (f": {', '.join(found)}" if found else ""),
            f"loss of the samples tried: {self.loss_fp32:.4g} in fp32, {loss} in {compute} with this policy",
            f"gradients counted at loss scale {self.loss_scale:g}; largest at which none overflows fp16: "
            f"{self.suggested_loss_scale:g}",
            *self._fp8_summary(),
            *self.notes,
        ]

    def _fp8_summary(self) -> list[str]:
        suited, unfit = self.fp8_candidates, self._fp8_unfit
        if not suited and not unfit:
            return []
        few = f": {', '.join(suited)}" if len(suited) <= 4 else ""
        lines = [
            f"fp8 suits {len(suited)} of the {len(suited) + len(unfit)} linear layers that qualify by shape and place"
            f"{few}; it saves time from about 2,000,000 tokens a step on"
        ]
        if unfit:
            worst = ", ".join(f"{name} ({_percent(error)})" for name, error in unfit.items())
            lines.append(f"fp8 does not suit, for the error of their products: {worst}")
        return lines

    def to_yaml(self, masters: str = "fp32", fallback: str = "raise") -> str:
        """A Hydra node that builds the plugin with this policy, for ``conf/precision/NAME.yaml``.

        Its first loss scale is the one at which gradients were counted, or the suggested one if that is smaller.

        Args:
            masters: How the fp32 masters are stored.
            fallback: What is to happen to layers that overflow later.

        Example:
            >>> from torch import nn
            >>> from lightning_mixprec import audit
            >>> net = nn.Sequential(nn.Linear(1, 1))
            >>> print(audit(net, [torch.ones(1, 1)], lambda model, x: model(x).sum(), policy="bf16").to_yaml())
            _target_: lightning_mixprec.MasterWeightPrecision
            policy:
              _target_: lightning_mixprec.PrecisionPolicy
              compute: bf16
              fp32: []
            masters: fp32
            <BLANKLINE>
        """
        policy, found = self.policy, self.recommended
        names = [entry.__name__ if isinstance(entry, type) else entry for entry in policy.fp32]
        fp8: list[str] = []
        if policy.uses_fp8:
            names_fp8 = [entry.__name__ if isinstance(entry, type) else entry for entry in policy.fp8]
            if self._fp8_unfit:  # what is left of the entries
                policy, names_fp8 = policy.without_fp8(), self.fp8_candidates
            fp8 += [f"  fp8: {json.dumps(names_fp8)}"] if names_fp8 else []
            fp8 += [] if self.policy.fp8_recipe == "tensorwise" else [f"  fp8_recipe: {self.policy.fp8_recipe}"]
            fp8 += [] if self.policy.fp8_defaults else ["  fp8_defaults: false"]
            fp8 += ["  emulate: true"] if self.policy.emulate else []
        entries = [f"    - {json.dumps(name)}{f'  # {found[name]}' if name in found else ''}" for name in names]
        lines = [
            "_target_: lightning_mixprec.MasterWeightPrecision",
            "policy:",
            "  _target_: lightning_mixprec.PrecisionPolicy",
            f"  compute: {policy.compute}",
            *(["  fp32:", *entries] if entries else ["  fp32: []"]),
            *([] if policy.fp32_defaults else ["  fp32_defaults: false"]),
            *fp8,
            f"masters: {masters}",
            *([] if fallback == "raise" else [f"fallback: {fallback}"]),
        ]
        if policy.compute == "fp16":
            lines += [
                "scaler:",
                "  _target_: lightning_mixprec.DynamicLossScaler",
                f"  init_scale: {self.loss_scale!r}",
            ]
        return "\n".join(lines) + "\n"

    def to_markdown(self) -> str:
        """Summary, table and YAML, for a TensorBoard text."""
        header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in self.table()]
        table = [header, ["---"] * len(header), *rows]
        return "\n".join(
            [
                *(f"- {line}" for line in self.summary()),
                "",
                *(f"| {' | '.join(row)} |" for row in table),
                "",
                *(f"    {line}" for line in self.to_yaml().splitlines()),
            ]
        )

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] + [0]
        words = {0, 1, 2, len(widths) - 1}  # columns that are not numbers
        lines = [
            "  ".join(
                cell.ljust(widths[column]) if column in words else cell.rjust(widths[column])
                for column, cell in enumerate(row)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self.summary()])

    def _cells(self, shares: dict[torch.dtype, Shares]) -> list[str]:
        if not shares:
            return ["-"] * 4
        narrow, fp8 = shares[self.policy.compute_dtype], list(shares.values())[-1]
        return [_percent(x) for x in (narrow.overflow, narrow.zero, narrow.subnormal, fp8.overflow + fp8.zero)]


def _percent(share: float) -> str:
    """A share in at most five characters.

    Example:
        >>> _percent(0.0), _percent(1e-5), _percent(0.125), _percent(math.nan)
        ('0', '<0.1%', '12.5%', '-')
    """
    if math.isnan(share):
        return "-"
    return "0" if share == 0 else "<0.1%" if share < 1e-3 else f"{share:.3%}"[:4].rstrip(".") + "%"
