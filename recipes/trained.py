"""A trained network out of a checkpoint: which file, which of its weights, which sampler.

Why it exists: `recipes.sample`, `recipes.evaluate` and `recipes.export` ask the same questions, and must give the same
answers and the same refusals. It leaves out resuming (`recipes.resume`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_object, to_absolute_path
from torch import Tensor, nn

from lightning_mixprec.posthoc import reconstruct
from lightning_mixprec.profiles import gamma_of, in_words
from lightning_mixprec.snapshots import Snapshot, read_snapshots
from recipes.config import ConfigError, build, check_targets, did_you_mean, refusals
from recipes.denoising import Objective, clip_bounded_images_alone
from recipes.places import device_of
from recipes.resume import newest_of, read, refuse_folder
from recipes.sampler import Sampler, check_guidance

State = dict[str, Tensor]


@dataclass
class Trained:
    """What a checkpoint brings.

    Args:
        path: The file.
        checkpoint: As saved.
        weights: Which of them, for file names and tables: `averaged`, `posthoc0.07`.
        state: State dict of the network alone, fp32, on the CPU.
    """

    path: Path
    checkpoint: dict[str, Any]
    weights: str
    state: State

    @property
    def recipe(self) -> dict[str, Any]:
        """Configuration of the run, plain."""
        return self.checkpoint["recipe"]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.checkpoint["global_step"]

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.path.parent.parent

    def build(self) -> tuple[Any, Objective, Any]:
        """Network (without its weights), objective and data module, as configured in the run."""
        parts = ("model", "objective", "data")
        check_targets({part: self.recipe[part] for part in parts})  # a class of the user's own may be out of reach
        net, objective, data = (build(self.recipe, part) for part in parts)
        clip_bounded_images_alone(objective, self.recipe["objective"], data)
        return net, objective, data

    def made_for(self, data: Any) -> tuple[tuple[int, ...], int]:
        """Shape of the images and number of classes, of which the images themselves need not be there.

        Args:
            data: Asked where the checkpoint does not say.
        """
        saved = self.checkpoint
        if "image_shape" not in saved:
            return data.image_shape, data.num_classes
        return tuple(saved["image_shape"]), saved["num_classes"]

    def network(self, net: nn.Module, state: State, device: str | None) -> nn.Module:
        """The network with weights, for evaluation, on the device that was asked for; null: cuda if there is one."""
        try:
            net.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(f"ckpt_path={self.path} does not fit its own model: {error}") from error
        return net.to(device_of(device)).eval()


def open_checkpoint(config: dict[str, Any]) -> Trained:
    """The checkpoint and the weights that a command line asks for: `ckpt_path`, `weights` and `sigma_rel`.

    Its configuration says where its data were; `data` says where they are now.

    Of `weights`, None are the averaged ones, or the raw ones where the run has no average, which is said.

    Raises:
        ConfigError: With what there is instead.
    """
    path = checkpoint_path(config["ckpt_path"])
    checkpoint = read(path)
    if "recipe" not in checkpoint:
        raise ConfigError(f"ckpt_path={path} has no entry 'recipe'. Give a checkpoint that recipes.train wrote.")
    moved = RunData(**{key: value for key, value in config["data"].items() if key != "_target_"})
    checkpoint["recipe"]["data"] |= {key: value for key, value in asdict(moved).items() if value is not None}
    check_targets({"data": checkpoint["recipe"]["data"]})
    choice = config["weights"]
    if choice is None:
        choice = "averaged" if "averaged_state_dict" in checkpoint else "raw"
        if choice == "raw":
            print(f"weights=raw: {path} was trained with ema=none and has no averages")
    sigma_rel = None if config["sigma_rel"] is None else number(config, "sigma_rel")
    state = weights_of(checkpoint, choice, path, sigma_rel)
    return Trained(path, checkpoint, f"{choice}{sigma_rel:g}" if choice == "posthoc" else choice, state)


def checkpoint_path(given: str | None) -> Path:
    """The file that `ckpt_path` means: a path, or `last` for the newest `last.ckpt` under outputs/, of sweeps too."""
    if given == "last":
        newest = newest_of(*Path(to_absolute_path("outputs")).glob("*"))
        if newest is None:
            raise ConfigError(
                f"ckpt_path=last: looked for {to_absolute_path('outputs')}/*/*/checkpoints/last.ckpt and found none. "
                "Give the path of a checkpoint, or train first: python -m recipes.train."
            )
        return newest
    if given is None:
        raise ConfigError("ckpt_path is missing. Write ckpt_path=PATH, or ckpt_path=last for the newest checkpoint.")
    path = Path(to_absolute_path(str(given)))
    refuse_folder(str(given), path)
    if not path.is_file():
        raise ConfigError(
            f"ckpt_path={given}: there is no file {path}. Write ckpt_path=last for the newest checkpoint."
        )
    return path


def guidance_of(config: dict[str, Any], objective: Objective, net: nn.Module) -> float:
    """The number `guidance`, for which the network must have been trained."""
    guidance = number(config, "guidance")
    try:
        check_guidance(guidance, objective, int(net.null_label))  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return guidance


def weights_of(checkpoint: dict[str, Any], choice: str, path: Path, sigma_rel: float | None = None) -> State:
    """State dict of the network alone, fp32.

    Args:
        checkpoint: Of `recipes.train`.
        choice: `averaged`, `raw`, the name of a profile of the run, or `posthoc`.
        path: Of the checkpoint, beside whose folder the snapshots of its run are.
        sigma_rel: With `posthoc`, the width of the average.
    """
    first = [*checkpoint.get("averaged_profiles", {})][:1]  # the one that validates
    profiles: dict[str, State] = dict.fromkeys(first, checkpoint.get("averaged_state_dict", {}))
    profiles |= checkpoint.get("averaged_state_dicts", {})
    choices = ["averaged", "raw", *profiles, "posthoc"]
    if choice not in choices:
        raise ConfigError(
            f"weights={choice} is unknown.{did_you_mean(str(choice), choices)} Choices: {', '.join(choices)}."
        )
    if sigma_rel is not None and choice != "posthoc":
        raise ConfigError(f"sigma_rel={sigma_rel} is for weights=posthoc, and weights={choice}. Leave one of them out.")
    if choice != "raw" and "averaged_state_dict" not in checkpoint:
        raise ConfigError(f"weights={choice}: {path} was trained with ema=none and has none. Write weights=raw.")
    if choice == "posthoc":
        averages = posthoc(checkpoint, path, sigma_rel)
    else:
        averages = {"averaged": checkpoint.get("averaged_state_dict", {}), "raw": {}, **profiles}[choice]
    state = checkpoint["state_dict"] | averages  # averages cover trained parameters only
    return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}


def posthoc(checkpoint: dict[str, Any], path: Path, sigma_rel: float | None) -> State:
    """An average of any length until the step of the checkpoint, from its own and from the snapshots of its run."""
    if sigma_rel is None:
        raise ConfigError("weights=posthoc: which length? Write sigma_rel=NUMBER, such as sigma_rel=0.07.")
    try:
        gamma_of(sigma_rel)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    described = checkpoint.get("averaged_profiles", {})
    widths = {name: each["sigma_rel"] for name, each in described.items() if each["profile"] == "PowerFunction"}
    if not widths:
        raise ConfigError(
            f"weights=posthoc needs power-function averages; {path} has {in_words(described) or 'a constant decay'}. "
            "Train with ema=power, or write weights=averaged."
        )
    states: dict[str, dict[str, Any]] = checkpoint["callbacks"]
    saved = next(state for name, state in states.items() if "MasterWeightAveraging" in name)
    now = saved["n_averaged"]
    directory = path.parent.parent / "snapshots"  # of this very run, wherever it was moved
    if not directory.is_dir():  # it was given another place for them, or its checkpoints were
        directory = Path(saved.get("snapshot_dir", directory))
    averages = checkpoint["averaged_state_dicts"]
    snapshots = [Snapshot(now, width, lambda name=name: averages[name]) for name, width in widths.items()]  # type: ignore[misc]
    snapshots += [each for each in read_snapshots(directory, until=now) if each.n_averaged < now]
    try:
        average, distance = reconstruct(snapshots, sigma_rel)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"reconstructed    sigma_rel={sigma_rel} from {len(snapshots)} averages, profile within {distance:.1%}")
    return average


@dataclass(frozen=True)
class RunData:
    """Stands for the data of the run that a checkpoint comes from, which may have been moved since.

    Args:
        directory: In place of the run's.
        shards: In place of the run's.
        val_shards: In place of the run's.
        autoencoder: In place of the run's.

    Example:
        >>> RunData(directory="elsewhere").shards is None
        True
    """

    directory: str | None = None
    shards: str | list[str] | None = None
    val_shards: str | list[str] | None = None
    autoencoder: str | None = None


@dataclass(frozen=True)
class RunSampler:
    """Stands for the sampler of the run that a checkpoint comes from: `sampler=run`.

    Args:
        steps: In place of the run's.

    Example:
        >>> RunSampler(steps=10).steps
        10
    """

    steps: int | None = None

    def check(self, objective: Objective) -> None:
        """Refuse to be used where there is no checkpoint yet."""
        raise ValueError("sampler=run is for recipes.sample and recipes.evaluate, which have a checkpoint.")


def sampler_of(config: dict[str, Any], trained: Trained, objective: Objective) -> tuple[Sampler, str]:
    """The sampler of the command line, or else the run's own, with `sampler.steps` if it is given; and its name.

    Raises:
        ConfigError: If it cannot be built, or the objective cannot be sampled with it.
    """
    node = config["sampler"]
    if get_object(node["_target_"]) is RunSampler:
        node = trained.recipe["sampler"] | {key: node[key] for key in ("steps",) if node.get(key) is not None}
    with refusals({"sampler": node}, "sampler"):
        sampler: Sampler = build({"sampler": node}, "sampler")
        sampler.check(objective)
    return sampler, solver_name(
        sampler, {key: value for key, value in node.items() if key not in ("_target_", "steps")}
    )


def solver_name(sampler: Sampler, arguments: dict[str, Any]) -> str:
    """What names of files say of a sampler: its class, its steps, and what else it was given.

    Example:
        >>> from recipes.sampler import HeunSampler
        >>> solver_name(HeunSampler(steps=18), {}), solver_name(HeunSampler(steps=5), {"churn": 0.3, "ends": [1, 2]})
        ('heun18', 'heun5_churn0.3_ends1-2')
    """
    given = [f"{key}{re.sub(r'[^0-9A-Za-z.]+', '-', str(value)).strip('-')}" for key, value in arguments.items()]
    return "_".join([f"{type(sampler).__name__.removesuffix('Sampler').lower()}{sampler.steps}", *given])


def result_name(trained: Trained, solver: str, guidance: float, seed: int) -> str:
    """Name of what was drawn or measured, without a suffix: another sampler does not overwrite it.

    Example:
        >>> trained = Trained(Path("run/checkpoints/last.ckpt"), {}, "averaged", {})
        >>> result_name(trained, "heun18", guidance=1.5, seed=0)
        'last_averaged_heun18_guidance1.5_seed0'
    """
    return f"{trained.path.stem}_{trained.weights}_{solver}_guidance{guidance:g}_seed{seed}"


def whole_number(config: dict[str, Any], key: str, least: int) -> int:
    """A count from the command line.

    Raises:
        ConfigError: If it is none, or too small.
    """
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={value} must be a whole number of at least {least}.")
    return value


def number(config: dict[str, Any], key: str) -> float:
    """A number from the command line.

    Raises:
        ConfigError: If it is none.
    """
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{key}={value} must be a number.")
    return float(value)
