"""Draw schedules and traces as SVG, for docs and notebooks: lanes of boxes over a time axis.

    row = RankRow(name="rank 0", lanes=((Box(0.0, 1.5, "F", "F0 stage 0"),),))
    drawing([row], heights=(18.0,), length=4.0, ticks=[(0.0, "0"), (2.0, "2 ms")], title="a step")

Each kind of box has a colour (`COLOURS`), which the legend lists. A box is a `rect` with a title;
in a drawing with very many boxes, a narrow box is a line `M12.3 9h.5` as thick as its lane. The
width of both is the box's duration. The SVG sets background and text colours, for dark notebooks,
and has no ids or styles, which would apply to the whole notebook."""

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
"""The colour and the legend's words for each kind of box."""
_TEXT_COLOUR, _FAINT_COLOUR, _GRID_COLOUR = "#1f2933", "#5b6773", "#d3d9e0"
_LETTER_WIDTH = 6.4  # pixels, of the 11 that a letter is high; about what sans-serif fonts have
_RANK_GAP = 5.0  # between two ranks
_MAX_HEIGHT = 900.0  # of all ranks together, before lanes get thinner
_MIN_LANE_HEIGHT = 3.0  # and how thin the first lane may get
_MIN_RECT_WIDTH = 3.0  # pixels under which a box of more than FEW is a line without a title
MAX_TITLED = 2000
"""The greatest number of boxes for which each box has a title, even if it is narrow."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box from ``begin`` to ``end``, in the drawing's unit; ``kind`` decides its colour.

    ``title``: shown under the pointer; ``text``: shown in the box if there is room.
    """

    begin: float
    end: float
    kind: str
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A rank: ``name`` at the left, ``note`` at the right, ``title`` under the pointer at the name.

    ``lanes``: from top to bottom; boxes of a lane are ordered and do not overlap. ``stretches``:
    invisible boxes over the first lane, whose titles are shown where boxes are too narrow.
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
    """Return an SVG.

    ``width``: the pixels of ``length``, without names and notes. ``heights``: pixels of each lane
    of a row, which are reduced if there are many ranks. ``ticks``: positions on the axis and their
    words. ``note``: the title of the rows' notes. ``foot``: the last line. ``colours``: the colour
    and words of each kind of box."""
    scale = width / length if length else 0.0
    left = 14 + _LETTER_WIDTH * max(len(row.name) for row in rows)
    right = 14 + _LETTER_WIDTH * max(len(text) for text in (note, *(row.note for row in rows)))
    full = len(rows) * (sum(heights) + _RANK_GAP)
    height_factor = min(1.0, max(_MAX_HEIGHT / full, _MIN_LANE_HEIGHT / heights[0]))
    pitch, top = height_factor * (sum(heights) + _RANK_GAP), 52.0
    bottom = top + pitch * len(rows)
    name_every = math.ceil(12 / pitch)  # a name needs so many pixels
    all_titled = sum(len(lane) for row in rows for lane in row.lanes) <= MAX_TITLED
    legend, legend_end = _legend(left, rows, colours)
    total = max(left + width, legend_end) + right
    total = max(total, 20 + _LETTER_WIDTH * max(len(title), len(foot)))
    elements = [_text(10, 18, title, size=12), *legend]
    elements += [_text(total - 10, 38, note, anchor="end", fill=_FAINT_COLOUR)] if note else []
    grid_lines = "".join(f"M{left + at * scale:.1f} {top:g}V{bottom + 4:.1f}" for at, _ in ticks)
    elements.append(f'<path d="{grid_lines}" stroke="{_GRID_COLOUR}"/>')
    for at, words in ticks:
        elements.append(
            _text(left + at * scale, bottom + 16, words, anchor="middle", fill=_FAINT_COLOUR)
        )
    for number, row in enumerate(rows):
        begin = top + number * pitch
        if number % name_every == 0:
            middle = begin + min(height_factor * heights[0], 18) / 2 + 4
            elements.append(_text(left - 6, middle, row.name, anchor="end", title=row.title))
            elements.append(_text(total - 10, middle, row.note, anchor="end") if row.note else "")
        elements.append(f'<g aria-label="{html.escape(row.name)}">')
        for index, (lane, height) in enumerate(zip(row.lanes, heights, strict=True)):
            under = row.stretches if index == 0 and not all_titled else ()
            elements.append(f'<g transform="translate({left:.1f} {begin:.1f})">')
            min_width = 0.0 if all_titled else _MIN_RECT_WIDTH
            elements += _lane(lane, under, scale, height_factor * height, min_width, colours)
            elements.append("</g>")
            begin += height_factor * height
        elements.append("</g>")
    if foot:
        elements.append(_text(10, bottom + 34, foot, fill=_FAINT_COLOUR))
    full_height = bottom + (44 if foot else 26)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" '
            f'height="{full_height:.0f}" '
            f'viewBox="0 0 {total:.0f} {full_height:.0f}" font-family="sans-serif" role="img">',
            f'<path d="M0 0H{total:.0f}V{full_height:.0f}H0Z" fill="#ffffff"/>',
            *filter(None, elements),
            "</svg>",
        ]
    )


def round_step(length: float, max_intervals: int) -> float:
    """The least 1, 2 or 5 times a power of ten that divides ``length`` into at max_intervals
    ``max_intervals``."""
    power = 10.0 ** math.floor(math.log10(length / max_intervals))
    return next(
        n * power for n in (1, 2, 5, 10) if n * power >= length / max_intervals * (1 - 1e-9)
    )


def _lane(
    boxes: Sequence[Box],
    stretches: Sequence[Box],
    scale: float,
    height: float,
    min_width: float,
    colours: Mapping[str, tuple[str, str]],
) -> Iterator[str]:
    """Yield the SVG elements of a lane. A line separates adjacent boxes with different texts, and
    adjacent boxes with equal texts share one text.

    ``min_width``: the least pixels of a box that is drawn as a `rect`.
    """

    def width_of(box: Box) -> float:
        return (box.end - box.begin) * scale

    def rect(box: Box, fill: str = "") -> str:
        return (
            f'<rect x="{box.begin * scale:.2f}" width="{width_of(box):.4g}" height="{height:.3g}"'
            f"{fill}><title>{html.escape(box.title, quote=False)}</title></rect>"
        )

    if stretches:
        yield '<g fill="none" pointer-events="all">'
        yield from (rect(box) for box in stretches if width_of(box) >= min_width)
        yield "</g>"
    narrow: dict[str, list[str]] = defaultdict(list)
    for box in boxes:
        if width_of(box) >= min_width:
            yield rect(box, f' fill="{colours[box.kind][0]}"')
        else:
            line = f"M{box.begin * scale:.2f} {height / 2:.3g}h{width_of(box):.4g}"
            narrow[box.kind].append(line.replace("h0.", "h."))
    for kind, lines in narrow.items():
        yield (
            f'<path d="{"".join(lines)}" stroke="{colours[kind][0]}" stroke-width="{height:.3g}" '
            f'pointer-events="none"/>'
        )
    text_spans: list[tuple[float, float, str]] = []
    for box in boxes:
        x, end = box.begin * scale, box.end * scale
        if text_spans and text_spans[-1][2] == box.text and x - text_spans[-1][1] < 1:
            text_spans[-1] = (text_spans[-1][0], end, box.text)
        else:
            text_spans.append((x, end, box.text))
    separators = [
        f"M{x:.2f} 0v{height:.3g}"
        for (_, before, text), (x, end, after) in itertools.pairwise(text_spans)
        if text and after and x - before < 1 and end - x >= _MIN_RECT_WIDTH
    ]
    if separators:
        yield f'<path d="{"".join(separators)}" stroke="{_TEXT_COLOUR}" stroke-width=".5"/>'
    if height > 10:
        for x, end, text in text_spans:
            if text and end - x > _LETTER_WIDTH * len(text) + 2:
                yield _text((x + end) / 2, height / 2 + 4, text, anchor="middle")


def _legend(
    left: float, rows: Sequence[RankRow], colours: Mapping[str, tuple[str, str]]
) -> tuple[list[str], float]:
    """Return the SVG elements of the legend, and the position of its right end in pixels."""
    present = {box.kind for row in rows for lane in row.lanes for box in lane}
    elements: list[str] = []
    for kind, (colour, words) in colours.items():
        if kind in present:
            elements.append(f'<path d="M{left:.1f} 29h11v11h-11z" fill="{colour}"/>')
            elements.append(_text(left + 16, 38, words))
            left += 34 + _LETTER_WIDTH * len(words)
    return elements, left


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    fill: str = _TEXT_COLOUR,
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
