"""The end of a step on one rank: sums of tied gradients, the norm, the update.

These are lowered like other steps, but what they do is fixed: the norm counts every element of
every gradient once (a replica only where its coordinate is 0, a tied parameter only on its first
stage), folded over each axis of the mesh in turn; the update is one call of the rank's torch.optim
optimizer, on what the rank holds of each parameter or, where state is stored split, on its slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Buffer, Collective, Wait
from dtensor.numerics import is_narrow
from dtensor.runtime.lower import buckets
from dtensor.runtime.shard_optimizer import ShardOptimizer, clip_coefficient, sum_of_squares
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.plan.steps import Bucket, Norm, TieSum, Update
from dtensor.sharding.redistribute.moves import positions
from dtensor.sharding.spec.blocks import Where, block, write
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Replicate
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank import RankLowering


def tie_sum(rank: RankLowering, step: TieSum) -> None:
    """The sum over the stages that share a parameter, in order of stages."""
    mine = [i for i, stage in enumerate(step.stages) if stage in rank.stages]
    hosts = tuple(dict.fromkeys(rank.peer(stage) for stage in step.stages))
    first = mine[0]
    operands = _addends(rank, step, mine)
    total = operands[0]
    if len(mine) > 1:  # several of the stages are this rank's: their sum is local
        segment = rank.segment(None)
        total = f"{step.results[first]}_here"
        rank.names(segment, (*operands, total), None)
        segment.code.line(f"{total} = {' + '.join(operands)}", operands, [total], None)
        rank.record(total, step.spec, None)
    if len(hosts) > 1:
        _sum_over(rank, step, hosts, total, step.results[first])
        total = step.results[first]
    for i in mine:
        if step.results[i] != total:
            segment = rank.segment(None)
            rank.names(segment, (total, step.results[i]), None)
            segment.code.line(f"{step.results[i]} = {total}", [total], [step.results[i]], None)
        rank.record(step.results[i], step.spec, None)


def _addends(rank: RankLowering, step: TieSum, mine: Sequence[int]) -> list[str]:
    """The gradients of this rank's stages; those of 16-bit parameters in float32."""
    operands = [step.operands[i] for i in mine]
    parameter = next(i for i in rank.plan.inputs if i.label == step.of)
    if parameter.spec.dtype == step.spec.dtype:
        return operands
    segment = rank.segment(None)
    dtype = segment.code.literal(step.spec.dtype, ())
    for operand in operands:
        wide = f"{operand}_wide"
        rank.names(segment, (operand, wide), None)
        segment.code.line(f"{wide} = {operand}.to({dtype})", [operand], [wide], None)
        rank.record(wide, step.spec, None)
    return [f"{operand}_wide" for operand in operands]


def _sum_over(
    rank: RankLowering, step: TieSum, hosts: tuple[int, ...], operand: str, result: str
) -> None:
    buffer = Buffer(step.spec.local_shape(rank.at(None)), step.spec.dtype)
    label = f"optimizer: all_reduce the gradients of {step.of} over stages {step.stages}"
    rank.start(
        Collective(
            "all_reduce",
            hosts,
            (rank.value(operand, None),),
            (result,),
            (buffer,),
            (buffer,),
            "sum",
            f"tied {step.of}",
            label=label,
        )
    )
    rank.start(Wait((result,), label=label))


def counts(rank: RankLowering, spec: TensorSpec) -> bool:
    """Whether this rank is the one among replicas whose copy enters the norm."""
    here = rank.at(None)
    return all(
        here[axis] == 0
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Replicate) and axis != MICROBATCH_AXIS
    )


def norm(rank: RankLowering, step: Norm) -> None:
    """Sum of squares here, folded over each axis of the mesh, then the clip coefficient."""
    counted = [
        value
        for (stage, value, _), spec in zip(step.operands, step.specs, strict=True)
        if stage in rank.stages and counts(rank, spec)
    ]
    segment = rank.segment(None)
    rank.names(segment, counted, None)
    name = f"{step.result}_squares"
    segment.table[name] = name
    segment.code.apply(sum_of_squares, "sum_of_squares", counted, name, rank.device, packed=True)
    rank.nbytes[name] = 4
    buffer = (Buffer((), torch.float32),)
    for axis, num in rank.plan.mesh.shape.items():
        if num == 1:
            continue
        reduced = f"{name}_{axis}"
        label = f"optimizer: all_reduce the norm over {axis}"
        group = rank.plan.mesh.group(rank.rank, axis)
        rank.start(
            Collective(
                "all_reduce", group, (name,), (reduced,), buffer, buffer, "sum", axis, label=label
            )
        )
        rank.start(Wait((reduced,), label=label))
        name = reduced
    segment = rank.segment(None)
    pair = (step.result, f"{step.result}_clip")
    for made in (name, *pair):
        segment.table[made] = made
    function = segment.code.bind("clip_coefficient", clip_coefficient)
    segment.code.line(
        f"{pair[0]}, {pair[1]} = {function}({name}, {step.max_norm!r})", [name], pair, None
    )
    rank.nbytes.update(dict.fromkeys(pair, 4))


def snapshot(rank: RankLowering) -> None:
    """Copy the results: one may be a view of state that the step is about to change."""
    segment = rank.segment(None)
    for output in rank.plan.outputs:
        for stage, value in output.values[:1] if output.kind == "result" else ():
            if stage in rank.stages:
                name = f"result_{output.of}_copy"
                rank.names(segment, (value,), None)
                segment.table[name] = name
                segment.code.line(f"{name} = {value}.clone()", [value], [name], None)
                rank.nbytes[name] = rank.nbytes.get(segment.table[value], 0)
                rank.snapshots[f"result {output.of}"] = name
    rank.close()


def mutate(rank: RankLowering) -> None:
    """Write the new contents of buffers that forward changed, before parameters change: the new
    contents may be a view of one. All are copied first: one may be another's old contents."""
    if not rank.writes:
        return
    inputs = {i.label: i.name for i in rank.plan.inputs}
    found = [
        (inputs[str(output.of)], value)
        for output in rank.plan.outputs
        if output.kind == "mutation"
        for stage, value in output.values
        if stage in rank.stages
    ]
    if not found:
        return
    rank.close()
    segment = rank.segment(None)
    for _, value in found:
        rank.names(segment, (value,), None)
        segment.code.line(f"{value}_new = {value}.clone()", [value], [f"{value}_new"], None)
        segment.table[f"{value}_new"] = f"{value}_new"
    for name, value in found:
        rank.names(segment, (name,), None)
        segment.code.line(f"{name}.copy_({value}_new)", [name, f"{value}_new"], (), None)
    segment.writes = tuple(segment.table[name] for name, _ in found)
    rank.close()


def update(rank: RankLowering) -> None:
    """One call that steps the rank's optimizer with all its gradients."""
    if rank.roles.optimizer is None:
        return
    every = [s for s in rank.plan.steps if isinstance(s, Update) and s.stage in rank.stages]
    updates = list({s.parameter: s for s in reversed(every)}.values())[::-1]  # once a rank
    inputs = {i.label: i for i in rank.plan.inputs}
    clip = next((f"{s.result}_clip" for s in rank.plan.steps if isinstance(s, Norm)), None)
    rank.close()
    rank.label = "update"
    segment = rank.segment(None)
    for step in updates:
        rank.price(segment, step)
    names = [inputs[s.parameter].name for s in updates]
    gradients = [s.gradient for s in updates]
    rank.names(segment, (*names, *gradients), None)
    segment.table.update({"optimizer": rank.roles.optimizer, "options": "options"})
    segment.writes = (rank.roles.optimizer, *(segment.table[name] for name in names))
    extra = [clip] if clip else []
    for name in extra:
        segment.table[name] = name
    parts = [_slice(rank, inputs[s.parameter], s) for s in updates]
    function = segment.code.bind("step_optimizer", step_optimizer)
    labels = segment.code.bind("labels", tuple(s.parameter for s in updates))
    reads = ["optimizer", "options", *parts, *gradients, *extra]
    segment.code.line(
        f"{function}(optimizer, options, {labels}, ({''.join(f'{n}, ' for n in parts)}), "
        f"({''.join(f'{g}, ' for g in gradients)}), {clip})",
        reads,
        (),
        None,
    )
    for step, name, part in zip(updates, names, parts, strict=True):
        if part != name:
            where = _where(rank, inputs[step.parameter], step)
            if any(len(intervals) > 1 for intervals in where):  # the slice is a copy
                bound = segment.code.bind("layout", where)
                written = segment.code.bind("write", write)
                segment.code.line(f"{written}({name}, {part}, {bound})", [name, part], (), None)
    rank.close()
    rank.label = "optimizer"
    for step in rank.plan.steps:
        if isinstance(step, Bucket) and step.in_place and step.stage in rank.stages:
            buckets.regather(rank, step)


def _where(rank: RankLowering, item: PlannedInput, step: Update) -> Where:
    """Where the elements that this rank updates stand in what it holds of the parameter."""
    here = rank.at(None)
    dims = range(len(step.spec.shape))
    return positions(
        [item.held.intervals(dim, here) for dim in dims],
        [step.spec.intervals(dim, here) for dim in dims],
    )


def _slice(rank: RankLowering, item: PlannedInput, step: Update) -> str:
    """The part of a parameter that this rank updates; a view where it is one block."""
    if step.spec == item.held:
        return item.name
    segment = rank.segment(None)
    part = f"{item.name}_part"
    segment.table[part] = part
    segment.code.apply(block, "block", [item.name], part, _where(rank, item, step))
    return part


def step_optimizer(
    optimizer: ShardOptimizer,
    options: tuple[dict[str, object], ...],
    labels: tuple[str, ...],
    shards: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    clip: torch.Tensor | None,
) -> None:
    """Runs on actors: scale the gradients by ``clip`` and step."""
    if clip is not None:
        wide = (g.float() if is_narrow(g.dtype) else g for g in gradients)
        gradients = tuple(g * clip.to(g.dtype) for g in wide)
    optimizer.step(
        dict(zip(labels, shards, strict=True)), options, dict(zip(labels, gradients, strict=True))
    )


def publish(rank: RankLowering, outputs: Mapping[str, str]) -> None:
    """Give the values that the program returns their output names."""
    rank.close()
    rank.label = "outputs"
    segment = rank.segment(None)
    for number, (name, value) in enumerate(outputs.items()):
        result = f"out{number}"
        read = f"value{number}"
        segment.table[read] = value
        segment.table[result] = name
        rank.nbytes[name] = rank.nbytes.get(value, 0)
        segment.code.line(f"{result} = {read}", [read], [result], None)
    rank.close()
