"""What ran when on the ranks of a launch: many runs of several programs on one axis of time.

    timeline = timeline_of(recording, begin, end, [])     # list[RecordedRun] of a cluster
    print(timeline)                      # a line for each program, with its runs and seconds
    timeline.save("timeline.json")       # Perfetto, chrome://tracing: each instruction
    timeline._repr_svg_()                # a row for each rank, a colour for each program

Invariants: times are seconds from the beginning of the recording, by the host's monotonic clock, so
those of ranks on several hosts are offset to one another. A run of a rank is one box, grey where it
waits; where nothing is drawn the rank has nothing to do. Other rows (`Note`) are what the caller
says of them. Not here: one step in detail (trace.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtensor.daft import TaskError
from dtensor.daft.cluster.cluster import RecordedRun
from dtensor.daft.run.timestamps import times_of
from dtensor.runtime.drawing import COLOURS, Box, RankRow, drawing
from dtensor.runtime.simulate.trace import Span, spans_of, ticks
from dtensor.sharding.plan.text.words import seconds_text, table

_PALETTE = ("#6c9ef0", "#f2a154", "#6fbf87", "#b493d6", "#f6c95c", "#e57373", "#4db6ac", "#a1887f")
_MANY = "#90a4ae"
_WIDTH = 840.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What something besides the ranks does, in a row of its own."""

    row: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline:
    """What a recording gives; printed, a line for each program. ``spans``: by program and rank,
    what each instruction of each run took; ``num_runs``: of each program; ``ranks``: of the
    launch."""

    seconds: float
    ranks: tuple[int, ...]
    num_runs: Mapping[str, int]
    spans: Mapping[tuple[str, int], tuple[Span, ...]]
    notes: tuple[Note, ...]

    def spent(self, program: str, rank: int) -> float:
        """Seconds in which a rank computes for a program."""
        spans = self.spans.get((program, rank), ())
        return sum(span.seconds for span in spans if span.track == "compute")

    def busy(self, rank: int) -> float:
        """The fraction of the time in which a rank computes."""
        spent = sum(self.spent(program, rank) for program in self.num_runs)
        return spent / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        runs = sum(self.num_runs.values())
        return f"<timeline: {seconds_text(self.seconds)}, runs: {runs:,}, ranks: {len(self.ranks)}>"

    def __str__(self) -> str:
        rows = [["", "runs", *(f"rank {rank}" for rank in self.ranks)]]
        for program, runs in self.num_runs.items():
            spent = [self.spent(program, rank) for rank in self.ranks]
            rows.append([program, f"{runs:,}", *(seconds_text(s) if s else "" for s in spent)])
        rows.append(["computes", "", *(f"{100 * self.busy(rank):.0f}%" for rank in self.ranks)])
        head = f"timeline    {seconds_text(self.seconds)}, {len(self.ranks)} ranks"
        return "\n".join([head, *table(rows)])

    def _repr_html_(self) -> str:
        return self._repr_svg_()

    def save(self, path: str | Path) -> None:
        """As Chrome's trace event format: a process for each rank and other row."""
        places = [*(f"rank {rank}" for rank in self.ranks)]
        places += dict.fromkeys(note.row for note in self.notes)
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": n, "tid": 0, "name": "process_name", "args": {"name": place}}
            for n, place in enumerate(places)
        ]

        def add(place: str, thread: int, name: str, kind: str, begin: float, end: float) -> None:
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": kind,
                    "pid": places.index(place),
                    "tid": thread,
                    "ts": begin * 1e6,
                    "dur": (end - begin) * 1e6,
                }
            )

        for (program, rank), own in self.spans.items():
            for span in own:
                if span.track != "communication":
                    name = f"{program}: {span.name}"
                    thread = int(span.track == "wait")
                    add(f"rank {rank}", thread, name, span.track, span.begin, span.end)
        for note in self.notes:
            add(note.row, 0, note.name, "note", note.begin, note.end)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _repr_svg_(self) -> str:
        """A row for each rank and other row; boxes of one colour that touch are one."""
        names = [*self.num_runs, *dict.fromkeys(note.name for note in self.notes)]
        colours = {
            name: (_PALETTE[n] if n < len(_PALETTE) else _MANY, name)
            for n, name in enumerate(names)
        }
        colours["wait"] = COLOURS["wait"]
        grain = self.seconds / _WIDTH
        rows: list[RankRow] = []
        for rank in self.ranks:
            boxes = [
                Box(s.begin, s.end, "wait" if s.track == "wait" else program, program)
                for (program, own), spans in self.spans.items()
                if own == rank
                for s in spans
                if s.track != "communication"
            ]
            note = f"{100 * self.busy(rank):.0f}%"
            rows.append(RankRow(name=f"rank {rank}", lanes=(_joined(boxes, grain),), note=note))
        for row in dict.fromkeys(note.row for note in self.notes):
            boxes = [Box(n.begin, n.end, n.name, n.name) for n in self.notes if n.row == row]
            rows.append(RankRow(name=row, lanes=(_joined(boxes, grain),)))
        return drawing(
            rows,
            heights=(22.0,),
            length=self.seconds,
            ticks=ticks(self.seconds),
            title=f"timeline: {seconds_text(self.seconds)}",
            note="computes",
            width=_WIDTH,
            colours=colours,
        )


def timeline_of(
    recording: Sequence[RecordedRun], begin: float, end: float, notes: Sequence[Note]
) -> Timeline:
    """Of the runs that were not undone; waits for them. ``begin``, ``end``: by the monotonic clock,
    as the times of ``notes``."""
    spans: dict[tuple[str, int], list[Span]] = defaultdict(list)
    num_runs: dict[str, int] = defaultdict(int)
    size = 0
    for ran in recording:
        program = ran.handle.program
        size = max(size, program.size)
        try:
            given = ran.future.get()
        except TaskError:  # whoever reads what the run was to give has it, too
            continue
        num_runs[program.name] += 1
        for rank, outputs in enumerate(given):
            if instructions := program.ranks[rank].instructions:
                spans_of_run = spans_of(instructions, rank, times_of(outputs), begin)
                spans[program.name, rank] += spans_of_run
    return Timeline(
        seconds=end - begin,
        ranks=tuple(range(size)),
        num_runs=dict(num_runs),
        spans={key: tuple(own) for key, own in spans.items()},
        notes=tuple(
            Note(row=n.row, name=n.name, begin=n.begin - begin, end=n.end - begin) for n in notes
        ),
    )


def _joined(boxes: Sequence[Box], grain: float) -> tuple[Box, ...]:
    """In order, without overlaps, those of one kind that are less than ``grain`` apart as one."""

    def merged() -> Iterator[Box]:
        last: Box | None = None
        for box in sorted(boxes, key=lambda box: (box.begin, box.end)):
            if last is None:
                last = box
            elif box.kind == last.kind and box.begin - last.end < grain:
                last = Box(last.begin, max(last.end, box.end), last.kind, last.title)
            else:
                yield last
                last = Box(max(box.begin, last.end), max(box.end, last.end), box.kind, box.title)
        if last is not None:
            yield last

    return tuple(merged())
