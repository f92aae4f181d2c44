"""Faults of one launch: drawn from a seed, placed into ranks before a step, and their outcomes.

    faults = drawn(5, seed=7, scenario=SCENARIOS["tp2"])
    with Watchdog(60.0, folder) as watchdog, dt.launch(...) as run:
        disturbance = Disturbance(run.cluster, faults, folder)
        result = body(disturbance.step, steps_for(5))
        disturbance.outcomes()                     # the replacement, seconds to the next step

If the launch makes no progress for the watchdog's patience, it has hung: the stacks of this process
and of its ranks are written to the folder, and `Hung` is raised.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dtensor.daft import TaskError
from dtensor.daft.ray.cluster import RayCluster
from tests.chaos.inside import LATE, Fault, arm
from tests.chaos.programs import Scenario

HARMLESS = ("exception", LATE, "delay")
"""After which all ranks are there, and connected."""


def steps_for(count: int, every: int) -> int:
    """Return how many steps a launch with this many faults takes: one before and two after."""
    return 1 + count * every + 2


def drawn(
    count: int, seed: int, scenario: Scenario, kinds: Sequence[str] = (), *, twice: float = 0.1
) -> list[Fault]:
    """Draw faults, ordered by step. `kinds`: restrict the scenario's kinds; `twice`: the
    probability that a fault falls into the step of the previous fault, on another rank."""
    draw, every = random.Random(seed), scenario.steps_per_fault
    found: list[Fault] = []
    for n in range(count):
        step, rank = 1 + n * every + draw.randrange(every), draw.randrange(scenario.ranks)
        if found and draw.random() < twice:
            step, rank = found[-1].step, (found[-1].rank + 1) % scenario.ranks
        found.append(
            Fault(
                kind=draw.choice(kinds or scenario.kinds),
                step=step,
                rank=rank,
                part=draw.random(),
                ahead=draw.randrange(scenario.ahead + 1),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """`by`: what replaced a lost rank; and the seconds until the loss was noticed and until the
    next step ended."""

    fault: Fault
    by: str
    seen_s: float
    delay_s: float


class Disturbance:
    """Places faults into the ranks of a cluster. `folder`: for the files in which ranks report."""

    def __init__(self, cluster: RayCluster, faults: Sequence[Fault], folder: Path) -> None:
        self.faults = faults
        self.raised = 0
        self._cluster = cluster
        self._folder = folder
        self._ends: list[float] = []

    def step(self, number: int, act: Callable[[], Any]) -> Any:
        """Return the result of `act` with the faults of this step. For each injected exception that
        `act` raises, call it again, which must behave as if the failed call had not happened."""
        due = [n for n, fault in enumerate(self.faults) if fault.step == number]
        while due and not self._cluster.membership.ready:
            time.sleep(0.02)
        for n in due:
            fault = self.faults[n]
            self._cluster.ask(fault.rank, arm, fault.order(self._cluster.runs, self._said(n)))
        while True:
            try:
                found = act()
            except TaskError as error:
                self.raised += 1
                expected = sum("exception" in f.kind for f in self.faults if f.step <= number)
                if "Injected: on purpose" not in str(error) or self.raised > expected:
                    raise
            else:
                self._ends.append(time.monotonic())
                return found

    def said(self) -> dict[int, dict[str, Any]]:
        """Return by fault what its rank reported before the fault; a fault may be missing if
        another fault prevented it."""
        files = {n: self._said(n) for n in range(len(self.faults))}
        return {n: json.loads(file.read_text()) for n, file in files.items() if file.exists()}

    def outcomes(self) -> list[Outcome]:
        found: list[Outcome] = []
        for n, said in self.said().items():
            at, fault = said["at"], self.faults[n]
            own = next((r for r in self._cluster.recoveries if r.begun >= at), None)
            if own is None or fault.kind in HARMLESS:
                end = next((e for e in self._ends if e >= at), self._ends[-1])
                found.append(Outcome(fault, "-", 0.0, end - at))
            else:
                since = own.begun + own.seconds
                end = next((e for e in self._ends if e >= since), self._ends[-1])
                by = " and ".join(own.by) or "new connections"
                found.append(Outcome(fault, by, own.begun - at, end - at))
        return found

    def _said(self, number: int) -> Path:
        return self._folder / f"fault{number}"


class Hung(Exception):
    """Raised if a launch makes no progress."""


class Watchdog:
    """Interrupts the main thread after `patience_s` and writes stacks to the folder."""

    def __init__(self, patience_s: float, folder: Path) -> None:
        self.hung = False
        self._patience_s = patience_s
        self._folder = folder
        self._timer = threading.Timer(patience_s, self._bark)
        self._timer.daemon = True
        self._before: Any = None

    def __enter__(self) -> Watchdog:
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._timer.start()
        # if not even the interrupt is heard
        faulthandler.dump_traceback_later(3 * self._patience_s, exit=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGINT, self._before)
        if self.hung:
            stacks = sorted(self._folder.glob("stacks*"))
            text = "\n".join(f"-- {file.name}\n{file.read_text()}" for file in stacks)
            raise Hung(f"nothing for {self._patience_s:g} s\n{text}") from error

    def _bark(self) -> None:
        self.hung = True
        for file in self._folder.glob("stacks-*"):
            try:
                os.kill(int(file.name.split("-")[1]), signal.SIGUSR1)
            except ProcessLookupError:
                continue
        with open(self._folder / "stacks of the controller", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        time.sleep(0.5)  # for the ranks to write
        main = threading.main_thread().ident
        assert main is not None
        print("hung", file=sys.stderr, flush=True)
        signal.pthread_kill(main, signal.SIGINT)
