"""The planner: turns a Dataflow, a mesh and pins into a Plan by running the planning passes.

    plan(Request(flow=..., mesh=Mesh(tp=2), pins={"up_weight": {"tp": Shard(0)}}, ...)) -> Plan

Planning is pure: the same request gives the same plan, and nothing is modified. Every planning
error is raised before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import torch

from dtensor.errors import PlanningError
from dtensor.gc_pause import collector_paused
from dtensor.numerics import dtype_name
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.choose.axis_problem import AxisChoice, axis_problem_of, inner_mesh
from dtensor.sharding.plan.choose.choose_attention import choose_attention
from dtensor.sharding.plan.choose.choose_axis import choose_axis
from dtensor.sharding.plan.choose.choose_composites import choose_composites
from dtensor.sharding.plan.choose.choose_level import choose_level
from dtensor.sharding.plan.choose.routes import size_fills
from dtensor.sharding.plan.choose.sequence_axes import (
    Governed,
    may_split_sequence,
    sequence_axes,
    with_repeated_keys,
)
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.emit.emit import emit
from dtensor.sharding.plan.emit.values import is_full_view
from dtensor.sharding.plan.passes.gather_stored import gather_stored
from dtensor.sharding.plan.passes.recompute import recomputed
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.precision import uncast
from dtensor.sharding.plan.record import PlanRecord, Timetable
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.verify import verify
from dtensor.sharding.rules.build import resolve_dims
from dtensor.sharding.rules.dtypes import accepts
from dtensor.sharding.rules.registry import NoRule, rule_for
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.rules.tables.views import with_repeat_fallback
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS

_RESHAPES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")


@collector_paused()
def plan(request: Request) -> Plan:
    """Return the plan of the request, with every placement and collective decided. Raises
    PlanningError if there is no plan."""
    planned = choose_level(request, _searched)
    verify(planned)
    return Plan.of(planned)


def _searched(request: Request) -> PlanRecord:
    """Return the plan of the request. With search="free", the program is also planned with
    search="predictable", and the plan with fewer predicted seconds is returned."""
    if request.search != "free":
        return _candidate(request)
    candidates = [_candidate(request), _candidate(replace(request, search="predictable"))]
    return min(candidates, key=lambda candidate: PlanTotals(candidate).cost.seconds)


def _candidate(request: Request) -> PlanRecord:
    """Return the plan of the request with its ``search``, after all passes."""
    flow = training_flow(request)
    sequence: Mapping[str, Governed] = {}
    if may_split_sequence(request, flow):
        sequence = sequence_axes(
            axis_problem_of(replace(request, flow=flow), inner_mesh(request), rules_of(flow))
        )
    governed = {name for ops in sequence.values() for name in ops}
    if governed:  # their strategies are chosen here, so no other form of them is compared
        ops = (replace(op, expand=None) if op.name in governed else op for op in flow.ops)
        flow = replace(flow, ops=tuple(ops))
    return choose_attention(request, sequence, lambda request: _planned(request, flow))


def _planned(request: Request, flow: Dataflow) -> PlanRecord:
    """Return the plan of ``flow``, after all passes, in which attention has the strategies of
    ``request.sequence``."""
    if any(op.expand is not None for op in flow.ops):
        split = request.search != "free"
        planned = choose_composites(flow, lambda flow: plan_flow(request, flow), keep_split=split)
    else:
        planned = plan_flow(request, flow)
    if request.recompute or any(op.checkpoint is not None for op in flow.ops):
        planned = recomputed(planned, request.recompute)
    return with_last_passes(planned, request)


def training_flow(request: Request) -> Dataflow:
    """Return the program that runs: without gradients of parameters that the optimizer does not
    train, and without the casts of gradients that their reduction makes (`uncast`)."""
    flow = request.flow
    if request.training is None:
        return flow
    trained = request.training.trained
    outputs = (o for o in flow.outputs if o.kind != "gradient" or o.of in trained)
    pruned = flow.pruned(tuple(outputs))
    return uncast(pruned, rules_of(pruned))


def plan_flow(request: Request, flow: Dataflow) -> PlanRecord:
    """Return the plan of ``flow``, without the last passes. Strategies are chosen axis by axis, in
    mesh order, then the axes that split a sequence, and the microbatch axis last; the choice on
    each axis is optimal given the axes before it. Then the steps and the conversions between them
    are emitted."""
    rules = rules_of(flow)
    sized = size_fills(flow, rules)
    if sized is not flow:
        flow, rules = sized, rules_of(sized)
    request = replace(request, flow=flow)
    inner = inner_mesh(request)
    axis_problem = axis_problem_of(request, inner, rules)
    words = {choice.axis: choice.word for choice in request.sequence}
    sequence = sequence_axes(axis_problem) if words else {}
    repeated = with_repeated_keys(axis_problem, sequence, words)
    if repeated is not flow:
        request = replace(request, flow=repeated)
        axis_problem = axis_problem_of(request, inner, rules_of(repeated))
    choices: list[AxisChoice] = []
    for axis in sorted(inner.axes, key=lambda axis: (axis == MICROBATCH_AXIS, axis in sequence)):
        if inner.axis_size(axis) > 1:
            governed = (words[axis], sequence[axis]) if axis in sequence else None
            choices.append(choose_axis(axis_problem, axis, choices, governed))
    return emit(request, axis_problem, choices)


def with_last_passes(plan: PlanRecord, request: Request) -> PlanRecord:
    """Return the plan after the last passes: gathers of stored parameters, writes to state, and
    the schedule. ``plan.plain`` gets the same passes."""
    plain = None if plan.plain is None else with_last_passes(plan.plain, request)
    if request.stores_split:
        plan = gather_stored(plan)
    if any(output.kind == "mutation" for output in plan.outputs):
        from dtensor.sharding.plan.passes.in_place import in_place  # few programs change state

        plan = in_place(plan)
    if request.timetable is not None:
        plan = with_schedule(plan, request.timetable)
    return replace(plan, plain=plain)


def with_schedule(plan: PlanRecord, timetable: Timetable) -> PlanRecord:
    """Return the plan with its schedule and the number of microbatches in flight."""
    return replace(
        plan,
        timetable=timetable,
        in_flight=timetable.in_flight,
        schedule=timetable.text if plan.num_microbatches > 1 else "",
    )


def rules_of(flow: Dataflow) -> dict[str, Rule]:
    """Return the rule of every op by op name. Raises NoRule for an op without a rule, and
    PlanningError for operands whose dtypes the op does not take together; both name the user's
    line."""
    rules: dict[str, Rule] = {}
    for op in flow.ops:
        try:
            rules[op.name] = rule_for(op.call)
        except NoRule as error:
            fact, _, fix = str(error).partition("\n")
            where = f"\n  {op.source}: {op.source_text}" if op.source else ""
            raise NoRule(f"{fact}{where}\n{fix}") from error.__cause__
        if not accepts(rules[op.name].dtypes, tuple(meta.dtype for meta in op.call.operands)):
            raise _mixed_dtypes(flow, op, rules)
        if op.call.name in _RESHAPES:
            rules[op.name] = _with_repeats(flow, op, rules[op.name])
    return rules


def _with_repeats(flow: Dataflow, op: Op, rule: Rule) -> Rule:
    """Return the view's rule, with the fallback of `with_repeat_fallback` if the view handles
    repeated heads. In grouped-query attention, a view joins heads that an expand repeated; in the
    backward, a view splits the gradient of these heads before the sum over the repeats."""
    producer = flow.producers.get(op.operands[0])
    if producer is not None and producer.call.name == "aten.expand.default":
        before, after = producer.call.operands[0].shape, producer.call.result.shape
        repeats = [i for i in range(1, len(before)) if before[i] == 1 != after[i]]
        if len(before) == len(after) and len(repeats) == 1:
            return with_repeat_fallback(rule, repeats[0], splits=False)
    uses = [use.call for use, _ in flow.consumers.get(op.results[0] or "", ())]
    if op.phase == "backward" and {call.name for call in uses} == {"aten.sum.dim_IntList"}:
        dims = {resolve_dims(call.args[1], len(op.call.result.shape)) for call in uses}
        dim, *more = dims.pop()
        if not dims and not more and dim > 0:
            return with_repeat_fallback(rule, dim, splits=True)
    return rule


def _mixed_dtypes(flow: Dataflow, op: Op, rules: Mapping[str, Rule]) -> PlanningError:
    """Return the error for operands whose dtypes the op's kernels do not take together."""
    labels = {item.name: item.label for item in flow.inputs}
    metas: dict[str, Meta] = {}  # by the user's name; a view counts as the value that it views
    for name in op.operands:
        while (producer := flow.producers.get(name)) is not None and is_full_view(
            producer, rules[producer.name]
        ):
            (name,) = producer.operands
        metas[labels.get(name, name)] = flow.metas[name]
    parameter_dtypes = {flow.metas[i.name].dtype for i in flow.inputs if i.kind == "parameter"}
    one_dtype = len({dtype for dtype in parameter_dtypes if dtype.is_floating_point}) < 2
    widest = reduce(torch.promote_types, (meta.dtype for meta in metas.values()))
    dtype_names = " and ".join(sorted({dtype_name(meta.dtype) for meta in metas.values()}))
    floats = all(meta.dtype.is_floating_point for meta in metas.values())
    narrower = next((name for name, meta in metas.items() if meta.dtype != widest), "one of them")
    fix = f"make {narrower} {dtype_name(widest)}, as with .to({widest})"
    fix = fix if one_dtype else "call model.float() (its parameters have several dtypes)"
    fix += ", or run it under torch.autocast" if floats and widest != torch.float64 else ""
    return PlanningError(
        "\n".join(
            [
                f"{op.call.name} does not take {dtype_names} together.",
                *(f"  {name}: {meta}" for name, meta in metas.items()),
                *([f"  {op.source}: {op.source_text}"] if op.source else []),
                _argument_cast_fix(flow, metas) or f"fix: {fix}",
            ]
        )
    )


def _argument_cast_fix(flow: Dataflow, metas: Mapping[str, Meta]) -> str:
    """Return the fix that casts an argument, or "" if another fix is needed. It applies if float32
    parameters meet an argument of another dtype, or if the batch is float64, numpy's default.
    ``metas``: the op's operands by the user's names."""
    dtypes = {meta.dtype for meta in metas.values()}
    parameters = {flow.metas[i.name].dtype for i in flow.inputs if i.kind == "parameter"} & dtypes
    if parameters != {torch.float32}:
        return ""
    for item in flow.inputs:
        x, dtype = item.label, flow.metas[item.name].dtype
        if item.kind != "argument" or dtype not in dtypes - {torch.float32}:
            continue
        if dtype == torch.float64:
            return f'fix: pass {x}.float(), of a numpy array {x}.astype("float32")'
        if x in metas and not dtype.is_floating_point:
            return f"fix: pass {x}.float()"
        if x in metas:
            return f"fix: pass {x}.float(), or call model.to({dtype}), or use torch.autocast"
    return ""
