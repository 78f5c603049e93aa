"""Which layer computes in which dtype: a policy is what the user writes, a plan is what it means for one model.

Why it exists: people write precision down once ("bf16, but the time embedding in fp32") and need to see, before
training, what that does to every layer of the model at hand, including layers somebody else wrote.

What it leaves out: changing the model. :mod:`lightning_mixprec.layers` and :mod:`lightning_mixprec.master` act on the
plan; nothing here touches a module.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from lightning_mixprec.eligible import Entry, choose, show
from lightning_mixprec.opaque import is_script
from lightning_mixprec.plan import Kind, LayerPlan, PrecisionPlan
from lightning_mixprec.practice import is_embedding, is_output
from lightning_mixprec.reparametrised import is_reparametrised
from lightning_mixprec.widening import HALF

Float8Recipe: TypeAlias = Literal["tensorwise", "rowwise"]

COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of all that is not a linear layer, and of what enters and leaves those
}

# Not in any autocast list, and without a kernel for mixed dtypes.
_WIDE = (nn.Bilinear,)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)


class PrecisionPolicy:
    """Compute dtype of a model, with the layers that must stay in fp32 and the linear layers that may go down to fp8.

    An entry is a module type, or a glob on a class name, a qualified module name or a qualified parameter name. A
    glob on a qualified name may leave out leading parts: ``"time_embedding.*"`` matches
    ``net.time_embedding.linear_1``, and ``net.time_embedding`` itself where that has nothing below it. A container
    covers what lies below it, functional operations in its ``forward`` included. A parameter that is named by itself is
    stored in fp32, and its layer computes as before. Where several entries or defaults meet, also over a module or
    parameter that is shared, the most precise wins. An entry that matches nothing is an error.

    Between an fp32 and an fp8 entry the one that names the layer more precisely wins: names over classes, names without
    wildcards over those with, deeper modules over those around them, and fp32 where that does not tell.

    Args:
        compute: ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"fp8"``: bf16, with every linear layer that qualifies in fp8.
        fp32: Entries that compute in fp32, in addition to the defaults.
        fp8: Entries whose linear layers compute in fp8, by torchao: ``nn.Linear`` itself, of features that are
            multiples of 16. Others stay as they are, and :attr:`PrecisionPlan.fp8_refused` says why. Not for compute
            ``"fp32"``.
        fp32_defaults: Keep by default what practice keeps in fp32: parameters and statistics of normalisation
            layers, embeddings of timestep, noise level, label and position, known by the names in use
            (``time_embed*``, ``map_noise``, ``*fourier*``) and classes (``GaussianFourierProjection``,
            ``SinusoidalPosEmb``, ``TimestepEmbedder``), and the network's output layer. False drops the embeddings and
            the output layer; normalisation layers stay as they are, since 16-bit statistics are of no use to anyone.
            Features that a network makes by a matrix product in its own ``forward`` cannot be known: give them a
            module.
        fp8_defaults: Leave out of fp8 what practice leaves out: first and last layers, embeddings, and modulation,
            known by their names; with compute ``"fp8"`` also what comes first and last in the model, where no
            name tells, and frozen layers. An entry that names such a layer, or one around it that is known as such,
            includes it.
        fp8_recipe: One scale for each tensor, ``"tensorwise"``, the fastest, or one for each row, ``"rowwise"``, the
            more accurate for tensors with outliers. Both are torchao's: e4m3, and e5m2 for tensorwise gradients.
        emulate: Compute what fp8 hardware would, slowly, on any device: for tests and trials.

    Raises:
        ValueError: If an argument is unknown, an entry has the wrong form or stands in both lists, or arguments for fp8
            are given without fp8.

    Example:
        >>> policy = PrecisionPolicy("bf16", fp32=[nn.Embedding, "head"])
        >>> policy
        PrecisionPolicy('bf16', fp32=[Embedding, 'head'])
        >>> net = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))})
        >>> print(PrecisionPolicy("bf16", fp8=["mlp.*"]).resolve(net))
        layer  type    dtype           parameters  reason
        mlp.0  Linear  fp8 (bfloat16)  1,088       fp8 entry 'mlp.*'
        mlp.2  Linear  bfloat16        520         compute; not fp8: 64 -> 8 features are not multiples of 16
    """

    def __init__(
        self,
        compute: str = "bf16",
        fp32: Iterable[Entry] = (),
        fp8: Iterable[Entry] = (),
        *,
        fp32_defaults: bool = True,
        fp8_defaults: bool = True,
        fp8_recipe: Float8Recipe = "tensorwise",
        emulate: bool = False,
    ) -> None:
        if not isinstance(compute, str) or compute not in COMPUTE_DTYPES:
            short = str(compute).removeprefix("torch.").lower()[:2]
            hint = {"16": "fp16", "32": "fp32", "bf": "bf16", "ha": "fp16", "fl": "fp32"}.get(short)
            hint = "fp16" if "float16" in str(compute) and hint == "fp32" else hint
            hint = "fp8" if "8" in str(compute) else hint
            meant = f" Did you mean {hint!r}?" if hint else ""
            raise ValueError(
                f"Unknown compute precision {compute!r}. Choose one of {', '.join(map(repr, COMPUTE_DTYPES))}.{meant}"
            )
        if fp8_recipe not in get_args(Float8Recipe):
            choices = " or ".join(map(repr, get_args(Float8Recipe)))
            raise ValueError(f"Unknown fp8_recipe={fp8_recipe!r}. Choose {choices}.")
        self.compute = compute
        self.fp32 = _entries("fp32", fp32)
        self.fp8 = _entries("fp8", fp8)
        self.fp32_defaults = fp32_defaults
        self.fp8_defaults = fp8_defaults
        self.fp8_recipe = fp8_recipe
        self.emulate = emulate
        for entry in self.fp8:
            if entry in self.fp32:
                raise ValueError(f"{show(entry)} stands in fp32 and in fp8. Take it out of one of the two.")
        if self.fp8 and compute == "fp32":
            raise ValueError(
                "fp8 layers take and give 16-bit activations, and compute='fp32' has none. Write "
                f"PrecisionPolicy('bf16', fp8=[{', '.join(map(show, self.fp8))}])."
            )
        if not self.uses_fp8:
            for given in ("fp8_defaults=False" * (not fp8_defaults), "emulate=True" * bool(emulate)):
                if given:
                    raise ValueError(f"{given} is about fp8, and nothing is fp8. Write fp8=[...], or compute='fp8'.")

    @property
    def uses_fp8(self) -> bool:
        """Whether any layer may compute in fp8."""
        return self.compute == "fp8" or bool(self.fp8)

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
        origins: dict[str, str] = {"": ""}  # of decisions: the module that was named
        named: set[str] = set()  # modules that an entry or default names, rather than one above them
        overflowed = {id(owned[name]) for name in also_fp32}
        for name, module in owned.items():
            decision = self._decide(name, module, matched)
            if id(module) in overflowed:
                decision = ("fp32", "fallback: overflowed")
            above = decided[name.rpartition(".")[0]]
            if decision is not None and not (decision[0] == "norm" and above[0] == "fp32"):
                named.add(name)
                origins[name] = name
            else:
                origins[name] = origins[name.rpartition(".")[0]]
                script = is_script(module)  # stays as it is, also below an fp32 container
                decision = above if above[0] == "fp32" and not script else ("compute", "compute")
            decided[name] = decision

        fp32_names = {id(owned[name]): name for name, (kind, _) in decided.items() if kind == "fp32"}
        for name, module in owned.items():
            if decided[name][0] != "fp32" and id(module) in fp32_names:
                decided[name] = ("fp32", f"shared with {fp32_names[id(module)]!r}")
        for name, module in owned.items():
            self._match(self.fp8, name, module, matched)
        refused: dict[str, str] = {}
        if self.uses_fp8:
            everything = self.compute == "fp8"
            chosen, refused = choose(
                owned, decided, origins, self.fp32, self.fp8, everything=everything, defaults=self.fp8_defaults
            )
            decided |= {name: ("fp8", reason) for name, reason in chosen.items()}
            decided |= {
                name: ("compute", f"compute; not fp8: {why}")
                for name, why in refused.items()
                if decided[name][0] == "compute"
            }

        parameters: dict[str, torch.dtype] = {}
        wide: dict[int, str] = {}  # identity of parameters that stay fp32 -> why
        modules = {"": model, **owned}
        for full, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"Parameter {full!r} has no shape yet (a lazy module), so it can have no master. Run the model "
                    "once on a batch before fit, for example in `configure_model`."
                )
            entry, owner = self._match(self.fp32, full, None, matched), full.rpartition(".")[0]
            if entry is not None:
                wide[id(parameter)] = f"fp32 entry {show(entry)}"
            elif is_reparametrised(modules[owner]):
                wide.setdefault(id(parameter), "default: reparametrised")
            elif self.fp32_defaults and is_embedding(full):
                wide.setdefault(id(parameter), "default: embedding")
            elif decided[owner][0] in ("fp32", "norm"):
                wide.setdefault(id(parameter), f"shared with {owner!r}")
        for full, parameter in model.named_parameters(remove_duplicate=False):
            double = parameter.dtype == torch.float64 or parameter.is_complex()
            half = parameter.dtype in HALF
            script = is_script(modules[full.rpartition(".")[0]])
            if script:
                parameters[full] = parameter.dtype  # its graph knows no other
                if half and parameter.requires_grad:
                    raise ValueError(
                        f"Parameter {full!r} trains in {parameter.dtype} inside TorchScript, whose parameters can have "
                        "no masters. Freeze it, or give the module in float32 or as plain Python."
                    )
            elif compute == torch.float32:
                parameters[full] = torch.float32 if half and parameter.requires_grad else parameter.dtype
            elif not parameter.is_floating_point():
                parameters[full] = parameter.dtype
            elif id(parameter) in wide:
                parameters[full] = parameter.dtype if double else torch.float32
            elif not parameter.requires_grad:
                parameters[full] = parameter.dtype
            else:
                parameters[full] = compute
            if script:
                continue
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
                dtype = dtypes.pop() if len(dtypes) == 1 else (torch.float32 if kind in ("fp32", "norm") else compute)
                if kind == "compute" and own and not any(value.requires_grad for _, value in own):
                    reason = "frozen, as given" if dtype != compute else reason
                elif kind in ("compute", "fp8") and compute != torch.float32:
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
        return PrecisionPlan(compute, layers, kinds, parameters, refused)

    def _decide(self, name: str, module: nn.Module, matched: set[Entry]) -> tuple[Kind, str] | None:
        entry = self._match(self.fp32, name, module, matched)
        if entry is not None:
            return "fp32", f"fp32 entry {show(entry)}"
        if is_script(module):
            return None
        if self.fp32_defaults and is_embedding(name, module):
            return "fp32", "default: embedding"
        if self.fp32_defaults and is_output(name):
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

    def _match(
        self, entries: Iterable[Entry], name: str, module: nn.Module | None, matched: set[Entry]
    ) -> Entry | None:
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
            for entry in entries
            if (isinstance(entry, str) and any(fnmatchcase(candidate, entry) for candidate in names))
            or (isinstance(entry, type) and isinstance(module, entry))
        ]
        matched.update(hits)
        return hits[0] if hits else None

    def _refuse_unmatched(self, matched: set[Entry], owned: Mapping[str, nn.Module], parameters: Iterable[str]) -> None:
        for which, entry in [*(("fp32", entry) for entry in self.fp32), *(("fp8", entry) for entry in self.fp8)]:
            if entry in matched:
                continue
            types = sorted({type(module).__name__ for module in owned.values()})
            if isinstance(entry, type):
                raise ValueError(
                    f"{which} entry {entry.__name__} matches no module of this model, which has {', '.join(types)}."
                )
            names = [*owned, *(name.rpartition(".")[2] for name in owned), *types]
            names += parameters if which == "fp32" else []
            known = {name.lower(): name for name in reversed(names)}
            bare = entry.replace(".*", "").strip("*").lower()
            near = difflib.get_close_matches(bare, known, n=4, cutoff=0.5)
            near = near or difflib.get_close_matches(bare.rpartition(".")[2], known, n=4, cutoff=0.5)
            near = [known[each] for each in near] or list(dict.fromkeys(names))[:8]
            raise ValueError(
                f"{which} entry {entry!r} matches no module, class{' or parameter' * (which == 'fp32')} of this model. "
                f"Did you mean {' or '.join(map(repr, near))}? A glob may leave out leading parts of a name."
            )

    def with_fp32(self, entries: Iterable[Entry]) -> PrecisionPolicy:
        """The same policy with more entries in :attr:`fp32`.

        Example:
            >>> PrecisionPolicy("fp16", fp32=["head"]).with_fp32(["stem"])
            PrecisionPolicy('fp16', fp32=['head', 'stem'])
        """
        made = copy.copy(self)
        made.fp32 = (*self.fp32, *_entries("fp32", entries))
        made.fp8 = tuple(entry for entry in self.fp8 if entry not in made.fp32)
        return made

    def without_fp8(self) -> PrecisionPolicy:
        """The same policy with its fp8 layers in 16 bits.

        Example:
            >>> PrecisionPolicy("fp8", fp32=["head"]).without_fp8()
            PrecisionPolicy('bf16', fp32=['head'])
        """
        compute = "bf16" if self.compute == "fp8" else self.compute
        return PrecisionPolicy(compute, self.fp32, fp32_defaults=self.fp32_defaults)

    def __repr__(self) -> str:
        parts = [repr(self.compute)]
        parts += [f"{name}=[{', '.join(map(show, of))}]" for name, of in (("fp32", self.fp32), ("fp8", self.fp8)) if of]
        defaults: dict[str, Any] = {
            "fp32_defaults": True,
            "fp8_defaults": True,
            "fp8_recipe": "tensorwise",
            "emulate": False,
        }
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return f"PrecisionPolicy({', '.join(parts)})"


def _entries(which: str, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """A list of entries, checked."""
    if isinstance(entries, (str, type)) or not isinstance(entries, Iterable):
        raise ValueError(
            f"{which}={entries!r} must be a list of module types and names. Write {which}=[{show(entries)}]."
        )
    entries = tuple(entries)
    for entry in entries:
        is_name = isinstance(entry, str) and entry != ""
        is_layer = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not (is_name or is_layer):
            number = f" Write '{entry}' for the layer of that name." if isinstance(entry, int) else ""
            raise ValueError(
                f"{which} entry {entry!r} must be a torch.nn.Module class or a name, such as 'conv_out'.{number}"
            )
    return entries


def _is_norm(module: nn.Module) -> bool:
    """Torch's normalisation layers, and leaf modules of other people that say so: RMSNorm, GroupNorm32, LayerNorm2d."""
    if isinstance(module, _NORMS):
        return True
    leaf = next(module.children(), None) is None
    parametrization = "parametr" in type(module).__module__  # spectral and weight norm act on weights
    return leaf and not parametrization and re.search(r"norm\w{0,2}$", type(module).__name__.lower()) is not None
