"""Code that runs in actors which tests hold, stop or kill. It is in its own module so that an actor
loads little.

`stay(begun)` writes the process id to the file `begun` in the middle of a step, and waits there
until the process is killed. `wait_for_file(path)` holds an actor until the file exists. With these,
no test depends on how long something takes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor


class Layer:
    """An actor class for daft."""

    def __init__(self, scale: float = 2.0) -> None:
        if scale < 0:
            raise ValueError("no such scale")
        self.scale = scale

    def times(self, x: Tensor) -> Tensor:
        return x * self.scale

    def fail(self, x: object) -> Tensor:
        raise ZeroDivisionError("on purpose")

    def block(self, begun: str) -> None:
        stay(begun)


class Pressed(KeyboardInterrupt):
    """A KeyboardInterrupt raised by a test, distinct from a real one."""


def stay(begun: str) -> None:
    part = Path(f"{begun}.part")
    part.write_text(str(os.getpid()))
    part.rename(begun)
    while True:
        time.sleep(1.0)  # it is hardly ever seen awake


def wait_for_file(path: str, patience_s: float = 600.0) -> None:
    end = time.monotonic() + patience_s
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(f"no file {path} after {patience_s} s")
        time.sleep(0.01)


def go_on(begun: str) -> None:
    pass


def interrupt(begun: str) -> None:
    signal.raise_signal(signal.SIGINT)
