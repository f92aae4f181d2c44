"""Generated code, read back: what code.py writes on a line, for who rewrites or times it.

    parts_of("h = mm.add_(bias); del mm  # add in place")
        ->  LineParts("h = mm.add_(bias)", ("mm",), "add in place")
    overload_of(torch.mm)  ->  aten.mm.default

Not here: how lines are written (code.py), which functions have such lines (`daft.run.stamps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dtensor.private_torch import OpOverload
from dtensor.runtime.lower.code import QUICK
from dtensor.sharding.ops.library import PLAIN

_BOUND: Mapping[int, object] = {
    id(fn): overload for bound in (QUICK, PLAIN) for overload, fn in bound.items()
}


class LineParts(NamedTuple):
    """``text``: the statement; ``deleted``: the names that it drops; ``comment``: a kernel, or the
    op that is done in place."""

    text: str
    deleted: tuple[str, ...]
    comment: str


def parts_of(line: str) -> LineParts:
    code, _, comment = line.partition("  # ")
    text, _, deleted = code.partition("; del ")
    return LineParts(text, tuple(deleted.split(", ")) if deleted else (), comment)


def overload_of(target: object) -> OpOverload | None:
    """The op that a function stands for in generated code; None where it is no op."""
    overload = _BOUND.get(id(target), target)
    return overload if isinstance(overload, OpOverload) else None
