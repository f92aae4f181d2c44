"""The prices of the choices on one axis.

`Prices` gives seconds for converting a value and for running an op on the axis, given the axes that
are done; `Canonical` names one representative for all placements that hold the same indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.sharding.plan.choose.question import AxisChoice, Question
from dtensor.sharding.plan.choose.solve import At
from dtensor.sharding.plan.dataflow import Dataflow, Op
from dtensor.sharding.redistribute.moves import move_kind, seconds
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    index_sets,
    simplest,
)
from dtensor.sharding.spec.spec import TensorSpec


class Canonical:
    """One representative for all placements that hold the same indices of a value."""

    def __init__(self, flow: Dataflow, num: int) -> None:
        self.flow, self.num = flow, num
        self.found: dict[object, Placement] = {}

    def __call__(self, value: str, placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        shape = self.flow.metas[value].shape
        key = (placement.dim, index_sets(placement, shape[placement.dim], self.num))
        return self.found.setdefault(key, simplest(placement, shape, self.num))


class Prices:
    """Seconds of conversions and ops on one axis, given the placements on the axes done."""

    def __init__(self, question: Question, axis: str, done: Sequence[AxisChoice]) -> None:
        self.question, self.axis, self.done = question, axis, tuple(done)
        self.cache: dict[tuple[int, Placement, Placement], float] = {}
        self.natives: dict[str, tuple[int, dict[str, Placement]]] = {}
        self.numbers: dict[object, int] = {}  # of metas and placements on the axes done

    def native(self, value: str) -> dict[str, Placement]:
        """The placements on the axes done, as the producer leaves them."""
        producer = self.question.flow.producers.get(value)
        if producer is None:
            return {c.axis: c.inputs[value] for c in self.done}
        index = producer.results.index(value)
        return {c.axis: c.result(producer, index) for c in self.done}

    def convert(self, value: str, src: Placement, dst: Placement) -> float:
        if self.axis == MICROBATCH_AXIS and not isinstance(src, type(REPLICATE)):
            return math.inf
        if move_kind(src, dst) is None:
            return math.inf
        meta = self.question.flow.metas[value]
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
        mesh = self.question.mesh

        def spec(placement: Placement) -> TensorSpec:
            placed = {**others, self.axis: placement}
            return TensorSpec(
                shape, dtype, mesh, tuple(placed.get(a, REPLICATE) for a in mesh.axes)
            )

        pending = {p.op for p in (src, dst, *others.values()) if isinstance(p, Partial)}
        if len(pending) > 1:  # a value is not pending in two ways at once
            return math.inf
        return seconds(spec(src), spec(dst), self.question.topology)

    def ends(self, value: str, wanted: Placement) -> list[tuple[At, float]]:
        """Ways to deliver an output: as wanted, or pending and reduced after the last microbatch.

        Reductions that share buckets cost bytes but no latency of their own.
        """
        found: list[tuple[At, float]] = [((value, wanted), 0.0)]
        if isinstance(wanted, Partial) or self.axis == MICROBATCH_AXIS:
            return found
        topology = self.question.topology
        if self.question.bucketed:
            topology = replace(topology, latency=0.0)
        patient = Prices(replace(self.question, topology=topology), self.axis, self.done)
        times = self.question.mesh.shape.get(MICROBATCH_AXIS, 1)
        price = patient.convert(value, PARTIAL, wanted)
        if math.isfinite(price):  # not so where the value is pending in another way already
            found.append(((value, PARTIAL), price / times))
        return found

    def op(self, op: Op, strategy: Strategy) -> float:
        """The roofline of one rank's part of the op; nothing for views."""
        rule = self.question.rules[op.name]
        if rule.kind in ("view", "mark"):
            return 0.0
        mesh = self.question.mesh
        chosen = [(c.axis, c.strategies[op.name]) for c in self.done]
        chosen.append((self.axis, strategy))
        work = 1.0
        for axis, s in chosen:
            work /= mesh.axis_size(axis) if s.shards_work else 1
        moved = 0.0
        for index, meta in enumerate((*op.call.operands, *op.call.results)):
            if meta is None:
                continue
            part = 1.0
            for axis, s in chosen:
                placed = (*s.operands, *s.results)[index]
                part /= mesh.axis_size(axis) if isinstance(placed, Shard) else 1
            moved += math.prod(meta.shape) * meta.dtype.itemsize * part
        return self.question.topology.compute_seconds(
            flops=rule.flops * work, bytes_moved=moved, attention=rule.kind == "attention"
        )
