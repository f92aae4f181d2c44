"""Initial values of a model on the meta device, which each rank makes for its own shards.

    with torch.device("meta"):
        model = GPT(config)
    model = dt.parallelize(model, mesh, placements, init="reset")

The initialisation runs once on the controller, where it is only recorded (frontend/initial). Each
rank then computes its own shards from the recording, with counter-based random numbers. So no
process holds the full model, no rank needs the user's code, and the values have the same bits on
every mesh. `load_state_dict` and a checkpoint (on_disk.py) replace initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from dtensor.api.model.labels import ModuleSnapshot
from dtensor.api.values.randomness import initial_seed, key_of
from dtensor.daft import Call, Function, Label, Program, RankProgram
from dtensor.errors import PlanningError
from dtensor.frontend.initial.recipe import Recipe, make
from dtensor.frontend.initial.recording import Init, record
from dtensor.sharding.ops.philox import Pieces, Place

if TYPE_CHECKING:
    from dtensor.api.values.on_disk import OnDisk

__all__ = ["Init", "InitialValues"]


class MetaHolder(Protocol):
    """The values of a model on a cluster: a part of `ModelHome` (store/home.py)."""

    changed: bool
    unsaved: bool
    wait_functions: list[Callable[[], None]]

    def gather(self, labels: Sequence[str]) -> dict[str, torch.Tensor]: ...


class InitialValues:
    """The sources of the values of parameters and buffers on the meta device, all by label.

    recipes: recorded initialisations. loaded: values of a state dict. on_disk: values in a
    checkpoint. holders: the home of a value that was put on ranks. remedy: the fix in the error for
    a value without a source, or None for the usual fix.
    """

    def __init__(self, module: nn.Module, init: Init | None, seen: ModuleSnapshot) -> None:
        """Record the initialisation ``init``, if there is one, as a recipe for each tensor."""
        self.remedy: str | None = None
        self.holders: dict[str, MetaHolder] = {}
        self.loaded: dict[str, torch.Tensor] = {}
        self.on_disk: dict[str, OnDisk] = {}
        self.recipes: dict[str, Recipe] = {}
        if init is not None:
            seed = initial_seed()
            recipes = record(module, init, lambda name: key_of(seed, "init", name))
            self.recipes = {seen.labels[name]: recipe for name, recipe in recipes.items()}

    def source(self, label: str) -> Recipe | OnDisk | None:
        """Return the recipe or file from which a rank makes its shard. Return None if there is
        none, or if `value` has a newer value."""
        if label in self.loaded or self._is_newer_on_ranks(label):
            return None
        return self.on_disk.get(label) or self.recipes.get(label)

    def _is_newer_on_ranks(self, label: str) -> bool:
        return label in self.holders and self.holders[label].changed

    def value(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full value; ``tensor``: the tensor in the module, which may be on the meta
        device. Raises PlanningError if there is no value."""
        if not tensor.is_meta:
            return tensor
        if self._is_newer_on_ranks(label):
            return self.holders[label].gather([label])[label]
        if label in self.loaded:
            return self.loaded[label]
        if label in self.on_disk:
            return self.on_disk[label].whole()
        if label not in self.recipes:
            if self.remedy is not None:
                raise PlanningError(f"{label} has no value here yet.\nfix: {self.remedy}")
            raise PlanningError(
                f"{label} is on the meta device and has no value.\n"
                f"fix: dt.parallelize(model, mesh, placements, init='reset'), or load a state "
                f"with dt.load_state_dict"
            )
        recipe = self.recipes[label]
        return make(recipe, Place.whole(recipe.view.size).pieces, torch.device("cpu"))

    def load(self, module: nn.Module, seen: ModuleSnapshot, state: Mapping[str, Any]) -> None:
        """Store the state dict's values of parameters and buffers on the meta device."""
        for key, label in labels_in_state(module, seen).items():
            if key in state and label in seen.tensors and seen.tensors[label].is_meta:
                self.forget([label])
                self.loaded[label] = state[key].detach().cpu().clone()

    def set_on_disk(self, stored: Mapping[str, OnDisk]) -> None:
        """Use these values, which stay in files, for parameters and buffers on the meta device."""
        self.forget(stored)
        self.on_disk.update(stored)

    def forget(self, labels: Iterable[str]) -> None:
        """Drop their values, except recipes, because new values are about to be set."""
        for label in labels:
            for values in (self.holders, self.loaded, self.on_disk):
                values.pop(label, None)


def labels_in_state(module: nn.Module, seen: ModuleSnapshot) -> dict[str, str]:
    """Return the label of the tensor under each key of the module's state dict.

    A key may differ from the tensor's name: if the tensor is tied, or a hook renames keys, as in
    torch's checkpoint wrapper. If a tensor is not in the module, its key serves as label.
    """
    labels = {id(tensor): label for label, tensor in seen.tensors.items()}
    state = module.state_dict(keep_vars=True)
    return {key: labels.get(id(value), key) for key, value in state.items()}


def init_program(
    shards: Sequence[Mapping[str, tuple[Recipe | OnDisk, Pieces]]], device: torch.device
) -> Program:
    """Return a program in which each rank makes its shards, with one call per parameter.
    ``shards``: by rank, name -> source and intervals of the shard."""
    from dtensor.api.values.on_disk import OnDisk, part_of

    functions: dict[tuple[str, Pieces], Function] = {}
    ranks: list[RankProgram] = []
    for shards_of_rank in shards:
        calls: list[Call] = []
        nbytes: list[tuple[str, int]] = []
        for name, (recipe, pieces) in sorted(shards_of_rank.items()):
            match recipe:
                case Recipe():
                    lines = [step.source for step in recipe.steps if step.source]
                    size, dtype, verb, fn = recipe.view.size, recipe.view.dtype, "initialise", make
                case OnDisk():
                    lines, size, dtype, verb, fn = [], recipe.shape, recipe.dtype, "read", part_of
            bindings = {"device": device, "make": fn, "pieces": pieces, "recipe": recipe}
            function = Function(
                name=f"init_{len(functions)}",
                source="def forward():\n    return (make(recipe, pieces, device),)\n",
                bindings=tuple(bindings.items()),
                lines=(None, *lines[-1:]),
            )
            function = functions.setdefault((recipe.name, pieces), function)
            calls.append(Call(function.name, (), (name,), label=Label(f"{verb} {name}")))
            local = torch.Size(Place(size, pieces).local_shape)
            nbytes.append((name, local.numel() * dtype.itemsize))
        ranks.append(
            RankProgram(
                instructions=tuple(calls), outputs=tuple(shards_of_rank), nbytes=tuple(nbytes)
            )
        )
    return Program(
        name="initialise",
        ranks=tuple(ranks),
        functions=tuple((f.name, f) for f in functions.values()),
        stage_of=(0,) * len(ranks),
    )
