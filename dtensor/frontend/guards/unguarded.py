"""Find the reads of a captured program that guards cannot compare, each with its line.

    for read in outside(reached, executed):
        print(read.line, read.what)        # net.py:12 the clock; net.py:30 what lib.parse gives

There are three kinds: a call of a function that is `Unguarded` in known_functions.py; such a
function or class that the code mentions without calling it (`map(time.time, xs)`); and an object
that the walk reached and cannot compare. The profiler records no lines. The line is the place where
the code that ran mentions the name; if there is none, the first line of the function. An object
whose name no code that ran mentions does not count: it may be one of many in a container.
"""

from __future__ import annotations

import builtins
import dis
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from dtensor.frontend.guards.code_names import is_users, with_nested
from dtensor.frontend.guards.executed_code import ExecutedCode
from dtensor.frontend.guards.known_functions import Unguarded, guard_for, is_foreign, module_of
from dtensor.frontend.guards.reached_state import ReachedState
from dtensor.frontend.source import Source, line_of

_IMPLICIT = {
    "__getitem__": "BINARY_SUBSCR",
    "__iter__": "GET_ITER",
    "__next__": "FOR_ITER",
    "__contains__": "CONTAINS_OP",
    "__enter__": "BEFORE_WITH",
}
"""Methods that code calls without mentioning their name, and the opcode that calls them."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_LOADS += ("LOAD_FAST", "LOAD_FAST_CHECK", "IMPORT_FROM", "LOAD_SUPER_ATTR", "LOAD_CONST")


@dataclass(frozen=True, slots=True)
class UnguardedRead:
    """A read of unguarded state. ``what``: the state in words for a warning ("the clock")."""

    line: Source
    what: str


def outside(reached: ReachedState, executed: ExecutedCode) -> list[UnguardedRead]:
    """Return the first unguarded read of each line, sorted by file and line."""
    by_line: dict[tuple[str, int], UnguardedRead] = {}
    for reads in (_calls, _mentions, _objects):
        for read in reads(reached, executed):
            by_line.setdefault((read.line.file, read.line.line), read)
    return [by_line[key] for key in sorted(by_line)]


def _calls(reached: ReachedState, executed: ExecutedCode) -> Iterator[UnguardedRead]:
    """Yield the calls of unguarded functions."""
    spaces = {id(f.__code__): f.__globals__ for _, f in reached.functions}
    for name, callers in executed.calls.items():
        guard = guard_for(name)
        if not isinstance(guard, Unguarded):
            continue
        for caller in callers:
            codes = list(executed.codes.values()) if caller is None else [caller]
            lines = [
                (code, line)
                for code in codes
                for line in _lines_of_call(code, spaces.get(id(code), {}), name)
            ]
            if not lines:  # called by another name, such as a local variable's
                code = next(filter(is_users, codes), codes[0])
                lines = [(code, code.co_firstlineno)]
            for code, line in lines:
                yield _read(code, line, _words(guard, name))


def _lines_of_call(code: CodeType, space: Mapping[str, Any], name: str) -> list[int]:
    """Return the lines of ``code``, whose globals are ``space``, that call ``name``.

    Calls of a variable or of a module's function come first. If there are none, return the first
    call of a method with this name: the class of its object is unknown.
    """
    last = name.rpartition(".")[2]
    names = {n for n in code.co_names if getattr(space.get(n), "__name__", None) == last} | {last}
    function_lines: list[int] = []
    method_lines: list[int] = []
    previous: Any = None  # the name that the previous instruction loads
    for instruction in dis.get_instructions(code):
        if instruction.opname == _IMPLICIT.get(last):
            method_lines.append(_line(instruction))
        elif (
            instruction.opname in _LOADS
            and _is_name_in(instruction.argval, names)
            and _is_called(instruction)
        ):
            of_module = isinstance(previous, str) and isinstance(space.get(previous), ModuleType)
            is_variable = instruction.opname in (
                *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"),
            )
            lines = function_lines if of_module or is_variable else method_lines
            lines.append(_line(instruction))
        previous = instruction.argval
    return function_lines or method_lines[:1]


def _is_called(instruction: dis.Instruction) -> bool:
    """Return whether a loaded value is called at once. For a local variable the instruction does
    not tell this, and the result is True."""
    is_variable = instruction.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_SUPER_ATTR")
    return is_variable or "NULL" in instruction.argrepr or instruction.opname == "LOAD_METHOD"


def _mentions(reached: ReachedState, executed: ExecutedCode) -> Iterator[UnguardedRead]:
    """Yield the places where code mentions an unguarded class, or a function without calling it."""
    for _, function in reached.functions:
        for code in with_nested(function.__code__):
            if id(code) not in executed.codes:
                continue
            unguarded = dict(_unguarded_values(code, function.__globals__))
            if not unguarded:
                continue
            previous = None
            for instruction in dis.get_instructions(code):
                name = instruction.argval if instruction.opname in _LOADS else None
                if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                    previous = None
                if isinstance(name, str) and (previous, name) in unguarded:
                    full_name, value = unguarded[previous, name]
                    guard = guard_for(full_name)
                    if isinstance(guard, Unguarded) and (
                        isinstance(value, type) or not _is_called(instruction)
                    ):
                        yield _read(code, _line(instruction), _words(guard, full_name))
                previous = name


def _unguarded_values(
    code: CodeType, space: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | None, str], tuple[str, Any]]]:
    """Yield the unguarded functions and classes that ``code`` mentions: ((module, name) in the
    code, (full name, value)). The module is None for a global or a builtin."""
    pending: list[tuple[str | None, str, Any]] = [
        (None, name, space.get(name, getattr(builtins, name, None))) for name in code.co_names
    ]
    visited: set[int] = set()
    while pending:
        module_name, name, value = pending.pop()
        if isinstance(value, ModuleType):
            if is_foreign(value.__name__) and id(value) not in visited:
                visited.add(id(value))
                attributes = vars(value)
                pending += [(name, n, attributes[n]) for n in code.co_names if n in attributes]
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            module = getattr(value, "__module__", None) or "builtins"
            if not is_foreign(module):
                continue
            full_name = f"{module}.{value.__qualname__}"
            if isinstance(value, type):
                full_name += ".__new__"
            if isinstance(guard_for(full_name), Unguarded):
                yield (module_name, name), (full_name, value)


def _objects(reached: ReachedState, executed: ExecutedCode) -> Iterator[UnguardedRead]:
    """Yield the places where code mentions the last name in the path of an unguarded object."""
    for path, value in reached.unguarded:
        kind = type(value)
        what = f"what {path} holds, of class {module_of(kind)}.{kind.__qualname__}"
        if isinstance(guard := guard_for(path), Unguarded) and guard.source:
            what = f"{path}, {guard.source}"
        names = re.findall(r"[^\W\d]\w*", re.sub(r"\[[^\]]*\]|\(.*?\)", "", path))
        keys = re.findall(r"\['(\w+)'\]$", path)
        for code in executed.codes.values():
            for instruction in dis.get_instructions(code):
                if instruction.opname in _LOADS and _is_name_in(
                    instruction.argval, {*names[-1:], *keys}
                ):
                    yield _read(code, _line(instruction), what)


def _is_name_in(value: object, names: set[str]) -> bool:
    return isinstance(value, str) and value in names


def _line(instruction: dis.Instruction) -> int:
    positions = instruction.positions
    return 0 if positions is None else positions.lineno or 0


def _read(code: CodeType, line: int, what: str) -> UnguardedRead:
    return UnguardedRead(line_of(code.co_filename, line, code.co_name), what)


def _words(guard: Unguarded, name: str) -> str:
    return guard.source or f"what {name.removesuffix('.__new__')} gives"
