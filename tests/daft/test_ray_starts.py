"""Tests starting Ray: waiting for it, retrying, leaving no process of a failed start, and the
progress line while ranks start.
"""

from __future__ import annotations

import io
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dtensor as dt
from dtensor.daft.ray.bootstrap import starting_line
from dtensor.daft.ray.bootstrap.starting_line import show_starting_ranks
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

from dtensor.daft.ray.bootstrap import private_ray, start_ray

Sleeper = subprocess.Popen[bytes]


class Services:
    """Stands in for Ray's module that starts processes: the raylet is known at look number
    `known_at` and exits at look `dies_at`. Each look takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known_at: int, dies_at: int = -1) -> None:
        self.known_at, self.dies_at = known_at, dies_at
        self.looks = 0
        self.started: list[Sleeper] = []
        clock = SimpleNamespace(monotonic=lambda: float(self.looks), sleep=lambda _: None)
        monkeypatch.setattr(private_ray, "time", clock)
        monkeypatch.setattr(private_ray, "_services", self)

    def start_ray_process(self, command: list[str], kind: str, fate_share: bool) -> Any:
        self.started.append(subprocess.Popen(command))
        return SimpleNamespace(process=self.started[-1])

    def get_node(self, address: str, name: str) -> str:
        self.looks += 1
        if self.looks == self.dies_at:
            self.started[-1].kill()
            self.started[-1].wait()
        if self.looks != self.known_at:
            raise RuntimeError("no such node")
        return f"{name} at {address}"

    def init(self, **settings: object) -> str:
        """Start the processes in the order in which Ray starts them."""
        for kind in ("gcs_server", "raylet"):
            self.start_ray_process(["sleep", "1e6"], kind, fate_share=True)
        return self.get_node("here", "a")

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def test_slow_raylet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, known_at=100)
    with private_ray.starting(180.0):
        assert services.init() == "a at here"
    assert [process.poll() for process in services.started] == [None, None]
    services.end()


def test_start_fails_and_kills_processes_after_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, known_at=1000)
    with pytest.raises(RuntimeError, match="no such node"), private_ray.starting(180.0):
        services.init()
    assert services.looks == 181
    assert [process.returncode for process in services.started] == [-9, -9]


def play(monkeypatch: pytest.MonkeyPatch, init: Callable[..., object]) -> None:
    monkeypatch.setattr(start_ray, "_ray", SimpleNamespace(init=init))
    monkeypatch.setattr(start_ray, "directory_of_sockets", Path)


def test_start_is_retried_if_raylet_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, known_at=100, dies_at=5)
    play(monkeypatch, lambda **settings: services.init(**settings))
    start_ray._start()
    assert [process.poll() for process in services.started] == [-9, -9, None, None]
    services.end()


def test_start_fails_after_limited_number_of_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, known_at=-1)

    def dies(**settings: object) -> object:
        services.dies_at = services.looks + 3
        return services.init(**settings)

    play(monkeypatch, dies)
    with pytest.raises(private_ray.RayletEnded, match="has ended while it started, by -9"):
        start_ray._start()
    assert [process.returncode for process in services.started] == [-9] * 2 * start_ray.STARTS


def test_end_ray_waits_for_processes_it_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.shutdown itself waits only one second for a process that it has killed."""
    process = subprocess.Popen(["sleep", "1e6"])
    monkeypatch.setattr(private_ray, "own_processes", lambda: [process])
    monkeypatch.setattr(start_ray, "_ray", SimpleNamespace(shutdown=process.kill))
    monkeypatch.setattr(start_ray, "_read_token", lambda: None)
    start_ray.end_ray()
    assert process.returncode == -9


def test_launch_with_unreachable_address_raises_connection_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    message = rf"(?s)No Ray answers at '{address}': .*refused.*Fix: .*leave out address="
    with (
        pytest.raises(ConnectionError, match=message),
        dt.launch(dt.Mesh(tp=2), backend="ray", address=address, deadline_s=0.5),
    ):
        pass


@pytest.mark.ray
@pytest.mark.slow
def test_own_processes_lists_processes_of_real_ray(ray_session: None) -> None:
    processes = private_ray.own_processes()
    assert len(processes) == 2 and all(process.poll() is None for process in processes)


# -- what is said while ranks start ----------------------------------------------------------------


class Stream(io.StringIO):
    """A stream that sets `came` once the text `awaited` has been written."""

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


def test_progress_line_on_terminal_counts_ready_ranks_and_is_erased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(terminal=True, awaited="starting 4 ranks: 3 ready")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "AFTER_S", 0.0)
    counts = iter([0, 2])
    with show_starting_ranks(4, lambda: next(counts, 3)):
        assert stream.came.wait(600.0)
    lines = [line.removeprefix("\x1b[K") for line in stream.getvalue().split("\r")]
    assert [line for line in dict.fromkeys(lines) if line] == [
        "starting 4 ranks: 0 ready",
        "starting 4 ranks: 2 ready",
        "starting 4 ranks: 3 ready",
    ]
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_in_log_file_is_written_as_full_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False, awaited="3 ready\n")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "LOG_AFTER_S", 0.001)
    monkeypatch.setattr(starting_line, "LOG_EACH_S", 0.001)
    counts = iter([2])
    with show_starting_ranks(4, lambda: next(counts, 3)):
        assert stream.came.wait(600.0)
    first, second, *_ = stream.getvalue().splitlines()
    assert first == "dtensor: starting 4 ranks: 2 ready"
    assert second == "dtensor: starting 4 ranks: 3 ready"
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_line_is_not_shown_for_quick_start(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(starting_line, "AFTER_S", 1e6)
    monkeypatch.setattr(starting_line, "LOG_AFTER_S", 1e6)
    monkeypatch.setattr(starting_line, "LOG_EACH_S", 1e6)
    with show_starting_ranks(1, lambda: 0):
        pass
    assert stream.getvalue() == ""
