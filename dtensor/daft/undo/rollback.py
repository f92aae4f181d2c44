"""Take snapshots around the puts, deletes and runs of a worker, so that they can be undone.

    rollback = Rollback(table, MemorySnapshots())
    rollback.load(7, host_program)
    rollback.begin_run(7, inputs, {}, {}, TableChange(12, committed=11))
    ...                                      # run the program
    rollback.end()                           # or rollback.undo()

The writes of a run are known from its program: state that a call writes, `changed` inputs that are
values of the table, outputs that are kept, and dropped values. Replayable writes are not undone.
If a change raises, its writes count as writes of the next change that ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.undo.failed_run import COUNTERS
from dtensor.daft.undo.snapshots import Keys, Snapshots, SnapshotStore

NamesByRank = Mapping[int, Iterable[str]]


@dataclass(frozen=True, slots=True)
class Stored:
    """An input of a run: the value ``name`` in the rank's table."""

    name: str


@dataclass(frozen=True, slots=True)
class TableChange:
    """A put, delete or run, which changes a host's table.

    `committed`: after this change, no state before the change with that number is needed.
    `taken`: whether the state after this change must be restorable.
    """

    number: int
    committed: int = 0
    taken: bool = True


UNNUMBERED = TableChange(0)


class Rollback:
    """The snapshots of a worker's table, and the writes of the change in progress."""

    def __init__(self, table: dict[tuple[int, str], object], store: SnapshotStore) -> None:
        self.snapshots: Snapshots = Snapshots(table, store)
        self._table = table
        self._outlives = store.outlives
        self._writes: dict[int, _ProgramWrites] = {}  # by program
        # The change in progress: its number, the keys that puts and deletes changed, the keys that
        # its run drops, and the keys that its run writes before and after the commit point.
        self._change = UNNUMBERED
        self._separate: Keys = ()
        self._run_drops: Keys = ()
        self._run_writes: tuple[Keys, Keys] = (), ()

    def load(self, handle: int, program: HostProgram) -> None:
        self._writes[handle] = _ProgramWrites.of(program)

    def unload(self, handle: int) -> None:
        del self._writes[handle]

    def begin(self, change: TableChange, *named: NamesByRank) -> None:
        """Begin a put or a delete of the named values."""
        keys = tuple(key for names in named for key in _keys_of(names))
        self._change, self._run_writes, self._run_drops = change, ((), ()), ()
        self._separate += keys
        self.snapshots.begin(keys if self._saves_previous(change) else ())

    def begin_run(
        self,
        handle: int,
        inputs: Mapping[int, Mapping[str, object]],
        keep: Mapping[str, str],
        drop: NamesByRank,
        change: TableChange,
    ) -> None:
        """Begin a run of a program; ``handle``, ``keep`` and ``drop`` as in `HostRun`."""
        writes = self._writes[handle]
        if writes.alone:
            self.snapshots.take()  # the state to which this run is undone
        self._change, self._run_drops = change, _keys_of(drop) if drop else ()
        state, _ = self._run_writes = writes.keys(inputs)
        if keep or drop:
            self._separate += (*writes.kept_outputs(keep), *self._run_drops)
        if self._saves_previous(change):
            state = (*state, *self._separate, COUNTERS)
        self.snapshots.begin(state)

    def _saves_previous(self, change: TableChange) -> bool:
        """Return whether the state before a change may be needed after the change has ended. It is
        not needed if this process has all hosts, since a failed run is then undone at once."""
        return self._outlives or change.committed < change.number

    def end(self) -> None:
        """End the current change, after its last write."""
        state, replayed = self._run_writes
        self._end(state, self._separate, replayed)

    def undo(self) -> None:
        """Undo the writes of the current run. Values that it drops stay dropped."""
        self.snapshots.roll_back(self.snapshots.ended)
        for key in self._run_drops:
            self._table.pop(key, None)

    def end_undone(self) -> None:
        """End a run that was undone: it has written only its counts and replayable values."""
        self._end((), (*self._separate, COUNTERS), self._run_writes[1])

    def _end(self, state: Keys, alone: Keys, replayed: Keys) -> None:
        """End the current change. Keys of ``state`` share one record, keys of ``alone`` get one
        each; ``replayed``: keys with replayable writes, which are not undone."""
        change = self._change
        self.snapshots.end(
            change.number,
            written=state,
            alone=alone,
            replayed=replayed,
            committed=change.committed,
            take=change.taken,
        )
        self._separate = ()

    def roll_back(self, to: int) -> int:
        """Restore the last restorable state up to change ``to``, and return that change's
        number."""
        self._separate = ()
        return self.snapshots.roll_back(to)


@dataclass(frozen=True, slots=True)
class _ProgramWrites:
    """The keys of the table that runs of a program write.

    `state` and `replayable`: state of the program. `inputs`: (rank, name, is replayable) of changed
    inputs, which are writes only if the run passes a value of the table. `outputs`: the outputs of
    each rank, which a run may keep. `alone`: see `HostProgram`.
    """

    state: Keys
    replayable: Keys
    inputs: tuple[tuple[int, str, bool], ...]
    outputs: tuple[tuple[int, frozenset[str]], ...]
    alone: bool

    @staticmethod
    def of(program: HostProgram) -> _ProgramWrites:
        """Return the keys that runs of ``program`` write. ``state[0]`` is the ordinary state,
        ``state[1]`` the replayable state."""
        state: tuple[dict[tuple[int, str], None], ...] = ({}, {})
        inputs: list[tuple[int, str, bool]] = []
        for rank, rank_program in program.ranks.items():
            written = {name for i in rank_program.instructions for name in (*i.outputs, *i.writes)}
            for name in rank_program.state:
                if name in written:
                    state[name in rank_program.replayable][rank, name] = None
            inputs += [
                (rank, name, name in rank_program.replayable) for name in rank_program.changed
            ]
        outputs = tuple(
            (rank, frozenset(rank_program.outputs)) for rank, rank_program in program.ranks.items()
        )
        return _ProgramWrites(
            tuple(state[0]), tuple(state[1]), tuple(inputs), outputs, program.alone
        )

    def keys(self, inputs: Mapping[int, Mapping[str, object]]) -> tuple[Keys, Keys]:
        """Return the keys that a run with these inputs writes: (ordinary keys, replayable keys)."""
        if not self.inputs:
            return self.state, self.replayable
        stored: tuple[list[tuple[int, str]], ...] = ([], [])
        for rank, name, replayable in self.inputs:
            if isinstance(value := inputs[rank][name], Stored):
                stored[replayable].append((rank, value.name))
        return (*self.state, *stored[0]), (*self.replayable, *stored[1])

    def kept_outputs(self, keep: Mapping[str, str]) -> Keys:
        """Return the keys under which a run with this ``keep`` stores outputs."""
        return tuple(
            (rank, name)
            for rank, outputs in self.outputs
            for output, name in keep.items()
            if output in outputs
        )


def _keys_of(names: NamesByRank) -> Keys:
    return tuple((rank, name) for rank, names_of_rank in names.items() for name in names_of_rank)
