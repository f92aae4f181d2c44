"""What `dtensor doctor` prints: a line for each thing that it has checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table. ``note``: the fix if it is not ok, else the value it is compared
    with."""

    state: State
    name: str
    found: str
    note: str = ""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
