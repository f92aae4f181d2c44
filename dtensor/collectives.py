"""The kinds of collectives: inputs, outputs and messages of their members.

    COLLECTIVES["all_reduce"].bytes_sent(2**20, 4)      # 1.5 MiB by each of 4 members, of 1 MiB
    COLLECTIVES["all_to_all"].given(("a", "b"), 1)      # ("b",): the input that member 1 receives

The planner's prices and daft's verifier and transports use these facts. The order of a group is the
order of its members, of the inputs and outputs for each member, and of the fold. This file imports
nothing of dtensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """A kind of collective.

    Args:
        exchanges: the number of successive exchanges among `num` members. In an exchange, each
            member sends to all others at once and receives from them.
        bytes_sent: the bytes that each of `num` members sends for inputs of `nbytes`.
        reduces: a member receives the fold of all inputs, instead of the inputs unchanged.
        divided: a member has a different input for each member, instead of the same inputs for all.
        bucket: a member may have any number of inputs.
        rooted: only the first member has inputs.
        rotates: a member sends all its inputs to one member, at the distance that the collective
            states, and receives as many from another.
    """

    exchanges: Callable[[int], int]
    bytes_sent: Callable[[int, int], int]
    reduces: bool = False
    divided: bool = False
    bucket: bool = False
    rooted: bool = False
    rotates: bool = False

    def launches(self, num: int) -> int:
        """Return the number of ops that the host of one of `num` members launches: one for each
        peer of an exchange (send, receive and addition), and one for the start and the wait."""
        return 1 + self.exchanges(num) * (1 if self.rotates else num - 1)

    def takes(self, num_inputs: int, at: int, size: int) -> bool:
        """Return whether member ``at`` of ``size`` members may have this number of inputs."""
        if self.bucket:
            return num_inputs > 0
        return num_inputs == (size if self.divided else at == 0 if self.rooted else 1)

    def given(self, inputs: Sequence[T], to: int) -> Sequence[T]:
        """Return the part of a member's inputs that member ``to`` receives, if the kind does not
        rotate."""
        return inputs[to : to + 1] if self.divided else inputs

    def got(self, inputs: Sequence[T], outputs: Sequence[T], at: int, of: int) -> Sequence[T]:
        """Return the buffers of member ``at`` for the pieces that it receives from member ``of``.
        ``inputs``, ``outputs``: the buffers of member ``at``. In a reduction the result is part of
        its inputs, with which the pieces are folded."""
        if self.reduces:
            return self.given(inputs, at)
        if self.rooted:
            return outputs if of == 0 else ()
        return outputs[of : of + 1]


SMALL_ALL_REDUCE = 1 << 16
"""Bytes up to which an all_reduce is one exchange: each member sends its whole input to all others.
A larger all_reduce among more than two members takes two exchanges: first each piece is sent to its
owner, then the sum of each piece to all."""

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
    "shift": CollectiveKind(
        exchanges=lambda num: 1,
        bytes_sent=lambda nbytes, num: nbytes if num > 1 else 0,
        bucket=True,
        rotates=True,
    ),
}
"""Kinds of collectives by name."""
