"""Bytes that the controller sends its hosts: for a launch, a load and a first step; of programs.

    OMP_NUM_THREADS=1 python -m benchmarks.sent_to_hosts [--hosts 2 4 8] [--no-large] [--write]

A small GPT trains one step on Ray, a rank to a host, on meshes of all of these sizes: what the run
channel writes is counted, by what is called. Then the programs of a GPT of 16 layers on 128 ranks
(pp=4, dp=4, tp=8, 1F1B of 16 microbatches), which is lowered, verified and never run: what each of
128 hosts would be sent of it. `--write` puts the tables into `benchmarks/results/sent_to_hosts.md`.
Not counted: what Ray itself sends to start a process, which is the same for each of them.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

import dtensor as dt
from benchmarks.plan_large import gpt, gpt_loss
from benchmarks.predicted_time import MEGATRON
from benchmarks.smallest import parsed
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ray.channel import run_channel
from dtensor.daft.ray.ranks.ranks import packed
from dtensor.daft.ray.transports.slots import CrossHostKeys
from dtensor.daft.verification.verifier import verify
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank_builder import Roles
from tests.models import GPT, batch, loss_fn

RESULTS = Path(__file__).parent / "results" / "sent_to_hosts.md"
MIB = 1 << 20
LAYERS, STAGES, MICROBATCHES = 16, 4, 16
PLACEMENTS = {**MEGATRON, "embed.weight": dict(tp=dt.Row()), "head.weight": dict(tp=dt.Row())}
MESHES: dict[str, Callable[[int], dict[str, int]]] = {
    "dp": lambda size: dict(dp=size),
    "tp=2, then dp=2, then pp": lambda size: {
        axis: n for axis, n in dict(pp=size // 4, dp=min(2, size // 2), tp=2).items() if n > 1
    },
}


class Enough(Exception):
    """All is sent: no weights need come home."""


def first_step(axes: dict[str, int]) -> Counter[str]:
    """Bytes by what is called, from the launch to the first step's being sent."""
    sent = Counter[str]()
    encoded = run_channel.encoded

    def counted(number: int, kind: Any, functions: tuple[Any, ...], value: object) -> Any:
        pieces = encoded(number, kind, functions, value)
        sent[functions[-1].__name__ if callable(functions[-1]) else "undo"] += sum(map(len, pieces))
        return pieces

    torch.manual_seed(0)
    model = GPT(vocab=64, width=32, heads=8, layers=4, positions=32)
    halves = [["embed*", "positions*", "blocks.{0..1}.*"], ["blocks.{2..3}.*", "norm*", "head*"]]
    mesh = dt.Mesh(**axes)
    parallel = dt.parallelize(
        model,
        mesh,
        MEGATRON if "tp" in axes else {},
        stages={"pp": halves} if "pp" in axes else None,
    )
    step = dt.train_step(
        parallel,
        loss_fn,
        torch.optim.AdamW(model.parameters()),
        inputs=dict(dp=dt.Row()) if "dp" in axes else None,
        schedule=dt.OneFOneB(microbatches=2) if "pp" in axes else None,
    )
    patched = mock.patch.object(run_channel, "encoded", counted)
    with suppress(Enough), patched, dt.launch(mesh, backend="ray"):
        step(*batch(size=16, length=16, vocab=64))
        raise Enough
    return sent


def table(hosts: Sequence[int]) -> list[str]:
    lines = [
        f"| mesh | {' | '.join(f'{n} hosts' for n in hosts)} | growth |",
        "|---" * (len(hosts) + 2) + "|",
    ]
    for name, axes in MESHES.items():
        found = [first_step(axes(size)) for size in hosts]
        for what in ("all", "load"):
            own = [sum(each.values()) if what == "all" else each[what] for each in found]
            growth = ", ".join(f"{b / a:.2f}" for a, b in pairwise(own))
            cells = " | ".join(f"{nbytes / MIB:.2f}" for nbytes in own)
            lines.append(f"| {name}, {what}, MiB | {cells} | {growth} |")
            print(lines[-1], flush=True)
    return lines


def large() -> list[str]:
    """What hosts would be sent of the program for 128 ranks."""
    with torch.device("meta"):
        module = gpt(LAYERS)
        ids = torch.zeros(64, 2048, dtype=torch.long)
    mesh = dt.Mesh(pp=STAGES, dp=4, tp=8)
    each = LAYERS // STAGES
    stages = [[f"blocks.{{{n * each}..{(n + 1) * each - 1}}}.*"] for n in range(STAGES)]
    stages[0] += ["embed*", "positions*"]
    stages[-1] += ["norm*", "head*"]
    model = dt.parallelize(module, mesh, PLACEMENTS, stages={"pp": stages})
    schedule = dt.OneFOneB(microbatches=MICROBATCHES)
    step = dt.train_step(
        model,
        gpt_loss,
        torch.optim.AdamW(module.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row()),
        schedule=schedule,
    )
    plan = step.plan(ids, ids)
    kinds = ("parameter", "buffer", "constant")
    state = {i.name: f"state {i.label}" for i in plan.inputs if i.kind in kinds}
    grid = schedule.grid(STAGES, STAGES)
    program = lower(plan, grid, roles=Roles.of_plan(plan, state))
    hosts = tuple((rank,) for rank in range(program.size))
    lists = verify(program, hosts).lists
    begin = time.process_time()
    between = CrossHostKeys(program, range(program.size))
    own = host_programs(program, hosts, lists)
    sent = packed(replace(each, meetings=between.of(each.ranks)) for each in own)
    sizes = [len(own.data) + len(functions.data) for own, functions in sent]
    seconds = time.process_time() - begin
    num = sum(len(own.instructions) for own in program.ranks)
    lines = [
        f"{mesh}, {LAYERS} layers, {MICROBATCHES} microbatches: {num:,} instructions.",
        "",
        "| for a host, least, median, most, MB | for all hosts, MB | seconds to make |",
        "|---|---|---|",
        f"| {min(sizes) / 1e6:.2f}, {median(sizes) / 1e6:.2f}, {max(sizes) / 1e6:.2f} "
        f"| {sum(sizes) / 1e6:.1f} | {seconds:.2f} |",
    ]
    print("\n".join(lines))
    return lines


INTRODUCTION = """\
# What the controller sends its hosts

`OMP_NUM_THREADS=1 python -m benchmarks.sent_to_hosts --write`: MiB on the run channel for a launch,
a load and a first step of a small GPT (4 layers of width 32, a rank to a host), of all hosts
together, and of these what loads the program; from each number of hosts to the next, the growth.

When each host was sent the whole program:

| mesh | 2 hosts | 4 hosts | 8 hosts | growth |
|---|---|---|---|---|
| dp, all, MiB | 0.77 | 1.85 | 4.92 | 2.38, 2.67 |
| dp, load, MiB | 0.32 | 0.95 | 3.15 | 2.97, 3.31 |
| tp=2, then dp=2, then pp, all, MiB | 0.59 | 1.54 | 4.36 | 2.62, 2.83 |
| tp=2, then dp=2, then pp, load, MiB | 0.32 | 1.02 | 3.79 | 3.21, 3.72 |

and of the program for 128 ranks 73.03 MB for each host, 9,348 MB for all.

Now:
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--no-small", action="store_true")
    parser.add_argument("--no-large", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    given = parsed(parser, hosts=[2], no_large=True)
    torch.set_num_threads(1)
    lines = [] if given.no_small else table(given.hosts)
    lines += [] if given.no_large else ["", *large()]
    if given.write:
        RESULTS.write_text("\n".join((INTRODUCTION, *lines, "")))


if __name__ == "__main__":
    main()
