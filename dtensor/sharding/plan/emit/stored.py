"""Buckets of gradients and parameters that are stored split, as steps of a plan.

    scatter_early(emitter, inputs)     reduce_scatter in the backward, at levels 2 and 3
    regather(emitter, inputs, grads)   all_gather of updated slices, at levels 1 and 2
    filled(items, sizes)               items in buckets of at most 32 MiB

A gradient is scattered as soon as those of its layer are there, so that whole gradients of one
layer are alive at a time. One that is not pending over the axis takes the ordinary way at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from dtensor.sharding.plan.passes.gather_stored import layer_of
from dtensor.sharding.plan.passes.precision import widened
from dtensor.sharding.plan.plan import PlannedInput, PlannedOutput
from dtensor.sharding.plan.steps import Bucket, Regather, results_of
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial

if TYPE_CHECKING:
    from dtensor.sharding.plan.emit.emitter import Copy, Emitter

BUCKET_BYTES = 32 * 2**20
T = TypeVar("T")


def filled(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """The items in order, in buckets of at most BUCKET_BYTES, or of one item that is larger."""
    buckets: list[list[T]] = []
    size = 0
    for item, nbytes in zip(items, sizes, strict=True):
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += nbytes
    return buckets


def scatter_early(
    e: Emitter, inputs: Mapping[str, PlannedInput]
) -> dict[tuple[str, int, str], Copy]:
    """Reduce-scatter gradients within the backward; by (value, stage, parameter), the shards."""
    if e.request.zero is None or e.request.zero[1] < 2:
        return {}
    axis = e.request.zero[0]
    made = {name: at for at, step in enumerate(e.steps) for name, _ in results_of(step)}
    groups: dict[tuple[object, ...], list[tuple[str, Copy, Move, str]]] = {}
    for output in e.request.flow.outputs:
        item = inputs.get(str(output.of))
        if output.kind != "gradient" or item is None or item.stored is None:
            continue
        copy = next((c for c in e.copies[output.value] if c.stage == output.stage), None)
        if copy is None or copy.name not in made or not _pends(copy, axis):
            continue
        shard = item.stored.placement(axis)
        move = Move("reduce_scatter", axis, copy.spec, copy.spec.with_placements(**{axis: shard}))
        (move,) = widened([move]) if e.request.training is not None else [move]
        key = (layer_of(item.label), output.stage, copy.spec.dtype)
        groups.setdefault(key, []).append((output.value, copy, move, item.label))
    after: dict[int, list[Bucket]] = {}
    found: dict[tuple[str, int, str], Copy] = {}
    for members in groups.values():
        members.sort(key=lambda m: made[m[1].name])
        for bucket in filled(members, [m[2].src.max_local_nbytes for m in members]):
            results = tuple(e.fresh(f"{copy.name}_scattered") for _, copy, _, _ in bucket)
            first = bucket[0][1]
            step = Bucket(
                name=e.fresh(f"gradients_{axis}"),
                results=results,
                operands=tuple(copy.name for _, copy, _, _ in bucket),
                moves=tuple(move for _, _, move, _ in bucket),
                axis=axis,
                stage=first.stage,
                of=tuple(label for *_, label in bucket),
                phase="backward",
            )
            after.setdefault(max(made[c.name] for _, c, _, _ in bucket), []).append(step)
            for name, (value, copy, move, label) in zip(results, bucket, strict=True):
                found[value, copy.stage, label] = e.scattered(copy, name, move.dst)
    e.steps[:] = [
        step for at, made_at in enumerate(e.steps) for step in (made_at, *after.get(at, ()))
    ]
    return found


def _pends(copy: Copy, axis: str) -> bool:
    """Whether the value is a sum over the axis that every microbatch's backward adds to."""
    summed = copy.spec.placement(axis) == Partial("sum") and copy.phase == "backward"
    in_time = MICROBATCH_AXIS not in copy.spec.mesh.axes or isinstance(
        copy.spec.placement(MICROBATCH_AXIS), Partial
    )
    return summed and in_time


def regather(
    e: Emitter, inputs: Mapping[str, PlannedInput], gradients: Sequence[PlannedOutput]
) -> None:
    """Slices that ranks updated, gathered: once for stages that share a parameter and a rank."""
    request = e.request
    if request.zero is None or request.zero[1] > 2:
        return
    axis = request.zero[0]
    ranks = request.stage_ranks
    groups: dict[tuple[object, ...], list[tuple[PlannedInput, Move, int]]] = {}
    seen: set[tuple[str, int]] = set()
    for output in gradients:
        item = inputs[str(output.of)]
        if item.stored is None:
            continue
        for stage, _ in output.values:
            if (item.name, ranks[stage]) not in seen:
                seen.add((item.name, ranks[stage]))
                move = Move("all_gather", axis, item.stored, item.spec)
                groups.setdefault((stage, item.spec.dtype), []).append((item, move, stage))
    for members in groups.values():
        for bucket in filled(members, [move.dst.max_local_nbytes for _, move, _ in members]):
            e.steps.append(
                Regather(
                    name=e.fresh(f"parameters_{axis}"),
                    inputs=tuple(item.name for item, _, _ in bucket),
                    moves=tuple(move for _, move, _ in bucket),
                    axis=axis,
                    stage=bucket[0][2],
                    of=tuple(item.label for item, _, _ in bucket),
                )
            )
