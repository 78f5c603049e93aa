"""Schedules, and counts of steps, where steps are skipped: after n real steps they are where n steps bring them."""

import copy
import math
import pickle

import lightning as L
import pytest
import torch
from reference import Resumable, SaveAfter, TinyModule, loader, make_module, make_trainer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, NonFiniteGradientsError

# Batches an epoch, frequency, batches a step: no multiples of each other, a frequency beyond the epoch, and multiples.
COUNTS = [(6, 2, 1), (5, 2, 1), (7, 3, 2), (8, 4, 3), (4, 6, 1), (9, 1, 2)]


def halving(optimizer):
    return StepLR(optimizer, 1, 0.5)


class Line(L.LightningModule):
    """One linear layer whose loss overflows in the batches `bad`, counted over epochs; `rates` are of real steps."""

    def __init__(self, bad=(), schedule=halving, **config):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.bad, self.schedule, self.config = set(bad), schedule, {"interval": "step", **config}
        self.rates, self.batches = [], 0

    def loss(self, batch):
        self.batches += 1
        loss = self.net(batch).float().pow(2).mean()
        return loss * math.inf if self.batches - 1 in self.bad else loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": self.schedule(optimizer), **self.config}]


def data(count):
    return loader(torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(0)))


def train(module, count, precision="bf16", **options):
    """With the plugin, or as stock Lightning does."""
    if precision == "stock":
        trainer = make_trainer(precision="32-true", **options)
    else:
        scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
        trainer = make_trainer(MasterWeightPrecision(precision, scaler=scaler), **options)
    trainer.fit(module, data(count))
    return trainer


@pytest.mark.parametrize("bad", [(), (0,), (1, 3), (5, 6, 7, 8), range(0, 20, 2)], ids=lambda bad: f"bad{list(bad)}")
@pytest.mark.parametrize(("count", "frequency", "accumulate"), COUNTS)
def test_real_steps_have_the_rates_of_stock_steps(count, frequency, accumulate, bad):
    """T53, a schedule's frequency: over epochs and windows of any length, and whichever batches are skipped."""
    options = {"max_epochs": 4, "accumulate_grad_batches": accumulate}
    stock = Line(frequency=frequency)
    train(stock, count, "stock", **options)
    module = Line(bad, frequency=frequency)
    trainer = train(module, count, **options)
    epochs = [range(epoch * count, (epoch + 1) * count) for epoch in range(4)]
    steps = [epoch[start : start + accumulate] for epoch in epochs for start in range(0, count, accumulate)]
    real = sum(not set(step) & set(bad) for step in steps)
    assert len(stock.rates) == len(steps)
    assert module.rates == stock.rates[:real]
    assert trainer.global_step == real


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [(1, 3, 5, 7, 9, 11), (0,), (0, 2, 4)])
def test_a_schedule_of_frequency_two_advances_after_every_second_real_step(bad, precision):
    """Lightning asks in every second batch, and where these are the skipped ones a veto would stop it for good."""
    module = Line(bad, frequency=2)
    trainer = train(module, 12, precision)
    real = 12 - len(bad)
    assert module.rates == [0.5 ** (step // 2) for step in range(real)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == real // 2


def test_skipped_steps_that_count_advance_a_schedule_of_frequency_two_as_in_stock():
    module = Line((1, 3), frequency=2)
    trainer = make_trainer(MasterWeightPrecision("bf16", count_skipped_steps=True))
    trainer.fit(module, data(8))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert module.rates == [1, 0.5, 0.25, 0.25, 0.125, 0.125]  # batches 0, 2, 4, 5, 6, 7


def test_a_plateau_waits_for_its_metric_as_long_as_its_frequency_says():
    """Before the first validation Lightning would refuse the missing metric, if it were asked for it."""

    class Validated(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val", 1.0)

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    rates = {}
    for bad in ((), (2, 3)):
        module = Validated(bad, plateau, frequency=3, monitor="val")
        trainer = make_trainer(MasterWeightPrecision("bf16"), val_check_interval=3, num_sanity_val_steps=0)
        trainer.fit(module, data(12), data(1))
        rates[bad] = module.rates
    assert rates[()] == [1] * 6 + [0.5] * 3 + [0.25] * 3  # the first value is the best
    assert rates[2, 3] == rates[()][:10]


def test_several_schedules_of_one_optimizer_keep_their_own_time():
    class Two(Line):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            fast, slow = LambdaLR(optimizer, lambda k: 1.0), StepLR(optimizer, 1, 0.5)
            epochs = StepLR(optimizer, 1, 1.0)
            self.schedules = fast, slow, epochs
            steps = [{"scheduler": each, "interval": "step", "frequency": f} for each, f in ((fast, 1), (slow, 3))]
            return [optimizer], [*steps, {"scheduler": epochs, "frequency": 2}]

    module = Two((0, 3))
    train(module, 5, max_epochs=2)
    assert [each.last_epoch for each in module.schedules] == [8, 2, 1]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_frequencies_are_as_given_after_fit_and_in_copies(error):
    class Curious(Line):
        def training_step(self, batch, batch_idx):
            (config,) = self.trainer.lr_scheduler_configs
            assert config.frequency == 3
            assert type(copy.deepcopy(config).frequency) is type(pickle.loads(pickle.dumps(config)).frequency) is int
            if error is not None and batch_idx == 2:
                raise error
            self.configs = self.trainer.lr_scheduler_configs
            return super().training_step(batch, batch_idx)

    module = Curious((0,), frequency=3)
    try:
        train(module, 4)
    except (ValueError, SystemExit, KeyboardInterrupt):
        assert error is not None
    assert type(module.configs[0].frequency) is int
    assert module.configs[0].frequency == 3


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5])
def test_a_schedule_goes_on_in_the_same_phase_after_a_resume(saved_after, tmp_path):
    class Rates(TinyModule):
        def configure_optimizers(self):
            self.rates = []
            config = super().configure_optimizers()
            return {**config, "lr_scheduler": {**config["lr_scheduler"], "frequency": 3}}

        def on_before_optimizer_step(self, optimizer):
            self.rates.append(optimizer.param_groups[0]["lr"])

    rates, path = [], tmp_path / "last.ckpt"
    for ckpt_path in (None, path):
        module = make_module(bad={0, 4}, schedule=halving)
        module.__class__ = Rates
        trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=[SaveAfter(path, saved_after)])
        trainer.fit(module, Resumable(saved_after), ckpt_path=ckpt_path)
        rates.append(module.rates)
    assert rates[0] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05]
    done = saved_after - sum(batch < saved_after for batch in (0, 4))
    assert rates[1] == rates[0][done:]


def test_a_checkpoint_saved_after_fit_knows_the_phase(tmp_path):
    """Two real steps of three before it, one after it."""
    module, path = Line((0, 1), frequency=3), tmp_path / "after.ckpt"
    trainer = train(module, 4)
    trainer.save_checkpoint(path)
    module = Line((), frequency=3)
    resumed = make_trainer(MasterWeightPrecision("bf16"), max_epochs=2)
    resumed.fit(module, data(4), ckpt_path=path)
    assert module.rates == [1, 0.5, 0.5, 0.5]


# What Lightning counts


class Counted(Line):
    """Notes `global_step` where user code runs, before and after Lightning counts."""

    def on_fit_start(self):
        self.before, self.after, self.at_the_end = [], [], []

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.before.append(self.trainer.global_step)
        optimizer.step(closure=closure)
        self.after.append(self.trainer.global_step)

    def lr_scheduler_step(self, scheduler, metric):
        self.at_the_end.append(self.trainer.global_step)
        scheduler.step()

    def on_train_batch_end(self, *_):
        self.at_the_end.append(self.trainer.global_step)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_global_step_is_never_more_or_less_than_the_real_steps(precision):
    """A warm-up that reads it in `optimizer_step` must not find -1 after a first batch that overflowed."""
    module = Counted((0, 1, 4))
    trainer = train(module, 6, precision)
    assert module.before == module.after == [0, 0, 0, 1, 2, 2]  # counted when `optimizer_step` has ended
    assert module.at_the_end == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    assert (progress.total.ready, progress.total.completed) == (3, 3)
    assert (progress.current.ready, progress.current.completed) == (3, 3)


def test_the_warm_up_of_lightnings_documentation_warms_up():
    class Warm(Line):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            optimizer.step(closure=closure)
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 2) / 4)

    module = Warm((0,), lambda optimizer: LambdaLR(optimizer, lambda k: 0.25), frequency=100)
    train(module, 5)
    assert module.rates == [0.5, 0.5, 0.75, 1.0]  # 2 / 4 is of the skipped batch, and of the first step


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_error_that_ends_a_run_leaves_the_count_right(precision):
    module = Counted(range(2, 9))
    trainer = make_trainer(MasterWeightPrecision(precision, DynamicLossScaler(1024, max_consecutive_skips=3)))
    with pytest.raises(NonFiniteGradientsError):
        trainer.fit(module, data(8))
    assert trainer.global_step == 2
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    assert progress.total.ready == progress.total.completed == 2
    assert type(progress).__name__ == "_Progress"


def test_steps_of_manual_optimization_are_counted_when_they_are_real():
    class Manual(Line):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.counts.append(self.trainer.global_step)

    module = Manual((0, 3, 4, 5))
    module.automatic_optimization, module.counts = False, []
    train(module, 4)
    assert module.counts == [0, 1, 2, 2, 2, 2, 3, 4]


# Manual optimization


class Manual(Line):
    """Steps `steps` times a batch; the schedule is stepped in `hook` of the module or, `in_callback`, of a callback."""

    def __init__(self, *args, hook="training_step", steps=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.hook, self.steps = hook, steps
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(self.steps):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.advance("training_step")

    def advance(self, hook):
        if hook == self.hook and self.batches:
            self.lr_schedulers().step()

    def on_train_batch_start(self, batch, batch_idx):
        self.advance("on_train_batch_start")

    def on_train_batch_end(self, *_):
        self.advance("on_train_batch_end")

    def on_train_epoch_end(self):
        self.advance("on_train_epoch_end")


class Beside(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, *_):
        pl_module.advance("callback at the start")

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.advance("callback at the end")


HOOKS = ["training_step", "on_train_batch_start", "on_train_batch_end", "callback at the start", "callback at the end"]


@pytest.mark.parametrize("bad", [(), (0,), (0, 2), (1, 2, 3)])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_schedule_rests_in_whatever_hook_of_a_batch_it_is_stepped(hook, bad):
    module = Manual(bad, hook=hook)
    train(module, 6, callbacks=[Beside()])
    assert module.rates == [0.5**step for step in range(6 - len(bad))]


@pytest.mark.parametrize("bad", [(0,), (1,), (2, 3), (0, 1, 4)])
def test_a_schedule_follows_each_of_two_steps_in_a_batch(bad):
    """It rested over the good one, too, if the other of the same batch was skipped."""
    module = Manual(bad, steps=2)
    train(module, 3, "fp16")
    assert module.rates == [0.5**step for step in range(6 - len(bad))]


def test_a_schedule_of_epochs_advances_after_a_skipped_batch():
    module = Manual((3,), hook="on_train_epoch_end")
    trainer = train(module, 2, max_epochs=3)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_schedule_that_rests_does_so_after_a_resume(saved_after, tmp_path):
    """Two optimizers, of which one has skipped the last step before the checkpoint: its schedule alone rests."""

    class Two(Manual):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.other = nn.Linear(4, 1)

        def configure_optimizers(self):
            pair = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (self.net, self.other)]
            return pair, [halving(each) for each in pair]

        def on_train_batch_start(self, batch, batch_idx):
            for scheduler in self.lr_schedulers() if batch_idx else ():
                scheduler.step()

        def training_step(self, batch, batch_idx):
            x = batch[0].flatten(1)[:, :4]
            for each, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                each.zero_grad()
                loss = net(x).float().pow(2).mean()
                self.manual_backward(loss * math.inf if net is self.net and batch_idx in self.bad else loss)
                each.step()

    path, last = tmp_path / "last.ckpt", []
    for ckpt_path in (None, path):
        trainer = make_trainer(MasterWeightPrecision("bf16"), callbacks=[SaveAfter(path, saved_after)])
        trainer.fit(Two((1, 2)), Resumable(saved_after), ckpt_path=ckpt_path)
        last.append([config.scheduler.last_epoch for config in trainer.lr_scheduler_configs])
    assert last[0] == last[1] == [5, 7]


def sequence(optimizer):
    parts = [LambdaLR(optimizer, torch.nn.Identity()), OneCycleLR(optimizer, 1.0, total_steps=9)]
    return SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize("schedule", [halving, sequence])
def test_a_schedule_is_copied_and_pickled_in_manual_optimization(schedule):
    class Copying(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            scheduler = self.lr_schedulers()
            self.copies = [pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler), copy.copy(scheduler)]
            for each in self.copies:
                assert each.last_epoch == scheduler.last_epoch

    module = Copying((), schedule)
    trainer = train(module, 2)
    (config,) = trainer.lr_scheduler_configs
    assert (
        {type(each) for each in module.copies}
        == {type(config.scheduler)}
        == {type(schedule(config.scheduler.optimizer))}
    )
    after_fit = trainer.lr_scheduler_configs[0].scheduler
    plain = type(schedule(after_fit.optimizer))
    assert {type(each) for each in (after_fit, *module.copies)} == {plain}
