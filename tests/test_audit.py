"""The audit finds what was planted and nothing else, counts as by hand, and leaves no trace."""

import dataclasses
import math
import random

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from reference import TinyModule, assert_same, loader, make_batches, make_trainer, snapshot
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_recipes import ROOT, cli
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, NonFiniteGradientsError, PrecisionPolicy, audit
from lightning_mixprec.audit_result import Audit
from lightning_mixprec.float8_trial import float8_errors
from lightning_mixprec.formats import lost_updates
from lightning_mixprec.overflow import is_within
from recipes import audit as recipe
from recipes import command_line, train
from recipes.audit_report import show
from recipes.unet import UNet

WIDTH = 16


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class MLP(nn.Module):
    """Residual. With `gain`, its hidden values are that much larger, and its output is not."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.act, self.drop, self.fc2 = nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH)
        self.fc1.weight.data *= gain
        self.fc2.weight.data /= gain

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))


class Attention(nn.Module):
    """Written by hand; `gain` multiplies queries and keys."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q.weight.data *= gain
        self.k.weight.data *= gain

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        logits = self.q(h) @ self.k(h).mT * WIDTH**-0.5
        return x + self.out(logits.softmax(-1) @ self.v(h))


class Rescale(nn.Module):
    """A norm that no policy knows by its name, and that squares in whatever dtype comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()


class Rescaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.rescale = nn.Linear(WIDTH, WIDTH), Rescale()
        self.up.weight.data *= 3000

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rescale(self.up(x))


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


class HotGradient(nn.Module):
    """The gradient is 1e8 times larger inside than outside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + ScaleGradient.apply(self.fc(ScaleGradient.apply(x, 1e-8)), 1e8)


class Net(nn.Module):
    """Eight healthy blocks of 30 layers between two more, and `planted` as the fifth block."""

    def __init__(self, planted: nn.Module | None = None) -> None:
        super().__init__()
        blocks: list[nn.Module] = [Attention() if i % 2 else MLP() for i in range(8)]
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks if planted is None else [*blocks[:4], planted, *blocks[4:]])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Task(L.LightningModule):
    """Logs as people do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch).float(), batch.roll(1, -1))
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-7)  # one planted layer has weights of 1e-6


def data(count: int = 2, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(count, 16, 4, WIDTH, generator=torch.Generator().manual_seed(seed)))


def made(planted=None) -> Task:
    torch.manual_seed(0)
    return Task(Net(planted() if planted is not None else None))


@pytest.fixture(autouse=True)
def _no_warning_of_self_log():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.pytorch.core.module.rank_zero_warn", lambda *args, **kwargs: None)
        yield


# What is found

PLANTS = {
    "activations": (lambda: MLP(3e5), {"net.blocks.4.fc1", "net.blocks.4.fc2"}),
    "logits": (lambda: Attention(3000.0), {"net.blocks.4"}),
    "square": (Rescaled, {"net.blocks.4.rescale"}),
    # Its input is 16-bit, so the gradient by it has to be widened too: not the inner layer alone.
    "gradient": (HotGradient, {"net.blocks.4"}),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_was_planted_is_found_and_trains(plant: str) -> None:
    planted, expected = PLANTS[plant]
    module = made(planted)
    found = audit(module, data())
    assert set(found.recommended) == expected
    owners = [layer.name for layer in found.layers if layer.parameters]
    others = [name for name in owners if not any(is_within(name, layer) for layer in expected)]
    assert len(others) >= 20
    assert found.policy.fp32 == tuple(found.recommended)
    assert found.notes == []
    assert found.loss == pytest.approx(found.loss_fp32, rel=2e-2)

    plugin = instantiate(yaml.safe_load(found.to_yaml()), _convert_="all")
    assert plugin.policy.compute == "fp16"
    assert plugin.policy.fp32 == list(found.recommended) or plugin.policy.fp32 == found.policy.fp32
    trainer = make_trainer(plugin, max_steps=4)
    trainer.fit(module, loader(data(4)))
    assert torch.tensor(module.losses).isfinite().all()
    assert plugin.skipped_steps == 0
    assert trainer.global_step == 4


@pytest.mark.parametrize("plant", ["activations", "logits", "gradient"])
def test_without_the_policy_nothing_is_learnt(plant: str) -> None:
    module = made(PLANTS[plant][0])
    before = snapshot(module)
    plugin = MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=1.0, max_consecutive_skips=3))
    with pytest.raises(NonFiniteGradientsError, match="3 training batches in a row"):
        make_trainer(plugin).fit(module, loader(data(4)))
    assert plugin.real_steps == 0
    assert_same(snapshot(module), before)


def test_without_the_policy_a_squaring_norm_is_dead() -> None:
    x = torch.full((1, WIDTH), 900.0)
    assert Rescale()(x.half()).abs().max() == 0
    assert Rescale()(x).abs().max() == 1


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_nothing_is_found_in_a_healthy_model(compute: str) -> None:
    found = audit(made(), data(), policy=compute)
    assert found.recommended == {}
    assert found.notes == []
    assert found.policy.fp32 == ()
    assert repr(found.policy) == f"PrecisionPolicy('{compute}')"
    dtypes = {layer.name: layer.dtype for layer in found.layers}
    assert dtypes["net.stem"] == compute
    assert dtypes["net.blocks.0.norm"] == "norm"


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 1000)


def test_range_is_no_trouble_for_bf16_but_phase_is() -> None:
    assert audit(made(lambda: MLP(3e5)), data(), policy="bf16").recommended == {}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Fourier()), nn.Linear(WIDTH, WIDTH))
    found = audit(Task(net), data(), policy="bf16")
    assert list(found.recommended) == ["net.1.0"]  # and not the containers, whose own code is right
    assert "off by more than a tenth" in found.recommended["net.1.0"]


def test_what_code_in_a_container_rounds_away_is_found() -> None:
    class Sum(nn.Module):  # fp16 keeps 1.1 of 101.1, but not of 30001.1
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.fc, self.offset = nn.Linear(WIDTH, WIDTH), offset

        def forward(self, x: Tensor) -> Tensor:
            return (self.fc(x) + self.offset) - self.offset

    net = nn.Sequential(Sum(100.0), nn.Linear(WIDTH, WIDTH), Sum(30000.0))
    assert list(audit(Task(net), data()).recommended) == ["net.2"]


class Zoo(nn.Module):
    """Modules that are hard to watch: in place, several outputs, a list, no gradient, called again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.mlp, self.frozen, self.unused = MLP(), nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(3, 3)
        self.embedding = nn.Embedding(4, WIDTH)
        self.first = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.embedding(torch.arange(4))
        x = self.conv(x)
        with torch.no_grad():
            x = x + self.frozen(x)
        x = self.lstm(x)[0] + self.attention(x, x, x)[0]
        return checkpoint(self.mlp, self.normed(x), use_reentrant=False)


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_layers_of_many_kinds_are_watched(compute: str) -> None:
    torch.manual_seed(0)
    found = audit(Task(Zoo()), data(), policy=compute)
    assert found.recommended == {}
    assert found.notes == []
    layers = {layer.name: layer for layer in found.layers}
    assert layers["net.mlp.fc1"].gradient > 0
    assert layers["net.lstm"].activation > 0
    assert layers["net.frozen"].gradient == 0
    assert layers["net.unused"].activation == 0
    assert layers["net.unused"].parameters == 12


def test_what_the_policy_keeps_in_fp32_is_not_blamed() -> None:
    module = made(lambda: Attention(3000.0))
    policy = PrecisionPolicy("fp16", fp32=[Attention, nn.GELU])
    found = audit(module, data(), policy=policy)
    assert found.recommended == {}
    assert found.policy.fp32 == (Attention, nn.GELU)
    assert yaml.safe_load(found.to_yaml())["policy"]["fp32"] == ["Attention", "GELU"]


def test_code_that_refuses_what_is_not_finite_is_no_obstacle() -> None:
    class Asserting(Task):
        def training_step(self, batch, batch_idx):
            output = self.net(batch)
            assert output.isfinite().all(), "not finite"
            return F.mse_loss(output.float(), batch)

    torch.manual_seed(0)
    found = audit(Asserting(Net(Attention(3000.0))), data())
    assert list(found.recommended) == ["net.blocks.4"]
    assert found.notes == []
    assert found.loss == pytest.approx(found.loss_fp32, rel=2e-2)


def test_values_made_in_training_step_are_noted() -> None:
    class Scaling(Task):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net.head(self.net.stem(batch) * 1e5).float() * 1e-5, batch)

    found = audit(Scaling(Net()), data())
    assert found.recommended == {}
    assert "'net.head' is given values up to" in found.notes[0]
    assert "x.float()" in found.notes[0]


def test_code_that_no_policy_can_name_is_noted() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x) * 1000
            return h * h.square().mean().rsqrt()

    found = audit(Root(), data(), lambda model, batch: model(batch).float().square().mean())
    assert found.recommended == {}
    assert len(found.notes) == 1
    assert "own forward" in found.notes[0]
    assert found.notes[0] in str(found)


# What is counted


def test_shares_are_those_counted_by_hand() -> None:
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0, 1e-9]])
    x = torch.tensor([[1e5, 0.0], [1.0, 0.0], [1e-6, 0.0], [1e-9, 0.0]])
    weights = torch.tensor([[1.0], [1e-3], [1e-12], [0.0]])
    layer = audit(net, [x], lambda model, x: (model(x) * weights[: len(x)]).sum(), lr=1e-9).layers[0]
    fp16, bf16, e4m3, e5m2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2

    def shares(counts: dict) -> dict:
        return {dtype: (found.overflow, found.zero, found.subnormal) for dtype, found in counts.items()}

    assert layer.activation == 1e5
    assert shares(layer.activations) == {fp16: (0.25, 0.25, 0.25), bf16: (0, 0, 0), e4m3: (0.25, 0.5, 0)}
    # Four by the outputs, times 2**15: 32768, 33, 3.3e-8, 0; two by the weights: 3.3e9, 0.
    assert layer.gradient == pytest.approx(1e5)
    assert shares(layer.gradients) == {fp16: (1 / 6, 0, 1 / 6), bf16: (0, 0, 0), e5m2: (1 / 6, 1 / 6, 0)}
    assert shares(layer.weights) == {fp16: (0, 0.5, 0), bf16: (0, 0, 0), e4m3: (0, 0.5, 0)}
    # The first weight would move by 1e-4, less than half of 2**-10; the second has no update.
    assert layer.lost_updates == 1.0
    assert "its output's values reach 1e+05" in layer.reason


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_lost_updates_are_those_that_rounding_to_nearest_loses(dtype: torch.dtype, bits: int) -> None:
    weights = torch.randn(4000).mul(10.0 ** torch.randint(-3, 3, (4000,))).to(dtype).float()
    mantissa = torch.frexp(weights).mantissa.abs()
    weights = weights[(mantissa > 0.5) & (weights != 0)]  # below a power of two numbers are twice as dense
    updates = weights * torch.rand(len(weights)) * 2.0 ** (2 - bits)
    exact = (weights.double() + updates.double()).to(torch.float32)
    lost, moved = lost_updates(weights, updates, dtype)
    unchanged = int(((exact.to(dtype).float() == weights) & (updates != 0)).sum())
    assert int(moved) == int((updates != 0).sum())
    assert abs(int(lost) - unchanged) <= 4  # ties, and double rounding
    assert 0 < int(lost) < int(moved)


def test_updates_are_those_of_the_optimizer() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.ones_(net[0].weight)
    batches = [torch.ones(2, 4)]

    def loss(model, x):
        return model(x).mean()

    def lost(**options) -> float:
        return audit(net, batches, loss, **options).layers[0].lost_updates

    assert lost(optimizer=lambda params: torch.optim.Adam(params, lr=4e-4)) == 1.0  # half of 2**-10 is 4.9e-4
    assert lost(optimizer=lambda params: torch.optim.Adam(params, lr=6e-4)) == 0.0
    assert lost(lr=4 * 4e-4) == 1.0  # the gradient is 1 / 4
    assert lost(lr=4 * 6e-4) == 0.0


def test_suggested_scale_is_the_largest_without_overflow() -> None:
    module = made()
    found = audit(module, data(), loss_scale=None)
    assert found.loss_scale == found.suggested_loss_scale
    assert 2.0**10 < found.loss_scale < 2.0**24
    assert all(layer.gradients[torch.float16].overflow == 0 for layer in found.layers if layer.gradients)
    twice = audit(module, data(), loss_scale=2 * found.loss_scale)
    assert max(layer.gradients[torch.float16].overflow for layer in twice.layers) > 0
    assert twice.suggested_loss_scale == found.loss_scale
    assert f"init_scale: {found.loss_scale!r}" in found.to_yaml()


# What is left behind


def test_model_and_random_numbers_are_as_found() -> None:
    module = Task(Zoo())
    module.training_step(data()[0], 0).backward()
    module.losses.clear()
    before, grads = snapshot(module), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    values = {name: grad.clone() for name, grad in grads.items()}
    classes = [type(each) for each in module.modules()]
    batches = data()
    kept = [batch.clone() for batch in batches]
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    first = audit(module, batches)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert_same(snapshot(module), before)
    assert {name: p.grad for name, p in module.named_parameters() if p.grad is not None}.keys() == grads.keys()
    assert all(p.grad is grads[name] for name, p in module.named_parameters() if name in grads)
    assert all(torch.equal(grads[name], value) for name, value in values.items())
    assert [type(each) for each in module.modules()] == classes
    assert not any(each._forward_hooks or "_mixprec" in each.__dict__ for each in module.modules())
    assert all(torch.equal(batch, value) for batch, value in zip(batches, kept, strict=True))
    assert module.losses == []
    torch.rand(3)
    assert str(audit(module, batches)) == str(first)


def test_a_module_that_was_trained_can_be_audited() -> None:
    module = TinyModule()
    make_trainer().fit(module, loader(make_batches(2)))
    found = audit(module, make_batches(2))
    assert found.recommended == {}
    assert module._trainer is not None
    assert {layer.name: layer.dtype for layer in found.layers if layer.parameters} == {
        "net.time_embedding": "fp32",
        "net.conv_in": "fp16",
        "net.norm": "norm",
        "net.proj": "fp16",
        "net.conv_out": "fp32",
    }


# What is refused


def test_bad_arguments_are_refused() -> None:
    class Manual(Task):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH))
            self.automatic_optimization = False

    linear = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    cases = [
        ({"model": linear}, "Sequential has no training_step. Give the loss"),
        ({"model": Manual()}, "Manual optimizes manually"),
        ({"model": Task(linear), "policy": "fp32"}, "Choose one of 'fp16', 'bf16'"),
        ({"model": Task(linear), "policy": "fp61"}, "Did you mean|Choose one of"),
        ({"model": Task(linear), "batches": []}, "batches is empty"),
        ({"model": Task(linear), "loss_scale": 0}, "loss_scale=0 must be a positive finite number"),
        ({"model": Task(linear), "samples": 0}, "samples=0 must be a whole number"),
        ({"model": Task(linear), "batches": [torch.full((2, WIDTH), torch.nan)]}, "nan in fp32.*the batch"),
        ({"model": linear, "loss": lambda model, batch: linear(batch).sum()}, "No module of the model was called"),
        ({"model": linear, "loss": lambda model, batch: model(batch)}, "a tensor of 1024 elements"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            audit(**{"batches": data(1), **arguments})


# How it is shown


def test_table_is_aligned_and_says_why() -> None:
    found = audit(made(lambda: Attention(3000.0)), data())
    lines = str(found).split("\n\n")[0].splitlines()
    header = lines[0]
    row = next(line for line in lines if line.startswith("net.blocks.4  "))
    assert row.index("its output is not finite in fp16") == header.index("why fp32")
    assert len(lines) == 1 + sum(layer.parameters > 0 for layer in found.layers) + 1
    assert "1 of " in found.summary()[0]
    text = found.to_markdown()
    assert "| net.blocks.4 | Attention | fp32 |" in text
    assert '        - "net.blocks.4"  # its output is not finite' in text


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_terminal_of_a_hundred_columns_shows_every_figure(compute: str) -> None:
    """Each cell of `Audit.table`, in one of the tables or in the line of what all layers have in common."""
    torch.manual_seed(0)
    net = UNet(1, 10, [8, 16])
    nn.init.normal_(net.conv_out.weight)
    batch = torch.randn(4, 1, 8, 8), torch.zeros(4), torch.zeros(4).long()
    found = audit(net, [batch], lambda model, x: model(*x).square().mean() + 1, policy=compute)
    console = Console(width=100, record=True)
    show(found, console)
    assert console.width == 100
    lines = console.export_text().splitlines()
    tables = "\n".join(lines).split("max: largest magnitude")[0]
    assert max(map(len, tables.splitlines())) <= 100
    assert all(len(line.rstrip()) <= 104 for line in lines if line.startswith(("max: ", "fp8: ", "the same")))
    header, *rows = found.table()
    telling = [i for i in range(3, len(header) - 1) if len({row[i] for row in rows}) > 1]
    assert 0 < len(telling) < len(header) - 4
    for row in rows:
        shown = [line.split() for line in tables.splitlines() if line.split()[:1] == row[:1]]
        figures = shown[0][3:] + [cell for line in shown[1:] for cell in line[2:]]
        assert figures == [row[i] for i in telling]
    (same,) = (line for line in lines if line.startswith("the same in all layers: "))
    constant = [i for i in range(3, len(header) - 1) if i not in telling]
    assert sum(len(part.rpartition(": ")[0].split(", ")) for part in same.split(": ", 1)[1].split("; ")) == len(
        constant
    )


def test_terminal_says_why_a_layer_must_be_fp32_and_widens_for_long_names() -> None:
    found = audit(made(lambda: Attention(3000.0)), data())
    console = Console(width=60, record=True, force_terminal=True)
    show(found, console)
    text = console.export_text(styles=True)
    assert "\x1b[31mnet.blocks.4 must be fp32: its output is not finite in fp16" in text
    long = dataclasses.replace(found, layers=[dataclasses.replace(each, name="x" * 90) for each in found.layers])
    console = Console(width=60, record=True)
    show(long, console)
    assert "x" * 90 + "  Linear" in console.export_text()  # nothing is cut off


# The recipe

TINY = ["model=unet_tiny", "steps=2", "batches=1", "device=cpu"]


def test_recipe_needs_nothing_beyond_the_defaults_and_its_policy_trains(monkeypatch, capfd, tmp_path) -> None:
    run = tmp_path / "found"
    assert cli(monkeypatch, *TINY, "precision.masters=fp32", f"hydra.run.dir={run}", program=recipe) == 0
    shown = capfd.readouterr().out
    assert "0 of 76 modules must be fp32" in shown
    assert "net.mid_block.attentions.0.to_q" in shown
    assert f"--config-dir {run} precision=policy model=unet_tiny\n" in shown
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", ["precision=policy", f"hydra.searchpath=[file://{run}]"])
        stock = compose("train", ["precision=fp16"])
    assert config.precision == stock.precision
    events = EventAccumulator(str(run)).Reload()
    text = events.Tensors("audit/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| net.conv_in | Conv2d | fp16 |" in text

    again = ["--config-dir", str(run), "precision=policy", "model=unet_tiny", "trainer.max_steps=2", "sampler.steps=2"]
    places = ["trainer.accelerator=cpu", "trainer.devices=1", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *again, *places, program=train) == 0
    assert "steps            2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("override", "texts"),
    {
        "precision=fp32": ["precision=fp32 loses nothing", "precision=fp16 or precision=bf16"],
        "precision=fp61": ["'fp16'", "bf16, fp16, fp32"],
        "sampels=3": ["sampels", "Did you mean 'samples'"],
        "samples=0": ["samples=0 must be a whole number, at least 1"],
        "data.batch_size=2000": ["data.batch_size=2000", "data.batch_size <= 1437"],
        "precision.policy.fp32=[time_embeding.*]": ["precision.policy", "time_embedding"],
        "optimizer.lr=-1": ["optimizer.lr=-1", "Invalid learning rate"],
    }.items(),
)
def test_recipe_refuses(monkeypatch, capfd, tmp_path, override: str, texts: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, *TINY, f"hydra.run.dir={tmp_path}/x", override, program=recipe) == 2
    message = capfd.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in texts), message
    assert "Traceback" not in message


def test_command_leaves_out_what_is_the_audit_s_own(tmp_path) -> None:
    overrides = ["experiment=digits_unet", "samples=4", "precision=bf16", "optimizer.lr=0.1", "++device=cpu"]
    line = recipe.command(tmp_path, overrides)
    assert line.endswith("precision=policy experiment=digits_unet optimizer.lr=0.1")
    assert command_line.CONF == ROOT / "conf"


# fp8


class Outlier(nn.Module):
    """One of 64 features is a million times as large as the others, and its weights are as much smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 64), nn.Linear(64, 16)
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        with torch.no_grad():
            self.blocks[1].weight[:, 0] *= 1e-8
        self.size = torch.ones(64)
        self.size[0] = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.stem(x)) * self.size))


def outlier_audit(policy: PrecisionPolicy | str) -> Audit:
    torch.manual_seed(0)
    return audit(Outlier(), [torch.randn(256, 16)], lambda model, x: model(x).square().mean(), policy=policy)


def test_fp8_suits_layers_without_outliers() -> None:
    found = outlier_audit("bf16")
    errors = {layer.name: layer.fp8_error for layer in found.layers}
    assert found.fp8_candidates == ["blocks.0"]
    assert 0.02 < errors["blocks.0"] < 0.1 < errors["blocks.1"]
    assert math.isnan(errors["stem"])  # the first layer is none of those that may
    assert math.isnan(errors["head"])
    assert "fp8 suits 1 of the 2 linear layers" in str(found)
    assert "blocks.1 (" in str(found)
    assert "fp8" not in found.to_yaml()  # nobody asked for it


def test_the_policy_found_trains_in_fp8_what_fp8_suits() -> None:
    found = outlier_audit(PrecisionPolicy("fp8", fp8_recipe="rowwise", emulate=True))
    policy = instantiate(yaml.safe_load(found.to_yaml()), _convert_="all").policy
    assert repr(policy) == "PrecisionPolicy('bf16', fp8=['blocks.0'], fp8_recipe='rowwise', emulate=True)"
    assert policy.resolve(Outlier()).fp8_layers == ["blocks.0"]


def test_fp8_errors_are_those_of_the_products() -> None:
    """By hand, in float64, for one layer and tensorwise scales."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32, bias=False))
    x, g = torch.randn(64, 16), torch.randn(64, 32)
    found = float8_errors(net, lambda: (net(x) * g).sum(), ["0"])["0"]

    def narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.finfo(dtype).max / tensor.abs().max()
        return (tensor * scale).to(dtype).double() / scale.double()

    w = net[0].weight.detach()
    nx, nw, ng = narrow(x, torch.float8_e4m3fn), narrow(w, torch.float8_e4m3fn), narrow(g, torch.float8_e5m2)
    x, w, g = x.double(), w.double(), g.double()
    pairs = [(nx @ nw.T, x @ w.T), (ng @ nw, g @ w), (ng.T @ nx, g.T @ x)]
    assert found == pytest.approx(max(float((a - b).norm() / b.norm()) for a, b in pairs), rel=1e-4)
