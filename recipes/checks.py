"""What is refused before anything is trained, because it would fail late, hang, or train something else.

Here are the checks that take built objects to make: the network and the data, the trainer and its processes. Keys and
values are compared with signatures before (`recipes.signatures`), and a checkpoint with the run in `recipes.resume`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.func import functional_call

from lightning_mixprec import MasterWeightPrecision, PrecisionPlan
from lightning_mixprec.float8_advice import refuse_device
from recipes.config import ConfigError, collected, refusals
from recipes.diffusion import DiffusionModule
from recipes.loading import available_cpus
from recipes.places import check_writable
from recipes.run_length import RunLength, limited, run_length
from recipes.sample_grid import SampleGrid
from recipes.sampler import Sampler, check_guidance
from recipes.signatures import target_nodes

WORKERS = 16
"""Processes per CPU that can still be meant, where reading waits for a network."""

PLACES = {"dirpath", "directory", "save_dir", "snapshot_dir"}
"""Arguments of callbacks and loggers that name a directory to write to."""


def check_shares(data: Any, ranks: int, settings: dict[str, Any]) -> int:
    """Images of one process in one batch; refuses a step that cannot be shared evenly, or would be shared twice.

    Args:
        data: The data module.
        ranks: Number of processes.
        settings: The trainer's arguments.
    """
    accumulated = settings.get("accumulate_grad_batches", 1)
    if ranks > 1 and settings.get("use_distributed_sampler", True):
        raise ConfigError(
            "trainer.use_distributed_sampler=true: Lightning would put a loader of its own in place of the recipe's, "
            "which shares samples among processes by itself. Write trainer.use_distributed_sampler=false."
        )
    try:
        return data.micro_batch(ranks, accumulated)
    except ValueError as error:
        raise ConfigError(
            f"data.{error} Processes are trainer.devices x trainer.num_nodes, accumulated batches "
            "trainer.accumulate_grad_batches."
        ) from error


def check_masters(config: dict[str, Any], strategy: Any) -> None:
    """Refuse masters of fewer bytes where shards are the masters."""
    masters = config["precision"].get("masters", "fp32")
    if isinstance(strategy, ModelParallelStrategy) and masters != "fp32":
        raise ConfigError(
            f"precision.masters={masters}: under strategy=fsdp2 the shards are fp32, and they are the masters. Write "
            "precision.masters=fp32, or strategy=ddp."
        )


def check_batches(trainer: L.Trainer, data: Any, settings: dict[str, Any]) -> None:
    """Refuse a batch that cannot be shared, an epoch without steps, and steps that would see another batch.

    Lightning steps at the end of an epoch even if the accumulation is incomplete
    (Lightning-AI/pytorch-lightning#21808), which would silently train with a smaller batch than asked for.
    """
    ranks, accumulated = trainer.world_size, trainer.accumulate_grad_batches
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigError(
            "GradientAccumulationScheduler: data.batch_size is the batch of every step. Write "
            "trainer.accumulate_grad_batches=NUMBER instead."
        )
    for kind, remedy in (
        (BatchSizeFinder, "data.batch_size is the batch of every step, which no search may change. Write a number"),
        (LearningRateFinder, "the learning rate is optimizer.lr. Try several: -m optimizer.lr=1e-4,1e-3,1e-2"),
    ):
        if any(isinstance(callback, kind) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigError(f"{kind.__name__}: {remedy}, and leave the callback out.")
    cpus = available_cpus()
    if data.num_workers > WORKERS * cpus:
        raise ConfigError(
            f"data.num_workers={data.num_workers}: each is a process with its own memory, and there are {cpus} CPUs. "
            f"Write data.num_workers={cpus}."
        )
    micro_batch = check_shares(data, ranks, settings)
    if data.steps_per_epoch == 0:
        shares = ranks * accumulated
        raise ConfigError(
            f"data.batch_size={data.batch_size}: {len(data.train)} training samples do not fill one step. "
            f"Choose data.batch_size <= {len(data.train) // shares * shares}."
        )
    batches = data.steps_per_epoch * accumulated
    limit = trainer.limit_train_batches
    batches = limited(batches, limit)
    if batches == 0:
        raise ConfigError(
            f"trainer.limit_train_batches={limit}: that share of an epoch is no batch. Write a number of batches."
        )
    if batches % accumulated:
        nearest = " or ".join(
            str(n) for n in (batches // accumulated * accumulated, -(-batches // accumulated) * accumulated) if n
        )
        raise ConfigError(
            f"trainer.limit_train_batches={limit}: an epoch has {batches} batches then, no multiple of "
            f"trainer.accumulate_grad_batches={accumulated}, and Lightning steps at its end. Choose {nearest}."
        )
    length = run_length(trainer, data.steps_per_epoch)
    check_ends(trainer, length, batches)
    if trainer.limit_val_batches == 0:
        saves = trainer.check_val_every_n_epoch == 1  # Lightning's ModelCheckpoint, after each epoch
        rank_zero_warn(
            "trainer.limit_val_batches=0: without validation there is no validation loss"
            + (" and no sample grid." if saves else ", no sample grid and no checkpoint. For a checkpoint per epoch ")
            + ("" if saves else "write callbacks.last.save_on_train_epoch_end=true.")
        )
    elif len(data.val) < ranks:
        raise ConfigError(
            f"{ranks} processes cannot share {len(data.val)} validation samples. Take fewer processes (trainer.devices,"
            " trainer.num_nodes), or leave validation out: trainer.limit_val_batches=0."
        )
    if trainer.is_global_zero:
        print(
            f"{data.batch_size} images per step = {micro_batch} per batch x {ranks} process(es) x {accumulated} "
            f"accumulated; {length.steps_per_epoch} steps per epoch"
            + (f", {length.steps} in all" if length.steps is not None else "")
        )


def check_ends(trainer: L.Trainer, length: RunLength, batches: int) -> None:
    """Refuse ends that contradict each other, and validations that never come.

    Lightning leaves out the validation of the last step if the run ends before its least number of steps, and with it
    the recipes' checkpoint.

    Args:
        trainer: Made, not started.
        length: Of the run.
        batches: Of an epoch.
    """
    timed = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    interval = 0 if timed else trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and not isinstance(interval, float) and interval > batches:
        raise ConfigError(
            f"trainer.val_check_interval={interval}: an epoch has {batches} batches, and with "
            f"trainer.check_val_every_n_epoch={trainer.check_val_every_n_epoch} it is a number of these. Write "
            "trainer.val_check_interval=1.0 for a validation at the end of an epoch, or "
            "trainer.check_val_every_n_epoch=null to count batches over epochs."
        )
    if length.steps is None:
        return
    for name, least in (("min_steps", trainer.min_steps), ("min_epochs", trainer.min_epochs)):
        needed = (least or 0) * (1 if name == "min_steps" else length.steps_per_epoch or 0)
        if needed > length.steps:
            of_an_epoch = f", and has {length.steps_per_epoch} in an epoch" if name == "min_epochs" else ""
            raise ConfigError(
                f"trainer.{name}={least}: the run ends after {length.steps} steps{of_an_epoch}. Write a smaller "
                f"trainer.{name}, or a larger trainer.max_steps or trainer.max_epochs."
            )


def check_model(config: dict[str, Any], module: DiffusionModule, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a network that was made for other images or labels: one call, on a device that computes nothing.

    Args:
        config: The whole configuration, for the error.
        module: With the network, on any device.
        shape: Of the data's images.
        classes: Of the data.
    """
    null_label: Any = getattr(module.net, "null_label", None)
    if null_label is None:
        raise ConfigError(
            f"model._target_={config['model']['_target_']} has no attribute null_label. A network for these recipes is "
            "called with images, noise levels and labels, returns a tensor like the images, and has null_label: the "
            "label that stands for none, which is the number of classes."
        )
    problems: list[str] = []
    if null_label != classes:
        problems.append(
            f"model has {null_label} classes, the data have {classes}. Choose "
            f"model.num_classes={classes}, or other data."
        )
    multiple = getattr(module.net, "size_multiple", 1)
    if odd := [side for side in shape[1:] if side % multiple]:
        lower = odd[0] // multiple * multiple
        fits = " or ".join(str(side) for side in (lower, lower + multiple) if side)
        problems.append(
            f"model halves images {multiple.bit_length() - 1} times, and {odd[0]} pixels cannot be. Choose images of "
            f"{fits} pixels (data.image_size, where the data have it), or a model of fewer resolutions "
            "(model.block_out_channels)."
        )
    else:
        with collected(problems):
            _check_call(config, module, shape)
    if problems:
        raise ConfigError(*problems)


def _check_call(config: dict[str, Any], module: DiffusionModule, shape: tuple[int, ...]) -> None:
    """One call of the network, on a device that computes nothing."""
    image = torch.zeros(1, *shape, device="meta")
    state = {name: value.to("meta") for name, value in module.net.state_dict(keep_vars=True).items()}
    with torch.no_grad(), refusals(config, "model"):
        try:
            found = functional_call(module.net, state, (image, image.new_zeros(1), image.new_zeros(1).long()))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"it cannot take images of shape {list(shape)}: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise ValueError(f"it returns a {type(found).__name__}, and must return a tensor like the images.")
        if found.shape != image.shape:
            raise ValueError(f"images of shape {list(shape)} come out as {list(found.shape[1:])}.")


def check_sampler(config: dict[str, Any], sampler: Sampler, module: DiffusionModule) -> None:
    """Refuse a sampler that the objective has no use for before an hour of training has passed."""
    with refusals(config, "sampler"):
        sampler.check(module.objective)


def check_places(config: dict[str, Any]) -> None:
    """Refuse directories of callbacks, loggers and snapshots that cannot be written to, before the first validation."""
    problems: list[str] = []
    for part in ("callbacks", "logger", "ema"):
        for where, node in target_nodes(config.get(part), part):
            for key in PLACES & node.keys():
                if isinstance(node[key], str) and node[key]:
                    with collected(problems):
                        check_writable(f"{where}.{key}", Path(node[key]).absolute())
    if problems:
        raise ConfigError(*problems)


def check_overwriting(callbacks: Mapping[str, Any]) -> None:
    """Refuse checkpoints of a run that starts anew over those of another: a directory that two runs were given.

    Args:
        callbacks: By the names that they have in the configuration.

    Raises:
        ConfigError: With the file that would be lost.

    Example:
        >>> check_overwriting({"callbacks.best": ModelCheckpoint(dirpath="checkpoints")})
    """
    for name, callback in callbacks.items():
        if not isinstance(callback, ModelCheckpoint) or callback._enable_version_counter or not callback.dirpath:
            continue
        path = Path(callback.dirpath) / f"{callback.filename}{callback.FILE_EXTENSION}"
        if path.is_file():
            raise ConfigError(
                f"{name}.dirpath={callback.dirpath}: {path} is there already, and would be overwritten. To go on with "
                f"it, write ckpt_path={path}; to start anew, {name}.dirpath=ANOTHER, or remove the file."
            )


def check_states(callbacks: Mapping[str, Any]) -> None:
    """Refuse callbacks whose states a checkpoint could not tell apart, such as two ModelCheckpoints that save alike.

    Args:
        callbacks: By the names that they have in the configuration.
    """
    seen: dict[str, str] = {}
    for name, callback in callbacks.items():
        if isinstance(callback, ModelCheckpoint) and (other := seen.setdefault(callback.state_key, name)) != name:
            raise ConfigError(
                f"{name} and {other} save at the same times by the same metric (monitor={callback.monitor}), and a "
                f"checkpoint could not tell their states apart. Write another {name}.monitor, or leave it out: "
                f"~{name}."
            )


def check_guidances(callbacks: Iterable[Any], module: DiffusionModule) -> None:
    """Refuse sample grids with guidance that the network does not learn."""
    for grid in (callback for callback in callbacks if isinstance(callback, SampleGrid)):
        try:
            check_guidance(grid.guidance, module.objective, int(getattr(module.net, "null_label", 1)))
        except ValueError as error:
            raise ConfigError(f"callbacks.samples.{error}") from error


def check_processes(trainer: L.Trainer, config: dict[str, Any]) -> None:
    """Refuse processes that were not started as configured, and what a strategy cannot do, before they meet."""
    strategy, trainer_config = trainer.strategy, config["trainer"]
    devices, nodes = trainer.num_devices, trainer.num_nodes
    backend = getattr(strategy, "_process_group_backend", None)
    if backend == "nccl" and strategy.root_device.type != "cuda":
        raise ConfigError(
            f"strategy.process_group_backend=nccl: it connects GPUs, and this run computes on "
            f"{strategy.root_device.type}. Write gloo, or leave it out."
        )
    if (method := getattr(strategy, "_start_method", "popen") or "popen") != "popen":
        raise ConfigError(
            f"strategy.start_method={method}: what comes of the run would stay in processes that are gone when it is "
            "to be reported, and signals would not reach them. Leave it out: popen starts each by this command."
        )
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


def check_float8(plugin: MasterWeightPrecision, device: torch.device) -> None:
    """Refuse fp8 on a device that does not have it, unless it is emulated."""
    try:
        refuse_device(plugin.policy, device)
    except MisconfigurationException as error:
        raise ConfigError(
            f"precision.policy.emulate={plugin.policy.emulate}: {error} In a recipe these are precision=bf16 "
            "and precision.policy.emulate=true."
        ) from error


def policy_plan(plugin: MasterWeightPrecision, module: DiffusionModule) -> PrecisionPlan:
    """Which layer computes in which dtype; refuses layers that the network does not have before processes start."""
    try:
        return plugin.policy.resolve(module)
    except ValueError as error:
        raise ConfigError(f"precision.policy: {error}") from error
