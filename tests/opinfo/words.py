"""A time limit for one entry, and how its placements and errors are written in a line."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.rules.registry import NoRule
from dtensor.sharding.spec.placements import Placement, Shard


class OutOfTime(BaseException):  # not an Exception: no handler on the way takes it for a failure
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def out(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, out)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def placements_text(option: Sequence[Placement]) -> str:
    def short(p: Placement) -> str:
        match p:
            case Shard(dim=dim):
                return f"S{dim}"
            case _:
                return type(p).__name__[0]

    return f"({', '.join(short(p) for p in option)})"


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, (NoRule, PlanningError)) else f"{type(error).__name__}: "
    return f"{name}{text[0][:400] if text else ''}"


def add_once(lines: list[str], line: str, most: int = 12) -> None:
    if line not in lines and len(lines) < most:
        lines.append(line)
