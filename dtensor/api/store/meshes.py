"""The ranks of each mesh of a launch, and the text in which messages list them.

    train, play = Mesh(dp=2), Mesh(tp=2, name="play")
    ranks_of_meshes((train, play), None)               # {train: (0, 1), play: (2, 3)}
    ranks_of_meshes((train, play), {play: (1, 0)})     # {train: (0, 1), play: (1, 0)}: shared

Invariant: the ranks of one mesh are distinct; the ranks of all meshes are 0, 1, ... without a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from dtensor.daft import Backend
from dtensor.errors import PlanningError, check_kind
from dtensor.sharding.spec.mesh import Mesh, check_mesh

_FIX = "ranks={play: (0, 1)}: mesh to numbers of ranks of the launch"


def split_positional(
    arguments: Sequence[Mesh | str], backend: Backend, device: str
) -> tuple[tuple[Mesh, ...], Backend, str]:
    """Split the positional arguments of `launch` into the meshes, the backend and the device; the
    last two may be missing. Raises PlanningError for other arguments."""
    meshes = tuple(takewhile(lambda argument: isinstance(argument, Mesh), arguments))
    words = arguments[len(meshes) :]
    if not meshes or (words and not isinstance(words[0], str)):
        check_mesh(words[0] if words else None)
    if len(words) > 2 or not all(isinstance(word, str) for word in words):
        raise PlanningError(
            f"launch takes meshes, then a backend and a device at most; after {meshes[-1]!r} come "
            f"{', '.join(map(repr, words))}.\n"
            f'fix: dt.launch(train, play, backend="ray", device="cpu")'
        )
    return cast(Any, (meshes, *words, *(backend, device)[len(words) :]))


def meshes_text(places: Mapping[Mesh, tuple[int, ...]]) -> str:
    """Return the text of a message that lists meshes and their ranks."""
    texts = [f"{mesh} on ranks {_ranks_text(ranks)}" for mesh, ranks in places.items()]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def not_launched(mesh: Mesh, places: Mapping[Mesh, tuple[int, ...]]) -> PlanningError:
    """Return the error for a program whose mesh is not in the running launch."""
    if len(places) == 1:
        return PlanningError(
            f"the running launch is on {next(iter(places))}, this program is for {mesh}; "
            f"fix: dt.launch({mesh!r}), or leave the launch first"
        )
    return PlanningError(
        f"this program is for {mesh}, and the running launch has {meshes_text(places)}.\n"
        f"fix: dt.launch({', '.join(map(repr, (*places, mesh)))}), or use one of its meshes"
    )


def ranks_of_meshes(
    meshes: Sequence[Mesh], stated: Mapping[Mesh, Sequence[int]] | None
) -> dict[Mesh, tuple[int, ...]]:
    """Return the launch's rank numbers of each mesh, in the mesh's order. A mesh that is not in
    ``stated`` gets the numbers after all ranks of the meshes before it.

    Raises PlanningError if a mesh occurs twice, if a stated mesh is not in ``meshes``, if the
    stated ranks do not fit their mesh, or if a rank belongs to no mesh.
    """
    check_kind("ranks", stated, Mapping | None, "a dict", _FIX)
    stated = dict(stated or {})
    for mesh in meshes:
        if meshes.count(mesh) > 1:
            axes = "".join(f"{axis}={size}, " for axis, size in mesh.shape.items())
            raise PlanningError(
                f"the launch has {mesh} twice: equal meshes are one mesh.\n"
                f'fix: name= for one of them, as in dt.Mesh({axes}name="play")'
            )
    for mesh in stated:
        check_mesh(mesh)
        if mesh not in meshes:
            raise PlanningError(
                f"ranks= names {mesh}, which is not a mesh of this launch "
                f"({', '.join(map(str, meshes))}).\n"
                f"fix: dt.launch({', '.join(map(repr, (*meshes, mesh)))}, ranks=...)"
            )
    places: dict[Mesh, tuple[int, ...]] = {}
    end = 0
    for mesh in meshes:
        numbers = tuple(range(end, end + mesh.size))
        if mesh in stated:
            numbers = _check_ranks(mesh, stated[mesh])
        places[mesh] = numbers
        end = max(end, *(rank + 1 for rank in numbers))
    free = sorted(set(range(end)).difference(*places.values()))
    if free:
        raise PlanningError(
            f"ranks= leaves {_named_ranks(free)} of the launch without a mesh: the highest that is "
            f"stated is {end - 1}.\n"
            f"fix: number the ranks of the launch from 0, without a gap"
        )
    return places


def _check_ranks(mesh: Mesh, ranks: object) -> tuple[int, ...]:
    """Return the stated ranks of a mesh. Raises PlanningError if they do not fit it."""
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


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: "0..3" if they are consecutive, else "2, 0"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _named_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
