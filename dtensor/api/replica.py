"""`replica`, `sync_plan`, `sync`: a model's values on a second mesh, brought there when asked.

    train, play = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
    policy = dt.parallelize(net, train, {}, zero={"dp": 3})
    actor = dt.replica(policy, play, {"up.weight": dict(tp=dt.Row())})
    print(dt.sync_plan(policy, actor))           # who sends what to whom; nothing is launched
    with dt.launch(train, play):
        step(x, y)
        dt.sync(policy, actor)                   # 1: the actor has the values after that step
        logits = dt.compile(lambda model, x: model(x), play)(actor, x)

A replica is a `ParallelModule` over the same definition with no values: its module is a copy of the
policy's whose parameters and buffers are on the meta device, tied where those are, and has a mode of
its own (``actor.eval()``). Its values live on the ranks of its mesh and come by `sync` alone.

A sync is one verified program (runtime/between_meshes.py) from the shards that the policy's ranks
keep, whatever their stages, placements or ZeRO, to those that the actor's ranks are to keep. It is
submitted like a step, and has its place in their order: it takes the values after all steps that
were called before it, what is called after it sees them, and no program ever sees some of before and
some of after. Nothing passes the controller but the call.

How a value is kept: as the programs that ran on that mesh have settled it; before there was one as
stated; and whole where nothing, or a role that depends on the program, is stated. A program that
then keeps it otherwise cuts it anew, on the ranks.

Not here: generating with a replica, several of which may be of one policy; a replica of a replica.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from dtensor.api.away import ONE_AT_A_TIME, as_it_is
from dtensor.api.move_between_meshes import home_of, inner_name
from dtensor.api.parallel import ParallelModule, check_parallel, parallelize
from dtensor.api.resident import Resident
from dtensor.api.session import MeshSession, launched, session_for
from dtensor.api.stating.roles_of_weights import StatedRoles
from dtensor.api.stating.stages import Stages
from dtensor.daft import DaftError, Future
from dtensor.errors import PlanningError
from dtensor.frontend.graph import first_names, named_tensors, type_text
from dtensor.runtime.between_meshes import sync_program
from dtensor.sharding.plan.storage import stored_spec
from dtensor.sharding.redistribute.named_values import Kept, SyncPlan, plan_sync
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import TensorSpec, make_spec

MOST_UNREAD = 2
"""Syncs of an actor that may be under way; the next waits for the oldest."""

Where = Mapping[str, tuple[TensorSpec, tuple[int, ...]]]
"""By label: the spec under which a value is kept, and the ranks of its mesh that keep it."""


def replica(
    policy: ParallelModule,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles] | None = None,
    *,
    stages: Stages | None = None,
) -> ParallelModule:
    """The policy's module on another mesh, without values until `sync` brings them.

    Args:
        placements, stages: as of `parallelize`, for ``mesh``; stages are stated, not "auto".

    It goes where a parallelized module goes, but into `train_step` as what is trained. Raises
    PlanningError as `parallelize` does, for a replica of a replica, and for the policy's own mesh.
    """
    check_parallel("replica", policy)
    check_mesh(mesh)
    if policy.source is not None:
        raise PlanningError(
            "what is to be replicated is a replica itself, and has no values of its own.\n"
            "fix: dt.replica(policy, mesh, placements), with the module that is trained"
        )
    if mesh == policy.mesh:
        named = mesh.shape | {"name": "play"}
        text = ", ".join(f"{axis}={size!r}" for axis, size in named.items()).replace("'", '"')
        raise PlanningError(
            f"the policy is on {policy.mesh}, and a replica lives on another mesh.\n"
            f"fix: dt.Mesh({text}) is another one, which may share the ranks"
        )
    actor = parallelize(_definition(policy.module), mesh, placements, stages=stages)
    if actor.stage_plan.waiting:
        raise PlanningError(
            f"stages={stages!r}: a program chooses them when it first runs, and a replica's values "
            f"have to be somewhere before.\n"
            f"fix: state them; the plan of a function of dt.parallelize(module, mesh, "
            f"stages={stages!r}) shows what it would choose"
        )
    actor.source = policy
    actor.initial.remedy = "dt.sync(policy, actor), inside the launch that uses the actor"
    return actor


def sync_plan(
    policy: ParallelModule, actor: ParallelModule, *, topology: Topology | None = None
) -> SyncPlan:
    """What `sync` would send: each value's pieces, the bytes of each pair of ranks, the messages,
    and the price. Nothing is launched.

    Outside a launch the policy's ranks are the first ones and the actor's follow.
    """
    _check_pair(policy, actor)
    check_topology(topology)
    if launched() is None:
        first, last = policy.mesh.size, policy.mesh.size + actor.mesh.size
        numbers = tuple(range(first)), tuple(range(first, last))
        return _planned(policy, _kept(policy, None), actor, _kept(actor, None), numbers, topology)
    here, there = session_for(policy.mesh), session_for(actor.mesh)
    numbers = home_of(here)[1], home_of(there)[1]
    source = _kept(policy, here.residents.get(id(policy)))
    target = _kept(actor, there.residents.get(id(actor)))
    return _planned(policy, source, actor, target, numbers, topology)


def sync(policy: ParallelModule, actor: ParallelModule) -> int:
    """Give the actor the policy's values; the actor's version afterwards, 1 for the first sync.

    It is submitted and not waited for. The policy's values are those after the steps called before;
    what was written into the module since is sent, as before a step. A sync that fails leaves the
    actor's values as they were, and raises here or, where it was not over then, at the next one.

    Raises PlanningError outside a launch of both meshes, for what is no replica of the policy, and
    where the two modules no longer have the same parameters and buffers.
    """
    _check_pair(policy, actor)
    if launched() is None:
        raise PlanningError(
            f"dt.sync runs in a launch that has the ranks of both meshes, and none is running.\n"
            f"fix: with dt.launch(...) of {policy.mesh} and {actor.mesh}"
        )
    with ONE_AT_A_TIME:
        here, there = session_for(policy.mesh), session_for(actor.mesh)
        link = _Link.of(here, policy, there, actor)
        link.run()
        actor.version += 1
        return actor.version


def keep_otherwise(session: MeshSession, resident: Resident, wanted: Where) -> None:
    """Values that are on a mesh are kept there under other specs from now on."""
    numbers = tuple(range(session.mesh.size))
    plan = plan_sync(
        type(resident.model.module).__name__,
        {
            label: (
                Kept(resident.specs[label], resident.ranks[label], numbers),
                Kept(spec, ranks, numbers),
            )
            for label, (spec, ranks) in wanted.items()
        },
    )
    names = {label: (resident.name(label),) * 2 for label in wanted}
    cluster = session.cluster
    handle = cluster.load(sync_program(plan, cluster.size, cluster.device, names))
    session.run(handle, [{} for _ in numbers], {}).get()
    cluster.unload(handle)
    left: list[list[str]] = [[] for _ in numbers]
    for label, (spec, ranks) in wanted.items():
        for rank in set(resident.ranks[label]) - set(ranks):
            left[rank].append(resident.name(label))
        resident.specs[label], resident.ranks[label] = spec, ranks
    if any(left):
        cluster.delete(left)


class _Link:
    """A policy and an actor in a launch: the program between them, made anew where one of them is
    kept otherwise than it was made for."""

    def __init__(
        self, here: MeshSession, policy: ParallelModule, there: MeshSession, actor: ParallelModule
    ) -> None:
        self.policy, self.here, self.source = policy, here, here.resident(policy)
        self.actor, self.there, self.target = actor, there, there.resident(actor)
        self.cluster, self.numbers = home_of(here)
        other, self.target_numbers = home_of(there)
        if other is not self.cluster:
            raise PlanningError(
                f"{policy.mesh} and {actor.mesh} are not in one launch.\nfix: launch both together"
            )
        self.unread: list[Future] = []
        self.made: tuple[Where, Where] = {}, {}
        self.handle = None
        there.settling.append(self._settle)

    @staticmethod
    def of(
        here: MeshSession, policy: ParallelModule, there: MeshSession, actor: ParallelModule
    ) -> _Link:
        key = "sync", id(policy), id(actor)
        if key not in there.loaded:
            there.loaded[key] = _Link(here, policy, there, actor)
        return there.loaded[key]

    def run(self) -> None:
        while self.unread and (self.unread[0].done() or len(self.unread) >= MOST_UNREAD):
            self._read(self.unread.pop(0))
        self.source.settle()
        self.here.hold(self.policy, _kept(self.policy, self.source))
        self._load()
        assert self.handle is not None
        empty: list[Mapping[str, object]] = [{}] * self.cluster.size
        future = self.cluster.run(self.handle, empty, mode=self.there.mode)
        if self.there.at_once:
            self._read(future)
        else:
            self.unread.append(future)
        target, where = self.target, self.made[1]
        target.specs.update({label: spec for label, (spec, _) in where.items()})
        target.ranks.update({label: ranks for label, (_, ranks) in where.items()})
        tensors = named_tensors(self.actor.module)
        target.keep({label: tensors[label] for label in where})
        target.stale.clear()
        target.saved = "the policy's values are where they were", self.actor.steps.present()

    def _load(self) -> None:
        here, there = _kept(self.policy, self.source), _kept(self.actor, self.target)
        if self.handle is not None and self.made == (here, there):
            return
        numbers = self.numbers, self.target_numbers
        plan = _planned(self.policy, here, self.actor, there, numbers, None)
        names = {
            label: (
                inner_name(self.here, self.source.name(label)),
                inner_name(self.there, self.target.name(label)),
            )
            for label in there
        }
        program = sync_program(plan, self.cluster.size, self.cluster.device, names)
        before, self.handle = self.handle, self.cluster.load(program)
        if before is not None:
            self.cluster.unload(before)
        self.made = here, there

    def _settle(self) -> None:
        while self.unread:
            self._read(self.unread.pop(0))

    def _read(self, future: Future) -> None:
        try:
            future.check()
        except DaftError as error:
            raise self.there.told(error) from error.__cause__


# -- how values are kept ---------------------------------------------------------------------------


def _kept(model: ParallelModule, resident: Resident | None) -> Where:
    """Every parameter and buffer, as it is on a cluster, or would be put there now."""
    there = {} if resident is None else resident.specs
    planned = {} if resident is None else resident.planned
    tensors = named_tensors(model.module)
    found: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}
    for label in dict.fromkeys(first_names(model.module).values()):
        if resident is not None and label in there:
            found[label] = there[label], resident.ranks[label]
        elif label in planned:
            found[label] = planned[label]
        else:
            found[label] = _as_stated(model, label, tensors[label])
    return found


def _as_stated(
    model: ParallelModule, label: str, tensor: torch.Tensor
) -> tuple[TensorSpec, tuple[int, ...]]:
    """How a value is put before a program of this launch has said."""
    stated: Mapping[str, Placement] = model.settled.get(label, {})
    if label not in model.settled:
        own = next((p for p in model.placements if p.name == label), None)
        if own is not None:
            placements = own.placements.items()
            stated = {axis: p for axis, p in placements if isinstance(p, Placement)}
    with as_it_is():
        shape, dtype = tuple(tensor.shape), tensor.dtype
    spec = make_spec(shape, dtype, model.mesh, stated)
    if model.zero is not None and model.zero[1] == 3 and isinstance(tensor, nn.Parameter):
        spec = stored_spec(spec, model.zero[0]) or spec
    stages = model.stage_plan
    everyone = tuple(range(model.mesh.size))
    if not stages.axis or stages.waiting or label not in stages.held:
        return spec, everyone
    mine = {model.homes[stage] for stage in stages.held[label]}
    return spec, tuple(r for r in everyone if model.mesh.coordinates(r)[stages.axis] in mine)


def _planned(
    policy: ParallelModule,
    here: Where,
    actor: ParallelModule,
    there: Where,
    numbers: tuple[tuple[int, ...], tuple[int, ...]],
    topology: Topology | None,
) -> SyncPlan:
    _check_same(here, there)
    return plan_sync(
        type(policy.module).__name__,
        {
            label: (Kept(*here[label], numbers[0]), Kept(*there[label], numbers[1]))
            for label in there
        },
        topology=topology,
    )


def _definition(module: nn.Module) -> nn.Module:
    """A copy of the module without memory: tensors on the meta device, one for each."""
    memo: dict[int, object] = {}
    with as_it_is():
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
            f"{type(module).__name__} cannot be copied, and a replica has a module of its own: "
            f"{error}.\n"
            f"fix: keep what copy.deepcopy refuses (locks, files, computed tensors) out of the module"
        ) from error


# -- what is refused -------------------------------------------------------------------------------


def _check_pair(policy: ParallelModule, actor: ParallelModule) -> None:
    check_parallel("sync", policy)
    check_parallel("sync", actor)
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


def _check_same(here: Where, there: Where) -> None:
    """That both modules still have the same parameters and buffers."""
    for mine, other, whose in ((here, there, "policy"), (there, here, "actor")):
        missing = sorted(mine.keys() - other.keys())
        if missing:
            raise _differ(f"the {whose} alone has {', '.join(missing[:4])}")
    for label, (spec, _) in here.items():
        target = there[label][0]
        if (spec.shape, spec.dtype) != (target.shape, target.dtype):
            raise _differ(f"{label} is {_type(spec)} in the policy, {_type(target)} in the actor")


def _differ(fact: str) -> PlanningError:
    return PlanningError(
        f"the policy's module has changed since the replica was made: {fact}.\n"
        f"fix: actor = dt.replica(policy, mesh, placements), anew"
    )


def _type(spec: TensorSpec) -> str:
    return type_text(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
