"""`train_step`: forward, backward and optimizer of one step as one program.

    step = train_step(model, loss_fn, opt, inputs=dict(dp=Row()), schedule=OneFOneB(microbatches=8),
                      clip_grad_norm=1.0)
    print(step.plan(tokens, targets))
    with launch(mesh):
        loss = step(tokens, targets)       # a future; float(loss) waits

A call costs one message to each actor. It runs ahead of the cluster by at most two steps. The
controller's optimizer gives the options of its groups (a scheduler may change them between steps)
and is stepped without gradients, which changes nothing but satisfies schedulers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.api.compiled import load, on_stage
from dtensor.api.loss import Loss
from dtensor.api.parallel import ParallelModule
from dtensor.api.placed_optimizer import OptimizerHome, agreed, place_optimizer
from dtensor.api.plan_call import Call, Options, Planned, parameter_labels, plan_call
from dtensor.api.randomness import numbers_fed
from dtensor.api.scheduled import scheduled
from dtensor.api.session import Session, session_for
from dtensor.api.stating.options import recompute_of
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Graph
from dtensor.numerics import is_narrow
from dtensor.runtime.lower.actions import stage_costs
from dtensor.runtime.lower.program import holders
from dtensor.runtime.lower.rank import Roles
from dtensor.runtime.schedule import Costs, GPipe, Grid, Schedule, in_flight
from dtensor.runtime.shard_optimizer import check_masters, check_optimizer, state_tensors
from dtensor.sharding.plan.hints import hints as hints_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import Training
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.shards import assemble_at
from dtensor.sharding.spec.spec import TensorSpec

RUN_AHEAD = 2


class TrainStep:
    """What `train_step` returns; see the module docstring."""

    def __init__(
        self,
        model: ParallelModule,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        inputs: Mapping[str, Any] | None,
        schedule: Schedule,
        clip_grad_norm: float | None,
        topology: Topology | None,
        search: str,
        keep_gradients: bool,
        recompute: tuple[str, ...] = (),
        master_weights: bool = False,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.inputs = inputs
        self.schedule = schedule
        self.clip_grad_norm = clip_grad_norm
        self.topology = topology
        self.search = search
        self.grid = self._grid()
        self.groups: tuple[tuple[str, ...], ...] = ()
        self._held: tuple[tuple[int, ...], ...] = ()  # the parameters that ``groups`` names, by id
        self._read_groups()
        self.keep_gradients = keep_gradients
        self.recompute = recompute
        self.master_weights = master_weights
        self._last: Planned | None = None
        self._planned: dict[object, Planned] = {}
        self._running: deque[Loss] = deque()
        self._session: Session | None = None  # of the last step
        self.latest: Planned | None = None
        """What `plan` or a call planned last."""

    # -- planning --------------------------------------------------------------------------------

    def plan(self, *batch: Any, hints: bool = False, **kwargs: Any) -> Plan:
        """The plan of a step on such a batch: tensors (meta too) or specs. Nothing is launched.

        ``hints``: end it with the pins whose opposite (column for row) would be cheaper; that
        plans once more for each pattern.
        """
        planned = self._plan(self._call(batch, kwargs))
        if not hints:
            return planned.plan
        return replace(planned.plan, hints=hints_of(planned.request, planned.plan))

    def stage_costs(self, *batch: Any, **kwargs: Any) -> Costs:
        """Predicted seconds of F, I and W of each stage on one microbatch, communication included:
        what `Searched` takes as ``costs``."""
        return stage_costs(self._plan(self._call(batch, kwargs)).plan)

    def plan_of(self, graph: Graph, *batch: Any, **kwargs: Any) -> Plan:
        """`plan`, where ``graph`` is what such a step captures; several steps may share one."""
        return self._plan(self._call(batch, kwargs), graph).plan

    def _call(self, batch: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return Call.of(self.loss_fn, (self.model, *batch), kwargs)

    def _plan(self, call: Call, graph: Graph | None = None) -> Planned:
        self._read_groups()
        key = self._key(call)
        if key not in self._planned:
            options = Options(
                inputs=self.inputs,
                num_microbatches=self.schedule.microbatches,
                topology=self.topology,
                training=self._training,
                free=self.search == "free",
                recompute=self.recompute,
                graph=graph,
                in_flight=in_flight(self.grid),
            )
            name = getattr(self.loss_fn, "__name__", "step").strip("<>")
            planned = plan_call(call, self.model.mesh, "loss", options, name)
            self._planned[key] = replace(planned, plan=scheduled(planned.plan, self.grid))
            # capture ran forward, which may count its calls in an attribute of a module
            self._planned[self._key(call)] = self._planned[key]
        self.latest = self._planned[key]
        return self.latest

    def _key(self, call: Call) -> object:
        trained = tuple(p.requires_grad for p in self.model.parameters())
        return (call.key(), trained, self.groups)

    def _training(self, graph: Graph) -> Training:
        known = parameter_labels(graph)
        trained = frozenset(n for group in self.groups for n in group if n in known)
        return Training(
            optimizer=type(self.optimizer).__name__,
            trained=trained,
            state_tensors=state_tensors(self.optimizer),
            clip_grad_norm=self.clip_grad_norm,
            master_weights=self.master_weights,
        )

    def _read_groups(self) -> None:
        """Names of the parameters of each of the optimizer's groups, where they changed."""
        held = tuple(tuple(map(id, group["params"])) for group in self.optimizer.param_groups)
        if held == self._held:
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups: list[tuple[str, ...]] = []
        for group in self.optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise PlanningError(
                    f"the optimizer holds a parameter of shape {list(unknown[0].shape)} that is "
                    f"not one of the model's; fix: build it over model.parameters()"
                )
            groups.append(tuple(names[id(p)] for p in group["params"]))
        self.groups, self._held = tuple(groups), held

    def _grid(self) -> Grid:
        stages = self.model.stage_plan
        ranks = self.model.mesh.axis_size(stages.axis) if stages.axis else 1
        grid = self.schedule.grid(stages.num_stages, ranks)
        self.model.settle_stages(grid.home())
        return grid

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **kwargs: Any) -> Loss:
        """One step. The result is a future; a failure that nobody read raises here."""
        if self._session is not None and self._session.closed:
            self._running.clear()  # its launch raised what was not read when it ended
        self._raise_unread()
        call = self._call(batch, kwargs)
        planned = self._plan(call)
        session = session_for(self.model.mesh)
        home = self._place_optimizer(session, planned)
        roles = Roles(optimizer=home.name, gradients=self.keep_gradients)
        program = load(session, planned, roles, self.grid)
        while len(self._running) >= RUN_AHEAD:
            self._running.popleft().tensor()
        options = {"options": home.options(self.groups)}
        kept = self._kept(session, planned) if self.keep_gradients else {}
        numbers = numbers_fed(self.model.steps.advance(), "train")
        future = session.run(program.handle, program.feed(call, numbers, options), kept)
        self._last = planned
        session.resident(self.model).changed = True
        loss = Loss(future, planned, session)
        self._running.append(loss)
        if session is not self._session:
            self._session = session
            session.settling.append(self._settle)
        self._step_controller()
        return loss

    def gradients(self, *batch: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Parameter name to its gradient, whole, before clipping.

        With a batch: at the present values; nothing is changed. Without: of the last step, which
        ``keep_gradients`` of `train_step` keeps. In the parameter's dtype, as torch has it; with
        master weights in float32, as the optimizer reads it.
        """
        session = session_for(self.model.mesh)
        if not batch and not kwargs:
            if not self.keep_gradients or self._last is None or self._session is not session:
                raise PlanningError(
                    "no gradients of a last step are kept.\n"
                    "fix: train_step(..., keep_gradients=True) and take a step in this launch, or "
                    "pass a batch: step.gradients(*batch)"
                )
            kept = self._kept(session, self._last)
            last: dict[str, torch.Tensor] = {}
            for label, spec in _gradient_specs(self._last).items():
                ranks = holders_of(spec)
                shards = session.fetch(kept[f"gradient {label}"], ranks)
                last[label] = assemble_at(dict(zip(ranks, shards, strict=True)), spec)
            return self._shown(last, self._last)
        call = self._call(batch, kwargs)
        planned = self._plan(call)
        program = load(session, planned, Roles(gradients=True), self.grid)
        numbers = numbers_fed(self.model.steps.present(), "train")
        found = session.run(program.handle, program.feed(call, numbers), {}).get()
        whole = {
            label: assemble_at({r: found[r][f"gradient {label}"] for r in holders_of(spec)}, spec)
            for label, spec in _gradient_specs(planned).items()
        }
        return self._shown(whole, planned)

    def _shown(
        self, gradients: Mapping[str, torch.Tensor], planned: Planned
    ) -> dict[str, torch.Tensor]:
        if self.master_weights:
            return {n: g.float() if is_narrow(g.dtype) else g for n, g in gradients.items()}
        dtypes = {i.label: i.spec.dtype for i in planned.plan.inputs}
        return {n: g.to(dtypes[n]) for n, g in gradients.items()}

    def _kept(self, session: Session, planned: Planned) -> dict[str, str]:
        """Program output to the table's name of a gradient that stays on the actors."""
        prefix = session.resident(self.model).prefix
        return {f"gradient {n}": f"{prefix}gradient {n}" for n in _gradient_specs(planned)}

    def _place_optimizer(self, session: Session, planned: Planned) -> OptimizerHome:
        """The optimizer's state goes to the cluster with the first step."""
        resident = session.resident(self.model)
        home = resident.optimizers.get(id(self.optimizer))
        if home is not None:
            return agreed(home, self.master_weights)
        # the parameters first: their specs say how the state is cut
        session.place(self.model, planned.plan)
        trained = {name for group in self.groups for name in group}
        held: list[set[str]] = [set() for _ in range(session.mesh.size)]
        for item in planned.plan.inputs:
            if item.kind == "parameter" and item.label in trained:
                for rank in holders(planned.plan, item):
                    held[rank].add(item.label)
        return place_optimizer(
            session,
            self.model,
            self.optimizer,
            self.groups,
            held,
            masters=self.master_weights,
        )

    def _raise_unread(self) -> None:
        for loss in list(self._running):
            if loss.done() and not loss.was_read:
                self._running.remove(loss)
                loss.tensor()

    def _settle(self) -> None:
        for loss in self._running:
            if not loss.was_read:
                loss.tensor()

    def _step_controller(self) -> None:
        """A step without gradients: torch's LR schedulers want to see one."""
        kept = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        self.optimizer.step()
        for parameter, grad in kept:
            parameter.grad = grad


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
) -> TrainStep:
    """A training step as one planned program.

    Args:
        loss_fn: ``loss_fn(model, *batch)`` gives a scalar, or (scalar, {name: scalar}).
        optimizer: a torch.optim optimizer over the model's parameters, known to be elementwise.
        inputs: placements of every argument with the batch dim, or argument name to placements.
        schedule: such as OneFOneB, with its number of microbatches; default one microbatch.
        clip_grad_norm: the global norm that gradients are scaled down to.
        keep_gradients: keep each step's gradients on the actors, for ``step.gradients()``.
        recompute: globs over names of modules whose activations are not kept for the backward but
            computed again; `parallelize` takes it too.
        master_weights: the optimizer updates float32 copies of 16-bit parameters, which become
            these rounded; the copies are split as its state is, and saved with it.

    Raises PlanningError, here and at the first `plan` or call.
    """
    if not isinstance(model, ParallelModule):
        raise PlanningError(
            f"train_step takes a parallelized module, not {type(model).__name__}; "
            f"fix: model = dt.parallelize(model, mesh, {{...}})"
        )
    check_optimizer(optimizer)
    if schedule is not None and not isinstance(schedule, Schedule):
        raise PlanningError(
            f"schedule={schedule!r} is not a schedule; fix: dt.OneFOneB(microbatches=4), "
            f"dt.GPipe(microbatches=4) or dt.Custom(...)"
        )
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise PlanningError(
            f"clip_grad_norm={clip_grad_norm!r}: a norm to scale down to is above 0; "
            f"fix: leave it out for no clipping"
        )
    if master_weights:
        check_masters(optimizer)
    again = recompute_of(recompute, model.module)
    if again and model.recompute:
        raise PlanningError(
            f"recompute is stated twice.\n"
            f"  parallelize: {list(model.recompute)}, train_step: {list(again)}\n"
            f"fix: leave it out of one of them"
        )
    return TrainStep(
        model,
        loss_fn,
        optimizer,
        inputs,
        schedule or GPipe(microbatches=1),
        clip_grad_norm,
        topology,
        search,
        keep_gradients,
        again,
        master_weights,
    )


def _gradient_specs(planned: Planned) -> dict[str, TensorSpec]:
    """Parameter name to the spec under which its gradient ends, on the user's mesh."""
    return {
        str(o.of): on_stage(planned.plan, o.spec, o.values[0][0])
        for o in planned.plan.outputs
        if o.kind == "gradient"
    }
