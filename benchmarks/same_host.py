"""An all_reduce between processes of one machine: shared memory beside gloo and beside a copy.

    OMP_NUM_THREADS=1 python -m benchmarks.same_host [--ranks 2 4] [--rounds 30] [--write]

f32 of 4 KB, 1 MB and 16 MB, one thread a process, in one run and interleaved: a round times each of
the sides once, and ratios are taken round by round, so that what else the machine does falls on all
alike. The sides:

    gloo       torch.distributed.all_reduce of a copy, as ours makes a new tensor too
    messages   dtensor's transport over gloo: an exchange, then the fold in rank order
    shared     dtensor's transport through shared memory: the same bits
    copy       a clone of the tensor, by each process at the same time: what memory alone costs

All are right before they are timed, and the two of dtensor's equal bit for bit. Processes keep the
memory that they free, as actors do (daft/ray/channel/host.py). A timing is a few all_reduces in a
row, by the clock of rank 0, after all have met.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.smallest import parsed
from dtensor.daft import Buffer, Collective, Program, RankProgram, Wait
from dtensor.daft.ray.channel.host import keep_freed_memory
from tests.daft.actors_here import Here, each
from tests.daft.programs import parts_of

SIZES = {4096: 200, 1 << 20: 20, 16 << 20: 3}
"""Bytes, and how many all_reduces a timing has."""
SIDES = ("gloo", "messages", "shared", "copy")
Times = Mapping[int, Mapping[str, list[float]]]
"""By bytes, by side, seconds of one all_reduce in each round."""


def summing(size: int, nbytes: int) -> Program:
    buffer = (Buffer((nbytes // 4,), torch.float32),)
    reduce = Collective(
        "all_reduce", tuple(range(size)), ("x",), ("y",), buffer, buffer, "sum", f"{nbytes}"
    )
    own = RankProgram(instructions=(reduce, Wait(("y",))), inputs=("x",), outputs=("y",))
    return Program(name="sum", ranks=(own,) * size, functions=(), stage_of=(0,) * size)


def measure(here: Here, rounds: int) -> Times:
    """What each process does."""
    keep_freed_memory()
    size, rank = len(here.hosts), here.index
    dist.init_process_group("gloo", store=here.store, rank=rank, world_size=size)
    sides = {"messages": here.gloo(), "shared": here.join()}
    times: dict[int, dict[str, list[float]]] = {}
    for nbytes, count in SIZES.items():
        program = summing(size, nbytes)
        x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
        runs: dict[str, Callable[[], Tensor]] = {"gloo": lambda x=x: _gloo(x), "copy": x.clone}
        for name, transport in sides.items():
            transport.open({(tuple(range(size)), f"{nbytes}", "collective"): len(times)})
            begin = transport.prepare(parts_of(program, here.hosts)[rank]).begins[rank, 0]
            runs[name] = lambda begin=begin, x=x: begin([x]).wait()[0]
        right = runs["messages"]()
        assert torch.equal(runs["shared"](), right)
        torch.testing.assert_close(runs["gloo"](), right)
        own = times[nbytes] = {side: [] for side in SIDES}
        for number in range(rounds + 2):
            for side in SIDES if number % 2 else SIDES[::-1]:
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(count):
                    runs[side]()
                if number >= 2:  # the first ones touch memory for the first time
                    own[side].append((time.perf_counter() - begun) / count)
    dist.barrier()
    for transport in sides.values():
        transport.close()
    dist.destroy_process_group()
    return times


def _gloo(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def table(size: int, times: Times) -> list[str]:
    lines = [
        f"| {size} ranks | gloo | messages | shared | copy | gloo / shared (10th to 90th) "
        "| messages / shared |",
        "|---|---|---|---|---|---|---|",
    ]
    for nbytes, own in times.items():
        cells = [
            f"{1e6 * min(own[s]):,.0f} / {1e6 * statistics.median(own[s]):,.0f}" for s in SIDES
        ]
        over = {side: sorted(a / b for a, b in zip(own[side], own["shared"])) for side in SIDES}
        tenth = len(over["gloo"]) // 10
        low, high = over["gloo"][tenth], over["gloo"][-1 - tenth]
        ratio = statistics.median(over["gloo"])
        cells.append(f"**{ratio:.1f}** ({low:.1f} to {high:.1f})")
        cells.append(f"{statistics.median(over['messages']):.1f}")
        lines.append(f"| {_bytes(nbytes)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _bytes(number: int) -> str:
    return f"{number >> 20} MB" if number >= 1 << 20 else f"{number >> 10} KB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, argv, ranks=[2], rounds=1)
    lines = [
        "# An all_reduce between processes of one machine",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.same_host --rounds {given.rounds}`: us of one "
        f"all_reduce of f32, minimum / median of {given.rounds} interleaved rounds; ratios round "
        f"by round, their median. {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} before, torch {torch.__version__}.",
        "",
    ]
    for size in given.ranks:
        lines += table(size, each(size, measure, given.rounds)[0])
    print("\n".join(lines))
    if given.write:
        path = Path(__file__).parent / "results" / "same_host.md"
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
