"""Networks with one planted fault: a layer that fp16 cannot hold, among 24 that it can."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Mlp(nn.Module):
    """[B, T, 8] -> [B, T, 8]."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class LoudMlp(nn.Module):
    """Activations of about 1e6 between its layers; the norm brings them back."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.fc1.weight.mul_(1e6)

    def forward(self, x):
        return self.fc2(self.norm(F.relu(self.fc1(x))))


class Attention(nn.Module):
    """Hand-written; its logits reach 1e6 before they are brought back."""

    gain = 1e6

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        logits = (q * self.gain) @ k.transpose(-1, -2)
        return self.proj((logits / self.gain).softmax(-1) @ v)


class LateAttention(Attention):
    """Well for 50 calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    @property
    def gain(self):
        return 1e6 if self.calls > 50 else 1.0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x)


class Rescale(nn.Module):
    """A root-mean-square norm by hand, of activations whose squares fp16 does not hold: it gives zeros."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.fc(x) * 3000
        return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * self.weight


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Steep(nn.Module):
    """Harmless forward; inside, gradients are 1e9 times what they are outside."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = F.gelu(_Multiply.apply(x, 1e-9))
        return self.fc(_Multiply.apply(h, 1e9))


class Net(nn.Module):
    """Residual blocks in fp16 all the way, the fifth of them planted."""

    def __init__(self, planted: type[nn.Module] = Mlp):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(planted() if index == 5 else Mlp() for index in range(12))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Planted(L.LightningModule):
    """Regression on one batch, over and over, so that losses depend on the number of real steps alone."""

    def __init__(self, planted: type[nn.Module] = Mlp, lr: float = 1e-3):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(planted)
        self.lr = lr
        self.losses: list[float] = []  # of batches whose update was taken, when it was

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.last = F.mse_loss(self.net(x).float(), y)
        return self.last

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if len(self.losses) < self.trainer.global_step:
            self.losses.append(self.last.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, WIDTH, generator=generator), torch.randn(4, 6, 1, generator=generator)
