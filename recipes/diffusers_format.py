"""Networks and objectives of the recipes as configurations of diffusers' classes, which are not needed for it.

What is written here is what diffusers 0.36 and later read. It leaves out files (`recipes.export`). An objective or a
network that no class of theirs computes is refused or marked, never approximated.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from recipes.denoising import Objective
from recipes.objective import DDPM, EDM, FlowMatching
from recipes.unet import UNet

VERSION = "0.36.0"
"""What the configurations say they were written by."""

SAMPLED_BY = ("path", "preconditioning", "sampling_times", "ode", "mix", "predict", "denoise")
"""What an objective is to samplers."""

Config = dict[str, Any]


def unet_config(node: Config, image_shape: tuple[int, ...]) -> Config | None:
    """`UNet2DModel`'s configuration for a model node of the recipes; None if that class does not compute the network.

    Args:
        node: `_target_` and arguments.
        image_shape: Channels, height and width.
    """
    shared = {"_class_name": "UNet2DModel", "_diffusers_version": VERSION, "sample_size": list(image_shape[1:])}
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    if node["_target_"] == "recipes.diffusers_unet2d.DiffusersUNet2D":
        arguments.pop("time_scale", None)
        return shared | {"num_class_embeds": arguments.pop("num_classes") + 1} | arguments
    if node["_target_"] != "recipes.unet.UNet":
        return None
    bound = inspect.signature(UNet).bind(**arguments)
    bound.apply_defaults()
    given = bound.arguments
    levels = range(len(given["block_out_channels"]))
    residual = given["resample"] == "residual"
    plain = "Resnet{}sampleBlock2D" if residual else "{}Block2D"
    down = ["AttnDownBlock2D" if i in given["attention_levels"] else plain.format("Down") for i in levels]
    up = ["AttnUpBlock2D" if i in given["attention_levels"] else plain.format("Up") for i in reversed(levels)]
    return shared | {
        "in_channels": given["in_channels"],
        "out_channels": given["in_channels"],
        "block_out_channels": list(given["block_out_channels"]),
        "down_block_types": down,
        "up_block_types": up,
        "layers_per_block": given["layers_per_block"],
        "attention_head_dim": given["attention_head_dim"],
        "norm_num_groups": given["norm_num_groups"],
        "attn_norm_num_groups": given["norm_num_groups"],
        "resnet_time_scale_shift": "scale_shift" if given["scale_shift"] else "default",
        "downsample_type": "resnet" if residual else "conv",
        "upsample_type": "resnet" if residual else "conv",
        "num_class_embeds": given["num_classes"] + 1,
    }


def time_scale(node: Config) -> float:
    """Factor by which a U-Net of the recipes multiplies its noise level before the sinusoid."""
    return float(node.get("time_scale", inspect.signature(UNet).parameters["time_scale"].default))


def scheduler_config(objective: Objective, scale: float) -> tuple[Config, float]:
    """The scheduler for an objective, and what its timesteps must be multiplied by before the network sees them.

    Args:
        objective: Of the run.
        scale: See `time_scale`.

    Raises:
        ValueError: If no scheduler of diffusers samples it.
    """
    shared = {"_diffusers_version": VERSION}
    kind = next((each for each in (DDPM, EDM, FlowMatching) if isinstance(objective, each)), None)
    if kind is not None and (
        own := [name for name in SAMPLED_BY if getattr(type(objective), name) is not getattr(kind, name)]
    ):
        raise ValueError(
            f"{type(objective).__name__} has {' and '.join(own)} of its own, which no scheduler of diffusers has; that "
            f"of {kind.__name__} would draw other images. Sample it with recipes.sample."
        )
    if isinstance(objective, DDPM):
        linear = objective.schedule == "linear"
        config: Config = {
            "_class_name": "DDPMScheduler",
            "num_train_timesteps": objective.timesteps,
            "beta_start": 1e-4,
            "beta_end": 0.02,
            "beta_schedule": "linear" if linear else "squaredcos_cap_v2",
            "prediction_type": {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}[objective.prediction],
            "rescale_betas_zero_snr": objective.zero_snr,
            "clip_sample": objective.clip is not None,
            "clip_sample_range": objective.clip or 1.0,
            "timestep_spacing": "trailing",
        }
        return shared | config, scale / objective.timesteps
    if isinstance(objective, FlowMatching):
        # Its timesteps are t · num_train_timesteps: the network's own factor, if that is a whole number.
        steps = int(scale) if scale.is_integer() and scale >= 1 else 1000
        config = {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": steps,
            "shift": objective.shift,
        }
        return shared | config, scale / steps
    if isinstance(objective, EDM):
        config = {
            "_class_name": "EDMEulerScheduler",
            "sigma_min": objective.sigma_min,
            "sigma_max": objective.sigma_max,
            "sigma_data": objective.sigma_data,
            "sigma_schedule": "karras",
            "rho": objective.rho,
            "prediction_type": "epsilon",
        }
        return shared | config, scale  # its timesteps are ln(σ) / 4
    raise ValueError(
        f"diffusers has no scheduler for objective {type(objective).__name__}. Those of DDPM, EDM and FlowMatching "
        "have one."
    )


def fold_label(state: dict[str, Tensor], config: Config, label: int) -> tuple[dict[str, Tensor], Config]:
    """The network for one label as a network without labels: its embedding becomes part of a bias.

    The condition is linear_2(...) + class_embedding[label], which is linear_2 with another bias.

    Args:
        state: Of the U-Net.
        config: Of `UNet2DModel`.
        label: Row of the class embedding.
    """
    rest = {name: value for name, value in state.items() if name != "class_embedding.weight"}
    bias = "time_embedding.linear_2.bias"
    rest[bias] = state[bias] + state["class_embedding.weight"][label]
    return rest, config | {"num_class_embeds": None}
