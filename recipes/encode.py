"""Encode a data set once, for `data=latents`: `python -m recipes.encode data=... autoencoder=PATH output=PATH`.

The mean and standard deviation of every image's posterior are kept, in shards. A file has its name only when it is
whole, and the manifest is written last: an encoding that was interrupted does not look complete, and the same command
goes on with it. It leaves out several devices: one of them encodes ImageNet in well under an hour.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipes import command_line
from recipes.autoencoder import FrozenAutoencoder, fingerprint, write_atomically
from recipes.config import ConfigError, build, check_targets, fail, plain
from recipes.data import DataModule
from recipes.latents import MANIFEST, LatentsDataModule, Manifest, Shard, Source, read_manifest
from recipes.loading import Loader
from recipes.places import check_writable, device_of

NOT_OF_IMAGES = ("seed", "batch_size", "num_workers", "download", "flip")
"""Arguments of a data module that say nothing about its images."""


def encode(config: dict[str, Any]) -> Path:
    """Encode every image of both splits, unless that was done.

    Args:
        config: Plain containers; the keys stand in `conf/encode.yaml`.

    Returns:
        The manifest.

    Raises:
        ConfigError: If something is missing, the output holds something else, or latents are not finite.
    """
    check_targets(config)
    for key in ("autoencoder", "output"):
        if config[key] is None:
            raise ConfigError(f"{key} is missing. Write {key}=PATH.")
    for key in ("batch_size", "shard_size"):
        if not isinstance(config[key], int) or config[key] < 1:
            raise ConfigError(f"{key}={config[key]} must be a whole number, at least 1.")
    path, output = to_absolute_path(config["autoencoder"]), Path(to_absolute_path(config["output"]))
    device = device_of(config["device"])
    check_writable("output", output)
    autoencoder = FrozenAutoencoder(path, config["dtype"]).to(device)
    data = build(config, "data")
    if isinstance(data, LatentsDataModule):
        raise ConfigError(f"data={config['data']['_target_']} has no images to encode. Choose other data.")
    data.setup()
    source = describe(data, autoencoder, device, config)
    if (output / MANIFEST).is_file():
        refuse_other(source, read_manifest(str(output)).source, output)
        print(f"complete already {output}")
        return output / MANIFEST

    output.mkdir(parents=True, exist_ok=True)
    for left_over in output.glob(".*.safetensors"):  # of an encoding that was killed
        left_over.unlink()
    splits = {}
    for split, images in (("train", data.train), ("val", data.val)):
        splits[split] = encode_split(split, images, autoencoder, device, source, output, config, data.num_workers)
    write_atomically(output / MANIFEST, Manifest(source, splits).to_json())
    return output / MANIFEST


def describe(data: DataModule, autoencoder: FrozenAutoencoder, device: torch.device, config: dict[str, Any]) -> Source:
    """What the cache will be of; the shape of the latents by encoding one image."""
    digest = hashlib.sha256()
    for images in (data.train, data.val):
        for row in range(len(images)):  # type: ignore[arg-type]
            digest.update(f"{images.name(row)}\n".encode())  # type: ignore[attr-defined]
        digest.update(b"\n")
    try:
        mean, _ = autoencoder.encode(torch.zeros(1, *data.image_shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"autoencoder={config['autoencoder']} cannot encode images of shape {list(data.image_shape)}: {error}"
        ) from error
    return Source(
        autoencoder=str(Path(autoencoder.path).resolve()),
        fingerprint=fingerprint(autoencoder.path),
        dtype=config["dtype"],
        scaling_factor=autoencoder.scaling_factor,
        shift_factor=autoencoder.shift_factor,
        image_shape=list(data.image_shape),
        latent_shape=list(mean.shape[1:]),
        num_classes=data.num_classes,
        views=2 if config["flip"] else 1,
        data={key: value for key, value in config["data"].items() if key not in NOT_OF_IMAGES},
        names=digest.hexdigest(),
    )


def refuse_other(wanted: Source, found: Source, output: Path) -> None:
    """An output that holds the latents of other images or of another autoencoder stays as it is."""
    if differ := found.differences(wanted):
        raise ConfigError(
            f"output={output} holds other latents: {'; '.join(differ)} (there -> here). Choose another output, or "
            "remove that directory."
        )


def encode_split(
    split: str,
    images: Any,
    autoencoder: FrozenAutoencoder,
    device: torch.device,
    source: Source,
    output: Path,
    config: dict[str, Any],
    num_workers: int,
) -> list[Shard]:
    """Encode one split, shard by shard; those that are there already are kept."""
    shards, count = [], len(images)
    for number, first in enumerate(range(0, count, config["shard_size"])):
        path = output / f"{split}-{number:05d}.safetensors"
        rows = range(first, min(first + config["shard_size"], count))
        made = {"source": json.dumps(asdict(source), sort_keys=True), "rows": f"{rows.start} to {rows.stop}"}
        if path.is_file():
            refuse_shard(path, made, source, output)
        else:
            batches = [list(rows[at : at + config["batch_size"]]) for at in range(0, len(rows), config["batch_size"])]
            loader = Loader(images, num_workers, batch_sampler=batches)
            encoded = [encode_batch(batch, images, autoencoder, device, source) for batch in loader]
            tensors = {name: torch.cat([part[name] for part in encoded]).contiguous() for name in encoded[0]}
            beside = path.with_name(f".{path.name}")
            save_file(tensors, beside, metadata=made)
            os.replace(beside, path)
        shards.append(Shard(path.name, len(rows), path.stat().st_size))
        print(f"{split:<16} {rows.stop} of {count}", flush=True)
    return shards


def refuse_shard(path: Path, made: dict[str, str], source: Source, output: Path) -> None:
    """A shard of an interrupted encoding is kept if it is what would be written now."""
    try:
        with safe_open(path, framework="pt") as shard:
            found = shard.metadata() or {}
        theirs = Source(**json.loads(found["source"]))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no shard of latents ({error!r}). Remove it, or choose another output.") from error
    refuse_other(source, theirs, output)
    if found["rows"] != made["rows"]:
        raise ConfigError(
            f"output={output} was begun with another shard_size: {path.name} has rows {found['rows']}, not "
            f"{made['rows']}. Write that shard_size, or remove the directory."
        )


def encode_batch(
    batch: dict[str, Tensor], images: Any, autoencoder: FrozenAutoencoder, device: torch.device, source: Source
) -> dict[str, Tensor]:
    """Mean and standard deviation `(batch, views, C, h, w)` in the autoencoder's dtype, on the CPU, and labels."""
    pixels = batch["image"].to(device)  # (batch, channels, H, W), fp32
    views = [pixels, pixels.flip(3)][: source.views]
    encoded = [autoencoder.encode(view) for view in views]
    mean, std = (torch.stack([view[part] for view in encoded], dim=1).cpu() for part in range(2))
    finite = (mean.isfinite() & std.isfinite()).flatten(1).all(dim=1)
    if not finite.all():
        row = int(batch["index"][~finite][0])
        remedy = "" if source.dtype == "fp32" else f" The autoencoder computed in {source.dtype}: write dtype=fp32."
        raise ConfigError(
            f"{images.name(row)}: its latents are not finite.{remedy} If they are not in fp32 either, look at the "
            "image and the autoencoder's weights."
        )
    return {"mean": mean, "std": std, "label": batch["label"]}


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="encode")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        manifest = encode(plain(cfg))
    except ConfigError as error:
        fail(error)
    print(f"latents          {manifest.parent}")
    print(f"to train on them python -m recipes.train data=latents data.directory={manifest.parent} ...")


if __name__ == "__main__":
    command_line.run(main, "encode")
