"""The statement ``attention=`` and the choice of a strategy for attention over a split sequence.

    checked_attention({"cp": "ring"}, Mesh(cp=4), None)       # (("cp", "ring"),)
    str(AttentionChoice("cp", "ring", 0.0021, 2**30, ...))

An axis splits a sequence if the queries or keys of an attention op arrive split over it on their
dim of tokens. choose/sequence_axes.py plans the strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtensor.errors import PlanningError, check_word
from dtensor.sharding.spec.mesh import Mesh

Attention = tuple[tuple[str, str], ...]
"""The stated strategy of each axis, as (axis, word)."""
STRATEGIES = ("heads", "gather", "ring")
"""The words of the strategies: exchange to split heads; gather keys; pass chunks of keys on."""
HEADS, TOKENS = 1, 2
"""The dims of heads and of tokens of q, k, v, of the output and of their gradients."""
WORDS = (*STRATEGIES, "auto")


@dataclass(frozen=True, slots=True)
class Alternative:
    """The prediction for one strategy, or one level of ZeRO: seconds and bytes of memory of a step
    on a rank, or the reason why the strategy does not apply."""

    word: str
    seconds: float = 0.0
    memory: int = 0
    refused: str = ""
    again: bool = False  # whether the backward gathers keys again


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The strategy of attention on an axis that splits the sequence.

    ``stated``: whether the user stated the word. ``gathers_again``: whether the backward gathers
    keys again, so that the gathered keys of the forward are freed. ``alternatives``: the
    predictions for all strategies, if "auto" compared them.
    """

    axis: str
    word: str
    stated: bool
    gathers_again: bool = False
    alternatives: tuple[Alternative, ...] = ()


def checked_attention(
    attention: Mapping[str, str] | None, mesh: Mesh, stage_axis: str | None
) -> Attention:
    """Return the words of ``attention=``. Raises PlanningError for an unknown word or axis."""
    if not isinstance(attention, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        axis = next((a for a in mesh.axes if a != stage_axis), "cp")
        raise PlanningError(
            f"attention={attention!r} is not a mapping of an axis to a word; "
            f'fix: attention={{"{axis}": "auto"}}'
        )
    for axis, word in (attention or {}).items():
        mesh.axis_size(axis)
        check_word(f"attention[{axis!r}]", word, WORDS)
        if axis == stage_axis:
            raise PlanningError(
                f"attention={dict(attention or {})}: the axis {axis!r} holds the pipeline's stages "
                f"and splits no sequence; fix: leave {axis!r} out of attention="
            )
    return tuple((attention or {}).items())
