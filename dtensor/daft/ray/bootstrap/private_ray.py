"""Everything private to Ray that dtensor uses; a new version of Ray may change any of it.

Tokens, the switch by which Ray listens only on this machine, how long Ray may take to start, which
processes it starts, and the command that starts its workers. `start_ray.py` and `fork_server.py`
use it.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from ray._private import node, ray_constants, services, worker

constants: Any = ray_constants
tokens: Any = None
config: Any = None
gcs_client: Any = None
with suppress(ImportError):  # Ray 2.50 and 2.51 have no tokens
    from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # pyright: ignore

    tokens, config = AuthenticationTokenLoader.instance(), Config  # pyright: ignore
    gcs_client = GcsClient  # pyright: ignore

_services: Any = services
_worker: Any = worker
_node: Any = node.Node
_raylet: Any = import_module("ray._raylet")
LOOK_S = 0.1  # how often to check whether Ray has started
END_S = 30.0
"""How long one of Ray's processes that was killed may take to end."""


@contextmanager
def replaced(owner: Any, **new: Any) -> Generator[None]:
    """Within the block, these attributes of a module or class of Ray are replaced."""
    former_values = {name: getattr(owner, name) for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in former_values.items():
            setattr(owner, name, value)


class RayletEnded(Exception):
    """The raylet has ended by itself while Ray started, for example because its agents took more
    than 15 s to start on a busy machine."""


@contextmanager
def starting(seconds: float) -> Generator[None]:
    """Within the block, a Ray that starts waits for its raylet for this many seconds instead of 30,
    and raises `RayletEnded` as soon as that has ended. A Ray that does not start is killed."""
    start, get = _services.start_ray_process, _services.get_node
    started: list[subprocess.Popen[bytes]] = []
    raylets: list[subprocess.Popen[bytes]] = []

    def start_ray_process(command: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        """Start a process of Ray, and remember it."""
        started_process = start(command, kind, *arguments, **options)
        started.append(started_process.process)
        if kind == constants.PROCESS_TYPE_RAYLET:
            raylets.append(started_process.process)
        return started_process

    def get_node(*arguments: Any, **options: Any) -> Any:
        """Wait until the node is registered. Raises RayletEnded if the raylet has ended."""
        end = time.monotonic() + seconds
        while True:
            try:
                return get(*arguments, **options)
            except RuntimeError:  # the node is not registered yet
                for raylet in raylets:
                    if raylet.poll() is not None:
                        raise RayletEnded(
                            f"Ray's raylet has ended while it started, by {raylet.returncode}. "
                            f"Its log, in Ray's folder, says why."
                        ) from None
                if time.monotonic() > end:
                    raise
            time.sleep(LOOK_S)

    with replaced(_services, start_ray_process=start_ray_process, get_node=get_node):
        try:
            yield
        except BaseException:  # Ray does not end the processes that it has started
            for process in started:
                process.kill()
            await_end(started)
            raise


@contextmanager
def few_processes() -> Generator[None]:
    """Within the block, a Ray that starts has only the GCS and the raylet, which does not wait for
    its agents: no dashboard, autoscaler, metrics or log monitor. Each would be a Python process
    that takes 1 s of a core to start."""
    unused = ("start_api_server", "start_monitor", "start_log_monitor")
    new: dict[str, Any] = {name: _start_nothing for name in unused if hasattr(_node, name)}
    if hasattr(_raylet, "persist_port"):  # an older Ray chooses its ports before
        start = _node.start_raylet

        def start_raylet(node: Any, *arguments: Any, **options: Any) -> Any:
            _write_ports(node)
            return start(node, *arguments, **options)

        new["start_raylet"] = start_raylet
    with replaced(_node, **new):
        yield


@contextmanager
def workers_by(command: str) -> Generator[None]:
    """Within the block, a Ray that starts uses this script instead of Ray's `setup_worker.py`."""
    start = _node.start_raylet

    def start_raylet(node: Any, *arguments: Any, **options: Any) -> Any:
        node._ray_params.setup_worker_path = command
        return start(node, *arguments, **options)

    with replaced(_node, start_raylet=start_raylet):
        yield


def _start_nothing(node: Any, *_: object, **__: object) -> None:
    node._webui_url = ""


def _write_ports(node: Any) -> None:
    """Write the ports that the raylet's agents would report when they have started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        node._ray_params.runtime_env_agent_port = free.getsockname()[1]
    ports = {
        _raylet.METRICS_AGENT_PORT_NAME: -1,  # as if the agent's requirements were not installed
        _raylet.METRICS_EXPORT_PORT_NAME: -1,
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME: -1,
        _raylet.RUNTIME_ENV_AGENT_PORT_NAME: node._ray_params.runtime_env_agent_port,
    }
    for name, port in ports.items():
        _raylet.persist_port(node._session_dir, node._node_id, name, port)


def own_processes() -> list[subprocess.Popen[bytes]]:
    """Return the processes of the Ray that this process has started, [] if it has joined one."""
    node = _worker._global_node
    started: dict[str, list[Any]] = {} if node is None else node.all_processes
    return [each.process for infos in started.values() for each in infos]


def await_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until processes that were killed have ended. Ray itself waits only a second for each."""
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
