"""Penalties on how far weights have moved, computed from their roundings, are reported; the remedy is that of fp32."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import loader, make_trainer
from test_edits import PLUGINS, Net
from torch import nn

from lightning_mixprec import MasterWeightPrecision, PrecisionPolicy


class Tied(Net):
    """Weights are to stay near where they began; only the penalty moves them."""

    def __init__(self, penalty=None):
        super().__init__(lr=1e-3)
        self.penalty = penalty
        for name, param in self.named_parameters():
            self.register_buffer(name.replace(".", "_"), param.detach() + 1e-4 * param.detach().cos())

    def starts(self):
        return [(name, param, self.get_buffer(name.replace(".", "_"))) for name, param in self.named_parameters()]

    def kept(self):
        return [start for *_, start in self.starts()]

    def training_step(self, batch, batch_idx):
        return self.penalty(self) if self.penalty is not None else self.loss(batch_idx) * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def squares(module):
    return 10 * sum((param - start).square().sum() for _, param, start in module.starts())


def vector(module):
    starts = [start.flatten() for *_, start in module.starts()]
    if not hasattr(module, "start"):
        module.__dict__["start"] = torch.cat(starts)
    return (nn.utils.parameters_to_vector(module.parameters()) - module.start).square().sum()


def twice(module):
    return sum(F.mse_loss(param.to(torch.float32), start.detach()) for _, param, start in module.starts())


FOUND = {
    "squares": squares,
    "the other way round": lambda m: sum((start - param).abs().sum() for _, param, start in m.starts()),
    "in fp32": lambda m: sum((param.float() - start).norm() for _, param, start in m.starts()),
    "mse_loss": lambda m: sum(F.mse_loss(param, start) for _, param, start in m.starts()),
    "dist": lambda m: sum(torch.dist(param, start) for _, param, start in m.starts()),
    "copies": twice,
    "a vector": vector,
    "kept in 16 bits": lambda m: sum((param - start.to(param)).square().sum() for _, param, start in m.starts()),
    "a part": lambda m: (m.body.weight[:2] - m.body_weight[:2]).square().sum(),
    "a product": lambda m: sum(((param - start) * (param - start)).sum() for _, param, start in m.starts()),
    "foreach": lambda m: sum(torch._foreach_norm(torch._foreach_sub(list(m.parameters()), m.kept()))),
}


def fit(module, plugin, batches=3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(plugin).fit(module, loader(list(range(batches))))
    return [str(each.message) for each in caught if "The loss measures" in str(each.message)]


@pytest.mark.parametrize(
    ("how", "kind"), [*((how, "fp32") for how in FOUND), *(("squares", kind) for kind in ("split", "none", "fp16"))]
)
def test_a_distance_of_roundings_is_reported_once_with_the_remedy(how, kind):
    report, *more = fit(Tied(FOUND[how]), PLUGINS[kind]())
    assert not more
    for words in ("'body.weight'", "0.05%" if kind == "fp16" else "0.39%", "on_before_optimizer_step", "fp32=["):
        assert words in report


def straight_through(module):
    weight = module.body.weight
    quantised = (weight * 8).round() / 8
    return F.linear(torch.ones(1, 64), weight + (quantised - weight).detach()).sum()


def standardised(module):
    weight = module.body.weight
    return F.linear(torch.ones(1, 64), (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)).sum()


FINE = {
    "none": lambda m: m.loss(0),
    "of the weights alone": lambda m: sum(param.square().sum() for param in m.parameters()),
    "quantised": straight_through,
    "standardised": standardised,
    "of outputs": lambda m: F.mse_loss(m.body(torch.ones(32, 64)).float(), torch.zeros(32, 32)),
    "for the log": lambda m: m.loss(0) + (m.body.weight.detach() - m.body_weight).square().sum(),
    "a gate": lambda m: F.linear(torch.ones(1, 64), (1 - m.body.weight) * (m.body.weight - 1).sigmoid()).sum(),
}


@pytest.mark.parametrize(("how", "kind"), [*((how, "fp32") for how in FINE), ("squares", "fp32 throughout")])
def test_other_arithmetic_is_not_reported(how, kind):
    assert fit(Tied((FINE | FOUND)[how]), PLUGINS[kind]()) == []


class Remedy(Tied):
    def on_before_optimizer_step(self, optimizer):
        with self.trainer.precision_plugin.fp32_weights(self) as weights:
            for name, param, start in self.starts():
                param.grad.add_(weights[name] - start, alpha=2 * 10)


def test_the_remedies_are_right_and_what_is_reported_is_not():
    """After 40 steps, by how much the move is off that of a plain fp32 loop."""

    def off(module, plugin):
        reports = fit(module, plugin, batches=40)
        return float((module.body.weight - plain.body.weight).detach().norm() / moved.norm()), reports

    plain = Tied()
    begin = plain.body.weight.detach().clone()
    optimizer = plain.configure_optimizers()
    for _ in range(40):
        optimizer.zero_grad()
        squares(plain).backward()
        optimizer.step()
    moved = plain.body.weight.detach() - begin

    assert off(Remedy(), MasterWeightPrecision("bf16")) == (pytest.approx(0, abs=1e-4), [])
    assert off(Tied(squares), MasterWeightPrecision(PrecisionPolicy("bf16", fp32=["body", "head"]))) == (0, [])
    error, reports = off(Tied(squares), MasterWeightPrecision("bf16"))
    assert error > 0.1
    assert len(reports) == 1
