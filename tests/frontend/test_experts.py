"""The functions for mixtures of experts on plain tensors give what a loop over slots gives, and the
experts of transformers keep their numbers when the registry gives dtensor's implementation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt

T, D, F, E = 7, 4, 6, 4


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def some_ids(k: int) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    return torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(T)])


ROUTINGS: dict[str, Tensor] = {
    "two": some_ids(2),
    "all": some_ids(E),
    "one expert": torch.full((T, 1), 2),
    "an expert twice": torch.tensor([[1, 1]] * T),
    "int32": some_ids(2).int(),
    "dropped": some_ids(3).masked_fill(torch.arange(T * 3).view(T, 3) % 4 == 0, -1),
    "none": torch.full((T, 2), -1),
    "no tokens": torch.zeros(0, 2, dtype=torch.long),
}


def layer(x: Tensor, ids: Tensor, weights: Tensor | None, w: Tensor, b: Tensor | None) -> Tensor:
    rows, route = dt.to_experts(x, ids, E)
    return dt.from_experts(dt.expert_linear(rows, w, route, b), route, weights)


def naive(x: Tensor, ids: Tensor, weights: Tensor | None, w: Tensor, b: Tensor | None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = []
    for t, experts in enumerate(ids.tolist()):
        total = torch.zeros(w.shape[2], dtype=wide)
        for j, e in enumerate(experts):
            if e >= 0:
                row = torch.nn.functional.linear(x[t], w[e].t(), None if b is None else b[e])
                total = total + row.to(wide) * (1 if weights is None else weights[t, j].to(wide))
        y.append(total.to(x.dtype))
    found = torch.stack(y) if y else x.new_zeros(0, w.shape[2])
    return found + 0 * w.sum()  # has a gradient also if there are no rows


@pytest.mark.parametrize("has_more", [True, False], ids=["weights and bias", "alone"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_match_loop_over_slots(name: str, has_more: bool) -> None:
    ids = ROUTINGS[name]
    x, w = tensor(len(ids), D, seed=1), tensor(E, D, F, seed=3)
    weights, b = (tensor(*ids.shape, seed=2), tensor(E, F, seed=4)) if has_more else (None, None)
    operands = (x, ids, weights, w, b)
    leaves = [x for x in operands if x is not None and x.is_floating_point()]
    found, wanted = layer(*operands), naive(*operands)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grad = tensor(*found.shape, seed=5).detach()
    of_found = torch.autograd.grad(found, leaves, grad)
    of_wanted = torch.autograd.grad(wanted, leaves, grad, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-12, atol=1e-12)
    idle = [e for e in range(E) if not bool((ids == e).any())]
    assert not of_found[-2 if has_more else -1][idle].count_nonzero()


def test_experts_gradients_match_differences() -> None:
    ids = ROUTINGS["dropped"]

    def run(x: Tensor, weights: Tensor, w: Tensor, b: Tensor) -> Tensor:
        rows, route = dt.to_experts(x, ids, E)
        h = dt.expert_linear(rows, w, route, b).tanh()
        return dt.from_experts(dt.expert_linear(h, w.transpose(1, 2), route), route, weights)

    operands = tensor(T, D), tensor(*ids.shape, seed=1), tensor(E, D, F), tensor(E, F)
    torch.autograd.gradcheck(run, operands, fast_mode=True)


def test_experts_of_16_bits_round_as_loop_over_slots() -> None:
    """The sum over a token's slots rounds once."""
    bf16 = torch.bfloat16
    ids, weights = some_ids(E), tensor(T, E, dtype=torch.float32)
    operands = tensor(T, D, dtype=bf16), ids, weights, tensor(E, D, F, dtype=bf16), None
    torch.testing.assert_close(layer(*operands), naive(*operands), rtol=2**-7, atol=2**-8)
    rows, route = dt.to_experts(torch.ones(1, 1, dtype=bf16), torch.tensor([[0, 1, 2]]), E)
    parts = rows * torch.tensor([[1.0], [2**-8], [2**-8]], dtype=bf16)
    assert dt.from_experts(parts, route).item() == 1 + 2**-7


def test_rows_are_sorted_by_expert_in_order_of_slots() -> None:
    rows, route = dt.to_experts(
        torch.arange(3.0)[:, None], torch.tensor([[2, 0], [0, -1], [2, 0]]), 4
    )
    assert route.counts.tolist() == [3, 0, 2, 0]
    assert route.expert.tolist() == [0, 0, 0, 2, 2, -1]
    assert route.slot.tolist() == [1, 2, 5, 0, 4, 3]
    assert rows.flatten().tolist() == [0, 1, 2, 0, 2, 0]
    assert (route.num_experts, route.top_k, route.num_tokens) == (4, 2, 3)


def test_nan_in_tokens_and_rows_without_expert_changes_nothing() -> None:
    ids, weights = ROUTINGS["dropped"].clone(), tensor(T, 3, seed=1)
    ids[2] = -1
    x, w, b = tensor(T, D), tensor(E, D, F), tensor(E, F)
    broken_x, broken_weights = x.detach().clone(), weights.detach().clone()
    broken_x[2], broken_weights[ids < 0] = float("nan"), float("nan")
    leaves = broken_x.requires_grad_(), broken_weights.requires_grad_(), w, b
    rows, route = dt.to_experts(broken_x, ids, E)
    is_row = (route.expert >= 0)[:, None]
    rows = dt.expert_linear(torch.where(is_row, rows, torch.nan), w, route, b)
    y = dt.from_experts(torch.where(is_row, rows, torch.nan), route, broken_weights)
    wanted = layer(x, ids, weights, w, b)
    assert torch.equal(y, wanted) and not y[2].count_nonzero()
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    expected = torch.autograd.grad(wanted, (x, weights, w, b), torch.ones_like(y))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("held", [range(0), range(1), range(1, 4), range(4)], ids=str)
def test_expert_ops_on_rows_of_some_experts_add_up(held: range) -> None:
    """A rank has the rows of its experts, and values that are no rows after them."""
    ops: Any = torch.ops.dt
    ids, weights = ROUTINGS["dropped"], tensor(T, 3).detach()
    counts, expert, slot = ops.route(ids, E)
    parts = []
    for experts in (held, [e for e in range(E) if e not in held]):
        index = torch.tensor([i for i, e in enumerate(expert.tolist()) if e in experts] + [-1])
        local = counts[list(experts)]
        rows = ops.take_rows(tensor(T, D).detach(), slot[index], local, None, 3)
        rows[len(index) - 1 :] = torch.nan
        h = ops.expert_mm(rows, tensor(E, D, F).detach()[list(experts)], local, None, 3)
        h[len(index) - 1 :] = torch.nan
        parts.append(ops.add_rows(h, slot[index], local, weights, T, 3))
    wanted = layer(tensor(T, D), ids, weights, tensor(E, D, F), None)
    torch.testing.assert_close(parts[0] + parts[1], wanted.detach(), rtol=1e-12, atol=1e-12)


def test_expert_linear_casts_under_autocast_as_linear() -> None:
    ids = torch.zeros(T, 1, dtype=torch.long)
    x, w, b = (tensor(*s, dtype=torch.float32) for s in ((T, D), (1, D, F), (1, F)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows, route = dt.to_experts(x, ids, 1)
        y = dt.from_experts(dt.expert_linear(rows, w, route, b), route)
        assert torch.equal(y, torch.nn.functional.linear(x, w[0].t(), b[0]))
    assert y.dtype == torch.bfloat16


# -- capacity --------------------------------------------------------------------------------------


def test_drop_tokens_keeps_largest_weights_or_first_slots() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, -1]])
    weights = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.5, 0.5], [0.7, 0.3]])
    kept = dt.drop_tokens(ids, weights, 4, 1.0)  # capacity 2
    assert kept.tolist() == [[-1, 1], [0, 2], [-1, 1], [0, -1]]
    kept = dt.drop_tokens(ids, weights, 4, 1.0, policy="position")
    assert kept.tolist() == [[0, 1], [0, 2], [-1, 1], [-1, -1]]
    assert torch.equal(dt.drop_tokens(ids, weights, 4, 2.0), ids)
    with pytest.raises(dt.PlanningError, match='it is "probs" or "position"'):
        dt.drop_tokens(ids, weights, 4, 2.0, policy="best")  # type: ignore[arg-type]


def test_capacity_is_rounded_up_without_error_of_floats() -> None:
    """100 / 10 * 1.1 is 11.000000000000002 in floats."""
    ids = torch.zeros(100, 1, dtype=torch.long)
    kept = dt.drop_tokens(ids, torch.ones(100, 1), 10, 1.1)
    assert int((kept == 0).sum()) == 11


# -- errors ----------------------------------------------------------------------------------------

X, IDS = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.long)
WEIGHT = torch.zeros(2, 2, 5)


def routed(x: Tensor = X, ids: Tensor = IDS) -> tuple[Tensor, dt.Route]:
    return dt.to_experts(x, ids, 2)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: routed(X[None]), "x is f32[1,3,2], not the tokens [T d]"),
        (lambda: routed(ids=IDS[0]), "ids is i64[1], not the experts of each token"),
        (lambda: routed(ids=IDS.float()), "ids are f32[3,1], not integers"),
        (lambda: routed(ids=IDS[:2]), "each of 3 tokens; x is f32[3,2], ids are i64[2,1]"),
        (lambda: dt.to_experts(X, IDS, 0), "num_experts"),
        (lambda: dt.expert_linear(X[:2], WEIGHT, routed()[1]), "not the 3 rows of the route"),
        (lambda: dt.expert_linear(X, WEIGHT.mT, routed()[1]), "f32[2,5,2], not [E i o] with E=2"),
        (lambda: dt.expert_linear(X, WEIGHT, routed()[1], X[0]), "bias is f32[2], not [2,5]"),
        (lambda: dt.expert_linear(X, WEIGHT.double(), routed()[1]), "one dtype; got f32[3,2]"),
        (lambda: dt.from_experts(X, routed()[1], X), "weights are f32[3,2], not floating"),
        (lambda: dt.from_experts(X, IDS), "route is "),  # type: ignore[arg-type]
        (lambda: dt.drop_tokens(IDS, X, 2, 1.0), "one weight for each id"),
        (lambda: dt.drop_tokens(IDS, X[:, :1], 2, 0), "capacity_factor"),
    ],
)
def test_wrong_operands_of_experts_are_refused(run: Callable[[], object], message: str) -> None:
    with pytest.raises(dt.PlanningError, match=re.escape(message)) as raised:
        run()
    assert "\nfix: " in str(raised.value)


@pytest.mark.parametrize("wrong", [-2, 2])
def test_id_of_no_expert_raises_index_error(wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"Expert id {wrong} is outside -1\.\.1,.*2 experts"):
        routed(ids=IDS.index_fill(0, torch.tensor([1]), wrong))


@pytest.mark.parametrize("counts", [[2, 2], [-1, 2]])
def test_counts_that_are_not_of_rows_raise_index_error(counts: list[int]) -> None:
    with pytest.raises(IndexError, match=re.escape(f"at most 3, the number of rows; got {counts}")):
        torch.ops.dt.expert_mm(X, WEIGHT, torch.tensor(counts), None, 1)
