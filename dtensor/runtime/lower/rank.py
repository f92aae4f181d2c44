"""One rank's part of the lowering; see program.py for the whole.

A `RankLowering` walks the rank's actions and turns plan steps into instructions. Communication
splits the local code into segments; which values a segment must return is known once the rank's
whole list is known, so segments are closed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtensor.daft import Instruction, RankProgram, Wait
from dtensor.runtime.lower import buckets, close_segments, conversions, step_end
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import CodeBuilder, Functions
from dtensor.runtime.lower.segment import Segment
from dtensor.runtime.lower.sums import accumulate
from dtensor.runtime.schedule import Action
from dtensor.sharding.ops.call import Local, OpCall, slots_of
from dtensor.sharding.plan.cost.seconds import step_seconds
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Step,
    TieSum,
    Transfer,
    Update,
    operands_of,
    results_of,
)
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Replicate, Shard
from dtensor.sharding.spec.shards import local_call
from dtensor.sharding.spec.spec import TensorSpec

MAX_LINES = 6
"""Of one Call. What it is given lives until it ends, so a backward in one piece would hold all
that its forward kept; a Call costs a few microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the program does besides computing: see step_end.py.

    gradients: return the gradients; optimizer: the table's name of the rank's optimizer (None: no
    step); state: plan input to the table's name, for parameters, buffers and constants.
    """

    gradients: bool = False
    optimizer: str | None = None
    state: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, kw_only=True)
class RankLowering:
    plan: Plan
    rank: int
    actions: Actions
    functions: Functions
    device: torch.device
    roles: Roles
    cache: dict[object, object]
    instructions: list[Instruction | Segment] = field(default_factory=list)
    open: Segment | None = None
    nbytes: dict[str, int] = field(default_factory=dict)
    sends: list[tuple[int, str]] = field(default_factory=list)  # (step of its receive, value)
    accumulated: dict[str, str] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)  # sums that share their storage with nothing
    snapshots: dict[str, str] = field(default_factory=dict)  # results copied before state changes
    fed: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    label: str = ""
    began: int = 0  # where the action under way begins
    posted: int = 0  # where its receives go: the beginning of the action before
    gathers: dict[str, buckets.Gather] = field(default_factory=dict)  # started; by value
    priced: bool = False  # segments are told how long they take
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
        return self.plan.hosted[self.pipeline_rank]

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
        return self.plan.mesh.rank({**self.coordinates, axis: self.plan.stage_ranks[stage]})

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
            i
            for i in plan.inputs
            if i.kind in ("parameter", "buffer", "constant") and mine & set(i.stages)
        ]
        arguments = [
            i for i in plan.inputs if i.kind in ("argument", "tangent") and mine & set(i.stages)
        ]
        numbers = close_segments.numbers_of(plan)
        self.fed = tuple(dict.fromkeys((*(i.name for i in arguments), *numbers)))
        for item in (*state, *arguments):
            self.record(item.name, item.held, None)
        self.label = "once"
        self.steps([s for s in plan.steps if s.once and self._concerns(s)], None)
        for step, action in self.actions.of(self.pipeline_rank):
            self._wait_sends(step)
            self.action(action)
        self.label = "optimizer"
        self._wait_sends(None)
        self.steps([s for s in plan.steps if s.phase == "optimizer" and self._concerns(s)], None)
        outputs = close_segments.outputs_of(self)
        return close_segments.finish(self, outputs, state=[self.value(i.name, None) for i in state])

    def action(self, action: Action) -> None:
        self.label = f"{action.kind}{action.microbatch} stage {action.stage}"
        self.close()
        self.posted, self.began = self.began, len(self.instructions)
        steps = self.actions.steps(action.kind, action.stage)
        self.steps(steps, action.microbatch, action.stage)
        accumulate(self, action)
        self.close()

    def steps(
        self,
        steps: Sequence[Step],
        microbatch: int | None,
        stage: int | None = None,
    ) -> None:
        for step in steps:
            if self.gathers:
                buckets.finish(self, operands_of(step), microbatch)
            match step:
                case Compute():
                    self._compute(step, microbatch)
                case Convert():
                    conversions.convert(self, step, microbatch)
                case Transfer():
                    conversions.transfer(self, step, microbatch, stage)
                case Bucket() if not step.in_place:
                    buckets.bucket(self, step, microbatch)
                case TieSum():
                    step_end.tie_sum(self, step)
                case Norm():
                    step_end.norm(self, step)
                case Accumulate() | Update() | Bucket():
                    continue  # accumulation follows its action; updates are one call, at the end
            self.price(self.open, step)
        if self.label == "optimizer":
            if self.writes:
                step_end.snapshot(self)
            step_end.mutate(self)
            step_end.update(self)

    def _concerns(self, step: Step) -> bool:
        match step:
            case Norm():
                return True
            case TieSum():
                return bool(set(step.stages) & set(self.stages))
            case Transfer():
                return step.stage in self.stages or step.to_stage in self.stages
            case _:
                return step.stage in self.stages

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
        """Values that exist once a step: inputs, numbers, and what is computed once."""
        if "shared" not in self.cache:
            names = {*(i.name for i in self.plan.inputs), *close_segments.numbers_of(self.plan)}
            for step in self.plan.steps:
                if step.once or step.phase == "optimizer":
                    names.update(name for name, _ in results_of(step))
            self.cache["shared"] = frozenset(names)
        return self._names("shared")

    def _names(self, key: str) -> frozenset[str]:
        found = self.cache[key]
        assert isinstance(found, frozenset)
        return found

    def _value_names(self) -> frozenset[str]:
        if "value names" not in self.cache:
            self.cache["value names"] = frozenset(self.plan.value_specs())
        return self._names("value names")

    def segment(self, microbatch: int | None) -> Segment:
        """The open segment; a new one where there is none."""
        if self.open is None:
            code = CodeBuilder(self.device, self._value_names())
            self.open = Segment(code, self.label, microbatch)
            self.instructions.append(self.open)
        return self.open

    def short_segment(self, microbatch: int | None) -> Segment:
        if self.open is not None and len(self.open.code.lines) >= MAX_LINES:
            self.close()
        return self.segment(microbatch)

    def close(self) -> None:
        self.open = None

    def price(self, segment: Segment | None, step: Step) -> None:
        """Count the step's own work as the segment's."""
        if self.priced and segment is not None:
            key = ("seconds", id(step))
            if key not in self.cache:
                self.cache[key] = step_seconds(self.plan, step, step.stage)[0]
            found = self.cache[key]
            assert isinstance(found, float)
            segment.seconds += found

    def names(self, segment: Segment, values: Sequence[str], microbatch: int | None) -> None:
        for name in values:
            segment.table[name] = self.value(name, microbatch)

    def start(self, instruction: Instruction) -> None:
        self.close()
        self.instructions.append(instruction)

    def start_early(self, instruction: Instruction) -> None:
        """At the beginning of the action before this one; in the order of these calls."""
        self.instructions.insert(self.posted, instruction)
        self.posted += 1
        self.began += 1

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
        segment = self.short_segment(microbatch)
        call = self._localized(step, microbatch)
        source = f"{step.op.source}: {step.op.source_text}" if step.op.source else None
        segment.code.call(call, step.operands, step.results, source)
        made = [name for name in step.results if name is not None]
        self.names(segment, (*step.operands, *made, *slots_of(step.op.call)), microbatch)
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

    def _wait_sends(self, step: int | None) -> None:
        """Complete the sends whose receives start at earlier steps; all of them for None.

        So a wait needs what happens at earlier steps alone, and the steps are an order of all
        ranks: waits form no circle, however many stages a rank has.
        """
        # a wait completes all sends of its value, so it comes when the last of them is due
        latest = {value: at for at, value in sorted(self.sends)}
        due = [v for v, at in latest.items() if step is None or at < step]
        self.sends = [(at, v) for at, v in self.sends if v not in due]
        if due:
            self.start(Wait(tuple(dict.fromkeys(due)), label=f"{self.label}: sent"))
