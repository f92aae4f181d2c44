"""Rows of experts in specs, moves and plans: by token, by expert, and what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor as dt
from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.routes import check_orders
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Redistribute, Step
from dtensor.sharding.redistribute.moves import moves
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.parse import parse

MESH = dt.Mesh(dp=2, ep=4)
TEXTS = (
    "f32[[8@ep 512@dp 2],16]",
    "f32[[8 512@(dp,ep) 2],16]",
    "f32[[8@(dp,ep) 512 2],16]",
    "f32[[2*4@ep 512@dp 2],16]",
    "i64[[8@ep 3*4@dp*8 2]]",
    "f32[[8@ep 512 2],16]{sum@dp}",
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_ragged_spec_round_trips(text: str) -> None:
    assert str(parse(text, MESH)) == text


@pytest.mark.parametrize("dim", ["[8@ep 512]", "[8 512 2 1]", "[8 512 k]", "[8@xx 512 2]"])
def test_malformed_ragged_dim_is_refused(dim: str) -> None:
    with pytest.raises(PlanningError):
        parse(f"f32[{dim},16]", MESH)


def test_local_rows_are_exact_by_token_and_balanced_by_expert() -> None:
    at = {"dp": 1, "ep": 3}
    assert parse("f32[[8 10@dp 2],4]", MESH).local_shape(at) == (10, 4)
    assert parse("f32[[8 9@dp 2],4]", MESH).local_shape(at) == (8, 4)
    assert parse("f32[[8@ep 10@dp 2],4]", MESH).local_shape(at) == (3, 4)  # 10 / 4, rounded up
    # at most one row of a token for each of its 2 experts, or of the one expert
    assert parse("f32[[8@ep 10@dp 2],4]", MESH).row_bound(at) == 10
    assert parse("f32[[8@(dp,ep) 10 2],4]", MESH).row_bound(at) == 10


def _path(before: str, after: str) -> list[tuple[str, str]]:
    found = moves(parse(before, MESH), parse(after, MESH), Topology())
    return [(move.kind, move.axis) for move in found]


def test_rows_go_out_in_mesh_order_and_return_in_reverse() -> None:
    by_token, by_expert = "f32[[8 512@(dp,ep) 2],16]", "f32[[8@(dp,ep) 512 2],16]"
    assert _path(by_token, by_expert) == [("all_to_all", "dp"), ("all_to_all", "ep")]
    assert _path(by_expert, by_token) == [("all_to_all", "ep"), ("all_to_all", "dp")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32[[8 512@ep 2],16]", "f32[1024,16]"),
        ("f32[[8@ep 512 2],16]", "f32[1024,16]"),
        ("f32[1024,16]", "f32[[8@ep 512 2],16]"),
        ("f32[[8@ep 512 2],16]", "f32[1024@ep,16]"),
        ("f32[[8@ep 512 2],16]{sum@dp}", "f32[[8@ep 512 2],16]"),  # sizes are data
        ("i64[[8 512@ep 2]]", "i64[[8@ep 512 2]]"),  # slots are numbered on their rank
    ],
)
def test_other_moves_of_rows_do_not_exist(before: str, after: str) -> None:
    with pytest.raises(PlanningError, match="cannot be redistributed"):
        _path(before, after)


class Experts(nn.Module):
    def __init__(self, width: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.router = nn.Linear(width, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, width, inner))
        self.down = nn.Parameter(torch.randn(8, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        rows, route = dt.to_experts(x, ids, 8)
        h = F.silu(dt.expert_linear(rows, self.up, route))
        return dt.from_experts(dt.expert_linear(h, self.down, route), route, weights)


def _plan(
    mesh: dt.Mesh, pins: Any, dtype: torch.dtype = torch.float32, **inputs: dt.Placement
) -> Plan:
    model = dt.parallelize(Experts().to(dtype), mesh, pins)
    step = dt.train_step(
        model,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(model.parameters()),
        inputs=inputs or None,
    )
    return step.plan(torch.empty(1024, 64, device="meta", dtype=dtype))


def _sent(plan: Plan) -> int:
    """Return the bytes that a rank sends in the forward, without the loss."""
    return sum(c.bytes_sent for c in plan.collectives if c.phase == "forward")


def test_bytes_of_each_strategy_are_those_of_the_formulas() -> None:
    tokens, k, width, n = 1024, 2, 64, 4
    on_ep = {"up": dict(ep=dt.Shard(0)), "down": dict(ep=dt.Shard(0))}
    exchanged = 2 * (tokens // n) * k * width * 4 * (n - 1) // n
    counts = 8 * 8 * (n - 1)
    assert _sent(_plan(dt.Mesh(ep=n), on_ep, ep=dt.Row())) == exchanged + counts
    assert _sent(_plan(dt.Mesh(ep=n), on_ep)) == 2 * tokens * width * 4 * (n - 1) // n
    assert _sent(_plan(dt.Mesh(dp=2), {}, dp=dt.Row())) == 0


def test_plan_says_how_often_the_host_waits_for_counts() -> None:
    on_ep = {"up": dict(ep=dt.Shard(0)), "down": dict(ep=dt.Shard(0))}
    line = "  on GPUs, the host waits once, for the counts of rows of experts"
    assert line in str(_plan(dt.Mesh(ep=2), on_ep, ep=dt.Row())).splitlines()
    assert line in str(_plan(dt.Mesh(ep=2), on_ep)).splitlines()
    assert line in str(_plan(dt.Mesh(dp=2), {}, dp=dt.Row())).splitlines()
    kernels = _plan(dt.Mesh(dp=2), {}, torch.bfloat16, dp=dt.Row())
    assert "host waits" not in str(kernels)


@pytest.mark.parametrize(("dim", "waits"), [(None, False), (0, False), (1, True)])
def test_plan_says_that_the_host_waits_for_offsets_without_a_kernel(
    dim: int | None, waits: bool
) -> None:
    """Rows of 4 numbers are no multiple of 16 bytes. Forward and backward read offsets once."""
    pins = {} if dim is None else {"weight": dict(ep=dt.Shard(dim))}
    model = dt.parallelize(nn.Linear(8, 32, dtype=torch.bfloat16), dt.Mesh(ep=2), pins)

    def loss(model: nn.Linear, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        experts = model.weight.view(4, 8, 8).mT
        return torch._grouped_mm(x, experts, ends).square().mean()  # pyright: ignore

    step = dt.train_step(model, loss, torch.optim.SGD(model.parameters()))
    ends = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    text = str(step.plan(torch.ones(6, 8, dtype=torch.bfloat16), ends))
    line = "  on GPUs, the host waits once, for the offsets of grouped products"
    assert (line in text.splitlines(), "host waits" in text) == (waits, waits)


class Single(nn.Module):
    """Experts that are not stacked. Each computes all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        parts = [e(x) * weights[:, i : i + 1] for i, e in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


def test_experts_that_are_not_stacked_are_refused_on_an_axis_of_the_batch() -> None:
    def planned(pins: Any, mesh: dt.Mesh) -> None:
        model = dt.parallelize(Single(), mesh, pins)
        optimizer = torch.optim.SGD(model.parameters())
        loss = dt.train_step(
            model, lambda m, x: m(x).square().mean(), optimizer, inputs=dict(ep=dt.Row())
        )
        loss.plan(torch.empty(16, 64, device="meta"))

    with pytest.raises(PlanningError, match="would split experts.0.weight, the weight of one"):
        planned({"experts.*.weight": dict(ep=dt.Shard(0))}, dt.Mesh(ep=2))
    planned({}, dt.Mesh(ep=2))
    planned({"experts.*.weight": dict(tp=dt.Shard(0))}, dt.Mesh(ep=2, tp=2))


def test_rows_that_return_in_another_order_are_refused() -> None:
    steps: list[Step] = []
    texts = [
        "f32[[8 512@(dp,ep) 2],16]",
        "f32[[8@dp 2*256@ep 2],16]",
        "f32[[8@(dp,ep) 512 2],16]",
        "f32[[2*4@ep 512@dp 2],16]",  # over dp, and ep was last
    ]
    for number, (before, after) in enumerate(pairwise(texts)):
        (move,) = moves(parse(before, MESH), parse(after, MESH), Topology())
        result, operand = f"rows{number + 1}", f"rows{number}"
        step = Redistribute(
            results=(result,),
            operands=(operand,),
            moves=(move,),
            phase="forward",
            stage=0,
            counts="counts",
        )
        steps.append(step)
    check_orders(steps[:2])
    with pytest.raises(PlanningError, match="the rows rows2 .* over dp and dp then ep"):
        check_orders(steps)


def test_eager_to_experts_of_split_tokens_is_refused() -> None:
    mesh = dt.Mesh(ep=2)
    x, ids = torch.randn(8, 4), torch.randint(0, 4, (8, 2))
    rows: Any = dt.to_experts(dt.distribute(x, mesh), dt.distribute(ids, mesh), 4)[0]
    assert torch.equal(rows.full_tensor(), dt.to_experts(x, ids, 4)[0])
    with pytest.raises(PlanningError, match=re.escape("fix: dt.compile(function, mesh)")):
        dt.to_experts(dt.distribute(x, mesh, ep=dt.Row()), dt.distribute(ids, mesh, ep=dt.Row()), 4)


def test_compiled_function_dispatches_split_tokens() -> None:
    """The slots of rows are numbered on the rank of their tokens, so they do not travel."""
    mesh = dt.Mesh(ep=2)
    x, ids, w = torch.randn(8, 4), torch.randint(0, 4, (8, 2)), torch.randn(4, 4, 6)

    def function(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows, route = dt.to_experts(x, ids, 4)
        return dt.from_experts(dt.expert_linear(rows, w, route).relu(), route)

    placed: list[Any] = [dt.distribute(t, mesh, ep=dt.Row()) for t in (x, ids, w)]
    torch.testing.assert_close(
        dt.compile(function, mesh)(*placed).full_tensor(), function(x, ids, w)
    )
