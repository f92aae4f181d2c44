"""Laying down a plan's steps, once every axis has been chosen.

    emit(request, inner, rules, chosen) -> PlanRecord

Program order is kept; each op's operands are brought where it needs them (values.py). After the
last microbatch come the outputs: each is summed over microbatches, then brought to the spec that is
wanted of it by one-axis moves. All-reduces of gradients over one axis share buckets; the gradients
of a parameter that several stages use are summed over those stages; then come the norm and the
updates.

Where parameters are stored split (passes/gather_stored.py), gradients are scattered in buckets: at
level 1 after the last microbatch, at 2 and 3 within the backward, as soon as those of a layer are
there, so that whole gradients of one layer are alive at a time. One that is not pending over the
axis takes the ordinary way at the end. At 1 and 2 the updated slices are gathered last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dtensor.numerics import is_narrow
from dtensor.sharding.plan.choose.question import AxisChoice
from dtensor.sharding.plan.dataflow import Output, OutputKind
from dtensor.sharding.plan.emit.values import Copy, Emitter, Reader
from dtensor.sharding.plan.precision import accumulated, widened
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput, PlanRecord
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Convert,
    Norm,
    StepPhase,
    TieSum,
    Update,
    results_of,
)
from dtensor.sharding.plan.storage import layer_of, stored_spec
from dtensor.sharding.redistribute.moves import Move, moves
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS, Mesh
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec, alike

BUCKET_BYTES = 32 * 2**20
T = TypeVar("T")


def emit(
    request: Request, mesh: Mesh, rules: Mapping[str, Rule], chosen: Sequence[AxisChoice]
) -> PlanRecord:
    """The plan of a request whose axes have been ``chosen``."""
    flow = request.flow
    emitter = Emitter(request, mesh, rules, chosen)
    emitter.names.update(flow.metas)
    inputs: list[PlannedInput] = []
    for item in flow.inputs:
        spec = emitter.spec(item.name, {c.axis: c.inputs[item.name] for c in chosen})
        stored = _stored(request, item.kind, spec)
        inputs.append(PlannedInput(item.name, item.label, item.kind, spec, item.stages, *stored))
        for stage in item.stages:
            emitter.add(item.name, Copy(item.name, spec, stage, True, "forward"))
    for op in flow.ops:
        emitter.compute(op, op.results, op.stage, op.phase)
    outputs = Outputs(emitter, {i.label: i for i in inputs}).emit()
    return PlanRecord(
        name=request.name,
        flow=flow,
        mesh=request.mesh,
        inner=mesh,
        stage_axis=request.stage_axis,
        num_stages=flow.num_stages,
        stage_ranks=request.stage_ranks,
        num_microbatches=request.num_microbatches,
        microbatches_stated=request.microbatches_stated,
        inputs=tuple(inputs),
        steps=tuple(emitter.steps),
        outputs=outputs,
        opened=tuple((c.axis, c.opened) for c in chosen if c.axis != MICROBATCH_AXIS),
        topology=request.topology,
        zero=request.zero,
        pinned=tuple(
            (axis, value, request.pinned_by.get(value, value))
            for value, placements in request.pins.items()
            for axis in placements
        ),
    )


def _stored(request: Request, kind: str, spec: TensorSpec) -> tuple[TensorSpec | None, int]:
    """How a parameter is stored where the request splits storage, and the level."""
    if request.zero is None or kind != "parameter":
        return None, 0
    axis, level = request.zero
    return stored_spec(spec, axis), level


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pending:
    """An output on its way to the spec that is wanted of it."""

    output: Output
    name: str
    path: tuple[Move, ...]
    spec: TensorSpec
    of: str


@dataclass(slots=True)
class Outputs:
    """``scattered``: gradients that were split in the backward, by (value, stage, parameter)."""

    emitter: Emitter
    inputs: Mapping[str, PlannedInput]
    scattered: Mapping[tuple[str, int, str], Copy] = field(
        default_factory=dict[tuple[str, int, str], Copy]
    )

    def emit(self) -> tuple[PlannedOutput, ...]:
        self.scattered = scatter_early(self.emitter, self.inputs)
        pending = [self._start(output) for output in self.emitter.request.flow.outputs]
        while any(item.path for item in pending):
            self._advance(pending)
        return self._finish(pending)

    def _wanted(self, output: Output, spec: TensorSpec) -> TensorSpec:
        placements: Mapping[str, Placement]
        request = self.emitter.request
        if output.kind == "result":
            left = {
                axis: p
                for axis, p in spec.sharding.items()
                if (request.split_results and isinstance(p, Shard))
                or (request.pending_results and isinstance(p, Partial))
            }
            placements = {**left, **request.results.get(int(output.of), {})}
        else:
            item = self.inputs[str(output.of)]
            placements = (item.state if output.kind == "gradient" else item.spec).sharding
        full = tuple(placements.get(axis, REPLICATE) for axis in spec.mesh.axes)
        return TensorSpec(spec.shape, spec.dtype, spec.mesh, full)

    def _start(self, output: Output) -> _Pending:
        """Sum over microbatches; what remains to be done is a path of moves."""
        e = self.emitter
        by = Reader(output.stage, _phase(output), "", "an output")
        copy = self.scattered.get((output.value, output.stage, str(output.of)))
        if copy is None:
            on_stage = e.on(output.value, output.stage)
            copy = on_stage[0] if on_stage else None
        if copy is None:
            copy = e.transfer(e.copies[output.value][0], output.value, by)
        of = str(output.of) if output.kind != "result" else f"result {output.of}"
        name, spec = copy.name, copy.spec
        if MICROBATCH_AXIS in e.mesh.axes:
            if spec.placement(MICROBATCH_AXIS) == REPLICATE:
                pending = spec.with_placements(**{MICROBATCH_AXIS: Partial("sum")})
                move = Move("zero_fill", MICROBATCH_AXIS, spec, pending)
                copy = e.move(copy, output.value, move, by)
                name, spec = copy.name, copy.spec
            dst = accumulated(spec.with_placements(**{MICROBATCH_AXIS: REPLICATE}))
            result = e.fresh(f"{name}_total")
            stage = output.stage
            e.steps.append(
                Accumulate(result=result, operand=name, src=spec, dst=dst, stage=stage, of=of)
            )
            name, spec = result, dst
        wanted = self._wanted(output, spec)
        for exact in e.on(output.value, output.stage) if name == copy.name else ():
            if alike(exact.spec, wanted):
                return _Pending(output, exact.name, (), exact.spec, of)
        # all-reduces of gradients share buckets, so they are not taken apart
        whole = output.kind == "gradient" and self._trains()
        same = alike(spec, wanted)
        path = () if same else moves(spec, wanted, e.request.topology, whole=whole)
        path = widened(path) if whole else path
        return _Pending(output, name, path, spec, of)

    def _advance(self, pending: list[_Pending]) -> None:
        """One move of each output; all-reduces of gradients over one axis share buckets."""
        buckets: dict[tuple[object, ...], list[_Pending]] = {}
        for item in pending:
            if not item.path:
                continue
            move = item.path[0]
            reduces = move.kind in ("all_reduce", "reduce_scatter")
            if item.output.kind == "gradient" and reduces and self._trains():
                key = (move.axis, item.output.stage, item.spec.dtype, move.kind)
                buckets.setdefault(key, []).append(item)
            else:
                self._single(item, move)
        for items in buckets.values():
            for group in filled(items, [item.spec.max_local_nbytes for item in items]):
                self._bucket(group)

    def _trains(self) -> bool:
        return self.emitter.request.training is not None

    def _single(self, item: _Pending, move: Move) -> None:
        last = MICROBATCH_AXIS in self.emitter.mesh.axes or self._trains()
        producer = self.emitter.request.flow.producers.get(item.output.value)
        result = self.emitter.fresh(f"{item.name}_{move.suffix}")
        self.emitter.steps.append(
            Convert(
                result=result,
                operand=item.name,
                move=move,
                phase="optimizer" if last else _phase(item.output),
                stage=item.output.stage,
                once=False,
                source=producer.source if producer else "",
                why=f"{item.of} is wanted as {move.dst}",
            )
        )
        item.name, item.spec, item.path = result, move.dst, item.path[1:]

    def _bucket(self, items: Sequence[_Pending]) -> None:
        e = self.emitter
        first = items[0].path[0]
        axis = first.axis
        results = tuple(e.fresh(f"{item.name}_{first.suffix}") for item in items)
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
        for item, result in zip(items, results, strict=True):
            item.name, item.spec, item.path = result, item.path[0].dst, item.path[1:]

    def _finish(self, pending: Sequence[_Pending]) -> tuple[PlannedOutput, ...]:
        e = self.emitter
        groups: dict[tuple[OutputKind, str], list[_Pending]] = {}
        for item in pending:
            groups.setdefault((item.output.kind, item.of), []).append(item)
        outputs: list[PlannedOutput] = []
        for (kind, of), items in groups.items():
            if len(items) > 1:
                total = accumulated(items[0].spec) if self._trains() else items[0].spec
                results = tuple(e.fresh(f"{item.name}_tied") for item in items)
                e.steps.append(
                    TieSum(
                        results=results,
                        operands=tuple(item.name for item in items),
                        stages=tuple(item.output.stage for item in items),
                        spec=total,
                        of=of,
                    )
                )
                for item, result in zip(items, results, strict=True):
                    item.name, item.spec = result, total
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
                elements = output.spec.max_local_nbytes // output.spec.dtype.itemsize
                dtype = self.inputs[str(output.of)].spec.dtype
                master = training.master_weights and is_narrow(dtype)
                itemsize = 4 if master else dtype.itemsize
                self.emitter.steps.append(
                    Update(
                        parameter=str(output.of),
                        gradient=value,
                        spec=replace(output.spec, dtype=dtype),
                        stage=stage,
                        optimizer=training.optimizer,
                        state_bytes=elements * itemsize * training.state_tensors,
                        master_bytes=elements * itemsize if master else 0,
                    )
                )

        regather(self.emitter, self.inputs, grads)


def _phase(output: Output) -> StepPhase:
    return "forward" if output.kind == "result" else "backward"


# -- buckets ---------------------------------------------------------------------------------------


def filled(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """The items in order, in buckets of at most BUCKET_BYTES, or of one item that is larger."""
    buckets: list[list[T]] = []
    size = 0
    for item, nbytes in zip(items, sizes, strict=True):
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += nbytes
    return buckets


def scatter_early(
    e: Emitter, inputs: Mapping[str, PlannedInput]
) -> dict[tuple[str, int, str], Copy]:
    """Reduce-scatter gradients within the backward; by (value, stage, parameter), the shards."""
    if e.request.zero is None or e.request.zero[1] < 2:
        return {}
    axis = e.request.zero[0]
    made = {name: at for at, step in enumerate(e.steps) for name, _ in results_of(step)}
    groups: dict[tuple[object, ...], list[tuple[str, Copy, Move, str]]] = {}
    for output in e.request.flow.outputs:
        item = inputs.get(str(output.of))
        if output.kind != "gradient" or item is None or item.stored is None:
            continue
        copy = next(iter(e.on(output.value, output.stage)), None)
        if copy is None or copy.name not in made or not _pends(copy, axis):
            continue
        shard = item.stored.placement(axis)
        move = Move("reduce_scatter", axis, copy.spec, copy.spec.with_placements(**{axis: shard}))
        (move,) = widened([move]) if e.request.training is not None else [move]
        key = (layer_of(item.label), output.stage, copy.spec.dtype)
        groups.setdefault(key, []).append((output.value, copy, move, item.label))
    after: dict[int, list[Bucket]] = {}
    found: dict[tuple[str, int, str], Copy] = {}
    for members in groups.values():
        members.sort(key=lambda m: made[m[1].name])
        for bucket in filled(members, [m[2].src.max_local_nbytes for m in members]):
            results = tuple(e.fresh(f"{copy.name}_scattered") for _, copy, _, _ in bucket)
            first = bucket[0][1]
            step = Bucket(
                name=e.fresh(f"gradients_{axis}"),
                results=results,
                operands=tuple(copy.name for _, copy, _, _ in bucket),
                moves=tuple(move for _, _, move, _ in bucket),
                axis=axis,
                stage=first.stage,
                of=tuple(label for *_, label in bucket),
                phase="backward",
            )
            after.setdefault(max(made[c.name] for _, c, _, _ in bucket), []).append(step)
            for name, (value, copy, move, label) in zip(results, bucket, strict=True):
                found[value, copy.stage, label] = replace(copy, name=name, spec=move.dst)
    e.steps[:] = [
        step for at, made_at in enumerate(e.steps) for step in (made_at, *after.get(at, ()))
    ]
    return found


def _pends(copy: Copy, axis: str) -> bool:
    """Whether the value is a sum over the axis that every microbatch's backward adds to."""
    summed = copy.spec.placement(axis) == Partial("sum") and copy.phase == "backward"
    in_time = MICROBATCH_AXIS not in copy.spec.mesh.axes or isinstance(
        copy.spec.placement(MICROBATCH_AXIS), Partial
    )
    return summed and in_time


def regather(
    e: Emitter, inputs: Mapping[str, PlannedInput], gradients: Sequence[PlannedOutput]
) -> None:
    """Slices that ranks updated, gathered: once for stages that share a parameter and a rank."""
    request = e.request
    if request.zero is None or request.zero[1] > 2:
        return
    axis = request.zero[0]
    ranks = request.stage_ranks
    groups: dict[tuple[object, ...], list[tuple[PlannedInput, Move, int]]] = {}
    seen: set[tuple[str, int]] = set()
    for output in gradients:
        item = inputs[str(output.of)]
        if item.stored is None:
            continue
        for stage, _ in output.values:
            if (item.name, ranks[stage]) not in seen:
                seen.add((item.name, ranks[stage]))
                move = Move("all_gather", axis, item.stored, item.spec)
                groups.setdefault((stage, item.spec.dtype), []).append((item, move, stage))
    for members in groups.values():
        for bucket in filled(members, [move.dst.max_local_nbytes for _, move, _ in members]):
            e.steps.append(
                Bucket(
                    name=e.fresh(f"parameters_{axis}"),
                    results=(),
                    operands=tuple(item.name for item, _, _ in bucket),
                    moves=tuple(move for _, move, _ in bucket),
                    axis=axis,
                    stage=bucket[0][2],
                    of=tuple(item.label for item, _, _ in bucket),
                )
            )
