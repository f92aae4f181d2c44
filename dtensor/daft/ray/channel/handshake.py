"""Who connects to a process of a launch, and has to prove first that it knows the launch's key.

    guests = Handshakes(poll, key, welcomes)         # welcomes(3): what is done with process 3
    guests.listen(sock)
    guests.hear(descriptor)                          # whenever the poll names one of these

Invariants: it never blocks; who says something wrong, or is not welcome, is shown out, and nothing
else is read from him.
"""

from __future__ import annotations

import secrets
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from dtensor.daft.ray.channel.messages import (
    CLAIM_BYTES,
    NONCE_BYTES,
    claimed,
    proof,
    widen,
)

LONGEST_PATH = 100
"""Bytes of a unix socket's path that every system takes."""
Welcome: TypeAlias = Callable[[int], Callable[[socket.socket], None] | None]
"""By the number that who comes claims to have."""


class _UnauthenticatedPeer:
    """Somebody who has not yet said who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.said = b""


class Handshakes:
    """Those on the sockets that this listens on; all are in `poll`, and so is who has joined."""

    def __init__(self, poll: select.epoll, key: bytes, welcome: Welcome) -> None:
        self._poll = poll
        self._key = key
        self._welcome = welcome
        self._listening: dict[int, socket.socket] = {}  # by descriptor, as the next
        self._guests: dict[int, _UnauthenticatedPeer] = {}

    def listen(self, sock: socket.socket) -> None:
        sock.listen(socket.SOMAXCONN)
        sock.setblocking(False)
        self._listening[sock.fileno()] = sock
        self._poll.register(sock, select.EPOLLIN)

    def hear(self, descriptor: int) -> None:
        if (guest := self._guests.get(descriptor)) is not None:
            self._hear(guest)
        elif (sock := self._listening.get(descriptor)) is not None:
            self._receive(sock)

    def close(self) -> None:
        for sock in (*self._listening.values(), *(g.sock for g in self._guests.values())):
            sock.close()
        self._listening.clear()
        self._guests.clear()

    def _receive(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        widen(sock)
        guest = _UnauthenticatedPeer(sock)
        self._guests[sock.fileno()] = guest
        self._poll.register(sock, select.EPOLLIN)
        with suppress(OSError):  # there is room for it, unless he has left: then it is heard
            sock.send(guest.nonce)

    def _hear(self, guest: _UnauthenticatedPeer) -> None:
        try:
            more = guest.sock.recv(CLAIM_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        guest.said += more
        if more and len(guest.said) < CLAIM_BYTES:
            return
        del self._guests[guest.sock.fileno()]
        known = claimed(self._key, guest.nonce, guest.said) if more else None
        joins = self._welcome(known[0]) if known is not None else None
        if known is None or joins is None:
            guest.sock.close()
            return
        with suppress(OSError):
            guest.sock.send(proof(self._key, known[1]))
        joins(guest.sock)
