"""Layers whose class was exchanged, against float64 or plain fp32 computation."""

import copy
import io
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lightning_mixprec.layers import ComputeLayer, Fp32Layer, NormLayer, restore_, swap_, widen

HALVES = [torch.float16, torch.bfloat16]


def within_one_ulp(value: Tensor, exact: Tensor) -> bool:
    """Whether a 16-bit `value` is the rounding of `exact`, or its neighbour."""
    rounded = exact.to(value.dtype)
    ulp = torch.maximum(rounded.abs().float(), torch.tensor(1e-3)) * torch.finfo(value.dtype).eps
    return bool(((value.float() - rounded.float()).abs() <= ulp).all())


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
@pytest.mark.parametrize("given", ["half", "fp32"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.LayerNorm([8, 4, 4]),
        lambda: nn.LayerNorm([8, 4, 4], elementwise_affine=False),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda: nn.RMSNorm([8, 4, 4]),
    ],
)
def test_norm_layer_statistics_are_fp32(make, given, dtype, autocast):
    """T15: compute dtype in and out, within one ulp of an fp32 computation, large values included."""
    torch.manual_seed(0)
    layer = make()
    for param in layer.parameters():
        nn.init.uniform_(param, 0.5, 1.5)
    exact = copy.deepcopy(layer).double()
    swap_(layer, NormLayer, "cpu", dtype)
    x = torch.randn(4, 8, 4, 4) * 3000 + 100
    x = x.to(dtype) if given == "half" else x
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = layer(x)
    assert y.dtype == dtype
    assert within_one_ulp(y, exact(x.double()))
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffer.double(), exact.get_buffer(name).double(), rtol=1e-4, atol=1e-4)


def test_norm_layer_trains_fp32_parameters_from_half_activations():
    layer = swap_(nn.GroupNorm(2, 8), NormLayer, "cpu", torch.bfloat16)
    x = torch.randn(4, 8, 4, 4).bfloat16().requires_grad_()
    layer(x).float().pow(2).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


def test_containers_of_tensors_are_widened_and_the_rest_is_untouched():
    @dataclass
    class Batch:
        x: Tensor
        steps: int

    Pair = namedtuple("Pair", "a b")
    half, ids, double = torch.ones(1).half(), torch.tensor([1]), torch.ones(1).double()
    out = widen(({"x": half, "ids": ids}, [half, None], Pair(half, 3), Batch(half, 5), double, "text"))
    assert out[0]["x"].dtype == out[1][0].dtype == out[2].a.dtype == out[3].x.dtype == torch.float32
    assert out[0]["ids"] is ids
    assert out[4] is double
    assert (out[1][1], out[2].b, out[3].steps, out[5]) == (None, 3, 5, "text")


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


@pytest.mark.parametrize("kind", [Fp32Layer, NormLayer, ComputeLayer])
def test_swapped_layers_compile_without_graph_breaks(kind):
    layer = swap_(nn.LayerNorm(4), kind, "cpu", torch.bfloat16)
    x = torch.randn(2, 4).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), layer(x))


def test_a_forward_assigned_on_the_instance_is_refused():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    with pytest.raises(TypeError, match=r"Linear.*forward of its own"):
        swap_(layer, Fp32Layer, "cpu", torch.bfloat16)
