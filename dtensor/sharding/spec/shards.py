"""Shards: cut a rank's shard out of a global tensor, and assemble a global tensor from shards.

    shard_of(x, parse("f32[8@tp,16]", Mesh(tp=2)), {"tp": 1})    # x[4:8]
    assemble([x0, x1], spec)                                     # x again
    block(x, (((0, 2),), ((0, 4),)))                             # x[0:2, 0:4]
    given(src, dst, {"tp": 0}, {"tp": 1})       # the block of rank 0's shard that rank 1 needs

A `Where` names a block: a tuple of half-open intervals for each dim, of global indices or of
positions in a local tensor. The shard of a pending value is the value at coordinate 0 of the axis
and the reduction's identity elsewhere (0 for a sum); for max and min it is the value everywhere.
These functions do not communicate. Generated code on actors calls `block`, `join` and `write`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import fold, rest_of
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Intervals,
    Partial,
    intersect,
    length,
    merge_adjacent,
)
from dtensor.sharding.spec.spec import TensorSpec

Where = tuple[Intervals, ...]


def shard_of(x: torch.Tensor, spec: TensorSpec, coordinates: Mapping[str, int]) -> torch.Tensor:
    """Return the shard of global ``x`` that the rank at ``coordinates`` holds. It is contiguous and
    shares no memory with ``x``."""
    _refuse_ragged(spec)
    local = block(x, held_indices(spec, coordinates))
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial) and coordinates[axis] > 0:
            local = rest_of(local, placement.op)
    return local.contiguous().clone() if local.data_ptr() == x.data_ptr() else local.contiguous()


def shard_to_copy(
    x: torch.Tensor, spec: TensorSpec, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """Return the shard of global ``x`` that the rank at ``coordinates`` holds, in the memory of
    ``x`` if possible. The caller must copy it before ``x`` changes."""
    if any(isinstance(placement, Partial) for placement in spec.placements):
        return shard_of(x, spec, coordinates)
    return block(x, held_indices(spec, coordinates)).contiguous()


def assemble(shards: Sequence[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """Return the global tensor, from the shards of all ranks of ``spec.mesh`` in rank order.

    A pending value is reduced one axis at a time, in mesh order, by a left fold in rank order.
    """
    return assemble_at(dict(enumerate(shards)), spec)


def assemble_at(shards: Mapping[int, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """Return the global tensor from {rank: shard}. Only the ranks that hold the value (``spec.on``)
    are needed. A pending value is reduced one axis at a time, by a left fold in rank order."""
    _refuse_ragged(spec)
    if set(spec.placements) <= {REPLICATE}:
        return shards[max(shards)].clone(memory_format=torch.contiguous_format)
    mesh = spec.mesh
    pieces = dict(shards)
    current = spec
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Partial):
            for rank in sorted(shards):
                if mesh.coordinates(rank)[axis] == 0:
                    group = mesh.group(rank, axis)
                    total = fold([pieces[r] for r in group], placement.op)
                    pieces.update(dict.fromkeys(group, total))
            current = current.with_placements(**{axis: REPLICATE})
    result = next(iter(shards.values())).new_empty(spec.shape)
    for rank in sorted(shards):
        if pieces[rank].numel():
            write(result, pieces[rank], held_indices(current, mesh.coordinates(rank)))
    return result


def _refuse_ragged(spec: TensorSpec) -> None:
    if spec.ragged is not None:
        raise PlanningError(
            f"rows of experts that are split, {spec}, are in no global order.\n"
            "fix: dt.from_experts(rows, route) first"
        )


# -- the indices of shards -------------------------------------------------------------------------


def held_indices(spec: TensorSpec, at: Mapping[str, int]) -> Where:
    """Return the global indices that the rank at these coordinates holds."""
    return tuple(spec.intervals(dim, at) for dim in range(len(spec.shape)))


def overlap(
    src: TensorSpec, dst: TensorSpec, sender: Mapping[str, int], receiver: Mapping[str, int]
) -> Where:
    """Return the global indices that ``sender`` holds under src and ``receiver`` under dst."""
    return tuple(map(intersect, held_indices(src, sender), held_indices(dst, receiver)))


def positions(shard: Sequence[Intervals], wanted: Sequence[Intervals]) -> Where:
    """Return the positions of the ``wanted`` global indices in a local tensor that holds the global
    indices ``shard``; both are intervals for each dim. Indices that it does not hold are left
    out."""
    result: list[Intervals] = []
    for shard_intervals, wanted_intervals in zip(shard, wanted, strict=True):
        intervals: list[tuple[int, int]] = []
        offset = 0
        for lo, hi in shard_intervals:
            both = intersect(((lo, hi),), wanted_intervals)
            intervals += [(a - lo + offset, b - lo + offset) for a, b in both]
            offset += hi - lo
        result.append(merge_adjacent(intervals))
    return tuple(result)


def given(
    src: TensorSpec, dst: TensorSpec, sender: Mapping[str, int], receiver: Mapping[str, int]
) -> Where:
    """Return the positions in the sender's shard of the block that the receiver needs."""
    return positions(held_indices(src, sender), overlap(src, dst, sender, receiver))


def taken(
    src: TensorSpec, dst: TensorSpec, sender: Mapping[str, int], receiver: Mapping[str, int]
) -> Where:
    """Return the positions in the receiver's shard of the block that the sender holds."""
    return positions(held_indices(dst, receiver), overlap(src, dst, sender, receiver))


def shape_of(where: Where) -> tuple[int, ...]:
    """Return the shape of the block that ``where`` names."""
    return tuple(map(length, where))


# -- blocks ----------------------------------------------------------------------------------------


def block(x: torch.Tensor, where: Where) -> torch.Tensor:
    """Return the block of ``x``; a view of ``x`` if each dim has one interval."""
    for dim, intervals in enumerate(where):
        if intervals == ((0, x.shape[dim]),):
            continue
        if len(intervals) == 1:
            lo, hi = intervals[0]
            x = x.narrow(dim, lo, hi - lo)
        elif not intervals:
            x = x.narrow(dim, 0, 0)
        else:
            x = torch.cat([x.narrow(dim, lo, hi - lo) for lo, hi in intervals], dim)
    return x


def join(pieces: Sequence[torch.Tensor], shape: Sequence[int], *wheres: Where) -> torch.Tensor:
    """Return a tensor of ``shape`` with ``pieces[i]`` at the global indices ``wheres[i]``."""
    partial = [
        dim for dim, size in enumerate(shape) if any(where[dim] != ((0, size),) for where in wheres)
    ]
    if len(partial) == 1:
        runs = _runs(pieces, partial[0], [where[partial[0]] for where in wheres])
        if runs:
            return torch.cat(runs, partial[0])
    result = pieces[0].new_empty(list(shape))
    for piece, where in zip(pieces, wheres, strict=True):
        if piece.numel():
            write(result, piece, where)
    return result


def _runs(
    pieces: Sequence[torch.Tensor], dim: int, held: Sequence[Intervals]
) -> list[torch.Tensor]:
    """Return the parts of the pieces in the order of the indices of ``dim``, for `torch.cat`; none
    if the parts do not follow each other from index 0. ``held``: the intervals of each piece."""
    runs: list[tuple[int, int, torch.Tensor]] = []
    for piece, intervals in zip(pieces, held, strict=True):
        offset = 0
        for lo, hi in intervals:
            part = piece if len(intervals) == 1 else piece.narrow(dim, offset, hi - lo)
            runs.append((lo, hi, part))
            offset += hi - lo
    runs.sort(key=lambda run: run[0])
    follow = all(hi == lo for (_, hi, _), (lo, _, _) in itertools.pairwise(runs))
    return [part for _, _, part in runs] if follow and runs and runs[0][0] == 0 else []


def write(
    result: torch.Tensor, piece: torch.Tensor, where: Where, skip: torch.Tensor | None = None
) -> None:
    """Copy ``piece`` into the block ``where`` of ``result``; not if ``skip``, a bool[], is True."""
    several = [dim for dim, intervals in enumerate(where) if len(intervals) != 1]
    if len(several) < 2:
        for dim, intervals in enumerate(where):
            if dim not in several:
                lo, hi = intervals[0]
                result = result.narrow(dim, lo, hi - lo)
        if not several:
            copy(result, piece, skip)
            return
        offset, dim = 0, several[0]
        for lo, hi in where[dim]:
            copy(result.narrow(dim, lo, hi - lo), piece.narrow(dim, offset, hi - lo), skip)
            offset += hi - lo
        return
    index: list[torch.Tensor] = []
    for dim, intervals in enumerate(where):
        positions = torch.cat([torch.arange(lo, hi) for lo, hi in intervals])
        shape = [-1 if d == dim else 1 for d in range(len(where))]
        index.append(positions.to(result.device).view(shape))
    at = tuple(index)
    result[at] = piece if skip is None else unless(skip, result[at], piece)


def copy(x: torch.Tensor, source: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Copy ``source`` into x, which it broadcasts to; not if ``skip``, a bool[], is True."""
    if skip is None:
        x.copy_(source)
    elif _has_8_bits(x):
        x.copy_(unless(skip, x, source))
    else:
        torch.where(skip, x, source.to(x.dtype), out=x)


def unless(skip: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``new`` in the dtype of ``old``, or the bits of ``old`` if ``skip``, a bool[], is
    True."""
    new = new.to(old.dtype)
    if _has_8_bits(old):  # torch documents no `where` for 8-bit floats
        bits = torch.where(skip, old.view(torch.uint8), new.view(torch.uint8))
        return bits.view(old.dtype)
    return torch.where(skip, old, new)


def _has_8_bits(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize == 1
