"""`recipes.evaluate` and `recipes.sample` against plain loops: losses, accuracies, distances, and files of images."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recipes import command_line, evaluate, export, sample, train
from recipes.config import ConfigError, build
from recipes.data import DigitsDataModule, Images, LabelledImages
from recipes.features import SmallClassifier, frechet_distance, pixels, remembered, train_classifier
from recipes.images import to_uint8
from recipes.objective import EDM
from recipes.randomness import validation_draws
from recipes.sampler import EulerSampler, HeunSampler, check_guidance, draw_images, draw_samples
from recipes.trained import weights_of

CPU = torch.device("cpu")


class OwnSampler(EulerSampler):
    """Of a user, with an argument of its own."""

    def __init__(self, steps: int = 5, churn: float = 0.0) -> None:
        super().__init__(steps)
        self.churn = churn


def cli(monkeypatch: pytest.MonkeyPatch, program: Any, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [program.__file__, *arguments])
    try:
        command_line.run(program.main, program.__name__.rpartition(".")[2])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Tensors this small cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps of a tiny U-Net with power-function averages, sampled by DDIM."""
    path = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        options = [
            "model=unet_tiny",
            "sampler=ddim",
            "sampler.steps=5",
            "callbacks.samples.per_class=2",
            "logger=none",
            "precision=fp32",
        ]
        steps = ["trainer.max_steps=24", "trainer.val_check_interval=24", "ema=power", "ema.snapshot_every=2"]
        cpu = ["trainer.accelerator=cpu", "trainer.devices=1"]
        assert cli(monkeypatch, train, *options, *steps, *cpu, f"hydra.run.dir={path}") == 0
    return path


@pytest.fixture(scope="module")
def without_average(run: Path) -> Path:
    """The same, as trained with ema=none."""
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for key in ("averaged_state_dict", "averaged_state_dicts", "averaged_profiles"):
        del saved[key]
    torch.save(saved, run / "checkpoints" / "none.ckpt")
    return run / "checkpoints" / "none.ckpt"


def last(run: Path) -> str:
    return f"ckpt_path={run}/checkpoints/last.ckpt"


def network(run: Path, key: str = "averaged_state_dict") -> tuple[Any, Any]:
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    net, objective = build(saved["recipe"], "model"), build(saved["recipe"], "objective")
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved[key].items()})
    return net.eval(), objective


# Samples


def test_the_run_decides_the_sampler_unless_the_command_line_does(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    """The grid of training, by its own DDIM with 5 steps; steps, sampler or both can be given."""
    grid = (run / "samples" / "step000024.png").read_bytes()
    same, other = ([], ["sampler=ddim", "sampler.steps=5"]), (["sampler.steps=4"], ["sampler=heun"])
    for i, options in enumerate([*same, *other]):
        path = tmp_path / f"{i}.png"
        assert cli(monkeypatch, sample, last(run), "per_class=2", f"output={path}", *options) == 0
        assert (path.read_bytes() == grid) is (options in same)


def test_an_image_depends_on_seed_class_and_number_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    """Not on the batch size, the other classes or their number; up to one step of 255 where arithmetic rounds."""
    options = {
        "all": ["count=23", "batch_size=7"],
        "some": ["count=5", "classes=[3,7]"],
        "other": ["count=10", "seed=1"],
    }
    files: dict[str, dict[str, Any]] = {}
    for name, given in options.items():
        assert cli(monkeypatch, sample, last(run), f"output={tmp_path}/{name}", *given) == 0
        files[name] = {p.name: np.asarray(Image.open(p)).astype(int) for p in (tmp_path / name).iterdir()}
    assert set(files["all"]) == {f"class{i % 10}_{i // 10:06}.png" for i in range(23)}
    assert set(files["some"]) == {f"class{c}_{i:06}.png" for c, i in ((3, 0), (7, 0), (3, 1), (7, 1), (3, 2))}
    shared = files["all"].keys() & files["some"].keys()
    assert len(shared) == 4
    for name in shared:
        assert abs(files["all"][name] - files["some"][name]).max() <= 1
        assert files["all"][name].shape == (8, 8, 3)
    assert abs(files["all"]["class3_000000.png"] - files["other"]["class3_000000.png"]).max() > 10
    assert "0 of 23 samples" in capfd.readouterr().out
    assert cli(monkeypatch, sample, last(run), "count=2", f"output={tmp_path}/all") == 2
    assert "exists already" in capfd.readouterr().err


def test_grids_and_folders_hold_the_same_images(run: Path) -> None:
    net, objective = network(run)
    grid = draw_samples(net, objective, HeunSampler(3), (1, 8, 8), per_class=2)
    one = draw_images(net, objective, HeunSampler(3), (1, 8, 8), torch.tensor([4]), torch.tensor([1]))
    torch.testing.assert_close(one[0], grid[14], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(grid[4], grid[14])


@pytest.mark.parametrize("weights", ["averaged", "raw", "long", "short", "posthoc"])
def test_weights_are_the_ones_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path, weights: str
) -> None:
    """Each by itself from the file; the average made afterwards lies between those it is made of."""
    options = ["sigma_rel=0.05"] if weights == "posthoc" else []
    output = tmp_path / "grid.png"
    assert cli(monkeypatch, sample, last(run), f"weights={weights}", *options, "per_class=1", f"output={output}") == 0
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    net, objective = network(run, "state_dict")
    sources = {"raw": {}, "averaged": saved["averaged_state_dict"], **saved["averaged_state_dicts"]}
    sources["posthoc"] = sources["short"]  # which has this length
    assert sources["averaged"].keys() == saved["state_dict"].keys()
    net.load_state_dict({k.removeprefix("net."): v for k, v in (saved["state_dict"] | sources[weights]).items()})
    expected = to_uint8(draw_samples(net, objective, build(saved["recipe"], "sampler"), (1, 8, 8), per_class=1))
    found = np.asarray(Image.open(output))[..., 0].astype(int)  # 4 x 4 pixels each, gaps of 2
    tiles = np.stack([found[0:32:4, i * 34 : i * 34 + 32 : 4] for i in range(10)])
    assert abs(tiles - expected[:, 0].numpy().astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        (sample, ["ckpt_path=OWN"], "No module named 'myne'. A file of your own is looked for in"),
        (sample, ["count=0"], "count=0 must be a whole number of at least 1"),
        (sample, ["count=3", "per_class=2"], "per_class=2 are rows of a grid, and count=3 asks for a folder"),
        (sample, ["per_class=0"], "per_class=0 must be a whole number of at least 1"),
        (sample, ["count=1.5"], "count=1.5 must be a whole number"),
        (sample, ["batch_size=0"], "batch_size=0"),
        (sample, ["seed=-1"], "seed=-1"),
        (sample, ["guidance=high"], "guidance=high must be a number"),
        (sample, ["output=grid.dots"], "grid.dots is no name of a picture. Write one that ends in .png"),
        (sample, ["output=/proc/grid.png"], "/proc cannot be written to"),
        (export, ["output=/proc/folder"], "/proc cannot be written to"),
        (evaluate, ["output=/proc/result.json"], "/proc cannot be written to"),
        (sample, ["ckpt_path=RUN"], "is a directory. Write ckpt_path=RUN/checkpoints/last.ckpt"),
        (evaluate, ["output=/proc"], "output=/proc is a directory. Write output=PATH of a JSON file"),
        (sample, ["classes=[3,10]"], "classes 0 to 9"),
        (sample, ["classes=[3,3]"], "each once"),
        (sample, ["device=gpu"], "Write device=cpu"),
        (sample, ["sampler.steps=0"], "steps=0 must be at least 1"),
        (sample, ["weights=shorts"], "Did you mean 'short'"),
        (sample, ["weights=posthoc", "sigma_rel=wide"], "sigma_rel=wide must be a number"),
        (sample, ["weights=posthoc", "sigma_rel=0.3"], "must lie between 0 and 0.2887"),
        (sample, ["weights=posthoc", "sigma_rel=0.002"], "Choose one from"),
        (sample, ["ckpt_path=NONE", "weights=averaged"], "Write weights=raw"),
        (sample, ["ckpt_path=NONE", "weights=posthoc", "sigma_rel=0.1"], "Write weights=raw"),
        (evaluate, ["samples=1"], "samples=1 must be a whole number of at least 2"),
        (evaluate, ["samples=many"], "samples=many"),
        (evaluate, ["samples=9"], "samples=9: the data have 10 classes, and images of some of them alone"),
        (evaluate, ["ckpt_path=nowhere.ckpt"], "there is no file"),
        (evaluate, ["weights=ema"], "Choices: averaged, raw, long, short, posthoc"),
        (evaluate, ["inception_weights=nowhere.pth"], "there is no such file"),
        (evaluate, ["guidence=2"], "Did you mean 'guidance'"),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    run: Path,
    without_average: Path,
    program: Any,
    options: list[str],
    expected: str,
) -> None:
    given = [o.replace("NONE", str(without_average)).replace("RUN", str(run)) for o in options]
    if "ckpt_path=OWN" in given:
        saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        saved["recipe"]["model"]["_target_"] = "myne.Net"
        torch.save(saved, run / "own.ckpt")
        given = [f"ckpt_path={run}/own.ckpt"]
    path = [] if any(o.startswith("ckpt_path") for o in given) else [last(run)]
    assert cli(monkeypatch, program, *path, *given) == 2
    shown = capfd.readouterr().err
    assert expected.replace("RUN", str(run)) in shown
    assert "Traceback" not in shown


def test_a_run_without_averages_shows_its_raw_weights(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], without_average: Path, tmp_path: Path
) -> None:
    path = f"ckpt_path={without_average}"
    for options in ([], ["weights=raw"]):
        assert cli(monkeypatch, sample, path, "per_class=1", *options, f"output={tmp_path}/{len(options)}.png") == 0
        said = f"weights=raw: {without_average} was trained with ema=none and has no averages\n"
        assert (said in capfd.readouterr().out) == (options == [])
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=5))
    assert cli(monkeypatch, evaluate, path, "samples=10", f"output={tmp_path}/0.json") == 0
    assert json.loads((tmp_path / "0.json").read_text())["weights"] == "raw"


def test_data_that_were_moved_are_told_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=2))
    for number in range(25):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number:02}.png")
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    folder = {"_target_": "recipes.image_files.ImagesDataModule", "directory": "before", "num_workers": 0}
    saved["recipe"]["data"] = folder | {"image_size": 8, "channels": 1}
    torch.save(saved, tmp_path / "last.ckpt")
    arguments = [f"ckpt_path={tmp_path}/last.ckpt", "samples=3", "sampler.steps=1", f"output={tmp_path}/result.json"]
    assert cli(monkeypatch, evaluate, *arguments) == 2
    assert "data.directory=before: there is no directory" in capfd.readouterr().err
    assert cli(monkeypatch, evaluate, *arguments, f"data.directory={tmp_path}", "data.shards=x") == 2
    assert "unknown key 'data.shards'. recipes.image_files.ImagesDataModule takes" in capfd.readouterr().err
    assert cli(monkeypatch, evaluate, *arguments, f"data.directory={tmp_path}") == 0
    assert json.loads((tmp_path / "result.json").read_text())["frechet_reference"] == 23


def test_snapshots_are_those_of_the_run_that_was_moved_not_of_another_in_its_old_place(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    moved, old = tmp_path / "moved", tmp_path / "old"
    shutil.copytree(run, moved)
    shutil.copytree(run / "snapshots", old)
    for path in old.iterdir():  # of another run
        other = torch.load(path, weights_only=True)
        other["averages"] = {
            profile: {name: value + 1 for name, value in average.items()}
            for profile, average in other["averages"].items()
        }
        torch.save(other, path)
    saved = torch.load(moved / "checkpoints" / "last.ckpt", weights_only=True)
    next(state for name, state in saved["callbacks"].items() if "Averaging" in name)["snapshot_dir"] = str(old)
    path = moved / "checkpoints" / "last.ckpt"
    torch.save(saved, path)
    found, expected = (weights_of(saved, "posthoc", each, 0.07) for each in (path, run / "checkpoints" / "last.ckpt"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_sampler_that_does_not_fit_the_objective_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    saved["recipe"]["objective"] = {"_target_": "recipes.objective.DDPM", "prediction": "v", "zero_snr": True}
    torch.save(saved, tmp_path / "v.ckpt")
    for program in (sample, evaluate):
        assert cli(monkeypatch, program, f"ckpt_path={tmp_path}/v.ckpt", "sampler=heun") == 2
        assert "Choose sampler=ddim or sampler=dpmpp_2m" in capfd.readouterr().err


# Measures


def reference_loss(net: Any, objective: Any) -> float:
    """All images at once, the mean in float64."""
    data = DigitsDataModule()
    data.setup()
    noise, normal = validation_draws(torch.arange(len(data.val)), (1, 8, 8))
    with torch.no_grad():
        losses = objective.loss(net, data.val.images, data.val.labels, objective.times(normal), noise)
    return float(losses.double().mean())


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """|mean difference|² + tr(A + B - 2 (AB)^(1/2)), by the eigenvalues of A^(1/2) B A^(1/2)."""
    (m, n), (cov_a, cov_b) = (a.mean(0), b.mean(0)), (np.cov(a, rowvar=False), np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(cov_a)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    middle = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cov_b @ root), 0, None)).sum()
    return float(((m - n) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * middle)


@pytest.fixture(scope="module")
def small() -> tuple[SmallClassifier, DigitsDataModule]:
    """A quick classifier, the same that the command line trains when its steps are cut."""
    data = DigitsDataModule()
    data.setup()
    return train_classifier(data, CPU, steps=60), data


def test_evaluation_is_what_plain_loops_give(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    run: Path,
    small: tuple[SmallClassifier, DigitsDataModule],
) -> None:
    classifier, data = small
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=60))
    assert cli(monkeypatch, evaluate, last(run), "samples=90", "guidance=1.5", "seed=3", "batch_size=40") == 0
    shown = capfd.readouterr().out
    result = json.loads((run / "checkpoints" / "last_averaged_ddim5_guidance1.5_seed3_samples90.json").read_text())

    net, objective = network(run)
    raw, _ = network(run, "state_dict")
    assert result["validation_loss"] == pytest.approx(reference_loss(net, objective), rel=1e-5)
    assert result["validation_loss_raw"] == pytest.approx(reference_loss(raw, objective), rel=1e-5)
    sampler = build(torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["recipe"], "sampler")
    images = to_uint8(draw_samples(net, objective, sampler, (1, 8, 8), per_class=9, guidance=1.5, seed=3))
    with torch.no_grad():
        accuracy = (classifier(images).argmax(1) == torch.arange(90) % 10).double().mean()
        own = (classifier(to_uint8(data.val.images)).argmax(1) == data.val.labels).double().mean()
        features = [classifier.features(x).double().numpy() for x in (to_uint8(data.train.images), images)]
        held_out = classifier.features(to_uint8(data.val.images)).double().numpy()
    assert result["class_accuracy"] == pytest.approx(float(accuracy), abs=1 / 90 + 1e-9)
    assert result["classifier_accuracy"] == pytest.approx(float(own))
    assert result["frechet_distance"] == pytest.approx(frechet(*features), rel=1e-2)
    assert result["frechet_distance_validation"] == pytest.approx(frechet(features[0], held_out), rel=1e-3)
    assert result["frechet_distance_noise"] > 10 * result["frechet_distance_validation"]
    assert (result["sampler"], result["sampler_steps"], result["step"]) == ("DDIMSampler", 5, 24)
    assert "small classifier" in result["frechet_network"]
    assert "not Inception" in shown
    for key in ("validation_loss", "validation_loss_raw"):
        assert f"{result[key]:.4f}" in shown


def test_guidance_by_what_was_not_learned_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    saved["recipe"]["objective"]["label_dropout"] = 0.0
    torch.save(saved, path := tmp_path / "labelled.ckpt")
    for program in (sample, evaluate):
        assert cli(monkeypatch, program, f"ckpt_path={path}", "guidance=2") == 2
        assert "guidance=2 needs images without a label, and objective.label_dropout=0" in capfd.readouterr().err
    options = [f"ckpt_path={path}", "guidance=1", "per_class=1", f"output={tmp_path}/grid.png"]
    assert cli(monkeypatch, sample, *options) == 0
    with pytest.raises(ValueError, match="guidance=0 needs classes, and the network has none"):
        check_guidance(0.0, EDM(), null_label=0)


def test_one_validation_image_has_no_distance(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    class OneValidates(DigitsDataModule):
        def load(self) -> tuple[LabelledImages, LabelledImages]:
            train, val = super().load()
            return train, LabelledImages(val.images[:1], val.labels[:1])

    monkeypatch.setattr("recipes.data.DigitsDataModule", OneValidates)
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=2))
    output = f"output={tmp_path}/one.json"
    assert cli(monkeypatch, evaluate, last(run), "samples=20", "sampler.steps=1", output) == 0
    assert "1 validation images are too few" in " ".join(capfd.readouterr().out.split())
    result = json.loads((tmp_path / "one.json").read_text())
    assert result["frechet_distance_validation"] is None
    assert result["frechet_distance"] > 0


def test_bad_samples_are_counted_and_not_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=2))
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    saved["averaged_state_dict"]["net.conv_out.bias"].fill_(torch.nan)
    torch.save(saved, tmp_path / "bad.ckpt")
    assert cli(monkeypatch, evaluate, f"ckpt_path={tmp_path}/bad.ckpt", "samples=10", "sampler.steps=2") == 0
    result = json.loads((tmp_path / "bad_averaged_ddim2_guidance1_seed0_samples10.json").read_text())
    assert result["non_finite_samples"] == 10
    assert result["frechet_distance"] is result["validation_loss"] is None
    assert result["validation_loss_raw"] > 0
    assert "not finite" in capfd.readouterr().out


@pytest.mark.parametrize(("count", "few"), [(40, "40 samples for 64 features"), (70, "")])
def test_a_distance_of_fewer_images_than_features_is_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path, count: int, few: str
) -> None:
    monkeypatch.setattr(evaluate, "train_classifier", partial(train_classifier, steps=2))
    options = [f"samples={count}", "sampler.steps=1", f"output={tmp_path}/result.json"]
    assert cli(monkeypatch, evaluate, last(run), *options) == 0
    shown = capfd.readouterr().out
    assert f"distances of {count} samples alone" in shown
    assert few in shown
    assert ("too few" in shown) == ("Write samples=2048" in shown) == bool(few)
    assert json.loads((tmp_path / "result.json").read_text())["frechet_features"] == 64


def test_without_classes_the_classifier_tells_how_images_are_turned() -> None:
    """On turned images that it has not seen, far more often than the quarter that a guess gets."""

    class Unlabelled(DigitsDataModule):
        num_classes = 0

    data = Unlabelled()
    data.setup()
    classifier = train_classifier(data, CPU, steps=200)
    images = to_uint8(data.val.images)
    with torch.no_grad():
        right = [(classifier(images.rot90(n, (2, 3))).argmax(1) == n).double().mean() for n in range(4)]
    assert classifier.head.out_features == 4
    assert sum(right) / 4 > 0.5
    assert "quarter turns" in frechet_distance(classifier, None, CPU, num_classes=0)[1]


def test_another_sampler_does_not_overwrite_the_results_of_one(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    where = tmp_path / "run" / "checkpoints"
    where.mkdir(parents=True)
    (where / "last.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    own = ["sampler._target_=test_evaluate.OwnSampler", "sampler.steps=3"]
    others = ([*own, "sampler.churn=0.3"], [*own, "sampler.churn=0.5"])
    for options in ([], ["sampler.steps=3"], ["sampler=euler", "sampler.steps=3"], *others):
        assert cli(monkeypatch, sample, f"ckpt_path={where}/last.ckpt", "per_class=1", *options) == 0
    names = {path.name for path in (tmp_path / "run" / "samples").iterdir()}
    own = [f"own3_churn{churn}" for churn in (0.3, 0.5)]
    assert names == {f"last_averaged_{name}_guidance1_seed0.png" for name in ("ddim5", "ddim3", "euler3", *own)}


def test_the_name_of_the_only_profile_means_its_average(run: Path) -> None:
    """`ema=warmup` has one, called constant, which stands in the checkpoint as the averaged weights alone."""
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    average = {name: value + 1 for name, value in saved["state_dict"].items()}
    saved |= {"averaged_state_dict": average, "averaged_profiles": {"constant": {"profile": "ConstantDecay"}}}
    del saved["averaged_state_dicts"]
    found = weights_of(saved, "constant", run / "checkpoints" / "last.ckpt")
    assert found.keys() == {name.removeprefix("net.") for name in average}
    for name, value in found.items():
        assert torch.equal(value, average[f"net.{name}"])
    with pytest.raises(ConfigError, match="Choices: averaged, raw, constant, posthoc"):
        weights_of(saved, "short", run / "checkpoints" / "last.ckpt")


def test_the_classifier_is_a_function_of_the_data(small: tuple[SmallClassifier, DigitsDataModule]) -> None:
    """Whatever the seed of the session, which it leaves as it is."""
    classifier, data = small
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = train_classifier(data, CPU, steps=60)
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(classifier.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        right = (classifier(to_uint8(data.val.images)).argmax(1) == data.val.labels).double().mean()
    assert right > 0.5


def test_images_are_read_once_for_all_that_is_to_see_them(small: tuple[SmallClassifier, DigitsDataModule]) -> None:
    """Files cost more to read than to look at, and latents to decode."""
    classifier, data = small

    class Files(Images):
        reads = 0

        def __len__(self) -> int:
            return len(data.train)

        def read(self, row: int) -> tuple[Tensor, int]:
            Files.reads += 1
            return data.train.read(row)

    of_files = DigitsDataModule()
    of_files.setup()
    of_files.train = Files()  # type: ignore[assignment]
    again = train_classifier(remembered(of_files, CPU, batch_size=100), CPU, steps=60)
    assert len(data.train) <= Files.reads <= len(data.train) + 1  # and one for its form
    images = to_uint8(data.val.images[:50])
    with torch.no_grad():
        torch.testing.assert_close(again(images), classifier(images), rtol=0, atol=1e-4)
    assert remembered(of_files, CPU, 100, most=1000) is of_files
    assert remembered(data, CPU, 100) is data


def test_samples_that_are_no_images_are_decoded_first(small: tuple[SmallClassifier, DigitsDataModule]) -> None:
    """A data module of latents says what images they stand for."""

    class Latents:
        def to_images(self, samples: Tensor) -> Tensor:
            return samples[:, :1] * 2 - 1

    assert torch.equal(pixels(Latents(), torch.full((1, 4, 8, 8), 0.5)), torch.full((1, 1, 8, 8), 128).byte())


def test_a_small_sample_never_stands_in_for_inception(small: tuple[SmallClassifier, DigitsDataModule]) -> None:
    metric, words = frechet_distance(small[0], None, CPU)
    assert "64 features" in words
    images = to_uint8(small[1].val.images)
    metric.update(images[:100], real=True)
    metric.update(images[:100], real=False)
    assert abs(float(metric.compute())) < 1e-3
