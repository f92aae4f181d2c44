"""Pipelines without a flush (PipeDream-2BW), simulated beside the schedules that dtensor has.

    OMP_NUM_THREADS=1 python -m benchmarks.without_flush [--write]

The model is 32 blocks of Llama-3-8B's shape in bf16 with float32 masters and AdamW, on 4 H100s of
one host as stages; a microbatch is one sequence of 4,096 tokens. A step has m microbatches. Every
time comes from `dt.simulate`, which runs the lowered program on a virtual clock.

- *1F1B without a flush*: the seconds that m more microbatches add to an endless 1F1B, and the end
  of a step (vote and update). A second copy of the weights is added to its memory.
- *ZBV, repeated*: the seconds that one more ZBV of m microbatches adds to ZBVs in a row, and the
  end of a step. It is ZBV under delay=1 if a step could begin before the vote of the step before.
- *recomputes norms*: 1F1B without a flush in the memory of ZBV.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtensor as dt
from benchmarks.smallest import parsed

RANKS, TOKENS = 4, 4096
WIDTH, HIDDEN, HEADS, KV_HEADS = 4096, 14336, 32, 8
RESULTS = Path(__file__).parent / "results"


class Block(nn.Module):
    """A layer of Llama without its rotary embedding, whose cost is below 1%."""

    def __init__(self) -> None:
        super().__init__()
        kv = WIDTH // HEADS * KV_HEADS
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            m(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class Simulated:
    """The prediction of a step.

    Attributes:
        seconds: of the whole step.
        end: the seconds after the last backward of any rank: vote and update.
        computes: the seconds of forwards and backwards of the busiest rank.
        peak_bytes: of the fullest rank.
        weight_bytes: of the weights of the first stage.
    """

    seconds: float
    end: float
    computes: float
    peak_bytes: int
    weight_bytes: int


@cache
def simulated(
    schedule: dt.Schedule, num_stages: int, blocks: int, again: tuple[str, ...] = ()
) -> Simulated:
    """Simulate a step. ``again``: what is recomputed in each stage, such as "0.*"."""
    with torch.device("meta"):
        module = nn.Sequential(*(Block() for _ in range(blocks))).bfloat16()
        x = torch.empty(schedule.microbatches, TOKENS, WIDTH, dtype=torch.bfloat16)
    size = blocks // num_stages
    stages = [[f"{n * size + i}.*" for i in range(size)] for n in range(num_stages)]
    mesh, recompute = dt.Mesh(pp=RANKS), list(again) or None
    model = dt.parallelize(module, mesh, {}, stages={"pp": stages}, recompute=recompute)
    step = dt.train_step(
        model,
        lambda model, x: model(x).float().square().mean(),
        torch.optim.AdamW(module.parameters()),
        schedule=schedule,
        master_weights=True,
        topology=dt.topologies.h100(),
    )
    trace = dt.simulate(step, x)
    spans = [span for span in trace.spans if span.kind in ("F", "B", "I", "W")]
    return Simulated(
        trace.seconds,
        trace.seconds - max(span.end for span in spans),
        max(sum(s.seconds for s in spans if s.rank == rank) for rank in trace.ranks),
        max(trace.peak_bytes),
        step.plan(x).memory[0].parameters,
    )


def repeated(schedule: dt.Schedule, num_stages: int, times: int) -> dt.Ordered:
    """Return ``times`` runs of the schedule in a row, without a flush between them."""
    grid, m = schedule.grid(num_stages, RANKS), schedule.microbatches

    def orders(rank: int, *_: int) -> list[str]:
        order = grid.order(rank)
        return [f"{a.stage}{a.kind}{a.microbatch + m * n}" for n in range(times) for a in order]

    return dt.Ordered(orders, m * times)


SCHEDULES = (
    ("1F1B", dt.OneFOneB, 4),
    ("ZBH1", dt.ZBH1, 4),
    ("ZBH2", dt.ZBH2, 4),
    ("ZBV", dt.ZBV, 8),
    ("DualPipeV", dt.DualPipeV, 8),
)


def rows(m: int, blocks: int) -> Iterator[tuple[str, float, float]]:
    """Yield (name, seconds of a step over ideal, GiB of the fullest rank) of each schedule. Ideal
    are the busiest rank's forwards and backwards under ZBV, and the end of the step."""
    zbv = simulated(dt.ZBV(m), 8, blocks)
    ideal = zbv.computes + zbv.end

    def row(name: str, seconds: float, held: int) -> tuple[str, float, float]:
        return name, seconds / ideal, held / 2**30

    for name, schedule, num_stages in SCHEDULES:
        found = simulated(schedule(m), num_stages, blocks)
        yield row(name, found.seconds, found.peak_bytes)
    two, three = (simulated(repeated(dt.ZBV(m), 8, n), 8, blocks) for n in (2, 3))
    yield row("ZBV, repeated", three.seconds - two.seconds + three.end, three.peak_bytes)
    for again in ((), ("*.norm", "*.norm2")):
        two, three = (simulated(dt.OneFOneB(m * n), 4, blocks, again) for n in (2, 3))
        seconds, held = three.seconds - two.seconds + three.end, three.peak_bytes
        name = f"1F1B without a flush, recomputes {'norms' if again else 'nothing'}"
        yield row(name, seconds, held + three.weight_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.set_defaults(blocks=32, microbatches=[8, 16])
    given = parsed(parser, blocks=8, microbatches=[8])
    torch.set_num_threads(1)
    found = {m: list(rows(m, given.blocks)) for m in given.microbatches}
    lines = ["| | " + " | ".join(f"m={m}: of ideal, GiB" for m in found) + " |"]
    lines.append("|---" * (1 + len(found)) + "|")
    for of_each in zip(*found.values(), strict=True):
        figures = (f"{ratio:.3f}, {gib:.1f}" for _, ratio, gib in of_each)
        lines.append(f"| {of_each[0][0]} | {' | '.join(figures)} |")
    print("\n".join(lines))
    if given.write:
        text = "\n".join(["# Pipelines without a flush, simulated", "", HEAD, "", *lines, ""])
        (RESULTS / "without_flush.md").write_text(text)


HEAD = """`python -m benchmarks.without_flush --write`; the module's docstring has the method. The
first figure is the seconds of a step divided by its seconds without any wait, the second the GiB of
the fullest rank."""


if __name__ == "__main__":
    main()
