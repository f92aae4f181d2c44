"""A plan's program on the virtual clock, as a page draws it: spans by rank, and what is held when.

    timeline(plan, rows)      # {"seconds": ..., "ranks": [{"rank": 0, "lanes": [...], ...}], ...}

A span is [begin, duration, kind, name, source, row]: times in nanoseconds, name and source numbers
of ``words``, row the collective that a message is, or -1. ``held`` is [[from when, bytes], ...].

Invariants: where spans are more than a page should hold, those shorter than ``grain`` that stand in
one grain are one, as long as their sum, and ``grain`` says so; likewise the most that is held in a
grain stands for it. Not here: the clock (runtime/simulate/simulator.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.simulate.simulator import simulate
from dtensor.runtime.simulate.trace import Kind, Span, Trace
from dtensor.sharding.plan.plan import Plan

_MOST_SPANS, _MOST_HELD = 16_000, 4_000
_NS = 1e9
KINDS = get_args(Kind)


class _Words:
    """Strings, each once; a string's number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def simulated(plan: Plan) -> Trace:
    """One run of the plan's program under its schedule."""
    timetable = plan.timetable
    return simulate(plan, timetable.grid if isinstance(timetable, GridTimetable) else None)


def timeline(plan: Plan, rows: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """``rows``: of a collective's kind and what it reads, the row of the page."""
    trace = simulated(plan)
    words = _Words()
    grain = _grain(trace)
    lanes: dict[int, list[list[list[Any]]]] = {rank: [] for rank in trace.ranks}
    for (rank, _), spans in sorted(trace.lanes().items()):
        lanes[rank].append(_drawn(spans, grain, words, rows))
    step = trace.seconds / max(1, _MOST_HELD // max(1, len(trace.ranks)))
    return {
        "seconds": trace.seconds,
        "idle": trace.idle,
        "alike": trace.alike,
        "grain": grain,
        "words": list(words.numbers),
        "ranks": [
            {
                "rank": rank,
                "computes": trace.spent(rank, "compute"),
                "waits": trace.spent(rank, "wait"),
                "messages": trace.spent(rank, "communication"),
                "peak": peak,
                "lanes": lanes[rank],
                "held": _held(held, step),
            }
            for rank, peak, held in zip(trace.ranks, trace.peak_bytes, trace.held_bytes)
        ],
    }


def _grain(trace: Trace) -> float:
    """The seconds under which spans are drawn together; 0 where there are few."""
    grain = 0.0
    lanes = trace.lanes()
    while sum(_pieces(spans, grain) for spans in lanes.values()) > _MOST_SPANS:
        grain = grain * 2 or trace.seconds / 4096
    return grain


def _place(span: Span, grain: float) -> tuple[float, str]:
    """Equal for spans that are drawn together."""
    small = span.seconds < grain
    return (span.begin // grain, span.kind) if small else (span.begin, "")


def _pieces(spans: Sequence[Span], grain: float) -> int:
    return sum(1 for _ in itertools.groupby(spans, lambda span: _place(span, grain)))


def _drawn(
    spans: Sequence[Span], grain: float, words: _Words, rows: Mapping[tuple[str, str], int]
) -> list[list[Any]]:
    boxes: list[list[Any]] = []
    for _, group in itertools.groupby(spans, lambda span: _place(span, grain)):
        those = list(group)
        first = those[0]
        name = first.name if len(those) == 1 else f"{first.name} and {len(those) - 1} more"
        row = _row(first, rows) if len(those) == 1 else -1
        seconds = sum(span.seconds for span in those)
        boxes.append(
            [
                round(first.begin * _NS),
                round(seconds * _NS),
                KINDS.index(first.kind),
                words(name),
                words(first.source or ""),
                row,
            ]
        )
    return boxes


def _row(span: Span, rows: Mapping[tuple[str, str], int]) -> int:
    """Which collective it is, or waits for."""
    verb, what = span.label.verb, span.label.what
    return rows.get(("transfer" if verb in ("send", "receive") else verb, what), -1)


def _held(changes: Sequence[tuple[float, int]], step: float) -> list[list[int]]:
    """What is held from when on; where changes are many, the most within each step."""
    if len(changes) > _MOST_HELD and step:
        most: dict[int, int] = {}
        before = 0
        for when, held in changes:
            at = int(when / step)
            most[at] = max(most.get(at, before), held)
            before = held
        changes = [(at * step, held) for at, held in most.items()]
    levels: list[list[int]] = []
    for when, held in changes:
        at = round(when * _NS)
        if levels and levels[-1][0] == at:
            levels[-1][1] = max(levels[-1][1], held)
        elif not levels or levels[-1][1] != held:
            levels.append([at, held])
    return levels
