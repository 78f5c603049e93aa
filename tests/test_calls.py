"""Calls of methods other than ``forward``, and of parts of a network from a hook: against float64, and the step."""

import copy
import inspect
import pickle

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from reference import TinyModule, loader, make_batches, make_trainer
from torch import nn

from lightning_mixprec import MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.autocast import is_outside, outside
from lightning_mixprec.layers import Fp32Layer, InnerLayer, restore_, swap_, swap_layers_

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Base(nn.Module):
    def decode(self, z):
        return torch.einsum("bc,cd->bd", z, self.mix.T)


class Autoencoder(Base):
    """Its methods compute between their layers, with values that do not fit into fp16; it has no `forward`."""

    loud = 1e5

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.calls = 0

    def encode(self, x, *, scale=1.0):
        """Latents."""
        return torch.einsum("bc,cd->bd", self.first(x) * self.loud, self.mix) / self.loud * scale

    def decode(self, z):
        return super().decode(self.last(z))

    def reconstruct(self, x, depth=1):  # calls itself, and others
        x = self.decode(self.encode(x))
        return x if depth == 0 else self.reconstruct(x, depth - 1)

    @torch.no_grad()
    def sample(self, x, steps=2):
        for _ in range(steps):
            x = self.encode(x) @ self.mix
            given = yield x
            x = x if given is None else given

    def note(self, name, value):
        self.calls += 1
        return {"name": name, "value": value}

    def fill(self, params):
        for param in params:
            param.data.fill_(3.0)

    @property
    def size(self):
        return self.calls

    @staticmethod
    def twice(x):
        return x * 2

    @classmethod
    def make(cls):
        return cls()


def run(module, way, x):
    if way == "generator":
        *_, last = module.sample(x)
        return last
    return getattr(module, way)(x)


@pytest.mark.parametrize("way", ["encode", "decode", "reconstruct", "generator"])
@pytest.mark.parametrize("compute", HALF)
def test_methods_of_an_fp32_container_compute_in_fp32(compute, way):
    """Also of copies and pickles; their functional operations would overflow fp16, and round to bf16."""
    layer, dtype = Autoencoder(), HALF[compute]
    layer.loud = 1e5 if way == "encode" or compute == "bf16" else 10.0
    exact = copy.deepcopy(layer).double()
    kinds = PrecisionPolicy(compute, fp32=["vae"]).resolve(nn.ModuleDict({"vae": layer})).kinds
    swap_layers_(nn.ModuleDict({"vae": layer}), kinds, "cpu", dtype)
    x = torch.randn(4, 8).to(dtype)
    expected = run(exact, way, x.double())
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.autocast("cpu", dtype):
            y = run(each, way, x)
            assert torch.is_autocast_enabled("cpu")
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(layer, Autoencoder)
    assert type(restore_(layer)) is Autoencoder


def test_between_two_results_of_a_generator_the_caller_computes_as_before():
    layer = swap_(Autoencoder(), Fp32Layer, "cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        sampling = layer.sample(torch.randn(2, 8).bfloat16(), steps=3)
        assert next(sampling).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        assert sampling.send(torch.zeros(2, 8)).dtype == torch.float32
        sampling.close()
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", [Fp32Layer, InnerLayer])
def test_other_methods_do_what_they_did(kind):
    layer = swap_(Autoencoder(), kind, "cpu", torch.bfloat16)
    value = [1, "a", torch.ones(1)]
    found = layer.note("x", value)
    assert found["value"] is value
    assert layer.calls == layer.size == 1
    half = nn.Parameter(torch.zeros(2).bfloat16())
    layer.fill([half])  # parameters are written to, and not copies of them
    assert half.tolist() == [3.0, 3.0]
    assert layer.twice(torch.ones(1).bfloat16()).dtype == torch.bfloat16
    assert type(type(layer).make()) is type(layer)
    assert inspect.signature(layer.encode) == inspect.signature(Autoencoder().encode)
    assert layer.encode.__doc__ == "Latents."


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [Fp32Layer, InnerLayer])
def test_methods_compile_without_graph_breaks(kind, autocast):
    layer = Autoencoder()
    for each in (layer, layer.first, layer.last):
        swap_(each, kind, "cpu", torch.bfloat16)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=True) if autocast else outside("cpu"):
        compiled = torch.compile(layer.reconstruct, fullgraph=True, backend="eager")(x)
        assert torch.equal(compiled, layer.reconstruct(x))
    assert compiled.dtype == (torch.float32 if kind is Fp32Layer else torch.bfloat16)


def test_a_method_assigned_on_the_instance_is_refused():
    model = nn.ModuleDict({"vae": Autoencoder()})
    model["vae"].encode = lambda x: x
    with pytest.raises(TypeError, match=r"'vae'.*'encode' was assigned on the instance.*name the layers below"):
        swap_layers_(model, {"vae": "fp32"}, "cpu", torch.bfloat16)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.end = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.stack = nn.Sequential(nn.Linear(8, 8), nn.SiLU())

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x):
        x = x.to(self.dtype)  # as diffusers does with features of the timestep
        self.seen = x
        return self.end(F.silu(self.norm(self.inp(x)))) + self.stack(x)

    def features(self, x):
        return F.silu(self.inp(x)) @ self.end.weight.t()


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.diffusion_model = UNet()

    def forward(self, x):
        return self.diffusion_model(x)


CALLS = {
    "module": lambda m, x: m(x),
    "child": lambda m, x: m.net(x),
    "grandchild": lambda m, x: m.net.diffusion_model(x),
    "method": lambda m, x: m.net.diffusion_model.features(x),
    "layer": lambda m, x: m.net.diffusion_model.inp(x),
    "container of torch": lambda m, x: m.net.diffusion_model.stack(x),
    "copy": lambda m, x: copy.deepcopy(m.net.diffusion_model)(x),
    "frozen": lambda m, x: m.vae.reconstruct(x),
    "frozen layer": lambda m, x: m.vae.first(x),
}


class Diffusion(L.LightningModule):
    """Makes every call in every hook there is, and in the step."""

    def __init__(self, manual=False):
        super().__init__()
        self.net, self.vae = Wrapper(), Autoencoder().requires_grad_(False)
        self.vae.loud = 1.0
        self.automatic_optimization = not manual
        self.found = {}
        self.x = torch.randn(4, 8)

    def call(self, where):
        with torch.no_grad():
            self.found[where] = {name: call(self, self.x) for name, call in CALLS.items()}
        if where != "step":
            assert not torch.is_autocast_enabled("cpu"), where

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.call("step")
        loss = self.net(batch).float().square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_start(self, batch, batch_idx):
        self.call("on_train_batch_start")

    def on_after_backward(self):
        self.call("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.call("on_before_optimizer_step")

    def configure_optimizers(self):
        self.types = {type(module) for module in self.modules()}
        return torch.optim.SGD(self.net.parameters(), lr=0.0)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("compute", HALF)
def test_calls_of_any_part_of_a_network_from_a_hook_give_what_they_give_in_the_step(compute, manual):
    """T100; in manual optimization some hooks run inside of `training_step`."""
    module = Diffusion(manual)
    make_trainer(MasterWeightPrecision(compute), max_steps=1).fit(module, loader([torch.randn(4, 8)]))
    step = module.found.pop("step")
    assert len(module.found) == 3
    for where, found in module.found.items():
        for name, value in found.items():
            assert value.dtype == step[name].dtype == HALF[compute], (where, name)
            assert torch.equal(value, step[name]), (where, name)
    assert module.net.diffusion_model.seen.dtype == torch.float32  # its `dtype` is what it was given in
    assert {nn.Linear, nn.Sequential} <= module.types  # optimizers may be made by exact types
    assert type(module.net.diffusion_model.inp) is nn.Linear


def test_a_compiled_network_is_called_from_a_hook_too():
    torch._dynamo.reset()
    module = Diffusion()
    module.net.diffusion_model.compile(fullgraph=True, backend="eager")
    make_trainer(MasterWeightPrecision("bf16"), max_steps=1).fit(module, loader([torch.randn(4, 8)]))
    step = module.found.pop("step")
    for found in module.found.values():
        assert torch.equal(found["grandchild"], step["grandchild"])


@pytest.mark.parametrize("hook", [False, True])
def test_autocast_turned_off_by_the_user_is_honoured_for_what_is_frozen(hook):
    """A VAE or perceptual loss that somebody computes in fp32, in the step or outside."""

    class Module(Diffusion):
        def call(self, where):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self.found[where] = self.vae.reconstruct(self.x), self.vae.first(self.x)

    module = Module()
    make_trainer(MasterWeightPrecision("bf16"), max_steps=1).fit(module, loader([torch.randn(4, 8)]))
    found = module.found["on_train_batch_start" if hook else "step"]
    with torch.no_grad():
        assert torch.equal(found[0], module.vae.reconstruct(module.x))
        assert torch.equal(found[1], module.vae.first(module.x))


def test_an_fp32_entry_is_honoured_however_the_container_is_called():
    module = Diffusion()
    policy = PrecisionPolicy("bf16", fp32=["vae"])
    make_trainer(MasterWeightPrecision(policy), max_steps=1).fit(module, loader([torch.randn(4, 8)]))
    with torch.no_grad():
        expected = module.vae.reconstruct(module.x)
    for found in module.found.values():
        assert torch.equal(found["frozen"], expected)


def test_what_cannot_be_right_says_what_to_write():
    """Weights that the hook itself computes with."""

    class Module(Diffusion):
        def call(self, where):
            if where == "on_train_batch_start":
                F.linear(self.x, self.net.diffusion_model.inp.weight)

    with pytest.raises(RuntimeError) as raised:
        make_trainer(MasterWeightPrecision("bf16"), max_steps=1).fit(Module(), loader([torch.randn(4, 8)]))
    assert "plugin.inference_context()" in raised.value.__notes__[0]


MASK = (torch.arange(8) % 2 == 0).float()


def _put_rows(module):
    with torch.no_grad():
        module.net.diffusion_model.inp.weight[torch.arange(16) < 4] = torch.zeros(4, 8)


def _mask_gradient(module):
    module.net.diffusion_model.inp.weight.register_hook(lambda grad: grad * MASK)


def _assign_gradient(module):
    module.net.diffusion_model.inp.weight.grad = torch.zeros(16, 8)


def _decompose(module):
    torch.linalg.svd(module.net.diffusion_model.inp.weight)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (_put_rows, "fp32_weights(pl_module) as weights: weights[name][rows] = ..."),
        (_mask_gradient, "grad * mask.to(grad.dtype)"),
        (_assign_gradient, "param.grad = grad.to(param.dtype)"),
        (_decompose, "weight.float()"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_torch_refuses_in_16_bits_says_what_to_write(code, words, precision):
    class Module(Diffusion):
        def call(self, where):
            if where == "on_train_batch_start":
                code(self)

    with pytest.raises(RuntimeError) as raised:
        make_trainer(MasterWeightPrecision(precision), max_steps=1).fit(Module(), loader([torch.randn(4, 8)]))
    assert words in raised.value.__notes__[0]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half])
def test_a_module_that_is_cast_after_fit_has_begun_says_what_to_leave_out(cast, hook):
    class Module(TinyModule):
        pass

    setattr(Module, hook, lambda self, *args: cast(self.net))
    module = Module()
    with pytest.raises(RuntimeError) as raised:
        make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(make_batches(2)))
    assert "('net.time_embedding.weight'" in raised.value.__notes__[0]
    assert "Leave that out" in raised.value.__notes__[0]
    assert {param.dtype for param in module.parameters()} == {torch.float32}


def test_a_module_that_is_cast_at_the_end_is_fp32_after_fit():
    class Module(TinyModule):
        def on_train_epoch_end(self):
            self.net.half()

    module = Module()
    make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(make_batches(2)))
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    make_trainer().fit(module, loader(make_batches(1)))


def test_networks_of_metrics_are_left_alone():
    from torchmetrics import Metric

    class Distance(Metric):
        def __init__(self):
            super().__init__()
            self.inception = nn.Linear(8, 8).requires_grad_(False)
            self.add_state("total", torch.zeros(8))

        def update(self, x):
            self.total = self.total + self.inception(x).sum(0)

        def compute(self):
            return self.total

    class Module(Diffusion):
        def __init__(self):
            super().__init__()
            self.metrics = nn.ModuleDict({"fid": Distance()})

        def call(self, where):
            if where == "on_train_batch_start":
                self.metrics["fid"].update(self.x)
                self.value = self.metrics["fid"].compute()

    module = Module()
    make_trainer(MasterWeightPrecision("bf16"), max_steps=1).fit(module, loader([torch.randn(4, 8)]))
    assert torch.equal(module.value, module.metrics["fid"].inception(module.x).sum(0))


def test_outside_hides_what_is_around_and_gives_it_back():
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
        with outside("cpu"):
            assert is_outside("cpu")
            with torch.autocast("cpu", enabled=False):
                assert not is_outside("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not is_outside("cpu")
    assert is_outside("cpu")
