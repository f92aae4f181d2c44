"""What is left of a run that failed and was undone: why it failed, and what stands for its values.

    Undone(faults=(Fault(site=(1, 4), error=TaskError(...)),), run=7, program=2)

Each host gives its own, so that the controller finds the root: the first of all faults in an order
of all instructions (`first_fault`). Of ranks that only heard of it there is no fault. An exception
is kept with the frames that concern the user, of generated code and of the user's own functions.

Not here: how a run is undone (`engine.py`), and what a host remembers of it (`worker.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch

from dtensor.daft.errors import DaftError, Failure
from dtensor.daft.raised import traceback_of
from dtensor.daft.verification.pairing import Site


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Stands for a value that was not made, with the failure that it would have come of."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that its run survived; `site` None: of an earlier run, whose value this one reads.

    Pickles without the error's cause.
    """

    site: Site | None
    error: DaftError


@dataclass(frozen=True, slots=True)
class Undone:
    """Of a run that changed nothing: the faults of the ranks here, in the order of the host's list;
    none where all was well here. `run` and `program`: its number and its program's; None of a value
    that was asked for."""

    faults: tuple[Fault, ...]
    run: int | None = None
    program: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What a host remembers of runs that were undone: it stands in its table, as a value of no
    rank. `runs`: of what is counted, by its key."""

    undone: tuple[Undone, ...] = ()
    runs: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


COUNTERS = -1, "counters"
"""Where, in the table."""


class OthersFailed(Exception):
    """Raised at a commit point."""


class CutShort(Exception):
    """Raised between two instructions, where a signal's handler has raised."""


def first_fault(undone: Sequence[Undone], order: Sequence[Site]) -> Fault | None:
    """Of what hosts say of one run, the fault that is first in an order of all instructions. What
    follows from another comes after it in each such order, and this one does not know of time."""
    place = {site: at for at, site in enumerate(order)}
    faults = [fault for each in undone for fault in each.faults]
    last = len(order)
    return min(faults, key=lambda f: place.get(f.site, last) if f.site else -1, default=None)


def with_run(error: DaftError, run: int) -> DaftError:
    found = type(error)(replace(error.failure, step=run))
    found.__cause__ = error.__cause__
    return found


def detached(error: DaftError) -> DaftError:
    """The same failure, without the frames of what was raised."""
    failure = error.failure
    raised = None if failure.raised is None else failure.raised.detached()
    return type(error)(replace(failure, raised=raised))


_INNER = (f"{Path(__file__).parents[1] / 'run'}/", f"{Path(torch.__file__).parent}/")


def shortened(error: BaseException) -> BaseException:
    """The same exception, whose traceback keeps the generated code and the user's frames."""
    frames: list[TracebackType] = []
    here = traceback_of(error)
    while here is not None:
        if not here.tb_frame.f_code.co_filename.startswith(_INNER):
            frames.append(here)
        here = here.tb_next
    kept: TracebackType | None = None
    for tb in reversed(frames):
        kept = TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return BaseException.with_traceback(error, kept)
