"""What hosts tell each other before they are connected: a store at the controller, whose content is
signed.

    store = SignedStore.open("127.0.0.1", key)           # the controller's; listens there alone
    there = SignedStore.join("127.0.0.1", store.port, key, patience)      # a host's
    there.set("ranks/here0", card)                       # 32 bytes of proof, then the card
    store.get("ranks/here0")                             # the card; ConnectionError if it is forged

torch's TCPStore asks nobody who he is, and gloo connects to whatever address it reads there. So
each value begins with an HMAC of its key and itself, and what does not is an error that names the
key. The launch's secret comes with the call that tells a host to join (`connect.py`).

Invariants: what was read was written by who knows the secret, under that key; keys are written
once in a launch, so that an old value is no other's. It listens on the address that it was given
and on no other. It hides nothing, and keeps nobody from deleting keys or from filling it: then a
launch fails, or waits until the controller's deadline ends it. There are no counters (`add`): they
cannot be signed. Of one thread: while one waits for a key, none can write.
"""

from __future__ import annotations

import hmac
import socket
from datetime import timedelta

from dtensor.private_torch import Store, TCPStore

PROOF_BYTES = 32


class SignedStore(Store):
    """torch's C++ calls these methods. It holds no reference to this object: hold one as long as
    a `PrefixStore` or a process group uses it."""

    def __init__(self, tcp: TCPStore, secret: bytes) -> None:
        super().__init__()
        self._tcp = tcp
        self._secret = secret

    @staticmethod
    def open(address: str, secret: bytes) -> SignedStore:
        """A new one, on a port of its own of one address of this machine."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        port = listening.getsockname()[1]
        # torch closes it; a socket that it opens itself would listen on all interfaces
        descriptor = listening.detach()
        tcp = TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=descriptor
        )
        return SignedStore(tcp, secret)

    @staticmethod
    def join(address: str, port: int, secret: bytes, patience: timedelta) -> SignedStore:
        """Of another process."""
        tcp = TCPStore(address, port, None, False, patience, wait_for_workers=False)
        return SignedStore(tcp, secret)

    @property
    def port(self) -> int:
        return self._tcp.port

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._tcp.set(key, self._proof(key, data) + data)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Waits until it is there."""
        signed = self._tcp.get(key)
        proof, data = signed[:PROOF_BYTES], signed[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(key, data)):
            raise ConnectionError(
                f"what is in the store at port {self.port} under {key!r} was not written by this "
                f"launch: {len(signed)} bytes without its proof"
            )
        return data

    def check(self, keys: list[str]) -> bool:
        """Whether all are there, whoever wrote them."""
        return self._tcp.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._tcp.wait(keys)
        else:
            self._tcp.wait(keys, timeout)

    def _proof(self, key: str, data: bytes) -> bytes:
        # a length before the key, so that no other key and value make the same text
        return hmac.digest(self._secret, b"%d %s" % (len(key), key.encode()) + data, "sha256")
