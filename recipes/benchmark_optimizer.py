"""What master weights cost: bytes per parameter, and the time of a step, against the bare optimizer on fp32 weights.

`python -m recipes.benchmark_optimizer` prints both for every way of storing masters. Times are ratios of medians of
steps taken in turns in one process, since machines are noisy; a step is everything between backward and the next
forward: finiteness check, gradients to fp32, unscaling, the optimizer, new 16-bit weights. Bytes are counted from live
tensors, between steps.

It leaves out forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_mixprec.gradients import found_nonfinite
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.storage import Masters
from recipes.measure import live_bytes

Shapes: TypeAlias = Sequence[tuple[int, ...]]
SIZES: dict[str, Shapes] = {"20 M in 60": [(577, 578)] * 60, "2 M in 2000": [(1000,)] * 2000}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
}
RUNGS: list[Masters] = ["fp32", "split", "split24", "none"]


class Parameters(nn.Module):
    """A module that is nothing but parameters of the given shapes.

    Example:
        >>> [p.shape for p in Parameters([(2, 3)]).parameters()]
        [torch.Size([2, 3])]
    """

    def __init__(self, shapes: Shapes, device: str = "cpu") -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, device=device)))


def with_masters(shapes: Shapes, rung: Masters, make: Callable[[Any], Any], device: str) -> Any:
    """A module of bf16 parameters with masters, its optimizer, and a function that makes one whole step.

    Returns:
        (module, masters, optimizer, step).
    """
    module = Parameters(shapes, device)
    masters = MasterWeights(module, {name: torch.bfloat16 for name, _ in module.named_parameters()}, rung)
    params = list(module.parameters())
    optimizer = make(params)
    masters.allocate([optimizer])

    def step() -> None:
        if not bool(found_nonfinite([p.grad for p in params if p.grad is not None], params[0].device)):
            masters.step(optimizer, optimizer.step)
        masters.gradients.release(params)

    return module, masters, optimizer, step


def bytes_per_parameter(rung: Masters, make: Callable[[Any], Any], device: str = "cpu") -> float:
    """Bytes of weights, masters and optimizer state per parameter, between steps."""
    start = live_bytes(device)
    shapes = [(512, 512)] * 8
    module, _masters, _optimizer, step = with_masters(shapes, rung, make, device)
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for two calls
        for _ in range(2):
            for param in module.parameters():
                param.grad = torch.randn_like(param)
            step()
    return (live_bytes(device) - start) / (8 * 512 * 512)


def step_ratio(
    shapes: Shapes, rung: Masters, make: Callable[[Any], Any], device: str = "cpu", rounds: int = 15
) -> tuple[float, float]:
    """Median time of the bare optimizer's step in ms, and the median ratio of ours to it, steps taken in turns."""
    bare = list(Parameters(shapes, device).parameters())
    optimizer = make(bare)
    module, _masters, _optimizer, step = with_masters(shapes, rung, make, device)
    params = list(module.parameters())
    grads = [torch.randn_like(param) for param in params]
    for param in bare:
        param.grad = torch.randn_like(param)

    def seconds(call: Callable[[], Any]) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times, ratios = [], []
    for turn in range(rounds + 3):
        plain = seconds(optimizer.step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        ours = seconds(step)
        if turn >= 3:  # the first steps make state and warm up
            times.append(plain)
            ratios.append(ours / plain)
    return statistics.median(times) * 1e3, statistics.median(ratios)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15, help="steps that are timed, in turns")
    arguments = parser.parse_args()
    device: str = arguments.device
    console = Console()

    table = Table(title=f"Bytes per parameter between steps (bf16, {device}), by masters=")
    table.add_column("optimizer", no_wrap=True)
    for rung in RUNGS:
        table.add_column(f'"{rung}"', justify="right")
    table.add_column("bare fp32", justify="right")
    rows = dict(OPTIMIZERS)
    try:
        from torchao.optim import AdamW8bit

        rows["AdamW8bit (torchao)"] = lambda params: AdamW8bit(params, lr=1e-3)
    except ImportError:
        console.print("torchao is not installed: no row for its 8-bit AdamW. pip install 'lightning_mixprec[lowbit]'")
    for name, make in rows.items():
        if name != "AdamW foreach":
            cells = [f"{bytes_per_parameter(rung, make, device):.2f}" for rung in RUNGS]
            table.add_row(name, *cells, f"{_plain_bytes(make, device):.2f}")
    console.print(table)

    table = Table(
        title=f"Time of a step by masters=, ratio to the bare optimizer ({device}, {torch.get_num_threads()} threads)"
    )
    for heading in ("tensors", "optimizer", "bare, ms"):
        table.add_column(heading, justify="right" if heading.endswith("ms") else "left", no_wrap=True)
    for rung in RUNGS:
        table.add_column(rung, justify="right", no_wrap=True)
    for size, shapes in SIZES.items():
        for name, make in OPTIMIZERS.items():
            results = [step_ratio(shapes, rung, make, device, arguments.rounds) for rung in RUNGS]
            bare = statistics.median(time for time, _ in results)
            table.add_row(size, name, f"{bare:.1f}", *(f"{ratio:.2f}" for _, ratio in results))
    console.print(table)


def _plain_bytes(make: Callable[[Any], Any], device: str) -> float:
    start = live_bytes(device)
    params = list(Parameters([(512, 512)] * 8, device).parameters())
    optimizer = make(params)
    for param in params:
        param.grad = torch.randn_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    for param in params:
        param.grad = None
    return (live_bytes(device) - start) / (8 * 512 * 512)


if __name__ == "__main__":
    main()
