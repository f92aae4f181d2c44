"""`replica`, `sync_plan`, `sync`: a copy of a model on a second mesh, updated by explicit calls.

    train, play = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
    policy = dt.parallelize(net, train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, {"up.weight": dict(tp=dt.Row())})
    with dt.launch(train, play):
        dt.sync(policy, actor)                   # 1: the actor has the policy's values

A replica's module is a copy of the policy's module on the meta device. Its values are on the ranks
of its mesh, and only `sync` changes them. A sync is one verified program between ranks
(runtime/transfer/between_meshes.py). It is ordered like a step: it sends the values after all steps
called before it, and no program sees a mix of old and new values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dtensor.api.model.parallel import ParallelModule, check_parallel, parallelize
from dtensor.api.model.stating.roles_of_weights import StatedRoles
from dtensor.api.model.stating.stages import Stages
from dtensor.api.store.default_home import current_homes
from dtensor.api.store.meshes import ranks_of_meshes
from dtensor.api.store.session import MeshSession, launched, session_for
from dtensor.api.store.store import Moving
from dtensor.api.values.lazy_parameters import without_hook
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import named_tensors, type_text
from dtensor.runtime.transfer.between_meshes import bucket_bytes
from dtensor.sharding.redistribute.sync_plan import SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor

_Stored = Mapping[str, StoredTensor]

MAX_UNREAD = 2
"""The most syncs of an actor in flight; the next sync waits for the oldest."""


def replica(
    policy: ParallelModule,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles] | None = None,
    *,
    stages: Stages | None = None,
    attention: Mapping[str, str] | None = None,
) -> ParallelModule:
    """Return a replica of the policy on another mesh, which has no values until the first `sync`.

    Args:
        policy: the parallelized module.
        placements, stages, attention: as for `parallelize`, for ``mesh``; stages cannot be "auto".

    A replica can be used like a parallelized module, but `train_step` cannot train it. Raises
    PlanningError as `parallelize` does, for a replica of a replica, and for the policy's own mesh.
    """
    check_parallel("replica", policy)
    check_mesh(mesh)
    if policy.source is not None:
        raise PlanningError(
            "the first argument is a replica itself, and has no values of its own.\n"
            "fix: dt.replica(policy, mesh, placements), with the module that is trained"
        )
    if mesh == policy.mesh:
        named = mesh.shape | {"name": "play"}
        text = ", ".join(f"{axis}={size!r}" for axis, size in named.items()).replace("'", '"')
        raise PlanningError(
            f"the policy is on {policy.mesh}, and a replica lives on another mesh.\n"
            f"fix: dt.Mesh({text}) is another one, which may share the ranks"
        )
    module = _meta_copy(policy.module)
    actor = parallelize(module, mesh, placements, stages=stages, attention=attention)
    if actor.stage_plan.waiting:
        raise PlanningError(
            f"stages={stages!r}: a program chooses them when it first runs, and a replica's values "
            f"need a home before.\n"
            f"fix: state them; the plan of a function of dt.parallelize(module, mesh, "
            f"stages={stages!r}) shows what it would choose"
        )
    actor.source = policy
    actor.initial.remedy = "dt.sync(policy, actor), inside the launch that uses the actor"
    return actor


def sync_plan(
    policy: ParallelModule,
    actor: ParallelModule,
    *,
    ranks: Mapping[Mesh, Sequence[int]] | None = None,
    topology: Topology | None = None,
) -> SyncPlan:
    """Return the plan of a `sync`: each value's pieces, the bytes between each pair of ranks, the
    messages, and the price. Launches nothing. Raises PlanningError as `sync` does.

    Args:
        policy, actor: as for `sync`.
        ranks: outside a launch, the ranks of the meshes, as in
            ``dt.launch(train, play, ranks=ranks)``.
        topology: the hardware for which the price is computed.
    """
    _check_pair(policy, actor)
    check_topology(topology)
    with CALL_LOCK:
        policy.look()
        actor.look()
        return _plan_for_call(policy, actor, ranks, topology)


def _plan_for_call(
    policy: ParallelModule,
    actor: ParallelModule,
    ranks: Mapping[Mesh, Sequence[int]] | None,
    topology: Topology | None,
) -> SyncPlan:
    """Return the plan of a sync: between the homes in the running launch or, outside a launch, on
    the stated ranks."""
    if launched() is None:
        places = ranks_of_meshes((policy.mesh, actor.mesh), ranks)
        numbers = places[policy.mesh], places[actor.mesh]
        source, target = (
            current_homes(policy, numbers[0], None),
            current_homes(actor, numbers[1], None),
        )
        return _plan(policy, actor, source, target, torch.device("cpu"), topology)
    if ranks is not None:
        raise PlanningError(
            "ranks= says where the meshes would be, and a launch is running, which has them.\n"
            "fix: leave ranks out"
        )
    policy_session, actor_session = session_for(policy.mesh), session_for(actor.mesh)
    source = current_homes(policy, policy_session.ranks, policy_session.model_homes.get(id(policy)))
    target = current_homes(actor, actor_session.ranks, actor_session.model_homes.get(id(actor)))
    return _plan(policy, actor, source, target, policy_session.cluster.device, topology)


def sync(policy: ParallelModule, actor: ParallelModule) -> int:
    """Send the policy's values to the actor. Return the actor's new version: 1 for the first sync.

    Does not wait. The values are those after all steps called before, including the user's writes
    into the module since then. A sync that fails leaves the actor's values unchanged; it raises
    here or, if it fails later, at the next sync.

    Raises PlanningError outside a launch of both meshes, if the actor is not a replica of the
    policy, and if the two modules no longer have the same parameters and buffers.
    """
    _check_pair(policy, actor)
    if launched() is None:
        raise PlanningError(
            f"dt.sync runs in a launch that has the ranks of both meshes, and none is running.\n"
            f"fix: with dt.launch({policy.mesh!r}, {actor.mesh!r}): ..."
        )
    while True:
        with CALL_LOCK:
            policy.look()
            actor.look()
            policy_session, actor_session = session_for(policy.mesh), session_for(actor.mesh)
            pair = _Pair.of(policy_session, policy, actor_session, actor)
            oldest = pair.oldest()
            if oldest is None:
                pair.run()
                actor.version += 1
                return actor.version
        pair.read(oldest)  # without the lock: other calls continue meanwhile


class _Pair:
    """A policy and an actor in a launch, and the plan between their homes (``planned_for``), which
    is made again if a home has changed. ``unchecked_syncs``: syncs whose failures were not read
    yet."""

    def __init__(
        self,
        policy_session: MeshSession,
        policy: ParallelModule,
        actor_session: MeshSession,
        actor: ParallelModule,
    ) -> None:
        """Register functions that wait for this pair's syncs, for the end of the launch and before
        reads of the actor's values."""
        self.policy, self.policy_session, self.policy_home = (
            policy,
            policy_session,
            policy_session.model_home(policy),
        )
        self.actor, self.actor_session, self.actor_home = (
            actor,
            actor_session,
            actor_session.model_home(actor),
        )
        self.unchecked_syncs: list[Moving] = []
        self.planned_for: tuple[_Stored, _Stored] = {}, {}
        self.plan: SyncPlan | None = None
        actor_session.wait_functions.append(self._settle)
        self.actor_home.wait_functions.append(
            lambda: policy_session.launch.store.finish_moves(wait=True)
        )

    @staticmethod
    def of(
        policy_session: MeshSession,
        policy: ParallelModule,
        actor_session: MeshSession,
        actor: ParallelModule,
    ) -> _Pair:
        """Return the session's pair of these models, which is made at first use."""
        key = "sync", id(policy), id(actor)
        pair: _Pair | None = actor_session.loaded.get(key)
        if pair is None or pair.policy_session is not policy_session:  # the policy was switched
            actor_session.loaded[key] = _Pair(policy_session, policy, actor_session, actor)
        return actor_session.loaded[key]

    def oldest(self) -> Moving | None:
        """Return the oldest sync if it must be read before another one runs, else None: it has
        ended, or MAX_UNREAD syncs are in flight."""
        is_due = self.unchecked_syncs and (
            self.unchecked_syncs[0].run.done() or len(self.unchecked_syncs) >= MAX_UNREAD
        )
        return self.unchecked_syncs[0] if is_due else None

    def run(self) -> None:
        """Submit a sync, planning it first if a home has changed."""
        self.policy_home.settle()
        self.actor_home.store.finish_moves()
        source = current_homes(self.policy, self.policy_session.ranks, self.policy_home)
        target = current_homes(self.actor, self.actor_session.ranks, self.actor_home)
        if self.plan is None or self.planned_for != (source, target):
            device = self.policy_session.cluster.device
            self.plan = _plan(self.policy, self.actor, source, target, device)
            self.planned_for = source, target
        self.policy_session.put_missing(self.policy, source)
        home, labels = self.actor_home, self.actor.seen.labels
        moving = home.store.move(
            self.plan,
            {name: (home.owner, labels[name]) for name in self.plan.transfers},
            key=("sync", id(self.policy), id(self.actor)),
            note="it was a sync, which changed nothing: the actor is unchanged.",
            on_undo=self._forget_missing,
        )
        if self.actor_session.at_once:
            self.read(moving)
        else:
            self.unchecked_syncs.append(moving)
        home.make_lazy(dict(self.actor.seen.tensors))
        home.changed = home.unsaved = False
        home.saved = "the policy's values are where they were", self.actor.steps.present()

    def _forget_missing(self) -> None:
        """After a failed sync, forget the holder of values that the actor's ranks do not have: no
        other place has them."""
        holders = self.actor.initial.holders
        for label in [n for n in self.actor.seen.tensors if n not in self.actor_home.stored]:
            if holders.get(label) is self.actor_home:
                del holders[label]

    def _settle(self) -> None:
        while self.unchecked_syncs:
            self.read(self.unchecked_syncs[0])

    def read(self, moving: Moving) -> None:
        """Wait for a sync, and raise its failure."""
        try:
            moving.check()
        finally:
            self.unchecked_syncs = [each for each in self.unchecked_syncs if each is not moving]


# -- the plan --------------------------------------------------------------------------------------


def _plan(
    policy: ParallelModule,
    actor: ParallelModule,
    source: _Stored,
    target: _Stored,
    device: torch.device,
    topology: Topology | None = None,
) -> SyncPlan:
    """Plan a sync between the homes of the two models, by label."""
    source, target = _by_name(policy, source), _by_name(actor, target)
    _check_same(source, target)
    return plan_sync(
        type(policy.module).__name__,
        {name: (source[name], target[name]) for name in target},
        topology=topology,
        bucket_bytes=bucket_bytes(device),
    )


def _by_name(model: ParallelModule, stored: _Stored) -> _Stored:
    """Return the values by name: the names, unlike the labels, are the same in both modules."""
    return {model.seen.names[label]: value for label, value in stored.items()}


def _meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the module with tensors on the meta device, tied like the module's."""
    memo: dict[int, object] = {}
    with without_hook():
        for tensor in named_tensors(module).values():
            if id(tensor) in memo:
                continue
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            grad = tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=grad) if is_parameter else empty
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise PlanningError(
            f"{type(module).__name__} cannot be copied, and a replica needs a copy: "
            f"{error}.\n"
            f"fix: remove attributes that copy.deepcopy refuses: locks, files, computed tensors"
        ) from error


# -- checks ----------------------------------------------------------------------------------------


def _check_pair(policy: ParallelModule, actor: ParallelModule) -> None:
    """Raises PlanningError unless ``actor`` is a replica of ``policy``."""
    check_parallel("sync", policy)
    if not isinstance(actor, ParallelModule):
        raise PlanningError(
            f"sync takes a policy and a replica of it, not {type(actor).__name__}.\n"
            f"fix: actor = dt.replica(policy, mesh, placements)"
        )
    if actor.source is None:
        swapped = policy.source is actor
        raise PlanningError(
            f"{actor!r} is no replica, and its values are its own.\n"
            + (
                "fix: the policy first, as in dt.sync(policy, actor)"
                if swapped
                else "fix: actor = dt.replica(policy, mesh, placements)"
            )
        )
    if actor.source.module is not policy.module:
        raise PlanningError(
            f"{actor!r} is a replica of another module than {policy!r} has.\n"
            f"fix: sync it with the policy that it was made of, or make a replica of this one"
        )


def _check_same(source: _Stored, target: _Stored) -> None:
    """Raises PlanningError unless both modules still have the same parameters and buffers."""
    for values, other, role in ((source, target, "policy"), (target, source, "actor")):
        missing = sorted(values.keys() - other.keys())
        if missing:
            raise _changed_module_error(f"the {role} alone has {', '.join(missing[:4])}")
    for label, value in source.items():
        spec, other_spec = value.spec, target[label].spec
        if (spec.shape, spec.dtype) != (other_spec.shape, other_spec.dtype):
            raise _changed_module_error(
                f"{label} is {_type(spec)} in the policy, {_type(other_spec)} in the actor"
            )


def _changed_module_error(fact: str) -> PlanningError:
    return PlanningError(
        f"the policy's module has changed since the replica was made: {fact}.\n"
        f"fix: make a new one: actor = dt.replica(policy, mesh, placements)"
    )


def _type(spec: TensorSpec) -> str:
    return type_text(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
