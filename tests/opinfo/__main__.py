"""The whole OpInfo run: `python -m tests.opinfo [entry ...]`, or `make opinfo`.

    python -m tests.opinfo                      # everything, both sizes, writes docs/coverage.md
    python -m tests.opinfo --sizes even mul     # one entry, printed in full; nothing is written
    python -m tests.opinfo --resume             # goes on where an earlier run stopped
    python -m tests.opinfo --peer               # PyTorch's DTensor instead, into peer.json

Processes (--jobs) take the entries in turn and append one JSON line for each to --out. One that
dies is started again after the entry that killed it, which counts as refused. Exit status 1 where a
number is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.add_argument("entry", nargs="*", help="names of entries, as in the table")
    parser.add_argument("--sizes", choices=["even", "uneven", "both"], default="both")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--peer", action="store_true", help="run PyTorch's DTensor")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "opinfo")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "coverage.md")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # "even:0/2", for the processes
    options = parser.parse_args(argv)
    options.jobs = max(1, options.jobs)
    kinds = ["even", "uneven"] if options.sizes == "both" else [options.sizes]
    warnings.filterwarnings("ignore")  # torch's and numpy's, about the samples
    if options.part:
        return _worker(options.part, options.out)
    if options.entry:
        return _few(options.entry, kinds)
    if options.peer:
        return _peer(options.jobs, options.resume, options.out)
    return _whole(kinds, options.jobs, options.resume, options.out, options.table)


def _few(names: Sequence[str], kinds: Sequence[str]) -> int:
    from tests.opinfo.entries import entries, name_of
    from tests.opinfo.judge import judge

    wrong = False
    for entry in entries():
        if name_of(entry) in names or entry.name in names:
            for kind in kinds:
                started = time.monotonic()
                record = judge(entry, kind)
                wrong = wrong or bool(record.wrong)
                print(f"\n{record.name} ({kind}), {time.monotonic() - started:.1f} s")
                for key, value in record.as_json().items():
                    if isinstance(value, list):
                        value = "".join(f"\n    {line}" for line in value)
                    print(f"  {key}: {value}")
    return int(wrong)


def _whole(kinds: Sequence[str], jobs: int, resume: bool, out: Path, table: Path) -> int:
    from tests.opinfo.table import load, summary, write

    _prepare(kinds, resume, out)
    started = time.monotonic()
    for kind in kinds:
        _processes(kind, jobs, out)
    found = {kind: load(out, kind) for kind in kinds}
    print(summary(found))
    print(f"{time.monotonic() - started:.0f} seconds, {jobs} processes")
    if len(kinds) == 2:
        write(table, found)
        print(f"written: {table}")
    return int(any(r.wrong for records in found.values() for r in records))


def _peer(jobs: int, resume: bool, out: Path) -> int:
    from tests.opinfo.table import PEER, load, peer_numbers

    ours = load(out, "even")
    if not ours:
        print("run python -m tests.opinfo first: the same entries are counted")
        return 2
    _prepare(["peer"], resume, out)
    _processes("peer", jobs, out)
    found = peer_numbers(load(out, "peer"), ours)
    PEER.write_text(json.dumps(found, indent=1) + "\n")
    print(PEER.read_text(), end="")
    return 0


def _prepare(kinds: Sequence[str], resume: bool, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        for path in [] if resume else out.glob(f"{kind}-*.jsonl"):
            path.unlink()


def _processes(kind: str, jobs: int, out: Path) -> None:
    """Run all parts of one kind to their end, starting a part again where its process dies."""
    # torch warns in C++ of statistics of empty shards, and logs the graphs that it refuses
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_LOGS": "-all"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1"}
    running: dict[int, subprocess.Popen[bytes]] = {}
    tries = dict.fromkeys(range(jobs), 0)
    while True:
        for part in list(tries):
            process = running.get(part)
            status = None if process is None else process.poll()
            if process is not None and status == 0:
                del running[part], tries[part]
            elif process is None or status is not None:
                tries[part] += 1
                if tries[part] > 50:
                    raise RuntimeError(f"part {part} of {jobs} died 50 times")
                command = [sys.executable, "-m", "tests.opinfo", "--out", str(out)]
                command += ["--part", f"{kind}:{part}/{jobs}"]
                running[part] = subprocess.Popen(command, cwd=ROOT, env=environment)
        if not tries:
            return
        time.sleep(0.2)


def _worker(text: str, out: Path) -> int:
    import torch

    from tests.opinfo.entries import entries, name_of
    from tests.opinfo.table import crashed

    kind, _, rest = text.partition(":")
    part, parts = (int(n) for n in rest.split("/"))
    from tests.opinfo import peer
    from tests.opinfo.judge import judge

    torch.set_num_threads(1)
    path = out / f"{kind}-{part}-of-{parts}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {line["name"] for line in lines if "verdict" in line}
    begun = {line["name"] for line in lines} - done
    with path.open("a", buffering=1) as file:

        def put(data: dict[str, Any]) -> None:
            file.write(json.dumps(data) + "\n")

        for name in sorted(begun):  # an entry that an earlier process did not survive
            put(crashed(name).as_json())
        for number, entry in enumerate(entries()):
            name = name_of(entry)
            if number % parts == part and name not in done | begun:
                put({"name": name})
                started = time.monotonic()
                record = peer.judge(entry) if kind == "peer" else judge(entry, kind)
                put({**record.as_json(), "seconds": round(time.monotonic() - started, 2)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
