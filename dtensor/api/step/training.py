"""`train_step`: forward, backward and optimizer of one step as one program.

    step = train_step(model, loss_fn, opt, inputs=dict(dp=Row()), schedule=OneFOneB(microbatches=8),
                      clip_grad_norm=1.0)
    print(step.plan(tokens, targets))
    with launch(mesh):
        loss = step(tokens, targets)       # a future; float(loss) waits

A call costs one message to each actor. It runs ahead of the cluster by at most two steps. The
controller's optimizer gives the options of its groups (a scheduler may change them between steps).
Where it has a scheduler or a hook after its step, it is stepped without gradients, which changes
nothing but satisfies these.

A step in which a call raises (a label out of range, an op of the user's) is undone: its loss
raises, once, where it is read or else at the next call, which then does nothing. Weights, buffers,
optimizer state, kept gradients and the step's number are as if it had not been called, also for a
step that was under way behind it. A scheduler is the user's: it stands where the user stepped it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dtensor.api.model.parallel import ParallelModule
from dtensor.api.model.statements import Options
from dtensor.api.step import loss_scale
from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.controller_optimizer import (
    GroupNames,
    refuse_early_hooks,
    step_without_gradients,
)
from dtensor.api.step.loaded_program import load, on_stage
from dtensor.api.step.loss import Loss
from dtensor.api.step.plan_cache import PROFILER, PlanCache
from dtensor.api.step.plan_call import Planned, plan_call, stated_device
from dtensor.api.step.wrapped_optimizers import refuse_accumulation
from dtensor.api.store.optimizer_state import place_optimizer
from dtensor.api.store.session import MeshSession, launched, planning_for, session_for
from dtensor.api.values.randomness import numbers_fed
from dtensor.daft import DaftError, TaskError
from dtensor.daft.errors import RunInterrupted
from dtensor.errors import (
    PlanningError,
    not_pickled,
)
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import Graph
from dtensor.frontend.source import source_here
from dtensor.numerics import dtype_name, is_narrow
from dtensor.runtime.lower.actions import stage_costs
from dtensor.runtime.lower.detect_nan import DetectNan
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.runtime.lower.step_end import SCALE
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    known_rule,
    rule_of,
    state_tensors,
)
from dtensor.runtime.schedule import Costs, Grid, Published, Schedule, validate
from dtensor.sharding.plan.hints import hints as hints_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import Training
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.spec.shards import assemble_at
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.showing import html_text, screen
from dtensor.signals import act, defer_signals

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.elementwise.probe import ProbeReport
    from dtensor.runtime.profile import Profile

RUN_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What `train_step` was given besides the model, the loss and the optimizer. ``planning``: of
    that, what any program's plan depends on."""

    planning: Options
    schedule: Schedule
    clip_grad_norm: float | None
    keep_gradients: bool
    master_weights: bool
    detect_nan: DetectNan
    grad_scaler: torch.amp.GradScaler | None


class TrainStep:
    """What `train_step` returns. Calling it with a batch takes one step, and gives its `Loss`, a
    future; the call waits only where two steps are under way already.

    A step in which a call raises is undone: weights, buffers and optimizer state are as if it had
    not been called, and so is a step that was under way behind it. Its error is raised once, where
    its loss is read, or else at the next call, which then does nothing.
    """

    def __init__(
        self,
        model: ParallelModule,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        is_scaled = options.grad_scaler is not None
        self._called = loss_scale.scaled(loss_fn) if is_scaled else loss_fn
        self._kept_scale = 1.0  # of the gradients that are kept
        self.optimizer = optimizer
        self.options = options
        self.plans: PlanCache = PlanCache("loss")
        self._grid = model.switches, grid_of(options.schedule, model)
        self._groups = GroupNames(model, optimizer)
        with CALL_LOCK:
            model.look()
            self._groups()
        self.last: Planned | None = None
        self._running: deque[Loss] = deque()
        self._latest: tuple[tuple[Callable[[], Any], ...], dict[str, Any]] | None = None
        self._session: MeshSession | None = None  # of the last step
        self.accelerated: Any = None  # accelerate's wrapper of the optimizer
        line = source_here()
        self._line = None if line is None else f"{line}: {line.text}"

    @property
    def elementwise(self) -> ProbeReport | None:
        """What the probe of the optimizer has seen; None of a class of torch's, which needs none.
        It prints, with the lines of the optimizer's step that it did not reach."""
        rule = known_rule(self.optimizer)
        return None if rule is None else rule.report

    @property
    def grid(self) -> Grid:
        """Its schedule, for the stages that the model has now."""
        if self._grid[0] != self.model.switches:
            grid = grid_of(self.options.schedule, self.model)
            self.model.claim_homes(grid.home())
            self._grid = self.model.switches, grid
        return self._grid[1]

    def __reduce__(self) -> NoReturn:
        raise not_pickled(
            f"the step of {self._name} cannot be pickled or copied",
            'dt.save("checkpoint", step.model, step.optimizer), and make the step again from what '
            "dt.load has filled",
        )

    def __repr__(self) -> str:
        schedule = self.options.schedule
        order = f"{type(schedule).__name__}, microbatches: {schedule.microbatches}"
        by = f"{type(self.optimizer).__name__}, {order}, plans: {len(self.plans)}"
        return screen(f"<step of {self._name}: {by}\n  {self.model!r}>")

    def _repr_html_(self) -> str:
        latest = self.plans.latest
        return html_text(repr(self)) + (latest.plan._repr_html_() if latest is not None else "")

    # -- planning --------------------------------------------------------------------------------

    def plan(
        self, *batch: Any, hints: bool = False, device: str | None = None, **kwargs: Any
    ) -> Plan:
        """The plan of a step on such a batch: tensors (meta too) or specs. Nothing is launched.
        Inside a launch that keeps snapshots its memory has them, too.

        ``hints``: end it with the pins whose opposite (column for row) would be cheaper; that
        plans once more for each pattern.

        ``device``: "cuda" for a launch on GPUs: what ``x.device`` is to the program, and so the
        list of ops that ``torch.autocast(x.device.type)`` follows. By default the running launch's,
        or "cpu". A ``loss_fn`` with an argument of this name is given it instead.
        """
        device, kwargs = stated_device(self.loss_fn, device, kwargs)
        with planning_for(device), CALL_LOCK:
            planned = self._plan(self._call(batch, kwargs))
        plan, running = planned.plan, launched()
        if running is not None and running.cluster.copies:
            plan = replace(plan, copies=running.cluster.copies)
        if not hints:
            return plan
        return replace(plan, hints=hints_of(planned.request, planned.plan))

    def stage_costs(self, *batch: Any, **kwargs: Any) -> Costs:
        """Predicted seconds of F, I and W of each stage on one microbatch, communication included:
        what `Searched` takes as ``costs``."""
        with CALL_LOCK:
            return stage_costs(self._plan(self._call(batch, kwargs)).plan)

    def plan_of(self, graph: Graph, *batch: Any, **kwargs: Any) -> Plan:
        """`plan`, where ``graph`` is what such a step captures; several steps may share one."""
        with CALL_LOCK:
            return self._plan(self._call(batch, kwargs), graph).plan

    def _call(self, batch: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        return BoundCall.of(self._called, (self.model, *batch), {**kwargs, **self._scale()})

    def _scale(self) -> dict[str, torch.Tensor]:
        """The argument by which the loss is scaled, as it is now; {} where it is not."""
        scaler = self.options.grad_scaler
        if scaler is None:
            return {}
        return {loss_scale.ARGUMENT: torch.tensor(loss_scale.scale_of(scaler))}

    def _plan(self, call: BoundCall, graph: Graph | None = None) -> Planned:
        """Return the plan for this call, capturing it first if it is not cached. CALL_LOCK is
        held."""

        def make(found: Graph | None) -> Planned:
            _refuse_gradients_of_arguments(call)
            options = self.planned_with(self.options, self.grid)
            mesh, name = self.model.mesh, self._name
            planned = plan_call(call, mesh, "loss", options, name, graph or found)
            moved = (s for s in planned.plan.steps if isinstance(s, Redistribute))
            if all(step.phase != "forward" or not step.is_free for step in moved):
                return planned
            from dtensor.sharding.plan.swapped_pairs import swapped  # seldom needed

            pairs = swapped(planned.request, planned.plan)
            return replace(planned, plan=replace(planned.plan, swapped=pairs)) if pairs else planned

        call.look()
        groups = self._groups()
        refuse_early_hooks(self.optimizer)
        if self.options.planning.each_call:
            _refuse_gradients_of_arguments(call)
            others = groups, call.arrangement
            return self.plans.get_for_graph(call.graph("loss", each_call=True), others, make)
        return self.plans.get(call, groups, make, captures=graph is None)

    def planned_with(self, stated: StepOptions, grid: Grid) -> Options:
        """Return the options of planning, with the schedule and the optimizer."""
        return replace(
            stated.planning,
            num_microbatches=stated.schedule.microbatches,
            timetable=GridTimetable(grid),
            training=Training(
                optimizer=rule_of(self.optimizer).name,
                trained=frozenset(itertools.chain.from_iterable(self._groups())),
                state_tensors=state_tensors(self.optimizer),
                clip_grad_norm=stated.clip_grad_norm,
                master_weights=stated.master_weights,
                scaled=stated.grad_scaler is not None,
            ),
        )

    @property
    def _name(self) -> str:
        return getattr(self.loss_fn, "__name__", "step").strip("<>")

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **kwargs: Any) -> Loss:
        """One step on a batch. Its loss is a future; a failure that nobody read raises here."""
        if self._session is not None and self._session.closed:
            self._running.clear()  # its launch raised what was not read when it ended
        self._raise_unread()
        if self.accelerated is not None:
            refuse_accumulation(self.accelerated)
        call, planned, turn = self._call(batch, kwargs), None, -1
        while True:
            with ExitStack() as block:
                with CALL_LOCK:
                    if planned is None or CALL_LOCK.turn != turn:  # another thread may change it
                        planned, turn = self._plan(call), CALL_LOCK.turn
                    if (oldest := self._oldest()) is None:
                        # not before the lock: a signal must be able to end the wait for it
                        block.enter_context(defer_signals())
                        act()  # handle signals that came while it planned: nothing has changed yet
                        loss = self._run(call, planned)
                if oldest is None:
                    if not loss.was_read:  # it was not undone for a signal
                        self._latest = (*map(_held, batch),), kwargs
                        step_without_gradients(self.optimizer)
                    return loss
            self._read(oldest)  # without the lock, so that other threads go on meanwhile
            if self.options.grad_scaler is not None:
                call = self._call(batch, kwargs)  # what was read may have moved the scale

    def _oldest(self) -> Loss | None:
        """Return the oldest pending step if the run-ahead limit is reached, else None. CALL_LOCK is
        held."""
        while self._running and self._running[0].was_read and self._running[0].done():
            self._running.popleft()
        # what a step changes on the optimizer itself is sent to the next one, if it ended well
        rule = known_rule(self.optimizer)
        ahead = self.options.grad_scaler is None and (rule is None or rule.runs_ahead)
        most = RUN_AHEAD if ahead else 1
        return self._running[0] if len(self._running) >= most else None

    def _run(self, call: BoundCall, planned: Planned) -> Loss:
        session, groups = session_for(self.model.mesh), self._groups()
        home = place_optimizer(
            session,
            self.model,
            self.optimizer,
            groups,
            planned.plan,
            planned.stages,
            planned.models,
            masters=self.options.master_weights,
        )
        roles = Roles(
            optimizer=home.name,
            groups=groups,
            keys=home.keys,
            labels=planned.models.labels,
            numbers=home.rule.numbers(),
            gradients=self.options.keep_gradients,
            detect_nan=self.options.detect_nan,
        )
        program = load(session, planned, roles, planned.grid, owner=self)
        scaler = self.options.grad_scaler
        scale = 1.0 if scaler is None else loss_scale.scale_of(scaler)
        options: dict[str, Any] = {"options": home.rule.told(self.optimizer)}
        options |= {} if scaler is None else {SCALE: scale}
        gradients = self._gradients(session, planned) if self.options.keep_gradients else {}
        kept = {f"gradient {name}": stored.label for name, stored in gradients.items()}
        steps, model_home = self.model.steps, session.model_home(self.model)
        counted = session.counted(f"{model_home.prefix}steps", steps, takes=True)
        resets = steps.resets
        numbers = numbers_fed(steps.advance(), "train")
        fed = program.feed(call, numbers, options)
        future = session.run(program.handle, fed, kept, counted)
        program.last_run = weakref.ref(future)
        self.last = planned
        session.wrote(program.written, home)
        session.launch.store.keep(model_home.gradients, gradients)
        updated = home.updated
        undo = home.advance()

        def ended(well: bool) -> None:
            if well:
                home.ended(updated)
                self._kept_scale = scale
            else:
                session.give_back(steps, resets, counted)
                undo()
            if scaler is not None and (well or loss.skipped):
                loss_scale.move(scaler, skipped=not well)

        loss = Loss(future, planned, session, ended, self._line)
        self._running.append(loss)
        if session.at_once:
            try:
                loss.wait()
            except RunInterrupted:  # what the handler raised is about to be
                loss.was_read = True
            except DaftError:  # raised where it is read
                pass
        model_home.trained_by[id(self.optimizer)] = self
        if session is not self._session:
            self._session = session
            for settling in (session.settling, model_home.settling):
                if self._settle not in settling:
                    settling.append(self._settle)
        return loss

    def profile(self, n: int, *batch: Any, **kwargs: Any) -> Profile:
        """Where the time of a step goes on each rank: of ``n`` timed steps, after a few to warm up.

        Without a batch they are on that of the last step, if it is still there. They are training
        steps, two for each that is timed: state moves on. Before them `gather_state_dict` keeps
        what it is, and `load_state_dict` brings it back.
        """
        if not batch and not kwargs and self._latest is not None:
            held, kwargs = self._latest
            batch = tuple(one() for one in held)
            if any(one is None for one in batch):
                raise PlanningError(
                    f"profile({n}) has no batch, and that of the last step is gone.\n"
                    f"fix: step.profile({n}, *batch)"
                )
        session = session_for(self.model.mesh)
        return PROFILER.get()(n, session, lambda: self(*batch, **kwargs), _read_loss, self.plans)

    def gradients(self, *batch: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Parameter name to its gradient, whole, before clipping.

        With a batch: at the present values; nothing is changed. Without: of the last step, which
        ``keep_gradients`` of `train_step` keeps. In the parameter's dtype, as torch has it; with
        master weights in float32, as the optimizer reads it.
        """
        session = session_for(self.model.mesh)
        gradients: dict[str, torch.Tensor] = {}
        if batch or kwargs:
            call = self._call(batch, kwargs)
            with CALL_LOCK:
                planned = self._plan(call)
                roles = Roles(gradients=True, detect_nan=self.options.detect_nan)
                program = load(session, planned, roles, planned.grid, owner=self)
                session.place(planned.models, planned.plan, planned.stages)
                name = f"{session.model_home(self.model).prefix}steps"
                counted = session.counted(name, self.model.steps, takes=False)
                numbers = numbers_fed(self.model.steps.present(), "train")
                scaler = self.options.grad_scaler
                scale = 1.0 if scaler is None else loss_scale.scale_of(scaler)
                fed = program.feed(call, numbers, {} if scaler is None else {SCALE: scale})
                run = session.run(program.handle, fed, {}, counted)
                program.last_run = weakref.ref(run)
            results = run.get()
            for label, spec in gradient_specs(planned).items():
                shards = {rank: results[rank][f"gradient {label}"] for rank in holders_of(spec)}
                gradients[label] = assemble_at(shards, spec)
        else:
            kept = self.options.keep_gradients and self._session is session
            if not kept or self.last is None:
                raise PlanningError(
                    "no gradients of a last step are kept.\n"
                    "fix: train_step(..., keep_gradients=True) and take a step in this launch, or "
                    "pass a batch: step.gradients(*batch)"
                )
            planned = self.last
            wanted = self._gradients(session, planned)
            results = session.launch.store.get(wanted)
            gradients = {name: value for name, value in results if value is not None}
            scale = self._kept_scale
        if self.options.grad_scaler is not None:
            gradients = {name: value / scale for name, value in gradients.items()}
        if self.options.master_weights:
            return {n: g.float() if is_narrow(g.dtype) else g for n, g in gradients.items()}
        dtypes = {i.label: i.spec.dtype for i in planned.plan.inputs}
        return {n: g.to(dtypes[n]) for n, g in gradients.items()}

    def _gradients(self, session: MeshSession, planned: Planned) -> dict[str, StoredTensor]:
        """By name, those that stay on the ranks."""
        prefix, specs = session.model_home(self.model).prefix, gradient_specs(planned)
        return {n: session.stored(f"{prefix}gradient {n}", spec) for n, spec in specs.items()}

    def _raise_unread(self) -> None:
        for loss in list(self._running):
            if not loss.was_read and loss.done():
                self._read(loss)

    def _settle(self) -> None:
        for loss in list(self._running):
            if not loss.was_read:
                loss.tensor()

    def _read(self, loss: Loss) -> None:
        """Wait for it before another step; a failure that nobody has read is raised here."""
        try:
            if not loss.was_read:
                loss.tensor()
        except TaskError as error:
            if self._session is not None and self._session.cluster.failure is None:
                error.add_note("an earlier step failed; the one called now has not run.")
            raise
        finally:
            with CALL_LOCK:
                if loss.was_read and self._running and self._running[0] is loss:
                    self._running.popleft()


def _read_loss(loss: object) -> None:
    assert isinstance(loss, Loss)
    loss.tensor()


def grid_of(schedule: Schedule, model: ParallelModule) -> Grid:
    """The schedule for the model's stages."""
    stages = model.stage_plan
    ranks = model.mesh.axis_size(stages.axis) if stages.axis else 1
    grid = schedule.grid(stages.num_stages, ranks)
    if not isinstance(schedule, Published):
        validate(grid)
        wanted = stages.num_stages, ranks, schedule.microbatches
        sizes = grid.num_stages, grid.num_ranks, grid.num_microbatches
        if sizes != wanted:
            raise PlanningError(
                f"{type(schedule).__name__} gives a grid of {sizes} stages, ranks and "
                f"microbatches, where {wanted} were asked for:\n{grid}\n"
                f"fix: make the grid from the numbers that `grid` is given"
            )
    return grid


def _refuse_gradients_of_arguments(call: BoundCall) -> None:
    """Raise PlanningError for an argument that requires grad: the step does not set its `grad`."""
    leaves = enumerate(call.leaves)
    of = (i for i, x in leaves if isinstance(x, torch.Tensor | TensorSpec) and x.requires_grad)
    if (index := next(of, None)) is None:
        return
    name = call.leaf_names()[index]
    raise PlanningError(
        f"the argument {name} requires grad, and a step has gradients of its model's parameters "
        f"alone.\n"
        f"  {name}: {dtype_name(call.leaves[index].dtype)}{list(call.leaves[index].shape)}\n"
        f"fix: model.z = nn.Parameter(z) before parallelize, read from the model in loss_fn; or "
        f"pass z.detach(), which has no gradient"
    )


def _held(value: Any) -> Callable[[], Any]:
    """What gives an argument again; a tensor as long as somebody else has it."""
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value


def gradient_specs(planned: Planned) -> dict[str, TensorSpec]:
    """Parameter name to the spec under which its gradient ends, on the user's mesh."""
    return {
        str(o.of): on_stage(planned.plan, o.spec, o.values[0][0])
        for o in planned.plan.outputs
        if o.kind == "gradient"
    }
