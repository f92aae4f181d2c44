"""The Ray actor: a process that hosts ranks or spawned objects, and the calls that it serves.

Example (the controller does this, `processes.py`):

    actor = ray.remote(num_cpus=0)(Host).remote("/tmp/.../host0", Objects)
    actor.serve.remote(invitation)                       # calls come over a connection

The thread that carries out Ray's calls reads ours from the connection (`run_channel.py`), and
blocks while there are none.

Invariants: calls are carried out one at a time, in the order of their submission. The exception of
a one-way call, whose result is not read, is raised by the next request, whatever its own result. No
exception ends the process, except one of a signal's handler; the controller gets one of daft's own
errors. A host does not know its contents (`ranks.py`, `objects.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dtensor.daft.errors import as_sent
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

LARGEST_KEPT = 1 << 25
"""Bytes of a block of freed memory that stays with the process: the limit of glibc's own
threshold."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class Host:
    """`kind` makes the hosted object from the host's program counter and `arguments`."""

    def __init__(self, counter: str, kind: Callable[..., object], *arguments: object) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._counter: ProgramCounter | None = None
        self.host(counter, kind, *arguments)

    def host(self, counter: str, kind: Callable[..., object], *arguments: object) -> None:
        """Host another object from now on; the previous one is dropped."""
        if self._counter is not None:
            self._counter.stop()
        self._counter = ProgramCounter(Path(counter))
        self._counter.start()
        self._unread: Exception | None = None
        self._hosted = kind(self._counter, *arguments)

    def call(self, method: Callable[..., Any], *given: object) -> Any:
        unread, self._unread = self._unread, None
        try:
            result = method(self._hosted, *given)  # in any case: others may wait for it
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

    def tell(self, method: Callable[..., Any], *given: object) -> None:
        try:
            method(self._hosted, *given)
        except BaseException as error:
            if interrupts(error):
                raise
            self._unread = self._unread or _as_sent(error)

    def serve(self, credentials: Credentials) -> None:
        """Carry out calls that come over a connection, until the controller ends it."""
        with join(credentials, START_S) as sock, torch.no_grad():  # once, not for each run
            try:
                for message in incoming(sock):
                    if message is not None and (answer := self._answer(message)):
                        send(sock, answer)
            except (EOFError, OSError):  # it ended, or its machine cannot be reached
                return

    def _answer(self, message: Message) -> Sequence[Data]:
        """The answer; empty for a one-way call."""
        if message.kind != REQUEST:
            try:
                what = (*message.functions, *message.value())
            except BaseException as error:  # it does not unpickle here
                if interrupts(error):
                    raise
                self._unread = self._unread or _as_sent(error)
            else:
                self.tell(*what)
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
    """An error of daft's own, which pickles."""
    return error if isinstance(error, HostFailed) else as_sent(error)


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process, for the next step; returns whether that could be set.

    A step frees the memory that it allocates, and the next one allocates the same again. By default
    glibc returns a block of megabytes to the system when it is freed, so each page of each tensor
    is faulted in again: 7,700 faults and 9% of a training step of four transformer blocks of width
    256. Blocks above `LARGEST_KEPT` still come from the system, so a process keeps no gigabyte that
    it used once. Other allocators (an LD_PRELOAD of jemalloc, macOS) are unchanged, and so is
    memory of GPUs, which torch caches itself.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    )
