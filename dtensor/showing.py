"""Text of at most a screen, and HTML for notebooks.

    screen(text)                      # its first 24 lines and how many more there are
    table([("op", "bytes"), ("mm", "16")])                # lines with aligned columns
    html_text("a < b")                # "<pre>a &lt; b</pre>"
    html_table([("sent", [("tp", "2.0 MiB"), ("dp", "1.0 MiB")])])
    html_grid("mesh(dp=2, tp=2)", {"dp": 2, "tp": 2})     # a row for each dp, numbered cells

A screen has 25 lines of 100 columns. All text is escaped. There is no script, style sheet or id,
because it would affect the whole notebook.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

LINES, WIDTH = 25, 100
MAX_FOLDED_LINES = 200
_LEFT = ' style="text-align: left"'


def screen(text: str) -> str:
    """Return the text; if it does not fit on a screen, the first lines and the number of others."""
    lines = text.splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1:,} more lines"]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..." for line in lines)


def table(
    rows: Sequence[Sequence[str]], sides: str = "<>", *, gap: str = "  ", first_width: int = 0
) -> list[str]:
    """Return the rows as lines with aligned columns.

    ``sides``: "<" (left) or ">" (right) for each column; further columns are aligned as the last.
    ``first_width``: the minimum width of the first column. Rows with fewer cells than the longest
    row set only the width of the first column, so their last cell may be long.
    """
    num = max(map(len, rows), default=0)
    full_rows = [row for row in rows if len(row) == num]
    widths = [max(len(row[i]) for row in full_rows) for i in range(num)]
    if num:
        widths[0] = max(first_width, *(len(row[0]) for row in rows if row))
    sides = sides.ljust(num, sides[-1])
    return [
        gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip()
        for row in rows
    ]


def html_text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def html_table(parts: Iterable[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Return a table of parts, each a title and its rows of cells. The last cell of a short row
    spans the remaining columns."""
    parts = [(title, rows) for title, rows in parts if rows]
    num_columns = max((len(row) for _, rows in parts for row in rows), default=1)
    lines: list[str] = []
    for title, rows in parts:
        head = f'<th rowspan="{len(rows)}"{_LEFT}>{html.escape(title)}</th>'
        for row in rows:
            span = f' colspan="{num_columns - len(row) + 1}"' if len(row) < num_columns else ""
            cells = [f"<td{_LEFT}>{html.escape(cell)}</td>" for cell in row[:-1]]
            cells.append(f"<td{span}{_LEFT}>{html.escape(row[-1])}</td>")
            lines.append(f"<tr>{head}{''.join(cells)}</tr>")
            head = ""
    return f"<table>{''.join(lines)}</table>"


def html_grid(title: str, axes: Mapping[str, int]) -> str:
    """Return a table of the ranks of a mesh: a column for each index of the last axis, a row for
    each combination of the others; at most 16 of both."""
    *row_axes, (column_axis, num_columns) = tuple(axes.items()) or (("", 1),)
    columns = range(min(num_columns, 16))
    more = ("...",) if num_columns > 16 else ()
    head = (f"{column_axis}={i}" if column_axis else "" for i in columns)
    parts = [(title, [(*head, *more)])]
    rows = itertools.product(*(range(size) for _, size in row_axes))
    for row, indices in enumerate(itertools.islice(rows, 16)):
        row_title = ", ".join(f"{axis}={i}" for (axis, _), i in zip(row_axes, indices))
        parts.append((row_title, [(*(f"rank {row * num_columns + i}" for i in columns), *more)]))
    if math.prod(size for _, size in row_axes) > 16:
        parts.append(("...", [("...",)]))
    return html_table(parts)


def html_folded(text: str) -> str:
    """Return the paragraphs of a text, each folded under its first words and cut to
    `MAX_FOLDED_LINES`."""
    parts: list[str] = []
    for part in text.split("\n\n"):
        lines = part.strip("\n").splitlines()
        if not lines:
            continue
        head = html.escape(lines[0].split("   ")[0])
        if len(lines) > MAX_FOLDED_LINES:
            num_cut = len(lines) - MAX_FOLDED_LINES
            lines = [*lines[:MAX_FOLDED_LINES], f"... and {num_cut:,} more lines"]
        body = html_text("\n".join(lines))
        parts.append(f"<details><summary>{head}, {len(lines)} lines</summary>{body}</details>")
    return "".join(parts)
