"""The recipes on several processes: who trains on what, where it goes, and how it ends.

Most of it is one pair of processes over gloo, in which the file runs itself; the rest is the command line as typed.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from few_digits import FEW
from forked import Forked
from hydra import compose, initialize_config_dir
from launch import launch
from lightning.fabric.plugins.environments import SLURMEnvironment
from test_recipes import ROOT, assert_same, checkpoint, cli, events, scalars

from recipes import command_line
from recipes.config import ConfigError
from recipes.data import DigitsDataModule
from recipes.loading import even_batches
from recipes.objective import EDM
from recipes.randomness import SHUFFLE, keyed_generator, validation_draws
from recipes.unet import UNet

TINY = ["model=unet_tiny", "sampler.steps=2", "callbacks.samples.per_class=1", "trainer.log_every_n_steps=1"]
FOUR = ["precision=fp32", "trainer=cpu_ranks", "trainer.max_steps=4", "trainer.val_check_interval=3"]


def probe(directory: Path, **options: Any) -> list[str]:
    settings = {"_target_": "probe.Probe", "directory": directory, **options}
    return [f"+callbacks.probe.{key}={value}" for key, value in settings.items()]


# What the pair of processes does


def work(directory: Path) -> None:
    rank, statuses = int(os.environ["RANK"]), {}

    def run(name: str, *arguments: str, place: str | None = None) -> None:
        where = [f"hydra.run.dir={directory / (place or name)}"] if place != "" else []
        with pytest.MonkeyPatch.context() as patch:
            statuses[name] = cli(patch, *TINY, *FOUR, *arguments, *where)

    for strategy in ("ddp", "fsdp2"):
        run(strategy, f"strategy={strategy}", *probe(directory / f"{strategy}_drawn"))
    # On with other batches, in the middle of the epoch.
    ddp = [f"ckpt_path={directory}/ddp/checkpoints/last.ckpt", "trainer.max_steps=6"]
    others = ["data.batch_size=64", "trainer.accumulate_grad_batches=2"]
    run("others", "strategy=ddp", *ddp, *others, *probe(directory / "others_drawn"))
    accumulate = ["trainer.accumulate_grad_batches=2", "trainer.max_steps=2"]
    run("accumulated", *accumulate, *probe(directory / "accumulated_drawn"))

    # The same command again, but for what the probe does.
    stop = probe(directory / "stopped_drawn", rank=1, batch=2, action="SIGTERM")
    run("stopped", "strategy=ddp", "ckpt_path=auto", *stop, place="preempted")
    statuses["saved"] = checkpoint(directory / "preempted")["global_step"]
    run("resumed", "strategy=ddp", "ckpt_path=auto", *probe(directory / "resumed_drawn"), place="preempted")

    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    slurm = {"JOB_ID": "17", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    slurm |= {"PROCID": str(rank), "LOCALID": str(rank), "JOB_NAME": "train"}
    os.environ |= {f"SLURM_{key}": value for key, value in slurm.items()}
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ['PATH']}"  # with a `scontrol`
    os.chdir(directory)
    stop = probe(directory / "slurm_stopped_drawn", rank=1, batch=2, action="SIGUSR1")
    run("slurm_stopped", "strategy=fsdp2", "ckpt_path=auto", *stop, place="")
    run("slurm_resumed", "strategy=fsdp2", "ckpt_path=auto", *probe(directory / "slurm_resumed_drawn"), place="")
    (directory / f"rank{rank}.json").write_text(json.dumps(statuses))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    scontrol = directory / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {directory}/requeued\n')
    scontrol.chmod(0o755)
    launch(__file__, 2, directory)
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe in one process."""
    directory = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        run = [*FOUR, "trainer=default", "trainer.accelerator=cpu", f"hydra.run.dir={directory}/run"]
        assert cli(patch, *TINY, *run, *probe(directory / "drawn")) == 0
    return directory


def statuses(pair: Path, name: str) -> list[int]:
    return [json.loads((pair / f"rank{rank}.json").read_text())[name] for rank in range(2)]


def drawn(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    return torch.load(directory / f"rank{rank}.pt")


def assert_one_run(run: Path, step: int) -> None:
    """One event file, one Hydra record, checkpoints and samples of one process."""
    events(run)
    assert len([*run.rglob("overrides.yaml")]) == len([*run.rglob("hparams.yaml")]) == 1
    assert checkpoint(run)["global_step"] == step
    assert json.loads((run / "result.json").read_text())["steps"] == step
    assert (run / "samples" / f"step{step:06d}.png").is_file()


# Random numbers and data


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_draw_other_numbers_and_reruns_the_same(pair: Path, alone: Path, strategy: str) -> None:
    one, two = (drawn(pair / f"{strategy}_drawn", rank) for rank in range(2))
    assert [batch["step"] for batch in one] == [batch["step"] for batch in two] == [0, 1, 2, 3]
    seen = [batch[key].flatten()[:64] for batch in [*one, *two] for key in ("sigma", "noise")]
    assert len(torch.stack(seen).unique(dim=0)) == len(seen)
    dropped = [(batch["labels"] == 10).nonzero().flatten().tolist() for batch in [*one, *two]]
    assert len({tuple(rows) for rows in dropped}) == len(dropped)
    # A function of (seed, rank, step): not of the strategy, nor of how many ranks there are.
    for again in (drawn(pair / "ddp_drawn"), drawn(alone / "drawn")):
        for mine, theirs in zip(one, again, strict=True):
            assert torch.equal(mine["sigma"], theirs["sigma"][:64])


def test_every_step_sees_the_same_images_however_many_share_them(pair: Path, alone: Path) -> None:
    expected = [batch["index"].tolist() for batch in drawn(alone / "drawn")]
    assert [len(batch) for batch in expected] == [128] * 4
    for name, size in (("ddp", 64), ("fsdp2", 64), ("accumulated", 32)):
        ranks = [drawn(pair / f"{name}_drawn", rank) for rank in range(2)]
        assert {len(batch["index"]) for rank in ranks for batch in rank} == {size}
        steps: dict[int, list[int]] = {}
        for batch in [batch for rank in ranks for batch in rank]:
            steps.setdefault(batch["step"], []).extend(batch["index"].tolist())
        assert [sorted(step) for step in steps.values()] == [sorted(step) for step in expected[: len(steps)]]


def test_validation_loss_does_not_depend_on_the_processes(pair: Path, alone: Path) -> None:
    data = DigitsDataModule()
    data.setup()
    noise, normal = validation_draws(torch.arange(len(data.val)), (1, 8, 8))
    for run in (pair / "ddp", pair / "fsdp2", pair / "accumulated", alone / "run"):
        for entry, tag in {"averaged_state_dict": "val/loss", "state_dict": "val/loss_raw"}.items():
            net = UNet(1, 10, [8, 16])
            net.load_state_dict({k.removeprefix("net."): v for k, v in checkpoint(run)[entry].items()})
            with torch.no_grad():
                expected = EDM().loss(net, data.val.images, data.val.labels, EDM().times(normal), noise).mean()
            assert list(scalars(run, tag).values())[-1] == pytest.approx(float(expected), rel=1e-5), (run.name, tag)


@pytest.mark.parametrize(("length", "ranks", "size"), [(360, 7, 16), (5, 2, 1), (4, 2, 1), (9, 4, 8)])
def test_validation_batches_are_as_many_on_every_rank(length: int, ranks: int, size: int) -> None:
    shares = [even_batches(length, rank, ranks, size) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1
    assert sorted(row for batches in shares for batch in batches for row in batch) == list(range(length))
    assert {len(batch) > 0 for batches in shares for batch in batches} == {True}
    assert max(len(batch) for batches in shares for batch in batches) <= max(size, 2)


# Runs and checkpoints


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_leave_one_run(pair: Path, strategy: str) -> None:
    assert statuses(pair, strategy) == [0, 0]
    assert_one_run(pair / strategy, step=4)
    assert list(scalars(pair / strategy, "val/loss")) == [3, 4]


def test_shards_train_as_replicas_do(pair: Path) -> None:
    """Weights and averages alike; in plain files that one process reads."""
    ours, theirs = checkpoint(pair / "fsdp2"), checkpoint(pair / "ddp")
    for entry in ("state_dict", "averaged_state_dict"):
        UNet(1, 10, [8, 16]).load_state_dict({k.removeprefix("net."): v for k, v in ours[entry].items()})
        for name, value in ours[entry].items():
            torch.testing.assert_close(value, theirs[entry][name], rtol=0, atol=1e-5)


def test_a_preempted_run_resumes_bit_for_bit_by_the_same_command(pair: Path) -> None:
    assert statuses(pair, "stopped") == [128 + signal.SIGTERM, 0]  # rank 0 speaks for all
    assert statuses(pair, "saved") == [2, 2]
    assert statuses(pair, "resumed") == [0, 0]
    assert [batch["step"] for batch in drawn(pair / "resumed_drawn", rank=1)] == [2, 3]
    whole, resumed = checkpoint(pair / "ddp"), checkpoint(pair / "preempted")
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], resumed[entry], entry)


def test_with_other_batches_ranks_go_on_with_the_images_that_none_has_seen(pair: Path) -> None:
    """Two steps of 64 after four of 128, each of two batches of 16 on each rank."""
    assert statuses(pair, "others") == [0, 0]
    (order,) = torch.randperm(1437, generator=keyed_generator(SHUFFLE, 0, 0)).split(1437)
    seen: dict[int, list[int]] = {}
    for batch in (batch for rank in range(2) for batch in drawn(pair / "others_drawn", rank)):
        assert len(batch["index"]) == 16
        seen.setdefault(batch["step"], []).extend(batch["index"].tolist())
    assert {step: sorted(rows) for step, rows in seen.items()} == {
        4: sorted(order[512:576].tolist()),
        5: sorted(order[576:640].tolist()),
    }


def test_a_slurm_job_is_requeued_and_finds_itself(pair: Path) -> None:
    """SIGUSR1 on rank 1 of an FSDP2 run: a checkpoint, one requeue, the same directory, the same end."""
    assert statuses(pair, "slurm_stopped") == [128 + signal.SIGUSR1, 0]
    assert (pair / "requeued").read_text() == "requeue 17\n"
    assert statuses(pair, "slurm_resumed") == [0, 0]
    assert [path.name for path in (pair / "outputs" / "digits_unet").iterdir()] == ["slurm_17"]
    run = pair / "outputs" / "digits_unet" / "slurm_17"
    assert not [*run.rglob("hpc_ckpt*")]  # what Lightning's own handler writes
    assert [batch["step"] for batch in drawn(pair / "slurm_resumed_drawn")] == [2, 3]
    whole, resumed = checkpoint(pair / "fsdp2"), checkpoint(run)
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(whole[entry], resumed[entry], entry)


# The command line as typed


def start(command: list[str], directory: Path, **environment: str) -> Forked:
    return Forked("-m", *command, cwd=directory, environment=environment)


def finish(process: Forked) -> str:
    process.wait(timeout=120)
    return process.output


def test_fsdp2_on_two_processes_of_one_command(tmp_path: Path) -> None:
    command = ["recipes.train", "strategy=fsdp2", "trainer.devices=2", "trainer.accelerator=cpu", "model=dit_tiny"]
    length = ["trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.limit_train_batches=4"]
    process = start([*command, *TINY, *FEW, *length, "trainer.accumulate_grad_batches=2"], tmp_path)
    shown = finish(process)
    assert process.returncode == 0, shown[-3000:]
    assert "= 8 per batch x 2 process(es) x 2 accumulated; 2 steps per epoch, 2 in all\n" in shown
    assert "steps            2\n" in shown
    assert shown.count("validation loss") == 1
    (run,) = (tmp_path / "outputs" / "digits_unet").iterdir()
    assert_one_run(run, step=2)


def test_two_nodes_under_torchrun_share_one_directory(tmp_path: Path) -> None:
    """Without being told one, and though their clocks may differ."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["torch.distributed.run", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    train = ["-m", "recipes.train", "trainer=cpu_cluster", "trainer.max_steps=2", "precision=fp32", *TINY, *FEW]
    nodes = [
        start([*torchrun, f"--node-rank={node}", *train], tmp_path, TZ=zone)
        for node, zone in enumerate(["UTC", "JST-9"])
    ]
    shown = [finish(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], shown[0][-3000:] + shown[1][-3000:]
    assert sum(text.count("validation loss") for text in shown) == 1
    (run,) = (tmp_path / "outputs" / "digits_unet").iterdir()
    assert_one_run(run, step=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_run_with_an_error(tmp_path: Path, rank: int) -> None:
    failing = probe(tmp_path / "drawn", rank=rank, batch=2, action="raise")
    run = ["precision=fp32", "trainer=cpu_ranks", f"hydra.run.dir={tmp_path}/run", *TINY, *FEW, "~callbacks.samples"]
    process = start(["recipes.train", *[o for o in run if "samples." not in o], *failing], tmp_path)
    shown = finish(process)  # in bounded time, or this raises
    assert process.returncode != 0
    assert "RuntimeError: planted" in shown
    assert not [*tmp_path.rglob("*.ckpt")]
    assert not [*tmp_path.rglob("result.json")]


def test_a_sweep_of_two_processes_runs_each_job_once(tmp_path: Path) -> None:
    """The failed one ends nothing but itself."""
    sweep = ["-m", "trainer=cpu_ranks", "trainer.max_steps=2", "optimizer.lr=-1,1e-3", f"hydra.sweep.dir={tmp_path}/s"]
    process = start(["recipes.train", "precision=fp32", *sweep, *TINY, *FEW], tmp_path)
    shown = finish(process)
    assert process.returncode == 1, shown[-3000:]
    assert "1 of 2 jobs ended well" in shown
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0", "1", "multirun.yaml", "results.csv"]
    assert_one_run(tmp_path / "s" / "1", step=2)
    with (tmp_path / "s" / "results.csv").open() as file:
        bad, good = csv.DictReader(file)
    assert (bad["job"], bad["status"], bad["validation_loss"]) == ("0", "2", "")
    assert (good["job"], good["status"], good["steps"]) == ("1", "0", "2")
    assert "optimizer.lr=-1" in bad["overrides"]
    assert float(good["validation_loss"]) == pytest.approx(list(scalars(tmp_path / "s" / "1", "val/loss").values())[-1])


# Launchers and what is refused


def launcher(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", ["hydra/launcher=slurm", *overrides], return_hydra_config=True).hydra.launcher


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], (1, 1, 1)), (["trainer=cluster"], (2, 8, 8)), (["trainer=cluster", "trainer.num_nodes=70"], (70, 8, 8))],
)
def test_slurm_is_asked_for_what_the_trainer_expects(overrides: list[str], expected: tuple[int, int, int]) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    asked = launcher(*overrides)
    assert (asked.nodes, asked.tasks_per_node, asked.gpus_per_node) == expected
    assert asked._target_.endswith("SlurmLauncher")


REFUSED = {
    "hydra/launcher=slurm": ["Add -m"],
    "-m hydra/launcher=slurm trainer=gpus": ["trainer.devices=auto", "trainer.devices=NUMBER"],
    "-m hydra/launcher=slurm trainer.devices=1,2": ["trainer.devices=1,2", "for each size"],
    "trainer=cpu_cluster": ["trainer.num_nodes=2", "torchrun --nnodes=2 --nproc-per-node=1"],
    "trainer=cpu_ranks data.batch_size=127": ["data.batch_size=127", "2 process(es) x 1", "Choose 126 or 128"],
    "data.batch_size=128 trainer.accumulate_grad_batches=3": ["1 process(es) x 3", "Choose 126 or 129"],
    "trainer=cpu_ranks data.batch_size=1": ["data.batch_size=1 images per step", "Choose 2."],
    "trainer.limit_train_batches=3 trainer.accumulate_grad_batches=2": ["limit_train_batches=3", "Choose 2 or 4"],
    "trainer=cpu_ranks data.batch_size=722 trainer.devices=361": ["361 processes", "360 validation samples"],
    "trainer=cpu_ranks strategy=fsdp2 precision.masters=split": ["masters=split", "masters=fp32, or strategy=ddp"],
    "trainer=cpu_ranks strategy=ddp strategy.start_method=spawn": ["start_method=spawn: what comes of the run would"],
    "strategy._target_=torch.nn.Linear": ["To choose a class of your own: +strategy._target_=CLASS"],
    "+callbacks.a._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler callbacks.a.scheduling={4:2}": [
        "data.batch_size is the batch of every step"
    ],
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_not_train_as_configured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, "model=unet_tiny", *line.split()) == 2
    shown = capfd.readouterr()
    message = shown.err[shown.err.index("error: ") :]
    assert all(text in message for text in REFUSED[line]), message
    assert "Traceback" not in shown.out + shown.err
    assert not [*tmp_path.rglob("events.out.*")]


def test_slurm_without_its_plugin_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli(monkeypatch, "-m", "hydra/launcher=slurm") == 2
    assert "pip install 'lightning_mixprec[slurm]'" in capfd.readouterr().err


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0"}
SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "2"}
SLURM |= {"SLURM_JOB_NAME": "train", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        (TORCHRUN, [], "hydra.run.dir=outputs/NAME"),  # without torchrun's own store, nothing to agree in
        ({"NODE_RANK": "0"}, [], "hydra.run.dir=outputs/NAME"),
        (TORCHRUN, ["-m", "seed=1,2"], "every process would run the whole sweep"),
        (SLURM, ["-m", "seed=1,2"], "every process would run the whole sweep"),
        (TORCHRUN, ["hydra.run.dir=RUN"], "trainer.devices=1: 2 processes were started, and each would train alone"),
        (SLURM, ["hydra.run.dir=RUN"], "trainer.devices=1: 2 processes were started, and each would train alone"),
        (SLURM, ["hydra.run.dir=RUN", "trainer.devices=3"], "trainer.devices=3 and trainer.num_nodes=1"),
    ],
)
def test_processes_from_outside_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    environment: dict[str, str],
    arguments: list[str],
    expected: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = [argument.replace("RUN", str(tmp_path)) for argument in arguments]
    assert cli(monkeypatch, "model=unet_tiny", "trainer.accelerator=cpu", *given) == 2
    assert expected in capfd.readouterr().err


def test_steps_of_one_slurm_job_have_directories_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.processes import shared_directory

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert SLURMEnvironment.detect()
    names = []
    for step in ("0", "1"):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        names.append(shared_directory([], sweep=False)[-1].rpartition("/")[2])
    assert names == ["slurm_17", "slurm_17_1"]
    monkeypatch.setenv("SLURM_PROCID", "3")  # rank 0 alone writes Hydra's record
    assert shared_directory(["hydra.run.dir"], sweep=False) == ["hydra.output_subdir=null"]


@pytest.mark.parametrize(
    "program", ["sample", "evaluate", "export", "encode", "train_autoencoder", "audit", "benchmark"]
)
def test_programs_of_one_process_run_in_a_batch_job_and_refuse_several_tasks(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert command_line.checked([], program) == []  # in the batch script, of a job with two tasks
    for changed in ({"SLURM_STEP_ID": "0"}, {"SLURM_PROCID": "1"}, TORCHRUN):  # by srun, or torchrun
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"recipes.{program} is one process, and 2 were started"):
                command_line.checked([], program)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert command_line.checked([], program) == []


def test_a_sweep_in_a_slurm_job_of_one_task_is_one_on_this_machine(tmp_path: Path) -> None:
    one = SLURM | {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    sweep = ["-m", "trainer.max_steps=1", "seed=3", "trainer.accelerator=cpu", f"hydra.sweep.dir={tmp_path}/s"]
    process = start(["recipes.train", "precision=fp32", *sweep, *TINY, *FEW], tmp_path, **one)
    shown = finish(process)
    assert process.returncode == 0, shown[-3000:]
    assert "1 of 1 jobs ended well" in shown
    assert_one_run(tmp_path / "s" / "0", step=1)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
