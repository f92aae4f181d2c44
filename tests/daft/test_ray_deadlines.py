"""Deadlines on Ray: who computes is not taken for one that hangs, and what answers nothing for one
that is slow."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import (
    ActorLost,
    Buffer,
    Call,
    Cluster,
    Collective,
    Function,
    Program,
    Wait,
    launch_cluster,
)
from tests.chaos.actors import wait_for_file
from tests.daft.programs import program
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

from dtensor.daft.ray.cluster import RayCluster
from dtensor.daft.ray.diagnosis import failure_detector

SUM = Buffer((1,), torch.float32)


def spin(path: str) -> None:
    """Compute until there is a file."""
    while not os.path.exists(path):
        pass


def go_on(path: str) -> None:
    pass


def held_up(by: Callable[[str], None]) -> Program:
    """Rank 1 is held up until there is a file; rank 0 waits for it."""
    acts = [
        Function(
            name=act.__name__,
            source="def forward(x, path):\n    act(path)\n    return (x + 1,)",
            bindings=(("act", act),),
        )
        for act in (go_on, by)
    ]
    add = Collective("all_reduce", (0, 1), ("y",), ("s",), (SUM,), (SUM,), "sum", "c")
    calls = [Call(a.name, ("x", "path"), ("y",), source=f"net.py:8: {a.name}(path)") for a in acts]
    return program(
        *[[call, add, Wait(("s",))] for call in calls],
        functions=acts,
        inputs=[("x", "path")] * 2,
        outputs=[("s", "y")] * 2,
    )


def run(cluster: Cluster, by: Callable[[str], None], file: Path) -> Any:
    fed: dict[str, object] = {"x": torch.ones(1), "path": str(file)}
    return cluster.run(cluster.load(held_up(by)), [fed, fed])


def held(cluster: Cluster) -> None:
    """Return when rank 1 is in its call and rank 0 waits for it; from now on nobody may stand still
    for more than a second."""
    assert isinstance(cluster, RayCluster)
    while [cluster.membership.host(h).counter.read().position for h in (0, 1)] != [2, 0]:
        time.sleep(0.01)
    cluster.watch.deadline_s = 1.0


@contextmanager
def clock_of(cluster: Cluster, host: int) -> Iterator[None]:
    """Within, the controller's clock goes as this host computes: else one that computes all the
    time seems to stand still with a machine that does."""
    assert isinstance(cluster, RayCluster)
    process, now = cluster.membership.host(host), time.monotonic()
    begun = process.cpu_s

    def monotonic() -> float:
        nonlocal now, begun
        used = process.cpu_s  # 0 when it has ended
        now, begun = now + max(0.0, used - begun), max(used, begun)
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure_detector, "time", SimpleNamespace(monotonic=monotonic))
        yield


@pytest.mark.ray
def test_a_rank_that_computes_is_left_to_it(ray_session: None, tmp_path: Path) -> None:
    with launch_cluster(2, backend="ray", deadline_s=120.0) as cluster, clock_of(cluster, 1):
        future = run(cluster, spin, tmp_path / "go")
        held(cluster)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not caught:
                with pytest.raises(TimeoutError):
                    future.get(timeout=0.3)
            cluster.watch.deadline_s = 120.0  # type: ignore[attr-defined]
            (tmp_path / "go").touch()
            assert future.get()[0]["s"].item() == 4.0
        (warning,) = caught
        where, line = str(warning.message).splitlines()
        assert where == (
            "rank 1 (stage 1), instruction 0 'y = call spin(x, path)', run 0: it has computed for "
            "more than 1 s, and may take up to 3600 s (call_deadline_s)."
        )
        assert line == "  at net.py:8: spin(path)"
        never = run(cluster, spin, tmp_path / "never")
        held(cluster)
        cluster.watch.call_deadline_s = 3.0  # type: ignore[attr-defined]
        with (
            pytest.warns(RuntimeWarning, match="may take up to 3 s"),
            pytest.raises(ActorLost, match="in one call for more than 3 s") as lost,
        ):
            never.get()
        assert (lost.value.failure.rank, lost.value.failure.line) == (1, "net.py:8: spin(path)")


@pytest.mark.ray
def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(
    ray_session: None, tmp_path: Path
) -> None:
    with launch_cluster(2, backend="ray", deadline_s=120.0) as cluster:
        never = run(cluster, wait_for_file, tmp_path / "never")
        held(cluster)
        with pytest.raises(ActorLost, match="no progress for more than 1 s") as lost:
            never.get()
        assert (lost.value.failure.rank, lost.value.failure.index) == (1, 0)


@pytest.mark.ray
def test_a_run_that_ends_as_the_deadline_passes(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller looks at the clock after the last call has come back."""
    from dtensor.daft.ray.channel.run_channel import NotYet, Reply, RunChannel

    with launch_cluster(1, backend="ray", deadline_s=120.0) as cluster:
        one = program([Call("one", (), ("y",))], functions=[ONE], outputs=[("y",)])
        future = cluster.run(cluster.load(one), [{}])
        assert isinstance(cluster, RayCluster)
        while not cluster.membership.host(0).counter.read().has_ended(0):
            time.sleep(0.01)
        cluster.watch.deadline_s = 1.0
        end, get = time.monotonic() + 3.0, RunChannel.get

        def late(self: RunChannel, replies: Sequence[Reply], seconds: float) -> list[Any]:
            if time.monotonic() < end:
                time.sleep(seconds)
                raise NotYet
            return get(self, replies, seconds)

        monkeypatch.setattr(RunChannel, "get", late)
        assert future.get() == [{"y": 1}]


ONE = Function(name="one", source="def forward():\n    return (1,)")


@pytest.mark.slow
def test_an_address_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    message = rf"(?s)No Ray answers at '{address}': .*refused.*Fix: .*leave out address="
    with (
        pytest.raises(ConnectionError, match=message),
        dt.launch(dt.Mesh(tp=2), backend="ray", address=address, deadline_s=0.5),
    ):
        pass
