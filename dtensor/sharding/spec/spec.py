"""`TensorSpec`: the global shape, dtype and sharding of one tensor, with a text form.

    f32[8@tp,16]             dim 0 is split over axis tp
    f32[8,16]{sum@tp}        a pending sum over tp
    f32[8@(tp,dp),16]        dim 0 is split over tp, and each piece is split again over dp
    f32[(64+32+32)@tp,16]    dim 0 is three blocks of these sizes, each split over tp
    f32[4@tp*16,16]          64 rows, cut only at multiples of 16
    f32[(48|16)@tp,16]       rank 0 of tp holds 48 rows, rank 1 the other 16
    f32[(48|16)@(tp,dp),16]  each piece is split again over dp
    f32[8,512@cp:zigzag]     dim 1 is split as `Zigzag`
    f32[8,512@cp:shift1]     rank i of cp holds what rank i - 1 holds of 512@cp
    f32[[8@ep 512@dp 2],16]  1024 rows of 8 experts: 512 tokens split over dp, experts over ep

Invariants: one placement for each axis of the mesh; dims are not negative; the placement on an
axis of size 1 is Replicate; blocks fill the dim; ``parse(str(spec), mesh) == spec``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import REDUCTIONS, Reduction, dtype_name
from dtensor.sharding.spec.fits import check_zigzag, fits, misfit
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Intervals,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    blocks_of,
    counted,
    cuts_experts,
    fullest_coordinates,
    index_sets,
    intersect,
    length,
    on_dim,
    one_block,
    refine,
    same,
    simplest,
    with_cuts,
    with_shift,
)
from dtensor.showing import html_table


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The global ``shape`` and ``dtype`` of a tensor, and one of ``placements`` for each axis of
    ``mesh``. `dt.spec` returns the spec for a text; ``str(spec)`` is that text.

    ``on``: the part of the mesh that holds the value, as (axis, index) pairs; () is all of it.
    ``requires_grad``: whether the gradient of this input is wanted; ``==`` ignores it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Mesh
    placements: tuple[Placement, ...]
    on: tuple[tuple[str, int], ...] = ()
    requires_grad: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Normalize the placements. Raises PlanningError if one does not fit the shape, dtype or
        mesh, or if the value would be pending under two reductions."""
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.placements) != len(self.mesh.axes):
            raise PlanningError(f"{self.mesh} needs {len(self.mesh.axes)} placements")
        normal = tuple(
            normalize(p, self.shape, self.mesh.axis_size(axis))
            for p, axis in zip(self.placements, self.mesh.axes, strict=True)
        )
        stated = self.placements
        object.__setattr__(self, "placements", normal)
        kinds = {p.op for p in normal if isinstance(p, Partial)}
        if len(kinds) > 1:
            raise PlanningError(f"a value cannot be pending under {sorted(kinds)} at once")
        for op in {p.op for p in stated if isinstance(p, Partial)}:
            self._check_pending(REDUCTIONS[op])

    def _check_pending(self, reduction: Reduction) -> None:
        """Raise PlanningError if this spec cannot be pending under the reduction."""
        if reduction.takes(self.shape, self.dtype) and reduction.unit == 1:
            return
        text = f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"
        if not reduction.takes(self.shape, self.dtype):
            raise PlanningError(
                f'Partial("{reduction.name}") needs values {reduction.wants}; this one is {text}.\n'
                f'fix: use Partial("sum") for a sum, Partial("max") for a maximum'
            )
        last = len(self.shape) - 1
        for axis, placement in self.sharding.items():
            if isinstance(placement, Shard) and placement.dim == last:
                raise PlanningError(
                    f"a value that is pending under {reduction.name} keeps its last dim of "
                    f"{reduction.unit} numbers whole, but {axis}={placement!r} splits the last dim "
                    f"of {text}.\n"
                    f"fix: {axis}=Replicate()" + (f", or {axis}=Shard(0)" if last else "")
                )

    @property
    def sharding(self) -> dict[str, Placement]:
        """The placement on each axis, by axis name."""
        return dict(zip(self.mesh.axes, self.placements, strict=True))

    def placement(self, axis: str) -> Placement:
        """Return the placement on one axis. Raises PlanningError if the mesh has no such axis."""
        return self.placements[self.mesh.index(axis)]

    def with_placements(self, **placements: Placement) -> TensorSpec:
        """Return the spec with the placements on the named axes replaced."""
        merged = {**self.sharding, **placements}
        for axis in placements:
            self.mesh.axis_size(axis)
        return replace(self, placements=tuple(merged[a] for a in self.mesh.axes))

    @property
    def nbytes(self) -> int:
        """The bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def intervals(self, dim: int, coordinates: Mapping[str, int]) -> Intervals:
        """Return the global indices of ``dim`` that the rank at ``coordinates`` holds. For rows by
        token, they are positions in the order of tokens; for rows by expert, which are data, as
        many positions as the rank would hold if the experts had equally many rows."""
        positions, experts = self._positions_and_experts(dim, coordinates)
        if experts is None or not positions:
            return positions
        ragged = self.ragged
        assert ragged is not None, "experts are split"
        return ((0, -(-length(positions) * length(experts) // ragged.experts)),)

    def _positions_and_experts(
        self, dim: int, coordinates: Mapping[str, int]
    ) -> tuple[Intervals, Intervals | None]:
        """Return the indices of ``dim`` that the rank holds, without the splits by expert, and the
        experts that it holds; None for the experts if no axis splits them."""
        size = self.shape[dim]
        result: Intervals = ((0, size),) if size else ()
        experts: Intervals | None = None
        for axis, placement in zip(self.mesh.axes, self.placements, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                sets = index_sets(placement, size, self.mesh.axis_size(axis))
                held, ragged = sets[coordinates[axis]], placement.ragged
                if ragged is None:
                    result = intersect(result, held)
                elif ragged.by == "token":
                    scaled = tuple((lo * ragged.slots, hi * ragged.slots) for lo, hi in held)
                    result = intersect(result, scaled)
                else:
                    experts = held if experts is None else intersect(experts, held)
        return result, experts

    @property
    def ragged(self) -> Ragged | None:
        """The split of a ragged dim, by expert if some axis splits it so; None if there is none."""
        found: Ragged | None = None
        for p in self.placements:
            if isinstance(p, Shard) and p.ragged is not None:
                found = p.ragged if found is None or p.ragged.by == "expert" else found
        return found

    @property
    def is_by_expert(self) -> bool:
        """Whether the number of rows that a rank holds is data."""
        return any(isinstance(p, Shard) and cuts_experts(p) for p in self.placements)

    def row_bound(self, coordinates: Mapping[str, int]) -> int:
        """Return the most rows by expert that the rank at ``coordinates`` can hold: each of its
        tokens has at most one row for each of its experts."""
        tokens, experts = self.tokens_and_experts(coordinates)
        ragged = self.ragged
        assert ragged is not None, "the spec has no ragged dim"
        return tokens * min(ragged.slots, experts)

    def row_budget(self, coordinates: Mapping[str, int], capacity: float) -> int:
        """Return ``capacity`` times the rows by expert that a rank holds if experts have equally
        many rows. Ranks that hold other experts of the same tokens have the same budget."""
        origin = {
            axis: 0 if cuts_experts(p) else coordinates[axis] for axis, p in self.sharding.items()
        }
        rows = length(self.intervals(self.ragged_dim, origin))
        return math.ceil(Fraction(str(capacity)) * rows)

    def tokens_and_experts(self, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of tokens, and of experts, whose rows the rank holds."""
        ragged = self.ragged
        assert ragged is not None, "the spec has no ragged dim"
        positions, experts = self._positions_and_experts(self.ragged_dim, coordinates)
        num_experts = ragged.experts if experts is None else length(experts)
        return length(positions) // ragged.slots, num_experts

    @property
    def ragged_dim(self) -> int:
        """The dim that is ragged. There must be one."""
        return next(p.dim for p in self.placements if isinstance(p, Shard) and p.ragged is not None)

    def cuts(self, dim: int, *, except_axis: str = "") -> list[tuple[Shard, int]]:
        """Return (placement, axis size) of each axis other than ``except_axis`` that splits
        ``dim``."""
        return [
            (placement, self.mesh.axis_size(axis))
            for axis, placement in self.sharding.items()
            if isinstance(placement, Shard) and placement.dim == dim and axis != except_axis
        ]

    def local_shape(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard of the rank at ``coordinates``."""
        sharded = {p.dim for p in self.placements if isinstance(p, Shard)}
        return tuple(
            length(self.intervals(dim, coordinates)) if dim in sharded else size
            for dim, size in enumerate(self.shape)
        )

    def local_nbytes(self, coordinates: Mapping[str, int]) -> int:
        """Return the bytes of the shard of the rank at ``coordinates``."""
        return math.prod(self.local_shape(coordinates)) * self.dtype.itemsize

    @property
    def is_sized(self) -> bool:
        """Whether the sizes of the shards on some axis are stated."""
        return any(isinstance(p, Shard) and p.sizes is not None for p in self.placements)

    @property
    def max_local_nbytes(self) -> int:
        """The bytes of the largest shard."""
        return self.local_nbytes(self.fullest)

    @property
    def fullest(self) -> dict[str, int]:
        """The coordinates of a rank that holds the largest shard. Without sizes and shifts, it is
        at coordinate 0 of every axis."""
        at = {a: p.shift if isinstance(p, Shard) else 0 for a, p in self.sharding.items()}
        for dim in {p.dim for p in self.placements if isinstance(p, Shard) and p.sizes is not None}:
            axes = [a for a, p in self.sharding.items() if isinstance(p, Shard) and p.dim == dim]
            at.update(zip(axes, fullest_coordinates(tuple(self.cuts(dim)), self.shape[dim])))
        return at

    def __str__(self) -> str:
        """Return the text form, which `parse` reads: ``f32[8@tp,16]{sum@dp} on pp=1``."""
        dims = ",".join(self._dim_text(dim) for dim in range(len(self.shape)))
        pending = ",".join(
            f"{p.op}@{axis}" for axis, p in self.sharding.items() if isinstance(p, Partial)
        )
        on = ",".join(f"{axis}={i}" for axis, i in self.on)
        return (
            f"{dtype_name(self.dtype)}[{dims}]"
            + (f"{{{pending}}}" if pending else "")
            + (f" on {on}" if on else "")
        )

    def _dim_text(self, dim: int) -> str:
        """Return the text of a dim: its size, or its splits, as in ``8@(tp,dp)`` or
        ``12@tp&3*4@dp`` if the splits are independent."""
        size = self.shape[dim]
        splits = [
            (axis, p) for axis, p in self.sharding.items() if isinstance(p, Shard) and p.dim == dim
        ]
        ragged = next((p.ragged for _, p in splits if p.ragged is not None), None)
        if ragged is None:
            return self._splits_text(splits, size, dim)
        by_expert = [(axis, p) for axis, p in splits if cuts_experts(p)]
        by_token = [(axis, p) for axis, p in splits if not cuts_experts(p)]
        experts = self._splits_text(by_expert, ragged.experts, dim)
        tokens = self._splits_text(by_token, size // ragged.slots, dim)
        return f"[{experts} {tokens} {ragged.slots}]"

    def _splits_text(self, splits: list[tuple[str, Shard]], size: int, dim: int) -> str:
        """Return the text of ``size`` indices, tokens or experts that these axes split."""
        if not splits:
            return str(size)
        splits = [(axis, replace(p, ragged=None)) for axis, p in splits]
        chain = self._chain(splits, size)
        if chain is not None:
            return _split_text(chain, size)
        return "&".join(_split_text([split], size) for split in splits)

    def _chain(
        self, splits: list[tuple[str, Shard]], size: int
    ) -> tuple[tuple[str, Shard], ...] | None:
        """Return the (axis, placement) pairs in an order in which the blocks of each placement are
        the pieces that the axes before it cut, as in ``8@(tp,dp)``; None if there is none."""
        for order in itertools.permutations(splits):
            majors: list[tuple[Shard, int]] = []
            for axis, shard in order:
                in_pieces = with_cuts(one_block(shard), 1, order[0][1].unit)
                if majors and refine(in_pieces, majors, size) != shard:
                    break
                majors.append((shard, self.mesh.axis_size(axis)))
            else:
                return order
        return None

    def __repr__(self) -> str:
        return f"spec({str(self)!r}, {self.mesh!r})"

    def _repr_html_(self) -> str:
        """Return a table of the placements and of the largest shard, for notebooks."""
        held = "x".join(map(str, self.local_shape(self.fullest))) or "a number"
        sizes = self.mesh.shape
        return html_table(
            [
                (str(self), [(f"on {self.mesh}",)]),
                ("axes", [(f"{a}={sizes[a]}", repr(p)) for a, p in self.sharding.items()]),
                (
                    "a rank holds at most",
                    [(held, f"{self.max_local_nbytes:,} of {self.nbytes:,} bytes")],
                ),
            ]
        )


def compared_ranks(mesh: Mesh) -> Iterator[dict[str, int]]:
    """Yield the coordinates of all ranks of a mesh, in the first microbatch."""
    ranges = (range(1 if a == MICROBATCH_AXIS else n) for a, n in mesh.shape.items())
    for at in itertools.product(*ranges):
        yield dict(zip(mesh.axes, at, strict=True))


def nbytes_together(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the bytes of the shards of several values on the rank that holds most in all. If
    placements have sizes, it may hold nothing of some values."""
    if not any(spec.is_sized for spec in specs):
        return tuple(spec.max_local_nbytes for spec in specs)
    return max(zip(*map(_nbytes_by_rank, specs), strict=True), key=sum)


@lru_cache(maxsize=1 << 12)
def _nbytes_by_rank(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(map(spec.local_nbytes, compared_ranks(spec.mesh)))


def alike(a: TensorSpec, b: TensorSpec) -> bool:
    """Return whether every rank holds the same indices under both specs of a value."""
    return all(
        same(p, q, a.shape, a.mesh.axis_size(axis))
        for axis, p, q in zip(a.mesh.axes, a.placements, b.placements, strict=True)
    )


def _split_text(splits: Sequence[tuple[str, Shard]], size: int) -> str:
    """Return the text of a dim that these axes split, major first: ``3*4@(tp,dp)*16``."""
    axes = [
        axis + ":zigzag" * p.zigzag + (f":shift{p.shift}" if p.shift else "") for axis, p in splits
    ]
    names = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
    shard = splits[0][1]
    unit = shard.unit
    tail = f"*{unit}" if unit > 1 else ""
    if shard.sizes is not None:
        return f"({'|'.join(map(str, shard.sizes))})@{names}"
    match shard.blocks:
        case tuple() as sizes:
            return f"({'+'.join(str(s // unit) for s in sizes)})@{names}{tail}"
        case 1:
            return f"{size // unit}@{names}{tail}"
        case count:
            return f"{count}*{size // count // unit}@{names}{tail}"


def normalize(placement: Placement, shape: tuple[int, ...], num: int) -> Placement:
    """Return the normal form of a placement of a tensor of ``shape`` on an axis of ``num`` ranks:
    dim not negative, equal blocks as their number, sizes of an even split as that split, Replicate
    if there is one rank. Raises PlanningError if the placement does not fit the shape or axis."""
    match placement:
        case Shard(dim):
            if not -len(shape) <= dim < len(shape):
                raise PlanningError(
                    f"{placement!r} names dim {dim} of a tensor of shape {list(shape)}, "
                    f"which has {len(shape)} dims; use a dim in 0..{len(shape) - 1}"
                    if shape
                    else f"{placement!r} cannot split a scalar; use Replicate()"
                )
            dim %= len(shape)
            if placement.sizes is not None:
                if not fits(placement, shape[dim], num):
                    fact, fix = misfit(placement, shape[dim], f"dim {dim} has {shape[dim]}", num)
                    raise PlanningError(f"{placement!r} does not fit: {fact}.\nfix: {fix}")
                return simplest(on_dim(placement, dim), shape, num)
            placement = with_shift(placement, placement.shift, num)
            placement = counted(on_dim(placement, dim), shape[dim])
            for block in blocks_of(placement, shape[placement.dim]):
                if block % placement.unit:
                    raise PlanningError(
                        f"{placement!r}: a block of size {block} is not a multiple of "
                        f"unit={placement.unit}"
                    )
            return REPLICATE if num == 1 else placement
        case Partial():
            return REPLICATE if num == 1 else placement
        case Replicate():
            return placement


def make_spec(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: Mesh,
    placements: Mapping[str, Placement] | None = None,
    *,
    requires_grad: bool = False,
) -> TensorSpec:
    """Return a spec from placements by axis name.

    The placement on an axis that is not named is Replicate. If two axes split one dim, the axis
    named first is major: the blocks of the second become the pieces that the first cuts, unless the
    second has sizes. Raises PlanningError if a placement does not fit the shape.
    """
    shape = tuple(shape)
    refined: dict[str, Placement] = {}
    for axis, stated in (placements or {}).items():
        num = mesh.axis_size(axis)
        sized = isinstance(stated, Shard) and stated.sizes is not None
        placement = normalize(stated, shape, num if sized else max(2, num))
        if isinstance(placement, Shard):
            majors = [
                (p, mesh.axis_size(a))
                for a, p in refined.items()
                if isinstance(p, Shard) and p.dim == placement.dim and mesh.axis_size(a) > 1
            ]
            dim, size = placement.dim, shape[placement.dim]
            placement = refine(placement, majors, size)
            if num > 1 and isinstance(stated, Shard):
                check_zigzag(on_dim(stated, dim), placement, size, axis, num)
        refined[axis] = placement
    return TensorSpec(
        shape,
        dtype,
        mesh,
        tuple(refined.get(axis, REPLICATE) for axis in mesh.axes),
        requires_grad=requires_grad,
    )
