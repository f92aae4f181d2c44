"""Tests CUDA graphs of hosts' lists on simulated GPUs: what becomes a graph, when it is captured
again, and that replays give the values of runs without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft import (
    Call,
    Collective,
    Free,
    Instruction,
    Program,
    Recv,
    Send,
    Wait,
    launch_cluster,
)
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer
from dtensor.daft.run import graphs
from dtensor.daft.run.graphs import split
from dtensor.testing.gpus import nccl
from dtensor.testing.gpus.torch_cuda import CUDAGraph
from tests.daft.programs import Collectives, function, pipeline, program, same_bits
from tests.testing.gpus.needed import skip_without_compiler

skip_without_compiler()

F4 = Buffer((4,), torch.float32)


def graphed(made: Program, *, without: Sequence[str] = ()) -> Program:
    names = frozenset(name for name, _ in made.functions if name not in without)
    return replace(made, graphs=names)


def summed(size: int) -> Program:
    """Return a program in which each rank scales x, sums it over the ranks and adds the sum to its
    state."""
    group = tuple(range(size))
    scale = function("scale", "def forward(x, w):\n    return (x * w,)")
    add = function("add", "def forward(total, s):\n    total.add_(s)\n    return (total * 1,)")
    reduce = Collective("all_reduce", group, ("h",), ("s",), (F4,), (F4,), "sum", "g")
    items: list[Instruction] = [
        Call("scale", ("x", "w"), ("h",)), Free(("x",)), reduce, Wait(("s",)), Free(("h",)),
        Call("add", ("total", "s"), ("y",), ("total",)), Free(("s",)),
    ]  # fmt: skip
    return program(
        *[items] * size,
        functions=[scale, add],
        inputs=[("x",)] * size,
        outputs=[("y",)] * size,
        state=[("w", "total")] * size,
    )


State = dict[str, Tensor]


def run_all(
    made: Program,
    states: Sequence[State],
    xs: Sequence[float],
    between: Callable[[Any, int], None] = lambda cluster, number: None,
    **options: Any,
) -> tuple[list[list[list[float]]], list[int]]:
    """Return the results of runs with these inputs, and the launches of each run."""
    results: list[list[list[float]]] = []
    launches: list[int] = []
    size = made.size
    with dt.testing.simulated_gpus(size, **options) as gpus:
        with launch_cluster(size, backend="ray", device="cuda") as cluster:
            cluster.put([{n: v.clone() for n, v in state.items()} for state in states])
            handle = cluster.load(made)
            for number, x in enumerate(xs):
                between(cluster, number)
                before = gpus.report().launches
                fed = [{"x": torch.full((4,), x + rank)} for rank in range(size)]
                found = cluster.run(handle, fed).get()
                launches.append(gpus.report().launches - before)
                results.append([found[rank]["y"].tolist() for rank in range(size)])
        report = gpus.report()
    assert not report.races and not report.early_frees, str(report)
    return results, launches


def states(size: int) -> list[State]:
    return [{"w": torch.full((4,), 2.0), "total": torch.zeros(4)} for _ in range(size)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_replays_give_the_results_of_runs_without_graphs(size: int, seed: int) -> None:
    made, xs = summed(size), [1.0, 2.0, 3.0, 4.0, 5.0]
    expected, plain = run_all(made, states(size), xs, seed=seed)
    found, launches = run_all(graphed(made), states(size), xs, seed=seed, early=0.5 * (seed % 2))
    assert found == expected
    # per rank: the copy of the input, its copy into the buffer, the replay, the copy of the result
    assert launches[3:] == [4 * size] * 2 and launches[0] == plain[0]


def test_collectives_of_all_kinds_replay_with_equal_bits() -> None:
    case = Collectives(2)
    with launch_cluster(2) as local:
        expected = local.run(local.load(case.program()), case.fed).get()
    with dt.testing.simulated_gpus(2) as gpus:
        with launch_cluster(2, backend="ray", device="cuda") as cluster:
            handle = cluster.load(graphed(case.program()))
            for _ in range(3):
                found = cluster.run(handle, case.fed).get()
        assert not gpus.report().races and not gpus.report().early_frees
    for rank in range(2):
        for name, value in expected[rank].items():
            assert same_bits(found[rank][name], value), (rank, name)


def parts(made: Program) -> list[tuple[bool, tuple[int, ...]]]:
    sites = [(0, i) for i in range(len(made.ranks[0].instructions))]
    return list(split(HostProgram.whole(made, sites), range(len(sites))))


def test_a_message_is_within_one_graph_or_in_none() -> None:
    f = function("f", "def forward(x):\n    return (x + 1,)")
    host = function("host", "def forward(x):\n    return (x + x.sum().item(),)")
    items: list[Instruction] = [
        Call("f", ("x",), ("a",)), Call("f", ("a",), ("b",)), Send("b", 1, "c", F4),
        Call("host", ("a",), ("d",)), Wait(("b",)), Call("f", ("d",), ("y",)),
    ]  # fmt: skip
    other: list[Instruction] = [Recv("b", 0, "c", F4), Wait(("b",))]
    made = program(items, other, functions=[f, host], inputs=[("x",), ()])
    assert parts(graphed(made)) == [(True, (0, 1, 2, 3, 4, 5))]
    torn = parts(graphed(made, without=["host"]))
    assert torn == [(True, (0, 1)), (False, (2, 3, 4)), (True, (5,))]


def test_parts_around_a_call_that_reads_on_the_host_replay() -> None:
    f = function("f", "def forward(x):\n    return (x + 1,)")
    host = function("host", "def forward(x):\n    return (x + x.sum().item(),)")
    items: list[Instruction] = [
        Call("f", ("x",), ("a",)), Call("host", ("a",), ("b",)), Free(("a",)),
        Call("f", ("b",), ("y",)), Free(("b",)),
    ]  # fmt: skip
    made = program(items, functions=[f, host], inputs=[("x",)], outputs=[("y",)])
    xs = [1.0, 2.0, 3.0, 4.0]
    expected, _ = run_all(made, [{}], xs)
    assert run_all(graphed(made, without=["host"]), [{}], xs)[0] == expected
    with pytest.raises(dt.daft.TaskError, match=r"call host(.|\n)*stream is capturing"):
        run_all(graphed(made), [{}], xs)


def test_state_at_another_address_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []
    capture = graphs.Graph._capture
    monkeypatch.setattr(
        graphs.Graph, "_capture", lambda *args: (captures.append(1), capture(*args))[1]
    )

    def between(cluster: Any, number: int) -> None:
        if number == 3:
            cluster.put([{"w": torch.full((4,), 10.0)}])

    xs = [1.0, 2.0, 3.0, 4.0, 5.0]
    expected, _ = run_all(summed(1), states(1), xs, between)
    assert run_all(graphed(summed(1)), states(1), xs, between)[0] == expected
    assert len(captures) == 2


Mutant = Callable[[pytest.MonkeyPatch], None]


def _copy_inputs_after_the_replay(patch: pytest.MonkeyPatch) -> None:
    waiting: list[Any] = []
    copy, replay = graphs.foreach_copy_, CUDAGraph.replay
    patch.setattr(graphs, "foreach_copy_", lambda *args: waiting.append(args))

    def replay_and_copy(graph: Any) -> None:
        replay(graph)
        copy(*waiting.pop())

    patch.setattr(CUDAGraph, "replay", replay_and_copy)


def _leave_the_stream_of_a_message_unjoined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nccl.Work, "wait", lambda self: None)


def _never_capture_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graphs, "_equal", lambda a, b: bool(b))


@pytest.mark.parametrize(
    "mutant",
    [_copy_inputs_after_the_replay, _leave_the_stream_of_a_message_unjoined, _never_capture_again],
)
def test_mutant_of_replays_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    def between(cluster: Any, number: int) -> None:
        if number == 3:
            cluster.put([{"w": torch.full((4,), 10.0)}] * 2)

    xs = [1.0, 2.0, 3.0, 4.0, 5.0]
    expected, _ = run_all(summed(2), states(2), xs, between)
    mutant(monkeypatch)
    try:
        found, _ = run_all(graphed(summed(2)), states(2), xs, between)
    except (AssertionError, dt.daft.DaftError):  # a race or an early free; an invalid capture
        return
    assert found != expected


def test_state_that_a_run_makes_anew_keeps_its_address() -> None:
    step = function("step", "def forward(n, x):\n    return (n + x, n * 2)")
    items = [Call("step", ("n", "x"), ("n", "y"))]
    made = program(items, functions=[step], inputs=[("x",)], outputs=[("y",)], state=[("n",)])
    xs = [1.0, 2.0, 3.0, 4.0, 5.0]
    expected, _ = run_all(made, [{"n": torch.zeros(4)}], xs)
    found, launches = run_all(graphed(made), [{"n": torch.zeros(4)}], xs)
    assert found == expected and launches[-1] == 4


def test_a_number_that_changes_is_captured_again_until_graphs_are_given_up() -> None:
    add = function("add", "def forward(x, n):\n    return (x + n,)")
    made = program(
        [Call("add", ("x", "n"), ("y",))],
        functions=[add],
        inputs=[("x", "n")],
        outputs=[("y",)],
    )
    with dt.testing.simulated_gpus(1), launch_cluster(1, backend="ray", device="cuda") as cluster:
        handle = cluster.load(graphed(made))

        def run(n: int) -> list[float]:
            return cluster.run(handle, [{"x": torch.ones(4), "n": n}]).get()[0]["y"].tolist()

        assert [run(n) for n in (1, 1, 1, 2, 2)] == [[2.0] * 4] * 3 + [[3.0] * 4] * 2
        with pytest.warns(UserWarning, match="4 runs in a row"):
            assert [run(n) for n in range(6)] == [[1.0 + n] * 4 for n in range(6)]


def test_pipeline_replays_with_one_actor_for_two_ranks() -> None:
    given: dict[str, Any] = dict(backend="ray", device="cuda", ranks_per_actor=2)
    with dt.testing.simulated_gpus(4) as gpus, launch_cluster(4, **given) as cluster:
        cluster.put([{"w": torch.ones(4), "n": torch.zeros(())}] * 4)
        handle = cluster.load(graphed(pipeline(4)))
        for k in (0.0, 1.0, 2.0, 3.0):
            found = cluster.run(handle, [{"x": torch.full((4,), k)}, {}, {}, {}]).get()
            assert found[3]["y"].tolist() == [4.0 + k] * 4
        assert not gpus.report().races


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(device="cpu"), 'graphs=True with device="cpu"'),
        (dict(device="cuda", mode="interpreted"), "graphs=True with mode="),
    ],
)
def test_launch_with_graphs_refuses(options: dict[str, Any], said: str) -> None:
    with dt.testing.simulated_gpus(), pytest.raises(dt.PlanningError, match=said):
        dt.launch(dt.Mesh(), graphs=True, **options)


def test_graphs_refuse_detect_nan() -> None:
    compiled = dt.compile(torch.relu, dt.Mesh(), detect_nan=True)
    with (
        dt.testing.simulated_gpus(),
        dt.launch(dt.Mesh(), device="cuda", graphs=True),
        pytest.raises(dt.PlanningError, match="detect_nan reads"),
    ):
        compiled(torch.ones(4))


_asked = torch.library.custom_op(
    "graphs_test::asked",
    lambda x: x + x.sum().item(),
    mutates_args=(),
    schema="(Tensor x) -> Tensor",
)
_asked.register_fake(lambda x: torch.empty_like(x))
dt.rule("graphs_test::asked", "... -> ...")


def test_op_of_the_user_that_reads_a_value_runs_between_graphs() -> None:
    compiled = dt.compile(lambda x: torch.ops.graphs_test.asked(x * 2) * 3, dt.Mesh())
    with dt.testing.simulated_gpus() as gpus:
        with dt.launch(dt.Mesh(), device="cuda", graphs=True):
            for x in (1.0, 2.0, 3.0):
                assert compiled(torch.full((4,), x)).tolist() == [30.0 * x] * 4
        assert not gpus.report().races
