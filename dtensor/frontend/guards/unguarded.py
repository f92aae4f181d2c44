"""What a captured program read that cannot be compared, each with the line that read it.

    for read in outside(found, ran):
        print(read.line, read.what)        # net.py:12 the clock; net.py:30 what lib.parse gives

Three kinds: a call of what the table in known_functions.py does not have as pure or as a getter; a
function or class of that kind that code names otherwise than to call it at once (map(time.time,
xs)); an object that the walk came to and cannot enter. A profiler has no lines, so the line is that
of the name in the code that ran; where there is none, that of the function. What no code that ran
names is not read: an object beside others in a container.

Not here: what is done about it (capture.py).
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
from dtensor.frontend.guards.known_functions import Outside, guard_for, is_foreign, module_of
from dtensor.frontend.guards.reached_state import ReachedState
from dtensor.frontend.source import Source, line_of

_IMPLICIT = {
    "__getitem__": "BINARY_SUBSCR",
    "__iter__": "GET_ITER",
    "__next__": "FOR_ITER",
    "__contains__": "CONTAINS_OP",
    "__enter__": "BEFORE_WITH",
}
"""Methods that code calls without saying their name."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_LOADS += ("LOAD_FAST", "LOAD_FAST_CHECK", "IMPORT_FROM", "LOAD_SUPER_ATTR", "LOAD_CONST")


@dataclass(frozen=True, slots=True)
class ReadOutside:
    line: Source
    what: str


def outside(reached: ReachedState, ran: ExecutedCode) -> list[ReadOutside]:
    """In the order of files and lines, each line with what it reads first."""
    reads = [*_called(reached, ran), *_named(reached, ran), *_objects(reached, ran)]
    by_line: dict[tuple[str, int], ReadOutside] = {}
    for read in reads:
        by_line.setdefault((read.line.file, read.line.line), read)
    return [by_line[key] for key in sorted(by_line)]


def _called(reached: ReachedState, ran: ExecutedCode) -> Iterator[ReadOutside]:
    spaces = {id(f.__code__): f.__globals__ for _, f in reached.functions}
    for name, callers in ran.calls.items():
        entry = guard_for(name)
        if not isinstance(entry, Outside):
            continue
        for caller in callers:
            codes = list(ran.codes.values()) if caller is None else [caller]
            lines = [
                (code, line)
                for code in codes
                for line in _lines_of_call(code, spaces.get(id(code), {}), name)
            ]
            if not lines:  # by a name of the function's own
                code = next(filter(is_users, codes), codes[0])
                lines = [(code, code.co_firstlineno)]
            for code, line in lines:
                yield _read(code, line, _words(entry, name))


def _lines_of_call(code: CodeType, space: Mapping[str, Any], name: str) -> list[int]:
    """Where code calls it: as a global, or of a module, each time; of an object, whose class is not
    known, the first time that a method of such a name is called."""
    last = name.rpartition(".")[2]
    names = {n for n in code.co_names if getattr(space.get(n), "__name__", None) == last} | {last}
    of_modules: list[int] = []
    others: list[int] = []
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == _IMPLICIT.get(last):
            others.append(_line(instruction))
        elif (
            instruction.opname in _LOADS
            and _is_text_of(instruction.argval, names)
            and _is_called(instruction)
        ):
            of_module = isinstance(space.get(before), ModuleType) if isinstance(before, str) else 0
            alone = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
            (of_modules if of_module or alone else others).append(_line(instruction))
        before = instruction.argval
    return of_modules or others[:1]


def _is_called(instruction: dis.Instruction) -> bool:
    """Whether what is loaded is called at once, as far as its instruction says; a name of the
    function's own may be."""
    is_variable = instruction.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_SUPER_ATTR")
    return is_variable or "NULL" in instruction.argrepr or instruction.opname == "LOAD_METHOD"


def _named(reached: ReachedState, ran: ExecutedCode) -> Iterator[ReadOutside]:
    for _, function in reached.functions:
        for code in with_nested(function.__code__):
            if id(code) not in ran.codes:
                continue
            wanted = dict(_outside_values(code, function.__globals__))
            if not wanted:
                continue
            last = None
            for instruction in dis.get_instructions(code):
                name = instruction.argval if instruction.opname in _LOADS else None
                if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                    last = None
                if isinstance(name, str) and (last, name) in wanted:
                    where, value = wanted[last, name]
                    entry = guard_for(where)
                    if isinstance(entry, Outside) and (
                        isinstance(value, type) or not _is_called(instruction)
                    ):
                        yield _read(code, _line(instruction), _words(entry, where))
                last = name


def _outside_values(
    code: CodeType, space: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | None, str], tuple[str, Any]]]:
    """Functions and classes that cannot be compared and whose names code says, by that name and
    what stands before it."""
    todo: list[tuple[str | None, str, Any]] = [
        (None, name, space.get(name, getattr(builtins, name, None))) for name in code.co_names
    ]
    seen: set[int] = set()
    while todo:
        before, name, value = todo.pop()
        if isinstance(value, ModuleType):
            if is_foreign(value.__name__) and id(value) not in seen:
                seen.add(id(value))
                held = vars(value)
                todo += [(name, own, held[own]) for own in code.co_names if own in held]
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            module = getattr(value, "__module__", None) or "builtins"
            if not is_foreign(module):
                continue
            where = f"{module}.{value.__qualname__}"
            if isinstance(value, type):
                where += ".__new__"
            if isinstance(guard_for(where), Outside):
                yield (before, name), (where, value)


def _objects(reached: ReachedState, ran: ExecutedCode) -> Iterator[ReadOutside]:
    for path, value in reached.unguarded:
        kind = type(value)
        what = f"what {path} holds, of class {module_of(kind)}.{kind.__qualname__}"
        if isinstance(entry := guard_for(path), Outside) and entry.what:
            what = f"{path}, {entry.what}"
        names = re.findall(r"[^\W\d]\w*", re.sub(r"\[[^\]]*\]|\(.*?\)", "", path))
        texts = re.findall(r"\['(\w+)'\]$", path)
        wanted = {*names[-1:], *texts}
        for code in ran.codes.values():
            for instruction in dis.get_instructions(code):
                if instruction.opname in _LOADS and _is_text_of(instruction.argval, wanted):
                    yield _read(code, _line(instruction), what)


def _is_text_of(value: object, wanted: set[str]) -> bool:
    return isinstance(value, str) and value in wanted


def _line(instruction: dis.Instruction) -> int:
    positions = instruction.positions
    return 0 if positions is None else positions.lineno or 0


def _read(code: CodeType, line: int, what: str) -> ReadOutside:
    return ReadOutside(line_of(code.co_filename, line, code.co_name), what)


def _words(entry: Outside, name: str) -> str:
    return entry.what or f"what {name.removesuffix('.__new__')} gives"
