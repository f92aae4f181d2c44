"""`dtensor simulate`: runs the program of a step on a virtual clock and draws it as text.

    $ dtensor simulate gpt2 --mesh pp=4 --microbatches 8 --schedule zbh1 --trace out.json

    rank 0  FFFF.....BBBBBBBFF.BBBBBBF.FBBBBBBBFF.BBBBBBF ... uuuuu
    rank 2  ...F.FBBBBBF.FBBBBBF.FBBBBB..FFBBBBB...FBBBBB ... uuuuu

Nothing is launched. `--trace` writes a file for Perfetto and chrome://tracing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtensor.commands.options import (
    HARDWARE,
    MODEL_EPILOG,
    STRATEGY,
    add_json,
    add_workload,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine
from dtensor.errors import PlanningError

if TYPE_CHECKING:
    from dtensor.runtime.simulate.trace import Span, Trace

COLUMNS = 88
MAX_RANKS = 16


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "simulate",
        "predicts when each rank computes, sends and waits: a picture, a table, a trace",
        "Runs the program of a training step on a virtual clock. Prints a picture of the actions "
        "of each rank and the time of each kind of work, and on request writes a trace.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    STRATEGY.add_to(parser)
    HARDWARE.add_to(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--trace", metavar="FILE.json", help="write a trace for Perfetto and Chrome")
    group.add_argument("--svg", metavar="FILE.svg", help="write the timeline as an SVG picture")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.json_data import print_json, trace_data
    from dtensor.commands.placed_workload import PlacedWorkload, check_strategy_options
    from dtensor.commands.workload import Workload

    mesh, zero = options.mesh, options.zero or {}
    check_strategy_options(options, [mesh], [zero])
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
        title = "\n".join(filter(None, [work.title, placed.defaults_text(mesh)]))
        print("\n\n".join([title, str(trace), picture(trace), "\n".join(kinds(trace))]))
    if options.trace:
        write(options.trace, trace.save)
    if options.svg:
        write(options.svg, lambda path: path.write_text(trace._repr_svg_()))
    return 0


def write(name: str, save: Any) -> None:
    """Call ``save`` with the path and report the written file on stderr. Raises PlanningError if
    the file cannot be written."""
    try:
        save(Path(name))
    except OSError as error:
        raise PlanningError(
            f"{name} cannot be written: {error.strerror or error}.\nfix: another path"
        ) from error
    print(f"written to {name}", file=sys.stderr)


def picture(trace: Trace) -> str:
    """Return a line for each rank. Each column shows the letter of the action that takes most of
    the column's time."""
    seconds = trace.seconds or 1.0
    lines: list[str] = []
    ranks = trace.ranks[:MAX_RANKS]
    name_width = max(len(f"rank {rank}") for rank in ranks)
    for rank in ranks:
        columns: list[dict[str, float]] = [defaultdict(float) for _ in range(COLUMNS)]
        for span in trace.spans:
            if span.rank != rank or span.track == "communication":
                continue
            letter = _letter(span)
            first = int(span.begin / seconds * COLUMNS)
            last = min(int(span.end / seconds * COLUMNS), COLUMNS - 1)
            for column in range(first, last + 1):
                begin = max(span.begin, column * seconds / COLUMNS)
                end = min(span.end, (column + 1) * seconds / COLUMNS)
                columns[column][letter] += max(end - begin, 0.0)
        text = "".join(max(c, key=lambda x: c[x]) if any(c.values()) else " " for c in columns)
        lines.append(f"{f'rank {rank}':<{name_width}}  {text}".rstrip())
    if len(trace.ranks) > MAX_RANKS:
        lines.append(f"... and {len(trace.ranks) - MAX_RANKS} more ranks, which --trace has")
    used_letters = "".join(line[name_width + 2 :] for line in lines)
    legend = [words for letters, words in _LEGEND if re.search(f"[{letters}]", used_letters)]
    return "\n".join([*lines, f"{'':<{name_width}}  {', '.join(legend)}"])


_LEGEND = (
    ("F", "F forward"),
    ("BI", "B backward"),
    ("W", "W of weights"),
    ("u", "u update"),
    ("o", "o once a step"),
    (".", ". waits"),
)


def _letter(span: Span) -> str:
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
    """Return the lines of a table of the seconds of each kind of work and message, for at most four
    ranks."""
    from dtensor.sharding.plan.text.words import seconds_text
    from dtensor.showing import table

    ranks = trace.ranks if len(trace.ranks) <= 4 else (*trace.ranks[:2], *trace.ranks[-2:])
    by_rank = [trace.by_kind(rank) for rank in ranks]
    all_kinds = {kind for by_kind in by_rank for kind in by_kind}
    rows = [["", *(f"rank {rank}" for rank in ranks)]]
    for kind in sorted(all_kinds, key=lambda kind: (kind == "wait", kind)):
        cells = [seconds_text(by_kind[kind]) if kind in by_kind else "" for by_kind in by_rank]
        rows.append([kind, *cells])
    return table(rows)
