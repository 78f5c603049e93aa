"""A checkpoint as a folder that diffusers loads: `python -m recipes.export ckpt_path=...`. diffusers is not needed.

    unet/        config.json, diffusion_pytorch_model.safetensors: fp32, averaged unless told otherwise
    scheduler/   scheduler_config.json
    model_index.json   where a pipeline of diffusers computes the whole: DDPM with one label
    recipe.json  where it came from, and what the network must be called with

A network that no class of diffusers computes (DiT) goes to `network/` with its own configuration, and nothing else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hydra
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from recipes import command_line
from recipes.config import ConfigError, build, check_targets, fail, plain
from recipes.denoising import clip_bounded_images_alone
from recipes.diffusers_format import VERSION, Config, fold_label, scheduler_config, time_scale, unet_config
from recipes.objective import DDPM
from recipes.places import check_writable
from recipes.screen import said
from recipes.trained import open_checkpoint

WEIGHTS = "diffusion_pytorch_model.safetensors"


def export(config: dict[str, Any]) -> Path:
    """Translate, write, say what it is.

    Args:
        config: Plain containers; the keys stand in `conf/export.yaml`.

    Returns:
        The folder.

    Raises:
        ConfigError: Before anything is written.
    """
    check_targets(config)
    trained = open_checkpoint(config)
    objective, data = build(trained.recipe, "objective"), build(trained.recipe, "data")
    clip_bounded_images_alone(objective, trained.recipe["objective"], data)
    node, state = trained.recipe["model"], trained.state
    shape, num_classes = trained.made_for(data)
    label = chosen_label(config["label"], num_classes)
    suffix = "" if label is None else f"_label{config['label']}"
    output = trained.run / "exports" / f"step{trained.step:06}_{trained.weights}{suffix}"
    if config["output"]:
        output = Path(to_absolute_path(config["output"]))
    if output.exists():
        raise ConfigError(f"output={output} exists already. Remove it, or write output=ANOTHER.")
    check_writable("output", output)

    files: dict[str, Config | dict[str, Tensor]] = {}
    note: Config = {
        "checkpoint": str(trained.path),
        "step": trained.step,
        "weights": trained.weights,
        "label": config["label"],
        "recipe": {key: trained.recipe[key] for key in ("model", "objective", "sampler", "data")},
    }
    unet = unet_config(node, shape)
    if unet is None:
        if label is not None:
            raise ConfigError(f"label={config['label']} is for U-Nets; {node['_target_']} has no place for it.")
        files |= {"network/config.json": node, f"network/{WEIGHTS}": state}
        note["call"] = f"No class of diffusers computes {node['_target_']}: weights and configuration alone."
    else:
        try:
            scheduler, factor = scheduler_config(objective, time_scale(node))
        except ValueError as error:
            raise ConfigError(f"objective: {error}") from error
        if label is not None:
            state, unet = fold_label(state, unet, label)
        files |= {"unet/config.json": unet, f"unet/{WEIGHTS}": state, "scheduler/scheduler_config.json": scheduler}
        note |= {"timestep_factor": factor, "null_label": num_classes if label is None else None}
        note["call"] = call(scheduler, factor, note["null_label"])
        if isinstance(objective, DDPM) and factor == 1 and label is not None:
            parts = {"unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", "DDPMScheduler"]}
            files["model_index.json"] = {"_class_name": "DDPMPipeline", "_diffusers_version": VERSION, **parts}
            note["call"] = "DDPMPipeline.from_pretrained(FOLDER)()"
    files["recipe.json"] = note
    write(files, output)
    print(said("weights", f"{trained.weights}, after {trained.step} steps, fp32"))
    print(said("call", note["call"]))
    print(said("exported", str(output)))
    return output


def chosen_label(label: Any, num_classes: int) -> int | None:
    """Row of the class embedding that is to become part of the network: a class, `none` for no label, null for none."""
    if label is None:
        return None
    if label == "none":
        return num_classes
    if not num_classes:
        raise ConfigError(
            f"label={label}: the network was trained without classes. Write label=none for a network that takes no "
            "labels, or leave it out."
        )
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < num_classes:
        raise ConfigError(
            f"label={label}: the data have classes 0 to {num_classes - 1}. Write one of them, or label=none for a "
            "network that ignores classes, or leave it out to keep them all."
        )
    return label


def call(scheduler: Config, factor: float, null_label: int | None) -> str:
    """How the network is called in a loop over the scheduler's timesteps.

    Example:
        >>> call({"_class_name": "EDMEulerScheduler"}, factor=1000.0, null_label=10)
        'unet(scheduler.scale_model_input(x, t), t * 1000, class_labels=labels).sample, where label 10 means none'
    """
    x = "scheduler.scale_model_input(x, t)" if "EDM" in scheduler["_class_name"] else "x"
    timestep = "t" if factor == 1 else f"t * {factor:g}"
    if null_label is None:
        return f"unet({x}, {timestep}).sample"
    return f"unet({x}, {timestep}, class_labels=labels).sample, where label {null_label} means none"


def write(files: dict[str, Any], output: Path) -> None:
    """Write all files beside the folder first, which then appears as a whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(exist_ok=True)
            if path.suffix == ".json":
                path.write_text(json.dumps(content, indent=2) + "\n")
            else:
                save_file({k: v.float().contiguous() for k, v in content.items()}, path, metadata={"format": "pt"})
        partial.chmod(0o755)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="export")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        export(plain(cfg))
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    command_line.run(main, "export")
