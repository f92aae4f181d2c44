"""A timeline of a launch: the runs of all programs on its ranks, on one axis of time.

    timeline = timeline_of(recording, begin, end, [])     # list[RecordedRun] of a cluster
    print(timeline)                      # a line for each program, with its runs and seconds
    timeline.save("timeline.json")       # Perfetto, chrome://tracing: each instruction
    timeline._repr_svg_()                # a row for each rank, a colour for each program

Times are seconds from the start of the recording, by each host's monotonic clock, so times on
different hosts have an offset. A run of a rank is one box, grey while the rank waits. The caller
may add rows of `Note`s. trace.py has one step in detail.
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
from dtensor.sharding.plan.text.words import seconds_text
from dtensor.showing import table

_PALETTE = ("#6c9ef0", "#f2a154", "#6fbf87", "#b493d6", "#f6c95c", "#e57373", "#4db6ac", "#a1887f")
_DEFAULT_COLOUR = "#90a4ae"
_WIDTH = 840.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An interval in a row that is no rank, for example of a reward function."""

    row: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline:
    """A recording of the runs on the ranks of a launch. It prints as a line for each program.

    Attributes:
        seconds: the length of the recording.
        num_runs: the number of runs by program.
        spans: by program and rank, the spans of all instructions of all runs.
    """

    seconds: float
    ranks: tuple[int, ...]
    num_runs: Mapping[str, int]
    spans: Mapping[tuple[str, int], tuple[Span, ...]]
    notes: tuple[Note, ...]

    def spent(self, program: str, rank: int) -> float:
        """Return the seconds in which a rank computes for a program."""
        spans = self.spans.get((program, rank), ())
        return sum(span.seconds for span in spans if span.track == "compute")

    def busy(self, rank: int) -> float:
        """Return the fraction of the time in which a rank computes."""
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
        """Write the timeline to ``path`` in Chrome's trace event format: a process for each row."""
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

        for (program, rank), spans in self.spans.items():
            for span in spans:
                if span.track != "communication":
                    name = f"{program}: {span.name}"
                    thread = int(span.track == "wait")
                    add(f"rank {rank}", thread, name, span.track, span.begin, span.end)
        for note in self.notes:
            add(note.row, 0, note.name, "note", note.begin, note.end)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _repr_svg_(self) -> str:
        """Return the drawing: a row for each rank and each row of notes. Boxes of one colour that
        touch are merged."""
        names = [*self.num_runs, *dict.fromkeys(note.name for note in self.notes)]
        colours = {
            name: (_PALETTE[n] if n < len(_PALETTE) else _DEFAULT_COLOUR, name)
            for n, name in enumerate(names)
        }
        colours["wait"] = COLOURS["wait"]
        grain = self.seconds / _WIDTH
        rows: list[RankRow] = []
        for rank in self.ranks:
            boxes = [
                Box(s.begin, s.end, "wait" if s.track == "wait" else program, program)
                for (program, program_rank), spans in self.spans.items()
                if program_rank == rank
                for s in spans
                if s.track != "communication"
            ]
            note = f"{100 * self.busy(rank):.0f}%"
            rows.append(
                RankRow(name=f"rank {rank}", lanes=(_merged_boxes(boxes, grain),), note=note)
            )
        for row in dict.fromkeys(note.row for note in self.notes):
            boxes = [Box(n.begin, n.end, n.name, n.name) for n in self.notes if n.row == row]
            rows.append(RankRow(name=row, lanes=(_merged_boxes(boxes, grain),)))
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
    """Wait for the recorded runs, and return their timeline without runs that failed. ``begin``,
    ``end`` and the times of ``notes`` are of the monotonic clock."""
    spans: dict[tuple[str, int], list[Span]] = defaultdict(list)
    num_runs: dict[str, int] = defaultdict(int)
    size = 0
    for recorded in recording:
        program = recorded.handle.program
        size = max(size, program.size)
        try:
            results = recorded.future.get()
        except TaskError:  # the reader of the run's results gets this error too
            continue
        num_runs[program.name] += 1
        for rank, outputs in enumerate(results):
            if instructions := program.ranks[rank].instructions:
                spans_of_run = spans_of(instructions, rank, times_of(outputs), begin)
                spans[program.name, rank] += spans_of_run
    return Timeline(
        seconds=end - begin,
        ranks=tuple(range(size)),
        num_runs=dict(num_runs),
        spans={key: tuple(spans_of_key) for key, spans_of_key in spans.items()},
        notes=tuple(
            Note(row=n.row, name=n.name, begin=n.begin - begin, end=n.end - begin) for n in notes
        ),
    )


def _merged_boxes(boxes: Sequence[Box], grain: float) -> tuple[Box, ...]:
    """Return the boxes sorted and without overlaps; boxes of one kind that are closer than
    ``grain`` seconds are merged."""

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
