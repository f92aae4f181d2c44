"""Launch and close repeatedly, in every way: `python -m tests.chaos`, or `make chaos`.

    python -m tests.chaos                       # 200 cycles in-process, 20 on Ray, and their table
    python -m tests.chaos --inprocess 0 --ray 13
    python -m tests.chaos --recover 200 --seed 0          # ranks that are replaced (`recover.py`)
    python -m tests.chaos --disk 40                       # checkpoints (`disk.py`)

Kinds of cycles (`kinds.py`) alternate. After each, nothing may be left over (`watch.py`) compared
to before it. One warm-up cycle of each kind in-process, two per place on Ray. Three in five Ray
cycles join a running Ray; the others start and end one. Exit status 1 if anything leaked or a cycle
ended wrongly.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtensor.daft.ray.bootstrap.start_ray import start_ray
from tests.chaos.disk import disk
from tests.chaos.inside import KINDS as FAULTS
from tests.chaos.inside import LATE
from tests.chaos.kinds import KINDS, RAY_KINDS, Place
from tests.chaos.recover import Row as FaultRow
from tests.chaos.recover import recover
from tests.chaos.recover import table as fault_table
from tests.chaos.watch import alive, held, left

PATIENCE_S = 120.0  # for what has been told to end


@dataclass(slots=True)
class Row:
    """The results of all cycles of one kind in one place."""

    seconds: list[float] = field(default_factory=list[float])
    leaks: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--inprocess", type=int, default=200, help="cycles in this process")
    parser.add_argument("--ray", type=int, default=20, help="cycles on Ray")
    parser.add_argument("--kinds", default="", help="only kinds whose name has this")
    parser.add_argument("--recover", type=int, default=0, help="faults that are recovered from")
    parser.add_argument("--disk", type=int, default=0, help="faults of checkpoints")
    parser.add_argument("--programs", default="", help="of these, in programs whose name has this")
    parser.add_argument("--seed", type=int, default=0, help="that faults are drawn from")
    parser.add_argument("--spares", type=int, default=1, help="of each launch with them")
    options = parser.parse_args(argv)
    if options.recover or options.disk:
        return faults(options)
    warnings.simplefilter("ignore")
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        (own := Path(scratch) / "tmp").mkdir()
        tempfile.tempdir = str(own)  # so that what is left there was left by a cycle
        local, ray = Place("inprocess", Path(scratch)), Place("ray", Path(scratch))
        for kind in KINDS.values():
            kind(local)
        gc.collect()
        gc.freeze()  # what is there by now: no collection looks at it again
        for kind in KINDS.values():  # replaces what is kept of the last of something
            kind(local)
        chosen = [name for name in RAY_KINDS if options.kinds in name]
        turns = itertools.cycle(name for name in chosen if name in KINDS)
        cycles(rows, "in-process", local, turns, options.inprocess)
        turns, num_shared = itertools.cycle(chosen), 3 * options.ray // 5
        if options.ray > num_shared:
            warm_up(ray)
            cycles(rows, "own Ray", ray, turns, options.ray - num_shared)
        if num_shared:
            start_ray(None)
            warm_up(ray)
            cycles(rows, "shared Ray", ray, turns, num_shared)
        tempfile.tempdir = None
        gc.unfreeze()
    print(table(rows, time.monotonic() - started))
    return int(any(row.leaks or row.failed for row in rows.values()))


def faults(options: argparse.Namespace) -> int:
    """Run cycles with faults; return 1 if one had a wrong result."""
    done: dict[tuple[str, str], FaultRow] = defaultdict(FaultRow)
    begun, only, wrong = time.monotonic(), options.programs, 0
    if options.recover:
        kinds = [kind for kind in (*FAULTS, LATE) if options.kinds in kind]
        spares, count = options.spares, options.recover
        wrong += recover(count, options.seed, done, spares=spares, only=only, kinds=kinds)
    if options.disk:
        wrong += disk(options.disk, options.seed, done, only=only, kinds=options.kinds)
    count = sum(row.count for row in done.values())
    print(fault_table(done))
    print(f"{count} faults as they should be, {wrong} not, {time.monotonic() - begun:.0f} s")
    return int(wrong > 0)


def warm_up(ray: Place) -> None:
    """Make Ray open what it opens once for its own calls; training alone does not make it do so."""
    for name in ("clean training", "spawned actors"):
        RAY_KINDS[name](ray)


def cycles(
    rows: dict[tuple[str, str], Row], where: str, place: Place, turns: Iterator[str], count: int
) -> None:
    objects, before = alive(), held()  # a collection first: Ray then starts a thread, once
    for name in itertools.islice(turns, count):
        row = rows[where, name]
        started = time.monotonic()
        try:
            kept = RAY_KINDS[name](place)
        except Exception:
            kept, row.failed = None, [*row.failed, traceback.format_exc()]
            print(f"{where}, {name}: {row.failed[-1]}", flush=True)
        row.seconds.append(time.monotonic() - started)
        found = left(before, PATIENCE_S)
        del kept  # until here the user holds on to what a cycle gave
        found += left(objects, 0.0, alive)
        if found:
            print(*[f"{where}, {name}: leaked {item}" for item in found], sep="\n", flush=True)
            row.leaks += found
            before, objects = held(), alive()  # each leak counts once


def table(rows: Mapping[tuple[str, str], Row], seconds: float) -> str:
    lines = [f"{'where':12} {'kind':32} {'cycles':>6} {'s/cycle':>8} {'failed':>6} {'leaks':>6}"]
    for (where, name), row in rows.items():
        each = sum(row.seconds) / len(row.seconds)
        counts = f"{len(row.failed):6} {len(row.leaks):6}"
        lines.append(f"{where:12} {name:32} {len(row.seconds):6} {each:8.2f} {counts}")
    total = sum(len(row.seconds) for row in rows.values())
    leaks = sum(len(row.leaks) for row in rows.values())
    failed = sum(len(row.failed) for row in rows.values())
    return "\n".join([*lines, f"{total} cycles, {seconds:.0f} s, {failed} failed, {leaks} leaks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
