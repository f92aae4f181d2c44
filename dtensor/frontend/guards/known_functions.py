"""How guards treat state outside the user's own code: a table of functions, attributes and classes.

    guard_for("math.sqrt")                 # PURE: reads its arguments alone, which are guarded
    guard_for("sys.getrecursionlimit")     # a getter: its result is compared before each call
    guard_for("time.time")                 # Unguarded("the clock"): a warning names the line, once
    guard_for("somelib._speedups.parse")   # Unguarded(): likewise, as it is not in the table

The table has names of functions ("pathlib.Path.read_text"), methods in C ("_random.Random.random"),
attributes of modules of Python and torch ("torch.backends.cudnn.benchmark"), and classes
("logging.Logger"). An entry holds for all names that it is a prefix of; the longest prefix counts.
A getter runs before each call of a step, so it must be cheap and change nothing.
"""

from __future__ import annotations

import builtins
import decimal
import locale
import logging
import os
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dtensor.kernel_flags import kernel_flags

Getter: TypeAlias = Callable[[], object]
"""Returns plain data that guards compare."""

_FOREIGN = {"torch", "numpy", "dtensor", "triton", "builtins", *sys.stdlib_module_names}
_FOREIGN -= {"__main__"}


def is_foreign(module_name: str | None) -> bool:
    """Return whether a module belongs to Python, torch, numpy or this package: guards do not follow
    its code. None is the module of builtins."""
    return (module_name or "builtins").partition(".")[0] in _FOREIGN


def module_of(kind: type) -> str:
    """Return the name of a class's module; "builtins" if it is not a string (Cython)."""
    name: object = kind.__module__
    return name if isinstance(name, str) else "builtins"


@dataclass(frozen=True, slots=True)
class Unguarded:
    """State that cannot be compared. ``source``: words for a warning ("the clock"); "" if the name
    of the function says it."""

    source: str = ""


PURE: Literal["pure"] = "pure"
Guard: TypeAlias = Literal["pure"] | Getter | Unguarded
_UNKNOWN = Unguarded()


@cache
def guard_for(name: str) -> Guard:
    """Return how reads through a function or attribute are guarded: the entry with the longest
    matching prefix. A name without a dot is a class method in C, such as `dict.fromkeys`, which the
    profiler reports without its class: these only make objects, so they are PURE."""
    prefix = name
    while prefix:
        if prefix in _TABLE:
            return _TABLE[prefix]
        prefix = prefix.rpartition(".")[0]
    return _UNKNOWN if "." in name else PURE


def _logger_levels() -> object:
    """Return the settings of the loggers that have a level or are disabled."""
    manager = logging.root.manager
    levels = [
        (name, logger.level, logger.disabled)
        for name, logger in list(manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled)
    ]
    return (manager.disable, logging.root.level, levels)


_DECIMAL = ("getcontext", "localcontext", "Decimal", "Context")
_CTYPES = ("_SimpleCData", "Structure", "Union", "Array")


def _decimal_context() -> object:
    """Return the settings of decimal's context, without the flags that a computation sets."""
    return _decimal_settings(decimal.getcontext())


def _decimal_settings(context: decimal.Context) -> object:
    traps = [signal.__name__ for signal, is_enabled in context.traps.items() if is_enabled]
    numbers = (context.prec, context.Emin, context.Emax, context.capitals, context.clamp)
    return (numbers, context.rounding, traps)


def _distributed_rank() -> object:
    distributed: Any = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and (distributed.get_rank(),)


_CLOCK = Unguarded("the clock")
_FILE = Unguarded("a file, or what there is of files")
_RANDOM = Unguarded("the system's random numbers")
_OTHER_PROCESS = Unguarded("what another process or thread gives")
_C = Unguarded("what a library of C gives")
_UNGUARDED: dict[str, Unguarded] = {
    **dict.fromkeys(("time", "now", "today", "utcnow", "posix.times", "timeit"), _CLOCK),
    **dict.fromkeys(("io.open", "builtins.open", "_io", "io", "mmap", "fileinput"), _FILE),
    **dict.fromkeys(("pathlib.Path", "posix", "os", "genericpath", "shutil", "glob"), _FILE),
    **dict.fromkeys(("posixpath.realpath", "posixpath.lexists", "posixpath.ismount"), _FILE),
    **dict.fromkeys(("json.load", "pickle.load", "linecache", "tempfile", "zipfile"), _FILE),
    **dict.fromkeys(("importlib.resources", "torch.load", "torch.hub", "torch.from_file"), _FILE),
    **dict.fromkeys((f"numpy.{name}" for name in ("load", "loadtxt", "genfromtxt")), _FILE),
    **dict.fromkeys((f"numpy.{name}" for name in ("fromfile", "memmap", "lib.npyio")), _FILE),
    **dict.fromkeys(("posix.urandom", "posix.getrandom", "secrets", "uuid.uuid1"), _RANDOM),
    **dict.fromkeys(
        ("uuid.uuid4", "random.SystemRandom", "torch.seed", "torch.random.seed"), _RANDOM
    ),
    **dict.fromkeys(
        (f"multiprocessing.{name}" for name in ("queues", "connection")), _OTHER_PROCESS
    ),
    **dict.fromkeys((f"multiprocessing.{name}" for name in ("managers", "pool")), _OTHER_PROCESS),
    **dict.fromkeys(("ctypes.CDLL", "ctypes.cdll", "ctypes.pythonapi", "ctypes.PyDLL"), _C),
    **dict.fromkeys(("ctypes.string_at", "ctypes.wstring_at", "ctypes.memmove"), _C),
    **dict.fromkeys(
        (f"torch.cuda.{name}" for name in ("memory", "mem_get_info", "utilization")),
        Unguarded("what a GPU is doing"),
    ),
    **dict.fromkeys(
        ("sys.getrefcount", "sys.getallocatedblocks", "gc"), Unguarded("what Python's memory holds")
    ),
    **dict.fromkeys(
        ("sys._getframe", "inspect.stack", "inspect.currentframe", "sys._current_frames"),
        Unguarded("the frames of its callers"),
    ),
    **dict.fromkeys(
        (
            *("random.Random.__init__", "numpy.random.default_rng"),
            "numpy.random._generator.default_rng",
        ),
        Unguarded("random numbers, the system's if no seed is given"),
    ),
    **dict.fromkeys(
        (
            *("torch.backends.mkldnn.enabled", "torch.backends.mkldnn.deterministic"),
            "torch.backends.cudnn.enabled",
        ),
        Unguarded("a setting that torch's export turns off"),
    ),
    "builtins.input": Unguarded("what is typed"),
}
_GETTERS: dict[str, Getter] = {
    "sys.getrecursionlimit": sys.getrecursionlimit,
    "sys.getswitchinterval": sys.getswitchinterval,
    "sys.get_int_max_str_digits": sys.get_int_max_str_digits,
    **dict.fromkeys(("posix.getcwd", "posixpath.abspath", "posixpath.relpath"), os.getcwd),
    **dict.fromkeys(("threading.active_count", "threading.activeCount"), threading.active_count),
    "threading.enumerate": lambda: sorted(thread.name for thread in threading.enumerate()),
    "threading.current_thread": lambda: threading.current_thread().name,
    "threading.main_thread": lambda: threading.main_thread().name,
    **dict.fromkeys(("locale", "_locale"), lambda: locale.setlocale(locale.LC_ALL)),
    **dict.fromkeys(
        (
            *("logging.getLogger", "logging.getLevelName", "logging.root", "logging.Manager"),
            *(f"logging.Logger.{of}" for of in ("isEnabledFor", "getEffectiveLevel", "getChild")),
        ),
        _logger_levels,
    ),
    **dict.fromkeys((f"decimal.{name}" for name in _DECIMAL), _decimal_context),
    **dict.fromkeys(("random.Random.getstate", "random.getstate"), random.getstate),
    **dict.fromkeys(
        ("numpy.geterr", "numpy._core._ufunc_config.geterr"), lambda: repr(np.geterr())
    ),
    "warnings.filters": lambda: list(warnings.filters),
    **dict.fromkeys(("torch.initial_seed", "torch.random.initial_seed"), torch.initial_seed),
    "torch.get_default_dtype": torch.get_default_dtype,
    "torch.get_default_device": lambda: str(torch.get_default_device()),
    "torch.get_num_threads": torch.get_num_threads,
    "torch.get_num_interop_threads": torch.get_num_interop_threads,
    "torch.is_warn_always_enabled": torch.is_warn_always_enabled,
    "torch.distributed": _distributed_rank,
    **dict.fromkeys(
        (
            *("torch.backends", "torch.utils.deterministic", "torch.get_deterministic_debug_mode"),
            *("torch.are_deterministic_algorithms_enabled", "torch.get_float32_matmul_precision"),
            "torch.is_deterministic_algorithms_warn_only_enabled",
        ),
        kernel_flags,
    ),
}
_PURE = (
    # Modules whose functions compute with their arguments alone, and whose data never changes.
    *("math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "typing"),
    *("collections", "_collections", "_collections_abc", "dataclasses", "copy", "copyreg", "re"),
    "typing_extensions",
    *("_sre", "enum", "abc", "_abc", "types", "inspect", "string", "_string", "textwrap", "stat"),
    *("numbers", "fractions", "statistics", "_statistics", "bisect", "_bisect", "heapq", "_heapq"),
    *("contextlib", "warnings", "_warnings", "json", "_json", "struct", "_struct", "hashlib"),
    *("_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "base64", "binascii"),
    *("zlib", "keyword", "ast", "_ast", "dis", "opcode", "pprint", "reprlib", "traceback", "array"),
    *("importlib", "_imp", "pickle", "_pickle", "pkgutil", "platform", "sysconfig", "graphlib"),
    *("difflib", "unicodedata", "colorsys", "calendar", "datetime", "_datetime", "zoneinfo"),
    *("decimal", "_decimal", "contextvars", "_contextvars", "weakref", "_weakref", "_weakrefset"),
    *("logging", "threading", "_thread", "posixpath", "ntpath", "argparse", "atexit", "unittest"),
    *("sys", "random", "_random", "codecs", "_codecs", "encodings", "pathlib", "uuid", "html"),
    *("ctypes", "_ctypes", "urllib.parse", "shlex", "configparser", "_strptime", "__future__"),
    *("errno", "fnmatch", "torch", "numpy", "dtensor", "triton", "builtins", "ipaddress"),
    # Functions of other modules that also compute with their arguments alone.
    "secrets.compare_digest",
    *("os.path", "os.fspath", "os.getpid", "os.cpu_count", "os.name", "os.sep", "os.linesep"),
    *("os.environ", "os.getenv", "os._Environ", "os.PathLike", "os.strerror", "posix.getpid"),
    *("posix.fspath", "posix.cpu_count", "posix.strerror", "os.fsencode", "os.fsdecode"),
    *("pathlib.Path.__new__", "pathlib.Path.__init__", "io.StringIO", "io.BytesIO"),
    *("_io.StringIO", "_io.BytesIO", "_io.TextIOWrapper.write", "_io.TextIOWrapper.flush"),
    *("_io.TextIOWrapper.isatty", "_io.TextIOWrapper.close", "io.IOBase", "queue.Queue.put"),
    *("queue.Queue.qsize", "queue.Queue.empty", "queue.Queue.full"),
    "ray._private.log",  # adds the time to what the program logs
    "ray.experimental.tqdm_ray",  # replaces print below a progress bar
    *("time.sleep", "time.struct_time", "time.strftime", "time.strptime", "time.mktime"),
    *("multiprocessing.sharedctypes", "multiprocessing.context", "multiprocessing.synchronize"),
    *("_multiprocessing.SemLock", "multiprocessing.process.current_process"),
    *("gc.isenabled", "gc.collect"),
    # Methods in C whose name lacks the module of its class. (`guard_for` handles class methods.)
    *("generator", "coroutine", "async_generator", "method", "function", "code", "cell", "frame"),
    *("dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"),
    *("mappingproxy", "NoneType", "method_descriptor", "module", "wrapper_descriptor"),
    *("method-wrapper", "getset_descriptor", "member_descriptor", "builtin_function_or_method"),
    *vars(builtins),
)
_TABLE: dict[str, Guard] = {**dict.fromkeys(_PURE, PURE), **_GETTERS, **_UNGUARDED}


@cache
def is_pure_module(module: str) -> bool:
    """Return whether a module and all that it contains are PURE."""
    prefix = f"{module}."
    return guard_for(module) == PURE and not any(
        name.startswith(prefix) and entry != PURE for name, entry in _TABLE.items()
    )


# -- objects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByParts:
    """The object's class, attributes and items are compared. ``getter``: returns plain data of the
    object that is compared as well."""

    getter: Callable[[Any], object] | None = None


ClassGuard: TypeAlias = Literal["by identity", "by repr", "unknown"] | ByParts
"""How an object is compared. "by identity": it never changes, or holds nothing that programs read.
"unknown": it cannot be compared, and a warning names it."""


@lru_cache(maxsize=4096)
def guard_for_class(kind: type) -> ClassGuard:
    """Return how objects of a class are compared. A user's or library's class inherits the entry of
    its Python or torch base."""
    if is_foreign(module_of(kind)):
        bases = kind.__mro__[:-1]
        entries: list[ClassGuard | None] = [_OBJECTS.get(_name(base)) for base in bases]
        entries += map(_entry, bases)
        for entry in entries:
            if entry is not None:
                return entry
        return "unknown"
    has_c_state = _has_c_state(kind) and not issubclass(kind, _READABLE_C_CLASSES)
    for base in kind.__mro__[:-1]:
        if not is_foreign(module_of(base)):
            continue
        match _entry(base):
            case None:
                return "unknown"
            case ByParts(getter=None):
                has_c_state &= not _has_c_state(base)
            case ByParts() as guard:
                return guard
            case "by repr":
                return ByParts(partial(_base_repr, base))
            case _:
                pass
    return "unknown" if has_c_state else ByParts()


def _base_repr(base: type, value: object) -> str:
    base_repr: Any = base.__repr__
    return base_repr(value)


_READABLE_C_CLASSES = (dict, list, tuple, set, frozenset, deque, BaseException, int, float, complex)
_READABLE_C_CLASSES += (str, bytes)


def _name(kind: type) -> str:
    return f"{module_of(kind)}.{kind.__qualname__}"


def _entry(kind: type) -> ClassGuard | None:
    """Return the guard of a class, or of the class or module that contains it; None if unlisted."""
    name = _name(kind)
    while name:
        if name in _OBJECTS:
            return _OBJECTS[name]
        name = name.rpartition(".")[0]
    return None


def _has_c_state(kind: type) -> bool:
    """Return whether objects of a class are larger than their slots and two pointers (`__dict__`,
    `__weakref__`): C code keeps state in them that Python cannot read."""
    num_slots = 0
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        num_slots += sum(name not in ("__dict__", "__weakref__") for name in names)
    return kind.__basicsize__ > object.__basicsize__ + 8 * (num_slots + 2)


def _logger_level(logger: logging.Logger) -> object:
    return (logger.getEffectiveLevel(), logger.disabled, logger.manager.disable)


def _thread_state(thread: threading.Thread) -> object:
    return (thread.name, thread.daemon, thread.is_alive())


def _buffer_state(file: Any) -> object:
    return file.closed or (file.getvalue(), file.tell())


_OBJECTS: dict[str, ClassGuard] = {
    **dict.fromkeys(
        (
            *("re", "abc", "_abc", "typing", "ast", "inspect", "warnings", "contextlib", "logging"),
            *("_thread.lock", "_thread.RLock", "multiprocessing.synchronize", "operator"),
            *("_multiprocessing.SemLock", "_operator", "functools", "types", "os._Environ"),
            *("importlib", "zipimport", "_frozen_importlib", "_frozen_importlib_external"),
            *("builtins", "string.Template", "struct.Struct", "_struct.Struct", "numpy.ufunc"),
            *("dtensor", "multiprocessing.context"),
            *("torch._C", "torch.Size", "_ctypes.CField", "_weakref", "numpy._core"),
            "_collections._tuplegetter",  # the descriptor of a named tuple's field
        ),
        "by identity",
    ),
    **dict.fromkeys(
        (
            *("datetime", "zoneinfo", "decimal.Decimal", "fractions", "uuid", "ipaddress"),
            *("pathlib.PurePath", "numpy.dtype", "torch.finfo", "torch.iinfo", "sys", "time"),
        ),
        "by repr",
    ),
    **dict.fromkeys(
        (
            *("collections", "weakref", "_weakrefset", "threading", "argparse", "queue.Queue"),
            *("multiprocessing.sharedctypes", "configparser", "concurrent.futures._base.Future"),
            *("types.SimpleNamespace", "functools.cached_property", "functools.partialmethod"),
            *(
                "_thread._local",
                "enum",
                "dataclasses",
                "torch",
                "random",
                "unittest.mock",
                "string",
            ),
            *("functools.singledispatchmethod", "contextlib.nullcontext", "http.cookies"),
            *("builtins.BaseException", "graphlib", "statistics", "shlex"),
        ),
        ByParts(),
    ),
    **dict.fromkeys(("torch.storage", "torch.UntypedStorage"), "unknown"),
    "decimal.Context": ByParts(_decimal_settings),
    "logging.Logger": ByParts(_logger_level),
    "logging.LoggerAdapter": ByParts(),
    "threading.Thread": ByParts(_thread_state),
    **dict.fromkeys((f"_ctypes.{kind}" for kind in _CTYPES), ByParts(bytes)),
    **dict.fromkeys(("_io.StringIO", "_io.BytesIO"), ByParts(_buffer_state)),
}
