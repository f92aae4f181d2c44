"""Laying down a plan's steps, once every axis has been chosen.

Program order is kept. Before each op, every operand is brought to the placement that the op's
strategies ask for: from the copy at hand from which that is cheapest, on the op's own stage, by
one-axis moves (redistribute.py); from another stage by one transfer. A conversion is made once and
reused. After the last microbatch come the outputs: sums over microbatches, reductions of
gradients in buckets, sums over stages of tied parameters, the norm, the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtensor.sharding.choose import AxisChoice
from dtensor.sharding.dataflow import Op, Output
from dtensor.sharding.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.placements import REPLICATE, Partial, Placement, Shard, same
from dtensor.sharding.plan import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Plan,
    PlannedInput,
    PlannedOutput,
    Step,
    StepPhase,
    TieSum,
    Transfer,
    Update,
)
from dtensor.sharding.redistribute import Move, moves, seconds
from dtensor.sharding.rule import Rule
from dtensor.sharding.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.sharding.planner import Request

BUCKET_BYTES = 32 * 2**20

_SUFFIX = {
    "all_reduce": "reduced",
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "slice": "sliced",
    "zero_fill": "pending",
    "relabel": "same",
}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A value as it stands on one stage under one spec."""

    name: str
    spec: TensorSpec
    stage: int
    once: bool
    phase: StepPhase


@dataclass(slots=True)
class _Emitter:
    request: Request
    mesh: Mesh
    rules: Mapping[str, Rule]
    chosen: Sequence[AxisChoice]
    steps: list[Step] = field(default_factory=list)
    copies: dict[str, list[_Copy]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self.names:
            number += 1
            candidate = f"{name}_{number}"
        self.names.add(candidate)
        return candidate

    def spec(self, value: str, placements: Mapping[str, Placement]) -> TensorSpec:
        meta = self.request.flow.metas[value]
        full = tuple(placements.get(axis, REPLICATE) for axis in self.mesh.axes)
        return TensorSpec(meta.shape, meta.dtype, self.mesh, full)

    # -- one op ---------------------------------------------------------------------------------

    def op(self, op: Op) -> None:
        strategies = {c.axis: c.strategies[op.name] for c in self.chosen}
        names: list[str] = []
        specs: list[TensorSpec] = []
        for index, value in enumerate(op.operands):
            wanted = self.spec(value, {a: s.operands[index] for a, s in strategies.items()})
            copy = self.need(value, wanted, op.stage, op.phase, op.source, f"{op.name} needs it")
            names.append(copy.name)
            specs.append(copy.spec)
        results = tuple(
            None if v is None else self.spec(v, {a: s.results[i] for a, s in strategies.items()})
            for i, v in enumerate(op.results)
        )
        once = all(self._copy(n).once for n in names) and all(
            s is None or _whole_in_time(s) for s in results
        )
        work = 1
        for axis, strategy in strategies.items():
            work *= self.mesh.axis_size(axis) if strategy.shards_work else 1
        self.steps.append(
            Compute(
                op=op,
                rule=self.rules[op.name],
                operands=tuple(names),
                operand_specs=tuple(specs),
                results=op.results,
                result_specs=results,
                phase=op.phase,
                stage=op.stage,
                once=once and self.request.num_microbatches > 1,
                why=tuple(f"{a}: {s.label}" for a, s in strategies.items()),
                flops=self.rules[op.name].flops // work,
            )
        )
        for value, spec in zip(op.results, results, strict=True):
            if value is not None and spec is not None:
                self.add(value, _Copy(value, spec, op.stage, once, op.phase))

    def add(self, value: str, copy: _Copy) -> _Copy:
        self.copies.setdefault(value, []).append(copy)
        self._by_name[copy.name, copy.stage] = copy
        self._last[copy.name] = copy
        return copy

    _by_name: dict[tuple[str, int], _Copy] = field(default_factory=dict)
    _last: dict[str, _Copy] = field(default_factory=dict)

    def _copy(self, name: str) -> _Copy:
        return self._last[name]

    # -- bringing a value where it is needed --------------------------------------------------

    def need(
        self, value: str, wanted: TensorSpec, stage: int, phase: StepPhase, source: str, why: str
    ) -> _Copy:
        here = [c for c in self.copies[value] if c.stage == stage]
        if not here:
            # sent when it is made: a forward value that only a later stage's backward reads
            # must leave in the forward, for here the backward comes last
            first = self.copies[value][0]
            there = [
                c for c in self.copies[value] if c.stage == first.stage and c.phase == first.phase
            ]
            copy = self._convert(there, value, wanted, first.stage, first.phase, source, why)
            return self._transfer(copy, value, stage, first.phase, source, why)
        return self._convert(here, value, wanted, stage, phase, source, why)

    def _convert(
        self,
        copies: Sequence[_Copy],
        value: str,
        wanted: TensorSpec,
        stage: int,
        phase: StepPhase,
        source: str,
        why: str,
    ) -> _Copy:
        for copy in copies:
            if alike(copy.spec, wanted):
                return copy
        topology = self.request.topology
        best = min(copies, key=lambda c: seconds(c.spec, wanted, topology))
        for move in moves(best.spec, wanted, topology):
            best = self._move(best, value, move, stage, phase, source, why)
        return best

    def _move(
        self,
        copy: _Copy,
        value: str,
        move: Move,
        stage: int,
        phase: StepPhase,
        source: str,
        why: str,
    ) -> _Copy:
        once = copy.once and _whole_in_time(move.dst)
        base = value if copy.name == value or copy.name.startswith(f"{value}_") else copy.name
        result = self.fresh(f"{base}_{_SUFFIX[move.kind]}")
        self.steps.append(
            Convert(
                result=result,
                operand=copy.name,
                move=move,
                phase=phase,
                stage=stage,
                once=once and self.request.num_microbatches > 1,
                source=self._cause(value, move, source),
                why=why,
            )
        )
        return self.add(value, _Copy(result, move.dst, stage, once, phase))

    def _cause(self, value: str, move: Move, reader: str) -> str:
        """The user's line behind a move: what left a sum pending, else what needs the value."""
        producer = self.request.flow.producers.get(value)
        pending = move.kind in ("all_reduce", "reduce_scatter")
        return producer.source if pending and producer is not None else reader

    def _transfer(
        self, copy: _Copy, value: str, stage: int, phase: StepPhase, source: str, why: str
    ) -> _Copy:
        result = self.fresh(f"{copy.name}_at{stage}")
        self.steps.append(
            Transfer(
                result=result,
                operand=copy.name,
                spec=copy.spec,
                stage=copy.stage,
                to_stage=stage,
                phase=phase,
                once=copy.once and self.request.num_microbatches > 1,
                source=source,
                why=why,
            )
        )
        return self.add(value, _Copy(result, copy.spec, stage, copy.once, phase))


def alike(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two specs of one value hold the same indices everywhere."""
    return all(
        same(p, q, a.shape, a.mesh.axis_size(axis))
        for axis, p, q in zip(a.mesh.axes, a.placements, b.placements, strict=True)
    )


def _whole_in_time(spec: TensorSpec) -> bool:
    return MICROBATCH_AXIS not in spec.mesh.axes or spec.placement(MICROBATCH_AXIS) == REPLICATE


def emit(
    request: Request, mesh: Mesh, rules: Mapping[str, Rule], chosen: Sequence[AxisChoice]
) -> Plan:
    """The plan of a request whose axes have been ``chosen``."""
    flow = request.flow
    emitter = _Emitter(request, mesh, rules, chosen)
    emitter.names.update(flow.metas)
    inputs: list[PlannedInput] = []
    for item in flow.inputs:
        spec = emitter.spec(item.name, {c.axis: c.inputs[item.name] for c in chosen})
        inputs.append(PlannedInput(item.name, item.label, item.kind, spec, item.stages))
        for stage in item.stages:
            emitter.add(item.name, _Copy(item.name, spec, stage, True, "forward"))
    for op in flow.ops:
        emitter.op(op)
    outputs = _Outputs(emitter, {i.label: i for i in inputs}).emit()
    return Plan(
        name=request.name,
        flow=flow,
        mesh=request.mesh,
        inner=mesh,
        stage_axis=request.stage_axis,
        num_stages=flow.num_stages,
        num_microbatches=request.num_microbatches,
        inputs=tuple(inputs),
        steps=tuple(emitter.steps),
        outputs=outputs,
        opened=tuple((c.axis, c.opened) for c in chosen if c.axis != MICROBATCH_AXIS),
        topology=request.topology,
        pinned=tuple(
            (axis, value, request.pinned_by.get(value, value))
            for value, placements in request.pins.items()
            for axis in placements
        ),
    )


# -- after the last microbatch -----------------------------------------------------------------


@dataclass(slots=True)
class _Pending:
    """An output on its way to the spec that is wanted of it."""

    output: Output
    name: str
    path: tuple[Move, ...]
    spec: TensorSpec
    of: str


@dataclass(slots=True)
class _Outputs:
    emitter: _Emitter
    inputs: Mapping[str, PlannedInput]

    def emit(self) -> tuple[PlannedOutput, ...]:
        pending = [self._start(output) for output in self.emitter.request.flow.outputs]
        while any(item.path for item in pending):
            self._advance(pending)
        return self._finish(pending)

    def _wanted(self, output: Output, spec: TensorSpec) -> TensorSpec:
        placements: Mapping[str, Placement]
        if output.kind == "result":
            placements = self.emitter.request.results.get(int(output.of), {})
            if self.emitter.request.split_results:
                split = {a: p for a, p in spec.sharding.items() if isinstance(p, Shard)}
                placements = {**split, **placements}
        else:
            placements = self.inputs[str(output.of)].spec.sharding
        full = tuple(placements.get(axis, REPLICATE) for axis in spec.mesh.axes)
        return TensorSpec(spec.shape, spec.dtype, spec.mesh, full)

    def _start(self, output: Output) -> _Pending:
        """Sum over microbatches; what remains to be done is a path of moves."""
        e = self.emitter
        native = e.copies[output.value][0]
        on_stage = [c for c in e.copies[output.value] if c.stage == output.stage]
        copy = on_stage[0] if on_stage else native
        phase: StepPhase = "forward" if output.kind == "result" else "backward"
        if not on_stage:
            copy = e._transfer(copy, output.value, output.stage, phase, "", "an output")  # pyright: ignore[reportPrivateUsage]
        of = str(output.of) if output.kind != "result" else f"result {output.of}"
        name, spec = copy.name, copy.spec
        if MICROBATCH_AXIS in e.mesh.axes:
            if spec.placement(MICROBATCH_AXIS) == REPLICATE:
                pending = spec.with_placements(**{MICROBATCH_AXIS: Partial("sum")})
                move = Move("zero_fill", MICROBATCH_AXIS, spec, pending)
                copy = e._move(copy, output.value, move, output.stage, phase, "", "an output")  # pyright: ignore[reportPrivateUsage]
                name, spec = copy.name, copy.spec
            dst = spec.with_placements(**{MICROBATCH_AXIS: REPLICATE})
            result = e.fresh(f"{name}_total")
            e.steps.append(
                Accumulate(
                    result=result, operand=name, src=spec, dst=dst, stage=output.stage, of=of
                )
            )
            name, spec = result, dst
        wanted = self._wanted(output, spec)
        exact = next(
            (c for c in e.copies[output.value]
             if c.stage == output.stage and name == copy.name and alike(c.spec, wanted)),
            None,
        )
        if exact is not None:
            return _Pending(output, exact.name, (), exact.spec, of)
        path = () if alike(spec, wanted) else moves(spec, wanted, e.request.topology)
        return _Pending(output, name, path, spec, of)

    def _advance(self, pending: list[_Pending]) -> None:
        """One move of each output; all-reduces of gradients over one axis share buckets."""
        buckets: dict[tuple[object, ...], list[_Pending]] = {}
        for item in pending:
            if not item.path:
                continue
            move = item.path[0]
            bucketed = item.output.kind == "gradient" and move.kind == "all_reduce"
            if bucketed and self._trains():
                key = (move.axis, item.output.stage, item.spec.dtype)
                buckets.setdefault(key, []).append(item)
            else:
                self._single(item, move)
        for (axis, stage, _), items in buckets.items():
            group: list[_Pending] = []
            size = 0
            for item in items:
                nbytes = item.spec.max_local_nbytes
                if group and size + nbytes > BUCKET_BYTES:
                    self._bucket(group, str(axis), stage)
                    group, size = [], 0
                group.append(item)
                size += nbytes
            self._bucket(group, str(axis), stage)

    def _trains(self) -> bool:
        return self.emitter.request.training is not None

    def _single(self, item: _Pending, move: Move) -> None:
        phase: StepPhase = "optimizer"
        if MICROBATCH_AXIS not in self.emitter.mesh.axes and not self._trains():
            phase = "forward" if item.output.kind == "result" else "backward"
        producer = self.emitter.request.flow.producers.get(item.output.value)
        result = self.emitter.fresh(f"{item.name}_{_SUFFIX[move.kind]}")
        self.emitter.steps.append(
            Convert(
                result=result,
                operand=item.name,
                move=move,
                phase=phase,
                stage=item.output.stage,
                once=False,
                source=producer.source if producer else "",
                why=f"{item.of} is wanted as {move.dst}",
            )
        )
        item.name, item.spec, item.path = result, move.dst, item.path[1:]

    def _bucket(self, items: Sequence[_Pending], axis: str, stage: object) -> None:
        e = self.emitter
        results = tuple(e.fresh(f"{item.name}_reduced") for item in items)
        e.steps.append(
            Bucket(
                name=e.fresh(f"gradients_{axis}"),
                results=results,
                operands=tuple(item.name for item in items),
                moves=tuple(item.path[0] for item in items),
                axis=axis,
                stage=items[0].output.stage,
                of=tuple(item.of for item in items),
            )
        )
        del stage
        for item, result in zip(items, results, strict=True):
            item.name, item.spec, item.path = result, item.path[0].dst, item.path[1:]

    def _finish(self, pending: Sequence[_Pending]) -> tuple[PlannedOutput, ...]:
        e = self.emitter
        groups: dict[tuple[str, str], list[_Pending]] = {}
        for item in pending:
            groups.setdefault((item.output.kind, item.of), []).append(item)
        outputs: list[PlannedOutput] = []
        for (kind, of), items in groups.items():
            if len(items) > 1:
                results = tuple(e.fresh(f"{item.name}_tied") for item in items)
                e.steps.append(
                    TieSum(
                        results=results,
                        operands=tuple(item.name for item in items),
                        stages=tuple(item.output.stage for item in items),
                        spec=items[0].spec,
                        of=of,
                    )
                )
                for item, result in zip(items, results, strict=True):
                    item.name = result
            values = tuple((item.output.stage, item.name) for item in items)
            outputs.append(PlannedOutput(kind, items[0].output.of, values, items[0].spec))
        training = e.request.training
        if training is not None:
            self._train(training.trained, outputs)
        return tuple(outputs)

    def _train(self, trained: frozenset[str], outputs: Sequence[PlannedOutput]) -> None:
        training = self.emitter.request.training
        assert training is not None
        grads = [o for o in outputs if o.kind == "gradient" and str(o.of) in trained]
        if training.clip_grad_norm is not None:
            self.emitter.steps.append(
                Norm(
                    result=self.emitter.fresh("grad_norm"),
                    operands=tuple((*o.values[0], str(o.of)) for o in grads),
                    specs=tuple(o.spec for o in grads),
                    max_norm=training.clip_grad_norm,
                )
            )
        for output in grads:
            for stage, value in output.values:
                elements = math.prod(output.spec.local_shape(dict.fromkeys(self._axes(), 0)))
                self.emitter.steps.append(
                    Update(
                        parameter=str(output.of),
                        gradient=value,
                        spec=output.spec,
                        stage=stage,
                        optimizer=training.optimizer,
                        state_bytes=elements
                        * output.spec.dtype.itemsize
                        * training.state_tensors,
                    )
                )

    def _axes(self) -> tuple[str, ...]:
        return self.emitter.mesh.axes


__all__ = ["BUCKET_BYTES", "Shard", "emit"]
