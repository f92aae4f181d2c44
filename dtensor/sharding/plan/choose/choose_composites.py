"""Composite ops that the planner writes out where a rank lacks the dim that they need whole.

    softmax over f32[8,1024@tp]      fused: all_gather of the rows, then one kernel
                                     written out: all_reduce(max), all_reduce(sum) of 8 numbers

A plan is made with every op fused. Where it gathers an operand of a composite op, the op is written
out and the program planned again, until no such op is left; of the plans the cheapest is kept, and
each kind of op that it writes out is tried fused once more. A program whose composite ops have
their dims whole, as in Megatron's placements, is planned once.

Statistics over a batch (batch norm) are another matter: where a batch is split it stays split, so
these are all written out as soon as one of them gathers, whatever the price. Otherwise one batch
norm gathers a small batch, and all that follows is computed by every rank.

Invariants: the result computes the same values; but for those statistics it is never dearer than
the fused plan. The choice is greedy by kind of call, not exact. It names no op: expansions come
with the Dataflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from dtensor.collectives import COLLECTIVES
from dtensor.errors import PlanningError
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Expansion, Op
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step, unused

_ROUNDS = 4  # forward, then its backward, then what they feed
Kind = tuple[str, object, object]


def cheapest(
    flow: Dataflow, make: Callable[[Dataflow], PlanRecord], *, keep_split: bool = True
) -> PlanRecord:
    """The plan of ``flow``, with composite ops written out where that is cheaper.

    ``keep_split``: those over a batch also where it is not.
    """
    best = make(flow)
    over_batch = dict.fromkeys(_kind(op) for op in flow.ops if op.over_batch and keep_split)
    if any(kind in over_batch for kind in _gathered(best)):
        split = _written_out(flow, over_batch)
        with suppress(PlanningError):  # misaligned="error" refuses them: they stay fused
            flow, best = split, make(split)
    written: dict[Kind, None] = {}
    current = best
    chosen: tuple[Kind, ...] = ()
    for _ in range(_ROUNDS):
        kinds = [kind for kind in _gathered(current) if kind not in written]
        if not kinds:
            break
        written.update(dict.fromkeys(kinds))
        try:
            current = make(_written_out(flow, written))
        except PlanningError:  # misaligned="error" refuses the simpler ops: they stay fused
            break
        if PlanTotals(current).estimate < PlanTotals(best).estimate:
            best, chosen = current, tuple(written)
    for kind in chosen if len(chosen) > 1 else ():
        fewer = [k for k in chosen if k != kind]
        other = make(_written_out(flow, dict.fromkeys(fewer)))
        if PlanTotals(other).estimate < PlanTotals(best).estimate:
            best, chosen = other, tuple(fewer)
    return best


def _kind(op: Op) -> Kind:
    return (op.call.name, op.call.operands, repr(op.call.args))


def _gathered(plan: PlanRecord) -> Iterator[Kind]:
    """The kinds of composite ops of which the plan gathers an operand."""
    makers: dict[str, Step] = {name: step for step in plan.steps for name in step.gives if name}
    for step in plan.steps:
        if (
            step.op is not None
            and step.op.expand is not None
            and any(_is_gathered(name, makers) for name in step.reads)
        ):
            yield _kind(step.op)


def _is_gathered(name: str, makers: dict[str, Step]) -> bool:
    """Whether a value, or what it is a view of, was split and had to be communicated."""
    step = makers.get(name)
    if step is None:
        return False
    lost = any(move.kind in COLLECTIVES and not move.reduces for move in step.moves)
    before = step.reads[0] if step.moves else step.viewed
    return lost or (before is not None and _is_gathered(before, makers))


def _written_out(flow: Dataflow, kinds: dict[Kind, None]) -> Dataflow:
    ops: list[Op] = []
    metas = dict(flow.metas)
    taken = {*flow.metas, *(op.name for op in flow.ops)}
    for op in flow.ops:
        out = op.expand is not None and _kind(op) in kinds
        # statistics of 16-bit values are float32 where they are written out
        operands = tuple(metas[name] for name in op.operands)
        if operands != op.call.operands:
            op = replace(op, call=replace(op.call, operands=operands))
        expansion = op.expand(op.call) if out and op.expand is not None else None
        ops_of = [op] if expansion is None else list(_steps(op, expansion, taken))
        for each in ops_of:
            results = zip(each.results, each.call.results, strict=True)
            metas.update((name, meta) for name, meta in results if name and meta is not None)
        ops += ops_of
    return replace(flow, ops=tuple(ops)).pruned(flow.outputs)


def _steps(op: Op, expansion: Expansion, taken: set[str]) -> Iterator[Op]:
    """The op's expansion under names of its own ("softmax_amax"); the results keep their names."""
    names: list[str] = list(op.operands)
    given = {
        number: name
        for number, name in zip(expansion.results, op.results, strict=True)
        if number is not None and name is not None
    }
    for call, operands in zip(expansion.calls, expansion.operands, strict=True):
        op_name = unused(f"{op.name}_{call.name.split('.')[1]}", taken)
        name = given.get(len(names), op_name)
        yield replace(
            op,
            name=op_name,
            call=call,
            operands=tuple(names[number] for number in operands),
            results=(name,),
            expand=None,
        )
        names.append(name)
