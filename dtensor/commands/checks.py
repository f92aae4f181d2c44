"""The result of a check of `dtensor doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table. ``found``: what the check found. ``note``: the fix if the state is not
    ok, else an explanation, such as the supported versions."""

    state: State
    name: str
    found: str
    note: str = ""


def first_line(error: Exception) -> str:
    """Return the type of the error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
