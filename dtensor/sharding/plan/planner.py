"""The planner: from a Dataflow, a mesh and pins to a Plan, by the passes that `plan` names.

    plan(Request(flow=..., mesh=Mesh(tp=2), pins={"up_weight": {"tp": Shard(0)}}, ...)) -> Plan

Planning is pure: the same request gives the same plan, and changes nothing. Every error is raised
here, before anything runs.
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
from dtensor.sharding.plan.choose.choose_axis import choose_axis
from dtensor.sharding.plan.choose.choose_composites import cheapest
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.emit.emit import emit
from dtensor.sharding.plan.emit.values import rearranges
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
from dtensor.sharding.rules.tables.views import of_repeat

_RESHAPES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")


@collector_paused()
def plan(request: Request) -> Plan:
    """Decide every placement and collective. With search="free" the plan that follows the pins is a
    candidate too, and the cheapest by the printed prediction is taken. Raises PlanningError."""
    candidates = [_planned(request)]
    if request.search == "free":
        candidates.append(_planned(replace(request, search="predictable")))
    planned = min(candidates, key=lambda found: PlanTotals(found).cost.seconds)
    verify(planned)
    return Plan.of(planned)


def _planned(request: Request) -> PlanRecord:
    flow = trained(request)
    if any(op.expand is not None for op in flow.ops):
        split = request.search != "free"
        planned = cheapest(flow, lambda flow: placed(request, flow), keep_split=split)
    else:
        planned = placed(request, flow)
    if request.recompute or any(op.checkpoint is not None for op in flow.ops):
        planned = recomputed(planned, request.recompute)
    return finished(planned, request)


def trained(request: Request) -> Dataflow:
    """The program that runs: parameters outside the optimizer are frozen, so no gradient of them
    is made; a gradient is cast by what reduces it."""
    flow = request.flow
    if request.training is None:
        return flow
    trained = request.training.trained
    kept = (o for o in flow.outputs if o.kind != "gradient" or o.of in trained)
    pruned = flow.pruned(tuple(kept))
    return uncast(pruned, rules_of(pruned))


def placed(request: Request, flow: Dataflow) -> PlanRecord:
    """Axis after axis in mesh order, the microbatch axis last, each chosen exactly given those
    before it; then the steps, with the conversions that connect them."""
    request = replace(request, flow=flow)
    inner, rules = inner_mesh(request), rules_of(flow)
    axis_problem = axis_problem_of(request, inner, rules)
    done: list[AxisChoice] = []
    for axis in inner.axes:
        if inner.axis_size(axis) > 1:
            done.append(choose_axis(axis_problem, axis, done))
    return emit(request, inner, rules, done)


def finished(plan: PlanRecord, request: Request) -> PlanRecord:
    """The last passes over the steps; the plan without recomputation goes the same way."""
    plain = None if plan.plain is None else finished(plan.plain, request)
    if request.stores_split:
        plan = gather_stored(plan)
    if any(output.kind == "mutation" for output in plan.outputs):
        from dtensor.sharding.plan.passes.in_place import in_place  # few programs change state

        plan = in_place(plan)
    if request.timetable is not None:
        plan = scheduled(plan, request.timetable)
    return replace(plan, plain=plain)


def scheduled(plan: PlanRecord, timetable: Timetable) -> PlanRecord:
    """The plan with the schedule that it runs under: what is held at a time, how long it takes."""
    return replace(
        plan,
        timetable=timetable,
        in_flight=timetable.in_flight,
        schedule=timetable.text if plan.num_microbatches > 1 else "",
    )


def rules_of(flow: Dataflow) -> dict[str, Rule]:
    """The rule of every op by op name. Raises NoRule, and PlanningError for dtypes that do not go
    together, with the user's line."""
    rules: dict[str, Rule] = {}
    for op in flow.ops:
        try:
            rules[op.name] = rule_for(op.call)
        except NoRule as error:
            fact, _, fix = str(error).partition("\n")
            where = f"\n  {op.source}: {op.source_text}" if op.source else ""
            raise NoRule(f"{fact}{where}\n{fix}") from error.__cause__
        if not accepts(rules[op.name].dtypes, tuple(meta.dtype for meta in op.call.operands)):
            raise _mixed(flow, op, rules)
        if op.call.name in _RESHAPES:
            rules[op.name] = _with_repeats(flow, op, rules[op.name])
    return rules


def _with_repeats(flow: Dataflow, op: Op, rule: Rule) -> Rule:
    """The rule of a view, with the fallback of `of_repeat` where it joins heads that an expand
    repeated, or splits the gradient of such heads, which is then summed over the repeats."""
    maker = flow.producers.get(op.operands[0])
    if maker is not None and maker.call.name == "aten.expand.default":
        before, after = maker.call.operands[0].shape, maker.call.result.shape
        repeats = [i for i in range(1, len(before)) if before[i] == 1 != after[i]]
        if len(before) == len(after) and len(repeats) == 1:
            return of_repeat(rule, repeats[0], splits=False)
    uses = [use.call for use, _ in flow.consumers.get(op.results[0] or "", ())]
    if op.phase == "backward" and {call.name for call in uses} == {"aten.sum.dim_IntList"}:
        dims = {resolve_dims(call.args[1], len(op.call.result.shape)) for call in uses}
        dim, *more = dims.pop()
        if not dims and not more and dim > 0:
            return of_repeat(rule, dim, splits=True)
    return rule


def _mixed(flow: Dataflow, op: Op, rules: Mapping[str, Rule]) -> PlanningError:
    """For operands of dtypes that the op's kernels do not take together."""
    labels = {item.name: item.label for item in flow.inputs}
    metas: dict[str, Meta] = {}  # by the user's name; of a view, what it looks at
    for name in op.operands:
        while (maker := flow.producers.get(name)) is not None and rearranges(
            maker, rules[maker.name]
        ):
            (name,) = maker.operands
        metas[labels.get(name, name)] = flow.metas[name]
    kinds = {flow.metas[i.name].dtype for i in flow.inputs if i.kind == "parameter"}
    alike = len({dtype for dtype in kinds if dtype.is_floating_point}) < 2
    widest = reduce(torch.promote_types, (meta.dtype for meta in metas.values()))
    given = " and ".join(sorted({dtype_name(meta.dtype) for meta in metas.values()}))
    floats = all(meta.dtype.is_floating_point for meta in metas.values())
    other = next((name for name, meta in metas.items() if meta.dtype != widest), "one of them")
    fix = f"make {other} {dtype_name(widest)}, as with .to({widest})"
    fix = fix if alike else "call model.float() (its parameters have several dtypes)"
    fix += ", or run it under torch.autocast" if floats and widest != torch.float64 else ""
    return PlanningError(
        "\n".join(
            [
                f"{op.call.name} does not take {given} together.",
                *(f"  {name}: {meta}" for name, meta in metas.items()),
                *([f"  {op.source}: {op.source_text}"] if op.source else []),
                _other_batch(flow, metas) or f"fix: {fix}",
            ]
        )
    )


def _other_batch(flow: Dataflow, metas: Mapping[str, Meta]) -> str:
    """Return the fix if an argument of another dtype meets parameters of float32, or if the batch
    is float64, which numpy makes by default. ``metas``: the operands."""
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
