"""What GPUs would do over NCCL, on CPU tensors: gloo carries the messages, NCCL's rules are held.

Each actor is a thread with a `Worker`. `Strict` stands in for a `ProcessGroupNCCL`: no tags, and
messages only inside a group call, never empty. Real NCCL has not been run here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, HashStore, PrefixStore, Store

from dtensor.daft import (
    Buffer,
    Collective,
    CommunicationError,
    Program,
    Wait,
    launch_cluster,
)
from dtensor.daft.cluster.cluster import hosts_of
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.gloo import Messenger, gloo_group
from dtensor.daft.ray.transports.nccl import NcclWire, join_nccl
from dtensor.daft.run.transport import TRANSPORTS, Meeting, Transport
from dtensor.daft.run.worker import HostRun, Worker
from tests.daft.programs import Collectives, parts_of, pipeline, program, same_bits
from tests.extras import missing

CPU = torch.device("cpu")
PATIENCE_S = 600.0


@dataclass
class Strict:
    """The group of one key, on one actor."""

    gloo: Messenger
    position: int
    queued: list[Callable[[], Any]] | None = None
    posted: int = 0
    aborted: bool = False

    def _start_coalescing(self) -> None:
        assert self.queued is None and not self.aborted
        self.queued = []

    def _end_coalescing(self) -> All:
        assert self.queued, "an empty group call"
        works, self.queued = [post() for post in self.queued], None
        self.posted += 1
        return All(works)

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> None:
        self._queue(tensors, rank, lambda: self.gloo.send(tensors, rank, 0))

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> None:
        self._queue(tensors, rank, lambda: self.gloo.recv(tensors, rank, 0))

    def abort(self) -> None:
        self.aborted = True

    def _queue(self, tensors: list[Tensor], rank: int, post: Callable[[], Any]) -> None:
        assert self.queued is not None, "outside a group call"
        (data,) = tensors
        assert data.dtype == torch.uint8 and data.dim() == 1 and data.is_contiguous()
        assert data.numel() > 0 and rank != self.position
        self.queued.append(post)


@dataclass
class All:
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class Opened:
    """What one actor opened, in order."""

    store: Store
    names: list[str] = field(default_factory=list)
    groups: list[Strict] = field(default_factory=list)

    def make(self, name: str, position: int, size: int) -> Strict:
        self.names.append(name)
        gloo = gloo_group(PrefixStore(name, self.store), position, size, "127.0.0.1", PATIENCE_S)
        self.groups.append(Strict(gloo, position))
        return self.groups[-1]


class Actors:
    """As the Ray backend does it, with threads for actors."""

    def __init__(self, size: int, ranks_per_actor: int = 1) -> None:
        self.hosts = hosts_of(size, ranks_per_actor)
        self.actor_of = tuple(h for h, ranks in enumerate(self.hosts) for _ in ranks)
        store = HashStore()
        self.opened = [Opened(store) for _ in self.hosts]
        self.wires = [NcclWire(r, CPU, o.make) for r, o in zip(self.hosts, self.opened)]
        self.transports = [ExchangeTransport(wire, self.actor_of) for wire in self.wires]
        self.workers = [Worker(r, CPU, t) for r, t in zip(self.hosts, self.transports)]
        self.tags: dict[Any, int] = {}
        self.loaded = 0

    def run(self, made: Program, fed: Sequence[dict[str, Tensor]]) -> list[dict[str, Any]]:
        for key in check_routes(made, self.actor_of):
            self.tags.setdefault(key, len(self.tags))
        parts = parts_of(made, self.hosts)
        handle, self.loaded = self.loaded, self.loaded + 1
        start = threading.Barrier(len(self.hosts))

        def act(host: int) -> dict[int, dict[str, object]]:
            start.wait(PATIENCE_S)
            self.transports[host].open(self.tags)
            self.workers[host].load(handle, parts[host])
            return self.workers[host].run(
                HostRun(handle, 0, {r: dict(fed[r]) for r in self.hosts[host]})
            )

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            results = list(pool.map(act, range(len(self.hosts)), timeout=PATIENCE_S))
        merged = {rank: named for part in results for rank, named in part.items()}
        return [merged[rank] for rank in range(len(self.actor_of))]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Workers set it for the process, and would race."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_the_bits_of_inprocess(size: int) -> None:
    case = Collectives(size)
    with launch_cluster(size) as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    actors = Actors(size)
    found = actors.run(case.program(), case.fed)
    for rank in range(size):
        assert set(found[rank]) == set(expected[rank]) == set(case.expected[rank])
        for name, value in expected[rank].items():
            assert same_bits(found[rank][name], value), (rank, name)
    assert all(len(opened.groups) == 2 for opened in actors.opened)  # one for each channel
    assert all(group.posted > 10 for opened in actors.opened for group in opened.groups)


def test_a_group_of_one_needs_no_communicator() -> None:
    case = Collectives(1)
    actors = Actors(1)
    found = actors.run(case.program(), case.fed)
    assert all(same_bits(found[0][name], value) for name, value in case.expected[0].items())
    assert actors.opened[0].groups == []


@pytest.mark.parametrize("ranks_per_actor", [1, 2])
def test_transfers(ranks_per_actor: int) -> None:
    actors = Actors(4, ranks_per_actor)
    for host, worker in enumerate(actors.workers):
        state = {"w": torch.ones(4), "n": torch.zeros(())}
        worker.put({rank: state for rank in actors.hosts[host]})
    for k in (0.0, 1.0):
        found = actors.run(pipeline(4), [{"x": torch.full((4,), k)}, {}, {}, {}])
        assert found[3]["y"].tolist() == [4.0 + k] * 4
    opened = [len(opened.names) for opened in actors.opened]
    assert opened == ([1, 2, 2, 1] if ranks_per_actor == 1 else [1, 1])


def test_all_actors_open_communicators_in_one_order() -> None:
    """Overlapping groups, and a second program whose first key sorts before those of the first."""
    actors = Actors(3)
    fed = [{"x": torch.ones(2)} for _ in range(3)]
    actors.run(_sums(((0, 1), "b"), ((1, 2), "b"), ((0, 2), "c")), fed)
    found = actors.run(_sums(((0, 1, 2), "a"), ((1, 2), "b"), ((0, 1), "c")), fed)
    assert [r["y0"].tolist() for r in found] == [[3.0, 3.0]] * 3
    members = [(0, 1), (0, 2), (1, 2), (0, 1), (0, 1, 2)]
    for rank, opened in enumerate(actors.opened):
        named = [f"{n}: collective {each}" for n, each in enumerate(members) if rank in each]
        assert opened.names == named


def _sums(*groups: tuple[tuple[int, ...], str]) -> Program:
    buffer = (Buffer((2,), torch.float32),)
    lists: list[list[Any]] = [[], [], []]
    outputs: list[tuple[str, ...]] = [(), (), ()]
    for i, (members, channel) in enumerate(groups):
        for rank in members:
            lists[rank] += [
                Collective(
                    "all_reduce", members, ("x",), (f"y{i}",), buffer, buffer, "sum", channel
                ),
                Wait((f"y{i}",)),
            ]
            outputs[rank] += (f"y{i}",)
    return program(*lists, inputs=[("x",)] * 3, outputs=outputs)


def test_close_aborts_all_at_once() -> None:
    """One after the other, 24 took 14 s on an H100, and one may wait for another's kernel."""
    others = threading.Barrier(3)

    class Waits:
        def _start_coalescing(self) -> None: ...
        def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> None: ...
        def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> None: ...

        def _end_coalescing(self) -> Waits:
            return self

        def wait(self) -> None: ...

        def abort(self) -> None:
            others.wait(PATIENCE_S)

    made: Any = lambda name, position, size: Waits()  # noqa: E731
    wire = NcclWire((0,), torch.device("cpu"), made)
    wire.open({((0, 1), f"c{n}", "transfer"): n for n in range(3)})
    wire.close()
    assert not others.broken


class Lost(Strict):
    """After the message that connects, none goes, and an abort waits for the device, for ever."""

    def _end_coalescing(self) -> All:
        if self.posted:
            raise RuntimeError("NCCL error: unhandled cuda error")
        return super()._end_coalescing()

    def abort(self) -> None:
        threading.Event().wait()


class RaisesInAbort(Lost):
    def abort(self) -> None:
        raise RuntimeError("NCCL error: cannot abort")


def over_groups(kind: type[Strict], meeting: Meeting) -> Transport:
    store, meet = meeting.of_hosts()
    meet("")

    def make(name: str, position: int, size: int) -> Strict:
        gloo = gloo_group(PrefixStore(name, store), position, size, "127.0.0.1", PATIENCE_S)
        return kind(gloo, position)

    return ExchangeTransport(NcclWire(meeting.ranks, CPU, make), meeting.host_of)


@pytest.mark.ray
@pytest.mark.parametrize(
    "kind, also", [(Lost, ""), (RaisesInAbort, "failed to close: RuntimeError: NCCL error: cannot")]
)
def test_an_error_comes_though_an_abort_does_not_end(
    kind: type[Strict], also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.transports import connect  # noqa: F401 - it has the transport of hosts

    monkeypatch.setitem(TRANSPORTS, ("cpu", "hosts"), partial(over_groups, kind))
    buffer = (Buffer((4,), torch.float32),)
    line = "net.py:8: x.sum()"
    sums = Collective("all_reduce", (0, 1), ("x",), ("y",), buffer, buffer, "sum", "c", source=line)
    own = [sums, Wait(("y",))]
    made = program(own, own, inputs=[("x",)] * 2, outputs=[("y",)] * 2)
    with launch_cluster(2, backend="ray", deadline_s=60.0) as cluster:
        handle = cluster.load(made)
        with pytest.raises(CommunicationError) as caught:
            cluster.run(handle, [{"x": torch.ones(4)}] * 2).get()
        text = str(caught.value)
        assert re.search(r"rank [01] .*instruction 0 'y = all_reduce.*run 0: ", text), text
        assert "unhandled cuda error" in text and line in text and also in text, text


def test_close_aborts_and_a_closed_wire_says_so() -> None:
    actors = Actors(2)
    case = Collectives(2, large=10)
    actors.run(case.program(), case.fed)
    groups = [group for opened in actors.opened for group in opened.groups]
    assert groups and not any(group.aborted for group in groups)
    for worker in actors.workers:
        worker.close()
    assert all(group.aborted for group in groups)
    key = next(iter(actors.tags))
    with pytest.raises(RuntimeError, match="closed"):
        actors.wires[0].post(key, {1: torch.ones(1, dtype=torch.uint8)}, {}, 0)


def test_what_is_used_of_torch_is_there() -> None:
    """The class of NCCL's groups is in CUDA builds only; its methods are those of `Backend`."""
    methods = {"_start_coalescing", "_end_coalescing", "send", "recv", "abort"}
    assert methods | {"eager_connect_single_device"} <= set(dir(Backend))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_an_actor_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \(3,\) has no CUDA device"):
        join_nccl(HashStore(), (3,), num_actors=1, patience_s=1.0)


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs a GPU for each of two ranks")
@pytest.mark.parametrize("size", [2, 3])
def test_nccl_gives_the_bits_of_one_gpu(size: int) -> None:
    """The only test of the real thing; with three GPUs also of both halves of an all_reduce."""
    if 2 <= torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    case = Collectives(size)
    with launch_cluster(size, device="cuda") as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    with launch_cluster(size, backend="ray", device="cuda", ranks_per_actor=1) as cluster:
        found = cluster.run(cluster.load(case.program()), case.fed).get()
    for rank in range(size):
        assert all(same_bits(found[rank][n], v) for n, v in expected[rank].items())


def test_ranks_that_have_too_few_gpus_are_told_how_to_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dtensor.daft.ray.bootstrap import machines

    class Resources:
        free = 8

        def cluster_resources(self) -> dict[str, float]:
            return {"GPU": 8.0}

        def available_resources(self) -> dict[str, float]:
            return {"GPU": float(self.free)}

    monkeypatch.setattr(machines, "_ray", Resources)
    with pytest.raises(ValueError, match="16 actors .* need 16 free GPUs") as caught:
        machines.ranks_per_gpu(16, None)
    shared, together = "between 2 ranks with ranks_per_actor=2", "ranks_per_actor=16"
    assert 0 < str(caught.value).find(shared) < str(caught.value).find(together)
    assert [machines.ranks_per_gpu(16, asked) for asked in (2, 16)] == [2, 16]
    monkeypatch.setattr(Resources, "free", 1)  # each rank on that one: no other way to share
    with pytest.raises(ValueError, match="Fix: put all ranks on one GPU with ranks_per_actor=9"):
        machines.ranks_per_gpu(9, None)


def test_lost_ranks_are_not_replaced_on_gpus() -> None:
    """Nothing has started: nor is it left out where GPUs are simulated."""
    for stated in ({"spares": 1}, {"snapshot_every": 2}):
        with pytest.raises(ValueError, match="replaced on CPUs alone"):
            launch_cluster(2, backend="ray", device="cuda", **stated)


@pytest.mark.ray
def test_too_few_gpus_are_an_error_at_launch() -> None:
    ray = pytest.importorskip("ray", reason=missing("ray"))
    from dtensor.daft.ray.bootstrap.machines import ranks_per_gpu
    from dtensor.daft.ray.bootstrap.start_ray import end_ray

    end_ray()  # that of earlier tests
    with pytest.raises(ValueError, match="need 1000 free GPUs, one for each actor"):
        launch_cluster(1000, backend="ray", device="cuda", ranks_per_actor=1)
    assert not ray.is_initialized()
    with pytest.raises(ValueError, match="got 'cuda:1'"):
        launch_cluster(2, backend="ray", device="cuda:1")
    # Ray believes what it is told about GPUs.
    own: dict[str, Any] = dict(address="local", include_dashboard=False, log_to_driver=False)
    ray.init(num_gpus=3, num_cpus=1, **own)
    try:
        assert [ranks_per_gpu(size, None) for size in (1, 3)] == [1, 1]
        assert [ranks_per_gpu(6, asked) for asked in (2, 6)] == [2, 6]
        with pytest.raises(
            ValueError, match=r"Ray has 3, of which 3 are free.\n.*actor=2, .*actor=4"
        ):
            ranks_per_gpu(4, None)
    finally:
        end_ray()
