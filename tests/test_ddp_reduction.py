"""What the communication hook makes of gradients: sums over micro-batches in fp32, means over ranks, for every wrapper.

The file runs itself as the workers, two processes over gloo.
"""

import sys
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from launch import launch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reference import TinyModule, assert_same, loader, make_batches, make_trainer, snapshot
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_mixprec import MasterWeightPrecision
from lightning_mixprec.master import MasterWeights
from lightning_mixprec.reduction import GradientReduction

WRAPPERS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "find_unused_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
# For each micro-batch of a window, the layers that rank 0 and rank 1 use; the last micro-batch is synchronised, or all.
USES = {
    "all": [("abc", "abc")] * 4,
    "other ones": [("ab", "ac"), ("ab", "ac")],
    "only in the first": [("abc", "abc"), ("ac", "ac")],
    "only in the first of rank 0": [("abc", "ac"), ("ac", "ac")],
    "only in the last of rank 1": [("ac", "ac"), ("ac", "abc")],
    "never": [("ab", "ab")] * 2,
    "synchronised, only in the first": [("abc", "abc"), ("ac", "ac")],
}
BF16_ULP = 2.0**-7  # relative, at most
ODD = 1.015625  # in bf16 64 of its 64ths are not the whole


def cases():
    for wrapper in WRAPPERS:
        for use in USES if wrapper.startswith("find_unused") else ["all"]:
            if wrapper == "static_graph":  # torch cannot keep the first backward of a static graph to itself
                use = "synchronised"
            for dtype in ("compute", "fp32"):
                yield wrapper, use, dtype


class Layers(nn.Module):
    """Three linear layers, of which `use` says which take part; the norm is fp32.

    One lies in memory by columns, as channels_last has convolutions.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.c.weight = nn.Parameter(self.c.weight.detach().T.contiguous().T)
        self.norm = nn.LayerNorm(5)

    def forward(self, x, use):
        h = self.norm(x)
        for name in use:
            layer = getattr(self, name)
            h = h + layer(h.to(layer.weight.dtype)).float()
        return h


def dtypes(net):
    return {name: torch.float32 if "norm" in name else torch.bfloat16 for name, _ in net.named_parameters()}


def expected_gradients(net, inputs, uses):
    """Each micro-batch by itself, in this process: its bf16 gradient, summed in fp32, half of it for each rank."""
    total = {}
    for of_ranks, used in zip(inputs, uses, strict=True):
        for x, use in zip(of_ranks, used, strict=True):
            copy = Layers()
            copy.load_state_dict(net.state_dict())
            for name, param in copy.named_parameters():
                param.data = param.data.to(dtypes(net)[name])
            copy(x, use).pow(2).mean().backward()
            for name, param in copy.named_parameters():
                if param.grad is not None:
                    total[name] = total.get(name, 0) + param.grad.float() / 2
    return total


def reduce(wrapper, use, dtype):
    """Gradients and what they should be, of three windows in a row."""
    torch.manual_seed(0)
    net = Layers()
    masters = MasterWeights(net, dtypes(net))
    model = DistributedDataParallel(net, **WRAPPERS[wrapper])
    reduction = GradientReduction(masters, dtype)
    reduction.follow(model)
    uses = USES.get(use, [("abc", "abc")])
    windows = []
    for _ in range(3):
        inputs = [[torch.randn(4, 5) for _ in range(2)] for _ in uses]
        for index, used in enumerate(uses):
            alone = index + 1 < len(uses) and not use.startswith("synchronised")
            with model.no_sync() if alone else nullcontext():
                loss = model(inputs[index][dist.get_rank()], used[dist.get_rank()]).pow(2).mean()
                reduction.put_aside()
                loss.backward()
                reduction.bring_back()
        grads = {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}
        windows.append((grads, expected_gradients(net, inputs, uses)))
        masters.gradients.release(net.parameters())
        net.zero_grad()
    return windows


def reduce_sparse(dtype):
    """The gradient of a sparse bf16 embedding after two micro-batches, the second synchronised."""
    net = nn.Embedding(4, 2, sparse=True)
    masters = MasterWeights(net, {"weight": torch.bfloat16})
    model = DistributedDataParallel(net)
    reduction = GradientReduction(masters, dtype)
    reduction.follow(model)
    for context in (model.no_sync(), nullcontext()):
        with context:
            loss = model(torch.tensor([dist.get_rank(), 3])).float().sum()
            reduction.put_aside()
            loss.backward()
            reduction.bring_back()
    return net.weight.grad.to_dense().float()


class Constant(L.LightningModule):
    """One bf16 weight whose gradients are `gradient` in each micro-batch, the mean over ranks."""

    def __init__(self, gradient, other=0.0, manual=False):
        super().__init__()
        self.automatic_optimization = not manual
        self.other = other  # rank 1's
        self.net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
        nn.init.constant_(self.net[0].weight, 4.0)
        self.gradient, self.seen = gradient, []

    def training_step(self, batch, batch_idx):
        assert self.net[0].weight.dtype == torch.bfloat16
        mine = 2 * self.gradient - self.other if self.global_rank == 0 else self.other
        loss = self.net(torch.full((1, 1), mine)).float().sum()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.net[0].weight.grad.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def accumulate(gradient, reduce_dtype, **options):
    """How far the weight has moved after a window of 64 micro-batches, and the gradient that hooks saw."""
    plugin = MasterWeightPrecision("bf16", reduce_dtype=reduce_dtype)
    trainer = make_trainer(plugin, accumulate_grad_batches=64, use_distributed_sampler=False, **options)
    module = Constant(gradient)
    trainer.fit(module, loader([torch.zeros(1)] * 64))
    return 4.0 - module.net[0].weight.item(), module.seen


def accumulate_with_hooks(**options):
    """What is said of a hook that would have to see the sum over a window."""
    module = Constant(1.0)
    module.net[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(MasterWeightPrecision("bf16"), accumulate_grad_batches=4, **options)
        trainer.fit(module, loader([torch.zeros(1)] * 8))
    return [str(each.message) for each in caught if "register_post_accumulate_grad_hook" in str(each.message)]


def step_once(reduce_dtype, manual, **options):
    """How far the weight moves in a step with gradients of 1 and 1/256, whose mean is no bf16 number."""
    trainer = make_trainer(MasterWeightPrecision("bf16", reduce_dtype=reduce_dtype), devices=2, **options)
    module = Constant(257 / 512, other=1 / 256, manual=manual)
    trainer.fit(module, loader([torch.zeros(1)]))
    return 4.0 - module.net[0].weight.item()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    launch(__file__, 2, directory)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("wrapper", "use", "dtype"), list(cases()))
def test_means_of_sums(wrapper, use, dtype, ranks):
    """Also where a layer takes part in some micro-batches, on some ranks: the same bits on all, or no gradient."""
    one, two = (rank[wrapper, use, dtype] for rank in ranks)
    for (mine, expected), (others, _) in zip(one, two, strict=True):
        assert_same(mine, others)
        assert mine.keys() == expected.keys()
        for name, grad in mine.items():
            fp32 = dtype == "fp32" or "norm" in name
            assert grad.dtype == (torch.float32 if fp32 else torch.bfloat16)
            tolerance = 1e-6 if fp32 else BF16_ULP
            error = (grad.float() - expected[name]).abs().max()
            assert error <= tolerance * expected[name].abs().max(), name


@pytest.mark.parametrize("dtype", ["compute", "fp32"])
def test_sparse_gradients_add_up(dtype, ranks):
    expected = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])
    assert all(torch.equal(rank["sparse", dtype], expected) for rank in ranks)


@pytest.mark.parametrize("gradient", [1.0, ODD])
@pytest.mark.parametrize("dtype", ["compute", "fp32"])
def test_64_micro_batches_of_a_64th_are_a_whole(dtype, gradient, ranks):
    in_bf16 = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(64):
        in_bf16 += gradient / 64
    assert gradient == 1.0 or abs(in_bf16.item() - gradient) > 2e-3  # what DDP by itself would make of it
    for rank in ranks:
        moved, seen = rank["accumulate", dtype, gradient]
        assert abs(moved - gradient) < (1e-3 if dtype == "fp32" else BF16_ULP)
        assert [grad.dtype for grad in seen] == [torch.float32]
        assert seen[0].item() == pytest.approx(gradient, abs=1e-6 if dtype == "fp32" else BF16_ULP)


def test_hooks_that_would_see_a_sum_are_named_once(ranks):
    """On one device they see it, as with fp32 weights; DDP is given one micro-batch at a time."""
    (said,) = ranks[0]["late hooks"]
    assert "net.0.weight" in said
    assert "on_before_optimizer_step" in said
    assert ranks[1]["late hooks"] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("manual", [False, True])
def test_means_that_are_no_16_bit_numbers(manual, wrapper, ranks):
    """In the first step too, in which a static graph reduces later than others."""
    for rank in ranks:
        assert rank["step", "fp32", manual, wrapper] == 257 / 512
        assert rank["step", "compute", manual, wrapper] in (256 / 512, 258 / 512)


def test_a_hook_of_the_users_own_is_left_alone_or_refused(ranks):
    for rank in ranks:
        hook, _, plugin = rank["user hook"].partition(" and ")
        assert hook == "DDPStrategy(ddp_comm_hook=allreduce_hook)"
        assert plugin == "MasterWeightPrecision(reduce_dtype='fp32')"
        assert abs(rank["user hook, compute"][0] - 1.0) < BF16_ULP


def test_on_one_device_it_makes_no_difference():
    results = []
    for reduce_dtype in ("compute", "fp32"):
        torch.manual_seed(0)
        module = TinyModule()
        plugin = MasterWeightPrecision("bf16", reduce_dtype=reduce_dtype)
        make_trainer(plugin, accumulate_grad_batches=2).fit(module, loader(make_batches(5)))
        results.append(snapshot(module))
    assert_same(*results)


def test_a_misspelt_dtype_is_answered_with_the_choices():
    with pytest.raises(ValueError, match=r"reduce_dtype='float32'. Choose one of 'compute', 'fp32'"):
        MasterWeightPrecision("bf16", reduce_dtype="float32")


def main(directory: Path) -> None:
    results = {}
    options = {"strategy": "ddp", "devices": 2}
    for dtype in ("compute", "fp32"):
        for gradient in (1.0, ODD):
            results["accumulate", dtype, gradient] = accumulate(gradient, dtype, **options)
    results["late hooks"] = accumulate_with_hooks(use_distributed_sampler=False, **options)
    options["strategy"] = DDPStrategy(ddp_comm_hook=allreduce_hook)
    results["user hook, compute"] = accumulate(1.0, "compute", **options)
    options["strategy"] = DDPStrategy(ddp_comm_hook=allreduce_hook)
    with pytest.raises(MisconfigurationException) as refused:
        accumulate(1.0, "fp32", **options)
    results["user hook"] = str(refused.value).partition(" both")[0]
    for wrapper, kwargs in WRAPPERS.items():
        for key in product(("compute", "fp32"), (False, True)):
            results["step", *key, wrapper] = step_once(
                *key, strategy=DDPStrategy(**kwargs), use_distributed_sampler=False
            )
    for dtype in ("compute", "fp32"):
        results["sparse", dtype] = reduce_sparse(dtype)
    for case in cases():
        results[case] = reduce(*case)
    torch.save(results, directory / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
