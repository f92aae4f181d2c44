"""The inputs and the result of choosing strategies on one axis: `AxisProblem` and `AxisChoice`.

    axis_problem = axis_problem_of(request, inner, rules)
    axis_problem.pins["tp"]["up_weight"]  # Pin(value="up_weight", placement=Shard(0), ...)

The user states pins on the user's mesh. They are refined here: if two axes shard one dim, the
second axis cuts the pieces of the first; and a batch is also split over microbatches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from dtensor.sharding.plan.choose.annotations import annotation_placements
from dtensor.sharding.plan.choose.opened_factors import Rules
from dtensor.sharding.plan.choose.routes import routes
from dtensor.sharding.plan.dataflow import Dataflow, Op, layer_groups
from dtensor.sharding.plan.record import Misaligned, Opened
from dtensor.sharding.plan.request import OnMisaligned, Pin, Request
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import PARTIAL, REPLICATE, Placement, Shard, refine
from dtensor.sharding.spec.spec import make_spec


@dataclass(frozen=True, kw_only=True)
class AxisChoice:
    """The decisions on one axis: a strategy for each op and a placement for each input, by name."""

    axis: str
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Placement]
    opened: tuple[Opened, ...]
    misaligned: Mapping[str, Misaligned]  # by input


@dataclass(frozen=True, kw_only=True)
class AxisProblem:
    """The inputs of choosing strategies, the same for every axis. ``mesh`` is the inner mesh."""

    flow: Dataflow
    rules: Rules
    mesh: Mesh
    pins: Mapping[str, Mapping[str, Pin]]  # axis -> value -> pin
    result_placements: Mapping[str, Mapping[str, Placement]]  # axis -> result value -> placement
    gradients: Mapping[str, tuple[str, ...]]  # input -> the values of its gradients
    mutations: Mapping[str, str]  # input -> the value of its new contents
    topology: Topology
    free: bool
    on_batch_and_state: frozenset[str]  # values that depend on the batch and on parameters
    bucketed: bool = False  # whether gradients are reduced in buckets, as for an optimizer
    split_results: bool = False  # whether a result without a stated placement may stay split
    misaligned: OnMisaligned = "redistribute"

    @cached_property
    def routes(self) -> dict[str, str]:
        """The counts of the route of each value that is rows of experts, by value."""
        return routes(self.flow, self.rules)

    def pins_on(self, axis: str) -> dict[str, Pin]:
        """Return the pins on the axis, including the pins that annotations in the program state."""
        pins = dict(self.pins.get(axis, {}))
        for op in self.flow.ops:
            if self.is_mark(op):
                stated = annotation_placements(op, self.mesh)
                if axis in stated:
                    assert op.results[0] is not None
                    pins[op.results[0]] = Pin(
                        value=op.results[0],
                        placement=stated[axis],
                        by=f"annotate at {op.source}",
                        until_contraction=True,
                    )
        return pins

    @cached_property
    def layer_groups(self) -> dict[str, Hashable]:
        """The group of each op by name: one choice is made for all ops of a group."""
        return layer_groups(self.flow)

    def labels(self) -> dict[str, str]:
        return {i.name: i.label for i in self.flow.inputs if i.kind in ("parameter", "buffer")}

    def is_view(self, op: Op) -> bool:
        return self.rules[op.name].kind == "view"

    def is_mark(self, op: Op) -> bool:
        return self.rules[op.name].kind == "mark"


def inner_mesh(request: Request) -> Mesh:
    """Return the mesh of specs: without the stage axis, with the microbatch axis if needed."""
    inner = request.mesh.without(request.stage_axis) if request.stage_axis else request.mesh
    if request.num_microbatches == 1:
        return inner
    return inner.extended(MICROBATCH_AXIS, request.num_microbatches)


def axis_problem_of(request: Request, inner: Mesh, rules: Rules) -> AxisProblem:
    """Return the inputs of choosing strategies for the request."""
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
    result_placements: dict[str, dict[str, Placement]] = {}
    for index, placements in request.results.items():
        for axis, placement in placements.items():
            result_placements.setdefault(axis, {})[results[index]] = placement
    if request.num_microbatches > 1:
        result_placements[MICROBATCH_AXIS] = dict.fromkeys(results.values(), PARTIAL)
    return AxisProblem(
        flow=flow,
        rules=rules,
        mesh=inner,
        pins=_pins_by_axis(request, inner),
        result_placements=result_placements,
        gradients=gradients,
        mutations=mutations,
        topology=request.topology,
        free=request.search == "free",
        bucketed=request.training is not None,
        split_results=request.split_results,
        misaligned=request.misaligned,
        on_batch_and_state=flow.batch_values & flow.depending("parameter", "buffer", "tangent"),
    )


def _pins_by_axis(request: Request, inner: Mesh) -> dict[str, dict[str, Pin]]:
    """Return axis -> value -> pin. If two axes shard one dim of a value, the axis stated second
    cuts the pieces of the first. Pins of the batch are also split over microbatches."""
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
