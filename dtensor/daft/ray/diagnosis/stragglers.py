"""A warning while a step takes too long: the rank that hangs, once per wait and again as it
doubles.

    late = StragglerWarnings(folder)   # of the launch
    late.look(waited_s=6.0)            # whenever the controller polls for a result

A run is late if it takes 5 times as long as earlier runs of its program, and more than 5 s; a first
run after 15 s, or 60 s if the awaited rank computes (`diagnosis/diagnosis.py`). A stopped or lost
rank is reported after a wait of 5 s.

Invariants: with DTENSOR_LATE_WARNINGS=0 in the environment nothing is checked. Nor is anything in
the first quarter of a second of a wait, and then only the counters, 20 us a host, until a run is
late. Two samples show which ranks make progress and which compute, without a sleep between them.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from dtensor.daft.diagnosis.diagnosis import LEAST_S, limit_s
from dtensor.daft.diagnosis.observation import Observation
from dtensor.daft.ray.bootstrap.launch_folder import LaunchSeen


class StragglerWarnings:
    """`folder`: of the launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: tuple[Observation, ...] | None = None
        self._run = -1  # the oldest run in flight, when it was reported
        self._told_s = 0.0  # and its seconds until then

    def look(self, waited_s: float) -> None:
        """`waited_s`: seconds of the caller's wait so far."""
        if os.environ.get("DTENSOR_LATE_WARNINGS") == "0":
            return
        try:
            launch = LaunchSeen(self._folder)
        except FileNotFoundError:  # another thread has closed it: the wait will raise
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
