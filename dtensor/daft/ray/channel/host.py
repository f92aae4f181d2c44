"""A host: the object in an actor's process that executes the calls of the controller.

    actor = ray.remote(num_cpus=0)(Host).remote("/tmp/.../host0", Objects)
    actor.serve.remote(credentials)              # executes calls until the connection ends

Invariants: calls are executed one at a time, in the order in which they were sent. The exception of
a one-way call is raised by the next request, whatever the request's own result. Only the exception
of a signal handler ends the process; other exceptions reach the controller as errors of daft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
            try:
                for message in incoming(sock):
                    if message is not None and (answer := self._answer(message)):
                        send(sock, answer)
            except (EOFError, OSError):  # the controller has ended, or cannot be reached
                return

    def _answer(self, message: Message) -> Sequence[Data]:
        """Execute a call. Return the pieces of its answer, () for a one-way call."""
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
            return encoded(message.number, RESPONSE, (), result)
        except BaseException as error:
            if interrupts(error):
                raise
            return encoded(message.number, raised, (), (_as_sent(error), trace_of(error)))


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
