"""What is said while ranks start."""

from __future__ import annotations

import io
import threading

import pytest

from dtensor.daft.ray.bootstrap import starting_line
from dtensor.daft.ray.bootstrap.starting_line import said_while_it_starts


class Stream(io.StringIO):
    """`awaited` is set once that text has been written."""

    def __init__(self, terminal: bool, awaited: str = "") -> None:
        super().__init__()
        self.terminal = terminal
        self.awaited = awaited
        self.came = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        number = super().write(text)
        if self.awaited and self.awaited in self.getvalue():
            self.came.set()
        return number


def test_it_counts_and_then_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True, awaited="starting 4 ranks: 3 ready")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "AFTER_S", 0.0)
    counts = iter([0, 2])
    with said_while_it_starts(4, lambda: next(counts, 3)):
        assert stream.came.wait(600.0)
    lines = [line.removeprefix("\x1b[K") for line in stream.getvalue().split("\r")]
    assert [line for line in dict.fromkeys(lines) if line] == [
        "starting 4 ranks: 0 ready",
        "starting 4 ranks: 2 ready",
        "starting 4 ranks: 3 ready",
    ]
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_log_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False, awaited="3 ready\n")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "LOG_AFTER_S", 0.001)
    monkeypatch.setattr(starting_line, "LOG_EACH_S", 0.001)
    counts = iter([2])
    with said_while_it_starts(4, lambda: next(counts, 3)):
        assert stream.came.wait(600.0)
    first, second, *_ = stream.getvalue().splitlines()
    assert first == "dtensor: starting 4 ranks: 2 ready"
    assert second == "dtensor: starting 4 ranks: 3 ready"
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_it_does_not_come_where_that_is_soon(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "AFTER_S", 1e6)
    monkeypatch.setattr(starting_line, "LOG_AFTER_S", 1e6)
    monkeypatch.setattr(starting_line, "LOG_EACH_S", 1e6)
    with said_while_it_starts(1, lambda: 0):
        pass
    assert stream.getvalue() == ""
