"""The object store of a process: values that it has made, or received from other processes.

    store = ObjectStore(meeting, 0)                # in process 0
    message = store.allocate(1 << 26)              # a buffer for a value's message: u8[67108864]
    store.put(7, message)                          # value 7, for any process that requests it
    store.send(7, to=1)                            # now, or when it is made; does not wait
    other_store.take(7, holder=0)                  # in process 1: waits for it; a private copy
    store.drop([7])

On one machine, large messages are mapped (`slabs.py`); others go over connections that a thread
reads and writes, so that no send waits. Invariants: a value is sent to each process once.
`HostGone` is raised for a value of an ended process only after all its messages were read.
"""

from __future__ import annotations

import hmac
import json
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtensor.daft.errors import ActorLost, Failure
from dtensor.daft.ray.bootstrap.machines import LOOPBACK, START_S, node_at, reached_at
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.channel.handshake import MAX_PATH_BYTES, Credentials, Handshakes, join
from dtensor.daft.ray.channel.messages import (
    MAX_PIECES,
    ONE_WAY,
    Data,
    Payload,
    encoded,
    incoming,
    unsent,
)
from dtensor.daft.ray.transports.segments import Segment, SegmentAddress
from dtensor.daft.ray.transports.shared_memory_peers import own_place
from dtensor.daft.ray.transports.slabs import MAX_PROCESSES, SHARED_BYTES, Lent, OpenSlabs, Slabs
from dtensor.daft.tasks.values import encode_failure
from dtensor.signals import defer_signals

Key: TypeAlias = int | tuple[int, str]
"""The name of a value: the number of the call that makes it, or a run of a compiled function and a
name."""
Held: TypeAlias = Tensor | Lent
"""A value's message, in this process's memory or in another's."""

CONTROLLER = MAX_PROCESSES - 1
"""The controller's number among the processes."""
SLICE_S = 0.2
"""How often a waiting process checks whether the holder of a value is alive."""
COLLECT_S = 1.0
"""How often shared memory that other processes have returned is freed."""
RETRY_S = 0.02  # how often the address of a process is polled until the process has started

# kinds of messages between stores, and their arguments
_VALUE = 0  # key, message
_SEND = 1  # key, process: send a value to a process
_DROP = 2  # keys: drop values
_LOST = 3  # process: it has ended
_SEGMENT = 4  # index, segment address: the sender's shared memory; without arguments: only connect


class HostGone(Exception):
    """Raised for a value that was on a process that has ended."""

    def __init__(self, host: int) -> None:
        super().__init__(f"process {host} has ended")
        self.host = host


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeeting:
    """The place where the processes of a launch publish their addresses: `folder` on the
    controller's machine; for other machines the store at `port` of the controller's `address`."""

    folder: Path
    secret: bytes = field(repr=False)
    address: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The published address of a process. `slabs`: the fields of a `SegmentAddress`."""

    path: str | None
    address: tuple[str, int] | None
    slabs: dict[str, Any] | None

    @staticmethod
    def of(text: str) -> _Address:
        """Return the address that a process has published as JSON."""
        fields = json.loads(text)
        address = fields["address"]
        return _Address(
            path=fields["path"],
            address=None if address is None else (address[0], address[1]),
            slabs=fields["slabs"],
        )


class _Outgoing:
    """The connection to one process, for sending. Messages may be queued before it exists."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.sock: socket.socket | None = None
        self.connecting = False
        self.ended = False
        self.shares = False  # whether the process can open this process's slabs
        self.unsent: deque[tuple[Any, ...]] = deque()  # a kind and its arguments each
        self.pieces: list[Data] = []  # of a message that is partly sent


class _Incoming:
    """A connection that another process has opened. The thread that reads holds `lock`."""

    def __init__(self, process: int, sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self.messages = incoming(sock)
        self.lock = threading.Lock()
        self.ended = False
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)


class ObjectStore:
    """The object store of process `index` of a launch."""

    def __init__(self, meeting: StoreMeeting, index: int) -> None:
        """Listen for other processes, publish the address, and start the thread."""
        self.index = index
        self._meeting = meeting
        # Taken directly: Ctrl-C in the `with` of a Condition would leave the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._values: dict[Key, Held] = {}
        self._requested: dict[Key, set[int]] = {}  # processes to send a value to once it is made
        self._sent: dict[Key, set[int]] = {}  # processes that a value was sent to
        self._dropped: set[Key] = set()  # values that were dropped before they were made
        self._ended: set[int] = set()  # processes
        self._incoming: dict[int, _Incoming] = {}  # by process
        self._outgoing: dict[int, _Outgoing] = {}  # by process
        self._other_slabs: dict[int, OpenSlabs] = {}  # by process
        self._forgotten: deque[tuple[Key, Sequence[int]]] = deque()  # see `forget`
        self._collects = False  # whether the thread frees returned memory every `COLLECT_S`
        self._closed = False
        self._failed: BaseException | None = None  # what ended the thread
        self._poll = select.epoll()
        self._key = hmac.digest(meeting.secret, b"values of tasks", "sha256")
        self._handshakes = Handshakes(self._poll, self._key, self._welcome)
        self._incoming_by_fd: dict[int, _Incoming] = {}
        self._outgoing_by_fd: dict[int, _Outgoing] = {}
        self._own_slabs = self._slabs()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._poll.register(self._wake_read, select.EPOLLIN)
        self._announce()
        self._thread = threading.Thread(target=self._serve, name="values", daemon=True)
        self._thread.start()

    # -- values -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        """Return a buffer for a message, u8[nbytes], in shared memory if it is large."""
        if self._own_slabs is None or nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        buffer = self._own_slabs.allocate(nbytes)
        if not self._collects:
            self._wake()
        return buffer

    def put(self, key: Key, message: Held) -> None:
        """Store a value, and send it to the processes that wait for it."""
        with self._lock:
            if key in self._dropped:
                self._dropped.remove(key)
                return
            self._values[key] = message
            receivers = self._requested.pop(key, ())
            self._changed.notify_all()
        for receiver in receivers:
            self.send(key, receiver)

    def send(self, key: Key, to: int) -> None:
        """Send a value to another process, once it is here. Do nothing if that was done before."""
        with self._lock:
            message = self._values.get(key)
            if message is None:
                self._requested.setdefault(key, set()).add(to)
                return
            sent = self._sent.setdefault(key, set())
            if to in sent:
                return
            sent.add(to)
        self.send_message(key, message, to)

    def send_message(self, key: Key, message: Held, to: int) -> None:
        """Send a value to another process without storing it here."""
        self._say(to, (_VALUE, key, message))

    def take(self, key: Key, holder: int | None, *, keeps: bool = True) -> Tensor:
        """Wait for a value that is here or comes from `holder`; return a private copy of its
        message, u8. Raises `HostGone`. `keeps`: the value stays here, and its holder keeps it,
        too."""
        while not self.wait(key, holder, SLICE_S, asks=keeps):
            pass
        with self._lock:
            message = self._values[key] if keeps else self._values.pop(key)
        return self._open(message)

    def wait(self, key: Key, holder: int | None, seconds: float, *, asks: bool = True) -> bool:
        """Return whether a value arrives within `seconds`. Raises `HostGone`, and LookupError if no
        process holds it. `asks`: if it has not arrived, request it from the holder, which must keep
        it: otherwise the holder would store the request forever."""
        end = time.monotonic() + seconds
        while True:
            with defer_signals(), self._lock:
                if key in self._values:
                    return True
                if self._failed is not None:
                    raise RuntimeError("connections are not read any more") from self._failed
                if holder is None:
                    raise LookupError(f"value {key} is not here")
                if self._is_gone(holder):
                    raise HostGone(holder)
                left = end - time.monotonic()
                if left <= 0.0 or self._closed:
                    break
                connection = self._incoming.get(holder)
                if connection is None:
                    self._changed.wait(left)
                    continue
            self._read_until(key, connection, left)
        if asks:
            self.ask(key, holder)
        else:
            self.connect(holder)
        return False

    def _read_until(self, key: Key, connection: _Incoming, seconds: float) -> None:
        """Read from a holder in this thread, for up to `seconds`. Waiting for the reading thread
        would take twice as long."""
        with connection.lock:
            if connection.ended or key in self._values:  # the thread may just have read it
                return
            try:
                self._poll.modify(connection.sock, 0)
                if connection.poll.poll(seconds * 1000):
                    with defer_signals():  # else an interrupt would lose bytes that were read
                        self._read(connection)
            finally:
                if not connection.ended:
                    self._poll.modify(connection.sock, select.EPOLLIN)

    def ask(self, key: Key, holder: int, to: int | None = None) -> None:
        """Ask another process to send a value, by default to this process."""
        self._say(holder, (_SEND, key, self.index if to is None else to))

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop values. A value that has not arrived yet will not be stored."""
        with self._lock:
            for key in keys:
                if self._values.pop(key, None) is None:
                    self._dropped.add(key)
                self._sent.pop(key, None)
                self._requested.pop(key, None)

    def forget(self, key: Key, processes: Sequence[int]) -> None:
        """Let the thread tell these processes to drop a value. Takes no lock, for finalizers."""
        self._forgotten.append((key, processes))
        self._wake()

    def tell_of_loss(self, host: int, to: int) -> None:
        """Tell process `to` that process `host` has ended."""
        self._say(to, (_LOST, host))

    def lost(self, host: int) -> None:
        """Record that a process has ended."""
        with self._lock:
            self._ended.add(host)
            self._changed.notify_all()

    def _open(self, held: Held) -> Tensor:
        """Return a private copy of a message, u8."""
        if isinstance(held, Lent):
            return held.open()
        return held.clone() if self._own_slabs is None else self._own_slabs.open(held)

    def _lent(self, message: Tensor, to: int) -> tuple[int, int, int] | None:
        """Lend a message in shared memory to another process. Return where it is: this process, the
        begin and the length; None if the process cannot open it."""
        outgoing = self._outgoing.get(to)
        if self._own_slabs is None or outgoing is None or not outgoing.shares:
            return None
        lent = self._own_slabs.lend(message, to)
        return None if lent is None else (self.index, *lent)

    def close(self) -> None:
        """Close all connections, drop the values and end the thread."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._changed.notify_all()
        self._wake()
        self._thread.join()

    # -- addresses -----------------------------------------------------------------------------

    def _slabs(self) -> Slabs | None:
        try:
            return Slabs(Segment.create(own_place(node_at(self._meeting.address))), self.index)
        except (AttributeError, OSError):  # not Linux, or another C library
            return None

    def _announce(self) -> None:
        """Listen for other processes, and publish the address."""
        meeting, path, address = self._meeting, None, None
        if meeting.folder.exists():
            socket_path = str(meeting.folder / f"values{self.index}")
            if len(socket_path.encode()) <= MAX_PATH_BYTES:
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(socket_path)
                self._handshakes.listen(sock)
                path = socket_path
        if path is None or meeting.port is not None:
            host = "127.0.0.1" if meeting.address == LOOPBACK else reached_at(meeting.address)
            sock = socket.create_server((host, 0))
            self._handshakes.listen(sock)
            address = sock.getsockname()[:2]
        slabs = None if self._own_slabs is None else asdict(self._own_slabs.segment_address)
        text = json.dumps(asdict(_Address(path=path, address=address, slabs=slabs)))
        if meeting.folder.exists():
            part = meeting.folder / f"values{self.index}.part"
            part.write_text(text)
            part.rename(meeting.folder / f"values{self.index}.json")
        if (store := self._signed()) is not None:
            store.set(f"values{self.index}", text)

    def _signed(self) -> SignedStore | None:
        """Return a new client of the store for processes on several machines, None if all are on
        one. One thread may use it."""
        meeting = self._meeting
        if meeting.port is None:
            return None
        start = timedelta(seconds=START_S)
        return SignedStore.join(meeting.address, meeting.port, meeting.secret, start)

    def _find(self, process: int) -> _Address | None:
        """Wait until a process has started; return its address, None if the process has ended."""
        file = self._meeting.folder / f"values{process}.json"
        store = self._signed()
        while not self._closed and process not in self._ended:
            with suppress(FileNotFoundError):
                return _Address.of(file.read_text())
            if store is not None and store.check([f"values{process}"]):
                return _Address.of(store.get(f"values{process}").decode())
            time.sleep(RETRY_S)
        return None

    # -- sending -----------------------------------------------------------------------------

    def _say(self, to: int, message: tuple[Any, ...]) -> None:
        """Send a message, a kind and its arguments, to another process, after connecting to it."""
        with defer_signals(), self._lock:
            outgoing = self._outgoing.get(to)
            if outgoing is None:
                outgoing = self._outgoing[to] = _Outgoing(to)
            if outgoing.ended or self._closed:
                return
            outgoing.unsent.append(message)
            if outgoing.sock is not None:
                self._write(outgoing)
            elif not outgoing.connecting:
                outgoing.connecting = True
                threading.Thread(
                    target=self._connect, args=(outgoing,), name=f"values to {to}", daemon=True
                ).start()

    def connect(self, to: int) -> None:
        """Begin to connect to a process, so that a later send finds a connection."""
        self._say(to, (_SEGMENT,))

    def _connect(self, outgoing: _Outgoing) -> None:
        """Connect to a process, in a thread, and send the messages that wait for it."""
        if (peer := self._find(outgoing.to)) is None:
            self._end(outgoing)
            return
        slabs, shares = self._own_slabs, False
        if slabs is not None and peer.slabs is not None:
            segment_address = SegmentAddress(**peer.slabs)
            if (
                segment_address.place == slabs.segment_address.place
                and (segment := Segment.open(segment_address)) is not None
            ):
                segment.close()  # if this process can open the peer's memory, the reverse holds
                shares = True
        credentials = Credentials(
            index=self.index, path=peer.path, address=peer.address, key=self._key
        )
        try:
            sock = join(credentials, START_S)
        except (OSError, EOFError):  # the process has ended
            self._end(outgoing)
            return
        sock.setblocking(False)
        with self._lock:
            if self._closed:
                sock.close()
                return
            outgoing.sock, outgoing.shares = sock, shares
            if shares and slabs is not None:
                outgoing.unsent.appendleft((_SEGMENT, self.index, asdict(slabs.segment_address)))
            self._outgoing_by_fd[sock.fileno()] = outgoing
            self._poll.register(sock, select.EPOLLRDHUP)
            self._write(outgoing)
            self._changed.notify_all()

    def _write(self, outgoing: _Outgoing) -> None:
        """Write as many bytes as the socket accepts; the thread writes the rest."""
        assert outgoing.sock is not None
        try:
            while outgoing.pieces or outgoing.unsent:
                if not outgoing.pieces:
                    outgoing.pieces = self._frame(outgoing, outgoing.unsent.popleft())
                while outgoing.pieces:
                    sent = outgoing.sock.sendmsg(islice(outgoing.pieces, MAX_PIECES))
                    outgoing.pieces = list(unsent(outgoing.pieces, sent))
        except BlockingIOError:
            self._poll.modify(outgoing.sock, select.EPOLLRDHUP | select.EPOLLOUT)
        except OSError:
            self._end(outgoing)
        else:
            return

    def _frame(self, outgoing: _Outgoing, message: tuple[Any, ...]) -> list[Data]:
        """Return the bytes of a message. Large values are not copied."""
        if message[0] == _VALUE:
            _, key, value = message
            packed = self._lent(value, outgoing.to)
            if packed is None and value.numel() >= SHARED_BYTES:
                data = value.numpy().data
                message = _VALUE, key, pickle.PickleBuffer(data)
                body = pickle.dumps(message, 5, buffer_callback=_out_of_band)
                return encoded(0, ONE_WAY, (), Payload(body, [data]))
            message = _VALUE, key, packed or value.numpy().tobytes()
        return encoded(0, ONE_WAY, (), Payload.plain(message))

    def _end(self, outgoing: _Outgoing) -> None:
        """Close a connection whose process has ended."""
        with self._lock:
            outgoing.ended = True
            outgoing.unsent.clear()
            outgoing.pieces = []
            if outgoing.sock is not None:
                self._outgoing_by_fd.pop(outgoing.sock.fileno(), None)
                outgoing.sock.close()
                outgoing.sock = None
            self._has_ended(outgoing.to)

    def _has_ended(self, process: int) -> None:
        self._ended.add(process)
        if self._own_slabs is not None:
            self._own_slabs.ended(process)
        self._changed.notify_all()

    def _is_gone(self, process: int) -> bool:
        """Return whether a process has ended and all its messages were read."""
        return process in self._ended and process not in self._incoming

    # -- the thread -------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(OSError):  # the socket is closed, or full
            self._wake_write.send(b"1")

    def _serve(self) -> None:
        """Read and write until the store is closed; this is the thread's function."""
        try:
            self._read_and_write()
        except BaseException as error:  # raised by the threads that wait for a value
            with self._lock:
                self._failed = error
                self._changed.notify_all()
        self._hang_up()

    def _read_and_write(self) -> None:
        """Wait for events, and handle each: a connection can be read or written, a peer connects,
        or another thread calls `_wake`."""
        while not self._closed:
            self._collects = self._own_slabs is not None and self._own_slabs.collect()
            for descriptor, event in self._poll.poll(COLLECT_S if self._collects else None):
                if (outgoing := self._outgoing_by_fd.get(descriptor)) is not None:
                    if event & ~select.EPOLLOUT:
                        self._end(outgoing)
                        continue
                    with self._lock:
                        if outgoing.sock is not None:
                            self._poll.modify(outgoing.sock, select.EPOLLRDHUP)
                            self._write(outgoing)
                elif (connection := self._incoming_by_fd.get(descriptor)) is not None:
                    with connection.lock:
                        if not connection.ended:
                            self._read(connection)
                elif descriptor == self._wake_read.fileno():
                    self._wake_read.recv(1 << 12)
                    self._tell_to_drop()
                else:
                    self._handshakes.handle(descriptor)

    def _tell_to_drop(self) -> None:
        """Tell processes to drop the values that were forgotten (`forget`): one message per
        process."""
        keys_by_process: dict[int, list[Key]] = {}
        while self._forgotten:
            key, processes = self._forgotten.popleft()
            for process in processes:
                keys_by_process.setdefault(process, []).append(key)
        for process, keys in keys_by_process.items():
            if process == self.index:
                self.drop(keys)
            else:
                self._say(process, (_DROP, tuple(keys)))

    def _hang_up(self) -> None:
        """Close all connections and shared memory."""
        with self._lock:
            self._handshakes.close()
            for outgoing in self._outgoing.values():
                if outgoing.sock is not None:
                    outgoing.sock.close()
            for connection in self._incoming_by_fd.values():
                connection.ended = True
                connection.sock.close()
            self._incoming_by_fd.clear()
            self._incoming.clear()
            for each in (self._own_slabs, *self._other_slabs.values()):
                if each is not None:
                    each.close()
            self._wake_read.close()
            self._wake_write.close()
            self._poll.close()

    def _welcome(self, process: int) -> Callable[[socket.socket], None]:
        """Return the function that takes over the connection of a process."""

        def take_over(sock: socket.socket) -> None:
            connection = _Incoming(process, sock)
            self._incoming_by_fd[sock.fileno()] = connection
            with self._lock:
                self._incoming[process] = connection
                self._changed.notify_all()

        return take_over

    def _read(self, connection: _Incoming) -> None:
        """Read the messages that have arrived, and execute them."""
        try:
            while (message := next(connection.messages)) is not None:
                self._execute(message.value())
        except EOFError:
            connection.ended = True
            del self._incoming_by_fd[connection.sock.fileno()]
            connection.sock.close()
            with self._lock:
                del self._incoming[connection.process]
                self._other_slabs.pop(connection.process, None)  # unmap its memory
                self._has_ended(connection.process)

    def _execute(self, message: tuple[Any, ...]) -> None:
        """Execute a message from another store."""
        kind, *arguments = message
        if kind == _VALUE:
            self._put_arrived(*arguments)
        elif kind == _SEND:
            self.send(*arguments)
        elif kind == _DROP:
            self.drop(*arguments)
        elif kind == _LOST:
            self.lost(*arguments)
        elif kind == _SEGMENT and arguments:
            self._open_slabs(*arguments)

    def _put_arrived(self, key: Key, packed: bytes | memoryview | tuple[int, int, int]) -> None:
        """Store a value that has arrived: its bytes, or where it is in a process's memory."""
        if isinstance(packed, tuple):
            process, begin, nbytes = packed
            slabs = self._other_slabs.get(process)
            self.put(key, _unreadable(process) if slabs is None else slabs.take(begin, nbytes))
        else:
            buffer = bytearray(packed) if isinstance(packed, bytes) else packed
            self.put(key, torch.frombuffer(buffer, dtype=torch.uint8))

    def _open_slabs(self, index: int, segment_address: dict[str, Any]) -> None:
        """Map the shared memory of process ``index``, so that it can send values in it."""
        slabs = OpenSlabs.of(SegmentAddress(**segment_address), self.index)
        if slabs is not None:
            self._other_slabs[index] = slabs


def _unreadable(process: int) -> Tensor:
    """Return the message of a failure, in place of a value in the memory of a process."""
    reason = "a value that it made cannot be read: it has ended, or too many files are open here."
    return encode_failure(ActorLost(Failure(rank=None, peers=(process,), reason=reason)))


def _out_of_band(buffer: pickle.PickleBuffer) -> bool:
    """Tell pickle not to write a buffer into the pickle."""
    return False
