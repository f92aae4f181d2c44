"""Which dims an axis may split: the closure of the pins under the rules (*predictable first*).

A pin on a parameter or an input says that one dim is split over an axis. Each op that touches the
value maps that dim to factors; sharding those factors splits other operands and results, and so
on, until a contraction or an op that needs the dim whole ends it. Nothing outside the closure is
ever split on that axis, so Megatron's pins give Megatron's collectives and nothing else.

    up.weight row -> matmul's f -> gelu -> matmul's contraction -> down.weight column

A pin on a 1-D parameter opens nothing. An annotation opens its factor up to the next contraction.
A pin that does not line up with a view or a split on its way ends there, and the planner
redistributes the activation before that op. On request it is an error instead, or it opens nothing
and is storage (misaligned.py). The result lists, for every op, the one-axis strategies that the
planner may choose from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dtensor.sharding.plan.choose.misaligned import Crooked, MisalignedPin
from dtensor.sharding.plan.choose.split_through_op import CROOKED, around, split_by
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.record import Misaligned, Opened
from dtensor.sharding.plan.request import OnMisaligned, Pin
from dtensor.sharding.rules.rule import Rule, Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    PARTIAL,
    Partial,
    Shard,
    index_sets,
    simplest,
)

Rules = Mapping[str, Rule]  # by op name


@dataclass(frozen=True, slots=True)
class Reach:
    """For one axis: the strategies of each op, the shardings of each value, what was opened; the
    parameters whose pins do not line up, where those are storage."""

    strategies: Mapping[str, tuple[Strategy, ...]]
    shardings: Mapping[str, tuple[Shard, ...]]
    opened: tuple[Opened, ...]
    misaligned: Mapping[str, Misaligned]


@dataclass(slots=True)
class _Closure:
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
        size = self.flow.metas[value].shape[shard.dim]
        return shard.dim, index_sets(shard, size, self.num)

    def has(self, value: str, shard: Shard) -> bool:
        return self.key(value, shard) in self.shardings.get(value, {})

    def open(self, pin: Pin) -> tuple[list[str], list[Crooked]]:
        """Follow one pin; the values it reaches, and the places where it does not line up."""
        assert isinstance(pin.placement, Shard)
        queue = [(pin.value, pin.placement)]
        reached: list[str] = []
        crooked: list[Crooked] = []
        while queue:
            value, shard = queue.pop()
            key = self.key(value, shard)
            if key in self.shardings.setdefault(value, {}):
                continue
            shape = self.flow.metas[value].shape
            plain = simplest(shard, shape, self.num)
            assert isinstance(plain, Shard)
            self.shardings[value][key] = plain
            reached.append(value)
            for op, _, strategy in around(self.flow, self.rules, value, plain, self.num):
                if strategy == CROOKED:
                    crooked.append((op, value, plain))
                    continue
                ends = pin.until_contraction and self.rules[op.name].flops > 0
                if strategy is None or ends:
                    continue
                if strategy not in self.strategies.setdefault(op.name, {}):
                    self.strategies[op.name][strategy] = None
                    queue += split_by(op, strategy)
        return reached, crooked


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
    """The closure of ``pins`` on an axis of ``num`` ranks.

    ``free`` opens every factor of every op instead (search="free"). ``labels``: the user's names of
    parameters and buffers. Raises PlanningError for the pin of one that does not line up with what
    the program does to the dim, if ``misaligned`` is "error".
    """
    closure = _Closure(flow, rules, num)
    labels = labels or {}
    opened: list[Opened] = []
    stored: dict[str, Misaligned] = {}
    fixes: dict[object, str] = {}
    for pin in pins:
        if not pin.opens or not isinstance(pin.placement, Shard):
            continue
        if closure.has(pin.value, pin.placement):
            continue
        if misaligned == "gather" and pin.value in labels:
            _, places = _Closure(flow, rules, num).open(pin)  # a pin that is storage opens nothing
            if places:
                at = MisalignedPin(flow, rules, pin, places, axis, num)
                stored[pin.value] = replace(at.record(), ops=())
                continue
        reached, places = closure.open(pin)
        ends: Misaligned | None = None
        if places and axis != MICROBATCH_AXIS:
            at = MisalignedPin(flow, rules, pin, places, axis, num)
            if misaligned == "error" and pin.value in labels:
                raise at.error(labels[pin.value], partial(_lines_up, flow, rules, pin))
            ends = at.record()
            key = replace(ends, ops=())
            if pin.value in labels and key not in fixes:  # alike layers have the same fix
                fixes[key] = at.fix(partial(_lines_up, flow, rules, pin))
            ends = replace(ends, fix=fixes.get(key, ""))
        others = tuple(dict.fromkeys(labels[v] for v in reached if v in labels and v != pin.value))
        size = flow.metas[pin.value].shape[pin.placement.dim]
        label = labels.get(pin.value, pin.value)
        opened.append(
            Opened(
                pin.by,
                pin.placement.dim,
                size,
                others,
                label,
                tuple(dict.fromkeys(reached)),
                ends,
            )
        )
    if free:
        _open_everything(closure)
    given = {pin.value for pin in pins if pin.placement == PARTIAL}
    anywhere = free or axis == MICROBATCH_AXIS
    return Reach(
        _with_pending(flow, rules, closure.strategies, given, anywhere=anywhere),
        {v: tuple(found.values()) for v, found in closure.shardings.items()},
        tuple(opened),
        stored,
    )


def crooked(flow: Dataflow, rules: Rules, pins: Sequence[Pin], num: int) -> Crooked | None:
    """The first place where a pin does not line up over ``num`` ranks; None: all do."""
    closure = _Closure(flow, rules, num)
    return next((place for pin in pins for place in closure.open(pin)[1]), None)


def _lines_up(flow: Dataflow, rules: Rules, pin: Pin, shard: Shard, num: int) -> bool:
    """Whether the pin, stated as ``shard``, would go through over ``num`` ranks."""
    return crooked(flow, rules, [replace(pin, placement=shard)], num) is None


def _open_everything(closure: _Closure) -> None:
    for op in closure.flow.ops:
        rule = closure.rules[op.name]
        for strategy in rule.strategies(closure.num):
            if strategy.shards_work:
                for name, placed in split_by(op, strategy):
                    closure.open(Pin(value=name, placement=placed, by="search"))


def _with_pending(
    flow: Dataflow,
    rules: Rules,
    sharded: Mapping[str, Mapping[Strategy, None]],
    given: Set[str],
    *,
    anywhere: bool,
) -> dict[str, tuple[Strategy, ...]]:
    """Add replication, and pending sums where one can arise; ``given``: inputs that are pending.

    Unless ``anywhere``, a sum stays pending only through ops that keep it what it is: ops of one
    tensor (views, scaling by numbers or scalars, placing rows by index: the gradient of an
    embedding of positions waits for the end) and sums of values that are all pending. So a
    row-split product is reduced where it arises, as Megatron does, and not at some later point
    that happens to be cheaper.
    """
    pending: set[str] = set(given)
    result: dict[str, tuple[Strategy, ...]] = {}
    for op in flow.ops:
        replicate, *linear = rules[op.name].fixed_strategies
        strategies = [replicate, *sharded.get(op.name, {})]
        for strategy in linear:
            taken = [
                name
                for name, p in zip(op.operands, strategy.operands, strict=True)
                if isinstance(p, Partial)
            ]
            if anywhere:
                allowed = any(name in pending for name in taken)
            else:
                others = [
                    meta
                    for meta, p in zip(op.call.operands, strategy.operands, strict=True)
                    if not isinstance(p, Partial)
                ]
                plain = all(math.prod(m.shape) == 1 or _is_index(m.dtype) for m in others)
                allowed = plain and all(name in pending for name in taken)
            if allowed:
                strategies.append(strategy)
        for strategy in strategies:
            for name, p in zip(op.results, strategy.results, strict=True):
                if name is not None and p == Partial("sum"):
                    pending.add(name)
        result[op.name] = tuple(dict.fromkeys(strategies))
    return result


def _is_index(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
