"""Hypothesis strategies for meshes, placements, specs and tensors.

    from hypothesis import given

    @given(dt.testing.strategies.specs(mesh=dt.Mesh(tp=2, dp=2), shape=(6, 5)))
    def test_round_trip(spec): ...

All drawn specs are valid. They include uneven and empty shards, axes of size 1, and both orders of
two axes that shard one dim. Examples shrink to small meshes and replicated tensors. Hypothesis is
not a dependency of this package: it is imported when a strategy is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtensor.sharding.spec.mesh import Mesh, mesh_of
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard, Zigzag
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing.trials import stated_spec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def meshes(
    axes: Sequence[str] = ("a", "b", "c"), *, sizes: Sequence[int] = (1, 2, 3), max_size: int = 8
) -> SearchStrategy[Mesh]:
    """Draw a mesh of at most ``max_size`` ranks: the first axes of ``axes``, each with one of
    ``sizes``."""
    st = _import_hypothesis()
    all_meshes = [
        mesh_of(tuple(zip(axes, each)))
        for count in range(1, len(axes) + 1)
        for each in itertools.product(sizes, repeat=count)
    ]
    small = [mesh for mesh in all_meshes if mesh.size <= max_size]
    return st.sampled_from(sorted(small, key=lambda mesh: (mesh.size, len(mesh.axes))))


def placements(shape: Sequence[int], *, pending: bool = False) -> SearchStrategy[Placement]:
    """Draw a placement of a tensor of ``shape`` on one axis. ``pending``: also draw `Partial`."""
    return _import_hypothesis().sampled_from(_choices(tuple(shape), pending))


def shardings(
    shape: Sequence[int], mesh: Mesh, *, pending: bool = False
) -> SearchStrategy[dict[str, Placement]]:
    """Draw a placement for each axis of the mesh, for a tensor of ``shape``. They can be passed on
    as ``dt.distribute(x, mesh, **sharding)``. ``pending``: also draw `Partial`."""
    st = _import_hypothesis()
    size = tuple(shape)

    @st.composite
    def draw_sharding(draw: Any) -> dict[str, Placement]:
        stated: dict[str, Placement] = {}
        for axis in draw(st.permutations(mesh.axes)):
            valid = [
                choice
                for choice in _choices(size, pending, mesh.axis_size(axis))
                if stated_spec(size, mesh, {**stated, axis: choice}) is not None
            ]
            stated[axis] = draw(st.sampled_from(valid))
        return stated

    return draw_sharding()


def specs(
    *,
    mesh: Mesh | SearchStrategy[Mesh] | None = None,
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    pending: bool = False,
) -> SearchStrategy[TensorSpec]:
    """Draw a spec of ``dtype`` on a mesh (by default from `meshes`) and with a shape (by default
    from `shapes`). ``pending``: also draw `Partial`."""
    st = _import_hypothesis()
    mesh_strategy = _strategy(meshes() if mesh is None else mesh)
    shape_strategy = _strategy(shapes() if shape is None else shape)

    @st.composite
    def draw_spec(draw: Any) -> TensorSpec:
        drawn_mesh, size = draw(mesh_strategy), tuple(draw(shape_strategy))
        sharding = draw(shardings(size, drawn_mesh, pending=pending))
        return make_spec(size, dtype, drawn_mesh, sharding)

    return draw_spec()


def shapes(
    *, max_dims: int = 3, max_size: int = 7, min_size: int = 1
) -> SearchStrategy[tuple[int, ...]]:
    """Draw a shape of 0 to ``max_dims`` dims, each of size ``min_size`` to ``max_size``."""
    st = _import_hypothesis()
    return st.lists(st.integers(min_size, max_size), max_size=max_dims).map(tuple)


def tensors(
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> SearchStrategy[torch.Tensor]:
    """Draw a tensor of a ``shape`` (by default from `shapes`) and a ``dtype``. Its elements are
    whole numbers from -9 to 9 (from 0 for uint8), so sums are exact in any order."""
    st = _import_hypothesis()
    shape_strategy = _strategy(shapes() if shape is None else shape)
    lowest = 0 if dtype in (torch.bool, torch.uint8) else -9
    highest = 1 if dtype == torch.bool else 9

    @st.composite
    def draw_tensor(draw: Any) -> torch.Tensor:
        size = tuple(draw(shape_strategy))
        # One drawn seed for all elements: shrinking each element would take long and help little.
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        return torch.randint(lowest, highest + 1, size, generator=generator).to(dtype)

    return draw_tensor()


# -- choices ---------------------------------------------------------------------------------------


def _choices(shape: tuple[int, ...], pending: bool, num: int = 1) -> list[Placement]:
    """Return the placements to draw from, the simplest first, because examples shrink to it.
    ``num``: the number of ranks of the axis; 1 leaves out stated sizes."""
    choices: list[Placement] = [REPLICATE, *(Shard(dim) for dim in range(len(shape)))]
    for dim, size in enumerate(shape):
        choices += [Shard(dim, blocks=n) for n in (2, 3) if size and size % n == 0]
        choices += [Shard(dim, unit=n) for n in (2, 3) if size and size % n == 0]
        if size > 2:
            choices.append(Shard(dim, blocks=(size - 1, 1)))
            choices += [Zigzag(dim), Shard(dim, shift=1), Shard(dim, zigzag=True, shift=1)]
        if size % 4 == 0 and size:
            choices.append(Shard(dim, blocks=2, unit=2))
        if num > 1 and size:
            choices.append(Shard(dim, sizes=(*(0,) * (num - 1), size)))
            choices.append(Shard(dim, sizes=(size - 1, *(0,) * (num - 2), 1)))
    if pending:
        choices += [Partial("sum"), Partial("max"), Partial("min")]
    return choices


def _strategy(value: Any) -> Any:
    """Return a strategy unchanged, and for another value the strategy that always draws it."""
    st = _import_hypothesis()
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


def _import_hypothesis() -> Any:
    """Return `hypothesis.strategies`. Raises ImportError with a fix if it is not installed."""
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            "dtensor.testing.strategies makes strategies for hypothesis, which is not installed; "
            "fix: pip install hypothesis"
        ) from error
    return strategies
