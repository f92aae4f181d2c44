"""`stages="auto"`: the stages whose slowest is as fast as can be, by the prices of the plan.

    model = parallelize(GPT(config), Mesh(pp=2, tp=2), MEGATRON, stages="auto")
    train_step(model, loss_fn, opt).plan(tokens, targets).stages
    # {"pp": [["embed.*", "blocks.{0..2}.*"], ["blocks.3.*", "head.*"]]}

The program is planned once without stages; what that says of each unit (a module that computes with
parameters) is a chain, and the chain is cut where the dearest stage is cheapest. The result is
patterns, read as stated ones are, so that who states them gets the same plan. Once a program
has run it holds for the model: parameters stay where they are, whatever else is planned.

Not here: units (frontend/dataflow/units.py), prices and the search for the best cut
(sharding/plan/stages/).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from dtensor.api.model.stating.patterns import listing, names_of
from dtensor.api.model.stating.stages import StagePlan, stage_of
from dtensor.errors import PlanningError
from dtensor.frontend.dataflow.units import Units, units_of
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.stages.cut_chain import partition
from dtensor.sharding.plan.stages.unit_costs import chain_of
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.spec.mesh import Mesh


def cut(
    module: nn.Module,
    stages: StagePlan,
    request: Request,
    make: Callable[[Request], Plan],
    in_flight: Sequence[int] = (),
) -> StagePlan:
    """``stages`` with its stages chosen.

    Args:
        request: of the program, its flow without stages.
        make: plans a request.
        in_flight: by stage, the microbatches that the schedule holds at a time.

    Raises PlanningError where the program has too few modules with parameters.
    """
    axis = stages.axis
    assert axis is not None
    mesh = request.mesh
    unstaged = make(replace(request, mesh=mesh.without(axis), stage_axis=None, stage_ranks=()))
    names = names_of(module)
    units_found = units_in(module, unstaged.flow)
    if len(units_found.units) < stages.num_stages:
        raise _too_few(units_found, stages, mesh)
    uses = units_found.of_label()
    chain = chain_of(
        unstaged,
        units_found.flow,
        uses=uses,
        reused=units_found.reused,
        depth=depth_of(units_found),
        axis=axis,
    )
    a_rank = stages.num_stages // mesh.axis_size(axis)
    parts = partition(
        chain,
        stages.num_stages,
        in_flight=in_flight,
        memory_bytes=request.topology.memory_bytes / a_rank,
    )
    if parts is None:
        raise _reused(units_found, stages)
    stage = {
        unit: number
        for number in range(stages.num_stages)
        for unit in range(parts.bounds[number], parts.bounds[number + 1])
    }
    homes = {name: {stage[unit] for unit in units} for name, units in units_found.of_name().items()}
    every = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    first = {label: stage[units[0]] for label, units in uses.items()}
    for named in names:  # a tied parameter's other names, by which no op uses it
        if named.name in first:
            for name in named.names:
                homes.setdefault(name, {first[named.name]})
    _neighbours(every, homes)
    patterns = [_patterns(every, homes, number) for number in range(stages.num_stages)]
    chosen = stage_of(module, mesh, {axis: patterns})
    return replace(chosen, auto=True, ranks=stages.ranks)


def units_in(module: nn.Module, flow: Dataflow) -> Units:
    """The units of a program of the module, without stages."""
    aliases = {n.name: n.names for n in names_of(module) if n.kind == "parameter"}
    return units_of(flow, aliases, _containers(module))


def depth_of(units: Units) -> tuple[int, ...]:
    """By unit but the first, how many modules are around both it and the one before."""
    owners = [unit.owner for unit in units.units]
    return tuple(_shared_path(a, b) for a, b in itertools.pairwise(owners))


def _containers(module: nn.Module) -> frozenset[str]:
    return frozenset(
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ParameterList | nn.ParameterDict)
    )


def _shared_path(one: str, other: str) -> int:
    """How many modules two are both within."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def _neighbours(every: Sequence[str], homes: dict[str, set[int]]) -> None:
    """Parameters that nothing uses go where the nearest one before them is, in the innermost module
    around them that has any; else the nearest one behind."""
    used = [name for name in every if name in homes]
    place = {name: number for number, name in enumerate(every)}
    for name, number in place.items():
        if name in homes:
            continue
        path = name
        while path:
            path = path.rpartition(".")[0]
            inside = [n for n in used if not path or n.startswith(f"{path}.")]
            if inside:
                before = [n for n in inside if place[n] < number]
                near = before[-1] if before else inside[0]
                homes[name] = {max(homes[near]) if before else min(homes[near])}
                break


# -- patterns --------------------------------------------------------------------------------------


def _patterns(every: Sequence[str], homes: Mapping[str, set[int]], stage: int) -> list[str]:
    """Globs that match the stage's parameters, whole modules where the stage has them whole."""
    only_here = {name for name in every if homes[name] == {stage}}
    patterns: list[str] = []
    _within("", every, only_here, {n for n in every if stage in homes[n]}, patterns)
    return list(collapse(patterns))


def _within(
    path: str, names: Iterable[str], only_here: set[str], held: set[str], patterns: list[str]
) -> None:
    """The patterns for what is under ``path``, in the module's order."""
    start = f"{path}." if path else ""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(start + name[len(start) :].split(".")[0], []).append(name)
    for part, inside in groups.items():
        if inside == [part]:  # a parameter
            patterns += [part] if part in held else []
        elif only_here.issuperset(inside):
            patterns.append(f"{part}.*")
        elif held.intersection(inside):
            _within(part, inside, only_here, held, patterns)


# -- errors ----------------------------------------------------------------------------------------


def _too_few(units: Units, stages: StagePlan, mesh: Mesh) -> PlanningError:
    have = [unit.owner or ", ".join(unit.names) for unit in units.units]
    size = mesh.axis_size(stages.axis or "")
    most = len(have) // size * size
    fix = "state the stages by patterns, or leave stages= out"
    if most:
        fix = f'stages={{"{stages.axis}": dt.Auto(num_stages={most})}}'
    elif have:
        fix = f"a mesh with {stages.axis}={len(have)}"
    return PlanningError(
        f"the program cannot be cut into {stages.num_stages} stages: a stage has a module that "
        f"computes with parameters, and there are {len(have)}.\n"
        f"  {listing(have)}\n"
        f"fix: {fix}"
    )


def _reused(units_found: Units, stages: StagePlan) -> PlanningError:
    twice = [name for name, units in units_found.of_name().items() if len(units) > 1]
    return PlanningError(
        f"no cut into {stages.num_stages} stages goes forward: parameters are used again after "
        f"others.\n"
        f"  {listing(twice)}\n"
        f"fix: fewer stages, or state them by patterns"
    )
