"""A Ray actor with a host: all calls of Ray's API that concern hosts.

    actor = RayActor({}, "/tmp/.../host0", packed(Objects, ()))
    actor.serve(packed(credentials))                # until the connection ends
    actor.ended(patience_s=1.0)                     # None, or Ray's reason for the end

The process that imports this module has joined Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions

from dtensor.daft.ray.bootstrap.start_ray import missing_environment
from dtensor.daft.ray.channel.host_actor import HostActor

_ray: Any = ray  # Ray's stubs leave most of its types unknown


class RayActor:
    """An actor with a `Host`. `options`: Ray's; `counter`: the path of the host's program counter;
    `packed_arguments`: the packed constructor of the hosted object, and its arguments."""

    def __init__(
        self, options: Mapping[str, object], counter: str, packed_arguments: bytes
    ) -> None:
        all_options: dict[str, Any] = dict(num_cpus=0, max_restarts=0, max_task_retries=0)
        all_options |= options
        if (environment := missing_environment()) is not None:
            # only if needed: a runtime environment adds half a second to every actor
            all_options["runtime_env"] = {"env_vars": environment}
        self.actor: Any = (
            _ray.remote(HostActor).options(**all_options).remote(counter, packed_arguments)
        )
        self.serving: Any = None  # Ray's reference to the running call of `serve`

    @property
    def id(self) -> str:
        """The actor's id in Ray's errors."""
        return str(self.actor._actor_id.hex())

    def serve(self, packed_arguments: bytes) -> None:
        """Let the host execute calls that come over a connection. Takes packed credentials."""
        self.serving = self.actor.serve.remote(packed_arguments)

    def ended(self, patience_s: float = 0.0) -> str | None:
        """Wait up to `patience_s`; return Ray's reason if the actor has ended, else None."""
        if self.serving is None or not _ray.wait([self.serving], timeout=patience_s)[0]:
            return None
        try:
            _ray.get(self.serving)
        except ray.exceptions.RayTaskError as error:
            return f"it could not serve: {error.cause}"
        except ray.exceptions.RayError as error:
            # the traceback's frames would keep the actor alive until a garbage collection
            return str(error.with_traceback(None))
        return None  # its connection ended, but the process is alive

    def kill(self) -> None:
        """Ask Ray to end the actor. A process that is not stopped ends at once."""
        if ray.is_initialized():
            _ray.kill(self.actor, no_restart=True)
