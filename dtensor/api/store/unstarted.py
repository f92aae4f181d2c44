"""The latest launch that was made and not started: programs meant for its ranks must not run here.

    record_unstarted(run, source)     # `dt.launch(mesh)`
    check_started()                   # raises until run.start() or run.close()
    forget_unstarted(run)             # it has started, or was closed

A launch that becomes garbage before it was started causes a warning.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from dataclasses import dataclass
from traceback import walk_stack
from types import CodeType, FrameType

from dtensor.errors import PlanningError
from dtensor.frontend.source import Source, caller_level, lines_text, source_here


@dataclass(frozen=True, slots=True)
class _Unstarted:
    """A launch that was not started yet, the line that made it, and the lines that ran then."""

    session: weakref.ref[object]
    source: Source | None
    stack: list[tuple[CodeType, int]]


_unstarted: list[_Unstarted] = []
"""The latest launch, until it is started or closed."""


def record_unstarted(session: object, source: Source | None, *, tried: bool = False) -> None:
    """Record the latest launch, which is not started yet, in place of an earlier one. ``tried``:
    its start has failed, so no warning is needed if it becomes garbage."""
    reference = weakref.ref(session, None if tried else _warn_never_started)
    _unstarted[:] = [_Unstarted(reference, source, _running_lines(sys._getframe(1)))]


def forget_unstarted(session: object) -> None:
    """Remove the launch from the record of launches that were not started, if it is there."""
    _unstarted[:] = [launch for launch in _unstarted if launch.session() is not session]


def _warn_never_started(session: weakref.ref[object]) -> None:
    """Warn of a launch that became garbage and was never started: ``dt.launch(mesh)`` in a line of
    its own, or a function that returned without starting it.

    If an exception, such as a signal's, ended the code that would have started the launch, there is
    no warning. The launch becomes garbage where the exception was handled, which is another line
    than the one that made the launch or called the function that made it.
    """
    for launch in list(_unstarted):
        if launch.session is session and not sys.is_finalizing():
            _unstarted.clear()
            running = _running_lines(sys._getframe(1))
            if not running or launch.stack[: len(running)] != running:
                continue
            warnings.warn(
                f"a launch was made and never started, and nothing refers to it any more: the "
                f"code after it runs without it.\n"
                f"{lines_text(launch=launch.source)}"
                f"fix: with dt.launch(...): ...; or run = dt.launch(...) and run.start()",
                RuntimeWarning,
                stacklevel=caller_level(),
            )


def _running_lines(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return the line that each function on the stack runs, outermost first, down to ``frame``."""
    return [(caller.f_code, line) for caller, line in walk_stack(frame)][::-1]


def check_started() -> None:
    """Raises PlanningError if the latest launch was never started. A launch without references does
    not count."""
    for launch in _unstarted:
        if launch.session() is not None:
            raise PlanningError(
                f"a launch was made and never started, and this would run without it.\n"
                f"{lines_text(launch=launch.source, call=source_here())}"
                f"fix: `with run:` around the call or run.start() before it, where run is the "
                f"result of dt.launch; run.close() discards the launch"
            )
