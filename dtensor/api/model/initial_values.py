"""The values that a model on the meta device starts from, made where they are needed.

    with torch.device("meta"):
        model = GPT(config)
    model = dt.parallelize(model, mesh, placements, init="reset")

What initialises the model runs once, here, and is recorded; each rank carries out what its own
shards need of it, by counter-based numbers. No process holds the model, no rank needs the user's
code, and the values are the same bits on every mesh. What `load_state_dict` brings replaces them;
so does a checkpoint (on_disk.py), of which ranks read their own shards when they need them.

Rejected: running it on every rank on real memory, one module at a time. Then each rank makes the
whole model, a function that keeps state or asks numpy gives each rank other values, one that reads
another module's parameters finds none, and what a constructor draws has no parameter's name yet.

Not here: recording and making (frontend.initial).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from dtensor.api.model.labels import SeenModule
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
    """What of a model is on a cluster: of home.py."""

    changed: bool
    unsaved: bool
    settling: list[Callable[[], None]]

    def gather(self, labels: Sequence[str]) -> dict[str, torch.Tensor]: ...


class InitialValues:
    """Recipes of a module's parameters and buffers on the meta device, or values loaded since, or
    where they are on disk; all by label.

    ``holders``: the ranks that have it, from when it is put there; ``remedy``: what a user
    does where a value is nowhere, if it is not to initialise or to load it.
    """

    def __init__(self, module: nn.Module, init: Init | None, seen: SeenModule) -> None:
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
        """How a rank makes its shard; None where the whole value is at hand."""
        if label in self.loaded or self._changed(label):
            return None
        return self.on_disk.get(label) or self.recipes.get(label)

    def _changed(self, label: str) -> bool:
        return label in self.holders and self.holders[label].changed

    def value(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value; ``tensor`` is the module's own, on the meta device or not."""
        if not tensor.is_meta:
            return tensor
        if self._changed(label):
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

    def load(self, module: nn.Module, seen: SeenModule, state: Mapping[str, Any]) -> None:
        """Keep the state's values of what is on the meta device."""
        for key, label in labels_in_state(module, seen).items():
            if key in state and label in seen.tensors and seen.tensors[label].is_meta:
                self.forget([label])
                self.loaded[label] = state[key].detach().cpu().clone()

    def leave_on_disk(self, stored: Mapping[str, OnDisk]) -> None:
        """From now on these are the values of what is on the meta device."""
        self.forget(stored)
        self.on_disk.update(stored)

    def forget(self, labels: Iterable[str]) -> None:
        """They have another value from now on."""
        for label in labels:
            for known in (self.holders, self.loaded, self.on_disk):
                known.pop(label, None)


def labels_in_state(module: nn.Module, seen: SeenModule) -> dict[str, str]:
    """Every key of the module's state dict to the label of the tensor that stands there.

    A key is the tensor's name, but for ties, and where a hook renames: that of torch's checkpoint
    wrapper leaves itself out. One whose tensor is none of the module's is its own label.
    """
    labels = {id(tensor): label for label, tensor in seen.tensors.items()}
    held = module.state_dict(keep_vars=True)
    return {key: labels.get(id(value), key) for key, value in held.items()}


def init_program(
    shards: Sequence[Mapping[str, tuple[Recipe | OnDisk, Pieces]]], device: torch.device
) -> Program:
    """One call per parameter and rank, each giving the shard under the parameter's name."""
    from dtensor.api.values.on_disk import OnDisk, part_of

    functions: dict[tuple[str, Pieces], Function] = {}
    ranks: list[RankProgram] = []
    for wanted in shards:
        calls: list[Call] = []
        nbytes: list[tuple[str, int]] = []
        for name, (recipe, pieces) in sorted(wanted.items()):
            match recipe:
                case Recipe():
                    lines = [step.source for step in recipe.steps if step.source]
                    size, dtype, verb, by = recipe.view.size, recipe.view.dtype, "initialise", make
                case OnDisk():
                    lines, size, dtype, verb, by = [], recipe.shape, recipe.dtype, "read", part_of
            given = {"device": device, "make": by, "pieces": pieces, "recipe": recipe}
            function = Function(
                name=f"init_{len(functions)}",
                source="def forward():\n    return (make(recipe, pieces, device),)\n",
                bindings=tuple(given.items()),
                lines=(None, *lines[-1:]),
            )
            function = functions.setdefault((recipe.name, pieces), function)
            calls.append(Call(function.name, (), (name,), label=Label(f"{verb} {name}")))
            local = torch.Size(Place(size, pieces).local_shape)
            nbytes.append((name, local.numel() * dtype.itemsize))
        ranks.append(
            RankProgram(instructions=tuple(calls), outputs=tuple(wanted), nbytes=tuple(nbytes))
        )
    return Program(
        name="initialise",
        ranks=tuple(ranks),
        functions=tuple((f.name, f) for f in functions.values()),
        stage_of=(0,) * len(ranks),
    )
