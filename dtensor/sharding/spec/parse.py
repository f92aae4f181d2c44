"""`parse`: the spec that a text denotes, the inverse of ``str(spec)``.

    parse("f32[8@(tp,dp),16]{max@ep}", Mesh(tp=2, dp=2, ep=2))

`TensorSpec` (spec.py) explains the text and prints it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from dtensor.errors import PlanningError
from dtensor.numerics import DTYPES
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    Placement,
    Ragged,
    Shard,
    refine,
)
from dtensor.sharding.spec.spec import TensorSpec

#     spec   := dtype "[" (dim ("," dim)*)? "]" ("{" op "@" axis ("," op "@" axis)* "}")? (on)?
#     on     := " on " axis "=" int ("," axis "=" int)*
#     dim    := cut | "[" cut " " cut " " int "]"          experts, tokens, rows of a token
#     cut    := int | split ("&" split)*
#     split  := ((int "*")? int | "(" int ("+" int)* ")") "@" axes ("*" int)?
#             | "(" int ("|" int)+ ")" "@" axes                  sizes by rank of the first axis
#     axes   := name | "(" name ("," name)+ ")"
#     name   := axis (":zigzag")? (":shift" int)?

_SPEC = re.compile(
    r"\s*(\w+)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\s*(?:\{([^}]*)\})?\s*(?:on\s+(.+?))?\s*"
)
_AXIS = r"\w+(?::zigzag)?(?::shift\d+)?"
_SPLIT = re.compile(
    r"(?:(?P<count>\d+)\*)?(?:(?P<size>\d+)|\((?P<sizes>\d+(?:\+\d+)*|\d+(?:\|\d+)+)\))"
    rf"(?:@(?:(?P<axis>{_AXIS})|\((?P<axes>{_AXIS}(?:,{_AXIS})+)\)))?(?:\*(?P<unit>\d+))?"
)


def parse(text: str, mesh: Mesh, *, requires_grad: bool = False) -> TensorSpec:
    """Return the spec that ``text`` denotes on ``mesh``. Examples beyond the module's:

        f32[8,3]{softmax@tp}     the pending statistics of a softmax over tp
        f32[3*1024@tp,16]        dim 0 is 3 blocks of 1024, each split over tp
        f32[12@tp&3*4@dp]        two axes split dim 0 independently of each other
        f32[8,16] on pp=1        held by the ranks where pp is 1

    Raises PlanningError, which quotes the offending part, if the text is malformed.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise PlanningError(f'{text!r} is not a spec; write for example "f32[8@tp,16]"')
    dtype_text, dims_text, pending, on_text = match.groups()
    if dtype_text not in DTYPES:
        raise PlanningError(
            f"{text!r}: {dtype_text!r} is not a dtype; the dtypes are {', '.join(DTYPES)}"
        )
    shape: list[int] = []
    placements: dict[str, Placement] = {}
    for dim, dim_text in enumerate(_split_outside_parentheses(dims_text)):
        shape.append(_parse_dim(dim_text.strip(), dim, placements, text, mesh))
    for item in (pending or "").split(",") if pending else ():
        op, _, axis = item.strip().partition("@")
        _add_placement(axis, Partial(op), placements, text, mesh)
    on: list[tuple[str, int]] = []
    for item in on_text.split(",") if on_text else ():
        axis, _, index = item.strip().partition("=")
        if not index.isdigit() or int(index) >= mesh.axis_size(axis):
            raise PlanningError(f"{text!r}: {item.strip()!r} is not a part of {mesh}")
        on.append((axis, int(index)))
    return TensorSpec(
        tuple(shape),
        DTYPES[dtype_text],
        mesh,
        tuple(placements.get(axis, REPLICATE) for axis in mesh.axes),
        tuple(on),
        requires_grad,
    )


def _parse_dim(
    dim_text: str, dim: int, placements: dict[str, Placement], text: str, mesh: Mesh
) -> int:
    """Return the size of dim number ``dim``, whose text is like ``8``, ``3*4@(tp,dp)*16``,
    ``12@tp&3*4@dp`` or ``[8@ep 512@dp 2]``. Adds the placements that it states to ``placements``.
    Raises PlanningError, which quotes the spec ``text``, if it is malformed."""
    if not dim_text.startswith("["):
        return _parse_cut(dim_text, dim, placements, text, mesh)
    parts = re.split(r"\s+", dim_text.strip("[]").strip())
    if len(parts) != 3 or not parts[2].isdigit():
        raise PlanningError(f'{text!r}: {dim_text!r} is not a ragged dim; write "[8@ep 512 2]"')
    cuts: dict[Literal["expert", "token"], dict[str, Placement]] = {"expert": {}, "token": {}}
    experts = _parse_cut(parts[0], dim, cuts["expert"], text, mesh)
    tokens, slots = _parse_cut(parts[1], dim, cuts["token"], text, mesh), int(parts[2])
    for by, stated in cuts.items():
        for axis, p in stated.items():
            assert isinstance(p, Shard)
            ragged = replace(p, ragged=Ragged(by, experts, slots))
            _add_placement(axis, ragged, placements, text, mesh)
    return tokens * slots


def _parse_cut(
    dim_text: str, dim: int, placements: dict[str, Placement], text: str, mesh: Mesh
) -> int:
    """Return the size that a cut without brackets states; see `_parse_dim`."""
    total: int | None = None
    for split in dim_text.split("&"):
        match = _SPLIT.fullmatch(split)
        if match is None:
            raise PlanningError(f"{text!r}: {split!r} is not a dim")
        unit = int(match["unit"] or 1)
        blocks: int | tuple[int, ...]
        by_rank: tuple[int, ...] | None = None
        if "|" in (match["sizes"] or ""):
            if match["unit"] or match["count"] or not (match["axis"] or match["axes"]):
                raise PlanningError(f'{text!r}: {split!r} is not a dim; write "(48|16)@tp"')
            by_rank = tuple(map(int, match["sizes"].split("|")))
            blocks, size = 1, sum(by_rank)
        elif match["sizes"]:
            sizes = tuple(int(s) * unit for s in match["sizes"].split("+"))
            blocks = sizes
            size = sum(sizes)
        else:
            blocks = int(match["count"] or 1)
            size = blocks * int(match["size"]) * unit
        if total not in (None, size):
            raise PlanningError(f"{text!r}: {dim_text!r} states two sizes, {total} and {size}")
        total = size
        axes = match["axes"].split(",") if match["axes"] else [match["axis"]]
        majors: list[tuple[Shard, int]] = []
        for name in axes:
            if name is None:
                continue
            axis, *options = name.split(":")
            shift = int(options[-1][5:]) if options and options[-1] != "zigzag" else 0
            sized = None if majors else by_rank
            zigzag = "zigzag" in options
            stated = Shard(dim, blocks, unit, zigzag=zigzag, shift=shift, sizes=sized)
            shard = refine(stated, majors, size)
            _add_placement(axis, shard, placements, text, mesh)
            if mesh.axis_size(axis) > 1:
                majors.append((shard, mesh.axis_size(axis)))
    assert total is not None
    return total


def _add_placement(
    axis: str, placement: Placement, placements: dict[str, Placement], text: str, mesh: Mesh
) -> None:
    """Add the placement of an axis to ``placements``. Raises PlanningError, which quotes the spec
    ``text``, if the axis is not in the mesh or has a placement already."""
    mesh.axis_size(axis)
    if axis in placements:
        raise PlanningError(f"{text!r} places axis {axis!r} twice")
    placements[axis] = placement


def _split_outside_parentheses(text: str) -> list[str]:
    """Return the comma-separated items of ``text``; commas inside parentheses do not separate."""
    if not text.strip():
        return []
    return re.split(r",(?![^()\[\]]*[)\]])", text)
