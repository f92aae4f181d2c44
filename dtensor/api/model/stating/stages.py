"""Which stage holds which parameter, as stated by patterns per stage.

    stage_of(model, Mesh(pp=2, tp=2), {"pp": [["embed*", "blocks.[0-1].*"],
                                              ["blocks.[2-3].*", "norm*", "head*"]]})
    # StagePlan(axis="pp", num_stages=2, held={"embed.weight": (0,), ...})

Invariants: every parameter is held by exactly one stage, but for a tied one, which each of its
names may put on another stage, and one that several stages name in full, without a wildcard; the
number of stages is a multiple of the axis. A buffer that no
pattern matches goes where the parameters of its module are (or of the module around it, and so
on); where those are on several stages it is left out of ``held`` and is kept where it is used.

Not here: how "auto" chooses (auto_stages.py), which stage an op runs on
(frontend/dataflow/assign_stages.py), when it runs (the schedule).
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
    no_match,
)
from dtensor.errors import PlanningError, check_number
from dtensor.sharding.plan.request import dealt
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Stages that a plan chooses, ``num_stages`` of them; default one for each rank."""

    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.num_stages is not None:
            check_number("num_stages", self.num_stages, least=1, whole=True, fix="num_stages=2")


Patterns = Sequence[Sequence[str]]
Stages = Mapping[str, Patterns | Literal["auto"] | Auto] | Literal["auto"]
"""What `parallelize` takes: an axis and its lists of patterns, or "auto" for the axis pp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """``held``: canonical name of a parameter or buffer to the stages that hold it, ascending.

    ``homes``: by each name of a parameter, the stages that its own patterns put it on.
    ``ranks``: by stage, its coordinate on the axis; empty: stages are dealt out in turn.
    ``patterns``: by stage. ``auto``: a plan chooses them; until one has run there are none.
    Without stages ``axis`` is None, ``num_stages`` 1 and ``held`` empty.
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
        """Whether the stages are still to be chosen."""
        return self.auto and not self.patterns

    def stated(self) -> dict[str, list[list[str]] | Auto]:
        """As `parallelize` takes it."""
        if self.axis is None:
            return {}
        if self.waiting:
            return {self.axis: Auto(num_stages=self.num_stages)}
        return {self.axis: [list(patterns) for patterns in self.patterns]}


NO_STAGES = StagePlan(axis=None, num_stages=1, held={})


def with_parts(stages: StagePlan, specs: Sequence[TensorSpec], mesh: Mesh) -> StagePlan:
    """The stages of a program whose models have ``stages``, for arguments that lie so: without
    models, an argument on a part of an axis makes the axis one of stages, one for each rank."""
    axis = next((spec.on[0][0] for spec in specs if spec.on), None)
    if stages.axis is not None or axis is None:
        return stages
    return StagePlan(axis=axis, num_stages=mesh.axis_size(axis), held={})


def stage_at(name: str, spec: TensorSpec, stages: StagePlan, mesh: Mesh) -> int:
    """The stage on which an argument lies, the first of its ranks. PlanningError where its part of
    the mesh is no stage's."""
    if stages.axis is None or [axis for axis, _ in spec.on] != [stages.axis]:
        has = f"stages over {stages.axis}" if stages.axis else "no stages"
        raise PlanningError(
            f"{name} is {spec}: only a part of the mesh holds it, which is no stage of the "
            f"program's.\n  {mesh}, {has}\n"
            f"fix: pass {name}.full_tensor(), or compute further where it was made"
        )
    ranks = stages.ranks or dealt(stages.num_stages, mesh.axis_size(stages.axis))
    return ranks.index(spec.on[0][1])


def stage_of(module: nn.Module, mesh: Mesh, stages: Stages | None) -> StagePlan:
    """The stages of a module. Raises PlanningError for a parameter in no stage or in two, a
    pattern without a match, and a number of stages that the axis does not divide."""
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
    axis, lists = _axis_of(mesh, stages)
    if isinstance(lists, int):
        if lists > 1:
            return StagePlan(axis=axis, num_stages=lists, held={}, auto=True)
        lists, auto = (("*",),), True
    else:
        auto = False
    names = names_of(module)
    for index, patterns in enumerate(lists):
        for pattern in patterns:
            if not any(named.matched_by(pattern) for named in names):
                raise no_match(pattern, f"stage {index}", module, names)
    known = {name for named in names for name in named.names}
    by_name = {
        name: tuple(i for i, own in enumerate(lists) if any(matches(g, name, known) for g in own))
        for named in names
        for name in named.names
    }
    check_once(lists, by_name)
    held: dict[str, tuple[int, ...]] = {}
    for named in names:
        stages_of = sorted({stage for name in named.names for stage in by_name[name]})
        if stages_of:
            held[named.name] = tuple(stages_of)
    missing = [n for n in names if n.kind == "parameter" and n.name not in held]
    if missing:
        raise in_no_stage(missing, lists, by_name)
    parameters = [n for n in names if n.kind == "parameter"]
    for named in names:
        if named.name not in held:
            around = stage_around(named, parameters, by_name)
            if around is not None:
                held[named.name] = (around,)
    homes = {name: stages_of for name, stages_of in by_name.items() if stages_of}
    for named in names:  # of a tied parameter each name says where its own module's ops are
        if len(named.names) == 1 and named.name in held:
            homes[named.name] = held[named.name]
    return StagePlan(
        axis=axis, num_stages=len(lists), held=held, homes=homes, patterns=lists, auto=auto
    )


def _axis_of(
    mesh: Mesh, stages: Mapping[str, Patterns | str | Auto] | str
) -> tuple[str, tuple[tuple[str, ...], ...] | int]:
    """The axis and its patterns by stage, or how many stages are to be chosen."""
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
        return axis, _number(mesh, axis, lists)
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


def _number(mesh: Mesh, axis: str, auto: Auto) -> int:
    size = mesh.axis_size(axis)
    number = size if auto.num_stages is None else auto.num_stages
    if number < 1 or number % size:
        raise PlanningError(
            f"the number of stages is no multiple of the axis {axis}.\n"
            f"  {auto}; {mesh}: {axis}={size}\n"
            f"fix: Auto(num_stages={-(-max(number, 1) // size) * size})"
        )
    return number


def check_once(lists: Sequence[Sequence[str]], by_name: Mapping[str, tuple[int, ...]]) -> None:
    """PlanningError for a name that patterns of several stages match, if none is the name."""
    twice = {
        name: stages
        for name, stages in by_name.items()
        if len(stages) > 1 and not all(name in lists[stage] for stage in stages)
    }
    if not twice:
        return
    lines = [f"{len(twice)} {_plural(len(twice))} matched by more than one stage."]
    for name, stages in list(twice.items())[:8]:
        by = " and ".join(
            f'stage {i} ("{next(p for p in lists[i] if matches(p, name, by_name))}")'
            for i in stages
        )
        lines.append(f"  {name}: {by}")
    if len(twice) > 8:
        lines.append(f"  and {len(twice) - 8} more")
    lines.append("fix: narrow the patterns until each name is matched by one stage")
    raise PlanningError("\n".join(lines))


def in_no_stage(
    missing: Sequence[NamedTensor],
    lists: Sequence[Sequence[str]],
    by_name: Mapping[str, tuple[int, ...]],
) -> PlanningError:
    """The error for parameters that no pattern matches."""
    every = [pattern for patterns in lists for pattern in patterns]
    lines = [f"{len(missing)} {_plural(len(missing))} in no stage."]
    for named in missing[:8]:
        near = nearest(named.name, every)
        at = next((i for i, p in enumerate(lists) if near and near[0] in p), None)
        lines.append(
            f"  {named}" + (f', nearest pattern "{near[0]}" of stage {at}' if near else "")
        )
    if len(missing) > 8:
        lines.append(f"  and {len(missing) - 8} more")
    example = missing[0].name
    stem = example.rpartition(".")[0]
    if stem and not any(by_name[name] for name in by_name if name.startswith(f"{stem}.")):
        example = f"{stem}.*"
    lines.append(f'fix: add to the list of one stage a pattern for each, such as "{example}"')
    return PlanningError("\n".join(lines))


def _plural(count: int) -> str:
    return "name is" if count == 1 else "names are"


def stage_around(
    buffer: NamedTensor, parameters: Sequence[NamedTensor], by_name: Mapping[str, tuple[int, ...]]
) -> int | None:
    """The stage of the parameters of the innermost module around the buffer that has any."""
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
