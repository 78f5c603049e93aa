"""Images from files: a directory per class, or a folder of images without classes.

Every file becomes `channels` channels of 8 bits as a viewer would show them: rotated as the camera noted, transparency
on white, 16 bits scaled to 8, palettes resolved; resized and cropped to a square. A file that cannot be read ends the
run with its name. It leaves out archives (`recipes.tar_shards`) and any augmentation but flips.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hydra.utils import to_absolute_path
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from recipes.config import ConfigError
from recipes.data import DataModule, Images, held_out
from recipes.loading import available_cpus

UNREAD = (".avif", ".exr", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".svg", ".tga")
"""How the names of pictures end that are none to torchvision."""

MODES = {1: "L", 3: "RGB"}
"""Pillow's mode for a number of channels."""


def read_image(source: str | bytes, channels: int, image_size: int, name: str) -> Tensor:
    """Decode, convert, resize and crop one image.

    The shorter side becomes `image_size`, with antialiasing, and what is longer is cut off on both sides. An image that
    has this size is not touched.

    Args:
        source: A path, or the contents of a file.
        channels: 1 or 3.
        image_size: Height and width of the result.
        name: For the error.

    Returns:
        uint8, `(channels, image_size, image_size)`.

    Raises:
        ConfigError: If it is no image, or broken, or has pixels that are no colours.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            image = _eight_bits(ImageOps.exif_transpose(opened))
            if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert(MODES[channels])
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BICUBIC)
            pixels = np.array(image, dtype=np.uint8)
    except Exception as error:  # Pillow's decoders raise whatever they like
        raise ConfigError(f"{name} cannot be read as an image: {error}. Replace the file, or remove it.") from error
    return torch.from_numpy(pixels).reshape(image_size, image_size, channels).permute(2, 0, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 bits as 8; Pillow's own conversion would cut them off at 255."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of which nobody knows what is white")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("its pixels have 32 bits, of which nobody knows what is white")
    grey = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 -> 255, rounded
    if (clear := image.info.get("transparency")) is not None:  # one of the 65536 values, on white
        grey[values == clear] = 255
    return Image.fromarray(grey)


class ImageFiles(Images):
    """Images that are read when they are asked for.

    Args:
        paths: Of the files.
        labels: One for each.
        channels: 1 or 3.
        image_size: Height and width.
        flip: See `recipes.data.Images`.
        seed: See `recipes.data.Images`.
    """

    def __init__(
        self, paths: list[str], labels: list[int], channels: int, image_size: int, flip: bool = False, seed: int = 0
    ) -> None:
        super().__init__(flip, seed)
        # Arrays, since workers would copy a list of objects page by page as they count references to them.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.labels = np.array(labels)
        self.channels = channels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, row: int) -> str:
        """The path."""
        return os.fsdecode(self.paths[row])

    def read(self, row: int) -> tuple[Tensor, int]:
        """See `recipes.data.Images.read`."""
        path = self.name(row)
        return read_image(path, self.channels, self.image_size, path), int(self.labels[row])


def workers(num_workers: int | None) -> int:
    """As many as were asked for; by default up to 4, but no more than there are CPUs for this process."""
    return min(4, available_cpus()) if num_workers is None else num_workers


def check_pixels(image_size: int, channels: int) -> None:
    """Refuse what is no size of an image, at construction."""
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1.")
    if channels not in MODES:
        raise ValueError(f"channels={channels} must be 1 (grey) or 3 (RGB).")


class ImagesDataModule(DataModule):
    """A folder of images without classes, with all folders below it.

    Hidden files are left out. Labels are 0, which is the network's "no label": choose `model.num_classes=0`.

    Args:
        directory: The folder.
        image_size: Height and width to which images are resized and cropped.
        channels: 1 (grey) or 3 (RGB).
        flip: Mirror left and right at random, in training.
        val_every: Every n-th file, by name, validates; the others train.
        batch_size: See `recipes.data.DataModule`.
        seed: See `recipes.data.DataModule`.
        num_workers: See `recipes.data.DataModule`. Default: up to 4, but no more than there are CPUs.

    Example:
        >>> ImagesDataModule("photos", image_size=64).image_shape
        (3, 64, 64)
    """

    image_shape = (0, 0, 0)  # of each instance
    num_classes = 0
    train: ImageFiles
    val: ImageFiles
    expected = "a folder of images"

    def __init__(
        self,
        directory: str | None,
        image_size: int,
        channels: int = 3,
        flip: bool = False,
        val_every: int = 20,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, workers(num_workers))
        check_pixels(image_size, channels)
        held_out(0, val_every)
        self.directory = directory
        self.image_shape = (channels, image_size, image_size)
        self.flip = flip
        self.val_every = val_every

    def load(self) -> tuple[ImageFiles, ImageFiles]:
        """See `recipes.data.DataModule.load`."""
        root = self.root()
        return self._split(self._find(root, {"": 0}), root)

    def root(self) -> Path:
        """The directory, absolute, which must exist."""
        if self.directory is None:
            raise ConfigError(f"data.directory is missing. Write data.directory=PATH, {self.expected}.")
        root = Path(to_absolute_path(self.directory))  # where the command was typed, wherever the run is
        if not root.is_dir():
            raise ConfigError(
                f"data.directory={self.directory}: there is no directory {root}. Write data.directory=PATH, "
                f"{self.expected}."
            )
        return root

    def _find(self, root: Path, class_to_idx: dict[str, int]) -> list[tuple[str, int]]:
        """Path and label of every image below the folders of the classes, by name."""
        unread: Counter[str] = Counter()

        def is_image(path: str) -> bool:
            if not Path(path).name.startswith("."):
                unread.update({Path(path).suffix.lower()} & {*UNREAD})
            return _is_image(path)

        try:
            found = sorted(make_dataset(root, class_to_idx, is_valid_file=is_image), key=lambda found: found[0])
            if unread:
                kinds = " and ".join(f"{count} {kind}" for kind, count in sorted(unread.items()))
                rank_zero_warn(
                    f"{root}: {kinds} files are left out, {len(found)} images are there. Read are "
                    f"{', '.join(e[1:] for e in IMG_EXTENSIONS)}: convert the others, or move them away."
                )
            return found
        except FileNotFoundError as error:  # a class without images
            empty = str(error).partition(" for the classes ")[2].partition(".")[0]
            where = f"{root}, class {empty}" if any(class_to_idx) else f"data.directory={root}"
            remedy = "Add some, remove the folder, or write" if any(class_to_idx) else "Write"
            raise ConfigError(
                f"{where}: no images ({', '.join(e[1:] for e in IMG_EXTENSIONS)}) in it. {remedy} data.directory=PATH, "
                f"{self.expected}."
            ) from error

    def _split(self, found: list[tuple[str, int]], root: Path) -> tuple[ImageFiles, ImageFiles]:
        if len(found) < 2:
            raise ConfigError(f"data.directory={root}: one image cannot both train and validate. Add images.")
        trains, validates = held_out(len(found), self.val_every)
        return self._files([found[row] for row in trains], self.flip), self._files([found[row] for row in validates])

    def _files(self, found: list[tuple[str, int]], flip: bool = False) -> ImageFiles:
        channels, image_size, _ = self.image_shape
        paths, labels = [path for path, _ in found], [label for _, label in found]
        return ImageFiles(paths, labels, channels, image_size, flip, self.seed)


class ImageFolderDataModule(ImagesDataModule):
    """A directory per class, numbered by name, as torchvision's `ImageFolder` has it.

    `train/` and `val/`, each with the same classes, are the split if they are there (ImageNet). `train/` as the only
    directory holds the classes, and every n-th image validates. Otherwise the classes are directories of `directory`
    itself, with the images in them or further below, and every n-th image validates. A split under other names is
    refused: its parts would be taken for the classes.

    Args:
        directory: See above.
        image_size: See `ImagesDataModule`.
        channels: See `ImagesDataModule`.
        flip: See `ImagesDataModule`.
        val_every: See `ImagesDataModule`; not used where there is a split.
        batch_size: See `recipes.data.DataModule`.
        seed: See `recipes.data.DataModule`.
        num_workers: See `recipes.data.DataModule`.

    Example:
        >>> ImageFolderDataModule("imagenet", image_size=64, flip=True).image_shape
        (3, 64, 64)
    """

    expected = "a folder with one folder of images per class; or with train/ and val/, and these in both"

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Directories of the training images."""
        return len(self._classes(self._training_root()))

    def load(self) -> tuple[ImageFiles, ImageFiles]:
        """See `recipes.data.DataModule.load`."""
        root = self._training_root()
        classes = self._classes(root)
        found = self._find(root, classes)
        val = self.root() / "val"
        _say_order(classes, root)
        if root == self.root() or not val.is_dir():
            return self._split(found, root)
        if val.samefile(root):
            raise ConfigError(
                f"data.directory={self.directory}: train/ and val/ are the same folder, {val.resolve()}. Write "
                f"data.directory={val.resolve()}, of which every {self.val_every}th image validates."
            )
        if self._classes(val) != classes:
            differ = sorted(self._classes(val).keys() ^ classes.keys())
            raise ConfigError(
                f"data.directory={self.directory}: train/ and val/ must have the same classes. In one alone: "
                f"{', '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}. Add the folders, or remove them."
            )
        return self._files(found, self.flip), self._files(self._find(val, classes))

    def _training_root(self) -> Path:
        """Where the classes are that are trained on.

        Raises:
            ConfigError: If the folders there are parts of a split, of which one is not called as it must be.
        """
        root = self.root()
        train, val = root / "train", root / "val"
        if train.is_dir() and val.is_dir():
            return train
        folders = [root / name for name in self._classes(root)]
        if folders == [train] and not _has_images(train):
            return train
        named = any(folder in (train, val) and not _has_images(folder) for folder in folders)
        if named or (not any(_has_images(folder) for folder in folders) and _same_folders(folders)):
            names = ", ".join(f"{folder.name}/" for folder in folders[:5]) + " ..." * (len(folders) > 5)
            raise ConfigError(
                f"data.directory={self.directory}: {names} hold folders of images, and look like parts of a split, "
                "which must be called train/ and val/. Rename the part that validates to val/ and the one that trains "
                f"to train/; or write data.directory={folders[0]} for one part alone, of which every "
                f"{self.val_every}th image validates."
            )
        return root

    def _classes(self, root: Path) -> dict[str, int]:
        try:
            names = [name for name in find_classes(root)[0] if not name.startswith(".")]
        except FileNotFoundError:
            names = []
        if not names:
            raise ConfigError(
                f"data.directory={root}: no folders in it. Write data.directory=PATH, {self.expected}. For images "
                "without classes write data=images."
            )
        return {name: label for label, name in enumerate(names)}


def _say_order(classes: dict[str, int], root: Path) -> None:
    """Say if folders are called by numbers that are not those of their classes: 10 comes before 2.

    Args:
        classes: Number of each class by its folder's name.
        root: Where they are.
    """
    numbers = {name: int(name) for name in classes if name.isdecimal()}
    if len(numbers) < len(classes) or max(numbers.values()) > len(classes):  # no labels, if numbers at all
        return
    other = next((name for name, number in numbers.items() if number != classes[name]), None)
    if other is not None:
        rank_zero_warn(
            f"{root}: classes are numbered in the order of their folders' names, as texts, and folder {other!r} is "
            f"class {classes[other]}, which is what recipes.sample is asked for. Where the names are meant to be "
            f"labels, number them from 0, all with as many digits: {0:0{len(str(len(classes) - 1))}}."
        )


def _same_folders(parents: list[Path]) -> bool:
    """Whether all have two or more folders of the same names: classes, then. One, as in CLASS/images/, is none."""
    names = [{child.name for child in parent.iterdir() if child.is_dir()} for parent in parents]
    return len(set.intersection(*names)) > 1


def _has_images(folder: Path) -> bool:
    """Directly in it."""
    with os.scandir(folder) as children:
        return any(_is_image(child.path) for child in children)


def _is_image(path: str) -> bool:
    """By its name; hidden files (macOS leaves `._name.jpg` beside `name.jpg`) are none."""
    name = os.path.basename(path)
    return not name.startswith(".") and name.lower().endswith(IMG_EXTENSIONS)
