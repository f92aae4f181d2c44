"""The engine, on the in-process cluster."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor.daft import (
    Buffer,
    Call,
    ClusterClosed,
    CommunicationError,
    Free,
    Function,
    Label,
    Mode,
    ProgramError,
    Recv,
    Send,
    TaskError,
    Wait,
    launch_cluster,
)
from dtensor.daft.run.worker import is_on
from dtensor.numerics import REDUCTIONS, fold
from tests.daft.programs import Collectives, function, pipeline, program, same_bits

MODES: list[Mode] = ["compiled", "interpreted"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_collective(size: int, mode: Mode) -> None:
    case = Collectives(size, large=100)
    with launch_cluster(size) as cluster:
        results = cluster.run(cluster.load(case.program()), case.fed, mode=mode).get()
    for rank in range(size):
        assert set(results[rank]) == set(case.expected[rank])
        for name, value in case.expected[rank].items():
            assert same_bits(results[rank][name], value), (rank, name)


@pytest.mark.gpu
def test_every_collective_among_ranks_of_one_gpu() -> None:
    case = Collectives(3, large=100)
    with launch_cluster(3, device="cuda") as cluster:
        results = cluster.run(cluster.load(case.program()), case.fed).get()
    for rank in range(3):
        assert all(same_bits(results[rank][n], v) for n, v in case.expected[rank].items())


def test_cuda_without_a_number_is_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that inputs there are read where they are."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    class There:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    x: Any = There("cuda:1")
    assert is_on(x, torch.device("cuda")) and is_on(x, torch.device("cuda:1"))
    assert not is_on(x, torch.device("cuda:0")) and not is_on(x, torch.device("cpu"))
    x = There("cuda:0")
    assert not is_on(x, torch.device("cuda")) and is_on(x, torch.device("cuda:0"))
    assert is_on(torch.ones(1), torch.device("cpu"))


def test_ranks_stay_on_the_gpu_that_was_current_when_they_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton launches on the current GPU, and each thread has its own, at first GPU 0."""
    current = [1]

    @contextmanager
    def guard(device: torch.device) -> Generator[None]:
        assert device.index is not None
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    with pytest.raises(ValueError, match="device='cuda', and this process sees no GPU"):
        launch_cluster(1, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", guard)
    seen: list[int] = []
    source = "def forward():\n    note()\n    return ()"
    noted = function("noted", source, note=lambda: seen.append(current[0]))
    made = program([Call("noted", (), ())], functions=[noted])
    with launch_cluster(1, device="cuda") as cluster:
        assert cluster.device == torch.device("cuda:1")
        handle = cluster.load(made)
        for now in (1, 0):
            current[0] = now
            cluster.run(handle, [{}]).get()
            assert current[0] == now
    assert seen == [1, 1]


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_is_lent() -> None:
    made = program(
        [Call("own", ("x",), ("y",))],
        functions=[function("own", "def forward(x):\n    return (x.data_ptr(),)")],
        inputs=[("x",)],
        outputs=[("y",)],
    )
    x = torch.ones(3, device="cuda")
    with launch_cluster(1, device="cuda") as cluster:
        assert cluster.run(cluster.load(made), [{"x": x}]).get() == [{"y": x.data_ptr()}]


def test_a_sum_is_a_left_fold_in_rank_order() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, 1.0, -1e8)]
    assert fold(parts, "sum").item() == 0.0  # a tree would give 1 or 2
    assert fold(parts[::-1], "sum").item() == 1e8 - 1e8 + 0.0
    halves = [torch.tensor([1.0]).bfloat16(), *[torch.tensor([2**-9]).bfloat16()] * 4]
    assert fold(halves, "sum").item() == 1.0 + 2**-7  # in bf16 each addition would be lost


def _triples(x: torch.Tensor) -> torch.Tensor:
    """Of rows of x: the maximum, the sum of exp(x - maximum), a number to be summed."""
    top = x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -torch.inf)
    total = torch.where(x == top[:, None], 1.0, (x - top[:, None]).exp()).sum(1)
    return torch.stack((top, total * (top > -torch.inf), x.isfinite().sum(1)), 1)


def test_softmax_triples_fold_to_those_of_the_whole() -> None:
    x = torch.randn(40, 12, dtype=torch.float64) * 30
    x[3], x[4, :6], x[5, 6:] = -torch.inf, -torch.inf, -torch.inf
    parts = [_triples(part) for part in (x[:, :6], x[:, :0], x[:, 6:7], x[:, 7:])]
    got, wanted = fold(parts, "softmax"), _triples(x)
    assert torch.equal(got[:, 0], wanted[:, 0]) and torch.isfinite(got[:, 1:]).all()
    assert torch.allclose(got[:, 1:], wanted[:, 1:], rtol=1e-13, atol=0)
    assert got[3].tolist() == [-torch.inf, 0, 0]
    none = torch.tensor([-torch.inf, 0, 0], dtype=x.dtype).expand(40, 3)
    for part in parts:
        assert same_bits(fold([none, part, none], "softmax"), part)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_softmax_triples_keep_nan(bad: float) -> None:
    one, other = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[bad, torch.nan, 0.0]])
    for parts in ([one, other], [other, one], [other, other]):
        assert fold(parts, "softmax")[0, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_of_a_softmax_fold_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    parts = [torch.randn(67, 3, dtype=dtype) * 20 for _ in range(3)]
    whole, unit = fold(parts, "softmax").reshape(-1), REDUCTIONS["softmax"].unit
    for cut in range(0, 67 * 3 + 1, unit):
        low, high = (
            fold([p.reshape(-1)[s] for p in parts], "softmax")
            for s in (slice(cut), slice(cut, None))
        )
        assert same_bits(torch.cat([low, high]), whole)


@pytest.mark.parametrize("seed", range(5))
def test_seeds_give_the_same_bits(seed: int) -> None:
    case = Collectives(3, large=100)
    with launch_cluster(3, seed=seed) as cluster:
        results = cluster.run(cluster.load(case.program()), case.fed).get()
    for rank in range(3):
        assert all(same_bits(results[rank][n], v) for n, v in case.expected[rank].items())


@pytest.mark.parametrize("mode", MODES)
def test_state_lives_from_run_to_run(mode: Mode) -> None:
    with launch_cluster(3) as cluster:
        ones = torch.ones(4)
        cluster.put([{"w": ones * 10**rank, "n": torch.zeros(())} for rank in range(3)])
        ones.zero_()  # the cluster has its own copy
        handle = cluster.load(pipeline(3))
        fed = [{"x": torch.arange(4.0)}, {}, {}]
        for _ in range(3):
            results = cluster.run(handle, fed, mode=mode).get()
        assert results[:2] == [{}, {}]
        assert results[2]["y"].tolist() == [111, 112, 113, 114]
        assert cluster.get([("n",), (), ("n", "w")]).get() == [
            (torch.tensor(3.0),),
            (),
            (torch.tensor(3.0), pytest.approx(torch.full((4,), 100.0))),
        ]
        cluster.delete([("w",), (), ()])
        with pytest.raises(LookupError, match="Rank 0 has no value 'w'"):
            cluster.get([("w",), (), ()]).get()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_comes_back_too(mode: Mode) -> None:
    """As a copy of its own; and what nobody needs goes with the message of a put or a run."""
    with launch_cluster(3) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 3)
        handle = cluster.load(pipeline(3))
        fed = [{"x": torch.arange(4.0)}, {}, {}]
        kept = {"y": "last"}
        assert cluster.run(handle, fed, mode=mode, keep=kept).get()[2] == {}
        drop = {2: ["last"]}
        found = cluster.run(handle, fed, mode=mode, keep=kept, returned={"y"}, drop=drop).get()
        assert found[:2] == [{}, {}] and found[2]["y"].tolist() == [3, 4, 5, 6]
        found[2]["y"].zero_()
        before = cluster.calls
        assert cluster.get([(), (), ("last",)]).get()[2][0].tolist() == [3, 4, 5, 6]
        cluster.put([{"v": torch.ones(())}] * 3, drop={2: ["last"]})
        assert cluster.calls - before == 4
        with pytest.raises(LookupError, match="Rank 2 has no value 'last'"):
            cluster.get([(), (), ("last",)]).get()


def test_a_compiled_run_is_one_call_per_actor_that_takes_part() -> None:
    with launch_cluster(4, ranks_per_actor=2) as cluster:
        for state, calls in ((("w",), 2), ((), 0)):
            handle = cluster.load(program([], [], [], [], state=[(), state, (), state]))
            before = cluster.calls
            assert cluster.run(handle, [{}] * 4).get() == [{}] * 4
            assert cluster.calls - before == calls


def test_free_drops_the_value() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> tuple[torch.Tensor]:
        value = torch.ones(3)
        made.append(weakref.ref(value))
        return (value,)

    def check(x: torch.Tensor) -> tuple[()]:
        assert made[0]() is None
        return ()

    items = [Call("make", (), ("a",)), Free(("a",)), Free(("x",)), Call("check", ("k",), ())]
    functions = [Function.of(make, "make"), Function.of(check, "check")]
    with launch_cluster(1) as cluster:
        handle = cluster.load(program(items, functions=functions, inputs=[("x", "k")]))
        fed = [{"x": torch.ones(1), "k": torch.ones(1)}]
        cluster.run(handle, fed).get()
        made.clear()
        cluster.run(handle, fed).get()
        with pytest.raises(LookupError):
            cluster.get([("k",)]).get()


def test_any_object_is_a_value_and_execution_is_one_thread_without_autograd() -> None:
    look = function(
        "look",
        "def forward(x, n):\n    return ((x, n, torch.get_num_threads(), (x * 2).requires_grad),)",
        torch=torch,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with launch_cluster(1) as cluster:
            items = [Call("look", ("x", "n"), ("y",))]
            made = program(items, functions=[look], inputs=[("x", "n")], outputs=[("y",)])
            x = torch.ones(1, requires_grad=True)
            (result,) = cluster.run(cluster.load(made), [{"x": x, "n": "hello"}]).get()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert result["y"][1:] == ("hello", 1, False)


FAILING = Function(
    name="fails",
    source="def forward(x):\n    y = x + 1\n    return (y.reshape(77),)",
    lines=(None, "net.py:1: y = x + 1", "net.py:2: return y.reshape(77)"),
)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_raises(mode: Mode) -> None:
    items = [Call("fails", ("x",), ("y",), label=Label("F0"), source="net.py:0")]
    made = program([], items, functions=[FAILING], inputs=[(), ("x",)], outputs=[(), ("y",)])
    with launch_cluster(2) as cluster:
        handle = cluster.load(made)
        future = cluster.run(handle, [{}, {"x": torch.ones(2)}], mode=mode)
        with pytest.raises(TaskError) as caught:
            future.get()
        assert isinstance(caught.value.__cause__, RuntimeError)
        text = str(caught.value)
        assert text.startswith("rank 1 (stage 1), instruction 0 'y = call fails(x)' [F0], run 0: ")
        assert text.endswith("at net.py:2: return y.reshape(77)")
        assert cluster.failure is None
        cluster.put([{}, {}])
        cluster.get([(), ()]).get()
        good = cluster.run(handle, [{}, {"x": torch.ones(77 - 1)}], mode=mode)
        with pytest.raises(TaskError, match="run 1: RuntimeError: shape"):
            good.get()
        good = cluster.run(handle, [{}, {"x": torch.ones(77)}], mode=mode)
        assert good.get()[1]["y"].tolist() == [2.0] * 77


def test_the_instructions_line_where_the_function_has_none() -> None:
    bad = function("bad", "def forward():\n    return (1, 2)")
    made = program([Call("bad", (), ("y",), source="net.py:9")], functions=[bad], outputs=[("y",)])
    with launch_cluster(1) as cluster, pytest.raises(TaskError) as caught:
        cluster.run(cluster.load(made), [{}]).get()
    assert "returned 2 values for 1 outputs" in str(caught.value)
    assert caught.value.failure.line == "net.py:9"


def test_a_value_that_is_not_as_declared() -> None:
    buffer = Buffer((2,), torch.float32)
    lists = ([Send("x", 1, "c", buffer), Wait(("x",))], [Recv("y", 0, "c", buffer), Wait(("y",))])
    made = program(*lists, inputs=[("x",), ()], outputs=[(), ("y",)])
    with launch_cluster(2) as cluster, pytest.raises(CommunicationError) as caught:
        cluster.run(cluster.load(made), [{"x": torch.ones(3)}, {}]).get()
    assert "declared is f32[2]" in str(caught.value) and caught.value.failure.peers == (1,)


def test_what_comes_in_and_out_is_nobody_elses() -> None:
    same = function("same", "def forward(w):\n    return (w,)")
    made = program(
        [Call("same", ("w",), ("y",))], functions=[same], outputs=[("y",)], state=[("w",)]
    )
    with launch_cluster(1) as cluster:
        cluster.put([{"w": torch.ones(2)}])
        handle = cluster.load(made)
        cluster.run(handle, [{}]).get()[0]["y"].zero_()
        assert cluster.get([("w",)]).get()[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of", [torch.clone, torch.t])
def test_what_a_run_is_given_stays_its_callers(mode: Mode, of: Callable[..., Tensor]) -> None:
    same = function("same", "def forward(x):\n    return (x,)")
    up = function("up", "def forward(x):\n    x.add_(1)\n    return ()")
    made = program(
        [Call("same", ("x",), ("y",)), Call("up", ("w",), (), writes=("w",))],
        functions=[same, up],
        inputs=[("x", "w")],
        outputs=[("y", "w")],
    )
    x, w = (of(torch.arange(4.0).reshape(2, 2)) for _ in range(2))
    wanted = x.clone()
    with launch_cluster(1) as cluster:
        got = cluster.run(
            cluster.load(made), [{"x": x, "w": w}], keep={"y": "kept"}, mode=mode
        ).get()
        assert torch.equal(got[0]["w"], wanted + 1) and torch.equal(w, wanted)
        x.zero_()  # what was kept is no part of it
        assert torch.equal(cluster.get([("kept",)]).get()[0][0], wanted)


def test_faults_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        launch_cluster(0)
    with launch_cluster(2) as cluster:
        handle = cluster.load(pipeline(2))
        with pytest.raises(ValueError, match="Rank 0 of program 'test' takes the inputs"):
            cluster.run(handle, [{}, {}])
        with pytest.raises(ValueError, match="one item per rank"):
            cluster.put([{}])
        with pytest.raises(ValueError, match="one item per rank"):
            cluster.load(pipeline(3))
        with pytest.raises(ProgramError):
            cluster.load(program([Wait(("x",))], []))
        cluster.unload(handle)
    cluster.close()
    with pytest.raises(ClusterClosed):
        cluster.put([{}, {}])


@pytest.mark.parametrize("mode", MODES)
def test_an_autocast_around_a_run_is_not_the_programs(mode: Mode) -> None:
    square = function("square", "def forward(x):\n    return (mm(x, x),)", mm=torch.mm)
    one = program(
        [Call("square", ("x",), ("y",)), Free(("x",))],
        functions=[square],
        inputs=[("x",)],
        outputs=[("y",)],
    )
    with launch_cluster(1) as cluster, torch.autocast("cpu", dtype=torch.bfloat16):
        (result,) = cluster.run(cluster.load(one), [{"x": torch.eye(2)}], mode=mode).get()
        assert torch.is_autocast_enabled("cpu")
    assert result["y"].dtype == torch.float32
