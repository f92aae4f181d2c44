"""The builder of one rank's list of instructions.

    builder = RankBuilder(shared=ProgramContext(plan, actions, device), rank=0, ...)
    segment = builder.segment()                   # local code, up to the next communication
    builder.emit(Collective(...))                 # communication closes the segment

The values that a segment must return depend on the instructions after it. So program.py turns the
segments into calls once the rank's list is complete. In the rank's table, the plan value `name` of
microbatch i is called `name@i`; a value that exists once per step keeps its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dtensor.daft import Buffer, Collective, Instruction, Label, Sizes, Wait
from dtensor.daft.ir.instructions import Kind
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import CodeBuilder, Functions
from dtensor.runtime.lower.detect_nan import DetectNan
from dtensor.runtime.lower.overlap import ActionOrder, early_order, with_reductions
from dtensor.runtime.optimizer.shard_optimizer import NUMBERS
from dtensor.runtime.schedule import Action
from dtensor.runtime.schedule import Kind as ActionKind
from dtensor.runtime.schedule.clock import Stretch
from dtensor.sharding.ops.call import STEP, Local, OpCall, run_number_names
from dtensor.sharding.plan.cost.seconds import StepSeconds, step_seconds
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Compute, Step, updates_of
from dtensor.sharding.redistribute.topology import sent_bytes
from dtensor.sharding.rules.rule import leaves_float32
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import ReduceOp, Replicate, Shard
from dtensor.sharding.spec.spec import TensorSpec

MAX_LINES = 6
"""The most lines of one Call. Inputs of a Call live until it ends, so a backward in one Call would
hold all activations at once. A Call costs a few microseconds."""
MAX_FORWARD_LINES = 200
"""The most lines of one Call in a program without a backward. There a value usually dies inside the
Call that makes it, so long Calls save time: a decode step has hundreds of lines of 3 us each."""
MIN_LAYER_OPS = 8
"""The least number of ops of a layer at whose boundaries compiled segments are cut. The modules of
an `nn.Sequential` are usually smaller, and fuse."""
_NUMBERED = re.compile(r"(^|\.)\d+(@\d+)?$")

_ONCE = Label("once")
SKIP = "rank.skip"
"""The predicate of the commit in the rank's table, in a deferred program."""


@dataclass(frozen=True, slots=True)
class OptimizerRole:
    """One of the optimizers that a program steps.

    Args:
        optimizer: the name of the rank's optimizer in the table.
        groups: the parameters in each group of the optimizer; empty: one group with all parameters.
        keys: for each group, the keys of the optimizer's state.
        numbers: the keys of state that is one number per parameter.
        host_reads: why updates on a GPU read values on the host; "" if they do not.
    """

    optimizer: str
    groups: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    numbers: frozenset[str] = NUMBERS
    host_reads: str = ""


def options_name(number: int) -> str:
    """Return the name of the input with the options of the optimizer ``number``."""
    return f"options_{number}" if number else "options"


def rates_name(number: int) -> str:
    """Return the name of the input f32[groups] with the learning rates of the optimizer ``number``,
    in programs that take them on the device."""
    return f"rates_{number}" if number else "rates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What a program does besides computing the plan's values.

    Args:
        gradients: return the gradients.
        updates: the optimizers, in the order of `Update.number`; empty: parameters are not updated.
        labels: by name of a parameter, its label in the optimizer where the two differ.
        state: by plan input (parameter, buffer or constant), its name in the table.
        detect_nan: check the result of each op (detect_nan.py).
    """

    gradients: bool = False
    updates: tuple[OptimizerRole, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    state: Mapping[str, str] = field(default_factory=dict[str, str])
    detect_nan: DetectNan = False

    @staticmethod
    def of_plan(plan: PlanRecord, state: Mapping[str, str] | None = None) -> Roles:
        """Return the roles of a program that makes all updates of a plan, for a simulation."""
        numbers = sorted({step.number for step in updates_of(plan.steps)})
        updates = tuple(
            OptimizerRole(f"optimizer {number}" if number else "optimizer") for number in numbers
        )
        return Roles(updates=updates, state=state or {})

    def labels_of(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """Return the labels of the parameters in the optimizer."""
        return tuple(self.labels.get(name, name) for name in parameters)


class ProgramContext:
    """Facts that all ranks of a program share. Each is computed once. Dicts have the `id` of a step
    or spec as key, which stays unique because the plan keeps its steps and specs alive."""

    def __init__(
        self,
        plan: Plan,
        actions: Actions,
        device: torch.device,
        *,
        priced: bool = False,
        numbered: bool = False,
        deferred: bool = False,
        compiled: bool = False,
    ) -> None:
        self.plan: Plan = plan
        self.actions: Actions = actions
        self.device: torch.device = device
        self.priced = priced  # segments record their predicted seconds
        self.numbered = numbered  # the step's number is an input even if no op draws random numbers
        self.deferred = deferred  # the host reads no value of the device during a run
        self.compiled = compiled  # torch's compiler compiles the local code
        self._sharded_axes: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._even: dict[int, bool] = {}
        self._nbytes: dict[tuple[int, ...], int] = {}
        self._calls: dict[object, OpCall] = {}
        self._seconds: dict[int, StepSeconds] = {}
        self._orders: dict[tuple[ActionKind, int, bool], ActionOrder] = {}

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers (seeds, the step) that the program takes as inputs at each
        run."""
        calls = (s.op.call for s in self.plan.steps if s.op is not None)
        names = dict.fromkeys(name for call in calls for name in run_number_names(call))
        return tuple(names | {STEP: None} if self.numbered else names)

    def has_commit_point(self, roles: Roles) -> bool:
        """Whether the program has a commit point. It has one if it writes state, or if the failure
        of one rank would leave other ranks with wrong results or with a different count of random
        numbers."""
        mutates = any(w.how != "in place" for w in self.plan.state_writes)
        writes = bool(roles.updates or self.plan.delayed) or (mutates and not roles.gradients)
        together = bool(self.plan.collectives or self.numbers) and self.plan.mesh.size > 1
        return writes or together or self.deferred

    @cached_property
    def max_lines(self) -> int:
        """The most lines of one Call of this program."""
        is_forward = all(step.phase == "forward" for step in self.plan.steps)
        return MAX_FORWARD_LINES if is_forward else MAX_LINES

    @cached_property
    def layers(self) -> frozenset[str]:
        """The paths of the layers at whose boundaries compiled segments are cut: numbered modules
        of at least MIN_LAYER_OPS ops."""
        ops = (step.op for step in self.plan.steps if isinstance(step, Compute))
        count = Counter(call for op in ops for call in op.calls if _NUMBERED.search(call))
        return frozenset(path for path, num in count.items() if num >= MIN_LAYER_OPS)

    @cached_property
    def producers(self) -> dict[str, Step]:
        return {name: step for step in self.plan.steps for name in step.gives}

    @cached_property
    def once_values(self) -> frozenset[str]:
        """The values that exist once per step, not once per microbatch: inputs, numbers, and
        results of steps that run once."""
        names = {*(i.name for i in (*self.plan.inputs, *self.plan.delayed)), *self.numbers}
        for step in self.plan.steps:
            if step.once or step.phase == "optimizer":
                names.update(name for name in step.gives)
        return frozenset(names)

    @cached_property
    def value_names(self) -> frozenset[str]:
        return frozenset(self.plan.value_specs())

    def sharded_axes(self, specs: Sequence[TensorSpec | None]) -> tuple[str, ...]:
        """Return the axes on which a tensor of one of these specs is not replicated, sorted."""
        key = tuple(map(id, specs))
        if key not in self._sharded_axes:
            axes = {
                axis
                for spec in specs
                if spec is not None
                for axis, placement in spec.sharding.items()
                if not isinstance(placement, Replicate)
            }
            self._sharded_axes[key] = tuple(sorted(axes))
        return self._sharded_axes[key]

    def nbytes(self, spec: TensorSpec, coordinates: Mapping[str, int]) -> int:
        """Return the bytes of a shard; ``coordinates``: of its rank."""
        axes = () if self._is_even(spec) else self.sharded_axes((spec,))
        key = (id(spec), *(coordinates[axis] for axis in axes))
        if key not in self._nbytes:
            self._nbytes[key] = spec.local_nbytes(coordinates)
        return self._nbytes[key]

    def _is_even(self, spec: TensorSpec) -> bool:
        """Whether all shards have the same size."""
        if id(spec) not in self._even:
            num_shards = 1
            for axis, placement in spec.sharding.items():
                num_shards *= spec.mesh.axis_size(axis) if isinstance(placement, Shard) else 1
            self._even[id(spec)] = spec.max_local_nbytes * num_shards == spec.nbytes
        return self._even[id(spec)]

    def local_call(self, step: Compute, coordinates: Mapping[str, int]) -> OpCall:
        """Return the call of the step's op on local tensors; ``coordinates``: of the rank.
        Ranks and microbatches that run the same call share it."""
        if step.rule.localize is None and not leaves_float32(step.op.call, step.result_specs):
            return step.op.call
        axes = self.sharded_axes((*step.operand_specs, *step.result_specs))
        key = (id(step), tuple((axis, coordinates[axis]) for axis in axes))
        if key not in self._calls:
            local = Local(step.operand_specs, step.result_specs, coordinates)
            self._calls[key] = step.rule.local_call(step.op.call, local)
        return self._calls[key]

    def seconds(self, step: Step) -> StepSeconds:
        """Return the predicted seconds of the step: computation, communication, launches."""
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

    def order_of(self, action: Action) -> ActionOrder:
        """Return the order of an action's steps, with the reductions of gradients that start in the
        action."""
        kind, stage = action.kind, action.stage
        reductions = self.actions.reductions.get(action, ())
        key = kind, stage, bool(reductions)
        if key not in self._orders:
            steps, late = early_order(self.actions.steps(kind, stage), self.seconds)
            order = ActionOrder(steps, late, self.actions.sums(kind, stage))
            if reductions:
                _, last = self.actions.of(self.plan.stage_ranks[stage])[-1]
                following = 0.0 if action == last else math.inf
                order = with_reductions(order, reductions, self.seconds, following)
            self._orders[key] = order
        return self._orders[key]


def user_line(step: Compute) -> str | None:
    """Return the user's line of a step's op, or None if it is not known."""
    return f"{step.op.source}: {step.op.source_text}" if step.op.source else None


@dataclass(slots=True)
class LocalCode:
    """A segment of local code: lines that become one Call."""

    code: CodeBuilder
    label: Label
    microbatch: int | None
    # names in the code that are no plan values, with their names in the rank's table
    table: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()  # values that the segment changes in place
    # names that are no plan values, with the value of which each may be a view
    views: dict[str, str] = field(default_factory=dict[str, str])
    # in a priced lowering: the predicted work, and (line, value of the table) of each result
    work: Stretch = field(default_factory=Stretch)
    results: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class Priced:
    """What a priced lowering records besides the work of its segments."""

    messages: dict[int, StepSeconds] = field(default_factory=dict[int, StepSeconds])
    """By the id of the instruction that starts a message, its predicted seconds."""
    storage: dict[str, str] = field(default_factory=dict[str, str])
    """By view, the value whose storage it shares."""


@dataclass(slots=True, kw_only=True)
class RankBuilder:
    """Collects the instructions of one rank. All ranks share the ``functions``."""

    shared: ProgramContext
    rank: int
    functions: Functions
    roles: Roles
    label: Label = _ONCE  # of the current action
    microbatch: int | None = None  # of the current action; None in code that runs once per step
    instructions: list[Instruction | LocalCode] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)  # by value of the table
    priced: Priced = field(default_factory=Priced)
    accumulated: dict[str, str] = field(default_factory=dict)  # by sum, the name of its last value
    action_start: int = 0  # the index in `instructions` where the current action begins
    previous_action_start: int = 0  # the index for early receives: where the action before begins
    committed: bool = False  # the commit point was emitted
    # in a deferred program: (value of the table, key of a condition that was recorded)
    checked: set[tuple[str, object]] = field(default_factory=set)
    # in a deferred program: value of positions that an op computed -> the size of their dim
    computed: dict[str, int] = field(default_factory=dict)
    _open_segment: LocalCode | None = None
    _layer: str = ""  # the path of the layer of the last op
    _coordinates: dict[int | None, dict[str, int]] = field(default_factory=dict)

    # -- the position of this rank --------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.shared.plan

    @property
    def mesh_coordinates(self) -> dict[str, int]:
        return self.plan.mesh.coordinates(self.rank)

    @property
    def pipeline_rank(self) -> int:
        axis = self.plan.stage_axis
        return self.mesh_coordinates[axis] if axis else 0

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank hosts."""
        return self.plan.hosted[self.pipeline_rank]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinates on the inner mesh; the current microbatch is a coordinate too."""
        coordinates = self._coordinates.get(self.microbatch)
        if coordinates is None:
            on_mesh = self.mesh_coordinates
            coordinates = {a: on_mesh[a] for a in self.plan.inner.axes if a != MICROBATCH_AXIS}
            if MICROBATCH_AXIS in self.plan.inner.axes:
                coordinates[MICROBATCH_AXIS] = self.microbatch or 0
            self._coordinates[self.microbatch] = coordinates
        return coordinates

    def group(self, axis: str) -> tuple[int, ...]:
        """Return this rank's group along an axis: the ranks that differ only in its coordinate."""
        return self.plan.mesh.group(self.rank, axis)

    def peer(self, stage: int) -> int:
        """Return the rank that hosts ``stage`` and has this rank's other coordinates."""
        axis = self.plan.stage_axis
        assert axis is not None
        return self.plan.mesh.rank({**self.mesh_coordinates, axis: self.plan.stage_ranks[stage]})

    # -- values --------------------------------------------------------------------------------

    def value(self, name: str) -> str:
        """Return the name in the table of a plan value of the current microbatch."""
        return self.value_of(name, self.microbatch)

    def value_of(self, name: str, microbatch: int | None) -> str:
        """Return the name in the table of a plan value of a microbatch."""
        if name in self.roles.state:
            return self.roles.state[name]
        if name in self.accumulated:
            return self.accumulated[name]
        if microbatch is None or self.plan.num_microbatches == 1 or name in self.shared.once_values:
            return name
        return f"{name}@{microbatch}"

    def named_buffer(self, name: str, spec: TensorSpec) -> tuple[str, Buffer]:
        """Return the name in the table of a plan value, and the buffer of its local tensor."""
        return self.value(name), Buffer(spec.local_shape(self.coordinates), spec.dtype)

    def record(self, name: str, spec: TensorSpec, base: str | None = None) -> None:
        """Record the bytes of a value on this rank; ``base``: the value whose storage it shares."""
        value = self.value(name)
        self.nbytes[value] = self.shared.nbytes(spec, self.coordinates)
        if base is not None:
            self.record_sharing(value, self.value(base))
        if self.shared.priced and self._open_segment is not None:
            self._open_segment.results.append((len(self._open_segment.code.lines) - 1, value))

    # -- local code ----------------------------------------------------------------------------

    def segment(self) -> LocalCode:
        """Return the open segment, or open one."""
        if self._open_segment is None:
            shared = self.shared
            code = CodeBuilder(shared.device, shared.value_names, shared.compiled)
            self._open_segment = LocalCode(code, self.label, self.microbatch)
            self.instructions.append(self._open_segment)
        return self._open_segment

    def short_segment(self) -> LocalCode:
        """Return the open segment if it has room for another line, or open one."""
        if (
            self._open_segment is not None
            and len(self._open_segment.code.lines) >= self.shared.max_lines
        ):
            self.close()
        return self.segment()

    def segment_of(self, step: Compute) -> LocalCode:
        """Return the segment for an op. A compiled segment ends where a layer begins or ends, so
        that equal layers have equal segments; an op outside all modules joins the open one."""
        if not self.shared.compiled:
            return self.short_segment()
        if step.op.calls:
            layer = next((call for call in step.op.calls if call in self.shared.layers), "")
            if layer != self._layer:
                self.close()
            self._layer = layer
        return self.segment()

    def close(self) -> None:
        self._open_segment = None

    def table_name(self, segment: LocalCode, name: str) -> str:
        """Return the name in the table of a name in the segment's code."""
        return segment.table.get(name) or self.value_of(name, segment.microbatch)

    def predicate(self) -> tuple[str, ...]:
        """Return the name in the open segment's code of the commit's predicate, f32[], 1 if nothing
        may be written; () if the host decides whether this code runs."""
        if not (self.shared.deferred and self.committed):
            return ()
        self.segment().table["rank_skip"] = SKIP
        return ("rank_skip",)

    def assign(self, source: str, target: str, line: str | None = None) -> None:
        """Emit the line ``target = source``."""
        segment = self.segment()
        segment.code.line(f"{target} = {source}", [source], [target], line)
        self.record_sharing(self.table_name(segment, target), self.table_name(segment, source))

    def record_sharing(self, value: str, base: str) -> None:
        """Record that a value of the table shares the storage of ``base``."""
        if self.shared.priced:
            self.priced.storage[value] = self.priced.storage.get(base, base)

    def price(self, step: Step) -> None:
        """Add the predicted work of a local step to the open segment."""
        if self.shared.priced and self._open_segment is not None:
            compute, communication, host = self.shared.seconds(step)
            if not communication:  # messages are priced where they start
                self._open_segment.work = self._open_segment.work.then(Stretch.of(compute, host))

    # -- communication -------------------------------------------------------------------------

    def emit(self, instruction: Instruction) -> None:
        """Close the segment and append an instruction."""
        self.close()
        self.instructions.append(instruction)

    def emit_early(self, instruction: Instruction) -> None:
        """Insert an instruction at the beginning of the action before the current one, behind those
        that were inserted there already."""
        self.instructions.insert(self.previous_action_start, instruction)
        self.previous_action_start += 1
        self.action_start += 1

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
        distance: int = 0,
        sizes: Sizes | None = None,
        on_host: bool = False,
    ) -> Label:
        """Start a collective over the axis ``channel``, and wait for it unless ``wait`` is False.

        Args:
            inputs, outputs: names in the table, each with its buffer.
            what, way: what is sent, and over which ranks, in words for the label; by default the
                axis.
            group: the members; by default the rank's group along the axis.
            of: the plan's step whose only message this is, for its price.
            distance, sizes, on_host: see `Collective`.

        Returns the label of the collective.
        """
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
            distance=distance,
            sizes=sizes,
            on_host=on_host,
            label=label,
            source=source,
        )
        self.emit(start)
        if self.shared.priced and of is not None:
            self.priced.messages[id(start)] = self.shared.seconds(of)
        if wait:
            self.emit(Wait((outputs[0][0],), label=label, source=source))
        return label
