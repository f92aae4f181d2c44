"""Finds which dims an axis may split: the closure of the pins under the rules of the ops.

    up.weight row -> matmul's f -> gelu -> matmul's contraction -> down.weight column

A pin splits one dim of a value over an axis. Each op that touches the value then splits dims of its
other tensors, according to its rule, and so on, until a contraction or an op that cannot be split
there. Nothing outside the closure is split on the axis, so Megatron's pins give Megatron's
collectives and no others. Pins of 1-D parameters are not propagated; an annotation is propagated up
to the next contraction, and through attention. A pin that does not line up with an op ends there
(misaligned.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from dtensor.numerics import is_integer
from dtensor.sharding.plan.choose.misaligned import MisalignedPin, MisalignedUse
from dtensor.sharding.plan.choose.split_through_op import MISALIGNED, around, split_by
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.record import Misaligned, Opened
from dtensor.sharding.plan.request import OnMisaligned, Pin
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import PARTIAL, Partial, Shard, index_sets, simplest

Rules = Mapping[str, Rule]  # by op name


@dataclass(frozen=True, slots=True)
class Reach:
    """The closure of the pins on one axis.

    ``strategies``: the strategies of each op that the planner may choose from, by op name.
    ``shardings``: the splits of each value. ``opened``: the pins that were propagated.
    ``misaligned``: parameter -> its misaligned pin, with misaligned="gather".
    """

    strategies: Mapping[str, tuple[Strategy, ...]]
    shardings: Mapping[str, tuple[Shard, ...]]
    opened: tuple[Opened, ...]
    misaligned: Mapping[str, Misaligned]


@dataclass(slots=True)
class _Closure:
    """The splits that the pins reach so far (value -> key -> split), and the strategies."""

    flow: Dataflow
    rules: Rules
    num: int
    shardings: dict[str, dict[object, Shard]] = field(
        default_factory=dict[str, dict[object, Shard]]
    )
    strategies: dict[str, dict[Strategy, None]] = field(
        default_factory=dict[str, dict[Strategy, None]]
    )

    def key(self, value: str, shard: Shard) -> object:
        """Return a key that is equal for placements which hold the same indices of the value."""
        size = self.flow.metas[value].shape[shard.dim]
        return shard.dim, shard.ragged, index_sets(shard, size, self.num)

    def is_split_as(self, value: str, shard: Shard) -> bool:
        return self.key(value, shard) in self.shardings.get(value, {})

    def propagate(self, pin: Pin) -> tuple[list[str], list[MisalignedUse]]:
        """Split the pinned value and, through the rules of ops, the values next to it, and so on.
        Return the values that are newly split, and the uses with which a split does not line up."""
        assert isinstance(pin.placement, Shard)
        queue = [(pin.value, pin.placement)]
        reached: list[str] = []
        misaligned: list[MisalignedUse] = []
        while queue:
            value, shard = queue.pop()
            key = self.key(value, shard)
            if key in self.shardings.setdefault(value, {}):
                continue
            shape = self.flow.metas[value].shape
            split = simplest(shard, shape, self.num)
            assert isinstance(split, Shard)
            self.shardings[value][key] = split
            reached.append(value)
            for op, _, strategy in around(self.flow, self.rules, value, split, self.num):
                if strategy == MISALIGNED:
                    misaligned.append((op, value, split))
                    continue
                rule = self.rules[op.name]
                ends = pin.until_contraction and rule.flops > 0 and rule.kind != "attention"
                if strategy is None or ends:
                    continue
                if strategy not in self.strategies.setdefault(op.name, {}):
                    self.strategies[op.name][strategy] = None
                    queue += split_by(op, strategy)
        return reached, misaligned


def reach(
    flow: Dataflow,
    rules: Rules,
    pins: Sequence[Pin],
    axis: str,
    num: int,
    *,
    free: bool = False,
    misaligned: OnMisaligned = "redistribute",
    labels: Mapping[str, str] | None = None,
) -> Reach:
    """Return the closure of ``pins`` on an axis of ``num`` ranks.

    ``free``: split every factor of every op too (search="free"). ``labels``: the user's names of
    parameters and buffers, by value. With misaligned="error", raises PlanningError if the pin of a
    parameter or buffer does not line up with an op.
    """
    closure = _Closure(flow, rules, num)
    labels = labels or {}
    opened: list[Opened] = []
    stored: dict[str, Misaligned] = {}  # value -> its pin, if it only determines storage
    fixes: dict[object, str] = {}  # misaligned pin without its ops -> the text of its fix
    for pin in pins:
        if not pin.opens or not isinstance(pin.placement, Shard):
            continue
        if closure.is_split_as(pin.value, pin.placement):
            continue
        if misaligned == "gather" and pin.value in labels:
            # a separate closure: a pin that only determines storage splits no other value
            _, uses = _Closure(flow, rules, num).propagate(pin)
            if uses:
                misaligned_pin = MisalignedPin(flow, rules, pin, uses, axis, num)
                stored[pin.value] = replace(misaligned_pin.record(), ops=())
                continue
        reached, uses = closure.propagate(pin)
        ends: Misaligned | None = None
        if uses and axis != MICROBATCH_AXIS:
            misaligned_pin = MisalignedPin(flow, rules, pin, uses, axis, num)
            if misaligned == "error" and pin.value in labels:
                raise misaligned_pin.error(labels[pin.value], partial(_lines_up, flow, rules, pin))
            ends = misaligned_pin.record()
            key = replace(ends, ops=())
            if pin.value in labels and key not in fixes:  # equal layers share a fix
                fixes[key] = misaligned_pin.fix(partial(_lines_up, flow, rules, pin))
            ends = replace(ends, fix=fixes.get(key, ""))
        others = tuple(dict.fromkeys(labels[v] for v in reached if v in labels and v != pin.value))
        size = flow.metas[pin.value].shape[pin.placement.dim]
        label = labels.get(pin.value, pin.value)
        opened.append(
            Opened(
                pin.by, pin.placement.dim, size, others, label, tuple(dict.fromkeys(reached)), ends
            )
        )
    if free:
        _propagate_all_splits(closure)
    pending_inputs = {pin.value for pin in pins if pin.placement == PARTIAL}
    anywhere = free or axis == MICROBATCH_AXIS
    return Reach(
        _with_pending(flow, rules, closure.strategies, pending_inputs, anywhere=anywhere),
        {v: tuple(splits.values()) for v, splits in closure.shardings.items()},
        tuple(opened),
        stored,
    )


def closure_of(
    flow: Dataflow, rules: Rules, pins: Sequence[Pin], num: int
) -> dict[str, tuple[Shard, ...]]:
    """Return the splits of each value that the pins reach on an axis of ``num`` ranks."""
    closure = _Closure(flow, rules, num)
    for pin in pins:
        if pin.opens and isinstance(pin.placement, Shard):
            closure.propagate(pin)
    return {value: tuple(splits.values()) for value, splits in closure.shardings.items()}


def crooked(flow: Dataflow, rules: Rules, pins: Sequence[Pin], num: int) -> MisalignedUse | None:
    """Return the first use of a dim (op, value, placement) with which a pin does not line up over
    ``num`` ranks; None if all line up."""
    closure = _Closure(flow, rules, num)
    return next((use for pin in pins for use in closure.propagate(pin)[1]), None)


def _lines_up(flow: Dataflow, rules: Rules, pin: Pin, shard: Shard, num: int) -> bool:
    """Return whether the pin would line up over ``num`` ranks if it were stated as ``shard``."""
    return crooked(flow, rules, [replace(pin, placement=shard)], num) is None


def _propagate_all_splits(closure: _Closure) -> None:
    """Propagate every split that any strategy of any op has."""
    for op in closure.flow.ops:
        rule = closure.rules[op.name]
        for strategy in rule.strategies(closure.num):
            if strategy.shards_work:
                for name, placement in split_by(op, strategy):
                    closure.propagate(Pin(value=name, placement=placement, by="search"))


def _with_pending(
    flow: Dataflow,
    rules: Rules,
    split_strategies: Mapping[str, Mapping[Strategy, None]],
    pending_inputs: Set[str],
    *,
    anywhere: bool,
) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies of each op: replicated, split, and with pending operands.

    An op may read a pending sum if the op is linear and a split op, or an input, makes the value
    pending. Unless ``anywhere``, all its other operands must also be pending, scalars or indices.
    So a product that is split over its contraction is reduced where it is made, as in Megatron, and
    not later where that happens to be cheaper. Rows of experts are reduced as tokens, which are
    fewer, and whose number is known.
    """
    pending: set[str] = set(pending_inputs)
    strategies_by_op: dict[str, tuple[Strategy, ...]] = {}
    for op in flow.ops:
        replicate, *linear = rules[op.name].fixed_strategies
        strategies = [replicate, *split_strategies.get(op.name, {})]
        for strategy in linear:
            summands = [
                name
                for name, p in zip(op.operands, strategy.operands, strict=True)
                if isinstance(p, Partial)
            ]
            if anywhere or rules[op.name].experts:
                allowed = any(name in pending for name in summands)
            else:
                other_metas = [
                    meta
                    for meta, p in zip(op.call.operands, strategy.operands, strict=True)
                    if not isinstance(p, Partial)
                ]
                only_scaled = all(
                    math.prod(m.shape) == 1 or is_integer(m.dtype) for m in other_metas
                )
                allowed = only_scaled and all(name in pending for name in summands)
            if allowed:
                strategies.append(strategy)
        for strategy in strategies:
            for name, p in zip(op.results, strategy.results, strict=True):
                if name is not None and p == Partial("sum"):
                    pending.add(name)
        strategies_by_op[op.name] = tuple(dict.fromkeys(strategies))
    return strategies_by_op
