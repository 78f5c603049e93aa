"""The slow plain reference: one small network and its training loop, written out in plain PyTorch.

No autocast, no class swaps, no hooks: every cast stands where it happens. The plugin must follow it bit for bit.
"""

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPARAMETRISATIONS = [
    nn.utils.spectral_norm,
    nn.utils.weight_norm,
    nn.utils.parametrizations.spectral_norm,
    nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.orthogonal,
]
HALF = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TinyNet(nn.Module):
    """[B, 1, 4, 4] -> [B, 1, 4, 4] with one layer of every kind: compute, norm, and (by their names) fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = nn.Linear(4, 8)
        self.conv_in = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.proj = nn.Linear(8, 8)
        self.conv_out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.norm(self.conv_in(x)))
        h = h + self.proj(F.silu(self.time_embedding(t)))[:, :, None, None]
        return self.conv_out(F.silu(h))


def reference_forward(p: dict[str, Tensor], x: Tensor, t: Tensor, dtype: torch.dtype) -> Tensor:
    """TinyNet under the default policy, by hand; `p` holds 16-bit copies of conv_in and proj, the rest fp32."""
    h = F.conv2d(x.to(dtype), p["conv_in.weight"], p["conv_in.bias"], padding=1)
    # On a CPU torch's kernel takes bf16 with fp32 parameters, computes in fp32 and rounds once.
    wide = h if dtype == torch.bfloat16 else h.float()
    h = F.group_norm(wide, 2, p["norm.weight"], p["norm.bias"]).to(dtype)
    emb = F.silu(F.linear(t, p["time_embedding.weight"], p["time_embedding.bias"]))
    h = F.silu(h) + F.linear(emb.to(dtype), p["proj.weight"], p["proj.bias"])[:, :, None, None]
    return F.conv2d(F.silu(h).float(), p["conv_out.weight"], p["conv_out.bias"], padding=1)


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest, but bf16 ties half up in magnitude: the upper half of the fp32 bits plus half a unit."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    upper = (master.view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def reference_train(net, batches, precision, make_optimizer, *, accumulate=1, clip=None, scale=1.0, bad=()):
    """Train `net` on `batches` (all of one epoch) and return (fp32 weights, optimizer, scale, real steps)."""
    dtype = HALF[precision]
    masters = {name: param.detach().clone() for name, param in net.named_parameters()}
    optimizer = make_optimizer(list(masters.values()))
    total: dict[str, Tensor] = {}
    real_steps = 0
    for index, (x, t, y) in enumerate(batches):
        half = {"conv_in.weight", "conv_in.bias", "proj.weight", "proj.bias"}
        leaves = {n: (rounded(m, dtype) if n in half else m).clone().requires_grad_() for n, m in masters.items()}
        loss = F.mse_loss(reference_forward(leaves, x, t, dtype), y) / accumulate
        if index in bad:
            loss = loss * math.inf
        (loss * scale).backward()
        for name, leaf in leaves.items():
            grad = leaf.grad.float()
            total[name] = total[name] + grad if name in total else grad
        if (index + 1) % accumulate and index + 1 < len(batches):
            continue
        if all(bool(torch.isfinite(grad).all()) for grad in total.values()):
            for name, master in masters.items():
                master.grad = total[name] * (1 / scale)
            if clip is not None:
                nn.utils.clip_grad_norm_(list(masters.values()), clip)
            optimizer.step()
            real_steps += 1
        else:
            scale = scale / 2
        total = {}
    return masters, optimizer, scale, real_steps


class TinyModule(L.LightningModule):
    """TinyNet for the Trainer. Batches whose index is in `bad` overflow: their loss is multiplied by inf."""

    def __init__(self, make_optimizer=None, bad=(), schedule=None) -> None:
        super().__init__()
        self.net = TinyNet()
        self.make_optimizer = make_optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
        self.bad = frozenset(bad)
        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        x, t, y = batch
        loss = F.mse_loss(self.net(x, t).float(), y.float())
        return loss * math.inf if batch_idx in self.bad else loss

    def validation_step(self, batch, batch_idx):
        x, t, y = batch
        self.log("val_loss", F.mse_loss(self.net(x, t).float(), y.float()))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


def make_batches(count: int, size: int = 2, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((size, 1, 4, 4), (size, 4), (size, 1, 4, 4))
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)]


def make_module(*args, seed: int = 0, **kwargs) -> TinyModule:
    torch.manual_seed(seed)
    return TinyModule(*args, **kwargs)


def make_trainer(plugin=None, **kwargs) -> L.Trainer:
    """One epoch on the CPU, nothing on the screen or the disk unless asked for."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False, **quiet, **kwargs}
    return L.Trainer(plugins=plugin, **options)


def loader(data, **kwargs):
    """Batches as they are, one by one."""
    return torch.utils.data.DataLoader(data, batch_size=None, **kwargs)


class Resumable(torch.utils.data.DataLoader):
    """Eight batches as they are; goes on after `done` of them when a checkpoint is loaded."""

    def __init__(self, done: int) -> None:
        super().__init__(make_batches(8), batch_size=None)
        self.done, self.skip = done, 0

    def __iter__(self):
        return iter(make_batches(8)[self.skip :])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.skip = self.done


class SaveAfter(L.Callback):
    """Saves a checkpoint to `path` after `batches` batches of the first epoch, once."""

    def __init__(self, path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches and not self.path.exists():
            trainer.save_checkpoint(self.path)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bitwise equality, dtypes included."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name
