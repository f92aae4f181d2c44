"""The class of the actors that Ray starts for us: a host, which is imported in its own process.

Invariants: what a host is given is bytes to whoever starts it (ray_actor.py, local_ray.py). So that
process imports neither the host nor torch.
"""

from __future__ import annotations

import pickle


def packed(*what: object) -> bytes:
    return pickle.dumps(what, pickle.HIGHEST_PROTOCOL)


class HostActor:
    """What runs in the actor's process: a `Host`, which is imported there."""

    def __init__(self, counter: str, given: bytes) -> None:
        from dtensor.daft.ray.channel.host import Host

        kind, arguments = pickle.loads(given)
        self._host = Host(counter, kind, *arguments)

    def host(self, counter: str, given: bytes) -> None:
        """From now on this."""
        kind, arguments = pickle.loads(given)
        self._host.host(counter, kind, *arguments)

    def serve(self, given: bytes) -> None:
        self._host.serve(*pickle.loads(given))
