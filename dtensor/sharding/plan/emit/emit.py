"""Emits the steps of a plan after the strategies of all axes have been chosen.

    emit(request, axis_problem, chosen) -> PlanRecord

Ops keep their order; their operands are converted to the specs that they need (values.py). After
the last microbatch, each output is summed over microbatches and converted to its final spec. With
delayed gradients, the sum is an output, and the sum of the step before is converted in its place.
Reductions of gradients over one axis share buckets. A bucket that is pending over several axes is
scattered over all axes but the last, reduced over the last, and gathered, where that is faster.
Gradients of a parameter that several stages use are summed over these stages. The norm and the
updates come last. Gradients of parameters that are stored split are handled in stored_gradients.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.numerics import is_narrow
from dtensor.sharding.plan.choose.axis_problem import AxisChoice, AxisProblem
from dtensor.sharding.plan.choose.routes import check_orders
from dtensor.sharding.plan.dataflow import Input, Output, OutputKind
from dtensor.sharding.plan.emit.ring import emit_op
from dtensor.sharding.plan.emit.stored_gradients import (
    gather_updated,
    scatter_early,
    scattering_moves,
)
from dtensor.sharding.plan.emit.values import Copy, Emitter, Reader
from dtensor.sharding.plan.owners import owned_inputs, owner_of, update_seconds
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
    Norm,
    Redistribute,
    StepPhase,
    Update,
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
class _PendingOutput:
    """An output that is being converted to its final spec. ``name`` and ``spec`` are its present
    value, ``path`` the moves that remain, and ``of`` the label of an input, or "result 0".
    ``is_new``: whether it is no result of an op. ``scattered``: whether the path reduces a gradient
    by scattering and gathering it. ``is_delayed``: whether it is a gradient of the step before.
    ``bucket``: the name of the buckets in which all its messages travel; "" if only its reductions
    do."""

    output: Output
    name: str
    spec: TensorSpec
    of: str
    is_new: bool
    path: tuple[Move, ...] = ()
    scattered: bool = False
    is_delayed: bool = False
    bucket: str = ""

    def is_bucketed(self) -> bool:
        """Return whether the next move of a trained parameter or its gradient is in a bucket."""
        move = self.path[0]
        is_message = move.kind not in FREE_KINDS
        return (
            move.reduces
            or (self.scattered and move.kind == "all_gather")
            or (bool(self.bucket) and is_message)
        )


@dataclass(slots=True)
class Outputs:
    """Emits the steps that produce the outputs, and the optimizer phase. ``scattered``: (value,
    stage, parameter) -> the shard of a gradient that was already split within the backward.
    ``delayed``: the local gradients of the step before, and ``local``: those of this step."""

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

    def _convert(self, pending: list[_PendingOutput]) -> None:
        """Emit the moves that convert outputs to their final specs."""
        if self._trains():
            self._choose_reductions(pending)
        self._advance_all(pending)

    def _delay(self, pending: Sequence[_PendingOutput]) -> list[_PendingOutput]:
        """Make the local gradients outputs, and return the pending outputs with the gradients of
        the step before in their places. A gradient of several stages is summed over them before it
        is kept; each of their ranks keeps the sum once."""
        e = self.emitter
        groups: dict[str, list[_PendingOutput]] = {}
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
                _PendingOutput(item.output, name, item.spec, label, is_new=True, is_delayed=True)
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

    def _start(self, output: Output) -> _PendingOutput:
        """Emit the sum of the output over microbatches, if there are any, and return it."""
        e = self.emitter
        by = Reader(output.stage, _phase(output), "", "an output")
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
        return _PendingOutput(output, name, spec, of, is_new=name != copy.name)

    def _with_path(self, item: _PendingOutput) -> _PendingOutput:
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
                self._move(item, item.path[0])
        return item

    def _choose_reductions(self, pending: Sequence[_PendingOutput]) -> None:
        """Replace the paths of gradients that end with all_reduces over several axes: each bucket
        is scattered over as many of the axes as is fastest. Each choice sums over the axes in the
        same order, so the choice changes no bit of a sum."""
        request = self.emitter.request
        groups: dict[tuple[tuple[str, ...], int, object], list[_PendingOutput]] = {}
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

    def _advance(self, pending: list[_PendingOutput]) -> None:
        """Emit the next move of each output; reductions of gradients on one axis share buckets."""
        buckets: dict[tuple[object, ...], list[_PendingOutput]] = {}
        for item in pending:
            if not item.path:
                continue
            move = item.path[0]
            trained = item.output.kind == "gradient" and self._trains()
            if trained and item.is_bucketed():
                key = (move.axis, item.output.stage, item.spec.dtype, move.kind)
                buckets.setdefault(key, []).append(item)
            else:
                self._move(item, move)
        for items in buckets.values():
            for group in fill_buckets(items, [item.spec.max_local_nbytes for item in items]):
                self._reduce_bucket(group)

    def _trains(self) -> bool:
        return self.emitter.request.training is not None

    def _move(self, item: _PendingOutput, move: Move) -> None:
        """Emit the next move of one output."""
        after_microbatches = MICROBATCH_AXIS in self.emitter.mesh.axes or self._trains()
        producer = self.emitter.request.flow.producers.get(item.output.value)
        result = self.emitter.fresh(f"{item.name}_{move.suffix}")
        self.emitter.steps.append(
            Redistribute(
                results=(result,),
                operands=(item.name,),
                moves=(move,),
                phase="optimizer" if after_microbatches else _phase(item.output),
                stage=item.output.stage,
                source=producer.source if producer else "",
                of=(item.of,) if item.bucket else (),
                why=f"{item.of} is wanted as {move.dst}",
            )
        )
        item.name, item.spec, item.path = result, move.dst, item.path[1:]

    def _reduce_bucket(self, items: Sequence[_PendingOutput]) -> None:
        """Emit the next move of several gradients as one bucket, which is one message."""
        e = self.emitter
        first = items[0].path[0]
        results = tuple(e.fresh(f"{item.name}_{first.suffix}") for item in items)
        e.steps.append(
            Redistribute(
                bucket=e.fresh(f"{items[0].bucket or 'gradients'}_{first.axis}"),
                results=results,
                operands=tuple(item.name for item in items),
                moves=tuple(item.path[0] for item in items),
                phase="optimizer",
                stage=items[0].output.stage,
                of=tuple(item.of for item in items),
            )
        )
        for item, result in zip(items, results, strict=True):
            item.name, item.spec, item.path = result, item.path[0].dst, item.path[1:]

    def _finish(self, pending: Sequence[_PendingOutput]) -> tuple[PlannedOutput, ...]:
        """Return the outputs, after emitting the sums of gradients of parameters that several
        stages use, and the optimizer phase."""
        groups: dict[tuple[OutputKind, str], list[_PendingOutput]] = {}
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
            self._update_parameters(training.trained, outputs)
        return tuple(outputs)

    def _sum_over_stages(self, items: Sequence[_PendingOutput]) -> None:
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

    def _update_parameters(self, trained: frozenset[str], outputs: Sequence[PlannedOutput]) -> None:
        """Emit the norm of gradients, the updates, and the gathers of updated parameters."""
        training = self.emitter.request.training
        assert training is not None
        grads = [o for o in outputs if o.kind == "gradient" and str(o.of) in trained]
        wholes = self._move_parameters(self._on_owners(grads))
        if training.clip_grad_norm is not None or training.scaled:
            self.emitter.steps.append(
                Norm(
                    result=self.emitter.fresh("grad_norm"),
                    operands=tuple((*o.values[0], str(o.of)) for o in grads),
                    specs=tuple(o.spec for o in grads),
                    max_norm=math.inf if (limit := training.clip_grad_norm) is None else limit,
                    scaled=training.scaled,
                )
            )
        updaters = {
            label: (number, updater)
            for number, updater in enumerate(training.updaters)
            for label in updater.trained
        }
        updates: list[Update] = []
        for output in grads:
            number, updater = updaters[str(output.of)]
            if updater.owned is not None:
                continue
            for stage, value in output.values:
                elements = output.spec.max_local_nbytes // output.spec.dtype.itemsize
                dtype = self.inputs[str(output.of)].spec.dtype
                master = training.master_weights and is_narrow(dtype)
                itemsize = 4 if master else dtype.itemsize
                updates.append(
                    Update(
                        parameter=str(output.of),
                        gradient=value,
                        spec=replace(output.spec, dtype=dtype),
                        stage=stage,
                        optimizer=updater.optimizer,
                        number=number,
                        state_bytes=elements * itemsize * updater.state_tensors,
                        master_bytes=elements * itemsize if master else 0,
                    )
                )

        self.emitter.steps += updates
        self._update_whole(wholes, {label: n for label, (n, _) in updaters.items()})
        if self.emitter.request.stores_split or wholes:
            gather_updated(self.emitter, self.inputs, grads)

    def _on_owners(self, grads: Sequence[PlannedOutput]) -> list[tuple[PlannedInput, int, str]]:
        """Return (parameter, stage, gradient) of each update of a whole parameter. Stages on one
        rank that share a parameter update it once."""
        ranks = self.emitter.request.stage_ranks
        found: dict[tuple[str, int], tuple[PlannedInput, int, str]] = {}
        for output in grads:
            item = self.inputs[str(output.of)]
            for stage, value in output.values if item.owned is not None else ():
                found.setdefault((item.label, ranks[stage]), (item, stage, value))
        return list(found.values())

    def _move_parameters(
        self, owned: Sequence[tuple[PlannedInput, int, str]]
    ) -> list[tuple[PlannedInput, str, _PendingOutput]]:
        """Emit the moves of parameters to their owners. Return (parameter, its gradient, its moved
        value) of each."""
        moving: list[_PendingOutput] = []
        for item, stage, _ in owned:
            assert item.owned is not None
            path = moves(item.held, item.owned, self.emitter.request.topology, whole=True)
            output = Output(item.name, "gradient", item.label, stage)
            whole = _PendingOutput(output, item.name, item.held, item.label, True, path)
            moving.append(replace(whole, bucket="parameters"))
        self._advance_all(moving)
        return [(i, value, m) for (i, _, value), m in zip(owned, moving, strict=True)]

    def _advance_all(self, pending: list[_PendingOutput]) -> None:
        while any(item.path for item in pending):
            self._advance(pending)

    def _update_whole(
        self, wholes: Sequence[tuple[PlannedInput, str, _PendingOutput]], numbers: Mapping[str, int]
    ) -> None:
        """Emit the updates of whole parameters on their owners, and the moves of the new values
        that other ranks write into their shards."""
        e, training = self.emitter, self.emitter.request.training
        assert training is not None
        first, owners = len(e.steps), list[tuple[PlannedInput, str, _PendingOutput, str]]()
        moving: list[_PendingOutput] = []
        for item, gradient, whole in wholes:
            assert item.owned is not None
            result = e.fresh(f"{item.name}_updated")
            owners.append((item, gradient, whole, result))
            path = moves(item.owned, item.updated, e.request.topology, whole=True)
            moving.append(replace(whole, name=result, path=path, spec=item.owned, bucket="updated"))
        self._advance_all(moving)
        load: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}
        updates: list[Update] = []
        for (item, gradient, whole, result), moved in zip(owners, moving, strict=True):
            number = numbers[item.label]
            updater = training.updaters[number]
            assert item.owned is not None and updater.owned is not None
            cost = updater.owned[item.label]
            master = training.master_weights and is_narrow(item.spec.dtype)
            update = Update(
                parameter=item.label,
                gradient=gradient,
                spec=item.owned,
                stage=whole.output.stage,
                optimizer=updater.optimizer,
                number=number,
                state_bytes=cost.state_bytes,
                master_bytes=item.spec.nbytes * 4 // item.spec.dtype.itemsize if master else 0,
                owner=owner_of(item.owned),
                value=whole.name,
                result=result,
                written=moved.name,
                flops=cost.flops,
            )
            seconds = update_seconds(e.request.topology, item.spec.nbytes, cost)
            updates.append(update)
            if update.owner:
                at = update.stage, update.owner
                load[at] = load.get(at, 0.0) + seconds
        fullest = dict(sorted(load, key=load.__getitem__))
        e.steps[first:first] = [
            replace(u, is_fullest=not u.owner or u.owner == fullest[u.stage]) for u in updates
        ]


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


def _phase(output: Output) -> StepPhase:
    """Return the phase that produces the output."""
    return "forward" if output.kind == "result" else "backward"
