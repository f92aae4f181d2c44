"""The parser of the text form of specs; the grammar stands in spec.py.

parse("f32[8@tp,16]", Mesh(tp=2))
"""

from __future__ import annotations

import re
from typing import cast

from dtensor.errors import PlanningError
from dtensor.numerics import DTYPES, ReduceOp
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec

_SPEC = re.compile(r"\s*(\w+)\[([^\]]*)\]\s*(?:\{([^}]*)\})?\s*(?:on\s+(.+?))?\s*")
_SPLIT = re.compile(
    r"(?:(?P<count>\d+)\*)?(?:(?P<size>\d+)|\((?P<sizes>\d+(?:\+\d+)*)\))"
    r"(?:@(?:(?P<axis>\w+)|\((?P<axes>\w+(?:,\w+)+)\)))?(?:\*(?P<unit>\d+))?"
)


def parse(text: str, mesh: Mesh, *, requires_grad: bool = False) -> TensorSpec:
    """The spec that ``text`` denotes on ``mesh``; PlanningError with the offending part."""
    found = _SPEC.fullmatch(text)
    if found is None:
        raise PlanningError(f'{text!r} is not a spec; write for example "f32[8@tp,16]"')
    dtype_text, dims_text, pending, on_text = found.groups()
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
        _claim(axis, Partial(cast(ReduceOp, op)), placements, text, mesh)
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
    total: int | None = None
    for split in dim_text.split("&"):
        found = _SPLIT.fullmatch(split)
        if found is None:
            raise PlanningError(f"{text!r}: {split!r} is not a dim")
        unit = int(found["unit"] or 1)
        if found["sizes"]:
            sizes = tuple(int(s) * unit for s in found["sizes"].split("+"))
            blocks: int | tuple[int, ...] = sizes
            size = sum(sizes)
        else:
            blocks = int(found["count"] or 1)
            size = blocks * int(found["size"]) * unit
        if total not in (None, size):
            raise PlanningError(f"{text!r}: {dim_text!r} states two sizes, {total} and {size}")
        total = size
        axes = found["axes"].split(",") if found["axes"] else [found["axis"]]
        majors: list[tuple[Shard, int]] = []
        for axis in axes:
            if axis is None:
                continue
            shard = refine(Shard(dim, blocks, unit), majors, size)
            _claim(axis, shard, placements, text, mesh)
            if mesh.axis_size(axis) > 1:
                majors.append((shard, mesh.axis_size(axis)))
    assert total is not None
    return total


def _claim(
    axis: str, placement: Placement, placements: dict[str, Placement], text: str, mesh: Mesh
) -> None:
    mesh.axis_size(axis)
    if axis in placements:
        raise PlanningError(f"{text!r} places axis {axis!r} twice")
    placements[axis] = placement


def _split_outside_parentheses(text: str) -> list[str]:
    """The comma-separated items of ``text``; commas inside parentheses do not separate."""
    if not text.strip():
        return []
    return re.split(r",(?![^()]*\))", text)
