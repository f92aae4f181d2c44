"""A mesh: a named grid of ranks. It is a value; no process stands behind it.

    mesh = Mesh(pp=2, tp=2)
    mesh.shape                # {"pp": 2, "tp": 2}
    mesh.coordinates(2)       # {"pp": 1, "tp": 0}
    Mesh(tp=2, name="play")   # another mesh than Mesh(tp=2): one launch may have both

Invariants: axis names are distinct identifiers, sizes are at least 1, ranks are numbered
row-major (the last axis varies fastest). It does not know devices or hosts.
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
        axes: name to number of ranks, in order; ranks that differ along the last are neighbours.
        name: of the mesh itself; meshes of the same axes and other names are different meshes.

    Raises PlanningError for a size below 1, and for a name that is no string or empty. The axis
    name ``mb`` is reserved for the virtual axis along which microbatches run in time, ``name`` for
    the mesh's own.
    """

    __slots__ = ("_axes", "_names", "_sizes", "name")
    name: str
    """"": it has none."""
    _axes: tuple[tuple[str, int], ...]
    _names: tuple[str, ...]  # these two are asked for all the time, so they are kept
    _sizes: dict[str, int]

    @overload
    def __init__(self, **axes: int) -> None: ...
    @overload
    def __init__(self, *, name: str, **axes: int) -> None: ...
    def __init__(self, *unnamed: object, name: str | int = "", **axes: int) -> None:
        if unnamed:
            given = ", ".join(map(repr, unnamed))
            sizes = [size for size in unnamed if type(size) is int]
            named = ", ".join(
                f"{axis}={size}" for axis, size in zip(("pp", "dp", "tp")[-len(sizes) :], sizes)
            )
            raise PlanningError(
                f"Mesh({given}): each axis of a mesh has a name\n"
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

    def _set(self, axes: tuple[tuple[str, int], ...], own: str) -> None:
        for name, size in axes:
            if type(size) is not int or size < 1:
                wanted = int(size) if isinstance(size, str) and size.isdecimal() else 1
                raise PlanningError(
                    f"axis {name!r} has size {size!r}; a size is an int >= 1\n"
                    f"fix: dt.Mesh({name}={max(wanted, 1)})"
                )
        object.__setattr__(self, "name", own)
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_names", tuple(name for name, _ in axes))
        object.__setattr__(self, "_sizes", dict(axes))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh is a value and cannot be changed")

    def __reduce__(self) -> tuple[object, ...]:
        return (mesh_of, (self._axes, self.name))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names, in order: the last varies fastest among neighbouring ranks."""
        return self._names

    @property
    def shape(self) -> dict[str, int]:
        """Axis to size."""
        return dict(self._axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self._axes)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along the axis; PlanningError for one that it lacks."""
        if axis in self._sizes:
            return self._sizes[axis]
        raise PlanningError(f"{self} has no axis {axis!r}; its axes are {', '.join(self.axes)}")

    def index(self, axis: str) -> int:
        """The position of the axis in the mesh."""
        self.axis_size(axis)
        return self.axes.index(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is: axis to position. PlanningError for a rank that it lacks."""
        if not 0 <= rank < self.size:
            raise PlanningError(f"rank {rank} is not in {self}, which has ranks 0..{self.size - 1}")
        result: dict[str, int] = {}
        for name, size in reversed(self._axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position of each axis; the inverse of `coordinates`."""
        rank = 0
        for name, size in self._axes:
            rank = rank * size + coordinates[name]
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axis`` alone, in order, itself included."""
        here = self.coordinates(rank)
        return tuple(self.rank({**here, axis: i}) for i in range(self.axis_size(axis)))

    def extended(self, axis: str, size: int) -> Mesh:
        """The mesh with one more (innermost) axis; the microbatch axis enters here."""
        return mesh_of((*self._axes, (axis, size)), self.name)

    def without(self, axis: str) -> Mesh:
        """The mesh of all axes but ``axis``."""
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
    """PlanningError for what is no mesh."""
    check_kind("the mesh", value, Mesh, "a Mesh", "dt.Mesh(tp=2)")


def mesh_of(axes: tuple[tuple[str, int], ...], name: str = "") -> Mesh:
    """A mesh from (axis, size) pairs; unlike the constructor, any axis is allowed."""
    mesh = object.__new__(Mesh)
    Mesh._set(mesh, axes, name)  # pyright: ignore[reportPrivateUsage]
    return mesh
