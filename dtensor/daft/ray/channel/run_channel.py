"""The controller's end of its connections to the hosts: calls go out, what they give comes back.

    channel = RunChannel(folder, 2, "127.0.0.1")
    process.serve(channel.invitation(0))                  # a Ray call, which ends when this closes
    reply = channel.send(0, ASKED, (Ranks.run, Worker.run), (8, 3, inputs))   # waits for nothing
    channel.get([reply], 0.25)                         # NotYet, CallLost, or what was raised

A call is one message to a host, and one back if it was asked and not told. A host carries out what
it reads, one at a time, so calls keep the order in which they were sent. What cannot be written at
once, since a host is busy and the socket full, is copied and written by a thread that lives until
all of it is; so a call waits for nothing, however large it is. Who waits for a call anyway lends
what it gives, which then is not copied.

Invariants: the controller reads whenever it waits and whenever something is unwritten, so that a
host that writes a large result never waits for one that itself waits to be read; who calls on and
on without waiting reads what has come. One thread at a time reads, the others wait for it; no lock
is held while anybody waits. An exception within a read or a write, as Ctrl-C is, breaks the
connection: nothing is taken for another call's answer. A connection that breaks says nothing about
why (`watch.py`).
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from dtensor.daft.errors import HostError, as_sent
from dtensor.daft.raised import RaisedThere, interrupts
from dtensor.daft.ray.bootstrap.dead_connections import is_quiet
from dtensor.daft.ray.channel.guests import LONGEST_PATH, Guests
from dtensor.daft.ray.channel.messages import (
    ASKED,
    MOST_PIECES,
    RAISED,
    UNREAD,
    Data,
    Function,
    Invitation,
    Kind,
    Message,
    Payload,
    encoded,
    incoming,
    unsent,
)
from dtensor.signals import standing_in

MOST_UNREAD = 8
"""Calls of a host whose answers nobody has read: from then on each call reads what has come. Else a
host would stand still in a write, its socket full of results, until somebody waits for one."""
ACTS_S = 0.1  # how often a signal may act, of a thread that waits for the one that reads
WRITER_S = 0.1  # how often the thread that writes looks whether the channel was closed


class NotYet(Exception):
    """Not all of these calls have come back."""


class CallLost(Exception):
    """A call will not come back; as text what is known of it."""


class Reply:
    """What came back of a call, if it has."""

    __slots__ = ("host", "lost", "message", "number")

    def __init__(self, number: int, host: int = -1) -> None:
        self.number: int = number
        self.host: int = host
        self.message: Message | None = None
        self.lost: bool = False

    @property
    def came(self) -> bool:
        return self.message is not None or self.lost

    @property
    def failed(self) -> bool:
        return self.lost or (self.message is not None and self.message.kind in (RAISED, UNREAD))


class _Connection:
    """The connection to one host; what is unwritten waits for it to be there, too."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.messages: Generator[Message | None] | None = None
        self.numbers = count()
        self.expected: deque[Reply] = deque()
        self.unread: list[Reply] = []  # that brought what a told call has raised, to nobody yet
        self.unwritten: deque[memoryview] = deque()
        self.lent = False  # some of that is its caller's
        self.deaf = False  # nothing can be written any more; what it has said is still read
        self.broken = False
        self.machine = ""  # its address, if it is another


class RunChannel:
    """To so many hosts; `folder` is the launch's own, `address` where others reach this
    machine, None if all are on it."""

    def __init__(self, folder: Path, num_hosts: int, address: str | None) -> None:
        self.interrupted: bool = False  # within a read or a write
        self.rank_of: Callable[[int], int | None] = lambda _: None  # the first of a host
        self._key = secrets.token_bytes(32)
        self._lines = [_Connection() for _ in range(num_hosts)]
        self._joined: dict[int, _Connection] = {}  # by descriptor
        self._poll = select.epoll()
        self._guests = Guests(self._poll, self._key, self._welcomes)
        self._path: str | None = None
        self._address: tuple[str, int] | None = None
        self._lock = threading.RLock()  # Ctrl-C in a Condition's `with` would leave that locked
        self._changed = threading.Condition(self._lock)
        self._reader: int | None = None  # the thread that reads
        self._waiting = 0  # threads that wait for it
        self._writer: threading.Thread | None = None
        self._closed = False
        path = str(folder / "runs")
        if len(path.encode()) <= LONGEST_PATH:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            self._guests.listen(sock)
            self._path = path
        if address is not None or self._path is None:
            sock = socket.create_server((address or "127.0.0.1", 0))
            self._guests.listen(sock)
            self._address = sock.getsockname()[:2]

    def add(self) -> int:
        """One more host; its number."""
        with self._lock:
            self._lines.append(_Connection())
            return len(self._lines) - 1

    def invitation(self, host: int) -> Invitation:
        return Invitation(index=host, path=self._path, address=self._address, key=self._key)

    # -- calls ------------------------------------------------------------------------------------

    def send(
        self,
        host: int,
        kind: Kind,
        functions: tuple[Function, ...],
        given: tuple[Any, ...] | Payload,
        *,
        lent: bool = False,
    ) -> Reply:
        """Call the first of the functions with the others and what is given, which may be changed
        as soon as this returns; if it is `lent`, when this has come back, or after `own`.
        Functions are kept, so they must be methods that there are anyway.
        """
        line = self._lines[host]
        reply = Reply(next(line.numbers), host)
        pieces = encoded(reply.number, kind, functions, given)
        with standing_in(), self._lock:
            if line.broken:
                reply.lost = True
                return reply
            if kind == ASKED:
                line.expected.append(reply)
            try:
                if not line.deaf:
                    self._write(line, pieces, lent)
            except BaseException:
                self._break(line, interrupted=True)
                raise
        if len(line.expected) >= MOST_UNREAD:
            self._wait(lambda: len(line.expected) < MOST_UNREAD, 0.0)
        return reply

    def get(self, replies: Sequence[Reply], seconds: float) -> list[Any]:
        """What the calls gave. `NotYet` if one has not come after so long; the first of them that
        raised, raises, and `CallLost` one whose connection broke."""
        if not self._wait(lambda: _settled(replies), seconds):
            raise NotYet
        for line in self._lines:
            if line.unread:
                line.unread = [reply for reply in line.unread if reply not in replies]
        for reply in replies:
            if reply.failed:  # in no variable here, which would hold this frame, and it the error
                raise self.failure(reply) or NotYet
        return [self._value(reply.message, reply) for reply in replies if reply.message is not None]

    def _value(self, message: Message, reply: Reply) -> Any:
        try:
            return message.value()
        except BaseException as error:  # of a class of the user's
            if interrupts(error):
                raise
            sent = as_sent(error, self.rank_of(reply.host))
            raise sent from sent.__cause__

    def came_back(self, host: int, number: int) -> bool:
        """Whether a call that was asked has come back, or never will; by its reply's number."""
        line = self._lines[host]
        try:
            return line.expected[0].number > number
        except IndexError:
            return True

    def unread(self, host: int) -> Exception | None:
        """What a told call of a host has raised, where it came with a reply that nobody has read.
        Once."""
        replies, self._lines[host].unread = self._lines[host].unread, []
        return self.failure(replies[0]) if replies else None

    def forget_unread(self, host: int) -> None:
        """What told calls of a host have raised so far is nobody's concern any more."""
        self._lines[host].unread = []

    def failure(self, reply: Reply) -> Exception | None:
        """What a call has raised, as far as is known."""
        if reply.lost:
            return CallLost("")
        if reply.message is None or not reply.failed:
            return None
        error, text = reply.message.value()
        if isinstance(error, HostError) and error.failure.rank is None:
            error = HostError(replace(error.failure, rank=self.rank_of(reply.host)))
        error.__cause__ = error.__cause__ or RaisedThere(text)
        return error

    def came(self, replies: Sequence[Reply], seconds: float = 0.0) -> bool:
        """Whether they have, or will never, after so long at most."""
        return self._wait(lambda: all(reply.came for reply in replies), seconds)

    def came_some(self, replies: Sequence[Reply], num: int, seconds: float) -> bool:
        """Whether so many of them have, or never will, after so long at most."""
        return self._wait(lambda: sum(reply.came for reply in replies) >= num, seconds)

    def listen(self, seconds: float) -> None:
        """Read what comes for so long."""
        end = time.monotonic() + seconds
        self._wait(lambda: False, seconds)
        time.sleep(max(0.0, end - time.monotonic()))  # it was closed

    def lose(self, host: int) -> None:
        """It has ended: where it had not joined, nothing else tells who waits for its calls."""
        with standing_in(), self._lock:
            if self._lines[host].sock is None:
                self._break(self._lines[host])

    def is_broken(self, host: int) -> bool:
        return self._lines[host].broken

    def broken(self) -> list[int]:
        """The hosts whose connections broke. Those to one machine break together: where one did,
        others to it that are quiet do, too."""
        gone = {line.machine for line in self._lines if line.broken and line.machine}
        for line in self._lines if gone else ():
            if line.machine in gone and line.sock is not None and is_quiet(line.sock):
                self._break(line)
        return [index for index, line in enumerate(self._lines) if line.broken]

    def close(self) -> None:
        """Hosts stop to wait for calls. Twice is fine."""
        with self._lock:
            self._closed = True
            for line in self._lines:
                self._break(line)
            self._guests.close()
            writer = self._writer
        if writer is not None:
            writer.join()
        self._poll.close()

    # -- what is read -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether it is done after so long at most; reads meanwhile, or waits for who does."""
        if done():
            return True
        end, me = time.monotonic() + seconds, threading.get_ident()
        try:
            if self._becomes_reader(me, done, end):
                while not done() and not self._closed:
                    left = end - time.monotonic()
                    self._read_once(max(0.0, left))
                    if left <= 0.0:
                        break
        finally:
            with self._lock:
                if self._reader == me:
                    self._reader = None
                    self._changed.notify_all()
        return done()

    def _becomes_reader(self, me: int, done: Callable[[], bool], end: float) -> bool:
        """Whether no other thread reads, before it is done or it is too late."""
        with self._lock:
            # who was interrupted as the reader may still be called so
            if self._reader in (None, me):
                self._reader = me
                return True
        while True:
            # Ctrl-C within a Condition's `wait` may leave that unlocked
            with standing_in(), self._lock:
                self._waiting += 1
                try:
                    if self._reader in (None, me):
                        self._reader = me
                        return True
                    left = end - time.monotonic()
                    if done() or self._closed or left < 0.0:
                        return False
                    self._changed.wait(min(left, ACTS_S))
                finally:
                    self._waiting -= 1

    def _read_once(self, seconds: float) -> None:
        """What there is, or comes first within so long."""
        events = self._poll.poll(seconds)
        with standing_in():  # a message is read to its end, whatever signals come
            for descriptor, event in events:
                if (line := self._joined.get(descriptor)) is not None:
                    if event & ~select.EPOLLOUT:
                        self._read(line)
                    if event & select.EPOLLOUT:
                        with self._lock:
                            self._write_on(line)
                else:
                    with self._lock:
                        self._guests.hear(descriptor)
            if self._waiting:  # who looks whether it is done counts as such before that
                with self._lock:
                    self._changed.notify_all()

    def _read(self, line: _Connection) -> None:
        try:
            while line.messages is not None and (message := next(line.messages)) is not None:
                reply = line.expected[0]
                if reply.number != message.number:
                    raise RuntimeError(f"call {message.number} came back before {reply.number}")
                reply.message = message
                if message.kind == UNREAD:
                    line.unread.append(reply)
                line.expected.popleft()
        except EOFError:
            self._break(line)
        except BaseException:
            self._break(line, interrupted=True)
            raise

    def _break(self, line: _Connection, *, interrupted: bool = False) -> None:
        """Nothing comes over it from now on."""
        with self._lock:
            self.interrupted |= interrupted
            line.broken, line.messages = True, None
            for reply in line.expected:
                reply.lost = True
            line.expected.clear()
            line.unwritten.clear()
            if line.sock is not None:
                del self._joined[line.sock.fileno()]
                line.sock.close()  # which takes it from the poll, too
                line.sock = None
            self._changed.notify_all()

    # -- what is written, with the lock held ------------------------------------------------------

    def own(self) -> None:
        """What was lent and is unwritten is copied."""
        with self._lock:
            for line in self._lines:
                if line.lent:
                    line.unwritten = deque(memoryview(bytes(piece)) for piece in line.unwritten)
                    line.lent = False

    def _write(self, line: _Connection, pieces: Sequence[Data], lent: bool) -> None:
        if line.sock is not None and not line.unwritten:
            try:
                while pieces:
                    sent = line.sock.sendmsg(islice(pieces, MOST_PIECES))
                    pieces = unsent(pieces, sent)
            except BlockingIOError:
                pass
            except OSError:
                self._stop_writing(line)
                return
        if pieces:
            line.lent |= lent
            line.unwritten.extend(memoryview(p if lent else bytes(p)) for p in pieces)
            self._write_later(line)

    def _stop_writing(self, line: _Connection) -> None:
        """Its host has ended. It breaks as soon as what that has said is read: results may be among
        it that no other host has."""
        line.deaf = True
        line.unwritten.clear()
        if line.sock is not None:
            self._poll.modify(line.sock, select.EPOLLIN)

    def _write_later(self, line: _Connection) -> None:
        if line.sock is not None:
            self._poll.modify(line.sock, select.EPOLLIN | select.EPOLLOUT)
        if self._writer is None and not self._closed:
            self._writer = threading.Thread(target=self._write_all, name="run channel", daemon=True)
            self._writer.start()

    def _write_all(self) -> None:
        def written() -> bool:
            # A host that has not joined counts: it joins when somebody reads, and who has called
            # it may be at something else.
            return not any(line.unwritten and not line.broken for line in self._lines)

        while True:
            self._wait(written, WRITER_S)
            with self._lock:
                if self._closed or written():
                    self._writer = None
                    return

    def _write_on(self, line: _Connection) -> None:
        if line.sock is None:
            return
        try:
            while line.unwritten:
                sent = line.sock.sendmsg(islice(line.unwritten, MOST_PIECES))
                while line.unwritten and sent >= len(line.unwritten[0]):
                    sent -= len(line.unwritten.popleft())
                if sent:
                    line.unwritten[0] = line.unwritten[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self._stop_writing(line)
            return
        except BaseException:
            self._break(line, interrupted=True)
            raise
        line.lent = False
        self._poll.modify(line.sock, select.EPOLLIN)

    # -- who comes --------------------------------------------------------------------------------

    def _welcomes(self, index: int) -> Callable[[socket.socket], None] | None:
        """Whether a host that knows the key may join: what is done with it then."""
        line = self._lines[index] if index < len(self._lines) else None
        if line is None or line.sock is not None or line.broken:
            return None
        return partial(self._join, line)

    def _join(self, line: _Connection, sock: socket.socket) -> None:
        line.sock, line.messages = sock, incoming(sock)
        if sock.family != socket.AF_UNIX:
            line.machine = str(sock.getpeername()[0])
        self._joined[sock.fileno()] = line
        if line.unwritten:
            self._write_later(line)


def _settled(replies: Sequence[Reply]) -> bool:
    """Whether all have come, or one that failed."""
    waiting = False  # spelled out, as this is asked after each message
    for reply in replies:
        if reply.message is None:
            if reply.lost:
                return True
            waiting = True
        elif reply.message.kind in (RAISED, UNREAD):
            return True
    return not waiting
