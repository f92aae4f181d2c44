"""The result of one entry as a line of JSON, a time limit for it, and the text of placements and
errors. The table is made of these."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dtensor.errors import PlanningError
from dtensor.sharding.rules.registry import NoRule
from dtensor.sharding.spec.placements import Placement, Shard

Verdict = Literal["split", "whole", "refused", "wrong", "not counted"]


@dataclass(slots=True, kw_only=True)
class Record:
    """One entry's outcome. ``forward`` and ``gradient`` count placements by outcome ("right",
    "refused", "wrong"); ``free`` those whose forward had no collective, ``free_all`` those with
    none in the backward either."""

    name: str
    verdict: Verdict = "not counted"
    note: str = ""
    differentiable: bool = False
    forward: Counter[str] = field(default_factory=Counter)
    gradient: Counter[str] = field(default_factory=Counter)
    split: int = 0
    free: int = 0
    free_all: int = 0
    rounding: int = 0
    left_out: int = 0  # samples that cannot be captured
    errors: list[str] = field(default_factory=list)  # first lines of refusals
    wrong: list[str] = field(default_factory=list)
    whole_ops: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)  # ops that torch's decompositions replaced
    all_ops: list[str] = field(default_factory=list)

    @property
    def counted(self) -> bool:
        return self.verdict != "not counted"

    @property
    def forward_passes(self) -> bool:
        return self.counted and set(self.forward) == {"right"}

    @property
    def passes(self) -> bool:
        """Whether the forward, and gradients if the entry has them, are right."""
        return self.forward_passes and set(self.gradient) <= {"right"}

    def as_json(self) -> dict[str, Any]:
        # not asdict, which makes a Counter of a Counter's pairs
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "forward": dict(self.forward), "gradient": dict(self.gradient)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        known = {**data, "forward": Counter(data["forward"]), "gradient": Counter(data["gradient"])}
        return Record(**known)


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
    return f"({', '.join(f'S{p.dim}' if isinstance(p, Shard) else str(p)[0] for p in option)})"


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, (NoRule, PlanningError)) else f"{type(error).__name__}: "
    return f"{name}{text[0][:400] if text else ''}"


def add_once(lines: list[str], line: str, most: int = 12) -> None:
    if line not in lines and len(lines) < most:
        lines.append(line)
