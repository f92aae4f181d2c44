"""Resolve placements and stages again for a module that was changed after `parallelize`.

    resolve_placements_again(module, mesh, patterns, {"inner.0.weight": ParameterPlacement(...)})
    resolve_stages_again(module, plan, {"inner.0.weight": (0,)}, unchanged={"down.weight"})

All names are present names. A tensor that was in the module before keeps its placement and stages.
A new tensor is resolved by its name as in `parallelize`, but a pattern may match nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from torch import nn

from dtensor.api.model.stating.patterns import NamedTensor, matches, names_of
from dtensor.api.model.stating.roles_of_weights import StatedModule, StatedRoles
from dtensor.api.model.stating.stages import (
    StagePlan,
    check_unique,
    enclosing_stage,
    missing_stage_error,
)
from dtensor.api.model.stating.stated_placements import ParameterPlacement, check_fit
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import Role


def resolve_placements_again(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles],
    former: Mapping[str, ParameterPlacement],
) -> tuple[ParameterPlacement, ...]:
    """Return one entry for each parameter and buffer of a changed module: the placement in
    ``former`` (by present name) if it was in the module before, else the placement of the first
    pattern that matches. Raises PlanningError if a new tensor cannot have its placement."""
    names = names_of(module)
    resolved: list[ParameterPlacement] = []
    for named in names:
        placement, module_name = former.get(named.name), named.name.rpartition(".")[0]
        if placement is None:
            pattern = next((p for p in placements if _covers(p, placements[p], named, names)), None)
            stated = dict(placements[pattern]) if pattern is not None else {}
            has_roles = any(isinstance(p, Role) for p in stated.values())
            if pattern is not None and not has_roles:
                check_fit(named.name, named.meta, stated, f'"{pattern}"', mesh)  # type: ignore[arg-type]
            owner = StatedModule(module_name, mesh) if has_roles else None
            placement = ParameterPlacement(
                name=named.name, pattern=pattern, placements=stated, owner=owner
            )
        elif placement.name != named.name:
            owner = placement.owner and replace(placement.owner, module=module_name)
            placement = replace(placement, name=named.name, owner=owner)
        resolved.append(placement)
    return tuple(resolved)


def _covers(
    pattern: str, stated: StatedRoles, named: NamedTensor, names: Sequence[NamedTensor]
) -> bool:
    """Return whether the pattern places this tensor, by the rules of `resolve_placements`."""
    is_parameter = named.kind == "parameter"
    if any(isinstance(p, Role) for p in stated.values()):
        modules = (name.rpartition(".")[0] for name in named.names)
        return (
            is_parameter
            and len(named.meta.shape) >= 2
            and any(matches(pattern, n) for n in modules)
        )
    exact = (pattern,) if any(pattern in n.names for n in names) else ()
    if not named.matched_by(pattern, exact):
        return False
    return is_parameter or not any(
        n.matched_by(pattern, exact) for n in names if n.kind == "parameter"
    )


def resolve_stages_again(
    module: nn.Module, plan: StagePlan, former: Mapping[str, tuple[int, ...]], unchanged: Set[str]
) -> StagePlan:
    """Return the stages of a changed module. ``former``: the stages of the parameters and buffers
    that were in it before, by their present names; ``unchanged``: the names that have the same
    tensor as before.

    Earlier parameters stay on their stages. A new parameter goes to the stage whose patterns match
    its name. If none does and "auto" chose the stages, it goes to the stage of its module, or, if
    the module is on several, to the stage of the parameter before it. Raises PlanningError for a
    parameter in no stage.
    """
    if plan.axis is None or plan.waiting:
        return plan
    names, lists = names_of(module), plan.patterns
    all_names = {name for named in names for name in named.names}
    homes = {name: plan.homes[name] for name in unchanged if name in plan.homes}
    for named in names:
        new_names = [name for name in named.names if name not in homes]
        for name in new_names:
            by_stage = (any(matches(glob, name, all_names) for glob in globs) for globs in lists)
            stages = tuple(i for i, is_matched in enumerate(by_stage) if is_matched)
            has_moved = named.name in former and len(new_names) == len(named.names)
            stages = former[named.name] if has_moved else stages
            if stages:
                homes[name] = stages
    new = {n: stages for n, stages in homes.items() if n not in unchanged and len(stages) > 1}
    check_unique(lists, {n: stages for n, stages in new.items() if n not in former})
    parameters = [n for n in names if n.kind == "parameter"]
    held: dict[str, tuple[int, ...]] = {}
    missing: list[NamedTensor] = []
    preceding_stage = 0  # the stage of the parameter before
    for named in names:
        stages = {stage for name in named.names for stage in homes.get(name, ())}
        if not stages and (named.kind == "buffer" or plan.auto):
            enclosing = enclosing_stage(named, parameters, homes)
            preceding = {preceding_stage} if named.kind == "parameter" else set[int]()
            stages = preceding if enclosing is None else {enclosing}
        if stages:
            held[named.name] = tuple(sorted(stages))
            preceding_stage = max(stages) if named.kind == "parameter" else preceding_stage
            if len(named.names) == 1:
                homes[named.name] = held[named.name]
        elif named.kind == "parameter":
            missing.append(named)
    if missing:
        raise missing_stage_error(
            missing, lists, {n: homes.get(n, ()) for named in names for n in named.names}
        )
    return replace(plan, held=held, homes=homes)
