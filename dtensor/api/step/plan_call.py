"""From a call to a plan: capture, stages, pins; the part that compile and train_step share.

    call = BoundCall.of(loss_fn, (model, tokens, targets), {})
    planned = plan_call(call, mesh, "loss", Options(), "loss_fn")
    planned.plan            # sharding.Plan
    planned.arguments       # plan input name -> leaf of the call's (args, kwargs)

Leaves of a call may be tensors (also on the meta device), DTensors, specs, parallelized or plain
modules, and anything else, which is a constant of the program. A program depends on the shapes of
tensors and specs, on numbers and strings, on anything else by identity; on all that its capture
read besides (frontend/guards): where that has changed, the call is captured again, and what was
planned before is kept for when it changes back; and on what programs of the same model that ran
before chose for parameters that nothing was stated of.

Planning changes neither the model nor what asks for the plan. Nothing is launched here.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import nn

from dtensor.api.model.models import Models
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.stating.auto_stages import cut
from dtensor.api.model.stating.recomputed import recomputed_modules
from dtensor.api.model.stating.stages import StagePlan, stage_at, with_parts
from dtensor.api.model.stating.stated_placements import (
    InputPins,
    input_pins,
    planner_pins,
    restated,
)
from dtensor.api.step.flatten_arguments import flatten_arguments
from dtensor.api.step.lengths import Lengths
from dtensor.api.store.handle import TensorHandle, contiguous_layout
from dtensor.api.store.session import MeshSession
from dtensor.api.values.lazy_parameters import as_it_is
from dtensor.errors import PlanningError, check_dense, check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.capture.autocast import surrounding
from dtensor.frontend.capture.call_as_module import leaf_names
from dtensor.frontend.capture.capture import capture, forget_fakes
from dtensor.frontend.dataflow.per_microbatch import per_microbatch
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.frontend.graph import Arg, Const, Graph, Mutation, Param, Result
from dtensor.frontend.guards.guards import Guards, custom_ops
from dtensor.frontend.source import caller_level
from dtensor.gc_pause import collector_paused
from dtensor.private_torch import pytree
from dtensor.provider import Provider
from dtensor.runtime.lower.timetable import ONE_BY_ONE, GridTimetable
from dtensor.runtime.profile import Profile
from dtensor.runtime.schedule import Grid
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow, Input
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request, Search, Training
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement, Shard, index_sets, refine
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.signals import act, as_set

Grads = Literal["none", "loss", "tangents"]

Profiled = Callable[
    [int, MeshSession, Callable[[], object], Callable[[object], None], "PlanCache"], Profile
]
PROFILER = Provider[Profiled]("dtensor.api.launch.profiling:profiled")
"""Given how many, a session, what takes a step, what waits for what it gave, and the plans."""

MOST_RECAPTURES = 3


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A function and its arguments, flattened."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """PlanningError for an argument whose tensors are out of sight."""
        if not kwargs and all(isinstance(x, _LEAVES) for x in args):
            return BoundCall(fn, args, _flat(len(args)))
        leaves, tree = flatten_arguments(args, dict(kwargs))
        return BoundCall(fn, leaves, tree)

    def key(self) -> object:
        """What the captured program depends on of its arguments: shapes, dtypes, placements,
        numbers, other objects by identity; what stands in its modules; the autocast around it."""
        flat = self.tree is _flat(len(self.leaves))  # a number is hashed sooner
        tree = len(self.leaves) if flat else self.tree
        return (tree, tuple(map(leaf_key, self.leaves)), surrounding(), self.arrangement)

    def models(self, mesh: Mesh) -> Models:
        """The parallelized modules among the arguments. PlanningError for those that cannot be in
        one program on ``mesh``."""
        modules = {id(x): (x, i) for i, x in reversed(list(enumerate(self.modules())))}
        ordered = sorted(modules.values(), key=lambda pair: pair[1])
        names = ["the model"]
        if len(ordered) > 1:
            args, kwargs = pytree.tree_unflatten(self.leaves, self.tree)
            every = leaf_names(self.fn, args, kwargs)
            places = {id(leaf): every[i] for i, leaf in reversed(list(enumerate(self.leaves)))}
            names = [places.get(id(model), "the model") for model, _ in ordered]
        return Models.of([model for model, _ in ordered], names[: len(ordered)], mesh)

    def look(self) -> None:
        """Take note of what stands in its modules now."""
        for model in self.modules():
            model.look()

    @property
    def arrangement(self) -> tuple[int, ...]:
        """Which objects stand where in its modules."""
        return tuple(model.seen.number for model in self.modules())

    def specs(self) -> list[TensorSpec]:
        """Those of its DTensors, and those that stand for one."""
        return [_spec_of(x) for x in self.leaves if isinstance(x, (TensorHandle, TensorSpec))]

    def modules(self) -> list[ParallelModule]:
        """The parallelized modules among them."""
        leaves = (self.fn, *self.leaves)
        return [leaf for leaf in leaves if isinstance(leaf, ParallelModule)]

    def absent(self) -> set[str]:
        """Return the names of the arguments that are None, or are None by default."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.tree)
        names = zip(leaf_names(self.fn, args, kwargs), self.leaves, strict=True)
        absent = {name for name, leaf in names if leaf is None}
        values = pytree.tree_leaves((args, kwargs), is_leaf=is_dataclass)
        for name, value in zip(
            leaf_names(self.fn, args, kwargs, is_dataclass), values, strict=True
        ):
            own = fields(value) if is_dataclass(value) else ()  # a pytree leaves out those of None
            absent |= {f"{name}.{f.name}" for f in own if getattr(value, f.name) is None}
        with suppress(ValueError, TypeError):  # a builtin without a signature
            fn = self.fn.forward if isinstance(self.fn, nn.Module) else self.fn
            defaults = inspect.signature(fn).bind(*args, **kwargs)
            before = set(defaults.arguments)
            defaults.apply_defaults()
            given = defaults.arguments.items()
            absent |= {name for name, value in given if value is None and name not in before}
        return absent

    def shapes(self) -> BoundCall:
        """Such a call: of its tensors there are the shapes, of its DTensors the specs."""
        leaves = (x.spec if isinstance(x, TensorHandle) else shape_of_leaf(x) for x in self.leaves)
        return replace(self, leaves=tuple(leaves))

    def layouts(self) -> BoundCall:
        """Such a call, of whose plain tensors there are shapes and strides."""

        def layout(leaf: Any, shape: Any) -> Any:
            if type(leaf) is not torch.Tensor:
                return shape
            return torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
            ).requires_grad_(leaf.requires_grad)

        return replace(self, leaves=tuple(map(layout, self.leaves, self.shapes().leaves)))

    def captured(
        self,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], nn.Module | None]:
        """What is captured: a function, its arguments by position and by name, the main module."""
        leaves = [for_capture(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        fn = self.fn.module if isinstance(self.fn, ParallelModule) else self.fn
        return fn, args, kwargs, next((model.module for model in self.modules()), None)

    def graph(self, grads: Grads, *, each_call: bool = False) -> Graph:
        fn, args, kwargs, main = self.captured()
        return capture(fn, args, kwargs, grads=grads, each_call=each_call, main=main)


@dataclass(frozen=True, kw_only=True, repr=False)
class Planned:
    """A plan, what it came from, and which leaf of the call feeds which input.

    ``stages``: those of the plan, which "auto" has chosen; ``grid``: its schedule; ``returned``:
    results that are a leaf of the call, which the program changes; ``call``: one such, of whose
    tensors there are the shapes; ``switches`` and ``arrangement``: of the models, when it was made.
    """

    plan: Plan
    graph: Graph
    arguments: Mapping[str, int]
    models: Models
    request: Request
    stages: StagePlan
    grid: Grid | None
    returned: Mapping[int, int]
    call: BoundCall
    switches: int
    arrangement: tuple[int, ...]

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is multiplied by a scale."""
        training = self.request.training
        return training is not None and training.scaled

    @cached_property
    def changed(self) -> tuple[int, ...]:
        """The leaves of the call that the program changes."""
        indices = (o.index for o in self.graph.outputs if isinstance(o, Mutation))
        return tuple(index for index in indices if index is not None)

    def same(self) -> bool:
        """Whether all that the capture read is the very same; False may be a false alarm."""
        reads = self.graph.reads
        return reads is None or reads.same()

    def difference(self) -> str | None:
        """What is not as the capture read it, by value."""
        reads = self.graph.reads
        return None if reads is None else reads.difference()

    def __repr__(self) -> str:
        return f"<planned: {self.plan!r}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a plan depends on besides the call. ``inputs``: as stated, or pins that stand as they
    are, whatever the arguments are; ``split_results``: those on which nothing is stated may stay
    split; ``graph``: the call's, where it is captured; ``each_call``: capture at each."""

    inputs: Mapping[str, Any] | InputPins | None = None
    split_results: bool = False
    results: Callable[[Graph, Dataflow], Mapping[int, Mapping[str, Placement]]] | None = None
    num_microbatches: int = 1
    timetable: GridTimetable = ONE_BY_ONE
    topology: Topology | None = None
    training: Callable[[Graph], Training] | None = None
    search: Search = "predictable"
    graph: Graph | None = None
    recompute: tuple[str, ...] = ()
    each_call: bool = False
    per_microbatch: bool = False  # of batch norm's statistics


MOST_PLANS = 16
"""Plans of a function that are kept, and on each session the programs of as many of them: those
that were used last."""


class PlanCache:
    """Plans of one function by what they depend on; ``latest``: what was asked for last.

    One that disagrees with what the model's programs have settled since is made anew. A value that
    changes from call to call is captured at each: a warning says so. Calls that differ in lengths
    alone may share one export (lengths.py). The `MOST_PLANS` that were used last stay: a call that
    needs another is captured again. ``grads``: what a capture differentiates.
    """

    def __init__(self, grads: Grads) -> None:
        self.latest: Planned | None = None
        self._plans: dict[object, list[Planned]] = {}  # by key, the last used first
        self._used: OrderedDict[int, object] = OrderedDict()  # by id, its key; the last used last
        self._asked: object = None  # the key of the latest
        self._settled: dict[int, int] = {}  # by id of a plan, the state of the model it agrees with
        self._changed: dict[str, list[float]] = {}  # what changed -> the seconds that this has cost
        self._lengths = Lengths(grads)

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    def of_graph(self, graph: Graph, others: object, make: Callable[[Graph], Planned]) -> Planned:
        """The plan of a graph that was captured for one call; of one that differs in the values of
        constants alone, with those of this one."""
        constants = [(c.name, c.value) for c in graph.inputs if isinstance(c, Const)]
        ops = custom_ops(graph.fx)
        key = (str(graph), str(graph.out_tree), tuple(ops.items()), others)
        plans = [p for p in self._plans.get(key, ()) if self._agrees(p)]
        if not plans:
            alone = replace(graph, reads=Guards((), None, constants, ops))
            plans = [make(alone)]
            self._settled[id(plans[0])] = plans[0].models.settlement
            self._keep(key, plans)
        self.latest = plans[0]
        self._used.move_to_end(id(plans[0]))
        reads = plans[0].graph.reads
        assert reads is not None
        reads.hold(constants)
        return plans[0]

    def get(
        self,
        call: BoundCall,
        others: object,
        make: Callable[[Graph | None], Planned],
        *,
        captures: bool = True,
    ) -> Planned:
        """The plan of a call; ``others``: what it depends on besides. ``make`` is given the graph,
        where a model was switched since the call was captured, which changes nothing of that, or
        where it follows from that of other lengths; else it captures, or has one (``captures``)."""
        asked = call.key()
        known = self._plans.get((asked, others), [])
        if known and known[0].same() and self._agrees(known[0]):
            self.latest, self._asked = known[0], asked
            self._used.move_to_end(id(known[0]))
            return known[0]
        found, changed = self._known(known)
        if found is None:
            graph = next((p.graph for p in known if _switched(p) and p.same()), None)
            changed = changed or _changed_number(self._asked, asked, call)
            unknown = captures and graph is None and changed is None and not known
            if unknown:  # but perhaps of other lengths
                found = self._of_lengths(call, (asked, others), make)
            if found is None:
                began = time.perf_counter()
                found = self._made(changed, lambda: make(graph))
                seconds = time.perf_counter() - began
                if unknown:
                    self._lengths.was_captured(call, (asked, others), found.graph, seconds)
            known = [planned for planned in known if self._agrees(planned)]
        self._keep((asked, others), [found, *(p for p in known if p is not found)])
        self.latest, self._asked = found, asked
        return found

    def _of_lengths(
        self, call: BoundCall, key: object, make: Callable[[Graph | None], Planned]
    ) -> Planned | None:
        """The plan of a call by the export for other lengths; None: it has to be captured."""
        graph = self._lengths.graph(call, key)
        if graph is not None:
            with suppress(Exception):  # an error that is not of this graph comes again
                return self._made(None, lambda: make(graph))
        return None

    def _keep(self, key: object, plans: list[Planned]) -> None:
        """These are those of the key, of which the first is used now."""
        for gone in {id(p) for p in self._plans.get(key, ())} - {id(p) for p in plans}:
            del self._used[gone], self._settled[gone]
        self._plans[key] = plans
        self._used |= {id(p): key for p in plans}
        self._used.move_to_end(id(plans[0]))
        while len(self._used) > MOST_PLANS:
            oldest, key = next(iter(self._used.items()))
            left = [p for p in self._plans[key] if id(p) != oldest]
            del self._used[oldest], self._settled[oldest]
            if left:
                self._plans[key] = left
            else:
                del self._plans[key]

    def put(self, planned: Planned, before: Planned) -> None:
        """A plan for the same calls as that of ``before``, whose models were switched."""
        for key, known in list(self._plans.items()):
            if any(one is before for one in known):
                self._settled[id(planned)] = planned.models.settlement
                self._keep(key, [planned, *(one for one in known if not _switched(one))])
                self.latest = planned

    def _known(self, known: Sequence[Planned]) -> tuple[Planned | None, str | None]:
        """Of plans for such arguments the one that is still right, and what is not as the last one
        read it."""
        for planned in known:
            if planned.same() and self._agrees(planned):
                return planned, None
        changed: str | None = None
        for planned in known:
            difference = planned.difference()
            if difference is None and self._agrees(planned):
                return planned, changed
            changed = changed or difference
        return None, changed

    def _made(self, changed: str | None, make: Callable[[], Planned]) -> Planned:
        began = time.perf_counter()
        try:
            planned = make()
        except Exception as error:
            from dtensor.frontend.capture.failures import without_ours  # seldom needed

            raise without_ours(error)  # noqa: B904 - it is the same
        self._settled[id(planned)] = planned.models.settlement
        if changed is not None:
            what = changed.partition(": ")[0]
            spent = self._changed.setdefault(what, [])
            spent.append(time.perf_counter() - began)
            if len(spent) == MOST_RECAPTURES:
                warnings.warn(
                    f"{changed}. A step was captured for each of its last {len(spent) + 1} values, "
                    f"{sum(spent):.1f} s in all, and will be for the next.\n"
                    f"fix: pass torch.tensor(...) of it as an argument of the step, and read that",
                    stacklevel=caller_level(),
                )
        return planned

    def _agrees(self, planned: Planned) -> bool:
        settlement = planned.models.settlement
        if self._settled[id(planned)] != settlement:
            if _switched(planned) or not planned.models.agrees(planned.plan, planned.stages):
                return False
            self._settled[id(planned)] = settlement
        return True


def _switched(planned: Planned) -> bool:
    """Whether a model was placed anew since."""
    return planned.switches != planned.models.switches


def _changed_number(before: Any, now: Any, call: BoundCall) -> str | None:
    """Return the argument in which the keys of two calls differ, if only its numbers differ."""
    if before is None or before[0] != now[0]:
        return None
    pairs = list(zip(before[1], now[1], strict=True))
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not differing or any(type(call.leaves[i]) not in (int, float) for i in differing):
        return None
    args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
    names = leaf_names(call.fn, args, kwargs)
    name, *others = {names[i].partition(".")[0] for i in differing}
    if others:
        return None
    a, b = (key[1] if isinstance(key, tuple) else key for key in pairs[differing[0]])
    return f"the argument {name}: {a} -> {b}"


def plan_call(call: BoundCall, mesh: Mesh, grads: Grads, options: Options, name: str) -> Planned:
    """Capture and plan. Raises PlanningError; nothing is launched, nothing computed."""
    with CALL_LOCK, collector_paused(), as_set():
        return _planned(call, mesh, grads, options, name)


def _planned(call: BoundCall, mesh: Mesh, grads: Grads, options: Options, name: str) -> Planned:
    call.look()
    models = call.models(mesh)
    graph = options.graph or call.graph(grads)
    act()  # on signals
    stages = models.stages if models else with_parts(models.stages, call.specs(), mesh)
    if stages.waiting:
        one = replace(stages, num_stages=1)
        alone = replace(options, timetable=ONE_BY_ONE)
        unstaged = _request(call, graph, models, mesh, one, alone, name)
        stages = cut(models.module, stages, unstaged, plan, options.timetable.in_flight)
    request = _request(call, graph, models, mesh, stages, options, name)
    changed = [o.name for o in graph.outputs if isinstance(o, Mutation) and o.index is not None]
    if changed and stages.num_stages > 1:
        raise PlanningError(
            f"the function changes its argument {changed[0]}, and the model has stages: an "
            f"argument is held by the ranks of all of them, and would change on one.\n"
            f"fix: register it as a buffer of the module that changes it"
        )
    planned = plan(request)
    forget_fakes()
    return Planned(
        plan=planned,
        graph=graph,
        arguments={item.name: entry.index for item, entry in _arguments(request.flow, graph)},
        returned=_returned(graph, request.results),
        models=models,
        call=call.shapes(),
        switches=models.switches,
        arrangement=models.arrangement,
        request=request,
        stages=stages,
        grid=request.timetable.grid if isinstance(request.timetable, GridTimetable) else None,
    )


def _request(
    call: BoundCall,
    graph: Graph,
    models: Models,
    mesh: Mesh,
    stages: StagePlan,
    options: Options,
    name: str,
) -> Request:
    """What of a call the planner is asked."""
    at = _lie_at(call, graph, mesh, stages)
    flow = dataflow(graph, stages.held, stages.num_stages, stages.homes, at)
    results = options.results(graph, flow) if options.results else {}
    if returned := _returned(graph, results):
        kept_outputs = (o for o in flow.outputs if o.kind != "result" or o.of not in returned)
        flow = replace(flow, outputs=tuple(kept_outputs))
    named = _arguments(flow, graph)
    metas = {entry.name: item.meta for item, entry in named}
    leaves = {entry.name: call.leaves[entry.index] for _, entry in named}
    pins = _input_pins(metas, leaves, options, mesh, stages, call.absent())
    planner_input = planner_pins(flow, models.placements, pins)
    stated = dict(planner_input.pins)
    settled: set[str] = set()
    before = models.settled
    for item in flow.inputs:
        if item.label in before and item.kind != "argument":
            if item.name not in stated:
                settled.add(item.name)
            stated[item.name] = {**before[item.label], **stated.get(item.name, {})}
    for index, placements in results.items():
        if stages.axis in placements:
            raise PlanningError(
                f'out= places result {index} on the axis "{stages.axis}", which holds the stages.\n'
                f"fix: leave {stages.axis} out of it: a result lies on the stage that makes it"
            )
    num_microbatches = options.num_microbatches
    if num_microbatches > 1:
        num_microbatches = _with_rows(num_microbatches, flow, stated, planner_input.batch, mesh)
    fewer = num_microbatches < options.num_microbatches
    timetable = options.timetable.first(num_microbatches) if fewer else options.timetable
    request = Request(
        name=name,
        model=", ".join(type(part.module).__name__ for part in models.parts.values()),
        flow=flow,
        mesh=mesh,
        pins=stated,
        pinned_by=planner_input.pinned_by,
        settled=frozenset(settled),
        batch=planner_input.batch,
        results=results,
        split_results=options.split_results,
        stage_axis=stages.axis,
        stage_ranks=stages.ranks if timetable.grid is None else timetable.grid.home(),
        num_microbatches=num_microbatches,
        microbatches_stated=options.num_microbatches if fewer else None,
        timetable=timetable,
        topology=options.topology or Topology(),
        training=options.training(graph) if options.training else None,
        search=options.search,
        zero=models.zero,
        stored_whole=models.stored_whole if models.zero is not None else frozenset(),
        misaligned=models.misaligned,
        recompute=_recomputed(models, options, flow),
        auto=stages.patterns if stages.auto else (),
    )
    return per_microbatch(request) if options.per_microbatch else request


def _returned(graph: Graph, pinned: Mapping[int, object]) -> dict[int, int]:
    """The results that are arguments which the program changes, as they are at its end; but for
    those of which a placement is stated."""
    pairs = list(zip(graph.output_nodes, graph.outputs, strict=True))
    leaves = {node: o.index for node, o in pairs if isinstance(o, Mutation) and o.index is not None}
    return {
        o.index: leaves[node]
        for node, o in pairs
        if isinstance(o, Result) and node in leaves and not pinned.get(o.index)
    }


def _with_rows(
    num: int,
    flow: Dataflow,
    pins: Mapping[str, Mapping[str, Placement]],
    batch: tuple[str, ...],
    mesh: Mesh,
) -> int:
    """How many of ``num`` microbatches have rows: the first, for a batch is cut as torch.chunk
    cuts. Those that do are cut alike where there are no others."""
    most = 1
    for name in batch:
        meta = flow.metas[name]
        if rows := meta.shape[0]:
            cuts = make_spec(meta.shape, meta.dtype, mesh, pins.get(name, {})).cuts(0)
            cut = index_sets(refine(Shard(0), cuts, rows), rows, num)
            most = max(most, sum(map(bool, cut)))
    return most


def _arguments(flow: Dataflow, graph: Graph) -> list[tuple[Input, Arg]]:
    """The inputs that the caller's leaves feed."""
    return [
        (item, entry)
        for item, entry in zip(flow.inputs, graph.inputs, strict=True)
        if isinstance(entry, Arg)
    ]


def _lie_at(call: BoundCall, graph: Graph, mesh: Mesh, stages: StagePlan) -> dict[str, int]:
    """Plan input to its stage, of arguments that only a part of the mesh holds."""
    stage_of_input: dict[str, int] = {}
    for node, entry in zip(graph.placeholders, graph.inputs, strict=True):
        if not isinstance(entry, Arg):
            continue
        leaf = call.leaves[entry.index]
        if not isinstance(leaf, (TensorHandle, TensorSpec)) or not (spec := _spec_of(leaf)).on:
            continue
        if any(not isinstance(output, Result | Mutation) for output in graph.outputs):
            raise PlanningError(
                f"{entry.name} is {spec}: only a part of the mesh holds it, and where there are "
                f"gradients an argument is read on all of it.\n"
                f"fix: pass {entry.name}.full_tensor()"
            )
        stage = stage_at(entry.name, spec, stages, mesh)
        if stages.num_stages > 1:  # those of stages that are still to be chosen are one
            stage_of_input[node.name] = stage
    return stage_of_input


def _spec_of(leaf: TensorHandle | TensorSpec) -> TensorSpec:
    return leaf.spec if isinstance(leaf, TensorHandle) else leaf


def _recomputed(models: Models, options: Options, flow: Dataflow) -> frozenset[str]:
    """The modules whose forward runs again; none where the program has no backward."""
    globs = options.recompute or models.recompute
    if not models or not globs or all(op.phase == "forward" for op in flow.ops):
        return frozenset()
    return recomputed_modules(globs, models.module, flow)


def _input_pins(
    metas: Mapping[str, Meta],
    leaves: Mapping[str, Any],
    options: Options,
    mesh: Mesh,
    stages: StagePlan,
    absent: Collection[str],
) -> InputPins:
    """The pins of arguments: what ``inputs`` states, else how DTensors and specs are placed."""
    if isinstance(options.inputs, InputPins):
        return options.inputs
    pins = input_pins(metas, options.inputs, mesh, stage_axis=stages.axis, absent=absent)
    merged: dict[str, Mapping[str, Placement]] = dict(pins.pins)
    for name, leaf in leaves.items():
        if isinstance(leaf, (TensorHandle, TensorSpec)):
            spec = _spec_of(leaf)
            if spec.mesh != mesh:
                raise PlanningError(
                    f"{name} is on {spec.mesh}, the program is for {mesh}.\n"
                    f"fix: dt.transfer({name}, {mesh!r}) first, or make the program for "
                    f"{spec.mesh!r}"
                )
            merged[name] = {**restated(spec), **merged.get(name, {})}
    return InputPins(pins=merged, batch=pins.batch)


def stated_device(
    fn: Callable[..., Any], device: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What `plan` was told as ``device``, and the call's arguments; to a function that takes an
    argument of this name it is that."""
    if device is None:
        return None, kwargs
    try:
        called = fn.forward if isinstance(fn, nn.Module) else fn
        takes = "device" in inspect.signature(called).parameters
    except ValueError:  # a builtin without a signature
        takes = False
    return (None, {**kwargs, "device": device}) if takes else (device, kwargs)


CAPTURES = ("once", "each call")


def checked_capture(capture: str) -> bool:
    """Whether a step is captured at each call. PlanningError for what is no such word."""
    check_word("capture", capture, CAPTURES)
    return capture == "each call"


def parameter_labels(graph: Graph) -> frozenset[str]:
    return frozenset(entry.name for entry in graph.inputs if isinstance(entry, Param))


# -- leaves ----------------------------------------------------------------------------------------

_LEAVES = (torch.Tensor, TensorSpec, ParallelModule)


@cache
def _flat(num_args: int) -> pytree.TreeSpec:
    """Of a call with so many arguments, each a leaf."""
    return pytree.tree_structure(((None,) * num_args, {}))


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
        case TensorHandle():
            with as_it_is():  # or torch asks a function of ours
                return (leaf.held, leaf.requires_grad)
        case TensorSpec():
            return (contiguous_layout(leaf), leaf.requires_grad)
        case torch.Tensor():
            check_dense("an argument", leaf, name="pass x")
            return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        case float():
            return repr(leaf)  # 0.0 == -0.0, and nan is not nan
        case int() | str() | bool() | None:
            return (type(leaf), leaf)
        case _:
            return _Same(leaf)


def for_capture(leaf: Any) -> Any:
    """A module, or a tensor without placements, in the leaf's stead."""
    match leaf:
        case ParallelModule():
            return leaf.module
        case TensorHandle() | TensorSpec():
            empty = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
            return empty.requires_grad_(leaf.requires_grad)
        case _:
            return leaf


def shape_of_leaf(leaf: Any) -> Any:
    """A tensor's, on the meta device; anything else as it is."""
    if isinstance(leaf, (TensorSpec, torch.Tensor)):
        with as_it_is():
            shape, dtype, grad = tuple(leaf.shape), leaf.dtype, leaf.requires_grad
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)
    return leaf
