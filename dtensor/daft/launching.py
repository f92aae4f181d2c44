"""Launch actors (`launch`, `spawn`) and ranks (`launch_cluster`).

    with daft.launch(backend="ray", deadline_s=30.0):
        reward = daft.spawn(Reward, threshold=0.5, name="reward", resources={"CPU": 1})
        judge = daft.spawn(Judge, host=reward)          # in the same process
    with daft.launch_cluster(4, backend="ray") as cluster:
        ...                                             # four ranks, that run programs

Leaving a launch waits for its tasks, ends its actors, and raises the first failure that was not
read; leaving it by an exception does not wait. Only the launch that started Ray shuts it down.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from dtensor.daft.cluster.cluster import Backend, Cluster
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.diagnosis.one_process import status_here
from dtensor.daft.launch_options import LaunchOptions
from dtensor.daft.tasks.actors import (
    ActorHandle,
    Session,
    check_no_open_launch,
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
    """Open a session in which actors can be spawned. Its `with` block or `close()` ends them.

    `backend` is "inprocess" or "ray"; `address` is the address of a Ray cluster to join. On Ray,
    `deadline_s` limits how long an actor's process may be silent, and `call_deadline_s` how long a
    method may take; `warm` lets a Ray that is started here stay for the next launch. `seed` selects
    an order of compiled functions in-process. `LaunchOptions` describes them in detail. Raises
    ValueError if an argument is invalid, and RuntimeError if another launch is open.
    """
    options = LaunchOptions(
        backend=backend,
        address=address,
        deadline_s=deadline_s,
        call_deadline_s=call_deadline_s,
        seed=seed,
        warm=warm,
    )
    check_no_open_launch()
    return enter(_new_session(options), user_line())


class DeferredLaunch:
    """A launch of actors that starts when the first actor is spawned."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._session: Session | None = None
        sessions.append(self)

    def __call__(self) -> Session:
        """Return the session, starting it at the first call."""
        with self._lock:
            if self._session is None:
                self._session = _new_session(self._options)
                sessions[sessions.index(self)] = self._session
            return self._session

    def end(self, *, quiet: bool = False) -> None:
        """Close the session if it was started (`Session.close`). May be called again."""
        if self._session is not None:
            self._session.close(quiet=quiet)
        elif self in sessions:
            sessions.remove(self)


def _new_session(options: LaunchOptions) -> Session:
    """Start a session of the chosen backend."""
    if options.backend == "inprocess":
        return LocalSession(options.seed)
    _check_ray()
    _begin_ray(options)
    from dtensor.daft.ray.actors.session import RaySession

    return RaySession(options)


def spawn(
    cls: type,
    *args: Any,
    name: str | None = None,
    resources: Mapping[str, float] | None = None,
    host: ActorHandle | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """Spawn an actor: the object `cls(*args, **kwargs)`, created in the actor's process.

    It belongs to the innermost launch (also `dt.launch`) and ends with it. If `cls` raises, the
    futures of the actor's methods raise that error.

    Args:
        name: the actor's name in errors; by default its class with a number.
        resources: what Ray reserves for its process, {"CPU": 1, "GPU": 1}; by default nothing.
        host: another actor, whose process this one shares.

    Raises RuntimeError outside a launch.
    """
    shared = None if host is None else info_of(host)
    return ActorHandle(
        current_session().spawn(cls, args, kwargs, name=name, resources=resources, host=shared)
    )


CLUSTERS: dict[tuple[str, str], Callable[..., Cluster]] = {}
"""(backend, device type) -> a function that creates clusters instead, to simulate GPUs."""


def launch_cluster(size: int, *, together: Sequence[Sequence[int]] = (), **options: Any) -> Cluster:
    """Start `size` ranks.

    `options`: the fields of `LaunchOptions`. `together`: groups of ranks that exchange the most;
    Ray puts the ranks of a group on one machine if it can. Raises ValueError if an option is
    invalid, and ImportError if Ray is missing.
    """
    return start_cluster(size, LaunchOptions(**options), together)


def start_cluster(
    size: int, options: LaunchOptions, together: Sequence[Sequence[int]] = ()
) -> Cluster:
    """Start `size` ranks. `options` have been checked, `together` is as in `launch_cluster`. Raises
    ValueError if replacement of lost ranks is requested on GPUs, or if there is no GPU."""
    device = torch.device(options.device)
    if options.backend == "ray" and device.type == "cuda" and options.snapshot_every is not None:
        raise ValueError(
            "spares and snapshot_every on GPUs: lost ranks can be replaced on CPUs alone. NCCL's "
            "kernels wait for a lost peer, and a GPU's values are kept nowhere else.\n"
            "  Fix: leave both out, and resume from a checkpoint"
        )
    if (make := CLUSTERS.get((options.backend, device.type))) is not None:
        return make(
            size,
            ranks_per_actor=options.ranks_per_actor or 1,
            seed=options.seed,
            in_order=options.deterministic,
        )
    if options.backend == "inprocess":
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device={options.device!r}, and this process sees no GPU.\n  Fix: device='cpu'"
            )
        return InProcessCluster(
            size,
            device,
            ranks_per_actor=options.ranks_per_actor or 1,
            seed=options.seed,
            snapshot_every=options.snapshot_every,
            diagnose=status_here,
        )
    _check_ray()
    if options.device == "cpu":
        _begin_ray(options)
    from dtensor.daft.ray.cluster import RayCluster

    return RayCluster(size, options, together)


def _check_ray() -> None:
    """Raise ImportError if Ray is not installed. Does not import Ray, which takes half a second."""
    is_installed = False
    with suppress(ModuleNotFoundError):
        is_installed = sys.modules.get("ray") is not None or find_spec("ray") is not None
    if not is_installed:
        raise ImportError(
            "backend='ray' needs Ray, which is not installed in this Python "
            f"({sys.executable}).\n"
            "  Fix: pip install 'ray>=2.50,<3', or backend='inprocess'."
        )


def _begin_ray(options: LaunchOptions) -> None:
    """Start Ray in parallel with the imports that follow: each takes half a second."""
    from dtensor.daft.ray.channel.local_ray import begin

    begin(options.address, options.warm)
