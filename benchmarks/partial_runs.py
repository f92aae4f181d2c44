"""Two programs on disjoint ranks of one Ray launch: each alone, and both at once.

    OMP_NUM_THREADS=1 python -m benchmarks.partial_runs [--rounds 10] [--write]

A compiled function on rank 0 and another on rank 1, each on a mesh of its own, with no run that
joins them: one rank computes on each of two cores. In one run and interleaved: a round times

    many       so many calls of each, of some 20 ms, read at the end: alone, then both at once
    small      a call of some ms on rank 1 and its value: alone, then while rank 0 is in one call
               of some seconds

What is to be shown: each takes at most 1.1 times as long as alone.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import dtensor as dt
from benchmarks.smallest import parsed

RESULTS = Path(__file__).parent / "results" / "partial_runs.md"
CALLS = 20
ONE, OTHER = dt.Mesh(tp=1, name="one"), dt.Mesh(tp=1, name="other")


def chain(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    def products(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(length):
            x = (x @ w).tanh()
        return x

    return products


class Side:
    """A function of so many products of `size` squared on a mesh."""

    def __init__(self, mesh: dt.Mesh, size: int, length: int) -> None:
        self.fn = dt.compile(chain(length), mesh)
        x, w = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
        self.x, self.w = dt.distribute(x, mesh), dt.distribute(w / size**0.5, mesh)
        self.read(self.submit(1))

    def submit(self, calls: int) -> dt.DTensor:
        for _ in range(calls):
            made = self.fn(self.x, self.w)
        return made[:1, :1]

    def read(self, made: dt.DTensor) -> float:
        """The time at which its value is there."""
        made.full_tensor()
        return time.perf_counter()


def alone(side: Side, calls: int) -> float:
    begin = time.perf_counter()
    return side.read(side.submit(calls)) - begin


def at_once(one: Side, other: Side, calls: int) -> tuple[float, float]:
    ended = [0.0]

    def read() -> None:
        ended[0] = one.read(first)

    begin = time.perf_counter()
    first, second = one.submit(calls), other.submit(calls)
    reader = threading.Thread(target=read)
    reader.start()
    last = other.read(second)
    reader.join()
    return ended[0] - begin, last - begin


def measure(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """By row, seconds alone and beside the other."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    with dt.launch(ONE, OTHER, backend="ray"):
        one, other = Side(ONE, 256, 20), Side(OTHER, 256, 20)
        large, small = Side(ONE, 1024, 40), Side(OTHER, 256, 4)
        many = [f"{CALLS} calls on rank {rank}" for rank in (0, 1)]
        least = "a small call on rank 1, beside a large one on rank 0"
        for row in (*many, least):
            found[row] = [], []
        for number in range(rounds + 1):
            apart = alone(one, CALLS), alone(other, CALLS)
            together = at_once(one, other, CALLS)
            short = median(alone(small, 1) for _ in range(10))
            begin = time.perf_counter()
            held = large.submit(1)
            time.sleep(0.05)  # it is in the middle of it
            beside = median(alone(small, 1) for _ in range(10))
            small_done = time.perf_counter()
            seconds = large.read(held) - begin
            if number == 0:
                continue  # everything is touched for the first time
            assert small_done - begin < seconds, "the large call is too short to be beside it"
            for row, single, both in zip((*many, least), (*apart, short), (*together, beside)):
                found[row][0].append(single)
                found[row][1].append(both)
    return found


def table(found: dict[str, tuple[list[float], list[float]]]) -> list[str]:
    lines = ["| | alone, ms | at once, ms | ratio |", "|---|---|---|---|"]
    for row, (single, both) in found.items():
        ratio = median(b / a for a, b in zip(single, both, strict=True))
        cells = [f"{1e3 * min(s):.1f} / {1e3 * median(s):.1f}" for s in (single, both)]
        lines.append(f"| {row} | {' | '.join(cells)} | **{ratio:.2f}** |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parsed(parser, rounds=1)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    lines = [
        "# Two programs on disjoint ranks of one launch",
        "",
        f"`OMP_NUM_THREADS=1 python -m benchmarks.partial_runs --rounds {given.rounds}`: ms, least "
        f"/ median of {given.rounds} interleaved rounds; ratios round by round, their median. "
        f"{os.cpu_count()} cores, load {load:.1f} before, torch {torch.__version__}.",
        "",
        *table(measure(given.rounds)),
        "",
    ]
    print("\n".join(lines))
    if given.write:
        RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
