"""A `Recipe`: how one tensor of a model on the meta device is made; `make` makes a rank's shard.

    normal_(weight, 0.0, 0.02); weight[3].fill_(0)      # an embedding with a padding row
    make(recipe, (((0, 4),), ((0, 16),)), device)       # its rows 0:4, all 16 columns: f32[4,16]

Tensors of a recipe are `StorageView`s of numbered storages, so that views and in-place ops mean
what they mean in torch. A recipe is *split* where each op works element by element on tensors of
the result's own shape, or on whole rows of it in place: then a rank makes its shard alone.
Otherwise each rank makes the tensor whole and cuts it, which `recording` allows for small ones.

Invariants: the shard has the bits of the whole, on every mesh and device: random numbers are by
counter, at the element's place in the view that is drawn, and other ops of a split recipe are
rounded exactly. A recipe is frozen, pickles, holds no tensor but small constants; its random steps
carry the key of their numbers. Not here: recording; which rank holds what (api.session).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtensor.private_torch import OpOverload, pytree
from dtensor.sharding.ops.distributions import normal, normal_of, truncated, uniform
from dtensor.sharding.ops.philox import Key, Pieces, Place
from dtensor.sharding.spec.shards import block

Fill = Literal["constant", "normal", "uniform", "truncated"]
"""What gives each element a number by itself. It takes the value; mean and deviation; the bounds;
mean, deviation and the bounds."""

_EXACT = {"add", "sub", "mul", "div", "neg", "clamp", "copy", "clone", "_to_copy"}


@dataclass(frozen=True, slots=True)
class StorageView:
    """A strided view of storage number ``storage``; offset and strides count elements.

    ``in_order``: contiguous, as torch says it.
    """

    storage: int
    storage_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    in_order: bool

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the storage from its first element to its last."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        itemsize = self.dtype.itemsize
        return self.offset * itemsize, (self.offset + last + 1) * itemsize

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a tensor of this shape, from the first element of its storage on."""
        return self.size == shape and self.offset == 0 and self.in_order

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Which rows of a tensor of this shape it is, in order; None for anything else."""
        inner = shape[1:]
        lead = len(self.size) - len(inner)  # 1: a block of rows; 0: one row, selected
        row = math.prod(inner)
        if not shape or lead not in (0, 1) or not row or self.offset % row:
            return None
        if self.size[lead:] != inner or not self.in_order:
            return None
        start = self.offset // row
        return start, start + (self.size[0] if lead else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitStep:
    """One call of an op that torch calls ``op``, with views in the place of tensors.

    ``target``: what is called, or how ``args[0]`` is filled from the numbers in ``args[1:]``;
    ``made``: what a call gives that was not there before; ``key``: of random numbers;
    ``source``: the user's line.
    """

    op: str
    target: OpOverload | Fill
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[StorageView, ...] = ()
    key: Key | None = None
    source: str = ""

    @property
    def views(self) -> list[StorageView]:
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.made))
        return [leaf for leaf in leaves if isinstance(leaf, StorageView)]

    def splits(self, shape: tuple[int, ...]) -> bool:
        """Whether a rank can do its part alone: all tensors of one shape, or rows in place."""
        if isinstance(self.target, str):
            return self.args[0].rows_of(shape) is not None
        exact = self.op.removesuffix("_") in _EXACT or self.op == "erfinv_"
        known = exact and self.target._overloadname in ("default", "Tensor")
        fused = self.kwargs.get("alpha", 1) != 1  # rounds once in vectors, twice in tails
        constants = any(isinstance(value, Tensor) for value in self.args)
        return known and not fused and not constants and all(v.is_all_of(shape) for v in self.views)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``view``: the result, of which ``steps`` fill the storage."""

    name: str
    view: StorageView
    steps: tuple[InitStep, ...]

    @property
    def split(self) -> bool:
        shape = self.view.size
        return self.view.is_all_of(shape) and all(step.splits(shape) for step in self.steps)


def make(recipe: Recipe, pieces: Pieces, device: torch.device) -> Tensor:
    """The part of the recipe's tensor that ``pieces`` names: per dim the intervals held."""
    with torch.no_grad():
        split = recipe.split
        maker = _Maker(recipe, pieces if split else None, device)
        for step in recipe.steps:
            maker.carry_out(step)
        made = maker.tensor(recipe.view)
        return made if split else block(made, pieces).contiguous().clone()


class _Maker:
    """Carries out steps: on shards of all tensors that occur, or (no ``pieces``) on whole ones."""

    def __init__(self, recipe: Recipe, pieces: Pieces | None, device: torch.device) -> None:
        self.recipe, self.pieces, self.device = recipe, pieces, device
        self.held: dict[int, Tensor] = {}

    def tensor(self, view: StorageView) -> Tensor:
        """The tensor that stands for a view."""
        held = self.held.get(view.storage)
        if held is None:
            size, dtype = (view.storage_bytes,), torch.uint8
            if self.pieces is not None:
                size, dtype = Place(self.recipe.view.size, self.pieces).local_shape, view.dtype
            held = self.held[view.storage] = torch.empty(size, dtype=dtype, device=self.device)
        if self.pieces is not None:
            return held
        return held.view(view.dtype).as_strided(view.size, view.stride, view.offset)

    def carry_out(self, step: InitStep) -> None:
        if isinstance(step.target, str):
            for place, target in self.parts(step.args[0]):
                self.fill(step, place, target)
            return
        args, kwargs = pytree.tree_map(self.argument, (step.args, step.kwargs))
        if step.op == "erfinv_":
            args[0].copy_(_erfinv(args[0]))
            return
        results = pytree.tree_leaves(step.target(*args, **kwargs))
        for view, result in zip(step.made, results, strict=bool(step.made)):
            self.tensor(view).copy_(result)

    def argument(self, value: Any) -> Any:
        match value:
            case StorageView():
                return self.tensor(value)
            case Tensor():
                return value.to(self.device)
            case torch.device():
                return self.device
            case _:
                return value

    def parts(self, view: StorageView) -> Iterable[tuple[Place, Tensor]]:
        """What is held of a view that is filled: the places in it, with the local tensors."""
        tensor = self.tensor(view)
        if self.pieces is None:
            yield Place.whole(view.size), tensor
            return
        rows = view.rows_of(self.recipe.view.size)
        assert rows is not None
        shape = (rows[1] - rows[0], *self.recipe.view.size[1:])
        offset = 0
        for start, stop in self.pieces[0]:
            low, high = max(start, rows[0]), min(stop, rows[1])
            if low < high:
                held = ((low - rows[0], high - rows[0]),)
                local = tensor.narrow(0, offset + low - start, high - low)
                yield Place(shape, (held, *self.pieces[1:])), local
            offset += stop - start

    def fill(self, step: InitStep, place: Place, target: Tensor) -> None:
        """Numbers of half dtypes are made in float32."""
        if step.target == "constant":
            target.fill_(step.args[1])
            return
        assert step.key is not None
        wide = target.dtype if target.dtype == torch.float64 else torch.float32
        match step.target, step.args[1:]:
            case "normal", (mean, std):
                drawn = normal(place, step.key, wide, self.device).mul_(std).add_(mean)
            case "uniform", (low, high):
                drawn = uniform(place, step.key, wide, self.device).mul_(high - low).add_(low)
            case "truncated", (mean, std, low, high):
                bounds = (_quantile((low - mean) / std), _quantile((high - mean) / std))
                drawn = truncated(place, step.key, *bounds, wide, self.device)
                drawn.mul_(std).add_(mean).clamp_(low, high)
            case _:
                raise AssertionError(f"{step.target} takes other numbers than {step.args[1:]}")
        target.copy_(drawn)


def _quantile(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _erfinv(y: Tensor) -> Tensor:
    """By the same approximation as normal numbers, so that shards have the bits of the whole."""
    wide = y.double()
    inside = wide.abs() < 1
    z = normal_of(torch.where(inside, (wide + 1) / 2, 0.5)) / math.sqrt(2)
    edge = torch.where(wide.abs() == 1, wide * math.inf, math.nan)
    return torch.where(inside, z, edge).to(y.dtype)
