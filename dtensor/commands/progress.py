"""Shows the progress of a command: a line on stderr that disappears at the end.

    with ProgressLine() as progress:
        with progress.doing("captures the step of gpt2"): ...
        for name in progress.each("plans", names): ...

If stderr is not a terminal, nothing is written and rich is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class ProgressLine:
    """A progress bar for counted work; a spinner and the elapsed seconds for other work."""

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
    def doing(self, title: str) -> Iterator[None]:
        """Show the title while the block runs."""
        if self._bars is None:
            yield
            return
        task = self._bars.add_task(title, total=None)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def counted(self, title: str) -> Iterator[Callable[[int, int, str], None]]:
        """Show a bar while the block runs. The block gets a function to call with the number of
        completed items, the total number, and a title."""
        if self._bars is None:
            yield lambda done, total, title: None
            return
        task = self._bars.add_task(title, total=None)

        def report(done: int, total: int, title: str) -> None:
            self._bars.update(task, completed=done, total=total, description=title)

        try:
            yield report
        finally:
            self._bars.remove_task(task)

    def each(self, title: str, items: Sequence[T]) -> Iterable[T]:
        """Iterate over the items, with a bar of the completed items."""
        if self._bars is None:
            yield from items
            return
        task = self._bars.add_task(title, total=len(items))
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)
