"""The parallelized modules of one call, and their names in its program.

    step = dt.train_step(student, loss_fn, opt)         # loss_fn(student, teacher, x)
    step(teacher, x)
    models.parts                                         # {"": student, "teacher.": teacher}
    models.owner("teacher.up.weight")                    # (teacher, "up.weight")

In a program, names of the first module have no prefix; names of another begin with the name of its
argument. All modules are on one mesh, none is part of another, and no two share a tensor. Each has
its own home on the ranks, which all programs share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtensor.api.model.parallel import ParallelModule, chosen_placements
from dtensor.api.model.stating.stages import StagePlan
from dtensor.errors import PlanningError
from dtensor.frontend.graph import named_tensors
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.storage import Zero
from dtensor.sharding.spec.mesh import Mesh


@dataclass(frozen=True)
class Models:
    """``parts``: prefix of the names in the program -> module; the first prefix is ""."""

    parts: Mapping[str, ParallelModule]

    @staticmethod
    def of(models: Sequence[ParallelModule], names: Sequence[str], mesh: Mesh) -> Models:
        """Make it from distinct modules and the names of their arguments. Raises PlanningError if
        they cannot be in one program on ``mesh``."""
        for model in models:
            if model.mesh != mesh:
                raise PlanningError(
                    f"the model was parallelized on {model.mesh}, the program is for {mesh}.\n"
                    f"fix: make the program for {model.mesh!r}, or parallelize a model on {mesh!r}"
                )
        for (name, model), (other_name, other) in itertools.combinations(
            zip(names, models, strict=True), 2
        ):
            _check_disjoint(name, model, other_name, other)
        prefixes = ["" if i == 0 else f"{name}." for i, name in enumerate(names)]
        for name in names[1:]:
            if name.partition(".")[0] in dict(models[0].module.named_children()):
                raise PlanningError(
                    f"the argument {name} is a parallelized module, and {names[0]} has a part of "
                    f"that name: their parameters would have the same names.\n"
                    f"fix: give the argument another name"
                )
        return Models(dict(zip(prefixes, models, strict=True)))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def owner(self, name: str) -> tuple[ParallelModule, str] | None:
        """Return the module that has a parameter or buffer, and its label there; None if no module
        has it. ``name``: in the program."""
        for prefix, model in reversed(list(self.parts.items())):
            if name.startswith(prefix):
                label = model.seen.labels.get(name.removeprefix(prefix))
                return (model, label) if label is not None else None
        return None

    def by_part(self, named: Mapping[str, Any]) -> list[tuple[ParallelModule, dict[str, Any]]]:
        """Split a dict by name in the program into one dict by label for each module."""
        parts: list[tuple[ParallelModule, dict[str, Any]]] = [(m, {}) for m in self.parts.values()]
        values_of = {id(model): values for model, values in parts}
        for name, value in named.items():
            if (owner := self.owner(name)) is not None:
                model, label = owner
                values_of[id(model)][label] = value
        return parts

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of the first module's parameters and buffers, by name in the program."""
        return self.parts[""].seen.labels if self.parts else {}

    @property
    def arrangement(self) -> tuple[int, ...]:
        """One number per module, which is the same while the same tensors have the same names."""
        return tuple(model.seen.number for model in self.parts.values())

    @property
    def module(self) -> nn.Module:
        """A module with all parameters and buffers under the program's names. It has no forward."""
        (_, first), *other_parts = self.parts.items()
        if not other_parts:
            return first.module
        view = nn.Module()
        module = first.module
        view._parameters, view._buffers = module._parameters, module._buffers
        view._modules = {**module._modules, **{p.rstrip("."): m.module for p, m in other_parts}}
        return view

    @property
    def settlement(self) -> int:
        return sum(model.settlement for model in self.parts.values())

    @property
    def switches(self) -> int:
        return sum(model.switches for model in self.parts.values())

    @property
    def zero(self) -> Zero | None:
        """The common ``zero=``, or None. Raises PlanningError if modules state different values."""
        stated = {model.zero for model in self.parts.values() if model.zero is not None}
        if len(stated) > 1:
            texts = " and ".join(sorted(map(str, stated)))
            raise PlanningError(
                f"the modules of a call state {texts}.\n"
                f"fix: state the same for each, or for one of them alone"
            )
        return next(iter(stated), None)

    def settle(self, plan: Plan, stages: StagePlan) -> None:
        """Fix the plan's stages, placements and level of ZeRO for all later programs of each
        module."""
        is_single = len(self.parts) == 1  # only then may a plan choose the stages ("auto")
        for model, chosen in self.by_part(chosen_placements(plan)):
            stages_of_model = stages if is_single else model.stage_plan
            model.settle(chosen, plan.stage_ranks, stages_of_model, plan.level_choice)

    def agrees(self, plan: Plan, stages: StagePlan) -> bool:
        """Return whether the plan agrees with the fixed choices of each module."""
        is_single = len(self.parts) == 1
        zero = self.zero
        if plan.zero != zero and not (zero is not None and zero.is_auto):
            return False
        return all(
            model.agrees(chosen, plan.stage_ranks, stages if is_single else model.stage_plan)
            for model, chosen in self.by_part(chosen_placements(plan))
        )


def _check_disjoint(
    name: str, model: ParallelModule, other_name: str, other: ParallelModule
) -> None:
    """Raise PlanningError if one module contains the other, or they share a tensor."""
    fix = "parallelize one nn.Module that has both, and pass that"
    for outer, inner, outer_name, inner_name in (
        (model, other, name, other_name),
        (other, model, other_name, name),
    ):
        if any(part is inner.module for part in outer.module.modules()):
            raise PlanningError(f"{inner_name} is {outer_name}, or a part of it.\nfix: {fix}")
    tensors = {id(tensor): label for label, tensor in named_tensors(model.module).items()}
    for label, tensor in named_tensors(other.module).items():
        if id(tensor) in tensors:
            raise PlanningError(
                f"{name} and {other_name} share a tensor: {name}.{tensors[id(tensor)]} is "
                f"{other_name}.{label}.\nfix: {fix}"
            )
