"""The store of a launch: the values on its ranks, by owner and key, and all changes of them.

    store, owner = launch.store, Owner[str]()
    home = session.stored("model 0: up.weight", spec)       # f32[64@tp,16] on ranks 0, 1
    store.put(owner, {"up.weight": (tensor, home)})         # [32,16] to each
    owner.stored["up.weight"]                               # home: that is where it is now
    dict(store.get(owner.stored))                           # {"up.weight": tensor}, whole
    store.move(plan, {"up.weight": (owner, "up.weight")})   # among ranks, to where the plan says
    store.forget(owner, ["up.weight"], delete=True)

Owners are a model's parameters and buffers, an optimizer's state, a step's gradients, a program's
constants. An entry is the state of ranks after all submitted runs; where a move is undone, the
entry is restored. A value of an optimizer may be absent until a step makes it: its entry exists,
its shards are empty. A home that a program has settled also holds for values that are put anew.

Invariants: nothing but the store changes an entry. A move, a load or a put that fails leaves all
entries as they were. Not here: when values are moved (session.py, replica.py, switch.py), the
module's own tensors meanwhile (home.py). DTensors, which are made and dropped by thousands, have
records and no entries (eager/values.py).
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dtensor.api.model.initial_values import init_program
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.values.on_disk import OnDisk
from dtensor.daft import Cluster, DaftError, Future, Mode, Program, Stored
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.daft.run.worker import Counted
from dtensor.frontend.initial.recipe import Recipe
from dtensor.runtime.optimizer.shard_optimizer import absent, is_absent
from dtensor.runtime.transfer.between_meshes import transfer_program, values_program
from dtensor.sharding.ops.philox import Pieces
from dtensor.sharding.redistribute.between_meshes import TransferPlan
from dtensor.sharding.redistribute.sync_plan import SyncPlan
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.shards import assemble_at, lent_shard
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_may_act

PIECE_BYTES = 2**26
"""Bytes that are put at a time, of all ranks together."""
BUCKET_BYTES = 2**26
"""Bytes that are fetched at a time: the controller holds at most twice as many."""
MAX_LOADED = 64
"""The number of programs of moves, transfers and saves that stay loaded."""

K = TypeVar("K", bound=Hashable)
Source = Tensor | Callable[[], Tensor] | Recipe | OnDisk | None
"""The source of a value that is put: the value, a function that makes it in its turn, or how ranks
make or read their shards; None: absent until a step makes it."""


class MeshRanks(Protocol):
    """A mesh on ranks of a launch: of session.py."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def launch(self) -> LaunchRanks: ...
    @property
    def mode(self) -> Mode: ...
    def check(self) -> None: ...
    def put(self, values: Sequence[Mapping[str, object]], *, wait: bool = False) -> None: ...
    def run(
        self,
        handle: Any,
        inputs: Sequence[Mapping[str, object]],
        keep: Mapping[str, str],
        counted: Counted | None = None,
    ) -> Future: ...
    def told(self, error: DaftError) -> DaftError: ...
    def forget(self, stored: StoredTensor) -> None: ...
    def drop(self) -> None: ...


class LaunchRanks(Protocol):
    """A launch."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def sessions(self) -> Mapping[Mesh, MeshRanks]: ...
    @property
    def store(self) -> TensorStore: ...


class Owner(Generic[K]):
    """An owner of values in the store: by key the stored tensors, and the homes that programs
    settled."""

    __slots__ = ("_absent", "_settled", "_stored")

    def __init__(self) -> None:
        self._stored: dict[K, StoredTensor] = {}
        self._settled: dict[K, StoredTensor] = {}
        self._absent: set[K] = set()

    @property
    def stored(self) -> Mapping[K, StoredTensor]:
        return MappingProxyType(self._stored)

    @property
    def settled(self) -> Mapping[K, StoredTensor]:
        return MappingProxyType(self._settled)

    def is_there(self, key: K) -> bool:
        """Whether ranks have it, and a step has made it."""
        return key in self._stored and key not in self._absent


@dataclass(eq=False, slots=True)
class Moving:
    """A submitted move. ``before``: the earlier entry of each one that it replaced; ``undone``:
    called when they are restored; ``note``: the note on an error then."""

    store: TensorStore
    run: Future
    session: MeshRanks
    note: str
    undone: Callable[[], None]
    before: dict[tuple[Owner[Any], Any], StoredTensor | None] = field(repr=False)
    after: dict[tuple[Owner[Any], Any], StoredTensor] = field(repr=False)

    def check(self) -> None:
        """Wait for it. Raises its failure; the entries are then as before it."""
        try:
            self.run.check()
        except DaftError as error:
            self.store.undo(self)
            if self.session.cluster.failure is None and self.note:
                error.add_note(self.note)
            raise self.session.told(error) from error.__cause__
        self.store.ended(self)


class TensorStore:
    """The store of a launch."""

    def __init__(self, launch: LaunchRanks) -> None:
        self._launch = launch
        self._programs = ProgramCache[ClusterProgram](MAX_LOADED)
        self._moving: list[Moving] = []

    def _session(self, values: Iterable[StoredTensor]) -> MeshRanks:
        """The session of the values' mesh, of which there is one."""
        return self._launch.sessions[next(iter(values)).spec.mesh]

    # -- in ---------------------------------------------------------------------------------------

    def put(self, owner: Owner[K], given: Mapping[K, tuple[Source, StoredTensor]]) -> None:
        """Put values into their homes, on ranks that lack them."""
        sent: list[tuple[Tensor | Callable[[], Tensor] | None, StoredTensor]] = []
        by_rank_and_name: dict[int, dict[str, tuple[Any, Pieces]]] = {}
        names: dict[str, str] = {}
        put: dict[K, StoredTensor] = {}
        for key, (source, wanted) in given.items():
            known = owner._stored.get(key)
            had = {} if known is None else known.numbers
            missing = wanted.on(rank for rank in wanted.at if rank not in had)
            if isinstance(source, Recipe | OnDisk):
                called = key if isinstance(key, str) else wanted.label
                names[called] = wanted.label
                for rank in missing.at:
                    by_rank_and_name.setdefault(rank, {})[called] = source, wanted.where(rank)
            else:
                sent.append((source, missing))
            everyone = {**had, **wanted.numbers}
            put[key] = StoredTensor.of(wanted.label, wanted.spec, sorted(everyone), everyone)
        if not put:
            return
        session = self._session(put.values())
        with waits_may_act():  # a signal may act: values that are put and not noted are put anew
            self._put_each(session, _shards(sent))
        if by_rank_and_name:
            self._make(session, by_rank_and_name, names)
        owner._stored.update(put)
        owner._absent.difference_update(put)
        owner._absent.update(key for key, (source, _) in given.items() if source is None)

    def _put_each(self, session: MeshRanks, values: Iterable[tuple[int, str, Tensor]]) -> None:
        """Put shards in pieces, one at a time, since a source may make them from the controller's
        memory only when its turn comes."""
        piece: list[dict[str, object]] = [{} for _ in range(session.mesh.size)]
        nbytes = 0
        for rank, label, shard in values:
            piece[rank][label] = shard
            nbytes += shard.nbytes
            if nbytes >= PIECE_BYTES:
                session.put(piece, wait=True)
                piece, nbytes = [{} for _ in range(session.mesh.size)], 0
        if any(piece):
            session.put(piece)

    def _make(
        self,
        session: MeshRanks,
        by_rank_and_name: Mapping[int, Mapping[str, tuple[Any, Pieces]]],
        names: Mapping[str, str],
    ) -> None:
        """Ranks make their own shards, or read them, and keep them under these names."""
        each = [by_rank_and_name.get(rank, {}) for rank in range(session.mesh.size)]
        handle = session.cluster.load(init_program(each, session.cluster.device))
        try:
            session.run(handle, [{} for _ in each], names).get()
        finally:
            if session.cluster.failure is None:
                session.cluster.unload(handle)

    def load(
        self,
        owner: Owner[K],
        given: Mapping[K, StoredTensor],
        reading: Callable[[Cluster], Program],
    ) -> None:
        """Each rank reads its shards of a checkpoint's values, by the program that ``reading``
        makes for the cluster (runtime/checkpoint/saving.py). Either all ranks load all values, or
        none does."""
        session = self._session(given.values())
        cluster = session.cluster
        handle = cluster.load(reading(cluster))
        try:
            cluster.run(handle, [{}] * cluster.size).get()
        except DaftError as error:
            if cluster.failure is None:
                error.add_note("nothing was loaded: the model is unchanged.")
            raise session.told(error) from error.__cause__
        finally:
            if cluster.failure is None:
                cluster.unload(handle)
        owner._stored.update(given)

    def keep(self, owner: Owner[K], stored: Mapping[K, StoredTensor]) -> None:
        """A submitted run makes these values, and keeps them."""
        owner._stored.update(stored)

    def written(self, owner: Owner[K], keys: Set[K]) -> None:
        """A step that makes these values, if they were absent, has ended without failure."""
        if not owner._absent.isdisjoint(keys):
            owner._absent.difference_update(keys)

    # -- out --------------------------------------------------------------------------------------

    def fetch(self, values: Collection[StoredTensor]) -> dict[str, dict[int, Tensor]]:
        """By label, the shards by rank of the mesh, on the CPU. Waits for running steps."""
        if not values:
            return {}
        session = self._session(values)
        session.check()
        wanted = by_rank(values, session.mesh.size)
        try:
            fetched = session.cluster.get(wanted).get()
        except DaftError as error:
            raise session.told(error) from error.__cause__
        tables = [dict(zip(*pair, strict=True)) for pair in zip(wanted, fetched, strict=True)]
        return {one.label: {rank: tables[rank][one.label] for rank in one.at} for one in values}

    def get(self, values: Mapping[K, StoredTensor]) -> Iterator[tuple[K, Tensor | None]]:
        """Each value whole, on the CPU, a bucket at a time; None where it is absent."""
        for bucket in buckets(values):
            shards = self.fetch([one.on(one.covering()) for one in bucket.values()])
            for key, one in bucket.items():
                parts = shards[one.label]
                none = one.spec.dtype != torch.bool and any(map(is_absent, parts.values()))
                yield key, None if none else assemble_at(parts, one.spec)

    def save(
        self,
        key: Hashable,
        values: Mapping[tuple[str, ...], StoredTensor],
        copying: Callable[[int], Program],
        fed: Mapping[str, object],
        counted: Counted | None = None,
    ) -> Future:
        """A run that reads values, in which each rank copies its share for a writer, or compares
        copies: ``copying`` makes its program for a number of ranks (runtime/checkpoint/saving.py),
        which stays loaded under ``key`` while the values' homes are the same."""
        session = self._session(values.values())
        cluster = session.cluster
        program = self._program(key, values, cluster, lambda: copying(cluster.size))
        program.last_run = run = session.run(program.handle, [fed] * cluster.size, {}, counted)
        return run

    def forget(self, owner: Owner[K], keys: Iterable[K], *, delete: bool = False) -> None:
        """Drop these entries; ``delete``: drop the values on the ranks too."""
        left = [owner._stored.pop(key) for key in [*keys] if key in owner._stored]
        owner._absent.intersection_update(owner._stored)
        if delete and left:
            session = self._session(left)
            for one in left:
                session.forget(one)

    # -- homes, and moves among ranks -------------------------------------------------------------

    def settle(
        self,
        owner: Owner[str],
        homes: Mapping[str, StoredTensor],
        plan: Callable[[Mapping[str, tuple[StoredTensor, StoredTensor]]], SyncPlan],
    ) -> None:
        """Settle the homes of a program's values. Values in a default home that differs are
        moved."""
        lying: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        for key in owner._stored.keys() & homes.keys() - owner._settled.keys():
            if owner._stored[key] != homes[key]:
                lying[key] = owner._stored[key], homes[key]
        if lying:
            lying = {key: lying[key] for key in homes if key in lying}  # always in one order
            self.move(plan(lying), {key: (owner, key) for key in lying}).check()
        owner._settled.update(homes)

    def settle_anew(self, owner: Owner[K], homes: Mapping[K, StoredTensor]) -> None:
        """These are the settled homes, and no others."""
        owner._settled.clear()
        owner._settled.update(homes)

    def unsettle(self, owner: Owner[K], keys: Iterable[K]) -> None:
        """Drop the settled homes of these."""
        for key in [*keys]:
            owner._settled.pop(key, None)

    def move(
        self,
        plan: SyncPlan,
        into: Mapping[str, tuple[Owner[Any], Any]],
        *,
        key: Hashable = None,
        also: Collection[int] = (),
        note: str = "",
        undone: Callable[[], None] = lambda: None,
    ) -> Moving:
        """Move values from rank to rank; all ranks agree that all have all before new ones are
        valid.

        The earlier values of an entry leave ranks outside its new home once the move is known to
        have ended without failure.

        Args:
            into: the owner and key of each value, by the plan's name of it.
            key: the program stays loaded under it, for as long as the plan is the same.
            also: ranks that agree besides.
        """
        launch, cluster = self._launch, self._launch.cluster
        there = launch.sessions[next(iter(plan.transfers.values())).target.mesh]

        def lower() -> Program:
            pairs = {name: (one.here, one.there) for name, one in plan.transfers.items()}
            names = {name: (self._inner(a), self._inner(b)) for name, (a, b) in pairs.items()}
            values = values_program(
                plan, cluster.size, cluster.device, names, state=True, also=also
            )
            return across(cluster, values)

        program = self._program(key, plan, cluster, lower)
        try:
            run = cluster.run(program.handle, [{}] * cluster.size, mode=there.mode)
            program.last_run = run
        except DaftError as error:
            raise there.told(error) from error.__cause__
        finally:
            if key is None and cluster.failure is None:
                program.unload()
        after = {into[name]: own.there for name, own in plan.transfers.items()}
        before = {(owner, key): owner._stored.get(key) for owner, key in after}
        moving = Moving(self, run, there, note, undone, before, after)
        self._moving.append(moving)
        for (owner, key), stored in after.items():
            owner._stored[key] = stored
        return moving

    def transfer(self, plan: TransferPlan) -> Future:
        """Move a value without an owner from rank to rank, under its own label."""
        cluster = self._launch.cluster
        key = "transfer", plan.source, plan.target, plan.here.ranks, plan.there.ranks

        def lower() -> Program:
            return across(cluster, transfer_program(plan, cluster.size, cluster.device))

        program = self._program(key, key, cluster, lower)
        fed: list[dict[str, object]] = [{} for _ in range(cluster.size)]
        for rank in plan.here.ranks:
            fed[rank]["x"] = Stored(self._inner(plan.here))
        keep, mode = {"y": self._inner(plan.there)}, self._launch.mode
        program.last_run = run = cluster.run(program.handle, fed, mode=mode, keep=keep)
        return run

    def look(self, *, wait: bool = False) -> None:
        """Restore the entries of moves that have ended with a failure; with ``wait``, first wait
        for moves in flight. `Moving.check` raises the failure."""
        for moving in [*self._moving]:
            if wait or moving.run.done():
                try:
                    moving.run.check()
                except DaftError:  # `Moving.check` raises it
                    self.undo(moving)
                else:
                    self.ended(moving)

    def undo(self, moving: Moving) -> None:
        """Restore the entries from before a failed move, except those that a later move has
        replaced."""
        if moving not in self._moving:
            return
        later = self._moving[self._moving.index(moving) + 1 :]
        self._moving.remove(moving)
        for at, before in moving.before.items():
            owner, key = at
            again = next((other for other in later if at in other.before), None)
            if again is not None:
                again.before[at] = before
            elif owner._stored.get(key) is moving.after[at]:
                if before is None:
                    del owner._stored[key]
                else:
                    owner._stored[key] = before
        moving.undone()

    def ended(self, moving: Moving) -> None:
        """A move has ended without failure: drop the earlier values on ranks outside the new
        homes."""
        if moving not in self._moving:
            return
        self._moving.remove(moving)
        meshes: set[Mesh] = set()
        for at, before in moving.before.items():
            if before is not None:
                now = moving.after[at]
                stays = now.at if now.spec.mesh == before.spec.mesh else ()
                left = before.on(rank for rank in before.at if rank not in stays)
                if left.at:
                    self._session([left]).forget(left)
                    meshes.add(left.spec.mesh)
        for mesh in meshes:  # before one of them is put there again
            self._launch.sessions[mesh].drop()

    def _inner(self, stored: StoredTensor) -> str:
        return inner_name(self._session([stored]), stored.label)

    def _program(
        self, key: Hashable, made_for: object, cluster: Cluster, lower: Callable[[], Program]
    ) -> ClusterProgram:
        """Return the program of a move, a transfer or a save, loading it if it is not cached. It is
        cached if it has a key."""

        def load() -> ClusterProgram:
            return ClusterProgram(cluster, cluster.load(lower()))

        if key is None:
            return load()
        return self._programs.get(key, made_for) or self._programs.load(key, load, made_for)


def by_rank(values: Iterable[StoredTensor], size: int) -> list[list[str]]:
    """Their labels, by rank of the mesh."""
    labels: list[list[str]] = [[] for _ in range(size)]
    for one in values:
        for rank in one.at:
            labels[rank].append(one.label)
    return labels


def buckets(values: Mapping[K, StoredTensor]) -> Iterator[dict[K, StoredTensor]]:
    """Groups of BUCKET_BYTES at most, or of one value that is larger."""
    bucket: dict[K, StoredTensor] = {}
    nbytes = 0
    for key, one in values.items():
        if bucket and nbytes + one.spec.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = {}, 0
        bucket[key] = one
        nbytes += one.spec.nbytes
    if bucket:
        yield bucket


def across(cluster: Cluster, program: Program) -> Program:
    """A program between meshes of a launch: its errors name a rank as its mesh does."""
    known_as = tuple(cluster.known_as.get(rank, "") for rank in range(cluster.size))
    return replace(program, known_as=known_as)


def inner_name(session: MeshRanks, name: str) -> str:
    """The name in the tables of the launch's ranks of a name of the mesh."""
    cluster = session.cluster
    return cluster.inner(name) if isinstance(cluster, SubCluster) else name


def _shards(
    values: Iterable[tuple[Tensor | Callable[[], Tensor] | None, StoredTensor]],
) -> Iterator[tuple[int, str, Tensor]]:
    """The shards of values on the controller, one after the other."""
    nothing = absent("cpu")
    for source, stored in values:
        if not stored.at:
            continue
        mesh, spec = stored.spec.mesh, stored.spec
        value = source() if callable(source) else source
        alike = set(spec.placements) <= {REPLICATE}
        if value is not None and alike:
            value = value.detach().contiguous()
        for rank in stored.at:
            if value is None:
                yield rank, stored.label, nothing
            else:
                shard = value if alike else lent_shard(value, spec, mesh.coordinates(rank))
                yield rank, stored.label, shard
