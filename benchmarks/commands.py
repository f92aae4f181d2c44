"""How long commands of the command line take, each in a process of its own, cold.

    python -m benchmarks.commands [--runs 3] [--write]

Wall seconds, which what else the machine does lengthens, and seconds of CPU (user and system, of
the process and its children), which it lengthens less. The least of the runs is shown, and the
load of the machine before them. gpt2 and llama are transformers' default configurations: 12 layers
of 768, and 32 layers of 4096. ``--write`` puts the table into results/commands.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.smallest import parsed

MESHES = "--mesh tp=2 --mesh dp=2 --mesh pp=2"
COMMANDS = (
    "--help",
    "doctor --no-ray",
    "doctor",
    "plan gpt2 --mesh tp=2",
    f"compare gpt2 {MESHES}",
    "simulate gpt2 --mesh tp=2,pp=2",
    "plan llama --mesh tp=2",
    f"compare llama {MESHES}",
    "simulate llama --mesh tp=2,pp=2",
)
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "commands.md"


def measured(line: str, folder: str) -> tuple[float, float]:
    """Wall seconds, and CPU seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dtensor", *line.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: it does not fit, which is found as soon
        raise RuntimeError(f"dtensor {line}: {done.stderr}")
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return wall, used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.set_defaults(commands=COMMANDS)
    options = parsed(parser, runs=1, commands=COMMANDS[:2])
    cores = os.cpu_count()
    load = os.getloadavg()[0]
    lines = [
        "| command | wall | CPU |",
        "|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for line in options.commands:
            found = [measured(line, folder) for _ in range(options.runs)]
            wall, cpu = min(f[0] for f in found), min(f[1] for f in found)
            lines.append(f"| `dtensor {line}` | {wall:.1f} s | {cpu:.1f} s |")
            print(lines[-1], flush=True)
    if options.write:
        RESULTS.write_text(_page(lines, options.runs, cores, load))


def _page(lines: list[str], runs: int, cores: int | None, load: float) -> str:
    import torch

    return "\n".join(
        [
            "# Commands of the command line",
            "",
            f"`python -m benchmarks.commands --runs {runs} --write`: the least of {runs} runs, "
            "each in a process of its own;",
            f"torch {torch.__version__}, {cores} cores that others share (load {load:.1f} before "
            "the first run), no GPU. CPU is",
            "user and system seconds of the command's processes, not of Ray's daemons; it grows",
            "too where others use the cores' caches.",
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
