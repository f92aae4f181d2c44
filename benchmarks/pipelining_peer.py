"""torch.distributed.pipelining's side of benchmarks/pipelining.py, and the model of both sides.

    with Peers(Shape(width=256)) as peers:
        peers.steps("1F1B", 3)         # [loss, loss, loss]: three training steps
        peers.ideal(3)                 # (seconds of a microbatch on a rank, of the optimizer)

Two processes on gloo, one thread each, hold every schedule's stages as modules of their own. They
block on a pipe from the controller between two calls, so they are idle while the other side runs.

Each `Shape` is a stack of pre-norm transformer blocks, half of them on each rank: activations go in
and come out, with no embedding and no head, so that all stages cost the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

from benchmarks.processes import Processes, answer, gloo

NUM_RANKS = 2
LR = 1e-2

KINDS: Mapping[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "1F1B": (Schedule1F1B, ((0,), (1,))),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}
"""Schedule and, by rank, its stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``rows`` sequences of ``tokens`` per microbatch."""

    width: int = 256
    heads: int = 4
    blocks: int = 4
    tokens: int = 64
    rows: int = 4
    microbatches: int = 8

    def model(self) -> nn.Sequential:
        """The same weights at each call."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width, self.heads) for _ in range(self.blocks)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target, f32[microbatches * rows, tokens, width]."""
        generator = torch.Generator().manual_seed(1)
        size = (self.microbatches * self.rows, self.tokens, self.width)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=-1)
        q, k, v = (u.view(b, t, self.heads, d // self.heads).transpose(1, 2) for u in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def stage_names(shape: Shape, num_stages: int) -> list[list[str]]:
    """By stage, the names of its blocks in the model."""
    each = shape.blocks // num_stages
    return [[str(each * s + i) for i in range(each)] for s in range(num_stages)]


# -- the controller's side -------------------------------------------------------------------------


class Peers(Processes):
    def __init__(self, shape: Shape) -> None:
        super().__init__(NUM_RANKS, _work, shape)

    def steps(self, kind: str, count: int) -> list[float]:
        """Train for ``count`` steps; the losses."""
        first, second = self.ask("steps", kind, count)
        return first or second  # of the rank that has the last stage

    def gradients(self, kind: str) -> dict[str, Tensor]:
        """The gradients of one step, which changes nothing, under the names of the whole model."""
        first, second = self.ask("gradients", kind)
        return {**first, **second}

    def ideal(self, count: int) -> tuple[float, float]:
        """Seconds of one microbatch on one rank, forward and backward, and of its optimizer step:
        both ranks compute at once and say nothing to each other. Means over ``count`` steps."""
        found = self.ask("ideal", count)
        return sum(t for t, _ in found) / NUM_RANKS, sum(u for _, u in found) / NUM_RANKS


# -- a process of two ------------------------------------------------------------------------------


def _work(rank: int, shape: Shape, directory: str, pipe: Connection) -> None:
    with gloo(rank, NUM_RANKS, directory):
        pipelines = {kind: _Pipeline(rank, shape, kind) for kind in KINDS}
        alone = _Alone(rank, shape)
        calls = {
            "steps": lambda kind, count: pipelines[kind].steps(count),
            "gradients": lambda kind: pipelines[kind].gradients(),
            "ideal": alone.steps,
        }
        answer(pipe, calls)


class _Pipeline:
    """One schedule on this rank, with its part of a model of its own."""

    def __init__(self, rank: int, shape: Shape, kind: str) -> None:
        make, stages_of = KINDS[kind]
        num_stages = sum(map(len, stages_of))
        names = stage_names(shape, num_stages)
        model = shape.model()
        self.parts = {s: nn.Sequential(*(model[int(n)] for n in names[s])) for s in stages_of[rank]}
        self.names = {id(p): name for name, p in model.named_parameters()}
        stages = [
            PipelineStage(part, s, num_stages, torch.device("cpu"))
            for s, part in self.parts.items()
        ]
        self.schedule = make(
            stages[0] if num_stages == NUM_RANKS else stages,
            shape.microbatches,
            loss_fn=F.mse_loss,
        )
        self.parameters = [p for part in self.parts.values() for p in part.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.first, self.last = 0 in self.parts, num_stages - 1 in self.parts
        self.batch = shape.batch()

    def forward_backward(self) -> list[Tensor]:
        x, y = self.batch
        losses: list[Tensor] = []
        given = (x,) if self.first else ()
        wanted = {"target": y, "losses": losses} if self.last else {}
        self.schedule.step(*given, return_outputs=False, **wanted)
        return losses

    def steps(self, count: int) -> list[float]:
        found: list[float] = []
        for _ in range(count):
            losses = self.forward_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found += [float(torch.stack(losses).detach().mean())] if self.last else []
        return found

    def gradients(self) -> dict[str, Tensor]:
        self.forward_backward()
        found = {self.names[id(p)]: p.grad for p in self.parameters if p.grad is not None}
        self.optimizer.zero_grad()
        return found


class _Alone:
    """This rank's half of the blocks as plain torch, with no schedule around it."""

    def __init__(self, rank: int, shape: Shape) -> None:
        names = stage_names(shape, NUM_RANKS)[rank]
        model = shape.model()
        self.part = nn.Sequential(*(model[int(n)] for n in names))
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=LR)
        x, y = (whole.chunk(shape.microbatches) for whole in shape.batch())
        self.microbatches = list(zip(x, y, strict=True))
        self.first, self.last = rank == 0, rank == NUM_RANKS - 1

    def steps(self, count: int) -> tuple[float, float]:
        computing, updating = 0.0, 0.0
        for _ in range(count):
            begin = time.perf_counter()
            for x, y in self.microbatches:
                x = x.detach().requires_grad_(not self.first)
                out = self.part(x)
                if self.last:
                    F.mse_loss(out, y).backward()
                else:
                    out.backward(y)
            middle = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            updating += time.perf_counter() - middle
            computing += middle - begin
        return computing / count / len(self.microbatches), updating / count
