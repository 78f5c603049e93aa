"""Draw a class-conditional grid from a checkpoint: `python -m recipes.sample ckpt_path=...`.

The checkpoint brings the configuration of its network, objective and data; only the solver is chosen here. The network
computes in fp32 on the averaged weights. It leaves out 16-bit sampling: it saves no time at this size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig

from recipes import command_line
from recipes.config import ConfigError, build, check_targets, fail, plain, refusals
from recipes.images import count_non_finite, image_grid, save_png
from recipes.resume import read
from recipes.sampler import draw_samples

WEIGHTS = {"averaged": "averaged_state_dict", "raw": "state_dict"}
"""Choices of `weights`, and where a checkpoint keeps them."""


def sample(config: dict[str, Any]) -> None:
    """Load, draw, save, and say what came out.

    Args:
        config: Plain containers; the keys stand in `conf/sample.yaml`.

    Raises:
        ConfigError: Before anything is drawn.
    """
    check_targets(config)
    path = checkpoint_path(config["ckpt_path"])
    checkpoint = load(path)
    recipe = checkpoint["recipe"]
    net, objective, data = (build(recipe, part) for part in ("model", "objective", "data"))
    net.load_state_dict(weights_of(checkpoint, config["weights"], path))
    net.to(config["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))

    per_class, guidance, seed = config["per_class"], config["guidance"], config["seed"]
    sampler = build(config, "sampler")
    with refusals(config, "sampler"):
        sampler.check(objective)
    samples = draw_samples(net, objective, sampler, data.image_shape, per_class, guidance, seed)
    samples = data.to_images(samples)
    name = f"{path.stem}_{config['weights']}_guidance{guidance:g}_seed{seed}.png"
    output = Path(to_absolute_path(config["output"])) if config["output"] else path.parent.parent / "samples" / name
    save_png(image_grid(samples, columns=len(samples) // per_class), output)
    bad = count_non_finite(samples)
    print(f"weights          {config['weights']}, after {checkpoint['global_step']} steps")
    print(f"non-finite       {bad} of {len(samples)} samples{' (red in the grid)' if bad else ''}")
    print(f"sample grid      {output}")


def checkpoint_path(given: str | None) -> Path:
    """The file that `ckpt_path` means: a path, or `last` for the newest `last.ckpt` under outputs/."""
    if given == "last":
        found = [*Path(to_absolute_path("outputs")).glob("*/*/checkpoints/last.ckpt")]
        if not found:
            raise ConfigError(
                f"ckpt_path=last: looked for {to_absolute_path('outputs')}/*/*/checkpoints/last.ckpt and found none. "
                "Give the path of a checkpoint, or train first: python -m recipes.train."
            )
        return max(found, key=lambda p: p.stat().st_mtime)
    if given is None:
        raise ConfigError("ckpt_path is missing. Write ckpt_path=PATH, or ckpt_path=last for the newest checkpoint.")
    path = Path(to_absolute_path(given))
    if not path.is_file():
        raise ConfigError(
            f"ckpt_path={given}: there is no file {path}. Write ckpt_path=last for the newest checkpoint."
        )
    return path


def load(path: Path) -> dict[str, Any]:
    """A checkpoint of `recipes.train`, which holds the configuration of its network."""
    checkpoint = read(path)
    if "recipe" not in checkpoint:
        raise ConfigError(f"ckpt_path={path} has no entry 'recipe'. Give a checkpoint that recipes.train wrote.")
    return checkpoint


def weights_of(checkpoint: dict[str, Any], choice: str, path: Path) -> dict[str, torch.Tensor]:
    """State dict of the network alone, fp32."""
    if choice not in WEIGHTS:
        raise ConfigError(f"weights={choice} is unknown. Choices: {', '.join(WEIGHTS)}.")
    if WEIGHTS[choice] not in checkpoint:
        raise ConfigError(f"weights={choice}: {path} was trained with ema=none and has none. Write weights=raw.")
    state = checkpoint["state_dict"] | checkpoint[WEIGHTS[choice]]  # averages cover trained parameters only
    return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="sample")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        sample(plain(cfg))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    command_line.run(main, "sample")
