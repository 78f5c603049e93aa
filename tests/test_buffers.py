"""What a forward writes beside activations is over a skipped batch as before: buffers, and parameters like them."""

import copy
import math

import pytest
import torch
from reference import TinyModule, assert_same, loader, make_trainer, snapshot
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision
from lightning_mixprec.buffers import BufferGuard


def run(make, bad, batches=6, precision="bf16"):
    """Train with one batch that overflows, and without it.

    Args:
        make: Makes the network, [B, 4] to [B, 1].
        bad: Index of the batch that overflows, in its inputs or in the loss alone.
    """
    ends = []
    for way in ("input", "loss", None):
        generator = torch.Generator().manual_seed(0)
        data = [torch.randn(3, 4, generator=generator) for _ in range(batches)]

        class Module(TinyModule):
            def __init__(self, way):
                super().__init__()
                torch.manual_seed(0)
                self.net, self.way = make(), way

            def training_step(self, batch, batch_idx):
                now = batch_idx == bad
                loss = self.net(batch * math.inf if now and self.way == "input" else batch).float().pow(2).mean()
                return loss * math.inf if now and self.way == "loss" else loss

            def configure_optimizers(self):
                return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

        module = Module(way)
        plugin = MasterWeightPrecision(precision, scaler=DynamicLossScaler.static(1.0))
        make_trainer(plugin).fit(module, loader([x for i, x in enumerate(data) if way or i != bad]))
        assert plugin.skipped_steps == bool(way)
        ends.append(snapshot(module))
    assert_same(ends[0], ends[2])
    assert_same(ends[1], ends[2])
    return ends[2]


class Codebook(nn.Module):
    """A moving average of activations, kept as a parameter that no optimizer has."""

    def __init__(self, write, size=8):
        super().__init__()
        self.write, self.calls = write, 0
        self.linear = nn.Linear(4, 1)
        self.embed = nn.Embedding(size, 4)
        self.count = nn.Parameter(torch.ones(size), requires_grad=False)
        self.embed.weight.requires_grad_(False)

    def forward(self, x):
        weight = self.embed.weight
        distance = (x.float()[:, None] - weight[:8].float()).square().sum(-1)
        code = weight[distance.argmin(1)]
        self.calls += 1
        new = 0.9 * weight + 0.1 * x.float().mean(0)
        with torch.no_grad():
            self.count.data.mul_(0.9).add_(0.1 * x.float().mean())
            if self.write == "in place" or (self.write == "late" and self.calls >= 2):
                weight.copy_(new)
            elif self.write == "data":
                weight.data.copy_(new)
            elif self.write == "data replaced":
                weight.data = new
            elif self.write == "replaced":
                self.embed.weight = nn.Parameter(new, requires_grad=False)
        return self.linear(x + (code - x).detach())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("write", ["in place", "data", "data replaced", "replaced"])
def test_a_codebook_of_frozen_parameters(write, bad, precision):
    end = run(lambda: Codebook(write), bad, precision=precision)
    assert not torch.equal(end["net.count"], torch.ones(8))  # it does move


def test_a_codebook_that_moves_later():
    run(lambda: Codebook("late"), 3)


def test_a_large_codebook():
    run(lambda: Codebook("data", size=2**15), 2)  # 2^17 elements


class Counter(nn.Module):
    """Counts its calls, in a buffer of whole numbers and nothing else."""

    def __init__(self, replaced):
        super().__init__()
        self.linear, self.replaced = nn.Linear(4, 1), replaced
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x):
        if self.replaced:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_buffer_of_whole_numbers_alone(bad, replaced):
    counts = []

    def make():
        counts.append(Counter(replaced))
        return counts[-1]

    run(make, bad)
    assert [int(each.calls) for each in counts] == [5, 5, 5]


class Normaliser(nn.Module):
    """Knows the scale of its inputs from the first batch on; shared by two modules."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.scale is None:
            self.scale = x.float().abs().mean()
        return self.linear(x / self.scale)


def test_a_buffer_that_the_first_batch_makes():
    run(Normaliser, 0)


class Shared(nn.Module):
    """One running mean in two modules, of which one is in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.other.running_mean = self.one.running_mean
        self.linear = nn.Linear(4, 1)
        self.other.eval()

    def forward(self, x):
        return self.linear(self.one(x) + self.other(x))


def test_a_buffer_of_two_modules():
    run(Shared, 1)


class Teacher(nn.Module):
    """An average of the network, in evaluation mode, whose buffers and weights follow in forward."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def forward(self, x):
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, given in [*pairs, *zip(self.teacher.buffers(), self.student.buffers(), strict=True)]:
                mine.data.copy_(0.5 * mine + 0.5 * given)
            target = self.teacher(x)
        return self.student(x) - target.float()


def test_a_teacher_in_evaluation_mode():
    end = run(Teacher, 2)
    assert float(end["net.teacher.1.running_mean"].abs().sum()) > 0


def watched(guard: BufferGuard) -> list[Tensor]:
    return [copied for _, copied in guard._kept.values() if copied is not None]


def test_a_large_frozen_network_is_not_copied():
    """Not in the first batch either; what forward does not change is not copied from the second batch on."""
    frozen = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Embedding(2**20, 17)).requires_grad_(False)
    net = nn.ModuleDict({"encoder": frozen, "codebook": Codebook("data"), "norm": nn.BatchNorm1d(4)})
    guard = BufferGuard(net)
    for batch in range(5):
        guard.remember()
        assert sum(each.numel() for each in watched(guard)) <= 64, batch
        net["codebook"](net["norm"](torch.randn(3, 4)))
        guard.look()
        assert len(watched(guard)) == 5  # three statistics, and both parameters of the codebook


def test_what_an_optimizer_holds_is_left_to_it():
    """Frozen while the other network's turn comes, as discriminators are."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    guard = BufferGuard(net, [torch.optim.SGD(net[0].parameters(), lr=0.1)])
    guard.remember()
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1)
    guard.look()
    guard.remember()
    assert len(watched(guard)) == 2  # of the layer that no optimizer has


def test_what_a_hook_changes_between_batches_costs_nothing():
    """An average of the weights that a callback moves."""
    net = nn.Linear(4, 4).requires_grad_(False)
    guard = BufferGuard(net)
    for _ in range(4):
        guard.remember()
        guard.look()
        with torch.no_grad():
            net.weight.mul_(0.9)
        assert watched(guard) == []


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_any_kind_are_no_obstacle(training):
    net = nn.Module()
    kinds = [torch.bool, torch.int64, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
    buffers = [torch.zeros(3, 2, dtype=dtype) for dtype in kinds]
    buffers += [torch.zeros(0), torch.zeros(1).expand(5), torch.zeros(3, 4).t(), torch.zeros(3, device="meta")]
    buffers += [torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, 1)]
    for index, buffer in enumerate(buffers):
        net.register_buffer(f"b{index}", buffer)
    guard = BufferGuard(net.train(training))
    for stepped in (False, True, False):
        guard.remember()
        with torch.no_grad():
            net.b7 = net.b7 + 1
            net.b12.add_(math.inf)
        guard.look()
        guard.restore_(only_nonfinite=stepped)
    if training:
        assert float(net.b12.abs().sum()) == 0


def test_a_norm_that_comes_in_mid_training_is_restored_too():
    net = nn.Sequential(nn.Linear(1, 1))
    guard = BufferGuard(net)
    for _ in range(5):
        guard.remember()
    net.append(nn.BatchNorm1d(1))
    for _ in range(16):  # so long it may take until it is found
        guard.remember()
        guard.look()
    guard.remember()
    net(torch.tensor([[torch.inf], [1.0]]))
    assert not net[1].running_mean.isfinite().all()
    guard.restore_()
    assert net[1].running_mean == 0
    assert net[1].num_batches_tracked == 0


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}])
def test_an_average_fed_within_a_skipped_batch_counts_what_it_has_averaged(options):
    """As a plain fp32 loop that leaves out the step of the bad batch alone."""
    batches = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))

    class Module(TinyModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 1)
            self.average = AveragedModel(self.net, **options)

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).float().pow(2).mean()
            return loss * math.inf if batch_idx == 2 else loss

        def on_before_zero_grad(self, optimizer):
            self.average.update_parameters(self.net)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    module, plain = Module(), Module()
    plugin = MasterWeightPrecision("fp16", scaler=DynamicLossScaler.static(1.0))
    make_trainer(plugin).fit(module, loader([*batches]))
    optimizer = plain.configure_optimizers()
    for index, batch in enumerate(batches):
        plain.average.update_parameters(plain.net)
        optimizer.zero_grad()
        plain.training_step(batch, index).backward()
        if index != 2:
            optimizer.step()
    assert plugin.skipped_steps == 1
    assert module.average.n_averaged == plain.average.n_averaged == 6
    for found, expected in zip(module.average.parameters(), plain.average.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
