"""Spawned actors that are lost at drawn points of random programs of tasks.

    python -m tests.chaos --tasks 100

A run is a launch of four actors on three processes, a program of `tests/daft/task_programs.py`, and
one fault, at a drawn call of it: the process of an actor is killed or stopped, by itself in the
middle of a method or from outside; it leaves by `os._exit`, or by `SystemExit`, which ends no
process; or it is ended by `daft.end`. Each result is what the same program gives in-process, or the
loss, which names an actor of that process. Then the others answer, the launch is left within
`LEAVING_S`, and no process of it is there any more.
"""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dtensor import daft
from dtensor.daft.ray.bootstrap.start_ray import start_ray
from dtensor.daft.tasks.actors import info_of
from tests.chaos.recover import Rows
from tests.chaos.watch import running
from tests.daft.actor_classes import same
from tests.daft.task_programs import ACTORS, Player, argument, calls, outcome

LEAVING_S = 25.0  # less than `END_S`, for which leaving waits for a process that does not end
STOPPED_S = 2.0  # for which one may be stopped
ANSWER_S = 600.0


class Victim(Player):
    """`hurt` in the call of this number, if it is given one. What it gives is of its arguments
    alone: a call that is not run, for want of what is lost, changes nothing for those behind it."""

    def start(self) -> None:
        super().start()
        self.hurt: tuple[int, str] | None = None

    def more(self, x: Any) -> Any:
        self.calls += 1
        made = x + self.number
        if self.hurt is not None and self.calls >= self.hurt[0]:
            HURTS[self.hurt[1]]()
        return made

    def get(self) -> Any:
        return self.number

    async def later(self, x: Any) -> Any:
        return x, [x, self.number]

    def will_be(self, how: str, at: int) -> None:
        self.hurt = at, how

    def process(self) -> int:
        return os.getpid()


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _gone() -> None:
    os._exit(3)


def _left() -> None:
    raise SystemExit(3)


HURTS: Mapping[str, Callable[[], None]] = {
    "killed in a call": _killed,
    "stopped in a call": _stopped,
    "os._exit in a call": _gone,
    "SystemExit in a call": _left,
}
FROM_OUTSIDE = ("killed", "stopped", "ended by daft.end")
HOW = (*HURTS, *FROM_OUTSIDE)


def tasks(count: int, seed: int, rows: Rows) -> int:
    """So many faults; how many were not as they should be."""
    start_ray(None)
    wrong = 0
    for number in range(seed, seed + count):
        how, compiled = HOW[number % len(HOW)], number // len(HOW) % 2 == 1
        row, begin = rows["compiled" if compiled else "tasks", how], time.monotonic()
        try:
            with pytest.MonkeyPatch.context() as patch:  # what has stopped was stopped by a signal
                patch.setattr("dtensor.daft.ray.diagnosis.failure_detector.STALE_S", math.inf)
                row.by.update(run(number, how, compiled))
        except Exception:
            row.failed, wrong = row.failed + 1, wrong + 1
            print(f"tasks {number}, {how}:\n{traceback.format_exc()}", flush=True)
        else:
            row.count += 1
            row.seen_s.append(time.monotonic() - begin)
    return wrong


def players() -> list[daft.ActorHandle]:
    made = [daft.spawn(Victim, number) for number in range(ACTORS - 1)]
    return [*made, daft.spawn(Victim, ACTORS - 1, host=made[0])]


def run(number: int, how: str, compiled: bool) -> Counter[str]:
    """What became of the results."""
    rng = random.Random(number)
    session: Any = daft.launch()
    expected = [outcome(future) for future in calls(number, players(), argument(number))]
    session.close(quiet=True)
    victim, at = rng.randrange(ACTORS), rng.randrange(1, 4)
    found: Counter[str] = Counter()
    session = daft.launch("ray", deadline_s=60.0)
    try:
        actors = players()
        pids = [actor.process().get() for actor in actors]
        session.watch.deadline_s = STOPPED_S
        lost = {info_of(a).name for a, pid in zip(actors, pids) if pid == pids[victim]}
        if how in HURTS:
            actors[victim].will_be(how, at).get()
        program = functools.partial(calls, number, actors)
        futures = (daft.compile(program) if compiled else program)(argument(number))
        if how == "killed":
            os.kill(pids[victim], signal.SIGKILL)
        elif how == "stopped":
            os.kill(pids[victim], signal.SIGSTOP)
        elif how not in HURTS:
            daft.end(actors[victim])
        for future, own in zip(futures, expected, strict=True):
            found[_judged(future, own, lost)] += 1
        for actor, pid in zip(actors, pids):
            if how == "SystemExit in a call" or pid != pids[victim]:
                assert actor.process().get(timeout=ANSWER_S) == pid
    finally:
        begin = time.monotonic()
        session.close(quiet=True)
        took = time.monotonic() - begin
    assert took < LEAVING_S, f"left after {took:.1f} s"
    assert not any(map(running, pids)), "a process is left"
    return found


def _judged(future: daft.TaskFuture, expected: Any, lost: set[str]) -> str:
    try:
        made = outcome(future)
    except daft.ActorLost as error:
        assert set(error.failure.actor.split(", ")) & lost, f"not one of {lost}: {error}"
        return "lost"
    if isinstance(made, tuple) and len(made) == 3 and "SystemExit: 3" in str(made[2]):
        return "raised"
    assert same(made, expected), f"{made} instead of {expected}"
    return "as without"
