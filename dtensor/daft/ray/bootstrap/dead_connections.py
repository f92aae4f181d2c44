"""Breaks connections to machines that have fallen silent, for example because a cable was pulled.

    listen_to(sock)                                      # watch a connection from now on
    before = connections()
    group = dist.ProcessGroupGloo(...)                   # does not expose its sockets
    listen_to_those(connections() - before)

The kernel sends TCP keepalive probes every second, and a thread checks whether sent data is
acknowledged. After `SILENT_S` without an answer it shuts the connection down, so that reads and
writes fail. The peer's kernel answers even if its process computes or is stopped; TCP_USER_TIMEOUT
would also break a connection whose reader is slow. Sockets are identified by inode. On Linux only.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import threading
import time
from contextlib import suppress

SILENT_S = 5.0
"""After this time without an answer a connection is broken. A congested network may lose packets
for some seconds."""
QUIET_S = 2.5
"""After this time without an answer a connection is suspicious: a live peer answers every
second."""
LOOK_S = 0.5
_INFO = struct.Struct("<8B24I")  # the beginning of `struct tcp_info`
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK = 2, 3, 8 + 4, 8 + 12

_listened_to: dict[int, int] = {}  # inode: descriptor
_lock = threading.Lock()
_thread: threading.Thread | None = None


def listen_to(sock: socket.socket) -> None:
    """Break a connection when its peer falls silent."""
    listen_to_those({(os.fstat(sock.fileno()).st_ino, sock.fileno())})


def listen_to_those(sockets: set[tuple[int, int]]) -> None:
    """Let these sockets (inode, descriptor) break when their peers fall silent. Sockets that are
    not connections to other machines are ignored."""
    global _thread
    new: dict[int, int] = {}
    for inode, descriptor in sockets:
        with suppress(OSError), _borrowed(inode, descriptor) as sock:
            if _is_to_another(sock):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(SILENT_S) - 1)
                new[inode] = descriptor
    with _lock:
        _listened_to.update(new)
        if _listened_to and (_thread is None or not _thread.is_alive()):  # a fork has no thread
            _thread = threading.Thread(target=_look, name="silence", daemon=True)
            _thread.start()


def connections() -> set[tuple[int, int]]:
    """Return the sockets of this process: inode and descriptor."""
    sockets: set[tuple[int, int]] = set()
    if sys.platform == "linux":
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself is closed
                facts = os.fstat(int(name))
                if stat.S_ISSOCK(facts.st_mode):
                    sockets.add((facts.st_ino, int(name)))
    return sockets


def is_quiet(sock: socket.socket) -> bool:
    """Return whether the peer of a connection to another machine has not answered for `QUIET_S`."""
    with suppress(OSError):
        return _is_to_another(sock) and _unheard_s(sock) > QUIET_S
    return False


def _look() -> None:
    """Shut down silent connections, forever; this is the thread's function."""
    while True:
        time.sleep(LOOK_S)
        with _lock:
            sockets = list(_listened_to.items())
        for inode, descriptor in sockets:
            try:
                with _borrowed(inode, descriptor) as sock:
                    if _awaits_answer(sock) and _unheard_s(sock) > SILENT_S:
                        sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it was closed, or has broken
                with _lock:
                    _listened_to.pop(inode, None)


def _borrowed(inode: int, descriptor: int) -> socket.socket:
    """Return a duplicate of a socket, to be closed soon. Raises OSError if the descriptor belongs
    to another socket now."""
    sock = socket.socket(fileno=os.dup(descriptor))
    if os.fstat(sock.fileno()).st_ino != inode:
        sock.close()
        raise OSError("the socket was closed")
    return sock


def _is_to_another(sock: socket.socket) -> bool:
    """Return whether a socket is a TCP connection to another machine."""
    if sys.platform != "linux" or sock.type != socket.SOCK_STREAM:
        return False
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own_address, peer_address = sock.getsockname()[0], sock.getpeername()[0]
    return own_address != peer_address and not peer_address.removeprefix("::ffff:").startswith(
        "127."
    )


def _awaits_answer(sock: socket.socket) -> bool:
    """Return whether data was sent again, or a probe was sent, without an answer."""
    info = _info(sock)
    return bool(info[_RETRANSMITS] or info[_PROBES]) and bool(info[_UNACKED] or info[_PROBES] > 1)


def _unheard_s(sock: socket.socket) -> float:
    """Return for how many seconds the peer has acknowledged nothing."""
    return _info(sock)[_LAST_ACK] / 1000


def _info(sock: socket.socket) -> tuple[int, ...]:
    return _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
