"""Look at TensorBoard as a newcomer would: `python -m recipes.screenshots DIRECTORY`.

Trains the default recipe and one with a planted overflow, opens a TensorBoard that this machine alone can reach, and
lets a headless Chromium take pictures of its pages. Needs `chromium` (or `google-chrome`) on the path, and minutes.

It leaves out judging the pictures.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import lightning as L
import torch

PLANTED = [
    "precision=fp16",
    "model=unet_tiny",
    "data.batch_size=32",
    "trainer.max_steps=240",
    "trainer.val_check_interval=120",
    "sampler.steps=6",
    "+callbacks.plant._target_=recipes.screenshots.LoudLayer",
    "callbacks.precision.layers_every_n_steps=40",
]
"""A run in which a layer leaves fp16's range on its way."""

PAGES = {
    "timeseries": (1280, 900),
    "custom_scalars": (1280, 1060),
    "images": (1280, 700),
    "text": (1280, 900),
    "hparams": (2200, 600),
}
"""Width and height in pixels by the name that TensorBoard gives its pages."""


class LoudLayer(L.Callback):
    """Multiply the weights of one layer in the middle of training.

    Its results then leave fp16's range at every loss scale. A norm comes after it, so that nothing else changes.

    Args:
        layer: Qualified name.
        batch: Before which.
        gain: Factor.
    """

    def __init__(self, layer: str = "net.mid_block.resnets.0.conv1", batch: int = 100, gain: float = 5e4) -> None:
        self.layer = layer
        self.batch = batch
        self.gain = gain
        self.batches = 0

    @torch.no_grad()
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count, and do it when it is time."""
        if self.batches == self.batch:
            for param in pl_module.get_submodule(self.layer).parameters():
                param.mul_(self.gain)
        self.batches += 1


def wait_for(url: str, seconds: float = 60) -> None:
    """Until something answers there.

    Raises:
        TimeoutError: If nothing does.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"nothing answers at {url} after {seconds:g} seconds.")


def photograph(logdir: Path, pictures: Path, browser: str) -> list[Path]:
    """Pictures of all pages of a TensorBoard over `logdir`, as PNG files `PAGE.png`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", logdir.name, "--host", "127.0.0.1", "--port", str(port)],
        cwd=logdir.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    taken = []
    try:
        wait_for(f"http://127.0.0.1:{port}/data/runs")
        time.sleep(5)  # until it has read the events
        pictures.mkdir(parents=True, exist_ok=True)
        for page, (width, height) in PAGES.items():
            taken.append(pictures / f"{page}.png")
            options = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-sync",
            ]
            options += ["--no-first-run", "--hide-scrollbars", f"--window-size={width},{height}"]
            options += ["--virtual-time-budget=20000", f"--screenshot={taken[-1]}"]
            url = f"http://127.0.0.1:{port}/#{page}"
            subprocess.run([browser, *options, url], check=True, stderr=subprocess.DEVNULL, timeout=120)
    finally:
        server.terminate()
        server.wait(timeout=30)
    return taken


def main() -> None:
    """What the command line calls."""
    parser = argparse.ArgumentParser(description="Train two runs and take pictures of TensorBoard's pages.")
    parser.add_argument("directory", type=Path, help="for runs and pictures; runs that are there are not made again")
    directory = parser.parse_args().directory
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        parser.error("no chromium or google-chrome on the path. Install one, e.g. apt-get install chromium.")
    for name, overrides in {"default": [], "planted": PLANTED}.items():
        run = directory / name
        if not (run / "result.json").is_file():
            command = [sys.executable, "-m", "recipes.train", *overrides, f"hydra.run.dir={run.resolve()}"]
            subprocess.run(command, check=True)
        for picture in photograph(run, directory / f"{name}_pictures", browser):
            print(picture)


if __name__ == "__main__":
    main()
