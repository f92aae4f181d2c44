"""Compares the commit point with brute force: every interleaving, with a failure at any call.

    python -m tests.daft.explore --undo           # exhaustive families, then 1,000 random programs

The ranks of a program call functions that may fail, vote, reduce votes, commit and write state, in
any order, between transfers. `torn` explores all reachable states for every set of failing calls
and returns whether an end is torn: only some ranks have written, or a rank has written though a
call failed. Failures after a rank's commit point are ignored. The verifier follows one order
without failures; both must agree on every program. `cuts.py` runs real workers, whose failed runs
must not affect the next run.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtensor.daft import (
    Call,
    Collective,
    Commit,
    Free,
    Function,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    Vote,
    Wait,
    verify,
)
from dtensor.daft.ir.instructions import WORD
from tests.daft.explore import Transfer, can_hang, collective, drawn
from tests.daft.programs import function, program

# -- of clusters -----------------------------------------------------------------------------------

CHECKED = Function(
    name="checked",
    source="def forward(x):\n    1 / x\n    return (x + 1,)",
    lines=(None, "net.py:2: 1 / x", None),
)
ADD = function("add", "def forward(w, y):\n    w.add_(y)\n    return ()")
NOTED = function("noted", "def forward(w, n):\n    w.fill_(n)\n    return ()")
AGREE = [
    Vote("v"),
    Collective("all_reduce", (0, 1), ("v",), ("s",), (WORD,), (WORD,), "sum", "agree"),
    Wait(("s",)),
    Commit("s"),
    Free(("v", "s")),
]

# -- against brute force ---------------------------------------------------------------------------

Step = tuple[str, int]
"""start or wait, of transfer n; call (the n-th that may fail), vote, commit, write."""
Lists = tuple[tuple[Step, ...], ...]
State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple["Rank", ...]]


@dataclass(frozen=True, slots=True)
class Small:
    transfers: tuple[Transfer, ...]
    lists: Lists


@dataclass(frozen=True, slots=True)
class Rank:
    """The state of a rank: whether it calls nothing any more, the word that it would commit on,
    the inputs of its reductions, and how often it wrote."""

    poisoned: bool = False
    word: int = 0
    given: tuple[tuple[int, int], ...] = ()
    writes: int = 0


def built(small: Small) -> Program:
    """Return the program. A reduction takes the last word of a rank: its vote, or a sum that it
    waited for."""
    lists: list[list[Instruction]] = []
    made: list[tuple[str, ...]] = []
    for rank, steps in enumerate(small.lists):
        items: list[Instruction] = []
        outputs: list[str] = []
        word = "x"
        for what, n in steps:
            match what:
                case "start" | "wait":
                    own, name = small.transfers[n], f"v{n}"
                    sends = own.kind == "send" and own.members[0] == rank
                    if what == "wait":
                        items.append(Wait((f"x{n}" if sends else name,)))
                        word = name if own.kind == "reduce" else word
                    elif sends:
                        items.append(Send(f"x{n}", own.members[1], own.channel, WORD))
                    elif own.kind == "send":
                        items.append(Recv(name, own.members[0], own.channel, WORD))
                    else:
                        items.append(collective(own, word, name, WORD))
                    if what == "start" and not sends:
                        outputs.append(name)
                case "call":
                    items.append(Call("may_fail", (f"c{n}",), ()))
                case "vote":
                    items.append(Vote("k"))
                    outputs.append("k")
                    word = "k"
                case "commit":
                    items.append(Commit(word))
                case _:
                    items.append(Call("write", ("s",), (), ("s",)))
        lists.append(items)
        made.append(tuple(outputs))
    fed = ("x", *(f"x{n}" for n in range(len(small.transfers))), "c0", "c1")
    return program(
        *lists,
        functions=[
            function("may_fail", "def forward(fails):\n    1 / (not fails)\n    return ()"),
            function("write", "def forward(s):\n    s.add_(1)\n    return ()"),
        ],
        inputs=[fed] * len(lists),
        outputs=made,
        state=[("s",)] * len(lists),
    )


tried: Counter[str] = Counter()
"""How many sets of failing calls were explored, and states of interleavings."""

Failing = frozenset[tuple[int, int]]
"""(rank, n) of the calls that fail."""


def may_fail(small: Small) -> list[tuple[int, int]]:
    """Return the calls before their rank's commit point."""
    found = []
    for rank, steps in enumerate(small.lists):
        for what, n in steps:
            if what == "commit":
                break
            if what == "call":
                found.append((rank, n))
    return found


def ends(small: Small, failing: Failing, buffered: bool) -> set[tuple[int, ...]]:
    """Return how often each rank has written, for every reachable end."""
    ranks = range(len(small.lists))
    keys = sorted({(t.kind, t.members, t.channel) for t in small.transfers})
    index = {key: i for i, key in enumerate(keys)}
    where: list[dict[int, tuple[int, int]]] = []  # by rank and transfer: key, place in its queue
    for steps in small.lists:
        counts = [0] * len(keys)
        places: dict[int, tuple[int, int]] = {}
        for what, n in steps:
            if what == "start":
                t = small.transfers[n]
                key = index[t.kind, t.members, t.channel]
                places[n] = key, counts[key]
                counts[key] += 1
        where.append(places)

    def started(rank: int, at: int, key: int) -> int:
        return sum(w == "start" and where[rank][n][0] == key for w, n in small.lists[rank][:at])

    def summed(state: State, rank: int, n: int) -> int:
        key, place = where[rank][n]
        total = 0
        for member in keys[key][1]:
            same = next(m for m, found in where[member].items() if found == (key, place))
            total += dict(state[3][member].given)[same]
        return total

    def step(state: State, rank: int) -> State | None:
        at, done, sent, known = state
        what, n = small.lists[rank][at[rank]]
        me = known[rank]
        if what == "wait":
            key, place = where[rank][n]
            sender = keys[key][0] == "send" and keys[key][1][0] == rank
            if (sent if buffered and sender else done)[key] <= place:
                return None
            if keys[key][0] == "reduce":
                me = Rank(me.poisoned, summed(state, rank, n), me.given, me.writes)
        elif what == "start":
            me = Rank(me.poisoned, me.word, (*me.given, (n, me.word)), me.writes)
        elif what == "call":
            me = Rank(me.poisoned or (rank, n) in failing, me.word, me.given, me.writes)
        elif what == "vote":
            me = Rank(me.poisoned, int(me.poisoned), me.given, me.writes)
        elif what == "commit":
            me = Rank(me.poisoned or me.word > 0, me.word, me.given, me.writes)
        else:
            me = Rank(me.poisoned, me.word, me.given, me.writes + (not me.poisoned))
        return (_with(at, rank, at[rank] + 1), done, sent, _with(known, rank, me))

    zeros = (0,) * len(keys)
    first: State = ((0,) * len(ranks), zeros, zeros, (Rank(),) * len(ranks))
    seen, front, found = {first}, [first], set()
    while front:
        state = front.pop()
        at, done, sent, known = state
        if all(at[r] == len(small.lists[r]) for r in ranks):
            found.add(tuple(rank.writes for rank in known))
            continue
        following: list[State] = []
        for rank in ranks:
            if at[rank] < len(small.lists[rank]):
                after = step(state, rank)
                following += [] if after is None else [after]
        for i, (kind, members, _) in enumerate(keys):
            if buffered and kind == "send" and started(members[0], at[members[0]], i) > sent[i]:
                following.append((at, done, _with(sent, i, sent[i] + 1), known))
            ready = all(started(r, at[r], i) > done[i] for r in members)
            if ready and (not buffered or kind != "send" or sent[i] > done[i]):
                following.append((at, _with(done, i, done[i] + 1), sent, known))
        assert following, "it hangs"
        for after in following:
            if after not in seen:
                seen.add(after)
                front.append(after)
    tried["explored"] += 1
    tried["states"] += len(seen)
    return found


def _with(items: tuple, at: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:at], item, *items[at + 1 :])


def torn(small: Small) -> Failing | None:
    """Return failing calls after which only some ranks write, or any rank writes although a call
    failed; None if there are none. Of more than four calls, one, two, or all fail."""
    calls = may_fail(small)
    whole = (1,) * len(small.lists)
    none = (0,) * len(small.lists)
    for count in sorted({0, 1, 2, len(calls)} & set(range(len(calls) + 1))):
        for failing in map(frozenset, itertools.combinations(calls, count)):
            for buffered in (False, True):
                if ends(small, failing, buffered) != {none if failing else whole}:
                    return failing
    return None


def hangs(small: Small) -> bool:
    orders = tuple(
        tuple((what == "wait", n) for what, n in steps if what in ("start", "wait"))
        for steps in small.lists
    )
    return can_hang(small.transfers, orders, buffered=False)


def accepted(small: Small) -> bool:
    try:
        verify(built(small))
    except ProgramError:
        return False
    return True


def disagreement(small: Small) -> str | None:
    """Describe how the verifier's answer for a program that cannot hang is wrong; None if it is
    right."""
    failing = torn(small)
    if accepted(small) == (failing is None):
        return None
    return "refused, and never torn" if failing is None else f"torn where {sorted(failing)} fail"


# -- programs --------------------------------------------------------------------------------------


def _lists(own: Sequence[int], more: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """Yield every order of starts and waits of these transfers, and of ``more``, after a call."""
    steps: list[Step] = [(what, n) for n in own for what in ("start", "wait")]
    for order in itertools.permutations([*steps, *more]):
        at = {step: i for i, step in enumerate(order)}
        waits = all(at["start", n] < at["wait", n] for n in own)
        votes = ("vote", 0) not in at or ("commit", 0) not in at or at["vote", 0] < at["commit", 0]
        if waits and votes:
            yield (("call", 0), *order)


def exhaustive(transfers: Sequence[Transfer], more: Sequence[Sequence[Step]]) -> Iterator[Small]:
    """Every program with these transfers, and on rank r ``more[r]``, that cannot hang."""
    own = [[n for n, t in enumerate(transfers) if rank in t.members] for rank in range(len(more))]
    choices = [tuple(_lists(*each)) for each in zip(own, more, strict=True)]
    for lists in itertools.product(*choices):
        small = Small(tuple(transfers), lists)
        if not hangs(small):
            yield small


VOTE, COMMIT, WRITE, AGAIN = ("vote", 0), ("commit", 0), ("write", 0), ("call", 1)
BOTH = Transfer("reduce", (0, 1), "c")
FAMILIES: dict[str, tuple[list[Transfer], list[list[Step]]]] = {
    "a sum": ([BOTH], [[VOTE, COMMIT, WRITE]] * 2),
    "a sum, another call": ([BOTH], [[VOTE, COMMIT, WRITE, AGAIN], [VOTE, COMMIT, WRITE]]),
    "a sum, no commit on a rank": ([BOTH], [[VOTE, WRITE], [VOTE, COMMIT, WRITE]]),
    "a sum, no vote of a rank": ([BOTH], [[COMMIT, WRITE], [VOTE, COMMIT, WRITE]]),
    "a send": ([Transfer("send", (0, 1), "c")], [[VOTE, COMMIT, WRITE]] * 2),
    "a shift": ([Transfer("shift", (0, 1), "s")], [[VOTE, COMMIT, WRITE]] * 2),
}


def random_program(draw: random.Random) -> Small:
    """Return a program of 2 or 3 ranks with up to 4 transfers, sound except for moved steps, if
    any."""
    while True:
        transfers, orders = drawn(draw)
        ranks = len(orders)
        if ranks > 3 or len(transfers) > 3:
            continue
        everyone = Transfer("reduce", tuple(range(ranks)), "e")
        last = len(transfers)
        lists = []
        for order in orders:
            steps: list[Step] = [("wait" if waits else "start", n) for waits, n in order]
            for _ in range(draw.randint(0, 1)):
                steps.insert(draw.randint(0, len(steps)), AGAIN)
            end = [VOTE, ("start", last), ("wait", last), COMMIT, WRITE]
            lists.append([("call", 0), *steps, *end])
        for _ in range(draw.randint(0, 2)):
            steps = draw.choice(lists)
            step = steps.pop(draw.randrange(1, len(steps)))
            steps.insert(draw.randint(1, len(steps)), step)
        small = Small((*transfers, everyone), tuple(map(tuple, lists)))
        if _in_order(small) and not hangs(small):
            return small


def _in_order(small: Small) -> bool:
    """Return whether waits follow their starts, and commit points follow votes."""
    for steps in small.lists:
        at = {step: i for i, step in enumerate(steps)}
        if at[VOTE] > at[COMMIT]:
            return False
        if any(at["start", n] > at["wait", n] for what, n in steps if what == "wait"):
            return False
    return True


def report(number_drawn: int, seed: int) -> int:
    wrong, draw = 0, random.Random(seed)
    families = {name: exhaustive(*family) for name, family in FAMILIES.items()}
    families[f"random, seed {seed}"] = (random_program(draw) for _ in range(number_drawn))
    for name, family in families.items():
        began, count = time.monotonic(), Counter[bool]()
        for small in family:
            if problem := disagreement(small):
                wrong += 1
                print(problem, small, sep="\n  ")
            count[accepted(small)] += 1
        text = f"{name}: {count.total()} programs, {count[True]} accepted, {wrong} disagreements"
        print(f"{text} so far ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{tried['explored']:,} sets of failing calls, {tried['states']:,} states")
    return int(bool(wrong))
