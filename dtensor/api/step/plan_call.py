"""Plan a call: capture it, resolve what the user stated about it, and run the planner.

    call = BoundCall.of(loss_fn, (model, tokens, targets), {})
    call.look()             # records the present submodules and parameters of the models
    planned = plan_call(call, mesh, "loss", Options(), "loss_fn")
    planned.plan            # sharding.Plan
    planned.arguments       # {"tokens": 1, "targets": 2}: plan input -> index of the call's leaf

`dt.compile` and `dt.train_step` share this. Planning changes neither the models nor the options,
and launches nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from dtensor.api.model.models import Models
from dtensor.api.model.statements import (
    Options,
    request_of,
    returned_leaves,
    written_leaves,
)
from dtensor.api.model.stating.stages import StagePlan
from dtensor.api.step.bound_call import BoundCall, Grads
from dtensor.errors import check_word
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.frontend.capture.capture import trim_fake_cache
from dtensor.frontend.graph import Graph
from dtensor.gc_pause import collector_paused
from dtensor.runtime.lower.timetable import GridTimetable
from dtensor.runtime.schedule import Grid
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.planner import plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.spec.mesh import Mesh
from dtensor.signals import immediate_handlers


@dataclass(frozen=True, kw_only=True, repr=False)
class Planned:
    """A plan, and the operands that it was made from.

    arguments: plan input -> index of the leaf that feeds it. stages: with "auto", the chosen
    stages. grid: the schedule's. returned: index of a result -> index of the leaf that it is; such
    a result needs no output, because the program writes the leaf in place. call: the call without
    data. switches, arrangement: the models' when the plan was made.
    """

    plan: Plan
    graph: Graph
    arguments: Mapping[str, int]
    models: Models
    request: Request
    stages: StagePlan
    grid: Grid | None
    returned: Mapping[int, int]
    call: BoundCall
    switches: int
    arrangement: tuple[int, ...]

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is multiplied by a scale."""
        training = self.request.training
        return training is not None and training.scaled

    @cached_property
    def changed(self) -> tuple[int, ...]:
        """The indices of the leaves that the program writes in place."""
        return tuple(index for _, index in written_leaves(self.graph))

    def is_unchanged(self) -> bool:
        """Return whether the capture would read the identical objects. Fast; False does not prove a
        change, because an equal object may have replaced another."""
        reads = self.graph.reads
        return reads is None or reads.same()

    def difference(self) -> str | None:
        """Return the first difference, by value, from the state that the capture read, or None."""
        reads = self.graph.reads
        return None if reads is None else reads.difference()

    def __repr__(self) -> str:
        return f"<planned: {self.plan!r}>"


def plan_call(
    call: BoundCall,
    mesh: Mesh,
    grads: Grads,
    options: Options,
    name: str,
    graph: Graph | None = None,
) -> Planned:
    """Plan the call under ``name``; capture it first unless ``graph`` is its graph. Raises
    PlanningError. The caller has called ``call.look()``."""
    with CALL_LOCK, collector_paused(), immediate_handlers():
        captured = call.capture(mesh, grads, options, name, graph)
        request, stages = request_of(captured)
        new_plan = plan(request)
        request = replace(request, zero=new_plan.zero)  # later plans of it have the chosen level
        trim_fake_cache()
        graph, models = captured.graph, captured.models
        inputs = captured.argument_inputs(request.flow)
        return Planned(
            plan=new_plan,
            graph=graph,
            arguments={item.name: entry.index for item, entry in inputs},
            models=models,
            request=request,
            stages=stages,
            grid=request.timetable.grid if isinstance(request.timetable, GridTimetable) else None,
            returned=returned_leaves(graph, request.results),
            call=call.on_meta(),
            switches=models.switches,
            arrangement=models.arrangement,
        )


# -- arguments that compile and train_step share ---------------------------------------------------


def stated_device(
    fn: Callable[..., Any], device: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the ``device`` to plan for, and the function's kwargs: a function that has a parameter
    of this name gets it instead."""
    if device is None:
        return None, kwargs
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except ValueError:  # a builtin without a signature
        return device, kwargs
    if "device" in signature.parameters:
        return None, {**kwargs, "device": device}
    return device, kwargs


def checked_capture(capture: str) -> bool:
    """Return whether a step is captured at each call. Raises PlanningError for another word."""
    check_word("capture", capture, ("once", "each call"))
    return capture == "each call"
