"""A `Recipe` records how a tensor of a meta-device model is initialized; `make` makes its shards.

    normal_(weight, 0.0, 0.02); weight[3].fill_(0)      # an embedding with a padding row
    make(recipe, (((0, 4),), ((0, 16),)), device)       # its rows 0:4, all 16 columns: f32[4,16]

Tensors of a recipe are `StorageView`s of numbered storages, so views and in-place ops work as in
torch. In a *split* recipe each op is elementwise on tensors of the result's shape, or fills whole
rows in place; then a rank makes only its shard. Otherwise it makes the whole tensor and cuts it.

A shard has the bits of the whole tensor, on every mesh and device: random numbers depend only on
their step's key and the element's position, and the other ops of a split recipe round exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtensor.private_torch import OpOverload, pytree
from dtensor.sharding.ops.distributions import inverse_normal, normal, truncated, uniform
from dtensor.sharding.ops.philox import Key, Pieces, Place
from dtensor.sharding.spec.shards import block

Fill = Literal["constant", "normal", "uniform", "truncated"]
"""A fill of a tensor whose elements do not depend on each other. Its arguments are: the value; mean
and std; low and high; mean, std, low and high."""

_EXACT = {"add", "sub", "mul", "div", "neg", "clamp", "copy", "clone", "_to_copy"}
"""Elementwise ops that round exactly: their bits do not depend on how a tensor is split."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """A strided view of storage number ``storage``. Offset and strides are in elements.

    ``in_order``: it is contiguous (`Tensor.is_contiguous`).
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
        """The range of bytes of the storage from the first element of the view to its last."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        itemsize = self.dtype.itemsize
        return self.offset * itemsize, (self.offset + last + 1) * itemsize

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Return whether the view is a contiguous tensor of this shape at the storage's start."""
        return self.size == shape and self.offset == 0 and self.in_order

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the rows (start, stop) of a contiguous tensor of this shape that the view consists
        of; None if it does not consist of whole rows in order."""
        row_shape = shape[1:]
        row_size = math.prod(row_shape)
        num_lead = len(self.size) - len(row_shape)  # 1: a block of rows; 0: one selected row
        if not shape or num_lead not in (0, 1) or not row_size or self.offset % row_size:
            return None
        if self.size[num_lead:] != row_shape or not self.in_order:
            return None
        start = self.offset // row_size
        return start, start + (self.size[0] if num_lead else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitStep:
    """A call of an op, with views in place of tensors.

    Args:
        op: the op's name in torch.
        target: the op, or the fill of ``args[0]`` with the numbers ``args[1:]``.
        made: the results of the call that are new storages.
        key: the key of the random numbers.
        source: the user's line.
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
        """Return whether a rank can run the step on its shards of tensors of this shape only."""
        if isinstance(self.target, str):
            return self.args[0].rows_of(shape) is not None
        is_exact = self.op.removesuffix("_") in _EXACT or self.op == "erfinv_"
        is_exact = is_exact and self.target._overloadname in ("default", "Tensor")
        # With alpha, vectorized code rounds once, scalar code twice.
        has_alpha = self.kwargs.get("alpha", 1) != 1
        has_constants = any(isinstance(value, Tensor) for value in self.args)
        return (
            is_exact
            and not has_alpha
            and not has_constants
            and all(view.is_whole(shape) for view in self.views)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The initialization of the parameter or buffer ``name``: ``steps`` fill the storage of
    ``view``, which is the result. It can be pickled, and holds only small constant tensors."""

    name: str
    view: StorageView
    steps: tuple[InitStep, ...]

    @property
    def split(self) -> bool:
        """Whether a rank can make its shard without the rest of the tensor."""
        shape = self.view.size
        return self.view.is_whole(shape) and all(step.splits(shape) for step in self.steps)


def make(recipe: Recipe, pieces: Pieces, device: torch.device) -> Tensor:
    """Return a shard of the recipe's tensor. ``pieces``: the intervals of each dim that it has."""
    with torch.no_grad():
        split = recipe.split
        maker = _Maker(recipe, pieces if split else None, device)
        for step in recipe.steps:
            maker.run(step)
        tensor = maker.tensor(recipe.view)
        return tensor if split else block(tensor, pieces).contiguous().clone()


class _Maker:
    """Runs the steps of a recipe on shards of all tensors. ``pieces`` None: on whole tensors."""

    def __init__(self, recipe: Recipe, pieces: Pieces | None, device: torch.device) -> None:
        self.recipe, self.pieces, self.device = recipe, pieces, device
        self.storages: dict[int, Tensor] = {}  # by number; shards, or the bytes of a whole storage

    def tensor(self, view: StorageView) -> Tensor:
        """Return the tensor, or its shard, that a view stands for."""
        storage = self.storages.get(view.storage)
        if storage is None:
            size, dtype = (view.storage_bytes,), torch.uint8
            if self.pieces is not None:
                size, dtype = Place(self.recipe.view.size, self.pieces).local_shape, view.dtype
            storage = torch.empty(size, dtype=dtype, device=self.device)
            self.storages[view.storage] = storage
        if self.pieces is not None:
            return storage
        return storage.view(view.dtype).as_strided(view.size, view.stride, view.offset)

    def run(self, step: InitStep) -> None:
        """Run one recorded step on the parts of tensors that this recipe makes."""
        if isinstance(step.target, str):
            for place, target in self.filled_parts(step.args[0]):
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
        """Return the value of an argument of a step on this rank."""
        match value:
            case StorageView():
                return self.tensor(value)
            case Tensor():
                return value.to(self.device)
            case torch.device():
                return self.device
            case _:
                return value

    def filled_parts(self, view: StorageView) -> Iterable[tuple[Place, Tensor]]:
        """Yield the local tensors that a fill of ``view`` writes to, with their places in it."""
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
                interval = (low - rows[0], high - rows[0])
                local = tensor.narrow(0, offset + low - start, high - low)
                yield Place(shape, ((interval,), *self.pieces[1:])), local
            offset += stop - start

    def fill(self, step: InitStep, place: Place, target: Tensor) -> None:
        """Fill ``target``, which is at ``place`` of the step's view. Numbers for dtypes narrower
        than float32 are computed in float32."""
        if step.target == "constant":
            target.fill_(step.args[1])
            return
        assert step.key is not None
        wide = target.dtype if target.dtype == torch.float64 else torch.float32
        match step.target, step.args[1:]:
            case "normal", (mean, std):
                numbers = normal(place, step.key, wide, self.device).mul_(std).add_(mean)
            case "uniform", (low, high):
                numbers = uniform(place, step.key, wide, self.device).mul_(high - low).add_(low)
            case "truncated", (mean, std, low, high):
                bounds = (_normal_cdf((low - mean) / std), _normal_cdf((high - mean) / std))
                numbers = truncated(place, step.key, *bounds, wide, self.device)
                numbers.mul_(std).add_(mean).clamp_(low, high)
            case _:
                raise AssertionError(f"{step.target} takes other numbers than {step.args[1:]}")
        target.copy_(numbers)


def _normal_cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _erfinv(y: Tensor) -> Tensor:
    """Return the inverse error function. It is computed like normal random numbers, because torch's
    vectorized and scalar code differ: shards must have the bits of the whole tensor."""
    wide = y.double()
    is_inside = wide.abs() < 1
    z = inverse_normal(torch.where(is_inside, (wide + 1) / 2, 0.5)) / math.sqrt(2)
    edge = torch.where(wide.abs() == 1, wide * math.inf, math.nan)
    return torch.where(is_inside, z, edge).to(y.dtype)
