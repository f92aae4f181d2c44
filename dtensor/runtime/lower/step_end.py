"""Lowering of the end of a step: sums over microbatches, tied gradients, norm, commit.

    B0    total = grad_w                      # may be a view of a value that others read
    B1    total = total + grad_w              # a new tensor, which only the next sum reads
    B2    total = total.add_(grad_w)
    end   norm_squares_tp, vote.tp = all_reduce.sum(norm_squares, rank.vote) over (0, 1)
          commit vote.tp                      # all ranks agree that no call failed

Gradients are added in the order of the schedule. The norm counts each element of each gradient
once. Votes and the norm's sums of squares are reduced along each axis of the mesh in turn.
Updates are in updates.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Buffer, Commit, Label, Vote
from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower.code import ADDING, COPIES
from dtensor.runtime.lower.rank_builder import SKIP, RankBuilder
from dtensor.runtime.optimizer.gradient_norm import (
    Overflow,
    checked_squares,
    clip_divisor,
    sum_of_squares,
    unscaled_squares,
    unscaling_divisor,
)
from dtensor.sharding.plan.steps import (
    Accumulate,
    Norm,
    Redistribute,
    roots,
    updates_whole,
)
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Replicate
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.state_writes import StateWrites


SCALE = "scale of the loss"
"""The name of the input that holds the loss scale, in programs that scale the loss."""


def accumulate(b: RankBuilder, step: Accumulate, unshared_sums: set[str]) -> None:
    """Emit the addition of the current microbatch's value to its sum over microbatches. The last
    addition gets the plan's name of the sum. ``unshared_sums``: the sums that share their storage
    with no other value, so that they may be changed in place."""
    last = b.microbatch == b.plan.num_microbatches - 1
    segment = b.short_segment()
    total = step.result if last else f"{step.result}@{b.microbatch}"
    segment.table[step.result] = total
    previous = b.accumulated.get(step.result)
    if previous is None:
        text, op = f"{step.result} = {step.operand}", ""
        if step.src.dtype != step.dst.dtype:
            text, op = f"{text}.to({segment.code.literal(step.dst.dtype, ())})", COPIES
        else:
            b.record_sharing(total, b.value(step.operand))
        segment.code.line(text, [step.operand], [step.result], op=op)
    else:  # float32 and bf16 are added in float32, then rounded if the sum is bf16
        before = f"{step.result}_before"
        segment.table[before] = previous
        in_place = step.result in unshared_sums
        if in_place:
            b.record_sharing(total, previous)
        added = f"{before}.add_({step.operand})" if in_place else f"{before} + {step.operand}"
        if not in_place and step.dst.dtype not in (step.src.dtype, torch.float32):
            added = f"({added}).to({segment.code.literal(step.dst.dtype, ())})"
        unshared_sums.add(step.result)
        text = f"{step.result} = {added}"
        segment.code.line(text, [before, step.operand], [step.result], op=ADDING)
    b.price(step)
    b.accumulated[step.result] = total
    b.nbytes[total] = step.dst.local_nbytes(b.coordinates)


def sum_tied(b: RankBuilder, step: Redistribute) -> None:
    """Emit the sum of a gradient over the stages that share its parameter, in order of stages."""
    own_indices = [i for i, stage in enumerate(step.tied) if stage in b.stages]
    hosts = tuple(dict.fromkeys(b.peer(stage) for stage in step.tied))
    first, (label,), spec = own_indices[0], step.of, step.moves[0].dst
    operands = _addends(b, step, own_indices)
    total = operands[0]
    if len(own_indices) > 1:  # this rank hosts several of the stages
        total = f"{step.results[first]}_here"
        b.segment().code.line(f"{total} = {' + '.join(operands)}", operands, [total], op=ADDING)
        b.record(total, spec)
    if len(hosts) > 1:
        b.collective(
            "all_reduce",
            f"tied {label}",
            (b.named_buffer(total, spec),),
            (b.named_buffer(step.results[first], spec),),
            step.label,
            way=f"over stages {step.tied}",
            group=hosts,
            op="sum",
        )
        total = step.results[first]
    for i in own_indices:
        if step.results[i] != total:
            b.assign(total, step.results[i])
        b.record(step.results[i], spec)


def _addends(b: RankBuilder, step: Redistribute, own_indices: Sequence[int]) -> list[str]:
    """Return the names of the gradients of this rank's stages, converted to float32 if they are
    narrower."""
    spec, specs = step.moves[0].dst, b.plan.value_specs()
    addends: list[str] = []
    for operand in (step.operands[i] for i in own_indices):
        addends.append(operand)
        if specs[operand].dtype != spec.dtype:
            addends[-1] = wide = f"{operand}_wide"
            code = b.segment().code
            dtype = code.literal(spec.dtype, ())
            code.line(f"{wide} = {operand}.to({dtype})", [operand], [wide], op=COPIES)
            b.record(wide, spec)
    return addends


def is_counted(b: RankBuilder, spec: TensorSpec) -> bool:
    """Whether the norm counts this rank's copy: of replicas it counts the copy at coordinate 0."""
    coordinates = b.coordinates
    return all(
        coordinates[axis] == 0
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Replicate) and axis != MICROBATCH_AXIS
    )


def norm(b: RankBuilder, step: Norm) -> None:
    """Emit this rank's sum of squares, its reduction over the mesh, and the clipping divisor."""
    counted = [
        value
        for (stage, value, _), spec in zip(step.operands, step.specs, strict=True)
        if stage in b.stages and is_counted(b, spec)
    ]
    name = f"{step.result}_squares"
    square_buffer = Buffer((), step.dtype)
    wide = () if square_buffer == WORD else (square_buffer.dtype,)
    if step.scaled:
        segment = b.segment()
        segment.table["scale"] = SCALE
        code, reads = segment.code, [counted, "scale"]
        if b.shared.deferred:
            row, number = code.add_check(Overflow(num=1))
            code.apply(checked_squares, [*reads, row], [name], number, b.shared.device, *wide)
        else:
            code.apply(unscaled_squares, reads, [name], b.shared.device, *wide)
    else:
        b.segment().code.apply(sum_of_squares, [counted], [name], b.shared.device, *wide)
    b.nbytes[name] = square_buffer.nbytes
    name = _reduce_votes(b, name, square_buffer, votes=not updates_whole(b.plan.steps))
    pair = (step.result, f"{step.result}_clip")
    if step.scaled:
        segment = b.segment()
        segment.table["scale"] = SCALE
        segment.code.apply(unscaling_divisor, [name, "scale"], pair, step.max_norm)
    else:
        b.segment().code.apply(clip_divisor, [name], pair, step.max_norm)
    b.nbytes.update(dict.fromkeys(pair, square_buffer.nbytes))


def agree(b: RankBuilder) -> None:
    """Emit the commit point, unless the norm has emitted it."""
    if b.shared.has_commit_point(b.roles) and not b.committed:
        b.close()
        _reduce_votes(b, None)


def _reduce_votes(
    b: RankBuilder, squares: str | None, square_buffer: Buffer = WORD, *, votes: bool = True
) -> str:
    """Emit the sum over all ranks of the votes (the commit point), unless ``votes`` is False, and
    of a norm's ``squares``, and return the name of the result. ``square_buffer``: the buffer of a
    sum of squares."""
    agrees, vote, what = votes and b.shared.has_commit_point(b.roles), "rank.vote", "the votes"
    if squares is not None:
        what = "the norm and the votes" if agrees else "the norm"
    if agrees:
        b.emit(Vote(vote, label=b.label.doing("vote")))
    for axis, num in b.plan.mesh.shape.items():
        if num > 1:
            summed = [(squares, f"{squares}_{axis}", square_buffer)] if squares else []
            summed += [(vote, f"vote.{axis}", WORD)] if agrees else []
            inputs = tuple((name, buffer) for name, _, buffer in summed)
            outputs = tuple((result, buffer) for _, result, buffer in summed)
            b.collective("all_reduce", axis, inputs, outputs, what, op="sum")
            squares, vote = squares and f"{squares}_{axis}", f"vote.{axis}"
    if agrees:
        predicate = SKIP if b.shared.deferred else None
        b.emit(Commit(vote, predicate, label=b.label.doing("commit")))
        b.committed = True
    return squares or vote


def snapshot(b: RankBuilder, state: StateWrites | None) -> dict[str, str]:
    """Emit copies of the results and delayed gradients that may be views of state which the program
    changes. Return the name of the copy by the program's name of the output."""
    copies: dict[str, str] = {}
    if b.roles.updates:
        b.segment()  # so that all ranks have a segment, with a result or without
    inputs = {item.name for item in b.plan.inputs}
    for output in b.plan.outputs:
        at = {"result": output.values[:1], "delayed": output.values}.get(output.kind, ())
        for stage, value in at:
            shared = bool(b.roles.updates) or (state is not None and state.may_share(value))
            if output.kind == "delayed":
                shared = not inputs.isdisjoint(roots(value, b.shared.producers))
            if stage in b.stages and shared:
                name = f"{value}_copy" if output.kind == "delayed" else f"result_{output.of}_copy"
                read = value if state is None else state.names_in_code([value])[0]
                b.segment().code.line(f"{name} = {read}.clone()", [read], [name], op=COPIES)
                b.nbytes[name] = b.shared.nbytes(output.spec, b.coordinates)
                copies[f"{output.kind} {output.of}"] = name
    b.close()
    return copies


def publish(b: RankBuilder, outputs: Mapping[str, str]) -> None:
    """Emit code that gives the values which the program returns their output names."""
    b.close()
    b.label = Label("outputs")
    segment = b.segment()
    for number, (name, value) in enumerate(outputs.items()):
        result = f"out{number}"
        read = f"value{number}"
        segment.table[read] = value
        segment.table[result] = name
        segment.views[result] = read
        b.nbytes[name] = b.nbytes.get(value, 0)
        b.record_sharing(name, value)
        segment.code.line(f"{result} = {read}", [read], [result])
    b.close()
