"""`run.switch`: moves a model to another mesh and other placements between two steps.

    with dt.launch(dt.Mesh(dp=4)) as run:
        step(x, y)
        run.switch(model, opt, dt.Mesh(dp=2), {})               # f32[64@dp,16]: [16,16] to [32,16]
        step(x, y)                                              # the same step, on two ranks

The model's steps are planned on the new mesh first; their plans give the new homes (a value that
they do not use gets its default home). Then one verified program moves parameters, buffers and
optimizer state between ranks. Invariants: a switch that fails changes nothing. The values are
bitwise the same, and steps keep their numbers. DTensors and generators do not move.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtensor.api.model.mesh_history import restate
from dtensor.api.model.models import Models
from dtensor.api.model.parallel import (
    ParallelModule,
    check_parallel,
    chosen_placements,
    parallelize,
)
from dtensor.api.model.stating.roles_of_weights import StatedRoles
from dtensor.api.step.bound_call import BoundCall, to_meta
from dtensor.api.step.loaded_program import programs_of
from dtensor.api.step.plan_call import Planned, plan_call
from dtensor.api.step.train_step import check_recompute
from dtensor.api.step.training import (
    StepOptions,
    TrainStep,
    grid_of,
)
from dtensor.api.step.wrapped_optimizers import Optimizers, checked_optimizers
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.home import ModelHome, OptimizerHome
from dtensor.api.store.meshes import not_launched
from dtensor.api.store.optimizer_state import updated_state
from dtensor.api.store.session import Launch, MeshSession, launched, planned_homes
from dtensor.api.store.store import Owner
from dtensor.api.values.lazy_parameters import Entries
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.errors import PlanningError, check_kind
from dtensor.runtime.optimizer.elementwise.optimizer_rule import rule_of
from dtensor.runtime.optimizer.shard_optimizer import value_name
from dtensor.runtime.schedule import Schedule
from dtensor.runtime.transfer.between_meshes import bucket_bytes
from dtensor.sharding.redistribute.sync_plan import SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class SwitchTarget:
    """The new placement of a `switch`. ``options``: more arguments of `parallelize`."""

    placements: Mapping[str, StatedRoles]
    options: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    schedule: Schedule | None
    ranks: Sequence[int] | None
    topology: Topology | None


def switch_of(
    launch: Launch,
    model: ParallelModule,
    optimizer: Optimizers | None,
    mesh: Mesh,
    target: SwitchTarget,
) -> _Switch:
    """Return a checked and planned switch. Raises PlanningError if it is impossible."""
    _check_running(launch)
    check_parallel("switch", model)
    check_mesh(mesh)
    check_topology(target.topology)
    if model.source is not None:
        raise PlanningError(
            "a replica has the values of its policy, which dt.sync brings to any mesh.\n"
            "fix: actor = dt.replica(policy, mesh, placements), and dt.sync(policy, actor)"
        )
    if model.mesh not in launch.sessions:
        raise not_launched(model.mesh, launch.places)
    fix = "schedule=dt.OneFOneB(microbatches=4), or leave it out"
    check_kind("schedule", target.schedule, Schedule | None, "a schedule", fix)
    old_session = launch.sessions[model.mesh]
    numbers = _ranks_of(launch, model, old_session, mesh, target.ranks)
    other = parallelize(model.module, mesh, target.placements, **target.options)
    model.look()
    other.initial, other.labels, other.seen = model.initial, model.labels, model.seen
    model_home = old_session.model_homes.get(id(model))
    optimizers = _optimizers(model, optimizer, model_home)
    launch.settle()
    if model_home is not None:
        model_home.settle()
    steps = _planned_steps(model, other, model_home, optimizers, target)
    if model_home is not None and other.stage_plan.waiting:
        raise PlanningError(
            f'stages="auto": a step chooses them, and none has run with this model, whose values '
            f"are on {model.mesh} and have to be somewhere.\n"
            f"fix: state them, or take a step before"
        )
    return _Switch(launch, model, other, old_session, numbers, model_home, steps, target.topology)


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """A step of the model, its plan with ``other`` in place of the model, and its new options."""

    step: TrainStep
    other: ParallelModule
    planned: Planned
    options: StepOptions

    @staticmethod
    def of(step: TrainStep, other: ParallelModule, target: SwitchTarget) -> _PlannedStep:
        """Plan the last call of a step on the new mesh, with its captured graph if possible."""
        last, options = step.last, step.options
        assert last is not None, "it has run"
        planning = options.planning
        if target.inputs is not None:
            planning = replace(planning, inputs=target.inputs)
        options = replace(
            options,
            planning=planning,
            schedule=target.schedule or options.schedule,
        )
        try:
            check_recompute(other, planning.recompute)
            grid = grid_of(options.schedule, other)
            other.claim_homes(grid.home())
            call = _call_with(last.call, step.model, other)
            graph = last.graph if last.arrangement == last.models.arrangement else None
            stated = step.plan_options(options, grid, step.groups())
            call.look()
            planned = plan_call(call, other.mesh, "loss", stated, last.plan.name, graph)
        except PlanningError as error:
            error.add_note(
                f"the step of {last.plan.name} cannot be planned on the new mesh; inputs= and "
                f"schedule= of run.switch replace its own."
            )
            raise
        return _PlannedStep(step, other, planned, options)

    def homes(self, prefix: str, numbers: Sequence[int]) -> dict[str, StoredTensor]:
        """Return the homes of the module's parameters and buffers in the plan, by label."""
        plan = self.planned.plan
        items = {i.label: i for i in plan.inputs if i.kind in ("parameter", "buffer")}
        read = next(r for part, r in self.planned.models.by_part(items) if part is self.other)
        return planned_homes(plan, read, prefix, numbers)

    def updated(
        self, home: OptimizerHome, numbers: Sequence[int]
    ) -> dict[tuple[str, str], StoredTensor]:
        """Return the homes of the optimizer's state that the plan reads, by (label, key); none if
        the step has another optimizer."""
        number = next((i for i, o in enumerate(self.step.optimizers) if o is home.optimizer), None)
        if number is None:
            return {}
        rule, groups = rule_of(home.optimizer), self.step.groups()[number]
        keys = tuple(map(rule.keys, home.optimizer.param_groups))
        plan, labels = self.planned.plan, self.planned.models.labels
        return updated_state(numbers, plan, number, groups, keys, home.name, labels, rule)

    def settle(self) -> None:
        """Settle the placements that the plan has chosen in ``other``, as a run does."""
        planned = self.planned
        stages = planned.stages if len(planned.models.parts) == 1 else self.other.stage_plan
        for part, chosen in planned.models.by_part(chosen_placements(planned.plan)):
            if part is self.other:
                level = planned.plan.level_choice
                part.settle(chosen, planned.plan.stage_ranks, stages, level)

    def adopt(self) -> None:
        """Make the step continue with the new plan, over the moved model."""
        step, other, before = self.step, self.other, self.step.last
        assert before is not None
        parts = {p: step.model if m is other else m for p, m in self.planned.models.parts.items()}
        models = Models(parts)
        call = _call_with(self.planned.call, other, step.model)
        planned = replace(self.planned, models=models, call=call, switches=models.switches)
        step.options, step.last, step._session = self.options, planned, None
        step._grid = step.model.switches, grid_of(self.options.schedule, step.model)
        if not self.options.planning.each_call and not before.call.specs():
            step.plans.put(planned, before)


def _call_with(call: BoundCall, model: ParallelModule, other: ParallelModule) -> BoundCall:
    """Return the call with ``other`` in place of ``model``, and with meta tensors for tensors."""
    leaves = (other if leaf is model else to_meta(leaf) for leaf in call.leaves)
    return replace(call, leaves=tuple(leaves))


@dataclass(frozen=True, slots=True)
class _MovedState:
    """An optimizer's state on ranks. ``homes``: the new homes of the state that planned steps
    update, by (label, key); ``gathered``: the keys of other state, which the controller takes."""

    home: OptimizerHome
    homes: Mapping[tuple[str, str], StoredTensor]
    gathered: tuple[tuple[str, str], ...]

    @staticmethod
    def of(
        home: OptimizerHome, steps: Sequence[_PlannedStep], numbers: Sequence[int]
    ) -> _MovedState:
        """Return the moves of an optimizer's state. Entries that the planned steps update move to
        their homes in the plans; other entries are gathered, and so is the packed state of owned
        parameters, whose size only its owner knows. State that the user has read does not move: the
        next step puts it again."""
        if not home.current:
            return _MovedState(home, {}, ())
        updated: dict[tuple[str, str], StoredTensor] = {}
        for planned in steps:
            updated |= planned.updated(home, numbers)
        homes: dict[tuple[str, str], StoredTensor] = {}
        for key, before in home.values().items():
            is_moved = not before.is_pending and not home.rule.entry(key[1]).packed
            if key in updated and is_moved:  # others are gathered: summed, or unpacked
                spec = replace(updated[key].spec, dtype=before.spec.dtype)
                homes[key] = replace(updated[key], spec=spec)
        return _MovedState(home, homes, tuple(key for key in home.values() if key not in homes))


class _Switch:
    """A planned switch. ``other``: the module with its new placement; ``numbers``: the launch's
    ranks of the new mesh; ``moves``: the old and new home of each value, by its name in the plan;
    ``into``: the owner and key of each value, by that name."""

    def __init__(
        self,
        launch: Launch,
        model: ParallelModule,
        other: ParallelModule,
        old_session: MeshSession,
        numbers: tuple[int, ...],
        model_home: ModelHome | None,
        steps: Sequence[_PlannedStep],
        topology: Topology | None,
    ) -> None:
        """Plan the moves of parameters, buffers and optimizer state to their new homes."""
        self.launch: Launch = launch
        self.model: ParallelModule = model
        self.other: ParallelModule = other
        self.old_session: MeshSession = old_session
        self.numbers: tuple[int, ...] = numbers
        self.model_home: ModelHome | None = model_home
        self.steps: Sequence[_PlannedStep] = steps
        self.planned_homes: dict[str, StoredTensor] = {}
        self.states: list[_MovedState] = []
        self.moves: dict[str, tuple[StoredTensor, StoredTensor]] = {}

        self.into: dict[str, tuple[Owner[Any], Any]] = {}
        if model_home is not None:
            stated = current_homes(other, numbers, None)
            _check_no_meta_tensor_removed(model_home, stated)
            for step in steps:
                self.planned_homes |= step.homes(model_home.prefix, numbers)
            for label, before in model_home.stored.items():
                target = self.planned_homes.get(label) or replace(stated[label], label=before.label)
                self.moves[label], self.into[label] = (before, target), (model_home.owner, label)
            for home in model_home.optimizers.values():
                self.states.append(_MovedState.of(home, steps, numbers))
                for (label, key), target in self.states[-1].homes.items():
                    name = value_name(home.label, key, label)
                    self.moves[name] = home.owner.stored[label, key], target
                    self.into[name] = home.owner, (label, key)
        self.plan: SyncPlan = self._plan(topology)

    def _plan(self, topology: Topology | None) -> SyncPlan:
        name = type(self.model.module).__name__
        max_bucket_bytes = bucket_bytes(self.launch.cluster.device)
        sync_plan = plan_sync(name, self.moves, topology=topology, bucket_bytes=max_bucket_bytes)
        return replace(sync_plan, what="switch")

    # -- the execution ----------------------------------------------------------------------------

    def execute(self) -> None:
        """Move the model. If this fails or a signal interrupts it, nothing has changed."""
        launch, has_session = self.launch, self.other.mesh in self.launch.sessions
        if max(self.numbers) >= launch.cluster.size:
            _grow(launch, max(self.numbers) + 1)
        known_as = dict(launch.cluster.known_as)
        new_session = launch.sessions.get(self.other.mesh) or launch.add(
            self.other.mesh, self.numbers
        )
        model_home = self.model_home
        try:
            unplaced = [_gather_unplanned_state(state) for state in self.states]
            self._move(new_session)
        except BaseException:
            if not has_session:
                del launch.sessions[self.other.mesh]
                launch.cluster.known_as = known_as
            raise
        self._forget(new_session)
        restate(self.model, self.other)
        for planned in self.steps:
            planned.adopt()
        if model_home is not None:
            model_home.session, model_home.placed = new_session, None
            self.launch.store.replace_settled(model_home.owner, self.planned_homes)
            for state, entries in zip(self.states, unplaced, strict=True):
                _settle_state(state, entries, new_session)
            del self.old_session.model_homes[id(self.model)]
            new_session.model_homes[id(self.model)] = model_home
        self.old_session.moved_models.add(id(self.model))

    def _move(self, new_session: MeshSession) -> None:
        """Move the values to their new ranks. The old values stay until all have arrived."""
        moves = {name: self.into[name] for name, (a, b) in self.moves.items() if a != b}
        if moves:
            moving = self.launch.store.move(
                replace(self.plan, transfers={name: self.plan.transfers[name] for name in moves}),
                moves,
                also={*self.old_session.ranks, *self.numbers},
                note=f"it was a switch, which changed nothing: all is on {self.old_session.mesh}.",
            )
            try:
                moving.check()
            finally:
                self.launch.store.undo(moving)  # after a signal; no effect on a finished move

    def _forget(self, new_session: MeshSession) -> None:
        """Drop the model's values outside their new homes, and unload programs over them."""
        old_session, store = self.old_session, self.launch.store
        programs_of(old_session).unload_of_model(self.model)
        for state in self.states:
            keys = [key for key in state.home.owner.stored if key not in state.homes]
            store.forget(state.home.owner, keys, delete=True)
        if self.model_home is not None:
            gradients = self.model_home.gradients
            store.forget(gradients, gradients.stored, delete=True)
        old_session.drop()
        names = [] if new_session is old_session else [state.home.name for state in self.states]
        if names:
            old_session.cluster.delete([names] * old_session.mesh.size)


def _gather_unplanned_state(state: _MovedState) -> Entries:
    """Return the full state that no planned step updates, on ranks or unplaced, for the next step
    that uses it."""
    home = state.home
    if not home.current:
        return {}
    gathered = {parameter: dict(entries) for parameter, entries in home.unplaced.items()}
    stored = {key: home.owner.stored[key] for key in state.gathered}
    for parameter, entries in home.model_home.gather_values(home, stored).items():
        gathered.setdefault(parameter, {}).update(entries)
    return gathered


def _settle_state(state: _MovedState, unplaced: Entries, new_session: MeshSession) -> None:
    """Update the home of moved state, so that the next step puts the unplaced entries."""
    home = state.home
    home.updated, home.placed, home.unplaced = frozenset(), None, unplaced
    new_session.put(
        [{home.name: home.rule.on_rank(home.masters)} for _ in range(new_session.mesh.size)]
    )


def _check_no_meta_tensor_removed(
    model_home: ModelHome, stated: Mapping[str, StoredTensor]
) -> None:
    """Raise PlanningError if a tensor on meta has left the module: its value would be lost."""
    for label in model_home.stored.keys() - stated.keys():
        raise PlanningError(
            f"{label} is on the meta device and has left the module, so no placement is "
            f"stated for it, and its value on the ranks would be lost.\n"
            f"fix: put it back into the module before the switch, or gather it before it is removed"
        )


# -- the planned steps --------------------------------------------------------------------------


def _planned_steps(
    model: ParallelModule,
    other: ParallelModule,
    model_home: ModelHome | None,
    optimizers: Sequence[torch.optim.Optimizer],
    target: SwitchTarget,
) -> list[_PlannedStep]:
    """Plan the last step of each optimizer, and settle the placements that the plans have chosen in
    ``other``. Raises PlanningError if ``inputs`` or ``schedule`` are given and no step has run."""
    steps: list[_PlannedStep] = []
    for optimizer in optimizers:
        step = model_home.trained_by.get(id(optimizer)) if model_home is not None else None
        if step is not None and not any(planned.step is step for planned in steps):
            assert isinstance(step, TrainStep)
            steps.append(_PlannedStep.of(step, other, target))
            steps[-1].settle()
    for name, value in (("inputs", target.inputs), ("schedule", target.schedule)):
        if value is not None and not steps:
            raise PlanningError(
                f"{name}= changes the model's later steps, and none has run with this model and "
                f"optimizer.\n"
                f"fix: leave it out, and dt.train_step(model, loss_fn, optimizer, {name}=...) "
                f"afterwards"
            )
    return steps


def _optimizers(
    model: ParallelModule, stated: Optimizers | None, model_home: ModelHome | None
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers as a tuple. Raises PlanningError if one is not of this model, or if one
    with state on the ranks is missing."""
    fix = "run.switch(model, opt, mesh, placements)"
    optimizers = checked_optimizers(stated, fix)
    for optimizer in optimizers:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(model.labels.of(p) is None for p in parameters):
            raise PlanningError(
                f"the {type(optimizer).__name__} holds parameters that are not the model's.\n"
                f"fix: pass the optimizer that was built over model.parameters()"
            )
    for home in model_home.optimizers.values() if model_home is not None else ():
        if not any(home.optimizer is optimizer for optimizer in optimizers):
            kind = type(home.optimizer).__name__
            raise PlanningError(
                f"the ranks have the state of another optimizer of this model than passed, "
                f"{kind}, which would be left behind.\n"
                f"fix: run.switch(model, opt, mesh, placements) with that {kind}, or a list of all"
            )
    return optimizers


# -- the ranks -------------------------------------------------------------------------------------


def _is_free_for(session: MeshSession, model: ParallelModule) -> bool:
    """Return whether the session's ranks are free for the model: a switch has moved the model, or
    all models, away from there."""
    return id(model) in session.moved_models or (
        bool(session.moved_models) and not session.model_homes
    )


def _ranks_of(
    launch: Launch,
    model: ParallelModule,
    old_session: MeshSession,
    mesh: Mesh,
    stated: Sequence[int] | None,
) -> tuple[int, ...]:
    """Return the launch's ranks of the new mesh: its own if the launch has the mesh, else the
    stated ones; else the ranks of the old mesh, then free ranks, then new ranks, by which the
    launch grows. Raises PlanningError for invalid stated ranks."""
    size = launch.cluster.size
    check_kind("ranks", stated, list | tuple | range | None, "a list of ranks", "ranks=(0, 1)")
    session = launch.sessions.get(mesh)
    if session is not None:
        if stated is not None and tuple(stated) != session.ranks:
            raise PlanningError(
                f"{mesh} is on ranks {list(session.ranks)} of this launch, now "
                f"ranks={list(stated)}.\n"
                f"fix: leave ranks out, or give the other mesh a name of its own"
            )
        return session.ranks
    if stated is not None:
        ranks = tuple(rank for rank in stated if type(rank) is int and rank >= 0)
        new = sorted(rank for rank in ranks if rank >= size)
        distinct = len(set(ranks)) == len(stated) == mesh.size
        if not distinct or new != list(range(size, size + len(new))):
            raise PlanningError(
                f"ranks={list(stated)} for {mesh}, which has {mesh.size} ranks, in a launch of "
                f"ranks 0..{size - 1}.\n"
                f"fix: {mesh.size} different numbers of ranks; new ones are {size}, {size + 1}, ..."
            )
        return ranks
    in_use = (
        s for s in launch.sessions.values() if s is not old_session and not _is_free_for(s, model)
    )
    occupied = {rank for session in in_use for rank in session.ranks}
    free = (r for r in range(size) if r not in old_session.ranks and r not in occupied)
    candidates = itertools.chain(old_session.ranks, free, itertools.count(size))
    return tuple(itertools.islice(candidates, mesh.size))


def _grow(launch: Launch, size: int) -> None:
    """Grow the cluster to ``size`` ranks. Each mesh keeps its ranks."""
    cluster = launch.cluster
    cluster.grow(size)
    for mesh, session in launch.sessions.items():
        if session.cluster is cluster:  # the only mesh so far: its values keep their names
            session.cluster = SubCluster(cluster, range(mesh.size), "", str(mesh))


def _check_running(launch: Launch) -> None:
    """Raises RuntimeError if the launch has ended."""
    first = launched()
    if first is None or first.launch is not launch:
        raise RuntimeError(
            "the launch has ended, and a switch is between two steps of a running one.\n"
            "fix: call it inside the `with dt.launch(...) as run` block; outside, "
            "dt.parallelize(model.module, mesh, placements)"
        )
