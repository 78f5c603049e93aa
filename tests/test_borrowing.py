"""Optimizers that look beyond one parameter, or whose state users rewrite, step as they do on fp32 weights."""

import lightning as L
import pytest
import torch
from reference import TinyModule, assert_same, loader, make_batches, make_trainer, snapshot
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_mixprec import MasterWeightPrecision
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.probe import classify


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


class Exact(L.LightningModule):
    """Gradients are the batch's, whatever the weights, and exact in 16 bits: a plain fp32 loop is met bit for bit."""

    def __init__(self, make_optimizer, edit=None, shapes=((16, 16), (16,), (8, 4), (32,))):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.make_optimizer, self.edit = make_optimizer, edit

    def loss(self, batch_idx):
        generator = torch.Generator().manual_seed(batch_idx)
        grads = [torch.randint(-8, 9, weight.shape, generator=generator) / 64 for weight in self.weights]
        return sum((weight.float() * grad).sum() for weight, grad in zip(self.weights, grads, strict=True))

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.edit is not None and batch_idx == 2:
            self.edit(self.trainer.optimizers[0], list(self.weights))

    def configure_optimizers(self):
        made = self.make_optimizer(list(self.weights))
        return (
            made
            if isinstance(made, torch.optim.Optimizer)
            else ([made[0]], [{"scheduler": made[1], "interval": "step"}])
        )


def plain_loop(module, batches=6):
    made = module.make_optimizer(list(module.weights))
    optimizer, schedule = made if isinstance(made, tuple) else (made, None)
    for index in range(batches):
        optimizer.zero_grad()
        module.loss(index).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if module.edit is not None and index == 2:
            module.edit(optimizer, list(module.weights))
    return snapshot(module)


def assert_as_plain(make_optimizer, edit=None, masters="fp32", **kwargs):
    module = Exact(make_optimizer, edit, **kwargs)
    make_trainer(MasterWeightPrecision("bf16", masters=masters)).fit(module, loader(list(range(6))))
    assert_same(snapshot(module), plain_loop(Exact(make_optimizer, edit, **kwargs)))


class ByNorm(Sgd):
    """The rate is divided by the norm of all gradients."""

    def rates(self):
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        return [rate / torch.cat([grad.flatten() for grad in grads]).norm() for rate in super().rates()]


def warmed_up(cls):
    """Two groups whose rates begin at 0 and grow at different paces."""

    def make(params):
        optimizer = cls([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.1}])
        return optimizer, LambdaLR(optimizer, [lambda step: step / 4, lambda step: step / 8])

    return make


@pytest.mark.parametrize("cls", [FirstForAll, Largest, ByNorm])
def test_a_rate_that_is_warmed_up_from_zero_hides_nothing(cls):
    assert_as_plain(warmed_up(cls))
    with pytest.raises(ValueError, match=r"masters='split'.*depends on the others"):
        assert_as_plain(warmed_up(cls), masters="split")


def add_group(optimizer, weights):
    unfused = {"fused": False} if "fused" in optimizer.defaults else {}
    optimizer.add_param_group({"params": weights[2:], "lr": 0.02, **unfused})


def test_a_group_that_joins_shows_that_an_optimizer_looks_across_groups():
    def make(params):
        return FirstForAll([{"params": params[:2]}])

    assert_as_plain(make, add_group)
    with pytest.raises(ValueError, match=r"masters='split'.*one parameter group depends on the others"):
        assert_as_plain(make, add_group, "split")


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_a_group_may_join_an_optimizer_whose_state_has_other_shapes_than_its_weights(masters):
    """The trial of the new group is not given the state that steps have made for the others."""

    def make(params):
        return torch.optim.Adafactor([{"params": params[:1]}, {"params": params[1:2]}], lr=0.01)

    assert_as_plain(make, lambda optimizer, weights: optimizer.add_param_group({"params": weights[2:]}), masters)


def switch_fused_off(optimizer, weights):
    for group in optimizer.param_groups:
        group["fused"] = group["foreach"] = False


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("edit", [add_group, switch_fused_off])
def test_an_optimizer_that_is_no_longer_fused_steps_as_it_does_then(edit, masters):
    assert_as_plain(lambda params: AdamW(params[:2] if edit is add_group else params, 0.01, fused=True), edit, masters)


@pytest.mark.parametrize("cls", [torch.optim.Adam, AdamW])
def test_a_fused_step_does_not_look_for_a_gpu(cls, monkeypatch):
    """Torch's own does, in every step; with Lightning's PYTORCH_NVML_BASED_CUDA_CHECK=1 it loads a library then."""
    looked = []
    check = "_accelerator_graph_capture_health_check"
    monkeypatch.setattr(torch.optim.Optimizer, check, lambda optimizer: looked.append(optimizer))
    net = nn.Linear(2, 1)
    half = MasterWeights(net, dict.fromkeys(("weight", "bias"), torch.bfloat16))
    optimizer = cls(net.parameters(), lr=0.01, fused=True)
    half.allocate([optimizer])
    before = half.peek(net.weight).clone()
    net(torch.ones(1, 2).bfloat16()).sum().backward()
    half.step(optimizer, optimizer.step)
    assert torch.allclose(half.peek(net.weight), before - 0.01 - (before * 1e-4 if cls is AdamW else 0), atol=1e-7)
    assert not looked
    half.restore_()
    optimizer.step()
    assert looked == [optimizer]  # or this test shows nothing


@pytest.mark.parametrize("shape", [(33,), (9, 7), (5, 3, 3), (7, 5, 3, 3)])
def test_torchs_fused_adam_takes_flags_whatever_its_first_parameter_is(shape):
    """On every CPU: how one rounds the last elements of a convolution decides nothing, least of all for a GPU."""
    net = nn.ParameterList([nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(13))])
    half = MasterWeights(net, dict.fromkeys(("0", "1"), torch.bfloat16))
    optimizer = AdamW(net.parameters(), lr=0.01, fused=True)
    half.allocate([optimizer])
    for param in net:
        param.grad = torch.ones_like(param)
    half.step(optimizer, optimizer.step)
    assert half.takes_flag(optimizer)


def transposed(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dims", [2, 4])
def test_a_layout_that_changes_after_the_masters_were_made_changes_no_value(dims, fused, masters):
    """As by `to(memory_format=torch.channels_last)` in a hook of fit, or in the run that a checkpoint is of."""
    torch.manual_seed(0)
    start, odd = torch.randn((6, 5, 3, 3)[:dims]), torch.randn(7)
    grads = [torch.randn(start.shape).bfloat16() for _ in range(4)]
    results = []
    for layout in (torch.Tensor.contiguous, transposed):
        net = nn.ParameterDict({"weight": nn.Parameter(start.clone()), "odd": nn.Parameter(odd.clone())})
        half = MasterWeights(net, dict.fromkeys(("weight", "odd"), torch.bfloat16), masters)
        optimizer = AdamW([net["weight"], net["odd"]], lr=0.1, fused=fused)
        half.allocate([optimizer])
        for index, grad in enumerate(grads):
            if index < 2:
                net["weight"].data = layout(net["weight"].data)
            net["weight"].grad, net["odd"].grad = layout(grad), torch.ones(7).bfloat16()
            half.step(optimizer, optimizer.step)
            if index == 2:
                state = optimizer.state_dict()
                state["state"][0]["exp_avg"] = layout(state["state"][0]["exp_avg"])
                optimizer.load_state_dict(state)
        results.append(half.peek(net["weight"]).clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layout_that_changes_after_the_first_step_changes_no_fp32_layer(fused):
    """Its moments are in the old one, which the fused kernel would take for the new."""
    torch.manual_seed(0)
    start, grads = torch.randn(6, 5, 3, 3), torch.randn(3, 6, 5, 3, 3)
    results = []
    for layout in (torch.Tensor.contiguous, transposed):
        net = nn.ParameterDict({"narrow": nn.Parameter(torch.ones(16)), "own": nn.Parameter(start.clone())})
        half = MasterWeights(net, {"narrow": torch.bfloat16})
        optimizer = AdamW(net.parameters(), lr=0.1, fused=fused, amsgrad=True)
        half.allocate([optimizer])
        for index, grad in enumerate(grads):
            if index == 1:
                net["own"].data = layout(net["own"].data)
            net["narrow"].grad, net["own"].grad = torch.ones(16).bfloat16(), grad.clone()
            half.step(optimizer, optimizer.step)
        results.append(net["own"].detach().clone())
    assert torch.equal(*results)


EDITS = {
    "steps of one set to zero": lambda optimizer, weights: optimizer.state[weights[0]]["step"].zero_(),
    "steps of all set back": lambda optimizer, weights: [optimizer.state[w]["step"].sub_(2) for w in weights],
    "state of one dropped": lambda optimizer, weights: optimizer.state.pop(weights[1]),
    "state of one emptied": lambda optimizer, weights: optimizer.state.update({weights[1]: {}}),
    "all state dropped": lambda optimizer, weights: optimizer.state.clear(),
    "moment zeroed": lambda optimizer, weights: optimizer.state[weights[2]]["exp_avg"].zero_(),
    "moment replaced": lambda o, weights: o.state[weights[2]].update(exp_avg=torch.zeros_like(weights[2])),
    "memory replaced": lambda o, weights: setattr(o.state[weights[2]]["exp_avg"], "data", torch.zeros_like(weights[2])),
    "memory of steps replaced": lambda o, w: [setattr(o.state[x]["step"], "data", torch.tensor(1.0)) for x in w],
    "moved to a new group": lambda o, w: o.add_param_group({"params": [o.param_groups[0]["params"].pop(1)], "lr": 0.1}),
}


@pytest.mark.parametrize(
    "shapes", [((16, 16), (16,), (8, 4), (32,)), ((5, 7), (7,), (3, 4), (9,))], ids=["flat", "each"]
)
@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_state_that_users_rewrite_in_mid_training_counts(edit, fused, masters, shapes):
    """Of parameters that are stepped as one tensor, and of others, one by one."""
    assert_as_plain(lambda params: AdamW(params, lr=0.01, fused=fused), EDITS[edit], masters, shapes=shapes)


class Bf16Momentum(Sgd):
    """Keeps its momentum in bf16 on purpose, as AnyPrecisionAdamW can."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["momentum"].mul_(0.9).add_(param.grad.bfloat16())
                param.sub_(group["lr"] * state["momentum"].float())
        return loss


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_state_that_an_optimizer_keeps_in_16_bits_itself_stays_so(masters):
    assert_as_plain(Bf16Momentum, masters=masters)


def test_what_a_trial_on_the_cpu_would_stumble_over():
    """capturable=True is for GPUs alone, and schedule-free steps in its training mode alone."""
    schedulefree = pytest.importorskip("schedulefree")
    weight = nn.Parameter(torch.ones(4, 4))
    assert classify(AdamW([weight], lr=torch.tensor(0.01), capturable=True)) == ("flat", "")
    assert classify(schedulefree.AdamWScheduleFree([weight])) == ("counted", "")


class ByParameter(Sgd):
    """Keeps its rates by parameter, and does not know those of the trial."""

    def __init__(self, groups):
        super().__init__(groups)
        self.rate_of = {param: 0.1 for group in self.param_groups for param in group["params"]}

    def rates(self):
        return [self.rate_of[group["params"][0]] for group in self.param_groups]


def test_why_an_optimizer_could_not_be_tried_is_said_in_a_line():
    """A KeyError prints the parameter that is missing, all numbers of it."""
    with pytest.raises(ValueError, match=r"ByParameter cannot do: .*KeyError") as error:
        fit(lambda params: ByParameter(list(params)), "bf16", "split")
    message = str(error.value)
    assert len(message) < 400
    assert "\n" not in message
    assert message.endswith("Use masters='fp32'.")


class Curvature(Sgd):
    """Takes second derivatives, as AdaHessian does."""

    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        with torch.enable_grad():
            torch.autograd.grad([param.grad for param in params], params, [param.grad.sign() for param in params])
        return super().step(closure)


class CreatesGraph(TinyModule):
    def __init__(self, make_optimizer):
        super().__init__(make_optimizer)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx), create_graph=True)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_of_second_order_is_refused_by_name_before_any_weight_changes():
    fit(lambda params: Curvature(list(params)), "fp32", module=CreatesGraph)
    module = CreatesGraph(lambda params: Curvature(list(params)))
    before = snapshot(module)
    with pytest.raises(ValueError, match=r"Curvature differentiates gradients.*MasterWeightPrecision\('fp32'\)"):
        make_trainer(MasterWeightPrecision("bf16")).fit(module, loader(make_batches(1)))
    assert_same(snapshot(module), before)


# State dicts in the middle of a step


class SavesInside(Sgd):
    def step(self, closure=None):
        self.state_dict()  # as a signal handler would
        return super().step(closure)


REFUSED = r"state_dict\(\) was called in the middle of its step.*on_train_batch_end"


def test_a_state_dict_taken_in_the_middle_of_a_step_is_refused():
    with pytest.raises(RuntimeError, match="SavesInside." + REFUSED):
        assert_as_plain(SavesInside, masters="split")


def test_a_state_dict_taken_in_the_middle_of_a_fused_step_is_refused(monkeypatch):
    module = Exact(lambda params: AdamW(params, lr=0.01, fused=True))
    kernel = torch._fused_adamw_

    def interrupted(*args, **settings):
        kernel(*args, **settings)
        module.trainer.optimizers[0].state_dict()

    monkeypatch.setattr(torch, "_fused_adamw_", interrupted)
    with pytest.raises(RuntimeError, match="AdamW." + REFUSED):
        make_trainer(MasterWeightPrecision("bf16")).fit(module, loader([0]))
    assert {weight.dtype for weight in module.weights} == {torch.float32}
    assert len(module.trainer.optimizers[0].param_groups[0]["params"]) == len(module.weights)


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("fused", [False, True])
def test_step_hooks_may_take_one(fused, masters):
    """They run before or after the step as a whole."""
    taken = []

    def make(params):
        optimizer = AdamW(params, lr=0.01, fused=fused)
        optimizer.register_step_post_hook(lambda optimizer, *_: taken.append(optimizer.state_dict()))
        return optimizer

    module = Exact(make)
    make_trainer(MasterWeightPrecision("bf16", masters=masters)).fit(module, loader([0, 1]))
    assert len(taken) == 2
    for state_dict in taken:
        assert state_dict["param_groups"][0]["params"] == [0, 1, 2, 3]
        shapes = [state_dict["state"][index]["exp_avg"].shape for index in range(4)]
        assert shapes == [weight.shape for weight in module.weights]
