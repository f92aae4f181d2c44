"""Whether placements as stated can be had: they are placements, of axes there are, that fit.

    check_stated(dict(tp=Row()), '"*.up.weight"', mesh)
    check_fit("up.weight", Meta((64, 16), f32), dict(tp=Shard(2)), '"*.up.weight"', mesh)   # raises

``where`` is what the user wrote them for, and stands in each message. Every fix that names numbers
was tried. Not here: which tensors they are for (placing.py), what the program does to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtensor.api.stating.patterns import listing, nearest
from dtensor.errors import PlanningError, shown
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import ColumnParallel, Role, RowParallel
from dtensor.sharding.spec.placements import (
    Column,
    Partial,
    Placement,
    Replicate,
    Row,
    Shard,
    block_sizes,
    same,
)
from dtensor.sharding.spec.spec import make_spec

Stated = Mapping[str, Placement]  # axis -> placement, in the user's order


def check_stated(
    stated: object,
    where: str,
    mesh: Mesh,
    stage_axis: str | None = None,
    *,
    roles: bool = False,
) -> None:
    """PlanningError unless ``stated`` maps axes of the mesh to Replicate or Shard, or to a role
    where those may be stated."""
    if not isinstance(stated, Mapping):
        raise PlanningError(
            f"{where} states {show(stated)}, not placements by axis.\n"
            f"fix: write dict({some_axis(mesh)}={_as_placement(stated)})"
        )
    for axis, placement in stated.items():
        if axis not in mesh.axes:
            near = nearest(str(axis), mesh.axes)
            fix = f"{near[0]}={_as_placement(placement)}" if near else "name an axis of the mesh"
            raise PlanningError(
                f'{where} names the axis "{axis}", which is not in the mesh.\n'
                f"  {mesh}, axes: {listing(mesh.axes)}\n"
                f"fix: {fix}"
            )
        if axis == stage_axis:
            raise PlanningError(
                f'{where} places a tensor on the axis "{axis}", which holds the stages.\n'
                f"  {axis}={placement!r}\n"
                f"fix: remove it; stages= says which stage holds a parameter"
            )
        if isinstance(placement, Role) and not roles:
            raise PlanningError(
                f"{where} states {axis}={placement!r}, which is a role of a module's weight.\n"
                f"fix: write {axis}=dt.Row() or dt.Column()"
            )
        if not isinstance(placement, Replicate | Shard | Partial | Role):
            raise PlanningError(
                f"{where} states {axis}={show(placement)}, which is not a placement.\n"
                f"fix: write {axis}={_as_placement(placement)}"
            )
        if isinstance(placement, Partial):
            raise PlanningError(
                f"{where} states {axis}={placement!r}, but only a computed value can be pending.\n"
                f"fix: write {axis}=dt.Replicate(), or {axis}=dt.Row() to split it"
            )


def check_fit(name: str, meta: Meta, stated: Stated, where: str, mesh: Mesh) -> None:
    """PlanningError where a tensor of ``meta`` cannot have the placements."""
    for axis, placement in stated.items():
        if isinstance(placement, Shard):
            problem = _misfit(placement, meta)
            if problem is not None:
                fact, fix = problem
                raise PlanningError(
                    f"{axis}={placement!r} does not fit {name}: {fact}.\n"
                    f"  {name}: {meta}\n"
                    f"  stated by {where}\n"
                    f"fix: {fix}"
                )
    _check_together(name, meta, stated, where, mesh)


def _misfit(shard: Shard, meta: Meta) -> tuple[str, str] | None:
    """(the fact, a fix that was tried), or None where the shard fits."""
    shape = meta.shape
    if not shape:
        return "it has no dims", "dt.Replicate(), the only placement of a scalar"
    if not -len(shape) <= shard.dim < len(shape):
        if len(shape) == 1:
            return f"it has 1 dim, and dim {shard.dim} is not there", f"dt.Row() splits {shape[0]}"
        last = len(shape) - 1
        offers = f"dt.Row() splits dim 0 of {shape[0]}, dt.Column() dim {last} of {shape[-1]}"
        return f"it has {len(shape)} dims, and dim {shard.dim} is not there", offers
    size, blocks, unit = shape[shard.dim], shard.blocks, shard.unit
    dim = f"dim {shard.dim % len(shape)} of {size}"
    match blocks:
        case tuple() if sum(blocks) != size:
            rest = size - sum(blocks[:-1])
            fixed: int | tuple[int, ...] = (*blocks[:-1], rest) if rest > 0 else 1
            return f"blocks={blocks} add up to {sum(blocks)}, {dim}", f"blocks={fixed}"
        case int() if size % blocks:
            near = _nearest_divisor(size, blocks)
            return f"{dim} is not {blocks} equal blocks", f"blocks={near}, or the sizes of each"
    for block in block_sizes(blocks, size):
        if block % unit:
            near = _nearest_divisor(block, unit)
            whole = "" if block == size else f", in blocks of {block},"
            return f"{dim}{whole} is not a multiple of unit={unit}", f"unit={near}"
    return None


def _nearest_divisor(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - wanted), d))


def _check_together(name: str, meta: Meta, stated: Stated, where: str, mesh: Mesh) -> None:
    """A minor axis splits the pieces of the major one of its dim; its own blocks would be lost."""
    try:
        lost = _lost_blocks(meta, stated, mesh)
    except PlanningError as error:
        raise PlanningError(f"{error}\n  {name}: {meta}\n  stated by {where}") from error
    if lost is None:
        return
    rest = {axis: p for axis, p in stated.items() if axis != lost}
    first = next(iter(rest))
    if _lost_blocks(meta, {lost: stated[lost], **rest}, mesh) is None:
        fix = f"name {lost} before {first}, so that {first} splits its blocks"
    else:
        fix = f"state blocks on {first} alone"
    raise PlanningError(
        f"{lost}={stated[lost]!r} of {name} would split the pieces that {first} cuts, and its own "
        f"blocks would be lost.\n"
        f"  {name}: {meta}\n"
        f"  {', '.join(f'{axis}={p!r}' for axis, p in stated.items())}, stated by {where}\n"
        f"fix: {fix}"
    )


def _lost_blocks(meta: Meta, stated: Stated, mesh: Mesh) -> str | None:
    """The first axis whose stated blocks are not what it would split."""
    spec = make_spec(meta.shape, meta.dtype, mesh, stated)
    for axis, placement in stated.items():
        got, num = spec.placement(axis), mesh.axis_size(axis)
        if isinstance(placement, Shard) and isinstance(got, Shard) and placement.blocks != 1:
            own = Shard(got.dim, placement.blocks, placement.unit)
            if not same(own, got, meta.shape, num):
                return axis
    return None


def _as_placement(value: object) -> str:
    """What was probably meant, as one would write it."""
    match value:
        case Replicate():
            return "dt.Replicate()"
        case Shard(0, 1, 1):
            return "dt.Row()"
        case Shard(-1, 1, 1):
            return "dt.Column()"
        case Shard() | Partial() | ColumnParallel() | RowParallel():
            return f"dt.{value!r}"
        case int() if not isinstance(value, bool):
            return f"dt.Shard({value})"
        case str() if value.lower().startswith("col"):
            return "dt.Column()"
        case str() if value.lower().startswith("rep"):
            return "dt.Replicate()"
        case None:
            return "dt.Replicate()"
        case _ if value is Column:
            return "dt.Column()"
        case _ if value is Replicate:
            return "dt.Replicate()"
        case type() if value in (ColumnParallel, RowParallel):
            return f"dt.{value.__name__}()"
        case _ if value is Shard:
            return "dt.Shard(0)"
        case _:
            return "dt.Row()"


def show(value: object) -> str:
    if value is Row or value is Column:
        return "Row without ()" if value is Row else "Column without ()"
    return shown(value)


def some_axis(mesh: Mesh) -> str:
    """An axis to show in an example: the last one, which is innermost."""
    return mesh.axes[-1] if mesh.axes else "tp"
