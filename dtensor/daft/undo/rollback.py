"""A worker's snapshots in its own terms: puts, deletes, runs.

    undoing = Rollback(table, Copies())
    undoing.load(7, host_program)
    undoing.begin_run(7, inputs, {}, {}, TableChange(12, committed=11))   # then it runs
    undoing.end_run()                                                # its writes are its state

The program declares the writes of a run: state that a call writes or makes, and `changed` inputs
that are values of the table; the replayable ones of both belong to no change. A run also writes the
outputs that it keeps, and drops values that are not needed any more.

Invariant: the writes of a change that raised belong to the next one that ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.undo.failed_run import COUNTERS
from dtensor.daft.undo.snapshots import Keys, Snapshots, SnapshotStore

Named = Mapping[int, Iterable[str]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A run's input that is the value called ``name`` in the rank's table."""

    name: str


@dataclass(frozen=True, slots=True)
class TableChange:
    """A change of a host's table: its number; `committed`: once it has ended here, no state before
    that one is needed; `taken`: the state after it must be kept."""

    number: int
    committed: int = 0
    taken: bool = True


UNNUMBERED = TableChange(0)


class Rollback:
    def __init__(self, table: dict[tuple[int, str], object], store: SnapshotStore) -> None:
        self.snapshots: Snapshots = Snapshots(table, store)
        self._table = table
        self._outlives = store.outlives
        self._writes: dict[int, _Writes] = {}  # by program
        self._change = UNNUMBERED  # the current one, like the next fields
        self._alone: Keys = ()
        self._dropped: Keys = ()
        self._written: tuple[Keys, Keys] = (), ()

    def load(self, handle: int, program: HostProgram) -> None:
        self._writes[handle] = _Writes.of(program)

    def unload(self, handle: int) -> None:
        del self._writes[handle]

    def begin(self, change: TableChange, *named: Named) -> None:
        """Begin a put or a delete of these."""
        keys = tuple(key for some in named for key in _keys(some))
        self._change, self._written, self._dropped = change, ((), ()), ()
        self._alone += keys
        self.snapshots.begin(keys if self._asked_for(change) else ())

    def begin_run(
        self,
        handle: int,
        inputs: Mapping[int, Mapping[str, object]],
        keep: Mapping[str, str],
        drop: Named,
        change: TableChange,
    ) -> None:
        writes = self._writes[handle]
        if writes.alone:
            self.snapshots.take()  # this run may be undone to it
        self._change, self._dropped = change, _keys(drop) if drop else ()
        state, _ = self._written = writes.keys(inputs)
        if keep or drop:
            self._alone += (*writes.kept(keep), *self._dropped)
        if self._asked_for(change):
            state = (*state, *self._alone, COUNTERS)
        self.snapshots.begin(state)

    def _asked_for(self, change: TableChange) -> bool:
        """Whether the state before a change may be needed once it has ended. It is not in one
        process that has all hosts, where a run is undone while it runs."""
        return self._outlives or change.committed < change.number

    def end(self) -> None:
        """The change has written everything."""
        state, replayed = self._written
        self._end(state, self._alone, replayed)

    def undo(self) -> None:
        """Undo the writes of the current run, but not its drops."""
        self.snapshots.roll_back(self.snapshots.ended)
        for key in self._dropped:
            self._table.pop(key, None)

    def end_undone(self) -> None:
        """End a run whose only writes are that it was undone, and replayable values."""
        self._end((), (*self._alone, COUNTERS), self._written[1])

    def _end(self, state: Keys, alone: Keys, replayed: Keys) -> None:
        change = self._change
        self.snapshots.end(
            change.number,
            written=state,
            alone=alone,
            replayed=replayed,
            committed=change.committed,
            take=change.taken,
        )
        self._alone = ()

    def roll_back(self, to: int) -> int:
        self._alone = ()
        return self.snapshots.roll_back(to)


@dataclass(frozen=True, slots=True)
class _Writes:
    """The writes of a program's runs to the table: `state`, and `replayable` state; of changed
    `inputs`, whether they are replayable: they count if they are values of the table. `outputs`: by
    rank, outputs that may be kept."""

    state: Keys
    replayable: Keys
    inputs: tuple[tuple[int, str, bool], ...]
    outputs: tuple[tuple[int, frozenset[str]], ...]
    alone: bool

    @staticmethod
    def of(program: HostProgram) -> _Writes:
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
        return _Writes(tuple(state[0]), tuple(state[1]), tuple(inputs), outputs, program.alone)

    def keys(self, inputs: Mapping[int, Mapping[str, object]]) -> tuple[Keys, Keys]:
        """The keys that a run with these inputs writes: those of its change, and the replayable
        ones."""
        if not self.inputs:
            return self.state, self.replayable
        stored: tuple[list[tuple[int, str]], ...] = ([], [])
        for rank, name, replayable in self.inputs:
            if isinstance(value := inputs[rank][name], Stored):
                stored[replayable].append((rank, value.name))
        return (*self.state, *stored[0]), (*self.replayable, *stored[1])

    def kept(self, keep: Mapping[str, str]) -> Keys:
        return tuple(
            (rank, name)
            for rank, outputs in self.outputs
            for output, name in keep.items()
            if output in outputs
        )


def _keys(names: Named) -> Keys:
    return tuple((rank, name) for rank, own in names.items() for name in own)
