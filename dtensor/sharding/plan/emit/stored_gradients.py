"""Gradients and updates of parameters that are stored split: ZeRO, and pins that are storage.

    mm(x, grad)          grad_w            f32[64,16]{sum@dp}
    reduce_scatter       grad_w_scattered  f32[64@dp,16]        in the backward, layer by layer

At ZeRO's levels 2 and 3 gradients are scattered within the backward, as soon as those of a layer
are there, so that whole gradients of one layer are alive at a time; at level 1 after the last
microbatch, as any output is. Those of a parameter whose pin does not line up with the program are
split within the backward too: scattered where they are sums over the axis, cut where all ranks have
the whole. One that is neither takes the ordinary way at the end (emit.py). At 1 and 2 the updated
slices are gathered last. Gradients of 16 bits whose parts are float32 (precision.py), such as those
of biases, are small: those of all layers are scattered together, at the end of the backward.

Not here: when parameters are gathered (passes/gather_stored.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtensor.sharding.plan.emit.values import Copy, Emitter
from dtensor.sharding.plan.precision import widened
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput
from dtensor.sharding.plan.steps import Redistribute, Step, filled
from dtensor.sharding.plan.storage import layer_of
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Partial


def scatter_early(
    e: Emitter, inputs: Mapping[str, PlannedInput]
) -> dict[tuple[str, int, str], Copy]:
    """Split gradients within the backward as they are stored: cut what is whole on an axis, and
    reduce-scatter what is a sum over it. By (value, stage, parameter), the shards."""
    zero = e.request.zero
    split = {item.label: {m.axis for m in item.misaligned} for item in inputs.values()}
    for label, item in inputs.items():
        if zero is not None and zero[1] >= 2 and item.stored is not None:
            split[label].add(zero[0])
    scattered: dict[tuple[str, int, str], Copy] = {}
    for axis in e.mesh.axes:
        items = {label: item for label, item in inputs.items() if axis in split[label]}
        if items:
            _scatter_over(e, axis, items, scattered)
    return scattered


def _scatter_over(
    e: Emitter,
    axis: str,
    inputs: Mapping[str, PlannedInput],
    scattered: dict[tuple[str, int, str], Copy],
) -> None:
    maker_of = {name: at for at, step in enumerate(e.steps) for name in step.gives}
    after: dict[int, list[Step]] = {}
    groups: dict[tuple[object, ...], list[tuple[str, Copy, Move, str]]] = {}
    for output in e.request.flow.outputs:
        item = inputs.get(str(output.of))
        if output.kind != "gradient" or item is None:
            continue
        at = (output.value, output.stage, item.label)
        copy = scattered.get(at) or next(iter(e.on(output.value, output.stage)), None)
        if copy is None or copy.name not in maker_of or not _of_backward(copy):
            continue
        dst = copy.spec.with_placements(**{axis: item.state.placement(axis)})
        if copy.spec.placement(axis) == Partial("sum"):
            move = Move("reduce_scatter", axis, copy.spec, dst)
            (move,) = widened([move]) if e.request.training is not None else [move]
            # sums that are left in float32 are small: those of all layers share a message
            is_wide = output.value in e.wide
            layer = "" if is_wide else layer_of(item.label)
            key = (is_wide, layer, output.stage, copy.spec.dtype)
            groups.setdefault(key, []).append((output.value, copy, move, item.label))
        elif copy.spec.placement(axis) == REPLICATE and item.misaligned:
            scattered[at] = replace(copy, name=e.fresh(f"{copy.name}_sliced"), spec=dst)
            step = Redistribute(
                results=(scattered[at].name,),
                operands=(copy.name,),
                moves=(Move("slice", axis, copy.spec, dst),),
                phase="backward",
                stage=copy.stage,
                why=f"{item.label} is stored as {item.state}",
            )
            after.setdefault(maker_of[copy.name], []).append(step)
    for members in groups.values():
        members.sort(key=lambda m: maker_of[m[1].name])
        for bucket in filled(members, [m[2].src.max_local_nbytes for m in members]):
            results = tuple(e.fresh(f"{copy.name}_scattered") for _, copy, _, _ in bucket)
            first = bucket[0][1]
            step = Redistribute(
                bucket=e.fresh(f"gradients_{axis}"),
                results=results,
                operands=tuple(copy.name for _, copy, _, _ in bucket),
                moves=tuple(move for _, _, move, _ in bucket),
                stage=first.stage,
                of=tuple(label for *_, label in bucket),
                phase="backward",
            )
            after.setdefault(max(maker_of[c.name] for _, c, _, _ in bucket), []).append(step)
            for name, (value, copy, move, label) in zip(results, bucket, strict=True):
                scattered[value, copy.stage, label] = replace(copy, name=name, spec=move.dst)
    e.steps[:] = [
        step for at, made_at in enumerate(e.steps) for step in (made_at, *after.get(at, ()))
    ]


def _of_backward(copy: Copy) -> bool:
    """Whether every microbatch's backward adds the value to a sum."""
    in_time = MICROBATCH_AXIS not in copy.spec.mesh.axes or isinstance(
        copy.spec.placement(MICROBATCH_AXIS), Partial
    )
    return copy.phase == "backward" and in_time


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
                move = Move("all_gather", axis, item.stored, item.base)
                groups.setdefault((stage, item.spec.dtype), []).append((item, move, stage))
    for members in groups.values():
        for bucket in filled(members, [move.dst.max_local_nbytes for _, move, _ in members]):
            e.steps.append(
                Redistribute(
                    bucket=e.fresh(f"parameters_{axis}"),
                    results=(),
                    operands=tuple(item.name for item, _, _ in bucket),
                    moves=tuple(move for _, move, _ in bucket),
                    phase="optimizer",
                    stage=bucket[0][2],
                    of=tuple(item.label for item, _, _ in bucket),
                )
            )
