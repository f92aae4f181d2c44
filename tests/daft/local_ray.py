"""Launches that start Ray themselves, run in a separate process: `python -m tests.daft.local_ray
CASE` prints its findings as JSON."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch

from dtensor import daft
from dtensor.daft.ray.channel import local_ray
from tests.chaos.watch import held, left, processes_of, running

RAYS_OWN = ("RAY_", "PYTHONBREAKPOINT", "SPT_NOENV", "__RAYLET", "TPU_")
"""What of the environment Ray sets for each worker."""


PRELOADED = ("dtensor", "torch", "numpy", "_cython")


class Host:
    """The state of a process as a user's program sees it."""

    def facts(self) -> dict[str, Any]:
        imported = sorted(name for name in sys.modules if not name.startswith("ray."))
        return {
            "environment": {k: v for k, v in os.environ.items() if not k.startswith(RAYS_OWN)},
            "folder": os.getcwd(),
            "path": sys.path,
            "modules": imported,
            "limits": [resource.getrlimit(n) for n in range(16)],
            "affinity": sorted(os.sched_getaffinity(0)),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "handlers": {str(n): handler(n) for n in signal.valid_signals()},
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "torch": [
                torch.get_num_threads(),
                str(torch.get_default_dtype()),
                torch.are_deterministic_algorithms_enabled(),
                torch.is_grad_enabled(),
                hasattr(torch, "spoilt"),
            ],
            "collector": [gc.isenabled(), sys.getrecursionlimit(), sys.getswitchinterval()],
        }

    def draws(self) -> list[float]:
        """Return draws from random generators that nobody has seeded."""
        return [random.random(), float(numpy.random.random()), float(torch.rand(()))]

    def process(self) -> int:
        return os.getpid()

    def spoil(self) -> None:
        os.environ["SPOILT"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/spoilt")
        sys.modules["spoilt"] = sys.modules["os"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        torch.spoilt = True  # type: ignore[attr-defined]
        os.nice(1)

    def raises(self) -> None:
        raise ValueError("spoilt")

    def dies(self) -> None:
        os._exit(3)


def handler(number: int) -> str:
    found = signal.getsignal(number)
    return getattr(found, "__qualname__", str(found))


@contextmanager
def hosts(**stated: Any) -> Iterator[tuple[Any, Any]]:
    with daft.launch("ray", deadline_s=300.0, **stated):
        yield daft.spawn(Host), daft.spawn(Host)


def keeper() -> int | None:
    """Return the process that owns Ray."""
    ray = local_ray._current
    return None if ray is None else ray._process.pid


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, old in before.items():
        new = after[name]
        if old != new:
            pairs = old.items() ^ new.items() if isinstance(old, dict) else set(old) ^ set(new)
            found.append(f"{name}: {sorted(pairs) or (old, new)}")
    return found


def until(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120.0
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


# -- cases ----------------------------------------------------------------------------------------
def as_new() -> dict[str, Any]:
    """Compare hosts of a reused Ray after launches that changed their state, failed, or lost a
    host."""
    with hosts() as (a, b):
        new, process = a.facts().get(), a.process().get()
        drawn = [a.draws().get(), b.draws().get()]
        first = keeper()
        a.spoil().get()
        b.spoil().get()
    found = {"spoilt": []}
    with hosts() as (a, b):
        same = keeper() == first
        found["spoilt"] = differences(new, a.facts().get())
        another = a.process().get() != process
        drawn += [a.draws().get(), b.draws().get()]
        caught = a.raises()
        with suppress(daft.TaskError):
            caught.get()
    with hosts() as (a, _):
        same = same and keeper() == first
        found["failed"] = differences(new, a.facts().get())
    with hosts(warm=False) as (a, _):
        replaced = keeper() != first
        unforked = a.facts().get()
        for facts in (new, unforked):  # a fork has more modules imported
            facts["modules"] = [m for m in facts["modules"] if not m.startswith(PRELOADED)]
        found["not forked"] = differences(new, unforked)
    return {
        "same Ray": same,
        "another process": another,
        "differences": found,
        "alike drawn": any(len(set(each)) < len(drawn) for each in zip(*drawn, strict=True)),
        "not kept": replaced and keeper() is None,
    }


def replaced() -> dict[str, Any]:
    """Report in which cases Ray is replaced."""
    found: dict[str, Any] = {}

    def launch() -> int | None:
        with hosts() as (a, _):
            a.process().get()
        return keeper()

    first = launch()
    os.environ["ANOTHER"] = "1"
    second = launch()
    found["another environment"] = first != second
    assert second is not None
    os.kill(second, signal.SIGSTOP)
    third = launch()
    found["stopped"] = third != second
    with hosts() as (a, _):
        same = keeper() == third
        with suppress(daft.ActorLost):
            a.dies().get()
    found["a host was lost"] = same and keeper() is None
    local_ray.IDLE_S = 0.5
    fourth = launch()
    assert fourth is not None
    found["idle"] = until(lambda: not running(fourth))
    local_ray.IDLE_S = 60.0
    found["after it"] = launch() is not None
    return found


def forked() -> dict[str, Any]:
    """Check that a fork neither uses nor ends the Ray of its parent."""
    with hosts() as (a, _):
        before = keeper()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, str(local_ray._current).encode())
            local_ray.end_local_ray()
            os._exit(0)
        os.waitpid(child, 0)
        seen = os.read(reading, 100).decode()
        process = a.process().get()
    with hosts() as (a, _):
        same = keeper() == before and a.process().get() != process
    return {"in the fork": seen, "goes on": same}


def fails() -> dict[str, Any]:
    """Report the errors if Ray cannot be started."""
    found: dict[str, Any] = {}
    os.environ["RAY_TMPDIR"] = "/proc/nowhere"
    for name in ("at the call", "at the end"):
        try:
            with hosts() as (a, _):
                if name == "at the call":
                    a.process().get()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    del os.environ["RAY_TMPDIR"]
    with hosts() as (a, _):
        found["after it"] = a.process().get() > 0
    return found


def interrupted() -> dict[str, Any]:
    """Press Ctrl-C while Ray starts."""
    import dtensor as dt
    from dtensor.daft.ray.bootstrap.rendezvous import SignedStore

    SignedStore.open("127.0.0.1", bytes(32))  # the first store of a process leaves a pipe open
    before = held()
    mesh = dt.Mesh(tp=2)
    caught = ""
    try:
        with dt.launch(mesh, "ray", warm=False):
            ray = local_ray._current
            assert ray is not None
            os.kill(ray._process.pid, signal.SIGSTOP)  # it never comes up
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            dt.distribute(torch.ones(4, 4), mesh, tp=dt.Row())
    except KeyboardInterrupt:
        caught = "KeyboardInterrupt"
    others = "temporary file: "  # other processes create temporary files too
    more = [each for each in left(before, 60.0) if not each.startswith(others)]
    return {"caught": caught, "left": more}


def at_exit() -> dict[str, Any]:
    """Return the processes of a launch, for `test_local_ray.py` to look for after this process
    has ended."""

    with hosts() as (a, b):
        a.process().get()
        b.process().get()
    others = set(processes_of(os.getpid())) - {os.getpid()}
    return {"processes": sorted(others), "in Ray": "ray" in sys.modules and in_ray()}


def killed() -> dict[str, Any]:
    """Kill this process inside a launch."""

    with hosts() as (a, b):
        a.process().get()
        b.process().get()
        others = set(processes_of(os.getpid())) - {os.getpid()}
        print(json.dumps({"processes": sorted(others)}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def killed_while_it_starts() -> dict[str, Any]:
    """Kill this process while Ray hangs during its start."""

    os.environ["RAY_worker_register_timeout_seconds"] = "1"  # noqa: SIM112 - then init hangs
    with hosts():
        until(lambda: "raylet" in processes_of(os.getpid()).values())
        others = set(processes_of(os.getpid())) - {os.getpid()}
        print(json.dumps({"processes": sorted(others)}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def in_ray() -> bool:
    import ray

    return bool(ray.is_initialized())


if __name__ == "__main__":
    cases: list[Callable[[], dict[str, Any]]] = [
        *(as_new, replaced, forked, fails, interrupted, at_exit, killed, killed_while_it_starts),
    ]
    case = next(each for each in cases if each.__name__ == sys.argv[1])
    print(json.dumps(case()))
