"""What is said about a CPU without 16-bit instructions is what a clock would say."""

import logging
import time

import pytest
import torch
from reference import TinyModule, loader, make_batches, make_trainer

from lightning_mixprec import MasterWeightPrecision, PrecisionPolicy
from lightning_mixprec.processor import lacks_instructions, slowness

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_torch_tells_by_private_names_that_this_version_has(dtype):
    """`torch.ops.mkldnn._is_mkldnn_bf16_supported` and its sister are asked; without them nothing would be said."""
    assert torch.backends.mkldnn.is_available()
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    found = getattr(torch.ops.mkldnn, names[dtype])()
    assert isinstance(found, bool)
    assert lacks_instructions(dtype) is not found


@pytest.mark.parametrize("dtype", HALF)
def test_a_clock_agrees(dtype):
    def seconds(dtype):
        a = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        return min(times)

    ratio = seconds(dtype) / seconds(torch.float32)
    assert ratio > 4 if lacks_instructions(dtype) else ratio < 8


def test_nothing_is_said_where_torch_does_not_tell(monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert [slowness(dtype) for dtype in HALF] == ["", ""]


@pytest.mark.parametrize(
    ("dtype", "capability", "slow"),
    [(torch.bfloat16, (7, 5), True), (torch.bfloat16, (8, 0), False), (torch.float16, (7, 0), False)],
)
def test_a_gpu_is_asked_for_its_capability(dtype, capability, slow, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    said = slowness(dtype, torch.device("cuda", 1))
    assert bool(said) is slow
    assert not slow or ("Tesla T4 has no bf16" in said and "7.5" in said and "fp16" in said)


@pytest.mark.parametrize("lacking", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_fit_says_it_once_at_its_start(precision, lacking, monkeypatch, caplog):
    monkeypatch.setattr("lightning_mixprec.processor.lacks_instructions", lambda dtype: lacking and dtype in HALF)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer = make_trainer(MasterWeightPrecision(PrecisionPolicy(precision)))
        trainer.fit(TinyModule(), loader(make_batches(3)), loader(make_batches(1)))
        trainer.validate(TinyModule(), loader(make_batches(1)), verbose=False)
    said = [record.getMessage() for record in caplog.records if "instructions" in record.getMessage()]
    assert len(said) == (lacking and precision != "fp32")
    assert not said or f"no {precision} instructions" in said[0]
