"""The dtype of sums: those of narrow floats (bf16, f16) are kept in float32, without extra bytes
sent.

    local product           bf16[64,64]{sum@dp}     torch's kernel, rounded to 16 bits
    reduce_scatter over dp  f32[64@dp,64]           16 bits sent, folded in float32, left there

A rank's part of a product that placements split is the result of its kernel: float32 inside,
rounded to 16 bits at the end, and sent in 16 bits. Every reduction folds those parts in float32. An
activation is then rounded to its dtype, once; so is a result. A gradient that is reduced, or summed
over microbatches, stays in float32 until the optimizer reads it: parts are exact in float32, so
sending them in 16 bits gives the bits that sending them in 32 would. For the same reason the cast
that ends a gradient under autocast (bf16, of a float32 parameter) is left to its reduction.

    local mean              f32[4]{sum@dp}          of bf16[64@dp,4]
    all_reduce over dp      bf16[4]                 32 bits sent, folded in float32, rounded

Reductions (sums, means, norms, losses) make few numbers of many: a rank's part of them stays in
float32, and so do values linear in it, until it is summed (`left_in_float32`). One device rounds
such a sum once, and so do ranks. The exception is a part that an op with 16-bit operands reads.

Master weights: parameters of 16 bits, which programs read and ranks gather, and a float32 copy with
the optimizer's state, which the optimizer updates; after each step a parameter is its copy, rounded
(Micikevicius et al. 2018, arXiv:1710.03740; Megatron's main parameters).

Not here: autocast, which is the program's own (frontend/capture/autocast.py); the fold
(daft/run/transport.py).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.numerics import is_narrow
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.placements import PARTIAL, Partial
from dtensor.sharding.spec.spec import TensorSpec

Chosen = Sequence[Mapping[str, Strategy]]
"""By axis, the strategy of each op."""


def accumulated(spec: TensorSpec) -> TensorSpec:
    """The spec of a sum of such values."""
    return replace(spec, dtype=torch.float32) if is_narrow(spec.dtype) else spec


def uncast(flow: Dataflow, rules: Mapping[str, Rule]) -> Dataflow:
    """The program without the casts from 16 bits to float32 that end its gradients.

    The reduction makes the cast, or the optimizer if there is none.
    """
    renamed: dict[str, str] = {}  # operand of a cast to the gradient that it makes
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
    """Whether the op is such a cast, and its operand and result have no other readers."""
    if rules[op.name].kind != "cast" or len(op.operands) != 1:
        return False
    (operand,), (result,) = op.operands, op.results
    meta = op.call.results[0]
    read = [o.value for o in flow.outputs].count
    return (
        result is not None
        and meta is not None
        and meta.dtype == torch.float32
        and is_narrow(op.call.operands[0].dtype)
        and operand in flow.producers
        and len(flow.consumers[operand]) == 1
        and result not in flow.consumers
        and (read(result), read(operand)) == (1, 0)
    )


def widened(path: Sequence[Move]) -> tuple[Move, ...]:
    """The path, with its first reduction, and all later moves, in float32."""
    moves: list[Move] = []
    for move in path:
        src = moves[-1].dst if moves else move.src
        dst = replace(move.dst, dtype=src.dtype)
        before = src.placement(move.axis)
        if move.reduces and before == Partial("sum"):
            dst = accumulated(dst)
        moves.append(replace(move, src=src, dst=dst))
    return tuple(moves)


def rounded(path: Sequence[Move], dtype: torch.dtype) -> tuple[Move, ...]:
    """The path of a value of ``dtype`` whose parts are float32: it has its dtype once it is no
    longer a sum of parts."""
    moves: list[Move] = []
    for move in path:
        src = moves[-1].dst if moves else move.src
        dst = replace(move.dst, dtype=src.dtype if is_part(move.dst) else dtype)
        moves.append(replace(move, src=src, dst=dst))
    return tuple(moves)


def is_part(spec: TensorSpec) -> bool:
    """Whether each rank has its part of a sum."""
    return PARTIAL in spec.placements


def left_in_float32(
    flow: Dataflow, rules: Mapping[str, Rule], chosen: Chosen, whole: Container[str]
) -> frozenset[str]:
    """The 16-bit values whose parts are made in float32, if all readers of such parts can take
    them.

    ``whole``: those whose parts are read with their own dtype when the program ends.
    """
    candidates: dict[str, Op] = {}
    for op in flow.ops:
        makes = rules[op.name].parts is not None or rules[op.name].kind == "view"
        (value, *more), metas = op.results, op.call.results
        if not makes or more or value is None or value in whole or metas[0] is None:
            continue
        if is_narrow(metas[0].dtype) and _pending_in(chosen, op, len(op.operands)):
            carries = not callable(rules[op.name].parts)
            if not carries or any(
                name in candidates and _pending_in(chosen, op, at)
                for at, name in enumerate(op.operands)
            ):
                candidates[value] = op
    kept = {v: op for v, op in candidates.items() if _all_take(flow, rules, chosen, v, candidates)}
    while len(kept) < len(candidates):  # a value that one op cannot pass on is not given to another
        candidates = {v: op for v, op in kept.items() if _is_given(rules, op, kept)}
        kept = {
            v: op for v, op in candidates.items() if _all_take(flow, rules, chosen, v, candidates)
        }
    return frozenset(kept)


def _all_take(
    flow: Dataflow,
    rules: Mapping[str, Rule],
    chosen: Chosen,
    value: str,
    candidates: Container[str],
) -> bool:
    """Whether each op that reads parts of the value takes them in float32 and passes them on so."""
    for op, at in flow.consumers.get(value, ()):
        if _pending_in(chosen, op, at):
            rule, meta = rules[op.name], op.call.results[0]
            takes = rule.parts is not None or rule.kind == "view"
            narrow = meta is not None and is_narrow(meta.dtype)
            if not takes or (narrow and (op.results[0] or "") not in candidates):
                return False
    return True


def _is_given(rules: Mapping[str, Rule], op: Op, candidates: Container[str]) -> bool:
    return callable(rules[op.name].parts) or any(name in candidates for name in op.operands)


def _pending_in(chosen: Chosen, op: Op, at: int) -> bool:
    """Whether some axis has this tensor of an op, operands first, as parts of a sum."""
    for strategies in chosen:
        strategy = strategies[op.name]
        if (*strategy.operands, *strategy.results)[at] == PARTIAL:
            return True
    return False
