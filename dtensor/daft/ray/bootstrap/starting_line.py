"""One line on a terminal while ranks start: "starting 4 ranks: 2 ready"; it is gone when they have.

    with said_while_it_starts(4, lambda: 2):
        ...                                  # waits

It comes after `AFTER_S`, and where the standard error is no terminal not at all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

AFTER_S = 0.5
_EACH_S = 0.1
_CLEAR = "\r\x1b[K"


@contextmanager
def said_while_it_starts(size: int, num_ready: Callable[[], int]) -> Generator[None]:
    stream = sys.stderr
    if stream is None or not stream.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        yield
        return
    ended = threading.Event()

    def say() -> None:
        if ended.wait(AFTER_S):
            return
        plural = "" if size == 1 else "s"
        while True:
            stream.write(f"{_CLEAR}starting {size} rank{plural}: {num_ready()} ready")
            stream.flush()
            if ended.wait(_EACH_S):
                break
        stream.write(_CLEAR)
        stream.flush()

    thread = threading.Thread(target=say, name="starting", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
