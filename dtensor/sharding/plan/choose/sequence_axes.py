"""Strategies of attention ops on an axis that splits the sequence.

    heads     q, k, v  "b h t@cp d" -> "b h@cp t d"     all_to_all before and after attention
    gather    q stays split, k and v are gathered       gradients of k and v are reduce-scattered
    ring      q, k and v stay split                     chunks of k and v pass from rank to rank

An axis splits the sequence of an attention op if pins split the tokens of its queries or keys and
split no heads there: pins of heads, such as an annotation, are a statement of their own. The word
of ``attention=`` then replaces the op's strategies by one. A mask tensor depends on queries and
keys, so the ring gathers keys instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import Meta, OpCall, Operand
from dtensor.sharding.plan.choose.axis_problem import AxisProblem
from dtensor.sharding.plan.choose.opened_factors import closure_of
from dtensor.sharding.plan.choose.split_through_op import through
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.sequence import HEADS, TOKENS
from dtensor.sharding.plan.steps import unused
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Placement, Shard, on_dim, refine

_aten: Any = torch.ops.aten
Governed = Mapping[str, Shard]
"""Op name -> the split of the tokens, for the attention ops whose sequence an axis splits."""


def may_split_sequence(request: Request, flow: Dataflow) -> bool:
    """Return whether the program has attention, and an argument or annotation that may split
    tokens. This is cheaper than `sequence_axes`."""
    attention = [op for op in flow.ops if is_attention(op)]
    if not attention:
        return False
    stated = {item.name for item in flow.inputs if item.kind not in ("parameter", "buffer")}
    placements = [(v, p) for v, each in request.pins.items() for p in each.values()]
    placements += [(v, p) for v, spec in request.held.items() for p in spec.placements]
    return any(
        v in stated and _may_split_tokens(p, flow.metas[v].shape, attention) for v, p in placements
    ) or any(op.call.name == "dt.annotate.default" for op in flow.ops)


def _may_split_tokens(placement: Placement, shape: Sequence[int], attention: Sequence[Op]) -> bool:
    """Return whether the placement may split tokens. Dim 0 is the batch, unless its size is the
    number of queries or keys."""
    if not isinstance(placement, Shard):
        return False
    return placement.dim != 0 or any(
        shape[0] == meta.shape[TOKENS]
        for op in attention
        for meta in op.call.operands[first_query(op) :][:2]
    )


def sequence_axes(axis_problem: AxisProblem) -> dict[str, Governed]:
    """Return the axes that split a sequence, with the attention ops concerned."""
    attention = [op for op in axis_problem.flow.ops if is_attention(op)]
    axes: dict[str, Governed] = {}
    for axis in axis_problem.mesh.axes if attention else ():
        if axis == MICROBATCH_AXIS or axis_problem.mesh.axis_size(axis) == 1:
            continue
        if governed := _governed(axis_problem, axis, attention):
            axes[axis] = governed
    return axes


def is_attention(op: Op) -> bool:
    """Return whether the op is attention of queries and keys, not of a cache that is split."""
    return op.call.name.startswith("dt.attention")


def first_query(op: Op | OpCall) -> int:
    """Return the index of the queries among the operands; keys and values follow."""
    call = op.call if isinstance(op, Op) else op
    return 1 if "backward" in call.name else 0


def _governed(axis_problem: AxisProblem, axis: str, attention: Sequence[Op]) -> Governed:
    """Return the attention ops whose queries or keys arrive with split tokens on the axis."""
    pins, metas = axis_problem.pins_on(axis).values(), axis_problem.flow.metas
    if not any(_may_split_tokens(p.placement, metas[p.value].shape, attention) for p in pins):
        return {}
    num = axis_problem.mesh.axis_size(axis)
    shardings = closure_of(axis_problem.flow, axis_problem.rules, list(pins), num)
    governed: dict[str, Shard] = {}
    for op in attention:
        q = first_query(op)
        queries, keys = (shardings.get(name, ()) for name in op.operands[q : q + 2])
        is_one = op.call.operands[q].shape[TOKENS] == 1  # one query cannot be split
        if is_one or any(shard.dim == HEADS for shard in (*queries, *keys)):
            continue
        tokens = [shard for shard in queries if shard.dim == TOKENS]
        if not tokens and any(shard.dim == TOKENS for shard in keys):
            tokens = [Shard(TOKENS)]
        if tokens:
            governed[op.name] = tokens[0]
    return governed


def attention_strategy(
    op: Op, rule: Rule, word: str, shard: Shard, num: int, heads: Sequence[tuple[Shard, int]]
) -> Strategy:
    """Return the strategy of an attention op on an axis of ``num`` ranks.

    ``shard``: the split of its tokens; ``heads``: (placement, axis size) of the earlier axes that
    split its heads. Raises PlanningError if the word does not apply to the op.
    """
    q = first_query(op)
    num_queries, num_keys = (meta.shape[TOKENS] for meta in op.call.operands[q : q + 2])
    if word == "heads":
        num_heads = op.call.operands[q].shape[HEADS]
        _check_heads(op, num_heads, num, math.prod(n for _, n in heads))
        shard = refine(Shard(HEADS), heads, num_heads)
    elif word == "ring" and has_parts(op.call):
        if num_queries != num_keys:
            raise PlanningError(
                f"a ring needs as many keys as queries; there are {num_queries} queries and "
                f'{num_keys} keys.{_line(op)}\nfix: attention={{...: "gather"}}'
            )
        return _ring(op, rule, shard)
    strategy = through(rule, q, shard, num)
    if not isinstance(strategy, Strategy):
        raise PlanningError(
            f"{op.call.name} cannot be split by {shard!r} over {num} ranks.{_line(op)}\n"
            f"fix: split the batch or the heads over the axis instead"
        )
    return strategy


def has_parts(call: OpCall) -> bool:
    """Return whether a ring can compute the op chunk by chunk: it has no mask tensor."""
    return call.name in ("dt.attention.default", "dt.attention_backward.default")


def _check_heads(op: Op, num_heads: int, num: int, split: int) -> None:
    """Raise PlanningError if ``num`` ranks do not divide the heads of a rank, of which other axes
    split the heads ``split`` ways."""
    if num_heads % (num * split) == 0:
        return
    local = num_heads // split
    best = max(n for n in range(1, local + 1) if local % n == 0 and n <= num)
    other = f" that the other axes leave a rank of {num_heads}" if split > 1 else ""
    proposal = f"an axis of {best} ranks" if best > 1 else 'attention={...: "gather"}'
    rest = num // best if best > 1 and num % best == 0 else 0
    two = f', or two axes of {best} and {rest} ranks with "heads" and "ring"' if rest > 1 else ""
    raise PlanningError(
        f'attention="heads" splits the heads over {num} ranks, which do not divide the {local} '
        f"heads{other}.{_line(op)}\nfix: {proposal}{two}"
    )


def _line(op: Op) -> str:
    return f"\n  {op.source}: {op.source_text}" if op.source else ""


def _ring(op: Op, rule: Rule, shard: Shard) -> Strategy:
    """Return the strategy in which queries and keys are split alike: each tensor is split on its
    dim of tokens."""

    def placed(dims: Sequence[object]) -> Placement:
        tokens = [i for i, dim in enumerate(dims) if dim in (((("t",)),), (("s",),))]
        return on_dim(shard, tokens[0]) if tokens else REPLICATE

    operands, results = ([placed(dims) for dims in all_] for all_ in (rule.operands, rule.results))
    return Strategy(tuple(operands), tuple(results), "ring", ("t",))


# -- repeated heads of keys ------------------------------------------------------------------------


def with_repeated_keys(
    axis_problem: AxisProblem, sequence: Mapping[str, Governed], words: Mapping[str, str]
) -> Dataflow:
    """Return the program in which keys and values with fewer heads than ranks are repeated before
    attention, once for each rank that shares them, so that "heads" can split them.

    The gradients of the repeated heads are added after the backward. If the number of ranks is not
    a multiple of the number of key heads, nothing is repeated, and keys are gathered.
    """
    flow = axis_problem.flow
    repeats = _repeats(axis_problem, sequence, words)
    if not repeats:
        return flow
    used = {*flow.metas, *(op.name for op in flow.ops)}
    repeated: dict[tuple[str, int], str] = {}  # (value, heads) -> the repeated value
    ops: list[Op] = []
    for op in flow.ops:
        if op.name not in repeats:
            ops.append(op)
            continue
        num_heads, q = repeats[op.name], first_query(op)
        operands, metas = list(op.operands), list(op.call.operands)
        for at in (q + 1, q + 2):
            key = operands[at], num_heads
            if key not in repeated:
                new_ops = list(_repeat(op, operands[at], metas[at], num_heads, used))
                repeated[key] = new_ops[-1].results[0] or ""
                ops += new_ops
            operands[at], metas[at] = repeated[key], _with_heads(metas[at], num_heads)
        call = replace(op.call, operands=tuple(metas))
        if q == 0:
            ops.append(replace(op, operands=tuple(operands), call=call))
            continue
        names, results = list(op.results), list(call.results)
        sums: list[Op] = []
        for at in (1, 2):
            meta, name = results[at], names[at]
            if meta is None or name is None:
                continue
            names[at] = unused(f"{name}_repeated", used)
            results[at] = _with_heads(meta, num_heads)
            sums += _sum_repeats(op, names[at] or "", name, meta, num_heads, used)
        call = replace(call, results=tuple(results))
        ops.append(replace(op, operands=tuple(operands), results=tuple(names), call=call))
        ops += sums
    return replace(flow, ops=tuple(ops))


def _repeats(
    axis_problem: AxisProblem, sequence: Mapping[str, Governed], words: Mapping[str, str]
) -> dict[str, int]:
    """Return op name -> the number of key heads that "heads" needs, where it exceeds the op's."""
    by_heads = [axis for axis in sequence if words.get(axis) == "heads"]
    if not by_heads:
        return {}
    split: dict[str, int] = {}  # op -> over how many ranks its heads are split
    for axis in axis_problem.mesh.axes:
        num = axis_problem.mesh.axis_size(axis)
        if axis in by_heads:
            split |= {name: split.get(name, 1) * num for name in sequence[axis]}
        elif axis not in sequence and axis != MICROBATCH_AXIS and num > 1:
            pins = list(axis_problem.pins_on(axis).values())
            shardings = closure_of(axis_problem.flow, axis_problem.rules, pins, num)
            for op in axis_problem.flow.ops:
                if is_attention(op):
                    queries = shardings.get(op.operands[first_query(op)], ())
                    if any(shard.dim == HEADS for shard in queries):
                        split[op.name] = split.get(op.name, 1) * num
    governed = {name for axis in by_heads for name in sequence[axis]}
    repeats: dict[str, int] = {}
    for op in axis_problem.flow.ops:
        if op.name in governed:
            q, ranks = first_query(op), split[op.name]
            heads, groups = (op.call.operands[i].shape[HEADS] for i in (q, q + 1))
            if groups % ranks and ranks % groups == 0 and heads % ranks == 0:
                repeats[op.name] = ranks
    return repeats


def _with_heads(meta: Meta, num_heads: int) -> Meta:
    return Meta((meta.shape[0], num_heads, *meta.shape[2:]), meta.dtype)


def _repeat(op: Op, value: str, meta: Meta, num_heads: int, used: set[str]) -> Iterator[Op]:
    """Yield the ops that repeat each head of k or v [b g s d]: [b (g r) s d]."""
    b, g, s, d = meta.shape
    shapes = ((b, g, 1, s, d), (b, g, num_heads // g, s, d), (b, num_heads, s, d))
    yield from _chain(
        op,
        value,
        meta,
        [
            (_aten.unsqueeze.default, (2,), shapes[0]),
            (_aten.expand.default, (list(shapes[1]),), shapes[1]),
            (_aten.reshape.default, (list(shapes[2]),), shapes[2]),
        ],
        used,
    )


def _sum_repeats(
    op: Op, value: str, result: str, meta: Meta, num_heads: int, used: set[str]
) -> list[Op]:
    """Return the ops that add the gradients of repeated heads: [b (g r) s d] -> [b g s d]."""
    b, g, s, d = meta.shape
    split = (b, g, num_heads // g, s, d)
    calls: list[tuple[Any, tuple[object, ...], tuple[int, ...]]] = [
        (_aten.reshape.default, (list(split),), split),
        (_aten.sum.dim_IntList, ([2],), (b, g, s, d)),
    ]
    *others, last = _chain(op, value, _with_heads(meta, num_heads), calls, used)
    return [*others, replace(last, name=result, results=(result,))]


def _chain(
    op: Op,
    value: str,
    meta: Meta,
    calls: Sequence[tuple[Any, tuple[object, ...], tuple[int, ...]]],
    used: set[str],
) -> Iterator[Op]:
    """Yield ops of one operand and one result, each of which reads the result of the op before."""
    for target, args, shape in calls:
        name = unused(f"{value}_{str(target).split('.')[1]}", used)
        result = Meta(shape, meta.dtype)
        call = OpCall(
            target=target,
            args=(Operand(0), *args),
            operands=(meta,),
            results=(result,),
        )
        yield replace(op, name=name, call=call, operands=(value,), results=(name,), expand=None)
        value, meta = name, result
