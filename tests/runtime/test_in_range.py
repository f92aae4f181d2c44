"""Tests index checks before GPU kernels: a check raises what torch raises on a CPU, and local
code for "cuda" has a check before each op whose kernel would assert.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor as dt
from dtensor.runtime.lower import program
from dtensor.runtime.lower.program import lower
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.sharding.local import local_forms
from dtensor.sharding.local.device_asserts import CHECKS, called_op
from dtensor.sharding.local.in_range import check_range

aten = torch.ops.aten


def i64(*values: int) -> Tensor:
    return torch.tensor(values)


X, Y = torch.randn(3, 4), torch.randn(2, 4)


def calls(a: int, b: int) -> dict[Any, tuple[Any, ...]]:
    """Return, by op, arguments that look up indices ``a`` and ``b`` along a dim of size 3 (4 for
    losses)."""
    at = i64(a, b)
    row = at[:, None].expand(2, 4)
    one = torch.ones(())
    return {
        aten._embedding_bag.default: (X, at, i64(0, 1)),
        aten._embedding_bag_forward_only.default: (X, at, i64(0, 0, 2)),
        aten._unsafe_index.Tensor: (X, [at]),
        aten._unsafe_index_put.default: (X, [at], Y),
        aten.embedding.default: (X, at),
        aten.gather.default: (X, 0, row),
        aten.index.Tensor: (X, [at]),
        aten.index_add.default: (X, 0, at, Y),
        aten.index_copy.default: (X, 0, at, Y),
        aten.index_fill.int_Scalar: (X, 0, at, 1.0),
        aten.index_fill.int_Tensor: (X, 0, at, one),
        aten.index_put.default: (X, [at], Y),
        aten.index_reduce.default: (X, 0, at, Y, "prod"),
        aten.index_select.default: (X, 0, at),
        aten.max_unpool2d.default: (X[:1, None, :2, None], at[None, None, :, None], [1, 3]),
        aten.max_unpool3d.default: (
            *(X[:1, None, :2, None, None], at[None, None, :, None, None]),
            *([1, 1, 3], [1, 1, 1], [0, 0, 0]),
        ),
        aten.multi_margin_loss.default: (Y, at),
        aten.multi_margin_loss_backward.default: (one, Y, at, 1, 1),
        aten.multilabel_margin_loss_forward.default: (Y[:, :2], row[:, :2], 1),
        aten.nll_loss2d_backward.default: (
            *(one, Y[..., None, None], at[:, None, None], None, 1, -1, one),
        ),
        aten.nll_loss2d_forward.default: (Y[..., None, None], at[:, None, None], None, 1, -1),
        aten.nll_loss_forward.default: (Y, at, None, 1, -1),
        aten.nll_loss_backward.default: (one, Y, at, None, 1, -1, one),
        aten.put.default: (X[:, 0], at, Y[:, 0]),
        aten.scatter.src: (X, 0, row, Y),
        aten.scatter.value: (X, 0, row, 1.0),
        aten.scatter_add.default: (X, 0, row, Y),
        aten.scatter_reduce.two: (X, 0, row, Y, "amax"),
        aten.take.default: (X[:, 0], at),
    }


def test_this_file_tests_every_range_check() -> None:
    alone = aten.embedding_dense_backward.default
    assert {*calls(0, 1), *OTHER_CALLS, alone} == set(CHECKS)


def check_as_op(op: Any, error: Any, match: str | None, *args: Any, **options: Any) -> None:
    """Check that the check raises ``error`` exactly where the op raises."""
    try:
        op(*args, **options)
    except (IndexError, RuntimeError):
        with pytest.raises(error, match=match):
            CHECKS[op](*args, **options)
    else:
        CHECKS[op](*args, **options)


@pytest.mark.parametrize("op", list(calls(0, 1)), ids=str)
def test_index_check_raises_exactly_where_op_raises(op: Any) -> None:
    for index in (-9, -4, -3, -1, 0, 2, 3, 4, 40):
        check_as_op(op, IndexError, f"index {index} is out of range", *calls(1, index)[op])


NAN, INF = float("nan"), float("inf")
EVERY_OTHER = torch.tensor([True, False, True, False])
ROW = i64(0, 1)[:, None].expand(2, 4)
OTHER_CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.scatter.reduce: [((X, 0, ROW + i, Y), {"reduce": "add"}) for i in (-1, 1, 2)],
    aten.scatter.value_reduce: [((X, 0, ROW + i, 2.0), {"reduce": "add"}) for i in (-1, 1, 2)],
    aten._embedding_bag.default: [
        ((X, i64(0, 2, 1), i64(*offsets), False, 0, False, None, has_last), {})
        for has_last in (False, True)
        for offsets in ((0, 1, 1, 3), (0, 4), (1, 2), (0, 3, 3), (0, 3))
    ],
    aten.binary_cross_entropy.default: [
        ((torch.tensor([0.5, x]), torch.tensor([0.0, y])), {})
        for x, y in (
            *((0, 1), (1, 0), (-0.1, 0), (1.1, 0), (NAN, 0), (INF, 0), (0, 1.1), (0, NAN)),
        )
    ],
    aten.repeat_interleave.Tensor: [
        ((i64(2, 0, n),), {"output_size": size})
        for n, size in ((1, 3), (1, None), (-1, None), (1, 2), (1, 4))
    ],
    aten.masked_scatter.default: [
        ((X, mask, torch.ones(n)), {})
        for mask, n in (
            *((X > -9, 12), (X > -9, 11), (X > 9, 0), (X[0, 0] == X, 1)),
            *((EVERY_OTHER, 6), (EVERY_OTHER, 5)),
        )
    ],
    aten.segment_reduce.default: [
        ((Y[0], "sum"), {"lengths": i64(*lengths), "unsafe": True})
        for lengths in ((2, 2), (2, -1, 3), (0, 4))
    ],
}


@pytest.mark.parametrize("op", OTHER_CALLS, ids=str)
def test_check_of_other_operands_raises_exactly_where_op_raises(op: Any) -> None:
    for args, options in OTHER_CALLS[op]:
        check_as_op(op, (IndexError, RuntimeError), None, *args, **options)


def test_check_finds_errors_that_cpu_kernels_ignore() -> None:
    """For such an index the CPU kernel skips the row or reads invalid memory; a GPU kernel writes
    elsewhere."""
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=f"index {wrong} is out of range"):
            CHECKS[aten.embedding_dense_backward.default](Y, i64(0, wrong), 3, -1, False)
    CHECKS[aten.embedding_dense_backward.default](Y, i64(0, 2), 3, -1, False)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        CHECKS[aten.repeat_interleave.Tensor](i64(2, -2), output_size=0)
    with pytest.raises(IndexError, match="do not decrease.*first wrong one of 3 is 1"):
        CHECKS[aten._embedding_bag.default](X, i64(0, 1, 2), i64(0, 2, 1))


class Ops(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_range_check_of_unchanged_tensor_is_not_repeated() -> None:
    """The check runs again if the tensor was written to, or for another size."""
    at = i64(0, 3)
    check_range(at, 4)
    with Ops() as ops:
        check_range(at, 4)
    assert ops.count == 0
    with pytest.raises(IndexError, match="index 3 is out of range for a dim of size 3"):
        check_range(at, 3)
    at[0] = 4
    for _ in range(2):
        with pytest.raises(IndexError, match="index 4 is out of range"):
            check_range(at, 4)
    check_range(at, 5)
    check_range(at, 6, -6)
    with Ops() as ops:
        check_range(at, 5)
        check_range(at, 6, -6)
    assert ops.count == 0
    with torch.inference_mode():  # has no count of writes
        unknown = i64(0, 3)
    check_range(unknown, 4)
    with pytest.raises(IndexError, match="index 3"):
        check_range(unknown, 3)


def test_backward_does_not_repeat_range_check_of_forward() -> None:
    at, offsets, one = i64(0, 2), i64(0, 1), torch.ones(())
    CHECKS[aten.nll_loss_forward.default](Y, at, None, 1, -100)
    CHECKS[aten.embedding.default](X, at)
    CHECKS[aten._embedding_bag.default](X, at, offsets)
    with Ops() as ops:
        CHECKS[aten.nll_loss_backward.default](one, Y, at, None, 1, -100, one)
        CHECKS[aten.embedding_dense_backward.default](Y, at, 3, -1, False)
        CHECKS[aten._embedding_bag.default](X, at, offsets)
    assert ops.count == 0


def test_index_check_handles_masks_and_none() -> None:
    mask = torch.tensor([True, False, True])
    check = CHECKS[aten.index.Tensor]
    check(X, [mask, i64(3, 0)])
    check(X, [None, i64(3)])
    with pytest.raises(IndexError, match="index 4 is out of range for a dim of size 4"):
        check(X, [mask, i64(4, 0)])
    with pytest.raises(IndexError, match="index 4 is out of range for a dim of size 4"):
        check(X, [None, i64(4)])


def step_of(module: nn.Module, pins: Any, loss: Any, **stated: Any) -> dt.TrainStep:
    model = dt.parallelize(module, dt.Mesh(tp=2), pins)
    return dt.train_step(model, loss, torch.optim.SGD(module.parameters(), lr=0.1), **stated)


@pytest.fixture(params=["deferred", "reads on the host"])
def deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether programs for GPUs check on the device."""
    if request.param != "deferred":
        monkeypatch.setattr(program, "defers", lambda shared, roles: False)
    return request.param == "deferred"


def updates(plan: dt.Plan) -> dict[str, Any]:
    return {"device": torch.device("cuda"), "roles": Roles.of_plan(plan)}


def test_code_for_cuda_checks_indices_and_code_for_cpu_does_not(deferred: bool) -> None:
    torch.manual_seed(0)
    step = step_of(
        nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 5)),
        {"1.weight": dict(tp=dt.Row())},
        lambda model, ids, y: F.nll_loss(F.log_softmax(model(ids), -1), y),
    )
    plan = step.plan(i64(1, 5), i64(1, 4))
    of_cpu, of_cuda = (
        "\n".join(function.source for _, function in lower(plan, None, **given).functions)
        for given in ({}, updates(plan))
    )
    assert "check" not in of_cpu
    for op in ("embedding", "gather"):
        before = re.findall(rf"(.*)\n.* = (?:aten_)?{op}(?:_default)?\((.*?)\)", of_cuda)
        assert before
        for line, given in before:
            if deferred:
                assert re.search(r"(\w+) = checked", line)[1] in given.split(", "), line
            else:
                assert re.search(rf"check\w*\({re.escape(given)}\)", line), line


def checked_calls(step: Any, *batch: Tensor, grid: Any = None) -> list[tuple[str, str, str]]:
    """Return, for GPU code, the arguments of each check, and the call after it with its
    arguments."""
    plan = step.plan(*batch)
    functions = lower(plan, grid, **updates(plan)).functions
    code = "\n".join(function.source for _, function in functions)
    return re.findall(r"check\w*\((.*)\)\n.* = (\w+)\((.*?)\)(?:;.*)?\n", code)


@pytest.mark.parametrize("deferred", ["reads on the host"], indirect=True)
def test_code_for_cuda_checks_indices_of_ops_inside_local_forms(deferred: bool) -> None:
    """A column shard of a table is made contiguous first; a mean over a part of the batch is
    computed as a sum."""
    step = step_of(
        nn.EmbeddingBag(6, 8),
        {"weight": dict(tp=dt.Column())},
        lambda model, ids, offsets: model(ids, offsets).sum(),
    )
    ((checked, called, given),) = checked_calls(step, i64(1, 5, 2), i64(0, 1))
    assert called == "contiguously" and given == f"constant, {checked}"
    assert checked.startswith("weight, ids, offsets")
    step = step_of(
        nn.Linear(4, 3),
        {},
        lambda model, x, y: F.multi_margin_loss(model(x), y),
        schedule=dt.GPipe(microbatches=2),
    )
    found = checked_calls(step, X[:2], i64(0, 2), grid=dt.GPipe(2).grid(1, 1))
    assert {called for _, called, _ in found} == {"loss_over", "loss_backward_over"}
    for checked, _, given in found:
        assert re.fullmatch(rf"constant(_1)?, 2, {re.escape(checked)}", given)


def test_checked_op_is_found_inside_nested_local_forms() -> None:
    loss = aten.multi_margin_loss.default
    args = (local_forms.loss_over, loss, 4, "x", "y", 1, 1, None, 2)
    assert called_op(local_forms.in_float32, args) == (loss, 3)
