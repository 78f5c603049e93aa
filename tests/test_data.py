"""Data sets: exact pixels from every kind of file, one order for every number of ranks and workers, named refusals."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import signal
import struct
import sys
import tarfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from test_recipes import SHORT, TINY, assert_same, checkpoint, cli
from torchvision.datasets import CIFAR10, MNIST

from recipes import encode, evaluate, export, sample
from recipes.autoencoder import Autoencoder
from recipes.config import ConfigError
from recipes.data import DigitsDataModule, LabelledImages, SyntheticDataModule, from_uint8
from recipes.features import train_classifier
from recipes.image_files import ImageFiles, ImageFolderDataModule, ImagesDataModule, read_image
from recipes.images import to_uint8
from recipes.loading import ResumableLoader, ShuffledShard
from recipes.small_images import CIFAR10DataModule, MNISTDataModule
from recipes.tar_shards import WebDatasetDataModule

COLOURS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)


def folder(root: Path, counts: dict[str, int], size: int = 8) -> Path:
    """PNG files below `root`; the red value of all pixels is the number of the file."""
    number = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = np.zeros((size, size, 3), np.uint8)
            pixels[..., 0] = number
            pixels[:, : size // 2, 1] = 255  # left half: a mirror image is another image
            Image.fromarray(pixels).save(root / name / f"{i:03d}.png")
            number += 1
    return root


# Pixels


def test_8_bit_values_map_exactly_there_and_back() -> None:
    values = torch.arange(256, dtype=torch.uint8)
    mapped = from_uint8(values)
    assert mapped.dtype == torch.float32
    assert (mapped[0], mapped[255]) == (-1.0, 1.0)
    torch.testing.assert_close(mapped.double(), values.double() / 127.5 - 1, rtol=0, atol=1e-7)
    assert torch.equal(to_uint8(mapped), values)


def png16(path: Path, values: np.ndarray) -> None:
    """A PNG of 16 bits, grey or RGB, which Pillow cannot write."""
    height, width = values.shape[:2]

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 16, 2 if values.ndim == 3 else 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def read(path: Path, channels: int = 3, size: int = 8) -> np.ndarray:
    return read_image(str(path), channels, size, str(path)).permute(1, 2, 0).numpy()


def test_every_mode_of_an_image_becomes_what_a_viewer_shows(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(COLOURS).save(path)
    assert np.array_equal(read(path), COLOURS)
    assert read(path, channels=1).shape == (8, 8, 1)
    Image.fromarray(COLOURS[..., 0]).save(path)  # grey
    assert np.array_equal(read(path), COLOURS[..., :1].repeat(3, axis=2))
    assert np.array_equal(read(path, channels=1), COLOURS[..., :1])
    alpha = np.concatenate([COLOURS, np.full((8, 8, 1), 255, np.uint8)], axis=2)
    alpha[0, 0] = (10, 20, 30, 0)
    Image.fromarray(alpha).save(path)  # transparent: white, whatever colour is hidden there
    expected = COLOURS.copy()
    expected[0, 0] = 255
    assert np.array_equal(read(path), expected)
    palette = Image.fromarray(COLOURS).quantize(16)
    palette.save(path)
    assert np.array_equal(read(path), np.asarray(palette.convert("RGB")))
    palette.save(path, transparency=palette.getpixel((0, 0)))
    assert read(path)[0, 0].tolist() == [255, 255, 255]
    Image.fromarray(COLOURS[..., 0] > 90).save(path)  # one bit
    assert np.array_equal(read(path, channels=1)[..., 0], (COLOURS[..., 0] > 90) * np.uint8(255))


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_scaled_not_cut_off(tmp_path: Path, channels: int) -> None:
    """Pillow's own conversion of 16-bit grey makes everything above 255 white."""
    values = np.array([[0, 257, 32768, 65535]] * 4, dtype=np.uint16)
    png16(tmp_path / "grey.png", values)
    png16(tmp_path / "rgb.png", values[..., None].repeat(3, axis=2))
    for name in ("grey.png", "rgb.png"):
        assert read(tmp_path / name, channels, size=4)[0, :, 0].tolist() == [0, 1, 128, 255]
    Image.fromarray(values).save(tmp_path / "clear.png", transparency=257)
    assert read(tmp_path / "clear.png", channels, size=4)[0, :, 0].tolist() == [0, 255, 128, 255]


def test_images_are_turned_as_the_camera_says(tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    image.save(tmp_path / "image.png", exif=exif)
    assert np.array_equal(read(tmp_path / "image.png"), np.rot90(COLOURS, -1))


def test_the_middle_is_kept_and_resized_with_antialiasing(tmp_path: Path) -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert np.array_equal(read(tmp_path / "wide.png", size=4), np.full((4, 4, 3), 200))
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 254
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    inner = read(tmp_path / "stripes.png", channels=1, size=8)[:, 1:-1].astype(int)
    assert abs(inner - 127).max() <= 2  # the mean; without antialiasing, black or white


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    whole = io.BytesIO()
    Image.fromarray(COLOURS.repeat(8, 0).repeat(8, 1)).save(whole, "JPEG")
    broken = {
        "text.png": b"no image",
        "empty.png": b"",
        "cut.jpg": whole.getvalue()[: len(whole.getvalue()) // 2],
    }
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "float.tiff")
    for name, contents in broken.items():
        (tmp_path / name).write_bytes(contents)
    for name in [*broken, "float.tiff"]:
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as an image: .*Replace the file, or remove it"):
            read(tmp_path / name)


# Order and variation


def flipping(rows: int = 40) -> LabelledImages:
    images = torch.zeros(rows, 1, 2, 2, dtype=torch.uint8)
    images[..., 0] = torch.arange(rows, dtype=torch.uint8).reshape(-1, 1, 1)
    return LabelledImages(images, torch.arange(rows), flip=True, seed=5)


def collect(loader: ResumableLoader, epoch: int) -> tuple[list[int], list[bool]]:
    loader.shard.set_epoch(epoch)
    batches = list(loader)
    rows = torch.cat([batch["index"] for batch in batches])
    flips = torch.cat([batch["image"][:, 0, 0, 0] == -1 for batch in batches])
    return rows.tolist(), flips.tolist()


def test_workers_and_resuming_change_neither_order_nor_flips() -> None:
    data = flipping()

    def loader(workers: int, size: int = 4) -> ResumableLoader:
        return ResumableLoader(data, ShuffledShard(40, 0, 1, seed=5), size, workers)

    alone, two = loader(0), loader(2)
    before = torch.random.get_rng_state()
    epochs = [collect(alone, epoch) for epoch in range(3)]
    assert torch.equal(torch.random.get_rng_state(), before)  # a network's random numbers are its own
    assert [collect(two, epoch) for epoch in range(3)] == epochs
    assert epochs[0] != epochs[1]
    other = dict(zip(*collect(loader(0, size=8), 1), strict=True))
    assert other == dict(zip(*epochs[1], strict=True))  # a flip belongs to the sample, not to its place
    resumed = loader(2)
    resumed.load_state_dict({"epoch": 1, "batches": 6})
    assert collect(resumed, 1) == tuple(part[24:] for part in epochs[1])
    assert collect(resumed, 2) == epochs[2]


def test_half_of_the_images_are_mirrored_and_none_in_validation() -> None:
    data = flipping(200)
    flips = torch.tensor(
        [[bool(data[epoch, row]["image"][0, 0, 0] == -1) for row in range(1, 200)] for epoch in (0, 1)]
    )
    assert 80 < flips[0].sum() < 120
    assert 80 < (flips[0] != flips[1]).sum() < 120
    for row in range(200):
        assert torch.equal(data[row]["image"], from_uint8(data.images[row]))
    assert (data[7]["image"].dtype, data[7]["label"].dtype, data[7]["index"].dtype) == (
        torch.float32,
        torch.int64,
        torch.int64,
    )


# Folders


def test_folders_are_classes(tmp_path: Path) -> None:
    root = folder(tmp_path, {"b": 30, "a": 30})
    (root / "a" / "._000.png").write_bytes(b"what macOS leaves beside a file")
    (root / ".ipynb_checkpoints").mkdir()
    data = ImageFolderDataModule(str(root), image_size=8, val_every=10)
    assert (data.num_classes, data.image_shape) == (2, (3, 8, 8))
    data.setup()
    assert (len(data.train), len(data.val)) == (54, 6)
    found = [*(data.train[row] for row in range(54)), *(data.val[row] for row in range(6))]
    numbers = {int(to_uint8(each["image"])[0, 0, 0]): int(each["label"]) for each in found}
    assert numbers == {number: 1 if number < 30 else 0 for number in range(60)}  # b's files were written first
    other = ImageFolderDataModule(str(root), image_size=8, val_every=10, seed=1)
    other.setup()
    assert [other.val.name(row) for row in range(6)] == [data.val.name(row) for row in range(6)]


def test_train_and_val_folders_are_the_split(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/a": 3, "train/b": 4, "val/a": 2, "val/b": 1})
    data = ImageFolderDataModule(str(root), image_size=8)
    data.setup()
    assert [int(data.train[row]["label"]) for row in range(7)] == [0] * 3 + [1] * 4
    assert [int(data.val[row]["label"]) for row in range(3)] == [0, 0, 1]
    (root / "val" / "c").mkdir()
    with pytest.raises(ConfigError, match=r"same classes. In one alone: c\."):
        ImageFolderDataModule(str(root), image_size=8).setup()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([str(n) for n in range(12)], "folder '10' is class 2, .* number them from 0, all with as many digits: 00"),
        (["1", "2", "3"], "folder '1' is class 0"),
        ([f"{n:02d}" for n in range(12)], ""),
        (["2019", "2020"], ""),
        (["0", "1", "cat"], ""),
    ],
)
def test_folders_that_are_called_by_other_numbers_than_their_classes_are_said(
    tmp_path: Path, names: list[str], said: str
) -> None:
    """pytorch/vision#714: who asks for class 2 gets what is in folder 10."""
    data = ImageFolderDataModule(str(folder(tmp_path, dict.fromkeys(names, 2))), image_size=8, val_every=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data.setup()
    assert len(found) == bool(said)
    assert not said or re.search(said, str(found[0].message))
    labels = {Path(data.train.name(row)).parent.name: int(data.train[row]["label"]) for row in range(len(data.train))}
    assert labels == {name: sorted(names).index(name) for name in names}  # as torchvision has it


def test_pictures_of_other_kinds_are_said_to_be_left_out(tmp_path: Path) -> None:
    root = folder(tmp_path, {"some": 5})
    for name in ("a.heic", "b.HEIC", "c.gif", "d.txt", ".e.gif"):
        (root / "some" / name).touch()
    data = ImagesDataModule(str(root), image_size=8, val_every=5)
    with pytest.warns(UserWarning, match=rf"{root}: 1 .gif and 2 .heic files are left out, 5 images are there"):
        data.setup()
    assert (len(data.train), len(data.val)) == (4, 1)


def test_images_that_train_and_validate_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/a": 3, "train/b": 4})
    (root / "val").symlink_to(root / "train")
    with pytest.raises(ConfigError, match=rf"same folder, {root}/train. Write data.directory={root}/train, of which"):
        ImageFolderDataModule(str(root), image_size=8).setup()
    write_shards(tmp_path, [2, 2, 2])
    (tmp_path / "link.tar").symlink_to(tmp_path / "s-01.tar")
    first, second, link = (str(tmp_path / name) for name in ("s-00.tar", "s-01.tar", "link.tar"))
    with pytest.raises(ConfigError, match=r"s-01.tar would both train and validate. Leave it out of one of them"):
        WebDatasetDataModule([first, second], image_size=8, val_shards=link).setup()
    with pytest.raises(ConfigError, match=r"link.tar is there twice. Leave one out"):
        WebDatasetDataModule([first, second, link], image_size=8).setup()
    data = WebDatasetDataModule([first, second], image_size=8, val_shards=str(tmp_path / "s-02.tar"))
    data.setup()
    assert (len(data.train), len(data.val)) == (4, 2)


UNLIKE_A_SPLIT = {
    "train with another name": {"train/a": 2, "train/b": 2, "validation/a": 1, "validation/b": 1},
    "train and test": {"train/a": 2, "train/b": 2, "test/a": 1, "test/b": 1},
    "unlabelled test images": {"train/a": 2, "train/b": 2, "test": 3},
    "val alone": {"val/a": 2, "val/b": 2},
    "no name right": {"training/a": 2, "training/b": 2, "validation/a": 1, "validation/b": 1},
    "one level too high": {"photos/a": 2, "photos/b": 2},
}


@pytest.mark.parametrize("name", UNLIKE_A_SPLIT)
def test_parts_of_a_split_are_not_taken_for_classes(tmp_path: Path, name: str) -> None:
    """A network of two classes, "train" and "validation", would train as if nothing were wrong."""
    root = folder(tmp_path, UNLIKE_A_SPLIT[name])
    for use in (lambda data: data.setup(), lambda data: data.num_classes):
        with pytest.raises(
            ConfigError, match=r"look like parts of a split, which must be called train/ and val/\. Ren"
        ):
            use(ImageFolderDataModule(str(root), image_size=8))


def test_what_looks_like_a_split_and_is_none_still_trains(tmp_path: Path) -> None:
    """A lone train/ is the root; a class may be called train, have its images further below, or breeds in folders."""
    layouts: list[tuple[dict[str, int], int, int]] = [
        ({"train/a": 10, "train/b": 10, "train/c": 10}, 3, 30),
        ({"train": 10, "car": 20}, 2, 30),
        ({"a/images": 10, "b/images": 20}, 2, 30),
        ({"cats/siamese": 10, "cats/persian": 5, "dogs/collie": 10, "dogs/poodle": 5}, 2, 30),
    ]
    for i, (counts, classes, images) in enumerate(layouts):
        data = ImageFolderDataModule(str(folder(tmp_path / str(i), counts)), image_size=8, val_every=10)
        data.setup()
        assert (data.num_classes, len(data.train), len(data.val)) == (classes, images * 9 // 10, images // 10)
        assert {int(data.train[row]["label"]) for row in range(len(data.train))} == {*range(classes)}


def test_images_without_classes(tmp_path: Path) -> None:
    root = folder(tmp_path, {"x": 10, "x/deeper": 10, "y": 20})
    data = ImagesDataModule(str(root), image_size=8, flip=True)
    data.setup()
    assert (data.num_classes, len(data.train), len(data.val)) == (0, 38, 2)
    assert {int(data.train[row]["label"]) for row in range(38)} == {0}  # what a network of no classes calls "no label"


REFUSED_FOLDERS = {
    "none": (ImagesDataModule, [r"data.directory=.*none: there is no directory", r"Write data.directory=PATH"]),
    "empty": (ImagesDataModule, [r"empty: no images \(jpg, jpeg, png", r"Write data.directory=PATH"]),
    "one": (ImagesDataModule, ["one image cannot both train and validate"]),
    "flat": (ImageFolderDataModule, ["no folders in it", "write data=images"]),
    "hollow": (ImageFolderDataModule, [r"class b: no images", "Add some, remove the folder, or write"]),
}


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_folders_that_hold_nothing_are_refused(tmp_path: Path, name: str) -> None:
    folder(tmp_path, {"one": 1, "flat": 3, "hollow/a": 2, "hollow/b": 0, "empty": 0})
    kind, messages = REFUSED_FOLDERS[name]
    for message in messages:
        with pytest.raises(ConfigError, match=message):
            kind(str(tmp_path / name), image_size=8).setup()
    with pytest.raises(ConfigError, match=r"data.directory is missing"):
        kind(None, image_size=8).setup()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"image_size": 0}, "image_size=0 must be at least 1"),
        ({"channels": 4}, r"channels=4 must be 1 \(grey\) or 3"),
        ({"val_every": 1}, "val_every=1 must be at least 2"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_arguments_are_checked_at_construction(argument: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImagesDataModule("x", **{"image_size": 8, **argument})


# torchvision's sets


def fake_mnist(directory: Path) -> None:
    """300 and 40 images in MNIST's format; pixel (0, 0) is the row's number."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, rows in (("train", 300), ("t10k", 40)):
        images = np.zeros((rows, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(rows)
        images[:, 27, 27] = 255
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, rows, 28, 28) + images.tobytes())
        labels = (np.arange(rows) % 10).astype(np.uint8)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, rows) + labels.tobytes())


def test_mnist_validates_on_its_test_set(tmp_path: Path) -> None:
    fake_mnist(tmp_path)
    data = MNISTDataModule(str(tmp_path))
    data.setup()
    assert (len(data.train), len(data.val)) == (300, 40)
    each = data.train[123]
    assert (each["image"].shape, int(each["label"])) == (data.image_shape, 3)
    assert to_uint8(each["image"])[0, 0, 0] == 123
    assert each["image"][0, 27, 27] == 1
    assert each["image"][0, 5, 5] == -1
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"MNIST is not in .*, or not whole \("):
        MNISTDataModule(str(tmp_path)).setup()


def test_cifar10_keeps_its_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / CIFAR10.base_folder
    base.mkdir()
    pixels = np.zeros((20, 3, 32, 32), np.uint8)
    pixels[:, 0], pixels[:, 1] = 255, np.arange(20).reshape(20, 1, 1)
    batch = {"data": pixels.reshape(20, -1), "labels": [i % 10 for i in range(20)]}
    (base / "batch").write_bytes(pickle.dumps(batch))
    (base / "meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "train_list", [["batch", None]])
    monkeypatch.setattr(CIFAR10, "test_list", [["batch", None]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "meta", "key": "label_names", "md5": None})
    data = CIFAR10DataModule(str(tmp_path), flip=True)
    data.setup()
    each = data.val[12]
    assert (each["image"].shape, int(each["label"])) == (data.image_shape, 2)
    assert to_uint8(each["image"])[:, 3, 4].tolist() == [255, 12, 0]
    assert (data.train.flip, data.val.flip) == (True, False)


@pytest.fixture
def served() -> Iterator[Callable[[Path], str]]:
    """Serve a directory over HTTP on this machine; gives the address."""
    servers = []

    def serve(directory: Path) -> str:
        handler = partial(SimpleHTTPRequestHandler, directory=directory)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_nothing_is_downloaded_unasked_nor_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Callable[[Path], str]
) -> None:
    for variable in ("LOCAL_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    mirror = tmp_path / "mirror"
    fake_mnist(mirror)
    resources = []
    for path in sorted((mirror / "MNIST" / "raw").iterdir()):
        archive = path.with_suffix(".gz")
        archive.write_bytes(gzip.compress(path.read_bytes()))
        resources.append((archive.name, None))
    fetched: list[str] = []
    download = MNIST.download
    monkeypatch.setattr(MNIST, "download", lambda self: (fetched.append(self.root), download(self)))
    monkeypatch.setattr(MNIST, "mirrors", [served(mirror / "MNIST" / "raw")])
    monkeypatch.setattr(MNIST, "resources", resources)
    target = tmp_path / "data"
    with pytest.raises(ConfigError, match=rf"MNIST is not in {target}, or not whole. Write data.download=true"):
        MNISTDataModule(str(target)).setup()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=r"one of several processes \(LOCAL_RANK is set\)"):
        MNISTDataModule(str(target), download=True).setup()
    assert not fetched
    assert not target.exists()
    monkeypatch.delenv("LOCAL_RANK")
    data = MNISTDataModule(str(target), download=True)
    data.setup()
    assert len(data.train) == 300
    again = MNISTDataModule(str(target), download=True)
    monkeypatch.setenv("LOCAL_RANK", "0")  # what is there needs no download
    again.setup()
    assert fetched == [str(target)]


# Tar shards


def write_shards(root: Path, counts: list[int], **extra: Any) -> str:
    """Shards of PNG files, their labels and a text that nobody asked for; the red value numbers the images."""
    number = 0
    for i, count in enumerate(counts):
        with webdataset.TarWriter(str(root / f"s-{i:02d}.tar")) as writer:
            for _ in range(count):
                contents = io.BytesIO()
                Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(contents, "PNG")
                entry = {"png": contents.getvalue(), "cls": number % 7, "json": {"n": number}} | extra
                writer.write({"__key__": f"sub/{number:05d}", **entry})
                number += 1
    return f"{root}/s-{{00..{len(counts) - 1:02d}}}.tar"


def test_shards_are_read_sample_by_sample(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [5, 1, 14])
    data = WebDatasetDataModule(shards, image_size=8, num_classes=7, val_every=10)
    data.setup()
    assert (len(data.train), len(data.val)) == (18, 2)
    found = [*(data.train[row] for row in range(18)), *(data.val[row] for row in range(2))]
    numbers = {int(to_uint8(each["image"])[0, 0, 0]): int(each["label"]) for each in found}
    assert numbers == {number: number % 7 for number in range(20)}
    split = WebDatasetDataModule(f"{tmp_path}/s-0[01].tar", 8, 7, val_shards=str(tmp_path / "s-02.tar"))
    split.setup()
    assert (len(split.train), len(split.val)) == (6, 14)
    assert {int(each["label"]) for each in WebDatasetLabels(shards)} == {0}


def WebDatasetLabels(shards: str) -> list[dict[str, torch.Tensor]]:
    """Samples of data without classes."""
    data = WebDatasetDataModule(shards, image_size=8)
    data.setup()
    return [data.train[row] for row in range(len(data.train))]


@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_keep_ranks_in_step(tmp_path: Path, workers: int) -> None:
    """T87's kind: 1, 2 and 18 samples in three shards, two ranks: as many batches on both, no sample twice."""
    data = WebDatasetDataModule(write_shards(tmp_path, [1, 2, 18]), image_size=8, num_classes=7)
    data.setup()
    assert len(data.train) == 19
    seen: list[list[int]] = []
    for rank in range(2):
        loader = ResumableLoader(data.train, ShuffledShard(19, rank, 2, seed=1, per_step=2), 2, workers)
        seen.append([int(red) for batch in loader for red in to_uint8(batch["image"])[:, 0, 0, 0]])
    assert [len(each) for each in seen] == [8, 8]
    assert len({*seen[0], *seen[1]}) == 16


def bad_shards(root: Path) -> dict[str, str]:
    """Shards of which each has one fault, and what is said about it."""
    good = (root / "s-00.tar").read_bytes()
    (root / "cut.tar").write_bytes(good[:1800])
    with tarfile.open(root / "header.tar", "w", format=tarfile.USTAR_FORMAT) as shard:
        for name in ("0.png", "1.png"):
            shard.addfile(tarfile.TarInfo(name), io.BytesIO())
    damaged = (root / "header.tar").read_bytes()
    (root / "header.tar").write_bytes(damaged.replace(b"1.png", b"X.png"))  # a checksum is wrong now
    (root / "packed.tar").write_bytes(gzip.compress(good))
    with tarfile.open(root / "empty.tar", "w"):
        pass
    return {
        "cut.tar": "cannot be read as an uncompressed tar file",
        "header.tar": "cannot be read as an uncompressed tar file: bad header at byte",
        "packed.tar": "cannot be read as an uncompressed tar file",
        "empty.tar": r"has no images \(jpg",
        "missing.tar": "there is no file",
        "s-*9.tar": "there is no file",
        "pipe:cat x.tar": "can only be streamed",
        "https://host/x.tar": "can only be streamed",
    }


def test_shards_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [4])
    for name, message in bad_shards(tmp_path).items():
        shards = name if ":" in name else str(tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            WebDatasetDataModule(shards, image_size=8).setup()
    with pytest.raises(ConfigError, match=r"data.shards is missing. Write data.shards=PATH"):
        WebDatasetDataModule(None, image_size=8).setup()
    with pytest.raises(ConfigError, match=r"00003: its .cls is '3', no label from 0 to 2"):
        WebDatasetDataModule(str(tmp_path / "s-00.tar"), image_size=8, num_classes=3).setup()
    with pytest.raises(ConfigError, match="sample sub/00000: it has two images"):
        WebDatasetDataModule(write_shards(tmp_path, [2], jpg=b"x"), image_size=8).setup()
    data = WebDatasetDataModule(write_shards(tmp_path, [2], png=b"no image"), image_size=8)
    data.setup()
    with pytest.raises(ConfigError, match=r"s-00.tar, the image at byte \d+, cannot be read as an image"):
        data.train[0]


def test_the_package_for_shards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[webdataset\]'"):
        WebDatasetDataModule("x.tar", image_size=8).setup()


# Synthetic images


def test_synthetic_images_cost_no_disk_and_have_every_label() -> None:
    data = SyntheticDataModule(image_size=4, channels=4, num_classes=3, length=100)
    data.setup()
    first = data.train[0]["image"]
    assert first.shape == (4, 4, 4)
    assert first.abs().max() <= 1
    assert {int(data.train[row]["label"]) for row in range(100)} == {0, 1, 2}
    assert data.to_images(torch.zeros(2, 4, 4, 4)).shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        SyntheticDataModule(length=0)


# Command line

PHOTOS = ["data=images", "data.image_size=8", "model.in_channels=3", "model.num_classes=0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("photos"), {"some": 60})


def test_resuming_with_workers_and_flips_is_exact(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """57 images in steps of 8: 14 steps are two epochs; stopped after 10, in the middle of the second."""
    common = [*TINY, *PHOTOS, f"data.directory={photos}", "data.batch_size=8", "data.num_workers=2"]
    common += ["trainer.val_check_interval=5", "callbacks.samples.per_class=1", "sampler.steps=4", "precision=fp32"]
    for name, steps, more in (("whole", 14, []), ("half", 10, []), ("rest", 14, [f"ckpt_path={tmp_path}/half"])):
        more = [f"{each}/checkpoints/last.ckpt" for each in more]
        run = f"hydra.run.dir={tmp_path}/{name}"
        assert cli(monkeypatch, *common, f"trainer.max_steps={steps}", run, *more) == 0
    whole, rest = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "rest")
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], rest[entry], entry)
    # Without classes there is one column of samples, also from the checkpoint.
    with Image.open(tmp_path / "whole" / "samples" / "step000014.png") as grid:
        assert grid.size == (32, 32)
    path = tmp_path / "drawn.png"
    arguments = [f"ckpt_path={tmp_path}/whole/checkpoints/last.ckpt", "per_class=2", "sampler.steps=2"]
    assert cli(monkeypatch, *arguments, f"output={path}", program=sample) == 0
    assert Image.open(path).size == (32, 32 * 2 + 2)
    # Neither drawing nor exporting looks for the images.
    capfd.readouterr()
    monkeypatch.chdir(tmp_path)
    photos.rename(tmp_path / "elsewhere")
    try:
        assert cli(monkeypatch, arguments[0], f"output={tmp_path}/again.png", *arguments[1:], program=sample) == 0
        assert cli(monkeypatch, arguments[0], f"output={tmp_path}/exported", program=export) == 0
        for program, argument in ((sample, "classes=[0]"), (export, "label=0")):
            assert cli(monkeypatch, arguments[0], argument, program=program) == 2
            assert f"error: {argument}: the network was trained without classes" in capfd.readouterr().err
    finally:
        (tmp_path / "elsewhere").rename(photos)
    assert (tmp_path / "again.png").read_bytes() == path.read_bytes()
    quick = partial(train_classifier, steps=5)
    monkeypatch.setattr(evaluate, "train_classifier", quick)
    # Evaluated in features of a network that knows no classes either.
    assert cli(monkeypatch, arguments[0], "samples=6", "sampler.steps=2", program=evaluate) == 0
    shown = capfd.readouterr().out
    (measured,) = (tmp_path / "whole" / "checkpoints").glob("last_averaged_heun2_*.json")
    result = json.loads(measured.read_text())
    assert result["class_accuracy"] is result["classifier_accuracy"] is None
    assert result["frechet_distance"] > 0
    assert "quarter turns of training images" in result["frechet_network"]
    assert "no classes" in shown
    config = json.loads((tmp_path / "exported" / "unet" / "config.json").read_text())
    assert (config["sample_size"], config["in_channels"]) == ([8, 8], 3)
    assert json.loads((tmp_path / "exported" / "recipe.json").read_text())["null_label"] == 0


@pytest.mark.parametrize("limit", ["4", "0.37"])
def test_a_run_that_ended_with_a_limited_epoch_is_extended_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """4 of an epoch's 11 batches, as a number or a share: the loader has more, of which one too many was taken."""
    steps = 4
    common = [*SHORT, f"+trainer.limit_train_batches={limit}", "~callbacks.samples"]
    common += ["logger=none", "precision=bf16", "trainer.limit_val_batches=1"]
    runs = {"whole": (2 * steps, []), "half": (steps, []), "rest": (2 * steps, [f"ckpt_path={tmp_path}/half"])}
    for name, (end, more) in runs.items():
        more = [f"{each}/checkpoints/last.ckpt" for each in more]
        run = f"hydra.run.dir={tmp_path}/{name}"
        assert cli(monkeypatch, *common, f"trainer.max_steps={end}", run, *more) == 0
    whole, rest = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "rest")
    assert whole["global_step"] == rest["global_step"] == 2 * steps
    for entry in ("state_dict", "averaged_state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision"):
        assert_same(whole[entry], rest[entry], entry)


RELATIVE = {
    "images": ["data=images", "data.directory=here/photos", *PHOTOS[1:]],
    "image_folder": ["data=image_folder", "data.directory=here/photos", *PHOTOS[1:3], "model.num_classes=1"],
    "mnist": ["experiment=mnist_unet", "data.directory=here/mnist"],
    "webdataset": ["data=webdataset", "data.shards='here/s-{00..01}.tar'", "data.val_shards='here/s-*2.tar'"],
    "latents": ["experiment=digits_latent", "data.directory=here/latents", "data.autoencoder=here/autoencoder"],
}


@pytest.mark.parametrize("kind", RELATIVE)
def test_relative_paths_begin_where_the_command_was_typed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where Hydra changes into the run's directory."""
    here = tmp_path / "here"
    folder(here, {"photos/some": 40})
    fake_mnist(here / "mnist")
    write_shards(here, [20, 20, 20])
    Autoencoder(in_channels=1, latent_channels=2).save(here / "autoencoder")
    monkeypatch.chdir(tmp_path)
    if kind == "latents":
        where = ["autoencoder=here/autoencoder", "output=here/latents"]
        assert cli(monkeypatch, "data=digits", *where, program=encode) == 0
    common = ["trainer.accelerator=cpu", "trainer.devices=1", "data.batch_size=16", "data.num_workers=0"]
    small = ["model.in_channels=2"] if kind == "latents" else ["model=unet_tiny"]
    small += PHOTOS[1:] if kind == "webdataset" else []
    assert cli(monkeypatch, *small, *RELATIVE[kind], *common, "dry_run=true", "hydra.job.chdir=true") == 0
    assert "loss of one batch" in capfd.readouterr().out


def test_images_that_have_come_since_the_checkpoint_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They put all of them in another order."""
    root = folder(tmp_path / "photos", {"some": 21})
    common = [*TINY, *PHOTOS, f"data.directory={root}", "data.batch_size=8", "data.num_workers=0", "precision=fp32"]
    common += ["~callbacks.samples", "resume=auto", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *common, "trainer.max_steps=1") == 0
    folder(root, {"some": 41})
    assert cli(monkeypatch, *common, "trainer.max_steps=2") == 0
    assert "training images 19 -> 38, validation images 2 -> 3" in capfd.readouterr().out


def test_a_corrupt_image_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Read by a worker process."""
    root = folder(tmp_path / "photos", {"some": 30})
    (root / "some" / "013.png").write_bytes((root / "some" / "013.png").read_bytes()[:50])
    arguments = [f"data.directory={root}", "trainer.max_steps=2", "data.batch_size=28", "data.num_workers=2"]
    assert cli(monkeypatch, *TINY, *PHOTOS, *arguments, f"hydra.run.dir={tmp_path}/run") == 2
    message = capfd.readouterr().err
    message = message[message.index("error: ") :]
    assert message.startswith(f"error: {root}/some/013.png cannot be read as an image: ")
    assert "Traceback" not in message


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_signal_to_the_whole_group_leaves_workers_to_the_run(photos: Path, tmp_path: Path, name: str) -> None:
    """What a scheduler and Ctrl-C do; a worker that died of it would take the last step with it."""
    command = ["recipes.train", *TINY, *PHOTOS, f"data.directory={photos}", "data.batch_size=8", "precision=fp32"]
    command += ["data.num_workers=2", "trainer.max_steps=100000", "trainer.val_check_interval=20", "~callbacks.samples"]
    run = tmp_path / "run"
    process = forked.Forked("-m", *command, f"hydra.run.dir={run}", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step*.ckpt")):
            assert process.poll() is None, process.output[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.Signals[name])
        assert process.wait(timeout=60) == 128 + signal.Signals[name]
    finally:
        process.kill()
    text = process.output
    assert "interrupted      after step" in text
    assert "DataLoader worker" not in text
    assert checkpoint(run)["global_step"] > 0


REFUSALS = {
    "experiment=mnist_unet": ["data.directory=data: MNIST is not in", "data.download=true", "data.directory=PATH"],
    "experiment=fashion_mnist_unet": ["FashionMNIST is not in", "data.download=true"],
    "experiment=cifar10_unet": ["CIFAR10 is not in", "data.download=true"],
    "experiment=imagenet64_adm": ["data.directory=data/imagenet: there is no directory", "train/ and val/"],
    "experiment=imagenet256_dit_xl": ["python -m recipes.encode", "output=data/imagenet256_latents"],
    "experiment=imagenet256_dit_b": ["python -m recipes.encode", "output=data/imagenet256_latents"],
    "experiment=digits_latent": ["python -m recipes.encode", "output=outputs/digits_latents"],
    "data=images": ["data.directory is missing. Write data.directory=PATH"],
    "data=image_folder": ["data.directory is missing. Write data.directory=PATH"],
    "data=webdataset": ["data.shards is missing. Write data.shards=PATH"],
    "data=latents": ["data.directory is missing. Write data.directory=PATH"],
    "data=mnits": ["there is no data 'mnits'", "Did you mean 'mnist'"],
    "data=synthetic data.image_size=17 data.num_classes=4 data.channels=1": [
        "model has 10 classes, the data have 4",
        "model halves images 1 times, and 17 pixels cannot be. Choose images of 16 or 18 pixels",
    ],
    "data=synthetic": ["model has 10 classes", "it cannot take images of shape [3, 64, 64]"],
}


@pytest.mark.parametrize("override", REFUSALS)
def test_missing_data_name_their_remedy(
    override: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, *TINY[1:], "hydra.run.dir=run", *override.split()) == 2
    message = capfd.readouterr().err
    message = message[message.index("error: ") :]
    wanted = REFUSALS[override][-1:] if override == "data=synthetic" else REFUSALS[override]
    assert all(text in message for text in wanted), message
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("events.out.*")]


SMALL = ["data.image_size=8", "model.in_channels=3"]
SEVEN = ["data.num_classes=7", "model.num_classes=7"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=mnist_unet", "data.directory={mnist}"],
        ["data=image_folder", "data.directory={folders}", *SMALL, "model.num_classes=2"],
        pytest.param(
            ["data=webdataset", "data.shards={shards}", *SMALL, *SEVEN, "trainer=cpu_ranks"], marks=pytest.mark.slow
        ),
        ["data=synthetic", *SMALL],
    ],
    ids=["mnist", "image_folder", "webdataset_on_two_ranks", "synthetic"],
)
def test_recipes_train_on_every_kind(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mnist(tmp_path / "mnist")
    folder(tmp_path / "folders", {"a": 40, "b": 40})
    (tmp_path / "shards").mkdir()
    shards = "'" + write_shards(tmp_path / "shards", [1, 2, 60]) + "'"
    places = {"mnist": tmp_path / "mnist", "folders": tmp_path / "folders", "shards": shards}
    given = [argument.format(**places) for argument in arguments]
    short = ["model=unet_tiny", "precision=fp32", "trainer.accelerator=cpu", "sampler.steps=2"]
    short += ["callbacks.samples.per_class=1"]
    sizes = ["data.batch_size=16", "trainer.max_steps=5", "trainer.val_check_interval=3"]
    if "trainer=cpu_ranks" in given:  # the second process repeats this one's command
        command = ["recipes.train", *short, *given, *sizes, f"hydra.run.dir={tmp_path}/run"]
        done = forked.run("-m", *command, cwd=tmp_path)
        assert done.returncode == 0, done.output[-3000:]
    else:
        assert cli(monkeypatch, *short, *given, *sizes, f"hydra.run.dir={tmp_path}/run") == 0
    assert (tmp_path / "run" / "samples" / "step000005.png").is_file()
    saved = checkpoint(tmp_path / "run")
    assert saved["global_step"] == 5


def test_digits_are_as_they_were() -> None:
    """Labels and pixels in the order in which earlier checkpoints were validated."""
    data = DigitsDataModule()
    data.setup()
    assert [int(data.val[row]["label"]) for row in range(5)] == [0, 5, 0, 5, 0]


def test_paths_of_a_million_images_are_one_array() -> None:
    """Workers copy the memory of objects whose references they count: of arrays they do not."""
    files = ImageFiles(["a/ä.png", "b.png"], [0, 1], channels=3, image_size=8)
    assert files.paths.dtype.kind == "S"
    assert files.name(0) == "a/ä.png"
