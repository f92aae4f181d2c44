"""Which keys share a communicator of NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Buffer, Collective, Instruction, Recv, Send
from dtensor.daft.ir.program import Program, RankProgram
from dtensor.daft.ray.transports.communicators import MAX_COMMUNICATORS, Communicators
from dtensor.daft.ray.transports.connect import check_routes

X = Buffer((2,), torch.float32)


def program(*lists: Sequence[Instruction]) -> Program:
    ranks = tuple(RankProgram(instructions=tuple(each)) for each in lists)
    return Program(name="p", ranks=ranks, functions=(), stage_of=(0,) * len(ranks))


def sends(to: int, channels: str) -> list[Instruction]:
    return [Send("x", to, channel, X) for channel in channels]


def recvs(source: int, channels: str) -> list[Instruction]:
    return [Recv("y", source, channel, X) for channel in channels]


def reduces(group: tuple[int, ...], channels: str) -> list[Instruction]:
    return [Collective("all_reduce", group, ("x",), ("y",), (X,), (X,), "sum", c) for c in channels]


def numbers(shared: Communicators, loaded: Program) -> list[str]:
    """Channels by communicator, of all programs so far."""
    host_of = tuple(range(loaded.size))
    shared.number(loaded, check_routes(loaded, host_of), host_of)
    by: dict[int, str] = {}
    for (_, channel, _), number in sorted(shared.of.items()):
        by[number] = by.get(number, "") + channel
    return sorted(by.values())


def test_messages_in_one_order_share() -> None:
    loaded = program(
        sends(1, "aba") + recvs(1, "c") + reduces((0, 1), "de"),
        recvs(0, "aba") + sends(0, "c") + reduces((0, 1), "de"),
    )
    assert numbers(Communicators(), loaded) == ["ab", "c", "de"]


def test_messages_in_other_orders_do_not() -> None:
    loaded = program(sends(1, "ab"), recvs(0, "ba"))
    assert numbers(Communicators(), loaded) == ["a", "b"]
    three = [reduces((0, 1, 2), "ab"), reduces((0, 1, 2), "ab"), reduces((0, 1, 2), "ba")]
    assert numbers(Communicators(), program(*three)) == ["a", "b"]


def test_a_later_program_moves_what_it_orders_otherwise() -> None:
    shared = Communicators()
    assert numbers(shared, program(sends(1, "ab"), recvs(0, "ab"))) == ["ab"]
    assert numbers(shared, program(sends(1, "bc"), recvs(0, "bc"))) == ["abc"]
    before = dict(shared.of)
    assert numbers(shared, program(sends(1, "ab"), recvs(0, "ba"))) == ["ac", "b"]
    assert {key[1] for key, number in shared.of.items() if before[key] != number} == {"b"}
    assert numbers(shared, program(sends(1, "abc"), recvs(0, "abc"))) == ["ac", "b"]


def test_too_many_are_refused_and_change_nothing() -> None:
    shared = Communicators()
    forth = "".join(chr(ord("A") + n) for n in range(MAX_COMMUNICATORS + 1))
    back = forth[::-1]
    with pytest.raises(ProgramError, match=f"need {MAX_COMMUNICATORS + 1} NCCL communicators"):
        numbers(shared, program(sends(1, forth), recvs(0, back)))
    assert shared.of == {}
    assert len(numbers(shared, program(sends(1, forth[1:]), recvs(0, back[:-1])))) == len(forth) - 1


def test_side_streams_count() -> None:
    """An all_reduce in two halves has a stream of its own beside its communicator's."""
    large = Buffer((1 << 16,), torch.float32)
    group, channels = (0, 1, 2), "".join(chr(ord("A") + n) for n in range(16))
    lists = [
        [Collective("all_reduce", group, ("x",), ("y",), (large,), (large,), "sum", c) for c in own]
        for own in (channels, channels[::-1], channels)
    ]
    with pytest.raises(ProgramError, match="need 16 NCCL communicators on actor 0, with 32 stream"):
        numbers(Communicators(), program(*lists))
    assert len(numbers(Communicators(), program(*[own[1:-1] for own in lists]))) == 14
