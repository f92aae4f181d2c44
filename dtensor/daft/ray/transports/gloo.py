"""The wire between actors on CPUs: gloo's point-to-point messages.

    wire = join_gloo(store, 0, (0, 1), "127.0.0.1", secret)              # in actor 0 of two
    transport = ExchangeTransport(wire, (0, 1))

Invariants: one process group has all actors. Each key has two tags, on which gloo keeps the order:
an exchange uses the even tag, the second half of a large all_reduce the odd tag, in a helper thread
of the key. If a peer dies, or its machine falls silent, a `wait` for it raises. Gloo accepts any
connection, so each peer first proves that it knows the launch's secret; messages are neither
encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.bootstrap.dead_connections import connections, listen_to_those
from dtensor.daft.ray.transports.exchange import Finish, Messages, Wire, Work
from dtensor.daft.run.transport import Pending
from dtensor.private_torch import Store

PATIENCE_S = 86400.0
"""How long a message may wait for a peer that computes. It is not used as a time-out: a peer that
dies breaks its connections, and the controller ends a peer that has stopped."""
PROOF_TAG = 1 << 30
"""This tag and the next are larger than the tags of all keys."""
PROOF_BYTES = 32


class Messenger(Protocol):
    """The used part of `ProcessGroupGloo`, which torch's stubs omit."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...


def gloo_group(
    store: Store, index: int, size: int, own_address: str, patience_s: float = PATIENCE_S
) -> Messenger:
    """Return a process group; wait until all members have come."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore
    device = dist.ProcessGroupGloo.create_device(hostname=own_address)  # pyright: ignore
    options._devices = [device]  # pyright: ignore
    options._timeout = timedelta(seconds=patience_s)  # pyright: ignore
    return cast(Messenger, dist.ProcessGroupGloo(store, index, size, options))  # pyright: ignore


def join_gloo(
    store: Store, index: int, host_of: Sequence[int], own_address: str, secret: bytes
) -> GlooWire:
    """Return actor `index`'s wire to the others; wait until all have come. Raises ConnectionError
    if a peer does not know the launch's secret."""
    size = max(host_of) + 1
    earlier_connections = connections()
    group = gloo_group(store, index, size, own_address)
    prove(group, index, [peer for peer in range(size) if peer != index], secret)
    listen_to_those(connections() - earlier_connections)
    return GlooWire(group, host_of)


def prove(group: Messenger, index: int, peers: Sequence[int], secret: bytes) -> None:
    """Prove to each peer that this actor knows the secret, and check the peers' proofs. Each actor
    sends a random number to each peer, which answers with a digest of the number and the secret."""

    def exchange(tag: int, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each peer, and return the message of each peer."""
        sent = {p: torch.frombuffer(bytearray(m), dtype=torch.uint8) for p, m in messages.items()}
        received = {peer: torch.empty(PROOF_BYTES, dtype=torch.uint8) for peer in peers}
        works = [group.recv([data], peer, tag) for peer, data in received.items()]
        works += [group.send([data], peer, tag) for peer, data in sent.items()]
        for work in works:
            work.wait()
        return {peer: data.numpy().tobytes() for peer, data in received.items()}

    def answer(sender: int, receiver: int, number: bytes) -> bytes:
        return hmac.digest(
            secret, b"gloo" + struct.pack("<II", sender, receiver) + number, "sha256"
        )

    own_numbers = {peer: secrets.token_bytes(PROOF_BYTES) for peer in peers}
    numbers = exchange(PROOF_TAG, own_numbers)
    answers = {peer: answer(index, peer, numbers[peer]) for peer in peers}
    received_answers = exchange(PROOF_TAG + 1, answers)
    for peer in peers:
        expected = answer(peer, index, own_numbers[peer])
        if not hmac.compare_digest(received_answers[peer], expected):
            raise ConnectionError(
                f"the peer that connected to actor {index} as actor {peer} is not of this launch"
            )


@dataclass(frozen=True, slots=True)
class _InThread(Pending):
    """Work in a helper thread."""

    future: Future[tuple[Tensor, ...]]

    def wait(self) -> tuple[Tensor, ...]:
        return self.future.result()


class GlooWire(Wire):
    """The wire of an actor, over one process group of all actors."""

    def __init__(self, group: Messenger, host_of: Sequence[int]) -> None:
        self._group: Messenger | None = group
        self._host_of = tuple(host_of)
        self._tags: dict[Key, int] = {}
        self._helpers: dict[Key, ThreadPoolExecutor] = {}

    def open(self, tags: Mapping[Key, int]) -> None:
        self._tags.update(tags)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def post(self, key: Key, sends: Messages, recvs: Messages, half: int) -> Sequence[Work]:
        """Start the messages of an exchange. Gloo matches them by tag."""
        group = self._group
        if group is None:
            raise RuntimeError("The connections of this actor are closed.")
        tag = 2 * self._tags[key] + half
        works = [group.recv([data], self._host_of[m], tag) for m, data in recvs.items()]
        works += [group.send([data], self._host_of[m], tag) for m, data in sends.items()]
        return works

    def later(self, key: Key, finish: Finish) -> Pending:
        """Run `finish` in the key's helper thread, one call after the other."""

        def run() -> tuple[Tensor, ...]:
            torch.set_num_threads(1)  # for this thread; more would change the bits
            with torch.no_grad():
                return finish()

        if key not in self._helpers:
            self._helpers[key] = ThreadPoolExecutor(1, f"channel {key[1]}")
        return _InThread(self._helpers[key].submit(run))

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.shutdown(wait=False, cancel_futures=True)
        self._group = None
