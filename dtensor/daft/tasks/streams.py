"""Iterate over the values that a generator method of an actor yields, as futures.

    for batch in loader.batches(3):        # a TaskStream; each batch is a TaskFuture
        trainer.step(batch)                # the batch goes from the loader to the trainer

`next` runs the generator up to its next `yield`, as one task of the actor, and waits for it. It
raises what the generator raises. Interrupting the wait loses no value. A stream that is garbage is
closed together with the next task of its launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NoReturn

from dtensor.daft.tasks.futures import TaskFuture


class TaskStream(Iterator[TaskFuture]):
    """The values of one generator. ``opened``: a future of the stream's number at its actor.
    ``abandoned``: receives ``opened`` if the stream is garbage before it has ended."""

    def __init__(self, opened: TaskFuture, abandoned: deque[TaskFuture]) -> None:
        self._ended = False
        self._opened = opened
        self._abandoned = abandoned
        self._pending_advance: TaskFuture | None = None

    def __next__(self) -> TaskFuture:
        """Return the future of the next value, after the generator has made it."""
        if self._ended or not self._advance():
            self._ended = True
            raise StopIteration
        item = self._opened.owner.then(self._opened, "taken")
        self._pending_advance = None
        return item

    def _advance(self) -> bool:
        """Run the generator to its next `yield`; return whether there is a value."""
        try:
            if self._pending_advance is None:
                self._pending_advance = self._opened.owner.then(self._opened, "advance")
            return self._pending_advance.get()
        except Exception:  # after an interrupt, `_pending_advance` is waited for again
            self._ended = True
            raise

    def close(self) -> None:
        """Close the generator where it is suspended. May be called again."""
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
