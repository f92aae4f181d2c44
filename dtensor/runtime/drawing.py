"""Drawings of schedules and traces, for docs and notebooks: lanes of boxes over an axis, as SVG.

    row = RankRow(name="rank 0", lanes=((Box(0.0, 1.5, "F", "F0 stage 0"),),))
    drawing([row], heights=(18.0,), length=4.0, ticks=[(0.0, "0"), (2.0, "2 ms")], title="a step")

Each kind has a colour (`COLOURS`), and a legend says those that are there. A box is a `rect` with a
title; among very many, one too narrow for the pointer is a line `M12.3 9h.5` as thick as its lane.
Invariants: both are as wide as the box lasts, however little that is; ground and text have colours
of their own, so that dark notebooks show the same; there are no ids and no styles, which would hold
in the whole notebook. What stands in which lane is not decided here.
"""

from __future__ import annotations

import html
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COLOURS: Mapping[str, tuple[str, str]] = {
    "F": ("#6c9ef0", "forward"),
    "B": ("#f2a154", "backward"),
    "I": ("#f6c95c", "backward of inputs"),
    "W": ("#6fbf87", "backward of weights"),
    "once": ("#b493d6", "once a step"),
    "message": ("#33475b", "messages"),
    "wait": ("#dce2e9", "waits"),
}
"""Colour and words of each kind of box."""
_INK, _FAINT, _RULE = "#1f2933", "#5b6773", "#d3d9e0"
_LETTER = 6.4  # pixels, of the 11 that a letter is high; about what sans-serif fonts have
_GAP = 5.0  # between two ranks
_HIGH = 900.0  # of all ranks together, before lanes get thinner
_THIN = 3.0  # and how thin the first lane may get
_NARROW = 3.0  # pixels under which a box of more than FEW is a line without a title
FEW = 2000
"""So many boxes each have a title, however narrow they are."""


@dataclass(frozen=True, slots=True)
class Box:
    """``begin`` and ``end`` in one unit for the whole drawing; ``kind``: one that has a colour.

    ``title`` is shown under the pointer, ``text`` in the box where there is room.
    """

    begin: float
    end: float
    kind: str
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A rank: its name at the left, ``note`` at the right, ``title`` under the pointer at the name.

    ``lanes``: from above; boxes of one do not overlap and stand in order. ``stretches`` of the
    first lane are not seen: theirs are the titles where boxes are too narrow to have one.
    """

    name: str
    lanes: tuple[tuple[Box, ...], ...]
    stretches: tuple[Box, ...] = ()
    note: str = ""
    title: str = ""


def drawing(
    rows: Sequence[RankRow],
    *,
    heights: Sequence[float],
    length: float,
    ticks: Sequence[tuple[float, str]],
    title: str,
    note: str = "",
    foot: str = "",
    width: float = 840.0,
    colours: Mapping[str, tuple[str, str]] = COLOURS,
) -> str:
    """An SVG. ``width``: pixels for ``length``, to which names and notes come; ``colours``: colour
    and words of each kind of box.

    ``heights``: pixels of each lane of a row; all get thinner where ranks are many. ``ticks``: a
    place on the axis and its words. ``note``: what the rows' notes are. ``foot``: the last line.
    """
    scale = width / length if length else 0.0
    left = 14 + _LETTER * max(len(row.name) for row in rows)
    right = 14 + _LETTER * max(len(text) for text in (note, *(row.note for row in rows)))
    full = len(rows) * (sum(heights) + _GAP)
    thin = min(1.0, max(_HIGH / full, _THIN / heights[0]))
    pitch, top = thin * (sum(heights) + _GAP), 52.0
    bottom = top + pitch * len(rows)
    every = math.ceil(12 / pitch)  # a name needs so many pixels
    few = sum(len(lane) for row in rows for lane in row.lanes) <= FEW
    legend, legend_end = _legend(left, rows, colours)
    total = max(left + width, legend_end) + right
    total = max(total, 20 + _LETTER * max(len(title), len(foot)))
    elements = [_text(10, 18, title, size=12), *legend]
    elements += [_text(total - 10, 38, note, anchor="end", fill=_FAINT)] if note else []
    across = "".join(f"M{left + at * scale:.1f} {top:g}V{bottom + 4:.1f}" for at, _ in ticks)
    elements.append(f'<path d="{across}" stroke="{_RULE}"/>')
    for at, words in ticks:
        elements.append(_text(left + at * scale, bottom + 16, words, anchor="middle", fill=_FAINT))
    for number, row in enumerate(rows):
        begin = top + number * pitch
        if number % every == 0:
            middle = begin + min(thin * heights[0], 18) / 2 + 4
            elements.append(_text(left - 6, middle, row.name, anchor="end", title=row.title))
            elements.append(_text(total - 10, middle, row.note, anchor="end") if row.note else "")
        elements.append(f'<g aria-label="{html.escape(row.name)}">')
        for index, (lane, height) in enumerate(zip(row.lanes, heights, strict=True)):
            under = row.stretches if index == 0 and not few else ()
            elements.append(f'<g transform="translate({left:.1f} {begin:.1f})">')
            least = 0.0 if few else _NARROW
            elements += _lane(lane, under, scale, thin * height, least, colours)
            elements.append("</g>")
            begin += thin * height
        elements.append("</g>")
    if foot:
        elements.append(_text(10, bottom + 34, foot, fill=_FAINT))
    high = bottom + (44 if foot else 26)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{high:.0f}" '
            f'viewBox="0 0 {total:.0f} {high:.0f}" font-family="sans-serif" role="img">',
            f'<path d="M0 0H{total:.0f}V{high:.0f}H0Z" fill="#ffffff"/>',
            *filter(None, elements),
            "</svg>",
        ]
    )


def round_step(length: float, most: int) -> float:
    """The least 1, 2 or 5 times a power of ten that divides ``length`` into at most ``most``."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= length / most * (1 - 1e-9))


def _lane(
    boxes: Sequence[Box],
    stretches: Sequence[Box],
    scale: float,
    height: float,
    least: float,
    colours: Mapping[str, tuple[str, str]],
) -> Iterator[str]:
    """A line parts boxes of different text that touch; a text stands once in those that touch.

    ``least``: pixels of a box that is a `rect`.
    """

    def wide(box: Box) -> float:
        return (box.end - box.begin) * scale

    def rect(box: Box, fill: str = "") -> str:
        return (
            f'<rect x="{box.begin * scale:.2f}" width="{wide(box):.4g}" height="{height:.3g}"'
            f"{fill}><title>{html.escape(box.title, quote=False)}</title></rect>"
        )

    if stretches:
        yield '<g fill="none" pointer-events="all">'
        yield from (rect(box) for box in stretches if wide(box) >= least)
        yield "</g>"
    narrow: dict[str, list[str]] = defaultdict(list)
    for box in boxes:
        if wide(box) >= least:
            yield rect(box, f' fill="{colours[box.kind][0]}"')
        else:
            line = f"M{box.begin * scale:.2f} {height / 2:.3g}h{wide(box):.4g}"
            narrow[box.kind].append(line.replace("h0.", "h."))
    for kind, lines in narrow.items():
        yield (
            f'<path d="{"".join(lines)}" stroke="{colours[kind][0]}" stroke-width="{height:.3g}" '
            f'pointer-events="none"/>'
        )
    ends: list[tuple[float, float, str]] = []
    for box in boxes:
        x, end = box.begin * scale, box.end * scale
        if ends and ends[-1][2] == box.text and x - ends[-1][1] < 1:
            ends[-1] = (ends[-1][0], end, box.text)
        else:
            ends.append((x, end, box.text))
    between = [
        f"M{x:.2f} 0v{height:.3g}"
        for (_, before, text), (x, end, after) in itertools.pairwise(ends)
        if text and after and x - before < 1 and end - x >= _NARROW
    ]
    if between:
        yield f'<path d="{"".join(between)}" stroke="{_INK}" stroke-width=".5"/>'
    if height > 10:
        for x, end, text in ends:
            if text and end - x > _LETTER * len(text) + 2:
                yield _text((x + end) / 2, height / 2 + 4, text, anchor="middle")


def _legend(
    left: float, rows: Sequence[RankRow], colours: Mapping[str, tuple[str, str]]
) -> tuple[list[str], float]:
    """And where it ends."""
    there = {box.kind for row in rows for lane in row.lanes for box in lane}
    elements: list[str] = []
    for kind, (colour, words) in colours.items():
        if kind in there:
            elements.append(f'<path d="M{left:.1f} 29h11v11h-11z" fill="{colour}"/>')
            elements.append(_text(left + 16, 38, words))
            left += 34 + _LETTER * len(words)
    return elements, left


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    fill: str = _INK,
    size: int = 11,
    title: str = "",
) -> str:
    under = f"<title>{html.escape(title, quote=False)}</title>" if title else ""
    events = "" if title else ' pointer-events="none"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        f"{events}>"
        f"{under}{html.escape(words, quote=False)}</text>"
    )
