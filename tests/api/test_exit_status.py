"""The exit status is found by forking a copy of the process; test_saves.py checks that this gives
the right status."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from dtensor.api.checkpoint import exit_status
from dtensor.api.checkpoint.exit_status import _status_of  # pyright: ignore[reportPrivateUsage]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def child(ends: Callable[[], object]) -> int:
    process = os.fork()
    if process == 0:
        try:
            ends()
        finally:
            os._exit(99)
    return process


def die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()


def test_status_of_forked_copy_is_its_exit_code_or_signal() -> None:
    assert _status_of(child(lambda: os._exit(3))) == 3
    assert _status_of(child(lambda: os._exit(0))) == 0
    assert _status_of(child(lambda: die_of(signal.SIGINT))) == -signal.SIGINT


def test_copy_that_crashes_hangs_or_was_reaped_counts_as_status_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _status_of(child(lambda: die_of(signal.SIGABRT))) == 0  # a crash of it alone
    reaped = child(lambda: os._exit(3))
    os.waitpid(reaped, 0)  # as a program does that takes the status of all its children
    assert _status_of(reaped) == 0
    monkeypatch.setattr(exit_status, "_COPY_S", 0.0)
    assert _status_of(child(signal.pause)) == 0  # it hangs, and is killed
