"""Averages of master weights and what the monitor logs, against hand-computed values."""

import re
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import TinyModule, assert_same, loader, make_batches, make_module, make_trainer, snapshot
from torch import nn

from lightning_mixprec import MasterWeightAveraging, MasterWeightPrecision

PRECISIONS = ["fp32", "bf16", "fp16", "bf16-split"]


class Constant(TinyModule):
    """One weight: 1 when its average begins, then `value`."""

    def __init__(self, value, dtype=torch.float32):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        self.value, self.given_in = value, dtype
        nn.init.ones_(self.net.weight)

    def on_train_start(self):
        self.net.load_state_dict({"weight": torch.tensor([[self.value]])})

    def training_step(self, batch, _):
        return self.net(batch.to(self.given_in)).float().sum() * 0


def make_plugin(precision):
    compute, _, masters = precision.partition("-")
    return MasterWeightPrecision(compute, masters=masters or "fp32")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-split", "bf16-split24"])
def test_average_moves_where_a_half_average_would_not(precision):
    """T57: 1000 updates from 1.0 towards weights of 1.1 at decay 0.999 give 1.06323."""

    ema = MasterWeightAveraging(decay=0.999)
    trainer = make_trainer(make_plugin(precision), callbacks=ema)
    trainer.fit(Constant(1.1), loader([torch.ones(1, 1)] * 1000))
    average = ema.averages["net.weight"]
    assert average.dtype == torch.float32
    assert abs(average.item() - 1.06323) < 1e-4
    assert ema.n_averaged == 1000


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("avg_fn", [None, lambda average, weight, n: average + (weight - average) / (n + 1)])
def test_average_follows_the_masters_on_real_steps_only(precision, avg_fn):
    """T58: two of six batches overflow, so four updates."""
    weights = []

    class Masters(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            weights.append(snapshot(pl_module))

    ema = MasterWeightAveraging(decay=0.9, avg_fn=avg_fn)
    module = make_module(bad={0, 3})
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(make_plugin(precision), callbacks=[ema, Masters()]).fit(module, loader(make_batches(6)))
    for n, index in enumerate((1, 2, 4, 5)):
        for name, value in weights[index].items():
            new = expected[name].lerp(value, 0.1) if avg_fn is None else avg_fn(expected[name], value, n)
            expected[name] = new
    assert ema.n_averaged == 4
    assert_same(ema.averages, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("saver_first", [False, True])
def test_validation_uses_the_average_and_checkpoints_label_both_right(precision, saver_first, tmp_path):
    """T60: also when a callback saves while the average is in place."""
    ema = MasterWeightAveraging(decay=0.5)

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.raw, self.averaged = snapshot(pl_module), {k: v.clone() for k, v in ema.averages.items()}

        def on_validation_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "mid.ckpt")

    class Validates(TinyModule):
        def validation_step(self, batch, _):
            self.used = snapshot(self)

    torch.manual_seed(0)
    module, saves = Validates(), Saves()
    callbacks = [saves, ema] if saver_first else [ema, saves]
    # In either order the average is updated before `saves` looks: Lightning calls it first if it comes first.
    trainer = make_trainer(make_plugin(precision), callbacks=callbacks, num_sanity_val_steps=0)
    trainer.fit(module, loader(make_batches(4)), loader(make_batches(1)))
    checkpoint = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], saves.raw)
    assert_same(checkpoint["averaged_state_dict"], ema.averages)
    assert_same(module.used, ema.averages)
    assert_same(snapshot(module), saves.raw)


@pytest.mark.parametrize("precision", ["bf16-split24", "bf16-none"])
def test_validation_loses_nothing_on_rungs_that_round(precision):
    """The average in its place is rounded for the forward; raw weights and average come back bit for bit."""

    class Watches(TinyModule):
        def on_validation_start(self):
            self.before = (snapshot(self), {k: v.clone() for k, v in ema.averages.items()})

        def on_validation_end(self):
            self.after = (snapshot(self), {k: v.clone() for k, v in ema.averages.items()})

    ema = MasterWeightAveraging(decay=0.5)
    torch.manual_seed(0)
    module = Watches()
    trainer = make_trainer(make_plugin(precision), callbacks=ema, num_sanity_val_steps=0)
    trainer.fit(module, loader(make_batches(3)), loader(make_batches(1)))
    assert_same(module.before[0], module.after[0])
    assert_same(module.before[1], module.after[1])


def test_interrupted_validation_puts_the_weights_back():
    class Fails(TinyModule):
        def validation_step(self, batch, _):
            raise RuntimeError("on purpose")

        def on_train_batch_end(self, *_):
            self.raw = snapshot(self)

    torch.manual_seed(0)
    module = Fails()
    trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=MasterWeightAveraging(0.5), num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, loader(make_batches(2)), loader(make_batches(1)))
    assert_same(snapshot(module), module.raw)


def test_frozen_parameters_and_integer_buffers_have_no_average():
    """T61, T99."""

    class Mixed(TinyModule):
        def __init__(self):
            super().__init__()
            self.net.conv_in.requires_grad_(False)
            self.register_buffer("steps", torch.tensor(3))

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    ema = MasterWeightAveraging(0.9)
    make_trainer(MasterWeightPrecision("bf16"), callbacks=ema).fit(Mixed(), loader(make_batches(3)))
    assert "net.conv_in.weight" not in ema.averages
    assert "steps" not in ema.averages
    assert ema.n_averaged == 3


def test_average_can_be_put_in_place_for_a_while():
    ema = MasterWeightAveraging(0.5)
    module = make_module()
    make_trainer(MasterWeightPrecision("bf16"), callbacks=ema).fit(module, loader(make_batches(3)))
    raw, averages = snapshot(module), {k: v.clone() for k, v in ema.averages.items()}
    with ema.averaged_weights(module):
        assert_same(snapshot(module), averages)
    assert_same(snapshot(module), raw)
    assert not torch.equal(raw["net.proj.weight"], averages["net.proj.weight"])


@pytest.mark.parametrize("decay", [0, 1, -0.1, 1.5])
def test_bad_decay_is_named(decay):
    with pytest.raises(ValueError, match=f"decay={decay}"):
        MasterWeightAveraging(decay=decay)


# Averages in odd company


@pytest.mark.parametrize("precision", ["bf16", "bf16-split"])
def test_a_validation_inside_averaged_weights_leaves_the_weights_alone(precision):
    """The average is in place until the context is left, and then the raw weights are."""
    ema, module = MasterWeightAveraging(0.5), make_module()
    trainer = make_trainer(make_plugin(precision), callbacks=ema)
    trainer.fit(module, loader(make_batches(4)))
    raw = snapshot(module)
    with ema.averaged_weights(module):
        trainer.validate(module, loader(make_batches(1)), verbose=False)
        assert_same({name: snapshot(module)[name] for name in ema.averages}, ema.averages)
        with ema.averaged_weights(module):
            pass
        assert_same({name: snapshot(module)[name] for name in ema.averages}, ema.averages)
    assert_same(snapshot(module), raw)


def test_two_averages_are_refused_with_the_way_to_have_both():
    class Slow(MasterWeightAveraging):
        pass

    trainer = make_trainer(make_plugin("bf16"), callbacks=[MasterWeightAveraging(), Slow(0.9)])
    with pytest.raises(MisconfigurationException, match=r"MasterWeightAveraging and Slow.*profiles="):
        trainer.fit(make_module(), loader(make_batches(1)))


@pytest.mark.parametrize("averages", [True, False])
def test_a_stock_averages_checkpoint_goes_on_from_the_raw_weights(averages, tmp_path):
    """Stock's `state_dict` is the average, with the raw weights beside it."""

    class Stock(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.raw = snapshot(pl_module)
            trainer.save_checkpoint(tmp_path / "stock.ckpt")

    class Start(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.raw = snapshot(pl_module)
            self.averages = {name: value.clone() for name, value in ema.averages.items()}
            self.count = ema.n_averaged

    stock, start, ema = Stock(), Start(), MasterWeightAveraging(0.5)
    make_trainer(None, callbacks=[EMAWeightAveraging(decay=0.5), stock]).fit(make_module(), loader(make_batches(4)))
    average = torch.load(tmp_path / "stock.ckpt", weights_only=True)["state_dict"]
    trainer = make_trainer(make_plugin("bf16"), max_epochs=2, callbacks=[start, *([ema] if averages else [])])
    trainer.fit(make_module(seed=1), loader(make_batches(4)), ckpt_path=tmp_path / "stock.ckpt")
    assert_same(start.raw, stock.raw)
    if averages:
        assert_same(start.averages, average)
        assert start.count == 4
        assert ema.n_averaged == 8


def test_the_average_of_stock_half_weights_is_fp32_and_moves():
    """T57 beside `precision="bf16-true"`."""

    ema = MasterWeightAveraging(decay=0.999)
    make_trainer(HalfPrecision("bf16-true"), callbacks=ema).fit(
        Constant(1.125, torch.bfloat16), loader([torch.ones(1, 1)] * 200)
    )
    assert ema.averages["net.weight"].dtype == torch.float32
    assert abs(ema.averages["net.weight"].item() - (1.125 - 0.125 * 0.999**200)) < 1e-5


def test_averages_of_double_weights_stay_double_over_a_resume(tmp_path):
    class Double(TinyModule):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.scale.float()

    averages = []
    for epochs, path in ((2, None), (1, None), (2, tmp_path / "1.ckpt")):
        torch.manual_seed(0)
        ema = MasterWeightAveraging(0.9)
        trainer = make_trainer(make_plugin("fp32"), max_epochs=epochs, callbacks=ema)
        trainer.fit(Double(), loader(make_batches(3)), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        averages.append(ema.averages)
    assert averages[0]["scale"].dtype == torch.float64
    assert_same(averages[0], averages[2])


def test_a_file_without_the_average_is_announced(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = make_trainer(make_plugin("bf16"), callbacks=[MasterWeightAveraging(), saver], enable_checkpointing=True)
    with pytest.warns(UserWarning, match=r"save_weights_only=True\) saves the raw weights alone"):
        trainer.fit(make_module(), loader(make_batches(1)))


def test_no_average_is_written_where_there_is_none(tmp_path):
    trainer = make_trainer(make_plugin("bf16"))
    trainer.fit(make_module(), loader(make_batches(1)))
    trainer.callbacks.append(MasterWeightAveraging())
    with pytest.warns(UserWarning, match="There are no averages here"):
        trainer.save_checkpoint(tmp_path / "none.ckpt")
    assert "averaged_state_dict" not in torch.load(tmp_path / "none.ckpt", weights_only=True)


@pytest.mark.parametrize("precision", ["bf16", "bf16-split", "fp16"])
def test_a_search_for_the_learning_rate_says_nothing_and_leaves_no_trace_in_averages(precision, tmp_path):
    """It saves a checkpoint when there are no averages yet, trains, and loads it."""

    def fit(*callbacks):
        module, ema = make_module(), MasterWeightAveraging(0.9)
        trainer = make_trainer(make_plugin(precision), callbacks=[*callbacks, ema], default_root_dir=tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader(make_batches(6)))
        assert not [each for each in caught if "averages" in str(each.message)]
        return {**snapshot(module), **{f"average of {name}": value for name, value in ema.averages.items()}}

    torch.manual_seed(1)
    plain = fit()
    torch.manual_seed(1)
    assert_same(plain, fit(LearningRateFinder(num_training_steps=4, update_attr=False)))


@pytest.mark.parametrize("other", [EMAWeightAveraging(decay=0.9), type("Slow", (MasterWeightAveraging,), {})(0.9)])
def test_two_averages_are_refused_beside_stock_precision_too(other):
    trainer = make_trainer(None, callbacks=[MasterWeightAveraging(), other])
    with pytest.raises(MisconfigurationException, match=rf"{type(other).__name__}.*profiles="):
        trainer.fit(make_module(), loader(make_batches(1)))


def test_a_file_without_the_average_is_announced_beside_stock_precision_too(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = make_trainer(None, callbacks=[MasterWeightAveraging(), saver], enable_checkpointing=True)
    with pytest.warns(UserWarning, match=r"save_weights_only=True\) saves the raw weights alone"):
        trainer.fit(make_module(), loader(make_batches(1)))


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_stock_averages_checkpoint_is_validated_as_stock_does(precision, averages, tmp_path):
    """With its `state_dict`, which is the average: the raw weights are for going on with training."""

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "stock.ckpt")

    class See(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            self.seen = snapshot(pl_module)

    make_trainer(None, callbacks=[EMAWeightAveraging(decay=0.5), Save()]).fit(make_module(), loader(make_batches(4)))
    saved, see = torch.load(tmp_path / "stock.ckpt", weights_only=True), See()
    trainer = make_trainer(
        make_plugin(precision) if precision else None, callbacks=[see, *[MasterWeightAveraging()] * averages]
    )
    trainer.validate(make_module(seed=1), loader(make_batches(1)), ckpt_path=tmp_path / "stock.ckpt", verbose=False)
    assert_same(see.seen, saved["state_dict"])
    assert not torch.equal(see.seen["net.proj.weight"], saved["current_model_state"]["net.proj.weight"])


class Shadow:
    """As diffusers' `EMAModel` keeps it."""

    def __init__(self, params):
        self.shadow_params = [param.detach().clone() for param in params]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Shadow, "shadow averages what it reads.* and keeps it so"),
        (lambda params: Shadow([param.float() for param in params]), "shadow averages what it reads.* training. Use"),
        (lambda params: [param.detach().clone() for param in params], "and keeps it so"),
        (lambda params: {str(i): param.detach().clone() for i, param in enumerate(params)}, "and keeps it so"),
        (lambda params: [param.detach().float() for param in params], None),
        (list, None),
        (lambda params: [torch.zeros(3, 5, dtype=torch.bfloat16)], None),
    ],
)
@pytest.mark.parametrize("place", ["module", "callback"])
@pytest.mark.parametrize("when", ["on_fit_start", "on_train_batch_end"])
def test_averages_of_half_weights_kept_beside_the_modules_are_announced(keep, expected, place, when, caplog):
    """Made in a hook, when weights are 16-bit; what is fp32, or the weights themselves, is nobody's business."""

    class Keeps(L.Callback):
        pass

    def hook(self, trainer, pl_module, *_):
        owner = pl_module if place == "module" else self
        if not hasattr(owner, "shadow"):
            owner.shadow = keep([pl_module.net.proj.weight, pl_module.net.proj.bias])

    setattr(Keeps, when, hook)
    make_trainer(make_plugin("bf16"), callbacks=Keeps()).fit(make_module(), loader(make_batches(3)))
    found = [record.getMessage() for record in caplog.records if "averages what it reads" in record.getMessage()]
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


def test_the_average_of_diffusers_is_one_of_these():
    """What is recognised is its attribute `shadow_params`."""
    training_utils = pytest.importorskip("diffusers.training_utils")
    assert "shadow_params" in vars(training_utils.EMAModel(nn.Linear(1, 1).parameters()))
