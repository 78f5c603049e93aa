"""fp8 linear layers against fp8 written out in float64, and the promises that they share with all other layers."""

import copy
import importlib
import io
import logging
import math
import pickle
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from launch import launch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import assert_same, loader, make_trainer, snapshot
from reference import rounded as rounded_as_masters_are
from test_recipes import checkpoint as checkpoint_of
from test_recipes import cli, scalars
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionMonitor, PrecisionPolicy
from lightning_mixprec import float8 as float8_module
from lightning_mixprec.float8 import Float8Layer, Products, check_device, swap_linear_
from lightning_mixprec.health import Limits
from lightning_mixprec.layers import Fp32Layer, NormLayer, restore_, swap_
from lightning_mixprec.sharding import shard_
from recipes.dit import DiT

BF16 = torch.bfloat16
RECIPES = ["tensorwise", "rowwise"]


# The reference: what the two formats are, from their numbers of bits


def rounded(values, bits, smallest, largest):
    """To nearest even with `bits` of mantissa; below 2**smallest the spacing no longer shrinks."""
    exponent = values.abs().clamp(min=2.0**-1000).log2().floor().clamp(min=smallest)
    spacing = 2.0 ** (exponent - bits)
    return ((values / spacing).round() * spacing).clamp(-largest, largest)


E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def cast(tensor, fmt, recipe, dim):
    """What is left of a tensor in fp8: one scale for all of it, or one for each slice along `dim` that is summed."""
    values = tensor.double()
    top = values.abs().amax() if recipe == "tensorwise" else values.abs().amax(dim, keepdim=True)
    scale = (fmt[2] / top.clamp(min=1e-12)).float().double()
    if recipe == "rowwise":
        scale = 2.0 ** scale.log2().floor()
    return rounded((values.float() * scale.float()).double(), *fmt) / scale


def reference_linear(x, weight, grad, recipe):
    """Output, gradient by the input and gradient by the weight; [B, I], [O, I], [B, O], all in float64."""
    fmt = E5M2 if recipe == "tensorwise" else E4M3  # of gradients
    output = cast(x, E4M3, recipe, 1) @ cast(weight, E4M3, recipe, 1).T
    grad_x = cast(grad, fmt, recipe, 1) @ cast(weight, E4M3, recipe, 0)
    grad_weight = cast(grad, fmt, recipe, 0).T @ cast(x, E4M3, recipe, 0)
    return output, grad_x, grad_weight


def float8_linear(inputs=64, outputs=48, *, recipe="tensorwise", dtype=BF16, emulate=True, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    return swap_linear_(layer, "cpu", dtype, Products.of(recipe, emulate=emulate))


def products(layer, x, grad):
    """Output without bias and both gradients."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    plain = output.detach() - (0 if layer.bias is None else layer.bias.detach())
    return plain, x.grad, layer.weight.grad


# A CPU computes it either way (with torch 2.11 not row by row); the plugin asks for the first.
WAYS = [(recipe, emulate) for recipe in RECIPES for emulate in (True, False)]
WAYS = [way for way in WAYS if torch.__version__ >= (2, 12) or way != ("rowwise", False)]


@pytest.mark.parametrize("tokens", [32, 5, 1, 16])
@pytest.mark.parametrize(("recipe", "emulate"), WAYS)
def test_all_three_products_are_those_of_fp8_values(recipe, tokens, emulate):
    layer = float8_linear(recipe=recipe, emulate=emulate, bias=False)
    x = torch.randn(tokens, 64).to(BF16)
    grad = (torch.randn(tokens, 48) * torch.logspace(-6, -3, 48)).to(BF16)
    for found, expected in zip(products(layer, x, grad), reference_linear(x, layer.weight, grad, recipe), strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 0.004  # the result is bf16: half a unit is 2**-9
        exact = {0: x @ layer.weight.T}.get(0 if found.shape == expected.shape == (tokens, 48) else 1)
        if exact is not None:
            assert (expected - exact.double()).norm() / exact.double().norm() > 0.01  # fp8 it is, and not bf16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_fp8_has_are_exact(recipe, dtype):
    """Powers of two, with scales that are powers of two."""
    layer = float8_linear(16, 16, recipe=recipe, dtype=dtype, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([1.75, 0.875, 0.4375, 1.75] * 4)))
    x = torch.full((16, 16), 0.875, dtype=dtype)
    x[:, ::2] = 0.4375
    grad = torch.full((16, 16), 1.75, dtype=dtype)
    wide = torch.float64
    out, grad_x, grad_weight = products(layer, x, grad)
    assert torch.equal(out.to(wide), x.to(wide) @ layer.weight.to(wide).T)
    assert torch.equal(grad_x.to(wide), grad.to(wide) @ layer.weight.to(wide))
    assert torch.equal(grad_weight.to(wide), grad.to(wide).T @ x.to(wide))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 3, 64), (2, 2, 2, 64), (0, 64), (2, 0, 64)])
def test_any_shape_of_input(recipe, shape):
    layer = float8_linear(recipe=recipe)
    x = torch.randn(shape, dtype=BF16, requires_grad=True)
    output = layer(x)
    assert output.shape == (*shape[:-1], 48)
    assert output.dtype == BF16
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape
    rows = x.detach().reshape(-1, 64)
    if len(rows):
        assert torch.equal(output.detach().reshape(-1, 48), layer(rows).detach())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_that_is_zero_gives_its_bias_exactly(recipe):
    """adaLN-Zero starts there; a scale of 448/0 would give NaN."""
    layer = float8_linear(recipe=recipe)
    nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.randn(48))
    x = torch.randn(5, 64, dtype=BF16, requires_grad=True)
    output = layer(x)
    assert torch.equal(output, layer.bias.expand(5, 48))
    output.backward(torch.ones_like(output))
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.isfinite(layer.weight.grad).all()
    assert layer.weight.grad.abs().min() > 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", ["input", "gradient"])
def test_zeros_that_enter_are_zeros(recipe, what):
    layer = float8_linear(recipe=recipe, bias=False)
    x = torch.zeros(5, 64, dtype=BF16) if what == "input" else torch.randn(5, 64, dtype=BF16)
    grad = torch.zeros(5, 48, dtype=BF16) if what == "gradient" else torch.randn(5, 48, dtype=BF16)
    output, grad_x, grad_weight = products(layer, x, grad)
    assert torch.equal(grad_weight, torch.zeros_like(grad_weight))
    assert torch.equal(output if what == "input" else grad_x, torch.zeros(5, 48 if what == "input" else 64, dtype=BF16))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(recipe, bad):
    """Clamped to the largest fp8 number, an overflow would be trained on."""
    for place in ("input", "weight", "gradient"):
        layer = float8_linear(recipe=recipe, bias=False)
        x, grad = torch.randn(5, 64, dtype=BF16), torch.randn(5, 48, dtype=BF16)
        with torch.no_grad():
            {"input": x, "weight": layer.weight, "gradient": grad}[place][1, 2] = bad
        output, grad_x, grad_weight = products(layer, x, grad)
        assert torch.isfinite(output).all() == (place == "gradient")
        assert torch.isfinite(grad_x).all() == (place == "input")
        assert torch.isfinite(grad_weight).all() == (place == "weight")


@pytest.mark.parametrize("recipe", RECIPES)
def test_outliers_cost_rowwise_less(recipe):
    """The reason to choose a recipe: one token a million times as large takes the others' bits, or not."""
    layer = float8_linear(recipe=recipe, bias=False)
    x = torch.randn(32, 64).to(BF16)
    x[0] *= 1e6
    with torch.no_grad():
        lost = (layer(x)[1:] - x[1:] @ layer.weight.T).norm() / (x[1:] @ layer.weight.T).norm()
    assert (lost > 0.3) == (recipe == "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [5, 1, 48, 100])
def test_products_are_of_shapes_that_hardware_takes(recipe, tokens, monkeypatch):
    """T89, ragged last batches. A CPU multiplies any shape; `torch._scaled_mm` on a GPU refuses the others."""
    shapes = []
    plain = torch._scaled_mm

    def picky(a, b, **kwargs):
        assert a.shape[1] % 16 == 0, a.shape
        assert b.shape[0] % 16 == b.shape[1] % 16 == 0, b.shape
        assert a.stride(1) == 1  # row-major
        assert b.stride(0) == 1  # column-major
        shapes.append((tuple(a.shape), tuple(b.shape)))
        kwargs |= dict.fromkeys(("scale_a", "scale_b"), torch.ones(()))  # on a CPU, torch 2.11 takes no others
        return plain(a, b, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    layer = float8_linear(recipe=recipe, emulate=False)
    products(layer, torch.randn(tokens, 64, dtype=BF16), torch.randn(tokens, 48, dtype=BF16))
    filled = -(-tokens // 16) * 16
    assert shapes == [((tokens, 64), (64, 48)), ((tokens, 48), (48, 64)), ((48, filled), (filled, 64))]


# Which layers


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 32), nn.Linear(32, 3), nn.Linear(64, 64)


@pytest.mark.parametrize("entries", [["a", "b", "c"], [nn.Linear], ["*"], ["Linear"]])
def test_shapes_decide(entries):
    """T89: what is not a multiple of 16 stays in the compute dtype and is listed."""
    plan = PrecisionPolicy("bf16", fp8=entries).resolve(Shapes())
    assert [layer.kind for layer in plan.layers] == ["compute", "compute", "fp8"]
    assert plan.fp8_layers == ["c"]
    reasons = ["20 -> 32 features are not multiples of 16", "32 -> 3 features are not multiples of 16"]
    assert list(plan.fp8_refused.values()) == reasons
    assert all(reason in str(plan) for reason in reasons)
    assert plan["c"] == plan.parameters["c.weight"] == BF16
    assert "fp8 (bfloat16)" in str(plan).splitlines()[3]


BLOCK = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out", "mlp.linear_1", "mlp.linear_2"]


@pytest.mark.parametrize("policy", [("fp8",), ("bf16", (), ["*"]), ("bf16", (), [nn.Linear]), ("fp16", (), ["blocks"])])
def test_what_practice_leaves_out(policy):
    """T91: first and last layer, embeddings and modulation."""
    plan = PrecisionPolicy(*policy).resolve(DiT(1, 10, 8))
    assert plan.fp8_layers == [f"blocks.{index}.{name}" for index in range(2) for name in BLOCK]
    assert plan.fp8_refused["blocks.0.modulation"] == "default: modulation"


NAMES = {
    "adaLN_modulation.1": "modulation",
    "norm1.linear": None,
    "t_embedder.mlp.0": "embedding",
    "y_embedder": "embedding",
    "x_embedder.proj": "embedding",
    "pos_embed": "embedding",
    "emb_layers.1": "embedding",
    "time_emb_proj": "embedding",
    "ensemble": None,
    "final_layer.linear": "output layer",
    "head": "last layer",
    "proj_in": "first layer",
    "blocks.0.proj_out": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_people_are_known(name):
    model = nn.Module()
    inner = model
    *above, last = name.split(".")
    for part in above:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.add_module(last, nn.Linear(16, 16))
    plan = PrecisionPolicy("bf16", fp8=[nn.Linear]).resolve(model)
    assert plan.fp8_refused.get(name) == (None if NAMES[name] is None else f"default: {NAMES[name]}")
    assert plan.fp8_layers == ([name] if NAMES[name] is None else [])
    assert PrecisionPolicy("bf16", fp8=[name]).resolve(model).fp8_layers == [name]  # whoever names it means it
    free = PrecisionPolicy("bf16", fp8=["*"], fp32_defaults=False, fp8_defaults=False)
    assert free.resolve(model).fp8_layers == [name]


class AdaLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)


def test_modulation_is_known_by_its_class():
    model = nn.ModuleDict({"norm1": AdaLayerNorm()})
    assert PrecisionPolicy("bf16", fp8=["*"]).resolve(model).fp8_refused == {"norm1.linear": "default: modulation"}


PRECISE = [
    # fp32, fp8, layers of block 0 in fp8 (q, k, v, out, 1, 2)
    (["blocks.0.mlp.linear_1"], ["blocks.*.mlp.*"], ["mlp.linear_2"]),
    (["*.linear_1"], ["blocks.0"], [*BLOCK[:4], "mlp.linear_2"]),
    (["blocks.*"], ["blocks.0.mlp"], BLOCK[4:]),
    (["blocks.0"], ["blocks.*.mlp.*"], []),
    (["blocks.0"], ["blocks.*"], []),
    (["blocks.*"], ["blocks.0"], BLOCK),
    (["*.mlp"], ["*.attn"], BLOCK[:4]),
    ([nn.Linear], ["blocks.*.mlp.*"], BLOCK[4:]),
    (["blocks.0"], [nn.Linear], []),
    (["MLP"], [nn.Linear], BLOCK[:4]),
    (["blocks.*.mlp"], ["*"], BLOCK[:4]),
    (["blocks.0.mlp"], ["blocks.0.mlp.linear_2"], ["mlp.linear_2"]),
]


@pytest.mark.parametrize(("fp32", "fp8", "expected"), PRECISE)
def test_the_more_precise_entry_wins(fp32, fp8, expected):
    plan = PrecisionPolicy("bf16", fp32, fp8).resolve(DiT(1, 10, 8))
    assert [name.removeprefix("blocks.0.") for name in plan.fp8_layers if name.startswith("blocks.0.")] == expected
    wide = [f"blocks.0.{name}" for name in BLOCK if name not in expected]
    kinds = {name: plan.kinds[name] for name in wide}
    covered = nn.Linear in fp32 or any("blocks" in e or "mlp" in str(e).lower() or "linear" in str(e) for e in fp32)
    assert covered
    assert set(kinds.values()) <= {"fp32", "compute"}
    if fp32 in (["blocks.0"], ["blocks.*"], [nn.Linear]):
        assert set(kinds.values()) <= {"fp32"}


def test_every_entry_counts():
    """Not only the one that is the most precise by itself."""
    entries = ["blocks.*", "*.modulation"]
    layers = PrecisionPolicy("bf16", fp8=entries).resolve(DiT(1, 10, 8)).fp8_layers
    assert layers == [f"blocks.{index}.{name}" for index in range(2) for name in [*BLOCK, "modulation"]]
    both = PrecisionPolicy("bf16", ["blocks.*", "*.mlp"], ["blocks.0.mlp", "blocks.1"])
    layers = both.resolve(DiT(1, 10, 8)).fp8_layers
    assert layers == ["blocks.0.mlp.linear_1", "blocks.0.mlp.linear_2", *(f"blocks.1.{name}" for name in BLOCK[:4])]


def test_blanket_leaves_out_what_comes_first_and_last_and_what_is_frozen():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model[1].requires_grad_(False)
    plan = PrecisionPolicy("fp8").resolve(model)
    assert plan.fp8_layers == ["2"]
    assert plan.fp8_refused == {"0": "default: first layer", "1": "default: frozen", "3": "default: last layer"}
    assert PrecisionPolicy("fp8", ["2"], ["0"]).resolve(model).fp8_layers == ["0"]


def test_names_tell_the_ends_before_places_do():
    model = nn.ModuleDict({"head": nn.Linear(16, 16), "conv_in": nn.Linear(16, 16)})
    model["blocks"] = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    assert PrecisionPolicy("fp8").resolve(model).fp8_layers == ["blocks.0", "blocks.1"]


class Overridden(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_layers_that_only_look_like_linear_layers():
    attention = nn.MultiheadAttention(16, 2)
    tied = nn.Linear(16, 16)
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    model = nn.ModuleDict({"own": Overridden(16, 16), "attn": attention, "conv": nn.Conv2d(16, 16, 1)})
    model.update({"patched": patched, "blocks": nn.ModuleList([tied]), "label_emb": nn.ModuleList([tied])})
    plan = PrecisionPolicy("bf16", fp8=["*"]).resolve(model)
    assert plan.fp8_layers == []
    assert plan.fp8_refused["own"] == plan.fp8_refused["patched"] == "it has a forward of its own"
    assert plan.fp8_refused["attn.out_proj"] == "attention computes with its weights without calling it"
    assert plan.fp8_refused["conv"] == "no linear layer"
    assert plan.kinds["blocks.0"] == "fp32"


WRONG = {
    "nowhere": ({"fp8": ["bloks.*"]}, r"fp8 entry 'bloks.\*' matches no module or class|Did you mean.*'blocks"),
    "type": ({"fp8": [nn.Conv3d]}, "fp8 entry Conv3d matches no module"),
    "parameter": ({"fp8": ["*.to_q.weight"]}, "fp8 entry .* matches no module, class of this model"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_entries_that_match_nothing(mistake):
    arguments, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy("bf16", **arguments).resolve(DiT(1, 10, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "fp32", "fp8": ["a"]}, r"PrecisionPolicy\('bf16', fp8=\['a'\]\)"),
        ({"fp8": "a"}, r"Write fp8=\['a'\]"),
        ({"fp8": [3]}, "fp8 entry 3 must be"),
        ({"fp8": ["a"], "fp32": ["a"]}, "'a' stands in fp32 and in fp8"),
        ({"fp8": ["a"], "fp8_recipe": "blockwise"}, "fp8_recipe='blockwise'. Choose 'tensorwise' or 'rowwise'"),
        ({"emulate": True}, "emulate=True is about fp8"),
        ({"fp8_defaults": False}, "fp8_defaults=False is about fp8"),
        ({"compute": "float8"}, "'fp32', 'bf16', 'fp16', 'fp8'. Did you mean 'fp8'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy(**arguments)


def test_a_policy_shows_what_it_is():
    policy = PrecisionPolicy("fp16", ["head"], [nn.Linear], fp8_recipe="rowwise", emulate=True)
    assert repr(policy) == "PrecisionPolicy('fp16', fp32=['head'], fp8=[Linear], fp8_recipe='rowwise', emulate=True)"


# Where it may run


@pytest.mark.parametrize(
    ("recipe", "capability", "fits"),
    [
        ("tensorwise", (8, 9), True),
        ("tensorwise", (8, 6), False),
        ("rowwise", (9, 0), True),
        ("rowwise", (8, 9), False),
    ],
)
def test_the_capability_of_the_models_own_device_counts(recipe, capability, fits, monkeypatch):
    """T92."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    policy = PrecisionPolicy("fp8", fp8_recipe=recipe)
    if fits:
        check_device(policy, torch.device("cuda", 1))
    else:
        with pytest.raises(ValueError, match=rf"Some GPU.*{capability[0]}\.{capability[1]}.*emulate=True"):
            check_device(policy, torch.device("cuda", 1))
    assert asked[0] == torch.device("cuda", 1)
    check_device(PrecisionPolicy("fp8", fp8_recipe=recipe, emulate=True), torch.device("cuda", 1))
    with pytest.raises(ValueError, match="'cpu'"):  # however many GPUs there are
        check_device(policy, torch.device("cpu"))


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.delitem(sys.modules, "lightning_mixprec.float8")
    with pytest.raises(ImportError, match=r"pip install 'lightning_mixprec\[fp8\]'"):
        MasterWeightPrecision("fp8")
    MasterWeightPrecision("bf16")
    PrecisionPolicy("fp8").resolve(Shapes())
    monkeypatch.undo()
    assert importlib.import_module("lightning_mixprec.float8") is float8_module


# Under the plugin


class Blocks(nn.Module):
    """[B, T, 16] -> [B, T, 16]; `blocks` has layers that can be fp8."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Checkpointed(Blocks):
    """Activations of blocks are computed again in backward."""

    use_reentrant = False

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Module(L.LightningModule):
    def __init__(self, net=None, *, bad=(), compiled=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = net or Blocks()
        self.bad = frozenset(bad)
        self.losses = []
        if compiled:
            self.net.compile(backend="aot_eager")

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch).float(), batch.roll(1, -1))
        self.losses.append(float(loss.detach()))
        return loss * math.inf if batch_idx in self.bad else loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).float().square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(count=6, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, 16, generator=generator) for _ in range(count)]


def policy(compute="fp8", **kwargs):
    return PrecisionPolicy(compute, emulate=True, **kwargs)


def fit(module, plugin, batches=None, **options):
    trainer = make_trainer(plugin, **options)
    trainer.fit(module, loader(batches or data()))
    return trainer


LAYERS = [f"net.blocks.{index}.{place}" for index in range(2) for place in (1, 3)]


def test_a_cpu_is_refused_before_anything_changes():
    """T92."""
    module = Module()
    before = snapshot(module)
    with pytest.raises(MisconfigurationException, match=r"'cpu'.*emulate=True"):
        fit(module, MasterWeightPrecision("fp8"))
    assert_same(snapshot(module), before)
    assert type(module.net.blocks[0][1]) is nn.Linear


def test_emulation_is_announced_once_and_fp8_is_listed(caplog):
    plugin = MasterWeightPrecision(policy())
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        fit(Module(), plugin)
    said = [str(warning.message) for warning in caught]
    assert len([text for text in said if "EMULATED" in text]) == 1
    assert plugin.emulated
    assert plugin.precision == "bf16-mixed"
    assert plugin.compute_dtype == BF16
    assert not MasterWeightPrecision("bf16").emulated
    assert plugin.plan.fp8_layers == LAYERS
    listed = [record.getMessage() for record in caplog.records if "4 linear layers" in record.getMessage()]
    assert len(listed) == 1
    assert "net.head: default: last layer" in listed[0]


def test_a_model_without_any_fp8_layer_is_warned_of():
    with pytest.warns(UserWarning, match=r"No layer of this model computes in fp8(.|\n)*not multiples of 16"):
        fit(Module(Blocks(width=20)), MasterWeightPrecision(policy()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_training_follows_the_same_network_with_layers_of_torchao(compute, recipe):
    """Against torchao's own modules in a plain loop of bf16 weights with fp32 masters; batches of 24 tokens, ragged."""
    from torchao.float8.float8_linear import Float8Linear

    dtype = {"bf16": BF16, "fp16": torch.float16}[compute]
    scaler = DynamicLossScaler(init_scale=256.0)
    plugin = MasterWeightPrecision(policy(compute, fp8=["blocks"], fp8_recipe=recipe), scaler)
    module = Module()
    plain = copy.deepcopy(module.net)
    fit(module, plugin)
    assert plugin.real_steps == 6

    masters = {name: param.detach().clone() for name, param in plain.named_parameters()}
    optimizer = torch.optim.AdamW(list(masters.values()), lr=1e-2)
    config = Products.of(recipe, emulate=True).config
    for block in plain.blocks:
        for place in (1, 3):
            block[place] = Float8Linear.from_float(block[place].to(dtype), config)
    plain.stem.to(dtype)  # the head is fp32 by neither name nor place: `head` is not a name of the fp32 defaults
    plain.head.to(dtype)
    for block in plain.blocks:
        swap_(block[0], NormLayer, "cpu", dtype)  # tested elsewhere
    for batch in data():
        params = dict(plain.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(
                    rounded_as_masters_are(masters[name], param.dtype) if param.dtype == BF16 else masters[name]
                )
                param.grad = None
        (F.mse_loss(plain(batch.to(dtype)).float(), batch.roll(1, -1)) * 256).backward()
        for name, param in params.items():
            masters[name].grad = param.grad.float() / 256
        optimizer.step()
    for name, value in module.net.state_dict().items():
        assert torch.equal(value, masters[name]), name


@pytest.mark.parametrize("masters", ["fp32", "split", "split24", "none"])
def test_masters_are_those_of_bf16(masters):
    """T24: fp32 under plain names, low bits included, whatever multiplies."""
    plugin = MasterWeightPrecision(policy(), masters=masters)
    module, seen = Module(), {}

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            layer = pl_module.net.blocks[0][1]
            seen["layer"] = (isinstance(layer, Float8Layer), isinstance(layer, nn.Linear), layer.weight.dtype)
            seen["state"] = snapshot(pl_module)

    names = list(Module().state_dict())
    before = {name: id(param) for name, param in module.named_parameters()}
    fit(module, plugin, callbacks=Look())
    assert seen["layer"] == (True, True, BF16)
    assert list(seen["state"]) == names
    assert {value.dtype for value in seen["state"].values()} == {torch.float32}
    assert {name: id(param) for name, param in module.named_parameters()} == before
    assert type(module.net.blocks[0][1]) is nn.Linear
    assert not [key for each in module.modules() for key in each.__dict__ if key.startswith("_mixprec")]
    if masters != "none":
        weight = module.state_dict()["net.blocks.0.1.weight"]
        assert not torch.equal(weight, weight.to(BF16).float())


def test_checkpoints_of_fp32_fp8_fp32(tmp_path):
    """T90: each leg resumes the last one strictly, and `weights_only` reads every file."""
    legs = [
        ("fp32", "fp32", 2),
        ("fp8", policy(), 4),
        ("again", "fp32", 6),
        ("rowwise", policy(fp8_recipe="rowwise"), 8),
    ]
    path = None
    for name, which, steps in legs:
        module, plugin = Module(), MasterWeightPrecision(which)
        at_start = {}

        class AtStart(L.Callback):
            def on_train_start(self, trainer, pl_module, kept=at_start):
                kept.update(snapshot(pl_module))

        trainer = make_trainer(plugin, max_epochs=-1, max_steps=steps, callbacks=AtStart())
        trainer.fit(module, loader(data(20)), ckpt_path=path, weights_only=False if path else None)
        assert trainer.global_step == steps
        if path:
            assert_same(at_start, torch.load(path, weights_only=True)["state_dict"])
        path = tmp_path / f"{name}.ckpt"
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        assert set(saved["state_dict"]) == set(Module().state_dict())
        Module().load_state_dict(saved["state_dict"], strict=True)
    stock = make_trainer(max_epochs=-1, max_steps=10)
    stock.fit(Module(), loader(data(20)), ckpt_path=tmp_path / "rowwise.ckpt", weights_only=False)
    assert stock.global_step == 10


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_multiply_fp8_values_too(way):
    layer = float8_linear()
    copied = copy.deepcopy(layer) if way == "deepcopy" else pickle.loads(pickle.dumps(layer))
    x = torch.randn(3, 64)
    assert torch.equal(copied(x), layer(x))
    assert isinstance(copied, Float8Layer)
    assert type(restore_(copied)) is nn.Linear
    assert not torch.equal(copied(x.to(BF16)), layer(x))
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    nn.Linear(64, 48).load_state_dict(torch.load(buffer, weights_only=True), strict=True)


def test_infinite_loss_is_skipped_without_a_trace():
    clean, module = Module(), Module(bad=[2])
    plugin = MasterWeightPrecision(policy())
    fit(module, plugin)
    assert (plugin.real_steps, plugin.skipped_steps, plugin.loss_scale) == (5, 1, 1.0)
    fit(clean, MasterWeightPrecision(policy()), [batch for index, batch in enumerate(data()) if index != 2])
    assert_same(snapshot(module), snapshot(clean))


def test_infinite_activations_are_skipped():
    """Inside an fp8 layer, where saturation could hide them."""
    batches = data()
    batches[1] = batches[1].clone()
    batches[1][0, 0, 0] = math.inf
    module, plugin = Module(), MasterWeightPrecision(policy())
    fit(module, plugin, batches)
    assert (plugin.real_steps, plugin.skipped_steps) == (5, 1)
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


def test_a_loss_scale_that_was_asked_for_is_used():
    """Ruling 11."""
    plugin = MasterWeightPrecision(policy(), DynamicLossScaler(init_scale=64.0))
    scales = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            scales.append(plugin.loss_scale)

    fit(Module(bad=[1]), plugin, callbacks=Look())
    assert scales == [64.0, 32.0, 32.0, 32.0, 32.0]
    assert MasterWeightPrecision(policy()).loss_scale == 1.0


def test_sanity_check_before_training():
    """T21: nothing that validation makes is in the way of gradients."""
    module, found = Module(), {}

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.update({name: param.grad is not None for name, param in pl_module.named_parameters()})

    trainer = make_trainer(MasterWeightPrecision(policy()), num_sanity_val_steps=1, callbacks=Look())
    trainer.fit(module, loader(data(1)), loader(data(1)))
    assert all(found.values())
    assert len(found) == len(list(module.parameters()))


class TwoSteps(Module):
    """T49: what an fp8 layer computes after a step is of the weights after it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.outputs = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(self.net(batch).float(), batch)
            self.manual_backward(loss)
            optimizer.step()
            weight = self.state_dict()["net.blocks.0.1.weight"]
            x = torch.ones(1, 32, dtype=BF16)
            expected = reference_linear(x, weight.to(BF16), torch.zeros(1, 64), "tensorwise")[0]
            layer = self.net.blocks[0][1]
            with torch.no_grad():
                self.outputs.append((layer(x) - layer.bias).double() - expected)


def test_no_weight_is_cast_before_its_step():
    module = TwoSteps()
    fit(module, MasterWeightPrecision(policy()))
    assert len(module.outputs) == 12
    assert max(float(error.abs().max()) for error in module.outputs) < 0.02


def test_schedules_and_optimizers_see_nothing_new():
    """T20."""

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lr_scheduler|overridden).*")
        trainer = fit(Scheduled(), MasterWeightPrecision(policy()))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**6)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_neighbours_of_every_precision(compute):
    """T15: fp32 into fp8 into norm into fp8 into fp32, no dtype in the way."""
    net = Blocks()
    plugin = MasterWeightPrecision(policy(compute, fp8=["blocks"], fp32=["stem", "blocks.1.3"]))
    seen = {}

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            for name, layer in pl_module.net.named_modules():
                if isinstance(layer, (nn.Linear, nn.LayerNorm)):
                    layer.register_forward_hook(lambda m, a, out, name=name: seen.update({name: out.dtype}))

    fit(Module(net), plugin, callbacks=Look())
    half = plugin.compute_dtype
    assert seen["stem"] == seen["blocks.1.3"] == torch.float32
    assert seen["blocks.0.0"] == seen["blocks.0.1"] == seen["blocks.0.3"] == seen["blocks.1.1"] == half
    assert plugin.real_steps == 6


@pytest.mark.parametrize("old", [True, False])
def test_reparametrised_layers(old):
    """T22: the weight that the iteration makes is cast, the vectors of the iteration stay fp32."""
    make = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    net = Blocks()
    make(net.blocks[0][1])
    plugin = MasterWeightPrecision(policy())
    fit(Module(net), plugin)
    assert "net.blocks.0.1" in plugin.plan.fp8_layers
    assert plugin.real_steps == 6
    for value in [*net.buffers(), *net.parameters()]:
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all()


def test_frozen_layers_that_are_named():
    net = Blocks()
    net.blocks[0].requires_grad_(False)
    before = {name: value.clone() for name, value in net.blocks[0].state_dict().items()}
    plugin = MasterWeightPrecision(policy("bf16", fp8=["blocks"]))
    fit(Module(net), plugin)
    assert plugin.plan.fp8_layers == LAYERS
    assert_same(before, dict(net.blocks[0].state_dict()))
    assert plugin.real_steps == 6


def test_gradients_are_checkpointed_as_well():
    one, two = Module(), Module(Checkpointed())
    two.load_state_dict(one.state_dict())
    for module in (one, two):
        fit(module, MasterWeightPrecision(policy()))
    assert_same(snapshot(one), snapshot(two))


# Gradients of gradients


class Curved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def penalty(net, x):
    """Of a critic: the gradient by its input, squared; and its parameters' gradients of that."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    loss = grad.square().mean()
    found = torch.autograd.grad(loss, [layer.weight for layer in net.layers])
    return loss.detach(), found


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_penalty_has_gradients(recipe, tokens):
    net, exact = Curved().bfloat16(), Curved().double()
    for layer in net.layers:
        swap_linear_(layer, "cpu", BF16, Products.of(recipe, emulate=True))
    x = torch.randn(tokens, 32)
    loss, found = penalty(net, x.bfloat16())
    expected_loss, expected = penalty(exact, x.double())
    assert float(loss) == pytest.approx(float(expected_loss), rel=0.1)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 0.15 * other.norm()


def test_a_gradient_penalty_is_trained_on():
    class Critic(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Curved()

        def training_step(self, batch, _):
            x = batch.requires_grad_()
            (grad,) = torch.autograd.grad(self.net(x).float().sum(), x, create_graph=True)
            return (grad.norm(dim=1) - 1).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    torch.manual_seed(1)
    batches = [torch.randn(16, 32) for _ in range(8)]
    ends = []
    for which in ("fp32", policy()):
        module, plugin = Critic(), MasterWeightPrecision(which)
        start = snapshot(module)
        make_trainer(plugin).fit(module, loader(batches))
        assert (plugin.real_steps, plugin.skipped_steps) == (8, 0)
        ends.append(torch.cat([(value - start[name]).flatten() for name, value in snapshot(module).items()]))
    assert plugin.plan.fp8_layers == ["net.layers.1", "net.layers.2"]
    assert (ends[1] - ends[0]).norm() < 0.3 * ends[0].norm()


# Compiled


def test_compiled_backward_multiplies_fp8_values():
    """And not 16-bit ones, as where a gradient has a gradient."""
    torch._dynamo.reset()
    layer, x, grad = float8_linear(bias=False), torch.randn(32, 64).to(BF16), torch.randn(32, 48).to(BF16)
    _, *expected = reference_linear(x, layer.weight, grad, "tensorwise")
    inputs = x.clone().requires_grad_()
    torch.compile(layer, backend="aot_eager")(inputs).backward(grad)
    exact = (grad.double() @ layer.weight.double(), grad.double().T @ x.double())
    for found, fp8, wide in zip((inputs.grad, layer.weight.grad), expected, exact, strict=True):
        assert (found.double() - fp8).norm() < 0.004 * fp8.norm()
        assert (found.double() - wide).norm() > 0.01 * wide.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_without_graph_breaks_and_once(recipe):
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = Module(), Module(compiled=True)
    graphs = []

    class Count(L.Callback):
        def on_train_batch_end(self, *_):
            graphs.append(counters["stats"]["unique_graphs"])

    fit(eager, MasterWeightPrecision(policy(fp8_recipe=recipe)))
    fit(compiled, MasterWeightPrecision(policy(fp8_recipe=recipe)), callbacks=Count())
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-3)
    assert sum(counters["graph_break"].values()) == 0
    assert graphs == [0, 1, 1, 1, 1, 1]  # tokens of the first batch are counted, uncompiled


def test_compiled_blocks_under_checkpointing():
    """Tokens of the first batch are counted uncompiled, and its backward calls the layers once more."""
    torch._dynamo.reset()

    eager, compiled = Module(Checkpointed()), Module(Checkpointed())
    compiled.load_state_dict(eager.state_dict())
    for block in compiled.net.blocks:
        block.compile(backend="aot_eager")
    for module in (eager, compiled):
        plugin = MasterWeightPrecision(policy())
        fit(module, plugin)
        assert (plugin.fp8_tokens, plugin.real_steps) == (24, 6)
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-3)


class Loud(nn.Module):
    """Its `fc` gives 1e5, which fp16 does not hold, and the norm brings it back."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        nn.init.constant_(self.fc.bias, 1e5)
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.out(self.norm(self.fc(x)))


class LoudNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), Loud()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_an_fp8_layer_that_overflows_is_moved_to_fp32(compiled):
    """Between fp8 products and their fp16 results; the others stay fp8, and a compiled network follows."""
    torch._dynamo.reset()
    counters.clear()
    module = Module(LoudNet(), compiled=compiled)
    plugin = MasterWeightPrecision(policy("fp16", fp8=["blocks"]), fallback="auto")
    with pytest.warns(UserWarning, match=r"net\.blocks\.1\.fc.*computes in fp32"):
        fit(module, plugin, data(30))
    assert plugin.fp32_layers == ["net.blocks.1.fc"]
    assert plugin.plan.fp8_layers == ["net.blocks.0.0", "net.blocks.0.2", "net.blocks.1.out"]
    assert plugin.plan.kinds["net.blocks.1.fc"] == "fp32"
    assert plugin.real_steps >= 25
    assert sum(counters["graph_break"].values()) == 0
    plain = Module(LoudNet())
    fit(plain, MasterWeightPrecision("fp32"), data(30))
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
    assert all(math.isfinite(loss) for loss in module.losses[-20:])


def test_an_overflow_is_named_in_the_error():
    plugin = MasterWeightPrecision(policy("fp16", fp8=["blocks"]), DynamicLossScaler(max_consecutive_skips=6))
    with pytest.raises(RuntimeError, match=r"net\.blocks\.1\.fc"):
        fit(Module(LoudNet()), plugin, data(30))


def test_fp32_layers_of_a_checkpoint_are_no_longer_fp8(tmp_path):
    plugin = MasterWeightPrecision(policy("fp16", fp8=["blocks"]), fallback="auto")
    fit(Module(LoudNet()), plugin, data(12)).save_checkpoint(tmp_path / "x.ckpt")
    again, kinds = MasterWeightPrecision(policy("fp16", fp8=["blocks"]), fallback="auto"), []

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            kinds.append(isinstance(pl_module.net.blocks[1].fc, Fp32Layer))

    trainer = make_trainer(again, max_epochs=-1, max_steps=plugin.real_steps + 3, callbacks=Look())
    trainer.fit(Module(LoudNet()), loader(data(20)), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert kinds == [True]
    assert again.skipped_steps == plugin.skipped_steps


# Whether it pays


def test_small_batches_are_told_so_once(tmp_path):
    plugin = MasterWeightPrecision(policy())
    logger = CSVLogger(tmp_path, name="", version="")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Module(), plugin, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
    said = [str(warning.message) for warning in caught if "tokens a step" in str(warning.message)]
    assert len(said) == 1
    assert "48 tokens a step" in said[0]  # 4 x 6 in each of two batches
    assert "2,000,000" in said[0]
    assert plugin.fp8_tokens == 48
    assert "mixprec/fp8_tokens" in (tmp_path / "metrics.csv").read_text()


class TakesWeights(nn.Module):
    """Computes with the weights of two of its layers, and calls the others."""

    def __init__(self, called=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.called = called

    def forward(self, x):
        for layer in self.layers[: self.called]:
            x = layer(x)
        for layer in self.layers[self.called :]:
            x = F.linear(x, layer.weight, layer.bias)
        return x


@pytest.mark.parametrize(("called", "named"), [(4, ["net.layers.4"]), (0, [f"net.layers.{i}" for i in range(1, 5)])])
def test_layers_that_no_token_enters_are_named_once(called, named):
    plugin = MasterWeightPrecision(policy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Module(TakesWeights(called)), plugin)
    assert plugin.plan.fp8_layers == [f"net.layers.{i}" for i in range(1, 5)]
    (said,) = [str(warning.message) for warning in caught if "No token" in str(warning.message)]
    assert f"these fp8 layers: {', '.join(named)}. " in said
    assert plugin.fp8_tokens == (24 if called else 0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_tokens_are_counted_once_though_computed_again(use_reentrant):
    """In manual optimization the backward is within the step."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    net, plugin = Checkpointed(), MasterWeightPrecision(policy())
    net.use_reentrant = use_reentrant
    fit(Manual(net), plugin)
    assert plugin.fp8_tokens == 24


def test_large_batches_are_not_warned_of(caplog):
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        fit(Module(), MasterWeightPrecision(policy()), callbacks=PrecisionMonitor(limits=Limits(fp8_tokens=24)))
    assert not [warning for warning in caught if "tokens a step" in str(warning.message)]
    assert "24 tokens a step" in caplog.text


# Several devices


WAYS = [("tensorwise", "ddp"), ("tensorwise", "fsdp2"), ("rowwise", "fsdp2")]


class Sharded(Module):
    sharded = False

    def configure_model(self):
        if not self.sharded and isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard_(self, self.trainer.precision_plugin.policy, self.device_mesh["data_parallel"])
            self.sharded = True


def train_on_two(recipe, strategy):
    plugin = MasterWeightPrecision(policy("bf16", fp8=["blocks"], fp8_recipe=recipe))
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    else:
        strategy = DDPStrategy()
    module = Sharded()
    trainer = make_trainer(plugin, strategy=strategy, devices=2, use_distributed_sampler=False)
    trainer.fit(module, loader(data(12)[trainer.global_rank :: 2]))
    state = module.net.state_dict()
    whole = {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in state.items()}
    return whole, plugin.plan.fp8_layers, plugin.fp8_tokens


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("float8")
    launch(__file__, 2, directory)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize(("recipe", "strategy"), WAYS)
def test_two_processes_train_what_one_does(recipe, strategy, two):
    """FSDP2 gathers weights in bf16, and each rank rounds them to fp8."""
    module = Module()
    plugin = MasterWeightPrecision(policy("bf16", fp8=["blocks"], fp8_recipe=recipe))
    start = snapshot(module)
    fit(module, plugin, data(12), accumulate_grad_batches=2)
    weights, layers, tokens = two[0][recipe, strategy]
    assert layers == LAYERS == plugin.plan.fp8_layers
    assert tokens == plugin.fp8_tokens == 48
    for name, value in module.net.state_dict().items():
        assert torch.equal(weights[name], two[1][recipe, strategy][0][name]), name
        assert not torch.equal(value, start[f"net.{name}"]) or not value.requires_grad
    one = torch.cat([value.flatten() for value in module.net.state_dict().values()])
    both = torch.cat([value.flatten() for value in weights.values()])
    moved = torch.cat([value.flatten() for value in start.values()])
    assert (both - one).norm() < 0.02 * (one - moved).norm()


# The recipe


def test_recipe_trains_the_smallest_dit_in_fp8(monkeypatch, capfd, tmp_path):
    """And its checkpoint is read by a network that knows nothing of fp8."""
    options = ["model=dit_tiny", "precision=fp8", "trainer.accelerator=cpu", "trainer.devices=1", "sampler.steps=2"]
    assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path / 'refused'}") == 2
    shown = capfd.readouterr().err
    assert "precision.policy.emulate=true" in shown
    assert "Traceback" not in shown
    assert not list((tmp_path / "refused").rglob("*.ckpt"))

    more = ["precision.policy.emulate=true", "trainer.max_steps=3", "trainer.log_every_n_steps=1"]
    assert cli(monkeypatch, *options, *more, f"hydra.run.dir={tmp_path}") == 0
    assert "12 linear layers" in "".join(capfd.readouterr())
    assert scalars(tmp_path, "mixprec/fp8_tokens") == {0: 128 * 16}
    state = checkpoint_of(tmp_path)["state_dict"]
    net = {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}
    DiT(1, 10, 8).load_state_dict(net, strict=True)


def test_recipe_takes_entries_and_a_recipe(monkeypatch, capfd, tmp_path):
    lists = ["precision.policy.fp8=[blocks.*.mlp.*]", "precision.policy.fp8_recipe=rowwise"]
    options = ["model=dit_tiny", "precision=bf16", *lists, "precision.policy.emulate=true", "dry_run=true"]
    assert cli(monkeypatch, *options, "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path}") == 0
    shown = capfd.readouterr().out
    assert shown.count("fp8 entry 'blocks.*.mlp.*'") == 2  # of two layers in each of the two blocks
    assert all(f"blocks.0-1.mlp.linear_{index} x2 " in shown for index in (1, 2))
    assert cli(monkeypatch, *options, "precision.policy.fp8=[bloks]", f"hydra.run.dir={tmp_path}") == 2
    assert "fp8 entry 'bloks' matches no module" in capfd.readouterr().err


@pytest.mark.slow
def test_dit_trains_as_well_as_in_bf16():
    """200 steps of the DiT recipe's network on the digits: within 2 % of bf16's loss."""
    from recipes.data import DigitsDataModule
    from recipes.diffusion import DiffusionModule
    from recipes.objective import EDM

    losses = {}
    for which in ("bf16", policy(), policy(fp8_recipe="rowwise")):
        L.seed_everything(0, verbose=False)
        found = []
        module = DiffusionModule(
            net=DiT(1, 10, 8), objective=EDM(), optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3), seed=0
        )

        class Keep(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, *_, kept=found):
                kept.append(float(outputs["loss"]))

        trainer = make_trainer(MasterWeightPrecision(which), max_epochs=-1, max_steps=200, callbacks=Keep())
        trainer.fit(module, DigitsDataModule(batch_size=128))
        losses[repr(which)] = sum(found[-50:]) / 50
    bf16, *fp8 = losses.values()
    assert fp8 == pytest.approx([bf16, bf16], rel=0.02)


if __name__ == "__main__":
    results = {
        (recipe, strategy): train_on_two(recipe, strategy) for recipe in RECIPES for strategy in ("ddp", "fsdp2")
    }
    torch.save(results, Path(sys.argv[1]) / f"rank{torch.distributed.get_rank()}.pt")
