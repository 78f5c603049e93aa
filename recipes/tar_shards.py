"""Images in WebDataset's shards: tar files in which files of one name belong to one sample.

The shards are indexed once, by their headers, and samples are then read by offset. So they are shared, shuffled and
resumed like any other data set: every rank has the same number of batches whatever each shard holds, no sample comes
twice, and no buffer of shuffled samples has to be saved. That needs local files: what can only be streamed (pipes,
URLs, compressed archives) is refused.
"""

from __future__ import annotations

import glob
import os
import tarfile
from pathlib import Path

import numpy as np
from hydra.utils import to_absolute_path
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from recipes.config import ConfigError
from recipes.data import DataModule, Images, held_out
from recipes.image_files import check_pixels, read_image, workers

REMEDY = "Write the shard again, or remove it."


def find_shards(shards: str | list[str] | None, key: str = "shards") -> list[str]:
    """Absolute paths of existing files, in order.

    Args:
        shards: A path with `{000..123}`, `*` or `::` between several; or a list of these.
        key: For the error, the argument that this is.

    Raises:
        ConfigError: If there are none, one is missing or is no local path; or without the package `webdataset`, which
            defines the notation.
    """
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise ConfigError(
            "data=webdataset needs the package webdataset: pip install 'lightning_mixprec[webdataset]', or from a "
            "checkout pip install -e '.[webdataset]'."
        ) from error
    remedy = f"Write data.{key}=PATH of tar files, such as \"data.{key}='shards/train-{{0000..0127}}.tar'\"."
    if not shards:
        raise ConfigError(f"data.{key} is missing. {remedy}")
    patterns = [name for each in ([shards] if isinstance(shards, str) else shards) for name in expand_urls(each)]
    found: list[str] = []
    for pattern in patterns:
        if pattern.startswith("pipe:") or "://" in pattern:
            raise ConfigError(
                f"data.{key}={shards}: {pattern} can only be streamed, and what is streamed can neither be resumed in "
                f"the middle of an epoch nor shared evenly. Copy the shards to a disk. {remedy}"
            )
        path = to_absolute_path(pattern)
        paths = sorted(glob.glob(path)) if glob.has_magic(pattern) else [path]
        if not paths or not Path(paths[0]).is_file():
            raise ConfigError(f"data.{key}={shards}: there is no file {path}. {remedy}")
        found += paths
    real = [os.path.realpath(path) for path in found]
    if twice := next((path for n, path in enumerate(found) if real[n] in real[:n]), None):
        raise ConfigError(f"data.{key}={shards}: {twice} is there twice. Leave one out.")
    return found


def index_shard(path: str, num_classes: int) -> list[tuple[int, int, int]]:
    """Where the images of a shard are, from its headers.

    Args:
        path: An uncompressed tar file.
        num_classes: If not 0, every sample needs a `.cls` file, a number below it as text.

    Returns:
        Offset, length in bytes and label of each sample.

    Raises:
        ConfigError: With the shard and the sample that cannot be used.
    """
    from webdataset.tariterators import base_plus_ext

    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                sample, extension = base_plus_ext(member.name)
                if not member.isfile() or sample is None:
                    continue
                if f".{extension.lower()}" in IMG_EXTENSIONS:
                    if sample in images:
                        raise ConfigError(f"{path}, sample {sample}: it has two images. {REMEDY}")
                    images[sample] = (member.offset_data, member.size)
                elif extension == "cls" and num_classes:
                    contents = shard.extractfile(member)
                    labels[sample] = _label((contents.read() if contents else b""), num_classes, f"{path}, {sample}")
            assert shard.fileobj is not None
            shard.fileobj.seek(shard.offset)
            if shard.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a bad header for the end
                raise tarfile.ReadError(f"bad header at byte {shard.offset}")
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as an uncompressed tar file: {error}. {REMEDY}") from error
    if not images:
        raise ConfigError(f"{path} has no images ({', '.join(e[1:] for e in IMG_EXTENSIONS)}) in it. {REMEDY}")
    if num_classes and (unlabelled := [sample for sample in images if sample not in labels]):
        raise ConfigError(
            f"{path}, sample {unlabelled[0]}: no .cls beside its image. {REMEDY} Where images have no labels, write "
            "data.num_classes=0."
        )
    return [(*where, labels.get(sample, 0)) for sample, where in images.items()]


def _label(text: bytes, num_classes: int, sample: str) -> int:
    try:
        label = int(text)
    except ValueError:
        label = -1
    if not 0 <= label < num_classes:
        raise ConfigError(
            f"{sample}: its .cls is {text[:20].decode(errors='replace')!r}, no label from 0 to {num_classes - 1}. "
            "Write data.num_classes=NUMBER with the number of classes, or the shard again."
        )
    return label


class TarImages(Images):
    """Samples of a list of shards, one after the other.

    Args:
        shards: Their paths.
        rows: `(samples, 4)`: number of the shard, offset, length, label.
        channels: 1 or 3.
        image_size: Height and width.
        flip: See `recipes.data.Images`.
        seed: See `recipes.data.Images`.
    """

    def __init__(
        self, shards: list[str], rows: np.ndarray, channels: int, image_size: int, flip: bool = False, seed: int = 0
    ) -> None:
        super().__init__(flip, seed)
        self.shards = shards
        self.rows = rows
        self.channels = channels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The shard, and the byte at which the image starts."""
        shard, offset, _, _ = self.rows[row]
        return f"{self.shards[shard]}, the image at byte {offset},"

    def read(self, row: int) -> tuple[Tensor, int]:
        """See `recipes.data.Images.read`."""
        shard, offset, length, label = self.rows[row].tolist()
        with open(self.shards[shard], "rb") as file:
            contents = os.pread(file.fileno(), length, offset)
        return read_image(contents, self.channels, self.image_size, self.name(row)), label


class WebDatasetDataModule(DataModule):
    """Images in local tar shards, with the label of each as text in a `.cls` file beside it.

    Args:
        shards: See `find_shards`.
        image_size: Height and width to which images are resized and cropped.
        num_classes: Labels; 0: the `.cls` files are not read.
        val_shards: Those that validate. Without them, every n-th sample of `shards` does.
        val_every: This n.
        channels: 1 (grey) or 3 (RGB).
        flip: Mirror left and right at random, in training.
        batch_size: See `recipes.data.DataModule`.
        seed: See `recipes.data.DataModule`.
        num_workers: See `recipes.data.DataModule`. Default: up to 4, but no more than there are CPUs.

    Example:
        >>> WebDatasetDataModule("imagenet-train-{0000..0127}.tar", image_size=64, num_classes=1000).image_shape
        (3, 64, 64)
    """

    image_shape = (0, 0, 0)  # of each instance
    num_classes = 0
    train: TarImages
    val: TarImages

    def __init__(
        self,
        shards: str | list[str] | None,
        image_size: int,
        num_classes: int = 0,
        val_shards: str | list[str] | None = None,
        val_every: int = 20,
        channels: int = 3,
        flip: bool = False,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, workers(num_workers))
        check_pixels(image_size, channels)
        held_out(0, val_every)
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes} must be at least 0.")
        self.shards = shards
        self.val_shards = val_shards
        self.val_every = val_every
        self.image_shape = (channels, image_size, image_size)
        self.num_classes = num_classes
        self.flip = flip

    def load(self) -> tuple[TarImages, TarImages]:
        """See `recipes.data.DataModule.load`."""
        names, rows = self._index(find_shards(self.shards))
        if self.val_shards:
            val_names, val_rows = self._index(find_shards(self.val_shards, "val_shards"))
            if both := {os.path.realpath(name) for name in names} & {os.path.realpath(name) for name in val_names}:
                raise ConfigError(
                    f"data.val_shards={self.val_shards}: {min(both)} would both train and validate"
                    f"{f', and {len(both) - 1} more' if len(both) > 1 else ''}. Leave it out of one of them."
                )
            return self._images(names, rows, self.flip), self._images(val_names, val_rows)
        if len(rows) < 2:
            raise ConfigError(f"data.shards={self.shards}: one image cannot both train and validate. Add shards.")
        trains, validates = held_out(len(rows), self.val_every)
        return self._images(names, rows[trains.numpy()], self.flip), self._images(names, rows[validates.numpy()])

    def _index(self, shards: list[str]) -> tuple[list[str], np.ndarray]:
        rows = [(i, *row) for i, shard in enumerate(shards) for row in index_shard(shard, self.num_classes)]
        return shards, np.array(rows, dtype=np.int64)

    def _images(self, shards: list[str], rows: np.ndarray, flip: bool = False) -> TarImages:
        channels, image_size, _ = self.image_shape
        return TarImages(shards, rows, channels, image_size, flip, self.seed)
