"""What only a GPU can show, in one run of a few minutes: `python -m recipes.gpu_check`.

First the plugin's promises are checked on the device (`recipes.device_checks`). Then a U-Net of 296 M and a transformer
of 131 M parameters are measured against stock Lightning (`recipes.benchmark`). Everything goes into one JSON file, for
which the exit status speaks too: 1 if a check failed.

`--device cpu --small` tries the script itself where there is no GPU. It leaves out more than one device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console

from recipes import benchmark, benchmark_report, command_line
from recipes.config import plain
from recipes.device_checks import run_checks
from recipes.train import quiet

LARGE = {
    "DiT, 131 M": (
        "model=dit_b_2", "data=synthetic", "data.num_classes=1000", "data.image_size=32", "data.channels=4",
        "data.batch_size=128",
    ),
    "U-Net, 296 M": ("model=adm_64", "data=synthetic", "data.num_classes=1000", "data.batch_size=32"),
}  # fmt: skip
SMALL = {
    "U-Net, tiny": ("model=unet_tiny", "data.batch_size=8"),
    "DiT, tiny": ("model=dit_tiny", "data.batch_size=8"),
}
"""What is measured, as overrides of `recipes.benchmark`."""

MODES: tuple[str, ...] = ("32-true", "bf16-mixed", "bf16", "bf16+split", "bf16+split24", "16-mixed", "fp16")
COMPILED = ("bf16-mixed+compile", "bf16+compile", "fp8+compile")


def measure(device: str, small: bool, deadline: float, console: Console, found: dict[str, Any]) -> Iterator[None]:
    """Put the benchmark's table for each network into ``found``, in turn, as long as there is time."""
    for modes, rounds in ((MODES[:3], 1),) if small else ((MODES, 3), (COMPILED, 1)):  # what takes longest comes last
        for name, overrides in (SMALL if small else LARGE).items():
            if time.monotonic() > deadline:
                console.print(f"{name}, {', '.join(modes)}: not measured, time is up")
                continue
            steps = 2 if small else 10
            given = [*overrides, f"modes=[{','.join(modes)}]", f"rounds={rounds}", f"steps={steps}", "warmup=3"]
            given += [f"trainer.accelerator={'cpu' if device == 'cpu' else 'gpu'}", "++optimizer.fused=true"]
            with initialize_config_dir(str(command_line.CONF), version_base="1.3"):
                config = plain(compose("benchmark", overrides=["trainer.default_root_dir=.", "callbacks=none", *given]))
            console.print(f"\n{name}: python -m recipes.benchmark {' '.join(given)}", highlight=False, soft_wrap=True)
            results = benchmark.run(config)
            benchmark_report.show(results, config["data"]["batch_size"], console)
            console.print(benchmark_report.recommendation(results), highlight=False, soft_wrap=True)
            found.setdefault(name, {}).update({mode: asdict(measured) for mode, measured in results.items()})
            yield


def main() -> None:
    """Check, measure, write, and say by the exit status whether all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny networks, to try this script itself")
    parser.add_argument("--minutes", type=float, default=5.0, help="no further table is begun after this time")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: there is no GPU here. --device cpu --small tries the script itself.")
    start = time.monotonic()
    console = Console()
    with quiet():
        document: dict[str, Any] = {"machine": benchmark_report.machine()}
        document["checks"] = run_checks(arguments.device, console)
        document["tables"] = {}
        arguments.output.write_text(json.dumps(document, indent=2))  # and after each table, should the next not end
        deadline = start + 60 * arguments.minutes
        for _ in measure(arguments.device, arguments.small, deadline, console, document["tables"]):
            arguments.output.write_text(json.dumps(document, indent=2, default=str))
    print(f"\nall figures      {arguments.output}, after {time.monotonic() - start:.0f} s")
    sys.exit(0 if all(check["passed"] for check in document["checks"].values()) else 1)


if __name__ == "__main__":
    main()
