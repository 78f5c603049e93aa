"""Linear layers whose matrix products are of fp8 values, by torchao.

Why it exists: fp8 matrix units do twice the work of 16-bit ones. torchao has the arithmetic, scales computed anew for
each tensor and each call, and modules of its own to take the place of linear layers. Here layers stay what they are and
exchange their class, as all layers of a policy do, so parameters keep identity, names and fp32 masters, and checkpoints
know nothing of fp8. Weights are rounded to fp8 for each call, from their 16 bits.

What it leaves out: which layers (:mod:`lightning_mixprec.eligible`), and fp8 in anything but matrix products: between
layers everything is 16-bit, under FSDP2 weights are gathered in 16 bits (torchao's
``enable_fsdp_float8_all_gather`` stays off: it wants parameters of a class of its own), and no memory is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_mixprec.apart import in_backward
from lightning_mixprec.eligible import MULTIPLE
from lightning_mixprec.layers import SwappedLayer, swap_
from lightning_mixprec.policy import Float8Recipe, PrecisionPolicy

try:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
except ImportError as error:
    raise ImportError(
        "fp8 layers are torchao's, which is not installed. Write pip install 'lightning_mixprec[fp8]', or train with "
        "PrecisionPolicy('bf16') and without fp8=[...]."
    ) from error

_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # of NVIDIA's devices: Ada Lovelace, Hopper
_CAPABILITY_AMD = (9, 4)  # MI300


@dataclass(frozen=True)
class Products:
    """How torchao makes the three matrix products of a linear layer.

    Attributes:
        config: What is cast to which fp8 format, with one scale for what.
        whole: For the products, where the number of tokens is a multiple of 16.
        ragged: The same, but the tokens over which the weight's gradient sums are filled up with zeros.

    Example:
        >>> Products.of("tensorwise", emulate=True).config.emulate
        True
    """

    config: Any
    whole: Any
    ragged: Any

    @classmethod
    def of(cls, recipe: Float8Recipe, *, emulate: bool) -> Products:
        """Those of a recipe of torchao."""
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        whole = Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config).linear_mm_config
        return cls(config, whole, whole._replace(grad_weight=whole.grad_weight._replace(pad_inner_dim=True)))


@torch.compiler.allow_in_graph
class _Product(matmul_with_hp_or_float8_args):
    """The product of torchao; a gradient that is to have a gradient of its own (``create_graph``) is a 16-bit one.

    fp8 values have none: torchao's backward casts to them by operations of which autograd does not know.
    """

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return matmul_with_hp_or_float8_args.backward(ctx, grad_output)
        rows, weight = ctx.saved_tensors  # [tokens, in], [in, out]
        return grad_output @ weight.t(), rows.t() @ grad_output, None, None


class Float8Layer(SwappedLayer):
    """A linear layer that multiplies fp8 values: 16-bit activations in and out, weights and gradients 16-bit or fp32.

    Scales follow the largest magnitude, so nothing finite overflows, and a tensor of zeros gives exact zeros. One that
    is not finite gives NaN, forward and backward. A gradient penalty's gradients (``create_graph=True``) are made in 16
    bits.

    Example:
        >>> layer = swap_linear_(nn.Linear(16, 16), "cpu", torch.bfloat16, Products.of("tensorwise", emulate=True))
        >>> layer(torch.ones(3, 16)).dtype
        torch.bfloat16
    """

    in_features: int
    weight: Tensor
    bias: Tensor | None
    _mixprec_products: Products

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, in the compute dtype."""
        if self._mixprec is None or not input.numel():  # the largest of no magnitudes does not exist
            result: Tensor = super().forward(input)
            return result
        device_type, compute = self._mixprec
        products = self._mixprec_products
        with torch.autocast(device_type, enabled=False):
            rows = input.reshape(-1, input.shape[-1]).to(compute)  # of another width, it is refused below
            # Hardware sums over multiples of 16, and the gradient of the weight sums over tokens.
            gemms = products.ragged if rows.shape[0] % MULTIPLE else products.whole
            output: Tensor = _Product.apply(rows, self.weight.to(compute).t(), gemms, products.config)
            output = output.reshape(*input.shape[:-1], -1)
            return output if self.bias is None else output + self.bias.to(compute)


def swap_linear_(layer: nn.Module, device_type: str, compute: torch.dtype, products: Products) -> nn.Module:
    """Make a linear layer one that multiplies fp8 values, in place, and return it.

    Example:
        >>> from lightning_mixprec.layers import restore_
        >>> layer = swap_linear_(nn.Linear(16, 16), "cpu", torch.float16, Products.of("rowwise", emulate=True))
        >>> isinstance(layer, Float8Layer), type(restore_(layer)) is nn.Linear
        (True, True)
    """
    swap_(layer, Float8Layer, device_type, compute)
    layer.__dict__["_mixprec_products"] = products
    return layer


def swap_linears_(model: nn.Module, names: Iterable[str], device_type: str, policy: PrecisionPolicy) -> None:
    """Make the linear layers of these names multiply fp8 values, in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(16, 16))
        >>> swap_linears_(net, ["0"], "cpu", PrecisionPolicy("bf16", fp8=["0"], emulate=True))
        >>> isinstance(net[0], Float8Layer)
        True
    """
    convert_to_float8_training(nn.Identity())  # has nothing to convert: torchao readies torch's compiler for fp8
    products = Products.of(policy.fp8_recipe, emulate=policy.emulate)
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, Float8Layer):  # anew, a compiled model would be compiled again
            swap_linear_(layer, device_type, policy.compute_dtype, products)


def check_device(policy: PrecisionPolicy, device: torch.device) -> None:
    """Refuse a device that cannot multiply fp8 values, unless they are emulated.

    Args:
        policy: One that uses fp8.
        device: The model's, not merely one that the machine has.

    Raises:
        ValueError: Says what the device lacks, and what to write.

    Example:
        >>> check_device(PrecisionPolicy("fp8", emulate=True), torch.device("cpu"))
    """
    if policy.emulate:
        return
    if device.type != "cuda":
        _refuse(f"a device of type {device.type!r}", "an NVIDIA device of compute capability 8.9, or an AMD MI300")
    needed = _CAPABILITY_AMD if torch.version.hip else _CAPABILITY[policy.fp8_recipe]
    has = torch.cuda.get_device_capability(device)
    if has < needed:
        what = f"{torch.cuda.get_device_name(device)}, which has compute capability {has[0]}.{has[1]}"
        _refuse(what, f"{needed[0]}.{needed[1]} for fp8_recipe={policy.fp8_recipe!r}")


def _refuse(device: str, needed: str) -> NoReturn:
    raise ValueError(
        f"fp8 layers cannot compute on {device}: they need {needed}, or later. Train there with "
        "PrecisionPolicy('bf16'), or try fp8's arithmetic, slowly, with PrecisionPolicy(..., emulate=True)."
    )


class TokenCount:
    """While entered, counts the tokens that enter fp8 layers. Compiled modules run uncompiled for that time.

    Attributes:
        tokens: Of the layer that took most of them, all its calls together.
        idle: Names of fp8 layers that took none.

    Example:
        >>> net = nn.Sequential(nn.Linear(16, 16))
        >>> swap_linears_(net, ["0"], "cpu", PrecisionPolicy("bf16", fp8=["0"], emulate=True))
        >>> with TokenCount(net) as count:
        ...     _ = net(torch.ones(4, 8, 16))
        >>> count.tokens, count.idle
        (32, [])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counts: Counter[nn.Module] = Counter()
        self._layers: dict[str, nn.Module] = {}
        self._handles: list[Any] = []
        self._stance: Any = None

    @property
    def tokens(self) -> int:  # noqa: D102 documented above
        return max(self._counts.values(), default=0)

    @property
    def idle(self) -> list[str]:  # noqa: D102 documented above
        return [name for name, layer in self._layers.items() if not self._counts[layer]]

    def __enter__(self) -> TokenCount:
        for name, layer in self._model.named_modules():
            if isinstance(layer, Float8Layer):
                self._layers[name] = layer
                self._handles.append(layer.register_forward_pre_hook(partial(_count, self._counts)))
        self._stance = torch.compiler.set_stance("force_eager")
        return self

    def __exit__(self, *error: Any) -> None:
        self._stance.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()


def _count(counts: Counter[nn.Module], layer: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor) and not in_backward():
        counts[layer] += args[0].numel() // max(args[0].shape[-1], 1)
