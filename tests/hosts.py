"""Hosts that outlive a launch: the tests of one Ray hand them on, as each costs 2 s of a core.

    with handed_on():
        with dt.launch(mesh, backend="ray"): ...        # starts hosts
        with dt.launch(mesh, backend="ray"): ...        # the same processes, with nothing in them

A host is handed on at the end of a launch if it is alive and has done all that it was asked to do;
others end as they would. So a test that kills, stops or overtaxes a host, or asks for resources,
has the same as without this; one that counts processes at the end of a launch must do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtensor.daft.ray.channel.host_actor import packed

IDLE_S = 3.0  # that a launch waits at its end for hosts to have done what they were asked


class Nothing:
    """What a host has between two launches."""

    def __init__(self, counter: object) -> None: ...


class IdleHosts:
    """Ray's handles to them, of one session of Ray's."""

    def __init__(self) -> None:
        self.session = ""
        self.actors: list[Any] = []

    def take(self) -> Any:
        """One, or None."""
        if self.session != session_name():
            self.session, self.actors = session_name(), []
        return self.actors.pop() if self.actors else None


idle = IdleHosts()


@contextmanager
def handed_on() -> Iterator[None]:
    from dtensor.daft.ray.channel import processes

    start_host, close = processes.start_host, processes.LaunchProcesses.close

    def take_or_start(
        local: Any,
        options: Mapping[str, object],
        counter: Path,
        kind: Callable[..., object],
        *arguments: object,
    ) -> Any:
        taken = None if local is not None or any(options.values()) else idle.take()
        if taken is None:
            return start_host(local, options, counter, kind, *arguments)
        taken.actor.host.remote(str(counter), packed(kind, arguments))
        return taken

    def hand_on_and_close(home: processes.LaunchProcesses) -> None:
        home.hang_up()  # so that they carry out Ray's calls again
        for host in at_rest(home.processes if home.local is None else []):
            home.processes.remove(host)
            host.actor.serving = None
            idle.actors.append(host.actor)
            host.close()
        close(home)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_host", take_or_start)
        patch.setattr(processes.LaunchProcesses, "close", hand_on_and_close)
        yield


def at_rest(hosts: list[Any]) -> list[Any]:
    """Those that have emptied themselves in time; they have answered before, so have started."""
    import ray
    import ray.exceptions

    asked = {
        host.actor.actor.host.remote(str(host.counter.path), packed(Nothing, ())): host
        for host in hosts
        if host.answered and not host.gone and not host.stopped
    }
    if not asked or not ray.is_initialized():
        return []
    came, _ = ray.wait(list(asked), num_returns=len(asked), timeout=IDLE_S)
    found = []
    for ref in came:
        try:
            ray.get(ref)
        except ray.exceptions.RayError:  # it died meanwhile
            continue
        found.append(asked[ref])
    return found


def session_name() -> str:
    import ray

    return str(ray.get_runtime_context().get_session_name())
