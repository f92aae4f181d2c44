"""`dtensor simulate`: the program of a step on a virtual clock, drawn in text.

    $ dtensor simulate gpt2 --mesh pp=4 --microbatches 8 --schedule zbh1 --trace out.json

    rank 0  FFFF.....BBBBBBBFF.BBBBBBF.FBBBBBBBFF.BBBBBBF ... uuuuu
    rank 2  ...F.FBBBBBF.FBBBBBF.FBBBBB..FFBBBBB...FBBBBB ... uuuuu

Nothing is launched. `--trace` writes what Perfetto and chrome://tracing open. Not here: the clock
(runtime/simulate).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtensor.commands.options import (
    MODEL_EPILOG,
    add_hardware,
    add_json,
    add_strategy,
    add_workload,
)
from dtensor.commands.parser import add_command
from dtensor.commands.plan import REAL
from dtensor.commands.progress import ProgressLine
from dtensor.errors import PlanningError

if TYPE_CHECKING:
    from dtensor.runtime.simulate.trace import Span, Trace

COLUMNS = 88
MOST_RANKS = 16


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "simulate",
        "when each rank would compute, send and wait: a picture, a table, a trace",
        "Runs the program of a training step on a virtual clock: a picture of each rank's actions, "
        "the time of each kind of work, and on request a trace for Perfetto.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    add_strategy(parser)
    add_hardware(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--trace", metavar="FILE.json", help="write it for Perfetto and Chrome")
    group.add_argument("--svg", metavar="FILE.svg", help="write the picture of notebooks")
    add_json(parser)
    parser.add_argument("--real", action="store_true", help=REAL)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.json_data import print_json, trace_data
    from dtensor.commands.placed_workload import PlacedWorkload, check_stated
    from dtensor.commands.workload import Workload

    mesh, zero = options.mesh, options.zero or {}
    check_stated(options, [mesh], [zero])
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(options, meta=True)
            placed = PlacedWorkload(work, options)
        with progress.doing(f"captures a step of {work.name}"):
            _ = work.graph
        with progress.doing(f"plans it on {mesh}"):
            step = placed.step(mesh, zero, options.schedule)
            placed.plan(step)
        with progress.doing("simulates it"):
            trace = dt.simulate(step)
    if options.json:
        print_json({"model": work.title, "mesh": mesh.shape, **trace_data(trace)})
    else:
        head = [
            work.title,
            placed.words(mesh),
            "",
            str(trace),
            "",
            picture(trace),
            "",
            *kinds(trace),
        ]
        print("\n".join(line for i, line in enumerate(head) if line or i != 1))
    if options.trace:
        write(options.trace, trace.save)
    if options.svg:
        write(options.svg, lambda path: path.write_text(trace._repr_svg_()))
    return 0


def write(name: str, save: Any) -> None:
    """PlanningError where the file cannot be written; else what was is said on stderr."""
    try:
        save(Path(name))
    except OSError as error:
        raise PlanningError(
            f"{name} cannot be written: {error.strerror or error}.\nfix: another path"
        ) from error
    print(f"written to {name}", file=sys.stderr)


def picture(trace: Trace) -> str:
    """A line for each rank: what it does for most of a column's time."""
    seconds = trace.seconds or 1.0
    lines: list[str] = []
    ranks = trace.ranks[:MOST_RANKS]
    name = max(len(f"rank {rank}") for rank in ranks)
    for rank in ranks:
        shares: list[dict[str, float]] = [defaultdict(float) for _ in range(COLUMNS)]
        for span in trace.spans:
            if span.rank != rank or span.track == "communication":
                continue
            mark = _mark(span)
            first = int(span.begin / seconds * COLUMNS)
            last = min(int(span.end / seconds * COLUMNS), COLUMNS - 1)
            for column in range(first, last + 1):
                begin = max(span.begin, column * seconds / COLUMNS)
                end = min(span.end, (column + 1) * seconds / COLUMNS)
                shares[column][mark] += max(end - begin, 0.0)
        text = "".join(max(s, key=lambda m: s[m]) if any(s.values()) else " " for s in shares)
        lines.append(f"{f'rank {rank}':<{name}}  {text}".rstrip())
    if len(trace.ranks) > MOST_RANKS:
        lines.append(f"... and {len(trace.ranks) - MOST_RANKS} more ranks, which --trace has")
    used = "".join(line[name + 2 :] for line in lines)
    legend = [words for letters, words in _LEGEND if re.search(f"[{letters}]", used)]
    return "\n".join([*lines, f"{'':<{name}}  {', '.join(legend)}"])


_LEGEND = (
    ("F", "F forward"),
    ("BI", "B backward"),
    ("W", "W of weights"),
    ("u", "u update"),
    ("o", "o once a step"),
    (".", ". waits"),
)


def _mark(span: Span) -> str:
    match span.kind:
        case "wait":
            return "."
        case "I":
            return "B"
        case "once" | "message":
            return "u" if span.label.action in ("update", "optimizer") else "o"
        case kind:
            return kind


def kinds(trace: Trace) -> list[str]:
    """A table: by kind of work and message, seconds of each rank; at most four ranks."""
    from dtensor.sharding.plan.text.words import seconds_text
    from dtensor.showing import table

    ranks = trace.ranks if len(trace.ranks) <= 4 else (*trace.ranks[:2], *trace.ranks[-2:])
    by_rank = [trace.by_kind(rank) for rank in ranks]
    every = dict.fromkeys(kind for seconds_of in by_rank for kind in seconds_of)
    order = sorted(every, key=lambda kind: (kind == "wait", kind))
    rows = [["", *(f"rank {rank}" for rank in ranks)]]
    for kind in order:
        cells = [
            seconds_text(seconds_of[kind]) if kind in seconds_of else "" for seconds_of in by_rank
        ]
        rows.append([kind, *cells])
    return list(table(rows))
