"""What a method gives that yields: its values one by one, as futures.

    for batch in loader.batches(3):        # a TaskStream; each batch is a TaskFuture
        trainer.step(batch)                # the batch goes from the loader to the trainer

Invariants: the method goes on when the next value is asked for, and no further, as one task among
the others of its actor. To ask for the next value waits until it is there, or until the method has
ended. What that raises is raised there. To interrupt that wait loses no value. A stream that nobody
has any more is closed with the next task of its launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from dtensor.daft.tasks.futures import TaskFuture


class TaskStream(Iterator[TaskFuture]):
    """``opened``: a future of the stream's number, at its actor."""

    def __init__(self, opened: TaskFuture, abandoned: deque[TaskFuture]) -> None:
        self._ended = False
        self._opened = opened
        self._abandoned = abandoned
        self._advancing: TaskFuture | None = None

    def __next__(self) -> TaskFuture:
        if self._ended or not self._advanced():
            self._ended = True
            raise StopIteration
        item = self._opened.owner.then(self._opened, "taken")
        self._advancing = None
        return item

    def _advanced(self) -> bool:
        try:
            if self._advancing is None:
                self._advancing = self._opened.owner.then(self._opened, "advance")
            return self._advancing.get()
        except Exception:  # an interrupt leaves it to be asked for again
            self._ended = True
            raise

    def close(self) -> None:
        """The method ends where it stands, as `close` of a generator has it. Twice is fine."""
        if not self._ended:
            self._ended = True
            self._opened.owner.then(self._opened, "closed").get()

    def __del__(self) -> None:
        if not self._ended:
            self._abandoned.append(self._opened)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to the controller: it is no value.\n"
            f"  Fix: pass its items, which are futures, one by one or as a list."
        )

    def __repr__(self) -> str:
        return f"<stream of {self._opened.title}>"
