"""Tests replacement of lost ranks on Ray: the user sees a delay, and the same numbers."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor.daft import (
    ActorLost,
    Call,
    Collective,
    CommunicationError,
    Free,
    Program,
    TaskError,
    Wait,
    launch_cluster,
)
from dtensor.daft.ir.instructions import Buffer
from dtensor.daft.ray.bootstrap import user_folder
from dtensor.daft.ray.bootstrap.user_folder import OwnFolder
from dtensor.daft.ray.cluster import RayCluster
from dtensor.daft.ray.recovery.recovery import Recovering
from tests.chaos.watch import running
from tests.daft.programs import function, pipeline, precisions, program
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = pytest.mark.ray

SUM = (Buffer((4,), torch.float32),)


@contextmanager
def launched(size: int = 2, **options: Any) -> Iterator[RayCluster]:
    options = dict(spares=1, snapshot_every=1) | options
    with warnings.catch_warnings(), launch_cluster(size, backend="ray", **options) as cluster:
        warnings.simplefilter("ignore", RuntimeWarning)
        assert isinstance(cluster, RayCluster)
        while not cluster.membership.ready:
            time.sleep(0.05)
        yield cluster


def lose(cluster: RayCluster, host: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(cluster.membership.host(host).counter.pid, how)


def counting(size: int = 2) -> Program:
    """Return a program in which each rank adds the sum of all ranks' `x` to its `n` and returns
    it."""
    adds = function("add", "def forward(s, n):\n    n.add_(s)\n    return (n.clone(),)")
    add = Collective("all_reduce", tuple(range(size)), ("x",), ("s",), SUM, SUM, "sum", "c")
    own = [add, Wait(("s",)), Call("add", ("s", "n"), ("y",), writes=("n",)), Free(("s",))]
    return program(
        *[own] * size,
        functions=[adds],
        inputs=[("x",)] * size,
        outputs=[("y",)] * size,
        state=[("n",)] * size,
    )


def fed(value: float, size: int = 2) -> list[dict[str, object]]:
    return [{"x": torch.full((4,), value)} for _ in range(size)]


def zeros(size: int = 2) -> list[dict[str, object]]:
    return [{"n": torch.zeros(4)} for _ in range(size)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("spares", [0, 1])
def test_lost_rank_is_replaced_and_results_are_unchanged(
    ray_session: None, spares: int, how: signal.Signals
) -> None:
    with launched(spares=spares) as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == 2.0
        lose(cluster, 1, how)
        futures = [cluster.run(handle, fed(k)) for k in (10.0, 100.0)]
        with pytest.warns(RuntimeWarning, match="recovered in") as told:
            assert [f.get()[1]["y"][0].item() for f in futures] == [22.0, 222.0]
        assert len(told) == 1 and "rank 1" in str(told[0].message)
        (found,) = cluster.recoveries
        assert found.ranks == (1,) and found.by == (("a spare",) if spares else ("a new process",))
        assert [n[0][0].item() for n in cluster.get([("n",)] * 2).get()] == [222.0, 222.0]
        cluster.unload(handle)


def test_replacement_rank_uses_matmul_precision_of_controller(ray_session: None) -> None:
    before = torch.get_float32_matmul_precision()
    with launched() as cluster:
        handle = cluster.load(precisions(2))
        given: list[dict[str, object]] = [{"x": torch.ones(())}] * 2
        try:
            torch.set_float32_matmul_precision("high")
            assert cluster.run(handle, given).get()[1]["y"] == 1.0
            lose(cluster, 1)
            late = cluster.run(handle, given)
            torch.set_float32_matmul_precision("highest")
            assert [rank["y"] for rank in late.get()] == [1.0, 1.0]
            assert [rank["y"] for rank in cluster.run(handle, given).get()] == [0.0, 0.0]
        finally:
            torch.set_float32_matmul_precision(before)
        assert [found.ranks for found in cluster.recoveries] == [(1,)]


def test_all_ranks_lost_repeatedly_are_replaced(ray_session: None) -> None:
    with launched() as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        total = 0.0
        for times in range(2):
            cluster.run(handle, fed(1.0)).get()
            for host in range(2):
                lose(cluster, host)
            total += 4.0
            assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == total, times
        assert sum(len(found.ranks) for found in cluster.recoveries) == 4


def test_rank_lost_during_replacement_of_another_is_replaced(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(spares=0) as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        cluster.run(handle, fed(1.0)).get()
        lose(cluster, 1)
        replace = cluster.membership.replace

        def loses_another(host: int, places: Sequence[str]) -> Any:
            found = replace(host, places)  # the replacement is still starting
            if host == 1:
                lose(cluster, 0)
            return found

        monkeypatch.setattr(cluster.membership, "replace", loses_another)
        assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == 4.0
        assert cluster.run(handle, fed(1.0)).get()[1]["y"][0] == 6.0
        assert sorted(r for found in cluster.recoveries for r in found.ranks) == [0, 1]


def test_loss_beyond_max_restarts_raises(ray_session: None) -> None:
    with launched(max_restarts=1) as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        lose(cluster, 0)
        assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == 2.0
        lose(cluster, 0)
        with pytest.raises(ActorLost, match="the process died") as caught:
            cluster.run(handle, fed(1.0)).get()
        assert "max_restarts" in caught.value.__notes__[0]
        pids = [host.counter.pid for host in cluster._launch.processes if host.counts]
        assert not any(map(running, pids))


def test_successful_run_that_fails_when_repeated_raises(ray_session: None, tmp_path: Path) -> None:
    """The results that were read are no longer valid, so the cluster raises instead of returning
    other numbers."""
    (tmp_path / "n").write_text("5")
    reads = function("read", "def forward():\n    return (read(),)", read=Reading(tmp_path / "n"))
    with launched(snapshot_every=50) as cluster:
        cluster.put(zeros())
        own = [Call("read", (), ("n",), source="net.py:8: read()")]
        handle = cluster.load(program(own, own, functions=[reads], state=[("n",)] * 2))
        cluster.run(handle, [{}] * 2).get()
        (tmp_path / "n").unlink()
        lose(cluster, 1)
        with pytest.raises(CommunicationError, match=r"had succeeded was repeated") as caught:
            cluster.get([("n",)] * 2).get()
        assert "net.py:8" in str(caught.value) and "FileNotFoundError" in str(caught.value)


class Reading:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> torch.Tensor:
        return torch.full((4,), float(self.path.read_text()))


def test_run_that_kills_each_process_is_not_repeated_forever(ray_session: None) -> None:
    dies = function("die", "def forward(x):\n    exit(1)\n    return (x,)", exit=os._exit)
    own = [Call("die", ("x",), ("y",), source="net.py:8: die(x)")]
    made = program(own, own, functions=[dies], inputs=[("x",)] * 2, outputs=[("y",)] * 2)
    with launched() as cluster:
        handle = cluster.load(made)
        with pytest.raises(ActorLost, match=r"net.py:8") as caught:
            cluster.run(handle, fed(1.0)).get()
        assert "was started" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("size", "every"), [(1, 1), (2, 3)])
def test_ranks_with_infrequent_snapshots_recover(ray_session: None, size: int, every: int) -> None:
    with launched(size, snapshot_every=every) as cluster:
        cluster.put(zeros(size))
        handle = cluster.load(counting(size) if size > 1 else alone())
        for number in range(1, 9):
            future = cluster.run(handle, fed(1.0, size))
            if number in (2, 5, 7):
                lose(cluster, size - 1)
            assert future.get()[0]["y"][0] == size * number
        assert [found.ranks for found in cluster.recoveries] == [(size - 1,)] * 3


def alone() -> Program:
    add = function("add", "def forward(x, n):\n    n.add_(x)\n    return (n.clone(),)")
    own = [Call("add", ("x", "n"), ("y",), writes=("n",))]
    return program(own, functions=[add], inputs=[("x",)], outputs=[("y",)], state=[("n",)])


def test_loss_noticed_while_sending_puts_is_recovered(ray_session: None) -> None:
    """The puts are repeated."""
    with launched() as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        cluster.run(handle, fed(1.0)).get()
        lose(cluster, 0)
        while not cluster.recoveries:
            cluster.put([{"m": torch.ones(1)}, {}])
        cluster.put([{"n": torch.full((4,), 5.0)}, {}])
        assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == 7.0
        assert cluster.get([("m",), ()]).get()[0] == (torch.ones(1),)


def test_undone_runs_are_counted_across_loss(ray_session: None) -> None:
    """A call raises in one run before the loss and in one after it; both runs are undone."""
    with launched() as cluster:
        cluster.put(zeros())
        handle = cluster.load(counting())
        check = function("check", "def forward(x):\n    1 / x[0].item()\n    return (x,)")
        own = [Call("check", ("x",), ("y",))]
        checks = cluster.load(
            program(own, own, functions=[check], inputs=[("x",)] * 2, outputs=[("y",)] * 2)
        )
        cluster.run(handle, fed(1.0)).get()
        failing = cluster.run(checks, fed(0.0))
        lose(cluster, 1)
        again = cluster.run(checks, fed(0.0))
        with pytest.raises(TaskError, match="ZeroDivisionError"):
            again.get()
        with pytest.raises(TaskError, match="ZeroDivisionError"):
            failing.get()
        assert cluster.run(handle, fed(1.0)).get()[0]["y"][0] == 4.0


def test_call_that_raises_after_writes_undoes_its_run_on_all_ranks(ray_session: None) -> None:
    """Other runs are under way. After a loss the undone run is not repeated."""
    adds = function("add", "def forward(s, n):\n    n.add_(s)\n    return (n.clone(),)")
    check = function("check", "def forward(x):\n    1 / x[0].item()\n    return (x,)")
    add = Collective("all_reduce", (0, 1), ("x",), ("s",), SUM, SUM, "sum", "c")
    own = [
        *(add, Wait(("s",)), Call("add", ("s", "n"), ("y",), writes=("n",)), Free(("s",))),
        *(Call("check", ("x",), ("z",), source="net.py:8: check(x)"), Free(("z",))),
    ]
    made = program(
        *(own, own),
        functions=[adds, check],
        inputs=[("x",)] * 2,
        outputs=[("y",)] * 2,
        state=[("n",)] * 2,
    )
    with launched() as cluster:
        cluster.put(zeros())
        handle = cluster.load(made)
        failing: list[dict[str, object]] = [{"x": torch.zeros(4)}, {"x": torch.full((4,), 5.0)}]
        futures = [cluster.run(handle, x) for x in (fed(1.0), failing, fed(1.0))]
        with pytest.raises(TaskError, match=r"rank 0.*run 1: ZeroDivisionError") as caught:
            futures[1].get()
        assert "net.py:8" in str(caught.value) and not cluster.recoveries
        lose(cluster, 1)
        futures.append(cluster.run(handle, fed(1.0)))
        found = [futures[n].get()[1]["y"][0].item() for n in (0, 2, 3)]
        assert found == [2.0, 4.0, 6.0]
        assert [n[0][0].item() for n in cluster.get([("n",)] * 2).get()] == [6.0, 6.0]
        with pytest.raises(TaskError, match="ZeroDivisionError"):
            futures[1].get()


def test_loss_during_waited_put_is_recovered(ray_session: None) -> None:
    """The values are sent in place; those that may have to be resent are copied before the put
    returns."""
    with launched(snapshot_every=3) as cluster:
        handle = cluster.load(counting())
        cluster.put(zeros())
        cluster.run(handle, fed(1.0)).get()
        large = [torch.full((1 << 20,), float(rank)) for rank in range(2)]
        cluster.put([{"w": value} for value in large], wait=True)
        assert [w[0].item() for (w,) in cluster.get([("w",)] * 2).get()] == [0.0, 1.0]
        assert cluster._recovery is not None
        calls = list(cluster.log.calls)
        assert all(not call.message.lent for call in calls)
        for value in large:
            value.fill_(7.0)
        lose(cluster, 1)
        cluster.run(handle, fed(1.0)).get()
        assert [w[-1].item() for (w,) in cluster.get([("w",)] * 2).get()] == [0.0, 1.0]
        lost = [torch.full((1 << 22,), 3.0) for _ in range(2)]
        lose(cluster, 0)
        cluster.put([{"w": value} for value in lost], wait=True)  # the loss is noticed here
        assert [w[-1].item() for (w,) in cluster.get([("w",)] * 2).get()] == [3.0, 3.0]
        assert len(cluster.recoveries) == 2


def test_pipeline_that_runs_ahead_recovers_lost_rank(ray_session: None) -> None:
    with launched(3) as cluster:
        cluster.put([{"w": torch.full((4,), 10.0**r), "n": torch.zeros(())} for r in range(3)])
        handle = cluster.load(pipeline(3))
        futures = []
        for k in range(6):
            futures.append(cluster.run(handle, [{"x": torch.full((4,), float(k))}, {}, {}]))
            if k == 2:
                lose(cluster, 1)
        found = [f.get()[2]["y"][0].item() for f in futures]
        assert found == [111.0 + k for k in range(6)]
        assert cluster.get([("n",)] * 3).get() == [(torch.tensor(6.0),)] * 3


def test_interrupt_during_replacement_frees_snapshots_and_does_not_hang(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(spares=0) as cluster:
        kept = cluster._launch.snapshots
        assert kept.parent == Path("/dev/shm") and os.listdir(kept)
        cluster.put(zeros())
        handle = cluster.load(counting())
        cluster.run(handle, fed(1.0)).get()
        lose(cluster, 1)
        replace = cluster.membership.replace

        def interrupted(host: int, places: Sequence[str]) -> Any:
            replace(host, places)
            raise KeyboardInterrupt  # also where the shell has this process ignore the signal

        monkeypatch.setattr(cluster.membership, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(handle, fed(1.0)).get()
        with pytest.raises(Exception, match="interrupted"):
            cluster.run(handle, fed(1.0))
    assert not kept.exists()


def test_snapshot_folder_of_dead_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_folder, "MEMORY", tmp_path)  # a folder that other tests do not clean
    with OwnFolder.in_memory() as own:
        there, said = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(said, bytes(OwnFolder.in_memory().path))
            os._exit(0)  # as if it had been killed
        os.waitpid(pid, 0)
        left = Path(os.read(there, 1000).decode())
        os.close(there)
        os.close(said)
        assert left.exists() and left.parent == own.path.parent
        with OwnFolder.in_memory():
            assert own.path.exists() and not left.exists()
    assert not own.path.exists()


def test_recovery_depends_on_few_attributes_of_cluster() -> None:
    """Each further attribute would tie recovery more closely to the cluster."""
    named = {*Recovering.__annotations__, *vars(Recovering)}
    needed = {name for name in named if not name.startswith("_")}
    assert len(needed) <= 8, sorted(needed)
