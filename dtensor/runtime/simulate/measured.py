"""What a timed run says, as a `Trace`; and a predicted trace beside a measured one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dtensor.daft import Call, Collective, Free, Handle, Recv, Send, Wait
from dtensor.daft.run.engine import TIMES
from dtensor.runtime.simulate.trace import CALL, Span, Trace, Track
from dtensor.sharding.plan.text.words import seconds_text

Times = Sequence[tuple[int, float, float]]


def measured(handle: Handle, outputs: Sequence[Mapping[str, object]], seconds: float) -> Trace:
    """``outputs``: of a run in the mode "timed"; ``seconds``: from its call until they were there.

    What the run took beside the ranks' instructions stands in front of them, as in a simulation:
    clocks of other hosts do not tell how much of it came after.
    """
    by_rank = [cast(Times, own[TIMES]) for own in outputs]
    first = min((begin for own in by_rank for _, begin, _ in own), default=0.0)
    last = max((end for own in by_rank for _, _, end in own), default=0.0)
    called = max(0.0, seconds - (last - first))
    spans = [
        Span(rank=r, track="wait", name=CALL, begin=0, end=called) for r in range(len(by_rank))
    ]
    for rank, own in enumerate(by_rank):
        spans += _spans(handle, rank, own, first - called)
    return Trace(
        name=handle.program.name,
        ranks=tuple(range(handle.program.size)),
        alike=1,
        spans=tuple(sorted(spans, key=lambda s: (s.begin, s.rank, s.end))),
        peak_bytes=handle.report.peak_bytes,
    )


def _spans(handle: Handle, rank: int, times: Times, start: float) -> list[Span]:
    instructions = handle.program.ranks[rank].instructions
    found: list[Span] = []
    started: dict[str, tuple[float, str, str | None]] = {}

    def add(track: Track, name: str, begin: float, end: float, source: str | None) -> None:
        span = Span(
            rank=rank, track=track, name=name, begin=begin - start, end=end - start, source=source
        )
        found.append(span)

    for index, begin, end in times:
        match instructions[index]:
            case Call(label=label, source=source):
                add("compute", label, begin, end, source)
            case (
                Send(value=value, label=label, source=source)
                | Recv(value=value, label=label, source=source)
            ):
                started[value] = begin, label, source
            case Collective(outputs=outputs, label=label, source=source):
                started[outputs[0]] = begin, label, source
            case Wait(values=values, label=label, source=source):
                add("wait", label, begin, end, source)
                for value in values:
                    if value in started:  # complete by now at the latest
                        since, name, line = started.pop(value)
                        add("communication", name, since, end, line)
            case Free():
                pass
    return found


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Rows: (rank, what, predicted seconds, measured seconds) of one step."""

    rows: tuple[tuple[int, str, float, float], ...]
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted time of the step."""
        return self.measured / self.predicted if self.predicted else float("inf")

    def __str__(self) -> str:
        rows = [["", "", "predicted", "measured", "ratio"]]
        for rank, what, before, after in self.rows:
            rows.append([f"rank {rank}", what, *_cells(before, after)])
        rows.append(["step", "", *_cells(self.predicted, self.measured)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if number < 2 else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _cells(before: float, after: float) -> list[str]:
    ratio = f"{after / before:.2f}" if before else ""
    return [seconds_text(before), seconds_text(after), ratio]


def compare_traces(predicted: Trace, measured: Trace) -> TraceComparison:
    """Seconds of each kind of action and message, summed over microbatches, side by side.

    For the ranks that both have: a simulated trace has one for all that are alike.
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
    """What to its seconds: `F stage 0`, `update`, `wait`, `all_reduce over tp`."""
    found: dict[str, float] = {}
    for span in trace.spans:
        if span.rank == rank:
            what = _kind(span)
            found[what] = found.get(what, 0.0) + span.end - span.begin
    return dict(sorted(found.items(), key=lambda item: (item[0] == "wait", item[0])))


def _kind(span: Span) -> str:
    action, _, rest = span.name.partition(": ")
    match span.track:
        case "compute":
            return re.sub(r"^([FBIW])\d+ ", r"\1 ", action)
        case "wait":
            return CALL if span.name == CALL else "wait"
        case "communication":
            verb = rest.partition(" ")[0]
            over = re.search(r" over \S+$| from stage .*$", rest)
            return verb + (over.group() if over else "")
