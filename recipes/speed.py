"""How fast training is, and what it spends its time and memory on.

Why not Lightning's `ThroughputMonitor`: it waits for the device in every batch, and takes a precision plugin that it
does not know for fp32, whose peak is not the one to compare with.

It leaves out validation, sampling and saving after a validation: the clock stands still meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from recipes.diffusion import DiffusionModule
from recipes.flops import peak_flops, training_flops
from recipes.loading import Batch


class SpeedMonitor(L.Callback):
    """Logs speed, waiting, memory and utilisation since the last logging step.

    - `perf/images_per_second`: of all ranks together.
    - `perf/step_seconds`: per optimizer step.
    - `perf/data_wait_share`: share of the time in which this rank waited for its loader.
    - `perf/peak_memory_gib`: most memory that PyTorch has had allocated on the GPU since the start; on a CPU, the most
      that the process has held.
    - `perf/tflop_per_second`: of all ranks, from the FLOPs of forward and backward, counted once before training.
    - `perf/mfu`: that over the peak of all devices in the compute dtype. Only where the peak is known; where it is not,
      that is said once. With fp8 layers it is still the share of the compute dtype's peak.

    The device is waited for at logging steps alone.

    Attributes:
        flops_per_image: Floating-point operations of forward and backward.
        rates: What was logged last, without `perf/`.

    Example:
        >>> trainer = L.Trainer(callbacks=SpeedMonitor(), accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    custom_scalars: ClassVar = {
        "Speed": {
            "images per second": ["perf/images_per_second"],
            "share of the time spent waiting for data": ["perf/data_wait_share"],
            "peak memory, GiB": ["perf/peak_memory_gib"],
            "share of the device's peak": ["perf/mfu"],
        }
    }

    def __init__(self) -> None:
        self.flops_per_image = 0
        self.rates: dict[str, float] = {}
        self._peak: int | None = None  # FLOP/s of one device
        self._reset(None)

    def _reset(self, now: float | None) -> None:
        self._images = self._steps = 0
        self._elapsed = self._waited = 0.0  # seconds, without the time since `_since`
        self._since = now  # None: the clock stands still

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count the FLOPs, while the network is whole and fp32."""
        shape = getattr(trainer.datamodule, "image_shape", None)  # type: ignore[attr-defined]
        if stage == "fit" and isinstance(pl_module, DiffusionModule) and shape is not None:
            self.flops_per_image = training_flops(pl_module.net, shape)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the peak, or say why there is none."""
        self._reset(None)
        dtype = getattr(trainer.precision_plugin, "compute_dtype", torch.float32)
        self._peak, why = peak_flops(trainer.strategy.root_device, dtype)
        if self._peak is None and trainer.loggers:
            rank_zero_info(f"perf/mfu is not logged: {why}. perf/tflop_per_second is.")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stand still until the first batch: what comes before it is the making of the loader's iterator."""
        self._stop()

    def _stop(self) -> None:
        if self._since is not None:
            self._elapsed += time.perf_counter() - self._since
            self._since = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start the clock after a pause; from the second batch of an epoch on, see how long the loader takes."""
        if self._since is None:
            self._since = time.perf_counter()
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is not None and not isinstance(fetcher._start_profiler, _Wait):
            # Lightning's own hooks around the loader, which it sets at the start of every epoch.
            wait = _Wait(self, fetcher._start_profiler, fetcher._stop_profiler)
            fetcher._start_profiler, fetcher._stop_profiler = wait, wait.stop

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stand still until the next training batch."""
        self._stop()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count, and log at Lightning's logging steps."""
        self._images += len(batch["image"]) * trainer.world_size
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # else the clock would be ahead of it
        self._stop()
        self.rates = self._rates(trainer, device)
        for logger in trainer.loggers:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            logger.log_metrics({f"perf/{name}": value for name, value in self.rates.items()}, step=step)
        self._reset(time.perf_counter())

    def _rates(self, trainer: L.Trainer, device: torch.device) -> dict[str, float]:
        rates = {
            "images_per_second": self._images / self._elapsed,
            "step_seconds": self._elapsed / self._steps,
            "data_wait_share": self._waited / self._elapsed,
            "peak_memory_gib": peak_memory(device) / 2**30,
        }
        if self.flops_per_image:
            per_second = self.flops_per_image * rates["images_per_second"]
            rates["tflop_per_second"] = per_second / 1e12
            if self._peak is not None:
                rates["mfu"] = per_second / (self._peak * trainer.world_size)
        return rates


class _Wait:
    """Times the loader, and lets Lightning's profiler do the same."""

    def __init__(self, monitor: SpeedMonitor, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._monitor, self._start, self._stop = monitor, start, stop
        self._since = 0.0

    def __call__(self) -> None:
        self._start()
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._monitor._since is not None:  # the clock runs
            self._monitor._waited += time.perf_counter() - self._since
        self._stop()


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by PyTorch on a GPU, else by this process; 0 where neither can be asked.

    Example:
        >>> peak_memory(torch.device("cpu")) > 2**20
        True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # bytes there, KiB elsewhere
