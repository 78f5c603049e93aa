"""Other tensors in the places that an optimizer keeps parameters: its groups, and the keys of its state.

Why it exists: optimizers step on whatever stands there, so fp32 stand-ins in place of 16-bit parameters are all that an
optimizer needs to be lent, and putting the parameters back is all it takes to end the loan.

What it leaves out: what the stand-ins hold, and when (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mixprec.bucket_state import narrow_keys, widen

_CHECK = "_accelerator_graph_capture_health_check"  # torch 2.11 and 2.14


class Exchange:
    """Exchanges parameters of one optimizer for stand-ins, and knows for which.

    Args:
        optimizer: Which.

    Example:
        >>> import torch
        >>> weight, stand_in = nn.Parameter(torch.ones(1).bfloat16()), nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> exchange = Exchange(optimizer)
        >>> exchange.lend_all({weight: stand_in})
        >>> optimizer.param_groups[0]["params"][0] is stand_in
        True
        >>> exchange.put_back()
        >>> optimizer.param_groups[0]["params"][0] is weight
        True
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._lent: dict[nn.Parameter, nn.Parameter] = {}  # stand-in -> parameter
        self._narrow: set[Any] = set()  # keys of state that the optimizer makes in 16 bits of its own accord

    def lend_state(self, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the state of each parameter be that of its stand-in."""
        state = self._optimizer.state
        for param, stand_in in stand_ins.items():
            self._lent[stand_in] = param
            if param in state:
                widen([state[param]], self._narrow)
                state[stand_in] = state.pop(param)

    def lend_all(self, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Likewise, and let stand-ins be in the groups in place of their parameters."""
        self.lend_state(stand_ins)
        for group in self._optimizer.param_groups:
            group["params"][:] = [stand_ins.get(param, param) for param in group["params"]]

    def put_back(self, stand_ins: Iterable[nn.Parameter] | None = None) -> None:
        """End it, for ``stand_ins`` or for all."""
        for group in self._optimizer.param_groups:
            group["params"][:] = [self._lent.get(param, param) for param in group["params"]]
        state = self._optimizer.state
        for stand_in in list(self._lent if stand_ins is None else stand_ins):
            param = self._lent.pop(stand_in)
            if stand_in in state:
                self._narrow.update(narrow_keys(state[stand_in]))  # what it was lent had none but those
                state[param] = state.pop(stand_in)


def lend_lists(optimizer: Optimizer, stand_ins: Mapping[Any, nn.Parameter]) -> None:
    """Put stand-ins, for good, in place of parameters in lists and the like that an optimizer has made for its steps.

    Its groups and its state are lent them step by step; a list that is the user's as well stays as it is.

    Example:
        >>> import torch
        >>> weight, stand_in = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> optimizer.matrices = {"all": [weight]}
        >>> lend_lists(optimizer, {weight: stand_in})
        >>> optimizer.matrices["all"][0] is stand_in, optimizer.param_groups[0]["params"][0] is weight
        (True, True)
    """
    for name, value in list(vars(optimizer).items()):
        if name not in ("param_groups", "state"):
            vars(optimizer)[name] = _with_stand_ins(value, stand_ins)
    for group in optimizer.param_groups:
        for name, value in group.items():
            group[name] = value if name == "params" else _with_stand_ins(value, stand_ins)


def _with_stand_ins(value: Any, stand_ins: Mapping[Any, nn.Parameter]) -> Any:
    """A copy of ``value`` with stand-ins in it, or itself if it holds no parameter that has one."""
    if isinstance(value, Tensor):
        return stand_ins.get(value, value)
    if type(value) is dict:
        items = [(_with_stand_ins(key, stand_ins), _with_stand_ins(each, stand_ins)) for key, each in value.items()]
        same = all(one is key and other is each for (one, other), (key, each) in zip(items, value.items(), strict=True))
        return value if same else dict(items)
    if type(value) in (list, tuple, set):
        changed = [_with_stand_ins(each, stand_ins) for each in value]
        same = all(one is each for one, each in zip(changed, value, strict=True))
        return value if same else type(value)(changed)
    return value


@contextmanager
def holding(group: dict[str, Any], params: list[nn.Parameter]) -> Iterator[None]:
    """Let a group hold ``params`` for a while.

    Example:
        >>> group = {"params": [1, 2]}
        >>> with holding(group, [3]):
        ...     print(group)
        {'params': [3]}
        >>> group
        {'params': [1, 2]}
    """
    kept = group["params"][:]
    group["params"][:] = params
    try:
        yield
    finally:
        group["params"][:] = kept


@contextmanager
def without_work(optimizer: Optimizer) -> Iterator[None]:
    """Let ``optimizer.step`` be called, for those who watch for the call, with nothing to do.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.AdamW([weight], fused=True)
        >>> weight.sum().backward()
        >>> with without_work(optimizer):
        ...     optimizer.step()
        >>> weight.item()
        1.0
    """
    with ExitStack() as stack:
        for group in optimizer.param_groups:
            stack.enter_context(holding(group, []))
        # Torch asks in every step whether a GPU's graph is being captured. Without a GPU that takes a quarter of a
        # millisecond under Lightning, which has CUDA look for its driver by loading NVML's library anew each time.
        vars(optimizer)[_CHECK] = _nothing
        stack.callback(vars(optimizer).pop, _CHECK)
        yield


def _nothing() -> None:
    pass


def take_replaced(stand_in: nn.Parameter, view: Tensor) -> None:
    """Keep a stand-in's memory where it is: some optimizers assign ``p.data = ...`` instead of writing into it.

    Example:
        >>> import torch
        >>> view = torch.ones(1)
        >>> stand_in = nn.Parameter(view)
        >>> stand_in.data = torch.zeros(1)
        >>> take_replaced(stand_in, view)
        >>> view, stand_in.data_ptr() == view.data_ptr()
        (tensor([0.]), True)
    """
    if stand_in.data_ptr() != view.data_ptr():
        view.copy_(stand_in.data.view_as(view))
        stand_in.data = view
