"""Compares sequences of runs, each on some of the ranks, with brute force: every interleaving.

    python -m tests.daft.explore --sequences      # exhaustive families, then 100,000 random ones

Programs are those of `pairs.py`. A run goes only to the ranks of its program, and each rank
executes its runs in the order of submission. `wrong` explores all reachable states, rendezvous and
buffered, and describes violations of docs/design/0019-runs-on-their-own-ranks.md: nothing hangs,
and the only end is that of sequential runs; a run ends with the same values if only its causal
past is executed before it. `spoilt` explores what the runtime must prevent: one rank with two runs
in another order, or a run that does not reach one of its ranks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.daft.explore import Transfer
from tests.daft.pairs import HANGS, Order, Small, Step, _drawn, initial, outcomes

Runs = Sequence[Small]


def members(run: Small) -> frozenset[int]:
    return frozenset(rank for rank, own in enumerate(run.lists) if own)


def orders(runs: Runs, chosen: Sequence[int]) -> list[Order]:
    """Return, for each rank, the chosen runs in which it takes part."""
    return [
        tuple(n for n in chosen if rank in members(runs[n])) for rank in range(len(runs[0].lists))
    ]


def causal_past(runs: Runs, last: int) -> list[int]:
    """Return a run and the earlier runs that share a rank with it, directly or through others."""
    past, ranks = [last], set(members(runs[last]))
    for n in reversed(range(last)):
        if not ranks.isdisjoint(members(runs[n])):
            past.append(n)
            ranks |= members(runs[n])
    return past[::-1]


def in_turn(runs: Runs, chosen: Sequence[int]) -> object:
    """Return the end of the chosen runs executed one after the other, with nothing in flight in
    between."""
    ranks = len(runs[0].lists)
    (start,) = outcomes(runs, [()] * ranks, buffered=False)
    assert isinstance(start, tuple)
    carried, state = [list(own) for own in start[0]], initial(ranks)
    for n in chosen:
        (end,) = outcomes([runs[n]], orders([runs[n]], [0]), buffered=False, state=state)
        assert isinstance(end, tuple), runs[n]
        for rank in range(ranks):
            carried[rank][n] = end[0][rank][0]
        state = end[1]
    return tuple(map(tuple, carried)), state


def wrong(runs: Runs) -> str | None:
    """Describe how the runs violate the theorem; None if they do not."""
    everything = range(len(runs))
    whole = in_turn(runs, everything)
    for buffered in (False, True):
        ends = outcomes(runs, orders(runs, everything), buffered)
        if ends != {whole}:
            return f"buffered={buffered}: {'hangs' if HANGS in ends else 'other values'}"
    assert isinstance(whole, tuple)
    for last in everything:
        past = causal_past(runs, last)
        if len(past) == last + 1:
            continue  # explored above, except for later runs
        (end,) = ends = outcomes(runs, orders(runs, past), buffered=False)
        if ends == {HANGS}:
            return f"run {last} needs more than its causal past, {past}"
        assert isinstance(end, tuple)
        if any(end[0][rank][last] != whole[0][rank][last] for rank in members(runs[last])):
            return f"run {last} has other values with its causal past alone, {past}"
    return None


def spoilt(runs: Runs, draw: random.Random) -> tuple[str, str] | None:
    """Return the effects of two faults: one rank executes two runs in the opposite order, and a
    run with transfers misses one of its ranks. None if no runs fit."""
    right = orders(runs, range(len(runs)))
    twice = [
        (rank, i)
        for rank, own in enumerate(right)
        for i, (a, b) in enumerate(itertools.pairwise(own))
        if len(members(runs[a]) & members(runs[b])) > 1
    ]
    shared = [
        (rank, n)
        for rank, own in enumerate(right)
        for n in own
        if any(rank in transfer.members for transfer in runs[n].transfers)
    ]
    if not shared or not twice:
        return None
    ends = outcomes(runs, right, buffered=False)
    rank, place = draw.choice(twice)
    swapped, own = list(right), list(right[rank])
    own[place], own[place + 1] = own[place + 1], own[place]
    swapped[rank] = tuple(own)
    rank, n = draw.choice(shared)
    lost = list(right)
    lost[rank] = tuple(other for other in right[rank] if other != n)
    return _against(ends, outcomes(runs, swapped, False)), _against(
        ends, outcomes(runs, lost, False)
    )


def _against(right: set[object], ends: set[object]) -> str:
    return HANGS if HANGS in ends else "the same" if ends == right else "other values"


# -- families --------------------------------------------------------------------------------------


def kinds(ranks: int) -> list[Small]:
    """Return the programs: a transfer between two ranks, a sum over two or more, and a rank alone;
    each member reads its state and replaces it at the end."""
    groups = [g for n in range(2, ranks + 1) for g in itertools.combinations(range(ranks), n)]
    transfers = [
        *(Transfer("send", pair, "c") for pair in itertools.permutations(range(ranks), 2)),
        *(Transfer("reduce", group, "c") for group in groups),
    ]
    meets: tuple[Step, ...] = (("read", 0), ("start", 0), ("wait", 0), ("set", 0))
    alone: tuple[Step, ...] = (("read", 0), ("write", 0))
    found = [
        Small("", (t,), tuple(meets if r in t.members else () for r in range(ranks)))
        for t in transfers
    ]
    found += [
        Small("", (), tuple(alone if r == one else () for r in range(ranks)))
        for one in range(ranks)
    ]
    return found


def exhaustive(ranks: int, length: int, every: int = 1) -> Iterator[list[Small]]:
    """Yield every sequence of `length` runs of these programs, or one in `every`."""
    chosen = itertools.product(kinds(ranks), repeat=length)
    for runs in itertools.islice(chosen, 0, None, every):
        yield named(runs)


def named(runs: Runs) -> list[Small]:
    return [replace(run, name=f"run {n}") for n, run in enumerate(runs)]


class Drawn:
    """Random sequences of 2 to 4 runs of sound random programs with state and up to three
    transfers, each on some of four ranks."""

    def __init__(self, draw: random.Random, programs: int = 300) -> None:
        self.draw = draw
        pool = (_drawn("", 4, draw) for _ in itertools.count())
        small = (each for each in pool if sum(map(len, each.lists)) <= 9)
        self.programs = [*itertools.islice(small, programs), *kinds(4)]

    def sequence(self) -> list[Small]:
        while True:
            runs = [self.draw.choice(self.programs) for _ in range(self.draw.randint(2, 4))]
            if sum(len(own) for run in runs for own in run.lists) <= 22:
                return named(runs)


def report(number: int, seed: int) -> int:
    """Check all families and print the counts. Return 1 if there is a disagreement."""
    drawn, draw = Drawn(random.Random(seed)), random.Random(seed)
    families: dict[str, Iterator[list[Small]]] = {
        "3 runs on 2 ranks": exhaustive(2, 3),
        "4 runs on 2 ranks": exhaustive(2, 4),
        "3 runs on 3 ranks": exhaustive(3, 3),
        "4 runs on 3 ranks": exhaustive(3, 4),
        f"random, 2 to 4 runs on 4 ranks, seed {seed}": (drawn.sequence() for _ in range(number)),
    }
    total = 0
    for title, family in families.items():
        began, count = time.monotonic(), Counter[str]()
        for runs in family:
            count["sequences"] += 1
            everyone = frozenset(range(len(runs[0].lists)))
            count["with a run on some ranks"] += any(members(run) != everyone for run in runs)
            apart = any(len(causal_past(runs, n)) <= n for n in range(len(runs)))
            count["with a run that another before it does not hold up"] += apart
            # one random sequence in ten: this takes as long as all other checks
            tried = not title.startswith("random") or count["sequences"] % 10 == 0
            if tried and (found := spoilt(runs, draw)) is not None:
                count[f"with two runs in the other order on one rank: {found[0]}"] += 1
                count[f"with a run that misses one of its ranks: {found[1]}"] += 1
            if problem := wrong(runs):
                total += 1
                print(problem, *runs, sep="\n  ")
        seconds = time.monotonic() - began
        print(f"{title}: {total} disagreements so far ({seconds:.0f} s)", flush=True)
        print(*(f"  {number} {what}" for what, number in count.items()), sep="\n", flush=True)
    return int(bool(total))
