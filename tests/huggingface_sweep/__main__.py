"""Train a small model of every transformers family over two ranks.

    python -m tests.huggingface_sweep                     # all of them; writes the table
    python -m tests.huggingface_sweep --only 'qwen*'      # some, printed; nothing is written
    python -m tests.huggingface_sweep --resume            # continues an earlier run that stopped
    python -m tests.huggingface_sweep --table-only        # the table of earlier records

Each family runs in its own process, forked from one that has imported everything, with limits of
time and memory. Records go to --out, one line of JSON each. Exit status 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 240
PATIENCE_S = 30  # of those: to find a model that plain torch trains
GIB = 6


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.huggingface_sweep", description=__doc__)
    parser.add_argument("--only", action="append", help="a glob over families; may be repeated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--retry", action="store_true", help="run again what was not right")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "huggingface.jsonl")
    parser.add_argument(
        "--table", type=Path, default=ROOT / "benchmarks" / "results" / "huggingface.md"
    )
    options = parser.parse_args(argv)
    from tests.huggingface_sweep.judge import families
    from tests.huggingface_sweep.table import load, summary, write

    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = families()
    started = time.monotonic()
    if options.only:
        chosen = [n for n in names if any(fnmatch.fnmatchcase(n, g) for g in options.only)]
        wrong = _run(chosen, options.jobs, options.out.with_suffix(".only.jsonl"), options.trace)
        return int(wrong)
    if not options.table_only:
        if not options.resume and not options.retry:
            options.out.unlink(missing_ok=True)
        done = {
            r.family
            for r in load(options.out)
            if not options.retry or r.verdict in ("right", "not run")
        }
        _run([n for n in names if n not in done], options.jobs, options.out, options.trace)
    found = load(options.out)
    print(summary(found))
    print(f"{time.monotonic() - started:.0f} seconds, {options.jobs} processes")
    write(options.table, found)
    return int(any(r.verdict == "wrong" for r in found))


def _run(names: Sequence[str], jobs: int, out: Path, trace: bool) -> bool:
    """Fork a process for each family, ``jobs`` at a time; return whether a number is wrong."""
    import torch

    import dtensor  # noqa: F401  (before the forks)

    torch.set_num_threads(1)
    _warm()
    waiting, running, wrong = list(reversed(names)), dict[int, tuple[str, Path, float]](), False
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop()
            part = out.with_name(f"{out.name}.{family}")
            part.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                _child(family, part)
            running[pid] = (family, part, time.monotonic())
        time.sleep(0.05)
        for pid, (family, part, started) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() - started > SECONDS:
                os.kill(pid, 9)
                _, status = os.waitpid(pid, 0)
                ended = pid
            if ended:
                del running[pid]
                line = _line(family, part, status, time.monotonic() - started)
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                wrong = wrong or line["verdict"] == "wrong"
                print(
                    f"{line['verdict']:8} {family:32} {line['model']:40} {line['seconds']:5.1f} s  "
                    f"{line['captures']} {line['split']:3}  {line['reason'][:220]}",
                    flush=True,
                )
                if trace and line["trace"]:
                    print(line["trace"], flush=True)
    return wrong


def _warm() -> None:
    """Load before the forks what is loaded at first use."""
    from tests.huggingface_sweep.judge import judge

    judge("llama")


def _child(family: str, part: Path) -> None:
    import faulthandler

    from tests.huggingface_sweep.judge import judge
    from tests.huggingface_sweep.record import Record

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    faulthandler.disable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def put(record: Record) -> None:
        record.seconds = round(time.monotonic() - started, 1)
        part.write_text(json.dumps(record.as_json()))

    def begun(record: Record) -> None:  # what counts if this process does not come to its end
        put(dataclasses.replace(record, verdict="refused", stage="process"))

    started = time.monotonic()
    put(judge(family, begun, PATIENCE_S))
    os._exit(0)


def _line(family: str, part: Path, status: int, seconds: float) -> dict[str, object]:
    from tests.huggingface_sweep.record import Record

    record = Record(family=family, stage="process")
    if part.exists():
        record = Record(**json.loads(part.read_text()))
        part.unlink()
    if record.stage == "process":
        record.seconds = round(seconds, 1)
        record.reason = f"the process ended with status {status}"
        if seconds > SECONDS:
            record.reason = f"not done after {SECONDS} seconds"
    return record.as_json()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
