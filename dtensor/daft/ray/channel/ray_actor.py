"""A host as Ray has it: an actor, started and ended by a process that has joined Ray.

    actor = RayActor({}, "/tmp/.../host0", packed(Objects, ()))
    actor.serve(packed(invitation))                 # until the connection ends
    actor.ended(patience_s=1.0)                     # None, or what Ray says of its end

Here are all calls of Ray's that concern a host.
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
    """`options` are Ray's, `counter` is the path of the host's file, `given` is packed: what makes
    that which it hosts, and its arguments."""

    def __init__(self, options: Mapping[str, object], counter: str, given: bytes) -> None:
        all_options: dict[str, Any] = dict(num_cpus=0, max_restarts=0, max_task_retries=0)
        all_options |= options
        if (environment := missing_environment()) is not None:
            # Only then, as a runtime environment adds half a second to every actor.
            all_options["runtime_env"] = {"env_vars": environment}
        self.actor: Any = _ray.remote(HostActor).options(**all_options).remote(counter, given)
        self.serving: Any = None  # Ray's reference to the call that it ends with

    @property
    def id(self) -> str:
        """What Ray's errors call it."""
        return str(self.actor._actor_id.hex())

    def serve(self, given: bytes) -> None:
        """From now on it is called over a connection, until that is closed."""
        self.serving = self.actor.serve.remote(given)

    def ended(self, patience_s: float = 0.0) -> str | None:
        """What Ray says of the end of one that served, if it has ended."""
        if self.serving is None or not _ray.wait([self.serving], timeout=patience_s)[0]:
            return None
        try:
            _ray.get(self.serving)
        except ray.exceptions.RayTaskError as error:
            return f"it could not serve: {error.cause}"
        except ray.exceptions.RayError as error:
            # Its frames hold it, and would hold this and the actor until a collection.
            return str(error.with_traceback(None))
        return None  # its connection ended, and it is there

    def kill(self) -> None:
        """Ask Ray to end it; a process that runs ends at once."""
        if ray.is_initialized():
            _ray.kill(self.actor, no_restart=True)
