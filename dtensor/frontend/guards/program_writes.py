"""Who wrote what a capture finds changed: its program, or another thread meanwhile.

    wrote = ProgramWrites(recorder)       # what ran in this thread, and calls of C that it made
    wrote.may(change)                     # False: no code that ran can make such a change
    wrote.drew("rng", generator)

A change is the program's only if code that ran in its thread can make it: an instruction that
stores under such a name, or under such a key, or a method that changes what it is called on. A
container that a function has made itself was not there before, so what is stored there counts not.

Invariants: in a process of one thread every change is the program's. What may be another thread's
is never taken for the program's where nothing that ran stores anything of its kind; what the
program wrote is never taken for another's. Not here: what has changed (side_effects.py).
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

from dtensor.frontend.call_lock import has_started
from dtensor.frontend.guards.code_names import is_followed
from dtensor.frontend.guards.executed_code import CodeRecorder
from dtensor.frontend.guards.reached_state import METHOD_OWNER
from dtensor.frontend.source import OURS, owner_of_file
from dtensor.private_torch import FakeTensor

_ANY: Any = object()  # a key that is known when it runs
_NAMED = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"}
_CELLS = {"STORE_DEREF", "DELETE_DEREF"}
_ANY_NAME = ("setattr", "delattr", "__dict__", "__setattr__", "__delattr__", "vars", "globals")
_SETTERS = {f"<built-in method builtins.{name}>" for name in ("setattr", "delattr")}
_OF_SEQUENCES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "+=", "*="}
_CHANGING: dict[type, set[str]] = {
    dict: {"clear", "pop", "popitem", "setdefault", "update", "|="},
    list: _OF_SEQUENCES | {"sort"},
    set: {"add", "clear", "discard", "pop", "remove", "update", "|=", "&=", "-=", "^="}
    | {f"{of}_update" for of in ("difference", "intersection", "symmetric_difference")},
    deque: _OF_SEQUENCES | {"appendleft", "extendleft", "popleft", "rotate"},
}
"""Of a container, by its class, the methods and operators that change it in place."""
_IN_A_PARTIAL = re.compile(r"\(\d+\)")
_SLOTS = {"__setitem__", "__delitem__", "__ior__", "__iadd__", "__imul__"}  # Python sees no call
_ALL_CHANGING = {*chain.from_iterable(_CHANGING.values()), *_SLOTS}
_OF_MODULES = {"add_module", "register_module", "append", "extend", "insert", "pop", "update"}
_OF_MODULES |= {"__setitem__", "__delitem__"}  # of nn.ModuleList and nn.ModuleDict
_TO_THEMSELVES = {"threading", "queue", "logging", "concurrent", "contextlib", "warnings", "re"}
_TO_THEMSELVES |= {"inspect", "traceback", "tokenize", "linecache", "asyncio", "selectors"}
"""Parts of Python whose code stores in their own objects alone."""
_FRESH = {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SET", "LIST_EXTEND"}
_FRESH |= {"DICT_MERGE", "DICT_UPDATE", "SET_UPDATE"}
_LOADS = {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}


@dataclass(frozen=True, slots=True)
class _Stores:
    """What a code stores: under names, in cells, under keys; and how it changes what there is."""

    names: frozenset[str]
    cells: frozenset[str]
    keys: tuple[Any, ...]
    in_place: frozenset[str]


class ProgramWrites:
    """``recorder``: of what ran; ``alone``: whether no other thread was there."""

    def __init__(self, recorder: CodeRecorder, *, alone: bool) -> None:
        self._recorder = recorder
        calls = None if alone or has_started() else recorder.calls()
        self._codes = None if calls is None else [c for c in calls if not _is_ours(c)]
        self._others: list[CodeType] = []  # of these what may store in what the user holds
        self._called: set[str] = set()  # of C, by these
        if calls is not None:
            counted = [c for c in calls if is_followed(c) and not _is_torchs(c)]
            self._others = _below(counted, calls)
            called = (call for code in self._others for call in calls.get(code, ()))
            self._called = {call for call in called if isinstance(call, str)}
            self._called |= recorder.without_caller()
            every = (call for calls_of in calls.values() for call in calls_of)
            self._seeded = any("torch._C.Generator" in call for call in every if type(call) is str)

    def may(self, change: Any) -> bool:
        """Whether the program may have made a change of `effects`."""
        if self._codes is None or _holds_fakes(change.after, 4):
            return True
        held = METHOD_OWNER in change.path or _IN_A_PARTIAL.search(change.path)
        if held and self.names(_IN_A_PARTIAL.split(change.path)[0]):
            return True  # by a method that no code names
        named = [_stores(code) for code in self._codes]
        if isinstance(change.holder, CellType):
            name = change.path.partition(" (closure")[0]
            return any(name in s.cells for s in named) or self._names("cell_contents")
        stores = [_stores(code) for code in self._others]
        if change.key is None and not isinstance(change.holder, (list, set, deque, NoneType)):
            return True  # an array, which many functions change
        if change.key is None:  # a list, a set
            kind = list if change.holder is None else type(change.holder)
            places = (key for s in stores for key in s.keys)
            stored = any(key is _ANY or isinstance(key, int) for key in places)
            return stored or self._changes(kind, stores)
        if hasattr(type(change.holder), "__missing__"):  # reading is enough
            return True
        if change.path.endswith("]"):
            stored = any(_fits(key, change.key) for s in stores for key in s.keys)
            return stored or self._changes(type(change.holder), stores)
        return (
            any(change.key in s.names for s in named)
            or self._names(*_ANY_NAME)
            or not self._called.isdisjoint(_SETTERS)
            or any(c.co_name in _OF_MODULES and "modules" in c.co_filename for c in self._codes)
        )

    def drew(self, path: str, generator: Any) -> bool:
        """Whether the program may have taken from a generator of random numbers, or an iterator."""
        if self._codes is None:
            return True
        name = path.partition(" (")[0].rpartition(".")[2].partition("[")[0]
        match generator:
            case torch.Generator():
                return self._seeded
            case GeneratorType():
                return self.ran(generator.gi_code)
            case np.random.Generator() | np.random.RandomState():
                return self._names(name)
            case _ if generator is np.random:  # the profiler does not see its methods
                held = np.random, np.random.mtrand._rand
                return self._names("numpy.random") or self._reaches(*held) or self._of_numpy()
            case _ if generator is random or isinstance(generator, random.Random):
                drawn = any("Random." in text or "_random." in text for text in self._called)
                if generator is random:
                    generator_of_random: Any = random._inst  # type: ignore[attr-defined]
                    return drawn and (
                        self._names("random") or self._reaches(random, generator_of_random)
                    )
                return drawn and self._names(name)
            case _:
                return True

    def names(self, path: str) -> bool:
        """Return whether code that ran contains the last name of the path of an iterator."""
        codes = self._recorder.codes()
        words = re.findall(r"[^\W\d]\w*", path.partition(" (")[0])[-1:]
        return codes is None or any(
            word in (*code.co_names, *code.co_freevars, *code.co_varnames)
            for code in codes.codes.values()
            for word in words
        )

    def ran(self, code: CodeType | None) -> bool:
        return self._codes is None or any(code is one for one in self._codes)

    def _names(self, *names: str) -> bool:
        """Whether code of the user's or a library's says one of them."""
        assert self._codes is not None
        wanted = set(names)
        return any(
            not wanted.isdisjoint((*c.co_names, *c.co_freevars, *c.co_varnames))
            for c in self._codes
            if c.co_filename.startswith("<") or owner_of_file(c.co_filename) is not None
        )

    def _of_numpy(self) -> bool:
        """Whether one of these codes, a user's or a library's, says "random" of numpy."""
        assert self._codes is not None
        saying = [c for c in self._codes if "random" in (*c.co_names, *c.co_consts)]
        return any("numpy" in c.co_names for c in saying) or self._reaches(np, codes=saying)

    def _changes(self, kind: type, stores: Sequence[_Stores]) -> bool:
        """Whether something changes such a container in place."""
        methods = set[str]().union(*(s.in_place for s in stores))
        known = next((of for of in _CHANGING if issubclass(kind, of)), None)
        if kind is not known or not methods.isdisjoint(_SLOTS):  # of a class of the user's
            return not methods.isdisjoint(_CHANGING[known or dict] | _SLOTS)
        module = "collections." if kind is deque else ""
        said = {name for code in self._others for name in code.co_names}
        return any(
            (name in methods and not name.isalpha())
            # A method that is called, and that no code names, is held: `pop = items.pop`.
            or (
                f"<method {name!r} of '{module}{kind.__name__}' objects>" in self._called
                and (name in methods or name not in said)
            )
            for name in _CHANGING[kind]
        )

    def _reaches(self, *wanted: object, codes: Sequence[CodeType] | None = None) -> bool:
        """Whether one of these codes names a global that is one of these, or a method of it."""
        assert self._codes is not None
        codes = self._codes if codes is None else codes
        files = {code.co_filename for code in codes}
        names = {name for code in codes for name in code.co_names}
        spaces = [vars(m) for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
        held = [
            space[name]
            for space in spaces
            if space.get("__file__") in files or space.get("__name__") == "__main__"
            for name in names & space.keys()
        ]
        owners = [getattr(x, "__self__", None) for x in held if not isinstance(x, ModuleType)]
        return any(x is one for x in (*held, *owners) for one in wanted)


def is_alone() -> bool:
    """Whether no other thread runs Python."""
    return len(sys._current_frames()) == 1


def _is_torchs(code: CodeType) -> bool:
    return f"{os.sep}torch{os.sep}" in code.co_filename


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _below(
    codes: list[CodeType], calls: Mapping[CodeType, Sequence[CodeType | str]]
) -> list[CodeType]:
    """The user's and libraries' code, and what that calls of Python's: not the insides of torch."""
    reached, todo = dict.fromkeys(codes), list(codes)
    while todo:
        for call in calls.get(todo.pop(), ()):
            if isinstance(call, CodeType) and call not in reached and _stores_in_others(call):
                reached[call] = None
                todo.append(call)
    return list(reached)


def _stores_in_others(code: CodeType) -> bool:
    """Whether what it stores may be in what the user holds."""
    if _is_torchs(code) or _is_ours(code):
        return False
    if is_followed(code):
        return True
    parts = os.path.relpath(code.co_filename, _PYTHON).split(os.sep)
    return parts[0].removesuffix(".py") not in _TO_THEMSELVES


_PYTHON = sysconfig.get_path("stdlib")


def _fits(known: Any, key: Any) -> bool:
    return known is _ANY or (type(known) is type(key) and known == key)


@lru_cache(maxsize=4096)
def _stores(code: CodeType) -> _Stores:
    instructions = list(dis.get_instructions(code))
    fresh = _made_here(code, instructions)
    names, cells, keys, in_place = set[str](), set[str](), list[Any](), set[str]()
    for at, one in enumerate(instructions):
        match one.opname:
            case name if name in _NAMED:
                names.add(one.argval)
            case name if name in _CELLS:
                cells.add(one.argval)
            case "STORE_SUBSCR" | "DELETE_SUBSCR":
                container, key = _operands(instructions, at)
                if not _is_fresh(container, fresh):
                    keys.append(key)
            case "BINARY_OP" if one.argrepr.endswith("=") and _may_add_items(instructions[at - 1]):
                in_place.add(one.argrepr)
            case "LOAD_METHOD" | "LOAD_ATTR" if one.argval in _ALL_CHANGING:
                if not _is_fresh(instructions[at - 1], fresh):
                    in_place.add(one.argval)
            case _:
                pass
    return _Stores(frozenset(names), frozenset(cells), tuple(keys), frozenset(in_place))


Instructions = list[dis.Instruction]


def _operands(instructions: Instructions, at: int) -> tuple[dis.Instruction | None, Any]:
    """What loads the container that is stored to, and the key where it is a constant."""
    key = at - 1
    if instructions[key].opname == "SWAP":  # d[k] += 1
        while key > 0 and not (instructions[key].opname == instructions[key - 1].opname == "COPY"):
            key -= 1
        key -= 2
    if key < 1 or instructions[key].opname not in _LOADS:
        return None, _ANY
    constant = instructions[key].opname == "LOAD_CONST"
    return instructions[key - 1], instructions[key].argval if constant else _ANY


def _may_add_items(operand: dis.Instruction) -> bool:
    """Whether it may leave a container on the stack: not a number, or what is compared."""
    return operand.opname not in ("LOAD_CONST", "BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP")


def _is_fresh(one: dis.Instruction | None, fresh: set[str]) -> bool:
    return one is not None and one.opname == "LOAD_FAST" and one.argval in fresh


def _made_here(code: CodeType, instructions: Instructions) -> set[str]:
    """The variables that only ever are containers which this code makes; *args and **kwargs."""
    num = code.co_argcount + code.co_kwonlyargcount
    flags = code.co_flags
    extra = bool(flags & 0x04) + bool(flags & 0x08)
    given, own = set(code.co_varnames[:num]), set(code.co_varnames[num : num + extra])
    made, other = set[str](), set[str]()
    for before, one in pairwise(instructions):
        if one.opname == "STORE_FAST":
            (made if before.opname in _FRESH else other).add(one.argval)
    return (made | own) - other - given


def _holds_fakes(value: Any, depth: int) -> bool:
    """Which only a capture makes."""
    return any(isinstance(x, FakeTensor) for x in _tensors(value, depth))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case torch.nn.Module() | type():
            pass
        case dict() if depth:
            for one in list(value.values()):
                yield from _tensors(one, depth - 1)
        case list() | tuple() | set() if depth:
            for one in list(value):
                yield from _tensors(one, depth - 1)
        case _ if depth:
            for one in list(getattr(value, "__dict__", {}).values()):
                yield from _tensors(one, depth - 1)
        case _:
            pass
