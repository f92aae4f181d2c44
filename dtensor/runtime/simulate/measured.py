"""What a timed run says, as a `Trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from dtensor.daft import Call, Collective, Free, Handle, Recv, Send, Wait
from dtensor.daft.ir.instructions import awaited
from dtensor.daft.run.engine import TIMES
from dtensor.runtime.simulate.trace import CALL, Span, Trace, Track

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
        match item := instructions[index]:
            case Call():
                add("compute", item.label, begin, end, item.source)
            case Send() | Recv() | Collective():
                started[awaited(item)[0]] = begin, item.label, item.source
            case Wait():
                add("wait", item.label, begin, end, item.source)
                for value in item.values:
                    if value in started:  # complete by now at the latest
                        since, name, line = started.pop(value)
                        add("communication", name, since, end, line)
            case Free():
                pass
    return found
