"""`compile`: any function of tensors and parallelized modules as a planned program.

    f = compile(lambda x, w: (x @ w).relu(), Mesh(tp=2))
    y = f(x, w)                  # DTensors; the first call captures, plans and loads
    print(f.plan(x, w))          # nothing launched, nothing computed

A call costs one round trip. Results are DTensors, replicated unless ``out`` pins them; their shards
stay on the actors. A program is captured anew for new shapes, placements or modes, and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dtensor.api.eager.tensor import DTensor
from dtensor.api.eager.values import fresh_name
from dtensor.api.plan_call import BoundCall, Options, PlanCache, Planned, plan_call
from dtensor.api.randomness import Counter, numbers_fed
from dtensor.api.session import MeshSession, session_for
from dtensor.api.stating.placing import Out, pinned_results
from dtensor.daft import Program, Stored
from dtensor.errors import PlanningError
from dtensor.runtime.lower.builder import Roles
from dtensor.runtime.lower.program import fed_spec, holders, lower, on_mesh
from dtensor.runtime.schedule import Grid
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import checked_search
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec, alike


class CompiledFunction:
    """What `compile` returns. Programs are cached by shapes, dtypes, placements and modes."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, out: Out, options: Options) -> None:
        self.fn = fn
        self.mesh = mesh
        self.out = out
        self.plans = PlanCache()
        self.calls = Counter()
        self._options = replace(
            options, results=lambda graph, flow: pinned_results(out, graph, flow, mesh)
        )

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: DTensors, tensors (meta too), specs, modules."""
        return self._planned(BoundCall.of(self.fn, args, kwargs)).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = BoundCall.of(self.fn, args, kwargs)
        planned = self._planned(call)
        session = session_for(self.mesh)
        program = load(session, planned, Roles())
        names = {f"result {o.of}": fresh_name() for o in planned.plan.outputs if o.kind == "result"}
        numbers = numbers_fed(self.calls.advance(), "compile", self._name)
        future = session.run(program.handle, program.feed(call, numbers), names)
        if planned.model is not None and any(o.kind == "mutation" for o in planned.plan.outputs):
            session.resident(planned.model).changed = True
        if session.cluster.failure is not None:
            future.get()
        results: list[DTensor] = []
        outputs = {o.of: o for o in planned.plan.outputs if o.kind == "result"}
        for index in sorted(outputs, key=int):
            spec = on_stage(planned.plan, outputs[index].spec, outputs[index].values[0][0])
            results.append(DTensor(spec, session, names[f"result {index}"]))
        return planned.graph.unflatten(results)

    def _planned(self, call: BoundCall) -> Planned:
        return self.plans.get(
            call.key, lambda: plan_call(call, self.mesh, "none", self._options, self._name)
        )

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
) -> CompiledFunction:
    """A function of DTensors, tensors, parallelized modules and pytrees of them, as a program.

    Args:
        out: placements of the results by axis, for all; or such mappings in the structure that
            ``fn`` returns, a list, a tuple or a dict; the default is Replicate.
        topology: what the planner prices with.
        search: "predictable" splits only what pins reach; "free" lifts that.

    Raises PlanningError at the first call, or at `plan`.
    """
    return CompiledFunction(
        fn, mesh, out, Options(topology=topology, search=checked_search(search))
    )


# -- programs on a session ---------------------------------------------------------------------


class LoadedProgram:
    """A lowered plan on a session, and how its arguments are cut for the ranks."""

    def __init__(self, session: MeshSession, planned: Planned, program: Program) -> None:
        self.session = session
        self.planned = planned
        self.program = program
        self.specs: dict[str, TensorSpec] = {
            name: fed_spec(planned.plan, name) for name in planned.arguments
        }
        self.handle = session.cluster.load(program)

    def feed(
        self,
        call: BoundCall,
        numbers: Mapping[str, object],
        extra: Mapping[str, object] | None = None,
    ) -> list[dict[str, object]]:
        """What each rank is fed: shards of tensors, handles of DTensors, those of ``numbers`` that
        the program reads, and ``extra``."""
        mesh = self.session.mesh
        fed: list[dict[str, object]] = []
        cut: dict[tuple[str, object], torch.Tensor] = {}
        for rank in range(mesh.size):
            own: dict[str, object] = dict(extra or {})
            for name in self.program.ranks[rank].inputs:
                if name in numbers:
                    own[name] = numbers[name]
                if name in own:
                    continue
                leaf = call.leaves[self.planned.arguments[name]]
                own[name] = self._shard(name, leaf, rank, cut)
            fed.append(own)
        return fed

    def _shard(
        self, name: str, leaf: Any, rank: int, cut: dict[tuple[str, object], torch.Tensor]
    ) -> object:
        spec = self.specs[name]
        if isinstance(leaf, DTensor):
            if leaf.session is not self.session:
                raise PlanningError(
                    f"{name} belongs to another launch than the one that runs now; "
                    f"fix: distribute it inside this launch"
                )
            if leaf.spec.on:
                raise PlanningError(
                    f"{name} is {leaf.spec}: only a part of the mesh holds it, and an argument is "
                    f"read on all of it.\n"
                    f"fix: pass {name}.full_tensor(), or compute further where it was made"
                )
            if not alike(leaf.spec, spec):
                raise PlanningError(
                    f"{name} is held as {leaf.spec}, and the program takes it as {spec}.\n"
                    f"fix: state its placement before the call, as in x.redistribute(...)"
                )
            return Stored(leaf.name)
        here = self.session.mesh.coordinates(rank)
        key = (name, tuple(spec.intervals(d, here) for d in range(len(spec.shape))))
        if key not in cut:
            cut[key] = shard_of(leaf.detach(), spec, here)
        return cut[key]


def load(
    session: MeshSession, planned: Planned, roles: Roles, grid: Grid | None = None
) -> LoadedProgram:
    """Lower, verify and ship a plan once per session; put the state it needs."""
    key = (id(planned), roles.gradients, roles.optimizer)
    if key not in session.loaded:
        state = state_names(session, planned)
        lowered = lower(
            planned.plan,
            grid,
            device=session.cluster.device,
            roles=Roles(gradients=roles.gradients, optimizer=roles.optimizer, state=state),
        )
        _put_constants(session, planned.plan, state)
        session.loaded[key] = (planned, LoadedProgram(session, planned, lowered))
    program: LoadedProgram = session.loaded[key][1]
    if planned.model is not None:
        session.place(planned.model, planned.plan, planned.stages)
    return program


def _put_constants(session: MeshSession, plan: Plan, state: Mapping[str, str]) -> None:
    tensors = {i.name: i.constant for i in plan.flow.inputs if i.constant is not None}
    values: list[dict[str, object]] = [{} for _ in range(session.mesh.size)]
    for item in plan.inputs:
        if item.name in tensors:
            for rank in holders(plan, item):
                values[rank][state[item.name]] = tensors[item.name]
    if any(values):
        session.put(values)


def state_names(session: MeshSession, planned: Planned) -> dict[str, str]:
    """Plan input to the name of its value in the actors' tables."""
    found: dict[str, str] = {}
    for item in planned.plan.inputs:
        if item.kind == "constant":
            found[item.name] = f"constant {len(session.loaded)}: {item.label}"
        elif item.kind in ("parameter", "buffer"):
            if planned.model is None:
                raise PlanningError(
                    f"the program uses {item.label} of a module that is not parallelized; "
                    f"fix: pass dt.parallelize(module, mesh, {{}})"
                )
            found[item.name] = session.resident(planned.model).name(item.label)
    return found


def on_stage(plan: Plan, spec: TensorSpec, stage: int) -> TensorSpec:
    """A planned output's spec on the user's mesh, with the stage that holds it."""
    restated = on_mesh(plan, spec)
    if plan.stage_axis is None or plan.mesh.axis_size(plan.stage_axis) == 1:
        return restated
    return replace(restated, on=((plan.stage_axis, plan.stage_ranks[stage]),))
