"""A trace: when each rank computed, sent and waited; predicted or measured.

    trace.seconds, trace.bubble
    print(trace)                  # a line for each rank
    trace.save("trace.json")      # opens in Perfetto and chrome://tracing
    compare_traces(predicted, measured)

In a notebook a trace draws itself. Invariants: times are in seconds from the start of the step;
spans are sorted by their begin; a rank's compute and wait spans do not overlap. Its messages may,
as each channel has its own. A predicted trace comes from clock.py, a measured one from a timed run
(`measured`).
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
from dtensor.sharding.plan.text.words import seconds_text, size_text, table
from dtensor.showing import html_text, screen

Track = Literal["compute", "wait", "communication"]
_TRACKS: Mapping[Track, str] = {"compute": "computes", "wait": "waits", "communication": "messages"}
_HIDDEN, _HELD = "hidden", "at most holds"
Kind = Literal["F", "B", "I", "W", "once", "wait", "message"]
"""The kind of a span in a drawing."""
CALL = Label("call")
"""The label of each rank's first span: the rank waits for the controller."""
_WIDTH = 840.0
"""Width of a picture's time axis in pixels."""
_MOST = 30_000
"""Most boxes of a picture: narrow ones take a dozen bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``label``: the action and the instruction in it, ``name`` in words; ``source``: the user's
    line."""

    rank: int
    track: Track
    label: Label
    begin: float
    end: float
    source: str | None = None

    @property
    def name(self) -> str:
        """As `F0 stage 1`, `F0 stage 1: all_reduce mm_3 over tp`."""
        return str(self.label)

    @property
    def kind(self) -> Kind:
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
    """The span of an instruction of a rank."""
    label = item.label or Label("")
    return Span(rank=rank, track=track, label=label, begin=begin, end=end, source=item.source)


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """``ranks``: the ranks with spans, each of which represents ``alike`` ranks of the mesh.

    ``peak_bytes``: by rank, the most bytes of values at once, parameters and state included;
    ``held_bytes``: by rank, (begin, bytes held from then on), of a predicted trace alone.
    """

    name: str
    ranks: tuple[int, ...]
    alike: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...]
    held_bytes: tuple[tuple[tuple[float, int], ...], ...] = ()

    @property
    def seconds(self) -> float:
        """From the start to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def spent(self, rank: int, track: Track) -> float:
        """Seconds of one rank in spans of a track."""
        return self._spent()[rank, track]

    def _spent(self) -> Mapping[tuple[int, Track], float]:
        seconds: dict[tuple[int, Track], float] = defaultdict(float)
        for span in self.spans:
            seconds[span.rank, span.track] += span.seconds
        return seconds

    def hidden(self, rank: int) -> float:
        """Seconds in which messages of a rank are in flight and it does not wait."""
        return self._hidden()[rank]

    def _hidden(self) -> Mapping[int, float]:
        ends: dict[int, list[tuple[float, int, int]]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            if span.track != "compute":  # (time, change of the number of messages, of waits)
                message = int(span.track == "communication")
                ends[span.rank].append((span.begin, message, 1 - message))
                ends[span.rank].append((span.end, -message, message - 1))
        hidden = dict.fromkeys(self.ranks, 0.0)
        for rank, own in ends.items():
            last, under_way, waiting = 0.0, 0, 0
            for when, messages, waits in sorted(own):
                hidden[rank] += when - last if under_way and not waiting else 0.0
                last, under_way, waiting = when, under_way + messages, waiting + waits
        return hidden

    def by_kind(self, rank: int) -> Mapping[str, float]:
        """Seconds of one rank by kind: ``F stage 0``, ``update``, ``all_reduce over tp``, ``wait``
        last; messages overlap the others."""
        return _summed(self, rank)

    @property
    def bubble(self) -> float:
        """The fraction of the time of a pipeline's ranks spent waiting for other stages, between
        the first and the last action of all, as in a plan; 0 without a pipeline."""
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
        """The fraction of the ranks' time in which they do not compute, for any reason."""
        total = self.seconds * len(self.ranks)
        busy = sum(span.seconds for span in self.spans if span.track == "compute")
        return 1.0 - busy / total if total else 0.0

    def __repr__(self) -> str:
        took = f"{seconds_text(self.seconds)}, spans: {len(self.spans):,}"
        return f"<trace {self.name}: {took}, ranks: {len(self.ranks):,}>"

    def _repr_html_(self) -> str:
        """The drawing: notebooks prefer this method to `_repr_svg_`."""
        return self._repr_svg_()

    def __str__(self) -> str:
        rows = [["", *_TRACKS.values(), _HIDDEN, _HELD], *self._table()]
        return "\n".join([self._head(), *table(rows)])

    def _head(self) -> str:
        many = f", each like {self.alike - 1} more" if self.alike > 1 else ""
        head = f"trace {self.name}    {seconds_text(self.seconds)} a step, "
        return head + f"{100 * self.idle:.1f}% not computing; {len(self.ranks)} ranks{many}"

    def _table(self) -> Iterator[list[str]]:
        """By rank: its name, seconds of each track and of hidden communication, bytes."""
        spent, hidden = self._spent(), self._hidden()
        for rank, held in zip(self.ranks, self.peak_bytes, strict=True):
            seconds = [*(spent[rank, track] for track in _TRACKS), hidden[rank]]
            yield [f"rank {rank}", *map(seconds_text, seconds), size_text(held)]

    def lanes(self) -> dict[tuple[int, int], list[Span]]:
        """By (rank, lane): lane 0 has its compute and wait spans, others have messages; the spans
        of a lane do not overlap."""
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
        """Write to ``path``, in Chrome's trace event format: a process for each rank, threads for
        its tracks.

        Messages that overlap are on several threads: the viewers nest the spans of one thread.
        """
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
        """The drawing in a notebook: compute and wait spans of each rank, and messages below.

        Its width is that of `spent`. Where there are more than `MAX_TITLED` spans, those narrower
        than a pixel that begin in one pixel are one box for each colour, as wide as their sum;
        where boxes are still more than `_MOST`, those narrower than 2 pixels, or 4, and so on. The
        picture says so."""
        lanes = self.lanes()
        grain = self.seconds / _WIDTH if len(self.spans) > MAX_TITLED else 0.0
        while sum(len(set(_places(spans, grain))) for spans in lanes.values()) > _MOST:
            grain *= 2
        stages = {(s.rank, s.label.stage) for s in self.spans if s.label.stage is not None}
        several = len(stages) > len({rank for rank, _ in stages})
        boxes = {key: tuple(_boxes(spans, grain, several)) for key, spans in lanes.items()}
        most = max((lane for _, lane in lanes), default=0)
        spent, words = self._spent(), (*_TRACKS.values(), _HIDDEN, _HELD)
        rows = [
            RankRow(
                name=name,
                lanes=tuple(boxes.get((rank, lane), ()) for lane in range(most + 1)),
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
            heights=(18.0, *[max(8.0, min(24.0, 4.0 * most)) / max(most, 1)] * most),
            length=self.seconds,
            ticks=ticks(self.seconds),
            title=self._head().replace("    ", ": "),
            note=words[0],
            foot=foot if merged else "",
            width=_WIDTH,
        )


# -- the picture -----------------------------------------------------------------------------------


def _places(lane: Sequence[Span], grain: float) -> Iterator[tuple[bool, float]]:
    """By span, whether it is shorter than ``grain``, and where it is drawn: together with equal
    ones."""
    for span in lane:
        small = span.seconds < grain
        yield small, span.begin // grain if small else span.begin


def _boxes(lane: Sequence[Span], grain: float, several: bool) -> Iterator[Box]:
    """The boxes of spans that do not overlap. Boxes that merge spans do not overlap either, as the
    sum of the spans is at most the time between the first one's begin and the last one's end.
    ``several``: a rank has several stages.
    """
    placed = zip(_places(lane, grain), lane, strict=True)
    for _, group in itertools.groupby(placed, key=lambda item: item[0]):
        by_kind: dict[Kind, list[Span]] = defaultdict(list)
        for _, span in group:
            by_kind[span.kind].append(span)
        begin = min(spans[0].begin for spans in by_kind.values())
        for kind, spans in by_kind.items():
            actions = {_action(span, several) for span in spans if span.track == "compute"}
            action = actions.pop() if len(actions) == 1 else ""
            title = _title(_ends(s.name for s in spans), spans, _ends(s.source for s in spans))
            end = begin + sum(span.seconds for span in spans)
            yield Box(begin, end, kind, title, action)
            begin = end


def _actions(lane: Sequence[Span]) -> Iterator[Box]:
    """A box for each action of several spans, from the first one's begin to the last one's end."""
    for place, group in itertools.groupby(lane, key=lambda span: span.label.place):
        spans = list(group)
        if len(spans) > 1:
            lines = re.findall(r"(?:^| )([^ :]+:\d+)", _ends(s.source for s in spans))
            yield Box(spans[0].begin, spans[-1].end, "", _title(place, spans, _ends(lines)))


def _action(span: Span, several: bool) -> str:
    """`F0`; where a rank has several stages, its stage before it."""
    stage = "" if span.label.stage is None or not several else str(span.label.stage)
    return stage + span.label.numbered


def _waits_for_a_stage(span: Span) -> bool:
    """Whether an action waits for a message to or from another stage, and not in a collective."""
    return span.track == "wait" and span.label.verb in ("receive", "sent")


def _title(name: str, spans: Sequence[Span], source: str) -> str:
    """The name, the duration, and the user's lines."""
    seconds: dict[Track, float] = defaultdict(float)
    for span in spans:
        seconds[span.track] += span.seconds
    each = ", ".join(f"{_TRACKS[track]} {seconds_text(s)}" for track, s in seconds.items())
    return "\n".join([name, f"{each} from {seconds_text(spans[0].begin)}", source]).rstrip()


def _ends(texts: Iterable[str | None]) -> str:
    """The first, and the last if it differs."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    return " ... ".join([*distinct[:1], *distinct[1:][-1:]])


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Round times, at most ten."""
    if not seconds:
        return [(0.0, "0 s")]
    step = round_step(seconds, 10)
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
        if seconds >= scale or unit == "ns"
    )
    return [(n * step, f"{n * step / scale:.6g} {unit}") for n in range(int(seconds / step) + 1)]


# -- two of them side by side ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class TraceComparison:
    """Rows: (rank, kind, predicted seconds, measured seconds) of one step."""

    rows: tuple[tuple[int, str, float, float], ...]
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted time of the step."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def __repr__(self) -> str:
        step = f"{seconds_text(self.predicted)} predicted, {seconds_text(self.measured)} measured"
        return f"<traces of a step: {step}, rows: {len(self.rows):,}>"

    def _repr_html_(self) -> str:
        return html_text(screen(str(self)))

    def __str__(self) -> str:
        rows = [["", "", "predicted", "measured", "ratio"]]
        for rank, what, before, after in self.rows:
            rows.append([f"rank {rank}", what, *_cells(before, after)])
        rows.append(["step", "", *_cells(self.predicted, self.measured)])
        return "\n".join(table(rows, 2))


def _cells(before: float, after: float) -> list[str]:
    ratio = f"{after / before:.2f}" if before else ""
    return [seconds_text(before), seconds_text(after), ratio]


def compare_traces(predicted: Trace, measured: Trace) -> TraceComparison:
    """Seconds of each kind of action and message, summed over microbatches, side by side:
    ``predicted`` by `simulate`, ``measured`` by `trace`, of the same step.

    For the ranks that both have: a simulated trace has one for all equal ranks. Its ``rows`` are
    (rank, kind, seconds predicted, seconds measured); it prints as a table.
    """
    rows: list[tuple[int, str, float, float]] = []
    for rank in predicted.ranks:
        if rank not in measured.ranks:
            continue
        before, after = _summed(predicted, rank), _summed(measured, rank)
        for what in dict.fromkeys((*before, *after)):
            rows.append((rank, what, before.get(what, 0.0), after.get(what, 0.0)))
    return TraceComparison(tuple(rows), predicted.seconds, measured.seconds)


def _summed(trace: Trace, rank: int) -> dict[str, float]:
    """Kind to seconds: `F stage 0`, `update`, `wait`, `all_reduce over tp`."""
    seconds: dict[str, float] = {}
    for span in trace.spans:
        if span.rank == rank:
            what = _what(span)
            seconds[what] = seconds.get(what, 0.0) + span.seconds
    return dict(sorted(seconds.items(), key=lambda item: (item[0] == "wait", item[0])))


def _what(span: Span) -> str:
    label = span.label
    match span.track:
        case "compute":
            return label._replace(microbatch=None).place
        case "wait":
            return label.place if label == CALL else "wait"
        case "communication":
            return f"{label.verb} {label.way}".rstrip()


# -- a timed run --------------------------------------------------------------------------------


def measured(
    handle: Handle,
    outputs: Sequence[Mapping[str, object]],
    seconds: float,
    ranks: Sequence[int],
) -> Trace:
    """The trace of a run in the mode "timed". ``outputs``: its outputs; ``seconds``: from its call
    to its results; ``ranks``: the ranks of the program that have the outputs, counted from 0 in the
    trace.

    The time of the run outside the ranks' instructions is put before them, as in a simulation:
    clocks of other hosts do not show how much of it came after.
    """
    by_rank = [times_of(own) for own in outputs]
    first = min((begin for own in by_rank for _, begin, _ in own), default=0.0)
    last = max((end for own in by_rank for _, _, end in own), default=0.0)
    called = max(0.0, seconds - (last - first))
    spans = [
        Span(rank=r, track="wait", label=CALL, begin=0, end=called) for r in range(len(by_rank))
    ]
    for rank, own in enumerate(by_rank):
        instructions = handle.program.ranks[ranks[rank]].instructions
        spans += spans_of(instructions, rank, own, first - called)
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
    """The spans of a rank's instructions in a timed run; times count from ``start``."""
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
                for one in waits[index]:  # complete at the latest now
                    add("communication", instructions[one], started[one], end)
            case Free() | Vote() | Commit():
                pass
    return spans
