"""Faults at an instruction, executed by the rank itself.

    fault = Fault(kind="SIGKILL", step=3, rank=1, part=0.4)
    cluster.ask(1, arm, fault.order(run=12, say="/tmp/.../fault0"))

From the next call on, rank 1 is armed. In run 12, or the first later run in which the process takes
part, the process reports in the file and executes the fault once, before the instruction at
fraction 0.4 of its list. A process that replaces it is not armed. `recover.py` draws faults and
checks their outcomes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtensor.daft import Call
from dtensor.daft.ray.ranks.ranks import Ranks
from dtensor.daft.verification.pairing import instruction_at

KINDS = ("SIGKILL", "SIGSTOP", "exception", "delay", "line closed", "memory closed")
"""`line closed`: the connection to the controller; `memory closed`: what ranks of a machine share.
"""
LATE = "late exception"
"""In a `Call` behind the vote, as of an update: without snapshots that ends a launch on Ray."""
LONGEST_DELAY_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`run`: the first run that may have the fault; `part`: the position in the instruction list,
    as a fraction; `say`: the file for the report."""

    kind: str
    run: int
    part: float
    say: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault before step `step`, or `ahead` runs before it, on a rank at fraction `part` of its
    instruction list."""

    kind: str
    step: int
    rank: int
    part: float
    ahead: int = 0

    def order(self, run: int, say: Path) -> Order:
        return Order(kind=self.kind, run=run + self.ahead, part=self.part, say=str(say))


class Injected(Exception):
    """The exception that an armed `Call` raises."""


_ORDERS: list[Order] = []


def arm(ranks: Ranks, order: Order) -> None:
    """Arm the ranks of this process; runs in the host."""
    counter: Any = ranks._counter
    _ORDERS.append(order)
    if len(_ORDERS) > 1 or "begin" in vars(counter):
        return
    stacks = open(f"{Path(order.say).parent}/stacks-{os.getpid()}", "w")  # noqa: SIM115 - for ever
    faulthandler.register(signal.SIGUSR1, file=stacks)
    begin = counter.begin

    def begun(program: int, run: int) -> None:
        begin(program, run)
        for due in [each for each in _ORDERS if each.run <= run]:
            if _lay(ranks, program, due):
                _ORDERS.remove(due)

    counter.begin = begun


def _lay(ranks: Ranks, program: int, order: Order) -> bool:
    """Insert the fault into this program; return False if the program has no suitable
    instruction."""
    assert ranks._worker is not None
    engine = ranks._worker.engines[program]
    positions: list[int] = engine._order
    if "exception" in order.kind:
        late = order.kind == LATE
        positions = [
            p
            for p in positions
            if isinstance(instruction_at(engine.program, engine.sites[p]), Call)
            and (engine.sites[p][1] >= engine._end_of_undoable[engine.sites[p][0]]) is late
        ]
    if not positions:
        return False
    position = positions[int(order.part * len(positions))]
    step = engine._steps[position]

    def acts() -> None:
        engine._steps[position] = step
        rank, index = engine.sites[position]
        instruction = instruction_at(engine.program, (rank, index))
        said = {
            "at": time.monotonic(),
            "pid": os.getpid(),
            "rank": rank,
            "instruction": index,
            "line": str(instruction),
            "source": getattr(instruction, "source", ""),
        }
        Path(f"{order.say}.part").write_text(json.dumps(said))
        os.rename(f"{order.say}.part", order.say)
        ACTS[order.kind](ranks, order)
        step()

    engine._steps[position] = acts
    return True


def _signal(number: signal.Signals) -> Callable[[Ranks, Order], None]:
    return lambda ranks, order: os.kill(os.getpid(), number)


def _raise(ranks: Ranks, order: Order) -> None:
    raise Injected("on purpose")


def _delay(ranks: Ranks, order: Order) -> None:
    time.sleep(LONGEST_DELAY_S * order.part)


def _close_line(ranks: Ranks, order: Order) -> None:
    """Close connections as if a cable had been pulled: both sides read the end of the stream."""
    frame = sys._getframe()
    while frame.f_code.co_name != "serve":
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["sock"].shutdown(socket.SHUT_RDWR)


def _close_memory(ranks: Ranks, order: Order) -> None:
    assert ranks._joined is not None
    ranks._joined.transport.close()


ACTS: dict[str, Callable[[Ranks, Order], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "exception": _raise,
    LATE: _raise,
    "delay": _delay,
    "line closed": _close_line,
    "memory closed": _close_memory,
}
