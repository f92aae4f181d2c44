"""The simulated timeline of a plan as data for a page: spans and held bytes of each rank.

    timeline(plan, rows)      # {"seconds": ..., "ranks": [{"rank": 0, "lanes": [...], ...}], ...}

A span is [begin, duration, kind, name, source, row]: times in nanoseconds; name and source as
indices into ``words``; row as the index of the collective's step, or -1. ``held`` is [[time,
bytes], ...]. If there are too many spans, those shorter than ``grain`` seconds that begin in one
interval of that length are merged; likewise, the maximum of held bytes stands for an interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.simulate.simulator import simulate
from dtensor.runtime.simulate.trace import Kind, Span, Trace
from dtensor.sharding.plan.plan import Plan

_MAX_SPANS, _MAX_HELD = 16_000, 4_000
_NANOSECONDS = 1e9
KINDS = get_args(Kind)


class Numbered:
    """Numbers items in the order of first use; calling it returns the number of an item."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, item: Any) -> int:
        return self.numbers.setdefault(item, len(self.numbers))


def simulate_run(plan: Plan) -> Trace:
    """Return the trace of one simulated run of the plan under its schedule."""
    timetable = plan.timetable
    return simulate(plan, timetable.grid if isinstance(timetable, GridTimetable) else None)


def timeline(plan: Plan, rows: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the timeline of a simulated run as JSON data, with spans and held bytes of each rank.
    ``rows``: (kind, label) of a collective -> the index of its step on the page."""
    trace = simulate_run(plan)
    words = Numbered()
    grain = _grain(trace)
    lanes: dict[int, list[list[list[Any]]]] = {rank: [] for rank in trace.ranks}
    for (rank, _), spans in sorted(trace.lanes().items()):
        lanes[rank].append(_boxes(spans, grain, words, rows))
    interval = trace.seconds / max(1, _MAX_HELD // max(1, len(trace.ranks)))
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
                "held": _levels(held, interval),
            }
            for rank, peak, held in zip(trace.ranks, trace.peak_bytes, trace.held_bytes)
        ],
    }


def _grain(trace: Trace) -> float:
    """Return the duration in seconds below which spans are merged; 0 if there are few spans."""
    grain = 0.0
    lanes = trace.lanes()
    while sum(_num_boxes(spans, grain) for spans in lanes.values()) > _MAX_SPANS:
        grain = grain * 2 or trace.seconds / 4096
    return grain


def _merge_key(span: Span, grain: float) -> tuple[float, str]:
    """Return a key that is equal for neighbouring spans that are merged."""
    small = span.seconds < grain
    return (span.begin // grain, span.kind) if small else (span.begin, "")


def _num_boxes(spans: Sequence[Span], grain: float) -> int:
    return sum(1 for _ in itertools.groupby(spans, lambda span: _merge_key(span, grain)))


def _boxes(
    spans: Sequence[Span], grain: float, words: Numbered, rows: Mapping[tuple[str, str], int]
) -> list[list[Any]]:
    """Return the spans as data, after merging."""
    boxes: list[list[Any]] = []
    for _, group in itertools.groupby(spans, lambda span: _merge_key(span, grain)):
        merged = list(group)
        first = merged[0]
        name = first.name if len(merged) == 1 else f"{first.name} and {len(merged) - 1} more"
        row = _row(first, rows) if len(merged) == 1 else -1
        seconds = sum(span.seconds for span in merged)
        boxes.append(
            [
                round(first.begin * _NANOSECONDS),
                round(seconds * _NANOSECONDS),
                KINDS.index(first.kind),
                words(name),
                words(first.source or ""),
                row,
            ]
        )
    return boxes


def _row(span: Span, rows: Mapping[tuple[str, str], int]) -> int:
    """Return the row of the collective that the span is, or waits for; -1 if there is none."""
    verb, label = span.label.verb, span.label.what
    return rows.get(("transfer" if verb in ("send", "receive") else verb, label), -1)


def _levels(changes: Sequence[tuple[float, int]], interval: float) -> list[list[int]]:
    """Return [nanoseconds, bytes held from then on] for each change. If there are many changes,
    only the maximum in each ``interval`` of seconds is returned."""
    if len(changes) > _MAX_HELD and interval:
        maxima: dict[int, int] = {}
        before = 0
        for seconds, held in changes:
            number = int(seconds / interval)
            maxima[number] = max(maxima.get(number, before), held)
            before = held
        changes = [(number * interval, held) for number, held in maxima.items()]
    levels: list[list[int]] = []
    for seconds, held in changes:
        nanoseconds = round(seconds * _NANOSECONDS)
        if levels and levels[-1][0] == nanoseconds:
            levels[-1][1] = max(levels[-1][1], held)
        elif not levels or levels[-1][1] != held:
            levels.append([nanoseconds, held])
    return levels
