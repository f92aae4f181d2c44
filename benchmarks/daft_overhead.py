"""What daft costs beyond the work itself: per instruction, and per run.

    OMP_NUM_THREADS=1 python -m benchmarks.daft_overhead [--ray]

A program of no-op calls, and the same calls as a plain loop over a dict (the peer that every
engine must be measured against). Then, with Ray: the same inside an actor, an exchange of 4 KB
between two actors, and the time of a run that does nothing, alone and with 16 under way. Prints
the best of several, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Cluster,
    Collective,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Wait,
    launch_cluster,
)

NUM_CALLS = 5000
NUM_REDUCTIONS = 300
NOOP = Function(name="noop", source="def forward(x):\n    return (x,)")


def program(lists: Sequence[Sequence[Instruction]]) -> Program:
    ranks = tuple(RankProgram(instructions=tuple(items), state=("x",)) for items in lists)
    return Program(
        name="overhead",
        ranks=ranks,
        functions=(("noop", NOOP),),
        stage_of=(0,) * len(ranks),
    )


def calls() -> list[Instruction]:
    """A chain of `NUM_CALLS` calls, each value freed after its use."""
    items: list[Instruction] = []
    for i in range(NUM_CALLS):
        items.append(Call("noop", ("x" if i == 0 else f"v{i - 1}",), (f"v{i}",)))
        if i:
            items.append(Free((f"v{i - 1}",)))
    return [*items, Free((f"v{NUM_CALLS - 1}",))]


def reductions(size: int) -> list[Instruction]:
    buffer = Buffer((1024,), torch.float32)
    items: list[Instruction] = []
    for _ in range(NUM_REDUCTIONS):
        group = tuple(range(size))
        items.append(
            Collective("all_reduce", group, ("x",), ("s",), (buffer,), (buffer,), "sum", "c")
        )
        items += [Wait(("s",)), Free(("s",))]
    return items


def best_seconds(run: Callable[[], object], times: int = 7) -> float:
    found: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def show(what: str, seconds: float, count: int, unit: str) -> None:
    print(f"{what:<58} {seconds / count * 1e6:9.2f} us per {unit}")


def plain_loop() -> None:
    noop = NOOP.build()
    table: dict[str, object] = {"x": 0}
    for i in range(NUM_CALLS):
        (table[f"v{i}"],) = noop(table["x" if i == 0 else f"v{i - 1}"])
        if i:
            del table[f"v{i - 1}"]


def measure(cluster: Cluster, name: str) -> None:
    size = cluster.size
    cluster.put([{"x": torch.ones(1024)}] * size)
    fed = [{}] * size
    empty = cluster.load(program([[]] * size))
    long = cluster.load(program([calls()] * size))
    reduce = cluster.load(program([reductions(size)] * size))
    idle = best_seconds(lambda: cluster.run(empty, fed).get())
    show(f"{name}: a run that does nothing", idle, 1, "run")

    def ahead() -> None:
        for future in [cluster.run(empty, fed) for _ in range(16)]:
            future.get()

    show(f"{name}: the same, 16 under way", best_seconds(ahead), 16, "run")
    busy = best_seconds(lambda: cluster.run(long, fed).get())
    # In-process the ranks take turns; actors run side by side if there are cores for all.
    ranks = size if name.startswith("in-process") else 1
    show(f"{name}: no-op calls and frees", busy - idle, 2 * NUM_CALLS * ranks, "instruction")
    busy = best_seconds(lambda: cluster.run(reduce, fed).get())
    show(f"{name}: all_reduce of 4 KB", busy - idle, NUM_REDUCTIONS, "all_reduce")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="also inside Ray actors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    show("plain loop over a dict", best_seconds(plain_loop), 2 * NUM_CALLS, "instruction")
    for size in (1, 2):
        with launch_cluster(size) as cluster:
            measure(cluster, f"in-process, {size} ranks")
    if arguments.ray:
        with launch_cluster(2, backend="ray") as cluster:
            measure(cluster, "ray, 2 actors")


if __name__ == "__main__":
    main()
