"""`launch`, `spawn` and `launch_cluster`: where actors and ranks come from.

    with daft.launch(backend="ray", deadline_s=30.0):
        reward = daft.spawn(Reward, threshold=0.5, name="reward", resources={"CPU": 1})
        judge = daft.spawn(Judge, host=reward)          # in the same process
    with daft.launch_cluster(4, backend="ray") as cluster:
        ...                                             # four ranks, that run programs

Invariants: Ray is shut down only by the launch that started it; leaving a launch waits
for the tasks under way, ends its actors, and raises the first failure of a method that nobody has
read. Leaving it by an exception waits for nothing.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, assert_never, get_args

import torch

from dtensor.daft.cluster.cluster import Backend, Cluster
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.diagnosis.one_process import status_here
from dtensor.daft.tasks.actors import (
    ActorHandle,
    Session,
    check_alone,
    current_session,
    enter,
    info_of,
    sessions,
)
from dtensor.daft.tasks.futures import user_line
from dtensor.daft.tasks.local_session import LocalSession


def launch(
    backend: Backend = "inprocess",
    *,
    address: str | None = None,
    deadline_s: float = 60.0,
    call_deadline_s: float = math.inf,
    seed: int = 0,
    warm: bool = True,
) -> Session:
    """A place for actors, until its `with` block or `close()` ends them.

    `address` joins a Ray that runs already, as one in this process is joined too. `deadline_s`: how
    long an actor's process may be silent before it counts as lost, or take to start;
    `call_deadline_s`: how long a method may take before its process is ended (both Ray only).
    `seed` picks one of the legal orders in which compiled functions run in-process. `warm`: a Ray
    that is started here stays for a minute for the next launch of this process; False ends it with
    the launch, and one that has stayed before.
    ValueError for another backend, and for seconds that are none; RuntimeError within another
    launch that is open.
    """
    _check(backend, deadline_s=deadline_s, call_deadline_s=call_deadline_s)
    check_alone()
    made = _session(backend, address, deadline_s, call_deadline_s, seed, warm)
    return enter(made, user_line())


class DeferredLaunch:
    """As `launch`, but nothing is started before an actor is spawned; until `end`."""

    def __init__(
        self,
        backend: Backend,
        address: str | None,
        deadline_s: float,
        call_deadline_s: float,
        warm: bool = True,
    ) -> None:
        self._stated = backend, address, deadline_s, call_deadline_s, 0, warm
        self._lock = threading.Lock()
        self._made: Session | None = None
        sessions.append(self)

    def __call__(self) -> Session:
        with self._lock:
            if self._made is None:
                self._made = _session(*self._stated)
                sessions[sessions.index(self)] = self._made
            return self._made

    def end(self, *, quiet: bool = False) -> None:
        """As `Session.close`, if there is one. Twice is fine."""
        if self._made is not None:
            self._made.close(quiet=quiet)
        elif self in sessions:
            sessions.remove(self)


def _session(
    backend: Backend,
    address: str | None,
    deadline_s: float,
    call_deadline_s: float,
    seed: int,
    warm: bool,
) -> Session:
    match backend:
        case "inprocess":
            return LocalSession(seed)
        case "ray":
            _check_ray()
            _begin_ray(address, warm)
            from dtensor.daft.ray.actors.session import RaySession

            return RaySession(
                address=address,
                deadline_s=deadline_s,
                call_deadline_s=call_deadline_s,
                warm=warm,
            )
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

    It is of the innermost launch, `dt.launch` included, and ends with it. RuntimeError outside of
    one. `name`: what errors call it; by default its class with a number.
    `resources`: what Ray reserves for its process, in Ray's names: {"CPU": 1, "GPU": 1}; by
    default nothing. `host`: share the process of another actor. If `cls` raises, the handle's
    methods give futures with that failure.
    """
    shared = None if host is None else info_of(host)
    return ActorHandle(
        current_session().spawn(cls, args, kwargs, name=name, resources=resources, host=shared)
    )


CLUSTERS: dict[tuple[str, str], Callable[..., Cluster]] = {}
"""By backend and type of device: what makes clusters instead, as where GPUs are simulated."""


def launch_cluster(
    size: int,
    *,
    backend: Backend = "inprocess",
    device: str = "cpu",
    address: str | None = None,
    deadline_s: float = 60.0,
    call_deadline_s: float = 3600.0,
    ranks_per_actor: int | None = None,
    seed: int = 0,
    snapshot_every: int | None = None,
    spares: int = 0,
    max_restarts: int = 100,
    together: Sequence[Sequence[int]] = (),
    warm: bool = True,
) -> Cluster:
    """Start `size` ranks, on a `device` of type "cpu" or "cuda".

    `address` joins a Ray cluster that runs already. Ray only, as nothing waits in-process:
    `deadline_s` is how long the ranks may make no progress before one counts as lost; a `Call` that
    uses the CPU goes on, after a warning, for up to `call_deadline_s`. `ranks_per_actor`:
    consecutive ranks that share an actor, and so on Ray a process and, on "cuda", a GPU; by default
    1. Fewer free GPUs than actors are refused. `seed` picks one of the legal orders in which the
    ranks of a host run. `snapshot_every`: copies of what runs write are kept, so that it can be
    undone that they did: in-process before each run, so that one is undone wherever a call of it
    raises. On Ray after each, where a lost rank's successor finds them: it is replaced, and runs
    since are done again (`ray/recovery/recovery.py`). `spares`: processes that wait for that; with
    some, every run is kept. `max_restarts`: how many processes may be replaced before the loss of
    one is an error. `together`: ranks that exchange most with each other, which come to one machine
    if they can (`ray/bootstrap/actor_placement.py`). `warm`: as of `launch`. ValueError for another
    backend, for seconds that are none, and for numbers out of range; ImportError where Ray is not
    installed.
    """
    _check(backend, deadline_s=deadline_s, call_deadline_s=call_deadline_s)
    if snapshot_every is not None and (type(snapshot_every) is not int or snapshot_every < 1):
        raise ValueError(
            f"snapshot_every={snapshot_every!r} is no number of runs.\n  Fix: snapshot_every=1"
        )
    if ranks_per_actor is not None and (type(ranks_per_actor) is not int or ranks_per_actor < 1):
        raise ValueError(
            f"ranks_per_actor={ranks_per_actor!r} is no number of ranks.\n  Fix: ranks_per_actor=1"
        )
    for name, number in (("spares", spares), ("max_restarts", max_restarts)):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name}={number!r} is no number of processes.\n  Fix: {name}=1")
    if spares and snapshot_every is None:
        snapshot_every = 1
    if backend == "ray" and device.startswith("cuda") and snapshot_every is not None:
        raise ValueError(
            "spares and snapshot_every on GPUs: lost ranks can be replaced on CPUs alone. NCCL's "
            "kernels wait for a lost peer, and a GPU's values are kept nowhere else.\n"
            "  Fix: leave both out, and resume from a checkpoint"
        )
    if (make := CLUSTERS.get((backend, torch.device(device).type))) is not None:
        return make(size, ranks_per_actor=ranks_per_actor or 1, seed=seed)
    match backend:
        case "inprocess":
            if device.startswith("cuda") and not torch.cuda.is_available():
                raise ValueError(
                    f"device={device!r}, and this process sees no GPU.\n  Fix: device='cpu'"
                )
            per_actor = 1 if ranks_per_actor is None else ranks_per_actor
            return InProcessCluster(
                size,
                torch.device(device),
                ranks_per_actor=per_actor,
                seed=seed,
                snapshot_every=snapshot_every,
                diagnose=status_here,
            )
        case "ray":
            _check_ray()
            if device == "cpu":
                _begin_ray(address, warm)
            from dtensor.daft.ray.cluster import RayCluster

            return RayCluster(
                size,
                torch.device(device),
                address=address,
                deadline_s=deadline_s,
                call_deadline_s=call_deadline_s,
                ranks_per_actor=ranks_per_actor,
                seed=seed,
                snapshot_every=snapshot_every,
                spares=spares,
                max_restarts=max_restarts,
                together=together,
                warm=warm,
            )
        case _:
            assert_never(backend)


def _check_ray() -> None:
    """`ImportError`, with what to do, where it is not installed. It is not imported: that takes
    half a second."""
    there = False
    with suppress(ModuleNotFoundError):
        there = sys.modules.get("ray") is not None or find_spec("ray") is not None
    if not there:
        raise ImportError(
            "backend='ray' needs Ray, which is not installed in this Python "
            f"({sys.executable}).\n"
            "  Fix: pip install 'ray>=2.50,<3', or backend='inprocess'."
        )


def _begin_ray(address: str | None, warm: bool) -> None:
    """It starts while this process imports what uses it: half a second each."""
    from dtensor.daft.ray.channel.local_ray import begin

    begin(address, warm)


def _check(backend: object, **seconds: object) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}.\n  Fix: 'inprocess' or 'ray'.")
    for name, value in seconds.items():
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r} is no number of seconds.\n  Fix: {name}=60.0")
