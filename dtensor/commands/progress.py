"""What a command is at, on a terminal: a line on stderr that goes when it is done.

    with ProgressLine() as progress:
        with progress.doing("captures the step of gpt2"): ...
        for name in progress.each("plans", names): ...

Invariant: nothing is written, and rich is not loaded, where stderr is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class ProgressLine:
    """A bar for what is counted, a spinner and the seconds for what is not."""

    def __init__(self) -> None:
        self._bars: Any = None

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
            self._bars = Bars(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While the block runs."""
        if self._bars is None:
            yield
            return
        task = self._bars.add_task(what, total=None)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def counted(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        """Gives what is told (how many are done, of how many, what)."""
        if self._bars is None:
            yield lambda done, total, words: None
            return
        task = self._bars.add_task(what, total=None)

        def told(done: int, total: int, words: str) -> None:
            self._bars.update(task, completed=done, total=total, description=words)

        try:
            yield told
        finally:
            self._bars.remove_task(task)

    def each(self, what: str, items: Sequence[T], total: int | None = None) -> Iterable[T]:
        """The items, one after the other, with a bar of how many are done."""
        if self._bars is None:
            yield from items
            return
        task = self._bars.add_task(what, total=len(items) if total is None else total)
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)
