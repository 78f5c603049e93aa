"""A model as its policy wants it, from the beginning of a fit to its end.

Why it exists: classes of layers, dtypes of parameters and a setting of torch's compiler change together, in an order
that refuses before it changes anything, and must all be as found afterwards.

What it leaves out: the changes themselves (:mod:`lightning_mixprec.layers`, :mod:`lightning_mixprec.master`) and their
time (:mod:`lightning_mixprec.precision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from lightning_mixprec.feeding import averaged_names
from lightning_mixprec.given import Given, widen_buffers_
from lightning_mixprec.layers import (
    ComputeLayer,
    Fp32Layer,
    WidenedLayer,
    has_dtype,
    restore_,
    swap_,
    swap_inner_,
    swap_layers_,
)
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.plan import PrecisionPlan
from lightning_mixprec.policy import PrecisionPolicy
from lightning_mixprec.reparametrised import half_tensors, is_pruned, is_reparametrised, refuse_half_orthogonal
from lightning_mixprec.state_hooks import leftovers, remove_leftovers_, set_fp32_
from lightning_mixprec.storage import Masters
from lightning_mixprec.widening import HALF

_SETTINGS = {
    # Under torch.compile an fp32 layer's backward would run under the autocast around the whole forward.
    "backward_autocast": "off",
    # In evaluation nn.TransformerEncoderLayer would compute with its layers' weights without calling the layers.
    "fastpath": False,
}


class Conversion:
    """Makes ``model`` compute as ``policy`` says, in place, until :meth:`restore_`.

    For ``"fp32"`` it changes nothing, unless parameters were given in 16 bits: those that train are fp32 from here on.

    Args:
        model: The model, on any device.
        policy: The policy.
        fp32_layers: Qualified names of modules that compute in fp32 as well; names that the model lacks are dropped.
        device_type: Type of the device it will run on.
        masters: How fp32 masters are stored; None where parameters stay fp32 (FSDP2 keeps their shards, and gathers
            them in 16 bits).
        entrances: Modules of the model that are called from anywhere, and are to compute then as in a training step.

    Attributes:
        plan: What the policy means for the model.
        masters: Its master weights; None for ``"fp32"``, unless parameters were given in 16 bits.
        fp32_layers: As given.

    Raises:
        ValueError: If the model, or a part of it, is in another fit that goes on.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> conversion = Conversion(net, PrecisionPolicy("bf16"), [], "cpu", "fp32", [])
        >>> net[0].weight.dtype
        torch.bfloat16
        >>> conversion.move_to_fp32(["0"])
        >>> net[0].weight.dtype, conversion.share(["0"])
        (torch.float32, 1.0)
        >>> conversion.restore_()
    """

    def __init__(
        self,
        model: nn.Module,
        policy: PrecisionPolicy,
        fp32_layers: Iterable[str],
        device_type: str,
        masters: Masters | None,
        entrances: Iterable[nn.Module],
    ) -> None:
        for hooks in leftovers(model):
            if hooks.live:
                raise ValueError(
                    f"{type(model).__name__}, or a part of it, is being trained by another Trainer, which holds its "
                    "fp32 weights. Use a copy: copy.deepcopy(module)."
                )
        remove_leftovers_(model)
        known = _by_plain_name(model)
        self.fp32_layers = [known[name] for name in map(_plain, fp32_layers) if name in known]
        self.plan: PrecisionPlan = policy.resolve(model, also_fp32=self.fp32_layers)
        self.masters: MasterWeights | None = None
        self._model, self._policy, self._device_type = model, policy, device_type
        self._sharded = masters is None
        self._given = Given()
        self._settings: dict[str, Any] = {}  # torch's, while ours are in place
        if policy.compute_dtype == torch.float32:
            self._widen_buffers()
            if masters is not None and any(param.dtype in HALF for param in model.parameters()):
                # What is frozen now may train later, and must not in 16 bits.
                self.masters = MasterWeights(model, self.plan.parameters, masters, given=self._given)
            return
        # Modules first: what they refuse is refused before any weight has changed.
        entrances = [layer for layer in entrances if any(param.requires_grad for param in layer.parameters())]
        self._swap_layers()
        for layer in entrances:
            swap_(layer, ComputeLayer, device_type, policy.compute_dtype)
        inner = (layer for child in model.children() for layer in child.modules() if has_dtype(layer))
        swap_inner_(inner, device_type, policy.compute_dtype)  # while it says what it was
        self._settings = _set(_SETTINGS)
        self._widen_buffers()
        if masters is not None:
            averaged = averaged_names(model)
            dtypes = {name: dtype for name, dtype in self.plan.parameters.items() if name not in averaged}
            self.masters = MasterWeights(model, dtypes, masters, given=self._given)

    def open_(self) -> None:
        """Let every part of the model be called from anywhere; after its optimizers, which may ask for exact types."""
        if self._policy.compute_dtype != torch.float32:
            layers = (layer for child in self._model.children() for layer in child.modules())
            swap_inner_(layers, self._device_type, self._policy.compute_dtype)

    def _swap_layers(self) -> None:
        fp32 = WidenedLayer if self._sharded else Fp32Layer
        swap_layers_(self._model, self.plan.kinds, self._device_type, self._policy.compute_dtype, fp32)
        if self._policy.uses_fp8:
            from lightning_mixprec.float8 import swap_linears_  # which needs torchao

            swap_linears_(self._model, self.plan.fp8_layers, self._device_type, self._policy)

    def _widen_buffers(self) -> None:
        """No kernel mixes 16-bit statistics with fp32 parameters, nor with fp32 activations."""
        kinds = self.plan.kinds

        def is_meant(name: str, module: nn.Module, around: list[nn.Parameter]) -> bool:
            if self._policy.compute_dtype == torch.float32:  # what trains is fp32 then
                return any(param.requires_grad for param in around)
            return kinds.get(name) in ("fp32", "norm") or is_reparametrised(module) or is_pruned(module)

        widen_buffers_(self._model, self._given, is_meant)

    def share(self, layers: Sequence[str]) -> float:
        """Share of the model's parameters that would be 16-bit without ``layers`` in fp32."""
        without = self._policy.resolve(self._model).parameters
        within = self._policy.resolve(self._model, layers).parameters
        sizes = {name: param.numel() for name, param in self._model.named_parameters()}
        return sum(sizes[name] for name in sizes if without[name] != within[name]) / max(sum(sizes.values()), 1)

    def move_to_fp32(self, layers: Iterable[str]) -> None:
        """Have ``layers`` compute in fp32 from here on, too. Between two steps only: no graph may be alive."""
        known = _by_plain_name(self._model)
        new = [known[name] for name in map(_plain, layers) if name in known]
        self.fp32_layers = list(dict.fromkeys([*self.fp32_layers, *new]))
        self.plan = self._policy.resolve(self._model, also_fp32=self.fp32_layers)
        self._swap_layers()
        self._widen_buffers()
        if self.masters is not None:
            named = self._model.named_parameters()
            self.masters.make_fp32_(param for name, param in named if self.plan.parameters[name] == torch.float32)

    def follow(self) -> bool:
        """Let layers that have been reparametrised or pruned since be as they had been before; between two steps only.

        Returns:
            Whether there are any.
        """
        if self.masters is None or self._policy.compute_dtype == torch.float32:
            return False
        if next(half_tensors(self._model), None) is None:
            return False
        refuse_half_orthogonal(self._model)
        self.move_to_fp32([])
        return True

    def narrowed(self) -> dict[str, nn.Parameter]:
        """Parameters that are to be fp32 and that user code has cast to 16 bits since, by name."""
        fp32 = (name for name, dtype in self.plan.parameters.items() if dtype == torch.float32)
        params = dict(self._model.named_parameters())
        return {name: params[name] for name in fp32 if name in params and params[name].dtype in HALF}

    def restore_(self) -> None:
        """Leave the model as found: its own classes, no hooks, fp32 weights equal to the masters."""
        if self.masters is not None:
            if self._policy.compute_dtype != torch.float32:
                for tensor in half_tensors(self._model):  # of what has come since the last batch
                    if tensor not in self.masters:
                        tensor.data = tensor.data.float()
                for param in self.narrowed().values():
                    set_fp32_(param, param.data.float())
            self.masters.restore_()
        self._given.restore_()
        _set(self._settings)
        self._settings = {}
        restore_(self._model)


def _plain(name: str) -> str:
    """A module's name whether it is compiled or not."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _by_plain_name(model: nn.Module) -> dict[str, str]:
    return {_plain(name): name for name, _ in model.named_modules() if name}


def _set(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings of torch.

    Returns:
        Those before; without the ones that this torch does not have.
    """
    config: Any = functorch_config
    before: dict[str, Any] = {}
    if "fastpath" in settings:
        before["fastpath"] = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(settings["fastpath"])
    if "backward_autocast" in settings and hasattr(config, "backward_pass_autocast"):
        before["backward_autocast"] = config.backward_pass_autocast
        config.backward_pass_autocast = settings["backward_autocast"]
    return before
