"""What makes the search for the layer behind an overflow go wrong: nothing here may be blamed, broken or missed."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from planted import WIDTH, Attention, Mlp, Planted, Rescale, Steep, batch
from reference import loader, make_trainer
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionPolicy


def fit(module, plugin, steps=30, batches=None, **options):
    trainer = make_trainer(plugin, max_epochs=1, max_steps=steps, **options)
    trainer.fit(module, loader(batches or [batch()] * (steps + 30)))
    return trainer


class InPlace(nn.Module):
    """Changes its own input, as pre-activation blocks do, around an infinity that means no harm."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.fc(F.relu(x, inplace=True))
        distance = torch.ones(WIDTH, WIDTH, dtype=h.dtype).masked_fill(torch.eye(WIDTH, dtype=torch.bool), torch.inf)
        return h * distance.min(0).values


@pytest.mark.parametrize("fallback", ["raise", "auto"])
def test_a_layer_that_changes_its_input_and_uses_infinity_is_left_alone(fallback):
    plain, module = Planted(InPlace), Planted(InPlace)
    fit(plain, MasterWeightPrecision("fp32"))
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback=fallback)
    fit(module, plugin)
    assert (plugin.fp32_layers, plugin.skipped_steps) == ([], 0)
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.01)


def test_gradients_that_are_large_everywhere_are_a_matter_of_the_scale():
    """A sum over many rows: true gradients beyond fp16, which a scale below 1 brings back; no layer is steep."""

    class Sum(Planted):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 3e6

    ends = []
    for fallback in ("raise", "auto"):
        module = Sum()
        plugin = MasterWeightPrecision("fp16", fallback=fallback)
        fit(module, plugin)
        assert plugin.fp32_layers == []
        assert plugin.loss_scale < 1
        ends.append((module.losses, plugin.skipped_steps))
    assert ends[0] == ends[1]


class NormBehind(nn.Module):
    """An overflow in its own code, and a BatchNorm that has taken it in before anybody knows."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.fc(x) * 1e6)


def test_a_repaired_batch_leaves_no_infinity_in_statistics():
    module = Planted(NormBehind)
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    fit(module, plugin)
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert bool(torch.isfinite(module.net.blocks[5].norm.running_mean).all())
    assert bool(torch.isfinite(module.net.blocks[5].norm.running_var).all())


class Gated(nn.Module):
    """Its input feeds an innocent child, too, which has the sum of both gradients."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.steep = Steep()

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.steep(x)


def test_a_steep_layer_is_found_beside_one_that_shares_its_input():
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    fit(Planted(Gated), plugin)
    assert plugin.fp32_layers == ["net.blocks.5.steep"]
    assert plugin.skipped_steps <= 12


class BehindZeros(nn.Module):
    """The dead norm of `Rescale` before a projection that starts at zero, as ControlNet and DiT have."""

    def __init__(self):
        super().__init__()
        self.rescale = Rescale()
        self.proj = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x):
        h = self.rescale.fc(x) * 3000
        return self.proj(h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * self.rescale.weight)


def test_a_dead_norm_is_found_behind_zeros():
    """Its output is zero either way; what tells is the gradient of the projection."""
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    fit(Planted(BehindZeros), plugin)
    assert plugin.fp32_layers == ["net.blocks.5"]


def test_hooks_of_others_are_not_called_by_replays():
    calls = []
    module = Planted(Attention)
    module.net.blocks[5].proj.register_forward_hook(lambda *_: calls.append(1))
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    fit(module, plugin, steps=10)
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert len(calls) == plugin.real_steps + plugin.skipped_steps


def test_attributes_that_a_forward_sets_stay_those_of_the_batch():
    """An auxiliary loss kept on the module still has its gradient."""

    class Aux(Attention):
        gain = 1.0

        def forward(self, x):
            self.aux = self.qkv.weight.float().pow(2).mean()
            return super().forward(x)

    class WithAux(Planted):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append(self.net.blocks[5].aux.requires_grad)
            return loss * (float("inf") if batch_idx == 0 else 1) + self.net.blocks[5].aux

    seen = []
    fit(WithAux(Aux), MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256)), steps=5)
    assert seen == [True] * 6


def test_a_forward_assigned_on_an_instance_ends_no_run_by_itself():
    module = Planted(Attention)
    module.net.blocks[5].proj.forward = lambda x: x * 2
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(max_consecutive_skips=5), fallback="auto")
    with pytest.raises(RuntimeError, match="5 training batches in a row"):
        fit(module, plugin)


def test_outliers_are_skipped_and_blamed_on_no_layer():
    """Every sixth batch is beyond fp16 from the first layer on."""
    x, y = batch()
    batches = [(x * 1e6 if index % 6 == 5 else x, y) for index in range(60)]
    module = Planted()
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    make_trainer(plugin).fit(module, loader(batches))
    assert plugin.fp32_layers == []
    assert plugin.real_steps + plugin.skipped_steps == 60


class Sometimes(Attention):
    """Overflows in every second call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    @property
    def gain(self):
        return 1e6 if self.calls % 2 else 1.0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_fault_that_comes_and_goes_is_found():
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    fit(Planted(Sometimes), plugin)
    assert plugin.fp32_layers == ["net.blocks.5"]


class FrozenHalf(nn.Module):
    """A frozen fp16 layer with activations beyond fp16, brought back by a norm."""

    def __init__(self):
        super().__init__()
        self.loud = nn.Linear(WIDTH, WIDTH).half().requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.loud.weight.mul_(8e4)
            self.loud.bias.zero_()

    def forward(self, x):
        return self.norm(self.loud(x))


def test_a_frozen_half_precision_layer_is_moved_and_given_back(tmp_path):
    module = Planted(FrozenHalf)
    with torch.no_grad():
        module.net.stem.weight.mul_(30)
    before = module.net.blocks[5].loud.weight.clone()
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    trainer = fit(module, plugin, steps=8)
    assert plugin.fp32_layers == ["net.blocks.5.loud"]
    assert module.net.blocks[5].loud.weight.dtype == torch.float16
    assert torch.equal(module.net.blocks[5].loud.weight, before)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = MasterWeightPrecision("fp16", fallback="auto")
    module = Planted(FrozenHalf)
    resumed = make_trainer(again, max_epochs=-1, max_steps=10)
    resumed.fit(module, loader([batch()] * 9), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert again.fp32_layers == ["net.blocks.5.loud"]


def test_a_copy_made_while_watched_watches_nothing():
    copies = []

    class Copies(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            copies.append(copy.deepcopy(pl_module.net))

    fit(Planted(Attention), MasterWeightPrecision("fp16", fallback="auto"), steps=6, callbacks=Copies())
    x = batch()[0].requires_grad_()
    for net in copies:
        net(x).float().sum().backward()
    assert x.grad is not None


def test_sampling_with_gradients_and_in_training_mode_is_looked_at():
    """Guidance by a gradient, from a callback, with the network left in training mode."""

    class Loud(Attention):
        @property
        def gain(self):
            return 1e6 if sampling else 1.0

    sampling, finite = [], []

    class Sample(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            sampling.append(1)
            x = batch()[0].requires_grad_()
            finite.append(bool(torch.isfinite(pl_module.net(x)).all()))
            sampling.clear()

    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    fit(Planted(Loud), plugin, steps=4, callbacks=Sample())
    assert all(finite)
    assert plugin.fp32_layers == ["net.blocks.5"]


def test_the_list_survives_compilation(tmp_path):
    class Compiled(Planted):
        def __init__(self, planted):
            super().__init__(planted)
            self.net = torch.compile(self.net, backend="eager")

    trainer = fit(Planted(Attention), MasterWeightPrecision("fp16", fallback="auto"), steps=5)
    state = trainer.precision_plugin.state_dict()
    assert state["fp32_layers"] == ["net.blocks.5"]
    plugin = MasterWeightPrecision("fp16", fallback="auto")

    class Restores(L.Callback):
        def on_train_start(self, *_):
            plugin.load_state_dict({"scale": 256.0, "fp32_layers": ["net.blocks.5"]})

    fit(Compiled(Attention), plugin, steps=3, callbacks=Restores())
    assert plugin.fp32_layers == ["net._orig_mod.blocks.5"]
    assert plugin.skipped_steps == 0


def test_a_module_keeps_the_dtype_it_reports():
    """diffusers' models cast their timesteps to `self.dtype`; a replay of one must not change it."""

    class Reports(Mlp):
        @property
        def dtype(self):
            return next(self.parameters()).dtype

    seen = []

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Reports()

        def training_step(self, batch, batch_idx):
            seen.append(self.net.dtype)
            return self.net(batch[0]).float().mean() * (float("nan") if batch_idx in (1, 2) else 1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x, y = batch()
    batches = [(x * float("nan") if index == 1 else x, y) for index in range(6)]
    make_trainer(MasterWeightPrecision(PrecisionPolicy("fp16"))).fit(Net(), loader(batches))
    assert set(seen) == {torch.float32}


class Dropped(nn.Module):
    """Dropout by a function, beside an infinity that means no harm: random, and not the same numbers in 16 bits."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = F.dropout(self.fc(x), 0.5, self.training)
        large = torch.full_like(h, 300.0)
        return h * (1 / (1 + large * large) + 1)


def test_what_is_random_is_not_wrong():
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    torch.manual_seed(0)
    fit(Planted(Dropped), plugin)
    assert (plugin.fp32_layers, plugin.skipped_steps) == ([], 0)
