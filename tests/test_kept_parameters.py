"""What users keep of parameters while optimizers are made, and optimizers and hooks of their own on them."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import TinyModule, loader, make_batches, make_trainer, snapshot
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision

PLUGINS = {
    "bf16": lambda: MasterWeightPrecision("bf16"),
    "split": lambda: MasterWeightPrecision("bf16", masters="split"),
    "fp16": lambda: MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=2.0**10)),
}
SGD = torch.optim.SGD


def change(cls, plugin, batches=8, **options):
    """How `cls` has changed its weights."""
    torch.manual_seed(0)
    module = cls()
    before = snapshot(module)
    trainer = make_trainer(plugin, **options)
    trainer.fit(module, loader(make_batches(batches)))
    after = snapshot(module)
    return {name: after[name] - before[name] for name in before}, trainer


def assert_as_in_fp32(cls, plugin, tolerance=0.02, **options):
    """The weights' changes are, each by its norm, those of stock Lightning in fp32, which must be some."""
    expected, _ = change(cls, None, **options)
    got, trainer = change(cls, plugin, **options)
    assert any(each.any() for each in expected.values())
    for name, value in expected.items():
        assert (got[name] - value).norm() <= tolerance * value.norm(), name
    return trainer


# Kept from `configure_optimizers`, where parameters are fp32


class KeptList(TinyModule):
    """A list of the parameters, as many training scripts keep to clip or to penalize."""

    def configure_optimizers(self):
        self.kept = list(self.net.parameters())
        return SGD(self.kept, lr=0.1)


class Clips(KeptList):
    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.kept, 0.01)


class Penalizes(KeptList):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.kept)


class Unfreezes(KeptList):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.net.proj.requires_grad_(False)
        return optimizer

    def on_train_batch_start(self, batch, batch_idx):
        for param in self.kept:
            param.requires_grad_(batch_idx >= 4 or param.requires_grad)


class Hooks(TinyModule):
    def configure_optimizers(self):
        for param in self.net.parameters():
            param.register_hook(lambda grad: grad * 0.1)
        return super().configure_optimizers()


class OwnOptimizer(TinyModule):
    """One that is not returned, for parameters that no other optimizer has."""

    def configure_optimizers(self):
        self.own = SGD(self.net.proj.parameters(), lr=0.1)
        return SGD([param for name, param in self.net.named_parameters() if "proj" not in name], lr=0.1)

    def on_train_batch_end(self, *args):
        self.own.step()
        self.own.zero_grad()


@pytest.mark.parametrize("mode", PLUGINS)
@pytest.mark.parametrize("cls", [Clips, Penalizes, Unfreezes, Hooks])
def test_what_is_kept_while_optimizers_are_made_is_of_the_parameters_that_train(cls, mode):
    assert_as_in_fp32(cls, PLUGINS[mode]())


@pytest.mark.parametrize("mode", ["bf16", "split"])
def test_an_optimizer_of_the_users_own_for_other_parameters(mode):
    """It holds the module's parameters, wherever it is made: these stay fp32."""
    assert_as_in_fp32(OwnOptimizer, PLUGINS[mode](), tolerance=0.05)


def test_values_given_while_optimizers_are_made_are_the_weights():
    class Initialises(TinyModule):
        def configure_optimizers(self):
            with torch.no_grad():
                self.net.proj.weight.fill_(0.1)
            self.net.conv_in.weight.data = torch.full_like(self.net.conv_in.weight, 0.2)
            return SGD(self.parameters(), lr=0.0)

    module = Initialises()
    make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(make_batches(1)))
    assert torch.equal(module.net.proj.weight, torch.full((8, 8), 0.1))
    assert torch.equal(module.net.conv_in.weight, torch.full((8, 1, 3, 3), 0.2))


def test_a_list_that_an_optimizer_has_made_for_its_steps():
    class Listed(SGD):
        """Steps on lists of its own, not on its groups."""

        def __init__(self, params, lr):
            super().__init__(params, lr)
            params = [param for group in self.param_groups for param in group["params"]]
            self.listed = {"matrices": [p for p in params if p.dim() > 1], "others": [p for p in params if p.dim() < 2]}

        @torch.no_grad()
        def step(self, closure=None):
            closure()
            for param in [*self.listed["matrices"], *self.listed["others"]]:
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])

    assert_as_in_fp32(lambda: TinyModule(lambda params: Listed(params, lr=1e-4)), MasterWeightPrecision("bf16"))


# Steps of optimizers that Lightning does not know


class SecondOptimizer(TinyModule):
    """Over parameters that a returned one has, too."""

    def on_train_start(self):
        self.own = torch.optim.AdamW(self.net.proj.parameters(), lr=1e-4)

    def on_train_batch_end(self, *args):
        self.own.step()


class StepsInHook(TinyModule):
    """The optimizer's step fused into backward, as PyTorch's tutorial and kohya's scripts have it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_fit_start(self):
        for param in self.net.parameters():
            optimizer = torch.optim.AdamW([param], lr=1e-4)
            param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


@pytest.mark.parametrize("mode", PLUGINS)
def test_a_step_on_16_bit_weights_by_an_optimizer_that_was_not_returned_is_refused(mode):
    """It would train in true half, silently (https://github.com/kohya-ss/sd-scripts/issues/1344 fuses steps so)."""
    remedy = "(?s)AdamW.*configure_optimizers has not returned.*'net.*Return it as well"
    for cls in (SecondOptimizer, StepsInHook):
        with pytest.raises(MisconfigurationException, match=remedy):
            change(cls, PLUGINS[mode]())
    # Nothing stays behind.
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    SGD([weight], lr=1.0).step()
    assert weight.item() == 0


def test_a_step_on_scaled_gradients_by_an_optimizer_that_was_not_returned_is_refused():
    with pytest.raises(MisconfigurationException, match="carry the loss scale"):
        change(OwnOptimizer, PLUGINS["fp16"]())


@pytest.mark.parametrize("mode", PLUGINS)
def test_a_manual_loop_without_optimizers_is_refused(mode):
    class NoOptimizers(StepsInHook):
        def configure_optimizers(self):
            return []

    with pytest.raises(MisconfigurationException, match=r"knows of no optimizer.*configure_optimizers"):
        change(NoOptimizers, PLUGINS[mode]())


# Hooks on gradients


def test_hooks_that_come_when_fit_has_started_are_named_too():
    """They see gradients times the loss scale, wherever they were registered."""

    class Late(TinyModule):
        def on_fit_start(self):
            self.net.proj.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    with pytest.warns(UserWarning, match=r"gradient hooks \(net.proj.weight\).*loss scale"):
        change(Late, PLUGINS["fp16"](), 1)


class PutsAside(TinyModule):
    """Gradients leave for other memory as soon as they are there."""

    def on_fit_start(self):
        self.aside = {}

        def put_aside(param):
            self.aside[param] = param.grad.float()
            param.grad = None

        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(put_aside)


class PutsBack(PutsAside):
    def on_before_optimizer_step(self, optimizer):
        for param, grad in self.aside.items():
            param.grad = grad


@pytest.mark.parametrize("mode", ["bf16", "split"])
def test_gradients_put_aside_in_backward_and_back_before_the_step(mode):
    trainer = assert_as_in_fp32(PutsBack, PLUGINS[mode](), gradient_clip_val=1.0)
    assert trainer.global_step == trainer.precision_plugin.real_steps == 8


def test_a_batch_whose_gradients_overflow_when_they_are_put_back_is_skipped():
    class Overflows(PutsBack):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            if self.trainer.fit_loop.batch_idx == 2:
                self.net.proj.weight.grad.fill_(torch.inf)

    _, trainer = change(Overflows, PLUGINS["bf16"]())
    assert (trainer.precision_plugin.real_steps, trainer.precision_plugin.skipped_steps) == (7, 1)


def test_backward_after_backward_that_leaves_no_gradient_is_reported():
    with pytest.warns(UserWarning, match="no parameter of SGD has had a gradient: nothing is trained"):
        change(PutsAside, PLUGINS["bf16"](), 3)
