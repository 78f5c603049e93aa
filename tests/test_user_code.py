"""What users do between backward and step: guards, clipping, hooks, odd checkpoints. Nothing is lost there."""

import logging
import math

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import (
    Resumable,
    TinyModule,
    assert_same,
    loader,
    make_batches,
    make_module,
    make_trainer,
    snapshot,
)
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, NonFiniteGradientsError

CLIP = 1e-3


def fp16(scale: float = 2.0**10, **options) -> MasterWeightPrecision:
    return MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=scale, **options))


def fit(module, plugin, batches=8, **options):
    trainer = make_trainer(plugin, **options)
    trainer.fit(module, loader(make_batches(batches)))
    return trainer


def seeded(cls, *args, **kwargs):
    torch.manual_seed(0)
    return cls(*args, **kwargs)


# Guards against gradients that are not finite


def finite(module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


class GuardAfterBackward(TinyModule):
    def on_after_backward(self):
        if not finite(self):
            self.zero_grad()


class GuardInStep(TinyModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        def closure():
            loss = optimizer_closure()
            if not finite(self):
                self.zero_grad()
            return loss

        optimizer.step(closure=closure)


class ManualGuard(TinyModule):
    """Leaves the batch out, as people write it."""

    def __init__(self, clears, *args):
        super().__init__(*args)
        self.automatic_optimization = False
        self.clears = clears

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if not finite(self):
            if self.clears:
                optimizer.zero_grad()
            return
        optimizer.step()


class GuardInCallback(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        if not finite(pl_module):
            for param in pl_module.parameters():
                param.grad = None


@pytest.mark.parametrize("kind", ["hook", "callback", "closure", "manual", "manual, cleared"])
def test_a_guard_of_the_users_own_does_not_keep_the_scale_up(kind):
    """Gradients dropped because they overflowed are a skip: the scale shrinks until training goes on."""
    kinds = {
        "hook": GuardAfterBackward,
        "callback": TinyModule,
        "closure": GuardInStep,
        "manual": lambda: ManualGuard(False),
        "manual, cleared": lambda: ManualGuard(True),
    }
    module, plugin = seeded(kinds[kind]), fp16(2.0**24)
    before = snapshot(module)
    trainer = fit(module, plugin, 24, callbacks=[GuardInCallback()] if kind == "callback" else [])
    assert plugin.loss_scale <= 2.0**18
    assert plugin.skipped_steps == round(math.log2(2.0**24 / plugin.loss_scale)) > 0
    assert plugin.real_steps + plugin.skipped_steps >= 24 - 1
    assert trainer.global_step == plugin.real_steps
    assert not torch.equal(before["net.proj.weight"], module.net.proj.weight)


@pytest.mark.parametrize("cls", [GuardAfterBackward, lambda *args: ManualGuard(True, *args)], ids=["hook", "manual"])
def test_a_guard_does_not_keep_a_hopeless_run_alive(cls):
    module = seeded(cls, None, range(100))
    plugin = MasterWeightPrecision("bf16", scaler=DynamicLossScaler.static(1.0, max_consecutive_skips=5))
    with pytest.raises(NonFiniteGradientsError, match="5 training batches in a row"):
        fit(module, plugin, 20)


def test_gradients_that_another_optimizer_leaves_behind_are_no_skips():
    """The generator's backward reaches the discriminator, whose gradients are dropped: its own business."""

    class Gan(TinyModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(16, 1)

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)]

        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            two.zero_grad()
            fake = self.net(*batch[:2]).float()
            self.manual_backward(self.other(fake.detach().flatten(1)).float().square().mean())
            two.step()
            one.zero_grad()
            loss = -self.other(fake.flatten(1)).float().mean()
            self.manual_backward(loss * math.inf if batch_idx == 2 else loss)
            one.step()

    plugin = fp16()
    fit(seeded(Gan), plugin, 6)
    assert (plugin.skipped_steps, plugin.loss_scale) == (1, 2.0**9)


# Clipping and editing what backward made


class ManualClip(TinyModule):
    def __init__(self, how):
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.how == "norm":
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        elif self.how == "value":
            nn.utils.clip_grad_value_(self.parameters(), CLIP)
        else:
            for param in self.parameters():
                param.grad.sign_().mul_(CLIP)
        if batch_idx % 2:
            optimizer.step()


@pytest.mark.parametrize("how", ["norm", "value", "sign"])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**15])
def test_manual_loops_clip_true_gradients_whatever_they_call(how, scale):
    """T39: torch's own functions, too, and over two backward passes."""
    moves = []
    for plugin in (MasterWeightPrecision("fp32"), fp16(scale)):
        module = seeded(ManualClip, how)
        before = snapshot(module)
        fit(module, plugin, 4)
        assert plugin.skipped_steps == 0
        moves.append(torch.cat([(p - before[n]).flatten() for n, p in module.state_dict().items()]))
    assert moves[1].norm() / moves[0].norm() == pytest.approx(1, abs=0.02)
    assert F.cosine_similarity(*moves, dim=0) > 0.95


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_see_scaled_gradients_are_named(register):
    module = make_module()
    getattr(module.net.proj.weight, register)(lambda value: None)
    with pytest.warns(UserWarning, match=r"gradient hooks \(net.proj.weight\).*loss scale"):
        fit(module, fp16(), 1)


def test_a_backward_that_ignores_the_scaled_loss_is_refused():
    class Own(TinyModule):
        def training_step(self, batch, batch_idx):
            self.kept = super().training_step(batch, batch_idx)
            return self.kept

        def backward(self, loss, *args):
            self.kept.backward()

    class Passes(Own):
        def backward(self, loss, *args):
            (loss * 1.0).backward()

    with pytest.raises(MisconfigurationException, match="lack the loss scale"):
        fit(seeded(Own), fp16(), 2)
    fit(seeded(Own), MasterWeightPrecision("bf16"), 2)
    plugin = fp16()
    fit(seeded(Passes), plugin, 2)
    assert plugin.real_steps == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_that_the_user_keeps_over_a_step_are_kept(precision):
    """`optimizer_zero_grad` every second batch, as with fp32 weights."""

    class Keeps(TinyModule):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    weights = []
    for plugin in (MasterWeightPrecision("fp32"), fp16() if precision == "fp16" else MasterWeightPrecision("bf16")):
        module = seeded(Keeps, lambda params: torch.optim.SGD(params, lr=0.02))
        before = snapshot(module)
        fit(module, plugin, 6)
        weights.append(torch.cat([(p - before[n]).flatten() for n, p in module.state_dict().items()]))
    assert (weights[1] - weights[0]).norm() < 0.03 * weights[0].norm()


# Checkpoints in odd places


class SaveIn(L.Callback):
    """Saves in a hook of batch `at`."""

    def __init__(self, hook, at, path):
        def save(trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == at + 1 and not path.exists():
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_after_backward", 4),
        ("on_before_backward", 5),
        ("on_after_backward", 5),
        ("on_after_backward", 7),
        ("on_before_optimizer_step", 7),
    ],
)
def test_a_batch_that_will_be_run_again_counts_once(hook, at, precision, tmp_path, caplog):
    """The first of a window is left out of the checkpoint; with others before it, it is in, and not counted again."""
    path = tmp_path / "mid.ckpt"
    plugin = (lambda: fp16()) if precision == "fp16" else (lambda: MasterWeightPrecision("bf16"))
    whole = make_module()
    with caplog.at_level(logging.WARNING):
        make_trainer(plugin(), accumulate_grad_batches=4, callbacks=SaveIn(hook, at, path)).fit(whole, Resumable(at))
    resumed = make_module()
    make_trainer(plugin(), accumulate_grad_batches=4).fit(resumed, Resumable(at), ckpt_path=path)
    assert_same(snapshot(whole), snapshot(resumed))
    assert "count twice" not in caplog.text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 6)])
def test_a_window_that_is_resumed_twice(first, second, precision, tmp_path):
    plugin = (lambda: fp16()) if precision == "fp16" else (lambda: MasterWeightPrecision("bf16"))
    paths = [tmp_path / "first.ckpt", tmp_path / "second.ckpt"]

    def fit(module, at, save_at, path, ckpt_path=None):
        saver = SaveIn("on_after_backward", save_at, path)
        trainer = make_trainer(plugin(), accumulate_grad_batches=4, callbacks=saver)
        trainer.fit(module, Resumable(at), ckpt_path=ckpt_path)
        return snapshot(module)

    whole = fit(make_module(), 0, first, paths[0])
    assert_same(fit(make_module(), first, second, paths[1], paths[0]), whole)
    assert_same(fit(make_module(), second, 100, tmp_path / "none.ckpt", paths[1]), whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_window_that_an_exception_ends_is_in_a_checkpoint_saved_afterwards(precision, tmp_path):
    class Fails(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5 and self.fails:
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

    def plugin():
        return fp16() if precision == "fp16" else MasterWeightPrecision("bf16")

    def module(fails):
        made = seeded(Fails)
        made.fails = fails
        return made

    trainer = make_trainer(plugin(), accumulate_grad_batches=4)
    with pytest.raises(ValueError, match="planted"):
        trainer.fit(module(True), Resumable(5))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    whole, resumed = module(False), module(False)
    make_trainer(plugin(), accumulate_grad_batches=4).fit(whole, Resumable(5))
    make_trainer(plugin(), accumulate_grad_batches=4).fit(resumed, Resumable(5), ckpt_path=tmp_path / "after.ckpt")
    assert_same(snapshot(whole), snapshot(resumed))


def test_a_validation_after_fit_keeps_the_state_of_the_rounding(tmp_path):
    plugin = MasterWeightPrecision("bf16", masters="none")
    module = make_module()
    trainer = fit(module, plugin, 3)
    before = plugin.state_dict()["rounding"]
    trainer.validate(module, loader(make_batches(1)), verbose=False)
    after = plugin.state_dict()["rounding"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert before.keys() == after.keys()


# Loss scale over legs of other precisions


def leg(plugin, path, ckpt=None):
    module = make_module()
    trainer = make_trainer(plugin, max_epochs=1 if ckpt is None else 2 + ("b" in path.name))
    trainer.fit(module, loader(make_batches(2)), ckpt_path=ckpt)
    trainer.save_checkpoint(path)
    return path


def test_a_constant_scale_is_not_taken_over_by_one_that_moves(tmp_path):
    """T25, T30: bf16 counts in ones, and fp16 that starts there moves nothing for thousands of batches."""
    bf16 = leg(MasterWeightPrecision("bf16"), tmp_path / "a")
    plugin = MasterWeightPrecision("fp16")
    leg(plugin, tmp_path / "2", bf16)
    assert plugin.loss_scale == 2.0**15
    assert plugin.real_steps == 4


def test_a_scale_that_moved_is_kept_through_a_constant_leg(tmp_path):
    first = leg(fp16(2.0**9), tmp_path / "a")
    middle = leg(MasterWeightPrecision("bf16"), tmp_path / "2", first)
    plugin = fp16(2.0**12)
    leg(plugin, tmp_path / "b", middle)
    assert plugin.loss_scale == 2.0**9


def test_a_subclass_and_its_base_read_each_others_state(tmp_path):
    class Mine(MasterWeightPrecision):
        pass

    first = leg(fp16(2.0**9), tmp_path / "a")
    plugin = Mine("fp16")
    second = leg(plugin, tmp_path / "2", first)
    assert (plugin.loss_scale, plugin.real_steps) == (2.0**9, 4)
    back = fp16()
    leg(back, tmp_path / "b", second)
    assert (back.loss_scale, back.real_steps) == (2.0**9, 6)


@pytest.mark.parametrize(
    "bad",
    [
        {"init_scale": 2.0**200, "growth_factor": 1, "backoff_factor": 1},
        {"init_scale": True},
        {"growth_interval": True},
        {"min_scale": 1e-45},
    ],
)
def test_settings_that_fp32_does_not_hold_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DynamicLossScaler(**bad)


def test_numbers_of_numpy_are_numbers():
    scaler = DynamicLossScaler(init_scale=np.float32(1024), growth_interval=np.int64(5))
    assert (scaler.init_scale, scaler.growth_interval) == (1024.0, 5)
    assert type(scaler.growth_interval) is int


# Optimizers


def test_the_bare_optimizer_is_refused_with_fp32_weights_and_a_loss_scale():
    class Bare(TinyModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers(use_pl_optimizer=False).step()

    with pytest.raises(RuntimeError, match=r"past Lightning"):
        fit(seeded(Bare), MasterWeightPrecision("fp32", scaler=DynamicLossScaler(init_scale=8)), 1)
    module = seeded(Bare)
    fit(module, MasterWeightPrecision("fp32"), 1)  # true gradients, as in stock
    assert not module.trainer.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_optimizers_made_anew_in_the_middle_go_on(precision):
    class Renew(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.strategy.setup_optimizers(trainer)

    module = seeded(TinyModule, lambda params: torch.optim.SGD(params, 0.1), (4,))
    plugin = MasterWeightPrecision(precision)
    trainer = fit(module, plugin, 6, callbacks=Renew())
    assert (plugin.skipped_steps, plugin.real_steps) == (1, 5)
    assert trainer.optimizers[0].param_groups[0]["params"][0] is next(iter(module.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_learning_rate_that_is_not_finite_is_refused_before_the_step(value, precision):
    module = make_module(schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: value if i == 2 else 1.0))
    with pytest.raises(ValueError, match=r"lr=(nan|inf) in parameter group 0 of SGD"):
        fit(module, MasterWeightPrecision(precision), 6)
    assert all(bool(param.isfinite().all()) for param in module.parameters())


def test_weights_that_are_not_finite_end_the_run_at_once():
    """Whoever wrote them: fifty skipped batches would not make them better."""

    class Spoil(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                pl_module.net.proj.bias.data[0] = math.inf

    plugin = MasterWeightPrecision("bf16")
    with pytest.raises(NonFiniteGradientsError, match=r"1 parameters are not finite any more.*net.proj.bias"):
        fit(make_module(), plugin, 20, callbacks=Spoil())
    assert plugin.skipped_steps == 1
