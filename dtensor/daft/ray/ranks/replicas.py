"""Replicas of a host's snapshots: a replica server on another machine keeps a copy.

    keeper = ReplicaServer(folder, secret, "10.0.0.2")    # in a process on the other machine
    store = ReplicatedFile(SnapshotFile.create(folder, (0,)))
    store.copy_to(keeper.endpoint, secret, (0,))          # the present file; then all changes
    store.keep(7, {(0, "w"): w}, {}, (), before=False)    # w: f32[4]; sent, too
    store.states(6, 7)                                    # returns when the other one has it

The store sends each operation on its file to the keeper over one connection, in order, and the
keeper repeats it on a file of the same name. So the copy always equals an earlier version of this
file: a process that opens it finds whole versions. A state counts as kept when the keeper has
confirmed it; hence a run that the controller knows to have ended has ended on two machines. The
copy is begun anew if one of the two is a new process: in a separate file, which takes the name when
it is complete.

Invariants: a peer that connects, and the peer that answers, must prove that they know the launch's
secret before anything else is read; later messages are neither encrypted nor signed. A keeper that
has ended, or has no memory, fails no operation: `check` raises, from then on. One process at a time
writes a file: it holds a lock on a second file, and its successor ends it if a signal has stopped
it.

Not here: the choice of a host's keeper (`membership.py`).
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
"""The endpoint of a keeper."""
ANSWER_S = 30.0
"""How long a handshake may take."""
LET_GO_S = 5.0
"""How long a running process may hold a file that another one must write."""
END_S = 30.0


def _key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"copies of snapshots", "sha256")


class ReplicatedFile(SnapshotStore):
    """A `SnapshotFile`, and a copy of it at the keeper of `copy_to`."""

    outlives = True

    def __init__(self, file: SnapshotFile) -> None:
        self._file = file
        self._records: dict[int, SnapshotRecord] = {}  # existing ones, the oldest first
        self._sock: socket.socket | None = None
        self._answers: Generator[Message | None] | None = None
        self._said = 0, 0  # the states that the file has
        self._broken = ""

    def copy_to(self, endpoint: Endpoint | None, secret: bytes, ranks: Sequence[int]) -> None:
        """From now on copy to this keeper, and to no other; None: to none. Returns when the keeper
        has everything. `ConnectionError` if that fails."""
        self._hang_up()
        self._broken = ""
        if endpoint is None:
            return
        credentials = Credentials(index=ranks[0], path=None, address=endpoint, key=_key(secret))
        self._sock = join(credentials, ANSWER_S)
        self._answers = incoming(self._sock)
        self._tell(PeerCopy.begin, tuple(ranks))
        for record in self._records.values():
            self._tell_record(record)
        self._tell(PeerCopy.states, *self._said)
        self._ask(PeerCopy.complete)
        if self._broken:
            raise ConnectionError(self._broken)

    def check(self) -> None:
        """Raises if the copy has broken off."""
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
        record = self._file.keep(number, tensors, others, gone, before=before)
        self._records[id(record)] = record
        self._tell_record(record)
        return record

    def drop(self, record: SnapshotRecord) -> None:
        del self._records[id(record)]
        self._tell(PeerCopy.drop, id(record))
        self._file.drop(record)

    def states(self, oldest: int, newest: int) -> None:
        moved = newest != self._said[1]
        self._said = oldest, newest
        self._file.states(oldest, newest)
        if moved:
            self._ask(PeerCopy.states, oldest, newest)
        else:  # only the order matters
            self._tell(PeerCopy.states, oldest, newest)

    def found(self) -> tuple[int, int, list[SnapshotRecord]]:
        oldest, newest, records = self._file.found()
        self._said = oldest, newest
        self._records = {id(record): record for record in records}
        return oldest, newest, records

    def close(self) -> None:
        self._hang_up()
        self._records.clear()
        self._file.close()

    def _tell_record(self, r: SnapshotRecord) -> None:
        self._tell(PeerCopy.keep, id(r), r.number, r.tensors, r.others, r.gone, r.before)

    def _tell(self, method: Any, *given: object) -> None:
        self._send(ONE_WAY, method, given)

    def _ask(self, method: Any, *given: object) -> None:
        """Returns when the keeper has done it."""
        self._send(REQUEST, method, given)
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

    def _send(self, kind: Kind, method: Any, given: tuple[object, ...]) -> None:
        if self._sock is not None:
            try:
                send(self._sock, encoded(0, kind, (method,), given))
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
    """The copy of one host's file, at its keeper."""

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
        self._records[name] = self._there.keep(number, tensors, others, gone, before=before)

    def drop(self, name: int) -> None:
        self._there.drop(self._records.pop(name))

    def states(self, oldest: int, newest: int) -> None:
        self._there.states(oldest, newest)

    def complete(self) -> None:
        """Make this the copy from now on, in place of an earlier one."""
        SnapshotFile.beside(self._folder, self.ranks).replace(
            SnapshotFile.path(self._folder, self.ranks)
        )

    def close(self) -> None:
        self._records.clear()
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)

    @property
    def _there(self) -> SnapshotFile:
        assert self._file is not None, "begin comes first"
        return self._file


class ReplicaServer:
    """Keeps copies for peers that connect and know the secret, each in a thread. `door`: its
    endpoint."""

    def __init__(self, folder: Path, secret: bytes, address: str) -> None:
        self._folder = folder
        self._key = _key(secret)
        self._listening = socket.create_server((address, 0))
        self.endpoint: Endpoint = self._listening.getsockname()[:2]
        self._open: list[tuple[PeerCopy, socket.socket, threading.Thread]] = []
        self._changed = threading.Lock()
        threading.Thread(target=self._listen, name="keeper", daemon=True).start()

    def end(self, ranks: Sequence[tuple[int, ...]]) -> None:
        """End the connections of these hosts; their files stay unchanged."""
        with self._changed:
            ending = [each for each in self._open if each[0].ranks in ranks]
        for _, sock, _ in ending:
            with suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        for _, _, keeping in ending:
            keeping.join()

    def _listen(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            kept = PeerCopy(self._folder)
            keeping = threading.Thread(target=self._keep, args=(kept, sock), daemon=True)
            with self._changed:
                self._open = [each for each in self._open if each[2].is_alive()]
                keeping.start()
                self._open.append((kept, sock, keeping))

    def _keep(self, kept: PeerCopy, sock: socket.socket) -> None:
        with sock:
            try:
                if admit(sock, self._key, ANSWER_S) is not None:
                    _serve(kept, sock)
            except (EOFError, OSError):  # the other end has gone
                pass
            finally:
                kept.close()


def _serve(kept: PeerCopy, sock: socket.socket) -> None:
    """Carry out messages. An exception is the answer to the next request, and no later message is
    carried out."""
    failed = ""
    for message in incoming(sock):
        if message is None:
            continue
        if not failed:
            try:
                (method,) = message.functions
                method(kept, *message.value())
            except Exception as error:  # no memory for one
                notes = getattr(error, "__notes__", [])
                failed = "\n".join((f"{type(error).__name__}: {error}", *notes))
        if message.kind == REQUEST:
            send(sock, encoded(0, RAISED if failed else RESPONSE, (), failed))


def hold(folder: Path, ranks: Sequence[int]) -> int:
    """Make this process the only writer of these ranks' file; returns a descriptor, which holds the
    lock while it is open. A process that still holds it is about to release it, or is ended."""
    path = SnapshotFile.path(folder, ranks).with_suffix(".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = time.monotonic() + LET_GO_S
    while not _is_taken(descriptor):
        holder = int(os.pread(descriptor, 20, 0) or b"0")
        if time.monotonic() > end or thread(holder, holder).state in ("T", "t"):
            _end(holder, path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            break
        time.sleep(0.01)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d" % os.getpid(), 0)
    return descriptor


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end(process: int, path: Path) -> None:
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
