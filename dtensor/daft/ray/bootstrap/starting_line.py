"""Prints to standard error that ranks are starting: "starting 4 ranks: 2 ready".

    with show_starting_ranks(4, lambda: 2):
        ...                                  # waits for the ranks

On a terminal it is one line, which appears after `AFTER_S`, is updated, and disappears at the end.
In a log or notebook it is a line after `LOG_AFTER_S`, and then another every `LOG_EACH_S`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

AFTER_S = 0.5
LOG_AFTER_S = 10.0
LOG_EACH_S = 60.0
_EACH_S = 0.1
_CLEAR = "\r\x1b[K"


@contextmanager
def show_starting_ranks(size: int, num_ready: Callable[[], int]) -> Generator[None]:
    """Within the block, print that `size` ranks are starting, and how many are ready."""
    stream = sys.stderr
    if stream is None:  # pyright: ignore[reportUnnecessaryComparison]
        yield
        return
    ended = threading.Event()

    def say(prefix: str, suffix: str) -> None:
        plural = "" if size == 1 else "s"
        stream.write(f"{prefix}starting {size} rank{plural}: {num_ready()} ready{suffix}")
        stream.flush()

    def say_on_a_terminal() -> None:
        """Rewrite one line of the terminal until the block ends, and then erase it."""
        if ended.wait(AFTER_S):
            return
        while True:
            say(_CLEAR, "")
            if ended.wait(_EACH_S):
                break
        stream.write(_CLEAR)
        stream.flush()

    def say_in_a_log() -> None:
        """Print a line now and then until the block ends."""
        wait = LOG_AFTER_S
        while not ended.wait(wait):
            say("dtensor: ", "\n")
            wait = LOG_EACH_S

    target = say_on_a_terminal if stream.isatty() else say_in_a_log
    thread = threading.Thread(target=target, name="starting", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
