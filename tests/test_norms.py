"""Norms that keep 16-bit activations for backward: the numbers of fp32 norms, in half the memory."""

import pytest
import torch
from torch import nn

from lightning_mixprec.layers import NormLayer, swap_

MAKE = {
    "group": lambda: nn.GroupNorm(2, 8),
    "group without parameters": lambda: nn.GroupNorm(2, 8, affine=False),
    "layer": lambda: nn.LayerNorm((8, 5, 5)),
    "layer without bias": lambda: nn.LayerNorm(5, bias=False),
}


def swapped(name, dtype, device="cpu"):
    norm = MAKE[name]()
    with torch.no_grad():
        for param in norm.parameters():
            param.add_(torch.randn(param.shape))
    return swap_(norm, NormLayer, device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_forward_and_backward_are_those_of_fp32_rounded_once(name, channels_last, dtype):
    torch.manual_seed(0)
    norm = swapped(name, dtype)
    x = (torch.randn(3, 8, 5, 5) * 30 + 100).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    grad = torch.randn(3, 8, 5, 5).to(dtype)

    plain = MAKE[name]().double()
    plain.load_state_dict(norm.state_dict())
    wide = x.detach().double().requires_grad_()
    expected = plain(wide)
    expected.backward(grad.double())

    x.requires_grad_()
    y = norm(x)
    y.backward(grad)
    assert_rounded_once(y, expected)
    assert_rounded_once(x.grad, wide.grad)
    for param, other in zip(norm.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(param.grad.double(), other.grad, rtol=1e-5, atol=1e-5)
    assert y.stride() == expected.stride()


def assert_rounded_once(found, exact):
    """Half an ulp from the float64 reference, and what fp32 loses where values of about 4 cancel."""
    ulp = torch.finfo(found.dtype).eps * 2 ** exact.abs().clamp_min(2.0**-14).log2().floor()
    assert ((found - exact).abs() <= ulp / 2 + 4e-6).all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_sums_over_many_rows_and_statistics_are_fp32(affine, frozen):
    """torch's own kernels for 16-bit activations lose both on a CPU."""
    torch.manual_seed(0)
    plain = nn.LayerNorm(64, elementwise_affine=affine).double()
    norm = swap_(nn.LayerNorm(64, elementwise_affine=affine), NormLayer, "cpu", torch.bfloat16).requires_grad_(
        not frozen
    )
    x = (torch.randn(4, 4096, 64) + 0.5).bfloat16().requires_grad_()
    grad = torch.randn(4, 4096, 64).bfloat16()
    norm(x).backward(grad)
    wide = x.detach().double().requires_grad_()
    plain(wide).backward(grad.double())
    assert_rounded_once(x.grad, wide.grad)
    for param, other in zip(norm.parameters(), plain.parameters(), strict=True):
        if frozen:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad.double(), other.grad, rtol=1e-5, atol=1e-3)
            stock = torch.ops.aten.native_layer_norm_backward(
                grad,
                x,
                [64],
                *torch.native_layer_norm(x, [64], norm.weight, norm.bias, 1e-5)[1:],
                norm.weight,
                norm.bias,
                [True] * 3,
            )[1]
            assert (stock - plain.weight.grad).norm() > 0.02 * plain.weight.grad.norm()


@pytest.mark.parametrize("name", ["group", "layer"])
def test_backward_saves_two_bytes_for_an_activation(name):
    norm, saved = swapped(name, torch.bfloat16), []
    x = torch.randn(4, 8, 5, 5).bfloat16().requires_grad_()

    def pack(tensor):
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    small = sum(param.numel() * 4 for param in norm.parameters()) + 2 * 4 * 4 * 2  # parameters, means and deviations
    assert sum(saved) <= x.numel() * 2 + small


@pytest.mark.parametrize("name", ["group", "layer"])
def test_gradients_of_gradients(name):
    """A gradient penalty goes through; to rounding, what fp32 gives."""
    torch.manual_seed(0)
    norm = swapped(name, torch.bfloat16)
    x = torch.randn(2, 8, 5, 5).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(norm(x).float().pow(2).sum(), x, create_graph=True)
    first.float().pow(2).sum().backward()

    plain = MAKE[name]()
    plain.load_state_dict(norm.state_dict())
    wide = x.detach().float().requires_grad_()
    (other,) = torch.autograd.grad(plain(wide).pow(2).sum(), wide, create_graph=True)
    other.pow(2).sum().backward()
    error = (norm.weight.grad - plain.weight.grad).norm() / plain.weight.grad.norm()
    assert error < 0.02
    assert x.grad is not None


@pytest.mark.parametrize("name", ["group", "layer"])
def test_compiled_in_one_graph(name):
    torch.manual_seed(0)
    norm = swapped(name, torch.bfloat16)
    x = torch.randn(2, 8, 5, 5).bfloat16()
    results = []
    for function in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        y.float().pow(2).sum().backward()
        results.append((y.detach(), inputs.grad, norm.weight.grad.clone()))
        norm.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_frozen_norm_and_inputs_without_gradient():
    norm = swapped("group", torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 8, 5, 5).bfloat16().requires_grad_()
    norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None
    trained = swapped("group", torch.bfloat16)
    trained(x.detach()).float().sum().backward()
    assert trained.bias.grad is not None


@pytest.mark.filterwarnings("ignore:.*jit.trace:FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKE)
def test_a_trace_checks_itself_and_computes_the_same(name, dtype):
    """`log_graph=True` traces, and runs the trace again without gradients: it must be of the same operations."""
    torch.manual_seed(0)
    norm = swapped(name, dtype)
    x = torch.randn(3, 8, 5, 5).to(dtype)
    traced = torch.jit.trace(norm, (x,), check_trace=True)
    assert traced(x).dtype == dtype
    ulp = torch.finfo(dtype).eps * 2 ** norm(x).abs().clamp_min(2.0**-14).log2().floor()
    assert ((traced(x) - norm(x)).abs() <= ulp).all()
