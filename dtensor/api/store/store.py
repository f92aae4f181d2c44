"""The store of a launch: which values are on its ranks, by owner and key, and all changes of them.

    store, owner = launch.store, Owner[str]()
    home = session.stored("model 0: up.weight", spec)       # f32[64@tp,16] on ranks 0, 1
    store.put(owner, {"up.weight": (tensor, home)})         # [32,16] to each
    owner.stored["up.weight"]                               # home
    dict(store.get(owner.stored))                           # {"up.weight": the full tensor}
    store.move(plan, {"up.weight": (owner, "up.weight")})   # between ranks, as the plan says

An entry describes the ranks after all submitted runs. State that a step has yet to make is absent:
it has an entry, and its shards are empty. Invariants: only the store changes entries. A move, load
or put that fails leaves all entries as they were. DTensors have no entries (eager/values.py).
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
from dtensor.sharding.spec.shards import assemble_at, shard_to_copy
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.signals import waits_handle_signals

PIECE_BYTES = 2**26
"""The bytes that are put at a time, of all ranks together."""
BUCKET_BYTES = 2**26
"""The bytes that are fetched at a time. The controller holds at most twice as many."""
MAX_LOADED = 64
"""The number of programs of moves, transfers and saves that stay loaded."""

K = TypeVar("K", bound=Hashable)
Source = Tensor | Callable[[], Tensor] | Recipe | OnDisk | None
"""The source of a value that is put: the value, a function that returns it when its turn comes, a
recipe or files from which ranks make their shards, or None if it is absent until a step makes
it."""


class MeshRanks(Protocol):
    """The interface of `MeshSession` that the store uses."""

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
        numbering: Counted | None = None,
    ) -> Future:
        """Start a loaded program. ``keep``: output -> the name under which it stays on the ranks;
        ``numbering``: how the ranks compute the run's step number."""
        ...

    def with_loss_note(self, error: DaftError) -> DaftError: ...
    def forget(self, stored: StoredTensor) -> None: ...
    def drop(self) -> None: ...


class LaunchRanks(Protocol):
    """The interface of `Launch` that the store uses."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def sessions(self) -> Mapping[Mesh, MeshRanks]: ...
    @property
    def store(self) -> TensorStore: ...


class Owner(Generic[K]):
    """An owner of values in the store, such as a model's parameters, an optimizer's state, a step's
    gradients or a program's constants. ``stored``: its values by key; ``settled``: the homes that
    programs have fixed, which also hold for values that are put later."""

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

    def is_present(self, key: K) -> bool:
        """Return whether the value is on ranks and not absent."""
        return key in self._stored and key not in self._absent


@dataclass(eq=False, slots=True)
class Moving:
    """A submitted move. ``before`` and ``after``: the entries that it replaced (None: there was
    none) and their replacements, by (owner, key); ``on_undo``: called when the entries are
    restored; ``note``: a note on the error of a failed move."""

    store: TensorStore
    run: Future
    session: MeshRanks
    note: str
    on_undo: Callable[[], None]
    before: dict[tuple[Owner[Any], Any], StoredTensor | None] = field(repr=False)
    after: dict[tuple[Owner[Any], Any], StoredTensor] = field(repr=False)

    def check(self) -> None:
        """Wait for the move. If it failed, restore the entries and raise the failure."""
        try:
            self.run.check()
        except DaftError as error:
            self.store.undo(self)
            if self.session.cluster.failure is None and self.note:
                error.add_note(self.note)
            raise self.session.with_loss_note(error) from error.__cause__
        self.store.finish_move(self)


class TensorStore:
    """The store of a launch: see the module."""

    def __init__(self, launch: LaunchRanks) -> None:
        self._launch = launch
        self._programs = ProgramCache[ClusterProgram](MAX_LOADED)
        self._moving: list[Moving] = []

    def _session(self, values: Iterable[StoredTensor]) -> MeshRanks:
        """Return the session of the mesh on which all of these values are."""
        return self._launch.sessions[next(iter(values)).spec.mesh]

    # -- in ---------------------------------------------------------------------------------------

    def put(self, owner: Owner[K], values: Mapping[K, tuple[Source, StoredTensor]]) -> None:
        """Put values into their homes, on those ranks of the homes that lack them."""
        to_send: list[tuple[Tensor | Callable[[], Tensor] | None, StoredTensor]] = []
        by_rank_and_name: dict[int, dict[str, tuple[Any, Pieces]]] = {}
        names: dict[str, str] = {}
        entries: dict[K, StoredTensor] = {}
        for key, (source, home) in values.items():
            present = owner._stored.get(key)
            numbers = {} if present is None else present.numbers
            missing = home.on(rank for rank in home.at if rank not in numbers)
            if isinstance(source, Recipe | OnDisk):
                name = key if isinstance(key, str) else home.label
                names[name] = home.label
                for rank in missing.at:
                    by_rank_and_name.setdefault(rank, {})[name] = source, home.where(rank)
            else:
                to_send.append((source, missing))
            all_numbers = {**numbers, **home.numbers}
            entries[key] = StoredTensor.of(home.label, home.spec, sorted(all_numbers), all_numbers)
        if not entries:
            return
        session = self._session(entries.values())
        with waits_handle_signals():  # after a signal, values without an entry are put again
            self._put_in_pieces(session, _shards(to_send))
        if by_rank_and_name:
            self._make_on_ranks(session, by_rank_and_name, names)
        owner._stored.update(entries)
        owner._absent.difference_update(entries)
        owner._absent.update(key for key, (source, _) in values.items() if source is None)

    def _put_in_pieces(self, session: MeshRanks, values: Iterable[tuple[int, str, Tensor]]) -> None:
        """Put shards in pieces of at most PIECE_BYTES, one piece after the other, because a source
        may make its value on the controller only when its turn comes."""
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

    def _make_on_ranks(
        self,
        session: MeshRanks,
        by_rank_and_name: Mapping[int, Mapping[str, tuple[Any, Pieces]]],
        names: Mapping[str, str],
    ) -> None:
        """Run a program in which ranks make or read their own shards. ``names``: the label under
        which each is stored."""
        by_rank = [by_rank_and_name.get(rank, {}) for rank in range(session.mesh.size)]
        handle = session.cluster.load(init_program(by_rank, session.cluster.device))
        try:
            session.run(handle, [{} for _ in by_rank], names).get()
        finally:
            if session.cluster.failure is None:
                session.cluster.unload(handle)

    def load(
        self,
        owner: Owner[K],
        homes: Mapping[K, StoredTensor],
        make_program: Callable[[Cluster], Program],
    ) -> None:
        """Load a checkpoint's values: each rank reads its shards, with the program that
        ``make_program`` returns (runtime/checkpoint/saving.py). Either all ranks load all values,
        or no rank loads any."""
        session = self._session(homes.values())
        cluster = session.cluster
        handle = cluster.load(make_program(cluster))
        try:
            cluster.run(handle, [{}] * cluster.size).get()
        except DaftError as error:
            if cluster.failure is None:
                error.add_note("nothing was loaded: the model is unchanged.")
            raise session.with_loss_note(error) from error.__cause__
        finally:
            if cluster.failure is None:
                cluster.unload(handle)
        owner._stored.update(homes)

    def keep(self, owner: Owner[K], stored: Mapping[K, StoredTensor]) -> None:
        """Add entries for values that a submitted run makes and keeps."""
        owner._stored.update(stored)

    def mark_present(self, owner: Owner[K], keys: Set[K]) -> None:
        """Mark values as no longer absent: a step that makes them has ended without failure."""
        if not owner._absent.isdisjoint(keys):
            owner._absent.difference_update(keys)

    # -- out --------------------------------------------------------------------------------------

    def fetch(self, values: Collection[StoredTensor]) -> dict[str, dict[int, Tensor]]:
        """Return {label: {rank of the mesh: shard on the CPU}}. Waits for running steps."""
        if not values:
            return {}
        session = self._session(values)
        session.check()
        labels_by_rank = by_rank(values, session.mesh.size)
        try:
            fetched = session.cluster.get(labels_by_rank).get()
        except DaftError as error:
            raise session.with_loss_note(error) from error.__cause__
        tables = [
            dict(zip(*pair, strict=True)) for pair in zip(labels_by_rank, fetched, strict=True)
        ]
        return {
            value.label: {rank: tables[rank][value.label] for rank in value.at} for value in values
        }

    def get(self, values: Mapping[K, StoredTensor]) -> Iterator[tuple[K, Tensor | None]]:
        """Yield the full value of each key, on the CPU, or None if the value is absent. Fetches a
        bucket at a time."""
        for bucket in buckets(values):
            shards = self.fetch([stored.on(stored.covering()) for stored in bucket.values()])
            for key, stored in bucket.items():
                parts = shards[stored.label]
                none = stored.spec.dtype != torch.bool and any(map(is_absent, parts.values()))
                yield key, None if none else assemble_at(parts, stored.spec)

    def save(
        self,
        key: Hashable,
        values: Mapping[tuple[str, ...], StoredTensor],
        make_program: Callable[[int], Program],
        inputs: Mapping[str, object],
        numbering: Counted | None = None,
    ) -> Future:
        """Start a run in which each rank copies its share of the values for a writer, or compares
        copies. ``make_program`` returns the program for a number of ranks
        (runtime/checkpoint/saving.py); ``inputs``: its inputs on each rank. The program stays
        loaded under ``key`` for as long as the values' homes are the same."""
        session = self._session(values.values())
        cluster = session.cluster
        program = self._program(key, values, cluster, lambda: make_program(cluster.size))
        program.last_run = run = session.run(program.handle, [inputs] * cluster.size, {}, numbering)
        return run

    def forget(self, owner: Owner[K], keys: Iterable[K], *, delete: bool = False) -> None:
        """Drop these entries. ``delete``: drop the values on the ranks too."""
        dropped = [owner._stored.pop(key) for key in [*keys] if key in owner._stored]
        owner._absent.intersection_update(owner._stored)
        if delete and dropped:
            session = self._session(dropped)
            for stored in dropped:
                session.forget(stored)

    # -- homes, and moves among ranks -------------------------------------------------------------

    def settle(
        self,
        owner: Owner[str],
        homes: Mapping[str, StoredTensor],
        plan: Callable[[Mapping[str, tuple[StoredTensor, StoredTensor]]], SyncPlan],
    ) -> None:
        """Record the homes that a program's plan fixes. First move the values that are in another
        (default) home; ``plan`` plans the moves from each value's present and new home."""
        misplaced: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        for key in owner._stored.keys() & homes.keys() - owner._settled.keys():
            if owner._stored[key] != homes[key]:
                misplaced[key] = owner._stored[key], homes[key]
        if misplaced:
            misplaced = {key: misplaced[key] for key in homes if key in misplaced}  # in one order
            self.move(plan(misplaced), {key: (owner, key) for key in misplaced}).check()
        owner._settled.update(homes)

    def replace_settled(self, owner: Owner[K], homes: Mapping[K, StoredTensor]) -> None:
        """Replace all settled homes of an owner."""
        owner._settled.clear()
        owner._settled.update(homes)

    def unsettle(self, owner: Owner[K], keys: Iterable[K]) -> None:
        """Drop the settled homes of these keys."""
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
        on_undo: Callable[[], None] = lambda: None,
    ) -> Moving:
        """Move values between ranks. The new values become valid only after all ranks have agreed
        that all values have arrived. The old values are deleted, on ranks outside the new home,
        once the move is known to have ended without failure.

        Args:
            into: the owner and key of each value, by the value's name in the plan.
            key: the program stays loaded under it for as long as the plan is the same; None: the
                program is unloaded after the run.
            also: further ranks that take part in the agreement.
            note: a note on the error of a failed move.
            on_undo: called when a failed move is undone.
        """
        launch, cluster = self._launch, self._launch.cluster
        target = launch.sessions[next(iter(plan.transfers.values())).target.mesh]

        def lower() -> Program:
            """Return the program that sends each value from its present to its new ranks."""
            pairs = {name: (moved.here, moved.there) for name, moved in plan.transfers.items()}
            names = {
                name: (self._name_on_ranks(a), self._name_on_ranks(b))
                for name, (a, b) in pairs.items()
            }
            values = values_program(
                plan, cluster.size, cluster.device, names, state=True, also_agree=also
            )
            return with_mesh_ranks(cluster, values)

        program = self._program(key, plan, cluster, lower)
        try:
            run = cluster.run(program.handle, [{}] * cluster.size, mode=target.mode)
            program.last_run = run
        except DaftError as error:
            raise target.with_loss_note(error) from error.__cause__
        finally:
            if key is None and cluster.failure is None:
                program.unload()
        after = {into[name]: transfer.there for name, transfer in plan.transfers.items()}
        before = {(owner, key): owner._stored.get(key) for owner, key in after}
        moving = Moving(self, run, target, note, on_undo, before, after)
        self._moving.append(moving)
        for (owner, key), stored in after.items():
            owner._stored[key] = stored
        return moving

    def transfer(self, plan: TransferPlan) -> Future:
        """Start the run that moves a DTensor's value between ranks, and return its future. The
        target's ranks store the value under the label in the plan."""
        cluster = self._launch.cluster
        key = "transfer", plan.source, plan.target, plan.here.ranks, plan.there.ranks

        def lower() -> Program:
            return with_mesh_ranks(cluster, transfer_program(plan, cluster.size, cluster.device))

        program = self._program(key, key, cluster, lower)
        inputs: list[dict[str, object]] = [{} for _ in range(cluster.size)]
        for rank in plan.here.ranks:
            inputs[rank]["x"] = Stored(self._name_on_ranks(plan.here))
        keep, mode = {"y": self._name_on_ranks(plan.there)}, self._launch.mode
        program.last_run = run = cluster.run(program.handle, inputs, mode=mode, keep=keep)
        return run

    def finish_moves(self, *, wait: bool = False) -> None:
        """Finish the moves that have ended, and restore the entries of those that failed. ``wait``:
        first wait for moves in flight."""
        for moving in [*self._moving]:
            if wait or moving.run.done():
                try:
                    moving.run.check()
                except DaftError:  # `Moving.check` raises it
                    self.undo(moving)
                else:
                    self.finish_move(moving)

    def undo(self, moving: Moving) -> None:
        """Restore the entries from before a failed move, except entries that a later move has
        replaced; that move restores them if it fails too."""
        if moving not in self._moving:
            return
        later = self._moving[self._moving.index(moving) + 1 :]
        self._moving.remove(moving)
        for owner_and_key, before in moving.before.items():
            owner, key = owner_and_key
            replaced_by = next((other for other in later if owner_and_key in other.before), None)
            if replaced_by is not None:
                replaced_by.before[owner_and_key] = before
            elif owner._stored.get(key) is moving.after[owner_and_key]:
                if before is None:
                    del owner._stored[key]
                else:
                    owner._stored[key] = before
        moving.on_undo()

    def finish_move(self, moving: Moving) -> None:
        """Drop the earlier values of a move that ended without failure, on ranks outside the new
        homes."""
        if moving not in self._moving:
            return
        self._moving.remove(moving)
        meshes: set[Mesh] = set()
        for owner_and_key, before in moving.before.items():
            if before is not None:
                after = moving.after[owner_and_key]
                still_used = after.at if after.spec.mesh == before.spec.mesh else ()
                outside = before.on(rank for rank in before.at if rank not in still_used)
                if outside.at:
                    self._session([outside]).forget(outside)
                    meshes.add(outside.spec.mesh)
        for mesh in meshes:  # now, before a value is put there again under the same name
            self._launch.sessions[mesh].drop()

    def _name_on_ranks(self, stored: StoredTensor) -> str:
        return name_on_ranks(self._session([stored]), stored.label)

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
    """Return, for each rank of the mesh, the labels of the values that it holds."""
    labels: list[list[str]] = [[] for _ in range(size)]
    for value in values:
        for rank in value.at:
            labels[rank].append(value.label)
    return labels


def buckets(values: Mapping[K, StoredTensor]) -> Iterator[dict[K, StoredTensor]]:
    """Yield groups of values of at most BUCKET_BYTES; a larger value is a group by itself."""
    bucket: dict[K, StoredTensor] = {}
    nbytes = 0
    for key, value in values.items():
        if bucket and nbytes + value.spec.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = {}, 0
        bucket[key] = value
        nbytes += value.spec.nbytes
    if bucket:
        yield bucket


def with_mesh_ranks(cluster: Cluster, program: Program) -> Program:
    """Return a program between meshes of a launch whose errors name each rank by its mesh."""
    known_as = tuple(cluster.known_as.get(rank, "") for rank in range(cluster.size))
    return replace(program, known_as=known_as)


def name_on_ranks(session: MeshRanks, name: str) -> str:
    """Return the name in the ranks' tables of a value that a mesh calls ``name``."""
    cluster = session.cluster
    return cluster.inner(name) if isinstance(cluster, SubCluster) else name


def _shards(
    values: Iterable[tuple[Tensor | Callable[[], Tensor] | None, StoredTensor]],
) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (rank, label, shard) of values on the controller; for None, shards that mean absent."""
    absent_value = absent("cpu")
    for source, stored in values:
        if not stored.at:
            continue
        mesh, spec = stored.spec.mesh, stored.spec
        value = source() if callable(source) else source
        replicated = set(spec.placements) <= {REPLICATE}
        if value is not None and replicated:
            value = value.detach().contiguous()
        for rank in stored.at:
            if value is None:
                yield rank, stored.label, absent_value
            else:
                shard = value if replicated else shard_to_copy(value, spec, mesh.coordinates(rank))
                yield rank, stored.label, shard
