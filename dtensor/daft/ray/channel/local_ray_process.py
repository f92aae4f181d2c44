"""The process that has this machine's Ray: it starts Ray, then hosts in it, as a controller says.

    python -P -m dtensor.daft.ray.channel.local_ray_process 5 4242 60     # local_ray.py does this

The first argument is the descriptor of a socket, the second the process that is obeyed, the third
for how many seconds the Ray stays when no launch uses it; 0: its workers are not forked either.

Invariants: it ends, and Ray with it, when that process has ended or has hung up, and after those
seconds, also where Ray hangs. Ray ends with it, however it ends. It imports neither torch nor what
hosts host.
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
"""Bytes of a message, at most."""
END_S = 10.0
"""How long it may take to end; then it is killed, and Ray with it."""


class LocalRayProcess:
    """`parent`: a descriptor of the process that is obeyed."""

    def __init__(self, sock: socket.socket, parent: int, idle_s: float) -> None:
        self._sock = sock
        self._parent = parent
        self._idle_s = idle_s
        self._rests = False  # no launch uses it
        self._actors: dict[int, RayActor] = {}
        self._ended, self._ends = os.pipe()  # numbers of actors, as 8 bytes each

    def say(self, *what: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next read says so
            self._sock.send(pickle.dumps(what))

    def serve(self) -> None:
        """Obey until there is nobody to obey, or no launch for so long."""
        poll = select.poll()
        for each in (self._sock.fileno(), self._parent, self._ended):
            poll.register(each, select.POLLIN)
        while found := poll.poll(self._idle_s * 1000 if self._rests else None):
            ready = {descriptor for descriptor, _ in found}
            if self._parent in ready:
                return
            if self._ended in ready:
                number = int.from_bytes(os.read(self._ended, 8), "little")
                if (actor := self._actors.pop(number, None)) is not None:
                    self.say("ended", number, actor.ended())
            if self._sock.fileno() in ready:
                data = self._sock.recv(MESSAGE)
                if not data:
                    return
                name, *given = pickle.loads(data)
                getattr(self, name)(*given)

    # -- what a controller asks -----------------------------------------------------------------
    def start(self, number: int, options: Mapping[str, object], counter: str, given: bytes) -> None:
        from dtensor.daft.ray.channel.ray_actor import RayActor

        actor = self._actors[number] = RayActor(options, counter, given)
        self.say("started", number, actor.id)

    def host_serves(self, number: int, given: bytes) -> None:
        actor = self._actors[number]
        actor.serve(given)
        ended = number.to_bytes(8, "little")

        def say_so(_: object) -> None:
            os.write(self._ends, ended)

        actor.serving.future().add_done_callback(say_so)

    def kill(self, number: int) -> None:
        if (actor := self._actors.get(number)) is not None:
            actor.kill()

    def resources(self) -> None:
        import ray

        _ray: Any = ray
        self.say("resources", _ray.cluster_resources())

    def rest(self) -> None:
        """No launch uses it."""
        self._rests = True

    def wake(self) -> None:
        self._rests = False
        self.say("awake")


def _watch(parent: int, sock: socket.socket, told: int) -> None:
    """A fork that ends this process where nobody is obeyed any longer and it does not end by
    itself: Ray may hang when it starts or ends, with Python's lock held, so that no thread can.
    Where this process was killed or failed, what is left of Ray ends too: its agents would look for
    a minute for one that has gone. ``told``: of a pipe, "u" when Ray is up, "e" when it has ended.
    """
    watched, mine = os.getpid(), os.pidfd_open(os.getpid())
    if os.fork():
        os.close(mine)
        return
    try:
        poll = select.poll()
        for each, event in ((parent, select.POLLIN), (sock.fileno(), 0), (mine, select.POLLIN)):
            poll.register(each, event)  # a socket says in any case that its peer has hung up
        if mine not in dict(poll.poll()):
            is_up = bool(select.select([told], [], [], 0.0)[0])
            ended, _, _ = select.select([mine], [], [], END_S if is_up else 0.0)
            if not ended:
                os.kill(watched, signal.SIGKILL)
        os.set_blocking(told, False)
        with suppress(BlockingIOError):
            if b"e" in os.read(told, 2):
                return
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            session = process_stat(process)[3]
            if session == str(watched) and process != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    finally:
        os._exit(0)


def main(descriptor: str, controller: str, idle_s: str) -> None:
    sock = socket.socket(fileno=int(descriptor))
    try:
        parent = os.pidfd_open(int(controller))
    except ProcessLookupError:
        return
    told, tells = os.pipe()
    _watch(parent, sock, told)
    process = LocalRayProcess(sock, parent, float(idle_s))
    with ExitStack() as ending:
        try:
            if float(idle_s):
                ending.enter_context(forked_workers())  # first: it imports while Ray starts
            from dtensor.daft.ray.bootstrap.start_ray import end_ray, start_ray

            start_ray(None)
            ending.callback(end_ray)
            os.write(tells, b"u")
        except BaseException as error:
            process.say("failed", f"{type(error).__name__}: {error}")
            return
        process.say("up")
        process.serve()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    os.write(tells, b"e")


if __name__ == "__main__":
    main(*sys.argv[1:])
