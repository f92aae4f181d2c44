"""Disturb launches with spares several times each; the results must be bitwise unchanged.

    python -m tests.chaos --recover 200 --seed 0       # 200 faults, and the table of their times

The scenarios of `programs.py` alternate, with faults of all kinds (`inside.py`) at random
instructions of random ranks. Results of steps and the final state must be bitwise equal to an
undisturbed run in this process. A lost rank is replaced, and a step whose `Call` raises is undone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft.ray.cluster import RayCluster
from tests.chaos.disturbance import Disturbance, Hung, Outcome, Watchdog, drawn, steps_for
from tests.chaos.inside import Fault
from tests.chaos.programs import SCENARIOS, Result

PATIENCE_S = 300.0  # for a launch, and for each of its faults as much again by `PER_FAULT_S`
PER_FAULT_S = 60.0


def undisturbed(name: str, steps: int) -> Result:
    scenario = SCENARIOS[name]
    body = scenario.make()
    with dt.launch(*scenario.meshes):
        return body(lambda number, act: act(), steps)


def disturbed(
    name: str, faults: Sequence[Fault], steps: int, *, spares: int = 1
) -> tuple[Result, list[Outcome]]:
    """Return the results of the steps and the outcomes of the faults. Raises `Hung` if the launch
    hangs."""
    scenario = SCENARIOS[name]
    body = scenario.make()
    patience_s = PATIENCE_S + PER_FAULT_S * len(faults)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with (
            Watchdog(patience_s, Path(folder)),
            dt.launch(*scenario.meshes, backend="ray", spares=spares, snapshot_every=1) as run,
        ):
            cluster = run.launch.cluster if len(scenario.meshes) > 1 else run.cluster
            assert isinstance(cluster, RayCluster)
            disturbance = Disturbance(cluster, faults, Path(folder))
            result = body(disturbance.step, steps)
            return result, disturbance.outcomes()


def same(a: Any, b: Any) -> bool:
    """Whether both are bitwise equal."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and torch.equal(
                a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
            )
        )
    if isinstance(a, Result):
        return isinstance(b, Result) and same((a.steps, a.state), (b.steps, b.state))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@dataclass(slots=True)
class Row:
    """The results for one program and one kind of fault."""

    count: int = 0
    seen_s: list[float] = field(default_factory=list[float])
    delay_s: list[float] = field(default_factory=list[float])
    by: Counter[str] = field(default_factory=Counter[str])
    failed: int = 0
    hung: int = 0


Rows = dict[tuple[str, str], Row]


def recover(
    count: int,
    seed: int,
    rows: Rows,
    *,
    per_launch: int = 8,
    spares: int = 1,
    only: str = "",
    kinds: Sequence[str] = (),
) -> int:
    """Inject ``count`` faults into the scenarios in turn; return how many launches gave other bits,
    raised or hung."""
    from dtensor.daft.ray.bootstrap.start_ray import start_ray

    start_ray(None)
    names = [name for name in SCENARIOS if only in name]
    expected: dict[tuple[str, int], Result] = {}
    wrong, number, happened, begun = 0, 0, 0, time.monotonic()
    while happened < count and number < 2 * count:
        name = names[number % len(names)]
        size, scenario = min(per_launch, count - happened), SCENARIOS[name]
        steps = steps_for(size, scenario.steps_per_fault)
        if (name, steps) not in expected:
            expected[name, steps] = undisturbed(name, steps)
        own = [kind for kind in kinds if kind in scenario.kinds]
        faults = drawn(size, seed * 10_000 + number, scenario, own)
        number += 1
        failed = hung = 0
        try:
            result, outcomes = disturbed(name, faults, steps, spares=spares)
        except Hung as error:
            hung, outcomes = 1, []
            print(f"{name}, launch {number}: hung, {faults}\n{error}", flush=True)
        except Exception:
            failed, outcomes = 1, []
            print(f"{name}, launch {number}: {faults}\n{traceback.format_exc()}", flush=True)
        else:
            if not same(result, expected[name, steps]):
                failed = 1
                print(f"{name}, launch {number}: other bits, {faults}", flush=True)
        wrong += failed + hung
        print(
            f"{name}: {len(outcomes)} faults, {time.monotonic() - begun:.0f} s so far", flush=True
        )
        happened += len(outcomes) or size
        for each in outcomes:
            row = rows[name, each.fault.kind]
            row.count += 1
            row.seen_s.append(each.seen_s)
            row.delay_s.append(each.delay_s)
            row.by[each.by] += 1
        for kind in {fault.kind for fault in faults} if failed or hung else ():
            rows[name, kind].failed += failed
            rows[name, kind].hung += hung
    seconds = time.monotonic() - begun
    print(f"{happened} faults, {number} launches, {wrong} of them wrong, {seconds:.0f} s")
    return wrong


def table(rows: Rows) -> str:
    """Return the table. `failed` and `hung` count launches under every kind of fault that they
    contained."""
    head = f"{'program':10} {'fault':25} {'count':>5} {'failed':>6} {'hung':>4}"
    lines = [f"{head} {'seen s':>13} {'next step s':>13}  by    (seconds: median, worst)"]
    for (name, kind), row in sorted(rows.items()):
        line = f"{name:10} {kind:25} {row.count:5} {row.failed:6} {row.hung:4}"
        for seconds in filter(None, (row.seen_s, row.delay_s)):
            line += f" {statistics.median(seconds):6.2f} {max(seconds):6.2f}"
        line += "  " + ", ".join(f"{by} {n}" for by, n in row.by.items())
        lines.append(line.rstrip())
    return "\n".join(lines)
