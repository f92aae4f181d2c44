"""Make plans of models: `plan_model(MLP(), loss, (x, y), Mesh(tp=2), MEGATRON) -> Plan`.

    found = plan_model(GPT(), loss_fn, batch(), Mesh(dp=2, tp=2), MEGATRON,
                       inputs=dict(dp=Shard(0)), microbatches=2)
    kinds(found, "forward")     # Counter({"all_reduce@tp": 4, ...})

Placements are stated as in `dtensor.parallelize`: globs over parameter names, first match wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dtensor.api.model.stating.stages import resolve_stages
from dtensor.api.model.stating.stated_placements import input_pins, planner_pins, resolve_placements
from dtensor.frontend.capture.capture import capture
from dtensor.frontend.dataflow.to_dataflow import dataflow
from dtensor.runtime.lower.timetable import ONE_BY_ONE, GridTimetable
from dtensor.runtime.schedule import OneFOneB
from dtensor.sharding.plan.planner import Plan, plan
from dtensor.sharding.plan.request import Request, Training, Updater
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement, Shard

Stated = Mapping[str, Placement]

MLP_PINS: dict[str, Stated] = {
    "*up.weight": dict(tp=Shard(0)),
    "*down.weight": dict(tp=Shard(1)),
}
ATTENTION_PINS: dict[str, Stated] = {
    "*qkv.weight": dict(tp=Shard(0, blocks=3)),
    "*proj.weight": dict(tp=Shard(1)),
}
MEGATRON: dict[str, Stated] = {**ATTENTION_PINS, **MLP_PINS}
VOCABULARY: dict[str, Stated] = {
    "embed.weight": dict(tp=Shard(0)),
    "head.weight": dict(tp=Shard(0)),
}
LLAMA: dict[str, Stated] = {
    "*attn.[qkv].weight": dict(tp=Shard(0)),
    "*attn.o.weight": dict(tp=Shard(1)),
    "*mlp.gate.weight": dict(tp=Shard(0)),
    "*mlp.up.weight": dict(tp=Shard(0)),
    "*mlp.down.weight": dict(tp=Shard(1)),
}


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that needs no targets."""
    return model(x).pow(2).mean()


def plan_model(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    mesh: Mesh,
    pins: Mapping[str, Stated],
    *,
    inputs: Stated | Mapping[str, Stated] | None = None,
    microbatches: int = 1,
    stages: Mapping[str, Sequence[Sequence[str]]] | None = None,
    train: bool = True,
    clip_grad_norm: float | None = None,
    name: str = "model",
) -> Plan:
    """Return the plan of a training step (``train``), or of loss and gradients alone."""
    graph = capture(loss_fn, (model, *batch), grads="loss")
    held = resolve_stages(model, mesh, stages)
    flow = dataflow(graph, held.held, held.num_stages)
    flow.verify()
    arguments = {i.label: i.meta for i in flow.inputs if i.kind == "argument"}
    resolved = resolve_placements(model, mesh, pins, stage_axis=held.axis)
    named = planner_pins(flow, resolved, input_pins(arguments, inputs, mesh, stage_axis=held.axis))
    training = None
    if train:
        trained = frozenset(i.label for i in flow.inputs if i.kind == "parameter")
        training = Training(
            updaters=(Updater(optimizer="AdamW", trained=trained, state_tensors=2),),
            clip_grad_norm=clip_grad_norm,
        )
    timetable = ONE_BY_ONE
    if held.axis is not None:
        grid = OneFOneB(microbatches).grid(held.num_stages, mesh.axis_size(held.axis))
        timetable = GridTimetable(grid)
    request = Request(
        name=name,
        flow=flow,
        mesh=mesh,
        pins=named.pins,
        pinned_by=named.pinned_by,
        batch=named.batch,
        stage_axis=held.axis,
        num_microbatches=microbatches,
        timetable=timetable,
        training=training,
    )
    return plan(request)


def kinds(found: Plan, phase: str | None = None, stage: int | None = None) -> Counter[str]:
    """How many collectives of each kind and axis: ``{"all_reduce@tp": 4}``."""
    return Counter(
        c.key for c in found.collectives if phase in (None, c.phase) and stage in (None, c.stage)
    )
