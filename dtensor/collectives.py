"""Facts about collectives that every layer shares: their members' inputs and outputs, and their
messages. The planner's prices and daft's verifier and transports use them.

    COLLECTIVES["all_reduce"].bytes_sent(2**20, 4)      # of four values of 1 MiB: 1.5 MiB
    COLLECTIVES["all_to_all"].given(("a", "b"), 1)      # ("b",): member 1's part of these inputs

Invariants: a kind is an entry here; a group's order is that of its members, of inputs and outputs
for each of them, and of the fold. It imports nothing. Not here: moves between placements
(sharding/redistribute/moves.py), and a rank's work before and after (runtime/lower/moves.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """``exchanges``: how many successive exchanges `num` members need, in each of which a member
    sends to all others at once and receives from them; ``bytes_sent``: by each of `num` members,
    for inputs of `nbytes`.

    ``reduces``: a member gets the fold of all inputs; else all of them, unchanged. ``divided``: a
    member gives a different input to each; else all its inputs to all members, so that all get the
    same. ``bucket``: any number of inputs. ``rooted``: only the first member has inputs.
    """

    exchanges: Callable[[int], int]
    bytes_sent: Callable[[int, int], int]
    reduces: bool = False
    divided: bool = False
    bucket: bool = False
    rooted: bool = False

    def launches(self, num: int) -> int:
        """Return how many ops the host of one of `num` members launches: one for each peer in an
        exchange (its send, receive and addition), and one for the start and the wait."""
        return 1 + self.exchanges(num) * (num - 1)

    def takes(self, num_inputs: int, at: int, size: int) -> bool:
        """Whether member ``at`` of ``size`` may give so many inputs."""
        if self.bucket:
            return num_inputs > 0
        return num_inputs == (size if self.divided else at == 0 if self.rooted else 1)

    def given(self, inputs: Sequence[T], to: int) -> Sequence[T]:
        """The inputs of a member that are for member ``to``."""
        return inputs[to : to + 1] if self.divided else inputs

    def got(self, inputs: Sequence[T], outputs: Sequence[T], at: int, of: int) -> Sequence[T]:
        """The pieces that member ``at`` gets from member ``of``, each as the buffer that ``at`` has
        declared for it: its own input, if that is folded with the piece."""
        if self.reduces:
            return self.given(inputs, at)
        if self.rooted:
            return outputs if of == 0 else ()
        return outputs[of : of + 1]


SMALL_ALL_REDUCE = 1 << 16
"""Bytes up to which an all_reduce is one exchange: each member sends its whole input to each other.
A larger one among more than two members is two: pieces to their owners, then the sums of pieces."""

COLLECTIVES: dict[str, CollectiveKind] = {
    "all_reduce": CollectiveKind(
        exchanges=lambda num: 1 if num == 2 else 2,
        bytes_sent=lambda nbytes, num: -(-2 * nbytes * (num - 1) // num),
        reduces=True,
        bucket=True,
    ),
    "all_gather": CollectiveKind(
        exchanges=lambda num: 1,
        bytes_sent=lambda nbytes, num: nbytes * (num - 1),
    ),
    "reduce_scatter": CollectiveKind(
        exchanges=lambda num: 1,
        bytes_sent=lambda nbytes, num: -(-nbytes * (num - 1) // num),
        reduces=True,
        divided=True,
    ),
    "all_to_all": CollectiveKind(
        exchanges=lambda num: 1,
        bytes_sent=lambda nbytes, num: -(-nbytes * (num - 1) // num),
        divided=True,
    ),
    "broadcast": CollectiveKind(
        exchanges=lambda num: 1,
        bytes_sent=lambda nbytes, num: nbytes,
        rooted=True,
    ),
}
"""Kinds of collectives by name."""
