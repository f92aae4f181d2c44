"""A key-value store at the controller with signed values, by which hosts find each other.

    store = SignedStore.open("127.0.0.1", secret)        # in the controller
    client = SignedStore.join("127.0.0.1", store.port, secret, patience)      # in a host
    client.set("ranks/here0", address)                   # stores 32 bytes of proof, and address
    store.get("ranks/here0")                             # the address. Raises if it is forged

torch's TCPStore does not authenticate clients, and gloo connects to any address that it reads
there, so each value begins with an HMAC of the key and the value. Invariants: a value that `get`
returns was written by a process that knows the secret. A key is written once in a launch. The store
listens on one address. It does not encrypt values, or prevent their deletion. One thread uses it at
a time.
"""

from __future__ import annotations

import hmac
import socket
from datetime import timedelta

from dtensor.private_torch import Store, TCPStore

PROOF_BYTES = 32


class SignedStore(Store):
    """A store whose values are signed with `secret`. torch's C++ calls its methods without a
    reference to it: keep it alive as long as a `PrefixStore` or a process group uses it."""

    def __init__(self, tcp: TCPStore, secret: bytes) -> None:
        super().__init__()
        self._tcp = tcp
        self._secret = secret

    @staticmethod
    def open(address: str, secret: bytes) -> SignedStore:
        """Create a store that listens on an unused port of this address."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        port = listening.getsockname()[1]
        # a socket that torch opens would listen on all interfaces; torch closes this socket
        descriptor = listening.detach()
        tcp = TCPStore(
            address, port, None, True, wait_for_workers=False, master_listen_fd=descriptor
        )
        return SignedStore(tcp, secret)

    @staticmethod
    def join(address: str, port: int, secret: bytes, patience: timedelta) -> SignedStore:
        """Connect to the store of another process."""
        tcp = TCPStore(address, port, None, False, patience, wait_for_workers=False)
        return SignedStore(tcp, secret)

    @property
    def port(self) -> int:
        return self._tcp.port

    def set(self, key: str, value: str | bytes) -> None:
        """Sign a value, and store it under a key."""
        data = value.encode() if isinstance(value, str) else value
        self._tcp.set(key, self._proof(key, data) + data)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Wait until a key exists; return its value. Raises ConnectionError if it is not signed."""
        signed = self._tcp.get(key)
        proof, data = signed[:PROOF_BYTES], signed[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(key, data)):
            raise ConnectionError(
                f"the value of {key!r} in the store at port {self.port} was not written by this "
                f"launch: {len(signed)} bytes without its proof"
            )
        return data

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist. Their values may be forged."""
        return self._tcp.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._tcp.wait(keys)
        else:
            self._tcp.wait(keys, timeout)

    def _proof(self, key: str, data: bytes) -> bytes:
        # the key's length comes first, so that no other key and value give the same bytes
        return hmac.digest(self._secret, b"%d %s" % (len(key), key.encode()) + data, "sha256")
