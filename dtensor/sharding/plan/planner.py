"""The planner: from a Dataflow, a mesh and pins to a Plan.

    plan(Request(flow=..., mesh=Mesh(tp=2), pins={"w1": {"tp": Shard(0)}}, ...)) -> Plan

Axis after axis in mesh order, the microbatch axis last, each chosen exactly
(plan/choose/choose_axis.py); then the steps are laid down in program order with the conversions
that connect them (plan/emit/emitter.py). Planning is pure: the same request gives the same plan.
Every error is raised here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.choose_axis import choose_axis
from dtensor.sharding.plan.choose.choose_composites import cheapest
from dtensor.sharding.plan.choose.opened_factors import Pin
from dtensor.sharding.plan.choose.prices import AxisChoice, Question
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.emit.emitter import emit
from dtensor.sharding.plan.gc_pause import collector_paused
from dtensor.sharding.plan.passes.recompute import recomputed
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.rules.registry import NoRule, rule_for
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import PARTIAL, REPLICATE, Placement, Shard, refine
from dtensor.sharding.spec.spec import TensorSpec, make_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the optimizer phase needs: which parameters are trained, by what, and clipping.

    ``trained``: labels of parameters; ``state_tensors``: how many tensors of a parameter's shape
    the optimizer keeps for it; ``master_weights``: it updates float32 copies of narrow ones.
    """

    optimizer: str
    trained: frozenset[str]
    state_tensors: int
    clip_grad_norm: float | None = None
    master_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan is asked for.

    pins: input name -> axis -> placement, in the order the user stated the axes.
    held: input name -> the spec under which it stands already; it has no pins.
    pinned_by: input name -> what the user wrote the pin for ("blocks.*.up.weight").
    settled: those of ``pins`` that an earlier plan chose; they open nothing.
    batch: the names of the inputs whose dim 0 is the batch.
    results: index of a user result -> axis -> placement (default Replicate).
    split_results: a result on which nothing is stated may stay split as it comes out.
    pending_results: likewise one that comes out pending; it is priced as if it were reduced.
    zero: an axis and a level: what of the parameters is stored split over it.
    recompute: full names of the modules whose forward runs again in the backward.
    """

    name: str
    flow: Dataflow
    mesh: Mesh
    pins: Mapping[str, Mapping[str, Placement]]
    held: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    pinned_by: Mapping[str, str] = field(default_factory=dict[str, str])
    settled: frozenset[str] = frozenset()
    batch: tuple[str, ...] = ()
    results: Mapping[int, Mapping[str, Placement]] = field(
        default_factory=dict[int, Mapping[str, Placement]]
    )
    stage_axis: str | None = None
    stage_ranks: tuple[int, ...] = ()
    num_microbatches: int = 1
    topology: Topology = field(default_factory=Topology)
    training: Training | None = None
    free: bool = False
    split_results: bool = False
    pending_results: bool = False
    zero: tuple[str, int] | None = None
    recompute: frozenset[str] = frozenset()


@collector_paused()
def plan(request: Request) -> Plan:
    """Decide every placement and collective. Raises PlanningError."""
    if not request.stage_ranks:
        num = request.mesh.axis_size(request.stage_axis) if request.stage_axis else 1
        request = replace(request, stage_ranks=dealt(request.flow.num_stages, num))
    found = cheapest(
        request.flow,
        lambda flow: _plan(replace(request, flow=flow)),
        keep_split=not request.free,
    )
    return recomputed(found, request.recompute)


def dealt(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage where stages are dealt out in turn."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def _plan(request: Request) -> Plan:
    flow, mesh = request.flow, request.mesh
    inner = mesh.without(request.stage_axis) if request.stage_axis else mesh
    if request.num_microbatches > 1:
        _check_batch(request, inner)
        inner = inner.extended(MICROBATCH_AXIS, request.num_microbatches)
    rules = rules_of(flow)
    question = _question(request, inner, rules)
    done: list[AxisChoice] = []
    for axis in inner.axes:
        if inner.axis_size(axis) > 1:
            done.append(choose_axis(question, axis, done))
    return emit(request, inner, rules, done)


def rules_of(flow: Dataflow) -> dict[str, Rule]:
    """The rule of every op by op name; NoRule names the user's line."""
    found: dict[str, Rule] = {}
    for op in flow.ops:
        try:
            found[op.name] = rule_for(op.call)
        except NoRule as error:
            fact, _, fix = str(error).partition("\n")
            where = f"\n  {op.source}: {op.source_text}" if op.source else ""
            raise NoRule(f"{fact}{where}\n{fix}") from None
    return found


def _question(request: Request, inner: Mesh, rules: Mapping[str, Rule]) -> Question:
    flow = request.flow
    gradients: dict[str, tuple[str, ...]] = {}
    mutations: dict[str, str] = {}
    by_label = {i.label: i.name for i in flow.inputs}
    for output in flow.outputs:
        if output.kind == "gradient":
            name = by_label[str(output.of)]
            gradients[name] = (*gradients.get(name, ()), output.value)
        elif output.kind == "mutation":
            mutations[by_label[str(output.of)]] = output.value
    results = {o.of: o.value for o in flow.outputs if o.kind == "result"}
    wanted: dict[str, dict[str, Placement]] = {}
    for index, placements in request.results.items():
        for axis, placement in placements.items():
            wanted.setdefault(axis, {})[results[index]] = placement
    if request.num_microbatches > 1:
        wanted[MICROBATCH_AXIS] = dict.fromkeys(results.values(), PARTIAL)
    return Question(
        flow=flow,
        rules=rules,
        mesh=inner,
        pins=_pins(request, inner),
        wanted=wanted,
        gradients=gradients,
        mutations=mutations,
        topology=request.topology,
        free=request.free,
        bucketed=request.training is not None,
        split_results=request.split_results,
        mixed=_mixed(flow),
    )


def _pins(request: Request, inner: Mesh) -> dict[str, dict[str, Pin]]:
    """Axis -> value -> pin, two axes on one dim refined; batches split over microbatches."""
    metas = request.flow.metas
    kinds = {i.name: i.kind for i in request.flow.inputs}
    pins: dict[str, dict[str, Pin]] = {}
    for value, spec in request.held.items():
        for axis, placement in spec.sharding.items():
            if placement != REPLICATE:
                pins.setdefault(axis, {})[value] = Pin(value=value, placement=placement, by=value)
    for value, placements in request.pins.items():
        meta = metas[value]
        spec = make_spec(meta.shape, meta.dtype, request.mesh, placements)
        flat = kinds[value] in ("parameter", "buffer") and len(meta.shape) <= 1
        opens = value not in request.settled and not flat
        by = request.pinned_by.get(value, value)
        for axis, stated in placements.items():
            placement = spec.placement(axis)
            pins.setdefault(axis, {})[value] = Pin(
                value=value,
                placement=placement,
                by=by,
                opens=opens,
                stated=stated if isinstance(stated, Shard) else None,
            )
    if request.num_microbatches > 1:
        for value in request.batch:
            meta = metas[value]
            majors = [
                (pin.placement, inner.axis_size(axis))
                for axis in inner.axes
                if (pin := pins.get(axis, {}).get(value)) is not None
                and isinstance(pin.placement, Shard)
                and pin.placement.dim == 0
                and inner.axis_size(axis) > 1
            ]
            shard = refine(Shard(0), majors, meta.shape[0])
            pins.setdefault(MICROBATCH_AXIS, {})[value] = Pin(
                value=value, placement=shard, by=value
            )
    return pins


def _check_batch(request: Request, inner: Mesh) -> None:
    """Every rank must get the same number of rows in every microbatch."""
    metas = request.flow.metas
    labels = {i.name: i.label for i in request.flow.inputs}
    for value in request.batch:
        size = metas[value].shape[0]
        split = {
            axis: inner.axis_size(axis)
            for axis, p in request.pins.get(value, {}).items()
            if isinstance(p, Shard) and p.dim == 0
        }
        parts = request.num_microbatches
        for num in split.values():
            parts *= num
        if size % parts:
            over = "".join(f" x {axis}={n}" for axis, n in split.items())
            near = [
                n for n in range(1, size + 1) if size % (n * parts // request.num_microbatches) == 0
            ]
            best = min(near, key=lambda n: (abs(n - request.num_microbatches), n), default=1)
            raise PlanningError(
                f"the batch does not divide into microbatches.\n"
                f"  {labels[value]}: {metas[value]}, dim 0 of {size}\n"
                f"  microbatches={request.num_microbatches}{over}: {parts} parts\n"
                f"fix: microbatches={best}, or a batch that is a multiple of {parts}"
            )


def _mixed(flow: Dataflow) -> frozenset[str]:
    """The values that depend both on the batch and on parameters."""
    depends: dict[str, frozenset[str]] = {}
    for item in flow.inputs:
        depends[item.name] = {
            "argument": frozenset({"batch"}),
            "parameter": frozenset({"state"}),
            "buffer": frozenset({"state"}),
            "tangent": frozenset({"state", "batch"}),
            "constant": frozenset[str](),
        }[item.kind]
    for op in flow.ops:
        here = frozenset[str]().union(*(depends[name] for name in op.operands))
        for name in op.results:
            if name is not None:
                depends[name] = here
    return frozenset(v for v, d in depends.items() if len(d) == 2)
