"""Which layer computes in which dtype: a policy is what the user writes, a plan is what it means for one model.

Why it exists: people write precision down once ("bf16, but the time embedding in fp32") and need to see, before
training, what that does to every layer of the model at hand, including layers somebody else wrote.

What it leaves out: changing the model. :mod:`lightning_mixprec.layers` and :mod:`lightning_mixprec.master` act on the
plan; nothing here touches a module.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm as _SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm as _WeightNorm

Kind: TypeAlias = Literal["compute", "fp32", "norm"]
Entry: TypeAlias = str | type[nn.Module]

COMPUTE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# What practice keeps in fp32 (ADM, EDM, EDM2, DiT, diffusers' `_keep_in_fp32_modules`): conditioning is tiny, and its
# error enters every layer; the output layer's error enters the sample unfiltered. Matched on a module's own name, and
# embeddings on a parameter's: DiT's and ViT's `pos_embed` is often one that belongs to the network itself.
_EMBEDDINGS = (
    "time_embed*",
    "time_mlp",
    "timestep_embed*",
    "t_embed*",
    "class_embed*",
    "label_emb*",
    "y_embed*",
    "sigma_embed*",
    "noise_embed*",
    "pos_embed*",
    "temb",
    "map_noise",
    "map_label",
    "map_layer*",
    "emb_noise",
    "emb_label",
)
_OUTPUTS = (
    "out",
    "out_norm",
    "out_conv",
    "conv_out",
    "conv_norm_out",
    "norm_out",
    "proj_out",
    "proj_out_*",
    "final_layer",
    "final_conv",
    "final_proj",
    "out_proj_final",
)

# Not in any autocast list, and without a kernel for mixed dtypes.
_WIDE = (nn.Bilinear,)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)


@dataclass(frozen=True)
class LayerPlan:
    """What the plan holds for one module.

    Attributes:
        name: Qualified name inside the model.
        type_name: Class name.
        kind: ``"compute"`` (16-bit parameters and arithmetic), ``"norm"`` (fp32 parameters and statistics, activations
            in the compute dtype) or ``"fp32"`` (all of it in fp32).
        dtype: Dtype of the layer's own parameters.
        reason: Which entry or default decided.
        parameters: Number of parameter elements that the module itself owns.

    Example:
        >>> plan = PrecisionPolicy("bf16").resolve(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
        >>> [(layer.name, layer.kind) for layer in plan.layers]
        [('0', 'compute'), ('1', 'norm')]
    """

    name: str
    type_name: str
    kind: Kind
    dtype: torch.dtype
    reason: str
    parameters: int


class PrecisionPlan(Mapping[str, torch.dtype]):
    """A policy applied to one model: a mapping from qualified module name to dtype that prints as a table.

    Attributes:
        layers: Modules that own parameters or that an entry or default names, in model order.
        kinds: Kind of every module, by qualified name (all names of a shared module, the root excepted).
        parameters: Dtype of every parameter while training, by qualified name (all names of a shared one). A
            parameter with several owners is fp32 as soon as one of them is; frozen ones of compute layers stay as
            they were given.

    Example:
        >>> plan = PrecisionPolicy("fp16", fp32=["1"]).resolve(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
        >>> plan["0"], plan["1"]
        (torch.float16, torch.float32)
    """

    def __init__(
        self, compute: torch.dtype, layers: list[LayerPlan], kinds: dict[str, Kind], parameters: dict[str, torch.dtype]
    ) -> None:
        self.compute = compute
        self.layers = layers
        self.kinds = kinds
        self.parameters = parameters
        self._dtypes = {layer.name: layer.dtype for layer in layers}

    @property
    def fp32_modules(self) -> set[str]:
        """Qualified names of all modules that compute in fp32."""
        return {name for name, kind in self.kinds.items() if kind == "fp32"}

    def __getitem__(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

    def __str__(self) -> str:
        rows = [("layer", "type", "dtype", "parameters", "reason")]
        for layer in self.layers:
            dtype = str(layer.dtype).removeprefix("torch.")
            rows.append((layer.name or "(root)", layer.type_name, dtype, f"{layer.parameters:,}", layer.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


class PrecisionPolicy:
    """Compute dtype of a model, with the layers that must stay in fp32.

    An entry is a module type, or a glob on a class name, a qualified module name or a qualified parameter name. A
    glob on a qualified name may leave out leading parts: ``"time_embedding.*"`` matches
    ``net.time_embedding.linear_1``, and ``net.time_embedding`` itself where that has nothing below it. A container
    covers what lies below it, functional operations in its ``forward`` included. A parameter that is named by itself is
    stored in fp32, and its layer computes as before. Where several entries or defaults meet, also over a module or
    parameter that is shared, the most precise wins. An entry that matches nothing is an error.

    Args:
        compute: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        fp32: Entries that compute in fp32, in addition to the defaults.
        fp32_defaults: Keep by default what practice keeps in fp32: parameters and statistics of normalisation
            layers, embeddings of timestep, noise level, label and position, and the network's output layer. False
            drops the embeddings and the output layer; normalisation layers stay as they are, since 16-bit statistics
            are of no use to anyone.

    Raises:
        ValueError: If ``compute`` is unknown or an entry has the wrong form.

    Example:
        >>> policy = PrecisionPolicy("bf16", fp32=[nn.Embedding, "head"])
        >>> policy
        PrecisionPolicy('bf16', fp32=[Embedding, 'head'])
    """

    def __init__(self, compute: str = "bf16", fp32: Iterable[Entry] = (), *, fp32_defaults: bool = True) -> None:
        if not isinstance(compute, str) or compute not in COMPUTE_DTYPES:
            short = str(compute).removeprefix("torch.").lower()[:2]
            hint = {"16": "fp16", "32": "fp32", "bf": "bf16", "ha": "fp16", "fl": "fp32"}.get(short)
            hint = "fp16" if "float16" in str(compute) and hint == "fp32" else hint
            meant = f" Did you mean {hint!r}?" if hint else ""
            raise ValueError(
                f"Unknown compute precision {compute!r}. Choose one of {', '.join(map(repr, COMPUTE_DTYPES))}.{meant}"
            )
        if isinstance(fp32, (str, type)) or not isinstance(fp32, Iterable):
            raise ValueError(f"fp32={fp32!r} must be a list of module types and names. Write fp32=[{_show(fp32)}].")
        self.compute = compute
        self.fp32 = tuple(fp32)
        self.fp32_defaults = fp32_defaults
        for entry in self.fp32:
            is_name = isinstance(entry, str) and entry != ""
            is_layer = isinstance(entry, type) and issubclass(entry, nn.Module)
            if not (is_name or is_layer):
                number = f" Write '{entry}' for the layer of that name." if isinstance(entry, int) else ""
                raise ValueError(
                    f"fp32 entry {entry!r} must be a torch.nn.Module class or a name, such as 'conv_out'.{number}"
                )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Torch dtype of ``compute``."""
        return COMPUTE_DTYPES[self.compute]

    def resolve(self, model: nn.Module, also_fp32: Collection[str] = ()) -> PrecisionPlan:
        """Apply the policy to ``model`` without changing it.

        Args:
            model: Any model.
            also_fp32: Exact qualified names of modules that overflowed, and compute in fp32 as well.

        Raises:
            ValueError: If an entry matches nothing; the message shows near misses. If a layer that is to compute in
                16 bits owns float64 or complex parameters, which have no 16-bit counterpart.

        Example:
            >>> print(PrecisionPolicy("bf16").resolve(nn.Sequential(nn.Linear(4, 2))))
            layer  type    dtype     parameters  reason
            0      Linear  bfloat16  10          compute
        """
        compute = self.compute_dtype
        owned = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        matched: set[Entry] = set()
        decided: dict[str, tuple[Kind, str]] = {"": ("compute", "compute")}
        named: set[str] = set()  # modules that an entry or default names, rather than one above them
        overflowed = {id(owned[name]) for name in also_fp32}
        for name, module in owned.items():
            decision = self._decide(name, module, matched)
            if id(module) in overflowed:
                decision = ("fp32", "fallback: overflowed")
            above = decided[name.rpartition(".")[0]]
            if decision is not None and not (decision[0] == "norm" and above[0] == "fp32"):
                named.add(name)
            else:
                decision = above if above[0] == "fp32" else ("compute", "compute")
            decided[name] = decision

        fp32_names = {id(owned[name]): name for name, (kind, _) in decided.items() if kind == "fp32"}
        for name, module in owned.items():
            if decided[name][0] != "fp32" and id(module) in fp32_names:
                decided[name] = ("fp32", f"shared with {fp32_names[id(module)]!r}")

        parameters: dict[str, torch.dtype] = {}
        wide: dict[int, str] = {}  # identity of parameters that stay fp32 -> why
        modules = {"": model, **owned}
        for full, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"Parameter {full!r} has no shape yet (a lazy module), so it can have no master. Run the model "
                    "once on a batch before fit, for example in `configure_model`."
                )
            entry, owner = self._match(full, None, matched), full.rpartition(".")[0]
            if entry is not None:
                wide[id(parameter)] = f"fp32 entry {_show(entry)}"
            elif _is_reparametrised(modules[owner]):
                wide.setdefault(id(parameter), "default: reparametrised")
            elif self.fp32_defaults and _is_embedding(full):
                wide.setdefault(id(parameter), "default: embedding")
            elif decided[owner][0] != "compute":
                wide.setdefault(id(parameter), f"shared with {owner!r}")
        for full, parameter in model.named_parameters(remove_duplicate=False):
            double = parameter.dtype == torch.float64 or parameter.is_complex()
            if not parameter.is_floating_point() or compute == torch.float32:
                parameters[full] = parameter.dtype
            elif id(parameter) in wide:
                parameters[full] = parameter.dtype if double else torch.float32
            elif not parameter.requires_grad:
                parameters[full] = parameter.dtype
            else:
                parameters[full] = compute
            if double and compute != torch.float32 and parameter.requires_grad and id(parameter) not in wide:
                raise ValueError(
                    f"Parameter {full!r} is {parameter.dtype}, which has no counterpart in {self.compute}. Convert it "
                    f"to float32, or keep it: PrecisionPolicy({self.compute!r}, fp32=[{full!r}])."
                )
        self._refuse_unmatched(matched, owned, parameters)

        layers = []
        for name, module in [("", model), *owned.items()]:
            kind, reason = decided[name]
            own = [(f"{name}.{key}".lstrip("."), value) for key, value in module.named_parameters(recurse=False)]
            if own or (name in named and compute != torch.float32):
                if compute == torch.float32:
                    kind, reason = "compute", "compute"
                dtypes = {parameters[full] for full, _ in own}
                dtype = dtypes.pop() if len(dtypes) == 1 else (torch.float32 if kind != "compute" else compute)
                if kind == "compute" and own and not any(value.requires_grad for _, value in own):
                    reason = "frozen, as given" if dtype != compute else reason
                elif kind == "compute" and compute != torch.float32:
                    by_reason: dict[str, list[str]] = {}
                    for full, value in own:
                        if id(value) in wide:
                            by_reason.setdefault(wide[id(value)], []).append(full.rpartition(".")[2])
                    notes = [f"{', '.join(keys)} in float32, {why}" for why, keys in by_reason.items()]
                    reason = "; ".join([reason, *notes])
                layers.append(
                    LayerPlan(name, type(module).__name__, kind, dtype, reason, sum(value.numel() for _, value in own))
                )
        kinds: dict[str, Kind] = {name: decided[name][0] if compute != torch.float32 else "compute" for name in owned}
        return PrecisionPlan(compute, layers, kinds, parameters)

    def _decide(self, name: str, module: nn.Module, matched: set[Entry]) -> tuple[Kind, str] | None:
        entry = self._match(name, module, matched)
        if entry is not None:
            return "fp32", f"fp32 entry {_show(entry)}"
        last = name.rpartition(".")[2]
        if self.fp32_defaults and _is_embedding(name):
            return "fp32", "default: embedding"
        # Inside a numbered list the name belongs to a block, and `proj_out` of a block is not the network's output.
        top_level = not any(part.isdigit() for part in name.split("."))
        if self.fp32_defaults and top_level and any(fnmatchcase(last, glob) for glob in _OUTPUTS):
            return "fp32", "default: output layer"
        if _is_norm(module):
            return "norm", "default: normalisation"
        if isinstance(module, _WIDE):
            return "fp32", "default: no mixed kernel"
        if isinstance(module, nn.utils.parametrize.ParametrizationList):
            return "fp32", "default: reparametrised"
        if isinstance(module, nn.MultiheadAttention):  # computes with the weights of `out_proj`, which is never called
            return self._decide(f"{name}.out_proj", module.out_proj, matched)
        return None

    def _match(self, name: str, module: nn.Module | None, matched: set[Entry]) -> Entry | None:
        """The first entry that names ``module`` (or, without one, a parameter); every entry that does is noted."""
        parts = name.split(".")
        names = [".".join(parts[start:]) for start in range(len(parts))]
        if module is not None:
            if next(module.children(), None) is None:
                names += [f"{each}." for each in names]  # "head.*" where the head is a single layer
            ours = __name__.partition(".")[0]  # a model that is being trained has classes made of ours
            bases = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] != ours]
            names += [base.__name__ for base in bases if base not in (nn.Module, object)]
        hits = [
            entry
            for entry in self.fp32
            if (isinstance(entry, str) and any(fnmatchcase(candidate, entry) for candidate in names))
            or (isinstance(entry, type) and isinstance(module, entry))
        ]
        matched.update(hits)
        return hits[0] if hits else None

    def _refuse_unmatched(self, matched: set[Entry], owned: Mapping[str, nn.Module], parameters: Iterable[str]) -> None:
        for entry in self.fp32:
            if entry in matched:
                continue
            types = sorted({type(module).__name__ for module in owned.values()})
            if isinstance(entry, type):
                raise ValueError(
                    f"fp32 entry {entry.__name__} matches no module of this model, which has {', '.join(types)}."
                )
            names = [*owned, *(name.rpartition(".")[2] for name in owned), *types, *parameters]
            known = {name.lower(): name for name in reversed(names)}
            bare = entry.replace(".*", "").strip("*").lower()
            near = difflib.get_close_matches(bare, known, n=4, cutoff=0.5)
            near = near or difflib.get_close_matches(bare.rpartition(".")[2], known, n=4, cutoff=0.5)
            near = [known[each] for each in near] or list(dict.fromkeys(names))[:8]
            raise ValueError(
                f"fp32 entry {entry!r} matches no module, class or parameter of this model. "
                f"Did you mean {' or '.join(map(repr, near))}? A glob may leave out leading parts of a name."
            )

    def __repr__(self) -> str:
        extra = f", fp32=[{', '.join(map(_show, self.fp32))}]" if self.fp32 else ""
        return f"PrecisionPolicy({self.compute!r}{extra}{'' if self.fp32_defaults else ', fp32_defaults=False'})"


def _is_embedding(name: str) -> bool:
    """Whether a module or parameter has the name of an embedding of timestep, noise level, label or position."""
    return any(fnmatchcase(name.rpartition(".")[2], glob) for glob in _EMBEDDINGS)


def _is_norm(module: nn.Module) -> bool:
    """Torch's normalisation layers, and leaf modules of other people that say so: RMSNorm, GroupNorm32, LayerNorm2d."""
    if isinstance(module, _NORMS):
        return True
    leaf = next(module.children(), None) is None
    parametrization = "parametr" in type(module).__module__  # spectral and weight norm act on weights
    return leaf and not parametrization and re.search(r"norm\w{0,2}$", type(module).__name__.lower()) is not None


def _is_reparametrised(module: nn.Module) -> bool:
    """Whether hooks make the module's weight of its own parameters: spectral and weight normalisation of old.

    Their iterations need fp32, and mix parameters with fp32 buffers.
    """
    return any(isinstance(hook, (_WeightNorm, _SpectralNorm)) for hook in module._forward_pre_hooks.values())


def _show(entry: object) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)
