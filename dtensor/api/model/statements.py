"""Resolve all that the user stated about a captured call into the planner's request.

    captured = call.capture(mesh, "loss", Options(inputs=dict(dp=Row())), "loss_fn")
    request, stages = request_of(captured)
    plan(request)

The placements of parameters, the stages, ``zero=``, ``recompute=`` and ``misaligned=`` are stated
of each model; the pins of arguments and results, the schedule and the optimizer of the call. A
parameter without a stated placement keeps the placement that an earlier program of its model chose
(`ParallelModule.settled`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtensor.api.model.models import Models
from dtensor.api.model.stating.auto_stages import choose_stages
from dtensor.api.model.stating.recomputed import recomputed_modules
from dtensor.api.model.stating.stages import (
    NO_STAGES,
    StagePlan,
    stage_holding,
    stages_of_arguments,
)
from dtensor.api.model.stating.stated_placements import (
    InputPins,
    ParameterPlacement,
    input_pins,
    num_nonempty,
    ordered_placements,
    planner_pins,
)
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.aux_per_microbatch import aux_per_microbatch
from dtensor.frontend.dataflow.per_microbatch import per_microbatch
from dtensor.frontend.dataflow.split_cache import SplitCache, split_cache
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Graph, Mutation, Param, Result
from dtensor.runtime.lower.timetable import ONE_BY_ONE, GridTimetable
from dtensor.sharding.plan.dataflow import Dataflow, Input
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import OnMisaligned, Request, Search, Training
from dtensor.sharding.plan.sequence import Attention
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec

Pins = Mapping[str, Mapping[str, Placement]]
"""Plan input -> axis -> placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of planning besides the call.

    inputs: the placements of arguments that the user stated, or complete `InputPins`, which are
    used unchanged. results: returns the pins of results, by index. split_results: results without
    pins may stay sharded. training: the optimizer, with all parameters that it trains. each_call:
    the function is captured at each call. per_microbatch: batch norm takes its statistics over each
    microbatch. aux_per_microbatch: so do load-balancing losses. capacity: the budget of rows by
    expert, as a multiple of the balanced rows of a rank. cache: the split of the positions
    of the KV caches that attention reads.
    """

    inputs: Mapping[str, Any] | InputPins | None = None
    split_results: bool = False
    results: Callable[[Graph, Dataflow], Mapping[int, Mapping[str, Placement]]] | None = None
    num_microbatches: int = 1
    timetable: GridTimetable = ONE_BY_ONE
    topology: Topology | None = None
    capacity: float | None = None
    training: Training | None = None
    search: Search = "predictable"
    recompute: tuple[str, ...] = ()
    each_call: bool = False
    per_microbatch: bool = False
    aux_per_microbatch: bool = False
    cache: SplitCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A captured call, and all that is stated about it: the input of `request_of`.

    name: of the program. specs: index of a leaf -> its spec, for DTensors and TensorSpecs. absent:
    the names of the arguments that are None.
    """

    name: str
    graph: Graph
    models: Models
    mesh: Mesh
    options: Options
    specs: Mapping[int, TensorSpec]
    absent: Collection[str]

    def argument_inputs(self, flow: Dataflow) -> list[tuple[Input, Arg]]:
        """Return the inputs of ``flow`` that leaves of the call feed."""
        pairs = zip(flow.inputs, self.graph.inputs, strict=True)
        return [(item, entry) for item, entry in pairs if isinstance(entry, Arg)]


def request_of(captured: CapturedCall) -> tuple[Request, StagePlan]:
    """Return the planner's request, and the stages. Raises PlanningError if statements contradict
    each other or do not fit the program."""
    stages = _stages(captured)
    request = _request(captured, stages)
    written = [name for name, _ in written_leaves(captured.graph)]
    if written and stages.num_stages > 1:
        raise PlanningError(
            f"the function changes its argument {written[0]}, and the model has stages: an "
            f"argument is held by the ranks of all of them, and would change on one.\n"
            f"fix: register it as a buffer of the module that changes it"
        )
    return request, stages


def _request(captured: CapturedCall, stages: StagePlan) -> Request:
    """Return the request for these stages."""
    graph, models, mesh = captured.graph, captured.models, captured.mesh
    options = captured.options
    stage_of = _argument_stages(captured, stages)
    flow = dataflow(graph, stages.held, stages.num_stages, stages.homes, stage_of)
    flow = flow if options.cache is None else split_cache(flow, options.cache)
    results = options.results(graph, flow) if options.results else {}
    if returned := returned_leaves(graph, results):
        needed = (o for o in flow.outputs if o.kind != "result" or o.of not in returned)
        flow = replace(flow, outputs=tuple(needed))
    input_placements = _input_pins(captured, flow, stages)
    stated = planner_pins(flow, _parameter_placements(models), input_placements)
    pins, settled = _with_settled(stated.pins, flow, models)
    _check_stacked(flow, pins, stated.batch)
    _check_results(results, stages)
    num_microbatches, timetable = options.num_microbatches, options.timetable
    if num_microbatches > 1:
        num_microbatches = num_nonempty(num_microbatches, flow, pins, stated.batch, mesh)
    is_short = num_microbatches < options.num_microbatches
    if is_short:
        timetable = timetable.first(num_microbatches)
    zero = models.zero
    if zero is not None and zero.is_auto and options.training is None:
        zero = None  # the level is chosen by the first training step
    request = Request(
        name=captured.name,
        model=", ".join(type(part.module).__name__ for part in models.parts.values()),
        flow=flow,
        mesh=mesh,
        pins=pins,
        pinned_by=stated.pinned_by,
        settled=settled,
        batch=stated.batch,
        results=results,
        split_results=options.split_results,
        stage_axis=stages.axis,
        stage_ranks=stages.ranks if timetable.grid is None else timetable.grid.home(),
        num_microbatches=num_microbatches,
        microbatches_stated=options.num_microbatches if is_short else None,
        timetable=timetable,
        topology=options.topology or Topology(),
        capacity=options.capacity,
        training=_training(options, graph),
        search=options.search,
        zero=zero,
        stored_whole=frozenset() if zero is None else _without_zero(models),
        misaligned=_misaligned(models),
        attention=_attention(models) if options.cache is None else (),
        recompute=_recomputed(models, options, flow),
        auto=stages.patterns if stages.auto else (),
    )
    if options.per_microbatch:
        request = per_microbatch(request)
    return aux_per_microbatch(request) if options.aux_per_microbatch else request


def _check_stacked(flow: Dataflow, pins: Pins, batch: Collection[str]) -> None:
    """Raise PlanningError if an axis splits the batch and the weight of a single expert: without
    stacked experts, no token would be sent to its expert."""
    split = {a for name in batch for a, p in pins.get(name, {}).items() if isinstance(p, Shard)}
    for item in flow.inputs:
        if item.kind != "parameter" or not re.search(r"(^|\.)experts\.\d+\.", item.label):
            continue
        for axis, placement in pins.get(item.name, {}).items():
            if axis in split and isinstance(placement, Shard):
                raise PlanningError(
                    f"{axis} splits the batch, and it would split {item.label}, the weight of one "
                    f"expert, so that no token is sent to its expert.\n"
                    f"fix: stack the weights of the experts as [experts, in, out], state "
                    f"{axis}=dt.Shard(0) for them and use dt.to_experts, or state {axis} for no "
                    f"weight of a single expert"
                )


# -- stages ----------------------------------------------------------------------------------------


def _stages(captured: CapturedCall) -> StagePlan:
    """Return the stages of the models. "auto" chooses them by a plan without stages."""
    models, options = captured.models, captured.options
    if not models.parts:
        return stages_of_arguments(NO_STAGES, list(captured.specs.values()), captured.mesh)
    stages = _common_stages(models)
    if not stages.waiting:
        return stages
    one_by_one = replace(captured, options=replace(options, timetable=ONE_BY_ONE))
    unstaged = _request(one_by_one, replace(stages, num_stages=1))
    return choose_stages(models.module, stages, unstaged, plan, options.timetable.in_flight)


def _common_stages(models: Models) -> StagePlan:
    """Return the stages of all models under the names of the program. Raises PlanningError if the
    models have different axes or numbers of stages."""
    first, *other_plans = ((prefix, model.stage_plan) for prefix, model in models.parts.items())
    plan = first[1]
    held, homes = dict(plan.held), dict(plan.homes)
    for prefix, other in other_plans:
        axis_and_number, other_axis_and_number = (
            p.axis and (p.axis, p.num_stages) for p in (plan, other)
        )
        if axis_and_number != other_axis_and_number or plan.waiting or other.waiting:
            raise PlanningError(
                f"the modules of a call have their stages alike, stated: one has "
                f"stages={plan.stated()}, {prefix.rstrip('.')} stages={other.stated()}.\n"
                f"fix: state {plan.num_stages} stages of {plan.axis} for each, or none for any"
                if plan.axis and not plan.waiting
                else "the modules of a call have their stages alike, stated.\n"
                "fix: state the stages of each, or none for any"
            )
        held |= {f"{prefix}{name}": stages for name, stages in other.held.items()}
        homes |= {f"{prefix}{name}": stages for name, stages in other.homes.items()}
    return replace(plan, held=held, homes=homes)


def _argument_stages(captured: CapturedCall, stages: StagePlan) -> dict[str, int]:
    """Return the stage of each DTensor argument that only a part of the mesh holds, by input."""
    graph, stage_of = captured.graph, dict[str, int]()
    for node, entry in zip(graph.placeholders, graph.inputs, strict=True):
        if not isinstance(entry, Arg):
            continue
        spec = captured.specs.get(entry.index)
        if spec is None or not spec.on:  # not a DTensor, or the whole mesh holds it
            continue
        if any(not isinstance(output, Result | Mutation) for output in graph.outputs):
            raise PlanningError(
                f"{entry.name} is {spec}: only a part of the mesh holds it, and where there are "
                f"gradients an argument is read on all of it.\n"
                f"fix: pass {entry.name}.full_tensor()"
            )
        stage = stage_holding(entry.name, spec, stages, captured.mesh)
        if stages.num_stages > 1:  # it is 1 while "auto" has not chosen the stages
            stage_of[node.name] = stage
    return stage_of


# -- pins ------------------------------------------------------------------------------------------


def _parameter_placements(models: Models) -> list[ParameterPlacement]:
    """Return the stated placements of all models, under the parameters' names in the program."""
    return [
        replace(
            stated,
            name=f"{prefix}{stated.name}",
            owner=stated.owner and replace(stated.owner, module=f"{prefix}{stated.owner.module}"),
        )
        for prefix, model in models.parts.items()
        for stated in model.placements
    ]


def _input_pins(captured: CapturedCall, flow: Dataflow, stages: StagePlan) -> InputPins:
    """Return the pins of arguments: what ``inputs`` states; on other axes, the placements that
    DTensors have."""
    mesh, inputs = captured.mesh, captured.options.inputs
    if isinstance(inputs, InputPins):
        return inputs
    arguments = captured.argument_inputs(flow)
    metas = {entry.name: item.meta for item, entry in arguments}
    absent = captured.absent
    stated = input_pins(metas, inputs, mesh, stage_axis=stages.axis, absent=absent)
    pins: dict[str, Mapping[str, Placement]] = dict(stated.pins)
    for _, entry in arguments:
        name, spec = entry.name, captured.specs.get(entry.index)
        if spec is None:
            continue
        if spec.mesh != mesh:
            raise PlanningError(
                f"{name} is on {spec.mesh}, the program is for {mesh}.\n"
                f"fix: dt.transfer({name}, {mesh!r}) first, or make the program for {spec.mesh!r}"
            )
        pins[name] = {**ordered_placements(spec), **pins.get(name, {})}
    return InputPins(pins=pins, batch=stated.batch)


def _with_settled(
    stated: Pins, flow: Dataflow, models: Models
) -> tuple[dict[str, Mapping[str, Placement]], frozenset[str]]:
    """Complete the stated pins by the placements that earlier programs of the models chose for
    parameters. Also return the inputs that have no stated pin."""
    settled = {
        f"{prefix}{model.seen.names[label]}": placements
        for prefix, model in models.parts.items()
        for label, placements in model.settled.items()
        if label in model.seen.names
    }
    pins, unstated = dict(stated), set[str]()
    for item in flow.inputs:
        if item.label in settled and item.kind != "argument":
            if item.name not in stated:
                unstated.add(item.name)
            pins[item.name] = {**settled[item.label], **stated.get(item.name, {})}
    return pins, frozenset(unstated)


def _check_results(results: Mapping[int, Mapping[str, Placement]], stages: StagePlan) -> None:
    """Raise PlanningError if ``out=`` places a result on the axis of stages."""
    for index, placements in results.items():
        if stages.axis in placements:
            raise PlanningError(
                f'out= places result {index} on the axis "{stages.axis}", which holds the stages.\n'
                f"fix: leave {stages.axis} out of it: a result lies on the stage that makes it"
            )


def written_leaves(graph: Graph) -> list[tuple[str, int]]:
    """Return the name and index of each leaf that the program writes in place."""
    writes = (output for output in graph.outputs if isinstance(output, Mutation))
    return [(write.name, write.index) for write in writes if write.index is not None]


def returned_leaves(graph: Graph, pinned: Mapping[int, object]) -> dict[int, int]:
    """Map each result that is a leaf, returned after the program wrote it in place, to that leaf. A
    result with a pin is a separate tensor."""
    pairs = list(zip(graph.output_nodes, graph.outputs, strict=True))
    leaves = {node: o.index for node, o in pairs if isinstance(o, Mutation) and o.index is not None}
    return {
        o.index: leaves[node]
        for node, o in pairs
        if isinstance(o, Result) and node in leaves and not pinned.get(o.index)
    }


# -- training, zero=, misaligned=, attention=, recompute= ------------------------------------------


def _training(options: Options, graph: Graph) -> Training | None:
    """Return ``options.training``, restricted to the parameters that the program has."""
    if options.training is None:
        return None
    parameters = {entry.name for entry in graph.inputs if isinstance(entry, Param)}
    return options.training.restricted_to(parameters)


def _without_zero(models: Models) -> frozenset[str]:
    """Return the names of the parameters of models that do not state ``zero=``."""
    return frozenset(
        f"{prefix}{name}"
        for prefix, model in models.parts.items()
        if model.zero is None
        for name in model.seen.labels
    )


def _misaligned(models: Models) -> OnMisaligned:
    stated = [model.misaligned for model in models.parts.values()]
    if "gather" in stated:
        return "gather"
    return "error" if "error" in stated else "redistribute"


def _attention(models: Models) -> Attention:
    """Return the common ``attention=``. Raises PlanningError if models state different words."""
    stated: dict[str, str] = {}
    for model in models.parts.values():
        for axis, word in model.attention:
            if stated.setdefault(axis, word) != word:
                raise PlanningError(
                    f"the modules of a call state attention={{{axis!r}: {stated[axis]!r}}} and "
                    f"{{{axis!r}: {word!r}}}.\nfix: state the same for each"
                )
    return tuple(stated.items())


def _recomputed(models: Models, options: Options, flow: Dataflow) -> frozenset[str]:
    """Return the modules whose forward runs again in the backward."""
    stated = (f"{prefix}{glob}" for prefix, m in models.parts.items() for glob in m.recompute)
    globs = options.recompute or tuple(stated)
    if not models.parts or not globs or all(op.phase == "forward" for op in flow.ops):
        return frozenset()
    return recomputed_modules(globs, models.module, flow)
