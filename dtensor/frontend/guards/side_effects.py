"""What a call changes besides tensors: attributes, items, globals, generators of random numbers.

    before = StateBefore(walk(roots))
    model(x)                               # self.calls += 1; random.random()
    before.changes(); before.moved()       # [Change(calls: 0 -> 1)]; ["Python's random"]

A captured step runs the user's Python once, so what that changes is a cache that stays as it is, or
would be lost (capture.py tells them apart by a second capture). Tensors in a module's parameters
and buffers are not looked at here.

Invariants: `undo` puts back what `changes` names but for lists of more than 10,000 items and arrays
of another shape, and `put_back` generators of random numbers; what another thread has written or
drawn stays (program_writes.py). Not seen: what the walk does not reach, as the insides of a library
that is no model; writes to arrays where there are more than 256 MB of them, to the largest.
"""

from __future__ import annotations

import array
import dis
import io
import mmap
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import length_hint
from types import CellType, CodeType, GeneratorType, GetSetDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from dtensor.frontend.call_lock import PerThread
from dtensor.frontend.guards.executed_code import ExecutedCode
from dtensor.frontend.guards.program_writes import ProgramWrites, is_alone
from dtensor.frontend.guards.raw_access import PLAIN, is_iterator
from dtensor.frontend.guards.reached_state import ReachedState
from dtensor.frontend.guards.walk import MAX_ITEMS
from dtensor.frontend.source import Source, line_of

_RNN_WEIGHTS = ("_flat_weights", "_flat_weight_refs")  # an LSTM's parameters a second time
_ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "not there"})()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An entry of a container, or a whole list or set (``key`` is None), before and after."""

    path: str
    holder: Any
    key: Any
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"

    @property
    def has_tensors(self) -> bool:
        return _has_tensor(self.after, 4)

    def undo(self) -> None:
        self._put(self.before, self.after)

    def redo(self) -> None:
        self._put(self.after, self.before)

    def _put(self, value: Any, left: Any) -> None:
        """Unless it is no longer as it was left: another thread has written since."""
        if self.holder is None or not _is_as(_now(self.holder, self.key), left):
            return
        match self.holder:
            case CellType():
                self.holder.cell_contents = value
            case dict() if value is _ABSENT:
                self.holder.pop(self.key, None)
            case dict():
                self.holder[self.key] = value
            case list():
                self.holder[:] = value
            case deque() | set():
                self.holder.clear()
                (self.holder.extend if isinstance(self.holder, deque) else self.holder.update)(
                    value
                )
            case type() if value is _ABSENT:
                delattr(self.holder, self.key)
            case type():
                setattr(self.holder, self.key, value)
            case io.StringIO() | io.BytesIO():
                text, position = value.state
                self.holder.seek(0)
                self.holder.truncate()
                self.holder.write(text)
                self.holder.seek(position)
            case np.ndarray() if self.holder.shape == value.state.shape:
                self.holder[...] = value.state
            case np.ndarray():
                pass
            case memoryview():
                self.holder.cast("B")[:] = value.state
            case bytearray() | array.array() | mmap.mmap():
                self.holder[:] = value.state
            case _:
                raise AssertionError(f"nothing is changed in a {type(self.holder).__name__}")


class StateBefore:
    """What `walk` found, as it was."""

    def __init__(self, reached: ReachedState) -> None:
        self.alone: bool = is_alone()
        weights = {
            id(held) for module in reached.modules for held in (module._parameters, module._buffers)
        }
        self._copies = [
            (path, holder, _copy(holder))
            for path, holder in reached.sized
            if id(holder) not in weights and not path.endswith(_RNN_WEIGHTS)
        ]
        self._copies += [(path, held, _copy(held)) for path, held in _compared(reached.arrays)]
        whole = {id(holder) for _, holder, _ in self._copies} | weights
        self._entries = [
            (path, holder, key, value)
            for key, e in reached.entries.items()
            for holder, value, path in zip(e.holders, e.values, e.paths, strict=True)
            if id(holder) not in whole and isinstance(holder, dict)
        ]
        self._cells = [(path, cell, _content(cell)) for path, cell in reached.cells]
        self._generators = [*_GENERATORS.items(), *reached.generators]
        self._states = [_state(generator) for _, generator in self._generators]
        self._caches = [(cached, cached.cache_info().currsize) for _, cached in reached.caches]

    def changes(self) -> list[Change]:
        made: list[Change] = []
        for path, holder, copy in self._copies:
            made += _changes_in(path, holder, copy)
        for path, holder, key, value in self._entries:
            now = dict.get(holder, key, _ABSENT)  # a subclass may have a `get` of its own
            if not _same(now, value):
                made.append(Change(path=path, holder=holder, key=key, before=value, after=now))
        for path, cell, value in self._cells:
            now = _content(cell)
            if not _same(now, value):
                made.append(Change(path=path, holder=cell, key=None, before=value, after=now))
        return made

    def moved(self, wrote: ProgramWrites) -> list[str]:
        """The generators of random numbers and the iterators that the program took values from."""
        return [path for path, _, _ in self._moved(wrote)]

    def put_back(self, wrote: ProgramWrites) -> None:
        """Generators of random numbers that the program took from, as they were."""
        for _, generator, state in self._moved(wrote):
            _restore(generator, state)

    def _moved(self, wrote: ProgramWrites) -> list[tuple[str, Any, Any]]:
        pairs = zip(self._generators, self._states, strict=True)
        return [
            (path, generator, state)
            for (path, generator), state in pairs
            if (wrote.names(path) if state is _UNKNOWN else _state(generator) != state)
            and wrote.drew(path, generator)
        ]

    def forget_cached(self, wrote: ProgramWrites) -> None:
        """Empties the caches of functions that grew: what they hold is of this capture."""
        for cached, size in self._caches:
            code = getattr(cached.__wrapped__, "__code__", None)
            if cached.cache_info().currsize != size and (code is None or wrote.ran(code)):
                cached.cache_clear()


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.undo()


def redo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.redo()


def line_of_change(change: Change, ran: ExecutedCode | None) -> Source | None:
    """The line that assigns it: the first assignment to such a name in what ran."""
    name = change.path.rpartition(".")[2].partition("[")[0].partition(" (")[0]
    stores = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"}
    reads = {"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_METHOD"}
    codes = [] if ran is None else [c for c in ran.codes.values() if c.co_filename[0] != "<"]
    for wanted in (stores, reads):  # a list that is appended to is read
        for code in codes:
            for line in _lines(code, wanted, name):
                return line_of(code.co_filename, line, code.co_name)
    return None


def _lines(code: CodeType, opnames: set[str], name: str) -> Iterable[int]:
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        said = instruction.opname in opnames and instruction.argval == name
        if said and positions is not None and positions.lineno is not None:
            yield positions.lineno


# -- containers ------------------------------------------------------------------------------------


MAX_COMPARED = 2**28
"""Bytes of the arrays that are compared, altogether."""


def _compared(arrays: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays that are compared, the smallest first."""
    size = 0
    for path, held in sorted(arrays, key=lambda found: _bytes_of(found[1])):
        size += _bytes_of(held)
        if size > MAX_COMPARED:
            return
        if not getattr(held, "closed", False):
            yield path, held


def _bytes_of(held: Any) -> int:
    match held:
        case np.ndarray():
            return held.nbytes
        case io.StringIO() | io.BytesIO():
            return 0
        case _:
            return 0 if getattr(held, "closed", False) else memoryview(held).nbytes


def _copy(holder: Any) -> Any:
    match holder:
        case io.StringIO() | io.BytesIO():
            return _Bits((holder.getvalue(), holder.tell()))
        case np.ndarray():
            return _Bits(np.array(holder))
        case array.array():
            return _Bits(holder[:])
        case bytearray() | memoryview() | mmap.mmap():
            return _Bits(bytes(holder))
        case _:
            pass
    if len(holder) > MAX_ITEMS:
        return len(holder)
    if isinstance(holder, Mapping):
        return dict(holder)
    return list(holder) if isinstance(holder, (list, deque)) else set(holder)


def _changes_in(path: str, holder: Any, copy: Any) -> list[Change]:
    if isinstance(copy, dict):
        stem = path.removesuffix("*").partition(": ")[0].removeprefix(".")  # of the root
        owner = holder if isinstance(holder, dict) else _owner_of(holder)
        there = dict(holder)
        return [
            Change(
                path=f"{stem}{key}" if path.endswith("*") else f"{stem}[{key!r}]",
                holder=owner,
                key=key,
                before=copy.get(key, _ABSENT),
                after=there.get(key, _ABSENT),
            )
            for key in {**copy, **there}
            if not _same(copy.get(key, _ABSENT), there.get(key, _ABSENT))
            and not (isinstance(key, str) and (key.startswith("__") or key in _RNN_WEIGHTS))
        ]
    now = _copy(holder)
    if isinstance(copy, _Bits):
        if now == copy:
            return []
        return [Change(path=path, holder=holder, key=None, before=copy, after=now)]
    if isinstance(copy, int) or isinstance(now, int):  # too long to be copied
        before = copy if isinstance(copy, int) else len(copy)
        if before == len(holder):
            return []
        return [Change(path=path, holder=None, key=None, before=before, after=len(holder))]
    same = len(now) == len(copy) and (
        all(_same(a, b) for a, b in zip(now, copy, strict=True))
        if isinstance(copy, list)
        else now == copy
    )
    return [] if same else [Change(path=path, holder=holder, key=None, before=copy, after=now)]


def _owner_of(space: Any) -> type:
    """The class whose attributes a read-only view shows."""
    shown = space.get("__dict__")
    return shown.__objclass__ if isinstance(shown, GetSetDescriptorType) else type(None)


def _now(holder: Any, key: Any) -> Any:
    match holder:
        case CellType():
            return _content(holder)
        case dict():
            return dict.get(holder, key, _ABSENT)
        case type():
            return vars(holder).get(key, _ABSENT)
        case _:
            return _copy(holder)


def _is_as(now: Any, left: Any) -> bool:
    if type(now) is not type(left) or not isinstance(now, list | set):
        return _same(left, now)
    if isinstance(now, set):
        return now == left
    return len(now) == len(left) and all(map(_same, left, now))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _same(a: Any, b: Any) -> bool:
    if a is b or (isinstance(b, PerThread) and b.plain is a):
        return True
    if isinstance(a, _Bits):
        return a == b
    return isinstance(a, PLAIN) and type(a) is type(b) and repr(a) == repr(b)


def _has_tensor(value: Any, depth: int) -> bool:
    match value:
        case torch.Tensor():
            return True
        case nn.Module() | type():
            return False
        case Mapping() if depth:
            return any(_has_tensor(v, depth - 1) for v in value.values())
        case list() | tuple() | set() | deque() if depth:
            return any(_has_tensor(v, depth - 1) for v in value)
        case _:
            parts = getattr(value, "__dict__", {}) if depth else {}
            return any(_has_tensor(v, depth - 1) for v in parts.values())


def _shown(value: Any) -> str:
    if _has_tensor(value, 4):
        return f"{type(value).__name__} with tensors"
    text = repr(value.state if isinstance(value, _Bits) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- random numbers --------------------------------------------------------------------------------

_UNKNOWN = object()
_CALLS = type(iter(int, 1))
_GENERATORS: dict[str, Any] = {
    "Python's random": random,
    "numpy.random": np.random,
    "torch's generator": torch.default_generator,
}


def _state(generator: Any) -> object:
    """What tells that values were taken from it; of random numbers what `_restore` takes, too."""
    match generator:
        case torch.Generator():
            return _Bits(generator.get_state())
        case np.random.Generator():
            return _Bits(generator.bit_generator.state)
        case random.Random():
            return generator.getstate()
        case np.random.RandomState():
            return _Bits(generator.get_state())
        case GeneratorType():
            frame = generator.gi_frame
            source = generator.gi_yieldfrom
            held = {**frame.f_locals, "yield from": source} if frame else {}
            states = [_size(value) for value in held.values()]
            states += [_state(source)] if isinstance(source, GeneratorType) else []
            if any(state is _UNKNOWN for state in states):
                return _UNKNOWN
            return frame and (frame.f_lasti, [(k, id(v)) for k, v in held.items()], states)
        case _ if generator is random:
            return random.getstate()
        case _ if generator is np.random:
            return _Bits(np.random.get_state())
        case _:
            return _position(generator)


def _size(value: Any) -> object:
    """Return what tells that a generator, whose variable it is, took items from it."""
    if isinstance(value, GeneratorType) or not is_iterator(value):
        return len(value) if isinstance(value, (list, dict, set, deque)) else None
    return _position(value)


def _position(iterator: Any) -> object:
    """Return what the iterator pickles as, and how many items are left, which together change with
    each item drawn; `_UNKNOWN` if it does not pickle or calls a function."""
    if isinstance(iterator, _CALLS):
        return _UNKNOWN
    try:
        with warnings.catch_warnings(action="ignore"):  # that it will not be so from 3.14 on
            parts = iterator.__reduce__()
    except TypeError:
        return _UNKNOWN
    found = [_position(p) if is_iterator(p) else repr(p) for p in _flat(parts)]
    return _UNKNOWN if any(p is _UNKNOWN for p in found) else [length_hint(iterator), *found]


def _flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, tuple):
            yield from _flat(part)
        elif not isinstance(part, (list, dict)):  # what it reads from
            yield part


class _Bits:
    """A state with arrays in it, which compare element by element."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and _words(self.state) == _words(other.state)

    __hash__ = None  # type: ignore[assignment]


def _words(state: Any) -> bytes:
    match state:
        case torch.Tensor():
            return _words(state.numpy())
        case np.ndarray():
            return state.tobytes()
        case tuple() | list():
            return b",".join(map(_words, state))
        case dict():
            return b",".join(map(_words, state.values()))
        case _:
            return repr(state).encode()


def _restore(generator: Any, state: Any) -> None:
    state = state.state if isinstance(state, _Bits) else state
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case _ if generator is random or isinstance(generator, random.Random):
            generator.setstate(state)
        case torch.Generator() | np.random.RandomState() | ModuleType():
            generator.set_state(state)
        case _:  # an iterator has no way back
            pass
