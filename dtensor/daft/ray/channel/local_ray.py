"""Ray on this machine in a separate process, which stays for a while for the next launch.

    ray = use(warm=True)                    # starts Ray, or reuses one that stayed; does not wait
    host = ray.start({}, counter, given)    # does not wait either
    host.ended(1.0)                         # None, or the reason for its end
    release(ray)                            # Ray ends after IDLE_S without another launch

The controller can work while Ray starts, as it neither imports nor joins Ray. Hosts are new forks
of a process that has imported torch (`fork_server.py`). Invariants: Ray ends with this process,
however that ends. A fork of this process neither uses nor ends it. A Ray that stayed is replaced if
this process's environment, folder, `sys.path`, limits or affinity have changed, or if it does not
answer.
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
"""How long Ray stays while no launch uses it."""
ANSWER_S = 1.0
_TEST_VARIABLE = "PYTEST_CURRENT_TEST"  # differs for each test; hosts do not inherit it


class LocalHost:
    """A host that a `LocalRay` was asked to start."""

    def __init__(self, ray: LocalRay, number: int) -> None:
        self._ray = ray
        self._number = number

    @property
    def id(self) -> str:
        """The actor's id in Ray's errors; "no actor" until the actor has started."""
        return self._ray.ids.get(self._number, "no actor")

    def serve(self, packed_arguments: bytes) -> None:
        self._ray.say("host_serves", self._number, packed_arguments)

    def ended(self, patience_s: float = 0.0) -> str | None:
        return self._ray.ended(self._number, patience_s)

    def kill(self) -> None:
        self._ray.kill(self._number)


class LocalRay:
    """The process that has Ray, as the controller uses it. `idle_s`: the time for which the process
    stays without a launch."""

    def __init__(self, idle_s: float) -> None:
        """Start the separate process, connected by a socket."""
        self.users: int = 0
        self.stays: bool = idle_s > 0  # False as soon as a host has ended by itself
        self.ids: dict[int, str] = {}  # host number to actor id
        self._inherited = _inherited()
        self._numbers = count()
        self._lock = Lock()
        self._is_up = False
        self._awake = True
        self._failure: str | None = None
        self._ended: dict[int, str | None] = {}
        self._resources: dict[str, float] | None = None
        environment = {**os.environ, **worker_environment()}
        for name in (_TEST_VARIABLE, fork_server.ADDRESS):
            environment.pop(name, None)
        with held_back():
            self._sock, other_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other_sock:
                for each in (self._sock, other_sock):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
                module = "dtensor.daft.ray.channel.local_ray_process"
                argv = [str(other_sock.fileno()), str(os.getpid()), str(idle_s)]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # Ray reports killed workers there
                    pass_fds=[other_sock.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the controller alone
                )

    # -- hosts ----------------------------------------------------------------------------------
    def start(
        self, options: Mapping[str, object], counter: str, packed_arguments: bytes
    ) -> LocalHost:
        """Ask the process to start a host. Return the host without waiting for it."""
        number = next(self._numbers)
        self.say("start", number, dict(options), counter, packed_arguments)
        return LocalHost(self, number)

    def ended(self, number: int, patience_s: float) -> str | None:
        """Wait up to `patience_s`; return the reason if a host has ended, else None."""
        self._wait_for(lambda: number in self._ended, patience_s)
        return self._ended.get(number, self._failure)

    def kill(self, number: int) -> None:
        self.say("kill", number)

    def resources(self) -> dict[str, float]:
        """Return the total of each resource in Ray, by Ray's name, once Ray has started."""
        self._resources = None
        self.say("resources")
        while not self._wait_for(lambda: self._resources is not None, 0.25):
            self.check()
        return self._resources or {}

    def check(self) -> None:
        """Raise `RuntimeError` if Ray could not be started, or has ended."""
        self._wait_for(lambda: self._failure is not None, 0.0)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @property
    def failed(self) -> bool:
        self._wait_for(lambda: False, 0.0)
        return self._failure is not None

    # -- between launches -----------------------------------------------------------------------
    def fits(self) -> bool:
        """Return whether hosts that start now would be the same as in a new Ray."""
        self._wait_for(lambda: False, 0.0)
        if self._failure is not None or self._inherited != _inherited():
            return False
        if not self._is_up:
            return True  # it is still starting
        self._awake = False
        self.say("wake")
        while not self._wait_for(lambda: self._awake, ANSWER_S):
            if self._failure is not None or self._stopped:
                return False
        return True

    @property
    def _stopped(self) -> bool:
        """Whether a signal has stopped the process. Otherwise it is only slow to answer."""
        return process_stat(self._process.pid)[0] in "Tt"

    def end(self) -> None:
        """End Ray and all hosts, and wait for it. Twice is fine."""
        self._sock.close()
        try:
            self._process.wait(END_S)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def forget(self) -> None:
        """Drop this object in a fork of the controller, to which the process belongs."""
        self._sock.close()
        self._process.returncode = 0  # else Popen's finalizer would warn that it still runs

    # -- messages -------------------------------------------------------------------------------
    def say(self, *message: object) -> None:
        """Send a message. If that fails, `check` raises the reason."""
        with self._lock:
            self._read()
            if self._failure is None:
                with suppress(OSError):
                    self._sock.send(pickle.dumps(message))
                    return
                self._read()  # the reason may have arrived
                self._set_ended()

    def _wait_for(self, is_done: Any, seconds: float) -> bool:
        """Read messages for up to `seconds` until `done()`; return whether it is."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._read()
            seconds_left = end - time.monotonic()
            if is_done() or self._failure is not None or seconds_left <= 0.0:
                return bool(is_done())
            select.select([self._sock], [], [], seconds_left)

    def _read(self) -> None:
        """Read and process the messages that have arrived."""
        while self._failure is None:
            try:
                data = self._sock.recv(MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:  # raised once, before the last messages are read
                continue
            except OSError:
                data = b""
            if not data:
                self._set_ended()
                return
            match pickle.loads(data):
                case ("up",):
                    self._is_up = True
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

    def _set_ended(self) -> None:
        if self._failure is None:
            self._failure = f"the process that has Ray, {self._process.pid}, has ended."


def _inherited() -> tuple[object, ...]:
    """Return all state of this process that a new process would inherit."""
    environment = {name: value for name, value in os.environ.items() if name != _TEST_VARIABLE}
    for name, value in _by_imports().items():
        if environment.get(name) == value:
            del environment[name]
    path = worker_environment()["PYTHONPATH"]
    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if "RLIMIT_" in n]
    process_attributes = (
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        sys.executable,
        os.getcwd(),
    )
    return environment, path, limits, process_attributes


def _by_imports() -> dict[str, str]:
    """Return the environment variables that importing Ray and torch's compiler sets."""
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {"RAY_CLIENT_MODE": "0", "TORCHINDUCTOR_CACHE_DIR": cache}


def is_possible() -> bool:
    """Return whether Ray can be in a separate process: on Linux, unless this process has one."""
    ray: Any = sys.modules.get("ray")
    return hasattr(os, "pidfd_open") and not (ray is not None and ray.is_initialized())


_lock = Lock()
_current: LocalRay | None = None


def begin(address: str | None, warm: bool) -> None:
    """Start Ray for the launch that is about to call `use`, if that launch needs it."""
    if address is None and is_possible():
        ray = use(warm=warm)
        ray.users -= 1


def use(*, warm: bool = True) -> LocalRay:
    """Return the `LocalRay` that all launches of this process share. If there is none, or if it
    stayed from an earlier launch and does not fit, start one. `warm`: it may stay after the
    launch."""
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
    """Record that a launch has ended which used it."""
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
    """End the Ray that has stayed, if there is one."""
    global _current
    with _lock:
        if _current is not None:
            _current.end()
            _current = None


def _forked() -> None:
    """Drop the local Ray in a fork of the controller, since it belongs to the parent."""
    global _current, _lock
    _lock = Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(end_local_ray)
os.register_at_fork(after_in_child=_forked)
