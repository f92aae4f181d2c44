"""What was stated of a module that was changed since: placements and stages follow their objects.

    resolve_anew(module, mesh, patterns, told={"inner.0.weight": ParameterPlacement(...)})
    stages_anew(module, plan, told={"inner.0.weight": (0,)}, as_before={"down.weight"})

Names are those of now. What is known of a tensor is kept; one that is new is placed by its name, as
at first, but a pattern may match none. Not here: which object a name means (labels.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from torch import nn

from dtensor.api.model.stating.patterns import NamedTensor, matches, names_of
from dtensor.api.model.stating.roles_of_weights import StatedModule, StatedRoles
from dtensor.api.model.stating.stages import StagePlan, check_once, in_no_stage, stage_around
from dtensor.api.model.stating.stated_placements import ParameterPlacement, check_fit
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import Role


def resolve_anew(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles],
    told: Mapping[str, ParameterPlacement],
) -> tuple[ParameterPlacement, ...]:
    """As `resolve`, of a module that was changed since. ``told``: by their names now, what was
    stated of tensors that are known; it follows them. A new one is placed by its name; a pattern
    may match none. Raises PlanningError for a placement that a new one cannot have."""
    names = names_of(module)
    resolved: list[ParameterPlacement] = []
    for named in names:
        stated, around = told.get(named.name), named.name.rpartition(".")[0]
        if stated is None:
            pattern = next((p for p in placements if _places(p, placements[p], named, names)), None)
            given = dict(placements[pattern]) if pattern is not None else {}
            roles = any(isinstance(p, Role) for p in given.values())
            if pattern is not None and not roles:
                check_fit(named.name, named.meta, given, f'"{pattern}"', mesh)  # type: ignore[arg-type]
            owner = StatedModule(around, mesh) if roles else None
            stated = ParameterPlacement(
                name=named.name, pattern=pattern, placements=given, owner=owner
            )
        elif stated.name != named.name:
            owner = stated.owner and replace(stated.owner, module=around)
            stated = replace(stated, name=named.name, owner=owner)
        resolved.append(stated)
    return tuple(resolved)


def _places(
    pattern: str, stated: StatedRoles, named: NamedTensor, names: Sequence[NamedTensor]
) -> bool:
    """Whether the pattern says something of this one: see `resolve`."""
    parameter = named.kind == "parameter"
    if any(isinstance(p, Role) for p in stated.values()):
        modules = (name.rpartition(".")[0] for name in named.names)
        return (
            parameter and len(named.meta.shape) >= 2 and any(matches(pattern, n) for n in modules)
        )
    known = (pattern,) if any(pattern in n.names for n in names) else ()
    if not named.matched_by(pattern, known):
        return False
    return parameter or not any(
        n.matched_by(pattern, known) for n in names if n.kind == "parameter"
    )


def stages_anew(
    module: nn.Module, plan: StagePlan, told: Mapping[str, tuple[int, ...]], as_before: Set[str]
) -> StagePlan:
    """The stages of a module that was changed since. ``told``: by their names now, those of
    parameters and buffers that are known; ``as_before``: the names under which they were known.

    A parameter stays where it is. A new one goes where its name's patterns put it; where "auto" has
    chosen the stages else where its module is, or, if that is on several, with what is before it.
    Raises PlanningError for one in no stage.
    """
    if plan.axis is None or plan.waiting:
        return plan
    names, lists = names_of(module), plan.patterns
    known = {name for named in names for name in named.names}
    homes = {name: plan.homes[name] for name in as_before if name in plan.homes}
    for named in names:
        others = [name for name in named.names if name not in homes]
        for name in others:
            by = (any(matches(glob, name, known) for glob in own) for own in lists)
            stages = tuple(i for i, is_matched in enumerate(by) if is_matched)
            moved = named.name in told and len(others) == len(named.names)
            stages = told[named.name] if moved else stages
            if stages:
                homes[name] = stages
    new = {n: stages for n, stages in homes.items() if n not in as_before and len(stages) > 1}
    check_once(lists, {n: stages for n, stages in new.items() if n not in told})
    parameters = [n for n in names if n.kind == "parameter"]
    held: dict[str, tuple[int, ...]] = {}
    missing: list[NamedTensor] = []
    last = 0
    for named in names:
        stages = {stage for name in named.names for stage in homes.get(name, ())}
        if not stages and (named.kind == "buffer" or plan.auto):
            around = stage_around(named, parameters, homes)
            beside = {last} if named.kind == "parameter" else set[int]()
            stages = beside if around is None else {around}
        if stages:
            held[named.name] = tuple(sorted(stages))
            last = max(stages) if named.kind == "parameter" else last
            if len(named.names) == 1:
                homes[named.name] = held[named.name]
        elif named.kind == "parameter":
            missing.append(named)
    if missing:
        raise in_no_stage(
            missing, lists, {n: homes.get(n, ()) for named in names for n in named.names}
        )
    return replace(plan, held=held, homes=homes)
