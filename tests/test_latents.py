"""Latents: whose they are, that they are whole and finite, and that they are drawn as the posterior says."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from forked import Forked
from PIL import Image
from safetensors.torch import load_file, save_file
from test_data import folder
from test_recipes import assert_same, checkpoint, cli
from torch import Tensor

from recipes import encode, sample, train_autoencoder
from recipes.autoencoder import Autoencoder, FrozenAutoencoder, fingerprint
from recipes.config import ConfigError
from recipes.data import DigitsDataModule
from recipes.images import image_grid
from recipes.latents import LatentsDataModule, read_manifest
from recipes.randomness import POSTERIOR, keyed_generator
from recipes.sampler import draw_samples


def own(directory: Path, seed: int = 0, **config: Any) -> Path:
    """An untrained autoencoder of this project, for digits."""
    torch.manual_seed(seed)
    Autoencoder(**{"in_channels": 1, "latent_channels": 2, "scaling_factor": 0.7, **config}).save(directory)
    return directory


def stock(directory: Path, **config: Any) -> AutoencoderKL:
    """A tiny one of diffusers, saved as they save it."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "norm_num_groups": 4, "latent_channels": 3, "sample_size": 8}
    model = AutoencoderKL(**blocks, **sizes, **config).eval()
    model.save_pretrained(directory)
    return model


def run_encode(monkeypatch: pytest.MonkeyPatch, **arguments: object) -> int:
    overrides = [f"{key}={value}" for key, value in {"data": "digits", **arguments}.items()]
    return cli(monkeypatch, *overrides, program=encode)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of the digits, mirror images included, in shards of 500; `autoencoder` beside them made them."""
    root = tmp_path_factory.mktemp("cache")
    own(root / "autoencoder")
    with pytest.MonkeyPatch.context() as patch:
        arguments = {"autoencoder": root / "autoencoder", "output": root / "latents", "shard_size": 500, "flip": "true"}
        assert run_encode(patch, **arguments) == 0
    return root / "latents"


def copied(cache: Path, tmp_path: Path) -> Path:
    shutil.copytree(cache, tmp_path / "copy")
    return tmp_path / "copy"


# Autoencoders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_autoencoder_of_diffusers_computes_as_it_does_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    model = stock(tmp_path / "kl", scaling_factor=0.3, shift_factor=0.1).to(dtype)
    frozen = FrozenAutoencoder(str(tmp_path / "kl"), "fp32" if dtype == torch.float32 else "bf16")
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        posterior = model.encode(images.to(dtype)).latent_dist
        decoded = model.decode((torch.ones(3, 3, 4, 4) / 0.3 + 0.1).to(dtype)).sample.float()
    with torch.autocast("cpu", torch.bfloat16):  # the plugin's: it has no say here
        mean, std = frozen.encode(images)
        images_again = frozen.decode(torch.ones(3, 3, 4, 4), at_once=2)
    assert (mean.dtype, std.dtype, images_again.dtype) == (dtype, dtype, torch.float32)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 2e-2}  # bf16 in the first would miss by 1e-3
    torch.testing.assert_close(images_again, decoded, **tolerance)
    torch.testing.assert_close([mean, std], [posterior.mean, posterior.std], **tolerance)
    assert not any(p.requires_grad for p in frozen.model.parameters())


def test_a_scaling_that_the_file_leaves_out_is_the_librarys(tmp_path: Path) -> None:
    """Widely used ones say nothing of their scaling factor."""
    stock(tmp_path / "kl")
    config = json.loads((tmp_path / "kl" / "config.json").read_text())
    del config["scaling_factor"]
    (tmp_path / "kl" / "config.json").write_text(json.dumps(config))
    assert FrozenAutoencoder(str(tmp_path / "kl")).scaling_factor == 0.18215


def test_the_small_autoencoder_is_saved_whole(tmp_path: Path) -> None:
    net = Autoencoder(in_channels=1, latent_channels=2, block_out_channels=[8, 16, 16], scaling_factor=1.25)
    net.save(tmp_path)
    frozen = FrozenAutoencoder(str(tmp_path))
    images = torch.randn(2, 1, 8, 8)
    mean, std = frozen.encode(images)
    assert mean.shape == (2, 2, 2, 2)
    assert_same([mean, std], [part.detach() for part in net.encode(images)])
    assert torch.equal(frozen.decode(mean * 1.25), net.decode(mean * 1.25 / 1.25).detach())
    assert frozen.scaling_factor == 1.25
    with pytest.raises(ValueError, match="multiples of 4 for these block_out_channels"):
        net.encode(torch.zeros(1, 1, 6, 6))
    before = fingerprint(str(tmp_path))
    net.config["scaling_factor"] = 1.5
    net.save(tmp_path)
    assert fingerprint(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no directory"),
        ({}, r"has no config.json of an autoencoder.*python -m recipes.train_autoencoder.*nothing is downloaded"),
        ({"config.json": "{"}, "has no config.json of an autoencoder"),
        ({"config.json": '{"_class_name": "UNet2DModel"}'}, "a UNet2DModel cannot be used"),
        ({"config.json": '{"_class_name": "Autoencoder"}'}, "cannot be loaded"),
        ({"config.json": '{"_class_name": "Autoencoder"}', "model.safetensors": "x"}, "cannot be loaded"),
        ({"config.json": '{"_class_name": "AutoencoderKL"}'}, "cannot be loaded"),
    ],
)
def test_what_is_no_autoencoder_is_refused(tmp_path: Path, content: dict[str, str] | None, message: str) -> None:
    path = tmp_path / "autoencoder"
    for name, text in (content or {}).items():
        path.mkdir(exist_ok=True)
        (path / name).write_text(text)
    if content == {}:
        path.mkdir()
    with pytest.raises(ConfigError, match=message):
        FrozenAutoencoder(str(path))
    with pytest.raises(ConfigError, match=r"dtype=fp8 of the autoencoder is unknown. Choices: fp32, bf16, fp16"):
        FrozenAutoencoder(str(path), "fp8")


# The cache


def expected(data: DigitsDataModule, autoencoder: Path, row: int, key: tuple[int, ...], mirrored: bool) -> Tensor:
    """A training latent from the image itself, by the formula."""
    image = data.train[row]["image"][None]
    mean, std = FrozenAutoencoder(str(autoencoder)).encode(image.flip(3) if mirrored else image)
    noise = torch.randn(mean.shape[1:], generator=keyed_generator(POSTERIOR, *key))
    return (mean[0] + std[0] * noise) * 0.7


def test_latents_are_drawn_from_the_posterior_of_their_image(cache: Path) -> None:
    images = DigitsDataModule()
    images.setup()
    data = LatentsDataModule(str(cache), seed=3, num_workers=0)
    data.setup()
    assert (len(data.train), len(data.val)) == (1437, 360)
    assert (data.image_shape, data.num_classes) == ((2, 4, 4), 10)
    mirrored = 0
    for row in (0, 499, 500, 1436):  # ends of shards
        for epoch in range(4):
            drawn = data.train[epoch, row]
            assert (int(drawn["label"]), int(drawn["index"])) == (int(images.train[row]["label"]), row)
            both = [expected(images, cache.parent / "autoencoder", row, (1, 3, epoch, row), m) for m in (False, True)]
            found = [torch.allclose(drawn["image"], each, atol=1e-5) for each in both]
            assert sum(found) == 1
            mirrored += found[1]
            assert drawn["image"].dtype == torch.float32
    assert 0 < mirrored < 16
    other = LatentsDataModule(str(cache), seed=4, num_workers=0)
    other.setup()
    assert not torch.equal(other.train[0, 0]["image"], data.train[0, 0]["image"])
    assert all(torch.equal(other.val[row]["image"], data.val[row]["image"]) for row in range(360))
    straight = LatentsDataModule(str(cache), flip=False, num_workers=0)
    straight.setup()
    assert not any(straight.train.flip for _ in range(1))


def test_16_bit_latents_are_stored_in_16_bits_and_trained_on_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(tmp_path / "autoencoder")
    where = {"autoencoder": tmp_path / "autoencoder", "output": tmp_path / "latents"}
    assert run_encode(monkeypatch, **where, dtype="bf16") == 0
    assert load_file(tmp_path / "latents" / "val-00000.safetensors")["mean"].dtype == torch.bfloat16
    data = LatentsDataModule(str(tmp_path / "latents"))
    data.setup()
    assert data.val[0]["image"].dtype == torch.float32
    with pytest.raises(ConfigError, match=r"data.flip=true: .* has no latents of mirror images.*Encode with flip=true"):
        LatentsDataModule(str(tmp_path / "latents"), flip=True).setup()


def test_an_interrupted_encoding_does_not_look_complete_and_is_finished_exactly(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed after its first shard, by a signal that nothing can handle."""
    output = tmp_path / "latents"
    where = {"autoencoder": cache.parent / "autoencoder", "output": output, "shard_size": 500, "flip": "true"}
    command = ["recipes.encode", *(f"{key}={value}" for key, value in where.items())]
    process = Forked("-m", *command, "batch_size=4", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (output / "train-00000.safetensors").is_file():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "val-00000.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"the encoding was interrupted.*Finish it by the command that began it"):
        LatentsDataModule(str(output)).setup()
    # Neither by another autoencoder, nor with other shards.
    own(tmp_path / "other", seed=1)
    assert run_encode(monkeypatch, **{**where, "autoencoder": tmp_path / "other"}) == 2
    assert "holds other latents: fingerprint" in capfd.readouterr().err
    assert run_encode(monkeypatch, **{**where, "shard_size": 400}) == 2
    assert "begun with another shard_size" in capfd.readouterr().err
    (output / ".train-00001.safetensors").write_bytes(b"half a file")
    written = (output / "train-00000.safetensors").stat().st_mtime_ns
    assert run_encode(monkeypatch, **where) == 0
    assert (output / "train-00000.safetensors").stat().st_mtime_ns == written
    names = sorted(path.name for path in output.iterdir())
    assert names == sorted(path.name for path in cache.iterdir())
    for name in names:
        if name.endswith(".safetensors") and name != "train-00000.safetensors":  # that in other batches
            assert_same(load_file(output / name), load_file(cache / name))
    assert run_encode(monkeypatch, **where) == 0
    assert "complete already" in capfd.readouterr().out


def test_a_cache_of_another_autoencoder_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = own(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"is not the autoencoder that made .*Give that one, or encode again"):
        LatentsDataModule(str(cache), autoencoder=str(other)).setup()
    assert run_encode(monkeypatch, autoencoder=other, output=cache, shard_size=500, flip="true") == 2
    assert "holds other latents: fingerprint" in capfd.readouterr().err
    moved = copied(cache, tmp_path)
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["source"]["autoencoder"] = str(tmp_path / "gone")
    (moved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"data.autoencoder=.*gone: there is no directory.*data.autoencoder=PATH"):
        LatentsDataModule(str(moved)).setup()
    LatentsDataModule(str(moved), autoencoder=str(cache.parent / "autoencoder")).setup()


def test_damaged_caches_are_refused_by_file(cache: Path, tmp_path: Path) -> None:
    broken = copied(cache, tmp_path)
    path = broken / "train-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match=rf"train-00001.safetensors has {len(whole) - 10} bytes, not {len(whole)}"):
        LatentsDataModule(str(broken)).setup()
    path.unlink()
    with pytest.raises(ConfigError, match=r"train-00001.safetensors is missing"):
        LatentsDataModule(str(broken)).setup()
    path.write_bytes(b"\0" * len(whole))
    data = LatentsDataModule(str(broken))
    data.setup()
    with pytest.raises(ConfigError, match=r"train-00001.safetensors cannot be read"):
        data.train[0, 700]
    (broken / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"manifest.json is no manifest of latents"):
        LatentsDataModule(str(broken)).setup()


def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    """What a command says that must end before training."""
    assert cli(monkeypatch, *LATENT, "data.num_workers=0", *arguments, f"hydra.run.dir={run}") == 2
    assert not [*run.rglob("step*"), *run.rglob("events.out.*")]
    message = capfd.readouterr().err
    assert "Traceback" not in message
    return message[message.index("error: ") :]


def test_an_autoencoder_that_cannot_decode_is_found_before_training(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not at the first grid: with a dtype there is not, without the package, with weights that do not fit."""
    shown = refusal(monkeypatch, capfd, tmp_path / "run", f"data.directory={cache}", "data.dtype=fp61")
    assert "data.dtype=fp61" in shown
    assert "Choices: fp32, bf16, fp16" in shown
    moved = copied(cache, tmp_path)
    manifest = json.loads((moved / "manifest.json").read_text())
    stock(tmp_path / "kl")
    shutil.copytree(cache.parent / "autoencoder", tmp_path / "broken")
    save_file({"weight": torch.zeros(1)}, tmp_path / "broken" / "model.safetensors")
    for name, message in (("kl", "diffusers, which is not installed: pip install"), ("broken", "cannot be loaded")):
        path = tmp_path / name
        manifest["source"] |= {"autoencoder": str(path), "fingerprint": fingerprint(str(path))}
        (moved / "manifest.json").write_text(json.dumps(manifest))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "diffusers", None)
            shown = refusal(monkeypatch, capfd, tmp_path / "run", f"data.directory={moved}")
        assert f"error: data.autoencoder={path}" in shown
        assert message in shown


@pytest.mark.parametrize(
    ("argument", "message"),
    [("per_class=0", "at least 1"), ("seed=-1", "at least 0"), ("guidance=nan", "must be a finite number")],
)
def test_grids_that_cannot_be_drawn_are_refused_before_training(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    argument: str,
    message: str,
) -> None:
    given = f"++callbacks.samples.{argument}"
    shown = refusal(monkeypatch, capfd, tmp_path / "run", f"data.directory={cache}", given)
    assert f"samples.{argument}: " in shown
    assert message in shown


# What is not finite


def test_an_overflow_while_encoding_names_the_image_and_leaves_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """T99's kind: activations of 8e4, too much for fp16, and not for fp32 and bf16; of one image alone."""
    photos = folder(tmp_path / "photos", {"": 30})
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:] = 255
    Image.fromarray(pixels).save(photos / "bright.png")
    net = Autoencoder(in_channels=3, latent_channels=2)
    torch.nn.init.zeros_(net.encoder[0].weight)
    torch.nn.init.zeros_(net.encoder[0].bias)
    with torch.no_grad():
        net.encoder[0].weight[:, 2, 1, 1] = 4e4  # blue: -1 in all images, 1 in one
        net.encoder[0].bias.fill_(4e4)
    net.save(tmp_path / "autoencoder")
    where = {"autoencoder": tmp_path / "autoencoder", "output": tmp_path / "latents", "data": "images"}
    where |= {"data.directory": photos, "data.image_size": 8, "data.num_workers": 0}
    assert run_encode(monkeypatch, **where, dtype="fp16") == 2
    error = capfd.readouterr().err
    assert f"{photos}/bright.png: its latents are not finite" in error
    assert "The autoencoder computed in fp16: write dtype=fp32" in error
    assert not (tmp_path / "latents" / "manifest.json").exists()
    shutil.rmtree(tmp_path / "latents")
    assert run_encode(monkeypatch, **where) == 0


def test_a_nan_in_the_cache_ends_training_with_the_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = copied(cache, tmp_path)
    path = broken / "train-00001.safetensors"
    tensors = load_file(path)
    tensors["mean"][17, :, 0, 1, 1] = float("nan")
    save_file(tensors, path, metadata={"source": "x"})
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["splits"]["train"][1]["size"] = path.stat().st_size
    (broken / "manifest.json").write_text(json.dumps(manifest))
    arguments = [f"data.directory={broken}", "data.batch_size=1437", "data.num_workers=2", "trainer.max_steps=2"]
    assert cli(monkeypatch, *LATENT[1:], *arguments, f"hydra.run.dir={tmp_path}/run") == 2
    message = capfd.readouterr().err
    message = message[message.index("error: ") :]
    assert f"error: {path}, row 17: latents that are not finite" in message
    assert "Traceback" not in message


# Command line

LATENT = ["trainer.max_steps=14", "experiment=digits_latent", "model.in_channels=2", "trainer.accelerator=cpu"]
LATENT += ["trainer.val_check_interval=7", "sampler.steps=2", "callbacks.samples.per_class=1"]
LATENT += ["model.hidden_size=16", "model.depth=1", "model.num_heads=2"]  # CPUs without bf16 instructions are slow


@pytest.fixture(scope="module")
def latent_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("latent") / "run"
    with pytest.MonkeyPatch.context() as patch:
        arguments = [f"data.directory={cache}", "data.num_workers=2", f"hydra.run.dir={run}", "precision=bf16"]
        assert cli(patch, *LATENT, *arguments) == 0
    return run


def test_the_autoencoder_is_no_part_of_what_is_trained_and_draws_the_grid_in_its_own_dtype(
    cache: Path, latent_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T99's kind: not in the state dict, optimizer or averages; and in fp32 in a run in bf16."""
    from recipes.dit import DiT
    from recipes.objective import FlowMatching
    from recipes.sampler import EulerSampler

    saved = checkpoint(latent_run)
    net = DiT(**{key: value for key, value in saved["recipe"]["model"].items() if key != "_target_"})
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert set(saved["state_dict"]) == {f"net.{name}" for name in net.state_dict()}
    assert len(saved["optimizer_states"][0]["state"]) == len(trained)
    path = tmp_path / "grid.png"
    arguments = [f"ckpt_path={latent_run}/checkpoints/last.ckpt", "per_class=1", f"output={path}"]
    assert cli(monkeypatch, *arguments, "sampler=euler", "sampler.steps=2", "device=cpu", program=sample) == 0
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved["averaged_state_dict"].items()}, strict=False)
    latents = draw_samples(net, FlowMatching(), EulerSampler(steps=2), (2, 4, 4), per_class=1)
    with torch.no_grad():
        own_net = FrozenAutoencoder(str(cache.parent / "autoencoder")).model
        images = own_net.decode(latents / 0.7)  # type: ignore[operator]
    assert np.array_equal(np.asarray(Image.open(path)), image_grid(images, columns=10).permute(1, 2, 0).numpy())
    # In the run the network computed in bf16: the grid is nearly the same.
    drawn = np.asarray(Image.open(latent_run / "samples" / "step000014.png")).astype(int)
    assert abs(drawn - np.asarray(Image.open(path))).max() <= 3


def test_latents_are_not_clipped_in_sampling_unless_it_is_asked_for(cache: Path, tmp_path: Path) -> None:
    """CompVis/latent-diffusion#239: clipped to [-1, 1] like pixels, latents decode to something else.

    In the grid of the run and in `recipes.sample`.
    """
    from recipes.dit import DiT
    from recipes.objective import DDPM
    from recipes.sampler import DDIMSampler

    common = [*LATENT[1:], f"data.directory={cache}", "data.num_workers=0", "precision=fp32", "ema=none"]
    common += ["objective=ddpm", "sampler=ddim", "trainer.max_steps=7"]
    for clip, given in ((None, []), (1.0, ["+objective.clip=1"])):
        run, out = tmp_path / f"run{clip}", tmp_path / f"{clip}.png"
        with pytest.MonkeyPatch.context() as patch:
            assert cli(patch, *common, *given, f"hydra.run.dir={run}") == 0
            arguments = [f"ckpt_path={run}/checkpoints/last.ckpt", "per_class=1", f"output={out}", "device=cpu"]
            assert cli(patch, *arguments, program=sample) == 0
        saved = checkpoint(run)
        net = DiT(**{key: value for key, value in saved["recipe"]["model"].items() if key != "_target_"})
        net.load_state_dict({k.removeprefix("net."): v for k, v in saved["state_dict"].items()})
        latents = draw_samples(net, DDPM(clip=clip), DDIMSampler(steps=2), (2, 4, 4), per_class=1)
        assert (latents.abs().max() > 1) == (clip is None)
        model: Any = FrozenAutoencoder(str(cache.parent / "autoencoder")).model
        with torch.no_grad():
            expected = image_grid(model.decode(latents / 0.7), columns=10).permute(1, 2, 0).numpy()
        for path in (out, run / "samples" / "step000007.png"):
            assert abs(np.asarray(Image.open(path)).astype(int) - expected).max() <= 1


def test_a_run_on_latents_resumes_exactly(cache: Path, latent_run: Path, tmp_path: Path) -> None:
    common = [*LATENT[1:], f"data.directory={cache}", "data.num_workers=0", "precision=bf16"]
    with pytest.MonkeyPatch.context() as patch:
        assert cli(patch, *common, "trainer.max_steps=13", f"hydra.run.dir={tmp_path}/a/1") == 0
        again = ["trainer.max_steps=14", f"ckpt_path={tmp_path}/a/1/checkpoints/last.ckpt"]
        assert cli(patch, *common, *again, f"hydra.run.dir={tmp_path}/a/2") == 0
    whole, resumed = checkpoint(latent_run), checkpoint(tmp_path / "a" / "2")
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], resumed[entry], entry)


def test_the_three_commands_work_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autoencoder, encoding, diffusion; the latents that the network sees have unit variance."""
    where = f"output={tmp_path}/autoencoder"
    steps = ["trainer.max_steps=60", "trainer.accelerator=cpu", "model.block_out_channels=[8,16]"]
    assert cli(monkeypatch, *steps, where, f"hydra.run.dir={tmp_path}/run", program=train_autoencoder) == 0
    frozen = FrozenAutoencoder(str(tmp_path / "autoencoder"))
    images = DigitsDataModule()
    images.setup()
    clean = torch.stack([images.val[row]["image"] for row in range(360)])
    mean, _ = frozen.encode(clean)
    error = (frozen.decode(mean * frozen.scaling_factor) - clean).square().mean()
    assert error < 0.5 * (clean - clean.mean(0)).square().mean()  # better than the mean image
    arguments = {"autoencoder": tmp_path / "autoencoder", "output": tmp_path / "latents"}
    assert run_encode(monkeypatch, **arguments) == 0
    data = LatentsDataModule(str(tmp_path / "latents"), num_workers=0)
    data.setup()
    drawn = torch.stack([data.train[0, row]["image"] for row in range(0, 1437, 3)])
    assert abs(drawn.std() - 1) < 0.1
    assert read_manifest(str(tmp_path / "latents")).source.data == {"_target_": "recipes.data.DigitsDataModule"}
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, where, f"hydra.run.dir={tmp_path}/run2", program=train_autoencoder) == 2


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (encode, [], "autoencoder is missing. Write autoencoder=PATH"),
        (encode, ["autoencoder=nowhere"], "autoencoder=/.*nowhere: there is no directory"),
        (encode, ["autoencoder={own}", "dtype=fp61"], "dtype=fp61 of the autoencoder is unknown"),
        (encode, ["autoencoder={own}", "data=cifar10"], "data.download=true"),
        (encode, ["autoencoder={own}", "data=synthetic"], r"cannot encode images of shape \[3, 64, 64\]"),
        (encode, ["autoencoder={own}", "data=latents", "data.directory=x"], "has no images to encode"),
        (encode, ["autoencoder={own}", "batch_size=0"], "batch_size=0 must be a whole number"),
        (encode, ["autoencoder={own}", "outptu=x"], "unknown key 'outptu'.*Did you mean 'output'"),
        (train_autoencoder, ["model.in_channels=3"], r"cannot take images of shape \[1, 8, 8\]"),
        (train_autoencoder, ["model.block_out_channels=[12]"], "multiples of norm_num_groups=8"),
        (train_autoencoder, ["model.block_out_channels=[8,8,8,8,8]"], "must be multiples of 16"),
        (train_autoencoder, ["data=image_folder", "data.directory=x"], "data.directory=x: there is no directory"),
        (train_autoencoder, ["model._target_=torch.nn.Identity"], "model=Identity is no autoencoder"),
    ],
)
def test_bad_input_is_refused(
    program: Any,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    own(tmp_path / "own")
    assert cli(monkeypatch, *(each.format(own=tmp_path / "own") for each in arguments), program=program) == 2
    shown = capfd.readouterr().err
    error = shown[shown.index("error: ") :]
    assert "Traceback" not in error
    assert re.search(message, error), error
