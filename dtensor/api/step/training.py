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
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.optim.optimizer as hooks

from dtensor.api.model.labels import SeenModule
from dtensor.api.model.parallel import ParallelModule, check_parallel, not_the_models
from dtensor.api.model.statements import Options
from dtensor.api.model.stating.recomputed import recompute_of
from dtensor.api.step.bound_call import BoundCall
from dtensor.api.step.loaded_program import load, on_stage
from dtensor.api.step.plan_cache import PROFILER, PlanCache
from dtensor.api.step.plan_call import Planned, checked_capture, plan_call, stated_device
from dtensor.api.step.wrapped_optimizers import refuse_accumulation, torchs_own
from dtensor.api.store.optimizer_state import place_optimizer
from dtensor.api.store.session import MeshSession, launched, planning_for, session_for
from dtensor.api.values.lazy_parameters import as_it_is
from dtensor.api.values.randomness import numbers_fed
from dtensor.api.values.reads_as_float import ReadsAsFloat
from dtensor.daft import DaftError, Future, TaskError
from dtensor.daft.errors import RunInterrupted
from dtensor.errors import (
    PlanningError,
    check_callable,
    check_kind,
    check_number,
    check_order,
    check_word,
    checked_call,
    not_pickled,
)
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.capture.call_as_module import leaf_names
from dtensor.frontend.graph import Graph
from dtensor.frontend.source import source_here
from dtensor.numerics import dtype_name, is_narrow
from dtensor.private_torch import pytree
from dtensor.runtime.lower.actions import stage_costs
from dtensor.runtime.lower.detect_nan import DetectNan, checked_detect
from dtensor.runtime.lower.rank_builder import Roles
from dtensor.runtime.lower.step_end import SCALE
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.optimizer.elementwise.optimizer_rule import (
    check_optimizer,
    known_rule,
    rule_of,
    state_elementwise,
    state_tensors,
)
from dtensor.runtime.optimizer.shard_optimizer import check_masters
from dtensor.runtime.schedule import Costs, GPipe, Grid, Published, Schedule, validate
from dtensor.sharding.plan.hints import hints as hints_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import Training, checked_search
from dtensor.sharding.plan.steps import Redistribute
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.redistribute.topology import Topology, check_topology
from dtensor.sharding.spec.shards import assemble_at
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.sharding.spec.stored import StoredTensor
from dtensor.showing import html_text, screen
from dtensor.signals import act, defer_signals

if TYPE_CHECKING:
    from dtensor.runtime.optimizer.elementwise.probe import ProbeReport
    from dtensor.runtime.profile import Profile

RUN_AHEAD = 2
_KINDS = {"model": ParallelModule, "loss_fn": Callable, "optimizer": torch.optim.Optimizer}


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


class Loss(ReadsAsFloat):
    """A step's loss, which may still be on its way. Reading it waits and raises what failed.

    ``float(loss)``; ``loss.metrics`` (what loss_fn returned beside it, name to float);
    ``loss.grad_norm`` (before clipping; None without ``clip_grad_norm`` or ``grad_scaler``);
    ``loss.tensor()``; ``loss.skipped``, once it was read: whether a gradient was not finite, so
    that a ``grad_scaler`` has backed off, and the step has changed nothing. It is NaN then.
    It adds, compares and prints as a float does, each of which reads it.
    """

    def __init__(
        self,
        future: Future,
        planned: Planned,
        session: MeshSession,
        ended: Callable[[bool], None],
        line: str | None,
    ) -> None:
        self._line = line  # of `train_step`, where an instruction has none
        self._future = future
        self._planned = planned
        self._session = session
        self._ended: Callable[[bool], None] | None = ended  # is told once whether it ended well
        self.was_read: bool = False
        self.skipped: bool = False

    def _get(self) -> list[dict[str, torch.Tensor]]:
        """What each rank returned."""
        was_read = self.was_read
        try:
            self.was_read = True
            return self.wait()
        except DaftError as error:
            self._session.launch.failure_was_read |= self._session.cluster.failure is not None
            if isinstance(error, TaskError) and self._line is not None:
                error.locate(self._line)
            raise self._session.told(error) from error.__cause__
        except BaseException:  # an interrupt, which has read nothing
            self.was_read = was_read
            raise

    def wait(self) -> list[dict[str, torch.Tensor]]:
        """What each rank returned; does not count as reading it."""
        if self.skipped:
            return []
        try:
            results = self._future.get()
        except DaftError as error:
            if self._session.cluster.failure is None:
                self.skipped = self._planned.is_scaled and _scaling().is_overflow(error)
                self._tell(well=False)
            if self.skipped:
                return []
            raise
        self._tell(well=True)
        return results

    def _tell(self, *, well: bool) -> None:
        if self._ended is None:
            return
        with CALL_LOCK:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended(well)

    def _result(self, index: int) -> torch.Tensor:
        name = f"result {index}"
        flow = self._planned.plan.flow
        value = next(o.value for o in flow.outputs if o.kind == "result" and o.of == index)
        ranks = self._get()
        if self.skipped:
            return torch.tensor(math.nan)
        for results in ranks:
            if name in results:  # a sum over microbatches of 16 bits comes in float32
                return results[name].to(flow.metas[value].dtype)
        raise AssertionError(f"no rank returned {name}")

    def done(self) -> bool:
        """Whether reading would not wait."""
        return self._future.done()

    def tensor(self) -> torch.Tensor:
        """The loss as a scalar CPU tensor; NaN of a step that was skipped."""
        if not self._planned.is_scaled:
            return self._result(0)
        return self._every()[1][_scaling().UNSCALED]

    def _every(self) -> Any:
        """As loss_fn has returned it."""
        count = sum(1 for o in self._planned.plan.outputs if o.kind == "result")
        return self._planned.graph.unflatten([self._result(i) for i in range(count)])

    def item(self) -> float:
        """The loss as a float."""
        return float(self)

    def cpu(self) -> torch.Tensor:
        """As `tensor`."""
        return self.tensor()

    def detach(self) -> Loss:
        """Itself, unread: it has no graph behind it."""
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """What loss_fn returned beside the loss, of the whole batch; {} where nothing."""
        outputs = self._every()
        if not isinstance(outputs, tuple):
            return {}
        own = _scaling().UNSCALED if self._planned.is_scaled else None
        return {name: float(value) for name, value in outputs[1].items() if name != own}

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients before clipping; None without ``clip_grad_norm`` or
        ``grad_scaler``, and of a step that was skipped."""
        for results in self._get():
            if "norm" in results:
                return float(results["norm"])
        return None

    def backward(self) -> None:
        """Raises: the step has done it."""
        raise TypeError(
            "a step has run forward, backward and the optimizer already; fix: remove the call. "
            "To accumulate gradients, pass the batches as one, with "
            "schedule=dt.GPipe(microbatches=...)"
        )

    def __float__(self) -> float:
        return float(self.tensor())

    def __str__(self) -> str:
        return f"{float(self)}{self._beside()}"

    def __repr__(self) -> str:
        return f"Loss({float(self):.6g}{self._beside()})" if self.done() else "Loss(running)"

    def _beside(self) -> str:
        """The metrics, where there are any."""
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return metrics and f" ({metrics})"


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
        self._called = _scaling().scaled(loss_fn) if is_scaled else loss_fn
        self._kept_scale = 1.0  # of the gradients that are kept
        self.optimizer = optimizer
        self.options = options
        self.plans: PlanCache = PlanCache("loss")
        self._grid = model.switches, grid_of(options.schedule, model)
        self._groups = _GroupNames(model, optimizer)
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
        return {_scaling().ARGUMENT: torch.tensor(_scaling().scale_of(scaler))}

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
        _refuse_early_hooks(self.optimizer)
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
                        self._step_controller()
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
        scale = 1.0 if scaler is None else _scaling().scale_of(scaler)
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
                _scaling().move(scaler, skipped=not well)

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
                scale = 1.0 if scaler is None else _scaling().scale_of(scaler)
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

    def _step_controller(self) -> None:
        """A step without gradients, for who sees it: schedulers put theirs in place of `step`."""
        if self.elementwise is not None:
            tell_stepped(self.optimizer)
            return
        if "step" not in vars(self.optimizer) and not _has_hooks(self.optimizer):
            return
        with as_it_is():
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            kept = [(p, p.grad) for p in held if p.grad is not None]
            for parameter, _ in kept:
                parameter.grad = None
        if _has_hooks(self.optimizer):  # which may read parameters
            self.optimizer.step()
        else:
            with as_it_is():
                self.optimizer.step()
        for parameter, grad in kept:
            parameter.grad = grad


@checked_call
def train_step(
    model: ParallelModule,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    inputs: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    clip_grad_norm: float | None = None,
    topology: Topology | None = None,
    search: str = "predictable",
    keep_gradients: bool = False,
    recompute: Sequence[str] | None = None,
    master_weights: bool = False,
    detect_nan: bool | str = False,
    capture: str = "once",
    batch_norm: str = "whole_batch",
    elementwise: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> TrainStep:
    """A training step as one planned program.

        >>> model = dt.parallelize(torch.nn.Linear(8, 2), dt.Mesh(dp=2))
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = dt.train_step(model, lambda m, x: m(x).square().mean(), opt,
        ...                      inputs=dict(dp=dt.Row()))
        >>> [(c.kind, c.axis) for c in step.plan(torch.empty(4, 8)).collectives]
        [('all_reduce', 'dp'), ('all_reduce', 'dp')]
        >>> 0 < float(step(torch.ones(4, 8)))
        True

    Args:
        loss_fn: ``loss_fn(model, *batch)`` gives a scalar, or (scalar, {name: scalar}).
        optimizer: an optimizer over the model's parameters that is elementwise: torch's own but
            Adafactor, LBFGS, Muon and SparseAdam, others with ``elementwise``.
            Adam, AdamW, SGD and Adagrad update by torch's fused kernels, unless a group says
            otherwise: ``foreach=False`` is torch's default on the CPU, of which float32 differs in
            the last bits.
        inputs: placements of every argument with the batch dim, or argument name to placements.
        schedule: such as OneFOneB, with its number of microbatches; default one. They cut the batch
            as torch.chunk does: 30 rows in 8 are 7 of 4 and one of 2, 9 in 4 are 3 of 3.
        clip_grad_norm: the global norm that gradients are scaled down to: they are divided by
            max(1, (norm + 1e-6) / clip_grad_norm). It is that of the parameters which the
            optimizer has: no others have a gradient. Computed in float32, or in float64 where a
            gradient is.
        topology: what the planner prices with; by default an H100's figures.
        keep_gradients: keep each step's gradients on the actors, for ``step.gradients()``.
        search: "predictable" splits only what pins reach; "free" lifts that.
        recompute: globs over names of modules whose activations are not kept for the backward but
            computed again; `parallelize` takes it too.
        master_weights: the optimizer updates float32 copies of 16-bit parameters, which become
            these rounded; the copies are split as its state is, and saved with it.
        detect_nan: each op of forward and backward is checked on each rank: the first NaN, or Inf
            that no operand holds, fails the step with the op, the rank, the line and the operands;
            "nan": NaN alone, for programs with a wanted Inf. It reads every value once more.
        capture: "once": loss_fn's Python runs once, and again where what it reads has changed,
            and for other shapes, of which the last 16 are known. The second length of a dim is
            captured for all lengths, where that is sure to be right; a warning says where not.
            "each call": it runs at each call, so that it may draw from Python's or numpy's random
            numbers and change attributes; that costs the time of a capture, and where the ops
            differ, of planning.
        batch_norm: its statistics where there are microbatches. "whole_batch" is refused, as each
            would wait for all; "per_microbatch" is as torch's loop over the microbatches, each of
            all ranks' rows: running ones move once for each, in their order. Other buffers are
            those of the whole batch, other ops that mix rows are refused.
        elementwise: True states of an optimizer of another class that each element of a parameter
            is updated from its own gradient and state alone. It is tried before the first step, on
            small parameters, in a second at most (``step.elementwise`` says what was seen), and
            refused where numbers differ or an op mixes elements. What its step changes of its
            groups' options and of its attributes is read and written as torch does.
        grad_scaler: for float16: ``torch.amp.GradScaler("cpu")``, on GPUs too. The loss is
            multiplied by its scale, the gradients are divided by it before they are clipped. Where
            one is not finite the step changes nothing, ``loss.skipped`` is True, and the scaler
            backs off. Its state is the object's own, moved when a step has ended: so a call waits
            for the step before. One that is switched off does nothing.

    Raises PlanningError, here and at the first `plan` or call.
    """
    if not (isinstance(model, ParallelModule) and callable(loss_fn)):
        check_order("train_step", _KINDS, model, loss_fn, optimizer)
    check_parallel("train_step", model)
    if model.source is not None:
        raise PlanningError(
            f"{model!r} is a replica: its values are the policy's, and the next dt.sync would put "
            f"these in the place of what a step has trained.\n"
            f"fix: dt.train_step(policy, loss_fn, optimizer)"
        )
    fix = "dt.train_step(model, lambda model, x, y: ..., optimizer)"
    check_callable("loss_fn", loss_fn, fix)
    check_kind("elementwise", elementwise, bool, "True or False", "elementwise=True")
    given, optimizer = optimizer, torchs_own(optimizer)
    if elementwise:
        state_elementwise(optimizer)
    check_optimizer(optimizer)
    is_schedule = isinstance(schedule, Schedule) and not isinstance(schedule, type)
    if schedule is not None and not is_schedule:
        raise PlanningError(
            f"schedule={schedule!r} is not a schedule; fix: dt.OneFOneB(microbatches=4), "
            f"dt.GPipe(microbatches=4) or dt.Custom(...)"
        )
    scaler = None if grad_scaler is None else _scaling().checked_scaler(grad_scaler)
    if scaler is not None and detect_nan:
        raise PlanningError(
            "detect_nan fails a step for what a grad_scaler skips it for: gradients that are not "
            "finite.\nfix: leave one of them out"
        )
    if clip_grad_norm is not None:
        fix = "clip_grad_norm=1.0, or leave it out for no clipping"
        check_number("clip_grad_norm", clip_grad_norm, above=0, fix=fix)
    check_topology(topology)
    check_kind("keep_gradients", keep_gradients, bool, "True or False", "keep_gradients=True")
    check_kind("master_weights", master_weights, bool, "True or False", "master_weights=True")
    if master_weights:
        check_masters(optimizer)
    rule_of(optimizer, master_weights)
    check_word("batch_norm", batch_norm, ("whole_batch", "per_microbatch"))
    again = () if recompute is None else recompute_of(recompute, model.module)
    check_recompute(model, again)
    planning = Options(
        inputs=inputs,
        topology=topology,
        search=checked_search(search),
        recompute=again,
        each_call=checked_capture(capture),
        per_microbatch=batch_norm == "per_microbatch",
    )
    options = StepOptions(
        planning=planning,
        schedule=schedule or GPipe(microbatches=1),
        clip_grad_norm=None if clip_grad_norm is None else float(clip_grad_norm),
        keep_gradients=keep_gradients,
        master_weights=master_weights,
        detect_nan=checked_detect(detect_nan) if detect_nan else False,
        grad_scaler=scaler,
    )
    step = TrainStep(model, loss_fn, optimizer, options)
    step.accelerated = given if given is not optimizer else None
    model.claim_homes(step.grid.home())
    return step


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


def check_recompute(model: ParallelModule, again: tuple[str, ...]) -> None:
    """PlanningError where both state what is computed again."""
    if again and model.recompute:
        raise PlanningError(
            f"recompute is stated twice.\n"
            f"  parallelize: {list(model.recompute)}, train_step: {list(again)}\n"
            f"fix: leave it out of one of them"
        )


def _read_loss(loss: object) -> None:
    assert isinstance(loss, Loss)
    loss.tensor()


def _refuse_early_hooks(optimizer: torch.optim.Optimizer) -> None:
    """PlanningError for what would run before the update, and see no gradients."""
    if optimizer._optimizer_step_pre_hooks or hooks._global_optimizer_pre_hooks:
        raise PlanningError(
            f"the {type(optimizer).__name__} has a hook before its step, which would find no "
            f"gradients: they are on the ranks, where the update runs.\n"
            f"fix: remove the hook; clip_grad_norm= clips, step.gradients() gives gradients"
        )


def _refuse_gradients_of_arguments(call: BoundCall) -> None:
    """Raise PlanningError for an argument that requires grad: the step does not set its `grad`."""
    leaves = enumerate(call.leaves)
    of = (i for i, x in leaves if isinstance(x, torch.Tensor | TensorSpec) and x.requires_grad)
    if (index := next(of, None)) is None:
        return
    args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
    name = leaf_names(call.fn, args, kwargs)[index]
    raise PlanningError(
        f"the argument {name} requires grad, and a step has gradients of its model's parameters "
        f"alone.\n"
        f"  {name}: {dtype_name(call.leaves[index].dtype)}{list(call.leaves[index].shape)}\n"
        f"fix: model.z = nn.Parameter(z) before parallelize, read from the model in loss_fn; or "
        f"pass z.detach(), which has no gradient"
    )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user's functions run after its step."""
    return bool(optimizer._optimizer_step_post_hooks or hooks._global_optimizer_post_hooks)


def tell_stepped(optimizer: torch.optim.Optimizer) -> None:
    """What a step tells those who wait for it, without running the class's own, which may count:
    schedulers put theirs in place of `step`, hooks run after it."""
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]
    after = (optimizer._optimizer_step_post_hooks, hooks._global_optimizer_post_hooks)
    for hook in (hook for own in after for hook in list(own.values())):
        hook(optimizer, (optimizer,), {})


class _GroupNames:
    """The names of the parameters of each of an optimizer's groups, read anew where they changed.
    What stands in the module no more has none, and no gradient.

    Raises PlanningError for a parameter that never was the model's.
    """

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.held: object = None  # what of the module was seen, and the parameters, by id
        self.names: tuple[tuple[str, ...], ...] = ()

    def __call__(self) -> tuple[tuple[str, ...], ...]:
        groups = self.optimizer.param_groups
        seen = self.model.seen
        held = seen.number, tuple(tuple(map(id, group["params"])) for group in groups)
        if held != self.held:
            self.names = tuple(tuple(self._names(group["params"], seen)) for group in groups)
            self.held = held
        return self.names

    def _names(self, parameters: Sequence[torch.Tensor], seen: SeenModule) -> Iterator[str]:
        for parameter in parameters:
            label = self.model.labels.of(parameter)
            if label is None:
                raise not_the_models(parameter)
            if label in seen.names:
                yield seen.names[label]


def _scaling() -> Any:
    """Not at the top: few programs scale their loss."""
    from dtensor.api.step import loss_scale

    return loss_scale


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
