"""A pipelined training step on Ray, beside torch.distributed.pipelining on two processes.

    OMP_NUM_THREADS=1 python -m benchmarks.pipelining [--width 64] [--rounds 20] [--write]

Two ranks, one thread each, 8 microbatches of 4 sequences of 64 tokens through 4 transformer blocks
(pipelining_peer.py), two on each rank; with two stages per rank a stage is one block. Both sides
take whole training steps: forward, backward, gradients accumulated over microbatches, SGD. The same
weights, the same batch; all gradients are compared with plain torch's before timing, and the losses
of all steps with each other.

One run, both sides warm. A round times each pair of schedules once, ours and theirs one right after
the other, the order alternating; ratios are taken pair by pair, so that what else the machine does
falls on both alike. The processes of the side that does not run block on a socket; both sides have
the batch where it is used, and are timed at the controller, which gets every loss.

ideal: (M + P - 1) t + u, the time of a 1F1B whose messages and instructions cost nothing. t is what
one microbatch costs one rank, forward and backward of its blocks in eager torch, measured in each
round in the peer's processes, both at once; u its optimizer's step. A schedule without bubbles
could be faster than that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import ray
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

import dtensor as dt
from benchmarks.pipelining_peer import LR, NUM_RANKS, Peers, Shape, stage_names
from benchmarks.smallest import parsed

Run = Callable[[int], list[float]]
"""Takes that many training steps; their losses."""

RTOL = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two schedules that are timed against each other."""

    ours: str
    schedule: dt.Schedule
    num_stages: int
    theirs: str


def pairs(shape: Shape) -> tuple[Pair, ...]:
    m = shape.microbatches
    return (
        Pair(ours="OneFOneB", schedule=dt.OneFOneB(m), num_stages=2, theirs="1F1B"),
        Pair(ours="ZBV", schedule=dt.ZBV(m), num_stages=4, theirs="ZBVZeroBubble"),
        Pair(ours="ZBH1", schedule=dt.ZBH1(m), num_stages=2, theirs="InterleavedZeroBubble"),
    )


def our_step(shape: Shape, mesh: dt.Mesh, pair: Pair) -> dt.TrainStep:
    names = stage_names(shape, pair.num_stages)
    stages = {"pp": [[f"{n}.*" for n in stage] for stage in names]}
    model = dt.parallelize(shape.model(), mesh, {}, stages=stages)
    return dt.train_step(
        model,
        lambda model, x, y: F.mse_loss(model(x), y),
        torch.optim.SGD(model.parameters(), lr=LR),
        schedule=pair.schedule,
    )


def runs(step: dt.TrainStep, batch: Sequence[dt.DTensor]) -> Run:
    """As a training loop takes them: the controller runs ahead, losses are read at the end."""

    def run(count: int) -> list[float]:
        return [float(loss) for loss in [step(*batch) for _ in range(count)]]

    return run


# -- both compute the same -------------------------------------------------------------------------


def check_gradients(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest element of that gradient."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    worst = max(float((found[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items())
    assert worst < RTOL, worst
    return worst


def plain_gradients(shape: Shape) -> dict[str, Tensor]:
    """Of the whole batch at once, on one process."""
    model = shape.model()
    x, y = shape.batch()
    F.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step, by schedule, one item a round; ``ideal`` as in the module docstring."""

    found: dict[str, list[float]]
    ideal: list[float]
    worst_loss: float


def measure(
    shape: Shape,
    timed: Sequence[tuple[tuple[str, Run], tuple[str, Run]]],
    peers: Peers,
    rounds: int,
    steps: int,
) -> Times:
    found: dict[str, list[float]] = {name: [] for pair in timed for name, _ in pair}
    losses: dict[str, list[float]] = {name: [] for name in found}
    ideal: list[float] = []
    for number in range(rounds + 1):
        t, u = peers.ideal(steps)
        ideal.append((shape.microbatches + NUM_RANKS - 1) * t + u)
        for pair in timed:
            for name, run in pair if number % 2 else pair[::-1]:
                begin = time.perf_counter()
                losses[name] += run(steps)
                found[name].append((time.perf_counter() - begin) / steps)
    for times in (*found.values(), ideal):
        del times[0]  # the first round warms up
    reference = next(iter(losses.values()))
    worst = max(
        abs(one - other) / other
        for several in losses.values()
        for one, other in zip(several, reference, strict=True)
    )
    assert worst < RTOL, worst
    return Times(found=found, ideal=ideal, worst_loss=worst)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95% of the median, by bootstrap."""
    sample = numpy.array(ratios)
    result = stats.bootstrap(
        (sample,), numpy.median, method="percentile", rng=numpy.random.default_rng(0)
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def report(shape: Shape, made: Sequence[Pair], times: Times) -> list[str]:
    """The table: a line for each pair, and one for the best bubble-free schedules of both."""
    ideal = statistics.median(times.ideal)
    lines = [
        f"{'ours':<10} {'theirs':<22} {'ours ms':>8} {'theirs':>8} {'/ideal':>7} {'theirs':>7}"
        f" {'ratio':>7}  95% interval"
    ]
    zero_bubble = [pair for pair in made if pair.theirs != "1F1B"]
    ours_best = min((pair.ours for pair in zero_bubble), key=lambda n: _median(times, n))
    theirs_best = min((pair.theirs for pair in zero_bubble), key=lambda n: _median(times, n))
    shown = [(pair.ours, pair.theirs, "") for pair in made]
    shown.append((ours_best, theirs_best, "  best zero-bubble of each"))
    for ours, theirs, note in shown:
        mine, his = times.found[ours], times.found[theirs]
        ratios = [a / b for a, b in zip(mine, his, strict=True)]
        low, high = interval(ratios)
        over = [
            statistics.median(a / b for a, b in zip(one, times.ideal, strict=True))
            for one in (mine, his)
        ]
        lines.append(
            f"{ours:<10} {theirs:<22} {_median(times, ours) * 1e3:8.1f}"
            f" {_median(times, theirs) * 1e3:8.1f} {over[0]:7.3f} {over[1]:7.3f}"
            f" {statistics.median(ratios):7.3f}  {low:.3f} to {high:.3f}{note}"
        )
    lines.append(f"ideal {ideal * 1e3:.1f} ms, {len(times.ideal)} rounds")
    return lines


def _median(times: Times, name: str) -> float:
    return statistics.median(times.found[name])


def machine() -> str:
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    return (
        f"{os.cpu_count()} shared cores, no GPU, torch {torch.__version__}, ray {ray.__version__}, "
        f"load before {load}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="training steps in one timing")
    parser.add_argument("--write", action="store_true", help="add to benchmarks/results")
    arguments = parsed(parser, width=64, rounds=2, steps=1)
    torch.set_num_threads(1)
    shape = Shape(width=arguments.width)
    lines = [f"d={shape.width}: {shape}", machine()]
    made, mesh, batch = pairs(shape), dt.Mesh(pp=NUM_RANKS), shape.batch()
    with Peers(shape) as peers, dt.launch(mesh, backend="ray"):
        wanted = plain_gradients(shape)
        timed: list[tuple[tuple[str, Run], tuple[str, Run]]] = []
        worst = 0.0
        for pair in made:
            step = our_step(shape, mesh, pair)
            held = [dt.distribute(x, mesh) for x in batch]
            worst = max(
                worst,
                check_gradients(step.gradients(*held), wanted),
                check_gradients(peers.gradients(pair.theirs), wanted),
            )

            def theirs(count: int, kind: str = pair.theirs) -> list[float]:
                return peers.steps(kind, count)

            timed.append(((pair.ours, runs(step, held)), (pair.theirs, theirs)))
        times = measure(shape, timed, peers, arguments.rounds, arguments.steps)
    lines += report(shape, made, times)
    lines.append(
        f"largest differences: gradients {worst:.1e} of their largest element, losses "
        f"{times.worst_loss:.1e}"
    )
    print("\n".join(lines))
    if arguments.write:
        path = Path(__file__).parent / "results" / "pipelining.txt"
        with path.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
