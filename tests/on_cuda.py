"""What a GPU asks of the plugin, on one that is pretended; `test_cuda.py` runs this in a process of its own."""

import inspect
import logging
import os
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import lightning as L
import pretend_cuda
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from planted import Attention, Planted
from planted import batch as planted_batch
from reference import Resumable, SaveAfter, assert_same, loader, make_batches, make_module, make_trainer, snapshot
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mixprec import (
    DynamicLossScaler,
    MasterWeightAveraging,
    MasterWeightPrecision,
    PrecisionMonitor,
    PrecisionPolicy,
    audit,
    guests,
)
from lightning_mixprec.formats import GRADIENT_FORMATS, Tally
from lightning_mixprec.gradients import found_nonfinite
from lightning_mixprec.inside import InnerOverflow
from lightning_mixprec.layer_stats import exponent_counts
from lightning_mixprec.magnitudes import largest, nonfinite
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.reduction import mean_over_ranks
from lightning_mixprec.replay import Replayer
from recipes.autoencoder import Autoencoder
from recipes.randomness import validation_draws
from recipes.train_autoencoder import AutoencoderModule, latent_std

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
RUNGS = [("bf16", "fp32"), ("bf16", "split"), ("bf16", "split24"), ("bf16", "none"), ("fp16", "fp32")]
SETTINGS = [(*rung, "fused") for rung in RUNGS] + [("bf16", "split24", "foreach"), ("fp16", "fp32", "SGD")]


@pytest.fixture(autouse=True)
def gpu():
    with pretend_cuda.pretend(os.environ["PRETENDED_DRIVER"]):
        yield


class Waits(L.Callback):
    """How often each batch makes the host wait, and for what."""

    def __init__(self):
        self.marks = []

    def on_train_batch_start(self, *_):
        self.marks.append(len(pretend_cuda.waits))

    def on_train_epoch_end(self, *_):
        self.marks.append(len(pretend_cuda.waits))
        self.batches = [pretend_cuda.waits[start:end] for start, end in pairwise(self.marks)]


def fit(accelerator, precision, masters, make, bad=(), callbacks=(), **options):
    module = make_module(make, bad)
    scaler = DynamicLossScaler(init_scale=16) if precision == "fp16" else None
    plugin = MasterWeightPrecision(precision, masters=masters, scaler=scaler)
    trainer = make_trainer(plugin, accelerator=accelerator, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(make_batches(8)))
    return module


@pytest.mark.parametrize(("precision", "masters", "optimizer"), SETTINGS)
def test_a_fit_ends_as_on_a_cpu_and_hardly_waits(precision, masters, optimizer):
    """An optimizer that takes a flag is queued first; then, or for others before, the answer is read: once a batch."""
    waits, options = Waits(), {"gradient_clip_val": 0.05}
    expected = fit("cpu", precision, masters, OPTIMIZERS[optimizer], **options)
    found = fit("gpu", precision, masters, OPTIMIZERS[optimizer], callbacks=[waits], **options)
    assert_equal_fp32_on_the_host(found, expected)
    first, *others = waits.batches
    assert len(first) == 1, f"the first batch waits for {first}"
    for batch in others:
        if optimizer == "fused" and masters in ("fp32", "split"):
            assert batch == ["event"], f"a batch waits for {batch}"
        else:
            assert ["overflowed" in wait for wait in batch] == [True], f"a batch waits for {batch}"


def test_callbacks_do_not_make_a_batch_wait_more_often(tmp_path):
    """Averages in every batch, and the monitor where nothing is logged."""
    waits, callbacks = Waits(), [MasterWeightAveraging(decay=0.5), PrecisionMonitor(layers_every_n_steps=None)]
    logger = TensorBoardLogger(tmp_path)
    fit("gpu", "bf16", "fp32", OPTIMIZERS["fused"], callbacks=[waits, *callbacks], logger=logger, log_every_n_steps=100)
    assert callbacks[0].n_averaged == 8
    assert waits.batches[1:] == [["event"]] * 7


def test_a_look_at_the_layers_waits_a_few_times_however_many_parameters_there_are(tmp_path):
    waits, monitor = Waits(), PrecisionMonitor(layers_every_n_steps=4)
    logger = TensorBoardLogger(tmp_path)
    fit("gpu", "bf16", "fp32", OPTIMIZERS["fused"], callbacks=[waits, monitor], logger=logger, log_every_n_steps=100)
    assert monitor.layers
    assert not [wait for batch in waits.batches for wait in batch if wait.startswith("cpu -> cuda")]
    histograms = [[wait for wait in batch if "dashboard" in wait] for batch in waits.batches]
    assert max(map(len, histograms)) == 1


def test_layers_are_looked_at_in_a_deterministic_fit(tmp_path):
    monitor, options = PrecisionMonitor(layers_every_n_steps=4), {"logger": TensorBoardLogger(tmp_path)}
    try:
        fit("gpu", "bf16", "fp32", OPTIMIZERS["fused"], callbacks=[monitor], deterministic=True, **options)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert monitor.layers


def test_exponents_are_counted_in_a_deterministic_fit_and_without_a_wait(monkeypatch):
    numbers = torch.tensor([[1.0, 1.5, -2.0], [0.0, 2.0**-48, 2.0**-49], [2.0**23, 2.0**24, float("nan")]])
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)  # a setting of the whole process, and the user's
    values = numbers.cuda()
    pretend_cuda.waits.clear()
    with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=True):
        found = exponent_counts(values)
    assert not pretend_cuda.waits
    assert found.tolist() == exponent_counts(numbers).tolist()
    assert {place - 48: count for place, count in enumerate(found.tolist()) if count} == {-48: 1, 0: 2, 1: 1, 23: 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
def test_nonfinite_gradients_are_found_in_any_precision(dtype, bad):
    grads = [torch.full((3, 5), 3e4, dtype=dtype, device="cuda"), torch.ones(0, dtype=dtype, device="cuda")]
    if bad is not None:
        grads[0][1, 2] = bad
    for given in (grads, grads[::-1], [*grads, torch.ones(2, device="cuda").double()]):
        assert found_nonfinite(given, pretend_cuda.GPU).tolist() == [float(bad is not None)]
    assert found_nonfinite(grads[1:], pretend_cuda.GPU).tolist() == [0.0]
    assert found_nonfinite([], pretend_cuda.GPU).tolist() == [0.0]


def nccl(met):
    """A collective as NCCL has it, which knows no tensors of a CPU, and none that is transposed."""

    def collective(tensor, **_):
        assert tensor.device.type == "cuda"
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        met.append(tensor)

    return collective


def test_gradients_of_a_window_are_averaged_where_the_ranks_can_meet(monkeypatch):
    """At the end of a fit they are on the CPU."""
    met = []
    monkeypatch.setattr(torch.distributed, "all_reduce", nccl(met))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    params = [("a", torch.nn.Parameter(torch.ones(2, 3).t())), ("b", torch.nn.Parameter(torch.ones(2)))]
    means = mean_over_ranks({"a": torch.ones(2, 3).t()}, params, pretend_cuda.GPU)
    assert len(met) == 2
    assert means.keys() == {"a"}
    assert means["a"].tolist() == torch.full((3, 2), 0.5).tolist()


def test_masters_are_those_of_rank_0_whatever_their_layout(monkeypatch):
    """And DDP, on the stream that Lightning gives it, is no longer writing the weights that they came from."""
    met = []
    monkeypatch.setattr("lightning_mixprec.master.several_ranks", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: nccl(met)(tensor.fill_(3.0)))
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, 3).t()), torch.nn.Parameter(torch.ones(2))])
    masters = MasterWeights(net, {"0": torch.bfloat16, "1": torch.bfloat16})
    net.to("cuda")
    pretend_cuda.waits.clear()
    masters.allocate()
    assert pretend_cuda.waits[0] == "synchronize"
    assert len(met) == 2
    for param in net:
        assert masters.read(param).cpu().eq(3).all()
        assert param.cpu().eq(3).all()


class Written(TorchDispatchMode):
    """Counts the elements that operations make."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements += result.numel()
        return result


def test_weights_are_looked_at_and_written_by_themselves_and_not_with_their_bucket_each():
    """On a CPU the fingerprint shows first that there is nothing to be looked for."""
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(64))).to("cuda")
    masters = MasterWeights(net, {name: torch.bfloat16 for name, _ in net.named_parameters()})
    masters.allocate()
    (bucket,) = masters.buckets
    before = snapshot(net)
    net[3].weight.data[0, 0] = 2.0
    with Written() as looking:
        found = net.state_dict()
    assert found["3.weight"][0, 0] == 2
    with Written() as writing:
        masters.write(net[5].weight, torch.full((16, 16), 0.1, device="cuda"))
    assert looking.elements < 64 * bucket.numel  # for 64 weights, and of it half are fingerprints'
    assert writing.elements < 2 * bucket.numel
    masters.adopt_edits()
    assert masters.read(net[3].weight)[0, 0] == 2
    assert (masters.read(net[5].weight) == 0.1).all()
    for name, value in before.items():
        if name not in ("3.weight", "5.weight"):
            assert torch.equal(masters.read(net.get_parameter(name)), value)


def test_a_wrapper_that_is_made_anew_waits_for_the_weights_and_is_waited_for(monkeypatch):
    """Lightning makes it on a stream of its own."""

    class Strategy:
        root_device = pretend_cuda.GPU

        def _setup_model(self, module):
            waited.append(list(pretend_cuda.waits))
            return self.model

        def _register_ddp_hooks(self):
            pass

    waited, strategy = [], Strategy()
    monkeypatch.setattr(guests, "DDPStrategy", Strategy)
    monkeypatch.setattr(guests, "DistributedDataParallel", mock.MagicMock)
    strategy.model = mock.MagicMock()
    strategy.model.module = torch.nn.Linear(1, 1)
    guests.rebuild_wrapper(strategy)
    assert waited == [["synchronize"]]
    assert pretend_cuda.waits == ["synchronize"] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_fit_ends_in_the_middle_of_a_window(precision):
    """Its gradients have gone to the CPU with the module, and the loss scale has not."""

    class Interrupt(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError

    make = OPTIMIZERS["fused"]
    found = []
    for accelerator in ("cpu", "gpu"):
        module = make_module(make)
        scaler = DynamicLossScaler(init_scale=16) if precision == "fp16" else None
        plugin = MasterWeightPrecision(precision, scaler=scaler)
        trainer = make_trainer(plugin, accelerator=accelerator, callbacks=[Interrupt()], accumulate_grad_batches=4)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module, loader(make_batches(8)))
        found.append((module, plugin.state_dict()["partial_gradients"]))
    (expected, gradients), (module, gradients2) = found
    assert_equal_fp32_on_the_host(module, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients2[name], gradient, rtol=1e-2, atol=1e-2)


def test_an_old_gpu_is_told_from_a_new_one(caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit("gpu", "bf16", "fp32", OPTIMIZERS["SGD"])
        assert "no bf16 instructions" not in caplog.text
        with mock.patch("torch.cuda.get_device_capability", return_value=(7, 0)):
            fit("gpu", "bf16", "fp32", OPTIMIZERS["SGD"])
    assert "no bf16 instructions (compute capability 7.0" in caplog.text


@pytest.mark.parametrize(("precision", "masters"), [("bf16", "none"), ("fp16", "fp32")])
def test_a_fit_on_the_second_gpu_leaves_the_first_alone(precision, masters):
    """With a batch that is skipped, and one after the other that is looked into."""
    found, expected = [], []
    for ends, accelerator, devices in ((found, "gpu", [1]), (expected, "cpu", 1)):
        average = MasterWeightAveraging(decay=0.5)
        with mock.patch("torch.cuda.device_count", return_value=2):
            module = fit(accelerator, precision, masters, OPTIMIZERS["fused"], {2, 3, 4}, [average], devices=devices)
        ends += [module, average]
    assert {value.device for value in found[1].averages.values()} == {torch.device("cuda", 1)}
    assert_equal_fp32_on_the_host(found[0], expected[0])
    for name, value in expected[1].averages.items():
        torch.testing.assert_close(found[1].averages[name].cpu(), value, rtol=1e-3, atol=1e-3)


FUSED_ADAGRAD = pytest.mark.skipif(
    "cuda_unsupported=True" in inspect.getsource(torch.optim.Adagrad), reason="torch 2.11 refuses Adagrad's on a GPU"
)


@pytest.mark.parametrize(
    "make", [torch.optim.Adafactor, pytest.param(partial(torch.optim.Adagrad, fused=True), marks=FUSED_ADAGRAD)]
)
def test_optimizers_are_stepped_bucket_by_bucket_as_on_a_cpu(make):
    """They are tried on the CPU first, with settings and state that stand on the GPU."""
    found, expected = (
        fit(accelerator, "bf16", "split", lambda params: make(params, lr=0.01)) for accelerator in ("gpu", "cpu")
    )
    assert_equal_fp32_on_the_host(found, expected)


@pytest.mark.parametrize(("first", "second", "masters"), [("gpu", "gpu", "none"), ("gpu", "cpu", "fp32")])
def test_a_checkpoint_from_inside_a_window_goes_on_on_either_device(first, second, masters, tmp_path):
    """Bit for bit on the same one, stochastic rounding included."""

    def run(accelerator, **options):
        module = make_module(OPTIMIZERS["fused"])
        plugin = MasterWeightPrecision("bf16", masters=masters)
        saving = SaveAfter(tmp_path / "inside.ckpt", 3)
        trainer = make_trainer(plugin, accelerator=accelerator, callbacks=[saving], accumulate_grad_batches=2)
        trainer.fit(module, Resumable(3), **options)
        return module

    whole, rest = run(first), run(second, ckpt_path=tmp_path / "inside.ckpt")
    if first == second:
        assert_same(snapshot(rest), snapshot(whole))
    assert_equal_fp32_on_the_host(rest, whole)


def test_magnitudes_of_what_does_not_all_stand_on_the_gpu():
    """A network may be called with a timestep on the host."""
    value = {"t": torch.tensor(3.0), "x": torch.ones(2, device="cuda")}
    assert largest(value).item() == 3
    assert not nonfinite(value)
    assert nonfinite([*value.values(), torch.tensor(float("inf"))])


def test_a_call_is_made_again_with_the_random_numbers_of_every_gpu():
    """Whichever is current: an audit's model may be on another."""
    with mock.patch("torch.cuda.device_count", return_value=3):
        assert Replayer("cuda", torch.float16).devices == [0, 1, 2]


def test_nothing_is_looked_at_outside_of_training_where_all_is_fp32():
    class Sampling(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pretend_cuda.waits.clear()
            pl_module.net(batch[0], batch[1])
            self.waits = list(pretend_cuda.waits)

    sampling = Sampling()
    fit("gpu", "fp32", "fp32", OPTIMIZERS["fused"], callbacks=[sampling])
    assert sampling.waits == []


def test_validation_of_an_autoencoder_waits_for_nothing_and_its_latents_are_measured_in_one_wait():
    torch.manual_seed(0)
    module = AutoencoderModule(Autoencoder(1, 2, (8,)), OPTIMIZERS["fused"])
    images = torch.randn(4, 1, 4, 4)
    data = SimpleNamespace(train=[{"image": image} for image in images])
    expected = latent_std(module.net, data, pretend_cuda.CPU)
    module.to("cuda")
    module.on_validation_epoch_start()
    batch = {"image": images.cuda()}
    pretend_cuda.waits.clear()
    module.validation_step(batch, 1)
    assert not pretend_cuda.waits
    assert module._totals[1] == 4
    pretend_cuda.waits.clear()
    assert latent_std(module.net, data, pretend_cuda.GPU) == pytest.approx(expected)
    assert len(pretend_cuda.waits) == 2  # for the images, and for the sums


def test_validation_noise_is_that_of_a_cpu_and_reads_the_indices_once():
    indices = torch.tensor([3, 5])
    there = indices.cuda()
    pretend_cuda.waits.clear()
    found = validation_draws(there, (1, 2, 2))
    assert sum(wait.startswith("cuda -> cpu") for wait in pretend_cuda.waits) == 1
    for one, other in zip(found, validation_draws(indices, (1, 2, 2)), strict=True):
        assert torch.equal(one.cpu(), other)


def test_operations_on_halves_of_both_devices_are_looked_at():
    class Table(torch.nn.Module):
        def forward(self, x):
            table = torch.full((2,), 300.0, dtype=torch.float16).square()  # on the host
            return x.copy_(table)

    net = torch.nn.Sequential(Table(), torch.nn.Identity())
    with InnerOverflow(net, torch.float16) as inner:
        net(torch.ones(2, dtype=torch.float16, device="cuda"))
    assert inner.found
    assert inner.modules() == ["0"]


def test_numbers_are_counted_without_a_wait():
    tally, host = Tally(GRADIENT_FORMATS), Tally(GRADIENT_FORMATS)
    numbers = torch.tensor([0.0, 1e-9, 1e-6, 1.0, 1e5, 1e39, float("nan")])
    values = numbers.cuda()
    pretend_cuda.waits.clear()
    tally.add(values, 2.0)
    tally.add(values)
    assert not pretend_cuda.waits
    host.add(numbers, 2.0)
    host.add(numbers)
    assert tally.shares == host.shares
    assert tally.shares[torch.float16].overflow == 2 / 10  # five of seven are finite


def test_a_layer_that_overflows_inside_is_found_and_moved():
    module, plugin = Planted(Attention), MasterWeightPrecision("fp16", fallback="auto")
    trainer = make_trainer(plugin, accelerator="gpu", max_steps=3)
    trainer.fit(module, loader([planted_batch()] * 20))
    assert plugin.fp32_layers == ["net.blocks.5"]
    assert plugin.real_steps == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_on_the_gpu_trains_as_on_a_cpu(recipe):
    """Emulated: the products themselves are the hardware's."""

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

        def training_step(self, batch, batch_idx):
            return (self.net(batch).float() - batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    ends, batches = [], torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))
    for accelerator in ("gpu", "cpu"):
        policy = PrecisionPolicy("bf16", fp8=["net.1"], fp8_recipe=recipe, emulate=True)
        module = Net()
        make_trainer(MasterWeightPrecision(policy), accelerator=accelerator).fit(module, loader(batches))
        ends.append(module)
    assert_equal_fp32_on_the_host(*ends)


def test_an_overflow_beside_complex_parameters_is_skipped():
    """Of which it is not asked whether they are finite, and no answer is on the GPU."""

    class Spectrum(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.phase = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            found = (self.net(batch).float() * self.phase).abs().square().mean()
            return found * float("inf") if batch_idx == 1 else found

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plugin, module = MasterWeightPrecision(PrecisionPolicy("bf16", fp32=["phase"])), Spectrum()
    make_trainer(plugin, accelerator="gpu").fit(module, loader(torch.ones(3, 2, 4)))
    assert (plugin.real_steps, plugin.skipped_steps) == (2, 1)
    assert plugin.overflowed_parameters == ["net.weight", "net.bias"]
    assert all(param.isfinite().all() for param in module.parameters())


def test_averages_of_what_is_frozen_when_a_run_goes_on_are_on_the_gpu_too(tmp_path):
    def run(freeze, **options):
        module, average = make_module(OPTIMIZERS["fused"]), MasterWeightAveraging(decay=0.5)
        module.net.conv_in.requires_grad_(not freeze)
        saving = SaveAfter(tmp_path / "inside.ckpt", 3)
        trainer = make_trainer(MasterWeightPrecision("bf16"), accelerator="gpu", callbacks=[average, saving])
        trainer.fit(module, Resumable(3), **options)
        return average.averages

    run(freeze=False)
    checkpoint = torch.load(tmp_path / "inside.ckpt", map_location="cpu", weights_only=True)
    found = run(freeze=True, ckpt_path=tmp_path / "inside.ckpt")
    assert {value.device.type for value in found.values()} == {"cuda"}
    saved = checkpoint["state_dict"]["net.conv_in.weight"]
    torch.testing.assert_close(found["net.conv_in.weight"].cpu(), saved, rtol=0.05, atol=0.01)


def test_an_audit_on_the_gpu_says_what_one_on_the_cpu_says():
    found, expected = (
        audit(make_module().to(device), [[part.to(device) for part in batch] for batch in make_batches(2)])
        for device in ("cuda", "cpu")
    )
    assert found.policy.fp32 == expected.policy.fp32
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.activation == pytest.approx(other.activation, rel=1e-3)


def assert_equal_fp32_on_the_host(module, expected):
    found = module.state_dict()
    assert {(value.device.type, value.dtype) for value in found.values()} == {("cpu", torch.float32)}
    for name, value in expected.state_dict().items():  # a CPU has norms of its own
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=f"{name} differs")
