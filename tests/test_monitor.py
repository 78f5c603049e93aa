"""What the monitor logs is read back from event files and compared with numbers taken by hand."""

import logging
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from planted import Attention, Planted, batch
from reference import TinyModule, loader, make_batches, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionMonitor
from lightning_mixprec.health import Limits, layer_warnings, run_warnings
from lightning_mixprec.layer_stats import BatchStats, LayerStats, exponent_counts, exponent_edges


def read_events(directory):
    events = EventAccumulator(str(directory)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_monitor_logs_the_scale_used_skips_and_true_gradient_norms(tmp_path):
    """T06, T42, T43, T81: read back from the event file."""
    norms = []

    class Norms(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            norms.append(torch.cat([p.grad.double().flatten() for p in self.parameters()]).norm().item())

    torch.manual_seed(0)
    module = Norms(bad={1})
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=1024))
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer(
        plugin, callbacks=PrecisionMonitor(), logger=logger, log_every_n_steps=1, gradient_clip_val=0.01
    )
    trainer.fit(module, loader(make_batches(4)))
    seen = read_events(tmp_path)
    assert seen["mixprec/loss_scale"] == [1024, 1024, 512, 512]
    assert seen["mixprec/skipped"] == [0, 1, 0, 0]
    assert seen["mixprec/skipped_total"] == [0, 1, 1, 1]
    assert seen["mixprec/consecutive_skips"] == [0, 1, 0, 0]
    assert seen["mixprec/real_steps"] == [1, 1, 2, 3]
    assert seen["mixprec/grad_norm"] == pytest.approx(norms, rel=1e-5)
    assert len(norms) == 3


class Pair(L.LightningModule):
    """Two linear layers without biases; everything about them can be worked out by hand."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            self.net[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.net[1].weight.copy_(torch.tensor([[1.0, 2e-5]]))

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2**-12)


SMALL = torch.tensor([[1.0, 2.0**-20]])


def test_per_layer_numbers_are_those_worked_out_by_hand(tmp_path):
    """fp16 at loss scale 1: x = [1, 2^-20], h = [1, 3] after rounding, dW0 = outer(w1, x), dW1 = h."""
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler.static(1.0))
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = PrecisionMonitor(layers_every_n_steps=1)
    make_trainer(plugin, logger=logger, log_every_n_steps=1, callbacks=monitor).fit(Pair(), loader([SMALL]))
    seen = {tag: values[0] for tag, values in read_events(tmp_path).items() if tag.startswith("mixprec_")}
    assert seen["mixprec_activation_max/net.0"] == 3.0
    assert seen["mixprec_activation_headroom_bits/net.0"] == pytest.approx(math.log2(65504 / 3))
    # dW0 = [[1, 2^-20], [2e-5, 2e-11]]: 2e-11 is flushed to zero; 2^-20 and 2e-5 lie below 2^-14, fp16's least normal.
    assert seen["mixprec_gradient_max/net.0"] == 1.0
    assert seen["mixprec_gradient_zero_share/net.0"] == 0.25
    assert seen["mixprec_gradient_subnormal_share/net.0"] == 0.5
    assert seen["mixprec_gradient_max/net.1"] == 3.0
    assert seen["mixprec_gradient_headroom_bits/net.1"] == pytest.approx(math.log2(65504 / 3))
    assert seen["mixprec_gradient_zero_share/net.1"] == 0.0
    # lr * g = 2^-12 for a weight of 1, whose half ulp in fp16 is 2^-11: lost; 3 * 2^-12 for a weight of 2e-5: not.
    assert seen["mixprec_update_lost_share/net.1"] == 0.5
    assert seen["mixprec_non_finite/net.1"] == 0.0


def test_gradients_are_unscaled_and_their_headroom_is_not():
    net = nn.Sequential(nn.Linear(1, 1, bias=False)).half()
    stats = BatchStats(net, ["0"], torch.float16)
    (net(torch.ones(1, 1).half()).sum() * 64).backward()
    stats.after_backward(torch.tensor(64.0))
    layer = stats.read()["0"]
    assert layer.gradient == 1.0
    assert layer.gradient_headroom == pytest.approx(math.log2(65504 / 64))


def test_nonfinite_numbers_are_counted_and_break_nothing(tmp_path):
    """T79: all gradients of a layer NaN, histograms on."""

    class Broken(TinyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 1 else 1)

    torch.manual_seed(0)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": PrecisionMonitor(layers_every_n_steps=1)}
    make_trainer(MasterWeightPrecision("bf16"), **options).fit(Broken(), loader(make_batches(3)))
    seen = read_events(tmp_path)
    assert seen["mixprec_non_finite/net.proj"] == [0.0, 72.0, 0.0]  # an 8 x 8 weight and 8 biases
    assert seen["mixprec/skipped"] == [0.0, 1.0, 0.0]
    events = EventAccumulator(str(tmp_path)).Reload()
    histograms = set(events.Tags()["histograms"])
    assert {"mixprec_activation_exponents/net.proj", "mixprec_gradient_exponents/net.proj"} <= histograms
    (overflow,) = events.Tensors("mixprec/overflow/text_summary")
    assert b"non-finite gradients of 10: " in overflow.tensor_proto.string_val[0]
    (plan,) = events.Tensors("mixprec/plan/text_summary")
    assert b"net.conv_in" in plan.tensor_proto.string_val[0]


def test_the_histogram_holds_the_exponents(tmp_path):
    """Activations 1 and 3 of the first layer: exponents 0 and 1."""
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = PrecisionMonitor(layers_every_n_steps=1)
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler.static(1.0))
    make_trainer(plugin, logger=logger, callbacks=monitor).fit(Pair(), loader([SMALL]))
    (event,) = EventAccumulator(str(tmp_path)).Reload().Histograms("mixprec_activation_exponents/net.0")
    value = event.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (2.0, 0.0, 2.0, 0.5 + 1.5)


def test_more_numbers_are_counted_than_fp32_counts():
    counts = exponent_counts(torch.ones(1).expand(2**24 + 3))
    assert counts.sum() == counts[exponent_edges().index(0)] == 2**24 + 3


def test_layers_are_looked_at_at_growing_intervals(tmp_path):
    """Batches 1, 2, 4, then every 6; nothing is hooked in between, and other loggers get the same numbers."""
    hooked = []

    class Count(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            hooked.append(len(pl_module.net.proj._forward_hooks))

    torch.manual_seed(0)
    logger = CSVLogger(tmp_path, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 3, "callbacks": [PrecisionMonitor(6), Count()]}
    make_trainer(MasterWeightPrecision("bf16"), **options).fit(TinyModule(), loader(make_batches(13)))
    assert hooked == [1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("mixprec_gradient_max/net.proj")
    assert sum(bool(row.split(",")[column]) for row in rows[1:]) == 5


def test_a_bad_interval_is_refused():
    with pytest.raises(ValueError, match=r"layers_every_n_steps=0.*None"):
        PrecisionMonitor(layers_every_n_steps=0)


def test_health_says_what_to_do_once(caplog, tmp_path):
    """A planted layer in fp16 without fallback: skips are named, once, with the argument to change."""
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(max_consecutive_skips=40))
    logger = TensorBoardLogger(tmp_path, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": PrecisionMonitor()}
    trainer = make_trainer(plugin, **options)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="in a row"):
        trainer.fit(Planted(Attention), loader([batch()] * 60))
    said = [record.getMessage() for record in caplog.records]
    assert sum("batches overflowed and were skipped" in text for text in said) == 1
    assert sum("The loss scale is" in text and "train in bf16" in text for text in said) == 1
    assert sum("The loss scale fell from 32768 to 256 within the last 8 batches" in text for text in said) == 1
    # The same in TensorBoard, as a curve of how much was said, and in words.
    alerts = read_events(tmp_path)["alerts/precision"]
    assert alerts == sorted(alerts)
    assert (alerts[0], alerts[-1]) == (0.0, 3.0)
    events = EventAccumulator(str(tmp_path)).Reload()
    text = events.Tensors("alerts/precision/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert [rule in text for rule in ("**scale_drop**", "**skips**", "**scale**")] == [True] * 3
    # A run that ends with an error has learned something too.
    (learned,) = events.Tensors("mixprec/learned/text_summary")
    assert b"0 steps, 30 skipped (100.0%)" in learned.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("layer", "rules"),
    [
        (LayerStats(activation=60000.0, activation_headroom=0.13), ["headroom"]),
        (LayerStats(activation_headroom=9.0, zero=0.4, subnormal=0.2), ["vanished"]),
        (LayerStats(activation_headroom=9.0, zero=0.1, subnormal=0.2), []),
        (LayerStats(activation_headroom=9.0, gradient=1.0, zero=0.9, subnormal=0.0), []),  # rows that were not used
        (LayerStats(activation_headroom=9.0, gradient=0.0, zero=1.0, subnormal=0.0), ["vanished"]),
        (LayerStats(activation=4000.0, activation_headroom=4.0), ["growth"]),  # of 12
        (LayerStats(activation=600.0, activation_headroom=6.8), []),
        (LayerStats(), []),
    ],
)
def test_layer_rules(layer, rules):
    healthy = LayerStats(activation_headroom=12.0, zero=0.0, subnormal=0.0)
    before = {"good": 12.0, "bad": 12.0}
    found = dict(layer_warnings(Limits(), {"good": healthy, "bad": layer}, 1024.0, before))
    assert list(found) == rules
    assert all("'bad'" in text for text in found.values())
    early = dict(layer_warnings(Limits(), {"good": healthy, "bad": layer}, 1024.0, before, settled=False))
    assert list(early) == [rule for rule in rules if rule != "vanished"]


def test_advice_is_for_the_dtype_that_is_used():
    gone = LayerStats(gradient=0.0, zero=1.0, subnormal=0.0)
    ((_, fp16),) = layer_warnings(Limits(), {"fc": gone}, 1024.0)
    ((_, bf16),) = layer_warnings(Limits(), {"fc": gone}, 1.0, fp16=False)
    assert "train in bf16" in fp16
    assert "bf16" not in bf16
    assert "PrecisionPolicy(fp32=['fc'])" in bf16


def test_growing_activations_are_named_before_they_overflow(caplog, tmp_path):
    """Of one layer, doubled every batch: 2^3 at first; said where less than 5 bits are left to 65504."""

    class Grows(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.LayerNorm(1), nn.Linear(1, 1, bias=False))
            nn.init.constant_(self.net[0].weight, 8.0)

        def training_step(self, batch, batch_idx):
            return self.net(batch).float().sum()

        def on_train_batch_end(self, *_):
            with torch.no_grad():
                self.net[0].weight.mul_(2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    plugin = MasterWeightPrecision("fp16", DynamicLossScaler.static(1.0))
    logger = TensorBoardLogger(tmp_path, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": PrecisionMonitor(layers_every_n_steps=1)}
    with caplog.at_level(logging.WARNING):
        make_trainer(plugin, **options).fit(Grows(), loader([torch.ones(1, 1)] * 12))
    (said,) = [text for record in caplog.records if "have grown" in (text := record.getMessage())]
    assert "'net.0' have grown 256-fold" in said
    assert "reach 2.05e+03; 5.0 bits" in said


def test_other_parts_add_charts_to_the_page(tmp_path):
    class Curves(L.Callback):
        custom_scalars = {"Precision": {"mine": ["mine/.*"]}, "Mine": {"other": ["other$"]}}  # noqa: RUF012

    logger = TensorBoardLogger(tmp_path, name="", version="")
    callbacks = [PrecisionMonitor(), Curves()]
    make_trainer(MasterWeightPrecision("bf16"), logger=logger, callbacks=callbacks).fit(
        TinyModule(), loader(make_batches(1))
    )
    (layout,) = EventAccumulator(str(tmp_path)).Reload().Tensors("custom_scalars__config__")
    from tensorboard.plugins.custom_scalar import layout_pb2

    page = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    charts = {category.title: [chart.title for chart in category.chart] for category in page.category}
    assert list(charts) == ["Precision", "Mine", "Layers"]
    assert charts["Precision"][-1] == "mine"
    assert charts["Mine"] == ["other"]


def test_run_rules():
    assert not list(run_warnings(Limits(), skipped=2, batches=1000, scale=2.0**15, fp16=True))
    assert not list(run_warnings(Limits(), skipped=5, batches=10, scale=2.0**15, fp16=True))  # too early to say
    found = [rule for rule, _ in run_warnings(Limits(), skipped=60, batches=1000, scale=0.5, fp16=True)]
    assert found == ["skips", "scale"]
    assert not list(run_warnings(Limits(), skipped=0, batches=1000, scale=0.5, fp16=False))
    fell = {"skipped": 0, "batches": 1000, "fp16": True, "highest": 2.0**15}
    assert not list(run_warnings(Limits(), scale=2.0**9, **fell))  # six halvings: a run that looks for its scale
    ((rule, text),) = run_warnings(Limits(), scale=2.0**8, **fell)
    assert rule == "scale_drop"
    assert "from 32768 to 256" in text
    ((rule, text),) = run_warnings(Limits(), skipped=0, batches=9, scale=2.0**15, fp16=True, moved=["a.b"])
    assert rule == "fallback"
    assert "PrecisionPolicy(fp32=['a.b'])" in text


def test_a_run_ends_with_what_it_learned(caplog, tmp_path):
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=1024))
    torch.manual_seed(0)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer(plugin, logger=logger, log_every_n_steps=1, callbacks=PrecisionMonitor())
    with caplog.at_level(logging.INFO):
        trainer.fit(TinyModule(bad={1}), loader(make_batches(4)))
    (text,) = [record.getMessage() for record in caplog.records if "precision        fp16" in record.getMessage()]
    lines = text.splitlines()
    assert len(lines) == 5
    assert "3 steps, 1 skipped (25.0%)" in lines[0]
    assert "512, started at 1024, 512 to 1024" in lines[1]
    assert lines[2] == "moved to fp32    no layer"
    assert "bits, activations of net." in lines[3]


def test_the_dashboard_layout_is_there(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer(MasterWeightPrecision("bf16"), logger=logger, callbacks=PrecisionMonitor())
    trainer.fit(TinyModule(), loader(make_batches(1)))
    (layout,) = EventAccumulator(str(tmp_path)).Reload().Tensors("custom_scalars__config__")
    assert b"mixprec/loss_scale" in layout.tensor_proto.string_val[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_looking_changes_nothing(precision, tmp_path):
    """Weights after a monitored run are bit for bit those of one that was not."""
    ends = []
    for callbacks in ([], [PrecisionMonitor(layers_every_n_steps=1)]):
        torch.manual_seed(0)
        module = TinyModule(bad={2})
        logger = TensorBoardLogger(tmp_path / str(len(ends)), name="", version="")
        options = {"callbacks": callbacks, "logger": logger, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
        make_trainer(MasterWeightPrecision(precision), **options).fit(module, loader(make_batches(8)))
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_the_progress_bar_shows_scale_and_skips():
    shown = []

    class Bar(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            shown.append({k: v for k, v in trainer.progress_bar_metrics.items() if k in ("scale", "skipped")})

    torch.manual_seed(0)
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=1024))
    options = {"log_every_n_steps": 1, "callbacks": [PrecisionMonitor(), Bar()]}
    make_trainer(plugin, **options).fit(TinyModule(bad={1}), loader(make_batches(3)))
    assert shown[-1] == {"scale": 512.0, "skipped": 1.0}


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end", "validation_step"])
def test_metrics_of_the_module_keep_their_values_whatever_their_names(hook):
    """On the progress bar and for callbacks, in every batch, as without the monitor."""

    class Own(TinyModule):
        def told(self, value):
            for name in ("scale", "skipped"):
                self.log(name, value, prog_bar=True, batch_size=1)

        def training_step(self, batch, batch_idx):
            if hook == "training_step":
                self.told(batch_idx + 100.0)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if hook == "on_train_batch_end":
                self.told(batch_idx + 100.0)

        def validation_step(self, batch, batch_idx):
            if hook == "validation_step":
                self.told(200.0)

    class Look(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, *_):
            metrics = {**trainer.callback_metrics}, {**trainer.progress_bar_metrics}
            self.seen.append([[float(each[name]) for name in ("scale", "skipped") if name in each] for each in metrics])

    seen = []
    for callbacks in ([], [PrecisionMonitor()]):
        torch.manual_seed(0)
        look = Look()
        options = {"log_every_n_steps": 1, "callbacks": [*callbacks, look], "val_check_interval": 2}
        trainer = make_trainer(MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=1024)), **options)
        for _ in range(2):  # also in a second fit
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(Own(), loader(make_batches(5)), loader(make_batches(1)))
        seen.append(look.seen)
    stock, monitored = seen
    assert sum(bool(batch[0]) for batch in stock) == (8 if hook != "validation_step" else 6)
    for theirs, ours in zip(stock, monitored, strict=True):
        assert not theirs[0] or theirs == ours
