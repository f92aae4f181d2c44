"""The Ray backend: the same bits as in-process, one call per actor, and every sort of failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dtensor.daft import (
    ActorLost,
    Call,
    Cluster,
    Collective,
    CommunicationError,
    Function,
    Label,
    Program,
    ProgramError,
    TaskError,
    Wait,
    launch_cluster,
)
from dtensor.daft.ir.instructions import Buffer
from dtensor.daft.ray.channel.run_channel import NotYet, RunChannel
from dtensor.daft.ray.cluster import RayCluster
from dtensor.daft.ray.diagnosis import failure_detector
from dtensor.daft.ray.diagnosis.failure_detector import FailureDetector
from dtensor.daft.ray.transports.connect import check_routes
from tests.chaos.actors import wait_for_file
from tests.chaos.watch import running
from tests.daft.programs import Collectives, function, pipeline, precisions, program, same_bits
from tests.daft.test_several_programs import run_alternately, submit_from_threads
from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))
pytestmark = pytest.mark.ray

NEVER_S = 3600.0
"""A deadline that no test lives to see: a failure that is found was found by what happened."""


@pytest.fixture(scope="module")
def three(ray_session: None) -> Iterator[Cluster]:
    with launch_cluster(3, backend="ray", deadline_s=120.0) as cluster:
        yield cluster


def test_every_collective_gives_the_bits_of_inprocess(three: Cluster) -> None:
    case = Collectives(3)
    with launch_cluster(3) as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    handle = three.load(case.program())
    before = three.calls
    compiled = three.run(handle, case.fed).get()
    assert three.calls - before == 3
    for rank in range(3):
        for name, value in expected[rank].items():
            assert same_bits(compiled[rank][name], value), (rank, name)
    three.unload(handle)


def test_interpreted_is_compiled(three: Cluster) -> None:
    case = Collectives(3, large=30_000)
    handle = three.load(case.program())
    compiled = three.run(handle, case.fed).get()
    interpreted = three.run(handle, case.fed, mode="interpreted").get()
    for rank in range(3):
        for name, value in compiled[rank].items():
            assert same_bits(interpreted[rank][name], value), (rank, name)


def test_runs_ahead_with_state(three: Cluster) -> None:
    three.put([{"w": torch.full((4,), 10.0**rank), "n": torch.zeros(())} for rank in range(3)])
    handle = three.load(pipeline(3))
    before = three.calls
    futures = [three.run(handle, [{"x": torch.full((4,), k)}, {}, {}]) for k in (0.0, 1.0, 2.0)]
    assert three.calls - before == 9
    assert [f.get()[2]["y"][0].item() for f in futures] == [111, 112, 113]
    assert all(f.done() for f in futures)
    assert three.get([("n",)] * 3).get() == [(torch.tensor(3.0),)] * 3
    with pytest.raises(LookupError, match="Rank 1 has no value 'nothing'"):
        three.get([(), ("nothing",), ()]).get()
    three.delete([("w", "n")] * 3)


def test_a_time_out_does_not_consume_a_future(three: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    source = "def forward():\n    wait_for_file(go)\n    return (7,)"
    wait = function("wait", source, wait_for_file=wait_for_file, go=str(go))
    made = program(*[[Call("wait", (), ("y",))]] * 3, functions=[wait], outputs=[("y",)] * 3)
    future = three.run(three.load(made), [{}] * 3)
    with pytest.raises(TimeoutError, match="ask again"):
        future.get(timeout=0.05)
    assert not future.done()
    go.touch()
    assert future.get() == future.get() == [{"y": 7}] * 3


def test_several_programs_run_ahead_on_the_same_channels(three: Cluster) -> None:
    run_alternately(three)


def test_threads_submit_in_one_order(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RayCluster._call

    def slowly(self: RayCluster, *args: object) -> object:
        time.sleep(0.02)  # so that threads take turns between the calls of one run
        return call(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RayCluster, "_call", slowly)
    submit_from_threads(three)


@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_kernels_on_hosts_obey_what_the_controllers_do(three: Cluster, mode: Any) -> None:
    handle = three.load(precisions(3))
    found: list[list[float]] = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            made = three.run(handle, [{"x": torch.ones(())}] * 3, mode=mode)
            torch.set_float32_matmul_precision(before)  # it was asked for before this
            found.append([rank["y"].item() for rank in made.get()])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_an_interrupt_between_the_calls_of_a_run(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some actors have the run and others have not: what they wait for will not come."""
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 2)
        handle = cluster.load(pipeline(2))
        fed: list[dict[str, object]] = [{"x": torch.zeros(4)}, {}]
        before = cluster.run(handle, fed)
        call, calls = RayCluster._call, cluster.calls

        def interrupted(self: RayCluster, *args: object) -> object:
            if self.calls == calls + 1:
                raise KeyboardInterrupt
            return call(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(RayCluster, "_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(handle, fed)
        assert before.get()[1]["y"].tolist() == [2.0] * 4
        with pytest.raises(CommunicationError, match="it was interrupted while state changed"):
            cluster.run(handle, fed)


def test_ranks_that_share_an_actor(ray_session: None) -> None:
    with launch_cluster(4, backend="ray", ranks_per_actor=2, seed=3) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 4)
        handle = cluster.load(pipeline(4))
        before = cluster.calls
        result = cluster.run(handle, [{"x": torch.zeros(4)}, {}, {}, {}]).get()
        assert cluster.calls - before == 2
        assert result[3]["y"].tolist() == [4.0] * 4
        buffer = Buffer((1,), torch.float32)
        mixed = program(
            *[
                [
                    Collective("broadcast", (0, 1, 2), ins, ("y",), bs, (buffer,), None, "c"),
                    Wait(("y",)),
                ]
                for ins, bs in ((("x",), (buffer,)), ((), ()), ((), ()))
            ],
            [],
            inputs=[("x",), (), (), ()],
            outputs=[("y",)] * 3 + [()],
        )
        with pytest.raises(ProgramError, match="share an actor"):
            cluster.load(mixed)


def test_actors_of_one_host_share_memory(three: Cluster) -> None:
    """What crosses goes through it: its pages are there."""
    count = function("count", "def forward(x):\n    return (count(),)", count=_shared_pages)
    large = Buffer((1 << 18,), torch.float32)
    sums = Collective("all_reduce", (0, 1, 2), ("x",), ("y",), (large,), (large,), "sum", "large")
    made = program(
        *[[sums, Wait(("y",)), Call("count", ("x",), ("n",))]] * 3,
        functions=[count],
        inputs=[("x",)] * 3,
        outputs=[("y", "n")] * 3,
    )
    fed = [{"x": torch.full((1 << 18,), 10.0**rank)} for rank in range(3)]
    handle = three.load(made)
    found = three.run(handle, fed).get()
    assert all(torch.equal(each["y"], torch.full((1 << 18,), 111.0)) for each in found)
    # at least its own slot, and where the sum was folded together
    assert all(each["n"] >= 2 << 20 for each in found), [each["n"] for each in found]
    three.unload(handle)


def _shared_pages() -> int:
    """Bytes of memory of other processes, or shared with them, that this one has touched."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = "memfd:dtensor" in line
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_routes() -> None:
    keys = check_routes(pipeline(4), (0, 0, 1, 1))
    assert keys == [((1, 2), "fwd", "transfer")]


# -- failures -------------------------------------------------------------------------------------

SUM = Buffer((1,), torch.float32)


def _fragile() -> Program:
    """Rank 1 calls `act`; both then add up its result."""
    act = Function(
        name="act",
        source="def forward(x, what):\n    act(what)\n    return (x + 1,)",
        bindings=(("act", _act),),
        lines=(None, "net.py:8: act(what)", None),
    )
    add = Collective("all_reduce", (0, 1), ("y",), ("s",), (SUM,), (SUM,), "sum", "c")
    return program(
        *[
            [Call("act", ("x", "what"), ("y",), label=Label(f"F{r}")), add, Wait(("s",))]
            for r in (0, 1)
        ],
        functions=[act],
        inputs=[("x", "what")] * 2,
        outputs=[("s", "y")] * 2,
    )


def _act(what: str) -> None:
    match what:
        case "raise":
            raise ZeroDivisionError("on purpose")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def _feed(what: str = "") -> list[dict[str, object]]:
    return [{"x": torch.ones(1), "what": w} for w in ("", what)]


def _pids(cluster: Cluster) -> list[int]:
    getpid = function("getpid", "def forward():\n    return (getpid(),)", getpid=os.getpid)
    made = program(*[[Call("getpid", (), ("y",))]] * 2, functions=[getpid], outputs=[("y",)] * 2)
    return [result["y"] for result in cluster.run(cluster.load(made), [{}, {}]).get()]


def _check_failed(cluster: Cluster, error: Exception, pids: list[int]) -> None:
    """Everything after raises the same, and nothing is left running."""
    for again in (lambda: cluster.put([{}, {}]), lambda: cluster.get([(), ()])):
        with pytest.raises(type(error)) as later:
            again()
        assert later.value is error
    cluster.close()
    cluster.close()
    assert not any(map(running, pids))


def test_a_call_that_raises(ray_session: None) -> None:
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        handle = cluster.load(_fragile())
        good = cluster.run(handle, _feed())
        bad, queued = cluster.run(handle, _feed("raise")), cluster.run(handle, _feed())
        with pytest.raises(TaskError) as caught:
            bad.get()
        text = str(caught.value)
        assert "rank 1 (stage 1), instruction 0 'y = call act(x, what)' [F1], run 1: " in text
        assert "ZeroDivisionError: on purpose" in text and "at net.py:8: act(what)" in text
        assert "in _act" in text  # the remote traceback
        assert good.get()[0]["s"].item() == queued.get()[0]["s"].item() == 4.0
        assert cluster.failure is None and cluster.run(handle, _feed()).get()[1]["s"].item() == 4.0


def test_a_killed_actor(ray_session: None) -> None:
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        pids = _pids(cluster)
        future = cluster.run(cluster.load(_fragile()), _feed("kill"))
        with pytest.raises(ActorLost) as caught:
            future.get()
        failure = caught.value.failure
        assert (failure.rank, failure.stage, failure.index, failure.label) == (1, 1, 0, "F1")
        assert "died" in str(caught.value) and "call act" in str(caught.value)
        _check_failed(cluster, caught.value, pids)


def test_a_stopped_actor(ray_session: None) -> None:
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        pids = _pids(cluster)
        handle = cluster.load(_fragile())
        os.kill(pids[1], signal.SIGSTOP)
        cluster.watch.deadline_s = 1.0  # type: ignore[attr-defined]  # only now: starting may take longer
        future = cluster.run(handle, _feed())
        with pytest.raises(ActorLost) as caught:
            future.get()
        assert caught.value.failure.rank == 1 and "has stopped" in str(caught.value)
        _check_failed(cluster, caught.value, pids)


def test_an_actor_that_dies_between_runs(ray_session: None) -> None:
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        pids = _pids(cluster)
        handle = cluster.load(_fragile())
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ActorLost) as caught:
            cluster.run(handle, _feed()).get()
        assert caught.value.failure.rank == 0
        _check_failed(cluster, caught.value, pids)


def test_an_interrupt_while_the_controller_waits(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing then, so all goes on."""
    go = tmp_path / "go"
    source = "def forward():\n    wait_for_file(go)\n    return (7,)"
    wait = function("wait", source, wait_for_file=wait_for_file, go=str(go))
    made = program(*[[Call("wait", (), ("y",))]] * 2, functions=[wait], outputs=[("y",)] * 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
            future = cluster.run(cluster.load(made), [{}, {}])
            waits, get = threading.Event(), RunChannel.get

            def noted(self: RunChannel, *given: Any) -> list[Any]:
                waits.set()
                return get(self, *given)

            def presses() -> None:
                waits.wait()
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=presses)
            thread.start()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(RunChannel, "get", noted)
                future.get()
            thread.join()
            large = torch.arange(1 << 22)
            cluster.put([{"w": large}, {"w": large + 1}])  # while both are in their call
            go.touch()
            assert future.get() == [{"y": 7}] * 2 and cluster.failure is None
            found = cluster.get([("w",), ("w",)]).get()
            assert torch.equal(found[0][0], large) and torch.equal(found[1][0], large + 1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_connection_that_breaks(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes are alive, so the one that cannot be called any longer is at fault."""
    monkeypatch.setattr(failure_detector, "SETTLE_S", 0.5)
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        pids = _pids(cluster)
        assert isinstance(cluster, RayCluster)
        cluster.channel._break(cluster.channel._lines[1])
        with pytest.raises(ActorLost, match="rank 1: its connection to the controller") as caught:
            cluster.run(cluster.load(_fragile()), _feed()).get()
        _check_failed(cluster, caught.value, pids)


def test_a_host_that_fails_since_another_is_lost_is_not_what_is_raised(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the loss is seen first, and what the host was told says so before it is raised."""
    go = tmp_path / "go"
    dies = function("dies", "def forward(x, go):\n    die(go)\n    return (x,)", die=_die_at)
    fine = function("fine", "def forward(x, go):\n    return (x,)")
    add = Collective("all_reduce", (0, 1), ("y",), ("s",), (SUM,), (SUM,), "sum", "c")
    made = program(
        *[[Call(name, ("x", "go"), ("y",)), add, Wait(("s",))] for name in ("fine", "dies")],
        functions=[dies, fine],
        inputs=[("x", "go")] * 2,
        outputs=[("s", "y")] * 2,
    )
    alone = program(
        [Call("fine", ("x", "go"), ("y",))],
        [],
        functions=[fine],
        inputs=[("x", "go"), ()],
        outputs=[("y",), ()],
    )
    fed: dict[str, object] = {"x": torch.ones(1), "go": str(go)}
    with launch_cluster(2, backend="ray", deadline_s=NEVER_S) as cluster:
        assert isinstance(cluster, RayCluster)
        hangs = cluster.run(cluster.load(made), [fed, fed])
        behind = cluster.run(
            cluster.load(alone), [fed, {}]
        )  # rank 0 is told of it when it has failed
        channel, watching = cluster.channel, cluster.watch
        root, get = FailureDetector.root, RunChannel.get

        def first(self: RunChannel, replies: Any, seconds: float) -> list[Any]:
            if not watching.lost:  # what comes is not heard of before the loss is seen
                time.sleep(seconds)
                raise NotYet
            return get(self, replies, seconds)

        def then(self: FailureDetector, *given: Any) -> Exception:
            found = root(self, *given)
            while not channel._lines[0].unread:
                channel.listen(0.01)
            return found

        monkeypatch.setattr(RunChannel, "get", first)
        monkeypatch.setattr(FailureDetector, "root", then)
        go.touch()
        with pytest.raises(ActorLost, match="rank 1"):
            behind.get()
        monkeypatch.undo()
        with pytest.raises(ActorLost, match="rank 1"):
            hangs.get()


def _die_at(go: str) -> None:
    wait_for_file(go)
    os._exit(3)


# -- what is sent ---------------------------------------------------------------------------------


def _told() -> Program:
    """Each rank gives back what it is told."""
    give = function("give", "def forward(x):\n    return (x,)")
    return program(
        *[[Call("give", ("x",), ("y",))]] * 3,
        functions=[give],
        inputs=[("x",)] * 3,
        outputs=[("y",)] * 3,
    )


def test_plain_data_goes_when_it_has_changed(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    send = RunChannel.send

    def noted(
        self: RunChannel, host: int, kind: Any, functions: Any, given: Any, *, lent: bool
    ) -> Any:
        (_, _, inputs, *_), plain = given
        sent.append((plain.get(host) or inputs[host])["x"])  # `plain` has the kernels' flags, too
        return send(self, host, kind, functions, given, lent=lent)

    handle, other = three.load(_told()), three.load(_told())
    monkeypatch.setattr(RunChannel, "send", noted)

    def run(value: object, by: Any = handle) -> bool:
        """Whether it was sent."""
        sent.clear()
        found = three.run(by, [{"x": value}] * 3).get()
        assert [repr(own["y"]) for own in found] == [repr(value)] * 3
        return not all(isinstance(each, int) for each in sent)

    options = ({"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "name": "é"}, {"lr": 1.0})
    assert run(options) and not run(options) and not run(({**options[0]}, {"lr": 1.0}))
    assert run(options, other) and not run(options, other)
    assert run(({"lr": 0.1}, {"lr": 1})) and run(({"lr": 0.1}, {"lr": True})) and run(options)
    many = [float("nan"), [1, [2]]]
    assert run(many) and not run(many)
    many[1].append(3)  # type: ignore[union-attr]
    assert run(many) and run([numpy.float64(1.5)]) and run([numpy.float64(1.5)])
    assert run([torch.ones(2)]) and run([torch.ones(2)]) and run(7.0) and run("text")
    monkeypatch.setattr(RunChannel, "send", _refuses)
    with pytest.raises(TypeError, match="no"):
        three.run(handle, [{"x": [5]}] * 3)
    monkeypatch.setattr(RunChannel, "send", noted)
    assert run([5])  # it was not sent before
    monkeypatch.undo()
    three.unload(other)


def _refuses(*_: object, **__: object) -> None:
    raise TypeError("no")


def test_plain_data_of_a_run_that_was_undone(ray_session: None) -> None:
    """It counts as sent: what the next run is fed is what the controller means."""
    source = "def forward(x):\n    check(x)\n    return (x,)"
    check = function("check", source, check=_check)
    made = program(
        [Call("check", ("x",), ("y",))], functions=[check], inputs=[("x",)], outputs=[("y",)]
    )
    with launch_cluster(1, backend="ray", deadline_s=NEVER_S) as cluster:
        handle = cluster.load(made)
        assert cluster.run(handle, [{"x": [1]}]).get() == [{"y": [1]}]
        for _ in range(2):
            bad = cluster.run(handle, [{"x": [0]}])
            behind = cluster.run(handle, [{"x": [0, 2]}])
            with pytest.raises(TaskError, match="ZeroDivisionError"):
                bad.get()
            with pytest.raises(TaskError, match="ZeroDivisionError"):
                behind.get()
        assert cluster.run(handle, [{"x": [1]}]).get() == [{"y": [1]}]


def _check(x: list[int]) -> None:
    assert 1 / x[0] > 0
