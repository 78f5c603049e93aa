"""Models and layers that nobody here wrote, under the Trainer: every layer computes as the plan says."""

import copy
import io

import diffusers
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from reference import HALF, assert_same, loader, make_trainer, snapshot
from torch import nn
from torchvision.models import ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.layers import widen
from recipes.unet import UNet

HALVES = ["bf16", "fp16"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rows(nn.Module):
    """A recurrent layer between two others, as a video or text model has one."""

    def __init__(self, rnn):
        super().__init__()
        self.proj_in = nn.Linear(4, 4)
        self.rnn = rnn
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.rnn(self.proj_in(x))[0])


class Packed(Rows):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(self.proj_in(x), torch.tensor([5, 3]), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(8, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.proj_in(x)
        return self.attn(x, x, x)[0]


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def unet():
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
        attention_head_dim=4,
        num_class_embeds=10,
    )


def dit():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 1, "num_layers": 2, "sample_size": 4}
    return diffusers.DiTTransformer2DModel(**sizes, norm_num_groups=1, num_embeds_ada_norm=10)


def resnet():
    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)
    net.layer2 = net.layer3 = net.layer4 = nn.Identity()  # 160 k parameters instead of 5 M
    net.fc = nn.Linear(64, 4)
    return net


def vit():
    net = VisionTransformer(8, 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=4)
    nn.init.normal_(net.heads.head.weight, std=0.1)  # torchvision begins with zeros
    return net


def images():
    return torch.randn(2, 1, 4, 4), torch.tensor([999, 0]), torch.tensor([3, 1])


def sequence():
    return (torch.randn(2, 5, 4),)


def tokens():
    return (torch.randn(2, 5, 8),)


def call(net, x):
    return net(x)


MODELS = {  # name -> network, batch, how the one is called with the other
    "unet": (unet, images, lambda net, x, t, y: net(x, t, class_labels=y).sample),
    "dit": (dit, lambda: (torch.randn(2, 1, 4, 4), *images()[1:]), lambda net, x, t, y: net(x, t, y).sample),
    "resnet": (resnet, lambda: (torch.randn(4, 3, 8, 8),), call),
    "vit": (vit, lambda: (torch.randn(4, 3, 8, 8),), call),
    "lstm": (lambda: Rows(nn.LSTM(4, 6, num_layers=2, batch_first=True)), sequence, call),
    "gru": (lambda: Rows(nn.GRU(4, 3, bidirectional=True, batch_first=True)), sequence, call),
    "packed lstm": (lambda: Packed(nn.LSTM(4, 6, batch_first=True)), sequence, call),
    "attention": (Attention, tokens, call),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), tokens, call),
    "tied": (Tied, lambda: (torch.tensor([[1, 2, 3], [3, 2, 1]]),), call),
}
# Beside the defaults: something that is not a leaf, or is shared, or has an arithmetic of its own.
ENTRIES = {
    "unet": ["AttnDownBlock2D", "up_blocks.1", "mid_block.attentions.0"],
    "dit": ["attn1", "pos_embed"],
    "resnet": ["layer1.*.conv2", "BatchNorm2d", "fc.*"],
    "vit": ["self_attention", "class_token"],
    "lstm": ["rnn"],
    "gru": ["rnn"],
    "packed lstm": ["rnn"],
    "attention": ["attn"],
    "encoder": ["self_attn", "linear2.weight"],
    "tied": ["head"],
}


@pytest.fixture
def fastpath_off():
    """Attention takes another path outside of a fit."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


class Module(L.LightningModule):
    """Trains `net` towards zero with `call`, and validates it on the same batches."""

    def __init__(self, net, call):
        super().__init__()
        self.net, self.call = net, call

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)  # DiT drops labels
        return self.call(self.net, *batch).float().pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.out = self.call(self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def build(name):
    make, batch, call = MODELS[name]
    torch.manual_seed(0)
    return Module(make(), call), batch()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_computes_as_the_plan_says(name, precision, named, fastpath_off):
    """fp32 layers bit for bit as plain fp32 ones, norms its rounding, the others in the compute dtype."""
    module, batch = build(name)
    plain = module.call(copy.deepcopy(module.net).eval(), *batch)
    plugin = MasterWeightPrecision(PrecisionPolicy(precision, fp32=ENTRIES[name] if named else []))
    calls = []

    def hook(label):
        def record(layer, args, kwargs, output):
            values = output.clone() if isinstance(output, torch.Tensor) else output
            calls.append((label, copy.deepcopy(args), copy.deepcopy(kwargs), values))

        return record

    layers = dict(module.named_modules())
    for label, layer in module.net.named_modules(prefix="net"):
        layer.register_forward_hook(hook(label), with_kwargs=True)
    make_trainer(plugin).validate(module, loader([batch]), verbose=False)

    dtype, kinds = HALF[precision], set()
    for label, args, kwargs, output in list(calls):
        kind = plugin.plan.kinds[label]
        kinds.add(kind)
        if kind == "compute":
            if type(layers[label]) in (nn.Linear, nn.Conv2d):
                assert output.dtype == dtype, label
            continue
        with torch.inference_mode():
            wide, wide_kwargs = widen((args, kwargs))
            expected = layers[label].eval()(*wide, **wide_kwargs)
        outputs, wanted = (each if isinstance(each, tuple) else (each,) for each in (output, expected))
        for one, other in zip(outputs, wanted, strict=True):
            if isinstance(other, torch.Tensor):
                exact = other.to(dtype) if kind == "norm" else other
                assert one.dtype == exact.dtype, label
                assert torch.equal(one, exact), label
    assert "compute" in kinds
    assert not named or "fp32" in kinds
    error = (module.out.float() - plain).norm() / plain.norm()
    assert error < {"bf16": 0.03, "fp16": 0.004}[precision]


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_in_plain_fp32_and_is_left_as_found(name, precision):
    module, batch = build(name)
    found = [(type(layer), layer.__dict__.keys()) for layer in module.net.modules()]
    before, plain = snapshot(module.net), copy.deepcopy(module.net)
    policy = PrecisionPolicy(precision, fp32=ENTRIES[name])
    plugin = MasterWeightPrecision(policy, DynamicLossScaler(init_scale=1024) if precision == "fp16" else None)
    make_trainer(plugin).fit(module, loader([batch] * 3))
    assert (plugin.real_steps, plugin.skipped_steps) == (3, 0)

    reference = Module(plain.train(), module.call)
    optimizer = reference.configure_optimizers()
    for index in range(3):
        optimizer.zero_grad()
        reference.training_step(batch, index).backward()
        optimizer.step()
    after, errors, moves = snapshot(module.net), [], []
    for key, value in plain.state_dict().items():
        assert after[key].dtype == value.dtype
        errors.append((after[key] - value).float().norm())
        moves.append((value - before[key]).float().norm())
        assert errors[-1] <= 0.5 * moves[-1] + 1e-6, key
    error, moved = (torch.stack(norms).norm() for norms in (errors, moves))
    assert 0 < error < {"bf16": 0.1, "fp16": 0.02}[precision] * moved
    assert [(type(layer), layer.__dict__.keys()) for layer in module.net.modules()] == found


@pytest.mark.parametrize("precision", HALVES)
def test_a_module_saved_whole_in_mid_fit_computes_what_it_computed(precision):
    saved = {}

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            stream = io.BytesIO()
            torch.save(pl_module.net, stream)
            saved["net"], saved["out"] = stream, MODELS["unet"][2](pl_module.net.eval(), *batch)

    module, batch = build("unet")
    make_trainer(MasterWeightPrecision(precision), callbacks=Saves()).fit(module, loader([batch]))
    saved["net"].seek(0)
    net = torch.load(saved["net"], weights_only=False)
    assert torch.equal(MODELS["unet"][2](net, *batch), saved["out"])


@pytest.mark.parametrize("precision", HALVES)
def test_checkpointed_activations_change_nothing(precision):
    """diffusers' own gradient checkpointing, with fp32 containers inside and around what is computed again."""
    weights = []
    for checkpointed in (False, True):
        module, batch = build("unet")
        if checkpointed:
            module.net.enable_gradient_checkpointing()
        policy = PrecisionPolicy(precision, fp32=ENTRIES["unet"])
        make_trainer(MasterWeightPrecision(policy)).fit(module, loader([batch] * 2))
        weights.append(snapshot(module))
    assert_same(*weights)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("make", [unet, lambda: UNet(1, 10, (8, 8), norm_num_groups=4)])
def test_a_thousand_timesteps_have_a_thousand_embeddings(make, precision):
    """As in fp32, bit for bit: 999 is 999, and no sinusoid is rounded on its way."""
    torch.manual_seed(0)
    net, seen = make(), []
    net.time_embedding.register_forward_hook(lambda layer, args, output: seen.append(output))

    def embed(net, x, t, y):
        return getattr(net(x, t, y), "sample", None)

    batch = (torch.zeros(1000, 1, 2, 2), torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    with torch.no_grad():
        embed(net.eval(), *batch)
    make_trainer(MasterWeightPrecision(precision)).validate(Module(net, embed), loader([batch]), verbose=False)
    plain, embeddings = seen
    assert torch.equal(embeddings, plain)
    assert len(embeddings.unique(dim=0)) == 1000


@pytest.mark.parametrize("precision", HALVES)
def test_schedules_weights_and_loss_are_fp32(precision):
    """The signal-to-noise ratio of all timesteps, from buffers of both widths; float64 targets stay float64."""
    seen = {}
    scheduler = diffusers.DDPMScheduler()
    noise, t = torch.randn(1000, 1, 2, 2), torch.arange(1000)
    noisy = scheduler.add_noise(torch.ones(1000, 1, 2, 2), noise, t)

    class Weighted(Module):
        def __init__(self):
            super().__init__(nn.Conv2d(1, 1, 1), None)
            self.register_buffer("alphas", scheduler.alphas_cumprod.clone())
            self.register_buffer("alphas64", scheduler.alphas_cumprod.double())

        def training_step(self, batch, batch_idx):
            x = scheduler.add_noise(torch.ones_like(batch["noise"]), batch["noise"], batch["t"])
            snr = [alphas[batch["t"]] / (1 - alphas[batch["t"]]) for alphas in (self.alphas, self.alphas64)]
            out = self.net(x)
            loss = F.mse_loss(out, batch["noise"])
            seen.update(x=x, snr=snr[0], snr64=snr[1], out=out, loss=loss, **batch)
            return loss

    batch = {"noise": noise, "t": t, "target": torch.rand(3, dtype=torch.float64)}
    make_trainer(MasterWeightPrecision(precision)).fit(Weighted(), loader([batch]))
    assert_same({name: seen[name] for name in batch}, batch)
    assert torch.equal(seen["x"], noisy)
    exact = scheduler.alphas_cumprod.double() / (1 - scheduler.alphas_cumprod.double())
    assert torch.equal(seen["snr64"], exact)
    torch.testing.assert_close(seen["snr"].double(), exact, rtol=2e-3, atol=0)  # 1 - 0.9999 has lost digits in fp32
    assert torch.isfinite(seen["snr"]).all()
    assert (seen["out"].dtype, seen["loss"].dtype) == (HALF[precision], torch.float32)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], ids=lambda layer: type(layer)
)
def test_dtypes_that_go_in_and_come_out(layer, precision, named):
    """Compute dtype out of a norm or a compute layer, fp32 out of one that is named; in training and validation."""
    outputs = []
    net = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer), nn.Linear(4, 4))
    net[1].register_forward_hook(lambda layer, args, output: outputs.append(output.dtype))
    policy = PrecisionPolicy(precision, fp32=["1"] if named else [])
    batches = loader([(torch.randn(8, 4),)])
    make_trainer(MasterWeightPrecision(policy)).fit(Module(net, call), batches, batches)
    assert len(outputs) >= 2
    assert set(outputs) == {torch.float32 if named else HALF[precision]}


@pytest.mark.parametrize("entries", [["net"], ["self_attn"], ["linear1"], []])
def test_eval_mode_of_an_encoder_equals_train_mode(entries):
    """In eval mode torch may compute past the layers of an encoder layer: up to two units in the last place."""
    module, batch = build("encoder")
    outputs = []

    class Both(Module):
        def validation_step(self, batch, batch_idx):
            outputs.extend(self.net.train(mode)(*batch) for mode in (False, True))

    plugin = MasterWeightPrecision(PrecisionPolicy("bf16", fp32=entries))
    make_trainer(plugin).validate(Both(module.net, None), loader([batch]), verbose=False)
    one, other = outputs
    assert one.dtype == other.dtype == (torch.float32 if entries == ["net"] else torch.bfloat16)
    tolerance = 1e-6 if entries == ["net"] else 2 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_encoder_in_evaluation_calls_its_layers(precision):
    """torch's fast path would compute with the layers' weights behind their backs, and fail on the mixed dtypes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def call(net, x):
        return net(x, src_key_padding_mask=padding)

    outputs = {}

    class Both(Module):
        def training_step(self, batch, batch_idx):
            outputs["train"] = self.call(self.net, batch)
            return outputs["train"].float().pow(2).mean()

        def validation_step(self, batch, batch_idx):
            outputs["eval"] = self.call(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    enabled = torch.backends.mha.get_fastpath_enabled()
    module = Both(nn.TransformerEncoder(layer, 2), call)
    make_trainer(MasterWeightPrecision(precision)).fit(module, loader([x]), loader([x]))
    assert torch.equal(outputs["train"].detach(), outputs["eval"])
    assert bool(torch.isfinite(outputs["eval"]).all())
    assert torch.backends.mha.get_fastpath_enabled() == enabled
