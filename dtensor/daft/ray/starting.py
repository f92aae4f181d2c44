"""Starting and ending Ray, actors and their processes, without leaving any behind.

    home = Home(address=None)                          # joins a Ray, or starts one on this machine
    process = home.spawn((0,), "cpu", Actor)           # and its counter file
    home.close()                                       # both end, and Ray if it was started here

`ActorProcess` has, on this machine, a handle to the process that ends it even when it is stopped
(Ray's kill needs the process to answer). `ranks_per_gpu` says how ranks share GPUs, and that there
are enough: Ray would wait for ever for one that it does not have.

Invariants: only what was started here is ended here, and all of it, whatever raises meanwhile.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, MappingProxyType
from typing import Any

import ray

from dtensor.daft.ray.progress import CounterFile

RELEASE_S = 10.0
"""How long Ray may take to hand out the GPUs of actors that have just ended."""
START_S = 180.0
"""How long processes may take to start and to connect: each imports torch, and they share cores."""

_ray: Any = ray  # Ray's stubs leave most of its types unknown
END_S = 30.0
"""How long a process may take to end after SIGKILL: it frees its memory."""
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
    try:
        with _environment(worker_environment()), _interrupts_later():
            _ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=8,
                object_store_memory=100 << 20,
            )
        _own_sessions.add(_session())
    except BaseException:
        _ray.shutdown()
        raise
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


@contextmanager
def _interrupts_later() -> Generator[None]:
    """Ctrl-C takes effect at the end, or at the second time: Ray that is interrupted while it
    starts believes that it has not, and the next start of it aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts come to the main thread alone
        return
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()

    def later(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1 and callable(before):
            before(number, frame)

    if callable(before):  # else it is ignored, or not Python's
        signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(pressed[0], None)


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
        cls: type,
        asked: Mapping[str, object],
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
        self._ended = False  # before anybody held on to it

    def watch(self) -> None:
        """Hold on to the process as soon as it has started."""
        if self._process is None and not self._ended and self.counter.pid:
            try:
                self._process = os.pidfd_open(self.counter.pid)
            except ProcessLookupError:
                self._ended = True

    @property
    def id(self) -> str:
        """What Ray's errors call it."""
        return str(self.actor._actor_id.hex())

    @property
    def gone(self) -> bool:
        """Whether the process has ended, as far as can be seen from here."""
        self.watch()
        return self._ended or self._ends_within(0.0)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it: its state says so, where a heartbeat may be late."""
        try:
            stat = Path(f"/proc/{self.counter.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        """Ask Ray to end it; a process that runs ends at once."""
        self.watch()
        if ray.is_initialized():
            _ray.kill(self.actor, no_restart=True)

    def end(self, grace_s: float = 1.0) -> None:
        """After `kill`: wait for the process to end; a stopped one needs a signal."""
        if self._process is not None and not self._ends_within(grace_s):
            with suppress(ProcessLookupError):  # it may end between the two lines
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self._ends_within(END_S)

    def close(self) -> None:
        """Let go of the process and its file."""
        if self._process is not None:
            os.close(self._process)
        self._process, self._ended = None, True
        self.counter.close()

    def _ends_within(self, seconds: float) -> bool:
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))


class Home:
    """What a launch on Ray has on this machine: Ray, if it was started here, a folder of counter
    files, the processes of its actors."""

    def __init__(self, address: str | None) -> None:
        self.processes: list[ActorProcess] = []
        with ExitStack() as ending:
            folder = TemporaryDirectory(prefix="dtensor-", ignore_cleanup_errors=True)
            self._folder = Path(ending.enter_context(folder))
            if start_ray(address):
                ending.callback(_ray.shutdown)
            self._ending = ending.pop_all()

    def spawn(
        self,
        ranks: tuple[int, ...],
        device: str,
        cls: type,
        asked: Mapping[str, object] = NO_OPTIONS,
    ) -> ActorProcess:
        """An actor in a process of its own; nothing is waited for."""
        index = len(self.processes)
        counter = CounterFile(self._folder, index)
        self.processes.append(ActorProcess(index, ranks, device, counter, cls=cls, asked=asked))
        return self.processes[-1]

    def close(self) -> None:
        """End all of it, waiting until it has ended. Twice is fine."""
        processes, self.processes = self.processes, []
        with self._ending as ending:  # the last first; each is done, whichever raises
            for process in processes:
                ending.callback(process.close)
            for process in processes:
                ending.callback(process.end)
            for process in processes:
                process.kill()


def own_address() -> str:
    """Where actors reach this machine: loopback, unless Ray spans several machines."""
    nodes: list[dict[str, Any]] = _ray.nodes()
    if sum(bool(node["Alive"]) for node in nodes) == 1:
        return "127.0.0.1"
    return str(_ray.util.get_node_ip_address())
