"""Makes a rank's shard of a parameter from its recipe; runs on the actors.

    make(recipe, (((0, 4),), ((0, 16),)), device)       # rows 0:4 of a parameter of 16 columns

A split recipe is carried out on the shard alone, its random numbers by global index. Any other is
carried out whole on each rank and cut: the recorder allows that for small tensors.

Invariants: the shard has the bits of the whole, on every mesh and device: draws are by counter,
other steps of a split recipe are rounded exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtensor.daft import Call, Function, Program, RankProgram
from dtensor.frontend.initial.recipe import Constant, Recipe, Step, View, truncated_normal
from dtensor.frontend.initial.slicing import DRAWS, FACTORIES, FILLS
from dtensor.sharding.ops.distributions import normal, normal_of, truncated, uniform
from dtensor.sharding.ops.philox import Pieces, Place
from dtensor.sharding.spec.shards import block

aten = torch.ops.aten
_ELSEWHERE = ("device", "layout", "pin_memory", "memory_format", "generator")


def init_program(shards: list[dict[str, tuple[Recipe, Pieces]]], device: torch.device) -> Program:
    """One call per parameter and rank, each giving the shard under the parameter's name."""
    functions: dict[tuple[str, Pieces], Function] = {}
    ranks: list[RankProgram] = []
    for wanted in shards:
        calls: list[Call] = []
        nbytes: list[tuple[str, int]] = []
        for name, (recipe, pieces) in wanted.items():
            key = (recipe.name, pieces)
            if key not in functions:
                functions[key] = _function(f"init_{len(functions)}", recipe, pieces, device)
            calls.append(Call(functions[key].name, (), (name,), label=f"initialise {name}"))
            size = math.prod(Place(recipe.shape, pieces).local_shape) * recipe.dtype.itemsize
            nbytes.append((name, size))
        ranks.append(
            RankProgram(
                instructions=tuple(calls), outputs=tuple(wanted), nbytes=tuple(sorted(nbytes))
            )
        )
    return Program(
        name="initialise",
        ranks=tuple(ranks),
        functions=tuple((f.name, f) for f in functions.values()),
        stage_of=(0,) * len(ranks),
    )


def _function(name: str, recipe: Recipe, pieces: Pieces, device: torch.device) -> Function:
    source = next((step.source for step in reversed(recipe.steps) if step.source), None)
    return Function(
        name=name,
        source="def forward():\n    return (make(recipe, pieces, device),)\n",
        bindings=(("device", device), ("make", make), ("pieces", pieces), ("recipe", recipe)),
        lines=(None, source),
    )


def make(recipe: Recipe, pieces: Pieces, device: torch.device) -> Tensor:
    """The part of the recipe's tensor that ``pieces`` names: per dim the intervals held."""
    with torch.no_grad():
        if recipe.split:
            return _Shards(recipe, pieces, device).run()
        return block(_Whole(recipe, device).run(), pieces).contiguous().clone()


class _Shards:
    """Carries out a split recipe on the shards of all tensors that occur in it."""

    def __init__(self, recipe: Recipe, pieces: Pieces, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.place = Place(recipe.shape, pieces)
        self.held: dict[int, Tensor] = {}

    def run(self) -> Tensor:
        for step in self.recipe.steps:
            self.step(step)
        return self.held[self.recipe.view.storage]

    def shard(self, view: View) -> Tensor:
        if view.storage not in self.held:
            shape = self.place.local_shape
            self.held[view.storage] = torch.empty(shape, dtype=view.dtype, device=self.device)
        return self.held[view.storage]

    def step(self, step: Step) -> None:
        view = step.writes[0]
        if step.target in FILLS or step.target in DRAWS:
            for place, target in self.parts(view):
                if step.target in FILLS:
                    target.fill_(step.args[1] if len(step.args) > 1 else 0)
                else:
                    target.copy_(_draw(step, place, view.dtype, self.device))
        elif step.target in FACTORIES:
            self.shard(view).fill_(_fill_value(step))
        else:
            result = _apply(step, self.shard)
            if step.made:
                self.held[view.storage] = result

    def parts(self, view: View) -> Iterable[tuple[Place, Tensor]]:
        """What the rank holds of a view of whole rows: the place in it, the local tensor."""
        shard = self.shard(view)
        if view.is_all_of(self.recipe.shape):
            yield self.place, shard
            return
        rows = view.rows_of(self.recipe.shape)
        assert rows is not None
        shape = (rows[1] - rows[0], *self.recipe.shape[1:])
        offset = 0
        for start, stop in self.place.pieces[0]:
            low, high = max(start, rows[0]), min(stop, rows[1])
            if low < high:
                held = ((low - rows[0], high - rows[0]),)
                place = Place(shape, (held, *self.place.pieces[1:]))
                yield place, shard.narrow(0, offset + low - start, high - low)
            offset += stop - start


class _Whole:
    """Carries out a recipe on whole tensors, with torch's own views."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.flat = {
            number: torch.empty(size, dtype=dtype, device=device)
            for number, size, dtype in recipe.storages
        }

    def run(self) -> Tensor:
        for step in self.recipe.steps:
            if step.target in DRAWS:
                view = step.writes[0]
                place = Place.whole(view.size)
                self.view(view).copy_(_draw(step, place, view.dtype, self.device))
                continue
            result = _apply(step, self.view, self.device)
            if step.made:
                for view, value in zip(step.writes, _tensors(result), strict=True):
                    self.view(view).copy_(value)
        return self.view(self.recipe.view)

    def view(self, view: View) -> Tensor:
        flat = self.flat[view.storage]
        if flat.dtype != view.dtype:
            flat = flat.view(view.dtype)
        return flat.as_strided(view.size, view.stride, view.offset)


def _apply(step: Step, tensor: Any, device: torch.device | None = None) -> Any:
    """Calls a step's op on the tensors that stand for its views."""

    def decode(value: Any) -> Any:
        match value:
            case View():
                return tensor(value)
            case Constant():
                return value.value.to(device) if device is not None else value.value
            case tuple():
                return [decode(v) for v in value]
            case _:
                return value

    kwargs = {k: decode(v) for k, v in step.kwargs if k not in _ELSEWHERE}
    if device is not None and "device" in dict(step.kwargs):
        kwargs["device"] = device
    args = [decode(a) for a in step.args]
    if step.target is aten.erfinv_.default:
        return args[0].copy_(_erfinv(args[0]))
    return step.target(*args, **kwargs)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def _fill_value(step: Step) -> Any:
    if step.target in (aten.full.default, aten.full_like.default):
        return step.args[1]
    return 1 if step.target in (aten.ones.default, aten.ones_like.default) else 0


def _draw(step: Step, place: Place, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers of a random step; those of half dtypes are made in float32."""
    key = step.key
    assert key is not None
    wide = dtype if dtype == torch.float64 else torch.float32
    a = _given(step)
    if step.target is aten.normal_.default:
        drawn = normal(place, key, wide, device).mul_(a["std"]).add_(a["mean"])
    elif step.target is aten.uniform_.default:
        drawn = uniform(place, key, wide, device).mul_(a["to"] - a["from"]).add_(a["from"])
    elif step.target is truncated_normal:
        _, mean, std, low, high = step.args
        bounds = (_quantile((low - mean) / std), _quantile((high - mean) / std))
        drawn = truncated(place, key, *bounds, wide, device)
        drawn.mul_(std).add_(mean).clamp_(low, high)
    elif step.target in (aten.randn.default, aten.randn_like.default):
        drawn = normal(place, key, wide, device)
    else:
        drawn = uniform(place, key, wide, device)
    return drawn.to(dtype)


def _given(step: Step) -> Mapping[str, Any]:
    """The arguments of an ATen op by name, defaults filled in."""
    if not isinstance(step.target, torch._ops.OpOverload):
        return {}
    schema = step.target._schema.arguments
    values = {a.name: a.default_value for a in schema}
    values.update(zip([a.name for a in schema], step.args, strict=False))
    return {**values, **dict(step.kwargs)}


def _quantile(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _erfinv(y: Tensor) -> Tensor:
    """By the same approximation as normal numbers, so that shards have the bits of the whole."""
    wide = y.double()
    inside = wide.abs() < 1
    z = normal_of(torch.where(inside, (wide + 1) / 2, 0.5)) / math.sqrt(2)
    edge = torch.where(wide.abs() == 1, wide * math.inf, math.nan)
    return torch.where(inside, z, edge).to(y.dtype)
