"""The class of the actors that Ray starts: it imports `Host` in the actor's process.

Invariant: the arguments of a host are pickled, so the process that starts the actor imports neither
`Host` nor torch.
"""

from __future__ import annotations

import pickle


def packed(*arguments: object) -> bytes:
    return pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)


class HostActor:
    """A `Host` in an actor's process. `packed_arguments`: the packed arguments of its methods."""

    def __init__(self, counter: str, packed_arguments: bytes) -> None:
        from dtensor.daft.ray.channel.host import Host

        kind, arguments = pickle.loads(packed_arguments)
        self._host = Host(counter, kind, *arguments)

    def host(self, counter: str, packed_arguments: bytes) -> None:
        """Replace the hosted object."""
        kind, arguments = pickle.loads(packed_arguments)
        self._host.host(counter, kind, *arguments)

    def serve(self, packed_arguments: bytes) -> None:
        self._host.serve(*pickle.loads(packed_arguments))
