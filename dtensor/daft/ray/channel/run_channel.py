"""The controller's end of its connections to the hosts: calls go out, results come back.

    channel = RunChannel(folder, 2, "127.0.0.1")
    process.serve(channel.credentials(0))                 # a Ray call, which ends when this closes
    reply = channel.send(0, REQUEST, (Ranks.run, Worker.run), (8, 3, inputs))  # does not wait
    channel.get([reply], 0.25)                         # NotYet, CallLost, or the call's exception

A call is one message to a host, and one back if it is a request (`REQUEST`) and not one-way
(`ONE_WAY`). A host carries out its messages one at a time, so calls keep the order in which they
were sent. If a host is busy and its socket full, the rest of a message is copied, and a thread,
which lives until all is written, writes it; so a call never waits, however large it is. A caller
that waits for the call anyway lends its buffers, which are then not copied.

Invariants: the controller reads whenever it waits and whenever bytes are unwritten, so a host that
writes a large result never waits for a controller that itself waits to be read; a caller that makes
calls without waiting reads the answers that have arrived. One thread at a time reads, the others
wait for it; no lock is held while a thread waits. An exception within a read or a write, such as
Ctrl-C, breaks the connection, so no message is taken for another call's answer. A broken connection
says nothing about the cause (`failure_detector.py`).
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
from dtensor.daft.ray.bootstrap.dead_connections import is_quiet
from dtensor.daft.ray.channel.handshake import MAX_PATH_BYTES, Credentials, Handshakes
from dtensor.daft.ray.channel.messages import (
    MOST_PIECES,
    RAISED,
    REQUEST,
    UNREAD,
    Data,
    Function,
    Kind,
    Message,
    Payload,
    encoded,
    incoming,
    unsent,
)
from dtensor.daft.remote_exceptions import RemoteTraceback, interrupts
from dtensor.signals import defer_signals

MOST_UNREAD = 8
"""Calls of a host with unread answers: from then on each call reads the answers that have arrived.
Else the host would block in a write, its socket full of results, until a caller waits for one."""
ACTS_S = 0.1  # how often a signal may act on a thread that waits for the reading one
WRITER_S = 0.1  # how often the writing thread checks whether the channel was closed


class NotYet(Exception):
    """Not all of these calls have come back."""


class CallLost(Exception):
    """A call will not come back; its text is the known cause."""


class Reply:
    """The answer to a call, once it has arrived."""

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
    """The connection to one host; unwritten bytes wait for it to be made, too."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.messages: Generator[Message | None] | None = None
        self.numbers = count()
        self.expected: deque[Reply] = deque()
        self.unread: list[Reply] = []  # with the exception of a one-way call, not raised yet
        self.unwritten: deque[memoryview] = deque()
        self.lent = False  # some of that belongs to its caller
        self.deaf = False  # it takes no more writes; its messages are still read
        self.broken = False
        self.machine = ""  # its address, if it is another machine


class RunChannel:
    """The channel to `num_hosts` hosts; `folder` is the launch's own; other machines reach this one
    at `address`, None if all hosts are on it."""

    def __init__(self, folder: Path, num_hosts: int, address: str | None) -> None:
        self.interrupted: bool = False  # within a read or a write
        self.rank_of: Callable[[int], int | None] = lambda _: None  # the first rank of a host
        self._key = secrets.token_bytes(32)
        self._lines = [_Connection() for _ in range(num_hosts)]
        self._joined: dict[int, _Connection] = {}  # by descriptor
        self._poll = select.epoll()
        self._guests = Handshakes(self._poll, self._key, self._welcomes)
        self._path: str | None = None
        self._address: tuple[str, int] | None = None
        self._lock = threading.RLock()  # Ctrl-C in a Condition's `with` would leave that locked
        self._changed = threading.Condition(self._lock)
        self._reader: int | None = None  # the thread that reads
        self._waiting = 0  # threads that wait for it
        self._writer: threading.Thread | None = None
        self._closed = False
        path = str(folder / "runs")
        if len(path.encode()) <= MAX_PATH_BYTES:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            self._guests.listen(sock)
            self._path = path
        if address is not None or self._path is None:
            sock = socket.create_server((address or "127.0.0.1", 0))
            self._guests.listen(sock)
            self._address = sock.getsockname()[:2]

    def add(self) -> int:
        """Add a host; returns its number."""
        with self._lock:
            self._lines.append(_Connection())
            return len(self._lines) - 1

    def credentials(self, host: int) -> Credentials:
        return Credentials(index=host, path=self._path, address=self._address, key=self._key)

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
        """Call the first of the functions with the others and the arguments `given`. The arguments
        may be changed as soon as this returns; if they are `lent`, when the call has come back, or
        after `own`. Functions are kept, so they must be methods that exist anyway.
        """
        line = self._lines[host]
        reply = Reply(next(line.numbers), host)
        pieces: Sequence[Data] = encoded(reply.number, kind, functions, given)
        with defer_signals(), self._lock:
            if line.broken:
                reply.lost = True
                return reply
            if kind == REQUEST:
                line.expected.append(reply)
            try:
                try:  # in this frame, since it runs for each host at each step
                    while pieces and line.sock is not None and not (line.unwritten or line.deaf):
                        pieces = unsent(pieces, line.sock.sendmsg(islice(pieces, MOST_PIECES)))
                except BlockingIOError:
                    pass
                except OSError:
                    self._stop_writing(line)
                if pieces and not line.deaf:
                    line.lent |= lent
                    line.unwritten.extend(memoryview(p if lent else bytes(p)) for p in pieces)
                    self._write_later(line)
            except BaseException:
                self._break(line, interrupted=True)
                raise
        if len(line.expected) >= MOST_UNREAD:
            self._wait(lambda: len(line.expected) < MOST_UNREAD, 0.0)
        return reply

    def get(self, replies: Sequence[Reply], seconds: float) -> list[Any]:
        """The results of the calls. `NotYet` if one has not arrived after `seconds`. Raises the
        exception of the first call that raised, `CallLost` for one whose connection broke."""
        if not self._wait(lambda: _settled(replies), seconds):
            raise NotYet
        for line in self._lines:
            if line.unread:
                line.unread = [reply for reply in line.unread if reply not in replies]
        for reply in replies:
            if reply.failed:  # not in a variable: it would make a cycle of this frame and the error
                raise self.failure(reply) or NotYet
        return [self._value(reply.message, reply) for reply in replies if reply.message is not None]

    def _value(self, message: Message, reply: Reply) -> Any:
        try:
            return message.value()
        except BaseException as error:  # an exception of a user's class
            if interrupts(error):
                raise
            sent = as_sent(error, self.rank_of(reply.host))
            raise sent from sent.__cause__

    def came_back(self, host: int, number: int) -> bool:
        """Whether a request has come back, or never will; by its reply's number."""
        line = self._lines[host]
        try:
            return line.expected[0].number > number
        except IndexError:
            return True

    def unread(self, host: int) -> Exception | None:
        """The exception of a host's one-way call, where it came with a reply that was not read.
        Once."""
        replies, self._lines[host].unread = self._lines[host].unread, []
        return self.failure(replies[0]) if replies else None

    def forget_unread(self, host: int) -> None:
        """Forget the exceptions of a host's one-way calls so far."""
        self._lines[host].unread = []

    def failure(self, reply: Reply) -> Exception | None:
        """The exception of a call, as far as it is known."""
        if reply.lost:
            return CallLost("")
        if reply.message is None or not reply.failed:
            return None
        error, text = reply.message.value()
        if isinstance(error, HostError) and error.failure.rank is None:
            error = HostError(replace(error.failure, rank=self.rank_of(reply.host)))
        error.__cause__ = error.__cause__ or RemoteTraceback(text)
        return error

    def came(self, replies: Sequence[Reply], seconds: float = 0.0) -> bool:
        """Whether all have come, or never will; waits `seconds` at most."""
        return self._wait(lambda: all(reply.came for reply in replies), seconds)

    def came_some(self, replies: Sequence[Reply], num: int, seconds: float) -> bool:
        """Whether `num` of them have come, or never will; waits `seconds` at most."""
        return self._wait(lambda: sum(reply.came for reply in replies) >= num, seconds)

    def listen(self, seconds: float) -> None:
        """Read messages for so many seconds."""
        end = time.monotonic() + seconds
        self._wait(lambda: False, seconds)
        time.sleep(max(0.0, end - time.monotonic()))  # it was closed

    def lose(self, host: int) -> None:
        """The host has ended. If it had not joined, nothing else ends the waits for its calls."""
        with defer_signals(), self._lock:
            if self._lines[host].sock is None:
                self._break(self._lines[host])

    def is_broken(self, host: int) -> bool:
        return self._lines[host].broken

    def broken(self) -> list[int]:
        """The hosts whose connections broke. Those to one machine break together: where one broke,
        idle ones to the same machine break, too."""
        gone = {line.machine for line in self._lines if line.broken and line.machine}
        for line in self._lines if gone else ():
            if line.machine in gone and line.sock is not None and is_quiet(line.sock):
                self._break(line)
        return [index for index, line in enumerate(self._lines) if line.broken]

    def close(self) -> None:
        """Close the connections, so that hosts no longer wait for calls. Twice is fine."""
        with self._lock:
            self._closed = True
            for line in self._lines:
                self._break(line)
            self._guests.close()
            writer = self._writer
        if writer is not None:
            writer.join()
        self._poll.close()

    # -- reading -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether it is done after `seconds` at most; reads meanwhile, or waits for the thread that
        does."""
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
        """Whether this thread may read, before it is done or too late."""
        with self._lock:
            # a reader that was interrupted may still be noted as the reader
            if self._reader in (None, me):
                self._reader = me
                return True
        while True:
            # Ctrl-C within a Condition's `wait` may leave that unlocked
            with defer_signals(), self._lock:
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
        """Read the messages that have arrived, or the first that arrives within `seconds`."""
        events = self._poll.poll(seconds)
        with defer_signals():  # a signal does not cut a message in two
            for descriptor, event in events:
                if (line := self._joined.get(descriptor)) is not None:
                    if event & ~select.EPOLLOUT:
                        self._read(line)
                    if event & select.EPOLLOUT:
                        with self._lock:
                            self._write_on(line)
                else:
                    with self._lock:
                        self._guests.handle(descriptor)
            if self._waiting:  # a thread counts as waiting before it checks whether it is done
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
        """No message comes over this connection from now on."""
        with self._lock:
            self.interrupted |= interrupted
            line.broken, line.messages = True, None
            for reply in line.expected:
                reply.lost = True
            line.expected.clear()
            line.unwritten.clear()
            if line.sock is not None:
                del self._joined[line.sock.fileno()]
                line.sock.close()  # which also removes it from the poll
                line.sock = None
            self._changed.notify_all()

    # -- writing, with the lock held ------------------------------------------------------

    def own(self) -> None:
        """Copy lent buffers that are unwritten."""
        with self._lock:
            for line in self._lines:
                if line.lent:
                    line.unwritten = deque(memoryview(bytes(piece)) for piece in line.unwritten)
                    line.lent = False

    def _stop_writing(self, line: _Connection) -> None:
        """Its host has ended. The connection breaks as soon as the host's last messages are read:
        they may have results that no other host has."""
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
            # A host that has not joined counts: it joins when a thread reads, and its callers may
            # not read now.
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

    # -- hosts that join
    # --------------------------------------------------------------------------------

    def _welcomes(self, index: int) -> Callable[[socket.socket], None] | None:
        """The function that handles a host's connection, if it knows the key and may join."""
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
    """Whether all have come, or one has failed."""
    waiting = False  # a plain loop, since it runs after each message
    for reply in replies:
        if reply.message is None:
            if reply.lost:
                return True
            waiting = True
        elif reply.message.kind in (RAISED, UNREAD):
            return True
    return not waiting
