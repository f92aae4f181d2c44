"""Resolve ``stages=``: which pipeline stage holds which parameter.

    resolve_stages(model, Mesh(pp=2, tp=2), {"pp": [["embed*", "blocks.[0-1].*"],
                                                    ["blocks.[2-3].*", "norm*", "head*"]]})
    # StagePlan(axis="pp", num_stages=2, held={"embed.weight": (0,), ...})

The number of stages is a multiple of the axis size. Each parameter is on one stage, except that
each name of a tied parameter may be on another stage, and several stages may list a name without a
wildcard. A buffer without a match goes to the stage of the parameters of its innermost enclosing
module that has any. If these parameters are on several stages, the buffer is kept where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from dtensor.api.model.stating.patterns import (
    NamedTensor,
    is_patterns,
    listing,
    matches,
    names_of,
    nearest,
    no_match_error,
)
from dtensor.errors import PlanningError, check_number
from dtensor.sharding.plan.request import dealt
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Lets the plan choose ``num_stages`` stages; by default one for each rank of the axis."""

    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.num_stages is not None:
            check_number("num_stages", self.num_stages, least=1, whole=True, fix="num_stages=2")


Patterns = Sequence[Sequence[str]]
Stages = Mapping[str, Patterns | Literal["auto"] | Auto] | Literal["auto"]
"""The argument ``stages`` of `parallelize`: an axis -> a list of patterns for each stage, "auto" or
an `Auto`; or "auto" alone for the axis pp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The stages of a module. Without stages ``axis`` is None, ``num_stages`` 1, ``held`` empty.

    held: canonical name of a parameter or buffer -> the stages that hold it, ascending.
    homes: any name of a parameter -> the stages whose patterns match that name.
    ranks: the coordinate of each stage on the axis; if empty, stages are assigned in turn.
    patterns: the globs of each stage. auto: a plan chooses the patterns; until a program has run
    there are none.
    """

    axis: str | None
    num_stages: int
    held: Mapping[str, tuple[int, ...]] = field(repr=False)
    homes: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict[str, tuple[int, ...]], repr=False
    )
    ranks: tuple[int, ...] = ()
    patterns: tuple[tuple[str, ...], ...] = ()
    auto: bool = False

    @property
    def waiting(self) -> bool:
        """Whether the stages are still to be chosen ("auto")."""
        return self.auto and not self.patterns

    def stated(self) -> dict[str, list[list[str]] | Auto]:
        """Return the argument ``stages`` of `parallelize` that states these stages."""
        if self.axis is None:
            return {}
        if self.waiting:
            return {self.axis: Auto(num_stages=self.num_stages)}
        return {self.axis: [list(patterns) for patterns in self.patterns]}


NO_STAGES = StagePlan(axis=None, num_stages=1, held={})


def stages_of_arguments(stages: StagePlan, specs: Sequence[TensorSpec], mesh: Mesh) -> StagePlan:
    """Return the stages of a program with arguments of these specs. If the models have no stages
    and an argument is on a part of an axis, that axis has one stage for each rank."""
    axis = next((spec.on[0][0] for spec in specs if spec.on), None)
    if stages.axis is not None or axis is None:
        return stages
    return StagePlan(axis=axis, num_stages=mesh.axis_size(axis), held={})


def stage_holding(name: str, spec: TensorSpec, stages: StagePlan, mesh: Mesh) -> int:
    """Return the first stage that holds an argument which only a part of the mesh has. Raises
    PlanningError if that part is not the ranks of a stage."""
    if stages.axis is None or [axis for axis, _ in spec.on] != [stages.axis]:
        has = f"stages over {stages.axis}" if stages.axis else "no stages"
        raise PlanningError(
            f"{name} is {spec}: only a part of the mesh holds it, which is no stage of the "
            f"program's.\n  {mesh}, {has}\n"
            f"fix: pass {name}.full_tensor(), or compute further where it was made"
        )
    ranks = stages.ranks or dealt(stages.num_stages, mesh.axis_size(stages.axis))
    return ranks.index(spec.on[0][1])


def resolve_stages(module: nn.Module, mesh: Mesh, stages: Stages | None) -> StagePlan:
    """Return the stages of a module. Raises PlanningError for a parameter in no stage or in two, a
    pattern without a match, and a number of stages that is not a multiple of the axis."""
    if not stages:
        return NO_STAGES
    if stages == "auto":
        if "pp" not in mesh.axes:
            raise PlanningError(
                f'stages="auto" is over the axis pp, which is not in the mesh.\n'
                f"  {mesh}, axes: {listing(mesh.axes)}\n"
                f'fix: Mesh(pp=2, ...), or name the axis of stages: {{"axis": "auto"}}'
            )
        stages = {"pp": "auto"}
    axis, lists = _axis_and_patterns(mesh, stages)
    if isinstance(lists, int):  # "auto" with this number of stages
        if lists > 1:
            return StagePlan(axis=axis, num_stages=lists, held={}, auto=True)
        lists, auto = (("*",),), True
    else:
        auto = False
    names = names_of(module)
    for index, patterns in enumerate(lists):
        for pattern in patterns:
            if not any(named.matched_by(pattern) for named in names):
                raise no_match_error(pattern, f"stage {index}", module, names)
    all_names = {name for named in names for name in named.names}
    by_name = {
        name: tuple(
            i for i, globs in enumerate(lists) if any(matches(g, name, all_names) for g in globs)
        )
        for named in names
        for name in named.names
    }
    check_unique(lists, by_name)
    held: dict[str, tuple[int, ...]] = {}
    for named in names:
        stages_of_name = sorted({stage for name in named.names for stage in by_name[name]})
        if stages_of_name:
            held[named.name] = tuple(stages_of_name)
    missing = [n for n in names if n.kind == "parameter" and n.name not in held]
    if missing:
        raise missing_stage_error(missing, lists, by_name)
    parameters = [n for n in names if n.kind == "parameter"]
    for named in names:
        if named.name not in held:
            stage = enclosing_stage(named, parameters, by_name)
            if stage is not None:
                held[named.name] = (stage,)
    homes = {name: stages_of_name for name, stages_of_name in by_name.items() if stages_of_name}
    for named in names:  # each name of a tied parameter has the stage of its module's ops
        if len(named.names) == 1 and named.name in held:
            homes[named.name] = held[named.name]
    return StagePlan(
        axis=axis, num_stages=len(lists), held=held, homes=homes, patterns=lists, auto=auto
    )


def _axis_and_patterns(
    mesh: Mesh, stages: Mapping[str, Patterns | str | Auto] | str
) -> tuple[str, tuple[tuple[str, ...], ...] | int]:
    """Return the axis, and the patterns of each stage or the number of stages to choose. Raises
    PlanningError for a malformed value."""
    if not isinstance(stages, Mapping) or len(stages) != 1:
        axes = listing(list(stages)) if isinstance(stages, Mapping) else type(stages).__name__
        raise PlanningError(
            f"stages names one axis and its lists of patterns; it names {axes}.\n"
            f'fix: write stages={{"pp": [["embed*", "blocks.[0-1].*"], ["blocks.[2-3].*"]]}}'
        )
    axis, lists = next(iter(stages.items()))
    lists = Auto() if lists == "auto" else lists
    well_formed = isinstance(lists, Sequence) and all(map(is_patterns, lists))
    if isinstance(lists, str) or not (well_formed or isinstance(lists, Auto)):
        raise PlanningError(
            f"stages has patterns where it should have one list of patterns for each stage.\n"
            f"  {axis}: {lists!r}\n"
            f'fix: write {{"{axis}": [["embed*"], ["head*"]]}}, one inner list for each stage'
        )
    if axis not in mesh.axes:
        near = nearest(str(axis), mesh.axes)
        number = (lists.num_stages or 2) if isinstance(lists, Auto) else len(lists)
        raise PlanningError(
            f'stages names the axis "{axis}", which is not in the mesh.\n'
            f"  {mesh}, axes: {listing(mesh.axes)}\n"
            + (f'fix: write "{near[0]}"' if near else f"fix: Mesh({axis}={number}, ...)")
        )
    if isinstance(lists, Auto):
        return axis, _num_stages(mesh, axis, lists)
    empty = [str(i) for i, patterns in enumerate(lists) if not patterns]
    if empty:
        raise PlanningError(
            f"stage {', '.join(empty)} of {len(lists)} has no patterns, so nothing would run "
            f"there.\n"
            f"fix: state its parameters, or remove the empty list"
        )
    size = mesh.axis_size(axis)
    if not lists or len(lists) % size:
        more = -(-max(len(lists), 1) // size) * size
        raise PlanningError(
            f"the number of stages is no multiple of the axis {axis}.\n"
            f"  stages: {len(lists)}; {mesh}: {axis}={size}\n"
            f"fix: state {more} stages" + (f", or Mesh({axis}={len(lists)})" if lists else "")
        )
    return axis, tuple(tuple(patterns) for patterns in lists)


def _num_stages(mesh: Mesh, axis: str, auto: Auto) -> int:
    """Return the number of stages. Raises PlanningError if it is no multiple of the axis."""
    size = mesh.axis_size(axis)
    number = size if auto.num_stages is None else auto.num_stages
    if number < 1 or number % size:
        raise PlanningError(
            f"the number of stages is no multiple of the axis {axis}.\n"
            f"  {auto}; {mesh}: {axis}={size}\n"
            f"fix: Auto(num_stages={-(-max(number, 1) // size) * size})"
        )
    return number


def check_unique(lists: Sequence[Sequence[str]], by_name: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PlanningError for a name that several stages match, unless each lists it literally."""
    ambiguous = {
        name: stages
        for name, stages in by_name.items()
        if len(stages) > 1 and not all(name in lists[stage] for stage in stages)
    }
    if not ambiguous:
        return
    lines = [f"{len(ambiguous)} {_names_are(len(ambiguous))} matched by more than one stage."]
    for name, stages in list(ambiguous.items())[:8]:
        matches_text = " and ".join(
            f'stage {i} ("{next(p for p in lists[i] if matches(p, name, by_name))}")'
            for i in stages
        )
        lines.append(f"  {name}: {matches_text}")
    if len(ambiguous) > 8:
        lines.append(f"  and {len(ambiguous) - 8} more")
    lines.append("fix: narrow the patterns until each name is matched by one stage")
    raise PlanningError("\n".join(lines))


def missing_stage_error(
    missing: Sequence[NamedTensor],
    lists: Sequence[Sequence[str]],
    by_name: Mapping[str, tuple[int, ...]],
) -> PlanningError:
    """Return the error for parameters that no pattern matches."""
    all_patterns = [pattern for patterns in lists for pattern in patterns]
    lines = [f"{len(missing)} {_names_are(len(missing))} in no stage."]
    for named in missing[:8]:
        near = nearest(named.name, all_patterns)
        stage = next((i for i, p in enumerate(lists) if near and near[0] in p), None)
        lines.append(
            f"  {named}" + (f', nearest pattern "{near[0]}" of stage {stage}' if near else "")
        )
    if len(missing) > 8:
        lines.append(f"  and {len(missing) - 8} more")
    example = missing[0].name
    stem = example.rpartition(".")[0]
    if stem and not any(by_name[name] for name in by_name if name.startswith(f"{stem}.")):
        example = f"{stem}.*"
    lines.append(f'fix: add to the list of one stage a pattern for each, such as "{example}"')
    return PlanningError("\n".join(lines))


def _names_are(count: int) -> str:
    return "name is" if count == 1 else "names are"


def enclosing_stage(
    buffer: NamedTensor, parameters: Sequence[NamedTensor], by_name: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Return the stage of the parameters in the innermost module that contains the buffer and has
    parameters; None if they are on several stages, or if there are none."""
    path = buffer.name.rpartition(".")[0]
    while path:
        inside = {
            stage
            for named in parameters
            for name in named.names
            if name.startswith(f"{path}.")
            for stage in by_name.get(name, ())
        }
        if inside:
            return inside.pop() if len(inside) == 1 else None
        path = path.rpartition(".")[0]
    return None
