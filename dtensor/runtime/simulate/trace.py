"""A trace: when each rank computes, sends and waits in a step, predicted or measured.

    trace.seconds, trace.bubble
    print(trace)                  # a line for each rank
    trace.save("trace.json")      # opens in Perfetto and chrome://tracing
    compare_traces(predicted, measured)

`simulate` returns a predicted trace, `measured` the trace of a timed run; a notebook draws both.
Invariants: times are in seconds from the start of the step; spans are sorted by their begin;
compute and wait spans of a rank do not overlap, but messages of different channels may.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtensor.daft import (
    Call,
    Collective,
    Commit,
    Free,
    Handle,
    Instruction,
    Label,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.run.timestamps import Times, times_of
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.drawing import MAX_TITLED, Box, RankRow, drawing, round_step
from dtensor.sharding.plan.text.words import seconds_text, size_text
from dtensor.showing import html_text, screen, table

Track = Literal["compute", "wait", "communication"]
_TRACKS: Mapping[Track, str] = {"compute": "computes", "wait": "waits", "communication": "messages"}
_HIDDEN, _HELD = "hidden", "at most holds"
Kind = Literal["F", "B", "I", "W", "once", "wait", "message"]
"""The kind of a span, which decides its colour in a drawing."""
CALL = Label("call")
"""The label of each rank's first span, in which it waits for the controller's call."""
_WIDTH = 840.0
"""The width of a picture's time axis in pixels."""
_MAX_BOXES = 30_000
"""The most boxes of a picture; a narrow box takes a dozen bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a rank does in an interval. ``label``: the action, and the instruction in it;
    ``source``: the user's line."""

    rank: int
    track: Track
    label: Label
    begin: float
    end: float
    source: str | None = None

    @property
    def name(self) -> str:
        """The label as text: `F0 stage 1`, `F0 stage 1: all_reduce mm_3 over tp`."""
        return str(self.label)

    @property
    def kind(self) -> Kind:
        """The kind of the span in a drawing: its action, "once", "wait" or "message"."""
        match self.track:
            case "compute":
                action = self.label.action
                return action if action in ("F", "B", "I", "W") else "once"
            case "wait":
                return "wait"
            case "communication":
                return "message"

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def span_of(rank: int, track: Track, item: Instruction, begin: float, end: float) -> Span:
    """Return the span of a rank's instruction."""
    label = item.label or Label("")
    return Span(rank=rank, track=track, label=label, begin=begin, end=end, source=item.source)


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """A step on several ranks, as the spans of each rank.

    Attributes:
        ranks: the ranks with spans.
        alike: how many ranks of the mesh each of them represents.
        peak_bytes: for each rank, the peak memory of values, with parameters and state.
        held_bytes: for each rank, (time, bytes held from then on); only in a predicted trace.
    """

    name: str
    ranks: tuple[int, ...]
    alike: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...]
    held_bytes: tuple[tuple[tuple[float, int], ...], ...] = ()

    @property
    def seconds(self) -> float:
        """The seconds from the start of the step to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def spent(self, rank: int, track: Track) -> float:
        """Return the seconds of one rank in spans of a track."""
        return self._spent()[rank, track]

    def _spent(self) -> Mapping[tuple[int, Track], float]:
        seconds: dict[tuple[int, Track], float] = defaultdict(float)
        for span in self.spans:
            seconds[span.rank, span.track] += span.seconds
        return seconds

    def hidden(self, rank: int) -> float:
        """Return the seconds in which messages of a rank are in flight and the rank does not
        wait."""
        return self._hidden()[rank]

    def _hidden(self) -> Mapping[int, float]:
        ends: dict[int, list[tuple[float, int, int]]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            if span.track != "compute":  # (time, change in the number of messages, of waits)
                message = int(span.track == "communication")
                ends[span.rank].append((span.begin, message, 1 - message))
                ends[span.rank].append((span.end, -message, message - 1))
        hidden = dict.fromkeys(self.ranks, 0.0)
        for rank, changes in ends.items():
            last, in_flight, waiting = 0.0, 0, 0
            for when, messages, waits in sorted(changes):
                hidden[rank] += when - last if in_flight and not waiting else 0.0
                last, in_flight, waiting = when, in_flight + messages, waiting + waits
        return hidden

    def by_kind(self, rank: int) -> Mapping[str, float]:
        """Return the seconds of one rank by kind: ``F stage 0``, ``update``, ``all_reduce over
        tp``, and ``wait`` last. Messages overlap with the other kinds."""
        return _seconds_by_kind(self, rank)

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time spent waiting for other stages, between the first and the
        last action of all ranks, as in a plan; 0 without a pipeline."""
        actions = [
            span
            for span in self.spans
            if span.track != "communication" and span.label.stage is not None
        ]
        if len({span.label.stage for span in actions}) < 2:
            return 0.0
        first, last = min(span.begin for span in actions), max(span.end for span in actions)
        busy = sum(span.seconds for span in actions if not _waits_for_a_stage(span))
        return 1.0 - busy / ((last - first) * len(self.ranks))

    @property
    def idle(self) -> float:
        """The fraction of the ranks' time in which they do not compute."""
        total = self.seconds * len(self.ranks)
        busy = sum(span.seconds for span in self.spans if span.track == "compute")
        return 1.0 - busy / total if total else 0.0

    def __repr__(self) -> str:
        took = f"{seconds_text(self.seconds)}, spans: {len(self.spans):,}"
        return f"<trace {self.name}: {took}, ranks: {len(self.ranks):,}>"

    def _repr_html_(self) -> str:
        """Return the drawing. Notebooks prefer this method to `_repr_svg_`."""
        return self._repr_svg_()

    def __str__(self) -> str:
        rows = [["", *_TRACKS.values(), _HIDDEN, _HELD], *self._table()]
        return "\n".join([self._head(), *table(rows)])

    def _head(self) -> str:
        many = f", each like {self.alike - 1} more" if self.alike > 1 else ""
        head = f"trace {self.name}    {seconds_text(self.seconds)} a step, "
        return head + f"{100 * self.idle:.1f}% not computing; {len(self.ranks)} ranks{many}"

    def _table(self) -> Iterator[list[str]]:
        """Yield a row for each rank: its name, the seconds of each track and of hidden
        communication, its peak bytes."""
        spent, hidden = self._spent(), self._hidden()
        for rank, peak in zip(self.ranks, self.peak_bytes, strict=True):
            seconds = [*(spent[rank, track] for track in _TRACKS), hidden[rank]]
            yield [f"rank {rank}", *map(seconds_text, seconds), size_text(peak)]

    def lanes(self) -> dict[tuple[int, int], list[Span]]:
        """Return the spans by (rank, lane). Lane 0 has the rank's compute and wait spans, the other
        lanes have messages. The spans of a lane do not overlap."""
        lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in self.spans:
            lane = 0
            if span.track == "communication":
                lane = 1
                while lanes[span.rank, lane] and lanes[span.rank, lane][-1].end > span.begin:
                    lane += 1
            lanes[span.rank, lane].append(span)
        return lanes

    def save(self, path: str | Path) -> None:
        """Write the trace to ``path`` in Chrome's trace event format: a process for each rank,
        threads for its tracks. Messages that overlap are on several threads, because the viewers
        nest the spans of one thread."""
        meta: list[dict[str, object]] = []
        events: list[dict[str, object]] = []

        def name(kind: str, rank: int, thread: int, words: str) -> None:
            of = {"ph": "M", "pid": rank, "tid": thread}
            meta.append({**of, "name": f"{kind}_name", "args": {"name": words}})

        for rank in self.ranks:
            name("process", rank, 0, f"rank {rank}")
            for thread, track in enumerate(_TRACKS):
                name("thread", rank, thread, track)
        for (rank, lane), spans in self.lanes().items():
            if lane > 1:
                name("thread", rank, lane + 1, f"communication {lane}")
            for span in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.track,
                        "pid": rank,
                        "tid": lane + 1 if lane else int(span.track == "wait"),
                        "ts": span.begin * 1e6,
                        "dur": span.seconds * 1e6,
                        "args": {"source": span.source or ""},
                    }
                )
        text = json.dumps({"traceEvents": [*meta, *events], "displayTimeUnit": "ms"})
        Path(path).write_text(text)

    def _repr_svg_(self) -> str:
        """Return the drawing: for each rank its compute and wait spans, with messages below.

        In a trace of more than `MAX_TITLED` spans, spans that are narrower than a pixel and begin
        in the same pixel are merged: one box for each colour, as wide as the sum of the spans. If
        there are still more than `_MAX_BOXES`, the limit is 2 pixels, or 4, and so on. The picture
        states the limit."""
        lanes = self.lanes()
        grain = self.seconds / _WIDTH if len(self.spans) > MAX_TITLED else 0.0
        while sum(len(set(_places(spans, grain))) for spans in lanes.values()) > _MAX_BOXES:
            grain *= 2
        stages = {(s.rank, s.label.stage) for s in self.spans if s.label.stage is not None}
        several = len(stages) > len({rank for rank, _ in stages})
        boxes = {key: tuple(_boxes(spans, grain, several)) for key, spans in lanes.items()}
        last_lane = max((lane for _, lane in lanes), default=0)
        spent, words = self._spent(), (*_TRACKS.values(), _HIDDEN, _HELD)
        rows = [
            RankRow(
                name=name,
                lanes=tuple(boxes.get((rank, lane), ()) for lane in range(last_lane + 1)),
                stretches=tuple(_actions(lanes[rank, 0])),
                note=f"{100 * spent[rank, 'compute'] / (self.seconds or 1.0):.1f}%",
                title="\n".join(map(" ".join, zip(words, cells, strict=True))),
            )
            for rank, (name, *cells) in zip(self.ranks, self._table(), strict=True)
        ]
        merged = any(span.seconds < grain for span in self.spans)
        foot = f"spans shorter than {seconds_text(grain)} are drawn together, as wide as their sum"
        return drawing(
            rows,
            heights=(
                18.0,
                *[max(8.0, min(24.0, 4.0 * last_lane)) / max(last_lane, 1)] * last_lane,
            ),
            length=self.seconds,
            ticks=ticks(self.seconds),
            title=self._head().replace("    ", ": "),
            note=words[0],
            foot=foot if merged else "",
            width=_WIDTH,
        )


# -- the picture -----------------------------------------------------------------------------------


def _places(lane: Sequence[Span], grain: float) -> Iterator[tuple[bool, float]]:
    """Yield for each span whether it is shorter than ``grain``, and its place. Consecutive spans
    with equal answers are drawn as one box."""
    for span in lane:
        small = span.seconds < grain
        yield small, span.begin // grain if small else span.begin


def _boxes(lane: Sequence[Span], grain: float, several: bool) -> Iterator[Box]:
    """Yield the boxes of a lane. Boxes of merged spans do not overlap, because spans of a lane do
    not. ``several``: whether a rank has several stages."""
    placed = zip(_places(lane, grain), lane, strict=True)
    for _, group in itertools.groupby(placed, key=lambda item: item[0]):
        by_kind: dict[Kind, list[Span]] = defaultdict(list)
        for _, span in group:
            by_kind[span.kind].append(span)
        begin = min(spans[0].begin for spans in by_kind.values())
        for kind, spans in by_kind.items():
            actions = {_action(span, several) for span in spans if span.track == "compute"}
            action = actions.pop() if len(actions) == 1 else ""
            title = _title(
                _first_and_last(s.name for s in spans),
                spans,
                _first_and_last(s.source for s in spans),
            )
            end = begin + sum(span.seconds for span in spans)
            yield Box(begin, end, kind, title, action)
            begin = end


def _actions(lane: Sequence[Span]) -> Iterator[Box]:
    """Yield a box for each action that has several spans, around all its spans."""
    for place, group in itertools.groupby(lane, key=lambda span: span.label.place):
        spans = list(group)
        if len(spans) > 1:
            lines = re.findall(r"(?:^| )([^ :]+:\d+)", _first_and_last(s.source for s in spans))
            yield Box(
                spans[0].begin, spans[-1].end, "", _title(place, spans, _first_and_last(lines))
            )


def _action(span: Span, several: bool) -> str:
    """Return the action of a span: `F0`, or `2F0` if a rank has several stages."""
    stage = "" if span.label.stage is None or not several else str(span.label.stage)
    return stage + span.label.numbered


def _waits_for_a_stage(span: Span) -> bool:
    """Whether the span waits for a message to or from another stage, not for a collective."""
    return span.track == "wait" and span.label.verb in ("receive", "sent")


def _title(name: str, spans: Sequence[Span], source: str) -> str:
    """Return the title of a box: its name, the durations of its spans, and the user's lines."""
    seconds: dict[Track, float] = defaultdict(float)
    for span in spans:
        seconds[span.track] += span.seconds
    durations = ", ".join(f"{_TRACKS[track]} {seconds_text(s)}" for track, s in seconds.items())
    return "\n".join([name, f"{durations} from {seconds_text(spans[0].begin)}", source]).rstrip()


def _first_and_last(texts: Iterable[str | None]) -> str:
    """Return the first text, and the last if it differs; empty texts are left out."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    return " ... ".join([*distinct[:1], *distinct[1:][-1:]])


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Return round times up to ``seconds``, about ten, each with its text."""
    if not seconds:
        return [(0.0, "0 s")]
    step = round_step(seconds, 10)
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
        if seconds >= scale or unit == "ns"
    )
    return [(n * step, f"{n * step / scale:.6g} {unit}") for n in range(int(seconds / step) + 1)]


# -- comparison of two traces ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class TraceComparison:
    """The predicted and measured seconds of one step. ``rows``: (rank, kind, predicted seconds,
    measured seconds)."""

    rows: tuple[tuple[int, str, float, float], ...]
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """The measured time of the step divided by the predicted time."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def __repr__(self) -> str:
        step = f"{seconds_text(self.predicted)} predicted, {seconds_text(self.measured)} measured"
        return f"<traces of a step: {step}, rows: {len(self.rows):,}>"

    def _repr_html_(self) -> str:
        return html_text(screen(str(self)))

    def __str__(self) -> str:
        rows = [["", "", "predicted", "measured", "ratio"]]
        for rank, kind, predicted, measured in self.rows:
            rows.append([f"rank {rank}", kind, *_cells(predicted, measured)])
        rows.append(["step", "", *_cells(self.predicted, self.measured)])
        return "\n".join(table(rows, "<<>"))


def _cells(predicted: float, measured: float) -> list[str]:
    ratio = f"{measured / predicted:.2f}" if predicted else ""
    return [seconds_text(predicted), seconds_text(measured), ratio]


def compare_traces(predicted: Trace, measured: Trace) -> TraceComparison:
    """Compare the seconds of each kind of action and message, summed over microbatches, in two
    traces of the same step: ``predicted`` by `simulate`, ``measured`` by `trace`.

    Only ranks that are in both traces are compared: a simulated trace has one rank for all equal
    ranks. The ``rows`` are (rank, kind, predicted seconds, measured seconds); print the result to
    see a table.
    """
    rows: list[tuple[int, str, float, float]] = []
    for rank in predicted.ranks:
        if rank not in measured.ranks:
            continue
        before, after = _seconds_by_kind(predicted, rank), _seconds_by_kind(measured, rank)
        for kind in dict.fromkeys((*before, *after)):
            rows.append((rank, kind, before.get(kind, 0.0), after.get(kind, 0.0)))
    return TraceComparison(tuple(rows), predicted.seconds, measured.seconds)


def _seconds_by_kind(trace: Trace, rank: int) -> dict[str, float]:
    """Return the seconds by kind: `F stage 0`, `update`, `all_reduce over tp`, and `wait` last."""
    seconds: dict[str, float] = {}
    for span in trace.spans:
        if span.rank == rank:
            kind = _kind_of(span)
            seconds[kind] = seconds.get(kind, 0.0) + span.seconds
    return dict(sorted(seconds.items(), key=lambda item: (item[0] == "wait", item[0])))


def _kind_of(span: Span) -> str:
    label = span.label
    match span.track:
        case "compute":
            return label._replace(microbatch=None).place
        case "wait":
            return label.place if label == CALL else "wait"
        case "communication":
            return f"{label.verb} {label.way}".rstrip()


# -- the trace of a timed run ----------------------------------------------------------------------


def measured(
    handle: Handle,
    outputs: Sequence[Mapping[str, object]],
    seconds: float,
    ranks: Sequence[int],
) -> Trace:
    """Return the trace of a run in the mode "timed".

    Args:
        outputs: the outputs of each of these ranks.
        seconds: from the call of the run to its results.
        ranks: the ranks of the program that have the outputs; in the trace they are numbered from
            0.

    The time of the run outside the ranks' instructions is put before them, as in a simulation,
    because the clocks of other hosts do not show how much of it came after them.
    """
    by_rank = [times_of(outputs_of_rank) for outputs_of_rank in outputs]
    first = min((begin for times in by_rank for _, begin, _ in times), default=0.0)
    last = max((end for times in by_rank for _, _, end in times), default=0.0)
    call_end = max(0.0, seconds - (last - first))
    spans = [
        Span(rank=r, track="wait", label=CALL, begin=0, end=call_end) for r in range(len(by_rank))
    ]
    for rank, times in enumerate(by_rank):
        instructions = handle.program.ranks[ranks[rank]].instructions
        spans += spans_of(instructions, rank, times, first - call_end)
    return Trace(
        name=handle.program.name,
        ranks=tuple(range(len(by_rank))),
        alike=1,
        spans=tuple(sorted(spans, key=lambda s: (s.begin, s.rank, s.end))),
        peak_bytes=tuple(handle.report.peak_bytes[rank] for rank in ranks),
    )


def spans_of(
    instructions: Sequence[Instruction], rank: int, times: Times, start: float
) -> list[Span]:
    """Return the spans of a rank's instructions in a timed run; their times count from ``start``.
    A message ends, at the latest, when the wait for it ends."""
    waits = starts_of_waits(instructions)
    spans: list[Span] = []
    started: dict[int, float] = {}

    def add(track: Track, item: Instruction, begin: float, end: float) -> None:
        spans.append(span_of(rank, track, item, begin - start, end - start))

    for index, begin, end in times:
        match item := instructions[index]:
            case Call():
                add("compute", item, begin, end)
            case Send() | Recv() | Collective():
                started[index] = begin
            case Wait():
                add("wait", item, begin, end)
                for message in waits[index]:
                    add("communication", instructions[message], started[message], end)
            case Free() | Vote() | Commit():
                pass
    return spans
