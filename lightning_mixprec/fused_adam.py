"""Torch's fused Adam kernel, called for one bucket after the other.

Why it exists: the kernel is bound by memory, so a bucket's gradients, values and rounding should go through it while
the bucket is in the cache. ``optimizer.step`` takes everything at once, and costs as much bookkeeping for each call as
the kernel takes for a hundred thousand elements.

What it leaves out: every other optimizer, which is called as it is (:mod:`lightning_mixprec.borrow`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam


def has_fused_kernel(optimizer: Optimizer) -> bool:
    """Whether all of ``optimizer`` is torch's fused Adam or AdamW, nothing derived from it."""
    exact = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return exact and all(group["fused"] and not group["differentiable"] for group in optimizer.param_groups)


def fused_adam(group: dict[str, Any], values: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Torch's fused Adam or AdamW on fp32 values, without the bookkeeping of ``optimizer.step``."""
    for value, state in zip(values, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(value, requires_grad=False)
    beta1, beta2 = group["betas"]
    adam(
        values,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        foreach=False,
        fused=True,
        capturable=group["capturable"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        has_complex=False,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
