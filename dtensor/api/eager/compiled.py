"""`compile`: any function of tensors and parallelized modules as a planned program.

    f = compile(lambda x, w: (x @ w).relu(), Mesh(tp=2))
    y = f(x, w)                  # DTensors; the first call captures, plans and loads
    print(f.plan(x, w))          # nothing launched, nothing computed
    compile(fn, mesh, out=dict(tp=Row()))        # placements of all results
    compile(fn, mesh, out={"logits": dict(tp=Column())})    # in the structure that fn returns

A call sends one message to each actor and does not wait. Results are DTensors, replicated unless
``out`` pins them. Their shards stay on the actors; the call also returns small results (at most
RETURNED_BYTES), so that reading them needs no further message. Results are differentiable
(compiled_gradient.py). Plans are cached by shapes, placements and modes, at most `MAX_PLANS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from dtensor.api.eager.compiled_gradient import Derivative, Differentiated, differentiable_operands
from dtensor.api.eager.execute_op import make_shards_private, mark_changed
from dtensor.api.eager.tensor import DTensor
from dtensor.api.eager.values import Cell, Value, fresh_name
from dtensor.api.model.mesh_history import mesh_since, num_switches
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.patterns import listing, nearest
from dtensor.api.model.stating.stated_placements import Stated, check_fit
from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.loaded_program import load
from dtensor.api.step.plan_cache import MAX_PLANS, PROFILER, PlanCache
from dtensor.api.step.plan_call import Planned, checked_capture, plan_call, stated_device
from dtensor.api.store.session import Returned, planning_for, session_for
from dtensor.api.values.randomness import Counter, random_inputs
from dtensor.daft import TaskError
from dtensor.errors import PlanningError, check_callable
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import Graph
from dtensor.frontend.guards.guards import Guards
from dtensor.runtime.lower.detect_nan import DetectNan, checked_detect
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import checked_search
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import make_spec
from dtensor.showing import html_text

if TYPE_CHECKING:
    from dtensor.runtime.profile import Profile

Out = Stated | Sequence[Any] | Mapping[str, Any] | None


class CompiledFunction:
    """The result of `compile`: a function that runs as a planned program. The last 16 plans are
    cached, by shapes, dtypes, placements and modes."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        out: Out,
        options: Options,
        detect_nan: DetectNan,
    ) -> None:
        self.fn = fn
        self.mesh = mesh
        self.out = out
        self.plans: PlanCache = PlanCache("none")
        self.calls: Counter = Counter(f"compile {self._name}")
        self.graph: Graph | None = None  # if set, it is planned in place of a capture
        self._roles = Roles(detect_nan=detect_nan)
        self._options = options
        self._num_switches_at_start = num_switches()  # modules may be switched later
        self._derivatives: dict[object, list[Derivative]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the function and its options. The copy makes its plans again."""
        made_of = self.fn, self.mesh, self.out, self._options, self._roles.detect_nan
        return CompiledFunction, made_of

    def __repr__(self) -> str:
        return f"<compiled {self._name} on {self.mesh}, plans: {len(self.plans)}>"

    def _repr_html_(self) -> str:
        latest = self.plans.latest
        return html_text(repr(self)) + (latest.plan._repr_html_() if latest is not None else "")

    def plan(self, *args: Any, device: str | None = None, **kwargs: Any) -> Plan:
        """Return the plan for these arguments: DTensors, tensors (meta too), specs or modules.
        ``device``: the type of device, "cpu" or "cuda", that the function sees; by default the
        running launch's, or "cpu"."""
        device, kwargs = stated_device(self.fn, device, kwargs)
        with CALL_LOCK, planning_for(device):
            return self._plan_for(BoundCall.of(self.fn, args, kwargs)).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, with DTensors for its tensors. Does not wait for their
        values."""
        call = BoundCall.of(self.fn, args, kwargs)
        operands = differentiable_operands(call)
        with CALL_LOCK:
            derivative = self._derivative(call, operands) if operands else None
            planned = self._plan_for(call)
            if derivative is None or not derivative.grad_results:
                return planned.graph.unflatten(self._run_program(call, planned))
        tensors = [call.leaves[i] for i in operands]
        run = partial(self._run_program, call, planned)
        results = Differentiated.apply(call, run, derivative, operands, *tensors)
        return planned.graph.unflatten(results)

    def _derivative(self, call: BoundCall, operands: tuple[int, ...]) -> Derivative:
        """Return the derivative for a call, capturing it if no cached one holds."""
        derivatives = self._derivatives.setdefault((call.key(), operands), [])
        for unchanged in (Guards.same, lambda reads: reads.difference() is None):
            for derivative in derivatives:
                if unchanged(derivative.reads):
                    return derivative
        compiled = partial(self._with_function, options=replace(self._options, each_call=False))
        graph = call.graph("tangents", each_call=self._options.each_call)
        derivatives.append(Derivative(graph, call, operands, compiled, self._name))
        del derivatives[:-MAX_PLANS]
        while len(self._derivatives) > MAX_PLANS:
            del self._derivatives[next(iter(self._derivatives))]
        return derivatives[-1]

    def _with_function(
        self, fn: Callable[..., Any], out: Out, options: Options
    ) -> CompiledFunction:
        """Return another function that is compiled for the same mesh."""
        return CompiledFunction(fn, self.mesh, out, options, self._roles.detect_nan)

    def profile(self, n: int, *args: Any, **kwargs: Any) -> Profile:
        """Time ``n`` calls, after a few to warm up, and return where their time goes on each rank.

        Each timed call is two calls, and each changes what a call changes (buffers, random
        numbers).
        """

        def read(results: object) -> None:
            pass  # a run that ended without failure has made them

        session = session_for(self.mesh_of(BoundCall.of(self.fn, args, kwargs)))
        return PROFILER.get()(n, session, lambda: self(*args, **kwargs), read, self.plans)

    def _run_program(self, call: BoundCall, planned: Planned) -> list[Any]:
        """Run the program of a call, and return the tensors of the function's result in order."""
        make_shards_private(call.leaves, planned.changed)
        session = session_for(self.mesh_of(call))
        program = load(session, planned, self._roles, owner=self)
        session.place(planned.models, planned.plan, planned.stages)
        names = {output: fresh_name() for output in program.results}
        numbers = random_inputs(self.calls.advance(), "compile", self._name)
        numbering = session.numbering(f"calls {id(self)}", self.calls, takes=True)
        resets = self.calls.resets
        inputs = program.feed(call, numbers)
        future = session.run(program.handle, inputs, names, numbering, program.returned)
        program.last_run = ref(future)
        session.record_write(program.written)
        mark_changed(call.leaves, planned.changed, future)
        if session.at_once:
            try:
                future.check()
            except TaskError:
                session.give_back(self.calls, resets, numbering)
                raise
        results: list[DTensor] = []
        for output, layout in program.results.items():
            returned = Returned(future, output) if output in program.returned else None
            value = Value(session, session.stored(names[output], layout.spec), returned)
            results.append(DTensor.of(Cell(session, layout, value)))
        for index, leaf in sorted(planned.returned.items()):
            results.insert(index, call.leaves[leaf])
        return results

    def mesh_of(self, call: BoundCall) -> Mesh:
        """Return the mesh of a call: the stated mesh, or the mesh to which a switch has moved a
        module of the call since."""
        if num_switches() != self._num_switches_at_start:
            for model in call.modules():
                if (mesh := mesh_since(model, self.mesh, self._num_switches_at_start)) != self.mesh:
                    return mesh
        return self.mesh

    def _plan_for(self, call: BoundCall) -> Planned:
        """Return the plan for a call, making it if it is not cached."""
        mesh = self.mesh_of(call)
        call.look()

        def make(graph: Graph | None) -> Planned:
            """Plan the graph if there is one, else capture and plan the call."""
            options = replace(
                self._options,
                results=lambda graph, flow: pinned_results(self.out, graph, flow, mesh),
            )
            return plan_call(call, mesh, "none", options, self._name, graph or self.graph)

        if self._options.each_call:
            return self.plans.get_for_graph(call.graph("none", each_call=True), call.key(), make)
        return self.plans.get(call, None, make, captures=self.graph is None)

    @property
    def _name(self) -> str:
        name = self.fn.__name__ if hasattr(self.fn, "__name__") else type(self.fn).__name__
        return "lambda" if name == "<lambda>" else name


def compile(
    fn: Callable[..., Any],
    mesh: Mesh,
    *,
    out: Out = None,
    topology: Topology | None = None,
    search: str = "predictable",
    detect_nan: bool | str = False,
    capture: str = "once",
) -> CompiledFunction:
    """Compile a function of DTensors, tensors, parallelized modules and pytrees of them.

        >>> mesh = dt.Mesh(tp=2)
        >>> f = dt.compile(lambda x, w: (x @ w).relu(), mesh, out=dict(tp=dt.Column()))
        >>> w = dt.distribute(torch.ones(4, 6), mesh, tp=dt.Column())
        >>> str(f(torch.ones(3, 4), w).spec)
        'f32[3,6@tp]'

    Args:
        mesh: the mesh on which the function runs; models and DTensors among the arguments are on
            it.
        out: placements by axis for all results; or such mappings in the structure that ``fn``
            returns, a list, a tuple or a dict. The default is Replicate.
        topology: the hardware by which the planner prices.
        search: "predictable": only values that pins reach are split; "free": any value.
        detect_nan: True: the first op that returns NaN or Inf fails the call, as in `train_step`.
        capture: "once": fn's Python runs once for each combination of shapes, of which the last 16
            are cached, and again if Python state that it read has changed. (One capture serves all
            lengths of a plain tensor argument if this is sure to be right.) "each call": fn's
            Python runs at each call, so that it may draw random numbers and change attributes.

    Raises PlanningError at the first call, or at `plan`.
    """
    fix = "dt.compile(lambda x, w: x @ w, mesh)"
    check_callable("what compile takes", fn, fix)
    check_mesh(mesh)
    check_topology(topology)
    each_call = checked_capture(capture)
    options = Options(topology=topology, search=checked_search(search), each_call=each_call)
    detect = checked_detect(detect_nan) if detect_nan else False
    return CompiledFunction(fn, mesh, out, options, detect)


# -- out= ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ResultTensor:
    """Stands for a tensor in the structure that fn returns."""

    index: int


def pinned_results(out: Out, graph: Graph, flow: Dataflow, mesh: Mesh) -> dict[int, Stated]:
    """Return the pins of each result, by index. Raises PlanningError if ``out`` names an unknown
    axis, does not have the structure of the results, or a placement does not fit."""
    if out is None:
        return {}
    results = {int(o.of): o.value for o in flow.outputs if o.kind == "result"}
    shape = graph.unflatten([_ResultTensor(index) for index in sorted(results)])
    pinned: dict[int, Stated] = {}
    for tensor, stated, path in _match_results(out, shape, "out"):
        for axis, placement in stated.items():
            mesh.axis_size(axis)
            if not isinstance(placement, Placement):
                raise PlanningError(
                    f"{path}= states {axis}={placement!r}, which is not a placement; "
                    f"write {axis}=dt.Replicate(), dt.Row() or dt.Column()"
                )
        index = tensor.index
        meta = flow.metas[results[index]]
        check_fit(f"result {index}", meta, stated, f"{path}=", mesh)
        spec = make_spec(meta.shape, meta.dtype, mesh, stated)
        pinned[index] = {axis: spec.placement(axis) for axis in stated}
    return pinned


def _match_results(
    out: object, shape: object, path: str
) -> Iterator[tuple[_ResultTensor, Stated, str]]:
    """Yield each tensor of the result with its stated placements and their path in ``out``."""
    if out is None:
        return
    if isinstance(out, Mapping):
        stated = cast(Mapping[str, Any], out)
        if not isinstance(shape, Mapping) or all(isinstance(v, Placement) for v in stated.values()):
            for tensor in _tensors(shape):
                yield tensor, stated, path
            return
        results = cast(Mapping[str, object], shape)
        for key, stated_part in stated.items():
            if key not in results:
                near = nearest(str(key), [str(k) for k in results])
                raise PlanningError(
                    f"{path}= names {key!r}, and the function returns "
                    f"{listing([str(k) for k in results])}.\n"
                    f'fix: write "{near[0] if near else next(iter(results), "")}"'
                )
            yield from _match_results(stated_part, results[key], f"{path}[{key!r}]")
        return
    if isinstance(out, (list, tuple)):
        parts = cast(Sequence[object], out)
        part_of_results = shape if isinstance(shape, (list, tuple)) else None
        if part_of_results is None or len(part_of_results) != len(parts):
            tensors = list(_tensors(shape))
            if len(tensors) != len(parts):
                raise PlanningError(
                    f"{path}= states placements of {len(parts)} results, the function returns "
                    f"{len(tensors)} tensors.\n"
                    f"fix: one dict for each tensor in the order of the results, or one for all"
                )
            part_of_results = tensors
        for number, (part, result) in enumerate(zip(parts, part_of_results, strict=True)):
            yield from _match_results(part, result, f"{path}[{number}]")
        return
    raise PlanningError(
        f"{path}={out!r} states no placements; fix: a dict such as dict(tp=dt.Row()), or such "
        f"dicts in the structure that the function returns"
    )


def _tensors(shape: object) -> Iterator[_ResultTensor]:
    """Yield the tensors in the structure of a result."""
    match shape:
        case _ResultTensor():
            yield shape
        case Mapping():
            for part in cast(Mapping[str, object], shape).values():
                yield from _tensors(part)
        case list() | tuple():
            for part in cast(Sequence[object], shape):
                yield from _tensors(part)
        case _:
            return
