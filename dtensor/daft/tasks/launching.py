"""`launch` and `spawn`: where actors come from.

    with daft.launch(backend="ray", deadline_s=30.0):
        reward = daft.spawn(Reward, threshold=0.5, name="reward", resources={"CPU": 1})
        judge = daft.spawn(Judge, host=reward)          # in the same process

Invariants: Ray is shut down only by the launch that started it; leaving a launch waits
for the tasks under way, ends its actors, and raises the first failure of a method that nobody has
read. Leaving it by an exception waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from dtensor.daft.cluster.cluster import Backend
from dtensor.daft.tasks.actor_session import Session, current_session, enter
from dtensor.daft.tasks.actors import ActorHandle, info_of
from dtensor.daft.tasks.local_session import LocalSession


def launch(
    backend: Backend = "inprocess",
    *,
    address: str | None = None,
    deadline_s: float = 60.0,
    seed: int = 0,
) -> Session:
    """A place for actors, until its `with` block or `close()` ends them.

    `address` joins a Ray that runs already, as one in this process is joined too. `deadline_s`: how
    long an actor's process may be silent before it counts as lost, or take to start (Ray only).
    `seed` picks one of the legal orders in which compiled functions run in-process.
    """
    match backend:
        case "inprocess":
            return enter(LocalSession(seed))
        case "ray":
            # Not at the top: Ray is an extra, and takes a second to import.
            from dtensor.daft.ray.session import RaySession

            return enter(RaySession(address=address, deadline_s=deadline_s))
        case _:
            assert_never(backend)


def spawn(
    cls: type,
    *args: Any,
    name: str | None = None,
    resources: Mapping[str, float] | None = None,
    host: ActorHandle | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """An actor of any class; it is made of `cls(*args, **kwargs)` where it will live.

    `resources`: what Ray reserves for its process, in Ray's names: {"CPU": 1, "GPU": 1}; by
    default nothing. `host`: share the process of another actor. If `cls` raises, the handle's
    methods give futures with that failure.
    """
    shared = None if host is None else info_of(host)
    return ActorHandle(
        current_session().spawn(cls, args, kwargs, name=name, resources=resources, host=shared)
    )
