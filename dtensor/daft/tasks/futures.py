"""Futures of the results of an actor's tasks.

    y = a.execute(x)          # a TaskFuture; returns at once
    z = b.execute({"y": y})   # the value goes from a's process to b's process
    z.get()                   # waits; returns the value, or raises the root cause of a failure

The value stays in the process that computed it until it is needed, and is dropped with its last
future. `get` may be called again, also after a timeout, and returns a new copy. `future[key]` is a
future of the item. Using a future as a value (its truth, length, arithmetic) raises.
"""

from __future__ import annotations

import linecache
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor

from dtensor.daft.cluster.cluster import Future
from dtensor.daft.errors import Failure, ProgramError, TaskError
from dtensor.daft.remote_exceptions import RemoteException, interrupts, reason_of
from dtensor.daft.tasks.values import Placeholder, decode, failure_of

_PACKAGE_FOLDER = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep  # all of dtensor
MAX_FRAMES = 5
ITERATED = "it is iterated over"


class FutureOwner(ABC):
    """The session or recording that created a future."""

    @abstractmethod
    def fetch(self, future: TaskFuture, timeout: float | None) -> Tensor:
        """Wait for the message of the future. Raises TimeoutError after `timeout` seconds."""

    @abstractmethod
    def ready(self, future: TaskFuture) -> bool: ...

    def wait_for_some(  # noqa: B027 - nothing to do if tasks run when they are called
        self, futures: Sequence[TaskFuture], num: int, end: float | None
    ) -> None:
        """Wait until `num` of the futures are ready, or until the time `end` (monotonic clock)."""

    @abstractmethod
    def then(self, future: TaskFuture, name: str, *args: object) -> TaskFuture:
        """Run one of `OPERATIONS` on the value, in the process that computes it."""

    @abstractmethod
    def misuse(self, future: TaskFuture, what: str) -> Exception:
        """Return the error for using a future as a value."""


class TaskFuture(Future, Placeholder):
    """The future of a task. `actor`: the actor's key. `title`: the task. `value`: the backend's
    reference to the result."""

    def __init__(self, owner: FutureOwner, actor: int, title: str, value: Any) -> None:
        self.owner = owner
        self.actor = actor
        self.title = title
        self.value = value

    def get(self, timeout: float | None = None) -> Any:
        """Wait and return the value. Raises TimeoutError after `timeout` seconds, or the root cause
        of a failure."""
        message = self.owner.fetch(self, timeout)
        error = failure_of(message)
        if error is not None:
            if error.failure.text and f"{error.failure.actor}.{error.failure.text}" != self.title:
                error.add_note(f"{self.title} was not run, as it depends on this.")
            raise error
        try:
            return decode(message)
        except BaseException as raised:  # unpickling runs code of the user's classes
            if interrupts(raised):
                raise
            actor, _, name = self.title.rpartition(".")
            reason = f"its result does not unpickle here: {reason_of(raised)}"
            failure = Failure(
                rank=None, actor=actor, text=name, reason=reason, raised=RemoteException(raised)
            )
            raise TaskError(failure) from raised

    def done(self) -> bool:
        """Return whether `get` would not wait."""
        return self.owner.ready(self)

    def __getitem__(self, key: object) -> TaskFuture:
        return self.owner.then(self, "item", key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the controller: it does not pickle.")

    # By default Python would take each future as True, and iterate over [0], [1], ... forever.
    def __bool__(self) -> NoReturn:
        raise self.owner.misuse(self, "its truth is read")

    def __iter__(self) -> Iterator[NoReturn]:
        raise self.owner.misuse(self, ITERATED)

    def __len__(self) -> NoReturn:
        raise self.owner.misuse(self, "its length is read")

    def __float__(self) -> NoReturn:
        raise self.owner.misuse(self, "it is made a number")

    __int__ = __index__ = __float__

    def __lt__(self, other: object) -> NoReturn:
        raise self.owner.misuse(self, "it is compared")

    __gt__ = __le__ = __ge__ = __lt__

    def __add__(self, other: object) -> NoReturn:
        raise self.owner.misuse(self, "the controller computes with it")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
    __matmul__ = __rmatmul__ = __pow__ = __add__

    def __neg__(self) -> NoReturn:
        raise self.owner.misuse(self, "the controller computes with it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python and libraries probe for
            raise AttributeError(name)
        raise self.owner.misuse(self, f"its attribute {name!r} is read")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise the error for a torch function that is called with a future."""
        for arg in (*args, *(kwargs or {}).values()):
            if isinstance(arg, TaskFuture):
                raise arg.owner.misuse(arg, "the controller computes with it")
        raise ProgramError("The controller computes with a list of futures.")


def wait(
    futures: Sequence[TaskFuture], num: int = 1, timeout: float | None = None
) -> tuple[list[TaskFuture], list[TaskFuture]]:
    """Wait until `num` of the futures are ready. Return (ready ones, others), in the given order.

    A failed future is ready. After `timeout` seconds fewer than `num` may be returned as ready.
    Raises TypeError if an item is not a future, ValueError if a future occurs twice or `num` is not
    in 1..len(futures).
    """
    tasks = list(futures)
    for future in tasks:
        if not isinstance(future, TaskFuture):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"wait takes futures of tasks, got {future!r}.\n  at {user_line()}\n"
                f"  Fix: wait(list(group_future)) for those of a group."
            )
    if len({id(each) for each in tasks}) < len(tasks):
        raise ValueError(f"A future is given twice to wait.\n  at {user_line()}")
    if type(num) is not int or not 1 <= num <= len(tasks):
        raise ValueError(
            f"num={num!r} of {len(tasks)} futures to wait for.\n  at {user_line()}\n"
            f"  Fix: a number from 1 to how many are given."
        )
    owners = list(dict.fromkeys(each.owner for each in tasks))
    if len(owners) > 1:
        raise ValueError(f"These futures are of several launches.\n  at {user_line()}")
    end = None if timeout is None else time.monotonic() + timeout
    owners[0].wait_for_some(tasks, num, end)
    done = [each for each in tasks if each.done()][:num]
    done_ids = set(map(id, done))
    return done, [each for each in tasks if id(each) not in done_ids]


def user_frames() -> tuple[str, ...]:
    """Return the user's frames on the stack: "file:line in function: code", innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE_FOLDER):
            lines.append(_line(file, frame.f_lineno, frame.f_code.co_name, os.getcwd()))
        frame = frame.f_back
    return tuple(lines)


@lru_cache(maxsize=4096)
def _line(file: str, number: int, function: str, folder: str) -> str:
    code = linecache.getline(file, number).strip()
    return f"{_relative_path(file)}:{number} in {function}" + (f": {code}" if code else "")


def user_line() -> str:
    return next(iter(user_frames()), "an unknown line")


def _relative_path(file: str) -> str:
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative
