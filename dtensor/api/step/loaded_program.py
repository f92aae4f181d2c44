"""Lower a plan, load the program on a session, and make the inputs of its ranks.

    program = load(session, planned, Roles(), owner=step)
    session.run(program.handle, program.feed(call, numbers), names)

Each rank gets its shards of tensor arguments. Of DTensor arguments it gets the names, because the
shards are on the ranks; so are parameters, buffers and constants. A session keeps the programs of
the plans that each live owner used last. When one more is loaded, the other programs are unloaded,
except programs with a run in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import ref

import torch

from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.compiled_code import compiled_program, compiles
from dtensor.api.step.plan_cache import MAX_PLANS
from dtensor.api.step.plan_call import Planned
from dtensor.api.store.handle import Layout, TensorHandle, contiguous_layout
from dtensor.api.store.home import check_no_shared_memory
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.store.session import MeshSession
from dtensor.api.store.store import Owner
from dtensor.daft import Program, Stored
from dtensor.errors import PlanningError
from dtensor.frontend.graph import named_tensors
from dtensor.frontend.source import caller_level
from dtensor.kernels.registry import current
from dtensor.runtime.lower.program import argument_spec, holders, lower, on_mesh
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.runtime.optimizer.shard_optimizer import DELAYED, value_name
from dtensor.runtime.schedule import Grid
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.notices import repeated_work
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec, alike
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_handle_signals

RETURNED_BYTES = 2**16
"""The bytes of results that a rank returns with its run, so that reading them costs no further
message. Larger results are fetched when they are read."""


class LoadedProgram(ClusterProgram):
    """A lowered plan that a session has loaded.

    specs: argument -> its spec. writes: names of the parameters and buffers that a run changes.
    written: the same as pairs (module, labels). owner: the owner of the constants in the store.
    """

    def __init__(
        self,
        session: MeshSession,
        planned: Planned,
        program: Program,
        state: Mapping[str, str],
        *,
        training: bool,
    ) -> None:
        """Load the program. ``state``: plan input -> name on ranks; ``training``: to update."""
        self.session = session
        self.planned = planned
        self.program = program
        self.specs: dict[str, TensorSpec] = {
            name: argument_spec(planned.plan, name) for name in planned.arguments
        }
        with waits_handle_signals():  # a signal handler may raise: nothing has changed yet
            super().__init__(session.cluster, session.cluster.load(program))
        self.writes: frozenset[str] = _written_names(planned, training)
        by_part = planned.models.by_part(dict.fromkeys(self.writes))
        self.written = tuple((model, frozenset(labels)) for model, labels in by_part)
        self._replicated = frozenset(
            name for name, spec in self.specs.items() if set(spec.placements) <= {REPLICATE}
        )
        self.owner = Owner[str]()
        self._state = state  # plan input -> name on the ranks, of parameters, buffers, constants
        self._put_numbers: dict[str, int] = {}  # captured tensor -> number of the value on ranks
        self._checked: set[tuple[str, Layout]] = set()  # arguments and layouts that fit

    @cached_property
    def results(self) -> dict[str, Layout]:
        """The layout of each result of the function, in order, by its name in the program."""
        plan = self.planned.plan
        results = sorted((o for o in plan.outputs if o.kind == "result"), key=lambda o: int(o.of))
        specs = {f"result {o.of}": on_stage(plan, o.spec, o.values[0][0]) for o in results}
        return {name: contiguous_layout(spec) for name, spec in specs.items()}

    @cached_property
    def returned(self) -> frozenset[str]:
        """The results that a run returns, the first that together fit in RETURNED_BYTES."""
        free_bytes, returned = RETURNED_BYTES, set[str]()
        for name, layout in self.results.items():
            if (nbytes := layout.spec.max_local_nbytes) <= free_bytes:
                returned.add(name)
                free_bytes -= nbytes
        return frozenset(returned)

    def is_outdated(self, state: Mapping[str, TensorSpec]) -> bool:
        """Return whether the program reads a value with another shape, dtype or size of shards than
        ``state`` has (name on the ranks -> spec)."""
        specs = _state_specs(self.planned.plan, self._state)
        return any(
            (a.shape, a.dtype, a.max_local_nbytes) != (b.shape, b.dtype, b.max_local_nbytes)
            for a, b in ((specs[name], state[name]) for name in specs.keys() & state.keys())
        )

    def put_constants(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put values of constants (label -> tensor) on the ranks, replacing earlier values."""
        plan, store = self.planned.plan, self.session.launch.store
        values: dict[str, tuple[torch.Tensor, StoredTensor]] = {}
        for item in plan.inputs:
            if item.kind == "constant" and item.label in tensors:
                name, spec = self._state[item.name], on_mesh(plan, item.held)
                stored = self.session.stored(name, spec, holders(plan, item))
                values[item.name] = tensors[item.label], stored
        store.forget(self.owner, values)
        store.put(self.owner, values)

    def put_captured(self) -> None:
        """Put the present values of tensors that the program captured as constants, if they have
        changed since they were put."""
        reads = self.planned.graph.reads
        if reads is None or not reads.caught:
            return
        reads.refresh()
        changed = [c for c in reads.caught if self._put_numbers.get(c.name) != c.number]
        if changed:
            tensors = {caught.name: caught.copy for caught in changed}
            self.put_constants(tensors)
            self._put_numbers.update((caught.name, caught.number) for caught in changed)

    def unload(self) -> None:
        """Unload the program from the ranks, and delete its constants there."""
        super().unload()
        self.session.launch.store.forget(self.owner, self.owner.stored, delete=True)

    def feed(
        self,
        call: BoundCall,
        numbers: Mapping[str, object],
        extra: Mapping[str, object] | None = None,
    ) -> list[dict[str, object]]:
        """Return the inputs of each rank: shards of tensors, names of DTensors, those ``numbers``
        that the program reads, and ``extra``. Raises PlanningError for an argument without values
        or with a spec that the program does not accept."""
        common: dict[str, object] = {**numbers, **(extra or {})}  # equal on all ranks
        for name, index in self.planned.arguments.items():
            leaf = call.leaves[index]
            if isinstance(leaf, TensorHandle):
                common[name] = self._stored_argument(name, leaf)
            elif not isinstance(leaf, torch.Tensor) or leaf.is_meta:
                raise PlanningError(
                    f"the argument {name} has no values: it is a spec, or on the meta device.\n"
                    f"  {name}: {self.specs[name]}\n"
                    f"fix: pass a tensor with values; .plan(...) needs none"
                )
            elif name in self._replicated:
                common[name] = _to_send(leaf)
        inputs_by_rank: list[dict[str, object]] = []
        shards: dict[tuple[str, object], torch.Tensor] = {}  # by argument and intervals
        for rank, program in enumerate(self.program.ranks):
            inputs: dict[str, object] = dict(extra or {})
            for name in program.inputs:
                if name in common:
                    inputs[name] = common[name]
                else:
                    leaf = call.leaves[self.planned.arguments[name]]
                    inputs[name] = self._shard(name, leaf, rank, shards)
            inputs_by_rank.append(inputs)
        return inputs_by_rank

    def _stored_argument(self, name: str, x: TensorHandle) -> Stored:
        """Return the name of a DTensor's shards on the ranks. Raises PlanningError if the DTensor
        is of another launch, or the program takes another spec."""
        if x.session is not self.session:
            raise PlanningError(
                f"{name} belongs to another launch than the one that runs now; "
                f"fix: distribute it inside this launch"
            )
        layout = x.held
        if (name, layout) not in self._checked:
            self._check_fit(name, layout.spec)
            self._checked.add((name, layout))
        return Stored(x.name)

    def _check_fit(self, name: str, spec: TensorSpec) -> None:
        """Raise PlanningError if a DTensor with this spec cannot be the argument ``name``."""
        plan = self.planned.plan
        stages = next(item.stages for item in plan.inputs if item.name == name)
        if spec.on and (len(stages) > 1 or spec.on != on_stage(plan, spec, *stages).on):
            raise PlanningError(
                f"{name} is {spec}: only a part of the mesh holds it, and an argument is "
                f"read on all of it.\n"
                f"fix: pass {name}.full_tensor(), or compute further where it was made"
            )
        if not alike(spec, self.specs[name]):
            raise PlanningError(
                f"{name} is held as {spec}, and the program takes it as {self.specs[name]}.\n"
                f"fix: state its placement before the call, as in x.redistribute(...)"
            )

    def _shard(
        self, name: str, leaf: Any, rank: int, shards: dict[tuple[str, object], torch.Tensor]
    ) -> torch.Tensor:
        """Return a rank's shard of an argument; ranks with equal intervals share it."""
        spec = self.specs[name]
        coordinates = self.session.mesh.coordinates(rank)
        key = (name, tuple(spec.intervals(d, coordinates) for d in range(len(spec.shape))))
        if key not in shards:
            shards[key] = shard_of(leaf.detach(), spec, coordinates)
        return shards[key]


class _ProgramsOfPlan:
    """The loaded programs of a plan, by the options they were loaded with."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.programs: dict[object, LoadedProgram] = {}

    @property
    def is_running(self) -> bool:
        return any(program.is_running for program in self.programs.values())

    def unload(self) -> None:
        for program in self.programs.values():
            program.unload()


class LoadedPrograms:
    """The loaded programs of a session: one cache for each owner (the object that planned them),
    by the id of the plan."""

    def __init__(self) -> None:
        self._by_owner: dict[int, tuple[ref[Any], ProgramCache[_ProgramsOfPlan]]] = {}  # by id
        self._ownerless: list[ProgramCache[_ProgramsOfPlan]] = []

    def _caches(self) -> list[ProgramCache[_ProgramsOfPlan]]:
        return [*self._ownerless, *(cache for _, cache in list(self._by_owner.values()))]

    def __iter__(self) -> Iterator[LoadedProgram]:
        for cache in self._caches():
            for plan in cache:
                yield from plan.programs.values()

    def of_plan(self, owner: object, planned: Planned) -> dict[object, LoadedProgram]:
        """Return the loaded programs of a plan, by options; the caller may add some."""
        entry = self._by_owner.get(id(owner))
        if entry is None:
            number, ownerless, by_owner = id(owner), self._ownerless, self._by_owner
            # the finalizer may run in the middle of any call, so it does nothing else
            reference = ref(owner, lambda _: ownerless.append(by_owner.pop(number)[1]))
            entry = by_owner[number] = reference, ProgramCache(MAX_PLANS)
        cache, key = entry[1], id(planned)
        return (cache.get(key) or cache.load(key, lambda: _ProgramsOfPlan(planned))).programs

    def unload_of_model(self, model: object) -> None:
        """Unload the programs of plans that contain this model."""
        for cache in self._caches():
            cache.unload(lambda plan: any(m is model for m in plan.planned.models.parts.values()))

    def unload_outdated(self, state: Mapping[str, TensorSpec]) -> None:
        """Unload programs that read a value of ``state`` (name on the ranks -> spec) with another
        shape, dtype or size of shards: their module was cast since, or its level of ZeRO was
        chosen."""
        for cache in self._caches():
            cache.unload(lambda plan: any(p.is_outdated(state) for p in plan.programs.values()))

    def evict(self) -> None:
        """Unload programs whose owner is gone, or beyond an owner's limit, unless they run."""
        for cache in self._ownerless[:]:
            cache.evict(0)
            if not len(cache):
                self._ownerless.remove(cache)
        for _, cache in list(self._by_owner.values()):
            cache.evict()


def programs_of(session: MeshSession) -> LoadedPrograms:
    return session.loaded.setdefault(LoadedPrograms, LoadedPrograms())


def load(
    session: MeshSession,
    planned: Planned,
    roles: Roles,
    grid: Grid | None = None,
    *,
    owner: object,
) -> LoadedProgram:
    """Return the loaded program of a plan; the first time, lower and verify the plan, and load the
    program and its constants on the session. ``owner``: the object that planned it."""
    programs = programs_of(session).of_plan(owner, planned)
    key = (roles.gradients, roles.updates, roles.detect_nan, current())
    if key not in programs:
        programs_of(session).evict()
        state = {**state_names(session, planned), **_delayed_names(planned, roles)}
        programs_of(session).unload_outdated(_state_specs(planned.plan, state))
        is_compiled = compiles(session, roles.detect_nan)
        lowered = lower(
            planned.plan,
            grid,
            device=session.cluster.device,
            roles=replace(roles, state=state),
            compiled=is_compiled,
        )
        if is_compiled:
            lowered = compiled_program(session, planned, lowered, len(roles.updates), state)
        if session.launch.graphs:
            lowered = _graphed(lowered, roles)
        plan = planned.plan
        constants = {i.label: i.constant for i in plan.flow.inputs if i.constant is not None}
        training = bool(roles.updates)
        if training and (text := repeated_work(plan)):
            warnings.warn(f"{plan.name}: {text}", stacklevel=caller_level())
        loaded = LoadedProgram(session, planned, lowered, state, training=training)
        loaded.put_constants(constants)
        if planned.models:
            check_no_shared_memory(named_tensors(planned.models.module), loaded.writes)
        programs[key] = loaded
    program = programs[key]
    program.put_captured()
    return program


def _to_send(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor without autograd history, or a contiguous copy if it is a part or another
    view of its storage: a cluster sends the whole storage."""
    x = x.detach()
    in_order = x.is_contiguous() and not x.is_conj() and not x.is_neg()
    fills_storage = in_order and x.untyped_storage().nbytes() == x.nbytes
    return x if fills_storage else x.clone(memory_format=torch.contiguous_format)


def _graphed(program: Program, roles: Roles) -> Program:
    """Return the program with the functions that CUDA graphs may contain. Raises PlanningError if
    NaN detection is on."""
    from dtensor.runtime.lower.graphs import with_graphs

    if roles.detect_nan:
        raise PlanningError(
            "detect_nan reads the result of each op on the host, and graphs=True captures ops in "
            "CUDA graphs.\n"
            "fix: leave one of them out"
        )
    return with_graphs(program)


def _state_specs(plan: Plan, state: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the spec of each stored value that the plan reads, by its name on the ranks."""
    return {state[i.name]: i.held for i in plan.inputs if i.name in state}


def _written_names(planned: Planned, training: bool) -> frozenset[str]:
    """Return the names of the parameters that the optimizer updates, and of the parameters and
    buffers that the forward changes."""
    names = {i.label for i in planned.plan.inputs if i.kind in ("parameter", "buffer")}
    written = {str(o.of) for o in planned.plan.outputs if o.kind == "mutation"} & names
    if training and planned.request.training is not None:
        written |= planned.request.training.trained & names
    return frozenset(written)


def state_names(session: MeshSession, planned: Planned) -> dict[str, str]:
    """Return the name on the ranks of each parameter, buffer and constant, by plan input. Raises
    PlanningError if one belongs to a module that is not parallelized."""
    names: dict[str, str] = {}
    launch = session.launch
    launch.num_programs += 1
    for item in planned.plan.inputs:
        if item.kind == "constant":
            names[item.name] = f"constant {launch.num_programs}: {item.label}"
        elif item.kind in ("parameter", "buffer"):
            owner = planned.models.owner(item.label)
            if owner is None:
                raise PlanningError(
                    f"the program uses {item.label} of a module that is not parallelized; "
                    f"fix: pass dt.parallelize(module, mesh, {{}})"
                )
            model, label = owner
            names[item.name] = session.model_home(model).name(label)
    return names


def _delayed_names(planned: Planned, roles: Roles) -> dict[str, str]:
    """Return the name on the ranks of each delayed gradient, by plan input."""
    optimizers = {n: r.optimizer for r in roles.updates for group in r.groups for n in group}
    return {
        item.name: value_name(optimizers[item.label], DELAYED, *roles.labels_of([item.label]))
        for item in planned.plan.delayed
        if item.label in optimizers
    }


def on_stage(plan: Plan, spec: TensorSpec, stage: int) -> TensorSpec:
    """Return the spec of a value of one stage on the user's mesh, with the stage's coordinate."""
    on_user_mesh = on_mesh(plan, spec)
    if plan.stage_axis is None or plan.mesh.axis_size(plan.stage_axis) == 1:
        return on_user_mesh
    return replace(on_user_mesh, on=((plan.stage_axis, plan.stage_ranks[stage]),))
