"""Indices are checked before a GPU's kernel sees them: a check finds what torch finds on a CPU, and
local code for "cuda" has one before each op that looks things up."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor as dt
from dtensor.runtime.lower.program import lower
from dtensor.sharding.local.in_range import CHECKS, check_range

aten = torch.ops.aten


def i64(*values: int) -> Tensor:
    return torch.tensor(values)


X, Y = torch.randn(3, 4), torch.randn(2, 4)


def calls(a: int, b: int) -> dict[Any, tuple[Any, ...]]:
    """By op, arguments that look up ``a`` and ``b`` along a dim of 3, 4 for losses."""
    at = i64(a, b)
    row = at[:, None].expand(2, 4)
    return {
        aten.embedding.default: (X, at),
        aten.gather.default: (X, 0, row),
        aten.index.Tensor: (X, [at]),
        aten.index_add.default: (X, 0, at, Y),
        aten.index_copy.default: (X, 0, at, Y),
        aten.index_fill.int_Scalar: (X, 0, at, 1.0),
        aten.index_put.default: (X, [at], Y),
        aten.index_select.default: (X, 0, at),
        aten.max_unpool2d.default: (X[:1, None, :2, None], at[None, None, :, None], [1, 3]),
        aten.max_unpool3d.default: (
            X[:1, None, :2, None, None],
            at[None, None, :, None, None],
            [1, 1, 3],
            [1, 1, 1],
            [0, 0, 0],
        ),
        aten.nll_loss2d_forward.default: (Y[..., None, None], at[:, None, None], None, 1, -1),
        aten.nll_loss_forward.default: (Y, at, None, 1, -1),
        aten.scatter.src: (X, 0, row, Y),
        aten.scatter.value: (X, 0, row, 1.0),
        aten.scatter_add.default: (X, 0, row, Y),
    }


@pytest.mark.parametrize("op", list(CHECKS), ids=str)
@pytest.mark.parametrize("index", [-9, -4, -3, -1, 0, 2, 3, 4, 40])
def test_a_check_finds_what_the_op_finds(op: Any, index: int) -> None:
    args = calls(1, index)[op]
    try:
        op(*args)
        wrong = False
    except (IndexError, RuntimeError):
        wrong = True
    if wrong:
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            CHECKS[op](*args)
    else:
        CHECKS[op](*args)


class Ops(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_is_known_to_be_in_range_is_not_looked_at_again() -> None:
    """As it was: written to, or for another size, it is."""
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


def test_masks_and_gaps_among_indices() -> None:
    mask = torch.tensor([True, False, True])
    check = CHECKS[aten.index.Tensor]
    check(X, [mask, i64(3, 0)])
    check(X, [None, i64(3)])
    with pytest.raises(IndexError, match="index 4 is out of range for a dim of size 4"):
        check(X, [mask, i64(4, 0)])
    with pytest.raises(IndexError, match="index 4 is out of range for a dim of size 4"):
        check(X, [None, i64(4)])


def test_code_for_a_gpu_checks_and_other_code_does_not() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 5))
    mesh = dt.Mesh(tp=2)
    step = dt.train_step(
        dt.parallelize(module, mesh, {"1.weight": dict(tp=dt.Row())}),
        lambda model, ids, y: F.nll_loss(F.log_softmax(model(ids), -1), y),
        torch.optim.SGD(module.parameters(), lr=0.1),
    )
    plan = step.plan(torch.tensor([1, 5]), torch.tensor([1, 4]))
    code: dict[str, str] = {}
    for device in ("cpu", "cuda"):
        functions = lower(plan, None, device=torch.device(device)).functions
        code[device] = "\n".join(function.source for _, function in functions)
    assert "check" not in code["cpu"]
    for op in ("embedding", "gather"):
        before = re.findall(rf"(.*)\n.* = (?:aten_)?{op}(?:_default)?\((.*?)\)", code["cuda"])
        assert before
        for line, given in before:
            assert re.search(rf"check\w*\({re.escape(given)}\)", line), line
