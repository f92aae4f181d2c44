"""Ray's workers, forked from one process that has imported torch and dtensor.

    with forked_workers():           # a process that imports, once, and waits
        ray.init()                   # each worker of this Ray is a fork of it: 0.4 s of a core
    ...                              # and not 2.5 s, which it takes to import all that again

Ray's raylet starts a worker by a command: here it is this file, which asks the fork server for a
fork that does what the command says, and ends as that ends. The fork has the environment, folder,
streams and arguments that Ray gave, random states of its own, and no thread, file or number of
another one; it is killed with the command, and with the server. A worker with a runtime
environment starts as Ray would start it, and so does every worker elsewhere than on Linux.

Invariants: the server has one thread, so that a fork of it is whole; what it has imported is what
every host imports before its first call. It has run nothing of the user's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager

ADDRESS = "DTENSOR_FORK_SERVER"
MESSAGE = 1 << 20  # bytes, at most
NO_CONTEXT: Mapping[str, object] = {
    "command_prefix": [],
    "env_vars": {},
    "override_worker_entrypoint": None,
    "java_jars": [],
}
"""What Ray writes for a worker without a runtime environment, but for its Python."""
IMPORTED = (
    "torch",
    "torch.distributed",
    "dtensor.daft.ray.channel.host",
    "dtensor.daft.ray.ranks.ranks",
    "dtensor.daft.ray.actors.objects",
    "dtensor.runtime.lower.step_end",  # a step of training, and whatever it has of dtensor
)
"""Not Ray, which reads its environment when it is imported, and has threads soon after."""


# -- in the process that starts Ray ---------------------------------------------------------------
@contextmanager
def forked_workers() -> Generator[None]:
    """Within, workers of a Ray that this process starts are forks, where that is possible. The
    server starts at once, and is not waited for."""
    import subprocess

    from dtensor.daft.ray.bootstrap.user_folder import OwnFolder, directory_of_sockets, sweep
    from dtensor.daft.ray.bootstrap.worker_environment import worker_environment

    if not hasattr(os, "pidfd_open"):  # elsewhere than on Linux
        yield
        return
    directory = directory_of_sockets()
    sweep(directory, "forks-*")
    with OwnFolder(directory, "forks-") as folder, ExitStack() as ending:
        address = str(folder.path / "fork_server")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)  # here: a worker may ask before that process has started
            listener.listen(128)
            module = "dtensor.daft.ray.bootstrap.fork_server"
            # It ends when nobody holds the other end of its input.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, **worker_environment()},
            )
        assert process.stdin is not None
        ending.callback(process.wait)
        ending.callback(process.stdin.close)
        from dtensor.daft.ray.bootstrap import private_ray  # imports Ray, while the server starts

        os.environ[ADDRESS] = address
        ending.callback(os.environ.pop, ADDRESS)
        ending.enter_context(private_ray.workers_by(__file__))
        yield


# -- the command that Ray starts ------------------------------------------------------------------
def ask(address: str, argv: list[str]) -> None:
    """Be, for who waits for this process, the fork that does what `argv` says. `OSError` if there
    is no server."""
    request = json.dumps([argv, dict(os.environ), os.getcwd()])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        connection.connect(address)  # it listens before it imports
        socket.send_fds(connection, [request.encode()], [0, 1, 2])
        answer = connection.recv(MESSAGE)
    status = int(answer) if answer else -signal.SIGKILL
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def start_cold(argv: list[str]) -> None:
    """As Ray starts a worker."""
    import ray

    del os.environ[ADDRESS]
    setup = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *argv])


def worker_of(argv: list[str]) -> list[str] | None:
    """Script and arguments of a worker, of the command that would set it up; None if that is more
    than to start it."""
    kept: list[str] = []
    for word in argv:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value or "{}")
            if context.pop("py_executable", sys.executable) != sys.executable:
                return None
            if not context.items() <= NO_CONTEXT.items():
                return None
        elif name == "--language":
            if value != "PYTHON":
                return None
        else:
            kept.append(word)
    return kept if kept and kept[0].endswith(".py") else None


# -- the server ------------------------------------------------------------------------------------
def serve(number: int) -> list[str]:
    """Fork for who asks, until the input ends. In a fork, it returns script and arguments.
    ``number``: of a socket that listens."""
    import gc
    import selectors

    listener = socket.socket(fileno=number)
    _import()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would have but one of its threads"
    gc.collect()
    gc.freeze()
    mine = os.getpid()
    asking: dict[int, socket.socket] = {}  # by process
    ends: dict[int, int] = {}  # what tells of the end of a process, by process
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for process in asking:
                        os.kill(process, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is listener:
                    connection, _ = listener.accept()
                    text, streams, _, _ = socket.recv_fds(connection, MESSAGE, 3)
                    if not text:  # who asked has gone
                        connection.close()
                        continue
                    process = os.fork()
                    if process == 0:
                        argv, environment, work = json.loads(text)
                        return _become(argv, environment, work, streams, mine)
                    for stream in streams:
                        os.close(stream)
                    asking[process], ends[process] = connection, os.pidfd_open(process)
                    selector.register(connection, selectors.EVENT_READ, process)
                    selector.register(ends[process], selectors.EVENT_READ, process)
                elif key.data not in asking:
                    continue  # both came at once
                elif key.fileobj is asking[key.data]:  # who asked has been killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
                else:
                    selector.unregister(key.fileobj)
                    os.close(ends.pop(key.data))
                    status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                    connection = asking.pop(key.data)
                    if connection in selector.get_map():
                        selector.unregister(connection)
                        connection.send(str(status).encode())
                    connection.close()


def _import() -> None:
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)


def _become(
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[int],
    parent: int,
) -> list[str]:
    """What a process that Ray starts has, and nothing else."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
    own_path = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    del os.environ[ADDRESS]
    os.chdir(folder)
    former = list(sys.path)
    script = os.path.dirname(os.path.realpath(argv[0]))
    path = [script, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[: len(own_path)] = path
    # What PYTHONPATH repeats of Python's own folders stands in it alone, and has gone with it.
    standard = (sys.prefix, sys.base_prefix)
    sys.path += [p for p in former if p.startswith(standard) and p not in sys.path]
    sys.argv[:] = argv
    sys.modules["torch"].default_generator.seed()  # Python's own is seeded by the fork
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(None)
    return argv


def main(argv: list[str]) -> None:
    if len(argv) == 1:
        import runpy

        script = serve(int(argv[0]))[0]
        runpy.run_path(script, run_name="__main__")
        return
    wanted = worker_of(argv)
    if wanted is not None:
        try:
            ask(os.environ[ADDRESS], wanted)
        except FileNotFoundError:  # Ray has ended, and the server after it
            os._exit(1)
        except OSError:  # the server has ended by itself
            pass
    start_cold(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
