"""Converts the errors of a launch into the errors of commands, which have no traceback.

with launch_errors():
    with start_errors():
        launch.start()     # too few GPUs: PlanningError, exit status 2
    step(x, y)             # a rank fails: RunFailed, exit status 1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtensor.daft import DaftError
from dtensor.errors import PlanningError


class RunFailed(Exception):
    """A step or a measurement failed on the ranks. Its message is printed without a traceback."""


@contextmanager
def start_errors() -> Iterator[None]:
    """Raise PlanningError if the ranks that start in the block find too few GPUs or machines."""
    try:
        yield
    except ValueError as error:
        raise PlanningError(str(error)) from error


@contextmanager
def launch_errors() -> Iterator[None]:
    """Raise PlanningError if Ray is not installed or not at the address, and RunFailed if a rank
    fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise PlanningError(
            "--backend ray needs Ray, which is not installed.\n"
            "fix: pip install 'dtensor[ray]', or --backend inprocess"
        ) from error
    except ConnectionError as error:
        raise PlanningError(str(error)) from error
    except DaftError as error:
        raise RunFailed(str(error)) from error
