"""`stages="auto"`: choose the stages so that the slowest stage is as fast as possible.

    model = parallelize(GPT(config), Mesh(pp=2, tp=2), MEGATRON, stages="auto")
    train_step(model, loss_fn, opt).plan(tokens, targets).stages
    # {"pp": [["embed.*", "blocks.{0..2}.*"], ["blocks.3.*", "head.*"]]}

The program is planned without stages. Its units (modules that compute with parameters) form a chain
with the plan's prices, which sharding/plan/stages/ cuts so that the most expensive stage is as
cheap as possible. The result is a list of patterns: a user who states them gets the same plan. The
choice of the first program that runs is final.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from dtensor.api.model.stating.patterns import listing, names_of
from dtensor.api.model.stating.stages import StagePlan, resolve_stages
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.units import Units, units_of
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.stages.cut_chain import partition
from dtensor.sharding.plan.stages.unit_costs import chain_of
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.spec.mesh import Mesh


def choose_stages(
    module: nn.Module,
    stages: StagePlan,
    request: Request,
    make: Callable[[Request], Plan],
    in_flight: Sequence[int] = (),
) -> StagePlan:
    """Return ``stages`` with patterns for each stage.

    Args:
        request: the request of the program, whose flow has no stages.
        make: plans a request.
        in_flight: by stage, how many microbatches are in flight at a time.

    Raises PlanningError if the program has too few modules with parameters, or uses parameters
    again so that no cut goes forward.
    """
    axis = stages.axis
    assert axis is not None
    mesh = request.mesh
    unstaged = make(replace(request, mesh=mesh.without(axis), stage_axis=None, stage_ranks=()))
    names = names_of(module)
    found_units = units_in(module, unstaged.flow)
    if len(found_units.units) < stages.num_stages:
        raise _too_few_units_error(found_units, stages, mesh)
    uses = found_units.of_label()
    chain = chain_of(
        unstaged,
        found_units.flow,
        uses=uses,
        reused=found_units.reused,
        depth=depth_of(found_units),
        axis=axis,
    )
    stages_per_rank = stages.num_stages // mesh.axis_size(axis)
    parts = partition(
        chain,
        stages.num_stages,
        in_flight=in_flight,
        memory_bytes=request.topology.memory_bytes / stages_per_rank,
    )
    if parts is None:
        raise _reused_parameters_error(found_units, stages)
    stage_of_unit = {
        unit: number
        for number in range(stages.num_stages)
        for unit in range(parts.bounds[number], parts.bounds[number + 1])
    }
    homes = {
        name: {stage_of_unit[unit] for unit in units}
        for name, units in found_units.of_name().items()
    }
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    first_stage = {label: stage_of_unit[units[0]] for label, units in uses.items()}
    for named in names:  # the names of a tied parameter by which no op uses it
        if named.name in first_stage:
            for name in named.names:
                homes.setdefault(name, {first_stage[named.name]})
    _add_unused(parameters, homes)
    patterns = [_patterns(parameters, homes, number) for number in range(stages.num_stages)]
    chosen = resolve_stages(module, mesh, {axis: patterns})
    return replace(chosen, auto=True, ranks=stages.ranks)


def units_in(module: nn.Module, flow: Dataflow) -> Units:
    """Return the units of a program of the module. ``flow``: without stages."""
    aliases = {n.name: n.names for n in names_of(module) if n.kind == "parameter"}
    return units_of(flow, aliases, _parameter_containers(module))


def depth_of(units: Units) -> tuple[int, ...]:
    """Return, for each unit except the first, how many modules contain both it and the unit
    before."""
    owners = [unit.owner for unit in units.units]
    return tuple(_num_common(a, b) for a, b in itertools.pairwise(owners))


def _parameter_containers(module: nn.Module) -> frozenset[str]:
    """Return the names of submodules that only hold parameters, such as nn.ParameterList."""
    return frozenset(
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ParameterList | nn.ParameterDict)
    )


def _num_common(first: str, second: str) -> int:
    """Return the length of the common prefix of two module names, in parts."""
    count = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def _add_unused(parameters: Sequence[str], homes: dict[str, set[int]]) -> None:
    """Add parameters that no op uses to ``homes``. Such a parameter gets the stage of the nearest
    used parameter before it (if there is none, after it) in the innermost enclosing module that has
    used parameters."""
    used_parameters = [name for name in parameters if name in homes]
    position = {name: number for number, name in enumerate(parameters)}
    for name, number in position.items():
        if name in homes:
            continue
        path = name
        while path:
            path = path.rpartition(".")[0]
            inside = [n for n in used_parameters if not path or n.startswith(f"{path}.")]
            if inside:
                before = [n for n in inside if position[n] < number]
                near = before[-1] if before else inside[0]
                homes[name] = {max(homes[near]) if before else min(homes[near])}
                break


# -- patterns --------------------------------------------------------------------------------------


def _patterns(parameters: Sequence[str], homes: Mapping[str, set[int]], stage: int) -> list[str]:
    """Return globs that match the stage's parameters: one for a module that is only on the stage,
    otherwise one per parameter."""
    exclusive = {name for name in parameters if homes[name] == {stage}}
    on_stage = {name for name in parameters if stage in homes[name]}
    patterns: list[str] = []
    _add_patterns("", parameters, exclusive, on_stage, patterns)
    return list(collapse(patterns))


def _add_patterns(
    path: str, names: Iterable[str], exclusive: set[str], on_stage: set[str], patterns: list[str]
) -> None:
    """Append the patterns for the parameters ``names`` below ``path``, in the module's order."""
    start = f"{path}." if path else ""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(start + name[len(start) :].split(".")[0], []).append(name)
    for part, inside in groups.items():
        if inside == [part]:  # a parameter
            patterns += [part] if part in on_stage else []
        elif exclusive.issuperset(inside):
            patterns.append(f"{part}.*")
        elif on_stage.intersection(inside):
            _add_patterns(part, inside, exclusive, on_stage, patterns)


# -- errors ----------------------------------------------------------------------------------------


def _too_few_units_error(units: Units, stages: StagePlan, mesh: Mesh) -> PlanningError:
    """Return the error for fewer modules with parameters than stages, with a fix."""
    unit_names = [unit.owner or ", ".join(unit.names) for unit in units.units]
    size = mesh.axis_size(stages.axis or "")
    max_stages = len(unit_names) // size * size
    fix = "state the stages by patterns, or leave stages= out"
    if max_stages:
        fix = f'stages={{"{stages.axis}": dt.Auto(num_stages={max_stages})}}'
    elif unit_names:
        fix = f"a mesh with {stages.axis}={len(unit_names)}"
    return PlanningError(
        f"the program cannot be cut into {stages.num_stages} stages: a stage has a module that "
        f"computes with parameters, and there are {len(unit_names)}.\n"
        f"  {listing(unit_names)}\n"
        f"fix: {fix}"
    )


def _reused_parameters_error(found_units: Units, stages: StagePlan) -> PlanningError:
    """Return the error for parameters that are used again, so that no cut goes forward."""
    twice = [name for name, units in found_units.of_name().items() if len(units) > 1]
    return PlanningError(
        f"no cut into {stages.num_stages} stages goes forward: parameters are used again after "
        f"others.\n"
        f"  {listing(twice)}\n"
        f"fix: fewer stages, or state them by patterns"
    )
