"""`parallelize`: placements and stages for an unmodified nn.Module.

    model = parallelize(GPT(config), Mesh(tp=2), {"*.mlp.up.weight": dict(tp=Row()), ...})
    model.module                       # the original; its parameters keep their identity

The wrapper holds no tensors. When a program first runs, the ranks get shards of the controller's
values. Reading a tensor of the module then fetches its value (api/store/home.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import nn

from dtensor.api.model.as_module import AsModule
from dtensor.api.model.initial_values import Init, InitialValues
from dtensor.api.model.labels import Labels, ModuleSnapshot
from dtensor.api.model.stating.recomputed import checked_recompute
from dtensor.api.model.stating.roles_of_weights import StatedRoles
from dtensor.api.model.stating.stages import Auto, StagePlan, Stages, resolve_stages
from dtensor.api.model.stating.stated_placements import (
    ParameterPlacement,
    ordered_placements,
    resolve_placements,
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
from dtensor.sharding.plan.sequence import Attention, checked_attention
from dtensor.sharding.plan.storage import AUTO, LevelChoice, Zero
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.placements import REPLICATE, Placement


class ParallelModule(AsModule):
    """The result of `parallelize`: a module, its mesh, and the stated placements of its parameters.
    It is the model of `train_step`, and an argument of compiled functions.

    ``module`` is the user's module, unchanged, with the same parameters; ``mesh`` is its mesh.
    ``placements`` has an entry for each parameter and buffer. ``zero`` has the axes over which
    state is sharded, and the level, or is None (level 0). Other attributes are the module's, also
    when they are set: ``model.scale = 2.0`` sets ``model.module.scale``.
    """

    # Internal attributes:
    # seen: the module's contents at the last `look`. labels: of all tensors that it has or had.
    # patterns, misaligned, recompute, attention: the arguments of `parallelize`. stage_plan: the
    # parameters of each stage. initial: sources of the values of parameters on the meta device.
    # settled: label -> the placements that programs chose for a parameter without stated ones.
    # settlement: a count that grows with ``settled``. steps: the number of the next training step,
    # on which random numbers depend. loads: how often `load_state_dict` set tensors on the meta
    # device. switches: how often `run.switch` placed the model differently.
    # source: the policy of a replica (move/replica.py), else None. version: how often the replica
    # took the policy's values.

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        placements: tuple[ParameterPlacement, ...],
        stages: StagePlan,
        init: Init | None = None,
        zero: Zero | None = None,
        recompute: tuple[str, ...] = (),
        misaligned: OnMisaligned = "redistribute",
        patterns: Mapping[str, StatedRoles] | None = None,
        attention: Attention = (),
    ) -> None:
        self.labels = Labels(module)
        self.seen: ModuleSnapshot = self.labels.snapshot()
        self.patterns: Mapping[str, StatedRoles] = patterns or {}
        self._former_statements: _Statements = _Statements({}, {})  # at the look before, by label
        self.misaligned: OnMisaligned = misaligned
        self.recompute = recompute
        self.zero = zero
        self.attention = attention
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
        """The axis and the patterns of each stage, as in the argument of `parallelize`; {} without
        stages. With "auto", the patterns are known once a program has run; `plan.stages` has the
        patterns of a plan."""
        return self.stage_plan.stated()

    def look(self) -> None:
        """Record the module's present contents in ``seen``. A stated placement follows its
        parameter to another name; a new parameter gets the placement stated for its name.

        Raises PlanningError, and records nothing, if a new parameter is in no stage or cannot have
        its placement.
        """
        if self.seen.is_current():
            return
        from dtensor.api.model.stating.restate import resolve_placements_again, resolve_stages_again

        before, now = self.seen, self.labels.snapshot()
        former = self._former_statements.updated(self)

        def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: values[label] for label, name in now.names.items() if label in values}

        placements = resolve_placements_again(
            self.module,
            self.mesh,
            self.patterns,
            by_name(former.placements),
        )
        stages = resolve_stages_again(
            self.module,
            self.stage_plan,
            by_name(former.stages),
            {name for name, label in now.labels.items() if before.labels.get(name) == label},
        )
        self.placements, self.stage_plan = placements, stages
        self.seen, self._former_statements = now, former.restricted(self.labels.known)
        existing_labels = self.labels.known
        self.settled = {label: p for label, p in self.settled.items() if label in existing_labels}

    def claim_homes(self, ranks: tuple[int, ...]) -> None:
        """Fix the rank of each stage for all programs of the model, as a training step's schedule
        needs it. Raises PlanningError if a program has already put values on other ranks."""
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
        level: LevelChoice | None = None,
    ) -> None:
        """Fix the choices of a program that runs, for all later programs: the stages, the
        placements of parameters without stated placements (``chosen``, by label), and the level of
        ZeRO."""
        if level is not None and self.zero_waits:
            self.zero = Zero(level.axes, level.level) if level.level else None
            self.settlement += 1
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
        """Return whether the choices of a plan (the arguments of `settle`) agree with the choices
        that were fixed before."""
        if not self.settled:
            return True
        same_stages = self.stage_plan.patterns == stages.patterns
        return (same_stages and self.homes == stage_ranks) and all(
            self.settled.get(label, placements) == placements
            for label, placements in chosen.items()
        )

    @property
    def zero_waits(self) -> bool:
        """Whether the level of ``zero=`` is still to be chosen ("auto")."""
        return self.zero is not None and self.zero.is_auto

    @property
    def homes(self) -> tuple[int, ...]:
        """The coordinate of each stage on the axis of stages."""
        stages = self.stage_plan
        num = self.mesh.axis_size(stages.axis) if stages.axis else 1
        return stages.ranks or dealt(stages.num_stages, num)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the module's parameters, for an optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters with their names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict with current values, also inside a launch."""
        if self.source is not None:
            raise RuntimeError(
                f"the values of a replica are on {self.mesh} alone, its module has none.\n"
                f'fix: dt.gather_state_dict(actor)["model"], inside the launch'
            )
        return self.module.state_dict()

    def __getattr__(self, name: str) -> Any:
        # called only if the wrapper has no attribute of this name
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # set the module's attribute, which the next step reads
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
            f"{'' if self.zero is None else f', {self.zero}'}"
        )


@dataclass(frozen=True, slots=True)
class _Statements:
    """The stated placements and the stages of parameters and buffers, by label, including tensors
    that were removed from the module."""

    placements: Mapping[str, ParameterPlacement]
    stages: Mapping[str, tuple[int, ...]]

    def updated(self, model: ParallelModule) -> _Statements:
        """Return these statements, updated by the present statements of ``model``."""
        labels, held = model.seen.labels, model.stage_plan.held
        placements = {labels[stated.name]: stated for stated in model.placements}
        stages = {labels[name]: numbers for name, numbers in held.items() if name in labels}
        return _Statements({**self.placements, **placements}, {**self.stages, **stages})

    def restricted(self, labels: Set[str]) -> _Statements:
        """Return the statements about these labels."""
        placements = {label: p for label, p in self.placements.items() if label in labels}
        stages = {label: numbers for label, numbers in self.stages.items() if label in labels}
        return _Statements(placements, stages)


@checked_call
def parallelize(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles] | None = None,
    *,
    stages: Stages | None = None,
    init: Init | None = None,
    zero: Mapping[str, int | str] | None = None,
    recompute: Sequence[str] | None = None,
    misaligned: str = "redistribute",
    attention: Mapping[str, str] | None = None,
) -> ParallelModule:
    """State placements of a module's parameters, by globs over their names. The module is not
    changed.

        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
        >>> placements = {"0.weight": dict(tp=dt.Row()), "1.weight": dict(tp=dt.Column())}
        >>> model = dt.parallelize(net, dt.Mesh(tp=2), placements)

    Args:
        placements: glob -> axis -> placement. ``*`` crosses dots; ``{0..11}`` and ``{a,b}`` are
            alternatives; the first glob that matches wins. The planner places parameters without a
            match. With ColumnParallel or RowParallel the glob is over names of modules.
        stages: pipeline stages: one axis -> a list of stages, each a list of globs. With "auto" in
            place of the list (or alone, for the axis pp), the plan chooses one stage for each rank,
            or as many as `Auto` states, so that the slowest stage is as fast as possible.
            ``plan.stages`` has the choice. The choice of the first program that runs is final,
            and is then in ``model.stages``.
        init: how each rank makes its parameters of a module on the meta device: "reset" (the
            reset_parameters of each submodule), a function of the model, called after those, or a
            function without arguments that builds the model again.
        zero: axis -> a level, the same for each axis. Level 1 stores the optimizer's state sharded
            over the axes, 2 also the gradients, 3 also the parameters, which are gathered before
            use and then freed. A parameter that is split over one of the axes by its placement is
            stored over the others. "auto" in place of the level: the plan of the first training
            step that runs chooses the level from 0 to 3, with the least predicted seconds among
            those that fit in the memory of the topology, or else with the least memory. The plan
            has the predictions; the level is then in ``model.zero``.
        recompute: globs over names of modules whose activations are not stored for the backward but
            computed again. `train_step` has this argument too.
        misaligned: what to do if a placement does not line up with a program's use of the dim (352
            rows over 4 ranks, used as 22 heads of 16). "redistribute" gathers or exchanges the
            activation before that op; the plan names the op, the bytes and a placement that lines
            up. "error" refuses the placement. "gather" stores the parameter, its gradient and the
            optimizer's state with the placement, gathers the parameter before use, and computes as
            if it were Replicate().
        attention: axis -> how attention is computed where the axis splits the sequence. "heads"
            exchanges queries, keys and values to split heads instead (DeepSpeed-Ulysses, Jacobs et
            al. 2023, arXiv:2309.14509). "gather" splits the queries and gathers keys and values
            (Llama 3, arXiv:2407.21783). "ring" splits the queries and passes chunks of keys and
            values from rank to rank (Liu et al. 2023, arXiv:2310.01889). "auto", the default, is
            the strategy with the least predicted seconds among those that fit in the memory of the
            topology, or else the one with the least memory; the plan has the alternatives.

    Raises:
        PlanningError: a glob without a match, an axis that the mesh lacks, a placement that does
            not fit its parameter, a parameter in no stage or in two, an unknown word.
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
    plan = resolve_stages(module, mesh, stages)
    placed = resolve_placements(module, mesh, placements or {}, stage_axis=plan.axis)
    recomputed = () if recompute is None else checked_recompute(recompute, module)
    stated_zero = checked_zero(zero, mesh, plan.axis)
    check_word("misaligned", misaligned, get_args(OnMisaligned))
    return ParallelModule(
        module,
        mesh,
        placed,
        plan,
        init,
        stated_zero,
        recomputed,
        cast(OnMisaligned, misaligned),
        dict(placements or {}),
        checked_attention(attention, mesh, plan.axis),
    )


def check_parallel(verb: str, model: object) -> None:
    """Raise PlanningError if the model is not parallelized."""
    if not isinstance(model, ParallelModule):
        raise PlanningError(
            f"{verb} takes a parallelized module, not {type(model).__name__}; "
            f"fix: model = dt.parallelize(model, mesh, {{...}})"
        )


def foreign_parameter_error(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> PlanningError:
    """Return the error for a parameter of an optimizer that never was in the module."""
    return PlanningError(
        f"the {type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that "
        f"is not one of the model's.\n"
        f"fix: build it over model.parameters(); to train a criterion's parameters too, "
        f"parallelize nn.ModuleDict(dict(model=model, criterion=criterion))"
    )


def chosen_placements(plan: Plan) -> dict[str, dict[str, Placement]]:
    """Return the placements of each parameter and buffer on all axes except the stages'."""
    placements: dict[str, dict[str, Placement]] = {}
    for item in plan.inputs:
        if item.kind in ("parameter", "buffer"):
            sharded = ordered_placements(item.base)
            axes = [a for a in plan.mesh.axes if a in item.spec.mesh.axes and a not in sharded]
            placements[item.label] = {**sharded, **dict.fromkeys(axes, REPLICATE)}
    return placements


def checked_zero(
    zero: Mapping[str, int | str] | None, mesh: Mesh, stage_axis: str | None
) -> Zero | None:
    """Return the axes and level of ``zero=``, or None if nothing would be sharded: without an axis,
    at level 0, or on axes of size 1. Raises PlanningError for an invalid value."""
    if zero is not None and not isinstance(zero, Mapping):
        axis = "dp" if "dp" in mesh.axes else some_axis(mesh)
        fix = f'zero={{"{axis}": 3}}' if mesh.axes else "leave zero= out, the mesh has no axis"
        raise PlanningError(f"zero={zero!r} is not a mapping of an axis to a level; fix: {fix}")
    stated = dict(zero or {})
    for axis, level in stated.items():
        mesh.axis_size(axis)
        if level != "auto" and (type(level) is not int or level not in (0, 1, 2, 3)):
            fix = dict.fromkeys(stated, "auto" if isinstance(level, str) else 1)
            raise PlanningError(
                f"zero={stated}: the level is 1 (optimizer state), 2 (gradients too), "
                f'3 (parameters too) or "auto", not {level!r}; fix: zero={fix}'
            )
    # the highest level first, "auto" before all
    levels = sorted({level for level in stated.values() if level}, key=str, reverse=True)
    highest = levels[0] if levels else 1
    if stage_axis in stated:
        others = [a for a in stated if a != stage_axis]
        others = others or [a for a, n in mesh.shape.items() if a != stage_axis and n > 1][:1]
        fix = f"zero={dict.fromkeys(others, highest)}" if others else "leave zero= out"
        raise PlanningError(
            f"zero={stated}: the axis {stage_axis!r} holds the pipeline's stages, whose parameters "
            f"differ; fix: {fix}"
        )
    if len(levels) > 1:
        raise PlanningError(
            f"zero={stated}: the levels differ, and one level is for all axes.\n"
            f"fix: zero={dict.fromkeys(stated, highest)}"
        )
    axes = tuple(a for a, size in mesh.shape.items() if size > 1 and stated.get(a))
    return Zero(axes, AUTO if highest == "auto" else int(highest)) if axes else None
