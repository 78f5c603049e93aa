"""fp32_weights: what user code writes into the weights by hand reaches them, however small."""

import lightning as L
import pytest
import torch
from reference import assert_same, loader, make_trainer, snapshot
from torch import nn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision, PrecisionPolicy

RUNGS = ["fp32", "split", "split24", "none"]
PLUGINS = {
    **{rung: lambda rung=rung: MasterWeightPrecision("bf16", masters=rung) for rung in RUNGS},
    "fp16": lambda: MasterWeightPrecision("fp16", DynamicLossScaler(init_scale=1024)),
    "fp32 throughout": lambda: MasterWeightPrecision("fp32"),
}
EXACT = ["fp32", "split", "fp16", "fp32 throughout"]


class Net(L.LightningModule):
    """Gradients are the batch's, whatever the weights, and exact in 16 bits; `head` is an fp32 layer."""

    def __init__(self, edit=None, when=None, lr=2.0**-10):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.edit, self.when, self.lr = nn.Linear(64, 32), nn.Linear(4, 2), edit, when, lr

    def loss(self, batch_idx):
        generator = torch.Generator().manual_seed(batch_idx)
        grads = [torch.randint(-8, 9, param.shape, generator=generator) / 64 for param in self.parameters()]
        return sum((param.float() * grad).sum() for param, grad in zip(self.parameters(), grads, strict=True))

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx)

    def hook(self, name):
        if self.when == name:
            with self.trainer.precision_plugin.fp32_weights(self) as weights:
                self.edit(weights)

    def on_before_optimizer_step(self, optimizer):
        self.hook("before the step")

    def on_train_batch_end(self, *args):
        self.hook("batch end")

    def on_train_start(self):
        self.hook("start")

    def on_train_end(self):
        self.hook("end")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def decay(weights):
    for weight in weights.values():
        assert weight.dtype == torch.float32
        weight.mul_(0.9999)


def plain_loop(batches, edit, when, lr=2.0**-10):
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    for index in range(batches):
        optimizer.zero_grad()
        module.loss(index).backward()
        if when == "before the step":
            edit(weights)
        optimizer.step()
        if when == "batch end":
            edit(weights)
    return snapshot(module)


def fit(plugin, batches, edit=None, when=None, **kwargs):
    module = Net(edit, when, **kwargs)
    make_trainer(plugin).fit(module, loader(list(range(batches))))
    return module


@pytest.mark.parametrize("when", ["before the step", "batch end"])
@pytest.mark.parametrize("kind", EXACT)
def test_a_small_decay_by_hand_is_that_of_a_plain_fp32_loop_bit_for_bit(kind, when):
    plugin = PLUGINS[kind]()
    if kind != "fp32 throughout":
        plugin.policy = PrecisionPolicy(plugin.policy.compute, fp32=["head"])
    assert_same(snapshot(fit(plugin, 12, decay, when)), plain_loop(12, decay, when))


@pytest.mark.parametrize("when", ["before the step", "batch end"])
@pytest.mark.parametrize("kind", ["split24", "none"])
def test_a_small_decay_by_hand_is_right_on_average_where_masters_are_rounded(kind, when):
    """50 times 0.9999 is 0.995; written into the 16-bit parameters themselves it would be 1 exactly."""
    start = Net().body.weight.detach()
    after = fit(PLUGINS[kind](), 50, decay, when, lr=0.0).body.weight.detach()
    assert float((after * start).sum() / start.square().sum()) == pytest.approx(0.9999**50, abs=1e-3)


@pytest.mark.parametrize("kind", ["fp32", "none", "fp16"])
def test_the_negative_control(kind):
    class Direct(Net):
        def on_train_batch_end(self, *args):
            with torch.no_grad():
                self.body.weight.mul_(0.9999)

    module = Direct(lr=0.0)
    start = module.body.weight.detach().clone()
    make_trainer(PLUGINS[kind]()).fit(module, loader(list(range(20))))
    assert float((module.body.weight.detach() * start).sum() / start.square().sum()) > 0.9995  # 0.998 would be right


@pytest.mark.parametrize("when", ["start", "end"])
@pytest.mark.parametrize("kind", PLUGINS)
def test_tensors_put_in_place_of_others_count(kind, when):
    value = torch.full((2, 4), 0.1)

    def edit(weights):
        weights["head.weight"] = value.double()

    module = fit(PLUGINS[kind](), 1, edit, when, lr=0.0)
    error = (module.head.weight - value).abs().max()
    assert error <= {"split24": 2e-6, "none": 8e-4}.get(kind, 0)


@pytest.mark.parametrize("kind", PLUGINS)
def test_who_only_looks_changes_nothing(kind):
    seen = []
    looked = fit(PLUGINS[kind](), 4, lambda weights: seen.append(weights["body.weight"].sum()), "batch end")
    assert len(seen) == 4
    assert_same(snapshot(looked), snapshot(fit(PLUGINS[kind](), 4)))


def fails(weights):
    decay(weights)
    raise KeyError("of the user")


def renames(weights):
    decay(weights)
    weights["body.wieght"] = weights.pop("body.weight")


def reshapes(weights):
    decay(weights)
    weights["body.weight"] = torch.zeros(32, 1)


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (fails, KeyError, "of the user"),
        (renames, ValueError, r"'body.weight', 'body.wieght' was added or removed"),
        (reshapes, ValueError, r"'body.weight'.*shape \[32, 64\].*\[32, 1\]"),
    ],
)
def test_on_an_error_nothing_is_written(kind, edit, error, words):
    class Checks(Net):
        def hook(self, name):
            if name == "batch end":
                before = snapshot(self)
                plugin = self.trainer.precision_plugin
                with pytest.raises(error, match=words), plugin.fp32_weights(self) as weights:
                    edit(weights)
                assert_same(snapshot(self), before)

    module = Checks()
    make_trainer(PLUGINS[kind]()).fit(module, loader([0, 1]))
    assert_same(snapshot(module), snapshot(fit(PLUGINS[kind](), 2)))


@pytest.mark.parametrize("kind", ["fp32", "split", "none"])
@pytest.mark.parametrize("other", ["nested", "loaded", "written"])
def test_weights_that_change_in_another_way_meanwhile_are_an_error(kind, other):
    def meddle(plugin, module):
        with plugin.fp32_weights(module) as outer:
            decay(outer)
            if other == "nested":
                with plugin.fp32_weights(module) as inner:
                    inner["body.weight"].add_(1)
            elif other == "loaded":
                module.load_state_dict(module.state_dict())
            else:
                module.body.weight.data.add_(1)

    class Both(Net):
        def hook(self, name):
            if name == "batch end":
                with pytest.raises(RuntimeError, match="changed while `fp32_weights` was open"):
                    meddle(self.trainer.precision_plugin, self)

    make_trainer(PLUGINS[kind]()).fit(Both(), loader([0]))


@pytest.mark.parametrize("kind", PLUGINS)
def test_between_forward_and_backward_it_is_an_error_as_in_torch(kind):
    class Between(Net):
        def training_step(self, batch, batch_idx):
            loss = self.body(self.body(torch.ones(1, 64)).repeat(1, 2)).float().sum()
            with self.trainer.precision_plugin.fp32_weights(self) as weights:
                weights["body.weight"].mul_(0.5)
            return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        make_trainer(PLUGINS[kind]()).fit(Between(), loader([0]))


@pytest.mark.parametrize("kind", PLUGINS)
def test_outside_fit_and_for_a_part(kind):
    module, plugin = Net(), PLUGINS[kind]()
    before = snapshot(module)
    with plugin.fp32_weights(module.body) as weights:
        assert set(weights) == {"weight", "bias"}
        weights["bias"].mul_(0.9999)
    after = snapshot(module)
    assert torch.equal(after["body.bias"], before["body.bias"] * 0.9999)
    assert torch.equal(after["body.weight"], before["body.weight"])
    with pytest.raises(KeyError), plugin.fp32_weights(module) as weights:
        fails(weights)
    assert_same(snapshot(module), after)
    half = nn.Linear(4, 4).bfloat16()
    with plugin.fp32_weights(half) as weights:
        assert weights["weight"].dtype == torch.float32
        weights["weight"].fill_(0.1)
    assert torch.equal(half.weight, torch.full((4, 4), 0.1, dtype=torch.bfloat16))


def test_frozen_weights_in_16_bits_are_copies_and_come_back_rounded():
    class Frozen(Net):
        def __init__(self):
            super().__init__(lambda weights: weights["body.weight"].fill_(0.1), "start")
            self.body.bfloat16().requires_grad_(False)

        def training_step(self, batch, batch_idx):
            return self.head.weight.sum()

    module = Frozen()
    make_trainer(MasterWeightPrecision("bf16")).fit(module, loader([0]))
    assert torch.equal(module.body.weight, torch.full((32, 64), 0.1, dtype=torch.bfloat16))
