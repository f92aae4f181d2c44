"""A warning while a step takes too long: who hangs, once for a wait and again as it doubles.

    late = Late(folder)                # of the launch
    late.look(waited_s=6.0)            # whenever the controller looks whether a result has come

Late is a run that takes 5 times what earlier runs of its program took, and more than 5 s; a first
one after 15 s, or 60 s where the one that is waited for computes (`diagnosis/diagnosis.py`). One
that is stopped or lost is told of when 5 s were waited.

Invariants: with DTENSOR_LATE_WARNINGS=0 in the environment nothing is looked at. Nor is anything
before somebody has waited for a quarter of a second, and then the counters alone, 20 us a host,
until something is late. Two looks tell who moves and who computes, and nobody waits between them.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from dtensor.daft.diagnosis.diagnosis import LEAST_S, limit_s
from dtensor.daft.diagnosis.seen import Seen
from dtensor.daft.ray.bootstrap.launch_folder import LaunchSeen


class Late:
    """`folder`: of the launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: tuple[Seen, ...] | None = None
        self._run = -1  # the oldest under way, when it was told of
        self._told_s = 0.0  # and how long it had taken

    def look(self, waited_s: float) -> None:
        """`waited_s`: by whoever looks, so far."""
        if os.environ.get("DTENSOR_LATE_WARNINGS") == "0":
            return
        try:
            launch = LaunchSeen(self._folder)
        except FileNotFoundError:  # another thread has closed it, as whoever waits will hear
            return
        at = launch.progress()
        running = [each for each in at if each.position >= 0 and each.running_s is not None]
        took_s = max((each.running_s or 0.0 for each in running), default=0.0)
        late = any((each.running_s or 0.0) > limit_s(each) for each in running)
        if not late and waited_s < LEAST_S:
            self._before = None
            return
        after = launch.look()
        before, self._before = self._before, after
        run = min((each.run for each in running), default=max(each.run for each in at))
        if run != self._run:
            self._run, self._told_s = run, 0.0
        took_s = max(took_s, waited_s)
        if before is None or took_s < 2 * self._told_s:
            return
        status = launch.between(before, after)
        if status.hangs:
            self._told_s = took_s
            warnings.warn(status.warning, RuntimeWarning, stacklevel=4)
