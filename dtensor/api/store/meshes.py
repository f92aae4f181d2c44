"""The meshes of a launch: which of its ranks are those of each, and how messages list them.

    train, play = Mesh(dp=2), Mesh(tp=2, name="play")
    ranks_of_meshes((train, play), None)               # {train: (0, 1), play: (2, 3)}
    ranks_of_meshes((train, play), {play: (1, 0)})     # {train: (0, 1), play: (1, 0)}: shared

Invariant: the ranks are distinct in each mesh, and those of all together are 0, 1, ... without a
gap. Not here: what of a mesh is on its ranks (session.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from dtensor.daft import Backend
from dtensor.errors import PlanningError, check_kind
from dtensor.sharding.spec.mesh import Mesh, check_mesh

_FIX = "ranks={play: (0, 1)}: mesh to numbers of ranks of the launch"


def by_position(
    given: Sequence[Mesh | str], backend: Backend, device: str
) -> tuple[tuple[Mesh, ...], Backend, str]:
    """The meshes that `launch` is given, and the backend and the device that may stand after them.

    PlanningError for what is neither.
    """
    meshes = tuple(takewhile(lambda one: isinstance(one, Mesh), given))
    rest = given[len(meshes) :]
    if not meshes or (rest and not isinstance(rest[0], str)):
        check_mesh(rest[0] if rest else None)
    if len(rest) > 2 or not all(isinstance(one, str) for one in rest):
        raise PlanningError(
            f"launch takes meshes, then a backend and a device at most; after {meshes[-1]!r} come "
            f"{', '.join(map(repr, rest))}.\n"
            f'fix: dt.launch(train, play, backend="ray", device="cpu")'
        )
    return cast(Any, (meshes, *rest, *(backend, device)[len(rest) :]))


def listed(places: Mapping[Mesh, tuple[int, ...]]) -> str:
    """Meshes and their ranks, as a message has them."""
    texts = [f"{mesh} on ranks {_numbers(ranks)}" for mesh, ranks in places.items()]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def not_launched(mesh: Mesh, places: Mapping[Mesh, tuple[int, ...]]) -> PlanningError:
    """For a program for a mesh that the running launch does not have."""
    if len(places) == 1:
        return PlanningError(
            f"the running launch is on {next(iter(places))}, this program is for {mesh}; "
            f"fix: dt.launch({mesh!r}), or leave the launch first"
        )
    return PlanningError(
        f"this program is for {mesh}, and the running launch has {listed(places)}.\n"
        f"fix: dt.launch({', '.join(map(repr, (*places, mesh)))}), or use one of its meshes"
    )


def ranks_of_meshes(
    meshes: Sequence[Mesh], stated: Mapping[Mesh, Sequence[int]] | None
) -> dict[Mesh, tuple[int, ...]]:
    """Mesh to the launch's numbers of its ranks, in its order. One that is not stated gets those
    after all ranks of the meshes before it.

    PlanningError for a mesh that is there twice, or that is stated and not there; for ranks that
    are not those of a mesh; for a rank of no mesh.
    """
    check_kind("ranks", stated, Mapping | None, "a dict", _FIX)
    wanted = dict(stated or {})
    for mesh in meshes:
        if meshes.count(mesh) > 1:
            axes = "".join(f"{axis}={size}, " for axis, size in mesh.shape.items())
            raise PlanningError(
                f"the launch has {mesh} twice: equal meshes are one mesh.\n"
                f'fix: name= for one of them, as in dt.Mesh({axes}name="play")'
            )
    for mesh in wanted:
        check_mesh(mesh)
        if mesh not in meshes:
            raise PlanningError(
                f"ranks= states those of {mesh}, and the launch has "
                f"{', '.join(map(str, meshes))}.\n"
                f"fix: dt.launch({', '.join(map(repr, (*meshes, mesh)))}, ranks=...)"
            )
    places: dict[Mesh, tuple[int, ...]] = {}
    end = 0
    for mesh in meshes:
        numbers = tuple(range(end, end + mesh.size))
        if mesh in wanted:
            numbers = _checked(mesh, wanted[mesh])
        places[mesh] = numbers
        end = max(end, *(rank + 1 for rank in numbers))
    free = sorted(set(range(end)).difference(*places.values()))
    if free:
        raise PlanningError(
            f"ranks= leaves {_named(free)} of the launch without a mesh: the highest that is "
            f"stated is {end - 1}.\n"
            f"fix: number the ranks of the launch from 0, without a gap"
        )
    return places


def _checked(mesh: Mesh, ranks: object) -> tuple[int, ...]:
    fix = f"ranks={{{mesh!r}: {tuple(range(mesh.size))}}}"
    check_kind(f"ranks= of {mesh}", ranks, list | tuple | range, "a list of ranks", fix)
    assert isinstance(ranks, list | tuple | range)
    stated: tuple[object, ...] = tuple(ranks)  # pyright: ignore[reportUnknownArgumentType]
    numbers = tuple(rank for rank in stated if type(rank) is int and rank >= 0)
    if (
        len(numbers) != len(stated)
        or len(numbers) != mesh.size
        or len(set(numbers)) != len(numbers)
    ):
        raise PlanningError(
            f"ranks= states {list(stated)} for {mesh}, which has {mesh.size} ranks.\n"
            f"fix: {mesh.size} different numbers of ranks, as in {fix}"
        )
    return numbers


def _numbers(ranks: Sequence[int]) -> str:
    """0..3, or 2, 0."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
