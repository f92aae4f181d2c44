"""Connections between the processes of a launch: both ends prove that they know a secret key.

    sock = join(credentials, timeout_s)              # the end that connects; waits
    index = admit(sock, key, timeout_s)              # the end that listens; waits
    handshakes = Handshakes(poll, key, welcome)      # like `admit`, for many peers; never waits
    handshakes.handle(descriptor)                    # call it when the poll reports a descriptor

The listener sends a nonce. The connecting peer answers with its claim: its index, a second nonce,
and a digest of both nonces and the index. The listener answers with a digest of the second nonce.
Invariant: nothing else is read from a peer whose digest is wrong; its connection is closed.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from dtensor.daft.ray.bootstrap.dead_connections import listen_to

MAX_PATH_BYTES = 100
"""The longest path of a unix socket that every system accepts."""
SOCKET_BYTES = 1 << 22
"""Bytes in flight, as requested from the system, which may allow fewer."""
NONCE_BYTES = 32
DIGEST_BYTES = 32
_CLAIM = struct.Struct(f"<I{NONCE_BYTES}s{DIGEST_BYTES}s")
Welcome: TypeAlias = Callable[[int], Callable[[socket.socket], None] | None]
"""Takes the index that a peer has proved. Returns the function that takes over its connection, or
None to close the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How the peer with this index reaches the listener: by the unix socket at `path` if both are
    on one machine, else by `address`. The key is passed in the call that starts the peer."""

    index: int
    path: str | None
    address: tuple[str, int] | None
    key: bytes = field(repr=False)


# -- the end that connects -------------------------------------------------------------------------


def join(credentials: Credentials, timeout_s: float) -> socket.socket:
    """Return a connection whose ends have both proved that they know the key. Raises
    `ConnectionError` if the listener has not."""
    sock = _connect(credentials)
    try:
        sock.settimeout(timeout_s)
        nonce = _receive_exactly(sock, NONCE_BYTES)
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(_claim(credentials.key, nonce, credentials.index, own_nonce))
        answer = _receive_exactly(sock, DIGEST_BYTES)
        if not hmac.compare_digest(answer, _listener_proof(credentials.key, own_nonce)):
            raise ConnectionError("the peer at that address is not the controller")
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(credentials: Credentials) -> socket.socket:
    """Connect to the listener's unix socket; if it is on another machine, to its address."""
    if credentials.path is not None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(credentials.path)
        except (FileNotFoundError, ConnectionRefusedError):  # the listener is on another machine
            sock.close()
            if credentials.address is None:
                raise
        else:
            _set_options(sock)
            return sock
    assert credentials.address is not None, "a listener has a path or an address"
    sock = socket.create_connection(credentials.address)
    _set_options(sock)
    return sock


# -- the end that listens --------------------------------------------------------------------------


def admit(sock: socket.socket, key: bytes, timeout_s: float) -> int | None:
    """Return the index of the peer that has just connected, None if it does not know the key."""
    _set_options(sock)
    sock.settimeout(timeout_s)
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(nonce)
    proved = _check_claim(key, nonce, _receive_exactly(sock, _CLAIM.size))
    if proved is None:
        return None
    index, peer_nonce = proved
    sock.sendall(_listener_proof(key, peer_nonce))
    sock.settimeout(None)
    return index


class _UnauthenticatedPeer:
    """A peer whose claim has not arrived completely."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.claim = b""


class Handshakes:
    """The handshakes on all sockets that this object listens on. All sockets are registered in
    `poll`; the socket of an admitted peer stays registered."""

    def __init__(self, poll: select.epoll, key: bytes, welcome: Welcome) -> None:
        self._poll = poll
        self._key = key
        self._welcome = welcome
        self._listeners: dict[int, socket.socket] = {}  # by descriptor
        self._peers: dict[int, _UnauthenticatedPeer] = {}  # by descriptor

    def listen(self, sock: socket.socket) -> None:
        sock.listen(socket.SOMAXCONN)
        sock.setblocking(False)
        self._listeners[sock.fileno()] = sock
        self._poll.register(sock, select.EPOLLIN)

    def handle(self, descriptor: int) -> None:
        """Accept a peer, or read from one, if the descriptor belongs to a handshake."""
        if (peer := self._peers.get(descriptor)) is not None:
            self._read_claim(peer)
        elif (listener := self._listeners.get(descriptor)) is not None:
            self._accept(listener)

    def close(self) -> None:
        for sock in (*self._listeners.values(), *(peer.sock for peer in self._peers.values())):
            sock.close()
        self._listeners.clear()
        self._peers.clear()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, and send the peer a nonce to sign."""
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        _set_options(sock)
        peer = _UnauthenticatedPeer(sock)
        self._peers[sock.fileno()] = peer
        self._poll.register(sock, select.EPOLLIN)
        with suppress(OSError):  # fails only if the peer has left, which the next read notices
            sock.send(peer.nonce)

    def _read_claim(self, peer: _UnauthenticatedPeer) -> None:
        """Read a part of a peer's claim. When it is complete, admit the peer or hang up."""
        try:
            received = peer.sock.recv(_CLAIM.size - len(peer.claim))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        peer.claim += received
        if received and len(peer.claim) < _CLAIM.size:
            return
        del self._peers[peer.sock.fileno()]
        proved = _check_claim(self._key, peer.nonce, peer.claim) if received else None
        take_over = self._welcome(proved[0]) if proved is not None else None
        if proved is None or take_over is None:
            peer.sock.close()
            return
        with suppress(OSError):
            peer.sock.send(_listener_proof(self._key, proved[1]))
        take_over(peer.sock)


# -- both ends -------------------------------------------------------------------------------------


def _set_options(sock: socket.socket) -> None:
    """Allow more bytes in flight than the default, send small messages at once, and let a
    connection to another machine break when that machine falls silent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listen_to(sock)


def _claim(key: bytes, nonce: bytes, index: int, own_nonce: bytes) -> bytes:
    """Return a peer's answer to the listener's nonce."""
    packed_index = struct.pack("<I", index)
    return _CLAIM.pack(index, own_nonce, _digest(key, b"host", nonce, packed_index, own_nonce))


def _check_claim(key: bytes, nonce: bytes, claim: bytes) -> tuple[int, bytes] | None:
    """Return the peer's index and nonce, None if the claim was not made with the key."""
    index, peer_nonce, _ = _CLAIM.unpack(claim)
    proved = hmac.compare_digest(claim, _claim(key, nonce, index, peer_nonce))
    return (index, peer_nonce) if proved else None


def _listener_proof(key: bytes, nonce: bytes) -> bytes:
    return _digest(key, b"controller", nonce)


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes. Raises ConnectionError if the connection ends before."""
    data = b""
    while len(data) < size:
        if not (received := sock.recv(size - len(data))):
            raise ConnectionError("the other end hung up")
        data += received
    return data
