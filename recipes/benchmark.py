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
import json
import logging
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.plugins import MixedPrecision
from omegaconf import DictConfig
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from torch import Tensor

from lightning_mixprec.storage import EXTRA_BITS
from recipes import command_line
from recipes.config import ConfigError, build, check_targets, did_you_mean, fail, plain
from recipes.diffusion import DiffusionModule
from recipes.measure import Clock, Operations, SavedForBackward, gradient_bytes, live_bytes
from recipes.train import quiet

Stock: TypeAlias = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
STOCK: tuple[str, ...] = get_args(Stock)
COUNTERPARTS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed"}
"""What people would use without the plugin."""

FLAGS = ("compile", "clip", "channels_last")
ON_CPU = ("32-true", "bf16-mixed", "bf16-true", "bf16", "bf16+split", "bf16+split24")
ON_GPU = (*ON_CPU, "16-mixed", "16-true", "fp16", "bf16-mixed+compile", "bf16+compile", "fp8+compile")
"""Modes that are measured unless others are asked for. A CPU computes fp16 about twenty times slower than fp32."""

WITHIN = 0.01
"""A recommended mode's loss is above that of fp32 by at most this share."""


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Example:
        >>> mode = Mode.parse("bf16+split+compile")
        >>> mode.precision, mode.masters, mode.compile, mode.stock
        ('bf16', 'split', True, False)
    """

    name: str
    precision: str
    stock: bool
    masters: str = "fp32"
    compile: bool = False
    clip: bool = False
    channels_last: bool = False

    @classmethod
    def parse(cls, name: str) -> Mode:
        """From a name such as `bf16+split`.

        Raises:
            ValueError: If there is no such mode; with the choices.
        """
        precision, *extras = str(name).split("+")
        known = (*STOCK, *COUNTERPARTS)
        if precision not in known:
            raise ValueError(
                f"mode {name!r}: there is no precision {precision!r}.{did_you_mean(precision, known)} Choose among "
                f"{', '.join(known)}."
            )
        stock = precision in STOCK
        choices = (*(() if stock else EXTRA_BITS), *FLAGS)
        for extra in extras:
            if extra not in choices:
                raise ValueError(
                    f"mode {name!r}: there is no '+{extra}'.{did_you_mean(extra, choices)} Choose among "
                    f"{', '.join(choices)}."
                )
        masters = next((extra for extra in extras if extra in EXTRA_BITS), "fp32")
        return cls(str(name), precision, stock, masters, **{flag: flag in extras for flag in FLAGS})

    def counterpart(self) -> str:
        """Name of stock's way to do the same; without clipping, which stock refuses with a fused optimizer."""
        flags = [flag for flag in FLAGS if flag != "clip" and getattr(self, flag)]
        return "+".join([COUNTERPARTS.get(self.precision, self.precision), *flags])


@dataclass
class Measured:
    """What was found out about a mode; lists have an entry for each round.

    Attributes:
        step_seconds: Time of a step, without waiting for data: a round's median.
        update_share: Share of it after backward: gradients to the optimizer, the optimizer, weights for the next step.
        loss: Mean training loss of the last steps of a round, on the same batches and noise in all modes.
        bytes_per_parameter: Weights, masters and optimizer state, from live tensors between two steps.
        gradient_bytes: The same of gradients, when backward has ended.
        saved_bytes: Kept by forward for backward.
        casts: Kernels of forward and backward that only change a dtype.
        cast_bytes: Read and written by them.
        step_cast_bytes: The same for the whole step, the update included.
        reads: Times that the host waits for the device in a step.
        peak_bytes: Largest allocation during the timed steps; None on a CPU, which does not count.
        error: Why there is nothing else.
    """

    step_seconds: list[float] = field(default_factory=list)
    update_share: list[float] = field(default_factory=list)
    loss: float = float("nan")
    bytes_per_parameter: float | None = None
    gradient_bytes: float | None = None
    saved_bytes: int | None = None
    casts: int | None = None
    cast_bytes: int | None = None
    step_cast_bytes: int | None = None
    reads: int | None = None
    peak_bytes: int | None = None
    error: str = ""


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
        scheduler=build(config, "scheduler") if config.get("scheduler") else None,
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
    for key, least in (("rounds", 1), ("warmup", 3), ("steps", 1)):
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < least:
            raise ConfigError(f"{key}={config[key]} must be a whole number, at least {least}.")
    if config["trainer"].get("devices", 1) != 1 or config["trainer"].get("num_nodes", 1) != 1:
        raise ConfigError("trainer.devices: the benchmark measures one device. Write trainer.devices=1.")
    on_gpu = torch.cuda.is_available() and config["trainer"].get("accelerator") != "cpu"
    given = config["modes"] or (ON_GPU if on_gpu else ON_CPU)
    try:
        modes = [Mode.parse(name) for name in given]
    except ValueError as error:
        raise ConfigError(f"modes: {error}") from error
    results = {mode.name: Measured() for mode in modes}
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)  # it tells of every one of many short fits
    try:
        _take_turns(config, modes, results, on_gpu)
    finally:
        log.setLevel(level)
    return results


def _take_turns(config: dict[str, Any], modes: list[Mode], results: dict[str, Measured], on_gpu: bool) -> None:
    for turn in range(config["rounds"]):
        shift = turn % len(modes)  # no mode is always the first, or always after the same one
        for mode in [*modes[shift:], *modes[:shift]]:
            measured = results[mode.name]
            if measured.error:
                continue
            try:
                measure(config, mode, measured, counts=turn == config["rounds"] - 1)
            except ConfigError:
                raise
            except Exception as error:  # a mode that cannot train this recipe here is a result, too
                measured.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                if not isinstance(error, torch.OutOfMemoryError | NotImplementedError | RuntimeError | ValueError):
                    raise
            if on_gpu:
                torch.cuda.empty_cache()


def ratio(results: dict[str, Measured], mode: str, other: str) -> float | None:
    """Median over the rounds of the ratio of two modes' step times; None if one of them was not measured."""
    if other not in results or results[mode].error or results[other].error:
        return None
    pairs = zip(results[mode].step_seconds, results[other].step_seconds, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def compared(results: dict[str, Measured], mode: str, key: str) -> float | None:
    """Ratio of two modes' counts; the other is stock's counterpart."""
    other = results.get(Mode.parse(mode).counterpart())
    ours, theirs = getattr(results[mode], key), getattr(other, key, None)
    return ours / theirs if ours is not None and theirs else None


def show(results: dict[str, Measured], images: int, console: Console) -> None:
    """Print the table, as wide as it is."""
    table = Table(box=None, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    headings = (
        "step, ms",
        "spread",
        "to stock",
        "images/s",
        "update",
        "bytes/param",
        "peak, MB",
        "kept, MB",
        "to stock",
    )
    for heading in (*headings, "casts", "MB cast", "in all", "to stock", "reads", "loss", "to 32-true"):
        table.add_column(heading, justify="right", no_wrap=True)
    exact = next((results[name] for name in ("32-true", "fp32") if name in results), Measured())
    for name, found in results.items():
        if found.error:
            table.add_row(name, "failed", style="red")
            continue
        seconds = statistics.median(found.step_seconds)
        spread = (max(found.step_seconds) - min(found.step_seconds)) / seconds
        table.add_row(
            name,
            f"{seconds * 1e3:.1f}",
            f"{spread:.0%}" if len(found.step_seconds) > 1 else "-",
            _number(ratio(results, name, Mode.parse(name).counterpart()), "{:.2f}"),
            f"{images / seconds:.0f}",
            f"{statistics.median(found.update_share):.0%}",
            _number(found.bytes_per_parameter, "{:.1f}") + _number(found.gradient_bytes, " + {:.1f}"),
            _number(found.peak_bytes, "{:.0f}", 1e6),
            _number(found.saved_bytes, "{:.2f}", 1e6),
            _number(compared(results, name, "saved_bytes"), "{:.0%}"),
            _number(found.casts, "{}"),
            _number(found.cast_bytes, "{:.2f}", 1e6),
            _number(found.step_cast_bytes, "{:.2f}", 1e6),
            _number(compared(results, name, "step_cast_bytes"), "{:.0%}"),
            _number(found.reads, "{}"),
            f"{found.loss:.4f}",
            _number(found.loss / exact.loss - 1 if exact.loss == exact.loss else None, "{:+.2%}"),
        )
    width = Measurement.get(console, console.options.update(width=10_000), table).maximum
    console.width = max(console.width, width)
    console.print(table)
    for name, found in results.items():
        if found.error:
            console.print(f"[red]{name}[/red] failed: ", found.error, sep="", soft_wrap=True)


def _number(value: Any, form: str, unit: float = 1) -> str:
    return "-" if value is None else form.format(value if unit == 1 else value / unit)


def recommendation(results: dict[str, Measured]) -> str:
    """One sentence: the fastest of this plugin's modes that learns as fp32 does; of equally fast ones the smallest.

    Modes within 2 % are equally fast.

    Example:
        >>> slow, fast = (Measured([s], loss=1.0, bytes_per_parameter=b) for s, b in ((0.2, 12.0), (0.1, 14.0)))
        >>> recommendation({"bf16-mixed": slow, "bf16": fast})
        'Take precision=bf16: 0.50 times the step of bf16-mixed.'
    """
    good = {name: found for name, found in results.items() if not found.error}
    exact = next((good[name].loss for name in ("32-true", "fp32") if name in good), None)
    ours = {
        name: found
        for name, found in good.items()
        if not Mode.parse(name).stock and (exact is None or found.loss <= exact * (1 + WITHIN))
    }
    if not ours:
        return "None of the plugin's modes that were measured learns as fp32 does here."
    times = {name: statistics.median(found.step_seconds) for name, found in ours.items()}
    fastest = min(times.values())
    equal = [name for name in ours if times[name] <= 1.02 * fastest]
    best = min(equal, key=lambda name: (_memory(ours[name]), times[name]))
    mode = Mode.parse(best)
    write = [f"precision={mode.precision}"]
    write += [f"precision.masters={mode.masters}"] * (mode.masters != "fp32") + ["compile=true"] * mode.compile
    against = next((name for name in (mode.counterpart(), "32-true") if name in good), None)
    if against is None:
        return f"Take {' '.join(write)}."
    rate = ratio(good, best, against) or 1.0
    memory, theirs = _memory(ours[best]), _memory(good[against])
    less = f", and {memory:.1f} bytes per parameter instead of {theirs:.1f}" if 0 < memory < theirs - 0.05 else ""
    if rate > 1.02:
        return (
            f"None of the plugin's modes is faster than {against} here. The nearest is {' '.join(write)}: {rate:.2f} "
            f"times its step{less}."
        )
    return f"Take {' '.join(write)}: {rate:.2f} times the step of {against}{less}."


def _memory(found: Measured) -> float:
    return (found.bytes_per_parameter or 0) + (found.gradient_bytes or 0)


def machine() -> dict[str, Any]:
    """What it was measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def write(results: dict[str, Measured], config: dict[str, Any], path: Path) -> None:
    """Keep everything as JSON, with the machine, the configuration and the recommendation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: asdict(measured) for name, measured in results.items()}
    document = {"machine": machine(), "recommendation": recommendation(results), "modes": found, "config": config}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")


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
    write(results, config, path)
    print(f"\n{recommendation(results)}\nall figures      {path}")


if __name__ == "__main__":
    command_line.run(main, "benchmark")
