"""What pictures of docs/ are drawn with: boxes, words and arrows on a sheet, as SVG.

Sheets have a ground and colours of their own, so that dark pages show the same, and no ids, so that
several can stand in one page.
"""

from __future__ import annotations

import html

INK, FAINT, RULE, GROUND = "#1f2933", "#5b6773", "#9aa5b1", "#ffffff"
FIRST, SECOND, THIRD, WAITING = "#dbe7fb", "#fbe6d4", "#dff0e3", "#e9edf1"
"""Grounds of boxes: blue, orange, green, grey."""
RANKS = ("#8fb6f4", "#f5bb83", "#92cfa4", "#c5aee0")
STARRED = "#fdf3c7"


class Sheet:
    """Boxes, words and arrows, in pixels; ``svg()`` is the whole of them."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = GROUND,
        dashed: str = "",
        round_by: float = 3,
    ) -> None:
        dash = f' stroke-dasharray="{dashed}"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_by:g}" '
            f'fill="{fill}" stroke="{RULE}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "middle",
        fill: str = INK,
        size: float = 13,
        code: bool = False,
        bold: bool = False,
    ) -> None:
        font = ' font-family="monospace"' if code else ""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}"{font}{weight} xml:space="preserve">'
            f"{html.escape(words, quote=False)}</text>"
        )

    def lines(self, x: float, y: float, words: str, **options: object) -> None:
        """One under the other, from the first's middle."""
        for number, line in enumerate(words.split("\n")):
            self.text(x, y + 17 * number, line, **options)  # type: ignore[arg-type]

    def arrow(self, *points: tuple[float, float], dashed: str = "") -> None:
        """Along the points; its head at the last."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        ux, uy = (x - x0) / length, (y - y0) / length
        left = (x - 9 * ux - 4 * uy, y - 9 * uy + 4 * ux)
        right = (x - 9 * ux + 4 * uy, y - 9 * uy - 4 * ux)
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in (*points[:-1], (x - 8 * ux, y - 8 * uy)))
        head = "L".join(f"{a:.1f} {b:.1f}" for a, b in (left, (x, y), right))
        dash = f' stroke-dasharray="{dashed}"' if dashed else ""
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{FAINT}"{dash}/>')
        self.parts.append(f'<path d="M{head}Z" fill="{FAINT}"/>')

    def svg(self) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif" '
                f'role="img"><title>{html.escape(self.title, quote=False)}</title>',
                f'<path d="M0 0H{self.width:g}V{self.height:g}H0Z" fill="{GROUND}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
