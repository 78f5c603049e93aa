"""Train a recipe: `python -m recipes.train [group=option] [key=value]`.

Reads top to bottom: check, build, fit, report. What is built stands in `conf/`, not here.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module, rank_zero_warn
from omegaconf import DictConfig
from torch.func import functional_call

from lightning_mixprec import PrecisionPlan
from recipes import command_line, resume
from recipes.callbacks import RunRecord, SampleGrid, SaveOnInterruption
from recipes.config import ConfigError, build, check_targets, fail, plain, refusals
from recipes.diffusion import DiffusionModule

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
        SystemExit: After SIGINT or SIGTERM, when what is kept has been shown.
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
    check_batches(trainer, data)
    check_launch(trainer)
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
    """Refuse an epoch without batches, and an accumulation that no epoch completes.

    Lightning steps at the end of an epoch even if the accumulation is incomplete
    (Lightning-AI/pytorch-lightning#21808): a larger `accumulate_grad_batches` would silently train with a smaller
    batch than asked for.
    """
    data.setup("fit")
    accumulated = trainer.accumulate_grad_batches
    ranks = trainer.world_size
    batches = data.train_batches(ranks)
    if batches == 0:
        raise ConfigError(
            f"data.batch_size={data.batch_size}: {len(data.train)} training samples on {ranks} process(es) do not fill "
            f"one batch. Choose data.batch_size <= {len(data.train) // ranks}."
        )
    limit = trainer.limit_train_batches
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, int(limit or batches))
    if accumulated > batches:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulated}: an epoch has only {batches} batches "
            f"on each of {ranks} process(es), and Lightning steps at its end. Choose at most {batches}, or a smaller "
            f"data.batch_size (now {data.batch_size})."
        )
    if trainer.limit_val_batches == 0:
        rank_zero_warn(
            "trainer.limit_val_batches=0: without validation there is no validation loss, no sample grid and no "
            "checkpoint. For a checkpoint per epoch write callbacks.last.save_on_train_epoch_end=true."
        )
    if trainer.is_global_zero:
        total = data.batch_size * ranks * accumulated
        print(
            f"{total} images per step = {data.batch_size} per batch x {ranks} process(es) x {accumulated} accumulated; "
            f"{batches} batches per epoch"
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


def check_launch(trainer: L.Trainer) -> None:
    """Refuse a sweep whose jobs start processes by repeating the command line: each would run the sweep again."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        raise ConfigError(
            f"-m with {trainer.world_size} processes: Lightning would start them with the whole sweep's command line. "
            "Run the jobs one by one without -m, or start one process per job (trainer.devices=1), or let "
            "strategy=ddp strategy.start_method=fork start them."
        )


def policy_plan(trainer: L.Trainer, module: DiffusionModule) -> PrecisionPlan:
    """Which layer computes in which dtype; refuses layers that the network does not have before processes start."""
    try:
        return trainer.precision_plugin.policy.resolve(module)  # type: ignore[attr-defined]
    except ValueError as error:
        raise ConfigError(f"precision.policy: {error}") from error


def report(trainer: L.Trainer, output_dir: Path) -> None:
    """Say what came out and where to look."""
    loss = trainer.callback_metrics.get("val/loss")
    grids = [c.last_path for c in trainer.callbacks if isinstance(c, SampleGrid) and c.last_path]  # type: ignore[attr-defined]
    print(f"steps            {trainer.global_step}")
    print(f"validation loss  {'not measured: no validation ran' if loss is None else f'{float(loss):.4f}'}")
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
def main(cfg: DictConfig) -> None:
    """One job: what Hydra calls once, or once per job of a sweep."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with quiet():
            trainer = train(plain(cfg), output_dir)
    except (ConfigError, MisconfigurationException) as error:
        fail(error)
    if trainer.is_global_zero and not cfg.dry_run:
        report(trainer, output_dir)


if __name__ == "__main__":
    command_line.run(main, "train")
