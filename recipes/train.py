"""Train a recipe: `python -m recipes.train [group=option] [key=value]`.

Reads top to bottom: check, build, fit, report. What is built stands in `conf/`, not here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module, rank_zero_warn
from omegaconf import DictConfig
from torch.func import functional_call

from lightning_mixprec import PrecisionPlan
from recipes import command_line, resume, sweep
from recipes.config import ConfigError, build, check_targets, fail, plain, refusals
from recipes.diffusion import DiffusionModule
from recipes.ending import SaveOnInterruption
from recipes.run_record import RunRecord
from recipes.sample_grid import SampleGrid

NOISE = (
    ".*dirpath has changed from.*",  # every run has its own
    ".*self.log\\('(train|val)/.*sync_dist=True.*",  # the recipes' means are over all ranks already
    ".*smaller than the logging interval.*",  # short epochs; logging counts steps across epochs
    ".*not supported by the model summary.*",  # the summary's estimate of memory, which nobody asked for
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6.6 with torch 2.14; delete when Lightning adapts
    ".*does not have many workers.*",  # the data are a tensor in memory
)
"""Warnings of Lightning that do not concern the recipes' users."""

ADVERTISED = ("litlogger", "litmodels")
"""Packages that Lightning recommends at every start."""


def train(config: dict[str, Any], output_dir: Path) -> L.Trainer:
    """Build everything that the configuration names, and fit.

    Args:
        config: Plain containers.
        output_dir: The run's directory, the same on every rank.

    Returns:
        The trainer, after `fit`; with `dry_run`, everything is built and checked, but nothing trained.

    Raises:
        ConfigError: Before anything is trained.
        SystemExit: After SIGINT, SIGTERM or SIGUSR1, when what is kept has been shown.
    """
    check_targets(config)
    seed = config["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} must be a whole number from 0 to {2**32 - 1}.")
    ckpt_path = resume.find_checkpoint(config["ckpt_path"], output_dir)
    checkpoint = resume.read(ckpt_path) if ckpt_path else None
    L.seed_everything(seed, workers=True)

    data = build(config, "data")
    module = DiffusionModule(
        net=build(config, "model"),
        objective=build(config, "objective"),
        optimizer=build(config, "optimizer"),
        scheduler=build(config, "scheduler") if config.get("scheduler") else None,
        seed=seed,
    )
    callbacks = [build(config["callbacks"], name) for name, node in (config.get("callbacks") or {}).items() if node]
    if not config.get("logger"):  # Lightning refuses a LearningRateMonitor that has nowhere to write to
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    if config.get("ema"):
        callbacks.append(build(config, "ema"))
    trainer = build(
        config,
        "trainer",
        plugins=build(config, "precision"),
        strategy=build(config, "strategy") if config.get("strategy") else "auto",
        callbacks=[*callbacks, RunRecord(config)],
        logger=build(config, "logger") if config.get("logger") else False,
    )
    if checkpoint and ckpt_path:
        resume.check_fits(checkpoint, config, module, ckpt_path)
        resume.check_steps(checkpoint, trainer, ckpt_path)
    check_model(config, module, data)
    check_sampler(config, module)
    check_optimizer(config, module)
    check_processes(trainer, config)
    check_batches(trainer, data)
    plan = policy_plan(trainer, module)
    if trainer.precision_plugin.policy.compute == "fp16" and trainer.strategy.root_device.type == "cpu":
        rank_zero_warn("precision=fp16 on a CPU is right but about 20 times slower. For a trial add model=unet_tiny.")
    if config["dry_run"]:
        print(plan)
        return trainer
    if checkpoint:
        resume.report_differences(checkpoint, config, trainer)
        del checkpoint  # fit reads it again
    if trainer.is_global_zero:
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        print(f"{type(module.net).__name__} with {trained:,} trained parameters")
    if config["compile"]:
        module.net.compile()  # in place: names of weights stay as they are
    try:
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    except SystemExit:  # after a signal
        sys.exit(interrupted(trainer, output_dir))
    return trainer


def check_batches(trainer: L.Trainer, data: Any) -> None:
    """Refuse a batch that cannot be shared, an epoch without steps, and steps that would see another batch.

    Lightning steps at the end of an epoch even if the accumulation is incomplete
    (Lightning-AI/pytorch-lightning#21808), which would silently train with a smaller batch than asked for.
    """
    data.setup("fit")
    ranks, accumulated = trainer.world_size, trainer.accumulate_grad_batches
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigError(
            "GradientAccumulationScheduler: data.batch_size is the batch of every step. Write "
            "trainer.accumulate_grad_batches=NUMBER instead."
        )
    try:
        micro_batch = data.micro_batch(ranks, accumulated)
    except ValueError as error:
        raise ConfigError(
            f"data.{error} Processes are trainer.devices x trainer.num_nodes, accumulated batches "
            "trainer.accumulate_grad_batches."
        ) from error
    if data.steps_per_epoch == 0:
        shares = ranks * accumulated
        raise ConfigError(
            f"data.batch_size={data.batch_size}: {len(data.train)} training samples do not fill one step. "
            f"Choose data.batch_size <= {len(data.train) // shares * shares}."
        )
    batches = data.steps_per_epoch * accumulated
    limit = trainer.limit_train_batches
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, int(limit or batches))
    if batches % accumulated:
        nearest = " or ".join(
            str(n) for n in (batches // accumulated * accumulated, -(-batches // accumulated) * accumulated) if n
        )
        raise ConfigError(
            f"trainer.limit_train_batches={limit}: an epoch has {batches} batches then, no multiple of "
            f"trainer.accumulate_grad_batches={accumulated}, and Lightning steps at its end. Choose {nearest}."
        )
    if trainer.limit_val_batches == 0:
        rank_zero_warn(
            "trainer.limit_val_batches=0: without validation there is no validation loss, no sample grid and no "
            "checkpoint. For a checkpoint per epoch write callbacks.last.save_on_train_epoch_end=true."
        )
    elif len(data.val) < ranks:
        raise ConfigError(
            f"{ranks} processes cannot share {len(data.val)} validation samples. Take fewer processes (trainer.devices,"
            " trainer.num_nodes), or leave validation out: trainer.limit_val_batches=0."
        )
    if trainer.is_global_zero:
        print(
            f"{data.batch_size} images per step = {micro_batch} per batch x {ranks} process(es) x {accumulated} "
            f"accumulated; {data.steps_per_epoch} steps per epoch"
        )


def check_model(config: dict[str, Any], module: DiffusionModule, data: Any) -> None:
    """Refuse a network that was made for other images or labels: one call, on a device that computes nothing."""
    if module.net.null_label != data.num_classes:
        raise ConfigError(
            f"model has {module.net.null_label} classes, the data have {data.num_classes}. Choose "
            f"model.num_classes={data.num_classes}, or other data."
        )
    image = torch.zeros(1, *data.image_shape, device="meta")
    state = {name: value.to("meta") for name, value in module.net.state_dict(keep_vars=True).items()}
    with torch.no_grad(), refusals(config, "model"):
        try:
            shape = functional_call(module.net, state, (image, image.new_zeros(1), image.new_zeros(1).long())).shape
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"it cannot take images of shape {list(data.image_shape)}: {error}") from error
        if shape != image.shape:
            raise ValueError(f"images of shape {list(data.image_shape)} come out as {list(shape[1:])}.")


def check_sampler(config: dict[str, Any], module: DiffusionModule) -> None:
    """Refuse a sampler that the objective has no use for before an hour of training has passed."""
    with refusals(config, "sampler"):
        build(config, "sampler").check(module.objective)


def check_optimizer(config: dict[str, Any], module: DiffusionModule) -> None:
    """Build optimizer and scheduler once for nothing: what they refuse is refused before processes and files exist."""
    with refusals(config, "optimizer"):
        optimizer = module.make_optimizer()
    if module.make_scheduler is not None:
        with refusals(config, "scheduler"):
            module.make_scheduler(optimizer)


def check_processes(trainer: L.Trainer, config: dict[str, Any]) -> None:
    """Refuse processes that were not started as configured, and what a strategy cannot do, before they meet."""
    strategy, trainer_config = trainer.strategy, config["trainer"]
    devices, nodes = trainer.num_devices, trainer.num_nodes
    environment = getattr(strategy, "cluster_environment", None)
    started = 1  # from outside
    if TorchElasticEnvironment.detect() or SLURMEnvironment.detect():
        started = int(os.environ["WORLD_SIZE" if TorchElasticEnvironment.detect() else "SLURM_NTASKS"])
    if environment is None and started > 1:
        raise ConfigError(
            f"trainer.devices={trainer_config['devices']}: {started} processes were started, and each would train "
            "alone. Write trainer.devices=NUMBER, the processes per node, and trainer.num_nodes=NUMBER."
        )
    if nodes > 1 and isinstance(environment, LightningEnvironment) and "NODE_RANK" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes={nodes}: nothing has started the other nodes, and this one would wait for them. Start "
            f"every node with torchrun --nnodes={nodes} --nproc-per-node={devices} -m recipes.train ..., or all with "
            "srun, or submit with -m hydra/launcher=slurm."
        )
    if environment is not None:
        try:
            environment.validate_settings(num_devices=devices, num_nodes=nodes)
        except ValueError as error:
            raise ConfigError(
                f"trainer.devices={devices} and trainer.num_nodes={nodes}: {error} They must be what the launcher was "
                "told: processes per node, and nodes."
            ) from error
    if isinstance(strategy, ModelParallelStrategy) and config["precision"].get("masters", "fp32") != "fp32":
        raise ConfigError(
            f"precision.masters={config['precision']['masters']}: under strategy=fsdp2 the shards are fp32, and they "
            "are the masters. Write precision.masters=fp32, or strategy=ddp."
        )


def policy_plan(trainer: L.Trainer, module: DiffusionModule) -> PrecisionPlan:
    """Which layer computes in which dtype; refuses layers that the network does not have before processes start."""
    try:
        return trainer.precision_plugin.policy.resolve(module)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ConfigError(f"precision.policy: {error}") from error


def validation_loss(trainer: L.Trainer) -> float | None:
    """Of the last validation."""
    loss = trainer.callback_metrics.get("val/loss")
    return None if loss is None else float(loss)


def report(trainer: L.Trainer, output_dir: Path) -> None:
    """Say what came out and where to look, and keep it."""
    loss = validation_loss(trainer)
    sweep.write_result(output_dir, trainer.global_step, loss)
    grids = [c.last_path for c in trainer.callbacks if isinstance(c, SampleGrid) and c.last_path]  # type: ignore[attr-defined]
    print(f"steps            {trainer.global_step}")
    print(f"validation loss  {'not measured: no validation ran' if loss is None else f'{loss:.4f}'}")
    print(f"sample grid      {grids[0] if grids else 'not drawn'}")
    print(f"curves           tensorboard --logdir {shlex.quote(str(output_dir))}")


def interrupted(trainer: L.Trainer, output_dir: Path) -> int:
    """Say which checkpoint is kept and how to go on from it; return the exit status."""
    if not trainer.is_global_zero:
        return 0  # Lightning and torchrun kill all processes when one fails; rank 0 speaks for all
    callbacks = [c for c in trainer.callbacks if isinstance(c, SaveOnInterruption)]  # type: ignore[attr-defined]
    path = callbacks[0].path if callbacks else output_dir / "checkpoints" / "last.ckpt"
    step = resume.read(path)["global_step"] if path.is_file() else None
    again: list[str] = []
    if HydraConfig.initialized():
        given = HydraConfig.get().overrides
        again = [o for o in given.task if step is None or not o.lstrip("+").startswith("ckpt_path=")]
        again += ["ckpt_path=last"] * (step is not None)
        # `last` is looked for beside the new run, so that must go to the same place.
        again += [o for o in given.hydra if o.startswith("hydra.run.dir=")]
    print(f"\ninterrupted      after step {trainer.global_step}")
    print(f"checkpoint       {'none was written yet' if step is None else f'{path}, of step {step}'}")
    print(f"to continue      {shlex.join(['python', '-m', 'recipes.train', *again])}")
    received = callbacks[0].signal if callbacks else None
    if received == signal.SIGUSR1 and SLURMEnvironment.detect():
        job = os.environ["SLURM_JOB_ID"]
        status = subprocess.call(["scontrol", "requeue", job])
        print(f"requeued         {f'job {job}' if status == 0 else f'no: scontrol requeue {job} ended with {status}'}")
    return 128 + (received or signal.SIGINT)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what a user of the recipes can do nothing about."""
    log = rank_zero_module.log

    def is_no_advertisement(record: logging.LogRecord) -> bool:
        return not any(package in record.getMessage() for package in ADVERTISED)

    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        log.addFilter(is_no_advertisement)
        try:
            yield
        finally:
            log.removeFilter(is_no_advertisement)


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """What Hydra calls once, or once per job of a sweep, whose sweeper may want to minimise the loss."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    if sweep.is_job():
        return sweep.run_job(output_dir)
    try:
        with quiet():
            trainer = train(plain(cfg), output_dir)
    except (ConfigError, MisconfigurationException) as error:
        fail(error)
    if trainer.is_global_zero and not cfg.dry_run:
        report(trainer, output_dir)
    return validation_loss(trainer)


if __name__ == "__main__":
    command_line.run(main, "train")
