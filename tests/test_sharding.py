"""FSDP2 by policy, two processes over gloo. The file runs itself as the workers; the tests look at what they wrote."""

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from launch import launch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from planted import Attention, Mlp, Planted, batch
from reference import TinyModule, TinyNet, loader, make_batches, make_trainer, reference_train
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightAveraging, MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.sharding import shard_

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


def train(precision, scenario):
    plugin, ema = plugin_for(precision), MasterWeightAveraging(0.9)
    options = {"strategy": fsdp2(), "devices": 2, "callbacks": ema, "use_distributed_sampler": False}
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
def test_a_checkpoint_of_two_shards_resumes_everywhere(precision, runs):
    """Written in mid-run by FSDP2; resumed there, under DDP and on one device: the same end up to rounding."""
    results, directory = runs
    saved = torch.load(directory / f"{precision}.ckpt", weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert set(saved["averaged_state_dict"]) == set(saved["state_dict"])
    TinyModule(adamw).load_state_dict(saved["state_dict"])
    ends = results[0][precision, "resumed"]
    module, plugin = Tiny(), plugin_for(precision)
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": MasterWeightAveraging(0.9)}
    batches = loader(make_batches(12))
    make_trainer(plugin, **options).fit(module, batches, ckpt_path=directory / f"{precision}_one.ckpt")
    ends["one device"] = whole(module.net.state_dict())
    tolerance = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 2e-4}[precision]
    for way in ("fsdp2", "distributed", "ddp"):
        for name, value in ends["straight"].items():
            torch.testing.assert_close(ends[way][name], value, rtol=0, atol=1e-6 if way != "ddp" else tolerance)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    results = {(precision, scenario): train(precision, scenario) for precision in PRECISIONS for scenario in SCENARIOS}
    torch.save(results, directory / f"rank{torch.distributed.get_rank()}.pt")
