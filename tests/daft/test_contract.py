"""Tests the contract of a cluster on each backend: results, their order, errors, undone runs,
deadlines and closing.

`backends.py` names what a backend cannot promise.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import itertools
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy
import pytest
import torch

import dtensor as dt
from dtensor import daft
from dtensor.daft import (
    ActorLost,
    Buffer,
    Call,
    Cluster,
    ClusterClosed,
    Collective,
    CommunicationError,
    Free,
    Function,
    Future,
    Instruction,
    Label,
    Mode,
    Program,
    ProgramError,
    Recv,
    Send,
    Sizes,
    Stored,
    TaskError,
    Wait,
    interference,
)
from dtensor.daft.cluster.cluster import HostedCluster
from dtensor.daft.cluster.subcluster import SubCluster
from dtensor.daft.errors import HostError
from dtensor.daft.ir.instructions import WORD
from dtensor.daft.ray.actors.object_store import ObjectStore
from dtensor.daft.run.worker import Counted
from dtensor.daft.tasks.task import HostedObject
from dtensor.daft.undo.failed_run import UndoneRun
from tests.chaos.actors import wait_for_file
from tests.chaos.watch import running
from tests.daft import raisers
from tests.daft.actor_classes import Feeder, Model, Unborn, same
from tests.daft.backends import Backend, able, plain_processes
from tests.daft.programs import (
    F32,
    Collectives,
    ctrl_c_interrupts,
    function,
    pipeline,
    precisions,
    program,
    same_bits,
)
from tests.daft.task_programs import compared
from tests.daft.test_several_programs import SHAPES, move, scale
from tests.daft.undo import ADD, AGREE, CHECKED, NOTED
from tests.daft.values import kinds, parts
from tests.extras import missing

MODES: list[Mode] = ["compiled", "interpreted", "timed"]
SUM = Buffer((1,), F32)


@pytest.fixture(scope="module", params=able())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "ray":
        pytest.importorskip("ray", reason=missing("ray"))
        request.getfixturevalue("ray_session")
    if request.param == "processes":
        with plain_processes():
            yield Backend("processes")
    else:
        yield Backend(request.param)


@pytest.fixture(scope="module")
def two(backend: Backend) -> Iterator[Cluster]:
    with backend.cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four(backend: Backend) -> Iterator[Cluster]:
    with backend.cluster(4) as cluster:
        yield cluster


def on(*promises: str) -> pytest.MarkDecorator:
    """Return, as test parameters, the backends that have all these abilities."""
    return pytest.mark.parametrize("backend", able(*promises), indirect=True, scope="module")


def at_rank(
    rank: int,
    items: Sequence[Instruction],
    *functions: Function,
    size: int = 2,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    state: Sequence[str] = (),
) -> Program:
    """Return a program with these instructions on one rank and none on the others."""
    names = [(inputs, outputs, state) if r == rank else ((),) * 3 for r in range(size)]
    return program(
        *(items if r == rank else () for r in range(size)),
        functions=functions,
        inputs=[tuple(own[0]) for own in names],
        outputs=[tuple(own[1]) for own in names],
        state=[tuple(own[2]) for own in names],
    )


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.default
def test_collectives_are_bitwise_equal_to_left_fold(four: Cluster) -> None:
    case = Collectives(4)
    handle = four.load(case.program())
    for mode in MODES:
        before = four.calls
        results = four.run(handle, case.fed, mode=mode).get()
        assert mode == "interpreted" or four.calls - before == 4  # one call per actor
        for rank in range(4):
            assert mode == "timed" or results[rank].keys() == case.expected[rank].keys()
            for name, value in case.expected[rank].items():
                assert same_bits(results[rank][name], value), (mode, rank, name)


@pytest.mark.default
def test_state_persists_between_runs(four: Cluster) -> None:
    handle = four.load(pipeline(4))
    fed = [{"x": torch.arange(4.0)}, {}, {}, {}]
    for mode in MODES[:2]:
        ones = torch.ones(4)
        four.put([{"w": ones * 10**rank, "n": torch.zeros(())} for rank in range(4)])
        ones.zero_()  # the cluster has its own copy
        before = four.calls
        futures = [four.run(handle, fed, mode=mode) for _ in range(3)]  # submitted before reading
        assert mode == "interpreted" or four.calls - before == 12
        for future in futures:
            results = future.get()
            assert results[:3] == [{}] * 3
            assert results[3]["y"].tolist() == [1111, 1112, 1113, 1114]
        assert all(future.done() for future in futures)
        found = four.get([("n",), (), ("n", "w"), ()]).get()
        assert [len(own) for own in found] == [1, 0, 2, 0]
        assert found[0][0].item() == found[2][0].item() == 3
        assert found[2][1].tolist() == [100.0] * 4
        four.delete([("w", "n")] * 4)
        with pytest.raises(LookupError, match="Rank 1 has no value 'w'"):
            four.get([(), ("w",), (), ()]).get()


@pytest.mark.default
def test_kept_results_are_returned_as_copies_and_dropped_values_vanish(four: Cluster) -> None:
    """A put or a run names the values to drop in its message, so dropping needs no extra call."""
    handle = four.load(pipeline(4))
    fed = [{"x": torch.arange(4.0)}, {}, {}, {}]
    kept, drop = {"y": "last"}, {3: ["last"]}
    for mode in MODES[:2]:
        four.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 4)
        assert four.run(handle, fed, mode=mode, keep=kept).get()[3] == {}
        found = four.run(handle, fed, mode=mode, keep=kept, returned={"y"}, drop=drop).get()
        assert found[:3] == [{}] * 3 and found[3]["y"].tolist() == [4, 5, 6, 7]
        found[3]["y"].zero_()
        before = four.calls
        assert four.get([(), (), (), ("last",)]).get()[3][0].tolist() == [4, 5, 6, 7]
        four.put([{"v": torch.ones(())}] * 4, drop=drop)
        assert four.calls - before == 1 + 4
        with pytest.raises(LookupError, match="Rank 3 has no value 'last'"):
            four.get([(), (), (), ("last",)]).get()


@pytest.mark.default
def test_calls_accept_any_object_and_run_without_autograd_on_one_thread(two: Cluster) -> None:
    source = "def forward(x, n):\n    return ((n, torch.get_num_threads(), (x * 2).requires_grad),)"
    look = function("look", source, torch=torch)
    made = at_rank(0, [Call("look", ("x", "n"), ("y",))], look, inputs="xn", outputs="y")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.ones(1, requires_grad=True)
        found = two.run(two.load(made), [{"x": x, "n": "hello"}, {}]).get()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found[0]["y"] == ("hello", 1, False)


@pytest.mark.parametrize("of", [torch.clone, torch.t])
def test_inputs_results_and_state_do_not_share_memory(
    two: Cluster, of: Callable[..., torch.Tensor]
) -> None:
    same = function("same", "def forward(x):\n    return (x,)")
    up = function("up", "def forward(x):\n    x.add_(1)\n    return ()")
    calls = [Call("same", (n,), (m,)) for n, m in ("xy", "wz")] + [Call("up", ("v",), (), ("v",))]
    made = at_rank(0, calls, same, up, inputs="xv", outputs="yvz", state="w")
    handle = two.load(made)
    for mode in MODES:
        x, v = (of(torch.arange(4.0).reshape(2, 2)) for _ in range(2))
        wanted = x.clone()
        two.put([{"w": torch.ones(2)}, {}])
        (found, _) = two.run(handle, [{"x": x, "v": v}, {}], keep={"y": "kept"}, mode=mode).get()
        assert torch.equal(found["v"], wanted + 1) and torch.equal(v, wanted)
        x.zero_()  # the kept value does not share its memory
        found["z"].zero_()  # nor does the state share memory with the result
        kept, w = two.get([("kept", "w"), ()]).get()[0]
        assert torch.equal(kept, wanted) and w.tolist() == [1, 1]


def test_calls_use_matmul_precision_and_autocast_of_controller(four: Cluster) -> None:
    handle = four.load(precisions(4))
    before = torch.get_float32_matmul_precision()
    for mode in MODES[:2]:
        found: list[list[float]] = []
        try:
            for precision in ("highest", "high", "high", "highest"):
                torch.set_float32_matmul_precision(precision)
                future = four.run(handle, [{"x": torch.ones(())}] * 4, mode=mode)
                torch.set_float32_matmul_precision(before)  # the run was submitted before this
                found.append([rank["y"].item() for rank in future.get()])
        finally:
            torch.set_float32_matmul_precision(before)
        assert found == [[0.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 4]
    square = function("square", "def forward(x):\n    return (mm(x, x),)", mm=torch.mm)
    made = at_rank(
        3, [Call("square", ("x",), ("y",)), Free(("x",))], square, size=4, inputs="x", outputs="y"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):  # it is no program's
        for mode in MODES:
            found_there = four.run(
                four.load(made), [{}, {}, {}, {"x": torch.eye(2)}], mode=mode
            ).get()
            assert found_there[3]["y"].dtype == F32
        assert torch.is_autocast_enabled("cpu")


def test_ranks_in_one_actor_give_same_results_with_fewer_calls(backend: Backend) -> None:
    with backend.cluster(4, ranks_per_actor=2, seed=3) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 4)
        handle = cluster.load(pipeline(4))
        for state, calls in ((("w",), 2), ((), 0)):
            some = cluster.load(program([], [], [], [], state=[(), state, (), state]))
            before = cluster.calls
            assert cluster.run(some, [{}] * 4).get() == [{}] * 4
            assert cluster.calls - before == calls
        before = cluster.calls
        result = cluster.run(handle, [{"x": torch.zeros(4)}, {}, {}, {}]).get()
        assert cluster.calls - before == 2 and result[3]["y"].tolist() == [4.0] * 4
        crossed = program(
            *[[replace(_sum((r % 2, r % 2 + 2)), inputs=("x",)), Wait(("s",))] for r in range(4)],
            inputs=[("x",)] * 4,
            outputs=[("s",)] * 4,
        )
        fed = [{"x": torch.tensor([10.0**r])} for r in range(4)]
        found = cluster.run(cluster.load(crossed), fed).get()
        assert [own["s"].item() for own in found] == [101, 1010, 101, 1010]
        if not backend.immediate:
            with pytest.raises(ProgramError, match="share an actor"):
                cluster.load(among((0, 1, 2)))


def _sum(group: Sequence[int], channel: str = "c") -> Collective:
    return Collective("all_reduce", tuple(group), ("y",), ("s",), (SUM,), (SUM,), "sum", channel)


# -- the order of runs -----------------------------------------------------------------------------


@pytest.mark.default
def test_several_programs_run_ahead_on_same_channels(four: Cluster) -> None:
    """Programs of different shapes and dtypes use one channel and group. Between them a program
    on rank 1 alone reads state of another program. Nothing is read before all runs are submitted.
    """
    programs = [move(*each, f"move{i}", 4, f"w{i}") for i, each in enumerate(SHAPES)]
    for one, other in itertools.combinations(programs, 2):
        found = interference(one, other)
        assert found.commutes and len(found.channels) == 2
    handles = [four.load(each) for each in programs]
    read = four.load(scale("read", 4, "w0"))
    assert not interference(programs[0], read.program).commutes
    state = {f"w{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(SHAPES)}
    four.put([{}, state, {}, {}])
    futures: list[tuple[Future, torch.Tensor, Future, int]] = []
    for k in range(1, 4):
        for handle, (shape, dtype) in zip(handles, SHAPES, strict=True):
            ys = [(torch.randn(2, *shape) * 9).to(dtype) for _ in range(4)]
            fed: list[dict[str, object]] = [{"y": y} for y in ys]
            fed[0]["x"] = torch.full(shape, k, dtype=dtype)
            future = four.run(handle, fed)
            scaled = four.run(read, [{}, {"x": torch.tensor(2.0)}, {}, {}])
            futures.append((future, ys[0] + ys[1] + ys[2] + ys[3], scaled, k))
    for future, total, scaled, k in futures:
        assert all(same_bits(own["s"], total) for own in future.get())
        assert scaled.get()[1]["y"].tolist() == [k * (k + 1.0)] * 2  # = 2 (1 + 2 + ... + k)


@pytest.mark.default
def test_concurrent_threads_submit_runs_in_one_order(
    four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors that saw two programs in different orders would wait for each other."""
    channel = getattr(four, "channel", None)  # Ray's channel sends the calls of a run one by one
    kind, method = (type(four), "_call") if channel is None else (type(channel), "send")
    call, results, failures = getattr(kind, method), list[list[float]](), list[BaseException]()

    def slowly(*given: object, **options: object) -> object:
        time.sleep(0.001)  # lets threads take turns between calls of one run
        return call(*given, **options)

    def submit(channel: str, value: float) -> None:
        try:
            total, names = _sum(range(4), channel), ([("y",)] * 4, [("s",)] * 4)
            made = program(*[[total, Wait(("s",))]] * 4, inputs=names[0], outputs=names[1])
            handle = four.load(made)
            fed = [{"y": torch.tensor([value + rank])} for rank in range(4)]
            futures = [four.run(handle, fed) for _ in range(6)]
            results.append([future.get()[0]["s"].item() for future in futures])
            four.unload(handle)
        except BaseException as error:
            failures.append(error)

    monkeypatch.setattr(kind, method, slowly)
    threads = [threading.Thread(target=submit, args=(c, v)) for c, v in (("c", 10.0), ("d", 20.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and sorted(results) == [[46.0] * 6, [86.0] * 6]


@on("time out")
def test_future_can_be_read_after_timeout(four: Cluster, tmp_path: Path) -> None:
    handle = four.load(among((0, 1, 2, 3), "waits"))
    future = run(four, handle, tmp_path / "go")
    with pytest.raises(TimeoutError, match="ask again"):
        future.get(timeout=0.05)
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.get()[3]["s"].item() == future.get()[3]["s"].item() == 8


def test_runs_on_overlapping_rank_pairs_equal_sequential_execution(four: Cluster) -> None:
    """Values stay in the ranks' tables from pair to pair; nothing is read before the end."""
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]
    handles = {pair: four.load(among(pair)) for pair in pairs}
    four.put([{"x": torch.tensor([float(r)])} for r in range(4)])
    expected = [float(r) for r in range(4)]
    draw = torch.Generator().manual_seed(3)
    for number in range(60):
        pair = pairs[int(torch.randint(len(pairs), (), generator=draw))]
        fed = [{"x": Stored("x"), "path": ""} if r in pair else {} for r in range(4)]
        kept = "s" if number % 10 == 0 else "y"
        four.run(handles[pair], fed, keep={kept: "x"})
        made = {r: expected[r] + 1 for r in pair}
        for r in pair:
            expected[r] = made[r] if kept == "y" else sum(made.values())
    assert [x.item() for (x,) in four.get([("x",)] * 4).get()] == expected


def among(ranks: Sequence[int], by: str = "next", size: int = 4) -> Program:
    """Return a program in which these ranks add 1 to their input (the last rank with another
    function) and sum the results. A single rank adds 1 again."""
    lists: list[list[Instruction]] = [[] for _ in range(size)]
    for rank in ranks:
        fn = by if rank == ranks[-1] else "next"
        lists[rank] = [
            Call(fn, ("x", "path"), ("y",), label=Label(f"F{rank}"), source=f"net.py:8: {fn}(path)")
        ]
        if len(ranks) > 1:
            lists[rank] += [_sum(ranks, f"{by} {ranks}"), Wait(("s",))]
        else:
            lists[rank] += [Call("next", ("y", "path"), ("s",))]
    made = program(
        *lists,
        functions=[_act(fn) for fn in (next_, waits, spins, kills, exits)],
        inputs=[("x", "path") if own else () for own in lists],
        outputs=[("y", "s") if own else () for own in lists],
    )
    return replace(made, name=f"{by} on {list(ranks)}")


def _act(fn: Callable[[str], None]) -> Function:
    source = "def forward(x, path):\n    act(path)\n    return (x + 1,)"
    return function(fn.__name__.strip("_"), source, act=fn)


def next_(path: str) -> None: ...


def waits(path: str) -> None:
    wait_for_file(path)


def spins(path: str) -> None:
    while not os.path.exists(path):
        pass


def kills(path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits(path: str) -> None:
    wait_for_file(path)
    os._exit(3)


def run(cluster: Cluster, handle: Any, path: Path | str = "", **options: Any) -> Future:
    fed: list[dict[str, object]] = [
        {"x": torch.ones(1), "path": str(path)} if own.inputs else {}
        for own in handle.program.ranks
    ]
    return cluster.run(handle, fed, **options)


# -- programs of some ranks ------------------------------------------------------------------------


def test_ranks_outside_program_return_nothing_and_are_not_called(four: Cluster) -> None:
    handle = four.load(among((1, 3)))
    for mode in MODES:
        before = four.calls
        made = run(four, handle, mode=mode, keep={"y": "kept"}).get()
        assert made[0] == made[2] == {} and made[1]["s"].item() == made[3]["s"].item() == 4
        assert mode == "interpreted" or four.calls - before == 2
    before = four.calls
    assert four.get([(), ("kept",), (), None]).get() == [(), (torch.tensor([2.0]),), (), ()]
    assert four.calls - before == 1
    four.delete([(), ("kept",), (), ("kept",)])
    four.put([{}, {}, {"w": 1}, {}])
    four.unload(handle)
    assert four.calls - before == 1 + 2 + 1 + 2
    assert four.get([()] * 4).get() == [()] * 4  # waits for all ranks
    assert four.calls - before == 6 + 4


@pytest.mark.default
def test_sub_cluster_has_its_own_state(four: Cluster) -> None:
    gives = [Send("w", 1, "w", SUM), Wait(("w",))]
    takes = [Recv("w", 0, "w", SUM), Wait(("w",))]
    made = program(gives, takes, state=[("w",)] * 2)
    four.put([{"w": torch.zeros(1)}] * 4)
    part = SubCluster(four, (2, 3), "part: ", "mesh(tp=2)")
    part.put([{"w": torch.ones(1)}, {"w": torch.zeros(1)}])
    part.run(part.load(made), [{}, {}]).get()
    before = four.calls
    assert part.get([("w",), ("w",)]).get() == [(torch.ones(1),)] * 2
    assert four.calls - before == 2
    assert four.get([("w",)] * 4).get() == [(torch.zeros(1),)] * 4


@on("run ahead")
def test_pair_of_ranks_works_while_other_pair_is_busy(four: Cluster, tmp_path: Path) -> None:
    """The pair loads, feeds, runs, reads, deletes and unloads a program."""
    busy = four.load(among((0, 1), "waits"))
    held = run(four, busy, tmp_path / "go")
    for mode in MODES[:2]:
        handle = four.load(among((2, 3)))
        four.put([{}, {}, {"w": torch.ones(2)}, {}])
        future = run(four, handle, mode=mode, keep={"y": "kept"})
        assert future.get()[2]["s"].item() == 4
        assert four.get([(), (), ("w", "kept"), ("kept",)]).get()[3] == (torch.tensor([2.0]),)
        four.delete([(), (), ("w", "kept"), ("kept",)])
        four.unload(handle)
    four.put([{"w": raisers.Given("unpickled")}, {}, {}, {}])  # it fails only on its own actor
    assert run(four, four.load(among((2, 3)))).get()[3]["s"].item() == 4
    assert not held.done()
    (tmp_path / "go").touch()
    with pytest.raises(HostError, match="rank 0: SystemExit: 3"):
        four.get([("w",), (), (), ()]).get()
    assert held.get()[1]["s"].item() == 4


@on("run ahead")
def test_compiled_functions_on_disjoint_meshes_run_independently(
    backend: Backend, tmp_path: Path
) -> None:
    """While one rank is in a call, a function on the other is captured, loaded, run and read."""
    one, other = dt.Mesh(tp=1, name="one"), dt.Mesh(tp=1, name="other")
    x = torch.randn(4, 4)
    with dt.launch(one, other, backend="ray") as session:
        cluster = session.launch.cluster
        slow = dt.distribute(x, one)
        held = run(cluster, cluster.load(among((0,), "waits", size=2)), tmp_path / "go")
        late = dt.compile(lambda x: x @ x, one)(slow)
        fast = dt.compile(lambda x: (x @ x).relu(), other)
        for _ in range(2):
            y = fast(dt.distribute(x, other))
            torch.testing.assert_close(y.full_tensor(), (x @ x).relu())
            torch.testing.assert_close((y + 1).sum().item(), (x @ x).relu().add(1).sum().item())
        assert not held.done()
        (tmp_path / "go").touch()
        torch.testing.assert_close(dt.transfer(late, other).full_tensor(), x @ x)


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.default
@on("send")
def test_plain_input_data_is_sent_only_if_changed(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtensor.daft.ray.channel.run_channel import RunChannel

    sent: list[object] = []
    send = RunChannel.send

    def noted(
        self: RunChannel, host: int, kind: Any, functions: Any, given: Any, *, lent: bool
    ) -> Any:
        (_, _, inputs, *_), plain = given
        sent.append((plain.get(host) or inputs[host])["x"])  # `plain` has the kernels' flags, too
        return send(self, host, kind, functions, given, lent=lent)

    handle, other = two.load(given_back(2)), two.load(given_back(2))
    monkeypatch.setattr(RunChannel, "send", noted)

    def was_sent(value: object, by: Any = handle) -> bool:
        sent.clear()
        found = two.run(by, [{"x": value}] * 2).get()
        assert [repr(own["y"]) for own in found] == [repr(value)] * 2
        return not all(isinstance(each, int) for each in sent)

    options = ({"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "name": "é"}, {"lr": 1.0})
    assert was_sent(options) and not was_sent(options)
    assert not was_sent(({**options[0]}, {"lr": 1.0}))
    assert was_sent(options, other) and not was_sent(options, other)
    for changed in (({"lr": 0.1}, {"lr": 1}), ({"lr": 0.1}, {"lr": True}), options):
        assert was_sent(changed)
    many = [float("nan"), [1, [2]]]
    assert was_sent(many) and not was_sent(many)
    many[1].append(3)  # type: ignore[union-attr]
    assert was_sent(many)
    for never_plain in ([numpy.float64(1.5)], [torch.ones(2)]):
        assert was_sent(never_plain) and was_sent(never_plain)
    assert was_sent(7.0) and was_sent("text")

    def refuses(*_: object, **__: object) -> NoReturn:
        raise TypeError("no")

    monkeypatch.setattr(RunChannel, "send", refuses)
    with pytest.raises(TypeError, match="no"):
        two.run(handle, [{"x": [5]}] * 2)
    monkeypatch.setattr(RunChannel, "send", noted)
    assert was_sent([5])  # it had not been sent before
    monkeypatch.undo()


def given_back(size: int) -> Program:
    """Return a program in which each rank returns its input, which must not be [0, ...]."""
    source = "def forward(x):\n    check(x)\n    return (x,)"
    give = function("give", source, check=_check)
    call = Call("give", ("x",), ("y",))
    names = [("x",)] * size, [("y",)] * size
    return program(*[[call]] * size, functions=[give], inputs=names[0], outputs=names[1])


def _check(x: Any) -> None:
    if isinstance(x, list) and type(x[0]) is int:
        1 / x[0]


def test_plain_input_data_of_undone_run_counts_as_sent(two: Cluster) -> None:
    """The next run still receives the data that the controller passes."""
    handle = two.load(given_back(2))
    assert two.run(handle, [{"x": [1]}] * 2).get() == [{"y": [1]}] * 2
    for _ in range(2):
        for future in [two.run(handle, [{"x": x}] * 2) for x in ([0], [0, 2])]:
            with pytest.raises(TaskError, match="ZeroDivisionError"):
                future.get()
    assert two.run(handle, [{"x": [1]}] * 2).get() == [{"y": [1]}] * 2


@on("send")
def test_actors_on_one_host_map_shared_memory(two: Cluster) -> None:
    run(two, two.load(among((0, 1), size=2))).get()
    for pid in pids_of(two):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert maps.count("memfd:dtensor") >= 2  # its own segment and its partner's


# -- errors ----------------------------------------------------------------------------------------

RAISES = function("act", "def forward(kind):\n    act(kind)\n    return (1,)", act=raisers.act)


@pytest.mark.default
def test_exception_of_any_class_in_call_is_reported_with_cause(two: Cluster) -> None:
    """The exception ends neither the host nor the controller."""
    call = Call("act", ("kind",), ("y",), label=Label("F0"), source="net.py:2: act(kind)")
    made = at_rank(1, [call], RAISES, inputs=["kind"], outputs="y")
    handle = two.load(made)
    for mode in MODES[:2]:
        for kind in raisers.NAMES:
            number = two.runs
            with pytest.raises(TaskError) as caught:
                two.run(handle, [{}, {"kind": kind}], mode=mode).get()
            text = str(caught.value)
            start = "rank 1 (stage 1), instruction 0 'y = call act(kind)' [F0]"
            assert text.startswith(f"{start}, run {number}: ") and "at net.py:2: act(kind)" in text
            raisers.check(caught.value, kind, carried=not two.immediate)
            assert two.failure is None
    two.run(handle, [{}, {"kind": "SystemExit"}], keep={"y": "kept"})
    with pytest.raises(TaskError, match="SystemExit: 3") as caught:
        two.get([(), ("kept",)]).get()
    raisers.check(caught.value, "SystemExit")


def test_error_names_user_line_and_undeclared_shape(two: Cluster) -> None:
    fails = Function(
        name="fails",
        source="def forward(x):\n    y = x + 1\n    return (y.reshape(77),)",
        lines=(None, "net.py:1: y = x + 1", "net.py:2: return y.reshape(77)"),
    )
    bad = function("bad", "def forward(x):\n    return (1, 2)")
    buffer = Buffer((2,), F32)
    for items, message, line in (
        ([Call("fails", ("x",), ("y",), source="net.py:0")], "RuntimeError: shape", "net.py:2: r"),
        ([Call("bad", ("x",), ("y",), source="net.py:9")], "returned 2 values for 1", "net.py:9"),
    ):
        made = at_rank(0, items, fails, bad, inputs="x", outputs="y")
        with pytest.raises(TaskError, match=message) as caught:
            two.run(two.load(made), [{"x": torch.ones(3)}, {}]).get()
        line_of_failure = caught.value.failure.line
        assert line_of_failure is not None and line_of_failure.startswith(line)
    lists = ([Send("x", 1, "c", buffer), Wait(("x",))], [Recv("y", 0, "c", buffer), Wait(("y",))])
    made = program(*lists, inputs=[("x",), ()], outputs=[(), ("y",)])
    with pytest.raises(CommunicationError, match=r"declared is f32\[2\]") as refused:
        two.run(two.load(made), [{"x": torch.ones(3)}, {}]).get()
    assert refused.value.failure.peers == (1,)


def test_value_that_raises_while_host_receives_it_fails_only_that_put(two: Cluster) -> None:
    """A put is not an instruction: the cluster goes on, even if the later runs are never read."""

    class Raises(torch.Tensor):
        def detach(self) -> NoReturn:  # type: ignore[override]
            raise SystemExit(3)

    handle = two.load(among((0,), size=2))
    immediate = two.immediate
    value: object = torch.ones(2).as_subclass(Raises) if immediate else raisers.Given("unpickled")
    for _ in range(2):
        with pytest.raises(HostError, match="SystemExit: 3") as caught:
            two.put([{"w": value, "x": 1}, {}])
            run(two, handle)
            assert two.get([None, ()]).get() == [()] * 2
            two.get([(), None]).get()
        raisers.check(caught.value, "SystemExit")
        assert immediate or str(caught.value).startswith("rank 0: ")
        assert two.failure is None and two.get([(), ()]).get() == [(), ()]


@pytest.mark.default
def test_invalid_arguments_of_cluster_calls_are_refused(two: Cluster) -> None:
    handle = two.load(pipeline(2))
    with pytest.raises(ValueError, match="Rank 0 of program 'test' takes the inputs"):
        two.run(handle, [{}, {}])
    with pytest.raises(ValueError, match="one item per rank"):
        two.put([{}])
    with pytest.raises(ValueError, match="one item per rank"):
        two.load(pipeline(3))
    with pytest.raises(ProgramError):
        two.load(program([Wait(("x",))], []))


# -- undone runs -----------------------------------------------------------------------------------


def update() -> Program:
    """Return a program in which both ranks add to `w` a value that rank 0 computes from its input,
    which must not be 0."""
    lists = (
        [Call("checked", ("x",), ("y",), label=Label("F0")), Send("y", 1, "c", WORD), Wait(("y",))],
        [Recv("y", 0, "c", WORD), Wait(("y",))],
    )
    end = [*AGREE, Call("add", ("w", "y"), (), ("w",))]
    return program(
        *([*items, *end] for items in lists),
        functions=[CHECKED, ADD],
        inputs=[("x",), ()],
        outputs=[("y",)] * 2,
        state=[("w",)] * 2,
    )


def feed(x: object) -> list[dict[str, object]]:
    return [{"x": x}, {}]


@pytest.mark.default
def test_failed_run_writes_on_no_rank(two: Cluster) -> None:
    handle = two.load(update())
    for mode in MODES:
        two.put([{"w": torch.zeros(())}] * 2)
        futures = [two.run(handle, feed(x), mode=mode) for x in (torch.tensor(4.0), 0, 1.0)]
        with pytest.raises(TaskError, match=r"(?s): ZeroDivisionError.*at net.py:2") as caught:
            futures[1].get()
        assert caught.value.failure.rank == 0
        with pytest.raises(CommunicationError, match="'y' is a float; declared: f32"):
            futures[2].get()
        assert futures[0].get()[1]["y"].item() == 5
        assert two.failure is None
        two.run(handle, feed(torch.tensor(2.0)), mode=mode).get()
        assert [w.item() for (w,) in two.get([("w",)] * 2).get()] == [8, 8]


COUNTED = """def forward(experts):
    1 / (experts.min() + 1).item()
    return (experts.bincount(minlength=4),)"""
SPLIT = """def forward(x, experts, fault):
    1 / (fault != 'fails')
    first = x[experts < 2]
    return (first[1:] if fault == 'shorter' else first, x[experts >= 2])"""
NOTE = """def forward(path, *received):
    Path(path).write_text(repr([each.tolist() for each in received]))
    return ()"""


def routed(size: int = 2) -> Program:
    """Return a program in which each rank has rows `x` of `experts`, two experts on each rank. The
    rows go to the ranks of their experts and back. Rank 0 writes what it receives into a file."""
    buffer = Buffer((5,), F32, bounded=True)
    counts, sent, back = (tuple(f"{name}{r}" for r in range(size)) for name in "ncb")
    received, vector = tuple(f"r{r}" for r in range(size)), Buffer((4,), torch.int64)
    group, buffers = tuple(range(size)), (buffer,) * size
    gather = Collective(
        *("all_gather", group, ("n",), counts, (vector,), (vector,) * size, None, "c"), on_host=True
    )
    there = Sizes(counts, tuple((2 * r, 2 * r + 1) for r in range(size)))
    items: list[Instruction] = [
        *(Call("counted", ("experts",), ("n",)), gather, Wait(counts)),
        Call("split", ("x", "experts", "fault"), sent, source="net.py:3: split(x)"),
        Collective(
            *("all_to_all", group, sent, received, buffers, buffers, None, "c"), sizes=there
        ),
        Wait(received),
        Collective(
            *("all_to_all", group, received, back, buffers, buffers, None, "c"),
            sizes=replace(there, returned=True),
        ),
        Wait(back),
    ]
    note = [Call("note", ("path", *received, *back), ())]
    end = [*AGREE, Call("sum", ("w", "r0"), (), ("w",)), Free((*counts, *sent, "n"))]
    return program(
        *([*items, *(note if rank == 0 else ()), *end] for rank in group),
        functions=[
            function("sum", "def forward(w, r):\n    w.add_(r.sum())\n    return ()"),
            *(
                function("counted", COUNTED),
                function("split", SPLIT),
                function("note", NOTE, Path=Path),
            ),
        ],
        inputs=[("x", "experts", "fault", *(("path",) if rank == 0 else ())) for rank in group],
        outputs=[(*received, *back)] * size,
        state=[("w",)] * size,
    )


@pytest.mark.default
def test_rank_that_fails_around_sized_exchange_sends_promised_zeros(
    two: Cluster, tmp_path: Path
) -> None:
    """Rank 1 fails before its counts (nothing is received from it), or after them (zeros of the
    promised length); the run is undone, and the next run is right."""
    handle, path = two.load(routed()), str(tmp_path / "received")
    x, experts = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 0, 2])
    y, others = torch.tensor([5.0, 6.0, 7.0, 8.0]), torch.tensor([1, 1, 0, 2])

    def feed(fault: str = "", **changes: object) -> list[dict[str, object]]:
        first = dict(x=x, experts=experts, fault="", path=path)
        return [first, {**dict(x=y, experts=others, fault=fault), **changes}]

    def received() -> object:
        return ast.literal_eval(Path(path).read_text())

    for mode in MODES:
        two.put([{"w": torch.zeros(1)}, {"w": torch.zeros(1)}])
        for given, seen, words in (
            (feed(experts=others - 1), [[2], [], [2], [1, 3]], "ZeroDivisionError"),
            (feed("fails"), [[2], [0, 0, 0], [2], [1, 3]], "ZeroDivisionError"),
            (feed("shorter"), [[2], [0, 0, 0], [2], [1, 3]], "'c0' has 2 rows, .* promise 3 to"),
        ):
            future = two.run(handle, given, mode=mode)
            with pytest.raises((TaskError, CommunicationError), match=words) as caught:
                future.get()
            assert caught.value.failure.rank == 1 and two.failure is None
            assert received() == seen
        found = two.run(handle, feed(), mode=mode).get()
        assert received() == [[2], [5, 6, 7], [2], [1, 3]]
        assert [found[1][name].tolist() for name in ("r0", "r1", "b0", "b1")] == [
            [1, 3],
            [8],
            [5, 6, 7],
            [8],
        ]
        assert [w.item() for (w,) in two.get([("w",)] * 2).get()] == [2, 4]


@pytest.mark.default
def test_value_kept_by_failed_run_is_poisoned_and_old_value_stays(two: Cluster) -> None:
    """Values computed from the poisoned value are poisoned too."""
    two.put([{"w": torch.zeros(()), "old": torch.ones(())}] * 2)
    handle, first = two.load(update()), two.runs
    for name in ("new", "old"):
        two.run(handle, feed(0), keep={"y": name})
    assert two.get([("old",)] * 2).get() == [(torch.ones(()),)] * 2
    for names in ([("new",), ()], [(), ("new",)]):  # rank 1 knows only that the run failed
        with pytest.raises(TaskError, match=rf"rank 0 .* run {first}: ZeroDivisionError"):
            two.get(names).get()
    later = two.run(handle, feed(Stored("new")), keep={"y": "newer"})
    for read in (later, two.get([(), ("newer",)])):
        with pytest.raises(TaskError, match=f"run {first}: ZeroDivisionError"):
            read.get()
    with pytest.raises(TaskError, match=f"run {first + 1}: ZeroDivisionError"):
        two.check_undone()  # the failure has not been read yet
    two.check_undone()
    two.delete([("new", "newer")] * 2)
    assert two.failure is None


def test_undone_run_without_known_reason_is_reported_as_such(two: Cluster) -> None:
    """Some hosts have only heard that the run was undone, and the host with the reason may have
    forgotten it."""
    assert isinstance(two, HostedCluster)
    made = at_rank(1, [Call("act", ("kind",), ())], RAISES, inputs=["kind"])
    with pytest.raises(TaskError, match="MemoryError"):
        two.run(two.load(made), [{}, {"kind": "MemoryError"}]).get()
    with pytest.raises(TaskError, match="rank 1 .*MemoryError: no room"):
        raise two.root([UndoneRun((), run=two.runs - 1)])
    with pytest.raises(TaskError, match="run 1000000: a run was undone, and no host says why"):
        raise two.root([UndoneRun((), run=1_000_000)])
    with pytest.raises(TaskError, match="no host says why"):
        raise two.root([UndoneRun(())])


def test_number_of_failed_run_is_reused_by_next_run(four: Cluster) -> None:
    """Also on ranks that took no part in the failed run."""
    four.put([{"w": torch.zeros(())}] * 4)
    groups = [(0, 1), (1, 2), (2,), (0, 1, 2), (0, 2)]
    handles = {group: four.load(numbered(group, 4)) for group in groups}
    submitted, undone = 0, 0

    def step(group: tuple[int, ...], x: float, known: int = 0, *, takes: bool = True) -> None:
        nonlocal submitted, undone
        number = submitted - known
        fed = [{"x": x, "n": number} if rank in group else {} for rank in range(4)]
        four.run(handles[group], fed, keep={"y": "made"}, counted=Counted("s", known, "n", takes))
        undone += takes and not x
        if x:
            found = four.get([("w",) if rank in group else () for rank in range(4)]).get()
            assert {w.item() for own in found for w in own} == {submitted - undone}
        submitted += takes

    for group, x in [((0, 1), 1.0), ((0, 1), 0.0), ((1, 2), 1.0), ((2,), 0.0), ((0, 1), 1.0),
                     ((0, 1, 2), 0.0), ((0, 2), 0.0), ((2,), 1.0), ((0, 1, 2), 1.0)]:  # fmt: skip
        step(group, x)
    step((0, 1), 1.0, known=1)
    step((0, 1), 0.0, takes=False)  # this run has no number
    step((0, 1), 1.0, takes=False)
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        four.check_undone()


def numbered(ranks: Sequence[int], size: int) -> Program:
    """Return a program in which these ranks record the number of the run, unless one of them is
    fed 0."""
    vote, total, *rest = AGREE
    assert isinstance(total, Collective)
    agree: list[Instruction] = [vote, replace(total, group=tuple(ranks)), *rest]
    if len(ranks) == 1:
        agree = [vote, replace(rest[1], value="v"), Free(("v",))]  # type: ignore[call-arg]
    items = [Call("checked", ("x",), ("y",)), *agree, Call("noted", ("w", "n"), (), ("w",))]
    own = [rank in ranks for rank in range(size)]
    return program(
        *(items if each else [] for each in own),
        functions=[CHECKED, NOTED],
        inputs=[("x", "n") if each else () for each in own],
        outputs=[("y",) if each else () for each in own],
        state=[("w",) if each else () for each in own],
    )


@pytest.mark.parametrize("how", ["after the commit point", "no commit point", "others keep it"])
def test_failure_without_rollback_loses_state_and_closes_cluster(
    backend: Backend, how: str
) -> None:
    with backend.cluster(2) as cluster:
        keep: dict[str, str] = {}
        fed = feed(0)
        match how:
            case "after the commit point":
                made, fed = update(), feed(torch.tensor(1.0))
                cluster.put([{"w": "no tensor"}, {"w": torch.zeros(())}])
            case "no commit point":
                add = Call("add", ("w", "x"), (), ("w",))
                items = [add, Call("checked", ("x",), ("y",)), Free(("y",))]
                made = at_rank(0, items, CHECKED, ADD, inputs="x", state="w")
                cluster.put([{"w": torch.zeros(())}, {}])
            case _:
                sends = [Call("checked", ("x",), ("y",)), Send("y", 1, "c", WORD), Wait(("y",))]
                takes = [Recv("y", 0, "c", WORD), Wait(("y",))]
                names = [("x",), ()], [("y",)] * 2
                made = program(sends, takes, functions=[CHECKED], inputs=names[0], outputs=names[1])
                with pytest.raises(TaskError):
                    cluster.run(cluster.load(made), fed).get()
                assert cluster.failure is None  # the returned value is not used
                keep = {"y": "kept"}  # rank 1 has a zero for the run
        with pytest.raises(TaskError) as caught:
            cluster.run(cluster.load(made), fed, keep=keep).get()
            cluster.get([(), ()]).get()
        assert how == "no commit point" or caught.value.failure.rank == 0
        assert cluster.failure is caught.value
        with pytest.raises(TaskError):
            cluster.put([{}, {}])


# -- hosts that are lost, and deadlines ------------------------------------------------------------


def pids_of(cluster: Cluster) -> list[int]:
    getpid = function("getpid", "def forward():\n    return (getpid(),)", getpid=os.getpid)
    call, size = Call("getpid", (), ("y",)), cluster.size
    made = program(*[[call]] * size, functions=[getpid], outputs=[("y",)] * size)
    return [own["y"] for own in cluster.run(cluster.load(made), [{}] * size).get()]


def all_end(pids: Sequence[int]) -> bool:
    """Wait until these processes have ended. Ray may take a moment to notice a process that it did
    not end."""
    end = time.monotonic() + 600.0
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(running, pids))


LOSSES: dict[str, tuple[int, str]] = {
    "killed in a call": (1, r"(?s)instruction 0 .*call kills.* \[F1\].* died.*net.py:8"),
    "killed between runs": (0, "died"),
    "stopped": (1, "has stopped"),
    "its connection breaks": (1, "rank 1: its connection to the controller"),
    "hangs": (1, r"(?s)instruction 0 .*no progress for more than 1 s.*net.py:8: waits\(path\)"),
}
"""By how: the rank that is named, and what is said."""


@pytest.mark.default
@on("lose a host")
@pytest.mark.parametrize("how", LOSSES)
def test_lost_host_is_named_and_every_later_call_raises_same_error(
    backend: Backend, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is left running."""
    from dtensor.daft.ray.diagnosis import failure_detector

    monkeypatch.setattr(failure_detector, "SETTLE_S", 0.5)
    by = {"killed in a call": "kills", "hangs": "waits"}.get(how, "next")
    with backend.cluster(2) as made:
        cluster: Any = made
        pids, handle = pids_of(cluster), cluster.load(among((0, 1), by, size=2))
        if how == "killed between runs":
            os.kill(pids[0], signal.SIGKILL)
        elif how == "stopped":
            os.kill(pids[1], signal.SIGSTOP)
        elif how == "its connection breaks":
            cluster.channel._break(cluster.channel._connections[1])
        future = run(cluster, handle, tmp_path / "never")
        if how == "hangs":
            await_places(cluster, {0: 2, 1: 0})
        if how in ("hangs", "stopped"):
            cluster.watch.deadline_s = 1.0  # set after the start, which may take longer
        with pytest.raises(ActorLost, match=LOSSES[how][1]) as caught:
            future.get()
        assert caught.value.failure.rank == LOSSES[how][0]
        for again in (lambda: cluster.put([{}, {}]), lambda: cluster.get([(), ()])):
            with pytest.raises(ActorLost) as later:
                again()
            assert later.value is caught.value
        cluster.close()
        cluster.close()
        assert all_end(pids)


def await_places(cluster: Any, places: dict[int, int]) -> None:
    """Wait until these hosts stay at these positions of their lists."""
    while any(cluster.membership.host(h).counter.read().position != at for h, at in places.items()):
        time.sleep(0.01)


@contextmanager
def clock_of(cluster: Any, host: int) -> Iterator[None]:
    """Make the controller's clock advance by the CPU time of this host inside the block.
    Otherwise, on a machine that stalls, a host that computes all the time would seem to stand
    still."""
    from dtensor.daft.ray.diagnosis import failure_detector

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


def warned_of(future: Future, rank: int) -> str:
    """Return the warning about a rank that is issued while a future that never completes is waited
    for. On a busy machine other ranks, waiting for a core, may seem to compute too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while True:
            with pytest.raises(TimeoutError):
                future.get(timeout=0.3)
            for warning in caught:
                if (text := str(warning.message)).startswith(f"rank {rank} "):
                    return text


@on("lose a host")
def test_computing_rank_is_not_ended_before_call_deadline(backend: Backend, tmp_path: Path) -> None:
    """Another pair of ranks that stands still meanwhile is not reported as hanging."""
    go, free = tmp_path / "go", tmp_path / "free"
    with backend.cluster(4) as made, clock_of(made, 1):
        cluster: Any = made
        stands = run(cluster, cluster.load(among((2, 3), "waits")), free)
        busy = run(cluster, cluster.load(among((0, 1), "spins")), go)
        await_places(cluster, {0: 2, 1: 0, 2: 2, 3: 0})
        cluster.watch.deadline_s = 1.0
        where, line = warned_of(busy, 1).splitlines()
        assert where.startswith("rank 1 (stage 1), instruction 0 'y = call spins(x, path)' [F1]")
        assert where.endswith(
            ": it has computed for more than 1 s, and may take up to 3600 s (call_deadline_s)."
        )
        assert line == "  at net.py:8: spins(path)"
        with pytest.raises(TimeoutError):
            busy.get(timeout=1.0)
        cluster.watch.deadline_s = 3600.0
        go.touch()
        assert busy.get()[0]["s"].item() == 4
        free.touch()
        assert stands.get()[2]["s"].item() == 4
        never = run(cluster, cluster.load(among((0, 1), "spins")), tmp_path / "never")
        await_places(cluster, {0: 2, 1: 0})
        cluster.watch.deadline_s, cluster.watch.call_deadline_s = 1.0, 2.0
        with (
            pytest.warns(RuntimeWarning, match="may take up to 2 s"),
            pytest.raises(ActorLost, match="in one call for more than 2 s") as lost,
        ):
            never.get()
        assert (lost.value.failure.rank, lost.value.failure.line) == (1, "net.py:8: spins(path)")


@on("lose a host")
@pytest.mark.parametrize("how", ["blocked", "stopped"])
def test_progress_of_one_rank_does_not_hide_hang_of_another(
    backend: Backend, tmp_path: Path, how: str
) -> None:
    """Rank 1 is blocked in a call, or stopped, while rank 3 makes steps."""
    with backend.cluster(4) as made:
        cluster: Any = made
        fine, steps = cluster.load(among((3,))), 0
        hangs = run(cluster, cluster.load(among((0, 1), "waits")), tmp_path / "never")
        # it waits for rank 0, which waits in a run without rank 2
        behind = run(cluster, cluster.load(among((0, 2))))
        run(cluster, fine).get()
        await_places(cluster, {0: 2, 1: 0, 2: 2})
        if how == "stopped":
            os.kill(cluster._launch.processes[1].counter.pid, signal.SIGSTOP)
        with pytest.raises(ActorLost) as lost:
            while True:
                cluster.watch.deadline_s = 3600.0  # a step of rank 3 may take long
                steps += int(run(cluster, fine).get()[3]["y"].item()) - 1
                cluster.watch.deadline_s = 3.0
                with pytest.raises(TimeoutError):
                    behind.get(timeout=0.3)
        assert lost.value.failure.rank == 1 and steps > 0
        words = "no progress for more than 3 s" if how == "blocked" else "has stopped"
        assert words in str(lost.value)
        with pytest.raises(ActorLost):
            hangs.get()


@on("time out")
def test_run_that_ends_at_deadline_returns_its_result(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller looks at the clock only after the last call has returned."""
    from dtensor.daft.ray.channel.run_channel import NotYet, Reply, RunChannel

    with backend.cluster(1) as made:
        cluster: Any = made
        future = run(cluster, cluster.load(among((0,), size=1)))
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
        assert future.get()[0]["s"].item() == 3


@on("lose a host")
def test_lost_host_is_raised_rather_than_host_that_failed_because_of_it(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the loss is seen first, and if the host reports the loss before it is raised."""
    from dtensor.daft.ray.channel.run_channel import NotYet, RunChannel
    from dtensor.daft.ray.diagnosis.failure_detector import FailureDetector

    with backend.cluster(2) as made:
        cluster: Any = made
        hangs = run(cluster, cluster.load(among((0, 1), "exits", size=2)), tmp_path / "go")
        alone = cluster.load(among((0,), size=2))
        behind = run(cluster, alone)  # rank 0 learns of the loss after it has failed
        channel, watching = cluster.channel, cluster.watch
        root, get = FailureDetector.root, RunChannel.get

        def first(self: RunChannel, replies: Any, seconds: float) -> list[Any]:
            if not watching.lost:  # no message is read before the loss is noticed
                time.sleep(seconds)
                raise NotYet
            return get(self, replies, seconds)

        def then(self: FailureDetector, *given: Any) -> Exception:
            found = root(self, *given)
            while not channel._connections[0].unread:
                channel.listen(0.01)
            return found

        monkeypatch.setattr(RunChannel, "get", first)
        monkeypatch.setattr(FailureDetector, "root", then)
        (tmp_path / "go").touch()
        with pytest.raises(ActorLost, match="rank 1"):
            behind.get()
        monkeypatch.undo()
        with pytest.raises(ActorLost, match="rank 1"):
            hangs.get()


# -- interrupts and the end ------------------------------------------------------------------------


@pytest.mark.default
@on("be interrupted")
def test_interrupt_while_controller_waits_leaves_cluster_usable(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller reads nothing at that moment, so no message is lost."""
    from dtensor.daft.ray.channel.run_channel import RunChannel

    handle = two.load(among((0, 1), "waits", size=2))
    with ctrl_c_interrupts():
        future = run(two, handle, tmp_path / "go")
        get = RunChannel.get
        waiting = threading.Event()

        def noted(self: RunChannel, *given: Any) -> list[Any]:
            waiting.set()
            return get(self, *given)

        def presses() -> None:
            waiting.wait()
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=presses)
        thread.start()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RunChannel, "get", noted)
            future.get()
        thread.join()
        large = torch.arange(1 << 22)
        two.put([{"w": large}, {"w": large + 1}])  # while both are in their call
        (tmp_path / "go").touch()
        assert future.get()[1]["s"].item() == 4 and two.failure is None
        found = two.get([("w",), ("w",)]).get()
        assert torch.equal(found[0][0], large) and torch.equal(found[1][0], large + 1)


@on("be interrupted")
def test_interrupt_between_calls_of_run_closes_cluster(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some actors have received the run and others have not, so they would wait for ever."""
    with backend.cluster(2) as made:
        cluster: Any = made
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 2)
        handle = cluster.load(pipeline(2))
        fed: list[dict[str, object]] = [{"x": torch.zeros(4)}, {}]
        before = cluster.run(handle, fed)
        send, sent = type(cluster.channel).send, list[object]()

        def interrupted(self: Any, *args: Any, **options: Any) -> object:
            if sent:
                raise KeyboardInterrupt
            sent.append(args)
            return send(self, *args, **options)

        monkeypatch.setattr(type(cluster.channel), "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(handle, fed)
        assert before.get()[1]["y"].tolist() == [2.0] * 4
        with pytest.raises(CommunicationError, match="it was interrupted while state changed"):
            cluster.run(handle, fed)


@pytest.mark.default
def test_closed_cluster_refuses_calls(backend: Backend) -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        backend.cluster(0)
    with backend.cluster(1) as cluster:
        handle = cluster.load(given_back(1))
        future = cluster.run(handle, [{"x": 1}])
        assert future.get() == [{"y": 1}]
    cluster.close()
    for use in (lambda: cluster.put([{}]), lambda: cluster.run(handle, [{"x": 1}])):
        with pytest.raises(ClusterClosed):
            use()


# -- actors ----------------------------------------------------------------------------------------

X = torch.arange(8.0).reshape(2, 4) / 10
WEIGHTS = [Model(seed).weight.detach() for seed in range(8)]


@pytest.fixture
def session(backend: Backend) -> Iterator[daft.Session]:
    made = backend.session()
    yield made
    made.close(quiet=True)


@pytest.mark.default
def test_tasks_give_same_results_interpreted_and_compiled_on_each_backend(backend: Backend) -> None:
    expected = run_everything(Backend("inprocess"), False)
    assert expected[1]["sent"] is not None and expected[3]["total"][2] == "4 times"
    for compiled in (False, True)[backend.immediate :]:
        assert same(run_everything(backend, compiled), expected)


def run_everything(backend: Backend, compiled: bool) -> list[Any]:
    """Return the results of groups, actors that share a process, three alternating compiled
    functions, and steps that run ahead."""
    with backend.session() as session:
        group = daft.WorkerGroup(Model, 3, daft.Scatter([5, 6, 7]))
        a, b = daft.spawn(Model, 1, host=group[0]), daft.spawn(Model, seed=2, host=group[1])

        def fn(x: torch.Tensor, more: dict[str, Any], verbose: bool = False) -> dict[str, Any]:
            y = a.execute(x)
            batch = b.grow(y, more["times"])
            loss = b.train(x=b.execute(x=y))
            ys = group.execute(daft.Scatter([x, y, y]))
            return {
                "total": a.total(batch),
                "loss": [loss, a.load(b.weights()), b.pair(y)[1]],
                "after": a.execute(x),
                "reduced": daft.all_reduce(group.weights(), "max"),
                "group": group.execute(daft.all_reduce(ys)),
                "gathered": daft.all_gather(ys),
                "sent": daft.broadcast(y, group) if verbose else None,
                "x": x,
            }

        def f(x: Any) -> Any:
            y = group[2].execute(b.execute(a.execute(x)))
            return {"y": y, "loaded": b.load(a.weights())}

        def g(x: Any) -> Any:
            return {"z": a.add([b.execute(x), x]), "loaded": a.load(group[2].weights())}

        step, *others = [daft.compile(each) if compiled else each for each in (fn, f, g)]
        steps = [step(X + i, {"times": i}, verbose=i == 2) for i in (1, 2, 3)]  # run ahead
        calls = session.calls
        steps.append(step(a.execute(X), {"times": b.total(b.grow(X, 2))[1]}, verbose=False))
        if compiled:
            assert session.calls - calls == 4 + 3  # four tasks, and one call per process
        steps += [each(X + k / 10) for k, each in enumerate(others * 2)]
        steps.append(g(steps[-2]["y"]))  # one interpreted step between compiled ones
        steps += [each(steps[-1]["z"]) for each in others]  # on values of other steps
        return [_values(made) for made in steps]


def _values(made: dict[str, Any]) -> dict[str, Any]:
    get = lambda v: v.get() if isinstance(v, daft.TaskFuture | daft.GroupFuture) else v  # noqa: E731
    return {k: [get(i) for i in v] if isinstance(v, list) else get(v) for k, v in made.items()}


@on("send")
def test_random_task_programs_give_same_results_on_each_backend(backend: Backend) -> None:
    count, wrong = compared(range(1000, 1024))
    assert not wrong and len(count) == 2


@pytest.mark.default
def test_values_of_actors_share_no_memory(session: daft.Session) -> None:
    x = X.clone()
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
    a.keep(x)
    kept = a.get_kept()
    b.keep(kept)
    for actor in (a, b):
        assert actor.overwrite(kept).get().eq(7).all()
    before = a.weights()
    a.train(X)
    assert same(x, X) and same(b.get_kept().get(), X) and same(kept.get(), X)
    assert same(before.get()["weight"], WEIGHTS[1])


def test_async_methods_and_function_arguments_work_in_tasks(session: daft.Session) -> None:
    a, b, factor = daft.spawn(Feeder), daft.spawn(Feeder), 3
    x, turn = b.slowly(a.slowly(X)[0]).get()
    assert same(x, X) and turn == 1
    assert daft.compile(lambda x: a.slowly(x))(3).get() == (3, 2)
    with pytest.raises(daft.TaskError, match="actor 'Feeder-0', fail_slowly: ValueError: not in"):
        a.fail_slowly().get()
    assert a.meet(True).get() == [] and a.meet(False).get() == ["kept"]

    async def outer() -> Any:  # as in a notebook
        return a.slowly(5).get()

    assert asyncio.run(outer()) == (5, 3)

    def times(x: Any) -> Any:
        return x * factor

    assert same(a.call(times, X).get(), X * 3)
    assert a.call(lambda x: [x, factor], 4).get() == [4, 3]
    assert daft.compile(lambda x: a.call(lambda x: x + factor, x))(4).get() == 7
    assert a.call(lambda x: lambda y: x + y, 4).get()(5) == 9


def test_generator_methods_return_streams_of_futures(session: daft.Session) -> None:
    a, model = daft.spawn(Feeder), daft.spawn(Model, 1)
    seen: list[Any] = []
    for number, batch in enumerate(a.batches(X, 2)):
        assert isinstance(batch, daft.TaskFuture) and a.last().get() == number
        seen.append(model.execute(batch))
    assert len(seen) == 2 and same(seen[1].get(), (X + 1) @ WEIGHTS[1])
    assert [item.get() for item in a.later(3)] == [0, 1, 2]
    stream, items = a.batches(X, 3), []
    with pytest.raises(daft.TaskError, match="'Feeder-0', advance: ValueError: no more than two"):
        items += stream
    assert len(items) == 3 and list(stream) == []
    stream = a.batches(X, 100)
    assert same(next(stream).get(), X)
    stream.close()
    stream.close()
    assert list(stream) == [] and a.last().get() == 0
    with pytest.raises(daft.TaskError, match="cannot go between actors: .*'?generator'?"):
        a.lazily().get()
    with pytest.raises(daft.ProgramError, match="its values are read: Feeder-0.batches"):
        daft.compile(lambda x: a.batches(x, 2))(X)
    with pytest.raises(daft.TaskError, match="__init__: RuntimeError: no weights on this disk"):
        next(iter(daft.spawn(Unborn).items()))


def test_unreferenced_streams_are_closed_on_actor(session: daft.Session) -> None:
    a = daft.spawn(Keeper)
    for _ in a.count(5):
        break
    a.count(6)
    assert a.streams().get() == 0 and a.get_kept().get() == 5
    with pytest.raises(daft.TaskError, match="no more"):
        list(a.count(1))
    assert a.streams().get() == 0
    with pytest.raises(TypeError, match="stream of Keeper-0.count> belongs to the controller"):
        a.same(a.count(2))
    group = daft.WorkerGroup(Keeper, 2, name="g")
    assert [next(stream).get() for stream in group.count(2)] == [0, 0]


def test_numpy_arrays_round_trip_and_shared_arrays_stay_shared(session: daft.Session) -> None:
    a, b = daft.spawn(Feeder), daft.spawn(Feeder)
    values = [
        numpy.arange(1000.0),
        numpy.arange(100_000, dtype=numpy.int16).reshape(100, -1),
        numpy.ones((200, 300), order="F"),
        numpy.arange(30_000.0)[::3],
        numpy.array(["a", "bc"]),
        numpy.array([None, {}], dtype=object),
        numpy.array([1, 2], dtype=">i4"),
        numpy.zeros(3, dtype=[("x", "f4"), ("y", "i8")]),
        numpy.array("2026-01-01", dtype="M8[D]"),
        numpy.float32(2),
        numpy.empty((0, 3)),
    ]
    step = daft.compile(lambda x: b.slowly(a.slowly(x)))
    for value in values:
        for given in (b.slowly(a.slowly(value)), step(value)):
            (found, _), _ = given.get()
            assert type(found) is type(value) and found.dtype == value.dtype
            numpy.testing.assert_array_equal(found, value)
            plain = found.dtype.kind in "fi" and not found.dtype.names
            assert not isinstance(found, numpy.ndarray) or not plain or found.flags.writeable
    both = numpy.arange(50_000.0)
    found, again = a.call(lambda x: x, [both, both]).get()
    assert found is again and found is not both


@pytest.mark.default
def test_tensor_metadata_round_trips_between_actors(session: daft.Session) -> None:
    """Covers arguments of `spawn` and of a call, results, and values sent from actor to actor."""
    a, values = daft.spawn(Keeper), kinds()
    assert parts(daft.spawn(Kept, values).get().get()) == parts(values)
    for name, value in values.items():
        assert parts(a.same(a.same(value)).get()) == parts(value), name
    whole, row = a.same([EYE, EYE[0]]).get()
    row.zero_()
    assert whole[0].sum() == 0
    assert not a.call(lambda x: x * 2, torch.ones(2, requires_grad=True)).get().requires_grad
    hooked = torch.ones(2, requires_grad=True)
    hooked.register_hook(lambda grad: grad)
    with pytest.raises(TypeError, match="a tensor torch.float32.2. has a hook on its gradient"):
        a.same(hooked)


def test_wait_returns_first_finished_futures_or_times_out(
    session: daft.Session, backend: Backend, tmp_path: Path
) -> None:
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
    a.meet_in(str(tmp_path)).get()
    done, rest = daft.wait([b.execute(X), a.execute(X)], num=2)
    assert len(done) == 2 and not rest
    failed = a.fail(X)
    assert daft.wait([failed]) == ([failed], [])
    futures = [a.execute(X) for _ in range(3)]
    assert daft.wait(futures, num=3)[0] == futures
    done, rest = daft.wait(futures)
    assert done == futures[:1] and rest == futures[1:]
    with pytest.raises(TypeError, match=r"takes futures of tasks, got 3.*\n  at .*\n  Fix:"):
        daft.wait([3])  # type: ignore[list-item]
    for num in (0, 4, 1.0):
        with pytest.raises(ValueError, match=r"num=.* of 3 futures.*\n  at .*\n  Fix:"):
            daft.wait(futures, num=num)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="given twice"):
        daft.wait([failed, failed])
    if not backend.immediate:
        late = a.await_mark(5.0)
        assert daft.wait([late, b.execute(X)])[1] == [late]
        begin = time.monotonic()
        assert daft.wait([late], timeout=0.1) == ([], [late])
        assert time.monotonic() - begin >= 0.1
        (tmp_path / "5").touch()
        assert daft.wait([late]) == ([late], [])


@on("run ahead")
def test_tasks_run_ahead_of_slow_actor(session: daft.Session, tmp_path: Path) -> None:
    """Actor b in step i waits until a has reached step i + 1, so in-turn execution would
    deadlock."""
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
    for actor in (a, b):
        actor.meet_in(str(tmp_path))
    a.mark(0.5)
    wait_for_file(str(tmp_path / "0.5"))  # a task starts although no one waits for its result
    step = daft.compile(lambda x, n: (b.add([a.execute(x), x]), b.await_mark(a.mark(n))))
    futures = [step(X + i, float(i)) for i in range(3)]
    assert futures[1][1].get() == 2.0
    with pytest.raises(TimeoutError, match="ask again"):
        futures[2][1].get(timeout=0.05)
    assert not futures[2][1].done()
    (tmp_path / "3").touch()
    assert futures[2][1].get() == 3.0
    assert all(f.done() for pair in futures for f in pair)
    b.keep(a.await_mark(9.0))  # a task that waits for its arguments keeps its order
    step(X, 0.0)
    kept = b.get_kept()
    b.keep(X)
    assert not kept.done()
    (tmp_path / "9").touch()
    assert kept.get() == 9.0
    _, wa, wb = WEIGHTS[:3]
    for i, (y, _) in enumerate(futures):
        assert same(y.get(), torch.stack([(X + i) @ wa, X + i]).sum(0) + wb[0])


@pytest.mark.default
@on("send")
def test_tensors_between_actors_bypass_controller(session: daft.Session) -> None:
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)
    x = torch.ones(256, 64)  # 64 KiB to a, 4 MiB from a to b, a few bytes back

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return b.total(a.grow(x, 64))[0], a.execute(y)

    for act in (fn, daft.compile(fn)):
        sent, received = session.bytes_sent, session.bytes_received
        total, small = act(x, X)
        assert total.get() == 64.0 * x.numel()
        assert session.bytes_sent - sent < 1.1 * x.nbytes + 10_000
        assert session.bytes_received - received < 1_000
        assert same(b.execute(small).get(), X @ WEIGHTS[1] @ WEIGHTS[2])


def test_actors_of_any_class_can_share_one_process(session: daft.Session) -> None:
    a, b = daft.spawn(Model, 1), daft.spawn(Model, 2)

    class Local:  # actors cannot import this class
        def __init__(self, model: dict[str, Any]) -> None:
            self.weight = model["weight"]

        def process(self) -> int:
            return os.getpid()

        def execute(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    local = daft.spawn(Local, b.weights(), host=a)
    assert local.process().get() == a.process().get()
    step = daft.compile(lambda x: local.execute(a.execute(local.execute(b.execute(x)))))
    _, wa, wb = WEIGHTS[:3]
    calls = session.calls
    assert same(step(X).get(), X @ wb @ wb @ wa @ wb)
    assert session.calls - calls <= 2 + 2  # load and run; three actors on two processes


@pytest.mark.default
@on("know resources")
def test_spawn_refuses_resources_that_ray_lacks(session: daft.Session) -> None:
    message = r"asks for \{'GPU': 1000\}, and Ray has .*\n  at .*test_contract.py:\d+ in test_"
    with pytest.raises(ValueError, match=message):
        daft.spawn(Model, resources={"GPU": 1000})


# -- actors that fail, or end ----------------------------------------------------------------------


@pytest.mark.default
def test_failed_task_raises_with_caller_and_actor_tracebacks(session: daft.Session) -> None:
    a, b = daft.spawn(Model, name="first"), daft.spawn(Model)
    fn = lambda x: (b.execute(b.add([a.fail(x)])), b.execute(x))  # noqa: E731
    step = daft.compile(fn)
    for act in (fn, step, step):
        failed, fine = act(X)
        with pytest.raises(daft.TaskError) as caught:
            failed.get()
        text = str(caught.value)
        here, _, there = text.rpartition("traceback")
        assert "actor 'first', fail: ValueError: no good: Tensor" in text
        assert "test_contract.py" in here and "b.execute(b.add([a.fail(x)]))" in here
        assert "actor_classes.py" in there and 'raise ValueError(f"no good' in there
        assert "was not run, as it depends on this." in caught.value.__notes__[-1]
        assert same(fine.get(), X @ WEIGHTS[0])  # the actor is still usable
    with pytest.raises(daft.TaskError, match="actor 'Unborn-0', __init__: .*on this disk"):
        b.execute(daft.spawn(Unborn).execute(X)).get()
    with pytest.raises(daft.TaskError, match="lock: TypeError: This value cannot go"):
        a.lock().get()
    with pytest.raises(daft.TaskError, match=r"declared: f32\[2,4\]\n  returned: f32\[3,4\]"):
        a.declared(torch.ones(3, 4)).get()


def test_exception_of_any_class_in_task_is_reported_with_cause(session: daft.Session) -> None:
    actor, other = daft.spawn(raisers.Actor), daft.spawn(raisers.Actor)
    x = torch.ones(2)
    for kind in raisers.NAMES:
        step = lambda x: (other.good(actor.fail(kind)), actor.good(x))  # noqa: E731, B023
        for act in (step, daft.compile(step)):
            failed, good = act(x)
            with pytest.raises(TaskError) as caught:
                failed.get()
            text = str(caught.value)
            assert text.splitlines()[0].startswith(f"actor {caught.value.failure.actor!r}, fail: ")
            assert "test_contract.py" in text and "was not run" in caught.value.__notes__[-1]
            raisers.check(caught.value, kind)
            assert good.get().tolist() == [2.0, 2.0]


def test_exception_in_actor_init_attribute_or_result_is_reported(session: daft.Session) -> None:
    """Covers pickling on the actor and unpickling on the controller."""
    exiting = daft.spawn(raisers.Actor, "SystemExit")
    actor = daft.spawn(raisers.Actor)
    futures = {
        "__init__": exiting.good(1),
        "through_property": actor.through_property(),
        "give": actor.give("pickled"),
    }
    unpickled = actor.give("unpickled")
    for name, future in futures.items():
        with pytest.raises(TaskError, match=f", {name}: SystemExit: 3") as caught:
            future.get()
        raisers.check(caught.value, "SystemExit")
    with pytest.raises(TaskError, match=", give: its result does not unpickle here: SystemExit: 3"):
        unpickled.get()
    with pytest.raises(TaskError, match=", good: SystemExit: 3"):
        actor.good(unpickled).get()
    assert actor.good(1).get() == 2


@pytest.mark.default
def test_unread_task_failure_is_raised_at_end_of_launch(backend: Backend) -> None:
    with pytest.raises(daft.TaskError, match="no good: int") as caught, backend.session():
        a = daft.spawn(Model)
        for _ in range(2):
            a.fail(1)
    assert "2 such failures in all" in caught.value.__notes__[0]
    with pytest.raises(KeyError, match="mine"), backend.session():  # the user's own comes first
        daft.spawn(Model).fail(1)
        raise KeyError("mine")


@pytest.mark.default
def test_daft_end_ends_actor_and_leaves_others_running(session: daft.Session) -> None:
    a, b, c = (daft.spawn(Model, seed, name=name) for seed, name in enumerate("abc"))
    x = a.execute(X)
    y = b.execute(x)
    assert same(y.get(), X @ WEIGHTS[0] @ WEIGHTS[1])
    c.execute(X)  # this result is not read
    daft.end(c)
    daft.end(c)
    with pytest.raises(
        daft.ActorLost, match="actor 'c'.*: it was ended by daft.end, at .*contract"
    ):
        a.execute(c.execute(X)).get()
    assert same(b.execute(a.execute(X)).get(), y.get())
    with pytest.raises(TypeError, match="end takes an actor"):
        daft.end(x)  # type: ignore[arg-type]


@on("run ahead")
def test_futures_of_actor_ended_before_its_start_raise_actor_lost(session: daft.Session) -> None:
    a = daft.spawn(NeverBegun)
    early = a.same(1)
    daft.end(a)
    for future in (early, a.same(torch.ones(MANY))):
        with pytest.raises(daft.ActorLost, match="it was ended by daft.end, at"):
            future.get(timeout=600.0)


@pytest.mark.default
@on("lose a host")
def test_dead_actor_is_named_and_other_actors_continue(session: daft.Session) -> None:
    a, b, c = (daft.spawn(Model, i, name=n) for i, n in enumerate("abc"))
    step = daft.compile(lambda x: (b.execute(a.execute(x)), c.execute(x)))
    kill = daft.compile(lambda x: b.execute(a.die(x)))
    step(X)[0].get()
    for future in (kill(X), b.execute(a.execute(X))):
        with pytest.raises(daft.ActorLost, match="actor 'a', die: the process died") as caught:
            future.get()
        assert "daft.compile(lambda x: b.execute(a.die(x)))" in str(caught.value)
        assert "daft/ray/actors/session.py" not in str(caught.value)
    with pytest.raises(daft.ActorLost, match="actor 'a', die: the process died"):
        step(X)
    assert same(b.execute(c.execute(X)).get(), X @ WEIGHTS[2] @ WEIGHTS[1])
    # One that is lost now, after another: each is named.
    other = daft.compile(lambda x: b.execute(c.execute(x)))
    assert same(other(X).get(), X @ WEIGHTS[2] @ WEIGHTS[1])
    process = c.process().get()
    for future in (daft.compile(lambda x: b.execute(c.die(x)))(X), b.execute(c.execute(X))):
        with pytest.raises(daft.ActorLost, match="actor 'c', die: the process died"):
            future.get()
    session.close(quiet=True)
    assert all_end([process])


@on("lose a host")
def test_stopped_actor_and_actor_past_deadline_are_named(backend: Backend, tmp_path: Path) -> None:
    unread = pytest.raises(daft.TaskError, match="actor 'b', fail: ValueError: no good: int")
    with unread, backend.session() as made:
        session: Any = made
        a, b, c = (daft.spawn(Model, name=n) for n in "abc")
        process = a.process().get()
        daft.wait([b.fail(1)])
        c.meet_in(str(tmp_path)).get()
        session.watch.call_deadline_s = 1.0  # no other rank is in a call
        with pytest.raises(daft.ActorLost, match="'c', await_mark: .* one call for more than 1 s"):
            c.await_mark(1.0).get()
        session.watch.call_deadline_s = math.inf
        os.kill(process, signal.SIGSTOP)
        session.watch.deadline_s = 3.0  # starting takes longer
        with pytest.raises(daft.ActorLost, match="actor 'a': the process has stopped: no heart"):
            a.execute(X).get()
    assert all_end([process])


@on("run ahead")
def test_interrupted_submission_of_step_fails_actor_that_has_its_part(
    session: daft.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that received its part would wait for the other part and block later work."""
    a, b = daft.spawn(Model, 1, name="a"), daft.spawn(Model, 2, name="b")
    step = daft.compile(lambda x: a.add([x, b.execute(a.execute(x))]))
    step(X).get()
    kind: Any = type(session)
    number, asked = kind._number, list[str]()

    def interrupted(self: Any, title: str, *args: Any) -> int:
        asked.append(title)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return number(self, title, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_number", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(X)
    with pytest.raises(daft.ActorLost, match="actor 'a'.*a step was half submitted"):
        step(X)
    assert same(b.execute(X).get(), X @ WEIGHTS[2])


# -- what is kept of values that nobody has --------------------------------------------------------

MANY = 1 << 20
EYE = torch.eye(3)


class Keeper:
    kept: Any = None

    def ones(self, number: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((number,), value)

    def same(self, x: Any) -> Any:
        return x

    def call(self, fn: Callable[[Any], Any], x: Any) -> Any:
        return fn(x)

    def later(self, x: Any) -> Any:
        time.sleep(0.2)
        return x

    def wanted(self) -> int:
        return sum(len(o._requested) for o in gc.get_objects() if type(o) is ObjectStore)

    def keep(self, x: Any) -> None:
        self.kept = x

    def total(self) -> float:
        return self.kept.sum().item()

    def forks(self) -> None:
        if not (child := os.fork()):
            self.kept = None
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)

    def count(self, number: int) -> Iterator[int]:
        try:
            yield from range(number)
            raise ValueError("no more")
        finally:
            self.kept = number

    def streams(self) -> int:
        return sum(len(o.streams) for o in gc.get_objects() if type(o) is HostedObject)

    def get_kept(self) -> Any:
        return self.kept


class Kept(Keeper):
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def get(self) -> Any:
        return self.kept


class NeverBegun(Keeper):
    def __init__(self) -> None:
        threading.Event().wait(600.0)


@on("send")
def test_shared_memory_of_values_is_freed_after_use_and_after_death(session: daft.Session) -> None:
    a, b, c = (daft.spawn(Keeper, name=name) for name in "abc")
    step = daft.compile(lambda x: b.same(a.later(x)))
    assert [step(i).get() for i in range(2)] == [0, 1]
    assert a.wanted().get() == 0  # the receiver waits without asking for the value
    b.keep(a.ones(MANY)).get()
    b.forks().get()
    for i in range(3):
        assert a.ones(MANY, i + 2.0).get().sum() == MANY * (i + 2.0)
    assert b.total().get() == MANY
    c.ones(MANY).get()
    before = _open_segments()
    daft.end(c)
    with pytest.raises(daft.ActorLost):
        c.ones(1).get()
    a.ones(MANY).get()
    while _open_segments() >= before:  # a thread notices the end of c's connection
        time.sleep(0.01)


def _open_segments() -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:dtensor" in os.readlink(each)
    return found
