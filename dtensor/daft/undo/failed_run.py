"""Describe a run that failed and was undone: its faults, and placeholders for its values.

    UndoneRun(faults=(Fault(site=(1, 4), error=TaskError(...)),), run=7, program=2)

Each host returns its own record. The controller takes the fault that comes first in an order of all
instructions as the root cause (`first_fault`). Ranks that only learned of the failure have no
fault. `shortened` removes the frames of dtensor's and torch's internals from an exception, and the
local values of generated code, which would keep the activations of the run alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch

from dtensor.daft.errors import DaftError, Failure
from dtensor.daft.remote_exceptions import traceback_of
from dtensor.daft.verification.pairing import Site


@dataclass(frozen=True, slots=True)
class Poisoned:
    """A placeholder for a value that was not computed, with the failure that prevented it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that was undone with its run. `site`: the failed instruction; None if the run read
    a value that an earlier failed run should have made. Pickles without the error's cause."""

    site: Site | None
    error: DaftError


@dataclass(frozen=True, slots=True)
class UndoneRun:
    """A host's record of a run that was undone.

    `faults`: the ranks' faults, in the order of the host's list; () if none of them failed.
    `run` and `program`: the numbers of the run and its program; None for a value that was read.
    """

    faults: tuple[Fault, ...]
    run: int | None = None
    program: int | None = None

    def numbered(self, run: int, program: int) -> UndoneRun:
        """Return the record with the numbers of the run and its program, and the run's number in
        the errors of its own faults."""
        faults = tuple(
            fault if fault.site is None else replace(fault, error=with_run(fault.error, run))
            for fault in self.faults
        )
        return UndoneRun(faults, run, program)


@dataclass(frozen=True, slots=True)
class UndoneCounts:
    """A host's undone runs. Stored in the host's table under COUNTERS, so snapshots include it.
    `runs`: the numbers of the undone runs that were counted, by key of the count."""

    undone: tuple[UndoneRun, ...] = ()
    runs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


COUNTERS = -1, "counters"
"""The key of `UndoneCounts` in a host's table."""


class OthersFailed(Exception):
    """Raised at a commit point if other ranks have failed."""


class CutShort(Exception):
    """Raised between two instructions if a signal handler has raised."""


def first_fault(undone: Sequence[UndoneRun], order: Sequence[Site]) -> Fault | None:
    """Return the fault of one run that comes first in ``order``, an order of all instructions.

    A consequence always comes after its cause in such an order. The result does not depend on
    timing. None if no host has a fault.
    """
    position = {site: index for index, site in enumerate(order)}
    faults = [fault for record in undone for fault in record.faults]
    after_all = len(order)
    return min(
        faults, key=lambda f: position.get(f.site, after_all) if f.site else -1, default=None
    )


def with_run(error: DaftError, run: int) -> DaftError:
    """Return the same error with the number of the run in its text."""
    error_of_run = type(error)(replace(error.failure, step=run))
    error_of_run.__cause__ = error.__cause__
    return error_of_run


def detached(error: DaftError) -> DaftError:
    """Return the same error without the frames of the exception that user code raised."""
    failure = error.failure
    raised = None if failure.raised is None else failure.raised.detached()
    return type(error)(replace(failure, raised=raised))


_HIDDEN_FILES = (f"{Path(__file__).parents[1] / 'run'}/", f"{Path(torch.__file__).parent}/")
_CLEARED_FILES = ("<dtensor ", f"{Path(__file__).parents[2]}/")
"""Prefixes of files: frames of the first are removed, frames of the second lose their values."""


def shortened(error: BaseException) -> BaseException:
    """Remove frames of the engine and of torch from the exception's traceback, and the local values
    of frames of generated code. The user's frames keep theirs, for a debugger."""
    frames: list[TracebackType] = []
    traceback = traceback_of(error)
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_HIDDEN_FILES):
            frames.append(traceback)
            if file.startswith(_CLEARED_FILES):
                with suppress(RuntimeError):  # the frame is still executing
                    traceback.tb_frame.clear()
        traceback = traceback.tb_next
    short: TracebackType | None = None
    for tb in reversed(frames):
        short = TracebackType(short, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return BaseException.with_traceback(error, short)
