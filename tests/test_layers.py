"""Layers whose class was exchanged, against float64 or plain fp32 computation."""

import copy
import inspect
import io
import pickle
from abc import ABC
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_mixprec.layers import ComputeLayer, Fp32Layer, NormLayer, restore_, swap_, widen

HALVES = [torch.float16, torch.bfloat16]


@torch.no_grad()
def ulps(value: Tensor, exact: Tensor) -> float:
    """Largest distance of a 16-bit `value` from the rounding of `exact`, in units of its last place."""
    rounded = exact.to(value.dtype).float()
    _, exponent = torch.frexp(rounded.abs().clamp_min(torch.finfo(value.dtype).tiny))
    unit = torch.finfo(value.dtype).eps * torch.exp2(exponent - 1)
    return float(((value.float() - rounded).abs() / unit).max())


class HandWrittenNorm(nn.Module):
    """Over the channels, as ConvNeXt has it: in 16 bits its variance would overflow or vanish."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return centred * (centred.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * self.weight[:, None, None]


class HandWrittenLayerNorm(nn.LayerNorm):
    """A subclass that does not use torch's kernel."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


class HandWrittenBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        centred = x - x.mean((0, 2, 3), keepdim=True)
        return centred * (centred.pow(2).mean((0, 2, 3), keepdim=True) + self.eps).rsqrt()


class Batch(OrderedDict):
    """A dict whose items are attributes too, as the outputs of diffusers and transformers are."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Plain:
    x: Tensor
    steps: int


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass
class Computed:
    """Making it anew would need `factor`, or double `x` twice."""

    x: Tensor
    factor: InitVar[float]
    doubled: Tensor = field(init=False)

    def __post_init__(self, factor):
        self.doubled = self.x * factor


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_layer_computes_in_fp32_from_half_input(dtype, autocast):
    layer, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(layer.state_dict())
    swap_(layer, Fp32Layer, "cpu", dtype)
    x = torch.randn(4, 8).to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, plain(x.float()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.LayerNorm([8, 4, 4]),
        lambda: nn.LayerNorm([8, 4, 4], elementwise_affine=False),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.BatchNorm2d(8).eval(),
        lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        lambda: nn.BatchNorm2d(8, momentum=None),
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda: nn.InstanceNorm2d(8, track_running_stats=True),
        lambda: nn.RMSNorm([8, 4, 4]),
        lambda: HandWrittenNorm(8),
        lambda: HandWrittenLayerNorm(4),
        lambda: HandWrittenBatchNorm(8),
        lambda: nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(128)),
    ],
)
def test_norm_layer_statistics_are_fp32(make, dtype, autocast):
    """T15: compute dtype out, within one ulp of plain fp32, for large values and for means far from zero."""
    far = (-30000, 1000 if dtype == torch.bfloat16 else 100)  # bf16 numbers near 30000 are 128 apart
    for mean, std in ((100, 3000), (0, 1), (500, 1), far):
        torch.manual_seed(0)
        plain = make()
        for param in plain.parameters():
            nn.init.uniform_(param, 0.5, 1.5)
        layer = copy.deepcopy(plain)
        swap_(layer[-1] if isinstance(layer, nn.Sequential) else layer, NormLayer, "cpu", dtype)
        for given in (dtype, torch.float32):
            values = (torch.randn(4, 8, 4, 4) * std + mean).to(given)
            for layout in (torch.contiguous_format, torch.channels_last):
                x = values.contiguous(memory_format=layout)
                with torch.autocast("cpu", dtype, enabled=autocast):
                    y = layer(x)
                assert y.dtype == dtype
                assert ulps(y, plain(x.float())) <= 1, (mean, std, given)
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name), rtol=1e-5, atol=1e-5)


def test_norm_layer_trains_fp32_parameters_from_half_activations():
    layer = swap_(nn.GroupNorm(2, 8), NormLayer, "cpu", torch.bfloat16)
    x = torch.randn(4, 8, 4, 4).bfloat16().requires_grad_()
    layer(x).float().pow(2).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


def test_containers_of_tensors_are_widened_and_the_rest_is_untouched():
    Pair = namedtuple("Pair", "a b")
    half, ids, double = torch.ones(1).half(), torch.tensor([1]), torch.ones(1).double()
    out = widen(({"x": half, "ids": ids}, [half, None], Pair(half, 3), Plain(half, 5), double, "text"))
    assert out[0]["x"].dtype == out[1][0].dtype == out[2].a.dtype == out[3].x.dtype == torch.float32
    assert out[0]["ids"] is ids
    assert out[4] is double
    assert (out[1][1], out[2].b, out[3].steps, out[5]) == (None, 3, 5, "text")
    assert half.dtype == torch.float16


def test_classes_made_from_containers_are_widened_and_stay_what_they_are():
    half = torch.ones(1).half()
    ordered, default = widen(OrderedDict(x=half)), widen(defaultdict(list, x=half))
    assert type(ordered) is OrderedDict
    assert ordered["x"].dtype == default["x"].dtype == torch.float32
    assert default["missing"] == []
    batch = widen(Batch(x=half))
    assert type(batch) is Batch
    assert batch.x is batch["x"]
    assert batch.x.dtype == torch.float32
    assert widen(Frozen(half)).x.dtype == torch.float32
    computed = widen(Computed(half, 2.0))
    assert computed.x.dtype == computed.doubled.dtype == torch.float32
    assert computed.doubled.item() == 2.0
    packed = widen(nn.utils.rnn.pack_sequence([torch.ones(2, 1).half(), torch.ones(1, 1).half()]))
    assert packed.data.dtype == torch.float32
    assert packed.batch_sizes.tolist() == [2, 1]


@pytest.mark.parametrize("compile_it", [False, True])
def test_what_a_layer_does_to_a_list_or_dict_reaches_the_caller_and_nothing_else_does(compile_it):
    """Blocks of a U-Net pop the feature maps that they use; the others' dtype is the caller's business."""

    class UpBlock(nn.Module):
        def forward(self, x, skips, cache):
            cache["hidden"] = x * 2
            return x + skips.pop() + cache["bias"]

    layer = swap_(UpBlock(), Fp32Layer, "cpu", torch.float16)
    layer = torch.compile(layer, fullgraph=True, backend="eager") if compile_it else layer
    x = torch.tensor([1.0], dtype=torch.float16)
    skips, cache = [x * 3, x * 5], {"bias": x}
    first = skips[0]
    assert layer(x, skips, cache).item() == 7.0
    assert len(skips) == 1
    assert skips[0] is first
    assert cache["bias"] is x
    assert cache["hidden"].item() == 2.0


def test_results_of_a_norm_are_narrowed_in_containers_too():
    class TwoNorm(nn.Module):
        def forward(self, x):
            return Batch(y=x / x.norm(), scale=(x.norm(), 3))

    out = swap_(TwoNorm(), NormLayer, "cpu", torch.float16)(torch.ones(4))
    assert out.y.dtype == out["scale"][0].dtype == torch.float16
    assert out["scale"][1] == 3


def test_keyword_arguments_are_widened():
    class Scale(nn.Module):
        def forward(self, x, *, by):
            return x * by["factor"]

    layer = swap_(Scale(), Fp32Layer, "cpu", torch.bfloat16)
    assert layer(torch.ones(1).bfloat16(), by={"factor": torch.ones(1).bfloat16()}).dtype == torch.float32


@pytest.mark.parametrize("kind", [Fp32Layer, NormLayer, ComputeLayer])
def test_swapped_layers_survive_copy_and_pickle_and_come_back(kind):
    layer = swap_(nn.LayerNorm(4), kind, "cpu", torch.bfloat16)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    x = torch.randn(2, 4)
    for other in (copy.deepcopy(layer), torch.load(stream, weights_only=False)):
        assert isinstance(other, nn.LayerNorm)
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))
    assert type(layer).__name__ == "LayerNorm"
    assert type(restore_(layer)) is nn.LayerNorm
    assert layer.__dict__.keys() == nn.LayerNorm(4).__dict__.keys()


def test_what_is_put_on_top_of_a_swapped_class_stays_on_top_of_its_own():
    """Also of a copy, which shares that class of torch's."""
    layer = swap_(nn.Linear(2, 2), Fp32Layer, "cpu", torch.bfloat16)
    nn.utils.parametrizations.weight_norm(layer)
    other = copy.deepcopy(layer)
    x = torch.ones(1, 2)
    for each in (restore_(layer), restore_(other)):
        assert type(each).__mro__[1:3] == (nn.Linear, nn.Module)
        assert not [name for name in vars(each) if name.startswith("_mixprec")]
        assert torch.equal(each(x), nn.functional.linear(x, each.weight, each.bias))
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear


def test_classes_that_know_how_to_copy_themselves_are_swapped_in_the_copy():
    """torch.fx makes a class per module, parametrized layers too; others have a `__reduce__` of their own."""
    x = torch.randn(2, 4).bfloat16()
    makes = [
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: ReducesItself(4),
    ]
    for make in makes:
        plain = make()
        layer = swap_(plain, Fp32Layer, "cpu", torch.bfloat16)
        copied = copy.deepcopy(layer)
        y = layer(x)
        assert y.dtype == torch.float32
        assert torch.equal(copied(x), y)
        assert copied is not layer
        assert torch.equal(restore_(copied)(x.float()), y)
        if not nn.utils.parametrize.is_parametrized(layer):  # torch refuses to pickle those
            assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)


class ReducesItself(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(x)

    def __reduce__(self):
        return (ReducesItself, (4,), self.__dict__)


def test_classes_that_watch_their_subclasses_are_swapped_unseen():
    subclasses = []

    class Registered(nn.Module):
        def __init_subclass__(cls, *, key, **kwargs):
            super().__init_subclass__(**kwargs)
            subclasses.append(key)

    class Layer(Registered, key="layer"):
        def forward(self, x):
            return x

    assert swap_(Layer(), Fp32Layer, "cpu", torch.float16)(torch.ones(1).half()).dtype == torch.float32
    assert subclasses == ["layer"]


@pytest.mark.parametrize("kind", [Fp32Layer, NormLayer, ComputeLayer])
def test_swapped_layers_show_the_signature_of_their_class(kind):
    layer = nn.Bilinear(2, 2, 2)
    signature = inspect.signature(layer.forward)
    assert inspect.signature(swap_(layer, kind, "cpu", torch.bfloat16).forward) == signature


class Slotted:
    __slots__ = ()


class AbstractFirst(ABC, nn.Linear):
    pass


class GenericFirst(Generic[TypeVar("T")], nn.Linear):
    pass


class SlottedFirst(Slotted, nn.Linear):
    pass


class BelowAbstract(AbstractFirst):
    def forward(self, x):
        return super().forward(x) * 1e5


@pytest.mark.parametrize("base", [AbstractFirst, GenericFirst, SlottedFirst, BelowAbstract])
def test_classes_that_begin_with_a_base_that_is_no_module(base):
    """Python calls their layout in memory another one than that of classes that begin with nn.Module."""
    plain = base(2, 2)
    layer = swap_(copy.deepcopy(plain), Fp32Layer, "cpu", torch.float16)
    x = torch.ones(1, 2).half()
    expected = plain(x.float())
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.float16):
        for each in (layer, copy.deepcopy(layer), torch.load(stream, weights_only=False), compiled):
            assert torch.equal(each(x), expected)
            assert each is compiled or isinstance(each, base)
    nn.utils.parametrizations.weight_norm(layer)
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float32
    nn.utils.parametrize.remove_parametrizations(restore_(layer), "weight")
    assert type(layer) is base
    assert not [name for name in layer.__dict__ if name.startswith("_mixprec")]


def test_a_model_reports_the_dtype_it_was_given_in():
    """diffusers' models cast timestep features to their own `dtype`, which under autocast is that of fp32 weights."""

    class Model(nn.Linear):
        @property
        def dtype(self):
            return self.weight.dtype

    model = swap_(Model(2, 2), ComputeLayer, "cpu", torch.bfloat16).bfloat16()
    assert model.dtype == copy.deepcopy(model).dtype == torch.float32
    attributes = nn.Linear(2, 2).__dict__.keys()
    assert restore_(model).__dict__.keys() == attributes
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Fp32Layer, NormLayer, ComputeLayer])
def test_swapped_layers_compile_without_graph_breaks(kind):
    layer = swap_(nn.LayerNorm(4), kind, "cpu", torch.bfloat16)
    x = torch.randn(2, 4).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), layer(x))


class TakesAnything(nn.Module):
    """Calls its own forward through another method, which squares values that do not fit into fp16."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch.x if hasattr(batch, "x") else batch[0]
        return self.proj(x * 1e5) * 1e-5

    def encode(self, batch):
        return self.forward(batch)


WAYS = {
    "called": lambda layer: layer,
    "another method": lambda layer: layer.encode,
    "functional_call": lambda layer: lambda batch: functional_call(layer, dict(layer.named_parameters()), (batch,)),
    "checkpoint": lambda layer: lambda batch: checkpoint(layer, batch, use_reentrant=False),
    "reentrant": lambda layer: lambda batch: checkpoint(lambda x: layer({"x": x}), batch["x"], use_reentrant=True),
    "compiled": lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager"),
    "compiled in place": lambda layer: layer.compile(fullgraph=True, backend="aot_eager") or layer,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_fp32_layer_equals_plain_fp32_however_it_is_called(way, autocast):
    """Outputs and gradients, bit for bit; a user's hooks see what goes in and what comes out."""
    layer = TakesAnything()
    plain = copy.deepcopy(layer)
    swap_(layer, Fp32Layer, "cpu", torch.float16)
    swap_(layer.proj, Fp32Layer, "cpu", torch.float16)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0]["x"].dtype, output.dtype)))
    x = torch.randn(2, 4).half()
    given, expected = x.clone().requires_grad_(), x.float().requires_grad_()
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            y = WAYS[way](layer)({"x": given})
        y.sum().backward()
    wanted = plain({"x": expected})
    wanted.sum().backward()
    assert torch.equal(y, wanted)
    assert torch.equal(layer.proj.weight.grad, plain.proj.weight.grad)
    assert torch.equal(given.grad, expected.grad.half())
    assert set(seen) <= {(torch.float16, torch.float32)}
    assert seen or way == "another method"


@pytest.mark.parametrize(
    "make", [tuple, list, lambda x: OrderedDict(x=x[0]), lambda x: Frozen(x[0]), lambda x: Computed(x[0], 2.0)]
)
def test_containers_are_widened_inside_a_compiled_graph(make):
    layer = swap_(TakesAnything(), Fp32Layer, "cpu", torch.float16)
    batch = make([torch.randn(2, 4).half()])
    # torch 2.11 breaks the graph where an object is copied: that costs time, and changes nothing.
    whole = torch.__version__ >= (2, 12) or isinstance(batch, tuple | list | dict)
    with torch.autocast("cpu", torch.float16):
        y = torch.compile(layer, fullgraph=whole, backend="eager")(batch)
        assert y.dtype == torch.float32
        assert torch.equal(y, layer(batch))


def test_autocast_inside_of_a_norm_keeps_no_cast_weights():
    """As `torch.autocast(enabled=False)` would: the outermost of all clears the cache when it is left."""

    class Gated(nn.LayerNorm):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.linear(super().forward(x), self.gate).float()

    norm = Gated(4)
    norm.gate = nn.Parameter(torch.eye(4))
    swap_(norm, NormLayer, "cpu", torch.bfloat16)
    x = torch.randn(2, 4)
    before = norm(x)
    with torch.no_grad():
        norm.gate.mul_(2)
    assert torch.equal(norm(x), 2 * before)


class HandWrittenAttention(nn.Module):
    def forward(self, q, k, v, mask):
        logits = q @ k.transpose(-2, -1)  # not scaled: 40 * 40 * 64 does not fit into fp16
        return (logits + mask).softmax(-1) @ v


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.float32])
def test_functional_operations_of_a_container_are_fp32(mask_dtype):
    """Logits that overflow fp16, and additive masks of the smallest number of either dtype."""
    plain, layer = HandWrittenAttention(), swap_(HandWrittenAttention(), Fp32Layer, "cpu", torch.float16)
    torch.manual_seed(0)
    q, v = torch.full((1, 4, 64), 40.0).half(), torch.randn(1, 4, 8).half()
    mask = torch.zeros(4, 4, dtype=mask_dtype)
    mask[:, 2:] = torch.finfo(mask_dtype).min
    with torch.autocast("cpu", torch.float16):
        y = layer(q, q, v, mask=mask)
        assert not torch.isfinite(plain(q, q, v, mask)).all()
    assert torch.equal(y, plain(q.float(), q.float(), v.float(), mask.float()))
    torch.testing.assert_close(y, v[:, :2].float().mean(1, keepdim=True).expand(1, 4, 8))


def test_a_forward_assigned_on_the_instance_is_refused():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    with pytest.raises(TypeError, match=r"Linear.*forward of its own"):
        swap_(layer, Fp32Layer, "cpu", torch.bfloat16)
