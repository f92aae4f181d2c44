"""Warns which rank hangs while a step takes too long: once per wait, and again as the wait doubles.

    warnings = StragglerWarnings(launch_folder)
    warnings.look(waited_s=6.0)        # whenever the controller polls for a result

A run is late if it takes 5 times as long as earlier runs of its program, and more than 5 s; a first
run after 15 s, or 60 s if the awaited rank computes (`diagnosis/diagnosis.py`). A stopped or lost
rank is reported after a wait of 5 s. With DTENSOR_LATE_WARNINGS=0 in the environment nothing is
checked. Until a run is late, a check only reads the counters, which takes 20 us a host.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from dtensor.daft.diagnosis.diagnosis import LEAST_S, limit_s
from dtensor.daft.diagnosis.observation import Observation
from dtensor.daft.ray.bootstrap.launch_folder import RunningLaunch


class StragglerWarnings:
    """The warnings of a launch. `folder`: the launch's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._previous_sample: tuple[Observation, ...] | None = None
        self._run = -1  # the oldest run in flight at the last warning
        self._warned_s = 0.0  # how long that run had taken then

    def look(self, waited_s: float) -> None:
        """Warn if a run is late. `waited_s`: how long the caller has waited so far."""
        if os.environ.get("DTENSOR_LATE_WARNINGS") == "0":
            return
        try:
            launch = RunningLaunch(self._folder)
        except FileNotFoundError:  # another thread has closed the launch, so the wait will raise
            return
        progress = launch.progress()
        running = [each for each in progress if each.position >= 0 and each.running_s is not None]
        longest_s = max((each.running_s or 0.0 for each in running), default=0.0)
        is_late = any((each.running_s or 0.0) > limit_s(each) for each in running)
        if not is_late and waited_s < LEAST_S:
            self._previous_sample = None
            return
        after = launch.look()
        before, self._previous_sample = self._previous_sample, after
        run = min((each.run for each in running), default=max(each.run for each in progress))
        if run != self._run:
            self._run, self._warned_s = run, 0.0
        longest_s = max(longest_s, waited_s)
        if before is None or longest_s < 2 * self._warned_s:
            return
        status = launch.between(before, after)
        if status.hangs:
            self._warned_s = longest_s
            warnings.warn(status.warning, RuntimeWarning, stacklevel=4)
