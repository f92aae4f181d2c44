"""CPU seconds that tests take, by test, fixture and file: `make test ARGS=--cpu`.

     42.1 in all: 11.0 to import files, 5.2 to set up, 24.9 to call, 1.0 to tear down
      3.17 call    tests/api/test_train.py::test_adam
      2.54 import  tests/opinfo/test_opinfo.py
      1.20 setup   ray_session

A test's seconds include those of its process and of ended child processes. Running children count
only for Ray tests and shared fixtures, because reading their times takes up to 30 ms. A module
imported by several files counts for the first. CPU seconds can be compared on a busy machine.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

LONGEST = 50
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = {"import": "to import files", "setup": "to set up", "call": "to call"}
KINDS["teardown"] = "to tear down"

Row = tuple[str, str]  # kind, and test, fixture or file


class Seconds:
    """A pytest plugin of each process that runs tests, and of the process that prints."""

    def __init__(self, table: Path | None = None) -> None:
        self.table = table
        self.rows: Counter[Row] = Counter()
        self.fixtures: Counter[Row] = Counter()

    @contextmanager
    def counted(self, kind: str, node: pytest.Collector | pytest.Item) -> Iterator[None]:
        clock = seconds if node.get_closest_marker("ray") else seconds_of_ended
        before = clock()
        try:
            yield
        finally:
            self.rows[kind, node.nodeid] += clock() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self.counted("import", collector):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        with self.counted("setup", item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        with self.counted("call", item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        with self.counted("teardown", item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        # Most are small and many: those of one test count for this process alone.
        clock = time.process_time if fixturedef.scope == "function" else seconds
        before = clock()
        try:
            return (yield)
        finally:
            self.fixtures["fixture", fixturedef.argname] += clock() - before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu"] = [[*row, s] for row, s in (self.rows + self.fixtures).items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """``node``: an xdist worker that has ended."""
        for kind, name, s in getattr(node, "workeroutput", {}).get("cpu", ()):
            (self.fixtures if kind == "fixture" else self.rows)[kind, name] += s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        sums: Counter[str] = Counter()
        files: Counter[Row] = Counter()
        for (kind, name), s in self.rows.items():
            sums[kind] += s
            files["file", name.partition("::")[0]] += s
        parts = ", ".join(f"{sums[kind]:.1f} {what}" for kind, what in KINDS.items())
        terminalreporter.section("seconds of a core")
        terminalreporter.line(f"{sums.total():10.1f} in all: {parts}")
        for rows in (self.rows, self.fixtures, files):
            for (kind, name), s in rows.most_common(LONGEST):
                terminalreporter.line(f"{s:10.2f} {kind:8} {name}")
        if self.table:
            num = sum(kind == "call" for kind, _ in self.rows)
            command = f"make test ARGS=--cpu-table={self.table}"
            parts = (
                "# Seconds of a core of the default set",
                f"`{command}`: {num} tests, {sums.total():.1f} s: {parts}.",
                _table(self.rows.most_common(LONGEST)),
                "By file, the twenty longest:",
                _table(files.most_common(20)),
            )
            self.table.write_text("\n\n".join(parts) + "\n")


def _table(rows: list[tuple[Row, float]]) -> str:
    lines = [f"| {s:.2f} | {kind} | `{name}` |" for (kind, name), s in rows]
    return "\n".join(["| s | what | of |", "|---|---|---|", *lines])


def seconds() -> float:
    """Return the CPU seconds of this process and all its descendants so far."""
    return seconds_of_ended() + sum(_ticks(pid) for pid in _children("self")) / TICKS


def seconds_of_ended() -> float:
    """Return the CPU seconds of this process and its ended descendants so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _ticks(pid: str) -> int:
    """Return the clock ticks of a process, of children that it has waited for, and of its
    descendants."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) + sum(map(_ticks, _children(pid)))
    except OSError:  # it has ended meanwhile
        return 0


def _children(pid: str) -> list[str]:
    """Return the children of all threads of the process; empty on systems other than Linux."""
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += task.read_text().split()
    return found
