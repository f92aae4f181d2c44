"""The full OpInfo run: `python -m tests.opinfo [entry ...]`, or `make opinfo`.

    python -m tests.opinfo                      # everything, both sizes, writes docs/coverage.md
    python -m tests.opinfo --sizes even mul     # one entry, printed in full; nothing is written
    python -m tests.opinfo --resume             # continues an earlier run that stopped
    python -m tests.opinfo --peer               # PyTorch's DTensor instead, into peer.json

Each entry runs in its own process, --jobs at a time; a process that dies counts as refused. Exit
status 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Torch warns in C++ of statistics of empty shards, and logs the graphs that it refuses.
os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-all", OMP_NUM_THREADS="1")

import torch

from tests.opinfo import peer
from tests.opinfo.entries import entries, name_of
from tests.opinfo.judge import judge
from tests.opinfo.record import Record
from tests.opinfo.table import PEER, crashed, load, peer_numbers, summary, write

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

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
    options = parser.parse_args(argv)
    kinds = ["even", "uneven"] if options.sizes == "both" else [options.sizes]
    warnings.filterwarnings("ignore")  # torch's and numpy's, about the samples
    torch.set_num_threads(1)
    if options.entry:
        return _few(options.entry, kinds)
    if options.peer:
        kinds = ["peer"]
    for kind in kinds:
        run(kind, entries(), options.jobs, options.out, options.resume)
    if options.peer:
        return _write_peer(options.out)
    found = {kind: load(options.out, kind) for kind in kinds}
    print(summary(found))
    if len(kinds) == 2:
        write(options.table, found)
        print(f"written: {options.table}")
    return int(any(r.wrong for records in found.values() for r in records))


def _few(names: Sequence[str], kinds: Sequence[str]) -> int:
    wrong = False
    for entry in entries():
        for kind in kinds if {name_of(entry), entry.name} & {*names} else ():
            started = time.monotonic()
            record = judge(entry, kind)
            wrong = wrong or bool(record.wrong)
            print(f"\n{record.name} ({kind}), {time.monotonic() - started:.1f} s")
            for key, value in record.as_json().items():
                if isinstance(value, list):
                    value = "".join(f"\n    {line}" for line in value)
                print(f"  {key}: {value}")
    return int(wrong)


def _write_peer(out: Path) -> int:
    ours = load(out, "even")
    if not ours:
        print("run python -m tests.opinfo first: the same entries are counted")
        return 2
    PEER.write_text(json.dumps(peer_numbers(load(out, "peer"), ours), indent=1) + "\n")
    print(PEER.read_text(), end="")
    return 0


def run(kind: str, every: Sequence[OpInfo], jobs: int, out: Path, resume: bool = False) -> None:
    """Append a line for each entry to the kind's file."""
    out.mkdir(parents=True, exist_ok=True)
    done = {record.name for record in load(out, kind)} if resume else set()
    todo = [entry for entry in every if name_of(entry) not in done]
    with (
        (out / f"{kind}.jsonl").open("a" if resume else "w", buffering=1) as file,
        ThreadPoolExecutor(max(1, jobs)) as threads,
    ):
        for record in threads.map(lambda entry: _in_a_process(kind, entry), todo):
            file.write(json.dumps(record.as_json()) + "\n")


def _in_a_process(kind: str, entry: OpInfo) -> Record:
    context = multiprocessing.get_context("fork")  # it need not import torch again
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, kind, entry))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return crashed(name_of(entry))
    finally:
        process.join()


def _send(connection: Any, kind: str, entry: OpInfo) -> None:
    connection.send(peer.judge(entry) if kind == "peer" else judge(entry, kind))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
