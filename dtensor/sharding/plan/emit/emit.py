"""Emits the steps of a plan after the strategies of all axes have been chosen.

    emit(request, axis_problem, chosen) -> PlanRecord

Ops keep their order; their operands are converted to the specs that they need (values.py). After
the last microbatch, each output is summed over microbatches and converted to its final spec. With
delayed gradients, the sum is an output, and the sum of the step before is converted in its place.
Reductions of gradients over one axis share buckets. A bucket that is pending over several axes is
scattered over all axes but the last, reduced over the last, and gathered, where that is faster.
Gradients of a parameter that several stages use are summed over these stages. The norm and the
updates come last (updates.py). Gradients of parameters that are stored split are in
stored_gradients.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.choose.axis_problem import AxisChoice, AxisProblem
from dtensor.sharding.plan.choose.routes import check_orders
from dtensor.sharding.plan.dataflow import Input, Output, OutputKind
from dtensor.sharding.plan.emit.pending import Pending, convert, move_one, phase_of
from dtensor.sharding.plan.emit.ring import emit_op
from dtensor.sharding.plan.emit.stored_gradients import scatter_early, scattering_moves
from dtensor.sharding.plan.emit.updates import update_parameters
from dtensor.sharding.plan.emit.values import Copy, Emitter, Reader
from dtensor.sharding.plan.owners import owned_inputs
from dtensor.sharding.plan.precision import (
    gradient_sum_spec,
    left_in_float32,
    reduce_in_float32,
    round_after_sum,
    sum_spec,
)
from dtensor.sharding.plan.record import PlannedInput, PlannedOutput, PlanRecord
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.steps import (
    Accumulate,
    Redistribute,
    fill_buckets,
    over_stages,
)
from dtensor.sharding.plan.storage import split_over, stored_spec
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move, bytes_sent_together, moves
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec, alike


def emit(request: Request, axis_problem: AxisProblem, chosen: Sequence[AxisChoice]) -> PlanRecord:
    """Return the plan whose steps follow the choices. ``chosen``: the choice on each axis of the
    inner mesh."""
    flow, mesh, rules = request.flow, axis_problem.mesh, axis_problem.rules
    emitter = Emitter(request, mesh, rules, chosen)
    strategies = [choice.strategies for choice in chosen]
    emitter.float32_parts = left_in_float32(flow, rules, strategies, _may_stay_pending(request))
    emitter.names.update(flow.metas)
    emitter.routes = axis_problem.routes
    emitter.counts = frozenset(axis_problem.routes.values())
    inputs: list[PlannedInput] = []
    for item in flow.inputs:
        spec = emitter.spec(item.name, {c.axis: c.inputs[item.name] for c in chosen})
        inputs.append(_planned_input(request, item, spec, chosen))
        for stage in item.stages:
            emitter.add_copy(item.name, Copy(item.name, spec, stage, True, "forward"))
    if request.updates_whole:
        inputs = list(owned_inputs(request, inputs))
    for op in flow.ops:
        emit_op(emitter, op)
    ends = Outputs(emitter, {i.label: i for i in inputs})
    outputs = ends.emit()
    if emitter.routes:
        check_orders(emitter.steps)
    return PlanRecord(
        **request.terms(),
        inner=mesh,
        inputs=tuple(inputs),
        steps=tuple(emitter.steps),
        outputs=outputs,
        delayed=tuple(ends.delayed),
        opened=tuple(
            (c.axis, c.opened)
            for c in sorted(chosen, key=lambda c: mesh.index(c.axis))
            if c.axis != MICROBATCH_AXIS
        ),
        pinned=tuple(
            (axis, value, request.pinned_by.get(value, value))
            for value, placements in request.pins.items()
            for axis in placements
        ),
    )


def _may_stay_pending(request: Request) -> frozenset[str]:
    """Return the values of results that may stay pending; their parts keep their dtype."""
    if not request.pending_results:
        return frozenset()
    return frozenset(o.value for o in request.flow.outputs if o.kind == "result")


def _planned_input(
    request: Request, item: Input, spec: TensorSpec, chosen: Sequence[AxisChoice]
) -> PlannedInput:
    """Return the planned input, which ops use with ``spec``, and how it is stored."""
    planned_input = PlannedInput(item.name, item.label, item.kind, spec, item.stages)
    misaligned = tuple(c.misaligned[item.name] for c in chosen if item.name in c.misaligned)
    if misaligned:
        pinned = spec.with_placements(**{m.axis: m.placement for m in misaligned})
        planned_input = replace(planned_input, misaligned=misaligned, pinned=pinned)
    is_split = item.kind == "parameter" and item.label not in request.stored_whole
    if request.zero is not None and is_split:
        stored = stored_spec(planned_input.base, request.zero.axes)
        planned_input = replace(planned_input, stored=stored, zero=request.zero.level)
    return planned_input


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outputs:
    """Emits the steps that produce the outputs, and the optimizer phase. ``scattered``: (value,
    stage, parameter) -> the shard of a gradient that was already split within the backward.
    With a delay, ``delayed`` are the local gradients of the step before, which this step reads, and
    ``local`` the local gradients of this step, which are outputs."""

    emitter: Emitter
    inputs: Mapping[str, PlannedInput]
    scattered: Mapping[tuple[str, int, str], Copy] = field(
        default_factory=dict[tuple[str, int, str], Copy]
    )
    delayed: list[PlannedInput] = field(default_factory=list[PlannedInput])
    local: list[PlannedOutput] = field(default_factory=list[PlannedOutput])

    def emit(self) -> tuple[PlannedOutput, ...]:
        """Emit the steps after the ops, and return the outputs."""
        if self.emitter.request.stores_split:
            self.scattered = scatter_early(self.emitter, self.inputs)
        outputs, training = self.emitter.request.flow.outputs, self.emitter.request.training
        if training is not None and training.delay:
            pending = self._delay([self._start(output) for output in outputs])
            pending = [self._with_path(item) for item in pending]
        else:
            pending = [self._with_path(self._start(output)) for output in outputs]
        self._convert(pending)
        return (*self._finish(pending), *self.local)

    def _convert(self, pending: list[Pending]) -> None:
        """Emit the moves that convert outputs to their final specs."""
        if self._trains():
            self._choose_reductions(pending)
        convert(self.emitter, pending)

    def _delay(self, pending: Sequence[Pending]) -> list[Pending]:
        """Make the local gradients outputs, and return the pending outputs with the gradients of
        the step before in their places. A gradient of several stages is summed over them before it
        is kept; each of their ranks keeps the sum once."""
        e = self.emitter
        groups: dict[str, list[Pending]] = {}
        for item in pending:
            if item.output.kind == "gradient":
                groups.setdefault(item.of, []).append(item)
        tied = [items for items in groups.values() if len(items) > 1]
        self._convert([self._with_path(item) for items in tied for item in items])
        for items in tied:
            self._sum_over_stages(items)
        result = [item for item in pending if item.output.kind != "gradient"]
        for label, items in groups.items():
            by_rank = {e.request.stage_ranks[item.output.stage]: item for item in reversed(items)}
            kept = [
                item for item in items if by_rank[e.request.stage_ranks[item.output.stage]] is item
            ]
            values = tuple((item.output.stage, item.name) for item in kept)
            self.local.append(PlannedOutput("delayed", label, values, items[0].spec))
            name, stages = (
                e.fresh(f"delayed_{self.inputs[label].name}"),
                tuple(s for s, _ in values),
            )
            self.delayed.append(PlannedInput(name, label, "delayed", items[0].spec, stages))
            result += [
                Pending(item.output, name, item.spec, label, is_new=True, is_delayed=True)
                for item in kept
            ]
        return result

    def _final_spec(self, output: Output, spec: TensorSpec) -> TensorSpec:
        """Return the spec that an output with the present spec ``spec`` must have. A gradient is
        placed as the optimizer state of its parameter, new contents as the input is stored, and a
        result as the user states, by default replicated."""
        placements: Mapping[str, Placement]
        request = self.emitter.request
        if output.kind == "result":
            unchanged = {
                axis: p
                for axis, p in spec.sharding.items()
                if (request.split_results and isinstance(p, Shard))
                or (request.pending_results and isinstance(p, Partial))
            }
            placements = {**unchanged, **request.results.get(int(output.of), {})}
        else:
            item = self.inputs[str(output.of)]
            placements = (item.state if output.kind == "gradient" else item.held).sharding
        full = tuple(placements.get(axis, REPLICATE) for axis in spec.mesh.axes)
        return TensorSpec(spec.shape, spec.dtype, spec.mesh, full)

    def _start(self, output: Output) -> Pending:
        """Emit the sum of the output over microbatches, if there are any, and return it."""
        e = self.emitter
        by = Reader(output.stage, phase_of(output), "", "an output")
        copy = self.scattered.get((output.value, output.stage, str(output.of)))
        if copy is None:
            on_stage = e.copies_on(output.value, output.stage)
            copy = on_stage[0] if on_stage else None
        if copy is None:
            copy = e.transfer(e.copies[output.value][0], output.value, by)
        of = str(output.of) if output.kind != "result" else f"result {output.of}"
        name, spec = copy.name, copy.spec
        if MICROBATCH_AXIS in e.mesh.axes:
            if spec.placement(MICROBATCH_AXIS) == REPLICATE:
                pending = spec.with_placements(**{MICROBATCH_AXIS: Partial("sum")})
                move = Move("fill", MICROBATCH_AXIS, spec, pending)
                copy = e.move(copy, output.value, move, by)
                name, spec = copy.name, copy.spec
            dst = spec.with_placements(**{MICROBATCH_AXIS: REPLICATE})
            training = e.request.training if output.kind == "gradient" else None
            dst = gradient_sum_spec(dst, training.accumulate, of) if training else sum_spec(dst)
            result = e.fresh(f"{name}_total")
            stage = output.stage
            e.steps.append(
                Accumulate(result=result, operand=name, src=spec, dst=dst, stage=stage, of=of)
            )
            name, spec = result, dst
        return Pending(output, name, spec, of, is_new=name != copy.name)

    def _with_path(self, item: Pending) -> Pending:
        """Return the output with the moves that remain until it has its final spec."""
        e, output, spec, of = self.emitter, item.output, item.spec, item.of
        final_spec = self._final_spec(output, spec)
        for existing in () if item.is_new else e.copies_on(output.value, output.stage):
            if alike(existing.spec, final_spec):
                item.name, item.spec = existing.name, existing.spec
                return item
        # all_reduces of gradients share buckets, so `moves` must not split them into two steps
        trained = output.kind == "gradient" and self._trains()
        is_final = alike(spec, final_spec)
        first: tuple[Move, ...] = ()
        if output.kind == "gradient":
            first = scattering_moves(e.request, self.inputs[of], spec)
        src = first[-1].dst if first else spec
        rest = () if is_final else moves(src, final_spec, e.request.topology, whole=trained)
        path = (*first, *rest)
        if trained:
            path = reduce_in_float32(path)
        elif output.value in e.float32_parts and not item.is_new:
            path = round_after_sum(path, e.request.flow.metas[output.value].dtype)
        item.path = path
        if output.kind == "gradient" and self.inputs[of].owned is not None:
            item.bucket = "gradients"
        for move in first:
            if move.kind == "slice":  # now, so that all gradients are reduced in the same buckets
                move_one(e, item, item.path[0])
        return item

    def _choose_reductions(self, pending: Sequence[Pending]) -> None:
        """Replace the paths of gradients that end with all_reduces over several axes: each bucket
        is scattered over as many of the axes as is fastest. Each choice sums over the axes in the
        same order, so the choice changes no bit of a sum."""
        request = self.emitter.request
        groups: dict[tuple[tuple[str, ...], int, object], list[Pending]] = {}
        for item in pending:
            axes = [move.axis for move in item.path if move.kind == "all_reduce"]
            last_moves = item.path[len(item.path) - len(axes) :]
            are_last = all(move.kind == "all_reduce" for move in last_moves)
            if item.output.kind == "gradient" and len(axes) > 1 and are_last:
                key = (request.fastest_first(axes), item.output.stage, item.spec.dtype)
                groups.setdefault(key, []).append(item)
        for (axes, *_), items in groups.items():
            for bucket in fill_buckets(items, [item.spec.max_local_nbytes for item in items]):
                choices = [
                    [_reduced_over(item.path, axes, num) for item in bucket]
                    for num in range(len(axes))
                ]
                paths = min(choices, key=lambda paths: _bucket_seconds(paths, request.topology))
                for item, path in zip(bucket, paths, strict=True):
                    item.path, item.scattered = path, path[-1].kind == "all_gather"

    def _trains(self) -> bool:
        return self.emitter.request.training is not None

    def _finish(self, pending: Sequence[Pending]) -> tuple[PlannedOutput, ...]:
        """Return the outputs, after emitting the sums of gradients of parameters that several
        stages use, and the optimizer phase."""
        groups: dict[tuple[OutputKind, str], list[Pending]] = {}
        for item in pending:
            groups.setdefault((item.output.kind, item.of), []).append(item)
        outputs: list[PlannedOutput] = []
        for (kind, _), items in groups.items():
            # mutations are new values: not summed
            if len(items) > 1 and kind == "gradient" and not items[0].is_delayed:
                self._sum_over_stages(items)
            values = tuple((item.output.stage, item.name) for item in items)
            outputs.append(PlannedOutput(kind, items[0].output.of, values, items[0].spec))
        training = self.emitter.request.training
        if training is not None:
            update_parameters(self.emitter, self.inputs, outputs)
        return tuple(outputs)

    def _sum_over_stages(self, items: Sequence[Pending]) -> None:
        """Emit the sum of the gradients of one parameter over the stages that use it."""
        e = self.emitter
        total = sum_spec(items[0].spec) if self._trains() else items[0].spec
        results = tuple(e.fresh(f"{item.name}_tied") for item in items)
        stages = tuple(item.output.stage for item in items)
        axis = e.request.stage_axis
        assert axis is not None, "several stages have a gradient"
        e.steps.append(
            Redistribute(
                results=results,
                operands=tuple(item.name for item in items),
                moves=(over_stages(total, axis, len(items)),) * len(items),
                phase="optimizer",
                stage=stages[0],
                of=(items[0].of,),
                tied=stages,
            )
        )
        for item, result in zip(items, results, strict=True):
            item.name, item.spec, item.is_new = result, total, True


def _reduced_over(path: Sequence[Move], axes: Sequence[str], num: int) -> tuple[Move, ...]:
    """Return the path with other moves for its all_reduces over ``axes``, which are its last moves:
    the gradient is scattered over the first ``num`` axes, reduced over the others, and gathered. An
    axis whose split makes no shard smaller is reduced."""
    start = path[-len(axes)].src
    spec, new_moves, scattered = start, list(path[: -len(axes)]), list[str]()
    for at, axis in enumerate(axes):
        dst, kind = split_over(spec, axis, start) if at < num else spec, "reduce_scatter"
        if dst is spec:
            dst, kind = spec.with_placements(**{axis: REPLICATE}), "all_reduce"
        else:
            scattered.insert(0, axis)
        new_moves.append(Move(kind, axis, spec, dst))
        spec = dst
    for axis in scattered:
        new_moves.append(Move("all_gather", axis, spec, spec.with_placements(**{axis: REPLICATE})))
        spec = new_moves[-1].dst
    return reduce_in_float32(new_moves)


def _bucket_seconds(paths: Sequence[Sequence[Move]], topology: Topology) -> float:
    """Return the seconds of the messages of one bucket, whose gradients take these paths."""
    moves: dict[tuple[int, str, str, int], list[Move]] = {}
    for path in paths:
        for at, move in enumerate(path):
            if move.kind not in FREE_KINDS:
                key = (at, move.kind, move.axis, move.src.mesh.axis_size(move.axis))
                moves.setdefault(key, []).append(move)
    return sum(
        topology.collective_seconds(
            kind, axis, num=num, bytes_sent=sum(bytes_sent_together(together))
        )
        for (_, kind, axis, num), together in moves.items()
    )
