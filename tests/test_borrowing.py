"""Optimizers that look beyond one parameter, or whose state users rewrite, step as they do on fp32 weights."""

import pytest
import torch
from reference import TinyModule, loader, make_batches, make_trainer
from torch import nn

from lightning_mixprec import MasterWeightPrecision


class Sgd(torch.optim.Optimizer):
    """Plain descent; subclasses choose the rate."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})
        self.base = [group["lr"] for group in self.param_groups]

    def rates(self):
        return [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group, rate in zip(self.param_groups, self.rates(), strict=False):
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(rate * param.grad)
        return loss


class Largest(Sgd):
    def rates(self):
        return [max(super().rates())] * len(self.param_groups)


class FirstForAll(Sgd):
    def rates(self):
        return [self.param_groups[0]["lr"]] * len(self.param_groups)


class Beside(Sgd):
    """As AdaBound does: a list beside the groups."""

    def rates(self):
        return [base * 0.5 for base, _ in zip(self.base, self.param_groups, strict=False)]


def fit(make_optimizer, precision, masters="fp32", module=None, batches=4):
    torch.manual_seed(0)
    module = (module or TinyModule)(make_optimizer)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(MasterWeightPrecision(precision, masters=masters)).fit(module, loader(make_batches(batches)))
    return {name: value - before[name] for name, value in module.state_dict().items()}, module


@pytest.mark.parametrize("cls", [Largest, FirstForAll, Beside])
def test_an_optimizer_that_looks_across_groups_steps_on_all_at_once(cls):
    def make(params):
        params = list(params)
        return cls([{"params": params[:4], "lr": 0.01}, {"params": params[4:], "lr": 0.1}])

    moved, _ = fit(make, "bf16")
    expected, _ = fit(make, "fp32")
    for name, value in expected.items():
        assert moved[name].norm() == pytest.approx(value.norm().item(), rel=0.05), name
    with pytest.raises(ValueError, match=r"masters='split'.*one parameter group depends on the others"):
        fit(make, "bf16", "split")


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_groups_that_do_not_look_at_each_other_are_stepped_in_parts(masters):
    def make(params):
        params = list(params)
        return Sgd([{"params": params[:4], "lr": 0.01}, {"params": params[4:], "lr": 0.1}])

    moved, _ = fit(make, "bf16", masters)
    expected, _ = fit(make, "fp32")
    for name, value in expected.items():
        assert moved[name].norm() == pytest.approx(value.norm().item(), rel=0.05), name


class Resets(TinyModule):
    """The momentum of every weight is set to zero after the second batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            state = self.optimizers().optimizer.state
            for param in self.parameters():
                for key in ("momentum_buffer", "exp_avg"):
                    if key in state[param]:
                        state[param][key] = torch.zeros_like(param)


class ManyResets(Resets):
    def __init__(self, make_optimizer):
        super().__init__(make_optimizer)
        self.more = nn.ModuleList(nn.Linear(3, 3) for _ in range(40))

    def training_step(self, batch, batch_idx):
        one = torch.ones(1, 3)
        return super().training_step(batch, batch_idx) + sum(layer(one).float().square().mean() for layer in self.more)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("module", [Resets, ManyResets])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    ],
    ids=["SGD", "AdamW", "fused"],
)
def test_state_made_from_16_bit_parameters_becomes_fp32(make, module, masters):
    moved, trained = fit(make, "bf16", masters, module, 6)
    expected, _ = fit(make, "fp32", module=module, batches=6)
    held = [value for state in trained.trainer.optimizers[0].state.values() for value in state.values()]
    assert {value.dtype for value in held if isinstance(value, torch.Tensor)} == {torch.float32}
    for name, value in expected.items():
        assert moved[name].norm() == pytest.approx(value.norm().item(), rel=0.2), name
