"""Running a program and reading values so that a failure names the user's line.

An op's program is made once and serves every line that calls the op, so it bears no line. Which
line started a run is written down here by the run's number, which a failure states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from dtensor.api.eager.values import Value, held_by
from dtensor.daft import DaftError
from dtensor.frontend.source import line_of, user_place

if TYPE_CHECKING:
    from dtensor.api.session import Session

_lines: WeakKeyDictionary[Session, OrderedDict[int, tuple[str, int, str]]] = WeakKeyDictionary()
MAX_LINES = 65536


def run_on(
    session: Session, program: Any, feed: Mapping[str, object], keep: Mapping[str, str]
) -> None:
    """One asynchronous call; what has failed by now raises."""
    lines = _lines.get(session)
    if lines is None:
        lines = _lines[session] = OrderedDict()
    place = user_place() if session.cluster.failure is None else None
    if place is not None:
        lines[session.cluster.runs] = place
        if len(lines) > MAX_LINES:
            lines.popitem(last=False)
    try:
        session.run(program, [feed] * session.mesh.size, keep)
        if session.cluster.failure is not None:
            raise session.cluster.failure
    except DaftError as error:
        raise located(session, error) from error


def located(session: Session, error: DaftError) -> DaftError:
    """The failure of an eager op with the user's line."""
    failure = error.failure
    step = failure.step if failure.step is not None else session.cluster.runs - 1
    place = _lines.get(session, {}).get(step)
    if failure.line is not None or place is None:
        return error
    source = line_of(*place)
    return type(error)(replace(failure, line=f"{source}: {source.text}"))


def fetch(value: Value) -> list[torch.Tensor]:
    """The shards, one per rank that holds them. Waits."""
    try:
        return value.session.fetch(value.name, held_by(value.spec))
    except DaftError as error:
        raise located(value.session, error) from error
