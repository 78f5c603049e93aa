"""The search for the layer behind an overflow, in networks whose activations are computed again in backward."""

import functools
import logging

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from planted import WIDTH, Attention, Mlp, Net, Planted, Steep, batch
from reference import loader, make_trainer
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, NonFiniteGradientsError
from lightning_mixprec.apart import without_checkpointing
from lightning_mixprec.replay import Replayer

again = functools.partial(checkpoint, use_reentrant=False)
selective = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


class ByHand(torch.autograd.Function):
    """Checkpointing as research code had it before torch did: a function that calls the layers again in backward."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function, ctx.x, ctx.params = function, x, params
        ctx.autocast = torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), False)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast:
            output = ctx.function(x)
        found = torch.autograd.grad(output, (x, *ctx.params), grad, allow_unused=True)
        return (None, *found)


WAYS = {
    "plain": lambda block, x: block(x),
    "non-reentrant": again,
    "to the end": functools.partial(again, early_stop=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "nested": lambda block, x: again(functools.partial(again, block), x),
    "reentrant inside": lambda block, x: again(functools.partial(WAYS["reentrant"], block), x),
    "selective": functools.partial(again, context_fn=selective),
    "by hand": lambda block, x: ByHand.apply(block, x, *block.parameters()),
}


class Checkpointed(Net):
    """Every block of its own, one way or another."""

    def __init__(self, planted, way):
        super().__init__(planted)
        self.way = WAYS[way]

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.way(block, x)
        return self.head(x)


class Loud(nn.Module):
    """Overflows in its own code, between two layers under checkpointing."""

    way = staticmethod(WAYS["plain"])

    def __init__(self):
        super().__init__()
        self.first, self.last = Mlp(), Mlp()

    def forward(self, x):
        return self.way(self.last, self.way(self.first, x) * 1e6 / 1e6)


class Around(nn.Module):
    """Steep in its own code, around a layer under checkpointing."""

    way = staticmethod(WAYS["plain"])

    def __init__(self):
        super().__init__()
        self.steep, self.first = Steep(), Mlp()

    def forward(self, x):
        return Steep.forward(self.steep, self.way(self.first, x))


class Module(Planted):
    def __init__(self, net):
        super().__init__()
        torch.manual_seed(0)
        self.net = net()


def fit(module, fallback, steps=12, precision="fp16"):
    plugin = MasterWeightPrecision(precision, DynamicLossScaler(max_consecutive_skips=8), fallback=fallback)
    trainer = make_trainer(plugin, max_epochs=1, max_steps=steps)
    trainer.fit(module, loader([batch()] * (steps + 20)))
    return plugin


@functools.cache
def fp32_losses(planted):
    module = Module(lambda: Net(planted))
    fit(module, "raise", precision="fp32")
    return module.losses


def check(make, planted):
    """Found and moved; or named, and nothing moved."""
    module = Module(make)
    plugin = fit(module, "auto")
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert plugin.real_steps == 12
    assert module.losses[-1] == pytest.approx(fp32_losses(planted)[-1], rel=0.02)
    with pytest.raises(NonFiniteGradientsError, match=r"'net\.blocks\.5' \("):
        fit(Module(make), "raise")


@pytest.mark.parametrize(
    ("way", "planted"),
    [(way, Attention) for way in WAYS if way != "plain"] + [(way, Steep) for way in ("nested", "selective", "by hand")],
)
def test_blocks_are_computed_again(way, planted):
    check(lambda: Checkpointed(planted, way), planted)


@pytest.mark.parametrize("planted", [Loud, Around])
@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "selective", "by hand"])
def test_what_is_inside_of_the_layer_is_computed_again(way, planted):
    kind = type(planted.__name__, (planted,), {"way": staticmethod(WAYS[way])})
    check(lambda: Net(kind), planted)


def test_hooks_on_saved_tensors_see_no_replay():
    """Offloading to the CPU, say: of a batch that is watched they are given what they are given of any other."""

    class Offloaded(Net):
        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.dtype) or x, lambda x: x):
                return super().forward(x)

    class Count(L.Callback):
        def on_train_batch_start(self, *_):
            counts.append(len(packed))
            packed.clear()

    packed, counts = [], []
    check(lambda: Offloaded(Attention), Attention)
    packed.clear()
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(max_consecutive_skips=8))
    with pytest.raises(NonFiniteGradientsError):
        make_trainer(plugin, callbacks=Count()).fit(Module(lambda: Offloaded(Attention)), loader([batch()] * 9))
    assert len(counts) == 8
    assert counts[1] > 0  # of the first batch, which nobody watches
    assert set(counts[1:]) == {counts[1]}


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_a_network_that_is_called_again_as_a_whole_is_still_in_training(way, caplog):
    class Whole(Module):
        def training_step(self, batch, batch_idx):
            self.last = F.mse_loss(WAYS[way](self.net, batch[0].requires_grad_()).float(), batch[1])
            return self.last

    module = Whole(lambda: Net(Attention))
    with caplog.at_level(logging.WARNING):
        plugin = fit(module, "auto")
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert module.losses[-1] == pytest.approx(fp32_losses(Attention)[-1], rel=0.02)
    assert "outside of a training step" not in caplog.text


class CompiledBlocks(Checkpointed):
    """Each block compiled by itself, inside of what is computed again."""

    def __init__(self, planted):
        super().__init__(planted, "non-reentrant")
        for block in self.blocks:
            block.compile(backend="aot_eager")


@pytest.mark.parametrize("automatic", [True, False])
def test_compiled_blocks_are_called_again_as_they_were_called(automatic):
    """In the batches whose insides are looked at both times uncompiled, and compiled in all others."""
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    class Fitted(Module):
        def __init__(self, net):
            super().__init__(net)
            self.automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            graphs.append(counters["stats"]["unique_graphs"])

    module = Fitted(lambda: CompiledBlocks(Mlp))
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256))
    make_trainer(plugin, max_epochs=1).fit(module, loader([batch()] * 5))
    assert (plugin.real_steps, plugin.skipped_steps) == (5, 0)
    assert module.losses == pytest.approx(fp32_losses(Mlp)[:5], rel=0.02)
    assert graphs[:2] == [0, 0]  # batches 1, 2 and 4 are looked at
    assert graphs[2] > 0
    assert graphs[2:] == [graphs[2]] * 3


def test_compiled_blocks_are_watched():
    torch._dynamo.reset()
    check(lambda: CompiledBlocks(Attention), Attention)


def test_sampling_with_gradients_through_a_checkpointed_network():
    """Guidance, from a callback: the gradient of what was repaired is that of fp32."""

    class Sometimes(Attention):
        @property
        def gain(self):
            return 1e6 if sampling else 1.0

    sampling, found = [], []

    def guide(net):
        x = batch()[0].requires_grad_()
        return torch.autograd.grad(net(x).float().sum(), x)[0]

    class Sample(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            sampling.append(1)
            found.append(guide(pl_module.net))
            sampling.clear()

    module = Module(lambda: Checkpointed(Sometimes, "non-reentrant"))
    sampling.append(1)
    expected = guide(module.net)
    sampling.clear()
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    make_trainer(plugin, max_epochs=1, callbacks=Sample()).fit(module, loader([batch()] * 3))
    assert plugin.fp32_layers == ["net.blocks.5"]
    torch.testing.assert_close(found[0], expected, rtol=0.05, atol=0.01)


def test_diffusers_gradient_checkpointing():
    """A block of a U-Net whose activations need fp32, with `enable_gradient_checkpointing()`."""
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.UNet2DModel(
        sample_size=4,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        add_attention=False,
    )
    net.enable_gradient_checkpointing()
    with torch.no_grad():
        net.mid_block.resnets[0].conv1.weight.mul_(1e7)  # and a GroupNorm behind it

    class UNet(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return self.net(batch, 3).sample.float().square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    make_trainer(plugin).fit(UNet(), loader([torch.randn(2, 1, 4, 4)] * 6))
    assert plugin.fp32_layers == ["net.mid_block.resnets.0.conv1"]
    assert (plugin.real_steps, plugin.skipped_steps) == (5, 1)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_inside_of_a_replay_nothing_is_checkpointed(way):
    """What torch's two kinds are made of; both are themselves again afterwards."""
    calls = []

    def function(x):
        calls.append(1)
        return x * x

    x = torch.ones(WIDTH, requires_grad=True)
    for expected in (1, 2):
        calls.clear()
        if expected == 1:
            with without_checkpointing():
                output = WAYS[way](function, x)
        else:
            output = WAYS[way](function, x)
        output.sum().backward()
        assert len(calls) == expected


def test_gradients_of_a_replay_whose_checkpointing_cannot_be_turned_off():
    """They are those of the fp32 call, though the layers are called once more in backward."""
    torch.manual_seed(0)
    layer = type("Loud", (Loud,), {"way": staticmethod(WAYS["by hand"])})()
    x = torch.randn(2, WIDTH)
    inputs = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(inputs).sum(), inputs)
    replayer = Replayer("cpu", torch.float16)
    found, *_ = replayer.gradients(layer.half(), [x.half().requires_grad_()], {}, [torch.ones(2, WIDTH)], fp32=True)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)
