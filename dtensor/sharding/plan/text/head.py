"""The beginning of a printed plan: its mesh, what each axis splits, the stages that were chosen,
what is stored split, inputs.

    plan mlp    mesh(tp=2)    stage 0 of 1    all ranks identical
    axis tp     splits up.weight dim 0 (4096), with down.weight, up.bias; opened by *.up.weight

    inputs
      up.weight  f32[4096@tp,1024]  parameter

Not here: steps (render.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from dtensor.sharding.plan.cost.memory import stage_seconds
from dtensor.sharding.plan.passes.gather_stored import LEVELS
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Convert
from dtensor.sharding.plan.text.words import collapse, size_text, wrapped
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Shard, index_sets, length
from dtensor.sharding.spec.spec import TensorSpec

WIDTH = 100
MAX_TEXT, MAX_TYPE = 48, 30


def head(plan: Plan) -> str:
    parts = [f"plan {plan.name}", str(plan.mesh)]
    if plan.num_stages > 1:
        parts.append(f"{plan.num_stages} stages over {plan.stage_axis}")
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} microbatches (axis {MICROBATCH_AXIS}, in time)")
    if plan.num_stages == 1:
        parts += ["stage 0 of 1", ranks(plan, 0)]
    return "    ".join(parts)


def ranks(plan: Plan, stage: int) -> str:
    """Whether all ranks of the stage hold shards of the same sizes."""
    uneven: list[str] = []
    for name, spec in _held(plan, stage):
        for axis, placement in spec.sharding.items():
            if isinstance(placement, Shard):
                num = spec.mesh.axis_size(axis)
                sets = index_sets(placement, spec.shape[placement.dim], num)
                sizes = [length(held) for held in sets]
                if len(set(sizes)) > 1:
                    uneven.append(f"{name} {spec} holds {', '.join(map(str, sizes))} over {axis}")
    if not uneven:
        return "all ranks identical"
    more = f" and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    return f"ranks differ: {uneven[0]}{more}"


def _held(plan: Plan, stage: int) -> Iterable[tuple[str, TensorSpec]]:
    for item in plan.inputs:
        if stage in item.stages:
            yield item.name, item.spec
    for step in plan.steps:
        match step:
            case Compute() if step.stage == stage:
                for name, spec in zip(step.results, step.result_specs, strict=True):
                    if name is not None and spec is not None:
                        yield name, spec
            case Convert() if step.stage == stage:
                yield step.result, step.move.dst
            case _:
                pass


def axes(plan: Plan) -> list[str]:
    """What each axis splits, and which pin opened it; repeated layers as one line."""
    opened = dict(plan.opened)
    lines: list[str] = []
    for axis in plan.mesh.axes:
        start = f"axis {axis}    "
        if axis == plan.stage_axis:
            lines.append(f"{start}stages: {', '.join(map(str, range(plan.num_stages)))}")
            lines += _chosen(plan)
            continue
        groups: dict[tuple[str, int, int, tuple[str, ...]], list[list[str]]] = {}
        for item in opened.get(axis, ()):
            key = (item.by, item.dim, item.size, collapse([item.label, *item.values], "*"))
            found = groups.setdefault(key, [[], []])
            found[0].append(item.label)
            found[1].extend(item.values)
        for (by, dim, size, _), (labels, others) in groups.items():
            text = f"splits {', '.join(collapse(labels))} dim {dim} ({size})"
            if others:
                text += f", with {', '.join(collapse(others))}"
            lines += wrapped(f"{text}; opened by {by}", start, WIDTH)
        if not groups:
            one = plan.mesh.axis_size(axis) == 1
            lines.append(start + ("one rank" if one else "splits nothing: no pin opens a factor"))
    return lines


def _chosen(plan: Plan) -> list[str]:
    """The stages that "auto" chose, and what the slowest of them costs beside the mean."""
    if not plan.auto:
        return []
    costs = [sum(stage_seconds(plan, stage)) for stage in range(plan.num_stages)]
    text = " | ".join(", ".join(patterns) for patterns in plan.auto)
    if sum(costs):
        text += f"; the slowest costs {max(costs) * len(costs) / sum(costs):.2f} of even"
    fullest = max(sum(plan.memory[stage].total for stage in held) for held in plan.hosted)
    limit = plan.topology.memory_bytes
    if fullest > limit:
        text += f"; {size_text(fullest)} on the fullest rank, above its {size_text(int(limit))}"
    return wrapped(text, "auto       ", WIDTH)


def stored(plan: Plan) -> list[str]:
    """What is stored split, and over which axis."""
    if plan.zero is None:
        return []
    axis, level = plan.zero
    whole = [i.label for i in plan.inputs if i.kind == "parameter" and i.stored is None]
    kept = f"; whole: {', '.join(collapse(whole))}" if whole else ""
    text = f"{axis}: {level} ({LEVELS[level]} stored over {axis}{kept})"
    return wrapped(text, "zero    ", WIDTH)


def inputs(plan: Plan, stage: int) -> list[str]:
    """Every input of the stage with its placement; those of repeated layers as one line."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for item in plan.inputs:
        if stage in item.stages:
            spec, kind = str(item.held), item.kind
            if item.held != item.spec:
                kind += f", used as {item.spec}"
            key = (kind, spec, collapse([item.label], "*"))
            groups.setdefault(key, []).append(item.label)
    rows = [(kind, ", ".join(collapse(labels)), spec) for (kind, spec, _), labels in groups.items()]
    width = min(max((len(name) for _, name, _ in rows), default=0), MAX_TEXT)
    type_width = min(max((len(spec) for _, _, spec in rows), default=0), MAX_TYPE)
    return [f"  {name:<{width}}  {spec:<{type_width}}  {kind}" for kind, name, spec in rows]
