"""From a call to a plan: capture, stages, pins; the part that compile and train_step share.

    call = BoundCall.of(loss_fn, (model, tokens, targets), {})
    planned = plan_call(call, mesh, "loss", Options(), "loss_fn")
    planned.plan            # sharding.Plan
    planned.arguments       # plan input name -> leaf of the call's (args, kwargs)

Leaves of a call may be tensors (also on the meta device), DTensors, specs, parallelized or plain
modules, and anything else, which is a constant of the program. A program depends on the shapes of
tensors and specs, on the mode and the plain attributes of modules (a dropout's p, a temperature),
on numbers and strings, and on anything else by identity; and on what programs of the same model
that ran before chose for parameters that nothing was stated of.

Planning changes neither the model nor what asks for the plan. Nothing is launched here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from dtensor.api.eager.tensor import DTensor
from dtensor.api.parallel import ParallelModule, recomputed_modules
from dtensor.api.stating.auto_stages import cut
from dtensor.api.stating.placing import (
    InputPins,
    ParameterPlacement,
    input_pins,
    planner_pins,
    restated,
)
from dtensor.api.stating.stages import NO_STAGES, StagePlan
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.capture.patches import surrounding
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Graph, Param
from dtensor.numerics import dtype_name
from dtensor.runtime.lower.actions import GridTimetable
from dtensor.sharding.gc_pause import collector_paused
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow, Input
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request, Search, Training
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import TensorSpec

Grads = Literal["none", "loss", "tangents"]

_PLAIN = frozenset({bool, int, float, str})
_DEEPEST = 4  # how far into an unknown object tensors are looked for


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A function and its arguments, flattened."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """PlanningError for an argument whose tensors are out of sight."""
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            check_leaf(leaf)
        return BoundCall(fn, tuple(leaves), tree)

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
    """A plan, what it came from, and which leaf of the call feeds which input.

    ``stages``: those of the plan, which "auto" has chosen.
    """

    plan: Plan
    graph: Graph
    arguments: Mapping[str, int]
    model: ParallelModule | None
    request: Request
    stages: StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a plan depends on besides the call. ``inputs``: as stated, or pins that stand as they
    are, whatever the arguments are; ``split_results``: those on which nothing is stated may stay
    split; ``graph``: the call's, where it is captured."""

    inputs: Mapping[str, Any] | InputPins | None = None
    split_results: bool = False
    results: Callable[[Graph, Dataflow], Mapping[int, Mapping[str, Placement]]] | None = None
    num_microbatches: int = 1
    timetable: GridTimetable | None = None
    topology: Topology | None = None
    training: Callable[[Graph], Training] | None = None
    search: Search = "predictable"
    graph: Graph | None = None
    recompute: tuple[str, ...] = ()


class PlanCache:
    """Plans of one function by what they depend on; ``latest``: what was asked for last.

    One that disagrees with what the model's programs have settled since is made anew.
    """

    def __init__(self) -> None:
        self.latest: Planned | None = None
        self._plans: dict[object, Planned] = {}
        self._settled: dict[object, int] = {}  # the state of the model that a plan agrees with

    def __len__(self) -> int:
        return len({id(planned) for planned in self._plans.values()})

    def get(self, key: Callable[[], object], make: Callable[[], Planned]) -> Planned:
        now = key()
        found = self._plans.get(now)
        if found is None or not self._agrees(now, found):
            try:
                found = make()
            except Exception as error:
                from dtensor.frontend.capture.failures import without_ours  # seldom needed

                raise without_ours(error)  # noqa: B904 - it is the same
            # capture ran the function, which may count its calls in an attribute of a module
            for one in (now, key()):
                self._plans[one] = found
                self._settled[one] = _settlement(found)
        self.latest = found
        return found

    def _agrees(self, key: object, planned: Planned) -> bool:
        settlement = _settlement(planned)
        if self._settled[key] != settlement:
            model = planned.model
            if model is not None and not model.agrees(planned.plan, planned.stages):
                return False
            self._settled[key] = settlement
        return True


def _settlement(planned: Planned) -> int:
    return 0 if planned.model is None else planned.model.settlement


@collector_paused()
def plan_call(call: BoundCall, mesh: Mesh, grads: Grads, options: Options, name: str) -> Planned:
    """Capture and plan. Raises PlanningError; nothing is launched, nothing computed."""
    model = call.model
    if model is not None and model.mesh != mesh:
        raise PlanningError(
            f"the model was parallelized on {model.mesh}, the program is for {mesh}"
        )
    graph = options.graph or call.graph(grads)
    stages = model.stage_plan if model is not None else NO_STAGES
    if model is not None and stages.waiting:
        one = replace(stages, num_stages=1)
        whole = _request(call, graph, model, mesh, one, replace(options, timetable=None), name)
        in_flight = options.timetable.in_flight if options.timetable else ()
        stages = cut(model.module, stages, whole, plan, in_flight)
    request = _request(call, graph, model, mesh, stages, options, name)
    return Planned(
        plan=plan(request),
        graph=graph,
        arguments={item.name: entry.index for item, entry in _arguments(request.flow, graph)},
        model=model,
        request=request,
        stages=stages,
    )


def _request(
    call: BoundCall,
    graph: Graph,
    model: ParallelModule | None,
    mesh: Mesh,
    stages: StagePlan,
    options: Options,
    name: str,
) -> Request:
    """What of a call the planner is asked."""
    flow = dataflow(graph, stages.held, stages.num_stages, stages.homes)
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
            stated[item.name] = {**model.settled[item.label], **stated.get(item.name, {})}
    timetable = options.timetable
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
        stage_ranks=stages.ranks if timetable is None else timetable.grid.home(),
        num_microbatches=options.num_microbatches,
        timetable=timetable,
        topology=options.topology or Topology(),
        training=options.training(graph) if options.training else None,
        search=options.search,
        zero=model.zero if model is not None else None,
        recompute=_recomputed(model, options, flow),
        auto=stages.patterns if stages.auto else (),
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


def parameter_labels(graph: Graph) -> frozenset[str]:
    return frozenset(entry.name for entry in graph.inputs if isinstance(entry, Param))


# -- leaves ----------------------------------------------------------------------------------------


class _Same:
    """An object by identity. It is kept alive: the id of one that is gone is given out again."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def leaf_key(leaf: Any) -> object:
    """What the captured program depends on."""
    match leaf:
        case DTensor():
            return (leaf.spec, leaf.requires_grad)
        case TensorSpec():
            return (leaf, leaf.requires_grad)
        case torch.Tensor():
            return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        case ParallelModule():
            return (_Same(leaf), _settings(leaf.module))
        case torch.nn.Module():
            return (_Same(leaf), _settings(leaf))
        case int() | float() | str() | bool() | None:
            return (type(leaf), leaf)
        case _:
            return _Same(leaf)


def _settings(module: torch.nn.Module) -> tuple[object, ...]:
    """``training`` and the other plain attributes, which forward may read; tensors that are no
    buffers are constants of the program."""
    return tuple(
        tuple(
            value if type(value) in _PLAIN else (_Same(value), value._version)
            for value in vars(part).values()
            if type(value) in _PLAIN or type(value) is torch.Tensor  # isinstance of it is slow
        )
        for part in module.modules()
    )


def for_capture(leaf: Any) -> Any:
    """A module, or a tensor without placements, in the leaf's stead."""
    match leaf:
        case ParallelModule():
            return leaf.module
        case DTensor() | TensorSpec():
            empty = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
            return empty.requires_grad_(leaf.requires_grad)
        case _:
            return leaf


def check_leaf(leaf: Any) -> None:
    """PlanningError for an object with tensors inside, which pytrees do not open: they would be
    constants, and a later call's would not be looked at."""
    match leaf:
        case torch.Tensor() | TensorSpec() | ParallelModule() | torch.nn.Module():
            return
        case int() | float() | complex() | str() | bytes() | None:
            return
        case _:
            found = next(_tensors("", leaf, _DEEPEST), None)
    if found is None:
        return
    path, tensor = found
    kind = type(leaf).__name__
    fix = f"torch.export.register_dataclass({kind})" if dataclasses.is_dataclass(leaf) else ""
    if isinstance(leaf, Mapping):
        fix = "pass dict(...) of it"
    shape = ",".join(map(str, tensor.shape))
    raise PlanningError(
        f"an argument is a {kind}, and tensors inside one are not seen as arguments.\n"
        f"  {kind}{path}: {dtype_name(tensor.dtype)}[{shape}]\n"
        f"fix: {fix or 'pass the tensors themselves, alone or in a dict, list or named tuple'}"
    )


def _tensors(path: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are reached through mappings, sequences and attributes, with their paths."""
    inside: Iterable[tuple[str, Any]] = ()
    match value:
        case torch.Tensor():
            yield path, value
        case type() | torch.nn.Module() | str() | bytes():
            pass
        case Mapping():
            inside = [(f"[{key!r}]", item) for key, item in value.items()]
        case list() | tuple():
            inside = [(f"[{i}]", item) for i, item in enumerate(value)]
        case _ if not callable(value):
            names: dict[str, None] = dict.fromkeys(getattr(value, "__dict__", ()))
            if dataclasses.is_dataclass(value):  # with slots it has no __dict__
                names.update(dict.fromkeys(f.name for f in dataclasses.fields(value)))
            inside = [(f".{name}", getattr(value, name, None)) for name in names]
        case _:
            pass
    for name, item in inside if depth else ():
        yield from _tensors(f"{path}{name}", item, depth - 1)
