"""Every way to run DDP trains as one process does that has the ranks' batches as its micro-batches.

The file runs itself as the workers: under SLURM's environment variables, and as Lightning's own launchers start it.
"""

import os
import sys
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import lightning as L
import pytest
import torch
from forked import run
from launch import launch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from reference import Resumable, SaveAfter, TinyModule, assert_same, make_batches, make_trainer, snapshot
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision

PRECISIONS = [("fp32", "compute"), ("bf16", "compute"), ("bf16", "fp32"), ("fp16", "compute"), ("fp16", "fp32")]
WRAPPERS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "find_unused_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
# Batches a rank, batches a step, and whether it is clipped. The last window of "windows" has one batch of three.
LOOPS = {
    "steps": (4, 1, False),
    "windows": (7, 3, True),
    "overflow": (6, 3, False),
    "manual": (6, 2, True),
    "no_sync": (6, 2, True),
}
LAUNCHED = [("fp32", "compute"), ("bf16", "fp32")]
TOLERANCE = {("fp32", "compute"): 1e-5, ("bf16", "compute"): 2e-3, ("bf16", "fp32"): 2e-3}
TOLERANCE |= {("fp16", "compute"): 4e-4, ("fp16", "fp32"): 4e-4}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Variant(TinyModule):
    """Its `spare` layer takes part in some batches only, if it may; batch 2 of all, rank 1's first, may overflow."""

    def __init__(self, loop, ranks, may_be_unused, done=5):
        super().__init__(sgd)
        self.loop, self.ranks, self.may_be_unused, self.done = loop, ranks, may_be_unused, done
        self.spare = nn.Linear(4, 4)
        self.automatic_optimization = loop not in ("manual", "no_sync")

    def train_dataloader(self):
        return OfRank(LOOPS[self.loop][0], self.trainer.global_rank, self.ranks, done=self.done)

    def training_step(self, batch, batch_idx):
        x, t, y = batch
        if not self.may_be_unused or float(y[0, 0, 0, 0]) > 0.5:
            t = t + self.spare(t).float()
        loss = super().training_step((x, t, y), batch_idx)
        first = batch_idx * self.ranks + (self.trainer.global_rank if self.ranks == 2 else 0) == 1
        if self.automatic_optimization:
            return loss * float("inf") if first and self.loop == "overflow" else loss
        window = LOOPS[self.loop][1] * (2 // self.ranks)
        last = (batch_idx + 1) % window == 0
        alone = self.loop == "no_sync" and self.ranks == 2 and not last
        with self.trainer.strategy.block_backward_sync() if alone else nullcontext():
            self.manual_backward(loss / window)
        if last:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Record(L.Callback):
    """Writes what a rank has at the end; ranks that were spawned do not come back."""

    def __init__(self, directory, name):
        self.directory, self.name = directory, name

    def on_train_end(self, trainer, module):
        plugin = trainer.precision_plugin
        counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
        state = {"weights": module.state_dict(), "counts": counts, "environment": environment(trainer)}
        torch.save(state, Path(self.directory) / f"{self.name}-rank{trainer.global_rank}.pt")


class OfRank(Resumable):
    """Batches as they are, every second one, or all of them where there is one process."""

    def __init__(self, count, rank=0, ranks=1, done=0):
        super().__init__(done)
        self.batches = make_batches(2 * count, seed=3)[rank::ranks]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[self.skip :])


def environment(trainer) -> str:
    return type(getattr(trainer.strategy, "cluster_environment", None)).__name__


def fit(precision, reduce_dtype, loop, may_be_unused, ranks=2, callbacks=(), **options):
    _, window, clip = LOOPS[loop]
    scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
    plugin = MasterWeightPrecision(precision, scaler=scaler, reduce_dtype=reduce_dtype)
    if loop not in ("manual", "no_sync"):
        options |= {"accumulate_grad_batches": window * (2 // ranks), "gradient_clip_val": 0.05 if clip else None}
    trainer = make_trainer(plugin, devices=ranks, use_distributed_sampler=False, callbacks=list(callbacks), **options)
    torch.manual_seed(0)
    module = Variant(loop, ranks, may_be_unused)
    trainer.fit(module)
    return module, plugin, trainer


@cache
def one_process(precision, loop, may_be_unused):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module, plugin, trainer = fit(precision, "fp32", loop, may_be_unused, ranks=1)
    torch.set_num_threads(threads)
    counts = (plugin.loss_scale, plugin.real_steps, plugin.skipped_steps, trainer.global_step)
    return snapshot(module), counts


def assert_right(ranks, mode, loop, may_be_unused):
    """Both ranks have the same bits, and what one process has; with fp32 on the way, nearly to the bit."""
    one, two = ranks
    assert_same(one["weights"], two["weights"])
    weights, counts = one_process(mode[0], loop, may_be_unused)
    assert one["counts"] == two["counts"] == counts
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=TOLERANCE[mode], msg=name)


def load(directory, name):
    return [torch.load(directory / f"{name}-rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slurm")
    launch(__file__, 2, directory, "slurm")
    return directory


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Started once, without a cluster's variables: Lightning starts the other rank, or both."""
    directory = tmp_path_factory.mktemp("launched")
    for how in ("script", "processes"):
        started = run(__file__, directory, how)
        assert started.returncode == 0, started.output[-4000:]
    return directory


def scenarios():
    """All loops under all wrappers where the most can go wrong; elsewhere under the simplest and the hardest."""
    for mode in PRECISIONS:
        for loop in LOOPS:
            for wrapper in WRAPPERS if mode in LAUNCHED else ("plain", "find_unused_views"):
                # torch cannot keep the first backward of a static graph to itself
                if (loop, wrapper) != ("no_sync", "static_graph"):
                    yield mode, loop, wrapper


@pytest.mark.parametrize(("mode", "loop", "wrapper"), list(scenarios()), ids=lambda each: str(each))
def test_two_ranks_train_as_one_process_does(mode, loop, wrapper, slurm):
    ranks = load(slurm, f"{mode[0]}-{mode[1]}-{loop}-{wrapper}")
    assert [rank["environment"] for rank in ranks] == ["SLURMEnvironment"] * 2
    assert_right(ranks, mode, loop, wrapper.startswith("find_unused"))


@pytest.mark.parametrize(
    ("how", "mode"),
    [*product(["ddp", "ddp_fork"], LAUNCHED), ("ddp_spawn", LAUNCHED[1])],
)
def test_lightnings_own_launchers_train_as_one_process_does(how, mode, launched):
    ranks = load(launched, f"{mode[0]}-{how}")
    assert_right(ranks, mode, "windows", may_be_unused=False)
    after_fit = torch.load(launched / f"{mode[0]}-{how}.pt")  # what the process has that called `fit`
    assert_same(after_fit, ranks[0]["weights"])


@pytest.mark.parametrize("mode", PRECISIONS)
@pytest.mark.parametrize("how", ["resumed", "resumed within"])
def test_a_checkpoint_inside_a_window_holds_what_all_ranks_have(how, mode, slurm):
    """Rank 0 writes it; the mean over ranks is what the window goes on with. A batch that is run again counts once."""
    uninterrupted, resumed = (load(slurm, f"{name}-{mode[0]}-{mode[1]}") for name in ("uninterrupted", how))
    assert_same(resumed[0]["weights"], resumed[1]["weights"])
    assert resumed[0]["counts"] == uninterrupted[0]["counts"]
    for name, value in resumed[0]["weights"].items():
        torch.testing.assert_close(value, uninterrupted[0]["weights"][name], rtol=0, atol=TOLERANCE[mode], msg=name)


class SaveWithin(L.Callback):
    """Saves a checkpoint to `path` after the backward of a batch, which Lightning has not counted then."""

    def __init__(self, path, batches):
        self.path, self.batches = path, batches

    def on_after_backward(self, trainer, pl_module):
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == self.batches:
            trainer.save_checkpoint(self.path)


def resume(directory, precision, reduce_dtype):
    """Train 7 batches in windows of 3, and again from a checkpoint after the 5th, with other weights at the start."""
    path, within = (directory / f"{precision}-{reduce_dtype}{name}.ckpt" for name in ("", "-within"))
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": 3}
    for name, ckpt_path in (("uninterrupted", None), ("resumed", path), ("resumed within", within)):
        scaler = DynamicLossScaler(init_scale=1024) if precision == "fp16" else None
        plugin = MasterWeightPrecision(precision, scaler=scaler, reduce_dtype=reduce_dtype)
        callbacks = [Record(directory, f"{name}-{precision}-{reduce_dtype}")]
        callbacks += [] if ckpt_path else [SaveAfter(path, 5), SaveWithin(within, 5)]
        trainer = make_trainer(plugin, callbacks=callbacks, **options)
        torch.manual_seed(0 if ckpt_path is None else 1)
        trainer.fit(Variant("windows", 2, False, done=4 if ckpt_path == within else 5), ckpt_path=ckpt_path)


def become_slurm() -> None:
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    os.environ["MASTER_PORT"] = port
    assert SLURMEnvironment.detect()


def main(directory: Path, how: str) -> None:
    if how == "slurm":
        become_slurm()
        for mode, loop, wrapper in scenarios():
            record = Record(directory, f"{mode[0]}-{mode[1]}-{loop}-{wrapper}")
            strategy = DDPStrategy(**WRAPPERS[wrapper])
            fit(*mode, loop, wrapper.startswith("find_unused"), callbacks=[record], strategy=strategy)
        for mode in PRECISIONS:
            resume(directory, *mode)
    for strategy in {"script": ["ddp"], "processes": ["ddp_fork", "ddp_spawn"]}.get(how, []):
        for mode in LAUNCHED if strategy != "ddp_spawn" else LAUNCHED[1:]:
            record = Record(str(directory), f"{mode[0]}-{strategy}")
            module, _, trainer = fit(*mode, "windows", False, callbacks=[record], strategy=strategy)
            if trainer.global_rank == 0:
                torch.save(snapshot(module), directory / f"{mode[0]}-{strategy}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
