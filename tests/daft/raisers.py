"""Exceptions that code on a host may raise, by name: the table of `test_remote_exceptions.py`.
Hosts import this file too."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from dtensor.daft import DaftError
from dtensor.daft.remote_exceptions import MAX_TRACEBACK_CHARS, RemoteTraceback


class Base(BaseException):
    """A BaseException that is no Exception."""


class Required(Exception):
    """An exception that cannot be constructed again from its `args`."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{where}: {code}")
        self.code, self.where = code, where


class Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


class Asked(Exception):
    """An exception whose class handles each attribute access and which has only its arguments."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__traceback__", "__cause__", "__context__", "__suppress_context__"):
            raise KeyboardInterrupt(name)
        return super().__getattribute__(name)


class Unreducible(Exception):
    def __reduce__(self) -> NoReturn:
        raise SystemExit("in __reduce__")


class Harmful(Exception):
    """An exception that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


class HarmfulPart:
    """An exception that holds a value that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def _cyclic() -> Exception:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def _caused() -> Exception:
    error = ValueError("shown")
    error.__cause__ = RuntimeError(threading.Lock())
    error.add_note("a note")
    return error


def _inner() -> Exception:
    class Inner(Exception):
        pass

    return Inner("of a function")


def _hosts_own() -> Exception:
    """Return an exception of a module that only this process has."""
    name = f"only_of_{os.getpid()}"
    if name not in sys.modules:
        module = sys.modules[name] = types.ModuleType(name)
        exec("class Own(Exception): pass", vars(module))
    return vars(sys.modules[name])["Own"]("of a module of its own")


KINDS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("of an op"),
    "GeneratorExit": lambda: GeneratorExit("shut"),
    "StopIteration": lambda: StopIteration(5),
    "StopAsyncIteration": lambda: StopAsyncIteration(5),
    "MemoryError": lambda: MemoryError("no room"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "not there", "a.bin"),
    "ImportError": lambda: ImportError("cannot", name="numpi"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "start"),
    "KeyError": lambda: KeyError("name"),
    "LookupError": lambda: LookupError("no such"),
    "Base": lambda: Base("mine"),
    "Required": lambda: Required(7, where="here"),
    "Frozen": lambda: Frozen(7),
    "Wordless": Wordless,
    "Asked": lambda: Asked("asked"),
    "Unreducible": lambda: Unreducible("cannot"),
    "Harmful": lambda: Harmful("does harm"),
    "ExceptionGroup": lambda: ExceptionGroup("two", [ValueError("a"), Required(7, where="b")]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("two", [SystemExit(3), ValueError("b")]),
    "Cyclic": _cyclic,
    "Caused": _caused,
    "Inner": _inner,
    "Unpicklable": lambda: ValueError(threading.Lock()),
    "HarmfulPart": lambda: ValueError(HarmfulPart()),
    "Large": lambda: ValueError("x" * 10_000_000),
    "LargeTensor": lambda: ValueError(torch.zeros(1 << 20)),
    "HostsOwn": _hosts_own,
}
AS_TEXT = {"Unpicklable", "HarmfulPart", "Large", "LargeTensor"}
"""Of which another process gets the text."""
NAMES = list(KINDS)


def check(error: DaftError, kind: str, *, carried: bool = True) -> None:
    """Check the error that a user gets for an exception raised on a host."""
    made, cause = KINDS[kind](), error.__cause__
    name = type(made).__name__
    assert name in str(error) and len(str(error)) < 30_000
    assert cause is not None
    if (carried and kind in AS_TEXT) or isinstance(cause, RemoteTraceback):
        assert kind in AS_TEXT | {"HostsOwn", "Inner"}
        assert name in str(cause) and len(str(cause)) <= MAX_TRACEBACK_CHARS + 100
        return
    assert type(cause).__name__ == name
    if kind not in ("Inner", "HostsOwn"):
        assert type(cause) is type(made)
    if kind not in AS_TEXT | {"ExceptionGroup", "BaseExceptionGroup"}:
        assert cause.args == made.args
    match cause:
        case SystemExit():
            assert cause.code == 3
        case StopIteration():
            assert cause.value == 5
        case FileNotFoundError():
            assert (cause.errno, cause.filename) == (2, "a.bin")
        case ImportError():
            assert cause.name == "numpi"
        case Required():
            assert (cause.code, cause.where) == (7, "here")
        case BaseExceptionGroup():
            assert [type(e) for e in cause.exceptions] == [type(e) for e in made.exceptions]  # type: ignore[attr-defined]
        case _:
            pass
    if kind == "Caused":
        assert cause.__notes__ == ["a note"]


def act(kind: str) -> NoReturn:
    raise KINDS[kind]()


def numbered(kind: str) -> Tensor:
    """Return a kind of exception as a number that a program takes as an input."""
    return torch.full((4, 4), float(NAMES.index(kind)))


def act_on(x: Tensor) -> Tensor:
    """Raise the exception whose number is in x; raise nothing for a negative number."""
    number = int(x.flatten()[0])
    if number >= 0:
        act(NAMES[number])
    return x.clone()


class Actor:
    """An actor with methods that raise, and with results that raise when pickled or unpickled."""

    def __init__(self, kind: str = "") -> None:
        if kind:
            act(kind)

    def fail(self, kind: str) -> None:
        act(kind)

    def score(self, prompt: list[int], tokens: list[int]) -> float:
        raise SystemExit(len(prompt))

    def good(self, x: Tensor) -> Tensor:
        return x + 1

    def __getattr__(self, name: str) -> Any:
        act("SystemExit")

    def give(self, when: str) -> object:
        return Given(when)

    @property
    def broken(self) -> NoReturn:
        act("SystemExit")

    def through_property(self) -> object:
        return self.broken


class Given:
    """A value that raises while it is pickled, or while it is unpickled."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> Any:
        if self.when == "pickled":
            sys.exit(3)
        return sys.exit, (3,)
