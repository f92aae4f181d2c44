"""Registers the user's custom ops and reductions in actors that lack them.

    needed = Needed.of(program, device, known)  # on the controller: where each op comes from
    needed.provide()                            # in an actor: returns [(op that failed, reason)]

An actor imports the module of an op. If the op belongs to the user's script, or was redefined since
the launch began (`importlib.reload`), its kernel is pickled by value. For an op without a Python
kernel the actor loads the controller's shared libraries (`torch.ops.load_library`). To find a
kernel, the controller calls the op on empty CPU tensors under a profiler, which stops the call
where the kernel begins: torch offers no other way. Invariants: no kernel runs, no GPU is needed.
Ops that an actor has stay unless they were redefined.
"""

# Torch's operators and cloudpickle have no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import copyreg
import importlib
import inspect
import io
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import torch

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.program import Program
from dtensor.daft.remote_exceptions import interrupts, reason_of
from dtensor.daft.tasks.values import ByValuePickler, pickled
from dtensor.gc_pause import collector_paused
from dtensor.numerics import BUILT_IN, REDUCTIONS
from dtensor.op_names import op_packet
from dtensor.private_torch import (
    OPDEFS,
    CustomOpDef,
    OpNamespace,
    OpOverload,
    OpOverloadPacket,
    below_autograd,
    dispatch_dump,
    get_operation_overload,
    keys_of,
)
from dtensor.signals import held_back

_cloudpickle: Any = cloudpickle  # a package without types

KNOWN = frozenset({"aten", "prim", "prims", "dt"})
"""Namespaces of ops that every process has."""
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DAFT = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
_PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOrigin:
    """How an actor gets an op: by importing a module, or by a pickled kernel."""

    name: str  # "mylib::scale", "mylib::scale.out"
    schema: str
    module: str | None
    kernel: bytes | None
    reason: str  # why there is no pickled kernel, "" if there is one
    is_redefined: bool  # redefined since the launch began: an import may give the former definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The needs of a program besides torch and dtensor. False if there are none."""

    origins: tuple[OpOrigin, ...]
    paths: tuple[str, ...]
    libraries: tuple[str, ...]
    functions: bool
    reductions: bytes | None

    def __bool__(self) -> bool:
        return bool(self.origins) or self.functions or self.reductions is not None

    @staticmethod
    def of(program: Program, device: torch.device, known_ops: KnownOps) -> Needed:
        """Find the custom ops that a program names, and those that their kernels refer to."""
        unvisited: list[str] = []
        functions = False
        for value in (value for _, f in program.functions for _, value in f.bindings):
            if isinstance(value, OpOverload):
                unvisited.append(value.name())
            elif isinstance(value, FunctionType) and not _is_known_module(value.__module__):
                functions = True
                unvisited += _names_in(value)
        if unvisited or functions:
            known_ops.learn()
        origins: dict[str, OpOrigin] = {}
        while unvisited:
            name = unvisited.pop()
            if name in origins or name.partition("::")[0] in KNOWN:
                continue
            origins[name], referenced = _origin(name, device, known_ops)
            unvisited += referenced
        return Needed(
            origins=tuple(origins[name] for name in sorted(origins)),
            paths=tuple(os.path.abspath(path) for path in sys.path),
            libraries=tuple(sorted(torch.ops.loaded_libraries)),
            functions=functions,
            reductions=_reductions(known_ops),
        )

    def provide(self) -> list[tuple[str, str]]:
        """Register the missing ops in this process. Return the ops that could not be registered,
        each with the reason."""
        sys.path += [p for p in self.paths if p not in sys.path and os.path.exists(p)]
        for reduction in _cloudpickle.loads(self.reductions) if self.reductions else ():
            REDUCTIONS[reduction.name] = reduction
        lacking, num_before = self._provide(self.origins), len(self.origins) + 1
        while 0 < len(lacking) < num_before:  # a kernel may need another op
            num_before = len(lacking)
            names = {name for name, _ in lacking}
            lacking = self._provide([o for o in self.origins if o.name in names])
        return lacking

    def _provide(self, origins: Sequence[OpOrigin]) -> list[tuple[str, str]]:
        """Register ops that are missing: by importing their module, loading a library, or from the
        pickled kernel. Return the ops that could not be registered, each with the reasons."""
        lacking: list[tuple[str, str]] = []
        for origin in origins:
            reasons = [origin.reason] if origin.reason else []
            attempts = (
                (_by_value,) if origin.is_redefined else (_by_import, self._by_library, _by_value)
            )
            for attempt in attempts:
                if (
                    not origin.is_redefined
                    and is_registered(origin.name)
                    and origin.name not in _kernels
                ):
                    break
                try:
                    attempt(origin)
                except BaseException as error:  # a user's module may raise anything
                    if interrupts(error):
                        raise
                    reasons.append(reason_of(error))
            if not is_registered(origin.name) or (origin.is_redefined and reasons):
                lacking.append((origin.name, "; ".join(reasons)))
        return lacking

    def _by_library(self, origin: OpOrigin) -> None:
        """Load the controller's C++ libraries, one of which may define the op."""
        if origin.module is None:
            for path in self.libraries:
                torch.ops.load_library(path)


def _reductions(known_ops: KnownOps) -> bytes | None:
    """Return the pickled reductions that users registered, None if there are none."""
    registered = [REDUCTIONS[name] for name in REDUCTIONS if name not in BUILT_IN]
    if not registered:
        return None
    known_ops.learn()
    with known_ops.by_value():
        return pickled(registered)


def is_registered(name: str) -> bool:
    """Return whether an op is registered in this process."""
    return get_operation_overload(*_name_and_overload(name)) is not None


def _name_and_overload(name: str) -> tuple[str, str]:
    base, _, overload = name.partition(".")
    return base, overload


# -- in an actor -----------------------------------------------------------------------------------

_kernels: dict[str, Callable[..., Any]] = {}
"""Op to its kernel, for ops of this process whose kernel was pickled."""
_libraries: list[torch.library.Library] = []  # an op exists as long as its library


def _by_import(origin: OpOrigin) -> None:
    if origin.module not in (None, "__main__"):
        importlib.import_module(origin.module)


def _by_value(origin: OpOrigin) -> None:
    """Register an op with its pickled kernel, or replace the kernel of an earlier registration."""
    if origin.kernel is None:
        return
    name, kernel = origin.name, _cloudpickle.loads(origin.kernel)

    def run(*args: Any, **kwargs: Any) -> Any:
        return _kernels[name](*args, **kwargs)

    if name not in _kernels and is_registered(name):  # by an earlier version of its module
        definition: CustomOpDef = OPDEFS[name]
        for device in tuple(definition._backend_fns):
            definition.register_kernel(device, run)
    elif name not in _kernels:
        namespace, _, schema = origin.schema.partition("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        library.impl(name.partition("::")[2], run, "CompositeExplicitAutograd")
        _libraries.append(library)
    _kernels[name] = kernel


# -- in the controller -----------------------------------------------------------------------------


class KnownOps:
    """The custom ops and modules at the begin of the launch, or when they were first used. Actors
    may have these versions, which differ from later redefinitions in the controller."""

    def __init__(self) -> None:
        self._ops: dict[str, tuple[object, ...]] = {}
        self._specs: dict[str, object] = {}  # module to its spec, which a reload replaces
        self._recorded_modules: set[str] = set()
        self.learn()

    def learn(self) -> None:
        """Record ops and modules that are new."""
        for name in tuple(OPDEFS):
            self._ops.setdefault(name, _definition(name))
        for name in sys.modules.keys() - self._recorded_modules:
            self._recorded_modules.add(name)
            spec = _spec(sys.modules[name])
            if not _is_installed(name, getattr(spec, "origin", None)):
                self._specs[name] = spec

    def is_redefined(self, name: str, kernel: FunctionType | None) -> bool:
        """Return whether an op was redefined, or its module reloaded, since it was recorded."""
        base, _ = _name_and_overload(name)
        reloaded = kernel is not None and kernel.__module__ in {m.__name__ for m in self._reloaded}
        return reloaded or self._ops.get(base, ()) != _definition(base)

    @property
    def _reloaded(self) -> list[ModuleType]:
        modules = ((sys.modules.get(name), spec) for name, spec in self._specs.items())
        return [m for m, spec in modules if isinstance(m, ModuleType) and _spec(m) is not spec]

    @contextmanager
    def by_value(self) -> Generator[None]:
        """Within the block, objects of reloaded modules are pickled by value."""
        already = _cloudpickle.list_registry_pickle_by_value()
        modules = [m for m in self._reloaded if m.__name__ not in already]
        for module in modules:
            _cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                _cloudpickle.unregister_pickle_by_value(module)


def _definition(name: str) -> tuple[object, ...]:
    """Return a custom op's definition object and its kernels; () for another op."""
    definition: CustomOpDef | None = OPDEFS.get(name)
    return () if definition is None else (definition, *definition._backend_fns.values())


def _spec(module: object) -> object:
    try:  # not `module.__spec__`, which would import a lazily imported module
        return object.__getattribute__(module, "__dict__").get("__spec__")
    except Exception:  # an entry of sys.modules that is not a module
        return None


def _origin(name: str, device: torch.device, known_ops: KnownOps) -> tuple[OpOrigin, list[str]]:
    """Return the origin of an op, and the names of the ops that its kernel refers to."""
    op = _overload(name)
    kernel, reason = _kernel_of(op, device)
    module = kernel.__module__ if kernel is not None else None
    redefined = known_ops.is_redefined(name, kernel)
    data, more = None, list[str]()
    if kernel is not None:
        try:
            with known_ops.by_value():
                data, more = _pickled(kernel)
        except Exception as error:  # the kernel may refer to any object
            reason = f"its kernel does not pickle: {type(error).__name__}: {error}"
    if redefined and reason:
        reason = f"it was defined anew since the launch began, and {reason}"
    if module == "__main__" or (module is not None and _is_known_module(module)):
        module = None if data is not None else module
    return OpOrigin(
        name=name,
        schema=str(op._schema),
        module=module,
        kernel=data,
        reason=reason,
        is_redefined=redefined,
    ), more


def _overload(name: str) -> OpOverload:
    base, overload = _name_and_overload(name)
    return getattr(op_packet(base), overload or "default")


class _KernelFound(Exception):
    """Raised by the profiler where the kernel begins, so that the kernel does not run."""


def _kernel_of(op: OpOverload, device: torch.device) -> tuple[FunctionType | None, str]:
    """Return the Python function that executes an op on a device, or None and the reason."""
    if not re.search(r": registered at \S+\.py:\d+ ::", dispatch_dump(op.name())):
        return None, "it has no kernel in Python"
    kernel_frames: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not _is_library_code(frame) and not _is_of_import(frame):
            kernel_frames.append(frame)
            raise _KernelFound

    args, kwargs = _empty_arguments(op)
    keys = keys_of(device.type)
    outer = sys.getprofile()
    # otherwise a signal handler, or a callback of the collector, would be taken for the kernel
    with held_back(), collector_paused():
        try:
            with torch.no_grad(), below_autograd():
                sys.setprofile(profile)
                op.redispatch(keys, *args, **kwargs)
        except _KernelFound:
            pass
        except Exception as error:  # torch itself rejects the empty tensors
            return None, f"its kernel cannot be found: {type(error).__name__}: {error}"
        finally:
            sys.setprofile(outer)
    if not kernel_frames:
        return None, "its kernel cannot be found"
    return _function_of(kernel_frames[0], op)


def _function_of(frame: FrameType, op: OpOverload) -> tuple[FunctionType | None, str]:
    """Return the function that runs in a frame, with the defaults of the op's schema, or None and
    the reason."""
    code, schema = frame.f_code, op._schema.arguments
    num_parameters = code.co_argcount + code.co_kwonlyargcount
    is_variadic = bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    is_method = num_parameters > 0 and code.co_varnames[0] in ("self", "cls")
    if is_method or not (num_parameters == len(schema) or is_variadic):
        return None, f"its kernel, {code.co_qualname}, is not a plain function"
    closure = tuple(CellType(frame.f_locals[name]) for name in code.co_freevars)
    function = FunctionType(code, frame.f_globals, code.co_name, None, closure)
    # torch omits arguments that equal the schema's defaults
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    positional = code.co_varnames[: code.co_argcount]
    names = [a.name for a in schema if not a.kwarg_only][: len(positional)]
    function.__defaults__ = tuple(defaults[name] for name in names if name in defaults) or None
    function.__kwdefaults__ = {
        name: defaults[name]
        for name in code.co_varnames[code.co_argcount : num_parameters]
        if name in defaults
    }
    return function, ""


def _empty_arguments(op: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of the types in the op's schema: empty tensors, zeros."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    plain: dict[str, Any] = {
        "Tensor": torch.empty(0),
        "int": 0,
        "number": 0,
        "float": 0.0,
        "bool": False,
        "str": "",
        "Device": torch.device("cpu"),
    }
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind.startswith("Optional"):
            value = None
        elif kind.startswith("List["):
            value = [plain["Tensor"]] if "Tensor" in kind else []
        else:
            value = plain.get(kind, 0)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


class _Pickler(ByValuePickler):
    """Pickles a function by value, and records the ops that it refers to."""

    ops: list[str]

    def reducer_override(self, obj: object) -> Any:
        """Record the ops of ``obj``, and reduce it as `ByValuePickler` does."""
        if isinstance(obj, CustomOpDef):
            self.ops.append(obj._opoverload.name())
        elif isinstance(obj, OpOverload):
            self.ops.append(obj.name())
        elif isinstance(obj, OpOverloadPacket):
            self.ops += [getattr(obj, overload).name() for overload in obj.overloads()]
        elif isinstance(obj, FunctionType):  # `torch.ops.mylib.scale` in a function's code
            for space, op in itertools.permutations(obj.__code__.co_names, 2):
                if get_operation_overload(f"{space}::{op}", "") is not None:
                    self.ops.append(f"{space}::{op}")
        return super().reducer_override(obj)


def _names_in(function: FunctionType) -> list[str]:
    """Return the ops that a function of a program refers to. Raises ProgramError if the function
    cannot be pickled."""
    try:
        return _pickled(function)[1]
    except Exception as error:  # the function may refer to any object
        raise ProgramError(
            f"The program calls {function.__qualname__}, which does not pickle: "
            f"{type(error).__name__}: {error}\n"
            f"fix: define it in a module that the actors can import"
        ) from error


def _pickled(function: FunctionType) -> tuple[bytes, list[str]]:
    """Pickle a function, by value if it cannot be imported. Return the pickle, and the ops that the
    function refers to."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.ops = []
    pickler.dump(function)
    return file.getvalue(), pickler.ops


_register_reducer: Any = copyreg.pickle
# A custom op's definition is unpickled as the op itself, which is called in the same way.
_register_reducer(CustomOpDef, lambda definition: (_overload, (definition._opoverload.name(),)))
# A function that uses torch.ops refers to these objects, which are modules of unusual classes.
_register_reducer(type(torch.ops), lambda _: (importlib.import_module, ("torch.ops",)))
_register_reducer(OpNamespace, lambda namespace: (_namespace, (namespace.name,)))


def _namespace(name: str) -> Any:
    return getattr(torch.ops, name)


def _is_library_code(frame: FrameType) -> bool:
    """Return whether the frame's code belongs to torch, daft or Python."""
    file = frame.f_code.co_filename
    if file.startswith("<"):  # generated code, or code typed at a prompt
        return frame.f_globals.get("__name__") != "__main__"
    path = os.path.abspath(file)
    inside = path.startswith((_TORCH, _DAFT))
    return inside or (path.startswith(_PYTHON) and "site-packages" not in path)


def _is_of_import(frame: FrameType | None) -> bool:
    """Return whether the frame belongs to an import that torch does before it calls the kernel."""
    while frame is not None and frame.f_code is not _kernel_of.__code__:
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "importlib"):
            return True
        frame = frame.f_back
    return False


def _is_installed(name: str, file: str | None) -> bool:
    """Return whether a module is installed, so that users neither edit nor reload it."""
    return name.partition(".")[0] in sys.stdlib_module_names or "site-packages" in (file or "")


def _is_known_module(name: str | None) -> bool:
    """Return whether every actor can import a module."""
    return (name or "").partition(".")[0] in ("torch", "dtensor", "builtins")
