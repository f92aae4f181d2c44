"""Snapshots of a host's table after its last changes, to roll it back to any of them.

    snapshots = Snapshots(table, MemorySnapshots())  # or a SnapshotFile, which outlives the process
    snapshots.begin(((0, "w"),))                 # change 7 may write rank 0's w, f32[4]
    table[0, "w"] += 1
    snapshots.end(7, written=((0, "w"),), committed=6)    # no state before 6 will be needed
    snapshots.roll_back(6)                       # w has its old contents, bit for bit, in place

A change is a put, a delete or a run; changes have rising numbers, of which a host has some. A
*record* is a copy of some values, with the number of the change after which they were so; it marks
deleted values as gone. There are two kinds of store, by the place of the copies:

- *Memory of this process* serves to undo a change that failed here. Values are copied before they
  are written: a step costs one copy, and values that are never written cost none.
- *A file* also serves a process that replaces this one. Values are copied after the change that
  wrote them: all values that a run wrote are one record, which reuses the memory of the record
  before the last one. So there are two copies of the values that a step writes, one of them always
  whole.

Invariants: each state from `committed` on can be restored (without changes that had `take=False`),
and older copies are freed or overwritten. A restored value keeps its memory where it can, and is
another tensor: an optimizer, which knows tensors by identity, sees that it was put. A value that is
no tensor is copied as its class does it (`copy.deepcopy`), unless it cannot change.

Replayable writes, such as those to caches, belong to no state: `roll_back` leaves such a value as
it is, unless another change wrote it since; then it gets its contents before that change.

Not here: numbers, and which changes are committed (`cluster/recovery_line.py`); the file
(`snapshot_file.py`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from dtensor.daft.undo.failed_run import Poisoned, UndoneCounts
from dtensor.private_torch import foreach_copy_

Key: TypeAlias = tuple[int, str]
"""A rank and a name of its table."""
Keys: TypeAlias = tuple[Key, ...]


_UNCHANGING = (int, float, str, bytes, type(None), Poisoned, UndoneCounts)


@dataclass(slots=True, eq=False)
class SnapshotRecord:
    """Values after change `number`: copies of tensors, other values, and the names of those that
    did not exist. It belongs to the first state with these values, or (`before`) to the last.
    `needed`: the keys that a state still needs from it. `place`: its identity in the store.
    """

    number: int
    tensors: dict[Key, torch.Tensor]
    others: dict[Key, object]
    gone: Keys
    before: bool
    place: object = None
    needed: set[Key] = field(init=False)

    def __post_init__(self) -> None:
        self.needed = {*self.tensors, *self.others, *self.gone}

    @property
    def keys(self) -> Keys:
        return (*self.tensors, *self.others, *self.gone)


class SnapshotStore(ABC):
    """The place of copies. `outlives`: whether another process can read them once this one is
    dead."""

    outlives: bool

    @abstractmethod
    def keep(
        self,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        *,
        before: bool,
    ) -> SnapshotRecord:
        """A record with copies of tensors; it is whole, or absent, for a later process. ``others``
        are copies that do not change."""

    @abstractmethod
    def drop(self, record: SnapshotRecord) -> None:
        """Its memory may be reused, or freed."""

    @abstractmethod
    def states(self, oldest: int, newest: int) -> None:
        """The states that can be restored: records for others are not valid any more. Called before
        their memory is reused, and after new records are kept."""

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        """The rest of a dead process: the oldest and the newest state, and the records, oldest
        first."""
        return 0, 0, []

    @abstractmethod
    def close(self) -> None: ...


class MemorySnapshots(SnapshotStore):
    """Copies in this process, on the values' devices. The next record of the same keys reuses the
    memory of a dropped one."""

    outlives = False

    def __init__(self) -> None:
        self._spare: dict[Keys, dict[Key, torch.Tensor]] = {}

    def keep(
        self,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        *,
        before: bool,
    ) -> SnapshotRecord:
        held = self._spare.pop(tuple(tensors), None)
        if held is None or not alike(tensors, held):
            self._spare.clear()
            contiguous = torch.contiguous_format
            held = {
                key: torch.empty_like(value, memory_format=contiguous, requires_grad=False)
                for key, value in tensors.items()
            }
        copy_all(held.values(), tensors.values())
        return SnapshotRecord(number, held, dict(others), gone, before)

    def drop(self, record: SnapshotRecord) -> None:
        if record.tensors:
            self._spare[tuple(record.tensors)] = record.tensors

    def states(self, oldest: int, newest: int) -> None:
        pass

    def close(self) -> None:
        self._spare.clear()


class Snapshots:
    """The snapshots of a host's table; only `roll_back` changes the table. `ended`: the last change
    that has ended.

    Where a dead process has left records (`SnapshotStore.found`), `roll_back` fills the table.
    """

    def __init__(self, table: dict[Key, object], store: SnapshotStore) -> None:
        self._table = table
        self._store = store
        self._versions: dict[Key, list[SnapshotRecord]] = {}  # oldest first; needed records only
        self._unsaved: dict[Key, int] = {}  # values in no record: the change that wrote each
        self._alone: set[Key] = set()  # those of them that get a record of their own
        self._replayed: set[Key] = set()  # written by replayable writes since its last record
        self._writing: Keys = ()  # by the running change
        # (number, record, keys): once this number is committed, no state needs these keys of the
        # record
        self._superseded: deque[tuple[int, SnapshotRecord, Sequence[Key]]] = deque()
        oldest, self.ended, records = store.found()
        numbers = {record.number for record in records if record.number > oldest}
        self._states = deque(sorted({oldest, *numbers, self.ended}))  # that can be restored
        self._unfilled = bool(records)  # the table does not have their values yet
        for record in records:
            self._supersede(record.number, record.keys)
            for key in record.keys:
                self._versions.setdefault(key, []).append(record)
                self._unsaved[key] = self.ended + 1

    @property
    def outlives(self) -> bool:
        return self._store.outlives

    # -- a change ---------------------------------------------------------------------------------

    def begin(self, keys: Keys) -> None:
        """The next change begins, and may write these: `roll_back` restores their present
        values."""
        if not self._store.outlives:
            self._keep(keys, self.ended, before=True)
        elif self.ended == self._states[-1]:
            self._keep(tuple(k for k in keys if k in self._replayed), self.ended, before=True)
        self._writing = keys

    def end(
        self,
        number: int,
        *,
        written: Keys = (),
        alone: Iterable[Key] = (),
        replayed: Keys = (),
        committed: int = 0,
        take: bool = True,
    ) -> None:
        """Change `number` has ended here. It has written `written` together, each of `alone` by
        itself, and `replayed`, which belong to no state.

        ``committed``: from now on no state before that change is needed. ``take``: the state after
        this change can be restored; else it merges with the next change.
        """
        alone = tuple(alone)
        now = (*written, *alone)
        if not self._store.outlives:
            self._supersede(number, now)
        self._unsaved.update(dict.fromkeys(now, number))
        self._replayed.difference_update(now)
        self._alone.update(alone)
        self._alone.difference_update(written)
        self._replayed.update(replayed)
        self._writing = ()
        self._free(min(committed, number - 1))  # its memory serves the record to come
        self.ended = number
        if take:
            self.take()
        self._free(committed)

    def take(self) -> None:
        """Make the present state restorable, after a change with `take=False`."""
        number = self.ended
        if number == self._states[-1]:
            return
        if self._store.outlives:
            if together := tuple(key for key in self._unsaved if key not in self._alone):
                self._keep(together, number)
            for key in tuple(self._unsaved):
                self._keep((key,), number)
        self._states.append(number)
        self._store.states(self._states[0], number)

    def _keep(self, keys: Keys, number: int, *, before: bool = False) -> None:
        """Keep a record of the present values, after change `number`."""
        tensors: dict[Key, torch.Tensor] = {}
        others: dict[Key, object] = {}
        gone: list[Key] = []
        for key in keys:
            if key not in self._table:
                if key in self._versions or not self._store.outlives:
                    gone.append(key)
            elif isinstance(value := self._table[key], torch.Tensor):
                tensors[key] = value
            else:
                others[key] = _copied(value)
        self._supersede(number, keys)
        if tensors or others or gone:
            record = self._store.keep(number, tensors, others, tuple(gone), before=before)
            for key in record.needed:
                self._versions.setdefault(key, []).append(record)
        for key in keys:
            self._unsaved.pop(key, None)
        self._alone.difference_update(keys)
        self._replayed.difference_update(keys)

    def _supersede(self, number: int, keys: Sequence[Key]) -> None:
        """The last records of these are outdated after change `number`."""
        keys_by_record: dict[SnapshotRecord, list[Key]] = {}
        for key in keys:
            if key in self._versions:
                keys_by_record.setdefault(self._versions[key][-1], []).append(key)
        self._superseded.extend(
            (number, record, superseded) for record, superseded in keys_by_record.items()
        )

    def _free(self, committed: int) -> None:
        if len(self._states) > 1 and self._states[1] <= committed:
            while len(self._states) > 1 and self._states[1] <= committed:
                self._states.popleft()
            self._store.states(self._states[0], self._states[-1])
        while self._superseded and self._superseded[0][0] <= self._states[0]:
            _, record, keys = self._superseded.popleft()
            self._unneeded(record, keys)

    def _unneeded(self, record: SnapshotRecord, keys: Sequence[Key]) -> None:
        had = bool(record.needed)
        record.needed.difference_update(keys)
        if had and not record.needed:
            self._remove(record)

    def _remove(self, record: SnapshotRecord) -> None:
        self._store.drop(record)
        for key in record.keys:
            left = self._versions[key]
            left.remove(record)
            if not left:
                del self._versions[key]
            elif key in left[0].gone and not left[0].before:  # as if it had never existed
                self._unneeded(left[0], (key,))

    # -- undoing ----------------------------------------------------------------------------------

    def roll_back(self, to: int) -> int:
        """Restore the table right after the last change with a number <= ``to`` that was taken;
        returns its number. It undoes the running change and all later ones."""
        target = max((state for state in self._states if state <= to), default=None)
        if target is None:
            raise ValueError(
                f"No state of change {to} or before is kept: the oldest is that after change "
                f"{self._states[0]}."
            )
        if target == self.ended and not self._writing and not self._unfilled:
            return target
        since = {key for key, number in self._unsaved.items() if number > target}
        since.update(self._writing)
        since.update(
            key for key, versions in self._versions.items() if versions[-1].number > target
        )
        there: list[tuple[torch.Tensor, torch.Tensor]] = []
        replayed: set[Key] = set()
        for key in sorted(since):
            record = self._as_of(target, key)
            if record is not None and record.number > target:
                replayed.add(key)
            if record is None or key in record.gone:
                self._table.pop(key, None)
            elif key in record.others:
                self._table[key] = _copied(record.others[key])
            else:
                saved, now = record.tensors[key], self._table.get(key)
                if isinstance(now, torch.Tensor) and _takes(now, saved):
                    there.append((now, saved))
                    self._table[key] = now.detach()
                else:
                    self._table[key] = saved.clone()
        copy_all([now for now, _ in there], [saved for _, saved in there])
        self._store.states(self._states[0], target)
        self._superseded = deque(each for each in self._superseded if each[0] <= target)
        later = {r for versions in self._versions.values() for r in versions if r.number > target}
        for record in later:
            self._unneeded(record, record.keys)  # which may free another of them
        for key in since:
            self._unsaved.pop(key, None)
        self._alone -= since
        self._replayed = (self._replayed - since) | replayed
        self._writing, self._unfilled = (), False
        self.ended = target
        self._states = deque(state for state in self._states if state <= target)
        return target

    def _as_of(self, state: int, key: Key) -> SnapshotRecord | None:
        """The record with this value in that state; None if it did not exist."""
        versions = self._versions.get(key, ())
        later = next((r for r in versions if r.number >= state), None)
        if later is not None and (later.before or later.number == state):
            return later
        return next((r for r in reversed(versions) if r.number <= state), None)

    def close(self) -> None:
        self._versions.clear()
        self._store.close()


def alike(
    some: Mapping[Key, torch.Tensor], others: Mapping[Key, torch.Tensor], *, device: bool = True
) -> bool:
    """Whether each can be copied to the tensor of its key without a conversion."""
    return all(
        value.shape == (other := others[key]).shape
        and value.dtype == other.dtype
        and (value.device == other.device or not device)
        for key, value in some.items()
    )


def copy_all(to: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Many small values at the cost of one."""
    if there := list(to):
        with torch.no_grad():
            foreach_copy_(there, list(values))


def _takes(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a value in place can take the saved contents."""
    same = now.shape == saved.shape and now.dtype == saved.dtype
    return same and now.is_contiguous() and not now.is_inference()


def _copied(value: object) -> object:
    return value if isinstance(value, _UNCHANGING) else copy.deepcopy(value)
