"""Lowering of checks of operands for GPUs.

    check(weight, ids)                                           # raises; the host waits
    ids_ok = checked(Range(num=12, size=50257), ids, faults, 1)  # in a deferred program

In a deferred program each Call with checks has a row `faults.0`, `faults.1`, ... of the rank. One
Call makes the rows at the start of the rank's list, and the rank's vote reads them. An operand that
an earlier check of the program covers, such as the ids of an embedding in the backward, is limited
again but not recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dtensor.daft import Label, Vote
from dtensor.runtime.lower.code import CodeBuilder
from dtensor.runtime.lower.rank_builder import LocalCode, RankBuilder
from dtensor.sharding.local import grouped_matmul, indexing
from dtensor.sharding.local.conditions import (
    Condition,
    ExpertIds,
    Range,
    Solved,
    Target,
    Valid,
    checked,
    new_faults,
    satisfied,
)
from dtensor.sharding.local.device_asserts import (
    CHECKS,
    CONDITIONS,
    Conditions,
    called_op,
    in_range,
    record_positions,
)
from dtensor.sharding.local.in_range import record_check
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.plan.steps import Compute

_aten: Any = torch.ops.aten


def add_checks(
    b: RankBuilder, call: OpCall, step: Compute, names: Sequence[str], source: str | None
) -> tuple[str, ...]:
    """Emit the checks of the operands of a step's call, and return the names of the operands that
    the call shall read. ``names``: the operands' names in the open segment."""
    code, read = b.segment().code, list(names)
    if not b.shared.deferred:
        _add_host_check(code, call, names, source)
        return tuple(names)
    for index, condition in _conditions(b, call, step):
        value, name = b.value(step.operands[index]), read[index]
        key = value, condition.key
        if condition.num == 0:
            continue
        if _is_computed(b, value, condition):
            if called_op(call.target, call.args)[0] in own_conditions():
                code.apply(record_check, [name], (), layout=condition.key, source=source)
            continue
        if isinstance(condition, Range) and condition.is_empty:  # any index is wrong
            _add_host_check(code, call, names, source)
            break
        reads, arguments, function = [name], "", satisfied
        if key not in b.checked:
            b.checked.add(key)
            row, number = code.add_check(replace(condition, source=source))
            reads, arguments = [name, row], f", {row}, {number}"
            function = checked
        called = code.bind(function.__name__, function)
        kind = type(condition).__name__
        text = f"{code.bind(kind, type(condition))}{repr(condition).removeprefix(kind)}"
        read[index] = ok = code.unused(f"{name}_ok")
        code.line(f"{ok} = {called}({text}, {name}{arguments})", reads, [ok], source, called=called)
    return tuple(read)


def add_positions(
    b: RankBuilder, call: OpCall, results: Sequence[str | None], source: str | None
) -> None:
    """Record that the positions of a topk are in range, so that nothing checks them."""
    shape, index = call.operands[0].shape if call.operands else (), results[-1]
    if call.target is not _aten.topk.default or not shape or index is None:
        return
    size: int = shape[call.arg(2, "dim", -1)]
    if b.shared.deferred:
        b.computed[b.value(index)] = size
    elif b.shared.device.type == "cuda":
        b.segment().code.apply(record_positions, [index], (), size, source=source)


def add_fault_rows(b: RankBuilder) -> None:
    """Give each Call with checks a row, make the rows first, and let the vote read them."""
    segments = [i for i in b.instructions if isinstance(i, LocalCode) and i.code.checks]
    if not segments:
        return
    b.close()
    rows = tuple(f"faults.{number}" for number in range(len(segments)))
    first = LocalCode(CodeBuilder(b.shared.device, b.shared.value_names), Label("faults"), None)
    for row, segment in zip(rows, segments, strict=True):
        segment.table[segment.code.faults] = row
        segment.writes = (*segment.writes, segment.code.faults)
        first.table[first.code.unused(row.replace(".", "_"))] = row
        b.nbytes[row] = 3 * torch.int64.itemsize
    number, device = len(rows), b.shared.device
    first.code.apply(new_faults, [], tuple(first.table), number, device, is_list=True)
    at = next(n for n, item in enumerate(b.instructions) if isinstance(item, Vote))
    late = [i for i in b.instructions[at:] if isinstance(i, LocalCode) and i.code.checks]
    assert not late, f"{late[0].code.checks[0]} runs after the vote"
    vote = b.instructions[at]
    assert isinstance(vote, Vote)
    b.instructions[at] = replace(vote, faults=rows)
    b.instructions.insert(0, first)


def _add_host_check(
    code: CodeBuilder, call: OpCall, names: Sequence[str], source: str | None
) -> None:
    """On a GPU, emit a check that raises, before an op whose kernel would assert."""
    target, first = called_op(call.target, call.args)
    if code.device.type != "cuda" or target not in CHECKS:
        return
    args = [code.literal(a, names) for a in call.args[first:]]
    args += [f"{k}={code.literal(v, names)}" for k, v in call.kwargs]
    called = code.bind("check", CHECKS[target])
    code.line(f"{called}({', '.join(args)})", names, (), source, called=called)


def _is_computed(b: RankBuilder, value: str, condition: Condition) -> bool:
    """Return whether an op computed the value: positions in a dim, all in the range."""
    if not isinstance(condition, Range) or condition.low > 0:
        return False
    return b.computed.get(value, condition.size + 1) <= condition.size


def _conditions(b: RankBuilder, call: OpCall, step: Compute) -> list[tuple[int, Condition]]:
    """Return the conditions of a call, each with the number of its operand."""
    target, first = called_op(call.target, call.args)
    conditions = CONDITIONS.get(target) or own_conditions().get(target)
    if conditions is None:
        return []
    operands = [
        torch.empty(spec.local_shape(b.coordinates), dtype=spec.dtype, device="meta")
        for spec in step.operand_specs
    ]
    numbers = {id(x): number for number, x in enumerate(operands)}
    args, kwargs = tree_map_only(
        Operand, lambda operand: operands[operand.index], (call.args[first:], dict(call.kwargs))
    )
    return [(numbers[id(x)], condition) for x, condition in conditions(*args, **kwargs)]


# -- functions that check their operands themselves ------------------------------------------------


@cache
def own_conditions() -> Mapping[object, Callable[..., Conditions]]:
    """Return the conditions that functions check themselves unless the operand is known to satisfy
    them. In a deferred program it does, so that nothing waits."""
    dt: Any = torch.ops.dt
    return {
        indexing.index_shard: _index_shard,
        indexing.gather_shard: _gather_shard,
        indexing.write_shard: _write_shard,
        dt.embedding_shard.default: lambda weight, ids, rows, num_ids: in_range(ids, num_ids),
        dt.ce_loss.default: _ce_loss,
        dt.checked.default: _checked,
        dt.linalg_checked.default: _linalg_checked,
        dt.route.default: lambda ids, *given: [(ids, ExpertIds.of(ids, *given))],
        grouped_matmul.grouped_mm: _grouped,
        grouped_matmul.grouped_mm_backward: _grouped,
    }


def _index_shard(
    x: Tensor, index: Tensor, dim: int, pieces: indexing.Pieces, size: int
) -> Conditions:
    return in_range(index, size, -size)


def _gather_shard(
    x: Tensor, dim: int, index: Tensor, pieces: indexing.Pieces, size: int
) -> Conditions:
    return in_range(index, size, -size)


def _write_shard(
    kind: str,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: object,
    pieces: object,
    size: int,
    *_: Any,
) -> Conditions:
    return in_range(index, size, -size)


def _ce_loss(stats: Tensor, target: Tensor, ignore_index: int, num_classes: int = -1) -> Conditions:
    if num_classes < 0:
        return []
    return [(target, Target(size=num_classes, ignored=ignore_index, num=target.numel()))]


def _grouped(a: Tensor, b: Tensor, offsets: Tensor | None, *_: object) -> Conditions:
    return [] if offsets is None else [(offsets, grouped_matmul.ends_of(a, b, offsets))]


def _checked(x: Tensor, ok: Tensor, message: str) -> Conditions:
    return [(ok, Valid(message=message, num=ok.numel()))]


def _linalg_checked(x: Tensor, info: Tensor, api_name: str, is_matrix: bool) -> Conditions:
    return [(info, Solved(name=api_name, is_matrix=is_matrix, num=info.numel()))]
