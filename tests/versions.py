"""Capture, rules and Ray with each supported minor version of torch: `make versions`.

    python -m tests.versions                   # 2.11, 2.12, 2.13; writes docs/notes/versions.md
    python -m tests.versions --only 2.12       # printed; nothing is written
    python -m tests.versions --cuda-builds     # where there is no build for CPUs, that for CUDA

Each version is installed, with this checkout and all that tests need, into an environment of its
own, kept in `build/versions` for the next time. Which build pip would take is asked before anything
is fetched: one that brings CUDA's libraries is several gigabytes, and runs on a CPU like the other,
but is taken only with `--cuda-builds`. Another index is named as pip is always told,
`PIP_EXTRA_INDEX_URL`. What could not be had is a row of the table that says so.

Exit status 1 where a test failed. Not here: versions of Ray, Triton and Python other than what pip
takes with that torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = ROOT / "build" / "versions"
TABLE = ROOT / "docs" / "notes" / "versions.md"
VERSIONS = ("2.11", "2.12", "2.13")
PARTS: Mapping[str, tuple[str, ...]] = {
    "capture": ("tests/frontend", "tests/api/test_python_state.py", "-m", "not ray and not sweep"),
    "rules": ("tests/sharding", "tests/certify", "tests/testing", "tests/runtime"),
    "Ray": ("tests", "-m", "ray and not gpu and not sweep"),
}
BEGIN, END = "<!-- by make versions -->", "<!-- end of it -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one version; ``parts`` has (passed, names of those that failed) for each."""

    version: str
    installed: str = ""
    why_not: str = ""
    parts: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--only", action="append", choices=VERSIONS)
    parser.add_argument("--cuda-builds", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    rows = [run(v, options.cuda_builds, options.jobs) for v in options.only or VERSIONS]
    text = table(rows)
    print(text)
    if not options.only:
        page = TABLE.read_text()
        head, rest = page.split(BEGIN)
        TABLE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return int(any(failed for row in rows for _, failed in row.parts.values()))


def run(version: str, cuda_builds: bool, jobs: int) -> Row:
    home = WHERE / version
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        requirement = f"torch=={version}.*"
        if (libraries := cuda_libraries(python, requirement)) and not cuda_builds:
            shutil.rmtree(home)
            return Row(version=version, why_not=f"no build for CPUs ({libraries} of CUDA's)")
        installs = ([requirement], ["-e", f"{ROOT}[dev]"])
        for wanted in installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    asked = (
        "import torch, triton, ray; print(torch.__version__, triton.__version__, ray.__version__)"
    )
    torch, triton, ray = subprocess.check_output([python, "-c", asked], text=True).split()
    found = {name: tests(python, home / f"{name}.xml", args, jobs) for name, args in PARTS.items()}
    return Row(version=version, installed=f"{torch} | {triton} | {ray}", parts=found)


def cuda_libraries(python: Path, requirement: str) -> int:
    """How many packages of CUDA's libraries pip would install with it; nothing is installed."""
    report = ["--dry-run", "--quiet", "--report", "-", requirement]
    found = json.loads(subprocess.check_output([python, "-m", "pip", "install", *report]))
    names = [item["metadata"]["name"] for item in found["install"]]
    return sum(name.startswith("nvidia-") for name in names)


def tests(
    python: Path, report: Path, args: Sequence[str], jobs: int
) -> tuple[int, tuple[str, ...]]:
    """How many passed, and which failed."""
    command = [python, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile", *args]
    subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
    cases = list(ET.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    passed = sum(c.find("skipped") is None for c in cases) - len(bad)
    return passed, tuple(sorted(f"{c.get('classname')}::{c.get('name')}" for c in bad))


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"| torch | installed | its Triton | Ray | {' | '.join(PARTS)} |",
        "|---" * (4 + len(PARTS)) + "|",
    ]
    for row in rows:
        if row.why_not:
            lines.append(
                f"| {row.version} | did not run: {row.why_not} |" + " |" * (2 + len(PARTS))
            )
            continue
        counts = (f"{n} passed, {len(bad)} failed" for n, bad in row.parts.values())
        lines.append(f"| {row.version} | {row.installed} | {' | '.join(counts)} |")
    for row in rows:
        for name in (name for _, bad in row.parts.values() for name in bad):
            lines += ["", f"{row.version}: `{re.sub(r'^tests[.]', '', name)}`"]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
