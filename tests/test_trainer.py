"""The plugin under Lightning's Trainer, against the plain reference."""

import copy
import math
import pickle
import warnings
from abc import ABC

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import (
    HALF,
    REPARAMETRISATIONS,
    TinyModule,
    assert_same,
    loader,
    make_batches,
    make_module,
    make_trainer,
    reference_train,
    snapshot,
)
from torch import nn

from lightning_mixprec import (
    DynamicLossScaler,
    MasterWeightAveraging,
    MasterWeightPrecision,
    NonFiniteGradientsError,
    PrecisionPolicy,
)
from lightning_mixprec.questions import refuse_strategy

HALVES = ["bf16", "fp16"]
RUNGS = ["fp32", "split", "split24", "none"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


class Probe(L.Callback):
    """Calls a function with (trainer, module) after every training batch and keeps what it returns."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen.append(self.look(trainer, pl_module))


def fit(plugin, module, batches, **kwargs):
    trainer = make_trainer(plugin, **kwargs)
    trainer.fit(module, loader(batches))
    return trainer


# Values: what reaches the weights


@pytest.mark.parametrize("clip", [None, 0.1])
def test_all_fp32_policy_equals_no_plugin_bit_for_bit(clip):
    batches = make_batches(20)
    ours, stock = make_module(OPTIMIZERS["adamw"]), make_module(OPTIMIZERS["adamw"])
    fit(MasterWeightPrecision("fp32"), ours, batches, gradient_clip_val=clip)
    fit(None, stock, batches, gradient_clip_val=clip)
    assert_same(snapshot(ours), snapshot(stock))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", HALVES)
def test_follows_the_plain_loop_bit_for_bit(precision, optimizer):
    scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
    scale = 1024.0 if precision == "fp16" else 1.0
    batches, module = make_batches(20), make_module(OPTIMIZERS[optimizer])
    expected, *_ = reference_train(module.net, batches, precision, OPTIMIZERS[optimizer], scale=scale)
    fit(MasterWeightPrecision(precision, scaler=scaler), module, batches)
    assert_same(snapshot(module.net), expected)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("bad", [(), (1,), (4, 7), (8,)])
def test_accumulation_clipping_and_overflow_follow_the_plain_loop(precision, bad):
    """Ten batches in windows of 4, 4 and 2; a bad micro-batch costs its whole window, once."""
    scale = 512.0 if precision == "fp16" else 1.0
    scaler = DynamicLossScaler(init_scale=512) if precision == "fp16" else None
    batches, module = make_batches(10), make_module(OPTIMIZERS["adamw"], bad=bad)
    expected, _, expected_scale, steps = reference_train(
        module.net, batches, precision, OPTIMIZERS["adamw"], accumulate=4, clip=0.05, scale=scale, bad=bad
    )
    plugin = MasterWeightPrecision(precision, scaler=scaler)
    trainer = fit(plugin, module, batches, accumulate_grad_batches=4, gradient_clip_val=0.05)
    assert_same(snapshot(module.net), expected)
    assert plugin.real_steps == trainer.global_step == steps
    assert plugin.loss_scale == (expected_scale if precision == "fp16" else 1.0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_gradients_that_nobody_looks_at_are_unscaled(bias, accumulate, optimizer):
    """Without hooks and clipping the scale is divided out bucket by bucket: widened and 16-bit gradients alike."""
    results = []
    for scale in (1.0, 1024.0):

        class Square(TinyModule):
            def __init__(self):
                super().__init__(OPTIMIZERS[optimizer])
                self.net = nn.Sequential(nn.Linear(16, 16, bias=bias), nn.Linear(16, 16, bias=bias))

            def training_step(self, batch, _):
                return self.net(batch).float().pow(2).mean()

        torch.manual_seed(0)
        module = Square()
        batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]
        plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler.static(scale))
        fit(plugin, module, batches, accumulate_grad_batches=accumulate)
        results.append(snapshot(module))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("precision", HALVES)
def test_master_weights_keep_small_updates(precision):
    """T11: w=1, grad=1, lr=1e-4, 100 SGD steps: 0.99, where 16-bit weights stay at exactly 1."""

    class One(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.layer.weight)

        def training_step(self, batch, _):
            return self.layer(batch).float().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    module = One()
    half = Probe(lambda _, m: m.layer.weight.detach().clone())
    fit(MasterWeightPrecision(precision), module, [torch.ones(1, 1)] * 100, callbacks=half)
    assert abs(module.layer.weight.item() - 0.99) < 1e-5
    assert half.seen[-1].dtype == HALF[precision]
    assert torch.equal(half.seen[-1], module.layer.weight.to(HALF[precision]))


@pytest.mark.parametrize("precision", HALVES)
def test_fused_with_clipping_equals_unfused(precision):
    """T41: stock refuses clipping with a fused optimizer."""
    weights = []
    for fused in (False, True):
        module = make_module(lambda params, fused=fused: torch.optim.AdamW(params, lr=0.01, fused=fused))
        fit(MasterWeightPrecision(precision), module, make_batches(3), gradient_clip_val=1.0)
        weights.append(snapshot(module))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", HALVES)
def test_micro_batches_accumulate_in_fp32(precision):
    """T34: 1024 micro-batches of gradient 1/1024 sum to 1; in bf16 they would stop at 0.25."""

    class Sum(TinyModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)

        def training_step(self, batch, _):
            return self.net(batch).float().sum()

        def on_before_optimizer_step(self, optimizer):
            self.grad = self.net.weight.grad.item()

    module = Sum()
    plugin = MasterWeightPrecision(precision, scaler=DynamicLossScaler.static(128.0))
    fit(plugin, module, [torch.ones(1, 1)] * 1024, accumulate_grad_batches=1024)
    assert abs(module.grad - 1.0) < 1e-3


def test_zero_gradient_with_adam_stays_finite():
    """T18: eps 1e-8 is zero in fp16, and 0/0 is NaN, unless optimizer state is fp32."""

    class Zero(TinyModule):
        def training_step(self, batch, _):
            return self.net(*batch[:2]).float().sum() * 0

    module = make_module()
    module.__class__ = Zero
    module.make_optimizer = OPTIMIZERS["adamw"]
    trainer = fit(MasterWeightPrecision("fp16"), module, make_batches(1))
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    for state in trainer.optimizers[0].state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}


# Skipped steps


@pytest.mark.parametrize("precision", HALVES)
def test_overflow_leaves_no_trace(precision):
    """T06, T53, T58: weights, masters, Adam state, schedule, EMA and global_step are as before the bad batch."""

    def look(trainer, module):
        plugin = trainer.precision_plugin
        state = trainer.optimizers[0].state_dict()["state"]
        moments = {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items()}
        counters = (trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch, ema.n_averaged)
        return snapshot(module), moments, plugin.loss_scale, plugin.step_was_skipped, counters

    ema = MasterWeightAveraging(0.9)
    probe = Probe(look)
    module = make_module(
        OPTIMIZERS["adamw"], bad={2}, schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k))
    )
    plugin = MasterWeightPrecision(precision)
    before_scale = plugin.loss_scale
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*|.*overridden.*")
        fit(plugin, module, make_batches(4), callbacks=[ema, probe])
    (w1, m1, s1, _, c1), (w2, m2, s2, skipped, c2) = probe.seen[1:3]
    assert_same(w1, w2)
    assert_same(m1, m2)
    assert c1 == c2 == (2, 2, 2)
    assert s1 == before_scale
    assert s2 == (before_scale / 2 if precision == "fp16" else 1.0)
    assert [seen[3] for seen in probe.seen] == [False, False, True, False]
    assert skipped
    assert (plugin.skipped_steps, plugin.real_steps, plugin.consecutive_skips) == (1, 3, 0)


def test_schedule_follows_real_steps():
    """T53, T55: the learning rates that real steps used are the schedule's first ones."""
    rates = []

    class Rates(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    torch.manual_seed(0)
    schedule = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k))  # noqa: E731
    module = Rates(bad={0, 1}, schedule=schedule)
    trainer = fit(MasterWeightPrecision("fp16"), module, make_batches(4))
    assert rates == [0.1, 0.05]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_max_steps_means_real_steps():
    module, plugin = make_module(bad={0, 1}), MasterWeightPrecision("fp16")
    trainer = fit(plugin, module, make_batches(10), max_steps=3, max_epochs=-1)
    assert (trainer.global_step, plugin.real_steps, plugin.skipped_steps) == (3, 3, 2)


def test_step_checkpoints_only_for_steps_that_happened(tmp_path):
    """T32: no file for a step that was skipped."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(
        MasterWeightPrecision("fp16"),
        make_module(bad={0, 1, 2, 3}),
        make_batches(4),
        callbacks=saver,
        enable_checkpointing=True,
    )
    assert list(tmp_path.glob("*step=[1-9]*.ckpt")) == []


def test_hooks_do_not_run_on_a_skipped_step_and_see_true_gradients_otherwise():
    """T42, T43: `on_before_optimizer_step` has unscaled fp32 gradients; `on_after_backward` has them as made."""
    after, before = [], []

    class Hooks(TinyModule):
        def on_after_backward(self):
            after.append(self.net.proj.weight.grad.clone())

        def on_before_optimizer_step(self, optimizer):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            assert all(a is b for a, b in zip(params, self.parameters(), strict=True))
            assert {param.grad.dtype for param in params} == {torch.float32}
            before.append(self.net.proj.weight.grad.clone())

    torch.manual_seed(0)
    module = Hooks(bad={1})
    fit(MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=1024)), module, make_batches(3))
    assert len(after) == 3
    assert len(before) == 2
    assert after[0].dtype == torch.float16
    assert torch.equal(after[0].float() / 1024, before[0])


def test_infinity_written_by_a_hook_counts():
    """Section 4: an inf that user code writes after backward is not stepped on."""

    class Writes(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            self.net.proj.weight.grad[0, 0] = math.inf

    torch.manual_seed(0)
    module, plugin = Writes(), MasterWeightPrecision("bf16")
    before = snapshot(module)
    fit(plugin, module, make_batches(2))
    assert_same(before, snapshot(module))
    assert plugin.skipped_steps == 2


def test_infinity_hidden_by_a_hook_counts():
    """Finiteness is noted before user hooks can hide it."""

    class Hides(TinyModule):
        def on_after_backward(self):
            for param in self.parameters():
                param.grad.nan_to_num_(0, 0, 0)

    torch.manual_seed(0)
    module, plugin = Hides(bad={0, 1}), MasterWeightPrecision("bf16")
    before = snapshot(module)
    fit(plugin, module, make_batches(2))
    assert_same(before, snapshot(module))
    assert plugin.skipped_steps == 2


def test_training_stops_when_skipping_does_not_help():
    """T02: 60 NaN batches must not end well, and must not touch the weights."""
    module = make_module(bad=range(60))
    before = snapshot(module)
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(max_consecutive_skips=7))
    with pytest.raises(NonFiniteGradientsError, match=r"7 training batches.*batch 6 of epoch 0.*net\.") as error:
        fit(plugin, module, make_batches(60))
    assert "The loss was not finite" in str(error.value)
    assert_same(before, snapshot(module))


def test_training_step_that_returns_none_neither_steps_nor_skips():
    class Sometimes(TinyModule):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module, plugin = Sometimes(), MasterWeightPrecision("bf16")
    trainer = fit(plugin, module, make_batches(3))
    assert (plugin.real_steps, plugin.skipped_steps, trainer.global_step) == (2, 0, 2)


def test_schedule_rests_when_training_step_returns_none():
    class Sometimes(TinyModule):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    schedule = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k))  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*|.*overridden.*")
        trainer = fit(MasterWeightPrecision("bf16"), Sometimes(schedule=schedule), make_batches(3))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


# Checkpoints


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(precision, tmp_path):
    """T13, T25: weights, masters, Adam moments, scale and EMA."""

    def run(directory, ckpt_path=None, max_epochs=2):
        module = make_module(OPTIMIZERS["adamw"], bad={1}, seed=int(ckpt_path is not None))
        plugin, ema = MasterWeightPrecision(precision), MasterWeightAveraging(0.9)
        saver = ModelCheckpoint(directory, filename="last", save_on_train_epoch_end=True)
        trainer = make_trainer(plugin, callbacks=[ema, saver], max_epochs=max_epochs, enable_checkpointing=True)
        trainer.fit(module, loader(make_batches(5)), ckpt_path=ckpt_path)
        return torch.load(tmp_path / directory.name / "last.ckpt", weights_only=True), module

    straight, module = run(tmp_path / "straight")
    run(tmp_path / "first", max_epochs=1)
    resumed, other = run(tmp_path / "second", ckpt_path=tmp_path / "first" / "last.ckpt")
    assert_same(straight["state_dict"], resumed["state_dict"])
    assert_same(straight["averaged_state_dict"], resumed["averaged_state_dict"])
    assert_same(snapshot(module), snapshot(other))
    for index, state in straight["optimizer_states"][0]["state"].items():
        assert_same(state, resumed["optimizer_states"][0]["state"][index])
    assert straight["MasterWeightPrecision"] == resumed["MasterWeightPrecision"]
    assert straight["MasterWeightPrecision"]["skipped_steps"] == 2


@pytest.mark.parametrize("rung", RUNGS)
def test_a_layer_that_was_moved_to_fp32_has_all_its_bits_after_a_resume(rung, tmp_path):
    """Moved only after weights have been rounded for fewer bits, it would lose some every time; validation too."""

    class Moves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.precision_plugin._answers.move_to_fp32(["net.proj"])

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.state, self.dtype = snapshot(pl_module), pl_module.net.proj.weight.dtype

        def on_validation_start(self, trainer, pl_module):
            self.on_train_start(trainer, pl_module)

    trainer = fit(MasterWeightPrecision("bf16", masters=rung), make_module(), make_batches(3), callbacks=Moves())
    trainer.save_checkpoint(tmp_path / "moved.ckpt")
    saved = torch.load(tmp_path / "moved.ckpt")["state_dict"]
    for way in ("fit", "validate"):
        look, plugin = Look(), MasterWeightPrecision("bf16", masters=rung)
        resumed = make_trainer(plugin, callbacks=look, max_epochs=2)
        module = make_module()
        module.validation_step = module.training_step
        getattr(resumed, way)(module, loader(make_batches(3)), ckpt_path=tmp_path / "moved.ckpt", weights_only=False)
        assert plugin.fp32_layers == ["net.proj"]
        assert look.dtype == torch.float32
        for name in ("net.proj.weight", "net.proj.bias"):
            assert torch.equal(look.state[name], saved[name])
            assert not torch.equal(saved[name], saved[name].bfloat16().float())


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoint_is_fp32_under_plain_names_and_fits_a_plain_model(weights_only, tmp_path):
    """T24: during fit, for full and weights-only saves."""

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            trainer.save_checkpoint(tmp_path / "mid.ckpt", weights_only=weights_only)

    module = make_module(OPTIMIZERS["adamw"])
    fit(MasterWeightPrecision("bf16"), module, make_batches(3), callbacks=Saves())
    state = torch.load(tmp_path / "mid.ckpt", weights_only=True)["state_dict"]
    plain = make_module(seed=1)
    assert list(state) == list(plain.state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert not torch.equal(state["net.proj.weight"], state["net.proj.weight"].bfloat16().float())
    plain.load_state_dict(state, strict=True)
    assert_same(snapshot(plain), snapshot(module))


def test_stock_gradscaler_state_is_taken_over(tmp_path):
    """T25: a stock 16-mixed checkpoint brings its scale."""
    from lightning.pytorch.plugins import MixedPrecision

    stock = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**15))
    saver = ModelCheckpoint(tmp_path, filename="stock", save_on_train_epoch_end=True)
    fit(stock, make_module(bad={0}), make_batches(2), callbacks=saver, enable_checkpointing=True)
    seen = Probe(lambda trainer, _: trainer.precision_plugin.loss_scale)
    plugin = MasterWeightPrecision("fp16")
    trainer = make_trainer(plugin, max_epochs=2, callbacks=seen)
    trainer.fit(make_module(), loader(make_batches(2)), ckpt_path=tmp_path / "stock.ckpt")
    assert seen.seen == [2.0**14, 2.0**14]


# The module, during and after fit


@pytest.mark.parametrize("precision", HALVES)
def test_module_is_as_found_after_fit(precision):
    """T19: fp32, own classes, no hooks; a fit in stock fp32 goes on from there."""
    module = make_module()
    classes = [type(each) for each in module.modules()]
    fit(MasterWeightPrecision(precision), module, make_batches(2))
    assert [type(each) for each in module.modules()] == classes
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    for each in module.modules():
        assert not each._state_dict_hooks
        assert not each._load_state_dict_pre_hooks
        assert "_mixprec" not in each.__dict__
    before = snapshot(module)
    fit(None, module, make_batches(2))
    assert not torch.equal(before["net.proj.weight"], module.net.proj.weight)


class Abstract(ABC, TinyModule):
    """Python lays it out otherwise than a LightningModule."""


@pytest.mark.parametrize("precision", HALVES)
def test_a_module_whose_first_base_is_no_module_trains_as_any_other(precision):
    module, plain = Abstract(), TinyModule()
    module.load_state_dict(plain.state_dict())
    for each in (module, plain):
        fit(MasterWeightPrecision(precision), each, make_batches(2))
    assert_same(snapshot(module), snapshot(plain))
    assert type(module) is Abstract


@pytest.mark.parametrize("precision", HALVES)
def test_gradients_of_a_second_fit_are_16_bit_too(precision):
    """And after fit a module that the user makes 16-bit himself trains as one that was never in a fit."""

    class Looks(TinyModule):
        def on_after_backward(self):
            self.dtypes = {param.grad.dtype for param in self.parameters() if param.dtype == HALF[precision]}

    torch.manual_seed(0)
    module = Looks()
    for _ in range(2):
        fit(MasterWeightPrecision(precision), module, make_batches(2))
        assert module.dtypes == {HALF[precision]}
    results = []
    for net in (copy.deepcopy(module.net).to(HALF[precision]), module.net.to(HALF[precision])):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-3)
        for x, t, y in make_batches(2):
            F.mse_loss(net(x.to(HALF[precision]), t.to(HALF[precision])).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(net))
    assert_same(*results)


@pytest.mark.parametrize("rung", ["fp32", "split"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_module_is_fp32_after_an_exception(error, rung):
    class Fails(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise error("on purpose")
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = Fails(OPTIMIZERS["adamw"])
    expected, *_ = reference_train(module.net, make_batches(2), "bf16", OPTIMIZERS["adamw"])
    with pytest.raises((error, SystemExit)):
        fit(MasterWeightPrecision("bf16", masters=rung), module, make_batches(4))
    assert type(module) is Fails
    assert_same(snapshot(module.net), expected)


@pytest.mark.parametrize("unfreeze_at", [1, 2])
@pytest.mark.parametrize("rung", RUNGS)
def test_half_parameters_unfrozen_in_mid_training_get_masters(rung, unfreeze_at):
    """T16: frozen weights that were given in bf16 must not train in true half once they are unfrozen."""

    class Unfreezes(TinyModule):
        def __init__(self):
            super().__init__()
            self.net.proj.bfloat16().requires_grad_(False)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == unfreeze_at:
                self.net.proj.requires_grad_(True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)  # too small to move a bf16 weight

    torch.manual_seed(0)
    module = Unfreezes()
    before = module.net.proj.weight.detach().float().clone()
    states = Probe(lambda _, m: snapshot(m)["net.proj.weight"])
    fit(MasterWeightPrecision("bf16", masters=rung), module, make_batches(6), callbacks=states)
    moved = [not torch.equal(state.float(), before) for state in states.seen]
    assert moved[:unfreeze_at] == [False] * unfreeze_at
    if rung != "none":
        assert all(moved[unfreeze_at:])
    assert states.seen[-1].dtype == torch.float32
    assert module.net.proj.weight.dtype == torch.float32


def test_module_given_in_half_trains_with_masters():
    """T07: fp16 weights of a pretrained loader get fp32 masters."""
    module, reference = make_module(), make_module()
    module.net.half()
    fit(MasterWeightPrecision("fp16"), module, make_batches(5))
    fit(None, reference, make_batches(5))
    for name, value in snapshot(module).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_calls_from_hooks_equal_calls_from_steps(precision):
    """T100, T21: the network and the LightningModule, called from a callback, compute as in `validation_step`."""
    batch = make_batches(1)[0]

    class Outputs(TinyModule):
        def forward(self, x, t):
            return self.net(x, t) * 2

        def validation_step(self, batch, _):
            self.inside = (self.net(*batch[:2]), self(*batch[:2]))

    class Calls(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            assert not torch.is_autocast_enabled("cpu")
            self.outside = (pl_module.net(*batch[:2]), pl_module(*batch[:2]))
            with trainer.precision_plugin.inference_context():
                self.context = pl_module.net(*batch[:2])

    torch.manual_seed(0)
    module, calls = Outputs(), Calls()
    trainer = make_trainer(MasterWeightPrecision(precision), callbacks=calls)
    trainer.fit(module, loader([batch]), loader([batch]))
    for inside, outside in zip(module.inside, calls.outside, strict=True):
        assert inside.dtype == outside.dtype
        assert torch.equal(inside, outside)
    assert torch.equal(calls.context, module.inside[0])


@pytest.mark.parametrize("precision", HALVES)
def test_batch_and_buffers_are_not_cast(precision):
    """T86, T94: 999 stays 999, float64 stays float64, schedule buffers stay bit for bit."""
    batch = {
        "t": torch.tensor([999.0]),
        "d": torch.tensor([0.123456789], dtype=torch.float64),
        "ids": torch.tensor([1, 2]),
        "img": torch.zeros(1, dtype=torch.uint8),
    }
    seen = {}

    class Keeps(TinyModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("acp", torch.linspace(0.9999, 0.0047, 1000))
            self.register_buffer("acp64", torch.linspace(0.9999, 0.0047, 1000, dtype=torch.float64))
            self.register_buffer("steps", torch.tensor(0))

        def training_step(self, batch, _):
            seen.update(batch)
            assert self.acp.dtype == torch.float32
            assert self.acp64.dtype == torch.float64
            return self.net(torch.zeros(1, 1, 4, 4), torch.zeros(1, 4)).float().sum()

    module = Keeps()
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    fit(MasterWeightPrecision(precision), module, [batch])
    assert_same(seen, batch)
    assert_same(dict(module.named_buffers()), buffers)


def test_backward_and_hooks_run_outside_autocast():
    states = []

    class Watches(TinyModule):
        def on_after_backward(self):
            states.append(torch.is_autocast_enabled("cpu"))

        def on_before_optimizer_step(self, optimizer):
            states.append(torch.is_autocast_enabled("cpu"))

        def backward(self, loss):
            states.append(torch.is_autocast_enabled("cpu"))
            super().backward(loss)

    fit(MasterWeightPrecision("bf16"), Watches(), make_batches(1))
    assert states == [False] * 3
    assert torch.get_default_dtype() == torch.float32


def test_weights_edited_from_outside_are_adopted_and_the_rest_keeps_its_bits():
    """Section 3: `p.data.clamp_`, `copy_` and `load_state_dict` in hooks reach the masters."""
    seen = {}

    class Edits(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            layer = pl_module.net.proj
            if batch_idx == 1:
                seen["before"] = pl_module.state_dict()["net.proj.weight"].clone()
                layer.weight.data[0].fill_(0.5)
                seen["after"] = pl_module.net.state_dict()["proj.weight"].clone()
            if batch_idx == 2:
                layer.load_state_dict({"weight": torch.full((8, 8), 0.1), "bias": torch.full((8,), 0.1)})
                seen["loaded"] = layer.state_dict()["weight"].clone()

    module = make_module()
    fit(MasterWeightPrecision("bf16"), module, make_batches(3), callbacks=Edits())
    assert torch.equal(seen["after"][0], torch.full((8,), 0.5))
    assert torch.equal(seen["after"][1:], seen["before"][1:])
    assert torch.equal(seen["loaded"], torch.full((8, 8), 0.1))  # all fp32 bits of 0.1


@pytest.mark.parametrize("rung", RUNGS)
def test_parameter_without_gradient_does_not_move(rung):
    """T17: no weight decay, no stale momentum."""

    class Branches(TinyModule):
        def __init__(self):
            super().__init__()
            self.net, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).float().pow(2).mean()
            return loss + self.other(batch).float().pow(2).mean() if batch_idx == 0 else loss

        def on_train_batch_end(self, *_):
            self.seen.append(self.state_dict()["other.weight"].clone())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    module = Branches()
    before = module.other.weight.detach().clone()
    fit(MasterWeightPrecision("bf16", masters=rung), module, [torch.ones(2, 4)] * 3)
    assert not torch.equal(module.seen[0], before)
    assert torch.equal(module.seen[0], module.seen[1])
    assert torch.equal(module.seen[1], module.seen[2])


@pytest.mark.parametrize("rung", RUNGS)
def test_layers_unfrozen_during_training_train(rung):
    """T16: Lightning's BaseFinetuning adds a parameter group in mid-training."""

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net.proj)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.proj, optimizer, lr=0.1)

    class Trainable(TinyModule):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

        def on_train_epoch_end(self):
            self.seen = [*getattr(self, "seen", []), snapshot(self.net.proj)]

    torch.manual_seed(0)
    module = Trainable()
    start = snapshot(module.net.proj)
    trainer = make_trainer(MasterWeightPrecision("bf16", masters=rung), max_epochs=2, callbacks=Unfreeze())
    trainer.fit(module, loader(make_batches(2)))
    assert_same(module.seen[0], start)
    assert not torch.equal(module.seen[1]["weight"], start["weight"])
    assert module.seen[1]["weight"].dtype == torch.float32


@pytest.mark.parametrize("rung", RUNGS)
def test_frozen_parameters_are_bit_for_bit_as_given(rung):
    """Ruling 3, T99: no master, the dtype given, before, during and after."""
    module = make_module()
    module.net.conv_in.requires_grad_(False)
    module.net.norm.half().requires_grad_(False)
    module.make_optimizer = lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)
    before = snapshot(module)
    mid = Probe(lambda _, m: snapshot(m))
    plugin = MasterWeightPrecision("bf16", masters=rung)
    counts = Probe(lambda trainer, _: len(trainer.precision_plugin.master_weights))
    fit(plugin, module, make_batches(2), callbacks=[mid, counts])
    assert counts.seen[0] == 2  # proj.weight and proj.bias
    for state in (mid.seen[-1], snapshot(module)):
        for name in ("net.conv_in.weight", "net.norm.weight", "net.norm.bias"):
            assert state[name].dtype == before[name].dtype
            assert torch.equal(state[name], before[name])


@pytest.mark.parametrize("rung", RUNGS)
def test_tied_parameters_have_one_master(rung):
    """One parameter, one master, tied after steps, save and load."""

    class Tied(TinyModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
            self.net[1].weight = self.net[0].weight

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch).float(), batch)

    module = Tied()
    count = Probe(lambda trainer, _: len(trainer.precision_plugin.master_weights))
    fit(MasterWeightPrecision("bf16", masters=rung), module, [torch.arange(5)] * 2, callbacks=count)
    assert count.seen == [1, 1]
    assert module.net[0].weight is module.net[1].weight


def test_module_copied_during_fit_speaks_fp32_and_computes():
    """A deepcopy keeps dtypes, layers and its own masters; a pickle loads in place of the original."""
    kept = {}

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                kept["copy"] = copy.deepcopy(pl_module.net)
                kept["state"] = snapshot(pl_module.net)
                kept["output"] = pl_module.net(*batch[:2]).detach()
                kept["again"] = kept["copy"](*batch[:2]).detach()

    fit(MasterWeightPrecision("bf16"), make_module(), make_batches(2), callbacks=Copies())
    assert_same(snapshot(kept["copy"]), kept["state"])
    assert torch.equal(kept["output"], kept["again"])


def test_plugin_can_be_pickled_and_reused():
    plugin = pickle.loads(pickle.dumps(MasterWeightPrecision(PrecisionPolicy("bf16", fp32=["net.proj"]))))
    for _ in range(2):
        module = make_module()
        fit(plugin, module, make_batches(2))
    assert plugin.plan["net.proj"] == torch.float32


# Modules and optimizers of other people


def small_fit(net, precision="bf16", rows=4, steps=3, make_optimizer=None, **kwargs):
    """Fit `net` on [rows, 4] -> anything, one child called `net`; returns module, plugin, trainer."""

    class Any(TinyModule):
        def __init__(self):
            super().__init__(make_optimizer)
            self.net = net

        def training_step(self, batch, batch_idx):
            return self.net(batch).float().pow(2).mean()

    module, plugin = Any(), MasterWeightPrecision(precision)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(rows, 4, generator=generator) for _ in range(steps)]
    trainer = fit(plugin, module, batches, **kwargs)
    return module, plugin, trainer


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("reparametrise", REPARAMETRISATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*")
def test_reparametrised_layers_follow_fp32(reparametrise, precision):
    """T22: buffers fp32 and finite, weights within rounding of a run in fp32."""
    nets = []
    for each in (precision, "fp32"):
        torch.manual_seed(0)
        nets.append(nn.Sequential(reparametrise(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)))
        small_fit(nets[-1], each)
    net, plain = nets
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-2, atol=2e-2)


def test_a_network_that_casts_times_to_the_dtype_of_a_layer_sees_them_when_it_is_fp32():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.proj, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            self.seen.append(torch.tensor([999]).to(self.proj.weight.dtype).item())
            return self.last(self.proj(x) + math.cos(self.seen[-1]))

    rounded, true = Net(), Net()
    small_fit(rounded, "bf16")
    small_fit(true, PrecisionPolicy("bf16", fp32=["proj"]))
    assert {*rounded.seen} == {1000.0}  # what the documentation says
    assert {*true.seen} == {999.0}


@pytest.mark.parametrize("precision", HALVES)
def test_a_layer_reparametrised_in_mid_training_follows_fp32(precision):
    """Torch puts a class of its own on top of the one that a layer has while it trains."""

    class Reparametrises(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                nn.utils.parametrizations.weight_norm(pl_module.net[0])
                trainer.strategy.setup_optimizers(trainer)

    nets = []
    for each in (precision, "fp32"):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        small_fit(nets[-1], each, max_epochs=2, callbacks=Reparametrises())
    net, plain = nets
    assert [each.__name__ for each in type(net[0]).__mro__[:3]] == ["ParametrizedLinear", "Linear", "Module"]
    assert type(net[0]).__mro__[1] is nn.Linear
    assert not [name for name in vars(net[0]) if name.startswith("_mixprec")]
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-2, atol=2e-2)


def test_bad_gradient_outside_the_optimizer_costs_one_step():
    """Trainable parameters that no optimizer holds keep their gradients; they must not be judged for ever."""

    class Head(TinyModule):
        def __init__(self):
            super().__init__(bad={1})
            self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
            self.head = nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            loss = self.head(self.net(batch)).float().pow(2).mean()
            return loss * math.inf if batch_idx in self.bad else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    plugin = MasterWeightPrecision("fp16")
    fit(plugin, Head(), [torch.ones(2, 4)] * 12)
    assert (plugin.real_steps, plugin.skipped_steps) == (11, 1)


def test_averages_that_users_keep_in_the_module_are_not_cast():
    """T57: 1000 updates towards 1.1 at decay 0.999 by hand, on a copy that no optimizer holds."""

    class Own(TinyModule):
        def __init__(self):
            super().__init__(lambda params: torch.optim.SGD(params, lr=0.0))
            self.net = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.net.weight)
            self.ema = copy.deepcopy(self.net)
            nn.init.constant_(self.net.weight, 1.1)

        def training_step(self, batch, _):
            return self.net(batch).float().sum()

        def configure_optimizers(self):
            return self.make_optimizer(self.net.parameters())

        @torch.no_grad()
        def on_train_batch_end(self, *_):
            self.ema.weight.mul_(0.999).add_(self.net.state_dict()["weight"], alpha=0.001)

    module = Own()
    fit(MasterWeightPrecision("bf16"), module, [torch.ones(1, 1)] * 1000)
    assert abs(module.ema.weight.item() - 1.06323) < 1e-4


def test_optimizer_that_evaluates_the_loss_again_is_refused():
    """Sharpness-aware minimisation would silently become plain SGD."""

    class Sam(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    module = make_module(lambda params: Sam(params, lr=0.1))
    with pytest.raises(ValueError, match="Sam evaluates the loss more than once"):
        fit(MasterWeightPrecision("bf16"), module, make_batches(1))
    with pytest.raises(MisconfigurationException, match="Sam evaluates the loss more than once"):
        fit(MasterWeightPrecision("fp32"), module, make_batches(1))


def test_schedule_free_through_lightnings_optimizer():
    """`self.optimizers().train()` and `.eval()`, as the optimizer's documentation has it."""
    from schedulefree import AdamWScheduleFree

    class ScheduleFree(TinyModule):
        def on_train_batch_start(self, *_):
            self.optimizers().train()

        def on_train_batch_end(self, *_):
            self.optimizers().eval()

    torch.manual_seed(0)
    module = ScheduleFree(lambda params: AdamWScheduleFree(params, lr=0.01))
    plain = copy.deepcopy(module)
    trainer = fit(MasterWeightPrecision("bf16"), module, make_batches(4))
    fit(None, plain, make_batches(4))
    assert type(trainer.optimizers[0]) is AdamWScheduleFree
    for name, value in snapshot(module).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-2, atol=2e-2)


def test_adagrad_state_made_in_the_constructor_is_exact():
    """0.1 is not a bf16 number: the accumulator must be made from fp32 parameters."""
    seen = Probe(lambda trainer, m: trainer.optimizers[0].state[m.net.proj.bias]["sum"].clone())
    zero = make_module(lambda params: torch.optim.Adagrad(params, lr=0.0, initial_accumulator_value=0.1), bad={0})
    fit(MasterWeightPrecision("bf16"), zero, make_batches(1), callbacks=seen)
    assert torch.equal(seen.seen[0], torch.full((8,), 0.1))


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_compiled_children_train_like_eager_ones(precision):
    def run(compile_it):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 2))
        module, *_ = small_fit(torch.compile(net, backend="eager") if compile_it else net, precision)
        return {name.replace("_orig_mod.", ""): value for name, value in snapshot(module).items()}

    assert_same(run(True), run(False))


def test_compiled_lightning_module_trains():
    module = make_module()
    before = snapshot(module)
    trainer = make_trainer(MasterWeightPrecision("bf16"))
    trainer.fit(torch.compile(module, backend="eager"), loader(make_batches(2)))
    assert not torch.equal(before["net.proj.weight"], module.net.proj.weight)
    assert module.net.proj.weight.dtype == torch.float32


def test_compiled_fp32_layer_stays_fp32_in_backward():
    """Section 3: AOTAutograd would trace the backward under the forward's autocast, and 1e5 overflows fp16."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.time_embedding = nn.Linear(4, 4)

        def forward(self, x):
            return self.time_embedding(x * 1e5) * 1e-5

    setting = torch._functorch.config.backward_pass_autocast
    for compile_it in (False, True):
        torch.manual_seed(0)
        net = torch.compile(Scaled(), backend="aot_eager") if compile_it else Scaled()
        _, plugin, _ = small_fit(net, "fp16")
        assert plugin.skipped_steps == 0
    assert torch._functorch.config.backward_pass_autocast == setting


def test_new_instances_of_a_swapped_class_are_plain():
    made = []

    class Makes(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            layer = type(pl_module.net.conv_out)(8, 1, 3)
            made.append(layer(torch.zeros(1, 8, 4, 4)).dtype)

    fit(MasterWeightPrecision("bf16"), make_module(), make_batches(1), callbacks=Makes())
    assert made == [torch.float32]


def test_half_default_dtype_changes_nothing():
    module, plain = make_module(), make_module()
    fit(MasterWeightPrecision("bf16"), plain, make_batches(2))
    batches = make_batches(2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        fit(MasterWeightPrecision("bf16"), module, batches)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(snapshot(module), snapshot(plain))


def test_copy_of_a_module_in_mid_fit_is_an_fp32_module_of_its_own():
    """It trains on in plain PyTorch and in another fit, and its state dict follows its weights."""
    kept = {}

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            kept.setdefault("net", copy.deepcopy(pl_module.net))

    fit(MasterWeightPrecision("bf16"), make_module(), make_batches(2), callbacks=Copies())
    net = kept["net"]
    assert {param.dtype for param in net.parameters()} == {torch.float32}
    with torch.no_grad():
        net.proj.weight.mul_(1.0001)
    assert torch.equal(net.state_dict()["proj.weight"], net.proj.weight)
    module = make_module()
    module.net = net
    before = snapshot(module)
    fit(MasterWeightPrecision("fp16"), module, make_batches(2))
    after = snapshot(module)
    assert not torch.equal(before["net.proj.weight"], after["net.proj.weight"])
    assert torch.equal(after["net.proj.weight"], module.net.proj.weight)


def test_a_plugin_used_again_counts_anew():
    plugin = MasterWeightPrecision("fp16")
    for _ in range(2):
        trainer = fit(plugin, make_module(bad={0}), make_batches(3))
        assert plugin.real_steps == trainer.global_step == 2
        assert plugin.loss_scale == 2.0**14


def test_fit_without_an_optimizer_counts_as_stock():
    class Nothing(TinyModule):
        def configure_optimizers(self):
            return None

    counts = []
    for plugin in (MasterWeightPrecision("bf16"), None):
        trainer = make_trainer(plugin)
        trainer.fit(Nothing(), loader(make_batches(2)))
        counts.append(trainer.global_step)
    assert counts[0] == counts[1]


# Errors before training


@pytest.mark.parametrize("precision", ["bf16-mixed", "16", "float8", "half", None])
def test_unknown_precision_names_the_choices(precision):
    with pytest.raises(ValueError, match=rf"{precision!r}.*'fp32', 'bf16', 'fp16'"):
        MasterWeightPrecision(precision)


def test_unknown_arguments_name_the_choices():
    with pytest.raises(ValueError, match=r"masters='split3'.*'fp32'"):
        MasterWeightPrecision("bf16", masters="split3")
    with pytest.raises(ValueError, match=r"scaler='dynamic'.*DynamicLossScaler"):
        MasterWeightPrecision("fp16", scaler="dynamic")


def test_precision_and_plugin_at_once():
    """T77."""
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*MasterWeightPrecision.*Choose one"):
        make_trainer(MasterWeightPrecision("bf16"), precision="bf16-mixed")


def test_foreign_strategies_are_refused_naming_the_alternative():
    """T63: FSDP1 at Trainer construction; what FSDP2 needs is in test_sharding.py."""
    from lightning.pytorch.strategies import FSDPStrategy

    with pytest.raises(TypeError, match=r"FSDP.*MasterWeightPrecision\('bf16'.*strategy='ddp'"):
        FSDPStrategy(precision_plugin=MasterWeightPrecision("bf16"))


def test_a_device_without_float64_is_refused():
    from lightning.pytorch.strategies import SingleDeviceStrategy

    with pytest.raises(MisconfigurationException, match=r"accelerator='mps'.*float64.*accelerator='cpu'"):
        refuse_strategy(SingleDeviceStrategy(torch.device("mps")))


def test_trainer_reports_the_real_mode():
    """T63."""
    for precision, name in {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}.items():
        assert make_trainer(MasterWeightPrecision(precision)).precision == name


def test_fabric_is_refused_by_name():
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MasterWeightPrecision("bf16"))
    for module in (nn.Linear(1, 1), make_module()):
        with pytest.raises(TypeError, match=rf"{type(module).__name__} .*Fabric\(precision='bf16-mixed'\)"):
            fabric.setup(module)


@pytest.mark.parametrize("precision", HALVES)
def test_lbfgs_is_refused_by_name(precision):
    """T52: at setup, with the remedy; fp32 runs."""
    module = make_module(lambda params: torch.optim.LBFGS(params, lr=0.1))
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(MasterWeightPrecision(precision), module, make_batches(1))
    before = snapshot(module)
    plugin = MasterWeightPrecision("fp32")
    fit(plugin, module, make_batches(1))
    assert not torch.equal(before["net.proj.weight"], module.net.proj.weight)


def test_stock_weight_averaging_is_refused_naming_ours():
    from lightning.pytorch.callbacks import EMAWeightAveraging

    with pytest.raises(MisconfigurationException, match="MasterWeightAveraging"):
        fit(MasterWeightPrecision("bf16"), make_module(), make_batches(1), callbacks=EMAWeightAveraging())


def test_typo_in_a_policy_stops_before_training():
    module = make_module()
    plugin = MasterWeightPrecision(PrecisionPolicy("bf16", fp32=["time_embeding"]))
    with pytest.raises(ValueError, match=r"'time_embeding'.*'time_embedding'|time_embedding"):
        fit(plugin, module, make_batches(1))
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    assert type(module) is TinyModule
