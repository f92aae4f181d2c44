"""Who writes a plan as a page: `plan.save` asks here, and what can do it says so.

    saving.use(write)           # write(plan, path) -> where it was written
    saving.writer()(plan, path)

A page shows a plan's simulated timeline, which is above planning; so planning does not import what
writes it. Invariant: there is one writer. Not here: the page (explorer/page.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Writer = Callable[[Any, str | os.PathLike[str]], Path]
"""Of a plan and where to write it."""

_writers: list[Writer] = []


def use(writer: Writer) -> None:
    """From now on plans are written by ``writer``."""
    _writers[:] = [writer]


def writer() -> Writer:
    """RuntimeError where nothing writes pages: dtensor.api does, `import dtensor` loads it."""
    if not _writers:
        raise RuntimeError("nothing here writes plans as pages.\nfix: import dtensor")
    return _writers[0]
