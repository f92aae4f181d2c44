"""Tests checks on the device: each records the error that the check on the host raises, and gives
the op an operand that it accepts. On simulated GPUs a step with a wrong operand is undone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import dtensor as dt
from dtensor.daft import Call, Vote
from dtensor.daft.ir.instructions import Buffer
from dtensor.runtime.lower.inductor import compile_segments
from dtensor.runtime.lower.pieces import PieceSource
from dtensor.runtime.lower.program import lower
from dtensor.sharding.local.conditions import Range, Solved, checked, satisfied
from dtensor.sharding.local.device_asserts import CHECKS, CONDITIONS
from dtensor.sharding.local.in_range import was_checked
from dtensor.sharding.local.indexing import _write_without_wait, local_positions, write_shard
from dtensor.testing.gpus.guard import CompilerMissing
from tests.runtime.test_in_range import OTHER_CALLS, calls, i64, step_of, updates


def recorded(op: Any, args: Any, options: Any) -> tuple[Exception | None, Any, Any]:
    """Return the error that the checks of a deferred program record for a call of the op, and the
    arguments that the op gets then."""
    faults = torch.zeros(3, dtype=torch.int64)
    satisfying: dict[int, Tensor] = {}
    pairs = CONDITIONS[op](*args, **options)
    for number, (x, condition) in enumerate(pairs, 1):
        before = satisfying.get(id(x), x)
        satisfying[id(x)] = ok = checked(condition, before, faults, number)
        assert torch.equal(satisfied(condition, before), ok) and was_checked(ok, condition.key)
    number, value, count = faults.tolist()
    error = pairs[number - 1][1].error(value, count) if number else None
    args, options = tree_map_only(Tensor, lambda x: satisfying.get(id(x), x), (args, options))
    return error, args, options


def calls_of(op: Any) -> list[tuple[Any, Any]]:
    """Return arguments and options of an op, with right and with wrong operands."""
    indexed = [(calls(1, i)[op], {}) for i in (-9, -4, -1, 0, 2, 3, 40) if op in calls(0, 1)]
    return [*indexed, *OTHER_CALLS.get(op, [])]


@pytest.mark.parametrize("op", {**calls(0, 1), **OTHER_CALLS}, ids=str)
def test_check_on_device_records_error_of_host_check_and_satisfies_op(op: Any) -> None:
    for args, options in calls_of(op):
        error, new_args, new_options = recorded(op, args, options)
        got = op(*new_args, **new_options)
        try:
            CHECKS[op](*args, **options)
        except (IndexError, RuntimeError) as host_error:
            assert (type(error), str(error)) == (type(host_error), str(host_error))
        else:
            assert error is None
            torch.testing.assert_close(got, op(*args, **options), rtol=0, atol=0, equal_nan=True)


def test_first_fault_of_a_row_stays() -> None:
    faults = torch.zeros(3, dtype=torch.int64)
    checked(Range(size=3, num=2), i64(0, 1), faults, 1)
    checked(Range(size=3, num=3), i64(0, 5, -7), faults, 2)
    checked(Range(size=3, num=2), i64(8, 1), faults, 3)
    assert faults.tolist() == [2, 5, 2]


def test_solved_has_words_of_torch() -> None:
    singular = torch.stack([torch.eye(2), -torch.eye(2), torch.zeros(2, 2)])
    for x in (singular, singular[1]):
        _, info = torch.linalg.cholesky_ex(x)
        condition = Solved(name="linalg.cholesky", is_matrix=x.dim() == 2, num=info.numel())
        faults = torch.zeros(3, dtype=torch.int64)
        assert not checked(condition, info, faults, 1).any()
        with pytest.raises(RuntimeError) as raised:
            torch.linalg.cholesky(x)
        error = condition.error(*faults.tolist()[1:])
        assert (type(error), str(error)) == (raised.type, str(raised.value))


@pytest.mark.parametrize("pieces", [((0, 3),), ((3, 5), (6, 7)), ((7, 9),)], ids=str)
@pytest.mark.parametrize("kind", ["index_copy", "index_fill", "index_put", "scatter"])
def test_index_write_without_wait_equals_write_out_of_place(kind: Any, pieces: Any) -> None:
    torch.manual_seed(0)
    size, rows = 9, sum(hi - lo for lo, hi in pieces)
    for num in (0, 1, 4):
        x = torch.randn(2, rows, 3)
        index = torch.randperm(size)[:num] - size * torch.randint(0, 2, (num,))
        source: Any = torch.randn(2, num, 3)
        if kind == "index_fill":
            source = 7.0
        if kind == "scatter":
            index = index[None, :, None].expand(2, num, 3).contiguous()
        expected = write_shard(kind, x, 1, index, source, pieces, size)
        is_local, local = local_positions(index % size, pieces)
        _write_without_wait(kind, x, 1, is_local, local, source)
        assert torch.equal(x, expected)


# -- in programs -----------------------------------------------------------------------------


def test_deferred_program_records_each_value_once_in_a_row_of_its_call() -> None:
    """The backward of an embedding limits the indices again; each microbatch has its own."""
    step = step_of(
        nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 5)),
        {},
        lambda model, ids, y: F.cross_entropy(model(ids), y),
        schedule=dt.GPipe(microbatches=2),
    )
    plan = step.plan(i64(1, 5), i64(1, 4))
    lowered = lower(plan, dt.GPipe(2).grid(1, 1), **updates(plan))
    functions = dict(lowered.functions)
    instructions = lowered.ranks[0].instructions
    checking = [i for i in instructions if isinstance(i, Call) and functions[i.fn].checks]
    rows = [f"faults.{n}" for n in range(len(checking))]
    assert [list(call.writes) for call in checking] == [[row] for row in rows]
    assert list(instructions[0].outputs) == rows
    assert [list(i.faults) for i in instructions if isinstance(i, Vote)] == [rows]
    checks = [check for call in checking for check in functions[call.fn].checks]
    assert sorted(type(check).__name__ for check in checks) == ["Range"] * 2 + ["Target"] * 2
    assert all("test_device_checks.py:" in str(check.source) for check in checks)
    assert sum(f.source.count("= satisfied(Range(") for _, f in lowered.functions) >= 1


def test_code_that_asks_whether_an_operand_was_checked_is_not_parted_from_its_check() -> None:
    """A compiled piece returns a new tensor, of which nothing is known: the host would wait."""
    step = step_of(nn.Linear(4, 6), ROWS, lambda model, at: (model.weight.exp() + 1)[at].sum())
    plan = step.plan(i64(0, 5))
    lowered = lower(plan, None, compiled=True, **updates(plan))
    specs = {item.name: item.held for item in plan.inputs}
    inputs = [
        {
            name: Buffer(spec.local_shape(plan.mesh.coordinates(rank)), spec.dtype)
            for name, spec in specs.items()
        }
        for rank in range(plan.mesh.size)
    ]
    pieces: list[str] = []

    def compile(source: PieceSource) -> str:
        pieces.append(source.function.source)
        return "not compiled"

    compile_segments(lowered, inputs, torch.device("cuda"), compile)
    # whether both are in the piece depends on what torch runs on fake tensors of a GPU
    with_checks = [piece for piece in pieces if "= checked(" in piece]
    assert pieces
    for piece in with_checks:
        assert "= index_shard(" in piece and "_ok" not in piece.rpartition("return")[2]


DATA = torch.rand(3, 4)
TOKENS, EXPERTS = torch.rand(8, 8).bfloat16(), torch.rand(4, 8, 16).bfloat16()
OFFSETS = torch.tensor([3, 3, 6, 7]).int(), torch.tensor([3, 9, 6, 7]).int()


def by_group(m: Any, ends: Tensor) -> Tensor:
    """Multiply groups of rows by matrices in bfloat16, which a kernel of torch does on GPUs."""
    experts = m.weight.sum() * EXPERTS
    return torch._grouped_mm(TOKENS, experts.bfloat16(), ends).float().sum()  # pyright: ignore


def by_expert(m: Any, ids: Tensor) -> Tensor:
    rows, route = dt.to_experts(TOKENS, ids, 4)
    weight = (m.weight.sum() * EXPERTS).bfloat16()
    y = dt.expert_linear(rows, weight, route)
    return dt.from_experts(y, route, torch.ones_like(ids, dtype=y.dtype)).float().sum()


ROWS = {"weight": dict(tp=dt.Row())}
STEPS: dict[str, tuple[Any, Any, tuple[Tensor, ...], tuple[Tensor, ...], str]] = {
    "embedding": (
        {"weight": dict(tp=dt.Column())},
        lambda m, at: F.embedding(at, m.weight).sum(),
        (i64(0, 5),),
        (i64(7, -3),),
        "IndexError: index 7 is out of range for a dim of size 6, among 2 indices",
    ),
    "embedding of split rows": (
        ROWS,
        lambda m, at: F.embedding(at, m.weight).sum(),
        (i64(0, 5),),
        (i64(7, -3),),
        "",
    ),
    "cross entropy": (
        {},
        lambda m, at: F.cross_entropy(m(DATA), at),
        (i64(0, 5, -100),),
        (i64(7, -100, 9),),
        "",
    ),
    "negative log likelihood": (
        {},
        lambda m, at: F.nll_loss(F.log_softmax(m(DATA), -1), at),
        (i64(0, 5, -100),),
        (i64(7, -100, 9),),
        "index 7 is out of range for a dim of size 6, among 3 indices",
    ),
    "index of split rows": (
        ROWS,
        lambda m, at: m.weight[at].sum(),
        (i64(0, -1),),
        (i64(0, 6),),
        "",
    ),
    "write to split rows": (
        ROWS,
        lambda m, at: (m.weight.index_put((at,), DATA[:2]) ** 2).sum(),
        (i64(0, 5),),
        (i64(9, 1),),
        "",
    ),
    "probabilities": (
        {},
        lambda m, y: F.binary_cross_entropy(m(DATA).sigmoid(), y),
        (DATA[:, [0]].expand(3, 6),),
        (torch.eye(3, 6) - 0.5,),
        "all elements of target should be between 0 and 1; 15 of 18 are not, the first is -0.5",
    ),
    "repeats": (
        {},
        lambda m, n: m.weight.repeat_interleave(n, 0, output_size=6).sum(),
        (i64(1, 1, 1, 1, 1, 1),),
        (i64(1, 1, 1, 1, 1, 3),),
        "RuntimeError: output_size is 6, and the repeats sum to 8",
    ),
    "places of a mask": (
        {},
        lambda m, k: m.weight.masked_scatter(k, DATA[:1]).sum(),
        (torch.eye(6, 4) > 0,),
        (torch.ones(6, 4) > 0,),
        "is true: 24 places, 4 elements",
    ),
    "factorization": (
        {},
        lambda m, x: (torch.linalg.cholesky(x) * m.weight[:4]).sum(),
        (torch.eye(4),),
        (-torch.eye(4),),
        "",
    ),
    "grouped product": (
        {},
        by_group,
        OFFSETS[:1],
        OFFSETS[1:],
        "offsets of groups do not decrease, and are in 0:8, the rows of all groups; the first "
        "wrong one of 4 is 9",
    ),
    "product by expert": (
        {},
        by_expert,
        (torch.arange(16).reshape(8, 2) % 5 - 1,),
        (torch.arange(16).reshape(8, 2) // 15 * 9,),
        "",
    ),
    "scale of a distribution": (
        {},
        lambda m, x: torch.distributions.Normal(m(DATA), x).log_prob(DATA[:, :1]).sum(),
        (torch.ones(3, 6),),
        (-torch.ones(3, 6),),
        "",
    ),
}
"""Placements, a loss of a Linear(4, 6), a right batch, a wrong batch, and the error on a GPU; "" if
the CPU's error has the same words."""


def steps_with_wrong_batch(device: str, name: str) -> tuple[float, str, float]:
    """Return the loss of a step, the error of the second step, and the loss of a third one."""
    torch.manual_seed(0)
    module = nn.Linear(4, 6)
    pins, loss, right, wrong, _ = STEPS[name]
    step = step_of(module, pins, loss, inputs=dict(tp=dt.Replicate()))
    with dt.launch(step.model.mesh, device=device):
        first = float(step(*right))
        with pytest.raises(dt.daft.TaskError) as raised:
            float(step(*wrong))
        return first, str(raised.value), float(step(*right))


@pytest.mark.default("cross entropy", "embedding of split rows")
@pytest.mark.parametrize("name", STEPS)
def test_gpu_undoes_step_with_wrong_operand_without_wait_and_raises_words_of_cpu(name: str) -> None:
    on_cpu = steps_with_wrong_batch("cpu", name)
    try:
        with dt.testing.simulated_gpus(num=1) as gpus:
            on_gpu = steps_with_wrong_batch("cuda", name)
            report = gpus.report()
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert (on_gpu[0], on_gpu[2]) == pytest.approx((on_cpu[0], on_cpu[2]), rel=1e-6)
    _, _, words = on_cpu[1].partition(": ")
    wanted = STEPS[name][4] or words.splitlines()[0].rpartition("run 1: ")[2]
    assert wanted in on_gpu[1]
    assert on_gpu[1].splitlines()[-1] == on_cpu[1].splitlines()[-1]  # the user's line
    assert "daft" in str(report.host_waits)
    assert not [wait for wait in report.host_waits if wait.what.startswith("aten")]
    assert not [wait for wait in report.host_waits if wait.line.startswith(("sharding", "runtime"))]
    assert not report.races
