"""Which op is at fault when no choice of placements connects a program, and how it is said.

Walking in program order, each value is given the placements that some fed strategy of its op can
leave it at. The first op none of whose strategies can be fed is named, with its operands. On the
microbatch axis that is an op that mixes rows of the batch, or that needs a sum over them before
the last microbatch has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.solve import At, Node, Price
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Replicate, Shard

Possible = Mapping[str, set[Placement]]


def infeasible(flow: Dataflow, nodes: Sequence[Node], price: Price, axis: str) -> PlanningError:
    """The error for ``nodes`` that cannot be connected on ``axis``.

    Nodes of ops are named as their op.
    """
    possible: dict[str, set[Placement]] = {}

    def fed(reads: Sequence[At]) -> bool:
        return all(
            p in have or any(price(v, q, p) < math.inf for q in have)
            for v, p in reads
            for have in (possible.get(v, set[Placement]()),)
        )

    by_name = {op.name: op for op in flow.ops}
    inputs = [n for n in nodes if n.kind == "input"]
    others = [n for n in nodes if n.kind != "input"]
    for node in inputs:
        for option in node.options:
            for value, placement in option.writes:
                possible.setdefault(value, set()).add(placement)
    for node in others:
        options = [o for o in node.options if fed(o.reads)]
        if not options:
            op = by_name.get(node.name)
            if op is None and node.options:
                return _unwanted(flow, node, possible, axis)
            assert op is not None, f"{node.name} has no options"
            return _blamed(flow, op, possible, axis)
        for option in options:
            for value, placement in option.writes:
                possible.setdefault(value, set()).add(placement)
    for node in inputs:  # what is read here are the input's gradients and new contents
        if not any(fed(o.reads) for o in node.options):
            return _unwanted(flow, node, possible, axis)
    return PlanningError(
        f"no choice of placements connects the program on the axis {axis}.\n"
        f"fix: pin fewer values on {axis}"
    )


def _blamed(flow: Dataflow, op: Op, possible: Possible, axis: str) -> PlanningError:
    operands = [f"  {_at(flow, name, possible, axis)}" for name in dict.fromkeys(op.operands)]
    if axis != MICROBATCH_AXIS:
        fact = f"no strategy of {op.call.name} accepts its operands on the axis {axis}."
        fix = f"fix: annotate its operands with {axis}=Replicate(), or pin fewer values on {axis}"
        return PlanningError("\n".join([fact, *operands, *_line(op), fix]))
    pending = sorted(
        p.op
        for name in op.operands
        if len(placements := possible.get(name, set[Placement]())) == 1
        for p in placements
        if isinstance(p, Partial)
    )
    what = f"needs the {pending[0]} over all rows" if pending else "mixes rows"
    fact = f"{op.call.name} {what} of the batch, so microbatches would change the result."
    fix = "fix: use microbatches=1, or write the loss as a mean or sum over rows"
    if op.over_batch:
        fix = (
            'fix: train_step(..., batch_norm="per_microbatch"), whose statistics are those of each '
            "microbatch, or microbatches=1"
        )
    return PlanningError("\n".join([fact, *operands, *_line(op), fix]))


def _unwanted(flow: Dataflow, node: Node, possible: Possible, axis: str) -> PlanningError:
    """For an output that cannot be had at the placement that is wanted of it."""
    (value, wanted), *_ = node.options[0].reads
    producer = flow.producers.get(value)
    lines = [f"  {_at(flow, value, possible, axis)}", *(_line(producer) if producer else ())]
    if axis == MICROBATCH_AXIS:
        fact = f"{node.name} is neither a sum nor a mean over the rows of the batch."
        fix = "fix: use microbatches=1, or write the loss as a mean or sum over rows"
    else:
        fact = f"{node.name} cannot be had as {wanted!r} on the axis {axis}."
        fix = f"fix: ask for it as {axis}=Replicate()"
    return PlanningError("\n".join([fact, *lines, fix]))


def _at(flow: Dataflow, value: str, possible: Possible, axis: str) -> str:
    placements = possible.get(value, set[Placement]())
    words = sorted({_in_time(p) if axis == MICROBATCH_AXIS else repr(p) for p in placements})
    return f"{value}: {flow.metas[value]}" + (f", {' or '.join(words)}" if words else "")


def _in_time(placement: Placement) -> str:
    match placement:
        case Shard(dim):
            return f"dim {dim} split into microbatches"
        case Partial(op):
            return f"a {op} over microbatches"
        case Replicate():
            return "the same in each microbatch"


def _line(op: Op) -> tuple[str, ...]:
    return (f"  {op.source}: {op.source_text}",) if op.source else ()
