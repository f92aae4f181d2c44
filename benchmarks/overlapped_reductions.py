"""Seconds that ranks wait for reductions of gradients in a step of 8 microbatches, simulated.

    OMP_NUM_THREADS=1 python -m benchmarks.overlapped_reductions [--write]

A GPT of 12 layers (GPT-2's shape) with AdamW on H100s, 8 sequences of 1,024 tokens a microbatch and
rank. *after* starts all reductions after the last microbatch, *within* starts them in its backward.
The figures are of the slowest rank in `dt.simulate`, which runs the lowered program on a virtual
clock.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.runtime.lower import overlap
from dtensor.runtime.simulate.trace import Trace, Track
from tests.models import GPT, loss_fn

MICROBATCHES, SEQUENCES = 8, 8
RESULTS = Path(__file__).parent / "results" / "overlapped_reductions.md"


@dataclass(frozen=True, kw_only=True)
class Case:
    axes: dict[str, int] = field(default_factory=lambda: dict(dp=8))
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    schedule: dt.Schedule | None = None  # 1F1B
    topology: dt.Topology | None = None  # NVLink
    dtype: torch.dtype = torch.float32


BF16 = dict(dtype=torch.bfloat16)
PP2 = dict(pp=2, dp=8)
CASES = {
    "dp=8": Case(),
    "dp=8, bf16": Case(**BF16),
    "dp=8, bf16, ZeRO-1": Case(**BF16, model=dict(zero={"dp": 1})),
    "dp=8 over InfiniBand": Case(topology=dt.topologies.h100(infiniband=("dp",))),
    "pp=2, dp=8, 1F1B": Case(axes=PP2, model=dict(stages="auto")),
    "pp=2, dp=8, ZBV": Case(
        axes=PP2, model=dict(stages={"pp": dt.Auto(num_stages=4)}), schedule=dt.ZBV(MICROBATCHES)
    ),
}


def simulated(case: Case, given: argparse.Namespace) -> Trace:
    sizes = dict(vocab=given.vocab, width=given.width, layers=given.layers, positions=given.tokens)
    with torch.device("meta"):
        module = GPT(**sizes, heads=12, tied=False).to(case.dtype)
        rows = SEQUENCES * MICROBATCHES * case.axes["dp"]
        ids = torch.zeros(rows, given.tokens, dtype=torch.long)
    model = dt.parallelize(module, dt.Mesh(**case.axes), {}, **case.model)
    step = dt.train_step(
        model,
        loss_fn,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row()),
        schedule=case.schedule or dt.OneFOneB(MICROBATCHES),
        topology=case.topology,
    )
    step.plan(ids, ids)
    return dt.simulate(step)


def spent(trace: Trace, rank: int, track: Track) -> float:
    """Return the milliseconds of a rank in messages that reduce gradients, or in waits for them."""
    spans = (s for s in trace.spans if s.rank == rank and s.track == track)
    return 1e3 * sum(s.seconds for s in spans if " gradients_" in str(s.label))


def row(name: str, case: Case, given: argparse.Namespace) -> str:
    within = simulated(case, given)
    with patch.object(overlap, "CUT_SECONDS", float("inf")):
        after = simulated(case, given)
    waits = [max(spent(t, rank, "wait") for rank in t.ranks) for t in (after, within)]
    messages = max(spent(after, rank, "communication") for rank in after.ranks)
    steps = [1e3 * t.seconds for t in (after, within)]
    figures = [*(f"{x:.2f} ms" for x in (messages, *waits)), f"{waits[1] / waits[0]:.2f}"]
    figures += [*(f"{x:.1f} ms" for x in steps), f"{steps[1] / steps[0]:.3f}"]
    return f"| {' | '.join([name, *figures])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.set_defaults(vocab=50304, width=768, layers=12, tokens=1024, cases=[*CASES])
    given = parsed(parser, vocab=96, width=48, layers=2, tokens=32, cases=["dp=8"])
    lines = [
        "# Reductions of gradients in the last microbatch's backward, simulated",
        "",
        "`OMP_NUM_THREADS=1 python -m benchmarks.overlapped_reductions --write`; the module's "
        "docstring has the method.",
        "",
        "| | reductions | exposed, after | exposed, within | ratio | step, after | step, within "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n")
    for name in given.cases:
        lines.append(row(name, CASES[name], given))
        print(lines[-1], flush=True)
    if given.write:
        RESULTS.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
