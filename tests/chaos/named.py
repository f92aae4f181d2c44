"""Launches without spares that are disturbed: the error says which rank it was, and at what.

    python -m tests.chaos --named 30 --seed 0

A launch has a delay first, which changes nothing, then an exception in a `Call`, whose step is
undone, and then a fault that ends it: the error has the rank and the instruction that the rank
said it was at when it did it, comes in time, and nothing of the launch is left (`watch.py`).
"""

from __future__ import annotations

import math
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

import dtensor as dt
from dtensor.daft import ActorLost, CommunicationError, TaskError
from dtensor.daft.errors import DaftError
from dtensor.daft.ray.bootstrap.start_ray import start_ray
from dtensor.daft.ray.cluster import RayCluster
from tests.chaos.disturbance import Disturbance, Hung, Watchdog
from tests.chaos.inside import LATE, Fault
from tests.chaos.programs import CASES, SCENARIOS
from tests.chaos.recover import Rows, undisturbed
from tests.chaos.watch import alive, held, left

ENDS: dict[str, tuple[type[DaftError], str]] = {
    "SIGKILL": (ActorLost, "died"),
    "SIGSTOP": (ActorLost, "has stopped"),
    "line closed": (ActorLost, "its connection to the controller broke"),
    "memory closed": (CommunicationError, "closed"),
    LATE: (TaskError, "Injected: on purpose"),
}
"""What raises, and with what in its text, of faults that end a launch."""
NAMES = (*CASES, "texts tp2")
DEADLINE_S = 2.0
PATIENCE_S = 600.0
STEPS = 6


def drawn_to_end(seed: int, name: str, kind: str) -> list[Fault]:
    draw, scenario = random.Random(seed), SCENARIOS[name]
    kinds = ("delay", "exception", kind)
    return [
        Fault(
            kind=each,
            step=1 + number,
            rank=draw.randrange(scenario.ranks),
            part=draw.random(),
            ahead=draw.randrange(scenario.ahead + 1),
        )
        for number, each in enumerate(kinds)
    ]


def ended(name: str, faults: Sequence[Fault]) -> float:
    """Seconds from the last fault, which ends the launch, to its error; raises what is wrong."""
    scenario, last = SCENARIOS[name], faults[-1]
    body, want = scenario.make(), undisturbed(name, last.step).steps
    steps: list[object] = []
    what, text = ENDS[last.kind]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        disturbance: Disturbance | None = None
        try:
            with (
                Watchdog(PATIENCE_S, Path(folder)),
                pytest.MonkeyPatch.context() as patch,
                dt.launch(*scenario.meshes, backend="ray") as run,
            ):
                assert isinstance(run.cluster, RayCluster)
                disturbance = Disturbance(run.cluster, faults, Path(folder))
                inner, watch = disturbance.step, run.cluster.watch

                def step(number: int, act: object) -> object:
                    if number == last.step:  # what has stopped was stopped by a signal
                        patch.setattr(
                            "dtensor.daft.ray.diagnosis.failure_detector.STALE_S", math.inf
                        )
                        watch.deadline_s = DEADLINE_S  # a long one until now
                    found = inner(number, act)  # type: ignore[arg-type]
                    steps.append(found)
                    return found

                body(step, STEPS)
        except what as error:
            at = time.monotonic()
            assert disturbance is not None and not isinstance(error, Hung)
            said = disturbance.said()[len(faults) - 1]
            failure = error.failure
            assert text in str(error), error
            if last.kind == "line closed":  # it goes on, until it is to say what it has made
                assert failure.rank == said["rank"], (said, str(error))
            elif last.kind == "memory closed":  # both ranks hear of it, and either may say so
                assert failure.index is not None, str(error)
            else:
                known = failure.rank, failure.index
                assert known == (said["rank"], said["instruction"]), (known, said, str(error))
            assert steps == want, "what was before it has other bits"
            return at - said["at"]
    raise AssertionError(f"{last} did not end it")


def named(count: int, seed: int, rows: Rows, *, only: str = "", kinds: str = "") -> int:
    """So many faults that end launches; how many were not as they should be."""
    start_ray(None)
    names = [name for name in NAMES if only in name]
    chosen = [kind for kind in ENDS if kinds in kind]
    wrong, before = 0, None
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        tempfile.tempdir = scratch  # so that what is left there was left by a launch
        for number in range(count):
            name, kind = names[number % len(names)], chosen[number // len(names) % len(chosen)]
            row, faults = rows[name, f"{kind}, no spare"], drawn_to_end(seed + number, name, kind)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    seconds = ended(name, faults)
                found = [] if before is None else left(before, 120.0)
                if before is None or found:  # the first warms up
                    alive()  # a collection: Ray then starts a thread, once
                    before = held()
                assert not found, f"left: {found}"
            except Hung as error:
                row.hung, wrong = row.hung + 1, wrong + 1
                print(f"{kind}, {name}: hung, {faults}\n{error}", flush=True)
            except Exception:
                row.failed, wrong = row.failed + 1, wrong + 1
                print(f"{kind}, {name}: {faults}\n{traceback.format_exc()}", flush=True)
            else:
                row.count += 1
                row.seen_s.append(seconds)
                print(f"{kind}, {name}: named after {seconds:.2f} s", flush=True)
        tempfile.tempdir = None
    return wrong
