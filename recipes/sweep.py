"""Sweeps (`-m`): every job is a process of its own, and `results.csv` holds what came out of all of them.

A job that starts further processes repeats its command line for them, so that must be the job's alone. A process per
job is also a clean one: nothing of the job before is left in it, and its failure ends nothing else.

It leaves out which jobs there are (Hydra's sweepers), and jobs in SLURM tasks, which are processes of their own
already.
"""

from __future__ import annotations

import csv
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from recipes.config import quoted
from recipes.ending import heeded

RESULT = "result.json"
"""In the directory of every run that ended well, and of every job of a sweep."""

COLUMNS = ("job", "overrides", "status", "steps", "validation_loss")

OWN_TO_SWEEP = ("hydra.mode", "hydra.run.dir", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
"""Overrides of Hydra's own that a job does not repeat."""


def is_job() -> bool:
    """Whether this is a job of a sweep that has no process of its own yet."""
    if not (HydraConfig.initialized() and in_sweep()):
        return False
    return not str(HydraConfig.get().launcher._target_).endswith("SlurmLauncher")


def in_sweep() -> bool:
    """Whether this is a job of a sweep, in whatever process."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def run_job(output_dir: Path) -> float | None:
    """Run this job as one child, keep what came out, and return its validation loss.

    A signal after which a run saves a checkpoint is passed on; the sweep then ends with the job.

    Args:
        output_dir: The job's directory.
    """
    config = HydraConfig.get()
    (output_dir / RESULT).unlink(missing_ok=True)  # what is there afterwards is this job's
    command = [sys.executable, "-m", "recipes.train", *_arguments(output_dir)]
    received: list[int] = []
    # In a session of its own: the terminal's Ctrl-C would come a second time, which stops without saving.
    child = subprocess.Popen(command, cwd=config.runtime.cwd, start_new_session=True)

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        child.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in heeded()}
    try:
        status = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    path = output_dir / RESULT
    outcome = json.loads(path.read_text()) if path.is_file() else {}
    write_result(output_dir, outcome, status)
    if received:
        collect(sweep_dir := Path(config.sweep.dir).absolute())
        again = [a for a in sys.argv[1:] if not a.lstrip("+").startswith(("hydra.sweep.dir=", "resume="))]
        again += [f"hydra.sweep.dir={quoted(sweep_dir)}", "resume=auto"]
        print(f"\nsweep stopped    in job {config.job.num}. Results: {sweep_dir / 'results.csv'}")
        print(f"to continue it   {shlex.join(['python', '-m', 'recipes.train', *again])}")
        sys.exit(status)
    return outcome.get("validation_loss")


def _arguments(output_dir: Path) -> list[str]:
    """The command line of this job alone."""
    given = HydraConfig.get().overrides
    shared = [line for line in given.hydra if not line.lstrip("+~").startswith(OWN_TO_SWEEP)]
    return [*typed_flags(), *given.task, *shared, f"hydra.run.dir={quoted(output_dir)}"]


def typed_flags() -> list[str]:
    """What was typed that is no override, such as `--config-dir mine`; `-m` left out."""
    typed = sys.argv[1:]
    overrides = get_args_parser().parse_intermixed_args(typed).overrides
    return [argument for argument in typed if argument not in {*overrides, "-m", "--multirun"}]


def write_result(output_dir: Path, outcome: dict[str, Any], status: int = 0) -> None:
    """Keep the outcome of a run as JSON, with its number if it is a job of a sweep.

    Args:
        output_dir: The run's directory.
        outcome: Of a run that ended well, `steps` and `validation_loss` among it (`recipes.earlier_runs`); or nothing.
        status: Exit status.
    """
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | outcome | {"status": status}
    row |= {"job": _number(), "overrides": " ".join(HydraConfig.get().overrides.task)}
    (output_dir / RESULT).write_text(json.dumps(row, indent=1) + "\n")


def _number() -> int | None:
    return HydraConfig.get().job.num if in_sweep() else None


def take_over(output_dir: Path, outcome: dict[str, Any]) -> None:
    """Count a complete run as this job: it may have been another job, or gone on outside of the sweep."""
    if in_sweep() and outcome["job"] != _number():
        write_result(output_dir, outcome)


def collect(sweep_dir: Path) -> list[dict[str, Any]]:
    """Write `results.csv`, a line per job, from the results in the jobs' directories; return the lines."""
    rows = [json.loads(path.read_text()) for path in sweep_dir.rglob(RESULT)]
    rows.sort(key=lambda row: row["job"])
    with (sweep_dir / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return rows


class CollectResults(Callback):
    """Collect at the end of a sweep, and let the exit status say whether every job ended well."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Forget an earlier sweep in the same directory, unless this one goes on with it."""
        for path in [] if config.get("resume") == "auto" else Path(config.hydra.sweep.dir).rglob(RESULT):
            path.unlink()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Collect and report."""
        sweep_dir = Path(config.hydra.sweep.dir)
        rows = collect(sweep_dir)
        failed = [row for row in rows if row["status"] != 0]
        for row in failed:
            print(f"job {row['job']} failed with exit status {row['status']}: {row['overrides']}", file=sys.stderr)
        print(f"{len(rows) - len(failed)} of {len(rows)} jobs ended well. Results: {sweep_dir / 'results.csv'}")
        if failed:
            sys.exit(1)
