"""Represent generated straight-line code as records, from which its Python source is made.

    line = CodeLine("h = mm(x, w)", makes=("h",), reads=("x", "w"), called="mm", drops=("w",))
    Body(inputs=("x", "w"), lines=(line,), outputs=("h",)).source

gives

    def forward(x, w):
        h = mm(x, w); del w
        return (h, )

Code that times or rewrites the lines reads the records and never parses the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Check(Protocol):
    """A check that a function makes on the device, without a wait of the host.

    The function has a row i64[3] of zeros. If a check fails and the row has no fault yet, the code
    writes the check's position in `Function.checks` plus 1, the first wrong value, and the number
    of wrong values.
    """

    @property
    def source(self) -> str | None:
        """The user's line."""
        ...

    def error(self, value: int, count: int) -> Exception:
        """Return the error for the first wrong ``value`` and the ``count`` of wrong values. A float
        comes as the bits of a float64."""
        ...


class CodeLine(NamedTuple):
    """One statement.

    ``makes`` and ``reads``: names of values. ``called``: the name of the called function, "" for a
    method or an operator. ``op``: what the line does, if ``called`` does not say it. ``drops``:
    names that are deleted after it. ``source``: the user's line. ``in_place``: an op writes its
    result to its first operand, which no other line reads. A NamedTuple, because each program
    pickles hundreds.
    """

    text: str
    makes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    called: str = ""
    op: str = ""
    drops: tuple[str, ...] = ()
    comment: str = ""
    source: str | None = None
    in_place: bool = False

    def __str__(self) -> str:
        deletion = f"; del {', '.join(self.drops)}" if self.drops else ""
        return self.text + deletion + (f"  # {self.comment}" if self.comment else "")


@dataclass(frozen=True, slots=True)
class Body:
    """The code of a function. ``inputs`` are names; ``outputs``, which it returns, expressions.
    ``boxed``: the function takes one list of its inputs and empties it, so that an input can be
    freed while the function runs."""

    inputs: tuple[str, ...]
    lines: tuple[CodeLine, ...]
    outputs: tuple[str, ...]
    boxed: bool = False

    @property
    def head(self) -> str:
        if self.boxed:
            return f"def forward(given):\n    {tuple_text(self.inputs)} = given; given.clear()"
        return f"def forward({', '.join(self.inputs)}):"

    @property
    def returned(self) -> str:
        return f"return {tuple_text(self.outputs)}"

    @property
    def source(self) -> str:
        return "\n    ".join([self.head, *map(str, self.lines), self.returned]) + "\n"

    @property
    def user_lines(self) -> tuple[str | None, ...]:
        """The user's line for each line of `source`, or None."""
        head = (None,) * (1 + self.boxed)
        return (*head, *(line.source for line in self.lines), None)


def tuple_text(names: Sequence[str]) -> str:
    """Return the Python source of a tuple of these names."""
    return f"({''.join(f'{name}, ' for name in names)})"
