"""Calls of methods of actors: interpreted, compiled, and by plain Ray, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.daft_tasks [--rounds 5] [--only chain] [--write]

A chain: the first actor makes a value, each other gets it and passes on what it was given, the last
gives a number. Ahead: 200 such chains of two, none waited for before all are submitted. The peer is
the same class as plain Ray actors of the same Ray, called in the same order. Each figure is the
mean time of a chain in a round; least and median over the rounds, and the median of the rounds'
ratios to Ray. `--write` puts the table into `benchmarks/results/daft_tasks.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch

from benchmarks.smallest import parsed
from dtensor import daft

RESULTS = Path(__file__).parent / "results" / "daft_tasks.md"
INTRODUCTION = """\
# Tasks, beside plain Ray calls

`OMP_NUM_THREADS=1 python -m benchmarks.daft_tasks --write`: the time of one chain of calls in ms,
in turns with plain Ray actors of the same class on the same Ray. "chain 2 of 1 KB numpy": the
first actor gives an array that it has, the second gets it and gives its length, which the
controller waits for. "ahead": the same, 200 of them submitted before the first is waited for.
"""
AHEAD = 200


class Stage:
    def __init__(self, nbytes: int, kind: str) -> None:
        number = max(1, nbytes // 4)
        array = numpy.arange(number, dtype=numpy.float32)
        self.value: Any = torch.from_numpy(array) if kind == "torch" else array

    def make(self, number: int) -> Any:
        return self.value

    def forward(self, value: Any) -> Any:
        return value

    def end(self, value: Any) -> int:
        return value.nbytes


@dataclass(frozen=True)
class Case:
    name: str
    actors: int
    nbytes: int
    kind: str
    ahead: int = 1

    @property
    def number(self) -> int:
        """Chains of a round."""
        if self.ahead > 1:
            return self.ahead
        return 50 if self.nbytes <= 1 << 20 else 5


CASES = [
    *(
        Case(f"chain {n} of {size} {kind}", n, nbytes, kind)
        for n in (2, 4)
        for size, nbytes in (("1 KB", 1 << 10), ("1 MB", 1 << 20), ("64 MB", 1 << 26))
        for kind in ("numpy", "torch")
    ),
    Case("200 ahead of 1 KB numpy", 2, 1 << 10, "numpy", AHEAD),
    Case("200 ahead of 1 KB torch", 2, 1 << 10, "torch", AHEAD),
    Case("200 ahead of 1 MB numpy", 2, 1 << 20, "numpy", AHEAD),
    Case("200 ahead on 4 actors of 1 KB numpy", 4, 1 << 10, "numpy", AHEAD),
]


def chain(stages: Sequence[Any], number: int) -> Any:
    value = stages[0].make(number)
    for stage in stages[1:-1]:
        value = stage.forward(value)
    return stages[-1].end(value)


def ray_chain(stages: Sequence[Any], number: int) -> Any:
    value = stages[0].make.remote(number)
    for stage in stages[1:-1]:
        value = stage.forward.remote(value)
    return stages[-1].end.remote(value)


def ways(case: Case) -> dict[str, Callable[[], None]]:
    """A round of each."""
    import ray

    peers = [
        ray.remote(num_cpus=0)(Stage).remote(case.nbytes, case.kind) for _ in range(case.actors)
    ]
    stages = [daft.spawn(Stage, case.nbytes, case.kind) for _ in range(case.actors)]

    def interpreted(number: int) -> Any:
        return chain(stages, number)

    compiled = daft.compile(interpreted)

    def rounds(one: Callable[[int], Any], get: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            if case.ahead > 1:
                made = [one(i) for i in range(case.number)]
                assert all(get(each) == case.nbytes for each in made)
            else:
                for i in range(case.number):
                    assert get(one(i)) == case.nbytes

        return run

    def get(future: daft.TaskFuture) -> Any:
        return future.get()

    return {
        "Ray": rounds(lambda i: ray_chain(peers, i), ray.get),
        "interpreted": rounds(interpreted, get),
        "compiled": rounds(compiled, get),
    }


def measure(case: Case, number: int) -> dict[str, list[float]]:
    """By way, ms of a chain in each round."""
    with daft.launch("ray", deadline_s=120.0):
        runs = ways(case)
        for run in runs.values():
            run()
            run()
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(number):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                taken[name].append((time.perf_counter() - begin) / case.number * 1e3)
    return taken


def row(case: Case, taken: dict[str, list[float]]) -> str:
    cells = [f"{min(times):.2f} / {median(times):.2f}" for times in taken.values()]
    ratios = [
        f"{median(own / peer for own, peer in zip(taken[name], taken['Ray'], strict=True)):.2f}"
        for name in ("interpreted", "compiled")
    ]
    return f"| {case.name} | {' | '.join((*cells, *ratios))} |"


HEAD = """\
| case | Ray | interpreted | compiled | interpreted / Ray | compiled / Ray |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parsed(parser, rounds=1, only=CASES[0].name)
    lines = [HEAD]
    print(HEAD, flush=True)
    for case in CASES:
        if given.only in case.name:
            lines.append(row(case, measure(case, given.rounds)))
            print(lines[-1], flush=True)
    if given.write:
        RESULTS.write_text(INTRODUCTION + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
