"""Layers that change, and what follows, beside plain torch.

    python -m tests.changing_layers_sweep --table benchmarks/results/changing_layers.md
    python -m tests.changing_layers_sweep --only '*LoRA*' --follows steps --backends inprocess
    python -m tests.changing_layers_sweep --table-only --table build/table.md  # of what was found

Each way of `tests/api/changing.py` with each of what `follows.py` has after its first change:
in-process at every placement, a launch each; on Ray, where alone a rank can be lost, at the
placements in turn, one launch of all their meshes for all that is followed by the same. Records
go to --out, a line of JSON each; the table has all that are there, whichever run they are from.
Exit status 1 where something is wrong: other numbers, or an error that is no refusal.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import dtensor as dt
from dtensor.errors import PlanningError
from tests.api.changing import PLACES, WAYS
from tests.captures import shared_capture
from tests.changing_layers_sweep.follows import ENTER, FOLLOWS, LEAVE, LOSE, Case

LOSES = "a rank lost"
AS_TORCH = "as torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One case: where, and what came of it."""

    backend: str
    name: str
    follow: str
    place: str


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.changing_layers_sweep")
    parser.add_argument("--only", default="*", help="a glob over ways")
    parser.add_argument("--follows", default="*", help="a glob over what follows")
    parser.add_argument("--places", default="*", help="a glob over placements")
    parser.add_argument("--backends", default="inprocess,ray")
    parser.add_argument("--out", type=Path, default=Path("build/changing_layers.jsonl"))
    parser.add_argument("--table", type=Path, help="the file to write")
    parser.add_argument("--resume", action="store_true", help="leave out what was as torch before")
    parser.add_argument("--table-only", action="store_true")
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.table_only:
        run(options)
    found = recorded(options.out)
    backends = dict.fromkeys(cell.backend for cell in found)
    text = "\n".join(table(found, backend) for backend in backends)
    print(text)
    if options.table is not None:
        options.table.write_text(HEAD + text)
    return int(any(verdict.startswith("WRONG") for verdict in found.values()))


def recorded(out: Path) -> dict[Cell, str]:
    """The last record of each case."""
    lines = map(json.loads, out.read_text().splitlines() if out.exists() else [])
    return {Cell(**line["cell"]): line["verdict"] for line in lines}


def run(options: argparse.Namespace) -> None:
    """Adds a record of each case to --out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["DTENSOR_LATE_WARNINGS"] = "0"
    with ExitStack() as block:
        for user in ("dtensor.api.search.placements", "dtensor.api.step.plan_call"):
            block.enter_context(patch(f"{user}.capture", shared_capture))
        for backend in options.backends.split(","):
            begun = time.monotonic()
            done = recorded(options.out) if options.resume else {}
            for group in groups(backend, options, done):
                for cell, verdict in judged(group).items():
                    with options.out.open("a") as file:
                        line = {"cell": asdict(cell), "verdict": verdict}
                        file.write(json.dumps(line) + "\n")
                    if verdict != AS_TORCH:
                        where = f"{cell.backend} {cell.place}, {cell.name}, {cell.follow}"
                        print(f"{where}: {verdict}", flush=True)
            print(f"{backend}: {time.monotonic() - begun:.0f} s", flush=True)


def groups(
    backend: str, options: argparse.Namespace, done: Mapping[Cell, str]
) -> Iterator[list[Cell]]:
    """Cells that share a launch."""
    names = [name for name in WAYS if fnmatch.fnmatchcase(name, options.only)]
    for turn, follow in enumerate(FOLLOWS):
        if backend == "inprocess" and follow == LOSES:
            continue
        own = [
            Cell(backend=backend, name=name, follow=follow, place=place)
            for number, name in enumerate(names)
            for at, place in enumerate(PLACES)
            if backend == "inprocess" or (number + turn) % len(PLACES) == at
            if fnmatch.fnmatchcase(follow, options.follows)
            if fnmatch.fnmatchcase(place, options.places)
        ]
        own = [cell for cell in own if done.get(cell) != AS_TORCH]
        yield from ([cell] for cell in own) if backend == "inprocess" else [own] if own else []


def judged(group: Sequence[Cell]) -> dict[Cell, str]:
    """By cell what came of it; one whose error may be another's fault is tried again alone."""
    with tempfile.TemporaryDirectory(prefix="changing-") as folder:
        found = together(group, Path(folder))
    if len(group) > 1:
        for cell in group:
            if found[cell].startswith("WRONG: raised"):
                found |= judged([cell])
    return found


def together(group: Sequence[Cell], folder: Path) -> dict[Cell, str]:
    """All in one launch: each goes on to where the launch is to do something."""
    found: dict[Cell, str] = {}
    cases = {cell: Case(cell.name, cell.place, cell.follow, folder) for cell in group}
    going = {cell: case.run() for cell, case in cases.items()}
    act: Any = ENTER
    with ExitStack() as launches:
        while going:
            try:
                if act is ENTER:
                    running = launches.enter_context(launch(group))
                elif act is LEAVE:
                    launches.pop_all().close()
                elif act is LOSE:
                    lose(running)
            except Exception as error:
                return {cell: found.get(cell, verdict_of(error)) for cell in group}
            for cell, each in list(going.items()):
                try:
                    act = next(each)
                except StopIteration:
                    wrong = cases[cell].wrong
                    found[cell] = f"WRONG: {wrong[0]}" if wrong else AS_TORCH
                    del going[cell]
                except Exception as error:
                    found[cell] = verdict_of(error)
                    del going[cell]
        try:
            launches.close()
        except Exception as error:
            return {cell: verdict_of(error) for cell in group}
    return found


def verdict_of(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    if isinstance(error, PlanningError):
        return f"refused: {first}"
    return f"WRONG: raised {type(error).__name__}: {first}"


def launch(group: Sequence[Cell]) -> Any:
    """Of all meshes on the same ranks."""
    backend, follow = group[0].backend, group[0].follow
    options: dict[str, Any] = dict(spares=1, snapshot_every=1) if follow == LOSES else {}
    first, *others = dict.fromkeys(PLACES[cell.place].mesh for cell in group)
    shared = dict.fromkeys(others, tuple(range(first.size)))
    return dt.launch(first, *others, backend=backend, ranks=shared, **options)


def lose(running: Any) -> None:
    os.kill(running.launch.cluster.membership.host(1).counter.pid, signal.SIGKILL)


# -- the table -------------------------------------------------------------------------------------

HEAD = """# Layers that change between steps

Written by `OMP_NUM_THREADS=1 python -m tests.changing_layers_sweep --table \
benchmarks/results/changing_layers.md`; not to be edited by hand. A step, the change, what the
column says, then steps again: losses, norms of gradients, the model's `state_dict` and the
optimizer's beside those of plain torch, in float64, to 1e-7. An empty cell was not run.

"""


def table(found: dict[Cell, str], backend: str) -> str:
    """Rows are ways, columns what follows; notes say what is not as in torch."""
    own = {cell: verdict for cell, verdict in found.items() if cell.backend == backend}
    names = [name for name in WAYS if any(cell.name == name for cell in own)]
    follows = [name for name in FOLLOWS if any(cell.follow == name for cell in own)]
    notes: list[str] = []
    lines = [f"| {backend} | " + " | ".join(follows) + " |", "|---" * (len(follows) + 1) + "|"]
    for name in names:
        cells: list[str] = []
        for follow in follows:
            here = {c.place: v for c, v in own.items() if (c.name, c.follow) == (name, follow)}
            cells.append(cell_text(here, notes))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    counts = [sum(v.startswith(kind) for v in own.values()) for kind in (AS_TORCH, "ref", "WRONG")]
    every = "at " + ", ".join(PLACES) + (" in turn" if backend == "ray" else "")
    lines.append(
        f"\n{len(own)} cases {every}: "
        f"{counts[0]} as torch, {counts[1]} refused, {counts[2]} wrong.\n"
    )
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def cell_text(here: dict[str, str], notes: list[str]) -> str:
    """Such as "as torch", or "pp2: refused [1], else as torch"."""
    parts: list[str] = []
    for place, verdict in here.items():
        if verdict == AS_TORCH:
            continue
        if verdict not in notes:
            notes.append(verdict)
        parts.append(f"{place}: {verdict.partition(':')[0]} [{notes.index(verdict) + 1}]")
    if not parts:
        return AS_TORCH if here else ""
    return ", ".join(parts) + (f", else {AS_TORCH}" if len(parts) < len(here) else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
