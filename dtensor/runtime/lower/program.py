"""Lowering: a plan and a schedule become one daft Program, a list of instructions per rank.

    program = lower(plan, OneFOneB(microbatches=4).grid(2, 2))
    cluster.load(program)                # daft verifies it; any backend runs it
    program.ranks[rank].inputs           # the values that the controller sends to that rank

For each action in a rank's row of the grid, the plan's steps are emitted in plan order. The local
ops between two communications are one `Call` of straight-line code (code.py), of at most MAX_LINES
lines. A value is freed after its last use. A receive starts one action before the action that waits
for it. `daft.verify` proves that the program cannot hang.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import (
    Call,
    Collective,
    Free,
    Instruction,
    Label,
    Program,
    RankProgram,
    Send,
    Wait,
)
from dtensor.daft.ir.instructions import values_read
from dtensor.errors import PlanningError
from dtensor.kernels.registry import Made
from dtensor.runtime.lower import detect_nan, experts, moves, step_end, updates
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import Functions
from dtensor.runtime.lower.deferred import defers
from dtensor.runtime.lower.overlap import StepWalk
from dtensor.runtime.lower.rank_builder import (
    LocalCode,
    ProgramContext,
    RankBuilder,
    Roles,
    options_name,
    rates_name,
    user_line,
)
from dtensor.runtime.schedule import Action, Grid
from dtensor.sharding.plan.cost.memory import base_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import PlannedInput
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
    at_the_commit,
    norm_of,
    roots,
)
from dtensor.sharding.spec.placements import REPLICATE
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.state_writes import StateWrites


def lower(
    plan: Plan,
    grid: Grid | None,
    *,
    device: torch.device | None = None,
    roles: Roles | None = None,
    compiled: bool = False,
) -> Program:
    """Return the program of a plan under a schedule's grid. ``grid`` is None if the plan is forward
    only, or has one microbatch on one stage. ``compiled``: torch's compiler will compile the local
    code, whose segments are then cut at layers alone. Raises PlanningError if the grid puts the
    stages on other ranks than the plan does."""
    if grid is not None and grid.home() != plan.stage_ranks:
        raise PlanningError(
            f"the schedule has the stages on ranks {list(grid.home())}, and the plan has them on "
            f"{list(plan.stage_ranks)}.\n{grid}\nfix: plan with the step that has this schedule"
        )
    roles = roles or Roles()
    functions = Functions()
    actions, device = Actions(plan, grid), device or torch.device("cpu")
    numbered = bool(roles.detect_nan)
    shared = ProgramContext(plan, actions, device, numbered=numbered, compiled=compiled)
    shared.deferred = defers(shared, roles)
    builders = [
        RankBuilder(shared=shared, rank=rank, functions=functions, roles=roles)
        for rank in range(plan.mesh.size)
    ]
    return Program(
        name=plan.name,
        ranks=tuple(map(lower_rank, builders)),
        functions=tuple(functions.by_name.items()),
        stage_of=tuple(builder.stages[0] for builder in builders),
    )


def holders(plan: Plan, item: PlannedInput) -> tuple[int, ...]:
    """Return the ranks that host a stage which reads an input."""
    if plan.stage_axis is None:
        return tuple(range(plan.mesh.size))
    stage_coordinates = {plan.stage_ranks[stage] for stage in item.stages}
    return tuple(
        rank
        for rank in range(plan.mesh.size)
        if plan.mesh.coordinates(rank)[plan.stage_axis] in stage_coordinates
    )


def argument_spec(plan: Plan, name: str) -> TensorSpec:
    """Return the spec by which the controller cuts an argument for the ranks. It is on the user's
    mesh, and replicated on the stage axis."""
    spec = next(item.spec for item in plan.inputs if item.name == name)
    return on_mesh(plan, spec)


def on_mesh(plan: Plan, spec: TensorSpec) -> TensorSpec:
    """Return a spec of the inner mesh (without the stage axis) as a spec of the user's mesh,
    replicated on the stage axis."""
    sharding = spec.sharding
    placements = tuple(sharding.get(axis, REPLICATE) for axis in plan.mesh.axes)
    return TensorSpec(spec.shape, spec.dtype, plan.mesh, placements)


# -- one rank --------------------------------------------------------------------------------------


def lower_rank(b: RankBuilder) -> RankProgram:
    """Return the instructions, inputs, state and outputs of one rank."""
    walk = _Lowering(b)
    plan, stages = b.plan, set(b.stages)
    inputs = [i for i in plan.inputs if stages & set(i.stages)]
    state = [i for i in inputs if i.kind in ("parameter", "buffer", "constant")]
    arguments = [i for i in inputs if i.kind in ("argument", "tangent")]
    if b.roles.updates:
        state += [i for i in plan.delayed if stages & set(i.stages)]
    for item in (*state, *arguments):
        b.record(item.name, item.held)
    walk.run_steps([s for s in plan.steps if s.once and walk.concerns(s)])
    for number, (step, action) in enumerate(b.shared.actions.of(b.pipeline_rank)):
        walk.complete_sends(step)
        if b.roles.updates:
            b.label, b.microbatch = Label("delayed"), None
            walk.run_round(plan, number)
        walk.run_action(action)
    b.label, b.microbatch = Label("optimizer"), None
    walk.complete_sends(None)
    before, after = walk.around_commit()
    walk.run_steps(before)
    walk.complete(walk.in_flight)
    updates.compute_new_values(b)
    outputs = walk.end_program(after)
    state_names = [b.value(i.name) for i in state]
    input_names = list(dict.fromkeys((*(i.name for i in arguments), *b.shared.numbers)))
    for number, role in enumerate(b.roles.updates):
        state_names += [role.optimizer, *updates.optimizer_values(b, number)]
        input_names.append(options_name(number))
        if updates.takes_rates(b, number):
            input_names.append(rates_name(number))
    if (norm := norm_of(plan.steps)) is not None and norm.scaled:
        input_names.append(step_end.SCALE)
    b.close()
    if outputs:
        step_end.publish(b, outputs)
    if b.shared.deferred:
        from dtensor.runtime.lower.checks import add_fault_rows

        add_fault_rows(b)
    instructions, shares = _close_segments(b, frozenset((*state_names, *input_names)), outputs)
    return RankProgram(
        instructions=instructions,
        inputs=tuple(input_names),
        outputs=tuple(outputs),
        state=tuple(state_names),
        nbytes=tuple(sorted(b.nbytes.items())),
        shares=shares,
        changed=() if walk.state is None else walk.state.arguments(),
        replayable=() if walk.state is None else walk.state.replayable(),
    )


class _Lowering(StepWalk[moves.Started]):
    """Emits the instructions of one rank's steps."""

    def __init__(self, b: RankBuilder) -> None:
        super().__init__(b.stages)
        self.b = b
        self.unshared_sums: set[str] = set()  # sums that share their storage with no other value
        self.state: StateWrites | None = None  # for a program that changes state
        if b.plan.state_writes:
            # imported here because few programs change state
            from dtensor.runtime.lower.state_writes import StateWrites

            self.state = StateWrites(b)

    def run_action(self, action: Action) -> None:
        """Emit the steps of an action, and add its gradients to the sums over microbatches."""
        b = self.b
        b.label = Label(action.kind, action.microbatch, action.stage)
        b.microbatch = action.microbatch
        b.close()
        b.previous_action_start, b.action_start = b.action_start, len(b.instructions)
        self.run_ordered(b.shared.order_of(action), action.stage)
        b.close()

    def around_commit(self) -> tuple[list[Step], list[Step]]:
        """Return the rank's steps before the commit that have not run early, and the steps after
        it."""
        plan = self.b.plan
        before, after = at_the_commit(self.end_steps(plan))
        if self.b.roles.updates:
            return before, after
        if plan.delayed:  # the first step has no gradients to update with
            without = {id(s) for steps in plan.delayed_reductions for s in steps}
            without |= {id(s) for s in before if isinstance(s, Norm | Update)}
            before = [s for s in before if id(s) not in without]
        return before, []

    def end_program(self, after: Sequence[Step]) -> dict[str, str]:
        """Emit the commit point, the steps ``after`` it, and the updates. Return the rank's
        outputs: the name of each value in the table, by its name in the program."""
        b = self.b
        copies: dict[str, str] = {}
        step_end.agree(b)
        changes = self.state is not None and self.state.changed
        if b.roles.updates or changes or b.plan.delayed:
            copies = step_end.snapshot(b, self.state)
        if self.state is not None:
            self.state.emit_at_commit()
        self.run_steps(after)
        updates.update(b)
        outputs_by_name: dict[str, str] = {}
        for output in b.plan.outputs:
            returned = output.kind in ("result", "delayed") or (
                output.kind == "gradient" and b.roles.gradients
            )
            values = output.values if output.kind == "delayed" else output.values[:1]
            for stage, value in values if returned else ():
                if stage in b.stages:
                    name = f"{output.kind} {output.of}"
                    outputs_by_name[name] = copies.get(name) or b.value(value)
        norm = norm_of(b.plan.steps)
        if b.roles.updates and norm is not None:
            outputs_by_name["norm"] = norm.result
        if b.roles.updates or b.plan.delayed:
            outputs_by_name |= experts.add_load(b)
        return outputs_by_name

    def prepare(self, step: Step) -> None:
        if self.state is not None and not isinstance(step, Compute | Accumulate):
            self.state.copy_views(step.reads)

    def compute(self, step: Compute) -> None:
        self._call(step)
        self.b.price(step)

    def _call(self, step: Compute) -> None:
        """Emit the line of code that calls the step's op."""
        b, state = self.b, self.state
        code = b.segment_of(step).code
        operands = step.operands
        if state is not None:
            if state.emit(step):
                return
            operands = state.names_in_code(operands)
        call = b.shared.local_call(step, b.coordinates)
        source = user_line(step)
        results = [(name, spec) for _, name, spec in step.gives_as()]

        def result_types() -> Made:
            return [(spec.local_shape(b.coordinates), spec.dtype) for _, spec in results]

        if b.shared.device.type == "cuda":
            # imported here because few programs run on CUDA
            from dtensor.runtime.lower.checks import add_checks, add_positions

            checked = add_checks(b, call, step, operands, source)
            code.call(call, checked, step.results, source, result_types)
            add_positions(b, call, step.results, source)
        else:
            code.call(call, operands, step.results, source, result_types)
        if b.roles.detect_nan:
            detect_nan.add_check(code, operands, results, call, source, b.roles.detect_nan)
        experts.check_route(b, step, code, source)
        if state is not None:
            state.separate_results(step, operands)
        for name, spec in results:
            b.record(name, spec, base_of(b.plan, name, step))

    def accumulate(self, step: Accumulate) -> None:
        step_end.accumulate(self.b, step, self.unshared_sums)

    def sum_tied(self, step: Redistribute) -> None:
        step_end.sum_tied(self.b, step)
        self.b.price(step)

    def redistribute(self, step: Redistribute, *, wait: bool) -> moves.Started | None:
        channel = f"{step.axis} delayed" if self.in_round else ""
        started = moves.redistribute(self.b, step, wait=wait, channel=channel)
        self.b.price(step)
        return started

    def transfer(self, step: Transfer, stage: int | None) -> None:
        sent = moves.transfer(self.b, step, stage)
        self.sends += [] if sent is None else [sent]
        self.b.price(step)

    def norm(self, step: Norm) -> None:
        step_end.norm(self.b, step)
        self.b.price(step)

    def wait(self, message: moves.Started) -> None:
        moves.finish(self.b, message)

    def wait_sends(self, values: Sequence[str]) -> None:
        self.b.emit(Wait(tuple(values), label=self.b.label.doing("sent")))


# -- closing segments: live ranges --------------------------------------------------


def _close_segments(
    b: RankBuilder, inputs: frozenset[str], outputs: Collection[str]
) -> tuple[tuple[Instruction, ...], tuple[tuple[str, str], ...]]:
    """Return the rank's final instructions: each segment becomes a Call that returns the values
    that later instructions read, and values are freed after their last use. Also return the pairs
    (value, input) that may share storage. ``inputs``: of the program, with its state."""
    permanent = inputs.union(outputs)
    shares: dict[str, set[str]] = {}
    reads = _all_reads(b)
    last_read: dict[str, int] = {}
    for number, names in enumerate(reads):
        last_read.update(dict.fromkeys(names, number))
    final: list[Instruction] = []
    for number, item in enumerate(b.instructions):
        unread: tuple[str, ...] = ()
        if isinstance(item, LocalCode):
            places = {n: b.table_name(item, n) for n in item.code.defined}
            returned_values = {
                n: v for n, v in places.items() if last_read.get(v, -1) > number or v in permanent
            }
            for n, v in returned_values.items():
                sources = _sources(b, item, n)
                sources = {s for source in sources for s in shares.get(source, {source})} & inputs
                if sources:
                    shares.setdefault(v, set()).update(sources)
            name = b.functions.add(item.code, _function_name(b, item), tuple(returned_values))
            writes = tuple(b.table_name(item, n) for n in item.writes)
            source, outputs = item.code.user_lines(), tuple(returned_values.values())
            kernels = item.code.kernel_names()
            label = item.label.doing(kernels) if kernels else item.label
            call = Call(name, reads[number], outputs, writes, label=label, source=source)
            final.append(call)
        else:
            final.append(item)
            results = item.outputs
            unread = tuple(v for v in results if v not in last_read and v not in permanent)
        dead = tuple(
            dict.fromkeys(
                v
                for v in (*reads[number], *unread)
                if last_read.get(v, number) == number and v not in permanent
            )
        )
        if dead:
            final.append(Free(dead, label=item.label))
    pairs = tuple((v, source) for v, storages in shares.items() for source in sorted(storages))
    return _wait_before_free(final), pairs


def _sources(b: RankBuilder, segment: LocalCode, name: str) -> set[str]:
    """Return the values of the table whose storage a name in the segment's code may share."""
    if name in segment.views:
        return _sources(b, segment, segment.views[name])
    if name not in b.shared.producers:
        return {b.table_name(segment, name)}
    return {b.table_name(segment, root) for root in roots(name, b.shared.producers)}


def _function_name(b: RankBuilder, segment: LocalCode) -> str:
    place = segment.label.place.replace(" ", "_")
    return f"{b.plan.name}_{place}".replace("@", "_")


def _all_reads(b: RankBuilder) -> list[tuple[str, ...]]:
    """Return the values that each item reads. A wait for a collective reads the collective's
    inputs, which must live until then."""
    started: dict[str, tuple[str, ...]] = {}
    reads: list[tuple[str, ...]] = []
    for item in b.instructions:
        match item:
            case LocalCode():
                reads.append(tuple(b.table_name(item, name) for name in item.code.inputs))
            case Wait(values):
                reads.append((*values, *(v for done in values for v in started.get(done, ()))))
            case _:
                reads.append(values_read(item))
        if isinstance(item, Collective):
            started.update(dict.fromkeys(item.outputs, item.inputs))
    return reads


def _wait_before_free(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions with a wait before each Free of a value whose send may be running."""
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
