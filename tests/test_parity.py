"""16 bits with masters end where fp32 ends, and 16 bits without them do not: the gate, and the control that it can see.

Compared is the final validation loss of the averaged weights, computed in fp32 on fixed noise, of runs that are pairs:
same seed, so same initial weights, batches, times and noise. Masters must end within 0.7 % of fp32. The control has the
network's parameters in 16 bits with the same stock optimizer on them, as Lightning's `bf16-true` and `16-true` make it,
and everything around the network in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, Precision
from torch import Tensor, nn

from lightning_mixprec import MasterWeightPrecision
from recipes.data import DigitsDataModule
from recipes.diffusion import DiffusionModule
from recipes.dit import DiT
from recipes.loading import Batch
from recipes.objective import EDM
from recipes.randomness import validation_draws
from recipes.unet import UNet

GATE = 0.007
HALF = {"bf16": ("bf16-true", torch.bfloat16), "fp16": ("16-true", torch.float16)}


class Average(L.Callback):
    """Averaged weights in fp32, whatever the weights are."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        for name, value in pl_module.net.state_dict().items():
            self.weights.setdefault(name, value.float().clone()).lerp_(value.float(), 0.02)


class WithoutMasters(DiffusionModule):
    """The control's training step: Lightning's default dtype would make times and noise 16-bit, too."""

    dtype_of_layers = torch.bfloat16

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.set_default_dtype(torch.float32)  # Lightning puts it back after the step
        assert {p.dtype for p in self.net.parameters()} == {self.dtype_of_layers}
        with torch.autocast("cpu", self.dtype_of_layers):
            return super().training_step({**batch, "image": batch["image"].float()}, batch_idx)


def final_loss(mode: str, seed: int, make: Any, steps: int, lr: float, batch_size: int) -> float:
    """Train and validate. `mode` is fp32, bf16, fp16, or one of the last two with `-true`."""
    L.seed_everything(seed, verbose=False)
    net: nn.Module = make()
    data = DigitsDataModule(batch_size=batch_size, seed=seed)
    kind: type[DiffusionModule] = DiffusionModule
    plugin: Precision
    if mode == "fp32":
        plugin = Precision()
    elif mode.endswith("-true"):
        name, dtype = HALF[mode.removesuffix("-true")]
        plugin = HalfPrecision(name)  # type: ignore[arg-type]
        kind = type("Control", (WithoutMasters,), {"dtype_of_layers": dtype})
    else:
        plugin = MasterWeightPrecision(mode)
    module = kind(
        net, EDM(), partial(torch.optim.AdamW, lr=lr),
        partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.05, total_iters=20), seed=seed,
    )  # fmt: skip
    average = Average()
    trainer = L.Trainer(
        plugins=plugin, callbacks=average, max_steps=steps, max_epochs=-1, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    net = make()
    net.load_state_dict(average.weights)
    noise, normal = validation_draws(torch.arange(len(data.val)), data.image_shape)
    with torch.no_grad():
        return float(EDM().loss(net, data.val.images, data.val.labels, EDM().times(normal), noise).mean())


CASES = {
    "bf16": {"make": partial(UNet, 1, 10, [8, 16]), "steps": 300, "lr": 1e-3, "batch_size": 128},
    # A CPU computes fp16 slowly: one block, small batches.
    "fp16": {"make": partial(DiT, 1, 10, 8, hidden_size=16, depth=1, num_heads=2), "steps": 150, "lr": 2e-3,
             "batch_size": 32},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("compute", CASES)
def test_masters_are_within_the_gate_and_16_bits_alone_are_not(compute: str, seed: int) -> None:
    losses = {mode: final_loss(mode, seed, **CASES[compute]) for mode in ("fp32", compute, f"{compute}-true")}
    gaps = {mode: loss / losses["fp32"] - 1 for mode, loss in losses.items()}
    print(losses, gaps)
    assert losses["fp32"] < 1.2  # it has learned: an untrained network is near 1.9
    assert abs(gaps[compute]) < GATE, gaps
    assert not abs(gaps[f"{compute}-true"]) < 3 * GATE, gaps  # or nan, where moments of 16 bits have become zero
