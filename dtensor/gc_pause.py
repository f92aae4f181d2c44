"""Pause Python's cyclic garbage collector while a large program is captured or planned.

    with collector_paused():
        graph = ...

The graph of a deep model has a million small objects, none of which is garbage. As their number
grows, the collector visits them again and again: this took a fifth of the time of planning 32
layers, to free 0.06 GB (benchmarks/results/plan_time.md). Blocks may be nested.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Disable Python's garbage collector within the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
