"""Training on latents that `python -m recipes.encode` wrote: the format of the cache, and its data module.

A cache is a directory of safetensors files with the mean and standard deviation of each image's posterior, so that
every epoch draws other latents, and `manifest.json`, which is written last and says whose latents these are. A cache
without a manifest, of another autoencoder, or with a file missing or cut off is refused; latents that are not finite
are an error that names the file.
"""

from __future__ import annotations

import bisect
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import to_absolute_path
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from recipes.autoencoder import DTYPES, FrozenAutoencoder, fingerprint
from recipes.config import ConfigError
from recipes.data import DataModule
from recipes.image_files import workers
from recipes.loading import Batch, Key
from recipes.randomness import AUGMENTATION, POSTERIOR, keyed_generator

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Source:
    """Whose latents these are. Two encodings with equal sources write the same files.

    Attributes:
        autoencoder: Absolute path of its directory, where it was.
        fingerprint: See `recipes.autoencoder.fingerprint`.
        dtype: That the autoencoder computed in; means and deviations are stored in it.
        scaling_factor: Latents are `(z - shift_factor) * scaling_factor`.
        shift_factor: See above.
        image_shape: Of the images.
        latent_shape: Of one image's latents.
        num_classes: Of the images.
        views: 1: the images; 2: their mirror images beside them.
        data: Configuration of the images.
        names: Digest of the names of all images, in order.
    """

    autoencoder: str
    fingerprint: str
    dtype: str
    scaling_factor: float
    shift_factor: float
    image_shape: list[int]
    latent_shape: list[int]
    num_classes: int
    views: int
    data: dict[str, Any]
    names: str

    def differences(self, other: Source) -> list[str]:
        """What is not the same, without where the autoencoder is."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{key} {mine[key]} -> {theirs[key]}" for key in mine if key != "autoencoder" and mine[key] != theirs[key]
        ]


@dataclass(frozen=True)
class Shard:
    """One file of a split: its name, rows and size in bytes."""

    file: str
    rows: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """A complete cache: its source, and the files of the splits `train` and `val` in order."""

    source: Source
    splits: dict[str, list[Shard]]

    def to_json(self) -> str:
        """What `read_manifest` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_manifest(directory: str) -> Manifest:
    """Of a complete cache.

    Args:
        directory: `output` of `python -m recipes.encode`.

    Raises:
        ConfigError: If there is none, or the encoding was interrupted.
    """
    path = Path(to_absolute_path(directory)) / MANIFEST
    command = f"python -m recipes.encode data=NAME autoencoder=PATH output={directory}"
    if not path.is_file():
        if path.parent.is_dir() and any(path.parent.glob("*.safetensors")):
            raise ConfigError(
                f"data.directory={directory}: the encoding was interrupted, there is no {path}. Finish it by the "
                f"command that began it: {command}."
            )
        raise ConfigError(
            f"data.directory={directory}: there is no cache of latents, which would have {path}. Encode images first: "
            f"{command}; or write data.directory=PATH of a cache."
        )
    try:
        found = json.loads(path.read_text())
        splits = {name: [Shard(**shard) for shard in shards] for name, shards in found["splits"].items()}
        return Manifest(Source(**found["source"]), {name: splits[name] for name in ("train", "val")})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no manifest of latents ({error!r}). Encode again: {command}.") from error


class Latents(Dataset[Batch]):
    """Latents of one split, scaled, in fp32.

    What is drawn from a posterior, and whether of the mirror image, is a function of (seed, epoch, row) in training,
    and of the row alone in validation, where it is never mirrored.

    Args:
        directory: Of the cache.
        shards: Of the split.
        source: Of the cache.
        flip: Take the mirror image's latents with probability 1/2, in training.
        seed: Decides what is drawn in training.
    """

    def __init__(self, directory: Path, shards: list[Shard], source: Source, flip: bool = False, seed: int = 0) -> None:
        self.directory = directory
        self.shards = shards
        self.source = source
        self.flip = flip
        self.seed = seed
        self.ends = list(itertools.accumulate(shard.rows for shard in shards))
        self._files: dict[int, Any] = {}  # mapped into memory when first asked for
        for shard in shards:
            path = directory / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.size:
                state = "is missing" if size is None else f"has {size} bytes, not {shard.size}"
                raise ConfigError(f"{path} {state}. Remove {directory / MANIFEST} and {path}, and encode again.")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, key: Key) -> Batch:
        epoch, row = key if isinstance(key, tuple) else (None, key)
        number = bisect.bisect_right(self.ends, row)
        at = row - (self.ends[number] - self.shards[number].rows)
        if epoch is None:
            view, generator = 0, keyed_generator(POSTERIOR, 0, row)
        else:
            flips = keyed_generator(AUGMENTATION, self.seed, epoch, row)
            view = int(torch.randint(2, (), generator=flips)) if self.flip else 0
            generator = keyed_generator(POSTERIOR, 1, self.seed, epoch, row)
        mean, std, label = (self._read(number, name, at) for name in ("mean", "std", "label"))
        mean, std = mean[view].float(), std[view].float()  # (C, h, w), fp32 from whatever they are stored in
        latents = mean + std * torch.randn(mean.shape, generator=generator)
        latents = (latents - self.source.shift_factor) * self.source.scaling_factor
        if not latents.isfinite().all():
            raise ConfigError(
                f"{self.directory / self.shards[number].file}, row {at}: latents that are not finite. Encode again, "
                "with dtype=fp32."
            )
        return {"image": latents, "label": label, "index": torch.tensor(row)}

    def _read(self, number: int, name: str, at: int) -> Tensor:
        path = self.directory / self.shards[number].file
        try:
            if number not in self._files:
                self._files[number] = safe_open(path, framework="pt")
            return self._files[number].get_slice(name)[at : at + 1][0]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Remove it and {MANIFEST}, and encode again.") from error


class LatentsDataModule(DataModule):
    """Latents from a cache; what is drawn becomes images through the frozen autoencoder that made them.

    Args:
        directory: Of the cache.
        autoencoder: Directory of the autoencoder; default: where it was when the cache was made. Another one than that
            is refused.
        dtype: In which it decodes: `fp32`, `bf16` or `fp16`.
        flip: Train on mirror images, too; default: if the cache has them.
        batch_size: See `recipes.data.DataModule`.
        seed: See `recipes.data.DataModule`.
        num_workers: See `recipes.data.DataModule`. Default: up to 4, but no more than there are CPUs.

    Example:
        >>> LatentsDataModule("outputs/digits_latents", batch_size=256).micro_batch(processes=8, accumulated=1)
        32
    """

    train: Latents
    val: Latents
    bounded = False

    def __init__(
        self,
        directory: str | None,
        autoencoder: str | None = None,
        dtype: str = "fp32",
        flip: bool | None = None,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, workers(num_workers))
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype} of the autoencoder is unknown. Choices: {', '.join(DTYPES)}.")
        self.directory = directory
        self.autoencoder = autoencoder
        self.dtype = dtype
        self.flip = flip
        self._manifest: Manifest | None = None
        self._decoder: FrozenAutoencoder | None = None

    @property
    def manifest(self) -> Manifest:
        """Of the cache; read when first asked for."""
        if self.directory is None:
            raise ConfigError("data.directory is missing. Write data.directory=PATH, what recipes.encode wrote.")
        if self._manifest is None:
            self._manifest = read_manifest(self.directory)
        return self._manifest

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of one image's latents, which are the network's images."""
        channels, height, width = self.manifest.source.latent_shape
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """Of the images that were encoded."""
        return self.manifest.source.num_classes

    def load(self) -> tuple[Latents, Latents]:
        """See `recipes.data.DataModule.load`."""
        source, splits = self.manifest.source, self.manifest.splits
        if self.flip and source.views == 1:
            raise ConfigError(
                f"data.flip=true: {self.directory} has no latents of mirror images, and latents cannot be mirrored "
                "themselves. Encode with flip=true, or leave data.flip out."
            )
        flip = source.views == 2 if self.flip is None else self.flip
        self.load_autoencoder()  # rather than at the first sample grid, before which hours may pass
        root = Path(to_absolute_path(str(self.directory)))
        return (
            Latents(root, splits["train"], source, flip, self.seed),
            Latents(root, splits["val"], source),
        )

    def check_autoencoder(self) -> str:
        """Path of the autoencoder that made the cache.

        Raises:
            ConfigError: If it is not there, or not the one that made the cache.
        """
        source = self.manifest.source
        path = to_absolute_path(self.autoencoder or source.autoencoder)
        try:
            found = fingerprint(path)
        except ConfigError as error:
            raise ConfigError(f"data.{error} Or, if it was moved, write data.autoencoder=PATH.") from error
        if found != source.fingerprint:
            raise ConfigError(
                f"data.autoencoder={path} is not the autoencoder that made {self.directory}: its weights or its scaling"
                f" are others ({found[:12]}, not {source.fingerprint[:12]}). Give that one, or encode again with this: "
                f"python -m recipes.encode data=NAME autoencoder={path} output=PATH."
            )
        return path

    def load_autoencoder(self) -> FrozenAutoencoder:
        """What decodes; loaded once.

        Raises:
            ConfigError: If it cannot be, or is not the one that made the cache.
        """
        if self._decoder is None:
            path = self.check_autoencoder()
            try:
                self._decoder = FrozenAutoencoder(path, self.dtype)
            except ConfigError as error:
                raise ConfigError(f"data.{error}") from error
        return self._decoder

    def to_images(self, samples: Tensor) -> Tensor:
        """Decode, in the autoencoder's own dtype. Latents that are not finite give pixels that are not."""
        return self.load_autoencoder().decode(samples)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoder": None}  # each process loads its own
