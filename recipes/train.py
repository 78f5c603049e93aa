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
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from omegaconf import DictConfig

from lightning_mixprec.fallback import FallbackLimitError
from lightning_mixprec.steps import NonFiniteGradientsError
from recipes import checks, command_line, cosine, dry_run, earlier_runs, first_step, resume, sweep
from recipes.averages import check_average, check_snapshots
from recipes.broken_epochs import BrokenEpochs
from recipes.checkpoint_file import WholeFiles
from recipes.config import (
    ConfigError,
    build,
    build_all,
    build_callbacks,
    check_targets,
    collected,
    fail,
    plain,
    refusals,
)
from recipes.denoising import clip_bounded_images_alone
from recipes.diffusion import DiffusionModule
from recipes.ending import SaveOnInterruption, TimeLimit
from recipes.logged_steps import LoggedSteps
from recipes.monitors import check_monitors
from recipes.objective_checks import check_labels, check_numbers
from recipes.own_settings import OwnSettings
from recipes.run_length import limited, run_length
from recipes.run_record import RunRecord
from recipes.sample_checks import check_samples, check_sigma_data
from recipes.sample_grid import SampleGrid
from recipes.settings import check_settings, idle_problems

NOISE = (
    ".*dirpath has changed from.*",  # every run has its own
    ".*self.log\\('(train|val)/.*sync_dist=True.*",  # the recipes' means are over all ranks already
    ".*smaller than the logging interval.*",  # short epochs; logging counts steps across epochs
    ".*not supported by the model summary.*",  # the summary's estimate of memory, which nobody asked for
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6.6 with torch 2.14; delete when Lightning adapts
    ".*callbacks used to create the checkpoint need to be provided.*",  # `resume` says what has changed
    ".*exists and is not empty.*",  # a run that goes on does so in its own directory
    ".*does not have many workers.*",  # the data are a tensor in memory
)
"""Warnings of Lightning that do not concern the recipes' users."""

UNSAID = ("litlogger", "litmodels", "Ignoring `Trainer(max_time")
"""What Lightning says at every start: packages that it recommends, and that `TimeLimit` stands in for its Timer."""

IN_A_RECIPE = (
    "In a recipe these are optimizer.lr=NUMBER, scheduler=warmup, precision=bf16, 'precision.policy.fp32=[LAYER]' and "
    "precision.scaler.max_consecutive_skips=NUMBER."
)
"""What the plugin advises, as overrides."""

PARTS = ("data", "objective", "sampler", "precision", "strategy", "optimizer", "scheduler", "ema")
"""Built in this order, before the model, which takes longest, and the trainer."""


def train(config: dict[str, Any], output_dir: Path) -> L.Trainer | None:
    """Build everything that the configuration names, and fit.

    Args:
        config: Plain containers.
        output_dir: The run's directory, the same on every rank.

    Returns:
        The trainer, after `fit`; after one batch with `dry_run=true`, and None with `dry_run=meta`, which has none.

    Raises:
        ConfigError: Before anything is trained.
        SystemExit: After SIGINT, SIGTERM, SIGHUP or SIGUSR1, when what is kept has been shown.
    """
    check_targets(config)
    check_settings(config)
    if config.get("dry_run") == "meta":
        dry_run.without_devices(config)
        return None
    seed, dry = config["seed"], bool(config.get("dry_run"))
    ckpt_path = resume.find_checkpoint(config, output_dir)
    checkpoint = resume.read(ckpt_path) if ckpt_path else None
    L.seed_everything(seed, workers=True)

    problems = idle_problems(config)
    parts: dict[str, Any] = {}
    with collected(problems):
        parts |= build_all(config, PARTS)
    if parts:
        with refusals(config, "data"):
            parts["data"].setup("fit")  # missing files are said before anything that depends on them
    with collected(problems):
        parts |= build_all(config, ("model",))
    if problems:
        raise ConfigError(*problems)
    data = parts["data"]
    clip_bounded_images_alone(parts["objective"], config["objective"], data)
    module = DiffusionModule(parts["model"], parts["objective"], parts["optimizer"], seed=seed)
    built = build_callbacks(config)
    checks.check_states(built)
    callbacks = list(built.values())
    if not config.get("logger"):  # Lightning refuses a LearningRateMonitor that has nowhere to write to
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    averaging = [parts["ema"]] if parts["ema"] else []
    limits = [TimeLimit(time)] if (time := config["trainer"].get("max_time")) else []
    logger = {"logger": resume.logger_of(config, checkpoint, ckpt_path, output_dir) or False}
    once = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = build(
        config,
        "trainer",
        plugins=[parts["precision"], WholeFiles()],
        strategy=parts["strategy"] or "auto",
        callbacks=[*averaging, dry_run.OneBatch()]
        if dry
        else [LoggedSteps(), BrokenEpochs(), *limits, *callbacks, *averaging, OwnSettings(config), RunRecord(config)],
        **(once if dry else logger),
    )
    data.overfit(trainer)
    length = run_length(trainer, data.steps_per_epoch)
    batches = limited(data.steps_per_epoch * trainer.accumulate_grad_batches, trainer.limit_train_batches)
    with collected(problems):
        module.make_scheduler = cosine.for_run(config, length)
    for check in (
        lambda: resume.check_fits(checkpoint, config, module, ckpt_path) if checkpoint and ckpt_path else None,
        lambda: resume.check_whole(checkpoint, ckpt_path) if checkpoint and ckpt_path else None,
        lambda: resume.check_optimizer(checkpoint, config, ckpt_path) if checkpoint and ckpt_path else None,
        lambda: resume.check_steps(checkpoint, config, ckpt_path) if checkpoint and ckpt_path else None,
        lambda: checks.check_places(config) if trainer.is_global_zero and not dry else None,
        lambda: checks.check_overwriting(built) if not (checkpoint or dry) and trainer.is_global_zero else None,
        lambda: resume.check_last(config, callbacks, output_dir),
        lambda: checks.check_model(config, module, data.image_shape, data.num_classes),
        lambda: check_sigma_data(module.objective, check_samples(config, data)),
        lambda: check_numbers(config, module.objective, parts["sampler"]),
        lambda: check_labels(module.objective, int(getattr(module.net, "null_label", 0) or 0)),
        lambda: checks.check_sampler(config, parts["sampler"], module),
        lambda: checks.check_guidances(callbacks, module),
        lambda: first_step.check_optimizer(
            config,
            module,
            parts["optimizer"],
            module.make_scheduler if not problems else None,
            trainer.strategy.root_device,
            length,
        ),
        lambda: checks.check_masters(config, trainer.strategy),
        lambda: checks.check_processes(trainer, config),
        lambda: checks.check_batches(trainer, data, config["trainer"]),
        lambda: check_monitors(trainer, built, batches),
        lambda: check_average(parts["ema"], length.steps),
        lambda: check_snapshots(config, parts["ema"], module, length.steps) if not dry else None,
        lambda: checks.check_float8(parts["precision"], trainer.strategy.root_device),
        lambda: checks.policy_plan(parts["precision"], module),
    ):
        with collected(problems):
            check()
    if problems:
        raise ConfigError(*problems)
    plan = checks.policy_plan(parts["precision"], module)
    if dry:
        dry_run.run_one_batch(trainer, module, data, plan, parts["precision"].masters)
        return trainer
    if config.get("resume") and trainer.is_global_zero:
        where = f"{ckpt_path}, step {checkpoint['global_step']}" if checkpoint else "no interrupted run, starts anew"
        print(f"resume=auto: {where}")
    if checkpoint:
        resume.report_differences(checkpoint, config, trainer, data)
        del checkpoint  # fit reads it again
    if trainer.is_global_zero:
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        print(f"{type(module.net).__name__} with {trained:,} trained parameters")
    if config.get("compile"):
        module.net.compile()  # in place: names of weights stay as they are
    with earlier_runs.held(output_dir, trainer.is_global_zero):
        if trainer.is_global_zero:  # of an earlier run in this directory, which this one goes on with or replaces
            (output_dir / sweep.RESULT).unlink(missing_ok=True)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except SystemExit:  # after a signal
            sys.exit(interrupted(trainer, output_dir))
    return trainer


def validation_loss(trainer: L.Trainer) -> float | None:
    """Of the last validation."""
    loss = trainer.callback_metrics.get("val/loss")
    return None if loss is None else float(loss)


def report(trainer: L.Trainer, output_dir: Path, config: DictConfig) -> None:
    """Say what came out and where to look, and keep it."""
    loss = validation_loss(trainer)
    outcome = earlier_runs.outcome_of(trainer, config, loss)
    sweep.write_result(output_dir, outcome)
    grids = [c.last_path for c in trainer.callbacks if isinstance(c, SampleGrid) and c.last_path]  # type: ignore[attr-defined]
    ended = f", at the end of trainer.max_time={config.trainer.get('max_time')}: resume=auto goes on"
    print(f"steps            {trainer.global_step}{ended if outcome['out_of_time'] else ''}")
    print(f"validation loss  {'not measured: no validation ran' if loss is None else f'{loss:.4f}'}")
    print(f"sample grid      {grids[0] if grids else 'not drawn'}")
    print(f"curves           {curves(trainer, output_dir)}")


def curves(trainer: L.Trainer, output_dir: Path) -> str:
    """Where they are: the command that shows them, the files of other loggers, or that nothing was logged."""
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        places = [Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        place = output_dir if any(output_dir in (path, *path.parents) for path in places) else places[0]
        return f"tensorboard --logdir {shlex.quote(str(place))}"
    others = [str(logger.log_dir or logger.name) for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
    return ", ".join(others) or "not logged"


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
        choices = ("ckpt_path=", "resume=")
        again = sweep.typed_flags()
        again += [o for o in given.task if step is None or not o.lstrip("+").startswith(choices)]
        again += ["resume=auto"] * (step is not None)
        again += [o for o in given.hydra if not o.startswith("hydra.mode=")]
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

    def is_said(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in UNSAID)

    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        log.addFilter(is_said)
        try:
            yield
        finally:
            log.removeFilter(is_said)


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """What Hydra calls once, or once per job of a sweep, whose sweeper may want to minimise the loss."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        if cfg.get("resume") == "auto" and not cfg.get("dry_run"):
            if complete := earlier_runs.complete_run(output_dir, cfg):
                print(f"resume=auto: the run in {output_dir} is complete, nothing is left to do")
                sweep.take_over(output_dir, complete)
                return complete["validation_loss"]
        if sweep.is_job():
            return sweep.run_job(output_dir)
        if cfg.get("resume") == "auto" and not cfg.get("dry_run"):
            if outcome := earlier_runs.outcome_of_checkpoint(output_dir, cfg):
                print(f"resume=auto: the run in {output_dir} had taken its last step, and its result is kept now")
                sweep.write_result(output_dir, outcome)
                return outcome["validation_loss"]
        with quiet():
            trainer = train(plain(cfg), output_dir)
    except (ConfigError, MisconfigurationException) as error:
        fail(error)
    except (NonFiniteGradientsError, FallbackLimitError) as error:
        fail(ConfigError(f"{error} {IN_A_RECIPE}"), status=1)
    if trainer is None:
        return None
    if trainer.is_global_zero and not cfg.get("dry_run"):
        report(trainer, output_dir, cfg)
    return validation_loss(trainer)


if __name__ == "__main__":
    command_line.run(main, "train")
