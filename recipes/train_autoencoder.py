"""Train a small autoencoder for latent diffusion: `python -m recipes.train_autoencoder data=NAME [key=value]`.

Squared error and a KL term, nothing else: right for digits and other small images, and to try latent diffusion end to
end. Photographs want perceptual and adversarial losses and weeks of a GPU: take one of diffusers' AutoencoderKL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes import command_line, resume
from recipes.autoencoder import Autoencoder
from recipes.checks import check_batches
from recipes.config import ConfigError, build, check_targets, fail, plain, refusals
from recipes.data import DataModule
from recipes.first_step import check_optimizer
from recipes.images import image_grid
from recipes.loading import Batch
from recipes.places import check_writable
from recipes.progress import ProgressLine
from recipes.randomness import TRAINING, keyed_generator
from recipes.settings import run_problems
from recipes.train import quiet


class AutoencoderModule(L.LightningModule):
    """Reconstruct images from latents drawn from their posterior.

        loss = mean (decoded - image)^2 + kl_weight · mean over latents of KL(posterior, standard normal)

    Args:
        net: The autoencoder.
        optimizer: Takes the parameters, returns an optimizer.
        kl_weight: Keeps latents near the origin and its neighbourhood meaningful. Small: the diffusion model takes
            care of the distribution (Rombach et al. 2022).
        seed: Of the draws, which are a function of (seed, rank, epoch, batch).

    Example:
        >>> from functools import partial
        >>> module = AutoencoderModule(Autoencoder(1, 2), partial(torch.optim.AdamW, lr=2e-3))
    """

    def __init__(
        self,
        net: Autoencoder,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        kl_weight: float = 1e-4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.net = net
        self.kl_weight = kl_weight
        self.seed = seed
        self.make_optimizer = optimizer
        self._totals = torch.zeros(2)

    def configure_optimizers(self) -> Optimizer:
        """One optimizer over all parameters."""
        return self.make_optimizer(self.parameters())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, a fp32 scalar."""
        images = batch["image"]
        mean, std = (part.float() for part in self.net.encode(images))  # fp32, whatever the network computes in
        key = (TRAINING, self.seed, self.global_rank, self.current_epoch, batch_idx)
        noise = torch.randn(mean.shape, generator=keyed_generator(*key, device=images.device), device=images.device)
        error = (self.net.decode(mean + std * noise).float() - images).square().mean()
        kl = (mean.square() + std.square() - 1).mean() / 2 - std.log().mean()
        self.log("train/error", error.detach(), prog_bar=True)
        self.log("train/kl", kl.detach())
        return error + self.kl_weight * kl

    def on_validation_epoch_start(self) -> None:
        """Start a new mean."""
        self._totals = torch.zeros(2, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up the squared error of images decoded from the posterior's mean; show some."""
        images = batch["image"]
        decoded = self.net.decode(self.net.encode(images)[0]).float()
        errors = (decoded - images).square().flatten(1).mean(dim=1)  # (batch,), fp32
        self._totals += torch.stack([errors.sum(), errors.new_full((), len(errors))])
        if batch_idx == 0 and self.trainer.is_global_zero and not self.trainer.sanity_checking:
            pairs = torch.stack([images[:8], decoded[:8]], dim=1).flatten(0, 1)
            for logger in self.trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image("reconstructions", image_grid(pairs, 8), self.trainer.global_step)

    def on_validation_epoch_end(self) -> None:
        """Log the exact mean over the validation set, however ranks and batches share it."""
        total, count = self.trainer.strategy.reduce(self._totals, reduce_op="sum")
        self.log("val/error", total / count, prog_bar=True)


@torch.no_grad()
def latent_std(net: Autoencoder, data: DataModule, device: torch.device, at_most: int = 10_000) -> float:
    """Standard deviation of all latents of the first training images, draws from the posterior included.

    Var z = E[mean²] + E[std²] - E[mean]²; in float64.

    Args:
        net: Trained, fp32.
        data: Set up.
        device: Where to compute; `net` is moved there.
        at_most: Images.
    """
    net.to(device).eval()
    sums, count = torch.zeros(2, dtype=torch.float64, device=device), 0
    rows = min(at_most, len(data.train))  # type: ignore[arg-type]
    for first in range(0, rows, 64):
        images = torch.stack([data.train[row]["image"] for row in range(first, min(first + 64, rows))])
        mean, std = (part.double() for part in net.encode(images.to(device)))
        sums += torch.stack([mean.sum(), (mean.square() + std.square()).sum()])
        count += mean.numel()
    total, squares = sums.tolist()
    return math.sqrt(squares / count - (total / count) ** 2)


def train_autoencoder(config: dict[str, Any]) -> tuple[L.Trainer, Path]:
    """Build, fit, scale, save.

    Args:
        config: Plain containers; the keys stand in `conf/train_autoencoder.yaml`.

    Returns:
        The trainer after `fit`, and the directory that `recipes.encode` takes.

    Raises:
        ConfigError: Before anything is trained.
    """
    check_targets(config)
    if problems := run_problems(config):
        raise ConfigError(*problems)
    if config["output"] is None:
        raise ConfigError("output is missing. Write output=PATH, a directory for the autoencoder.")
    output = Path(to_absolute_path(config["output"]))
    check_writable("output", output)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(
            f"output={output} is not empty. Latents are worth nothing without the autoencoder that made them: choose "
            "another output, or remove that directory."
        )
    L.seed_everything(config["seed"], workers=True)
    data = build(config, "data")
    data.setup("fit")
    net = build(config, "model")
    if not isinstance(net, Autoencoder):
        raise ConfigError(f"model={type(net).__name__} is no autoencoder. Write model._target_=recipes.autoencoder....")
    with refusals(config, "model"):
        try:
            shape = net.decode(net.encode(torch.zeros(1, *data.image_shape))[0]).shape
        except RuntimeError as error:
            raise ValueError(f"it cannot take images of shape {list(data.image_shape)}: {error}") from error
        if shape[1:] != torch.Size(data.image_shape):
            raise ValueError(f"images of shape {list(data.image_shape)} come out as {list(shape[1:])}.")
    module = AutoencoderModule(net, build(config, "optimizer"), config["kl_weight"], config["seed"])
    trainer = build(
        config,
        "trainer",
        plugins=build(config, "precision"),
        logger=resume.logger_of(config, None, None, Path()) or False,
        callbacks=ProgressLine(),
        enable_checkpointing=False,
    )
    check_optimizer(config, module, module.make_optimizer, device=trainer.strategy.root_device)
    data.overfit(trainer)
    check_batches(trainer, data, config["trainer"])
    trainer.fit(module, datamodule=data)
    std = latent_std(net, data, trainer.strategy.root_device)
    if not 0 < std < math.inf:
        raise ConfigError(f"the latents' standard deviation is {std}: nothing was learned. Lower optimizer.lr.")
    net.config["scaling_factor"] = 1 / std
    if trainer.is_global_zero:
        net.save(output)
    return trainer, output


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="train_autoencoder")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    try:
        with quiet():
            trainer, output = train_autoencoder(plain(cfg))
    except (ConfigError, MisconfigurationException) as refused:
        fail(refused)
    if trainer.is_global_zero:
        error = trainer.callback_metrics.get("val/error")
        print(f"steps            {trainer.global_step}")
        print(f"squared error    {'not measured: no validation ran' if error is None else f'{float(error):.5f}'}")
        print(f"autoencoder      {output}")
        name = HydraConfig.get().runtime.choices["data"]
        print(f"to encode        python -m recipes.encode data={name} autoencoder={output}")


if __name__ == "__main__":
    command_line.run(main, "train_autoencoder")
