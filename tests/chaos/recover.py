"""Ranks that are killed and stopped while they train, and replaced, which must not change a bit.

    python -m tests.chaos --recover 200 --seed 0       # 200 faults, and the table of their times

A launch of two ranks with a spare trains a small transformer; a thread kills or stops a rank when
its program counter says that it is at an instruction drawn beforehand, several times in a launch.
Losses and final state must be those of an undisturbed run in this process, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft.ray.cluster import RayCluster

STEPS_PER_FAULT = 4
PATIENCE_S = 60.0  # for a loss, before a run counts as hung


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """How a model is placed on two ranks."""

    mesh: dt.Mesh
    placements: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "tp2": Case(
        dt.Mesh(tp=2),
        {"*.up.weight": dict(tp=dt.Row()), "*.down.weight": dict(tp=dt.Column())},
    ),
    "pp2": Case(
        dt.Mesh(pp=2),
        {},
        dict(stages={"pp": [["embed*", "blocks.[0-1].*"], ["blocks.[2-3].*", "head*"]]}),
        dict(schedule=dt.OneFOneB(microbatches=2)),
    ),
    "dp2 zero3": Case(dt.Mesh(dp=2), {}, dict(zero={"dp": 3}), dict(inputs=dict(dp=dt.Row()))),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """In run `run`, a rank that is at instruction `part` of its list or behind it, of 1."""

    step: int
    rank: int
    part: float
    signal: signal.Signals


@dataclass(slots=True)
class Outcome:
    """Of one fault: seconds until it was seen, and until the next step had ended."""

    fault: Fault
    by: str = ""
    seen_s: float = 0.0
    delay_s: float = 0.0


def training(case: Case) -> tuple[dt.ParallelModule, Any, dt.TrainStep]:
    torch.manual_seed(0)
    model = dt.parallelize(Net(), case.mesh, dict(case.placements), **case.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = dt.train_step(model, loss_fn, optimizer, clip_grad_norm=1.0, **case.step)
    return model, optimizer, step


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 64, (4, 9), generator=drawn)
    return ids[:, :-1], ids[:, 1:]


def undisturbed(name: str, steps: int) -> tuple[list[float], Any]:
    model, optimizer, step = training(CASES[name])
    with dt.launch(CASES[name].mesh):
        losses = [float(step(*batch(n))) for n in range(steps)]
        return losses, dt.gather_state_dict(model, optimizer)


class Disturbance(threading.Thread):
    """Does what the faults say, one after the other."""

    def __init__(self, cluster: RayCluster, faults: Sequence[Fault]) -> None:
        super().__init__(name="faults", daemon=True)
        self.faults = faults
        self.done: list[tuple[Fault, float]] = []
        self.over = False
        self.first = 0  # the number of the first step's run
        self._cluster = cluster

    def run(self) -> None:
        for fault in self.faults:
            number = self.first + fault.step
            while not self.over:
                process = self._cluster.crew.host(fault.rank)
                at = process.counter.read()
                length = self._length(at.program, fault.rank)
                there = at.run == number and at.position >= int(fault.part * length) >= 0
                if (there or at.run > number) and process.counter.pid:
                    os.kill(process.counter.pid, fault.signal)
                    self.done.append((fault, time.monotonic()))
                    break
                time.sleep(0.00005)

    def _length(self, program: int, rank: int) -> int:
        handle = self._cluster._handles.get(program)
        return 0 if handle is None else len(handle.report.lists[rank])


def drawn(count: int, seed: int, stops: float = 0.25) -> list[Fault]:
    """So many faults of a launch, in the order of their steps."""
    draw = random.Random(seed)
    return [
        Fault(
            step=1 + n * STEPS_PER_FAULT + draw.randrange(STEPS_PER_FAULT - 1),
            rank=draw.randrange(2),
            part=draw.random(),
            signal=signal.SIGSTOP if draw.random() < stops else signal.SIGKILL,
        )
        for n in range(count)
    ]


def disturbed(
    name: str, faults: Sequence[Fault], steps: int, *, spares: int = 1
) -> tuple[list[float], Any, list[Outcome]]:
    """The losses, the final state, and what became of the faults; `TimeoutError` if it hangs."""
    model, optimizer, step = training(CASES[name])
    losses: list[float] = []
    ends: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with dt.launch(CASES[name].mesh, "ray", spares=spares, snapshot_every=1) as run:
            cluster = run.cluster
            assert isinstance(cluster, RayCluster)
            losses.append(float(step(*batch(0))))
            disturbance = Disturbance(cluster, faults)
            disturbance.first = cluster.runs - 1
            disturbance.start()
            try:
                for number in range(1, steps):
                    if number % STEPS_PER_FAULT == 1 and number > 1:
                        _wait_for_spares(cluster)
                    losses.append(float(step(*batch(number))))
                    ends.append(time.monotonic())
                state = dt.gather_state_dict(model, optimizer)
            finally:
                disturbance.over = True
                disturbance.join()
            outcomes = [_outcome(fault, at, cluster, ends) for fault, at in disturbance.done]
    return losses, state, outcomes


def _wait_for_spares(cluster: RayCluster) -> None:
    while not cluster.crew.ready:
        time.sleep(0.05)


def _outcome(fault: Fault, at: float, cluster: RayCluster, ends: Sequence[float]) -> Outcome:
    after = [r for r in cluster.recoveries if r.begun >= at]
    if not after:
        return Outcome(fault, "-")
    recovered = after[0]
    end = next((e for e in ends if e >= recovered.begun + recovered.seconds), ends[-1])
    return Outcome(fault, " and ".join(recovered.by), recovered.begun - at, end - at)


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and torch.equal(
                a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
            )
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def recover(count: int, seed: int, *, per_launch: int = 8, spares: int = 1, only: str = "") -> int:
    """So many faults, on all cases in turn; prints what became of them. 1 if anything differed."""
    from dtensor.daft.ray.starting import start_ray

    start_ray(None)
    names = [name for name in CASES if only in name]
    expected: dict[tuple[str, int], tuple[list[float], Any]] = {}
    rows: dict[str, list[Outcome]] = defaultdict(list)
    wrong, number, begun = 0, 0, time.monotonic()
    while (left := count - sum(map(len, rows.values()))) > 0 and number < 2 * count:
        name, size = names[number % len(names)], min(per_launch, left)
        steps = 1 + size * STEPS_PER_FAULT + 2
        if (name, steps) not in expected:
            expected[name, steps] = undisturbed(name, steps)
        faults = drawn(size, seed * 10_000 + number)
        number += 1
        losses, state, outcomes = disturbed(name, faults, steps, spares=spares)
        if (losses, True) != (expected[name, steps][0], same(state, expected[name, steps][1])):
            wrong += 1
            print(f"{name}, launch {number}: other bits, {faults}", flush=True)
        rows[name] += outcomes
    print(table(rows))
    print(f"{number} launches, {time.monotonic() - begun:.0f} s, {wrong} with other bits")
    return int(wrong > 0)


def table(rows: Mapping[str, Sequence[Outcome]]) -> str:
    head = f"{'case':10} {'fault':8} {'replaced by':20} {'count':>5}"
    lines = [f"{head} {'seen s':>13} {'next step s':>13}    (median, worst)"]
    for name, outcomes in rows.items():
        kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for each in outcomes:
            kinds[each.fault.signal.name, each.by].append(each)
        for (kind, by), own in sorted(kinds.items()):
            seen, delay = [e.seen_s for e in own], [e.delay_s for e in own]
            lines.append(
                f"{name:10} {kind:8} {by:20} {len(own):5} "
                f"{statistics.median(seen):6.2f} {max(seen):6.2f} "
                f"{statistics.median(delay):6.2f} {max(delay):6.2f}"
            )
    return "\n".join(lines)
