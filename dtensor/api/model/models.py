"""The parallelized modules of one call, to plan for as one.

    step = dt.train_step(student, loss_fn, opt)         # loss_fn(student, teacher, x)
    step(teacher, x)
    models.parts                                         # {"": student, "teacher.": teacher}
    models.owner("teacher.up.weight")                    # (teacher, "up.weight")

In a program the names of the first module are its own; those of another begin with the name of its
argument. Each module keeps a home of its own on the ranks, so programs share it whatever else they
take; what the first of them that ran chose for a module holds for the others.

Invariants: all are on one mesh, none is part of another, and no tensor is in two. Not here: what a
module states (parallel.py), where its values are (home.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtensor.api.model.parallel import ParallelModule, chosen_by
from dtensor.api.model.stating.stages import StagePlan
from dtensor.errors import PlanningError
from dtensor.frontend.graph import named_tensors
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.spec.mesh import Mesh


@dataclass(frozen=True)
class Models:
    """``parts``: what the names of a module begin with in the program, to the module; the first has
    ""."""

    parts: Mapping[str, ParallelModule]

    @staticmethod
    def of(models: Sequence[ParallelModule], names: Sequence[str], mesh: Mesh) -> Models:
        """Of modules, each once, with the names of their arguments. PlanningError for those that
        cannot be in one program."""
        for model in models:
            if model.mesh != mesh:
                raise PlanningError(
                    f"the model was parallelized on {model.mesh}, the program is for {mesh}.\n"
                    f"fix: make the program for {model.mesh!r}, or parallelize a model on {mesh!r}"
                )
        for (name, one), (other_name, other) in itertools.combinations(
            zip(names, models, strict=True), 2
        ):
            _check_apart(name, one, other_name, other)
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
        """The module that a parameter or buffer of the program is one of, and its label there."""
        for prefix, model in reversed(list(self.parts.items())):
            if name.startswith(prefix):
                label = model.seen.labels.get(name.removeprefix(prefix))
                return (model, label) if label is not None else None
        return None

    def by_part(self, named: Mapping[str, Any]) -> list[tuple[ParallelModule, dict[str, Any]]]:
        """What is known by name in the program, by module and label there; each module is in it."""
        parts: list[tuple[ParallelModule, dict[str, Any]]] = [(m, {}) for m in self.parts.values()]
        index = {id(model): values for model, values in parts}
        for name, value in named.items():
            if (owner := self.owner(name)) is not None:
                index[id(owner[0])][owner[1]] = value
        return parts

    @property
    def labels(self) -> Mapping[str, str]:
        """By each name in the program that is one of the first module's, its label."""
        return self.parts[""].seen.labels if self.parts else {}

    @property
    def arrangement(self) -> tuple[int, ...]:
        """Which objects stand where in the modules."""
        return tuple(model.seen.number for model in self.parts.values())

    # -- as one ------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """All parameters and buffers under the program's names; not to be called."""
        first, *others = self.parts.items()
        if not others:
            return first[1].module
        view = nn.Module()
        module = first[1].module
        view._parameters, view._buffers = module._parameters, module._buffers
        view._modules = {**module._modules, **{p.rstrip("."): m.module for p, m in others}}
        return view

    @property
    def settlement(self) -> int:
        return sum(model.settlement for model in self.parts.values())

    @property
    def switches(self) -> int:
        return sum(model.switches for model in self.parts.values())

    def settle(self, plan: Plan, stages: StagePlan) -> None:
        """See `ParallelModule.settle`."""
        waiting = len(self.parts) == 1
        for model, chosen in self.by_part(chosen_by(plan)):
            model.settle(chosen, plan.stage_ranks, stages if waiting else model.stage_plan)

    def agrees(self, plan: Plan, stages: StagePlan) -> bool:
        """See `ParallelModule.agrees`."""
        alone = len(self.parts) == 1
        return all(
            model.agrees(chosen, plan.stage_ranks, stages if alone else model.stage_plan)
            for model, chosen in self.by_part(chosen_by(plan))
        )


def _check_apart(name: str, one: ParallelModule, other_name: str, other: ParallelModule) -> None:
    fix = "parallelize one nn.Module that has both, and pass that"
    for outer, inner, first, second in (
        (one, other, name, other_name),
        (other, one, other_name, name),
    ):
        if any(part is inner.module for part in outer.module.modules()):
            raise PlanningError(f"{second} is {first}, or a part of it.\nfix: {fix}")
    tensors = {id(tensor): label for label, tensor in named_tensors(one.module).items()}
    for label, tensor in named_tensors(other.module).items():
        if id(tensor) in tensors:
            raise PlanningError(
                f"{name} and {other_name} share a tensor: {name}.{tensors[id(tensor)]} is "
                f"{other_name}.{label}.\nfix: {fix}"
            )
