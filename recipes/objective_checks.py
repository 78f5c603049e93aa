"""What an objective's arguments make of its numbers, looked at before training: nothing infinite, and some labels left.

Each argument by itself is the constructor's to judge. It leaves out the data (`recipes.sample_checks`).
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.config import ConfigError
from recipes.denoising import Objective
from recipes.sampler import Sampler

QUANTILES = (-3.0, 0.0, 3.0)
"""Of the normal numbers that training times are made of: beyond the outer two are three in a thousand."""


def check_numbers(config: dict[str, Any], objective: Objective, sampler: Sampler) -> None:
    """Refuse training times and sampling times at which fp32 holds no numbers for the network.

    With `P_mean=100`, e^100 is infinite, and every batch would be skipped until the run gives up.

    Args:
        config: The whole configuration, for the error.
        objective: Built.
        sampler: Whose number of steps chooses the sampling times.

    Raises:
        ConfigError: With the time, and the arguments that were given.
    """
    try:
        sampling = objective.sampling_times(sampler.steps)[:-1]
    except ValueError:  # said by the sampler
        sampling = []
    trained = objective.times(torch.tensor(QUANTILES)).float()
    for what, times in (("training", trained), ("sampling", torch.tensor(sampling))):
        alpha, sigma = objective.path(times)
        c_skip, c_out, c_in, c_noise = objective.preconditioning(times)
        finite = torch.stack([alpha, sigma, c_skip, c_out, c_noise, objective.weight(times)]).isfinite().all(dim=0)
        bad = times[~(finite & c_in.isfinite() & (c_in > 0))]
        if len(bad):
            node = {key: value for key, value in config["objective"].items() if key != "_target_"}
            given = ", ".join(f"objective.{key}={value}" for key, value in node.items())
            raise ConfigError(
                f"{given or 'objective'}: at the time {float(bad[0]):g} of {what}, the noise level and what scales the "
                "network's input and output cannot be computed in fp32. Write numbers nearer to the defaults."
            )


def check_labels(objective: Objective, null_label: int) -> None:
    """Refuse a network that never sees a label, and would be asked for them in validation and samples.

    Args:
        objective: Of the run.
        null_label: Of the network; 0: it has no classes.

    Raises:
        ConfigError: With what to write.

    Example:
        >>> from recipes.objective import EDM
        >>> check_labels(EDM(label_dropout=1.0), null_label=0)
    """
    if objective.label_dropout == 1 and null_label:
        raise ConfigError(
            f"objective.label_dropout={objective.label_dropout:g} leaves no sample its label, and validation and "
            "samples ask for classes. Write a number below 1, such as objective.label_dropout=0.1; guidance=0 draws "
            "without labels."
        )
