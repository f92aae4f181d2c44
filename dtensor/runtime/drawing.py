"""Drawings of schedules and traces, for docs and notebooks: a row for each rank, a box for each
action; forwards blue, backwards orange, the halves of weights green."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_COLOURS = {"F": "#5b8def", "B": "#f0a35e", "I": "#f0a35e", "W": "#6fbf73"}
_HEIGHT, _LEFT = 22, 60


@dataclass(frozen=True, slots=True)
class Box:
    """``begin`` and ``end`` in one unit for the whole drawing; ``kind``: F, B, I, W or another."""

    row: int
    begin: float
    end: float
    kind: str
    title: str
    text: str = ""


def drawing(rows: Sequence[str], boxes: Iterable[Box], width: float = 960.0) -> str:
    """An SVG; ``rows`` are the names at the left."""
    found = list(boxes)
    last = max((box.end for box in found), default=0.0)
    scale = (width - _LEFT) / last if last else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{_HEIGHT * len(rows) + 4}" font-family="monospace" font-size="11">'
    ]
    for number, name in enumerate(rows):
        parts.append(f'<text x="2" y="{number * _HEIGHT + 15}">{html.escape(name)}</text>')
    for box in found:
        x, top = _LEFT + box.begin * scale, box.row * _HEIGHT + 2
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max((box.end - box.begin) * scale, 0.3):.1f}" '
            f'height="{_HEIGHT - 4}" fill="{_COLOURS.get(box.kind, "#bbbbbb")}" stroke="white" '
            f'stroke-width="0.3"><title>{html.escape(box.title)}</title></rect>'
        )
        if box.text:
            parts.append(f'<text x="{x + 2:.1f}" y="{top + 13}">{html.escape(box.text)}</text>')
    return "\n".join([*parts, "</svg>"])
