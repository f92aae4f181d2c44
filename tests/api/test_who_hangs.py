"""Who hangs, on Ray: `python -m tests.who_hangs` does the same many times over."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import pytest

import dtensor as dt
from dtensor import daft
from tests.chaos.actors import Layer, Pressed
from tests.who_hangs.trials import How, asked_elsewhere, named_elsewhere, training

pytest.importorskip("ray")


@pytest.mark.ray
def test_the_rank_that_hangs_is_named(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "orders").mkdir()
    with training(folder) as trials:
        idle = dt.status()
        assert (idle.waited_for, idle.hangs) == (None, False)
        assert "asked for nothing since run 4 has ended" in idle.reason
        orders: tuple[tuple[How, int, int], ...] = (
            ("spin", 1, 3),
            ("sleep", 2, 7),
            ("hold", 0, 5),
            ("stop", 3, 2),
        )
        for how, rank, after in orders:
            trial = trials.hang(how, rank, after)
            assert trial.right, trial.status
            assert not trial.status.hangs or how == "stop"
        with trials.hanging("stop", 1, 0):
            assert named_elsewhere() == (1, 1)
        with trials.hanging("sleep", 2, 4):
            x = trials.x
            waiting = threading.Thread(target=lambda: float(trials.step(x)))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monkeypatch.delenv("DTENSOR_LATE_WARNINGS")
                waiting.start()  # it runs two steps ahead, and this is the third
                while not caught:
                    time.sleep(0.05)
                code, printed = asked_elsewhere(str(os.getpid()))
                (folder / str(trials.pids[2])).unlink()
                waiting.join()
            assert code == 1 and "Rank 2 sleeps in a call; ranks 0, 1 and 3 wait" in printed
            text = str(caught[0].message)
            assert "Rank 2 sleeps in a call; ranks 0, 1 and 3 wait for it. This takes too" in text
            assert ": return x + self.down(self.up(x).relu())" in text
        assert dt.status().waited_for is None


@pytest.mark.ray
def test_actors_that_were_spawned_are_seen(ray_session: None, tmp_path: Path) -> None:
    with pytest.raises(Pressed), daft.launch(backend="ray"):
        a = daft.spawn(Layer)
        begun = tmp_path / "begun"
        a.block(str(begun))
        while not begun.exists():
            time.sleep(0.01)
        code, printed = asked_elsewhere(str(os.getpid()))
        assert code == 0 and "1 process of spawned actors" in printed
        assert "0     sleeps" in printed and "For whom spawned actors wait is not" in printed
        raise Pressed  # else leaving it waits for the method
