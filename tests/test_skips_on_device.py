"""An optimizer that takes a flag on the device is queued before the host knows whether it is to step.

Nothing of a skipped step may be seen afterwards, and the reason must still be told.
"""

import math
from typing import get_args

import lightning as L
import pytest
import torch
from reference import TinyModule, assert_same, loader, make_batches, make_module, make_trainer, reference_train
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, storage
from lightning_mixprec import master as master_module
from lightning_mixprec.storage import Masters


def fused(make=torch.optim.AdamW, **options):
    return lambda params: make(params, lr=0.01, fused=True, **options)


def groups(params):
    """Two groups, an fp32 and a 16-bit parameter in each."""
    params = list(params)
    return torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1, "amsgrad": True}], lr=0.01, fused=True
    )


def rest(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Spy(L.Callback):
    """What a callback sees after every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        plugin = trainer.precision_plugin
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((plugin.step_was_skipped, trainer.global_step, plugin.real_steps, lr, plugin.loss_scale))


@pytest.mark.parametrize(
    ("make", "clip"),
    [(fused(), None), (fused(), 0.05), (fused(torch.optim.Adam, maximize=True), 0.05), (groups, None)],
    ids=["AdamW", "AdamW-clipped", "Adam-clipped", "groups"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_are_those_of_a_plain_loop(precision, make, clip):
    """Two overflows among eight batches, none of them the first, of which nothing is there to be queued."""
    bad, batches, scale = {2, 5}, make_batches(8), 2.0**4 if precision == "fp16" else 1.0
    module, spy = make_module(make, bad), Spy()
    net = make_module().net
    scaler = DynamicLossScaler(init_scale=scale) if precision == "fp16" else None
    plugin = MasterWeightPrecision(precision, scaler=scaler)
    make_trainer(plugin, callbacks=spy, gradient_clip_val=clip).fit(module, loader(batches))

    expected, optimizer, final, steps = reference_train(net, batches, precision, make, clip=clip, scale=scale, bad=bad)
    assert_same(module.net.state_dict(), expected)
    assert (plugin.real_steps, plugin.skipped_steps) == (steps, 2) == (6, 2)
    if precision == "fp16":
        assert plugin.loss_scale == final
    moments = module.trainer.optimizers[0].state
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    params = [param for group in module.trainer.optimizers[0].param_groups for param in group["params"]]
    for param, master in zip(params, masters, strict=True):
        assert_same(moments[param], optimizer.state[master])
    assert [skipped for skipped, *_ in spy.seen] == [index in bad for index in range(8)]


@pytest.mark.parametrize("masters", ["fp32", "split", "split24", "none"])
def test_a_run_with_bad_batches_is_the_run_without_them(masters):
    """Weights, moments, step counts, the schedule and what callbacks see."""
    found = []
    for bad in ((), (1, 4, 5)):
        batches = iter(make_batches(6))
        data = [next(batches) if index not in bad else make_batches(1)[0] for index in range(6 + len(bad))]
        module, spy = make_module(fused(), bad, rest), Spy()
        make_trainer(MasterWeightPrecision("bf16", masters=masters), callbacks=spy).fit(module, loader(data))
        states = list(module.trainer.optimizers[0].state.values())
        found.append((module.net.state_dict(), states, [each for each in spy.seen if not each[0]]))
        assert len(states) == len(list(module.parameters()))
    (weights, moments, seen), (weights2, moments2, seen2) = found
    assert_same(weights2, weights)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(moments, moments2, strict=True) for key in a)
    assert seen == seen2


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("clip", "algorithm"), [(None, None), (0.1, "norm"), (0.1, "value")])
def test_the_parameter_that_overflowed_is_named(value, clip, algorithm):
    """Clipping comes before the host knows, and a NaN norm would make NaN of everything."""

    class Backward(TinyModule):
        def training_step(self, batch, batch_idx):
            self.now = batch_idx == 3
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = Backward(fused())
    module.now, named = False, []
    module.net.proj.weight.register_hook(lambda grad: grad * value if module.now else grad)

    class Names(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.precision_plugin.step_was_skipped:
                named.append(trainer.precision_plugin.overflowed_parameters)

    plugin = MasterWeightPrecision("bf16")
    trainer = make_trainer(plugin, callbacks=Names(), gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
    trainer.fit(module, loader(make_batches(6)))
    assert named == [["net.proj.weight"]]
    assert all(bool(param.isfinite().all()) for param in module.parameters())


def test_a_hook_that_writes_a_gradient_is_heard():
    """What user code writes after backward counts; then nothing is queued ahead."""

    class Writes(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
                self.net.proj.bias.grad[0] = math.nan

    torch.manual_seed(0)
    module, plugin = Writes(fused()), MasterWeightPrecision("bf16")
    make_trainer(plugin).fit(module, loader(make_batches(5)))
    assert (plugin.real_steps, plugin.skipped_steps) == (4, 1)
    assert all(bool(param.isfinite().all()) for param in module.parameters())


def test_accumulated_windows_skip_as_a_whole():
    module, plugin = make_module(fused(), {2, 5}), MasterWeightPrecision("bf16")
    make_trainer(plugin, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, loader(make_batches(8)))
    net = make_module().net
    expected, _, _, steps = reference_train(net, make_batches(8), "bf16", fused(), accumulate=2, clip=0.1, bad={2, 5})
    assert_same(module.net.state_dict(), expected)
    assert plugin.real_steps == steps == 2


def test_edited_weights_are_kept_over_a_skip():
    """A weight that a callback sets before a batch that is skipped stays as it was set, and later steps start there."""

    class Edits(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                nn.init.constant_(pl_module.net.proj.weight, 0.25)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.after = pl_module.state_dict()["net.proj.weight"].clone()

    edits = Edits()
    module = make_module(fused(), {2})
    make_trainer(MasterWeightPrecision("bf16"), callbacks=edits).fit(module, loader(make_batches(3)))
    assert torch.equal(edits.after, torch.full((8, 8), 0.25))
    assert torch.equal(module.net.proj.weight, torch.full((8, 8), 0.25))


class Edits(L.Callback):
    """Writes into weights after some batches, in ways that no version counter sees."""

    def __init__(self, batches):
        self.batches = batches

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        net = pl_module.net
        if batch_idx in self.batches:
            net.conv_in.weight.data.clamp_(-0.1, 0.1)
            net.proj.weight.data[0] = 0
            net.proj.bias.data = torch.linspace(-1, 1, 8)
            net.norm.weight.data.mul_(0.5)


SETTINGS = {
    "fused": ("bf16", fused(), {}),
    "clipped": ("bf16", fused(), {"gradient_clip_val": 0.05}),
    "accumulated": ("bf16", fused(), {"accumulate_grad_batches": 2}),
    "groups": ("bf16", groups, {}),
    "foreach": ("bf16", lambda params: torch.optim.AdamW(params, lr=0.01), {"gradient_clip_val": 0.05}),
    "SGD": ("bf16", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), {}),
    "fp16": ("fp16", fused(), {"gradient_clip_val": 0.05}),
}
RUNGS = [(each, rung) for each in SETTINGS for rung in (["fp32"] if each == "fp16" else get_args(Masters))]


@pytest.fixture
def looks(monkeypatch):
    """Lets the host look at once, or as on a GPU not before it reads whatever else there is."""

    def set_to(at_once):
        for module in (storage, master_module):
            monkeypatch.setattr(module, "reads_at_once", lambda _: at_once)

    return set_to


@pytest.mark.parametrize("edited", [{2, 3, 7}, set(range(10))], ids=["now and then", "always"])
@pytest.mark.parametrize(("setting", "masters"), RUNGS)
def test_edits_count_where_the_host_cannot_look_at_once(setting, masters, edited, looks):
    precision, make, options = SETTINGS[setting]
    found = []
    for at_once in (True, False):
        looks(at_once)
        module, spy = make_module(make, {3, 5}, rest), Spy()
        plugin = MasterWeightPrecision(precision, masters=masters)
        make_trainer(plugin, callbacks=[Edits(edited), spy], **options).fit(module, loader(make_batches(10)))
        found.append((module.net.state_dict(), list(module.trainer.optimizers[0].state.values()), spy.seen))
    (weights, states, seen), (weights2, states2, seen2) = found
    assert_same(weights2, weights)
    assert seen == seen2
    assert len({len(states), len(states2), len(list(module.parameters()))}) == 1
    assert all(torch.equal(a[key], b[key]) for a, b in zip(states, states2, strict=True) for key in a)


def test_edits_between_two_optimizers_count_where_the_host_cannot_look_at_once(looks):
    class Two(TinyModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            first.step()
            self.net.proj.weight.data.clamp_(-0.1, 0.1)
            second.step()
            for each in (first, second):
                each.zero_grad()

        def configure_optimizers(self):
            params = list(self.parameters())
            return [torch.optim.AdamW(each, lr=0.01, fused=True) for each in (params[::2], params[1::2])]

    found = []
    for at_once in (True, False):
        looks(at_once)
        torch.manual_seed(0)
        module = Two()
        make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(make_batches(5)))
        found.append(module.net.state_dict())
    assert_same(*found)
