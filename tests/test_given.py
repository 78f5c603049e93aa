"""Modules as users have them: given in 16 bits in whole or in part, copied in mid-fit, in TorchScript."""

import copy
import io
import pickle

import lightning as L
import pytest
import torch
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
    snapshot,
)
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionMonitor, PrecisionPolicy
from lightning_mixprec.given import Given, widen_buffers_
from lightning_mixprec.state_hooks import leftovers

PRECISIONS = ["fp32", "bf16", "fp16"]


class Module(TinyModule):
    def __init__(self, net, make_optimizer=None):
        super().__init__(make_optimizer)
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().square().mean()


def fit(plugin, module, batches=None, **kwargs):
    generator = torch.Generator().manual_seed(0)
    batches = batches or [torch.randn(4, 4, generator=generator) for _ in range(4)]
    trainer = make_trainer(plugin, **kwargs)
    trainer.fit(module, loader(batches))
    return trainer


def sgd(lr):
    return lambda params: torch.optim.SGD([param for param in params if param.requires_grad], lr=lr)


# Copies and pickles made in mid-fit


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module)), "torch.save": saved}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rung", ["fp32", "split24"])
def test_a_copy_made_in_mid_fit_trains_on_as_a_plain_fp32_module(way, rung):
    """Its weights are the masters, nothing stands behind them, and its state dict is what they are."""
    kept = {}

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                kept["net"] = WAYS[way](pl_module.net)
                kept["state"] = snapshot(pl_module.net)

    given = make_module()
    given.net.norm.half().requires_grad_(False)
    given.make_optimizer = sgd(1e-3)
    fit(MasterWeightPrecision("bf16", masters=rung), given, make_batches(4), callbacks=Copies())
    assert_same(snapshot(kept["net"]), kept["state"])
    assert {param.dtype for param in kept["net"].parameters()} == {torch.float32}
    assert not any(hooks.live for hooks in leftovers(kept["net"]))
    for plugin in (lambda: None, lambda: MasterWeightPrecision("bf16")):
        module, plain = make_module(), make_module()
        module.net = copy.deepcopy(kept["net"])
        plain.net.norm.half().requires_grad_(False)
        plain.net.load_state_dict(kept["state"])
        if plugin() is None:
            plain.net.norm.float()
        for each in (module, plain):
            each.make_optimizer = sgd(1e-3)
            fit(plugin(), each, make_batches(3))
        after = dict(plain.net.named_parameters())
        for name, param in module.net.named_parameters():
            before = kept["state"][name].float()
            assert torch.equal(after[name], before) == name.startswith("norm")
            assert param.dtype == after[name].dtype
            if plugin() is not None:
                assert torch.equal(param, after[name]), name
            else:  # a copy computes as its original did, in bf16 where that did
                torch.testing.assert_close(param - before, after[name] - before, rtol=0.2, atol=2e-6)
        if plugin() is not None:
            assert not list(leftovers(module))
            assert_same(snapshot(module.net), {name: param.detach() for name, param in module.net.named_parameters()})


def test_a_module_that_another_trainer_is_training_is_refused():
    errors = []

    class Nested(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            inner = Module(pl_module.net.proj)
            with pytest.raises(ValueError, match=r"Module, or a part of it, is being trained.*copy.deepcopy") as error:
                fit(MasterWeightPrecision("bf16"), inner, [torch.ones(2, 8)])
            errors.append(error)

    module, plain = make_module(), make_module()
    fit(MasterWeightPrecision("bf16"), module, make_batches(2), callbacks=Nested())
    fit(MasterWeightPrecision("bf16"), plain, make_batches(2))
    assert len(errors) == 2
    assert_same(snapshot(module), snapshot(plain))


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_plugin_that_is_at_work_in_another_trainer_is_refused(run):
    """It would leave the outer fit, which then ended with an error that named neither."""

    class Nested(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            inner = make_trainer(trainer.precision_plugin)
            getattr(inner, run)(make_module(), loader(make_batches(1)))

    plugin = MasterWeightPrecision("bf16")
    module = make_module()
    with pytest.raises(
        MisconfigurationException, match=r"another Trainer, whose fit of TinyModule goes on.*of its own"
    ):
        fit(plugin, module, make_batches(2), callbacks=Nested(), max_epochs=2)
    again, plain = make_module(), make_module()
    fit(plugin, again, make_batches(2))  # which is over by now
    fit(MasterWeightPrecision("bf16"), plain, make_batches(2))
    assert_same(snapshot(again), snapshot(plain))


# Given in 16 bits


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_module_given_in_half_trains_in_fp32_as_if_it_had_been_widened(half):
    """The fp32 mode is no exception: updates that 16 bits do not hold reach the weights."""
    module, plain = make_module(), make_module()
    for each, dtype in ((module, HALF[half]), (plain, torch.float32)):
        each.net.to(HALF[half]).to(dtype)
        each.make_optimizer = sgd(1e-5)
    before = snapshot(plain)
    fit(MasterWeightPrecision("fp32"), module, make_batches(3))
    fit(None, plain, make_batches(3))
    assert not torch.equal(before["net.proj.weight"], plain.net.proj.weight)
    assert_same(snapshot(module), snapshot(plain))
    assert {param.dtype for param in module.parameters()} == {torch.float32}


def test_in_fp32_what_is_frozen_in_half_stays_so_until_it_trains():
    class Unfreezes(Module):
        def training_step(self, batch, batch_idx):
            self.net[1].requires_grad_(batch_idx > 1)
            return self.net[1](self.net[0](batch).bfloat16()).float().square().mean()

    layers = [nn.Linear(4, 4), nn.Linear(4, 2).bfloat16(), nn.Sequential(nn.BatchNorm1d(2)).bfloat16()]
    net = nn.Sequential(*layers)
    net[1:].requires_grad_(False)
    before = net[1].weight.detach().clone()
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(pl_module.state_dict()["net.1.weight"].clone())

    module = Unfreezes(net, lambda params: torch.optim.SGD(params, lr=1e-5))
    fit(MasterWeightPrecision("fp32"), module, callbacks=Look())
    assert all(torch.equal(each, before) and each.dtype == torch.bfloat16 for each in seen[:2])
    for step, last in ((seen[2], before.float()), (seen[3], seen[2])):
        assert step.dtype == torch.float32
        assert not torch.equal(step, last)
    assert torch.equal(net[1].weight, seen[3])
    assert {value.dtype for name, value in net[2].state_dict().items() if "num" not in name} == {torch.bfloat16}


KINDS = {
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "batch_norm_plain": lambda: nn.BatchNorm1d(4, affine=False),
    **{f"{make.__module__.split('.')[-1]}_{make.__name__}": lambda m=make: m(nn.Linear(4, 4))
       for make in REPARAMETRISATIONS},
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*")
def test_statistics_given_in_half_are_fp32_with_their_parameters(kind, precision):
    """Bit for bit as if the module had been widened before; after fit it runs in plain fp32."""
    nets = []
    for dtype in (HALF["bf16"], torch.float32):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(4, 4), KINDS[kind](), nn.Linear(4, 2)).bfloat16().to(dtype))
        torch.manual_seed(0)
        fit(MasterWeightPrecision(precision), Module(nets[-1], sgd(0.1)))
        nets[-1](torch.ones(2, 4))
    assert_same(snapshot(nets[0]), snapshot(nets[1]))
    assert {value.dtype for value in nets[0].state_dict().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("kind", ["batch_norm", "batch_norm_plain", "spectral_norm_spectral_norm"])
def test_statistics_of_a_frozen_network_go_back_to_the_dtype_given(kind, tracks):
    """With what was written to them, if the network was in training mode; bit for bit as given, if not."""

    class Taught(Module):
        def __init__(self, teacher):
            super().__init__(nn.Linear(4, 4), sgd(0.1))
            self.teacher = teacher

        def training_step(self, batch, batch_idx):
            return (self.net(batch) - self.teacher(batch)).float().square().mean()

    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(snapshot(pl_module.teacher))

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4), KINDS[kind]()).requires_grad_(False).half().train(tracks)
    wide, before = copy.deepcopy(teacher).float(), snapshot(teacher)
    fit(MasterWeightPrecision("bf16"), Taught(teacher), callbacks=Look())
    fit(MasterWeightPrecision("bf16"), Taught(wide))
    assert {value.dtype for value in seen[-1].values()} <= {torch.float16, torch.int64}
    assert_same(seen[-1], snapshot(teacher))
    for name, value in snapshot(teacher).items():
        assert value.dtype == before[name].dtype
        if not tracks:
            assert torch.equal(value, before[name])
        torch.testing.assert_close(value.float(), wide.state_dict()[name].float(), rtol=2e-2, atol=2e-2)
    if tracks:
        assert any(not torch.equal(value, before[name]) for name, value in snapshot(teacher).items())


def test_statistics_go_back_to_the_dtype_given_from_another_device():
    """Where `Module.to` puts other tensors in the place of buffers: before the fit, and after it."""
    norm = nn.BatchNorm1d(2).half().requires_grad_(False)
    norm.running_mean.fill_(0.1)
    before, given = snapshot(norm), Given()
    widen_buffers_(norm, given, lambda *_: True)
    norm._apply(torch.clone)
    assert norm.running_mean.dtype == torch.float32
    assert given.shown(norm.running_mean).dtype == torch.float16
    assert [dtype for _, dtype, _ in given.entries([norm.running_var])] == [torch.float16]
    norm._apply(torch.clone)
    given.restore_()
    assert_same(snapshot(norm), before)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_what_is_written_into_a_frozen_half_teacher_stays(half, tmp_path):
    """An average of weights kept in the module: its norms compute in fp32, and are what was written, rounded once."""

    class Taught(Module):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), sgd(0.1))
            self.teacher = copy.deepcopy(self.net).to(HALF[half]).requires_grad_(False)

        @torch.no_grad()
        def on_train_batch_end(self, outputs, batch, batch_idx):
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.5).add_(other * 0.5)
            self.live = [param.detach().clone() for param in self.teacher.parameters()]
            self.trainer.save_checkpoint(tmp_path / "mid.ckpt")

    torch.manual_seed(0)
    module = Taught()
    before = snapshot(module.teacher)
    fit(MasterWeightPrecision("bf16"), module)
    state = torch.load(tmp_path / "mid.ckpt")["state_dict"]
    for (name, param), live in zip(module.teacher.named_parameters(), module.live, strict=True):
        assert param.dtype == HALF[half]
        assert torch.equal(param, live.to(HALF[half])), name
        assert torch.equal(state[f"teacher.{name}"], param), name
        assert not torch.equal(param, before[name]), name


# TorchScript


class Scored(Module):
    def __init__(self, scorer, net=None):
        super().__init__(net or nn.Linear(4, 4), sgd(0.1))
        self.scorer = scorer

    def training_step(self, batch, batch_idx):
        scorer = self.scorer["conv_out"] if isinstance(self.scorer, nn.ModuleDict) else self.scorer
        return self.net(batch).float().square().mean() + scorer(self.net(batch).float()).float().square().mean()


def script(trains):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(trains)
    return torch.jit.script(net)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated.*")
def test_a_network_in_torchscript_is_left_as_it_is(trains, nested):
    """LPIPS, Inception: beside the model or deep in it, by a name that means fp32, watched, and past an overflow."""

    def run(plugin, **kwargs):
        scorer = script(trains)
        torch.manual_seed(0)
        module = Scored(nn.ModuleDict({"conv_out": scorer}) if nested else scorer)
        fit(plugin, module, [torch.ones(4, 4), torch.full((4, 4), torch.inf), *[torch.ones(4, 4)] * 2], **kwargs)
        return snapshot(module)

    plugin = MasterWeightPrecision("bf16", fallback="auto")
    mixed, plain = run(plugin, callbacks=[PrecisionMonitor()]), run(MasterWeightPrecision("fp32"))
    assert plugin.skipped_steps == 1
    for name, value in mixed.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain[name], rtol=2e-2, atol=2e-2)
        if "scorer" in name:
            at_first = script(trains).state_dict()[name.rpartition("conv_out.")[2].removeprefix("scorer.")]
            assert torch.equal(value, at_first) != trains


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated.*")
def test_what_cannot_be_right_in_torchscript_is_refused_by_name():
    for precision in PRECISIONS:
        with pytest.raises(ValueError, match=r"'scorer.0.weight' trains in torch.float16 inside TorchScript.*Freeze"):
            fit(MasterWeightPrecision(precision, DynamicLossScaler()), Scored(script(True).half()))
    with pytest.raises(TypeError, match=r"TorchScript.*take the layer out of the fp32 entries"):
        fit(MasterWeightPrecision(PrecisionPolicy("bf16", fp32=["scorer"])), Scored(script(False)))
