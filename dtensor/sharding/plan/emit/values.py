"""Emits ops, and the conversions and transfers that bring their operands to the specs they need.

    copy = emitter.ensure_copy("h", spec, Reader(1, "forward", "mlp.py:14", "mm needs it"))

A value has several copies: as its op produces it, with other specs, and on other stages. A reader
gets a new copy by one-axis moves from the copy on its stage that is cheapest to convert; if its
stage has no copy, the value is transferred first. Later readers reuse the new copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.choose.axis_problem import AxisChoice
from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.precision import round_after_sum, sum_spec
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, StepPhase, Transfer, unused
from dtensor.sharding.redistribute.moves import (
    Move,
    gather_counts,
    moves,
    placements_of_counts,
    seconds,
)
from dtensor.sharding.rules.rule import Rule, Strategy, fullest_rank
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement
from dtensor.sharding.spec.spec import TensorSpec, alike


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a value, with its name in the plan, its spec and its stage."""

    name: str
    spec: TensorSpec
    stage: int
    once: bool
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader for which a step is emitted: stage, phase, user's line, reason for the step."""

    stage: int
    phase: StepPhase
    source: str
    why: str


@dataclass(slots=True)
class Emitter:
    """The steps emitted so far, and the copies of each value that they produce."""

    request: Request
    mesh: Mesh
    rules: Mapping[str, Rule]
    chosen: Sequence[AxisChoice]
    steps: list[Step] = field(default_factory=list[Step])
    copies: dict[str, list[Copy]] = field(default_factory=dict[str, list[Copy]])
    names: set[str] = field(default_factory=set[str])
    float32_parts: frozenset[str] = frozenset()  # values whose parts are left in float32
    routes: Mapping[str, str] = field(default_factory=dict[str, str])  # rows -> their counts
    counts: frozenset[str] = frozenset()  # the counts of all routes
    gathered: dict[tuple[str, str], Copy] = field(default_factory=dict[tuple[str, str], Copy])
    """The counts of all ranks of an axis, by the copy of the counts of one rank and the axis."""

    def fresh(self, name: str) -> str:
        """Return an unused name that starts with ``name``."""
        return unused(name, self.names)

    def spec(self, value: str, placements: Mapping[str, Placement]) -> TensorSpec:
        """Return the spec of the value with these placements, replicated on other axes."""
        return self.spec_of(self.request.flow.metas[value], placements)

    def spec_of(self, meta: Meta, placements: Mapping[str, Placement]) -> TensorSpec:
        """Return the spec of a tensor with these placements, replicated on other axes."""
        full = tuple(placements.get(axis, REPLICATE) for axis in self.mesh.axes)
        return TensorSpec(meta.shape, meta.dtype, self.mesh, full)

    # -- one op ---------------------------------------------------------------------------------

    def compute(
        self, op: Op, result_names: tuple[str | None, ...], stage: int, phase: StepPhase
    ) -> None:
        """Emit the op on ``stage``, after the conversions of its operands."""
        strategies = self.strategies_of(op)
        operands = self.operands_of(op, stage, phase)
        results = tuple(
            None if v is None else self.spec(v, {a: s.results[i] for a, s in strategies.items()})
            for i, v in enumerate(op.results)
        )
        if op.results[0] in self.float32_parts and self._makes_float32(op, operands):
            results = tuple(None if s is None else sum_spec(s) for s in results)
        made = self.emit_op(
            op, self.rules[op.name], strategies, operands, results, result_names, stage, phase
        )
        for value, copy in zip(op.results, made, strict=True):
            if value is not None and copy is not None:
                self.add_copy(value, copy)

    def strategies_of(self, op: Op) -> dict[str, Strategy]:
        """Return the strategy of the op on each axis."""
        return {choice.axis: choice.strategies[op.name] for choice in self.chosen}

    def operands_of(self, op: Op, stage: int, phase: StepPhase) -> list[Copy]:
        """Return the operands as the op's strategies read them; emit their conversions."""
        strategies = self.strategies_of(op)
        by = Reader(stage, phase, op.source, f"{op.name} needs it")
        operands: list[Copy] = []
        for index, value in enumerate(op.operands):
            needed_spec = self.spec(value, {a: s.operands[index] for a, s in strategies.items()})
            hidden = self._gathered_in_forward(value, op) if phase == "backward" else []
            for copy in hidden:
                self.copies[value].remove(copy)
            operands.append(self.ensure_copy(value, needed_spec, by))
            self.copies[value] += hidden
        return operands

    def _gathered_in_forward(self, value: str, op: Op) -> list[Copy]:
        """Return the copies of an operand of attention that the forward gathered over an axis and
        that the backward gathers again."""
        axes = [c.axis for c in self.request.sequence if c.gathers_again]
        if not axes or self.rules[op.name].kind != "attention":
            return []
        first, *others = self.copies[value]

        def is_gathered(copy: Copy, axis: str) -> bool:
            return copy.spec.placement(axis) == REPLICATE != first.spec.placement(axis)

        return [c for c in others if c.phase == "forward" and any(is_gathered(c, a) for a in axes)]

    def emit_op(
        self,
        op: Op,
        rule: Rule,
        strategies: Mapping[str, Strategy],
        operands: Sequence[Copy],
        results: tuple[TensorSpec | None, ...],
        result_names: Sequence[str | None],
        stage: int,
        phase: StepPhase,
    ) -> list[Copy | None]:
        """Emit an op that reads these copies; return the copies that it makes."""
        # it runs once per training step if no operand and no result differs between microbatches
        once = all(copy.once for copy in operands) and all(
            s is None or _not_split_by_microbatch(s) for s in results
        )
        sizes = [(s, self.mesh.axis_size(axis)) for axis, s in strategies.items()]
        work, _ = fullest_rank(op.call, rule, sizes)
        self.steps.append(
            Compute(
                op=op,
                rule=rule,
                operands=tuple(copy.name for copy in operands),
                operand_specs=tuple(copy.spec for copy in operands),
                results=tuple(result_names),
                result_specs=results,
                phase=phase,
                stage=stage,
                once=once and self.request.num_microbatches > 1,
                strategies=tuple(strategies.items()),
                flops=round(rule.flops * work),
            )
        )
        return [
            None if name is None or spec is None else Copy(name, spec, stage, once, phase)
            for name, spec in zip(result_names, results, strict=True)
        ]

    def _makes_float32(self, op: Op, operands: Sequence[Copy]) -> bool:
        """Return whether the op makes float32 parts, or reads an operand in float32 parts."""
        metas = zip(operands, op.call.operands, strict=True)
        reads_float32 = any(copy.spec.dtype != meta.dtype for copy, meta in metas)
        return reads_float32 or callable(self.rules[op.name].parts)

    def add_copy(self, value: str, copy: Copy) -> Copy:
        self.copies.setdefault(value, []).append(copy)
        return copy

    # -- conversions and transfers ------------------------------------------------------------

    def ensure_copy(self, value: str, wanted: TensorSpec, by: Reader) -> Copy:
        """Return a copy with the spec ``wanted`` on the reader's stage; emit it if needed."""
        producer = self.request.flow.producers.get(value)
        on_stage = self._sources(value, by.stage, wanted)
        if (
            not on_stage
            and producer is not None
            and is_full_view(producer, self.rules[producer.name])
        ):
            # transfer the viewed value once, and repeat its views on the reader's stage
            result_names = (self.fresh(f"{value}_at{by.stage}"),)
            self.compute(producer, result_names, by.stage, by.phase)
            on_stage = self._sources(value, by.stage, wanted)
        if on_stage:
            copy, path = self._cheapest(on_stage, wanted)
            return self._convert(copy, value, path, by)
        # The value is sent in the phase in which it is produced: a forward value that only the
        # backward of a later stage reads must be sent in the forward, because the backward of the
        # sender's stage comes after it.
        first = self.copies[value][0]
        candidates = [
            c for c in self._sources(value, first.stage, wanted) if c.phase == first.phase
        ]
        copy, path = self._cheapest(candidates, wanted)
        num_before = _moves_before_transfer(copy, path, self.request.num_microbatches)
        sender = replace(by, stage=first.stage, phase=first.phase)
        copy = self._convert(copy, value, path[:num_before], sender)
        copy = self.transfer(copy, value, replace(by, phase=first.phase))
        return self._convert(copy, value, path[num_before:], by)

    def copies_on(self, value: str, stage: int) -> list[Copy]:
        """Return the copies of the value on the stage."""
        return [copy for copy in self.copies[value] if copy.stage == stage]

    def _sources(self, value: str, stage: int, wanted: TensorSpec) -> list[Copy]:
        """Return the copies on the stage that can be converted to ``wanted``. Counts of experts
        that are pending are the rows of each rank, so summed counts cannot become pending again."""
        copies = self.copies_on(value, stage)
        if value in self.counts:
            return [copy for copy in copies if _sums_are_kept(copy.spec, wanted)]
        return copies

    def _convert(self, copy: Copy, value: str, path: Sequence[Move], by: Reader) -> Copy:
        """Emit the moves of ``path`` for a copy of the value; return the last new copy."""
        for move in path:
            copy = self.move(copy, value, move, by)
        return copy

    def _cheapest(self, copies: Sequence[Copy], target: TensorSpec) -> tuple[Copy, Sequence[Move]]:
        """Return the copy that is cheapest to convert to ``target``, and the moves that do it."""
        for copy in copies:
            if alike(copy.spec, target):
                return copy, ()
        topology = self.request.topology

        def in_its_dtype(copy: Copy) -> TensorSpec:  # float32 parts are rounded by their reduction
            return replace(target, dtype=copy.spec.dtype)

        best = min(copies, key=lambda c: seconds(c.spec, in_its_dtype(c), topology))
        path = moves(best.spec, in_its_dtype(best), topology)
        return best, path if best.spec.dtype == target.dtype else round_after_sum(
            path, target.dtype
        )

    def move(self, copy: Copy, value: str, move: Move, by: Reader) -> Copy:
        """Emit one move of a copy; return the new copy."""
        if move.kind == "reduce_scatter" and value in self.counts:
            return self._hold_counts(copy, value, move, by)
        counts = self._counts_for(value, move, by) if move.is_sized else None
        once = copy.once and _not_split_by_microbatch(move.dst)
        base = value if copy.name == value or copy.name.startswith(f"{value}_") else copy.name
        result = self.fresh(f"{base}_{move.suffix}")
        # source: for a reduction, the line that left the sum pending; else the line of the reader
        producer = self.request.flow.producers.get(value)
        if move.reduces and producer is not None:
            by = replace(by, source=producer.source)
        self._emit_move(result, copy.name, move, by, once, counts)
        return self.add_copy(value, Copy(result, move.dst, by.stage, once, by.phase))

    # -- the numbers of rows by expert ---------------------------------------------------------

    def _counts_for(self, value: str, move: Move, by: Reader) -> Copy:
        """Return the counts of all ranks of the axis, for an exchange of rows over it."""
        counts = self.routes[value]
        wanted = self.spec(counts, placements_of_counts(move.src, move.axis))
        return self._gathered_counts(self.ensure_copy(counts, wanted, by), move.axis, by)

    def _gathered_counts(self, counts: Copy, axis: str, by: Reader) -> Copy:
        """Return the counts of all ranks of the axis, one row each; emit the gather if needed."""
        if (counts.name, axis) not in self.gathered:
            move = gather_counts(counts.spec, axis)
            result = self.fresh(f"{counts.name}_by_rank")
            why = "every rank knows the sizes of the exchanges of rows"
            self._emit_move(result, counts.name, move, replace(by, why=why), counts.once)
            copy = Copy(result, move.dst, by.stage, counts.once, by.phase)
            self.gathered[counts.name, axis] = copy
        return self.gathered[counts.name, axis]

    def _hold_counts(self, copy: Copy, value: str, move: Move, by: Reader) -> Copy:
        """Add the counts of all ranks for the experts of each rank, from the gathered counts."""
        gathered = self._gathered_counts(copy, move.axis, by)
        result = self.fresh(f"{value}_held")
        hold = Move("hold", move.axis, gathered.spec, move.dst)
        self._emit_move(result, gathered.name, hold, by, copy.once)
        return self.add_copy(value, Copy(result, move.dst, by.stage, copy.once, by.phase))

    def _emit_move(
        self,
        result: str,
        operand: str,
        move: Move,
        by: Reader,
        once: bool,
        counts: Copy | None = None,
    ) -> None:
        self.steps.append(
            Redistribute(
                results=(result,),
                operands=(operand,),
                moves=(move,),
                phase=by.phase,
                stage=by.stage,
                once=once and self.request.num_microbatches > 1,
                source=by.source,
                why=by.why,
                counts="" if counts is None else counts.name,
                counts_spec=None if counts is None else counts.spec,
            )
        )

    def transfer(self, copy: Copy, value: str, by: Reader) -> Copy:
        """Emit a transfer to the reader's stage; return the new copy."""
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
        return self.add_copy(value, Copy(result, copy.spec, by.stage, copy.once, by.phase))


def _sums_are_kept(spec: TensorSpec, target: TensorSpec) -> bool:
    """Return whether the spec is pending on each axis on which ``target`` is pending."""
    pairs = zip(spec.placements, target.placements, strict=True)
    return all(isinstance(a, Partial) for a, b in pairs if isinstance(b, Partial))


def is_full_view(op: Op, rule: Rule) -> bool:
    """Return whether the op is a view that has all elements of its one operand."""
    if rule.kind != "view" or len(op.operands) != 1 or len(op.results) != 1:
        return False
    result = op.call.results[0]
    return result is not None and math.prod(result.shape) == math.prod(op.call.operands[0].shape)


def _moves_before_transfer(copy: Copy, path: Sequence[Move], num_microbatches: int) -> int:
    """Return how many moves of ``path`` to make before the copy is transferred to another stage.
    The value is transferred where its shards are smallest, counted over a training step: so it is
    gathered after the transfer, and sent once per step rather than in each microbatch if
    possible."""
    sizes = [copy.spec.max_local_nbytes * (1 if copy.once else num_microbatches)]
    for move in path:
        times = 1 if copy.once and _not_split_by_microbatch(move.dst) else num_microbatches
        sizes.append(move.dst.max_local_nbytes * times)
    return max(i for i, size in enumerate(sizes) if size == min(sizes))


def _not_split_by_microbatch(spec: TensorSpec) -> bool:
    """Return whether the value is the same in every microbatch."""
    return MICROBATCH_AXIS not in spec.mesh.axes or spec.placement(MICROBATCH_AXIS) == REPLICATE
