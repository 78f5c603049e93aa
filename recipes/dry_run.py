"""Everything that a run does before it takes hours: `dry_run=true` and `dry_run=meta`.

`true` trains on one batch of the real data, on the real devices. `meta` needs neither data nor memory nor the devices:
the network is built from shapes alone, so a laptop can tell what an experiment for a cluster would take. Both print
parameters, which layer computes in which dtype, and the bytes on one device. Nothing is saved.

It leaves out speed (`recipes.benchmark_optimizer`) and what compiling changes.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_mixprec import MasterWeightAveraging, MasterWeightPrecision, PrecisionPlan
from lightning_mixprec.autocast import compute_context
from lightning_mixprec.layers import swap_layers_
from lightning_mixprec.processor import slowness
from recipes import checks, cosine, first_step
from recipes.averages import check_average
from recipes.config import ConfigError, build, build_all, build_callbacks, collected
from recipes.diffusion import DiffusionModule
from recipes.loading import Batch
from recipes.memory import Memory, count, saved_for_backward, state_bytes, state_bytes_of_a_step
from recipes.objective_checks import check_labels, check_numbers
from recipes.run_length import RunLength, run_length
from recipes.settings import idle_problems


class OneBatch(L.Callback):
    """Counts while the trainer takes its one step.

    Attributes:
        saved: Bytes that a batch saved for backward.
        optimizer: Bytes of the optimizer's state.
        loss: Of the batch.
    """

    def __init__(self) -> None:
        self.saved = 0
        self.optimizer = 0
        self.loss = float("nan")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watch the training step from here on: the weights have their dtypes now."""
        step: Any = pl_module.training_step

        def watched(*args: Any) -> Any:
            with saved_for_backward(pl_module) as saved:
                loss = step(*args)
            self.saved, self.loss = saved.bytes, float(loss.detach())
            return loss

        pl_module.training_step = watched  # type: ignore[method-assign]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the state, and stop watching."""
        del pl_module.training_step
        self.optimizer = state_bytes(trainer.optimizers[0])


def report(module: DiffusionModule, plan: PrecisionPlan, memory: Memory, device: str) -> None:
    """Print what both kinds of dry run have found."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters()) - trained
    print(f"{plan}\n")
    print(
        f"{type(module.net).__name__} with {trained:,} trained parameters{f' and {frozen:,} frozen' * bool(frozen)}\n"
    )
    print(f"memory on {device}, estimated without buffers of collectives and libraries\n{memory}")


def run_one_batch(
    trainer: L.Trainer, module: DiffusionModule, data: L.LightningDataModule, plan: PrecisionPlan, masters: str
) -> None:
    """Train on one batch with what is built, and print what it took.

    Args:
        trainer: With a `OneBatch` among its callbacks; it takes one step.
        module: As it would be trained.
        data: Set up.
        plan: Dtype of every parameter.
        masters: Of `config["precision"]`.
    """
    (watch,) = (callback for callback in trainer.callbacks if isinstance(callback, OneBatch))  # type: ignore[attr-defined]
    averaging = [each for each in trainer.callbacks if isinstance(each, MasterWeightAveraging)]  # type: ignore[attr-defined]
    for callback in averaging:
        callback.snapshot_every = None  # nothing is saved
    if trainer.is_global_zero and slowness(plan.compute, trainer.strategy.root_device):
        print("dry_run=true computes a batch, here without instructions for its dtype: dry_run=meta prints the same")
    trainer.fit_loop.epoch_loop.max_steps = 1  # only now: what was checked before is the whole run
    trainer.fit(module, datamodule=data)
    if not trainer.is_global_zero:
        return
    sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    memory = count(
        module,
        plan,
        masters,
        optimizer=watch.optimizer * (trainer.world_size if sharded else 1),
        activations=watch.saved,
        averages=sum(len(callback.profiles) for callback in averaging),
        shards=trainer.world_size if sharded else None,
    )
    report(module, plan, memory, f"each of {trainer.world_size} {trainer.strategy.root_device.type} device(s)")
    if trainer.strategy.root_device.type == "cuda":
        print(f"measured peak {torch.cuda.max_memory_allocated() / 1e9:,.2f} GB")
    print(f"\nloss of one batch {watch.loss:.4f}; one optimizer step was taken, nothing was saved")


def without_devices(config: dict[str, Any]) -> None:
    """Build on the meta device, and print what a run would take.

    Args:
        config: Checked.

    Raises:
        ConfigError: As training would, but for what only data, devices and processes can tell.
    """
    problems = idle_problems(config)
    parts: dict[str, Any] = {}
    with torch.device("meta"), collected(problems):
        parts |= build_all(config, ("model",))
    with collected(problems):
        parts |= build_all(
            config, ("data", "objective", "sampler", "precision", "strategy", "optimizer", "scheduler", "ema")
        )
    settings = config["trainer"]
    here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1}  # the other arguments are those of the run
    length = RunLength()
    with collected(problems):
        trainer = build({"trainer": settings | here}, "trainer", logger=False, callbacks=[], enable_checkpointing=False)
        length = run_length(trainer)
        # Epochs have a number of steps only where the data are.
        parts["scheduler"] = cosine.for_run(config, length if length.steps else RunLength(steps=1))
    callbacks: dict[str, Any] = {}
    with collected(problems):
        callbacks = build_callbacks(config)
        checks.check_states(callbacks)
    if problems:
        raise ConfigError(*problems)
    module = DiffusionModule(
        parts["model"], parts["objective"], parts["optimizer"], parts["scheduler"], seed=config["seed"]
    )
    shape = known_shape(config, parts["data"], module)
    ranks = processes(settings)
    size = checks.check_shares(parts["data"], ranks, settings)
    for check in (
        lambda: checks.check_sampler(config, parts["sampler"], module),
        lambda: check_numbers(config, module.objective, parts["sampler"]),
        lambda: check_labels(module.objective, int(getattr(module.net, "null_label", 0) or 0)),
        lambda: checks.check_guidances(callbacks.values(), module),
        lambda: check_average(parts["ema"], length.steps),
        lambda: first_step.check_optimizer(
            config,
            module,
            parts["optimizer"],
            parts["scheduler"],
            torch.device("cpu") if settings.get("accelerator") == "cpu" else None,
            length,
        ),
        lambda: checks.check_masters(config, parts["strategy"]),
    ):
        with collected(problems):
            check()
    if problems:
        raise ConfigError(*problems)
    plugin: MasterWeightPrecision = parts["precision"]
    plan = checks.policy_plan(plugin, module)
    memory = count(
        module,
        plan,
        plugin.masters,
        optimizer=state_bytes_of_a_step((p for p in module.parameters() if p.requires_grad), module.make_optimizer),
        activations=activations_of(config, plugin, (size, *shape)),
        averages=len(parts["ema"].profiles) if parts["ema"] is not None else 0,
        shards=ranks if isinstance(parts["strategy"], ModelParallelStrategy) else None,
    )
    report(module, plan, memory, f"each of {ranks} device(s)")
    print(f"\n{size} images of {list(shape)} per batch and device; nothing was computed, no data were read")


def processes(trainer: dict[str, Any]) -> int:
    """Number of processes that a trainer's arguments name; 1 per node where that is left to the machine."""
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    if isinstance(devices, list):
        devices = len(devices)
    if not isinstance(devices, int) or devices < 1:
        print(f"trainer.devices={devices}: counted as 1 per node. Write trainer.devices=NUMBER for another number.")
        devices = 1
    return devices * nodes


def known_shape(config: dict[str, Any], data: Any, module: DiffusionModule) -> tuple[int, ...]:
    """Shape of an image: from the data module, or, where it would have to read data that are not here, from the model.

    Raises:
        ConfigError: If neither tells.
    """
    try:
        shape, classes = tuple(data.image_shape), data.num_classes
    except Exception as error:  # whatever reading what is not there raises
        model = config["model"]
        side = model.get("image_size", config["data"].get("image_size"))
        if not isinstance(side, int) or "in_channels" not in model:
            raise ConfigError(f"dry_run=meta: the data do not say how large an image is: {error}") from error
        print("the data are not here: images are taken to be what the model was made for")
        return (model["in_channels"], side, side)
    checks.check_model(config, module, shape, classes)
    return shape


def activations_of(config: dict[str, Any], plugin: MasterWeightPrecision, shape: tuple[int, ...]) -> int:
    """Bytes that one batch saves for backward, seen by autograd on tensors that have shapes and no values.

    Args:
        config: The whole configuration.
        plugin: Whose policy applies.
        shape: Of a batch of images.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        net, objective = build(config, "model"), build(config, "objective")
        module = DiffusionModule(net, objective, _no_optimizer, seed=config["seed"])
        plan = plugin.policy.resolve(module)
        swap_layers_(module, plan.kinds, "cpu", plan.compute)
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(plan.parameters[name])
        batch: Batch = {"image": torch.empty(shape), "label": torch.zeros(shape[0], dtype=torch.long)}
        time, noise = objective.times(torch.empty(shape[0])), torch.empty(shape)
        with saved_for_backward(module) as saved, compute_context("cpu", plan.compute):
            objective.loss(net, batch["image"], batch["label"], time, noise).mean()
    return saved.bytes


def _no_optimizer(parameters: Any) -> Optimizer:
    raise RuntimeError("nothing is trained here")
