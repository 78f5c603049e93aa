"""Processes that torchrun or SLURM started agree on one output directory, in which rank 0 alone writes.

Hydra chooses a directory in each process, before any process group exists, from the time, which differs. Processes that
Lightning starts are told by it.
"""

from __future__ import annotations

import os
from datetime import datetime

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import TCPStore

from recipes.config import ConfigError

DIRECTORY = "outputs/${hydra.runtime.choices.experiment}/"


def shared_directory(keys: list[str], sweep: bool, program: str = "train") -> list[str]:
    """Overrides that this process needs beside those of the command line, if it was started from outside.

    Args:
        keys: Of the overrides that were given.
        sweep: Whether `-m` was.
        program: Of the recipes; all but `train` are one process, or start the others themselves.

    Raises:
        ConfigError: If the processes cannot agree, or each would run a whole sweep or program.
    """
    slurm, torchrun = SLURMEnvironment.detect(), TorchElasticEnvironment.detect()
    by_hand = "LOCAL_RANK" in os.environ or "NODE_RANK" in os.environ
    tasks = int(os.environ["WORLD_SIZE" if torchrun else "SLURM_NTASKS"]) if slurm or torchrun else 1
    if not (slurm or torchrun or by_hand):
        return []
    if program != "train":
        # A batch script has the variables of its job, whose tasks are started by srun alone.
        if tasks > 1 and (torchrun or "SLURM_STEP_ID" in os.environ or os.environ.get("SLURM_PROCID", "0") != "0"):
            raise ConfigError(
                f"recipes.{program} is one process, and {tasks} were started, which would all write the same files. "
                "Leave torchrun out; under SLURM write srun --ntasks=1."
            )
    elif sweep and not (slurm and tasks == 1):
        raise ConfigError(
            "-m under torchrun or SLURM: every process would run the whole sweep. Leave the launcher out: each job "
            "starts its own processes on this machine, or is a SLURM job with hydra/launcher=slurm."
        )
    rank = os.environ.get("RANK" if torchrun else "SLURM_PROCID" if slurm else "LOCAL_RANK", "0")
    quiet = ["hydra.output_subdir=null"] if rank != "0" and "hydra.output_subdir" not in keys else []
    if "hydra.run.dir" in keys or sweep or program != "train":
        return quiet
    if slurm:
        name = slurm_name()
    elif torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        # The first process sets the name; it stays when torchrun restarts its workers.
        name = store.compare_set("recipes/name", "", f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}").decode()
    else:
        raise ConfigError(
            "this process is one of several that were started from outside, and every process would choose its own "
            "output directory. Name one for all of them: hydra.run.dir=outputs/NAME."
        )
    return [*quiet, f"hydra.run.dir={DIRECTORY}{name}"]


def slurm_name() -> str:
    """The job's number, and the step's after the first; the same when the job is requeued, so that it finds itself."""
    step = os.environ.get("SLURM_STEP_ID", "0")
    return f"slurm_{os.environ['SLURM_JOB_ID']}" + (f"_{step}" if step != "0" else "")
