"""What research code puts through a network beside dense tensors: transforms, sparse, nested, complex, empty ones."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from reference import loader, make_trainer
from torch import nn

from lightning_mixprec import MasterWeightAveraging, MasterWeightPrecision, PrecisionMonitor, PrecisionPolicy
from lightning_mixprec.float8 import Products, swap_linear_
from lightning_mixprec.profiles import PowerFunction

HALVES = ["bf16", "fp16"]


class Module(L.LightningModule):
    """`loss(net, batch)`, infinite in the batches of `bad`."""

    def __init__(self, net, loss, bad=(), optimizer=None) -> None:
        super().__init__()
        self.net, self.loss, self.bad = net, loss, bad
        self.optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        return loss * float("inf") if batch_idx in self.bad else loss

    def validation_step(self, batch, batch_idx):
        self.net(batch)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8), *more)


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    return loader([torch.randn(4, 8, generator=generator) for _ in range(count)])


def tangent(model, x):
    value, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return (value - along.detach()).float().square().mean()


def gradient_of_input(model, x):
    return torch.func.grad(lambda x: model(x).float().square().sum())(x).float().square().mean()


def mapped(model, x):
    return torch.func.vmap(model)(x).float().square().mean()


def for_each_sample(model, x):
    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).float().square().mean()

    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    return model(x).float().square().mean() + 0 * sum(grad.float().sum() for grad in grads.values())


def dual(model, x):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return y.float().square().mean()


TRANSFORMS = [tangent, gradient_of_input, mapped, for_each_sample, dual]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("precision", HALVES)
def test_function_transforms_train_and_survive_an_overflow(tmp_path, precision, transform):
    """MeanFlow and consistency models differentiate forward. Losses are those of fp32; a bad batch is one skip."""
    losses = {}
    for name in ("fp32", precision):
        model = net()
        plugin = MasterWeightPrecision(name)
        monitor = PrecisionMonitor(layers_every_n_steps=1)
        trainer = make_trainer(plugin, callbacks=[monitor], logger=CSVLogger(tmp_path / name), log_every_n_steps=1)
        trainer.fit(Module(model, transform, bad=(1,)), batches(8))
        assert (plugin.skipped_steps, plugin.real_steps) == (1, 7)
        losses[name] = float(transform(model, torch.ones(2, 8)))
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.1, abs=1e-3)


class ToSparse(nn.Module):
    def forward(self, x):
        return x.to_sparse()


class ToNested(nn.Module):
    def forward(self, x):
        return torch.nested.as_nested_tensor([x[:1], x[1:]])


@pytest.mark.parametrize(
    ("last", "dense"),
    [(ToSparse, torch.Tensor.to_dense), (ToNested, lambda y: torch.nested.to_padded_tensor(y, 0.0))],
    ids=["sparse", "nested"],
)
@pytest.mark.parametrize("precision", HALVES)
def test_sparse_and_nested_results_of_layers(tmp_path, precision, last, dense):
    plugin = MasterWeightPrecision(precision)
    monitor = PrecisionMonitor(layers_every_n_steps=1)
    module = Module(net(last()), lambda model, x: dense(model(x)).float().square().mean(), bad=(1,))
    make_trainer(plugin, callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(module, batches())
    assert (plugin.skipped_steps, plugin.real_steps) == (1, 3)


@pytest.mark.parametrize("precision", HALVES)
def test_sparse_gradients_overflow_once(precision):
    model = nn.Embedding(8, 8, sparse=True)
    module = Module(
        model, lambda model, x: model(x).square().mean(), (1,), lambda params: torch.optim.SparseAdam(list(params))
    )
    plugin = MasterWeightPrecision(PrecisionPolicy(precision, fp32=["net"]))
    make_trainer(plugin).fit(module, loader([torch.arange(4)] * 4))
    assert (plugin.skipped_steps, plugin.real_steps) == (1, 3)
    assert plugin.overflowed_parameters == ["net.weight"]


@pytest.mark.parametrize("precision", ["fp32", *HALVES])
def test_complex_parameters_stay_as_they_are_and_train(precision):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x.float()) * self.scale, n=8)

    module = Module(net(Spectral()), lambda model, x: model(x).float().square().mean(), bad=(1,))
    plugin = MasterWeightPrecision(PrecisionPolicy(precision, fp32=["*.scale"]))
    make_trainer(plugin).fit(module, batches())
    assert (plugin.skipped_steps, plugin.real_steps) == (1, 3)
    scale = module.net[4].scale
    assert scale.dtype == torch.complex64
    assert not torch.equal(scale, torch.ones_like(scale))


def test_an_empty_batch_has_gradients_of_zero():
    model = net()
    module = Module(model, lambda model, x: model(x).float().sum())
    make_trainer(MasterWeightPrecision("bf16")).fit(module, loader([torch.empty(0, 8)]))
    for name, value in net().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_fp8_refuses_inputs_of_another_width():
    layer = swap_linear_(nn.Linear(32, 32, bias=False), "cpu", torch.bfloat16, Products.of("tensorwise", emulate=True))
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.randn(4, 8, 64))


# Averages, hooks and rates


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def test_tied_weights_have_their_average_under_all_names(tmp_path):
    class Save(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "inside.ckpt")

    torch.manual_seed(0)
    module = Module(Tied(), lambda model, x: model(x).float().square().mean())
    average = MasterWeightAveraging(decay=0.5)
    trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=[Save(), average], num_sanity_val_steps=0)
    trainer.fit(module, batches(), batches(1))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt")
    for name in ("net.a.weight", "net.b.weight"):
        assert torch.equal(saved["averaged_state_dict"][name], average.averages["net.a.weight"])
        assert torch.equal(torch.load(tmp_path / "inside.ckpt")["state_dict"][name], module.net.a.weight)
    assert not torch.equal(average.averages["net.a.weight"], module.net.a.weight)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_averages_of_layers_that_are_frozen_when_a_run_goes_on(tmp_path, frozen_first):
    class Freeze(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net[0].requires_grad_((trainer.current_epoch >= 1) == frozen_first)

    def run(epochs, path=None):
        model = net()
        model[0].requires_grad_(not frozen_first and path is None)
        module = Module(model, lambda model, x: model(x).float().square().mean())
        average = MasterWeightAveraging(decay=0.9)
        trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=[Freeze(), average], max_epochs=epochs)
        trainer.fit(module, batches(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return average.averages

    whole = run(4)
    run(2)
    resumed = run(4, tmp_path / "2.ckpt")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_trial_run_deletes_no_snapshots_and_each_run_has_its_own(tmp_path):
    def run(root, average, **arguments):
        module = Module(net(), lambda model, x: model(x).float().square().mean())
        make_trainer(MasterWeightPrecision("bf16"), callbacks=[average], default_root_dir=root, **arguments).fit(
            module, batches()
        )
        return sorted(path.name for path in root.rglob("snapshots/*"))

    def make():
        return MasterWeightAveraging(profiles={"b": PowerFunction(0.1)}, snapshot_every=2)

    average = make()
    first = run(tmp_path / "one", average)
    assert len(first) == 2
    assert run(tmp_path / "one", make(), fast_dev_run=True) == first
    assert run(tmp_path / "two", average) == first
    assert sorted(path.name for path in (tmp_path / "one").rglob("snapshots/*")) == first


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_hook_of_the_monitor_stays_after_an_exception(tmp_path, error):
    def fail(model, x):
        model(x)
        raise error

    module = Module(net(), fail)
    watched = {"callbacks": [PrecisionMonitor()], "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    trainer = make_trainer(MasterWeightPrecision("bf16"), **watched)
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, batches())
    assert not any(layer._forward_hooks for layer in module.modules())


def test_rate_of_skips_counts_updates_however_many_batches_they_take(tmp_path):
    module = Module(net(), lambda model, x: model(x).float().square().mean() * float("inf"))
    monitor = PrecisionMonitor()
    trainer = make_trainer(
        MasterWeightPrecision("bf16"), callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1,
        accumulate_grad_batches=4,
    )  # fmt: skip
    trainer.fit(module, batches(16))
    assert list(monitor._recent) == [True] * 4
