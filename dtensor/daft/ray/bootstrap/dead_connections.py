"""Connections to other machines that fall silent, as when a cable is pulled: they are broken.

    listen_to(sock)            # from now on; a TCP connection that is not over loopback
    before = connections()
    group = dist.ProcessGroupGloo(...)                   # which keeps its sockets to itself
    listen_to_those(connections() - before)

A machine that is cut off closes nothing. The kernel asks an idle connection's other end every
second whether it is there (TCP's keepalive), and a thread looks each second whether what was sent
is acknowledged. After `SILENT_S` without a word a connection is broken, so that whoever reads or
writes there fails as if its peer had died.

The other end's kernel answers, not its process: one that computes for hours, is stopped or does not
read is not silent. That is why this is no TCP_USER_TIMEOUT, which also ends a connection whose
reader is slow.

Invariants: a socket belongs to who has made it, and is known here by its inode: descriptors are
used again. Nothing is held open. Linux; elsewhere nothing is noticed.
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
"""Above what a congested network may swallow, and far below any deadline."""
QUIET_S = 2.5
"""One that answers is heard from every second."""
LOOK_S = 0.5
_INFO = struct.Struct("<8B24I")  # of `struct tcp_info`, its beginning
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK = 2, 3, 8 + 4, 8 + 12

_listened_to: dict[int, int] = {}  # inode: descriptor
_lock = threading.Lock()
_thread: threading.Thread | None = None


def listen_to(sock: socket.socket) -> None:
    """Break it when it falls silent."""
    listen_to_those({(os.fstat(sock.fileno()).st_ino, sock.fileno())})


def listen_to_those(sockets: set[tuple[int, int]]) -> None:
    """The same, of those of `connections` that lead to other machines."""
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
        if _listened_to and (_thread is None or not _thread.is_alive()):  # none after a fork
            _thread = threading.Thread(target=_look, name="silence", daemon=True)
            _thread.start()


def connections() -> set[tuple[int, int]]:
    """This process's sockets: inode and descriptor."""
    sockets: set[tuple[int, int]] = set()
    if sys.platform == "linux":
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own
                facts = os.fstat(int(name))
                if stat.S_ISSOCK(facts.st_mode):
                    sockets.add((facts.st_ino, int(name)))
    return sockets


def is_quiet(sock: socket.socket) -> bool:
    """Whether a connection that is listened to will be found silent, as far as that shows yet."""
    with suppress(OSError):
        return _is_to_another(sock) and _unheard_s(sock) > QUIET_S
    return False


def _look() -> None:
    while True:
        time.sleep(LOOK_S)
        with _lock:
            known = list(_listened_to.items())
        for inode, descriptor in known:
            try:
                with _borrowed(inode, descriptor) as sock:
                    if _awaits_answer(sock) and _unheard_s(sock) > SILENT_S:
                        sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it was closed, or has broken
                with _lock:
                    _listened_to.pop(inode, None)


def _borrowed(inode: int, descriptor: int) -> socket.socket:
    """For a moment; `OSError` if it is another by now."""
    sock = socket.socket(fileno=os.dup(descriptor))
    if os.fstat(sock.fileno()).st_ino != inode:
        sock.close()
        raise OSError("the socket was closed")
    return sock


def _is_to_another(sock: socket.socket) -> bool:
    if sys.platform != "linux" or sock.type != socket.SOCK_STREAM:
        return False
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return here != there and not there.removeprefix("::ffff:").startswith("127.")


def _awaits_answer(sock: socket.socket) -> bool:
    """Whether something was sent again, or asked, to which nothing has come back."""
    info = _info(sock)
    return bool(info[_RETRANSMITS] or info[_PROBES]) and bool(info[_UNACKED] or info[_PROBES] > 1)


def _unheard_s(sock: socket.socket) -> float:
    """For how long the other end has acknowledged nothing."""
    return _info(sock)[_LAST_ACK] / 1000


def _info(sock: socket.socket) -> tuple[int, ...]:
    return _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
