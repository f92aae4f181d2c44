"""`Mesh`: a named grid of ranks. A mesh is a plain value without devices, hosts or processes.

    mesh = Mesh(pp=2, tp=2)
    mesh.shape                # {"pp": 2, "tp": 2}
    mesh.coordinates(2)       # {"pp": 1, "tp": 0}
    Mesh(tp=2, name="play")   # not equal to Mesh(tp=2): one launch may have both

Invariants: axis names are distinct identifiers, sizes are at least 1, ranks are numbered
row-major (the last axis varies fastest).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import overload

from dtensor.errors import PlanningError, check_kind
from dtensor.showing import html_grid

MICROBATCH_AXIS = "mb"


class Mesh:
    """A named grid of ranks: ``Mesh(dp=2, tp=4)``; ``Mesh()`` is one rank.

        >>> mesh = dt.Mesh(pp=2, tp=2)
        >>> mesh.size, mesh.shape, mesh.coordinates(2)
        (4, {'pp': 2, 'tp': 2}, {'pp': 1, 'tp': 0})

    Args:
        axes: the number of ranks along each axis, in order. Rank numbers are row-major: ranks that
            are neighbours along the last axis have consecutive numbers.
        name: the name of the mesh. Meshes with the same axes and different names are different.

    Raises PlanningError if a size is below 1, and if ``name`` is not a string. An axis cannot be
    called ``mb`` (the virtual axis along which microbatches run in time) or ``name``.
    """

    __slots__ = ("_axes", "_names", "_sizes", "name")
    name: str
    """The name of the mesh; "" if it has none."""
    _axes: tuple[tuple[str, int], ...]
    _names: tuple[str, ...]  # derived from _axes and stored, because they are read very often
    _sizes: dict[str, int]

    @overload
    def __init__(self, **axes: int) -> None: ...
    @overload
    def __init__(self, *, name: str, **axes: int) -> None: ...
    def __init__(self, *unnamed: object, name: str | int = "", **axes: int) -> None:
        if unnamed:
            arguments = ", ".join(map(repr, unnamed))
            sizes = [size for size in unnamed if type(size) is int]
            named = ", ".join(
                f"{axis}={size}" for axis, size in zip(("pp", "dp", "tp")[-len(sizes) :], sizes)
            )
            raise PlanningError(
                f"Mesh({arguments}): each axis of a mesh has a name\n"
                f"fix: dt.Mesh({named if 0 < len(sizes) <= 3 else 'dp=2, tp=2'})"
            )
        if MICROBATCH_AXIS in axes:
            raise PlanningError(
                f"the axis name {MICROBATCH_AXIS!r} is reserved for microbatches; rename the axis"
            )
        if isinstance(name, int):
            raise PlanningError(
                f"name={name}: an axis cannot be called 'name', which is the name of the mesh; "
                f"fix: rename the axis"
            )
        fix = 'dt.Mesh(tp=2, name="play")'
        check_kind("name", name, str, "a string", fix)
        self._set(tuple(axes.items()), name)

    def _set(self, axes: tuple[tuple[str, int], ...], name: str) -> None:
        """Set the fields of a new mesh. Raises PlanningError if a size is not an int >= 1."""
        for axis, size in axes:
            if type(size) is not int or size < 1:
                suggested = int(size) if isinstance(size, str) and size.isdecimal() else 1
                raise PlanningError(
                    f"axis {axis!r} has size {size!r}; a size is an int >= 1\n"
                    f"fix: dt.Mesh({axis}={max(suggested, 1)})"
                )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_names", tuple(axis for axis, _ in axes))
        object.__setattr__(self, "_sizes", dict(axes))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh is a value and cannot be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return (mesh_of, (self._axes, self.name))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in order. Rank numbers are row-major."""
        return self._names

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return dict(self._axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self._axes)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along the axis. Raises PlanningError if there is none."""
        if axis in self._sizes:
            return self._sizes[axis]
        raise PlanningError(f"{self} has no axis {axis!r}; its axes are {', '.join(self.axes)}")

    def index(self, axis: str) -> int:
        """Return the position of the axis in `axes`."""
        self.axis_size(axis)
        return self.axes.index(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's position along each axis. Raises PlanningError for a missing rank."""
        if not 0 <= rank < self.size:
            raise PlanningError(f"rank {rank} is not in {self}, which has ranks 0..{self.size - 1}")
        result: dict[str, int] = {}
        for name, size in reversed(self._axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates; the inverse of `coordinates`."""
        rank = 0
        for name, size in self._axes:
            rank = rank * size + coordinates[name]
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks, in order, that differ from ``rank`` at most along ``axis``."""
        coordinates = self.coordinates(rank)
        return tuple(self.rank({**coordinates, axis: i}) for i in range(self.axis_size(axis)))

    def extended(self, axis: str, size: int) -> Mesh:
        """Return the mesh with one more axis, the innermost. The microbatch axis is added so."""
        return mesh_of((*self._axes, (axis, size)), self.name)

    def without(self, axis: str) -> Mesh:
        """Return the mesh of all axes but ``axis``."""
        return mesh_of(tuple(item for item in self._axes if item[0] != axis), self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return False
        return self._axes == other._axes and self.name == other.name

    def __hash__(self) -> int:
        return hash((self._axes, self.name))

    def _repr_html_(self) -> str:
        return html_grid(str(self), self.shape)

    def __repr__(self) -> str:
        return f"Mesh({self._text()})"

    def __str__(self) -> str:
        return f"mesh({self._text()})"

    def _text(self) -> str:
        parts = [f"{name}={size}" for name, size in self._axes]
        return ", ".join([*parts, f'name="{self.name}"'] if self.name else parts)


def check_mesh(value: object) -> None:
    """Raise PlanningError if ``value`` is not a `Mesh`."""
    check_kind("the mesh", value, Mesh, "a Mesh", "dt.Mesh(tp=2)")


def mesh_of(axes: tuple[tuple[str, int], ...], name: str = "") -> Mesh:
    """Return a mesh from (axis, size) pairs. Unlike the constructor it allows the reserved axis
    names ``mb`` and ``name``."""
    mesh = object.__new__(Mesh)
    Mesh._set(mesh, axes, name)  # pyright: ignore[reportPrivateUsage]
    return mesh
