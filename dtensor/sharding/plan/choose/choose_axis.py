"""Chooses a strategy for each op and a placement for each input on one axis, exactly (solve.py).

    choice = choose_axis(axis_problem, "tp", earlier=[choice_on_dp])
    choice.strategies["h"]     # Strategy(operands=(Replicate, Shard(1)), results=(Shard(1),))
    choice.inputs["w1"]        # Shard(0)

The options come from the rules and the pins, the prices from the topology, given the choices on
earlier axes. On the virtual microbatch axis nothing may be communicated: a value that depends on
both parameters and the batch must be split or pending there, while a value that depends only on the
batch (the number of targets) may be computed once for all microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.choose.axis_problem import AxisChoice, AxisProblem
from dtensor.sharding.plan.choose.infeasible import infeasible
from dtensor.sharding.plan.choose.opened_factors import Reach, reach
from dtensor.sharding.plan.choose.sequence_axes import (
    Governed,
    attention_strategy,
    first_query,
)
from dtensor.sharding.plan.choose.solve import Infeasible, Node, Option, Solution, ValueAt, solve
from dtensor.sharding.plan.dataflow import Dataflow, Input, Op, without_numbers
from dtensor.sharding.plan.request import Pin
from dtensor.sharding.plan.sequence import HEADS
from dtensor.sharding.redistribute.moves import move_kind, seconds
from dtensor.sharding.rules.rule import Strategy, fullest_rank
from dtensor.sharding.spec.fits import splits_rows
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    index_sets,
    same,
    simplest,
)
from dtensor.sharding.spec.spec import TensorSpec

GovernedBy = tuple[str, Governed]
"""A word of ``attention=``, and the attention ops that it governs on an axis."""
_PENDING_SECONDS = 20e-9
"""Seconds added for each op that reads a pending sum, so that a sum is reduced early if that costs
the same."""


def choose_axis(
    axis_problem: AxisProblem,
    axis: str,
    earlier: Sequence[AxisChoice],
    governed: GovernedBy | None = None,
) -> AxisChoice:
    """Return the cheapest choice on ``axis``, given the choices on ``earlier`` axes. ``governed``:
    the strategy word of an axis that splits a sequence, and its attention ops. Raises PlanningError
    if no choice connects the program, or if the word does not apply to an op."""
    num = axis_problem.mesh.axis_size(axis)
    flow = axis_problem.flow
    pins = axis_problem.pins_on(axis)
    reached = reach(
        flow,
        axis_problem.rules,
        list(pins.values()),
        axis,
        num,
        free=axis_problem.free and axis != MICROBATCH_AXIS,
        misaligned=axis_problem.misaligned,
        labels=axis_problem.labels(),
    )
    pins = {value: pin for value, pin in pins.items() if value not in reached.misaligned}
    if governed is not None:
        reached = _with_attention(axis_problem, reached, governed, axis, earlier)
    canonical = Canonical(flow, num)
    strategies = _allowed_strategies(axis_problem, reached, pins, axis, num)
    prices = Prices(axis_problem, axis, earlier)
    nodes = [_op_node(op, strategies[op.name], canonical, prices) for op in flow.ops]
    choices = {i.name: _input_choices(axis_problem, i, reached, pins, axis) for i in flow.inputs}
    for item in flow.inputs:
        nodes.append(
            _input_node(axis_problem, item, choices[item.name], reached, canonical, prices)
        )
    for output in flow.outputs:
        if output.kind == "result":
            stated = axis_problem.result_placements.get(axis, {}).get(output.value)
            name = f"result {output.of}"
            ends = prices.output_options(output.value, canonical(output.value, stated or REPLICATE))
            if stated is None and axis_problem.split_results and axis != MICROBATCH_AXIS:
                ends += [
                    ((output.value, placement), 0.0)
                    for placement in _written_placements(nodes, output.value)
                    if isinstance(placement, Shard)
                ]
            options = tuple(Option((read,), (), cost) for read, cost in ends)
            nodes.append(Node(name, options, name, "result"))
    if _is_followed(axis_problem.mesh, axis, earlier):
        prices.rows = frozenset(axis_problem.routes)
    try:
        solution = solve(nodes, prices.convert)
    except Infeasible:
        prices.rows = frozenset()
        try:
            solution = solve(nodes, prices.convert)
        except Infeasible:
            raise infeasible(flow, nodes, prices.convert, axis) from None
    nodes_by_name = {node.name: node for node in nodes}
    return AxisChoice(
        axis=axis,
        strategies={op.name: strategies[op.name][solution.chosen[op.name]] for op in flow.ops},
        inputs={
            i.name: _chosen_placement(nodes_by_name[f"input {i.name}"], solution, choices[i.name])
            for i in flow.inputs
        },
        opened=reached.opened,
        misaligned=reached.misaligned,
    )


def _is_followed(mesh: Mesh, axis: str, earlier: Sequence[AxisChoice]) -> bool:
    """Return whether a later axis of ranks may split rows by expert."""
    done = {axis, MICROBATCH_AXIS, *(choice.axis for choice in earlier)}
    return any(a not in done and mesh.axis_size(a) > 1 for a in mesh.axes)


# -- options -----------------------------------------------------------------------------------


def _with_attention(
    axis_problem: AxisProblem,
    reached: Reach,
    governed: GovernedBy,
    axis: str,
    earlier: Sequence[AxisChoice],
) -> Reach:
    """Return the closure in which each attention op of a split sequence has one strategy, which
    the word states."""
    word, ops = governed
    strategies = dict(reached.strategies)
    for op in axis_problem.flow.ops:
        if op.name in ops:
            q = first_query(op)
            placed = [(c.strategies[op.name].operands[q], c.axis) for c in earlier]
            heads = [
                (p, axis_problem.mesh.axis_size(a))
                for p, a in placed
                if isinstance(p, Shard) and p.dim == HEADS
            ]
            rule, num = axis_problem.rules[op.name], axis_problem.mesh.axis_size(axis)
            strategies[op.name] = (attention_strategy(op, rule, word, ops[op.name], num, heads),)
    return replace(reached, strategies=strategies)


def _allowed_strategies(
    axis_problem: AxisProblem, reached: Reach, pins: Mapping[str, Pin], axis: str, num: int
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies of each op that follow the pins.

    A placement is settled if it is determined before the solve; the settled placement of a pinned
    value is its pin. In program order, an op keeps the strategies that read most of its settled
    operands with their settled placements; if these strategies agree on a split of a result, the
    placement of the result is settled too. The exact solve decides the rest: where to reduce a
    pending sum, which operand to convert if settled operands disagree, and values that no pin
    reaches. With search="free", only pinned values are settled.
    """
    metas = axis_problem.flow.metas
    on_microbatches = axis == MICROBATCH_AXIS
    settled: dict[str, Placement] = {}
    if not on_microbatches:  # the solve decides where a pending input is reduced
        stated = {v: p.placement for v, p in pins.items()}
        settled = {v: p for v, p in stated.items() if not isinstance(p, Partial)}
    allowed: dict[str, tuple[Strategy, ...]] = {}
    for op in axis_problem.flow.ops:
        strategies = reached.strategies[op.name]
        if on_microbatches and any(name in axis_problem.on_batch_and_state for name in op.results):
            strategies = tuple(s for s in strategies if s.kind != "replicate")
        pin = pins.get(op.results[0] or "")
        if axis_problem.is_mark(op) and pin is not None:
            stated = pin.placement
            strategies = tuple(
                s for s in strategies if same(s.results[0], stated, op.call.operands[0].shape, num)
            ) or (Strategy((stated,), (stated,), "stated"),)
        operands = [(i, name) for i, name in enumerate(op.operands) if name in settled]
        if operands:
            strategies = _closest_to_settled(strategies, operands, settled, metas, num)
        if not on_microbatches and (
            not axis_problem.free or (axis_problem.is_view(op) and operands)
        ):
            for index, name in enumerate(op.results):
                if name is None or not strategies:
                    continue
                first = strategies[0].results[index]
                shape = metas[name].shape
                # rows of experts follow the experts and the tokens, whose placements are stated
                if (
                    isinstance(first, Shard)
                    and first.ragged is None
                    and all(same(s.results[index], first, shape, num) for s in strategies)
                ):
                    settled[name] = first
        if not on_microbatches and axis_problem.is_view(op):
            # another op may have gathered the operand already: the view can read that copy
            replicated = reached.strategies[op.name][:1]
            strategies = tuple(dict.fromkeys((*strategies, *replicated)))
        allowed[op.name] = strategies
    return allowed


def _closest_to_settled(
    strategies: Sequence[Strategy],
    operands: Sequence[tuple[int, str]],
    settled: Mapping[str, Placement],
    metas: Mapping[str, Meta],
    num: int,
) -> tuple[Strategy, ...]:
    """Return the strategies that read most settled operands with their settled placements: the
    placements that pins, or the ops before, determine.

    ``operands``: (index, value) of the settled operands. Strategies that agree with no settled
    split operand, but split an operand that is not settled, are returned too: that operand may
    already be split, like an input that is split over the axis of the weights. The solve decides by
    price which operand is converted.
    """
    agreements = [_count_agreements(s, operands, settled, metas, num) for s in strategies]
    best = max(agreements, default=(0, 0))
    indices = {index for index, _ in operands}
    return tuple(
        strategy
        for strategy, agreement in zip(strategies, agreements, strict=True)
        if agreement == best or (agreement[0] == 0 and _splits_another(strategy, indices))
    )


def _splits_another(strategy: Strategy, indices: Collection[int]) -> bool:
    """Return whether the strategy splits an operand whose index is not in ``indices``. Rows of
    experts do not count, because they can be exchanged."""
    operands = enumerate(strategy.operands)
    return any(isinstance(p, Shard) and not p.ragged for i, p in operands if i not in indices)


def _count_agreements(
    strategy: Strategy,
    operands: Sequence[tuple[int, str]],
    settled: Mapping[str, Placement],
    metas: Mapping[str, Meta],
    num: int,
) -> tuple[int, int]:
    """Return how many settled operands the strategy reads with their settled placement, as (number
    of split operands, number of replicated operands). Split operands come first in the comparison:
    slicing a replicated operand is free, gathering a split operand is not."""
    split = replicated = 0
    for index, name in operands:
        if same(strategy.operands[index], settled[name], metas[name].shape, num):
            split += isinstance(settled[name], Shard)
            replicated += not isinstance(settled[name], Shard)
    return split, replicated


def _op_node(op: Op, strategies: Sequence[Strategy], canonical: Canonical, prices: Prices) -> Node:
    """Return the node of an op: one option for each strategy."""
    options: list[Option] = []
    for strategy in strategies:
        reads = tuple(
            (name, canonical(name, p))
            for name, p in zip(op.operands, strategy.operands, strict=True)
        )
        writes = tuple(
            (name, canonical(name, p))
            for name, p in zip(op.results, strategy.results, strict=True)
            if name is not None
        )
        reads_pending = any(isinstance(p, Partial) for p in strategy.operands)
        seconds = prices.op_seconds(op, strategy) + (_PENDING_SECONDS if reads_pending else 0.0)
        options.append(Option(reads, writes, seconds))
    return Node(op.name, tuple(options), prices.axis_problem.layer_groups[op.name])


def _input_choices(
    axis_problem: AxisProblem, item: Input, reached: Reach, pins: Mapping[str, Pin], axis: str
) -> tuple[Placement, ...]:
    """Return the placements that an input may have: its pin; without a pin, Replicate and, for a
    parameter or buffer, the splits that other pins cause."""
    if axis == MICROBATCH_AXIS or item.name in reached.misaligned:
        return (REPLICATE,)
    if item.name in pins:
        return (pins[item.name].placement,)
    if item.kind in ("parameter", "buffer"):
        return (REPLICATE, *reached.shardings.get(item.name, ()))
    return (REPLICATE,)


def _input_node(
    axis_problem: AxisProblem,
    item: Input,
    choices: Sequence[Placement],
    reached: Reach,
    canonical: Canonical,
    prices: Prices,
) -> Node:
    """Return the node of an input. An option writes the input at one of its placements, and reads
    its gradients and new contents at the placement with which the input is stored."""
    options: list[Option] = []
    misaligned = reached.misaligned.get(item.name)
    for placement in choices:
        used_placement = canonical(item.name, placement)
        stored_placement = (
            used_placement if misaligned is None else canonical(item.name, misaligned.placement)
        )
        gradient_placement = PARTIAL if prices.axis == MICROBATCH_AXIS else stored_placement
        ends = [
            prices.output_options(g, canonical(g, gradient_placement))
            for g in axis_problem.gradients.get(item.name, ())
        ]
        if item.name in axis_problem.mutations:
            mutation = axis_problem.mutations[item.name]
            placements = (
                (used_placement, PARTIAL) if prices.axis == MICROBATCH_AXIS else (stored_placement,)
            )
            ends.append([((mutation, p), 0.0) for p in placements])
        for combination in itertools.product(*ends):
            reads = tuple(read for read, _ in combination)
            cost = sum(cost for _, cost in combination)
            options.append(Option(reads, ((item.name, used_placement),), cost))
    layer_key = (without_numbers(item.label), item.kind, item.meta, tuple(choices))
    return Node(
        f"input {item.name}",
        tuple(options),
        layer_key if item.kind == "parameter" else item.name,
        "input",
    )


def _written_placements(nodes: Sequence[Node], value: str) -> list[Placement]:
    """Return the placements at which some option of some node writes the value."""
    return list(
        dict.fromkeys(
            p for n in nodes for option in n.options for v, p in option.writes if v == value
        )
    )


def _chosen_placement(node: Node, solution: Solution, choices: Sequence[Placement]) -> Placement:
    """Return the placement of an input that the solution chose, as stated in ``choices``."""
    chosen_writes = node.options[solution.chosen[node.name]].writes
    writes = list(dict.fromkeys(option.writes for option in node.options))
    return choices[writes.index(chosen_writes)]


# -- prices ----------------------------------------------------------------------------------------


class Canonical:
    """Maps the placements that hold the same indices of a value to one representative."""

    def __init__(self, flow: Dataflow, num: int) -> None:
        self.flow: Dataflow = flow
        self.num: int = num
        self.representatives: dict[object, Placement] = {}

    def __call__(self, value: str, placement: Placement) -> Placement:
        """Return the representative of a placement of the value."""
        if not isinstance(placement, Shard):
            return placement
        shape = self.flow.metas[value].shape
        indices = index_sets(placement, shape[placement.dim], self.num)
        key = (placement.dim, placement.ragged, indices)
        return self.representatives.setdefault(key, simplest(placement, shape, self.num))


class Prices:
    """Seconds of conversions and ops on one axis, given the choices on earlier axes."""

    def __init__(self, axis_problem: AxisProblem, axis: str, earlier: Sequence[AxisChoice]) -> None:
        """``earlier``: the choices on the axes that were chosen before ``axis``."""
        self.axis_problem: AxisProblem = axis_problem
        self.axis: str = axis
        self.earlier: tuple[AxisChoice, ...] = tuple(earlier)
        # Rows of experts whose pending sums stay: rows that a later axis splits have no all_reduce.
        self.rows: frozenset[str] = frozenset()
        # (number of a group, src, dst) -> seconds. A group has the values with the same meta and
        # the same placements on earlier axes, which have the same prices.
        self.cache: dict[tuple[int, Placement, Placement], float] = {}
        self.groups: dict[str, tuple[int, dict[str, Placement]]] = {}  # value -> number, placements
        self.group_numbers: dict[object, int] = {}

    def earlier_placements(self, value: str) -> dict[str, Placement]:
        """Return earlier axis -> the placement with which the value is produced."""
        producer = self.axis_problem.flow.producers.get(value)
        if producer is None:
            return {c.axis: c.inputs[value] for c in self.earlier}
        index = producer.results.index(value)
        return {c.axis: c.strategies[producer.name].results[index] for c in self.earlier}

    def convert(self, value: str, src: Placement, dst: Placement) -> float:
        """Return the seconds of converting the value on the axis; infinity if impossible."""
        if self.axis == MICROBATCH_AXIS and not isinstance(src, type(REPLICATE)):
            return math.inf
        if move_kind(src, dst) is None:
            return math.inf
        if value in self.rows and isinstance(src, Partial) and src != dst:
            return math.inf
        meta = self.axis_problem.flow.metas[value]
        if value not in self.groups:
            placements = self.earlier_placements(value)
            group = (meta, tuple(placements.items()))
            number = self.group_numbers.setdefault(group, len(self.group_numbers))
            self.groups[value] = (number, placements)
        number, placements = self.groups[value]
        key = (number, src, dst)
        if key not in self.cache:
            self.cache[key] = self._seconds(meta.shape, meta.dtype, placements, src, dst)
        return self.cache[key]

    def _seconds(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: Mapping[str, Placement],
        src: Placement,
        dst: Placement,
    ) -> float:
        """Return the seconds of the moves from ``src`` to ``dst``; ``placements``: the value's
        placements on earlier axes."""
        mesh = self.axis_problem.mesh
        if splits_rows(len(shape), (src, dst, *placements.values())):
            placements = {}  # the moves change the other axes first

        def spec(placement: Placement) -> TensorSpec:
            by_axis = {**placements, self.axis: placement}
            return TensorSpec(
                shape, dtype, mesh, tuple(by_axis.get(a, REPLICATE) for a in mesh.axes)
            )

        pending = {p.op for p in (src, dst, *placements.values()) if isinstance(p, Partial)}
        if len(pending) > 1:  # a value cannot be pending with two reductions, as sum and max
            return math.inf
        return seconds(spec(src), spec(dst), self.axis_problem.topology)

    def output_options(self, value: str, target: Placement) -> list[tuple[ValueAt, float]]:
        """Return the ways to deliver an output, as (placed value to read, seconds): as wanted, or
        pending and reduced after the last microbatch. Reductions that share buckets cost bytes, but
        no latency each."""
        options: list[tuple[ValueAt, float]] = [((value, target), 0.0)]
        if isinstance(target, Partial) or self.axis == MICROBATCH_AXIS:
            return options
        topology = self.axis_problem.topology
        if self.axis_problem.bucketed:
            topology = replace(topology, latency=0.0)
        late_prices = Prices(replace(self.axis_problem, topology=topology), self.axis, self.earlier)
        times = self.axis_problem.mesh.shape.get(MICROBATCH_AXIS, 1)
        price = late_prices.convert(value, PARTIAL, target)
        if math.isfinite(price):  # infinite if an earlier axis leaves another reduction pending
            options.append(((value, PARTIAL), price / times))
        return options

    def op_seconds(self, op: Op, strategy: Strategy) -> float:
        """Return the roofline seconds of the op on the rank with the largest shards."""
        rule = self.axis_problem.rules[op.name]
        if rule.kind in ("view", "mark"):
            return 0.0
        mesh = self.axis_problem.mesh
        strategies = [(c.axis, c.strategies[op.name]) for c in self.earlier]
        strategies.append((self.axis, strategy))
        metas = (*op.call.operands, *op.call.results)
        work, fractions = fullest_rank(
            op.call, rule, [(s, mesh.axis_size(axis)) for axis, s in strategies]
        )
        bytes_moved = sum(
            math.prod(meta.shape) * meta.dtype.itemsize * fraction
            for meta, fraction in zip(metas, fractions, strict=True)
            if meta is not None
        )
        return self.axis_problem.topology.compute_seconds(
            flops=rule.flops * work, bytes_moved=bytes_moved, attention=rule.kind == "attention"
        )
