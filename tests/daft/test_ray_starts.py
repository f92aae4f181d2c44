"""How long a Ray that starts is waited for, and that none of its processes is left when it ends."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from dtensor.daft.ray.bootstrap import private_ray, starting


class Raylet:
    """Plays the process: it dies at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else 1


def nodes_known(
    monkeypatch: pytest.MonkeyPatch, raylet: Raylet, at: int, patience_s: float
) -> tuple[Any, int]:
    """What Ray gets that asks once for its node, which is known at the n-th look, at one of which
    each second passes; and how many looks there were."""
    looks = 0

    def get_node(address: str, name: str) -> str:
        nonlocal looks
        looks += 1
        if looks < at:
            raise RuntimeError("no such node")
        return f"{name} at {address}"

    services = SimpleNamespace(
        get_node=get_node, start_raylet=lambda: SimpleNamespace(process=raylet)
    )
    clock = SimpleNamespace(monotonic=lambda: float(looks), sleep=lambda _: None)
    monkeypatch.setattr(private_ray, "_services", services)
    monkeypatch.setattr(private_ray, "time", clock)
    try:
        with private_ray.patience(patience_s):
            services.start_raylet()
            return services.get_node("here", "a"), looks
    except RuntimeError as error:
        return error, looks
    finally:
        assert services.get_node is get_node


def test_a_raylet_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_known(monkeypatch, Raylet(1000), 100, 180.0) == ("a at here", 100)


def test_not_for_ever_and_no_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    error, looks = nodes_known(monkeypatch, Raylet(1000), 1000, 180.0)
    assert isinstance(error, RuntimeError) and looks == 181
    error, looks = nodes_known(monkeypatch, Raylet(5), 1000, 180.0)
    assert isinstance(error, RuntimeError) and looks == 6


def test_a_process_that_ray_does_not_wait_for_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits a second for one that it has killed."""
    process = subprocess.Popen(["sleep", "1e6"])
    monkeypatch.setattr(private_ray, "own_processes", lambda: [process])
    monkeypatch.setattr(starting, "_ray", SimpleNamespace(shutdown=process.kill))
    monkeypatch.setattr(starting, "_read_token", lambda: None)
    starting.end_ray()
    assert process.returncode == -9


@pytest.mark.ray
@pytest.mark.slow
def test_those_of_a_real_one_are_known(ray_session: None) -> None:
    processes = private_ray.own_processes()
    assert len(processes) > 2 and all(process.poll() is None for process in processes)
