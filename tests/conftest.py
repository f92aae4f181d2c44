"""Fixtures and hooks for all tests: seeds, captured graphs, and one Ray in each worker."""

from __future__ import annotations

import functools
import gc
import importlib
import math
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tests.plans  # noqa: F401 - so that its capture can be replaced
from tests.captures import shared_capture
from tests.cpu import Seconds
from tests.extras import absent, missing
from tests.hosts import handed_on

# As in an actor, and as `make test` has it: with more threads some kernels sum in another order.
torch.set_num_threads(1)

# Ray starts its workers with the niceness 15: on a busy machine they stand still for a minute.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell starts its background jobs with Ctrl-C ignored, and what they start has it so, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print the seconds of a core of each test")
    parser.addoption("--cpu-table", type=Path, help="write them to this page, too")
    parser.addoption(
        "--plain",
        action="store_true",
        help="capture every time, start Ray's workers as Ray does and each launch's hosts anew",
    )

    parser.addoption(
        "--simulated-gpus",
        type=int,
        default=0,
        help="run tests marked gpu on so many simulated ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    table = config.getoption("cpu_table")
    if config.getoption("cpu") or table:
        config.pluginmanager.register(Seconds(table))


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `-m gpu --simulated-gpus 2`, assert that the test has no race and no early free.
    Built-in Triton kernels run only in tests/kernels, because the interpreter takes seconds for
    each."""
    num = request.config.getoption("simulated_gpus")
    if not num or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from dtensor.testing import simulated_gpus
    from tests.testing.gpus.matrix import without_kernels

    without = nullcontext() if request.path.parent.name == "kernels" else without_kernels()
    with without, simulated_gpus(num) as gpus:
        yield
        report = gpus.report()
    assert not report.races and not report.early_frees, report


LONG_S = {"test_copies.py": 45.0, "test_two_hosts.py": 35.0, "test_placing.py": 12.0}
"""Of slow tests that take much longer than others do: seconds, by the clock."""


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the cases of marked tests: of a `sample`, the other cases run only in `make sweep`; of
    a `default`, only in `make test-all`, as does a Ray test without a `default`. If workers share
    the files, the longest files go first."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "sample" in marks and not _named(item, "sample"):
            item.add_marker("sweep")
        if not _named(item, "default") if "default" in marks else "ray" in marks:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        seconds: dict[Path, float] = defaultdict(float)
        for item in items:
            seconds[item.path] += _seconds(item)
        items.sort(key=lambda item: (-seconds[item.path], item.path))  # its own order within


def _named(item: pytest.Item, mark: str) -> bool:
    """Whether the item's mark names its case, or names no case."""
    cases = next(item.iter_markers(mark)).args
    return not cases or item.callspec.id in cases  # type: ignore[attr-defined]


def _seconds(item: pytest.Item) -> float:
    """Estimate the test's duration by its marks."""
    marks = {mark.name for mark in item.iter_markers()}
    if marks & {"sweep", "gpu"}:
        return 0.0
    if "slow" not in marks:
        return 0.03
    return LONG_S.get(item.path.name, 3.0 if "ray" in marks else 1.0)


def pytest_collection() -> None:
    """Pause the garbage collector during collection, because nearly everything imported stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


FROZEN = pytest.StashKey[tuple[Path, int]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    _freeze(item)
    if item.get_closest_marker("ray") is not None and find_spec("ray") is None:
        pytest.skip(missing("ray"))
    with _skipped_without_its_extra():
        yield


def _freeze(item: pytest.Item) -> None:
    """Exclude objects that exist before a file's tests from garbage collection. Each failing step
    collects garbage; so the objects of a test that imports much (such as torch's compiler) are
    excluded from then on, too."""
    now = item.path, len(sys.modules) // 200
    if item.config.stash.get(FROZEN, None) != now:
        item.config.stash[FROZEN] = now
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    with _skipped_without_its_extra():
        yield


@contextmanager
def _skipped_without_its_extra() -> Iterator[None]:
    """Skip a test that imports a package of an extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if why := absent(error):
            pytest.skip(why)
        raise


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed random numbers, so that each test draws the same ones whichever test ran before."""
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # which formats the stack, for a CUDA that never comes
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def no_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off warnings of slow runs; their tests turn them on."""
    monkeypatch.setenv("DTENSOR_LATE_WARNINGS", "0")


@pytest.fixture(autouse=True)
def captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share captured graphs between tests that plan the same model; tests/frontend tests the
    capture itself."""
    if request.config.getoption("plain"):
        return
    own = request.path.name.startswith("test_python_state")
    if "frontend" not in request.path.parts and not own:
        for user in capturing():
            monkeypatch.setattr(user, "capture", shared_capture)


@functools.cache
def capturing() -> list[ModuleType]:
    """Return the modules whose captures are shared."""
    names = "dtensor.api.search.placements", "dtensor.api.step.bound_call", "tests.plans"
    return [importlib.import_module(name) for name in names]


@pytest.fixture(scope="session")
def warm_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork Ray's workers from a process that has imported torch, as in a launch."""
    pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.bootstrap.fork_server import forked_workers
    from dtensor.daft.ray.bootstrap.start_ray import end_ray

    with nullcontext() if request.config.getoption("plain") else forked_workers():
        yield
        end_ray()


@pytest.fixture(scope="module")
def ray_session(request: pytest.FixtureRequest, warm_workers: None) -> Iterator[None]:
    """Start a Ray that launches join and must not end. All tests of a run share it and its hosts,
    except tests that count what a launch leaves behind."""
    ray = pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.bootstrap.start_ray import start_ray

    start_ray(None)
    anew = request.config.getoption("plain") or request.path.name == "test_chaos.py"
    with hosts_may_stand_still(), nullcontext() if anew else handed_on():
        yield
    assert ray.is_initialized()


@contextmanager
def hosts_may_stand_still() -> Iterator[None]:
    """Disable failure detection by silence, because a busy machine may delay processes for many
    seconds. Tests stop processes by signal; test_failure_detector.py uses a fake clock."""
    from dtensor.daft.ray.diagnosis import failure_detector
    from dtensor.daft.ray.recovery.recovery import Recovery

    meeting = Recovery._wait.__kwdefaults__
    assert meeting is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure_detector, "SILENT_S", math.inf)
        patch.setitem(meeting, "patience_s", 600.0)
        yield


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # before the summary: hypothesis is imported there, and asks the collector
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from dtensor.daft.ray.bootstrap.start_ray import end_ray

        end_ray()
