"""The controller's end of its connections to the hosts: calls go out, results come back.

    channel = RunChannel(folder, 2, "127.0.0.1")
    process.serve(channel.credentials(0))                 # a Ray call, which ends when this closes
    reply = channel.send(0, REQUEST, (Ranks.run, Worker.run), (8, 3, inputs))  # does not wait
    channel.get([reply], 0.25)                         # NotYet, CallLost, or the call's exception

A call never waits: if a socket is full, a thread writes the rest of the message, which is copied
unless the caller lends its buffers. Invariants: the controller reads whenever it waits or has
unwritten bytes, so it cannot deadlock with a host that writes. One thread reads at a time, without
a lock. An exception in a read or a write, such as Ctrl-C, breaks the connection, so that an answer
is never taken for another call's answer.
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

from dtensor.daft.errors import HostError, error_to_send
from dtensor.daft.ray.bootstrap.dead_connections import is_quiet
from dtensor.daft.ray.channel.handshake import MAX_PATH_BYTES, Credentials, Handshakes
from dtensor.daft.ray.channel.messages import (
    MAX_PIECES,
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

MAX_UNREAD = 8
"""If a host has this many unanswered calls, each further call first reads the answers that have
arrived. Otherwise the host would block in a write while its socket is full of results."""
SIGNAL_POLL_S = 0.1  # how often a thread that waits for the reading thread handles signals
WRITER_POLL_S = 0.1  # how often the writing thread checks whether the channel was closed


class NotYet(Exception):
    """Raised by `get` if not all of the calls have been answered."""


class CallLost(Exception):
    """Raised for a call that will not be answered. The text is the cause, if it is known."""


class Reply:
    """The answer to call ``number`` of a host: its ``message`` once that has arrived; ``lost`` if
    the connection broke before."""

    __slots__ = ("host", "lost", "message", "number")

    def __init__(self, number: int, host: int = -1) -> None:
        self.number: int = number
        self.host: int = host
        self.message: Message | None = None
        self.lost: bool = False

    @property
    def over(self) -> bool:
        """Whether the call was answered or lost."""
        return self.message is not None or self.lost

    @property
    def failed(self) -> bool:
        return self.lost or (self.message is not None and self.message.kind in (RAISED, UNREAD))


class _Connection:
    """The connection to one host. Bytes may be queued before the host has connected."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None  # None before the host connects and after a break
        self.messages: Generator[Message | None] | None = None
        self.numbers = count()
        self.expected: deque[Reply] = deque()  # requests without an answer, in order
        self.unread: list[Reply] = []  # answers with an exception of a one-way call, not raised yet
        self.unwritten: deque[memoryview] = deque()
        self.lent = False  # whether a caller owns some of the unwritten buffers
        self.write_closed = False  # the host accepts no more bytes; its messages are still read
        self.broken = False
        self.machine = ""  # the host's address, if it is on another machine


class RunChannel:
    """The channel to `num_hosts` hosts. `folder` belongs to the launch. `address`: where other
    machines reach the controller, None if all hosts are on its machine."""

    def __init__(self, folder: Path, num_hosts: int, address: str | None) -> None:
        self.interrupted: bool = False  # whether an exception ended a read or a write
        self.rank_of: Callable[[int], int | None] = lambda _: None  # host to its first rank
        self._key = secrets.token_bytes(32)
        self._connections = [_Connection() for _ in range(num_hosts)]
        self._joined: dict[int, _Connection] = {}  # by descriptor
        self._poll = select.epoll()
        self._handshakes = Handshakes(self._poll, self._key, self._welcome)
        self._path: str | None = None
        self._address: tuple[str, int] | None = None
        # Taken directly: Ctrl-C in the `with` of a Condition would leave the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reader: int | None = None  # the thread that reads
        self._waiting = 0  # number of threads that wait for the reader
        self._writer: threading.Thread | None = None
        self._closed = False
        path = str(folder / "runs")
        if len(path.encode()) <= MAX_PATH_BYTES:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            self._handshakes.listen(sock)
            self._path = path
        if address is not None or self._path is None:
            sock = socket.create_server((address or "127.0.0.1", 0))
            self._handshakes.listen(sock)
            self._address = sock.getsockname()[:2]

    def add(self) -> int:
        """Add a host and return its number."""
        with self._lock:
            self._connections.append(_Connection())
            return len(self._connections) - 1

    def credentials(self, host: int) -> Credentials:
        return Credentials(index=host, path=self._path, address=self._address, key=self._key)

    # -- calls ------------------------------------------------------------------------------------

    def send(
        self,
        host: int,
        kind: Kind,
        functions: tuple[Function, ...],
        arguments: tuple[Any, ...] | Payload,
        *,
        lent: bool = False,
    ) -> Reply:
        """Call `functions[0](*functions[1:], *arguments)` in a host. Return the call's `Reply`.

        The caller may change the arguments as soon as this returns; if they are `lent`, only after
        the call was answered or after `copy_lent`. Functions are cached, so they must not be
        closures.
        """
        connection = self._connections[host]
        reply = Reply(next(connection.numbers), host)
        pieces: Sequence[Data] = encoded(reply.number, kind, functions, arguments)
        with defer_signals(), self._lock:
            if connection.broken:
                reply.lost = True
                return reply
            if kind == REQUEST:
                connection.expected.append(reply)
            try:
                try:  # in this frame, since it runs for each host at each step
                    while (
                        pieces
                        and connection.sock is not None
                        and not (connection.unwritten or connection.write_closed)
                    ):
                        pieces = unsent(pieces, connection.sock.sendmsg(islice(pieces, MAX_PIECES)))
                except BlockingIOError:
                    pass
                except OSError:
                    self._stop_writing(connection)
                if pieces and not connection.write_closed:
                    connection.lent |= lent
                    connection.unwritten.extend(memoryview(p if lent else bytes(p)) for p in pieces)
                    self._write_later(connection)
            except BaseException:
                self._break(connection, interrupted=True)
                raise
        if len(connection.expected) >= MAX_UNREAD:
            self._wait(lambda: len(connection.expected) < MAX_UNREAD, 0.0)
        return reply

    def get(self, replies: Sequence[Reply], seconds: float) -> list[Any]:
        """Return the results of the calls. Raises `NotYet` if a result has not arrived after
        `seconds`, the exception of the first call that raised, and `CallLost` if a connection
        broke."""
        if not self._wait(lambda: _is_decided(replies), seconds):
            raise NotYet
        for connection in self._connections:
            if connection.unread:
                connection.unread = [reply for reply in connection.unread if reply not in replies]
        for reply in replies:
            if reply.failed:
                # not assigned to a variable, which would make a cycle of this frame and the error
                raise self.failure(reply) or NotYet
        return [self._value(reply.message, reply) for reply in replies if reply.message is not None]

    def _value(self, message: Message, reply: Reply) -> Any:
        """Return the result in a message. Raises an error of daft if it cannot be unpickled."""
        try:
            return message.value()
        except BaseException as error:  # the user's class may raise anything
            if interrupts(error):
                raise
            sent = error_to_send(error, self.rank_of(reply.host))
            raise sent from sent.__cause__

    def is_over(self, host: int, number: int) -> bool:
        """Return whether request `number` of a host was answered or lost."""
        connection = self._connections[host]
        try:
            return connection.expected[0].number > number
        except IndexError:
            return True

    def unread(self, host: int) -> Exception | None:
        """Return, once, the exception of a host's one-way call, if it has arrived with an answer
        that `get` has not returned."""
        replies, self._connections[host].unread = self._connections[host].unread, []
        return self.failure(replies[0]) if replies else None

    def forget_unread(self, host: int) -> None:
        """Forget the exceptions of a host's one-way calls so far."""
        self._connections[host].unread = []

    def failure(self, reply: Reply) -> Exception | None:
        """Return the exception of a call, None if it has none or is not answered."""
        if reply.lost:
            return CallLost("")
        if reply.message is None or not reply.failed:
            return None
        error, text = reply.message.value()
        if isinstance(error, HostError) and error.failure.rank is None:
            error = HostError(replace(error.failure, rank=self.rank_of(reply.host)))
        error.__cause__ = error.__cause__ or RemoteTraceback(text)
        return error

    def all_over(self, replies: Sequence[Reply], seconds: float = 0.0) -> bool:
        """Wait up to `seconds`; return whether all calls were answered or lost."""
        return self._wait(lambda: all(reply.over for reply in replies), seconds)

    def some_over(self, replies: Sequence[Reply], num: int, seconds: float) -> bool:
        """Wait up to `seconds`; return whether `num` of the calls were answered or lost."""
        return self._wait(lambda: sum(reply.over for reply in replies) >= num, seconds)

    def listen(self, seconds: float) -> None:
        """Read messages for this many seconds."""
        end = time.monotonic() + seconds
        self._wait(lambda: False, seconds)
        time.sleep(max(0.0, end - time.monotonic()))  # the wait ends early if the channel is closed

    def lose(self, host: int) -> None:
        """Record that a host has ended. If it never connected, this alone ends the waits for it."""
        with defer_signals(), self._lock:
            if self._connections[host].sock is None:
                self._break(self._connections[host])

    def is_broken(self, host: int) -> bool:
        return self._connections[host].broken

    def broken(self) -> list[int]:
        """Return the hosts whose connections broke. Connections to one machine break together: if
        one broke, this also breaks idle connections to the same machine."""
        unreachable_machines = {
            connection.machine
            for connection in self._connections
            if connection.broken and connection.machine
        }
        for connection in self._connections if unreachable_machines else ():
            if (
                connection.machine in unreachable_machines
                and connection.sock is not None
                and is_quiet(connection.sock)
            ):
                self._break(connection)
        return [index for index, connection in enumerate(self._connections) if connection.broken]

    def close(self) -> None:
        """Close the connections, so that hosts no longer wait for calls. Twice is fine."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                self._break(connection)
            self._handshakes.close()
            writer = self._writer
        if writer is not None:
            writer.join()
        self._poll.close()

    # -- reading -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait up to `seconds` until `done()`; return whether it is. Meanwhile this thread reads,
        or waits for the thread that reads."""
        if done():
            return True
        end, thread_id = time.monotonic() + seconds, threading.get_ident()
        try:
            if self._become_reader(thread_id, done, end):
                while not done() and not self._closed:
                    seconds_left = end - time.monotonic()
                    self._read_once(max(0.0, seconds_left))
                    if seconds_left <= 0.0:
                        break
        finally:
            with self._lock:
                if self._reader == thread_id:
                    self._reader = None
                    self._changed.notify_all()
        return done()

    def _become_reader(self, thread_id: int, done: Callable[[], bool], end: float) -> bool:
        """Make this thread the reader once no other thread reads. Return False if `done()`, or at
        the time `end`, before that."""
        with self._lock:
            # this thread may still be recorded as the reader, if it was interrupted
            if self._reader in (None, thread_id):
                self._reader = thread_id
                return True
        while True:
            # Ctrl-C within a Condition's `wait` may leave that unlocked
            with defer_signals(), self._lock:
                self._waiting += 1
                try:
                    if self._reader in (None, thread_id):
                        self._reader = thread_id
                        return True
                    seconds_left = end - time.monotonic()
                    if done() or self._closed or seconds_left < 0.0:
                        return False
                    self._changed.wait(min(seconds_left, SIGNAL_POLL_S))
                finally:
                    self._waiting -= 1

    def _read_once(self, seconds: float) -> None:
        """Read the messages that have arrived; if there are none, wait up to `seconds` for one."""
        events = self._poll.poll(seconds)
        with defer_signals():  # a signal does not cut a message in two
            for descriptor, event in events:
                if (connection := self._joined.get(descriptor)) is not None:
                    if event & ~select.EPOLLOUT:
                        self._read(connection)
                    if event & select.EPOLLOUT:
                        with self._lock:
                            self._flush(connection)
                else:
                    with self._lock:
                        self._handshakes.handle(descriptor)
            if self._waiting:  # a thread counts as waiting before it checks whether it is done
                with self._lock:
                    self._changed.notify_all()

    def _read(self, connection: _Connection) -> None:
        """Read the answers that have arrived."""
        try:
            while (
                connection.messages is not None
                and (message := next(connection.messages)) is not None
            ):
                reply = connection.expected[0]
                if reply.number != message.number:
                    raise RuntimeError(
                        f"call {message.number} was answered before call {reply.number}"
                    )
                reply.message = message
                if message.kind == UNREAD:
                    connection.unread.append(reply)
                connection.expected.popleft()
        except EOFError:
            self._break(connection)
        except BaseException:
            self._break(connection, interrupted=True)
            raise

    def _break(self, connection: _Connection, *, interrupted: bool = False) -> None:
        """Close a connection and mark its unanswered calls as lost."""
        with self._lock:
            self.interrupted |= interrupted
            connection.broken, connection.messages = True, None
            for reply in connection.expected:
                reply.lost = True
            connection.expected.clear()
            connection.unwritten.clear()
            if connection.sock is not None:
                del self._joined[connection.sock.fileno()]
                connection.sock.close()  # which also removes it from the poll
                connection.sock = None
            self._changed.notify_all()

    # -- writing, with the lock held ------------------------------------------------------

    def copy_lent(self) -> None:
        """Copy the unwritten buffers that callers have lent and may now change."""
        with self._lock:
            for connection in self._connections:
                if connection.lent:
                    connection.unwritten = deque(
                        memoryview(bytes(piece)) for piece in connection.unwritten
                    )
                    connection.lent = False

    def _stop_writing(self, connection: _Connection) -> None:
        """Drop the unwritten bytes, because the host has ended. The connection breaks only when the
        host's last messages are read: they may have results that no other host has."""
        connection.write_closed = True
        connection.unwritten.clear()
        if connection.sock is not None:
            self._poll.modify(connection.sock, select.EPOLLIN)

    def _write_later(self, connection: _Connection) -> None:
        """Write when the socket accepts bytes again, in a thread that is started for it."""
        if connection.sock is not None:
            self._poll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)
        if self._writer is None and not self._closed:
            self._writer = threading.Thread(target=self._write_all, name="run channel", daemon=True)
            self._writer.start()

    def _write_all(self) -> None:
        """Read and write until no bytes are unwritten; this is the writing thread's function."""

        def written() -> bool:
            # A host that has not connected counts, too: it connects only when a thread reads.
            return not any(
                connection.unwritten and not connection.broken for connection in self._connections
            )

        while True:
            self._wait(written, WRITER_POLL_S)
            with self._lock:
                if self._closed or written():
                    self._writer = None
                    return

    def _flush(self, connection: _Connection) -> None:
        """Write as many unwritten bytes as the socket accepts."""
        if connection.sock is None:
            return
        try:
            while connection.unwritten:
                sent = connection.sock.sendmsg(islice(connection.unwritten, MAX_PIECES))
                while connection.unwritten and sent >= len(connection.unwritten[0]):
                    sent -= len(connection.unwritten.popleft())
                if sent:
                    connection.unwritten[0] = connection.unwritten[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self._stop_writing(connection)
            return
        except BaseException:
            self._break(connection, interrupted=True)
            raise
        connection.lent = False
        self._poll.modify(connection.sock, select.EPOLLIN)

    # -- hosts that connect ------------------------------------------------------------------

    def _welcome(self, index: int) -> Callable[[socket.socket], None] | None:
        """Return the function that takes over a host's connection, None if it must not connect."""
        connection = self._connections[index] if index < len(self._connections) else None
        if connection is None or connection.sock is not None or connection.broken:
            return None
        return partial(self._join, connection)

    def _join(self, connection: _Connection, sock: socket.socket) -> None:
        """Take over the connection of a host, and write the bytes that wait for it."""
        connection.sock, connection.messages = sock, incoming(sock)
        if sock.family != socket.AF_UNIX:
            connection.machine = str(sock.getpeername()[0])
        self._joined[sock.fileno()] = connection
        if connection.unwritten:
            self._write_later(connection)


def _is_decided(replies: Sequence[Reply]) -> bool:
    """Return whether all calls were answered, or a call has failed."""
    waiting = False  # a plain loop, since it runs after each message
    for reply in replies:
        if reply.message is None:
            if reply.lost:
                return True
            waiting = True
        elif reply.message.kind in (RAISED, UNREAD):
            return True
    return not waiting
