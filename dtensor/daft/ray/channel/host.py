"""A host: the object in an actor's process that executes the calls of the controller.

    actor = ray.remote(num_cpus=0)(Host).remote("/tmp/.../host0", Objects)
    actor.serve.remote(credentials)              # executes calls until the connection ends

Invariants: calls are executed one at a time, in the order in which they were sent, and answered in
this order. A call whose result is `Later` is answered when that is there; meanwhile later calls are
executed. The exception of a one-way call is raised by the next request, whatever the request's own
result. Only the exception of a signal handler ends the process; other exceptions reach the
controller as errors of daft.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from dtensor.daft.errors import error_to_send
from dtensor.daft.ray.bootstrap.machines import START_S
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.channel.handshake import Credentials, join
from dtensor.daft.ray.channel.messages import (
    RAISED,
    REQUEST,
    RESPONSE,
    UNREAD,
    Data,
    HostFailed,
    Kind,
    Message,
    encoded,
    incoming,
    send,
)
from dtensor.daft.remote_exceptions import interrupts, reason_of, trace_of

MAX_KEPT_BYTES = 1 << 25
"""The largest block of freed memory that stays with the process: the most that glibc allows."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


Answer: TypeAlias = Sequence[Data]
"""The pieces of a message."""


@dataclass(frozen=True, slots=True)
class Later:
    """The result of a call that is not there yet. ``wait``: waits for it in another thread, and
    returns it or raises."""

    wait: Callable[[], object]


class _Answers:
    """Sends answers in the order of their calls. From the first answer that is not there yet, a
    thread waits for the answers and sends them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: SimpleQueue[Answer | Callable[[], Answer]] | None = None

    def send(self, answer: Answer | Callable[[], Answer]) -> None:
        """Send an answer, or the answer that a function returns after waiting."""
        if self._queue is None and not callable(answer):
            send(self._sock, answer)
            return
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=self._send_all, name="answers", daemon=True).start()
        self._queue.put(answer)

    def _send_all(self) -> None:
        """Send queued answers until the connection ends; this is the thread's function."""
        assert self._queue is not None
        try:
            while True:
                answer = self._queue.get()
                send(self._sock, answer() if callable(answer) else answer)
        except OSError:  # the controller has ended, as the serving thread notices too
            return


class Host:
    """A host of the object that `kind(program_counter, *arguments)` returns. `counter`: the path of
    the program counter's file."""

    def __init__(self, counter: str, kind: Callable[..., object], *arguments: object) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._counter: ProgramCounter | None = None
        self.host(counter, kind, *arguments)

    def host(self, counter: str, kind: Callable[..., object], *arguments: object) -> None:
        """Replace the hosted object by `kind(program_counter, *arguments)`."""
        if self._counter is not None:
            self._counter.stop()
        self._counter = ProgramCounter(Path(counter))
        self._counter.start()
        self._unread: Exception | None = None
        self._hosted = kind(self._counter, *arguments)

    def call(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of the hosted object and return its result. Raises the exception of an
        earlier one-way call, or of this call, as an error of daft."""
        unread, self._unread = self._unread, None
        try:
            result = method(self._hosted, *arguments)  # even if unread: other hosts may wait for it
        except BaseException as error:
            if interrupts(error):
                raise
            if unread is None:
                raise _as_sent(error) from error.__cause__
            unread.add_note(f"then failed: {reason_of(error)}")
            raise unread from None
        if unread is not None:
            raise unread
        return result

    def tell(self, method: Callable[..., Any], *arguments: object) -> None:
        """Call a method of the hosted object, and keep its exception for the next request."""
        try:
            method(self._hosted, *arguments)
        except BaseException as error:
            if interrupts(error):
                raise
            self._unread = self._unread or _as_sent(error)

    def serve(self, credentials: Credentials) -> None:
        """Execute the calls that come over a connection, until the connection ends."""
        with join(credentials, START_S) as sock, torch.no_grad():  # no_grad once, not for each run
            answers = _Answers(sock)
            try:
                for message in incoming(sock):
                    if message is not None and (answer := self._answer(message)):
                        answers.send(answer)
            except (EOFError, OSError):  # the controller has ended, or cannot be reached
                return

    def _answer(self, message: Message) -> Answer | Callable[[], Answer]:
        """Execute a call. Return its answer, or a function that waits for it; () for a one-way
        call."""
        if message.kind != REQUEST:
            try:
                method, *arguments = (*message.functions, *message.value())
            except BaseException as error:  # the arguments cannot be unpickled here
                if interrupts(error):
                    raise
                self._unread = self._unread or _as_sent(error)
            else:
                self.tell(method, *arguments)
            return ()
        raised = RAISED if self._unread is None else UNREAD
        try:
            result = self.call(*message.functions, *message.value())
            if isinstance(result, Later):
                return partial(_late_answer, message.number, result)
            return encoded(message.number, RESPONSE, (), result)
        except BaseException as error:
            return _error_answer(message.number, raised, error)


def _late_answer(number: int, result: Later) -> Answer:
    """Wait for the result of a call, and return the call's answer."""
    try:
        return encoded(number, RESPONSE, (), result.wait())
    except BaseException as error:
        return _error_answer(number, RAISED, error)


def _error_answer(number: int, kind: Kind, error: BaseException) -> Answer:
    """Return the answer with the exception of a call. Raises the exception of a signal handler."""
    if interrupts(error):
        raise error
    return encoded(number, kind, (), (_as_sent(error), trace_of(error)))


def _as_sent(error: BaseException) -> Exception:
    """Return an error of daft for this error, which can be pickled."""
    return error if isinstance(error, HostFailed) else error_to_send(error)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step. Return whether that could be set.

    Each step allocates the same memory again. By default glibc returns a freed block of megabytes
    to the system, so each page of each tensor is faulted in again: 7,700 faults and 9% of a
    training step of four transformer blocks of width 256. Blocks of more than `MAX_KEPT_BYTES` are
    still returned. Other allocators (jemalloc by LD_PRELOAD, macOS) are unchanged.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MAX_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    )
