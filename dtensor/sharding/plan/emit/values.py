"""Bringing values where a plan's steps need them: on their stage, at their placement.

    copy = emitter.need("h", spec, Reader(1, "forward", "mlp.py:14", "mm needs it"))

A value may stand at several places: as its op makes it, converted, sent to another stage. Before an
op reads it, it is brought to the spec that the op's strategies ask for: from the copy at hand from
which that is cheapest, on the op's own stage, by one-axis moves; from another stage by one
transfer. A conversion is made once and reused. Not here: the end of a step (emit.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.choose.axis_problem import AxisChoice
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.precision import accumulated, rounded
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, StepPhase, Transfer, unused
from dtensor.sharding.redistribute.moves import Move, moves, seconds
from dtensor.sharding.rules.rule import Rule, fullest_rank
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement
from dtensor.sharding.spec.spec import TensorSpec, alike


@dataclass(frozen=True, slots=True)
class Copy:
    """A value as it stands on one stage under one spec."""

    name: str
    spec: TensorSpec
    stage: int
    once: bool
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Reader:
    """Who a step is laid down for: where and when it runs, the user's line, the reason."""

    stage: int
    phase: StepPhase
    source: str
    why: str


@dataclass(slots=True)
class Emitter:
    """Steps so far, and the copies of each value that they have made."""

    request: Request
    mesh: Mesh
    rules: Mapping[str, Rule]
    chosen: Sequence[AxisChoice]
    steps: list[Step] = field(default_factory=list[Step])
    copies: dict[str, list[Copy]] = field(default_factory=dict[str, list[Copy]])
    names: set[str] = field(default_factory=set[str])
    wide: frozenset[str] = frozenset()  # values whose parts are left in float32

    def fresh(self, name: str) -> str:
        return unused(name, self.names)

    def spec(self, value: str, placements: Mapping[str, Placement]) -> TensorSpec:
        meta = self.request.flow.metas[value]
        full = tuple(placements.get(axis, REPLICATE) for axis in self.mesh.axes)
        return TensorSpec(meta.shape, meta.dtype, self.mesh, full)

    # -- one op ---------------------------------------------------------------------------------

    def compute(
        self, op: Op, result_names: tuple[str | None, ...], stage: int, phase: StepPhase
    ) -> None:
        """The op at ``stage``, its results called ``result_names``."""
        strategies = {c.axis: c.strategies[op.name] for c in self.chosen}
        by = Reader(stage, phase, op.source, f"{op.name} needs it")
        operands: list[Copy] = []
        for index, value in enumerate(op.operands):
            wanted = self.spec(value, {a: s.operands[index] for a, s in strategies.items()})
            operands.append(self.need(value, wanted, by))
        results = tuple(
            None if v is None else self.spec(v, {a: s.results[i] for a, s in strategies.items()})
            for i, v in enumerate(op.results)
        )
        if op.results[0] in self.wide and self._gives_float32(op, operands):
            results = tuple(None if s is None else accumulated(s) for s in results)
        once = all(copy.once for copy in operands) and all(
            s is None or _whole_in_time(s) for s in results
        )
        sizes = [(s, self.mesh.axis_size(axis)) for axis, s in strategies.items()]
        work, _ = fullest_rank(op.call, sizes)
        self.steps.append(
            Compute(
                op=op,
                rule=self.rules[op.name],
                operands=tuple(copy.name for copy in operands),
                operand_specs=tuple(copy.spec for copy in operands),
                results=result_names,
                result_specs=results,
                phase=phase,
                stage=stage,
                once=once and self.request.num_microbatches > 1,
                strategies=tuple(strategies.items()),
                flops=round(self.rules[op.name].flops * work),
            )
        )
        for value, name, spec in zip(op.results, result_names, results, strict=True):
            if value is not None and name is not None and spec is not None:
                self.add(value, Copy(name, spec, stage, once, phase))

    def _gives_float32(self, op: Op, operands: Sequence[Copy]) -> bool:
        metas = zip(operands, op.call.operands, strict=True)
        given = any(copy.spec.dtype != meta.dtype for copy, meta in metas)
        return given or callable(self.rules[op.name].parts)

    def add(self, value: str, copy: Copy) -> Copy:
        self.copies.setdefault(value, []).append(copy)
        return copy

    # -- bringing a value where it is needed --------------------------------------------------

    def need(self, value: str, wanted: TensorSpec, by: Reader) -> Copy:
        """The value at the spec that its reader wants, on the reader's stage."""
        producer = self.request.flow.producers.get(value)
        here = self.on(value, by.stage)
        if not here and producer is not None and rearranges(producer, self.rules[producer.name]):
            # what crosses is the value itself, once; its views are taken where they are used
            result_names = (self.fresh(f"{value}_at{by.stage}"),)
            self.compute(producer, result_names, by.stage, by.phase)
            here = self.on(value, by.stage)
        if here:
            copy, path = self._cheapest(here, wanted)
            return self._moved(copy, value, path, by)
        # sent when it is made: a forward value that only a later stage's backward reads
        # must leave in the forward, for here the backward comes last
        first = self.copies[value][0]
        there = [c for c in self.on(value, first.stage) if c.phase == first.phase]
        copy, path = self._cheapest(there, wanted)
        smallest = _smallest(copy, path, self.request.num_microbatches)
        sender = replace(by, stage=first.stage, phase=first.phase)
        copy = self._moved(copy, value, path[:smallest], sender)
        copy = self.transfer(copy, value, replace(by, phase=first.phase))
        return self._moved(copy, value, path[smallest:], by)

    def on(self, value: str, stage: int) -> list[Copy]:
        return [copy for copy in self.copies[value] if copy.stage == stage]

    def _moved(self, copy: Copy, value: str, path: Sequence[Move], by: Reader) -> Copy:
        for move in path:
            copy = self.move(copy, value, move, by)
        return copy

    def _cheapest(self, copies: Sequence[Copy], wanted: TensorSpec) -> tuple[Copy, Sequence[Move]]:
        """The copy from which the way to a spec costs least, and that way."""
        for copy in copies:
            if alike(copy.spec, wanted):
                return copy, ()
        topology = self.request.topology

        def of(copy: Copy) -> TensorSpec:
            return replace(wanted, dtype=copy.spec.dtype)

        best = min(copies, key=lambda c: seconds(c.spec, of(c), topology))
        path = moves(best.spec, of(best), topology)
        return best, path if best.spec.dtype == wanted.dtype else rounded(path, wanted.dtype)

    def move(self, copy: Copy, value: str, move: Move, by: Reader) -> Copy:
        once = copy.once and _whole_in_time(move.dst)
        base = value if copy.name == value or copy.name.startswith(f"{value}_") else copy.name
        result = self.fresh(f"{base}_{move.suffix}")
        # the user's line behind a move: what left a sum pending, else what needs the value
        producer = self.request.flow.producers.get(value)
        self.steps.append(
            Redistribute(
                results=(result,),
                operands=(copy.name,),
                moves=(move,),
                phase=by.phase,
                stage=by.stage,
                once=once and self.request.num_microbatches > 1,
                source=producer.source if move.reduces and producer is not None else by.source,
                why=by.why,
            )
        )
        return self.add(value, Copy(result, move.dst, by.stage, once, by.phase))

    def transfer(self, copy: Copy, value: str, by: Reader) -> Copy:
        """From the copy's stage to the reader's."""
        result = self.fresh(f"{copy.name}_at{by.stage}")
        self.steps.append(
            Transfer(
                result=result,
                operand=copy.name,
                spec=copy.spec,
                stage=copy.stage,
                to_stage=by.stage,
                phase=by.phase,
                once=copy.once and self.request.num_microbatches > 1,
                source=by.source,
                why=by.why,
            )
        )
        return self.add(value, Copy(result, copy.spec, by.stage, copy.once, by.phase))


def rearranges(op: Op, rule: Rule) -> bool:
    """Whether the op is a view of one tensor, with all its elements."""
    if rule.kind != "view" or len(op.operands) != 1 or len(op.results) != 1:
        return False
    result = op.call.results[0]
    return result is not None and math.prod(result.shape) == math.prod(op.call.operands[0].shape)


def _smallest(copy: Copy, path: Sequence[Move], num_microbatches: int) -> int:
    """How many moves of a way to make before a value crosses: it crosses where it is smallest, so
    that it is gathered on the far side, and once a step rather than with each microbatch."""
    sizes = [copy.spec.max_local_nbytes * (1 if copy.once else num_microbatches)]
    for move in path:
        times = 1 if copy.once and _whole_in_time(move.dst) else num_microbatches
        sizes.append(move.dst.max_local_nbytes * times)
    return max(i for i, size in enumerate(sizes) if size == min(sizes))


def _whole_in_time(spec: TensorSpec) -> bool:
    return MICROBATCH_AXIS not in spec.mesh.axes or spec.placement(MICROBATCH_AXIS) == REPLICATE
