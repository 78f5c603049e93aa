"""FSDP2 by policy, two processes over gloo. The file runs itself as the workers; the tests look at what they wrote."""

import re
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from launch import launch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted import Attention, Net, Planted, batch
from reference import TinyModule, TinyNet, loader, make_batches, make_trainer, reference_train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_mixprec import (
    ConstantDecay,
    DynamicLossScaler,
    MasterWeightAveraging,
    MasterWeightPrecision,
    PowerFunction,
    PrecisionMonitor,
    PrecisionPolicy,
)
from lightning_mixprec.sharding import shard_
from lightning_mixprec.snapshots import read_snapshots

PRECISIONS = ["fp32", "bf16", "fp16"]
SCENARIOS = {"plain": (6, 0), "accumulate": (3, 0), "overflow": (2, 1), "manual": (6, 0)}  # real steps, skips


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def fsdp2(**kwargs):
    options = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
    return ModelParallelStrategy(**{**options, **kwargs})


class Sharded:
    """Sharding as a user writes it; `sharded` because Lightning calls the hook for every stage."""

    sharded = False

    def configure_model(self):
        if not self.sharded and isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard_(self, self.trainer.precision_plugin.policy, self.device_mesh["data_parallel"])
            self.sharded = True


class Tiny(Sharded, TinyModule):
    """Overflows on rank 1 in its second batch, if asked to."""

    def __init__(self, overflows=False):
        super().__init__(adamw)
        self.overflows = overflows
        self.seen = set()
        self.net.conv_in.register_forward_hook(lambda m, *_: self.seen.add(("conv_in", m.weight.dtype)))
        self.net.norm.register_forward_hook(lambda m, a, out: self.seen.add(("norm", m.weight.dtype, out.dtype)))
        self.net.time_embedding.register_forward_hook(
            lambda m, a, out: self.seen.add(("time_embedding", m.weight.dtype, a[0].dtype, out.dtype))
        )

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.overflows and self.global_rank == 1 and batch_idx == 1 else loss


class OwnGain(Tiny):
    """Has a parameter in no network that trains, maybe only after the optimizer was made."""

    def __init__(self, later):
        super().__init__()
        self.gain = nn.ParameterList([nn.Parameter(torch.ones(1), requires_grad=not later)])

    def on_train_batch_start(self, batch, batch_idx):
        self.gain.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.gain[0].sum()


class Manual(Tiny):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def plugin_for(precision, **kwargs):
    scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
    return MasterWeightPrecision(precision, scaler=scaler, **kwargs)


def whole(state):
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in state.items()}


class History(L.Callback):
    """Weights after every real step, the start included."""

    def on_train_start(self, trainer, pl_module):
        self.steps, self.weights = -1, []
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.precision_plugin.real_steps > self.steps:
            self.steps = trainer.precision_plugin.real_steps
            self.weights.append(whole(pl_module.state_dict()))


def train(precision, scenario, directory):
    plugin, history = plugin_for(precision), History()
    ema = MasterWeightAveraging(
        profiles={"constant": ConstantDecay(0.9), "power": PowerFunction(0.1)},
        snapshot_every=2,
        snapshot_dir=directory / f"{precision}_{scenario}_snapshots",
    )
    callbacks = [ema, PrecisionMonitor(layers_every_n_steps=1), history]
    options = {"strategy": fsdp2(), "devices": 2, "callbacks": callbacks, "use_distributed_sampler": False}
    options["logger"] = CSVLogger(directory / f"{precision}_{scenario}", name="", version="")
    if scenario in ("accumulate", "overflow"):
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    trainer = make_trainer(plugin, **options)
    torch.manual_seed(0)
    module = Manual() if scenario == "manual" else Tiny(scenario == "overflow")
    start = {name: value.clone() for name, value in module.net.state_dict().items()}
    trainer.fit(module, loader(make_batches(12)[trainer.global_rank :: 2]))
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    return {
        "start": start,
        "weights": whole(module.net.state_dict()),
        "average": whole(ema.averages),
        "power": whole(ema.profile_averages["power"]),
        "history": history.weights,
        "counts": counts,
        "seen": module.seen,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharding")
    launch(__file__, 2, directory)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)], directory


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_shards_follow_the_plain_loop(precision, scenario, runs):
    """Accumulation, clipping by the norm over all shards, an overflow on one rank, manual optimization, EMA."""
    one, two = (run[precision, scenario] for run in runs[0])
    scale = 1024.0 if precision == "fp16" else 1.0
    steps, skips = SCENARIOS[scenario]
    assert (
        one["counts"] == two["counts"] == (scale / 2 if skips and precision == "fp16" else scale, steps, skips, steps)
    )
    net = TinyNet()
    net.load_state_dict(one["start"])
    accumulate = 2 if scenario in ("plain", "manual") else 4
    clip = None if scenario == "plain" else 0.05
    options = {"accumulate": accumulate, "clip": clip, "scale": scale, "bad": {3} if skips else ()}
    expected, *_ = reference_train(net, make_batches(12), precision, adamw, **options)
    tolerance = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 2e-4}[precision]
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)
    for name, value in one["average"].items():
        assert torch.equal(value, two["average"][name]), name
        assert value.dtype == torch.float32
        assert not torch.equal(value, one["weights"][name.removeprefix("net.")]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_units_are_gathered_in_the_dtype_they_compute_in(precision, runs):
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    fp32 = torch.float32
    expected = {("conv_in", half), ("norm", fp32, half), ("time_embedding", fp32, fp32, fp32)}
    assert runs[0][0][precision, "plain"]["seen"] == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", ["fsdp2", "distributed", "ddp"])
def test_a_checkpoint_of_two_shards_resumes(way, precision, runs):
    """Written in mid-run; resumed under FSDP2 from one file or from shards, and under DDP: the same end."""
    ends = [run[precision, "resumed"] for run in runs[0]]
    for end in ends:
        for name, value in ends[0]["straight"].items():
            # DDP averages gradients in 16 bits as a whole, FSDP2 in parts: not the same roundings.
            tolerance = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 2e-4}[precision] if way == "ddp" else 0.0
            torch.testing.assert_close(end[way][name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scenario", ["plain", "overflow"])
def test_averages_of_shards_follow_real_steps(precision, scenario, runs):
    """T57, T58: several profiles of the shards, and their snapshots, against a loop in float64."""
    run = runs[0][0][precision, scenario]
    start, *history = run["history"]
    assert len(history) == SCENARIOS[scenario][0]
    for name, value in run["average"].items():
        constant = power = start[name].double()
        for t, weights in enumerate(history, start=1):
            constant = 0.9 * constant + 0.1 * weights[name].double()
            decay = (1 - 1 / t) ** 7.938
            power = decay * power + (1 - decay) * weights[name].double()
            if t == len(history) // 2 * 2:
                kept = power
        torch.testing.assert_close(value.double(), constant, rtol=0, atol=1e-6)
        torch.testing.assert_close(run["power"][name].double(), power, rtol=0, atol=1e-5)
        last = read_snapshots(runs[1] / f"{precision}_{scenario}_snapshots")[-1]
        torch.testing.assert_close(last.load()[name].double(), kept, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_of_two_shards_is_plain(precision, runs):
    """Loads strictly without the plugin, and resumes on one device with the same weights, moments and averages."""
    saved = torch.load(runs[1] / f"{precision}.ckpt", weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert set(saved["averaged_state_dict"]) == set(saved["state_dict"])
    TinyModule(adamw).load_state_dict(saved["state_dict"])
    seen, ema = {}, MasterWeightAveraging(0.9)

    class AtStart(L.Callback):
        def on_train_start(self, trainer, pl_module):
            seen["weights"] = {name: value.clone() for name, value in pl_module.state_dict().items()}
            seen["averages"] = {name: value.clone() for name, value in ema.averages.items()}
            state = trainer.optimizers[0].state_dict()["state"]
            seen["moments"] = {index: entry["exp_avg"].clone() for index, entry in state.items()}

    module, plugin = Tiny(), plugin_for(precision)
    trainer = make_trainer(plugin, callbacks=[AtStart(), ema])
    trainer.fit(module, Rest(make_batches(6), 3), ckpt_path=runs[1] / f"{precision}.ckpt", weights_only=False)
    for name, value in saved["state_dict"].items():
        assert torch.equal(seen["weights"][name], value), name
    for name, value in seen["averages"].items():
        assert torch.equal(saved["averaged_state_dict"][name], value), name
    moments = saved["optimizer_states"][0]["state"]
    assert len(moments) == len(seen["moments"]) == len(saved["state_dict"])
    for index, value in seen["moments"].items():
        assert torch.equal(moments[index]["exp_avg"], value), index
    assert plugin.real_steps == 6


@pytest.mark.parametrize("fault", ["declared", "auto"])
def test_a_layer_in_fp32(fault, runs):
    """A layer that overflows fp16 trains once it is named, or once the fallback has named it on all ranks."""
    one, two = (run["fault", fault] for run in runs[0])
    assert one["layers"] == two["layers"] == (["net.blocks.5.attention"] if fault == "auto" else [])
    assert one["counts"] == two["counts"]
    assert one["counts"][1:3] == ((11, 1) if fault == "auto" else (12, 0))
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name
        assert bool(torch.isfinite(value).all()), name
    assert one["loss"] == pytest.approx(one["plain_loss"], rel=0.02)


def test_a_validation_that_overflows_on_one_rank_does_not_wait_for_the_other(runs):
    """Calling the network again would gather weights that the other rank does not offer."""
    assert [run["validated"] for run in runs[0]] == [(4, [])] * 2


@pytest.mark.parametrize("way", ["meta", "checkpointing"])
def test_other_ways_to_build_the_model(way, runs):
    """Made on the meta device and initialised in shards; with activation checkpointing inside the units."""
    for run in runs[0]:
        assert run[way]["error"] < 1e-6
        assert run[way]["steps"] == 4


def test_shared_parameters_in_two_units_are_refused():
    """Before anything is sharded; needs no second process."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.blocks[1].weight = self.blocks[0].weight

    with pytest.raises(ValueError, match=r"'blocks.0.weight' and 'blocks.1.weight' are one.*strategy='ddp'"):
        shard_(Net(), PrecisionPolicy("bf16"), mesh=None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_module_given_in_half_has_fp32_shards(precision, runs):
    """Updates too small for bf16 count; what is frozen stays as given, statistics too; TorchScript is left alone."""
    for run in runs[0]:
        found = run["half", precision]
        for name, value in found["from fp32"].items():
            assert torch.equal(found["from bf16"][name], value), name
        assert found["moved"] > 0
        assert found["dtypes"] == {"net": {torch.float32}, "teacher": {torch.bfloat16}, "scorer": {torch.float32}}
        assert found["frozen as given"]


MISTAKES = {
    "half": r"10 parameters train in 16 bits.*'net.time_embedding.weight'.*module.float\(\) before fully_shard",
    "half, later": r"2 parameters train in 16 bits.*'teacher.0.weight'",
    "nothing": "has sharded nothing.*shard_",
    "outside": "1 parameters train but are not sharded: 'gain.0'.*drift apart.*strategy='ddp'",
    "outside, later": "1 parameters train but are not sharded: 'gain.0'",
    "tensor_parallel": "tensor_parallel_size=2.*data_parallel_size",
    "masters": "masters='split' is not available under FSDP2.*masters='fp32'",
    "reduce_dtype": r"reduce_dtype='fp32' of the plugin is for DDP.*shard_\(..., reduce_dtype='fp32'\)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_not_train_is_refused(mistake, runs):
    message = MISTAKES[mistake]
    for run in runs[0]:
        assert re.search(message, run["refused", mistake]), run["refused", mistake]


def test_torchscript_that_trains_is_refused():
    net = nn.ModuleDict({"head": torch.jit.script(nn.Linear(1, 1))})
    with pytest.raises(ValueError, match=r"'head.weight' trains inside TorchScript.*strategy='ddp'"):
        shard_(net, PrecisionPolicy("bf16"), mesh=None)


def test_an_unknown_reduce_dtype_is_refused():
    with pytest.raises(ValueError, match=r"reduce_dtype='fp16'.*'compute' or 'fp32'"):
        shard_(nn.Linear(1, 1), PrecisionPolicy("bf16"), mesh=None, reduce_dtype="fp16")


# What the workers do besides `train`


class SaveAt(L.Callback):
    """Saves after `batches` batches; all ranks come here together."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def resume(precision, directory):
    """Six steps; three, a checkpoint and three more, in each of the ways to write and to go on."""
    ends = {}

    def run(name, strategy, callbacks=(), **kwargs):
        plugin, ema = plugin_for(precision), MasterWeightAveraging(0.9)
        options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "gradient_clip_val": 0.05}
        trainer = make_trainer(plugin, callbacks=[ema, *callbacks], **options)
        torch.manual_seed(0)
        module = Tiny()
        data = Rest(make_batches(12)[trainer.global_rank :: 2], 3)
        trainer.fit(module, data, **kwargs)
        assert plugin.real_steps == 6
        ends[name] = whole(module.net.state_dict())

    full, shards = directory / f"{precision}.ckpt", directory / f"{precision}_shards.ckpt"
    run("straight", fsdp2(), [SaveAt(full, 3)])
    run("straight again", fsdp2(save_distributed_checkpoint=True), [SaveAt(shards, 3)])
    run("fsdp2", fsdp2(), ckpt_path=full, weights_only=False)
    run("distributed", fsdp2(save_distributed_checkpoint=True), ckpt_path=shards, weights_only=False)
    run("ddp", DDPStrategy(), ckpt_path=full, weights_only=False)
    return ends


class Rest(torch.utils.data.DataLoader):
    """Batches as they are; those after `done` once a checkpoint is loaded."""

    def __init__(self, batches, done):
        super().__init__(batches, batch_size=None)
        self.batches, self.done, self.skip = batches, done, 0

    def __iter__(self):
        return iter(self.batches[self.skip :])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.skip = self.done


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x)


class Faulty(Sharded, Planted):
    """A block with a hand-written attention that fp16 does not hold."""


class LoudOnRank1(nn.Module):
    """Overflows in evaluation, on rank 1 alone."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        loud = not self.training and torch.distributed.get_rank() == 1
        return self.fc(x) * (1e6 if loud else 1.0)


class Validated(Faulty):
    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def train_validated():
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=256), fallback="auto")
    trainer = make_trainer(plugin, strategy=fsdp2(), devices=2, use_distributed_sampler=False)
    trainer.fit(Validated(LoudOnRank1), loader([batch()] * 4), loader([batch()] * 2))
    return plugin.real_steps, plugin.fp32_layers


def train_fault(fault):
    def run(plugin, **options):
        trainer = make_trainer(plugin, use_distributed_sampler=False, **options)
        module = Faulty(Block)
        trainer.fit(module, loader([batch()] * 12))
        return module, trainer

    policy = PrecisionPolicy("fp16", fp32=["attention"] if fault == "declared" else [])
    scaler = DynamicLossScaler(init_scale=256)
    plugin = MasterWeightPrecision(policy, scaler, fallback="auto")
    module, trainer = run(plugin, strategy=fsdp2(), devices=2)
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    plain, _ = run(MasterWeightPrecision("fp32"), strategy=fsdp2(), devices=2)
    return {
        "weights": whole(module.net.state_dict()),
        "layers": plugin.fp32_layers,
        "counts": counts,
        "loss": module.losses[-1],
        "plain_loss": plain.losses[len(module.losses) - 1],
    }


class CheckpointedNet(Net):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Built(Sharded, Planted):
    """Made in `configure_model`, as large models are."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def configure_model(self):
        if not self.sharded:
            torch.manual_seed(0)
            with torch.device("meta" if self.way == "meta" else "cpu"):
                self.net = (CheckpointedNet if self.way == "checkpointing" else Net)()
            super().configure_model()


class GivenInHalf(Sharded, TinyModule):
    """With a frozen network in bf16, one in TorchScript, and a learning rate that moves no bf16 weight."""

    def __init__(self, dtype=torch.bfloat16, unfreeze=False, mine=False):
        super().__init__(lambda params: torch.optim.SGD([p for p in params if p.requires_grad or unfreeze], lr=1e-4))
        self.net.bfloat16().to(dtype)
        layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)]
        self.teacher = nn.Sequential(*layers).bfloat16().requires_grad_(False).eval()
        self.scorer = torch.jit.script(nn.Linear(4, 4).requires_grad_(False))
        self.unfreeze, self.mine = unfreeze, mine

    def configure_model(self):
        if not self.mine:
            super().configure_model()
        elif not self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.sharded = True

    def training_step(self, batch, batch_idx):
        dtype = self.teacher[0].weight.dtype
        if self.unfreeze:
            self.teacher[0].requires_grad_(True)
        taught = self.teacher(torch.ones(2, 4, dtype=dtype)).float().sum() + self.scorer(torch.ones(2, 4)).float().sum()
        return super().training_step(batch, batch_idx) * (1 + taught * 1e-3)


def train_half(precision):
    found = {}
    for name, dtype in (("from fp32", torch.float32), ("from bf16", torch.bfloat16)):
        torch.manual_seed(0)
        module = GivenInHalf(dtype)
        given = {key: value.clone() for key, value in module.state_dict().items()}
        trainer = make_trainer(plugin_for(precision), strategy=fsdp2(), devices=2, use_distributed_sampler=False)
        trainer.fit(module, loader(make_batches(4)[trainer.global_rank :: 2]))
        found[name] = whole(module.net.state_dict())
    after = whole(module.state_dict())
    found["moved"] = float((after["net.proj.weight"] - given["net.proj.weight"].float()).abs().max())
    found["dtypes"] = {
        name: {value.dtype for key, value in after.items() if key.startswith(name) and value.is_floating_point()}
        for name in ("net", "teacher", "scorer")
    }
    frozen = [key for key in given if not key.startswith("net")]
    found["frozen as given"] = all(torch.equal(after[key], given[key]) for key in frozen)
    return found


def refused(mistake):
    strategy = fsdp2(data_parallel_size=1, tensor_parallel_size=2) if mistake == "tensor_parallel" else fsdp2()
    module = GivenInHalf(mine=mistake == "half", unfreeze=True) if "half" in mistake else Tiny()
    if "outside" in mistake:
        module = OwnGain(later="later" in mistake)
    module.sharded = mistake == "nothing"
    wrong = {"masters": {"masters": "split"}, "reduce_dtype": {"reduce_dtype": "fp32"}}
    plugin = MasterWeightPrecision("bf16", **wrong.get(mistake, {}))
    try:
        make_trainer(plugin, strategy=strategy, devices=2).fit(module, loader(make_batches(2)))
    except MisconfigurationException as error:
        return str(error)


def train_built(way):
    ends = []
    for each in (way, "plain"):
        plugin = MasterWeightPrecision("bf16")
        trainer = make_trainer(plugin, strategy=fsdp2(), devices=2, use_distributed_sampler=False)
        module = Built(each)
        trainer.fit(module, loader([batch()] * 4))
        ends.append(whole(module.net.state_dict()))
    if way == "meta":  # drawn in shards, so other numbers: finite, and not what an uninitialised memory holds
        spread = [float(value.abs().max()) for value in ends[0].values()]
        return {"error": 0.0 if 0.01 < max(spread) < 2 else 1.0, "steps": plugin.real_steps}
    error = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
    return {"error": error, "steps": plugin.real_steps}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    results = {
        (precision, scenario): train(precision, scenario, directory)
        for precision in PRECISIONS
        for scenario in SCENARIOS
    }
    for precision in PRECISIONS:
        results[precision, "resumed"] = resume(precision, directory)
    for fault in ("declared", "auto"):
        results["fault", fault] = train_fault(fault)
    for way in ("meta", "checkpointing"):
        results[way] = train_built(way)
    for precision in ("fp32", "bf16"):
        results["half", precision] = train_half(precision)
    results["validated"] = train_validated()
    for mistake in MISTAKES:
        results["refused", mistake] = refused(mistake)
    torch.save(results, directory / f"rank{torch.distributed.get_rank()}.pt")
