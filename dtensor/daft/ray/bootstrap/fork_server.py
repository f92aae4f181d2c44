"""Starts Ray's workers as forks of one process that has imported torch and dtensor.

    with forked_workers():           # starts the fork server, which imports once
        ray.init()                   # each worker is a fork: 0.4 s of a core instead of 2.5 s

Ray's raylet starts a worker by a command, which is this file: it asks the fork server for a fork
that executes the worker, and ends when the fork ends. The fork has the environment, folder, streams
and arguments that Ray gave, and its own random states; it is killed if the command or the server
ends. A worker with a runtime environment, or on another system than Linux, starts as Ray starts it.
Invariant: the server has one thread and has run no code of the user.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager

ADDRESS = "DTENSOR_FORK_SERVER"  # the environment variable with the server's address
MESSAGE = 1 << 20  # the most bytes of a request
NO_CONTEXT: Mapping[str, object] = {
    "command_prefix": [],
    "env_vars": {},
    "override_worker_entrypoint": None,
    "java_jars": [],
}
"""The runtime environment that Ray writes for a worker without one, except for the path of
Python."""
IMPORTED = (
    "torch",
    "torch.distributed",
    "dtensor.daft.ray.channel.host",
    "dtensor.daft.ray.ranks.ranks",
    "dtensor.daft.ray.actors.objects",
    "dtensor.runtime.lower.updates",  # imports the modules that a training step needs
)
"""The modules that the server imports. Ray is not among them, since it reads its environment at
import and then has threads."""


# -- in the process that starts Ray ---------------------------------------------------------------
@contextmanager
def forked_workers() -> Generator[None]:
    """Within the block, the workers of a Ray that this process starts are forks, if that is
    possible. Does not wait for the fork server."""
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
            listener.bind(address)  # not in the server: a worker may ask before that has started
            listener.listen(128)
            module = "dtensor.daft.ray.bootstrap.fork_server"
            # the server ends when no process holds the other end of its standard input
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, **worker_environment()},
            )
        assert process.stdin is not None
        ending.callback(process.wait)
        ending.callback(process.stdin.close)
        from dtensor.daft.ray.bootstrap import private_ray  # imports Ray while the server starts

        os.environ[ADDRESS] = address
        ending.callback(os.environ.pop, ADDRESS)
        ending.enter_context(private_ray.workers_by(__file__))
        yield


# -- the command that Ray starts ------------------------------------------------------------------
def ask(address: str, argv: list[str]) -> None:
    """Ask the server for a fork that executes `argv`, and end this process as the fork ends. Raises
    OSError if there is no server."""
    request = json.dumps([argv, dict(os.environ), os.getcwd()])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        connection.connect(address)  # possible even while the server imports
        socket.send_fds(connection, [request.encode()], [0, 1, 2])
        answer = connection.recv(MESSAGE)
    status = int(answer) if answer else -signal.SIGKILL
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def start_cold(argv: list[str]) -> None:
    """Start a worker with Ray's own script."""
    import ray

    del os.environ[ADDRESS]
    setup = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *argv])


def worker_of(argv: list[str]) -> list[str] | None:
    """Return the script and arguments of a worker, given the arguments of Ray's command for it;
    None if the worker needs a runtime environment, or is not in Python."""
    arguments: list[str] = []
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
            arguments.append(word)
    return arguments if arguments and arguments[0].endswith(".py") else None


# -- the server ------------------------------------------------------------------------------------
def serve(number: int) -> list[str]:
    """Fork on request until the standard input ends. Return, in a fork, the script and arguments.
    ``number``: the descriptor of a listening socket."""
    import gc
    import selectors

    listener = socket.socket(fileno=number)
    _import()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()
    own_pid = os.getpid()
    asking: dict[int, socket.socket] = {}  # process to the connection that asked for it
    ends: dict[int, int] = {}  # process to its pidfd
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
                    if not text:  # the asking process has ended
                        connection.close()
                        continue
                    process = os.fork()
                    if process == 0:
                        argv, environment, work = json.loads(text)
                        return _become(argv, environment, work, streams, own_pid)
                    for stream in streams:
                        os.close(stream)
                    asking[process], ends[process] = connection, os.pidfd_open(process)
                    selector.register(connection, selectors.EVENT_READ, process)
                    selector.register(ends[process], selectors.EVENT_READ, process)
                elif key.data not in asking:
                    continue  # the fork's end was handled in this round
                elif key.fileobj is asking[key.data]:  # the asking process was killed
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
    """Make this fork like a process that Ray has started: environment, folder, streams, `sys.path`,
    random states. `parent`: the server's pid."""
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
    former_path = list(sys.path)
    script = os.path.dirname(os.path.realpath(argv[0]))
    path = [script, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[: len(own_path)] = path
    # Python's own folders were in the replaced part of the path if PYTHONPATH repeated them.
    python_folders = (sys.prefix, sys.base_prefix)
    sys.path += [p for p in former_path if p.startswith(python_folders) and p not in sys.path]
    sys.argv[:] = argv
    sys.modules["torch"].default_generator.seed()  # Python seeds its own generator after a fork
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(None)
    return argv


def main(argv: list[str]) -> None:
    """Run the server, given a descriptor; or start a worker, given Ray's arguments."""
    if len(argv) == 1:
        import runpy

        script = serve(int(argv[0]))[0]
        runpy.run_path(script, run_name="__main__")
        return
    worker = worker_of(argv)
    if worker is not None:
        try:
            ask(os.environ[ADDRESS], worker)
        except FileNotFoundError:  # Ray has ended, and so has the server
            os._exit(1)
        except OSError:  # only the server has ended
            pass
    start_cold(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
