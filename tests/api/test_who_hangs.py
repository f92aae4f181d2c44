"""Diagnosis of hangs on Ray. `python -m tests.who_hangs` runs many such trials."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import dtensor as dt
from dtensor import daft
from dtensor.daft.diagnosis import diagnosis
from tests.chaos.actors import Layer, Pressed
from tests.extras import missing
from tests.who_hangs.trials import How, Trial, Trials, asked_elsewhere, named_elsewhere, training

pytest.importorskip("ray", reason=missing("ray"))


PATIENCE_S = 600.0
"""For the machine: a rank that it holds up may not wait yet, or computes and has no core."""


def settled(trials: Trials, how: How, rank: int, after: int) -> Trial:
    """Return the final status while the rank hangs."""
    end = time.monotonic() + PATIENCE_S
    with trials.hanging(how, rank, after):
        while True:
            trial = trials.ask(how, rank)
            if trial.right or time.monotonic() > end:
                return trial


def until(says: Callable[[], Sequence[Any]], words: str) -> Any:
    """Wait for the first message that contains these words, and return it."""
    end = time.monotonic() + PATIENCE_S
    while True:
        everything = says()
        for each in everything:
            if words in str(each):
                return each
        assert time.monotonic() < end, everything
        time.sleep(0.05)


@pytest.mark.ray
def test_status_names_rank_that_hangs_and_its_line(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "orders").mkdir()
    with training(folder) as trials:
        idle = dt.status()
        assert (idle.waited_for, idle.hangs) == (None, False)
        assert "the controller has called no rank since run 4 has ended" in idle.reason
        orders: tuple[tuple[How, int, int], ...] = (
            ("spin", 1, 3),
            ("sleep", 2, 7),
            ("hold", 0, 5),
            ("stop", 3, 2),
        )
        with monkeypatch.context() as patch:
            patch.setattr(diagnosis, "LEAST_S", math.inf)  # no run is late
            for how, rank, after in orders:
                trial = settled(trials, how, rank, after)
                assert trial.right, trial.status
                assert trial.status.hangs == (how == "stop")
        with trials.hanging("stop", 1, 0):
            until(lambda: [named_elsewhere()], "(1, 1)")
        with trials.hanging("sleep", 2, 4):
            x = trials.x
            waiting = threading.Thread(target=lambda: float(trials.step(x)))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monkeypatch.delenv("DTENSOR_LATE_WARNINGS")
                waiting.start()  # it runs two steps ahead, and this is the third
                said = "Rank 2 sleeps in a call; ranks 0, 1 and 3 wait"
                took = f"{said} for it. This takes too"
                told = until(lambda: [str(each.message) for each in caught], took)
                code, printed = until(lambda: [asked_elsewhere(str(os.getpid()))], said)
                (folder / str(trials.pids[2])).unlink()
                waiting.join()
            assert code == 1, printed
            assert ": return x + self.down(self.up(x).relu())" in told
        assert dt.status().waited_for is None


@pytest.mark.ray
def test_status_command_lists_spawned_actors(ray_session: None, tmp_path: Path) -> None:
    with pytest.raises(Pressed), daft.launch(backend="ray"):
        a = daft.spawn(Layer)
        begun = tmp_path / "begun"
        a.block(str(begun))
        while not begun.exists():
            time.sleep(0.01)
        code, printed = until(lambda: [asked_elsewhere(str(os.getpid()))], "0     sleeps")
        assert code == 0 and "1 process of spawned actors" in printed
        assert "The waits of spawned actors are not" in printed
        raise Pressed  # else leaving it waits for the method
