"""Questions whether placements fit a tensor and an axis of a mesh.

    fits(Shard(0, unit=16), 40)                    # False: 40 is no multiple of 16
    misfit(Shard(0, unit=16), 40, "dim 0 of 40", 2)
    # ("dim 0 of 40 is not a multiple of unit=16", "unit=20")

`TensorSpec` raises PlanningError for a placement that does not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.numerics import REDUCTIONS
from dtensor.sharding.spec.placements import Partial, Placement, Shard, block_sizes, units_of


def fits(shard: Shard, size: int, num: int | None = None) -> bool:
    """Return whether the shard's blocks, unit and sizes fit a dim of ``size``, and the sizes an
    axis of ``num`` ranks."""
    if shard.sizes is not None:
        return sum(shard.sizes) == size and num in (None, len(shard.sizes))
    blocks = shard.blocks
    filled = sum(blocks) == size if isinstance(blocks, tuple) else size % blocks == 0
    return filled and not any(block % shard.unit for block in block_sizes(blocks, size))


def misfit(shard: Shard, size: int, dim: str, num: int) -> tuple[str, str]:
    """Return (why the shard does not fit a dim of ``size`` and an axis of ``num`` ranks, the
    arguments to state instead). ``dim`` is the name of the dim in the text. The shard must not
    fit."""
    blocks, unit, sizes = shard.blocks, shard.unit, shard.sizes
    if sizes is not None:
        wrong_sum = f"sizes={sizes} add up to {sum(sizes)}, {dim}"
        wrong_number = f"sizes={sizes} has length {len(sizes)}, and the axis has {num} ranks"
        ends = [min(sum(sizes[:i]), size) for i in range(num)] + [size]
        fitting = tuple(b - a for a, b in itertools.pairwise(ends))
        return wrong_number if len(sizes) != num else wrong_sum, f"sizes={fitting}"
    if isinstance(blocks, tuple) and sum(blocks) != size:
        last = size - sum(blocks[:-1])
        fixed: int | tuple[int, ...] = (*blocks[:-1], last) if last > 0 else 1
        return f"blocks={blocks} add up to {sum(blocks)}, {dim}", f"blocks={fixed}"
    if isinstance(blocks, int) and size % blocks:
        nearest = _nearest_divisor(size, blocks)
        return f"{dim} is not {blocks} equal blocks", f"blocks={nearest}, or the sizes of each"
    block = next(block for block in block_sizes(blocks, size) if block % unit)
    nearest = _nearest_divisor(block, unit)
    whole = "" if block == size else f", in blocks of {block},"
    return f"{dim}{whole} is not a multiple of unit={unit}", f"unit={nearest}"


def check_zigzag(stated: Shard, shard: Shard, size: int, axis: str, num: int) -> None:
    """Raise PlanningError if a dim of ``size`` is too short for a zigzag over an axis of ``num``
    ranks. ``shard`` is ``stated`` with the blocks that the axes before it leave."""
    units = units_of(shard, size)
    if not shard.zigzag or units >= 2 * num:
        return
    cut = f"dim {shard.dim}" if shard.blocks == 1 else f"a block of dim {shard.dim}"
    words = "elements" if shard.unit == 1 else f"units of {shard.unit}"
    raise PlanningError(
        f"{axis}={stated!r} cuts {cut} into {2 * num} pieces, 2 for each of {num} ranks, but {cut} "
        f"has only {units} {words}.\n"
        f"fix: {axis}=dt.{replace(stated, zigzag=False)!r}, or at least {2 * num} {words}"
    )


def splits_rows(num_dims: int, placements: Sequence[Placement]) -> bool:
    """Return whether these placements of a tensor are contradictory: one is pending under a
    reduction that needs a whole last dim (softmax), and another one splits that dim."""
    if not any(isinstance(p, Partial) and REDUCTIONS[p.op].unit > 1 for p in placements):
        return False
    return any(isinstance(p, Shard) and p.dim == num_dims - 1 for p in placements)


def _nearest_divisor(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - wanted), d))
