"""Compares the slots of shared memory with brute force: every interleaving of what actors do with
them.

    python -m tests.daft.explore --slots          # exhaustive families, then 2,000 random programs

`wrong` explores all reachable states of the ranks with the numbers of `lay_out`. A start writes
its slot and notifies each partner; a wait continues after enough notifications and reads its
partners' slots. A collective of three or more is folded in two pieces, which waiting ranks claim.
Errors: ranks are stuck before the end, an unread slot or result is overwritten, a claim is not
taken, or a semaphore is left over. `Rules` states deliberate faults, so that a test can see that
the explorer finds them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dtensor.daft import Collective, Program, ProgramError, Recv, Send, Wait, verify
from dtensor.daft.ir.instructions import Key, key_of
from dtensor.daft.ray.transports.slots import Arena, lay_out
from dtensor.daft.verification.pairing import starts_of_waits
from tests.daft.explore import SHIFTS, Made, built, drawn, exhaustive
from tests.daft.programs import parts_of

PIECES = 2


@dataclass(frozen=True, slots=True)
class Rules:
    fewer_slots: int = 0
    senders_run_ahead: bool = False
    waits_for_readers: bool = False
    lent: bool = False
    kept_longer: bool = False


REAL = Rules()
LENT = Rules(lent=True)
"""What is received is read until the rank starts more with the key, or the run ends."""


@dataclass(frozen=True, slots=True)
class Op:
    """One atomic operation of a rank. `number`: of the start on its lane, over all runs; `needed`:
    how many starts of each partner a wait needs; `piece`: the piece of a claim or a fold."""

    kind: Literal["start", "take", "claim", "fold", "end", "acknowledged"]
    lane: int
    number: int
    needed: tuple[tuple[int, int], ...] = ()
    piece: int = 0


State: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""By rank, how many ops it has done and of how many pieces it must be told yet; by lane, slot and
piece, whether there is a claim; by lane, slot and member, of how many it was told."""


def laid_out(made: Program, shares: Callable[[Key], bool] = lambda key: True) -> Arena:
    """Return the arena that all hosts, with one rank each, lay out from their parts of the
    program."""
    ranks = range(made.size)
    found = [lay_out(own, ranks, shares) for own in parts_of(made, [(rank,) for rank in ranks])]
    first = found[0]
    assert all((a.lanes, a.window_bytes) == (first.lanes, first.window_bytes) for a in found)
    return replace(
        first,
        brings={site: brings for own in found for site, brings in own.brings.items()},
        ahead={site: ahead for own in found for site, ahead in own.ahead.items()},
    )


class Explored:
    """`runs`: the numbers of the programs that run one after the other on each rank; `together`:
    the lanes that are folded together."""

    def __init__(self, programs: Sequence[Program], runs: Sequence[int], rules: Rules) -> None:
        self.rules = rules
        ranks = range(programs[0].size)
        laid = [laid_out(each) for each in programs]
        self.lanes: list[tuple[int, Key]] = [
            (i, key) for i, each in enumerate(laid) for key in each.lanes
        ]
        self.members = [key[0] for _, key in self.lanes]
        self.together = [
            sort == "collective" and len(members) > 2 and channel != SHIFTS
            for _, (members, channel, sort) in self.lanes
        ]
        self.slots = [laid[i].lanes[key].slots - rules.fewer_slots for i, key in self.lanes]
        self.ops: list[list[Op]] = [[] for _ in ranks]
        # by rank, after how many of its ops: of how many starts it has told each other; which
        # starts, by lane and number, it has waited for and read
        self.told: list[list[Counter[int]]] = []
        self.read: list[list[frozenset[tuple[int, int]]]] = []
        for rank in ranks:
            counts: Counter[int] = Counter()  # starts that concern another rank
            numbers: Counter[int] = Counter()  # starts on a lane
            for run in runs:
                lanes = {key: i for i, (which, key) in enumerate(self.lanes) if which == run}
                self._append(programs[run], laid[run], rank, lanes, counts, numbers)
            self._look_back(rank)

    def _append(
        self,
        program: Program,
        arena: Arena,
        rank: int,
        lanes: Mapping[Key, int],
        counts: Counter[int],
        numbers: Counter[int],
    ) -> None:
        """Append the operations of one run."""
        instructions = program.ranks[rank].instructions
        waits = starts_of_waits(instructions)
        started: dict[int, tuple[int, int, tuple[tuple[int, int], ...]]] = {}
        lent: dict[int, list[Op]] = {}  # by lane: borrowed values that are still read
        ops = self.ops[rank]
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Wait):
                for start in waits[index]:
                    lane, number, needed = started[start]
                    sends = isinstance(instructions[start], Send)
                    if sends and self.rules.senders_run_ahead:
                        needed = ()
                    ops.append(Op("take", lane, number, needed))
                    if self.together[lane]:
                        for piece in range(PIECES):
                            ops.append(Op("claim", lane, number, piece=piece))
                            ops.append(Op("fold", lane, number, piece=piece))
                    receives = isinstance(instructions[start], Recv)
                    if receives and self.rules.lent:
                        lent.setdefault(lane, []).append(Op("end", lane, number))
                    else:
                        ops.append(Op("end", lane, number))
                    if self.rules.waits_for_readers:
                        ops.append(Op("acknowledged", lane, number))
            elif isinstance(instruction, Send | Recv | Collective):
                lane, site = lanes[key_of(rank, instruction)], (rank, index)
                needed = tuple(
                    (other, counts[other] + ahead) for other, ahead in arena.ahead[site].items()
                )
                started[index] = lane, numbers[lane], needed
                if not self.rules.kept_longer:
                    ops += lent.pop(lane, [])
                ops.append(Op("start", lane, numbers[lane]))
                ops += lent.pop(lane, [])
                numbers[lane] += 1
                for other, _ in needed:
                    counts[other] += 1
        ops += [op for own in lent.values() for op in own]

    def _look_back(self, rank: int) -> None:
        told: Counter[int] = Counter()
        read: frozenset[tuple[int, int]] = frozenset()
        all_told, all_read = [told], [read]
        for op in self.ops[rank]:
            if op.kind == "start":
                told = told + Counter(r for r in self.members[op.lane] if r != rank)
            elif op.kind == "end":
                read = read | {(op.lane, op.number)}
            all_told.append(told)
            all_read.append(read)
        self.told.append(all_told)
        self.read.append(all_read)

    def problem(self) -> str | None:
        """Describe what can go wrong; None if nothing can."""
        shared = [
            (lane, slot)
            for lane, slots in enumerate(self.slots)
            for slot in range(slots)
            if self.together[lane]
        ]
        pieces = [(*each, piece) for each in shared for piece in range(PIECES)]
        places = {each: n for n, each in enumerate(pieces)}
        members = [(*each, member) for each in shared for member in self.members[each[0]]]
        seats = {each: n for n, each in enumerate(members)}
        zeros = (0,) * len(self.ops)
        begin: State = (zeros, zeros, (0,) * len(places), (0,) * len(seats))
        seen, front = {begin}, [begin]
        while front:
            at, missing, claims, told = front.pop()
            moved = False
            for rank, position in enumerate(at):
                if position == len(self.ops[rank]):
                    continue
                op = self.ops[rank][position]
                lane, number = op.lane, op.number
                slot = number % self.slots[lane]
                to, now, offered, heard = position + 1, missing[rank], claims, told
                match op.kind:
                    case "start":
                        if self._unread(at, rank, lane, number):
                            return f"rank {rank} writes over what is being read: {op}"
                        if self.together[lane] and self.members[lane][0] == rank:
                            for i in range(PIECES):
                                place = places[lane, slot, i]
                                if offered[place]:
                                    return f"a claim that nobody took: {op}"
                                offered = _put(offered, place, 1)
                    case "take":
                        if any(
                            self.told[other][at[other]][rank] < count for other, count in op.needed
                        ):
                            continue
                    case "claim":
                        place = places[lane, slot, op.piece]
                        if offered[place]:
                            offered = _put(offered, place, 0)
                        else:
                            to, now = position + 2, now + 1
                    case "fold":
                        if self._unread(at, rank, lane, number):
                            return f"rank {rank} writes over a result: {op}"
                        for member in self.members[lane]:
                            if member != rank:
                                seat = seats[lane, slot, member]
                                heard = _put(heard, seat, heard[seat] + 1)
                    case "end":
                        if self.together[lane]:
                            seat = seats[lane, slot, rank]
                            if heard[seat] < now:
                                continue
                            if heard[seat] > now:
                                return f"rank {rank} was told of more than there is: {op}"
                            heard, now = _put(heard, seat, 0), 0
                    case "acknowledged":
                        if any(
                            (lane, number) not in self.read[other][at[other]]
                            for other in self.members[lane]
                        ):
                            continue
                moved = True
                state = _put(at, rank, to), _put(missing, rank, now), offered, heard
                if state not in seen:
                    seen.add(state)
                    front.append(state)
            if not moved and any(p < len(ops) for p, ops in zip(at, self.ops, strict=True)):
                return f"nobody can go on at {at}"
            if not moved and (any(claims) or any(told)):
                return "a semaphore is left over"
        return None

    def _unread(self, at: Sequence[int], rank: int, lane: int, number: int) -> bool:
        """Return whether some partner has not yet read the slot of this start."""
        last = number - self.slots[lane]
        return last >= 0 and any(
            (lane, last) not in self.read[other][at[other]]
            for other in self.members[lane]
            if other != rank and not self._never_reads(other, lane)
        )

    def _never_reads(self, rank: int, lane: int) -> bool:
        _, (members, _, sort) = self.lanes[lane]
        return sort == "transfer" and members[0] == rank


def _put(values: tuple[int, ...], which: int, value: int) -> tuple[int, ...]:
    return (*values[:which], value, *values[which + 1 :])


def wrong(programs: Sequence[Program], runs: Sequence[int], rules: Rules = REAL) -> str | None:
    """Describe what can go wrong with programs that the verifier accepts; None if nothing can."""
    return Explored(programs, runs, rules).problem()


def accepted(family: Iterable[Made]) -> Iterator[Program]:
    for transfers, orders in family:
        made = built(transfers, orders)
        try:
            verify(made)
        except ProgramError:
            continue
        yield made


def drawn_programs(draw: random.Random) -> Iterator[tuple[list[Program], list[int]]]:
    """One or two random programs on the same ranks, and an order of two or three runs of them."""
    while True:
        found = [made for made in accepted(drawn(draw) for _ in range(40)) if _small(made)]
        if not found:
            continue
        first = found[0]
        others = [made for made in found[1:] if made.size == first.size]
        programs = [first, *others[:1]]
        yield programs, [draw.randrange(len(programs)) for _ in range(draw.choice((2, 3)))]


def _small(made: Program) -> bool:
    """Return whether the program can be explored quickly."""
    length = sum(len(own.instructions) for own in made.ranks)
    return made.size < 4 and length <= 16


def report(number: int, seed: int) -> int:
    """Check all families and print the counts. Return 1 if anything can go wrong."""
    total = 0
    draw = random.Random(seed)
    families: dict[str, Iterator[tuple[list[Program], list[int]]]] = {
        f"{ranks} ranks, {count} transfers on {len(channels)} channels, {runs} runs": (
            ([made], [0] * runs) for made in accepted(exhaustive(ranks, count, channels))
        )
        for ranks, count, channels, runs in (
            (2, 1, "cd", 4),
            (2, 2, "cd", 3),
            (2, 3, "c", 2),
            (3, 1, "c", 3),
            (3, 2, "c", 2),
            (4, 1, "c", 2),
        )
    }
    random_ones = drawn_programs(draw)
    families[f"random, seed {seed}"] = (next(random_ones) for _ in range(number))
    for title, family in families.items():
        began, count = time.monotonic(), 0
        for programs, runs in family:
            count += 1
            if problem := wrong(programs, runs) or wrong(programs, runs, LENT):
                total += 1
                print(problem, runs, *(made.text() for made in programs), sep="\n  ")
        print(f"{title}: {count} programs, {total} wrong so far ({time.monotonic() - began:.0f} s)")
    return int(bool(total))
