"""The recipes' instrument panel: what is in the event files and on the screen, against plain references."""

from __future__ import annotations

import math
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from few_digits import FEW, FewDigits
from launch import launch
from test_recipes import (
    ROOT,
    SHORT,
    TINY,
    checkpoint,
    cli,
    events,
    overflow,
    reference_losses,
    reference_validation_loss,
    scalars,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mixprec import MasterWeightPrecision, PrecisionMonitor
from recipes.benchmark_panel import Alternating
from recipes.data import DigitsDataModule
from recipes.denoising import Objective
from recipes.diffusion import DiffusionModule
from recipes.ending import ValidateAtEnd
from recipes.flops import peak_flops, training_flops
from recipes.loading import Batch
from recipes.loss_means import LossSums, quartiles
from recipes.objective import DDPM, EDM, FlowMatching
from recipes.progress import ProgressLine
from recipes.randomness import validation_draws
from recipes.sample_grid import SampleGrid
from recipes.sampler import EulerSampler
from recipes.speed import SpeedMonitor
from recipes.unet import UNet

# Losses by noise level


@pytest.mark.parametrize("objective", [EDM(), DDPM(), DDPM(density="logit_normal"), FlowMatching()])
def test_quartiles_hold_a_quarter_of_the_training_times_each(objective: Objective) -> None:
    generator = torch.Generator().manual_seed(0)
    time = objective.draw(40000, generator)
    edges = quartiles(objective)
    assert edges.tolist() == sorted(edges.tolist())
    bounds = [-math.inf, *edges.tolist(), math.inf]
    shares = [float(((time >= low) & (time < high)).float().mean()) for low, high in pairwise(bounds)]
    assert shares == pytest.approx([0.25] * 4, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_fp32_whatever_comes_in(dtype: torch.dtype) -> None:
    """Sums in 16 bits stop at 256 (bf16) or overflow (fp16)."""
    value = 60000.0 if dtype == torch.float16 else 1.0
    sums = LossSums(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(600):
        sums.add(torch.full((2,), value, dtype=dtype), torch.tensor([0.5, 3.5]))
    assert sums.means() == {"loss": value, "loss_q1": value, "loss_q4": value}


def test_an_infinite_loss_stays_in_its_own_quartile() -> None:
    sums = LossSums(torch.tensor([1.0, 2.0, 3.0]))
    sums.add(torch.tensor([1.0, math.inf]), torch.tensor([0.0, 9.0]))
    assert sums.means() == {"loss": math.inf, "loss_q1": 1.0, "loss_q4": math.inf}


class Watched(DiffusionModule):
    """Keeps the losses and times of every batch."""

    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        losses, sigma = self._step[-1]
        type(self).seen.append((losses.clone(), sigma.clone()))
        return loss


def test_training_loss_by_noise_level_leaves_skipped_batches_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logged every 4 steps; batch 1 overflows. Against sums in float64, sample by sample."""
    from recipes import train

    Watched.seen = []
    monkeypatch.setattr(train, "DiffusionModule", Watched)
    overflow(monkeypatch, {(0, 1)})
    options = ["trainer.max_steps=7", "trainer.log_every_n_steps=4", "~callbacks.samples", "precision=fp32"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    edges = torch.exp(-1.2 + 1.2 * torch.tensor([-0.6744897501960817, 0.0, 0.6744897501960817], dtype=torch.float64))
    batches = [batch for index, batch in enumerate(Watched.seen) if index != 1]
    assert len(batches) == 7
    tags = ("loss", "loss_q1", "loss_q2", "loss_q3", "loss_q4")
    logged = [list(scalars(tmp_path / "run", f"train/{tag}").values()) for tag in tags]
    for step, window in enumerate((batches[:3], batches[3:])):  # after 4 batches and after 8
        losses, sigma = (torch.cat(column).double() for column in zip(*window, strict=True))
        assert logged[0][step] == pytest.approx(float(losses.mean()), rel=1e-5)
        for part, (low, high) in enumerate(pairwise([0.0, *edges.tolist(), math.inf]), start=1):
            inside = (sigma >= low) & (sigma < high)
            assert logged[part][step] == pytest.approx(float(losses[inside].mean()), rel=1e-5)
    (epoch,) = scalars(tmp_path / "run", "train/loss_epoch").values()
    assert epoch == pytest.approx(float(torch.cat([batch[0] for batch in batches]).double().mean()), rel=1e-6)


def test_validation_loss_of_raw_and_averaged_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the same noise; each against the weights in the checkpoint, in float64, and by noise level."""
    options = ["precision=fp32", "data.batch_size=55", "trainer.max_steps=12", "trainer.val_check_interval=9"]
    assert cli(monkeypatch, *SHORT, *options, f"hydra.run.dir={tmp_path}/run") == 0
    run = tmp_path / "run"
    averaged, raw = scalars(run, "val/loss"), scalars(run, "val/loss_raw")
    assert list(averaged) == list(raw) == [9, 12]
    assert averaged[12] == pytest.approx(reference_validation_loss(run, FewDigits()), rel=1e-5)
    assert raw[12] == pytest.approx(reference_validation_loss(run, FewDigits(), "state_dict"), rel=1e-5)
    assert raw[12] != pytest.approx(averaged[12], rel=1e-3)

    saved, data = checkpoint(run), FewDigits()
    data.setup()
    net = UNet(1, 10, [8, 16])
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved["averaged_state_dict"].items()})
    noise, normal = validation_draws(torch.arange(len(data.val)), (1, 8, 8))
    with torch.no_grad():
        sigma = torch.exp(normal.double() * 1.2 - 1.2)
        losses = reference_losses(net, data.val.images, data.val.labels, sigma, noise, 0.5)
    for part, inside in enumerate((normal < -0.67449, (normal >= -0.67449) & (normal < 0)), start=1):
        assert scalars(run, f"val/loss_q{part}")[12] == pytest.approx(float(losses[inside].mean()), rel=1e-5)


def test_sums_go_through_a_checkpoint() -> None:
    """Every field at a value of its own; only rank 0 takes the share that was its."""

    class Second(DiffusionModule):
        global_rank = 1  # type: ignore[assignment]

    made = [
        kind(Small(), EDM(), lambda params: torch.optim.SGD(params, lr=0.1))
        for kind in (DiffusionModule, DiffusionModule, Second)
    ]
    made[0]._train.add(torch.tensor([2.0]), torch.tensor([0.01]))
    made[0]._step = [(torch.tensor([3.0]), torch.tensor([0.02]))]
    made[0]._epoch_loss, made[0]._epoch_samples, made[0]._epoch_skipped = 8.0, 4.0, 5
    saved: dict[str, Any] = {}
    made[0].on_save_checkpoint(saved)
    for module in made[1:]:
        module.on_load_checkpoint(saved)
        assert (module._epoch_loss, module._epoch_samples, module._epoch_skipped) == (8.0, 4.0, 5)
    assert made[1]._train.means() == {"loss": 2.0, "loss_q1": 2.0}
    assert made[1]._step == made[0]._step
    assert made[2]._train.means() == {}
    assert made[2]._step == []


def test_without_averaging_there_is_one_validation_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["ema=none", "trainer.max_steps=2", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    tags = events(tmp_path / "run").Tags()["scalars"]
    assert "val/loss" in tags
    assert "val/loss_raw" not in tags


# Several ranks


def work(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    logged: list[dict[str, float]] = []

    class Constant(DiffusionModule):
        """Loss 1 on rank 0 and 3 on rank 1, which has a third of the samples."""

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self._step[-1] = (torch.full((6 - 4 * rank,), 1.0 + 2 * rank), torch.full((6 - 4 * rank,), 1e-3))
            return loss

        def _over_ranks(self, sums: LossSums) -> LossSums:
            found = super()._over_ranks(sums)
            logged.append(found.means())
            return found

    with pytest.MonkeyPatch.context() as patch:
        from recipes import train

        patch.setattr(train, "DiffusionModule", Constant)
        options = ["trainer=cpu_ranks", "trainer.max_steps=2", "trainer.limit_val_batches=0", "model=unet_tiny"]
        options += ["precision=fp32", "trainer.log_every_n_steps=1", f"hydra.run.dir={directory}/constant"]
        assert cli(patch, *options) == 0
    for step in logged[:2]:
        assert step == {"loss": 1.5, "loss_q1": 1.5}


def test_means_are_those_of_all_ranks_samples(tmp_path: Path) -> None:
    """Ranks that hold 6 and 2 samples of loss 1 and 3: 1.5, not 2."""
    launch(__file__, 2, tmp_path)
    assert list(scalars(tmp_path / "constant", "train/loss").values()) == [1.5, 1.5]
    assert list(scalars(tmp_path / "constant", "train/loss_epoch").values()) == [1.5]


# Speed


class Small(nn.Module):
    """[B, 1, 8, 8] -> [B, 1, 8, 8]: two convolutions and a linear layer."""

    null_label = 10

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3, padding=1)
        self.embedding = nn.Linear(1, 4)
        self.two = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor, noise_level: Tensor, labels: Tensor) -> Tensor:
        return self.two(F.relu(self.one(image)) + self.embedding(noise_level[:, None])[:, :, None, None])


def test_flops_are_those_counted_by_hand() -> None:
    forward = 64 * (4 * 9 * 2 + 4 * 2) + 4 * 2
    net = Small().bfloat16()
    assert training_flops(net, (1, 8, 8)) == 3 * forward
    assert net.one.weight.dtype == torch.bfloat16
    assert net.one.weight.device.type == "cpu"


def test_flops_of_checkpointed_blocks_are_counted_once() -> None:
    one, other = (UNet(1, 10, [8, 16], checkpointing=checkpointing) for checkpointing in (False, True))
    assert training_flops(one, (1, 8, 8)) == training_flops(other, (1, 8, 8)) > 10**6


def test_speed_is_logged_and_mfu_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from recipes import speed

    asked = []

    def peak(device: torch.device, dtype: torch.dtype) -> tuple[int, str]:
        asked.append((device.type, dtype))
        return 10**12, ""

    monkeypatch.setattr(speed, "peak_flops", peak)
    options = ["trainer.max_steps=4", "trainer.log_every_n_steps=2", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    assert asked == [("cpu", torch.bfloat16)]  # the compute dtype's, not fp32's
    log = events(tmp_path / "run")
    found = {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"] if tag[:5] == "perf/"}
    flops = training_flops(UNet(1, 10, [8, 16]), (1, 8, 8))
    for step in range(2):
        images = found["perf/images_per_second"][step]
        assert found["perf/step_seconds"][step] == pytest.approx(32 / images, rel=1e-5)
        assert found["perf/tflop_per_second"][step] == pytest.approx(flops * images / 1e12, rel=1e-5)
        assert found["perf/mfu"][step] == pytest.approx(flops * images / 1e12, rel=1e-5)
        assert 0 < found["perf/data_wait_share"][step] < 1
        assert 0.05 < found["perf/peak_memory_gib"][step] < 64


def test_a_missing_peak_is_said_once_and_nothing_is_made_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["trainer.max_steps=4", "trainer.log_every_n_steps=1", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    assert "".join(capfd.readouterr()).count("perf/mfu is not logged: the peak of a cpu is not known") == 1
    assert "perf/mfu" not in events(tmp_path / "run").Tags()["scalars"]
    assert peak_flops(torch.device("cpu"), torch.float16) == (None, "the peak of a cpu is not known")


class Slow(L.Callback):
    """A loader that takes 20 ms a batch, a step of 60 ms, and a validation of 0.5 s."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        fetched = trainer.fit_loop._data_fetcher
        assert fetched is not None
        if not hasattr(fetched, "slowed"):
            fetched.slowed, iterator = True, fetched.iterator  # type: ignore[attr-defined]

            class Sleepy:
                def __iter__(self) -> Any:
                    return self

                def __next__(self) -> Any:
                    time.sleep(0.02)
                    return next(iterator)  # type: ignore[call-overload]

            fetched.iterator = Sleepy()
        time.sleep(0.06)

    def on_validation_end(self, *_: Any) -> None:
        time.sleep(0.5)


def test_the_clock_stands_still_in_validation_and_knows_the_loader(tmp_path: Path) -> None:
    """Sleeping is at least as long as asked for, so these are bounds on what may be counted, not on speed."""
    speed, seen = SpeedMonitor(), []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append((speed._elapsed, speed._waited, trainer.callback_metrics.get("perf/data_wait_share")))

    module = DiffusionModule(UNet(1, 10, [8, 16]), EDM(), lambda params: torch.optim.SGD(params, lr=0.0))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=100,
        callbacks=[speed, Slow(), Keep()],
        logger=L.pytorch.loggers.CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    start = time.perf_counter()
    trainer.fit(module, datamodule=DigitsDataModule())
    whole = time.perf_counter() - start
    elapsed, waited, _ = seen[-1]
    assert elapsed <= whole - 0.5  # the first validation; the second comes after the last batch
    assert 3 * 0.02 <= waited <= whole - 0.5 - 6 * 0.06  # fetches 2, 3, 5 and 6, but for the first after a pause


# What is watched and what is not


class Pinned(L.LightningModule):
    """Claims to be on `place`."""

    place: ClassVar = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    @property
    def device(self) -> torch.device:
        return self.place

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads = 0
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += self.counting
        self.reads += self.counting and func in READS
        return func(*args, **kwargs or {})


def operations(callbacks: list[L.Callback], directory: Path) -> list[tuple[int, int]]:
    """Operations and reads of the device in each training batch, from its start to the next one's."""
    counts, mode = [], Count()

    class Counter(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append((mode.operations, mode.reads))

    torch.manual_seed(0)
    module = DiffusionModule(UNet(1, 10, [8, 16]), EDM(), lambda params: torch.optim.SGD(params, lr=0.1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=8,
        limit_val_batches=0,
        log_every_n_steps=4,
        plugins=MasterWeightPrecision("bf16"),
        callbacks=[*callbacks, Counter()],
        logger=L.pytorch.loggers.TensorBoardLogger(directory, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    connector, summed_up = trainer._logger_connector, trainer._logger_connector.on_batch_end

    def on_batch_end() -> None:
        """Lightning looks at what it was told for the progress bar after every batch, on the host."""
        mode.counting = False
        summed_up()
        mode.counting = True

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]
    with mode:
        trainer.fit(module, datamodule=DigitsDataModule())
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]


def test_batches_that_are_not_logged_cost_nothing(tmp_path: Path) -> None:
    """Not one operation more than without the panel, and no read; those that are, do."""
    bare = operations([], tmp_path / "bare")
    watched = operations([PrecisionMonitor(), SpeedMonitor()], tmp_path / "watched")
    quiet = [4, 5, 6]  # counted from 0; batches 0, 1 and 3 are looked at, 3 is logged
    assert [watched[n] for n in quiet] == [bare[n] for n in quiet]
    assert all(reads == 0 for _, reads in (watched[n] for n in quiet))
    assert watched[3][0] > bare[3][0]


def test_lightning_keeps_what_the_progress_bar_shows_where_it_was_given(tmp_path: Path) -> None:
    """It reads it after every batch, so it must not lie on the device. Pinned for Lightning 2.6."""
    found = {}

    class Elsewhere(Pinned):
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("host", torch.tensor(1.0), prog_bar=True)
            type(self).place = torch.device("meta")
            self.log("host", torch.tensor(2.0), prog_bar=True)
            self.log("device", 2.0)
            type(self).place = torch.device("cpu")
            found.update({key.split(".")[-1]: value.value.device.type for key, value in self.trainer._results.items()})

    options = {"max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", enable_model_summary=False, **options)
    with pytest.raises(NotImplementedError):  # Lightning reads the other one, which has no values
        trainer.fit(Elsewhere(), torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert found == {"host": "cpu", "device": "meta"}


# Screen, samples, HParams


def test_progress_is_a_few_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["precision=fp16", "trainer.max_steps=9", "trainer.log_every_n_steps=2", "~callbacks.samples"]
    options += ["data.batch_size=16", "trainer.limit_val_batches=1"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    shown = capfd.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2  # the first logging step, and the last step: less than 10 seconds lie between
    assert lines[0].startswith("epoch 0  step 2/9  ")
    assert "train/loss " in lines[1]
    assert "  scale 32768  skipped 0" in lines[1]
    assert "\r" not in shown
    assert "it/s" not in shown


def test_a_negative_interval_of_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds=-1"):
        ProgressLine(seconds=-1)


class Latents(DigitsDataModule):
    """What the network draws is no image: it is one after this, in bf16, and the first sample is broken."""

    def to_images(self, samples: Tensor) -> Tensor:
        images = torch.zeros(len(samples), 3, 16, 16, dtype=torch.bfloat16)
        images[0, :, 3, 3] = math.nan
        return images


def test_samples_are_made_images_first_and_broken_ones_are_flagged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = DiffusionModule(UNet(1, 10, [8, 16]), EDM(), lambda params: torch.optim.SGD(params, lr=0.1))
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path, name="", version="")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[SampleGrid(EulerSampler(steps=1), str(tmp_path / "grids"), per_class=2), ValidateAtEnd()],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=Latents())
    assert "1 of 20 samples are not finite" in capsys.readouterr().out
    assert list(scalars(tmp_path, "samples/non_finite").values()) == pytest.approx([1 / 20])
    from PIL import Image

    grid = Image.open(tmp_path / "grids" / "step000001.png")
    assert grid.getpixel((3 * 2, 3 * 2)) == (255, 0, 0)
    assert grid.getpixel((0, 0)) == (128, 128, 128)


def test_one_hparams_entry_with_what_came_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    options = ["trainer.max_steps=3", "trainer.log_every_n_steps=1", "~callbacks.samples"]
    assert cli(monkeypatch, *TINY, *FEW, *options, f"hydra.run.dir={tmp_path}/run") == 0
    log = events(tmp_path / "run")
    content = log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    columns = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert columns["precision"].string_value == "bf16"
    assert columns["model"].string_value == "UNet"
    assert columns["optimizer.lr"].number_value == 2e-3
    assert not [name for name in columns if "_target_" in name or name.startswith(("callbacks", "logger"))]
    for title, tag in {
        "val_loss": "val/loss",
        "val_loss_raw": "val/loss_raw",
        "train_loss": "train/loss_epoch",
    }.items():
        assert list(scalars(tmp_path / "run", f"hparams/{title}").values()) == [
            list(scalars(tmp_path / "run", tag).values())[-1]
        ]
    assert list(scalars(tmp_path / "run", "hparams/skipped_steps").values()) == [0]
    documented = (ROOT / "recipes" / "README.md").read_text()
    for tag in log.Tags()["scalars"] + log.Tags()["histograms"]:  # what is written is what the documentation lists
        group, _, _ = tag.partition("/")
        layer = group.startswith("mixprec_")
        known = f"`{group}/{'GROUP' if group.endswith('exponents') else 'LAYER'}`" if layer else f"`{tag}`"
        known = {"hparams": "`hparams/*`", "lr-AdamW": "`lr-OPTIMIZER`"}.get(group, known)
        known = re.sub(r"loss_q[23]", "loss_q4", known)
        assert known in documented or tag == "epoch", tag
    layout = log.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for heading in (b"Precision", b"Loss", b"Speed", b"Layers"):
        assert heading in layout


def test_the_benchmark_watches_every_other_block() -> None:
    alternating = Alternating(PrecisionMonitor(), SpeedMonitor())
    watched = []
    for batch in range(40):
        alternating._batches = batch
        watched.append(alternating.watching)
    assert watched == [False] * 10 + [True] * 10 + [False] * 10 + [True] * 10


if __name__ == "__main__":
    import sys

    work(Path(sys.argv[1]))
