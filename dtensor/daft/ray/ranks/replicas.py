"""Replicas of a host's snapshots: a replica server on another machine keeps a copy.

    server = ReplicaServer(folder, secret, "10.0.0.2")    # in a process on the other machine
    store = ReplicatedFile(SnapshotFile.create(folder, (0,)))
    store.copy_to(server.endpoint, secret, (0,))          # sends the present file, then all changes
    store.keep(7, {(0, "w"): w}, {}, (), before=False)    # w: f32[4]; is sent, too
    store.states(6, 7)                                    # returns when the server has it

The server repeats each operation in order, so the copy equals an earlier version of this file. A
new copy is a separate file, which is renamed when it is complete. Invariants: a state is on both
machines before its run counts as ended. If the server fails, operations continue, and `check`
raises. One process at a time writes a file: it holds a lock on a second file.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dtensor.daft.diagnosis.observation import thread
from dtensor.daft.ray.channel.handshake import Credentials, admit, join
from dtensor.daft.ray.channel.messages import (
    ONE_WAY,
    RAISED,
    REQUEST,
    RESPONSE,
    Kind,
    Message,
    encoded,
    incoming,
    send,
)
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import Key, Keys, SnapshotRecord, SnapshotStore

Endpoint: TypeAlias = tuple[str, int]
"""The address and port of a replica server."""
HANDSHAKE_S = 30.0
"""How long a handshake may take."""
RELEASE_S = 5.0
"""How long a running process may hold the lock of a file that another process must write."""
END_S = 30.0


def _key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"copies of snapshots", "sha256")


class ReplicatedFile(SnapshotStore):
    """A `SnapshotFile` whose changes are also sent to the replica server of `copy_to`."""

    outlives = True

    def __init__(self, file: SnapshotFile) -> None:
        self._file = file
        self._records: dict[int, SnapshotRecord] = {}  # by id, the oldest first
        self._sock: socket.socket | None = None
        self._answers: Generator[Message | None] | None = None
        self._states = 0, 0  # the oldest and the newest state of the file
        self._broken = ""  # why copying failed

    def copy_to(self, endpoint: Endpoint | None, secret: bytes, ranks: Sequence[int]) -> None:
        """Copy to this server, and to no other, from now on (None: to none). Return when it has
        everything. Raises `ConnectionError` if copying fails."""
        self._hang_up()
        self._broken = ""
        if endpoint is None:
            return
        credentials = Credentials(index=ranks[0], path=None, address=endpoint, key=_key(secret))
        self._sock = join(credentials, HANDSHAKE_S)
        self._answers = incoming(self._sock)
        self._tell(PeerCopy.begin, tuple(ranks))
        for record in self._records.values():
            self._tell_record(record)
        self._tell(PeerCopy.states, *self._states)
        self._ask(PeerCopy.complete)
        if self._broken:
            raise ConnectionError(self._broken)

    def check(self) -> None:
        """Raise `ConnectionError` if copying has failed."""
        if self._broken:
            raise ConnectionError(self._broken)

    def keep(
        self,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        *,
        before: bool,
    ) -> SnapshotRecord:
        """Store the record of change ``number`` in the file, and send it to the replica server.

        ``others``: values that are not tensors. ``gone``: keys without a value. ``before``: whether
        the values are those before the change, else those after it.
        """
        record = self._file.keep(number, tensors, others, gone, before=before)
        self._records[id(record)] = record
        self._tell_record(record)
        return record

    def drop(self, record: SnapshotRecord) -> None:
        """Drop a record from the file and its copy."""
        del self._records[id(record)]
        self._tell(PeerCopy.drop, id(record))
        self._file.drop(record)

    def states(self, oldest: int, newest: int) -> None:
        """Set the range of restorable states. If there is a new state, wait until the copy has
        it."""
        is_new = newest != self._states[1]
        self._states = oldest, newest
        self._file.states(oldest, newest)
        if is_new:
            self._ask(PeerCopy.states, oldest, newest)
        else:  # nothing depends on when the server has it
            self._tell(PeerCopy.states, oldest, newest)

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        oldest, newest, records = self._file.found()
        self._states = oldest, newest
        self._records = {id(record): record for record in records}
        return oldest, newest, records

    def close(self) -> None:
        self._hang_up()
        self._records.clear()
        self._file.close()

    def _tell_record(self, r: SnapshotRecord) -> None:
        self._tell(PeerCopy.keep, id(r), r.number, r.tensors, r.others, r.gone, r.before)

    def _tell(self, method: Any, *arguments: object) -> None:
        self._send(ONE_WAY, method, arguments)

    def _ask(self, method: Any, *arguments: object) -> None:
        """Call a method of the server's `PeerCopy`, and wait until the server has executed it."""
        self._send(REQUEST, method, arguments)
        if self._answers is None:
            return
        try:
            while (answer := next(self._answers)) is None:
                pass
        except EOFError:
            self._break_off("its process has ended, or its machine")
        else:
            if answer.kind != RESPONSE:
                self._break_off(str(answer.value()))

    def _send(self, kind: Kind, method: Any, arguments: tuple[object, ...]) -> None:
        """Send a message to the replica server; if that fails, stop copying."""
        if self._sock is not None:
            try:
                send(self._sock, encoded(0, kind, (method,), arguments))
            except OSError as error:
                self._break_off(str(error))

    def _break_off(self, reason: str) -> None:
        self._broken = f"the copy of snapshots on another machine broke off: {reason}"
        self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = self._answers = None


class PeerCopy:
    """The copy of one host's file, in the replica server. A `ReplicatedFile` calls its methods."""

    def __init__(self, folder: Path) -> None:
        self.ranks: tuple[int, ...] = ()
        self._folder = folder
        self._file: SnapshotFile | None = None
        self._lock = -1
        self._records: dict[int, SnapshotRecord] = {}

    def begin(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._lock = hold(self._folder, ranks)
        self._file = SnapshotFile.create(self._folder, ranks, beside=True)

    def keep(
        self,
        name: int,
        number: int,
        tensors: Mapping[Key, torch.Tensor],
        others: Mapping[Key, object],
        gone: Keys,
        before: bool,
    ) -> None:
        """Store a record. ``name``: the id by which the peer refers to it."""
        self._records[name] = self._open_file.keep(number, tensors, others, gone, before=before)

    def drop(self, name: int) -> None:
        self._open_file.drop(self._records.pop(name))

    def states(self, oldest: int, newest: int) -> None:
        self._open_file.states(oldest, newest)

    def complete(self) -> None:
        """Rename this file, so that it replaces an earlier copy."""
        SnapshotFile.beside(self._folder, self.ranks).replace(
            SnapshotFile.path(self._folder, self.ranks)
        )

    def close(self) -> None:
        """Close the copy's file, and release the lock on it."""
        self._records.clear()
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)

    @property
    def _open_file(self) -> SnapshotFile:
        assert self._file is not None, "begin comes first"
        return self._file


class ReplicaServer:
    """Keeps copies for peers that connect and know the secret, each in a thread."""

    def __init__(self, folder: Path, secret: bytes, address: str) -> None:
        self._folder = folder
        self._key = _key(secret)
        self._listening = socket.create_server((address, 0))
        self.endpoint: Endpoint = self._listening.getsockname()[:2]
        self._open: list[tuple[PeerCopy, socket.socket, threading.Thread]] = []
        self._lock = threading.Lock()  # for `_open`
        threading.Thread(target=self._listen, name="keeper", daemon=True).start()

    def end(self, ranks: Sequence[tuple[int, ...]]) -> None:
        """End the connections of the hosts with these ranks; their copies stay as they are."""
        with self._lock:
            ending = [each for each in self._open if each[0].ranks in ranks]
        for _, sock, _ in ending:
            with suppress(OSError):  # the connection has ended already
                sock.shutdown(socket.SHUT_RDWR)
        for _, _, server_thread in ending:
            server_thread.join()

    def _listen(self) -> None:
        """Accept peers forever; this is the thread's function."""
        while True:
            sock, _ = self._listening.accept()
            copy = PeerCopy(self._folder)
            server_thread = threading.Thread(
                target=self._serve_peer, args=(copy, sock), daemon=True
            )
            with self._lock:
                self._open = [each for each in self._open if each[2].is_alive()]
                server_thread.start()
                self._open.append((copy, sock, server_thread))

    def _serve_peer(self, copy: PeerCopy, sock: socket.socket) -> None:
        """Execute the messages of a peer until it ends, if it knows the secret."""
        with sock:
            try:
                if admit(sock, self._key, HANDSHAKE_S) is not None:
                    _serve(copy, sock)
            except (EOFError, OSError):  # the peer has ended
                pass
            finally:
                copy.close()


def _serve(copy: PeerCopy, sock: socket.socket) -> None:
    """Execute a peer's messages. After an exception, which is the answer to the next request, no
    further message is executed."""
    failed = ""
    for message in incoming(sock):
        if message is None:
            continue
        if not failed:
            try:
                (method,) = message.functions
                method(copy, *message.value())
            except Exception as error:  # for example no memory is left
                notes = getattr(error, "__notes__", [])
                failed = "\n".join((f"{type(error).__name__}: {error}", *notes))
        if message.kind == REQUEST:
            send(sock, encoded(0, RAISED if failed else RESPONSE, (), failed))


def hold(folder: Path, ranks: Sequence[int]) -> int:
    """Make this process the only writer of these ranks' file. Return a descriptor, which holds the
    lock while it is open. A process that does not release the lock in time is killed."""
    path = SnapshotFile.path(folder, ranks).with_suffix(".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = time.monotonic() + RELEASE_S
    while not _try_lock(descriptor):
        holder = int(os.pread(descriptor, 20, 0) or b"0")
        if time.monotonic() > end or thread(holder, holder).state in ("T", "t"):
            _end(holder, path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            break
        time.sleep(0.01)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d" % os.getpid(), 0)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    """Try to take an exclusive lock without waiting. Return whether it was taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end(process: int, path: Path) -> None:
    """Kill the process that holds the lock at `path`, and wait until it has ended."""
    if process in (0, os.getpid()):
        raise RuntimeError(f"{path} is held by process {process}, which must not be ended.")
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(int(END_S * 1000)):
                raise RuntimeError(f"Process {process}, which holds {path}, did not end.")
        finally:
            os.close(handle)
