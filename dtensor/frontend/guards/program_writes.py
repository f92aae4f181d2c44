"""Decide whether a captured program or another thread made a change.

    writes = ProgramWrites(recorder, alone=False)    # the code that ran in this thread
    writes.may(change)                               # False: no code that ran can make this change
    writes.drew("rng", generator)

The program may have made a change if code that ran in its thread stores to this name or key, or
calls a method that changes such a container in place. Stores to a container that the same function
has created do not count: the container did not exist before.

Invariants: without other threads, every change is the program's. A change of the program is never
attributed to another thread; the reverse can happen if code that ran stores to the same name.
"""

from __future__ import annotations

import dis
import os
import random
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from types import CellType, CodeType, GeneratorType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

from dtensor.frontend.call_lock import has_started_threads
from dtensor.frontend.guards.code_names import is_followed
from dtensor.frontend.guards.executed_code import CodeRecorder
from dtensor.frontend.guards.reached_state import METHOD_OWNER
from dtensor.frontend.source import OURS, owner_of_file
from dtensor.private_torch import FakeTensor

_ANY_KEY: Any = object()
"""Stands for a key that is computed when the code runs."""
_NAME_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"}
_CELL_STORES = {"STORE_DEREF", "DELETE_DEREF"}
_STORES_ANY_NAME = ("setattr", "delattr", "__dict__", "__setattr__", "__delattr__")
_STORES_ANY_NAME += ("vars", "globals")
_SETTERS = {f"<built-in method builtins.{name}>" for name in ("setattr", "delattr")}
_OF_SEQUENCES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "+=", "*="}
_MUTATORS: dict[type, set[str]] = {
    dict: {"clear", "pop", "popitem", "setdefault", "update", "|="},
    list: _OF_SEQUENCES | {"sort"},
    set: {"add", "clear", "discard", "pop", "remove", "update", "|=", "&=", "-=", "^="}
    | {f"{of}_update" for of in ("difference", "intersection", "symmetric_difference")},
    deque: _OF_SEQUENCES | {"appendleft", "extendleft", "popleft", "rotate"},
}
"""The methods and operators that change a container in place, by its class."""
_PARTIAL_ARGUMENT = re.compile(r"\(\d+\)")
_UNSEEN_MUTATORS = {"__setitem__", "__delitem__", "__ior__", "__iadd__", "__imul__"}
"""Mutators whose calls the profiler does not record."""
_ALL_MUTATORS = {*chain.from_iterable(_MUTATORS.values()), *_UNSEEN_MUTATORS}
_MODULE_MUTATORS = {"add_module", "register_module", "append", "extend", "insert", "pop", "update"}
_MODULE_MUTATORS |= {"__setitem__", "__delitem__"}  # of nn.ModuleList and nn.ModuleDict
_SELF_CONTAINED = {"threading", "queue", "logging", "concurrent", "contextlib", "warnings", "re"}
_SELF_CONTAINED |= {"inspect", "traceback", "tokenize", "linecache", "asyncio", "selectors"}
"""Modules of Python whose code stores only to its own objects."""
_CREATES_CONTAINER = {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SET", "LIST_EXTEND"}
_CREATES_CONTAINER |= {"DICT_MERGE", "DICT_UPDATE", "SET_UPDATE"}
_LOADS = {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}


@dataclass(frozen=True, slots=True)
class _Stores:
    """The stores of some code: the names of attributes and globals, the names of closure cells, the
    keys of items (or `_ANY_KEY`), and the mutators that it calls."""

    names: frozenset[str]
    cells: frozenset[str]
    keys: tuple[Any, ...]
    mutators: frozenset[str]


class ProgramWrites:
    """The stores of all code that a program ran, as a ``recorder`` has recorded it. ``alone``: the
    process had no other thread."""

    def __init__(self, recorder: CodeRecorder, *, alone: bool) -> None:
        """Read the recorder's calls. ``alone``: no other thread runs, so every change is the
        program's."""
        self._recorder = recorder
        calls = None if alone or has_started_threads() else recorder.calls()
        # None: every change is the program's, as there is no other thread, or no record.
        self._codes = None if calls is None else [c for c in calls if not _is_dtensors(c)]
        self._storing_codes: list[CodeType] = []  # code that may store to the user's objects
        self._called: set[str] = set()  # the functions in C that these call, as profiler's texts
        if calls is not None:
            followed = [c for c in calls if is_followed(c) and not _is_torchs(c)]
            self._storing_codes = _with_callees(followed, calls)
            called = (call for code in self._storing_codes for call in calls.get(code, ()))
            self._called = {call for call in called if isinstance(call, str)}
            self._called |= recorder.c_functions_without_caller()
            every = (call for calls_of in calls.values() for call in calls_of)
            self._seeded = any("torch._C.Generator" in call for call in every if type(call) is str)

    def may(self, change: Any) -> bool:
        """Return whether the program may have made a `side_effects.Change`."""
        if self._codes is None or _holds_fakes(change.after, 4):
            return True
        in_function = METHOD_OWNER in change.path or _PARTIAL_ARGUMENT.search(change.path)
        if in_function and self.mentions_path(_PARTIAL_ARGUMENT.split(change.path)[0]):
            return True  # by a bound method or a partial, whose function no code mentions
        all_stores = [_stores(code) for code in self._codes]
        if isinstance(change.holder, CellType):
            name = change.path.partition(" (closure")[0]
            return any(name in s.cells for s in all_stores) or self._mentions("cell_contents")
        stores = [_stores(code) for code in self._storing_codes]
        if change.key is None and not isinstance(change.holder, (list, set, deque, NoneType)):
            return True  # an array, which many functions in C change
        if change.key is None:  # a list or a set; the holder None is a long list
            kind = list if change.holder is None else type(change.holder)
            keys = (key for s in stores for key in s.keys)
            stores_item = any(key is _ANY_KEY or isinstance(key, int) for key in keys)
            return stores_item or self._mutates(kind, stores)
        if hasattr(type(change.holder), "__missing__"):  # a lookup may add an item
            return True
        if change.path.endswith("]"):
            stores_item = any(_may_be_key(key, change.key) for s in stores for key in s.keys)
            return stores_item or self._mutates(type(change.holder), stores)
        return (
            any(change.key in s.names for s in all_stores)
            or self._mentions(*_STORES_ANY_NAME)
            or not self._called.isdisjoint(_SETTERS)
            or any(
                c.co_name in _MODULE_MUTATORS and "modules" in c.co_filename for c in self._codes
            )
        )

    def may_have_drawn(self, path: str, generator: Any) -> bool:
        """Return whether the program may have drawn from a random generator or an iterator."""
        if self._codes is None:
            return True
        name = path.partition(" (")[0].rpartition(".")[2].partition("[")[0]
        match generator:
            case torch.Generator():
                return self._seeded
            case GeneratorType():
                return self.ran(generator.gi_code)
            case np.random.Generator() | np.random.RandomState():
                return self._mentions(name)
            case _ if generator is np.random:  # the profiler does not record its methods
                objects = np.random, np.random.mtrand._rand
                return (
                    self._mentions("numpy.random")
                    or self._mentions_global(*objects)
                    or self._mentions_numpy_random()
                )
            case _ if generator is random or isinstance(generator, random.Random):
                was_called = any("Random." in text or "_random." in text for text in self._called)
                if generator is random:
                    global_generator: Any = random._inst  # type: ignore[attr-defined]
                    return was_called and (
                        self._mentions("random") or self._mentions_global(random, global_generator)
                    )
                return was_called and self._mentions(name)
            case _:
                return True

    def mentions_path(self, path: str) -> bool:
        """Return whether code that ran contains the last name of the path of an iterator."""
        executed = self._recorder.codes()
        last_name = re.findall(r"[^\W\d]\w*", path.partition(" (")[0])[-1:]
        return executed is None or any(
            name in (*code.co_names, *code.co_freevars, *code.co_varnames)
            for code in executed.codes.values()
            for name in last_name
        )

    def ran(self, code: CodeType | None) -> bool:
        return self._codes is None or any(code is other for other in self._codes)

    def _mentions(self, *names: str) -> bool:
        """Return whether code of the user or of a library contains one of these names."""
        assert self._codes is not None
        wanted = set(names)
        return any(
            not wanted.isdisjoint((*c.co_names, *c.co_freevars, *c.co_varnames))
            for c in self._codes
            if c.co_filename.startswith("<") or owner_of_file(c.co_filename) is not None
        )

    def _mentions_numpy_random(self) -> bool:
        """Return whether code mentions both "random" and numpy, by its name or by a global."""
        assert self._codes is not None
        codes = [c for c in self._codes if "random" in (*c.co_names, *c.co_consts)]
        return any("numpy" in c.co_names for c in codes) or self._mentions_global(np, codes=codes)

    def _mutates(self, kind: type, stores: Sequence[_Stores]) -> bool:
        """Return whether code that ran may change a container of class ``kind`` in place."""
        mutators = set[str]().union(*(s.mutators for s in stores))
        base = next((cls for cls in _MUTATORS if issubclass(kind, cls)), None)
        if kind is not base or not mutators.isdisjoint(_UNSEEN_MUTATORS):  # the user's class
            return not mutators.isdisjoint(_MUTATORS[base or dict] | _UNSEEN_MUTATORS)
        prefix = "collections." if kind is deque else ""
        mentioned = {name for code in self._storing_codes for name in code.co_names}
        return any(
            (name in mutators and not name.isalpha())
            # A method that was called and that no code mentions was stored: `pop = items.pop`.
            or (
                f"<method {name!r} of '{prefix}{kind.__name__}' objects>" in self._called
                and (name in mutators or name not in mentioned)
            )
            for name in _MUTATORS[kind]
        )

    def _mentions_global(self, *objects: object, codes: Sequence[CodeType] | None = None) -> bool:
        """Return whether ``codes`` (default: all that ran) mention a global whose value is one of
        ``objects`` or a method of one."""
        assert self._codes is not None
        codes = self._codes if codes is None else codes
        files = {code.co_filename for code in codes}
        names = {name for code in codes for name in code.co_names}
        spaces = [vars(m) for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
        values = [
            space[name]
            for space in spaces
            if space.get("__file__") in files or space.get("__name__") == "__main__"
            for name in names & space.keys()
        ]
        owners = [getattr(x, "__self__", None) for x in values if not isinstance(x, ModuleType)]
        return any(x is wanted for x in (*values, *owners) for wanted in objects)


def is_alone() -> bool:
    """Return whether no other thread runs Python code."""
    return len(sys._current_frames()) == 1


def _is_torchs(code: CodeType) -> bool:
    return f"{os.sep}torch{os.sep}" in code.co_filename


def _is_dtensors(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _with_callees(
    codes: list[CodeType], calls: Mapping[CodeType, Sequence[CodeType | str]]
) -> list[CodeType]:
    """Return ``codes`` and all code that they call, directly or not. Leave out code that cannot
    store to the user's objects, and its callees."""
    reached, pending = dict.fromkeys(codes), list(codes)
    while pending:
        for callee in calls.get(pending.pop(), ()):
            if isinstance(callee, CodeType) and callee not in reached and _may_store(callee):
                reached[callee] = None
                pending.append(callee)
    return list(reached)


def _may_store(code: CodeType) -> bool:
    """Return whether code may store to the user's objects."""
    if _is_torchs(code) or _is_dtensors(code):
        return False
    if is_followed(code):
        return True
    parts = os.path.relpath(code.co_filename, _PYTHON).split(os.sep)
    return parts[0].removesuffix(".py") not in _SELF_CONTAINED


_PYTHON = sysconfig.get_path("stdlib")


def _may_be_key(stored_key: Any, key: Any) -> bool:
    return stored_key is _ANY_KEY or (type(stored_key) is type(key) and stored_key == key)


@lru_cache(maxsize=4096)
def _stores(code: CodeType) -> _Stores:
    """Return the stores of a code object, read from its bytecode."""
    instructions = list(dis.get_instructions(code))
    created = _created_containers(code, instructions)
    names, cells, keys, mutators = set[str](), set[str](), list[Any](), set[str]()
    for i, instruction in enumerate(instructions):
        argument = instruction.argval
        match instruction.opname:
            case name if name in _NAME_STORES:
                names.add(argument)
            case name if name in _CELL_STORES:
                cells.add(argument)
            case "STORE_SUBSCR" | "DELETE_SUBSCR":
                container, key = _container_and_key(instructions, i)
                if not _loads_created(container, created):
                    keys.append(key)
            case "BINARY_OP" if instruction.argrepr.endswith("=") and _may_be_container(
                instructions[i - 1]
            ):
                mutators.add(instruction.argrepr)
            case "LOAD_METHOD" | "LOAD_ATTR" if argument in _ALL_MUTATORS:
                if not _loads_created(instructions[i - 1], created):
                    mutators.add(argument)
            case _:
                pass
    return _Stores(frozenset(names), frozenset(cells), tuple(keys), frozenset(mutators))


Instructions = list[dis.Instruction]


def _container_and_key(
    instructions: Instructions, index: int
) -> tuple[dis.Instruction | None, Any]:
    """Return the instruction that loads the container to which instruction ``index`` stores (None
    if it is not found), and the key if it is a constant, else `_ANY_KEY`."""
    key = index - 1
    if instructions[key].opname == "SWAP":  # d[k] += 1
        while key > 0 and not (instructions[key].opname == instructions[key - 1].opname == "COPY"):
            key -= 1
        key -= 2
    if key < 1 or instructions[key].opname not in _LOADS:
        return None, _ANY_KEY
    is_constant = instructions[key].opname == "LOAD_CONST"
    return instructions[key - 1], instructions[key].argval if is_constant else _ANY_KEY


def _may_be_container(operand: dis.Instruction) -> bool:
    """Return whether an instruction may load a container, not a number or a bool."""
    return operand.opname not in ("LOAD_CONST", "BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP")


def _loads_created(load: dis.Instruction | None, created: set[str]) -> bool:
    return load is not None and load.opname == "LOAD_FAST" and load.argval in created


def _created_containers(code: CodeType, instructions: Instructions) -> set[str]:
    """Return the local variables that only ever hold containers which this code has created, among
    them *args and **kwargs."""
    num = code.co_argcount + code.co_kwonlyargcount
    num_star = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    arguments, star = set(code.co_varnames[:num]), set(code.co_varnames[num : num + num_star])
    created, other = set[str](), set[str]()
    for previous, instruction in pairwise(instructions):
        if instruction.opname == "STORE_FAST":
            variables = created if previous.opname in _CREATES_CONTAINER else other
            variables.add(instruction.argval)
    return (created | star) - other - arguments


def _holds_fakes(value: Any, depth: int) -> bool:
    """Return whether a value holds fake tensors, which only a capture creates."""
    return any(isinstance(x, FakeTensor) for x in _tensors(value, depth))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, down to ``depth`` levels of containers and attributes."""
    match value:
        case torch.Tensor():
            yield value
        case torch.nn.Module() | type():
            pass
        case dict() if depth:
            for item in list(value.values()):
                yield from _tensors(item, depth - 1)
        case list() | tuple() | set() if depth:
            for item in list(value):
                yield from _tensors(item, depth - 1)
        case _ if depth:
            for attribute in list(getattr(value, "__dict__", {}).values()):
                yield from _tensors(attribute, depth - 1)
        case _:
            pass
