"""Test capture, rules and Ray with each supported minor version of torch and Python: `make
versions`.

    python -m tests.versions                   # all pairs below; writes docs/notes/versions.md
    python -m tests.versions --torch 2.12      # printed; nothing is written
    python -m tests.versions --python 3.13 --part capture --write     # one cell of the table
    python -m tests.versions --cuda-builds     # where there is no CPU build, use the CUDA build

The pairs are each torch with the oldest Python, and each later Python with the newest torch;
missing versions are noted in the table. Each pair is installed with this checkout into a kept
environment in `build/versions`. `PIP_EXTRA_INDEX_URL` names another package index.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
WHERE = ROOT / "build" / "versions"
TABLE = ROOT / "docs" / "notes" / "versions.md"
TORCHES = ("2.11", "2.12", "2.13")
PYTHONS = ("3.11", "3.12", "3.13")
PARTS: Mapping[str, tuple[str, ...]] = {
    "capture": (
        *("tests/frontend", "tests/api/test_python_state.py", "tests/api/test_threads.py"),
        *("-m", "not ray and not sweep and not gpu"),
    ),
    "rules": ("tests/sharding", "tests/certify", "tests/testing", "tests/runtime"),
    "Ray": ("tests", "-m", "ray and not gpu and not sweep"),
}
BEGIN, END = "<!-- by make versions -->", "<!-- end of it -->"
NOT_RUN = "not run"

Pair: TypeAlias = tuple[str, str]
"""A minor version of Python, and one of torch."""
PAIRS: tuple[Pair, ...] = (
    *((PYTHONS[0], torch) for torch in TORCHES),
    *((python, TORCHES[-1]) for python in PYTHONS[1:]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one pair: installed versions, a cell for each part, and the failed tests."""

    pair: Pair
    installed: str = ""
    why_not: str = ""
    cells: Mapping[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [self.cells.get(part, NOT_RUN) for part in PARTS]
        return f"| {' | '.join((*self.pair, self.installed or self.why_not, *cells))} |"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--torch", action="append", choices=TORCHES)
    parser.add_argument("--python", action="append", choices=PYTHONS)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--write", action="store_true", help="into the table, which keeps the rest")
    parser.add_argument("--cuda-builds", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    chosen = options.torch or options.python or options.part
    pairs = [
        (python, torch)
        for python, torch in PAIRS
        if python in (options.python or PYTHONS) and torch in (options.torch or TORCHES)
    ]
    parts = options.part or list(PARTS)
    rows = [run(pair, parts, options.cuda_builds, options.jobs) for pair in pairs]
    print(table(rows))
    if options.write or not chosen:
        page = TABLE.read_text()
        head, rest = page.split(BEGIN)
        old, tail = rest.split(END)
        TABLE.write_text(f"{head}{BEGIN}\n{table(merged(parse(old), rows))}\n{END}{tail}")
    return int(any(row.failed for row in rows))


def run(pair: Pair, parts: Sequence[str], cuda_builds: bool, jobs: int) -> Row:
    version, torch = pair
    home = WHERE / f"python{version}-torch{torch}"
    python = home / "bin" / "python"
    if not (home / ".complete").exists():
        base = find_python(version)
        if base is None:
            return Row(pair=pair, why_not=f"Python {version} was not found")
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([base, "-m", "venv", home], check=True)
        requirement = f"torch=={torch}.*"
        if (libraries := cuda_libraries(python, requirement)) and not cuda_builds:
            shutil.rmtree(home)
            return Row(pair=pair, why_not=f"no build for CPUs ({libraries} of CUDA's)")
        for wanted in ([requirement], ["-e", f"{ROOT}[dev]"]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (home / ".complete").touch()
    asked = (
        "import platform, torch, triton, ray; print(f'Python {platform.python_version()}, torch "
        "{torch.__version__}, Triton {triton.__version__}, Ray {ray.__version__}')"
    )
    installed = subprocess.check_output([python, "-c", asked], text=True).strip()
    row = Row(pair=pair, installed=installed)
    for part in parts:
        passed, failed = tests(python, home / f"{part}.xml", PARTS[part], jobs)
        cells = {**row.cells, part: f"{passed} passed, {len(failed)} failed"}
        row = replace(row, cells=cells, failed=(*row.failed, *(f"{part}: `{n}`" for n in failed)))
    return row


def find_python(version: str) -> str | None:
    """Return an interpreter of the minor version: this one, one on the path, or pyenv's newest."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    own = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: _number(path.parts[-3]))
    on_path = shutil.which(f"python{version}")  # pyenv's is there for versions that it does not run
    for path in (sys.executable, *([on_path] if on_path else ()), *map(str, reversed(own))):
        asked = [path, "-c", "import sys, venv, ssl; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def cuda_libraries(python: Path, requirement: str) -> int:
    """Return how many CUDA packages pip would install with it; nothing is installed."""
    report = ["--dry-run", "--quiet", "--report", "-", requirement]
    found = json.loads(subprocess.check_output([python, "-m", "pip", "install", *report]))
    names = [item["metadata"]["name"] for item in found["install"]]
    return sum(name.startswith("nvidia-") for name in names)


def tests(
    python: Path, report: Path, args: Sequence[str], jobs: int
) -> tuple[int, tuple[str, ...]]:
    """Return how many tests passed, and which failed."""
    command = [python, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile", *args]
    subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
    cases = list(ET.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    passed = sum(c.find("skipped") is None for c in cases) - len(bad)
    names = (f"{c.get('classname')}::{c.get('name')}".removeprefix("tests.") for c in bad)
    return passed, tuple(sorted(names))


# -- the table -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    lines = [f"| Python | torch | installed | {' | '.join(PARTS)} |", "|---" * 6 + "|"]
    lines += [str(row) for row in rows]
    for row in rows:
        for name in row.failed:
            lines += ["", _prefix(row.pair) + name]
    return "\n".join(lines)


def parse(text: str) -> list[Row]:
    """Return the rows of a table."""
    lines = text.splitlines()
    cells = [[c.strip() for c in line.strip("| ").split("|")] for line in lines if line[:1] == "|"]
    found = []
    for python, torch, installed, *others in cells[2:]:
        start = _prefix((python, torch))
        failed = tuple(line.removeprefix(start) for line in lines if line.startswith(start))
        ran = {part: cell for part, cell in zip(PARTS, others) if cell != NOT_RUN}
        found.append(Row(pair=(python, torch), installed=installed, cells=ran, failed=failed))
    return found


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return rows in the order of `PAIRS`: the new cells, and old cells of the same pair for other
    parts."""
    by_pair = {row.pair: row for row in old}
    for row in new:
        before = by_pair.get(row.pair)
        if before is not None and before.installed == row.installed:
            kept = tuple(f for f in before.failed if f.partition(":")[0] not in row.cells)
            row = replace(row, cells={**before.cells, **row.cells}, failed=(*kept, *row.failed))
        by_pair[row.pair] = row
    return [by_pair.get(pair) or Row(pair=pair) for pair in PAIRS]


def _prefix(pair: Pair) -> str:
    return f"Python {pair[0]}, torch {pair[1]}, "


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
