"""One rank's part of the lowering; see lower.py for the whole.

A `RankLowering` walks the rank's actions and turns plan steps into instructions. Communication
splits the local code into segments; which values a segment must return is known once the rank's
whole list is known, so segments are closed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtensor.daft import Buffer as WireBuffer
from dtensor.daft import Call, Collective, Free, Instruction, RankProgram, Recv, Send, Wait
from dtensor.runtime import optimize_step
from dtensor.runtime.code import CodeBuilder, Functions
from dtensor.runtime.schedule import Action, Grid
from dtensor.sharding.blocks import block, join
from dtensor.sharding.call import Local, OpCall
from dtensor.sharding.local import local_call
from dtensor.sharding.mesh import MICROBATCH_AXIS
from dtensor.sharding.placements import Partial, ReduceOp, Replicate, Shard
from dtensor.sharding.plan import Plan
from dtensor.sharding.redistribute import FREE_KINDS, Move, overlap, positions
from dtensor.sharding.spec import TensorSpec
from dtensor.sharding.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Step,
    TieSum,
    Transfer,
    Update,
    results_of,
)

SEND_WAIT_LAG = 2
MAX_LINES = 6
"""Of one Call. What it is given lives until it ends, so a backward in one piece would hold all
that its forward kept; a Call costs a few microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the program does besides computing: see optimize_step.py.

    gradients: return the gradients; optimizer: the table's name of the rank's optimizer (None: no
    step); state: plan input to the table's name, for parameters, buffers and constants.
    """

    gradients: bool = False
    optimizer: str | None = None
    state: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Segment:
    """Local code under construction; ``rename`` maps names in the code to names in the table."""

    code: CodeBuilder
    label: str
    microbatch: int | None
    table: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class RankLowering:
    plan: Plan
    rank: int
    grid: Grid | None
    functions: Functions
    device: torch.device
    roles: Roles
    cache: dict[object, object]
    instructions: list[Instruction | Segment] = field(default_factory=list)
    open: Segment | None = None
    nbytes: dict[str, int] = field(default_factory=dict)
    sends: list[tuple[int, str]] = field(default_factory=list)  # (action number, value)
    accumulated: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, str] = field(default_factory=dict)  # results copied before state changes
    fed: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    label: str = ""
    places: dict[int | None, dict[str, int]] = field(default_factory=dict)

    # -- where this rank stands --------------------------------------------------------------

    @property
    def coordinates(self) -> dict[str, int]:
        return self.plan.mesh.coordinates(self.rank)

    @property
    def pipeline_rank(self) -> int:
        axis = self.plan.stage_axis
        return self.coordinates[axis] if axis else 0

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank hosts."""
        axis = self.plan.stage_axis
        num = self.plan.mesh.axis_size(axis) if axis else 1
        return tuple(range(self.pipeline_rank, self.plan.num_stages, num))

    def at(self, microbatch: int | None) -> dict[str, int]:
        """Coordinates on the inner mesh."""
        found = self.places.get(microbatch)
        if found is None:
            own = self.coordinates
            found = {a: own[a] for a in self.plan.inner.axes if a != MICROBATCH_AXIS}
            if MICROBATCH_AXIS in self.plan.inner.axes:
                found[MICROBATCH_AXIS] = microbatch or 0
            self.places[microbatch] = found
        return found

    def peer(self, stage: int) -> int:
        """The rank with the same coordinates that hosts ``stage``."""
        axis = self.plan.stage_axis
        assert axis is not None
        num = self.plan.mesh.axis_size(axis)
        return self.plan.mesh.rank({**self.coordinates, axis: stage % num})

    @property
    def writes(self) -> bool:
        """Whether the program changes state. One that returns gradients leaves all as it is."""
        mutates = any(o.kind == "mutation" for o in self.plan.outputs)
        return self.roles.optimizer is not None or (mutates and not self.roles.gradients)

    # -- the whole list ------------------------------------------------------------------------

    def lower(self) -> RankProgram:
        plan = self.plan
        mine = set(self.stages)
        state = [
            i for i in plan.inputs
            if i.kind in ("parameter", "buffer", "constant") and mine & set(i.stages)
        ]
        arguments = [
            i for i in plan.inputs if i.kind in ("argument", "tangent") and mine & set(i.stages)
        ]
        self.held = tuple(i.name for i in state)
        self.fed = tuple(i.name for i in arguments)
        for item in (*state, *arguments):
            self.record(item.name, item.spec, None)
        self.label = "once"
        self.steps([s for s in plan.steps if _once(s) and self._concerns(s)], None, None)
        for number, action in enumerate(self._order()):
            self._wait_sends(number)
            self.action(action, number)
        self.label = "optimizer"
        self._wait_sends(None)
        self.steps([s for s in plan.steps if _last(s) and self._concerns(s)], None, None)
        outputs = self._outputs()
        return self._finish(outputs, state=[self.value(i.name, None) for i in state])

    def _order(self) -> Sequence[Action]:
        m = self.plan.num_microbatches
        if self.grid is not None:
            return self.grid.order(self.pipeline_rank)
        has_backward = any(
            isinstance(s, Compute) and s.phase == "backward" for s in self.plan.steps
        )
        order: list[Action] = []
        for microbatch in range(m):
            order += [Action("F", microbatch, s) for s in self.stages]
            if has_backward:
                order += [Action("B", microbatch, s) for s in reversed(self.stages)]
        return order

    def action(self, action: Action, number: int) -> None:
        phase = "forward" if action.kind == "F" else "backward"
        self.label = f"{action.kind}{action.microbatch} stage {action.stage}"
        self.close()
        self.steps(self._steps_of(phase, action.stage), action.microbatch, number, action.stage)
        self._accumulate(phase, action)
        self.close()

    def _steps_of(self, phase: str, stage: int) -> tuple[Step, ...]:
        """The steps of an action, the same for all ranks and microbatches."""
        key = ("steps", phase, stage)
        if key not in self.cache:
            self.cache[key] = tuple(
                s
                for s in self.plan.steps
                if not _once(s)
                and not _last(s)
                and _phase(s) == phase
                and (_stage(s) == stage or (isinstance(s, Transfer) and s.to_stage == stage))
            )
        found = self.cache[key]
        assert isinstance(found, tuple)
        return found

    def steps(
        self,
        steps: Sequence[Step],
        microbatch: int | None,
        number: int | None,
        stage: int | None = None,
    ) -> None:
        for step in steps:
            match step:
                case Compute():
                    self._compute(step, microbatch)
                case Convert():
                    self._convert(step, microbatch)
                case Transfer():
                    self._transfer(step, microbatch, number, stage)
                case Bucket():
                    optimize_step.bucket(self, step)
                case TieSum():
                    optimize_step.tie_sum(self, step)
                case Norm():
                    optimize_step.norm(self, step)
                case Accumulate() | Update():
                    pass  # accumulation follows its action; updates are one call, at the end
        if number is None and self.label == "optimizer":
            if self.writes:
                optimize_step.snapshot(self)
            optimize_step.mutate(self)
            optimize_step.update(self)

    def _concerns(self, step: Step) -> bool:
        match step:
            case Norm():
                return True
            case TieSum():
                return bool(set(step.stages) & set(self.stages))
            case Transfer():
                return step.stage in self.stages or step.to_stage in self.stages
            case _:
                return _stage(step) in self.stages

    # -- values and code -----------------------------------------------------------------------

    def value(self, name: str, microbatch: int | None) -> str:
        """The table's name of a plan value for a microbatch."""
        if name in self.roles.state:
            return self.roles.state[name]
        if name in self.accumulated:
            return self.accumulated[name]
        if microbatch is None or self.plan.num_microbatches == 1 or name in self._shared():
            return name
        return f"{name}@{microbatch}"

    def _shared(self) -> frozenset[str]:
        """Values that exist once a step: inputs and what is computed once."""
        key = "shared"
        if key not in self.cache:
            names = {i.name for i in self.plan.inputs}
            for step in self.plan.steps:
                if _once(step) or _last(step):
                    names.update(name for name, _ in results_of(step))
            self.cache[key] = frozenset(names)
        found = self.cache[key]
        assert isinstance(found, frozenset)
        return found

    def segment(self, microbatch: int | None) -> Segment:
        """The open segment; a new one where there is none."""
        if self.open is None:
            code = CodeBuilder(self.device)
            self.open = Segment(code, self.label, microbatch)
            self.instructions.append(self.open)
        return self.open

    def close(self) -> None:
        self.open = None

    def names(self, segment: Segment, values: Sequence[str], microbatch: int | None) -> None:
        for name in values:
            segment.table[name] = self.value(name, microbatch)

    def start(self, instruction: Instruction) -> None:
        self.close()
        self.instructions.append(instruction)

    def record(self, name: str, spec: TensorSpec, microbatch: int | None) -> None:
        here = self.at(microbatch)
        axes = () if self._even(spec) else self._splitting((spec,))
        key = (id(spec), *(here[axis] for axis in axes))
        if key not in self.cache:
            self.cache[key] = spec.local_nbytes(here)
        found = self.cache[key]
        assert isinstance(found, int)
        self.nbytes[self.value(name, microbatch)] = found

    def _even(self, spec: TensorSpec) -> bool:
        """Whether all shards have one size: no shard is larger than that of coordinate 0."""
        key = ("even", id(spec))
        if key not in self.cache:
            parts = 1
            for axis, placement in spec.sharding.items():
                parts *= spec.mesh.axis_size(axis) if isinstance(placement, Shard) else 1
            self.cache[key] = spec.max_local_nbytes * parts == spec.nbytes
        return bool(self.cache[key])

    def _splitting(self, specs: Sequence[TensorSpec | None]) -> tuple[str, ...]:
        """The axes whose coordinate the local tensors of these specs depend on."""
        key = ("splitting", *map(id, specs))  # the plan keeps the specs alive
        if key not in self.cache:
            used = {
                axis
                for spec in specs
                if spec is not None
                for axis, placement in spec.sharding.items()
                if not isinstance(placement, Replicate)
            }
            self.cache[key] = tuple(sorted(used))
        found = self.cache[key]
        assert isinstance(found, tuple)
        return found

    # -- steps -----------------------------------------------------------------------------------

    def _compute(self, step: Compute, microbatch: int | None) -> None:
        if self.open is not None and len(self.open.code.lines) >= MAX_LINES:
            self.close()
        segment = self.segment(microbatch)
        call = self._localized(step, microbatch)
        source = f"{step.op.source}: {step.op.source_text}" if step.op.source else None
        segment.code.call(call, step.operands, step.results, source)
        made = [name for name in step.results if name is not None]
        self.names(segment, (*step.operands, *made), microbatch)
        for name, spec in results_of(step):
            self.record(name, spec, microbatch)

    def _localized(self, step: Compute, microbatch: int | None) -> OpCall:
        """The rank's own call, computed once for all ranks and microbatches that share it."""
        if step.rule.localize is None:
            return step.op.call
        here = self.at(microbatch)
        used = self._splitting((*step.operand_specs, *step.result_specs))
        key = (id(step), tuple((a, here[a]) for a in used))
        if key not in self.cache:
            local = Local(step.operand_specs, step.result_specs, here)
            self.cache[key] = local_call(step.rule, step.op.call, local)
        found = self.cache[key]
        assert isinstance(found, OpCall)
        return found

    def _convert(self, step: Convert, microbatch: int | None) -> None:
        move = step.move
        if move.kind in FREE_KINDS:
            self._free_move(step, microbatch)
        else:
            self.communicate(
                move, step.operand, step.result, microbatch, step.source or None
            )
        self.record(step.result, move.dst, microbatch)

    def _free_move(self, step: Convert, microbatch: int | None) -> None:
        segment = self.segment(microbatch)
        move, here = step.move, self.at(microbatch)
        source = step.source or None
        self.names(segment, (step.operand, step.result), microbatch)
        match move.kind:
            case "slice":
                where = _within(move.src, move.dst, here, here)
                segment.code.apply(
                    block, "block", [step.operand], step.result, where, source=source
                )
            case "zero_fill" if here[move.axis] > 0:
                segment.code.apply(
                    torch.zeros_like, "zeros_like", [step.operand], step.result, source=source
                )
            case _:
                segment.code.line(
                    f"{step.result} = {step.operand}", [step.operand], [step.result], source
                )

    def communicate(
        self,
        move: Move,
        operand: str,
        result: str,
        microbatch: int | None,
        source: str | None,
    ) -> None:
        """The collective of one move: pack, start, wait, put together."""
        group = self.plan.mesh.group(self.rank, move.axis)
        here = self.at(microbatch)
        peers = [{**here, move.axis: i} for i in range(len(group))]
        dtype = move.src.dtype
        value_in, value_out = self.value(operand, microbatch), self.value(result, microbatch)
        pieces_in: list[str] = [value_in]
        shapes_in: list[tuple[int, ...]] = [move.src.local_shape(here)]
        pieces_out: list[str] = [value_out]
        shapes_out: list[tuple[int, ...]] = [move.dst.local_shape(here)]
        op: ReduceOp | None = None
        match move.kind:
            case "all_reduce":
                op = _op_of(move)
            case "reduce_scatter":
                op = _op_of(move)
                pieces_in, shapes_in = self._pack(move, operand, result, microbatch, peers)
            case "all_gather":
                pieces_out = [f"{value_out}.{i}" for i in range(len(group))]
                shapes_out = [move.src.local_shape(peer) for peer in peers]
            case "all_to_all":
                pieces_in, shapes_in = self._pack(move, operand, result, microbatch, peers)
                pieces_out = [f"{value_out}.{i}" for i in range(len(group))]
                shapes_out = [_shape(overlap(move.src, move.dst, peer, here)) for peer in peers]
            case _:
                raise AssertionError(f"{move.kind} does not communicate")
        label = f"{self.label}: {move.kind} {operand} over {move.axis}"
        self.start(
            Collective(
                move.kind,
                group,
                tuple(pieces_in),
                tuple(pieces_out),
                tuple(WireBuffer(s, dtype) for s in shapes_in),
                tuple(WireBuffer(s, dtype) for s in shapes_out),
                op,
                move.axis,
                label=label,
                source=source,
            )
        )
        self.start(Wait(tuple(pieces_out[:1]), label=label, source=source))
        if move.kind in ("all_gather", "all_to_all"):
            self._unpack(move, result, pieces_out, microbatch, peers, source)

    def _pack(
        self,
        move: Move,
        operand: str,
        result: str,
        microbatch: int | None,
        peers: Sequence[Mapping[str, int]],
    ) -> tuple[list[str], list[tuple[int, ...]]]:
        """A block for each peer: what it is to hold of what I hold."""
        segment = self.segment(microbatch)
        here = self.at(microbatch)
        self.names(segment, (operand,), microbatch)
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        for i, peer in enumerate(peers):
            name = f"{result}_to{i}"
            where = _within(move.src, move.dst, here, peer)
            segment.code.apply(block, "block", [operand], name, where)
            segment.table[name] = f"{self.value(result, microbatch)}.to{i}"
            names.append(segment.table[name])
            shapes.append(_shape(where))
            self.nbytes[names[-1]] = WireBuffer(shapes[-1], move.src.dtype).nbytes
        return names, shapes

    def _unpack(
        self,
        move: Move,
        result: str,
        pieces: Sequence[str],
        microbatch: int | None,
        peers: Sequence[Mapping[str, int]],
        source: str | None,
    ) -> None:
        segment = self.segment(microbatch)
        here = self.at(microbatch)
        local = [f"{result}_from{i}" for i in range(len(pieces))]
        segment.table.update(zip(local, pieces, strict=True))
        self.names(segment, (result,), microbatch)
        held = [move.dst.intervals(d, here) for d in range(len(move.dst.shape))]
        wheres = [positions(held, overlap(move.src, move.dst, peer, here)) for peer in peers]
        segment.code.apply(
            join, "join", local, result, move.dst.local_shape(here), *wheres,
            source=source, packed=True,
        )

    def _transfer(
        self, step: Transfer, microbatch: int | None, number: int | None, stage: int | None
    ) -> None:
        """Sent by the stage that has it, received by the one that needs it."""
        here = self.at(microbatch)
        buffer = WireBuffer(step.spec.local_shape(here), step.spec.dtype)
        channel = f"{step.phase} {step.stage}->{step.to_stage}"
        if _once(step):
            channel += " once"
        sends = step.stage in self.stages and (stage is None or stage == step.stage)
        receives = step.to_stage in self.stages and (stage is None or stage == step.to_stage)
        source = step.source or None
        what = f"{step.operand} from stage {step.stage} to {step.to_stage}"
        if sends and receives:  # both stages live on this rank
            segment = self.segment(microbatch)
            self.names(segment, (step.operand, step.result), microbatch)
            segment.code.line(
                f"{step.result} = {step.operand}", [step.operand], [step.result], source
            )
        elif self.peer(step.stage) == self.peer(step.to_stage):
            if sends:  # the value is here already when the other stage's action comes
                segment = self.segment(microbatch)
                self.names(segment, (step.operand, step.result), microbatch)
                segment.code.line(
                    f"{step.result} = {step.operand}", [step.operand], [step.result], source
                )
        elif sends:
            value = self.value(step.operand, microbatch)
            label = f"{self.label}: send {what}"
            self.start(
                Send(value, self.peer(step.to_stage), channel, buffer, label=label, source=source)
            )
            self.sends.append((number if number is not None else -1, value))
        elif receives:
            value = self.value(step.result, microbatch)
            label = f"{self.label}: receive {what}"
            self.start(
                Recv(value, self.peer(step.stage), channel, buffer, label=label, source=source)
            )
            self.start(Wait((value,), label=label, source=source))
        if receives or self.peer(step.stage) == self.peer(step.to_stage):
            self.record(step.result, step.spec, microbatch)

    def _wait_sends(self, number: int | None) -> None:
        """Complete the sends of two actions ago; all of them for None."""
        due = [v for n, v in self.sends if number is None or n <= number - SEND_WAIT_LAG]
        self.sends = [(n, v) for n, v in self.sends if v not in due]
        if due:
            self.start(Wait(tuple(dict.fromkeys(due)), label=f"{self.label}: sent"))

    def _accumulate(self, phase: str, action: Action) -> None:
        """Add this microbatch's outputs to their sums, in order of microbatches."""
        made_here = self._made_in(phase)
        last = action.microbatch == self.plan.num_microbatches - 1
        for step in self.plan.steps:
            if not isinstance(step, Accumulate) or step.stage != action.stage:
                continue
            if step.operand not in made_here:
                continue
            segment = self.segment(action.microbatch)
            total = step.result if last else f"{step.result}@{action.microbatch}"
            segment.table[step.result] = total
            segment.table[step.operand] = self.value(step.operand, action.microbatch)
            previous = self.accumulated.get(step.result)
            if previous is None:
                text = f"{step.result} = {step.operand}"
                segment.code.line(text, [step.operand], [step.result], None)
            else:
                before = f"{step.result}_before"
                segment.table[before] = previous
                segment.code.line(
                    f"{step.result} = {before} + {step.operand}",
                    [before, step.operand], [step.result], None,
                )
            self.accumulated[step.result] = total
            self.nbytes[total] = step.dst.local_nbytes(self.at(None))

    def _made_in(self, phase: str) -> frozenset[str]:
        """The values that actions of a phase make."""
        if phase not in self.cache:
            self.cache[phase] = frozenset(
                name
                for s in self.plan.steps
                if not _once(s) and not _last(s) and _phase(s) == phase
                for name, _ in results_of(s)
            )
        found = self.cache[phase]
        assert isinstance(found, frozenset)
        return found

    # -- outputs and lifetimes -------------------------------------------------------------------

    def _outputs(self) -> dict[str, str]:
        """Program output name to table name, for what this rank returns."""
        found: dict[str, str] = {}
        for output in self.plan.outputs:
            wanted = output.kind == "result" or (
                output.kind == "gradient" and self.roles.gradients
            )
            if not wanted:
                continue
            for stage, value in output.values[:1]:
                if stage in self.stages:
                    name = f"{output.kind} {output.of}"
                    found[name] = self.snapshots.get(name) or self.value(value, None)
        if self.roles.optimizer is not None and any(isinstance(s, Norm) for s in self.plan.steps):
            norm = next(s for s in self.plan.steps if isinstance(s, Norm))
            found["norm"] = norm.result
        return found

    def _finish(self, outputs: Mapping[str, str], state: Sequence[str]) -> RankProgram:
        """Close all segments: each returns what later instructions read; then free and finish."""
        self.close()
        if outputs:
            optimize_step.publish(self, outputs)
        self.returned = tuple(outputs)
        state_names = list(state)
        fed = list(self.fed)
        if self.roles.optimizer is not None:
            state_names.append(self.roles.optimizer)
            fed.append("options")
        permanent = {*state_names, *fed, *outputs}
        reads = _all_reads(self.instructions)
        last: dict[str, int] = {}
        for number, names in enumerate(reads):
            last.update(dict.fromkeys(names, number))
        final: list[Instruction] = []
        for number, item in enumerate(self.instructions):
            unread: tuple[str, ...] = ()
            if isinstance(item, Segment):
                made = [n for n in item.code.defined if last.get(item.table[n], -1) > number
                        or item.table[n] in permanent]
                inputs = tuple(item.table[n] for n in item.code.inputs)
                name = self.functions.add(item.code, self._function_name(item), made)
                final.append(
                    Call(name, inputs, tuple(item.table[n] for n in made),
                         item.writes,
                         label=item.label, source=item.code.user_lines())
                )
            else:
                final.append(item)
                if isinstance(item, Collective | Recv):
                    outs = item.outputs if isinstance(item, Collective) else (item.value,)
                    unread = tuple(v for v in outs if v not in last and v not in permanent)
            dead = tuple(
                dict.fromkeys(
                    v for v in (*reads[number], *unread)
                    if last.get(v, number) == number and v not in permanent
                )
            )
            if dead:
                final.append(Free(dead, label=self.label))
        return RankProgram(
            instructions=_wait_before_free(final),
            inputs=tuple(fed),
            outputs=tuple(outputs),
            state=tuple(state_names),
            nbytes=tuple(sorted(self.nbytes.items())),
        )

    def _function_name(self, segment: Segment) -> str:
        kind = segment.label.split(":")[0].replace(" ", "_")
        return f"{self.plan.name}_{kind}".replace("@", "_")


def _all_reads(items: Sequence[Instruction | Segment]) -> list[tuple[str, ...]]:
    """What each item reads; a collective reads its inputs until it is waited for."""
    started: dict[str, tuple[str, ...]] = {}
    reads: list[tuple[str, ...]] = []
    for item in items:
        names = _reads(item)
        if isinstance(item, Collective):
            started.update(dict.fromkeys(item.outputs, item.inputs))
        if isinstance(item, Wait):
            names += tuple(v for done in item.values for v in started.get(done, ()))
        reads.append(names)
    return reads


def _reads(item: Instruction | Segment) -> tuple[str, ...]:
    match item:
        case Segment():
            return tuple(item.table[name] for name in item.code.inputs)
        case Collective():
            return item.inputs
        case Send():
            return (item.value,)
        case Wait():
            return item.values
        case _:
            return ()


def _wait_before_free(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """A value that is being sent may be freed only once its send is complete."""
    sending: set[str] = set()
    result: list[Instruction] = []
    for item in instructions:
        match item:
            case Send(value):
                sending.add(value)
            case Wait(values):
                sending.difference_update(values)
            case Free(values):
                held = tuple(v for v in values if v in sending)
                if held:
                    result.append(Wait(held, label=item.label))
                    sending.difference_update(held)
            case _:
                pass
        result.append(item)
    return tuple(result)


def _within(
    src: TensorSpec, dst: TensorSpec, sender: Mapping[str, int], receiver: Mapping[str, int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The block of ``sender``'s shard that ``receiver`` is to hold, in local positions."""
    held = [src.intervals(d, sender) for d in range(len(src.shape))]
    return positions(held, overlap(src, dst, sender, receiver))


def _shape(where: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, ...]:
    return tuple(sum(hi - lo for lo, hi in intervals) for intervals in where)


def _op_of(move: Move) -> ReduceOp:
    placement = move.src.placement(move.axis)
    assert isinstance(placement, Partial)
    return placement.op


def _stage(step: Step) -> int:
    match step:
        case TieSum():
            return step.stages[0]
        case Norm():
            return 0
        case _:
            return step.stage


def _once(step: Step) -> bool:
    return isinstance(step, Compute | Convert | Transfer) and step.once


def _last(step: Step) -> bool:
    match step:
        case Accumulate() | Bucket() | TieSum() | Norm() | Update():
            return True
        case _:
            return step.phase == "optimizer"


def _phase(step: Step) -> str:
    return step.phase if isinstance(step, Compute | Convert | Transfer) else "optimizer"


__all__ = ["RankLowering", "Roles", "Segment"]
