"""Tests the profiler of one thread: it has cProfile's entries, without those of other threads."""

from __future__ import annotations

import cProfile
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from dtensor.frontend.guards.thread_profile import ThreadProfile

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="for Python 3.12 and later")


class Longer(list[int]):
    def append(self, x: int) -> None:
        super().append(x)


def numbers(n: int) -> Any:
    for i in range(n):
        yield abs(i)


def program() -> None:
    time.time()
    found: list[int] = []
    found.append(len(found))
    list.append(found, 2)
    bound = found.append
    bound(3)
    Longer().append(1)
    dict.fromkeys(found)
    "".join(())
    for _ in numbers(3):
        isinstance(found, list)


def within(profile: Any, function: Callable[[], Any]) -> dict[CodeType | str, set[CodeType | str]]:
    """Return the profile entries of `function`, with the calls of each."""
    profile.enable(subcalls=True, builtins=True)
    function()
    profile.disable()
    entries = profile.getstats()
    return {e.code: {call.code for call in e.calls or ()} for e in entries}


def test_thread_profile_entries_equal_cprofile() -> None:
    own, other = within(ThreadProfile(), program), within(cProfile.Profile(), program)
    assert own[program.__code__] == other[program.__code__]
    assert own[Longer.append.__code__] == other[Longer.append.__code__]
    assert {name for name in other if isinstance(name, str) and "disable" not in name} <= set(own)


def test_thread_profile_ignores_other_threads() -> None:
    go, done = threading.Event(), threading.Event()

    def beside() -> None:
        go.wait()
        program()
        done.set()

    def meet() -> None:
        go.set()
        done.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    found = within(ThreadProfile(), meet)
    thread.join()
    assert meet.__code__ in found and program.__code__ not in found
    assert "<built-in method time.time>" not in found


def test_thread_profile_knows_caller_after_disable_and_enable() -> None:
    profile = ThreadProfile()

    def paused() -> None:
        profile.disable()
        profile.enable()
        time.time()

    assert "<built-in method time.time>" in within(profile, paused)[paused.__code__]


def test_thread_profile_raises_if_another_profiler_is_active() -> None:
    outer = cProfile.Profile()
    outer.enable()
    try:
        with pytest.raises(ValueError):
            ThreadProfile().enable()
    finally:
        outer.disable()
