"""Which way an optimizer can be stepped on a part of the weights, found out by trying.

Why it exists: stepping bucket by bucket is right for an optimizer whose state belongs to a parameter, and wrong,
without any error, for one that keeps state for a group or looks across parameters. A list of names would know neither
the next optimizer of torch nor anybody's own, so copies of the optimizer are stepped on small tensors and compared.

What it leaves out: stepping on the real weights (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from textwrap import shorten
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_mixprec.counts import Counts

Way: TypeAlias = Literal["flat", "shaped", "counted", "whole"]
_ORDER: list[Way] = ["flat", "shaped", "counted", "whole"]


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds another one, or an object with parameters: both step behind its back."""
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups") and any(isinstance(each, Optimizer) for each in _parts(value)):
            raise ValueError(
                f"{type(optimizer).__name__} wraps another optimizer (in {name!r}) and changes weights behind its "
                "back, which masters cannot follow. Use the inner optimizer; MasterWeightAveraging averages weights."
            )
    held = {param for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(optimizer).items():
        helper = next((each for each in _parts(value) if any(part in held for part in _attributes(each))), None)
        if helper is not None:
            raise ValueError(
                f"{type(optimizer).__name__} keeps parameters in an object of its own (a {type(helper).__name__}, in "
                f"{name!r}), where fp32 weights cannot take their place for a step. Use an optimizer that steps on "
                "what is in its parameter groups, or train in fp32: Trainer(precision='32-true')."
            )


def _parts(value: Any) -> Iterable[Any]:
    """What is in a container, or the value itself."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]


def _attributes(value: Any) -> list[nn.Parameter]:
    """Parameters among an object's attributes, or in containers that are attributes."""
    if isinstance(value, (Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return []
    return [part for each in vars(value).values() for part in _parts(each) if isinstance(part, nn.Parameter)]


def classify(optimizer: Optimizer) -> tuple[Way, str]:
    """Find out how ``optimizer`` may be stepped, by stepping copies of it on small tensors.

    Returns:
        The way, and for ``"whole"`` the reason in words.

    Raises:
        LossAskedTwice: If it has no way.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 2))
        >>> classify(torch.optim.AdamW([weight]))[0], classify(torch.optim.Adafactor([weight]))[0]
        ('flat', 'shaped')
    """
    ways: list[tuple[Way, str]] = []
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            try:
                # Eager: optimizers that compile their step (torchao's) would compile it for the trial tensors.
                with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    ways.append(_classify_group(optimizer, index))
            except LossAskedTwice:
                raise
            except Exception as error:  # whatever an optimizer dislikes about being tried, it is its own business
                ways.append(("whole", f"it could not be tried on small tensors ({_said(error)})"))
    if len(ways) > 1 and not type(optimizer).__module__.startswith("torch.optim.") and ways[0][0] != "whole":
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if _looks_across_groups(optimizer):
                ways.append(("whole", "a step on one parameter group depends on the others"))
    return max(ways, key=lambda way: _ORDER.index(way[0]), default=("flat", ""))


def _said(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 120)  # a KeyError prints a whole parameter


def _classify_group(optimizer: Optimizer, index: int) -> tuple[Way, str]:
    params = optimizer.param_groups[index]["params"]
    # Two small tensors with as many dimensions as the group's own (some optimizers take matrices only), of odd sizes:
    # vectorised kernels may round the last few elements of a tensor differently, and flat tensors end elsewhere.
    sizes = {1: ((211,), (163,)), 2: ((23, 9), (17, 13)), 3: ((7, 5, 7), (9, 5, 5)), 4: ((7, 5, 3, 3), (5, 5, 3, 3))}
    dims = (params[0].dim(), params[-1].dim())
    shapes = [sizes[min(max(dim, 1), 4)][i] for i, dim in enumerate(dims)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    # Large and different gradients, so that a norm or a clip across tensors shows.
    grads: list[list[Any]] = [
        [torch.randn(shape, generator=generator) * 10 ** (2 * i) for i, shape in enumerate(shapes)] for _ in range(7)
    ]
    torchs = type(optimizer).__module__.startswith("torch.optim.")  # whose parameters rest without a gradient
    moves = False
    if not torchs:
        idle = [*grads, [None, grads[0][1]]]
        try:
            rested, *_ = _try(optimizer, index, [start], [[g] for g in grads])
            trial = _try_both(optimizer, index, start, idle)
            moves = not torch.equal(trial.together[0][0], rested[0][0])
        except LossAskedTwice:
            raise
        except Exception as error:  # it does not ask whether there is one
            trial = _try_both(optimizer, index, start, grads)
            if trial.counts:
                return "whole", f"it counts steps, and fails where a part has no gradient ({_said(error)})"
    else:
        trial = _try_both(optimizer, index, start, grads)
    if trial.differing:
        return "whole", f"it keeps state for a whole group or of its own ({', '.join(map(repr, trial.differing))})"
    if not _same(trial.together, trial.apart):
        return "whole", "a step on one parameter depends on the others"
    if trial.counts or moves:
        return "counted", ""
    if not torchs:
        return "shaped", ""  # it may treat tensors by their size (quantised state, say), which small ones do not show
    together = trial.together
    flat, *_ = _try(
        optimizer,
        index,
        [[torch.cat([w.flatten() for w in start])]],
        [[[torch.cat([g.flatten() for g in step])]] for step in grads],
        may_fail=True,
    )
    elementwise = flat is not None and _same([[torch.cat([w.flatten() for w in together[0]])]], flat)
    return ("flat" if elementwise else "shaped"), ""


class _Trial(NamedTuple):
    """Tensors after steps in one call each, and in one for each tensor; settings that these two disagree on."""

    together: list[list[Tensor]]
    apart: list[list[Tensor]]
    differing: list[str]
    counts: bool  # whether settings have changed


def _try_both(optimizer: Optimizer, index: int, start: list[Tensor], grads: list[list[Any]]) -> _Trial:
    together, before, after, _ = _try(optimizer, index, [start], [[g] for g in grads])
    apart, _, after_apart, differing = _try(
        optimizer, index, [[w] for w in start], [[[g] for g in step] for step in grads]
    )
    differing += [key for key in {**after, **after_apart} if after.get(key) != after_apart.get(key)]
    return _Trial(together, apart, list(dict.fromkeys(differing)), after != before)


def _try(
    optimizer: Optimizer, index: int, calls: list[list[Tensor]], steps: list[list[list[Any]]], may_fail: bool = False
) -> Any:
    """Step a copy of ``optimizer`` on ``calls``, each a list of tensors stepped in one call.

    Returns:
        The tensors after all steps, the group's settings before and after, and which of these the calls of a step do
        not agree on.
    """
    group = optimizer.param_groups[index]
    clone = _copy_of(optimizer)
    settings = _settings_of(group)
    one_group: dict[str, Any] = {**deepcopy(settings), "params": []}
    before = {**_own_state(clone), **_plain({key: value for key, value in one_group.items() if key != "params"})}
    params = [[nn.Parameter(tensor.clone()) for tensor in call] for call in calls]
    given = optimizer.state.get(group["params"][0], {})
    for call in params:
        for param in call:
            _copy_constructor_state(given, group["params"][0], param, clone.state)
    differing: list[str] = []
    try:
        with without_step_hooks(clone):
            for step in steps:
                counts = Counts(clone)
                for call, grads in zip(params, step, strict=True):
                    clone.param_groups = [one_group]
                    one_group["params"] = call
                    for param, grad in zip(call, grads, strict=True):
                        param.grad = None if grad is None else grad.clone()
                    with counts.call(one_group):
                        _step(clone)
                differing += sorted(counts.differing)
    except Exception:
        if may_fail:
            return None, None, None, None
        raise
    after = {key: value for key, value in one_group.items() if key != "params"}
    tensors = [[param.data for param in call] for call in params]
    return tensors, before, {**_own_state(clone), **_plain(after)}, differing


class LossAskedTwice(ValueError):
    """An optimizer evaluates the loss more than once in a step.

    Example:
        >>> str(LossAskedTwice(torch.optim.LBFGS([nn.Parameter(torch.ones(1))])))[:32]
        'LBFGS evaluates the loss more th'
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(
            f"{type(optimizer).__name__} evaluates the loss more than once in a step, which master weights and loss "
            "scaling cannot follow. Use another optimizer, or train in fp32: Trainer(precision='32-true')."
        )


def _step(clone: Optimizer) -> bool:
    """One step; optimizers with modes (schedule-free) may refuse it until they are told to train.

    Returns:
        Whether it was told.
    """
    try:
        _call(clone)
        return False
    except LossAskedTwice:
        raise
    except Exception:
        train = getattr(clone, "train", None)
        if not callable(train):
            raise
        train()
        _call(clone)
        return True


def _call(clone: Optimizer) -> None:
    """A step under Lightning: the loss is known when the optimizer asks, once."""
    asked = False

    def closure() -> Any:
        nonlocal asked
        if asked:
            raise LossAskedTwice(clone)
        asked = True
        return torch.ones(())

    clone.step(closure=closure)


def _looks_across_groups(optimizer: Optimizer) -> bool:
    """Whether stepping all groups in one call differs from stepping one after the other, at rates of their own.

    Such as by lists of its own beside ``param_groups``, or by the rate of the first group for all.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [group for group in optimizer.param_groups if group["params"]]
    start = [torch.randn([3] * group["params"][0].dim(), generator=generator) for group in groups]
    grads = [[torch.randn(weight.shape, generator=generator) for weight in start] for _ in range(3)]
    results: list[list[Tensor]] = []
    noted: list[Any] = []
    told_to_train = False
    for in_one_call in (True, False):
        clone = _copy_of(optimizer)
        copies: list[dict[str, Any]] = []
        for index, (group, weight) in enumerate(zip(groups, start, strict=True)):
            param = nn.Parameter(weight.clone())
            _copy_constructor_state(optimizer.state.get(group["params"][0], {}), group["params"][0], param, clone.state)
            copies.append({**_settings_of(group, index), "params": [param]})
        clone.param_groups = copies
        if told_to_train:
            cast(Any, clone).train()
        try:
            with without_step_hooks(clone):
                for step in grads:
                    for copy, grad in zip(copies, step, strict=True):
                        copy["params"][0].grad = grad.clone()
                    counts = Counts(clone)
                    for call in [copies] if in_one_call else [[copy] for copy in copies]:
                        clone.param_groups = call
                        with counts.call(call[0]):
                            if in_one_call:
                                told_to_train |= _step(clone)
                            else:
                                _call(clone)
        except Exception:  # a group by itself is not enough for it
            return True
        results.append([copy["params"][0].data for copy in copies])
        noted.append([_own_state(clone), *(_plain({**copy, "params": None}) for copy in copies)])
    return not _same(results[:1], results[1:]) or noted[0] != noted[1]


def _settings_of(group: Mapping[str, Any], place: int = 0) -> dict[str, Any]:
    """A copy of a group's settings for a trial on the CPU.

    At a rate of its own that shows: one that is warmed up from 0 would hide all.
    """
    settings: dict[str, Any] = deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")})
    rate = settings.get("lr")
    if isinstance(rate, (int, float, Tensor)):
        shown = max(float(rate), 1e-3) * (1 + place / 8)
        settings["lr"] = torch.full_like(rate, shown, device="cpu") if isinstance(rate, Tensor) else shown
    if settings.get("capturable"):  # on a GPU alone, with the same arithmetic
        settings["capturable"] = False
    return settings


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """A copy without parameters, state and hooks."""
    lent = "_mixprec_borrower" in vars(optimizer)  # its class has methods that need the borrower
    clone: Any = object.__new__(type(optimizer).__bases__[0] if lent else type(optimizer))
    hooks = {k: type(v)() for k, v in vars(optimizer).items() if k.startswith("_optimizer_") and k.endswith("_hooks")}
    attributes = {k: v for k, v in vars(optimizer).items() if k not in hooks and k not in _BOOKKEEPING}
    clone.__dict__.update(deepcopy(attributes, _tensors_in(optimizer)), **hooks)
    clone.defaults = deepcopy(optimizer.defaults)
    clone.state = defaultdict(dict)
    # As the constructor leaves it. Without it, where there is a GPU, `step` looks for a setting that Adafactor lacks.
    clone._warned_capturable_if_run_uncaptured = True
    return clone


# Attributes of every optimizer of torch, and what its schedulers leave there.
_BOOKKEEPING = {
    "state",
    "param_groups",
    "defaults",
    "step",
    "_opt_called",
    "_step_count",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_mixprec_borrower",
}


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}  # all of it is in `state`
    own = {key: value for key, value in vars(optimizer).items() if key not in _BOOKKEEPING}
    return {f"self.{key}": _plain(value) for key, value in own.items() if not key.endswith("_hooks")}


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """No step hooks, of the optimizer or global, while a part of the weights is stepped."""
    hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def _tensors_in(optimizer: Optimizer) -> dict[int, Any]:
    """A deepcopy memo in which the optimizer's parameters stand for themselves: attributes may hold them."""
    return {id(param): param for group in optimizer.param_groups for param in group["params"]}


def _copy_constructor_state(given: Mapping[str, Any], like: Tensor, param: nn.Parameter, state: Any) -> None:
    """State that a constructor made (Adagrad's sum) is constant so far: give the copy one of its own size.

    What depends on the size in another way (Adafactor's sums of rows) has been made by steps, which make it again.
    """
    parts = given.values()
    if not all(_numel(value) <= 1 or (isinstance(value, Tensor) and value.shape == like.shape) for value in parts):
        return
    for key, value in given.items():
        if isinstance(value, Tensor) and value.shape == like.shape and value.numel():
            value = torch.full(param.shape, float(value.flatten()[0]), dtype=value.dtype)
        state[param][key] = deepcopy(value.cpu() if isinstance(value, Tensor) else value)


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else len(value) if isinstance(value, (list, tuple, dict)) else 1


def _plain(value: Any) -> Any:
    """Tensors as nested lists, so that values compare with ==; what has no value to compare is left out."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key if isinstance(key, (str, int)) else id(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else None


def _same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    ours, theirs = [t for call in one for t in call], [t for call in other for t in call]
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
