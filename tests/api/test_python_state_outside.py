"""A step reads state inside objects of Python, torch or C: the result is that of plain PyTorch, or
a warning names the line that reads it; no change is ignored. The user's own state is in
test_python_state.py."""

from __future__ import annotations

import builtins
import ctypes
import decimal
import enum
import functools
import importlib
import io
import logging
import mmap
import multiprocessing
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.kernel_flags import kernel_flags, set_kernel_flags
from tests.api.test_python_state import (
    MESH,
    STEPS,
    Change,
    Config,
    attribute,
    batch,
    cross_entropy,
    entry,
    losses,
    net,
    nothing,
    plain_step,
    step_of,
    times,
)
from tests.extras import missing


class Struct(ctypes.Structure):
    _fields_ = [("beta", ctypes.c_double)]


class Mode(enum.Enum):
    ON = "on"
    TABLE = [1.0]


class Key:
    pass


class Stored:
    """A descriptor that keeps its values in its own store."""

    def __init__(self) -> None:
        self.store: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.store[owner]

    def __set__(self, owner: Any, value: float) -> None:
        self.store[owner] = value


class WithStored:
    beta = Stored()


class Number(float):
    beta: float


def options(x: Tensor) -> Tensor:
    return x


LOGGER = logging.getLogger("a.logger.of.a.test")
SETTINGS: Any = types.ModuleType("settings_of_the_tests")
sys.modules[SETTINGS.__name__] = SETTINGS


def objects() -> dict[str, tuple[Callable[[], Any], Change]]:
    """Return reads of Python's objects that give 1 + i in step i, and how each changes."""
    value, values = multiprocessing.Value("d", 1.0), multiprocessing.Array("d", 2)
    functions: list[Any] = [np.random.seed]
    number, struct, member, logger = ctypes.c_double(1.0), Struct(1.0), Mode.ON, LOGGER
    child = logging.getLogger("another.logger.of.a.test")
    thread, events = threading.Thread(target=print), [threading.Event(), threading.Event()]
    waiting, text, memory = queue.Queue[float](), io.StringIO(), mmap.mmap(-1, 8)
    key, keys, config = Key(), [Key() for _ in range(STEPS)], Config()
    by_key: weakref.WeakKeyDictionary[Key, float] = weakref.WeakKeyDictionary()
    by_name: weakref.WeakValueDictionary[str, Config] = weakref.WeakValueDictionary(it=config)
    in_set: weakref.WeakSet[Key] = weakref.WeakSet()
    proxy, own_partial = weakref.proxy(config), functools.partial(print)
    part = functools.partial(float.__mul__, 1.0)
    chosen = functools.partial(lambda *, by: by, by=1.0)
    stored, own_number, error = WithStored(), Number(2.0), ValueError("no")
    table, array = {"beta": 1.0}, np.array([{"beta": 1.0}], dtype=object)
    view = table.values()
    bare, bare_part, bare_tensor = Key(), functools.partial(float), torch.ones(1)
    mean, kind, items = torch.ones(1), torch.ones(1), [torch.ones(2, 2)]
    leaf, seeded, cells = torch.ones(1), torch.Generator(), np.ones(6)
    lying = [torch.ones(2, 2), torch.ones(2, 2).triu().t(), torch.ones(5)[1:].view(2, 2).t()]
    return {
        **{
            f"an attribute that a {type(of).__name__} gets": (
                lambda of=of: getattr(of, "beta", 1.0),
                lambda i, of=of: setattr(of, "beta", 1.0 + i) if i else vars(of).clear(),
            )
            for of in (bare, bare_part, bare_tensor)
        },
        "a mean by a tensor's shape": (
            lambda: mean.sum() / mean.shape[0],
            lambda i: setattr(mean, "data", torch.full((1 + i,), 1.0 + i)),
        ),
        "a tensor's dtype and dims": (
            lambda: float(kind.ndim) + (kind.dtype == torch.float64),
            lambda i: setattr(
                kind, "data", torch.ones(1, *[1] * (i // 2), dtype=torch.float64 if i else None)
            ),
        ),
        "how a tensor lies in memory": (
            lambda: 2.0 - items[0].is_contiguous() + bool(items[0].storage_offset()),
            lambda i: items.__setitem__(0, lying[i]),
        ),
        "whether a tensor has a gradient": (
            lambda: 1.0 + (leaf.grad is not None) + getattr(leaf, "beta", 0.0),
            lambda i: (
                setattr(leaf, "grad", torch.ones(1) if i else None),
                setattr(leaf, "beta", float(i // 2)),
            ),
        ),
        "an array over a tensor": (
            lambda: float(np.from_dlpack(leaf)[0]),
            lambda i: leaf.fill_(1.0 + i),
        ),
        "a generator's seed": (lambda: seeded.initial_seed(), lambda i: seeded.manual_seed(1 + i)),
        "an array's shape": (
            lambda: float(cells.shape[0]),
            lambda i: setattr(cells, "shape", (1 + i, 6 // (1 + i))),
        ),
        "a value shared by processes": (lambda: value.value, attribute(value, "value")),
        "an array shared by processes": (lambda: values[1], entry(values, 1)),
        "a list of functions of Cython": (
            lambda: float(len(functions)),
            lambda i: functions.__setitem__(slice(1, None), functions[:1] * i),
        ),
        "a number of ctypes": (lambda: number.value, attribute(number, "value")),
        "a field of a structure": (lambda: struct.beta, attribute(struct)),
        "an attribute of a function": (lambda: options.beta, attribute(options)),
        "an attribute of a member": (lambda: member.beta, attribute(member)),
        "the list that a member is": (lambda: Mode.TABLE.value[0], entry(Mode.TABLE.value)),
        "a logger's level": (
            lambda: float(LOGGER.getEffectiveLevel()),
            lambda i: LOGGER.setLevel(10 + i),
        ),
        "the level of a logger's root": (
            lambda: 1.0 + child.isEnabledFor(15) + child.isEnabledFor(25),
            lambda i: logging.getLogger("another").setLevel(10 * i + 10),
        ),
        "a logger that is asked for": (
            lambda: float(logging.getLogger("third").level),
            lambda i: logging.getLogger("third").setLevel(1 + i),
        ),
        "an attribute of a logger": (lambda: logger.beta, attribute(logger)),
        "a thread's name": (
            lambda: float(thread.name),
            lambda i: setattr(thread, "name", str(1 + i)),
        ),
        "an event": (
            lambda: 1.0 + sum(event.is_set() for event in events),
            lambda i: [e.set() if n < i else e.clear() for n, e in enumerate(events)],
        ),
        "a queue": (
            lambda: 1.0 + waiting.qsize(),
            lambda i: waiting.put(1.0) if i else waiting.queue.clear(),
        ),
        "a dict with weak keys": (lambda: by_key[key], entry(by_key, key)),
        "a dict with weak values": (lambda: by_name["it"].beta, attribute(config)),
        "a set of weak references": (
            lambda: 1.0 + len(in_set),
            lambda i: in_set.add(keys[i]) if i else in_set.clear(),
        ),
        "behind a weak proxy": (lambda: proxy.beta, attribute(config)),
        "a module by its name": (
            lambda: sys.modules["settings_of_the_tests"].beta,
            attribute(SETTINGS),
        ),
        "a module imported by its name": (
            lambda: importlib.import_module("settings_of_the_tests").gamma,
            attribute(SETTINGS, "gamma"),
        ),
        "the keywords of a partial": (lambda: part(chosen()), entry(chosen.keywords, "by")),
        "an attribute of a partial": (lambda: own_partial.beta, attribute(own_partial)),
        "a descriptor with a store": (lambda: stored.beta, attribute(stored)),
        "an attribute of a number": (lambda: own_number.beta, attribute(own_number)),
        "a view of a dict": (lambda: sum(view), entry(table, "beta")),
        "an array of objects": (lambda: array[0]["beta"], entry(array[0], "beta")),
        "a text in memory": (
            lambda: 1.0 + len(text.getvalue()),
            lambda i: text.write("1") if i else (text.seek(0), text.truncate()),
        ),
        "a map of memory": (lambda: float(memory[0]), lambda i: memory.__setitem__(0, 1 + i)),
        "an attribute of an exception": (lambda: error.beta, attribute(error)),
    }


def settings() -> dict[str, tuple[Callable[[], Any], Change]]:
    """Return reads of settings of Python, NumPy, torch and the process, and how each changes."""
    cudnn, own_torch = torch.backends.cudnn, torch
    precisions, folders = ["highest", "high", "medium"], ["/", "/usr", "/usr/lib"]
    handling: list[Any] = ["ignore", "warn", "raise"]
    limit = sys.getrecursionlimit()
    return {
        "a flag of a backend": (
            lambda: 1.0 + torch.backends.cudnn.benchmark_limit,
            lambda i: setattr(torch.backends.cudnn, "benchmark_limit", i),
        ),
        "a backend": (
            lambda: 1.0 + cudnn.deterministic,
            lambda i: setattr(cudnn, "deterministic", i % 2 == 1),
        ),
        "deterministic algorithms": (
            lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
            lambda i: torch.use_deterministic_algorithms(i % 2 == 1, warn_only=True),
        ),
        "the precision of matrix products": (
            lambda: 1.0 + precisions.index(torch.get_float32_matmul_precision()),
            lambda i: torch.set_float32_matmul_precision(precisions[i]),
        ),
        "the context of decimal": (
            lambda: float(decimal.Decimal(2) / decimal.Decimal(3)),
            lambda i: setattr(decimal.getcontext(), "prec", 1 + i),
        ),
        "the recursion limit": (
            lambda: 1.0 + sys.getrecursionlimit() - limit,
            lambda i: sys.setrecursionlimit(limit + i),
        ),
        "the arguments of the command line": (
            lambda: float(sys.argv[-1]),
            lambda i: sys.argv.append(str(1.0 + i)),
        ),
        "the working directory": (lambda: float(len(os.getcwd())), lambda i: os.chdir(folders[i])),
        "how NumPy takes errors": (
            lambda: 1.0 + handling.index(np.geterr()["under"]),
            lambda i: np.seterr(under=handling[i]),
        ),
        "what is put into torch": (
            lambda: own_torch.BETA_OF_A_TEST,
            attribute(torch, "BETA_OF_A_TEST"),
        ),
        "what is put among the builtins": (
            lambda: BETA_OF_A_TEST,  # type: ignore[name-defined]  # noqa: F821
            attribute(builtins, "BETA_OF_A_TEST"),
        ),
    }


WAYS = {**objects(), **settings()}

# -- what cannot be compared -----------------------------------------------------------------------

FILE = pathlib.Path(__file__)


def unseen() -> dict[str, tuple[Callable[[], Any], str]]:
    """Return reads that are not guarded, and the text of the warning."""
    file, clock = io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")), time.time
    chosen, library = functools.partial(time.time), ctypes.CDLL(None)
    return {
        "the text of a file": (
            lambda: float(len(FILE.read_text())),  # here
            "reads a file",
        ),
        "whether a file is there": (
            lambda: 1.0 + os.path.exists(FILE),  # here
            "reads a file",
        ),
        "files that are opened by map": (
            lambda: float(len([f.close() for f in map(open, [FILE])])),  # here
            "reads a file",
        ),
        "a file that is open": (
            lambda: float(len(next(file))),  # here
            "what file .* holds, of class _io.TextIOWrapper",
        ),
        "a clock by another name": (
            lambda: clock() % 7,  # here
            "reads the clock",
        ),
        "a clock in a partial": (
            lambda: chosen() % 7,  # here
            "what chosen .*holds, of class builtins.builtin_function",
        ),
        "a library of C": (
            lambda: 1.0 + library.getpid() * 0,  # here
            "what a library of C gives|of class .*CDLL",
        ),
        "a setting that is another while it is captured": (
            lambda: 1.0 + bool(torch.backends.mkldnn.enabled),  # here
            "reads torch.backends.mkldnn.enabled, a setting that torch's export turns off",
        ),
        "what another program says": (
            lambda: float(subprocess.check_output(["echo", "2"])),  # here
            "what subprocess.check_output gives",
        ),
    }


def clock_after_an_op(m: Any, x: Tensor, y: Tensor) -> Tensor:
    value = cross_entropy(m, x, y) * 2
    return value * (time.time() % 7)  # here


# -- the tables ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Restore all process settings that the tests change."""
    monkeypatch.chdir(pathlib.Path.cwd())
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    flags, limit, folder = kernel_flags(), sys.getrecursionlimit(), pathlib.Path.cwd()
    amount = torch.backends.cudnn.benchmark_limit
    with np.errstate(), decimal.localcontext():
        yield
    set_kernel_flags(flags)
    sys.setrecursionlimit(limit)
    torch.backends.cudnn.benchmark_limit = amount
    os.chdir(folder)
    for name in ("another", "third", LOGGER.name):
        logging.getLogger(name).setLevel(logging.NOTSET)
    for module in (torch, builtins):
        vars(module).pop("BETA_OF_A_TEST", None)


SAMPLE = (  # the ways that were lost before
    *("a value shared by processes", "a number of ctypes", "an attribute of a function"),
    *("an attribute of a member", "a logger's level", "an event", "a dict with weak keys"),
    *("a module by its name", "the keywords of a partial", "a descriptor with a store"),
    *("the level of a logger's root", "a flag of a backend", "deterministic algorithms"),
    *("the precision of matrix products", "the context of decimal", "the recursion limit"),
    "a list of functions of Cython",
)


@pytest.mark.default("a dict with weak keys", "a mean by a tensor's shape")
@pytest.mark.sample(*SAMPLE)
@pytest.mark.filterwarnings("ignore:.*A step was captured for each")
@pytest.mark.parametrize("name", WAYS)
def test_changed_library_state_gives_losses_of_torch(name: str) -> None:
    read, change = WAYS[name]
    expected, _ = losses(lambda: times(read, change), plain_step)
    with dt.launch(MESH):
        found, step = losses(lambda: times(read, change), step_of)
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(step.plans) >= 2


@pytest.mark.default("a clock in a partial")
@pytest.mark.parametrize("name", [*unseen(), "a clock after an op"])
def test_warning_names_line_that_reads_unguarded_state(name: str) -> None:
    if name in (own := unseen()):
        read, said = own[name]
        made, loss, _ = times(read, nothing)
    else:
        said, made, loss = "reads the clock", net(), clock_after_an_op
    step = step_of(made, loss)
    with pytest.warns(UserWarning, match=f"(?s){said}.*fix: pass it as an argument") as caught:
        step.plan(*batch(0))
    (warning,) = caught
    assert warning.filename == __file__
    assert "# here" in FILE.read_text().splitlines()[warning.lineno - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.plan(*batch(1))


def test_logging_with_ray_log_factory_gives_no_warning() -> None:
    """Ray installs a log record factory that reads the clock."""
    pytest.importorskip("ray", reason=missing("ray"))
    from ray._private import log

    before = logging.getLogRecordFactory()
    log._setup_log_record_factory()

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logging.getLogger("test").warning("a step")
        return cross_entropy(m, x, y)

    try:
        step = step_of(net(), loss)
        step.plan(*batch(0))
    finally:
        logging.setLogRecordFactory(before)


# -- what is stated to be constant -----------------------------------------------------------------


def test_dt_constant_suppresses_warning() -> None:
    def length(path: pathlib.Path) -> float:
        return float(len(path.read_text()))

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(m, x, y) * dt.constant(length, FILE)

    step = step_of(net(), loss)
    step.plan(*batch(0))
    assert dt.constant(length, FILE) == length(FILE)


def test_capture_each_call_gives_no_warning() -> None:
    step = step_of(
        net(),
        lambda m, x, y: cross_entropy(m, x, y) * len(FILE.read_text()),
        capture="each call",
    )
    step.plan(*batch(0))
