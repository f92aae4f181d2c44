"""Straight-line code as records: what each line does, beside the text that Python compiles.

    line = CodeLine("h = mm(x, w)", makes=("h",), reads=("x", "w"), called="mm", drops=("w",))
    Body(inputs=("x", "w"), lines=(line,), outputs=("h",)).source

gives

    def forward(x, w):
        h = mm(x, w); del w
        return (h, )

Who times such code, or rewrites it, asks the records: nobody reads the text but Python and people.
Not here: how code is made of ops (runtime/lower/code.py), what runs it (a `Function`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CodeLine(NamedTuple):
    """One statement. ``makes``, ``reads``: names of values; ``called``: that of the function, ""
    where a method or an operator does it; ``op``: what it does, where ``called`` does not say that;
    ``drops``: names that are gone after it; ``source``: the user's line.

    A tuple, as a program pickles hundreds of them.
    """

    text: str
    makes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    called: str = ""
    op: str = ""
    drops: tuple[str, ...] = ()
    comment: str = ""
    source: str | None = None

    def __str__(self) -> str:
        gone = f"; del {', '.join(self.drops)}" if self.drops else ""
        return self.text + gone + (f"  # {self.comment}" if self.comment else "")


@dataclass(frozen=True, slots=True)
class Body:
    """A function of ``inputs``, names, that gives ``outputs``, expressions."""

    inputs: tuple[str, ...]
    lines: tuple[CodeLine, ...]
    outputs: tuple[str, ...]

    @property
    def head(self) -> str:
        return f"def forward({', '.join(self.inputs)}):"

    @property
    def returned(self) -> str:
        return f"return {tuple_text(self.outputs)}"

    @property
    def source(self) -> str:
        return "\n    ".join([self.head, *map(str, self.lines), self.returned]) + "\n"

    @property
    def user_lines(self) -> tuple[str | None, ...]:
        """By line of `source`, the user's."""
        return (None, *(line.source for line in self.lines), None)


def tuple_text(names: Sequence[str]) -> str:
    """A tuple of them, in code."""
    return f"({''.join(f'{name}, ' for name in names)})"
