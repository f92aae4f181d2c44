"""Describe what the ranks of a launch are doing, and print it as a table.

    print(status)

    Launch of process 4242: 4 ranks on ray; run 17 of 'step' for 12.4 s (usually 0.31 s)
    rank  does               since  cpu  instruction          at
    0     waits for rank 2  12.1 s   0%  31 wait g            net.py:8
    2     is stopped        12.3 s   0%  29 y = call f(x)     net.py:8: y = self.up(x)
    ...
    Rank 2 is stopped; ranks 0, 1 and 3 wait for it.

The table cuts long texts; the records have them in full. `diagnosis.py` creates a `Status`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from dtensor.showing import table

COLUMNS = ("rank", "machine", "does", "since", "cpu", "instruction", "at")
MAX_WIDTHS = (40, 40, 34, 9, 5, 44, 60)
"""The maximum width of each column, in characters."""

Doing: TypeAlias = Literal[
    "computes",
    "sleeps",
    "moves on",
    "waits",
    "waits for a message",
    "waits its turn",
    "is stopped",
    "is lost",
    "is between runs",
    "is idle",
    "is starting",
    "is elsewhere",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank is doing.

    `does` is for programs, `text` for people. `machine`: "" if all ranks are on one machine.
    `peers`: the ranks that it waits for. `index`, `instruction`: the current instruction of its
    list; None and "" between runs. `since_s`: how long it has been there. `cpu`: the fraction of a
    core that its thread used. `running_s`: how long its run has taken, `usual_s`: earlier runs.
    """

    rank: int
    known_as: str
    machine: str = ""
    does: Doing
    text: str
    peers: tuple[int, ...]
    program: str
    run: int | None
    index: int | None
    instruction: str
    label: str
    line: str | None
    since_s: float | None
    cpu: float | None
    running_s: float | None
    usual_s: float | None
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What all ranks of a launch are doing, and for which rank they wait.

    `waited_for`: the rank that the others, or the controller, wait for; None if no run is in
    progress or the rank is on a machine that cannot be observed. `chain`: ranks that each wait for
    the next one; the last is `waited_for`. `link`: (from, to) of a message that is held back.
    `hangs`: whether the wait takes too long. `reason`: all this as text. `controller`: what the
    main thread of the launching process does.
    """

    title: str
    pid: int
    ranks: tuple[RankStatus, ...]
    waited_for: int | None
    chain: tuple[int, ...]
    link: tuple[int, int] | None
    hangs: bool
    reason: str
    controller: str

    def __str__(self) -> str:
        rows = self._rows()
        max_widths: dict[str, int] = dict(zip(COLUMNS, MAX_WIDTHS, strict=True))
        cells = [
            [_truncate(cell, max_widths[name]) for cell, name in zip(row, rows[0])] for row in rows
        ]
        sides = "".join(">" if name in ("since", "cpu") else "<" for name in rows[0])
        lines = table(cells, sides)
        return "\n".join([self._headline(), *lines, *self._bottom()])

    def _repr_html_(self) -> str:
        """Return the status as an HTML table, for notebooks."""

        def row(cells: Sequence[str], tag: str) -> str:
            row_html = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{row_html}</tr>"

        head_row, *others = self._rows()
        rows = [row(head_row, "th"), *(row(status, "td") for status in others)]
        head, *foot = (
            f"<p>{html.escape(text)}</p>" for text in (self._headline(), *self._bottom())
        )
        return "".join([head, "<table>", *rows, "</table>", *foot])

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table with the names of the columns first; without the column of
        machines if there is only one."""
        rows = [COLUMNS, *map(_row, self.ranks)]
        if not any(status.machine for status in self.ranks):
            rows = [(row[0], *row[2:]) for row in rows]
        return rows

    def data(self) -> dict[str, Any]:
        """Return the status as a dict for JSON."""
        return asdict(self)

    def _headline(self) -> str:
        """Return the title, with the oldest run in progress and its duration."""
        running = [status for status in self.ranks if status.running_s is not None]
        if not running:
            return self.title
        oldest = max(running, key=lambda status: status.running_s or 0.0)
        usual = "its first" if oldest.usual_s is None else f"usually {_seconds(oldest.usual_s)}"
        took = _seconds(oldest.running_s or 0.0)
        name = f" of {oldest.program!r}" if oldest.program else ""
        return f"{self.title}; run {oldest.run}{name} for {took} ({usual})"

    def _bottom(self) -> list[str]:
        """Return the lines below the table: the reason, and the chain of waits if it is long."""
        lines = [self.reason]
        if len(self.chain) > 2:
            first, *others = (f"rank {rank}" for rank in self.chain)
            lines.append(f"{first.capitalize()} waits for {', which waits for '.join(others)}.")
        return lines

    @property
    def warning(self) -> str:
        """The text of the warning that a wait takes too long."""
        return (
            f"{self.reason} This takes too long.\n{self}\nTo look again: dt.status() in another "
            f"thread, or `python -m dtensor status {self.pid}` in a terminal."
        )


def _seconds(number: float) -> str:
    """Return a duration as text: `4.6 ms`, `0.31 s`, `12.4 s`."""
    if number < 0.1:
        return f"{1000 * number:.1f} ms"
    return f"{number:.2f} s" if number < 1.0 else f"{number:.1f} s"


def _row(status: RankStatus) -> tuple[str, ...]:
    """Return the cells of a rank's row, in the order of COLUMNS."""
    instruction = ""
    if status.instruction:
        instruction = f"{status.index} {status.instruction}"
        instruction += f" [{status.label}]" if status.label else ""
    return (
        f"{status.rank}" + (f", {status.known_as}" if status.known_as else ""),
        status.machine,
        status.text,
        "" if status.since_s is None else _seconds(status.since_s),
        "" if status.cpu is None else f"{100 * status.cpu:.0f}%",
        instruction,
        status.line or "",
    )


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."
