"""Averages of the weights that need the fp32 truth and the step counters of the precision plugin.

Why it exists: an average of 16-bit weights never moves, and one taken on skipped steps decays at the wrong rate.

It works with any Precision plugin; without :class:`~lightning_mixprec.MasterWeightPrecision` every optimizer step
counts as real and the parameters are their own masters. It leaves out what an average weighs
(:mod:`lightning_mixprec.profiles`) and how snapshots become files (:mod:`lightning_mixprec.snapshots`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_mixprec.master import MasterWeights
from lightning_mixprec.precision import MasterWeightPrecision
from lightning_mixprec.profiles import ConstantDecay, PowerFunction, Profile, describe, in_words
from lightning_mixprec.questions import refuse_second_average
from lightning_mixprec.sharding import reshard_
from lightning_mixprec.shards import shard_like, whole
from lightning_mixprec.snapshots import SnapshotDtype, adopt_snapshots, snapshot_files, write_snapshot
from lightning_mixprec.widening import widened

AverageFn = Callable[[Tensor, Tensor, int], Tensor]
Averages = dict[str, Tensor]


class MasterWeightAveraging(WeightAveraging):
    """Exponential, power-function or any other moving averages of the fp32 master weights, several at once.

    Differs from Lightning's ``WeightAveraging`` where that is unsafe in low precision or hides the raw weights: the
    average is fp32 and fed from the masters, it moves on real steps only, a checkpoint's ``state_dict`` holds the raw
    weights with the average under ``"averaged_state_dict"``, and after ``fit`` the module holds the raw weights.
    During validation the average is in place, without loss to either.

    Of several profiles the first is that average; the others are tracked beside it, under
    ``checkpoint["averaged_state_dicts"][name]``. A Trainer takes one of these callbacks: several averages are profiles.

    Args:
        decay: ``average = decay * average + (1 - decay) * weights`` after each real step, in (0, 1). The default,
            0.999, averages over about 1000 steps; long runs take 0.9999.
        avg_fn: Replaces the formula: ``avg_fn(average, weights, number_of_averages_so_far)`` returns the new average,
            as in ``torch.optim.swa_utils.AveragedModel``; fp32 tensors of one parameter's shape.
        device: Where the averages live; by default where the parameters are.
        profiles: In place of ``decay`` and ``avg_fn``: :class:`ConstantDecay` and :class:`PowerFunction` by names of
            your choice.
        snapshot_every: Write the averages of all power-function profiles to a file each time that many real steps have
            been taken. From these files an average of any length can be made after training
            (:func:`lightning_mixprec.posthoc.reconstruct`). None writes none.
        snapshot_dir: Where; by default ``snapshots`` in the Trainer's ``default_root_dir``. A run that starts anew
            removes the snapshots that are there, one that resumes links those of the run that it continues.
        snapshot_dtype: ``"fp32"``, or ``"fp16"`` for files of half the size.

    Attributes:
        averages: Average by qualified parameter name, fp32; trained parameters only. Of the first profile.
        profile_averages: The same, by the name of each profile.
        n_averaged: Number of updates so far.

    Raises:
        ValueError: If ``decay`` is outside (0, 1), ``profiles`` come with ``decay`` or ``avg_fn``, or snapshots are
            asked for that nothing could be made of.

    Example:
        >>> MasterWeightAveraging(decay=0.9999).decay
        0.9999
        >>> profiles = {"short": PowerFunction(0.05), "long": PowerFunction(0.10), "constant": ConstantDecay(0.999)}
        >>> ema = MasterWeightAveraging(profiles=profiles, snapshot_every=1000)
    """

    averages_master_weights = True

    def __init__(
        self,
        decay: float = 0.999,
        avg_fn: AverageFn | None = None,
        device: torch.device | str | int | None = None,
        *,
        profiles: Mapping[str, Profile] | None = None,
        snapshot_every: int | None = None,
        snapshot_dir: str | Path | None = None,
        snapshot_dtype: SnapshotDtype = "fp32",
    ) -> None:
        super().__init__(device=device)
        constant = ConstantDecay(decay)
        if profiles is not None and (avg_fn is not None or decay != 0.999):
            given = "avg_fn" if avg_fn is not None else f"decay={decay}"
            raise ValueError(f"{given} and profiles exclude each other. Write ConstantDecay(...) among the profiles.")
        if profiles is not None and not profiles:
            raise ValueError("profiles={} tracks nothing. Name at least one, such as {'long': PowerFunction(0.10)}.")
        self.decay = decay
        self.avg_fn = avg_fn
        self.profiles: dict[str, Profile] = dict(profiles) if profiles else {"constant": constant}
        for name, profile in self.profiles.items():
            if not hasattr(profile, "share"):
                raise ValueError(f"profiles: {name}={profile!r} is no profile. Take ConstantDecay or PowerFunction.")
            if name in ("averaged", "raw", "posthoc"):
                raise ValueError(f"profiles: the name {name!r} means something else in the recipes. Choose another.")
        self._widths = {name: p.sigma_rel for name, p in self.profiles.items() if isinstance(p, PowerFunction)}
        if snapshot_every is not None and snapshot_every < 1:
            raise ValueError(f"snapshot_every={snapshot_every} must be at least 1, or None for no snapshots.")
        if snapshot_every is not None and not self._widths:
            raise ValueError(
                f"snapshot_every={snapshot_every}: averages of other lengths can be made of power-function profiles "
                "alone. Add profiles={'short': PowerFunction(0.05), 'long': PowerFunction(0.10)}."
            )
        if snapshot_dtype not in get_args(SnapshotDtype):
            raise ValueError(f"snapshot_dtype={snapshot_dtype!r} is unknown. Choose 'fp32' or 'fp16'.")
        self.snapshot_every = snapshot_every
        self.snapshot_dir = self._given_dir = Path(snapshot_dir) if snapshot_dir is not None else None
        self.snapshot_dtype: SnapshotDtype = snapshot_dtype
        self.profile_averages: dict[str, Averages] = {name: {} for name in self.profiles}
        self.n_averaged = 0
        self._continued: Path | None = None  # where the snapshots of the run that this one continues are
        self._starts_anew = False  # a checkpoint without these profiles was loaded
        self._keeps_snapshots = False
        self._earlier_steps = self._real_steps = 0
        self._raw: Averages = {}  # the weights, while the average is in their place
        self._validates = False  # a validation of the fit has put it there

    @property
    def averages(self) -> Averages:
        """Average of the first profile."""
        return self.profile_averages[next(iter(self.profiles))]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the average of an earlier fit; a checkpoint, loaded after this, may bring one.

        Raises:
            MisconfigurationException: If the Trainer has another callback of this kind.
        """
        if stage == "fit":
            refuse_second_average(trainer.callbacks)  # type: ignore[attr-defined]
            self.profile_averages = {name: {} for name in self.profiles}
            self.n_averaged, self._raw, self._continued, self._starts_anew = 0, {}, None, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the averages at the weights, which by now are on their device and have their masters."""
        for averages in self.profile_averages.values():
            for name, weight in _trained_weights(pl_module, averages):  # a checkpoint's, of what is frozen now, too
                averages[name] = self._place(self._average_of(averages, name, weight), weight)
        self._keeps_snapshots = self.snapshot_every is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if self._keeps_snapshots:
            self.snapshot_dir = self._given_dir or Path(trainer.default_root_dir) / "snapshots"
            if trainer.is_global_zero:
                self._tidy_snapshots(self.snapshot_dir)

    def _tidy_snapshots(self, directory: Path) -> None:
        """Files of another run must not be taken for files of this one."""
        if self.n_averaged == 0:
            for path in snapshot_files(directory):
                path.unlink()
        elif self._continued is not None:
            adopt_snapshots(self._continued, directory, self.n_averaged)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the step counter stands, which a checkpoint may have set."""
        self._real_steps = self._count(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average if this batch made a real step (and a subclass's ``should_update`` agrees)."""
        before, self._real_steps = self._real_steps, self._count(pl_module)
        if self._real_steps > before and self.should_update(step_idx=self._real_steps - 1):
            self._update(pl_module)

    def _count(self, pl_module: LightningModule) -> int:
        plugin = _plugin(pl_module)
        return pl_module.trainer.global_step if plugin is None else plugin.real_steps

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the average where a subclass's ``should_update(epoch_idx=...)`` says so."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: unlike stock, the module keeps its raw weights."""

    @torch.no_grad()
    def _update(self, pl_module: LightningModule) -> None:
        weights = {name: widened(self._place(w, w)) for name, w in _trained_weights(pl_module, self.averages)}
        for profile, averages in zip(self.profiles.values(), self.profile_averages.values(), strict=True):
            own = [self._average_of(averages, name, weight) for name, weight in weights.items()]
            if self.avg_fn is None:
                torch._foreach_lerp_(own, list(weights.values()), profile.share(self.n_averaged))
            else:
                for average, weight in zip(own, weights.values(), strict=True):
                    average.copy_(self.avg_fn(average, weight, self.n_averaged))
        self.n_averaged += 1
        if self._keeps_snapshots and self.n_averaged % (self.snapshot_every or 1) == 0:
            self._write_snapshot(pl_module)

    def _write_snapshot(self, pl_module: LightningModule) -> None:
        """Rank 0 writes; under FSDP2 all ranks gather."""
        averages = {name: _whole(self.profile_averages[name]) for name in self._widths}
        if pl_module.trainer.is_global_zero:
            assert self.snapshot_dir is not None
            write_snapshot(self.snapshot_dir, self.n_averaged, self._widths, averages, self.snapshot_dtype)

    @contextmanager
    def averaged_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """Put the average in place of the weights for a while, for example to sample from a hook.

        Example:
            >>> import lightning as L
            >>> ema = MasterWeightAveraging()
            >>> with ema.averaged_weights(L.LightningModule()):  # before a fit there is nothing to put in place
            ...     pass
        """
        if not self._put_in_place(pl_module):  # nothing is there, or it is in place already
            yield
            return
        try:
            yield
        finally:
            self._put_back(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """During fit, validate with the average."""
        if trainer.state.fn == "fit":
            self._validates = self._put_in_place(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back, unless `averaged_weights` is around the validation."""
        if self._validates:
            self._put_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights back if validation was interrupted."""
        if self._validates:
            self._put_back(pl_module)

    @torch.no_grad()
    def _put_in_place(self, pl_module: LightningModule) -> bool:
        """Put the average in place of the weights; whether it has. Both stay fp32, 16-bit parameters are roundings."""
        if self._raw or not self.averages:
            return False
        self._raw = {name: weight.clone() for name, weight in _trained_weights(pl_module, self.averages)}
        _write(pl_module, self.averages)
        return True

    @torch.no_grad()
    def _put_back(self, pl_module: LightningModule) -> None:
        raw, self._raw, self._validates = self._raw, {}, False
        reshard_(pl_module)
        _write(pl_module, raw)

    def _from_stock(self, pl_module: LightningModule, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of stock ``WeightAveraging`` as one of ours: its ``state_dict`` is the average."""
        if pl_module.trainer.state.fn == "fit":  # else the average, loaded before this, is what is looked at
            pl_module.load_state_dict(checkpoint["current_model_state"], strict=pl_module.strict_loading)
        self.n_averaged = int(checkpoint["averaging_state"].get("n_averaged", 0))
        return {**checkpoint, "averaged_state_dict": checkpoint["state_dict"]}

    def _average_of(self, averages: Averages, name: str, weight: Tensor) -> Tensor:
        if name not in averages:  # at the start, or unfrozen since
            averages[name] = widened(self._place(weight, weight)).clone()
        return averages[name]

    def _place(self, tensor: Tensor, weight: Tensor) -> Tensor:
        return tensor.to(weight.device if self._device is None else self._device)

    def state_dict(self) -> dict[str, Any]:
        """Number of updates, and where snapshots are; the averages themselves have their own place."""
        where = {"snapshot_dir": str(self.snapshot_dir.absolute())} if self.snapshot_dir and self.snapshot_every else {}
        return {"n_averaged": self.n_averaged, **where}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the number of updates."""
        if not self._starts_anew:
            self.n_averaged = state_dict.get("n_averaged", 0)
            self._continued = Path(state_dict["snapshot_dir"]) if "snapshot_dir" in state_dict else None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add ``"averaged_state_dict"``: the keys of ``state_dict``, trained parameters averaged, the rest as there.

        With ``profiles``, ``"averaged_state_dicts"`` holds trained parameters by the name of each profile (tensors of
        the first are stored once), and ``"averaged_profiles"`` says what they are.
        """
        if not self.averages:
            if trainer.state.status != TrainerStatus.RUNNING:  # the tuner saves when a fit has hardly begun
                rank_zero_warn(
                    "There are no averages here, so the checkpoint has none. After a fit in processes that were forked "
                    "or spawned they have ended with these: save during fit, or launch with strategy='ddp'."
                )
            return
        held = checkpoint["state_dict"]
        first: dict[int, str] = {}  # a tied parameter has its average under the first of its names
        named = pl_module.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(param), name) for name, param in named}
        by_profile = {}
        for profile, averages in self.profile_averages.items():  # on all ranks
            by_profile[profile] = {name: value for name, value in _whole(averages).items() if name in held}
        averaged = next(iter(by_profile.values()))
        checkpoint["averaged_state_dict"] = {name: averaged.get(names.get(name, name), held[name]) for name in held}
        checkpoint["averaged_names"] = list(averaged)
        checkpoint["averaged_profiles"] = describe(self.profiles)
        if len(by_profile) > 1 or self._widths:
            checkpoint["averaged_state_dicts"] = by_profile
        # Inside a validation the module holds the average.
        checkpoint["state_dict"] = {name: self._raw.get(names.get(name, name), held[name]) for name in held}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the averages of a checkpoint; one without any, or with none of these profiles, starts them anew.

        Raises:
            MisconfigurationException: If it has some of these profiles and not others, which would then start in the
                middle of training, unlike their neighbours.
        """
        if "current_model_state" in checkpoint and "averaging_state" in checkpoint:
            checkpoint = self._from_stock(pl_module, checkpoint)
        saved = checkpoint.get("averaged_profiles", {})
        sources = checkpoint.get("averaged_state_dicts", {})
        ours = describe(self.profiles)
        if len(ours) == 1 and not self._widths and not sources:  # whatever its decay is now
            sources = {next(iter(ours)): checkpoint.get("averaged_state_dict", {})}
        elif missing := {name: each for name, each in ours.items() if name not in sources or saved[name] != each}:
            if len(missing) < len(ours):
                raise MisconfigurationException(
                    f"The checkpoint has no average {in_words(missing)}. It has {in_words(saved)}. Resume with these "
                    "profiles (or some of them), or with others under new names alone, which start at its weights."
                )
            sources, self._starts_anew = {}, True
            if saved:
                rank_zero_warn(f"The checkpoint has averages {in_words(saved)}; {in_words(ours)} start at its weights.")
        averaged = checkpoint.get("averaged_names")  # not who is trained now: some may be unfrozen, or frozen, later
        trained = {
            name: param
            for name, param in pl_module.named_parameters()
            if (param.requires_grad if averaged is None else name in averaged)
        }
        for profile, averages in self.profile_averages.items():
            values = {name: widened(value) for name, value in sources.get(profile, {}).items() if name in trained}
            averages |= {name: shard_like(value, trained[name]).clone() for name, value in values.items()}


def _write(pl_module: LightningModule, values: Averages) -> None:
    masters = _masters(pl_module)
    for name, param in pl_module.named_parameters():
        if name in values:
            if masters is not None:
                masters.write(param, values[name])
            else:
                param.copy_(values[name])


def _whole(averages: Averages) -> Averages:
    """With the parts of all ranks."""
    return {name: whole(average) for name, average in averages.items()}


def _plugin(pl_module: LightningModule) -> MasterWeightPrecision | None:
    trainer = pl_module._trainer
    plugin = trainer.precision_plugin if trainer is not None else None
    return plugin if isinstance(plugin, MasterWeightPrecision) else None


def _masters(pl_module: LightningModule) -> MasterWeights | None:
    plugin = _plugin(pl_module)
    return plugin.master_weights if plugin is not None else None


def _trained_weights(pl_module: LightningModule, known: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Name and fp32 weight of every trained parameter (or known to be one, if it is toggled off), with all edits."""
    masters = _masters(pl_module)
    reshard_(pl_module)
    if masters is not None:
        masters.adopt_edits()
    for name, param in pl_module.named_parameters():
        if param.requires_grad or name in known:
            yield name, masters.read(param) if masters is not None else param.detach()
