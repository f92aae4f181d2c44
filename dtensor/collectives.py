"""What every layer agrees on about collectives: who gives what to whom, and what that takes in a
ring. The planner prices with it, the verifier and the transports of daft take it for what they do.

    COLLECTIVES["all_reduce"].bytes_sent(2**20, 4)      # of four values of 1 MiB: 1.5 MiB
    COLLECTIVES["all_to_all"].given(("a", "b"), 1)      # ("b",): what member 1 gets of these inputs

Invariants: a kind is an entry here; a group's order is that of its members, of inputs and outputs
for each of them, and of the fold. It imports nothing. Not here: what moves between placements are
(sharding/redistribute/moves.py), and what a rank does before and after (runtime/lower/moves.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """``steps``: messages one after the other, among so many members; ``bytes_sent``: by each of so
    many, each of which gives so many bytes.

    ``reduces``: what a member gets is the fold of what all give it; else all of that, as it is.
    ``divided``: a member gives an input to each; else all its inputs to everyone, so that all get
    the same. ``bucket``: any number of inputs. ``rooted``: the first member alone gives.
    """

    steps: Callable[[int], int]
    bytes_sent: Callable[[int, int], int]
    reduces: bool = False
    divided: bool = False
    bucket: bool = False
    rooted: bool = False

    def takes(self, num_inputs: int, at: int, size: int) -> bool:
        """Whether member ``at`` of ``size`` may give so many inputs."""
        if self.bucket:
            return num_inputs > 0
        return num_inputs == (size if self.divided else at == 0 if self.rooted else 1)

    def given(self, inputs: Sequence[T], to: int) -> Sequence[T]:
        """Which of a member's inputs go to member ``to``."""
        return inputs[to : to + 1] if self.divided else inputs

    def got(self, inputs: Sequence[T], outputs: Sequence[T], at: int, of: int) -> Sequence[T]:
        """What member ``at`` gets of member ``of``, each piece as the like of it that ``at`` has
        declared: what it gives itself, where that is folded with it."""
        if self.reduces:
            return self.given(inputs, at)
        if self.rooted:
            return outputs if of == 0 else ()
        return outputs[of : of + 1]


COLLECTIVES: dict[str, CollectiveKind] = {
    "all_reduce": CollectiveKind(
        steps=lambda num: 2 * (num - 1),
        bytes_sent=lambda nbytes, num: -(-2 * nbytes * (num - 1) // num),
        reduces=True,
        bucket=True,
    ),
    "all_gather": CollectiveKind(
        steps=lambda num: num - 1,
        bytes_sent=lambda nbytes, num: nbytes * (num - 1),
    ),
    "reduce_scatter": CollectiveKind(
        steps=lambda num: num - 1,
        bytes_sent=lambda nbytes, num: -(-nbytes * (num - 1) // num),
        reduces=True,
        divided=True,
    ),
    "all_to_all": CollectiveKind(
        steps=lambda num: num - 1,
        bytes_sent=lambda nbytes, num: -(-nbytes * (num - 1) // num),
        divided=True,
    ),
    "broadcast": CollectiveKind(
        steps=lambda num: num - 1,
        bytes_sent=lambda nbytes, num: nbytes,
        rooted=True,
    ),
}
"""By name."""
