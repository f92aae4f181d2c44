"""The result of a task of an actor, before it is there.

    y = a.execute(x)          # a TaskFuture: nothing has been waited for
    z = b.execute({"y": y})   # b gets the value, from a's process to b's
    z.get()                   # the value, here; raises what failed first, if anything did

Invariants: a future is a handle; the value stays where it was made until somebody needs it, and is
dropped with the last future of it. `get` may be called again and gives equal values that share no
memory. A time-out does not consume a future. `future[key]` is a future of the item.

A future is no value: its truth, its length, arithmetic on it are errors that say so.
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

_OWN = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep  # all of dtensor
MAX_FRAMES = 5
ITERATED = "it is iterated over"


class FutureOwner(ABC):
    """Who made a future and can say what has become of it."""

    @abstractmethod
    def fetch(self, future: TaskFuture, timeout: float | None) -> Tensor:
        """The message; `TimeoutError` if it is not there in time."""

    @abstractmethod
    def ready(self, future: TaskFuture) -> bool: ...

    def wait_for_some(  # noqa: B027 - where tasks run as they are called, all are there
        self, futures: Sequence[TaskFuture], num: int, end: float | None
    ) -> None:
        """Return when so many of them are there, or the time has come (monotonic, in seconds)."""

    @abstractmethod
    def then(self, future: TaskFuture, name: str, *given: object) -> TaskFuture:
        """A task of daft's own with the value, where that is made."""

    @abstractmethod
    def misuse(self, future: TaskFuture, what: str) -> Exception:
        """The error for using a future as a value."""


class TaskFuture(Future, Placeholder):
    """`value` is the backend's; `actor` the key of the actor that makes it, by task `title`."""

    def __init__(self, owner: FutureOwner, actor: int, title: str, value: Any) -> None:
        self.owner = owner
        self.actor = actor
        self.title = title
        self.value = value

    def get(self, timeout: float | None = None) -> Any:
        """The value; `TimeoutError` after `timeout` seconds. Raises a failure's root cause."""
        message = self.owner.fetch(self, timeout)
        error = failure_of(message)
        if error is not None:
            if error.failure.text and f"{error.failure.actor}.{error.failure.text}" != self.title:
                error.add_note(f"{self.title} was not run, as it depends on this.")
            raise error
        try:
            return decode(message)
        except BaseException as raised:  # by a class of the user's, which is unpickled here
            if interrupts(raised):
                raise
            actor, _, name = self.title.rpartition(".")
            reason = f"its result does not unpickle here: {reason_of(raised)}"
            failure = Failure(
                rank=None, actor=actor, text=name, reason=reason, raised=RemoteException(raised)
            )
            raise TaskError(failure) from raised

    def done(self) -> bool:
        """Whether `get` would not wait."""
        return self.owner.ready(self)

    def __getitem__(self, key: object) -> TaskFuture:
        return self.owner.then(self, "item", key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to the controller: it does not pickle.")

    # Python would give each future the truth True, and iterate over [0], [1], ... for ever.
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
        for arg in (*args, *(kwargs or {}).values()):
            if isinstance(arg, TaskFuture):
                raise arg.owner.misuse(arg, "the controller computes with it")
        raise ProgramError("The controller computes with a list of futures.")


def wait(
    futures: Sequence[TaskFuture], num: int = 1, timeout: float | None = None
) -> tuple[list[TaskFuture], list[TaskFuture]]:
    """The first `num` of these futures to be there, and the others, both in the order given: fewer
    than `num` after `timeout` seconds. One that has failed is there.

    TypeError for what is no future; ValueError for one that is given twice, and for a `num` that is
    not within 1 and their number.
    """
    given = list(futures)
    for each in given:
        if not isinstance(each, TaskFuture):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"wait takes futures of tasks, got {each!r}.\n  at {user_line()}\n"
                f"  Fix: wait(list(group_future)) for those of a group."
            )
    if len({id(each) for each in given}) < len(given):
        raise ValueError(f"A future is given twice to wait.\n  at {user_line()}")
    if type(num) is not int or not 1 <= num <= len(given):
        raise ValueError(
            f"num={num!r} of {len(given)} futures to wait for.\n  at {user_line()}\n"
            f"  Fix: a number from 1 to how many are given."
        )
    owners = list(dict.fromkeys(each.owner for each in given))
    if len(owners) > 1:
        raise ValueError(f"These futures are of several launches.\n  at {user_line()}")
    end = None if timeout is None else time.monotonic() + timeout
    owners[0].wait_for_some(given, num, end)
    done = [each for each in given if each.done()][:num]
    chosen = set(map(id, done))
    return done, [each for each in given if id(each) not in chosen]


def user_frames() -> tuple[str, ...]:
    """Where the user called from: "file:line in function: code", innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            lines.append(_line(file, frame.f_lineno, frame.f_code.co_name, os.getcwd()))
        frame = frame.f_back
    return tuple(lines)


@lru_cache(maxsize=4096)
def _line(file: str, number: int, function: str, folder: str) -> str:
    code = linecache.getline(file, number).strip()
    return f"{_short(file)}:{number} in {function}" + (f": {code}" if code else "")


def user_line() -> str:
    return next(iter(user_frames()), "an unknown line")


def _short(file: str) -> str:
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative
