"""What a program's code may ask of what is not its own, and what becomes of it: one table, by name.

    guard_for("math.sqrt")                 # PURE: reads its arguments alone, which are guarded
    guard_for("sys.getrecursionlimit")     # a getter: its result is compared before each call
    guard_for("time.time")                 # Outside("the clock"): a warning names the line, once
    guard_for("somelib._speedups.parse")   # Outside(): likewise, as it is not in the table

Names are those of functions ("pathlib.Path.read_text"), of methods of C ("_random.Random.random"),
of attributes of Python's and torch's modules ("torch.backends.cudnn.benchmark"), and of the classes
of objects ("logging.Logger"). An entry is for all that begins with it, a longer one overrides it.

A getter is asked before each call of a step, so it is cheap and changes nothing. Not here: what a
program calls (executed_code.py), names (unguarded.py) and reaches (walk.py), where parts are
compared.
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
"""What is compared; of plain data."""


_FOREIGN = {"torch", "numpy", "dtensor", "triton", "builtins", *sys.stdlib_module_names}
_FOREIGN -= {"__main__"}


def is_foreign(module_name: str | None) -> bool:
    """Whether a module is Python's, torch's, numpy's or ours: its insides are not looked at."""
    return (module_name or "builtins").partition(".")[0] in _FOREIGN


def module_of(kind: type) -> str:
    """The name of a class's module, which of Cython's functions is no text."""
    name: object = kind.__module__
    return name if isinstance(name, str) else "builtins"


@dataclass(frozen=True, slots=True)
class Outside:
    """What cannot be compared; ``what`` is read, in words ("" where the name says it)."""

    what: str = ""


PURE: Literal["pure"] = "pure"
Guard: TypeAlias = Literal["pure"] | Getter | Outside
_UNKNOWN = Outside()


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


def _levels() -> object:
    """Of all loggers, those that have one of their own."""
    manager = logging.root.manager
    levels = [
        (name, logger.level, logger.disabled)
        for name, logger in list(manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and (logger.level or logger.disabled)
    ]
    return (manager.disable, logging.root.level, levels)


_DECIMAL = ("getcontext", "localcontext", "Decimal", "Context")
_CTYPES = ("_SimpleCData", "Structure", "Union", "Array")


def decimal_context() -> object:
    """Decimal's, without the signals that a computation leaves there."""
    return _numbers(decimal.getcontext())


def _numbers(context: decimal.Context) -> object:
    traps = [signal.__name__ for signal, on in context.traps.items() if on]
    numbers = (context.prec, context.Emin, context.Emax, context.capitals, context.clamp)
    return (numbers, context.rounding, traps)


def _processes() -> object:
    distributed: Any = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and (distributed.get_rank(),)


_CLOCK = Outside("the clock")
_FILE = Outside("a file, or what there is of files")
_CHANCE = Outside("the system's random numbers")
_ELSEWHERE = Outside("what another process or thread gives")
_C = Outside("what a library of C gives")
_OUTSIDE: dict[str, Outside] = {
    **dict.fromkeys(("time", "now", "today", "utcnow", "posix.times", "timeit"), _CLOCK),
    **dict.fromkeys(("io.open", "builtins.open", "_io", "io", "mmap", "fileinput"), _FILE),
    **dict.fromkeys(("pathlib.Path", "posix", "os", "genericpath", "shutil", "glob"), _FILE),
    **dict.fromkeys(("posixpath.realpath", "posixpath.lexists", "posixpath.ismount"), _FILE),
    **dict.fromkeys(("json.load", "pickle.load", "linecache", "tempfile", "zipfile"), _FILE),
    **dict.fromkeys(("importlib.resources", "torch.load", "torch.hub", "torch.from_file"), _FILE),
    **dict.fromkeys((f"numpy.{name}" for name in ("load", "loadtxt", "genfromtxt")), _FILE),
    **dict.fromkeys((f"numpy.{name}" for name in ("fromfile", "memmap", "lib.npyio")), _FILE),
    **dict.fromkeys(("posix.urandom", "posix.getrandom", "secrets", "uuid.uuid1"), _CHANCE),
    **dict.fromkeys(
        ("uuid.uuid4", "random.SystemRandom", "torch.seed", "torch.random.seed"), _CHANCE
    ),
    **dict.fromkeys((f"multiprocessing.{name}" for name in ("queues", "connection")), _ELSEWHERE),
    **dict.fromkeys((f"multiprocessing.{name}" for name in ("managers", "pool")), _ELSEWHERE),
    **dict.fromkeys(("ctypes.CDLL", "ctypes.cdll", "ctypes.pythonapi", "ctypes.PyDLL"), _C),
    **dict.fromkeys(("ctypes.string_at", "ctypes.wstring_at", "ctypes.memmove"), _C),
    **dict.fromkeys(
        (f"torch.cuda.{name}" for name in ("memory", "mem_get_info", "utilization")),
        Outside("what a GPU is doing"),
    ),
    **dict.fromkeys(
        ("sys.getrefcount", "sys.getallocatedblocks", "gc"), Outside("what Python's memory holds")
    ),
    **dict.fromkeys(
        ("sys._getframe", "inspect.stack", "inspect.currentframe", "sys._current_frames"),
        Outside("the frames of its callers"),
    ),
    **dict.fromkeys(
        (
            "random.Random.__init__",
            "numpy.random._generator.default_rng",
            "numpy.random.default_rng",
        ),
        Outside("random numbers, the system's if no seed is given"),
    ),
    **dict.fromkeys(
        (
            *("torch.backends.mkldnn.enabled", "torch.backends.mkldnn.deterministic"),
            "torch.backends.cudnn.enabled",
        ),
        Outside("a setting that torch's export turns off"),
    ),
    "builtins.input": Outside("what is typed"),
}
_ASKED: dict[str, Getter] = {
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
        _levels,
    ),
    **dict.fromkeys((f"decimal.{name}" for name in _DECIMAL), decimal_context),
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
    "torch.distributed": _processes,
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
    # Modules: what they have computes with its arguments, or stays as it is.
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
    *(
        "errno",
        "fnmatch",
        "torch",
        "numpy",
        "dtensor",
        "triton",
        "builtins",
        "ipaddress",
        "secrets.compare_digest",
    ),
    # Of other modules, what is no different.
    *("os.path", "os.fspath", "os.getpid", "os.cpu_count", "os.name", "os.sep", "os.linesep"),
    *("os.environ", "os.getenv", "os._Environ", "os.PathLike", "os.strerror", "posix.getpid"),
    *("posix.fspath", "posix.cpu_count", "posix.strerror", "os.fsencode", "os.fsdecode"),
    *("pathlib.Path.__new__", "pathlib.Path.__init__", "io.StringIO", "io.BytesIO"),
    *("_io.StringIO", "_io.BytesIO", "_io.TextIOWrapper.write", "_io.TextIOWrapper.flush"),
    *("_io.TextIOWrapper.isatty", "_io.TextIOWrapper.close", "io.IOBase", "queue.Queue.put"),
    *("queue.Queue.qsize", "queue.Queue.empty", "queue.Queue.full"),
    "ray._private.log",  # it puts the time into what the program logs
    "ray.experimental.tqdm_ray",  # in the place of print, below a progress bar
    *("time.sleep", "time.struct_time", "time.strftime", "time.strptime", "time.mktime"),
    *("multiprocessing.sharedctypes", "multiprocessing.context", "multiprocessing.synchronize"),
    *(
        "_multiprocessing.SemLock",
        "multiprocessing.process.current_process",
        "gc.isenabled",
        "gc.collect",
    ),
    # Methods of C, of classes whose module their names lack, and class methods, which lack both.
    *("generator", "coroutine", "async_generator", "method", "function", "code", "cell", "frame"),
    *("dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"),
    *("mappingproxy", "NoneType", "method_descriptor", "module", "wrapper_descriptor"),
    *("method-wrapper", "getset_descriptor", "member_descriptor", "builtin_function_or_method"),
    *vars(builtins),
)
_TABLE: dict[str, Guard] = {**dict.fromkeys(_PURE, PURE), **_ASKED, **_OUTSIDE}


@cache
def is_plain_all_through(module: str) -> bool:
    """Whether nothing of a module, or of those below it, has an entry of its own but "pure"."""
    below = f"{module}."
    return guard_for(module) == PURE and not any(
        name.startswith(below) and entry != PURE for name, entry in _TABLE.items()
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
    hidden = _hides(kind) and not issubclass(kind, _KNOWN_OF_C)
    for base in kind.__mro__[:-1]:
        if not is_foreign(module_of(base)):
            continue
        match _entry(base):
            case None:
                return "unknown"
            case ByParts(getter=None):
                hidden &= not _hides(base)
            case ByParts() as opened:
                return opened
            case "by repr":
                return ByParts(partial(_text_as, base))
            case _:
                pass
    return "unknown" if hidden else ByParts()


def _text_as(base: type, value: object) -> str:
    as_text: Any = base.__repr__
    return as_text(value)


_KNOWN_OF_C = (dict, list, tuple, set, frozenset, deque, BaseException, int, float, complex)
_KNOWN_OF_C += (str, bytes)


def _name(kind: type) -> str:
    return f"{module_of(kind)}.{kind.__qualname__}"


def _entry(kind: type) -> ClassGuard | None:
    name = _name(kind)
    while name:
        if name in _OBJECTS:
            return _OBJECTS[name]
        name = name.rpartition(".")[0]
    return None


def _hides(kind: type) -> bool:
    """Whether there is memory in it besides attributes and slots: an object of C."""
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [
        n
        for slots_of_class in slots
        for n in ((slots_of_class,) if isinstance(slots_of_class, str) else slots_of_class)
    ]
    slots_of_class = [name for name in names if name not in ("__dict__", "__weakref__")]
    return kind.__basicsize__ > object.__basicsize__ + 8 * (len(slots_of_class) + 2)


def _level(logger: logging.Logger) -> object:
    return (logger.getEffectiveLevel(), logger.disabled, logger.manager.disable)


def _thread(thread: threading.Thread) -> object:
    return (thread.name, thread.daemon, thread.is_alive())


def _written(file: Any) -> object:
    return file.closed or (file.getvalue(), file.tell())


_OBJECTS: dict[str, ClassGuard] = {
    **dict.fromkeys(
        (
            *(
                "re",
                "abc",
                "_abc",
                "typing",
                "ast",
                "inspect",
                "warnings",
                "contextlib",
                "_thread.lock",
            ),
            *(
                "_thread.RLock",
                "multiprocessing.synchronize",
                "_multiprocessing.SemLock",
                "logging",
            ),
            *(
                "operator",
                "_operator",
                "functools",
                "types",
                "os._Environ",
                "importlib",
                "zipimport",
            ),
            *("_frozen_importlib", "_frozen_importlib_external", "builtins", "string.Template"),
            *(
                "struct.Struct",
                "_struct.Struct",
                "numpy.ufunc",
                "dtensor",
                "multiprocessing.context",
            ),
            *("torch._C", "torch.Size", "_ctypes.CField", "_weakref", "numpy._core"),
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
    "decimal.Context": ByParts(_numbers),
    "logging.Logger": ByParts(_level),
    "logging.LoggerAdapter": ByParts(),
    "threading.Thread": ByParts(_thread),
    **dict.fromkeys((f"_ctypes.{kind}" for kind in _CTYPES), ByParts(bytes)),
    **dict.fromkeys(("_io.StringIO", "_io.BytesIO"), ByParts(_written)),
}
