"""The recipes' networks: the same numbers as other people's, at the sizes of the papers, in the right precision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from few_digits import FEW
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_mixprec import PrecisionPolicy
from lightning_mixprec.layers import ComputeLayer, swap_, swap_layers_
from recipes import command_line, train
from recipes.diffusers_unet2d import DiffusersUNet2D
from recipes.dit import DiT
from recipes.unet import UNet

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """Tensors this small cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(option: str) -> nn.Module:
    return instantiate(OmegaConf.load(ROOT / "conf" / "model" / f"{option}.yaml"), _convert_="all")


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """Nothing is zero, so that everything counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return net


def inputs(net: Any, channels: int, size: int, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(batch) % (net.null_label + 1)
    labels[-1] = net.null_label
    return torch.randn(batch, channels, size, size, generator=generator), torch.linspace(0, 0.999, batch), labels


def converted(net: nn.Module, compute: str) -> nn.Module:
    """As the plugin has it in training."""
    plan = PrecisionPolicy(compute).resolve(net)
    swap_layers_(net, plan.kinds, "cpu", plan.compute)
    swap_(net, ComputeLayer, "cpu", plan.compute)
    for name, param in net.named_parameters():
        param.data = param.data.to(plan.parameters[name])
    return net


def call_small(kind: str, **options: Any) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    net: Any
    if kind == "unet":
        net = UNet(3, 10, [8, 16], [1], **options)
    elif kind == "adm":
        net = UNet(3, 10, [8, 16], [1], scale_shift=True, resample="residual", **options)
    else:
        net = DiT(3, 10, 8, **options)
    return randomised(net), inputs(net, 3, 8)


# Against other people's


@pytest.mark.parametrize("adm", [False, True])
def test_unet_is_diffusers_unet2dmodel(adm: bool) -> None:
    ours: Any = UNet(
        3, 10, [16, 24, 32], [1, 2], layers_per_block=2, scale_shift=adm, resample="residual" if adm else "conv",
        time_scale=1.0,
    )  # fmt: skip
    randomised(ours)
    options: dict[str, Any] = {}
    if adm:
        options = {"resnet_time_scale_shift": "scale_shift", "downsample_type": "resnet", "upsample_type": "resnet"}
        options |= {"attn_norm_num_groups": 8}
    theirs = diffusers.UNet2DModel(
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 24, 32),
        down_block_types=("ResnetDownsampleBlock2D" if adm else "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D" if adm else "UpBlock2D"),
        layers_per_block=2,
        norm_num_groups=8,
        num_class_embeds=11,
        **options,
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x, _, labels = inputs(ours, 3, 16)
    timesteps = torch.tensor([0, 421, 999])
    with torch.no_grad():
        expected = theirs(x, timesteps, labels).sample
        torch.testing.assert_close(
            ours(x, timesteps, labels), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


def test_dit_is_diffusers_dittransformer2dmodel() -> None:
    ours: Any = randomised(DiT(3, 10, 8, hidden_size=32, depth=3, num_heads=4, time_scale=1.0))
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=3, num_layers=3, sample_size=8, num_embeds_ada_norm=10
    ).eval()  # its eps of the blocks' norms is 1e-5 by default
    names = {
        "pos_embed.proj": "patch_embed",
        "proj_out_1": "modulation_out",
        "proj_out_2": "proj_out",
    }
    for i in range(3):
        block = f"transformer_blocks.{i}"
        names |= {
            f"{block}.norm1.emb.timestep_embedder.linear_1": "time_embedding.linear_1",
            f"{block}.norm1.emb.timestep_embedder.linear_2": "time_embedding.linear_2",
            f"{block}.norm1.emb.class_embedder.embedding_table": "class_embedding",
            f"{block}.norm1.linear": f"blocks.{i}.modulation",
            f"{block}.attn1.to_out.0": f"blocks.{i}.attn.to_out",
            f"{block}.ff.net.0.proj": f"blocks.{i}.mlp.linear_1",
            f"{block}.ff.net.2": f"blocks.{i}.mlp.linear_2",
        }
        names |= {f"{block}.attn1.to_{x}": f"blocks.{i}.attn.to_{x}" for x in "qkv"}
    state = ours.state_dict()
    used = {name: f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}" for name in theirs.state_dict()}
    theirs.load_state_dict({name: state[mine] for name, mine in used.items()}, strict=True)
    assert {*used.values(), "positions.pos_embed"} == set(state)
    for layer in theirs.modules():
        if hasattr(layer, "downscale_freq_shift"):
            layer.downscale_freq_shift = 0  # the paper's
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 1e-6
    x, _, labels = inputs(ours, 3, 8)
    timesteps = torch.tensor([0, 421, 999])
    with torch.no_grad():
        expected = theirs(x, timesteps, labels).sample
        torch.testing.assert_close(
            ours(x, timesteps, labels), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


# Sizes


@pytest.mark.parametrize(
    ("option", "millions"), [("dit_s_2", 33), ("dit_b_2", 131), ("dit_l_2", 458), ("dit_xl_2", 675), ("adm_64", 296)]
)
def test_sizes_are_the_papers(option: str, millions: int) -> None:
    with torch.device("meta"):
        net: Any = build(option)
        side = 64 if option == "adm_64" else 32
        x = torch.zeros(1, net.state_dict()[next(iter(net.state_dict()))].shape[1], side, side)
        assert net(x, torch.zeros(1), torch.zeros(1).long()).shape == x.shape
    assert abs(sum(p.numel() for p in net.parameters()) / 1e6 - millions) < 0.6


@pytest.mark.parametrize("option", [name for name in MODELS if "_2" not in name and name != "adm_64"])
def test_digit_models_take_digits(option: str) -> None:
    net: Any = build(option)
    assert net(torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([0, 10])).shape == (2, 1, 8, 8)
    assert net.null_label == 10
    assert sum(p.numel() for p in net.parameters()) < 1e6


# Precision


def test_plan_of_the_dit_keeps_in_fp32_what_must_be() -> None:
    plan = PrecisionPolicy("bf16").resolve(DiT(1, 10, 8))
    rows = {line.split()[0]: line.split() for line in str(plan).splitlines()}
    for name in ("time_embedding.linear_1", "time_embedding.linear_2", "class_embedding", "proj_out"):
        assert rows[name][2] == "float32", name
        assert plan.parameters[f"{name}.weight"] == torch.float32
    last = max(int(name.split(".")[1]) for name in plan if name.startswith("blocks."))
    for name in ("patch_embed", *(f"blocks.0-{last}.{name}" for name in ("attn.to_q", "mlp.linear_2", "modulation"))):
        assert "bfloat16" in rows[name], name
    assert plan.kinds["blocks.0.norm1"] == "norm"
    assert plan.kinds["norm_out"] == "fp32"


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["unet", "adm", "dit", "diffusers"])
def test_networks_see_1000_timesteps_in_16_bits(kind: str, compute: str) -> None:
    if kind == "diffusers":
        blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [8]}
        net: Any = DiffusersUNet2D(10, in_channels=3, out_channels=3, norm_num_groups=8, layers_per_block=1, **blocks)
    else:
        net = call_small(kind)[0]
    converted(net, compute)
    seen: list[Tensor] = []
    net.time_embedding.register_forward_hook(lambda module, args, output: seen.extend([args[0], output]))
    with torch.no_grad():
        out = net(torch.zeros(1000, 3, 8, 8), torch.arange(1000) / 1000, torch.zeros(1000).long())
    assert out.dtype == torch.float32
    for features in seen:
        assert features.dtype == torch.float32
        assert len(features.unique(dim=0)) == 1000


@pytest.mark.parametrize("kind", ["unet", "adm", "dit"])
def test_bf16_is_near_fp32(kind: str) -> None:
    net, batch = call_small(kind)
    with torch.no_grad():
        expected = net(*batch)
        found = converted(net, "bf16")(*batch)
    error = (found - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.02


def test_position_embedding_is_added_in_fp32() -> None:
    net = DiT(1, 10, 8)
    assert not net.positions.pos_embed.requires_grad
    assert len(net.positions.pos_embed.unique(dim=0)) == 16
    tokens = torch.full((1, 16, 64), 0.1).bfloat16()
    expected = (tokens.double() + net.positions.pos_embed.double()).bfloat16()
    assert torch.equal(net.positions(tokens.clone()), expected)


# Training


@pytest.mark.parametrize("kind", ["unet", "adm", "dit"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_checkpointing_changes_memory_alone(kind: str, compute: str) -> None:
    found = []
    for checkpointing in (False, True):
        net, batch = call_small(kind, checkpointing=checkpointing)
        if compute != "fp32":
            converted(net, compute)
        calls = []
        block: Any = net.blocks[0] if kind == "dit" else net.up_blocks[0]
        block.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))
        loss = net(*batch).square().mean()
        loss.backward()
        assert len(calls) == 1 + checkpointing  # really computed again
        found.append([loss.detach(), *(p.grad for p in net.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.isfinite(a).all() and a.abs().sum() > 0 for a in found[0])


def test_untrained_dit_predicts_zero_and_blocks_are_the_identity() -> None:
    net = DiT(3, 10, 8)
    x, time, labels = inputs(net, 3, 8)
    assert torch.equal(net(x, time, labels), torch.zeros_like(x))
    tokens, condition = torch.randn(2, 16, 64), torch.randn(2, 64)
    assert torch.equal(net.blocks[0](tokens, condition), tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "patch_size=3 does not divide image_size=8"),
        ({"num_heads": 5}, "hidden_size=64 must be a multiple of num_heads=5"),
    ],
)
def test_dit_refuses_sizes_that_do_not_divide(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiT(1, 10, 8, **options)  # type: ignore[arg-type]


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [train.__file__, *arguments])
    try:
        command_line.run(train.main, "train")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


SHORT = ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=2", "sampler.steps=2", "logger=none"]


@pytest.mark.parametrize("model", ["dit_tiny", "diffusers_unet2d"])
def test_models_train_by_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    options = [*FEW, f"model={model}", "precision=fp32", "callbacks.samples.per_class=1", f"hydra.run.dir={tmp_path}"]
    assert cli(monkeypatch, *SHORT, *options) == 0
    shown = capfd.readouterr().out
    assert "validation loss  " in shown
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    build(model).load_state_dict({k.removeprefix("net."): v for k, v in saved["state_dict"].items()}, strict=True)


def test_missing_diffusers_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "recipes.diffusers_unet2d")
    monkeypatch.delattr("recipes.diffusers_unet2d")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli(monkeypatch, *SHORT, "model=diffusers_unet2d", f"hydra.run.dir={tmp_path}") == 2
    assert "pip install 'diffusers" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["model=dit_s_2"], ["model has 1000 classes, the data have 10", "model.num_classes=10"]),
        (
            ["model=dit_s_2", "model.num_classes=10"],
            ["model.image_size=32: recipes.dit.DiT refused: it cannot take images of shape [1, 8, 8]"],
        ),
        (
            ["model=dit_tiny", "model.image_size=16"],
            ["model.image_size=16: recipes.dit.DiT refused", "images of 8 x 8 pixels"],
        ),
    ],
)
def test_models_for_other_data_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    expected: list[str],
) -> None:
    assert cli(monkeypatch, *SHORT, *options, f"hydra.run.dir={tmp_path}") == 2
    shown = capfd.readouterr().err
    assert all(text in shown for text in expected), shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_compiled_network_trains_to_the_same_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = []
    for compile_ in ("false", "true"):
        run = tmp_path / compile_
        options = ["model=dit_tiny", f"compile={compile_}", f"hydra.run.dir={run}", "trainer.max_steps=5"]
        assert cli(monkeypatch, *SHORT[:2], *options, "sampler.steps=2", "logger=none") == 0
        saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        losses.append(saved)
    assert losses[0]["state_dict"].keys() == losses[1]["state_dict"].keys()
    for name, value in losses[0]["state_dict"].items():
        torch.testing.assert_close(losses[1]["state_dict"][name], value, rtol=0, atol=0.02)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_say_what_for(path: Path) -> None:
    package, purpose, *_ = path.read_text().splitlines()
    assert package == "# @package _global_"
    assert purpose.startswith("# ")
    assert purpose.endswith(".")
