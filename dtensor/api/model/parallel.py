"""`parallelize`: placements and stages for an unmodified nn.Module.

    model = parallelize(GPT(config), Mesh(tp=2), {"*.mlp.up.weight": dict(tp=Row()), ...})
    model.module                       # the original; its parameters keep their identity

The wrapper holds no tensors. Where a program runs, the cluster holds shards, made from the
controller's values at first use. Reading the module's tensors fetches them (home.py).

``zero=`` is checked here:

    zero_of({"dp": 3}, mesh, None)                  # ("dp", 3)
    zero_of({"dp": 3}, Mesh(dp=1), None)            # None: one rank has nothing to split over

Not here: the meaning of ``zero=`` (sharding/plan/passes), placements
(model/stating/stated_placements.py), stages (model/stating/stages.py), ``recompute=``
(model/stating/recomputed.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import nn

from dtensor.api.model.as_module import AsModule
from dtensor.api.model.initial_values import Init, InitialValues
from dtensor.api.model.labels import Labels, SeenModule
from dtensor.api.model.stating.recomputed import recompute_of
from dtensor.api.model.stating.roles_of_weights import StatedRoles
from dtensor.api.model.stating.stages import Auto, StagePlan, Stages, stage_of
from dtensor.api.model.stating.stated_placements import (
    ParameterPlacement,
    resolve,
    restated,
    some_axis,
)
from dtensor.api.values.randomness import Counter
from dtensor.errors import (
    PlanningError,
    check_dense,
    check_kind,
    check_module,
    check_word,
    checked_call,
)
from dtensor.frontend.graph import named_tensors
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.request import OnMisaligned, dealt
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement


class ParallelModule(AsModule):
    """The result of `parallelize`: a module, its mesh, and the stated placements of its parameters.
    It goes into `train_step`, and is an argument of compiled functions.

    ``module`` is the user's module, unchanged, with the same parameters; ``mesh`` is its mesh,
    ``placements`` has an entry for each parameter and buffer, ``zero`` is the axis over which state
    is stored split, and the level, or None. Other attributes are the module's, read and set:
    ``model.scale = 2.0`` sets ``model.module.scale``.
    """

    # Of the others, ``stage_plan``: the parameters of each stage; ``seen``: the module's contents
    # at the last look, and ``labels`` the labels of its tensors, also of those that have left it;
    # ``settled``: by label, the placements that programs chose for unstated parameters, and
    # ``settlement`` how often that grew; ``loads``: how often `load_state_dict` gave values to
    # tensors on the meta device; ``source``: the policy of a replica (replica.py), ``version``: how
    # often the replica took its values; ``switches``: how often a switch placed the model anew
    # (mesh_history.py); ``steps``: the number of the next training step, on which random numbers
    # depend; ``initial``: the initial values of parameters on the meta device; ``misaligned``: the
    # treatment of pins that do not line up with a program; ``recompute``: globs over names of
    # modules whose forward runs again in the backward.

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        placements: tuple[ParameterPlacement, ...],
        stages: StagePlan,
        init: Init | None = None,
        zero: tuple[str, int] | None = None,
        recompute: tuple[str, ...] = (),
        misaligned: OnMisaligned = "redistribute",
        patterns: Mapping[str, StatedRoles] | None = None,
    ) -> None:
        self.labels = Labels(module)
        self.seen: SeenModule = self.labels.see()
        self.patterns: Mapping[str, StatedRoles] = patterns or {}
        self._told: _StatedOf = _StatedOf({}, {})
        self.misaligned: OnMisaligned = misaligned
        self.recompute = recompute
        self.zero = zero
        self.initial: InitialValues = InitialValues(module, init, self.seen)
        self.mesh = mesh
        self.placements = placements
        self.stage_plan: StagePlan = stages
        self.settled: dict[str, dict[str, Placement]] = {}
        self.settlement: int = 0
        self.loads = 0
        self.source: ParallelModule | None = None
        self.version = 0
        self.switches = 0
        self.steps: Counter = Counter()
        self.module = module  # last: from here on a new attribute is the module's

    @property
    def stages(self) -> dict[str, list[list[str]] | Auto]:
        """The axis and the patterns of each stage, as `parallelize` takes them: {} without stages;
        with "auto", the chosen ones once a program has run. `plan.stages` has those of a plan."""
        return self.stage_plan.stated()

    def look(self) -> None:
        """Take note of the module's present contents. A stated placement follows its parameter; a
        new parameter is placed by its name.

        PlanningError for a new one that is in no stage, or does not fit the placement stated for
        it; then nothing was noted.
        """
        if self.seen.stands():
            return
        from dtensor.api.model.stating.restate import resolve_anew, stages_anew

        before, now = self.seen, self.labels.see()
        told = self._told.with_those_of(self)
        here = {now.names[label]: label for label in now.names}
        placements = resolve_anew(
            self.module,
            self.mesh,
            self.patterns,
            {name: told.placed[label] for name, label in here.items() if label in told.placed},
        )
        stages = stages_anew(
            self.module,
            self.stage_plan,
            {name: told.held[label] for name, label in here.items() if label in told.held},
            {name for name, label in now.labels.items() if before.labels.get(name) == label},
        )
        self.placements, self.stage_plan = placements, stages
        self.seen, self._told = now, told.of(self.labels.known)
        self.settled = {n: own for n, own in self.settled.items() if n in self.labels.known}

    def claim_homes(self, ranks: tuple[int, ...]) -> None:
        """Fix the rank of each stage, by the schedule of a training step, for all programs of the
        model. Raises if a program that ran has put values on other ranks."""
        before = self.homes
        if ranks == before:
            return
        if self.settled:
            raise PlanningError(
                f"the schedule has the stages on ranks {list(ranks)} of {self.stage_plan.axis}, "
                f"and programs of this model have run with them on {list(before)}.\n"
                f"fix: make the train_step first, or parallelize the module again"
            )
        self.stage_plan = replace(self.stage_plan, ranks=ranks)

    def settle(
        self,
        chosen: Mapping[str, dict[str, Placement]],
        stage_ranks: tuple[int, ...],
        stages: StagePlan,
    ) -> None:
        """Fix the choices of the first program that runs for all later ones: its stages, and the
        placements of unstated parameters, by label."""
        if self.stage_plan.waiting:
            self.stage_plan = stages
        self.stage_plan = replace(self.stage_plan, ranks=stage_ranks)
        for label, placements in chosen.items():
            if label not in self.settled:
                self.settled[label] = placements
                self.settlement += 1

    def agrees(
        self,
        chosen: Mapping[str, dict[str, Placement]],
        stage_ranks: tuple[int, ...],
        stages: StagePlan,
    ) -> bool:
        """Whether a plan agrees with the settled choices."""
        if not self.settled:
            return True
        same_stages = self.stage_plan.patterns == stages.patterns
        return (same_stages and self.homes == stage_ranks) and all(
            self.settled.get(label, placements) == placements
            for label, placements in chosen.items()
        )

    @property
    def homes(self) -> tuple[int, ...]:
        """By stage, its rank on the stages' axis."""
        stages = self.stage_plan
        num = self.mesh.axis_size(stages.axis) if stages.axis else 1
        return stages.ranks or dealt(stages.num_stages, num)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters, for an optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters, with their names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict, as in torch: current, also inside a launch."""
        if self.source is not None:
            raise RuntimeError(
                f"the values of a replica are on {self.mesh} alone, its module has none.\n"
                f'fix: dt.gather_state_dict(actor)["model"], inside the launch'
            )
        return self.module.state_dict()

    def __getattr__(self, name: str) -> Any:
        # only for names that the wrapper itself lacks: config, submodules
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # like reads, so that the next step uses the new value
        attributes = self.__dict__
        if name in attributes or "module" not in attributes or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __repr__(self) -> str:
        stated = sum(1 for p in self.placements if p.pattern is not None)
        verb = "parallelize" if self.source is None else "replica"
        return (
            f"{verb}({type(self.module).__name__}, {self.mesh!r}): {stated} of "
            f"{len(self.placements)} parameters and buffers placed, "
            f"{self.stage_plan.num_stages} stage{'s' * (self.stage_plan.num_stages != 1)}"
        )


@dataclass(frozen=True, slots=True)
class _StatedOf:
    """The stated placements of parameters and buffers, and their stages, by label; also of those
    that have left the module."""

    placed: Mapping[str, ParameterPlacement]
    held: Mapping[str, tuple[int, ...]]

    def with_those_of(self, model: ParallelModule) -> _StatedOf:
        labels, held = model.seen.labels, model.stage_plan.held
        placed = {labels[stated.name]: stated for stated in model.placements}
        here = {labels[name]: stages for name, stages in held.items() if name in labels}
        return _StatedOf({**self.placed, **placed}, {**self.held, **here})

    def of(self, known: Set[str]) -> _StatedOf:
        """Without labels that are no longer known."""
        placed = {label: own for label, own in self.placed.items() if label in known}
        return _StatedOf(placed, {label: own for label, own in self.held.items() if label in known})


@checked_call
def parallelize(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles] | None = None,
    *,
    stages: Stages | None = None,
    init: Init | None = None,
    zero: Mapping[str, int] | None = None,
    recompute: Sequence[str] | None = None,
    misaligned: str = "redistribute",
) -> ParallelModule:
    """Place a module's parameters by globs over their names; the module is not changed.

        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
        >>> placements = {"0.weight": dict(tp=dt.Row()), "1.weight": dict(tp=dt.Column())}
        >>> model = dt.parallelize(net, dt.Mesh(tp=2), placements)

    Args:
        placements: glob -> axis -> placement. ``*`` crosses dots, ``{0..11}`` and ``{a,b}`` are
            alternatives; the first match wins. The planner places the others. With
            ColumnParallel or RowParallel the glob is over names of modules.
        stages: one axis and its list of stages, each a list of globs: pipeline stages. Or "auto"
            for the axis (without an axis: pp): the plan chooses one stage for each rank, or as
            many as `Auto` states, so that the slowest is fast. ``plan.stages`` has them; the choice
            of the first program that runs is final, and ``model.stages`` has it then.
        init: for a module on the meta device: how each rank makes its own parameters:
            "reset" (each part's own reset_parameters), a function of the model, called after those,
            or a function without arguments that builds the model once more.
        zero: one axis and a level: over it are stored split at 1 the optimizer's state, at 2 the
            gradients too, at 3 the parameters too, which are gathered before use and then freed.
        recompute: globs over names of modules whose activations are not kept for the backward but
            computed again; `train_step` takes it too.
        misaligned: the treatment of a placement that does not line up with a program's use of the
            dim (352 rows over 4 ranks, used as 22 heads of 16). "redistribute" ends the split
            there: the activation is gathered or exchanged before that op, and the plan names the
            op, the bytes and a placement that lines up. "error" refuses the placement. "gather"
            stores the parameter, its gradient and the optimizer's state with it, gathers the
            parameter before use, and computes as if it were Replicate().

    Raises:
        PlanningError: a glob without a match, an axis that the mesh lacks, a placement that does
            not fit its parameter, a parameter in no stage or in two.
    """
    if isinstance(module, ParallelModule):
        raise PlanningError("the module is parallelized already; pass the original, model.module")
    fix = "dt.parallelize(GPT(config), mesh, {...})"
    check_kind("the first argument of parallelize", module, nn.Module, "an nn.Module", fix)
    check_mesh(mesh)
    for path, part in module.named_modules():
        check_module(path, part)
    for name, x in named_tensors(module).items():
        check_dense(name, x)
    plan = stage_of(module, mesh, stages)
    placed = resolve(module, mesh, placements or {}, stage_axis=plan.axis)
    again = () if recompute is None else recompute_of(recompute, module)
    split = zero_of(zero, mesh, plan.axis)
    check_word("misaligned", misaligned, get_args(OnMisaligned))
    stores = cast(OnMisaligned, misaligned)
    patterns = dict(placements or {})
    return ParallelModule(module, mesh, placed, plan, init, split, again, stores, patterns)


def check_parallel(verb: str, model: object) -> None:
    """PlanningError for a model that is not parallelized."""
    if not isinstance(model, ParallelModule):
        raise PlanningError(
            f"{verb} takes a parallelized module, not {type(model).__name__}; "
            f"fix: model = dt.parallelize(model, mesh, {{...}})"
        )


def not_the_models(parameter: torch.Tensor) -> PlanningError:
    """The error for an optimizer's parameter that was never in the module."""
    return PlanningError(
        f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not one of the "
        f"model's.\nfix: build it over model.parameters(); to train a criterion's parameters too, "
        f"parallelize nn.ModuleDict(dict(model=model, criterion=criterion))"
    )


def chosen_by(plan: Plan) -> dict[str, dict[str, Placement]]:
    """By name of a parameter or buffer, its placements on every axis that a stage has."""
    placements: dict[str, dict[str, Placement]] = {}
    for item in plan.inputs:
        if item.kind in ("parameter", "buffer"):
            split = restated(item.base)
            unsplit = [a for a in plan.mesh.axes if a in item.spec.mesh.axes and a not in split]
            placements[item.label] = {**split, **dict.fromkeys(unsplit, REPLICATE)}
    return placements


# -- zero= -----------------------------------------------------------------------------------------


def zero_of(
    zero: Mapping[str, int] | None, mesh: Mesh, stage_axis: str | None
) -> tuple[str, int] | None:
    """The axis and the level. PlanningError for an invalid value."""
    if zero is not None and not isinstance(zero, Mapping):
        axis = "dp" if "dp" in mesh.axes else some_axis(mesh)
        fix = f'zero={{"{axis}": 3}}' if mesh.axes else "leave zero= out, the mesh has no axis"
        raise PlanningError(f"zero={zero!r} is not a mapping of an axis to a level; fix: {fix}")
    if not zero:
        return None
    if len(zero) > 1:
        raise PlanningError(
            f"zero={dict(zero)} names {len(zero)} axes, and state is stored split over one.\n"
            f"fix: zero={dict([next(iter(zero.items()))])}"
        )
    axis, level = next(iter(zero.items()))
    size = mesh.axis_size(axis)
    if type(level) is not int or level not in (0, 1, 2, 3):
        raise PlanningError(
            f"zero={dict(zero)}: the level is 1 (optimizer state), 2 (gradients too) or "
            f"3 (parameters too), not {level!r}; fix: zero={{{axis!r}: 1}}"
        )
    if axis == stage_axis:
        others = [a for a, n in mesh.shape.items() if a != axis and n > 1]
        fix = f"zero={{{others[0]!r}: {level}}}" if others else "leave zero= out"
        raise PlanningError(
            f"zero={dict(zero)}: the axis {axis!r} holds the pipeline's stages, whose parameters "
            f"differ; fix: {fix}"
        )
    return (axis, level) if level and size > 1 else None
