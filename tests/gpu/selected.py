"""Runs tests marked `gpu` by pytest in this process: a line for each test, with its cases
counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.tables import Line, Where

ROOT = Path(__file__).resolve().parents[2]


class Lines:
    """A pytest plugin that reports a line after a test's last case."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.name = ""
        self.seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        if name != self.name:
            self.end()
            self.name = name
        self.seconds += report.duration
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.said.append(f"{report.nodeid.removeprefix(name)} {_reason(report)}".strip())
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.said.append(report.longrepr[2].removeprefix("Skipped: "))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.where.say(Line("wrong", report.nodeid, _reason(report)))

    def pytest_sessionfinish(self) -> None:
        self.end()

    def end(self) -> None:
        if self.name:
            failed, passed = self.counts["failed"], self.counts["passed"]
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
            state = "wrong" if failed else "ok" if passed else "left out"
            why = f": {self.said[0]}" if self.said else ""
            self.where.say(Line(state, self.name, counts + why, f"{self.seconds:.1f} s"))
        self.name, self.seconds, self.said = "", 0.0, []
        self.counts.clear()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longreprtext.strip().splitlines()[-1] if report.longreprtext else ""


def marked() -> list[str]:
    """Return the files with a test that is marked `gpu`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "pytest.mark.gpu" in file.read_text()]


def run(where: Where, marks: str, files: list[str], *given: str) -> None:
    plugin = Lines(where)
    simulated = [f"--simulated-gpus={where.simulated}"] if where.simulated else []
    options = ["-p", "no:cacheprovider", "-v", "--rootdir", str(ROOT), "-m", marks]
    status = pytest.main([*options, *simulated, *given, *files], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        where.say(Line("wrong", "pytest", f"ended with {status!r}"))
