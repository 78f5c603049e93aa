"""torch.compile under the plugin: no graph break, one compilation a phase, right after a layer has moved to fp32."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from reference import loader, make_trainer
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionPolicy
from recipes.dit import DiT
from recipes.unet import UNet

NETS = {
    "unet": lambda: UNet(1, 10, [8, 16]),
    "unet with everything": lambda: UNet(
        1, 10, [8, 16], attention_levels=[1], attention_head_dim=8, scale_shift=True, resample="residual"
    ),
    "dit": lambda: DiT(1, 10, 8, hidden_size=16, num_heads=2),
}


class Denoiser(L.LightningModule):
    """A network of the recipes; compiled, if a backend is given, so that a graph break is an error."""

    def __init__(self, make, backend=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make()
        with torch.no_grad():  # gates and outputs of zero would hide what is behind them
            for param in self.net.parameters():
                if param.requires_grad and not param.any():
                    param.normal_(std=0.1)
        self.losses = []
        if backend is not None:
            self.net.compile(fullgraph=True, backend=backend)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(*batch).float(), batch[0])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.net(*batch).float(), batch[0]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(count: int) -> list:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 1, 8, 8, generator=generator), torch.rand(4, generator=generator), torch.arange(4))
        for _ in range(count)
    ]


def fit(module: Denoiser, plugin: MasterWeightPrecision, count: int = 6, **arguments) -> None:
    torch._dynamo.reset()
    trainer = make_trainer(plugin, num_sanity_val_steps=0, **arguments)
    trainer.fit(module, loader(batches(count)), loader(batches(2)))


@pytest.mark.parametrize("name", NETS)
def test_one_graph_for_training_and_one_for_validation(name):
    """As many as without the plugin. Losses are those of eager layers; a fused backward may sum in another order."""
    counters = {}
    modules = {}
    for kind in ("plain", "bf16", "eager"):
        how = "aot_eager" if (name, kind) == ("dit", "bf16") else "eager"  # traced backward, too, takes its time
        backend = None if kind == "eager" else CompileCounterWithBackend(how)
        modules[kind] = Denoiser(NETS[name], backend)
        plugin = MasterWeightPrecision("fp32" if kind == "plain" else "bf16")
        fit(modules[kind], plugin, check_val_every_n_epoch=1, max_epochs=2)
        counters[kind] = getattr(backend, "frame_count", 0)
    assert counters["plain"] == counters["bf16"] == 2
    for compiled, eager in zip(modules["bf16"].losses, modules["eager"].losses, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=0)


class Loud(nn.Module):
    """Its middle overflows fp16, however small the loss scale is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loud, self.norm, self.last = (
            nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8),
        )  # fmt: skip
        with torch.no_grad():
            self.loud.weight.mul_(1e6)

    def forward(self, image, time, label):
        x = image.flatten(2).transpose(1, 2).reshape(-1, 8)
        return self.last(self.norm(self.loud(self.first(x)))).reshape(image.shape)


def test_a_moved_layer_is_compiled_once_more_and_right():
    backend = CompileCounterWithBackend("aot_eager")
    compiled, eager = Denoiser(Loud, backend), Denoiser(Loud)
    for module in (compiled, eager):
        plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=256), fallback="auto")
        fit(module, plugin, 16, limit_val_batches=0)
        assert plugin.fp32_layers == ["net.loud"]
        assert plugin.real_steps >= 12
    assert backend.frame_count <= 3  # fp16, the batch that is looked into, with the layer in fp32
    torch.testing.assert_close(compiled.losses[-1], eager.losses[-1], rtol=2e-2, atol=0)

    # The same from the beginning is the same.
    policy = PrecisionPolicy("fp16", fp32=["net.loud"])
    given = Denoiser(Loud)
    fit(given, MasterWeightPrecision(policy, scaler=DynamicLossScaler(init_scale=256)), 16, limit_val_batches=0)
    assert abs(float(compiled.losses[-1] / given.losses[-1]) - 1) < 0.1  # it has had a few steps more
