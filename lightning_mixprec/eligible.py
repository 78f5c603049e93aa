"""Which linear layers may compute in fp8, why others may not, and which of two entries names a layer more precisely.

Why it exists: fp8 is worth it for large matrix products and harmful in a few places. Hardware takes only shapes that
are multiples of 16; and what practice keeps out (torchao's and torchtitan's filters, reports on diffusion transformers)
is the first and the last layer, embeddings, and what scales and shifts all features of a block at once.

What it leaves out: reading a policy (:mod:`lightning_mixprec.policy`) and the arithmetic
(:mod:`lightning_mixprec.float8`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

Entry: TypeAlias = str | type[nn.Module]
Chain: TypeAlias = Sequence[tuple[str, nn.Module]]
"""A module and all above it, by name, outermost first, the root excepted."""

MULTIPLE = 16
"""Of input and output features: what fp8 matrix units take (https://github.com/pytorch/ao/issues/571)."""

# Matched on the lower-case name of a module or of one above it. The conditioning enters every token alike.
_EMBEDDINGS = ("*embed*", "*emb", "emb_*", "*_emb_*", "pos_enc*", "map_noise", "map_label", "map_layer*")
_MODULATIONS = ("*modulation*", "adaln*", "ada_*", "*_adaln*", "film*", "affine")
_MODULATING_CLASSES = ("Ada*Norm*", "*Modulation*", "FiLM*")
# Only outside of numbered lists, where a name belongs to the network and not to a block.
_FIRST = ("conv_in", "proj_in", "img_in", "txt_in", "in_proj", "in_layer", "input_proj*", "input_layer", "stem")
_LAST = ("head", "lm_head", "conv_out", "proj_out", "out_layer", "output_proj*", "output_layer", "to_rgb")


def choose(
    modules: Mapping[str, nn.Module],
    decided: Mapping[str, tuple[str, str]],
    origins: Mapping[str, str],
    fp32: Iterable[Entry],
    fp8: Iterable[Entry],
    *,
    everything: bool,
    defaults: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """Which layers compute in fp8, and which of those that an entry covers do not.

    Args:
        modules: All modules below the model by qualified name, in model order.
        decided: Their kind and its reason without fp8.
        origins: The module that was named for that: itself, or one above it.
        fp32: Entries of the policy.
        fp8: Entries of the policy.
        everything: Whether all modules are covered, by the policy's compute precision.
        defaults: Leave out what practice leaves out.

    Returns:
        The reason why, by name; and the reason why not, by name.

    Example:
        >>> layers = {"a": nn.Linear(16, 16), "b": nn.Linear(16, 20)}
        >>> decided = dict.fromkeys(layers, ("compute", "compute"))
        >>> choose(layers, decided, {"a": "a", "b": "b"}, [], ["a", "b"], everything=False, defaults=True)
        ({'a': "fp8 entry 'a'"}, {'b': '16 -> 20 features are not multiples of 16'})
    """
    fp32, fp8 = list(fp32), list(fp8)
    known = {sensitive(name, module) for name, module in modules.items()}
    known |= {"last layer" for _, reason in decided.values() if reason == "default: output layer"}
    # By place only where no name tells: models are not always written in the order in which they compute.
    at_ends = {name: what for name, what in ends(modules).items() if what not in known} if everything else {}
    chosen: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, module in modules.items():
        chain = _chain(name, modules)
        covering: list[tuple[Entry | None, Hit]] = [*hits(fp8, chain), *([(None, Hit())] if everything else [])]
        param = next(module.parameters(recurse=False), None)
        kind, reason = decided[name]
        if param is None or not covering or kind == "norm":
            continue
        if kind == "fp32":
            stronger = [how for _, how in hits(fp32, chain)]
            covering = [each for each in covering if _outdone(each[1], reason, origins[name], stronger)]
        if not covering:
            if reason.startswith("default") and isinstance(module, nn.Linear):
                refused[name] = reason
            continue
        why = unfit(chain)
        if why is None and defaults:
            why = _left_out(chain, covering[0][1])
            covering = [each for each in covering if _left_out(chain, each[1]) is None]
            why = None if covering else why
        entry = covering[0][0] if covering else None
        if why is None and entry is None and defaults:
            why = f"default: {at_ends[name]}" if name in at_ends else None
            why = why or (None if param.requires_grad else "default: frozen")
        if why is None:
            chosen[name] = f"fp8 entry {show(entry)}" if entry is not None else "fp8"
        else:
            refused[name] = why
    others = {id(module) for name, module in modules.items() if name not in chosen}
    for name in [name for name in chosen if id(modules[name]) in others]:
        del chosen[name]
        refused[name] = "shared with a layer that is not fp8"
    return chosen, refused


def _chain(name: str, modules: Mapping[str, nn.Module]) -> Chain:
    parts = name.split(".")
    return [(above, modules[above]) for above in (".".join(parts[: end + 1]) for end in range(len(parts)))]


def _outdone(how: Hit, reason: str, origin: str, others: Sequence[Hit]) -> bool:
    """Whether an fp8 entry names a layer more precisely than all that has made it fp32."""
    if reason in ("default: embedding", "default: output layer"):
        return how.named and how.depth > origin.count(".")
    return reason.startswith("fp32 entry") and all(how.beats(other) for other in others)


def _left_out(chain: Chain, how: Hit) -> str | None:
    """What a layer is that stays out of fp8 by default, unless the entry names it, or what is so called around it."""
    for depth, (name, module) in enumerate(chain, 1):
        what = sensitive(name, module)
        if what is not None and not (how.named and how.depth >= depth):
            return f"default: {what}"
    return None


class Hit(NamedTuple):
    """How precisely an entry names a layer; a larger one is more precise, as far as one list of entries goes.

    Attributes:
        named: By its name or by that of a module above it, rather than by a class or as everything.
        exact: Without wildcards.
        depth: Of the module that it names: 1 for a child of the model. ``"blocks.*"`` names ``blocks``.
        literals: Characters that are no wildcards.

    Example:
        >>> chain = [("blocks", nn.Module()), ("blocks.0", nn.Module()), ("blocks.0.fc", nn.Linear(1, 1))]
        >>> hit(nn.Linear, chain) < hit("*.fc", chain) < hit("blocks.0.fc", chain)
        True
    """

    named: bool = False
    exact: bool = False
    depth: int = 0
    literals: int = 0

    def beats(self, other: Hit) -> bool:
        """Whether this entry surely means the layer more than ``other``, which is the safer one of the two.

        Example:
            >>> Hit(named=True, exact=True, depth=3).beats(Hit(named=True, depth=1))
            True
            >>> Hit(named=True, depth=3).beats(Hit(named=True, exact=True, depth=2))
            False
        """
        if self.named != other.named:
            return self.named
        return self.named and self.exact >= other.exact and self.depth >= other.depth and self > other


def hit(entry: Entry, chain: Chain) -> Hit | None:
    """How precisely ``entry`` names the last module of ``chain``, itself or by one above it; None if it does not.

    Example:
        >>> hit(nn.Linear, [("fc", nn.Linear(1, 1))])
        Hit(named=False, exact=False, depth=1, literals=0)
    """
    if isinstance(entry, type):
        depths = [depth for depth, (_, module) in enumerate(chain, 1) if isinstance(module, entry)]
        return Hit(depth=depths[0]) if depths else None
    base = entry
    while base.endswith(".*"):
        base = base.removesuffix(".*")
    if not base.strip("*."):
        return Hit()
    for depth, (name, module) in enumerate(chain, 1):
        parts = name.split(".")
        if any(fnmatchcase(".".join(parts[start:]), base) for start in range(len(parts))):
            plain = base.translate(str.maketrans("", "", "*?[]"))
            return Hit(named=True, exact=plain == base, depth=depth, literals=len(plain))
        if any(fnmatchcase(kind.__name__, entry) for kind in type(module).__mro__ if kind not in (nn.Module, object)):
            return Hit(depth=depth)
    return None


def hits(entries: Iterable[Entry], chain: Chain) -> list[tuple[Entry, Hit]]:
    """All entries that name the last module of ``chain``, the most precise first.

    Example:
        >>> [entry for entry, _ in hits([nn.Linear, "head", "fc"], [("fc", nn.Linear(1, 1))])]
        ['fc', <class 'torch.nn.modules.linear.Linear'>]
    """
    found = [(entry, how) for entry in entries if (how := hit(entry, chain)) is not None]
    return sorted(found, key=lambda each: each[1], reverse=True)


def unfit(chain: Chain) -> str | None:
    """Why the last module of ``chain`` cannot compute in fp8; None if it can.

    Example:
        >>> unfit([("fc", nn.Linear(20, 32))])
        '20 -> 32 features are not multiples of 16'
    """
    module = chain[-1][1]
    if not isinstance(module, nn.Linear):
        return "no linear layer"
    own: Any = module.__dict__.get("forward")
    replaced = own is not None and getattr(own, "__self__", None) is not module
    if replaced or inspect.unwrap(type(module).forward) is not nn.Linear.forward:  # unwrapped: classes made here
        return "it has a forward of its own"
    if len(chain) > 1 and isinstance(chain[-2][1], nn.MultiheadAttention):
        return "attention computes with its weights without calling it"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"{module.in_features} -> {module.out_features} features are not multiples of {MULTIPLE}"
    return None


def sensitive(name: str, module: nn.Module) -> str | None:
    """What practice calls a module that it keeps out of fp8, by its own name and class; None for all others.

    Example:
        >>> sensitive("blocks.0.adaLN_modulation", nn.Linear(16, 96)), sensitive("blocks.0.proj_out", nn.Linear(16, 16))
        ('modulation', None)
    """
    last = name.rpartition(".")[2].lower()
    if any(fnmatchcase(last, glob) for glob in _MODULATIONS):
        return "modulation"
    if any(fnmatchcase(type(module).__name__, glob) for glob in _MODULATING_CLASSES):
        return "modulation"
    if any(fnmatchcase(last, glob) for glob in _EMBEDDINGS):
        return "embedding"
    if any(part.isdigit() for part in name.split(".")):
        return None
    if any(fnmatchcase(last, glob) for glob in _FIRST):
        return "first layer"
    return "last layer" if any(fnmatchcase(last, glob) for glob in _LAST) else None


def ends(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The first and the last of the modules that own a matrix or a kernel, in model order.

    Example:
        >>> ends(dict(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).named_children()))
        {'0': 'first layer', '2': 'last layer'}
    """
    found = [
        name
        for name, module in modules.items()
        if any(param.dim() >= 2 and param.requires_grad for param in module.parameters(recurse=False))
    ]
    return {found[0]: "first layer", found[-1]: "last layer"} if found else {}


def show(entry: object) -> str:
    """An entry as it is written.

    Example:
        >>> show(nn.Linear), show("head")
        ('Linear', "'head'")
    """
    return entry.__name__ if isinstance(entry, type) else repr(entry)
