"""A checkpoint written in any mode goes on in any other, stock Lightning's included."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from reference import TinyModule, assert_same, loader, make_batches, make_module, make_trainer, snapshot
from torch import nn

from lightning_mixprec import MasterWeightAveraging, MasterWeightPrecision

MODES = ["fp32-fp32", "fp16-fp32", "bf16-fp32", "bf16-split", "bf16-split24", "bf16-none"]
STOCK = {
    "32-true": Precision,
    "16-mixed": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10)),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
}


def plugin_for(mode: str):
    if mode in STOCK:
        return STOCK[mode]()
    compute, masters = mode.split("-")
    return MasterWeightPrecision(compute, masters=masters)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


class AtStart(L.Callback):
    """What is there when training starts or goes on: weights and optimizer state."""

    def on_train_start(self, trainer, pl_module):
        self.weights = snapshot(pl_module)
        state = trainer.optimizers[0].state_dict()["state"]
        self.moments = {f"{i}.{k}": v.clone() for i, entry in state.items() for k, v in entry.items()}


def run(mode, directory, epochs, ckpt_path=None):
    """Two steps an epoch; returns the module, what was there at the start, and the checkpoint."""
    start, saver = AtStart(), ModelCheckpoint(directory, filename="end", save_on_train_epoch_end=True)
    module = make_module(adamw, seed=0 if ckpt_path is None else 1)
    trainer = make_trainer(plugin_for(mode), max_epochs=epochs, callbacks=[start, saver], enable_checkpointing=True)
    trainer.fit(module, loader(make_batches(2)), ckpt_path=ckpt_path)
    return module, start, torch.load(directory / "end.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """One epoch in every mode: where the checkpoint is, and its content."""
    written = {}
    for mode in [*MODES, *STOCK]:
        directory = tmp_path_factory.mktemp(mode)
        *_, checkpoint = run(mode, directory, epochs=1)
        written[mode] = (directory / "end.ckpt", checkpoint)
    return written


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    module, *_ = run("32-true", tmp_path_factory.mktemp("straight"), epochs=2)
    return snapshot(module)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_loss_scale_is_missed_where_one_is_needed(stage, first, caplog):
    module = make_module(adamw)
    trainer = make_trainer(MasterWeightPrecision("fp16"), max_epochs=2)
    with caplog.at_level("WARNING"):
        getattr(trainer, stage)(module, loader(make_batches(2)), ckpt_path=first["32-true"][0])
    assert ("holds no loss scale: continuing with 32768" in caplog.text) == (stage == "fit")


@pytest.mark.parametrize("after", MODES)
@pytest.mark.parametrize("before", [*MODES, *STOCK])
def test_any_mode_goes_on_from_any_other(before, after, first, straight, tmp_path):
    """T13, T30: weights as saved (to what the rung holds), moments fp32 and unrounded, and training goes on."""
    path, checkpoint = first[before]
    module, start, last = run(after, tmp_path, epochs=2, ckpt_path=path)
    digits = {"bf16-split24": 16, "bf16-none": 8}.get(after)
    for name, value in checkpoint["state_dict"].items():
        given = value.float()
        if digits is None:
            assert torch.equal(start.weights[name], given), name
        else:
            torch.testing.assert_close(start.weights[name], given, rtol=2.0**-digits, atol=0)
    for index, entry in checkpoint["optimizer_states"][0]["state"].items():
        for key, value in entry.items():
            restored = start.moments[f"{index}.{key}"]
            assert restored.dtype == torch.float32
            assert torch.equal(restored, value.float()), key
    assert {value.dtype for value in last["state_dict"].values()} == {torch.float32}
    assert last["state_dict"].keys() == straight.keys()
    for name, value in snapshot(module).items():
        torch.testing.assert_close(value, straight[name], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("after", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("before", MODES)
def test_our_checkpoints_go_on_in_stock_lightning(before, after, first, straight, tmp_path):
    """T24: with step counts that are each parameter's own."""
    path, checkpoint = first[before]
    module, start, last = run(after, tmp_path, epochs=2, ckpt_path=path)
    assert_same(start.weights, checkpoint["state_dict"])
    steps = [float(entry["step"]) for entry in last["optimizer_states"][0]["state"].values()]
    assert set(steps) == {4.0}
    for name, value in snapshot(module).items():
        torch.testing.assert_close(value, straight[name], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["bf16-fp32", "bf16-split", "bf16-split24", "bf16-none"])
def test_resume_is_bit_for_bit_on_every_rung(mode, tmp_path):
    """Weights, moments, EMA, and the random numbers of the stochastic rounding."""

    def go(directory, epochs, ckpt_path=None):
        ema = MasterWeightAveraging(0.9)
        saver = ModelCheckpoint(directory, filename="end", save_on_train_epoch_end=True)
        module = make_module(adamw, seed=0 if ckpt_path is None else 1)
        trainer = make_trainer(plugin_for(mode), max_epochs=epochs, callbacks=[ema, saver], enable_checkpointing=True)
        trainer.fit(module, loader(make_batches(3)), ckpt_path=ckpt_path)
        return torch.load(directory / "end.ckpt", weights_only=True)

    whole = go(tmp_path / "whole", 4)
    go(tmp_path / "half", 2)
    resumed = go(tmp_path / "resumed", 4, tmp_path / "half" / "end.ckpt")
    assert_same(whole["state_dict"], resumed["state_dict"])
    assert_same(whole["averaged_state_dict"], resumed["averaged_state_dict"])
    for index, entry in whole["optimizer_states"][0]["state"].items():
        assert_same(entry, resumed["optimizer_states"][0]["state"][index])


class Extended(TinyModule):
    """With as many 16-bit layers more of one width."""

    def __init__(self, make_optimizer, count, width):
        super().__init__(make_optimizer)
        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def training_step(self, batch, batch_idx):
        one = torch.ones(1, self.more[0].in_features)
        return super().training_step(batch, batch_idx) + sum(layer(one).float().square().mean() for layer in self.more)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize(("count", "width"), [(1, 3), (40, 3), (8, 16)], ids=["one by one", "many", "whole vectors"])
def test_resume_is_bit_for_bit_however_a_bucket_is_stepped(count, width, fused, masters, tmp_path):
    """As one tensor or as many: moments that were loaded are those that go on, and that are saved again."""

    def go(epochs, ckpt_path=None):
        torch.manual_seed(0)
        module = Extended(lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused), count, width)
        trainer = make_trainer(MasterWeightPrecision("bf16", masters=masters), max_epochs=epochs)
        trainer.fit(module, loader(make_batches(3)), ckpt_path=ckpt_path)
        path = tmp_path / f"{epochs}-{ckpt_path is None}.ckpt"
        trainer.save_checkpoint(path)
        return path

    whole, resumed = go(3), go(3, go(2, go(1)))
    whole, resumed = (torch.load(path, weights_only=True) for path in (whole, resumed))
    assert_same(whole["state_dict"], resumed["state_dict"])
    for index, entry in whole["optimizer_states"][0]["state"].items():
        assert_same(entry, resumed["optimizer_states"][0]["state"][index])


@pytest.mark.parametrize("mode", MODES)
def test_the_module_after_fit_can_be_saved_completely(mode, tmp_path):
    """Ruling 8: `trainer.save_checkpoint` after fit holds fp32 weights and all moments."""
    module = make_module(adamw)
    trainer = make_trainer(plugin_for(mode))
    trainer.fit(module, loader(make_batches(2)))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    checkpoint = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], snapshot(module))
    moments = checkpoint["optimizer_states"][0]["state"]
    assert len(moments) == len(list(module.parameters()))
    assert set(trainer.optimizers[0].state) == set(module.parameters())


def test_an_interrupted_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    *_, before = run("bf16-split", tmp_path, epochs=1)

    def fails(*_args, **_kwargs):
        raise OSError("disk full")

    module = make_module(adamw)
    trainer = make_trainer(plugin_for("bf16-split"))
    trainer.fit(module, loader(make_batches(2)))
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        trainer.save_checkpoint(tmp_path / "end.ckpt")
    monkeypatch.undo()
    assert_same(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"], before["state_dict"])


def test_checkpoint_is_not_larger_than_a_plain_one(first):
    plain, ours = (first[mode][0].stat().st_size for mode in ("32-true", "bf16-split"))
    assert ours < plain * 1.05 + 2048


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_saved_alone_or_by_others_in_mid_fit(mode, tmp_path):
    """One takes no more room than a plain one; safetensors, which refuses parts of larger memory, takes a module."""
    safetensors = pytest.importorskip("safetensors.torch")

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.state = snapshot(pl_module.net)
            torch.save(pl_module.net.state_dict()["proj.bias"], tmp_path / "bias.pt")
            safetensors.save_model(pl_module.net, tmp_path / "net.safetensors")

    saves = Saves()
    make_trainer(plugin_for(mode), callbacks=saves).fit(make_module(adamw), loader(make_batches(2)))
    assert_same(saves.state, safetensors.load_file(tmp_path / "net.safetensors"))
    torch.save(saves.state["proj.bias"].clone(), tmp_path / "same.pt")
    assert (tmp_path / "bias.pt").stat().st_size == (tmp_path / "same.pt").stat().st_size


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_weight_is_one_tensor_in_a_state_dict_and_once_in_a_file(mode, tmp_path):
    class Saves(L.Callback):
        def __init__(self):
            self.again = {}

        def on_after_backward(self, trainer, pl_module):
            pl_module.net.again.weight.grad = torch.ones_like(pl_module.net.again.weight)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.again = pl_module.state_dict(destination=self.again)  # in the second batch, over that of the first
            if batch_idx == 0:
                return
            self.states = [self.again, pl_module.state_dict(keep_vars=True), pl_module.state_dict()]
            torch.save(self.states[-1], tmp_path / "state.pt")
            self.ours = (tmp_path / "state.pt").stat().st_size
            self.before = snapshot(pl_module)

    module, saves = make_module(adamw), Saves()
    module.net.add_module("again", nn.Linear(64, 64, bias=False))
    module.net.add_module("tied", nn.Linear(64, 64, bias=False))
    module.net.tied.weight = module.net.again.weight
    make_trainer(plugin_for(mode), callbacks=saves).fit(module, loader(make_batches(2)))
    for state in saves.states:
        assert state["net.tied.weight"].data_ptr() == state["net.again.weight"].data_ptr()
        assert_same(saves.before, {name: value.detach() for name, value in state.items()})
    torch.save({**module.state_dict()}, tmp_path / "plain.pt")  # after fit the module is a plain one, of fp32
    assert saves.ours <= (tmp_path / "plain.pt").stat().st_size + 1024
