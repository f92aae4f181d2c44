"""Finds the values that are rows of experts, and the route of each.

    rows, route = dt.to_experts(x, ids, 8)      rows, and silu(rows @ w): of the route of ids
    routes(flow, rules)["rows"]                 "counts", the value with its numbers of rows

Rows of one route are in one order. An op on rows must treat each row alone, or by its expert, so
that rows can be split by token and by expert. Raises PlanningError for other ops, and for an op on
rows of two routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import Local, Operand, RowsError, is_random
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, Transfer
from dtensor.sharding.rules.rule import Dim, Rule
from dtensor.sharding.spec.placements import cuts_experts

ROUTE = "dt.route.default"
_FIX = (
    "fix: write it with ops that treat each row alone (products over the last dim, activations, "
    "norms), dt.expert_linear and dt.from_experts"
)


def routes(flow: Dataflow, rules: Mapping[str, Rule]) -> dict[str, str]:
    """Return rows -> the value that counts the rows of each expert of their route."""
    return {name: counts for name, (counts, _) in _rows_of(flow, rules).items()}


def size_fills(flow: Dataflow, rules: Mapping[str, Rule]) -> Dataflow:
    """Return the program with a fill that an op reads together with rows, such as the zeros of a
    gradient, made from these rows: the number of rows that a rank holds is data."""
    found = _rows_of(flow, rules)
    fills = {
        name: op
        for op in flow.ops
        if op.call.name == "aten.full.default" and op.call.result.shape
        for name in op.results
        if name is not None
    }
    if not (found and fills):
        return flow
    ops: list[Op] = []
    for op in flow.ops:
        dims, operands = rules[op.name].operands, list(op.operands)
        rows = next((i for i, name in enumerate(operands) if name in found), None)
        if rows is None:
            ops.append(op)
            continue
        factors = dims[rows][found[operands[rows]][1]]
        for i, name in enumerate(op.operands):
            if name in fills and factors in dims[i]:
                sized = _sized_fill(fills[name], op, i, op.operands[rows], flow)
                operands[i] = sized.name
                ops.append(sized)
        ops.append(op if tuple(operands) == op.operands else replace(op, operands=tuple(operands)))
    return replace(flow, ops=tuple(ops)).pruned(flow.outputs)


def _sized_fill(fill: Op, reader: Op, index: int, rows: str, flow: Dataflow) -> Op:
    """Return an op that makes the fill from ``rows``, for one operand of ``reader``."""
    name = f"{fill.name}_of_{reader.name}_{index}"
    sizes, value, *_ = fill.call.args
    call = replace(
        fill.call,
        target=torch.ops.aten.new_full.default,
        args=(Operand(0), sizes, value),
        operands=(flow.metas[rows],),
    )
    return replace(
        reader,
        name=name,
        call=call,
        operands=(rows,),
        results=(name,),
        expand=None,
        over_batch=False,
        copy_of=None,
    )


def _rows_of(flow: Dataflow, rules: Mapping[str, Rule]) -> dict[str, tuple[str, int]]:
    """Return rows -> the value that counts the rows of each expert of their route, and the dim of
    the rows."""
    found: dict[str, tuple[str, int]] = {}
    for op in flow.ops:
        rule = rules[op.name]
        if op.call.name == ROUTE:
            counts, *rows = op.results
            found.update((name, (counts or "", 0)) for name in rows if name is not None)
            continue
        operands = [(found[name], i) for i, name in enumerate(op.operands) if name in found]
        if not operands:
            continue
        of = {counts for (counts, _), _ in operands}
        if len(of) > 1:
            fix = "fix: combine each with dt.from_experts first, and add the tokens"
            raise _error(op, "reads rows of two routes, whose orders differ", fix)
        for name, dim in _rows_of_results(op, rule, [(i, dim) for (_, dim), i in operands]):
            found[name] = of.copy().pop(), dim
    return found


def check_orders(steps: Sequence[Step]) -> None:
    """Check that rows return over the axis over which they were sent last, and that an op reads
    rows that were sent over the same axes in the same order, on one stage. Raises PlanningError if
    not."""
    sent_over: dict[str, tuple[str, ...]] = {}  # rows -> the axes over which they were sent
    for step in steps:
        match step:
            case Transfer() if step.spec.ragged is not None:
                raise PlanningError(
                    f"a stage ends inside an expert layer: the rows {step.operand} are read on "
                    f"stage {step.to_stage}.\n"
                    + (f"  {step.source}\n" if step.source else "")
                    + "fix: put the router and the experts of a layer on one stage"
                )
            case Compute():
                _check_local(step)
                ragged = [n for _, n, s in step.reads_as() if s.ragged is not None]
                orders = {sent_over.get(n, ()) for n in ragged}
                if len(orders) > 1:
                    raise _order_error(step.source, step.reads[0], *orders)
                if orders:
                    sent_over.update(dict.fromkeys(step.gives, orders.pop()))
            case Redistribute() if step.counts:
                (move,), axes = step.moves, sent_over.get(step.operands[0], ())
                if cuts_experts(move.dst.placement(move.axis)):
                    sent_over[step.name] = (*axes, move.axis)
                elif axes[-1:] == (move.axis,):
                    sent_over[step.name] = axes[:-1]
                else:
                    raise _order_error(step.source, step.operands[0], axes, (move.axis,))
            case Redistribute() if len(step.operands) == len(step.results) == 1:
                sent_over[step.name] = sent_over.get(step.operands[0], ())
            case _:
                pass


def _check_local(step: Compute) -> None:
    """Raise PlanningError if the local op depends on the number or the positions of its rows."""
    specs = (*step.operand_specs, *step.result_specs)
    ragged = [spec for spec in specs if spec is not None and spec.ragged is not None]
    if not ragged:
        return
    start = dict.fromkeys(ragged[0].mesh.axes, 0)
    try:
        step.rule.local_call(step.op.call, Local(step.operand_specs, step.result_specs, start))
    except RowsError as error:
        fix = _FIX
        if is_random(step.op.call) or "dropout" in step.op.call.name:
            fix = "fix: apply it to the tokens, before dt.to_experts or after dt.from_experts"
        elif not step.operands:
            fix = "fix: derive it from the rows, as in rows * 0 + 1, or use a number"
        raise _error(step.op, f"cannot run on a part of the rows: {error}", fix) from None


def _order_error(source: str, value: str, *orders: tuple[str, ...]) -> PlanningError:
    names = " and ".join(sorted(" then ".join(axes) or "no axis" for axes in orders))
    return PlanningError(
        f"the rows {value} are exchanged between tokens and experts over {names}.\n"
        + (f"  {source}\n" if source else "")
        + "fix: split the weights of all products of these experts over the same axes"
    )


def _rows_of_results(op: Op, rule: Rule, operands: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """Return (result, its dim of rows) for each result that has rows; ``operands``: the indices of
    the operands with rows, and their dims. Raises PlanningError if the op mixes rows."""
    dims = [rule.operands[i][dim] for i, dim in operands]
    ragged = [rule.is_ragged(dim) for dim in dims]
    factors = {f for dim in dims for f in _factors(rule, dim)}
    if not any(ragged):
        alone = all(len(dim) == 1 for dim in dims) and len(factors) == 1
        if not alone and any(rule.dim_size(dim) > 1 for dim in dims):
            raise _error(op, "does not treat each row alone", _FIX)
        if not factors.isdisjoint(rule.whole):
            raise _error(op, "mixes rows", _FIX)
    result: list[tuple[str, int]] = []
    for name, meta, result_dims in zip(op.results, op.call.results, rule.results, strict=True):
        if name is None or meta is None:
            continue
        at = [
            i
            for i, dim in enumerate(result_dims)
            if rule.is_ragged(dim) or dim in dims or (factors and _factors(rule, dim) == factors)
        ]
        if at:
            result.append((name, at[0]))
        elif not any(ragged) and op.phase == "forward":
            raise _error(op, "reduces over rows", _FIX)
    return result


def _factors(rule: Rule, dim: Dim) -> set[str]:
    return {f for product in dim for f in product if rule.size[f] > 1}


def _error(op: Op, what: str, fix: str) -> PlanningError:
    """Return the error for an op on the rows of `to_experts`."""
    lines = [f"{op.call.name} {what}, but rows of experts are split by token or by expert."]
    lines += [f"  {op.source}: {op.source_text}"] if op.source else []
    return PlanningError("\n".join([*lines, fix]))
