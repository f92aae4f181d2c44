"""Compares the verifier with runs of programs whose exchanges are sized by gathered counts.

    python -m tests.daft.explore --sized          # a family on two ranks, then random programs

A program has gathers of counts and exchanges of their members. Each rank starts and waits for them
in its own order, and names the gather that sizes an exchange. `fault` runs a program that may be
refused, on one engine a rank, in several orders and with other counts: it is wrong if a rank
receives other rows than its own counts promise. Both must agree on every program. In accepted
programs each call fails once: before the counts of a rank, or after them. No rank hangs, all
receive the promised numbers of rows, the run is undone, and the next run is right.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Commit,
    Instruction,
    Program,
    ProgramError,
    Sizes,
    Vote,
    Wait,
    verify,
)
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import WORD, Start
from dtensor.daft.run.engine import Engine
from dtensor.daft.run.transport import Begin, LocalTransport, Pending
from dtensor.daft.undo.failed_run import UndoneRun
from dtensor.daft.verification.pairing import pair, rehearse, wait_edges
from tests.daft.explore import Transfer, can_hang
from tests.daft.programs import function, program

NUM_EXPERTS = 4
VECTOR = Buffer((NUM_EXPERTS,), torch.int64)
ROWS = Buffer((1000,), torch.float32, bounded=True)
MAY_FAIL = """def forward(make, fails, *values):
    1 / (not fails)
    return make(*values)"""
SEEDS = range(6)


@dataclass(frozen=True, slots=True)
class Exchange:
    """How a rank sizes an exchange: by gather `by`, in the order of the group or `reversed`, with
    the `parts` of the group or rotated ones."""

    by: int
    reversed: bool = False
    rotated: bool = False


Step = tuple[bool, int]
"""(is it the wait?, number of the transfer)."""


@dataclass(frozen=True, slots=True)
class Small:
    """`transfers`: of kind "gather", "there" or "back". `sizes`: by (rank, exchange)."""

    transfers: tuple[Transfer, ...]
    orders: tuple[tuple[Step, ...], ...]
    sizes: Mapping[tuple[int, int], Exchange]


def parts_of(group: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(i, NUM_EXPERTS, len(group))) for i in range(len(group)))


def built(small: Small) -> Program:
    size = len(small.orders)
    lists: list[list[Instruction]] = []
    outputs: list[tuple[str, ...]] = []
    for rank, order in enumerate(small.orders):
        items: list[Instruction] = []
        for waits, n in order:
            own = small.transfers[n]
            group = own.members
            made = tuple(f"r{n}.{i}" for i in range(len(group)))
            if waits:
                items.append(Wait(made[:1]))
            elif own.kind == "gather":
                vectors = (VECTOR,), (VECTOR,) * len(group)
                gather = Collective(
                    *("all_gather", group, (f"v{n}",), made, *vectors, None, own.channel),
                    on_host=True,
                )
                items += [Call("may_fail", ("count", f"fails{n}", f"n{n}"), (f"v{n}",)), gather]
            else:
                how = small.sizes[rank, n]
                counts = tuple(f"r{how.by}.{i}" for i in range(len(group)))
                parts = parts_of(group)
                parts = (*parts[1:], parts[0]) if how.rotated else parts
                sent = tuple(f"s{n}.{i}" for i in range(len(group)))
                read = (f"v{how.by}",) if own.kind == "there" else counts
                sizes = Sizes(counts[:: -1 if how.reversed else 1], parts, own.kind == "back")
                buffers = (ROWS,) * len(group)
                items += [
                    Call("may_fail", (f"make{n}", f"fails{n}", *read), sent),
                    Collective(
                        *("all_to_all", group, sent, made, buffers, buffers, None, own.channel),
                        sizes=sizes,
                    ),
                ]
        every = tuple(range(size))
        agree = Collective("all_reduce", every, ("ok",), ("all",), (WORD,), (WORD,), "sum", "agree")
        items += [Vote("ok"), agree, Wait(("all",)), Commit("all")]
        lists.append(items)
        outputs.append(tuple(v for item in items for v in item.outputs))
    numbers = range(len(small.transfers))
    names = [f"{name}{n}" for name in ("n", "make", "fails") for n in numbers]
    inputs = [("count", *names)] * size
    return program(
        *lists, functions=[function("may_fail", MAY_FAIL)], inputs=inputs, outputs=outputs
    )


class Promised(LocalTransport):
    """Checks that what arrives has the lengths by which other transports receive it."""

    def begin(self, rank: int, start: Start) -> Begin:
        begin = super().begin(rank, start)
        return lambda values, rows=(): Checked(begin(values, rows), rows)


class Checked(Pending):
    def __init__(self, pending: Pending, rows: Sequence[int]) -> None:
        self.pending, self.rows = pending, rows

    def wait(self) -> tuple[torch.Tensor, ...]:
        received = self.pending.wait()
        assert not self.rows or list(map(len, received)) == list(self.rows)
        return received


class Run:
    """Engines of all ranks over one transport."""

    def __init__(self, small: Small) -> None:
        self.small = small
        self.program = built(small)
        ranks = range(self.program.size)
        self.lists = [
            [(r, i) for i in range(len(own.instructions))]
            for r, own in enumerate(self.program.ranks)
        ]
        self.edges = wait_edges(self.program, pair(self.program))
        transport = Promised()
        parts = host_programs(self.program, [(rank,) for rank in ranks], self.lists)
        self.engines = [Engine(part, {}, transport) for part in parts]

    def wrong(self, seed: int, failing: tuple[int, int] | None = None) -> str | None:
        """Run once. ``failing``: (rank, transfer) of the call that fails. Describe what is wrong,
        None if nothing is."""
        draw, ranks = random.Random(seed), range(self.program.size)
        for rank in ranks:
            fed: dict[str, object] = {"count": lambda vector: (vector,)}
            for n, transfer in enumerate(self.small.transfers):
                fed[f"fails{n}"] = (rank, n) == failing
                counts = [draw.choice((0, draw.randint(1, 99))) for _ in range(NUM_EXPERTS)]
                fed[f"n{n}"] = torch.tensor(counts)
                fed[f"make{n}"] = _maker(transfer, rank)
            self.engines[rank].begin({rank: fed})
        for rank, index in rehearse(self.program, self.lists, self.edges, 1 + seed):
            self.engines[rank].step(index)
        for rank in ranks:
            if problem := self._wrong_rows(rank, failed=failing is not None):
                return problem
        undone = {isinstance(self.engines[r].finish((r,)), UndoneRun) for r in ranks}
        return None if undone == {failing is not None} else f"undone: {undone}"

    def _wrong_rows(self, rank: int, *, failed: bool) -> str | None:
        values: Any = self.engines[rank].values
        for (_, n), how in [each for each in self.small.sizes.items() if each[0][0] == rank]:
            own = self.small.transfers[n]
            counts = [values[rank, f"r{how.by}.{i}"].tolist() for i in range(len(own.members))]
            lengths = _lengths(own, counts, own.members.index(rank))
            for i, (member, promised) in enumerate(zip(own.members, lengths, strict=True)):
                received = values[rank, f"r{n}.{i}"]
                right = torch.full((promised,), 10.0 * member + rank)
                if received.shape != right.shape:
                    return f"rank {rank} receives {len(received)} rows for {promised} promised"
                if not (received.equal(right) or (failed and received.eq(0).all())):
                    return f"rank {rank} receives other rows"
        return None


def _lengths(transfer: Transfer, counts: Sequence[Sequence[int]], me: int) -> list[int]:
    """Return the number of rows that a member receives from each member."""
    parts = parts_of(transfer.members)
    if transfer.kind == "back":
        return [sum(counts[me][p] for p in part) for part in parts]
    return [sum(own[p] for p in parts[me]) for own in counts]


def _maker(transfer: Transfer, rank: int) -> Any:
    """Return a function that makes the pieces of a rank from counts: from its own if they go
    there, from all members' if they go back."""

    def make(*counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = parts_of(transfer.members)
        if transfer.kind == "back":
            me = transfer.members.index(rank)
            numbers = [int(own[list(parts[me])].sum()) for own in counts]
        else:
            numbers = [int(counts[0][list(part)].sum()) for part in parts]
        pairs = zip(transfer.members, numbers, strict=True)
        return tuple(torch.full((number,), 10.0 * rank + to) for to, number in pairs)

    return make


def hangs(small: Small) -> bool:
    kinds = [Transfer("reduce", t.members, t.channel) for t in small.transfers]
    return can_hang(kinds, small.orders, buffered=False)


def fault(small: Small) -> str | None:
    """Describe how a program that cannot hang goes wrong, None if it does not."""
    run = Run(small)
    for seed in SEEDS:
        try:
            if problem := run.wrong(seed):
                return problem
        except Exception as error:  # whatever a program does that is not verified
            return f"{type(error).__name__}: {error}"
    return None


tried: Counter[str] = Counter()


def disagreement(small: Small) -> str | None:
    """Describe how the verifier's answer is wrong, or what goes wrong in an accepted program of
    which a call fails; None if nothing is."""
    try:
        verify(built(small))
        refused = ""
    except ProgramError as error:
        refused = str(error)
    problem = "it can hang" if hangs(small) else fault(small)
    if bool(refused) != bool(problem):
        return f"refused, and right: {refused}" if refused else f"accepted, and {problem}"
    tried["refused" if refused else "accepted"] += 1
    if refused:
        return None
    run = Run(small)
    for seed, (rank, n) in enumerate(
        (rank, n) for n, transfer in enumerate(small.transfers) for rank in transfer.members
    ):
        tried["failing calls"] += 1
        for failing in ((rank, n), None):
            if found := run.wrong(seed, failing):
                return f"call {(rank, n)} fails, then {found}"
    return None


# -- programs --------------------------------------------------------------------------------------


def exhaustive(channels: str = "cd") -> Iterator[Small]:
    """Yield every program of two ranks with two gathers and an exchange that either sizes."""
    for channel in channels:
        transfers = (
            *(Transfer("gather", (0, 1), "c"), Transfer("gather", (0, 1), "c")),
            Transfer("there", (0, 1), channel),
        )
        steps = [(waits, n) for n in range(3) for waits in (False, True)]
        orders = [
            order
            for order in itertools.permutations(steps)
            if all(order.index((False, n)) < order.index((True, n)) for n in range(3))
        ]
        for first, second in itertools.product(itertools.product(orders, range(2)), repeat=2):
            sizes = {(0, 2): Exchange(first[1]), (1, 2): Exchange(second[1])}
            yield Small(transfers, (first[0], second[0]), sizes)


def drawn(draw: random.Random) -> Small:
    """Return a random program of 2 or 3 ranks, mostly sound."""
    ranks = draw.randint(2, 3)
    groups = [g for n in range(2, ranks + 1) for g in itertools.combinations(range(ranks), n)]
    transfers: list[Transfer] = []
    sizes: dict[tuple[int, int], Exchange] = {}
    spoils = draw.random() < 0.5
    for n in range(draw.randint(2, 5)):
        group = draw.choice(groups)
        gathers = [i for i, t in enumerate(transfers) if t.kind == "gather" and t.members == group]
        if not gathers or draw.random() < 0.3:
            transfers.append(Transfer("gather", group, draw.choice("cd")))
            continue
        transfers.append(Transfer(draw.choice(("there", "back")), group, draw.choice("cd")))
        by = draw.choice(gathers)
        for rank in group:
            strange = spoils and draw.random() < 0.2
            others = [
                i
                for i, t in enumerate(transfers)
                if t.kind == "gather" and rank in t.members and len(t.members) == len(group)
            ]
            kinds = [Exchange(by, reversed=True), *map(Exchange, others)]
            if rank == group[0]:  # parts that all members rotate are sound
                kinds.append(Exchange(by, rotated=True))
            sizes[rank, n] = draw.choice(kinds) if strange else Exchange(by)
    orders: list[tuple[Step, ...]] = []
    for rank in range(ranks):
        own = [n for n, t in enumerate(transfers) if rank in t.members]
        if spoils and len(own) > 1 and draw.random() < 0.2:
            i = draw.randrange(len(own) - 1)
            own[i : i + 2] = own[i + 1], own[i]
        order: list[Step] = []
        waiting: list[int] = []
        for n in own:
            needed = sizes[rank, n].by if (rank, n) in sizes else -1
            if needed in waiting and not (spoils and draw.random() < 0.1):
                order.append((True, needed))
                waiting.remove(needed)
            order.append((False, n))
            waiting.append(n)
            while waiting and draw.random() < 0.4:
                order.append((True, waiting.pop(draw.randrange(len(waiting)))))
        draw.shuffle(waiting)
        orders.append((*order, *((True, n) for n in waiting)))
    return Small(tuple(transfers), tuple(orders), sizes)


def report(number_drawn: int, seed: int) -> int:
    draw, wrong = random.Random(seed), 0
    families = {
        "two gathers and an exchange on two ranks": itertools.islice(exhaustive(), 0, None, 7),
        f"random, seed {seed}": (drawn(draw) for _ in range(number_drawn)),
    }
    for name, family in families.items():
        began = time.monotonic()
        tried.clear()
        for small in family:
            if problem := disagreement(small):
                wrong += 1
                print(problem, small, sep="\n  ")
        counts = ", ".join(f"{number:,} {what}" for what, number in sorted(tried.items()))
        seconds = time.monotonic() - began
        print(f"{name}: {counts}, {wrong} disagreements so far ({seconds:.0f} s)", flush=True)
    return int(bool(wrong))
