"""Find the Python state that functions can read besides their arguments.

    BETA = 0.1
    def loss_fn(model, x):                 state = walk((("loss_fn", loss_fn), ("model", model)))
        return BETA * model(x).mean()      state.entries["BETA"].values == [0.1]

`walk` goes from its roots through closures, defaults, globals, attributes, submodules and items,
and records them in a `ReachedState`. It follows a global or an attribute only if code mentions its
name (`CodeNames`). After a run that is the code that ran: the walk finds the state that was read.
Before a run it is the code of all functions on the way: the walk finds the state that they may
change. Files, clocks and state inside C code are not seen; unguarded.py reports them.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from dtensor.errors import PlanningError, check_module, is_dense
from dtensor.frontend.guards.code_names import (
    CodeNames,
    is_layer,
    is_users,
    string_constants,
    with_nested,
)
from dtensor.frontend.guards.executed_code import ExecutedCode
from dtensor.frontend.guards.known_functions import (
    ByParts,
    Unguarded,
    guard_for,
    guard_for_class,
    is_foreign,
    is_pure_module,
    module_of,
)
from dtensor.frontend.guards.raw_access import (
    BACKWARD_HOOKS,
    DICT_VIEWS,
    FORWARD_HOOKS,
    NO_ATTRIBUTES,
    PLAIN,
    WEAK_PROXIES,
    has_hooks,
    is_iterator,
    key_text,
    raw_attributes,
    raw_items,
    referent_of,
    tensor_metadata,
)
from dtensor.frontend.guards.reached_state import (
    METHOD_OWNER,
    REMOTE_VALUE,
    ReachedState,
    Roots,
)
from dtensor.private_torch import DisableTorchFunctionSubclass

MAX_OBJECTS = 100_000
"""Objects that a walk before a run visits at most."""
MAX_ITEMS = 10_000
"""Length of the longest list or dict whose items a walk before a run visits."""
_IDENTITY_BEFORE_RUN = {"logging", "threading", "_thread", "io", "_io", "re", "abc", "typing"}
_IDENTITY_BEFORE_RUN |= {"builtins", "ast", "warnings", "inspect", "asyncio", "concurrent"}
_IDENTITY_BEFORE_RUN |= {"multiprocessing", "contextlib"}
"""Modules of Python whose objects a walk before a run does not enter."""

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class made by a class statement, whose objects may have attributes."""
_C_FUNCTIONS = (BuiltinFunctionType, type(np.random.seed))  # the second is Cython's
_RANDOM_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_BYTE_BUFFERS = (bytearray, memoryview, array.array, mmap.mmap)
_DATA = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
_DICT_LOOKUPS = (dict.__getitem__, MappingProxyType.__getitem__)
_BUILTINS = vars(builtins)
_IMPORT_FUNCTIONS = {"import_module", "__import__"}
_STRIDE_METHODS = {"stride", "is_contiguous", "storage_offset", "as_strided"}
_TORCH_ATTRIBUTES = set(vars(nn.Module())) - {"training"}
_ENUM_ATTRIBUTES = {"_name_", "_value_", "__objclass__", "_sort_order_"}
_CLASS_ATTRIBUTES = {"__module__", "__dict__", "__init__", "__doc__", "__name__", "__qualname__"}
_CLASS_ATTRIBUTES |= {"__class__", "__weakref__", "__annotations__", "__new__"}
_IMPLICIT_METHODS = {"__call__", "__getitem__", "__getattr__", "__enter__", "__exit__"}
_IMPLICIT_METHODS |= {"__iter__", "__next__", "__bool__", "__len__", "__contains__"}
"""Methods that code calls without mentioning their names."""


def walk(
    roots: Roots, executed: ExecutedCode | None = None, *, search: bool = True
) -> ReachedState:
    """Return the Python state that can be reached from ``roots``.

    Args:
        executed: the code that ran: the state that it read is returned. None, before a run: the
            state that the user's functions may change, from at most `MAX_OBJECTS` objects.
        search: also walk from functions that ran but cannot be reached from ``roots``. They are
            looked for among all objects of the process, which is slow.
    """
    if executed is None:
        names = CodeNames(match_all=True)
        while True:  # names lead to functions, and their code adds names
            num_names = len(names.names)
            walker = _Walker(names, None)
            walker.run(roots)
            if len(names.names) == num_names:
                return walker.state
    names = CodeNames(executed.codes.values())
    walker = _Walker(names, executed)
    walker.state.reads_strides = not names.names.isdisjoint(_STRIDE_METHODS)
    walker.run(roots)
    unreached = _unreached(executed, walker.entered)
    if search and unreached:  # functions made during the run, or stored where the walk cannot look
        walker.state.extra_roots = _functions_running(unreached)
        walker.run(walker.state.extra_roots)
    for name in sorted(executed.calls):
        if callable(getter := guard_for(name)):
            walker.state.add_getter(name, getter)
    walker.state.reads_environment = not names.names.isdisjoint(("environ", "getenv", "environb"))
    return walker.state


def _unreached(executed: ExecutedCode, entered: set[int]) -> list[CodeType]:
    """Return the code that ran in functions that a walk did not enter."""
    codes = executed.codes
    reached = {id(c) for i in entered if i in codes for c in with_nested(codes[i])}
    return [code for i, code in codes.items() if i not in reached and not is_layer(code)]


def _functions_running(codes: Sequence[CodeType]) -> Roots:
    """Return the functions that have this code, and the modules that define it.

    The collector does not list functions that gc.freeze has hidden; the globals that they read are
    still found, in their modules.
    """
    functions = [f for f in gc.get_referrers(*codes) if isinstance(f, FunctionType)]
    functions.sort(key=lambda f: (f.__module__ or "", f.__qualname__, id(f)))
    files = {code.co_filename for code in codes}
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        # not module.__file__: a lazily imported module would be imported, or raise
        if not is_foreign(name) and raw_attributes(module).get("__file__") in files
    ]
    return (
        *((f.__qualname__, f) for f in functions if f.__module__ and not is_foreign(f.__module__)),
        *((module.__name__, module) for module in modules),
    )


class _Walker:
    """Visits each object once, depth first, and records it in ``state``.

    A visit adds the object to the fingerprint and pushes its parts (`_push`), which `run` visits in
    the order in which they were pushed. `_entry` pushes a part that guards can read again by a key.
    ``before_run``: the program has not run yet, so it is not known which code runs.
    """

    def __init__(self, names: CodeNames, executed: ExecutedCode | None) -> None:
        self.names = names
        self.before_run = executed is None
        self.executed: Mapping[int, CodeType] = {} if executed is None else executed.codes
        self.state = ReachedState()
        self.fingerprint = self.state.fingerprint
        self.entered: set[int] = set()  # ids of the code of functions whose reads are followed
        self._visits: dict[int, int] = {}  # id of an object -> the number of its first visit
        self._pending: list[tuple[str, Any]] = []  # a stack of (path, object)

    def run(self, roots: Roots) -> None:
        """Visit all objects that can be reached from ``roots``."""
        self._pending += reversed(roots)
        while self._pending and not (self.before_run and len(self._visits) >= MAX_OBJECTS):
            path, value = self._pending.pop()
            num_pending, num_added = len(self._pending), len(self.fingerprint.paths)
            try:
                self._visit(path, value)
            except PlanningError:
                raise
            except Exception:
                if is_foreign(module_of(type(value))):
                    raise
                # A method of the user's class raised, such as __len__. `_object` calls none.
                del self._pending[num_pending:]
                self.fingerprint.truncate(num_added)
                self._mark_visited(value)
                self._object(path, value)
            self._pending[num_pending:] = reversed(self._pending[num_pending:])

    def _mark_visited(self, value: object) -> None:
        self._visits.setdefault(id(value), len(self._visits))
        self.fingerprint.keep_alive.append(value)

    def _push(self, path: str, value: Any) -> None:
        self._pending.append((path, value))

    def _entry(self, holder: Any, key: Any, path: str) -> None:
        """Record ``holder[key]`` as a place that guards read, and push its value."""
        try:
            value = holder[key]
        except LookupError:  # another thread has removed it
            return
        self.state.add_entry(holder, key, value, path)
        self._pending.append((path, value))

    def _items(self, path: str, items: Iterable[Any]) -> None:
        for i, item in enumerate(items):
            self._push(f"{path}[{i}]", item)

    def _entries(self, space: dict[str, Any], names: Iterable[str], path: str) -> None:
        for name in names:
            self._entry(space, name, f"{path}.{name}")

    def _visit(self, path: str, value: Any) -> None:
        """Record an object, and push its parts."""
        kind, state = type(value), self.state
        if isinstance(value, PLAIN):
            self.fingerprint.add(
                path, kind, repr(value) if kind in (float, complex, slice) else value
            )
            if kind.__flags__ & _HEAP_TYPE and id(value) not in self._visits:  # a user's subclass
                self._mark_visited(value)
                self._attributes(path, value)
            return
        if kind in WEAK_PROXIES:
            self._wrapper(path, kind, referent_of(value))
            return
        if (number := self._visits.get(id(value))) is not None:
            self.fingerprint.add(path, "seen", number)
            return
        self._mark_visited(value)
        match value:  # a class may match several cases: the order counts
            case torch.Tensor():
                self._tensor(path, value)
            case nn.Module():
                self._torch_module(path, value)
            case FunctionType():
                self._function(path, value)
            case MethodType():
                self._wrapper(path, "method", value.__func__, value.__self__)
            case functools.partial():
                self._partial(path, value)
            case enum.Enum():
                self._enum(path, value)
            case functools._lru_cache_wrapper():
                state.caches.append((path, value))
                self._wrapper(path, "cached", value.__wrapped__)
            case staticmethod() | classmethod():
                self._wrapper(path, kind, value.__func__)
            case property():
                self._wrapper(path, "property", value.fget)
            case _ if isinstance(value, _C_FUNCTIONS):
                self.fingerprint.add_by_identity(path, value)
                owner = getattr(value, "__self__", None)
                if owner is not None and not isinstance(owner, (ModuleType, type)):
                    self._push(f"{path}{METHOD_OWNER}", owner)
            case ModuleType():
                self._python_module(path, value)
            case type():
                self._class(path, value)
            case threading.local():
                self._thread_local(path, value)
            case _ if is_iterator(value):
                state.generators.append((path, value))
                self.fingerprint.add_by_identity(path, value)
            case list() | tuple() | collections.deque():
                self._sequence(path, value)
            case MethodWrapperType():
                self._wrapper(path, value.__name__, value.__self__)
            case _ if isinstance(value, DICT_VIEWS):
                self._wrapper(path, kind, value.mapping)
            case dict() if value is sys.modules:
                self.fingerprint.add_by_identity(path, value)
                parts = (part for code in self.executed.values() for part in with_nested(code))
                strings = {text for part in parts for text in string_constants(part)}
                for name in sorted(strings & sys.modules.keys()):
                    self._imported_module(name)
            case dict() if value is _BUILTINS:
                self.fingerprint.add_by_identity(path, value)
            case dict() | MappingProxyType() if kind.__getitem__ in _DICT_LOOKUPS:
                self._mapping(path, value)
            case set() | frozenset():
                self._set(path, value)
            case np.ndarray():
                self._array(path, value)
            case _ if isinstance(value, _BYTE_BUFFERS):
                state.arrays.append((path, value))
                self.fingerprint.add(path, "array", kind)
            case io.StringIO() | io.BytesIO() if self.before_run:
                state.arrays.append((path, value))
                self.fingerprint.add_by_identity(path, value)
            case np.generic():
                self.fingerprint.add(path, kind, repr(value))
            case _ if isinstance(value, _RANDOM_GENERATORS):
                state.generators.append((path, value))
                self.fingerprint.add_by_identity(path, value)
                if isinstance(value, torch.Generator) and "initial_seed" in self.names.names:
                    state.add_getter(f"{path}.initial_seed()", value.initial_seed)
            case weakref.ReferenceType():
                self._wrapper(path, "reference", value())
            case contextvars.ContextVar():
                state.context_variables.append((path, value))
                self._wrapper(path, "variable", value.get(None))
            case _:
                self._object(path, value)

    def _wrapper(self, path: str, description: object, *parts: object) -> None:
        """Record an object that is no more than its parts."""
        self.fingerprint.add(path, description)
        for part in parts:
            self._push(path, part)

    # -- code --------------------------------------------------------------------------------------

    def _function(self, path: str, function: FunctionType) -> None:
        """Record a function: by its parts if its code is followed, else by identity."""
        code, foreign = function.__code__, is_foreign(function.__module__)
        runs = is_users(code) if self.before_run else id(code) in self.executed
        is_generated = code.co_filename.startswith("<") and foreign
        if runs and not is_generated:
            self._enter(path, function)
            return
        self.fingerprint.add_by_identity(path, function)
        if "__wrapped__" in function.__dict__:  # the user's function, in a library's decorator
            self._push(path, function.__dict__["__wrapped__"])
        if not (self.before_run and foreign):
            self._attributes(path, function)

    def _enter(self, path: str, function: FunctionType) -> None:
        """Record a function whose code is followed, and push the state that this code mentions."""
        code = function.__code__
        self.entered.add(id(code))
        self.fingerprint.keep_alive.append(code)
        self.fingerprint.add(path, "function", id(code))
        if self.before_run:
            self.names.add(code)
        if is_layer(code):  # it reads its module and its arguments
            return
        self.state.functions.append((path, function))
        short_name = function.__qualname__.rpartition("<locals>.")[2]
        self._closure(function, short_name)
        self._defaults(function, short_name)
        self._globals(function)
        self._attributes(short_name, function)

    def _closure(self, function: FunctionType, short_name: str) -> None:
        """Visit the contents of a function's closure cells."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for name, cell in cells:
            path = f"{name} (closure of {short_name})"
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                self.fingerprint.add(path, "empty")
                continue
            self.state.cells.append((path, cell))
            self._push(path, content)

    def _defaults(self, function: FunctionType, short_name: str) -> None:
        """Visit the default values of a function's arguments."""
        code, defaults = function.__code__, function.__defaults__ or ()
        first = code.co_argcount - len(defaults)
        for name, default in zip(code.co_varnames[first : code.co_argcount], defaults):
            self._push(f"{name} (default of {short_name})", default)
        for name in function.__kwdefaults__ or ():
            self._entry(function.__kwdefaults__, name, f"{name} (default of {short_name})")

    def _globals(self, function: FunctionType) -> None:
        """Record the globals, replaced builtins and imported modules that a function mentions."""
        code, space = function.__code__, function.__globals__
        origin = f"global of {space.get('__name__', '?')}"
        for name in sorted({name for part in with_nested(code) for name in part.co_names}):
            if name in space:
                self._entry(space, name, f"{name} ({origin})")
            elif not isinstance(_BUILTINS.get(name), (BuiltinFunctionType, type, type(None))):
                self._entry(_BUILTINS, name, f"{name} (of builtins)")
            for module in (name, f"{space.get('__package__')}.{name}"):  # `import` in a function
                if module in sys.modules:
                    self._imported_module(module)
        for part in with_nested(code):
            if not _IMPORT_FUNCTIONS.isdisjoint(part.co_names):
                for name in string_constants(part):
                    if name in sys.modules and not is_foreign(name):
                        self._entry(sys.modules, name, name)
        if "globals" in code.co_names:  # it may compute the name of any global
            for name, value in list(space.items()):
                if isinstance(value, (*PLAIN, list, dict, torch.Tensor)) and name[:2] != "__":
                    self._entry(space, name, f"{name} ({origin})")

    def _imported_module(self, name: str) -> None:
        if not is_foreign(name):
            self._entry(sys.modules, name, name)
        elif not self.before_run:
            self._push(name, sys.modules[name])

    def _partial(self, path: str, value: functools.partial[Any]) -> None:
        """Visit the function and the arguments of a `functools.partial`."""
        self.fingerprint.add(path, "partial", len(value.args), tuple(value.keywords))
        for name in ("func", "args"):
            self.state.attributes.append((path, value, name))
        self._push(path, value.func)
        if isinstance(f := value.func, BuiltinFunctionType) and isinstance(
            guard_for(f"{f.__module__}.{f.__qualname__}"), Unguarded
        ):
            self.state.unguarded.append((path, f))
        for i, argument in enumerate(value.args):
            self._push(f"{path}({i})", argument)
        self.state.sized.append((path, value.keywords))
        for key in value.keywords:
            self._entry(value.keywords, key, f"{path}({key})")
        self._attributes(path, value)

    def _class(self, path: str, cls: type) -> None:
        """Record a class by identity, and the entries of its bases that followed code reads."""
        self.fingerprint.add(path, "class", id(cls))
        if not is_foreign(module_of(type(cls))):
            self._push(path, type(cls))
        for base in cls.__mro__:
            if base in (object, nn.Module):
                continue
            space, prefix = vars(base), base.__name__
            if is_foreign(module_of(base)):
                if issubclass(base, nn.Module) and "forward" in space:  # a user may replace it
                    self._entry(space, "forward", f"{prefix}.forward")
                continue
            self.state.sized.append((f"{prefix}.*", space))
            for name, entry in list(space.items()):
                if self._reads_class_entry(name, entry):
                    self._entry(space, name, f"{prefix}.{name}")

    def _reads_class_entry(self, name: str, entry: Any) -> bool:
        """Return whether followed code may read an entry of a user's class."""
        if name in self.names.names and name not in _CLASS_ATTRIBUTES:
            return True
        match entry:
            case staticmethod() | classmethod():
                entry = entry.__func__
            case property():
                entry = entry.fget
            case _:
                pass
        if isinstance(entry, FunctionType):
            if self.before_run:
                return name in _IMPLICIT_METHODS
            return id(entry.__code__) in self.executed
        return self.names.match_all and not name.startswith("__") and not callable(entry)

    # -- Python modules ----------------------------------------------------------------------------

    def _python_module(self, path: str, module: ModuleType) -> None:
        """Record the entries of a Python module that followed code mentions."""
        self.fingerprint.add(path, "python module", module.__name__)
        space, prefix = vars(module), module.__name__
        names = sorted(self.names.names & space.keys())
        if not is_foreign(prefix):
            self._entries(space, names, prefix)
            return
        for name in names:
            self._foreign_entry(space, name, f"{prefix}.{name}")
        if callable(getter := guard_for(prefix)):
            self.state.add_getter(prefix, getter)
        for name in sorted(self.names.names & vars(type(module)).keys()):
            # The settings in torch.backends are properties of the module's class.
            if isinstance(value := getattr(module, name, module), _DATA):
                where = f"{prefix}.{name}"
                self.state.add_getter(where, functools.partial(getattr, module, name))
                if isinstance(guard_for(where), Unguarded):
                    self.state.unguarded.append((where, value))

    def _foreign_entry(self, space: dict[str, Any], name: str, path: str) -> None:
        """Record an attribute of a module of Python, torch or numpy."""
        value = space[name]
        if isinstance(value, (FunctionType, BuiltinFunctionType, type)):  # a user may replace it
            if isinstance(value, type) and callable(getter := guard_for(f"{path}.__new__")):
                self.state.add_getter(path, getter)
            self.state.add_entry(space, name, value, path)
            self.fingerprint.add_by_identity(path, value)
        elif self.before_run:
            return
        elif isinstance(value, ModuleType):
            if not (is_foreign(value.__name__) and is_pure_module(value.__name__)):
                self._push(path, value)
        else:
            if callable(getter := guard_for(path)):
                self.state.add_getter(path, getter)
            if isinstance(value, _DATA) or type(value) in _CONTAINERS:
                self._entry(space, name, path)

    # -- torch modules and tensors -----------------------------------------------------------------

    def _torch_module(self, path: str, module: nn.Module) -> None:
        """Record the attributes, parameters, buffers, submodules and hooks of an nn.Module."""
        check_module(path, module)
        state, space = self.state, vars(module)
        prefix = f"{path}." if path else ""
        state.modules.append(module)
        state.objects.append(module)
        self.fingerprint.add(path, "module", bool(path))
        self._push(path, type(module))
        names = self.names.select(space)
        if is_foreign(module_of(type(module))):  # a layer of torch: it does not compute names
            names = [name for name in names if name in self.names.names]
        for name in names:
            if name not in _TORCH_ATTRIBUTES:
                self._entry(space, name, f"{prefix}{name}")
        tensors = (module._parameters, module._buffers)
        state.sized += [(f"{path}.*", held) for held in (space, *tensors, module._modules)]
        state.ordered += (*tensors, module._modules)
        for held in tensors:
            for name, x in list(held.items()):
                state.add_entry(held, name, x, f"{prefix}{name}")
                self._parameter(f"{prefix}{name}", x)
        for name in list(module._modules):
            self._entry(module._modules, name, f"{prefix}{name}")
        for kind in FORWARD_HOOKS:
            if hooks := space.get(kind, {}):
                for i, key in enumerate(hooks):
                    self._entry(hooks, key, f"{prefix}{kind.strip('_')}[{i}]")
                state.sized.append((f"{path}: {kind}", hooks))
                state.ordered.append(hooks)
        self.fingerprint.add(path, *(len(space.get(kind, ())) for kind in BACKWARD_HOOKS))

    def _parameter(self, path: str, x: torch.Tensor | None) -> None:
        """Record a parameter or buffer."""
        if x is None:
            self.fingerprint.add(path, None)
        elif (number := self._visits.get(id(x))) is not None:  # tied
            self.fingerprint.add(path, "seen", number)
        else:
            self._mark_visited(x)
            if not is_dense(x):  # as in `_tensor`
                self.fingerprint.add_by_identity(path, x)
                return
            self.state.parameters.append((path, x))
            with DisableTorchFunctionSubclass():
                is_parameter = isinstance(x, nn.Parameter)
                description = (is_parameter, tuple(x.shape), x.dtype, x.requires_grad, has_hooks(x))
            self.fingerprint.add(path, *description)
            self._tensor_attributes(path, x)

    def _tensor(self, path: str, x: torch.Tensor) -> None:
        """Record a tensor that no module holds."""
        if not is_dense(x):  # a capture refuses to read it
            self.fingerprint.add_by_identity(path, x)
            return
        self.state.tensors.append((path, x))
        self.fingerprint.add(path, "tensor", *tensor_metadata(x, strides=self.state.reads_strides))
        if "grad" in self.names.names:
            self.state.add_getter(f"{path}.grad is None", lambda: not x.is_leaf or x.grad is None)
        self._tensor_attributes(path, x)

    def _tensor_attributes(self, path: str, x: torch.Tensor) -> None:
        """Visit the Python attributes of a tensor, except dtensor's own."""
        space = raw_attributes(x)
        if REMOTE_VALUE not in space and module_of(type(x)).partition(".")[0] == "dtensor":
            return
        if self.names.match_all:
            self.state.tensor_attributes.append((f"{path}.*", space))
        self._entries(space, (n for n in self.names.select(space) if n != REMOTE_VALUE), path)

    # -- containers and arrays ---------------------------------------------------------------------

    def _sequence(self, path: str, items: Any) -> None:
        """Record type and length of a list, tuple or deque, and visit its items."""
        self.fingerprint.add(path, type(items), len(items))
        self._container_attributes(path, items)
        if isinstance(items, tuple):
            self._items(path, items)
            return
        self.state.sized.append((path, items))
        if not (self.before_run and len(items) > MAX_ITEMS):
            for i in range(len(items)):
                self._entry(items, i, f"{path}[{i}]")

    def _mapping(self, path: str, items: Mapping[Any, Any]) -> None:
        """Record type, length and keys of a dict, and visit its values."""
        self.fingerprint.add(path, type(items), len(items))
        self._container_attributes(path, items)
        self.state.sized.append((path, items))
        if self.before_run and len(items) > MAX_ITEMS:
            return
        self.state.ordered.append(items)
        for key in list(items):
            if isinstance(key, PLAIN):
                self.fingerprint.add(path, type(key), key)
            else:
                self.fingerprint.add_by_identity(path, key)
            self._entry(items, key, f"{path}{key_text(key)}")

    def _set(self, path: str, items: set[Any] | frozenset[Any]) -> None:
        """Record the items of a set: plain values by repr, other objects by id."""
        held = list(items)
        if all(isinstance(item, PLAIN) for item in held):
            contents = tuple(sorted((type(item).__name__, repr(item)) for item in held))
        else:
            contents = tuple(sorted(map(id, held)))
        self.fingerprint.add(path, type(items), contents)
        self.state.sized.append((path, items))

    def _container_attributes(self, path: str, items: Any) -> None:
        """Record the class and the attributes of a container of a user's class."""
        if is_foreign(module_of(type(items))):
            return
        self._push(path, type(items))
        if raw_attributes(items) is not items:
            self._attributes(path, items)

    def _array(self, path: str, value: np.ndarray[Any, Any]) -> None:
        """Record dtype, shape and strides of an array; visit the items of an object array."""
        self.state.arrays.append((path, value))
        if not value.dtype.hasobject:
            self.fingerprint.add(path, "array", str(value.dtype), value.shape, value.strides)
            return
        self.fingerprint.add(path, "array", value.shape)
        self._items(path, value.reshape(-1).tolist())

    # -- objects -----------------------------------------------------------------------------------

    def _enum(self, path: str, member: enum.Enum) -> None:
        """Record a member of an enum by its name, value and attributes."""
        self.fingerprint.add(path, type(member), member.name)
        space = raw_attributes(member)
        self._entry(space, "_value_", path)
        self._entries(
            space, (n for n in self.names.select(space) if n not in _ENUM_ATTRIBUTES), path
        )
        if not is_foreign(module_of(type(member))):
            self._push(path, type(member))

    def _thread_local(self, path: str, value: threading.local) -> None:
        """Record an object whose attributes differ between threads: guards read them from the
        object, because each thread has its own `__dict__`."""
        self.fingerprint.add(path, "thread local")
        self._push(path, type(value))
        space = raw_attributes(value)
        if self.before_run:
            self.state.sized.append((f"{path}.*", space))
        else:
            self.state.add_getter(path, lambda: self.names.select(raw_attributes(value)))
        for name in self.names.select(space):
            self.state.attributes.append((f"{path}.{name}", value, name))
            self._push(f"{path}.{name}", space[name])

    def _object(self, path: str, value: Any) -> None:
        """Record an object of any other class, as `guard_for_class` says."""
        kind = type(value)
        root = module_of(kind).partition(".")[0]
        if self.before_run and root in _IDENTITY_BEFORE_RUN:
            self.fingerprint.add_by_identity(path, value)
            return
        guard = ByParts() if self.before_run or root == "dtensor" else guard_for_class(kind)
        if isinstance(guard, ByParts):
            self._parts_of_object(path, value, guard.getter)
            return
        if guard == "by repr":
            self.fingerprint.add(path, kind, repr(value))
        else:
            self.fingerprint.add_by_identity(path, value)
        class_name = f"{module_of(kind)}.{kind.__qualname__}"
        if guard == "unknown" and not _is_written(value):
            self.state.unguarded.append((path, value))
        elif callable(getter := guard_for(class_name)):
            self.state.add_getter(class_name, getter)

    def _parts_of_object(
        self, path: str, value: Any, getter: Callable[[Any], object] | None
    ) -> None:
        """Record an object by its class, items and attributes, and by the result of ``getter``."""
        kind, state, space = type(value), self.state, raw_attributes(value)
        foreign = is_foreign(module_of(kind))
        if getter is not None:
            state.add_getter(path, functools.partial(getter, value))
            if foreign:  # the getter returns its state, except attributes that a user has added
                self._entries(space, sorted(self.names.names & space.keys()), path)
                return
        if issubclass(kind, BaseException):
            self._push(path, value.args)
        self.fingerprint.add(path, "object")
        state.objects.append(value)
        self._push(path, kind)
        if (items := raw_items(value)) is not None:  # a container with its own lookup
            state.containers.append(value)
            if issubclass(kind, dict):
                keys = [k if type(k) in PLAIN else id(k) for k in dict.keys(value)]
                self.fingerprint.add(path, "keys", *keys)
            self._items(path, items)
        if module_of(kind).partition(".")[0] == "dtensor":  # holds the user's modules
            for part in space.values():
                if isinstance(part, nn.Module):
                    self._push(path, part)
            return
        if space is not NO_ATTRIBUTES:
            state.sized.append((f"{path}.*", space))
        # Foreign code, such as an optimizer's, is not followed: it may read any attribute.
        self._entries(space, list(space) if foreign else self.names.select(space), path)
        self._slots(path, value)

    def _slots(self, path: str, value: Any) -> None:
        """Record the attributes that are stored in `__slots__`."""
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name in ("__dict__", "__weakref__"):
                    continue
                try:
                    part = object.__getattribute__(value, name)
                except AttributeError:  # not assigned yet
                    continue
                self.state.attributes.append((f"{path}.{name}", value, name))
                self._push(f"{path}.{name}", part)

    def _attributes(self, path: str, value: Any) -> None:
        space = raw_attributes(value)
        if space is not NO_ATTRIBUTES:  # an empty dict may get entries
            self.state.sized.append((f"{path}.*", space))
        self._entries(space, self.names.select(space), path)


def _is_written(value: object) -> bool:
    """Return whether an object is a file that is not read: closed, or open for writing."""
    return isinstance(value, io.IOBase) and (value.closed or not value.readable())
