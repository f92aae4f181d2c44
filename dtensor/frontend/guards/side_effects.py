"""Find and undo the side effects of a call: changed attributes, items, globals, random generators.

    before = StateBefore(walk(roots))
    model(x)                               # self.calls += 1; random.random()
    before.changes()                       # [Change(calls: 0 -> 1)]
    before.moved(writes)                   # ["Python's random"]

A captured step runs its Python once. A change is a cache that stays as it is, or it would be lost
at later calls (capture.py decides). Assignments to a module's parameters and buffers are not looked
at here. `undo` restores all that `changes` names, except lists of more than 10,000 items and arrays
of another shape; changes of other threads stay (program_writes.py). Objects that the walk does not
reach are not seen, nor are writes to the largest arrays if all arrays exceed 256 MB.
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

from dtensor.frontend.call_lock import CaptureLocalDict
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
    """An item of ``holder`` before and after a call; if ``key`` is None, all of its contents.

    ``holder``: a dict, class, cell, list, set, deque, array or buffer. None if the contents are too
    long to be copied; then before and after are lengths.
    """

    path: str
    holder: Any
    key: Any
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {_text(self.before)} -> {_text(self.after)}"

    @property
    def has_tensors(self) -> bool:
        return _has_tensor(self.after, 4)

    def undo(self) -> None:
        self._put(self.before, expected=self.after)

    def redo(self) -> None:
        self._put(self.after, expected=self.before)

    def _put(self, value: Any, *, expected: Any) -> None:
        """Store ``value``, unless another thread has changed the ``expected`` value since."""
        if self.holder is None or not _is_same(_current(self.holder, self.key), expected):
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
                holder = self.holder
                (holder.extend if isinstance(holder, deque) else holder.update)(value)
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
    """A copy of the state that a walk reached, to compare with the state after a call."""

    def __init__(self, reached: ReachedState) -> None:
        """Copy the contents of all reached containers, buffers and entries, so that changes of a
        run can be found and undone."""
        self.alone: bool = is_alone()
        weights = {
            id(held) for module in reached.modules for held in (module._parameters, module._buffers)
        }
        self._copies = [
            (path, holder, _copy(holder))
            for path, holder in reached.sized
            if id(holder) not in weights and not path.endswith(_RNN_WEIGHTS)
        ]
        arrays = _smallest_arrays(reached.arrays)
        self._copies += [(path, buffer, _copy(buffer)) for path, buffer in arrays]
        copied = {id(holder) for _, holder, _ in self._copies} | weights
        self._entries = [
            (path, holder, key, value)
            for key, e in reached.entries.items()
            for holder, value, path in zip(e.holders, e.values, e.paths, strict=True)
            if id(holder) not in copied and isinstance(holder, dict)
        ]
        self._cells = [(path, cell, _content(cell)) for path, cell in reached.cells]
        self._generators = [*_GLOBAL_GENERATORS.items(), *reached.generators]
        self._generator_states = [_state(generator) for _, generator in self._generators]
        self._cache_sizes = [(cache, cache.cache_info().currsize) for _, cache in reached.caches]

    def changes(self) -> list[Change]:
        """Return the changes since then. `ProgramWrites.may` tells whether the program or another
        thread has made a change."""
        changes: list[Change] = []
        for path, holder, copy in self._copies:
            changes += _changes_of(path, holder, copy)
        for path, holder, key, value in self._entries:
            after = dict.get(holder, key, _ABSENT)  # a user's subclass may override `get`
            if not _is_same_value(after, value):
                changes.append(Change(path=path, holder=holder, key=key, before=value, after=after))
        for path, cell, value in self._cells:
            after = _content(cell)
            if not _is_same_value(after, value):
                changes.append(Change(path=path, holder=cell, key=None, before=value, after=after))
        return changes

    def moved(self, writes: ProgramWrites) -> list[str]:
        """Return the paths of the random generators and iterators that the program drew from."""
        return [path for path, _, _ in self._drawn_from(writes)]

    def put_back(self, writes: ProgramWrites) -> None:
        """Restore the random generators that the program drew from."""
        for _, generator, state in self._drawn_from(writes):
            _restore(generator, state)

    def _drawn_from(self, writes: ProgramWrites) -> list[tuple[str, Any, Any]]:
        """Return (path, generator, earlier state) of each generator from which the program drew
        numbers."""
        pairs = zip(self._generators, self._generator_states, strict=True)
        return [
            (path, generator, state)
            for (path, generator), state in pairs
            if (writes.mentions_path(path) if state is _UNKNOWN else _state(generator) != state)
            and writes.may_have_drawn(path, generator)
        ]

    def clear_grown_caches(self, writes: ProgramWrites) -> None:
        """Clear the `functools.cache`s that grew: their new entries belong to this capture."""
        for cache, size in self._cache_sizes:
            code = getattr(cache.__wrapped__, "__code__", None)
            if cache.cache_info().currsize != size and (code is None or writes.ran(code)):
                cache.cache_clear()


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.undo()


def redo(changes: Iterable[Change]) -> None:
    for change in changes:
        change.redo()


def line_of_change(change: Change, executed: ExecutedCode | None) -> Source | None:
    """Return the first line of the executed code that assigns the changed name; if none does, the
    first line that reads it (`calls.append(x)`). Return None if no line mentions it."""
    name = change.path.rpartition(".")[2].partition("[")[0].partition(" (")[0]
    stores = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"}
    reads = {"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_METHOD"}
    codes = [] if executed is None else executed.codes.values()
    codes = [code for code in codes if code.co_filename[0] != "<"]
    for opnames in (stores, reads):
        for code in codes:
            for line in _lines(code, opnames, name):
                return line_of(code.co_filename, line, code.co_name)
    return None


def _lines(code: CodeType, opnames: set[str], name: str) -> Iterable[int]:
    """Yield the lines of instructions of these opcodes with this argument name."""
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        is_wanted = instruction.opname in opnames and instruction.argval == name
        if is_wanted and positions is not None and positions.lineno is not None:
            yield positions.lineno


# -- containers ------------------------------------------------------------------------------------


MAX_COMPARED_BYTES = 2**28
"""Total size of the arrays that are copied and compared."""


def _smallest_arrays(arrays: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays by size, the smallest first, until they exceed `MAX_COMPARED_BYTES`."""
    total = 0
    for path, buffer in sorted(arrays, key=lambda pair: _num_bytes(pair[1])):
        total += _num_bytes(buffer)
        if total > MAX_COMPARED_BYTES:
            return
        if not getattr(buffer, "closed", False):
            yield path, buffer


def _num_bytes(buffer: Any) -> int:
    """Return the bytes to copy of an array or buffer; 0 for text buffers and closed files."""
    match buffer:
        case np.ndarray():
            return buffer.nbytes
        case io.StringIO() | io.BytesIO():
            return 0
        case _:
            return 0 if getattr(buffer, "closed", False) else memoryview(buffer).nbytes


def _copy(holder: Any) -> Any:
    """Return a copy of the contents of a holder; its length if it has more than `MAX_ITEMS`."""
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


def _changes_of(path: str, holder: Any, copy: Any) -> list[Change]:
    """Return the changes of a holder since ``copy`` was made: for a dict, a change for each key;
    otherwise at most one."""
    if isinstance(copy, dict):
        prefix = path.removesuffix("*").partition(": ")[0].removeprefix(".")  # "" for the root
        owner = holder if isinstance(holder, dict) else _class_of_view(holder)
        current = dict(holder)
        return [
            Change(
                path=f"{prefix}{key}" if path.endswith("*") else f"{prefix}[{key!r}]",
                holder=owner,
                key=key,
                before=copy.get(key, _ABSENT),
                after=current.get(key, _ABSENT),
            )
            for key in {**copy, **current}
            if not _is_same_value(copy.get(key, _ABSENT), current.get(key, _ABSENT))
            and not (isinstance(key, str) and (key.startswith("__") or key in _RNN_WEIGHTS))
        ]
    after = _copy(holder)
    if isinstance(copy, int) or isinstance(after, int):  # too long to be copied
        before = copy if isinstance(copy, int) else len(copy)
        if before == len(holder):
            return []
        return [Change(path=path, holder=None, key=None, before=before, after=len(holder))]
    if isinstance(copy, list):
        same = len(after) == len(copy) and all(map(_is_same_value, after, copy))
    else:
        same = after == copy
    return [] if same else [Change(path=path, holder=holder, key=None, before=copy, after=after)]


def _class_of_view(space: Any) -> type:
    """Return the class whose attributes a read-only view shows."""
    descriptor = space.get("__dict__")
    is_class = isinstance(descriptor, GetSetDescriptorType)
    return descriptor.__objclass__ if is_class else type(None)


def _current(holder: Any, key: Any) -> Any:
    """Return the present value of an item, or the present contents of a holder."""
    match holder:
        case CellType():
            return _content(holder)
        case dict():
            return dict.get(holder, key, _ABSENT)
        case type():
            return vars(holder).get(key, _ABSENT)
        case _:
            return _copy(holder)


def _is_same(current: Any, expected: Any) -> bool:
    """Return whether two contents or values are the same; of two lists, all their items."""
    if type(current) is not type(expected) or not isinstance(current, list | set):
        return _is_same_value(expected, current)
    if isinstance(current, set):
        return current == expected
    return len(current) == len(expected) and all(map(_is_same_value, expected, current))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_same_value(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or equal values of a class in `PLAIN`. A
    `CaptureLocalDict` dict is the same as its plain dict."""
    if a is b or (isinstance(b, CaptureLocalDict) and b.plain is a):
        return True
    if isinstance(a, _Bits):
        return a == b
    return isinstance(a, PLAIN) and type(a) is type(b) and repr(a) == repr(b)


def _has_tensor(value: Any, depth: int) -> bool:
    """Return whether a value has a tensor within ``depth`` levels of containers and attributes."""
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
            attributes = getattr(value, "__dict__", {}) if depth else {}
            return any(_has_tensor(v, depth - 1) for v in attributes.values())


def _text(value: Any) -> str:
    """Return a value as text for a message, of at most 60 characters."""
    if _has_tensor(value, 4):
        return f"{type(value).__name__} with tensors"
    text = repr(value.state if isinstance(value, _Bits) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- random generators and iterators ---------------------------------------------------------------

_UNKNOWN = object()
"""The state of an iterator that cannot be compared."""
_CALLABLE_ITERATOR = type(iter(int, 1))
_GLOBAL_GENERATORS: dict[str, Any] = {
    "Python's random": random,
    "numpy.random": np.random,
    "torch's generator": torch.default_generator,
}


def _state(generator: Any) -> object:
    """Return a state that changes when a value is drawn from a random generator or an iterator;
    `_UNKNOWN` if there is none. `_restore` takes the state of a random generator."""
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
            variables = {**frame.f_locals, "yield from": source} if frame else {}
            states = [_variable_state(value) for value in variables.values()]
            states += [_state(source)] if isinstance(source, GeneratorType) else []
            if any(state is _UNKNOWN for state in states):
                return _UNKNOWN
            return frame and (frame.f_lasti, [(k, id(v)) for k, v in variables.items()], states)
        case _ if generator is random:
            return random.getstate()
        case _ if generator is np.random:
            return _Bits(np.random.get_state())
        case _:
            return _iterator_state(generator)


def _variable_state(value: Any) -> object:
    """Return a state that changes when a generator takes an item from its local variable."""
    if isinstance(value, GeneratorType) or not is_iterator(value):
        return len(value) if isinstance(value, (list, dict, set, deque)) else None
    return _iterator_state(value)


def _iterator_state(iterator: Any) -> object:
    """Return the number of items left and the parts with which the iterator would be pickled: they
    change with each item drawn. Return `_UNKNOWN` if it cannot be pickled or calls a function."""
    if isinstance(iterator, _CALLABLE_ITERATOR):
        return _UNKNOWN
    try:
        with warnings.catch_warnings(action="ignore"):  # deprecated: removed in Python 3.14
            parts = iterator.__reduce__()
    except TypeError:
        return _UNKNOWN
    states = [_iterator_state(p) if is_iterator(p) else repr(p) for p in _flat(parts)]
    return _UNKNOWN if any(s is _UNKNOWN for s in states) else [length_hint(iterator), *states]


def _flat(parts: Any) -> Iterator[Any]:
    """Yield the parts of nested tuples, without the list or dict that an iterator reads from."""
    for part in parts:
        if isinstance(part, tuple):
            yield from _flat(part)
        elif not isinstance(part, (list, dict)):
            yield part


class _Bits:
    """A state that contains arrays. Two are equal if their bytes are."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and _bytes(self.state) == _bytes(other.state)

    __hash__ = None  # type: ignore[assignment]


def _bytes(state: Any) -> bytes:
    """Return a state as bytes, which differ if and only if the states do."""
    match state:
        case torch.Tensor():
            return _bytes(state.numpy())
        case np.ndarray():
            return state.tobytes()
        case tuple() | list():
            return b",".join(map(_bytes, state))
        case dict():
            return b",".join(map(_bytes, state.values()))
        case _:
            return repr(state).encode()


def _restore(generator: Any, state: Any) -> None:
    """Set the state of a random generator to a result of `_state`."""
    state = state.state if isinstance(state, _Bits) else state
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case _ if generator is random or isinstance(generator, random.Random):
            generator.setstate(state)
        case torch.Generator() | np.random.RandomState() | ModuleType():
            generator.set_state(state)
        case _:  # an iterator cannot be restored
            pass
