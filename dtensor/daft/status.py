"""What is said of a launch: a record of each rank, the one that others wait for, and their table.

    print(status)

    Launch of process 4242: 4 ranks on ray; run 17 of 'step' for 12.4 s (usually 0.31 s)
    rank  does               since  cpu  instruction          at
    0     waits for rank 2  12.1 s   0%  31 wait g            net.py:8
    2     is stopped        12.3 s   0%  29 y = call f(x)     net.py:8: y = self.up(x)
    ...
    Rank 2 is stopped; ranks 0, 1 and 3 wait for it.

Invariants: frozen values, with their units; a table cuts what is long, the records have all of it.
How it is found out is not here (`diagnosis.py`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

HEAD = ("rank", "machine", "does", "since", "cpu", "instruction", "at")
WIDEST = (40, 40, 34, 9, 5, 44, 60)
"""Of each column, in characters."""

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
    """One rank. `does` is for programs, `text` says it; `peers` are the ranks that it waits for.
    `machine`: where it is, if the launch is on several.

    `index` counts the instructions of the rank's own list, `instruction` is its text; all of these
    are None or empty between runs. `since_s`: it stands there; `cpu`: of a core, its thread while
    it was looked at; `running_s`: since its run began, `usual_s` what earlier ones took.
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
    """`waited_for`: the rank that others wait for, or the controller alone; None where no run is
    under way, and where it is on another machine, which is not seen from here. `chain`: of ranks,
    each waits for the next; it ends there. `link`: the ranks (from, to) of a message that is held
    back. `hangs`: whether that takes too long. `reason` says all of it. `controller`: what the main
    thread of the process does that has launched the ranks."""

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
        most: dict[str, int] = dict(zip(HEAD, WIDEST, strict=True))
        cut = [[_cut(cell, most[name]) for cell, name in zip(row, rows[0])] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cut)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in ("since", "cpu") else cell.ljust(width)
                for cell, width, name in zip(row, widths, rows[0])
            ).rstrip()
            for row in cut
        ]
        return "\n".join([self._head(), *lines, *self._foot()])

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            made = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{made}</tr>"

        head_row, *others = self._rows()
        rows = [row(head_row, "th"), *(row(each, "td") for each in others)]
        head, *foot = (f"<p>{html.escape(text)}</p>" for text in (self._head(), *self._foot()))
        return "".join([head, "<table>", *rows, "</table>", *foot])

    def _rows(self) -> list[tuple[str, ...]]:
        """Of the table, the names first; without machines, where there is but one."""
        rows = [HEAD, *map(_row, self.ranks)]
        if not any(each.machine for each in self.ranks):
            rows = [(row[0], *row[2:]) for row in rows]
        return rows

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def _head(self) -> str:
        """What is under way, and for how long."""
        running = [each for each in self.ranks if each.running_s is not None]
        if not running:
            return self.title
        oldest = max(running, key=lambda each: each.running_s or 0.0)
        usual = "its first" if oldest.usual_s is None else f"usually {_seconds(oldest.usual_s)}"
        took = _seconds(oldest.running_s or 0.0)
        what = f" of {oldest.program!r}" if oldest.program else ""
        return f"{self.title}; run {oldest.run}{what} for {took} ({usual})"

    def _foot(self) -> list[str]:
        lines = [self.reason]
        if len(self.chain) > 2:
            first, *rest = (f"rank {rank}" for rank in self.chain)
            lines.append(f"{first.capitalize()} waits for {', which waits for '.join(rest)}.")
        return lines

    @property
    def warning(self) -> str:
        """That it takes too long."""
        return (
            f"{self.reason} This takes too long.\n{self}\nTo look again: dt.status() in another "
            f"thread, or `python -m dtensor status {self.pid}` in a terminal."
        )


def _seconds(number: float) -> str:
    """`4.6 ms`, `0.31 s`, `12.4 s`."""
    if number < 0.1:
        return f"{1000 * number:.1f} ms"
    return f"{number:.2f} s" if number < 1.0 else f"{number:.1f} s"


def _row(each: RankStatus) -> tuple[str, ...]:
    instruction = ""
    if each.instruction:
        instruction = f"{each.index} {each.instruction}"
        instruction += f" [{each.label}]" if each.label else ""
    return (
        f"{each.rank}" + (f", {each.known_as}" if each.known_as else ""),
        each.machine,
        each.text,
        "" if each.since_s is None else _seconds(each.since_s),
        "" if each.cpu is None else f"{100 * each.cpu:.0f}%",
        instruction,
        each.line or "",
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 4].rstrip() + " ..."
