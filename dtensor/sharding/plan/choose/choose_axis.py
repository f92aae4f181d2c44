"""Choosing the placements on one axis: options from the rules and pins, prices, the exact solve.

    chosen = choose_axis(request, rules, "tp", done={"dp": ...})
    chosen.strategies["h"]     # Strategy(operands=(Replicate, Shard(1)), results=(Shard(1),))
    chosen.inputs["w1"]        # Shard(0)

`Prices` gives seconds for converting a value and for running an op on the axis, given the axes that
are done; `Canonical` names one representative for all placements that hold the same indices.

The axes are solved one after another, each exactly (solve.py), given those before it. On the
virtual microbatch axis nothing may be communicated: a value that depends on parameters and on the
batch may only be split, pending, or be sliced; what depends on the batch alone (the count of
targets that are not ignored) may be computed whole, once. Nothing runs here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.choose.annotations import annotation_placements
from dtensor.sharding.plan.choose.axis_problem import AxisChoice, AxisProblem
from dtensor.sharding.plan.choose.infeasible import infeasible
from dtensor.sharding.plan.choose.opened_factors import Reach, reach
from dtensor.sharding.plan.choose.solve import At, Infeasible, Node, Option, Solution, solve
from dtensor.sharding.plan.dataflow import Dataflow, Input, Op, layer_group, without_numbers
from dtensor.sharding.plan.request import Pin
from dtensor.sharding.redistribute.moves import move_kind, seconds
from dtensor.sharding.rules.rule import Strategy, fullest_rank
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    index_sets,
    same,
    simplest,
    splits_rows,
)
from dtensor.sharding.spec.spec import TensorSpec

# Seconds charged for each op that a sum passes while pending: at equal cost, reduce at once.
_LATE = 20e-9


def choose_axis(axis_problem: AxisProblem, axis: str, done: Sequence[AxisChoice]) -> AxisChoice:
    """The cheapest choice on ``axis`` given the axes already ``done``."""
    num = axis_problem.mesh.axis_size(axis)
    flow = axis_problem.flow
    pins = _with_annotations(axis_problem, axis)
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
    canonical = Canonical(flow, num)
    strategies = _restrict(axis_problem, reached, pins, axis, num)
    priced = Prices(axis_problem, axis, done)
    nodes = [_op_node(op, strategies[op.name], canonical, priced) for op in flow.ops]
    choices = {i.name: _input_choices(axis_problem, i, reached, pins, axis) for i in flow.inputs}
    for item in flow.inputs:
        nodes.append(
            _input_node(axis_problem, item, choices[item.name], reached, canonical, priced)
        )
    for output in flow.outputs:
        if output.kind == "result":
            stated = axis_problem.wanted.get(axis, {}).get(output.value)
            name = f"result {output.of}"
            ends = priced.ends(output.value, canonical(output.value, stated or REPLICATE))
            if stated is None and axis_problem.split_results and axis != MICROBATCH_AXIS:
                ends += [
                    ((output.value, placed), 0.0)
                    for placed in _written_at(nodes, output.value)
                    if isinstance(placed, Shard)
                ]
            options = tuple(Option((read,), (), cost) for read, cost in ends)
            nodes.append(Node(name, options, name, "result"))
    try:
        solution = solve(nodes, priced.convert)
    except Infeasible:
        raise infeasible(flow, nodes, priced.convert, axis) from None
    nodes_by_name = {node.name: node for node in nodes}
    return AxisChoice(
        axis=axis,
        strategies={op.name: strategies[op.name][solution.chosen[op.name]] for op in flow.ops},
        inputs={
            i.name: _written(nodes_by_name[f"input {i.name}"], solution, choices[i.name])
            for i in flow.inputs
        },
        opened=reached.opened,
        misaligned=reached.misaligned,
    )


# -- options -----------------------------------------------------------------------------------


def _with_annotations(axis_problem: AxisProblem, axis: str) -> dict[str, Pin]:
    """The pins on the axis, those of annotations in the program included."""
    pins = dict(axis_problem.pins.get(axis, {}))
    for op in axis_problem.flow.ops:
        if axis_problem.is_mark(op):
            stated = annotation_placements(op, axis_problem.mesh)
            if axis in stated:
                assert op.results[0] is not None
                pins[op.results[0]] = Pin(
                    value=op.results[0],
                    placement=stated[axis],
                    by=f"annotate at {op.source}",
                    until_contraction=True,
                )
    return pins


def _restrict(
    axis_problem: AxisProblem, reached: Reach, pins: Mapping[str, Pin], axis: str, num: int
) -> dict[str, tuple[Strategy, ...]]:
    """Follow the pins: a value that is split stays split wherever a rule accepts it so.

    Each op keeps the strategies that read most of its settled operands as they are settled; where
    those agree on a split result, that is settled too. What is left open (where to resolve a
    pending sum, operands that disagree, what no pin reaches, which of two operands is gathered) is
    for the exact solve. With search="free" only what the user pinned is settled.
    """
    metas = axis_problem.flow.metas
    in_time = axis == MICROBATCH_AXIS
    settled: dict[str, Placement] = {}
    if not in_time:  # a pending input is an open matter, as a pending result is
        stated = {v: p.placement for v, p in pins.items()}
        settled = {v: p for v, p in stated.items() if not isinstance(p, Partial)}
    result: dict[str, tuple[Strategy, ...]] = {}
    for op in axis_problem.flow.ops:
        strategies = reached.strategies[op.name]
        if in_time and any(name in axis_problem.mixed for name in op.results):
            strategies = tuple(s for s in strategies if s.kind != "replicate")
        pin = pins.get(op.results[0] or "")
        if axis_problem.is_mark(op) and pin is not None:
            stated = pin.placement
            strategies = tuple(
                s for s in strategies if same(s.results[0], stated, op.call.operands[0].shape, num)
            ) or (Strategy((stated,), (stated,), "stated"),)
        known = [(i, name) for i, name in enumerate(op.operands) if name in settled]
        if known:
            strategies = _following(strategies, known, settled, metas, num)
        if not in_time and (not axis_problem.free or (axis_problem.is_view(op) and known)):
            for index, name in enumerate(op.results):
                if name is None or not strategies:
                    continue
                first = strategies[0].results[index]
                shape = metas[name].shape
                if isinstance(first, Shard) and all(
                    same(s.results[index], first, shape, num) for s in strategies
                ):
                    settled[name] = first
        if not in_time and axis_problem.is_view(op):
            # a copy that was gathered for others can be viewed too
            replicated = reached.strategies[op.name][:1]
            strategies = tuple(dict.fromkeys((*strategies, *replicated)))
        result[op.name] = strategies
    return result


def _following(
    strategies: Sequence[Strategy],
    known: Sequence[tuple[int, str]],
    settled: Mapping[str, Placement],
    metas: Mapping[str, Meta],
    num: int,
) -> tuple[Strategy, ...]:
    """Return the strategies that read most settled operands as they are settled. Return those too
    that read no settled split operand so, but split an operand that is not settled: it may come
    split, as an input that is split on the weights' axis does. The solve decides by price which
    operand is moved."""
    agreeing = [_agreement(s, known, settled, metas, num) for s in strategies]
    best = max(agreeing, default=(0, 0))
    indices = {index for index, _ in known}
    return tuple(
        strategy
        for strategy, agreement in zip(strategies, agreeing, strict=True)
        if agreement == best or (agreement[0] == 0 and _splits_another(strategy, indices))
    )


def _splits_another(strategy: Strategy, indices: Collection[int]) -> bool:
    """Whether an operand is read split whose index is not among ``indices``."""
    operands = enumerate(strategy.operands)
    return any(isinstance(p, Shard) for i, p in operands if i not in indices)


def _agreement(
    strategy: Strategy,
    known: Sequence[tuple[int, str]],
    settled: Mapping[str, Placement],
    metas: Mapping[str, Meta],
    num: int,
) -> tuple[int, int]:
    """How many settled operands a strategy reads as they are: split ones first, for to read a
    replicated one in parts is free, and a split one whole is not."""
    split = whole = 0
    for index, name in known:
        if same(strategy.operands[index], settled[name], metas[name].shape, num):
            split += isinstance(settled[name], Shard)
            whole += not isinstance(settled[name], Shard)
    return split, whole


def _op_node(op: Op, strategies: Sequence[Strategy], canonical: Canonical, priced: Prices) -> Node:
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
        late = _LATE if any(isinstance(p, Partial) for p in strategy.operands) else 0.0
        options.append(Option(reads, writes, priced.op(op, strategy) + late))
    return Node(op.name, tuple(options), layer_group(op, priced.axis_problem.flow))


def _input_choices(
    axis_problem: AxisProblem,
    item: Input,
    reached: Reach,
    pins: Mapping[str, Pin],
    axis: str,
) -> tuple[Placement, ...]:
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
    priced: Prices,
) -> Node:
    """An input is written at one of its placements; its gradients end at the same one, or as it is
    stored where its pin does not line up."""
    options: list[Option] = []
    pinned = reached.misaligned.get(item.name)
    for placement in choices:
        placed = canonical(item.name, placement)
        kept = placed if pinned is None else canonical(item.name, pinned.placement)
        wanted = PARTIAL if priced.axis == MICROBATCH_AXIS else kept
        ends = [
            priced.ends(g, canonical(g, wanted)) for g in axis_problem.gradients.get(item.name, ())
        ]
        if item.name in axis_problem.mutations:
            moved = axis_problem.mutations[item.name]
            in_time = (placed, PARTIAL) if priced.axis == MICROBATCH_AXIS else (kept,)
            ends.append([((moved, p), 0.0) for p in in_time])
        for combination in itertools.product(*ends):
            reads = tuple(read for read, _ in combination)
            cost = sum(cost for _, cost in combination)
            options.append(Option(reads, ((item.name, placed),), cost))
    alike = (without_numbers(item.label), item.kind, item.meta, tuple(choices))
    return Node(
        f"input {item.name}",
        tuple(options),
        alike if item.kind == "parameter" else item.name,
        "input",
    )


def _written_at(nodes: Sequence[Node], value: str) -> list[Placement]:
    """The placements at which some option of some node writes a value."""
    return list(
        dict.fromkeys(
            p for n in nodes for option in n.options for v, p in option.writes if v == value
        )
    )


def _written(node: Node, solution: Solution, choices: Sequence[Placement]) -> Placement:
    """The placement of an input as stated, from the option that was chosen."""
    written = node.options[solution.chosen[node.name]].writes
    places = list(dict.fromkeys(option.writes for option in node.options))
    return choices[places.index(written)]


# -- prices ----------------------------------------------------------------------------------------


class Canonical:
    """One representative for all placements that hold the same indices of a value."""

    def __init__(self, flow: Dataflow, num: int) -> None:
        self.flow: Dataflow = flow
        self.num: int = num
        self.found: dict[object, Placement] = {}

    def __call__(self, value: str, placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        shape = self.flow.metas[value].shape
        key = (placement.dim, index_sets(placement, shape[placement.dim], self.num))
        return self.found.setdefault(key, simplest(placement, shape, self.num))


class Prices:
    """Seconds of conversions and ops on one axis, given the placements on the axes done."""

    def __init__(self, axis_problem: AxisProblem, axis: str, done: Sequence[AxisChoice]) -> None:
        self.axis_problem: AxisProblem = axis_problem
        self.axis: str = axis
        self.done: tuple[AxisChoice, ...] = tuple(done)
        self.cache: dict[tuple[int, Placement, Placement], float] = {}
        self.natives: dict[str, tuple[int, dict[str, Placement]]] = {}
        self.numbers: dict[object, int] = {}  # of metas and placements on the axes done

    def native(self, value: str) -> dict[str, Placement]:
        """The placements on the axes done, as the producer leaves them."""
        producer = self.axis_problem.flow.producers.get(value)
        if producer is None:
            return {c.axis: c.inputs[value] for c in self.done}
        index = producer.results.index(value)
        return {c.axis: c.strategies[producer.name].results[index] for c in self.done}

    def convert(self, value: str, src: Placement, dst: Placement) -> float:
        if self.axis == MICROBATCH_AXIS and not isinstance(src, type(REPLICATE)):
            return math.inf
        if move_kind(src, dst) is None:
            return math.inf
        meta = self.axis_problem.flow.metas[value]
        if value not in self.natives:  # asked once a value, priced once for all that are alike
            others = self.native(value)
            alike = (meta, tuple(others.items()))
            self.natives[value] = (self.numbers.setdefault(alike, len(self.numbers)), others)
        number, others = self.natives[value]
        key = (number, src, dst)
        if key not in self.cache:
            self.cache[key] = self._seconds(meta.shape, meta.dtype, others, src, dst)
        return self.cache[key]

    def _seconds(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        others: Mapping[str, Placement],
        src: Placement,
        dst: Placement,
    ) -> float:
        mesh = self.axis_problem.mesh
        if splits_rows(len(shape), (src, dst, *others.values())):
            others = {}  # the other axes are changed first

        def spec(placement: Placement) -> TensorSpec:
            placed = {**others, self.axis: placement}
            return TensorSpec(
                shape, dtype, mesh, tuple(placed.get(a, REPLICATE) for a in mesh.axes)
            )

        pending = {p.op for p in (src, dst, *others.values()) if isinstance(p, Partial)}
        if len(pending) > 1:  # a value is not pending in two ways at once
            return math.inf
        return seconds(spec(src), spec(dst), self.axis_problem.topology)

    def ends(self, value: str, wanted: Placement) -> list[tuple[At, float]]:
        """Ways to deliver an output: as wanted, or pending and reduced after the last microbatch.

        Reductions that share buckets cost bytes but no latency of their own.
        """
        options: list[tuple[At, float]] = [((value, wanted), 0.0)]
        if isinstance(wanted, Partial) or self.axis == MICROBATCH_AXIS:
            return options
        topology = self.axis_problem.topology
        if self.axis_problem.bucketed:
            topology = replace(topology, latency=0.0)
        patient = Prices(replace(self.axis_problem, topology=topology), self.axis, self.done)
        times = self.axis_problem.mesh.shape.get(MICROBATCH_AXIS, 1)
        price = patient.convert(value, PARTIAL, wanted)
        if math.isfinite(price):  # not so where the value is pending in another way already
            options.append(((value, PARTIAL), price / times))
        return options

    def op(self, op: Op, strategy: Strategy) -> float:
        """The roofline of the fullest rank's part of the op; nothing for views."""
        rule = self.axis_problem.rules[op.name]
        if rule.kind in ("view", "mark"):
            return 0.0
        mesh = self.axis_problem.mesh
        chosen = [(c.axis, c.strategies[op.name]) for c in self.done]
        chosen.append((self.axis, strategy))
        metas = (*op.call.operands, *op.call.results)
        work, parts = fullest_rank(op.call, [(s, mesh.axis_size(axis)) for axis, s in chosen])
        moved = sum(
            math.prod(meta.shape) * meta.dtype.itemsize * part
            for meta, part in zip(metas, parts, strict=True)
            if meta is not None
        )
        return self.axis_problem.topology.compute_seconds(
            flops=rule.flops * work, bytes_moved=moved, attention=rule.kind == "attention"
        )
