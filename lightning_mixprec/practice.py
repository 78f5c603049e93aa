"""What practice keeps in fp32, known by its names: conditioning and the output layer.

Why it exists: conditioning is tiny, and its error enters every layer; the output layer's error enters the sample
unfiltered (ADM, EDM, EDM2, DiT, diffusers' ``_keep_in_fp32_modules``). And features of a time or noise level are sines
of large angles: made by a matrix product in 16 bits, or of a rounded time, they are those of another time.

What it leaves out: normalisation, which is known by its class, and what the user says (both in
:mod:`lightning_mixprec.policy`). Features that a network computes in its own ``forward`` have no name.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from torch import nn

# Matched on a module's own name, and embeddings on a parameter's: DiT's and ViT's `pos_embed` is often one that belongs
# to the network itself.
_EMBEDDINGS = (
    "time_embed*",
    "time_mlp",
    "timestep_embed*",
    "t_embed*",
    "class_embed*",
    "label_emb*",
    "y_embed*",
    "sigma_embed*",
    "noise_embed*",
    "pos_embed*",
    "temb",
    "map_noise",
    "map_label",
    "map_layer*",
    "emb_noise",
    "emb_label",
)
_OUTPUTS = (
    "out",
    "out_norm",
    "out_conv",
    "conv_out",
    "conv_norm_out",
    "norm_out",
    "proj_out",
    "proj_out_*",
    "final_layer",
    "final_conv",
    "final_proj",
    "out_proj_final",
)
# Names and classes that others have too, so that only what looks like an embedding counts, outside of numbered blocks:
# diffusers' `time_proj` makes sines, Wan's is a matrix of a hundred million weights.
_FEATURES = (
    "time_emb",
    "timestep_emb",
    "t_emb",
    "sigma_emb",
    "noise_emb",
    "noise_*_emb*",
    "*fourier*",
    "gfp",
    "time_features",
    "timestep_features",
    "time_step_embed*",
    "time_proj",
    "timestep_proj",
    "timesteps_proj",
    "t_proj",
    "time_in",
    "time_cond",
    "guidance_in",
)
_FEATURE_CLASS = re.compile(
    r"(?!.*(Text|Image|Block|Sequential|Net))\w*?"
    r"(Fourier(Feature|Proj|Emb|Enc|Pos)\w*"
    r"|Sinusoid(al)?((Time|Pos|Emb|Enc|Feature|Proj)\w*)?"
    r"|Timesteps"
    r"|(Time|Timestep|TimeStep|Sigma|Noise|NoiseLevel|LogSNR|Positional)Emb(ed|edding|edder)?s?)"
)
_MOST_MATRICES = 4  # of what embeds one number


def is_embedding(name: str, module: nn.Module | None = None) -> bool:
    """Whether a module, or without one a parameter, embeds timestep, noise level, label or position.

    Example:
        >>> is_embedding("net.time_embedding"), is_embedding("time_proj", nn.Linear(64, 64))
        (True, False)
        >>> class GaussianFourierProjection(nn.Module): ...
        >>> is_embedding("net.features", GaussianFourierProjection())
        True
    """
    last = name.rpartition(".")[2]
    if any(fnmatchcase(last, glob) for glob in _EMBEDDINGS):
        return True
    if module is None:
        return False
    named = not _in_numbered_list(name) and any(fnmatchcase(last, glob) for glob in _FEATURES)
    return (named or _FEATURE_CLASS.fullmatch(type(module).__name__) is not None) and _embeds_a_number(module)


def is_output(name: str) -> bool:
    """Whether a module is the network's output layer; inside a numbered list the name belongs to a block.

    Example:
        >>> is_output("net.proj_out"), is_output("blocks.0.proj_out")
        (True, False)
    """
    return not _in_numbered_list(name) and any(fnmatchcase(name.rpartition(".")[2], glob) for glob in _OUTPUTS)


def _in_numbered_list(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _embeds_a_number(module: nn.Module) -> bool:
    """A few matrices, or none; but not a single one of torch's that takes an embedding, as blocks of U-Nets have it."""
    if any(nn.parameter.is_lazy(param) for param in module.parameters()):
        return False
    matrices = [param for param in module.parameters() if param.dim() > 1]
    if len(matrices) > _MOST_MATRICES or any(param.dim() > 2 for param in matrices):
        return False
    stock = type(module).__module__.startswith("torch.nn.")
    return not (stock and len(matrices) == 1 and matrices[0].shape[1] > 1)
