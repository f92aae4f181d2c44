"""What may go wrong where ranks are started, told as commands tell it.

    with launching(options):
        ...                    # a run that fails: StepFailed, with status 1 and no traceback

Not here: the launch itself (api/launch/launching.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from dtensor.daft import DaftError
from dtensor.errors import PlanningError


class RunFailed(Exception):
    """What ran on the ranks has failed; its words are all that there is to say."""


@contextmanager
def too_few_are_users() -> Iterator[None]:
    """While ranks start: PlanningError where there are too few GPUs, or machines, for them."""
    try:
        yield
    except ValueError as error:
        raise PlanningError(str(error)) from error


@contextmanager
def launching(options: argparse.Namespace) -> Iterator[None]:
    """PlanningError where Ray is missing, or not at the address; RunFailed where a run fails."""
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
