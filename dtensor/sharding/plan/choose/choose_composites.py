"""Decides which composite ops are expanded into simpler ops, because the dim they reduce is split.

    softmax over f32[8,1024@tp]      fused: all_gather of the rows, then one kernel
                                     expanded: all_reduce(max), all_reduce(sum) of 8 numbers

The program is planned with all ops fused. Composite ops whose operands that plan gathers are
expanded, and the program is planned again, up to `_MAX_ROUNDS` times. The cheapest plan is kept,
and each kind of op that it expands is tried fused once more. The choice is greedy, by kind of call.
Ops that take statistics over the batch (batch norm) are expanded at any price as soon as one of
them gathers its batch: else all later ops would run replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from dtensor.collectives import COLLECTIVES
from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Expansion, Op
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step, unused

_MAX_ROUNDS = 4  # expanding an op may make the plan gather an operand of another composite op
Kind = tuple[str, object, object]
"""The name, operands and arguments of a call; ops of one kind are expanded together."""


def choose_composites(
    flow: Dataflow, plan_of: Callable[[Dataflow], PlanRecord], *, keep_split: bool = True
) -> PlanRecord:
    """Return the plan of ``flow`` in which composite ops are expanded if that is cheaper.
    ``plan_of``: returns the plan of a program. ``keep_split``: expand ops that take statistics over
    the batch even if that is more expensive."""
    best = plan_of(flow)
    over_batch = dict.fromkeys(_kind(op) for op in flow.ops if op.over_batch and keep_split)
    if any(kind in over_batch for kind in _gathered_kinds(best)):
        expanded_flow = _expand_kinds(flow, over_batch)
        with suppress(PlanningError):  # with misaligned="error" the simpler ops may be refused
            flow, best = expanded_flow, plan_of(expanded_flow)
    expanded: dict[Kind, None] = {}
    current = best
    chosen: tuple[Kind, ...] = ()
    for _ in range(_MAX_ROUNDS):
        kinds = [kind for kind in _gathered_kinds(current) if kind not in expanded]
        if not kinds:
            break
        expanded.update(dict.fromkeys(kinds))
        try:
            current = plan_of(_expand_kinds(flow, expanded))
        except PlanningError:  # with misaligned="error" the simpler ops may be refused
            break
        if PlanTotals(current).estimate < PlanTotals(best).estimate:
            best, chosen = current, tuple(expanded)
    for kind in chosen if len(chosen) > 1 else ():
        fewer = [k for k in chosen if k != kind]
        other = plan_of(_expand_kinds(flow, dict.fromkeys(fewer)))
        if PlanTotals(other).estimate < PlanTotals(best).estimate:
            best, chosen = other, tuple(fewer)
    return best


def _kind(op: Op) -> Kind:
    """Return the kind of a composite op; ops of one kind are expanded together."""
    return (op.call.name, op.call.operands, repr(op.call.args))


def _gathered_kinds(plan: PlanRecord) -> Iterator[Kind]:
    """Yield the kinds of composite ops that read an operand which the plan gathers."""
    producers: dict[str, Step] = {name: step for step in plan.steps for name in step.gives if name}
    for step in plan.steps:
        if (
            step.op is not None
            and step.op.expand is not None
            and any(_is_gathered(name, producers) for name in step.reads)
        ):
            yield _kind(step.op)


def _is_gathered(name: str, producers: dict[str, Step]) -> bool:
    """Return whether the value, or the source of its views and conversions, was gathered or
    exchanged."""
    step = producers.get(name)
    if step is None:
        return False
    loses_split = any(move.kind in COLLECTIVES and not move.reduces for move in step.moves)
    source = step.reads[0] if step.moves else step.viewed
    return loses_split or (source is not None and _is_gathered(source, producers))


def _expand_kinds(flow: Dataflow, kinds: dict[Kind, None]) -> Dataflow:
    """Return the program with the composite ops of these kinds expanded."""
    expanded = {op.name: op.expand for op in flow.ops if op.expand and _kind(op) in kinds}
    return expand_ops(flow, lambda op: expanded.get(op.name))


def expand_ops(
    flow: Dataflow, expander: Callable[[Op], Callable[[OpCall], Expansion | None] | None]
) -> Dataflow:
    """Return the program with ops expanded. ``expander``: returns the function that expands an op's
    call; None for an op that stays."""
    ops: list[Op] = []
    metas = dict(flow.metas)
    used_names = {*flow.metas, *(op.name for op in flow.ops)}
    for op in flow.ops:
        expand = expander(op)
        # an expanded op makes float32 statistics of 16-bit values, so operands may change dtype
        operands = tuple(metas[name] for name in op.operands)
        if operands != op.call.operands:
            op = replace(op, call=replace(op.call, operands=operands))
        expansion = None if expand is None else expand(op.call)
        new_ops = [op] if expansion is None else list(_ops_of(op, expansion, used_names))
        for new_op in new_ops:
            results = zip(new_op.results, new_op.call.results, strict=True)
            metas.update((name, meta) for name, meta in results if name and meta is not None)
        ops += new_ops
    return replace(flow, ops=tuple(ops)).pruned(flow.outputs)


def _ops_of(op: Op, expansion: Expansion, used_names: set[str]) -> Iterator[Op]:
    """Yield the ops that replace the composite ``op``, named after it ("softmax_amax"). Adds their
    names to ``used_names``."""
    names: list[str] = list(op.operands)
    result_names = {
        number: name
        for number, name in zip(expansion.results, op.results, strict=True)
        if number is not None and name is not None
    }
    for call, operands in zip(expansion.calls, expansion.operands, strict=True):
        op_name = unused(f"{op.name}_{call.name.split('.')[1]}", used_names)
        name = result_names.get(len(names), op_name)
        yield replace(
            op,
            name=op_name,
            call=call,
            operands=tuple(names[number] for number in operands),
            results=(name,),
            expand=None,
        )
        names.append(name)
