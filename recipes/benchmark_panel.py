"""What watching costs: `python -m recipes.benchmark_panel [group=option] [key=value]`, as for `recipes.train`.

One run in which `PrecisionMonitor` and `SpeedMonitor` watch ten batches and look away for the next ten, so that other
work on the machine slows both alike. Every block holds one logging step. The ratio is that of a block watched to the
mean of its two neighbours; a look at all layers is timed apart and shared out over the batches between two of them.

It leaves out what TensorBoard's own thread writes later, and the means by noise level: a dozen small operations.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from lightning_mixprec import PrecisionMonitor
from recipes.command_line import CONF
from recipes.config import build, plain
from recipes.diffusion import DiffusionModule
from recipes.speed import SpeedMonitor

BLOCK = 10  # batches, and between two logging steps
LOOK_EVERY = 15  # batches that are watched, so that every other block has a look in it


class Alternating(L.Callback):
    """Hands its hooks on to other callbacks in every other block of batches, and times the blocks.

    Args:
        monitor: Watches the layers.
        speed: Watches the clock.

    Attributes:
        blocks: Seconds, whether it was watched, and number of looks at all layers, of each block.
    """

    def __init__(self, monitor: PrecisionMonitor, speed: SpeedMonitor) -> None:
        self.monitor = monitor
        self.parts: list[Any] = [monitor, speed]
        self.blocks: list[tuple[float, bool, int]] = []
        self._batches = self._looks = 0
        self._since = 0.0

    @property
    def watching(self) -> bool:
        """Whether this block is watched."""
        return self._batches // BLOCK % 2 == 1

    def looks_at_gradients(self, trainer: L.Trainer) -> bool:
        """As the monitor says, while it watches."""
        return self.watching and self.monitor.looks_at_gradients(trainer)

    def _tell(self, hook: str, *arguments: Any) -> None:
        for part in self.parts:
            getattr(part, hook)(*arguments)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Always."""
        self._tell("setup", trainer, pl_module, stage)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Always."""
        self._tell("on_fit_start", trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Always."""
        self._tell("on_train_start", trainer, pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        """Start a block, or go on with it."""
        if self._batches % BLOCK == 0:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize(trainer.strategy.root_device)
            now = time.perf_counter()
            if self._batches:
                self.blocks.append((now - self._since, (self._batches - 1) // BLOCK % 2 == 1, self._looks))
            self._since, self._looks = now, 0
        if self.watching:
            self._tell("on_train_batch_start", trainer, pl_module, *arguments)
            self._looks += self.monitor._stats is not None

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In blocks that are watched."""
        if self.watching:
            self._tell("on_after_backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """In blocks that are watched."""
        if self.watching:
            self._tell("on_before_optimizer_step", trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        """In blocks that are watched."""
        if self.watching:
            self._tell("on_train_batch_end", trainer, pl_module, *arguments)
        self._batches += 1


def shares(blocks: list[tuple[float, bool, int]], every: int) -> dict[str, float]:
    """What watching costs, as shares of the time of a batch.

    Args:
        blocks: As `Alternating` has timed them.
        every: Batches between two looks at all layers.

    Example:
        >>> found = shares([(1.0, False, 0), (1.01, True, 0), (1.0, False, 0), (1.11, True, 1), (1.0, False, 0)], 500)
        >>> {name: round(share, 4) for name, share in found.items()}
        {'logging': 0.01, 'look': 1.0, 'total': 0.012}
    """
    plain_ratios: list[float] = []
    look_ratios: list[float] = []
    for before, (seconds, watched, looks), after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if watched and looks < 2:
            (look_ratios if looks else plain_ratios).append(2 * seconds / (before[0] + after[0]))
    logging = statistics.median(plain_ratios) - 1
    look = (statistics.median(look_ratios) - 1 - logging) * BLOCK
    return {"logging": logging, "look": look, "total": logging + look / every}


def measure(overrides: list[str], steps: int = 800) -> tuple[dict[str, float], int]:
    """Train for so many steps; shares as above, and the batches between two looks by default."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["logger=none", "callbacks=none", "trainer.default_root_dir=null", *overrides])
    config = plain(cfg)
    L.seed_everything(config["seed"])
    data = build(config, "data")
    module = DiffusionModule(
        build(config, "model"), build(config, "objective"), build(config, "optimizer"), seed=config["seed"]
    )
    alternating = Alternating(PrecisionMonitor(layers_every_n_steps=LOOK_EVERY), SpeedMonitor())
    with tempfile.TemporaryDirectory() as directory:
        trainer = L.Trainer(
            accelerator=config["trainer"]["accelerator"],
            devices=1,
            plugins=build(config, "precision"),
            callbacks=alternating,
            logger=TensorBoardLogger(directory, name="", version=""),
            max_steps=steps,
            log_every_n_steps=BLOCK,
            limit_val_batches=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, datamodule=data)
    every = PrecisionMonitor().layers_every_n_steps or 1
    return shares(alternating.blocks[6:], every), every  # without the looks at batches 1, 2, 4, 8 and the warm-up


def main() -> None:
    """What the command line calls."""
    found, every = measure(sys.argv[1:])
    table = Table(title="Cost of the panel")
    table.add_column("what")
    table.add_column("of the time of a batch", justify="right")
    table.add_row(f"vital signs and speed, every {BLOCK} batches", f"{found['logging']:+.2%}")
    table.add_row(f"one look at all layers, shared out over {every} batches", f"{found['look'] / every:+.2%}")
    table.add_row("together", f"{found['total']:+.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
