"""What a GPU asks of the plugin, on one that is pretended; `test_cuda.py` runs this in a process of its own."""

import os
from itertools import pairwise

import lightning as L
import pretend_cuda
import pytest
import torch
from reference import loader, make_batches, make_module, make_trainer

from lightning_mixprec import DynamicLossScaler, MasterWeightPrecision

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
RUNGS = [("bf16", "fp32"), ("bf16", "split"), ("bf16", "split24"), ("bf16", "none"), ("fp16", "fp32")]
SETTINGS = [(*rung, "fused") for rung in RUNGS] + [("bf16", "split24", "foreach"), ("fp16", "fp32", "SGD")]


@pytest.fixture(autouse=True)
def gpu():
    with pretend_cuda.pretend(os.environ["PRETENDED_DRIVER"]):
        yield


class Waits(L.Callback):
    """How often each batch makes the host wait, and for what."""

    def __init__(self):
        self.marks = []

    def on_train_batch_start(self, *_):
        self.marks.append(len(pretend_cuda.waits))

    def on_train_epoch_end(self, *_):
        self.marks.append(len(pretend_cuda.waits))
        self.batches = [pretend_cuda.waits[start:end] for start, end in pairwise(self.marks)]


def fit(accelerator, precision, masters, make, bad=(), callbacks=(), **options):
    module = make_module(make, bad)
    scaler = DynamicLossScaler(init_scale=16) if precision == "fp16" else None
    plugin = MasterWeightPrecision(precision, masters=masters, scaler=scaler)
    trainer = make_trainer(plugin, accelerator=accelerator, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(make_batches(8)))
    return module


@pytest.mark.parametrize(("precision", "masters", "optimizer"), SETTINGS)
def test_a_fit_ends_as_on_a_cpu_and_hardly_waits(precision, masters, optimizer):
    """An optimizer that takes a flag is queued first; then, or for others before, the answer is read: once a batch."""
    waits, options = Waits(), {"gradient_clip_val": 0.05}
    expected = fit("cpu", precision, masters, OPTIMIZERS[optimizer], **options)
    found = fit("gpu", precision, masters, OPTIMIZERS[optimizer], callbacks=[waits], **options)
    assert_equal_fp32_on_the_host(found, expected)
    first, *others = waits.batches
    assert len(first) == 1, f"the first batch waits for {first}"
    for batch in others:
        if optimizer == "fused" and masters in ("fp32", "split"):
            assert batch == ["event"], f"a batch waits for {batch}"
        else:
            assert ["overflowed" in wait for wait in batch] == [True], f"a batch waits for {batch}"


def assert_equal_fp32_on_the_host(module, expected):
    found = module.state_dict()
    assert {(value.device.type, value.dtype) for value in found.values()} == {("cpu", torch.float32)}
    for name, value in expected.state_dict().items():  # a CPU has norms of its own
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=f"{name} differs")
