"""Two processes over gloo. The file runs itself as the workers; the tests compare what they wrote."""

import sys
from pathlib import Path

import pytest
import torch
from launch import launch
from lightning.pytorch.strategies import DDPStrategy
from planted import Attention, Planted, batch
from reference import TinyModule, TinyNet, loader, make_batches, make_trainer, reference_train

from lightning_mixprec import DynamicLossScaler, MasterWeightAveraging, MasterWeightPrecision

PRECISIONS = ["fp32", "bf16", "fp16"]
STRATEGIES = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_views": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
}
SCENARIOS = {"plain": (6, 0), "accumulate": (3, 0), "overflow": (2, 1)}  # real steps and skips of 6 batches a rank


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


class OverflowOnRank1(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and batch_idx == 1 else loss


class ManualTwo(TinyModule):
    """Two optimizers by hand; rank 1 overflows in the first network's gradient in its second batch."""

    def __init__(self, make_optimizer):
        super().__init__(make_optimizer)
        self.other = TinyNet()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [self.make_optimizer(self.net.parameters()), self.make_optimizer(self.other.parameters())]

    def training_step(self, batch, batch_idx):
        x, t, y = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = (net(x, t).float() - y).pow(2).mean()
            bad = net is self.net and self.global_rank == 1 and batch_idx == 1
            self.manual_backward(loss * float("inf") if bad else loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def train_manual(precision: str, masters: str) -> dict:
    plugin = MasterWeightPrecision(precision, masters=masters)
    options = {"strategy": "ddp_find_unused_parameters_true", "devices": 2, "use_distributed_sampler": False}
    trainer = make_trainer(plugin, **options)
    torch.manual_seed(trainer.global_rank)
    module = ManualTwo(adamw)
    trainer.fit(module, loader(make_batches(12)[trainer.global_rank :: 2]))
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    return {"weights": module.state_dict(), "counts": counts}


def train(precision: str, scenario: str) -> dict:
    scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
    plugin, ema = MasterWeightPrecision(precision, scaler=scaler), MasterWeightAveraging(0.9)
    options = {"strategy": "ddp", "devices": 2, "callbacks": ema, "use_distributed_sampler": False}
    if scenario != "plain":
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    trainer = make_trainer(plugin, **options)
    rank = trainer.global_rank
    torch.manual_seed(rank)  # different initial weights: DDP must make them rank 0's, low bits included
    module = (OverflowOnRank1 if scenario == "overflow" else TinyModule)(adamw)
    start = {name: value.clone() for name, value in module.net.state_dict().items()}
    trainer.fit(module, loader(make_batches(12)[rank::2]))
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    return {"start": start, "weights": module.net.state_dict(), "average": ema.averages, "counts": counts}


class OnRank1(Attention):
    """Overflows on rank 1 alone, in training or (`evaluation`) outside of it alone."""

    evaluation = False

    @property
    def gain(self):
        return 1e6 if torch.distributed.get_rank() == 1 and self.training != self.evaluation else 1.0


class OnRank1Evaluating(OnRank1):
    evaluation = True


class Ranked(Planted):
    def on_train_epoch_end(self):
        self.comm_hooks = len(self.trainer.strategy.model._comm_hooks)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).float().mean(), sync_dist=True)


def train_fallback(evaluation: bool, **options) -> dict:
    reduce_dtype = "fp32" if evaluation else "compute"  # the hook must follow the wrapper that is made anew
    scaler = DynamicLossScaler(init_scale=256)
    plugin = MasterWeightPrecision("fp16", scaler, fallback="auto", reduce_dtype=reduce_dtype)
    trainer = make_trainer(plugin, devices=2, max_epochs=3, use_distributed_sampler=False, **options)
    module = Ranked(OnRank1Evaluating if evaluation else OnRank1)
    x, y = batch()
    rank = trainer.global_rank
    trainer.fit(module, loader([(x + rank, y)] * 6), loader([(x, y)]))
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    dtypes = [layer.dtype for layer in plugin.plan.layers]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    result = {"weights": weights, "counts": counts, "layers": plugin.fp32_layers, "dtypes": dtypes}
    return {**result, "comm_hooks": module.comm_hooks}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    launch(__file__, 2, directory)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_agree_and_follow_the_plain_loop(precision, scenario, ranks):
    """Accumulation, clipping and an overflow on one rank only: the same decisions and weights on both."""
    one, two = (rank[precision, scenario] for rank in ranks)
    assert one["counts"] == two["counts"]
    for part in ("weights", "average"):
        for name, value in one[part].items():
            assert torch.equal(value, two[part][name]), name
    assert not torch.equal(one["start"]["proj.weight"], two["start"]["proj.weight"])

    scale = 1024.0 if precision == "fp16" else 1.0
    steps, skips = SCENARIOS[scenario]
    expected_scale = scale / 2 if skips and precision == "fp16" else scale
    assert one["counts"] == (expected_scale, steps, skips, steps)

    # One process over both ranks' batches, in windows twice as long, has the same mean gradient up to rounding.
    net = TinyNet()
    net.load_state_dict(one["start"])
    accumulate, clip = (2, None) if scenario == "plain" else (4, 0.05)
    options = {"accumulate": accumulate, "clip": clip, "scale": scale, "bad": {3} if skips else ()}
    expected, *_ = reference_train(net, make_batches(12), precision, adamw, **options)
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 2e-4}[precision]
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "masters"), [("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "split"), ("bf16", "split24")]
)
def test_manual_optimizers_agree_over_ranks(precision, masters, ranks):
    """An overflow in one rank's gradient of one optimizer: both skip it, once; the other optimizer steps."""
    one, two = (rank["manual", precision, masters] for rank in ranks)
    scale = 2.0**14 if precision == "fp16" else 1.0
    assert one["counts"] == two["counts"] == (scale, 6, 1, 11)
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_fault_on_one_rank_moves_the_layer_on_all(strategy, evaluation, ranks):
    one, two = (rank["fallback", strategy, evaluation] for rank in ranks)
    assert one["layers"] == two["layers"] == ["net.blocks.5"]
    assert one["counts"] == two["counts"]
    assert one["counts"][1:3] == ((18, 0) if evaluation else (17, 1))
    assert one["dtypes"] == two["dtypes"]
    assert one["comm_hooks"] == two["comm_hooks"] == 1  # of the wrapper that was made anew
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name


if __name__ == "__main__":
    results = {(precision, scenario): train(precision, scenario) for precision in PRECISIONS for scenario in SCENARIOS}
    for mode in (("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "split"), ("bf16", "split24")):
        results["manual", *mode] = train_manual(*mode)
    for name, kwargs in STRATEGIES.items():
        for evaluation in (False, True):
            results["fallback", name, evaluation] = train_fallback(evaluation, strategy=DDPStrategy(**kwargs))
    torch.save(results, Path(sys.argv[1]) / f"rank{torch.distributed.get_rank()}.pt")
