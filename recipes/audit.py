"""Find the layers of a recipe that 16 bits would break, before training: `python -m recipes.audit [key=value]`.

The network is trained for a few steps in fp32 on real batches, because an untrained one whose last layer is zero has
no gradients, and then audited (`lightning_mixprec.audit`). The policy that comes out is written as an option of the
group `precision`, beside a text for TensorBoard. It leaves out what training adds: loaders' workers, several devices.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig
from rich.console import Console

from lightning_mixprec import MasterWeightPrecision, audit
from lightning_mixprec.audit_result import Audit
from recipes import command_line, resume
from recipes.audit_report import show
from recipes.checks import check_model
from recipes.config import ConfigError, build, check_targets, fail, plain, refusals
from recipes.diffusion import DiffusionModule
from recipes.first_step import check_optimizer
from recipes.places import device_of
from recipes.settings import seed_problems

OPTION = "policy"
"""Name of the option that is written: `precision=policy`."""


def audit_recipe(config: dict[str, Any], output_dir: Path) -> Audit:
    """Build what the configuration names, train it for a few steps, audit it, and write what was found.

    Args:
        config: Plain containers; the keys stand in `conf/audit.yaml`.
        output_dir: The run's directory.

    Raises:
        ConfigError: Before anything is computed.
    """
    check_targets(config)
    if problems := seed_problems(config):
        raise ConfigError(*problems)
    for key, least in (("steps", 0), ("batches", 1), ("samples", 1)):
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < least:
            raise ConfigError(f"{key}={config[key]} must be a whole number, at least {least}.")
    plugin = build(config, "precision")
    if plugin.policy.compute == "fp32":
        raise ConfigError("precision=fp32 loses nothing to 16 bits. Write precision=fp16 or precision=bf16.")
    L.seed_everything(config["seed"], verbose=False)
    make_optimizer = build(config, "optimizer")
    module = DiffusionModule(
        net=build(config, "model"), objective=build(config, "objective"), optimizer=make_optimizer, seed=config["seed"]
    )
    module.to(device_of(config["device"]))
    try:
        plugin.policy.resolve(module)
    except ValueError as error:
        raise ConfigError(f"precision.policy: {error}") from error
    check_optimizer(config, module, make_optimizer, device=module.device)
    optimizer = module.make_optimizer()

    data = build(config, "data")
    with refusals(config, "data"):
        data.setup("fit")
    check_model(config, module, data.image_shape, data.num_classes)
    if not data.steps_per_epoch:
        raise ConfigError(
            f"data.batch_size={data.batch_size}: {len(data.train)} training samples do not fill one batch. "
            f"Choose data.batch_size <= {len(data.train)}."
        )
    loader = itertools.chain.from_iterable(itertools.repeat(data.train_dataloader()))
    needed = itertools.islice(loader, config["steps"] + config["batches"])
    batches = [module.transfer_batch_to_device(batch, module.device, 0) for batch in needed]
    for index, batch in enumerate(batches[: config["steps"]]):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        optimizer.step()

    found = audit(
        module,
        batches[config["steps"] :],
        policy=plugin.policy,
        loss_scale=plugin.loss_scale,
        optimizer=make_optimizer,
        samples=config["samples"],
    )
    write(found, config, output_dir, plugin)
    return found


def write(found: Audit, config: dict[str, Any], output_dir: Path, plugin: MasterWeightPrecision) -> None:
    """Keep the policy where `--config-dir` finds it, and the table where TensorBoard does."""
    path = output_dir / "precision" / f"{OPTION}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found.to_yaml(plugin.masters, fallback="raise" if plugin.fallback == "raise" else "auto"))
    for logger in resume.logger_of(config, None, None, output_dir):
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("audit", found.to_markdown())
            logger.finalize("success")


def command(output_dir: Path, overrides: list[str], search_path: Sequence[str] = ()) -> str:
    """The command line that trains what was audited with what was found.

    Args:
        output_dir: Of the audit; it takes the place of `--config-dir`, of which Hydra knows one.
        overrides: Of the audit.
        search_path: Where else the audit looked for options, such as `file:///home/me/conf`.
    """
    own = ("steps=", "batches=", "samples=", "device=", "precision=", "precision.")
    kept = [line for line in overrides if not line.lstrip("+~").startswith(own)]
    if search_path:
        kept.append(f"hydra.searchpath=[{','.join(search_path)}]")
    return shlex.join(["python", "-m", "recipes.train", "--config-dir", str(output_dir), f"precision={OPTION}", *kept])


def searched() -> list[str]:
    """Where this audit looks for options beside the program's own: `--config-dir` and `hydra.searchpath`."""
    directory = get_args_parser().parse_intermixed_args(sys.argv[1:]).config_dir
    typed = [f"file://{Path(directory).absolute()}"] if directory else []
    return [*typed, *HydraConfig.get().searchpath]


@hydra.main(version_base="1.3", config_path=str(command_line.CONF), config_name="audit")
def main(cfg: DictConfig) -> None:
    """What Hydra calls."""
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        found = audit_recipe(plain(cfg), output_dir)
    except ConfigError as error:
        fail(error)
    show(found, Console())
    print(f"policy           {output_dir / 'precision' / f'{OPTION}.yaml'}")
    print(f"to train with it {command(output_dir, list(HydraConfig.get().overrides.task), searched())}")


if __name__ == "__main__":
    command_line.run(main, "audit")
