"""fp32 values behind 16-bit parameters: how they are stored, and how optimizers step on them."""

import copy

import pytest
import torch
from reference import assert_same, rounded
from torch import Tensor, nn

from lightning_mixprec.encoding import decode_, encode_, round_
from lightning_mixprec.gradients import found_nonfinite
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.storage import Bucket
from recipes.measure import live_bytes

RUNGS = ["fp32", "split", "split24", "none"]
EXTRA = {"split": 16, "split24": 8, "none": 0}
BF16 = torch.bfloat16


class Net(nn.Module):
    """Parameters of several shapes, one of them in channels_last memory, and a layer that stays fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(9, 7)
        self.conv = nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)
        self.b = nn.Linear(33, 17)
        self.wide = nn.Linear(5, 5)

    def dtypes(self, dtype: torch.dtype = BF16) -> dict[str, torch.dtype]:
        return {name: torch.float32 if "wide" in name else dtype for name, _ in self.named_parameters()}


def matrices_only(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.dim() == 2]


def every_parameter(net: nn.Module) -> list[nn.Parameter]:
    return list(net.parameters())


def make(rung: str, make_optimizer, select=every_parameter, dtype: torch.dtype = BF16):
    torch.manual_seed(0)
    net = Net()
    masters = MasterWeights(net, net.dtypes(dtype), rung)
    with masters.shown():
        optimizer = make_optimizer(select(net))
    masters.allocate([optimizer])
    return net, masters, optimizer


def give_gradients(net: nn.Module, generator: torch.Generator, skip: str | None = None) -> None:
    for name, param in net.named_parameters():
        grad = (torch.randn(param.shape, generator=generator) * 0.1).to(param.dtype)
        param.grad = None if name == skip else torch.empty_like(param).copy_(grad)  # in the parameter's memory format


def step_plain(plain: nn.Module, reference, generator: torch.Generator, skip: str | None = None) -> None:
    """The same gradients, rounded as 16-bit parameters would have them, for an optimizer on fp32 parameters."""
    for name, param in plain.named_parameters():
        grad = torch.randn(param.shape, generator=generator) * 0.1
        grad = grad if "wide" in name else grad.to(BF16).float()
        param.grad = None if name == skip else torch.empty_like(param).copy_(grad)
    reference.step()


def train(
    rung: str, make_optimizer, steps: int, select=every_parameter, skip_at: int | None = None
) -> dict[str, Tensor]:
    """Step with seeded gradients; the fp32 values after each of the last steps, by name and step."""
    net, masters, optimizer = make(rung, make_optimizer, select)
    generator = torch.Generator().manual_seed(1)
    seen = {}
    for step in range(steps):
        give_gradients(net, generator, skip="b.weight" if step == skip_at else None)
        masters.step(optimizer, optimizer.step)
        masters.gradients.release(net.parameters())
        if step in (0, steps - 1):
            seen |= {f"{step}.{name}": value.clone() for name, value in net.state_dict().items()}
    return seen


ANY = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "SGD_fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.001),
    "Adam_amsgrad_fused": lambda p: torch.optim.Adam(p, lr=0.001, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.001),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=0.001, fused=True),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.001, foreach=True),
    "AdamW_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.001), fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.001),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.001),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.001),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def lion(params):
    from lion_pytorch import Lion

    return Lion(params, lr=1e-3)


def covers_torch_optim() -> set[str]:
    ours = {name.partition("_")[0] for name in ANY} | {"Muon", "LBFGS", "SparseAdam"}
    theirs = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    return theirs - ours


def test_every_class_of_torch_optim_is_tried_below():
    assert covers_torch_optim() == set()


# Storage


def some_floats(count: int = 100_003) -> Tensor:
    """fp32 values with every kind of bit pattern: normal, subnormal, zeros, ties; finite."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.zeros(()))
    values[:4] = torch.tensor([0.0, -0.0, 1e-45, 3.3e38])
    values[4:1000] = (bits[4:1000] & ~0xFFFF | 0x8000).view(torch.float32).nan_to_num(1.5)  # exact ties
    return values


def test_split_rebuilds_every_value_bit_for_bit():
    values = some_floats()
    half, rest = torch.empty(len(values), dtype=BF16), torch.empty(len(values), dtype=torch.int16)
    encode_(values.clone(), half, rest, 16, None)
    rebuilt = decode_(half, rest, 16, torch.empty_like(values))
    assert torch.equal(rebuilt.view(torch.int32), values.view(torch.int32))
    again = torch.empty_like(half)
    round_(values, again)
    assert torch.equal(half.view(torch.int16), again.view(torch.int16))
    assert torch.equal(half.view(torch.int16), rounded(values, BF16).view(torch.int16))


def test_rounding_to_nearest_where_nothing_is_repeated():
    values = some_floats()[1000:]
    values = values[values.abs() > 1e-30]
    for extra, dtype in ((8, torch.int8), (0, None)):
        half = torch.empty(len(values), dtype=BF16)
        rest = None if dtype is None else torch.empty(len(values), dtype=dtype)
        encode_(values.clone(), half, rest, extra, None)
        stored = decode_(half, rest, extra, torch.empty_like(values))
        finite = stored.isfinite()
        error = ((stored.double() - values.double()) / values.double())[finite]
        assert error.abs().max() <= 2.0 ** -(8 + extra)


@pytest.mark.parametrize("rung", ["split24", "none"])
def test_stochastic_rounding_is_unbiased_and_leaves_what_fits(rung):
    extra, generator = EXTRA[rung], torch.Generator().manual_seed(0)
    ulp = 2.0 ** (-4 - 8 - extra + 1)  # of 24- or 16-bit numbers in [1/16, 1/8)
    for value in (0.1234567, -0.1234567):
        values = torch.full((2**20,), value)
        half = torch.empty(len(values), dtype=BF16)
        rest = torch.empty(len(values), dtype=torch.int8) if extra else None
        encode_(values.clone(), half, rest, extra, generator)
        stored = decode_(half, rest, extra, torch.empty_like(values))
        assert stored.unique().numel() == 2
        assert (stored - values).abs().max() < ulp
        assert abs(stored.double().mean().item() - values[0].item()) < ulp / 300  # five standard deviations
        kept = stored.clone()
        encode_(stored, half, rest, extra, generator)
        assert torch.equal(decode_(half, rest, extra, torch.empty_like(values)), kept)


@pytest.mark.parametrize("rung", RUNGS)
def test_seed_precision_is_kept_and_memory_formats_too(rung):
    torch.manual_seed(0)
    net = Net()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    masters = MasterWeights(net, net.dtypes(), rung)
    masters.allocate()
    bits = {"fp32": 24, "split": 24, "split24": 16, "none": 8}[rung]  # of significand, leading one included
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, before[name], rtol=0 if bits == 24 else 2.0**-bits * 1.01, atol=0)
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert {param.dtype for name, param in net.named_parameters() if "wide" not in name} == {BF16}
    masters.restore_()
    assert {param.dtype for param in net.parameters()} == {torch.float32}


# Stepping


@pytest.mark.parametrize("optimizer", [*ANY, "Muon", "Lion"])
def test_split_is_bit_identical_to_fp32_masters_over_300_steps(optimizer):
    make_optimizer, select = ANY.get(optimizer), every_parameter
    if optimizer == "Muon":
        make_optimizer, select = (lambda p: torch.optim.Muon(p, lr=0.01)), matrices_only
    if optimizer == "Lion":
        make_optimizer = lion
    one = train("fp32", make_optimizer, 300, select, skip_at=100)
    other = train("split", make_optimizer, 300, select, skip_at=100)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("optimizer", ANY)
def test_fp32_masters_equal_the_optimizer_on_fp32_parameters_bit_for_bit(optimizer):
    """The way through buckets, flat tensors and kernels is the plain optimizer's arithmetic."""
    torch.manual_seed(0)
    plain = Net()
    reference = ANY[optimizer](list(plain.parameters()))
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        step_plain(plain, reference, generator, skip="b.weight" if step == 7 else None)
    ours = train("fp32", ANY[optimizer], 20, skip_at=7)
    for name, param in plain.named_parameters():
        assert torch.equal(ours[f"19.{name}"], param), name


@pytest.mark.parametrize("rung", ["split24", "none"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW_fused", "Adafactor"])
def test_stochastic_rungs_follow_fp32_masters(rung, optimizer):
    one, other = train("fp32", ANY[optimizer], 100), train(rung, ANY[optimizer], 100)
    tolerance = {"split24": 2e-3, "none": 0.1}[rung]
    for name, value in one.items():
        assert (other[name] - value).norm() <= tolerance * value.norm() + 1e-4, name


@pytest.mark.parametrize(("decay", "ratio"), [(1e-6, 0.99797), (1e-5, 0.9802)])
def test_split24_decays_where_rounding_to_nearest_would_stand_still(decay, ratio):
    """2000 steps of decay alone. Negative control: 24-bit masters rounded to nearest."""
    weights = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(weights.clone())
    net = nn.Module()
    net.weight = param
    masters = MasterWeights(net, {"weight": BF16}, "split24")
    optimizer = torch.optim.SGD([param], lr=1.0, weight_decay=decay)
    masters.allocate([optimizer])
    for _ in range(2000):
        param.grad = torch.zeros_like(param)
        masters.step(optimizer, optimizer.step)
    assert abs(float(masters.read(param).norm() / weights.norm()) - ratio) < 3e-4

    control = weights.clone()
    for _ in range(2000):
        control = control - decay * control
        control = ((control.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    assert abs(float(control.norm() / weights.norm()) - ratio) > 1.5e-3


def test_none_decays_too():
    weights = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    net = nn.Module()
    net.weight = nn.Parameter(weights.clone())
    masters = MasterWeights(net, {"weight": BF16}, "none")
    optimizer = torch.optim.SGD([net.weight], lr=1.0, weight_decay=1e-5)
    masters.allocate([optimizer])
    for _ in range(2000):
        net.weight.grad = torch.zeros_like(net.weight)
        masters.step(optimizer, optimizer.step)
    assert abs(float(masters.read(net.weight).norm() / weights.norm()) - 0.9802) < 2e-3


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("optimizer", ["AdamW_fused", "AdamW", "Adafactor"])
def test_parameters_without_a_gradient_do_not_move(rung, optimizer):
    net, masters, opt = make(rung, ANY[optimizer])
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        before = {name: value.clone() for name, value in net.state_dict().items()}
        give_gradients(net, generator, skip="b.weight")
        masters.step(opt, opt.step)
        after = net.state_dict()
        assert torch.equal(before["b.weight"], after["b.weight"])
        assert not torch.equal(before["a.weight"], after["a.weight"])
        assert net.b.weight not in opt.state or not opt.state[net.b.weight]


@pytest.mark.parametrize("rung", ["fp32", "split"])
@pytest.mark.parametrize("optimizer", ["AdamW_fused", "AdamW"])
def test_parameters_that_join_late_step_from_one(rung, optimizer):
    """A bucket whose parameters are at different step counts is stepped one parameter at a time, rightly."""

    def run(rung: str) -> dict[str, Tensor]:
        net, masters, opt = make(rung, ANY[optimizer])
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            give_gradients(net, generator, skip="a.weight" if step < 3 else None)
            masters.step(opt, opt.step)
        assert float(opt.state[net.a.weight]["step"]) == 3
        assert float(opt.state[net.a.bias]["step"]) == 6
        return {name: value.clone() for name, value in net.state_dict().items()}

    torch.manual_seed(0)
    plain = Net()
    reference = ANY[optimizer](list(plain.parameters()))
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        step_plain(plain, reference, generator, skip="a.weight" if step < 3 else None)
    ours = run(rung)
    for name, param in plain.named_parameters():
        assert torch.equal(ours[name], param), name


@pytest.mark.parametrize("rung", RUNGS)
def test_optimizer_state_is_fp32_and_addressed_by_the_modules_parameters(rung):
    """Ruling 8, and state dicts that a plain optimizer can go on with."""
    net, masters, optimizer = make(rung, ANY["AdamW_fused"])
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        give_gradients(net, generator)
        masters.step(optimizer, optimizer.step)
    assert set(optimizer.state) == set(net.parameters())
    for param, state in optimizer.state.items():
        assert state["exp_avg"].shape == param.shape
        assert {value.dtype for value in state.values()} == {torch.float32}
    state_dict = optimizer.state_dict()
    steps = [entry["step"] for entry in state_dict["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)

    plain = Net()
    plain.load_state_dict(net.state_dict())
    other = ANY["AdamW_fused"](list(plain.parameters()))
    other.load_state_dict(copy.deepcopy(state_dict))
    give_gradients(net, torch.Generator().manual_seed(2))
    for param, source in zip(plain.parameters(), net.parameters(), strict=True):
        param.grad = source.grad.float()
    other.step()
    masters.step(optimizer, optimizer.step)
    if rung in ("fp32", "split"):
        for name, value in net.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.parametrize("rung", ["fp32", "split"])
def test_optimizer_state_can_be_loaded_and_replaced_in_mid_training(rung):
    net, masters, optimizer = make(rung, ANY["AdamW_fused"])
    generator = torch.Generator().manual_seed(1)
    give_gradients(net, generator)
    masters.step(optimizer, optimizer.step)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in net.state_dict().items()}

    def go_on() -> dict[str, Tensor]:
        give_gradients(net, torch.Generator().manual_seed(5))
        masters.step(optimizer, optimizer.step)
        return {name: value.clone() for name, value in net.state_dict().items()}

    first = go_on()
    net.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(saved))
    second = go_on()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    # A tensor that user code puts in place of a moment is the one that counts.
    net.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.state[net.b.weight]["exp_avg"] = torch.full_like(optimizer.state[net.b.weight]["exp_avg"], 3.0)
    third = go_on()
    assert not torch.equal(third["b.weight"], second["b.weight"])
    assert torch.equal(third["a.weight"], second["a.weight"])


def test_step_hooks_of_an_optimizer_run_once():
    for name in ("AdamW", "AdamW_fused"):
        net, masters, optimizer = make("fp32", ANY[name])
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        give_gradients(net, torch.Generator())
        masters.step(optimizer, optimizer.step)
        assert calls == [1]


# Edits from outside


EDITS = {
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.375)),
    "fill_": lambda p: p[0].fill_(0.5),
    "data.clamp_": lambda p: p.data.clamp_(-0.125, 0.125),
    "data.mul_": lambda p: p.data.mul_(torch.arange(p.numel()).view_as(p) % 2),
    "init": lambda p: nn.init.ones_(p),
    "data =": lambda p: setattr(p, "data", torch.full(p.shape, 0.1)),
    "fill_, then data =": lambda p: setattr(p, "data", p.data.fill_(0.375).clone()),
    "swap of rows": lambda p: p.data.copy_(p.data.flip(0)),
}


def make_stepped(rung):
    """A net whose fp32 weights have bits that 16 do not show, ready for edits."""
    net, masters, optimizer = make(rung, ANY["AdamW_fused"])
    give_gradients(net, torch.Generator().manual_seed(1))
    masters.step(optimizer, optimizer.step)
    return net, masters, optimizer


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_adopted_and_untouched_elements_keep_their_bits(rung, edit):
    net, masters, optimizer = make_stepped(rung)
    weight = net.b.weight
    before, half = masters.read(weight).clone(), weight.detach().clone()
    with torch.no_grad():
        EDITS[edit](weight)
    written = weight.detach().float().clone()
    after = net.state_dict()["b.weight"].clone()
    touched = written != half.float()
    assert touched.any()
    assert torch.equal(after[~touched], before[~touched])
    assert torch.equal(rounded(after, BF16), written.to(BF16))  # the parameter is what was written
    if rung in ("fp32", "none"):
        expected = written if rung == "fp32" else written.to(BF16).float()
        assert torch.equal(after[touched], expected[touched])
    assert torch.equal(after[touched & (written == 0)], torch.zeros(int((touched & (written == 0)).sum())))
    # And the next step starts from there.
    give_gradients(net, torch.Generator().manual_seed(2))
    masters.step(optimizer, optimizer.step)
    assert weight.dtype == BF16
    assert (masters.read(weight) - after).abs().max() < 0.02


BESIDE = {
    "data =": lambda net, masters: setattr(net.b.weight, "data", torch.full(net.b.weight.shape, 0.1)),
    "write": lambda net, masters: masters.write(net.b.weight, torch.full(net.b.weight.shape, 0.1)),
    "load_state_dict": lambda net, masters: net.b.load_state_dict({"weight": torch.ones(17, 33)}, strict=False),
}


@pytest.mark.parametrize("masters", ["fp32", "split", "split24", "none"])
@pytest.mark.parametrize("how", ["memory", "memory in another layout", "in place"])
def test_what_is_perturbed_in_place_and_put_back_has_all_its_bits(masters, how):
    """Sharpness-aware minimisation keeps `p.data`, perturbs, and puts it back by assignment."""
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    weights = MasterWeights(net, {name: torch.bfloat16 for name, _ in net.named_parameters()}, masters)
    weights.allocate()
    before = {name: weights.peek(param).clone() for name, param in net.named_parameters()}
    kept = [param.data.clone() for param in net.parameters()]
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.1)
        for param, value in zip(net.parameters(), kept, strict=True):
            if how == "in place":
                param.copy_(value)
            else:
                param.data = value.t().contiguous().t() if "layout" in how and value.dim() == 2 else value
    for look in (weights.peek, weights.read):
        for name, param in net.named_parameters():
            assert torch.equal(look(param), before[name]), name
        weights.adopt_edits()
    assert_same(net.state_dict(), before)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("other", BESIDE)
def test_an_edit_is_not_forgotten_because_another_weight_of_its_bucket_is_written(rung, other):
    net, masters, _ = make_stepped(rung)
    assert masters.home(net.b.bias)[0] is masters.home(net.b.weight)[0]
    written = torch.full(net.b.bias.shape, 0.375)
    written[0] = 0
    net.b.bias.data.copy_(written)
    BESIDE[other](net, masters)
    masters.adopt_edits()
    value = masters.read(net.b.bias)
    assert torch.equal(rounded(value, BF16), written.to(BF16))
    assert torch.equal(value[0], written[0])
    if rung in ("fp32", "none"):
        assert torch.equal(value, written)


@pytest.mark.parametrize("shape", [(64, 32), (2**14, 32), (300, 1024)])
def test_whatever_is_moved_within_a_bucket_is_noticed(shape):
    """The fingerprint of a large bucket adds up words that are far apart: no swap of rows may hide in it."""
    weight = nn.Parameter(torch.randn(shape))
    bucket = Bucket([weight], [weight.detach().clone()], BF16, "fp32")
    neighbours = lambda w: w.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)  # noqa: E731
    for swap in (neighbours, lambda w: w.flip(0), lambda w: w.flip(1), lambda w: w.roll(len(w) // 2, 0)):
        weight.data.copy_(swap(weight.data))
        written = weight.detach().clone()
        bucket.adopt()
        assert torch.equal(rounded(bucket.values_of(0), BF16), written)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nonfinite_gradients_are_found_wherever_they_are_and_large_ones_are_not_taken_for_them(dtype):
    grads = [torch.randn(size).to(dtype) for size in (5, 2**16, 70_001, 0)]
    assert not found_nonfinite(grads, torch.device("cpu")).item()
    for grad in grads[:3]:
        kept = grad.clone()
        grad.fill_(torch.finfo(dtype).max)  # a sum would be infinite
        assert not found_nonfinite(grads, torch.device("cpu")).item()
        for place in (0, grad.numel() // 2, grad.numel() - 1):
            for value in (float("inf"), -float("inf"), float("nan")):
                before, grad[place] = grad[place].clone(), value
                assert found_nonfinite(grads, torch.device("cpu")).tolist() == [1.0]
                grad[place] = before
        grad.copy_(kept)
        grad[0], grad[-1] = float("inf"), -float("inf")
        assert found_nonfinite(grads, torch.device("cpu")).tolist() == [1.0]
        grad.copy_(kept)
    assert not found_nonfinite(grads, torch.device("cpu")).item()


@pytest.mark.parametrize("rung", ["fp32", "split"])
def test_load_state_dict_brings_all_fp32_bits(rung):
    net, *_ = make(rung, ANY["SGD"])
    torch.manual_seed(7)
    source = Net()
    net.load_state_dict(source.state_dict())
    for name, value in net.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]), name


# Who may be stepped how


def test_state_for_a_group_is_refused_by_name_where_masters_are_not_standing():
    from prodigyopt import Prodigy

    for rung in ("split", "split24", "none"):
        with pytest.raises(ValueError, match=rf"masters='{rung}'.*Prodigy.*whole group.*masters='fp32'"):
            make(rung, lambda p: Prodigy(p))


def test_state_for_a_group_works_with_fp32_masters():
    from prodigyopt import Prodigy

    torch.manual_seed(0)
    plain = Net()
    reference = Prodigy(list(plain.parameters()))
    net, masters, optimizer = make("fp32", lambda p: Prodigy(p))
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(10):
        give_gradients(net, one)
        step_plain(plain, reference, two)
        masters.step(optimizer, optimizer.step)
    for name, param in plain.named_parameters():
        assert torch.equal(net.state_dict()[name], param), name


class Counting(torch.optim.Optimizer):
    """The rate falls with the number of steps, which is kept for a group, or for the optimizer."""

    def __init__(self, params, kept):
        super().__init__(params, {"lr": 0.1})
        self.kept, self.count = kept, 0
        if kept == "in a tensor":
            for group in self.param_groups:
                group["step"] = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += self.kept == "of its own"
        for group in self.param_groups:
            if self.kept == "in a tensor":
                group["step"] += 1
            elif self.kept == "in a group":
                group["step"] = group["step"] + 1 if "step" in group else 1
                if any(param.grad is not None for param in group["params"]):
                    group["warned"] = True
            count = float(group.get("step", self.count))
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / count)


def in_two_groups(net: nn.Module) -> list[dict]:
    return [{"params": [*net.a.parameters(), *net.conv.parameters()]}, {"params": list(net.b.parameters()), "lr": 0.2}]


def step_both(make_optimizer, rung: str, steps: int = 6):
    """The optimizer on fp32 values and on an fp32 network, with gradients of one group alone in the third step."""
    torch.manual_seed(0)
    plain = Net()
    reference = make_optimizer(in_two_groups(plain))
    net, masters, optimizer = make(rung, make_optimizer, in_two_groups)
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for step in range(steps):
        for each, generator in ((net, one), (plain, two)):
            for name, param in each.named_parameters():
                grad = torch.randn(param.shape, generator=generator).to(BF16).to(param.dtype)
                rests = (step == 2 and name.startswith("b.")) or (step == 0 and name == "conv.weight")
                param.grad = None if rests else torch.empty_like(param).copy_(grad)
        masters.step(optimizer, optimizer.step)
        masters.gradients.release(net.parameters())
        reference.step()
    return net.state_dict(), plain.state_dict(), optimizer, reference


@pytest.fixture
def small_calls(monkeypatch):
    """A bucket in each call, of which the first group of `in_two_groups` has three."""
    monkeypatch.setattr("lightning_mixprec.borrow._CALL_ELEMENTS", 1)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kept", ["in a group", "in a tensor", "of its own"])
def test_steps_that_are_counted_for_a_group_are_counted_once(small_calls, kept, rung):
    """However many calls make a step, also for a group without a gradient in one of them."""
    ours, plain, optimizer, reference = step_both(lambda p: Counting(p, kept), rung)
    assert optimizer.count == reference.count
    assert [group.get("step") for group in optimizer.param_groups] == [
        group.get("step") for group in reference.param_groups
    ]
    for name, value in plain.items():
        if rung in ("fp32", "split"):
            assert torch.equal(ours[name], value), name
        else:
            torch.testing.assert_close(ours[name], value, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("seen_at", [2, 12])
def test_a_number_of_a_group_that_comes_to_depend_on_its_part_is_refused(small_calls, seen_at):
    """By the trial, or later than that by the step."""

    class Estimates(Counting):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                if group["step"] >= seen_at:
                    group["estimate"] = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))

    step_both(lambda p: Estimates(p, "in a group"), "fp32", steps=13)
    kind, match = (ValueError, "masters='split'.*Estimates") if seen_at == 2 else (RuntimeError, "Estimates is stepped")
    with pytest.raises(kind, match=rf"{match}.*\('estimate'\).*masters='fp32'"):
        step_both(lambda p: Estimates(p, "in a group"), "split", steps=13)


@pytest.mark.parametrize("rung", ["fp32", "split"])
def test_an_optimizer_that_moves_weights_without_a_gradient_moves_all_of_them(small_calls, rung):
    """By their momentum, as some do whose ranks must not differ."""

    class Forced(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            return super().step(closure)

    ours, plain, *_ = step_both(lambda p: Forced(p, lr=0.1, momentum=0.9), rung)
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("rung", RUNGS)
def test_optimizer_that_evaluates_the_loss_again_is_refused_before_any_weight_changes(rung):
    class Perturbs(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            closure()
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad)
            closure()
            super().step()

    with pytest.raises(ValueError, match=r"Perturbs evaluates the loss more than once.*precision='32-true'"):
        make(rung, lambda p: Perturbs(p, lr=0.1))


def test_optimizer_that_looks_across_parameters_is_refused_by_name():
    class ClipsAll(torch.optim.SGD):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            return super().step(closure)

    with pytest.raises(ValueError, match=r"ClipsAll.*depends on the others"):
        make("split", lambda p: ClipsAll(p, lr=0.1))
    make("fp32", lambda p: ClipsAll(p, lr=0.1))


def test_optimizer_whose_state_is_its_own_is_refused_or_right():
    """Momentum outside `state`, keyed by parameter, and a step counter in an attribute."""

    class Own(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.buffers, self.info = {}, {"t": 0}
            self.listed = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            self.info["t"] += 1
            for group in self.param_groups:
                for p, total in zip(group["params"], self.listed, strict=True):
                    buffer = self.buffers.setdefault(p, torch.zeros_like(p))
                    buffer.mul_(0.9).add_(p.grad)
                    total.add_(p.grad)
                    p.data = p.data - group["lr"] * buffer / self.info["t"]  # assigns instead of writing

    torch.manual_seed(0)
    plain = Net()
    reference = Own(list(plain.parameters()), lr=0.1)
    net, masters, optimizer = make("fp32", lambda p: Own(p, lr=0.1))
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(5):
        give_gradients(net, one)
        step_plain(plain, reference, two)
        masters.step(optimizer, optimizer.step)
    assert optimizer.info == {"t": 5}
    assert {total.dtype for total in optimizer.listed} == {torch.float32}
    for name, param in plain.named_parameters():
        assert torch.equal(net.state_dict()[name], param), name
    with pytest.raises(ValueError, match=r"Own.*masters='fp32'"):
        make("split", lambda p: Own(p, lr=0.1))


@pytest.mark.parametrize("rung", RUNGS)
def test_optimizer_that_assigns_data_moves_the_weights(rung):
    class Assigns(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - group["lr"] * p.grad

    net, masters, optimizer = make(rung, lambda p: Assigns(p))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    give_gradients(net, torch.Generator().manual_seed(1))
    grads = {name: param.grad.float() for name, param in net.named_parameters()}
    masters.step(optimizer, optimizer.step)
    digits = {"fp32": 24, "split": 24, "split24": 15, "none": 7}[rung]
    for name, value in net.state_dict().items():
        expected = before[name] - 0.1 * grads[name]
        torch.testing.assert_close(value, expected, rtol=2.0**-digits, atol=1e-7)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW_fused"])
def test_step_hooks_see_all_weights_and_their_edits_count(rung, optimizer):
    net, masters, opt = make(rung, ANY[optimizer])
    sizes = []

    def clamp(opt, args, kwargs):
        params = [param for group in opt.param_groups for param in group["params"]]
        sizes.append(sum(param.numel() for param in params))
        for param in params:
            param.data.clamp_(min=0)

    opt.register_step_post_hook(clamp)
    opt.register_step_pre_hook(
        lambda opt, *_: sizes.append(sum(p.numel() for g in opt.param_groups for p in g["params"]))
    )
    give_gradients(net, torch.Generator().manual_seed(1))
    masters.step(opt, opt.step)
    assert sizes == [sum(param.numel() for param in net.parameters())] * 2
    for value in net.state_dict().values():
        assert value.min() >= 0


def test_bucket_shared_by_two_groups_loses_no_update():
    """Parameters given to the optimizer late, in two groups."""
    for rung in RUNGS:
        torch.manual_seed(0)
        net = Net()
        masters = MasterWeights(net, net.dtypes(), rung)
        optimizer = torch.optim.AdamW(net.a.parameters(), lr=0.01, fused=True)
        masters.allocate([optimizer])
        optimizer.add_param_group({"params": list(net.b.parameters())})
        optimizer.add_param_group({"params": list(net.conv.parameters())})
        before = {name: value.clone() for name, value in net.state_dict().items()}
        give_gradients(net, torch.Generator().manual_seed(1))
        masters.step(optimizer, optimizer.step)
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name]) == ("wide" in name), name


def test_a_group_whose_parameters_are_reordered_or_replaced_is_followed():
    net, masters, optimizer = make("fp32", ANY["AdamW_fused"])
    generator = torch.Generator().manual_seed(1)
    for order in (1, -1, 1):
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][::order]
        before = {name: value.clone() for name, value in net.state_dict().items()}
        give_gradients(net, generator)
        masters.step(optimizer, optimizer.step)
        assert all(not torch.equal(before[name], value) for name, value in net.state_dict().items())
    other = torch.optim.SGD(net.parameters(), lr=0.1)  # one that nobody has announced
    before = masters.read(net.a.weight).clone()
    masters.step(other, other.step)
    assert not torch.equal(masters.read(net.a.weight), before)


def test_looking_changes_nothing():
    """Weights put aside in 16 bits, replaced, saved and put back lose no fp32 bits."""
    for rung in ("fp32", "split"):
        net, masters, optimizer = make(rung, ANY["AdamW_fused"])
        give_gradients(net, torch.Generator().manual_seed(1))
        masters.step(optimizer, optimizer.step)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with torch.no_grad():
            aside = [param.clone() for param in net.parameters()]
            for param in net.parameters():
                param.zero_()
            assert all((value == 0).all() for value in net.state_dict().values())
            for param, kept in zip(net.parameters(), aside, strict=True):
                param.copy_(kept)
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_wrapper_of_an_optimizer_is_refused_by_name_before_any_weight_changes():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            return self.inner.step(closure)

    net = Net()
    masters = MasterWeights(net, net.dtypes(), "fp32")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for make_inner in (lambda o: o, lambda o: [o], lambda o: {"one": o}):
        lookahead = Lookahead(torch.optim.SGD(net.parameters(), lr=0.1))
        lookahead.inner = make_inner(lookahead.inner)
        with pytest.raises(ValueError, match=r"Lookahead wraps another optimizer \(in 'inner'\)"):
            masters.allocate([lookahead])
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_optimizer_that_keeps_parameters_in_an_object_of_its_own_is_refused_by_name():
    """As distributed preconditioners do: a step on what they hold would be one on 16-bit weights."""

    class Preconditioner:
        def __init__(self, params):
            self.params = params

    class Preconditioned(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.preconditioners = [Preconditioner(group["params"]) for group in self.param_groups]

        def step(self, closure=None):
            for each in self.preconditioners:
                for param in each.params:
                    param.data.sub_(param.grad)

    net = nn.Linear(2, 1)
    masters = MasterWeights(net, {"weight": torch.bfloat16, "bias": torch.bfloat16})
    with pytest.raises(ValueError, match=r"keeps parameters in an object of its own \(a Preconditioner, in 'precond"):
        masters.allocate([Preconditioned(net.parameters(), lr=0.1)])


def test_schedule_free_optimizer_follows_the_plain_one_through_its_modes():
    """train() and eval() write weights outside a step."""
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(0)
    plain = Net()
    reference = AdamWScheduleFree(list(plain.parameters()), lr=0.01)
    net, masters, optimizer = make("fp32", lambda p: AdamWScheduleFree(p, lr=0.01))
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(3):
        reference.train(), optimizer.train()
        for _ in range(4):
            give_gradients(net, one)
            step_plain(plain, reference, two)
            masters.step(optimizer, optimizer.step)
        reference.eval(), optimizer.eval()
        for name, param in plain.named_parameters():
            assert torch.equal(net.state_dict()[name], param), name
            assert torch.equal(
                net.get_parameter(name).float(), rounded(param, BF16).float() if "wide" not in name else param
            )


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("bits", [8, 4])
def test_low_bit_optimizer_states_of_torchao(rung, bits):
    """State in 8 or 4 bits under every rung, close to 32-bit AdamW; tensors it quantises and tensors it does not."""
    from torchao.optim import AdamW4bit, AdamW8bit

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 128))
            self.bias = nn.Parameter(torch.randn(128))

    def run(rung, make_optimizer):
        torch.manual_seed(0)
        net = Big()
        masters = MasterWeights(net, {"weight": BF16, "bias": BF16}, rung)
        optimizer = make_optimizer(list(net.parameters()))
        masters.allocate([optimizer])
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            give_gradients(net, generator)
            masters.step(optimizer, optimizer.step)
        return masters.read(net.weight), optimizer.state[net.weight]["exp_avg"]

    low = AdamW8bit if bits == 8 else AdamW4bit
    with torch.compiler.set_stance("force_eager"):
        value, moment = run(rung, lambda p: low(p, lr=1e-3))
    exact, _ = run("fp32", lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert "OptimState" in type(moment).__name__
    assert (value - exact).norm() / exact.norm() < (8e-3 if rung == "none" else 2e-3)


# Memory


@pytest.fixture
def shared_table():
    """The fixed numbers that all buckets of a process share; who counts bytes of one model leaves them out."""
    param = nn.Parameter(torch.zeros(512, 520))
    return Bucket([param], [param.detach()], BF16, "fp32")


@pytest.mark.parametrize(("rung", "limit"), [("fp32", 14.1), ("split", 12.1), ("split24", 11.1), ("none", 10.1)])
def test_bytes_per_parameter_between_steps(shared_table, rung, limit):
    start = live_bytes()
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    count = sum(param.numel() for param in net.parameters())
    masters = MasterWeights(net, {name: BF16 for name, _ in net.named_parameters()}, rung)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    masters.allocate([optimizer])
    for _ in range(2):
        give_gradients(net, torch.Generator())
        masters.step(optimizer, optimizer.step)
        masters.gradients.release(net.parameters())
    assert (live_bytes() - start) / count <= limit


def test_split24_with_8_bit_adamw_takes_at_most_5_3_bytes(shared_table):
    from torchao.optim import AdamW8bit

    start = live_bytes()
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    count = sum(param.numel() for param in net.parameters())
    masters = MasterWeights(net, {name: BF16 for name, _ in net.named_parameters()}, "split24")
    optimizer = AdamW8bit(net.parameters(), lr=1e-3)
    masters.allocate([optimizer])
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            give_gradients(net, torch.Generator())
            masters.step(optimizer, optimizer.step)
            masters.gradients.release(net.parameters())
    assert (live_bytes() - start) / count <= 5.3


def test_parameters_that_share_memory_are_refused_by_name():
    """Ruling 10: an update would reach only one of the two."""
    net = nn.Module()
    net.first = nn.Parameter(torch.zeros(8))
    net.second = nn.Parameter(net.first.data[4:])
    with pytest.raises(ValueError, match=r"'first' and 'second' share memory"):
        MasterWeights(net, {"first": BF16, "second": BF16})


def test_bucket_views_end_to_end():
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5))]
    values = [param.detach().clone() for param in params]
    bucket = Bucket(params, values, BF16, "fp32")
    assert params[1].data_ptr() - params[0].data_ptr() == 6 * 2
    assert torch.equal(bucket.values_of(1), values[1])
