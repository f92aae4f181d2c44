"""Walks over what functions can read besides their arguments: closures, globals, attributes, items.

    BETA = 0.1
    def loss_fn(model, x):                 reached.print a fingerprint of all of it, by value
        return BETA * model(x).mean()      reached.columns ("BETA": globals of loss_fn, 0.1), ...

From the roots (a function, the modules and other objects among its arguments) the walk goes into
what code names: a function's cells, defaults and globals; of objects, classes and Python modules
the entries that some code names (all of them where code looks names up, as getattr does); of
modules of torch also parts, parameters, buffers and hooks; all items of lists and dicts.

Two walks differ in whose names count. `walk(roots, ran)` takes the functions whose code ran: what
was read. `walk(roots)`, before it is known what runs, takes the user's own functions and of objects
all that they hold: what may be changed.

Two fingerprints are equal if and only if what was found is the same to a program: numbers and texts
by type and value (1, True and 1.0 are three values), tensors by shape, dtype and requires_grad,
containers, objects, functions and modules by their parts, what is found twice by where it was found
first, and all else by identity. What a tensor holds is not part of it.

Not entered: functions and classes of Python, torch, numpy and this package. Not seen: files, clocks
and what C code keeps to itself. Not here: when the walk is made, what follows from it (guards.py).
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import enum
import functools
import gc
import io
import mmap
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from dtensor.errors import PlanningError, check_module, is_dense
from dtensor.frontend.guards.known_functions import (
    Entered,
    Getter,
    Outside,
    is_foreign,
    is_plain_all_through,
    kept,
    module_of,
    said,
)
from dtensor.frontend.source import OWN, owner_of_file
from dtensor.kernel_flags import kernel_flags
from dtensor.private_torch import DisableTorchFunctionSubclass

MOST_LOOKED_AT = 100_000
MOST_ITEMS = 10_000
"""How many objects, and items of one, are looked at for changes before it is known what runs."""

Roots = tuple[tuple[str, Any], ...]
"""What the walk begins at, with the words that an error has for each."""

T = TypeVar("T")
Paths = list[tuple[str, T]]
"""Things with where they were found; two may have the same words."""

_FUNCTIONS_OF_C = (BuiltinFunctionType, type(np.random.seed))  # and Cython's
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CLOSED = {"logging", "threading", "_thread", "io", "_io", "re", "abc", "typing", "builtins", "ast"}
_CLOSED |= {"warnings", "inspect", "asyncio", "concurrent", "multiprocessing", "contextlib"}
"""Parts of Python whose objects are not entered before it is known what runs."""
_LOOKS_UP = {"getattr", "hasattr", "vars", "__dict__", "attrgetter", "globals", "locals", "eval"}
_LOOKS_UP |= {"exec", "__getattribute__", "methodcaller", "setattr"}
WHEREABOUTS = "_whereabouts"
"""The attribute of a parameter whose value lies on ranks (api/values/lazy_parameters.py)."""
NO_ATTRIBUTES: dict[str, Any] = {}
_OF_TORCH = set(vars(nn.Module())) - {"training"}
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
GLOBAL_BACKWARD_HOOKS = (
    torch_modules._global_backward_pre_hooks,
    torch_modules._global_backward_hooks,
)
_OF_ITERATORS = {"builtins", "itertools", "_collections", "collections", "array", "_struct", "re"}
"""Modules of Python of which each class with a `__next__` is an iterator."""
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_DATA = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
_ENTERED = Entered()
_BUILTINS = vars(builtins)
_OF_BUILTINS = (BuiltinFunctionType, type, type(None))
_OF_PYTHON = 1 << 9
"""A flag of classes: made by a class statement, so that objects may have attributes."""
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_IMPORT_HOOKS = ("_pytest", "pluggy")
"""Libraries whose code runs wherever a module is imported."""
_NOT_READ_IN = (None, "numpy", "ray", "torch", "typing_extensions.py", *_IMPORT_HOOKS)
"""Whose code is not looked into: what it is asked for has an entry in known_functions.py."""
HELD = " (of a bound method)"
"""Ends the path of an object, as a list, of which a method of C is held: `pop = items.pop`."""
_OF_STRIDES = {"stride", "is_contiguous", "storage_offset", "as_strided"}
_IMPORTS = {"import_module", "__import__"}
_OF_ENUMS = {"_name_", "_value_", "__objclass__", "_sort_order_"}
_OF_CLASSES = {"__module__", "__dict__", "__init__", "__doc__", "__name__", "__qualname__"}
_OF_CLASSES |= {"__class__", "__weakref__", "__annotations__", "__new__"}
_PLAIN_LOOKUPS = (dict.__getitem__, MappingProxyType.__getitem__)
_CALLED_WITHOUT_NAME = {"__call__", "__getitem__", "__getattr__", "__enter__", "__exit__"}
_CALLED_WITHOUT_NAME |= {"__iter__", "__next__", "__bool__", "__len__", "__contains__"}


@dataclass(slots=True)
class Reached:
    """What a walk came to. ``print``: the fingerprint, an entry for each of ``paths``.

    ``columns``: key -> the containers that have it and what each has there: one comprehension reads
    them all. ``sized``: containers that may grow; ``spaces``: attributes of tensors. ``kept`` holds
    what the fingerprint names by id.
    """

    print: list[object] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    columns: dict[Any, tuple[list[Any], list[Any], list[str]]] = field(default_factory=dict)
    attributes: list[tuple[str, Any, str]] = field(default_factory=list)  # without a __dict__
    modules: list[nn.Module] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)  # whose class counts
    containers: list[Any] = field(default_factory=list)  # with a lookup of their own
    sized: Paths[Any] = field(default_factory=list)
    spaces: Paths[dict[str, Any]] = field(default_factory=list)
    ordered: list[Mapping[Any, Any]] = field(default_factory=list)  # that may be gone through
    cells: Paths[CellType] = field(default_factory=list)
    functions: Paths[FunctionType] = field(default_factory=list)
    parameters: Paths[torch.Tensor] = field(default_factory=list)  # and buffers
    tensors: Paths[torch.Tensor] = field(default_factory=list)  # neither
    arrays: Paths[Any] = field(default_factory=list)
    randoms: Paths[Any] = field(default_factory=list)  # generators of numbers, and iterators
    caches: Paths[Any] = field(default_factory=list)  # functools.lru_cache
    getters: Paths[Getter] = field(default_factory=list)  # what else is asked
    unknown: Paths[Any] = field(default_factory=list)  # objects that cannot be compared
    variables: Paths[contextvars.ContextVar[Any]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    others: Roots = ()  # that the walk has not come to, though they ran
    reads_environment: bool = False
    reads_strides: bool = False


@dataclass(frozen=True, slots=True)
class ExecutedCode:
    """The code that a capture ran, the user's and torch's layers': by id, and kept alive.

    ``calls``: by name, what it called that is not its own, and who: None where that was not seen.
    """

    codes: Mapping[int, CodeType]
    calls: Mapping[str, Sequence[CodeType | None]] = field(default_factory=dict)

    @staticmethod
    def of(codes: Iterable[CodeType]) -> ExecutedCode:
        return ExecutedCode({id(code): code for code in codes if counts(code)})


def walk(roots: Roots, ran: ExecutedCode | None = None, *, search: bool = True) -> Reached:
    """What is reached from ``roots``; with ``ran`` by the code that ran alone. ``search``: for the
    functions that ran and are not reached, through all that there is."""
    if ran is None:
        names = _Names(everything=True)
        while True:  # names lead to functions, and functions to names
            before = len(names)
            walker = _Walker(names, None)
            walker.run(roots)
            if len(names) == before:
                return walker.reached
    names = _Names(ran.codes.values())
    walker = _Walker(names, ran)
    walker.reached.reads_strides = not names.names.isdisjoint(_OF_STRIDES)
    walker.run(roots)
    missing = _not_entered(ran, walker.entered)
    if search and missing:  # made on the way, or kept where the walk does not look
        walker.reached.others = _holders_of(missing)
        walker.run(walker.reached.others)
    for name in sorted(ran.calls):
        if callable(asked := said(name)):
            walker.asks(name, asked)
    walker.reached.reads_environment = not names.names.isdisjoint(("environ", "getenv", "environb"))
    return walker.reached


# -- whose code, and the names in it -------------------------------------------------------------


def counts(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<"):
        return not file.startswith("<frozen")
    owner = owner_of_file(file)
    return owner not in _NOT_READ_IN or _is_a_layer(code)


def is_own(code: CodeType) -> bool:
    file = code.co_filename
    return counts(code) and (file.startswith("<") or owner_of_file(file) == OWN)


@functools.cache
def _is_layers_file(file: str) -> bool:
    path = file.replace("\\", "/")
    return "/torch/nn/modules/" in path and not path.endswith("/module.py")


def _is_a_layer(code: CodeType) -> bool:
    return _is_layers_file(code.co_filename)


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


class _Names:
    """The names that some code says; ``everything`` where code looks names up."""

    def __init__(self, codes: Iterable[CodeType] = (), *, everything: bool = False) -> None:
        self.names: set[str] = {"forward"}
        self.everything = everything
        for code in codes:
            self.add(code)

    def __len__(self) -> int:
        return len(self.names) + self.everything

    def add(self, code: CodeType) -> None:
        for one in nested(code):
            self.names.update(one.co_names)
            if not _LOOKS_UP.isdisjoint(one.co_names) and not _is_a_layer(one):
                self.everything = True
                self.names.update(c for c in one.co_consts if isinstance(c, str))

    def among(self, entries: Mapping[str, Any]) -> list[str]:
        if not self.everything:
            return [name for name in list(entries) if name in self.names]
        return [n for n in list(entries) if isinstance(n, str) and not n.startswith("__")]


def _not_entered(ran: ExecutedCode, entered: set[int]) -> list[CodeType]:
    known = {id(n) for i in entered if i in ran.codes for n in nested(ran.codes[i])}
    return [c for i, c in ran.codes.items() if i not in known and not _is_a_layer(c)]


def _holders_of(codes: Sequence[CodeType]) -> Roots:
    """The functions that run such code, and the modules that it was defined in, whose globals it
    reads: a function that the collector does not look at (gc.freeze) may be read by these alone."""
    functions = [f for f in gc.get_referrers(*codes) if isinstance(f, FunctionType)]
    functions.sort(key=lambda f: (f.__module__ or "", f.__qualname__, id(f)))
    files = {code.co_filename for code in codes}
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        # not its attribute: a module that is imported late raises, or is imported, when it is asked
        if not is_foreign(name) and space_of(module).get("__file__") in files
    ]
    return (
        *((f.__qualname__, f) for f in functions if f.__module__ and not is_foreign(f.__module__)),
        *((module.__name__, module) for module in modules),
    )


_CONTENTS: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    *((dict, dict.values), (list, list.__iter__), (tuple, tuple.__iter__)),
    *((set, set.__iter__), (frozenset, frozenset.__iter__)),
    (collections.deque, collections.deque.__iter__),
)


def items_of(value: Any) -> list[Any] | None:
    """What a container of Python's holds, or one of a class derived from it, whose own methods are
    not asked; None for other objects."""
    for kind, contents in _CONTENTS:
        if issubclass(type(value), kind):
            return list(contents(value))
    return None


def space_of(value: Any) -> dict[str, Any]:
    """The attributes that an object holds, without asking its own methods; {} where it has none. A
    `threading.local` has those of the current thread."""
    try:
        return attribute_of(value, "__dict__")
    except Exception:  # none, or a property of the user's in its place
        return NO_ATTRIBUTES


def metadata_of(x: torch.Tensor, strides: bool) -> tuple[Any, ...]:
    """Return what Python can read of a tensor besides its elements, gradient and attributes; with
    ``strides`` how it lies in memory, which may differ from step to step without an effect."""
    with DisableTorchFunctionSubclass():
        what = (type(x), isinstance(x, nn.Parameter), x.shape, x.dtype, x.device, x.requires_grad)
        if not strides or x.layout is not torch.strided or x.is_nested:
            return what
        return (*what, x.stride(), x.storage_offset())


def elements_of(array: Any) -> tuple[Any, ...]:
    """Return the bytes of an array or buffer, with the shape and strides of an array of numpy."""
    if not isinstance(array, np.ndarray):
        return (bytes(array),)
    return (array.tobytes(), array.dtype, array.shape, array.strides)


def attribute_of(value: Any, name: str) -> Any:
    """`getattr` without the object's own methods; raises AttributeError."""
    own = threading.local if isinstance(value, threading.local) else object
    return own.__getattribute__(value, name)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's, from which code takes the next item."""
    kind = type(value)
    return hasattr(kind, "__next__") and module_of(kind) in _OF_ITERATORS


def _is_outside(function: BuiltinFunctionType) -> bool:
    return isinstance(said(f"{function.__module__}.{function.__qualname__}"), Outside)


def _is_for_writing(file: io.IOBase) -> bool:
    return file.closed or not file.readable()


def _referent(proxy: Any) -> Any:
    """What a weak proxy stands for; None once it is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _key_text(key: Any) -> str:
    try:
        return f"[{key!r}]" if isinstance(key, (*PLAIN, enum.Enum)) else ""
    except Exception:  # a text of a class of the user's
        return f"[{type(key).__name__}]"


def has_hooks(x: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of a leaf."""
    with DisableTorchFunctionSubclass():
        return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


# -- the walk --------------------------------------------------------------------------------------


class _Walker:
    def __init__(self, names: _Names, ran: ExecutedCode | None) -> None:
        self.names = names
        self.ran = ran
        self.reached = Reached()
        self.entered: set[int] = set()
        self._seen: dict[int, int] = {}
        self._todo: list[tuple[str, Any]] = []

    def run(self, roots: Roots) -> None:
        self._todo += reversed(roots)
        while self._todo and (self.ran is not None or len(self._seen) < MOST_LOOKED_AT):
            path, value = self._todo.pop()
            mark, said = len(self._todo), len(self.reached.print)
            try:
                self._visit(path, value)
            except PlanningError:
                raise
            except Exception:
                if is_foreign(module_of(type(value))):
                    raise
                # A method of the user's that was asked raises (__len__, __class__): none is asked.
                del self._todo[mark:], self.reached.print[said:], self.reached.paths[said:]
                self._seen.setdefault(id(value), len(self._seen))
                self.reached.kept.append(value)
                self._object(path, value)
            self._todo[mark:] = reversed(self._todo[mark:])  # the first part is visited first

    def _say(self, path: str, *what: object) -> None:
        self.reached.print.append(what)
        self.reached.paths.append(path)

    def _same(self, path: str, value: object) -> None:
        self.reached.kept.append(value)
        self._say(path, "is", id(value))

    def _slot(self, holder: Any, key: Any, path: str) -> None:
        """An entry that the check reads, and that is visited."""
        try:
            value = holder[key]
        except LookupError:  # another thread has removed it meanwhile
            return
        holders, values, paths = self.reached.columns.setdefault(key, ([], [], []))
        holders.append(holder)
        values.append(value)
        paths.append(path)
        self._todo.append((path, value))

    def _visit(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, PLAIN):
            self._say(path, kind, repr(value) if kind in (float, complex, slice) else value)
            if kind.__flags__ & _OF_PYTHON and id(value) not in self._seen:
                self._seen[id(value)] = len(self._seen)
                self.reached.kept.append(value)
                self._attributes_of(path, value)
            return
        if kind in _PROXIES:
            self._say(path, kind)
            self._todo.append((path, _referent(value)))
            return
        if id(value) in self._seen:
            self._say(path, "seen", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self.reached.kept.append(value)
        match value:
            case torch.Tensor():
                self._tensor(path, value)
            case nn.Module():
                self._module(path, value)
            case FunctionType():
                self._function(path, value)
            case MethodType():
                self._say(path, "method")
                self._todo += [(path, value.__func__), (path, value.__self__)]
            case functools.partial():
                self._say(path, "partial", len(value.args), tuple(value.keywords))
                for name in ("func", "args"):
                    self.reached.attributes.append((path, value, name))
                self._todo.append((path, value.func))
                if isinstance(value.func, BuiltinFunctionType) and _is_outside(value.func):
                    self.reached.unknown.append((path, value.func))
                self._todo += [(f"{path}({i})", part) for i, part in enumerate(value.args)]
                self.reached.sized.append((path, value.keywords))
                for key in value.keywords:
                    self._slot(value.keywords, key, f"{path}({key})")
                self._attributes_of(path, value)
            case enum.Enum():
                self._enum(path, value)
            case functools._lru_cache_wrapper():
                self.reached.caches.append((path, value))
                self._say(path, "cached")
                self._todo.append((path, value.__wrapped__))
            case staticmethod() | classmethod():
                self._say(path, type(value))
                self._todo.append((path, value.__func__))
            case property():
                self._say(path, "property")
                self._todo.append((path, value.fget))
            case _ if isinstance(value, _FUNCTIONS_OF_C):
                self._same(path, value)
                owner = getattr(value, "__self__", None)
                if owner is not None and not isinstance(owner, (ModuleType, type)):
                    self._todo.append((f"{path}{HELD}", owner))
            case ModuleType():
                self._python_module(path, value)
            case type():
                self._class(path, value)
            case threading.local():
                self._thread_local(path, value)
            case _ if is_iterator(value):
                self.reached.randoms.append((path, value))
                self._same(path, value)
            case list() | tuple() | collections.deque():
                self._sequence(path, value)
            case MethodWrapperType():
                self._say(path, value.__name__)
                self._todo.append((path, value.__self__))
            case _ if isinstance(value, _VIEWS):
                self._say(path, kind)
                self._todo.append((path, value.mapping))
            case dict() if value is sys.modules:
                self._same(path, value)
                for text in sorted(self._texts() & sys.modules.keys()):
                    self._imported(text)
            case dict() if value is vars(builtins):
                self._same(path, value)
            case dict() | MappingProxyType() if type(value).__getitem__ in _PLAIN_LOOKUPS:
                self._mapping(path, value)
            case set() | frozenset():
                self._set(path, value)
            case np.ndarray() if value.dtype.hasobject:
                self._say(path, "array", value.shape)
                self._todo += [
                    (f"{path}[{i}]", x) for i, x in enumerate(value.reshape(-1).tolist())
                ]
                self.reached.arrays.append((path, value))
            case np.ndarray():
                self.reached.arrays.append((path, value))
                self._say(path, "array", str(value.dtype), value.shape, value.strides)
            case bytearray() | memoryview() | array.array() | mmap.mmap():
                self.reached.arrays.append((path, value))
                self._say(path, "array", type(value))
            case io.StringIO() | io.BytesIO() if self.ran is None:
                self.reached.arrays.append((path, value))
                self._same(path, value)
            case np.generic():
                self._say(path, type(value), repr(value))
            case random.Random() | torch.Generator() | np.random.Generator():
                self._random(path, value)
            case np.random.RandomState():
                self._random(path, value)
            case weakref.ReferenceType():
                self._say(path, "reference")
                self._todo.append((path, value()))
            case contextvars.ContextVar():
                self.reached.variables.append((path, value))
                self._say(path, "variable")
                self._todo.append((path, value.get(None)))
            case _:
                self._object(path, value)

    def asks(self, path: str, asked: Getter) -> None:
        if not any(asked is known for _, known in self.reached.getters):
            self.reached.getters.append((path, asked))
            if asked is kernel_flags:
                for name, value in kernel_flags():
                    self._say(f"a setting of torch, {name}", "gives", repr(value))
            else:
                self._say(path, "gives", repr(asked()))

    def _enum(self, path: str, member: enum.Enum) -> None:
        self._say(path, type(member), member.name)
        space = space_of(member)
        self._slot(space, "_value_", path)
        for name in self.names.among(space):
            if name not in _OF_ENUMS:
                self._slot(space, name, f"{path}.{name}")
        if not is_foreign(module_of(type(member))):
            self._todo.append((path, type(member)))

    def _texts(self) -> set[str]:
        codes = () if self.ran is None else self.ran.codes.values()
        constants = (c for code in codes for one in nested(code) for c in one.co_consts)
        return {constant for constant in constants if isinstance(constant, str)}

    def _thread_local(self, path: str, value: threading.local) -> None:
        """Each thread has attributes of its own, so they are read from the object at each call."""
        self._say(path, "thread local")
        self._todo.append((path, type(value)))
        space = space_of(value)
        if self.ran is None:
            self.reached.sized.append((f"{path}.*", space))
        else:
            self.asks(path, lambda: self.names.among(space_of(value)))
        for name in self.names.among(space):
            self.reached.attributes.append((f"{path}.{name}", value, name))
            self._todo.append((f"{path}.{name}", space[name]))

    def _random(self, path: str, value: Any) -> None:
        self.reached.randoms.append((path, value))
        self._same(path, value)
        if isinstance(value, torch.Generator) and "initial_seed" in self.names.names:
            self.asks(f"{path}.initial_seed()", value.initial_seed)

    # -- code --------------------------------------------------------------------------------------

    def _function(self, path: str, function: FunctionType) -> None:
        code = function.__code__
        enters = is_own(code) if self.ran is None else id(code) in self.ran.codes
        generated = code.co_filename.startswith("<") and is_foreign(function.__module__)
        if not enters or generated:
            self._same(path, function)
            if "__wrapped__" in function.__dict__:  # a decorator of a library's
                self._todo.append((path, function.__dict__["__wrapped__"]))
            if self.ran is not None or not is_foreign(function.__module__):
                self._attributes_of(path, function)
            return
        self.entered.add(id(code))
        self.reached.kept.append(code)
        self._say(path, "function", id(code))
        if self.ran is None:
            self.names.add(code)
        if _is_a_layer(code):
            return
        self.reached.functions.append((path, function))
        words = function.__qualname__.rpartition("<locals>.")[2]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            where = f"{name} (closure of {words})"
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                self._say(where, "empty")
                continue
            self.reached.cells.append((where, cell))
            self._todo.append((where, content))
        for position, default in enumerate(function.__defaults__ or ()):
            name = code.co_varnames[: code.co_argcount][position - len(function.__defaults__ or ())]
            self._todo.append((f"{name} (default of {words})", default))
        for name in function.__kwdefaults__ or ():
            self._slot(function.__kwdefaults__, name, f"{name} (default of {words})")
        space = function.__globals__
        for name in sorted({n for one in nested(code) for n in one.co_names}):
            if name not in space and not isinstance(_BUILTINS.get(name), _OF_BUILTINS):
                self._slot(_BUILTINS, name, f"{name} (of builtins)")
            if name in space:
                self._slot(space, name, f"{name} (global of {space.get('__name__', '?')})")
            for imported in (name, f"{space.get('__package__')}.{name}"):  # where it is called
                if imported in sys.modules:
                    self._imported(imported)
        for one in nested(code):
            if not _IMPORTS.isdisjoint(one.co_names):
                for text in one.co_consts:
                    if isinstance(text, str) and text in sys.modules and not is_foreign(text):
                        self._slot(sys.modules, text, text)
        if "globals" in code.co_names:  # under names that are computed
            for name, entry in list(space.items()):
                if isinstance(entry, (*PLAIN, list, dict, torch.Tensor)) and name[:2] != "__":
                    self._slot(space, name, f"{name} (global of {space.get('__name__', '?')})")
        self._attributes_of(words, function)

    def _imported(self, name: str) -> None:
        """A module that code imports where it is run."""
        if not is_foreign(name):
            self._slot(sys.modules, name, name)
        elif self.ran is not None:
            self._todo.append((name, sys.modules[name]))

    def _attributes_of(self, path: str, value: Any) -> None:
        space = space_of(value)
        if space is not NO_ATTRIBUTES:  # an empty one may get entries
            self.reached.sized.append((f"{path}.*", space))
        for name in self.names.among(space):
            self._slot(space, name, f"{path}.{name}")

    def _attributes_of_tensor(self, path: str, x: torch.Tensor) -> None:
        space = space_of(x)
        if WHEREABOUTS not in space and module_of(type(x)).partition(".")[0] == "dtensor":
            return
        if self.names.everything:
            self.reached.spaces.append((f"{path}.*", space))
        for name in self.names.among(space):
            if name != WHEREABOUTS:
                self._slot(space, name, f"{path}.{name}")

    def _python_module(self, path: str, module: ModuleType) -> None:
        self._say(path, "python module", module.__name__)
        space = vars(module)
        foreign = is_foreign(module.__name__)
        for name in sorted(self.names.names & space.keys()):
            value = space[name]
            where = f"{module.__name__}.{name}"
            if not foreign:
                self._slot(space, name, where)
            elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):  # replaced?
                if callable(asked := said(f"{where}.__new__" if isinstance(value, type) else "")):
                    self.asks(where, asked)
                holders, values, paths = self.reached.columns.setdefault(name, ([], [], []))
                holders.append(space)
                values.append(value)
                paths.append(where)
                self._same(where, value)
            elif self.ran is not None:
                self._datum(space, name, where)
        asked = said(module.__name__)
        if foreign and callable(asked):
            self.asks(module.__name__, asked)
        for name in sorted(self.names.names & vars(type(module)).keys()):  # as of torch.backends
            where = f"{module.__name__}.{name}"
            if foreign and isinstance(value := getattr(module, name, module), _DATA):
                self.asks(where, functools.partial(getattr, module, name))
                if isinstance(said(where), Outside):
                    self.reached.unknown.append((where, value))

    def _datum(self, space: dict[str, Any], name: str, where: str) -> None:
        """What a module of Python's or torch's has besides functions and classes."""
        value = space[name]
        if isinstance(value, ModuleType):
            if not is_foreign(value.__name__) or not is_plain_all_through(value.__name__):
                self._todo.append((where, value))
            return
        asked = said(where)
        if callable(asked):
            self.asks(where, asked)
        if isinstance(value, _DATA) or type(value) in _CONTAINERS:
            self._slot(space, name, where)

    def _class(self, path: str, cls: type) -> None:
        self._say(path, "class", id(cls))
        if not is_foreign(module_of(type(cls))):
            self._todo.append((path, type(cls)))
        for base in cls.__mro__:
            space = vars(base)
            if base in (object, nn.Module):
                continue
            if is_foreign(module_of(base)):
                if issubclass(base, nn.Module) and "forward" in space:
                    self._slot(space, "forward", f"{base.__name__}.forward")
                continue
            self.reached.sized.append((f"{base.__name__}.*", space))
            for name, entry in list(space.items()):
                if self._is_read(name, entry):
                    self._slot(space, name, f"{base.__name__}.{name}")

    def _is_read(self, name: str, entry: Any) -> bool:
        """Whether an entry of a class counts."""
        if name in self.names.names and name not in _OF_CLASSES:
            return True
        match entry:
            case staticmethod() | classmethod():
                entry = entry.__func__
            case property():
                entry = entry.fget
            case _:
                pass
        if isinstance(entry, FunctionType):
            if self.ran is None:
                return name in _CALLED_WITHOUT_NAME
            return id(entry.__code__) in self.ran.codes
        return self.names.everything and not name.startswith("__") and not callable(entry)

    # -- values ------------------------------------------------------------------------------------

    def _tensor(self, path: str, x: torch.Tensor) -> None:
        if not is_dense(x):  # a capture refuses to read it
            self._same(path, x)
            return
        self.reached.tensors.append((path, x))
        self._say(path, "tensor", *metadata_of(x, self.reached.reads_strides))
        if "grad" in self.names.names:
            self.asks(f"{path}.grad is None", lambda: not x.is_leaf or x.grad is None)
        self._attributes_of_tensor(path, x)

    def _module(self, path: str, module: nn.Module) -> None:
        check_module(path, module)
        reached = self.reached
        reached.modules.append(module)
        reached.objects.append(module)
        self._say(path, "module", bool(path))
        self._todo.append((path, type(module)))
        space = vars(module)
        reached.sized.append((f"{path}.*", space))
        where = f"{path}." if path else ""
        names = self.names.among(space)
        if is_foreign(module_of(type(module))):  # a layer of torch's
            names = [name for name in names if name in self.names.names]
        for name in names:
            if name not in _OF_TORCH:
                self._slot(space, name, f"{where}{name}")
        reached.ordered += (module._parameters, module._buffers, module._modules)
        for held in (module._parameters, module._buffers):
            reached.sized.append((f"{path}.*", held))
            for name, x in list(held.items()):
                self._weight(held, name, x, f"{where}{name}")
        reached.sized.append((f"{path}.*", module._modules))
        for name in list(module._modules):
            self._slot(module._modules, name, f"{where}{name}")
        for kind in FORWARD_HOOKS:
            hooks = space.get(kind, {})
            for number, key in enumerate(hooks):
                self._slot(hooks, key, f"{where}{kind.strip('_')}[{number}]")
            if hooks:
                reached.sized.append((f"{path}: {kind}", hooks))
                reached.ordered.append(hooks)
        self._say(path, *(len(space.get(kind, ())) for kind in BACKWARD_HOOKS))

    def _weight(self, held: dict[str, Any], name: str, x: torch.Tensor | None, path: str) -> None:
        holders, values, paths = self.reached.columns.setdefault(name, ([], [], []))
        holders.append(held)
        values.append(x)
        paths.append(path)
        if x is None:
            self._say(path, None)
        elif id(x) in self._seen:  # tied
            self._say(path, "seen", self._seen[id(x)])
        else:
            self._seen[id(x)] = len(self._seen)
            self.reached.kept.append(x)
            if not is_dense(x):  # as in _tensor
                self._same(path, x)
                return
            self.reached.parameters.append((path, x))
            with DisableTorchFunctionSubclass():
                is_parameter = isinstance(x, nn.Parameter)
                what = (is_parameter, tuple(x.shape), x.dtype, x.requires_grad, has_hooks(x))
                self._say(path, *what)
            self._attributes_of_tensor(path, x)

    def _sequence(self, path: str, items: Any) -> None:
        self._say(path, type(items), len(items))
        self._own(path, items)
        if isinstance(items, tuple):
            self._todo += [(f"{path}[{i}]", item) for i, item in enumerate(items)]
            return
        self.reached.sized.append((path, items))
        if self.ran is None and len(items) > MOST_ITEMS:
            return
        for i in range(len(items)):
            self._slot(items, i, f"{path}[{i}]")

    def _mapping(self, path: str, items: Mapping[Any, Any]) -> None:
        self._say(path, type(items), len(items))
        self._own(path, items)
        self.reached.sized.append((path, items))
        if self.ran is None and len(items) > MOST_ITEMS:
            return
        self.reached.ordered.append(items)
        for key in list(items):
            if isinstance(key, PLAIN):
                self._say(path, type(key), key)
            else:
                self._same(path, key)
            self._slot(items, key, f"{path}{_key_text(key)}")

    def _set(self, path: str, items: Any) -> None:
        held = list(items)
        plain = all(isinstance(item, PLAIN) for item in held)
        contents = (
            sorted((type(i).__name__, repr(i)) for i in held) if plain else sorted(map(id, held))
        )
        self._say(path, type(items), tuple(contents))
        self.reached.sized.append((path, items))

    def _own(self, path: str, items: Any) -> None:
        """What a container of the user's class has besides its items."""
        if is_foreign(module_of(type(items))):
            return
        self._todo.append((path, type(items)))
        if space_of(items) is not items:
            self._attributes_of(path, items)

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        root = module_of(kind).partition(".")[0]
        if self.ran is None and root in _CLOSED:
            self._same(path, value)
            return
        how = kept(kind) if self.ran is not None and root != "dtensor" else _ENTERED
        if not isinstance(how, Entered):
            if how == "by value":
                self._say(path, kind, repr(value))
            else:
                self._same(path, value)
            if how == "unknown" and not (isinstance(value, io.IOBase) and _is_for_writing(value)):
                self.reached.unknown.append((path, value))
            elif callable(asked := said(f"{module_of(kind)}.{kind.__qualname__}")):
                self.asks(f"{module_of(kind)}.{kind.__qualname__}", asked)
            return
        if how.asked is not None:
            self.asks(path, functools.partial(how.asked, value))
            if is_foreign(module_of(kind)):  # what the user has put there besides
                for name in sorted(self.names.names & space_of(value).keys()):
                    self._slot(space_of(value), name, f"{path}.{name}")
                return
        if issubclass(kind, BaseException):
            self._todo.append((path, value.args))
        self._say(path, "object")
        self.reached.objects.append(value)
        self._todo.append((path, kind))
        if (items := items_of(value)) is not None:  # that looks things up in its own way
            self.reached.containers.append(value)
            if issubclass(kind, dict):
                keys = dict.keys(value)
                self._say(path, *(k if type(k) in PLAIN else id(k) for k in keys))
            self._todo += [(f"{path}[{i}]", item) for i, item in enumerate(items)]
        space = space_of(value)
        if root == "dtensor":  # a parallelized module: what it holds of the user's
            self._todo += [(path, part) for part in space.values() if isinstance(part, nn.Module)]
            return
        if space is not NO_ATTRIBUTES:
            self.reached.sized.append((f"{path}.*", space))
        foreign = is_foreign(
            module_of(kind)
        )  # a namespace, an optimizer: its code is not looked at
        for name in list(space) if foreign else self.names.among(space):
            self._slot(space, name, f"{path}.{name}")
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name in ("__dict__", "__weakref__"):
                    continue
                try:
                    held = object.__getattribute__(value, name)
                except AttributeError:  # not assigned yet
                    continue
                self.reached.attributes.append((f"{path}.{name}", value, name))
                self._todo.append((f"{path}.{name}", held))
