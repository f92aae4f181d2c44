"""Results of `dt.compile` return with the response of their run, can be arguments of the next run,
and are dropped by it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.api.step.loaded_program import RETURNED_BYTES
from dtensor.daft import TaskError
from dtensor.sharding.plan.steps import Transfer

TP2, TP3 = dt.Mesh(tp=2), dt.Mesh(tp=3)
PP2, PP2TP2 = dt.Mesh(pp=2), dt.Mesh(pp=2, tp=2)
BACKENDS = ["inprocess", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


def stored(x: dt.DTensor) -> list[Tensor]:
    """Return the shards that the ranks have."""
    found = x.session.launch.store.fetch([x.value().stored])[x.name]
    return [found[rank] for rank in range(x.mesh.size)]


# -- what comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_loop_of_compiled_calls_sends_one_message_per_actor_and_call(backend: str) -> None:
    """Reads and drops of results need no further messages."""
    step = dt.compile(lambda x: (x * 2, x.sum()), TP2)
    with dt.launch(TP2, backend=backend) as session:  # type: ignore[arg-type]
        x = dt.distribute(torch.ones(4), TP2)
        x, total = step(x)
        before = session.cluster.calls
        for n in range(1, 51):
            x, total = step(x)
            assert float(total) == 4.0 * 2**n
            assert x.full_tensor().tolist() == [2.0 ** (n + 1)] * 4
            assert x.local_tensors()[1].tolist() == [2.0 ** (n + 1)] * 4
        assert session.cluster.calls - before == 50 * TP2.size


@pytest.mark.parametrize("mesh", [TP2, TP3], ids=str)
@pytest.mark.parametrize("placed", [dt.Replicate(), dt.Row(), dt.Column(), dt.Partial()], ids=str)
def test_returned_shards_are_bitwise_equal_to_those_on_ranks(
    mesh: dt.Mesh, placed: dt.Placement
) -> None:
    """7 x 5 is uneven over 2 and over 3 ranks; a sum is still partial."""
    x, w = torch.randn(7, 6), torch.randn(6, 5)
    f = dt.compile(lambda x, w: x @ w, mesh, out=dict(tp=placed))
    with dt.launch(mesh) as session:
        y = f(dt.distribute(x, mesh, tp=dt.Column()), dt.distribute(w, mesh, tp=dt.Row()))
        before = session.cluster.calls
        found, whole = y.local_tensors(), y.full_tensor()
        assert session.cluster.calls == before
        for one, there in zip(found, stored(y), strict=True):
            assert torch.equal(one, there)
        torch.testing.assert_close(whole, x @ w)


def test_small_results_return_with_run_and_large_ones_when_read() -> None:
    """Results return in order while their shards together are at most `RETURNED_BYTES`."""
    count = RETURNED_BYTES // 4
    f = dt.compile(lambda x: (x * 2, x + 1, x[: count // 2] * 3), TP2, out=dict(tp=dt.Row()))
    with dt.launch(TP2) as session:
        x = dt.distribute(torch.ones(count), TP2, tp=dt.Row())  # half of it on a rank
        double, more, triple = f(x)
        before = session.cluster.calls
        double.full_tensor(), more.full_tensor()
        assert session.cluster.calls == before
        assert triple.full_tensor().unique().tolist() == [3.0]
        assert session.cluster.calls == before + TP2.size


def test_full_tensor_and_local_tensors_return_copies() -> None:
    f = dt.compile(lambda x: x + 1, TP2)
    with dt.launch(TP2):
        y = f(dt.distribute(torch.zeros(3), TP2))
        y.full_tensor().zero_()
        y.local_tensors()[0].zero_()
        assert y.full_tensor().tolist() == [1.0] * 3
        assert f(y).tolist() == [2.0] * 3


def test_view_of_result_and_result_after_write_are_read_again() -> None:
    f = dt.compile(lambda x: x + 1, TP2)
    with dt.launch(TP2):
        y = f(dt.distribute(torch.zeros(3), TP2))
        assert y[1:].tolist() == [1.0, 1.0]
        y.mul_(5)
        assert y.tolist() == [5.0] * 3
        y[0] = 7.0
        assert y.tolist() == [7.0, 5.0, 5.0]


def test_deleted_result_is_dropped_on_controller_and_ranks() -> None:
    f = dt.compile(lambda x: x + 1, TP2)
    with dt.launch(TP2) as session:
        x = dt.distribute(torch.zeros(3), TP2)
        y = f(x)
        y.full_tensor()
        value = y._cell.value
        assert value is not None and value.returned is not None
        run, name = weakref.ref(value.returned.run), value.stored.label
        del y, value
        gc.collect()
        assert run() is None
        f(x)
        table = session.cluster._worker._table  # type: ignore[attr-defined]
        assert not [held for _, held in table if held == name]


def test_results_on_mesh_made_by_transfer_are_dropped_without_messages() -> None:
    """The mesh is not one of the launch; a transfer placed it on ranks of the launch."""
    source, target = dt.Mesh(tp=2), dt.Mesh(cp=2)
    f = dt.compile(lambda x: x + 1, target)
    with dt.launch(source) as session:
        x = dt.transfer(dt.distribute(torch.zeros(4), source), target, cp=dt.Row())
        x = f(f(x))
        before = session.cluster.calls
        for n in range(5):
            x = f(x)
            assert x.tolist() == [n + 3.0] * 4
        assert session.cluster.calls - before == 5 * source.size
        table = session.cluster._worker._table  # type: ignore[attr-defined]
        assert sum("tensor" in name for _, name in table) <= 3 * 2


# -- results feed the next call --------------------------------------------------------------------


def embed(table: Tensor, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A small decode step: token and state give the next ones; `table[token]` may fail."""
    state = torch.tanh(state + torch.nn.functional.embedding(token, table))
    return (state.abs().sum(-1) * 7).long() % table.shape[0], state


def decode(backend: Any, ahead: int, num: int = 12) -> tuple[list[int], list[float]]:
    """Return tokens that are read ``ahead`` calls late, and the last state."""
    f = dt.compile(embed, TP2, out=[{}, dict(tp=dt.Column())])
    found: list[int] = []
    with dt.launch(TP2, backend=backend) as session:
        table = dt.distribute(torch.linspace(-1, 1, 80).reshape(10, 8), TP2, tp=dt.Column())
        token = dt.distribute(torch.tensor([3]), TP2)
        state = dt.distribute(torch.zeros(1, 8), TP2, tp=dt.Column())
        late: deque[dt.DTensor] = deque()
        for n in range(num):
            before = session.cluster.calls
            token, state = f(table, token, state)
            late.append(token)
            if len(late) > ahead:
                found.append(int(late.popleft()))
            assert n == 0 or session.cluster.calls - before == TP2.size
        found += [int(token) for token in late]
        return found, state.flatten().tolist()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_tokens_read_late_equal_tokens_read_at_once(backend: str) -> None:
    tokens, state = decode("inprocess", 0)
    assert len(set(tokens)) > 3
    for ahead in (0, 1, 4):
        assert decode(backend, ahead) == (tokens, state)


@pytest.mark.ray
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_failed_call_fails_only_calls_that_use_its_results(ray_session: None, ahead: int) -> None:
    """Dependent calls raise the cause; other calls run."""
    f = dt.compile(embed, TP2)
    with dt.launch(TP2, backend="ray"):
        table = dt.distribute(torch.linspace(-1, 1, 80).reshape(10, 8), TP2)
        good = dt.distribute(torch.tensor([3]), TP2)
        bad = dt.distribute(torch.tensor([99]), TP2)
        state = start = dt.distribute(torch.zeros(1, 8), TP2)
        late: deque[dt.DTensor] = deque()
        read: list[int | str] = []

        def next_one() -> None:
            try:
                read.append(int(late.popleft()))
            except TaskError as error:
                read.append(str(error).splitlines()[0])

        token = good
        for n in range(9):
            if n == 6:
                state = start  # a sequence that has nothing of the one that failed
                token = good
            token, state = f(table, bad if n == 3 else token, state)
            late.append(token)
            if len(late) > ahead:
                next_one()
        while late:
            next_one()
        failed = [text for text in read if isinstance(text, str)]
        assert [isinstance(text, str) for text in read] == [False] * 3 + [True] * 3 + [False] * 3
        assert len(set(failed)) == 1
        assert read[6:] == read[:3]
        with pytest.raises(TaskError, match="index out of range"):
            f(table, bad, start)[1].full_tensor()


# -- a result that a part of the mesh holds --------------------------------------------------------


class Decoder(nn.Module):
    """The first stage embeds the token that the last stage chose; the state stays on the last
    stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.down(self.up(self.embed(token)).relu()) + state)
        return self.head(state).argmax(-1), state


def decoder(mesh: dt.Mesh) -> tuple[nn.Module, Any]:
    """Return the decoder in plain torch and in two stages."""
    plain = Decoder()
    pins = {"up.weight": dict(tp=dt.Row()), "head.weight": dict(tp=dt.Row())}
    stages = {"pp": [["embed*", "up*"], ["down*", "head*"]]}
    pins = pins if "tp" in mesh.axes else {}
    return plain, dt.parallelize(copy.deepcopy(plain), mesh, pins, stages=stages)


def transfers(plan: dt.Plan) -> list[tuple[str, int, int]]:
    steps = (step for step in plan.steps if isinstance(step, Transfer))
    return [(step.operand, step.stage, step.to_stage) for step in steps]


@pytest.mark.parametrize(
    ("backend", "mesh"),
    [("inprocess", PP2TP2), pytest.param("ray", PP2, marks=pytest.mark.ray)],
    indirect=["backend"],
)
def test_result_on_last_stage_is_argument_on_first_stage(backend: str, mesh: dt.Mesh) -> None:
    plain, model = decoder(mesh)
    f = dt.compile(lambda model, *given: model(*given), mesh)
    token, state = torch.tensor([3]), torch.zeros(1, 8)
    expected: list[int] = []
    with torch.no_grad():
        for _ in range(8):
            token, state = plain(token, state)
            expected.append(int(token))
    assert len(set(expected)) > 2
    with dt.launch(mesh, backend=backend) as session:  # type: ignore[arg-type]
        found: list[dt.DTensor] = []
        made: Any = (torch.tensor([3]), torch.zeros(1, 8))
        for n in range(8):
            before = session.cluster.calls
            made = f(model, *made)
            found.append(made[0])
            assert n < 2 or session.cluster.calls - before == mesh.size
        assert [str(x.spec) for x in made] == ["i64[1] on pp=1", "f32[1,8] on pp=1"]
        assert [int(token) for token in found] == expected
        torch.testing.assert_close(made[1].full_tensor(), state)
        assert transfers(f.plan(model, *made))[0] == (f.plan(model, *made).inputs[-2].name, 1, 0)


def test_plan_prints_transfer_of_argument_between_stages() -> None:
    _, model = decoder(PP2TP2)
    f = dt.compile(lambda model, token, state: model(token, state), PP2TP2)
    token, state = (dt.spec(f"{text} on pp=1", PP2TP2) for text in ("i64[1]", "f32[1,8@tp]"))
    plan = f.plan(model, token, state)
    assert transfers(plan) == [("token", 1, 0), ("relu", 0, 1)]
    assert "* token_at0" in str(plan) and "transfer(token, pp 1 -> 0)" in str(plan)
    held = {item.label: item.stages for item in plan.inputs if item.kind == "argument"}
    assert held == {"token": (1,), "state": (1,)}
    whole = f.plan(model, dt.spec("i64[1]", PP2TP2), state)
    assert transfers(whole) == [("relu", 0, 1)]


def test_function_without_model_runs_on_stage_of_its_argument() -> None:
    _, model = decoder(PP2TP2)
    f = dt.compile(lambda model, *given: model(*given), PP2TP2)
    total = dt.compile(lambda x: (x * 2).sum(), PP2TP2)
    both = dt.compile(lambda x, y: (x + y, y - 1), PP2TP2)
    with dt.launch(PP2TP2):
        _, state = f(model, torch.tensor([3]), torch.zeros(1, 8))
        value = state.full_tensor()
        assert transfers(total.plan(state)) == []
        assert str(total(state).spec) == "f32[] on pp=1"
        torch.testing.assert_close(total(state).full_tensor(), (value * 2).sum())
        here = dt.distribute(torch.arange(8.0), PP2TP2, tp=dt.Row())
        added, less = both(state, here)
        assert transfers(both.plan(state, here)) == []
        torch.testing.assert_close(added.full_tensor(), value + torch.arange(8.0))
        torch.testing.assert_close(less.full_tensor(), torch.arange(8.0) - 1)
    first, last = (dt.spec(f"f32[4@tp] on pp={i}", PP2TP2) for i in (0, 1))
    assert transfers(both.plan(first, last)) == [("x", 0, 1)]
    assert transfers(both.plan(last, first)) == [("y", 0, 1)]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            ("f32[4] on pp=1", "f32[4] on tp=1"),
            r"y is .* on tp=1: (.|\n)*stages over pp\nfix: pass y",
        ),
        (("f32[4] on pp=1,tp=0", "f32[4]"), "x is .* which is no stage of the program's"),
    ],
)
def test_argument_on_stage_outside_the_program_is_refused(
    specs: tuple[str, ...], message: str
) -> None:
    add = dt.compile(lambda x, y: x + y, PP2TP2)
    with pytest.raises(dt.PlanningError, match=message):
        add.plan(*(dt.spec(text, PP2TP2) for text in specs))


def test_argument_on_one_stage_is_refused_for_model_without_stages() -> None:
    model = dt.parallelize(nn.Linear(4, 4), PP2TP2, {})
    f = dt.compile(lambda model, x: model(x), PP2TP2)
    with pytest.raises(
        dt.PlanningError, match="no stage of the program's(.|\n)*no stages\nfix: pass x"
    ):
        f.plan(model, dt.spec("f32[2,4] on pp=1", PP2TP2))


def test_out_placement_on_axis_of_stages_is_refused() -> None:
    f = dt.compile(lambda x: x + 1, PP2TP2, out=dict(pp=dt.Row()))
    with pytest.raises(dt.PlanningError, match='out= places result 0 on the axis "pp", which hol'):
        f.plan(dt.spec("f32[4] on pp=1", PP2TP2))
