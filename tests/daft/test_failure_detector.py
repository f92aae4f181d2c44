"""Tests which host the failure detector ends if no host makes progress, with a simulated clock
and records of progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

from dtensor.daft import Buffer, Call, Collective, Program, Wait
from dtensor.daft.diagnosis.observation import Progress
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.errors import Failure
from dtensor.daft.ray.channel.processes import HostProcess, LaunchProcesses
from dtensor.daft.ray.diagnosis import failure_detector
from dtensor.daft.ray.diagnosis.failure_detector import AwaitedCall, FailureDetector
from dtensor.daft.verification.verifier import verify
from tests.daft.programs import function, program

DEADLINE_S = 10.0
RUN = 7
CALL, START, WAIT = 0, 1, 2


def chain() -> Program:
    """Return a program in which each of three ranks calls a function, then all reduce their
    values."""
    import torch

    one = Buffer((1,), torch.float32)
    total = Collective("all_reduce", (0, 1, 2), ("y",), ("s",), (one,), (one,), "sum", "c")
    return program(
        *[[Call("f", ("x",), ("y",)), total, Wait(("s",))]] * 3,
        functions=[function("f", "def forward(x):\n    return (x,)")],
        inputs=[("x",)] * 3,
        outputs=[("s", "y")] * 3,
    )


@dataclass(eq=False)
class Process:
    """What the failure detector observes of a process. `burns`: cores used; a place of None: not
    observed."""

    index: int
    at: Progress | None
    burns: float = 0.0
    stopped: bool = False
    counts: bool = True
    answered: bool = True
    gone: bool = False
    elsewhere: bool = False
    started: float = 0.0
    cpu_s: float = 0.0
    runnable_s: float = 0.0
    starves: bool = False  # it waits for a core nearly all the time
    counter: Any = field(init=False)

    def __post_init__(self) -> None:
        self.counter = SimpleNamespace(read=lambda: self.at or Progress(-1, -1, -1, None))

    def ended(self, patience_s: float = 0.0) -> None: ...
    def failure_detector(self) -> None: ...
    def kill(self) -> None: ...
    def end(self, grace_s: float) -> None: ...


class Cluster:
    """Three hosts with one rank each, all being waited for, and a clock."""

    def __init__(self, *places: Progress | None, **of_two: Any) -> None:
        self.now = 100.0
        self.lines = ProgramLines.of(made := chain(), verify(made).lists)
        self.processes = [Process(i, at) for i, at in enumerate(places)]
        self.processes[2] = replace(self.processes[2], **of_two)
        home = SimpleNamespace(
            processes=self.processes,
            folder=SimpleNamespace(path=Path("/nowhere")),
            check=lambda: None,
        )
        self.watch = FailureDetector(
            cast(Any, self),
            cast(LaunchProcesses, home),
            cast(Any, self),
            deadline_s=60.0,
            call_deadline_s=3600.0,
            due=self.due,
        )
        self.asked = [AwaitedCall(cast(HostProcess, each), each) for each in self.processes]

    # the interface that the failure detector uses
    def describe(self, host: int, progress: Progress, reason: str) -> Failure:
        return Failure(rank=host, reason=reason)

    def at_work(self, host: int, progress: Progress) -> bool:
        return progress.position <= CALL and progress.device is None

    def waits(self, progress_by_host: Mapping[int, Progress]) -> Mapping[int, Any]:
        from dtensor.daft.ray.cluster import RayCluster

        membership = SimpleNamespace(
            processes=self.processes, host=lambda host: self.processes[host], host_of=(0, 1, 2)
        )
        loaded = SimpleNamespace(lines={0: self.lines}.get)
        seen = SimpleNamespace(membership=membership, loaded=loaded)
        return RayCluster.waits(cast(RayCluster, seen), progress_by_host)

    def tell_of_loss(self, host: int) -> None: ...

    def due(self, asked: Sequence[AwaitedCall]) -> Mapping[int, int]:
        return {each.host.index: RUN for each in asked}

    def all_over(self, refs: Sequence[Any]) -> bool:
        return False

    def broken(self) -> Sequence[int]:
        return ()

    def pass_by(self, seconds: float) -> dict[int, str]:
        """Let time pass, looking as often as a waiting controller does. Return the hosts that were
        ended, and why."""
        for _ in range(int(4 * seconds)):
            self.now += 0.25
            for each in self.processes:
                each.cpu_s += 0.25 * each.burns
                each.runnable_s += 0.24 * each.starves
            self.watch.look(self.asked, DEADLINE_S)
            if self.watch.lost:
                break
        return {host: str(error) for host, error in self.watch.lost.items()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a cluster; the detector uses the clock of the last one."""
    clusters: list[Cluster] = []
    clock = SimpleNamespace(monotonic=lambda: clusters[-1].now if clusters else 0.0)
    monkeypatch.setattr(failure_detector, "time", clock)

    def make(*places: Progress | None, **of_two: Any) -> Cluster:
        clusters.append(Cluster(*places, **of_two))
        return clusters[-1]

    return make


def at(position: int, run: int = RUN, **what: Any) -> Progress:
    return Progress(position, 0 if position >= 0 else -1, run, 0.1, 100, 100, **what)


def silent(seconds: float) -> Progress:
    """Return a place whose last heartbeat is this old."""
    return replace(at(CALL), beat_s=seconds)


def test_host_without_heartbeat_is_ended_as_stopped(made: Any) -> None:
    """No signal stopped it: it may be in a debugger, or its machine may be gone."""
    cluster = made(at(WAIT), at(WAIT), silent(failure_detector.SILENT_S))
    cluster.watch.deadline_s = 1.0
    assert cluster.pass_by(4.0) == {}  # a heartbeat may be late
    cluster.processes[2].at = silent(failure_detector.SILENT_S + 1)
    ((host, why),) = cluster.pass_by(1.0).items()
    assert host == 2 and "the process has stopped: no heartbeat for 6.0 s" in why


@pytest.mark.parametrize("of_two", [dict(burns=0.1), dict(starves=True)])
def test_computing_host_with_late_heartbeat_is_not_ended(made: Any, of_two: Any) -> None:
    cluster = made(at(WAIT), at(WAIT), silent(1.0), **of_two)
    with pytest.warns(RuntimeWarning, match="it has computed for more than 60 s"):
        assert cluster.pass_by(90.0) == {}
    cluster.processes[2].at = silent(90.0)
    assert cluster.pass_by(90.0) == {}


def meets(rank: int | None = None) -> Progress:
    """Return a place between runs, at which a host waits for a rank to join."""
    return at(-1, run=-1, peer=rank)


SLEEPING = [
    (at(WAIT), at(WAIT), at(CALL)),
    (at(WAIT), at(WAIT), at(START)),  # starting, which does not end by itself either
    (at(WAIT), at(WAIT), at(-1, run=RUN - 1)),  # it has not started the run
    (meets(2), meets(2), meets()),  # it has not joined the meeting
    (meets(1), meets(2), meets()),
    (meets(2), at(WAIT), meets()),
]


@pytest.mark.parametrize("places", SLEEPING)
def test_host_that_others_wait_for_is_ended(made: Any, places: Any) -> None:
    cluster = made(*places)
    assert cluster.pass_by(DEADLINE_S - 0.5) == {}
    ((host, why),) = cluster.pass_by(2.0).items()
    assert host == 2 and "no progress for more than 10 s, though it is alive" in why


@pytest.mark.parametrize("places", SLEEPING)
def test_no_host_is_ended_while_blocking_host_computes(made: Any, places: Any) -> None:
    """The host uses a tenth of a core, as on a busy machine: it may be importing or loading a
    program."""
    if places[2].position == START:
        pytest.skip("a start does not compute for long")
    cluster = made(*places, burns=0.1)
    told = pytest.warns(RuntimeWarning, match="it has computed for more than 60 s")
    with told if places[2].position == CALL else nullcontext():
        assert cluster.pass_by(20 * DEADLINE_S) == {}
    cluster.processes[2].burns = 0.0
    assert list(cluster.pass_by(3 * DEADLINE_S)) == [2]


def test_host_starved_of_cpu_is_not_ended(made: Any) -> None:
    cluster = made(meets(2), meets(2), meets(), starves=True)
    assert cluster.pass_by(20 * DEADLINE_S) == {}


def test_cpu_time_of_waiting_host_does_not_hide_hang(made: Any) -> None:
    cluster = made(meets(2), meets(2), meets())
    cluster.processes[0].burns = 0.3  # it polls for the others
    assert list(cluster.pass_by(2 * DEADLINE_S)) == [2]


def test_stopped_host_is_ended_rather_than_host_in_call(made: Any) -> None:
    cluster = made(at(CALL), at(WAIT), at(WAIT), stopped=True)
    ((host, why),) = cluster.pass_by(2 * DEADLINE_S).items()
    assert host == 2 and "has stopped: no progress" in why


def test_unobserved_host_on_other_machine_is_ended_if_all_others_wait(made: Any) -> None:
    """If an observed host is in a call, that host is ended instead."""
    cluster = made(at(WAIT), at(WAIT), None, elsewhere=True)
    assert list(cluster.pass_by(2 * DEADLINE_S)) == [2]
    cluster = made(at(WAIT), at(CALL), None, elsewhere=True)  # rank 1 is observed
    assert list(cluster.pass_by(2 * DEADLINE_S)) == [1]


def test_host_that_ended_run_without_sending_message_is_ended(made: Any) -> None:
    """Two hosts have ended the run; the waits name which of them is missing."""
    cluster = made(at(WAIT, peer=2), at(WAIT, peer=2), at(-1))
    assert list(cluster.pass_by(2 * DEADLINE_S)) == [2]


def test_host_that_waits_for_replaced_process_is_ended(made: Any) -> None:
    """The replacement takes no part in the run, and has answered."""
    cluster = made(at(WAIT), at(WAIT), meets())
    cluster.asked.pop()
    ((host, why),) = cluster.pass_by(2 * DEADLINE_S).items()
    assert host == 0 and "it waits for a process that is gone, and was not told" in why


def test_progress_of_one_host_restarts_deadline_of_all(made: Any) -> None:
    cluster = made(at(WAIT), at(WAIT), at(CALL))
    for run in range(RUN - 5, RUN):
        cluster.processes[2].at = at(CALL, run=run)
        assert cluster.pass_by(DEADLINE_S - 1.0) == {}


def on_gpu(position: int | None, run: int = RUN) -> Progress:
    """Return a place in a call that reads a value of its GPU. The GPU waits at a position, or
    computes (None)."""
    return at(CALL, device=None if position is None else (0, run, position))


def test_spinning_host_whose_gpu_waits_does_not_count_as_computing(made: Any) -> None:
    """Ranks 0 and 1 wait for rank 2, whose process does nothing."""
    from dtensor.daft.ray.cluster import RayCluster

    assert not RayCluster.at_work(cast(RayCluster, None), 0, on_gpu(WAIT))
    cluster = made(on_gpu(WAIT), on_gpu(WAIT), at(START))
    cluster.processes[0].burns = cluster.processes[1].burns = 1.0
    assert cluster.pass_by(DEADLINE_S - 0.5) == {}
    ((host, why),) = cluster.pass_by(2.0).items()
    assert host == 2 and "no progress for more than 10 s, though it is alive" in why


def test_computing_gpu_is_not_ended(made: Any) -> None:
    cluster = made(on_gpu(WAIT), on_gpu(WAIT), on_gpu(None), burns=1.0)
    cluster.processes[0].burns = cluster.processes[1].burns = 1.0
    with pytest.warns(RuntimeWarning, match="it has computed for more than 60 s"):
        assert cluster.pass_by(20 * DEADLINE_S) == {}


def test_progress_of_gpu_counts_as_progress_of_its_host(made: Any) -> None:
    """The host stays in one call, and all other hosts have ended the run."""
    cluster = made(at(-1, run=RUN), at(-1, run=RUN), on_gpu(WAIT), burns=1.0)
    for run in range(6):
        cluster.processes[2].at = on_gpu(WAIT, run)
        assert cluster.pass_by(DEADLINE_S - 1.0) == {}
