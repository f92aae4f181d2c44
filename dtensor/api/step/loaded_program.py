"""A planned program on a session: lowered and shipped once, its arguments cut for the ranks.

    program = load(session, planned, Roles(), owner=step)
    session.run(program.handle, program.feed(call, numbers), names)

Each rank gets its shards of tensors and the names of DTensors' shards, which stay on the actors;
the program's other inputs (parameters, buffers, constants) are put there before. A session keeps
the programs of the last used plans of each live owner; others are unloaded when one more is loaded,
except those with a run in flight. Hosts keep programs that a recovery may run again for as long as
needed (daft does that).

Not here: the plan (plan_call.py), a model's values on a cluster (session.py).
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
from dtensor.api.step.plan_cache import MAX_PLANS
from dtensor.api.step.plan_call import Planned
from dtensor.api.store.handle import Layout, TensorHandle, contiguous_layout
from dtensor.api.store.home import check_apart
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.store.session import MeshSession
from dtensor.api.store.store import Owner
from dtensor.daft import Buffer, Program, Stored
from dtensor.errors import PlanningError
from dtensor.frontend.graph import named_tensors
from dtensor.frontend.source import caller_level
from dtensor.kernels.registry import current
from dtensor.runtime.lower.program import fed_spec, holders, lower, on_mesh
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.runtime.lower.step_end import SCALE
from dtensor.runtime.schedule import Grid
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.text.notices import repeated_work
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import shard_of
from dtensor.sharding.spec.spec import TensorSpec, alike
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_may_act

RETURNED_BYTES = 2**16
"""Results that come back with their run, so that reading them costs no message: those with shards
of at most so many bytes, on one rank together. Others are fetched when they are read."""


class LoadedProgram(ClusterProgram):
    """A lowered plan on a session, and the cuts of its arguments for the ranks.

    ``writes``: the parameters and buffers that a run changes, by name; ``written``: the same by the
    module that has them, by label.
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
        self.session = session
        self.planned = planned
        self.program = program
        self.specs: dict[str, TensorSpec] = {
            name: fed_spec(planned.plan, name) for name in planned.arguments
        }
        with waits_may_act():  # a signal may act: nothing has changed yet
            super().__init__(session.cluster, session.cluster.load(program))
        self.writes: frozenset[str] = _written(planned, training)
        by_part = planned.models.by_part(dict.fromkeys(self.writes))
        self.written = tuple((model, frozenset(own)) for model, own in by_part)
        self._whole = frozenset(
            name for name, spec in self.specs.items() if set(spec.placements) <= {REPLICATE}
        )
        self.owner = Owner[str]()  # of its constants in the store
        self._state = state  # the names of constants and weights in the actors' tables
        self._put: dict[str, int] = {}  # caught tensors: the number of the value that was put
        self._fitting: set[tuple[str, Layout]] = set()  # arguments, as they were held and taken

    @cached_property
    def results(self) -> dict[str, Layout]:
        """By result of the function, in order, its name in the program and its layout."""
        plan = self.planned.plan
        results = sorted((o for o in plan.outputs if o.kind == "result"), key=lambda o: int(o.of))
        specs = {f"result {o.of}": on_stage(plan, o.spec, o.values[0][0]) for o in results}
        return {name: contiguous_layout(spec) for name, spec in specs.items()}

    @cached_property
    def returned(self) -> frozenset[str]:
        """The results that come back with the run: the first that have RETURNED_BYTES on a rank."""
        room, returned = RETURNED_BYTES, set[str]()
        for name, layout in self.results.items():
            if (nbytes := layout.spec.max_local_nbytes) <= room:
                returned.add(name)
                room -= nbytes
        return frozenset(returned)

    def reads_former(self, state: Mapping[str, TensorSpec]) -> bool:
        """Whether one of these values, by name on the ranks, has another shape or dtype here."""
        own = _held(self.planned.plan, self._state)
        return any(
            (own[name].shape, own[name].dtype) != (state[name].shape, state[name].dtype)
            for name in own.keys() & state.keys()
        )

    def put_constants(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put tensors, by the labels of the program's constants, or replacements of them."""
        plan, store = self.planned.plan, self.session.launch.store
        given: dict[str, tuple[torch.Tensor, StoredTensor]] = {}
        for item in plan.inputs:
            if item.kind == "constant" and item.label in tensors:
                name, spec = self._state[item.name], on_mesh(plan, item.held)
                stored = self.session.stored(name, spec, holders(plan, item))
                given[item.name] = tensors[item.label], stored
        store.forget(self.owner, given)
        store.put(self.owner, given)

    def put_caught(self) -> None:
        """Put the present values of tensors that the program caught, where the ranks lack them."""
        reads = self.planned.graph.reads
        if reads is None or not reads.caught:
            return
        reads.refresh()
        changed = [c for c in reads.caught if self._put.get(c.name) != c.number]
        if changed:
            tensors = {caught.name: caught.copy for caught in changed}
            self.put_constants(tensors)
            self._put.update((caught.name, caught.number) for caught in changed)

    def unload(self) -> None:
        """Unload the program on the ranks, and drop its constants."""
        super().unload()
        self.session.launch.store.forget(self.owner, self.owner.stored, delete=True)

    def feed(
        self,
        call: BoundCall,
        numbers: Mapping[str, object],
        extra: Mapping[str, object] | None = None,
    ) -> list[dict[str, object]]:
        """The inputs of each rank: shards of tensors, handles of DTensors, the ``numbers`` that the
        program reads, and ``extra``."""
        common: dict[str, object] = {**numbers, **(extra or {})}  # of all ranks
        for name, index in self.planned.arguments.items():
            leaf = call.leaves[index]
            if isinstance(leaf, TensorHandle):
                common[name] = self._stored(name, leaf)
            elif not isinstance(leaf, torch.Tensor) or leaf.is_meta:
                raise PlanningError(
                    f"the argument {name} has no values: it is a spec, or on the meta device.\n"
                    f"  {name}: {self.specs[name]}\n"
                    f"fix: pass a tensor with values; .plan(...) takes what has none"
                )
            elif name in self._whole:
                common[name] = _lent(leaf)
        fed: list[dict[str, object]] = []
        cut: dict[tuple[str, object], torch.Tensor] = {}
        for rank, program in enumerate(self.program.ranks):
            inputs: dict[str, object] = dict(extra or {})
            for name in program.inputs:
                if name in common:
                    inputs[name] = common[name]
                else:
                    leaf = call.leaves[self.planned.arguments[name]]
                    inputs[name] = self._shard(name, leaf, rank, cut)
            fed.append(inputs)
        return fed

    def _stored(self, name: str, x: TensorHandle) -> Stored:
        """The name of its shards, if they have the spec that the program takes."""
        if x.session is not self.session:
            raise PlanningError(
                f"{name} belongs to another launch than the one that runs now; "
                f"fix: distribute it inside this launch"
            )
        held = x.held
        if (name, held) not in self._fitting:
            self._check_fit(name, held.spec)
            self._fitting.add((name, held))
        return Stored(x.name)

    def _check_fit(self, name: str, held: TensorSpec) -> None:
        plan = self.planned.plan
        stages = next(item.stages for item in plan.inputs if item.name == name)
        if held.on and (len(stages) > 1 or held.on != on_stage(plan, held, *stages).on):
            raise PlanningError(
                f"{name} is {held}: only a part of the mesh holds it, and an argument is "
                f"read on all of it.\n"
                f"fix: pass {name}.full_tensor(), or compute further where it was made"
            )
        if not alike(held, self.specs[name]):
            raise PlanningError(
                f"{name} is held as {held}, and the program takes it as {self.specs[name]}.\n"
                f"fix: state its placement before the call, as in x.redistribute(...)"
            )

    def _shard(
        self, name: str, leaf: Any, rank: int, cut: dict[tuple[str, object], torch.Tensor]
    ) -> torch.Tensor:
        spec = self.specs[name]
        here = self.session.mesh.coordinates(rank)
        key = (name, tuple(spec.intervals(d, here) for d in range(len(spec.shape))))
        if key not in cut:
            cut[key] = shard_of(leaf.detach(), spec, here)
        return cut[key]


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
    """The loaded programs of a session: for each object that has planned them a cache, by the id of
    the plan."""

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
            # the owner may end within any call: the finalizer does only this
            reference = ref(owner, lambda _: ownerless.append(by_owner.pop(number)[1]))
            entry = by_owner[number] = reference, ProgramCache(MAX_PLANS)
        cache, key = entry[1], id(planned)
        return (cache.get(key) or cache.load(key, lambda: _ProgramsOfPlan(planned))).programs

    def unload_of_model(self, model: object) -> None:
        """Unload the programs of plans over this module."""
        for cache in self._caches():
            cache.unload(lambda plan: any(m is model for m in plan.planned.models.parts.values()))

    def unload_former(self, state: Mapping[str, TensorSpec]) -> None:
        """Unload programs that read values with these names in another shape or dtype: the module
        was cast since."""
        for cache in self._caches():
            cache.unload(lambda plan: any(p.reads_former(state) for p in plan.programs.values()))

    def evict(self) -> None:
        """Unload programs whose owner is gone, and those beyond an owner's limit, unless they are
        running."""
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
    """Lower, verify and ship a plan once per session; put the constants it needs. ``owner``: the
    object that has planned it."""
    programs = programs_of(session).of_plan(owner, planned)
    key = (roles.gradients, roles.optimizer, roles.keys, roles.detect_nan, current())
    if key not in programs:
        programs_of(session).evict()
        state = state_names(session, planned)
        programs_of(session).unload_former(_held(planned.plan, state))
        lowered = lower(
            planned.plan,
            grid,
            device=session.cluster.device,
            roles=replace(roles, state=state),
        )
        if session.local == "inductor":
            lowered = _fused(session, planned, lowered, roles, state)
        plan = planned.plan
        constants = {i.label: i.constant for i in plan.flow.inputs if i.constant is not None}
        training = roles.optimizer is not None
        if training and (text := repeated_work(plan)):
            warnings.warn(f"{plan.name}: {text}", stacklevel=caller_level())
        loaded = LoadedProgram(session, planned, lowered, state, training=training)
        loaded.put_constants(constants)
        if planned.models:
            check_apart(named_tensors(planned.models.module), loaded.writes)
        programs[key] = loaded
    program = programs[key]
    program.put_caught()
    return program


def _lent(x: torch.Tensor) -> torch.Tensor:
    """The tensor that a cluster copies for a whole tensor: only its elements, in order."""
    x = x.detach()
    ordered = x.is_contiguous() and not x.is_conj() and not x.is_neg()
    alone = ordered and x.untyped_storage().nbytes() == x.nbytes  # all of it would be sent
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _fused(
    session: MeshSession,
    planned: Planned,
    program: Program,
    roles: Roles,
    state: Mapping[str, str],
) -> Program:
    """The program with its chains compiled, for the inputs of each rank."""
    from dtensor.runtime.lower.inductor import fused

    if roles.detect_nan:
        raise PlanningError(
            'detect_nan checks each op, and local="inductor" compiles several into one.\n'
            "fix: leave one of them out"
        )
    plan = planned.plan
    given: list[dict[str, object]] = []
    for rank, rank_program in enumerate(program.ranks):
        here, read = session.mesh.coordinates(rank), {*rank_program.inputs, *rank_program.state}
        buffers: dict[str, object] = {}
        for item in plan.inputs:
            name = state.get(item.name, item.name)
            if name in read:
                held = item.held if item.name in state else item.spec
                buffers[name] = Buffer(on_mesh(plan, held).local_shape(here), held.dtype)
        numbers = set(rank_program.inputs).difference(buffers, ("options", SCALE))
        given.append(buffers | dict.fromkeys(numbers, 0))
    return fused(program, given)


def _held(plan: Plan, state: Mapping[str, str]) -> dict[str, TensorSpec]:
    """The spec in which each value is held, by its name in the actors' tables."""
    return {state[i.name]: i.held for i in plan.inputs if i.name in state}


def _written(planned: Planned, training: bool) -> frozenset[str]:
    """The parameters that an optimizer updates, and the state that forward changes."""
    known = {i.label for i in planned.plan.inputs if i.kind in ("parameter", "buffer")}
    written = {str(o.of) for o in planned.plan.outputs if o.kind == "mutation"} & known
    if training and planned.request.training is not None:
        written |= planned.request.training.trained & known
    return frozenset(written)


def state_names(session: MeshSession, planned: Planned) -> dict[str, str]:
    """Plan input to the name of its value in the actors' tables."""
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


def on_stage(plan: Plan, spec: TensorSpec, stage: int) -> TensorSpec:
    """A planned output's spec on the user's mesh, with the stage that holds it."""
    restated = on_mesh(plan, spec)
    if plan.stage_axis is None or plan.mesh.axis_size(plan.stage_axis) == 1:
        return restated
    return replace(restated, on=((plan.stage_axis, plan.stage_ranks[stage]),))
