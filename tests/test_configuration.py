"""What is written wrong, on the command line or in a file, is said before anything runs: all of it, and what to write.

Also what stands in for a run: dry runs of every experiment, and the list of them.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from few_digits import FEW
from test_recipes import ROOT, TINY, cli
from torch import nn

from lightning_mixprec import ConstantDecay, MasterWeightAveraging, MasterWeightPrecision, PrecisionPolicy
from recipes import audit, benchmark, encode, experiments, memory, sample, train_autoencoder
from recipes.averages import check_average
from recipes.checks import check_model
from recipes.config import ConfigError, build, build_all, check_targets
from recipes.data import DataModule
from recipes.diffusion import DiffusionModule
from recipes.first_step import check_optimizer
from recipes.hints import mismatch
from recipes.objective import EDM, FlowMatching
from recipes.run_length import RunLength
from recipes.sample_checks import check_samples, check_sigma_data
from recipes.settings import mode_problems, monitor_problems
from recipes.signatures import problems_in, signature_of

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], directory: Path, *arguments: str
) -> list[str]:
    """The problems that a command line is refused with, one by one."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr("lightning.Trainer.fit", lambda *args, **kwargs: pytest.fail("it trains"))
    assert cli(monkeypatch, *arguments) == 2
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert not [*directory.rglob("events.out.*"), *directory.rglob("*.ckpt")]
    message = shown.err[shown.err.index("error: ") + len("error: ") :].strip()
    if not (count := re.match(r"(\d+) things are wrong:\n", message)):
        return [message]
    problems = re.split(r"\n(?=\d+\. )", message[count.end() :])
    assert len(problems) == int(count[1])
    return [problem.partition(". ")[2] for problem in problems]


def experiment(directory: Path, text: str, name: str = "planted") -> list[str]:
    """An experiment in a file of its own, and how it is chosen."""
    path = directory / "conf" / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return ["--config-dir", str(directory / "conf"), f"experiment={name}"]


# Everything in one go


def test_all_mistakes_of_a_command_line_are_shown_together(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mistakes = {
        "precision=fp61": "there is no precision 'fp61'. Did you mean 'fp16'?",
        "trianer.max_steps=3": "unknown key 'trianer'. Did you mean 'trainer'?",
        "trainer.max_stpes=3": "unknown key 'trainer.max_stpes'. Did you mean 'max_steps'",
        "optimizer.lr=fast": "optimizer.lr=fast: torch.optim.AdamW takes a number.",
        "+objective.sigma_dta=1": "unknown key 'objective.sigma_dta'. Did you mean 'sigma_data'",
        "data.batch_size=12.5": "data.batch_size=12.5: recipes.data.DigitsDataModule takes a whole number.",
        "optimizer.betas=[0.9]": "optimizer.betas=[0.9]: torch.optim.AdamW takes a list of 2.",
        "dry_run=maybe": "dry_run=maybe: takes true or false or 'meta'.",
        "seed=x": "seed=x: takes a whole number.",
        "scheduler.start_factor=[": "scheduler.start_factor=[: ",
        "callbacks.mine.colour=red": "unknown key 'callbacks.mine'.",
        "hydra.run.dri=x": "unknown key 'hydra.run.dri'. Did you mean 'dir'?",
    }
    problems = refused(monkeypatch, capfd, tmp_path, *mistakes)
    assert len(problems) == len(mistakes), problems
    for text in mistakes.values():
        assert sum(text in problem for problem in problems) == 1, (text, problems)


def test_all_mistakes_of_an_experiment_file_are_shown_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = experiment(
        tmp_path,
        """# @package _global_
# Planted.
defaults:
  - digits_unte
  - override /modle: unet_tiny
  - override /objective: edmm
trainer:
  max_stpes: 5
  log_every_n_steps: often
sede: 3
optimizer:
  betas: 0.9
callbacks:
  best:
    monitr: val/loss
  mine: {colour: red}
ema:
  deecay: 0.9
data:
  batch_size: ${sead}
""",
    )
    problems = refused(monkeypatch, capfd, tmp_path, *chosen, "sampler.steps=many")
    expected = [
        "defaults has 'experiment/digits_unte', and there is no such file. Did you mean 'digits_unet'",
        "there is no group 'modle'. Did you mean 'model'",
        "there is no objective 'edmm'. Did you mean 'edm'",
        "unknown key 'trainer.max_stpes'. Did you mean 'max_steps'",
        "trainer.log_every_n_steps=often: lightning.Trainer takes a whole number.",
        "unknown key 'sede'. Did you mean 'seed'",
        "optimizer.betas=0.9: torch.optim.AdamW takes a list.",
        "unknown key 'callbacks.best.monitr'. Did you mean 'monitor'",
        "unknown key 'callbacks.mine.colour'",
        "unknown key 'ema.deecay'. Did you mean 'decay'",
        "data.batch_size=${sead}: Interpolation key 'sead' not found",
    ]
    for text in expected:
        (problem,) = [problem for problem in problems if text in problem]
        assert "conf/experiment/planted.yaml" in problem
    (typed,) = set(problems) - {problem for problem in problems if any(text in problem for text in expected)}
    assert typed.startswith("sampler.steps=many: recipes.sampler.HeunSampler takes a whole number.")
    assert "planted.yaml" not in typed


def test_an_experiment_of_the_wrong_package_is_told_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    problems = refused(monkeypatch, capfd, tmp_path, *experiment(tmp_path, "seed: 3\n"))
    assert "'# @package _global_'" in "".join(problems)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# @package _global_\nseed: [\n", "experiment/planted.yaml is no YAML"),
        ("# @package _global_\nseed: 1\nseed: 2\n", "duplicate key seed"),
        ("# @package _global_\ndefaults:\n  - planted\n", "which is made of this file itself"),
    ],
)
def test_files_that_cannot_be_read_are_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    assert expected in "".join(refused(monkeypatch, capfd, tmp_path, *experiment(tmp_path, text)))


MISSING = {
    "scheduler._target_=torch.optim.lr_scheduler.StepLR ~scheduler.start_factor ~scheduler.total_iters": [
        "scheduler.step_size is missing: torch.optim.lr_scheduler.StepLR has no default.",
        "Write scheduler.step_size=VALUE, a whole number.",
    ],
    "~model.in_channels ~model.num_classes": ["model.in_channels is missing", "model.num_classes is missing"],
    "data.batch_size=??? optimizer.lr=???": ["data.batch_size is missing", "optimizer.lr is missing"],
    "~model ~optimizer": ["model is missing", "optimizer is missing"],
    "data=null": ["a group takes the name of an option. Choices: "],
    "model=5": ["there is no model '5'"],
    "callbacks.speed=5": ["callbacks.speed=5 builds nothing"],
    "model._target_=recipes.unet.Unet": ["cannot be imported", "Did you mean 'UNet'?"],
    "model._target_=myne.Net": [
        "No module named 'myne'. A file of your own is looked for in the folder where",
        "PYTHONPATH",
    ],
    "strategy.find_unused_parameters=true": ["unknown key 'strategy.find_unused_parameters'"],
    "experiment=digits_unte": ["there is no experiment 'digits_unte'. Did you mean 'digits_unet'"],
    "--config-dir nowhere": ["--config-dir nowhere: there is no such directory"],
    "--config-name trian": ["--config-name trian: there is no file"],
    "model=diffusers_unet2d model.block_out_chanels=[8]": ["Did you mean 'block_out_channels'"],
    "resume=always": ["resume=always: takes 'auto'."],
    "+experiment=digits_flow": ["+experiment=digits_flow: one is chosen already. Write experiment=digits_flow."],
    "++precision=fp32": ["++precision=fp32: one is chosen already. Write precision=fp32."],
    "~experiment": ["~experiment: there must be an experiment.", "Write experiment=NAME."],
    "model=[unet_tiny,dit_tiny]": ["Choose one: model=unet_tiny; to try all, -m model=unet_tiny,dit_tiny."],
    "-m optimizer.lr=interval(1e-4,1e-2)": ["draws from no interval", "optimizer.lr=0.0001,0.01"],
    "-m hydra/launcher=joblib seed=0,1": [
        "there is no hydra/launcher 'joblib'",
        "such as hydra-joblib-launcher",
    ],
    "-m seed=0,1 hydra.sweep.subdir=same": ["all 2 jobs would write there", "hydra.job.num"],
    "optimizer._partial_=false": ["optimizer.params is missing", "Write optimizer._partial_=true"],
    "optimizer.lr=${oc.env:NOT_SET,0.1}": ["optimizer.lr=0.1", "'0.1' is text", "${oc.decode:${oc.env:NAME}}"],
    "precision.policy.fp32.0=conv_in": ["precision.policy.fp32.0=conv_in: ", "list index out of range"],
    "resume=auto callbacks.last.dirpath=elsewhere": ["no callback writes that. Leave callbacks.last as it is"],
    "resume=auto ~callbacks.last": ["no callback writes that"],
    "resume=auto ckpt_path=last": ["resume=auto chooses the checkpoint, and ckpt_path=last names one"],
    "model.block_out_channels=[12] objective.gamma=0 sampler.steps=0": [
        "block_out_channels=[12]",
        "objective.gamma=0: recipes.objective.EDM refused",
        "sampler.steps=0",
    ],
    "optimizer.lr=-1 scheduler.start_factor=2 model.num_classes=7": ["optimizer.lr=-1", "model has 7 classes"],
}


@pytest.mark.parametrize("line", MISSING)
def test_what_is_missing_or_builds_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    message = "\n".join(refused(monkeypatch, capfd, tmp_path, *line.split(), "trainer.accelerator=cpu"))
    assert all(text in message for text in MISSING[line]), message


def test_values_of_a_sweep_are_checked_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    problems = refused(monkeypatch, capfd, tmp_path, "-m", "optimizer.lr=1e-3,x", "model=unet_tiny,unet_tny")
    assert len(problems) == 2
    assert any("optimizer.lr=x" in problem for problem in problems)
    assert any("there is no model 'unet_tny'. Did you mean 'unet_tiny'" in problem for problem in problems)


# Numbers that are none, ranges, and what fails at the first step

IN_VAIN = {
    "objective.label_dropout=1": ["label_dropout=1 leaves no sample its label"],
    "objective.P_mean=100": ["objective.P_mean=100: at the time inf of training"],
    "objective.P_std=1000": ["objective.P_std=1000: at the time 0 of training"],
    "objective.sigma_max=1e30": ["objective.sigma_max=1e+30: at the time 1e+30 of sampling"],
    "scheduler=cosine scheduler.eta_min=1": ["eta_min=1 is above the learning rate, 0.002, which would rise to it"],
    "callbacks.best.monitor=train/loss trainer.val_check_interval=5 +callbacks.stop.monitor=train/loss_epoch "
    "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping": [
        "callbacks.best.monitor=train/loss is known after 10 batches, and looked at after 5. Write "
        "callbacks.best.monitor=val/loss, or callbacks.best.save_on_train_epoch_end=true",
        "callbacks.stop.monitor=train/loss_epoch is known after the 11 batches of an epoch, and looked at after 5",
    ],
    "callbacks.best.mode=max scheduler=plateau scheduler.mode=max": [
        "callbacks.best.mode=max takes the largest val/loss for the best. Write callbacks.best.mode=min",
        "scheduler.mode=max takes the largest val/loss",
    ],
    "dry_run=meta objective.sigma_max=1e30 objective.label_dropout=1 callbacks.samples.guidance=2": [
        "objective.sigma_max=1e+30, objective.label_dropout=1: at the time 1e+30 of sampling",
        "label_dropout=1 leaves no sample its label",
    ],
    "dry_run=meta objective.label_dropout=0 callbacks.samples.guidance=2": ["callbacks.samples.guidance=2 needs"],
    "callbacks.best.monitor=null": ["callbacks.last and callbacks.best save at the same times by the same metric"],
    "strategy=ddp strategy.process_group_backend=nccl": ["nccl: it connects GPUs, and this run computes on cpu. Write"],
    "resume=auto callbacks.last.save_weights_only=true": ["no state of the optimizer to go on with. Leave it out"],
    "data=synthetic data.image_size=8 data.channels=1 data.num_workers=50000": ["data.num_workers=50000: each is a"],
    "ema=power ema.snapshot_every=1 trainer.max_steps=2000000000000": [
        "2,000,000,000,000 snapshots of 0.00034 GB each are more than the",
    ],
    "callbacks.last.dirpath=/proc/a callbacks.samples.directory=/proc/b logger.save_dir=/proc/c": [
        "callbacks.last.dirpath=/proc/a: /proc cannot be written to",
        "callbacks.samples.directory=/proc/b: /proc cannot",
        "logger.save_dir=/proc/c: /proc cannot",
    ],
    "ema=power ema.snapshot_dir=/proc/a": ["ema.snapshot_dir=/proc/a: /proc cannot be written to"],
    "ckpt_path=.": ["ckpt_path=. is a directory. Write the path of a .ckpt file"],
    "data.directory=~/mine": [str(Path("~/mine").expanduser())],
    "trainer.gradient_clip_algorithm=value": ["clips nothing. Write trainer.gradient_clip_val as well"],
    "objective.gamma=3": ["objective.gamma=3 is not used: weighting is 'none'"],
    "callbacks.samples.guidance=2 objective.label_dropout=0": [
        "callbacks.samples.guidance=2 needs images without a label, and objective.label_dropout=0 left none",
    ],
    "objective=ddpm sampler=ddim objective.P_std=2": ["objective.P_std=2 is not used: density is 'uniform'"],
    "+callbacks.find._target_=lightning.pytorch.callbacks.BatchSizeFinder": ["BatchSizeFinder: data.batch_size is the"],
    "+callbacks.find._target_=lightning.pytorch.callbacks.LearningRateFinder": ["-m optimizer.lr=1e-4,1e-3,1e-2"],
    "+callbacks.mine._target_=torch.nn.Identity": ["gives a Identity, and callbacks.mine must be a lightning.Callback"],
    "logger._target_=torch.nn.Identity": ["gives a Identity, and logger must be a lightning.pytorch.loggers.Logger"],
    "objective.sigma_data=nan objective.P_std=nan objective.sigma_max=inf optimizer.lr=inf optimizer.betas=[nan,0.9] "
    "scheduler.start_factor=nan trainer.gradient_clip_val=-inf objective.gamma=inf callbacks.samples.guidance=nan": [
        "objective.sigma_data=nan: must be a finite number",
        "objective.P_std=nan: must",
        "objective.sigma_max=inf: must",
        "optimizer.lr=inf: must",
        "optimizer.betas.0=nan: must",
        "scheduler.start_factor=nan: must",
        "trainer.gradient_clip_val=-inf: must",
        "objective.gamma=inf: must",
        "callbacks.samples.guidance=nan: must",
    ],
    "trainer.max_steps=0 trainer.max_epochs=0 trainer.limit_train_batches=0 trainer.gradient_clip_val=-1 "
    "trainer.accumulate_grad_batches=0 trainer.log_every_n_steps=-1 trainer.max_time='0:00:00:00' seed=-1 "
    "scheduler.total_iters=0 callbacks.best.monitor=val/lss +ema.profiles.x=3": [
        "trainer.max_steps=0 trains nothing",
        "trainer.max_epochs=0 trains nothing",
        "trainer.limit_train_batches=0 trains nothing",
        "trainer.gradient_clip_val=-1 would clip nothing",
        "trainer.accumulate_grad_batches=0 must be the batches of one step, at least 1",
        "trainer.log_every_n_steps=-1",
        "trainer.max_time=0:00:00:00 must be a duration above 0, 'DD:HH:MM:SS'",
        "seed=-1",
        "scheduler.total_iters=0 must be a number of optimizer steps, at least 1",
        "callbacks.best.monitor=val/lss: nothing logs that. Did you mean 'val/loss'",
        "Write ~ema.decay",
    ],
    "dry_run=meta trainer.max_steps=-5 trainer.accumulate_grad_batches=-1 callbacks.best.monitor=val/lss": [
        "trainer.max_steps=-5",
        "trainer.accumulate_grad_batches=-1",
        "val/lss",
    ],
    "trainer.max_time=5 trainer.val_check_interval=true strategy=ddp strategy.find_unused_parameters=maybe "
    "strategy.static_graph=3 strategy.bucket_cap_mb=big strategy.timeout=5 strategy.find_unused=true": [
        "trainer.max_time=5: lightning.Trainer takes a duration, 'DD:HH:MM:SS'",
        "trainer.val_check_interval=True",
        "strategy.find_unused_parameters=maybe: lightning.pytorch.strategies.DDPStrategy takes true or false",
        "strategy.static_graph=3",
        "strategy.bucket_cap_mb=big",
        "strategy.timeout=5: lightning.pytorch.strategies.DDPStrategy takes a duration, {_target_: datetime.timedelta",
        "unknown key 'strategy.find_unused'",
    ],
    "trainer.enable_progress_bar=false trainer.enable_checkpointing=false": [
        "Write ~callbacks.progress",
        "Write ~callbacks.best ~callbacks.last",
    ],
    "data.seed=-1 model.layers_per_block=0 objective.rho=0": [
        "data.seed=-1: recipes.data.DigitsDataModule refused",
        "layers_per_block=0 must be at least 1",
        "objective.rho=0: recipes.objective.EDM refused: rho=0 must be positive and finite",
    ],
    "model.block_out_channels=[0,16]": ["block_out_channels=[0, 16]", "got [0]"],
    "model=dit_tiny model.depth=0": ["model.depth=0: recipes.dit.DiT refused"],
    "trainer.devices=2 trainer.use_distributed_sampler=true": ["Write trainer.use_distributed_sampler=false"],
    "trainer.limit_train_batches=0.001": ["that share of an epoch is no batch"],
    "trainer.val_check_interval=0.5": ["Write trainer.check_val_every_n_epoch=1 as well, or a number of batches"],
    "trainer.check_val_every_n_epoch=1": ["trainer.val_check_interval=100: an epoch has 11 batches", "=null to count"],
    "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping": [
        "add one of your own: +callbacks.stop._target_"
    ],
    "optimizer={_target_:torch.optim.RAdam,lr:0.1}": ["write optimizer._target_=torch.optim.RAdam, and each argument"],
    "trainer.min_steps=20 trainer.max_steps=12": ["trainer.min_steps=20: the run ends after 12 steps"],
    "trainer.min_epochs=3 trainer.max_steps=30": ["trainer.min_epochs=3: the run ends after 30 steps, and has 11"],
    "optimizer._target_=torch.optim.SparseAdam scheduler.total_iters=9": ["SparseAdam does not support dense"],
    "optimizer.differentiable=true": ["optimizer.differentiable=True: torch.optim.AdamW refused"],
    "ckpt_path=x=1.ckpt": ["ckpt_path=x=1.ckpt: mismatched", "\"ckpt_path='x=1.ckpt'\""],
}


@pytest.mark.parametrize("line", IN_VAIN)
def test_what_would_train_in_vain_or_end_in_a_traceback_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    problems = refused(monkeypatch, capfd, tmp_path, "model=unet_tiny", "trainer.accelerator=cpu", *line.split())
    for text in IN_VAIN[line]:
        assert sum(text in problem for problem in problems) == 1, (text, problems)


SCHEDULES = {
    "CosineAnnealingLR scheduler.T_max=0": "scheduler.T_max=0 must be a number of optimizer steps",
    "StepLR scheduler.step_size=0": "scheduler.step_size=0: .* at step 1 of 8",
    "OneCycleLR scheduler.max_lr=1 scheduler.total_steps=4": "total_steps=4: .* at step 5 of 8",
    "OneCycleLR scheduler.max_lr=1 scheduler.total_steps=7000 trainer.max_steps=8000": "at step 8000 of 8000",
    "ExponentialLR scheduler.gamma=-1": "at step 1 of 8 it sets the learning rate -0.002",
    "ReduceLROnPlateau": "none comes before the end of the run.*scheduler=warmup",
}


@pytest.mark.parametrize("line", SCHEDULES)
def test_a_schedule_that_the_run_outlives_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    options = ["model=unet_tiny", "trainer.accelerator=cpu", "~scheduler.start_factor", "~scheduler.total_iters"]
    steps = ["trainer.max_steps=8"] * ("max_steps" not in line)
    line = f"scheduler._target_=torch.optim.lr_scheduler.{line}"
    (problem,) = refused(monkeypatch, capfd, tmp_path, *options, *steps, *line.split())
    assert re.search(SCHEDULES[line.rpartition("lr_scheduler.")[2]], problem), problem


def test_a_schedule_as_long_as_the_run_is_taken_and_left_as_it_was() -> None:
    """Whole, in steps and by a jump; what is trained afterwards starts from its beginning."""
    net = nn.Linear(2, 2)
    before = [parameter.clone() for parameter in net.parameters()]
    make = torch.optim.lr_scheduler.OneCycleLR
    config = {"optimizer": {"_target_": "torch.optim.SGD"}, "scheduler": {"_target_": "OneCycleLR"}}
    for steps in (8, 3000):
        check_optimizer(
            config,
            net,
            partial(torch.optim.SGD, lr=0.1),
            partial(make, max_lr=0.1, total_steps=steps),
            torch.device("cpu"),
            RunLength(steps),
        )
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        (audit, "optimizer._target_=torch.optim.SparseAdam", "SparseAdam does not support dense"),
        (audit, "model.num_classes=7", "model has 7 classes, the data have 10"),
        (audit, "seed=-1", "seed=-1 must be a whole number from 0"),
        (train_autoencoder, "optimizer.differentiable=true", "optimizer.differentiable=True"),
        (train_autoencoder, "trainer.max_steps=0 seed=-1", "trainer.max_steps=0 trains nothing"),
        (train_autoencoder, "kl_weight=nan", "kl_weight=nan: must be a finite number"),
        (benchmark, "trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be"),
        (sample, "model=unet_tiny", "there is no model to choose here. Groups: sampler."),
        (audit, "model=unet_tiny device=nowhere", "device=nowhere cannot be used"),
        (encode, "device=nowhere autoencoder=x", "device=nowhere cannot be used"),
        (encode, "output=/proc/x autoencoder=x", "output=/proc/x: /proc cannot be written to"),
        (train_autoencoder, "output=/proc/x", "output=/proc/x: /proc cannot be written to"),
        (train_autoencoder, "output=null", "output is missing"),
        (train_autoencoder, "model._target_=recipes.unet.UNet output=x", "model.num_classes is missing"),
    ],
)
def test_the_other_programs_refuse_the_same(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    program: Any,
    line: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, *line.split(), program=program) == 2
    assert expected in capfd.readouterr().err


class Sized(DataModule):
    """Samples as somebody else would write them."""

    image_shape = (1, 8, 8)
    num_classes = 10

    def __init__(self, **changed: Any) -> None:
        super().__init__(batch_size=4)
        self.changed = changed

    def load(self) -> Any:
        """Of 100 samples in each split, the last of those that validate is another."""
        train, val = (
            {row: {"image": torch.full((1, 8, 8), -row / 100), "label": 9, "index": row} for row in range(100)}
            for _ in range(2)
        )
        changed = val[99] | self.changed
        val[99] = tuple(changed.values()) if changed["label"] == () else changed  # type: ignore[assignment]
        return {(0, row): sample for row, sample in train.items()}, val


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image": torch.zeros(1, 8, 8, dtype=torch.uint8)}, r"val\[99\] has an image that is torch.uint8"),
        (
            {"image": torch.zeros(3, 8, 8)},
            r"of shape \[3, 8, 8\]; it must be .*, of shape \[1, 8, 8\]",
        ),
        ({"label": 10}, "has the label 10; labels are 0 to 9"),
        ({"label": ()}, "is a tuple; it must be a dict of image, label and index"),
        ({"label": torch.tensor(3.0)}, r"has the label 3.0; it must be one whole number"),
        ({"index": 0}, r"val\[99\] has the index 0, as val\[0\] has; it must be the row"),
        ({"image": torch.full((1, 8, 8), 255.0)}, r"values up to 255; they must be in \[-1, 1\] \(recipes.data.from"),
        ({"image": torch.full((1, 8, 8), torch.nan)}, "values that are not finite"),
        ({}, ""),
    ],
)
def test_samples_of_ones_own_data_are_looked_at_before_training(changed: dict[str, Any], message: str) -> None:
    data = Sized(**changed)
    data.setup()
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_samples({"data": {"_target_": "mine.Sized"}}, data)


def test_images_from_0_to_1_and_another_spread_than_edms_are_said() -> None:
    """Of pixels between 0 and 1, half the range is never met; sigma_data is EDM's one number about the data."""
    data = Sized()
    data.setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = check_samples({"data": {"_target_": "mine.Sized"}}, data)
        check_sigma_data(EDM(sigma_data=float(images.std())), images)
        check_sigma_data(FlowMatching(), images)
    assert len(images) == 32
    for each in data.train.values():  # type: ignore[attr-defined]
        each["image"] = -each["image"]
    with pytest.warns(UserWarning, match=r"values from -?0 to 0.99, none below 0. Images are taken to be in"):
        images = check_samples({"data": {"_target_": "mine.Sized"}}, data)
    with pytest.warns(UserWarning, match=r"sigma_data=1.0: the standard deviation of 32 training images is 0.3"):
        check_sigma_data(EDM(sigma_data=1.0), images)


def test_training_that_diverges_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [
        "model=unet_tiny",
        *FEW,
        "precision=fp32",
        "trainer.accelerator=cpu",
        "~callbacks.samples",
        "logger=none",
    ]
    patience = "{_target_:lightning_mixprec.DynamicLossScaler,init_scale:1,max_consecutive_skips:3}"
    options += ["optimizer.lr=1e10", f"+precision.scaler={patience}", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *options) == 1
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    (line,) = (line for line in shown.err.splitlines() if line.startswith("error: "))
    assert "3 training batches in a row had non-finite gradients" in line
    assert "In a recipe these are optimizer.lr=NUMBER" in line


@pytest.mark.parametrize(("decay", "steps", "said"), [(0.9999, 400, "0.98"), (0.999, 1000, "0.992"), (0.98, 400, "")])
def test_an_average_that_is_longer_than_the_run_is_said_to_be(decay: float, steps: int, said: str) -> None:
    """openai/improved-diffusion#59: its samples are noise, whatever the network has learned."""
    weight, average = torch.ones(1), torch.zeros(1)  # trained, and not
    for _ in range(steps):
        average += (1 - decay) * (weight - average)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_average(MasterWeightAveraging(decay), steps)
        check_average(MasterWeightAveraging(profiles={"long": ConstantDecay(decay, warmup=True)}), steps)
        check_average(MasterWeightAveraging(decay), steps=12)
        check_average(None, steps)
    assert len(found) == bool(said)
    if said:
        message = str(found[0].message)
        assert f"ema.decay={decay}: after the {steps} steps of the run, {1 - float(average):.0%} of" in message
        assert f"a decay of at most {said}." in message


class Lonely(nn.Module):
    """A network of other recipes."""

    def forward(self, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"sample": images}


@pytest.mark.parametrize(("null_label", "message"), [(None, "has no attribute null_label"), (10, "returns a dict")])
def test_networks_of_ones_own_are_told_how_they_are_called(null_label: int | None, message: str) -> None:
    net: Any = Lonely()
    if null_label is not None:
        net.null_label = null_label
    module = DiffusionModule(net, EDM(), torch.optim.SGD)
    with pytest.raises(ConfigError, match=message):
        check_model({"model": {"_target_": "mine.Lonely"}}, module, (1, 8, 8), 10)


def test_limits_that_are_never_reached_and_metrics_of_other_callbacks_are_taken() -> None:
    progress = {"_target_": "recipes.progress.ProgressLine", "seconds": float("inf")}
    assert problems_in({"callbacks": {"progress": progress}}) == []
    best = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": "mine/score"}
    assert len(monitor_problems({"callbacks": {"best": best}})) == 1
    assert monitor_problems({"callbacks": {"best": best, "mine": {"_target_": "mine.Score"}}}) == []
    right = best | {"monitor": "val/accuracy"}
    assert mode_problems({"callbacks": {"best": right | {"mode": "max"}, "other": best | {"mode": "max"}}}) == []
    (problem,) = mode_problems({"callbacks": {"best": right}})
    assert problem.endswith("mode=min takes the least val/accuracy for the best. Write callbacks.best.mode=max.")
    raw = {"best": best | {"monitor": "val/loss_raw"}}
    assert len(monitor_problems({"callbacks": raw})) == 1
    assert monitor_problems({"callbacks": raw, "ema": {"decay": 0.9}}) == []


def test_a_learning_rate_of_0_is_said_to_train_nothing() -> None:
    with pytest.warns(UserWarning, match="optimizer.lr=0 leaves all weights as they are"):
        check_optimizer({"optimizer": {"_target_": "torch.optim.SGD"}}, nn.Linear(1, 1), partial(torch.optim.SGD, lr=0))


def test_optimizers_that_must_be_told_to_train_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free(torch.optim.SGD):
        training = False

        def train(self) -> None:
            self.training = True

        def step(self, closure: Any = None) -> Any:
            if not self.training:
                raise RuntimeError("not in train mode")
            return super().step(closure)

    config = {"optimizer": {"_target_": "Free", "_partial_": True}}
    check_optimizer(config, nn.Linear(2, 2), partial(Free, lr=0.1), device=torch.device("cpu"))
    monkeypatch.delattr(Free, "train")
    with pytest.raises(ConfigError, match="not in train mode"):
        check_optimizer(config, nn.Linear(2, 2), partial(Free, lr=0.1), device=torch.device("cpu"))


# Signatures


def test_targets_without_hints_or_signatures_are_left_to_themselves() -> None:
    assert signature_of("builtins.dict").takes_any
    assert mismatch("text", signature_of("datetime.timedelta").hints.get("days", Any)) == ""


def test_common_arguments_of_objectives_have_types() -> None:
    """Of a dataclass, whose fields are annotated in several modules."""
    for value in ({"weighting": "min_snrr"}, {"gamma": "x"}, {"prediction": "eps"}):
        with pytest.raises(ConfigError, match=next(iter(value))):
            check_targets({"objective": {"_target_": "recipes.objective.DDPM", **value}})
    check_targets({"objective": {"_target_": "recipes.objective.DDPM", "clip": None, "gamma": 3}})


def test_nothing_is_allowed_only_where_nothing_is_the_default() -> None:
    adamw = {"_target_": "torch.optim.AdamW", "_partial_": True}
    check_targets({"optimizer": adamw | {"foreach": None}})
    with pytest.raises(ConfigError, match=r"optimizer\.lr=None: torch\.optim\.AdamW takes a number"):
        check_targets({"optimizer": adamw | {"lr": None}})


def test_what_constructors_refuse_is_collected() -> None:
    config = {"model": {"_target_": "recipes.unet.UNet", "in_channels": 1, "num_classes": 1, "block_out_channels": []}}
    config |= {"objective": {"_target_": "recipes.objective.EDM", "gamma": 0}, "ema": None}
    with pytest.raises(ConfigError) as caught:
        build_all(config, ["model", "objective", "ema"])
    assert len(caught.value.problems) == 2


# Experiments


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_dry_runs_on_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Composes, validates and builds, for a cluster or not, without its data and without memory."""
    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, f"experiment={name}", "dry_run=meta", f"hydra.run.dir={tmp_path}/run") == 0
    shown = capfd.readouterr().out
    assert "trained parameters" in shown
    assert "default: output layer" in shown  # the precision table
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if line.endswith(("MB", "GB")))
    assert {"weights", "masters", "gradients", "optimizer", "activations", "total"} <= rows.keys()
    assert "unknown" not in shown
    assert not [*tmp_path.rglob("events.out.*"), *tmp_path.rglob("*.ckpt")]


def test_experiments_are_listed_with_their_purposes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "# @package _global_\n# What I want.\ndefaults:\n  - digits_dit\nmodel:\n  hidden_size: 32\n"
    mine = experiment(tmp_path, text, "mine")
    monkeypatch.setattr("sys.argv", ["experiments", *mine[:2]])
    experiments.main()
    shown = capfd.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    for name in EXPERIMENTS:
        purpose = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().splitlines()[1].removeprefix("# ")
        assert len(purpose) > 10
        assert " ".join([*rows[name].split(), *purpose.split()]) in " ".join(shown.split())
    assert f"{rows['mine']}\n    What I want." in shown
    assert "dit_tiny" in rows["mine"]
    assert rows["digits_unet"].endswith("0.65 M")
    assert rows["mine"].endswith("0.05 M")


def test_help_lists_experiments_with_their_purposes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli(monkeypatch, "--help") == 0
    shown = capfd.readouterr().out
    assert re.search(r"digits_flow *: Flow matching on the digits", shown)
    assert "precision: bf16, fp16, fp32" in shown
    assert max(map(len, shown.splitlines())) <= 100
    words = shown.split()
    assert {"imagenet64_adm,", "unet_tiny", "webdataset"} <= {*words}  # the ends of long lists
    assert "(Peebles and Xie 2023, section 4, without learned variance), on 8 GPUs." in " ".join(words)


# Memory


@pytest.mark.parametrize("masters", ["fp32", "split", "split24", "none"])
def test_bytes_are_those_of_live_tensors(masters: Any) -> None:
    """Weights, masters and state as counted beforehand, against what a training run really holds."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
            self.net[2].bias.requires_grad_(False)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    found = {}

    class Look(L.Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found["gradients"] = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            found["weights"] = sum(p.nbytes for p in module.parameters())
            buckets = trainer.precision_plugin.master_weights
            found["optimizer"] = memory.state_bytes(trainer.optimizers[0])
            found["averages"] = sum(a.nbytes for a in trainer.callbacks[1].averages.values())
            del buckets

    plugin = MasterWeightPrecision(PrecisionPolicy("bf16"), masters=masters)
    trainer = L.Trainer(
        plugins=plugin, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Look(), MasterWeightAveraging()],
    )  # fmt: skip
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 64)), batch_size=4)
    trainer.fit(module, data)
    plan = plugin.policy.resolve(module)
    with torch.device("meta"):
        shadow = Module()
    trained = [p for p in shadow.parameters() if p.requires_grad]
    state = memory.state_bytes_of_a_step(trained, lambda: torch.optim.AdamW(trained))
    assert memory.state_bytes_of_a_step(trained, lambda: torch.optim.AdamW(trained, fused=True)) == state
    counted = memory.count(module, plan, masters, optimizer=state, activations=None, averages=1)
    assert counted.weights == found["weights"]
    assert counted.averages == found["averages"]
    assert state is not None
    assert state == pytest.approx(found["optimizer"], abs=64)  # step counts
    halves = sum(
        p.numel() for n, p in module.named_parameters() if p.requires_grad and plan.parameters[n].itemsize == 2
    )
    assert counted.masters == {"fp32": 4, "split": 2, "split24": 1, "none": 0}[masters] * halves
    assert counted.total == counted.weights + counted.masters + counted.gradients + state + counted.averages


def test_activations_are_what_backward_needs() -> None:
    """A chain of layers by hand: each linear layer keeps its input, each SiLU too, views only once."""
    net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    with memory.saved_for_backward(net) as saved:
        net(x.view(2, 2, 8).view(4, 8)).square().mean()
    assert saved.bytes == 4 * (4 * 8 + 4 * 16 + 4 * 16 + 4 * 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_meta_counts_what_a_real_batch_saves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, precision: str
) -> None:
    rows = []
    for kind in ("true", "meta"):
        options = [*TINY, "model=dit_tiny", f"precision={precision}", f"dry_run={kind}", "data.batch_size=16"]
        assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/{kind}") == 0
        shown = capfd.readouterr().out
        rows.append([line.split()[:2] for line in shown.splitlines() if line.endswith(" MB")])
    assert len(rows[0]) == 7
    for real, fake in zip(*rows, strict=True):
        assert real[0] == fake[0]
        assert float(fake[1]) == pytest.approx(float(real[1]), rel=0.05, abs=0.11), real[0]
    assert not [*tmp_path.rglob("events.out.*"), *tmp_path.rglob("*.ckpt")]


def test_an_unknown_optimizer_is_said_to_be_unknown() -> None:
    weight = nn.Parameter(torch.empty(3, device="meta"))

    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return float(weight.sum())

    assert memory.state_bytes_of_a_step([weight], lambda: Asks([weight])) is None
    net = build({"model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}}, "model")
    counted = memory.count(net, PrecisionPolicy("fp32").resolve(net), "fp32", optimizer=None, activations=0, averages=0)
    assert re.search(r"optimizer +unknown", str(counted))
    assert "at least" in str(counted)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.val_check_interval=0"], "trainer.val_check_interval=0 must be"),
        (["dry_run=meta", "ema.decay=7"], "decay=7"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    expected: str,
) -> None:
    assert cli(monkeypatch, "model=unet_tiny", *overrides, f"hydra.run.dir={tmp_path}/run") == 2
    shown = capfd.readouterr().err
    assert expected in shown
    assert "Traceback" not in shown


def test_settings_that_are_left_out_have_their_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["model=unet_tiny", "trainer.max_steps=1", "trainer.accelerator=cpu", "~dry_run", "~compile"]
    assert cli(monkeypatch, *options, "callbacks.samples.per_class=1", f"hydra.run.dir={tmp_path}/run") == 0


def test_a_dry_run_counts_every_average_and_saves_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {}
    for ema in ("default", "power"):
        options = ["model=unet_tiny", f"ema={ema}", "dry_run=true", "trainer.accelerator=cpu"]
        options += ["ema.snapshot_every=1"] * (ema == "power")
        assert cli(monkeypatch, *options, f"hydra.run.dir={tmp_path}/{ema}") == 0
        (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("averages"))
        found[ema] = float(line.split()[1])
    assert found["power"] == pytest.approx(2 * found["default"], abs=0.2)
    assert not [*tmp_path.rglob("average_*")]


@pytest.mark.parametrize("slow", ["", "This CPU has no bf16 instructions"])
def test_a_dry_run_that_would_take_long_names_the_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, slow: str
) -> None:
    monkeypatch.setattr("recipes.dry_run.slowness", lambda dtype, device: slow)
    options = [*TINY, *FEW, "data.batch_size=4", "precision=fp32", "dry_run=true", f"hydra.run.dir={tmp_path}/run"]
    assert cli(monkeypatch, *options) == 0
    assert ("here without instructions for its dtype: dry_run=meta" in capfd.readouterr().out) == bool(slow)


def test_a_directory_that_cannot_be_written_to_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert cli(monkeypatch, "model=unet_tiny", f"hydra.run.dir={tmp_path}/file/run") == 2
    assert f"hydra.run.dir={tmp_path}/file/run: {tmp_path}/file is no directory." in capfd.readouterr().err
    assert cli(monkeypatch, "-m", "seed=0,1", "model=unet_tiny", "hydra.sweep.dir=/proc/run") == 2  # nor may root
    assert "hydra.sweep.dir=/proc/run: /proc cannot be written to" in capfd.readouterr().err
