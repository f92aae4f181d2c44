"""The peer of benchmarks/experts.py, expert parallelism by hand on gloo, and all sides' model.

    with Peers(2, shapes) as peers:
        peers.steps(shape, 3)        # [loss, loss, loss]: three training steps

The peer does what Megatron's all-to-all dispatcher does: each process routes its tokens, sorts
their rows by expert, exchanges counts and then rows by ``all_to_all_single``, multiplies its
experts' rows, and sends the results back. Gradients of the router are all_reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import transformers.integrations.moe  # noqa: F401  # registers torch.ops.transformers
from torch import Tensor, nn
from torch.nn import functional as F

import dtensor as dt
from benchmarks.processes import Processes, answer, gloo

LR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``tokens`` of all ranks, ``top_k`` experts for each; experts are of 4 times the width."""

    width: int
    tokens: int
    experts: int = 8
    top_k: int = 2
    steps: int  # training steps in one timing

    def model(self) -> MoE:
        """The same weights at each call."""
        torch.manual_seed(0)
        return MoE(self)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target, f32[tokens, width]."""
        generator = torch.Generator().manual_seed(1)
        size = (self.tokens, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


SHAPES = {
    shape.width: shape
    for shape in (
        Shape(width=64, tokens=1024, steps=10),
        Shape(width=256, tokens=1024, steps=3),
        Shape(width=512, tokens=1024, steps=1),
    )
}


class MoE(nn.Module):
    """One layer of experts with SiLU, and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f, self.num_experts, self.top_k = (
            shape.width,
            4 * shape.width,
            shape.experts,
            shape.top_k,
        )
        self.router = nn.Linear(d, self.num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.num_experts, d, f) * d**-0.5)
        self.down = nn.Parameter(torch.randn(self.num_experts, f, d) * f**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows, route = dt.to_experts(x, ids, self.num_experts)
        h = F.silu(dt.expert_linear(rows, self.up, route))
        return x + dt.from_experts(dt.expert_linear(h, self.down, route), route, weights)


class Sorted(MoE):
    """The same in plain torch, as transformers writes it: rows are sorted with torch.sort."""

    def forward(self, x: Tensor) -> Tensor:
        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        weights, ids = self.route(x)
        expert, slot = ids.reshape(-1).sort(stable=True)
        counts = torch.histc(expert.float(), self.num_experts, 0, self.num_experts - 1)
        stops = counts.cumsum(0).to(torch.int32)
        h = F.silu(grouped_mm(x[slot // self.top_k], self.up, stops))
        rows = grouped_mm(h, self.down, stops) * weights.reshape(-1)[slot][:, None]
        slots = torch.zeros_like(rows).index_copy(0, slot, rows)
        return x + slots.view(x.shape[0], self.top_k, -1).sum(1)


# -- the controller's side -------------------------------------------------------------------------


class Peers(Processes):
    def __init__(self, num: int, shapes: Sequence[Shape]) -> None:
        super().__init__(num, _work, num, shapes)

    def steps(self, shape: Shape, count: int) -> list[float]:
        """Train for ``count`` steps; the losses."""
        return self.ask_one("steps", shape, count)


# -- one process -----------------------------------------------------------------------------------


def _work(rank: int, num: int, shapes: Sequence[Shape], directory: str, pipe: Connection) -> None:
    with gloo(rank, num, directory):
        sides = {shape: _Side(rank, num, shape) for shape in shapes}
        answer(pipe, {"steps": lambda shape, count: sides[shape].steps(count)})


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows; its gradient travels back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return _exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        return _exchanged(grads[0].contiguous(), received, sent), None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows, received, sent)
    return out


class _Side:
    """The peer's part of a model on this rank."""

    def __init__(self, rank: int, num: int, shape: Shape) -> None:
        self.num, self.model = num, shape.model()
        model = self.model
        model.up = nn.Parameter(model.up.detach().chunk(num)[rank].clone())
        model.down = nn.Parameter(model.down.detach().chunk(num)[rank].clone())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        self.tokens, self.batch = shape.tokens, [x.chunk(num)[rank] for x in shape.batch()]

    def forward(self, x: Tensor) -> Tensor:
        model, num = self.model, self.num
        weights, ids = model.route(x)
        expert, slot = ids.reshape(-1).sort(stable=True)
        counts = torch.bincount(expert, minlength=model.num_experts)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        by_source = others.view(num, -1)
        sent, received = counts.view(num, -1).sum(1).tolist(), by_source.sum(1).tolist()
        rows = _Exchange.apply(x[slot // model.top_k], sent, received)
        local = torch.arange(by_source.shape[1]).repeat(num).repeat_interleave(others)
        order = local.sort(stable=True)[1]
        lengths = by_source.sum(0).tolist()
        parts = rows[order].split(lengths)
        out = [F.silu(p @ up) @ down for p, up, down in zip(parts, model.up, model.down)]
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        rows = _Exchange.apply(torch.cat(out)[back], received, sent)
        rows = rows * weights.reshape(-1)[slot][:, None]
        slots = torch.zeros_like(rows).index_copy(0, slot, rows)
        return x + slots.view(x.shape[0], model.top_k, -1).sum(1)

    def steps(self, count: int) -> list[float]:
        x, y = self.batch
        losses: list[float] = []
        for _ in range(count):
            loss = (self.forward(x) - y).square().sum() / (self.tokens * x.shape[1])
            loss.backward()
            router = self.model.router.weight.grad
            assert router is not None
            dist.all_reduce(router)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(float(total))
        return losses
