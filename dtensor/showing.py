"""What a value shows of itself: at most a screen of text, and a table or text for notebooks.

    screen(text)                      # its first 24 lines and how many more there are
    html_text("a < b")                # "<pre>a &lt; b</pre>"
    html_table([("sent", [("tp", "2.0 MiB"), ("dp", "1.0 MiB")])])
    html_grid("mesh(dp=2, tp=2)", {"dp": 2, "tp": 2})     # a row for each dp, numbered cells
    html_folded("a\n  b\n\nc\n  d")                       # a, and c, which open at a click

Invariants: a screen is 25 lines of 100 columns; all text is escaped, and there is no script, style
sheet or id, which would hold in the whole notebook.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

LINES, WIDTH = 25, 100
FOLDED = 200
"""Lines of a part that is folded, at most."""
_LEFT = ' style="text-align: left"'


def screen(text: str) -> str:
    """The text, or as much of it as fits and how much more there is."""
    lines = text.splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1:,} more lines"]
    return "\n".join(one if len(one) <= WIDTH else one[: WIDTH - 4] + " ..." for one in lines)


def html_text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def html_table(parts: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Parts of a title and rows of cells, one below the other; a short row's last cell is wide."""
    given = [(title, rows) for title, rows in parts if rows]
    most = max((len(row) for _, rows in given for row in rows), default=1)
    lines: list[str] = []
    for title, rows in given:
        head = f'<th rowspan="{len(rows)}"{_LEFT}>{html.escape(title)}</th>'
        for row in rows:
            wide = f' colspan="{most - len(row) + 1}"' if len(row) < most else ""
            cells = [f"<td{_LEFT}>{html.escape(cell)}</td>" for cell in row[:-1]]
            cells.append(f"<td{wide}{_LEFT}>{html.escape(row[-1])}</td>")
            lines.append(f"<tr>{head}{''.join(cells)}</tr>")
            head = ""
    return f"<table>{''.join(lines)}</table>"


def html_grid(title: str, axes: Mapping[str, int]) -> str:
    """Cells numbered row-major over named axes: the last across, the others down; the first 16."""
    *down, (across, number) = tuple(axes.items()) or (("", 1),)
    shown = range(min(number, 16))
    more = ("...",) if number > 16 else ()
    parts = [(title, [(*(f"{across}={i}" if across else "" for i in shown), *more)])]
    rows = itertools.product(*(range(size) for _, size in down))
    for row, place in enumerate(itertools.islice(rows, 16)):
        at = ", ".join(f"{axis}={i}" for (axis, _), i in zip(down, place))
        parts.append((at, [(*(f"rank {row * number + i}" for i in shown), *more)]))
    if math.prod(size for _, size in down) > 16:
        parts.append(("...", [("...",)]))
    return html_table(parts)


def html_folded(text: str) -> str:
    """Parts between empty lines, each folded under its first words; long ones are cut."""
    parts: list[str] = []
    for part in text.split("\n\n"):
        lines = part.strip("\n").splitlines()
        if not lines:
            continue
        head = html.escape(lines[0].split("   ")[0])
        if len(lines) > FOLDED:
            lines = [*lines[:FOLDED], f"... and {len(lines) - FOLDED:,} more lines"]
        body = html_text("\n".join(lines))
        parts.append(f"<details><summary>{head}, {len(lines)} lines</summary>{body}</details>")
    return "".join(parts)
