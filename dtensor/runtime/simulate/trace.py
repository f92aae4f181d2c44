"""A trace: what each rank computed, sent and waited for, and when; predicted or measured.

    trace.seconds, trace.bubble
    print(trace)                  # a line for each rank
    trace.save("trace.json")      # opens in Perfetto and chrome://tracing

Invariants: spans of one track of a rank do not overlap and stand in order of time; times are in
seconds from the start of the step. `_repr_svg_` draws the timeline in a notebook.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtensor.runtime.drawing import Box, drawing
from dtensor.sharding.plan.text.words import seconds_text, size_text

Track = Literal["compute", "wait", "communication"]
_TRACKS: tuple[Track, ...] = ("compute", "wait", "communication")
CALL = "call"
"""Name of the first span of each rank: it waits for the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``name``: the action and what it does, as `F0 stage 1`; ``source``: the user's line."""

    rank: int
    track: Track
    name: str
    begin: float
    end: float
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """``ranks``: those that have spans, each of which stands for ``alike`` ranks of the mesh.

    ``peak_bytes``: by rank, the most bytes of values at once, parameters and state included.
    """

    name: str
    ranks: tuple[int, ...]
    alike: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the start to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def spent(self, rank: int, track: Track) -> float:
        """Seconds of one rank in spans of a track."""
        return sum(s.end - s.begin for s in self.spans if s.rank == rank and s.track == track)

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they do not compute."""
        total = self.seconds * len(self.ranks)
        busy = sum(self.spent(rank, "compute") for rank in self.ranks)
        return 1.0 - busy / total if total else 0.0

    def __str__(self) -> str:
        rows = [["", "computes", "waits", "messages", "at most holds"]]
        for rank, held in zip(self.ranks, self.peak_bytes, strict=True):
            spent = [seconds_text(self.spent(rank, track)) for track in _TRACKS]
            rows.append([f"rank {rank}", *spent, size_text(held)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        many = f", each like {self.alike - 1} more" if self.alike > 1 else ""
        head = f"trace {self.name}    {seconds_text(self.seconds)} a step, "
        head += f"{100 * self.bubble:.1f}% not computing; {len(self.ranks)} ranks{many}"
        return "\n".join([head, *table])

    def save(self, path: str | Path) -> None:
        """As Chrome's trace event format: a process for each rank, a thread for each track."""
        events: list[dict[str, object]] = []
        for rank in self.ranks:
            named = {"ph": "M", "pid": rank, "tid": 0}
            events.append({**named, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for tid, track in enumerate(_TRACKS):
                events.append({**named, "tid": tid, "name": "thread_name", "args": {"name": track}})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.track,
                    "pid": span.rank,
                    "tid": _TRACKS.index(span.track),
                    "ts": span.begin * 1e6,
                    "dur": (span.end - span.begin) * 1e6,
                    "args": {"source": span.source or ""},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _repr_svg_(self) -> str:
        rows = {rank: number for number, rank in enumerate(self.ranks)}
        return drawing(
            [f"rank {rank}" for rank in self.ranks],
            (
                Box(rows[rank], begin, end, label[:1], f"{label}: {seconds_text(end - begin)}")
                for label, rank, begin, end in _joined(self.spans)
            ),
        )


def _joined(spans: tuple[Span, ...]) -> list[tuple[str, int, float, float]]:
    """(action, rank, begin, end): computing spans of one action that follow one another, as one."""
    found: list[tuple[str, int, float, float]] = []
    at: dict[int, int] = {}
    for span in spans:
        if span.track != "compute":
            continue
        label = span.name.split(":")[0]
        index = at.get(span.rank)
        if index is not None and found[index][0] == label:
            found[index] = (*found[index][:3], span.end)
        else:
            at[span.rank] = len(found)
            found.append((label, span.rank, span.begin, span.end))
    return found
