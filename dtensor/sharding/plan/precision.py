"""The dtypes of partial sums: sums of narrow floats (bf16, f16) over ranks are computed in float32.

    local product           bf16[64,64]{sum@dp}     each rank's kernel rounds its part to 16 bits
    reduce_scatter over dp  f32[64@dp,64]           sends 16 bits, adds in float32
    local mean              f32[4]{sum@dp}          of bf16[64@dp,4]: the part stays in float32
    all_reduce over dp      bf16[4]                 sends 32 bits, adds in float32, rounds once

A reduced activation is rounded to its dtype. A reduced gradient stays in float32 until the
optimizer reads it; the cast of a gradient to float32 is left to its reduction (`uncast`). A sum of
gradients over microbatches is float32, or, with accumulate="bf16", rounded after each addition.
Parts of reductions (sums, means, norms, losses) are small and stay in float32 (`left_in_float32`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.errors import PlanningError
from dtensor.numerics import is_narrow
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.placements import PARTIAL, Partial
from dtensor.sharding.spec.spec import TensorSpec

Chosen = Sequence[Mapping[str, Strategy]]
"""The strategies of ops by name, for each axis."""


def sum_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a sum of values with this spec: float32 if they are narrow floats."""
    return replace(spec, dtype=torch.float32) if is_narrow(spec.dtype) else spec


def gradient_sum_spec(spec: TensorSpec, accumulate: str, label: str) -> TensorSpec:
    """Return the spec of the sum over microbatches of a gradient of the parameter ``label``.
    ``accumulate``: "float32", or "bf16" to round the sum after each addition."""
    if accumulate == "float32":
        return sum_spec(spec)
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise PlanningError(
            f'accumulate="bf16" is for sums of gradients of at most 32 bits, and the gradient of '
            f"{label} is {spec}.\nfix: leave accumulate= out"
        )
    return replace(spec, dtype=torch.bfloat16)


def uncast(flow: Dataflow, rules: Mapping[str, Rule]) -> Dataflow:
    """Return the program without the final casts of gradients from 16 bits to float32.

    Autocast produces such casts. The reduction of the gradient makes the cast instead, or the
    optimizer if the gradient is not reduced. 16-bit parts are exact in float32, so the result is
    the same to the bit.
    """
    renamed: dict[str, str] = {}  # the operand of such a cast to the gradient that it makes
    for output in flow.outputs:
        op = flow.producers.get(output.value)
        if output.kind == "gradient" and op is not None and _ends_in_cast(flow, rules, op):
            renamed[op.operands[0]] = output.value
    ops = [
        replace(op, results=tuple(renamed.get(name or "", name) for name in op.results))
        for op in flow.ops
        if not any(operand in renamed for operand in op.operands)
    ]
    return replace(flow, ops=tuple(ops))


def _ends_in_cast(flow: Dataflow, rules: Mapping[str, Rule], op: Op) -> bool:
    """Return whether the op casts 16 bits to float32, its operand has no other reader, and its
    result is one output and nothing else."""
    if rules[op.name].kind != "cast" or len(op.operands) != 1:
        return False
    (operand,), (result,) = op.operands, op.results
    meta = op.call.results[0]
    num_outputs = [o.value for o in flow.outputs].count
    return (
        result is not None
        and meta is not None
        and meta.dtype == torch.float32
        and is_narrow(op.call.operands[0].dtype)
        and operand in flow.producers
        and len(flow.consumers[operand]) == 1
        and result not in flow.consumers
        and (num_outputs(result), num_outputs(operand)) == (1, 0)
    )


def reduce_in_float32(path: Sequence[Move]) -> tuple[Move, ...]:
    """Return the path of a sum of 16-bit values with its first reduction and all later moves in
    float32."""
    moves: list[Move] = []
    for move in path:
        src = moves[-1].dst if moves else move.src
        dst = replace(move.dst, dtype=src.dtype)
        before = src.placement(move.axis)
        if move.reduces and before == Partial("sum"):
            dst = sum_spec(dst)
        moves.append(replace(move, src=src, dst=dst))
    return tuple(moves)


def round_after_sum(path: Sequence[Move], dtype: torch.dtype) -> tuple[Move, ...]:
    """Return the path of a pending sum whose parts are float32: the move that completes the sum
    rounds it to ``dtype``."""
    moves: list[Move] = []
    for move in path:
        src = moves[-1].dst if moves else move.src
        dst = replace(move.dst, dtype=src.dtype if is_part(move.dst) else dtype)
        moves.append(replace(move, src=src, dst=dst))
    return tuple(moves)


def is_part(spec: TensorSpec) -> bool:
    """Return whether each rank has a part of a sum."""
    return PARTIAL in spec.placements


def left_in_float32(
    flow: Dataflow, rules: Mapping[str, Rule], chosen: Chosen, excluded: Container[str]
) -> frozenset[str]:
    """Return the 16-bit values whose parts are left in float32 until they are summed.

    An op makes such parts if its kernel can (``rule.parts`` is callable), or if it passes on parts
    that it reads. All readers of the parts must accept float32. ``excluded``: values that may still
    be partial when the program ends, so that their parts keep their dtype.
    """
    candidates: dict[str, Op] = {}
    for op in flow.ops:
        supported = rules[op.name].parts is not None or rules[op.name].kind == "view"
        (value, *other_results), metas = op.results, op.call.results
        if not supported or other_results or value is None or value in excluded or metas[0] is None:
            continue
        if is_narrow(metas[0].dtype) and _is_partial(chosen, op, len(op.operands)):
            passes_on = not callable(rules[op.name].parts)
            if not passes_on or any(
                name in candidates and _is_partial(chosen, op, at)
                for at, name in enumerate(op.operands)
            ):
                candidates[value] = op
    accepted = {
        v: op for v, op in candidates.items() if _all_accept(flow, rules, chosen, v, candidates)
    }
    while len(accepted) < len(candidates):  # removing a value may rule out its operands and readers
        candidates = {
            v: op for v, op in accepted.items() if _still_makes_parts(rules, op, accepted)
        }
        accepted = {
            v: op for v, op in candidates.items() if _all_accept(flow, rules, chosen, v, candidates)
        }
    return frozenset(accepted)


def _all_accept(
    flow: Dataflow,
    rules: Mapping[str, Rule],
    chosen: Chosen,
    value: str,
    candidates: Container[str],
) -> bool:
    """Return whether each op that reads parts of the value accepts float32 and passes float32
    on."""
    for op, at in flow.consumers.get(value, ()):
        if _is_partial(chosen, op, at):
            rule, meta = rules[op.name], op.call.results[0]
            supported = rule.parts is not None or rule.kind == "view"
            narrow = meta is not None and is_narrow(meta.dtype)
            if not supported or (narrow and (op.results[0] or "") not in candidates):
                return False
    return True


def _still_makes_parts(rules: Mapping[str, Rule], op: Op, candidates: Container[str]) -> bool:
    """Return whether the op makes float32 parts, or reads some of ``candidates``."""
    return callable(rules[op.name].parts) or any(name in candidates for name in op.operands)


def _is_partial(chosen: Chosen, op: Op, at: int) -> bool:
    """Return whether tensor ``at`` of the op (operands first, then results) is partial on some
    axis."""
    for strategies in chosen:
        strategy = strategies[op.name]
        if (*strategy.operands, *strategy.results)[at] == PARTIAL:
            return True
    return False
