"""The backends that share one contract: this process, plain processes without Ray, and Ray.

    @pytest.mark.parametrize("backend", able("run ahead"), indirect=True, scope="module")

A plain process is a fork of a process that has imported the host code of the Ray backend.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

from dtensor.daft import Cluster, Session, launch, launch_cluster

CANNOT: dict[str, dict[str, str]] = {
    "inprocess": {
        "run ahead": "a run has ended when `run` returns, so that no result is waited for",
        "time out": "no call is waited for",
        "lose a host": "the ranks and actors are in the controller's process",
        "send": "values stay in the controller's process",
        "be interrupted": "a Ctrl-C comes while the controller computes",
        "know resources": "one process is all that there is",
    },
    "processes": {"know resources": "only Ray knows what the machines have"},
    "ray": {},
}
"""By backend, what it cannot promise, and why."""


def able(*promises: str) -> list[Any]:
    """Return, as test parameters, the backends that have all these abilities."""
    known = {promise for reasons in CANNOT.values() for promise in reasons}
    assert known.issuperset(promises), promises
    marks = {"ray": [pytest.mark.ray]}
    return [
        pytest.param(backend, marks=marks.get(backend, []))
        for backend, reasons in CANNOT.items()
        if not reasons.keys() & set(promises)
    ]


# -- plain processes -------------------------------------------------------------------------------

context = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("pytest", "dtensor.daft.ray.channel.host", "dtensor.daft.ray.ranks.ranks"),
    *("dtensor.daft.ray.actors.objects", "tests.daft.actors_here", "tests.daft.actor_classes"),
)
context.set_forkserver_preload(list(PRELOADED))


class PlainHost:
    """A plain process that stands in for an `Actor` of `processes.py`."""

    def __init__(self, counter: str, given: bytes) -> None:
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_host, args=(counter, given, its), daemon=True)
        self._process.start()
        its.close()

    @property
    def id(self) -> str:
        return f"process {self._process.pid}"

    def serve(self, given: bytes) -> None:
        self._pipe.send_bytes(given)

    def ended(self, patience_s: float = 0.0) -> str | None:
        self._process.join(patience_s)
        code = self._process.exitcode
        return None if code is None else f"{self.id} has ended, by {code}"

    def kill(self) -> None:
        self._process.kill()


def _host(counter: str, given: bytes, pipe: Connection) -> None:
    from dtensor.daft.ray.channel.host_actor import HostActor

    HostActor(counter, given).serve(pipe.recv_bytes())
    with suppress(EOFError):
        pipe.recv_bytes()  # as an actor of Ray, the process stays after its connection has broken


class PlainHosts:
    """Stands in for the Ray of this machine (`LocalRay`)."""

    stays = True

    def start(self, options: Mapping[str, object], counter: str, given: bytes) -> PlainHost:
        return PlainHost(counter, given)

    def check(self) -> None: ...


@contextmanager
def plain_processes() -> Iterator[None]:
    """Make launches on Ray start plain processes inside the block."""
    from dtensor.daft.ray.channel import local_ray, processes
    from tests.conftest import hosts_may_stand_still

    with pytest.MonkeyPatch.context() as patch, hosts_may_stand_still():
        patch.setattr(local_ray, "begin", lambda *given: None)
        patch.setattr(processes, "is_possible", lambda: True)
        patch.setattr(processes, "use", lambda *, warm: PlainHosts())
        patch.setattr(processes, "release", lambda hosts: None)
        yield


# -- launches --------------------------------------------------------------------------------------

NEVER_S = 3600.0
"""A deadline that no test lives to see: a failure that is found was found by what happened."""


@dataclass(frozen=True)
class Backend:
    name: str

    @property
    def immediate(self) -> bool:
        """Whether a run has ended by the time it is submitted."""
        return self.name == "inprocess"

    def cluster(self, size: int, **options: Any) -> Cluster:
        return launch_cluster(size, backend=self._kind, **{"deadline_s": NEVER_S} | options)

    def session(self, **options: Any) -> Session:
        return launch(self._kind, **{"deadline_s": NEVER_S} | options)

    @property
    def _kind(self) -> Any:
        return "inprocess" if self.immediate else "ray"
