"""One rank fails, or does less than the others: all processes end, soon, with an error that says what happened.

The file runs itself as one worker process, which forks two ranks for each scenario, so that torch is imported once.
"""

import multiprocessing
import os
import re
import socket
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from forked import run
from lightning.pytorch.strategies import DDPStrategy
from reference import TinyModule, assert_same, loader, make_batches, make_trainer

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision

AT_ONCE = 20  # seconds; processes that wait for each other end after the timeout of 60, by an error of gloo
LOST = r"Connection (closed|reset) by peer"
PLACES = (
    r"The ranks step at different places, between \(batch 3, optimizer 0, without gradients\) "
    r"and \(batch 3, optimizer 0, with gradients\)"
)
MISSED = r"Rank 1 has made no backward in training batch {} \(from 1\), in which rank 0 waits for it"
# What rank 1 does in its 3rd batch, or its last: exit codes, and what rank 0 and rank 1 say.
FAILURES = {
    "raises": ((1, 1), LOST, "ValueError: the data of rank 1 are broken"),
    "raises, accumulating": ((1, 1), LOST, "ValueError: the data of rank 1 are broken"),
    "raises, manual": ((1, 1), LOST, "ValueError: the data of rank 1 are broken"),
    "dies": ((1, 7), LOST, ""),
    "dies, manual": ((1, 7), LOST, ""),
    "returns None": ((1, 1), LOST, "returning None in distributed training is not supported"),
    "returns None, accumulating": ((1, 1), LOST, "returning None in distributed training is not supported"),
    "returns None, manual": ((1, 1), LOST, MISSED.format(3)),
    "returns None at last, manual": ((1, 1), LOST, MISSED.format(6)),
    "steps without backward, manual": ((1, 1), LOST, MISSED.format(3)),
    "clears its gradients, manual": ((1, 1), PLACES, PLACES),
    "plain backward, manual": ((1, 1), r"self\.manual_backward", r"self\.manual_backward"),
}
UNEVEN = r"Rank 1 goes on with another training batch in epoch {} \(from 0\), in which it waits for rank 0"
for scenario in ("has more batches", "has more batches, accumulating", "has more batches, manual"):
    FAILURES[scenario] = ((1, 1), UNEVEN.format(0), LOST)
# What is no failure: real steps and skips of six batches.
ENDURED = {
    "two epochs": (12, 0),
    "two epochs, manual": (12, 0),
    "stops where rank 0 has its last batch": (4, 0),
    "both return None, manual": (5, 0),
    "misses a micro-batch, manual": (3, 0),
    "writes inf into a gradient, manual": (5, 1),
}


class Failing(TinyModule):
    def __init__(self, scenario):
        super().__init__()
        self.scenario = scenario
        self.automatic_optimization = "manual" not in scenario

    def training_step(self, batch, batch_idx):
        does = self.scenario.partition(",")[0] if batch_idx == (5 if "at last" in self.scenario else 2) else ""
        if self.global_rank == 0 and not does.startswith("both"):
            does = does if does == "plain backward" else ""
        if does == "raises":
            raise ValueError("the data of rank 1 are broken")
        if does == "dies":
            os._exit(7)
        if "None" in does:
            return None
        loss = super().training_step(batch, batch_idx)
        return self.by_hand(loss, batch_idx, does) if not self.automatic_optimization else loss

    def by_hand(self, loss, batch_idx, does):
        optimizer = self.optimizers()
        if does == "plain backward":
            loss.backward()
        alone = self.scenario.startswith("misses") and batch_idx % 2 == 0
        with self.trainer.strategy.block_backward_sync() if alone else nullcontext():
            if not does.startswith(("steps without", "misses")):
                self.manual_backward(loss)
        if does.startswith("clears"):
            optimizer.zero_grad()
        if does.startswith("writes"):
            self.net.proj.weight.grad[0] = float("inf")
        if not alone:
            optimizer.step()
            optimizer.zero_grad()


def rank_of(scenario: str, rank: int, port: int, directory: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    with open(directory / f"{scenario}-{rank}.txt", "w") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    torch.manual_seed(0)
    plugin = MasterWeightPrecision("bf16", scaler=DynamicLossScaler(init_scale=64) if "inf" in scenario else None)
    trainer = make_trainer(
        plugin,
        strategy=DDPStrategy(timeout=timedelta(seconds=60)),
        devices=2,
        use_distributed_sampler=False,
        max_epochs=2 if scenario.startswith(("has more", "two")) else 1,
        max_steps=4 if scenario.startswith("stops") else -1,
        accumulate_grad_batches=2 if "accumulating" in scenario else 1,
    )
    module = Failing(scenario)
    batches = make_batches(12)[rank::2]
    if scenario.startswith(("has more", "stops")) and rank == 0:
        batches = batches[:4]
    trainer.fit(module, loader(batches))
    state = {"weights": module.state_dict(), "counts": (plugin.real_steps, plugin.skipped_steps, plugin.loss_scale)}
    torch.save(state, directory / f"{scenario}-{rank}.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("outcomes")
    worker = run(__file__, directory)
    assert worker.returncode == 0, worker.output[-4000:]
    return directory, torch.load(directory / "outcomes.pt")


@pytest.mark.parametrize("scenario", FAILURES)
def test_all_ranks_end_soon_and_say_why(scenario, outcomes):
    directory, found = outcomes
    exit_codes, *patterns = FAILURES[scenario]
    assert found[scenario][0] == exit_codes
    assert found[scenario][1] < AT_ONCE
    for rank, pattern in enumerate(patterns):
        said = (directory / f"{scenario}-{rank}.txt").read_text()
        assert re.search(pattern, said), said[-2000:]


@pytest.mark.parametrize("scenario", ENDURED)
def test_what_is_no_failure_goes_on_alike(scenario, outcomes):
    directory, found = outcomes
    assert found[scenario][0] == (0, 0), (directory / f"{scenario}-1.txt").read_text()[-2000:]
    one, two = (torch.load(directory / f"{scenario}-{rank}.pt") for rank in range(2))
    assert_same(one["weights"], two["weights"])
    scale = 32.0 if "inf" in scenario else 1.0
    assert one["counts"] == two["counts"] == (*ENDURED[scenario], scale)


def test_a_rank_that_dies_ends_the_run_that_lightning_launched(tmp_path):
    start = time.monotonic()
    ended = run(__file__, tmp_path, "dies", timeout=120)
    assert ended.returncode != 0
    assert time.monotonic() - start < 60
    assert not (tmp_path / "end").exists()


def main(directory: Path) -> None:
    fork = multiprocessing.get_context("fork")
    outcomes = {}
    for scenario in (*FAILURES, *ENDURED):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start = time.monotonic()
        ranks = [fork.Process(target=rank_of, args=(scenario, rank, port, directory)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=90)
        codes = tuple(rank.exitcode for rank in ranks)
        for rank in ranks:
            rank.kill()
        outcomes[scenario] = (codes, time.monotonic() - start)
    torch.save(outcomes, directory / "outcomes.pt")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        trainer = make_trainer(MasterWeightPrecision("bf16"), strategy="ddp", devices=2, use_distributed_sampler=False)
        trainer.fit(Failing(sys.argv[2]), loader(make_batches(6)))
        (Path(sys.argv[1]) / "end").touch()
