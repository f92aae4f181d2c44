"""What daft costs beyond the work itself: per instruction, and per run.

    OMP_NUM_THREADS=1 python -m benchmarks.daft_overhead [--ray] [--control [--write]]

A program of no-op calls, and the same calls as a plain loop over a dict (the peer that every
engine must be measured against). Then, with Ray: the same inside an actor, an exchange of 4 KB
between two actors, and the time of a run that does nothing, alone and with 16 under way. Prints
the best of several, in microseconds.

`--control` measures runs that do nothing alone, on 2 and on 4 actors, in turns with its peer: as
many calls of Ray's own, of a method that does nothing, to bare actors of the same Ray. `--ray` ends
with it; `--write` puts its table into `benchmarks/results/control.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.smallest import parsed
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
RESULTS = Path(__file__).parent / "results" / "control.md"
INTRODUCTION = """\
# What a run that does nothing costs

`OMP_NUM_THREADS=1 python -m benchmarks.daft_overhead --control --write`: runs of an empty program,
in turns with as many calls of Ray's own to bare actors, one to each and a wait for all. Least and
median of the rounds' means; the ratio is the median of those of the rounds.
"""
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


class Bare:
    """What a plain actor of Ray's is here."""

    def nothing(self) -> None: ...


def control(num_actors: int, rounds: int = 30, times: int = 40) -> str:
    """A row of the table: microseconds of a run and of its peer, the least and the median of the
    rounds' means, and the median of their ratios; CPU of the controller for each run."""
    import ray

    ray_: Any = ray
    with launch_cluster(num_actors, backend="ray") as cluster:
        actors = [ray_.remote(num_cpus=0)(Bare).remote() for _ in range(num_actors)]
        empty, fed = cluster.load(program([[]] * num_actors)), [{}] * num_actors
        cpu_s = 0.0

        def ours() -> None:
            cluster.run(empty, fed).get()

        def rays() -> None:
            ray_.get([actor.nothing.remote() for actor in actors])

        means: dict[Callable[[], None], list[float]] = {ours: [], rays: []}
        for _ in range(200):
            ours()
            rays()
        for _ in range(rounds):
            for each, found in means.items():
                begin, used = time.perf_counter(), time.process_time()
                for _ in range(times):
                    each()
                found.append((time.perf_counter() - begin) / times * 1e6)
                cpu_s += (time.process_time() - used) * (each is ours)
        for actor in actors:
            ray_.kill(actor)
    figures = [f"{min(found):.0f} / {median(found):.0f}" for found in means.values()]
    ratio = median(a / b for a, b in zip(*means.values(), strict=True))
    cpu_us = cpu_s / rounds / times * 1e6
    return f"| {num_actors} | {' | '.join(figures)} | {ratio:.2f} | {cpu_us:.0f} |"


def control_table() -> str:
    head = "| actors | a run, us | Ray's calls, us | ratio | the controller's CPU for a run, us |"
    return "\n".join([head, "|---|---|---|---|---|", *map(control, (2, 4))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="also inside Ray actors")
    parser.add_argument("--control", action="store_true", help="the table of empty runs alone")
    parser.add_argument("--write", action="store_true", help="put that into benchmarks/results")
    arguments = parsed(parser)
    torch.set_num_threads(1)
    if not arguments.control:
        everything(arguments.ray)
    if arguments.ray or arguments.control:
        table = control_table()
        print(table)
        if arguments.write:
            RESULTS.write_text(f"{INTRODUCTION}\n{table}\n")


def everything(on_ray: bool) -> None:
    show("plain loop over a dict", best_seconds(plain_loop), 2 * NUM_CALLS, "instruction")
    for size in (1, 2):
        with launch_cluster(size) as cluster:
            measure(cluster, f"in-process, {size} ranks")
    if on_ray:
        with launch_cluster(2, backend="ray") as cluster:
            measure(cluster, "ray, 2 actors")


if __name__ == "__main__":
    main()
