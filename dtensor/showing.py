"""What a value shows of itself: at most a screen of text, and a table or text for notebooks.

    screen(text)                      # its first 24 lines and how many more there are
    html_text("a < b")                # "<pre>a &lt; b</pre>"
    html_table([("sent", [("tp", "2.0 MiB"), ("dp", "1.0 MiB")])])

Invariants: a screen is 25 lines of 100 columns; all text is escaped, and there is no script, style
sheet or id, which would hold in the whole notebook.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

LINES, WIDTH = 25, 100
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
