"""Tests a Ray that a launch starts itself in a separate process and that stays for the next
launch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.chaos.watch import running
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def found(case: str, status: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.daft.local_ray", case],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hosts_of_reused_ray_start_in_clean_state() -> None:
    assert found("as_new") == {
        "same Ray": True,
        "another process": True,
        "differences": {"spoilt": [], "failed": [], "not forked": []},
        "alike drawn": False,
        "not kept": True,
    }


def test_unsuitable_local_ray_is_replaced() -> None:
    assert found("replaced") == {
        "another environment": True,
        "stopped": True,
        "a host was lost": True,
        "idle": True,
        "after it": True,
    }


def test_forked_process_does_not_use_or_end_local_ray() -> None:
    assert found("forked") == {"in the fork": "None", "goes on": True}


def test_failed_start_of_local_ray_is_reported() -> None:
    words = "RuntimeError: Ray could not be started on this machine: FileNotFoundError"
    said = found("fails")
    assert said.pop("after it")
    assert sorted(said) == ["at the call", "at the end"]
    assert all(text.startswith(words) for text in said.values())


def test_ctrl_c_during_start_of_local_ray_leaves_no_process() -> None:
    assert found("interrupted") == {"caught": "KeyboardInterrupt", "left": []}


@pytest.mark.parametrize(
    ("case", "status"), [("at_exit", 0), ("killed", -9), ("killed_while_it_starts", -9)]
)
def test_local_ray_ends_with_its_process(case: str, status: int) -> None:
    said = found(case, status)
    assert len(said["processes"]) >= 3 and not said.get("in Ray", False)
    end = time.monotonic() + 60.0
    while any(map(running, said["processes"])) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [each for each in said["processes"] if running(each)]
