"""`train_step`: forward, backward and optimizer of one step as one program.

    step = train_step(model, loss_fn, opt, inputs=dict(dp=Row()), schedule=OneFOneB(microbatches=8),
                      clip_grad_norm=1.0)
    print(step.plan(tokens, targets))
    with launch(mesh):
        loss = step(tokens, targets)       # a future; float(loss) waits

A call sends one message to each actor. The controller runs at most `RUN_AHEAD` steps ahead of the
ranks. Each call reads the options of the optimizer's groups, which a scheduler may change.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from dtensor.api.step.wrapped_optimizers import Optimizers, kinds_text, refuse_accumulation
from dtensor.api.store.optimizer_state import lacks_delayed, place_optimizer
from dtensor.api.store.session import MeshSession, launched, planning_for, session_for
from dtensor.api.values.randomness import random_inputs
from dtensor.daft import DaftError, TaskError
from dtensor.daft.errors import RunInterrupted
from dtensor.errors import (
    PlanningError,
    pickling_error,
)
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.graph import Graph
from dtensor.frontend.source import source_here
from dtensor.numerics import dtype_name, is_narrow
from dtensor.runtime.lower.actions import stage_costs
from dtensor.runtime.lower.detect_nan import DetectNan
from dtensor.runtime.lower.rank_builder import Roles, options_name, rates_name
from dtensor.runtime.lower.step_end import SCALE
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    host_reads,
    known_rule,
    owned_costs,
    rule_of,
    state_tensors,
)
from dtensor.runtime.optimizer.shard_optimizer import split_rates
from dtensor.runtime.schedule import Costs, Grid, Published, Schedule, validate
from dtensor.sharding.plan.hints import hints as hints_of
from dtensor.sharding.plan.hints import swapped
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import Training, Updater
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.spec.shards import assemble_at
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.showing import html_text, screen
from dtensor.signals import act, defer_signals

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.elementwise.trial import ProbeReport
    from dtensor.runtime.profile import Profile

RUN_AHEAD = 2
"""The number of steps that may be pending: one more call waits for the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The checked arguments of `train_step`, except the model, the loss and the optimizer.
    ``planning``: the arguments that compiled functions have too."""

    planning: Options
    schedule: Schedule
    clip_grad_norm: float | None
    keep_gradients: bool
    master_weights: bool
    detect_nan: DetectNan
    grad_scaler: torch.amp.GradScaler | None
    delay: int = 0
    accumulate: str = "float32"


class TrainStep:
    """A training step: the result of `train_step`. A call with a batch takes one step and returns
    its `Loss`, a future. The call waits only if two steps are pending already.

    If a step raises on a rank (a label out of range, an error in the user's op), it is undone, and
    so is the step that was submitted after it: weights, buffers, optimizer state, kept gradients
    and the number of the step are as before. A scheduler is not undone. The error is raised once:
    when the loss is read, or at the next call, which then does nothing.
    """

    def __init__(
        self,
        model: ParallelModule,
        loss_fn: Callable[..., Any],
        optimizer: Optimizers,
        options: StepOptions,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        is_scaled = options.grad_scaler is not None
        self._captured_fn = loss_scale.scaled(loss_fn) if is_scaled else loss_fn
        self._scale_of_kept_gradients = 1.0  # the loss scale of the kept gradients
        self.optimizer = optimizer  # or a list, as the user passed it
        is_single = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizers = (optimizer,) if is_single else tuple(optimizer)
        self.options = options
        self.plans: PlanCache = PlanCache("loss")
        self._grid = model.switches, grid_of(options.schedule, model)
        self.groups = GroupNames(model, self.optimizers)
        with CALL_LOCK:
            model.look()
            names = self.groups()
        for each, groups in zip(self.optimizers, names, strict=True):
            if not any(groups):
                kind = type(each).__name__
                raise PlanningError(
                    f"the {kind} has no parameter of the model, so it would update nothing.\n"
                    f"fix: leave it out, or {kind}(model.parameters(), ...)"
                )
        self.last: Planned | None = None
        self._pending: deque[Loss] = deque()  # of submitted steps, until they were read
        self._last_loss: Loss | None = None  # of the last step that succeeded
        self._began: Loss | None = None  # the last step, if it had no delayed gradients to use
        self._last_batch: tuple[tuple[Callable[[], Any], ...], dict[str, Any]] | None = None
        self._session: MeshSession | None = None  # of the last step
        self.accelerated: tuple[Any, ...] = ()  # accelerate's wrappers of optimizers
        line = source_here()
        self._line = None if line is None else f"{line}: {line.text}"

    @property
    def elementwise(self) -> ProbeReport | tuple[ProbeReport | None, ...] | None:
        """The report of the optimizer's probe, which prints the lines of the optimizer's step that
        it did not reach. None for torch's own optimizers. A tuple for a list of optimizers."""
        rules = map(known_rule, self.optimizers)
        reports = tuple(None if rule is None else rule.report for rule in rules)
        return reports[0] if isinstance(self.optimizer, torch.optim.Optimizer) else reports

    @property
    def grid(self) -> Grid:
        """The schedule of the stages that the model has now."""
        if self._grid[0] != self.model.switches:
            grid = grid_of(self.options.schedule, self.model)
            self.model.claim_homes(grid.home())
            self._grid = self.model.switches, grid
        return self._grid[1]

    def __reduce__(self) -> NoReturn:
        raise pickling_error(
            f"the step of {self._name} cannot be pickled or copied",
            'dt.save("checkpoint", step.model, step.optimizer), and make the step again from what '
            "dt.load has filled",
        )

    def __repr__(self) -> str:
        schedule = self.options.schedule
        order = f"{type(schedule).__name__}, microbatches: {schedule.microbatches}"
        by = f"{kinds_text(self.optimizers)}, {order}, plans: {len(self.plans)}"
        return screen(f"<step of {self._name}: {by}\n  {self.model!r}>")

    def _repr_html_(self) -> str:
        latest = self.plans.latest
        return html_text(repr(self)) + (latest.plan._repr_html_() if latest is not None else "")

    # -- planning --------------------------------------------------------------------------------

    def plan(
        self, *batch: Any, hints: bool = False, device: str | None = None, **kwargs: Any
    ) -> Plan:
        """Return the plan of a step on this batch of tensors (meta tensors too) or specs, without
        launching anything. Inside a launch that keeps snapshots, the memory in the plan includes
        them.

        ``hints``: append the pins whose opposite (column instead of row) would be cheaper. This
        plans once more for each pattern.

        ``device``: the type that the program sees as ``x.device``, and so the list of ops that
        ``torch.autocast(x.device.type)`` uses. The default is the running launch's, or "cpu". If
        ``loss_fn`` has a parameter named ``device``, it gets the value instead.
        """
        device, kwargs = stated_device(self.loss_fn, device, kwargs)
        with planning_for(device), CALL_LOCK:
            planned = self._plan(self._bind(batch, kwargs))
        plan, running = planned.plan, launched()
        if running is not None and running.cluster.copies:
            plan = replace(plan, copies=running.cluster.copies)
        if not hints:
            return plan
        return replace(plan, hints=hints_of(planned.request, planned.plan))

    def stage_costs(self, *batch: Any, **kwargs: Any) -> Costs:
        """Return the predicted seconds of F, I and W of each stage on one microbatch, including
        communication: the argument ``costs`` of the schedule `Searched`."""
        with CALL_LOCK:
            return stage_costs(self._plan(self._bind(batch, kwargs)).plan)

    def plan_of(self, graph: Graph, *batch: Any, **kwargs: Any) -> Plan:
        """Return the plan of a step on this batch, from a graph that was captured before. Several
        steps may share a graph."""
        with CALL_LOCK:
            return self._plan(self._bind(batch, kwargs), graph).plan

    def _bind(self, batch: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Return the call of loss_fn with the model, the batch and, if scaled, the loss scale."""
        if (scaler := self.options.grad_scaler) is not None:
            scale = torch.tensor(loss_scale.scale_of(scaler))
            kwargs = {**kwargs, loss_scale.ARGUMENT: scale}
        return BoundCall.of(self._captured_fn, (self.model, *batch), kwargs)

    @property
    def _scale(self) -> float:
        """The present loss scale; 1 without ``grad_scaler``."""
        scaler = self.options.grad_scaler
        return 1.0 if scaler is None else loss_scale.scale_of(scaler)

    def _scale_input(self, session: MeshSession) -> dict[str, Any]:
        """Return the program's input of the loss scale, on GPUs a tensor; {} without a scaler."""
        if self.options.grad_scaler is None:
            return {}
        on_gpu = session.cluster.device.type == "cuda"
        return {SCALE: torch.tensor(self._scale) if on_gpu else self._scale}

    def _plan(self, call: BoundCall, graph: Graph | None = None, *, delays: bool = True) -> Planned:
        """Return the plan for this call, capturing it if it is not cached. CALL_LOCK is held.
        ``delays``: whether the plan's gradients are those of the step before, as stated."""

        def make(cached_graph: Graph | None) -> Planned:
            """Plan the step. If the forward slices full values, add the pairs of placements that
            look swapped to the plan."""
            _refuse_gradients_of_arguments(call)
            stated = self.options if delays else replace(self.options, delay=0)
            options = self.plan_options(stated, self.grid, groups)
            mesh, name = self.model.mesh, self._name
            planned = plan_call(call, mesh, "loss", options, name, graph or cached_graph)
            redistributions = (s for s in planned.plan.steps if isinstance(s, Redistribute))
            if all(step.phase != "forward" or not step.is_free for step in redistributions):
                return planned
            pairs = swapped(planned.request, planned.plan)
            return replace(planned, plan=replace(planned.plan, swapped=pairs)) if pairs else planned

        call.look()
        groups = self.groups()
        for optimizer in self.optimizers:
            refuse_early_hooks(optimizer)
        key = groups, delays and self.options.delay > 0  # without a delay both plans are one
        if self.options.planning.each_call:
            _refuse_gradients_of_arguments(call)
            planning_key = key, call.arrangement
            return self.plans.get_for_graph(call.graph("loss", each_call=True), planning_key, make)
        return self.plans.get(call, key, make, captures=graph is None)

    def plan_options(
        self, stated: StepOptions, grid: Grid, groups: Sequence[Sequence[Sequence[str]]]
    ) -> Options:
        """Return the options of planning, completed by the schedule and the optimizers. ``groups``:
        the names of the parameters of each group of each optimizer."""
        updaters = tuple(map(self._updater, self.optimizers, groups))
        return replace(
            stated.planning,
            num_microbatches=stated.schedule.microbatches,
            timetable=GridTimetable(grid),
            training=Training(
                updaters=updaters,
                clip_grad_norm=stated.clip_grad_norm,
                master_weights=stated.master_weights,
                scaled=stated.grad_scaler is not None,
                delay=stated.delay,
                accumulate=stated.accumulate,
            ),
        )

    def _updater(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]
    ) -> Updater:
        """Return the planner's input for an optimizer. ``groups``: the names of its parameters."""
        seen, names = self.model.seen, frozenset(itertools.chain.from_iterable(groups))
        owned = owned_costs(optimizer, {name: seen.tensors[seen.labels[name]] for name in names})
        return Updater(
            optimizer=rule_of(optimizer).name,
            trained=names,
            state_tensors=state_tensors(optimizer) if owned is None else 0,
            owned=owned,
            host_reads=host_reads(optimizer),
        )

    @property
    def _name(self) -> str:
        return getattr(self.loss_fn, "__name__", "step").strip("<>")

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **kwargs: Any) -> Loss:
        """Submit one step on a batch and return its loss, a future. Raises the error of an earlier
        step if its loss was not read."""
        if self._session is not None and self._session.closed:
            self._pending.clear()  # the launch raised their unread errors when it ended
        self._raise_unread_failures()
        for wrapper in self.accelerated:
            refuse_accumulation(wrapper)
        call, planned, turn = self._bind(batch, kwargs), None, -1
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
                        self._last_batch = (*map(_reference, batch),), kwargs
                        for optimizer in self.optimizers:
                            step_without_gradients(optimizer)
                    return loss
            self._read(oldest)  # without the lock, so that other threads go on meanwhile
            if self.options.grad_scaler is not None:
                call = self._bind(batch, kwargs)  # what was read may have moved the scale

    def _oldest(self) -> Loss | None:
        """Return the oldest pending step if the run-ahead limit is reached, else None."""
        while self._pending and self._pending[0].was_read and self._pending[0].done():
            self._pending.popleft()
        waits = (
            self.options.grad_scaler is not None
            # if a step changes attributes of the optimizer, the next step needs them
            or any(not rule.runs_ahead for rule in map(known_rule, self.optimizers) if rule)
            # if the first step with a delay fails, the next step is the same program again
            or (self._began is not None and not self._began.ended)
        )
        limit = 1 if waits else RUN_AHEAD
        return self._pending[0] if len(self._pending) >= limit else None

    def _run(self, call: BoundCall, planned: Planned) -> Loss:
        """Submit a step to the ranks. CALL_LOCK is held."""
        session, groups = session_for(self.model.mesh), self.groups()
        where = planned.plan, planned.stages, planned.models
        masters = self.options.master_weights
        homes = [
            place_optimizer(session, self.model, optimizer, number, names, *where, masters=masters)
            for number, (optimizer, names) in enumerate(zip(self.optimizers, groups, strict=True))
        ]
        begins = lacks_delayed(homes) if self.options.delay else False
        keeps_gradients = self.options.keep_gradients and not begins
        roles = Roles(
            updates=() if begins else tuple([home.role for home in homes]),
            labels=planned.models.labels,
            gradients=keeps_gradients,
            detect_nan=self.options.detect_nan,
        )
        program = load(session, planned, roles, planned.grid, owner=self)
        scaler, scale = self.options.grad_scaler, self._scale
        options = self._scale_input(session)
        for number, home in enumerate(() if begins else homes):
            settings = home.rule.sent_settings(home.optimizer)
            if rates_name(number) in program.program.ranks[0].inputs:
                settings, options[rates_name(number)] = split_rates(settings)
            options[options_name(number)] = settings
        gradients = self._stored_gradients(session, planned) if keeps_gradients else {}
        label_by_output = {f"gradient {name}": stored.label for name, stored in gradients.items()}
        for home in homes if self.options.delay else ():
            label_by_output |= home.delayed_outputs(planned.plan, planned.models.labels)
        steps, model_home = self.model.steps, session.model_home(self.model)
        numbering = session.numbering(f"{model_home.prefix}steps", steps, takes=True)
        resets = steps.resets
        numbers = random_inputs(steps.advance(), "train")
        inputs = program.feed(call, numbers, options)
        future = session.run(program.handle, inputs, label_by_output, numbering)
        program.last_run = weakref.ref(future)
        self.last = planned
        session.record_write(program.written, homes)
        session.launch.store.keep(model_home.gradients, gradients)
        updated = [(home, home.delayed if begins else home.updated) for home in homes]
        undo = [] if begins else [home.advance() for home in homes]

        def on_end(succeeded: bool) -> None:
            """Record the end of the step; if it was undone, take back its number and options."""
            if succeeded:
                self._last_loss = loss
                for home, values in updated:
                    home.ended(values)
                self._scale_of_kept_gradients = scale
            else:
                session.give_back(steps, resets, numbering)
                for undo_one in undo:
                    undo_one()
            if scaler is not None and (succeeded or loss.skipped):
                loss_scale.update(scaler, skipped=not succeeded)

        loss = Loss(future, planned, session, on_end, self._line)
        self._pending.append(loss)
        self._began = loss if begins else None
        if session.at_once or (session.cluster.device.type == "cuda" and future.done()):
            try:
                loss.wait()
            except RunInterrupted:  # the exception of the signal handler is raised instead
                loss.was_read = True
            except DaftError:  # raised when the loss is read
                pass
        model_home.trained_by |= dict.fromkeys(map(id, self.optimizers), self)
        if session is not self._session:
            self._session = session
            for functions in (session.wait_functions, model_home.wait_functions):
                if self._settle not in functions:
                    functions.append(self._settle)
        return loss

    def profile(self, n: int, *batch: Any, **kwargs: Any) -> Profile:
        """Return the profile of ``n`` timed steps, after a few to warm up: where the time goes on
        each rank.

        Without arguments it uses the batch of the last step, if its tensors still exist. These are
        training steps, two for each timed one, so they change the state. To undo that, call
        `gather_state_dict` before and `load_state_dict` afterwards.
        """
        if not batch and not kwargs and self._last_batch is not None:
            references, kwargs = self._last_batch
            batch = tuple(reference() for reference in references)
            if any(value is None for value in batch):
                raise PlanningError(
                    f"profile({n}) has no batch, and the batch of the last step is gone.\n"
                    f"fix: step.profile({n}, *batch)"
                )
        session = session_for(self.model.mesh)
        return PROFILER.get()(n, session, lambda: self(*batch, **kwargs), _read_loss, self.plans)

    def gradients(self, *batch: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Return the full gradient of each parameter, by name, before clipping.

        With a batch, the gradients are computed at the present values, and nothing is changed.
        Without a batch, the gradients of the last step are returned, which needs
        ``keep_gradients=True``. A gradient has the parameter's dtype, as in torch; with master
        weights, 16-bit gradients are returned as float32.
        """
        session = session_for(self.model.mesh)
        if batch or kwargs:
            planned, gradients, scale = self._compute_gradients(session, self._bind(batch, kwargs))
        else:
            planned, gradients, scale = self._kept_gradients(session)
        if self.options.grad_scaler is not None:
            gradients = {name: value / scale for name, value in gradients.items()}
        if self.options.master_weights:
            return {n: g.float() if is_narrow(g.dtype) else g for n, g in gradients.items()}
        dtypes = {i.label: i.spec.dtype for i in planned.plan.inputs}
        return {n: g.to(dtypes[n]) for n, g in gradients.items()}

    def _compute_gradients(
        self, session: MeshSession, call: BoundCall
    ) -> tuple[Planned, dict[str, torch.Tensor], float]:
        """Return the plan, the scaled gradients of the call, and the loss scale."""
        with CALL_LOCK:
            planned = self._plan(call, delays=False)
            roles = Roles(gradients=True, detect_nan=self.options.detect_nan)
            program = load(session, planned, roles, planned.grid, owner=self)
            session.place(planned.models, planned.plan, planned.stages)
            name = f"{session.model_home(self.model).prefix}steps"
            numbering = session.numbering(name, self.model.steps, takes=False)
            numbers = random_inputs(self.model.steps.present(), "train")
            scale = self._scale
            inputs = program.feed(call, numbers, self._scale_input(session))
            run = session.run(program.handle, inputs, {}, numbering)
            program.last_run = weakref.ref(run)
        results = run.get()
        gradients: dict[str, torch.Tensor] = {}
        for label, spec in gradient_specs(planned).items():
            shards = {rank: results[rank][f"gradient {label}"] for rank in holders_of(spec)}
            gradients[label] = assemble_at(shards, spec)
        return planned, gradients, scale

    def _kept_gradients(
        self, session: MeshSession
    ) -> tuple[Planned, dict[str, torch.Tensor], float]:
        """Return the plan of the last step, its scaled gradients, and its loss scale."""
        planned = self.last
        is_kept = self.options.keep_gradients and self._session is session and self._began is None
        if not is_kept or planned is None:
            raise PlanningError(
                "no gradients of a last step are kept.\n"
                "fix: train_step(..., keep_gradients=True) and take a step in this launch (with "
                "delay=1, two), or pass a batch: step.gradients(*batch)"
            )
        results = session.launch.store.get(self._stored_gradients(session, planned))
        gradients = {name: value for name, value in results if value is not None}
        return planned, gradients, self._scale_of_kept_gradients

    def _stored_gradients(self, session: MeshSession, planned: Planned) -> dict[str, StoredTensor]:
        """Return the records of the gradients that a step leaves on the ranks, by name."""
        prefix, specs = session.model_home(self.model).prefix, gradient_specs(planned)
        return {n: session.stored(f"{prefix}gradient {n}", spec) for n, spec in specs.items()}

    def last_results(self) -> tuple[Planned, list[dict[str, torch.Tensor]]] | None:
        """Return the plan and each rank's results of the last step that succeeded, after waiting
        for pending steps; None if there is none. Raises the errors of pending steps."""
        self._settle()
        return None if self._last_loss is None else self._last_loss.planned_results()

    def _raise_unread_failures(self) -> None:
        for loss in list(self._pending):
            if not loss.was_read and loss.done():
                self._read(loss)

    def _settle(self) -> None:
        """Wait for all pending steps. Raises their errors."""
        for loss in list(self._pending):
            if not loss.was_read:
                loss.tensor()

    def _read(self, loss: Loss) -> None:
        """Wait for a pending step. Raises the error of the step if its loss was not read."""
        try:
            if not loss.was_read:
                loss.tensor()
        except TaskError as error:
            if self._session is not None and self._session.cluster.failure is None:
                error.add_note("an earlier step failed; the one called now has not run.")
            raise
        finally:
            with CALL_LOCK:
                if loss.was_read and self._pending and self._pending[0] is loss:
                    self._pending.popleft()


def _read_loss(loss: object) -> None:
    assert isinstance(loss, Loss)
    loss.tensor()


def grid_of(schedule: Schedule, model: ParallelModule) -> Grid:
    """Return the schedule's grid for the model. Raises PlanningError if its size is wrong."""
    stages = model.stage_plan
    ranks = model.mesh.axis_size(stages.axis) if stages.axis else 1
    grid = schedule.grid(stages.num_stages, ranks)
    if not isinstance(schedule, Published):
        validate(grid)
        expected = stages.num_stages, ranks, schedule.microbatches
        sizes = grid.num_stages, grid.num_ranks, grid.num_microbatches
        if sizes != expected:
            raise PlanningError(
                f"{type(schedule).__name__} gives a grid of {sizes} stages, ranks and "
                f"microbatches, where {expected} were asked for:\n{grid}\n"
                f"fix: make the grid from the numbers that `grid` is given"
            )
    return grid


def _refuse_gradients_of_arguments(call: BoundCall) -> None:
    """Raise PlanningError for an argument that requires grad: the step does not set its `grad`."""
    tensors = (
        (i, x) for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor | TensorSpec)
    )
    if (index := next((i for i, x in tensors if x.requires_grad), None)) is None:
        return
    name = call.leaf_names()[index]
    raise PlanningError(
        f"the argument {name} requires grad, and a step has gradients of its model's parameters "
        f"alone.\n"
        f"  {name}: {dtype_name(call.leaves[index].dtype)}{list(call.leaves[index].shape)}\n"
        f"fix: model.z = nn.Parameter(z) before parallelize, read from the model in loss_fn; or "
        f"pass z.detach(), which has no gradient"
    )


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or None for a tensor that no longer exists."""
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value


def gradient_specs(planned: Planned) -> dict[str, TensorSpec]:
    """Return the spec of each gradient on the user's mesh, by the parameter's name."""
    return {
        str(o.of): on_stage(planned.plan, o.spec, o.values[0][0])
        for o in planned.plan.outputs
        if o.kind == "gradient"
    }
