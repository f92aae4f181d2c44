"""The values that a model on the meta device starts from, made where they are needed.

    with torch.device("meta"):
        model = GPT(config)
    model = dt.parallelize(model, mesh, placements, init="reset")

Each rank makes its own shards by counter-based numbers: no process holds the model, and the values
are the same bits on every mesh. What `load_state_dict` brings replaces them.

Not here: recording (frontend.recording), making (runtime.initialise).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtensor.api.randomness import initial_seed, key_of
from dtensor.errors import PlanningError
from dtensor.frontend.initial.recipe import Recipe
from dtensor.frontend.initial.recording import Init, record
from dtensor.runtime.initialise import make

__all__ = ["Init", "Initial"]


class Initial:
    """Recipes of a module's parameters and buffers on the meta device, or values loaded since."""

    def __init__(self, module: nn.Module, init: Init | None) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.recipes: dict[str, Recipe] = {}
        if init is not None:
            seed = initial_seed()
            names = first_names(module)
            self.recipes = record(module, init, lambda name: key_of(seed, "init", name), names)

    def recipe(self, name: str) -> Recipe | None:
        """How a rank makes its shard; None where the whole value is at hand."""
        return None if name in self.loaded else self.recipes.get(name)

    def value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value; ``tensor`` is the module's own, on the meta device or not."""
        if not tensor.is_meta:
            return tensor
        if name in self.loaded:
            return self.loaded[name]
        if name not in self.recipes:
            raise PlanningError(
                f"{name} is on the meta device and has no value.\n"
                f"fix: dt.parallelize(model, mesh, placements, init='reset'), or load a state "
                f"with dt.load_state_dict"
            )
        recipe = self.recipes[name]
        whole = tuple(((0, n),) if n else () for n in recipe.shape)
        return make(recipe, whole, torch.device("cpu"))

    def load(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Keep the state's values of what is on the meta device, under each of its names."""
        names, keys = first_names(module), names_in_state(module)
        firsts = {keys[key]: value for key, value in state.items() if key in keys}
        on_meta = {name for name, t in _tensors(module).items() if t.is_meta}
        for name in on_meta:
            if names[name] in firsts:
                self.loaded[name] = firsts[names[name]].detach().cpu().clone()


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in _tensors(module).items()}


def names_in_state(module: nn.Module) -> dict[str, str]:
    """Every key of the module's state dict to the first name of the tensor that stands there.

    They differ in ties, and where a hook renames: that of torch's checkpoint wrapper leaves itself
    out. A key whose tensor is none of the module's is its own name.
    """
    first: dict[int, str] = {}
    for name, tensor in _tensors(module).items():
        first.setdefault(id(tensor), name)
    held = module.state_dict(keep_vars=True)
    return {key: first.get(id(value), key) for key, value in held.items()}


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
