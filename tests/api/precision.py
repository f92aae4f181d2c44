"""Helpers of the precision tests: a small 16-bit GPT, and errors relative to float64.

run = build(dt.Mesh(dp=2), zero=1, master_weights=True)       # bf16 parameters
run = build(dt.Mesh(dp=2), loss=under_autocast, dtype=None)   # float32 parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from tests.models import GPT
from tests.training import Placed, Run, gradients_of

BF16 = torch.bfloat16
STAGES = {"pp": [["embed*", "positions*"], ["blocks*", "norm*", "head*"]]}


def gpt(dtype: torch.dtype | None = BF16) -> nn.Module:
    """Return a GPT of one layer. For any dtype, its parameters have values that 16 bits can
    represent."""
    torch.manual_seed(0)
    return GPT(layers=1).to(BF16).to(dtype or torch.float32)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.view(-1, wide.shape[-1]), targets.view(-1))


def under_autocast(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return loss_of(model, tokens, targets)


def normed(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of normalized logits; autocast normalizes in 16 bits on the CPU and in
    float32 on CUDA."""
    logits = model(tokens)
    rows = F.layer_norm(logits, logits.shape[-1:]).flatten(0, 1)
    return F.cross_entropy(rows, targets.view(-1)) + logits.softmax(-1).square().sum(-1).mean()


def build(
    mesh: dt.Mesh,
    *,
    module: nn.Module | None = None,
    dtype: torch.dtype | None = BF16,
    pins: Any = None,
    stages: Any = None,
    zero: int = 0,
    loss: Any = loss_of,
    clip_grad_norm: float | None = None,
    schedule: dt.Schedule | None = None,
    **options: Any,
) -> Run:
    """Return a `Run`; ``options`` are passed to `Run.of`."""
    inputs = dict(dp=dt.Row()) if "dp" in mesh.shape else None
    return Run.of(
        Placed(axes=mesh.shape, pins=pins or {}, stages=stages, inputs=inputs),
        module=gpt(dtype) if module is None else module,
        zero={"dp": zero} if zero else None,
        loss=loss,
        clip=clip_grad_norm,
        schedule=schedule or dt.GPipe(1),
        **options,
    )


def exact_gradients(one: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients in float64 for the same parameters."""
    return gradients_of(gpt(torch.float64), one, loss_of)


def distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the relative distance of all gradients as one vector."""
    assert set(found) == set(exact)
    apart = sum((found[n].double() - exact[n]).square().sum().item() for n in exact)
    return (apart / sum(g.square().sum().item() for g in exact.values())) ** 0.5
