"""Compares pairs of programs on the same ranks with brute force: every interleaving of their runs.

    python -m tests.daft.explore --pairs          # exhaustive families, then 5,000 random pairs

A `Small` program is as in `explore.py`; its ranks also read and write state and carry a symbolic
term of all they have read and received, so two results are equal only if they were computed in the
same way. `outcomes` returns every end that two runs can reach. `wrong` compares these ends with
`dtensor.daft.interference`: in one order on all ranks nothing hangs and the end is that of
sequential runs; the other order gives the same results exactly if the programs commute. `spoilt`
explores ranks that do not agree on the order, which the runtime must prevent.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dtensor.daft import (
    Call,
    Instruction,
    Program,
    ProgramError,
    Recv,
    Send,
    Wait,
    interference,
    verify,
)
from tests.daft.explore import B, Transfer, collective, drawn
from tests.daft.explore import exhaustive as transfers_alone
from tests.daft.programs import function, program

STATES = 2  # values of state on each rank
Step: TypeAlias = tuple[Literal["start", "wait", "read", "write", "set"], int]
"""Of transfer n; or of state n: read it, change it in place, or replace it."""
Lists: TypeAlias = tuple[tuple[Step, ...], ...]
Order: TypeAlias = tuple[int, ...]
"""The numbers of the runs in the order in which a rank has them."""
Tuples: TypeAlias = tuple[tuple[int, ...], ...]
HANGS = "hangs"

_terms: dict[tuple[object, ...], int] = {}


@dataclass(frozen=True, slots=True)
class Small:
    name: str
    transfers: tuple[Transfer, ...]
    lists: Lists


def built(small: Small) -> Program:
    """Return the program that the verifier sees. Every value is an output, so none is freed."""
    lists: list[list[Instruction]] = []
    made: list[list[str]] = []
    for rank, steps in enumerate(small.lists):
        items: list[Instruction] = []
        values: list[str] = []
        carried = "a"

        def call(fn: str, *inputs: str, output: str, values: list[str] = values) -> Call:
            values.append(output)
            return Call(fn, inputs, (output,))

        for number, (word, n) in enumerate(steps):
            state = f"s{n}"
            match word:
                case "start" | "wait":
                    own = small.transfers[n]
                    sends = own.kind == "send" and own.members[0] == rank
                    name = f"x{n}" if sends else f"v{n}"
                    if word == "wait":
                        items.append(Wait((name,)))
                        if not sends:
                            items.append(call("take", carried, name, output=f"a{number}"))
                            carried = f"a{number}"
                        continue
                    if sends or own.kind != "send":
                        items.append(call("copy", carried, output=f"x{n}"))
                    if sends:
                        items.append(Send(name, own.members[1], own.channel, B))
                    else:
                        values.append(name)
                        items.append(_receiving(own, f"x{n}", name))
                case "read":
                    items.append(call("take", carried, state, output=f"a{number}"))
                    carried = f"a{number}"
                case "write":
                    items.append(Call("change", (state, carried), (), (state,)))
                case "set":
                    items.append(Call("copy", (carried,), (state,)))
        lists.append(items)
        made.append(values)
    state = tuple(f"s{n}" for n in range(STATES))
    names = ("take", "copy", "change")
    made_program = program(
        *lists,
        functions=[function(name, "def forward(*x):\n    return ()") for name in names],
        inputs=[("a",) if items else () for items in lists],
        outputs=[tuple(values) for values in made],
        state=[state] * len(lists),
    )
    return replace(made_program, name=small.name)


def _receiving(own: Transfer, given: str, name: str) -> Instruction:
    if own.kind == "send":
        return Recv(name, own.members[0], own.channel, B)
    return collective(own, given, name)


def outcomes(
    runs: Sequence[Small], orders: Sequence[Order], buffered: bool, state: Tuples | None = None
) -> set[object]:
    """Return every reachable end of `runs`, in which rank r executes the runs `orders[r]`: the
    final term of each rank's run and the ranks' state, or `HANGS`."""
    ranks = range(len(orders))
    keys = sorted({(t.kind, t.members, t.channel) for run in runs for t in run.transfers})
    # by rank: (word, run, key, place in the key's queue) or (word, run, number of state, 0)
    lists: list[list[tuple[str, int, int, int]]] = []
    for rank in ranks:
        counts = [0] * len(keys)
        items: list[tuple[str, int, int, int]] = []
        for r in orders[rank]:
            places: dict[int, int] = {}
            for word, n in runs[r].lists[rank]:
                if word not in ("start", "wait"):
                    items.append((word, r, n, 0))
                    continue
                t = runs[r].transfers[n]
                key = keys.index((t.kind, t.members, t.channel))
                if word == "start":
                    places[n] = counts[key]
                    counts[key] += 1
                items.append((word, r, key, places[n]))
        lists.append(items)

    zeros = (0,) * len(keys)
    carried = tuple(tuple(_term("in", run.name, rank) for run in runs) for rank in ranks)
    if state is None:
        state = initial(len(orders))
    posted: tuple[Tuples, ...] = tuple(((),) * len(members) for _, members, _ in keys)
    begin = ((0,) * len(orders), carried, state, posted, zeros, zeros)
    seen, front, ends = {begin}, [begin], set[object]()
    while front:
        at, carried, state, posted, done, sent = front.pop()
        following = []
        for rank in ranks:
            if at[rank] == len(lists[rank]):
                continue
            word, run, n, place = lists[rank][at[rank]]
            own = carried[rank][run]
            moved, values, held, queue = _up(at, rank), carried, state, posted
            match word:
                case "start":
                    member = keys[n][1].index(rank)
                    queue = _put(posted, n, _put(posted[n], member, (*posted[n][member], own)))
                case "wait":
                    kind, members, _ = keys[n]
                    is_sender = kind == "send" and members[0] == rank
                    if (sent if buffered and is_sender else done)[n] <= place:
                        continue
                    if not is_sender:
                        givers = posted[n][:1] if kind == "send" else posted[n]
                        if kind == "shift":
                            givers = (posted[n][members.index(rank) - 1],)
                        got = _term("take", own, *(terms[place] for terms in givers))
                        values = _put(carried, rank, _put(carried[rank], run, got))
                case "read":
                    got = _term("take", own, state[rank][n])
                    values = _put(carried, rank, _put(carried[rank], run, got))
                case "write":
                    changed = _term("change", state[rank][n], own)
                    held = _put(state, rank, _put(state[rank], n, changed))
                case _:
                    held = _put(state, rank, _put(state[rank], n, _term("copy", own)))
            following.append((moved, values, held, queue, done, sent))
        for n, (kind, _, _) in enumerate(keys):
            if buffered and kind == "send" and len(posted[n][0]) > sent[n]:
                following.append((at, carried, state, posted, done, _up(sent, n)))
            ready = all(len(terms) > done[n] for terms in posted[n])
            if ready and (not buffered or kind != "send" or sent[n] > done[n]):
                following.append((at, carried, state, posted, _up(done, n), sent))
        if not following:
            ended = all(n == len(items) for n, items in zip(at, lists, strict=True))
            ends.add((carried, state) if ended else HANGS)
        for each in following:
            if each not in seen:
                seen.add(each)
                front.append(each)
    return ends


def initial(ranks: int) -> Tuples:
    return tuple(tuple(_term("state", rank, n) for n in range(STATES)) for rank in range(ranks))


def _term(*parts: object) -> int:
    return _terms.setdefault(parts, len(_terms))


def _up(counts: tuple[int, ...], which: int) -> tuple[int, ...]:
    return (*counts[:which], counts[which] + 1, *counts[which + 1 :])


def _put(values: tuple, which: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:which], value, *values[which + 1 :])


def in_turn(first: Small, second: Small) -> object:
    """Return the end of one run followed by the other, with nothing in flight in between. Each of
    `first` and `second` is sound alone, so the end is unique."""
    everyone = [(0,)] * len(first.lists)
    (one,) = outcomes([first], everyone, buffered=False)
    assert isinstance(one, tuple), first
    (other,) = outcomes([second], everyone, buffered=False, state=one[1])
    assert isinstance(other, tuple), second
    carried = tuple((*a, *b) for a, b in zip(one[0], other[0], strict=True))
    return carried, other[1]


def wrong(first: Small, second: Small) -> str | None:
    """Describe how the verdict on two sound programs is wrong; None if it is right."""
    ranks = len(first.lists)
    found = interference(built(first), built(second))
    expected = in_turn(first, second)
    for buffered in (False, True):
        ends = outcomes([first, second], [(0, 1)] * ranks, buffered)
        if ends != {expected}:
            return f"buffered={buffered}: {'hangs' if HANGS in ends else 'other values'}"
    other: object = in_turn(second, first)
    assert isinstance(other, tuple)
    swapped = (tuple((b, a) for a, b in other[0]), other[1])
    if found.commutes != (swapped == expected):
        return f"commutes: {found.commutes}, results are the same: {swapped == expected}"
    used = [{(t.kind, t.members, t.channel) for t in p.transfers} for p in (first, second)]
    if bool(found.channels) != bool(used[0] & used[1]):
        return f"channels: {found.channels}"
    return None


def spoilt(first: Small, second: Small) -> str | None:
    """Return the effect of rank 0 executing the runs in the opposite order: "hangs", or "other
    values" than either order gives on all ranks."""
    orders = [(1, 0), *([(0, 1)] * (len(first.lists) - 1))]
    ends = outcomes([first, second], orders, buffered=False)
    if HANGS in ends:
        return HANGS
    right = (outcomes([first, second], [o] * len(orders), False) for o in ((0, 1), (1, 0)))
    return None if any(ends == each for each in right) else "other values"


def sound(small: Small) -> bool:
    try:
        verify(built(small))
    except ProgramError:
        return False
    return True


# -- families --------------------------------------------------------------------------------------


def with_state() -> list[Small]:
    """Yield every program of one transfer between two ranks, each of which reads, changes or
    replaces its state before or after the transfer, or leaves it alone."""
    both = (0, 1)
    kinds = (
        Transfer("send", both, "c"),
        Transfer("send", both, "d"),
        Transfer("send", (1, 0), "c"),
        Transfer("reduce", both, "c"),
        Transfer("shift", both, "s"),
    )
    bare: tuple[Step, ...] = (("start", 0), ("wait", 0))
    words: tuple[Literal["read", "write", "set"], ...] = ("read", "write", "set")
    lists = [bare]
    for word in words:
        lists += [((word, 0), *bare), (*bare, (word, 0))]
    return [
        Small("", (kind,), (one, other))
        for kind in kinds
        for one, other in itertools.product(lists, repeat=2)
    ]


def without_state(channels: str = "c") -> list[Small]:
    """Yield every sound program of two transfers between two ranks."""
    return [
        small
        for transfers, orders in transfers_alone(2, 2, channels)
        if sound(small := Small("", transfers, _steps(orders)))
    ]


def pairs(family: Sequence[Small], every: int = 1) -> Iterator[tuple[Small, Small]]:
    """Yield each pair of programs of the family, including equal ones, or one pair in `every`."""
    for first, second in itertools.islice(itertools.product(family, repeat=2), 0, None, every):
        yield replace(first, name="A"), replace(second, name="B")


def drawn_pair(draw: random.Random) -> tuple[Small, Small]:
    """Return two random sound programs with state, each on some of 2 to 4 ranks."""
    ranks = draw.randint(2, 4)
    return _drawn("A", ranks, draw), _drawn("B", ranks, draw)


def _drawn(name: str, ranks: int, draw: random.Random) -> Small:
    while True:
        transfers, orders = drawn(draw)
        if len(orders) > ranks or len(transfers) > 3:
            continue
        # each program runs on its own subset of the cluster's ranks
        chosen = draw.sample(range(ranks), len(orders))
        moved = tuple(replace(t, members=tuple(chosen[r] for r in t.members)) for t in transfers)
        lists: list[list[Step]] = [[] for _ in range(ranks)]
        for rank, steps in zip(chosen, _steps(orders), strict=True):
            lists[rank] += steps
        for own in lists:
            for _ in range(draw.choice((0, 0, 1, 2))):
                word: Literal["read", "write", "set"] = draw.choice(("read", "write", "set"))
                own.insert(draw.randint(0, len(own)), (word, draw.randrange(STATES)))
        small = Small(name, moved, tuple(map(tuple, lists)))
        if sound(small):
            return small


def _steps(orders: Sequence[Sequence[tuple[bool, int]]]) -> Lists:
    return tuple(tuple(("wait" if w else "start", n) for w, n in order) for order in orders)


def report(number: int, seed: int) -> int:
    """Check all families and print the counts. Return 1 if there is a disagreement."""
    draw = random.Random(seed)
    families: dict[str, Iterator[tuple[Small, Small]]] = {
        "one transfer with state": pairs(with_state()),
        "two transfers": pairs(without_state()),
        f"random, seed {seed}": (drawn_pair(draw) for _ in range(number)),
    }
    total = 0
    for title, family in families.items():
        began, count = time.monotonic(), Counter[str]()
        for first, second in family:
            found = interference(built(first), built(second))
            count["all"] += 1
            count["commute"] += found.commutes
            count["independent"] += found.independent
            count[spoilt(first, second) or "harmless"] += 1
            problem = wrong(first, second)
            if problem:
                total += 1
                print(problem, first, second, sep="\n  ")
        print(
            f"{title}: {count['all']} pairs, {count['commute']} commute, {count['independent']} "
            f"share no rank; in one order {total} disagreements so far; if rank 0 has the other "
            f"order, {count[HANGS]} can hang, {count['other values']} give other values "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return int(bool(total))
