"""The records of a run that failed and was undone: its faults, and placeholders for its values.

    UndoneRun(faults=(Fault(site=(1, 4), error=TaskError(...)),), run=7, program=2)

Each host returns its own record, and the controller finds the root: the first of all faults in an
order of all instructions (`first_fault`). Ranks that only learned of the failure have no fault. An
exception is kept with the frames that concern the user: generated code, which keeps its lines and
lets go of its values, for they are the activations of a run; and the user's functions, whose values
a debugger shows.

Not here: the undoing (`engine.py`), a host's memory of it (`worker.py`).
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
    """A placeholder for a value that was not made, with the failure that prevented it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that its run survived; `site` None: a failure of an earlier run, whose value this
    one reads.

    Pickles without the error's cause.
    """

    site: Site | None
    error: DaftError


@dataclass(frozen=True, slots=True)
class UndoneRun:
    """A run that changed nothing: the faults of the ranks here, in the order of the host's list;
    empty if no rank here failed. `run` and `program`: its number and its program's; None for a
    value that was read."""

    faults: tuple[Fault, ...]
    run: int | None = None
    program: int | None = None


@dataclass(frozen=True, slots=True)
class UndoneCounts:
    """A host's counts of undone runs: they are in its table, as a value of no rank. `runs`: by key,
    the undone runs that counted."""

    undone: tuple[UndoneRun, ...] = ()
    runs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


COUNTERS = -1, "counters"
"""Its key in the table."""


class OthersFailed(Exception):
    """Raised at a commit point, where other ranks have failed."""


class CutShort(Exception):
    """Raised between two instructions, after a signal's handler has raised."""


def first_fault(undone: Sequence[UndoneRun], order: Sequence[Site]) -> Fault | None:
    """Among the hosts' records of one run, the fault that is first in an order of all instructions.
    A consequence comes after its cause in each such order, and this one does not depend on
    timing."""
    place = {site: at for at, site in enumerate(order)}
    faults = [fault for each in undone for fault in each.faults]
    last = len(order)
    return min(faults, key=lambda f: place.get(f.site, last) if f.site else -1, default=None)


def with_run(error: DaftError, run: int) -> DaftError:
    error_of_run = type(error)(replace(error.failure, step=run))
    error_of_run.__cause__ = error.__cause__
    return error_of_run


def detached(error: DaftError) -> DaftError:
    """The same failure, without the exception's frames."""
    failure = error.failure
    raised = None if failure.raised is None else failure.raised.detached()
    return type(error)(replace(failure, raised=raised))


_INNER = (f"{Path(__file__).parents[1] / 'run'}/", f"{Path(torch.__file__).parent}/")
_OURS = ("<dtensor ", f"{Path(__file__).parents[2]}/")
"""Files of generated code, and of what it calls."""


def shortened(error: BaseException) -> BaseException:
    """The same exception, whose traceback keeps the generated code and the user's frames; only the
    latter keep their values."""
    frames: list[TracebackType] = []
    here = traceback_of(error)
    while here is not None:
        file = here.tb_frame.f_code.co_filename
        if not file.startswith(_INNER):
            frames.append(here)
            if file.startswith(_OURS):
                with suppress(RuntimeError):  # it still runs
                    here.tb_frame.clear()
        here = here.tb_next
    kept: TracebackType | None = None
    for tb in reversed(frames):
        kept = TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return BaseException.with_traceback(error, kept)
