"""The transport of compiled functions: values are sent from object store to object store.

    transport = ValueTransport(store, program, (3, 4))     # ranks 0 and 1 are on processes 3 and 4
    engine = Engine(host_program, table, transport)
    transport.start(8)
    engine.run(inputs)

A send is complete when it has started, since its message is never written again. If the sending
process has ended, the receiver gets a failure as the value; only tasks that depend on it do not
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from torch import Tensor

from dtensor.daft.errors import ActorLost, Failure
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Collective, Recv, Send, Start
from dtensor.daft.ray.actors.object_store import HostGone, Key, ObjectStore
from dtensor.daft.run.transport import Begin, LocalTransport, Pending, Transport
from dtensor.daft.tasks.values import encode_failure


class _Sent(Pending):
    """A send that is complete."""

    def wait(self) -> tuple[Tensor, ...]:
        return ()


_SENT = _Sent()


class _Receive(Pending):
    """A receive that was started."""

    __slots__ = ("holder", "key", "store")

    def __init__(self, store: ObjectStore, key: Key, holder: int) -> None:
        self.store = store
        self.key = key
        self.holder = holder

    def wait(self) -> tuple[Tensor, ...]:
        try:
            return (self.store.take(self.key, self.holder, keeps=False),)
        except HostGone as gone:
            return (lost(gone),)


class ValueTransport(Transport):
    """The transport of a process's ranks in a compiled function. `host_of`: the process of each
    rank; `sent_bytes`: the bytes sent in the present run."""

    def __init__(self, store: ObjectStore, program: HostProgram, host_of: Sequence[int]) -> None:
        self.sent_bytes: int = 0
        self._run = -1
        self._store = store
        self._host_of = tuple(host_of)
        self._local = LocalTransport()
        self._to_send = [
            (name_of(i.value, i.to), host_of[i.to])
            for rank, rank_program in program.ranks.items()
            for i in rank_program.instructions
            if isinstance(i, Send) and host_of[i.to] != host_of[rank]
        ]
        self._sent: set[str] = set()

    def start(self, run: int) -> None:
        """Begin a run with this number."""
        self._run, self.sent_bytes = run, 0
        self._sent.clear()

    def fail(self, failure: Tensor) -> None:
        """Send a failure in place of all values that the failed run has not sent."""
        for name, to in self._to_send:
            if name not in self._sent:
                self._store.send_message((self._run, name), failure, to)

    def begin(self, rank: int, start: Start) -> Begin:
        """Return the function that starts a message: through the store if its ranks are in
        different processes, else by `LocalTransport`."""
        host = self._host_of[rank]
        match start:
            case Send(value=value, to=to):
                if self._host_of[to] != host:
                    return partial(self._send, name_of(value, to), self._host_of[to])
            case Recv(outputs=(value,), source_rank=source):
                if self._host_of[source] != host:
                    return partial(self._recv, name_of(value, rank), self._host_of[source])
            case Recv():
                raise AssertionError("one value is received")
            case Collective():
                raise AssertionError("tasks have no collectives")
            case _:
                assert_never(start)
        return self._local.begin(rank, start)

    def close(self) -> None:
        self._local.close()

    def _send(self, name: str, to: int, values: Sequence[Tensor]) -> Pending:
        self._sent.add(name)
        self.sent_bytes += values[0].numel()
        self._store.send_message((self._run, name), values[0], to)
        return _SENT

    def _recv(self, name: str, holder: int, values: Sequence[Tensor]) -> Pending:
        return _Receive(self._store, (self._run, name), holder)


def name_of(value: str, to: int) -> str:
    """Return the key of a value that is sent to a rank."""
    return f"{value}>{to}"


def lost(gone: HostGone) -> Tensor:
    """Return the message of a failure, in place of a value of an ended process. The controller
    replaces the failure by the process's own (`RaySession.wait_for`)."""
    reason = "a value that it made was lost with its process."
    return encode_failure(ActorLost(Failure(rank=None, peers=(gone.host,), reason=reason)))
