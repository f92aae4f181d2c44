"""One rank's list of instructions while it is being put together.

    builder = RankBuilder(shared=ProgramContext(plan, actions, device), rank=0, ...)
    segment = builder.segment()                   # local code, up to the next communication
    builder.start(Collective(...))                # which closes it

Communication splits the local code into segments; the values that a segment must return are known
once the rank's whole list is known, so segments are closed at the end (program.py). In the rank's
table a plan value of microbatch i is called `name@i`; one that exists once a step keeps its name.

Not here: the lowering of a step (moves.py, step_end.py, program.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dtensor.daft import Buffer, Collective, Instruction, Label, Wait
from dtensor.daft.ir.instructions import Kind
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import CodeBuilder, Functions
from dtensor.runtime.lower.detect_nan import DetectNan
from dtensor.runtime.lower.overlap import early, reductions_of
from dtensor.runtime.optimizer.shard_optimizer import NUMBERS
from dtensor.runtime.schedule import Kind as ActionKind
from dtensor.runtime.schedule.clock import Stretch
from dtensor.sharding.ops.call import STEP, Local, OpCall, slots_of
from dtensor.sharding.plan.cost.seconds import StepSeconds, step_seconds
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Step
from dtensor.sharding.redistribute.topology import sent_bytes
from dtensor.sharding.rules.rule import leaves_float32
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import ReduceOp, Replicate, Shard
from dtensor.sharding.spec.spec import TensorSpec

MAX_LINES = 6
"""Most lines of one Call. Inputs of a Call live until it ends, so a backward in one piece would
hold all values that its forward kept; a Call costs a few microseconds."""
MAX_FORWARD_LINES = 200
"""The same without a backward: a value dies inside the Call that makes it, and fewer Calls mean
that fewer values outlive one. A decode step has hundreds of lines of 3 us each."""


_ONCE = Label("once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The tasks of a program besides computing: see step_end.py.

    gradients: return the gradients; optimizer: the table's name of the rank's optimizer (None: no
    step); groups: of its parameters (empty: one group of all), and keys: of the state in each;
    labels: by name, a parameter's label there, if it differs; numbers: keys of entries that are one
    number for a parameter; state: plan input to the table's name, for parameters, buffers and
    constants; detect_nan: check the result of each op (detect_nan.py).
    """

    gradients: bool = False
    optimizer: str | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    numbers: frozenset[str] = NUMBERS
    state: Mapping[str, str] = field(default_factory=dict[str, str])
    detect_nan: DetectNan = False

    def called(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """The parameters' labels."""
        return tuple(self.labels.get(name, name) for name in parameters)


class ProgramContext:
    """The facts that all ranks of a program share, computed once. The plan keeps its steps and
    specs alive, so they are distinguished by identity."""

    def __init__(
        self,
        plan: Plan,
        actions: Actions,
        device: torch.device,
        *,
        priced: bool = False,
        numbered: bool = False,
    ) -> None:
        self.plan: Plan = plan
        self.actions: Actions = actions
        self.device: torch.device = device
        self.priced = priced  # segments note their seconds
        self.numbered = numbered  # the program takes its step's number, even if it draws nothing
        self._splitting: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._even: dict[int, bool] = {}
        self._nbytes: dict[tuple[int, ...], int] = {}
        self._calls: dict[object, OpCall] = {}
        self._seconds: dict[int, StepSeconds] = {}
        self._overlapped: dict[tuple[ActionKind, int], tuple[tuple[Step, ...], frozenset[int]]] = {}

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that a program takes at each run."""
        calls = (s.op.call for s in self.plan.steps if s.op is not None)
        names = dict.fromkeys(name for call in calls for name in slots_of(call))
        return tuple(names | {STEP: None} if self.numbered else names)

    def agrees(self, roles: Roles) -> bool:
        """Whether the program has a commit point: it writes state, or a failed rank would leave
        others with wrong results, or with another count of their random numbers."""
        mutates = any(w.how != "in place" for w in self.plan.state_writes)
        writes = roles.optimizer is not None or (mutates and not roles.gradients)
        together = bool(self.plan.collectives or self.numbers) and self.plan.mesh.size > 1
        return writes or together

    @cached_property
    def max_lines(self) -> int:
        """Most lines of one Call."""
        is_forward = all(step.phase == "forward" for step in self.plan.steps)
        return MAX_FORWARD_LINES if is_forward else MAX_LINES

    @cached_property
    def producers(self) -> dict[str, Step]:
        return {name: step for step in self.plan.steps for name in step.gives}

    @cached_property
    def once(self) -> frozenset[str]:
        """Values that exist once a step: inputs, numbers, and results of steps that run once."""
        names = {*(i.name for i in self.plan.inputs), *self.numbers}
        for step in self.plan.steps:
            if step.once or step.phase == "optimizer":
                names.update(name for name in step.gives)
        return frozenset(names)

    @cached_property
    def value_names(self) -> frozenset[str]:
        return frozenset(self.plan.value_specs())

    def splitting(self, specs: Sequence[TensorSpec | None]) -> tuple[str, ...]:
        """The axes on whose coordinate the local tensors of these specs depend."""
        key = tuple(map(id, specs))
        if key not in self._splitting:
            used = {
                axis
                for spec in specs
                if spec is not None
                for axis, placement in spec.sharding.items()
                if not isinstance(placement, Replicate)
            }
            self._splitting[key] = tuple(sorted(used))
        return self._splitting[key]

    def nbytes(self, spec: TensorSpec, here: Mapping[str, int]) -> int:
        """Bytes of the shard of the rank ``here``."""
        axes = () if self._is_even(spec) else self.splitting((spec,))
        key = (id(spec), *(here[axis] for axis in axes))
        if key not in self._nbytes:
            self._nbytes[key] = spec.local_nbytes(here)
        return self._nbytes[key]

    def _is_even(self, spec: TensorSpec) -> bool:
        """Whether all shards have one size: no shard is larger than that of coordinate 0."""
        if id(spec) not in self._even:
            parts = 1
            for axis, placement in spec.sharding.items():
                parts *= spec.mesh.axis_size(axis) if isinstance(placement, Shard) else 1
            self._even[id(spec)] = spec.max_local_nbytes * parts == spec.nbytes
        return self._even[id(spec)]

    def local_call(self, step: Compute, here: Mapping[str, int]) -> OpCall:
        """The call of the rank ``here``, computed once for all ranks and microbatches that share
        it."""
        if step.rule.localize is None and not leaves_float32(step.op.call, step.result_specs):
            return step.op.call
        used = self.splitting((*step.operand_specs, *step.result_specs))
        key = (id(step), tuple((axis, here[axis]) for axis in used))
        if key not in self._calls:
            local = Local(step.operand_specs, step.result_specs, here)
            self._calls[key] = step.rule.local_call(step.op.call, local)
        return self._calls[key]

    def seconds(self, step: Step) -> StepSeconds:
        """Seconds of the step's own work, of its messages, and of their launches."""
        if id(step) not in self._seconds:
            self._seconds[id(step)] = step_seconds(self.plan, step, step.stage)
        return self._seconds[id(step)]

    def message_seconds(self, kind: str, axis: str, num: int, nbytes: int) -> StepSeconds:
        """Return the seconds of a message that is no step of the plan: a collective over ``num``
        ranks of ``axis``, or a "transfer". Each rank contributes ``nbytes``."""
        sent = nbytes if kind == "transfer" else sent_bytes(kind, nbytes, num)
        topology = self.plan.topology
        seconds = topology.collective_seconds(kind, axis, num=num, bytes_sent=sent)
        return StepSeconds(0.0, seconds, topology.launch_seconds(kind, num))

    def overlapped(self, kind: ActionKind, stage: int) -> tuple[tuple[Step, ...], frozenset[int]]:
        """The steps of an action in the order in which they run; see `early`. Steps of the step's
        end that are among them do not run again there."""
        key = kind, stage
        if key not in self._overlapped:
            steps = self.actions.steps(kind, stage)
            reductions = reductions_of(self.plan, steps) if kind == "B" else ()
            order, late = early((*steps, *reductions), self.seconds)
            stay = {id(step) for step in reductions} - late
            order = tuple(step for step in order if id(step) not in stay)
            self._overlapped[key] = order, late
        return self._overlapped[key]


@dataclass(slots=True)
class LocalCode:
    """A segment of local code. ``table``: by name in the code, for names that are no plan values,
    the name in the rank's table; ``writes``: values that it changes in place; ``views``: by name
    that is no plan value, the value of which it may be a view."""

    code: CodeBuilder
    label: Label
    microbatch: int | None
    table: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    views: dict[str, str] = field(default_factory=dict[str, str])
    work: Stretch = field(default_factory=Stretch)  # predicted, in a priced lowering
    made: list[tuple[int, str]] = field(default_factory=list)  # likewise: line, value of the table


@dataclass(slots=True)
class Priced:
    """The records of a priced lowering: seconds of ``messages``, by the id of their start; by view,
    the value whose ``storage`` it shares."""

    messages: dict[int, StepSeconds] = field(default_factory=dict[int, StepSeconds])
    storage: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, kw_only=True)
class RankBuilder:
    """``label``, ``microbatch``: of the current action, None for code that runs once a step;
    ``accumulated``: sums over microbatches so far."""

    shared: ProgramContext
    rank: int
    functions: Functions
    roles: Roles
    label: Label = _ONCE
    microbatch: int | None = None
    instructions: list[Instruction | LocalCode] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    priced: Priced = field(default_factory=Priced)
    accumulated: dict[str, str] = field(default_factory=dict)
    began: int = 0  # where the current action begins
    posted: int = 0  # the place of its receives: the beginning of the action before
    agreed: bool = False  # the commit point was emitted
    _open: LocalCode | None = None
    _places: dict[int | None, dict[str, int]] = field(default_factory=dict)

    # -- the position of this rank --------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.shared.plan

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

    @property
    def here(self) -> dict[str, int]:
        """Coordinates on the inner mesh."""
        coordinates = self._places.get(self.microbatch)
        if coordinates is None:
            on_mesh = self.coordinates
            coordinates = {a: on_mesh[a] for a in self.plan.inner.axes if a != MICROBATCH_AXIS}
            if MICROBATCH_AXIS in self.plan.inner.axes:
                coordinates[MICROBATCH_AXIS] = self.microbatch or 0
            self._places[self.microbatch] = coordinates
        return coordinates

    def group(self, axis: str) -> tuple[int, ...]:
        """The ranks with which this one communicates along an axis, itself included."""
        return self.plan.mesh.group(self.rank, axis)

    def peer(self, stage: int) -> int:
        """The rank with the same coordinates that hosts ``stage``."""
        axis = self.plan.stage_axis
        assert axis is not None
        return self.plan.mesh.rank({**self.coordinates, axis: self.plan.stage_ranks[stage]})

    # -- values --------------------------------------------------------------------------------

    def value(self, name: str) -> str:
        """The table's name of a plan value, for the current microbatch."""
        return self.value_of(name, self.microbatch)

    def value_of(self, name: str, microbatch: int | None) -> str:
        if name in self.roles.state:
            return self.roles.state[name]
        if name in self.accumulated:
            return self.accumulated[name]
        if microbatch is None or self.plan.num_microbatches == 1 or name in self.shared.once:
            return name
        return f"{name}@{microbatch}"

    def held(self, name: str, spec: TensorSpec) -> tuple[str, Buffer]:
        """The table's name of a plan value, and the rank's buffer of it."""
        return self.value(name), Buffer(spec.local_shape(self.here), spec.dtype)

    def record(self, name: str, spec: TensorSpec, base: str | None = None) -> None:
        """Note how many bytes a value has here; ``base``: the value whose storage it shares."""
        value = self.value(name)
        self.nbytes[value] = self.shared.nbytes(spec, self.here)
        if base is not None:
            self.shares(value, self.value(base))
        if self.shared.priced and self._open is not None:
            self._open.made.append((len(self._open.code.lines) - 1, value))

    # -- local code ----------------------------------------------------------------------------

    def segment(self) -> LocalCode:
        """The open segment; a new one where there is none."""
        if self._open is None:
            code = CodeBuilder(self.shared.device, self.shared.value_names)
            self._open = LocalCode(code, self.label, self.microbatch)
            self.instructions.append(self._open)
        return self._open

    def short_segment(self) -> LocalCode:
        if self._open is not None and len(self._open.code.lines) >= self.shared.max_lines:
            self.close()
        return self.segment()

    def close(self) -> None:
        self._open = None

    def place(self, segment: LocalCode, name: str) -> str:
        """The table's name of a name in the segment's code."""
        return segment.table.get(name) or self.value_of(name, segment.microbatch)

    def renamed(self, source: str, target: str, line: str | None = None) -> None:
        """Give a value another name."""
        segment = self.segment()
        segment.code.line(f"{target} = {source}", [source], [target], line)
        self.shares(self.place(segment, target), self.place(segment, source))

    def shares(self, value: str, base: str) -> None:
        """Note that a value of the table shares the storage of another."""
        if self.shared.priced:
            self.priced.storage[value] = self.priced.storage.get(base, base)

    def price(self, step: Step) -> None:
        """Add the step's own work to the open segment."""
        if self.shared.priced and self._open is not None:
            compute, communication, host = self.shared.seconds(step)
            if not communication:  # its messages have launches of their own
                self._open.work = self._open.work.then(Stretch.of(compute, host))

    # -- communication -------------------------------------------------------------------------

    def start(self, instruction: Instruction) -> None:
        self.close()
        self.instructions.append(instruction)

    def start_early(self, instruction: Instruction) -> None:
        """Emit it at the beginning of the action before this one; in the order of these calls."""
        self.instructions.insert(self.posted, instruction)
        self.posted += 1
        self.began += 1

    def collective(
        self,
        kind: Kind,
        channel: str,
        inputs: tuple[tuple[str, Buffer], ...],
        outputs: tuple[tuple[str, Buffer], ...],
        what: str,
        *,
        way: str = "",
        group: tuple[int, ...] | None = None,
        op: ReduceOp | None = None,
        source: str | None = None,
        wait: bool = True,
        of: Step | None = None,
    ) -> Label:
        """Start a collective of table values over an axis, and wait for it unless ``wait`` is
        False; returns its label. ``what``: the name of its input; ``way``: its path, if it is no
        axis; ``of``: the step whose only message it is."""
        label = self.label.doing(kind, what, way or f"over {channel}")
        start = Collective(
            kind,
            self.group(channel) if group is None else group,
            tuple(name for name, _ in inputs),
            tuple(name for name, _ in outputs),
            tuple(buffer for _, buffer in inputs),
            tuple(buffer for _, buffer in outputs),
            op,
            channel,
            label=label,
            source=source,
        )
        self.start(start)
        if self.shared.priced and of is not None:
            self.priced.messages[id(start)] = self.shared.seconds(of)
        if wait:
            self.start(Wait((outputs[0][0],), label=label, source=source))
        return label
