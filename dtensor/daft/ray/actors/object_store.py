"""The values that a process of a launch holds, made here or received from others.

    store = ObjectStore(meeting, 0)                # process 0, which others find
    message = store.room(1 << 26)                  # the buffer for a value's message
    store.put(7, message)                          # value 7, for any process that requests it
    store.send(7, to=1)                            # now, or when it is made; does not wait
    there.take(7, holder=0)                        # process 1: waits for it; u8, its own
    store.drop([7])

Between processes of one machine a large message stays in place and the other maps it (`slabs.py`);
other messages go over a connection of the two, which the sender opens. A thread reads messages that
arrive, and writes the bytes that do not fit at once, so no send waits, and a value is sent even
while its holder is in a long call.

Invariants: a value goes to each process once. A value that is dropped before it is made, or before
it arrives, is not kept. The end of a holder is noticed by the end of its connections, and within
`SLICE_S` by a process that waits for its first value; `HostGone` is raised when all its messages
have been read. The tensors of `take` and `open` have no other reader, and may be written to.
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
from dtensor.daft.ray.transports.slabs import MOST_PROCESSES, SHARED_BYTES, Lent, OpenSlabs, Slabs
from dtensor.daft.tasks.values import encode_failure
from dtensor.signals import defer_signals

Key: TypeAlias = int | tuple[int, str]
"""The number of the call that makes a value; for a compiled function's run, that number and its
name."""
Held: TypeAlias = Tensor | Lent

CONTROLLER = MOST_PROCESSES - 1
"""The controller's number among the processes."""
SLICE_S = 0.2
"""How often a waiting process checks whether the holder is still alive."""
COLLECT_S = 1.0
"""How often returned memory is freed."""
RETRY_S = 0.02  # how often a process that has not started yet is polled

_VALUE, _SEND, _DROP, _LOST, _CARD = range(5)


class HostGone(Exception):
    """The value was on a process that has ended."""

    def __init__(self, host: int) -> None:
        super().__init__(f"process {host} has ended")
        self.host = host


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeeting:
    """How processes of a launch find each other: in its folder on the controller's machine, and at
    `port` of the controller's `address` on others."""

    folder: Path
    secret: bytes = field(repr=False)
    address: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The address of a process. `slabs`: the fields of a `SegmentAddress`."""

    path: str | None
    address: tuple[str, int] | None
    slabs: dict[str, Any] | None

    @staticmethod
    def of(text: str) -> _Address:
        fields = json.loads(text)
        address = fields["address"]
        return _Address(
            path=fields["path"],
            address=None if address is None else (address[0], address[1]),
            slabs=fields["slabs"],
        )


class _Wire:
    """The connection to one process, for sending; unsent messages wait for it."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.sock: socket.socket | None = None
        self.connecting = False
        self.ended = False
        self.shares = False  # it may open this one's slabs
        self.unsent: deque[tuple[Any, ...]] = deque()  # as of `frame`
        self.pieces: list[Data] = []  # of a message that is half sent


class _Reading:
    """A connection that another process has opened. The reading thread holds the `lock`."""

    def __init__(self, process: int, sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self.messages = incoming(sock)
        self.lock = threading.Lock()
        self.ended = False
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)


class ObjectStore:
    """The store of one process; `index`: its number in the launch."""

    def __init__(self, meeting: StoreMeeting, index: int) -> None:
        self.index = index
        self._meeting = meeting
        self._lock = threading.RLock()  # Ctrl-C in a Condition's `with` would leave that locked
        self._changed = threading.Condition(self._lock)
        self._values: dict[Key, Held] = {}
        self._wanted: dict[Key, set[int]] = {}  # processes that get it when it is made
        self._sent: dict[Key, set[int]] = {}
        self._dropped: set[Key] = set()  # before they were made
        self._ended: set[int] = set()
        self._reading: dict[int, _Reading] = {}  # by process
        self._others: dict[int, OpenSlabs] = {}
        self._wires: dict[int, _Wire] = {}
        self._forgotten: deque[tuple[Key, Sequence[int]]] = deque()
        self._collects = False
        self._closed = False
        self._failed: BaseException | None = None
        self._poll = select.epoll()
        self._key = hmac.digest(meeting.secret, b"values of tasks", "sha256")
        self._guests = Handshakes(self._poll, self._key, self._welcomes)
        self._incoming: dict[int, _Reading] = {}  # by descriptor
        self._writing: dict[int, _Wire] = {}  # by descriptor
        self._own_slabs = self._slabs()
        self._bell, self._rope = socket.socketpair()
        for sock in (self._bell, self._rope):
            sock.setblocking(False)
        self._poll.register(self._bell, select.EPOLLIN)
        self._announce()
        self._thread = threading.Thread(target=self._serve, name="values", daemon=True)
        self._thread.start()

    # -- values -----------------------------------------------------------------------------------

    def room(self, nbytes: int) -> Tensor:
        """The buffer for a message, u8[nbytes]."""
        if self._own_slabs is None or nbytes < SHARED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        buffer = self._own_slabs.room(nbytes)
        if not self._collects:
            self._wake()
        return buffer

    def put(self, key: Key, message: Held) -> None:
        with self._lock:
            if key in self._dropped:
                self._dropped.remove(key)
                return
            self._values[key] = message
            wanted = self._wanted.pop(key, ())
            self._changed.notify_all()
        for to in wanted:
            self.send(key, to)

    def send(self, key: Key, to: int) -> None:
        """Send a value to another process, which must have it only once."""
        with self._lock:
            message = self._values.get(key)
            if message is None:
                self._wanted.setdefault(key, set()).add(to)
                return
            sent = self._sent.setdefault(key, set())
            if to in sent:
                return
            sent.add(to)
        self.send_message(key, message, to)

    def send_message(self, key: Key, message: Held, to: int) -> None:
        """Send a message that is not kept here."""
        self._say(to, (_VALUE, key, message))

    def take(self, key: Key, holder: int | None, *, keeps: bool = True) -> Tensor:
        """The message of a value that is here or in flight from `holder`; `HostGone`."""
        while not self.wait(key, holder, SLICE_S, asks=keeps):
            pass
        with self._lock:
            held = self._values[key] if keeps else self._values.pop(key)
        return self._open(held)

    def wait(self, key: Key, holder: int | None, seconds: float, *, asks: bool = True) -> bool:
        """Whether it arrives within `seconds`; LookupError if it never will. `asks`: request it
        from the holder, which must keep it: for another value the holder would remember the request
        for ever."""
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
                reading = self._reading.get(holder)
                if reading is None:
                    self._changed.wait(left)
                    continue
            self._read_until(key, reading, left)
        if asks:
            self.ask(key, holder)
        else:
            self.connect(holder)
        return False

    def _read_until(self, key: Key, reading: _Reading, seconds: float) -> None:
        """Read from the holder here, for `seconds` at most: waking up by the thread takes as long
        as all the rest."""
        with reading.lock:
            if reading.ended or key in self._values:  # the thread may just have read it
                return
            try:
                self._poll.modify(reading.sock, 0)
                if reading.poll.poll(seconds * 1000):
                    with defer_signals():  # else an interrupt loses bytes that were read
                        self._take_in(reading)
            finally:
                if not reading.ended:
                    self._poll.modify(reading.sock, select.EPOLLIN)

    def ask(self, key: Key, holder: int, to: int | None = None) -> None:
        """Ask another process to send a value, by default to this one."""
        self._say(holder, (_SEND, key, self.index if to is None else to))

    def drop(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if self._values.pop(key, None) is None:
                    self._dropped.add(key)
                self._sent.pop(key, None)
                self._wanted.pop(key, None)

    def forget(self, key: Key, there: Sequence[int]) -> None:
        """Tell these processes to drop it, soon. It takes no lock."""
        self._forgotten.append((key, there))
        self._wake()

    def tell_of_loss(self, host: int, there: int) -> None:
        self._say(there, (_LOST, host))

    def lost(self, host: int) -> None:
        """The controller reports that a process has ended."""
        with self._lock:
            self._ended.add(host)
            self._changed.notify_all()

    def _open(self, held: Held) -> Tensor:
        """Another copy of its message, u8."""
        if isinstance(held, Lent):
            return held.open()
        return held.clone() if self._own_slabs is None else self._own_slabs.open(held)

    def _lent(self, message: Tensor, to: int) -> tuple[int, int, int] | None:
        wire = self._wires.get(to)
        if self._own_slabs is None or wire is None or not wire.shares:
            return None
        lent = self._own_slabs.lend(message, to)
        return None if lent is None else (self.index, *lent)

    def close(self) -> None:
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
        meeting, path, address = self._meeting, None, None
        if meeting.folder.exists():
            socket_path = str(meeting.folder / f"values{self.index}")
            if len(socket_path.encode()) <= MAX_PATH_BYTES:
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(socket_path)
                self._guests.listen(sock)
                path = socket_path
        if path is None or meeting.port is not None:
            host = "127.0.0.1" if meeting.address == LOOPBACK else reached_at(meeting.address)
            sock = socket.create_server((host, 0))
            self._guests.listen(sock)
            address = sock.getsockname()[:2]
        slabs = None if self._own_slabs is None else asdict(self._own_slabs.card)
        text = json.dumps(asdict(_Address(path=path, address=address, slabs=slabs)))
        if meeting.folder.exists():
            part = meeting.folder / f"values{self.index}.part"
            part.write_text(text)
            part.rename(meeting.folder / f"values{self.index}.json")
        if (store := self._signed()) is not None:
            store.set(f"values{self.index}", text)

    def _signed(self) -> SignedStore | None:
        """The store by which processes of several machines find each other; for one thread."""
        meeting = self._meeting
        if meeting.port is None:
            return None
        start = timedelta(seconds=START_S)
        return SignedStore.join(meeting.address, meeting.port, meeting.secret, start)

    def _find(self, process: int) -> _Address | None:
        """Its address, once it has started; None if it never will."""
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

    def _say(self, to: int, what: tuple[Any, ...]) -> None:
        with defer_signals(), self._lock:
            wire = self._wires.get(to)
            if wire is None:
                wire = self._wires[to] = _Wire(to)
            if wire.ended or self._closed:
                return
            wire.unsent.append(what)
            if wire.sock is not None:
                self._write(wire)
            elif not wire.connecting:
                wire.connecting = True
                threading.Thread(
                    target=self._connect, args=(wire,), name=f"values to {to}", daemon=True
                ).start()

    def connect(self, to: int) -> None:
        """Begin to connect, so that a later send finds a connection."""
        self._say(to, (_CARD,))

    def _connect(self, wire: _Wire) -> None:
        if (peer := self._find(wire.to)) is None:
            self._end(wire)
            return
        slabs, shares = self._own_slabs, False
        if slabs is not None and peer.slabs is not None:
            card = SegmentAddress(**peer.slabs)
            if card.place == slabs.card.place and (segment := Segment.open(card)) is not None:
                segment.close()  # since this process can open its memory, it can open this one's
                shares = True
        credentials = Credentials(
            index=self.index, path=peer.path, address=peer.address, key=self._key
        )
        try:
            sock = join(credentials, START_S)
        except (OSError, EOFError):  # it has ended
            self._end(wire)
            return
        sock.setblocking(False)
        with self._lock:
            if self._closed:
                sock.close()
                return
            wire.sock, wire.shares = sock, shares
            if shares and slabs is not None:
                wire.unsent.appendleft((_CARD, self.index, asdict(slabs.card)))
            self._writing[sock.fileno()] = wire
            self._poll.register(sock, select.EPOLLRDHUP)
            self._write(wire)
            self._changed.notify_all()

    def _write(self, wire: _Wire) -> None:
        """Write as much as fits; the thread writes the rest."""
        assert wire.sock is not None
        try:
            while wire.pieces or wire.unsent:
                if not wire.pieces:
                    wire.pieces = self._frame(wire, wire.unsent.popleft())
                while wire.pieces:
                    sent = wire.sock.sendmsg(islice(wire.pieces, MAX_PIECES))
                    wire.pieces = list(unsent(wire.pieces, sent))
        except BlockingIOError:
            self._poll.modify(wire.sock, select.EPOLLRDHUP | select.EPOLLOUT)
        except OSError:
            self._end(wire)
        else:
            return

    def _frame(self, wire: _Wire, what: tuple[Any, ...]) -> list[Data]:
        if what[0] == _VALUE:
            _, key, message = what
            packed = self._lent(message, wire.to)
            if packed is None and message.numel() >= SHARED_BYTES:
                data = message.numpy().data
                what = _VALUE, key, pickle.PickleBuffer(data)
                body = pickle.dumps(what, 5, buffer_callback=_out_of_band)
                return encoded(0, ONE_WAY, (), Payload(body, [data]))
            what = _VALUE, key, packed or message.numpy().tobytes()
        return encoded(0, ONE_WAY, (), Payload.plain(what))

    def _end(self, wire: _Wire) -> None:
        """The process at the other end has ended."""
        with self._lock:
            wire.ended = True
            wire.unsent.clear()
            wire.pieces = []
            if wire.sock is not None:
                self._writing.pop(wire.sock.fileno(), None)
                wire.sock.close()
                wire.sock = None
            self._has_ended(wire.to)

    def _has_ended(self, process: int) -> None:
        self._ended.add(process)
        if self._own_slabs is not None:
            self._own_slabs.ended(process)
        self._changed.notify_all()

    def _is_gone(self, process: int) -> bool:
        """Whether a process has ended, and all its messages were read."""
        return process in self._ended and process not in self._reading

    # -- the thread -------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(OSError):  # it is closed, or full
            self._rope.send(b"1")

    def _serve(self) -> None:
        try:
            self._read_and_write()
        except BaseException as error:  # threads that wait for a value must raise it
            with self._lock:
                self._failed = error
                self._changed.notify_all()
        self._hang_up()

    def _read_and_write(self) -> None:
        while not self._closed:
            self._collects = self._own_slabs is not None and self._own_slabs.collect()
            for descriptor, event in self._poll.poll(COLLECT_S if self._collects else None):
                if (wire := self._writing.get(descriptor)) is not None:
                    if event & ~select.EPOLLOUT:
                        self._end(wire)
                        continue
                    with self._lock:
                        if wire.sock is not None:
                            self._poll.modify(wire.sock, select.EPOLLRDHUP)
                            self._write(wire)
                elif (reading := self._incoming.get(descriptor)) is not None:
                    with reading.lock:
                        if not reading.ended:
                            self._take_in(reading)
                elif descriptor == self._bell.fileno():
                    self._bell.recv(1 << 12)
                    self._tell_to_drop()
                else:
                    self._guests.handle(descriptor)

    def _tell_to_drop(self) -> None:
        told: dict[int, list[Key]] = {}
        while self._forgotten:
            key, there = self._forgotten.popleft()
            for process in there:
                told.setdefault(process, []).append(key)
        for process, keys in told.items():
            if process == self.index:
                self.drop(keys)
            else:
                self._say(process, (_DROP, tuple(keys)))

    def _hang_up(self) -> None:
        with self._lock:
            self._guests.close()
            for wire in self._wires.values():
                if wire.sock is not None:
                    wire.sock.close()
            for reading in self._incoming.values():
                reading.ended = True
                reading.sock.close()
            self._incoming.clear()
            self._reading.clear()
            for each in (self._own_slabs, *self._others.values()):
                if each is not None:
                    each.close()
            self._bell.close()
            self._rope.close()
            self._poll.close()

    def _welcomes(self, process: int) -> Callable[[socket.socket], None]:
        def joins(sock: socket.socket) -> None:
            reading = _Reading(process, sock)
            self._incoming[sock.fileno()] = reading
            with self._lock:
                self._reading[process] = reading
                self._changed.notify_all()

        return joins

    def _take_in(self, reading: _Reading) -> None:
        """Read the messages that have arrived."""
        try:
            while (message := next(reading.messages)) is not None:
                self._hear(message.value())
        except EOFError:
            reading.ended = True
            del self._incoming[reading.sock.fileno()]
            reading.sock.close()
            with self._lock:
                del self._reading[reading.process]
                self._others.pop(reading.process, None)  # unmap its memory
                self._has_ended(reading.process)

    def _hear(self, what: tuple[Any, ...]) -> None:
        kind, *given = what
        if kind == _VALUE:
            self._arrived(*given)
        elif kind == _SEND:
            self.send(*given)
        elif kind == _DROP:
            self.drop(*given)
        elif kind == _LOST:
            self.lost(*given)
        elif kind == _CARD and given:
            self._meet(*given)

    def _arrived(self, key: Key, packed: bytes | memoryview | tuple[int, int, int]) -> None:
        if isinstance(packed, tuple):
            process, begin, nbytes = packed
            slabs = self._others.get(process)
            self.put(key, _unread(process) if slabs is None else slabs.take(begin, nbytes))
        else:
            buffer = bytearray(packed) if isinstance(packed, bytes) else packed
            self.put(key, torch.frombuffer(buffer, dtype=torch.uint8))

    # -- other processes' memory ------------------------------------------------------------------

    def _meet(self, index: int, card: dict[str, Any]) -> None:
        slabs = OpenSlabs.of(SegmentAddress(**card), self.index)
        if slabs is not None:
            self._others[index] = slabs


def _unread(process: int) -> Tensor:
    reason = "a value that it made cannot be read: it has ended, or too many files are open here."
    return encode_failure(ActorLost(Failure(rank=None, peers=(process,), reason=reason)))


def _out_of_band(buffer: pickle.PickleBuffer) -> bool:
    return False
