"""What each way of training costs on this machine: `python -m recipes.benchmark [modes=[...]] [key=value]`.

Stock Lightning and this plugin train the same recipe on the same batches with the same noise. Machines are noisy, so
the modes take turns: in each of several rounds every mode trains for a few steps, from the start, and times are
compared within a round. Counts (casts, bytes) are exact and come from one step of the last round.

A mode is stock Lightning's `precision` (`32-true, 16-mixed, bf16-mixed, 16-true, bf16-true`) or the plugin's (`fp32,
bf16, fp16, fp8`), followed by any of `+split`, `+split24`, `+none` (masters), `+compile`, `+clip` (the gradient norm to
1) and `+channels_last`: `bf16+split+compile`.

It leaves out more than one device, data loading and validation.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.plugins import MixedPrecision
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor

from recipes import command_line
from recipes.benchmark_modes import ON_CPU, ON_GPU, Mode
from recipes.benchmark_report import Measured, recommendation, show, write
from recipes.config import ConfigError, build, check_targets, fail, plain
from recipes.cosine import for_run
from recipes.diffusion import DiffusionModule
from recipes.measure import Clock, Operations, SavedForBackward, gradient_bytes, live_bytes
from recipes.run_length import RunLength
from recipes.settings import run_problems
from recipes.train import quiet


class MeasuredModule(DiffusionModule):
    """A recipe's module that says when backward has ended; what it computes is the same."""

    recorder: Recorder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The recipe's, with an eye on what it keeps for backward."""
        with self.recorder.forward(self, batch_idx):
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Lightning's, with a mark at its end."""
        super().backward(loss, *args, **kwargs)
        self.recorder.after_backward(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Nothing: what the recipe logs is not what is measured."""

    def on_train_epoch_end(self) -> None:
        """Nothing."""


class Recorder(L.Callback):
    """Times the steps after the first few, and counts what one of the first does.

    Args:
        measured: Where results go.
        device: Of the module.
        warmup: Steps that are not timed.
        counts: Whether one of them, the last, is counted.
        living: Bytes of tensors before the module was made.
    """

    def __init__(self, measured: Measured, device: torch.device, warmup: int, counts: bool, living: int) -> None:
        self.measured = measured
        self.device = device
        self.warmup = warmup
        self.counted = warmup - 1 if counts else -1  # index of that step
        self.living = living
        self.clock = Clock(device)
        self.marks: list[tuple[Any, Any, Any]] = []  # start, end of backward and end of each step
        self.losses: list[Tensor] = []
        self.step = -1
        self._start: Any = None
        self._backward: Any = None
        self._operations: Operations | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, or the counter."""
        self.step += 1
        if self.step == self.warmup and self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.step == self.counted:
            self._operations = Operations()
            self._operations.__enter__()
        self._start = self.clock.mark()

    @contextlib.contextmanager
    def forward(self, module: L.LightningModule, batch_idx: int) -> Any:
        """Around the training step."""
        if self.step != self.counted:
            yield
            return
        saved = SavedForBackward(module.parameters())
        with saved.counting():
            yield
        self.measured.saved_bytes = saved.bytes

    def after_backward(self, module: L.LightningModule) -> None:
        """Between backward and update."""
        self._backward = self.clock.mark()
        if self._operations is not None:
            self.measured.casts, self.measured.cast_bytes = self._operations.casts, self._operations.cast_bytes
            self.measured.gradient_bytes = gradient_bytes(module) / _size(module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, or the counter."""
        end = self.clock.mark()
        if self._operations is not None:
            self._operations.__exit__(None, None, None)
            self.measured.step_cast_bytes, self.measured.reads = self._operations.cast_bytes, self._operations.reads
            self._operations = None
            held = live_bytes(self.device.type) - self.living - gradient_bytes(pl_module)
            held -= sum(tensor.nbytes for tensor in batch.values() if tensor.device.type == self.device.type)
            self.measured.bytes_per_parameter = held / _size(pl_module)
        elif self.step >= self.warmup:
            self.marks.append((self._start, self._backward, end))
            self.losses.append(outputs["loss"].detach())

    def finish(self) -> None:
        """Work out what was timed."""
        steps = [self.clock.seconds(start, end) for start, _, end in self.marks]
        updates = [self.clock.seconds(backward, end) for _, backward, end in self.marks]
        self.measured.step_seconds.append(statistics.median(steps))
        self.measured.update_share.append(statistics.median(u / s for u, s in zip(updates, steps, strict=True)))
        self.measured.loss = float(torch.stack(self.losses).float().mean())
        if self.device.type != "cpu":
            self.measured.peak_bytes = torch.cuda.max_memory_allocated(self.device)


def _size(module: L.LightningModule) -> int:
    return sum(param.numel() for param in module.parameters())


def measure(config: dict[str, Any], mode: Mode, measured: Measured, *, counts: bool) -> None:
    """Train the recipe in one mode for a round, and add what is found.

    Args:
        config: Plain containers; the keys stand in `conf/benchmark.yaml`.
        mode: How.
        measured: Where results go.
        counts: Whether a step is counted, which makes it slow.
    """
    L.seed_everything(config["seed"], verbose=False)
    data = build(config, "data")
    data.setup("fit")
    accelerator = config["trainer"].get("accelerator", "auto")
    trainer_arguments: dict[str, Any] = {
        "max_steps": config["warmup"] + config["steps"],
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "gradient_clip_val": 1.0 if mode.clip else None,
    }
    device = L.Trainer(
        accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False
    ).strategy.root_device
    living = live_bytes(device.type)
    recorder = Recorder(measured, device, config["warmup"], counts and not mode.compile, living)
    module = MeasuredModule(
        net=build(config, "model"),
        objective=build(config, "objective"),
        optimizer=build(config, "optimizer"),
        scheduler=for_run(config, RunLength(steps=config["warmup"] + config["steps"])),
        seed=config["seed"],
    )
    module.recorder = recorder
    if mode.channels_last:
        module.net.to(memory_format=torch.channels_last)
    if mode.compile:
        module.net.compile()
    trainer = build(config, "trainer", callbacks=[recorder], **precision_of(config, mode, device), **trainer_arguments)
    trainer.fit(module, datamodule=data)
    recorder.finish()


def precision_of(config: dict[str, Any], mode: Mode, device: torch.device) -> dict[str, Any]:
    """The Trainer's argument for a mode; the plugin is made as the configuration says, but for what the mode names."""
    if mode.precision == "16-mixed" and device.type == "cpu":  # which the Trainer itself refuses to combine
        return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}
    if mode.stock:
        return {"precision": mode.precision}
    node = config["precision"]
    policy = {**node["policy"], "compute": mode.precision}
    if mode.precision == "fp8" and device.type == "cpu":
        policy["emulate"] = True  # slowly: for its loss and its counts
    node = {**node, "policy": policy, "masters": mode.masters}
    if mode.precision != "fp16":
        node.pop("scaler", None)
    return {"plugins": build({"precision": node}, "precision")}


def run(config: dict[str, Any]) -> dict[str, Measured]:
    """Measure all modes in turns.

    Raises:
        ConfigError: Before anything is trained.
    """
    check_targets(config)
    if problems := run_problems({**config, "callbacks": {}}):
        raise ConfigError(*problems)
    for key, least in (("rounds", 1), ("warmup", 3), ("steps", 1)):
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < least:
            raise ConfigError(f"{key}={config[key]} must be a whole number, at least {least}.")
    if config["trainer"].get("devices", 1) != 1 or config["trainer"].get("num_nodes", 1) != 1:
        raise ConfigError("trainer.devices: the benchmark measures one device. Write trainer.devices=1.")
    on_gpu = _on_gpu(config)
    given = config["modes"] or (ON_GPU if on_gpu else ON_CPU)
    try:
        modes = [Mode.parse(name) for name in given]
    except ValueError as error:
        raise ConfigError(f"modes: {error}") from error
    results = {mode.name: Measured() for mode in modes}
    if len(results) < len(modes):
        twice = sorted({mode.name for mode in modes if modes.count(mode) > 1})
        raise ConfigError(f"modes: {', '.join(map(repr, twice))} stands there more than once. Name each mode once.")
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)  # it tells of every one of many short fits
    try:
        _take_turns(config, modes, results, on_gpu)
    finally:
        log.setLevel(level)
    return results


def _on_gpu(config: dict[str, Any]) -> bool:
    return torch.cuda.is_available() and config["trainer"].get("accelerator") != "cpu"


def _take_turns(config: dict[str, Any], modes: list[Mode], results: dict[str, Measured], on_gpu: bool) -> None:
    for turn in range(config["rounds"]):
        shift = turn % len(modes)  # no mode is always the first, or always after the same one
        for mode in [*modes[shift:], *modes[:shift]]:
            measured = results[mode.name]
            if measured.error:
                continue
            try:
                measure(config, mode, measured, counts=turn == config["rounds"] - 1)
            except (RuntimeError, ValueError) as error:  # no memory, no kernel: a result, too
                measured.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if on_gpu:
                torch.cuda.empty_cache()


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="benchmark")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    config = plain(cfg)
    try:
        with quiet():
            results = run(config)
    except ConfigError as error:
        fail(error)
    show(results, config["data"]["batch_size"], Console())
    path = output_dir / "benchmark.json"
    advice = recommendation(results, on_cpu=not _on_gpu(config))
    write(results, config, path, advice)
    print(f"\n{advice}\nall figures      {path}")


if __name__ == "__main__":
    command_line.run(main, "benchmark")
