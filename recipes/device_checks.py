"""The plugin's promises, each checked on a device: what `recipes.gpu_check` runs first.

Every check compares with float64, with fp32 or with the same thing done plainly, and says what it measured. It leaves
out more than one device.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.layers import NormLayer, swap_
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.policy import Float8Recipe
from lightning_mixprec.storage import Masters


class Net(nn.Module):
    """Convolutions, both norms and linear layers; `[B, 8, 16, 16]` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(8, 64, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, 64)
        self.norm2 = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.conv_out = nn.Conv2d(64, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 8, 16, 16]` to the same."""
        h = F.silu(self.norm1(self.conv_in(x)))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.mlp(self.norm2(tokens))
        return self.conv_out(tokens.transpose(1, 2).reshape(h.shape))


class Task(L.LightningModule):
    """`Net` learns to remove noise; the loss of a batch in `bad` is infinite."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.net = Net()
        self.bad = bad
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A fp32 scalar."""
        clean, noise = batch.unbind(1)
        loss = F.mse_loss(self.net(clean + noise).float(), noise)
        self.losses.append(loss.detach())
        return loss * float("inf") if batch_idx in self.bad else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The fused kernel, as on any GPU."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


def fit(device: str, plugin: Any, steps: int, module: Task | None = None, **arguments: Any) -> tuple[Task, L.Trainer]:
    """Train a fresh `Task` on the same batches in the same order, whatever the precision."""
    torch.manual_seed(0)
    module = module or Task()
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randn(16, 8, 16, 16, generator=generator)
    batches = [torch.stack([pattern, torch.randn(pattern.shape, generator=generator)], dim=1) for _ in range(8)]
    data: Any = torch.utils.data.DataLoader([batches[i % 8] for i in range(steps)], batch_size=None)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator=device, devices=1, max_epochs=1, plugins=plugin, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, data)
    return module, trainer


def check_norms(device: str) -> str:
    """GroupNorm and LayerNorm of 16-bit activations: within half an ulp and fp32's own error of float64."""
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        for make in (lambda: nn.GroupNorm(8, 64), lambda: nn.LayerNorm(16), lambda: nn.LayerNorm(16, bias=False),
                     lambda: nn.LayerNorm(16, elementwise_affine=False)):  # fmt: skip
            plain_norm = make().double().to(device)
            norm = swap_(make().to(device), NormLayer, device, dtype)
            x = (torch.randn(8, 64, 16, 16, device=device) * 3 + 5).to(dtype).requires_grad_()
            wide = x.detach().double().requires_grad_()
            grad = torch.randn(x.shape, device=device).to(dtype)
            y, exact = norm(x), plain_norm(wide)
            assert y.dtype == dtype, f"{make()} gives {y.dtype}"
            y.backward(grad)
            exact.backward(grad.double())
            assert x.grad is not None
            assert wide.grad is not None
            for found, reference in ((y, exact), (x.grad, wide.grad)):
                ulp = torch.finfo(dtype).eps * 2 ** reference.abs().clamp_min(2.0**-14).log2().floor()
                lost = (found.double() - reference).abs() - 4e-6  # which fp32 loses where values of about 4 cancel
                error = (lost / ulp).max().item()
                worst = max(worst, error)
                assert error <= 0.501, f"{make()} in {dtype}: {error:.3f} ulp"
            for param, other in zip(norm.parameters(), plain_norm.parameters(), strict=True):
                assert param.grad is not None
                assert other.grad is not None
                off = ((param.grad - other.grad).norm() / other.grad.norm()).item()
                assert off < 1e-4, f"{make()}: gradient of a parameter is {off:.1e} off"
    return f"at most {worst:.3f} ulp from float64"


def check_masters(device: str) -> str:
    """fp32 masters step as the bare optimizer does on fp32 weights; split masters do so bit for bit."""
    torch.manual_seed(0)
    start = [torch.randn(257, 64, device=device), torch.randn(64, device=device), torch.randn(5, 3, device=device)]
    ends: dict[str, list[Tensor]] = {}
    rungs: list[Masters] = ["fp32", "split"]
    for rung in rungs:
        module = nn.ParameterList([nn.Parameter(each.clone()) for each in start])
        masters = MasterWeights(module, {name: torch.bfloat16 for name, _ in module.named_parameters()}, rung)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        masters.allocate([optimizer])
        generator = torch.Generator(device).manual_seed(1)
        for _ in range(50):
            for param in module.parameters():
                param.grad = torch.randn(param.shape, device=device, generator=generator).bfloat16()
            masters.step(optimizer, optimizer.step)
        ends[rung] = [masters.read(param).clone() for param in module.parameters()]
    plain_params = [nn.Parameter(each.clone()) for each in start]
    optimizer = torch.optim.AdamW(plain_params, lr=1e-3, fused=True)
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(50):
        for param in plain_params:
            param.grad = torch.randn(param.shape, device=device, generator=generator).bfloat16().float()
        optimizer.step()
    assert all(map(torch.equal, ends["fp32"], ends["split"])), "split masters differ from fp32 masters"
    off = max((a - b).abs().max().item() for a, b in zip(ends["fp32"], plain_params, strict=True))
    assert off <= 1e-6, f"fp32 masters are {off:.1e} off the bare optimizer's weights"
    return f"split equals fp32 bit for bit; {off:.0e} from the bare optimizer"


def check_rounding(device: str) -> str:
    """Stochastic rounding is unbiased: a decay far below the last bit arrives."""
    found = []
    rungs: list[tuple[Masters, float]] = [("split24", 1e-6), ("none", 1e-4)]
    for rung, decay in rungs:
        module = nn.ParameterList([nn.Parameter(torch.rand(200_000, device=device) + 0.5)])
        masters = MasterWeights(module, {"0": torch.bfloat16}, rung)
        before = masters.read(module[0]).double().norm()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0, weight_decay=decay)
        masters.allocate([optimizer])
        for _ in range(500):
            module[0].grad = torch.zeros_like(module[0])
            masters.step(optimizer, optimizer.step)
        ratio = (masters.read(module[0]).double().norm() / before).item()
        expected = (1 - decay) ** 500
        assert abs(ratio - expected) < 3e-4, f"{rung}: {ratio:.6f} instead of {expected:.6f}"
        found.append(f"{rung} {ratio:.5f} (exact {expected:.5f})")
    return ", ".join(found)


def check_learning(device: str) -> str:
    """Every mode learns what fp32 learns."""
    losses = {}
    modes: dict[str, Callable[[], Any]] = {
        "fp32": lambda: MasterWeightPrecision("fp32"),
        "bf16": lambda: MasterWeightPrecision("bf16"),
        "bf16 split24": lambda: MasterWeightPrecision("bf16", masters="split24"),
        "fp16": lambda: MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=1024)),
    }
    for name, make in modes.items():
        module, _ = fit(device, make(), 80)
        losses[name] = float(torch.stack(module.losses[-8:]).mean())
    for name, loss in losses.items():
        assert abs(loss / losses["fp32"] - 1) < 0.02, f"{name}: loss {loss:.4f}, fp32 {losses['fp32']:.4f}"
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


def check_skip(device: str) -> str:
    """An overflow costs its batch and half the scale, and leaves no other trace."""
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler(init_scale=1024))
    module, trainer = fit(device, plugin, 9, Task(frozenset({3})))
    assert (plugin.skipped_steps, plugin.real_steps, trainer.global_step) == (1, 8, 8), "steps were miscounted"
    assert plugin.loss_scale == 512, f"scale {plugin.loss_scale}"
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {8.0}, f"the optimizer counted {steps}"
    assert all(param.isfinite().all() for param in module.parameters()), "weights are not finite"
    return "1 of 9 batches skipped, scale 1024 -> 512"


def check_edits(device: str) -> str:
    """What user code writes into weights reaches the masters, and what it leaves alone keeps all its bits.

    On a GPU the host learns of it only behind an update that then has done nothing, and is made again.
    """

    class Edited(Task):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.0, fused=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (2, 5):
                self.net.mlp[0].get_parameter("weight").data[batch_idx] = 0.1 * batch_idx
                self.net.conv_in.weight.data.clamp_(-0.05, 0.05)

    rungs: list[Masters] = ["fp32", "split"]
    for masters in rungs:
        module = Edited()
        given = {name: value.clone() for name, value in module.net.state_dict().items()}
        _, trainer = fit(device, MasterWeightPrecision("bf16", masters=masters), 8, module)
        found = {name: value.cpu() for name, value in module.net.state_dict().items()}
        assert trainer.global_step == 8, f"{trainer.global_step} steps of 8"
        steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
        assert steps == {8.0}, f"the optimizer counted {steps}"
        linear, before = found["mlp.0.weight"], given["mlp.0.weight"]
        others = [row for row in range(len(linear)) if row not in (2, 5)]
        assert torch.equal(linear[others], before[others]), f"{masters}: weights beside an edit have changed"
        for row in (2, 5):
            assert (linear[row].bfloat16() == torch.tensor(0.1 * row).bfloat16()).all(), f"{masters}: an edit was lost"
        conv, before = found["conv_in.weight"], given["conv_in.weight"]
        inside = before.bfloat16().abs() < 0.05
        assert torch.equal(conv[inside], before[inside]), f"{masters}: weights inside the bounds have changed"
        assert conv.bfloat16().abs().max() <= 0.0501, f"{masters}: an edit was lost"
    return "two edits of two weights, by each rung that holds all bits"


def check_synchronisations(device: str) -> str:
    """Nothing reads the device before an update is queued.

    Behind it the host waits for an event, whether it was a skip: torch's debug mode does not count that, as it costs
    the device nothing.
    """
    if device == "cpu":
        return "not on a CPU"

    class Watched(Task):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("warn" if batch_idx >= 4 else "default")

    counts = {}
    for name, make in (
        ("bf16", lambda: MasterWeightPrecision("bf16")),
        ("fp16", lambda: MasterWeightPrecision("fp16")),
    ):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(device, make(), 8, Watched(), gradient_clip_val=1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if "synchroniz" in str(each.message)]
        counts[name] = len(waits) / 4  # batches 4 to 7, and the end of the fit
    assert max(counts.values()) <= 1, f"{counts} a batch"
    return ", ".join(f"{name}: {count:.2f} a batch" for name, count in counts.items())


def check_compile(device: str) -> str:
    """A compiled network has no graph break and learns the same."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, _ = fit(device, MasterWeightPrecision("bf16"), 16)
    torch.manual_seed(0)
    module = Task()
    module.net.compile()
    compiled, _ = fit(device, MasterWeightPrecision("bf16"), 16, module)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    assert breaks == 0, f"{breaks} graph breaks: {dict(torch._dynamo.utils.counters['graph_break'])}"
    ends = [float(torch.stack(each.losses[-4:]).mean()) for each in (eager, compiled)]
    assert abs(ends[1] / ends[0] - 1) < 0.02, f"losses {ends}"
    return f"0 graph breaks, loss {ends[1]:.4f} (eager {ends[0]:.4f})"


def check_float8(device: str) -> str:
    """fp8 layers learn what bf16 learns, with batches of any size, and multiply zeros exactly."""
    from lightning_mixprec.float8 import Products, swap_linear_  # needs torchao, and fails this check alone without it

    emulate = device == "cpu"
    losses = {}
    recipes: tuple[Float8Recipe, ...] = ("tensorwise", "rowwise")
    policies = {"bf16": PrecisionPolicy("bf16")}
    for recipe in recipes:
        policies[f"fp8 {recipe}"] = PrecisionPolicy(
            "bf16", fp8=["net.mlp.*"], fp8_defaults=False, fp8_recipe=recipe, emulate=emulate
        )
    for name, policy in policies.items():
        module, _ = fit(device, MasterWeightPrecision(policy), 40)
        losses[name] = float(torch.stack(module.losses[-8:]).mean())
    for name, loss in losses.items():
        assert abs(loss / losses["bf16"] - 1) < 0.02, f"{name}: loss {loss:.4f}, bf16 {losses['bf16']:.4f}"
    layer = nn.Linear(64, 32).to(device, torch.bfloat16)
    with torch.no_grad():
        layer.weight.zero_()
    swap_linear_(layer, device, torch.bfloat16, Products.of("tensorwise", emulate=emulate))
    for tokens in (1, 15, 16, 33):
        y = layer(torch.randn(tokens, 64, device=device, dtype=torch.bfloat16))
        assert torch.equal(y, layer.bias.expand_as(y)), f"zero weights and {tokens} tokens do not give the bias"
        y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all(), "gradients of a zero layer are not finite"
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


def check_checkpoint(device: str) -> str:
    """What comes back from the device is fp32 and loads strictly into a plain module."""
    plugin = MasterWeightPrecision("bf16", masters="split")
    module, _ = fit(device, plugin, 8)
    state = copy.deepcopy(module.state_dict())
    fresh = Task()
    fresh.load_state_dict(state)
    assert {value.dtype for value in state.values()} == {torch.float32}, "not fp32"
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name].cpu()), name
    kept = sum((value != value.bfloat16().float()).float().mean().item() for value in state.values()) / len(state)
    assert kept > 0.5, "the low bits are gone"
    return f"fp32, strict; {kept:.0%} of the elements need more than bf16"


CHECKS: dict[str, Callable[[str], str]] = {
    "norms": check_norms,
    "masters": check_masters,
    "rounding": check_rounding,
    "learning": check_learning,
    "skipped steps": check_skip,
    "edits": check_edits,
    "synchronisations": check_synchronisations,
    "compile": check_compile,
    "fp8": check_float8,
    "checkpoint": check_checkpoint,
}


def run_checks(device: str, console: Console) -> dict[str, dict[str, Any]]:
    """All checks, one after the other; a failure does not stop the others."""
    found: dict[str, dict[str, Any]] = {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            passed, text = True, check(device)
        except Exception as error:
            passed, text = False, f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                text += f"\n{traceback.format_exc(limit=-3)}"
        seconds = time.perf_counter() - start
        found[name] = {"passed": passed, "found": text, "seconds": round(seconds, 1)}
        color = "green" if passed else "red"
        console.print(f"[{color}]{'passed' if passed else 'FAILED'}[/{color}] {name:17}", end=" ")
        console.print(f"{text} ({seconds:.0f} s)", markup=False, highlight=False, soft_wrap=True)
    return found
