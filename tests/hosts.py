"""Reuse host processes between launches of one Ray, because starting one costs 2 CPU seconds.

    with handed_on():
        with dt.launch(mesh, backend="ray"): ...        # starts hosts
        with dt.launch(mesh, backend="ray"): ...        # the same processes, with nothing in them

A host is reused if, at the end of a launch, it is alive and idle; other hosts end as usual. So
tests that kill, stop or overload hosts, or ask for resources, are not affected. A test that counts
processes after a launch must not use this.
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
    """The content of a host between two launches."""

    def __init__(self, counter: object) -> None: ...


class IdleHosts:
    """Ray's handles of the idle hosts of one Ray session."""

    def __init__(self) -> None:
        self.session = ""
        self.actors: list[Any] = []

    def take(self) -> Any:
        """Return one host, or None."""
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
    """Return the hosts that have emptied themselves in time; hosts that once answered have
    started."""
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
