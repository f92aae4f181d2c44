"""Gradients and updates of parameters that are stored split: by ZeRO, or by a misaligned pin.

    mm(x, grad)          grad_w            f32[64,16]{sum@dp}
    reduce_scatter       grad_w_scattered  f32[64@dp,16]        in the backward, layer by layer

A gradient that several ZeRO axes split is sliced over the axes on which it is replicated, then
reduce-scattered over one axis after the other, so that each sends a fraction of the bytes before.

At ZeRO levels 2 and 3, and for misaligned pins, the gradients of a layer are split within the
backward as soon as they exist, so that unsplit gradients of only one layer are alive at a time. At
level 1 they are reduce-scattered after the last microbatch (emit.py). At levels 1 and 2, the
updated slices of parameters are gathered at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtensor.sharding.plan.emit.values import Copy, Emitter
from dtensor.sharding.plan.precision import reduce_in_float32
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import Redistribute, Step, fill_buckets
from dtensor.sharding.plan.storage import layer_of
from dtensor.sharding.redistribute.moves import Move, move_kind
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Partial
from dtensor.sharding.spec.spec import TensorSpec


def scattering_moves(
    request: Request, item: PlannedInput, gradient: TensorSpec
) -> tuple[Move, ...]:
    """Return the moves that split a gradient over the axes that split the state of its parameter,
    if there are several or if one rank owns the parameter; () if there is one, because the cheapest
    path then has a fixed order of sums."""
    axes = [a for a in request.scatter_order(gradient.mesh.axes) if a in item.state_axes]
    path: list[Move] = []
    for kind in ("slice", "reduce_scatter") if len(axes) > 1 or item.owned else ():
        for axis in axes:
            src = path[-1].dst if path else gradient
            placement = item.state.placement(axis)
            if move_kind(src.placement(axis), placement) == kind:
                path.append(Move(kind, axis, src, src.with_placements(**{axis: placement})))
    return tuple(path)


def scatter_early(
    e: Emitter, inputs: Mapping[str, PlannedInput]
) -> dict[tuple[str, int, str], Copy]:
    """Emit steps within the backward that split gradients as they are stored. A gradient that is
    pending over an axis is reduce-scattered; a gradient of a misaligned pin that is replicated on
    the axis is sliced. Returns (value, stage, parameter) -> the shard."""
    zero = e.request.zero
    axes_of = {item.label: {m.axis for m in item.misaligned} for item in inputs.values()}
    for label, item in inputs.items():
        if zero is not None and zero.level >= 2:
            axes_of[label].update(a for a in item.state_axes if a in zero.axes)
    scattered: dict[tuple[str, int, str], Copy] = {}
    order = e.request.scatter_order(e.mesh.axes)
    for axis in order if zero is not None and len(zero.axes) > 1 else ():
        # slices come first, so that the reduce_scatters send fewer bytes
        items = {label: item for label, item in inputs.items() if axis in axes_of[label]}
        _split_over(e, axis, items, scattered, scatter=False)
    for axis in order:
        items = {label: item for label, item in inputs.items() if axis in axes_of[label]}
        if items:
            _split_over(e, axis, items, scattered)
    return scattered


def _split_over(
    e: Emitter,
    axis: str,
    inputs: Mapping[str, PlannedInput],
    scattered: dict[tuple[str, int, str], Copy],
    *,
    scatter: bool = True,
) -> None:
    """Split the gradients of ``inputs`` over one axis; record the shards in ``scattered``.
    ``scatter``: whether to split pending gradients too."""
    producer_index = {name: at for at, step in enumerate(e.steps) for name in step.gives}
    new_steps: dict[int, list[Step]] = {}  # index of a step -> steps to insert after it
    # key of a message -> (value, its copy, move, label of the parameter) of its members
    groups: dict[tuple[object, ...], list[tuple[str, Copy, Move, str]]] = {}
    for output in e.request.flow.outputs:
        item = inputs.get(str(output.of))
        if output.kind != "gradient" or item is None:
            continue
        at = (output.value, output.stage, item.label)
        copy = scattered.get(at) or next(iter(e.copies_on(output.value, output.stage)), None)
        if copy is None or copy.name not in producer_index or not _is_accumulated(copy):
            continue
        dst = copy.spec.with_placements(**{axis: item.state.placement(axis)})
        if copy.spec.placement(axis) == Partial("sum") and scatter:
            move = Move("reduce_scatter", axis, copy.spec, dst)
            (move,) = reduce_in_float32([move]) if e.request.training is not None else [move]
            # gradients with float32 parts, as of biases, are small: all layers share a message
            in_float32 = output.value in e.float32_parts
            layer = "" if in_float32 else layer_of(item.label)
            key = (in_float32, layer, output.stage, copy.spec.dtype)
            groups.setdefault(key, []).append((output.value, copy, move, item.label))
        elif copy.spec.placement(axis) == REPLICATE and (
            item.misaligned or len(item.state_axes) > 1
        ):
            scattered[at] = replace(copy, name=e.fresh(f"{copy.name}_sliced"), spec=dst)
            step = Redistribute(
                results=(scattered[at].name,),
                operands=(copy.name,),
                moves=(Move("slice", axis, copy.spec, dst),),
                phase="backward",
                stage=copy.stage,
                why=f"{item.label} is stored as {item.state}",
            )
            new_steps.setdefault(producer_index[copy.name], []).append(step)
    for members in groups.values():  # insert each message after the last gradient that it sends
        members.sort(key=lambda m: producer_index[m[1].name])
        for bucket in fill_buckets(members, [m[2].src.max_local_nbytes for m in members]):
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
            last = max(producer_index[c.name] for _, c, _, _ in bucket)
            new_steps.setdefault(last, []).append(step)
            for name, (value, copy, move, label) in zip(results, bucket, strict=True):
                scattered[value, copy.stage, label] = replace(copy, name=name, spec=move.dst)
    e.steps[:] = [
        step for at, old_step in enumerate(e.steps) for step in (old_step, *new_steps.get(at, ()))
    ]


def _is_accumulated(copy: Copy) -> bool:
    """Return whether the value is made in the backward and summed over microbatches, if there are
    any."""
    in_each_microbatch = MICROBATCH_AXIS not in copy.spec.mesh.axes or isinstance(
        copy.spec.placement(MICROBATCH_AXIS), Partial
    )
    return copy.phase == "backward" and in_each_microbatch


def gather_updated(
    e: Emitter, inputs: Mapping[str, PlannedInput], gradients: Sequence[PlannedOutput]
) -> None:
    """Emit the gathers of the slices, or of the whole parameters, that ranks updated. Stages on one
    rank that share a parameter gather it once."""
    gathered: list[str] = []
    for axis in reversed(e.request.scatter_order(e.mesh.axes)):
        _gather_over(e, axis, gathered, inputs, gradients)
        gathered.append(axis)


def _gather_over(
    e: Emitter,
    axis: str,
    before: Sequence[str],
    inputs: Mapping[str, PlannedInput],
    gradients: Sequence[PlannedOutput],
) -> None:
    """Emit the gathers of updated slices over one axis. ``before``: the axes over which they are
    gathered already."""
    ranks = e.request.stage_ranks
    groups: dict[tuple[object, ...], list[tuple[PlannedInput, Move, int]]] = {}
    gathered: set[tuple[str, int]] = set()
    for output in gradients:
        item = inputs[str(output.of)]
        if item.updated.placement(axis) == item.held.placement(axis):
            continue
        whole = {a: item.held.placement(a) for a in before}
        src = item.updated.with_placements(**whole)
        dst = src.with_placements(**{axis: item.held.placement(axis)})
        for stage, _ in output.values:
            if (item.name, ranks[stage]) not in gathered:
                gathered.add((item.name, ranks[stage]))
                move = Move("all_gather", axis, src, dst)
                groups.setdefault((stage, item.spec.dtype), []).append((item, move, stage))
    for members in groups.values():
        for bucket in fill_buckets(members, [move.dst.max_local_nbytes for _, move, _ in members]):
            is_whole = all(move.dst == item.held for item, move, _ in bucket)
            e.steps.append(
                Redistribute(
                    bucket=e.fresh(f"parameters_{axis}"),
                    results=(),
                    operands=tuple(item.name for item, _, _ in bucket),
                    moves=tuple(move for _, move, _ in bucket),
                    phase="optimizer",
                    stage=bucket[0][2],
                    into=() if is_whole else tuple(item.held for item, _, _ in bucket),
                    of=tuple(item.label for item, _, _ in bucket),
                )
            )
