"""The main program of the process that has Ray: it starts Ray, and hosts for a controller.

    python -P -m dtensor.daft.ray.channel.local_ray_process 5 4242 60     # local_ray.py does this

Arguments: the descriptor of a socket to the controller, the controller's pid, and how many seconds
Ray stays while no launch uses it (0: workers are not forked either).

Invariants: the process ends when the controller ends or closes the socket, and after the idle time,
even if Ray hangs. Ray ends with the process, however that ends. It does not import torch.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from dtensor.daft.ray.bootstrap.fork_server import forked_workers
from dtensor.daft.ray.bootstrap.progress import process_stat

if TYPE_CHECKING:
    from dtensor.daft.ray.channel.ray_actor import RayActor

MESSAGE = 1 << 20
"""The most bytes of a message."""
END_S = 10.0
"""How long the process may take to end; after that it is killed, and Ray with it."""


class LocalRayProcess:
    """Executes a controller's messages. `parent`: a pidfd of the controller."""

    def __init__(self, sock: socket.socket, parent: int, idle_s: float) -> None:
        self._sock = sock
        self._parent = parent
        self._idle_s = idle_s
        self._idle = False  # no launch uses Ray
        self._actors: dict[int, RayActor] = {}
        self._exit_read_fd, self._exit_write_fd = os.pipe()  # numbers of ended actors, 8 bytes each

    def say(self, *message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next read notices it
            self._sock.send(pickle.dumps(message))

    def serve(self) -> None:
        """Execute messages until the controller ends, or Ray was idle for too long."""
        poll = select.poll()
        for each in (self._sock.fileno(), self._parent, self._exit_read_fd):
            poll.register(each, select.POLLIN)
        while events := poll.poll(self._idle_s * 1000 if self._idle else None):
            ready = {descriptor for descriptor, _ in events}
            if self._parent in ready:
                return
            if self._exit_read_fd in ready:
                number = int.from_bytes(os.read(self._exit_read_fd, 8), "little")
                if (actor := self._actors.pop(number, None)) is not None:
                    self.say("ended", number, actor.ended())
            if self._sock.fileno() in ready:
                data = self._sock.recv(MESSAGE)
                if not data:
                    return
                name, *arguments = pickle.loads(data)
                getattr(self, name)(*arguments)

    # -- the controller's messages, by name -----------------------------------------------------
    def start(
        self, number: int, options: Mapping[str, object], counter: str, packed_arguments: bytes
    ) -> None:
        """Start a host's actor, and tell the controller the actor's id."""
        from dtensor.daft.ray.channel.ray_actor import RayActor

        actor = self._actors[number] = RayActor(options, counter, packed_arguments)
        self.say("started", number, actor.id)

    def host_serves(self, number: int, packed_arguments: bytes) -> None:
        """Let a host serve its connection; when that ends, its number is written to the pipe of
        ended actors."""
        actor = self._actors[number]
        actor.serve(packed_arguments)
        packed_number = number.to_bytes(8, "little")

        def report_end(_: object) -> None:
            os.write(self._exit_write_fd, packed_number)

        actor.serving.future().add_done_callback(report_end)

    def kill(self, number: int) -> None:
        if (actor := self._actors.get(number)) is not None:
            actor.kill()

    def resources(self) -> None:
        import ray

        _ray: Any = ray
        self.say("resources", _ray.cluster_resources())

    def rest(self) -> None:
        """Record that no launch uses Ray now."""
        self._idle = True

    def wake(self) -> None:
        self._idle = False
        self.say("awake")


def _watch(parent: int, sock: socket.socket, status_fd: int) -> None:
    """Fork a watcher, which kills this process if it does not end after the controller has ended. A
    thread could not do it: Ray may hang with Python's lock held. If this process was killed or
    failed, the watcher ends the rest of Ray, whose agents would otherwise stay for a minute.
    ``status_fd``: the end of a pipe; "u" is read from it when Ray is up, and "e" when Ray has
    ended."""
    watched_pid, own_pidfd = os.getpid(), os.pidfd_open(os.getpid())
    if os.fork():
        os.close(own_pidfd)
        return
    try:
        poll = select.poll()
        for each, event in (
            (parent, select.POLLIN),
            (sock.fileno(), 0),
            (own_pidfd, select.POLLIN),
        ):
            poll.register(each, event)  # a socket reports a closed peer without an event mask
        if own_pidfd not in dict(poll.poll()):
            is_up = bool(select.select([status_fd], [], [], 0.0)[0])
            ended, _, _ = select.select([own_pidfd], [], [], END_S if is_up else 0.0)
            if not ended:
                os.kill(watched_pid, signal.SIGKILL)
        os.set_blocking(status_fd, False)
        with suppress(BlockingIOError):
            if b"e" in os.read(status_fd, 2):
                return
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            session = process_stat(process)[3]
            if session == str(watched_pid) and process != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    finally:
        os._exit(0)


def main(descriptor: str, controller: str, idle_s: str) -> None:
    """Start Ray, execute the controller's messages, and end Ray."""
    sock = socket.socket(fileno=int(descriptor))
    try:
        parent = os.pidfd_open(int(controller))
    except ProcessLookupError:
        return
    status_read_fd, status_write_fd = os.pipe()
    _watch(parent, sock, status_read_fd)
    process = LocalRayProcess(sock, parent, float(idle_s))
    with ExitStack() as ending:
        try:
            if float(idle_s):
                ending.enter_context(forked_workers())  # first, so that it imports while Ray starts
            from dtensor.daft.ray.bootstrap.start_ray import end_ray, start_ray

            start_ray(None)
            ending.callback(end_ray)
            os.write(status_write_fd, b"u")
        except BaseException as error:
            process.say("failed", f"{type(error).__name__}: {error}")
            return
        process.say("up")
        process.serve()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    os.write(status_write_fd, b"e")


if __name__ == "__main__":
    main(*sys.argv[1:])
