"""What a module's state dict passes through while its parameters are 16-bit: it speaks fp32 under the plain names.

Why it exists: checkpoints, exports and users' code read and write the state dict of the model or of any part of it, and
all of them have to meet the fp32 values. torch has hooks for that, on each module that owns tensors.

Copies and pickles take the hooks along. A copy holds fp32 parameters that nothing stands behind: its hooks are told the
values once, when it is made, and know nothing of the masters.

What it leaves out: the values (:mod:`lightning_mixprec.master`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mixprec.given import Given
from lightning_mixprec.opaque import visible_modules


class Values(Protocol):
    """Where the fp32 values are: :class:`~lightning_mixprec.master.MasterWeights`."""

    def __contains__(self, param: object) -> bool: ...
    def peek(self, param: nn.Parameter) -> Tensor: ...  # noqa: D102
    def write(self, param: nn.Parameter, value: Tensor) -> None: ...  # noqa: D102


class StateHooks:
    """Hooks of one module's own state dict.

    Args:
        module: The module; they are registered on it.
        values: The fp32 values behind its parameters.
        given: Its tensors that are shown in the dtype they were given in.

    Example:
        >>> given, norm = Given(), nn.LayerNorm(2).half().requires_grad_(False)
        >>> given.widen_(norm.weight, norm.parameters())
        >>> hooks = StateHooks(norm, {}, given)
        >>> norm.state_dict()["weight"].dtype
        torch.float16
        >>> hooks.remove()
    """

    def __init__(self, module: nn.Module | None, values: Values | Any, given: Given) -> None:
        self._module, self._values, self._given = module, values, given
        self._handles: list[Any] = []
        if module is not None:
            # partial: torch marks the hook with an attribute, which a bound method would not take
            self._handles = [
                module.register_state_dict_post_hook(partial(StateHooks._write, self)),
                module.register_load_state_dict_pre_hook(partial(StateHooks._read, self)),
            ]

    @property
    def live(self) -> bool:
        """Whether masters stand behind the module."""
        return self._values is not None

    def __reduce__(self) -> Any:
        """A copied or pickled module is an fp32 module with nothing behind it."""
        if self._module is None or self._values is None:
            return _of_a_copy, ([], [], self._given.entries())
        own = [param for param in self._module.parameters(recurse=False) if param in self._values]
        tensors = [*self._module.parameters(recurse=False), *self._module.buffers(recurse=False)]
        return _of_a_copy, (own, [self._values.peek(param).clone() for param in own], self._given.entries(tensors))

    def remove(self) -> None:
        """Take them off the module."""
        for handle in self._handles:
            handle.remove()

    def restore_(self) -> None:
        """Give a copy's frozen tensors the dtype back in which the original was given."""
        self._given.restore_()

    def _write(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        own: dict[str, Any] = {**dict(module.named_parameters(recurse=False, remove_duplicate=False))}
        own |= dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            key = prefix + name
            if key not in state_dict:
                continue
            if (tied := _shown_already(tensor, state_dict)) is not None:
                state_dict[key] = tied
                continue
            behind = self._values is not None and tensor in self._values
            value = self._values.peek(tensor) if behind else self._given.shown(tensor)
            if value is not None:
                value = in_memory_of_its_own(value)
                kept = isinstance(state_dict[key], nn.Parameter)  # as `keep_vars=True` has them
                state_dict[key] = nn.Parameter(value, tensor.requires_grad) if kept else value
                _SHOWN[tensor] = key, weakref.ref(state_dict[key])

    def _read(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if not (isinstance(value, Tensor) and value.shape == param.shape):
                continue
            if self._values is not None and param in self._values:
                self._values.write(param, value)
                # What torch copies into the parameter next is what is there: it would round ties differently.
                state_dict[prefix + name] = param.detach().clone()


_SHOWN: Any = WeakIdKeyDictionary()  # by tensor of a module: the name and what stood for it in a state dict last


def _shown_already(tensor: Tensor, state_dict: dict[str, Any]) -> Tensor | None:
    """What stands for a tied tensor under another name, so that it is one tensor there too, and once in a file."""
    key, shown = _SHOWN.get(tensor, ("", lambda: None))
    found: Tensor | None = state_dict.get(key)
    return found if found is not None and found is shown() else None


def in_memory_of_its_own(tensor: Tensor) -> Tensor:
    """``tensor`` where it is, as a tensor that knows nothing of what lies around it.

    A part of a bucket would take the whole bucket to disk if it were saved alone, and safetensors' ``save_model``
    refuses parts.

    Example:
        >>> bucket = torch.zeros(4)
        >>> weight = in_memory_of_its_own(bucket[1:3])
        >>> weight.untyped_storage().nbytes(), weight.data_ptr() == bucket[1:3].data_ptr()
        (8, True)
    """
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole or not tensor.numel() or tensor.device.type not in ("cpu", "cuda"):
        return tensor
    return torch.from_dlpack(tensor)


def leftovers(model: nn.Module) -> Iterator[StateHooks]:
    """Hooks on ``model`` and what is below it: of a fit that goes on, or of a copy made in one.

    Example:
        >>> list(leftovers(nn.Linear(1, 1)))
        []
    """
    for _, module in visible_modules(model):
        yield from dict.fromkeys(hooks for hooks, _, _ in _registered(module))


def remove_leftovers_(model: nn.Module) -> None:
    """Take off hooks that a copy or a pickle of a module in training has brought along; its tensors are as given then.

    Example:
        >>> remove_leftovers_(nn.Linear(1, 1))
    """
    for _, module in visible_modules(model):
        for hooks, held, key in list(_registered(module)):
            hooks.restore_()
            del held[key]


def _registered(module: nn.Module) -> Iterator[tuple[StateHooks, dict[int, Any], int]]:
    held: Any
    for held in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in held.items():
            hook = getattr(hook, "hook", hook)  # torch wraps one kind
            args = hook.args if isinstance(hook, partial) else ()
            if args and isinstance(args[0], StateHooks):
                yield args[0], held, key


def _of_a_copy(
    params: list[nn.Parameter], values: list[Tensor], entries: list[tuple[Tensor, torch.dtype, list[nn.Parameter]]]
) -> StateHooks:
    for param, value in zip(params, values, strict=True):
        set_fp32_(param, value)
    return StateHooks(None, None, Given(entries))


def set_fp32_(param: nn.Parameter, value: Tensor) -> None:
    """Let ``param`` be ``value``, fp32, in place, without a gradient.

    Example:
        >>> param = nn.Parameter(torch.zeros(1).half())
        >>> set_fp32_(param, torch.ones(1))
        >>> param
        Parameter containing:
        tensor([1.], requires_grad=True)
    """
    param.grad = None
    param.data = value
    if param.grad_dtype != param.dtype:  # set for gradients in 16 bits, and torch has no way back to the default
        param.grad_dtype = None  # a dtype would bind gradients to it when the user gives the parameter another
