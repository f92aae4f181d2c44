"""All that dtensor uses of Ray and that is private to Ray.

Its tokens, which let in who knows them; the switch by which a cluster listens on this machine
alone; how long it takes to start, and the processes that it starts. A new Ray may move any of it.
Not here: what is done with it (starting.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from ray._private import ray_constants, services, worker

constants: Any = ray_constants
tokens: Any = None
config: Any = None
gcs_client: Any = None
with suppress(ImportError):  # Ray 2.50 and 2.51 know no tokens
    from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # pyright: ignore

    tokens, config = AuthenticationTokenLoader.instance(), Config  # pyright: ignore
    gcs_client = GcsClient  # pyright: ignore

_services: Any = services
_worker: Any = worker
LOOK_S = 0.1  # how often it is looked whether Ray has started


@contextmanager
def patience(seconds: float) -> Generator[None]:
    """Within, a Ray that starts waits so long for its raylet, as long as that lives. By itself it
    gives up after 30 s, which pass where processes share cores, and leaves what it has started."""
    start, get = _services.start_raylet, _services.get_node
    raylets: list[Any] = []

    def start_raylet(*given: Any, **named: Any) -> Any:
        found = start(*given, **named)
        raylets.append(found.process)
        return found

    def get_node(*given: Any, **named: Any) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return get(*given, **named)
            except RuntimeError:  # it is not known yet
                lives = bool(raylets) and raylets[-1].poll() is None
                if not lives or time.monotonic() > end:
                    raise
            time.sleep(LOOK_S)

    _services.start_raylet, _services.get_node = start_raylet, get_node
    try:
        yield
    finally:
        _services.start_raylet, _services.get_node = start, get


def own_processes() -> list[subprocess.Popen[bytes]]:
    """Of the Ray that this process has started; none of one that it has joined."""
    node = _worker._global_node
    started: dict[str, list[Any]] = {} if node is None else node.all_processes
    return [each.process for infos in started.values() for each in infos]
