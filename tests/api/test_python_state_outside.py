"""Ways in which a step reads state that lies in Python's, torch's or C's own objects: each is as in
plain PyTorch, or a warning names the line that reads it; none is ignored (as test_python_state.py,
whose ways are of the user's own state)."""

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
from dtensor.kernel_flags import kernel_flags, obey
from tests.api.test_python_state import MESH, STEPS, Config, Made, batch, cross_entropy, net
from tests.extras import missing

WAYS: dict[str, tuple[Callable[[], Made], str | None]] = {}
Change = Callable[[int], object]


def way(told: str | None = None) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """``told``: what the warning says; None: as in torch."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        WAYS[make.__name__] = (make, told)
        return make

    return add


def times(factor: Callable[[], float], change: Change) -> Made:
    """A loss that is multiplied by what is read, which is 1 + i in step i."""
    change(0)
    return net(), lambda m, x, y: cross_entropy(m, x, y) * factor(), change


# -- objects of Python's ---------------------------------------------------------------------------


@way()
def a_value_shared_by_processes() -> Made:
    value = multiprocessing.Value("d", 1.0)
    return times(lambda: value.value, lambda i: setattr(value, "value", 1.0 + i))


@way()
def an_array_shared_by_processes() -> Made:
    values = multiprocessing.Array("d", 2)
    return times(lambda: values[1], lambda i: values.__setitem__(1, 1.0 + i))


@way()
def a_list_of_functions_of_cython() -> Made:
    held: list[Any] = [np.random.seed]
    return times(lambda: float(len(held)), lambda i: held.__setitem__(slice(1, None), held[:1] * i))


@way()
def a_number_of_ctypes() -> Made:
    value = ctypes.c_double(1.0)
    return times(lambda: value.value, lambda i: setattr(value, "value", 1.0 + i))


class Struct(ctypes.Structure):
    _fields_ = [("beta", ctypes.c_double)]


@way()
def a_field_of_a_structure() -> Made:
    value = Struct(1.0)
    return times(lambda: value.beta, lambda i: setattr(value, "beta", 1.0 + i))


def options(x: Tensor) -> Tensor:
    return x


@way()
def an_attribute_of_a_function() -> Made:
    held: Any = options
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


class Mode(enum.Enum):
    ON = "on"
    TABLE = [1.0]


@way()
def an_attribute_of_a_member() -> Made:
    member: Any = Mode.ON
    return times(lambda: member.beta, lambda i: setattr(member, "beta", 1.0 + i))


@way()
def the_list_that_a_member_is() -> Made:
    def change(i: int) -> None:
        Mode.TABLE.value[0] = 1.0 + i

    return times(lambda: Mode.TABLE.value[0], change)


LOGGER = logging.getLogger("a.logger.of.a.test")


@way()
def a_loggers_level() -> Made:
    return times(lambda: float(LOGGER.getEffectiveLevel()), lambda i: LOGGER.setLevel(10 + i))


@way()
def the_level_of_the_root() -> Made:
    logger = logging.getLogger("another.logger.of.a.test")

    def change(i: int) -> None:
        logging.getLogger("another").setLevel(10 * i + 10)

    return times(lambda: 1.0 + logger.isEnabledFor(15) + logger.isEnabledFor(25), change)


@way()
def a_logger_that_is_asked_for() -> Made:
    def change(i: int) -> None:
        logging.getLogger("third").setLevel(1 + i)

    return times(lambda: float(logging.getLogger("third").level), change)


@way()
def an_attribute_of_a_logger() -> Made:
    held: Any = LOGGER
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


@way()
def a_threads_name() -> Made:
    thread = threading.Thread(target=print)
    return times(lambda: float(thread.name), lambda i: setattr(thread, "name", str(1 + i)))


@way()
def an_event() -> Made:
    events = [threading.Event(), threading.Event()]
    return times(
        lambda: 1.0 + sum(event.is_set() for event in events),
        lambda i: events[i - 1].set() if i else None,
    )


@way()
def a_queue() -> Made:
    held: queue.Queue[float] = queue.Queue()
    return times(lambda: float(held.qsize()), lambda i: held.put(1.0))


class Key:
    pass


KEY = Key()


@way()
def a_dict_with_weak_keys() -> Made:
    table: weakref.WeakKeyDictionary[Key, float] = weakref.WeakKeyDictionary()
    return times(lambda: table[KEY], lambda i: table.__setitem__(KEY, 1.0 + i))


@way()
def a_dict_with_weak_values() -> Made:
    table: weakref.WeakValueDictionary[str, Config] = weakref.WeakValueDictionary()
    config = table["it"] = Config()
    return times(lambda: table["it"].beta, lambda i: setattr(config, "beta", 1.0 + i))


@way()
def a_set_of_weak_references() -> Made:
    keys = [Key() for _ in range(STEPS)]
    held: weakref.WeakSet[Key] = weakref.WeakSet()
    return times(lambda: float(len(held)), lambda i: held.add(keys[i]))


@way()
def behind_a_weak_proxy() -> Made:
    config = Config()
    proxy = weakref.proxy(config)
    made = times(lambda: proxy.beta, lambda i: setattr(config, "beta", 1.0 + i))
    made[0].keeps = config  # type: ignore[assignment]
    return made


SETTINGS: Any = types.ModuleType("settings_of_the_tests")
sys.modules[SETTINGS.__name__] = SETTINGS


@way()
def a_module_by_its_name() -> Made:
    return times(
        lambda: sys.modules["settings_of_the_tests"].beta,
        lambda i: setattr(SETTINGS, "beta", 1.0 + i),
    )


@way()
def a_module_that_is_imported_by_its_name() -> Made:
    return times(
        lambda: importlib.import_module("settings_of_the_tests").gamma,
        lambda i: setattr(SETTINGS, "gamma", 1.0 + i),
    )


@way()
def the_keywords_of_a_partial() -> Made:
    part = functools.partial(float.__mul__, 1.0)
    chosen = functools.partial(lambda *, by: by, by=1.0)
    return times(lambda: part(chosen()), lambda i: chosen.keywords.__setitem__("by", 1.0 + i))


@way()
def an_attribute_of_a_partial() -> Made:
    held: Any = functools.partial(print)
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


class Stored:
    def __init__(self) -> None:
        self.store: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.store[owner]

    def __set__(self, owner: Any, value: float) -> None:
        self.store[owner] = value


class WithStored:
    beta = Stored()


@way()
def a_descriptor_with_a_store() -> Made:
    held = WithStored()
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


class Number(float):
    beta: float


@way()
def an_attribute_of_a_number() -> Made:
    held = Number(2.0)
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


@way()
def a_view_of_a_dict() -> Made:
    table = {"beta": 1.0}
    values = table.values()
    return times(lambda: sum(values), lambda i: table.update(beta=1.0 + i))


@way()
def an_array_of_objects() -> Made:
    table = np.array([{"beta": 1.0}], dtype=object)
    return times(lambda: table[0]["beta"], lambda i: table[0].update(beta=1.0 + i))


@way()
def a_text_in_memory() -> Made:
    file = io.StringIO()
    return times(lambda: float(len(file.getvalue())), lambda i: file.write("1"))


@way()
def a_map_of_memory() -> Made:
    held = mmap.mmap(-1, 8)
    return times(lambda: float(held[0]), lambda i: held.__setitem__(0, 1 + i))


@way()
def an_attribute_of_an_exception() -> Made:
    held: Any = ValueError("no")
    return times(lambda: held.beta, lambda i: setattr(held, "beta", 1.0 + i))


# -- settings --------------------------------------------------------------------------------------


@way()
def a_flag_of_a_backend() -> Made:
    return times(
        lambda: 1.0 + torch.backends.cudnn.benchmark_limit,
        lambda i: setattr(torch.backends.cudnn, "benchmark_limit", i),
    )


@way()
def a_backend() -> Made:
    backend = torch.backends.cudnn
    return times(
        lambda: 1.0 + backend.deterministic, lambda i: setattr(backend, "deterministic", i % 2 == 1)
    )


@way()
def deterministic_algorithms() -> Made:
    return times(
        lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
        lambda i: torch.use_deterministic_algorithms(i % 2 == 1, warn_only=True),
    )


@way()
def the_precision_of_matrix_products() -> Made:
    named = ["highest", "high", "medium"]
    return times(
        lambda: 1.0 + named.index(torch.get_float32_matmul_precision()),
        lambda i: torch.set_float32_matmul_precision(named[i]),
    )


@way()
def the_context_of_decimal() -> Made:
    def change(i: int) -> None:
        decimal.getcontext().prec = 1 + i

    return times(lambda: float(decimal.Decimal(2) / decimal.Decimal(3)), change)


@way()
def the_recursion_limit() -> Made:
    base = sys.getrecursionlimit()
    return times(
        lambda: 1.0 + sys.getrecursionlimit() - base, lambda i: sys.setrecursionlimit(base + i)
    )


@way()
def the_arguments_of_the_command_line() -> Made:
    return times(lambda: float(sys.argv[-1]), lambda i: sys.argv.append(str(1.0 + i)))


@way()
def the_working_directory() -> Made:
    folders = ["/", "/usr", "/usr/lib"]
    return times(lambda: float(len(os.getcwd())), lambda i: os.chdir(folders[i]))


@way()
def how_numpy_takes_errors() -> Made:
    named: list[Any] = ["ignore", "warn", "raise"]
    return times(
        lambda: 1.0 + named.index(np.geterr()["under"]), lambda i: np.seterr(under=named[i])
    )


@way()
def what_is_put_into_torch() -> Made:
    held: Any = torch
    return times(lambda: held.BETA_OF_A_TEST, lambda i: setattr(held, "BETA_OF_A_TEST", 1.0 + i))


@way()
def what_is_put_among_the_builtins() -> Made:
    def change(i: int) -> None:
        builtins.BETA_OF_A_TEST = 1.0 + i  # type: ignore[attr-defined]

    return times(lambda: BETA_OF_A_TEST, change)  # type: ignore[name-defined]  # noqa: F821


# -- what cannot be compared -----------------------------------------------------------------------

FILE = pathlib.Path(__file__)
OPEN: list[io.TextIOBase] = []


def nothing(i: int) -> None:
    pass


@way(told="reads a file")
def the_text_of_a_file() -> Made:
    return times(lambda: float(len(FILE.read_text())), nothing)  # here


@way(told="reads a file")
def whether_a_file_is_there() -> Made:
    return times(lambda: 1.0 + os.path.exists(FILE), nothing)  # here


@way(told="reads a file")
def files_that_are_opened_by_map() -> Made:
    return times(lambda: float(len([f.close() for f in map(open, [FILE])])), nothing)  # here


@way(told="what file .* holds, of class _io.TextIOWrapper")
def a_file_that_is_open() -> Made:
    file = FILE.open()
    OPEN.append(file)
    return times(lambda: float(len(next(file))), nothing)  # here


@way(told="reads the clock")
def a_clock_by_another_name() -> Made:
    clock = time.time
    return times(lambda: clock() % 7, nothing)  # here


@way(told="reads the clock")
def a_clock_after_an_op() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        value = cross_entropy(m, x, y) * 2
        return value * (time.time() % 7)  # here

    return net(), loss, nothing


@way(told="what chosen .*holds, of class builtins.builtin_function")
def a_clock_in_a_partial() -> Made:
    chosen = functools.partial(time.time)
    return times(lambda: chosen() % 7, nothing)  # here


@way(told="what a library of C gives|of class .*CDLL")
def a_library_of_c() -> Made:
    library = ctypes.CDLL(None)
    return times(lambda: 1.0 + library.getpid() * 0, nothing)  # here


@way(told="reads torch.backends.mkldnn.enabled, a setting that torch's export turns off")
def a_setting_that_is_another_while_it_is_captured() -> Made:
    return times(lambda: 1.0 + bool(torch.backends.mkldnn.enabled), nothing)  # here


@way(told="what subprocess.check_output gives")
def what_another_program_says() -> Made:
    return times(lambda: float(subprocess.check_output(["echo", "2"])), nothing)  # here


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the ways change of the process."""
    monkeypatch.chdir(pathlib.Path.cwd())
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    flags, limit, folder = kernel_flags(), sys.getrecursionlimit(), pathlib.Path.cwd()
    amount = torch.backends.cudnn.benchmark_limit
    with np.errstate(), decimal.localcontext():
        yield
    for file in OPEN:
        file.close()
    obey(flags)
    sys.setrecursionlimit(limit)
    torch.backends.cudnn.benchmark_limit = amount
    os.chdir(folder)
    for name in ("another", "third", LOGGER.name):
        logging.getLogger(name).setLevel(logging.NOTSET)
    for module in (torch, builtins):
        vars(module).pop("BETA_OF_A_TEST", None)


def in_torch(make: Callable[[], Made]) -> list[float]:
    model, loss, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for i in range(STEPS):
        if i:
            change(i)
        optimizer.zero_grad()
        value = loss(model, *batch(i))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def step_of(make: Callable[[], Made]) -> tuple[Any, Change]:
    model, loss, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dt.train_step(dt.parallelize(model, MESH, {}), loss, optimizer), change


SAMPLE = (  # the ways that were lost before
    *("a_value_shared_by_processes", "a_number_of_ctypes", "an_attribute_of_a_function"),
    *("an_attribute_of_a_member", "a_loggers_level", "an_event", "a_dict_with_weak_keys"),
    *("a_module_by_its_name", "the_keywords_of_a_partial", "a_descriptor_with_a_store"),
    *("the_level_of_the_root", "a_flag_of_a_backend", "deterministic_algorithms"),
    *("the_precision_of_matrix_products", "the_context_of_decimal", "the_recursion_limit"),
    "a_list_of_functions_of_cython",
)


@pytest.mark.slow
@pytest.mark.sample(*SAMPLE)
@pytest.mark.filterwarnings("ignore:.*A step was captured for each")
@pytest.mark.parametrize("name", [name for name, (_, told) in WAYS.items() if told is None])
def test_it_is_as_in_torch(name: str) -> None:
    make, _ = WAYS[name]
    torch.manual_seed(0)
    expected = in_torch(make)
    torch.manual_seed(0)
    step, change = step_of(make)
    found: list[float] = []
    with dt.launch(MESH):
        for i in range(STEPS):
            if i:
                change(i)
            found.append(float(step(*batch(i))))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(step.plans) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, told) in WAYS.items() if told is not None])
def test_a_warning_names_the_line(name: str) -> None:
    make, told = WAYS[name]
    step, _ = step_of(make)
    with pytest.warns(UserWarning, match=f"(?s){told}.*fix: pass it as an argument") as caught:
        step.plan(*batch(0))
    (one,) = caught
    assert one.filename == __file__
    assert "# here" in FILE.read_text().splitlines()[one.lineno - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.plan(*batch(1))


def test_there_are_at_least_thirty_seven_ways() -> None:
    assert len(WAYS) >= 37
    assert set(SAMPLE) <= set(WAYS)


def test_a_program_that_logs_beside_ray_reads_nothing() -> None:
    """Ray puts a function into Python's logging that asks the clock."""
    pytest.importorskip("ray", reason=missing("ray"))
    from ray._private import log

    before = logging.getLogRecordFactory()
    log._setup_log_record_factory()

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        logging.getLogger("test").warning("a step")
        return cross_entropy(m, x, y)

    try:
        step, _ = step_of(lambda: (net(), loss, nothing))
        step.plan(*batch(0))
    finally:
        logging.setLogRecordFactory(before)


# -- what is stated to be constant -----------------------------------------------------------------


def test_what_is_stated_to_be_constant_is_not_told() -> None:
    def length(path: pathlib.Path) -> float:
        return float(len(path.read_text()))

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(m, x, y) * dt.constant(length, FILE)

    step, _ = step_of(lambda: (net(), loss, nothing))
    step.plan(*batch(0))
    assert dt.constant(length, FILE) == length(FILE)


def test_a_step_that_is_captured_at_each_call_tells_nothing() -> None:
    model = net()
    step = dt.train_step(
        dt.parallelize(model, MESH, {}),
        lambda m, x, y: cross_entropy(m, x, y) * len(FILE.read_text()),
        torch.optim.SGD(model.parameters(), lr=0.1),
        capture="each call",
    )
    step.plan(*batch(0))
