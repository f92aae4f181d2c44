"""Compares the verifier with brute force: every interleaving of every small program.

    python -m tests.daft.explore                  # exhaustive, then 100,000 random programs
    python -m tests.daft.explore --pairs          # or --sequences, --undo, --slots, --sized, ...

A program is a list of operations (sends, or collectives of a group) and, for each rank, an order
of its starts and waits. `can_hang` explores all reachable states: an operation completes when it
heads the queue of its channel on all members (rendezvous); a buffered send completes when it
heads its own queue. The verifier has no queues and follows one order; both must agree on every
program.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dtensor.daft import (
    Buffer,
    Collective,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    Wait,
    verify,
)
from tests.daft.programs import program

B = Buffer((2,), torch.float32)
SHIFTS = "s"
"""The channel of shifts: a queue has operations of one kind. A shift has at most three members:
with more, a wait over NCCL needs fewer starts than the verifier assumes."""


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A send (two members, from the first to the second), or a sum ("reduce") or a shift of its
    members."""

    kind: str
    members: tuple[int, ...]
    channel: str


# (is it the wait?, number of the transfer)
Event = tuple[bool, int]
Order = tuple[Event, ...]
Made = tuple[tuple[Transfer, ...], tuple[Order, ...]]


def built(transfers: Sequence[Transfer], orders: Sequence[Order]) -> Program:
    """Return the program in which each rank starts and waits for its transfers in its order."""
    lists: list[list[Instruction]] = []
    for rank, order in enumerate(orders):
        items: list[Instruction] = []
        for waits, number in order:
            own = transfers[number]
            sends = own.kind == "send" and own.members[0] == rank
            if waits:
                items.append(Wait((f"x{number}" if sends else f"v{number}",)))
            elif sends:
                items.append(Send(f"x{number}", own.members[1], own.channel, B))
            elif own.kind == "send":
                items.append(Recv(f"v{number}", own.members[0], own.channel, B))
            else:
                items.append(collective(own, "x", f"v{number}"))
        lists.append(items)
    made = [
        tuple(
            f"v{n}"
            for n, t in enumerate(transfers)
            if rank in t.members and not (t.kind == "send" and t.members[0] == rank)
        )
        for rank in range(len(orders))
    ]
    fed = ("x", *(f"x{n}" for n in range(len(transfers))))
    return program(*lists, inputs=[fed] * len(orders), outputs=made)


def collective(own: Transfer, given: str, made: str, buffer: Buffer = B) -> Collective:
    words = own.members, (given,), (made,), (buffer,), (buffer,)
    if own.kind == "shift":
        return Collective("shift", *words, None, own.channel, distance=1)
    return Collective("all_reduce", *words, "sum", own.channel)


def can_hang(transfers: Sequence[Transfer], orders: Sequence[Order], buffered: bool) -> bool:
    """Return whether some reachable state is stuck before the end. The k-th send on a channel
    meets the k-th receive whatever their names, so a transfer is identified by (channel, k), not
    by the number that an order uses."""
    # by rank, the queues that its starts join, in order: (key, place in it)
    places: list[dict[int, tuple[object, int]]] = []
    for order in orders:
        count: Counter[object] = Counter()
        found: dict[int, tuple[object, int]] = {}
        for waits, number in order:
            if not waits:
                own = transfers[number]
                key = (own.kind, own.members, own.channel)
                found[number] = key, count[key]
                count[key] += 1
        places.append(found)

    def started(rank: int, at: int, key: object) -> int:
        return sum(not w and places[rank][n][0] == key for w, n in orders[rank][:at])

    keys = sorted({(t.kind, t.members, t.channel) for t in transfers})
    number_of = {key: i for i, key in enumerate(keys)}
    # a state: how far each rank is, and by queue how many of its transfers have completed; of
    # buffered sends the sender's own count is apart
    start = ((0,) * len(orders), (0,) * len(keys), (0,) * len(keys))
    seen, front = {start}, [start]
    while front:
        at, done, sent = front.pop()
        following = []
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            waits, number = order[at[rank]]
            if waits:
                key, place = places[rank][number]
                which = number_of[key]  # type: ignore[index]
                is_sender = (
                    transfers[number].kind == "send" and transfers[number].members[0] == rank
                )
                if (sent if buffered and is_sender else done)[which] <= place:
                    continue
            following.append((_up(at, rank), done, sent))
        for which, key in enumerate(keys):
            kind, members, _ = key
            if (
                buffered
                and kind == "send"
                and started(members[0], at[members[0]], key) > sent[which]
            ):
                following.append((at, done, _up(sent, which)))
            ready = all(started(r, at[r], key) > done[which] for r in members)
            if ready and (not buffered or kind != "send" or sent[which] > done[which]):
                following.append((at, _up(done, which), sent))
        if not following and any(n < len(o) for n, o in zip(at, orders, strict=True)):
            return True
        for state in following:
            if state not in seen:
                seen.add(state)
                front.append(state)
    return False


def _up(counts: tuple[int, ...], which: int) -> tuple[int, ...]:
    return (*counts[:which], counts[which] + 1, *counts[which + 1 :])


def disagreement(transfers: Sequence[Transfer], orders: Sequence[Order]) -> str | None:
    """Describe how the verifier's answer for this program is wrong; None if it is right."""
    hangs = can_hang(transfers, orders, buffered=False)
    if not hangs and can_hang(transfers, orders, buffered=True):
        return "hangs with buffers alone"
    try:
        verify(built(transfers, orders))
    except ProgramError as error:
        if "can hang" not in str(error):
            return f"refused otherwise: {error}"
        return None if hangs else "refused, and cannot hang"
    return "accepted, and can hang" if hangs else None


def exhaustive(ranks: int, count: int, channels: str = "c") -> Iterator[Made]:
    """Yield every program of ``count`` transfers on ``ranks`` ranks, up to renumbering of
    transfers."""
    groups = [g for size in range(2, ranks + 1) for g in itertools.combinations(range(ranks), size)]
    kinds = [
        *(
            Transfer("send", p, c)
            for p in itertools.permutations(range(ranks), 2)
            for c in channels
        ),
        *(Transfer("reduce", g, c) for g in groups for c in channels),
        *(Transfer("shift", g, SHIFTS) for g in groups if len(g) < 4),
    ]
    for transfers in itertools.combinations_with_replacement(kinds, count):
        if {r for t in transfers for r in t.members} != set(range(ranks)):
            continue  # a program of fewer ranks
        own = [[n for n, t in enumerate(transfers) if r in t.members] for r in range(ranks)]
        for orders in itertools.product(*(tuple(_orders(tuple(numbers))) for numbers in own)):
            yield transfers, orders


def _orders(numbers: tuple[int, ...]) -> Iterator[Order]:
    """Return every order of starts and waits in which each wait follows its start."""
    events = [(waits, n) for n in numbers for waits in (False, True)]
    for order in itertools.permutations(events):
        at = {event: i for i, event in enumerate(order)}
        if all(at[False, n] < at[True, n] for n in numbers):
            yield order


def drawn(draw: random.Random) -> Made:
    """A random program of 2 to 4 ranks and up to 6 transfers."""
    ranks = draw.randint(2, 4)
    transfers = []
    for _ in range(draw.randint(1, 6)):
        if draw.random() < 0.6:
            transfers.append(
                Transfer("send", tuple(draw.sample(range(ranks), 2)), draw.choice("cd"))
            )
        else:
            group = tuple(sorted(draw.sample(range(ranks), draw.randint(2, ranks))))
            shifts = len(group) < 4 and draw.random() < 0.4
            kind, channels = ("shift", SHIFTS) if shifts else ("reduce", "cd")
            transfers.append(Transfer(kind, group, draw.choice(channels)))
    tidy = draw.random()  # random orders of all ranks nearly always hang: mostly one order for all
    common = list(range(len(transfers)))
    orders: list[Order] = []
    for rank in range(ranks):
        numbers = [n for n in common if rank in transfers[n].members]
        while numbers and draw.random() > tidy:
            i, j = draw.randrange(len(numbers)), draw.randrange(len(numbers))
            numbers[i], numbers[j] = numbers[j], numbers[i]
        order: list[Event] = []
        waiting: list[int] = []
        for n in numbers:
            order.append((False, n))
            waiting.append(n)
            while waiting and draw.random() < 0.4:
                order.append((True, waiting.pop(draw.randrange(len(waiting)))))
        draw.shuffle(waiting)
        orders.append((*order, *((True, n) for n in waiting)))
    return tuple(transfers), tuple(orders)


OTHERS = {
    "pairs": ("pairs", 5_000),
    "sequences": ("sequences", 100_000),
    "undo": ("undo", 1_000),
    "slots": ("slots", 2_000),
    "sized": ("sized", 1_000),
    "tasks": ("task_programs", 200),
    "gpus": ("gpu_programs", 300),
}
"""By option: the module whose `report` explores, and how many random programs it draws."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.daft.explore", description=__doc__)
    parser.add_argument("--random", type=int)
    parser.add_argument("--seed", type=int, default=0)
    for option in OTHERS:
        parser.add_argument(f"--{option}", action="store_const", const=option, dest="other")
    options = parser.parse_args(argv)
    if options.other:
        name, number = OTHERS[options.other]
        report = importlib.import_module(f"tests.daft.{name}").report  # imports this file
        return report(number if options.random is None else options.random, options.seed)
    number_drawn = 100_000 if options.random is None else options.random
    wrong = 0
    for ranks, count, channels in (
        (2, 1, "cd"),
        (2, 2, "cd"),
        (2, 3, "c"),
        (3, 2, "c"),
        (4, 2, "c"),
    ):
        began, number, hanging = time.monotonic(), 0, 0
        for transfers, orders in exhaustive(ranks, count, channels):
            number += 1
            hanging += can_hang(transfers, orders, buffered=False)
            wrong += _report(transfers, orders)
        seconds = time.monotonic() - began
        print(
            f"{ranks} ranks, {count} transfers on {len(channels)} channels: {number} programs, "
            f"{hanging} of them can hang, {wrong} disagreements so far ({seconds:.0f} s)",
            flush=True,
        )
    draw = random.Random(options.seed)
    hanging = 0
    for _ in range(number_drawn):
        transfers, orders = drawn(draw)
        hanging += can_hang(transfers, orders, buffered=False)
        wrong += _report(transfers, orders)
    print(
        f"{number_drawn} random programs, seed {options.seed}: {hanging} can hang, "
        f"{wrong} disagreements in all"
    )
    return int(bool(wrong))


def _report(transfers: Sequence[Transfer], orders: Sequence[Order]) -> int:
    problem = disagreement(transfers, orders)
    if problem:
        print(problem, transfers, orders, sep="\n  ")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
