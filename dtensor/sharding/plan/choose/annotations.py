"""Parses the text of `dt.annotate`: dims with axes, as in "b@dp t d@tp".

Each word is one dim of the activation; `@axis` splits the dim over the axis, `@(a,b)` over two
axes, `@axis:zigzag` as `Zigzag`. A word without an axis is not split on the axes that the text
names; axes that the text does not name stay free. Placements by keyword have the form
"tp=Shard(1), dp=Replicate()".
"""

from __future__ import annotations

import re

from dtensor.errors import PlanningError
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Partial, Placement, Replicate, Shard
from dtensor.sharding.spec.spec import make_spec

_AXIS = r"\w+(?::zigzag)?"
_WORD = re.compile(rf"\w+(?:@({_AXIS}|\({_AXIS}(?:,{_AXIS})*\)))?")
_KEYWORD = re.compile(r"(\w+)=(Shard|Zigzag|Replicate|Partial)\(([^()]*(?:\([^()]*\)[^()]*)?)\)")


def annotation_placements(op: Op, mesh: Mesh) -> dict[str, Placement]:
    """Return axis -> placement, as the annotation ``op`` states it. Raises PlanningError if the
    text is invalid or names an axis that the mesh lacks."""
    text = op.call.args[1]
    meta = op.call.operands[0]
    where = f"annotate({text!r}) at {op.source}"
    if "=" in text:
        stated = _parse_keywords(text, where)
    else:
        stated = _parse_dims(text, len(meta.shape), where)
    for axis in stated:
        if axis not in mesh.axes:
            raise PlanningError(
                f"{where}: {axis!r} is not an axis of {mesh}\n  {op.source}: {op.source_text}"
            )
    try:
        placements = make_spec(meta.shape, meta.dtype, mesh, stated).sharding
    except PlanningError as error:
        fact, *fix = str(error).partition("\nfix: ")
        line = f"  {op.source}: {op.source_text}"
        raise PlanningError(f"{fact}\n{line}{''.join(fix)}") from error
    return {axis: p for axis, p in placements.items() if axis in stated or not stated}


def _parse_dims(text: str, num_dims: int, where: str) -> dict[str, Placement]:
    """Return axis -> placement from a text such as "b@dp t d@tp". ``where`` begins the messages of
    errors."""
    words = text.split()
    if len(words) != num_dims:
        raise PlanningError(f"{where}: {len(words)} dims are named, the value has {num_dims}")
    stated: dict[str, Placement] = {}
    for dim, word in enumerate(words):
        match = _WORD.fullmatch(word)
        if match is None:
            raise PlanningError(f"{where}: {word!r} is not a dim; write for example 'd@tp'")
        for name in (match[1] or "").strip("()").split(","):
            axis, _, zigzag = name.partition(":")
            if axis:
                if axis in stated:
                    raise PlanningError(f"{where}: axis {axis!r} is named twice")
                stated[axis] = Shard(dim, zigzag=bool(zigzag))
    return stated


def _parse_keywords(text: str, where: str) -> dict[str, Placement]:
    """Return axis -> placement from a text such as "tp=Shard(1), dp=Replicate()". ``where`` begins
    the messages of errors."""
    stated: dict[str, Placement] = {}
    if unmatched := _KEYWORD.sub("", text).strip(" ,"):
        raise PlanningError(
            f"{where}: {unmatched!r} is no placement; write for example 'tp=Shard(1)'"
        )
    for axis, kind, arguments in _KEYWORD.findall(text):
        match kind:
            case "Replicate":
                stated[axis] = Replicate()
            case "Partial":
                stated[axis] = Partial(arguments.strip("'\"") or "sum")
            case _:
                stated[axis] = _parse_shard(arguments, kind == "Zigzag")
    return stated


def _parse_shard(arguments: str, zigzag: bool) -> Shard:
    """Return the Shard whose repr has ``arguments`` between its parentheses: "0, blocks=3"."""
    dim = re.match(r"-?\d+", arguments)
    assert dim is not None, "dt.annotate writes a Shard as its repr"
    blocks = re.search(r"blocks=(\d+|\([\d, ]+\))", arguments)
    unit = re.search(r"unit=(\d+)", arguments)
    sizes: int | tuple[int, ...] = 1
    if blocks:
        numbers = tuple(int(n) for n in re.findall(r"\d+", blocks[1]))
        sizes = numbers if "(" in blocks[1] else numbers[0]
    by_rank = re.search(r"sizes=\(([\d, ]+)\)", arguments)
    held = tuple(int(n) for n in re.findall(r"\d+", by_rank[1])) if by_rank else None
    return Shard(int(dim[0]), sizes, int(unit[1]) if unit else 1, zigzag=zigzag, sizes=held)
