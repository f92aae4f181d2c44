"""The error for a program that no choice of placements connects: it names the op at fault.

The search walks the program in order and records the placements that each value can have. The first
op whose strategies all need a placement that some operand cannot have is at fault. On the
microbatch axis, this is an op that mixes rows of the batch, or that needs a sum over all rows
before the last microbatch has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.solve import Node, Price, ValueAt
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Replicate, Shard

Possible = Mapping[str, set[Placement]]


def infeasible(flow: Dataflow, nodes: Sequence[Node], price: Price, axis: str) -> PlanningError:
    """Return the error for ``nodes`` that cannot be connected on ``axis``. The node of an op has
    the op's name."""
    possible: dict[str, set[Placement]] = {}

    def can_read(reads: Sequence[ValueAt]) -> bool:
        """Return whether each value can have its placement, or be converted to it."""
        return all(
            p in placements or any(price(v, q, p) < math.inf for q in placements)
            for v, p in reads
            for placements in (possible.get(v, set[Placement]()),)
        )

    by_name = {op.name: op for op in flow.ops}
    inputs = [n for n in nodes if n.kind == "input"]
    ops_and_results = [n for n in nodes if n.kind != "input"]
    for node in inputs:
        for option in node.options:
            for value, placement in option.writes:
                possible.setdefault(value, set()).add(placement)
    for node in ops_and_results:
        options = [o for o in node.options if can_read(o.reads)]
        if not options:
            op = by_name.get(node.name)
            if op is None and node.options:
                return _output_error(flow, node, possible, axis)
            assert op is not None, f"{node.name} has no options"
            return _op_error(flow, op, possible, axis)
        for option in options:
            for value, placement in option.writes:
                possible.setdefault(value, set()).add(placement)
    for node in inputs:  # the node of an input reads its gradients and its new contents
        if not any(can_read(o.reads) for o in node.options):
            return _output_error(flow, node, possible, axis)
    return PlanningError(
        f"no choice of placements connects the program on the axis {axis}.\n"
        f"fix: pin fewer values on {axis}"
    )


def _op_error(flow: Dataflow, op: Op, possible: Possible, axis: str) -> PlanningError:
    """Return the error for an op none of whose strategies can read its operands."""
    operands = [
        f"  {_value_text(flow, name, possible, axis)}" for name in dict.fromkeys(op.operands)
    ]
    if axis != MICROBATCH_AXIS:
        fact = f"no strategy of {op.call.name} accepts its operands on the axis {axis}."
        fix = f"fix: annotate its operands with {axis}=Replicate(), or pin fewer values on {axis}"
        fix = _fix_for_rows(op, possible, axis) or fix
        return PlanningError("\n".join([fact, *operands, *_source_lines(op), fix]))
    pending = sorted(
        p.op
        for name in op.operands
        if len(placements := possible.get(name, set[Placement]())) == 1
        for p in placements
        if isinstance(p, Partial)
    )
    obstacle = f"needs the {pending[0]} over all rows" if pending else "mixes rows"
    fact = f"{op.call.name} {obstacle} of the batch, so microbatches would change the result."
    fix = "fix: use microbatches=1, or write the loss as a mean or sum over rows"
    if op.over_batch:
        fix = (
            'fix: train_step(..., batch_norm="per_microbatch"), whose statistics are those of each '
            "microbatch, or microbatches=1"
        )
    elif op.call.name == "dt.balance_loss.default":
        fact = (
            "the load-balancing loss is a product of means over the batch, so microbatches would "
            "change it."
        )
        fix = (
            'fix: train_step(..., aux_loss="per_microbatch"), the mean of the losses of all '
            "microbatches, or microbatches=1"
        )
    elif pending and _only_writes_buffers(flow, op):
        fix = (
            "fix: use microbatches=1, or add the sum to a buffer in this step, and read the buffer "
            "in the next step"
        )
    return PlanningError("\n".join([fact, *operands, *_source_lines(op), fix]))


def _fix_for_rows(op: Op, possible: Possible, axis: str) -> str | None:
    """Return the fix for an op on rows of experts, or None for another op."""
    has_rows = [_has_rows(name, possible) for name in op.operands]
    if op.call.name == "dt.expert_mm.default" and has_rows[0]:
        return (
            f"fix: stack the weights as [experts, in, out] and state {axis}=dt.Shard(0) for them, "
            "or split in or out over an axis that does not split the tokens"
        )
    if any(has_rows) or op.call.name == "dt.expert_mm.default":
        return (
            "fix: rows have the order of experts, and other tensors have not: add a tensor of "
            "tokens before dt.to_experts or after dt.from_experts, and index a tensor of experts "
            "with route.expert"
        )
    return None


def _has_rows(value: str, possible: Possible) -> bool:
    """Return whether the value can be split by token or by expert."""
    return any(isinstance(p, Shard) and p.ragged for p in possible.get(value, set[Placement]()))


def _only_writes_buffers(flow: Dataflow, op: Op) -> bool:
    """Return whether the op's results are used for new values of buffers only."""
    values = {name for name in op.results if name is not None}
    for other in flow.ops:
        if not values.isdisjoint(other.operands):
            values.update(name for name in other.results if name is not None)
    kinds = {output.kind for output in flow.outputs if output.value in values}
    return kinds == {"mutation"}


def _output_error(flow: Dataflow, node: Node, possible: Possible, axis: str) -> PlanningError:
    """Return the error for an output that cannot have the placement that is stated for it."""
    (value, stated), *_ = node.options[0].reads
    producer = flow.producers.get(value)
    lines = [
        f"  {_value_text(flow, value, possible, axis)}",
        *(_source_lines(producer) if producer else ()),
    ]
    if axis == MICROBATCH_AXIS:
        fact = f"{node.name} is neither a sum nor a mean over the rows of the batch."
        fix = "fix: use microbatches=1, or write the loss as a mean or sum over rows"
    else:
        fact = f"{node.name} cannot have the placement {stated!r} on the axis {axis}."
        fix = f"fix: state {axis}=Replicate() for it"
        if _has_rows(value, possible):
            fix = "fix: return the tokens of dt.from_experts instead of rows of experts"
    return PlanningError("\n".join([fact, *lines, fix]))


def _value_text(flow: Dataflow, value: str, possible: Possible, axis: str) -> str:
    """Return the value's name, type and possible placements: ``h: f32[8,4], Shard(0)``."""
    placements = possible.get(value, set[Placement]())
    on_microbatches = axis == MICROBATCH_AXIS
    text_of = _microbatch_text if on_microbatches else _placement_text
    words = sorted({text_of(p) for p in placements})
    return f"{value}: {flow.metas[value]}" + (f", {' or '.join(words)}" if words else "")


def _placement_text(placement: Placement) -> str:
    """Return the text of a placement on an axis of the mesh."""
    ragged = placement.ragged if isinstance(placement, Shard) else None
    return repr(placement) if ragged is None else f"rows split by {ragged.by}"


def _microbatch_text(placement: Placement) -> str:
    """Return the text of a placement on the microbatch axis."""
    match placement:
        case Shard(dim):
            return f"dim {dim} split into microbatches"
        case Partial(op):
            return f"a {op} over microbatches"
        case Replicate():
            return "the same in each microbatch"


def _source_lines(op: Op) -> tuple[str, ...]:
    return (f"  {op.source}: {op.source_text}",) if op.source else ()
