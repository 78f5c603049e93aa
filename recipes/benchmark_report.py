"""What is made of the figures of `recipes.benchmark`: a table, JSON, and one sentence of advice.

It leaves out how they were measured.
"""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lightning_mixprec.policy import COMPUTE_DTYPES
from lightning_mixprec.processor import lacks_instructions
from recipes.benchmark_modes import Mode

WITHIN = 0.01
"""A recommended mode's loss is above that of fp32 by at most this share."""


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
        reads: Times that the host reads the device in a step, which then has nothing left to do.
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


def recommendation(results: dict[str, Measured], on_cpu: bool = False) -> str:
    """One sentence: the fastest of this plugin's modes that learns as fp32 does; of equally fast ones the smallest.

    Modes within 2 % are equally fast. Where 16 bits are slower than fp32, that is the answer; where a CPU has no
    instructions for them and fp32 was not measured, a second sentence says so.

    Args:
        results: By mode.
        on_cpu: Whether they were measured on a CPU.

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
    wide = next((name for name in ("32-true", "fp32") if name in good), None)
    slower = ratio(good, best, wide) if wide else None
    if slower is not None and slower > 1.02 and mode.precision != "fp32":
        return (
            f"Take precision=fp32: the fastest of the plugin's modes in 16 bits, {' '.join(write)}, is {slower:.2f} "
            f"times the step of {wide} here."
        )
    unknown = ""
    if wide is None and on_cpu and lacks_instructions(COMPUTE_DTYPES[mode.precision]):
        unknown = (
            f" This CPU has no instructions for {mode.precision}, so fp32 is likely faster, and it was not measured: "
            "add 32-true to modes=[...]."
        )
    return _advice(good, best, " ".join(write)) + unknown


def _advice(good: dict[str, Measured], best: str, write: str) -> str:
    """The best of the plugin's modes, as it is written, beside what people would use without the plugin."""
    mode = Mode.parse(best)
    against = next((name for name in (mode.counterpart(), "32-true") if name in good), None)
    if against is None:
        return f"Take {write}."
    rate = ratio(good, best, against) or 1.0
    memory, theirs = _memory(good[best]), _memory(good[against])
    less = f", and {memory:.1f} bytes per parameter instead of {theirs:.1f}" if 0 < memory < theirs - 0.05 else ""
    if rate > 1.02:
        return (
            f"None of the plugin's modes is faster than {against} here. The nearest is {write}: {rate:.2f} "
            f"times its step{less}."
        )
    return f"Take {write}: {rate:.2f} times the step of {against}{less}."


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


def write(results: dict[str, Measured], config: dict[str, Any], path: Path, advice: str) -> None:
    """Keep everything as JSON, with the machine, the configuration and the advice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: asdict(measured) for name, measured in results.items()}
    document = {"machine": machine(), "recommendation": advice, "modes": found, "config": config}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")
