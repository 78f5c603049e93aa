"""Averages of torch and diffusers kept in a fit of 16-bit weights are those of the fp32 weights."""

import copy
import weakref

import lightning as L
import pytest
import torch
from reference import assert_same, loader, make_trainer, snapshot
from test_edits import PLUGINS
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

from lightning_mixprec import MasterWeightPrecision

STOCK = {
    "default": dict,
    "ema": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "ema, multi": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": lambda: {"avg_fn": get_swa_avg_fn()},
    "swa, multi": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "with buffers": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


class Net(L.LightningModule):
    """Two layers that hardly move: 16-bit weights would not at all."""

    def __init__(self, make=None, when="init", held=False, update=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.make, self.when, self.held, self.update = make, when, held, update
        self.history = []
        self.begin("init")

    def begin(self, when):
        if self.make is not None and self.when == when:
            self.ema = self.make(self.net)

    def on_train_start(self):
        self.begin("start")

    def training_step(self, batch, batch_idx):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(batch_idx))
        return (self.net(x).float() - x.flip(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated = {name: value for name, value in snapshot(self).items() if name.startswith("net")}
        self.rounded = self.net[0].weight.detach().clone()

    def on_train_batch_end(self, *_):
        self.history.append({name: value.double() for name, value in snapshot(self.net).items()})
        if self.make is not None:
            update = self.update or (lambda module: module.ema.update_parameters(module.net))
            update(self)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters() if self.held else self.net.parameters(), lr=1e-4)


def fit(module, plugin=None, batches=20, **kwargs):
    make_trainer(plugin or MasterWeightPrecision("bf16"), **kwargs).fit(module, loader(range(batches)), loader([0]))
    return module


def averaged(history, share):
    total = dict(history[0])
    for n, weights in enumerate(history[1:], start=1):
        total = {name: torch.lerp(value, weights[name], share(n)) for name, value in total.items()}
    return total


@pytest.mark.parametrize(("when", "held"), [("init", False), ("init", True), ("start", False)])
@pytest.mark.parametrize("kind", STOCK)
def test_a_stock_averaged_model_averages_the_fp32_weights(kind, when, held):
    """Within the rounding of fp32, of weights that 16 bits know to 4e-4; an optimizer may hold the average, too."""
    module = fit(Net(lambda net: AveragedModel(net, **STOCK[kind]()), when, held))
    share = (lambda n: 1 / (n + 1)) if kind in ("default", "swa", "swa, multi") else (lambda n: 0.1)
    for name, value in averaged(module.history, share).items():
        found = module.ema.module.state_dict()[name]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-7)
    assert "update_parameters" not in vars(module.ema)


@pytest.mark.parametrize("kind", ["fp16", "split", "none"])
def test_with_other_masters(kind):
    module = fit(Net(lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))), PLUGINS[kind]())
    for name, value in averaged(module.history, lambda n: 0.1).items():
        torch.testing.assert_close(module.ema.module.state_dict()[name].double(), value, rtol=0, atol=2e-7)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("when", ["init", "start"])
def test_the_average_of_diffusers_is_that_of_the_fp32_weights(when, foreach):
    """Validated with, and put away again without a trace, on every epoch."""
    training_utils = pytest.importorskip("diffusers.training_utils")

    class Swaps(Net):
        def on_validation_start(self):
            self.ema.store(self.net.parameters())
            self.ema.copy_to(self.net.parameters())

        def on_validation_end(self):
            self.ema.restore(self.net.parameters())

    def make(net):
        return training_utils.EMAModel(net.parameters(), decay=0.9, min_decay=0.9, foreach=foreach)

    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    module = fit(Swaps(make, when, update=lambda m: m.ema.step(m.net.parameters())), **options)
    assert_same(snapshot(module.net), snapshot(fit(Net(), **options).net))
    # The first step of `EMAModel` copies only if its decay is 0; an average begun after the start of fit is a rounding.
    first = snapshot(Net().net) if when == "init" else {n: v.bfloat16() for n, v in snapshot(Net().net).items()}
    expected = averaged([{name: value.double() for name, value in first.items()}, *module.history], lambda n: 0.1)
    for found, (name, value) in zip(module.ema.shadow_params, expected.items(), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-6)
        torch.testing.assert_close(module.validated[f"net.{name}"], found, rtol=0, atol=0)
    assert module.rounded.dtype == torch.bfloat16
    torch.testing.assert_close(module.rounded.float(), module.validated["net.0.weight"], rtol=2**-8, atol=0)
    assert not {"step", "copy_to"} & vars(module.ema).keys()


class BufferAverage(nn.Module):
    """As latent diffusion's `LitEma`: buffers with names of their own, which take on the dtype of what they follow."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay))
        self.m_name2s_name = {name: name.replace(".", "") for name, _ in model.named_parameters()}
        self.collected_params = []
        for name, param in model.named_parameters():
            self.register_buffer(self.m_name2s_name[name], param.detach().clone())

    @torch.no_grad()
    def forward(self, model):
        for name, param in model.named_parameters():
            average = getattr(self, self.m_name2s_name[name]).type_as(param)
            average.sub_((1 - self.decay) * (average - param))

    def copy_to(self, model):
        for name, param in model.named_parameters():
            param.data.copy_(getattr(self, self.m_name2s_name[name]))

    def store(self, params):
        self.collected_params = [param.clone() for param in params]

    def restore(self, params):
        for kept, param in zip(self.collected_params, params, strict=True):
            param.data.copy_(kept)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "split", "none"])
def test_the_average_of_latent_diffusion_is_that_of_the_fp32_weights(kind, caplog, recwarn):
    """In 16 bits it updates a copy of itself, and stays what it was at the start of the run."""

    class Swaps(Net):
        def on_validation_start(self):
            self.ema.store(self.net.parameters())
            self.ema.copy_to(self.net)

        def on_validation_end(self):
            self.ema.restore(self.net.parameters())

    plugin = {"bf16": MasterWeightPrecision, **PLUGINS}[kind]
    module = fit(Swaps(BufferAverage, update=lambda m: m.ema(m.net)), plugin(), max_epochs=3)
    assert_same(snapshot(module.net), snapshot(fit(Net(), plugin(), max_epochs=3).net))
    first = {name: value.double() for name, value in snapshot(Net().net).items()}
    for name, value in averaged([first, *module.history], lambda n: 0.1).items():
        found = getattr(module.ema, name.replace(".", ""))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-6)
        if kind != "none":
            torch.testing.assert_close(module.validated[f"net.{name}"], found, rtol=0, atol=0)
    assert not {"forward", "store", "copy_to", "restore"} & vars(module.ema).keys()
    assert not [each for each in (caplog.text, *(str(w.message) for w in recwarn)) if "averag" in each]


def test_one_kept_by_a_callback_and_copied_in_mid_fit():
    class Keeps(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.ema = AveragedModel(pl_module.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.ema.update_parameters(pl_module.net)
            self.copied = copy.deepcopy(self.ema)

    keeps = Keeps()
    module = fit(Net(), callbacks=keeps)
    for name, value in averaged(module.history, lambda n: 0.1).items():
        torch.testing.assert_close(keeps.ema.module.state_dict()[name].double(), value, rtol=0, atol=2e-7)
    assert_same(snapshot(keeps.copied), snapshot(keeps.ema))
    keeps.copied.update_parameters(module.net)
    assert keeps.copied.n_averaged == keeps.ema.n_averaged + 1


def step(module):
    module.ema.update_parameters(module.net)


class Late(Net):
    """The average begins in the second epoch, and there, perhaps, once more between two batches."""

    between = False

    def begin(self, when):
        pass

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.ema = self.make(self.net)
            self.history.clear()

    def on_train_batch_end(self, *args):
        if self.between and len(self.history) == 10 and self.current_epoch == 1:
            self.ema = self.make(self.net)
            self.history.clear()
        if hasattr(self, "ema"):
            super().on_train_batch_end(*args)


@pytest.mark.parametrize("between", [False, True])
def test_an_average_that_begins_in_mid_fit(between):
    """Also in the middle of an epoch, where the first of its values is a rounding."""
    Late.between = between
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.25)}
    module = fit(Late(lambda net: AveragedModel(net, **options), update=step), max_epochs=2)
    assert len(module.history) == (10 if between else 20)
    for name, value in averaged(module.history, lambda n: 0.75).items():
        found = module.ema.module.state_dict()[name].double()
        torch.testing.assert_close(found, value, rtol=0, atol=2e-7)


KEPT = {
    "keyword": (lambda net: AveragedModel(net), lambda kept, net: kept.update_parameters(model=net), lambda kept: kept),
    "list": (lambda net: [AveragedModel(net)], lambda kept, net: kept[0].update_parameters(net), lambda kept: kept[0]),
    "dict": (
        lambda net: {"a": AveragedModel(net)},
        lambda kept, net: kept["a"].update_parameters(net),
        lambda k: k["a"],
    ),
}


@pytest.mark.parametrize("how", KEPT)
def test_however_an_average_is_kept_and_called(how):
    make, update, average = KEPT[how]
    module = fit(Net(make, update=lambda module: update(module.ema, module.net)))
    for name, value in averaged(module.history, lambda n: 1 / (n + 1)).items():
        found = average(module.ema).module.state_dict()[name].double()
        torch.testing.assert_close(found, value, rtol=0, atol=2e-7)


def test_the_average_of_diffusers_takes_keywords():
    training_utils = pytest.importorskip("diffusers.training_utils")

    def make(net):
        return training_utils.EMAModel(net.parameters(), decay=0.9, min_decay=0.9)

    one = fit(Net(make, update=lambda module: module.ema.step(module.net.parameters())))
    other = fit(Net(make, update=lambda module: module.ema.step(parameters=module.net.parameters())))
    assert all(map(torch.equal, one.ema.shadow_params, other.ema.shadow_params))


class ByStateDict(AveragedModel):
    """A user's own rule, which asks the module for more than its parameters."""

    @torch.no_grad()
    def update_parameters(self, model):
        if self.n_averaged == 0:
            self.module.load_state_dict(model.state_dict())
        for value, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            value.lerp_(new, 0.1)
        self.n_averaged += 1


class ByName(AveragedModel):
    @torch.no_grad()
    def update_parameters(self, model):
        new, share = dict(model.named_parameters()), 0.1 if self.n_averaged else 1
        for name, value in self.module.named_parameters():
            value.lerp_(new[name], share)
        self.n_averaged += 1


@pytest.mark.parametrize("cls", [ByStateDict, ByName])
def test_a_rule_of_the_users_own(cls):
    module = fit(Net(cls))
    for name, value in averaged(module.history, lambda n: 0.1).items():
        torch.testing.assert_close(module.ema.module.state_dict()[name].double(), value, rtol=0, atol=2e-7)


def test_a_copy_made_in_mid_fit_is_fed_in_a_fit_of_its_own():
    class Copied(Net):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            if len(self.history) == 5 and self.held:
                self.__dict__["copied"] = copy.deepcopy(self)

    module = fit(Copied(AveragedModel, held=True))
    copied = module.copied
    copied.held = False
    fit(copied, batches=5)
    for name, value in averaged(copied.history, lambda n: 1 / (n + 1)).items():
        torch.testing.assert_close(copied.ema.module.state_dict()[name].double(), value, rtol=0, atol=2e-7)


class Online(nn.Module):
    """As ema_pytorch's `EMA`: holds the module itself, as a part of it or in a list, and is given nothing."""

    def __init__(self, model, part):
        super().__init__()
        self.online_model = model if part else [model]
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.started = False

    def pairs(self):
        online = self.online_model[0] if isinstance(self.online_model, list) else self.online_model
        return zip(self.ema_model.parameters(), online.parameters(), strict=True)

    def copy_params_from_model_to_ema(self):
        for average, param in self.pairs():
            average.data.copy_(param.data)

    def copy_params_from_ema_to_model(self):
        for average, param in self.pairs():
            param.data.copy_(average.data)

    def update(self):
        if not self.started:
            self.copy_params_from_model_to_ema()
        for average, param in self.pairs() if self.started else ():
            average.data.lerp_(param.data, 0.1)
        self.started = True


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("when", ["init", "start"])
@pytest.mark.parametrize("kind", ["fp32", "split", "fp16"])
def test_an_average_that_holds_the_module_finds_the_fp32_weights_in_it(kind, when, part):
    """What it copies into them becomes them."""

    class Ends(Net):
        def on_train_epoch_end(self):
            self.ema.copy_params_from_ema_to_model()

    module = fit(Ends(lambda net: Online(net, part), when, update=lambda m: m.ema.update()), PLUGINS[kind]())
    for name, value in averaged(module.history, lambda n: 0.1).items():
        found = module.ema.ema_model.state_dict()[name]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-7)
    assert_same(snapshot(module.net), snapshot(module.ema.ema_model))
    assert not {"update", "copy_params_from_ema_to_model"} & vars(module.ema).keys()
    assert ("online_model" in vars(module.ema)) != part
    if not part:
        assert module.ema.online_model == [module.net]


class Shadows:
    """As torch_ema's `ExponentialMovingAverage`: remembers the parameters that it was made with."""

    def __init__(self, params):
        params = list(params)
        self.shadow_params = [param.clone().detach() for param in params]
        self._params_refs = [weakref.ref(param) for param in params]
        self.collected_params = None

    def params(self, parameters):
        return [ref() for ref in self._params_refs] if parameters is None else list(parameters)

    @torch.no_grad()
    def update(self, parameters=None):
        for average, param in zip(self.shadow_params, self.params(parameters), strict=True):
            average.sub_(0.1 * (average - param))

    def store(self, parameters=None):
        self.collected_params = [param.clone() for param in self.params(parameters)]

    def copy_to(self, parameters=None):
        for average, param in zip(self.shadow_params, self.params(parameters), strict=True):
            param.data.copy_(average.data)

    def restore(self, parameters=None):
        for kept, param in zip(self.collected_params, self.params(parameters), strict=True):
            param.data.copy_(kept.data)

    def load(self):
        """It takes on the dtype of the parameters."""
        self.shadow_params = [kept.bfloat16() for kept in self.shadow_params]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("when", ["init", "start"])
def test_an_average_that_remembers_the_parameters_is_that_of_the_fp32_weights(when, given):
    class Swaps(Net):
        def on_validation_start(self):
            self.ema.store()
            self.ema.copy_to(self.net.parameters() if given else None)

        def on_validation_end(self):
            self.ema.restore()

    def update(module):
        if given:
            module.ema.update(module.net.parameters())
        else:
            module.ema.update()

    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    module = fit(Swaps(lambda net: Shadows(net.parameters()), when, update=update), **options)
    assert_same(snapshot(module.net), snapshot(fit(Net(), **options).net))
    first = snapshot(Net().net) if when == "init" else {n: v.bfloat16() for n, v in snapshot(Net().net).items()}
    expected = averaged([{name: value.double() for name, value in first.items()}, *module.history], lambda n: 0.1)
    for found, (name, value) in zip(module.ema.shadow_params, expected.items(), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-6)
        torch.testing.assert_close(module.validated[f"net.{name}"], found, rtol=0, atol=0)


def test_an_average_that_is_loaded_in_mid_fit_does_not_stay_16_bit():
    class Loads(Net):
        def on_train_start(self):
            self.ema.load()

    module = fit(Loads(lambda net: Shadows(net.parameters()), update=lambda m: m.ema.update()))
    first = {name: value.bfloat16().double() for name, value in snapshot(Net().net).items()}
    expected = averaged([first, *module.history], lambda n: 0.1).values()
    for found, value in zip(module.ema.shadow_params, expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=0, atol=2e-6)


def test_an_average_by_hand_that_mixes_dtypes_is_an_error_with_the_remedy():
    def update(module):
        with torch.no_grad():
            for average, param in zip(module.ema.parameters(), module.net.parameters(), strict=True):
                average.lerp_(param, 0.1)

    with pytest.raises(RuntimeError, match="expected dtype") as error:
        fit(Net(copy.deepcopy, update=update))
    assert "MasterWeightAveraging" in error.value.__notes__[0]
    assert "fp32_weights" in error.value.__notes__[0]


AVERAGES = {
    "in place": (lambda average, param: average.mul_(0.9).add_(param, alpha=0.1), 1),
    "of data": (lambda average, param: average.data.mul_(0.9).add_(param.data, alpha=0.1), 1),
    "copied": (lambda average, param: average.copy_(average * 0.9 + param * 0.1), 1),
    "replaced": (lambda average, param: setattr(average, "data", 0.9 * average.data + 0.1 * param.data), 1),
    "of a list": (lambda average, param: torch._foreach_add_([average], [param], alpha=0.1), 1),
    "by the distance": (lambda average, param: average.sub_(0.1 * (average - param)), 1),
    "by the distance, added": (lambda average, param: average.add_(param - average, alpha=0.1), 1),
    "by the distance, of a list": (
        lambda average, param: torch._foreach_sub_([average], torch._foreach_sub([average], [param]), alpha=0.1),
        1,
    ),
    "of a wide copy": (lambda average, param: average.mul_(0.9).add_(param.float(), alpha=0.1), 1),
    "lerp_": (lambda average, param: average.lerp_(param.detach().clone().float(), 0.1), 1),
    "torch.lerp": (lambda average, param: average.copy_(torch.lerp(average, param.to(average), 0.1)), 1),
    "replaced, wide": (lambda average, param: setattr(average, "data", 0.9 * average.data + 0.1 * param.float()), 1),
    "rounded for it": (lambda average, param: average.copy_(average.type_as(param) * 0.9 + param * 0.1), 1),
    "a rounded copy of it": (
        lambda average, param: (mine := average.to(param.dtype)).sub_(torch.tensor(0.1) * (mine - param)),
        1,
    ),
    "a copy": (lambda average, param: average.copy_(param), 0),
    "a sum of 16 bits": (lambda average, param: torch.randn_like(param).add_(param), 0),
    "a perturbed copy": (lambda average, param: param + 0.1 * torch.randn(param.shape), 0),
    "a wide copy, decayed": (lambda average, param: (wide := param.float()).sub_(0.1 * wide), 0),
    "a distance": (lambda average, param: (average - param).norm(), 0),
    "decay in the gradient": (lambda average, param: param.grad is None or param.grad.add_(param, alpha=0.1), 0),
}


@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_of_roundings_by_hand_is_reported(how, recwarn):
    update, count = AVERAGES[how]

    @torch.no_grad()
    def updates(module):
        for average, param in zip(module.ema.parameters(), module.net.parameters(), strict=True):
            update(average, param)

    class Decays(Net):
        def on_before_optimizer_step(self, _):
            if "gradient" in how:
                updates(self)

    fit(Decays(lambda net: copy.deepcopy(net).requires_grad_(False), update=updates), batches=3)
    found = [str(each.message) for each in recwarn if "averaged by hand" in str(each.message)]
    assert len(found) == count
    for report in found:
        for words in ("4 parameters ('net.0.weight'", "MasterWeightAveraging", "fp32_weights(pl_module)"):
            assert words in report


class InStep(Net):
    """MoCo, BYOL and DINO update their teacher before the student's forward, in `training_step` or in a network."""

    def on_train_batch_end(self, *_):
        pass

    @torch.no_grad()
    def update_teacher(self):
        for average, param in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            self.update(average, param)

    def training_step(self, batch, batch_idx):
        self.update_teacher()
        return super().training_step(batch, batch_idx)


def said(module, words, recwarn, **kwargs):
    fit(module, batches=3, **kwargs)
    return [str(each.message) for each in recwarn if words in str(each.message)]


@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_of_roundings_within_a_training_step_is_reported(how, recwarn):
    update, count = AVERAGES[how]
    count *= how != "a rounded copy of it"  # which nobody keeps
    found = said(InStep(lambda net: copy.deepcopy(net).requires_grad_(False), update=update), "by hand", recwarn)
    assert len(found) == count
    assert all("averaged by hand" in report for report in found)


@pytest.mark.parametrize("how", ["in place", "of data", "copied", "of a list", "torch.lerp"])
def test_a_teacher_that_an_optimizer_holds_and_that_does_not_move_is_reported(how, recwarn):
    """16-bit then, so that 0.1 % of the distance to the student is lost in it."""
    slow = {
        "in place": lambda average, param: average.mul_(0.999).add_(param, alpha=0.001),
        "of data": lambda average, param: average.data.mul_(0.999).add_(param.data, alpha=0.001),
        "copied": lambda average, param: average.copy_(average * 0.999 + param * 0.001),
        "of a list": lambda average, param: torch._foreach_lerp_([average], [param], 0.001),
        "torch.lerp": lambda average, param: average.copy_(torch.lerp(average, param, 0.001)),
    }
    module = InStep(copy.deepcopy, held=True, update=slow[how])
    module.training_step(0, 0)
    fit(module, batches=18)  # what is put there counts when it is lost for the third time, after 1, 4 and 16 steps
    (report,) = [str(each.message) for each in recwarn if "changed by hand" in str(each.message)]
    for words in ("'ema.0.weight'", "rounds away", "fp32_weights(pl_module)"):
        assert words in report


KEPT_IN_16_BITS = {
    "in place": lambda kept, param: kept.mul_(0.999).add_(param, alpha=0.001),
    "drawn to it": lambda kept, param: kept.lerp_(param, 0.001),
    "of a list": lambda kept, param: torch._foreach_lerp_([kept], [param], 0.001),
    "half way, as Lookahead": lambda kept, param: kept.add_(param - kept, alpha=0.5),
    "anew": lambda kept, param: 0.999 * kept + 0.001 * param,
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", KEPT_IN_16_BITS)
def test_an_average_kept_in_16_bits_is_reported(how, inside, recwarn):
    """Clones of parameters are 16-bit while these train, and hardly anything arrives in their averages."""

    class Keeps(Net):
        @torch.no_grad()
        def update_kept(self):
            results = [
                KEPT_IN_16_BITS[how](kept, param) for kept, param in zip(self.kept, self.net.parameters(), strict=True)
            ]
            if how == "anew":
                self.kept = results

        def on_train_start(self):
            self.kept = [param.detach().clone() for param in self.net.parameters()]

        def training_step(self, batch, batch_idx):
            if inside:
                self.update_kept()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            if not inside:
                self.update_kept()

    found = said(Keeps(), "averaged by hand", recwarn)
    assert len(found) == (not inside or how != "anew")  # nothing tells there that somebody keeps it


FORWARD = {
    "norms enforced": lambda m: m.net[0].weight.copy_(nn.functional.normalize(m.net[0].weight.float(), dim=1)),
    "norms enforced in place": lambda m: m.net[0].weight.div_(m.net[0].weight.norm(dim=1, keepdim=True)),
    "a copy, refreshed": lambda m: m.ema[0].weight.copy_(m.net[0].weight),
    "statistics": lambda m: m.ema[0].weight.lerp_(m.net[0].weight.float().square() + 1, 0.1),
    "perturbed": lambda m: m.net[0].weight + 0.1 * torch.randn(16, 16),
    "half of it, perturbed": lambda m: 0.5 * m.net[0].weight + torch.randn(16, 16),
    "added to activations": lambda m: torch.randn(16, 16).add_(0.5 * m.net[0].weight),
    "an inner step": lambda m: m.net[0].weight.add(torch.randn(16, 16), alpha=-0.1),
}


@pytest.mark.parametrize("how", FORWARD)
def test_other_arithmetic_within_a_training_step_is_not_reported(how, recwarn):
    class Computes(Net):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.kept = None
                FORWARD[how](self)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            pass

    assert not said(Computes(lambda net: copy.deepcopy(net).requires_grad_(False)), "by hand", recwarn)


def test_nothing_is_said_where_weights_are_fp32(caplog):
    module = fit(Net(AveragedModel), MasterWeightPrecision("fp32"))
    assert "average" not in caplog.text
    plain = Net(AveragedModel)
    make_trainer(None).fit(plain, loader(range(20)), loader([0]))
    assert_same(snapshot(module), snapshot(plain))
