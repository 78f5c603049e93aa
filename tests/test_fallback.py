"""One bad layer costs one layer: found, moved to fp32, and nothing else."""

import logging
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from planted import Attention, LateAttention, LoudMlp, Mlp, Planted, Rescale, Steep, batch
from reference import loader, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, NonFiniteGradientsError
from lightning_mixprec.fallback import FallbackLimitError, LayerFallback

STEPS = 80
FAULTS = {
    "activation": (LoudMlp, ["net.blocks.5.fc1"]),
    "attention": (Attention, ["net.blocks.5"]),
    "norm": (Rescale, ["net.blocks.5"]),
    "gradient": (Steep, ["net.blocks.5"]),
    "late": (LateAttention, ["net.blocks.5"]),
}


def train(module, plugin, steps=STEPS, **options):
    trainer = make_trainer(plugin, max_epochs=1, max_steps=steps, **options)
    trainer.fit(module, loader([batch()] * (steps + 40)))
    return trainer


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_layer_is_found_and_moved(fault, tmp_path):
    planted, expected = FAULTS[fault]
    plain = Planted(planted)
    train(plain, MasterWeightPrecision("fp32"))

    module = Planted(planted)
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    outcomes = []

    class Watching(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            outcomes.append((plugin.step_was_skipped, list(plugin.fp32_layers)))

    trainer = train(module, plugin, callbacks=Watching())
    assert plugin.fp32_layers == expected
    # Recovery: within 20 batches of the fault nothing is skipped any more.
    onset = 50 if fault == "late" else 0
    assert not any(skipped for skipped, _ in outcomes[onset + 20 :])
    assert outcomes[onset + 19][1] == expected
    # All other layers stay in fp16.
    kinds = {layer.name: layer.dtype for layer in plugin.plan.layers if not layer.name.startswith("net.blocks.5")}
    assert len(kinds) == 24
    assert set(kinds.values()) == {torch.float16}
    assert trainer.global_step == plugin.real_steps == STEPS
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)
    assert plain.losses[-1] < 0.8 * plain.losses[0]

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = MasterWeightPrecision("fp16", fallback="auto")
    resumed = make_trainer(again, max_epochs=-1, max_steps=STEPS + 10)
    resumed.fit(Planted(planted), loader([batch()] * 40), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert again.fp32_layers == expected
    assert again.real_steps == STEPS + 10
    assert again.skipped_steps == plugin.skipped_steps


@pytest.mark.parametrize("fault", ["activation", "attention", "gradient"])
def test_stock_never_recovers(fault):
    """The control: what the planted faults do to a run without fallback."""
    module = Planted(FAULTS[fault][0])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu")
    train(module, MixedPrecision("16-mixed", device="cpu", scaler=scaler), steps=40)
    if fault == "gradient":  # it steps, at a scale at which every other gradient of fp16 is zero or nearly so
        assert scaler.get_scale() < 1e-2
    else:
        assert scaler.get_scale() < 1e-7
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_layer_is_fp32_bit_for_bit_as_if_declared(tmp_path):
    """A run resumed with the list equals one whose policy names the layer."""
    from lightning_mixprec import PrecisionPolicy

    plugin = MasterWeightPrecision("fp16", fallback="auto")
    trainer = train(Planted(Attention), plugin, steps=20)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    ends = []
    for policy in ("fp16", PrecisionPolicy("fp16", fp32=["net.blocks.5"])):
        module = Planted(Attention)
        again = MasterWeightPrecision(policy, fallback="auto")
        options = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": False}
        make_trainer(again, max_epochs=-1, max_steps=40).fit(module, loader([batch()] * 40), **options)
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_optimizer_state_of_the_moved_layer_is_kept():
    module, seen = Planted(LateAttention), []

    class Moments(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            state = trainer.optimizers[0].state
            seen.append({n: state[p]["exp_avg_sq"].clone() for n, p in pl_module.named_parameters() if p in state})

    plugin = MasterWeightPrecision("fp16", fallback="auto")
    train(module, plugin, callbacks=Moments())
    assert plugin.fp32_layers == ["net.blocks.5"]
    seen = [moments for moments in seen if moments]
    assert len(seen) >= STEPS
    last = seen[0]
    for now in seen[1:]:
        for name, value in now.items():
            # At beta2 = 0.999 the second moment never shrinks by more than that: it was not started anew.
            assert bool((value >= 0.9989 * last[name]).all()), name
        last = now


@pytest.mark.parametrize("scale", [2.0**15, 2.0**24])
def test_routine_probing_moves_nothing(scale):
    """500 steps of a healthy model whose scale is driven into overflow again and again, also by a steep neighbour."""

    class SteepHead(Planted):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 3000

    module = SteepHead(lr=1e-4)
    scaler = DynamicLossScaler(init_scale=scale, growth_interval=10)
    plugin = MasterWeightPrecision("fp16", scaler, fallback="auto")
    trainer = make_trainer(plugin, max_epochs=1, max_steps=500)
    trainer.fit(module, loader([batch()] * 700))
    assert plugin.real_steps == 500
    assert plugin.skipped_steps > 20
    assert plugin.fp32_layers == []


@pytest.mark.parametrize("kind", ["batch", "loss", "division"])
def test_what_fp32_would_not_help_is_an_error(kind):
    class Faulty(Planted):
        def __init__(self):
            super().__init__(Divides if kind == "division" else Mlp)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = super().training_step((x * math.nan if kind == "batch" else x, y), batch_idx)
            return loss * math.inf if kind == "loss" else loss

    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(max_consecutive_skips=6), fallback="auto")
    named = {
        "batch": r"the batch, at \[0\]",
        "division": r"the output of 'net.blocks.5' \(Divides\)",
        "loss": "gradient",
    }
    if kind == "batch":  # the data itself
        module, batches = Planted(), [(batch()[0] * math.nan, batch()[1])] * 20
    else:
        module, batches = Faulty(), [batch()] * 20
    with pytest.raises(NonFiniteGradientsError, match=named[kind]):
        make_trainer(plugin).fit(module, loader(batches))
    assert plugin.fp32_layers == []


class Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        h = self.fc(x)
        return h / (h - h)


def test_a_single_bad_batch_is_not_enough():
    """One batch whose activations do not fit is skipped, like any other overflow."""
    batches = [batch()] * 20
    batches[7] = (batches[7][0] * 1e5, batches[7][1])
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    make_trainer(plugin).fit(Planted(), loader(batches))
    assert (plugin.skipped_steps, plugin.real_steps, plugin.fp32_layers) == (1, 19, [])


def test_raise_names_the_layer_and_changes_nothing(caplog):
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(max_consecutive_skips=8))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(NonFiniteGradientsError, match=r"'net.blocks.5' \(Attention\)"),
    ):
        train(Planted(Attention), plugin)
    assert plugin.fp32_layers == []
    warned = [record.getMessage() for record in caplog.records if "fallback='auto'" in record.getMessage()]
    assert len(warned) == 1
    assert "PrecisionPolicy(fp32=['net.blocks.5'])" in warned[0]


def test_a_fault_outside_of_training_is_found_there():
    """A layer that overflows in validation alone: repaired there, moved before the next training step."""
    module = Validated(EvalAttention)
    expected = []
    with torch.no_grad():
        expected.append(module.eval().net(batch()[0]))
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    listed = []

    class Watching(L.Callback):
        def on_train_batch_end(self, *_):
            listed.append(list(plugin.fp32_layers))

    trainer = make_trainer(plugin, max_epochs=3, num_sanity_val_steps=1, callbacks=Watching())
    trainer.fit(module.train(), loader([batch()] * 2), loader([batch()] * 2))
    assert len(module.outputs) == 1 + 3 * 2
    assert all(bool(torch.isfinite(output).all()) for output in module.outputs)
    torch.testing.assert_close(module.outputs[0].float(), expected[0], rtol=0, atol=0.02)
    assert listed == [[], [], ["net.blocks.5"], ["net.blocks.5"], ["net.blocks.5"], ["net.blocks.5"]]
    assert plugin.skipped_steps == 0


def test_a_validation_that_nothing_survives_does_not_end_the_training():
    """Inputs beyond fp16: every layer overflows, which is more than may be moved, and every call is repaired."""
    module = Validated()
    x, y = batch()
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    trainer = make_trainer(plugin, max_epochs=4)
    trainer.fit(module, loader([batch()] * 2), loader([(x * 1e6, y)] * 2))
    assert all(bool(torch.isfinite(output).all()) for output in module.outputs)
    assert module.outputs[0].abs().max() > 1e5
    assert (plugin.real_steps, plugin.fp32_layers) == (8, [])


class EvalAttention(Attention):
    """Overflows in evaluation mode alone."""

    @property
    def gain(self):
        return 1.0 if self.training else 1e6


class Validated(Planted):
    def __init__(self, planted=Mlp):
        super().__init__(planted)
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))


def test_without_fallback_a_fault_outside_of_training_is_named_once(caplog):
    x, y = batch()
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256))
    with caplog.at_level(logging.WARNING):
        make_trainer(plugin, max_epochs=2).fit(Validated(), loader([batch()] * 3), loader([(x * 1e6, y)] * 2))
    named = [record.getMessage() for record in caplog.records if "outside of a training step" in record.getMessage()]
    assert len(named) == 1
    assert "'net.stem' (Linear)" in named[0]


def test_bounds_end_the_run_with_the_list():
    plugin = MasterWeightPrecision("fp16", fallback=LayerFallback(max_share=0.01))
    with pytest.raises(FallbackLimitError, match=r"net\.blocks\.5.*max_share=0\.01"):
        train(Planted(Attention), plugin)
    assert plugin.fp32_layers == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"strikes": 0}, "strikes=0"), ({"max_layers": True}, "max_layers=True"), ({"max_share": 1.5}, "max_share=1.5")],
)
def test_bad_bounds_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerFallback(**arguments)


def test_an_unknown_fallback_is_refused():
    with pytest.raises(ValueError, match=r"Unknown fallback='always'.*'raise', 'auto'"):
        MasterWeightPrecision("fp16", fallback="always")


def test_the_event_file_shows_the_move(tmp_path):
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    train(Planted(Attention), plugin, steps=10, logger=TensorBoardLogger(tmp_path, name="", version=""))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("mixprec/fp32_layers")] == [1.0]
    (text,) = events.Tensors("mixprec/fallback/text_summary")
    assert b"'net.blocks.5' (Attention)" in text.tensor_proto.string_val[0]


def test_no_hook_stays():
    module = Planted(Attention)
    hooks = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pl_module.net.blocks.modules()))

    train(module, MasterWeightPrecision("fp16", fallback="auto"), callbacks=Count())
    assert set(hooks) == {0}
    assert not module.net._forward_hooks
    assert type(module.net.blocks[5]) is Attention
    assert {param.dtype for param in module.parameters()} == {torch.float32}


# Other loops and other ways to run a layer


class Checkpointed(Planted):
    """Blocks under activation checkpointing."""

    def __init__(self, planted, use_reentrant):
        super().__init__(planted)
        self.use_reentrant = use_reentrant

    def training_step(self, batch, batch_idx):
        x = self.net.stem(batch[0])
        for block in self.net.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        self.last = F.mse_loss(self.net.head(x).float(), batch[1])
        return self.last


class Manual(Planted):
    """Manual optimization, clipped."""

    def __init__(self, planted):
        super().__init__(planted)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()


class Compiled(Planted):
    def __init__(self, planted):
        super().__init__(planted)
        self.net = torch.compile(self.net, backend="aot_eager")


@pytest.mark.parametrize("fault", ["attention", "gradient"])
@pytest.mark.parametrize("way", ["reentrant", "checkpoint", "manual", "compiled", "accumulate"])
def test_however_the_layer_is_run(way, fault):
    planted = FAULTS[fault][0]
    make = {
        "reentrant": lambda: Checkpointed(planted, True),
        "checkpoint": lambda: Checkpointed(planted, False),
        "manual": lambda: Manual(planted),
        "compiled": lambda: Compiled(planted),
        "accumulate": lambda: Planted(planted),
    }[way]
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} if way == "accumulate" else {}
    plain, module = make(), make()
    train(plain, MasterWeightPrecision("fp32"), steps=25, **options)
    plugin = MasterWeightPrecision("fp16", fallback="auto")
    train(module, plugin, steps=25, **options)
    assert [layer.replace("_orig_mod.", "") for layer in plugin.fp32_layers] == ["net.blocks.5"]
    assert plugin.real_steps == 25
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)


class LogOfRest(nn.Module):
    """log(1 - p): in bf16 a p of 0.999 is 1."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        p = 0.999 + 0.0005 * torch.tanh(self.fc(x))
        return torch.log(1 - p) / 7 + 1


@pytest.mark.parametrize("masters", ["fp32", "split", "split24", "none"])
def test_bf16_moves_a_layer_too(masters):
    """Whatever the masters: the layer's fp32 weights and its neighbours' are those that were there."""
    plugin = MasterWeightPrecision("bf16", masters=masters, fallback="auto")
    plain, module = Planted(LogOfRest), Planted(LogOfRest)
    train(plain, MasterWeightPrecision("fp32"), steps=30)
    train(module, plugin, steps=30)
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.attention = Attention()

    def forward(self, x):
        return self.attention(F.dropout(self.norm(x), 0.1, self.training))


def test_a_watched_batch_leaves_buffers_and_random_numbers_alone():
    """Replays update no BatchNorm statistics and draw no random numbers that training would have drawn."""
    ends = []
    for precision, fallback in (("fp32", "raise"), ("fp16", "auto")):
        module = Planted(Normed)
        plugin = MasterWeightPrecision(precision, DynamicLossScaler(init_scale=16), fallback=fallback)
        torch.manual_seed(3)
        # The first batch of fp16 is lost, and its statistics with it; the generator has moved on.
        batches = [batch()] * 12 if precision == "fp16" else [batch()] * 11
        if precision == "fp32":
            F.dropout(torch.ones(4, 6, 8), 0.1)
        make_trainer(plugin).fit(module, loader(batches))
        ends.append((module.net.blocks[5].norm, torch.rand(1), plugin.real_steps, plugin.fp32_layers))
    (expected, expected_draw, steps, _), (norm, draw, real_steps, moved) = ends
    assert moved == ["net.blocks.5.attention"]
    assert steps == real_steps == 11
    assert torch.equal(draw, expected_draw)
    assert int(norm.num_batches_tracked) == int(expected.num_batches_tracked)
    torch.testing.assert_close(norm.running_var, expected.running_var, rtol=0.02, atol=0.0)


def test_the_gradients_that_overflowed_are_named():
    """T10: which parameters, without a debugger that takes the overflow itself for the fault."""

    class HeadOverflows(Planted):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            # A gradient of 0 * inf for the head's bias alone
            return loss + (0 * self.net.head.bias.float().sum() * math.inf if batch_idx == 2 else 0)

    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=16))
    named = []

    class Watching(L.Callback):
        def on_train_batch_end(self, *_):
            named.append(plugin.overflowed_parameters)

    make_trainer(plugin, callbacks=Watching()).fit(HeadOverflows(), loader([batch()] * 5))
    assert named == [[], [], ["net.head.bias"], ["net.head.bias"], ["net.head.bias"]]
    assert (plugin.skipped_steps, plugin.real_steps) == (1, 4)
