"""Hypothesis strategies: meshes, placements that fit, specs and tensors.

    from hypothesis import given

    @given(dt.testing.strategies.specs(mesh=dt.Mesh(tp=2, dp=2), shape=(6, 5)))
    def test_round_trip(spec): ...

What is drawn is always valid: blocks fill their dim, units divide them, on one dim the later axis
splits the pieces of the earlier. Dims that do not divide, shards that are empty, axes of size 1 and
both orders of two axes on a dim are all drawn; examples shrink to small meshes and whole tensors.

Hypothesis is not a dependency of this package: it is imported when a strategy is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtensor.sharding.spec.mesh import Mesh, mesh_of
from dtensor.sharding.spec.placements import REPLICATE, Partial, Placement, Shard
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.testing.trials import stated_spec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def meshes(
    axes: Sequence[str] = ("a", "b", "c"), *, sizes: Sequence[int] = (1, 2, 3), max_size: int = 8
) -> SearchStrategy[Mesh]:
    """Meshes with the first one, two, ... of ``axes``, each of one of ``sizes``, of at most
    ``max_size`` ranks."""
    st = _strategies()
    every = [
        mesh_of(tuple(zip(axes, each)))
        for count in range(1, len(axes) + 1)
        for each in itertools.product(sizes, repeat=count)
    ]
    fitting = [mesh for mesh in every if mesh.size <= max_size]
    return st.sampled_from(sorted(fitting, key=lambda mesh: (mesh.size, len(mesh.axes))))


def placements(shape: Sequence[int], *, pending: bool = False) -> SearchStrategy[Placement]:
    """Placements of a tensor of ``shape`` on one axis; ``pending``: sums, maxima, minima too."""
    return _strategies().sampled_from(_choices(tuple(shape), pending))


def shardings(
    shape: Sequence[int], mesh: Mesh, *, pending: bool = False
) -> SearchStrategy[dict[str, Placement]]:
    """Placements by axis, of a tensor of ``shape``, to be passed on as ``dt.distribute(x, mesh,
    **sharding)``; ``pending``: as of `placements`."""
    st = _strategies()
    wanted = tuple(shape)

    @st.composite
    def draw_sharding(draw: Any) -> dict[str, Placement]:
        stated: dict[str, Placement] = {}
        for axis in draw(st.permutations(mesh.axes)):
            fitting = [
                choice
                for choice in _choices(wanted, pending)
                if stated_spec(wanted, mesh, {**stated, axis: choice}) is not None
            ]
            stated[axis] = draw(st.sampled_from(fitting))
        return stated

    return draw_sharding()


def specs(
    *,
    mesh: Mesh | SearchStrategy[Mesh] | None = None,
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    pending: bool = False,
) -> SearchStrategy[TensorSpec]:
    """Specs of ``dtype`` on a mesh (by default any of `meshes`), of a shape (by default any of
    `shapes`); ``pending``: as of `placements`."""
    st = _strategies()
    some_mesh = _strategy(meshes() if mesh is None else mesh)
    some_shape = _strategy(shapes() if shape is None else shape)

    @st.composite
    def draw_spec(draw: Any) -> TensorSpec:
        chosen, size = draw(some_mesh), tuple(draw(some_shape))
        return make_spec(size, dtype, chosen, draw(shardings(size, chosen, pending=pending)))

    return draw_spec()


def shapes(
    *, max_dims: int = 3, max_size: int = 7, min_size: int = 1
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of up to ``max_dims`` dims, none included, each of ``min_size`` to ``max_size``."""
    st = _strategies()
    return st.lists(st.integers(min_size, max_size), max_size=max_dims).map(tuple)


def tensors(
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> SearchStrategy[torch.Tensor]:
    """Tensors of whole numbers from -9 to 9, so that sums are exact in any order; of a ``shape``,
    by default any of `shapes`, and a ``dtype``.

    Unsigned dtypes from 0; bools are drawn as such.
    """
    st = _strategies()
    some_shape = _strategy(shapes() if shape is None else shape)
    lowest = 0 if dtype in (torch.bool, torch.uint8) else -9
    highest = 1 if dtype == torch.bool else 9

    @st.composite
    def draw_tensor(draw: Any) -> torch.Tensor:
        size = tuple(draw(some_shape))
        # one number for all elements: hypothesis has little use for shrinking each of them
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        return torch.randint(lowest, highest + 1, size, generator=generator).to(dtype)

    return draw_tensor()


# -- what is drawn from --------------------------------------------------------------------------


def _choices(shape: tuple[int, ...], pending: bool) -> list[Placement]:
    """From the plainest on, which is what examples shrink to."""
    choices: list[Placement] = [REPLICATE, *(Shard(dim) for dim in range(len(shape)))]
    for dim, size in enumerate(shape):
        choices += [Shard(dim, blocks=n) for n in (2, 3) if size and size % n == 0]
        choices += [Shard(dim, unit=n) for n in (2, 3) if size and size % n == 0]
        if size > 2:
            choices.append(Shard(dim, blocks=(size - 1, 1)))
        if size % 4 == 0 and size:
            choices.append(Shard(dim, blocks=2, unit=2))
    if pending:
        choices += [Partial("sum"), Partial("max"), Partial("min")]
    return choices


def _strategy(given: Any) -> Any:
    """A value stands for the strategy that draws it alone."""
    st = _strategies()
    from hypothesis.strategies import SearchStrategy

    return given if isinstance(given, SearchStrategy) else st.just(given)


def _strategies() -> Any:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            "dtensor.testing.strategies makes strategies for hypothesis, which is not installed; "
            "fix: pip install hypothesis"
        ) from error
    return strategies
