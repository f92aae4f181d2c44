"""What a method gives that yields: its values one by one, as futures.

    for batch in loader.batches(3):        # a TaskStream; each batch is a TaskFuture
        trainer.step(batch)                # the batch goes from the loader to the trainer

Invariants: the method goes on when the next value is asked for, and no further, as one task among
the others of its actor. To ask for the next value waits until it is there, or until the method has
ended. What that raises is raised there.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtensor.daft.tasks.futures import TaskFuture


class TaskStream(Iterator[TaskFuture]):
    """``opened``: a future of the stream's number, at its actor."""

    def __init__(self, opened: TaskFuture) -> None:
        self._opened = opened
        self._ended = False

    def __next__(self) -> TaskFuture:
        if self._ended or not self._advanced():
            self._ended = True
            raise StopIteration
        return self._opened.owner.then(self._opened, "taken")

    def _advanced(self) -> bool:
        try:
            return self._opened.owner.then(self._opened, "advance").get()
        except BaseException:
            self._ended = True
            raise

    def close(self) -> None:
        """The method ends where it stands, as `close` of a generator has it. Twice is fine."""
        if not self._ended:
            self._ended = True
            self._opened.owner.then(self._opened, "closed").get()

    def __repr__(self) -> str:
        return f"<stream of {self._opened.title}>"
