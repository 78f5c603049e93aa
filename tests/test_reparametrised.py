"""Layers that are reparametrised, pruned or replaced in the middle of training, or no longer, follow plain fp32."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from reference import REPARAMETRISATIONS, loader, make_trainer, snapshot
from torch import nn
from torch.nn.utils.parametrize import remove_parametrizations

from lightning_mixprec import MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.layers import Fp32Layer

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*")
HALVES = ["bf16", "fp16"]
*NORMS, ORTHOGONAL = REPARAMETRISATIONS
NEW_STYLE = REPARAMETRISATIONS[2:]


class Module(L.LightningModule):
    """`edit` of the layer comes at the beginning of the second of three epochs, or in the hook that `when` names."""

    def __init__(self, edit=None, when="on_train_epoch_start"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
        self.edit, self.when, self.saved = edit, when, {}

    def at(self, when):
        if self.edit is not None and self.when == when and (when == "on_train_end" or self.current_epoch == 1):
            self.edit(self.net[0])
            if when != "on_train_end":
                self.trainer.strategy.setup_optimizers(self.trainer)

    def on_train_epoch_start(self):
        self.at("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.at("on_train_epoch_end")

    def on_train_end(self):
        self.at("on_train_end")

    def on_train_batch_end(self, *_):
        self.saved = snapshot(self)

    def training_step(self, batch, _):
        return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def fit(module, policy, **kwargs):
    torch.manual_seed(1)
    trainer = make_trainer(MasterWeightPrecision(policy), max_epochs=3, **kwargs)
    trainer.fit(module, loader(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(2))))
    return module


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        torch.testing.assert_close(value, expected[name], rtol=3e-2, atol=3e-2)


def fit_both(precision, *args, **kwargs):
    """Modules trained with ``precision`` and in fp32; alike, in checkpoints too, and left as plain modules."""
    module, plain = (fit(Module(*args), each, **kwargs) for each in (precision, "fp32"))
    assert_close(module.saved, plain.saved)
    assert_close(module.state_dict(), plain.state_dict())
    assert [type(each).__mro__[1:] for each in module.modules()] == [type(each).__mro__[1:] for each in plain.modules()]
    assert not [each for each in module.modules() if "_mixprec" in vars(each)]
    assert module.net(torch.ones(1, 4)).dtype == torch.float32  # in training mode, where vectors are iterated
    return module, plain


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("reparametrise", NORMS)
@pytest.mark.parametrize("when", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_layer_reparametrised_in_mid_fit_is_as_one_that_was_before(when, reparametrise, precision):
    fit_both(precision, reparametrise, when)


@pytest.mark.parametrize("reparametrise", NORMS)
def test_a_layer_reparametrised_at_the_end_of_fit_is_fp32(reparametrise):
    module = fit(Module(reparametrise, "on_train_end"), "bf16")
    assert {each.dtype for each in module.state_dict().values()} == {torch.float32}
    assert module.net(torch.ones(1, 4)).dtype == torch.float32


def test_an_orthogonal_base_of_a_16_bit_weight_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'weight' of 'net\.0'.*16-bit.*PrecisionPolicy\(fp32=\['net\.0'\]\)"):
        fit(Module(ORTHOGONAL), "bf16")
    fit_both(PrecisionPolicy("bf16", fp32=["net.0"]), ORTHOGONAL)


def reparametrised(layer, edit=None, when=""):
    module = Module(edit, when)
    layer(module.net[0])
    return module


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("when", ["on_train_epoch_start", "on_train_end"])
@pytest.mark.parametrize("reparametrise", NEW_STYLE)
def test_parametrizations_are_removed_in_mid_fit_and_at_its_end(reparametrise, when, precision):
    modules = []
    for each in (precision, "fp32"):
        modules.append(reparametrised(reparametrise, lambda layer: remove_parametrizations(layer, "weight"), when))
        fit(modules[-1], each)
    module, plain = modules
    assert_close(module.state_dict(), plain.state_dict())
    assert type(module.net[0]) is nn.Linear
    assert isinstance(module.net[0].weight, nn.Parameter)


def test_copies_of_a_parametrised_layer_share_their_class_and_not_their_precision():
    """torch gives a copy the class of the original."""
    student, alone = (reparametrised(nn.utils.parametrizations.weight_norm) for _ in range(2))
    student.teacher = copy.deepcopy(student.net)
    outside = copy.deepcopy(student.net)
    cls, found = type(outside[0]), []

    class Looks(L.Callback):
        def on_train_start(self, *_):
            layers = student.net[0], student.teacher[0], outside[0]
            found.append([isinstance(each, Fp32Layer) for each in layers[:2]])
            found.append([each(torch.ones(1, 4)).dtype for each in layers])

    fit(student, PrecisionPolicy("bf16", fp32=["teacher"]), callbacks=Looks())
    assert found == [[False, True], [torch.bfloat16, torch.float32, torch.float32]]
    for net in (student.net, student.teacher, outside):
        assert type(net[0]) is cls
    assert cls.__bases__ == (nn.Linear,)
    fit(alone, "fp32")
    torch.testing.assert_close(student.net[0].weight, alone.net[0].weight, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("precision", HALVES)
def test_pruning_masks_are_fp32_in_checkpoints_and_afterwards(precision):
    def prune(layer):
        nn.utils.prune.l1_unstructured(layer, "weight", 0.5)

    module, plain = fit_both(precision, prune)
    assert torch.equal(module.net[0].weight_mask, plain.net[0].weight_mask)

    pruning = ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=False)
    module = fit(Module(), precision, callbacks=pruning)
    assert {each.dtype for each in module.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("precision", HALVES)
def test_a_parameter_put_in_place_of_another_and_given_to_no_optimizer_is_fp32_after_fit(precision):
    class Replaces(Module):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.5)

    module, plain = (fit(Replaces(), each) for each in (precision, "fp32"))
    assert_close(module.state_dict(), plain.state_dict())
    assert module.net(torch.ones(1, 4)).dtype == torch.float32
