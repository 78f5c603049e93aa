"""Layers whose weight is computed from others: of which of them are still 16-bit tensors that must not be.

Why it exists: weight, spectral and orthogonal parametrisations and pruning masks may be put on a layer in the middle of
training. What they add is made of a 16-bit weight, and so 16-bit itself, also after training and in checkpoints.

What it leaves out: making it fp32 (:mod:`lightning_mixprec.conversion`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrizations import _Orthogonal
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_mixprec.opaque import is_script
from lightning_mixprec.widening import HALF


def is_reparametrised(module: nn.Module) -> bool:
    """Whether hooks make the module's weight of its own parameters: spectral and weight normalisation of old.

    Their iterations need fp32, and mix parameters with fp32 buffers.

    Example:
        >>> is_reparametrised(nn.Linear(1, 1)), is_reparametrised(nn.utils.spectral_norm(nn.Linear(1, 1)))
        (False, True)
    """
    return any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in module._forward_pre_hooks.values())


def is_pruned(module: nn.Module) -> bool:
    """Whether masks make the module's weight of its own parameter.

    Example:
        >>> is_pruned(nn.utils.prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5))
        True
    """
    return any(isinstance(hook, BasePruningMethod) for hook in module._forward_pre_hooks.values())


def half_tensors(model: nn.Module) -> Iterator[Tensor]:
    """16-bit tensors of reparametrisations, and 16-bit masks, in ``model``.

    Example:
        >>> net = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2).bfloat16())
        >>> [tuple(tensor.shape) for tensor in half_tensors(net)]
        [(2, 2), (2,), (2,)]
    """
    for module in model.modules():
        if is_script(module):
            continue
        if isinstance(module, ParametrizationList) or is_reparametrised(module):
            tensors = [*module.parameters(), *module.buffers()]
        elif is_pruned(module):
            tensors = [*module.buffers(recurse=False)]
        else:
            continue
        yield from (tensor for tensor in tensors if tensor.dtype in HALF)


def refuse_half_orthogonal(model: nn.Module) -> None:
    """Before 16-bit tensors become fp32.

    Raises:
        ValueError: If ``orthogonal`` has been put on a 16-bit weight, of which it cannot compute where to begin.
    """
    for name, module in model.named_modules():
        if not isinstance(module, ParametrizationList) or not any(isinstance(each, _Orthogonal) for each in module):
            continue
        if any(tensor.dtype in HALF for tensor in (*module.parameters(), *module.buffers())):
            layer, _, weight = name.rpartition(".parametrizations.")
            raise ValueError(
                f"`orthogonal` has been put on {weight!r} of {layer!r} while training, where it is 16-bit and no "
                "orthogonal base can be computed of it. Put it there before `fit`, or keep the layer in fp32: "
                f"PrecisionPolicy(fp32=[{layer!r}])."
            )


class Registrations:
    """Notices that modules, parameters or buffers are put into a module, any module, until :meth:`end`.

    Attributes:
        seen: Whether any were, since it was last set.

    Example:
        >>> registrations = Registrations()
        >>> nn.Module().register_buffer("mask", None)
        >>> registrations.end(), registrations.seen
        (None, True)
    """

    def __init__(self) -> None:
        self.seen = False
        self._handles = [
            torch_module.register_module_module_registration_hook(self._note),
            torch_module.register_module_parameter_registration_hook(self._note),
            torch_module.register_module_buffer_registration_hook(self._note),
        ]

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        self.seen = True

    def end(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
