"""Keep snapshots of a host's table, and roll it back to the state after an earlier change.

    snapshots = Snapshots(table, MemorySnapshots())  # or a SnapshotFile, which outlives the process
    snapshots.begin(((0, "w"),)); table[0, "w"] += 1      # change 7 writes rank 0's w, f32[4]
    snapshots.end(7, written=((0, "w"),), committed=6)    # no state before change 6 is needed
    snapshots.roll_back(6)                       # w has its old contents, bit for bit, in place

A change is a put, a delete or a run. `MemorySnapshots` copies values before they are written and
serves to undo a failed run; `SnapshotFile` copies values after they were written, and also serves
the process that replaces this one. Every state from `committed` on can be restored, except after
changes with `take=False`. A restored value is a new tensor object, in its old memory if possible.
Replayable writes (to caches) are undone only if an ordinary change wrote the value later.
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


_IMMUTABLE_TYPES = (int, float, str, bytes, type(None), Poisoned, UndoneCounts)


@dataclass(slots=True, eq=False)
class SnapshotRecord:
    """Copies of values as they were after change `number`. It is part of a snapshot.

    `gone`: the keys that had no value. `before`: the copies were made before the next write, so
    `number` is the last state with these values; otherwise it is the first. `needed`: the keys that
    some state still needs from this record. `place`: where the store has it.
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
    """Storage for records. `outlives`: another process can read them after this one dies."""

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
        """Store copies of ``tensors`` and the ``others``, which are copies already, as a record of
        change ``number`` (see `SnapshotRecord`). A process that opens the store later finds the
        complete record or none."""

    @abstractmethod
    def drop(self, record: SnapshotRecord) -> None:
        """Free the record's memory, or reuse it for another record."""

    @abstractmethod
    def states(self, oldest: int, newest: int) -> None:
        """Set the range of states that can be restored. Records of other states become invalid.
        Called after new records are stored, and before the memory of old records is reused."""

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        """Return what a dead process left: the oldest and the newest restorable state, and the
        records, oldest first."""
        return 0, 0, []

    @abstractmethod
    def close(self) -> None: ...


class MemorySnapshots(SnapshotStore):
    """Copies in this process, on the values' devices. A record reuses the memory of a dropped
    record with the same keys."""

    outlives = False

    def __init__(self) -> None:
        self._reusable: dict[Keys, dict[Key, torch.Tensor]] = {}

    def keep(
        self,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        *,
        before: bool,
    ) -> SnapshotRecord:
        """Store a record, in the memory of a dropped record with the same keys if there is one."""
        copies = self._reusable.pop(tuple(tensors), None)
        if copies is None or not can_copy(tensors, copies):
            self._reusable.clear()
            contiguous = torch.contiguous_format
            copies = {
                key: torch.empty_like(value, memory_format=contiguous, requires_grad=False)
                for key, value in tensors.items()
            }
        copy_all(copies.values(), tensors.values())
        return SnapshotRecord(number, copies, dict(others), gone, before)

    def drop(self, record: SnapshotRecord) -> None:
        if record.tensors:
            self._reusable[tuple(record.tensors)] = record.tensors

    def states(self, oldest: int, newest: int) -> None:
        pass

    def close(self) -> None:
        self._reusable.clear()


class Snapshots:
    """The snapshots of a host's table. `ended`: the number of the last change that has ended. If a
    dead process left records (`SnapshotStore.found`), `roll_back` also fills the empty table."""

    def __init__(self, table: dict[Key, object], store: SnapshotStore) -> None:
        """Register the records that a dead process left in the store. They are restored by
        `roll_back`."""
        self._table = table
        self._store = store
        self._versions: dict[Key, list[SnapshotRecord]] = {}  # oldest first; needed records only
        self._unsaved: dict[Key, int] = {}  # key of a value in no record -> change that wrote it
        self._separate: set[Key] = set()  # unsaved keys that get separate records
        self._replayable_writes: set[Key] = set()  # since the key's last record
        self._writing: Keys = ()  # keys that the change in progress may write
        # (number, record, keys): once change `number` is committed, no state needs these keys of
        # the record
        self._superseded: deque[tuple[int, SnapshotRecord, Sequence[Key]]] = deque()
        oldest, self.ended, records = store.found()
        numbers = {record.number for record in records if record.number > oldest}
        self._states = deque(sorted({oldest, *numbers, self.ended}))  # restorable, oldest first
        self._table_is_empty = bool(records)  # the records of a dead process are not restored yet
        for record in records:
            self._mark_superseded(record.number, record.keys)
            for key in record.keys:
                self._versions.setdefault(key, []).append(record)
                self._unsaved[key] = self.ended + 1

    @property
    def outlives(self) -> bool:
        return self._store.outlives

    # -- a change ---------------------------------------------------------------------------------

    def begin(self, keys: Keys) -> None:
        """Begin a change that may write these keys, and make their present values restorable."""
        if not self._store.outlives:
            self._save(keys, self.ended, before=True)
        elif self.ended == self._states[-1]:
            self._save(
                tuple(k for k in keys if k in self._replayable_writes), self.ended, before=True
            )
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
        """End change `number`.

        Args:
            written: keys that it wrote and that share one record.
            alone: keys that it wrote and that get a record each.
            replayed: keys that it wrote by replayable writes, which are not undone.
            committed: no state before this change is needed from now on.
            take: whether the state after this change can be restored.
        """
        alone = tuple(alone)
        now = (*written, *alone)
        if not self._store.outlives:
            self._mark_superseded(number, now)
        self._unsaved.update(dict.fromkeys(now, number))
        self._replayable_writes.difference_update(now)
        self._separate.update(alone)
        self._separate.difference_update(written)
        self._replayable_writes.update(replayed)
        self._writing = ()
        self._discard_states(min(committed, number - 1))  # the next record reuses the memory
        self.ended = number
        if take:
            self.take()
        self._discard_states(committed)

    def take(self) -> None:
        """Make the present state restorable, after a change with `take=False`."""
        number = self.ended
        if number == self._states[-1]:
            return
        if self._store.outlives:
            if together := tuple(key for key in self._unsaved if key not in self._separate):
                self._save(together, number)
            for key in tuple(self._unsaved):
                self._save((key,), number)
        self._states.append(number)
        self._store.states(self._states[0], number)

    def _save(self, keys: Keys, number: int, *, before: bool = False) -> None:
        """Store a record of the present values of ``keys``, as they are after change `number`."""
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
                others[key] = _copy_value(value)
        self._mark_superseded(number, keys)
        if tensors or others or gone:
            record = self._store.keep(number, tensors, others, tuple(gone), before=before)
            for key in record.needed:
                self._versions.setdefault(key, []).append(record)
        for key in keys:
            self._unsaved.pop(key, None)
        self._separate.difference_update(keys)
        self._replayable_writes.difference_update(keys)

    def _mark_superseded(self, number: int, keys: Sequence[Key]) -> None:
        """Record that change `number` makes the last records of these keys outdated."""
        keys_by_record: dict[SnapshotRecord, list[Key]] = {}
        for key in keys:
            if key in self._versions:
                keys_by_record.setdefault(self._versions[key][-1], []).append(key)
        self._superseded.extend(
            (number, record, superseded) for record, superseded in keys_by_record.items()
        )

    def _discard_states(self, committed: int) -> None:
        """Discard the states before change ``committed``, and the records that only they need."""
        if len(self._states) > 1 and self._states[1] <= committed:
            while len(self._states) > 1 and self._states[1] <= committed:
                self._states.popleft()
            self._store.states(self._states[0], self._states[-1])
        while self._superseded and self._superseded[0][0] <= self._states[0]:
            _, record, keys = self._superseded.popleft()
            self._discard_keys(record, keys)

    def _discard_keys(self, record: SnapshotRecord, keys: Sequence[Key]) -> None:
        """Record that no state needs these keys of a record. Remove the record if it was the last
        need."""
        was_needed = bool(record.needed)
        record.needed.difference_update(keys)
        if was_needed and not record.needed:
            self._remove(record)

    def _remove(self, record: SnapshotRecord) -> None:
        """Drop a record that no state needs from the store."""
        self._store.drop(record)
        for key in record.keys:
            remaining = self._versions[key]
            remaining.remove(record)
            if not remaining:
                del self._versions[key]
            elif (
                key in remaining[0].gone and not remaining[0].before
            ):  # no state has the value any more
                self._discard_keys(remaining[0], (key,))

    # -- undoing ----------------------------------------------------------------------------------

    def roll_back(self, to: int) -> int:
        """Restore the last restorable state up to change ``to`` and return its number. This undoes
        later changes and the change in progress. Raises ValueError if there is no such state."""
        target = max((state for state in self._states if state <= to), default=None)
        if target is None:
            raise ValueError(
                f"No state of change {to} or before is kept: the oldest is that after change "
                f"{self._states[0]}."
            )
        if target == self.ended and not self._writing and not self._table_is_empty:
            return target
        changed_keys = {key for key, number in self._unsaved.items() if number > target}
        changed_keys.update(self._writing)
        changed_keys.update(
            key for key, versions in self._versions.items() if versions[-1].number > target
        )
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        replayed: set[Key] = set()
        for key in sorted(changed_keys):
            record = self._record_at(target, key)
            if record is not None and record.number > target:
                replayed.add(key)
            if record is None or key in record.gone:
                self._table.pop(key, None)
            elif key in record.others:
                self._table[key] = _copy_value(record.others[key])
            else:
                saved, current = record.tensors[key], self._table.get(key)
                if isinstance(current, torch.Tensor) and _fits_in_place(current, saved):
                    pairs.append((current, saved))
                    self._table[key] = current.detach()
                else:
                    self._table[key] = saved.clone()
        copy_all([current for current, _ in pairs], [saved for _, saved in pairs])
        self._store.states(self._states[0], target)
        self._superseded = deque(entry for entry in self._superseded if entry[0] <= target)
        later_records = {
            r for versions in self._versions.values() for r in versions if r.number > target
        }
        for record in later_records:
            self._discard_keys(record, record.keys)  # may remove another one of `later` too
        for key in changed_keys:
            self._unsaved.pop(key, None)
        self._separate -= changed_keys
        self._replayable_writes = (self._replayable_writes - changed_keys) | replayed
        self._writing, self._table_is_empty = (), False
        self.ended = target
        self._states = deque(state for state in self._states if state <= target)
        return target

    def _record_at(self, state: int, key: Key) -> SnapshotRecord | None:
        """Return the record of the key's value in that state; None if it had no value."""
        versions = self._versions.get(key, ())
        later = next((r for r in versions if r.number >= state), None)
        if later is not None and (later.before or later.number == state):
            return later
        return next((r for r in reversed(versions) if r.number <= state), None)

    def close(self) -> None:
        self._versions.clear()
        self._store.close()


def can_copy(
    tensors: Mapping[Key, torch.Tensor], others: Mapping[Key, torch.Tensor], *, device: bool = True
) -> bool:
    """Return whether each tensor can be copied to the other tensor with its key without a
    conversion."""
    return all(
        value.shape == (other := others[key]).shape
        and value.dtype == other.dtype
        and (value.device == other.device or not device)
        for key, value in tensors.items()
    )


def copy_all(to: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Copy the values to the tensors ``to``, pair by pair, with one foreach call."""
    if targets := list(to):
        with torch.no_grad():
            foreach_copy_(targets, list(values))


def _fits_in_place(current: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether the saved contents can be copied into the current tensor's memory."""
    same = current.shape == saved.shape and current.dtype == saved.dtype
    return same and current.is_contiguous() and not current.is_inference()


def _copy_value(value: object) -> object:
    return value if isinstance(value, _IMMUTABLE_TYPES) else copy.deepcopy(value)
