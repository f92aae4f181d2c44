"""A layer of experts whose routing is an argument, with ops that raise for marked tokens; hosts
import this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt

T, D, F, E = 32, 4, 6, 4
EP: dict[str, Mapping[str, dt.Placement]] = {"experts.*": dict(ep=dt.Shard(0))}
TOKENS, ROWS = 7.0, 8.0
"""The marks of tokens for which the op on tokens, before the counts, and the op on rows raise."""


@torch.library.custom_op("expert_layer::check", mutates_args=())
def check(x: Tensor, mark: float) -> Tensor:
    """Raise ValueError if x has the mark. The backward raises if x has minus the mark."""
    if bool((x == mark).any()):
        raise ValueError(f"marked by {mark}")
    return x.clone()


check.register_fake(lambda x, mark: torch.empty_like(x))
dt.rule("expert_layer::check", "b f -> b f")


@torch.library.custom_op("expert_layer::check_grad", mutates_args=())
def check_grad(grad: Tensor, x: Tensor, mark: float) -> Tensor:
    if bool((x == -mark).any()):
        raise ValueError(f"marked by {-mark}")
    return grad.clone()


check_grad.register_fake(lambda grad, x, mark: torch.empty_like(grad))
dt.rule("expert_layer::check_grad", "b f, b f -> b f")


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.mark = inputs
    ctx.save_for_backward(x)


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.expert_layer.check_grad(grad, *ctx.saved_tensors, ctx.mark), None


check.register_autograd(_grad, setup_context=_keep)


class Experts(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, d, f))
        self.down = nn.Parameter(torch.randn(E, f, d))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, route = dt.to_experts(x, ids, E)
        rows = torch.ops.expert_layer.check(rows, ROWS)
        h = dt.expert_linear(rows, self.up, route).relu()
        return dt.from_experts(dt.expert_linear(h, self.down, route), route, weights)


class Model(nn.Module):
    def __init__(self, d: int = D, f: int = F) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.zero = nn.Parameter(torch.zeros(d))
        self.gate = nn.Linear(d, E)
        self.experts = Experts(d, f)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = torch.ops.expert_layer.check(x + 0 * self.zero, TOKENS)
        return self.experts(x, ids, self.gate(x).sigmoid().gather(1, ids.clamp(0, E - 1)))


def loss_fn(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return model(x, ids).square().mean()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens [T D] and ids [T 1] with equally many rows for each expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(T).remainder(E)[torch.randperm(T, generator=generator)]
    return torch.randn(T, D, generator=generator), ids.view(T, 1)
