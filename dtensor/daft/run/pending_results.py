"""The results of a deferred run, whose kernels are queued: only the GPU knows if the run commits.

    pending = PendingResults(run, device, outcome)    # queues copies; the host does not wait
    pending.done()                                    # False
    pending.wait()                                    # {0: {"loss": tensor}} or UndoneRun

The outputs, the rows of faults and the predicate are copied to pinned memory, small ones in one
copy, and an event is recorded behind the copies. The run has ended when the event has passed. Any
thread may wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from dtensor.daft.errors import CommunicationError, Failure
from dtensor.daft.remote_exceptions import reason_of
from dtensor.daft.run.device_commit import DeferredRun, Results
from dtensor.daft.run.packed import Packed
from dtensor.daft.undo.failed_run import UndoneRun

T = TypeVar("T")
_Open: TypeAlias = tuple[DeferredRun, Callable[[DeferredRun], UndoneRun | None]]

SMALL_BYTES = 1 << 16
"""The largest result that leaves pinned memory, which torch allocates in whole pages."""


class PendingResults:
    """The results of a deferred run on one host.

    `outcome`: returns the record of the run if it was undone, None if it was committed, given the
    run with its tensors on the host.
    """

    def __init__(
        self,
        run: DeferredRun,
        device: torch.device,
        outcome: Callable[[DeferredRun], UndoneRun | None],
    ) -> None:
        self._device = device
        outputs = [value for named in run.results.values() for value in named.values()]
        packed = run.packed or Packed.of(run.rows.device, [run.rows, run.skip, *outputs])
        flat = None if packed is None else _queue_copy(packed.flat)

        def to_host(value: T) -> T:
            if flat is None or packed is None or not isinstance(value, Tensor):
                return _queue_copy(value)
            part = packed.part(flat, value)
            return _queue_copy(value) if part is None else cast(T, part)

        on_host = replace(
            run,
            results=_copied(run.results, to_host),
            rows=to_host(run.rows),
            skip=to_host(run.skip),
            packed=None,
        )
        self._open: _Open | None = on_host, outcome  # None: the result is known
        self._result: Results | UndoneRun = {}
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)  # a host that waits does not spin
            self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        """Return whether `wait` would return or raise without waiting."""
        try:
            return self._event is None or self._event.query()
        except RuntimeError:  # the GPU is lost, which `wait` raises
            return True

    def wait(self) -> Results | UndoneRun:
        """Wait for the GPU; return the outputs of each rank, or the record of the undone run.
        Raises CommunicationError if the GPU is lost."""
        if (pending := self._open) is not None:
            run, outcome = pending
            try:
                if self._event is not None:
                    self._event.synchronize()
            except RuntimeError as error:
                reason = f"{self._device} was lost: {reason_of(error)}"
                raise CommunicationError(Failure(rank=None, reason=reason)) from error
            undone = outcome(run)
            self._result = _copied(run.results, _unpinned) if undone is None else undone
            self._open = None  # a result that is kept keeps neither pinned memory nor the program
        return self._result


def _copied(results: Results, copy: Callable[[object], object]) -> Results:
    return {rank: {n: copy(v) for n, v in named.items()} for rank, named in results.items()}


def _queue_copy(value: T) -> T:
    """Return a copy of a tensor in the host's memory, which has its values when the GPU's current
    stream has run the copy. Other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    tensor: Tensor = value.detach()
    pinned = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return cast(T, copy.copy_(tensor.contiguous(), non_blocking=pinned))


def _unpinned(value: object) -> object:
    """Return a small pinned tensor as a copy in ordinary memory, and other values unchanged."""
    if isinstance(value, Tensor) and value.numel() * value.itemsize <= SMALL_BYTES:
        return value.clone() if value.is_pinned() else value
    return value
