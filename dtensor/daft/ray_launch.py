"""Starting and ending Ray, actors and their processes, without leaving any behind.

`start_ray` joins a Ray that runs, or starts one on this machine for the controller alone;
`ActorProcess` is an actor with its counter file and, on this machine, a handle to its process
that ends it even when it is stopped (Ray's kill needs the process to answer). `ranks_per_gpu`
says how ranks share GPUs, and that there are enough: Ray would wait for ever for one that it does
not have.

Invariant: only what was started here is ended here.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import ray

from dtensor.daft.ray_actor import Actor
from dtensor.daft.ray_progress import CounterFile

RELEASE_S = 10.0
"""How long Ray may take to hand out the GPUs of actors that have just ended."""
START_S = 180.0
"""How long processes may take to start and to connect: each imports torch, and they share cores."""

_ray: Any = ray  # Ray's stubs leave most of its types unknown
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
_own_sessions: set[str] = set()  # Rays started here, whose workers inherit the environment


def start_ray(address: str | None) -> bool:
    """Make Ray usable; whether it was started here, and is to be shut down here."""
    if ray.is_initialized():
        return False
    if address is not None:
        _ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return False
    # A failure is raised as the root cause, once: Ray would also log each future nobody read.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    with _environment(worker_environment()):
        _ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            num_cpus=8,
            object_store_memory=100 << 20,
        )
    _own_sessions.add(_session())
    return True


def ranks_per_gpu(size: int, asked: int | None) -> int:
    """As asked, else a GPU for each rank where there are enough, else all ranks on one.

    `ValueError` unless Ray has a free GPU for each actor.
    """
    num_gpus = int(_ray.cluster_resources().get("GPU", 0))
    chosen = (1 if num_gpus >= size else size) if asked is None else asked
    num_actors = -(-size // chosen)
    end = time.monotonic() + RELEASE_S
    while (free := int(_ray.available_resources().get("GPU", 0))) < num_actors:
        if num_gpus < num_actors or time.monotonic() > end:
            break
        time.sleep(0.2)
    else:
        return chosen
    remedies = ["launch with device='cpu'"]
    if num_actors > 1 and num_gpus >= 1:
        remedies.insert(0, f"put all ranks on one GPU with ranks_per_actor={size}")
    raise ValueError(
        f"{size} ranks in {num_actors} actors on device 'cuda' need {num_actors} free GPUs, one "
        f"for each actor; Ray has {num_gpus}, of which {free} are free.\n"
        f"  Fix: {', or '.join(remedies)}."
    )


def _session() -> str:
    return str(_ray.get_runtime_context().get_session_name())


def worker_environment() -> dict[str, str]:
    """So that actors find the modules that the controller finds, and use one kernel thread."""
    path = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Ray's workers inherit the environment that Ray is started in."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class ActorProcess:
    """An actor, its counter file, and its process if that is on this machine.

    `cls` is made of (index, ranks, device, path of the counter); `asked` are more of Ray's options.
    """

    def __init__(
        self,
        index: int,
        ranks: tuple[int, ...],
        device: str,
        counter: CounterFile,
        *,
        cls: type = Actor,
        asked: Mapping[str, object] = NO_OPTIONS,
    ) -> None:
        self.ranks = ranks
        self.counter = counter
        options: dict[str, Any] = dict(num_cpus=0, max_restarts=0, max_task_retries=0)
        if device == "cuda":
            options["num_gpus"] = 1
        options.update(asked)
        if _session() not in _own_sessions:
            # Only then, as a runtime environment adds half a second to every actor.
            options["runtime_env"] = {"env_vars": worker_environment()}
        self.actor: Any = (
            _ray.remote(cls).options(**options).remote(index, ranks, device, str(counter.path))
        )
        self._process: int | None = None

    def watch(self) -> None:
        """Hold on to the process; call once the actor has answered."""
        if self.counter.pid:
            self._process = os.pidfd_open(self.counter.pid)

    @property
    def id(self) -> str:
        """What Ray's errors call it."""
        return str(self.actor._actor_id.hex())

    @property
    def gone(self) -> bool:
        """Whether the process has ended, as far as can be seen from here."""
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """Ask Ray to end it; a process that runs ends at once."""
        if ray.is_initialized():
            _ray.kill(self.actor, no_restart=True)

    def end(self, grace_s: float = 1.0) -> None:
        """After `kill`: wait for the process to end; a stopped one needs a signal."""
        if self._process is None:
            return
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        if not poll.poll(int(grace_s * 1000)):
            with suppress(ProcessLookupError):  # it may end between the two lines
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            poll.poll(5000)

    def close(self) -> None:
        """Let go of the process and its file."""
        if self._process is not None:
            os.close(self._process)
            self._process = None
        self.counter.close()


def own_address() -> str:
    """Where actors reach this machine: loopback, unless Ray spans several machines."""
    nodes: list[dict[str, Any]] = _ray.nodes()
    if sum(bool(node["Alive"]) for node in nodes) == 1:
        return "127.0.0.1"
    return str(_ray.util.get_node_ip_address())
