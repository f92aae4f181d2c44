"""Ray on this machine, in a process of its own, which stays for a while for the next launch.

    ray = use(warm=True)                    # starts it, or takes the one that stayed; no wait
    host = ray.start({}, counter, given)    # nor here
    host.ended(1.0)                         # None, or what is known of its end
    release(ray)                            # it rests for IDLE_S, and then ends

So this process neither imports nor joins Ray, and can work while Ray starts. Hosts are forks of a
process that has imported torch (fork_server.py), each new: none has run anything for another
launch. What a launch finds of a Ray that stayed, and what it would have found of a new one, is the
same: environment, folder, `sys.path`, limits of resources and affinity have to be what they were
when it started, or it is replaced; and so is one that is stopped, and does not answer.

Invariants: Ray ends with this process, however that ends, and at the latest `IDLE_S` after the last
launch. A fork of this process neither uses it nor ends it.
"""

from __future__ import annotations

import atexit
import getpass
import os
import pickle
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from dtensor.daft.ray.bootstrap import fork_server
from dtensor.daft.ray.bootstrap.progress import process_stat
from dtensor.daft.ray.bootstrap.worker_environment import worker_environment
from dtensor.daft.ray.channel.local_ray_process import END_S, MESSAGE
from dtensor.signals import Lock, held_back

IDLE_S = 60.0
"""For how long a Ray stays that no launch uses."""
ANSWER_S = 1.0
_OF_TESTS = "PYTEST_CURRENT_TEST"  # is another for each test, and no host's affair


class LocalHost:
    """A host that it was asked to start."""

    def __init__(self, ray: LocalRay, number: int) -> None:
        self._ray = ray
        self._number = number

    @property
    def id(self) -> str:
        """What Ray's errors call it; "no actor" until that is known."""
        return self._ray.ids.get(self._number, "no actor")

    def serve(self, given: bytes) -> None:
        self._ray.say("host_serves", self._number, given)

    def ended(self, patience_s: float = 0.0) -> str | None:
        return self._ray.ended(self._number, patience_s)

    def kill(self) -> None:
        self._ray.kill(self._number)


class LocalRay:
    """`idle_s`: for how long it stays without a launch."""

    def __init__(self, idle_s: float) -> None:
        self.users: int = 0
        self.stays: bool = idle_s > 0  # until a host has ended by itself
        self.ids: dict[int, str] = {}
        self._inherited = _inherited()
        self._numbers = count()
        self._lock = Lock()
        self._up = False
        self._awake = True
        self._failure: str | None = None
        self._ended: dict[int, str | None] = {}
        self._resources: dict[str, float] | None = None
        environment = {**os.environ, **worker_environment()}
        for name in (_OF_TESTS, fork_server.ADDRESS):
            environment.pop(name, None)
        with held_back():
            self._sock, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                for each in (self._sock, its):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
                module = "dtensor.daft.ray.channel.local_ray_process"
                given = [str(its.fileno()), str(os.getpid()), str(idle_s)]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *given],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # Ray writes there of workers that were killed
                    pass_fds=[its.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is this process's affair
                )

    # -- hosts ----------------------------------------------------------------------------------
    def start(self, options: Mapping[str, object], counter: str, given: bytes) -> LocalHost:
        number = next(self._numbers)
        self.say("start", number, dict(options), counter, given)
        return LocalHost(self, number)

    def ended(self, number: int, patience_s: float) -> str | None:
        """What is known of the end of a host, if it has ended."""
        self._hear(lambda: number in self._ended, patience_s)
        return self._ended.get(number, self._failure)

    def kill(self, number: int) -> None:
        self.say("kill", number)

    def resources(self) -> dict[str, float]:
        """All that Ray has, in its names; waits for it to start."""
        self._resources = None
        self.say("resources")
        while not self._hear(lambda: self._resources is not None, 0.25):
            self.check()
        return self._resources or {}

    def check(self) -> None:
        """`RuntimeError` if Ray could not be started, or has ended."""
        self._hear(lambda: self._failure is not None, 0.0)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @property
    def failed(self) -> bool:
        self._hear(lambda: False, 0.0)
        return self._failure is not None

    # -- between launches -----------------------------------------------------------------------
    def fits(self) -> bool:
        """Whether what starts now would be as with a new Ray."""
        self._hear(lambda: False, 0.0)
        if self._failure is not None or self._inherited != _inherited():
            return False
        if not self._up:
            return True  # it is still starting
        self._awake = False
        self.say("wake")
        while not self._hear(lambda: self._awake, ANSWER_S):
            if self._failure is not None or self._stopped:
                return False
        return True

    @property
    def _stopped(self) -> bool:
        """Whether a signal has stopped it; else the machine is busy."""
        return process_stat(self._process.pid)[0] in "Tt"

    def end(self) -> None:
        """With all that it has started. Twice is fine."""
        self._sock.close()
        try:
            self._process.wait(END_S)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def forget(self) -> None:
        """It is another process's, of which this is a fork."""
        self._sock.close()
        self._process.returncode = 0  # or it would say that it is running still

    # -- messages -------------------------------------------------------------------------------
    def say(self, *what: object) -> None:
        """What cannot be said has its reason in `check`."""
        with self._lock:
            self._read()
            if self._failure is None:
                with suppress(OSError):
                    self._sock.send(pickle.dumps(what))
                    return
                self._read()  # why it has ended
                self._lost()

    def _hear(self, done: Any, seconds: float) -> bool:
        """Whether it is done after so long at most."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._read()
            left = end - time.monotonic()
            if done() or self._failure is not None or left <= 0.0:
                return bool(done())
            select.select([self._sock], [], [], left)

    def _read(self) -> None:
        while self._failure is None:
            try:
                data = self._sock.recv(MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once; then comes what it had sent
                continue
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            match pickle.loads(data):
                case ("up",):
                    self._up = True
                case ("awake",):
                    self._awake = True
                case ("failed", text):
                    self._failure = f"Ray could not be started on this machine: {text}"
                case ("started", number, name):
                    self.ids[number] = name
                case ("ended", number, text):
                    self._ended[number] = text
                case ("resources", found):
                    self._resources = found
                case other:
                    raise AssertionError(other)

    def _lost(self) -> None:
        if self._failure is None:
            self._failure = f"the process that has Ray, {self._process.pid}, has ended."


def _inherited() -> tuple[object, ...]:
    """What processes that this one starts get of it."""
    environment = {name: value for name, value in os.environ.items() if name != _OF_TESTS}
    for name, value in _by_imports().items():
        if environment.get(name) == value:
            del environment[name]
    path = worker_environment()["PYTHONPATH"]
    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if "RLIMIT_" in n]
    own = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), sys.executable, os.getcwd()
    return environment, path, limits, own


def _by_imports() -> dict[str, str]:
    """What Ray and torch's compiler put into the environment of a process that imports them."""
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {"RAY_CLIENT_MODE": "0", "TORCHINDUCTOR_CACHE_DIR": cache}


def is_possible() -> bool:
    """Not where this process has joined a Ray, nor elsewhere than on Linux."""
    ray: Any = sys.modules.get("ray")
    return hasattr(os, "pidfd_open") and not (ray is not None and ray.is_initialized())


_lock = Lock()
_current: LocalRay | None = None


def begin(address: str | None, warm: bool) -> None:
    """Start it for the launch that is about to `use` it, if that will."""
    if address is None and is_possible():
        ray = use(warm=warm)
        ray.users -= 1


def use(*, warm: bool = True) -> LocalRay:
    """The one that launches of this process share; it is started where there is none, and nothing
    is waited for. One that stayed and does not fit is ended. `warm`: it may stay afterwards."""
    global _current
    with _lock:
        ray = _current
        if ray is not None and not ray.users and (ray.stays != warm or not ray.fits()):
            ray.end()
            _current = None
        if _current is None:
            _current = LocalRay(IDLE_S if warm else 0.0)
        _current.users += 1
        return _current


def release(ray: LocalRay) -> None:
    """A launch that used it has ended."""
    global _current
    with _lock:
        ray.users -= 1
        if ray.users:
            return
        ray.say("rest")
        if not ray.stays or ray.failed:
            ray.end()
            _current = None


def end_local_ray() -> None:
    """That which has stayed."""
    global _current
    with _lock:
        if _current is not None:
            _current.end()
            _current = None


def _forked() -> None:
    global _current, _lock
    _lock = Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(end_local_ray)
os.register_at_fork(after_in_child=_forked)
