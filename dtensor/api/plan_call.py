"""From a call to a plan: capture, stages, pins; the part that compile and train_step share.

    call = Call.of(loss_fn, (model, tokens, targets))
    planned = plan_call(call, mesh, grads="loss", ...)
    planned.plan            # sharding.Plan
    planned.arguments       # plan input name -> leaf of the call's (args, kwargs)

Leaves of a call may be tensors (also on the meta device), DTensors, specs, parallelized or plain
modules, and anything else, which is a constant of the program. Nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils import _pytree as pytree

from dtensor.api.eager.tensor import DTensor
from dtensor.api.leaves import check_leaf, for_capture, leaf_key
from dtensor.api.parallel import ParallelModule
from dtensor.api.stating.auto_stages import cut
from dtensor.api.stating.placing import (
    InputPins,
    ParameterPlacement,
    input_pins,
    planner_pins,
    restated,
)
from dtensor.api.stating.recompute_globs import recomputed_modules
from dtensor.api.stating.stages import NO_STAGES, StagePlan
from dtensor.errors import PlanningError
from dtensor.frontend.capture.autocast import surrounding
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Graph, Param
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow, Input
from dtensor.sharding.plan.gc_pause import collector_paused
from dtensor.sharding.plan.passes.precision import uncast
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import Request, Training, plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement
from dtensor.sharding.spec.spec import TensorSpec

Grads = Literal["none", "loss", "tangents"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call's flattened arguments."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """PlanningError for an argument whose tensors are out of sight."""
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            check_leaf(leaf)
        return Call(fn, tuple(leaves), tree)

    def key(self) -> object:
        """What the captured program depends on: shapes, dtypes, placements, modules, numbers, the
        autocast around the call."""
        return (str(self.tree), tuple(leaf_key(leaf) for leaf in self.leaves), surrounding())

    @property
    def model(self) -> ParallelModule | None:
        """The parallelized module among the arguments; PlanningError for two."""
        found = {id(x): x for x in self.leaves if isinstance(x, ParallelModule)}
        if isinstance(self.fn, ParallelModule):
            found[id(self.fn)] = self.fn
        if len(found) > 1:
            raise PlanningError(
                "a call takes one parallelized module; fix: make one nn.Module of them and "
                "parallelize that"
            )
        return next(iter(found.values()), None)

    def graph(self, grads: Grads) -> Graph:
        leaves = [for_capture(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        fn = self.fn.module if isinstance(self.fn, ParallelModule) else self.fn
        return capture(fn, args, kwargs, grads=grads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, what it came from, and which leaf of the call feeds which input."""

    plan: Plan
    graph: Graph
    arguments: Mapping[str, int]
    model: ParallelModule | None
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a plan depends on besides the call. ``inputs``: as stated, or pins that stand as they
    are, whatever the arguments are; ``split_results``: those on which nothing is stated may stay
    split; ``graph``: the call's, where it is captured; ``in_flight``: by stage, the microbatches
    that the schedule holds, for stages to be chosen."""

    inputs: Mapping[str, Any] | InputPins | None = None
    split_results: bool = False
    results: Callable[[Graph, Dataflow], Mapping[int, Mapping[str, Placement]]] | None = None
    num_microbatches: int = 1
    topology: Topology | None = None
    training: Callable[[Graph], Training] | None = None
    free: bool = False
    graph: Graph | None = None
    recompute: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()


@collector_paused()
def plan_call(call: Call, mesh: Mesh, grads: Grads, options: Options, name: str) -> Planned:
    """Capture and plan. Raises PlanningError; nothing is launched, nothing computed."""
    model = call.model
    if model is not None and model.mesh != mesh:
        raise PlanningError(
            f"the model was parallelized on {model.mesh}, the program is for {mesh}"
        )
    graph = options.graph or call.graph(grads)
    stages = model.stage_plan if model is not None else NO_STAGES
    if model is not None and stages.waiting:
        whole = _request(call, graph, model, mesh, replace(stages, num_stages=1), options, name)
        stages = cut(model.module, stages, whole, plan, options.in_flight)
    request = _request(call, graph, model, mesh, stages, options, name)
    planned = replace(plan(request), auto=stages.patterns if stages.auto else ())
    if model is not None:
        model.stage_plan = stages  # what was chosen holds once there is a plan
        _settle(model, planned)
    return Planned(
        plan=planned,
        graph=graph,
        arguments={item.name: entry.index for item, entry in _arguments(request.flow, graph)},
        model=model,
        request=request,
    )


def _request(
    call: Call,
    graph: Graph,
    model: ParallelModule | None,
    mesh: Mesh,
    stages: StagePlan,
    options: Options,
    name: str,
) -> Request:
    """What of a call the planner is asked."""
    flow = dataflow(graph, stages.held, stages.num_stages, stages.homes)
    training = options.training(graph) if options.training else None
    if training is not None:  # parameters outside the optimizer are frozen: no gradient is made
        flow = uncast(
            flow.pruned(
                tuple(o for o in flow.outputs if o.kind != "gradient" or o.of in training.trained)
            )
        )
    named = _arguments(flow, graph)
    metas = {entry.name: item.meta for item, entry in named}
    leaves = {entry.name: call.leaves[entry.index] for _, entry in named}
    pins = _input_pins(metas, leaves, options, mesh, stages)
    parameters: tuple[ParameterPlacement, ...] = model.placements if model is not None else ()
    found = planner_pins(flow, parameters, pins)
    stated = dict(found.pins)
    settled: set[str] = set()
    for item in flow.inputs:
        if model is not None and item.label in model.settled and item.kind != "argument":
            if item.name not in stated:
                settled.add(item.name)
            merged = {**model.settled[item.label], **stated.get(item.name, {})}
            stated[item.name] = merged
    return Request(
        name=name,
        flow=flow,
        mesh=mesh,
        pins=stated,
        pinned_by=found.pinned_by,
        settled=frozenset(settled),
        batch=found.batch,
        results=options.results(graph, flow) if options.results else {},
        split_results=options.split_results,
        stage_axis=stages.axis,
        stage_ranks=stages.ranks,
        num_microbatches=options.num_microbatches,
        topology=options.topology or Topology(),
        training=training,
        free=options.free,
        zero=model.zero if model is not None else None,
        recompute=_recomputed(model, options, flow),
    )


def _arguments(flow: Dataflow, graph: Graph) -> list[tuple[Input, Arg]]:
    """The inputs that the caller's leaves feed."""
    return [
        (item, entry)
        for item, entry in zip(flow.inputs, graph.inputs, strict=True)
        if isinstance(entry, Arg)
    ]


def _recomputed(model: ParallelModule | None, options: Options, flow: Dataflow) -> frozenset[str]:
    """The modules whose forward runs again; none where the program has no backward."""
    globs = options.recompute or (model.recompute if model is not None else ())
    if model is None or not globs or all(op.phase == "forward" for op in flow.ops):
        return frozenset()
    return recomputed_modules(globs, model.module, flow)


def _input_pins(
    metas: Mapping[str, Meta],
    leaves: Mapping[str, Any],
    options: Options,
    mesh: Mesh,
    stages: StagePlan,
) -> InputPins:
    """The pins of arguments: what ``inputs`` states, else how DTensors and specs are placed."""
    if isinstance(options.inputs, InputPins):
        return options.inputs
    pins = input_pins(metas, options.inputs, mesh, stage_axis=stages.axis)
    merged: dict[str, Mapping[str, Placement]] = dict(pins.pins)
    for name, leaf in leaves.items():
        if isinstance(leaf, (DTensor, TensorSpec)):
            spec = leaf.spec if isinstance(leaf, DTensor) else leaf
            if spec.mesh != mesh:
                raise PlanningError(f"{name} is on {spec.mesh}, the program is for {mesh}")
            merged[name] = {**restated(spec), **merged.get(name, {})}
    return InputPins(pins=merged, batch=pins.batch)


def _settle(model: ParallelModule, planned: Plan) -> None:
    """What the first plan of a model chose for its free parameters holds for all later ones."""
    for item in planned.inputs:
        if item.kind in ("parameter", "buffer") and item.label not in model.settled:
            split = restated(item.spec)
            whole = [a for a in planned.mesh.axes if a in item.spec.mesh.axes and a not in split]
            model.settled[item.label] = {**split, **dict.fromkeys(whole, REPLICATE)}


def parameter_labels(graph: Graph) -> frozenset[str]:
    return frozenset(entry.name for entry in graph.inputs if isinstance(entry, Param))
